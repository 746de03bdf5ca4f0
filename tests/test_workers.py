"""Several workers of one run: what they share, law 8, kills, interruptions and errors on one of them."""

import json
import os
import pickle
import re
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from fedcli.core.federation import NonFiniteLoss
from fedcli.errors import UserError
from fedcli.runs import workers
from fedcli.runs.records import read_record
from fedcli.runs.signals import Ended
from tests import law_8
from tests.files import refused
from tests.programs import SMALL, Waiting, start
from tests.test_runs import essence

SLOW = 300  # seconds until a test fails that waits for a group of processes


class Connections:
    """Threads that stand for processes, and in place of PyTorch's collectives those that they call."""

    def __init__(self, count, monkeypatch):
        self.count, self.here, self.sent = count, threading.local(), [None] * count
        self.barrier = threading.Barrier(count, timeout=60)
        monkeypatch.setattr(dist, "all_gather_object", self.all_gather_object)
        monkeypatch.setattr(dist, "broadcast", self.broadcast)

    def run(self, work):
        """What `work` returns in each, given its group."""

        def begin(number):
            self.here.number = number
            return work(workers.Group(number, self.count, self.count))

        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(begin, range(self.count)))

    def all_gather_object(self, into, mine):
        self.sent[self.here.number] = pickle.dumps(mine)
        self.barrier.wait()
        into[:] = map(pickle.loads, self.sent)
        self.barrier.wait()

    def broadcast(self, buffer, source):
        if self.here.number == source:
            self.sent[source] = buffer
        self.barrier.wait()
        buffer.copy_(self.sent[source])
        self.barrier.wait()


def test_workers_that_differ_are_refused(monkeypatch):
    cpu = torch.device("cpu")

    def compare(group):
        differing = {"seed": 1, "data": "ab"[group.number]}
        refused(lambda: group.refuse_differences(differing, cpu), "differ in data (got b on worker 1, a on worker 0)")
        group.refuse_differences({"seed": 1}, cpu)

    Connections(2, monkeypatch).run(compare)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for group, device in (
        (workers.Group(0, 2, 2), torch.device("cuda")),
        (workers.Group(0, 2, 1), torch.device("cuda:0")),
    ):
        refused(
            lambda group=group, device=device: group.refuse_differences({}, device), "needs a CUDA device of its own"
        )


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UserError("wrong; do better."), UserError("on worker 1, wrong; do better.")),
        (NonFiniteLoss("the term"), NonFiniteLoss("on worker 1, the term")),
        (ValueError("only here"), RuntimeError("on worker 1, ValueError: only here")),
    ],
)
def test_an_error_of_one_worker_is_what_all_end_with(error, expected, monkeypatch):
    def run(group):
        raised = error
        if group.number != 1:
            with pytest.raises(type(expected)) as caught:
                group.share(list, [1, 2, 3])
            raised = caught.value
        if group.number == 0:
            group.end(raised)
        else:
            with pytest.raises(SystemExit) as end:
                group.end(raised)
            assert end.value.code is None  # the launcher waits for the first, which says it for all
        group.end(ValueError("made of it"))
        return type(raised), str(raised)

    of_first, of_second, of_third = Connections(3, monkeypatch).run(run)
    assert of_first == of_third == (type(expected), str(expected))
    assert of_second == (type(error), str(error))


def test_an_error_is_not_told_where_the_others_expect_tensors(monkeypatch):
    together, concatenate = Connections(2, monkeypatch), torch.cat

    def too_large(parts):
        if together.here.number == 1:
            raise RuntimeError("can't allocate memory")
        return concatenate(parts)

    def run(group):
        with pytest.raises((RuntimeError, Ended)) as caught:
            group.share(lambda items: map(torch.tensor, items), [1, 2])
        together.barrier.abort()  # its connections close
        group.end(caught.value)
        return caught.type

    monkeypatch.setattr(torch, "cat", too_large)
    assert together.run(run) == [Ended, RuntimeError]


def test_a_worker_that_dies_is_lost(monkeypatch):
    def lost(into, mine):
        raise RuntimeError("connection closed")

    monkeypatch.setattr(dist, "all_gather_object", lost)
    first, second = (workers.Group(number, 2, 2) for number in range(2))
    with pytest.raises(Ended, match="another worker has died"):
        first.share(list, [1, 2, 3])
    second.end(KeyboardInterrupt())  # which is not told
    second.end(ValueError("made of the interruption"))


def test_law_8_workers_are_invisible(tmp_path, two_threads):
    expected = law_8.endings()
    program = [sys.executable, "-c", "from tests.law_8 import main; main()", str(tmp_path)]
    for count in law_8.COUNTS:
        text = f"from fedcli.runs.workers import launch; launch({count}, {program})"
        _, errors = start(tmp_path, program=("-c", text)).communicate(timeout=SLOW)
        assert errors == ""
        found = json.loads((tmp_path / str(count)).read_text())
        assert found.keys() == expected.keys()
        assert [name for name in expected if found[name] != expected[name]] == []


@pytest.mark.parametrize(
    ("number", "act", "said"),
    [
        (0, "os.abort()", "UserError: worker 0 has died (got SIGABRT); look for"),
        (1, "os.abort()", "UserError: worker 1 has died (got SIGABRT); look for"),
        (1, "1 / 0", "RuntimeError: on worker 1, ZeroDivisionError: division by zero"),
    ],
)
def test_a_worker_that_dies_or_fails_is_named_in_a_line_and_the_others_end(number, act, said, tmp_path):
    program = (
        "import os, sys, torch; from fedcli.runs.workers import joined\n"
        f"def work(items): return {act} if group.number == {number} else items\n"
        "with joined() as group: group.share(work, [1, 2])"
    )
    text = f"from fedcli.runs.workers import launch; launch(2, {[sys.executable, '-c', program]})"
    process = start(tmp_path, program=("-c", text))
    _, errors = process.communicate(timeout=SLOW)
    assert errors.count(said) == 1


def test_a_worker_that_is_killed_leaves_a_run_that_another_number_of_workers_ends_in_the_same_bits(tmp_path):
    waiting = Waiting(tmp_path)
    options = (*SMALL, "--out", "run", "--checkpoint-every", "1")
    running = start(tmp_path, "run", "./waits.py", *options, "--workers", "2")
    os.kill(waiting.two(SLOW)[0], signal.SIGKILL)
    _, errors = running.communicate(timeout=SLOW)
    assert running.returncode == 2
    assert re.fullmatch(r"error: worker [01] has died \(got SIGKILL\); .*", errors.splitlines()[-1]), errors
    waiting.free()
    again = start(tmp_path, "resume", "run", "--method", "./waits.py", "--workers", "3")
    output, errors = again.communicate(timeout=SLOW)
    assert (again.returncode, errors) == (0, "")
    assert output.count("round 3/3:") == 1

    start(tmp_path, "run", "./waits.py", *SMALL, "--out", "whole").communicate(timeout=SLOW)
    record, whole = (read_record(tmp_path / name) for name in ("run", "whole"))
    assert essence(record)["rounds"] == essence(whole)["rounds"]
    assert record["summary"] == whole["summary"]
    assert record["resumed"] == [1]
    assert (record["engine"]["workers"], whole["engine"]["workers"]) == (3, 1)


def test_an_interruption_ends_all_workers_with_one_line(tmp_path):
    waiting = Waiting(tmp_path)
    running = start(tmp_path, "run", "./waits.py", *SMALL, "--out", "run", "--workers", "2")
    waiting.two(SLOW)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=SLOW)
    assert running.returncode == 130, errors
    assert errors.startswith("interrupted after 1/3 rounds; to resume: fedcli resume run")
    assert len(errors.splitlines()) == 1


def test_workers_end_with_a_launcher_that_is_killed(tmp_path):
    waiting = Waiting(tmp_path)
    running = start(tmp_path, "run", "./waits.py", *SMALL, "--out", "run", "--workers", "2")
    waiting.two(SLOW)
    running.kill()
    running.communicate(timeout=SLOW)
    waiting.none()


def test_torchrun_starts_workers_again_that_go_on_in_their_folder(tmp_path):
    waiting = Waiting(tmp_path)
    options = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "-m", "fedcli")
    command = ("run", "./waits.py", *SMALL, "--out", "run", "--checkpoint-every", "1")
    running = start(tmp_path, *options, *command, program=("-m", "torch.distributed.run"))
    os.kill(waiting.two(SLOW)[1], signal.SIGKILL)
    waiting.two(SLOW)
    with (tmp_path / "go").open("w"):
        _, errors = running.communicate(timeout=SLOW)
    assert running.returncode == 0, errors
    assert read_record(tmp_path / "run")["resumed"] == [1]
