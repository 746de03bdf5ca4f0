"""Several workers of one run: law 8, kills, interruptions and errors on one of them."""

import json
import os
import re
import signal
import sys

import pytest

from fedcli.runs import workers
from fedcli.runs.records import read_record
from tests import law_8
from tests.programs import SMALL, WAITS, Waiting, start
from tests.test_lock import names
from tests.test_runs import essence

SLOW = 300  # seconds until a test fails that waits for a group of processes
# Two items of work, of which each worker does one; {act} is done on one worker.
PROGRAM = """
import os, torch
from fedcli.core.federation import NonFiniteLoss
from fedcli.errors import UserError
from fedcli.runs.workers import joined

def stop(error):
    raise error

def act():
    {act}
    return torch.ones(1)

with joined() as group:
    work = lambda items: [act() if group.number == {number} else torch.ones(1) for _ in items]
    group.share(work, [1, 2])
    group.refuse_differences({{"seed": 1, "data": "ab"[group.number]}})
"""


def launched(folder, count, program, *arguments):
    """Starts a program in so many workers and waits for them; returns what they said."""
    text = f"from fedcli.runs.workers import launch; launch({count}, {[sys.executable, '-c', program, *arguments]})"
    return start(folder, program=("-c", text)).communicate(timeout=SLOW)[1]


@pytest.mark.parametrize(
    ("number", "act", "said"),
    [
        (0, "os.abort()", "UserError: worker 0 has died (got SIGABRT); find out"),
        (1, "1 / 0", "RuntimeError: on worker 1, ZeroDivisionError: division by zero"),
        (1, "stop(NonFiniteLoss('the term'))", "NonFiniteLoss: on worker 1, the term"),
        (0, "pass", "UserError: the workers differ in data (got b on worker 1, a on worker 0); give"),
    ],
)
def test_a_worker_that_dies_or_fails_is_named_once_and_the_others_end(number, act, said, tmp_path):
    errors = launched(tmp_path, 2, PROGRAM.format(number=number, act=act))
    assert errors.count(said) == 1, errors


def test_law_8_workers_are_invisible(tmp_path, two_threads):
    expected = law_8.endings()
    for count in law_8.COUNTS:
        assert launched(tmp_path, count, "from tests.law_8 import main; main()", str(tmp_path)) == ""
        endings = json.loads((tmp_path / str(count)).read_text())
        assert endings.keys() == expected.keys()
        assert [name for name in expected if endings[name] != expected[name]] == []


def test_a_worker_that_is_killed_leaves_a_run_that_another_number_of_workers_ends_in_the_same_bits(tmp_path):
    waiting, every_round = Waiting(tmp_path), ("--checkpoint-every", "1", "--state-memory", "0")
    options = ("run", "./waits.py", *SMALL, *every_round)
    (tmp_path / "waits.py").write_text(WAITS.replace("fedavg", "scaffold"))  # whose clients keep states
    running = start(tmp_path, *options, "--out", "run", "--workers", "2")
    os.kill(waiting.two(SLOW)[0], signal.SIGKILL)
    _, errors = running.communicate(timeout=SLOW)
    assert running.returncode == 2
    assert re.fullmatch(r"error: worker [01] has died \(got SIGKILL\); .*", errors.splitlines()[-1]), errors
    waiting.free()
    again = start(tmp_path, "resume", "run", "--method", "./waits.py", "--workers", "3")
    output, errors = again.communicate(timeout=SLOW)
    assert (again.returncode, errors, output.count("round 3/3:")) == (0, "", 1)
    start(tmp_path, *options, "--out", "whole").communicate(timeout=SLOW)
    record, whole = (read_record(tmp_path / name) for name in ("run", "whole"))
    assert essence(record)["rounds"] == essence(whole)["rounds"]
    assert record["summary"] == whole["summary"]
    assert names(tmp_path / "run") == names(tmp_path / "whole")
    assert (record["resumed"], record["engine"]["workers"], whole["engine"]["workers"]) == ([1], 3, 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_launcher_and_an_interruption_is_one_line(number, tmp_path):
    waiting = Waiting(tmp_path)
    running = start(tmp_path, "run", "./waits.py", *SMALL, "--out", "run", "--workers", "2")
    waiting.two(SLOW)
    running.send_signal(number)
    _, errors = running.communicate(timeout=SLOW)
    waiting.none()
    if number == signal.SIGINT:
        assert running.returncode == 130, errors
        assert re.fullmatch("interrupted after 1/3 rounds; to resume: fedcli resume run.*\n", errors)


def test_torchrun_starts_workers_again_that_go_on_in_their_folder(tmp_path):
    waiting = Waiting(tmp_path)
    options = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "-m", "fedcli")
    command = ("run", "./waits.py", *SMALL, "--out", "run", "--continue", "--checkpoint-every", "1")
    running = start(tmp_path, *options, *command, program=("-m", "torch.distributed.run"))
    os.kill(waiting.two(SLOW)[1], signal.SIGKILL)
    waiting.two(SLOW)
    with (tmp_path / "go").open("w"):
        _, errors = running.communicate(timeout=SLOW)
    assert running.returncode == 0, errors
    assert read_record(tmp_path / "run")["resumed"] == [1]


def test_a_program_that_ignores_all_signals_starts_workers_too(monkeypatch):
    started = []
    monkeypatch.setattr("torch.distributed.run.run", started.append)
    monkeypatch.setattr(workers.logging, "disable", lambda: None)
    monkeypatch.setattr(workers.signal, "getsignal", lambda number: signal.SIG_IGN)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert workers.launch(2, ["fedcli", "run"]) == 0
    assert (started[0].training_script, started[0].training_script_args) == ("fedcli", ["run"])
