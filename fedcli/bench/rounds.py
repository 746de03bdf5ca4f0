"""What is measured: the workloads, and rounds of them by a plain PyTorch loop.

All workloads train with SGD, learning rate 0.01 and momentum 0.9, new in every round, on the images of Fashion-MNIST
and CIFAR-10.

The plain loop is what a user of PyTorch writes: one module in the default memory layout (torchvision's own for w3),
`torch.optim.SGD`, a `DataLoader` over a client's normalised float images, which go to the device batch by batch; a copy
of the `state_dict` in, the mean of the `state_dict`s out. It trains the engine's clients, on the same images.
"""

import copy
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from fedcli import registry
from fedcli.core.backbones import torchvision
from fedcli.core.federation import Federation
from fedcli.core.layers import use_live_taps
from fedcli.data.datasets import Dataset
from fedcli.runs.config import DEFAULT_DATASET, RunConfig, Setup, resolve
from fedcli.runs.prepare import deterministic

SGD = {"lr": 0.01, "momentum": 0.9}
ROUNDS = 1000  # of a workload's run, whose last ones are timed: in these all of a method's terms have begun
_GREY = {"dataset": "fmnist", "train_examples": 60_000, "num_clients": 100, "backbone": "cnn-mcmahan"}
_COLOUR = {"dataset": "cifar10", "train_examples": 40_000, "num_clients": 10, "backbone": "resnet18"}
WORKLOADS = {  # options of runs; all clients hold equally many images
    "w1": {**_GREY, "cohort_size": 10, "local_epochs": 5, "batch_size": 64},
    "w2": {**_GREY, "cohort_size": 20, "local_epochs": 1, "batch_size": 10},
    "w3": {**_COLOUR, "cohort_size": 10, "local_epochs": 10, "batch_size": 64},
}
WORKLOADS |= {"cnn-five-epochs": WORKLOADS["w1"], "cnn-small-batches": WORKLOADS["w2"], "resnet18": WORKLOADS["w3"]}
_SIZES = *((clients, 64) for clients in (1, 2, 5, 10, 20, 50, 100)), *((10, batch) for batch in (10, 32, 128))
SCALING = {  # w1 with one local epoch, over clients a round and batch sizes
    f"w1 K={clients} B={batch}": WORKLOADS["w1"] | {"local_epochs": 1, "cohort_size": clients, "batch_size": batch}
    for clients, batch in _SIZES
}
PUBLIC_IMAGES = 512  # for the methods that need some; the plain loop has no part in that


def prepare_workload(workload: dict[str, Any], method: str = "fedavg", **more: Any) -> Setup:
    """Sets up the run of a workload with `more` options; every option is given, so that no protocol's values enter."""
    chosen = registry.find_method(method)
    declared = (*fields(RunConfig), *fields(chosen.config))
    options = {option.name: option.default for option in declared if option.default is not None}
    options["protocol"] = next(each.name for each in registry.protocols().values() if each.evaluation == "server")
    if chosen.uses_public_data:
        options |= {"public_dataset": DEFAULT_DATASET, "public_examples": PUBLIC_IMAGES}
    options |= {"rounds": ROUNDS, "optimizer": "sgd", **SGD, **workload, **more}
    # Without a protocol's setting the images are normalised by their own mean and not augmented.
    return replace(resolve(chosen, options, need_data=False), setting=None)


def plain_network(backbone: str, channels: int, image_size: int) -> nn.Module:
    """The network of a workload as PyTorch's users write it, without anything of the project's."""
    if backbone != "cnn-mcmahan":
        return getattr(torchvision().models, backbone)(num_classes=10)
    width = 64 * (((image_size - 4) // 2 - 4) // 2) ** 2
    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, 10)),
    )


class PlainRounds:
    """Rounds of federated averaging by a plain PyTorch loop.

    Attributes:
        model: The one module that all clients train, one after the other.
        state: The global model, a `state_dict`.
    """

    def __init__(self, fed: Federation, dataset: Dataset):
        """Takes the images of the engine's clients and the sizes of its run, and nothing else of it."""
        self._run, self._device = fed.config, fed.device
        torch.manual_seed(self._run.seed)
        draw = torch.Generator().manual_seed(self._run.seed)
        network = plain_network(self._run.backbone, dataset.channels, dataset.image_size)
        self.model = network.to(fed.device, fed.dtype)
        self.state = copy.deepcopy(self.model.state_dict())
        clients = [TensorDataset(fed.transform(dataset.x_train[part]), dataset.y_train[part]) for part in fed.training]
        self._loaders = [DataLoader(data, self._run.batch_size, shuffle=True, generator=draw) for data in clients]

    @deterministic(False)
    def round(self, client_ids: Iterable[int]) -> None:
        """Trains these clients; the new model is their plain mean, since all hold equally many images."""
        states = []
        for client in client_ids:
            self.model.load_state_dict(self.state)
            optimizer = torch.optim.SGD(self.model.parameters(), **SGD)
            for _ in range(self._run.local_epochs):
                for x, y in self._loaders[client]:
                    optimizer.zero_grad()
                    self._loss(self.model, x, y).backward()
                    optimizer.step()
            states.append(copy.deepcopy(self.model.state_dict()))
        self.state = {name: sum(state[name] for state in states) / len(states) for name in self.state}

    def flops_per_sample(self) -> float:
        """Floating-point operations of a training step, forward and backward, over its samples.

        Taps that meet padding only are left out, see `fedcli.core.layers.LiveConv2d`.
        """
        x, y = next(iter(self._loaders[0]))
        live = copy.deepcopy(self.model)
        use_live_taps(live, x.shape[1], x.shape[2])
        with FlopCounterMode(display=False) as counter:
            self._loss(live, x, y).backward()
        return counter.get_total_flops() / len(x)

    def _loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x, y = x.to(self._device), y.to(self._device)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._run.precision == "bf16"):
            return F.cross_entropy(model(x), y)
