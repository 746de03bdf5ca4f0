"""The program `fedcli`: all commands, and where every mistake of the user's ends.

PyTorch and the papers are imported inside the commands, so that help comes at once.
"""

import io
import math
import os
import re
import sys
from importlib.metadata import version
from itertools import pairwise
from platform import python_version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedcli.cli import data, machine, methods, running, tables
from fedcli.cli.common import Command, Lasting, short, show_traceback, stop, stop_if_full
from fedcli.errors import UserError
from fedcli.runs.signals import exit_code, interrupt_on_signals, set_time_limit


class _Root(TyperGroup):
    """The group of all commands, where every mistake of the user's ends."""

    def list_commands(self, ctx: typer.Context) -> list[str]:
        return [
            "list", "show", "run", "resume", "verify", "tune", "data", "quality", "plot", "report", "export", "table",
            "claims", "pages", "smoke", "check", "bench",
        ]  # fmt: skip

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Refuse an empty text in any place: as a path it would be the folder one is in, as a name everything."""
        for before, text in pairwise(["fedcli", *args]):
            if not text or re.fullmatch(r"--[a-z-]+=", text):
                stop(f"error: a value is empty (got it after '{short(text or before)}'); give one.", 2)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            show_traceback(ctx, error)
            stop(f"error: {error}", 2)
        except OSError as error:
            show_traceback(ctx, error)
            stop_if_full(error, "the same command")
            if error.filename is None:
                raise
            stop(f"error: '{short(error.filename)}' cannot be used ({error.strerror}); choose another path.", 2)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not re.search("allocate memory|out of memory", str(error)):
                raise
            show_traceback(ctx, error)
            stop(
                f"error: out of memory ({short(str(error))}); use a smaller --batch-size, --cohort-size, "
                "--local-epochs or network.", 1,
            )  # fmt: skip
        except KeyboardInterrupt as error:
            stop(f"{str(error) or 'interrupted'}.", exit_code(error))
        finally:
            set_time_limit(math.inf)


app = typer.Typer(
    cls=_Root,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Federated-learning papers, reproduced. Start with 'fedcli list' and 'fedcli run METHOD'.",
)


def _print_version(asked: bool) -> None:
    """Print the versions of what runs take their numbers from, and end."""
    if asked:
        typer.echo(f"fedcli {version('fedcli')}, torch {version('torch')}, Python {python_version()}")
        raise typer.Exit


@app.callback()
def root(
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the full traceback of an error; put it before the command.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    """Take what all commands have in common; `show_traceback` reads it."""


app.add_typer(running.run_app, name="run")
app.add_typer(running.tune_app, name="tune")
app.add_typer(data.app, name="data")
app.command("list", cls=Command)(methods.list_)
for _command in (
    methods.show, running.resume, running.verify, tables.quality, tables.report, tables.export, tables.table,
    tables.claims, tables.pages, machine.smoke, machine.check, machine.bench, tables.plot,
):  # fmt: skip
    app.command(cls=Command)(_command)


def main() -> None:
    """Run the program `fedcli`; of several workers of a run the first alone is heard."""
    interrupt_on_signals()
    silent = "TORCHELASTIC_RUN_ID" in os.environ and os.environ["RANK"] != "0"
    for number, name in enumerate(("stdout", "stderr"), 1):
        file = io.BufferedWriter(Lasting(os.devnull if silent else number, "w", closefd=silent))
        encoding = getattr(sys, name).encoding  # in which a file's name may be no text
        setattr(sys, name, io.TextIOWrapper(file, encoding, errors="backslashreplace", line_buffering=True))
    app(prog_name="fedcli")
