"""The processes that divide the work of one run: how they start, share what they make, and end together.

PyTorch's launcher starts them, by `torchrun` or for `--workers`. Each runs the whole program and makes the same draws,
so that each has the same state; only work with parts is divided, by `Group.share`. What a part gives goes to all as
bytes, over gloo or, on CUDA, NCCL; its structure goes before, in JSON. The first process alone writes and prints.

No end of one process leaves another waiting. One that fails sends its error where the others expect a message, so that
all fail with it. One that dies closes its connections: the others lose it and end too.
"""

import json
import logging
import operator
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedcli.core.federation import NonFiniteLoss
from fedcli.core.trees import Tree, from_names, to_names
from fedcli.errors import UserError

LOST = 75  # exit code of a process that no longer reaches the others
PATIENCE = timedelta(days=30)  # to wait for the others, who may train a large chunk
ERRORS = {kind.__name__: kind for kind in (UserError, NonFiniteLoss)}  # that stay what they are on the other processes


class Lost(KeyboardInterrupt):
    """Another process of the run has died, so that this one cannot go on."""

    code = LOST


class Group:
    """The processes of a run as this one sees them; by default it is alone.

    Attributes:
        number: Of this process, from 0; 0 writes.
        count: Of all processes.
        here: Of those on this machine.
        restarted: Whether the launcher has started them before for this run.
    """

    def __init__(self, number: int = 0, count: int = 1, here: int = 1, restarted: bool = False):
        self.number, self.count, self.here, self.restarted = number, count, here, restarted
        self._inside, self._told, self._ended = False, False, False

    def share(self, work: Callable[[Sequence[Any]], Iterable[Any]], items: Sequence[Any]) -> list[Any]:
        """Returns what `work` gives for all items, in their order, each done by one of the processes.

        A single item is done by all, so that its own parts can be divided; parts of a part are not divided again.
        """
        if self.count == 1 or self._inside or len(items) < 2:
            return list(work(items))
        gathered = self._gather(self._alone(lambda: list(work(items[self.number :: self.count]))))
        return [gathered[index % self.count][index // self.count] for index in range(len(items))]

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
        first, *others = self._exchange(facts)
        for number, other in enumerate(others, start=1):
            if differing := [name for name in facts if other[name] != first[name]]:
                name = differing[0]
                raise UserError(
                    f"the workers differ in {name} (got {other[name]} on worker {number}, {first[name]} on worker "
                    "0); give all of them the same data and the same versions."
                )

    def end(self, error: BaseException) -> None:
        """Ends all processes with an error of this one, unless it is that of another, which all know of.

        The first process raises it further and says it for all; the others end here, so that the launcher waits for
        the first. An interruption is not told: this process ends, and the others lose it.
        """
        again, self._ended = self._ended, True  # what is raised after an error is made of it
        if again or not isinstance(error, Exception):
            return
        if not self._told:
            kind = next((name for name, kind in ERRORS.items() if isinstance(error, kind)), type(error).__name__)
            with suppress(Exception):
                self._exchange({}, [kind, str(error)])
        if self.number > 0:
            sys.exit()

    def _alone(self, work: Callable[[], Any]) -> Any:
        """Calls `work`, in which nothing is divided."""
        self._inside = True
        try:
            return work()
        finally:
            self._inside = False

    def _exchange(self, message: Any, error: Sequence[str] | None = None) -> list[Any]:
        """Sends all processes a message, in JSON, and returns everyone's, by their numbers.

        Raises:
            Exception: The error, a kind and a text, that a process has sent with its message.
            Lost: If a process has died.
        """
        text = json.dumps([message, error]).encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        with _losing():
            dist.all_gather(sizes, torch.tensor([len(text)]))
        texts = self._broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8), [int(size) for size in sizes])
        pairs = [json.loads(text.numpy().tobytes()) for text in texts]
        for number, (_, error) in enumerate(pairs):
            if error is not None:
                self._told = True
                kind, text = error
                text = text if kind in ERRORS else f"{kind}: {text}"
                raise ERRORS.get(kind, RuntimeError)(f"on worker {number}, {text}")
        return [message for message, _ in pairs]

    def _broadcast(self, mine: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Returns the vectors of bytes of all processes, whose sizes are known, on the device of `mine`."""
        vectors = [mine if number == self.number else mine.new_empty(size) for number, size in enumerate(sizes)]
        with _losing():
            for number, vector in enumerate(vectors):
                if len(vector):
                    dist.broadcast(vector, number)
        return vectors

    def _gather(self, mine: list[Tree]) -> list[list[Tree]]:
        """The trees that every process has made, by their numbers."""
        structure, tensors = to_names(mine, _type_name)
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}  # without gaps between elements
        messages = self._exchange({"structure": structure, "forms": {name: _form(copies[name]) for name in copies}})
        self._ended = True  # from here on the others expect bytes, and no word of an error
        gathered = [{name: _empty(*form) for name, form in message["forms"].items()} for message in messages]
        gathered[self.number] = copies
        on_cuda = any(tensor.is_cuda for parts in gathered for tensor in parts.values())
        nothing = torch.empty(0, dtype=torch.uint8, device="cuda" if on_cuda else "cpu")
        vector = torch.cat([nothing, *(_bytes(copy).to(nothing.device) for copy in copies.values())])
        sizes = [[tensor.nbytes for tensor in parts.values()] for parts in gathered]
        vectors = self._broadcast(vector, [sum(parts) for parts in sizes])
        for number, parts in enumerate(gathered):
            for tensor, received in zip(parts.values(), vectors[number].split(sizes[number]), strict=True):
                _bytes(tensor).copy_(received)
        self._ended = False
        pairs = zip(messages, gathered, strict=True)
        return [from_names(message["structure"], parts, _Types()) for message, parts in pairs]


class _Types(dict):
    """The NamedTuple classes of all modules by the names that `_type_name` gives them."""

    def __missing__(self, name: str) -> type:
        module, _, path = name.partition(":")
        return operator.attrgetter(path)(sys.modules[module])


def _type_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _form(tensor: Tensor) -> tuple[str, list[int], list[int], str]:
    """Type, shape, strides and kind of device; strides too, since the order of a sum may depend on them."""
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(tensor.stride()), tensor.device.type


def _empty(dtype: str, shape: list[int], strides: list[int], device: str) -> Tensor:
    """A tensor of a form."""
    return torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device=device)


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor as a vector of bytes, which shares it."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@contextmanager
def _losing() -> Iterator[None]:
    """Turns the failure of a collective into the loss of another process."""
    try:
        yield
    except RuntimeError as error:
        raise Lost("another worker has died") from error


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
    """Connects this process with the others that the launcher has started with it; alone where there is none.

    An error inside ends all of them.
    """
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
        if _current.count > 1:
            _current.end(error)
        raise


def _connected() -> Group:
    """The processes that the launcher has started, once all are there."""
    here, local = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    own_device = torch.cuda.is_available() and here <= torch.cuda.device_count()
    if own_device:
        torch.cuda.set_device(local)  # which "cuda" stands for from here on
    _end_with_launcher()
    starts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    store, number, count = next(dist.rendezvous("env://"))
    if os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":
        store = dist.PrefixStore(starts, store)  # the launcher's, which has the addresses of earlier starts too
    backend = "cpu:gloo,cuda:nccl" if own_device else "gloo"
    dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=PATIENCE)
    return Group(number, count, here, restarted=starts != "0")


def _end_with_launcher() -> None:
    """Lets this process end, as by SIGTERM, once the launcher is dead, which may not have ended it."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def launch(count: int, command: Sequence[str]) -> int:
    """Starts a command so many times on this machine by PyTorch's launcher, and waits for the end of all.

    What interrupts this process interrupts them.

    Returns:
        The exit code of the first process, which has said why it ended, or that of an interruption.

    Raises:
        UserError: If one of them has died.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.disable()  # the launcher's pages on a process that has failed
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # as of one process; the launcher sets 1
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    handled = [number.name for number in signals if signal.getsignal(number) is not signal.SIG_IGN]  # as by `nohup`
    options = ["--standalone", "--local-addr", "localhost", "--nproc-per-node", str(count)]
    try:
        run(parse_args([*options, "--signals-to-handle", ",".join(handled), "--no-python", *command]))
        return 0
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        # The first that failed, but rather the one that the others have lost.
        number, failure = min(error.failures.items(), key=lambda item: (item[1].exitcode == LOST, item[1].timestamp))
        if number == 0 and failure.exitcode > 0 and failure.exitcode != LOST:
            return failure.exitcode
        how = f"exit code {failure.exitcode}" if failure.exitcode > 0 else failure.signal_name()
        raise UserError(
            f"worker {number} has died (got {how}); look for what has ended it, then go on with 'fedcli resume'."
        ) from error
