"""Trees of tensors: nested dicts, tuples and NamedTuples, which hold the state of clients and servers.

A stacked tree has the client axis first: every leaf is `[K, ...]`. Parameters may be a `Flat`, of which one operation
reaches all.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from fedcli.errors import UserError

Tree = Any  # a Tensor, None, or a dict, tuple, list or NamedTuple of trees
ALIGNMENT = 16  # values, 64 bytes of float32, at whose multiples each client's row of a stacked flat tensor begins


def map_children(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Makes a dict, tuple or list like `tree` of `function(child, ...)` over the children of trees."""
    if isinstance(tree, dict):
        mapped = {}
        for key, child in tree.items():
            counterparts = [other[key] for other in others]
            mapped[key] = function(child, *counterparts)
        return mapped
    children = [function(*column) for column in zip(tree, *others, strict=True)]
    return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)


def tree_map(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Returns the tree of `function(leaf, ...)` over trees of one structure; None stays None."""
    if tree is None:
        return None
    if isinstance(tree, dict | tuple | list):
        return map_children(partial(tree_map, function), tree, *others)
    return function(tree, *others)


def leaves(tree: Tree) -> list[Any]:
    """Returns the leaves of a tree in order, None left out."""
    collected: list[Any] = []
    tree_map(collected.append, tree)
    return collected


def copy_tree(tree: Tree) -> Tree:
    """Returns the tree with copies of its tensors, which are contiguous."""
    return tree_map(_copy, tree)


def write_into(old: Tree, new: Tree) -> None:
    """Writes the values of one tree into the tensors of another one."""
    tree_map(_write, old, new)


def _copy(leaf: Any) -> Any:
    return leaf.clone(memory_format=torch.contiguous_format) if isinstance(leaf, Tensor) else leaf


def _write(old: Any, new: Any) -> None:
    if isinstance(old, Tensor):
        old.copy_(new)


def copies(tree: Tree, count: int) -> Tree:
    """Makes a stacked tree `[K, ...]` of one tree for each of `count` clients; they share its memory."""
    return tree_map(lambda leaf: leaf.expand(count, *leaf.shape), tree)


def stack(trees: Sequence[Tree]) -> Tree:
    """Makes a stacked tree `[K, ...]` of the trees of K clients."""
    return tree_map(lambda *parts: torch.stack(parts), *trees)


def concatenate(trees: Sequence[Tree]) -> Tree:
    """Makes one stacked tree of those of several groups of clients."""
    return trees[0] if len(trees) == 1 else tree_map(lambda *parts: torch.cat(parts), *trees)


def fill_missing_terms(terms: Sequence[dict[str, Tensor]], zeros: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """Gives several groups' terms `[K]` the names that they lack, as clients without a step do, with their zeros."""
    names = dict.fromkeys(name for group in terms for name in group)
    completed = []
    for group, zero in zip(terms, zeros, strict=True):
        completed.append({name: group.get(name, zero) for name in names})
    return completed


def num_stacked(tree: Tree) -> int:
    """Returns K, of how many clients a stacked tree is."""
    return len(leaves(tree)[0])


def select(tree: Tree, index: int | slice | Tensor | np.ndarray) -> Tree:
    """Returns the entries `index` along the client axis of a stacked tree."""
    return tree_map(lambda leaf: leaf[index], tree)


def select_axes(tree: Tree, axes: Tree, index: int | slice) -> Tree:
    """Selects from the stacked parts of a tree: `axes` is 0 (stacked), None (shared), or a tree of these."""
    if axes is None or tree is None:
        return tree
    if axes == 0:
        return select(tree, index)
    return map_children(lambda part, axis: select_axes(part, axis, index), tree, axes)


def count_floats(tree: Tree) -> int:
    """Counts the floating-point values in a tree, without integers (class counts) and masks."""
    return sum(leaf.numel() for leaf in leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point())


class StoredStates(Mapping[int, Tree], ABC):
    """What clients keep, by their ids, where a store has it: a file of the tree names it and does not hold it."""

    @abstractmethod
    def rows(self) -> list[tuple]:
        """Returns what a file names each client's state by."""


def to_device(tree: Tree, device: torch.device | str) -> Tree:
    """Returns a tree on another device, where its tensors are parts of one copy for each type of number.

    Python waits once for each type on the way to the host, and not at all on the way back.
    """
    device = torch.device(device)
    elsewhere = [tensor for tensor in leaves(tree) if tensor.device.type != device.type]
    kinds = dict.fromkeys((tensor.device, tensor.dtype) for tensor in elsewhere)
    moved: dict[int, Tensor] = {}  # by the id of the tensor elsewhere
    for kind in kinds:
        group = [tensor for tensor in elsewhere if (tensor.device, tensor.dtype) == kind]
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        if flat.device.type == "cpu":
            flat = flat.pin_memory()
        flat = flat.to(device, non_blocking=device.type != "cpu")
        parts = flat.split([tensor.numel() for tensor in group])
        for tensor, part in zip(group, parts, strict=True):
            moved[id(tensor)] = part.view(tensor.shape)
    return tree_map(lambda tensor: moved.get(id(tensor), tensor), tree)


def to_names(tree: Tree) -> tuple[Any, dict[str, Tensor]]:
    """Takes a tree apart into a structure for JSON and its tensors by path; `from_names` is the inverse.

    The tree is of tensors, numbers, texts, None, dicts, tuples, lists, NamedTuples and what a store keeps. A path is
    as `/params/conv.weight`.
    """
    tensors: dict[str, Tensor] = {}

    def walk(part: Tree, path: str) -> Any:
        if isinstance(part, float) and not math.isfinite(part):
            raise UserError(f"a number of a tree must be finite (got {part} at '{path}'); make a tensor of it.")
        if isinstance(part, int | float | str | None):
            return part
        if isinstance(part, Tensor):
            while path in tensors:  # as of {"a": {"b/c": …}, "a/b": {"c": …}}
                path += "'"
            tensors[path] = part
            return {"tensor": path}
        if isinstance(part, dict):
            for key in part:
                _refuse_key(key, path)
            return {"dict": [[key, walk(value, f"{path}/{key}")] for key, value in part.items()]}
        if isinstance(part, tuple | list):
            children = _children_by_field(part)
            return {type(part).__name__: [walk(child, f"{path}/{field}") for field, child in children.items()]}
        if isinstance(part, StoredStates):
            return {"kept": part.rows()}
        raise UserError(f"a tree holds tensors, numbers, texts, dicts, tuples, lists (got {type(part)} at '{path}').")

    return walk(tree, ""), tensors


def _children_by_field(part: Any) -> dict[Any, Tree]:
    """Returns the children of a NamedTuple by its fields, and those of another tuple or a list by their numbers."""
    if hasattr(part, "_fields"):
        return part._asdict()
    return dict(enumerate(part))


def _refuse_key(key: Any, path: str) -> None:
    """Refuses a key of a dict at a path that JSON would not give back as it is."""
    if not isinstance(key, str | int):
        raise UserError(
            f"the keys of a dict in a tree must be texts or whole numbers (got {key!r} of {type(key)} at '{path}'); "
            "write int(client) for a client's number out of an array or tensor."
        )


def from_names(structure: Any, tensors: Mapping[str, Tensor], types: Mapping[str, Callable]) -> Tree:
    """Builds the tree that `to_names` took apart.

    `types` holds the NamedTuple classes by name, and under `kept` what makes a store's part of its rows.

    Raises:
        KeyError, TypeError, ValueError: If it is no such structure, or a tensor is lacking, left over or out of place.
    """
    builder = _Builder(tensors, types)
    tree = builder.build(structure, "")
    if builder.unused:
        raise ValueError(f"{', '.join(builder.unused):.80} left over")
    return tree


class _Builder:
    """Builds a tree of tensors by path, of which `unused` have no place yet, and NamedTuples of these types."""

    def __init__(self, tensors: Mapping[str, Tensor], types: Mapping[str, Callable]):
        self.unused = dict(tensors)
        self._paths: set[str] = set()  # of the tensors that have a place
        self._types = types

    def build(self, structure: Any, path: str) -> Tree:
        """Builds the part of the tree at a path."""
        if isinstance(structure, int | float | str | None):
            return structure
        if not isinstance(structure, dict):
            raise TypeError(f"{structure!r:.80} at '{path}'")
        [(kind, content)] = structure.items()
        if kind == "tensor":
            return self._tensor(content, path)
        if not isinstance(content, list):
            raise TypeError(f"{content!r:.80} in a {kind} at '{path}'")
        if kind == "kept":
            return self._types[kind](*content)
        if kind != "dict":
            return self._sequence(kind, content, path)
        built = {key: self.build(value, f"{path}/{key}") for key, value in content}
        if len(built) < len(content):
            raise ValueError(f"a name twice at '{path}'")
        return built

    def _tensor(self, name: Any, path: str) -> Tensor:
        """Takes the tensor at a path, which is its name."""
        while path in self._paths:  # as in `to_names`
            path += "'"
        self._paths.add(path)
        if name != path:
            raise ValueError(f"{name!r:.80} at '{path}'")
        return self.unused.pop(path)

    def _sequence(self, kind: str, content: list, path: str) -> Tree:
        """Builds a list, a tuple or a NamedTuple, whose last fields older files may lack."""
        is_plain = kind in ("list", "tuple")
        fields = range(len(content)) if is_plain else getattr(self._types[kind], "_fields", ())
        if len(content) > len(fields):
            raise ValueError(f"{len(content)} parts of '{kind}' at '{path}'")
        parts = [self.build(part, f"{path}/{field}") for field, part in zip(fields, content, strict=False)]
        if kind == "list":
            return parts
        if kind == "tuple":
            return tuple(parts)
        return self._types[kind](*parts)


class Flat(dict):
    """Tensors by name that are views of one tensor `[..., size]`.

    Attributes:
        flat: The tensor, filled up with zeros to a multiple of `ALIGNMENT`.
        shapes: Shapes of the tensors without their common leading axes.
    """

    def __init__(self, flat: Tensor, shapes: Mapping[str, torch.Size]):
        sizes = [shape.numel() for shape in shapes.values()]
        *parts, _ = flat.split([*sizes, flat.shape[-1] - sum(sizes)], -1)  # the last one is the filling
        leading_axes = flat.shape[:-1]
        super().__init__()
        for (name, shape), part in zip(shapes.items(), parts, strict=True):
            self[name] = part.view((*leading_axes, *shape))
        self.flat = flat
        self.shapes = shapes


def _take_flat(tree: Flat) -> tuple[list[Tensor], Mapping[str, torch.Size]]:
    return [tree.flat], tree.shapes


def _make_flat(tensors: Iterable[Any], shapes: Any) -> Flat:
    (flat,) = tensors
    return Flat(flat, shapes)


# For PyTorch's vmap and grad, a Flat in what a function returns is its flat tensor.
register_pytree_node(Flat, _take_flat, _make_flat)


def flatten(tree: Tree) -> Tree:
    """Makes a `Flat` of every dict in a tree with several tensors of one floating type."""
    if isinstance(tree, dict) and len(tree) > 1:
        types = {getattr(child, "dtype", None) for child in tree.values()}
        if types in ({torch.float32}, {torch.float64}):
            shapes = {name: value.shape for name, value in tree.items()}
            return Flat(_concatenate_flat(tree, shapes, 0), shapes)
    return map_children(flatten, tree) if isinstance(tree, dict | tuple | list) else tree


def pack(tree: Tree, template: Tree, num_leading_axes: int = 0) -> Tree:
    """Replaces every dict for which `template` has a `Flat` by a dict of its flat tensor, copied where it has none.

    `num_leading_axes` are those that `template` has not: 1 for stacked trees.
    """
    if isinstance(template, Flat):
        return {"": tree.flat if isinstance(tree, Flat) else _concatenate_flat(tree, template.shapes, num_leading_axes)}
    if not isinstance(template, dict | tuple | list):
        return tree
    return map_children(lambda part, child: pack(child, part, num_leading_axes), template, tree)


def unpack(packed: Tree, template: Tree) -> Tree:
    """Returns the tree that was packed, of views."""
    if isinstance(template, Flat):
        return Flat(packed[""], template.shapes)
    if not isinstance(template, dict | tuple | list):
        return packed
    return map_children(lambda part, child: unpack(child, part), template, packed)


def _concatenate_flat(tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], num_leading_axes: int) -> Tensor:
    """Copies tensors of `shapes` behind `num_leading_axes` more axes into a flat one."""
    parts = [tensors[name].reshape((*tensors[name].shape[:num_leading_axes], -1)) for name in shapes]
    filling = -sum(part.shape[-1] for part in parts) % ALIGNMENT
    if filling:
        parts.append(parts[0].new_zeros((*parts[0].shape[:-1], filling)))
    return torch.cat(parts, -1)
