"""What identifies a step: a function made again from equal parts finds the graph that was captured of it."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch

from fedcli import toy
from fedcli.core.graphs import Unrepeatable, find_key, graph_key


@dataclass(frozen=True)
class Options:
    weight: float

    def scaled(self, x):
        return self.weight * x

    def shifted(self, x):
        return self.weight + x


def make_loss(network, weight=0.5, constants=(1, {"a": None}), start=1, captured=None):
    """An objective that is closed over what it is given, and has it in its defaults and as a bound argument."""
    scale = 2.0

    def inner(x):
        return scale * x + Options(weight).weight

    def loss(x, *, start=start):
        return inner(x) + start + len(constants), network, captured

    return partial(loss, weight)


def test_a_function_made_again_from_equal_parts_is_the_same():
    _, fed = toy.federation("fedavg")
    _, other_fed = toy.federation("fedavg")
    key = graph_key(make_loss(fed.network))

    again = graph_key(make_loss(fed.network))
    assert key == again
    assert hash(key) == hash(again)

    changes = [
        {"weight": 0.6},
        {"constants": (1.0, {"a": None})},
        {"constants": (1, {"b": None})},
        {"constants": [1, {"a": None}]},
        {"start": 2},
        {"network": other_fed.network},
        {"captured": Options(0.5)},
    ]
    for change in changes:
        arguments = {"network": fed.network, **change}
        assert graph_key(make_loss(**arguments)) != key
    assert graph_key(lambda x: x) != key

    letters = graph_key(frozenset("ab"))
    assert letters == graph_key(frozenset("ba"))
    assert letters != graph_key(frozenset("a"))


def test_a_method_of_equal_objects_is_the_same():
    key = graph_key(Options(0.5).scaled)
    assert key == graph_key(Options(0.5).scaled)
    assert key != graph_key(Options(0.6).scaled)
    assert key != graph_key(Options(0.5).shifted)


@pytest.mark.parametrize("captured", [torch.zeros(1), object(), partial(print), {"a": torch.zeros(1)}])
def test_what_may_change_has_no_identity(captured):
    with pytest.raises(Unrepeatable):
        graph_key(make_loss(None, captured=captured))


def test_where_shapes_count_a_tree_is_its_structure_and_shapes():
    def tree(shape=(2, 3), name="b", last=None, dtype=torch.float32):
        return graph_key({"a": torch.zeros(shape, dtype=dtype), name: (torch.zeros(1), last)}, shapes=True)

    assert tree() == tree()
    assert tree(shape=(3, 2)) != tree()
    assert tree(dtype=torch.float64) != tree()
    assert tree(name="c") != tree()
    assert tree(last=torch.zeros(1)) != tree()
    assert tree(last=1) != tree()


FACTOR = 0.1


def factor_of_module():
    return FACTOR


@pytest.mark.parametrize(
    "reads", [lambda x: FACTOR * x, lambda x: [FACTOR * y for y in x], lambda x: factor_of_module() * x]
)
def test_a_number_of_the_module_that_has_changed_makes_another_function(reads, monkeypatch):
    key = graph_key(reads)
    assert graph_key(reads) == key
    monkeypatch.setitem(globals(), "FACTOR", 0.2)
    assert graph_key(reads) != key


def test_functions_without_an_end_or_a_value_are_not_kept():
    def recursive(x):
        return recursive(x)

    def early(x):
        return late

    assert find_key((recursive,), ()) is None
    assert find_key((early,), ()) is None
    late = 1
    assert find_key((early,), ()) is not None
