"""Loggers: what TensorBoard's own reader holds and W&B is told, also after a kill; a user's own; one that fails."""

import sys

import pytest

import fedcli
from fedcli.cli import display
from fedcli.errors import UserError
from fedcli.runs import run as runs
from fedcli.runs import trackers
from tests.programs import invoke
from tests.test_runs import Stop, StopAfter

TINY = {"dataset": "digits", "protocol": "fedfm:digits", "train_examples": 60, "num_clients": 2, "cohort_size": 2}
TINY |= {"rounds": 4, "device": "cpu", "partition": "iid", "checkpoint_every": 2}


def killed_and_resumed(folder, log):
    """The record of a run that is killed after round 3, of which only two are in the checkpoint, and resumed."""
    with pytest.raises(Stop):
        fedcli.run("fedavg", out=folder, log=log, progress=StopAfter(3), **TINY)
    return runs.resume(folder, progress=trackers.with_loggers(None, log)).record


def scalars(folder):
    """Steps and values by tag, as TensorBoard reads them."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_reads_every_round_once_also_after_a_kill(tmp_path):
    record = killed_and_resumed(tmp_path / "run", "tensorboard")
    found = scalars(tmp_path / "run")
    accuracies = [entry["test_accuracy"] for entry in record["rounds"]]
    assert [step for step, _ in found["test_accuracy"]] == [1, 2, 3, 4]
    assert [value for _, value in found["test_accuracy"]] == pytest.approx(accuracies)
    assert [step for step, _ in found["terms/cross_entropy"]] == [1, 2, 3, 4]
    assert found["selected"] == [(4, pytest.approx(record["summary"]["selected"]))]
    assert "round" not in found


class Wandb:
    """Stands for the package: what was begun, logged and said at the end, by the id of each run."""

    def __init__(self):
        self.begun, self.logged, self.summary, self.codes = [], [], {}, []

    def init(self, *, id, resume, project, **options):
        self.begun.append((id, resume, project))
        return self

    def log(self, numbers, step):
        self.logged.append((step, numbers["terms/cross_entropy"]))

    def finish(self, exit_code):
        self.codes.append(exit_code)


def test_weights_and_biases_goes_on_with_the_same_run(tmp_path, monkeypatch):
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    record = killed_and_resumed(tmp_path / "run", "wandb")
    assert wandb.begun == [(wandb.begun[0][0], "allow", "fedcli")] * 2
    assert sorted({step for step, _ in wandb.logged}) == [1, 2, 3, 4]
    assert dict(wandb.logged) == {row["round"] + 1: row["terms"]["cross_entropy"] for row in record["rounds"]}
    assert wandb.summary["selected"] == record["summary"]["selected"]
    assert wandb.codes == [1, 0]


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
    result = invoke("run", "fedavg", *flags, "--out", "run", "--log", log)
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
    record = fedcli.run("fedavg", out=tmp_path / "a", log=[mine], **TINY).record
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
