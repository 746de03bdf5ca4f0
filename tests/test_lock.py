"""Who owns a run's folder, and how a run ends from outside: by signals, with its parent, not with its terminal."""

import contextlib
import errno
import fcntl
import os
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest

import fedcli
from fedcli.__main__ import main
from fedcli.errors import UserError
from fedcli.files import write_atomically
from fedcli.runs import checkpoints, resume, rounds, signals
from fedcli.runs.checkpoints import CHECKPOINT
from fedcli.runs.lock import InUse, locked
from fedcli.runs.options import flags_of
from fedcli.runs.record import read_record
from tests.programs import WaitingRuns, start_program
from tests.tiny_runs import THREE_ROUNDS, TINY, file_names
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
    with pytest.raises(UserError, match=r"the folder '.*run' is in use by another process"):
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
    folder.mkdir(parents=True)
    with pytest.raises(ZeroDivisionError), locked(folder):
        raise ZeroDivisionError
    assert file_names(folder) == []
    (tmp_path / "file").touch()
    words = r"'.*' cannot be made or written \(File exists\); choose another\.$"
    with pytest.raises(UserError, match=words), locked(tmp_path / "file"):
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


def test_a_run_begins_where_nobody_has_finished_a_round(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".lock").touch()
    another = folder / "notes.txt"
    another.touch()
    with pytest.raises(UserError, match="never overwritten; choose another") as refused:
        fedcli.run("fedavg", out=folder, **TINY)
    assert refused.type is UserError  # the lock of a process that was killed is nobody's
    with locked(folder), pytest.raises(InUse, match="never overwritten; choose another"):
        fedcli.run("fedavg", out=folder, **TINY)
    (folder / ".lock").touch()
    another.rename(folder / f".{os.getppid()}.partial.record.json")  # whoever wrote it does not have the lock
    (folder / f".record.json.{os.getppid()}.partial").touch()  # of an older version
    assert fedcli.run("fedavg", out=folder, **{**TINY, "rounds": 1}).record["status"] == "finished"
    assert file_names(folder) == [CHECKPOINT, "record.json"]


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path):
    file = tmp_path / "file"
    file.write_text("old")
    link = tmp_path / "link"
    link.symlink_to("file")
    write_atomically(link, lambda path: path.write_text("new"))
    assert link.is_symlink()
    assert file.read_text() == "new"

    new_file = tmp_path / "another"
    write_atomically(new_file, lambda path: path.write_text("newer"))
    assert not new_file.is_symlink()

    write_atomically(Path(os.devnull), lambda path: path.write_text("new"))
    assert not Path(os.devnull).is_file()


def test_an_error_of_a_library_without_a_number_keeps_its_words(tmp_path):
    def fails(path):
        raise OSError("encoder error -2 when writing image file")

    with pytest.raises(OSError, match="encoder error -2 when writing image file") as caught:
        write_atomically(tmp_path / "a.png", fails)
    assert caught.value.filename == str(tmp_path / "a.png")


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
        fedcli.run("scaffold", out=other, **{**TINY, "seed": 1, "rounds": 1}, keep_states=True)
        (other / ".lock").touch()  # of a process that resumes it
        files_of_other = file_names(other)

    def lose_folder():
        lose(folder, other)
        if other_takes_its_place:
            other.rename(folder)

    listener = AfterFirstRound(lose_folder)
    with raises_user_error(LAST_WORDS[lose]):
        fedcli.run("scaffold", out=folder, progress=listener, **TINY, state_memory="0")

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


FILES_OF_A_USER = [
    "states/notes.txt", "states/000001-2 (copy).safetensors", "states/.keep", ".notes.partial.txt",
    "states-backup/000001-0.safetensors", "states-1/notes.txt", "states-1/a/000001-0.safetensors", ".x.partial",
    ".1.partial.folder/file", "states/000009-9.safetensors/file",
]  # fmt: skip
FILES_OF_FEDCLI = [
    "states/000009-0.safetensors", "states-1/000001-0-again.safetensors", "states-2/000001-0.safetensors",
    ".12.partial.record.json", ".12-0123abcd.partial.record.json", ".record.json.12.partial",
    "states/.12-0123abcd.partial.000001-0.safetensors",
]  # fmt: skip


def test_only_files_that_fedcli_has_made_are_removed(tmp_path):
    folder = tmp_path / "run"
    fedcli.run("scaffold", out=folder, **TINY, keep_states=True)

    def files():
        return [name for name in file_names(folder) if (folder / name).is_file()]

    of_run = files()
    for name in FILES_OF_A_USER + FILES_OF_FEDCLI:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()

    with locked(folder):
        checkpoints.remove_files(folder, [])

    assert files() == sorted(FILES_OF_A_USER + of_run)


def test_two_containers_with_one_cache_and_equal_process_ids_do_not_meet(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 7)
    file = tmp_path / "file"

    def write_while_another_does(path):
        path.write_text("whole")
        write_atomically(file, lambda other: other.write_text("other"))
        assert file.read_text() == "other"
        assert path.read_text() == "whole"

    write_atomically(file, write_while_another_does)
    assert file.read_text() == "whole"
    assert file_names(tmp_path) == ["file"]
