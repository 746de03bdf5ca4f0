"""Records with a wild text in them."""

import random
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from fedcli.runs.record import read_record, write_record
from tests.torture.command_lines import WILD_VALUES
from tests.torture.nested_parts import text_entries
from tests.torture.processes import run_command_in_fork
from tests.torture.source_runs import run_with_features

TEXTS = (
    "<script>alert(1)</script>", "two\nlines", "=HYPERLINK(1)", "a|b", "`x`", "\u202eabc", "\ud800", "x" * 20_000,
    "\x00", "%s{}", "[red]", "../../etc", "[a](b)", "\\input{x}", *WILD_VALUES,
)  # fmt: skip
READING_COMMANDS = (
    "table r", "table r --format csv --metric best,domain,at:1/2,total-floats", "table r --format latex", "plot r",
    "plot r --x floats", "plot r --x seconds", "plot r --kind confusion", "resume r", "verify r", "quality r",
    "export r", "report r",
)  # fmt: skip


def put_wild_text(number: int) -> str | None:
    """A record with a wild text in it, which its digest vouches for, is read or refused in a line."""
    draw = random.Random(number)
    command = READING_COMMANDS[number % len(READING_COMMANDS)]
    with TemporaryDirectory() as parent:
        folder = shutil.copytree(run_with_features().folder, Path(parent, "r"))
        record = read_record(folder)
        container, key = draw.choice(text_entries(record))
        container[key] = draw.choice(TEXTS)
        write_record(folder, record)
        end = run_command_in_fork(Path(parent), *command.split())
    if end.fault is None:
        return None
    return f"{key!r}, {command}: {end.fault}"
