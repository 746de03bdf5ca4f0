"""The commands that look into finished runs: `quality`, `plot`, `report` and `export`."""

from inspect import getdoc
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from fedcli.cli.printing import print_or_write, print_table, try_write
from fedcli.errors import UserError, needed
from fedcli.figures import CHARTS, find_chart
from fedcli.userfiles import is_from_file, short_name

RUNS = typer.Argument(metavar="RUN", help="Run folders, or folders that hold run folders.", show_default=False)
METHOD = typer.Option("--method", help="File of yours that the runs need, as method or part; no other is imported.")
ONLY = typer.Option("--method", help="Only runs of this method; several times for several.", show_default=False)
DATASET = typer.Option(help="Only runs on this data set; several times for several.", show_default=False)
LABEL = typer.Option(help="What the runs of a RUN are called; once for each RUN, in order.", show_default=False)
CLIENT = typer.Option(help="Whose own model, where each client keeps one. \\[default: the global model]")


def quality(
    runs: Annotated[list[Path], RUNS],
    client: Annotated[int | None, CLIENT] = None,
    clients: Annotated[
        bool, typer.Option("--clients", help="In place of the last model, those of the clients of one more round.")
    ] = False,
    files: Annotated[list[str] | None, METHOD] = None,
) -> None:
    """Measure how well the features of finished runs keep the classes apart, and keep the features for figures.

    NMI after K-means and silhouette, of the last round's global model on at most 2,000 test images.
    They are written into the records, the features beside them; 'fedcli plot --kind tsne' draws these.
    With --client, of that client's own model; where the images are of several domains, of each domain apart too.
    With --clients, of the features of one more round's clients together; 'fedcli plot --kind clients' draws these.
    """
    from fedcli.figures.quality import add_clients_quality, add_quality, find_runs

    if clients and client is not None:
        raise UserError(f"--clients is for runs with a global model (got --client {client} too); leave one out.")
    finished, others = find_runs(runs)
    rows = []
    for folder in finished:
        with Console(stderr=True).status(escape(str(folder))):
            measured = add_clients_quality(folder, files or ()) if clients else add_quality(folder, client, files or ())
        nmi, silhouette, images = (measured["clients_" * clients + key] for key in ("nmi", "silhouette", "examples"))
        rows.append((f"{nmi:.3f}", f"{silhouette:.3f}", images, folder))
    print_table(("NMI", "Silhouette", "Images", "Run"), rows)
    if others:
        typer.echo(f"unfinished, left out: {', '.join(map(str, others))}")


def plot(
    runs: Annotated[list[Path], RUNS],
    kind: Annotated[str, typer.Option(help="What to draw, see above; or your own, ./file.py:NAME.")] = "curves",
    out: Annotated[
        Path | None,
        typer.Option(help="File to write: .pdf, .svg, or .png, which writes a PDF too. \\[default: <kind>.png]"),
    ] = None,
    x: Annotated[
        str, typer.Option("--x", help="What learning curves stand over: round, floats sent up, or seconds.")
    ] = "round",
    method: Annotated[
        list[str] | None,
        typer.Option(help="Only runs of this method; or a file of yours that the runs need, which no other brings in."),
    ] = None,
    dataset: Annotated[list[str] | None, DATASET] = None,
    label: Annotated[list[str] | None, LABEL] = None,
    title: Annotated[str | None, typer.Option(help="Title of the figure. \\[default: what the runs share]")] = None,
) -> None:
    """Draw a figure of runs; of those that differ only in the seed, a line with a band, or the first one.

    Your own is a function of the runs' records that returns a matplotlib Figure.
    """
    from fedcli.figures import plots
    from fedcli.results import frame, tables

    chart = find_chart(kind)
    files = [text for text in method or () if is_from_file(text)]
    names = [text for text in method or () if text not in files]
    if kind != "curves" and x != "round":
        raise UserError(f"--x is for learning curves (got --x {x} with --kind {kind}); leave it out.")
    if chart.needs == "records":
        given = [tables.select(frame.find_records(runs, label or ()), names, dataset or ())]
    elif names or dataset or label:
        chosen = (names or dataset or label)[0]
        raise UserError(f"--kind {kind} draws the folders that it is given (got {chosen}); name fewer folders.")
    else:
        given = [runs, files] if chart.needs == "models" else [runs]
    if kind == "curves":
        given.append(x)
    out = out or Path(f"{short_name(kind)}.png")

    def draw() -> Any:
        figure = chart.draw(*given)
        if title is not None:
            plots.write_title(figure, title)
        return figure

    with Console(stderr=True).status(escape(kind)):
        written = try_write(out, lambda: plots.write(out, draw))
    typer.echo(" and ".join(map(str, written)))


plot.__doc__ = getdoc(plot) + "".join(f"\n\n{name}: {chart.help}." for name, chart in CHARTS.items())


def report(
    runs: Annotated[list[Path], RUNS],
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("report.html"),
    method: Annotated[list[str] | None, ONLY] = None,
    dataset: Annotated[list[str] | None, DATASET] = None,
    label: Annotated[list[str] | None, LABEL] = None,
    title: Annotated[str, typer.Option(help="Title of the page.")] = "Runs",
) -> None:
    """Write a page to look at: one HTML file that needs no network.

    Tables to sort, curves with methods to switch on and off, costs, partitions and commands, by protocol and data set.
    A path at which no run is gets a line.
    """
    needed("bokeh", "the report", "report")
    from fedcli.figures import report as pages
    from fedcli.results import frame, tables
    from fedcli.runs.records import RECORD

    missing = [path for path in runs if not path.is_file() and next(path.rglob(RECORD), None) is None]
    if len(missing) == len(runs):
        raise UserError(f"there is no run in '{missing[0]}' (got no {RECORD}); give run folders, or folders of these.")
    for path in missing:
        typer.echo(f"warning: there is no run in '{path}'; it is left out.", err=True)
    if label and len(label) == len(runs):
        label = [name for name, path in zip(label, runs, strict=True) if path not in missing]
    records = frame.find_records([path for path in runs if path not in missing], label or ())
    records = tables.select(records, method or (), dataset or ())
    print_or_write(pages.report(records, title, list(map(str, missing))), out)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.", show_default=False)],
    format: Annotated[
        str, typer.Option(help="pt, a program that needs PyTorch alone; or safetensors, the tensors alone.")
    ] = "pt",
    client: Annotated[int | None, CLIENT] = None,
    round: Annotated[
        str, typer.Option(help="Of which round: selected, which the headline is from, or last.")
    ] = "selected",
    prototypes: Annotated[
        bool,
        typer.Option("--prototypes", help="Classify by the nearest prototype, where the method does, not by the head."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="File to write. \\[default: model.pt2 or model.safetensors in RUN]")
    ] = None,
    files: Annotated[list[str] | None, METHOD] = None,
) -> None:
    """Write a run's trained model to a file that needs no fedcli, and a card beside it that says how to load it.

    The model takes float images in 0 to 1 and gives logits; the normalisation is inside.
    """
    from fedcli.runs.models import export as write
    from fedcli.runs.run import load

    opened = load(run, files or ())
    files = try_write(out or run, lambda: write(opened, format, client, round, prototypes, out))
    typer.echo("\n".join(map(str, files)))
