"""How a command starts a run, shows it, and reports how it has ended."""

import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fedcli.cli.printing import Output, consoles, has_lines, stop, stop_interrupted
from fedcli.errors import NonFiniteLoss, UserError
from fedcli.run_files import RECORD
from fedcli.userfiles import user_files

if TYPE_CHECKING:  # it imports PyTorch, which help does not need
    from fedcli.cli.display import Display


def watch(start: Callable, output: Output, workers: int | None = None) -> Any:
    """Start a run with a display, and loggers; when it fails or is interrupted, print where it stands.

    With one of `workers`, it shares its work with no process.
    """
    from fedcli.cli.display import Display, print_line
    from fedcli.runs.loggers import Loggers
    from fedcli.runs.workers import joined

    with consoles(output) as (terminal, *log_files):
        display = Display(terminal, *log_files)
        try:
            with joined(allows_forks=workers != 1) as group:
                return start(progress=Loggers(display, output.log) if group.is_first else None)
        except UserError as error:
            if output.log_file is not None and has_lines(output.log_file):  # a refused run begins no file
                print_line(log_files, f"error: {error}")
            raise
        except NonFiniteLoss as error:
            message = f"error: {error}"
            if display.folder is not None:  # else this is one of several workers; the first one has the record
                message += f" The record is {display.folder / RECORD}."
            print_line(log_files, message)
            stop(message, 1)
        except KeyboardInterrupt as error:
            message = _interrupted_text(error, display)
            print_line(log_files, message)
            stop_interrupted(message, error)


def _interrupted_text(error: KeyboardInterrupt, display: "Display") -> str:
    """Write after which round a run was interrupted, and the command that resumes it."""
    if display.folder is None:
        return "interrupted before the first round."
    if display.record["status"] == "finished":
        return f"interrupted after the run had finished; its record is {display.folder / RECORD}."
    words = ["fedcli", "resume", str(display.folder)]
    for file in user_files(display.record):
        words += ["--method", file]
    rounds = f"{len(display.record['rounds'])}/{display.record['config']['rounds']} rounds"
    return f"{str(error) or 'interrupted'} after {rounds}; to resume: {shlex.join(words)}"
