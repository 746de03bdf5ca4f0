"""One client's local work as pure functions: its network, its objective and gradient, its step."""

import copy
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.overrides import TorchFunctionMode

from fedcli.core.aggregate import cross_entropy
from fedcli.core.batches import Batch
from fedcli.core.keyed_draws import KEY_ENDING
from fedcli.core.trees import Tree, pack, select, tree_map, unpack
from fedcli.errors import first_line

Tensors = dict[str, Tensor]  # by name
Params = Tensors  # of a network, which are trained; also their gradients and what an optimizer has for each
Buffers = Tensors  # of a network, which are not: running statistics and the keys of dropout
Terms = Tensors  # of an objective, as they enter the record

# The term in which a step tells the value that it minimises, so that one that is not finite is seen at the end of the
# round, on every device, without waiting in each step.
OBJECTIVE = "\0objective"

# Whether an objective may not make numbers of tensors, see `NoReading`; in the first step of one client of a round.
refuse_reading: ContextVar[bool] = ContextVar("refuse_reading", default=False)
under_vmap: ContextVar[bool] = ContextVar("under_vmap", default=False)  # whether vmap runs now


@contextmanager
def set_to(variable: ContextVar[bool], value: bool) -> Iterator[None]:
    """Sets a context variable inside a `with` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class Model(NamedTuple):
    """The tensors of a network; stacked, every tensor has the client axis first."""

    params: Params
    buffers: Buffers


class Client(NamedTuple):
    """A client while it trains; stacked, every tensor has the client axis first."""

    params: Params
    buffers: Buffers
    # State of the optimizers by `key`, see `OptimizerUpdate`; empty before the first step.
    optimizer: dict[str, Tree] = {}  # noqa: RUF012  # nobody writes into it
    memory: Tree = ()  # what a method gathers while training; () where it gathers nothing


def model_of(clients: Client | Model, k: int) -> Model:
    """Returns the model of the k-th of stacked clients."""
    return select(Model(clients.params, clients.buffers), k)


class NetworkOutput(NamedTuple):
    """What a network gives for a batch."""

    features: Tensor  # [B, D]
    logits: Tensor  # [B, C]
    buffers: Buffers  # the buffers after this batch


class Aux(NamedTuple):
    """What a local objective returns beside its value."""

    buffers: Buffers
    terms: Terms  # scalars
    outputs: Tree = ()  # whatever a local step needs from the forward pass, for example the features

    def with_term(self, name: str, value: Tensor) -> "Aux":
        """Returns the same with one more term."""
        return self._replace(terms={**self.terms, name: value})


LocalLoss = Callable[[Params, Buffers, Batch, Any], tuple[Tensor, Aux]]
Update = Callable[[Client, Batch, Any], tuple[Client, Aux]]


@dataclass(frozen=True)
class Step:
    """One local step of one client."""

    update: Update
    init_optimizer: Callable[[Params], dict[str, Tree]]  # makes the optimizer state before the first step
    # Writes over the client's tensors, of a client that is not idle; None where there is no such version.
    in_place: Update | None = None

    @property
    def update_of_own_tensors(self) -> Update:
        """The update where nobody else needs the client's tensors, so that it may write over them."""
        return self.in_place or self.update


def composed(update: Update, *steps: Step) -> Step:
    """Makes a step whose update is composed of other steps, and whose optimizer state is all of theirs."""

    def init_optimizer(params: Params) -> dict[str, Tree]:
        states: dict[str, Tree] = {}
        for step in steps:
            states |= step.init_optimizer(params)
        return states

    return Step(update, init_optimizer)


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


def axes_of(context: Callable[..., Any], **axes: Any) -> Any:
    """Returns the axes of a context: for each of its fields None, which all clients share, or 0, of each its own."""
    return context(**axes)


def inner_product(params: Params, direction: Params) -> Tensor:
    """Returns <w, d>, over all parameters of one client together; a scalar."""
    return cast(Tensor, sum((value * direction[name]).sum() for name, value in params.items()))


def squared_distance(params: Params, others: Params) -> Tensor:
    """Returns ||w - v||^2, over all parameters of one client together; a scalar."""
    return cast(Tensor, sum((value - others[name]).square().sum() for name, value in params.items()))


def plain_loss(network: Network) -> LocalLoss:
    """Makes the plain local objective: the mean cross-entropy over a client's examples; its context is not used."""

    def local_loss(params: Params, buffers: Buffers, batch: Batch, context: Any) -> tuple[Tensor, Aux]:
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)
        loss = cross_entropy(logits, batch.y, batch.mask)
        return loss, Aux(buffers, {"cross_entropy": loss}, features)

    return local_loss


def cosine_annealing(lr: float, step: int, steps: int) -> float:
    """Returns the learning rate of a step, from `lr` down towards 0."""
    return lr * (1 + math.cos(math.pi * step / steps)) / 2


def step_length(lr: float, momentum: float) -> float:
    """Returns the length of a local step along a constant gradient, eta / (1 - rho) with momentum rho.

    Args:
        lr: eta.
        momentum: rho, in [0, 1).
    """
    return lr / (1 - momentum)


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


def find_vmap_fault(network: Network, images: Tensor) -> str:
    """Says why vmap cannot train clients of a network together, in a line; empty where it can.

    `images` are two or more, `[B, channels, H, W]`.
    """

    def objective(params: Params, buffers: Buffers) -> tuple[Tensor, Params]:
        output = network(params, buffers, images)
        return output.logits.square().sum(), output.buffers

    tensors = {name: value.detach() for name, value in network.params.items()}, network.buffers
    stacked = tree_map(lambda value: torch.stack([value, value]), tensors)
    try:
        with set_to(under_vmap, True):
            vmap(grad(objective, has_aux=True), randomness="error")(*stacked)
    except Exception as error:  # whatever torch makes of it
        cause = error.__cause__ or error  # of the refusal that names the user's file
        return first_line(cause)[:200]
    return ""


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


def with_dropout_key(update: Update) -> Update:
    """Makes a step put the batch's key into the buffers that dropout draws from, and take it out again."""

    def update_with_key(client: Client, batch: Batch, context: Any) -> tuple[Client, Aux]:
        keys = {name: value for name, value in client.buffers.items() if name.endswith(KEY_ENDING)}
        if not keys or batch.key is None:
            return update(client, batch, context)
        buffers = {**client.buffers, **dict.fromkeys(keys, batch.key)}
        after, aux = update(client._replace(buffers=buffers), batch, context)
        return after._replace(buffers={**after.buffers, **keys}), aux

    return update_with_key
