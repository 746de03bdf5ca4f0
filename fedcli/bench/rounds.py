"""What is measured: rounds of a workload, by the engine and by a plain PyTorch loop.

All workloads train with SGD, learning rate 0.01 and momentum 0.9, new in every round. The images are Fashion-MNIST's
and CIFAR-10's where those sets are on the machine, and random ones of the same shape where they are not; every result
says which.

The plain loop is what a user of PyTorch writes: one module in the default memory layout, convolution, ReLU and pooling
in the usual order (torchvision's own network for w3), `torch.optim.SGD`, a `DataLoader` over a client's normalised
float images, which go to the device batch by batch; a copy of the `state_dict` in, the mean of the `state_dict`s out.
Both sides train the same clients on the same number of images.
"""

import copy
import dataclasses
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from fedcli import registry
from fedcli.core import evaluation
from fedcli.core.backbones import torchvision
from fedcli.core.federation import Federation
from fedcli.core.layers import use_live_taps
from fedcli.data import datasets
from fedcli.errors import unknown
from fedcli.runs.autotune import autotune, peak_memory
from fedcli.runs.config import DEFAULT_DATASET, RunConfig, Setup, resolve
from fedcli.runs.prepare import deterministic, make_federation
from fedcli.runs.rounds import one_round

SGD = {"lr": 0.01, "momentum": 0.9}
SIMPLEST = "fedavg"  # the method that adds nothing to the plain loop
FIRST_ROUND = 1000  # the number of the first round, so late that a method's terms have all begun
SCALING_CLIENTS, SCALING_BATCHES = (1, 2, 5, 10, 20, 50, 100), (10, 32, 64, 128)
NUM_TEST = 10_000  # random images for the evaluation
PUBLIC_IMAGES = 512  # for the methods that need some; the plain loop has no part in that
SHAPE = ("cohort_size", "local_epochs", "batch_size")  # of a workload: what a result says


@dataclass(frozen=True)
class Workload:
    """What is trained in a round; all clients hold equally many images, of 10 classes."""

    name: str  # the short one
    dataset: str  # whose images are taken where it is on the machine
    channels: int
    image_size: int  # pixels
    num_clients: int
    images_per_client: int
    cohort_size: int
    local_epochs: int
    batch_size: int
    backbone: str
    words: str = ""  # the name that says what it is

    @property
    def samples(self) -> int:
        """Samples trained in a round, by all clients together."""
        return self.cohort_size * self.local_epochs * self.images_per_client

    @property
    def steps(self) -> int:
        """Local steps in a round, of all clients together."""
        return self.cohort_size * self.local_epochs * -(-self.images_per_client // self.batch_size)


_W1 = Workload("w1", "fmnist", 1, 28, 100, 600, 10, 5, 64, "cnn-mcmahan", words="cnn-five-epochs")
_W2 = replace(_W1, name="w2", cohort_size=20, local_epochs=1, batch_size=10, words="cnn-small-batches")
_W3 = Workload("w3", "cifar10", 3, 32, 10, 4_000, 10, 10, 64, "resnet18", words="resnet18")
WORKLOADS = {workload.name: workload for workload in (_W1, _W2, _W3)}
DEFAULT_WORKLOADS = ("w1", "w2")  # w3 takes hours on a CPU


def find_workload(name: str) -> Workload:
    """The workload of that name, short or in words; refuses another."""
    by_name = WORKLOADS | {workload.words: workload for workload in WORKLOADS.values()}
    if name not in by_name:
        raise unknown("workload", name, by_name, f"there are {', '.join(by_name)}, and methods.")
    return by_name[name]


def scaling_workloads() -> list[Workload]:
    """The first workload with one local epoch, over numbers of clients per round and over batch sizes."""
    base = replace(WORKLOADS["w1"], local_epochs=1)
    over_clients = [replace(base, cohort_size=size) for size in SCALING_CLIENTS]
    over_batches = [replace(base, batch_size=size) for size in SCALING_BATCHES if size != base.batch_size]
    return [replace(w, name=f"w1 K={w.cohort_size} B={w.batch_size}") for w in (*over_clients, *over_batches)]


def prepare_workload(workload: Workload, method: str = SIMPLEST, **machine: Any) -> Setup:
    """Sets up the run of a workload; every option is given, so that no protocol's values enter.

    `machine` is its `device`, `precision`, `clients_per_chunk` and `seed`.
    """
    chosen = registry.find_method(method)
    declared = (*dataclasses.fields(RunConfig), *dataclasses.fields(chosen.config))
    options = {field.name: field.default for field in declared if field.default is not None}
    options |= {name: getattr(workload, name) for name in ("backbone", "num_clients", *SHAPE)}
    options |= {"dataset": DEFAULT_DATASET, "rounds": 2 * FIRST_ROUND, "optimizer": "sgd", **SGD}
    options["protocol"] = next(each.name for each in registry.protocols().values() if each.evaluation == "server")
    if chosen.uses_public_data:
        options |= {"public_dataset": DEFAULT_DATASET, "public_examples": PUBLIC_IMAGES}
    # Without a protocol's setting the images are normalised by their own mean and not augmented.
    return replace(resolve(chosen, {**options, **machine}), setting=None)


def load_images(workload: Workload, seed: int) -> tuple[datasets.Dataset, str]:
    """The images of a workload, as many as its clients hold, and whether they are "real" or "random"."""
    count = workload.num_clients * workload.images_per_client
    if datasets.present(workload.dataset):
        return datasets.take(datasets.load(workload.dataset), count, seed), "real"
    draw = torch.Generator().manual_seed(seed)
    tensors = []
    for number in (count, NUM_TEST):
        shape = (number, workload.channels, workload.image_size, workload.image_size)
        tensors.append(torch.randint(256, shape, generator=draw, dtype=torch.uint8))
        tensors.append(torch.randint(10, (number,), generator=draw))
    return datasets.Dataset(workload.name, *tensors, class_names=tuple(map(str, range(10)))), "random"


class EngineRounds:
    """Rounds of a method by the engine.

    Attributes:
        fed: The federation.
        state: The method's server state.
    """

    def __init__(self, setup: Setup, dataset: datasets.Dataset):
        """Divides the images among the clients and makes the initial state; the peak memory starts anew."""
        if setup.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(setup.device)
        elif Path("/proc/self/clear_refs").exists():
            Path("/proc/self/clear_refs").write_text("5")
        run, public = setup.run, None
        parts = setup.partition(dataset.y_train, run.num_clients, run.seed, None)
        if run.public_dataset is not None:
            public = datasets.public_images(run.public_dataset, dataset, run.public_examples, run.seed)
        self.setup, self.fed = setup, make_federation(setup, dataset, parts, public)
        self.state = setup.method.init(self.fed, setup.options)

    def warm_up(self, number: int) -> int:
        """Trains a round and tests; returns the peak memory of the round in bytes."""
        autotune(self.fed)
        self.fed.start_round()
        cohort, method = self.fed.cohort(number), self.setup.method
        self.state, _ = method.run_round(self.state, cohort, self.fed, self.setup.options)
        peak = peak_memory(self.fed.device)
        evaluation.evaluate(self.fed, method, self.state)
        return peak

    def round(self, number: int) -> dict[str, float]:
        """Trains one round and tests; returns the seconds of each part, as a record has them."""
        self.state, entry = one_round(self.setup, self.fed, self.state, self.fed.cohort(number))
        return entry["seconds"]


def plain_network(workload: Workload) -> nn.Module:
    """The network of a workload as PyTorch's users write it, without anything of the project's."""
    if workload.backbone != "cnn-mcmahan":
        return getattr(torchvision().models, workload.backbone)(num_classes=10)
    width = 64 * (((workload.image_size - 4) // 2 - 4) // 2) ** 2
    return nn.Sequential(
        *(nn.Conv2d(workload.channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, 10)),
    )


class PlainRounds:
    """Rounds of federated averaging by a plain PyTorch loop.

    Attributes:
        model: The one module that all clients train, one after the other.
        parameters: How many it has.
        state: The global model, a `state_dict`.
    """

    def __init__(self, workload: Workload, dataset: datasets.Dataset, fed: Federation):
        """Takes the images and parts of a federation, and nothing else of it."""
        self._epochs, self._device, seed = workload.local_epochs, fed.device, fed.config.seed
        self._bf16 = fed.config.precision == "bf16"
        torch.manual_seed(seed)
        self.model = plain_network(workload).to(fed.device, fed.dtype)
        self.parameters = sum(value.numel() for value in self.model.parameters())
        self._live = copy.deepcopy(self.model)  # the work that has to be done
        use_live_taps(self._live, workload.channels, workload.image_size)
        self.state = copy.deepcopy(self.model.state_dict())
        draw = torch.Generator().manual_seed(seed)
        self._loaders = []
        for part in fed.training:
            client = TensorDataset(fed.transform(dataset.x_train[part]), dataset.y_train[part])
            self._loaders.append(DataLoader(client, workload.batch_size, shuffle=True, generator=draw))

    @deterministic(False)
    def round(self, client_ids: Iterable[int]) -> None:
        """Trains these clients; the new model is their plain mean, since all hold equally many images."""
        states = []
        for client in client_ids:
            self.model.load_state_dict(self.state)
            optimizer = torch.optim.SGD(self.model.parameters(), **SGD)
            for _ in range(self._epochs):
                for x, y in self._loaders[client]:
                    optimizer.zero_grad()
                    self._loss(self.model, x, y).backward()
                    optimizer.step()
            states.append(copy.deepcopy(self.model.state_dict()))
        self.state = {name: sum(state[name] for state in states) / len(states) for name in self.state}

    def flops_per_sample(self, train: bool = True) -> float:
        """Floating-point operations of a training step, forward and backward, over its samples; or of the forward.

        Taps that meet padding only are left out, see `fedcli.core.layers.LiveConv2d`.
        """
        x, y = next(iter(self._loaders[0]))
        with FlopCounterMode(display=False) as counter:
            loss = self._loss(self._live, x, y)
            if train:
                loss.backward()
        return counter.get_total_flops() / len(x)

    def _loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x, y = x.to(self._device), y.to(self._device)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
            return F.cross_entropy(model(x), y)


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Time of some work, until the device has done it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
