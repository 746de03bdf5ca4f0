"""The commands that compare runs with each other and with a paper: `table` and `claims`."""

from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import typer
from rich.console import Console

from fedcli import registry
from fedcli.cli.options import (
    Cpus,
    Datasets,
    Format,
    Gpus,
    Jobs,
    On,
    Seeds,
    TimeLimit,
    argument,
    optional,
    place_runs,
    records_of,
)  # fmt: skip
from fedcli.cli.printing import console, print_table, print_text
from fedcli.errors import UserError
from fedcli.runs.lock import refuse_file_of_a_run

RUNS = "A table of runs"  # a panel of the help of `table`, as the next one
PAPERS = "A paper's table"
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
    dataset: Datasets = None,
    format: Format = "markdown",
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
    seeds: Seeds = None,
    jobs: Jobs = None,
    on: On = None,
    cpus_per_run: Cpus = None,
    gpus_per_run: Gpus = None,
    time_limit: TimeLimit = None,
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
    (name, *_) = names
    if len(runs) > 1 or len(dataset or ()) > 1 or len(folder or ()) > 1:
        raise UserError(f"a paper's table goes alone: one --dataset, one --runs (got {name} and more); name one.")
    _paper_table(name, _only(dataset), of_paper, format, out)


def _only(values: list | None) -> Any:
    """Return the value of an option that was given at most once, None without one."""
    return next(iter(values or ()), None)


def _refuse_typed(ctx: typer.Context, group: type, purpose: str) -> None:
    """Refuse options of this group that are typed, and say what they are for."""
    names = {field.name for field in fields(group)}
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name or "")
        is_typed = source is not None and source.name == "COMMANDLINE"
        if is_typed and parameter.name in names:
            flag, *_ = parameter.opts
            raise UserError(f"{flag} is for {purpose}; see 'fedcli table --help'.")


def _table_of_runs(
    runs: list[str], datasets: list[str] | None, options: OptionsOfRuns, format: str, out: Path | None
) -> None:
    """Print a table of runs, or a CSV with a row for each round or client of them."""
    from fedcli.results.columns import Layout
    from fedcli.results.formats import words_of_label, write_tables

    records = records_of(runs, options.method, datasets, options.label)
    layout = Layout(options.columns or (), options.digits)
    if options.per is not None:
        print_text(_csv_of_parts(records, options.per, layout), out)
        return
    metrics = options.metric.split(",") if options.metric else []
    label = ""
    if format == "latex" and out is not None and words_of_label(out.stem):
        label = f"tab:{words_of_label(out.stem)}"
    print_text(write_tables(records, metrics, format, layout, label), out, format == "markdown")


def _csv_of_parts(records: list[dict], per: Per, layout: Any) -> str:
    """Write a CSV with a row `per` round, client, or client in a round."""
    from fedcli.results import frame
    from fedcli.results.render import csv_of
    from fedcli.results.tables import DEFAULT_LAYOUT

    if layout != DEFAULT_LAYOUT:
        raise UserError(f"--columns and --digits are for tables of runs (got --per {per}); leave them out.")
    of_run = {"round": frame.rounds_of, "client": frame.clients_of, "client-round": frame.client_rounds_of}
    return csv_of(frame.parts_of_all(records, of_run[per]))


def _paper_table(name: str, dataset: str | None, options: OptionsOfPaper, format: str, out: Path | None) -> None:
    """Run what is missing of a paper's table, and print our numbers beside the paper's."""
    from fedcli.cli.plan_display import cost, run_plan
    from fedcli.results.paper_tables import compare
    from fedcli.results.plans import plan_table
    from fedcli.results.render import render

    placement = place_runs(options.jobs, options.on, options.cpus_per_run, options.gpus_per_run)
    limits = {
        "rounds": options.rounds,
        "local_epochs": options.local_epochs,
        "train_examples": options.train_examples,
    }
    make_plan = partial(
        plan_table,
        registry.find_table(name),
        _only(options.folder),
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
        records_only = bool(options.records_only) and not needs_models
        errors = run_plan(plan, [screen], placement=placement, records_only=records_only)
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
    format: Format = "markdown",
) -> None:
    """Show the papers' claims and what the existing runs say of them.

    A claim compares rows of a table. Ours is the mean difference of runs with the same seed and partition.
    """
    from fedcli.data.datasets import is_open_to_all, is_present
    from fedcli.results.claims import answers, claims_sheet, counted
    from fedcli.results.frame import shipped
    from fedcli.results.render import render

    def at_hand(name: str) -> bool:
        return is_open_to_all(name) or is_present(name)

    shipped_folders = shipped()
    own_folders = folders or [Path("runs")]
    answered = answers(registry.claims(paper), [*shipped_folders, *own_folders], at_hand, shipped=not shipped_folders)
    sheet = claims_sheet(answered)
    if format == "markdown" and console().is_terminal:
        width = sheet.columns.index("Ours") + 1  # a terminal has no room for more
        sheet = replace(sheet, columns=sheet.columns[:width], lines=[line[:width] for line in sheet.lines])
    print_text(render(sheet, format), is_markdown=format == "markdown")
    typer.echo(counted(answered), err=True)
