"""The commands that make tables: `table`, `claims` and `pages`."""

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown

from fedcli import declarations, registry
from fedcli.cli.figures import LABEL, ONLY
from fedcli.cli.printing import TIME_LIMIT, console, find_cluster, limit_time, parse_seeds, print_or_write, try_write
from fedcli.errors import UserError


class Format(StrEnum):
    """Forms of a table."""

    markdown = "markdown"
    csv = "csv"
    latex = "latex"


class Each(StrEnum):
    """What the rows of a file of numbers are."""

    round = "round"
    client = "client"


PAPERS = "A paper's table"


def table(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN|PAPER:ID",
            help="Run folders, or folders that hold run folders; or a paper's table, as 'fedcli list' names it.",
            show_default=False,
        ),
    ] = None,
    format: Annotated[Format, typer.Option(help="Form of the table.")] = Format.markdown,
    metric: Annotated[
        str | None, typer.Option(help="Metrics that get a column, e.g. best,at:1/2; or your own, ./file.py:NAME.")
    ] = None,
    method: Annotated[list[str] | None, ONLY] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            help="Only runs on this data set, several times for several; of PAPER:ID: a reduced version on these data.",
            show_default=False,
        ),
    ] = None,
    label: Annotated[list[str] | None, LABEL] = None,
    columns: Annotated[
        str | None, typer.Option(help="Columns to show, by parts of their titles, e.g. method,seeds,last.")
    ] = None,
    per: Annotated[
        Each | None, typer.Option(help="A CSV with a row for each round or each client of the runs, for spreadsheets.")
    ] = None,
    title: Annotated[str, typer.Option(help="Title of the table.", show_default=False)] = "",
    page: Annotated[Path | None, typer.Option(help="Folder of a study: its whole page instead, in Markdown.")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write. \\[default: the terminal]")] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Run nothing: the cost and the table as it stands.", rich_help_panel=PAPERS),
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Only the row or column of this name, or those with it in their names; several name several.",
            rich_help_panel=PAPERS,
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds, e.g. 0,1. \\[default: the table's]", rich_help_panel=PAPERS)
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Reduced version: at most so many rounds a run.", rich_help_panel=PAPERS)
    ] = None,
    local_epochs: Annotated[
        int | None, typer.Option(help="Reduced version: at most so many local epochs.", rich_help_panel=PAPERS)
    ] = None,
    train_examples: Annotated[
        int | None, typer.Option(help="Reduced version: at most so many training images.", rich_help_panel=PAPERS)
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Runs at once, each a process of its own.", rich_help_panel=PAPERS)
    ] = 1,
    records_only: Annotated[
        bool,
        typer.Option(
            "--records-only",
            help="Keep no models of runs that have ended, which may fill a disk; 'export' and 'quality' need them.",
            rich_help_panel=PAPERS,
        ),
    ] = False,
    on: Annotated[
        str | None, typer.Option(help="ray or ray:ADDRESS: each run a task of Ray.", rich_help_panel=PAPERS)
    ] = None,
    cpus_per_run: Annotated[
        float | None, typer.Option(help="Cores for a run of --on ray. \\[default: 1]", rich_help_panel=PAPERS)
    ] = None,
    gpus_per_run: Annotated[
        float | None, typer.Option(help="GPUs for it; 0.25 packs four on one. \\[default: 0]", rich_help_panel=PAPERS)
    ] = None,
    time_limit: Annotated[str | None, typer.Option(help=TIME_LIMIT, rich_help_panel=PAPERS)] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--runs",
            help="Where the runs are looked for and kept. \\[default: runs/tables/PAPER-ID]",
            rich_help_panel=PAPERS,
        ),
    ] = None,
) -> None:
    """Make a table of runs, or reproduce a paper's table.

    Of run folders: mean and standard deviation over seeds, from their records; a table for each protocol and data set.

    PAPER:ID is a paper's table: what is missing of it is run, then ours stands beside the paper's.
    First it says what that costs: runs to do, hours (from runs timed here before), data sets.
    Runs whose data set is missing are left out. Ctrl-C interrupts; the same command goes on.
    """
    from fedcli.results import frame, metrics, tables
    from fedcli.results.pages import study_page
    from fedcli.results.render import csv_of, render

    of_runs = {"--metric": metric, "--method": method, "--label": label, "--columns": columns, "--title": title,
               "--per": per}  # fmt: skip
    own = {"--dry-run": dry_run, "--only": only, "--seeds": seeds, "--rounds": rounds, "--local-epochs": local_epochs,
           "--train-examples": train_examples, "--jobs": jobs > 1, "--records-only": records_only, "--on": on,
           "--time-limit": time_limit, "--runs": folder}  # fmt: skip
    names = [run for run in runs or () if ":" in run and not Path(run).exists()]
    if given := [flag for flag, value in of_runs.items() if value and (names or page is not None)]:
        what = names[0] if names else f"--page {page}"
        raise UserError(f"{given[0]} is for a table of runs (got {what}, which has its own columns); leave it out.")
    if names and (len(runs) > 1 or page is not None):
        raise UserError(f"one paper's table at a time (got {names[0]} with others); give it alone.")
    if names:
        limit_time(time_limit)
        limits = {"rounds": rounds, "local_epochs": local_epochs, "train_examples": train_examples}
        chosen = None if seeds is None else parse_seeds(seeds)
        if dataset and len(dataset) > 1:
            raise UserError(f"a paper's table is for one --dataset (got {len(dataset)}); name one.")
        options = {"seeds": chosen, "only": only or (), "limits": limits, "dataset": (dataset or [None])[0]}
        cluster = find_cluster(on, cpus_per_run, gpus_per_run, jobs > 1)
        where = {"jobs": jobs, "cluster": cluster, "records_only": records_only}
        _paper_table(registry.find_table(names[0]), folder, options, where, dry_run, format, out)
        return
    if given := [flag for flag, value in own.items() if value]:
        raise UserError(f"{given[0]} is for a paper's table (got no PAPER:ID); 'fedcli list' shows the tables.")
    if bool(runs) == (page is not None):
        given = "both" if runs else "neither"
        raise UserError(f"a table is of runs or of a study's --page (got {given}); give run folders or --page STUDY.")
    if page is not None and format is not Format.markdown:
        raise UserError(f"--page is written in Markdown (got --format {format}); leave --format out.")
    if per is not None and (page is not None or metric or columns):
        raise UserError(f"--per {per} has its own columns (got --page, --metric or --columns); leave them out.")
    if columns and format is Format.csv:
        raise UserError("--columns is for tables that are read (got --format csv, which has them all); leave it out.")
    if page is not None:
        text = study_page(page)
    else:
        records = tables.select(frame.find_records(map(Path, runs), label or ()), method or (), dataset or ())
        names = metric.split(",") if metric else ()
        for name in names:
            metrics.refuse_absent(name, records)
        if per is not None:
            of_one = frame.rounds_of if per is Each.round else frame.clients_of
            text = csv_of(frame.of_all(records, of_one))
        elif format is Format.csv:
            text = render(tables.sheet(records, names), format)
        else:
            shown = columns.split(",") if columns else ()
            text = "\n".join(render(one, format) for one in tables.sheets(records, names, shown, title))
    if out is None and per is None and format is Format.markdown and console().is_terminal:
        console().print(Markdown(text))  # lines of a terminal's width; in a pipe the text itself
    else:
        print_or_write(text, out)


def _paper_table(
    table: declarations.Table,
    folder: Path | None,
    options: dict[str, Any],
    where: dict[str, Any],
    dry_run: bool,
    format: Format,
    out: Path | None,
) -> None:
    """Run what a paper's table lacks and show it; all but the table goes to stderr."""
    from fedcli.cli import display
    from fedcli.results import comparison, plans
    from fedcli.results.render import render

    if out is not None:  # refused now rather than after hours
        try_write(out, lambda: out.parent.mkdir(parents=True, exist_ok=True))
    errors: dict[Path, str] = {}
    plan = plans.plan(table, folder, **options)
    if where["records_only"] and (later := [one.metric.name for one in plan.cells if one.metric.after_the_run]):
        raise UserError(
            f"--records-only removes the models that 'fedcli quality' measures (got {table.name}, which has "
            f"{later[0]}); leave it out."
        )
    screen = Console(stderr=True, highlight=False)
    running = bool(plan.to_run) and not dry_run
    if any(run.to_do for run in plan.runs):
        # Who only wants to see the table may have asked for weeks of work.
        stop = "Ctrl-C, at any time; the same command goes on, and --dry-run only shows the table as it stands"
        display.say(screen, display.cost(plan, where["records_only"]) + [("to stop", stop)] * running)
        screen.print()
    if running:
        errors = display.run_plan(plan, [screen], **where)
        plan = plans.plan(table, folder, **options)
    sheet = comparison.compare(plan, errors)
    if out is None and format is Format.markdown and console().is_terminal:
        console().print(display.drawn(sheet, console().width))
    else:
        print_or_write(render(sheet, format), out)
    if errors:
        raise typer.Exit(1)


def claims(
    paper: Annotated[
        str | None,
        typer.Argument(
            help="Only the claims of this paper, the first part of their names; or of your own ./file.py.",
            show_default=False,
        ),
    ] = None,
    folders: Annotated[
        list[Path] | None,
        typer.Option(
            "--runs",
            metavar="DIR",
            help="Folders with runs, beside those of the project; several times for several. \\[default: runs]",
        ),
    ] = None,
    format: Annotated[Format, typer.Option(help="Form of the table.")] = Format.markdown,
) -> None:
    """Show what the papers claim and what the runs there are say of it.

    A claim compares rows of a paper's table. Ours is the mean difference of runs with the same seed and partition.
    """
    from fedcli.cli import display
    from fedcli.data import datasets
    from fedcli.results import claims, frame
    from fedcli.results.render import render

    for folder in folders or ():
        if not folder.is_dir():
            raise UserError(f"there is no folder of runs (got {folder}); give one that exists with --runs.")
    chosen = registry.claims(paper)
    shipped = frame.shipped()
    places = [*shipped, *(folders or [Path("runs")])]
    found = claims.answers(chosen, places, lambda name: datasets.open_to_all(name) or datasets.present(name))
    found = found if shipped else claims.with_shipped(found)
    if format is Format.markdown and console().is_terminal:
        console().print(display.drawn_claims(found))
    else:
        print_or_write(render(claims.sheet(found), format), None)


def pages(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder with records/, one subfolder a study, and README.md.")
    ],
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
