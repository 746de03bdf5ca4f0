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
        if function in READERS:
            first = args[0] if args else (kwargs or {}).get("data")  # as of torch.tensor(data=x)
            values = first if isinstance(first, list | tuple) else [first]
            if any(isinstance(value, Tensor) and value.requires_grad for value in values):
                raise LostGradient(
                    f"{READERS[function]} makes a number of a tensor that depends on the parameters, and its gradient "
                    "is lost; use the tensor, or .detach() where no gradient is meant"
                )
        return function(*args, **(kwargs or {}))


READERS = {
    Tensor.item: ".item()", Tensor.tolist: ".tolist()", Tensor.numpy: ".numpy()", Tensor.__float__: "float()",
    Tensor.__int__: "int()", Tensor.__bool__: "bool()", Tensor.__index__: "an index", Tensor.__array__: "an array",
    Tensor.__complex__: "complex()", torch.tensor: "torch.tensor()",
}  # fmt: skip


def gradient(objective: Callable[[Params], tuple[Tensor, Aux]], params: Params) -> tuple[Params, Aux]:
    """Returns the gradient of an objective at some parameters, and its other outputs; both are constants.

    It may be called inside a local objective, for a step that needs a second gradient.
    """
    params = tree_map(Tensor.detach, params)
    if under_vmap.get():
        return grad(objective, has_aux=True)(params)
    # Outside vmap, torch.autograd.grad is 8 to 10 % faster than torch.func.grad.
    leaves = {name: value.requires_grad_() for name, value in params.items()}
    reading = NoReading() if refuse_reading.get() else nullcontext()
    with torch.enable_grad():
        with reading:
            value, aux = objective(leaves)
        grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, grads, strict=True)), unpack(tree_map(Tensor.detach, pack(aux, aux)), aux)
