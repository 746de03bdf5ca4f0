"""The commands that run methods: `run`, `resume`, `verify` and `smoke`."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NoReturn

import typer

from fedcli import registry
from fedcli.cli.completion import completion
from fedcli.cli.method_options import given_options, read_set
from fedcli.cli.options import (
    OUTPUT,
    CodeFiles,
    Cpus,
    Gpus,
    Jobs,
    Log,
    LogFile,
    On,
    Placement,
    Quiet,
    Seeds,
    Set,
    TimeLimit,
    Workers,
    argument,
    optional,
    place_runs,
)  # fmt: skip
from fedcli.cli.printing import Output, consoles, print_markdown, say, write_text
from fedcli.cli.watching import watch
from fedcli.errors import UserError
from fedcli.run_files import RECORD
from fedcli.runs.origins import GivenOptions

if TYPE_CHECKING:  # it imports PyTorch, which help does not need
    from fedcli.results.plans import Plan

FILES = "Options from files"  # a panel of the help


def run(  # noqa: PLR0913  # the parameters of a command are its options
    ctx: typer.Context,
    method: argument(str, "METHOD", "A method or a method file.", autocompletion=completion("method")),
    seeds: Seeds = None,
    jobs: Jobs = None,
    workers: Workers = None,
    on: On = None,
    cpus_per_run: Cpus = None,
    gpus_per_run: Gpus = None,
    time_limit: TimeLimit = None,
    set_: Set = None,
    out: optional(str, "New folder; by default in runs/.", panel=OUTPUT) = None,
    continue_: optional(bool, "Go on in --out: skip ended runs, resume others.", "--continue", panel=OUTPUT) = None,
    log: Log = None,
    log_file: LogFile = None,
    quiet: Quiet = None,
    config: optional(str, "TOML file of options; typed ones override them.", panel=FILES) = None,
    from_: optional(str, "Run whose options to use; typed ones override them.", "--from", panel=FILES) = None,
    tuned: optional(str, "Folder of 'fedcli tune' whose best options to use.", panel=FILES) = None,
) -> None:
    """Run a method, by its name or by the path of a method file, or several with commas between them.

    Numeric and choice options take lists, e.g. --lr 0.01,0.1; every combination runs.
    Defaults are those of a run without options; another data set or protocol brings its own.
    'fedcli run METHOD --help' shows a method's options, 'fedcli show METHOD' its card and its protocols.
    """
    from fedcli.runs.workers import launched

    names = method.split(",")
    given = replace(given_options(ctx), tuned=tuned)
    method_options = read_set(names, set_, given.values.get("post"))
    if len(names) == 1:
        given = given.with_typed(method_options.get(method, {}))
    placement = place_runs(jobs, on, cpus_per_run, gpus_per_run)
    output = Output(quiet=quiet, log_file=log_file, log=log)
    has_several_runs = given.has_several_values or seeds is not None or len(names) > 1
    if placement.one_by_one and not has_several_runs:
        _run_single(method, given, out, continue_, workers, output)
        return
    if workers is not None or launched():
        raise UserError("workers share one run (got several runs); leave --workers or the launcher out.")
    if log is not None and not placement.one_by_one:
        raise UserError(f"--log {log} is for runs one after the other (got --jobs or --on); leave one out.")
    from fedcli.results.grids import plan_grid

    plan = plan_grid(names, given, seeds=seeds, method_options=method_options, out=out, continue_=continue_)
    errors = _run_grid(plan, placement, output)
    raise typer.Exit(1 if errors else 0)


def _run_single(
    method: str, given: GivenOptions, out: str | None, continue_: bool | None, workers: int | None, output: Output
) -> None:
    """Run a method once, in this process or in several workers that share each round."""
    from fedcli.runs.begin import resolve_runs, run_method

    if workers is not None and is_launcher(workers):
        # One folder for all workers; what is refused is so before they start.
        [resolved] = resolve_runs(method, given, out=out)
        launch_workers(workers, () if out else ("--out", str(resolved.folder)))
    start = partial(run_method, method, given, out=out, continue_=continue_)
    watch(start, output, workers)


def _run_grid(plan: "Plan", placement: Placement, output: Output) -> Mapping[Path, str]:
    """Run what is to do of a grid, then write and print the table and curves of its runs; returns what failed."""
    from fedcli.cli.display import print_line
    from fedcli.cli.plan_display import run_plan, warn_of_protocols
    from fedcli.runs.loggers import find_loggers

    again = f"the same command with --out {shlex.quote(str(plan.folder))} --continue"
    loggers = find_loggers(output.log)
    with consoles(output, stderr=True) as screens:
        warn_of_protocols(plan)
        if not any(run.needs_running for run in plan.runs):
            print_line(screens, f"nothing to run: all {len(plan.runs)} runs have ended")
        errors = run_plan(plan, screens, again, loggers, placement=placement)
    if not any((run.folder / RECORD).is_file() for run in plan.runs):  # all have failed before their first rounds
        return errors
    text = _summarise(plan.folder)
    if not output.quiet:
        print_markdown(text)
        say(f"table and curves: {plan.folder}, table.md and curves.png")
    return errors


def _summarise(folder: Path) -> str:
    """Write the table and the curves of the runs in a folder into it; returns the table."""
    from fedcli.figures.line_charts import learning_curves  # here, since it imports Matplotlib
    from fedcli.figures.saving import write_page_figure
    from fedcli.results.render import render
    from fedcli.results.run_records import find_records
    from fedcli.results.tables import build_table

    records = find_records([folder])
    text = render(build_table(records, leads=True))
    write_text(folder / "table.md", text)
    with suppress(UserError):  # no run has come to a test
        write_page_figure(folder / "curves.png", learning_curves, records)
    return text


def is_launcher(workers: int) -> bool:
    """Whether this process is to start several workers, and is not one of them."""
    from fedcli.runs.workers import launched

    return workers > 1 and not launched()


def launch_workers(workers: int, words: Sequence[str] = ()) -> NoReturn:
    """Run this command with more `words` in several workers, and end as the first does."""
    from fedcli.runs.workers import launch

    command = [sys.executable, "-P", "-m", "fedcli", *sys.argv[1:], *words]
    raise typer.Exit(launch(workers, command))


def resume(  # noqa: PLR0913  # the parameters of a command are its options
    run: argument(Path, "RUN", "Folder of the run, or a folder of several."),
    files: CodeFiles = None,
    changed_method: optional(bool, "Resume although a file has changed.", "--changed-method") = False,
    workers: Workers = None,
    time_limit: TimeLimit = None,
    log_file: LogFile = None,
    quiet: Quiet = None,
    log: Log = None,
) -> None:
    """Resume a killed or interrupted run from its last checkpoint, or all such runs in a folder."""
    from fedcli.runs.resume import find_runs
    from fedcli.runs.resume import resume as resume_run

    if workers is not None and is_launcher(workers):
        launch_workers(workers)
    folders = find_runs(run, skip_ended=workers is not None)
    if workers is not None and len(folders) > 1:
        raise UserError(f"--workers {workers} is for one run (got {len(folders)} in '{run}'); name one of them.")
    output = Output(quiet=quiet, log_file=log_file, log=log)
    start = partial(resume_run, files=files or (), changed_method=changed_method)
    if folders == [run]:
        watch(partial(start, run, skip_ended=False), output, workers)
        return
    num_failed = 0
    for folder in folders:
        if not _goes_through(partial(start, folder, skip_ended=True), folder, output, workers):
            num_failed += 1
    if not quiet:
        say(f"'{run}' may lack runs that had not begun; the command that made it starts them, with --continue")
    raise typer.Exit(1 if num_failed else 0)


def _goes_through(start: Callable, folder: Path, output: Output, workers: int | None) -> bool:
    """Resume one of several runs, and print why if it fails; an interruption ends all."""
    try:
        watch(start, output, workers)
    except UserError as error:
        say(f"error: '{folder}': {error}", err=True)
        return False
    except typer.Exit as error:
        if error.exit_code != 1:  # interrupted, or the time of all runs is over
            raise
        return False
    return True


def verify(
    record: argument(Path, "RECORD", "Folder or record.json of an ended run."),
    out: optional(Path, "Folder of the repetition; by default in runs/.") = None,
    device: optional(str, "Another device: cpu, cuda, cuda:N.") = None,
    files: CodeFiles = None,
    rounds: optional(int, "Compare only the first rounds.") = None,
) -> None:
    """Run a record again in a new folder, and compare partition, curve, end and parameters.

    Prints "same bits"; "same within x" on another machine or version; or what differs, with exit code 1.
    With --rounds, and of a run that diverged, compares the curve so far and the terms ("same to the last digit");
    --out keeps a repetition of --rounds.
    """
    from fedcli.runs.verify import verify as verify_run

    start = partial(verify_run, record, out=out, files=files or (), device=device, rounds=rounds)
    comparison = watch(start, Output())
    say(comparison.text)
    raise typer.Exit(0 if comparison.is_same else 1)


def smoke(only: optional(list[str], "A method to try; may be repeated.") = None) -> None:
    """Run every registered method for two rounds on built-in data, which needs no network.

    Exit code 1 if one of them fails. The accuracies say nothing of how good a method is.
    """
    from fedcli.cli.plan_display import run_plan
    from fedcli.results.grids import plan_grid

    small = {"rounds": 2, "train_examples": 240, "local_epochs": 2, "checkpoint_every": 2}
    with TemporaryDirectory() as folder:
        plan = plan_grid(only or list(registry.methods()), GivenOptions(small), out=f"{folder}/runs")
        with consoles(Output(), stderr=True) as screens:
            errors = run_plan(plan, screens)
    typer.echo(f"{len(plan.runs) - len(errors)} of {len(plan.runs)} methods ran.")
    raise typer.Exit(1 if errors else 0)
