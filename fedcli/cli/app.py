"""The program `fedcli`: all commands, and where every mistake of the user's ends.

PyTorch and the papers are imported inside the commands, so that help comes at once.
"""

import errno
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import pairwise
from platform import python_version
from typing import Any, NamedTuple

import typer

from fedcli.cli import bench, checking, methods, models, plotting, running, tables, tuning
from fedcli.cli.data_sets import data
from fedcli.cli.groups import HelpfulGroup, UsageError
from fedcli.cli.method_options import MethodCommand
from fedcli.cli.options import comma_lists, optional, refuse_twice
from fedcli.cli.printing import Lasting, show_traceback, stop, stop_interrupted
from fedcli.errors import UserError, first_line
from fedcli.runs.signals import set_time_limit

COMMANDS_OF_METHODS = (running.run, tuning.tune)  # with the options of the methods that they name
COMMANDS = (
    methods.list_, methods.show, methods.new, running.run, running.resume, running.verify, tuning.tune,
    models.quality, plotting.plot, plotting.report, models.export, tables.table, tables.claims,
    running.smoke, checking.check, bench.bench,
)  # fmt: skip


@contextmanager
def _ends_in_a_line(ctx: typer.Context) -> Iterator[None]:
    """End the program with a line for a mistake of the user's, a full disk or memory, and an interruption."""
    try:
        yield
    except KeyboardInterrupt as error:
        stop_interrupted(f"{str(error) or 'interrupted'}.", error)
    except Exception as error:
        text, code = _explain(error)
        if not text:
            raise
        show_traceback(ctx, error)
        stop(f"error: {text}", code)
    finally:
        set_time_limit(float("inf"))


class Explanation(NamedTuple):
    """What an error means for the user."""

    text: str  # empty for an error of ours
    code: int  # exit code


def _explain(error: Exception) -> Explanation:
    """Explain an error that is the user's or the machine's."""
    if isinstance(error, UsageError):
        command = error.ctx.command_path if error.ctx else "fedcli"  # none where the last option lacks its value
        on_one_line = " ".join(error.format_message().split())
        return Explanation(f"{on_one_line} ('{command} --help' shows all)", 2)
    if isinstance(error, UserError):
        return Explanation(str(error), 2)
    if isinstance(error, OSError) and errno.errorcode.get(error.errno or 0) in ("ENOSPC", "EDQUOT", "EFBIG"):
        remedy = "free space; then a run goes on with 'fedcli resume RUN', and all else with the same command"
        return Explanation(f"'{error.filename}' cannot be written ({error.strerror}); {remedy}.", 1)
    if isinstance(error, OSError) and error.filename is not None:
        return Explanation(f"'{error.filename}' cannot be used ({error.strerror}); choose another path.", 2)
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop from"):
        return Explanation(f"a path leads to itself ({error}); choose another path.", 2)
    if isinstance(error, MemoryError) or re.search("allocate memory|out of memory", str(error)):
        smaller = "use a smaller --batch-size, --cohort-size, --local-epochs or network"
        return Explanation(f"out of memory ({first_line(error)}); {smaller}.", 1)
    return Explanation("", 0)


def _flag_of(word: str) -> str:
    """Read the option of a word of the command line, as `--lr` of `--lr=0.1`."""
    flag, _, _ = word.partition("=")
    return flag


def _refuse_empty(args: list[str]) -> None:
    """End the program for a value that is empty, but for a title, which a figure may be without."""
    for previous, word in pairwise(["fedcli", *args]):
        flag = _flag_of(word)
        if "--title" in (previous, flag):
            continue
        lacks_value = flag.startswith("--") and word == f"{flag}="
        if not word or lacks_value:
            stop(f"error: a value is empty (got it after '{word or previous}'); give one.", 2)


class _Root(HelpfulGroup):
    """The group of all commands, where every mistake of the user's ends."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse an empty value, which as a path would be the folder one is in, and an option given twice."""
        _refuse_empty(args)
        with _ends_in_a_line(ctx):
            flags = {_flag_of(word) for word in args if word.startswith("--")}
            once_only = [option for option in self._options_of(args) if not option.multiple]
            for option in once_only:
                for flag in flags.intersection(option.opts):
                    refuse_twice(args, flag, flag if flag in comma_lists else None)
            return super().parse_args(ctx, args)

    def _options_of(self, args: list[str]) -> list[Any]:
        """List the options of the program and of the command named; `MethodCommand` checks those of a method."""
        command: Any = self
        options = [*self.params]
        for word in args:
            subcommands = getattr(command, "commands", {})
            if word in subcommands:
                command = subcommands[word]
                options += command.params
        return options

    def invoke(self, ctx: Any) -> Any:
        with _ends_in_a_line(ctx):
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Root,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Methods of federated-learning papers, implemented and compared. Start with 'fedcli list' and 'fedcli run "
    "METHOD'.",
)


def _print_version(asked: bool) -> None:
    """Print the versions of what runs take their numbers from, and end."""
    if asked:
        typer.echo(f"fedcli {version('fedcli')}, torch {version('torch')}, Python {python_version()}")
        raise typer.Exit


@app.callback()
def common_options(
    traceback: optional(bool, "Show the full traceback of an error; put it before the command.", "--traceback") = False,
    version: optional(bool, "Print versions and exit.", "--version", callback=_print_version, is_eager=True) = False,
) -> None:
    """Take what all commands have in common; `show_traceback` reads it."""


app.add_typer(data, name="data")
for _command in COMMANDS:
    _kind = MethodCommand if _command in COMMANDS_OF_METHODS else None
    app.command(_command.__name__.strip("_"), cls=_kind)(_command)


def main() -> None:
    """Run the program `fedcli`; of several workers of a run the first alone is heard."""
    is_silent = "TORCHELASTIC_RUN_ID" in os.environ and os.environ["RANK"] != "0"
    sys.stdout = _lasting_stream(sys.stdout, 1, is_silent)
    sys.stderr = _lasting_stream(sys.stderr, 2, is_silent)
    app(prog_name="fedcli")


def _lasting_stream(stream: Any, descriptor: int, is_silent: bool) -> io.TextIOWrapper:
    """Make a stream that ends no training, in place of one of the program's; see `Lasting`.

    Args:
        stream: stdout or stderr; None where the program was started without it.
        descriptor: Its file descriptor.
        is_silent: Write nothing.
    """
    is_heard = stream is not None and not is_silent
    target = descriptor if is_heard else os.devnull
    file = Lasting(target, "w", closefd=not is_heard)
    encoding = "utf-8" if stream is None else stream.encoding  # which may not have all characters of a file's name
    return io.TextIOWrapper(io.BufferedWriter(file), encoding, errors="backslashreplace", line_buffering=True)
