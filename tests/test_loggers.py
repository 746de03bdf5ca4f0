"""Loggers: what TensorBoard's own reader holds and W&B is told, also after a kill; a user's own; one that fails."""

import logging
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

import fedcli
from fedcli.runs import loggers, resume
from fedcli.runs.options import flags_of
from fedcli.runs.record import read_record
from tests.commands import invoke, run_command, stamps_of_files
from tests.listeners import Stop, StopAfter
from tests.run_options import SHORT_RUN
from tests.user_errors import raises_user_error

FOUR_ROUNDS = {**SHORT_RUN, "train_examples": 60, "checkpoint_every": 2}


def kill_and_resume(folder, log):
    """Stops a run after round 3, which its checkpoint has not, and resumes it; returns its record."""
    with pytest.raises(Stop):
        fedcli.run("fedavg", out=folder, log=log, progress=StopAfter(3), **FOUR_ROUNDS)
    return resume.resume(folder, progress=loggers.Loggers(None, log)).record


def test_tensorboard_reads_every_round_once_also_after_a_kill(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    record = kill_and_resume(tmp_path / "run", "tensorboard")
    events = reader.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()

    def assert_logged(name, values):
        points = events.Scalars(name)
        assert [point.step for point in points] == list(range(1, len(values) + 1))
        assert [point.value for point in points] == pytest.approx(values)

    assert_logged("test_accuracy", [entry["test_accuracy"] for entry in record["rounds"]])
    assert_logged("terms/cross_entropy", [entry["terms"]["cross_entropy"] for entry in record["rounds"]])
    assert "round" not in events.Tags()["scalars"]


def test_weights_and_biases_goes_on_with_the_same_run(tmp_path, monkeypatch):
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    record = kill_and_resume(tmp_path / "run", "wandb")

    first, again = [call.kwargs for call in wandb.init.call_args_list]
    assert first["id"] == again["id"]
    assert first["resume"] == "allow"
    assert first["project"] == "fedcli"

    wandb_run = wandb.init.return_value
    logged = {}
    for call in wandb_run.log.call_args_list:
        (values,) = call.args
        logged[call.kwargs["step"]] = values["terms/cross_entropy"]
    assert logged == {entry["round"] + 1: entry["terms"]["cross_entropy"] for entry in record["rounds"]}
    (summary,) = wandb_run.summary.update.call_args.args
    assert summary["selected"] == record["summary"]["selected"]
    assert [call.kwargs["exit_code"] for call in wandb_run.finish.call_args_list] == [1, 0]


LOGGERS_OF_A_USER = """
class Logger:
    def __init__(self):
        self.file = open("heard.txt", "a")
        print("made", file=self.file)
    def round(self, entry):
        print(entry["round"] + 1, file=self.file, flush=True)

class Failing:
    def round(self, entry):
        raise ValueError("no network")
"""


@pytest.mark.parametrize(("seeds", "num_runs"), [(("--seed", "0"), 1), (("--seeds", "0,1"), 2)])
def test_a_logger_is_made_once_and_hears_each_run(seeds, num_runs, tmp_path, monkeypatch):
    """One that fails stops nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(LOGGERS_OF_A_USER)
    flags = flags_of(FOUR_ROUNDS)
    result = run_command("run", "fedavg", *flags, *seeds, "--out", "run", "--log", "./mine.py:Failing,./mine.py:Logger")
    assert (tmp_path / "heard.txt").read_text().split() == ["made", *["1", "2", "3", "4"] * num_runs]
    assert " ".join(result.output.split()).count("the logger Failing fails (ValueError: no network)") == num_runs


def test_loggers_may_be_objects_and_change_no_bit(tmp_path):
    heard = []
    logger = SimpleNamespace(
        start=lambda record, folder, samples_per_round, first_round: heard.append(first_round),
        finish=lambda record: heard.append(record["status"]),
    )
    record = fedcli.run("fedavg", out=tmp_path / "a", log=logger, **FOUR_ROUNDS).record
    assert heard == [0, "finished"]
    plain = fedcli.run("fedavg", out=tmp_path / "b", **FOUR_ROUNDS).record
    assert record["summary"]["params_sha256"] == plain["summary"]["params_sha256"]
    assert "log" not in record["config"]


@pytest.mark.parametrize("log", [print, [logging.getLogger()], [3], {"round": print}])
def test_an_object_that_would_be_told_nothing_is_refused(log, tmp_path):
    with raises_user_error("needs one of the methods start,"):
        fedcli.run("fedavg", out=tmp_path / "run", log=log, **FOUR_ROUNDS)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("log", "words"), [("tensorbord", "did you mean 'tensorboard'"), ("wandb", "pip install 'fedcli[wandb]'")]
)
def test_unknown_and_missing_loggers_are_refused_before_the_run(log, words, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with raises_user_error(words):
        fedcli.run("fedavg", out=tmp_path / "run", log=log, **FOUR_ROUNDS)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("tensorbord", "unknown logger 'tensorbord'; did you mean 'tensorboard'?"),
        ("tensorboard,wandbb", "unknown logger 'wandbb'; did you mean 'wandb'?"),
        (["no"], "unknown logger 'no'; there are tensorboard, wandb, and your own by ./file.py:NAME."),
        ("./none.py:Mine", "there is no logger file at '"),
        ("./empty.py:Mine", "empty.py' 'Mine'; write "),
        ("./fails.py:Mine", "fails.py' fails in line 1 (got TypeError: Mine() missing 1 required positional argument"),
    ],
)
@pytest.mark.parametrize(
    ("methods", "options"),
    [("fedavg", {}), ("fedavg,fedprox", {}), ("fedavg", {"lr": [0.1, 0.2]}), ("fedavg", {"seeds": [0, 1]})],
    ids=["one run", "methods", "values", "seeds"],
)
def test_a_refused_logger_leaves_nothing(methods, options, log, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.py").touch()
    (tmp_path / "fails.py").write_text("def Mine(needed):\n    pass\n")
    before = stamps_of_files()
    with raises_user_error(message):
        fedcli.run(methods, out="new/runs", log=log, **FOUR_ROUNDS, **options)
    assert stamps_of_files() == before


INTERRUPTING_LOGGER = """
class Logger:
    def finish(self, record):
        raise KeyboardInterrupt
"""


def test_an_interruption_after_the_last_round_says_that_the_run_had_finished(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(INTERRUPTING_LOGGER)
    ended = invoke("run", "fedavg", *flags_of(SHORT_RUN), "--out", "run", "--log", "./own.py:Logger")
    assert ended.exit_code == 130
    assert ended.stderr == "interrupted after the run had finished; its record is run/record.json.\n"
    assert read_record(tmp_path / "run")["status"] == "finished"
