"""The models that a run has made: kept beside its checkpoints, and taken out as modules of PyTorch or as files."""

from collections.abc import Iterator, Sequence
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
from fedcli.declarations import Method
from fedcli.errors import UserError
from fedcli.registry import find_method
from fedcli.runs import checkpoints
from fedcli.runs.checkpoints import CHECKPOINT, PREVIOUS, SELECTED, Damaged
from fedcli.runs.config import Setup
from fedcli.runs.consent import with_own_files
from fedcli.runs.records import identity, params_hash, summarise
from fedcli.runs.store import Store
from fedcli.userfiles import is_from_file

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


class BestModels:
    """Keeps the models of the round that the headline of a run is from, where that is not the last round.

    They are held from that round on, and written before a checkpoint of a later one; so the file is of a round that
    the next checkpoint has, or, after a kill in between, of one that the resumed run comes to again.
    """

    def __init__(self, folder: Path, setup: Setup, fed: Federation, record: dict[str, Any], state: Any):
        """Takes up what a run has kept so far; `state` is the one after the rounds in the record."""
        self._file, self._setup = folder / SELECTED, setup
        kinds = fed.architecture if setup.method.personal else fed.architecture[:1]
        self._wanted = _keeps_best(setup, sum(_bytes(fed.networks[kind].module) for kind in kinds))
        self._round: int | None = None  # the best one, where it is not in the file
        self._models: Models | None = None  # of that round
        self.see(record, state)

    def see(self, record: dict[str, Any], state: Any) -> None:
        """Holds the models of the last round in the record if it is the best one."""
        best = summarise(record["rounds"], self._setup.selection)["selected_round"]
        if self._wanted and best is not None and best == record["rounds"][-1]["round"]:
            self._round, self._models = best, models_of(self._setup.method, state)

    def write(self, record: dict[str, Any]) -> None:
        """Writes what is held, unless the checkpoint of this round will."""
        if self._models is not None and self._round != record["rounds"][-1]["round"]:
            checkpoints.save(self._file, self._models, {"identity": identity(record), "round": self._round})
            self._round = self._models = None


def bytes_kept(setup: Setup, channels: int, image_size: int, num_classes: int) -> int:
    """Returns the bytes of the models that a run leaves, at least; what else its clients keep is not counted.

    Images have so many channels, and are `image_size` pixels high and wide.
    """
    nbytes = 0
    for client in range(setup.run.num_clients if setup.method.personal else 1):
        nbytes += _network_bytes(backbone_of(setup.run.backbone, client), channels, image_size, num_classes)
    return nbytes * (2 if _keeps_best(setup, nbytes) else 1)


def backbone_of(backbone: str, client: int | None) -> str:
    """Returns the network of a client, which has the (id mod their number)-th of those that `--backbone` names."""
    names = backbone.split(",")
    return names[(client or 0) % len(names)]


def _keeps_best(setup: Setup, nbytes: int) -> bool:
    """Returns whether the models of the best round are kept beside the last ones, which have so many bytes."""
    return setup.selection.startswith("best-") and nbytes <= LARGEST


@cache
def _network_bytes(backbone: str, channels: int, image_size: int, num_classes: int) -> int:
    """Returns the bytes of a network; weights are made for a user's own alone, which may not know the meta device."""
    with torch.device("cpu" if is_from_file(backbone) else "meta"):
        return _bytes(backbones.build(backbone, channels, image_size, num_classes, seed=0))


def _bytes(network: nn.Module) -> int:
    return sum(value.nbytes for value in network.state_dict().values())


def remove_models(folder: Path) -> None:
    """Removes all that the folder of an ended run holds of its models: what clients keep, too."""
    for name in (CHECKPOINT, PREVIOUS, SELECTED):
        (folder / name).unlink(missing_ok=True)
    checkpoints.clear(folder, at_rest=True)


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
    """The model of a finished run from its folder, record and the user's files; the rest as in `Run.model`."""
    if round not in ROUNDS:
        raise UserError(f"--round must be {' or '.join(ROUNDS)} (got '{round}'); choose one of them.")
    if record["status"] != "finished":
        raise UserError(f"the run '{folder}' has not finished (it is {record['status']}); 'fedcli resume' goes on.")
    if "input" not in record["model"]:
        raise UserError(
            f"the record of '{folder}' does not say which images its model takes; run the experiment again."
        )
    record = with_own_files(record, files, "the same command with")
    method, config = find_method(record["method_source"]), record["config"]
    if method.personal is None and client is not None:
        raise UserError(f"'{method.name}' has one model for all clients (got --client {client}); leave it out.")
    if method.personal is not None and client not in range(config["num_clients"]):
        raise UserError(
            f"with '{method.name}' every client has a model of its own (got --client {client}); choose one from 0 to "
            f"{config['num_clients'] - 1} with --client."
        )
    models = _read_models(folder, record, method, round)
    if prototypes and models.prototypes is None:
        raise UserError(f"'{method.name}' does not classify by prototypes (got --prototypes); leave it out.")
    channels, image_size = record["model"]["input"][:2]
    backbone, num_classes = backbone_of(config["backbone"], client), len(record["class_names"])
    network = backbones.build(backbone, channels, image_size, num_classes, config["seed"])
    network.to(torch.float64 if config["precision"] == "float64" else torch.float32)
    trained = models.shared if client is None else models.own.get(client)
    if trained is not None:  # else the initial one, of a client that has never taken part
        names = network.state_dict().keys()  # without the keys of dropout
        values = {**trained[0], **trained[1]}
        network.load_state_dict({name: value for name, value in values.items() if name in names})
    pixels, bf16 = record["normalisation"], config["precision"] == "bf16"
    model = Classifier(network, pixels["mean"], pixels["std"], bf16, models.prototypes if prototypes else None)
    return model.eval().requires_grad_(False)


def _read_models(folder: Path, record: dict[str, Any], method: Method, round: str) -> Models:
    """Reads the models of the selected or the last round of a finished run.

    Raises:
        UserError: If they are damaged, another run's or not there.
    """
    best, num_clients = record["summary"]["selected_round"], record["config"]["num_clients"]
    is_last = round == "last" or best == record["rounds"][-1]["round"]
    file = folder / (CHECKPOINT if is_last else SELECTED)
    store = Store(None, num_clients, torch.device("cpu"), (*method.state_types, Models))
    try:
        state, about = checkpoints.load(file, store.reopen(folder))
        if is_last:
            actual = params_hash(all_params(method, state, num_clients))
            expected, models = record["summary"]["params_sha256"], models_of(method, state)
        else:
            actual, expected = (about.get("identity"), about.get("round")), (identity(record), best)
            models = state
        if actual == expected:
            return models
        reason = f"got {actual}, was {expected}"
    except Damaged as error:
        reason = error
    remedy = "run the experiment again"
    if not is_last:
        remedy = f"up to {LARGEST >> 30} GiB, all clients' together, are kept: take those of the last with --round last"
    number = (record["rounds"][-1]["round"] if is_last else best) + 1
    raise UserError(f"'{file}' does not hold the models of round {number} ({reason}); {remedy}.")
