"""Trees by names: taken apart into JSON and tensors, and built again."""

import json

import pytest
import torch

from fedcli.core.trees import from_names, to_names
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
