"""The commands that make tables: `table`, `claims` and `pages`."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console, Group, RenderableType
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from fedcli import declarations, registry
from fedcli.cli import options
from fedcli.cli.options import limit_time, parse_seeds, place_runs
from fedcli.cli.printing import console, print_or_write, print_table, try_write
from fedcli.errors import UserError

PAPERS = {"rich_help_panel": "A paper's table"}
NUMBER_WIDTH = 16  # characters of a column of numbers in a table
VERDICTS = {"reproduced": "green", "contradicted": "red", "undecided": "yellow"}


def table(
    runs: Annotated[
        list[str] | None, Argument(metavar="RUN|PAPER:ID", help="Run folders, or folders of such; or a paper's table.")
    ] = None,
    format: options.Format = "markdown",
    metric: Annotated[str | None, Option(help="Columns of metrics, e.g. best,at:1/2; or ./file.py:NAME.")] = None,
    method: options.Methods = None,
    dataset: options.Datasets = None,
    label: options.Labels = None,
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
    rounds: Annotated[int | None, Option(help="Reduced: at most so many rounds a run.", **PAPERS)] = None,
    local_epochs: Annotated[int | None, Option(help="Reduced: at most so many local epochs.", **PAPERS)] = None,
    train_examples: Annotated[int | None, Option(help="Reduced: at most so many training images.", **PAPERS)] = None,
    records_only: Annotated[
        bool, Option("--records-only", help="Keep no models, which 'export' and 'quality' need.", **PAPERS)
    ] = False,
    folder: Annotated[
        Path | None, Option("--runs", help="Where the runs are, and are kept; by default in runs/tables.", **PAPERS)
    ] = None,
    seeds: options.Seeds = None,
    jobs: options.Jobs = None,
    on: options.On = None,
    cpus_per_run: options.Cpus = None,
    gpus_per_run: options.Gpus = None,
    time_limit: options.TimeLimit = None,
) -> None:
    """Make a table of runs, or reproduce a paper's table.

    Of run folders: mean and standard deviation over seeds, from their records; a table for each protocol and data set.

    PAPER:ID is a paper's table: what is missing of it is run, then ours stands beside the paper's.
    First it says what that costs: runs to do, hours (from runs timed here before), data sets.
    Runs whose data set is missing are left out. Ctrl-C interrupts; the same command goes on.
    With --dataset, --rounds, --local-epochs or --train-examples it is a reduced version; --seeds are else the table's.
    """
    from fedcli.results import boards, frame, metrics, pages, tables
    from fedcli.results.render import FORMULA, render

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
        chosen = {"seeds": parse_seeds(seeds), "only": only or (), "limits": limits, "dataset": (dataset or [None])[0]}
        _paper_table(registry.find_table(papers[0]), folder, chosen, where, dry_run, format, out)
        return
    if bool(runs) == (page is not None):
        raise UserError("a table is of runs or of a study's --page (got both or neither); give one of the two.")
    if page is not None:
        if format != "markdown":
            raise UserError(f"--page is written in Markdown (got --format {format}); leave --format out.")
        text = pages.study_page(page)
    else:
        if (columns and (per or format == "csv")) or (metric and per):
            raise UserError("a CSV has all its columns (got --columns, or --metric with --per); leave it out.")
        records = boards.select(frame.find_records(map(Path, runs), label or ()), method or (), dataset or ())
        names = metric.split(",") if metric else ()
        for name in names:
            metrics.refuse_absent(name, records)
        if per is not None:
            numbers = frame.of_all(records, frame.rounds_of if per == "round" else frame.clients_of)
            text = numbers.replace(FORMULA, "'", regex=True).to_csv(index=False, lineterminator="\n")
        elif format == "csv":
            text = render(tables.sheet(records, names), format)
        else:
            sheets = boards.sheets(records, names, columns.split(",") if columns else (), title)
            text = "\n".join(render(sheet, format) for sheet in sheets)
    _show(Markdown(text) if per is None and format == "markdown" else None, text, out)


def _show(drawing: RenderableType | None, text: str, out: Path | None) -> None:
    """Show a drawing on a terminal; print the text in a pipe, or where there is no drawing, or write it to a file."""
    if drawing is not None and out is None and console().is_terminal:
        console().print(drawing)
    else:
        print_or_write(text, out)


def _paper_table(
    table: declarations.Table,
    folder: Path | None,
    chosen: dict[str, Any],
    where: dict[str, Any],
    dry_run: bool,
    format: str,
    out: Path | None,
) -> None:
    """Run what a paper's table lacks and show it; all but the table goes to stderr."""
    from fedcli.cli.display import cost, run_plan
    from fedcli.results import comparison, plans
    from fedcli.results.render import render

    if out is not None:  # refused now rather than after hours
        try_write(out, lambda: None)
    errors: dict[Path, str] = {}
    plan = plans.plan(table, folder, **chosen)
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
        plan = plans.plan(table, folder, **chosen)
    sheet = comparison.sheet(comparison.compare(plan, errors))
    _show(drawn(sheet, console().width) if format == "markdown" else None, render(sheet, format), out)
    if errors:
        raise typer.Exit(1)


def drawn(sheet: Any, width: int) -> Group:
    """Lay out a table in portions of as many columns of numbers as fit, so that no number is broken."""
    from fedcli.results.render import render

    lines = [line for block in sheet.blocks for line in block]
    texts = sum(max(len(line[column][0]) for line in lines) + 3 for column in range(sheet.numbers))
    across, parts = max(1, (width - texts) // NUMBER_WIDTH), []
    for start in range(sheet.numbers, len(sheet.columns), across):
        shown = [*range(sheet.numbers), *range(start, min(start + across, len(sheet.columns)))]
        blocks = [[[line[column] for column in shown] for line in block] for block in sheet.blocks]
        part = replace(sheet, columns=[sheet.columns[column] for column in shown], blocks=blocks)
        if start > sheet.numbers:
            part = replace(part, title="", setting="")
        if start + across < len(sheet.columns):
            part = replace(part, notes=())
        parts.append(Markdown(render(part)))
    return Group(*parts)


def claims(
    paper: Annotated[str | None, Argument(help="Only the claims of this paper, or of your own ./file.py.")] = None,
    folders: Annotated[
        list[Path] | None,
        Option("--runs", metavar="DIR", help="Folders with more runs; by default 'runs'."),
    ] = None,
    format: options.Format = "markdown",
) -> None:
    """Show what the papers claim and what the runs there are say of it.

    A claim compares rows of a paper's table. Ours is the mean difference of runs with the same seed and partition.
    """
    from fedcli.data import datasets
    from fedcli.results import claims, frame
    from fedcli.results.render import render

    for folder in folders or ():
        if not folder.is_dir():
            raise UserError(f"there is no folder of runs (got {folder}); give one that exists with --runs.")
    shipped = frame.shipped()
    homes = [*shipped, *(folders or [Path("runs")])]
    answers = claims.answers(
        registry.claims(paper), homes, lambda name: datasets.open_to_all(name) or datasets.present(name)
    )
    answers = answers if shipped else claims.with_shipped(answers)
    _show(drawn_claims(answers) if format == "markdown" else None, render(claims.sheet(answers), format), None)


def drawn_claims(answers: Any) -> Group:
    """Lay out claims, the verdict before each sentence and the numbers below it."""
    from fedcli.results import claims
    from fedcli.results.render import MISSING

    table = Table("Verdict", "Claim, the paper's difference and ours", box=None, pad_edge=False)
    for block in claims.sheet(answers).blocks:
        for line in block:
            claim, verdict, paper, ours, tail, runs = (text.replace("`", "") for text, _ in line)
            numbers = f"paper {paper or MISSING}, ours {ours}, last tenth {tail}; {runs}"
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
    from fedcli.figures import find_chart, plots
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
