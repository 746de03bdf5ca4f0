"""The processes that do one run together: how they start, exchange results, and end together.

PyTorch's launcher starts them, by `torchrun` or for `--workers`. Each runs the whole program and makes the same draws,
so that each has the same state; only work with parts is distributed, by `WorkerGroup.distribute`. Results go to all
over gloo, pickled: the processes of a run trust each other. The first alone writes and prints.

No end of one process leaves another waiting. One that fails sends its error where the others expect a message. One that
dies closes its connections, which the others notice.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fedcli.core.trees import Tree, tree_map
from fedcli.errors import NonFiniteLoss, UserError
from fedcli.runs.cores import threads_of_run
from fedcli.runs.signals import Interrupted, end_with_parent

LOST_EXIT_CODE = 75  # of a process that no longer reaches the others
GATHER_TIMEOUT = timedelta(days=30)  # to wait for the others, who may train a large chunk
SENT_ERRORS = UserError, NonFiniteLoss  # errors that stay what they are on the other processes


class Message(NamedTuple):
    """What a process sends to the others."""

    packed: Tree  # a function in place of each tensor, which makes it on the receiver's device
    error: Exception | None  # with which the sender ends


@dataclass(eq=False)
class WorkerGroup:
    """The processes of a run as this one sees them; by default it is alone."""

    rank: int = 0  # of this process
    world_size: int = 1  # how many processes there are
    local_world_size: int = 1  # how many of them are on this machine, and share its cores
    allows_forks: bool = True  # whether forks may share the work of this one
    error_is_known: bool = field(default=False, init=False)  # to all, of the error that this one ends with
    _is_distributing: bool = field(default=False, init=False)  # whether it is in a part of distributed work

    @property
    def is_first(self) -> bool:
        """Whether this process is the first, which alone writes and prints."""
        return self.rank == 0

    def distribute(self, work: Callable[[Sequence[Any]], Iterable[Any]], items: Sequence[Any]) -> list[Any]:
        """Returns what `work` gives for all items, in their order, each done by one of the processes.

        A single item is done by all, so that its own parts can be distributed; these are not distributed again.
        """
        if self._is_distributing or len(items) < 2:
            return list(work(items))
        self._is_distributing = True  # for good where this fails: then all end
        own_results = list(work(items[self.rank :: self.world_size]))
        self._is_distributing = False
        results_by_rank = self.gather(own_results)
        results = []
        for index in range(len(items)):
            turn, rank = divmod(index, self.world_size)
            results.append(results_by_rank[rank][turn])
        return results

    def from_first(self, make: Callable[[], Tree]) -> Tree:
        """Returns on all processes what `make` gives on the first, which alone calls it."""
        made = make() if self.is_first else None
        return self.gather(made)[0]

    def refuse_differences(self, facts: dict[str, Any]) -> None:
        """Refuses facts, by the words for them, that differ among the processes."""
        for rank, other_facts in enumerate(self.gather(facts)):
            for name in facts:
                if other_facts[name] != facts[name]:
                    got = f"{other_facts[name]} on worker {rank}, {facts[name]} on worker {self.rank}"
                    raise UserError(f"the workers differ in {name} (got {got}); give all the same data and versions.")

    def gather(self, tree: Tree, own_error: Exception | None = None) -> list[Tree]:
        """Sends a tree to all and returns everyone's, by their ranks, or raises the error that one has sent.

        This process sends `own_error` where it ends with one. A tensor arrives on the receiver's device, dense but with
        its strides, on which the order of a sum may depend.
        """
        if self.world_size == 1:
            return [tree]

        def pack(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            on_host = leaf.detach().to("cpu", copy=True)
            return partial(Tensor.to, on_host, leaf.device.type)  # which the receiver calls

        def unpack(leaf: Any) -> Any:
            return leaf() if isinstance(leaf, partial) else leaf

        messages: list[Any] = [None] * self.world_size  # each becomes a `Message`
        try:
            dist.all_gather_object(messages, Message(tree_map(pack, tree), own_error))
        except RuntimeError as failure:
            raise Interrupted("another worker has died", LOST_EXIT_CODE) from failure
        for rank, message in enumerate(messages):
            if message.error is not None:
                self.error_is_known = True
                raise type(message.error)(f"on worker {rank}, {message.error}")
        return [tree_map(unpack, message.packed) for message in messages]


launched = dist.is_torchelastic_launched  # whether PyTorch's launcher has started this process
_current = WorkerGroup()


def worker_group() -> WorkerGroup:
    """Returns the processes of the run that goes on in this one."""
    return _current


def _ray_is_at_work() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def may_fork() -> bool:
    """Returns whether this process may share its work with forks of it.

    Only Linux forks a process with PyTorch safely, and only without a device that PyTorch keeps threads for. A thread
    that is no daemon, and Ray, do work of their own, in the midst of which a fork would find it. Workers, and daemons
    of `multiprocessing`, are one of several.
    """
    other_threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    return (
        sys.platform == "linux"
        and _current.allows_forks
        and not torch.cuda.is_available()
        and threading.current_thread() is threading.main_thread()
        and all(thread.daemon for thread in other_threads)
        and not multiprocessing.current_process().daemon
        and not _ray_is_at_work()
    )


@contextmanager
def joined(allows_forks: bool = True) -> Iterator[WorkerGroup]:
    """Connects this process with those that the launcher has started with it; alone without a launcher.

    `allows_forks` says whether this process alone may share its work with forks of it.

    An error inside ends all: the first raises it, the others end here, so that the launcher waits for the first. An
    interruption is not sent: this process ends, and the others notice.
    """
    global _current
    if not launched():
        _current = WorkerGroup(allows_forks=allows_forks)
        try:
            yield _current
        finally:
            _current = WorkerGroup()
        return
    if torch.cuda.is_available():  # each has the next device, which "cuda" stands for from here on
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    end_with_parent()  # the launcher, which may be killed before it has ended this process
    store, rank, world_size = next(dist.rendezvous("env://"))
    if os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":  # the launcher's, which has addresses of earlier starts
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=GATHER_TIMEOUT)
    group = WorkerGroup(rank, world_size, int(os.environ["LOCAL_WORLD_SIZE"]), allows_forks=False)
    _current = group
    try:
        yield group
    except Exception as error:
        if not group.error_is_known:
            sent = error if isinstance(error, SENT_ERRORS) else RuntimeError(f"{type(error).__name__}: {error}")
            with suppress(Exception):  # it comes back here too
                group.gather(None, own_error=sent)
        if rank > 0:
            sys.exit()
        raise
    finally:
        _current = WorkerGroup()
        dist.destroy_process_group()  # closes the connections, which the others see


def launch(count: int, command: Sequence[str]) -> int:
    """Starts a command `count` times by PyTorch's launcher; what interrupts this process interrupts them.

    Returns:
        The exit code of the first process, which has said why it ended, or that of an interruption.

    Raises:
        UserError: If one of them has died.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.disable()  # the launcher's pages on a process that has failed
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_of_run()))  # as of one process; the launcher sets 1
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    # Not those that are ignored, as by `nohup`.
    handled_signals = [number.name for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
    options = ["--standalone", "--local-addr", "localhost", "--nproc-per-node", str(count), "--no-python"]
    try:
        run(parse_args([*options, "--signals-to-handle", ",".join(handled_signals), *command]))
        return 0
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        failures = error.failures  # by the rank of the process
        by_time = sorted(failures, key=lambda rank: failures[rank].timestamp)
        causes = [rank for rank in by_time if failures[rank].exitcode != LOST_EXIT_CODE]  # the others failed by it
        rank = (causes or by_time)[0]
        failure = failures[rank]
        code = failure.exitcode
        has_said_why = code > 0 and code != LOST_EXIT_CODE
        if rank == 0 and has_said_why:
            return code
        got = f"exit code {code}" if code > 0 else failure.signal_name()
        raise UserError(f"worker {rank} has died (got {got}); find out why, then use 'fedcli resume'.") from error
