"""Loggers: what TensorBoard's own reader and W&B's files hold, also after a kill; a user's own; one that fails."""

import json
import struct
import sys

import pytest
from typer.testing import CliRunner

import fedcli
from fedcli.cli import display
from fedcli.cli.app import app
from fedcli.errors import UserError
from fedcli.runs import rounds, trackers
from fedcli.runs import run as runs

TINY = {"dataset": "digits", "protocol": "fedfm:digits", "train_examples": 60, "num_clients": 2, "cohort_size": 2}
TINY |= {"rounds": 4, "device": "cpu", "partition": "iid", "checkpoint_every": 2}


class Kill(Exception):
    """What ends a run."""


class KillAfter(rounds.Listener):
    """Kills a run after so many rounds, before the next checkpoint."""

    def __init__(self, rounds):
        self.rounds = rounds

    def round(self, entry):
        if entry["round"] + 1 == self.rounds:
            raise Kill


def scalars(folder):
    """Steps and values by tag, as TensorBoard reads them."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_reads_every_round_once_also_after_a_kill(tmp_path):
    with pytest.raises(Kill):  # after round 3, of which only two are in the checkpoint
        fedcli.run("fedavg", out=tmp_path / "run", log="tensorboard", progress=KillAfter(3), **TINY)
    record = runs.resume(tmp_path / "run", progress=trackers.with_loggers(None, "tensorboard")).record
    found = scalars(tmp_path / "run")
    accuracies = [entry["test_accuracy"] for entry in record["rounds"]]
    assert [step for step, _ in found["test_accuracy"]] == [1, 2, 3, 4]
    assert [value for _, value in found["test_accuracy"]] == pytest.approx(accuracies)
    assert [step for step, _ in found["terms/cross_entropy"]] == [1, 2, 3, 4]
    assert found["selected"] == [(4, pytest.approx(record["summary"]["selected"]))]
    assert "round" not in found


def wandb_rows(file):
    """The history rows of an offline file of W&B's: records in LevelDB's log format, each a protocol buffer."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, rows, parts = file.read_bytes(), 7, [], b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record, parts = Record.FromString(parts), b""
            if record.HasField("history"):
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def test_weights_and_biases_goes_on_with_the_same_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path), "CONSOLE": "off"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    with pytest.raises(Kill):
        fedcli.run("fedavg", out=tmp_path / "run", log="wandb", progress=KillAfter(3), **TINY)
    runs.resume(tmp_path / "run", progress=trackers.with_loggers(None, "wandb"))
    files = sorted((tmp_path / "run").rglob("run-*.wandb"))
    steps = [[row["_step"] for row in wandb_rows(file)] for file in files]
    assert len({file.stem for file in files}) == 1  # one id
    assert sorted(steps) == [[1, 2], [3, 4]] or sorted(steps) == [[1, 2, 3], [3, 4]]
    assert all("terms/cross_entropy" in row for file in files for row in wandb_rows(file))


OWN = """
class Logger:
    def __init__(self):
        self.file = open("heard.txt", "a")
    def round(self, entry):
        print(entry["round"] + 1, file=self.file, flush=True)

class Failing:
    def round(self, entry):
        raise ValueError("no network")
"""


def test_a_logger_of_the_users_own_hears_the_rounds_and_one_that_fails_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(display, "draw", lambda record, folder: None)
    (tmp_path / "mine.py").write_text(OWN)
    flags = [part for name, value in TINY.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    log = "./mine.py:Failing,./mine.py:Logger"
    result = CliRunner().invoke(app, ["run", "fedavg", *flags, "--out", "run", "--log", log])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "heard.txt").read_text().split() == ["1", "2", "3", "4"]
    assert " ".join(result.output.split()).count("the logger Failing fails (ValueError: no network)") == 1


def test_loggers_may_be_objects_and_change_no_bit(tmp_path):
    class Mine:
        def __init__(self):
            self.heard = []

        def start(self, record, folder, samples_per_round, first_round):
            self.heard.append(("start", first_round))

        def finish(self, record):
            self.heard.append(record["status"])

    mine = Mine()
    record = fedcli.run("fedavg", out=tmp_path / "a", log=[mine, "tensorboard"], **TINY).record
    assert mine.heard == [("start", 0), "finished"]
    plain = fedcli.run("fedavg", out=tmp_path / "b", **TINY).record
    assert record["summary"]["params_sha256"] == plain["summary"]["params_sha256"]
    assert "log" not in record["config"]


def test_unknown_and_missing_loggers_are_refused_before_the_run(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="unknown logger 'tensorbord'; did you mean 'tensorboard'"):
        fedcli.run("fedavg", out=tmp_path / "run", log="tensorbord", **TINY)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install 'fedcli\[wandb\]'"):
        fedcli.run("fedavg", out=tmp_path / "run", log="wandb", **TINY)
    assert not (tmp_path / "run").exists()


def test_the_numbers_of_a_round_are_flat():
    entry = {"round": 3, "test_accuracy": None, "terms": {"a": 1.5}, "clients": {"mean": 0.5}, "floats_up": 7}
    assert trackers.flat(entry) == {"terms/a": 1.5, "clients/mean": 0.5, "floats_up": 7}
