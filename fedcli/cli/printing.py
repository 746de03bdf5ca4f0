"""What the commands print: lines, tables and texts, an error's message at the end, and a run's output."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from traceback import format_exception
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedcli.errors import printable
from fedcli.files import write_atomically
from fedcli.run_files import refuse_file_of_a_run
from fedcli.runs.signals import exit_code, interruptions


class Lasting(io.FileIO):
    """A file that takes everything and loses what cannot be written: a closed terminal or pipe ends no training."""

    def write(self, data: Any) -> int:
        """Write bytes, or nothing."""
        with suppress(OSError):
            return super().write(data)
        return len(data)


def stop(message: str, code: int) -> NoReturn:
    """End the program with a line on stderr; after a signal as it asks, whatever a library has made of that."""
    if interruptions:
        first, *_ = interruptions
        stop_interrupted("interrupted.", first)
    say(message, err=True)
    raise typer.Exit(code)


def stop_interrupted(message: str, interruption: KeyboardInterrupt) -> NoReturn:
    """End the program after an interruption with a line on stderr about it."""
    interruptions.clear()
    say(message, err=True)
    raise typer.Exit(exit_code(interruption))


def say(line: object, err: bool = False) -> None:
    """Print a line with names of others' files or records; what moves the cursor or colours is written as `\\x1b`."""
    typer.echo(printable(line), err=err)


def show_traceback(ctx: typer.Context, error: BaseException) -> None:
    """Print an error's traceback on stderr if `fedcli --traceback` asks for it."""
    if ctx.find_root().params.get("traceback"):
        typer.echo("".join(format_exception(error)), err=True, nl=False)


def console() -> Console:
    """Make a console for stdout without colours for numbers and names."""
    return Console(highlight=False)


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where the output of a command about its runs goes, by the names of its options."""

    quiet: bool | None = None
    log_file: Path | None = None
    log: str | None = None  # names of loggers


@contextmanager
def consoles(output: Output, stderr: bool = False) -> Iterator[list[Console]]:
    """Make the consoles of runs: the terminal's, and one that adds to a `--log-file`.

    A new file that is still empty in the end, as of a run that was refused, goes with the folders made for it.
    """
    terminal = Console(stderr=stderr, highlight=False, quiet=bool(output.quiet))
    path = output.log_file
    if path is None:
        yield [terminal]
        return
    refuse_file_of_a_run(path)
    is_new = not path.exists()
    new_folders = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("a", encoding="utf-8", buffering=1) as file:
            yield [terminal, Console(file=file, force_terminal=False, color_system=None, highlight=False)]
    finally:
        if is_new and not has_lines(path):
            path.unlink(missing_ok=True)
            with suppress(OSError):  # another program may have written into one of them
                for folder in new_folders:
                    folder.rmdir()


def has_lines(log_file: Path) -> bool:
    """Whether something has been written into a `--log-file`."""
    return log_file.is_file() and log_file.stat().st_size > 0


def print_table(columns: Sequence[str], rows: Sequence[Any], screen: Console | None = None) -> None:
    """Print a table on stdout or a screen, without a header if all columns' names are empty.

    Cells are taken as they are, and none is cut; whole numbers stand to the right.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(columns))
    for column, *cells in zip(columns, *rows, strict=True):
        has_numbers = all(str(cell).isdigit() or cell == "" for cell in cells)
        table.add_column(Text(printable(column)), overflow="fold", justify="right" if has_numbers else "left")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    screen = screen or console()
    screen.print(table)


def write_text(path: Path, text: str) -> None:
    """Write a text into a file, whole or not at all; its folder is made."""
    refuse_file_of_a_run(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: file.write_text(text, encoding="utf-8"))


def write_and_name(path: Path, text: str) -> None:
    """Write a text into a file, and print its name."""
    write_text(path, text)
    say(path)


def print_markdown(text: str) -> None:
    """Print Markdown, on a terminal as it is read."""
    if not console().is_terminal:
        typer.echo(text, nl=False)
        return
    from fedcli.cli.markdown import WholeCells  # late: it takes a tenth of a second

    console().print(WholeCells(text))
