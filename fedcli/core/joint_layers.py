"""Layers of stacked clients as few operations on all of them, for devices that libraries other than the CPU's serve.

PyTorch's `vmap` makes several operations of one layer: it scales and shifts normalised values by themselves, and copies
activations and parameters into the layouts that it has rules for. `JointLayers` has functions of PyTorch computed by
others with equal results up to rounding, so that networks and methods stay as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


def conv2d(input: Tensor, weight: Tensor, *options: Any, **keywords: Any) -> Tensor:
    """Convolves as `F.conv2d`, with weights that are copied once, where vmap copies them forwards and backwards.

    A client's weights lie among its other parameters, and a grouped convolution takes those of all clients in a row.
    """
    return F.conv2d(input, weight.clone(memory_format=torch.contiguous_format), *options, **keywords)


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
    options = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    per_example = (None, None, -100, None, "none", 0.0)
    if options != per_example or input.dim() != 2 or target.dim() != 1:
        return F.cross_entropy(input, target, *options)
    is_other_class = target[:, None] != torch.arange(input.shape[1], device=target.device)
    return -F.log_softmax(input, 1).masked_fill(is_other_class, 0.0).sum(1)


def take_live_taps(weight: Tensor, live: tuple[slice, slice]) -> Tensor:
    """Takes the live taps as `fedcli.core.layers.live_taps`; the gradient is filled up with zeros once, not by axis."""
    has_dead_taps = weight[:, :, *live].shape != weight.shape
    return _TakeLiveTaps.apply(weight, live) if has_dead_taps else weight


class _TakeLiveTaps(Function):
    """Taps `[O, I, h, w]` of weights, of which the slices `live` say where they are."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, live: tuple[slice, slice]) -> Tensor:
        return weight[:, :, *live]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        weight, (rows, columns) = inputs
        _, _, height, width = weight.shape
        # As `F.pad` takes them, the last axis first.
        ctx.dead = (columns.start, width - columns.stop, rows.start, height - rows.stop)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return F.pad(gradient, ctx.dead), None


@dataclass(frozen=True)
class _Window:
    """The window of a pooling; its sizes are of both axes, or one for both."""

    kernel_size: Any
    stride: Any
    padding: Any
    dilation: Any
    ceil_mode: bool  # whether the sizes of the output are rounded up

    def arguments(self) -> tuple[Any, ...]:
        """Returns its fields in the order in which PyTorch's operators take them, sizes as pairs."""
        return (
            _pair(self.kernel_size), _pair(self.stride), _pair(self.padding), _pair(self.dilation), self.ceil_mode
        )  # fmt: skip


def _pair(size: Any) -> list[int]:
    return [size, size] if isinstance(size, int) else [*size]


def max_pool2d(
    input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    return_indices: Any = False,
) -> Tensor:  # fmt: skip
    """Pools as `F.max_pool2d`, in the order in which the images of all clients lie, where vmap sorts them by client."""
    if return_indices or input.dim() != 4:
        return F.max_pool2d(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    window = _Window(kernel_size, kernel_size if stride is None else stride, padding, dilation, ceil_mode)
    pooled, _ = _MaxPool.apply(input, window)
    return pooled


class _MaxPool(Function):
    """Max-pooling of images `[B, C, H, W]`; gives the positions of the largest values too."""

    @staticmethod
    def forward(x: Tensor, window: _Window) -> tuple[Tensor, Tensor]:
        return torch.ops.aten.max_pool2d_with_indices(x, *window.arguments())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, _Window], output: tuple[Tensor, Tensor]) -> None:
        x, ctx.window = inputs
        _, positions = output
        ctx.save_for_backward(x, positions)
        ctx.mark_non_differentiable(positions)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, None]:
        x, positions = ctx.saved_tensors
        return _MaxPoolBackward.apply(gradient, x, positions, ctx.window), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, window: _Window) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        count = info.batch_size
        axis_of_x, _ = in_dims
        x = _move_clients_first(x, axis_of_x, count)
        axis = _find_axis_in_memory(x)
        pooled, positions = _MaxPool.apply(_merge_clients(x, axis), window)
        return (_split_clients(pooled, axis, count), _split_clients(positions, axis, count)), (axis, axis)


class _MaxPoolBackward(Function):
    """The gradient of `_MaxPool`, by that of what it gave, by its input and by the positions."""

    @staticmethod
    def forward(gradient: Tensor, x: Tensor, positions: Tensor, window: _Window) -> Tensor:
        return torch.ops.aten.max_pool2d_with_indices_backward(gradient, x, *window.arguments(), positions)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, _, positions, _ = inputs
        ctx.save_for_backward(positions)

    @staticmethod
    def backward(ctx: Any, second: Tensor) -> tuple[Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        of_gradient = second.flatten(-2).gather(-1, positions.flatten(-2)).view_as(positions)
        return of_gradient, None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple, gradient: Tensor, x: Tensor, positions: Tensor, window: _Window
    ) -> tuple[Tensor, int]:
        count = info.batch_size
        axis_of_gradient, axis_of_x, axis_of_positions, _ = in_dims
        gradient = _move_clients_first(gradient, axis_of_gradient, count)
        x = _move_clients_first(x, axis_of_x, count)
        positions = _move_clients_first(positions, axis_of_positions, count)
        axis = _find_axis_in_memory(x)
        images_gradient = _MaxPoolBackward.apply(
            _merge_clients(gradient, axis), _merge_clients(x, axis), _merge_clients(positions, axis), window
        )
        return _split_clients(images_gradient, axis, count), axis


def _move_clients_first(tensor: Tensor, axis: int | None, count: int) -> Tensor:
    """Moves the clients' axis to the front; a tensor without one, which clients share, is repeated for each."""
    return tensor.expand(count, *tensor.shape) if axis is None else tensor.movedim(axis, 0)


def _find_axis_in_memory(tensor: Tensor) -> int:
    """Says where in memory the clients of `[K, B, ...]` lie: before the examples, 0, or behind them, 1.

    A convolution leaves them behind.
    """
    return int(tensor.stride(0) < tensor.stride(1))


def _merge_clients(tensor: Tensor, axis: int) -> Tensor:
    """Makes one axis of those of clients and examples, `[K, B, ...]`, the clients' at `axis`, 0 or 1, of the two."""
    return tensor.movedim(0, axis).flatten(0, 1)


def _split_clients(images: Tensor, axis: int, count: int) -> Tensor:
    """Takes the two axes of `_merge_clients` apart again."""
    return images.unflatten(0, (count, -1) if axis == 0 else (-1, count))


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
    normalised, _, _ = _BatchNorm.apply(*tensors, momentum, eps)
    return normalised


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
        x_gradient, weight_gradient, bias_gradient = _BatchNormBackward.apply(gradient, *ctx.saved_tensors, ctx.eps)
        return x_gradient, None, None, weight_gradient, bias_gradient, None, None

    @staticmethod
    def vmap(  # noqa: PLR0913  # those of `forward`
        info: Any, in_dims: tuple, x: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor, bias: Tensor,
        momentum: float, eps: float,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:  # fmt: skip
        count = info.batch_size
        axis_of_x, axis_of_mean, axis_of_var, axis_of_weight, axis_of_bias, _, _ = in_dims
        if axis_of_mean is None or axis_of_var is None:
            raise RuntimeError("running statistics that clients share cannot be written over by each of them")
        outputs = _BatchNorm.apply(
            _merge_into_channels(x, axis_of_x, count),
            _concatenate_clients(running_mean, axis_of_mean, count),
            _concatenate_clients(running_var, axis_of_var, count),
            _concatenate_clients(weight, axis_of_weight, count),
            _concatenate_clients(bias, axis_of_bias, count),
            momentum,
            eps,
        )
        return _split_channels(outputs, count)


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
            pull_back = _pull_back(partial(_normalise, eps=ctx.eps), x, weight, torch.zeros_like(weight))
            return pull_back(gradient)

        pull_back = _pull_back(gradients, *ctx.saved_tensors)
        return *pull_back(second), None, None, None

    @staticmethod
    def vmap(  # noqa: PLR0913  # those of `forward`
        info: Any, in_dims: tuple, gradient: Tensor, x: Tensor, weight: Tensor, mean: Tensor, inverse: Tensor,
        eps: float,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:  # fmt: skip
        count = info.batch_size
        axis_of_gradient, axis_of_x, axis_of_weight, axis_of_mean, axis_of_inverse, _ = in_dims
        gradients = _BatchNormBackward.apply(
            _merge_into_channels(gradient, axis_of_gradient, count),
            _merge_into_channels(x, axis_of_x, count),
            _concatenate_clients(weight, axis_of_weight, count),
            _concatenate_clients(mean, axis_of_mean, count),
            _concatenate_clients(inverse, axis_of_inverse, count),
            eps,
        )
        return _split_channels(gradients, count)


def _pull_back(function: Callable[..., Any], *inputs: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    """Returns what makes of a gradient by the function's value those by its inputs, by `torch.func.vjp`."""
    _, pull_back, *_ = vjp(function, *inputs)  # its type allows a third part
    return pull_back


def _normalise(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    axes = (0, *range(2, x.dim()))
    by_channel = (-1, *[1] * (x.dim() - 2))
    centred = x - x.mean(axes, keepdim=True)
    scaled = centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()
    return scaled * weight.view(by_channel) + bias.view(by_channel)


def _merge_into_channels(tensor: Tensor, axis: int | None, count: int) -> Tensor:
    """Makes `[B, K * C, ...]` of the clients' `[B, C, ...]`."""
    return _move_clients_first(tensor, axis, count).movedim(0, 1).flatten(1, 2)


def _concatenate_clients(tensor: Tensor, axis: int | None, count: int) -> Tensor:
    """Makes `[K * C]` of the clients' `[C]`."""
    return _move_clients_first(tensor, axis, count).flatten()


def _split_channels(outputs: Sequence[Tensor], count: int) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Takes the clients of `[B, K * C, ...]` and of some `[K * C]` apart; says where their axis is."""
    values, *channel_values = outputs
    values = values.unflatten(1, (count, -1))
    channel_values = [tensor.unflatten(0, (count, -1)) for tensor in channel_values]
    return (values, *channel_values), (1, *[0] * len(channel_values))


# By the function of PyTorch, or of the project, for which it stands.
JOINT: dict[Callable, Callable] = {
    F.conv2d: conv2d,
    F.linear: linear,
    F.cross_entropy: cross_entropy,
    F.max_pool2d: max_pool2d,
    F.batch_norm: batch_norm,
    live_taps: take_live_taps,
}
