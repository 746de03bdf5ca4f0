"""The commands that look into finished runs: `quality`, `plot`, `report` and `export`."""

from inspect import getdoc
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer import Argument, Option

from fedcli.cli import options
from fedcli.cli.printing import print_or_write, print_table, try_write
from fedcli.errors import UserError, needed
from fedcli.figures import CHARTS, find_chart
from fedcli.userfiles import is_from_file, short_name


def quality(
    runs: options.Runs,
    client: options.Client = None,
    clients: Annotated[bool, Option("--clients", help="Those of clients after one more round.")] = False,
    files: options.Code = None,
) -> None:
    """Measure how well the features of finished runs keep the classes apart, and keep the features for figures.

    NMI after K-means and silhouette, of the last round's global model on at most 2,000 test images.
    They are written into the records, the features beside them; 'fedcli plot --kind tsne' draws these.
    With --client, of that client's own model; where the images are of several domains, of each domain apart too.
    With --clients, of the features of one more round's clients together; 'fedcli plot --kind clients' draws these.
    """
    from fedcli.figures import quality

    if clients and client is not None:
        raise UserError(f"--clients is for runs with a global model (got --client {client} too); leave one out.")
    finished, others = quality.find_runs(runs)
    rows, code = [], files or ()
    for folder in finished:
        with Console(stderr=True).status(escape(str(folder))):
            measured = (
                quality.add_clients_quality(folder, code) if clients else quality.add_quality(folder, client, code)
            )
        nmi, silhouette, images = (measured["clients_" * clients + key] for key in ("nmi", "silhouette", "examples"))
        rows.append((f"{nmi:.3f}", f"{silhouette:.3f}", images, folder))
    print_table(("NMI", "Silhouette", "Images", "Run"), rows)
    if others:
        typer.echo(f"unfinished, left out: {', '.join(map(str, others))}")


def plot(
    runs: options.Runs,
    kind: Annotated[str, Option(help="What to draw, see above; or your own, ./file.py:NAME.")] = "curves",
    out: Annotated[
        Path | None, Option(help="File to write: .pdf, .svg, or .png, which writes a PDF too; by default KIND.png.")
    ] = None,
    x: Annotated[str, Option("--x", help="What curves stand over: round, floats sent up, or seconds.")] = "round",
    method: Annotated[list[str] | None, Option(help="Only runs of this method; or your file that they need.")] = None,
    dataset: options.Datasets = None,
    label: options.Labels = None,
    title: Annotated[str | None, Option(help="Title of the figure; what the runs share if not given.")] = None,
) -> None:
    """Draw a figure of runs; of those that differ only in the seed, a line with a band, or the first one.

    Your own is a function of the runs' records that returns a matplotlib Figure.
    """
    from fedcli.figures import plots
    from fedcli.results import boards, frame

    chart = find_chart(kind)
    files = [text for text in method or () if is_from_file(text)]
    names = [text for text in method or () if text not in files]
    if kind != "curves" and x != "round":
        raise UserError(f"--x is for learning curves (got --x {x} with --kind {kind}); leave it out.")
    given: list[Any] = [runs, files] if chart.needs == "models" else [runs]
    if chart.needs == "records":
        given = [boards.select(frame.find_records(runs, label or ()), names, dataset or ())]
    elif chosen := names or dataset or label:
        raise UserError(f"--kind {kind} draws the folders that it is given (got {chosen[0]}); name fewer folders.")
    if kind == "curves":
        given.append(x)

    def draw() -> Any:
        figure = chart.draw(*given)
        if title is not None:
            plots.write_title(figure, title)
        return figure

    out = out or Path(f"{short_name(kind)}.png")
    with Console(stderr=True).status(escape(kind)):
        written = try_write(out, lambda: plots.write(out, draw))
    typer.echo(" and ".join(map(str, written)))


plot.__doc__ = getdoc(plot) + "".join(f"\n\n{name}: {chart.help}." for name, chart in CHARTS.items())


def report(
    runs: options.Runs,
    out: Annotated[Path, Option(help="File to write.")] = Path("report.html"),
    method: options.Methods = None,
    dataset: options.Datasets = None,
    label: options.Labels = None,
    title: Annotated[str, Option(help="Title of the page.")] = "Runs",
) -> None:
    """Write a page to look at: one HTML file that needs no network.

    Tables to sort, curves with methods to switch on and off, costs, partitions and commands, by protocol and data set.
    A path at which no run is gets a line.
    """
    needed("bokeh", "the report", "report")
    from fedcli.figures import report as pages
    from fedcli.results import boards, frame

    missing = [path for path in runs if not path.is_file() and next(path.rglob("record.json"), None) is None]
    if len(missing) == len(runs):
        raise UserError(f"there is no run in '{missing[0]}' (got no record.json); give run folders.")
    for path in missing:
        typer.echo(f"warning: there is no run in '{path}'; it is left out.", err=True)
    if label and len(label) == len(runs):
        label = [name for name, path in zip(label, runs, strict=True) if path not in missing]
    records = frame.find_records([path for path in runs if path not in missing], label or ())
    records = boards.select(records, method or (), dataset or ())
    print_or_write(pages.report(records, title, list(map(str, missing))), out)


def export(
    run: Annotated[Path, Argument(metavar="RUN", help="Folder of a finished run.")],
    format: Annotated[str, Option(help="pt, a program that needs PyTorch alone; or safetensors, the tensors.")] = "pt",
    client: options.Client = None,
    round: Annotated[str, Option(help="Of which round: selected, as in the headline, or last.")] = "selected",
    prototypes: Annotated[
        bool, Option("--prototypes", help="Classify by the nearest prototype, where the method does, not by the head.")
    ] = False,
    out: Annotated[Path | None, Option(help="File to write; model.pt2 or model.safetensors in RUN by default.")] = None,
    files: options.Code = None,
) -> None:
    """Write a run's trained model to a file that needs no fedcli, and a card beside it that says how to load it.

    The model takes float images in 0 to 1 and gives logits; the normalisation is inside.
    """
    from fedcli.runs import models
    from fedcli.runs.run import load

    opened = load(run, files or ())
    written = try_write(out or run, lambda: models.export(opened, format, client, round, prototypes, out))
    typer.echo("\n".join(map(str, written)))
