"""What the commands share: printing texts and tables, writing files, and ending with a message."""

import errno
import importlib.util
import io
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from traceback import format_exception
from typing import Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from fedcli import registry
from fedcli.declarations import flag_of
from fedcli.errors import UserError, printable
from fedcli.runs.signals import set_time_limit

Result = TypeVar("Result")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what the system says where a file has no room
COMPLETED = ("method", "shown", "protocol", "post", "backbone", "dataset", "public_dataset")
TIME_LIMIT = "Time after which runs end at a checkpoint, to be taken up later, as 9m, 2h, 1h30m, or seconds."
_TIME = re.compile(r"(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s)?")


class Lasting(io.FileIO):
    """A file that takes everything and loses what cannot be written: a closed terminal or pipe ends no training."""

    def write(self, data: Any) -> int:
        """Write bytes, or nothing."""
        with suppress(OSError):
            return super().write(data)
        return len(data)


class Command(TyperCommand):
    """A command that refuses an option given twice, and knows what other toolkits call ours."""

    def unknown(self, flag: str) -> UserError | None:
        """Make the error for an option that there is not; None where Typer's own says enough."""
        from fedcli.runs.config import meant_option

        guess = meant_option(flag, {}, [parameter.name for parameter in self.params])
        return guess and UserError(
            f"unknown option {flag}; did you mean {flag_of(guess)}? 'fedcli {self.name} --help' shows all."
        )

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Read the arguments after having looked for such mistakes."""
        if not ctx.resilient_parsing:
            try:
                *_, given = self.make_parser(ctx).parse_args(args=list(args))
            except Exception as error:
                if not getattr(error, "option_name", "").startswith("--") or not hasattr(error, "possibilities"):
                    raise
                raise self.unknown(error.option_name) or error from error
            for parameter in given:
                if given.count(parameter) > 1 and not getattr(parameter, "multiple", True):
                    flag = parameter.opts[0]
                    raise UserError(f"{flag} is given twice; give it once.")
        return super().parse_args(ctx, args)


def completion(name: str, choices: Sequence[str] = ()) -> Callable[[str], list[str]] | None:
    """Make what a shell is told that completes the value of an option or argument; None where there is nothing to tell.

    Args:
        name: "method", an option's name, or "shown" for what 'fedcli show' takes.
        choices: The values that the option allows, if it names them.
    """

    def complete(incomplete: str) -> list[str]:
        return [value for value in choices or _values()[name] if value.startswith(incomplete.lower())]

    return complete if choices or name in COMPLETED else None


def _values() -> dict[str, Iterable[str]]:
    """What the options and arguments of `COMPLETED` may be."""
    from fedcli.core.backbones import BACKBONES
    from fedcli.data import datasets

    methods, protocols, posts = registry.methods(), registry.protocols(), registry.posts()
    return {
        "method": methods, "protocol": protocols, "post": posts, "shown": [*methods, *protocols, *posts],
        "backbone": BACKBONES, "dataset": datasets.names(), "public_dataset": datasets.names(),
    }  # fmt: skip


def stop(message: str, code: int) -> NoReturn:
    """End the program with one line on stderr."""
    typer.echo(printable(message), err=True)
    raise typer.Exit(code)


def stop_if_full(error: OSError, command: str) -> None:
    """End the program with one line if a disk is full, and tell the command that goes on."""
    if error.errno in FULL:
        stop(f"error: '{error.filename}' cannot be written ({error.strerror}); make room; {command} goes on.", 1)


def short(text: object) -> str:
    """The beginning of the first line of a text, as much of it as a message has room for."""
    line = (str(text).splitlines() or [""])[0]
    return line if len(line) <= 100 else line[:97] + "..."


def show_traceback(ctx: typer.Context, error: BaseException) -> None:
    """Print an error's traceback on stderr where `fedcli --traceback` asks for it."""
    if ctx.find_root().params["traceback"]:
        typer.echo("".join(format_exception(error)), err=True, nl=False)


def console(quiet: bool = False) -> Console:
    """Make a console for stdout that leaves numbers and names uncoloured; a quiet one prints nothing."""
    return Console(highlight=False, quiet=quiet)


def consoles(quiet: bool | None, log_file: str | None, stderr: bool = False) -> list[Console]:
    """Make the consoles that a run is shown on: the terminal's and, where there is a `--log-file`, one that adds to it.

    Args:
        quiet: Whether the first prints nothing.
        log_file: The file; None for none.
        stderr: Whether the first is that of stderr.
    """
    consoles = [Console(stderr=stderr, highlight=False, quiet=bool(quiet))]
    if log_file is not None:
        path = Path(log_file)
        try_write(path, lambda: path.parent.mkdir(parents=True, exist_ok=True), "--log-file")
        file = try_write(path, lambda: path.open("a", encoding="utf-8", buffering=1), "--log-file")
        consoles.append(Console(file=file, force_terminal=False, color_system=None, highlight=False))
    return consoles


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], gap: int = 2) -> None:
    """Print a table whose cells are taken as they are; the first column is never broken, numbers stand to the right.

    Args:
        columns: Titles; all empty for a table without a line of titles.
        rows: Cells, which are printed as `str` gives them.
        gap: Spaces between two columns.
    """
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=any(columns))
    for number, column in enumerate(columns):
        numbers = all(str(row[number]).isdigit() or row[number] == "" for row in rows)
        table.add_column(printable(column), no_wrap=number == 0, justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console().print(table)


def print_or_write(text: str, out: Path | None) -> None:
    """Print a text, or write it to a file and print the file's name."""
    from fedcli.data.files import write_atomically  # late: help comes without NumPy

    if out is None:
        typer.echo(text, nl=False)
        return
    try_write(out, lambda: out.parent.mkdir(parents=True, exist_ok=True))
    try_write(out, lambda: write_atomically(out, lambda path: path.write_text(text, encoding="utf-8")))
    typer.echo(str(out))


def try_write(out: Path, write: Callable[[], Result], flag: str = "--out") -> Result:
    """Return what `write` returns; a file that cannot be written is the user's mistake, but for a full disk."""
    try:
        return write()
    except OSError as error:
        if error.errno in FULL:
            raise
        raise UserError(f"'{out}' cannot be written ({error.strerror}); choose another file with {flag}.") from error


def parse_seeds(text: str) -> list[int | str]:
    """Read the seeds of `--seeds 0,1,2`; a part that is no number stays as it is, and is refused with the others."""
    return [int(part) if re.fullmatch(r"\s*-?[0-9]{1,30}\s*", part) else part for part in text.split(",")]


def limit_time(limit: str | int | None) -> None:
    """Read a `--time-limit`, which counts from now; None for none."""
    if limit is None:
        return
    parts = _TIME.fullmatch(f"{limit}s" if str(limit).isdecimal() else str(limit))
    if parts is None or not parts[0]:
        raise UserError(f"--time-limit must be a time (got '{limit}'); write 90s, 9m, 2h, 1h30m or seconds.")
    hours, minutes, seconds = (int(part or 0) for part in parts.groups())
    set_time_limit(3600 * hours + 60 * minutes + seconds)


def find_cluster(on: str | None, cpus: float | None, gpus: float | None, elsewhere: bool = False) -> dict | None:
    """Read `--on`, `--cpus-per-run` and `--gpus-per-run` as `jobs.execute` takes them; None where none is given.

    Args:
        on: "ray" or "ray:ADDRESS".
        cpus: Cores for a run.
        gpus: GPUs for a run.
        elsewhere: Whether other options say already where the runs go.
    """
    if on is None and (cpus is not None or gpus is not None):
        raise UserError("--cpus-per-run and --gpus-per-run are for --on ray (got no --on); leave them out.")
    if on is None:
        return None
    if elsewhere:
        raise UserError(f"--on {on} says where the runs go (got --jobs or --workers too); leave one of them out.")
    name, _, address = on.partition(":")
    if name != "ray":
        raise UserError(f"--on must be ray or ray:ADDRESS (got '{on}'); write --on ray.")
    if importlib.util.find_spec("ray") is None:
        raise UserError("--on ray needs Ray (got no module 'ray'); pip install 'fedcli[ray]' brings it.")
    for flag, value in (("--cpus-per-run", cpus), ("--gpus-per-run", gpus)):
        if value is not None and (value < 0 or (value > 1 and value != int(value))):
            raise UserError(f"{flag} must be a part of one or a whole number (got {value:g}); write 0.25, 1 or 2.")
    return {"address": address or None, "num_cpus": 1.0 if cpus is None else cpus, "num_gpus": gpus or 0.0}
