"""Forked processes, which do items of this one's work where Python lets only one thread at a time go on.

A fork shares this process's memory, of which a page is copied only when one of the two writes to it. So nothing is
loaded again, items, networks and functions need not be sent, and only results are. A fork ends when there are no more
items: it keeps no state, draws no random numbers and prints nothing of ours. Items that it has not done are done by
this process, which then raises their errors itself.
"""

import ctypes
import gc
import math
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcli.core.trees import tree_map

FORK_SECONDS = 0.03  # what starting a fork takes, until it has been measured; it depends on the memory of the process
FORK_COST = 2  # of a fork in all, as a multiple of its start: both copy the pages that they write, and results are sent
SIGNALS = signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)  # this process ends its forks
MAX_WAITING = 1024  # numbers of items that wait to be taken, 4 bytes each: one page, which every pipe holds
PR_SET_PDEATHSIG = 1


@dataclass(eq=False)
class Processes:
    """This process and, where that is faster, forks of it.

    Attributes:
        count: Processes at most, this one included.
        note: Told what the user has to know.
        active: Processes at work now.
    """

    count: int = 1
    note: Callable[[str], None] = lambda text: None
    active: int = field(default=1, init=False)
    _seconds: dict[str, float] = field(default_factory=dict, init=False)  # of an item in the last call, by task
    _fork_seconds: float = field(default=FORK_SECONDS, init=False)
    _ended: list["_Fork"] = field(default_factory=list, init=False)  # whose results are here

    def map(
        self, task: str, work: Callable[[Any], Any], items: Sequence[Any], prepare_fork: Callable[[], None]
    ) -> list[Any]:
        """Calls `work` for each item; returns results in order, whose tensors may have been sent.

        Args:
            task: What is done. How long an item of this task took in the last call decides how many processes share
                the items. The first items, and those of a short call, are done one after the other.
            work: Does it for one item.
            items: What `work` is called for; none depends on another.
            prepare_fork: Called in each fork before its items.
        """
        spent: list[float] = []

        def timed(item: Any) -> Any:
            start = time.perf_counter()
            result = work(item)
            spent.append(time.perf_counter() - start)
            return result

        done: list[Any] = []
        while len(done) < len(items):
            items_left = items[len(done) :]
            seconds = fmean(spent) if spent else self._seconds.get(task, 0.0)
            count = self._fastest(len(items_left), seconds)
            if count == 1:
                done.append(timed(items_left[0]))
            else:
                done += self.map_with_forks(timed, items_left, count, prepare_fork)
        if spent:
            self._seconds[task] = fmean(spent)
        return done

    def _fastest(self, items: int, seconds: float) -> int:
        """Returns the number of processes with which items of so many seconds each are done first."""
        cost = FORK_COST * self._fork_seconds

        def needed(count: int) -> float:
            return items / count * seconds + (count - 1) * cost

        return min(range(1, min(self.count, items) + 1), key=needed)

    def map_with_forks(
        self,
        work: Callable[[Any], Any],
        items: Sequence[Any],
        count: int,
        prepare_fork: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """Calls `work` for each item in `count` processes, this one among them; returns results in order.

        `prepare_fork` is called in each fork before its items.
        """
        self.reap()
        results: dict[int, Any] = {}
        forks: list[_Fork] = []
        queue = _open_queue(len(items))
        count_afterwards = self.count
        self.count = 1  # what an item maps is not handed out again
        self.active = count
        try:
            self._start(forks, count - 1, partial(_Fork, work, items, queue, prepare_fork))
            if len(forks) < count - 1:
                count_afterwards = len(forks) + 1
            for number in _take_numbers(queue, len(items)):
                results[number] = work(items[number])
            for fork in forks:
                report = fork.receive()
                results |= report.results
                if report.fault:
                    count_afterwards = 1
                    self.note(f"a process that shared the work {report.fault}; one process does it all from here on")
            for number, item in enumerate(items):
                if number not in results:
                    results[number] = work(item)
        except BaseException:
            for fork in forks:
                fork.kill()
            raise
        finally:
            os.close(queue)
            self._ended += forks
            self.count = count_afterwards
            self.active = 1
        return [results[number] for number in range(len(items))]

    def _start(self, forks: list["_Fork"], count: int, make_fork: Callable[[], "_Fork"]) -> None:
        """Adds so many forks to a list, or as many as there can be, and measures what one takes."""
        start = time.perf_counter()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until forks ignore them, and all are in the list
        try:
            for _ in range(count):
                forks.append(make_fork())
        except OSError as error:  # no more processes, or no memory for them
            self.note(
                f"no more processes can be started ({error}); from here on the work is shared by {len(forks) + 1}"
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._fork_seconds = (time.perf_counter() - start) / max(len(forks), 1)

    def reap(self) -> None:
        """Waits for the forks to be gone, whose memory the system has to give back."""
        for fork in self._ended:
            fork.wait()
        self._ended.clear()


class _Report(NamedTuple):
    """What a fork has done."""

    results: dict[int, Any]  # by the numbers of the items
    fault: str  # what went wrong, after the words "a process"; empty where nothing did


class _Fork:
    """A fork at work; made in this process, it never returns in the other one."""

    def __init__(self, work: Callable[[Any], Any], items: Sequence[Any], queue: int, prepare_fork: Callable[[], None]):
        parent = os.getpid()
        prctl = _prctl()
        self._status: int | None = None  # the status with which it has ended; None while it is not known
        read_end, write_end = os.pipe()
        self._pipe = open(read_end, "rb")  # noqa: SIM115  # until it is received
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of other threads, from Python 3.12 on; it needs none of them
                self.pid = os.fork()
            if self.pid == 0:
                try:
                    if prctl is not None:
                        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                    if os.getppid() == parent:
                        _do_and_send(work, items, queue, prepare_fork, write_end)
                finally:
                    os._exit(0)
        finally:
            os.close(write_end)

    def receive(self) -> _Report:
        """Returns what it has done, once it has ended."""
        with self._pipe:
            message = self._pipe.read()
        try:
            return pickle.loads(message)
        except Exception as error:  # it has died before it was through
            status = self.wait()
            code = os.waitstatus_to_exitcode(status)
            ending = f"got {signal.Signals(-code).name}" if code < 0 else f"exit code {code}, {error}"
            return _Report({}, f"has died ({ending})")

    def kill(self) -> None:
        """Ends it."""
        self._pipe.close()
        if self._status is None:
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Returns the status of its end once it has ended."""
        if self._status is None:
            self._status = 0
            with suppress(ChildProcessError):  # the program has others wait for its children, or nobody
                _, self._status = os.waitpid(self.pid, 0)
        return self._status


def _do_and_send(
    work: Callable[[Any], Any], items: Sequence[Any], queue: int, prepare_fork: Callable[[], None], pipe: int
) -> None:
    """Does items in a fork, and sends their results."""
    for ending in SIGNALS:
        signal.signal(ending, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    gc.freeze()  # else each search for garbage would write to all objects, and so copy them
    _take_own_streams()
    prepare_fork()
    drawn = torch.get_rng_state()
    results: dict[int, Any] = {}
    fault = ""
    try:
        for number in _take_numbers(queue, len(items)):
            results[number] = work(items[number])
    except BaseException as error:
        fault = f"has failed ({type(error).__name__}: {error})"
        for _ in _take_numbers(queue, len(items)):  # leaves nothing to the others, so that all end soon
            pass
    if not torch.equal(drawn, torch.get_rng_state()):
        results = {}  # the process that draws itself is told what is wrong with that
        fault = "has drawn from PyTorch's global generator"
    try:
        message = pickle.dumps(_Report(tree_map(_detach, results), fault))
    except Exception as error:
        message = pickle.dumps(_Report({}, f"cannot send what it has done ({error})"))
    with open(pipe, "wb") as file:
        file.write(message)
    sys.stdout.flush()


def _detach(leaf: Any) -> Any:
    """Returns what is sent of a tensor: its own values alone, with their strides, which may decide how sums round."""
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _take_own_streams() -> None:
    """Makes new objects of the standard streams, whose locks another thread may have held when this fork was made."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is getattr(sys, f"__{name}__"):
            with suppress(OSError):  # closed
                file = open(number, "w", buffering=1, closefd=False)  # noqa: SIM115  # open until the fork ends
                setattr(sys, name, file)


def _open_queue(count: int) -> int:
    """Returns a pipe from which processes take the numbers of so many items, a piece at a time and each once."""
    queue, end = os.pipe()
    with open(end, "wb") as file:
        for start in range(0, count, _piece_size(count)):
            file.write(start.to_bytes(4, "little"))
    return queue


def _take_numbers(queue: int, count: int) -> Iterator[int]:
    """Yields the numbers that this process takes, until none is left."""
    while start := os.read(queue, 4):
        first = int.from_bytes(start, "little")
        yield from range(first, min(first + _piece_size(count), count))


def _piece_size(count: int) -> int:
    return math.ceil(count / MAX_WAITING)


@cache
def _prctl() -> Callable[[int, int], int] | None:
    """Returns the system call that ends a fork with its parent, looked up before there are forks; None off Linux."""
    return getattr(ctypes.CDLL(None), "prctl", None)
