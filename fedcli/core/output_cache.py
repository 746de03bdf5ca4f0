"""What models gave when they were last evaluated, so that one that has not changed is not run again."""

import weakref
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
from torch import Tensor

from fedcli.core.clients import Model
from fedcli.core.trees import leaves


class CachedOutputs(NamedTuple):
    """What a model gave for some images."""

    features: Tensor | None  # [n, D]; None where only the classifier decides
    hits: Tensor  # bool [n], whether the classifier is right
    labels: Tensor  # [n]
    classes: Tensor | None  # [n], the most probable by the classifier; None where nobody asks for them


class _Entry(NamedTuple):
    """Outputs of a model, and whose they are."""

    owners: list[weakref.ref]  # the model's tensors: where one is gone, another may have its id
    outputs: CachedOutputs


class OutputCache:
    """What models gave when they were last evaluated, by the identity and version of their tensors."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Entry] = {}

    def start_anew(self) -> "OutputCache":
        """Begins anew; returns what was cached until now as a cache of its own."""
        earlier = OutputCache()
        earlier._entries = self._entries
        self._entries = {}
        return earlier

    def get(self, model: Model, positions: np.ndarray | None, with_features: bool) -> CachedOutputs | None:
        """Returns the outputs of a model that has not changed since they were put here; None of any other."""
        entry = self._entries.get(self._key(model, positions, with_features))
        if entry is None or any(owner() is None for owner in entry.owners):
            return None
        return entry.outputs

    def put(self, model: Model, positions: np.ndarray | None, outputs: CachedOutputs) -> None:
        """Caches the outputs of a model."""
        owners = [weakref.ref(value) for value in leaves(model)]
        key = self._key(model, positions, outputs.features is not None)
        self._entries[key] = _Entry(owners, outputs)

    @staticmethod
    def _key(model: Model, positions: np.ndarray | None, with_features: bool) -> Hashable:
        versions = tuple((id(value), value._version) for value in leaves(model))
        images = None if positions is None else positions.tobytes()  # None for all test images
        return with_features, images, versions
