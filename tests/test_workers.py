"""Several workers of one run: law 8, kills, interruptions and errors on one of them."""

import json
import os
import re
import signal
import sys

import pytest
from torch.distributed.run import main as torchrun

from fedcli.cli import display
from fedcli.cli.display import plot_run
from fedcli.runs import workers
from fedcli.runs.options import flags_of
from fedcli.runs.record import read_record
from tests import workers_law
from tests.programs import WAITING_METHOD, WaitingRuns, start_program
from tests.run_options import THREE_ROUNDS
from tests.run_parts import file_names, reproducible_parts

pytestmark = [pytest.mark.long(worker=0), pytest.mark.slow]

# One start of two workers after the other, as by the launcher; in each, one worker does an act in its half of the work.
PROGRAM = """
import os, sys, torch
from fedcli.errors import NonFiniteLoss
from fedcli.runs.workers import joined

def stop(error):
    raise error

acts = [
    (1, lambda: 1 / 0),
    (1, lambda: stop(NonFiniteLoss("the term"))),
    (0, lambda: None),
    (0, os.abort),
]
for number, (worker, act) in enumerate(acts):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
    try:
        with joined() as group:
            group.distribute(lambda items: [act() if group.rank == worker else None for _ in items], [1, 2])
            group.refuse_differences({"seed": 1, "data": "ab"[group.rank]})
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    except SystemExit:
        pass
"""


def errors_of_workers(folder, count, program, *arguments):
    """Starts a program in so many workers and waits for them; returns what they say of errors."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    _, errors = start_program(folder, main=lambda: workers.launch(count, command)).communicate()
    return errors


def test_a_worker_that_fails_or_dies_is_named_once_and_the_others_end(tmp_path):
    errors = errors_of_workers(tmp_path, 2, PROGRAM)
    lines = errors.splitlines()
    assert lines[0] == "RuntimeError: on worker 1, ZeroDivisionError: division by zero"
    assert lines[1] == "NonFiniteLoss: on worker 1, the term"
    assert lines[2].startswith("UserError: the workers differ in data (got b on worker 1, a on worker 0); give")
    assert sum("UserError: worker 0 has died (got SIGABRT); find out" in line for line in lines[3:]) == 1, errors


def test_law_8_workers_are_invisible(tmp_path, two_threads):
    expected = workers_law.results_by_name()
    program = "from tests.workers_law import main; main()"
    assert errors_of_workers(tmp_path, max(workers_law.NUMBERS_OF_WORKERS), program, tmp_path) == ""
    for count in workers_law.NUMBERS_OF_WORKERS:
        endings = json.loads((tmp_path / str(count)).read_text())
        assert endings.keys() == workers_law.cases(count).keys()
        assert [name for name in endings if endings[name] != expected[name]] == []


def test_a_run_of_a_killed_worker_ends_in_the_same_bits(tmp_path, monkeypatch):
    """By another number of workers."""
    monkeypatch.setattr(display, "plot_run", plot_run)  # as workers do, which are new processes
    waiting = WaitingRuns(tmp_path)
    (tmp_path / "waits.py").write_text(WAITING_METHOD.replace("fedavg", "scaffold"))  # whose clients keep states
    command = ("run", "./waits.py", *flags_of(THREE_ROUNDS), "--checkpoint-every", "1", "--state-memory", "0")

    killed = start_program(tmp_path, *command, "--out", "run", "--workers", "2")
    worker, _ = waiting.wait_for()
    os.kill(worker, signal.SIGKILL)
    _, errors = killed.communicate()
    assert killed.returncode == 2
    last_line = errors.splitlines()[-1]
    assert re.fullmatch(r"error: worker [01] has died \(got SIGKILL\); .*", last_line), errors

    waiting.let_later_ones_pass()
    resumed = start_program(tmp_path, "resume", "run", "--method", "./waits.py", "--workers", "3")
    output, errors = resumed.communicate()
    assert resumed.returncode == 0
    assert errors == ""
    assert output.count("round 3/3:") == 1

    start_program(tmp_path, *command, "--out", "whole").communicate()
    record = read_record(tmp_path / "run")
    whole = read_record(tmp_path / "whole")
    assert reproducible_parts(record)["rounds"] == reproducible_parts(whole)["rounds"]
    assert record["summary"] == whole["summary"]
    assert file_names(tmp_path / "run") == file_names(tmp_path / "whole")
    assert record["resumed"] == [1]
    assert record["engine"]["workers"] == 3
    assert whole["engine"]["workers"] == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_launcher_and_an_interruption_is_one_line(number, tmp_path):
    waiting = WaitingRuns(tmp_path)
    running = start_program(tmp_path, "run", "./waits.py", *flags_of(THREE_ROUNDS), "--out", "run", "--workers", "2")
    waiting.wait_for()
    running.send_signal(number)
    _, errors = running.communicate()
    assert waiting.have_ended()
    if number == signal.SIGINT:
        assert running.returncode == 130, errors
        assert re.fullmatch("interrupted after 1/3 rounds; to resume: fedcli resume run.*\n", errors)


def test_torchrun_starts_workers_again_that_go_on_in_their_folder(tmp_path):
    waiting = WaitingRuns(tmp_path)
    options = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "-m", "fedcli")
    command = ("run", "./waits.py", *flags_of(THREE_ROUNDS), "--out", "run", "--continue", "--checkpoint-every", "1")
    running = start_program(tmp_path, *options, *command, main=torchrun)

    _, worker = waiting.wait_for()
    os.kill(worker, signal.SIGKILL)
    waiting.wait_for()
    with (tmp_path / "go").open("w") as go:
        print(file=go, flush=True)  # which nobody reads, so that workers find it whenever they come
        _, errors = running.communicate()

    assert running.returncode == 0, errors
    assert read_record(tmp_path / "run")["resumed"] == [1]


def test_a_program_that_ignores_all_signals_starts_workers_too(monkeypatch):
    started = []
    monkeypatch.setattr("torch.distributed.run.run", started.append)
    monkeypatch.setattr(workers.logging, "disable", lambda: None)
    monkeypatch.setattr(workers.signal, "getsignal", lambda number: signal.SIG_IGN)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert workers.launch(2, ["fedcli", "run"]) == 0
    (options,) = started
    assert options.training_script == "fedcli"
    assert options.training_script_args == ["run"]
