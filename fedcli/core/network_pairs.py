"""Two networks that a client trains at the same time, as one: a private and a shared one."""

from typing import NamedTuple

import torch
from torch import Tensor

from fedcli.core.batches import Batch
from fedcli.core.clients import Buffers, Client, Model, Params, Tensors
from fedcli.core.model_parts import HasModel
from fedcli.core.network import Network, NetworkOutput
from fedcli.core.optimizers import clip_factor

# What the names of a network's tensors begin with while both are trained.
PRIVATE = "private."
SHARED = "shared."


class TensorPair(NamedTuple):
    """The parameters of both networks, or the buffers of both, each under the network's own names."""

    private: Tensors
    shared: Tensors


def join_tensors(private: Tensors, shared: Tensors) -> Tensors:
    """Returns the tensors of both networks in one dict, told apart by the beginnings of their names."""
    both = {PRIVATE + name: value for name, value in private.items()}
    return both | {SHARED + name: value for name, value in shared.items()}


def separate_tensors(both: Tensors) -> TensorPair:
    """Undoes `join_tensors`; what belongs to neither network is left out."""
    private = {name.removeprefix(PRIVATE): value for name, value in both.items() if name.startswith(PRIVATE)}
    shared = {name.removeprefix(SHARED): value for name, value in both.items() if name.startswith(SHARED)}
    return TensorPair(private, shared)


class ModelPair(NamedTuple):
    """The models of both networks, stacked or not."""

    private: Model
    shared: Model


def join_models(private: HasModel, shared: HasModel) -> Client:
    """Returns clients that train both of their models as one."""
    return Client(join_tensors(private.params, shared.params), join_tensors(private.buffers, shared.buffers))


def separate_models(both: HasModel) -> ModelPair:
    """Returns the two models that clients have trained as one; what belongs to neither is left out."""
    params = separate_tensors(both.params)
    buffers = separate_tensors(both.buffers)
    return ModelPair(Model(params.private, buffers.private), Model(params.shared, buffers.shared))


def parameter_names(private: Network, shared: Network) -> list[str]:
    """Returns the names that the parameters of both networks have while they are trained as one."""
    return list(join_tensors(private.params, shared.params))


class OutputPair(NamedTuple):
    """What both networks give for a batch."""

    private: NetworkOutput
    shared: NetworkOutput


def run_both(private: Network, shared: Network, params: Params, buffers: Buffers, batch: Batch) -> OutputPair:
    """Returns what the private and the shared network give for a batch, by the tensors of both in one dict."""
    models = separate_models(Model(params, buffers))
    private_output = private(models.private.params, models.private.buffers, batch.x, batch.mask)
    shared_output = shared(models.shared.params, models.shared.buffers, batch.x, batch.mask)
    return OutputPair(private_output, shared_output)


class _Clip(torch.autograd.Function):
    """The identity of some tensors, whose backward pass shortens the gradient by all of them together to a norm."""

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


def clip_gradient(params: Params, max_norm: float) -> Params:
    """Returns the same parameters; the gradient that reaches them, all together, is shortened to `max_norm`."""
    return dict(zip(params, _Clip.apply(max_norm, *params.values()), strict=True))


def clip_both_gradients(params: Params, max_norm: float) -> Params:
    """Returns the parameters of both networks; the gradient that reaches either's is shortened to `max_norm`."""
    both = separate_tensors(params)
    return join_tensors(clip_gradient(both.private, max_norm), clip_gradient(both.shared, max_norm))
