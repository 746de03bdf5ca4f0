"""A fake CUDA device: its values are computed on the CPU, under the rules of CUDA.

The product runs on it unchanged, with `device="cuda"`. What CUDA refuses, raises here as it does in PyTorch; what CUDA
leaves undefined, raises or gives NaN.

* Operands lie on one device. Numbers of the host, and indices, may come along.
* What makes Python wait for the device is counted, and ends a capture.
* A capture does nothing but keep its operations, and a replay does them on the same memory. Memory that was allocated
  in the capture holds NaN before and after a replay. Memory from outside must still belong to somebody.
* A stream may touch memory only after it waits for what others do with it, and a capture ends with all branches joined.
* A pool of memory takes no capture after one that has failed, or after its last graph has gone.

It cannot see what the libraries of CUDA do: how a convolution rounds, how fast it is, how much memory there is.
"""

import ctypes
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

import fedcli

NAME = "fake_cuda"
DEVICE = f"{NAME}:0"
BYTES_FREE = 2**36
BYTES_IN_ALL = 2**37
PRODUCT = (Path(fedcli.__file__).parent, Path(__file__).parent.parent / "papers")  # the folders of its files
aten = torch.ops.aten

COPIES = {aten._to_copy, aten.copy_}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
# Their results, or the shapes of these, are values that Python needs.
WAITING = {
    aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten.bincount, aten._unique2,
    aten.repeat_interleave, aten._linalg_svd, aten._linalg_eigh, aten.linalg_qr, aten.linalg_cholesky_ex,
}  # fmt: skip
# Operations that PyTorch warns of, at least with some options, as their forms on CUDA give other bits each time.
UNREPEATABLE = {
    aten.histc, aten.kthvalue, aten.median, aten.put_, aten.scatter_reduce, aten.scatter_reduce_,
    aten._adaptive_avg_pool2d_backward, aten.adaptive_max_pool2d_backward, aten.grid_sampler_2d_backward,
    aten.nll_loss2d_forward, aten.reflection_pad2d_backward, aten.replication_pad2d_backward,
    aten.upsample_bilinear2d_backward, aten.upsample_bicubic2d_backward, aten.upsample_linear1d_backward,
}  # fmt: skip
# Operations that launch no kernel, as views launch none.
WITHOUT_KERNEL = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.detach,
    aten.lift_fresh, aten.alias,
}  # fmt: skip
# The operations of networks that autocast does in half precision.
HALF_PRECISION = ("conv2d", "linear", "matmul", "mm", "bmm", "addmm", "baddbmm")

FAILED_CAPTURE = "operation failed due to a previous error during capture"


class RaceError(RuntimeError):
    """The error that a stream touches memory which another one may still read or write."""


class FakeCudaTensor(torch.Tensor):
    """A tensor on the device; `host` holds its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: torch.Tensor):
        self = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            device=DEVICE,
        )  # fmt: skip
        self.host = host
        return self

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return FakeCuda.active.do(function, args, kwargs or {})

    def tolist(self):
        return self.cpu().tolist()


def to_host(tree: Any) -> Any:
    """Returns a tree of any kind that PyTorch knows, with copies on the host of its tensors on the device."""
    return pytree.tree_map(lambda leaf: leaf.host.clone() if isinstance(leaf, FakeCudaTensor) else leaf, tree)


def operand_leaves(tree: Any) -> list:
    """Returns the leaves of the operands or results of an operation.

    It knows only the lists, tuples and dictionaries that these are, and is several times as fast as PyTorch's own.
    """
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return [tree]
    leaves = []
    for part in tree:
        leaves += operand_leaves(part)
    return leaves


def map_operands(function: Callable[[Any], Any], tree: Any) -> Any:
    """Returns operands or results with `function(leaf)` in the place of each leaf, likewise."""
    if isinstance(tree, tuple | list):
        return type(tree)([map_operands(function, part) for part in tree])
    if isinstance(tree, dict):
        return {key: map_operands(function, part) for key, part in tree.items()}
    return function(tree)


def is_device(value: Any) -> bool:
    """Returns whether a value is a `torch.device` of CUDA or the fake device itself."""
    return isinstance(value, torch.device) and value.type in ("cuda", NAME)


def tensors_with_memory(tree: Any) -> list[torch.Tensor]:
    """Returns the tensors of a tree whose memory is not empty, of those on the device their values on the host."""
    tensors = []
    for leaf in operand_leaves(tree):
        tensor = leaf.host if isinstance(leaf, FakeCudaTensor) else leaf
        if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes():
            tensors.append(tensor)
    return tensors


def storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    """Returns the memory of a tree's tensors, by address."""
    by_address = {}
    for tensor in tensors_with_memory(tree):
        storage = tensor.untyped_storage()
        by_address[storage.data_ptr()] = storage
    return by_address


class Span(NamedTuple):
    """The bytes of a tensor, from the first to the last, in the memory of an address."""

    address: int
    start: int
    end: int

    def overlaps(self, other: "Span") -> bool:
        """Returns whether another span of the same memory has bytes of this one."""
        return other.start < self.end and self.start < other.end

    def covers(self, other: "Span") -> bool:
        """Returns whether all bytes of another span of the same memory are of this one."""
        return self.start <= other.start and other.end <= self.end


def spans(tree: Any) -> set[Span]:
    """Returns the spans in which the tensors of a tree lie."""
    all_spans = set()
    for tensor in tensors_with_memory(tree):
        if tensor.numel():
            address = tensor.untyped_storage().data_ptr()
            extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.storage_offset() * tensor.itemsize
            all_spans.add(Span(address, start, start + extent * tensor.itemsize))
    return all_spans


def whole_spans(memory: dict[int, torch.UntypedStorage]) -> set[Span]:
    """Returns the spans of all bytes of some memory."""
    return {Span(address, 0, storage.nbytes()) for address, storage in memory.items()}


def count_holders(storage: torch.UntypedStorage) -> int:
    """Returns how many tensors of the host hold this memory."""
    return torch._C._storage_Use_Count(storage._cdata)


class DeviceRenaming(TorchFunctionMode):
    """Puts the device into all calls of PyTorch that name "cuda"."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.device:
            return function(*args, **kwargs)
        args = [self.rename(value) for value in args]
        kwargs = {name: self.rename(value) for name, value in kwargs.items()}
        if function is torch.Tensor.pin_memory:
            return self.pin(*args)
        if function is torch.Tensor.new_tensor and isinstance(args[0], FakeCudaTensor):
            like = args[0]
            args = args[1:]
            function = torch.tensor
            kwargs = {"dtype": like.dtype, "device": like.device, **kwargs}
        if function in (torch.tensor, torch.as_tensor) and is_device(kwargs.get("device")):
            return self.make_on_device(function, args, kwargs)
        return function(*args, **kwargs)

    @staticmethod
    def pin(tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy that counts as pinned memory."""
        copy = tensor.clone()
        copy.is_in_pinned_memory = True
        return copy

    @staticmethod
    def make_on_device(make: Callable, args: list, kwargs: dict[str, Any]) -> torch.Tensor:
        """Returns a tensor of given values, which PyTorch would copy to the device past all modes."""
        return make(*args, **{**kwargs, "device": None}).to(DEVICE)

    @staticmethod
    def rename(value: Any) -> Any:
        """Returns the device for a value that means CUDA, and other values as they are."""
        is_cuda = is_device(value) or (isinstance(value, str) and value in ("cuda", "cuda:0"))
        return torch.device(NAME, 0) if is_cuda else value


class Stream:
    """A queue of operations; `seen` counts those of each stream that are done before the next one of this stream."""

    def __init__(self):
        self.seen = Counter({self: 0})

    def wait_stream(self, other: "Stream") -> None:
        """Makes this stream begin its next operation only after all that the other one has now."""
        self.seen |= other.seen

    def next_operation(self) -> "StreamPosition":
        self.seen[self] += 1
        return StreamPosition(self, self.seen[self])


class StreamPosition(NamedTuple):
    """An operation, by how many its stream has had with it."""

    stream: Stream
    count: int


@dataclass(frozen=True)
class Uses:
    """The last operations on some memory: the one that wrote it, and those that have read it since."""

    write: StreamPosition
    reads: dict[Stream, int] = field(default_factory=dict)


class RaceDetector:
    """Streams, and what their operations have last read and written; it refuses an operation that races another.

    Attributes:
        main: The stream that a program begins on.
        stream: The current one.
    """

    def __init__(self):
        self.main = Stream()
        self.stream = self.main
        self.streams = [self.main]
        self.uses: dict[int, dict[Span, Uses]] = {}  # by address

    def add_stream(self) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def join_all(self) -> None:
        """Makes each stream wait for all others."""
        for stream in self.streams:
            self.main.wait_stream(stream)
        for stream in self.streams:
            stream.wait_stream(self.main)

    def has_seen_all(self, stream: Stream) -> bool:
        """Returns whether a stream has waited for all operations of all streams."""
        return all(stream.seen[branch] >= branch.seen[branch] for branch in self.streams)

    def copy_uses(self) -> dict[int, dict[Span, Uses]]:
        return {address: dict(of_spans) for address, of_spans in self.uses.items()}

    def allocate(self, memory: dict[int, torch.UntypedStorage]) -> None:
        """Writes memory that nobody has used before."""
        for span in whole_spans(memory):
            self.uses[span.address] = {span: Uses(self.stream.next_operation())}

    def touch(self, memory: set[Span], write: bool) -> None:
        """Reads or writes memory on the current stream."""
        for span in memory:
            earlier = self.uses.setdefault(span.address, {})
            for other, uses in earlier.items():
                if span.overlaps(other):
                    self._refuse_race(uses, write)
            position = self.stream.next_operation()
            if write:
                covered = [other for other in earlier if span.covers(other)]
                for other in covered:
                    del earlier[other]
                earlier[span] = Uses(position)
            else:
                uses = earlier.get(span, Uses(StreamPosition(self.main, 0)))
                earlier[span] = Uses(uses.write, uses.reads | {position.stream: position.count})

    def _refuse_race(self, uses: Uses, write: bool) -> None:
        before = [uses.write]
        if write:
            before += uses.reads.items()
        if any(self.stream.seen[stream] < count for stream, count in before):
            raise RaceError("a stream does not wait for another one")


class Pool:
    """Memory that graphs share; it takes no capture after one that has failed, or after its last graph has gone."""

    def __init__(self):
        self.graphs = weakref.WeakSet()
        self.was_used = False
        self.is_recording = False

    def begin(self) -> None:
        if self.is_recording:  # of a capture that has failed, which PyTorch never takes back
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        if self.was_used and not self.graphs:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.was_used = True
        self.is_recording = True


class Operation(NamedTuple):
    """A call of PyTorch with values on the host, and what it gave."""

    function: Callable
    args: tuple
    kwargs: dict
    results: Any


class Graph:
    """Operations that a replay does again."""

    def __init__(self):
        self.operations: list[Operation] = []
        self.inside: dict[int, torch.UntypedStorage] = {}  # memory that was allocated in the capture
        self.outside: dict[int, torch.UntypedStorage] = {}
        self.held: Counter = Counter()  # tensors that the operations hold, by the address of their memory
        self.error: str | None = None

    def keep(self, operation: Operation, read: dict, fresh: dict) -> None:
        """Takes an operation into the capture.

        Args:
            operation: With its values on the host.
            read: The memory that it was given.
            fresh: The memory that was allocated for its results.
        """
        self.inside |= fresh
        of_device = read.keys() | fresh.keys()

        def hold(leaf: Any) -> Any:
            """Returns another tensor of the same memory, or of a number of the host its value now."""
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return leaf.detach() if storages(leaf).keys() <= of_device else leaf.clone()

        args, kwargs, results = map_operands(hold, (operation.args, operation.kwargs, operation.results))
        self.operations.append(Operation(operation.function, args, kwargs, results))

    def close(self) -> None:
        """Ends the capture."""
        tensors = {}
        for operation in self.operations:
            for leaf in operand_leaves((operation.args, operation.kwargs, operation.results)):
                if isinstance(leaf, torch.Tensor):
                    tensors[id(leaf)] = leaf
        self.held = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
        self.poison()

    def poison(self) -> None:
        """Makes the graph's own memory NaN, which another graph of the pool may have used meanwhile."""
        for storage in self.inside.values():
            ctypes.memset(storage.data_ptr(), 255, storage.nbytes())

    def replay(self) -> None:
        """Does the operations again, on the same memory."""
        device = FakeCuda.active
        for address, storage in self.outside.items():
            by_graphs = sum(graph.held[address] for graph in device.graphs)
            if count_holders(storage) <= by_graphs + 1:  # `outside` is one more
                raise RuntimeError("a graph reads or writes memory that has been freed")
        device.races.touch(whole_spans(self.outside), write=True)
        device.launches += 1
        device.replays += 1
        self.poison()
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            for operation in self.operations:
                again = operation.function(*operation.args, **operation.kwargs)
                for old, new in zip(operand_leaves(operation.results), operand_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and not storages(old).keys() & storages(new).keys():
                        old.copy_(new)
        self.poison()


def fused_sgd(
    params, grads, momenta, *, weight_decay, momentum, lr, dampening, nesterov, maximize, is_first_step,
    grad_scale=None, found_inf=None,
) -> None:  # fmt: skip
    """The fused SGD of CUDA by the formulas of `fedcli.core.optimizers.sgd`, so that it rounds as these do."""
    lists = [params, grads]
    if momentum:
        lists.append(momenta)
    for tensors in zip(*lists, strict=True):
        if len({tensor.stride() for tensor in tensors}) > 1 or not all(map(is_dense, tensors)):
            raise RuntimeError("params, grads and momenta must have the same dtype, device, strides, and be dense")
    if lr.dtype != torch.float32 or (found_inf is not None and found_inf.dtype != torch.float32):
        raise RuntimeError("expected scalar type Float")  # its kernel reads both as such, whatever the parameters are
    if dampening or nesterov or maximize or is_first_step or grad_scale is not None:
        raise NotImplementedError("not used by the product")
    if found_inf is not None and found_inf == 1:
        return
    for number, (value, direction) in enumerate(zip(params, grads, strict=True)):
        if weight_decay:
            direction = torch.add(direction, value, alpha=weight_decay)
        if momentum:
            direction = torch.add(direction, momenta[number], alpha=momentum, out=momenta[number])
        torch.addcmul(value, direction, lr, value=-1, out=value)


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor fills its memory without gaps, in some order of its axes."""
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(by_stride).is_contiguous()


@cache
def gives_view(function: torch._ops.OpOverload) -> bool:
    """Returns whether an operation gives a view of what it is given."""
    aliases = [result.alias_info for result in function._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


@cache
def positions_to_write(function: torch._ops.OpOverload) -> dict[str, int]:
    """Returns the positions of the arguments that an operation writes into, by their names."""
    positions = {}
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info and argument.alias_info.is_write:
            positions[argument.name] = position
    return positions


def wrap_results(results: Any, given: dict[int, FakeCudaTensor]) -> Any:
    """Returns the results of an operation as tensors on the device.

    Args:
        results: A tree with values on the host.
        given: What the operation was given, by `id` of its values; an operation in place returns what it was given.
    """

    def wrap(leaf: Any) -> Any:
        if id(leaf) in given:
            return given[id(leaf)]
        return FakeCudaTensor(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return map_operands(wrap, results)


# Operations that the device does in a form of its own.
OWN_KERNELS = {aten._fused_sgd_: fused_sgd}


class FakeCuda(TorchDispatchMode):
    """The device while it is in use.

    Attributes:
        waits: How often Python has waited, by line of the product and by reason.
        launches: Kernels started; a replay is one.
        captures: Graphs made.
        replays: Of graphs.
        draws: Random draws from the device's generator.
        unrepeatable: Operations without a form that gives the same bits each time.
    """

    active: "FakeCuda | None" = None  # the device that is in the place of CUDA now

    def __init__(self):
        super().__init__()
        self.races = RaceDetector()
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.waits = Counter()
        self.unrepeatable = Counter()
        self.launches = 0
        self.captures = 0
        self.replays = 0
        self.draws = 0
        self._graph: Graph | None = None  # that is being captured
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # what it has written over

    # One operation

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self.do(function, args, kwargs or {})

    def do(self, function, args, kwargs):
        """Does an operation; one without a tensor or device of ours is the host's alone."""
        given = {id(leaf.host): leaf for leaf in operand_leaves((args, kwargs)) if isinstance(leaf, FakeCudaTensor)}
        target = kwargs.get("device")
        if not given and not is_device(target):
            return function(*args, **kwargs)
        self._refuse_mixed_devices(function, args, kwargs, target)
        self._notice(function, kwargs)

        read = storages([*given.values()])
        args, kwargs = map_operands(self._as_host, (args, kwargs))
        to_write = self._arguments_to_write(function, args, kwargs)
        is_view = gives_view(function)
        if not is_view:
            self._touch_operands([*given.values()], to_write)
        if self._graph is not None:
            self._remember(read, storages(to_write))
        elif not is_view and function.overloadpacket not in WITHOUT_KERNEL:
            self.launches += 1

        function = OWN_KERNELS.get(function.overloadpacket, function)
        results = function(*args, **kwargs)
        fresh = {address: storage for address, storage in storages(results).items() if address not in read}
        self.races.allocate(fresh)

        is_copied_to_host = target is not None and not is_device(target)
        if is_copied_to_host:
            return results
        if self._graph is not None:
            self._graph.keep(Operation(function, args, kwargs, results), read, fresh)
        return wrap_results(results, given)

    def _touch_operands(self, given: list[FakeCudaTensor], to_write: list) -> None:
        """Reads, on the current stream, what an operation is given and does not write, and writes the rest."""
        spans_to_write = spans(to_write)
        self.races.touch(spans(given) - spans_to_write, write=False)
        self.races.touch(spans_to_write, write=True)

    @staticmethod
    def _as_host(leaf: Any) -> Any:
        if isinstance(leaf, FakeCudaTensor):
            return leaf.host
        return torch.device("cpu") if is_device(leaf) else leaf

    @staticmethod
    def _arguments_to_write(function, args, kwargs) -> list:
        """Returns the arguments that an operation writes into."""
        positions = positions_to_write(function)
        arguments = []
        for name, position in positions.items():
            is_positional = position < len(args)
            arguments.append(args[position] if is_positional else kwargs.get(name))
        return arguments

    def _refuse_mixed_devices(self, function, args, kwargs, target) -> None:
        """Refuses tensors of the host where CUDA does, and waits where it lets Python wait."""
        kind = function.overloadpacket
        tensors = [leaf for leaf in operand_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        of_host = [tensor for tensor in tensors if not isinstance(tensor, FakeCudaTensor)]
        if kind in COPIES:
            to_host = target is not None and not is_device(target)
            to_host |= kind is aten.copy_ and not isinstance(args[0], FakeCudaTensor)
            self._wait_for_copy(kind, args, kwargs, of_host, to_host)
            return
        if kind in WAITING:
            self.wait(str(kind))
        if kind in INDEXING:
            indices = self._wait_for_indices(kind, args)
            of_host = [tensor for tensor in of_host if id(tensor) not in indices]
        takes_numbers = torch.Tag.pointwise in function.tags
        if any(tensor.dim() or not takes_numbers for tensor in of_host):
            raise RuntimeError(f"Expected all tensors to be on the same device, in {function}")

    def _wait_for_indices(self, kind, args) -> set[int]:
        """Waits for indices that CUDA must count, or copy from the host; returns the `id` of each index."""
        indices = [index for index in args[1] if index is not None]
        if any(index.dtype == torch.bool or not isinstance(index, FakeCudaTensor) for index in indices):
            self.wait(str(kind))
        return {id(index) for index in indices}

    def _wait_for_copy(self, kind, args, kwargs, of_host, to_host: bool) -> None:
        """Waits for a copy between device and host, unless it goes from pinned memory and nobody is to wait."""
        is_within_device = not to_host and not of_host
        if is_within_device:
            return
        non_blocking = kwargs.get("non_blocking", False)
        if kind is aten.copy_ and len(args) > 2:
            non_blocking = args[2]
        if non_blocking and to_host:
            raise RuntimeError("a copy to the host that nobody waits for is read too early")
        is_pinned = all(getattr(tensor, "is_in_pinned_memory", False) for tensor in of_host)
        if not non_blocking or not is_pinned:
            self.wait(str(kind))

    def _notice(self, function, kwargs) -> None:
        """Counts draws, and operations that may give other bits the next time, whatever the type of their tensors."""
        if torch.Tag.nondeterministic_seeded in function.tags and kwargs.get("generator") is None:
            self.draws += 1
        if function.overloadpacket in UNREPEATABLE:
            self.unrepeatable[f"{function.overloadpacket} in {line_of_product()}"] += 1

    def wait(self, why: str) -> None:
        """Counts that Python waits for the device, and ends a capture that is under way."""
        where = line_of_product()
        self.waits[where, why] += 1
        if self._graph is not None:
            self._graph.error = f"operation not permitted when stream is capturing: {why} in {where}"
            raise RuntimeError(self._graph.error)

    # Streams and graphs

    def synchronize(self, device: Any = None) -> None:
        self.wait("synchronize")
        self.races.join_all()

    def new_stream(self, device: Any = None) -> Stream:
        return self.races.add_stream()

    def current_stream(self, device: Any = None) -> Stream:
        return self.races.stream

    def set_stream(self, stream: Stream) -> None:
        self.races.stream = stream

    @contextmanager
    def use_stream(self, stream: Stream) -> Iterator[None]:
        before = self.races.stream
        self.races.stream = stream
        try:
            yield
        finally:
            self.races.stream = before

    def _remember(self, read, written) -> None:
        """Keeps what a capture reads from outside, and the values that it only seems to write over."""
        graph = self._graph
        graph.outside |= {address: storage for address, storage in read.items() if address not in graph.inside}
        for address in written.keys() - graph.inside.keys() - self._before.keys():
            storage = written[address]
            self._before[address] = (storage, storage.clone())

    @contextmanager
    def capture(self, graph: Graph, pool: Pool, stream: Stream) -> Iterator[None]:
        """Captures what is done inside, in the place of `torch.cuda.graph`."""
        if self._graph is not None:
            raise RuntimeError("a capture is under way")
        self.races.join_all()
        pool.begin()
        stream_before = self.races.stream
        uses_before = self.races.copy_uses()
        self.races.stream = stream
        self._graph = graph
        self._before = {}
        try:
            yield
        except BaseException as error:
            self._end_capture(uses_before)
            if graph.error is None:
                raise
            raise RuntimeError(FAILED_CAPTURE) from error  # and the current stream stays that of the capture
        self._end_capture(uses_before)
        if not self.races.has_seen_all(stream):
            graph.error = "capturing stream has unjoined work"
        if graph.error is not None:
            raise RuntimeError(FAILED_CAPTURE)
        pool.is_recording = False
        pool.graphs.add(graph)
        self.graphs.add(graph)
        self.races.stream = stream_before
        self.captures += 1
        graph.close()

    def _end_capture(self, uses: dict[int, dict[Span, Uses]]) -> None:
        """Takes back what a capture only seems to have done."""
        self._graph = None
        self.races.uses = uses
        for storage, value in self._before.values():
            storage.copy_(value)

    # The device in the place of torch.cuda

    def rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.tensor([self.draws])

    def replacements(self) -> dict[str, Any]:
        """Returns what takes the place of functions and classes of `torch.cuda`, by name."""
        return {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_device_name": lambda device: NAME,
            "current_device": lambda: 0,
            "_lazy_init": lambda: None,
            "Stream": self.new_stream,
            "stream": self.use_stream,
            "set_stream": self.set_stream,
            "current_stream": self.current_stream,
            "synchronize": self.synchronize,
            "graph": self.capture,
            "CUDAGraph": Graph,
            "graph_pool_handle": Pool,
            "mem_get_info": lambda device: (BYTES_FREE, BYTES_IN_ALL),
            "max_memory_allocated": lambda device: 0,
            "reset_peak_memory_stats": lambda device=None: None,
            "empty_cache": lambda: None,
            "get_rng_state": self.rng_state,
        }

    @classmethod
    @contextmanager
    def running(cls) -> Iterator["FakeCuda"]:
        """Puts a new device in the place of CUDA."""
        register()
        cls.active = device = cls()
        with ExitStack() as stack:
            stack.callback(setattr, cls, "active", None)
            for name, function in device.replacements().items():
                stack.enter_context(patch.object(torch.cuda, name, function))
            stack.enter_context(DeviceRenaming())
            stack.enter_context(device)
            yield device


def line_of_product() -> str:
    """Returns the file and line of `fedcli` or of a paper that is being executed."""
    frame = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if any(file.is_relative_to(folder) for folder in PRODUCT):
            return f"{file.name}:{frame.f_lineno}"
        frame = frame.f_back
    return "the test"


# The device as a backend of PyTorch, which a process can take on once


class FakeCudaModule(backend_registration._DummyBackendModule):
    """The device's module `torch.fake_cuda`."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def synchronize(self, device: Any = None) -> None:
        FakeCuda.active.synchronize()


def register() -> None:
    """Makes the device known to PyTorch, with what autocast does on it."""
    if torch._C._get_privateuse1_backend_name() == NAME:
        return
    backend_registration._setup_privateuseone_for_python_backend(NAME, FakeCudaModule())
    library = torch.library.Library("aten", "IMPL")
    without = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def in_half(function: Callable) -> Callable:
        def run(*args, **kwargs):
            args, kwargs = map_operands(halved, (args, kwargs))
            with torch._C._ExcludeDispatchKeyGuard(without):
                return function(*args, **kwargs)

        return run

    def halved(leaf: Any) -> Any:
        return leaf.to(torch.bfloat16) if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32 else leaf

    for name in HALF_PRECISION:
        library.impl(name, in_half(getattr(aten, name).default), "AutocastPrivateUse1")
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    register.libraries = (library, others)  # what they have registered lives as long as they do
