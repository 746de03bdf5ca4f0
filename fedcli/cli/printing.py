"""What the commands share: printing texts and tables, writing files, and ending with a message."""

import errno
import io
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from traceback import format_exception
from typing import Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedcli.errors import UserError, printable

Result = TypeVar("Result")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what the system says where a file has no room


class Lasting(io.FileIO):
    """A file that takes everything and loses what cannot be written: a closed terminal or pipe ends no training."""

    def write(self, data: Any) -> int:
        """Write bytes, or nothing."""
        with suppress(OSError):
            return super().write(data)
        return len(data)


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
        file = try_write(path, lambda: path.open("a", encoding="utf-8", buffering=1), "--log-file")
        consoles.append(Console(file=file, force_terminal=False, color_system=None, highlight=False))
    return consoles


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], gap: int = 2, screen: Console | None = None
) -> None:
    """Print a table whose cells are taken as they are; the first column is never broken, numbers stand to the right.

    Args:
        columns: Titles; all empty for a table without a line of titles.
        rows: Cells, which are printed as `str` gives them.
        gap: Spaces between two columns.
        screen: Where it is printed; on stdout if not given.
    """
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=any(columns))
    for number, column in enumerate(columns):
        numbers = all(str(row[number]).isdigit() or row[number] == "" for row in rows)
        table.add_column(printable(column), no_wrap=number == 0, justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    (screen or console()).print(table)


def print_or_write(text: str, out: Path | None) -> None:
    """Print a text, or write it to a file and print the file's name."""
    from fedcli.data.files import write_atomically  # late: help comes without NumPy

    if out is None:
        typer.echo(text, nl=False)
        return
    try_write(out, lambda: write_atomically(out, lambda path: path.write_text(text, encoding="utf-8")))
    typer.echo(str(out))


def try_write(out: Path, write: Callable[[], Result], flag: str = "--out") -> Result:
    """Make the folder of a file, and return what `write` returns; one that cannot be written is the user's mistake."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return write()
    except OSError as error:
        if error.errno in FULL:
            raise
        raise UserError(f"'{out}' cannot be written ({error.strerror}); choose another file with {flag}.") from error
