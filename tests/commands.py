"""Commands of `fedcli` in the process of the tests, and what they print."""

import json
from pathlib import Path
from unittest.mock import patch

from typer.main import get_command
from typer.testing import CliRunner

from fedcli.cli import app

PROGRAM = get_command(app.app)  # which the runner would make anew for each command


def use_plain_terminal(monkeypatch):
    """Texts have no colours from here on, and lines of 120 columns."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")


def invoke(*arguments):
    """The result of a command of `fedcli` in this process."""
    with patch("typer.testing._get_command", return_value=PROGRAM):
        return CliRunner().invoke(app.app, list(map(str, arguments)), prog_name="fedcli")


def output_of(*arguments):
    """The output of a command that must succeed."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def error_of(*arguments):
    """The one line on stderr of a command that must be refused, and must write nothing, but what Python compiles."""
    before = set(Path.cwd().rglob("*"))
    result = invoke(*arguments)
    after = set(Path.cwd().rglob("*"))
    assert result.exit_code == 2, result.output
    assert type(result.exception) is SystemExit
    assert result.stdout.strip() == ""
    assert result.stderr.count("\n") == 1, result.output
    assert result.stderr.startswith("error: ")
    assert all("__pycache__" in path.parts for path in after ^ before)
    return result.stderr.removeprefix("error: ").strip()


def record_in(path):
    """The record in the folder of a run."""
    return json.loads((Path(path) / "record.json").read_text())


def cells(text):
    """The rows of a Markdown table in `text`, each by column."""
    table = []
    for line in text.splitlines():
        if line.startswith("|"):
            table.append([cell.strip() for cell in line.strip("|").split(" | ")])
    columns, _, *rows = table
    return [dict(zip(columns, row, strict=True)) for row in rows]
