"""Two networks that a client trains at the same time, as one: a private and a shared one."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedcli.core.batches import Batch
from fedcli.core.clients import Buffers, Client, Model, Network, Output, Params, Tensors
from fedcli.core.optimizers import clip_factor

# What the names of a network's tensors begin with while both are trained.
PRIVATE = "private."
SHARED = "shared."


class AnyModel(Protocol):
    """A model with whatever else a client keeps or trains."""

    @property
    def params(self) -> Params:
        """Its parameters."""

    @property
    def buffers(self) -> Buffers:
        """Its buffers."""


def joined(private: Tensors, shared: Tensors) -> Tensors:
    """Returns the tensors of both networks in one dict, told apart by the beginnings of their names."""
    both = {PRIVATE + name: value for name, value in private.items()}
    return both | {SHARED + name: value for name, value in shared.items()}


def part(tree: Tensors, prefix: str) -> Tensors:
    """Returns the tensors of one network under their own names."""
    return {name.removeprefix(prefix): value for name, value in tree.items() if name.startswith(prefix)}


class Pair(NamedTuple):
    """The models of both networks, stacked or not."""

    private: Model
    shared: Model


def joined_models(private: AnyModel, shared: AnyModel) -> Client:
    """Returns clients that train both of their models as one."""
    return Client(joined(private.params, shared.params), joined(private.buffers, shared.buffers))


def taken_apart(both: Client) -> Pair:
    """Returns the two models that clients have trained as one; what belongs to neither is left out."""
    private = Model(part(both.params, PRIVATE), part(both.buffers, PRIVATE))
    shared = Model(part(both.params, SHARED), part(both.buffers, SHARED))
    return Pair(private, shared)


def names_of_both(private: Network, shared: Network) -> list[str]:
    """Returns the names that the parameters of both networks have while they are trained as one."""
    return list(joined(private.params, shared.params))


def outputs_of_both(
    private: Network, shared: Network, params: Params, buffers: Buffers, batch: Batch
) -> tuple[Output, Output]:
    """Returns what the private and the shared network give for a batch, by the tensors of both in one dict."""
    of_private = private(part(params, PRIVATE), part(buffers, PRIVATE), batch.x, batch.mask)
    of_shared = shared(part(params, SHARED), part(buffers, SHARED), batch.x, batch.mask)
    return of_private, of_shared


class _Clip(torch.autograd.Function):
    """The tensors it is given; the gradient by all of them together comes back no longer than a norm."""

    generate_vmap_rule = True

    @staticmethod
    def forward(max_norm: float, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.max_norm, *_ = inputs

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        factor = clip_factor(norm, ctx.max_norm)
        return None, *(grad * factor for grad in grads)


def clipped(params: Params, max_norm: float) -> Params:
    """Returns the same parameters; the gradient that reaches them, all together, is shortened to `max_norm`."""
    return dict(zip(params, _Clip.apply(max_norm, *params.values()), strict=True))


def clipped_apart(params: Params, max_norm: float) -> Params:
    """Returns the parameters of both networks; the gradient that reaches either's is shortened to `max_norm`."""
    return joined(clipped(part(params, PRIVATE), max_norm), clipped(part(params, SHARED), max_norm))
