"""The commands that run methods: `run`, `resume` and `tune`."""

import inspect
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar, get_type_hints

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from fedcli import registry
from fedcli.cli.printing import console, find_cluster, flag_of, parse_seeds, print_table, stop, stop_if_full
from fedcli.errors import UserError

Result = TypeVar("Result")
ON_OPTIONS = (
    ("on", str, "ray or ray:ADDRESS: every run a task of Ray; OUT lies on storage that its nodes share.", "Machine"),
    ("cpus_per_run", float, "With --on ray: cores for a run. \\[default: 1]", "Machine"),
    ("gpus_per_run", float, "With --on ray: GPUs for a run; 0.25 packs four on one. \\[default: 0]", "Machine"),
)
ON = [name for name, *_ in ON_OPTIONS]


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

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:
        """Make the command of a method, or of a method file."""
        return _method_command(registry.find_method(cmd_name), cmd_name, self, ctx.meta.get("post"))


class _HelpLast(TyperCommand):
    """A command whose `--help` stands in the last panel, so that the method's own panel is the first."""

    def get_help_option(self, ctx: typer.Context) -> Any:
        option = super().get_help_option(ctx)
        option.rich_help_panel = "Output"
        return option


def _method_command(method: registry.Method, given_name: str, group: MethodGroup, post: str | None) -> Any:
    """Make the command of a method from the fields of `RunConfig`, of the method's `Config` and of `--post`'s."""
    from fedcli.cli.describe import option_help
    from fedcli.runs.config import RunConfig, option_panels

    kinds = (RunConfig, method.config, *(step.config for step in registry.posts(method, post).values()))
    types = {name: kind for config in kinds for name, kind in get_type_hints(config).items()}
    parameters = []
    for title, panel in option_panels(method, post).items():
        for name, field in panel.items():
            parameters.append(_parameter(name, types[name], escape(option_help(method, field)), title))
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
        given_name, cls=_HelpLast, help=about, short_help=escape(method.title), rich_help_panel="Methods"
    )
    register(command)
    return typer.main.get_command(single)


def _parameter(name: str, kind: Any, help_: str, panel: str) -> inspect.Parameter:
    """Make a parameter of a command that is None unless its flag is given."""
    flag = f"{flag_of(name)}/--no-{flag_of(name)[2:]}" if kind is bool else flag_of(name)
    words = {"parser": _number_or_auto, "metavar": "INTEGER|auto"} if name == "checkpoint_every" else {}
    option = typer.Option(flag, help=help_, rich_help_panel=escape(panel), show_default=False, **words)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _number_or_auto(text: str) -> int | None:
    """Read a number; `auto` is the same as leaving the option out."""
    if text != "auto" and not text.lstrip("-").isdecimal():
        raise UserError(f"--checkpoint-every must be auto or a whole number from 1 (got '{text}'); choose one of them.")
    return None if text == "auto" else int(text)


def _tune(method: str, given: dict[str, Any]) -> None:
    """Run a grid, and print its trials and the options to use."""
    from fedcli.results.tune import TUNED, tune

    texts, cluster = given.pop("grid") or (), find_cluster(*(given.pop(name) for name in ON))
    spread = None if cluster is None else lambda todo: _on_cluster(todo, cluster, "the same command")
    trials, folder = watch(lambda display: tune(method, texts, progress=display, spread=spread, **given))
    names = list(trials[0].values)
    rows = [
        (*trial.values.values(), "diverged" if trial.accuracy is None else f"{100 * trial.accuracy:.2f}")
        for trial in trials
    ]
    print_table((*map(flag_of, names), "Validation accuracy, %"), rows)
    flags = shlex.join(text for name, value in trials[0].values.items() for text in (flag_of(name), str(value)))
    typer.echo(f"use {flags}, or {shlex.join(['--tuned', str(folder)])} ({folder / TUNED})")


def _run(method: str, given: dict[str, Any]) -> None:
    """Run a method with what was given; draw one curve over the seeds where there are several."""
    from fedcli.figures import plots
    from fedcli.results import tables
    from fedcli.runs import run as runs
    from fedcli.runs.workers import joined

    seeds = given["seeds"] = None if given["seeds"] is None else parse_seeds(given["seeds"])
    more = {"continue_": given.pop("continue_")}
    workers = given.pop("workers")
    cluster = find_cluster(*(given.pop(name) for name in ON), workers is not None)
    if cluster is not None:
        return _run_on_cluster(method, given, **more, cluster=cluster)
    if _to_launch(workers):
        folder = runs.plan(method, **given)[1][0]  # also refuses what can be refused now
        _launch(workers, () if given["out"] else ("--out", folder if seeds is None else folder.parent))
    with joined() as group:
        done = watch(lambda display: runs.run(method, **given, **more, progress=display))
    if seeds is not None and group.number == 0:
        parent = done[0].path.parent
        files = plots.write(parent / "curve", plots.learning_curves, tables.find_records([parent]))
        typer.echo(f"curve over the seeds: {' and '.join(map(str, files))}")


def _run_on_cluster(method: str, given: dict[str, Any], continue_: bool | None, cluster: Any) -> None:
    """Run a method, with every seed, as tasks of a cluster; draw one curve over the seeds."""
    from fedcli.figures import plots
    from fedcli.results import tables
    from fedcli.results.reproduce import PlannedRun
    from fedcli.runs import run as runs

    setups, folders = runs.plan(method, **given)
    begun = runs.find_begun(setups, folders, bool(continue_))
    others = {name: value for name, value in given.items() if name not in ("out", "seeds") and value is not None}
    if "tuned" in others:
        others["tuned"] = str(Path(others["tuned"]).resolve())
    todo = [
        PlannedRun(setup.method.name, method, {**others, "seed": setup.run.seed}, setup, {}, folder, record)
        for setup, folder, record in zip(setups, folders, begun, strict=True)
        if record is None or not runs.has_ended(record)
    ]
    errors = _on_cluster(todo, cluster, f"'fedcli resume {folders[0].parent if given['seeds'] else folders[0]}'")
    if given["seeds"] is not None and not errors:
        parent = folders[0].parent
        files = plots.write(parent / "curve", plots.learning_curves, tables.find_records([parent]))
        typer.echo(f"curve over the seeds: {' and '.join(map(str, files))}")
    if errors:
        raise typer.Exit(1)


def _on_cluster(todo: Sequence[Any], cluster: Any, command: str) -> dict[Path, str]:
    """Run on a cluster what is to do, and show it; after an interruption tell the command that goes on."""
    from fedcli.cli.display import TableDisplay
    from fedcli.results.jobs import on_cluster
    from fedcli.runs.signals import exit_code

    with TableDisplay(console(), todo) as display:
        try:
            return on_cluster(todo, display, cluster)
        except KeyboardInterrupt as error:
            place = f"{display.ended} of {display.total} runs"
            stop(f"interrupted after {place}; {command} goes on.", exit_code(error))


def watch(start: Callable[[Any], Result]) -> Result:
    """Start a run with a display; when it fails or is interrupted, say where it stands."""
    from fedcli.cli.display import Display
    from fedcli.core.federation import NonFiniteLoss
    from fedcli.runs.records import RECORD
    from fedcli.runs.signals import exit_code
    from fedcli.runs.workers import joined

    display = Display(console())
    try:
        with joined() as group:
            return start(display if group.number == 0 else None)
    except NonFiniteLoss as error:
        stop(f"error: {error} The record is {display.folder / RECORD}.", 1)
    except OSError as error:
        if display.folder is not None:
            stop_if_full(error, f"'{_resume_command(display.folder, display.record)}'")
        raise
    except KeyboardInterrupt as error:
        if display.folder is None:
            stop("interrupted before the first round.", exit_code(error))
        place = f"{len(display.record['rounds'])}/{display.record['config']['rounds']} rounds"
        stop(
            f"interrupted after {place}; '{_resume_command(display.folder, display.record)}' goes on.", exit_code(error)
        )


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

    raise typer.Exit(launch(_as_worker, [*sys.argv[1:], *map(str, more)], count=workers))


def _as_worker(arguments: list[str]) -> int:
    """Run the program as one of several workers; returns its exit code, unless it is to be started again."""
    from fedcli.cli.app import main
    from fedcli.runs.workers import LOST

    os.setsid()  # Ctrl-C comes from the launcher, once
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as end:
        if end.code == LOST:
            raise
        return end.code or 0
    except Exception:
        traceback.print_exc()  # raised further, it would start all again
        return 1
    return 0


def _resume_command(folder: Path, record: dict[str, Any]) -> str:
    """What to type to take up a run."""
    from fedcli.runs.consent import own_files

    named = (text for path in own_files(record) for text in ("--method", path))
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
) -> None:
    """Take up a run that was killed or interrupted, from its last checkpoint; of a folder of runs, every such one."""
    from fedcli.runs import run as runs
    from fedcli.runs.workers import joined

    if _to_launch(workers):
        _launch(workers)
    failed, options = False, {"method": method or (), "changed_method": changed_method}
    with joined() as group:
        folders = runs.find_unfinished(run)
        alone = len(folders) == 1 or group.count > 1  # of several workers one may have failed alone
        for folder in folders:
            try:
                watch(lambda display, folder=folder: runs.resume(folder, **options, progress=display))
            except UserError as error:
                if alone:
                    raise
                typer.echo(f"error: {error}", err=True)
                failed = True
            except typer.Exit as end:
                if end.exit_code != 1 or alone:  # an interruption, which is one of all runs
                    raise
                failed = True
    if failed:
        raise typer.Exit(1)


def verify(
    record: Annotated[Path, typer.Argument(metavar="RECORD", help="Folder or record.json of a finished run.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the repetition. \\[default: runs/<time>-<method>-<data>]")
    ] = None,
    device: Annotated[str | None, typer.Option(help="In place of the record's: cpu, cuda or cuda:N.")] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="File of yours that the run needs, as method or part; unchanged.")
    ] = None,
) -> None:
    """Run a record again in a new folder, and compare partition, curve and parameters.

    Says "same bits"; "same within x" on another machine or version; or what differs, with exit code 1.
    """
    from fedcli.runs.verify import verify as verified

    verdict = watch(lambda display: verified(record, out=out, method=method or (), device=device, progress=display))
    typer.echo(verdict.text)
    if not verdict.same:
        raise typer.Exit(1)


class _Run(MethodGroup):
    """`fedcli run`."""

    action = staticmethod(_run)
    more: ClassVar = {
        "seed": (("seeds", str, "Several runs, one after the other, e.g. 0,1,2; each in OUT/seed-<seed>.", "Machine"),),
        "clients_per_chunk": (
            ("workers", int, "Divide each round among so many processes of this machine; the same bits.", "Machine"),
        ),
        "last": (
            ("tuned", str, "Folder of 'fedcli tune', whose options are taken.", "Output"),
            ("out", str, "Folder of the run, which must not exist. \\[default: runs/<time>-<method>-<data>]", "Output"),
            ("continue_", bool, "Go on in OUT: skip runs that have ended, resume one that has begun.", "Output"),
            *ON_OPTIONS,
        ),
    }


class _Tune(MethodGroup):
    """`fedcli tune`."""

    action = staticmethod(_tune)
    about = " Every option given beside the grid is the same in all trials."
    more: ClassVar = {
        "last": (
            (
                "grid", list[str], "An option and values to try, e.g. lr=0.01,0.1; of several all combinations. "
                "\\[default: what the method calls worth trying]", "Grid",
            ),
            ("out", str, "Folder of the trials; those that have run are kept. \\[default: runs/tune-...]", "Output"),
            *ON_OPTIONS,
        ),
    }  # fmt: skip


run_app = typer.Typer(
    cls=_Run,
    no_args_is_help=True,
    subcommand_metavar="METHOD [OPTIONS]",
    help="Run a method, by its name or by the path of a method file.\n\n"
    "'fedcli run METHOD --help' shows a method's options, 'fedcli show METHOD' its card and its protocols.",
)
tune_app = typer.Typer(
    cls=_Tune,
    no_args_is_help=True,
    subcommand_metavar="METHOD [OPTIONS]",
    help="Run a grid of options and choose by validation accuracy; no test image is looked at.",
)
