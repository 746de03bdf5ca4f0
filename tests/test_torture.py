"""The short round of the trials in `tests/torture.py`, and a test for each thing that they have broken."""

import csv
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import fedcli
from fedcli import registry
from fedcli.errors import UserError, printable
from fedcli.figures import partitions, saving
from fedcli.measure import quality
from fedcli.results.render import Sheet, markdown, render
from fedcli.runs.record import read_record, write_record
from fedcli.runs.resolve import refuse_without_effect, resolve
from fedcli.runs.schema import check_record
from tests import torture
from tests.files import from_npz, images
from tests.programs import Waiting, invoke, start
from tests.test_forms import folder_of
from tests.test_runs import TINY

SHORT = {torture.kill: 3, torture.damage: 28, torture.fuzz: 12, torture.hostile_record: 13, torture.swap_buffers: 12}


@pytest.fixture(scope="module")
def loaded():
    torture.load()


@pytest.mark.parametrize("trial", SHORT, ids=lambda trial: trial.__name__)
def test_a_short_round_of_trials_breaks_nothing(trial, loaded):
    faults = [fault for number in range(SHORT[trial]) if (fault := trial(number))]
    assert not faults


# Edges


OWN = {
    "backbone": "cnn-small", "num_clients": 4, "cohort_size": 2, "rounds": 2, "device": "cpu", "partition": "iid",
    "batch_size": 8, "local_epochs": 1,
}  # fmt: skip


def test_a_domain_or_a_class_without_test_images_is_left_out(tmp_path):
    arrays = images((8, 8), 3, per_class=(20, 4))
    domains = {"domain_train": np.arange(60) % 2, "domain_test": np.zeros(12, int)}
    from_npz("two", tmp_path, **arrays, **domains, domain_names=np.array(["p", "q"]))
    record = fedcli.run("fedavg", out=tmp_path / "run", dataset="two", **OWN).record
    assert [list(entry["domains"]) for entry in record["rounds"]] == [["p"]] * 2
    assert np.isfinite([entry["domains"]["p"] for entry in record["rounds"]]).all()
    there = arrays["y_test"] < 2
    arrays |= {"x_test": arrays["x_test"][there], "y_test": arrays["y_test"][there]}
    from_npz("three", tmp_path, **arrays, class_names=np.array(["a", "b", "c"]))
    assert fedcli.run("fedproto", out=tmp_path / "three", dataset="three", **OWN).record["status"] == "finished"


def test_a_protocol_and_a_record_may_tell_options_without_effect():
    given = {**TINY, "optimizer": "adam", "momentum": 0.5}
    fedavg = registry.find_method("fedavg")
    with pytest.raises(UserError, match="--momentum is for --optimizer sgd"):
        refuse_without_effect(resolve(fedavg, given))
    assert refuse_without_effect(resolve(fedavg, given, sources={"momentum": "run a"})) is None
    for table in registry.tables().values():
        for cell in table.cells:
            setup = resolve(registry.find_method(cell.method), cell.settings, need_data=False)
            assert refuse_without_effect(setup) is None, cell


def test_runs_of_one_second_do_not_meet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        fedcli.run("fedavg", **{**TINY, "rounds": 1})
    assert len(list(Path("runs").glob("*-fedavg-digits"))) == 2


# Names


def test_a_name_is_text_wherever_it_is_written(tmp_path):
    wild = "=1+1 $\\frac$ <b>|`x`*\n\x1b[31m"
    assert printable("a\n\x1b[3m\u202e\udcff é") == "a\\n\\x1b[3m\\u202e\\udcff é"
    shown = markdown(wild)
    assert "\n" not in shown
    assert all(f"\\{one}" in shown for one in "$<>|`*")
    sheet = Sheet(["Method"], [[wild]], 1, [{"method": wild, "loss": -1.5, wild: 2}])
    assert len(render(sheet, "markdown").splitlines()) == 3
    lines = render(sheet, "csv").splitlines()
    (*_, column), (name, loss, _) = csv.reader(lines)
    assert (len(lines), name[:3], column[:3], loss) == (2, "'=1", "'=1", "-1.5")
    assert "\x1b" not in render(sheet, "latex")
    saving.write_figure(
        tmp_path / "chart.png", partitions.partition_chart, np.array([[3, 4]]), ["$\\frac$", "$x^$"], "$\\title$"
    )


TITLE = "\x1b]0;mine\x07"  # gives a terminal a title; Click takes colours out of what is no terminal's


def with_escapes(record):
    """The record with an escape sequence in every text that may have one."""
    for container, key in torture.texts(record):
        before = container[key]
        container[key] = before + TITLE
        try:
            check_record(record)
        except UserError:
            container[key] = before
    return record


SHOWN = [
    *torture.READERS, "table r --per round", "table r --per client", "run --from r --rounds 1", "verify diverged",
    "data import mine images",
]  # fmt: skip


def test_no_command_lets_a_name_or_a_record_move_the_cursor(tmp_path, monkeypatch, loaded):
    monkeypatch.chdir(tmp_path)
    run = fedcli.run("fedavg", out="once", **{**TINY, "rounds": 1, "lr": 1e-3})
    quality.add_quality(run.path)
    folders = {name: Path(f"{name}{TITLE}") for name in ("r", "diverged", "images")}
    for name in ("r", "diverged"):
        shutil.copytree("once", folders[name])
    record = with_escapes(read_record(run.path))
    assert len([text for container, key in torture.texts(record) if "\x1b" in (text := container[key])]) > 20
    names = {"method": "fedavg", "method_source": "fedavg", "protocol": "fedfm:digits"}
    config = {**record["config"], "protocol": "fedfm:digits", "dataset": "digits", "backbone": "cnn-small"}
    write_record(folders["r"], {**record, **names, "config": config})
    failed = {**read_record(run.path), "status": "failed", "error": f"NonFiniteLoss: {TITLE}"}
    write_record(folders["diverged"], failed)
    folder_of(folders["images"])
    for command in SHOWN:
        words = [str(folders.get(word, word)) for word in command.split()]
        result = invoke(*words)
        assert "\x1b" not in result.output + result.stderr, command
        assert isinstance(result.exception, SystemExit | None), command


# Control-C


@pytest.mark.parametrize("then", ["raise ValueError('no data')", "pass"])
def test_an_interruption_that_a_library_swallows_ends_the_program_in_a_line(then, tmp_path):
    swallow = f"import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    {then}\n"
    (tmp_path / "mine.py").write_text(f"{swallow}from fedcli.papers.baselines.fedavg import METHOD\n")
    program = start(tmp_path, "show", "mine.py")
    _, errors = program.communicate()
    assert (errors, program.returncode) == ("interrupted.\n", 130)


def test_the_line_after_an_interrupted_table_stays_on_the_screen(tmp_path):
    waiting, (ours, theirs), said = Waiting(tmp_path), os.openpty(), b""
    program = start(tmp_path, "table", "./table.py:TABLE", "--runs", "runs", stdout=theirs, stderr=theirs)
    os.close(theirs)
    assert waiting.one() == program.pid
    program.send_signal(signal.SIGINT)
    with suppress(OSError):  # so ends a terminal
        while piece := os.read(ours, 4096):
            said += piece
    program.communicate()
    assert program.returncode == 130
    _, line, after = said.decode().rpartition("interrupted at 0/2 runs; resume by the same command.")
    assert line
    assert "\x1b[" not in after
