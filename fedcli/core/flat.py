"""Parameters as one tensor: a dict of views of it, so that one operation of an optimizer or a copy reaches them all."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from fedcli.core.trees import Tree, rebuild

ALIGNMENT = 16  # values, 64 bytes of float32: every client's row of a stacked flat tensor begins on such a boundary


class Flat(dict):
    """Tensors by name that are views of one tensor `[..., size]`.

    Attributes:
        flat: The tensor; zeros fill it up to a multiple of `ALIGNMENT`.
        shapes: Of the tensors, without the leading axes that all of them have.
    """

    def __init__(self, flat: Tensor, shapes: Mapping[str, torch.Size]):
        sizes = [shape.numel() for shape in shapes.values()]
        parts = flat.split([*sizes, flat.shape[-1] - sum(sizes)], -1)
        views = zip(shapes.items(), parts, strict=False)
        super().__init__({name: part.view((*flat.shape[:-1], *shape)) for (name, shape), part in views})
        self.flat, self.shapes = flat, shapes


# For PyTorch's vmap and grad, a Flat in what a function returns is its flat tensor.
register_pytree_node(Flat, lambda tree: ([tree.flat], tree.shapes), lambda flat, shapes: Flat(*flat, shapes))


def flatten(tree: Tree) -> Tree:
    """Makes a `Flat` of every dict in a tree whose values are several tensors of one floating type."""
    if isinstance(tree, tuple | list):
        return rebuild(tree, [flatten(child) for child in tree])
    if not isinstance(tree, dict):
        return tree
    types = {value.dtype if isinstance(value, Tensor) else None for value in tree.values()}
    if len(tree) < 2 or len(types) > 1 or not getattr(types.pop(), "is_floating_point", False):
        return {key: flatten(value) for key, value in tree.items()}
    shapes = {name: value.shape for name, value in tree.items()}
    return Flat(_joined(tree, shapes, 0), shapes)


def pack(tree: Tree, like: Tree, lead: int = 0) -> Tree:
    """Replaces every dict for which `like` has a `Flat` by a dict of one entry, its flat tensor.

    Args:
        tree: Of the structure of `like`; there may be other dicts in the places of its `Flat`s, which are copied.
        like: Says which dicts are replaced.
        lead: Leading axes that the tensors have beside those of `like`: 1 for stacked ones.
    """
    if isinstance(like, Flat):
        return {"": tree.flat if isinstance(tree, Flat) else _joined(tree, like.shapes, lead)}
    return _walk(pack, tree, like, lead)


def unpack(packed: Tree, like: Tree) -> Tree:
    """Returns the tree of which `pack` has made this one, of views."""
    return Flat(packed[""], like.shapes) if isinstance(like, Flat) else _walk(unpack, packed, like)


def _walk(function: Any, tree: Tree, like: Tree, *more: Any) -> Tree:
    if isinstance(like, dict):
        return {key: function(tree[key], value, *more) for key, value in like.items()}
    if isinstance(like, tuple | list):
        return rebuild(tree, [function(child, part, *more) for child, part in zip(tree, like, strict=True)])
    return tree


def _joined(tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], lead: int) -> Tensor:
    """Copies tensors of `shapes`, behind `lead` more axes, into a flat one."""
    parts = [tensors[name].reshape((*tensors[name].shape[:lead], -1)) for name in shapes]
    filling = -sum(part.shape[-1] for part in parts) % ALIGNMENT
    if filling:
        parts.append(parts[0].new_zeros((*parts[0].shape[:-1], filling)))
    return torch.cat(parts, -1)
