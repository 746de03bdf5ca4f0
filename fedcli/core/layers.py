"""Batch normalisation and convolution in the form that training many clients together needs."""

from contextvars import ContextVar
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import handle_torch_function, has_torch_function_unary

# Whether convolutions with few places in their output are computed place by place, faster on a CPU and rounded
# otherwise: in evaluation, and where a client trains alone a network with dead taps.
by_places: ContextVar[bool] = ContextVar("by_places", default=False)


class MaskedBatchNorm2d(nn.BatchNorm2d):
    """Batch normalisation whose statistics leave out the padding of a batch.

    It is torch's without a mask and in evaluation. A batch with one value per channel, which torch refuses, has
    variance 0.

    Attributes:
        mask: `[B]`, False for padding; set by the network for the time of one forward pass.
    """

    running_mean: Tensor
    running_var: Tensor
    momentum: float

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True):
        super().__init__(num_features, eps, momentum, affine)
        self.num_batches_tracked = None  # an integer buffer, which could not be averaged; only `momentum=None` needs it
        self.mask: Tensor | None = None

    # BatchNorm's own version looks for `num_batches_tracked` in a plain dict of tensors.
    _load_from_state_dict = nn.Module._load_from_state_dict

    def forward(self, x: Tensor) -> Tensor:
        """Normalises activations `[B, C, H, W]`, and updates the running statistics in place.

        Padding is taken out by `where` before and after the mean, as vmap allows no branch on data: not even NaN
        reaches sums or gradients. It comes out as the bias: a multiple of 1 / sqrt(eps) would overflow after some
        layers where the real rows have no variance.
        """
        if not self.training:
            return super().forward(x)
        _, channels, height, width = x.shape
        has_one_value = x.numel() == channels
        if self.mask is None and not has_one_value:
            return super().forward(x)
        mask = x.new_ones(len(x), dtype=torch.bool) if self.mask is None else self.mask
        dtype = x.dtype
        x = x.to(self.running_mean.dtype)
        real = mask[:, None, None, None]
        # Values per channel, in the type of x: from integers torch would make quotients in float32.
        values = real.sum().to(x.dtype) * (height * width)
        divisor = values.clamp(min=1)  # a batch of padding only, of a client that stands still
        mean = torch.where(real, x, 0.0).sum((0, 2, 3)) / divisor
        centred = torch.where(real, x - mean[:, None, None], 0.0)
        var = centred.square().sum((0, 2, 3)) / divisor
        with torch.no_grad():
            unbiased = var * (divisor / (values - 1).clamp(min=1))
            self.running_mean.add_(self.momentum * (mean - self.running_mean))
            self.running_var.add_(self.momentum * (unbiased - self.running_var))
        scale = (var + self.eps).rsqrt()
        if not self.affine:
            return (centred * scale[:, None, None]).to(dtype)
        return (centred * (self.weight * scale)[:, None, None] + self.bias[:, None, None]).to(dtype)


def change_class(layer: nn.Module, kind: type[nn.Module], **attributes: Any) -> None:
    """Changes a layer's class to a subclass of it, and sets attributes; PyTorch's lazy modules become others so.

    A new layer in the place of the old one would not do: a user's network may hold the layer in a list too, or under a
    second name. It would go on to call the old one there, whose tensors are not the ones that are trained.
    """
    layer.__class__ = kind
    for name, value in attributes.items():
        setattr(layer, name, value)


class LiveConv2d(nn.Conv2d):
    """A convolution of images of one size by those taps of its kernel that meet the image somewhere.

    The other taps meet padding only: they add nothing and get no gradient. Weights and function are torch's; weight
    decay and momentum go on for all taps.

    Attributes:
        size: Height and width of the images; those of another size are convolved with all taps.
        live: The taps along height and width.
        live_padding: The padding that is left along height and width.
        has_few_places: Whether the output has at most four places, and the layer neither groups nor dilation.
    """

    size: torch.Size
    live: tuple[slice, slice]
    live_padding: tuple[int, int]
    has_few_places: bool

    def forward(self, input: Tensor) -> Tensor:
        """Convolves `[B, C, H, W]`."""
        if input.shape[-2:] != self.size:
            return super().forward(input)
        if self.weight.stride(1) == 1:  # with the channels last, as then its gradient is
            weight = self.weight.permute(0, 2, 3, 1)[:, *self.live].permute(0, 3, 1, 2)
        else:
            weight = live_taps(self.weight, self.live)
        has_batch = input.dim() == 4  # else `[C, H, W]`, a single image
        if self.has_few_places and by_places.get() and has_batch:
            return self.convolve_by_places(input.permute(0, 2, 3, 1), weight.permute(0, 2, 3, 1))
        return F.conv2d(input, weight, self.bias, self.stride, self.live_padding, self.dilation, self.groups)

    def convolve_by_places(self, x: Tensor, weight: Tensor) -> Tensor:
        """Convolves by a product of matrices for each place of the output, of the taps that meet the image there.

        Of 3 x 3 taps on a padded image of 2 x 2 pixels these are 4. Both arguments have their channels last.
        """
        _, height, width, _ = x.shape
        _, taps_down, taps_across, _ = weight.shape
        stride_down, stride_across = self.stride
        padding_down, padding_across = self.live_padding
        rows = range(-padding_down, height + padding_down - taps_down + 1, stride_down)
        columns = range(-padding_across, width + padding_across - taps_across + 1, stride_across)
        places = []
        for top, left in product(rows, columns):
            pixels = x[:, max(top, 0) : top + taps_down, max(left, 0) : left + taps_across]
            _, num_down, num_across, _ = pixels.shape
            first_down = max(-top, 0)
            first_across = max(-left, 0)
            taps = weight[:, first_down : first_down + num_down, first_across : first_across + num_across]
            places.append(F.linear(pixels.flatten(1), taps.flatten(1), self.bias))
        return torch.stack(places, 1).view(len(x), len(rows), len(columns), -1).permute(0, 3, 1, 2)


def live_taps(weight: Tensor, live: tuple[slice, slice]) -> Tensor:
    """Returns the taps of weights `[O, I, h, w]` in two slices; a mode of PyTorch's functions may stand for it."""
    if has_torch_function_unary(weight):
        return handle_torch_function(live_taps, (weight,), weight, live)
    return weight[:, :, *live]


class _Axis(NamedTuple):
    """A convolution along one axis of its images."""

    size: int  # pixels
    kernel: int  # taps
    stride: int
    padding: int  # pixels on each side
    dilation: int

    @property
    def starts(self) -> range:
        """Where the first tap is, for each place of the output."""
        end = self.size + self.padding - self.dilation * (self.kernel - 1)
        return range(-self.padding, end, self.stride)

    @property
    def all_taps(self) -> slice:
        """All taps of the kernel."""
        return slice(0, self.kernel)

    def meets_pixel(self, tap: int) -> bool:
        """Says whether a tap lies on a pixel for some place of the output."""
        return any(0 <= start + tap * self.dilation < self.size for start in self.starts)


class _LiveTaps(NamedTuple):
    """What is left of a kernel along one axis without the taps that meet padding only."""

    taps: slice
    padding: int


def _find_live_taps(axis: _Axis) -> _LiveTaps:
    """Returns the taps from the first to the last that meets a pixel; all if the sides would need unequal padding."""
    live = [tap for tap in range(axis.kernel) if axis.meets_pixel(tap)]
    if not live:
        return _LiveTaps(axis.all_taps, axis.padding)
    first = min(live)
    last = max(live)
    without_dead_taps = axis._replace(kernel=last - first + 1, padding=axis.padding - first * axis.dilation)
    if without_dead_taps.padding < 0 or len(without_dead_taps.starts) != len(axis.starts):
        return _LiveTaps(axis.all_taps, axis.padding)
    return _LiveTaps(slice(first, last + 1), without_dead_taps.padding)


@torch.no_grad()
def use_live_taps(network: nn.Module, channels: int, image_size: int) -> bool:
    """Makes convolutions of a network `LiveConv2d` where that is less work; returns whether there are dead taps.

    Two empty images of this size go through the network in evaluation mode; it is in training mode afterwards.
    """
    dead_taps = []

    def leave_out(layer: nn.Module, args: tuple) -> None:
        if type(layer) is not nn.Conv2d or not args or isinstance(layer.padding, str) or layer.padding_mode != "zeros":
            return
        images = args[0]
        size = images.shape[-2:]
        down = _Axis(size[0], layer.kernel_size[0], layer.stride[0], layer.padding[0], layer.dilation[0])
        across = _Axis(size[1], layer.kernel_size[1], layer.stride[1], layer.padding[1], layer.dilation[1])
        live_down = _find_live_taps(down)
        live_across = _find_live_taps(across)
        live = (live_down.taps, live_across.taps)
        live_padding = (live_down.padding, live_across.padding)
        has_dead_taps = live != (down.all_taps, across.all_taps)
        num_places = len(down.starts) * len(across.starts)
        has_few_places = num_places <= 4 and layer.groups == 1 and layer.dilation == (1, 1)
        if has_dead_taps or has_few_places:
            change_class(
                layer, LiveConv2d, size=size, live=live, live_padding=live_padding, has_few_places=has_few_places
            )
        dead_taps.append(has_dead_taps)

    with register_module_forward_pre_hook(leave_out):
        network.eval()(next(network.parameters()).new_zeros(2, channels, image_size, image_size))
    network.train()
    return any(dead_taps)
