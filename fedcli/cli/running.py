"""The commands that run methods: `run`, `resume` and `tune`."""

import contextlib
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import Field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar, get_args, get_type_hints

import typer
from rich.markdown import Markdown
from rich.markup import escape
from rich.text import Text
from typer.core import TyperGroup

from fedcli import declarations, registry
from fedcli.cli.printing import (
    TIME_LIMIT,
    Command,
    completion,
    console,
    consoles,
    find_cluster,
    limit_time,
    parse_seeds,
    print_table,
    stop,
    stop_if_full,
)
from fedcli.declarations import flag_of
from fedcli.errors import UserError
from fedcli.userfiles import user_files

Result = TypeVar("Result")
ON_OPTIONS = (
    ("on", str, "ray or ray:ADDRESS: every run a task of Ray; OUT lies on storage that its nodes share.", "Machine"),
    ("cpus_per_run", float, "With --on ray: cores for a run. \\[default: 1]", "Machine"),
    ("gpus_per_run", float, "With --on ray: GPUs for a run; 0.25 packs four on one. \\[default: 0]", "Machine"),
)
ON = [name for name, *_ in ON_OPTIONS]
FILES = "Options from files"
LOG_FILE = "File to which the lines of the run are added, without the bar."
QUIET = "Print nothing but errors."
SHOWN = (("log_file", str, LOG_FILE, "Output"), ("quiet", bool, QUIET, "Output"))
LIMIT = ("time_limit", str, TIME_LIMIT, "Machine")
LOG = "Where each round's numbers go as well: tensorboard, wandb, ./file.py:NAME, or several, divided by commas."


class MethodGroup(TyperGroup):
    """A group whose commands are the registered methods, and any path of a method file."""

    action: Callable[[str, dict[str, Any]], None]  # what a command does with the method's name and what was given
    about = ""  # what it does, for the help of a command
    # Name, type, help and panel of what comes after an option, and after the last.
    more: ClassVar[dict[str, tuple[tuple[str, Any, str, str], ...]]]

    def list_commands(self, ctx: typer.Context) -> list[str]:
        """Name the registered methods."""
        return list(registry.methods())

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
        """Make the command of a method, of a method file, or of several methods divided by commas."""
        first, *others = map(registry.find_method, cmd_name.split(","))
        return _method_command(first, cmd_name, self, ctx.meta.get("post"), common=bool(others))


def _method_of(args: list[str], command: str) -> str:
    """Find the method that a file or a record names."""
    named = dict(pairwise(args)) | dict(arg.split("=", 1) for arg in args if arg.startswith("--") and "=" in arg)
    if "--config" not in named and "--from" not in named:
        raise UserError(
            f"no method is named (got {args[0]}); write 'fedcli {command} METHOD', which 'fedcli list' shows."
        )
    from fedcli.runs import experiment

    method = experiment.read_config(named["--config"])[0] if "--config" in named else None
    if method is None and "--from" in named:
        method = experiment.recorded_method(named["--from"])
    if method is None:
        raise UserError(f'no method is named (got --config {named["--config"]}); add a line as method = "fedavg".')
    return method


class _MethodCommand(Command):
    """A command of a method, whose `--help` stands in the last panel, so that the method's own panel is the first."""

    method: declarations.Method
    post: str | None

    def unknown(self, flag: str) -> UserError:
        """Make the error for an option that there is not."""
        from fedcli.runs.config import unknown_option

        return unknown_option(flag, self.method, self.post)

    def get_help_option(self, ctx: typer.Context) -> Any:
        option = super().get_help_option(ctx)
        option.rich_help_panel = "Output"
        return option


def _method_command(
    method: declarations.Method, given_name: str, group: MethodGroup, post: str | None, common: bool = False
) -> Any:
    """Make the command of a method from the fields of `RunConfig`, of the method's `Config` and of `--post`'s.

    Args:
        method: The method; of several the first.
        given_name: What was typed.
        group: The command that it belongs to.
        post: What `--post` says.
        common: Whether there are several methods, which share the options of every run.
    """
    from fedcli.cli.describe import option_help
    from fedcli.runs.config import RunConfig, option_panels

    kinds = (RunConfig, method.config, *(step.config for step in registry.posts(method, post).values()))
    types = {name: kind for config in kinds for name, kind in get_type_hints(config).items()}
    parameters = []
    for title, panel in option_panels(method, post).items():
        if common and title == method.title:
            continue
        for name, field in panel.items():
            parameters.append(_parameter(name, types[name], escape(option_help(method, field)), title, field))
            parameters += [_parameter(*each) for each in group.more.get(name, ())]
    parameters += [_parameter(*each) for each in group.more["last"]]

    def command(**given: Any) -> None:
        group.action(given_name, given)

    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    card = f"'fedcli show {escape(given_name)}' prints its card and its protocols."
    about = f"{escape(method.title)}.{group.about}\n\n{card}"
    single = typer.Typer(add_completion=False)
    register = single.command(
        given_name, cls=_MethodCommand, help=about, short_help=escape(method.title), rich_help_panel="Methods"
    )
    register(command)
    made = typer.main.get_command(single)
    made.method, made.post = method, post
    return made


def _parameter(name: str, kind: Any, help_: str, panel: str, field: Field | None = None) -> inspect.Parameter:
    """Make a parameter of a command that is None unless its flag is given; of several values it is a tuple."""
    from fedcli.runs.experiment import parse_values, takes_several

    flag = f"{flag_of(name)}/--no-{flag_of(name)[2:]}" if kind is bool else flag_of(name)
    several = {"parser": _number_or_auto, "metavar": "INTEGER|auto"} if name == "checkpoint_every" else {}
    if not several and field is not None and takes_several(field):

        def parse(text: str) -> Any:
            values = parse_values(field, text)
            return values if len(values) > 1 else values[0]

        kinds = {*get_args(kind)} or {kind}
        metavar = next((word for one, word in ((float, "FLOAT"), (int, "INTEGER")) if one in kinds), "TEXT")
        several = {"parser": parse, "metavar": metavar}
    told = completion(name, field.metadata["choices"] if field is not None else ())
    look = {"help": help_, "rich_help_panel": escape(panel), "show_default": False, "autocompletion": told}
    option = typer.Option(flag, **look, **several)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _number_or_auto(text: str) -> int | None:
    """Read a number; `auto` is the same as leaving the option out."""
    if text != "auto" and not text.lstrip("-").isdecimal():
        raise UserError(f"--checkpoint-every must be auto or a whole number from 1 (got '{text}'); choose one of them.")
    return None if text == "auto" else int(text)


def _checked_jobs(jobs: Any) -> int:
    """Refuse a number of jobs that is none."""
    if type(jobs) is not int or jobs < 1:
        raise UserError(f"--jobs must be a whole number from 1 (got {jobs}); 1 runs one after the other.")
    return jobs


def _tune(method: str, given: dict[str, Any]) -> None:
    """Run a grid, and print its trials and the options to use."""
    from fedcli.cli.display import run_plan
    from fedcli.results.tune import TUNED, at_the_edge, tune

    limit_time(given.pop("time_limit"))
    shown = {name: given.pop(name) for name in ("quiet", "log_file")}
    seeds, jobs = given.pop("seeds"), given.pop("jobs")
    jobs = _checked_jobs(1 if jobs is None else jobs)
    cluster = find_cluster(*(given.pop(name) for name in ON), jobs > 1)
    where = {"jobs": jobs, "cluster": cluster, "records_only": True}
    several = {name: values for name, values in given.items() if isinstance(values, tuple)}
    texts = given.pop("grid") or []
    texts += [f"{name}={','.join(map(str, values))}" for name, values in several.items()]
    given = {name: value for name, value in given.items() if name not in several}
    given["seeds"] = None if seeds is None else parse_seeds(seeds)
    screens = consoles(**shown, stderr=True)
    trials, folder = tune(method, texts, execute=lambda plan: run_plan(plan, screens, **where), **given)
    names = list(trials[0].values)
    rows = [
        (*trial.values.values(), "diverged" if trial.accuracy is None else f"{100 * trial.accuracy:.2f}")
        for trial in trials
    ]
    print_table((*map(flag_of, names), "Validation accuracy, %"), rows)
    for name, beyond in at_the_edge(registry.find_method(method), trials):
        value = trials[0].values[name]
        typer.echo(f"{flag_of(name)} {value} is at the edge of what was tried; a {beyond} value may be better")
    flags = shlex.join(text for name, value in trials[0].values.items() for text in (flag_of(name), str(value)))
    typer.echo(f"use {flags}, or {shlex.join(['--tuned', str(folder)])} ({folder / TUNED})")


def _run(method: str, given: dict[str, Any]) -> None:
    """Run a method, or several, with what was given; of several runs, make their curves and their table."""
    from fedcli.runs import run as runs
    from fedcli.runs.experiment import gather
    from fedcli.runs.workers import joined

    names = method.split(",")
    given, sources = gather(names[0], given)
    limit_time(given.pop("time_limit", None))
    seeds, jobs = given.pop("seeds", None), _checked_jobs(given.pop("jobs", 1))
    shown = {name: given.pop(name, None) for name in ("quiet", "log_file")}
    seeds = parse_seeds(seeds) if isinstance(seeds, str) else seeds
    log = given.pop("log", None)
    workers = given.pop("workers", None)
    cluster = find_cluster(*(given.pop(name, None) for name in ON), jobs > 1 or workers is not None)
    several = len(names) > 1 or any(isinstance(value, tuple) for value in given.values())
    if cluster is not None or jobs > 1 or several:
        if workers is not None:
            raise UserError(f"--workers {workers} divides one run (got several at once); leave it out, or run one.")
        if log is not None:
            raise UserError(
                f"--log is of one run, or several seeds one after the other (got {log} with a grid); leave it out."
            )
        _grid(names, given, seeds, {"jobs": jobs, "cluster": cluster}, shown)
        return
    options = {**given, "seeds": seeds, "sources": sources}
    if _to_launch(workers):
        planned = {name: value for name, value in options.items() if name != "continue_"}
        folder = runs.plan(method, **planned)[1][0]  # also refuses what can be refused now
        _launch(workers, () if given.get("out") else ("--out", folder if seeds is None else folder.parent))
    with joined() as group:
        done = watch(lambda display: runs.run(method, **options, progress=display), **shown, log=log)
    if seeds is not None and group.number == 0:
        from fedcli.figures import curves, plots
        from fedcli.results import frame

        parent = done[0].path.parent
        files = plots.write(parent / "curve", curves.learning_curves, frame.find_records([parent]))
        console(shown["quiet"]).print(f"curve over the seeds: {' and '.join(map(str, files))}", soft_wrap=True)


def _grid(
    names: Sequence[str], given: dict[str, Any], seeds: Any, where: dict[str, Any], shown: dict[str, Any]
) -> None:
    """Run every method with every combination of several values; progress goes to stderr, the table to stdout."""
    from fedcli.cli.display import run_plan
    from fedcli.data.files import write_atomically
    from fedcli.results import frame, plans, tables
    from fedcli.results.render import render
    from fedcli.runs.records import RECORD

    experiment = {name: given.pop(name, None) for name in ("out", "tuned", "continue_")}
    plan = plans.plan_grid(names, given, seeds=seeds, **experiment)
    again = f"the same command with --out {shlex.quote(str(plan.folder))} --continue"
    errors = run_plan(plan, consoles(**shown, stderr=True), again, **where)
    begun = [run.folder for run in plan.runs if (run.folder / RECORD).is_file()]
    records = frame.find_records(begun or [plan.folder])
    table = render(tables.sheet(records))
    write_atomically(plan.folder / "table.md", lambda path: path.write_text(table, encoding="utf-8"))
    output = console(shown["quiet"])
    output.print(Markdown(table) if output.is_terminal else Text(table), soft_wrap=not output.is_terminal)
    from fedcli.figures import curves, plots  # only now, as it takes a second

    with contextlib.suppress(UserError):  # no run has come to a test
        plots.write(plan.folder / "curves", curves.learning_curves, records)
    output.print(f"table and curves: {plan.folder}, table.md, curves.png and curves.pdf", soft_wrap=True)
    if errors:
        raise typer.Exit(1)


def watch(
    start: Callable[[Any], Result], quiet: bool | None = None, log_file: str | None = None, log: str | None = None
) -> Result:
    """Start a run with a display, and loggers; when it fails or is interrupted, say where it stands."""
    from fedcli.cli.display import Display
    from fedcli.core.federation import NonFiniteLoss
    from fedcli.runs.records import RECORD
    from fedcli.runs.signals import exit_code
    from fedcli.runs.trackers import with_loggers
    from fedcli.runs.workers import joined

    display = Display(*consoles(quiet, log_file))

    def end(message: str, code: int) -> NoReturn:
        display.log(message)
        stop(message, code)

    try:
        with joined() as group:
            return start(with_loggers(display, log) if group.number == 0 else None)
    except UserError as error:
        display.log(f"error: {error}")
        raise
    except NonFiniteLoss as error:
        end(f"error: {error} The record is {display.folder / RECORD}.", 1)
    except OSError as error:
        if display.folder is not None:
            stop_if_full(error, f"'{_resume_command(display.folder, display.record)}'")
        raise
    except KeyboardInterrupt as error:
        if display.folder is None:
            end("interrupted before the first round.", exit_code(error))
        done, rounds = len(display.record["rounds"]), display.record["config"]["rounds"]
        left = f", {rounds - done} are left" if not exit_code(error) else ""
        again = _resume_command(display.folder, display.record)
        end(f"{str(error) or 'interrupted'} after {done}/{rounds} rounds{left}; '{again}' goes on.", exit_code(error))


def _to_launch(workers: int | None) -> bool:
    """Say whether workers have to be started; those of the launcher run the command as it was given."""
    from fedcli.runs.workers import launched

    if workers is not None and workers < 1:
        raise UserError(f"--workers must be a whole number from 1 (got {workers}); 1 is one process.")
    if launched() and workers not in (None, count := int(os.environ["WORLD_SIZE"])):
        raise UserError(f"--workers {workers} is not what the launcher has started (got {count}); leave it out.")
    return workers not in (None, 1) and not launched()


def _launch(workers: int, more: Sequence[Any] = ()) -> NoReturn:
    """Run this command in several processes, and end as the first of them does."""
    from fedcli.runs.workers import launch

    command = [sys.executable, "-P", "-m", "fedcli", *sys.argv[1:], *map(str, more)]
    raise typer.Exit(launch(workers, command))


def _resume_command(folder: Path, record: dict[str, Any]) -> str:
    """What to type to take up a run."""
    named = (text for path in user_files(record) for text in ("--method", path))
    return shlex.join(["fedcli", "resume", str(folder), *named])


def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run, or a folder of several.")],
    method: Annotated[
        list[str] | None,
        typer.Option(help="File of yours that the run needs, as method or part, at its place of now; unchanged."),
    ] = None,
    changed_method: Annotated[
        bool, typer.Option("--changed-method", help="Go on although such a file has changed since.")
    ] = False,
    workers: Annotated[int | None, typer.Option(help="Divide each round among so many processes.")] = None,
    time_limit: Annotated[str | None, typer.Option(help=TIME_LIMIT)] = None,
    log_file: Annotated[str | None, typer.Option(help=LOG_FILE)] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help=QUIET)] = False,
    log: Annotated[str | None, typer.Option(help=LOG)] = None,
) -> None:
    """Take up a run that was killed or interrupted, from its last checkpoint; of a folder of runs, every such one."""
    from fedcli.runs import run as runs
    from fedcli.runs.workers import joined

    limit_time(time_limit)
    if _to_launch(workers):
        _launch(workers)
    failed, options = False, {"method": method or (), "changed_method": changed_method}
    with joined() as group:
        folders = runs.find_unfinished(run)
        alone = len(folders) == 1 or group.count > 1  # of several workers one may have failed alone
        for folder in folders:
            try:
                watch(
                    lambda display, folder=folder: runs.resume(folder, **options, progress=display),
                    quiet,
                    log_file,
                    log,
                )
            except UserError as error:
                if alone:
                    raise
                typer.echo(f"error: {error}", err=True)
                failed = True
            except typer.Exit as end:
                if end.exit_code != 1 or alone:  # an interruption or the end of the time, which are of all runs
                    raise
                failed = True
    if failed:
        raise typer.Exit(1)


def verify(
    record: Annotated[Path, typer.Argument(metavar="RECORD", help="Folder or record.json of a run that has ended.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the repetition. \\[default: runs/<time>-<method>-<data>]")
    ] = None,
    device: Annotated[str | None, typer.Option(help="In place of the record's: cpu, cuda or cuda:N.")] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="File of yours that the run needs, as method or part; unchanged.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Run and compare so many of its rounds only. \\[default: all]")
    ] = None,
) -> None:
    """Run a record again in a new folder, and compare partition, curve, end and parameters.

    Says "same bits"; "same within x" on another machine or version; or what differs, with exit code 1. One that
    diverged has to diverge in the same round.

    With --rounds the curve so far and the terms of the objective are compared, "same to the last digit", and the
    repetition, one that was interrupted, is kept only in an --out that is named.
    """
    from fedcli.runs.verify import verify as verified

    verdict = watch(
        lambda display: verified(record, out=out, method=method or (), device=device, rounds=rounds, progress=display)
    )
    typer.echo(verdict.text)
    if not verdict.same:
        raise typer.Exit(1)


class _Run(MethodGroup):
    """`fedcli run`."""

    action = staticmethod(_run)
    more: ClassVar = {
        "seed": (
            ("seeds", str, "Several runs, one after the other, e.g. 0,1,2; each in OUT/seed-<seed>.", "Machine"),
            ("jobs", int, "Runs at once, of several seeds or values; each is a process of its own.", "Machine"),
        ),
        "clients_per_chunk": (
            ("workers", int, "Divide each round among so many processes of this machine; the same bits.", "Machine"),
        ),
        "last": (
            ("config", str, "TOML file of options, the method among them; what is typed goes before.", FILES),
            ("from_", str, "Folder or record of a run whose options are taken; what is typed goes before.", FILES),
            ("tuned", str, "Folder of 'fedcli tune', whose options are taken.", FILES),
            ("out", str, "Folder of the run, which must not exist. \\[default: runs/<time>-<method>-<data>]", "Output"),
            ("continue_", bool, "Go on in OUT: skip runs that have ended, resume those that have begun.", "Output"),
            ("log", str, LOG, "Output"),
            *SHOWN,
            *ON_OPTIONS,
            LIMIT,
        ),
    }


class _Tune(MethodGroup):
    """`fedcli tune`."""

    action = staticmethod(_tune)
    about = " Every option given beside the grid is the same in all trials."
    more: ClassVar = {
        "seed": (
            ("seeds", str, "Several seeds of each trial, e.g. 1000,1001, of which the mean counts.", "Machine"),
            ("jobs", int, "Runs at once; each is a process of its own.", "Machine"),
        ),
        "last": (
            (
                "grid", list[str], "An option and values to try, e.g. lr=0.01,0.1; of several all combinations. "
                "\\[default: what the method calls worth trying]", "Grid",
            ),
            (
                "out", str, "Folder of the trials. It keeps their records, so that none runs twice, and not their "
                "models. \\[default: runs/tune-...]", "Output",
            ),
            *SHOWN,
            *ON_OPTIONS,
            LIMIT,
        ),
    }  # fmt: skip


run_app = typer.Typer(
    cls=_Run,
    no_args_is_help=True,
    subcommand_metavar="METHOD [OPTIONS]",
    help="Run a method, by its name or by the path of a method file.\n\n"
    "Numbers and words of a choice may be several, as --lr 0.01,0.1: then every combination runs.\n\n"
    "'fedcli run METHOD --help' shows a method's options, 'fedcli show METHOD' its card and its protocols.",
)
tune_app = typer.Typer(
    cls=_Tune,
    no_args_is_help=True,
    subcommand_metavar="METHOD [OPTIONS]",
    help="Run a grid of options and choose by validation accuracy; test accuracy has no part in it.",
)
