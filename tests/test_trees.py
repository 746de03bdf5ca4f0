"""Trees by names: taken apart into JSON and tensors, and built again; trees whose dicts of tensors lie in flat ones."""

import json

import pytest
import torch

from fedcli.core.trees import ALIGNMENT, Flat, flatten, from_names, leaves, pack, to_names, tree_map, unpack
from fedcli.errors import UserError
from tests.toys import ClientState


def test_a_tree_goes_through_json_and_comes_back():
    x, y = torch.arange(3.0), torch.tensor(7)
    tree = {
        3: (x, None, 1.5), 10: [y, "word", True], "a": {"b/c": x}, "a/b": {"c": y}, "empty": {}, "int": 2**60,
        "state": ClientState({"w": x}),
    }  # fmt: skip
    structure, tensors = to_names(tree)
    rebuilt = from_names(json.loads(json.dumps(structure)), tensors, {"ClientState": ClientState})
    assert rebuilt == tree  # its tensors are the same objects
    assert [type(part) for part in rebuilt.values()] == [type(part) for part in tree.values()]
    assert set(tensors) == {"/3/0", "/10/0", "/a/b/c", "/a/b/c'", "/state/params/w"}


def test_another_type_is_refused_with_its_path():
    with pytest.raises(UserError, match=r"got <class 'set'> at '/a/1'"):
        to_names({"a": [2, {1}]})


# Flat ones


def tree(lead=()):
    draw = torch.Generator().manual_seed(0)
    sizes = {"odd": (3,), "weight": (4, 2, 2), "bias": (16,), "scalar": ()}
    params = {name: torch.randn((*lead, *size), generator=draw) for name, size in sizes.items()}
    mixed = {"mean": params["odd"] + 1, "count": torch.zeros(lead, dtype=torch.int64)}
    return params, mixed, {"sgd": (torch.zeros(lead), tree_map(torch.square, params)), "none": ()}


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(leaves(one), leaves(other), strict=True))


def test_a_tree_that_is_packed_and_unpacked_is_the_tree():
    for lead in ((), (5,)):
        given, like = tree(lead), flatten(tree())
        packed = pack(given, like, len(lead))
        size = 3 + 16 + 16 + 1 + 12  # of the tensors, and what fills them up
        assert size % ALIGNMENT == 0
        assert packed[0][""].shape == packed[2]["sgd"][1][""].shape == (*lead, size)
        assert set(packed[1]) == {"mean", "count"}  # of two types
        back = unpack(packed, like)
        assert list(back[0]) == list(given[0])
        assert equal(back, given)


def test_what_is_changed_in_a_flat_is_changed_in_its_views():
    flat = flatten(tree())[0]
    assert isinstance(flat, Flat)
    flat.flat.mul_(2)
    assert equal(dict(flat), tree_map(lambda value: 2 * value, tree()[0]))
    assert pack(flat, flat)[""] is flat.flat  # not a copy


def test_a_dict_that_is_no_longer_flat_is_copied_in_the_order_of_the_flat_one():
    params = flatten(tree())[0]
    other = dict(reversed([(name, value + 1) for name, value in params.items()]))
    assert equal(dict(unpack(pack(other, params), params)), tree_map(lambda value: value + 1, tree()[0]))
