"""The short round of the trials in `tests/torture`, and a test for each thing that they have broken."""

import csv
import os
import shutil
import signal
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import fedcli
from fedcli import registry
from fedcli.errors import UserError, printable
from fedcli.figures import partitions, saving
from fedcli.measure import quality
from fedcli.results.render import TextTable, escape_markdown, render
from fedcli.runs import begin
from fedcli.runs.record import read_record, write_record
from fedcli.runs.resolve import refuse_without_effect, resolve
from fedcli.runs.schema import check_record
from tests.commands import invoke
from tests.image_files import image_arrays, import_arrays, write_folder_of_one_class
from tests.programs import WaitingRuns, start_program
from tests.run_options import SHORT_RUN
from tests.torture.command_lines import fuzz_command_line
from tests.torture.damaged_files import damage_run
from tests.torture.faults import faults_of
from tests.torture.kills import kill_repeatedly
from tests.torture.nested_parts import text_entries
from tests.torture.processes import import_commands
from tests.torture.swapped_buffers import swap_buffers
from tests.torture.wild_texts import READING_COMMANDS, put_wild_text
from tests.user_errors import raises_user_error

pytestmark = pytest.mark.long(worker=1)

SHORT_ROUND = {
    kill_repeatedly: 3,
    damage_run: 14,
    fuzz_command_line: 12,
    put_wild_text: 13,
    swap_buffers: 12,
}


@pytest.fixture(scope="module")
def imported_commands():
    """Imports what commands import late, so that their forks need not."""
    import_commands()


@pytest.mark.slow
@pytest.mark.parametrize("trial", SHORT_ROUND, ids=lambda trial: trial.__name__)
def test_a_short_round_of_trials_breaks_nothing(trial, imported_commands):
    assert not faults_of(trial, SHORT_ROUND[trial])


# Edges

SMALL_RUN = {
    "backbone": "cnn-small", "num_clients": 4, "cohort_size": 2, "rounds": 2, "device": "cpu", "partition": "iid",
    "batch_size": 8, "local_epochs": 1,
}  # fmt: skip


def test_a_domain_or_a_class_without_test_images_is_left_out(tmp_path):
    arrays = image_arrays((8, 8), 3, per_class=(20, 4))
    domains = {"domain_train": np.arange(60) % 2, "domain_test": np.zeros(12, int)}
    import_arrays("two", tmp_path, **arrays, **domains, domain_names=np.array(["p", "q"]))
    record = fedcli.run("fedavg", out=tmp_path / "run", dataset="two", **SMALL_RUN).record
    assert len(record["rounds"]) == 2
    for entry in record["rounds"]:
        assert list(entry["domains"]) == ["p"]
        assert np.isfinite(entry["domains"]["p"])

    is_kept = arrays["y_test"] < 2
    arrays["x_test"] = arrays["x_test"][is_kept]
    arrays["y_test"] = arrays["y_test"][is_kept]
    import_arrays("three", tmp_path, **arrays, class_names=np.array(["a", "b", "c"]))
    options = {**SMALL_RUN, "per_class": True}
    record = fedcli.run("fedproto", out=tmp_path / "three", dataset="three", **options).record
    assert record["status"] == "finished"
    for entry in record["rounds"]:
        assert entry["per_class"]["actual"][2] == 0  # of the class that was left out
        assert np.isfinite(entry["test_accuracy"])


def test_options_without_effect_are_refused_from_a_user_alone():
    options = {**SHORT_RUN, "optimizer": "adam", "momentum": 0.5}
    fedavg = registry.find_method("fedavg")
    with raises_user_error("--momentum is for --optimizer sgd"):
        refuse_without_effect(resolve(fedavg, options))

    of_a_record = resolve(fedavg, options, sources={"momentum": "run a"})
    refuse_without_effect(of_a_record)  # does not raise


@pytest.mark.parametrize("table", registry.tables().values(), ids=registry.tables())
def test_no_cell_of_a_papers_table_has_an_option_that_is_refused(table):
    for cell in table.cells:
        setup = resolve(registry.find_method(cell.method), cell.settings, need_data=False)
        refuse_without_effect(setup)  # does not raise


def test_two_runs_that_start_in_the_same_second_have_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = datetime(2026, 1, 2, 3, 4, 5, 678)
    for start in (first, first.replace(microsecond=679)):
        clock = Mock(now=Mock(return_value=start))
        monkeypatch.setattr(begin, "datetime", clock)
        fedcli.run("fedavg", **{**SHORT_RUN, "rounds": 1})
    assert sorted(folder.name for folder in Path("runs").iterdir()) == [
        "20260102-030405-000678-fedavg-digits",
        "20260102-030405-000679-fedavg-digits",
    ]


# Names


WILD_NAME = "=1+1 $\\frac$ <b>|`x`*\n\x1b[31m"
WILD_TABLE = TextTable(["Method"], [[WILD_NAME]], (), [{"method": WILD_NAME, "loss": -1.5, WILD_NAME: 2}])


def test_a_name_is_text_on_a_terminal():
    assert printable("a\n\x1b[3m\u202e\udcff é") == "a\\n\\x1b[3m\\u202e\\udcff é"


def test_a_name_is_text_in_markdown_and_latex():
    escaped = escape_markdown(WILD_NAME)
    assert "\n" not in escaped
    assert all(f"\\{sign}" in escaped for sign in "$<>|`*")
    assert len(render(WILD_TABLE, "markdown").splitlines()) == 3
    assert "\x1b" not in render(WILD_TABLE, "latex")


def test_a_name_is_text_in_a_spreadsheet_which_would_take_it_for_a_formula():
    lines = render(WILD_TABLE, "csv").splitlines()
    assert len(lines) == 2
    (row,) = csv.DictReader(lines)
    assert row["method"][:3] == "'=1"
    assert row["loss"] == "-1.5"
    last_column = list(row)[-1]
    assert last_column[:3] == "'=1"


def test_a_name_is_text_on_a_chart_where_dollar_signs_would_begin_mathematics(tmp_path):
    counts = np.array([[3, 4]])
    chart = tmp_path / "chart.png"
    saving.write_figure(chart, partitions.partition_chart, counts, ["$\\frac$", "$x^$"], "$\\title$")
    assert chart.is_file()


TITLE = "\x1b]0;mine\x07"  # gives a terminal a title; Click takes colours out of what is no terminal's


def with_escapes(record):
    """Puts an escape sequence into every text of a record that may have one; returns the record."""
    for container, key in text_entries(record):
        before = container[key]
        container[key] = before + TITLE
        try:
            check_record(record)
        except UserError:
            container[key] = before
    return record


COMMANDS_THAT_PRINT = [
    *READING_COMMANDS, "table r --per round", "table r --per client", "run --from r --rounds 1", "verify diverged",
    "data import mine images",
]  # fmt: skip


@pytest.mark.slow
def test_no_command_lets_a_name_or_a_record_move_the_cursor(tmp_path, monkeypatch, imported_commands):
    monkeypatch.chdir(tmp_path)
    run = fedcli.run("fedavg", out="once", **{**SHORT_RUN, "rounds": 1, "lr": 1e-3})
    quality.add_quality(run.path)
    folders = {name: Path(f"{name}{TITLE}") for name in ("r", "diverged", "images")}
    write_folder_of_one_class(folders["images"])

    shutil.copytree("once", folders["r"])
    record = with_escapes(read_record(run.path))
    escaped = [key for container, key in text_entries(record) if "\x1b" in container[key]]
    assert len(escaped) > 20
    # Names that are looked up stay as they were.
    record |= {"method": "fedavg", "method_source": "fedavg", "protocol": "fedfm:digits"}
    record["config"] |= {"protocol": "fedfm:digits", "dataset": "digits", "backbone": "cnn-small"}
    write_record(folders["r"], record)

    shutil.copytree("once", folders["diverged"])
    failed = {**read_record(run.path), "status": "failed", "error": f"NonFiniteLoss: {TITLE}"}
    write_record(folders["diverged"], failed)

    for command in COMMANDS_THAT_PRINT:
        words = [str(folders.get(word, word)) for word in command.split()]
        result = invoke(*words)
        assert "\x1b" not in result.output + result.stderr, command
        assert isinstance(result.exception, SystemExit | None), command


# Control-C


@pytest.mark.parametrize("then", ["raise ValueError('no data')", "pass"])
def test_an_interruption_that_a_library_swallows_ends_the_program_in_a_line(then, tmp_path):
    swallow = f"import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    {then}\n"
    (tmp_path / "mine.py").write_text(f"{swallow}from fedcli.papers.baselines.fedavg import METHOD\n")
    program = start_program(tmp_path, "show", "mine.py")
    _, errors = program.communicate()
    assert errors == "interrupted.\n"
    assert program.returncode == 130


def read_terminal(file):
    """Reads all that a program writes to a terminal until it ends."""
    pieces = []
    with suppress(OSError):  # so ends a terminal
        while piece := os.read(file, 4096):
            pieces.append(piece)
    return b"".join(pieces).decode()


def test_the_line_after_an_interrupted_table_stays_on_the_screen(tmp_path):
    waiting = WaitingRuns(tmp_path)
    our_end, program_end = os.openpty()
    program = start_program(
        tmp_path, "table", "./table.py:TABLE", "--runs", "runs", stdout=program_end, stderr=program_end
    )
    os.close(program_end)
    assert waiting.wait_for_one() == program.pid

    program.send_signal(signal.SIGINT)
    output = read_terminal(our_end)
    program.communicate()

    assert program.returncode == 130
    _, line, after = output.rpartition("interrupted at 0/2 runs; resume by the same command.")
    assert line
    assert "\x1b[" not in after
