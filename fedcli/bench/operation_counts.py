"""Kernels, bytes and floating-point operations of what PyTorch does, counted without a GPU.

Each operation is a kernel, except views. Its bytes are those of its results and of every tensor that it is given, which
counts as read, also where it is only written, as by `copy_`; of an index they are those of what it selects.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
# As views, which are told by their schema.
WITHOUT_KERNEL = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.detach, aten._unsafe_view}
INDEXING = {aten.index, aten.index_select, aten.gather}

# How PyTorch cuts lists of tensors into kernels: values of a block, blocks and (for three lists) tensors of a kernel.
BLOCK_VALUES = 65536
KERNEL_BLOCKS = 320
KERNEL_TENSORS = 48


class OperationCount(NamedTuple):
    """What an operation of PyTorch costs on a GPU."""

    name: str
    kernels: int
    bytes: int  # read and written
    flops: int


class OperationCounter(TorchDispatchMode):
    """Counts the kernels, bytes and floating-point operations of what PyTorch does inside.

    Attributes:
        operations: The counts of each operation, in the order in which PyTorch did them.
    """

    def __init__(self):
        super().__init__()
        self.operations: list[OperationCount] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = function.overloadpacket
        arguments = _name_arguments(function, args, kwargs)
        if operation is aten._fused_sgd_:  # has no form on the meta device
            count = OperationCount(
                name=operation.__name__,
                kernels=count_list_kernels(arguments["self"]),
                bytes=_count_fused_bytes(arguments["self"], arguments["grads"], arguments["momentum_buffer_list"]),
                flops=0,
            )
            self.operations.append(count)
            return None
        results = function(*args, **kwargs)
        if not _gives_view(function) and operation not in WITHOUT_KERNEL:
            count = OperationCount(
                name=operation.__name__,
                kernels=_count_kernels(operation, arguments),
                bytes=_count_bytes(operation, arguments, results),
                flops=_count_flops(function, args, kwargs, results),
            )
            self.operations.append(count)
        return results


def _name_arguments(function: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of an operation by their names in its schema, without those left to their defaults."""
    names = [argument.name for argument in function._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def _gives_view(function: Any) -> bool:
    aliases = [result.alias_info for result in function._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _count_kernels(operation: Any, arguments: dict[str, Any]) -> int:
    if operation is aten.convolution_backward:
        return sum(arguments["output_mask"])  # whether the gradients of input, weight and bias are asked for
    if operation is aten.constant_pad_nd:  # fills, then copies
        return 2
    return 1


def _count_stored_bytes(tensor: Tensor) -> int:
    """Returns the bytes behind a tensor; of one that repeats values those that there are."""
    repeats_values = 0 in tensor.stride()
    return tensor.untyped_storage().nbytes() if repeats_values else tensor.nbytes


def _count_bytes(operation: Any, arguments: dict[str, Any], results: Any) -> int:
    written = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
    if operation in INDEXING:
        return 2 * sum(map(_count_stored_bytes, written))
    read = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
    if operation is aten.constant_pad_nd:  # what is copied is written twice
        written = [*written, *read]
    return sum(map(_count_stored_bytes, [*read, *written]))


def _count_fused_bytes(params: list[Tensor], grads: list[Tensor], momenta: list[Tensor]) -> int:
    """Returns the bytes of a step of SGD: parameters and momenta are read and written, gradients are read."""
    return sum(map(_count_stored_bytes, grads)) + 2 * sum(map(_count_stored_bytes, [*params, *momenta]))


def count_list_kernels(tensors: list[Tensor]) -> int:
    """Returns how many kernels an operation on a list of tensors takes, or on several such lists."""
    kernels = 1
    blocks_of_last = 0
    tensors_of_last = 0
    for tensor in tensors:
        if tensors_of_last == KERNEL_TENSORS:
            kernels += 1
            blocks_of_last = 0
            tensors_of_last = 0
        tensors_of_last += 1
        blocks_of_last += math.ceil(tensor.numel() / BLOCK_VALUES)
        while blocks_of_last > KERNEL_BLOCKS:  # the rest of the tensor goes into the next one
            kernels += 1
            blocks_of_last -= KERNEL_BLOCKS
            tensors_of_last = 1
    return kernels


def _count_flops(function: Any, args: tuple, kwargs: dict[str, Any], results: Any) -> int:
    operation = function.overloadpacket
    arguments = _name_arguments(function, args, kwargs)
    if operation is aten.convolution:
        return _count_convolution_flops(results, arguments["weight"])
    if operation is aten.convolution_backward:
        wants_input_gradient, wants_weight_gradient, _ = arguments["output_mask"]
        num_convolutions = wants_input_gradient + wants_weight_gradient
        return num_convolutions * _count_convolution_flops(arguments["grad_output"], arguments["weight"])
    if operation in flop_registry:
        return flop_registry[operation](*args, **kwargs, out_val=results)
    return 0


def _count_convolution_flops(output: Tensor, weight: Tensor) -> int:
    """Returns a multiplication and an addition for each value of the output and each weight that it is made of."""
    num_outputs = weight.shape[0]
    return 2 * output.numel() * (weight.numel() // num_outputs)
