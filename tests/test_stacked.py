"""Convolutions as products of matrices, and the check of a graph against the step."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap

from fedcli.core import stacked
from fedcli.core.clients import Client

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
    torch.testing.assert_close(stacked.convolve(x, weight, bias, **options), F.conv2d(x, weight, bias, **options))
    torch.testing.assert_close(stacked.convolve(x, weight, **options), F.conv2d(x, weight, **options))


@pytest.mark.parametrize("options", [*CASES, {"groups": 2}, {"padding": "same"}])
def test_stacked_gradients_are_those_of_the_convolution(options, monkeypatch):
    x, weight, bias = tensors(options.get("groups", 1))
    calls, convolve = [], stacked.convolve
    monkeypatch.setattr(stacked, "convolve", lambda *given: calls.append(given) or convolve(*given))
    gradients = vmap(grad(lambda w, b, x: F.conv2d(x, w, b, **options).square().sum(), (0, 1)))
    expected = gradients(weight, bias, x)
    assert not calls
    with stacked.Patches():
        torch.testing.assert_close(gradients(weight, bias, x), expected)
    assert len(calls) == (not {"groups"} & options.keys() and options.get("padding") != "same")
    gradients(weight, bias, x)
    assert len(calls) <= 1  # only within the mode


def test_layers_are_reached():
    layer, x = nn.Conv2d(3, 5, 3, padding=1, bias=False), torch.randn(2, 3, 6, 6)
    count = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stacked, "convolve", lambda *given: count.append(1) or torch.zeros(()))
        with stacked.Patches():
            layer(x)
    assert count == [1]


# Whether two results of a step agree


def results(dtype):
    """Clients and totals before a step, and after it; one of the parameters is large and hardly moves."""
    before = Client(
        {"a": torch.linspace(-1, 1, 9, dtype=dtype), "b": torch.full((4,), 10.0, dtype=dtype)},
        {"count": torch.tensor(3)},
        {"local": ()},
        {"least": torch.tensor([torch.inf, 1.0], dtype=dtype)},
    )
    params = {"a": before.params["a"] - 1e-3, "b": before.params["b"] * (1 - 1e-7)}
    after = before._replace(params=params, buffers={"count": torch.tensor(4)})
    return (before, {"loss": torch.zeros((), dtype=dtype)}), (after, {"loss": torch.ones((), dtype=dtype)})


def changed(state, part, name, change):
    clients, totals = state
    if part == "totals":
        return clients, {**totals, name: change(totals[name])}
    return clients._replace(**{part: {**getattr(clients, part), name: change(getattr(clients, part)[name])}}), totals


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_differs_by_rounding_agrees(dtype):
    before, after = results(dtype)
    assert stacked.agree(after, after, before)
    share = 0.3 * stacked.TOLERANCE[dtype]
    nearly = changed(after, "params", "a", lambda value: value + share * 1e-3)
    assert stacked.agree(nearly, after, before)
    shifted = changed(after, "params", "b", lambda value: value * (1 + torch.finfo(dtype).eps))
    assert stacked.agree(shifted, after, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("part", "name", "change"),
    [
        ("params", "a", lambda value: value + 5e-5),  # a twentieth of the way, 1e-4 of the parameters
        ("params", "a", lambda value: value * torch.nan),
        ("buffers", "count", lambda value: value - 1),
        ("memory", "least", lambda value: value - 1e-3),
        ("totals", "loss", lambda value: value * 0.9),
    ],
)
def test_what_differs_by_more_does_not(part, name, change, dtype):
    before, after = results(dtype)
    assert not stacked.agree(changed(after, part, name, change), after, before)


def test_a_step_that_was_not_taken_is_seen():
    before, after = results(torch.float64)
    assert not stacked.agree(before, after, before)
