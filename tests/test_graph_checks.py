"""Whether two results of a step agree, by which a graph is checked."""

import pytest
import torch

from fedcli.core.clients import Client
from fedcli.core.graphs import TOLERANCE, StepState, agree


def before_and_after(dtype):
    """Clients and totals before a step, and after it; one of the parameters is large and hardly moves."""
    clients = Client(
        params={"a": torch.linspace(-1, 1, 9, dtype=dtype), "b": torch.full((4,), 10.0, dtype=dtype)},
        buffers={"count": torch.tensor(3)},
        optimizer={"local": {"velocity": torch.ones(3, dtype=dtype)}},
        memory={"least": torch.tensor([torch.inf, 1.0], dtype=dtype)},
    )
    params = {"a": clients.params["a"] - 1e-3, "b": clients.params["b"] * (1 - 1e-7)}
    stepped = clients._replace(params=params, buffers={"count": torch.tensor(4)})
    before = StepState(clients, {"loss": torch.zeros((), dtype=dtype)})
    after = StepState(stepped, {"loss": torch.ones((), dtype=dtype)})
    return before, after


def changed(result, part, name, change):
    """Clients and totals with one value of one part of them changed."""
    clients, totals = result
    if part == "totals":
        return result._replace(results={name: change(totals[name])})
    values = getattr(clients, part)
    if part == "optimizer":
        optimizer = {"local": {name: change(values["local"][name])}}
        return result._replace(updated=clients._replace(optimizer=optimizer))
    return result._replace(updated=clients._replace(**{part: {**values, name: change(values[name])}}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_differs_by_rounding_agrees(dtype):
    before, after = before_and_after(dtype)
    assert agree(after, after, before)
    share = 0.3 * TOLERANCE[dtype]
    nearly = changed(after, "params", "a", lambda value: value + share * 1e-3)
    assert agree(nearly, after, before)
    shifted = changed(after, "params", "b", lambda value: value * (1 + torch.finfo(dtype).eps))
    assert agree(shifted, after, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("part", "name", "change"),
    [
        pytest.param(
            "params", "a", lambda value: value + 5e-5, id="parameter a twentieth off"
        ),  # a twentieth of the way, 1e-4 of the parameters
        pytest.param("params", "a", lambda value: value * torch.nan, id="parameter NaN"),
        pytest.param("optimizer", "velocity", torch.zeros_like, id="velocity 0"),
        pytest.param("totals", "loss", lambda value: 2 * value, id="total doubled"),
        pytest.param("buffers", "count", lambda value: value - 1, id="count one less"),
        pytest.param("memory", "least", lambda value: value - 1e-3, id="memory a thousandth off"),
    ],
)
def test_what_differs_by_more_than_rounding_does_not_agree(part, name, change, dtype):
    before, after = before_and_after(dtype)
    assert not agree(changed(after, part, name, change), after, before)
