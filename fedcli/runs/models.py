"""The models of a run in its folder: what is kept of them beside its checkpoints, read and checked."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcli.core import backbones
from fedcli.core.body_and_head import Backbone
from fedcli.core.client_states import Store
from fedcli.core.clients import Buffers, Params
from fedcli.core.evaluation import own_model
from fedcli.core.tree_files import load_tree, save_tree
from fedcli.core.trees import leaves
from fedcli.declarations import SELECTIONS, Method
from fedcli.errors import UserError, first_line
from fedcli.run_files import CHECKPOINT, SELECTED
from fedcli.runs.identity import identity_of
from fedcli.runs.schema import Record
from fedcli.runs.state_schema import check_like, round_of_models
from fedcli.runs.value_checks import Fault, Place, wrong

LARGEST_BYTES = 2**30  # of all models together that are kept beside the last ones
NAMES_OF_ROUNDS = ("selected", "last")  # whose models are kept


class Models(NamedTuple):
    """What is tested after a round."""

    shared: tuple[Params, Buffers] | None  # parameters and buffers of the global model
    personal: dict[int, tuple[Params, Buffers]]  # of each client's own model, of those that have taken part
    prototypes: tuple[Tensor, Tensor] | None  # [C, D], and which classes have one [C]


def models_of(method: Method, state: Any) -> Models:
    """Returns the models in a method's state."""
    prototypes = _pair(method.prototypes(state)) if method.prototypes else None
    if method.personal is None:
        return Models(_pair(method.model(state)), {}, prototypes)
    shared = None if method.shared is None else _pair(method.shared(state))
    return Models(shared, {client: _pair(model) for client, model in method.personal(state).items()}, prototypes)


def _pair(values: Iterable[Any]) -> tuple[Any, Any]:
    """Returns a plain tuple of two values, also of a method's own NamedTuple, whose class a file would need."""
    first, second = values
    return first, second


def all_params(method: Method, state: Any, num_clients: int) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters of the global model, or of all clients' models with ids before the names, in order."""
    if method.personal is None:
        params, _ = method.model(state)
        yield from sorted(params.items())
        return
    for client in range(num_clients):
        params, _ = own_model(method.personal, state, client) or ({}, {})
        yield from ((f"{client:09}.{name}", params[name]) for name in sorted(params))


def check_client(method: Method, num_clients: int, client: int | None) -> None:
    """Refuses a client that has no model of its own, and None, the global model, where there is none."""
    has_global = method.personal is None or method.shared is not None
    if client is None and has_global:
        return
    if method.personal is not None and client in range(num_clients):
        return
    models = ["one global model"] if has_global else []
    if method.personal is not None:
        models.append(f"a model for each client, 0 to {num_clients - 1}")
    raise UserError(f"'{method.name}' keeps {' and '.join(models)} (got --client {client}); choose one of these.")


def check_round(round: str) -> None:
    """Refuses a round that is neither the selected nor the last one."""
    if round not in NAMES_OF_ROUNDS:
        raise UserError(f"--round must be {' or '.join(NAMES_OF_ROUNDS)} (got '{round}'); choose one of them.")


def round_index_of(record: Record, round: str) -> int:
    """Returns the index, from 0, of the selected or the last round of a finished run."""
    if round == "last":
        return record["rounds"][-1]["round"]
    return record["summary"]["selected_round"]


class _RoundModels(NamedTuple):
    """The models after a round."""

    round: int
    models: Models


@dataclass
class BestModels:
    """Keeps the models of the best round in memory, and, before a checkpoint of a later round, in a file.

    After a kill between both writes, the resumed run computes that round again.
    """

    folder: Path
    method: Method
    held: _RoundModels | None = None  # of the best round, where they are not in the file

    def keep_if_best(self, record: Record, state: Any) -> None:
        """Holds the models of the last round in the record if it is the best one, and they are not too large."""
        summary = record["summary"]
        last = len(record["rounds"]) - 1
        is_by_best = SELECTIONS[summary["selection"]].best_by is not None
        if is_by_best and summary["selected_round"] == last:
            measured = state if self.method.personal else self.method.model(state)  # reads no clients' states
            if sum(getattr(leaf, "nbytes", 0) for leaf in leaves(measured)) <= LARGEST_BYTES:
                self.held = _RoundModels(last, models_of(self.method, state))

    def write_if_superseded(self, record: Record) -> None:
        """Writes what is held of an earlier round than the last one, which a checkpoint would no longer have."""
        last = len(record["rounds"]) - 1
        if self.held is not None and self.held.round < last:
            facts = {"identity": identity_of(record), "round": self.held.round}
            save_tree(self.folder / SELECTED, self.held.models, facts)
            self.held = None


def initial_network(record: Record, client: int) -> Backbone:
    """Builds the network that a run's client begins with."""
    config = record["config"]
    names = config["backbone"].split(",")
    name = names[client % len(names)]  # as the clients have them, in turn
    channels, image_size, _ = record["model"]["input"]
    network = backbones.build(name, channels, image_size, len(record["class_names"]), config["seed"])
    return network.to(torch.float64 if config["precision"] == "float64" else torch.float32)


def read_models(folder: Path, record: Record, method: Method, round_index: int) -> Models:
    """Reads the models of a finished run's last round, or of its selected one, counted from 0.

    Raises:
        UserError: They are not there, are damaged, are of another run, or do not suit its networks.
    """
    file = folder / (CHECKPOINT if round_index == record["rounds"][-1]["round"] else SELECTED)
    if not file.is_file():
        raise _lacking(file, round_index)
    store = Store(None, torch.device("cpu"), (*method.state_types, Models))
    state, facts = load_tree(file, store.reopen(folder))
    try:
        written = round_of_models(state, facts, record["config"]["rounds"])
        if facts["identity"] != identity_of(record) or written != round_index:
            raise _lacking(file, round_index)
        models = state if isinstance(state, Models) else _models_of_state(method, state)
        check_models(models, method, record)
    except Fault as fault:
        raise UserError(f"'{file}' does not have this run's models: {fault}; restore it.") from None
    return models


def _lacking(file: Path, round_index: int) -> UserError:
    """Returns an error, to be raised by the caller, for a file that is not there or has the models of another round."""
    return UserError(f"'{file}' lacks the models of round {round_index + 1}; restore it or use --round last.")


def _models_of_state(method: Method, state: Any) -> Models:
    """Returns the models in a state that a file holds, which may be none of the method's.

    Raises:
        Fault: The method's functions cannot read it.
    """
    try:
        return models_of(method, state)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise Fault(f"it is no state of '{method.name}' (got {first_line(error)})") from None


def check_models(models: Models, method: Method, record: Record) -> None:
    """Refuses models that the networks of a run cannot have.

    Raises:
        Fault: Says which part is wrong, and what it must be.
    """
    num_clients = record["config"]["num_clients"]
    num_networks = len(record["config"]["backbone"].split(","))
    networks = [initial_network(record, client) for client in range(num_networks)]  # of the first clients
    initial = [_initial_model(network) for network in networks]
    if method.personal is None or method.shared is not None:
        with Place("shared"):
            check_like(initial[0], models.shared, num_clients)
    with Place("personal"):
        if not isinstance(models.personal, dict):
            raise wrong("models by client", type(models.personal).__name__)
        for client, model in models.personal.items():
            with Place(client):
                check_like(initial[client % num_networks], model, num_clients)
    if method.prototypes is not None:
        classes = len(record["class_names"])
        points = networks[0].head.weight.new_empty(classes, networks[0].feature_dim)
        with Place("prototypes"):
            check_like((points, torch.empty(classes, dtype=torch.bool)), models.prototypes, num_clients)


def _initial_model(network: Backbone) -> tuple[Params, Buffers]:
    """Returns parameters and buffers of a network, without those that are frozen."""
    params: Params = {name: value for name, value in network.named_parameters() if value.requires_grad}
    return params, dict(network.named_buffers())
