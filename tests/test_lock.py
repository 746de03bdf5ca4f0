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
from fedcli.runs import resume, signals
from fedcli.runs.checkpoints import CHECKPOINT, PREVIOUS
from fedcli.runs.lock import InUse, locked
from fedcli.runs.record import read_record
from tests.programs import SMALL, Waiting, start
from tests.test_runs import TINY


def names(folder):
    """What a folder holds, but for a checkpoint before the last, which a slow machine may not have."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != PREVIOUS)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_second_process_is_refused_and_a_signal_ends_the_first_at_a_checkpoint(number, tmp_path):
    waiting = Waiting(tmp_path)
    options = (*SMALL, "--checkpoint-every", "3")
    first = start(tmp_path, "run", "./waits.py", *options, "--out", "run")
    assert waiting.one() == first.pid
    with pytest.raises(UserError, match=r"the folder '.*run' is in use by another process"):
        resume.resume(tmp_path / "run")
    assert read_record(tmp_path / "run")["status"] == "running"
    first.send_signal(number)
    _, said = first.communicate()
    assert first.returncode == 128 + number
    assert said == f"interrupted after 1/3 rounds; to resume: fedcli resume run --method {tmp_path}/waits.py\n"
    assert names(tmp_path / "run") == [CHECKPOINT, "record.json"]
    assert read_record(tmp_path / "run")["status"] == "interrupted"


def test_one_owner_at_a_time(tmp_path):
    folder = tmp_path / "new" / "run"
    with locked(folder):
        with pytest.raises(InUse), locked(folder):
            pass
        assert names(folder) == [".lock"]  # whoever is refused removes nothing
    with pytest.raises(ZeroDivisionError), locked(folder):
        raise ZeroDivisionError
    assert names(folder) == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be made"), locked(tmp_path / "file"):
        pass


def test_a_file_system_without_locks_has_no_owners(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with locked(tmp_path / "run"):
        (tmp_path / "run" / ".1.partial.record.json").touch()
        with locked(tmp_path / "run"):
            pass
    assert names(tmp_path / "run") == [".1.partial.record.json"]  # whoever writes it may live


def test_a_run_begins_where_nobody_has_finished_a_round(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".lock").touch()
    another = folder / "notes.txt"
    another.touch()
    with pytest.raises(InUse, match="never overwritten; choose another"):
        fedcli.run("fedavg", out=folder, **TINY)
    another.rename(folder / f".{os.getppid()}.partial.record.json")  # whoever wrote it does not have the lock
    (folder / f".record.json.{os.getppid()}.partial").touch()  # of an older version
    assert fedcli.run("fedavg", out=folder, **{**TINY, "rounds": 1}).record["status"] == "finished"
    assert names(folder) == [CHECKPOINT, "record.json"]


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path):
    file, link, another = (tmp_path / name for name in ("file", "link", "another"))
    file.write_text("old")
    link.symlink_to("file")
    write_atomically(link, lambda path: path.write_text("new"))
    (tmp_path / f".{os.getpid()}.partial.another").symlink_to("file")  # in the temporary file's place
    write_atomically(another, lambda path: path.write_text("newer"))
    assert (link.is_symlink(), another.is_symlink(), file.read_text()) == (True, False, "new")
    write_atomically(Path(os.devnull), lambda path: path.write_text("new"))
    assert not Path(os.devnull).is_file()


def test_the_processes_of_a_table_die_with_it(tmp_path):
    waiting = Waiting(tmp_path)
    parent = start(tmp_path, "table", "./table.py:TABLE", "--runs", "runs", "--jobs", "2")
    waiting.two()
    parent.kill()
    parent.communicate()
    waiting.none()
    folders = [path.parent for path in (tmp_path / "runs").rglob("record.json")]
    for folder in folders:
        with contextlib.suppress(FileNotFoundError), (folder / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # waits until its process has let go of the folder
    assert [read_record(folder)["status"] for folder in folders] == ["interrupted"] * 2


def test_a_process_that_does_not_stop_at_a_signal_dies_with_its_parent(tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "GRACE", 0)

    def parent():
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signals.end_with_parent()
            with open("here", "w") as here:
                print(os.getpid(), file=here, flush=True)
                signal.pause()
        signal.pause()

    waiting, program = Waiting(tmp_path), start(tmp_path, main=parent)
    waiting.one()
    program.kill()
    waiting.none()


@pytest.mark.parametrize("make", [os.pipe, os.openpty])
def test_a_display_that_breaks_does_not_end_the_training(make, tmp_path):
    (ours, theirs), waiting = make(), Waiting(tmp_path)

    def detached():
        os.setsid()  # as under nohup: a terminal that goes does not send it a signal
        os.close(ours)
        main()

    program = start(tmp_path, "run", "./waits.py", *SMALL, "--out", "run", main=detached, stdout=theirs)
    os.close(theirs)
    waiting.one()
    os.close(ours)
    waiting.go()
    _, said = program.communicate()
    assert (said, program.returncode) == ("", 0)
    assert read_record(tmp_path / "run")["status"] == "finished"
