"""Layers of stacked clients as few operations on all of them, for devices that libraries other than the CPU's serve.

PyTorch's `vmap` makes several operations of one layer: it scales and shifts normalised values by themselves, and copies
activations and parameters into the layouts that it has rules for. `JointLayers` has functions of PyTorch computed by
others with equal results up to rounding, so that networks and methods stay as they are.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.func import vjp
from torch.overrides import TorchFunctionMode

from fedcli.core.layers import live_taps


class JointLayers(TorchFunctionMode):
    """The context of a function of one client under vmap in which the functions in `JOINT` are computed jointly."""

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Calls the function, or the one that stands for it."""
        return JOINT.get(function, function)(*args, **(kwargs or {}))


def conv2d(input: Tensor, weight: Tensor, *options: Any, **more: Any) -> Tensor:
    """Convolves as `F.conv2d`, with weights that are copied once, where vmap copies them forwards and backwards.

    A client's weights lie among its other parameters, and a grouped convolution takes those of all clients in a row.
    """
    return F.conv2d(input, weight.clone(memory_format=torch.contiguous_format), *options, **more)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `F.linear` as a product and a sum; vmap also multiplies the bias by 1."""
    product = input @ weight.mT
    return product if bias is None else product + bias.to(product.dtype)


def cross_entropy(  # noqa: PLR0913  # the arguments of `F.cross_entropy`
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Computes `F.cross_entropy` of each example with `reduction="none"`, and calls it for all else.

    What vmap makes of it looks four times for examples to be ignored; here none of the classes is theirs.
    """
    others = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    if others != (None, None, -100, None, "none", 0.0) or (input.dim(), target.dim()) != (2, 1):
        return F.cross_entropy(input, target, *others)
    is_other_class = target[:, None] != torch.arange(input.shape[1], device=target.device)
    return -F.log_softmax(input, 1).masked_fill(is_other_class, 0.0).sum(1)


def take_live_taps(weight: Tensor, live: tuple[slice, slice]) -> Tensor:
    """Takes the live taps as `fedcli.core.layers.live_taps`; the gradient is filled up with zeros once, not by axis."""
    return _LiveTaps.apply(weight, live) if weight[:, :, *live].shape != weight.shape else weight


class _LiveTaps(Function):
    """Taps `[O, I, h, w]` of weights, of which the slices `live` say where they are."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, live: tuple[slice, slice]) -> Tensor:
        return weight[:, :, *live]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        weight, (rows, columns) = inputs
        height, width = weight.shape[2:]
        ctx.dead = (columns.start, width - columns.stop, rows.start, height - rows.stop)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return F.pad(gradient, ctx.dead), None


def max_pool2d(input: Tensor, kernel_size: Any, stride: Any = None, *options: Any, **more: Any) -> Tensor:
    """Pools as `F.max_pool2d`, in the order in which the images of all clients lie, where vmap sorts them by client."""
    names = ("padding", "dilation", "ceil_mode", "return_indices")
    given = {"padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}
    given |= dict(zip(names, options, strict=False)) | more
    if given.pop("return_indices") or input.dim() != 4:
        return F.max_pool2d(input, kernel_size, stride, *options, **more)
    window = (kernel_size, kernel_size if stride is None else stride, *given.values())
    return _MaxPool.apply(input, *window)[0]


class _MaxPool(Function):
    """Max-pooling of images `[B, C, H, W]`; gives the positions of the largest values too."""

    @staticmethod
    def forward(x: Tensor, *window: Any) -> tuple[Tensor, Tensor]:
        return torch.ops.aten.max_pool2d_with_indices(x, *_of_both_axes(window))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        x, *ctx.window = inputs
        ctx.save_for_backward(x, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        return _MaxPoolBackward.apply(gradient, *ctx.saved_tensors, *ctx.window), *[None] * len(ctx.window)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, *window: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        x = _first(x, in_dims[0], info.batch_size)
        axis = _place(x)
        pooled, positions = _MaxPool.apply(_images(x, axis), *window)
        return (_apart(pooled, axis, info.batch_size), _apart(positions, axis, info.batch_size)), (axis, axis)


class _MaxPoolBackward(Function):
    """The gradient of `_MaxPool`, by that of what it gave, by its input and by the positions."""

    @staticmethod
    def forward(gradient: Tensor, x: Tensor, positions: Tensor, *window: Any) -> Tensor:
        return torch.ops.aten.max_pool2d_with_indices_backward(gradient, x, *_of_both_axes(window), positions)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, _, positions, *window = inputs
        ctx.save_for_backward(positions)
        ctx.num_constants = 2 + len(window)

    @staticmethod
    def backward(ctx: Any, second: Tensor) -> tuple[Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        picked = second.flatten(-2).gather(-1, positions.flatten(-2)).view_as(positions)
        return picked, *[None] * ctx.num_constants

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *inputs: Any) -> tuple[Tensor, int]:
        tensors = [_first(tensor, now, info.batch_size) for tensor, now in zip(inputs[:3], in_dims[:3], strict=True)]
        axis = _place(tensors[1])
        images = [_images(tensor, axis) for tensor in tensors]
        return _apart(_MaxPoolBackward.apply(*images, *inputs[3:]), axis, info.batch_size), axis


def _of_both_axes(window: Sequence[Any]) -> tuple[Any, ...]:
    """Returns kernel size, stride, padding and dilation as pairs, and whether sizes are rounded up."""
    *sizes, ceil_mode = window
    pairs = [[size, size] if isinstance(size, int) else [*size] for size in sizes]
    return *pairs, ceil_mode


def _first(tensor: Tensor, now: int | None, count: int) -> Tensor:
    """Puts the clients' axis, now at `now`, first; a tensor that clients share is repeated for each of `count`."""
    return tensor.expand(count, *tensor.shape) if now is None else tensor.movedim(now, 0)


def _place(tensor: Tensor) -> int:
    """Says whether the clients of `[K, B, ...]` lie behind the examples in memory, 1, as a convolution leaves them."""
    return int(tensor.stride(0) < tensor.stride(1))


def _images(tensor: Tensor, axis: int) -> Tensor:
    """Makes one axis of those of clients and examples, `[K, B, ...]`, the clients' the first or second of the two."""
    return tensor.movedim(0, axis).flatten(0, 1)


def _apart(images: Tensor, axis: int, count: int) -> Tensor:
    """Takes the two axes apart again."""
    return images.unflatten(0, (-1, count) if axis else (count, -1))


def batch_norm(  # noqa: PLR0913  # the arguments of `F.batch_norm`
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Normalises as `F.batch_norm`, with the channels of all clients as those of one batch.

    Scale and shift are then part of one operation, and of one backwards.
    """
    tensors = (input, running_mean, running_var, weight, bias)
    has_one_value = input.numel() == input.shape[1]  # of each channel, which PyTorch refuses
    if not training or has_one_value or any(tensor is None for tensor in tensors):
        return F.batch_norm(*tensors, training, momentum, eps)
    return _BatchNorm.apply(*tensors, momentum, eps)[0]


class _BatchNorm(Function):
    """Batch normalisation of `[B, C, ...]`; gives the mean of each channel and the inverse of its deviation too.

    The running statistics `[C]` are written over.
    """

    @staticmethod
    def forward(
        x: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor, bias: Tensor, momentum: float, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.native_batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
        x, _, _, weight, _, _, ctx.eps = inputs
        _, mean, inverse = output
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.mark_non_differentiable(mean, inverse)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        of_x, of_weight, of_bias = _BatchNormBackward.apply(gradient, *ctx.saved_tensors, ctx.eps)
        return of_x, None, None, of_weight, of_bias, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, *others: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        count = info.batch_size
        if in_dims[1] is None or in_dims[2] is None:
            raise RuntimeError("running statistics that clients share cannot be written over by each of them")
        channels = [_channels(tensor, now, count) for tensor, now in zip(others[:4], in_dims[1:5], strict=True)]
        outputs = _BatchNorm.apply(_side_by_side(x, in_dims[0], count), *channels, *others[4:])
        return _by_client(outputs, count)


class _BatchNormBackward(Function):
    """The gradients of `_BatchNorm` by input, weight and bias."""

    @staticmethod
    def forward(
        gradient: Tensor, x: Tensor, weight: Tensor, mean: Tensor, inverse: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.aten.native_batch_norm_backward(
            gradient, x, weight, None, None, mean, inverse, True, eps, [True, True, True]
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
        gradient, x, weight, _, _, ctx.eps = inputs
        ctx.save_for_backward(gradient, x, weight)

    @staticmethod
    def backward(ctx: Any, *second: Tensor) -> tuple[Tensor | None, ...]:
        """Gives second derivatives by the plain formula."""

        def gradients(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            pull_back = vjp(partial(_normalised, eps=ctx.eps), x, weight, torch.zeros_like(weight))[1]
            return pull_back(gradient)

        pull_back = vjp(gradients, *ctx.saved_tensors)[1]
        return *pull_back(second), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, gradient: Tensor, x: Tensor, *others: Any) -> tuple[tuple, tuple]:
        count = info.batch_size
        channels = [_channels(tensor, now, count) for tensor, now in zip(others[:3], in_dims[2:5], strict=True)]
        values = _side_by_side(gradient, in_dims[0], count), _side_by_side(x, in_dims[1], count)
        return _by_client(_BatchNormBackward.apply(*values, *channels, others[3]), count)


def _normalised(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    axes = (0, *range(2, x.dim()))
    by_channel = (-1, *[1] * (x.dim() - 2))
    centred = x - x.mean(axes, keepdim=True)
    scaled = centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()
    return scaled * weight.view(by_channel) + bias.view(by_channel)


def _side_by_side(tensor: Tensor, now: int | None, count: int) -> Tensor:
    """Makes `[B, K * C, ...]` of the clients' `[B, C, ...]`."""
    return _first(tensor, now, count).movedim(0, 1).flatten(1, 2)


def _channels(tensor: Tensor, now: int | None, count: int) -> Tensor:
    """Makes `[K * C]` of the clients' `[C]`."""
    return _first(tensor, now, count).flatten()


def _by_client(outputs: Sequence[Tensor], count: int) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Takes the clients of `[B, K * C, ...]` and of some `[K * C]` apart; says where their axis is."""
    values, *of_channels = outputs
    parts = values.unflatten(1, (count, -1)), *(tensor.unflatten(0, (count, -1)) for tensor in of_channels)
    return parts, (1, *[0] * len(of_channels))


# By the function of PyTorch, or of the project, for which it stands.
JOINT: dict[Callable, Callable] = {
    F.conv2d: conv2d,
    F.linear: linear,
    F.cross_entropy: cross_entropy,
    F.max_pool2d: max_pool2d,
    F.batch_norm: batch_norm,
    live_taps: take_live_taps,
}
