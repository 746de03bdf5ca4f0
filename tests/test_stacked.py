"""The check of a graph against the step: whether two results of a step agree."""

import pytest
import torch

from fedcli.core import stacked
from fedcli.core.clients import Client


def results(dtype):
    """Clients and totals before a step, and after it; one of the parameters is large and hardly moves."""
    before = Client(
        {"a": torch.linspace(-1, 1, 9, dtype=dtype), "b": torch.full((4,), 10.0, dtype=dtype)},
        {"count": torch.tensor(3)},
        {"local": {"velocity": torch.ones(3, dtype=dtype)}},
        {"least": torch.tensor([torch.inf, 1.0], dtype=dtype)},
    )
    params = {"a": before.params["a"] - 1e-3, "b": before.params["b"] * (1 - 1e-7)}
    after = before._replace(params=params, buffers={"count": torch.tensor(4)})
    return (before, {"loss": torch.zeros((), dtype=dtype)}), (after, {"loss": torch.ones((), dtype=dtype)})


def changed(state, part, name, change):
    clients, totals = state
    if part == "totals":
        return clients, {name: change(totals[name])}
    values = getattr(clients, part)
    if part == "optimizer":
        return clients._replace(optimizer={"local": {name: change(values["local"][name])}}), totals
    return clients._replace(**{part: {**values, name: change(values[name])}}), totals


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
        ("optimizer", "velocity", torch.zeros_like),
        ("totals", "loss", lambda value: 2 * value),
        ("buffers", "count", lambda value: value - 1),
        ("memory", "least", lambda value: value - 1e-3),
    ],
)
def test_what_differs_by_more_does_not(part, name, change, dtype):
    before, after = results(dtype)
    assert not stacked.agree(changed(after, part, name, change), after, before)
