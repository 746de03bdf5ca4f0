"""Kernels, bytes and operations of a joint step, counted without a GPU, and their time by a model of an H100.

A joint step is a local step of each of a round's clients, as a CUDA graph holds it. It is taken on PyTorch's meta
device, whose tensors have shapes and no values, by FedAvg with full batches, of which each client has two. Each
operation is a kernel, except views. Its bytes are those of the tensors that it reads and writes; of an index that of
what it selects. The model of an H100 gives a kernel the largest of the time to start it in a graph, to move its bytes
and to do its floating-point operations at a share of the peak rate that large layers reach. It orders ways of doing the
same; it is no measurement.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fedcli.bench.measure import prepare_workload, with_random_images
from fedcli.core.clients import plain_loss
from fedcli.core.graphs import Work
from fedcli.core.trees import tree_map
from fedcli.runs.prepare import prepare

aten = torch.ops.aten
# They start no kernel, as views do not.
FREE = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.detach, aten._unsafe_view}
SELECTIONS = {aten.index, aten.index_select, aten.gather}

START_SECONDS = 1.5e-6  # of a kernel in a graph
BYTES_A_SECOND = 3.0e12
FLOPS_A_SECOND = 51e12
CONVOLUTION_SHARE = 0.35
PRODUCT_SHARE = 0.5

# How PyTorch cuts lists of tensors into kernels: values of a block, blocks and (for three lists) tensors of a kernel.
BLOCK_VALUES = 65536
KERNEL_BLOCKS = 320
KERNEL_TENSORS = 48


class Count(TorchDispatchMode):
    """Counts what is done inside.

    Attributes:
        kernels: By operation.
        bytes: By operation, read and written.
        flops: By operation.
        seconds: On the modelled GPU.
    """

    def __init__(self):
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.flops: Counter[str] = Counter()
        self.seconds = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = function.overloadpacket
        if kind is aten._fused_sgd_:  # has no form on the meta device
            params, grads, momenta, *_ = args
            self._add(kind, _list_kernels(params), _fused_bytes(params, grads, momenta), 0)
            return None
        results = function(*args, **kwargs)
        if not _gives_view(function) and kind not in FREE:
            nbytes = _bytes(kind, (args, kwargs), results)
            flops = _flops(kind, args, kwargs, results)
            self._add(kind, _kernels(kind, args), nbytes, flops)
        return results

    def _add(self, kind: Any, kernels: int, nbytes: int, flops: int) -> None:
        name = kind.__name__
        self.kernels[name] += kernels
        self.bytes[name] += nbytes
        self.flops[name] += flops
        share = CONVOLUTION_SHARE if "convolution" in name else PRODUCT_SHARE
        self.seconds += max(kernels * START_SECONDS, nbytes / BYTES_A_SECOND, flops / (share * FLOPS_A_SECOND))


def _gives_view(function: Any) -> bool:
    aliases = [result.alias_info for result in function._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _kernels(kind: Any, args: tuple) -> int:
    if kind is aten.convolution_backward:
        *_, is_asked_for = args  # of each gradient
        return sum(is_asked_for)
    return 2 if kind is aten.constant_pad_nd else 1  # fills, then copies


def _nbytes(tensor: Tensor) -> int:
    """Returns the bytes behind a tensor; of one that repeats values those that there are."""
    repeats_values = 0 in tensor.stride()
    return tensor.untyped_storage().nbytes() if repeats_values else tensor.nbytes


def _bytes(kind: Any, arguments: Any, results: Any) -> int:
    written = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
    if kind in SELECTIONS:
        return 2 * sum(map(_nbytes, written))
    read = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
    if kind is aten.constant_pad_nd:
        written = [*written, *read]
    return sum(map(_nbytes, [*read, *written]))


def _fused_bytes(params: list[Tensor], grads: list[Tensor], momenta: list[Tensor]) -> int:
    """Parameters and momenta are read and written, gradients are read."""
    return sum(map(_nbytes, grads)) + 2 * sum(map(_nbytes, [*params, *momenta]))


def _list_kernels(tensors: list[Tensor]) -> int:
    """Returns how many kernels an operation on a list of tensors takes, or on several such lists."""
    kernels = 1
    blocks = 0  # of the last kernel
    held = 0  # tensors of the last kernel
    for tensor in tensors:
        if held == KERNEL_TENSORS:
            kernels += 1
            blocks = 0
            held = 0
        held += 1
        blocks += math.ceil(tensor.numel() / BLOCK_VALUES)
        while blocks > KERNEL_BLOCKS:  # the rest of the tensor goes into the next one
            kernels += 1
            blocks -= KERNEL_BLOCKS
            held = 1
    return kernels


def _flops(kind: Any, args: tuple, kwargs: dict[str, Any], results: Any) -> int:
    if kind is aten.convolution:
        _, weight, *_ = args
        return _convolution_flops(results, weight)
    if kind is aten.convolution_backward:
        gradient, _, weight, *_, is_asked_for = args
        of_input, of_weight, _ = is_asked_for
        return (of_input + of_weight) * _convolution_flops(gradient, weight)
    if kind in flop_registry:
        return flop_registry[kind](*args, **kwargs, out_val=results)
    return 0


def _convolution_flops(output: Tensor, weight: Tensor) -> int:
    """Returns a multiplication and an addition for each value of the output and each weight that it is made of."""
    num_outputs = weight.shape[0]
    return 2 * output.numel() * (weight.numel() // num_outputs)


class _NoGraphs:
    """In the place of a device's graphs: what they would hold is done at once."""

    captured = 0
    plain = 0

    def warm_up(self, work: Work) -> None:
        work()

    def capture(self, work: Work) -> Work:
        return work

    def fork(self, works: Sequence[Work]) -> list[Any]:
        return [work() for work in works]


class CountedStep(NamedTuple):
    """What was counted of a joint step."""

    result: dict[str, Any]  # see `cells`
    counts: Count  # by operation


def count_step(name: str, workload: dict[str, Any], way: str, precision: str) -> CountedStep:
    """Counts a joint step of a workload, see `fedcli.bench.measure.WORKLOADS`, in one of `stacked.WAYS`."""
    size = workload["cohort_size"]
    two_batches = {
        "num_clients": size,
        "train_examples": 2 * size * workload["batch_size"],
        "local_epochs": 1,
    }
    setup = prepare_workload(workload | two_batches, device="cpu", precision=precision)
    fed = prepare(with_random_images(setup)).fed

    def to_meta(tensor: Tensor) -> Tensor:
        return tensor.to("meta")

    engine = replace(
        fed.engine,
        images=to_meta(fed.engine.images),
        labels=to_meta(fed.engine.labels),
        way=way,
        clients_per_chunk=size,
        joint_layers=True,
        graphs=_NoGraphs(),
    )
    cohort = fed.cohort(0)
    clients = tree_map(to_meta, fed.broadcast(*fed.initial_model(), cohort))
    step = fed.optimizer_step(plain_loss(fed.network))
    engine.train(step, clients, fed.plan(cohort), fed.lr(0), context=None, axes=None)
    take_step = engine.captured_step()
    with Count() as count:
        take_step()
    result = {
        "workload": name,
        "way": f"{way} x {size}",
        "precision": precision,
        "kernels": count.kernels.total(),
        "gigabytes": count.bytes.total() / 1e9,
        "gflop": count.flops.total() / 1e9,
        "milliseconds": 1e3 * count.seconds,
    }
    return CountedStep(result, count)


def step_cells(result: dict[str, Any]) -> dict[str, str]:
    """Returns cells of a table by their titles."""
    return {
        "Workload": result["workload"],
        "Way": result["way"],
        "Kernels": str(result["kernels"]),
        "GB": f"{result['gigabytes']:.2f}",
        "GFLOP": f"{result['gflop']:.1f}",
        "Modelled ms": f"{result['milliseconds']:.2f}",
    }
