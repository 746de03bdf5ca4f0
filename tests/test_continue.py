"""The same command again: what has ended is skipped, what has begun goes on, the rest starts."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedcli
from fedcli.cli import app as cli
from fedcli.cli import display, printing
from fedcli.errors import UserError
from fedcli.results import jobs
from fedcli.runs import rounds
from fedcli.runs import run as runs
from fedcli.runs.config import flags_of
from fedcli.runs.lock import InUse
from fedcli.runs.records import read_record
from fedcli.runs.signals import OutOfTime
from tests.test_runs import TINY, Stop, StopAfter, essence


class Told(StopAfter):
    """Knows which runs it was told of, and stops after so many rounds."""

    def __init__(self, rounds=100):
        super().__init__(rounds)
        self.started, self.skipped = [], []

    def start(self, record, folder, samples_per_round, first_round):
        self.started.append((folder.name, first_round))

    def skip(self, record, folder):
        self.skipped.append(folder.name)


def test_several_seeds_go_on_where_they_were_stopped(tmp_path):
    def again(told):
        return fedcli.run("fedavg", out=tmp_path / "many", seeds=[0, 1, 2], continue_=True, progress=told, **TINY)

    with pytest.raises(Stop):
        again(Told(rounds=6))  # in the second round of the second run
    told = Told()
    done = again(told)
    assert (told.skipped, told.started) == (["seed-0"], [("seed-1", 2), ("seed-2", 0)])
    whole = fedcli.run("fedavg", out=tmp_path / "whole", seeds=[0, 1, 2], **TINY)
    assert [essence(run.record) for run in done] == [essence(run.record) for run in whole]
    assert done[0].state is None
    told = Told()
    again(told)
    assert (told.skipped, told.started) == (["seed-0", "seed-1", "seed-2"], [])


class AtStart(rounds.Listener):
    """Does something once, when a run is about to train."""

    def __init__(self, act):
        self.act = act

    def start(self, *given):
        act, self.act = self.act, lambda: None
        act()


def test_a_run_that_another_process_ends_meanwhile_is_skipped(tmp_path):
    with pytest.raises(Stop):
        fedcli.run("fedavg", out=tmp_path / "seed-1", progress=StopAfter(2), **{**TINY, "seed": 1})
    ends = AtStart(lambda: runs.resume(tmp_path / "seed-1"))
    _, second = fedcli.run("fedavg", out=tmp_path, seeds=[0, 1], continue_=True, progress=ends, **TINY)
    assert (second.record["status"], second.record["resumed"], second.state) == ("finished", [2], None)


def test_a_folder_taken_while_a_run_is_prepared_is_in_use(tmp_path):
    begins = AtStart(lambda: fedcli.run("fedavg", out=tmp_path / "seed-1", **{**TINY, "seed": 1}))
    with pytest.raises(InUse, match="seed-1' exists; an existing one is never overwritten"):
        fedcli.run("fedavg", out=tmp_path, seeds=[0, 1], continue_=True, progress=begins, **TINY)
    assert read_record(tmp_path / "seed-1")["status"] == "finished"


def test_a_run_that_diverged_is_skipped(tmp_path):
    options = {**TINY, "lr": 1e6, "out": tmp_path / "run", "continue_": True}
    with pytest.raises(runs.NonFiniteLoss):
        fedcli.run("fedavg", **options)
    told = Told()
    assert fedcli.run("fedavg", **options, progress=told).record["status"] == "failed"
    assert told.skipped == ["run"]


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        ("fedavg", {"lr": 0.5}, r"another --lr \(got 0.5, was 0.02\)"),
        ("fedavg", {"rounds": 9}, r"another --rounds \(got 9, was 4\)"),
        ("fedavg", {"partition_seed": 7}, r"another --partition-seed \(got 7, was as seed\)"),
        ("fedprox", {}, r"another method \(got fedprox, was fedavg\)"),
    ],
)
def test_a_run_with_other_options_is_refused_by_the_option(method, given, message, tmp_path):
    options = {**TINY, "lr": 0.02}
    with pytest.raises(Stop):
        fedcli.run("fedavg", out=tmp_path, progress=StopAfter(1), **options)
    before = (tmp_path / "record.json").read_bytes()
    with pytest.raises(UserError, match=message):
        fedcli.run(method, out=tmp_path, continue_=True, **{**options, **given})
    assert (tmp_path / "record.json").read_bytes() == before


def test_no_folder_is_refused_and_one_that_is_no_runs_is_left_alone(tmp_path):
    with pytest.raises(UserError, match=r"--continue goes on in a folder \(got no --out\)"):
        fedcli.run("fedavg", continue_=True, **TINY)
    (tmp_path / "mine").touch()
    with pytest.raises(UserError, match="never overwritten"):
        fedcli.run("fedavg", out=tmp_path, continue_=True, **TINY)


def invoke(*arguments):
    return CliRunner().invoke(cli.app, list(map(str, arguments)))


def test_a_kill_while_figures_are_drawn_leaves_the_figures_to_the_same_command(tmp_path, monkeypatch):
    arguments = ["run", "fedavg", "--out", tmp_path / "run", "--continue", "--rounds", 1]
    drawn = []

    def killed(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(display, "draw", killed)
    assert invoke(*arguments).exit_code == 130
    monkeypatch.setattr(display, "draw", lambda record, folder: drawn.append(folder))
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (0, f"skipped     {tmp_path / 'run'}, which has finished\n")
    assert drawn == [tmp_path / "run"]
    for name in ("curve.png", "curve.pdf", "partition.png", "partition.pdf"):
        (tmp_path / "run" / name).touch()
    invoke(*arguments)
    assert len(drawn) == 1


def test_resume_takes_up_every_unfinished_run_below_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(display, "draw", lambda record, folder: None)
    fedcli.run("fedavg", out=tmp_path / "a" / "done", **TINY)
    for name in ("a/one", "b"):
        with pytest.raises(Stop):
            fedcli.run("fedavg", out=tmp_path / name, progress=StopAfter(2), **TINY)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "record.json").write_text("{")
    result = invoke("resume", tmp_path)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "is not JSON" in result.stderr
    records = {name: read_record(tmp_path / name) for name in ("a/done", "a/one", "b")}
    assert {name: record["resumed"] for name, record in records.items()} == {"a/done": [], "a/one": [2], "b": [2]}
    assert {record["status"] for record in records.values()} == {"finished"}
    result = invoke("resume", tmp_path / "a")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "no unfinished run below (got 2 that have ended)" in result.stderr
    assert not Path("runs").exists()


def test_a_time_limit_is_a_time(monkeypatch):
    limits = []
    monkeypatch.setattr(printing, "set_time_limit", limits.append)
    for text in ("90s", "9m", "2h", "1h30m", "90", 540):
        printing.limit_time(text)
    assert limits == [90, 540, 7200, 5400, 90, 540]
    for text in ("9 m", "", "-1"):
        with pytest.raises(UserError, match=r"--time-limit must be a time \(got '.*'\); write 90s"):
            printing.limit_time(text)


TINY_FLAGS = flags_of({**TINY, "checkpoint_every": 100})


def test_a_time_limit_ends_at_a_checkpoint_and_the_same_command_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(display, "draw", lambda record, folder: None)
    whole = fedcli.run("fedavg", out=tmp_path / "whole", **TINY).record
    command = ["run", "fedavg", *TINY_FLAGS, "--seeds", "0,1", "--out", tmp_path / "runs", "--time-limit", "0"]
    folder = tmp_path / "runs" / "seed-0"
    result = invoke(*command)
    assert result.exit_code == 0
    assert result.stderr == f"time limit reached after 1/4 rounds, 3 are left; 'fedcli resume {folder}' goes on.\n"
    assert invoke("resume", folder, "--time-limit", "0").exit_code == 0
    assert invoke(*command[:-1], "1h", "--continue").exit_code == 0
    record = read_record(folder)
    assert record["resumed"] == [1, 2]
    assert essence(record)["rounds"] == essence(whole)["rounds"]
    assert record["summary"] == whole["summary"]
    assert read_record(tmp_path / "runs" / "seed-1")["status"] == "finished"


def test_a_run_ends_before_a_round_that_would_pass_the_limit(tmp_path, monkeypatch):
    left = iter([1000, 1000, 1000, 1e-9])
    monkeypatch.setattr(rounds, "time_left", lambda: next(left))  # asked twice a round
    with pytest.raises(OutOfTime):
        fedcli.run("fedavg", out=tmp_path / "run", **TINY)
    assert len(read_record(tmp_path / "run")["rounds"]) == 2


@pytest.mark.parametrize(
    "command",
    [("run", "fedavg", "--lr", "0.1,0.2", "--jobs", "2"), ("tune", "fedavg", "--grid", "lr=0.1,0.2")],
)
def test_a_time_limit_ends_a_grid_and_its_processes(command, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "time_left", lambda: -1)
    result = invoke(*command, *TINY_FLAGS, "--out", tmp_path / "grid", "--time-limit", "0")
    assert result.exit_code == 0
    assert "time limit reached after " in result.stderr
    assert "finished" not in [read_record(file)["status"] for file in (tmp_path / "grid").rglob("record.json")]
