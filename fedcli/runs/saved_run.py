"""A run in its folder, and its models as PyTorch modules."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedcli.core.backbones import Backbone
from fedcli.core.clients import Tensors
from fedcli.core.evaluation import nearness
from fedcli.errors import UserError
from fedcli.registry import find_method
from fedcli.runs.models import check_client, check_round, initial_network, read_models, round_index_of
from fedcli.runs.schema import Record
from fedcli.userfiles import trust_files


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

    def __init__(self, network: Backbone, record: Record, prototypes: tuple[Tensor, Tensor] | None):
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
class SavedRun:
    """A run in its folder: its record as it was read or written last, and its models."""

    record: Record
    state: Any  # the server's after the last round, of a run that was trained in this call; else None
    path: Path
    files: Sequence[str | Path] = ()  # the user's, for its method or for parts

    @property
    def classifies_by_prototypes(self) -> bool:
        """Whether the headline's models take the class of the nearest prototype: where the method declares them."""
        record = trust_files(self.record, self.files)
        return find_method(record["method_source"]).prototypes is not None

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
        models = read_models(self.path, record, method, round_index_of(record, round))
        network = initial_network(record, client or 0)
        trained = models.shared if client is None else models.personal.get(client)
        if trained is not None:  # else the initial one, of a client that has never taken part
            params, buffers = trained
            _load(network, {**params, **buffers})
        return Classifier(network, record, models.prototypes if prototypes else None).eval().requires_grad_(False)


@torch.no_grad()
def _load(network: Backbone, tensors: Tensors) -> None:
    """Puts parameters and all buffers, those that a `state_dict` leaves out too, into a network; frozen parts stay."""
    own_tensors = {**dict(network.named_parameters()), **dict(network.named_buffers(remove_duplicate=False))}
    for name, value in tensors.items():
        if name not in own_tensors:
            raise UserError(f"the network has no '{name}', which the run's models have; restore its file.")
        own_tensors[name].copy_(value)
