"""Trees of tensors: nested dicts, tuples and NamedTuples, as the state of clients and servers is kept.

A stacked tree has the client axis first: every leaf is `[K, ...]`.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedcli.errors import UserError

Tree = Any  # a Tensor, None, or a dict, tuple, list or NamedTuple of trees
TYPE_NAME = operator.attrgetter("__name__")


def rebuild(like: Tree, children: Sequence[Tree]) -> Tree:
    """Makes a dict, tuple or list like another one, of other children."""
    if isinstance(like, dict):
        return dict(zip(like, children, strict=True))
    if hasattr(like, "_fields"):
        return type(like)(*children)
    return type(like)(children)


def tree_map(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Returns the tree of `function(leaf, ...)` over trees of one structure; None stays None."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {key: tree_map(function, value, *(other[key] for other in others)) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return rebuild(tree, [tree_map(function, *column) for column in zip(tree, *others, strict=True)])
    return function(tree, *others)


def leaves(tree: Tree) -> Iterator[Any]:
    """Yields the leaves of a tree, in the order of its keys; None is left out."""
    if tree is None:
        return
    if isinstance(tree, dict | tuple | list):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(child)
    else:
        yield tree


def stack(trees: Sequence[Tree]) -> Tree:
    """Makes one stacked tree `[K, ...]` of the trees of K clients."""
    return tree_map(lambda *parts: torch.stack(parts), trees[0], *trees[1:])


def concatenate(trees: Sequence[Tree]) -> Tree:
    """Makes one stacked tree of the stacked trees of several groups of clients."""
    return trees[0] if len(trees) == 1 else tree_map(lambda *parts: torch.cat(parts), trees[0], *trees[1:])


def select(tree: Tree, index: int | slice | Tensor) -> Tree:
    """Returns the entries `index` along the client axis of a stacked tree."""
    return tree_map(lambda leaf: leaf[index], tree)


def select_axes(tree: Tree, axes: Tree, index: int | slice) -> Tree:
    """Selects like `select` from the stacked parts of a tree; `axes` says which are.

    It is 0 (client axis first) or None (shared by all clients), or a tree of these for the parts of `tree`.
    """
    if axes is None or tree is None:
        return tree
    if axes == 0:
        return select(tree, index)
    if isinstance(tree, dict):
        return {key: select_axes(value, axes[key], index) for key, value in tree.items()}
    return rebuild(tree, [select_axes(part, axis, index) for part, axis in zip(tree, axes, strict=True)])


def count_floats(tree: Tree) -> int:
    """Counts the floating-point values in a tree; integers (class counts) and masks do not count."""
    return sum(leaf.numel() for leaf in leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point())


def stored(state: Any) -> dict[str, Mapping]:
    """Returns the fields of a server's state that a store keeps; a client's part is read when it is asked for."""
    parts = zip(getattr(state, "_fields", ()), state, strict=False)
    return {name: part for name, part in parts if isinstance(part, Mapping) and not isinstance(part, dict)}


def to_names(tree: Tree, name_type: Callable[[type], str] = TYPE_NAME) -> tuple[Any, dict[str, Tensor]]:
    """Takes a tree apart into a structure that JSON can hold and its tensors by name; `from_names` is the inverse.

    Args:
        tree: Of tensors, numbers, texts, None, dicts, tuples, lists, NamedTuples and what a store keeps.
        name_type: Gives a NamedTuple class the name by which `from_names` finds it.

    Returns:
        The structure, and the tensors by their paths in the tree, as `/params/conv.weight`.
    """
    tensors: dict[str, Tensor] = {}

    def walk(part: Tree, path: str) -> Any:
        if part is None or isinstance(part, bool | int | float | str):
            return part
        if isinstance(part, Tensor):
            while path in tensors:  # as of {"a": {"b/c": …}, "a/b": {"c": …}}
                path += "'"
            tensors[path] = part
            return {"tensor": path}
        if isinstance(part, dict):
            return {"dict": [[key, walk(value, f"{path}/{key}")] for key, value in part.items()]}
        if isinstance(part, tuple | list):
            fields = getattr(part, "_fields", range(len(part)))
            name = name_type(type(part)) if hasattr(part, "_fields") else type(part).__name__
            return {name: [walk(value, f"{path}/{field}") for field, value in zip(fields, part, strict=True)]}
        if isinstance(part, Mapping):
            return {"kept": part.rows()}
        raise UserError(f"a tree holds tensors, numbers, texts, dicts, tuples, lists (got {type(part)} at '{path}').")

    return walk(tree, ""), tensors


def from_names(structure: Any, tensors: Mapping[str, Tensor], types: Mapping[str, Callable]) -> Tree:
    """Builds the tree that `to_names` took apart.

    Args:
        structure: As `to_names` returned it, or as JSON read it back.
        tensors: By name.
        types: The NamedTuple classes by name, and under `kept` what makes a store's part of its rows.
    """
    if not isinstance(structure, dict):
        return structure
    [(kind, content)] = structure.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: from_names(part, tensors, types) for key, part in content}
    parts = [from_names(part, tensors, types) for part in content]
    return parts if kind == "list" else tuple(parts) if kind == "tuple" else types[kind](*parts)
