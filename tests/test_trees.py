"""Trees by names: taken apart into JSON and tensors, and built again; trees whose dicts of tensors lie in flat ones."""

import json
from typing import NamedTuple

import torch

from fedcli.core.trees import ALIGNMENT, Flat, flatten, from_names, leaves, pack, to_names, tree_map, unpack
from tests.toy_methods import ToyState
from tests.user_errors import raises_user_error


def test_a_tree_goes_through_json_and_comes_back():
    vector = torch.arange(3.0)
    scalar = torch.tensor(7)
    tree = {
        3: (vector, None, 1.5),
        10: [scalar, "word", True],
        "a": {"b/c": vector},
        "a/b": {"c": scalar},
        "empty": {},
        "int": 2**60,
        "state": ToyState({"w": vector}),
    }
    structure, tensors = to_names(tree)
    rebuilt = from_names(json.loads(json.dumps(structure)), tensors, {"ToyState": ToyState})
    assert rebuilt == tree  # its tensors are the same objects
    assert [type(part) for part in rebuilt.values()] == [type(part) for part in tree.values()]
    assert set(tensors) == {"/3/0", "/10/0", "/a/b/c", "/a/b/c'", "/state/params/w"}


def test_another_type_is_refused_with_its_path():
    with raises_user_error("got <class 'set'> at '/a/1'"):
        to_names({"a": [2, {1}]})


# Trees of which dictionaries of tensors lie in one flat tensor each


class ClientTree(NamedTuple):
    """A tree as the engine has it of clients: of tensors of one type, of two types, and nested."""

    params: dict
    buffers: dict
    optimizer: dict


def make_client_tree(leading_axes=()):
    """Returns the tree of a client, or of several with these leading axes."""
    draws = torch.Generator().manual_seed(0)
    shapes = {"odd": (3,), "weight": (4, 2, 2), "bias": (16,), "scalar": ()}
    params = {name: torch.randn((*leading_axes, *shape), generator=draws) for name, shape in shapes.items()}
    buffers = {"mean": params["odd"] + 1, "count": torch.zeros(leading_axes, dtype=torch.int64)}
    momentum = (torch.zeros(leading_axes), tree_map(torch.square, params))
    return ClientTree(params, buffers, {"sgd": momentum, "none": ()})


def assert_equal(tree, expected):
    """Asserts that two trees have the same leaves."""
    for value, expected_value in zip(leaves(tree), leaves(expected), strict=True):
        assert torch.equal(value, expected_value)


def test_a_tree_that_is_packed_and_unpacked_is_the_tree():
    flat = flatten(make_client_tree())
    for leading_axes in ((), (5,)):
        tree = make_client_tree(leading_axes)

        packed = pack(tree, flat, len(leading_axes))

        size = 3 + 16 + 16 + 1 + 12  # of the tensors, and what fills them up
        assert size % ALIGNMENT == 0
        assert packed.params[""].shape == (*leading_axes, size)
        _, squares = packed.optimizer["sgd"]
        assert squares[""].shape == (*leading_axes, size)
        assert set(packed.buffers) == {"mean", "count"}  # of two types

        unpacked = unpack(packed, flat)
        assert list(unpacked.params) == list(tree.params)
        assert_equal(unpacked, tree)


def test_what_is_changed_in_a_flat_is_changed_in_its_views():
    params = flatten(make_client_tree()).params
    assert isinstance(params, Flat)
    params.flat.mul_(2)
    assert_equal(dict(params), tree_map(lambda value: 2 * value, make_client_tree().params))
    assert pack(params, params)[""] is params.flat  # not a copy


def test_a_dict_that_is_no_longer_flat_is_copied_in_the_order_of_the_flat_one():
    params = flatten(make_client_tree()).params
    other = {name: params[name] + 1 for name in reversed(params)}
    unpacked = unpack(pack(other, params), params)
    assert_equal(dict(unpacked), tree_map(lambda value: value + 1, make_client_tree().params))
