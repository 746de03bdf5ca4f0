"""The processes that divide the work of one run: how they start, share what they make, and end together.

PyTorch's launcher starts them, by `torchrun` or for `--workers`, and starts all again when one dies. Each runs the
whole program and makes the same draws, so that each has the same state; only work with parts is divided, by
`Group.share`. What a part gives goes to all as flat bytes, over gloo or, on CUDA, NCCL; its structure goes before, in
JSON. The first process alone writes, prints and draws.

No end of one process leaves another waiting. One that fails says why in the launcher's store and closes its
connections: the others then fail with it. One that ends without a word, by a signal or because it has lost another,
makes the launcher start all again. Until all are connected, each waits no longer than `MEETING`.
"""

import itertools
import json
import logging
import multiprocessing
import operator
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedcli.core.federation import NonFiniteLoss
from fedcli.core.trees import Tree
from fedcli.errors import UserError
from fedcli.runs.signals import end_with_parent, exit_code

RESTARTS = 20  # of all processes, after which a run that kills them is given up
LOST = 75  # exit code of a process that no longer reaches the others: it is to be started again
MEETING = timedelta(minutes=5)  # for all processes to start and to connect; then they are started again
PATIENCE = timedelta(days=30)  # to wait for the others, who may train a large chunk
POLL, LOOK = 0.0005, 400  # seconds between two looks at a collective; of these, until one at whether all go on
ALIGNED = 64  # bytes; where a tensor may begin among the others
ERROR = "error"  # key of the store: with what the first process that failed has failed
PASSED_ON = {kind.__name__: kind for kind in (UserError, NonFiniteLoss)}


class Lost(KeyboardInterrupt):
    """Another process of the run has ended without a word, so that this one cannot go on."""

    code = LOST


class Group:
    """The processes of a run as this one sees them; by default it is alone.

    Attributes:
        number: Of this process, from 0; 0 writes.
        count: Of all processes.
        here: Of those on this machine.
        restarted: Whether they have been started before for this run.
        seconds: Time that tensors took to travel, waiting for slower processes not included.
        nbytes: Of the tensors that have travelled, of all processes.
    """

    def __init__(self, number: int = 0, count: int = 1, here: int = 1, restarted: bool = False, store: Any = None):
        self.number, self.count, self.here, self.restarted = number, count, here, restarted
        self.seconds, self.nbytes = 0.0, 0
        self._store, self._inside, self._told = store, False, False

    def share(self, work: Callable[[Sequence[Any]], Iterable[Any]], items: Sequence[Any]) -> list[Any]:
        """Returns what `work` gives for all items, in their order, each done by one of the processes.

        A single item is done by all, so that its own parts can be divided; parts of a part are not divided again.
        """
        if self.count == 1 or self._inside or len(items) < 2:
            return list(work(items))
        gathered = self._gather(self._alone(lambda: list(work(items[self.number :: self.count]))))
        return [gathered[place % self.count][place // self.count] for place in range(len(items))]

    def first(self, make: Callable[[], Tree]) -> Tree:
        """Returns on all processes what `make` gives on the first, the only one to call it."""
        if self.count == 1:
            return make()
        return self._gather(self._alone(lambda: [make()]) if self.number == 0 else [])[0][0]

    def refuse_differences(self, facts: dict[str, Any], device: torch.device) -> None:
        """Compares what must be the same on all processes.

        Args:
            facts: By what is said of them; each as JSON can say it.
            device: Of the run, one for each process.

        Raises:
            UserError: If one of them differs, or processes share a CUDA device.
        """
        if self.count == 1:
            return
        if device.type == "cuda" and (device.index is not None or self.here > torch.cuda.device_count()):
            raise UserError(
                f"every worker needs a CUDA device of its own (got --device {device}, {self.here} workers and "
                f"{torch.cuda.device_count()} devices on this machine); use --device cuda and fewer workers, or cpu."
            )
        said = self._say(facts)
        for number, other in enumerate(said):
            if differing := [name for name in facts if other[name] != said[0][name]]:
                name = differing[0]
                raise UserError(
                    f"the workers differ in {name} (got {other[name]} on worker {number}, {said[0][name]} on worker "
                    "0); give all of them the same data and the same versions."
                )

    def tell(self, error: BaseException) -> None:
        """Says in the store with what this process fails, unless another one has said so before."""
        if self._store is None or self._told:
            return
        self._told = True  # what is raised further is made of this one
        if isinstance(error, Exception):
            kind = next((name for name, known in PASSED_ON.items() if isinstance(error, known)), type(error).__name__)
            about = {"worker": self.number, "kind": kind, "text": str(error)}
            with suppress(RuntimeError):  # the launcher is dead, and its store with it
                self._store.compare_set(ERROR, "", json.dumps(about))

    def _error(self) -> BaseException:
        """What to raise where the others are no longer reached: the error of the first that failed."""
        try:
            about = json.loads(self._store.get(ERROR)) if self._store.check([ERROR]) else None
        except RuntimeError:
            about = None
        if about is None:
            return Lost("another worker has ended")
        kind = PASSED_ON.get(about["kind"])
        text = f"on worker {about['worker']}, " + ("" if kind else f"{about['kind']}: ") + about["text"]
        return (kind or RuntimeError)(text)

    def _alone(self, work: Callable[[], Any]) -> Any:
        """Calls `work`, in which nothing is divided."""
        self._inside = True
        try:
            return work()
        finally:
            self._inside = False

    def _try(self, collective: Callable[..., Any], *given: Any) -> None:
        """Calls a collective and waits for it, as long as all processes go on: it would not end without them."""
        try:
            work = collective(*given, async_op=True)
            looks = itertools.count(1)
            while not work.is_completed():
                time.sleep(POLL)
                if next(looks) % LOOK == 0 and self._store.check([ERROR]):
                    raise self._error()
            work.wait()
        except RuntimeError as error:
            raise self._error() from error

    def _say(self, what: Any) -> list[Any]:
        """What every process says, by their numbers, as JSON can say it."""
        text = torch.frombuffer(bytearray(json.dumps(what).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        self._try(dist.all_gather, sizes, torch.tensor([len(text)]))
        longest = max(int(size) for size in sizes)
        texts = [text.new_zeros(longest) for _ in range(self.count)]
        self._try(dist.all_gather, texts, torch.cat([text, text.new_zeros(longest - len(text))]))
        pairs = zip(texts, sizes, strict=True)
        return [json.loads(text[: int(size)].numpy().tobytes()) for text, size in pairs]

    def _gather(self, mine: list[Tree]) -> list[list[Tree]]:
        """The trees that every process has made, by their numbers."""
        tensors: list[Tensor] = []
        said = self._say({"trees": [_structure(tree, tensors) for tree in mine], "forms": [*map(_form, tensors)]})
        start = time.perf_counter()
        received = [[None] * len(one["forms"]) for one in said]
        for device in ("cpu", "cuda"):
            places = [_places(one["forms"], device) for one in said]
            buffers = [torch.empty(size, dtype=torch.uint8, device=device) if size else None for _, size in places]
            for at, offset in places[self.number][0].items():
                flat = tensors[at].detach().reshape(-1)
                buffers[self.number][offset : offset + flat.nbytes].view(flat.dtype).copy_(flat)
            for number, buffer in enumerate(buffers):
                if buffer is not None:
                    self._try(dist.broadcast, buffer, number)
            for number, ((offsets, size), buffer) in enumerate(zip(places, buffers, strict=True)):
                self.nbytes += size
                for at, offset in offsets.items() if number != self.number else ():
                    received[number][at] = _copied(buffer, offset, *said[number]["forms"][at])
        self.seconds += time.perf_counter() - start
        return [
            mine if number == self.number else [_tree(tree, received[number]) for tree in one["trees"]]
            for number, one in enumerate(said)
        ]


def _structure(tree: Tree, tensors: list[Tensor]) -> Any:
    """A tree as JSON can say it; its tensors are added to `tensors`, and named by their places there."""
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return {"tensor": len(tensors) - 1}
    if isinstance(tree, dict):
        return {"dict": [[key, _structure(part, tensors)] for key, part in tree.items()]}
    if isinstance(tree, tuple | list):
        parts = [_structure(part, tensors) for part in tree]
        if not hasattr(tree, "_fields"):
            return {type(tree).__name__: parts}
        return {"named": [type(tree).__module__, type(tree).__qualname__, parts]}
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise UserError(
        f"what clients give must be trees of tensors, numbers and texts to be divided among workers (got "
        f"{type(tree).__name__}); use one worker."
    )


def _tree(structure: Any, tensors: Sequence[Tensor]) -> Tree:
    """The tree of a structure."""
    if not isinstance(structure, dict):
        return structure
    [(kind, inside)] = structure.items()
    if kind == "tensor":
        return tensors[inside]
    if kind == "dict":
        return {key: _tree(part, tensors) for key, part in inside}
    if kind == "named":
        module, name, parts = inside
        return operator.attrgetter(name)(sys.modules[module])(*(_tree(part, tensors) for part in parts))
    return {"tuple": tuple, "list": list}[kind](_tree(part, tensors) for part in inside)


def _form(tensor: Tensor) -> tuple[str, list[int], list[int], str]:
    """Type, shape, strides and kind of device; strides too, since the order of a sum may depend on them."""
    strides = torch.empty_like(tensor, device="meta").stride()  # those of a copy: an expanded tensor has others
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(strides), tensor.device.type


def _places(forms: Sequence[Sequence[Any]], device: str) -> tuple[dict[int, int], int]:
    """Where each tensor on a kind of device begins in the flat bytes, by its number; and how many bytes there are."""
    offsets, size = {}, 0
    for at, (dtype, shape, _, kind) in enumerate(forms):
        if kind == device:
            offsets[at] = size
            count = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            size += -(-count // ALIGNED) * ALIGNED
    return offsets, size


def _copied(buffer: Tensor, offset: int, dtype: str, shape: list[int], strides: list[int], device: str) -> Tensor:
    """A tensor out of the flat bytes, in memory of its own."""
    kind = getattr(torch, dtype)
    found = torch.empty_strided(shape, strides, dtype=kind, device=buffer.device)
    return found.copy_(buffer[offset : offset + found.numel() * kind.itemsize].view(kind).view(shape))


_ALONE = Group()
_current = _ALONE


def current() -> Group:
    """The processes of the run that goes on in this one."""
    return _current


def launched() -> bool:
    """Whether PyTorch's launcher has started this process."""
    return dist.is_torchelastic_launched()


@contextmanager
def joined() -> Iterator[Group]:
    """Connects this process with the others that the launcher has started with it; alone where there is none."""
    global _current
    if launched() and _current is _ALONE:
        _current = _connected()
        try:
            with joined() as group:
                yield group
        finally:
            _current = _ALONE
            dist.destroy_process_group()  # closes the connections, which the others see
        return
    try:
        yield _current
    except BaseException as error:
        _current.tell(error)
        raise


def _connected() -> Group:
    """The processes that the launcher has started, once all are there.

    Raises:
        Lost: If they or the launcher cannot be reached. This process ends if not all come.
    """
    here, local = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    own_device = torch.cuda.is_available() and here <= torch.cuda.device_count()
    if own_device:
        torch.cuda.set_device(local)  # which "cuda" stands for from here on
    backend = "cpu:gloo,cuda:nccl" if own_device else "gloo"
    late = threading.Timer(MEETING.total_seconds(), os._exit, [LOST])  # no exception ends a call that waits in C++
    late.daemon = True
    late.start()
    try:
        store, number, count = next(dist.rendezvous("env://", timeout=MEETING))
        restarted = store.add("arrived", 1) > count
        store = dist.PrefixStore(_meet(store, number, count), store)
        dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=PATIENCE)
    except RuntimeError as error:
        first, _, _ = str(error).partition("\n")
        sys.stderr.write(f"worker {os.environ['RANK']} has not reached the others ({first})\n")
        raise Lost("the others were not reached") from error
    finally:
        late.cancel()
    return Group(number, count, here, restarted, store)


def _meet(store: dist.Store, number: int, count: int) -> str:
    """Waits for the other processes of this start; returns a name that they have and no earlier start had.

    The launcher keeps its store when it starts all again, and in it the addresses and errors of those who have ended.
    So every process makes up a name, and all go on when everyone has seen the same names.
    """
    names, seen = ([f"{what} {each}" for each in range(count)] for what in ("name", "seen"))
    store.set(names[number], uuid.uuid4().hex)
    while True:
        if store.check(names):
            mine = b"".join(store.multi_get(names)).decode()
            store.set(seen[number], mine)
            if store.check(seen) and all(other.decode() == mine for other in store.multi_get(seen)):
                return mine
        time.sleep(POLL * LOOK)


def launch(work: Callable[..., int], *given: Any, count: int, restarts: int = RESTARTS) -> int:
    """Starts processes on this machine, all of them again when one is killed, and waits for them.

    What interrupts this process interrupts them, and they end with it.

    Args:
        work: What each does, connected with the others; it returns its exit code.
        *given: To `work`.
        count: Of the processes.
        restarts: Of all of them, after which they are given up.

    Returns:
        The exit code of the first.

    Raises:
        UserError: If they have died more often.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for quiet in map(logging.getLogger, ("torch.distributed.elastic", "torch.multiprocessing")):
        quiet.addHandler(logging.NullHandler())
        quiet.propagate = False
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    heard = [number.name for number, handler in handlers.items() if handler is not signal.SIG_IGN]  # not under `nohup`
    imported = [name for name in sys.modules if name.partition(".")[0] == __name__.partition(".")[0]]
    multiprocessing.set_forkserver_preload(imported)  # once for all processes, also when they are started again
    with tempfile.TemporaryDirectory() as logs:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=count, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
            rdzv_endpoint="localhost:0", local_addr="localhost", start_method="forkserver", max_restarts=restarts,
            signals_to_handle=",".join(heard), logs_specs=DefaultLogsSpecs(log_dir=logs),
        )  # fmt: skip
        try:
            return elastic_launch(config, _work)(work, *given)[0]
        except SignalException as error:
            for process in multiprocessing.active_children():  # of a start that the signal has cut short
                process.terminate()
            return 128 + error.sigval
        except ChildFailedError as error:
            number, failure = min(  # the first, but rather the one that the others have lost
                error.failures.items(), key=lambda one: (one[1].exitcode == LOST, one[1].timestamp)
            )
            raise UserError(
                f"workers died {restarts + 1} times (got exit code {failure.exitcode} of worker {number}; a signal's "
                f"is negative, {LOST} is that of one that has lost another); look for what kills them, then resume the "
                "run."
            ) from error
        finally:
            for number, handler in handlers.items():  # the launcher has put its own in their place
                signal.signal(number, handler)


def _work(work: Callable[..., int], *given: Any) -> int:
    """What each process does. Only a run that has ended, well or with an error, is not to be started again."""
    os.setsid()  # Ctrl-C comes from the launcher, once
    end_with_parent(multiprocessing.parent_process().sentinel)
    try:
        with joined():
            return work(*given)
    except KeyboardInterrupt as error:
        sys.exit(exit_code(error))  # the launcher takes an interruption for a good end, and waits for a result
    except Exception:
        traceback.print_exc()  # raised further, it would start all again
        return 1
