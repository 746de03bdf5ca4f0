"""Convolutions as products of matrices."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap

from fedcli.core import patches

CASES = [
    {"stride": 2, "padding": 1},
    {"stride": (1, 2), "padding": (2, 0), "dilation": (2, 1)},
    {},
]


def tensors(groups=1):
    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    generator = torch.Generator().manual_seed(0)
    return draw(3, 2, 4, 9, 8), draw(3, 6, 4 // groups, 3, 5), draw(3, 6)  # x, weight and bias of three clients


@pytest.mark.parametrize("options", CASES)
def test_the_product_is_the_convolution(options):
    x, weight, bias = (tensor[0] for tensor in tensors())
    torch.testing.assert_close(patches.convolve(x, weight, bias, **options), F.conv2d(x, weight, bias, **options))
    torch.testing.assert_close(patches.convolve(x, weight, **options), F.conv2d(x, weight, **options))


@pytest.mark.parametrize("options", [*CASES, {"groups": 2}, {"padding": "same"}])
def test_stacked_gradients_are_those_of_the_convolution(options, monkeypatch):
    x, weight, bias = tensors(options.get("groups", 1))
    calls, convolve = [], patches.convolve
    monkeypatch.setattr(patches, "convolve", lambda *given: calls.append(given) or convolve(*given))
    stacked = vmap(grad(lambda w, b, x: F.conv2d(x, w, b, **options).square().sum(), (0, 1)))
    expected = stacked(weight, bias, x)
    assert not calls
    torch.testing.assert_close(patches.by_patches(stacked)(weight, bias, x), expected)
    assert len(calls) == (not {"groups"} & options.keys() and options.get("padding") != "same")
    stacked(weight, bias, x)
    assert len(calls) <= 1  # only within the function


def test_layers_are_reached():
    layer, x = nn.Conv2d(3, 5, 3, padding=1, bias=False), torch.randn(2, 3, 6, 6)
    count = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patches, "convolve", lambda *given: count.append(1) or torch.zeros(()))
        patches.by_patches(layer)(x)
    assert count == [1]
