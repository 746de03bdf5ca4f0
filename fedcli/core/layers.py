"""Layers that torch lacks in the form that training many clients together needs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import product
from math import prod
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

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


def become(layer: nn.Module, kind: type[nn.Module], **attributes: Any) -> None:
    """Makes a layer one of a subclass of its class, with these attributes, as torch's lazy modules become others.

    A new layer in its place would not do: a user's network may also know its layer by an attribute or in a list, and
    would go on to call the old one, which has none of the tensors that are trained.
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
        few: Whether the output has at most four places, and the layer neither groups nor dilation.
    """

    size: torch.Size
    live: tuple[slice, slice]
    live_padding: tuple[int, int]
    few: bool

    def forward(self, input: Tensor) -> Tensor:
        """Convolves `[B, C, H, W]`."""
        if input.shape[-2:] != self.size:
            return super().forward(input)
        if self.weight.stride(1) == 1:  # with the channels last, as then its gradient is
            weight = self.weight.permute(0, 2, 3, 1)[:, *self.live].permute(0, 3, 1, 2)
        else:
            weight = live_taps(self.weight, self.live)
        if self.few and by_places.get():
            return self._place_by_place(input.permute(0, 2, 3, 1), weight.permute(0, 2, 3, 1))
        return F.conv2d(input, weight, self.bias, self.stride, self.live_padding, self.dilation, self.groups)

    def _place_by_place(self, x: Tensor, weight: Tensor) -> Tensor:
        """Convolves by a product of matrices for each place of the output, of the taps that meet the image there.

        Of 3 x 3 taps on a padded image of 2 x 2 pixels these are 4. Both arguments have their channels last.
        """
        _, height, width, _ = x.shape
        _, taps_down, taps_across, _ = weight.shape
        stride_down, stride_across = self.stride
        padding_down, padding_across = self.live_padding
        rows = _starts(height, taps_down, stride_down, padding_down, dilation=1)
        columns = _starts(width, taps_across, stride_across, padding_across, dilation=1)
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


@contextmanager
def set_to(variable: ContextVar[bool], value: bool) -> Iterator[None]:
    """Sets a context variable inside a `with` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _starts(size: int, kernel: int, stride: int, padding: int, dilation: int) -> range:
    """Returns where a convolution puts its kernel along an axis of `size` pixels."""
    return range(-padding, size + padding - dilation * (kernel - 1), stride)


def _live_taps(size: int, kernel: int, stride: int, padding: int, dilation: int) -> tuple[slice, int]:
    """Returns the taps that meet a pixel of an axis of `size`, and the padding that is left."""
    starts = _starts(size, kernel, stride, padding, dilation)

    def meets_pixel(tap: int) -> bool:
        return any(0 <= start + tap * dilation < size for start in starts)

    live = [tap for tap in range(kernel) if meets_pixel(tap)] or range(kernel)
    first = min(live)
    last = max(live)
    left = padding - first * dilation
    if left < 0 or len(_starts(size, last - first + 1, stride, left, dilation)) != len(starts):
        return slice(0, kernel), padding  # the two sides would need unequal padding
    return slice(first, last + 1), left


@torch.no_grad()
def use_live_taps(network: nn.Module, channels: int, image_size: int) -> bool:
    """Makes convolutions of a network `LiveConv2d` where that is less work; returns whether there are dead taps.

    Two empty images of this size go through the network in evaluation mode; it is in training mode afterwards.
    """
    dead_taps = []

    def leave_out(layer: nn.Module, args: tuple) -> None:
        if type(layer) is not nn.Conv2d or not args or isinstance(layer.padding, str) or layer.padding_mode != "zeros":
            return
        images, *_ = args
        size = images.shape[-2:]
        rows, columns = zip(size, layer.kernel_size, layer.stride, layer.padding, layer.dilation, strict=True)
        live_rows, top = _live_taps(*rows)
        live_columns, left = _live_taps(*columns)
        live = (live_rows, live_columns)
        height, width = layer.kernel_size
        has_dead_taps = live != (slice(0, height), slice(0, width))
        num_places = len(_starts(*rows)) * len(_starts(*columns))
        few = num_places <= 4 and layer.groups == 1 and layer.dilation == (1, 1)
        if has_dead_taps or few:
            become(layer, LiveConv2d, size=size, live=live, live_padding=(top, left), few=few)
        dead_taps.append(has_dead_taps)

    with register_module_forward_pre_hook(leave_out):
        network.eval()(next(network.parameters()).new_zeros(2, channels, image_size, image_size))
    network.train()
    return any(dead_taps)


class KeyedDropout(nn.Module):
    """Dropout whose mask is a hash of a key, the layer's number, and the place in the batch and in the example.

    Equal keys give equal masks, whatever else is in the batch and whichever clients train together.

    Attributes:
        key: int64 scalar, a buffer that is set before each step.
        number: Tells the layers of one network apart; set by the network.
    """

    key: Tensor

    def __init__(self, p: float, whole_examples: bool = False):
        """Makes a layer that drops values, or `whole_examples` (stochastic depth), with probability `p` in [0, 1)."""
        super().__init__()
        self.p = p
        self.whole_examples = whole_examples
        self.number = 0
        self.register_buffer("key", torch.tensor(0), persistent=False)  # not learned

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x` `[B, ...]`, in training with some values set to 0 and the others divided by 1 - p."""
        if not self.training:
            return x
        shape = (len(x), *[1] * (x.dim() - 1)) if self.whole_examples else x.shape
        dropped = _random_words(self.key, self.number, shape) < round(self.p * 2**32)
        return torch.where(dropped, 0.0, x / (1 - self.p))


class KeyedDraws(nn.Module, TorchFunctionMode):
    """The context of a forward pass in which the functions of torch in `KEYED` draw from a key.

    It computes attention by its plain formula: torch's kernels draw their own dropout, and are done client by client
    under vmap.

    Attributes:
        key: As of `KeyedDropout`.
        used: Whether any of the functions has been called.
    """

    key: Tensor

    def __init__(self):
        super().__init__()
        self.used = False
        self._draws = 0
        self.register_buffer("key", torch.tensor(0), persistent=False)

    def __enter__(self) -> "KeyedDraws":
        self._draws = 0  # in this forward pass
        return super().__enter__()

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Calls the function, or the method that stands for it."""
        if function not in KEYED:
            return function(*args, **(kwargs or {}))
        self.used = True
        return KEYED[function](self, *args, **(kwargs or {}))

    def words(self, shape: torch.Size) -> Tensor:
        """Draws integers in [0, 2^32), by the place on one axis after the other: no axis' length changes them."""
        self._draws += 1
        words = _random_words(self.key, -1 - self._draws, ())  # the layers of `KeyedDropout` count from 0
        for size in shape:
            words = _mix(words[..., None] ^ torch.arange(size, device=words.device))
        return words

    def dropout(
        self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, channels: bool = False
    ) -> Tensor:
        """Drops values, or whole `channels` of `[B, C, ...]`, as `F.dropout` and `F.dropout2d`."""
        if not training or p == 0:
            return x
        shape = x.shape
        if channels:
            shape = torch.Size([*x.shape[:2], *[1] * (x.dim() - 2)])
        dropped = self.words(shape) < round(p * 2**32)
        share_kept = 1 - p
        result = torch.where(dropped, 0.0, x / (share_kept or 1))
        return x.copy_(result) if inplace else result

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns softmax(Q K^T * scale + mask) V with dropout of the weights, as `F.scaled_dot_product_attention`."""
        if scale is None:
            width = query.shape[-1]
            scale = width**-0.5
        scores = query @ key.mT * scale
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is None:
            weights = scores.softmax(-1)
        elif attn_mask.dtype == torch.bool:
            lowest = torch.finfo(scores.dtype).min
            weights = torch.where(attn_mask, torch.where(attn_mask, scores, lowest).softmax(-1), 0.0)
        else:
            weights = (scores + attn_mask).softmax(-1)
        return self.dropout(weights, dropout_p) @ value

    def multi_head_attention(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Calls `F.multi_head_attention_forward` with `dropout` and `attention` in the place of torch's.

        Its body is run here with these two names of its module standing for ours, since there is no other way to it.
        Called as it is, outside this mode, its dropout would not come to us; inside the mode its first line hands the
        call back to this method. To set the names in torch's module would change them for other threads too, and a copy
        of its 200 lines would not follow torch's own changes.
        """
        function = F.multi_head_attention_forward
        names = {
            **vars(F),
            "dropout": self.dropout,
            "scaled_dot_product_attention": self.attention,
            "has_torch_function": lambda tensors: False,  # so that the first line does not hand the call back
        }
        with_our_names = FunctionType(function.__code__, names, argdefs=function.__defaults__)
        return with_our_names(*arguments, **options)


KEYED: dict[Callable, Callable] = {
    F.dropout: KeyedDraws.dropout,
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d), partial(KeyedDraws.dropout, channels=True)),
    F.scaled_dot_product_attention: KeyedDraws.attention,
    F.multi_head_attention_forward: KeyedDraws.multi_head_attention,
}

_WORD = 2**32 - 1


def _random_words(key: Tensor, number: int, shape: tuple[int, ...]) -> Tensor:
    """Returns integers in [0, 2^32) as int64: a hash of key, number and place.

    A step of 2^32 divided by the golden ratio keeps 100 numbers apart for up to 20 million values.
    """
    words = torch.arange(prod(shape), device=key.device).reshape(shape) + (number + 1) * 0x9E3779B9
    for part in (key & _WORD, (key >> 32) & _WORD):
        words = _mix(words & _WORD) + _mix(part)
    return _mix(words & _WORD)


def _mix(word: Tensor) -> Tensor:
    """Permutes the integers below 2^32, each bit by all bits; factors below 2^30 keep all products in int64."""
    word = (word ^ (word >> 15)) * 0x2C1B3C6D & _WORD
    word = (word ^ (word >> 12)) * 0x297A2D39 & _WORD
    return word ^ (word >> 15)
