"""A network as a pure function of its parameters and buffers."""

import copy
import threading
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from fedcli.core.clients import Buffers, Model, Params, Tensors
from fedcli.core.switches import set_to, under_vmap
from fedcli.core.trees import pack, tree_map, unpack
from fedcli.errors import first_line


class NetworkOutput(NamedTuple):
    """What a network gives for a batch."""

    features: Tensor  # [B, D]
    logits: Tensor  # [B, C]
    buffers: Buffers  # the buffers after this batch


class _Slot(NamedTuple):
    """Where a layer keeps one of its tensors."""

    tensors: dict[str, Any]  # the layer's own dict of parameters or of buffers
    key: str  # of the tensor there


class _CopyOfThread(threading.local):
    """A thread's own copy of a network's module.

    Attributes:
        module: The copy; None before the thread's first call.
        slots: Where its tensors are kept, by their names in the network.
    """

    def __init__(self) -> None:
        self.module: nn.Module | None = None
        self.slots: dict[str, _Slot] = {}

    def make(self, network: "Network") -> nn.Module:
        """Makes the copy, and returns it."""
        # The tensors are shared, not copied: the copy never uses those that it begins with.
        shared = {id(value): value for value in (*network.module.parameters(), *network.module.buffers())}
        module = copy.deepcopy(network.module, shared)
        for name in (*network.params, *network.buffers):
            prefix, _, key = name.rpartition(".")
            layer = module.get_submodule(prefix)
            self.slots[name] = _Slot(layer._parameters if name in network.params else layer._buffers, key)
        self.module = module
        return module


class Network:
    """A module as a pure function of its parameters and buffers."""

    def __init__(self, module: nn.Module, precision: str, device: torch.device):
        self.module = module.to(device)
        self.params: Params = {}
        self.frozen: Tensors = {}  # stay in the module
        for name, value in module.named_parameters():
            group = self.params if value.requires_grad else self.frozen
            group[name] = value
        self.buffers = dict(module.named_buffers())
        self.num_parameters = sum(map(Tensor.numel, self.params.values()))
        self.feature_dim = cast(int, module.feature_dim)  # of a `Backbone`
        self._autocast = precision == "bf16"
        self._copy_of_thread = _CopyOfThread()

    def _load(self, tensors: Tensors) -> nn.Module:
        """Puts tensors into this thread's copy of the module until the next call, and returns that copy.

        `torch.func.functional_call` would put the former ones back each time.
        """
        copy_of_thread = self._copy_of_thread
        module = copy_of_thread.module
        if module is None:
            module = copy_of_thread.make(self)
        for name, slot in copy_of_thread.slots.items():
            slot.tensors[slot.key] = tensors[name]
        return module

    def __call__(self, params: Params, buffers: Buffers, x: Tensor, mask: Tensor | None = None, train: bool = True):
        """Returns features, logits and new buffers for a batch of one client.

        Args:
            params: Of the client.
            buffers: Of the client; they are not changed.
            x: `[B, channels, H, W]`.
            mask: `[B]`, False for padding, which must not reach batch statistics.
            train: Use and update batch statistics; otherwise the running ones.
        """
        if train:
            # Copies of a Flat's views, unless vmap runs: there batch normalisation loses what it writes into a view.
            template = None if under_vmap.get() else buffers
            buffers = unpack(tree_map(torch.clone, pack(buffers, template)), template)
        module = self._load({**params, **buffers})
        if module.training != train:
            module.train(train)
        if not self._autocast:
            features, logits = module(x, mask)
            return NetworkOutput(features, logits, buffers)
        with torch.autocast(x.device.type, torch.bfloat16):
            features, logits = module(x, mask)
        return NetworkOutput(features.float(), logits.float(), buffers)


def find_vmap_fault(network: Network, images: Tensor) -> str:
    """Says why vmap cannot train clients of a network together, in a line; empty where it can.

    `images` are two or more, `[B, channels, H, W]`.
    """

    def objective(params: Params, buffers: Buffers) -> tuple[Tensor, Params]:
        output = network(params, buffers, images)
        return output.logits.square().sum(), output.buffers

    params = {name: value.detach() for name, value in network.params.items()}
    two_clients = tree_map(lambda value: torch.stack([value, value]), Model(params, network.buffers))
    gradients = vmap(grad(objective, has_aux=True), randomness="error")
    try:
        with set_to(under_vmap, True):
            gradients(two_clients.params, two_clients.buffers)
    except Exception as error:  # whatever torch makes of it
        cause = error.__cause__ or error  # of the refusal that names the user's file
        return first_line(cause)[:200]
    return ""
