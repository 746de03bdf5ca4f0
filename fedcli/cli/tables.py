"""The commands that read records: `table`, `claims`, `pages`, `quality`, `plot`, `report` and `export`."""

from dataclasses import replace
from functools import partial
from inspect import getdoc
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import table as rich_table
from rich.console import Console, Group
from rich.markdown import Markdown
from rich.markup import escape
from rich.text import Text
from typer import Argument, Option

from fedcli import registry
from fedcli.cli import common
from fedcli.cli.common import console, limit_time, parse_seeds, place_runs, print_or_write, print_table, try_write
from fedcli.declarations import Table
from fedcli.errors import UserError, needed
from fedcli.figures import CHARTS, find_chart
from fedcli.userfiles import is_from_file, short_name

PAPERS = {"rich_help_panel": "A paper's table"}
NUMBER_WIDTH = 16  # characters of a column of numbers in a table
VERDICTS = {"reproduced": "green", "contradicted": "red", "undecided": "yellow"}


def table(
    runs: Annotated[
        list[str] | None, Argument(metavar="RUN|PAPER:ID", help="Run folders, folders of runs, or a paper's table.")
    ] = None,
    format: common.Format = "markdown",
    metric: Annotated[str | None, Option(help="Columns of metrics, e.g. best,at:1/2; or ./file.py:NAME.")] = None,
    method: common.Methods = None,
    dataset: common.Datasets = None,
    label: common.Labels = None,
    columns: Annotated[str | None, Option(help="Columns to show, by parts of their titles, e.g. method,last.")] = None,
    per: Annotated[
        Literal["round", "client"] | None, Option(help="A CSV with a row for each round or each client of the runs.")
    ] = None,
    title: Annotated[str, Option(help="Title of the table.", show_default=False)] = "",
    page: Annotated[Path | None, Option(help="Folder of a study: its whole page instead, in Markdown.")] = None,
    out: Annotated[Path | None, Option(help="File to write; the terminal if not given.")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Run nothing: the cost and the table so far.", **PAPERS)] = False,
    only: Annotated[
        list[str] | None, Option(metavar="TEXT", help="Only the row or column with this name or part of it.", **PAPERS)
    ] = None,
    rounds: Annotated[int | None, Option(help="Reduced: maximum rounds per run.", **PAPERS)] = None,
    local_epochs: Annotated[int | None, Option(help="Reduced: maximum local epochs.", **PAPERS)] = None,
    train_examples: Annotated[int | None, Option(help="Reduced: maximum training images.", **PAPERS)] = None,
    records_only: Annotated[
        bool, Option("--records-only", help="Keep no models, which 'export' and 'quality' need.", **PAPERS)
    ] = False,
    folder: Annotated[
        Path | None, Option("--runs", help="Where the runs are, and are kept; by default in runs/tables.", **PAPERS)
    ] = None,
    seeds: common.Seeds = None,
    jobs: common.Jobs = None,
    on: common.On = None,
    cpus_per_run: common.Cpus = None,
    gpus_per_run: common.Gpus = None,
    time_limit: common.TimeLimit = None,
) -> None:
    """Make a table of runs, or reproduce a paper's table.

    For run folders: mean and standard deviation over seeds, from the records; one table per protocol and data set.

    For PAPER:ID, runs what is missing of a paper's table, then shows our numbers beside the paper's.
    The cost is shown first: runs to do, hours (from runs timed here before), data sets.
    Runs whose data set is missing are left out. Ctrl-C interrupts; the same command resumes.
    --dataset, --rounds, --local-epochs or --train-examples reduce the table; --seeds default to the table's.
    """
    from fedcli.results import findings, frame, metrics, pages, render, tables

    papers = [run for run in runs or () if ":" in run and not Path(run).exists()]
    use = "a paper's table" if papers else "a study's page" if page is not None else "a table of runs"
    for of, flags in {
        "a table of runs": {
            "--metric": metric, "--method": method, "--label": label, "--columns": columns, "--title": title,
            "--per": per,
        },
        "a paper's table": {
            "--dry-run": dry_run, "--only": only, "--seeds": seeds, "--rounds": rounds, "--jobs": jobs, "--on": on,
            "--local-epochs": local_epochs, "--train-examples": train_examples, "--records-only": records_only,
            "--cpus-per-run": cpus_per_run, "--gpus-per-run": gpus_per_run, "--time-limit": time_limit,
            "--runs": folder,
        },
    }.items():  # fmt: skip
        for flag, value in flags.items():
            if value and use != of:
                raise UserError(f"{flag} is for {of} (got {use}); 'fedcli table --help' shows what goes with it.")
    if papers:
        if len(runs) > 1 or page is not None or len(dataset or ()) > 1:
            raise UserError(f"a paper's table is made alone and on one --dataset (got {papers[0]} with others).")
        limit_time(time_limit)
        where = place_runs(jobs, on, cpus_per_run, gpus_per_run) | {"records_only": records_only}
        limits = {"rounds": rounds, "local_epochs": local_epochs, "train_examples": train_examples}
        chosen = {"folder": folder, "seeds": parse_seeds(seeds), "only": only or (), "limits": limits}
        chosen["dataset"] = dataset[0] if dataset else None
        _paper_table(registry.find_table(papers[0]), chosen, where, dry_run, format, out)
        return
    if bool(runs) == (page is not None):
        raise UserError("a table is of runs or of a study's --page (got both or neither); give one of the two.")
    if page is not None:
        if format != "markdown":
            raise UserError(f"--page is written in Markdown (got --format {format}); leave --format out.")
        text = pages.study_page(findings.read_study(page))
    else:
        if (columns and (per or format == "csv")) or (metric and per):
            raise UserError("a CSV has all its columns (got --columns, or --metric with --per); leave it out.")
        records = tables.select(frame.find_records(map(Path, runs), label or ()), method or (), dataset or ())
        names = metric.split(",") if metric else ()
        for name in names:
            metrics.refuse_absent(name, records)
        if per is not None:
            text = render.csv_of(frame.of_all(records, frame.rounds_of if per == "round" else frame.clients_of))
        elif format == "csv":
            text = render.render(tables.sheet(records, names), format)
        else:
            sheets = tables.sheets(records, names, columns.split(",") if columns else (), title)
            text = "\n".join(render.render(sheet, format) for sheet in sheets)
    print_or_write(text, out, Markdown(text) if per is None and format == "markdown" else None)


def _paper_table(table: Table, chosen: dict, where: dict, dry_run: bool, format: str, out: Path | None) -> None:
    """Run what a paper's table lacks and show it; all but the table goes to stderr."""
    from fedcli.cli.display import cost, run_plan
    from fedcli.results import comparison, plans, render

    if out is not None:  # refused now rather than after hours
        try_write(out, lambda: None)
    errors: dict[Path, str] = {}
    plan = plans.plan(table, **chosen)
    later = [cell.metric.name for cell in plan.cells if cell.metric.after_the_run]
    if where["records_only"] and later:
        raise UserError(
            f"--records-only removes the models that 'fedcli quality' measures (got {table.name}, which has "
            f"{later[0]}); leave it out."
        )
    screen = Console(stderr=True, highlight=False)
    running = bool(plan.to_run) and not dry_run
    if any(run.to_do for run in plan.runs):
        # Who only wants to see the table may have asked for weeks of work.
        stop = "Ctrl-C, at any time; the same command goes on, and --dry-run only shows the table as it stands"
        print_table(("", ""), cost(plan, where["records_only"]) + [("to stop", stop)] * running, screen=screen)
        screen.print()
    if running:
        errors = run_plan(plan, [screen], **where)
        plan = plans.plan(table, **chosen)
    sheet = comparison.compare(plan, errors)
    drawing = drawn(sheet, console().width) if format == "markdown" else None
    print_or_write(render.render(sheet, format), out, drawing)
    if errors:
        raise typer.Exit(1)


def drawn(sheet: Any, width: int) -> Group:
    """Lay out a table in portions of as many columns of numbers as fit, so that no number is broken."""
    from fedcli.results import render

    texts = sum(max(len(line[column]) for line in sheet.lines) + 3 for column in range(sheet.numbers))
    across, parts = max(1, (width - texts) // NUMBER_WIDTH), []
    for start in range(sheet.numbers, len(sheet.columns), across):
        end = min(start + across, len(sheet.columns))
        notes = sheet.notes if end == len(sheet.columns) else ()
        part = replace(sheet.select([*range(sheet.numbers), *range(start, end)]), notes=notes)
        parts.append(Markdown(render.render(part if start == sheet.numbers else replace(part, title="", setting=""))))
    return Group(*parts)


def claims(
    paper: Annotated[str | None, Argument(help="Only the claims of this paper, or of your own ./file.py.")] = None,
    folders: Annotated[
        list[Path] | None,
        Option("--runs", metavar="DIR", help="Folders with more runs; by default 'runs'."),
    ] = None,
    format: common.Format = "markdown",
) -> None:
    """Show the papers' claims and what the existing runs say of them.

    A claim compares rows of a paper's table. Ours is the mean difference of runs with the same seed and partition.
    """
    from fedcli.data import datasets
    from fedcli.results import claims, frame, render

    for folder in folders or ():
        if not folder.is_dir():
            raise UserError(f"there is no folder of runs (got {folder}); give one that exists with --runs.")
    shipped = frame.shipped()
    homes = [*shipped, *(folders or [Path("runs")])]
    answers = claims.answers(
        registry.claims(paper), homes, lambda name: datasets.open_to_all(name) or datasets.present(name)
    )
    answers = answers if shipped else claims.with_shipped(answers)
    drawing = drawn_claims(answers) if format == "markdown" else None
    print_or_write(render.render(claims.sheet(answers), format), None, drawing)


def drawn_claims(answers: Any) -> Group:
    """Lay out claims, the verdict before each sentence and the numbers below it."""
    from fedcli.results import claims, render

    table = rich_table.Table("Verdict", "Claim, the paper's difference and ours", box=None, pad_edge=False)
    for line in claims.sheet(answers).lines:
        claim, verdict, paper, ours, tail, runs = (text.replace("`", "") for text in line)
        numbers = f"paper {paper or render.MISSING}, ours {ours}, last tenth {tail}; {runs}"
        style = VERDICTS.get(verdict.partition(",")[0], "")
        table.add_row(Text(verdict, style), Text(f"{claim}\n{numbers}".strip()))
    notes = Markdown("\n".join(f"- {note}" for note in claims.NOTES))
    return Group(table, Text(f"\n{claims.counted(answers)}", "bold"), notes)


def pages(
    folder: Annotated[Path, Argument(metavar="DIR", help="Folder with records/, a subfolder a study, and README.md.")],
) -> None:
    """Write all pages in DIR and their figures from the records: one a study, one a paper, and DIR/README.md.

    Those of DIR/speed are drawn from its CSV files.

    DIR/records/STUDY/intro.md has a study's title, question and set-up. findings.toml beside it names the differences
    of runs that are printed as its findings: the head of fedcli/results/findings.py says how.

    The first finding stands among the studies of DIR/README.md and on the pages of its papers.
    """
    from fedcli.figures import plots
    from fedcli.results import frame
    from fedcli.results import pages as made

    if not (folder / "records").is_dir():
        raise UserError(
            f"'{folder}' holds no runs for pages (got no folder 'records' in it); name the folder that has one."
        )
    for name, text in made.pages(folder).items():
        print_or_write(text, folder / name)
        for path, (study, kind) in made.figures(text).items():
            chart, runs = find_chart(kind), [folder / "records" / study]
            given = frame.find_records(runs) if chart.needs == "records" else runs
            try_write(folder / path, partial(plots.write, folder / path, chart.draw, given, page=True))


def quality(
    runs: common.Runs,
    client: common.Client = None,
    clients: Annotated[bool, Option("--clients", help="Use client models after another round.")] = False,
    files: common.Code = None,
) -> None:
    """Measure how well the features of finished runs separate the classes, and save the features for figures.

    Computes NMI after K-means and silhouette of the last global model on at most 2,000 test images.
    Writes both into the records and the features beside them; 'fedcli plot --kind tsne' draws the features.
    With --client: of that client's own model, and per domain where the images have several domains.
    With --clients: of all clients' features after one more round; 'fedcli plot --kind clients' draws them.
    """
    from fedcli.figures import quality

    if clients and client is not None:
        raise UserError(f"--clients is for runs with a global model (got --client {client} too); leave one out.")
    finished, others = quality.find_runs(runs)
    rows, code = [], files or ()
    for folder in (record["folder"] for record in finished):
        with Console(stderr=True).status(escape(str(folder))):
            measured = (
                quality.add_clients_quality(folder, code) if clients else quality.add_quality(folder, client, code)
            )
        nmi, silhouette, images = (measured["clients_" * clients + key] for key in ("nmi", "silhouette", "examples"))
        rows.append((f"{nmi:.3f}", f"{silhouette:.3f}", images, folder))
    print_table(("NMI", "Silhouette", "Images", "Run"), rows)
    if others:
        typer.echo(f"unfinished, left out: {', '.join(str(record['folder']) for record in others)}")


def plot(
    runs: common.Runs,
    kind: Annotated[str, Option(help="What to draw, see above; or your own, ./file.py:NAME.")] = "curves",
    out: Annotated[
        Path | None, Option(help="File to write: .pdf, .svg, or .png, which writes a PDF too; by default KIND.png.")
    ] = None,
    x: Annotated[str, Option("--x", help="What curves stand over: round, floats sent up, or seconds.")] = "round",
    method: Annotated[list[str] | None, Option(help="Only runs of this method; or your file that they need.")] = None,
    dataset: common.Datasets = None,
    label: common.Labels = None,
    title: Annotated[str | None, Option(help="Title of the figure; what the runs share if not given.")] = None,
) -> None:
    """Draw a figure of runs; several seeds give one line with a band, or only the first is drawn.

    Your own kind is a function of the records that returns a matplotlib Figure.
    """
    from fedcli.figures import plots
    from fedcli.results import frame, tables

    chart = find_chart(kind)
    files = [text for text in method or () if is_from_file(text)]
    names = [text for text in method or () if text not in files]
    if kind != "curves" and x != "round":
        raise UserError(f"--x is for learning curves (got --x {x} with --kind {kind}); leave it out.")
    given: list[Any] = [runs, files] if chart.needs == "models" else [runs]
    if chart.needs == "records":
        given = [tables.select(frame.find_records(runs, label or ()), names, dataset or ())]
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
    runs: common.Runs,
    out: Annotated[Path, Option(help="File to write.")] = Path("report.html"),
    method: common.Methods = None,
    dataset: common.Datasets = None,
    label: common.Labels = None,
    title: Annotated[str, Option(help="Title of the page.")] = "Runs",
) -> None:
    """Write a report as one HTML file that works offline.

    Sortable tables, curves with switchable methods, costs, partitions and commands, by protocol and data set.
    A path without a run gets a line.
    """
    needed("bokeh", "the report", "report")
    from fedcli.figures import report as pages
    from fedcli.results import frame, tables
    from fedcli.runs.records import RECORD

    missing = [path for path in runs if not path.is_file() and next(path.rglob(RECORD), None) is None]
    if len(missing) == len(runs):
        raise UserError(f"there is no run in '{missing[0]}' (got no {RECORD}); give run folders.")
    for path in missing:
        typer.echo(f"warning: there is no run in '{path}'; it is left out.", err=True)
    if label and len(label) == len(runs):
        label = [name for name, path in zip(label, runs, strict=True) if path not in missing]
    records = frame.find_records([path for path in runs if path not in missing], label or ())
    records = tables.select(records, method or (), dataset or ())
    print_or_write(pages.report(records, title, list(map(str, missing))), out)


def export(
    run: Annotated[Path, Argument(metavar="RUN", help="Folder of a finished run.")],
    format: Annotated[str, Option(help="pt, a program that needs PyTorch alone; or safetensors, the tensors.")] = "pt",
    client: common.Client = None,
    round: Annotated[str, Option(help="Of which round: selected, as in the headline, or last.")] = "selected",
    prototypes: Annotated[
        bool, Option("--prototypes", help="Classify by the nearest prototype, where the method does, not by the head.")
    ] = False,
    out: Annotated[Path | None, Option(help="File to write; model.pt2 or model.safetensors in RUN by default.")] = None,
    files: common.Code = None,
) -> None:
    """Write a run's trained model to a file that needs no fedcli, and a card beside it that says how to load it.

    The model takes float images in 0 to 1 and gives logits; the normalisation is inside.
    """
    from fedcli.runs import models
    from fedcli.runs.run import load

    opened = load(run, files or ())
    written = try_write(out or run, lambda: models.export(opened, format, client, round, prototypes, out))
    typer.echo("\n".join(map(str, written)))
