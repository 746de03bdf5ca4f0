"""The commands that compare runs with each other and with a paper: `table` and `claims`."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from rich.console import Console

from fedcli import registry
from fedcli.cli.options import (
    MACHINE,
    Cpus,
    Datasets,
    Format,
    Gpus,
    Jobs,
    On,
    Placement,
    Seeds,
    TimeLimit,
    argument,
    comma_list,
    given_flags,
    optional,
    place_runs,
    records_of,
)  # fmt: skip
from fedcli.cli.printing import console, print_markdown, print_table, write_and_name
from fedcli.errors import UserError
from fedcli.run_files import refuse_file_of_a_run

if TYPE_CHECKING:  # it imports PyTorch, which help does not need
    from fedcli.results.plans import TablePlan

    RunMissing = Callable[[TablePlan, Console], Mapping[Path, str]]

# Panels of the help of `table`. They also say which kind of table an option is for: those of `MACHINE` place the runs
# that a paper's table lacks, and those without a panel are for both.
RUNS = "A table of runs"
PAPERS = "A paper's table"

Part = Literal["round", "client", "client-round"]

Out = optional(Path, "File to write, not the terminal.")
Metric = comma_list(str, "Metrics as columns, e.g. best,at:1/2; or ./file.py:NAME.", "--metric", panel=RUNS)
Columns = comma_list(str, "Columns in this order, by the names that the table shows.", "--columns", panel=RUNS)
Digits = optional(int, "Decimals of percent and plain numbers.", panel=RUNS)
Methods = optional(list[str], "Only runs of this method; may be repeated.", panel=RUNS)
RunLabels = optional(list[str], "Name for the runs of a RUN; one for each RUN.", panel=RUNS)
Per = optional(Part, "A CSV with a row for each round, client, or client in a round.", panel=RUNS)
DryRun = optional(bool, "Run nothing; print cost and table.", "--dry-run", panel=PAPERS)
Only = optional(list[str], "Only rows or columns with this in the name.", panel=PAPERS, metavar="TEXT")
Rounds = optional(int, "Reduce: at most so many rounds a run.", panel=PAPERS)
LocalEpochs = optional(int, "Reduce: at most so many local epochs.", panel=PAPERS)
TrainExamples = optional(int, "Reduce: at most so many training images.", panel=PAPERS)
Tuned = optional(str, "Folder of 'fedcli tune' whose best options to use.", panel=PAPERS)
RecordsOnly = optional(bool, "Keep no models, unless cells need them.", "--records-only", panel=PAPERS)
TableFolder = optional(list[Path], "Its runs; in runs/tables by default.", "--runs", panel=PAPERS, metavar="DIR")


def table(  # noqa: PLR0913  # the parameters of a command are its options
    ctx: typer.Context,
    runs: argument(list[str], "RUN|PAPER:ID", "Run folders, folders of runs, or a paper's table."),
    dataset: Datasets = None,
    format: Format = "markdown",
    out: Out = None,
    metric: Metric = None,
    columns: Columns = None,
    digits: Digits = None,
    method: Methods = None,
    label: RunLabels = None,
    per: Per = None,
    dry_run: DryRun = None,
    only: Only = None,
    rounds: Rounds = None,
    local_epochs: LocalEpochs = None,
    train_examples: TrainExamples = None,
    tuned: Tuned = None,
    records_only: RecordsOnly = None,
    folder: TableFolder = None,
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
    --tuned gives methods what 'fedcli tune' has chosen, but for options that the table itself names.
    """
    table_names = [run for run in runs if ":" in run and not Path(run).exists()]
    if not table_names:
        _refuse_options(ctx, (PAPERS, MACHINE), "a paper's table")
        if per is not None:
            _refuse_layout(ctx, per, format)
            _print_or_write(_csv_of_parts(records_of(runs, method, dataset, label), per), "csv", out)
            return
        from fedcli.results.columns import Layout

        records = records_of(runs, method, dataset, label)
        _print_table_of_runs(records, metric, Layout(columns or (), digits), format, out)
        return
    _refuse_options(ctx, (RUNS,), "a table of runs")
    (name, *_) = table_names
    if len(runs) > 1 or len(dataset or ()) > 1 or len(folder or ()) > 1:
        raise UserError(f"a paper's table goes alone: one --dataset, one --runs (got {name} and more); name one.")
    from fedcli.results.plans import plan_table

    placement = place_runs(jobs, on, cpus_per_run, gpus_per_run)
    make_plan = partial(
        plan_table,
        registry.find_table(name),
        _value_if_given(folder),
        seeds=seeds,
        only=only or (),
        limits={"rounds": rounds, "local_epochs": local_epochs, "train_examples": train_examples},
        dataset=_value_if_given(dataset),
        tuned=tuned,
    )
    run_missing = None if dry_run else partial(_run_missing, placement=placement, records_only=bool(records_only))
    _print_paper_table(name, make_plan, run_missing, format, out)


def _value_if_given(values: list | None) -> Any:
    """Return the value of an option that was given at most once, None without one."""
    return next(iter(values or ()), None)


def _refuse_options(ctx: typer.Context, panels: Collection[str], purpose: str) -> None:
    """Refuse the first option of these panels that is given, and say what it is for."""
    flags = given_flags(ctx, lambda option: getattr(option, "rich_help_panel", None) in panels)
    if flags:
        raise UserError(f"{flags[0]} is for {purpose}; see 'fedcli table --help'.")


def _print_or_write(text: str, format: str, out: Path | None) -> None:
    """Print a table, or write it to a file and print the file's name."""
    if out is not None:
        write_and_name(out, text)
    elif format == "markdown":
        print_markdown(text)
    else:
        typer.echo(text, nl=False)


def _print_table_of_runs(records: list[dict], metric: str | None, layout: Any, format: str, out: Path | None) -> None:
    """Print a table of runs."""
    from fedcli.results.formats import slugify, write_tables

    metrics = metric.split(",") if metric else []
    label = ""
    if format == "latex" and out is not None and slugify(out.stem):
        label = f"tab:{slugify(out.stem)}"
    _print_or_write(write_tables(records, metrics, format, layout, label), format, out)


def _refuse_layout(ctx: typer.Context, per: Part, format: str) -> None:
    """Refuse what is chosen of a table's form or columns where the rows of a CSV are asked for."""
    names = ["metric", "columns", "digits"]
    if format != "csv":
        names.append("format")
    flags = given_flags(ctx, lambda option: option.name in names)
    if flags:
        raise UserError(f"{flags[0]} is for tables of runs (got --per {per}, which writes a CSV); leave it out.")


def _csv_of_parts(records: list[dict], per: Part) -> str:
    """Write a CSV with a row `per` round, client, or client in a round."""
    from fedcli.results import run_tables
    from fedcli.results.render import render_csv

    tables = {
        "round": run_tables.tabulate_rounds,
        "client": run_tables.tabulate_clients,
        "client-round": run_tables.tabulate_client_rounds,
    }
    return render_csv(run_tables.tabulate_all(records, tables[per]))


def _print_paper_table(
    name: str, make_plan: "Callable[[], TablePlan]", run_missing: "RunMissing | None", format: str, out: Path | None
) -> None:
    """Run what is missing of a paper's table, and print our numbers beside the paper's.

    Args:
        name: Of the table.
        make_plan: Plans the table by the runs that there are.
        run_missing: Runs what a plan lacks, and shows it on a screen; None to run nothing.
        format: Of the table.
        out: The file to write; None for the terminal.
    """
    from fedcli.cli.plan_display import cost_rows
    from fedcli.results.paper_tables import compare_with_paper
    from fedcli.results.render import render

    plan = make_plan()
    if out is not None:  # refused now rather than after hours
        refuse_file_of_a_run(out)
        out.parent.mkdir(parents=True, exist_ok=True)
    screen = Console(stderr=True, highlight=False)
    if any(run.needs_running for run in plan.runs):
        print_table(("", ""), cost_rows(plan), screen=screen)
    errors: Mapping[Path, str] = {}
    if plan.startable_runs and run_missing is not None:
        errors = run_missing(plan, screen)
        plan = make_plan()
    _print_or_write(render(compare_with_paper(plan), format), format, out)
    if errors:
        raise typer.Exit(1)
    nothing_can_start = any(run.needs_running for run in plan.runs) and not plan.startable_runs
    if nothing_can_start and run_missing is not None:
        lacking = "; ".join(plan.missing_data.values())
        raise UserError(f"no run of {name} that is missing can start (got {lacking}); bring the data.")


def _run_missing(plan: "TablePlan", screen: Console, *, placement: Placement, records_only: bool) -> Mapping[Path, str]:
    """Run what a plan lacks; returns what failed. Models are kept where a cell is measured of them."""
    from fedcli.cli.plan_display import run_plan

    needs_models = any(cell.metric.is_measured_after_run for cell in plan.cells)
    return run_plan(plan, [screen], placement=placement, records_only=records_only and not needs_models)


def claims(
    paper: argument(str | None, None, "Only those of this paper, or of ./file.py.") = None,
    folders: optional(list[Path], "Other runs; 'runs' if not given.", "--runs", metavar="DIR", exists=True) = None,
    format: Format = "markdown",
) -> None:
    """Show the papers' claims and what the existing runs say of them.

    A claim compares rows of a table. Ours is the mean difference of runs with the same seed and partition.
    """
    from fedcli.data.datasets import is_open_to_all, is_present
    from fedcli.results.claim_tables import build_claims_table, describe_counts
    from fedcli.results.claims import answer_claims
    from fedcli.results.render import render
    from fedcli.results.run_records import find_shipped_folders

    def has_data(name: str) -> bool:
        return is_open_to_all(name) or is_present(name)

    folders_of_project = find_shipped_folders()
    own_folders = folders or [Path("runs")]
    answers = answer_claims(
        registry.claims(paper), [*folders_of_project, *own_folders], has_data, shipped=not folders_of_project
    )
    table = build_claims_table(answers)
    if format == "markdown" and console().is_terminal:
        width = table.titles.index("Ours") + 1  # a terminal has no room for more
        table = replace(table, titles=table.titles[:width], rows=[row[:width] for row in table.rows])
    _print_or_write(render(table, format), format, None)
    typer.echo(describe_counts(answers), err=True)
