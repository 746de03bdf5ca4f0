"""The commands that read records: `table`, `claims`, `quality`, `plot`, `report` and `export`."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from inspect import getdoc
from pathlib import Path
from typing import Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from fedcli import registry
from fedcli.cli import common
from fedcli.cli.common import argument, console, optional, print_table, print_text
from fedcli.errors import UserError, needed
from fedcli.figures import CHARTS, CURVES, WITH_LINES, find_chart
from fedcli.runs.lock import refuse_file_of_a_run
from fedcli.userfiles import is_from_file, short_name

RUNS = "A table of runs"  # a panel of the help of `table`, as the next one
PAPERS = "A paper's table"
LOOK = "Look"  # a panel of the help of `plot`
PAIR = "NAME=VALUE"
Per = Literal["round", "client", "client-round"]


@dataclass(frozen=True, kw_only=True)
class OptionsOfRuns:
    """Options of `table` for a table of runs, by the names of its parameters."""

    metric: str | None
    columns: str | None
    digits: int | None
    method: list[str] | None
    label: list[str] | None
    per: Per | None


@dataclass(frozen=True, kw_only=True)
class OptionsOfPaper:
    """Options of `table` for a paper's table, by the names of its parameters."""

    dry_run: bool | None
    only: list[str] | None
    rounds: int | None
    local_epochs: int | None
    train_examples: int | None
    records_only: bool | None
    folder: list[Path] | None
    seeds: list[Any] | None
    jobs: int | None
    on: str | None
    cpus_per_run: float | None
    gpus_per_run: float | None
    time_limit: str | None  # which counts since it was read


def table(  # noqa: PLR0913  # the parameters of a command are its options
    ctx: typer.Context,
    runs: argument(list[str], "RUN|PAPER:ID", "Run folders, folders of runs, or a paper's table."),
    dataset: common.Datasets = None,
    format: common.Format = "markdown",
    out: optional(Path, "File to write, not the terminal.") = None,
    metric: optional(str, "Metrics as columns, e.g. best,at:1/2; or ./file.py:NAME.", panel=RUNS) = None,
    columns: optional(str, "Columns in this order, by the names that the table shows.", panel=RUNS) = None,
    digits: optional(int, "Decimals of percent and plain numbers.", panel=RUNS) = None,
    method: optional(list[str], "Only runs of this method; may be repeated.", panel=RUNS) = None,
    label: optional(list[str], "Name for the runs of a RUN; one for each RUN.", panel=RUNS) = None,
    per: optional(Per, "A CSV with a row for each round, client, or client in a round.", panel=RUNS) = None,
    dry_run: optional(bool, "Run nothing; print cost and table.", "--dry-run", panel=PAPERS) = None,
    only: optional(list[str], "Only rows or columns with this in the name.", panel=PAPERS, metavar="TEXT") = None,
    rounds: optional(int, "Reduce: at most so many rounds a run.", panel=PAPERS) = None,
    local_epochs: optional(int, "Reduce: at most so many local epochs.", panel=PAPERS) = None,
    train_examples: optional(int, "Reduce: at most so many training images.", panel=PAPERS) = None,
    records_only: optional(bool, "Keep no models, unless cells need them.", "--records-only", panel=PAPERS) = None,
    folder: optional(list[Path], "Its runs; in runs/tables by default.", "--runs", panel=PAPERS, metavar="DIR") = None,
    seeds: common.Seeds = None,
    jobs: common.Jobs = None,
    on: common.On = None,
    cpus_per_run: common.Cpus = None,
    gpus_per_run: common.Gpus = None,
    time_limit: common.TimeLimit = None,
) -> None:
    """Make a table of runs, or reproduce a paper's table.

    For run folders: mean and standard deviation over seeds, one table for each protocol and data set.

    For PAPER:ID, shows the cost, runs what is missing, then prints our numbers beside the paper's.
    Runs whose data set is missing are left out. Ctrl-C interrupts; the same command resumes.
    --dataset, --rounds, --local-epochs or --train-examples reduce the table; --seeds default to the table's.
    """
    of_runs = OptionsOfRuns(metric=metric, columns=columns, digits=digits, method=method, label=label, per=per)
    of_paper = OptionsOfPaper(
        dry_run=dry_run,
        only=only,
        rounds=rounds,
        local_epochs=local_epochs,
        train_examples=train_examples,
        records_only=records_only,
        folder=folder,
        seeds=seeds,
        jobs=jobs,
        on=on,
        cpus_per_run=cpus_per_run,
        gpus_per_run=gpus_per_run,
        time_limit=time_limit,
    )
    names = [run for run in runs if ":" in run and not Path(run).exists()]
    if not names:
        _refuse_typed(ctx, OptionsOfPaper, "a paper's table")
        _table_of_runs(runs, dataset, of_runs, format, out)
        return
    _refuse_typed(ctx, OptionsOfRuns, "a table of runs")
    name = names[0]
    if len(runs) > 1 or len(dataset or ()) > 1 or len(folder or ()) > 1:
        raise UserError(f"a paper's table goes alone: one --dataset, one --runs (got {name} and more); name one.")
    _paper_table(name, dataset[0] if dataset else None, of_paper, format, out)


def _refuse_typed(ctx: typer.Context, group: type, purpose: str) -> None:
    """Refuse options of this group that are typed, and say what they are for."""
    names = {field.name for field in fields(group)}
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name or "")
        is_typed = source is not None and source.name == "COMMANDLINE"
        if is_typed and parameter.name in names:
            raise UserError(f"{parameter.opts[0]} is for {purpose}; see 'fedcli table --help'.")


def _table_of_runs(
    runs: list[str], datasets: list[str] | None, options: OptionsOfRuns, format: str, out: Path | None
) -> None:
    """Print a table of runs, or a CSV with a row for each round or client of them."""
    from fedcli.results.formats import write_tables
    from fedcli.results.tables import Layout

    records = common.records_of(runs, options.method, datasets, options.label)
    layout = Layout(options.columns or (), options.digits)
    if options.per is not None:
        print_text(_csv_of_parts(records, options.per, layout), out)
        return
    metrics = options.metric.split(",") if options.metric else []
    print_text(write_tables(records, metrics, format, layout), out, format == "markdown")


def _csv_of_parts(records: list[dict], per: Per, layout: Any) -> str:
    """Write a CSV with a row `per` round, client, or client in a round."""
    from fedcli.results import frame
    from fedcli.results.render import csv_of
    from fedcli.results.tables import AS_IT_IS

    if layout != AS_IT_IS:
        raise UserError(f"--columns and --digits are for tables of runs (got --per {per}); leave them out.")
    of_run = {"round": frame.rounds_of, "client": frame.clients_of, "client-round": frame.client_rounds_of}
    return csv_of(frame.of_all(records, of_run[per]))


def _paper_table(name: str, dataset: str | None, options: OptionsOfPaper, format: str, out: Path | None) -> None:
    """Run what is missing of a paper's table, and print our numbers beside the paper's."""
    from fedcli.cli.plan_display import cost, run_plan
    from fedcli.results.paper_tables import compare
    from fedcli.results.plans import plan_table
    from fedcli.results.render import render

    where = common.place_runs(options.jobs, options.on, options.cpus_per_run, options.gpus_per_run)
    limits = {
        "rounds": options.rounds,
        "local_epochs": options.local_epochs,
        "train_examples": options.train_examples,
    }
    make_plan = partial(
        plan_table,
        registry.find_table(name),
        options.folder[0] if options.folder else None,
        seeds=options.seeds,
        only=options.only or (),
        limits=limits,
        dataset=dataset,
    )
    plan = make_plan()
    if out is not None:  # refused now rather than after hours
        refuse_file_of_a_run(out)
        out.parent.mkdir(parents=True, exist_ok=True)
    screen = Console(stderr=True, highlight=False)
    if any(run.to_do for run in plan.runs):
        print_table(("", ""), cost(plan), screen=screen)
    errors = {}
    if plan.to_run and not options.dry_run:
        needs_models = any(cell.metric.after_the_run for cell in plan.cells)
        errors = run_plan(plan, [screen], records_only=bool(options.records_only) and not needs_models, **where)
        plan = make_plan()
    print_text(render(compare(plan), format), out, format == "markdown")
    if errors:
        raise typer.Exit(1)
    nothing_can_start = any(run.to_do for run in plan.runs) and not plan.to_run
    if nothing_can_start and not options.dry_run:
        lacking = "; ".join(plan.missing_data.values())
        raise UserError(f"no run of {name} that is missing can start (got {lacking}); bring the data.")


def claims(
    paper: argument(str | None, None, "Only those of this paper, or of ./file.py.") = None,
    folders: optional(list[Path], "Other runs; 'runs' if not given.", "--runs", metavar="DIR", exists=True) = None,
    format: common.Format = "markdown",
) -> None:
    """Show the papers' claims and what the existing runs say of them.

    A claim compares rows of a table. Ours is the mean difference of runs with the same seed and partition.
    """
    from fedcli.data.datasets import open_to_all, present
    from fedcli.results.claims import answers, claims_sheet, counted
    from fedcli.results.frame import shipped
    from fedcli.results.render import render

    def at_hand(name: str) -> bool:
        return open_to_all(name) or present(name)

    shipped_folders = shipped()
    own_folders = folders or [Path("runs")]
    answered = answers(registry.claims(paper), [*shipped_folders, *own_folders], at_hand, shipped=not shipped_folders)
    sheet = claims_sheet(answered)
    if format == "markdown" and console().is_terminal:
        width = sheet.columns.index("Ours") + 1  # a terminal has no room for more
        sheet = replace(sheet, columns=sheet.columns[:width], lines=[line[:width] for line in sheet.lines])
    print_text(render(sheet, format), is_markdown=format == "markdown")
    typer.echo(counted(answered), err=True)


def quality(
    runs: common.Runs,
    client: common.Client = None,
    clients: optional(bool, "Use the clients' own models after one more round.", "--clients") = False,
    round: optional(str, "Round of the model: selected, as in the headline, or last.") = "selected",
    files: common.Code = None,
) -> None:
    """Measure how well the features of finished runs separate the classes: NMI after K-means, and silhouette.

    Takes the global model of the headline and at most 2,000 test images. Both go into the records, and the features
    beside them; 'fedcli plot --kind tsne' draws these.
    With --client: of that client's own model.
    With --clients: of all clients' features after one more round; 'fedcli plot --kind clients' draws them.
    """
    from fedcli.measure.quality import OF_CLIENTS, add_clients_quality, add_quality
    from fedcli.results.frame import finished_runs

    prefix = ""
    measure: Callable[..., dict[str, Any]] = partial(add_quality, client=client, round=round)
    if clients:
        prefix = OF_CLIENTS
        measure = add_clients_quality
    rows = []
    for record in finished_runs(common.records_of(runs, None, None, None)):
        folder = record["folder"]
        with Console(stderr=True).status(escape(str(folder))):
            measured = measure(folder, files=files or ())
        nmi = f"{measured[f'{prefix}nmi']:.3f}"
        silhouette = f"{measured[f'{prefix}silhouette']:.3f}"
        rows.append((nmi, silhouette, measured[f"{prefix}examples"], folder))
    print_table(("NMI", "Silhouette", "Images", "Run"), rows)


def plot(  # noqa: PLR0913  # the parameters of a command are its options
    runs: common.Runs,
    kind: optional(str, "What to draw, see above; or your own, ./file.py:NAME.") = "curves",
    out: optional(Path, "File to write: .pdf, .svg, or .png with a PDF; KIND.png by default.") = None,
    x: optional(str, "Horizontal axis of curves: round, floats (sent up) or seconds.", "--x") = "round",
    y: optional(str, f"What curves show: {', '.join(CURVES)}.", "--y") = "accuracy",
    method: optional(list[str], "Only runs of this method; or a file of yours.") = None,
    dataset: common.Datasets = None,
    label: common.Labels = None,
    title: optional(str, "Title in place of fedcli's; none for none.", panel=LOOK) = None,
    size: optional(str, "Inches of the file, e.g. 3.4x2.3 for a single column.", panel=LOOK, metavar="WxH") = None,
    font_size: optional(float, "Points of the text.", panel=LOOK) = None,
    style: optional(str, "A .mplstyle file, or a style of matplotlib.", panel=LOOK, metavar="FILE") = None,
    colors: optional(list[str], "Colour of a method or setting; may be repeated.", panel=LOOK, metavar=PAIR) = None,
    labels: optional(list[str], "Its name in the legend; may be repeated.", panel=LOOK, metavar=PAIR) = None,
    legend: optional(str, "right, inside, below, ends (of the lines) or none.", panel=LOOK) = None,
) -> None:
    """Draw a figure of runs; several seeds give one line with a band, or only the first is drawn.

    Your matplotlibrc counts, and --style before it.

    Your own kind is a function of the records that returns a matplotlib Figure.
    """
    from fedcli.figures.look import Look, parse_pairs, parse_size
    from fedcli.figures.saving import write_figure

    draw = find_chart(kind)
    named = method or []
    files = [text for text in named if is_from_file(text)]
    methods = [text for text in named if not is_from_file(text)]
    records = common.records_of(runs, methods, dataset, label)
    if y != "accuracy" and kind != "curves":
        raise UserError(f"--y is for --kind curves (got --kind {kind}); leave it out.")
    look = Look(
        title="" if title == "none" else title,
        size=None if size is None else parse_size(size),
        font_size=font_size,
        style=style,
        colors=parse_pairs("--colors", colors or ()),
        labels=parse_pairs("--labels", labels or ()),
        legend=legend,
    )
    changed = look.changed_lines()
    if changed and kind not in WITH_LINES:
        raise UserError(
            f"--{changed[0]} is for figures of lines, {', '.join(WITH_LINES)} (got --kind {kind}); leave it out."
        )
    if kind in WITH_LINES:
        draw = partial(draw, look=look)
    if kind == "curves":
        draw = partial(draw, x=x, y=y)
    elif kind == "correlation":
        draw = partial(draw, files=files)
    figures = []

    def draw_and_keep(records: list[dict]) -> Any:
        figure = draw(records)
        figures.append(figure)
        return figure

    file = out or Path(f"{short_name(kind)}.png")
    refuse_file_of_a_run(file)
    with Console(stderr=True).status(escape(kind)), warnings.catch_warnings(record=True) as caught:
        written = write_figure(file, draw_and_keep, records, look=look)
    for warning in caught:
        common.say(f"warning: {warning.message}", err=True)
    common.say(" and ".join(map(str, written)))
    (figure,) = figures
    caption = figure.get_label()
    if caption and kind in WITH_LINES and look.legend_place != "right":
        common.say(f"for the caption: {caption}.", err=True)


plot.__doc__ = (getdoc(plot) or "") + "".join(f"\n\n{name}: {chart.shows}." for name, chart in CHARTS.items())


def report(
    runs: common.Runs,
    out: optional(Path, "File to write.") = Path("report.html"),
    method: optional(list[str], "Only runs of this method; repeat it for several.") = None,
    dataset: common.Datasets = None,
    label: common.Labels = None,
    title: optional(str, "Title of the page.") = "Runs",
) -> None:
    """Write one HTML file, which works offline: sortable tables and curves, by protocol and data set."""
    from fedcli.runs.record import RECORD

    needed("bokeh", "the report", "report")
    with_runs = [path for path in runs if path.is_file() or any(path.rglob(RECORD))]
    if with_runs:
        for path in sorted(set(runs) - set(with_runs)):
            common.say(f"warning: there is no run in '{path}'; it is left out.", err=True)
    if len(label or ()) == len(runs):
        label = [name for path, name in zip(runs, label, strict=True) if path in with_runs]
    from fedcli.figures.report import report as make_report  # which imports Bokeh

    records = common.records_of(with_runs or runs, method, dataset, label)
    print_text(make_report(records, title), out)


def export(
    run: argument(Path, "RUN", "Folder of a finished run."),
    format: optional(str, "pt, a program that needs only PyTorch; or safetensors.") = "pt",
    client: common.Client = None,
    round: optional(str, "Round of the model: selected, as in the headline, or last.") = "selected",
    prototypes: optional(bool, "Classify by the nearest prototype.", "--prototypes") = False,
    out: optional(Path, "File to write; by default in RUN.") = None,
    files: common.Code = None,
) -> None:
    """Write a run's model to a file that needs no fedcli, and a card that says how to load it.

    The model takes float images in 0 to 1, which it normalises, and gives logits.
    """
    from fedcli.runs import models
    from fedcli.runs.resume import load

    written = models.export(load(run, files or ()), format, client, round, prototypes, out)
    for file in written:
        common.say(file)
