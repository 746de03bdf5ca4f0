"""The commands that run methods: `run`, `resume`, `verify` and `tune`."""

import inspect
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, get_args

import typer
from rich.markup import escape
from typer.core import TyperGroup

from fedcli import registry
from fedcli.cli import common
from fedcli.cli.common import (
    OUTPUT,
    argument,
    consoles,
    optional,
    parse_seeds,
    place_runs,
    print_or_write,
    print_table,
    stop,
)
from fedcli.cli.describe import completion, default_values, index, option_help
from fedcli.declarations import flag_of
from fedcli.errors import UserError

FILES, GRID = "Options from files", "Grid"  # panels of the help


class MethodGroup(TyperGroup):
    """A group, `run` or `tune`, whose commands are the registered methods, and any path of a method file."""

    def list_commands(self, ctx: typer.Context) -> list[str]:
        """Name the registered methods."""
        return list(index()["method"])

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:
        """Look ahead for `--post`: a user's own step after the last round has options too."""
        from fedcli.runs import experiment

        ctx.meta["post"] = experiment.typed_options(args).get("post")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Put in what `--config` and `--from` stand for, the method too where none is named."""
        if args and args[0] not in ("-h", "--help") and not ctx.resilient_parsing:
            from fedcli.runs import experiment

            args, ctx.meta["sources"] = experiment.expand(args, ctx.info_name)
        return super().parse_args(ctx, args)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:
        """Make the command of a method, of a method file, or of several methods divided by commas.

        Its options are the fields of the method's `Config`, of `--post`'s and of `RunConfig`, and those of the action;
        several methods share the latter two.
        """
        if ctx.resilient_parsing and "post" not in ctx.meta:  # a shell completes the name
            return common.Command(cmd_name, help=index()["method"][cmd_name]["title"])
        from fedcli.runs import config

        first, *others = map(registry.find_method, cmd_name.split(","))
        action, post, parameters = ACTIONS[self.name], ctx.meta.get("post"), []
        defaults = default_values(first)
        for title, panel in config.option_panels(first, post).items():
            if not others or title != first.title:
                parameters += [_parameter(field, title, option_help(field, defaults)) for field in panel.values()]
        of_action = inspect.signature(action).parameters.values()
        parameters += [parameter for parameter in of_action if parameter.kind is inspect.Parameter.KEYWORD_ONLY]

        def command(**typed: Any) -> None:
            given = {name: value for name, value in typed.items() if value is not None}
            action(cmd_name, ctx.meta["sources"], **given)

        command.__signature__ = inspect.Signature(parameters)
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        title, card = escape(first.title), f"'fedcli show {escape(cmd_name)}' prints its card and its protocols."
        origin = "Defaults are those of a run without options; another data set or protocol brings its own."
        look = {"help": f"{title}.\n\n{card}\n\n{origin}", "short_help": title, "rich_help_panel": "Methods"}
        single = typer.Typer(add_completion=False)
        single.command(cmd_name, cls=_MethodCommand, **look)(command)
        made = typer.main.get_command(single)
        made.unknown_option = lambda flag: config.unknown_option(flag, first, post)
        return made


class _MethodCommand(common.Command):
    """A command of a method, whose `--help` stands in the last panel, so that the method's own panel is the first."""

    def get_help_option(self, ctx: typer.Context) -> Any:
        option = super().get_help_option(ctx)
        option.rich_help_panel = "Output"
        return option


def _parameter(field: Field, panel: str, help_: str) -> inspect.Parameter:
    """Make the parameter of a field's option, which is None unless it is given; several values are a tuple."""
    from fedcli.runs import experiment

    kinds, flag, more = {*get_args(field.type)} or {field.type}, flag_of(field.name), {}

    def parse(text: str) -> Any:
        if (field.name, text) == ("checkpoint_every", "auto"):
            return None
        values = experiment.parse_values(field, text)
        return values if len(values) > 1 else values[0]

    if experiment.takes_several(field):
        more = {"parser": parse, "metavar": "FLOAT" if float in kinds else "INTEGER" if int in kinds else "TEXT"}
    more["autocompletion"] = completion(field.name, choices=field.metadata["choices"])
    flags = f"{flag}/--no-{flag[2:]}" if bool in kinds else flag
    kind = optional(field.type, escape(help_), flags, panel=escape(panel), show_default=False, **more)
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def _run(
    method: str,
    sources: Mapping[str, str],
    *,
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
    **given: Any,
) -> None:
    """Run a method, or several, with what was given; what `config` and `from_` name is in it, see `sources`.

    The progress of one run goes to stdout, that of several to stderr, and their table to stdout.
    """
    names, where = method.split(","), place_runs(jobs, on, cpus_per_run, gpus_per_run, time_limit)
    several = seeds is not None or len(names) > 1 or any(isinstance(value, tuple) for value in given.values())
    given["sources"] = sources
    if several or where != {"jobs": 1, "cluster": None}:
        from fedcli.runs.workers import launched

        if workers is not None or launched():
            raise UserError("workers share one run (got several runs); leave --workers or the launcher out.")
        if log is not None and where != {"jobs": 1, "cluster": None}:
            raise UserError(f"--log {log} is for runs one after the other (got --jobs or --on); leave one out.")
        experiment = {"seeds": parse_seeds(seeds), "out": out, "tuned": tuned, "continue_": continue_}
        _run_several(names, given, experiment, (quiet, log_file, log), where)
        return
    from fedcli.runs import run as runs

    if is_divided(workers):
        # One folder for all workers; what is refused is so before they start.
        [(_, folder)] = runs.plan(method, out=out, tuned=tuned, **given)
        launch_workers(workers, () if out else ("--out", str(folder)))
    watch(partial(runs.run, method, out=out, tuned=tuned, continue_=continue_, **given), quiet, log_file, log)


def _run_several(
    names: list[str], given: dict[str, Any], experiment: dict[str, Any], shown: tuple, where: dict[str, Any]
) -> None:
    """Run every method with every combination of options and every seed; print and write the table, draw the curves."""
    from fedcli.cli.display import run_plan
    from fedcli.data.files import write_atomically
    from fedcli.figures import curves, plots
    from fedcli.results import frame, plans, render, tables

    quiet, log_file, log = shown
    plan = plans.plan_grid(names, given, **experiment)
    again = f"the same command with --out {shlex.quote(str(plan.folder))} --continue"
    errors = run_plan(plan, consoles(quiet, log_file, stderr=True), again, log, **where)
    records = frame.find_records([plan.folder])
    sheet = tables.sheet(records)
    text = render.render(sheet)
    write_atomically(plan.folder / "table.md", lambda path: path.write_text(text, encoding="utf-8"))
    with suppress(UserError):  # no run has come to a test
        plots.write(plan.folder / "curves.png", curves.learning_curves, records, page=True)
    if not quiet:
        print_or_write(text, None, [sheet])
        typer.echo(f"table and curves: {plan.folder}, table.md and curves.png")
    if errors:
        raise typer.Exit(1)


def _tune(
    method: str,
    sources: Mapping[str, str],
    *,
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
    **given: Any,
) -> None:
    """Run a grid, and print its trials and the options to use."""
    from fedcli.cli.display import run_plan
    from fedcli.results import metrics, tune

    where = {**place_runs(jobs, on, cpus_per_run, gpus_per_run, time_limit), "records_only": True}
    plan = tune.plan(method, seeds=parse_seeds(seeds), out=out, **tune.read_grid(method, grid or (), given))
    errors = run_plan(plan, consoles(quiet, log_file, stderr=True), **where)
    trials, folder = tune.rank(plan, errors), plan.folder
    best, rows = trials[0].values, []
    for trial in trials:
        percent = [100 * accuracy for accuracy in trial.accuracies]
        accuracy = metrics.find_metric("validation").mean_text(percent) if percent else "diverged"
        rows.append((*trial.values.values(), accuracy))
    print_table((*map(flag_of, best), "Validation accuracy, %"), rows)
    for name, beyond in tune.at_the_edge(registry.find_method(method), trials):
        typer.echo(f"{flag_of(name)} {best[name]} is at the edge of what was tried; a {beyond} value may be better")
    flags = shlex.join(text for name, value in best.items() for text in (flag_of(name), str(value)))
    typer.echo(f"use {flags}, or {shlex.join(['--tuned', str(folder)])} ({folder / tune.TUNED})")


ACTIONS = {"run": _run, "tune": _tune}


def watch(start: Callable, quiet: bool | None = None, log_file: str | None = None, log: str | None = None) -> Any:
    """Start a run with a display, and loggers; when it fails or is interrupted, say where it stands."""
    from fedcli.cli.display import RECORD, Display
    from fedcli.core.federation import NonFiniteLoss
    from fedcli.runs import signals, trackers, workers

    display = Display(*consoles(quiet, log_file))
    try:
        with workers.joined() as group:
            return start(progress=trackers.with_loggers(display, log) if group.number == 0 else None)
    except UserError as error:
        display.log(f"error: {error}")
        raise
    except NonFiniteLoss as error:
        message, code = f"error: {error} The record is {display.folder / RECORD}.", 1
    except KeyboardInterrupt as error:
        message, code = "interrupted before the first round.", signals.exit_code(error)
        if display.folder is not None:
            stands = f"after {len(display.record['rounds'])}/{display.record['config']['rounds']} rounds"
            message = f"{str(error) or 'interrupted'} {stands}; to resume: {display.resume_command()}"
    display.log(message)
    stop(message, code)


def is_divided(workers: int | None) -> bool:
    """Return whether this process has to start several workers; those of a launcher run the command as it was given."""
    from fedcli.runs.workers import launched

    if launched() and workers not in (None, count := int(os.environ["WORLD_SIZE"])):
        raise UserError(f"--workers {workers} is not what the launcher has started (got {count}); leave it out.")
    return workers not in (None, 1) and not launched()


def launch_workers(workers: int, more: Sequence[str] = ()) -> NoReturn:
    """Run this command, and `more` words, in several workers, and end as the first does."""
    from fedcli.runs.workers import launch

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
    if is_divided(workers):
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


LOOK = {"cls": MethodGroup, "no_args_is_help": True, "subcommand_metavar": "METHOD [OPTIONS]"}
RUN_HELP = """Run a method, by its name or by the path of a method file.

Numeric and choice options take lists, e.g. --lr 0.01,0.1; every combination runs.

'fedcli run METHOD --help' shows a method's options, 'fedcli show METHOD' its card and its protocols."""
TUNE_HELP = """Run a grid of options and choose by validation accuracy, never by test accuracy.

All other options are the same in every trial; with several seeds, the mean counts."""
run_app, tune_app = typer.Typer(help=RUN_HELP, **LOOK), typer.Typer(help=TUNE_HELP, **LOOK)
