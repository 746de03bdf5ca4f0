"""The parts of a model that may stay with a client: its head and its batch normalisation, found by what they are.

A part is the names of its parameters and buffers, as they stand in `Network.params` and `Network.buffers`. It is read
off the modules and never off the names, so that it is right for a user's own network too: the norm of a residual
block's shortcut may be called `downsample.1`.
"""

from collections.abc import Collection
from typing import NamedTuple, Protocol, cast

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedcli.core.clients import Buffers, Model, Params, Tensors
from fedcli.core.network import Network


def head_names(network: Network) -> frozenset[str]:
    """Returns the names of the head's parameters; the head is the last linear layer, which the network knows itself."""
    return _names_in(network.module, [cast(nn.Module, network.module.head)])


def batchnorm_names(network: Network) -> frozenset[str]:
    """Returns the names of all scales, shifts and running statistics of batch normalisation; none without such layers.

    Other norms are not among them: group and layer normalisation know nothing of other images.
    """
    norms = [module for module in network.module.modules() if isinstance(module, _BatchNorm)]
    return _names_in(network.module, norms)


def _names_in(module: nn.Module, layers: Collection[nn.Module]) -> frozenset[str]:
    """Returns the names under which `module` has the parameters and buffers that lie directly in some of its layers."""
    names = set()
    for prefix, layer in module.named_modules():
        if any(layer is chosen for chosen in layers):
            names |= {f"{prefix}.{name}" for name, _ in layer.named_parameters(recurse=False)}
            names |= {f"{prefix}.{name}" for name, _ in layer.named_buffers(recurse=False)}
    return frozenset(names)


class HasModel(Protocol):
    """Whatever has the tensors of a model: a `Model`, a `Client`, or what a client keeps."""

    @property
    def params(self) -> Params:
        """Its parameters."""

    @property
    def buffers(self) -> Buffers:
        """Its buffers."""


class ModelParts(NamedTuple):
    """A model in two parts."""

    named: Model
    rest: Model


def split_model(model: HasModel, names: Collection[str]) -> ModelParts:
    """Cuts a model in two: the parameters and buffers that are named, and the rest."""
    params = split(model.params, names)
    buffers = split(model.buffers, names)
    return ModelParts(Model(params.named, buffers.named), Model(params.rest, buffers.rest))


class SplitTensors(NamedTuple):
    """Parameters or buffers in two parts."""

    named: Tensors
    rest: Tensors


def split(tree: Tensors, names: Collection[str]) -> SplitTensors:
    """Cuts parameters or buffers in two: those that are named, and the rest, each in its order."""
    named = {name: value for name, value in tree.items() if name in names}
    rest = {name: value for name, value in tree.items() if name not in names}
    return SplitTensors(named, rest)
