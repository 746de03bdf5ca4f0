"""Dropout whose masks are drawn from a key that each step is given, and not from torch's random state.

A network of layers drops by `KeyedDropout`. A user's own code that calls torch's functions runs inside `KeyedDraws`.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

KEY = "key"  # what a layer calls the buffer with its key
KEY_ENDING = f".{KEY}"  # of that buffer's name in a network


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
        self.register_buffer(KEY, torch.tensor(0), persistent=False)  # not learned

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x` `[B, ...]`, in training with some values set to 0 and the others divided by 1 - p."""
        if not self.training:
            return x
        shape = (len(x), *[1] * (x.dim() - 1)) if self.whole_examples else x.shape
        dropped = random_words(self.key, self.number, shape) < round(self.p * 2**32)
        return torch.where(dropped, 0.0, x / (1 - self.p))


class KeyedDraws(nn.Module, TorchFunctionMode):
    """The context of a forward pass in which the functions of torch in `KEYED` draw from a key.

    Attention is computed by its plain formula: torch's kernels draw their own dropout, and vmap runs them client by
    client.

    Attributes:
        key: As of `KeyedDropout`.
        used: Whether any of the functions has been called.
    """

    key: Tensor

    def __init__(self):
        super().__init__()
        self.used = False
        self._draws = 0
        self.register_buffer(KEY, torch.tensor(0), persistent=False)

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
        words = random_words(self.key, -1 - self._draws, ())  # the layers of `KeyedDropout` count from 0
        for size in shape:
            words = _mix(words[..., None] ^ torch.arange(size, device=words.device))
        return words

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Drops values, as `F.dropout`."""
        return self._drop(x, x.shape, p, training, inplace)

    def channel_dropout(
        self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, num_spatial: int
    ) -> Tensor:
        """Drops whole channels, as `F.dropout1d`, `F.dropout2d` and `F.dropout3d`, of so many spatial axes.

        They take `[C, ...]` for a single example without a batch, but for `F.dropout2d`: its three axes are
        `[B, C, L]`.
        """
        is_batched = num_spatial == 2 or x.dim() == num_spatial + 2
        num_kept = 2 if is_batched else 1
        shape = torch.Size([*x.shape[:num_kept], *[1] * (x.dim() - num_kept)])
        return self._drop(x, shape, p, training, inplace)

    def _drop(self, x: Tensor, shape: torch.Size, p: float, training: bool, inplace: bool) -> Tensor:
        """Drops what a mask of a shape that broadcasts to that of `x` stands for."""
        if not training or p == 0:
            return x
        dropped = self.words(shape) < round(p * 2**32)
        keep_probability = 1 - p
        result = torch.where(dropped, 0.0, x / (keep_probability or 1))
        return x.copy_(result) if inplace else result

    def attention(  # noqa: PLR0913  # torch's function has these arguments
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Returns softmax(Q K^T * scale + mask) V with dropout of the weights, as `F.scaled_dot_product_attention`."""
        if enable_gqa:  # several heads of the query, [..., H, L, D], share one of key and value
            num_sharing = query.shape[-3] // key.shape[-3]
            key = key.repeat_interleave(num_sharing, -3)
            value = value.repeat_interleave(num_sharing, -3)
        if scale is None:
            width = query.shape[-1]
            scale = width**-0.5
        scores = query @ key.mT * scale
        if is_causal:
            causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            if attn_mask is None:
                attn_mask = causal
            elif attn_mask.dtype == torch.bool:
                attn_mask = attn_mask & causal
            else:
                attn_mask = torch.where(causal, attn_mask, -torch.inf)
        if attn_mask is None:
            weights = scores.softmax(-1)
        elif attn_mask.dtype == torch.bool:
            lowest = torch.finfo(scores.dtype).min
            weights = torch.where(attn_mask, torch.where(attn_mask, scores, lowest).softmax(-1), 0.0)
        else:
            weights = (scores + attn_mask).softmax(-1)
        return self.dropout(weights, dropout_p) @ value

    def multi_head_attention(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Calls `F.multi_head_attention_forward`, with `dropout` and `attention` in the place of torch's.

        This function calls both inside, out of this mode's sight: a mode is off while it handles a call. If it were
        switched on again, the function would hand its own call back to the mode, in its first line. So a copy of it is
        called, which knows our functions by the names of torch's.
        """
        with_keyed_draws = copy_with_names(
            F.multi_head_attention_forward,
            dropout=self.dropout,
            scaled_dot_product_attention=self.attention,
            has_torch_function=lambda tensors: False,  # the question in its first line
        )
        return with_keyed_draws(*arguments, **options)


def copy_with_names(function: Callable, **replacements: Any) -> Callable:
    """Returns a copy of a Python function that finds other things under some of the names that it looks up.

    A function looks up what it does not define itself in the dict of its module. The copy has the same code and its own
    dict, the module's with `replacements`. The function and its module stay as they are, for other threads too.
    """
    assert isinstance(function, FunctionType)  # one of C has no such dict
    names = {**function.__globals__, **replacements}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


KEYED: dict[Callable, Callable] = {
    F.dropout: KeyedDraws.dropout,
    F.dropout1d: partial(KeyedDraws.channel_dropout, num_spatial=1),
    F.dropout2d: partial(KeyedDraws.channel_dropout, num_spatial=2),
    F.dropout3d: partial(KeyedDraws.channel_dropout, num_spatial=3),
    F.scaled_dot_product_attention: KeyedDraws.attention,
    F.multi_head_attention_forward: KeyedDraws.multi_head_attention,
}

_WORD = 2**32 - 1


def random_words(key: Tensor, number: int, shape: tuple[int, ...]) -> Tensor:
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
