"""One client's local objective: the plain one, terms of its parameters, and its gradient, which nothing may lose."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import grad
from torch.overrides import TorchFunctionMode

from fedcli.core.aggregate import cross_entropy
from fedcli.core.batches import Batch
from fedcli.core.clients import Aux, Buffers, LocalLoss, Params
from fedcli.core.network import Network
from fedcli.core.switches import refuse_reading, under_vmap
from fedcli.core.trees import pack, tree_map, unpack
from fedcli.errors import UserError


def plain_loss(network: Network) -> LocalLoss:
    """Makes the plain local objective: the mean cross-entropy over a client's examples; its context is not used."""

    def local_loss(params: Params, buffers: Buffers, batch: Batch, context: Any) -> tuple[Tensor, Aux]:
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)
        loss = cross_entropy(logits, batch.y, batch.mask)
        return loss, Aux(buffers, {"cross_entropy": loss}, features)

    return local_loss


def inner_product(params: Params, direction: Params) -> Tensor:
    """Returns <w, d>, over all parameters of one client together; a scalar."""
    return cast(Tensor, sum((value * direction[name]).sum() for name, value in params.items()))


def squared_distance(params: Params, others: Params) -> Tensor:
    """Returns ||w - v||^2, over all parameters of one client together; a scalar."""
    return cast(Tensor, sum((value - others[name]).square().sum() for name, value in params.items()))


class LostGradient(RuntimeError):
    """Says that a value was taken out of the graph by which gradients are found."""


class NoReading(TorchFunctionMode):
    """The context of an objective in which a tensor that depends on the parameters cannot become a Python number.

    The number would have no gradient, and nothing would say so. Where clients train together, vmap refuses it itself.
    """

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Calls the function, or raises LostGradient."""
        kwargs = kwargs or {}
        if function in READERS:
            read = [*args, *kwargs.values()]
            if function is Tensor.new_tensor:
                read = read[1:]  # of the first it takes the type alone
            if function is torch.as_tensor:  # it keeps a tensor's gradient, but not those of tensors in a list
                read = [value for value in read if not isinstance(value, Tensor)]
            if _has_gradient(read):
                raise LostGradient(
                    f"{READERS[function]} makes a number of a tensor that depends on the parameters, and its gradient "
                    "is lost; use the tensor, or .detach() where no gradient is meant"
                )
        return function(*args, **kwargs)


def _has_gradient(value: Any) -> bool:
    """Says whether a value is a tensor that depends on the parameters, or a list with one, however deep in it."""
    if isinstance(value, list | tuple):
        return any(_has_gradient(part) for part in value)
    return isinstance(value, Tensor) and value.requires_grad


READERS = {
    Tensor.item: ".item()", Tensor.tolist: ".tolist()", Tensor.numpy: ".numpy()", Tensor.__float__: "float()",
    Tensor.__int__: "int()", Tensor.__bool__: "bool()", Tensor.__index__: "an index", Tensor.__array__: "an array",
    Tensor.__complex__: "complex()", Tensor.new_tensor: ".new_tensor()", torch.tensor: "torch.tensor()",
    torch.as_tensor: "torch.as_tensor()", torch.asarray: "torch.asarray()", torch.linspace: "torch.linspace()",
    torch.logspace: "torch.logspace()",
}  # fmt: skip


def gradient(objective: Callable[[Params], tuple[Tensor, Aux]], params: Params) -> tuple[Params, Aux]:
    """Returns the gradient of an objective at some parameters, and its other outputs; both are constants.

    It may be called inside a local objective, for a step that needs a second gradient. Parameters that the objective
    does not use have a gradient of zero.

    Raises:
        UserError: The objective depends on none of the parameters.
    """

    def checked_objective(params: Params) -> tuple[Tensor, Aux]:
        value, aux = objective(params)
        if not value.requires_grad:
            raise UserError(
                "an objective depends on no parameter that moves (got a value without a gradient); leave out .detach() "
                "and torch.no_grad(), or multiply by 0 what should not move the parameters."
            )
        return value, aux

    params = tree_map(Tensor.detach, params)
    if under_vmap.get():
        return grad(checked_objective, has_aux=True)(params)
    # Outside vmap, torch.autograd.grad is 8 to 10 % faster than torch.func.grad.
    leaves = {name: value.requires_grad_() for name, value in params.items()}
    reading = NoReading() if refuse_reading.get() else nullcontext()
    with torch.enable_grad():
        with reading:
            value, aux = checked_objective(leaves)
        grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, grads, strict=True)), unpack(tree_map(Tensor.detach, pack(aux, aux)), aux)
