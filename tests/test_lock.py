"""Who owns a run's folder, and how a run ends from outside: by signals, with its parent, not with its terminal."""

import contextlib
import errno
import fcntl
import os
import signal
from unittest.mock import Mock

import pytest

import fedcli
from fedcli.__main__ import main
from fedcli.errors import UserError
from fedcli.runs import resume, rounds, signals
from fedcli.runs.checkpoints import CHECKPOINT
from fedcli.runs.lock import InUse, locked
from fedcli.runs.options import flags_of
from fedcli.runs.record import read_record
from tests.programs import WaitingRuns, start_program
from tests.run_options import SHORT_RUN, THREE_ROUNDS
from tests.run_parts import file_names
from tests.torture.lost_folders import move, remove, unlock
from tests.user_errors import raises_user_error

pytestmark = pytest.mark.long(worker=1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_a_run_at_a_checkpoint(number, tmp_path):
    """Until then a second process is refused its folder."""
    waiting = WaitingRuns(tmp_path)
    options = (*flags_of(THREE_ROUNDS), "--checkpoint-every", "3")
    first = start_program(tmp_path, "run", "./waits.py", *options, "--out", "run")
    assert waiting.wait_for_one() == first.pid
    with raises_user_error(f"the folder '{tmp_path / 'run'}' is in use by another process"):
        resume.resume(tmp_path / "run")
    assert read_record(tmp_path / "run")["status"] == "running"

    first.send_signal(number)
    _, errors = first.communicate()

    assert first.returncode == 128 + number
    assert errors == f"interrupted after 1/3 rounds; to resume: fedcli resume run --method {tmp_path}/waits.py\n"
    assert file_names(tmp_path / "run") == [CHECKPOINT, "record.json"]
    assert read_record(tmp_path / "run")["status"] == "interrupted"


def test_a_folder_has_one_owner_at_a_time(tmp_path):
    folder = tmp_path / "new" / "run"
    with locked(folder):
        with pytest.raises(InUse), locked(folder):
            pass
        assert file_names(folder) == [".lock"]  # whoever is refused removes nothing


def test_an_error_leaves_no_lock(tmp_path):
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    assert file_names(tmp_path) == []


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with raises_user_error("' cannot be made or written (File exists); choose another."), locked(tmp_path / "file"):
        pass


def test_new_folders_into_which_nothing_is_written_go_with_the_lock(tmp_path):
    (tmp_path / "old").mkdir()
    with locked(tmp_path / "old" / "new" / "run"):
        pass
    assert list(tmp_path.rglob("*")) == [tmp_path / "old"]
    with locked(tmp_path / "old" / "new" / "run"):
        (tmp_path / "old" / "new" / "notes.txt").touch()
    assert file_names(tmp_path / "old" / "new") == ["notes.txt"]


def test_a_file_system_without_locks_has_no_owners(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with locked(tmp_path / "run"):
        (tmp_path / "run" / ".1.partial.record.json").touch()
        with locked(tmp_path / "run"):
            pass
    assert file_names(tmp_path / "run") == [".1.partial.record.json"]  # whoever writes it may live


def test_no_run_begins_in_a_folder_with_a_users_file(tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match="never overwritten; choose another") as refused:
        fedcli.run("fedavg", out=tmp_path, **SHORT_RUN)
    assert refused.type is UserError  # the lock of a process that was killed is nobody's
    with locked(tmp_path), pytest.raises(InUse, match="never overwritten; choose another"):
        fedcli.run("fedavg", out=tmp_path, **SHORT_RUN)


def test_a_run_begins_where_nobody_has_finished_a_round(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".lock").touch()
    (folder / f".{os.getppid()}.partial.record.json").touch()  # whoever wrote it does not have the lock
    (folder / f".record.json.{os.getppid()}.partial").touch()  # of an older version
    assert fedcli.run("fedavg", out=folder, **{**SHORT_RUN, "rounds": 1}).record["status"] == "finished"
    assert file_names(folder) == [CHECKPOINT, "record.json"]


@pytest.mark.slow
def test_the_processes_of_a_table_die_with_it(tmp_path):
    waiting = WaitingRuns(tmp_path)
    parent = start_program(tmp_path, "table", "./table.py:TABLE", "--runs", "runs", "--jobs", "2")
    waiting.wait_for()
    parent.kill()
    parent.communicate()
    assert waiting.have_ended()
    folders = [path.parent for path in (tmp_path / "runs").rglob("record.json")]
    for folder in folders:
        with contextlib.suppress(FileNotFoundError), (folder / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # waits until its process has let go of the folder
    assert [read_record(folder)["status"] for folder in folders] == ["interrupted"] * 2


def test_a_process_that_does_not_stop_at_a_signal_dies_with_its_parent(tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "GRACE_SECONDS", 0)

    def parent():
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signals.end_with_parent()
            with open("here", "w") as here:
                print(os.getpid(), file=here, flush=True)
                signal.pause()
        signal.pause()

    waiting = WaitingRuns(tmp_path)
    program = start_program(tmp_path, main=parent)
    waiting.wait_for_one()
    program.kill()
    assert waiting.have_ended()


@pytest.mark.parametrize("open_display", [os.pipe, os.openpty])
def test_a_display_that_breaks_does_not_end_the_training(open_display, tmp_path):
    waiting = WaitingRuns(tmp_path)
    our_end, program_end = open_display()

    def detached():
        os.setsid()  # as under nohup: a terminal that goes does not send it a signal
        os.close(our_end)
        main()

    program = start_program(
        tmp_path, "run", "./waits.py", *flags_of(THREE_ROUNDS), "--out", "run", main=detached, stdout=program_end
    )
    os.close(program_end)
    waiting.wait_for_one()

    os.close(our_end)
    waiting.let_one_go_on()
    _, errors = program.communicate()

    assert errors == ""
    assert program.returncode == 0
    assert read_record(tmp_path / "run")["status"] == "finished"


class AfterFirstRound(rounds.Listener):
    """Does something after the first round."""

    def __init__(self, action):
        self.action = action

    def round(self, entry):
        if entry["round"] == 0:
            self.action()


LAST_WORDS = {remove: "it was removed, with its checkpoints", move: "/elsewhere' now", unlock: "its lock was removed"}


@pytest.mark.parametrize("replaced", [False, True], ids=["", "with another run in its place"])
@pytest.mark.parametrize("lose", [remove, move, unlock])
def test_a_run_whose_folder_is_lost_ends_and_says_where_its_checkpoint_is(lose, replaced, tmp_path):
    folder = tmp_path / "run"
    other = tmp_path / "other"
    other_takes_its_place = replaced and lose is not unlock
    if replaced:
        fedcli.run("scaffold", out=other, **{**SHORT_RUN, "seed": 1, "rounds": 1}, keep_states=True)
        (other / ".lock").touch()  # of a process that resumes it
        files_of_other = file_names(other)

    def lose_folder():
        lose(folder, other)
        if other_takes_its_place:
            other.rename(folder)

    listener = AfterFirstRound(lose_folder)
    with raises_user_error(LAST_WORDS[lose]):
        fedcli.run("scaffold", out=folder, progress=listener, **SHORT_RUN, state_memory="0")

    if lose is move:
        moved = tmp_path / "elsewhere"
        assert not (moved / "states").exists() or read_record(moved)["rounds"]
        (moved / ".lock").unlink()
        assert resume.resume(moved).record["status"] == "finished"
    if other_takes_its_place:
        assert file_names(folder) == files_of_other
        assert read_record(folder)["seed"] == 1
    if lose is remove and not replaced:
        assert not folder.exists()
