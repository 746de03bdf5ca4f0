"""Several workers of one run: what they share, law 8, kills, interruptions and errors on one of them."""

import json
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

import fedcli
from fedcli.core.federation import NonFiniteLoss
from fedcli.errors import UserError
from fedcli.runs import workers
from fedcli.runs.owner import InUse
from fedcli.runs.records import read_record
from tests import law_8
from tests.programs import SMALL, Waiting, start
from tests.test_runs import essence

SLOW = 300  # seconds until a test fails that waits for a group of processes

# FedAvg, but on the second of two workers it fails in the second round.
FAILS = """
import os
from dataclasses import replace
from fedcli.papers.baselines import fedavg
from fedcli.registry import find_method

def run_round(state, cohort, fed, config):
    if cohort.round == 1 and os.environ.get("RANK") == "1":
        raise ValueError("only here")
    return fedavg.run_round(state, cohort, fed, config)

METHOD = replace(find_method("fedavg"), name="fails", run_round=run_round)
"""


class Connections:
    """Threads that stand for processes, and in place of PyTorch's collectives those that they call."""

    def __init__(self, count, monkeypatch):
        self.count, self.here, self.sent = count, threading.local(), [None] * count
        self.barrier = threading.Barrier(count, timeout=60)
        monkeypatch.setattr(dist, "all_gather", self.all_gather)
        monkeypatch.setattr(dist, "broadcast", self.broadcast)

    def run(self, work):
        """What `work` returns in each, given its group."""

        def begin(number):
            self.here.number = number
            return work(workers.Group(number, self.count, self.count))

        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(begin, range(self.count)))

    def all_gather(self, into, mine, async_op):
        self.sent[self.here.number] = mine
        self.barrier.wait()
        for place, other in zip(into, self.sent, strict=True):
            place.copy_(other)
        self.barrier.wait()
        return self

    def broadcast(self, buffer, source, async_op):
        if self.here.number == source:
            self.sent[source] = buffer
        self.barrier.wait()
        buffer.copy_(self.sent[source])
        self.barrier.wait()
        return self

    def is_completed(self):
        return True

    def wait(self):
        pass


class Pair(NamedTuple):
    left: torch.Tensor
    right: object


def tree(number):
    """Tensors of all kinds in containers of all kinds."""
    table = torch.arange(6.0).reshape(2, 3) + number
    pair = Pair(torch.full((3, 3), number, dtype=torch.float64), (number, "text", None, 0.5, True))
    return {"a": [table.T, torch.tensor(number)], 3: pair, "b": (torch.ones(1).expand(4) * 1, torch.zeros(0, 2), [])}


def plain(value):
    """A tree as lists, with types and strides, to be compared."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.stride(), value.tolist()
    if isinstance(value, dict):
        return [[key, plain(part)] for key, part in value.items()]
    return [type(value), *map(plain, value)] if isinstance(value, tuple | list) else value


def test_what_is_shared_comes_back_whole_and_in_order_on_every_worker(monkeypatch):
    def run(group):
        done = []

        def work(items):
            done.append([*items])
            inner = group.share(lambda parts: [part + 1 for part in parts], [*items])  # not divided again
            assert inner == [item + 1 for item in items]
            return (tree(item) for item in items)

        found = group.share(work, range(7))
        nbytes = group.nbytes
        alone = group.share(work, [9])
        found[0]["a"][0] += 100  # memory of its own
        return done, [plain(value) for value in found[1:]], nbytes, plain(alone[0])

    expected = [plain(tree(number)) for number in range(1, 7)]
    for number, (done, found, nbytes, alone) in enumerate(Connections(3, monkeypatch).run(run)):
        assert done == [[0, 1, 2, 3, 4, 5, 6][number::3], [9]]
        assert found == expected
        assert nbytes == 7 * (64 + 64 + 128 + 64)  # of 24, 8, 72 and 16 bytes, each from a place that 64 divides
        assert alone == plain(tree(9))


def test_the_first_worker_alone_makes_what_all_get(monkeypatch):
    made = []
    make = lambda group: group.first(lambda: made.append(group.number) or tree(group.number))  # noqa: E731
    assert [plain(found) for found in Connections(2, monkeypatch).run(make)] == 2 * [plain(tree(0))]
    assert made == [0]
    assert make(workers.Group(5)) is not None  # alone, whatever its number


def test_workers_that_differ_are_refused_and_so_is_what_cannot_travel(monkeypatch):
    together = Connections(2, monkeypatch)

    def refused(group):
        with pytest.raises(UserError) as caught:
            group.refuse_differences({"seed": 1, "data": "ab"[group.number]}, torch.device("cpu"))
        group.refuse_differences({"seed": 1}, torch.device("cpu"))
        return str(caught.value)

    assert {text.split(";")[0] for text in together.run(refused)} == {
        "the workers differ in data (got b on worker 1, a on worker 0)"
    }
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for group, device in ((workers.Group(0, 2, 2), "cuda"), (workers.Group(0, 2, 1), "cuda:0")):
        with pytest.raises(UserError, match="every worker needs a CUDA device of its own"):
            group.refuse_differences({}, torch.device(device))
    with pytest.raises(UserError, match=r"must be trees of tensors, numbers and texts .* \(got object\)"):
        workers.Group(0, 2, 2).share(lambda items: [object()], range(2))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UserError("wrong; do better."), UserError("on worker 1, wrong; do better.")),
        (InUse("wait for it."), UserError("on worker 1, wait for it.")),
        (NonFiniteLoss("the term"), NonFiniteLoss("on worker 1, the term")),
        (ValueError("only here"), RuntimeError("on worker 1, ValueError: only here")),
    ],
)
def test_the_first_error_told_is_what_the_others_end_with(error, expected, monkeypatch):
    store = dist.HashStore()
    first, second, third = (workers.Group(number, 3, 3, store=store) for number in range(3))
    looks = iter(range(100 * workers.LOOK))

    class Never:
        def is_completed(self):
            return next(looks) < 0

    def lost(*given, async_op):
        raise RuntimeError("connection closed")

    second.tell(error)
    third.tell(RuntimeError("connection closed, since the second has ended"))
    second.tell(ValueError("made of the first"))
    monkeypatch.setattr(workers, "POLL", 0)
    for gather in (lost, lambda *given, async_op: Never()):
        monkeypatch.setattr(dist, "all_gather", gather)
        with pytest.raises(type(expected)) as caught:
            first.share(list, [1, 2, 3])
        assert (type(caught.value), str(caught.value)) == (type(expected), str(expected))


def test_a_worker_that_ends_without_a_word_is_lost(monkeypatch):
    def lost(*given, async_op):
        raise RuntimeError("connection closed")

    monkeypatch.setattr(dist, "all_gather", lost)
    first, second = (workers.Group(number, 2, 2, store=store) for store in [dist.HashStore()] for number in range(2))
    second.tell(KeyboardInterrupt())
    second.tell(ValueError("made of the interruption"))
    with pytest.raises(workers.Lost, match="another worker has ended"):
        first.share(list, [1, 2, 3])


def test_workers_that_train_for_long_are_waited_for(monkeypatch):
    class Slow:
        def __init__(self):
            self.looks = iter(range(3 * workers.LOOK))

        def is_completed(self):
            return next(self.looks, None) is None

        def wait(self):
            pass

    def all_gather(into, mine, async_op):
        for place in into:
            place.copy_(mine)
        return Slow()

    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(workers, "POLL", 0)
    assert workers.Group(0, 2, 2, store=dist.HashStore()).share(list, [3, 4]) == [3, 3]


def test_law_8_workers_are_invisible(tmp_path, two_threads):
    running = start(tmp_path, tmp_path, program=("-c", "from tests.law_8 import main; main()"))
    expected = law_8.endings()
    _, errors = running.communicate(timeout=SLOW)
    assert running.returncode == 0, errors
    for count in law_8.COUNTS:
        found = json.loads((tmp_path / str(count)).read_text())
        assert found.keys() == expected.keys()
        assert [name for name in expected if found[name] != expected[name]] == []


def test_workers_that_die_again_and_again_are_given_up(tmp_path):
    program = "import os; from fedcli.runs.workers import launch; launch(os._exit, 3, count=2, restarts=1)"
    _, errors = start(tmp_path, program=("-c", program)).communicate(timeout=SLOW)
    found = re.search(r"UserError: workers died 2 times \(got exit code (\d+) of worker [01];", errors)
    assert found, errors
    assert found[1] in ("3", str(workers.LOST))  # a worker that loses the other may be seen first


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ({0: (workers.LOST, 1), 1: (3, 2)}, "exit code 3 of worker 1"),
        ({0: (-9, 2), 1: (3, 1)}, "exit code 3 of worker 1"),
        ({0: (workers.LOST, 2), 1: (workers.LOST, 1)}, f"exit code {workers.LOST} of worker 1"),
    ],
)
def test_of_workers_that_died_the_first_is_named_that_has_not_lost_another(ends, expected, monkeypatch):
    failures = {number: SimpleNamespace(exitcode=code, timestamp=at) for number, (code, at) in ends.items()}
    monkeypatch.setattr(ChildFailedError, "format_msg", lambda self: "")

    def launcher(config, entrypoint):
        def fail(*given):
            raise ChildFailedError("work", failures)

        return fail

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", launcher)
    with pytest.raises(UserError, match=expected):
        workers.launch(os.getpid, count=2, restarts=1)


def test_a_killed_worker_an_interruption_and_another_number_of_workers_leave_the_same_bits(tmp_path):
    waiting = Waiting(tmp_path)
    options = (*SMALL, "--out", "run", "--checkpoint-every", "1")
    running = start(tmp_path, "run", "./waits.py", *options, "--workers", "2")
    os.kill(waiting.two(SLOW)[0], signal.SIGKILL)
    waiting.two(SLOW)  # both, started again
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=SLOW)
    assert running.returncode == 130, errors
    assert errors.splitlines()[-1].startswith("interrupted after 1/3 rounds; 'fedcli resume run")
    assert "Traceback" not in errors
    waiting.free()
    again = start(tmp_path, "resume", "run", "--method", "./waits.py", "--workers", "3")
    output, errors = again.communicate(timeout=SLOW)
    assert (again.returncode, errors) == (0, "")
    assert output.count("round 3/3:") == 1

    given = dict(zip((flag[2:].replace("-", "_") for flag in SMALL[::2]), SMALL[1::2], strict=True))
    numbers = {name: int(value) if value.isdecimal() else value for name, value in given.items()}
    whole = fedcli.run(str(tmp_path / "waits.py"), out=tmp_path / "whole", checkpoint_every=1, **numbers)
    record = read_record(tmp_path / "run")
    assert essence(record)["rounds"] == essence(whole.record)["rounds"]
    assert record["summary"] == whole.record["summary"]
    assert record["resumed"] == [1, 1]
    assert (record["engine"]["workers"], whole.record["engine"]["workers"]) == (3, 1)


def test_an_error_on_one_worker_ends_all_with_one_line(tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    process = start(tmp_path, "run", "./fails.py", *SMALL, "--out", "run", "--workers", "2")
    _, errors = process.communicate(timeout=SLOW)
    assert process.returncode == 2
    assert len(errors.splitlines()) == 1
    assert errors.startswith("error: on worker 1, ")
    assert "only here" in errors
    assert read_record(tmp_path / "run")["status"] == "failed"
