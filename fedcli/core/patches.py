"""Convolutions of stacked clients as products of matrices.

Stacked by `vmap`, the convolutions of K clients are one convolution in K groups, which a device's library may be slow
at. Written as a product of the weights and the patches of the images they are K products of matrices instead.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedcli.core.trees import Tree


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
) -> Tensor:
    """A convolution in one group as a product of two matrices, of one client.

    Args:
        x: `[B, C, H, W]`.
        weight: `[O, C, kernel height, kernel width]`.
        bias: `[O]`.
        stride: Of both directions, or of each.
        padding: Likewise, zeros.
        dilation: Likewise.

    Returns:
        `[B, O, H', W']`.
    """
    stride, padding, dilation = _pair(stride), _pair(padding), _pair(dilation)
    kernel = tuple(weight.shape[2:])
    patches = F.unfold(x, kernel, dilation, padding, stride)  # [B, C kh kw, H' W']
    product = weight.flatten(1) @ patches.transpose(0, 1).flatten(1)  # [O, B H' W']; all images in one product
    sides = zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
    size = [(side + 2 * pad - gap * (width - 1) - 1) // step + 1 for side, width, step, pad, gap in sides]
    result = product.reshape(len(weight), len(x), *size).transpose(0, 1)
    return result if bias is None else result + bias[:, None, None]


def by_patches(function: Callable[..., Tree]) -> Callable[..., Tree]:
    """The same function, its convolutions in one group done by `convolve`."""

    def run(*arguments: Tree) -> Tree:
        with _Patches():
            return function(*arguments)

    return run


class _Patches(TorchFunctionMode):
    """Puts `convolve` in the place of `torch.conv2d`; in several groups, or with padding by name, that stays."""

    def __torch_function__(self, called: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if called is torch.conv2d:
            return self._convolve(*args, **(kwargs or {}))
        return called(*args, **(kwargs or {}))

    @staticmethod
    def _convolve(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1) -> Tensor:
        if groups > 1 or isinstance(padding, str):
            return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
        return convolve(x, weight, bias, stride, padding, dilation)


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)
