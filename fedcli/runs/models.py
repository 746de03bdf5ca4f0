"""The models of a run: kept beside its checkpoints, taken out as PyTorch modules, or exported for plain PyTorch."""

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save as serialize
from torch import Tensor, nn

from fedcli.core import backbones
from fedcli.core.backbones import Backbone
from fedcli.core.client_states import Store
from fedcli.core.clients import Params
from fedcli.core.evaluation import nearness, own_model
from fedcli.core.tree_files import load_tree, save_tree
from fedcli.core.trees import leaves
from fedcli.data.reading import one_line
from fedcli.declarations import Method
from fedcli.errors import UserError
from fedcli.files import write_atomically
from fedcli.registry import find_method
from fedcli.runs import checkpoints
from fedcli.runs.checkpoints import CHECKPOINT, SELECTED
from fedcli.runs.identity import identity, reductions
from fedcli.runs.lock import refuse_file_of_a_run
from fedcli.runs.schema import Fault, wrong
from fedcli.runs.state_schema import at, check_like, round_of_models
from fedcli.userfiles import trust_files

LARGEST = 2**30  # bytes of all models together that are kept beside the last ones
ROUNDS = ("selected", "last")
FORMATS = {  # of exported files, with the suffix and how to load one
    "pt": (".pt2", "torch.export.load(file).module()"),
    "safetensors": (".safetensors", "safetensors.torch.load_file(file)"),
}


class Models(NamedTuple):
    """What is tested after a round."""

    shared: tuple[Params, Params] | None  # parameters and buffers of the global model
    personal: dict[int, tuple[Params, Params]]  # of each client's own model, of those that have taken part
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
    if round not in ROUNDS:
        raise UserError(f"--round must be {' or '.join(ROUNDS)} (got '{round}'); choose one of them.")


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

    def see(self, record: dict[str, Any], state: Any) -> None:
        """Holds the models of the last round in the record if it is the best one, and they are not too large."""
        summary = record["summary"]
        last = len(record["rounds"]) - 1
        if summary["selection"].startswith("best-") and summary["selected_round"] == last:
            measured = state if self.method.personal else self.method.model(state)  # reads no clients' states
            if sum(getattr(leaf, "nbytes", 0) for leaf in leaves(measured)) <= LARGEST:
                self.held = _RoundModels(last, models_of(self.method, state))

    def write_checkpoint(self, record: dict[str, Any], state: Any) -> None:
        """Writes a checkpoint of the last round, and before it what is held of an earlier one."""
        last = len(record["rounds"]) - 1
        if self.held is not None and self.held.round < last:
            facts = {"identity": identity(record), "round": self.held.round}
            save_tree(self.folder / SELECTED, self.held.models, facts)
            self.held = None
        checkpoints.write_checkpoint(self.folder, record, state)


class Classifier(nn.Module):
    """A trained network that normalises its images itself.

    Attributes:
        network: Body and head.
        mean: `[channels, 1, 1]`, subtracted from the images.
        std: `[channels, 1, 1]`, by which they are then divided.
        prototypes: `[C, D]` where it classifies by the nearest of them; None where it classifies by the head.
    """

    mean: Tensor
    std: Tensor
    prototypes: Tensor | None
    has_class: Tensor | None  # [C], bool

    def __init__(self, network: Backbone, record: dict[str, Any], prototypes: tuple[Tensor, Tensor] | None):
        """Puts a run's normalisation before a network, and nearness to any `prototypes` behind it."""
        super().__init__()
        self.network = network
        self._bf16 = record["config"]["precision"] == "bf16"
        for name, values in record["normalisation"].items():
            self.register_buffer(name, torch.tensor(values, dtype=network.head.weight.dtype)[:, None, None])
        points, has_class = prototypes or (None, None)
        self.register_buffer("prototypes", points)
        self.register_buffer("has_class", has_class)

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits `[N, C]` of images `[N, channels, H, W]`, floats in 0 to 1 as `ToTensor` gives them.

        With prototypes, minus the squared distance of the features to each; -inf where a class has none.

        Raises:
            UserError: If the images are integers, or of another shape.
        """
        channels = len(self.mean)
        if images.dim() != 4 or images.shape[1] != channels:
            raise UserError(
                f"images must be of the shape [N, {channels}, height, width] (got {list(images.shape)}); move the "
                "channels by images.permute(0, 3, 1, 2), and make one image a batch by image[None]."
            )
        if not images.is_floating_point():
            raise UserError(f"images must be floats from 0 to 1 (got {images.dtype}); divide uint8 images by 255.")
        x = (images.to(self.mean.dtype) - self.mean) / self.std
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self._bf16):
            features, logits = self.network(x)
        if self.prototypes is None or self.has_class is None:
            return logits.to(self.mean.dtype)
        return nearness(features.to(self.mean.dtype), self.prototypes, self.has_class)


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    record: dict[str, Any]
    state: Any  # the method's server state after the last round; None for a run that had ended before
    path: Path
    files: Sequence[str | Path] = ()  # the user's, for its method or for parts

    def model(self, client: int | None = None, round: str = "selected", *, prototypes: bool = False) -> Classifier:
        """Returns the trained model, a `torch.nn.Module` in evaluation mode on the CPU, before any step of `--post`.

        It takes float images `[N, channels, H, W]` in 0 to 1 and returns logits `[N, C]`.

        Args:
            client: Whose model, for methods with personal models; the initial one if it has never taken part.
            round: "selected", which the headline is from, or "last".
            prototypes: Return minus the squared distances to prototypes, for methods that classify by the nearest.

        Raises:
            UserError: If the run has not finished, or has no such model.
        """
        check_round(round)
        record = trust_files(self.record, self.files)
        if record["status"] != "finished":
            raise UserError(f"'{self.path}' has not finished (it is {record['status']}); 'fedcli resume' goes on.")
        method = find_method(record["method_source"])
        config = record["config"]
        check_client(method, config["num_clients"], client)
        if prototypes and method.prototypes is None:
            raise UserError(f"'{method.name}' does not classify by prototypes (got --prototypes); leave it out.")
        last = record["rounds"][-1]["round"]
        number = last if round == "last" else record["summary"]["selected_round"]
        models = read_models(self.path, record, method, number)
        network = _initial_network(record, client or 0)
        trained = models.shared if client is None else models.personal.get(client)
        if trained is not None:  # else the initial one, of a client that has never taken part
            params, buffers = trained
            _load(network, {**params, **buffers})
        return Classifier(network, record, models.prototypes if prototypes else None).eval().requires_grad_(False)


def _initial_network(record: dict[str, Any], client: int) -> Backbone:
    """Builds the network that a run's client begins with."""
    config = record["config"]
    names = config["backbone"].split(",")
    name = names[client % len(names)]  # as the clients have them, in turn
    channels, image_size, _ = record["model"]["input"]
    network = backbones.build(name, channels, image_size, len(record["class_names"]), config["seed"])
    return network.to(torch.float64 if config["precision"] == "float64" else torch.float32)


def read_models(folder: Path, record: dict[str, Any], method: Method, number: int) -> Models:
    """Reads the models of a finished run's last round, or of its selected one, by their number from 0.

    Raises:
        UserError: They are not there, are damaged, are of another run, or do not suit its networks.
    """
    file = folder / (CHECKPOINT if number == record["rounds"][-1]["round"] else SELECTED)
    lacking = UserError(f"'{file}' lacks the models of round {number + 1}; restore it or use --round last.")
    if not file.is_file():
        raise lacking
    store = Store(None, torch.device("cpu"), (*method.state_types, Models))
    state, facts = load_tree(file, store.reopen(folder))
    try:
        written = round_of_models(state, facts, record["config"]["rounds"])
        if facts["identity"] != identity(record) or written != number:
            raise lacking
        models = state if isinstance(state, Models) else _models_of_state(method, state)
        check_models(models, method, record)
    except Fault as fault:
        raise UserError(f"'{file}' does not have this run's models: {fault}; restore it.") from None
    return models


def _models_of_state(method: Method, state: Any) -> Models:
    """Returns the models in a state that a file holds, which may be none of the method's.

    Raises:
        Fault: The method's functions cannot read it.
    """
    try:
        return models_of(method, state)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise Fault(f"it is no state of '{method.name}' (got {one_line(error)})") from None


def check_models(models: Models, method: Method, record: dict[str, Any]) -> None:
    """Refuses models that the networks of a run cannot have.

    Raises:
        Fault: Says which part is wrong, and what it must be.
    """
    num_clients = record["config"]["num_clients"]
    kinds = len(record["config"]["backbone"].split(","))
    networks = [_initial_network(record, kind) for kind in range(kinds)]
    initial = [_initial_model(network) for network in networks]
    first_network, *_ = networks
    if method.personal is None or method.shared is not None:
        with at("shared"):
            check_like(_initial_model(first_network), models.shared, num_clients)
    with at("personal"):
        if not isinstance(models.personal, dict):
            raise wrong("models by client", type(models.personal).__name__)
        for client, model in models.personal.items():
            with at(client):
                check_like(initial[client % kinds], model, num_clients)
    if method.prototypes is not None:
        classes = len(record["class_names"])
        points = first_network.head.weight.new_empty(classes, first_network.feature_dim)
        with at("prototypes"):
            check_like((points, torch.empty(classes, dtype=torch.bool)), models.prototypes, num_clients)


def _initial_model(network: Backbone) -> tuple[Params, Params]:
    """Returns parameters and buffers of a network, without those that are frozen."""
    params: Params = {name: value for name, value in network.named_parameters() if value.requires_grad}
    return params, dict(network.named_buffers())


def _tensors(model: Classifier) -> Params:
    """Returns all tensors of a model, but for the keys of dropout, which is off."""
    tensors = {**model.state_dict(), **dict(model.named_buffers())}
    return {name: value for name, value in tensors.items() if not name.endswith(".key")}


@torch.no_grad()
def _load(network: Backbone, tensors: Params) -> None:
    """Puts parameters and all buffers, those that a `state_dict` leaves out too, into a network; frozen parts stay."""
    places = {**dict(network.named_parameters()), **dict(network.named_buffers(remove_duplicate=False))}
    for name, value in tensors.items():
        if name not in places:
            raise UserError(f"the network has no '{name}', which the run's models have; restore its file.")
        places[name].copy_(value)


class Exported(NamedTuple):
    """What an export has written."""

    file: Path
    card: Path  # in Markdown, what the model is


def export(
    run: Run,
    format: str = "pt",
    client: int | None = None,
    round: str = "selected",
    prototypes: bool = False,
    out: str | Path | None = None,
) -> Exported:
    """Writes a model, see `Run.model`, to a file and a card in Markdown beside it.

    The format is "pt", a program of `torch.export` for batches of any size, or "safetensors", the tensors alone. By
    default the file is in the run's folder; an existing one is replaced. It gets the suffix of the format.

    Raises:
        UserError: If there is no such model or format, or `torch.export` cannot take the network.
    """
    if format not in FORMATS:
        raise UserError(f"--format must be {' or '.join(FORMATS)} (got '{format}'); choose one of them.")
    model = run.model(client, round, prototypes=prototypes)
    record = run.record
    suffix, loading = FORMATS[format]
    content = _program(model, record["model"]["input"]) if format == "pt" else _tensor_file(model, record)
    name = "model" if client is None else f"model-client-{client}"
    if round == "last":
        name += "-last"
    if prototypes:
        name += "-prototypes"
    file = Path(out or run.path / name).with_suffix(suffix)
    refuse_file_of_a_run(file)
    card = file.with_name(f"{file.name}.md")
    text = f"# {record['method']} on {record['dataset']}: {file.name}\n\n"
    text += _description(record, model, client, round)
    text += f"* To load it: `{loading}`\n"
    card.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, lambda temporary: temporary.write_bytes(content))
    write_atomically(card, lambda temporary: temporary.write_text(text))
    return Exported(file, card)


def _program(model: Classifier, input_shape: list[int]) -> bytes:
    """Returns the file of a program of `torch.export` for batches of any size, of images `[channels, H, W]`."""
    example = torch.rand(2, *input_shape, dtype=model.mean.dtype)
    try:
        program = torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("N", min=1)},))
    except Exception as error:  # whatever a user's own network makes of it
        raise UserError(f"torch.export refuses it ({one_line(error)}); use --format safetensors.") from error
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def _tensor_file(model: Classifier, record: dict[str, Any]) -> bytes:
    """Returns the file of a model's tensors alone, with the names of its classes."""
    tensors = {name.removeprefix("network."): value.clone() for name, value in _tensors(model).items()}
    facts = {"format": "pt", "method": record["method"], "class_names": json.dumps(record["class_names"])}
    return serialize(tensors, facts)


def _description(record: dict[str, Any], model: Classifier, client: int | None, round: str) -> str:
    """Returns what a model is, as items of a list in Markdown."""
    entry = record["rounds"][record["summary"]["selected_round"] if round == "selected" else -1]
    accuracy = entry["test_accuracy"]
    owner = f"Model of client {client}"
    if client is None:
        accuracy = entry.get("global_accuracy", accuracy)
        owner = "Global model"
    conditions = ", ".join([f"`{record['protocol']}`", *reductions(record).values()])
    outputs = "logits"
    if model.prototypes is not None:
        outputs = "minus the squared distances of the features to the prototypes"
    return f"""\
* {owner} of round {entry["round"] + 1} of {record["config"]["rounds"]} ({round}), under {conditions}
* Accuracy of the run in this round: {100 * accuracy:.2f} %
* Takes images {[None, *record["model"]["input"]]} in 0 to 1, of type {model.mean.dtype}; gives {outputs}
* Classes: {", ".join(record["class_names"])}
* Made by fedcli {record["versions"]["fedcli"]}: `{record["command"]}`
"""
