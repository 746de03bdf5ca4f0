"""The commands that run methods: `run`, `resume`, `verify` and `tune`."""

import inspect
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.markdown import Markdown
from rich.markup import escape
from rich.text import Text
from typer import Argument, Option
from typer.core import TyperGroup

from fedcli import registry
from fedcli.cli import common
from fedcli.cli.common import OUTPUT, console, consoles, limit_time, parse_seeds, place_runs, print_table, stop
from fedcli.cli.describe import index
from fedcli.declarations import Method, flag_of
from fedcli.errors import UserError

FILES, GRID = {"rich_help_panel": "Options from files"}, {"rich_help_panel": "Grid"}


class MethodGroup(TyperGroup):
    """A group whose commands are the registered methods, and any path of a method file."""

    action: Callable[..., None]  # what a command does; its keyword-only parameters are options beside the method's

    def list_commands(self, ctx: typer.Context) -> list[str]:
        """Name the registered methods."""
        return list(index()["method"])

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:
        """Look ahead for `--post`: a user's own step after the last round has options too."""
        ctx.meta["post"] = dict(pairwise(args)).get("--post")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Take the method of `--config` or `--from` where none is named."""
        if args and args[0].startswith("-") and args[0] not in ("-h", "--help") and not ctx.resilient_parsing:
            args = [_method_of(args, ctx.info_name), *args]
        return super().parse_args(ctx, args)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:
        """Make the command of a method, of a method file, or of several methods divided by commas.

        Its options are the fields of the method's `Config`, of `--post`'s and of `RunConfig`, and those of the action;
        several methods share the latter two.
        """
        if ctx.resilient_parsing and "post" not in ctx.meta:  # a shell completes the name
            return common.Command(cmd_name, help=index()["method"][cmd_name]["title"])
        from fedcli.cli.describe import option_help
        from fedcli.runs import config, experiment

        first, *others = map(registry.find_method, cmd_name.split(","))
        post, parameters = ctx.meta.get("post"), []
        for title, panel in config.option_panels(first, post).items():
            if not others or title != first.title:
                parameters += [_parameter(field, title, option_help(first, field)) for field in panel.values()]
        of_action = inspect.signature(self.action).parameters.values()
        parameters += [parameter for parameter in of_action if parameter.kind is inspect.Parameter.KEYWORD_ONLY]

        def command(**typed: Any) -> None:
            given, sources = experiment.gather(cmd_name.split(",")[0], typed)
            self.action(cmd_name, sources, **given)

        command.__signature__ = inspect.Signature(parameters)
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        title, card = escape(first.title), f"'fedcli show {escape(cmd_name)}' prints its card and its protocols."
        look = {"help": f"{title}.\n\n{card}", "short_help": title, "rich_help_panel": "Methods"}
        single = typer.Typer(add_completion=False)
        single.command(cmd_name, cls=_MethodCommand, **look)(command)
        made = typer.main.get_command(single)
        made.method, made.post = first, post
        return made


def _method_of(args: list[str], command: str) -> str:
    """Find the method that a file or a record names."""
    from fedcli.runs import experiment

    named = dict(pairwise(args)) | dict(arg.split("=", 1) for arg in args if arg.startswith("--") and "=" in arg)
    method = experiment.read_config(named["--config"])[0] if "--config" in named else None
    if method is None and "--from" in named:
        method = experiment.recorded_method(named["--from"])
    if method is None:
        remedy = f"write 'fedcli {command} METHOD', see 'fedcli list'"
        raise UserError(f'no method given (got {args[0]}); {remedy}, or set method = "fedavg" in the --config file.')
    return method


class _MethodCommand(common.Command):
    """A command of a method, whose `--help` stands in the last panel, so that the method's own panel is the first."""

    method: Method
    post: str | None

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Read the arguments; of an unknown option, say what other toolkits call ours."""
        from fedcli.runs.config import unknown_option

        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if not hasattr(error, "possibilities") or not error.option_name.startswith("--"):
                raise
            raise unknown_option(error.option_name, self.method, self.post) from error

    def get_help_option(self, ctx: typer.Context) -> Any:
        option = super().get_help_option(ctx)
        option.rich_help_panel = "Output"
        return option


def _parameter(field: Field, panel: str, help_: str) -> inspect.Parameter:
    """Make the parameter of a field's option, which is None unless it is given; several values are a tuple."""
    from fedcli.runs import experiment

    kinds, flag = {*get_args(field.type)} or {field.type}, flag_of(field.name)
    look = {"help": escape(help_), "rich_help_panel": escape(panel), "show_default": False}
    look["autocompletion"] = common.completion(field.name, choices=field.metadata["choices"])

    def parse(text: str) -> Any:
        if (field.name, text) == ("checkpoint_every", "auto"):
            return None
        values = experiment.parse_values(field, text)
        return values if len(values) > 1 else values[0]

    if experiment.takes_several(field):
        look |= {"parser": parse, "metavar": "FLOAT" if float in kinds else "INTEGER" if int in kinds else "TEXT"}
    option = Option(f"{flag}/--no-{flag[2:]}" if bool in kinds else flag, **look)
    annotation = Annotated[field.type | None, option]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


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
    out: Annotated[str | None, Option(help="New folder of the run; by default in runs/.", **OUTPUT)] = None,
    continue_: Annotated[bool | None, Option("--continue", help="Continue with the runs in OUT.", **OUTPUT)] = None,
    log: common.Log = None,
    log_file: common.LogFile = None,
    quiet: common.Quiet = None,
    config: Annotated[str | None, Option(help="TOML file of options; typed ones override.", **FILES)] = None,
    from_: Annotated[str | None, Option("--from", help="Reuse a run's options; typed ones override.", **FILES)] = None,
    tuned: Annotated[str | None, Option(help="Use the options found in a 'fedcli tune' folder.", **FILES)] = None,
    **given: Any,
) -> None:
    """Run a method, or several, with what was given; what `config` and `from_` name has been read, see `sources`."""
    limit_time(time_limit)
    names, shown = method.split(","), {"quiet": quiet, "log_file": log_file}
    where = place_runs(jobs, on, cpus_per_run, gpus_per_run)
    experiment = {"seeds": parse_seeds(seeds), "out": out, "tuned": tuned, "continue_": continue_}
    several = len(names) > 1 or any(isinstance(value, tuple) for value in given.values())
    if not several and where == {"jobs": 1, "cluster": None}:
        _run_one(method, {**given, **experiment, "sources": sources}, workers, log, shown)
        return
    for flag, value in (("--workers", workers), ("--log", log)):
        if value is not None:
            raise UserError(f"{flag} {value} is for one run at a time (got several at once); leave it out.")
    _run_several(names, given, experiment, where, shown)


def _run_one(method: str, given: dict[str, Any], workers: int | None, log: str | None, shown: dict[str, Any]) -> None:
    """Run a method here, or in workers; with several seeds one after the other, and draw their curve."""
    from fedcli.runs import run as runs
    from fedcli.runs.workers import joined

    def new_folder() -> Sequence[Any]:
        """Name the run's folder, the same for all workers, and refuse what can be refused before they start."""
        planned = {name: value for name, value in given.items() if name != "continue_"}
        folder = runs.plan(method, **planned)[1][0]
        return () if given["out"] else ("--out", folder if given["seeds"] is None else folder.parent)

    _divide(workers, new_folder)
    with joined() as group:
        done = watch(partial(runs.run, method, **given), **shown, log=log)
    if given["seeds"] is not None and group.number == 0:
        from fedcli.figures import curves, plots
        from fedcli.results import frame

        parent = done[0].path.parent
        files = plots.write(parent / "curve", curves.learning_curves, frame.find_records([parent]))
        console(shown["quiet"]).print(f"curve over the seeds: {' and '.join(map(str, files))}", soft_wrap=True)


def _run_several(names: Sequence[str], given: dict, experiment: dict, where: dict, shown: dict) -> None:
    """Run every method with every combination of several values; progress goes to stderr, the table to stdout."""
    from fedcli.cli.display import RECORD, run_plan
    from fedcli.data.files import write_atomically
    from fedcli.results import frame, plans, render, tables

    plan = plans.plan_grid(names, given, **experiment)
    again = f"the same command with --out {shlex.quote(str(plan.folder))} --continue"
    errors = run_plan(plan, consoles(**shown, stderr=True), again, **where)
    begun = [run.folder for run in plan.runs if (run.folder / RECORD).is_file()]
    records = frame.find_records(begun or [plan.folder])
    table = render.render(tables.sheet(records))
    write_atomically(plan.folder / "table.md", lambda path: path.write_text(table, encoding="utf-8"))
    output = console(shown["quiet"])
    output.print(Markdown(table) if output.is_terminal else Text(table), soft_wrap=not output.is_terminal)
    from fedcli.figures import curves, plots  # only now, as it takes a second

    with suppress(UserError):  # no run has come to a test
        plots.write(plan.folder / "curves", curves.learning_curves, records)
    output.print(f"table and curves: {plan.folder}, table.md, curves.png and curves.pdf", soft_wrap=True)
    if errors:
        raise typer.Exit(1)


def _tune(
    method: str,
    sources: Mapping[str, str],
    *,
    grid: Annotated[
        list[str] | None,
        Option(help="Values to try, e.g. lr=0.01,0.1, in all combinations; else the method's own.", **GRID),
    ] = None,
    seeds: common.Seeds = None,
    jobs: common.Jobs = None,
    on: common.On = None,
    cpus_per_run: common.Cpus = None,
    gpus_per_run: common.Gpus = None,
    time_limit: common.TimeLimit = None,
    out: Annotated[str | None, Option(help="Folder of the trials, of which none runs twice.", **OUTPUT)] = None,
    log_file: common.LogFile = None,
    quiet: common.Quiet = None,
    **given: Any,
) -> None:
    """Run a grid, and print its trials and the options to use."""
    from fedcli.cli.display import run_plan
    from fedcli.results import tune

    limit_time(time_limit)
    where = {**place_runs(jobs, on, cpus_per_run, gpus_per_run), "records_only": True}
    execute = partial(run_plan, consoles=consoles(quiet, log_file, stderr=True), **where)
    texts = list(grid or ())
    for name in [name for name, value in given.items() if isinstance(value, tuple)]:
        texts.append(f"{name}={','.join(map(str, given.pop(name)))}")
    trials, folder = tune.tune(method, texts, execute=execute, seeds=parse_seeds(seeds), out=out, **given)
    best, rows = trials[0].values, []
    for trial in trials:
        accuracy = "diverged" if trial.accuracy is None else f"{100 * trial.accuracy:.2f}"
        rows.append((*trial.values.values(), accuracy))
    print_table((*map(flag_of, best), "Validation accuracy, %"), rows)
    for name, beyond in tune.at_the_edge(registry.find_method(method), trials):
        typer.echo(f"{flag_of(name)} {best[name]} is at the edge of what was tried; a {beyond} value may be better")
    flags = shlex.join(text for name, value in best.items() for text in (flag_of(name), str(value)))
    typer.echo(f"use {flags}, or {shlex.join(['--tuned', str(folder)])} ({folder / tune.TUNED})")


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
    except OSError as error:
        if display.folder is not None:
            common.stop_if_full(error, f"'{display.resume_command()}'")
        raise
    except KeyboardInterrupt as error:
        message, code = "interrupted before the first round.", signals.exit_code(error)
        if display.folder is not None:
            done, rounds = len(display.record["rounds"]), display.record["config"]["rounds"]
            left = "" if code else f", {rounds - done} left"
            stands = f"{str(error) or 'interrupted'} after {done}/{rounds} rounds{left}"
            message = f"{stands}; to resume: {display.resume_command()}"
    display.log(message)
    stop(message, code)


def _divide(workers: int | None, more: Callable[[], Sequence[Any]] = tuple) -> None:
    """Where several workers are asked for, run this command, and `more` words, in each, and end as the first does."""
    from fedcli.runs.workers import launch, launched

    if workers is not None and workers < 1:
        raise UserError(f"--workers must be a whole number from 1 (got {workers}); 1 is one process.")
    if launched() and workers not in (None, count := int(os.environ["WORLD_SIZE"])):
        raise UserError(f"--workers {workers} is not what the launcher has started (got {count}); leave it out.")
    if workers not in (None, 1) and not launched():  # those of the launcher run the command as it was given
        command = [sys.executable, "-P", "-m", "fedcli", *sys.argv[1:], *map(str, more())]
        raise typer.Exit(launch(workers, command))


def resume(
    run: Annotated[Path, Argument(metavar="RUN", help="Folder of the run, or a folder of several.")],
    method: common.Code = None,
    changed_method: Annotated[bool, Option("--changed-method", help="Go on although a file has changed.")] = False,
    workers: common.Workers = None,
    time_limit: common.TimeLimit = None,
    log_file: common.LogFile = None,
    quiet: common.Quiet = None,
    log: common.Log = None,
) -> None:
    """Resume a killed or interrupted run from its last checkpoint, or all such runs in a folder."""
    from fedcli.runs import run as runs
    from fedcli.runs.workers import joined

    limit_time(time_limit)
    _divide(workers)
    failed = False
    with joined() as group:
        folders = runs.find_unfinished(run)
        alone = len(folders) == 1 or group.count > 1  # of several workers one may have failed alone
        for folder in folders:
            start = partial(runs.resume, folder, method=method or (), changed_method=changed_method)
            try:
                watch(start, quiet, log_file, log)
            except (UserError, typer.Exit) as error:
                if alone or getattr(error, "exit_code", 1) != 1:  # an interruption, or the end of the time of all runs
                    raise
                if isinstance(error, UserError):
                    typer.echo(f"error: {error}", err=True)
                failed = True
    if failed:
        raise typer.Exit(1)


def verify(
    record: Annotated[Path, Argument(metavar="RECORD", help="Folder or record.json of a run that has ended.")],
    out: Annotated[Path | None, Option(help="Folder of the repetition, in runs/ if not given.")] = None,
    device: Annotated[str | None, Option(help="In place of the record's: cpu, cuda or cuda:N.")] = None,
    method: common.Code = None,
    rounds: Annotated[int | None, Option(help="Run and compare so many of its rounds only; all if not given.")] = None,
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


class _Run(MethodGroup):
    """`fedcli run`."""

    action = staticmethod(_run)


class _Tune(MethodGroup):
    """`fedcli tune`."""

    action = staticmethod(_tune)


LOOK = {"no_args_is_help": True, "subcommand_metavar": "METHOD [OPTIONS]"}
RUN_HELP = """Run a method, by its name or by the path of a method file.

Numeric and choice options take lists, e.g. --lr 0.01,0.1; every combination runs.

'fedcli run METHOD --help' shows a method's options, 'fedcli show METHOD' its card and its protocols."""
TUNE_HELP = """Run a grid of options and choose by validation accuracy, never by test accuracy.

All other options are the same in every trial; with several seeds, the mean counts."""
run_app, tune_app = typer.Typer(cls=_Run, help=RUN_HELP, **LOOK), typer.Typer(cls=_Tune, help=TUNE_HELP, **LOOK)
