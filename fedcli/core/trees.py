"""Trees of tensors: nested dicts, tuples and NamedTuples, as the state of clients and servers is kept.

A stacked tree has the client axis first: every leaf is `[K, ...]`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Tree = Any  # a Tensor, None, or a dict, tuple, list or NamedTuple of trees


def rebuild(like: Tree, children: Sequence[Tree]) -> Tree:
    """Makes a dict, tuple or list like another one, of other children."""
    if isinstance(like, dict):
        return dict(zip(like, children, strict=True))
    if hasattr(like, "_fields"):
        return type(like)(*children)
    return type(like)(children)


def _children(tree: Tree) -> list[Tree]:
    return list(tree.values()) if isinstance(tree, dict) else list(tree)


def tree_map(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Returns the tree of `function(leaf, ...)` over trees of one structure; None stays None."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {key: tree_map(function, value, *(other[key] for other in others)) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        columns = zip(*(_children(other) for other in (tree, *others)), strict=True)
        return rebuild(tree, [tree_map(function, *column) for column in columns])
    return function(tree, *others)


def leaves(tree: Tree) -> Iterator[Any]:
    """Yields the leaves of a tree, in the order of its keys; None is left out."""
    if tree is None:
        return
    if isinstance(tree, dict | tuple | list):
        for child in _children(tree):
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
