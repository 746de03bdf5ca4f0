"""Items of work side by side: in threads or forked processes on a CPU, and by the workers of a run."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any, Protocol

import torch

from fedcli.core.forks import Processes


class Workers(Protocol):
    """The processes that do a run together, as one of them sees them, see `fedcli.runs.workers.WorkerGroup`."""

    world_size: int  # how many processes there are
    local_world_size: int  # how many of them are on this machine, and share its cores

    def distribute(self, work: Callable[[Any], Iterable[Any]], items: Sequence[Any]) -> list[Any]:
        """Returns what `work` gives for all items, in their order, each done by one of the processes.

        Results have the bits of one process where the items are the same chunks of clients, the strides of tensors
        are kept, and each item is computed with as many threads as in one process.
        """


class OneWorker:
    """The only process of a run, which does all its work."""

    world_size = 1
    local_world_size = 1

    def distribute(self, work: Callable[[Sequence[Any]], Iterable[Any]], items: Sequence[Any]) -> list[Any]:
        """Returns what `work` gives for all items."""
        return list(work(items))


class ItemRunner:
    """Does the same work for several items, on a CPU for several at a time.

    Attributes:
        workers: The processes of the run, each of which does some of the items.
        processes: This process and its forks, see `use_processes`.
        stopping: Set while the other threads are to end early.
    """

    def __init__(self, device: torch.device, workers: Workers):
        self.workers = workers
        self.processes = Processes()
        self.stopping = threading.Event()
        self._is_on_cpu = device.type == "cpu"
        self._on_samples: Callable[[int], None] = lambda count: None
        self._lock = threading.Lock()

    def listen(self, on_samples: Callable[[int], None]) -> None:
        """Has a function called after each step with its number of samples, by one thread at a time."""
        self._on_samples = on_samples

    def count_samples(self, count: int) -> None:
        """Tells what listens that a step with so many samples is done; ends the thread if another one has failed."""
        with self._lock:
            self._on_samples(count)
        if self.stopping.is_set():
            raise CancelledError

    @contextmanager
    def use_processes(self, processes: Processes) -> Iterator[None]:
        """Has processes do the items on a CPU inside a `with` block, at whose end the last forks are waited for."""
        before = self.processes
        self.processes = processes
        try:
            yield
        finally:
            self.processes = before
            processes.reap()

    def map(self, task: str, work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Calls `work` for each item, on the CPU one in each thread or process; returns results in order.

        `task` says what is done, as in `Processes.map`.

        Two threads on two clients do more than two threads on every operation of one, much more where other programs
        want the cores too; and two processes more than two threads where Python takes much of the time. The results
        of several items depend neither on the number of threads nor on that of processes or workers; a single item
        takes all threads, whose number may change its last bits.
        """
        if self.processes.count > 1:
            return self.processes.map(task, work, items, self._silence)
        has_threads = self._is_on_cpu and torch.get_num_threads() > 1 and len(items) > 1
        work_on_some = partial(self._map_in_threads, work) if has_threads else partial(map, work)
        return self.workers.distribute(work_on_some, items)

    def map_one_a_process(self, task: str, work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Calls `work`, which hands out items itself, for each item; several at a time only where there are processes.

        `task` says what is done, as in `Processes.map`.
        """
        return self.processes.map(task, work, items, self._silence)

    def _map_in_threads(self, work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        threads = torch.get_num_threads()
        pool = ThreadPoolExecutor(
            max_workers=max(threads // self.workers.local_world_size, 1), initializer=lambda: torch.set_num_threads(1)
        )
        try:
            contexts = [copy_context() for _ in items]  # as of `refuse_reading`, which a new thread would not have
            return list(pool.map(lambda context, item: context.run(work, item), contexts, items))
        finally:
            self.stopping.set()  # after Ctrl-C or a failure the others need not finish
            pool.shutdown(cancel_futures=True)
            self.stopping.clear()
            torch.set_num_threads(threads)  # the threads' setting was everyone's

    def _silence(self) -> None:
        self.listen(lambda count: None)  # a fork has no display
