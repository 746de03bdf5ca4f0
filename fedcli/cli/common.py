"""What the commands share: options, printing, and ending with a message."""

import io
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from traceback import format_exception
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from fedcli.errors import UserError, needed, printable
from fedcli.files import write_atomically
from fedcli.runs.lock import refuse_file_of_a_run
from fedcli.runs.signals import interruptions, set_time_limit

LONGEST_RANGE = 1000  # seeds of a range
MACHINE = "Machine"  # panels of the help
OUTPUT = "Output"
# What Typer raises and does not export.
UsageError: Any = typer.BadParameter.__base__
NoSuchOption: Any = next(kind for kind in UsageError.__subclasses__() if kind.__name__ == "NoSuchOption")


def optional(kind: Any, help: str, *flags: str, panel: str | None = None, **traits: Any) -> Any:
    """Make the type of an option; without flags it has the name of its parameter."""
    return Annotated[kind | None, typer.Option(*flags, help=help, rich_help_panel=panel, **traits)]


def argument(kind: Any, metavar: str, help: str, **traits: Any) -> Any:
    """Make the type of an argument."""
    return Annotated[kind, typer.Argument(metavar=metavar, help=help, **traits)]


class HelpfulGroup(TyperGroup):
    """A group of commands that prints its help, and ends with code 2, where none is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Print the help if there are no arguments; `ctx` is a class of Typer's that it does not export."""
        if not args:
            help = ctx.get_help()  # which Typer may have printed already
            if help:
                typer.echo(help)
            raise typer.Exit(2)
        return super().parse_args(ctx, args)


def refuse_twice(args: Sequence[str], flag: str, several: str | None) -> None:
    """Refuse an option that is given twice, with its values in one where it takes several.

    Args:
        args: The words of the command line.
        flag: The option.
        several: The option that takes several values with commas between them; None for none.
    """
    values = []
    for word, next_word in zip(args, [*args[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == flag:
            values.append(value if equals else next_word)
    if len(values) < 2:
        return
    remedy = f"write {several} {','.join(values)}" if several else "give it once"
    raise UserError(f"{flag} is given twice; {remedy}.")


def parse_seeds(text: str) -> list[Any]:
    """Read the seeds of `--seeds 0,1,2` or `--seeds 0-2`; `check_seeds` refuses a part that is neither.

    A range has both its ends, the smaller first, and at most a thousand seeds.
    """
    seeds: list[Any] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*([0-9]{1,30})\s*(?:-\s*([0-9]{1,30})\s*)?", part)
        if ends is None:
            seeds.append(part)
            continue
        first, last = ends.groups()
        if last is None:
            seeds.append(int(first))
        elif 0 <= int(last) - int(first) < LONGEST_RANGE:
            seeds += range(int(first), int(last) + 1)
        else:
            seeds.append(part)
    return seeds


def limit_time(text: str | None) -> str | None:
    """Start the time of `--time-limit`; None for no limit."""
    if text is not None:
        parts = re.fullmatch(r"(?=.)(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s?)?", text)
        if parts is None:
            raise UserError(f"--time-limit must be a time (got '{text}'); write 90s, 9m, 2h, 1h30m or seconds.")
        hours, minutes, seconds = map(int, parts.groups("0"))
        set_time_limit(3600 * hours + 60 * minutes + seconds)
    return text


Seeds = optional(Any, "Seeds, a run for each, e.g. 0,1,2 or 0-2.", panel=MACHINE, parser=parse_seeds, metavar="TEXT")
Jobs = optional(int, "Parallel runs, each in a process of its own.", panel=MACHINE, min=1)
Workers = optional(int, "Processes that share each round; the bits stay the same.", panel=MACHINE, min=1)
On = optional(str, "ray or ray:ADDRESS: every run a task of Ray, in a shared folder.", panel=MACHINE)
Cpus = optional(float, "With --on ray: cores for a run; 1 by default.", panel=MACHINE, min=0)
Gpus = optional(float, "With --on ray: GPUs for a run; 0.25 packs four on one.", panel=MACHINE, min=0)
TimeLimit = optional(str, "Stop at a checkpoint after 90s, 9m or 1h30m.", panel=MACHINE, callback=limit_time)
LogFile = optional(Path, "File to append the output to.", panel=OUTPUT)
Quiet = optional(bool, "Print nothing but errors.", "--quiet", panel=OUTPUT)
Log = optional(str, "Log each round to tensorboard, wandb or ./file.py:NAME, or several of them.", panel=OUTPUT)
Code = optional(list[str], "A Python file of yours that the run needs; no other is imported.", "--method")
Datasets = optional(list[str], "Only runs on this data set; repeat it for several.")
Labels = optional(list[str], "Name for the runs of a RUN; one for each RUN.")
Client = optional(int, "Client whose own model to use, not the global one.")
Runs = argument(list[Path], "RUN", "Run folders, or folders that hold run folders.")
Format = optional(Literal["markdown", "csv", "latex"], "Form of the table.")


def place_runs(jobs: int | None, on: str | None, cpus: float | None, gpus: float | None) -> dict[str, Any]:
    """Read `--jobs`, `--on`, `--cpus-per-run` and `--gpus-per-run` for `jobs.execute`; {} for one by one."""
    jobs = jobs or 1
    if on is None and cpus is None and gpus is None:
        return {"jobs": jobs} if jobs > 1 else {}
    name, _, address = str(on).partition(":")
    if name != "ray" or jobs > 1:
        fault = f"--on must be ray or ray:ADDRESS, without --jobs (got --on {on}, --jobs {jobs})"
        raise UserError(f"{fault}; write --on ray, or leave --cpus-per-run and --gpus-per-run out.")
    needed("ray", "--on ray", "ray")
    for flag, value in {"--cpus-per-run": cpus, "--gpus-per-run": gpus}.items():
        if value is not None and value > 1 and value % 1:
            raise UserError(f"{flag} must be a part of one or a whole number (got {value:g}); write 0.25, 1 or 2.")
    cluster = {
        "address": address or None,
        "num_cpus": 1.0 if cpus is None else cpus,
        "num_gpus": gpus or 0.0,
    }
    return {"cluster": cluster}


def records_of(runs: Sequence[Any], methods: list | None, datasets: list | None, labels: list | None) -> list[dict]:
    """Read the records of runs that `--method`, `--dataset` and `--label` choose and name."""
    from fedcli.results.frame import find_records
    from fedcli.results.tables import select_records

    records = find_records(runs, labels or ())
    return select_records(records, methods or (), datasets or ())


class Lasting(io.FileIO):
    """A file that takes everything and loses what cannot be written: a closed terminal or pipe ends no training."""

    def write(self, data: Any) -> int:
        """Write bytes, or nothing."""
        with suppress(OSError):
            return super().write(data)
        return len(data)


def stop(message: str, code: int) -> NoReturn:
    """End the program with a line on stderr; after a signal it says so, whatever a library has made of that."""
    if interruptions and not message.startswith("interrupted"):
        message = "interrupted."
        code = interruptions[0].code
    interruptions.clear()
    say(message, err=True)
    raise typer.Exit(code)


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


def consoles(quiet: bool | None, log_file: Path | None, stderr: bool = False) -> list[Console]:
    """Make the consoles of a run: the terminal's, and one that adds to a `--log-file`."""
    consoles = [Console(stderr=stderr, highlight=False, quiet=bool(quiet))]
    if log_file is not None:
        refuse_file_of_a_run(log_file)
        log_file.parent.mkdir(parents=True, exist_ok=True)
        file = log_file.open("a", encoding="utf-8", buffering=1)
        consoles.append(Console(file=file, force_terminal=False, color_system=None, highlight=False))
    return consoles


def print_table(columns: Sequence[str], rows: Sequence[Any], screen: Console | None = None) -> None:
    """Print a table on stdout or a screen, without a header if all columns' names are empty.

    Cells are taken as they are, and none is cut; whole numbers stand to the right.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(columns))
    for column, *cells in zip(columns, *rows, strict=True):
        has_numbers = all(str(cell).isdigit() or cell == "" for cell in cells)
        table.add_column(printable(column), overflow="fold", justify="right" if has_numbers else "left")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    screen = screen or console()
    screen.print(table)


def write_text(path: Path, text: str) -> None:
    """Write a text into a file, whole or not at all; its folder is made."""
    refuse_file_of_a_run(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: file.write_text(text, encoding="utf-8"))


def print_text(text: str, out: Path | None = None, is_markdown: bool = False) -> None:
    """Print a text, Markdown as it is read if on a terminal; or write it to a file and print its name."""
    if out is not None:
        write_text(out, text)
        say(out)
    elif is_markdown and console().is_terminal:
        from rich import markdown  # late: a tenth of a second

        class Cell(markdown.TableDataElement):  # no cell is cut
            def __init__(self, **traits: Any):
                super().__init__(**traits)
                self.content.overflow = "fold"

        markdown.Markdown.elements |= {"th_open": Cell, "td_open": Cell}
        console().print(markdown.Markdown(text))
    else:
        typer.echo(text, nl=False)
