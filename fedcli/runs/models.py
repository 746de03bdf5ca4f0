"""The models that a run has made: kept beside its checkpoints, and taken out as modules of PyTorch or as files."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedcli.core import backbones
from fedcli.core.backbones import Backbone
from fedcli.core.clients import Params
from fedcli.core.evaluation import nearness, own_model
from fedcli.core.federation import Federation
from fedcli.data.files import write_atomically
from fedcli.declarations import Method
from fedcli.errors import UserError
from fedcli.registry import find_method
from fedcli.runs import checkpoints
from fedcli.runs.checkpoints import CHECKPOINT, PREVIOUS, Damaged
from fedcli.runs.config import Setup
from fedcli.runs.consent import with_own_files
from fedcli.runs.records import identity, params_hash, summarise
from fedcli.runs.store import Store
from fedcli.userfiles import is_from_file

SELECTED = "selected.safetensors"
LARGEST = 2**30  # bytes of all models together that are kept beside the last ones
ROUNDS = ("selected", "last")


class Models(NamedTuple):
    """What is tested after a round."""

    shared: tuple[Params, Params] | None  # parameters and buffers of the global model
    own: dict[int, tuple[Params, Params]]  # of each client's own model, of those that have taken part
    prototypes: tuple[Tensor, Tensor] | None  # [C, D], and which classes have one [C]


def models_of(method: Method, state: Any) -> Models:
    """The models in a method's state."""
    prototypes = tuple(method.prototypes(state)) if method.prototypes else None
    if method.personal is None:
        return Models(tuple(method.model(state)), {}, prototypes)
    return Models(None, {client: tuple(model) for client, model in method.personal(state).items()}, prototypes)


def all_params(method: Method, state: Any, num_clients: int) -> Iterator[tuple[str, Tensor]]:
    """The parameters of the global model, or of all clients' own models with their ids before the names, in order."""
    if method.personal is None:
        yield from sorted(method.model(state)[0].items())
        return
    for client in range(num_clients):
        params, _ = own_model(method, state, client) or ({}, {})
        yield from ((f"{client:09}.{name}", params[name]) for name in sorted(params))


class Selected:
    """Keeps the models of the round that the headline of a run is from, where that is not the last round.

    They are held from that round on, and written before a checkpoint of a later one; so the file is of a round that
    the next checkpoint knows, or, after a kill in between, of one that the resumed run comes to again.
    """

    def __init__(self, folder: Path, setup: Setup, fed: Federation, record: dict[str, Any], state: Any):
        """Takes up what a run has kept so far; `state` is the one after the rounds in the record."""
        self._file, self._method, self._selection = folder / SELECTED, setup.method, setup.selection
        sizes = [_bytes(network.module) for network in fed.networks]
        self._wanted = _keeps_selected(
            setup.selection, _bytes_of_all(setup, dict(zip(fed.backbones, sizes, strict=True)))
        )
        self._round: int | None = None  # whose models are held
        self._models: Models | None = None
        self._written: int | None = None  # whose models are in the file
        self.see(record, state)
        self.clear(record)
        if self._file.is_file():  # of a later round it may be another machine's, and is written anew
            with suppress(Damaged):
                number = _read(self._file, record)[1]
                chosen = summarise(record["rounds"], self._selection)["selected_round"]
                self._written = number if number == chosen else None

    def see(self, record: dict[str, Any], state: Any) -> None:
        """Holds the models of the last round in the record if it is the selected one."""
        chosen = summarise(record["rounds"], self._selection)["selected_round"]
        if self._wanted and chosen is not None and chosen == record["rounds"][-1]["round"]:
            self._round, self._models = chosen, models_of(self._method, state)

    def write(self, record: dict[str, Any]) -> None:
        """Writes what is held, unless the file has it, or the checkpoint of this round will."""
        if self._models is None or self._round in (self._written, record["rounds"][-1]["round"]):
            return
        about = {"identity": identity(record), "round": self._round}
        write_atomically(self._file, lambda path: checkpoints.save(path, self._models, about))
        self._written = self._round

    def clear(self, record: dict[str, Any]) -> None:
        """Removes the file where the checkpoint has the models of a better round."""
        if record["rounds"] and self._round == record["rounds"][-1]["round"]:
            self._file.unlink(missing_ok=True)
            self._written = None


def bytes_kept(setup: Setup, channels: int, image_size: int, num_classes: int) -> int:
    """Bytes of the models that a run leaves, at least; what else its clients keep is not counted.

    Args:
        setup: The run.
        channels: Of its images.
        image_size: Their height and width in pixels.
        num_classes: Of its data set.
    """
    names = set(setup.run.backbone.split(","))
    size = _bytes_of_all(setup, {name: _bytes_of(name, channels, image_size, num_classes) for name in names})
    return size * (1 + _keeps_selected(setup.selection, size))


def _keeps_selected(selection: str, size: int) -> bool:
    """Whether the models of the selected round are kept beside the last ones, which have so many bytes."""
    return selection.startswith("best-") and size <= LARGEST


def _bytes_of_all(setup: Setup, sizes: Mapping[str, int]) -> int:
    """Bytes of the global model, or of all clients' own models together, of the networks' by name."""
    names = setup.run.backbone.split(",")  # client i has the (i mod their number)-th
    clients = 1 if setup.method.personal is None else setup.run.num_clients
    return sum(sizes[names[i % len(names)]] for i in range(clients))


@cache
def _bytes_of(backbone: str, channels: int, image_size: int, num_classes: int) -> int:
    """Bytes of a network; of those that are not a user's, which are tried out, no weight is made."""
    with torch.device("cpu" if is_from_file(backbone) else "meta"):
        return _bytes(backbones.build(backbone, channels, image_size, num_classes, seed=0))


def _bytes(network: nn.Module) -> int:
    return sum(value.nbytes for value in network.state_dict().values())


def remove_models(folder: Path) -> None:
    """Removes all that the folder of an ended run holds of its models: what clients keep, too."""
    for name in (CHECKPOINT, PREVIOUS, SELECTED):
        (folder / name).unlink(missing_ok=True)
    checkpoints.clear(folder)


def _read(file: Path, record: dict[str, Any]) -> tuple[Models, int]:
    """The models in a file and their round.

    Raises:
        Damaged: If a byte is not the one that was written, or they are another run's.
    """
    try:
        models, about = checkpoints.load(file, {Models.__name__: Models})
    except UserError as error:
        raise Damaged("it is of another kind") from error
    if about.get("identity") != identity(record):
        raise Damaged("it is another run's")
    return models, about["round"]


class Classifier(nn.Module):
    """A trained network that takes images as they are; in evaluation mode unless somebody changes that.

    Attributes:
        network: Body and head.
        mean: `[channels, 1, 1]`, which is taken off the images.
        std: `[channels, 1, 1]`, by which they are then divided.
        prototypes: `[C, D]` where it classifies by the nearest of them; None where it classifies by the head.
    """

    def __init__(
        self, network: Backbone, mean: Sequence[float], std: Sequence[float], bf16: bool, prototypes: tuple | None
    ):
        """Puts the normalisation before a network, and nearness to `prototypes` behind it where there are some."""
        super().__init__()
        self.network = network
        dtype = network.head.weight.dtype
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values, dtype=dtype)[:, None, None])
        own, has_class = prototypes or (None, None)
        self.register_buffer("prototypes", own)
        self.register_buffer("has_class", has_class)
        self._bf16 = bf16

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits `[N, C]` of images `[N, channels, H, W]`, floats in 0 to 1 as `ToTensor` gives them.

        With prototypes, minus the squared distance of the features to each; -inf where a class has none.

        Raises:
            UserError: If the images are integers.
        """
        if not images.is_floating_point():
            raise UserError(f"images must be floats from 0 to 1 (got {images.dtype}); divide uint8 images by 255.")
        x = (images.to(self.mean.dtype) - self.mean) / self.std
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self._bf16):
            features, logits = self.network(x)
        if self.prototypes is None:
            return logits.to(self.mean.dtype)
        return nearness(features.to(self.mean.dtype), self.prototypes, self.has_class)


def find_model(
    folder: Path,
    record: dict[str, Any],
    client: int | None = None,
    round: str = "selected",
    prototypes: bool = False,
    files: Sequence[str | Path] = (),
) -> Classifier:
    """The model of a finished run, see `fedcli.runs.run.Run.model`.

    Args:
        folder: Of the run.
        record: Its record.
        client: Whose own model; None for the global one.
        round: One of `ROUNDS`.
        prototypes: Whether it classifies by the nearest prototype.
        files: The user's files that the run needs.

    Raises:
        UserError: If the run has no such model, or it is not there any more.
    """
    if round not in ROUNDS:
        raise UserError(f"--round must be {' or '.join(ROUNDS)} (got '{round}'); choose one of them.")
    if record["status"] != "finished":
        raise UserError(f"the run '{folder}' has not finished (it is {record['status']}); 'fedcli resume' goes on.")
    if "input" not in record["model"]:
        raise UserError(
            f"the record of '{folder}' does not say which images its model takes; run the experiment again."
        )
    record = with_own_files(record, files, "the same command with")
    method = find_method(record["method_source"])
    _refuse_client(method, record, client)
    models = _models(folder, record, method, round)
    if prototypes and models.prototypes is None:
        raise UserError(f"'{method.name}' does not classify by prototypes (got --prototypes); leave it out.")
    network = _network(record, client)
    found = models.shared if client is None else models.own.get(client)
    if found is not None:  # else the initial one, of a client that has never taken part
        wanted = network.state_dict().keys()  # without the keys of dropout
        network.load_state_dict({name: value for part in found for name, value in part.items() if name in wanted})
    about, bf16 = record["normalisation"], record["config"]["precision"] == "bf16"
    model = Classifier(network, about["mean"], about["std"], bf16, models.prototypes if prototypes else None)
    return model.eval().requires_grad_(False)


def _refuse_client(method: Method, record: dict[str, Any], client: int | None) -> None:
    """Refuses a client where there is one model for all, and none where each has its own."""
    if method.personal is None and client is not None:
        raise UserError(f"'{method.name}' has one model for all clients (got --client {client}); leave it out.")
    last = record["config"]["num_clients"] - 1
    if method.personal is not None and client not in range(last + 1):
        raise UserError(
            f"with '{method.name}' every client has a model of its own (got --client {client}); choose one from 0 to "
            f"{last} with --client."
        )


def _network(record: dict[str, Any], client: int | None) -> Backbone:
    """A client's network, or the only one, with its initial weights."""
    config, (channels, size) = record["config"], record["model"]["input"][:2]
    names = config["backbone"].split(",")
    name = names[(client or 0) % len(names)]
    network = backbones.build(name, channels, size, len(record["class_names"]), config["seed"])
    return network.to(torch.float64 if config["precision"] == "float64" else torch.float32)


def _models(folder: Path, record: dict[str, Any], method: Method, round: str) -> Models:
    """The models of a finished run's selected or last round.

    Raises:
        UserError: If they are damaged or are not there.
    """
    last, summary = record["rounds"][-1]["round"], record["summary"]
    selected = round == "selected" and summary["selected_round"] != last
    file = folder / (SELECTED if selected else CHECKPOINT)
    try:
        if selected:
            models, number = _read(file, record)
            right, found = number == summary["selected_round"], f"those of round {number + 1}"
        else:
            types, count = {kind.__name__: kind for kind in method.state_types}, record["config"]["num_clients"]
            store = Store(None, count, torch.device("cpu"), method.state_types)
            state, _ = checkpoints.load(file, {**types, "kept": lambda *rows: store.reopen(folder, rows)})
            models, found = models_of(method, state), params_hash(all_params(method, state, count))
            right = found == summary["params_sha256"]
    except FileNotFoundError:
        right, found = False, "no file"
    except Damaged as error:
        right, found = False, f"another or a damaged file: {error}"
    if right:
        return models
    if selected:
        raise UserError(
            f"'{file}' does not hold the models of the selected round {summary['selected_round'] + 1} (got {found}; "
            f"up to {LARGEST >> 30} GiB, all clients' together, are kept); take those of the last with --round last."
        )
    raise UserError(
        f"'{file}' does not hold the models of the last round (got {found}, was {summary['params_sha256']}); run the "
        "experiment again."
    )
