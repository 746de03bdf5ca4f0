"""The same command again: what has ended is skipped, what has begun goes on, the rest starts, with no dead ends."""

import os
import resource
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

import fedcli
from fedcli.__main__ import main
from fedcli.cli import options
from fedcli.declarations import Cell, Table
from fedcli.errors import NonFiniteLoss, UserError
from fedcli.results import jobs, plans
from fedcli.runs import resume, rounds
from fedcli.runs.checkpoints import CHECKPOINT
from fedcli.runs.lock import InUse
from fedcli.runs.options import flags_of
from fedcli.runs.record import read_record, write_record
from fedcli.runs.signals import OutOfTime
from tests.commands import error_of, invoke, run_command
from tests.listeners import Stop, StopAfter
from tests.programs import start_program
from tests.run_options import SHORT_RUN, THREE_ROUNDS
from tests.run_parts import file_names, reproducible_parts

RUN_OF_ONE_ROUND = {**SHORT_RUN, "rounds": 1, "lr": 0.02}


def test_several_seeds_go_on_where_they_were_stopped(tmp_path):
    def run_or_continue(progress):
        return fedcli.run(
            "fedavg", out=tmp_path / "many", seeds=[0, 1, 2], continue_=True, progress=progress, **SHORT_RUN
        )

    with pytest.raises(Stop):
        run_or_continue(StopAfter(6))  # in the second round of the second run

    listener = Mock(spec=rounds.Listener)
    continued = run_or_continue(listener)

    (skipped,) = listener.skip.call_args_list
    _, folder = skipped.args
    assert folder.name == "seed-0"
    started = []
    for call in listener.start.call_args_list:
        _, folder, _, first_round = call.args
        started.append((folder.name, first_round))
    assert started == [("seed-1", 2), ("seed-2", 0)]

    whole = fedcli.run("fedavg", out=tmp_path / "whole", seeds=[0, 1, 2], **SHORT_RUN)
    assert [reproducible_parts(run.record) for run in continued] == [reproducible_parts(run.record) for run in whole]
    assert continued[0].state is None


def test_a_run_that_another_process_ends_meanwhile_is_skipped(tmp_path):
    with pytest.raises(Stop):
        fedcli.run("fedavg", out=tmp_path / "seed-1", progress=StopAfter(2), **{**SHORT_RUN, "seed": 1})
    ends = rounds.Listener()
    ends.start = lambda *given: resume.resume(tmp_path / "seed-1")
    _, second = fedcli.run("fedavg", out=tmp_path, seeds=[0, 1], continue_=True, progress=ends, **SHORT_RUN)
    assert second.record["status"] == "finished"
    assert second.record["resumed"] == [2]
    assert second.state is None


def test_a_folder_taken_while_a_run_is_prepared_is_in_use(tmp_path):
    begins = rounds.Listener()
    begins.start = lambda *given: fedcli.run("fedavg", out=tmp_path / "seed-1", **{**RUN_OF_ONE_ROUND, "seed": 1})
    with pytest.raises(InUse, match="seed-1' exists; an existing one is never overwritten"):
        fedcli.run("fedavg", out=tmp_path, seeds=[0, 1], continue_=True, progress=begins, **RUN_OF_ONE_ROUND)
    assert read_record(tmp_path / "seed-1")["status"] == "finished"


def test_a_run_whose_display_fails_at_its_start_has_failed(tmp_path):
    display = Mock(spec=rounds.Listener)
    display.start.side_effect = Stop
    with pytest.raises(Stop):
        fedcli.run("fedavg", out=tmp_path, progress=display, **SHORT_RUN)
    assert read_record(tmp_path)["status"] == "failed"
    assert not display.finish.called


def test_a_round_that_no_checkpoint_has_counts_once(tmp_path):
    with pytest.raises(Stop):
        fedcli.run("fedavg", out=tmp_path, progress=StopAfter(2), **{**SHORT_RUN, "checkpoint_every": 10})
    record = read_record(tmp_path)
    del record["peak_bytes"]  # as in an older record
    write_record(tmp_path, {**record, "seconds_total": 1e6})
    record = resume.resume(tmp_path).record
    assert record["resumed"] == [0]
    assert record["seconds_total"] < 1e6
    assert record["peak_bytes"] > 0


def test_a_run_that_diverged_is_skipped(tmp_path):
    options = {**SHORT_RUN, "lr": 1e6, "out": tmp_path / "run", "continue_": True}
    with pytest.raises(NonFiniteLoss):
        fedcli.run("fedavg", **options)

    listener = Mock(spec=rounds.Listener)
    again = fedcli.run("fedavg", **options, progress=listener)
    assert again.record["status"] == "failed"
    assert listener.skip.call_count == 1
    assert listener.start.call_count == 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("continue") / "run"
    fedcli.run("fedavg", out=folder, **RUN_OF_ONE_ROUND)
    return folder


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        pytest.param(
            "fedavg", {"lr": 0.5}, r"another lr \(got 0.5, was 0.02\); choose another out", id="another option"
        ),
        pytest.param(
            "fedavg",
            {"rounds": 2},
            r"another rounds \(got 2, was 1\); a run cannot be lengthened; train anew",
            id="more rounds",
        ),
        pytest.param("fedprox", {}, r"another method \(got fedprox, was fedavg\)", id="another method"),
        pytest.param("fedavg", {"out": None}, r"continue_ needs a folder \(got no out\)", id="no folder"),
        pytest.param("fedavg", {"out": Path(__file__).parent}, "never overwritten", id="folder of something else"),
    ],
)
def test_what_cannot_go_on_is_refused(method, given, message, finished):
    before = (finished / "record.json").read_bytes()
    with pytest.raises(UserError, match=message):
        fedcli.run(method, continue_=True, **{"out": finished, **RUN_OF_ONE_ROUND, **given})
    assert (finished / "record.json").read_bytes() == before


def stop_after_two_rounds(folder):
    with pytest.raises(Stop):
        fedcli.run("fedavg", out=folder, progress=StopAfter(2), **SHORT_RUN)


def test_resume_takes_up_every_unfinished_run_below_a_folder(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, tmp_path / "a" / "done")
    stop_after_two_rounds(tmp_path / "a" / "one")
    stop_after_two_rounds(tmp_path / "b")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "record.json").write_text("{")
    result = invoke("resume", tmp_path)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "cannot be read (" in result.stderr
    assert "the command that made it starts them, with --continue\n" in result.stdout

    records = [read_record(tmp_path / name) for name in ("a/done", "a/one", "b")]
    assert [record["resumed"] for record in records] == [[], [2], [2]]
    assert [record["status"] for record in records] == ["finished"] * 3


def test_resume_says_which_runs_it_skips(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a/done", "a/one", "b"):
        shutil.copytree(finished, tmp_path / name)
    text = " ".join(invoke("resume", tmp_path / "a").stdout.split())
    assert f"skipped {tmp_path}/a/done, which has finished" in text
    assert f"skipped {tmp_path}/a/one, which has finished" in text
    assert f"{tmp_path}/b" not in text


def test_workers_take_up_the_one_unfinished_run_below_a_folder(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, tmp_path / "a" / "done")
    stop_after_two_rounds(tmp_path / "a" / "two")
    run_command("resume", tmp_path / "a", "--workers", 1)
    assert read_record(tmp_path / "a" / "two")["status"] == "finished"
    run_command("resume", tmp_path / "a", "--workers", 1)
    assert invoke("resume", tmp_path / "a" / "two", "--workers", 1).exit_code == 2


def test_a_time_limit_is_a_time(monkeypatch):
    limits = []
    monkeypatch.setattr(options, "set_time_limit", limits.append)
    for text in ("90s", "9m", "2h", "1h30m", "90"):
        options.limit_time(text)
    assert limits == [90, 540, 7200, 5400, 90]
    for text in ("9 m", "", "-1"):
        with pytest.raises(UserError, match=r"--time-limit must be a time \(got '.*'\); write 90s"):
            options.limit_time(text)


RARE_CHECKPOINTS = {**SHORT_RUN, "checkpoint_every": 100}


def test_a_time_limit_ends_at_a_checkpoint_and_the_same_command_goes_on(tmp_path):
    flags = flags_of(RARE_CHECKPOINTS)
    command = ["run", "fedavg", *flags, "--seeds", "0,1", "--out", tmp_path / "runs", "--time-limit", "0"]
    folder = tmp_path / "runs" / "seed-0"
    result = run_command(*command)
    again = f"the same command with --out {tmp_path / 'runs'} --continue"
    line = f"time limit reached at 0/2 runs; resume by {again}."
    assert result.stderr.splitlines()[-1] == line

    result = run_command("resume", folder, "--time-limit", "0")
    line = f"time limit reached after 2/4 rounds; to resume: fedcli resume {folder}\n"
    assert result.stderr == line
    run_command(*command[:-1], "1h", "--continue")

    first = read_record(tmp_path / "runs" / "seed-0")
    second = read_record(tmp_path / "runs" / "seed-1")
    assert first["resumed"] == [1, 2]
    assert first["status"] == "finished"
    assert second["resumed"] == []
    assert second["status"] == "finished"

    result = run_command(*command[:-1], "1h", "--continue")
    assert result.stderr == "nothing to run: all 2 runs have ended\n"


def test_a_run_ends_before_a_round_that_would_pass_the_limit(tmp_path, monkeypatch):
    left = iter([1000, 1e-9])
    monkeypatch.setattr(rounds, "time_left", lambda: next(left))
    with pytest.raises(OutOfTime):
        fedcli.run("fedavg", out=tmp_path / "run", **SHORT_RUN)
    assert len(read_record(tmp_path / "run")["rounds"]) == 2

    monkeypatch.setattr(rounds, "time_left", lambda: -1)  # passed in the last round, after which none comes
    fedcli.run("fedavg", out=tmp_path / "last", **RUN_OF_ONE_ROUND)
    assert read_record(tmp_path / "last")["status"] == "finished"


def test_a_time_limit_ends_a_grid_and_its_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "time_left", lambda: -1)
    command = ("run", "fedavg", "--lr", "0.1,0.2", "--jobs", "2")
    result = run_command(*command, *flags_of(RARE_CHECKPOINTS), "--out", tmp_path / "grid", "--time-limit", "0")
    assert "time limit reached at 0/2 runs" in result.stderr
    assert "finished" not in [read_record(file)["status"] for file in (tmp_path / "grid").rglob("record.json")]


# What a kill or a full disk leaves in a folder


def main_on_a_full_disk():
    """The program on a disk with room for a record, and for no checkpoint."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    main()


def test_a_full_disk_is_one_line_leaves_no_part_of_a_file_and_the_run_goes_on(tmp_path):
    program = start_program(
        tmp_path, "run", "fedavg", *flags_of(THREE_ROUNDS), "--out", "a run", main=main_on_a_full_disk
    )
    _, errors = program.communicate()
    checkpoint = os.path.realpath(tmp_path / "a run" / CHECKPOINT)
    assert errors == (
        f"error: '{checkpoint}' cannot be written (File too large); free space; then a run goes on with "
        "'fedcli resume RUN', and all else with the same command.\n"
    )
    assert program.returncode == 1
    assert file_names(tmp_path / "a run") == ["record.json"]

    again = resume.resume(tmp_path / "a run")
    whole = fedcli.run("fedavg", out=tmp_path / "whole", **again.record["config"])
    assert reproducible_parts(again.record)["rounds"] == reproducible_parts(whole.record)["rounds"]


def test_a_damaged_record_stops_no_table_and_is_left_as_it_is(tmp_path, caplog):
    options = {**SHORT_RUN, "protocol": "fedfm:digits", "rounds": 1}
    cells = (
        Cell("FedAvg", "0.1", "fedavg", {**options, "lr": 0.1}),
        Cell("FedAvg", "0.2", "fedavg", {**options, "lr": 0.2}),
    )
    table = Table("fedfm:III", "made up", ("FedFM", "Table III"), cells, seeds=(0,))
    jobs.execute(plans.plan_table(table, tmp_path), jobs.PlanListener())
    damaged, whole = [run.folder for run in plans.plan_table(table, tmp_path).runs]

    (damaged / "record.json").write_text("{")
    plan = plans.plan_table(table, tmp_path)
    assert [run.outcome for run in plan.runs] == ["not run", "finished"]
    assert f"left out: '{damaged / 'record.json'}' cannot be read (" in caplog.text
    assert list(jobs.execute(plan, jobs.PlanListener())) == [damaged]
    assert [run.folder for run in plans.plan_table(table, tmp_path).runs] == [damaged, whole]
    assert (damaged / "record.json").read_text() == "{"


@pytest.mark.parametrize("name", ["--per-class", "--keep-states"])
def test_an_option_of_a_file_that_changes_no_result_counts_as_one_that_is_typed(name, finished, folder):
    """Since it would not be done."""
    option = name.removeprefix("--").replace("-", "_")
    (folder / "options.toml").write_text(f"{option} = true\n")
    command = ["run", "fedavg", *flags_of(RUN_OF_ONE_ROUND), "--out", finished, "--continue"]
    for given in ([name], ["--config", "options.toml"]):
        assert f"holds a run with another {name}" in error_of(*command, *given)
