"""The commands that run methods: `run`, `resume`, `verify` and `tune`."""

import inspect
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import Field
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperCommand

from fedcli import registry
from fedcli.cli import common
from fedcli.cli.common import OUTPUT, argument, optional, print_table
from fedcli.cli.describe import completion, default_values, option_help
from fedcli.declarations import Method, flag_of
from fedcli.errors import UserError
from fedcli.userfiles import user_files

FILES, GRID = "Options from files", "Grid"  # panels of the help
MethodName = argument(str, "METHOD", "A method or a method file.", autocompletion=completion("method"))


class MethodCommand(TyperCommand):
    """A command, `run` or `tune`, that has the options of the method that it is given, beside its own."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Put in what `--config` and `--from` stand for; take underscores for dashes; collect the method's options."""
        options = ctx.meta["options"] = []
        if args and args[0] not in ("-h", "--help"):
            from fedcli.runs import config, experiment

            args = [re.sub(r"^--\w+(?==|$)", lambda flag: flag[0].replace("_", "-"), word) for word in args]
            args, ctx.meta["sources"] = experiment.expand(args, ctx.info_name)
            first, *others = map(registry.find_method, args[0].split(","))
            post = experiment.typed_options(args).get("post")  # a user's own step after the last round has options too
            ctx.meta["unknown_option"] = lambda flag: config.unknown_option(flag, first, post)
            options += make_options(first, post, with_own=not others)
        rest = super().parse_args(ctx, args)
        values = {option.name: ctx.params.pop(option.name) for option in options}
        ctx.meta["given"] = {name: value for name, value in values.items() if value is not None}
        return rest

    def get_params(self, ctx: typer.Context) -> list[Any]:
        """List the options of the method before those of the command."""
        return [*ctx.meta.get("options", ()), *super().get_params(ctx)]


def make_options(method: Method, post: str | None, with_own: bool) -> list[Any]:
    """Make the options of a run, of the step `--post` and of a method, which several leave out."""
    from fedcli.runs import config

    def command() -> None:
        pass

    parameters, defaults = [], default_values(method)
    for title, panel in config.option_panels(method, post).items():
        if with_own or title != method.title:
            parameters += [_parameter(field, title, option_help(field, defaults)) for field in panel.values()]
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return typer.main.get_command(app).params


def _parameter(field: Field, panel: str, help_: str) -> inspect.Parameter:
    """Make the parameter of a field's option, which is None unless it is given; several values are a tuple."""
    from fedcli.runs import experiment

    def parse(text: str) -> Any:
        if (field.name, text) == ("checkpoint_every", "auto"):
            return None
        values = experiment.parse_values(field, text)
        return values if len(values) > 1 else values[0]

    flag, more = flag_of(field.name), {"parser": parse, "metavar": "VALUE"} if experiment.takes_several(field) else {}
    more["autocompletion"] = completion(field.name, choices=field.metadata["choices"])
    flags = f"{flag}/--no-{flag[2:]}" if field.type is bool else flag
    kind = optional(field.type, escape(help_), flags, panel=escape(panel), show_default=False, **more)
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def run(
    ctx: typer.Context,
    method: MethodName,
    seeds: common.Seeds = None,
    jobs: common.Jobs = None,
    workers: common.Workers = None,
    on: common.On = None,
    cpus_per_run: common.Cpus = None,
    gpus_per_run: common.Gpus = None,
    time_limit: common.TimeLimit = None,
    out: optional(str, "New folder of the run; by default in runs/.", panel=OUTPUT) = None,
    continue_: optional(bool, "Go on in --out: skip ended runs, resume others.", "--continue", panel=OUTPUT) = None,
    log: common.Log = None,
    log_file: common.LogFile = None,
    quiet: common.Quiet = None,
    config: optional(str, "TOML file of options; typed ones override them.", panel=FILES) = None,
    from_: optional(str, "Run whose options to use; typed ones override them.", "--from", panel=FILES) = None,
    tuned: optional(str, "Folder of 'fedcli tune' whose best options to use.", panel=FILES) = None,
) -> None:
    """Run a method, by its name or by the path of a method file, or several with commas between them.

    Numeric and choice options take lists, e.g. --lr 0.01,0.1; every combination runs.

    Defaults are those of a run without options; another data set or protocol brings its own.

    'fedcli run METHOD --help' shows a method's options, 'fedcli show METHOD' its card and its protocols.
    """
    from fedcli.runs import run as runs
    from fedcli.runs.workers import launched

    options, names = {**ctx.meta["given"], "sources": ctx.meta["sources"]}, method.split(",")
    experiment = {"out": out, "tuned": tuned, "continue_": continue_}
    where = common.place_runs(jobs, on, cpus_per_run, gpus_per_run, time_limit)
    is_placed = where != {"jobs": 1, "cluster": None}
    is_grid = any(isinstance(value, tuple) for value in options.values())
    if not (is_placed or is_grid or seeds is not None or len(names) > 1):
        if workers is not None:  # one folder for all workers; what is refused is so before they start
            [(_, path)] = runs.plan(method, out=out, tuned=tuned, **options)
            launch_workers(workers, () if out else ("--out", str(path)))
        watch(partial(runs.run, method, **experiment, **options), quiet, log_file, log)
        return
    if workers is not None or launched():
        raise UserError("workers share one run (got several runs); leave --workers or the launcher out.")
    if log is not None and is_placed:
        raise UserError(f"--log {log} is for runs one after the other (got --jobs or --on); leave one out.")
    from fedcli.cli.display import run_plan  # late, as pandas and Matplotlib are slow to import
    from fedcli.data.files import write_atomically
    from fedcli.figures import plots
    from fedcli.results import frame, plans, render, tables

    plan = plans.plan_grid(names, options, seeds=common.parse_seeds(seeds), **experiment)
    again = f"the same command with --out {shlex.quote(str(plan.folder))} --continue"
    errors = run_plan(plan, common.consoles(quiet, log_file, stderr=True), again, log, **where)
    records = frame.find_records([plan.folder])
    sheet = tables.sheet(records)
    text = render.render(sheet)
    write_atomically(plan.folder / "table.md", lambda file: file.write_text(text, encoding="utf-8"))
    with suppress(UserError):  # no run has come to a test
        plots.write(plan.folder / "curves.png", plots.learning_curves, records, page=True)
    if not quiet:
        common.print_or_write(text, None, [sheet])
        typer.echo(f"table and curves: {plan.folder}, table.md and curves.png")
    if errors:
        raise typer.Exit(1)


def tune(
    ctx: typer.Context,
    method: MethodName,
    grid: optional(list[str], "Values to try, e.g. lr=0.01,0.1; repeat it for more options.", panel=GRID) = None,
    seeds: common.Seeds = None,
    jobs: common.Jobs = None,
    on: common.On = None,
    cpus_per_run: common.Cpus = None,
    gpus_per_run: common.Gpus = None,
    time_limit: common.TimeLimit = None,
    out: optional(str, "Folder of the trials, of which none runs twice; in tuning/ if not given.", panel=OUTPUT) = None,
    log_file: common.LogFile = None,
    quiet: common.Quiet = None,
) -> None:
    """Run a grid of options and choose by validation accuracy, never by test accuracy.

    All other options are the same in every trial; with several seeds, the mean counts.
    """
    from fedcli.cli.display import run_plan
    from fedcli.results import metrics, tune

    where = {**common.place_runs(jobs, on, cpus_per_run, gpus_per_run, time_limit), "records_only": True}
    plan = tune.plan(
        method, seeds=common.parse_seeds(seeds), out=out, **tune.read_grid(method, grid or (), ctx.meta["given"])
    )
    errors = run_plan(plan, common.consoles(quiet, log_file, stderr=True), **where)
    trials, folder = tune.rank(plan, errors), plan.folder
    best, rows = trials[0].values, []
    for trial in trials:
        percent = [100 * accuracy for accuracy in trial.accuracies]
        accuracy = metrics.find_metric("validation").mean_text(percent) if percent else "diverged"
        rows.append((*trial.values.values(), accuracy))
    print_table((*map(flag_of, best), "Validation accuracy, %"), rows)
    flags = shlex.join(text for name, value in best.items() for text in (flag_of(name), str(value)))
    typer.echo(f"use {flags}, or {shlex.join(['--tuned', str(folder)])} ({folder / tune.TUNED})")


def watch(start: Callable, quiet: bool | None = None, log_file: str | None = None, log: str | None = None) -> Any:
    """Start a run with a display, and loggers; when it fails or is interrupted, say where it stands."""
    from fedcli.cli.display import RECORD, Display, print_line
    from fedcli.core.federation import NonFiniteLoss
    from fedcli.runs import signals, trackers, workers

    consoles = common.consoles(quiet, log_file)
    display, logs = Display(*consoles), consoles[1:]
    try:
        with workers.joined() as group:
            return start(progress=trackers.with_loggers(display, log) if group.number == 0 else None)
    except UserError as error:
        print_line(logs, f"error: {error}")
        raise
    except NonFiniteLoss as error:
        message, code = f"error: {error} The record is {display.folder / RECORD}.", 1
    except KeyboardInterrupt as error:
        message, code = "interrupted before the first round.", signals.exit_code(error)
        if display.folder is not None:
            record, command = display.record, ["fedcli", "resume", str(display.folder)]
            for file in user_files(record):
                command += ["--method", file]
            stands = f"after {len(record['rounds'])}/{record['config']['rounds']} rounds"
            message = f"{str(error) or 'interrupted'} {stands}; to resume: {shlex.join(command)}"
    print_line(logs, message)
    common.stop(message, code)


def launch_workers(workers: int | None, more: Sequence[str] = ()) -> None:
    """Run this command, and `more` words, in several workers, and end as the first does; go on if this is one."""
    from fedcli.runs.workers import launch, launched

    if workers not in (None, 1) and not launched():
        raise typer.Exit(launch(workers, [sys.executable, "-P", "-m", "fedcli", *sys.argv[1:], *more]))


def resume(
    run: argument(Path, "RUN", "Folder of the run, or a folder of several."),
    method: common.Code = None,
    changed_method: optional(bool, "Resume although a file has changed.", "--changed-method") = False,
    workers: common.Workers = None,
    time_limit: common.TimeLimit = None,
    log_file: common.LogFile = None,
    quiet: common.Quiet = None,
    log: common.Log = None,
) -> None:
    """Resume a killed or interrupted run from its last checkpoint, or all such runs in a folder."""
    from fedcli.runs import run as runs

    common.limit_time(time_limit)
    launch_workers(workers)
    folders, failed = runs.find_unfinished(run), False
    if workers is not None and len(folders) > 1:
        raise UserError(f"--workers {workers} is for one run (got {len(folders)} in '{run}'); name one of them.")
    for folder in folders:
        start = partial(runs.resume, folder, method=method or (), changed_method=changed_method)
        try:
            watch(start, quiet, log_file, log)
        except UserError as error:
            if folder == run:
                raise
            typer.echo(f"error: '{folder}': {error}", err=True)
            failed = True
        except typer.Exit as end:
            if end.exit_code != 1:  # an interruption, or the end of the time of all runs
                raise
            failed = True
    if folders != [run] and not quiet:
        typer.echo(f"'{run}' may lack runs that had not begun; the command that made it starts them, with --continue")
    if failed:
        raise typer.Exit(1)


def verify(
    record: argument(Path, "RECORD", "Folder or record.json of a run that has ended."),
    out: optional(Path, "Folder of the repetition, in runs/ if not given.") = None,
    device: optional(str, "Device in place of the record's: cpu, cuda, cuda:N.") = None,
    method: common.Code = None,
    rounds: optional(int, "Run and compare the first rounds only; all if not given.") = None,
) -> None:
    """Run a record again in a new folder, and compare partition, curve, end and parameters.

    Prints "same bits"; "same within x" on another machine or version; or what differs, with exit code 1. A run that
    diverged must diverge in the same round.

    With --rounds, compares the curve so far and the terms of the objective ("same to the last digit"); the
    interrupted repetition is kept only if --out is given.
    """
    from fedcli.runs.verify import verify as verified

    text, same = watch(partial(verified, record, out=out, method=method or (), device=device, rounds=rounds))
    typer.echo(text)
    if not same:
        raise typer.Exit(1)
