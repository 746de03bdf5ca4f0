"""A client while it trains: its tensors, its local step, and what a step is made of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fedcli.core.batches import Batch
from fedcli.core.keyed_draws import KEY_ENDING
from fedcli.core.trees import Tree, select

Tensors = dict[str, Tensor]  # by name
Params = Tensors  # of a network, which are trained; also their gradients and what an optimizer has for each
Buffers = Tensors  # of a network, which are not: running statistics and the keys of dropout
Terms = Tensors  # of an objective, as they enter the record

_OBJECTIVE = "\0objective"  # the term of `Aux.with_objective`, of a name that no method's has


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


class Aux(NamedTuple):
    """What a local objective returns beside its value."""

    buffers: Buffers
    terms: Terms  # scalars
    outputs: Tree = ()  # whatever a local step needs from the forward pass, for example the features

    def with_term(self, name: str, value: Tensor) -> "Aux":
        """Returns the same with one more term."""
        return self._replace(terms={**self.terms, name: value})

    def with_objective(self, value: Tensor) -> "Aux":
        """Returns the same with the value that a step minimises among the terms, see `separate_objective`.

        So one that is not finite is seen at the end of the round, on every device, without waiting in each step.
        """
        return self.with_term(_OBJECTIVE, value)


class StepValues(NamedTuple):
    """The values of a local step's objective, or their means over several steps."""

    terms: Terms  # of the method's objective
    objective: Tensor | None  # the value that was minimised; None where no step has noted it


def separate_objective(terms: Terms) -> StepValues:
    """Separates the terms of a method from the value of `Aux.with_objective`."""
    method_terms = {name: values for name, values in terms.items() if name != _OBJECTIVE}
    return StepValues(method_terms, terms.get(_OBJECTIVE))


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


def axes_of(context: Callable[..., Any], **axes: Any) -> Any:
    """Returns the axes of a context: for each of its fields None, which all clients share, or 0, of each its own."""
    return context(**axes)


def make_keyed_update(update: Update) -> Update:
    """Makes an update that puts the batch's key into the buffers that dropout draws from, and takes it out again."""

    def update_with_key(client: Client, batch: Batch, context: Any) -> tuple[Client, Aux]:
        keys = {name: value for name, value in client.buffers.items() if name.endswith(KEY_ENDING)}
        if not keys or batch.key is None:
            return update(client, batch, context)
        buffers = {**client.buffers, **dict.fromkeys(keys, batch.key)}
        after, aux = update(client._replace(buffers=buffers), batch, context)
        return after._replace(buffers={**after.buffers, **keys}), aux

    return update_with_key
