"""The commands that look into finished runs: `quality`, `plot` and `export`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from fedcli.cli.printing import Command, print_or_write, print_table, try_write
from fedcli.errors import UserError, needed
from fedcli.userfiles import is_from_file, short_name

METHOD = typer.Option(help="File of yours that the runs need, as method or part; no other is imported.")
ONLY = typer.Option("--method", help="Only runs of this method; several times for several.", show_default=False)
DATASET = typer.Option(help="Only runs on this data set; several times for several.", show_default=False)
LABEL = typer.Option(help="What the runs of a RUN are called; once for each RUN, in order.", show_default=False)
RUNS = typer.Argument(metavar="RUN", help="Run folders, or folders that hold run folders.", show_default=False)


def quality(
    runs: Annotated[list[Path], RUNS],
    client: Annotated[
        int | None, typer.Option(help="Whose own model, where each client keeps one. \\[default: the global model]")
    ] = None,
    clients: Annotated[
        bool, typer.Option("--clients", help="In place of the last model, those of the clients of one more round.")
    ] = False,
    method: Annotated[list[str] | None, METHOD] = None,
) -> None:
    """Measure how well the features of finished runs keep the classes apart, and keep the features for figures.

    NMI after K-means and silhouette, of the last round's global model on at most 2,000 test images.
    They are written into the records, the features beside them; 'fedcli plot --kind tsne' draws these.
    With --client, of that client's own model; where the images are of several domains, of each domain apart too.
    With --clients, of the features of one more round's clients together; 'fedcli plot --kind clients' draws these.
    """
    from fedcli.figures.features import add_clients_quality
    from fedcli.figures.quality import add_quality, find_runs

    if clients and client is not None:
        raise UserError(f"--clients is for runs with a global model (got --client {client} too); leave one out.")
    finished, others = find_runs(runs)
    rows = []
    for folder in finished:
        with Console(stderr=True).status(escape(str(folder))):
            given = method or ()
            found = add_clients_quality(folder, given) if clients else add_quality(folder, client, given)
        nmi, silhouette, images = (found["clients_" * clients + name] for name in ("nmi", "silhouette", "examples"))
        rows.append((f"{nmi:.3f}", f"{silhouette:.3f}", images, folder))
    print_table(("NMI", "Silhouette", "Images", "Run"), rows)
    if others:
        typer.echo(f"unfinished, left out: {', '.join(map(str, others))}")


class PlotCommand(Command):
    """`plot`, whose help lists the kinds of figures that there are."""

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:
        """Write the help, with a line for each kind."""
        from fedcli.figures import charts

        self.help += "".join(f"\n\n{name}: {chart.help}." for name, chart in charts().items())
        super().format_help(ctx, formatter)


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
    from fedcli.figures import find_chart, plots
    from fedcli.results import boards, frame

    chart = find_chart(kind)
    files = [one for one in method or () if is_from_file(one)]
    names = [one for one in method or () if one not in files]
    if chart.needs != "records" and (given := next(filter(None, (names, dataset, label)), None)):
        raise UserError(f"--kind {kind} draws the folders that it is given (got {given[0]}); name fewer folders.")
    if kind != "curves" and x != "round":
        raise UserError(f"--x is for learning curves (got --x {x} with --kind {kind}); leave it out.")
    out = out or Path(f"{short_name(kind)}.png")
    given = [runs]
    if chart.needs == "records":
        given = [boards.select(frame.find_records(runs, label or ()), names, dataset or ())]
    given += [files] if chart.needs == "models" else []
    given += [x] if kind == "curves" else []

    def draw(*given: Any) -> Any:
        figure = chart.draw(*given)
        if title is not None:
            figure.suptitle(title)
        return figure

    with Console(stderr=True).status(escape(kind)):
        written = try_write(out, lambda: plots.write(out, draw, *given))
    typer.echo(" and ".join(map(str, written)))


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
    from fedcli.figures.report import report as made
    from fedcli.results import boards, frame
    from fedcli.runs.records import RECORD

    missing = [path for path in runs if not path.is_file() and next(path.rglob(RECORD), None) is None]
    if len(missing) == len(runs):
        raise UserError(f"there is no run in '{missing[0]}' (got no {RECORD}); give run folders, or folders of these.")
    for path in missing:
        typer.echo(f"warning: there is no run in '{path}'; it is left out.", err=True)
    if label and len(label) == len(runs):
        label = [name for name, path in zip(label, runs, strict=True) if path not in missing]
    there = [path for path in runs if path not in missing]
    records = boards.select(frame.find_records(there, label or ()), method or (), dataset or ())
    print_or_write(made(records, title, list(map(str, missing))), out)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.", show_default=False)],
    format: Annotated[
        str, typer.Option(help="pt, a program that needs PyTorch alone; or safetensors, the tensors alone.")
    ] = "pt",
    client: Annotated[
        int | None, typer.Option(help="Whose own model, where each client keeps one. \\[default: the global model]")
    ] = None,
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
    method: Annotated[list[str] | None, METHOD] = None,
) -> None:
    """Write a run's trained model to a file that needs no fedcli, and a card beside it that says how to load it.

    The model takes float images in 0 to 1 and gives logits; the normalisation is inside.
    """
    from fedcli.runs.models import export as write
    from fedcli.runs.run import load

    opened = load(run, method or ())
    files = try_write(out or run, lambda: write(opened, format, client, round, prototypes, out))
    typer.echo("\n".join(map(str, files)))
