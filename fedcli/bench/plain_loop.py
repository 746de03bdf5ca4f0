"""The plain PyTorch loop that the engine is measured against.

It is what a user of PyTorch writes: one module in the default memory layout (torchvision's own for w3),
`torch.optim.SGD`, a `DataLoader` over a client's normalised float images, which go to the device batch by batch; a copy
of the `state_dict` in, the mean of the `state_dict`s out. It trains the engine's clients, on the same images.
"""

import copy
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedcli.bench.small_network import compute_pooled_side, small
from fedcli.bench.workloads import SGD, SMALL_NETWORK
from fedcli.core.federation import Federation
from fedcli.data.dataset import Dataset
from fedcli.runs.machine import deterministic
from fedcli.vision import torchvision

NUM_CLASSES = 10  # of the data sets of all workloads


def build_plain_network(backbone: str, channels: int, image_size: int) -> nn.Module:
    """Returns the network of a workload as PyTorch's users write it, without anything of the project's."""
    if backbone == SMALL_NETWORK:
        return small(channels, image_size, NUM_CLASSES)
    if backbone == "cnn-mcmahan":
        return _build_cnn_mcmahan(channels, image_size)
    return getattr(torchvision().models, backbone)(num_classes=NUM_CLASSES)


def _build_cnn_mcmahan(channels: int, image_size: int) -> nn.Module:
    side = compute_pooled_side(compute_pooled_side(image_size))
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * side**2, 512), nn.ReLU(), nn.Linear(512, NUM_CLASSES),
    )  # fmt: skip


class PlainRounds:
    """Rounds of federated averaging by a plain PyTorch loop.

    Attributes:
        model: The one module that all clients train, one after the other.
        state: The global model, a `state_dict`.
    """

    def __init__(self, fed: Federation, dataset: Dataset):
        """Takes the images of the engine's clients and the sizes of its run, and nothing else of it."""
        self._config = fed.config
        self._device = fed.device
        torch.manual_seed(self._config.seed)
        draws = torch.Generator().manual_seed(self._config.seed)
        network = build_plain_network(self._config.backbone, dataset.channels, dataset.image_size)
        self.model = network.to(fed.device, fed.dtype)
        self.state = copy.deepcopy(self.model.state_dict())
        self._loaders = []
        for positions in fed.training:
            images = TensorDataset(fed.transform(dataset.x_train[positions]), dataset.y_train[positions])
            self._loaders.append(DataLoader(images, self._config.batch_size, shuffle=True, generator=draws))

    @deterministic(False)
    def run_round(self, client_ids: Iterable[int]) -> None:
        """Trains these clients; the new model is their plain mean, since all hold equally many examples."""
        states = []
        for client in client_ids:
            self.model.load_state_dict(self.state)
            optimizer = torch.optim.SGD(self.model.parameters(), **SGD)
            for _ in range(self._config.local_epochs):
                for x, y in self._loaders[client]:
                    optimizer.zero_grad()
                    self.compute_loss(self.model, x, y).backward()
                    optimizer.step()
            states.append(copy.deepcopy(self.model.state_dict()))
        for name in self.state:
            total = sum(state[name] for state in states)
            self.state[name] = total / len(states)

    def load_first_batch(self) -> list[Tensor]:
        """Returns images and labels of a batch of the first client."""
        return next(iter(self._loaders[0]))

    def compute_loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Returns the cross-entropy of a batch, in the precision of the run."""
        x = x.to(self._device)
        y = y.to(self._device)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._config.precision == "bf16"):
            return F.cross_entropy(model(x), y)
