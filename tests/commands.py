"""Runs commands of `fedcli` in the process of the tests, and reads what they print."""

import json
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from typer.main import get_command
from typer.testing import CliRunner

from fedcli.cli import app

PROGRAM = get_command(app.app)  # Typer's runner would make it anew for each command


def use_plain_terminal(monkeypatch):
    """Makes all that commands print plain text without colours, in lines of 120 columns, until the test ends."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")


def invoke(*arguments):
    """Runs a command of `fedcli` in this process; returns its result, which has exit code, stdout and stderr."""
    with patch("typer.testing._get_command", return_value=PROGRAM):
        return CliRunner().invoke(app.app, list(map(str, arguments)), prog_name="fedcli")


def run_command(*arguments):
    """Runs a command that must succeed; returns its result."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result


def output_of(*arguments):
    """Runs a command that must succeed; returns what it prints to stdout."""
    return run_command(*arguments).stdout


class FileStamp(NamedTuple):
    """What changes when a file is written."""

    size: int
    nanoseconds: int  # when it was written last


def stamps_of_files():
    """Returns the stamps of the files below the working folder, None for a folder, by path.

    What Python compiles is left out.
    """
    stamps = {}
    for path in Path.cwd().rglob("*"):
        if "__pycache__" in path.parts:
            continue
        status = path.lstat()
        stamps[path] = None if path.is_dir() else FileStamp(status.st_size, status.st_mtime_ns)
    return stamps


def error_of(*arguments):
    """Runs a command that must be refused in one line and write nothing; returns that line without "error: ".

    Only what Python compiles may change in the working folder, which should be that of a test alone, as the fixture
    `folder` makes one.
    """
    before = stamps_of_files()
    result = invoke(*arguments)
    after = stamps_of_files()
    assert result.exit_code == 2, result.output
    assert type(result.exception) is SystemExit
    assert result.stdout.strip() == ""
    assert result.stderr.count("\n") == 1, result.output
    assert result.stderr.startswith("error: ")
    assert after == before
    return result.stderr.removeprefix("error: ").strip()


def record_in(path):
    """Reads the record in the folder of a run, without the checks of `read_record`."""
    return json.loads((Path(path) / "record.json").read_text())


def markdown_rows(text):
    """Returns the rows of the Markdown table in a text, each a dictionary of its cells by column."""
    lines = []
    for line in text.splitlines():
        if line.startswith("|"):
            lines.append([cell.strip() for cell in line.strip("|").split(" | ")])
    columns = lines[0]
    rows = lines[2:]  # the second line has dashes alone
    return [dict(zip(columns, row, strict=True)) for row in rows]
