"""Speed of the engine against a plain PyTorch loop, both measured in the same run.

The workloads; all train with SGD, learning rate 0.01 and momentum 0.9, new in every round:

    w1    28 x 28 grey, 100 clients x 600 images, 10 a round, 5 epochs, batch 64, `cnn-mcmahan`
    w2    the same images and network, 20 clients a round, 1 epoch, batch 10
    w3    32 x 32 colour, 10 clients x 4,000 images, all in a round, 10 epochs, batch 64, `resnet18` (7 x 7 stem)

The images are Fashion-MNIST's and CIFAR-10's where those sets are on the machine, and random ones of the same shape
where they are not; every result says which.

The plain loop is what a user of PyTorch writes: one module in the default memory layout, convolution, ReLU and pooling
in the usual order (torchvision's own network for w3), `torch.optim.SGD`, a `DataLoader` over a client's normalised
float images, which go to the device batch by batch; a copy of the `state_dict` in, the mean of the `state_dict`s out.
Both sides train the same clients on the same number of images, under the same threads and precision settings. Each has
one round to warm up; then a round of the engine and one of the plain loop take turns, so that a noisy machine hits
both. The ratio is the median over these pairs of plain seconds over engine seconds: above 1 the engine is faster.

The floors say how fast the plain loop's work could be at best, by this machine's own ceilings: arithmetic, the FLOPs of
a round over those of the fastest of several matrix products and of the network's own convolutions in the same
precision, done by all threads together and by each thread alone; memory, the bytes of parameters, gradients and
momentum, each read and written once in every step of every client, over those of a large copy. The floor is the larger
of the two, and the share of it that is reached is floor over measured time. The evaluation's floor is the arithmetic of
its forward passes. A floor above the measured time is a measurement that has failed, most likely because other programs
took the cores while the ceilings were measured; it is printed as such.

Rounds divided among workers are measured too, each worker with one thread, as a device of its own would be, and beside
them one process with all threads. From what one worker computes, what travels how fast, and what the server does on
every worker, a model says what a round takes at other numbers of workers. Beside the workloads above it knows `digits`,
8 x 8 grey, 10 clients x 143 images, all in a round, 2 epochs, batch 16, `cnn-small`.
"""

import copy
import csv
import dataclasses
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from fedcli import registry
from fedcli.core import evaluation
from fedcli.core.autotune import autotune, peak_memory
from fedcli.core.federation import Federation
from fedcli.data import datasets
from fedcli.errors import UserError, unknown
from fedcli.runs.config import DEFAULT_DATASET, RunConfig, Setup, resolve
from fedcli.runs.prepare import federation, machine_settings
from fedcli.runs.records import environment
from fedcli.runs.workers import joined, launch

SGD = {"lr": 0.01, "momentum": 0.9}
FIRST_ROUND = 1000  # the number of the first round, so late that a method's terms have all begun
MATMUL_SIDES = {"cpu": (2048, 1024, 512), "cuda": (8192, 4096)}
COPY_BYTES = 2**28  # beyond any cache
TRIES, LASTING = 4, 0.15  # tries of each ceiling, of which the fastest counts; seconds of a try, at least
SCALING_CLIENTS, SCALING_BATCHES = (1, 2, 5, 10, 20, 50, 100), (10, 32, 64, 128)
PUBLIC_IMAGES = 512  # for the methods that need some; the plain loop has no part in that
SHAPE = ("cohort_size", "local_epochs", "batch_size")  # of a workload: what a result says
COLUMNS = (
    "workload", "engine", "device", "method", "seconds_per_round", "seconds_spread", "plain_seconds_per_round",
    "plain_spread", "ratio", "samples_per_second", "floor_seconds", "floor_share", "arithmetic_floor_seconds",
    "memory_floor_seconds", "peak_bytes", "evaluation_seconds", "evaluation_floor_seconds", "data_seconds_share",
    "images", "torch", "threads", "hardware", "precision", *SHAPE, "repeats", "seed",
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """What is trained in a round; all clients hold equally many images, of 10 classes."""

    name: str
    dataset: str  # whose images are taken where it is on the machine
    channels: int
    image_size: int  # pixels
    num_clients: int
    images_per_client: int
    cohort_size: int
    local_epochs: int
    batch_size: int
    backbone: str
    num_test: int = 10_000  # random images for the evaluation

    @property
    def samples(self) -> int:
        """Samples trained in a round, by all clients together."""
        return self.cohort_size * self.local_epochs * self.images_per_client

    @property
    def steps(self) -> int:
        """Local steps in a round, of all clients together."""
        return self.cohort_size * self.local_epochs * -(-self.images_per_client // self.batch_size)


_W1 = Workload("w1", "fmnist", 1, 28, 100, 600, 10, 5, 64, "cnn-mcmahan")
_W2 = replace(_W1, name="w2", cohort_size=20, local_epochs=1, batch_size=10)
_W3 = Workload("w3", "cifar10", 3, 32, 10, 4_000, 10, 10, 64, "resnet18")
WORKLOADS = {workload.name: workload for workload in (_W1, _W2, _W3)}
DEFAULT_WORKLOADS = ("w1", "w2")  # w3 takes hours on a CPU


DIVIDED = {**WORKLOADS, "digits": Workload("digits", "digits", 1, 8, 10, 143, 10, 2, 16, "cnn-small")}
SAMPLE = {"w3": 64}  # images a client, one epoch, where a round takes hours; what is computed is scaled up
TURNS = 2  # passes over the numbers of workers, so that a noisy machine hits all of them
MODELLED = (1, 2, 4, 8, 16, 32, 64)  # workers


def find_workload(name: str, known: Mapping[str, Workload] = WORKLOADS) -> Workload:
    """The workload of that name.

    Raises:
        UserError: If there is none.
    """
    if name not in known:
        raise unknown("workload", name, known, f"there are {', '.join(known)}.")
    return known[name]


def scaling_workloads() -> list[Workload]:
    """The first workload with one local epoch, over numbers of clients per round and over batch sizes."""
    base = replace(WORKLOADS["w1"], local_epochs=1)
    varied = [replace(base, cohort_size=size) for size in SCALING_CLIENTS]
    varied += [replace(base, batch_size=size) for size in SCALING_BATCHES if size != base.batch_size]
    return [replace(each, name=f"w1 K={each.cohort_size} B={each.batch_size}") for each in varied]


def simplest_method() -> str:
    """The name of the first registered method that others reduce to and that reduces to none."""
    known = registry.methods().values()
    bases = {method.reduces_to[0] for method in known if method.reduces_to is not None}
    return next(method.name for method in known if method.reduces_to is None and method.name in bases)


def load_images(workload: Workload, seed: int) -> tuple[datasets.Dataset, str]:
    """The images of a workload, as many as its clients hold, and whether they are "real" or "random"."""
    count = workload.num_clients * workload.images_per_client
    if workload.dataset in datasets.names() and datasets.describe(workload.dataset)["present"]:
        return datasets.take(datasets.load(workload.dataset), count, seed), "real"
    draw = torch.Generator().manual_seed(seed)

    def part(number: int) -> tuple[Tensor, Tensor]:
        shape = (number, workload.channels, workload.image_size, workload.image_size)
        pixels = torch.randint(256, shape, generator=draw, dtype=torch.uint8)
        return pixels, torch.randint(10, (number,), generator=draw)

    classes = tuple(map(str, range(10)))
    return datasets.Dataset(workload.name, *part(count), *part(workload.num_test), class_names=classes), "random"


class EngineRounds:
    """Rounds of a method by the engine.

    Attributes:
        fed: The federation.
        state: The method's server state.
        partition_seconds: Time it took to divide the images among the clients.
        models_tested: By the last evaluation, each on all test images.
    """

    def __init__(self, setup: Setup, dataset: datasets.Dataset):
        self.setup = setup
        start = time.perf_counter()
        parts = setup.partition(dataset.y_train, setup.run.num_clients, setup.run.seed, None)
        self.partition_seconds = time.perf_counter() - start
        run, public = setup.run, None
        if run.public_dataset is not None:
            public = datasets.public_images(run.public_dataset, dataset, run.public_examples, run.seed)
        self.fed = federation(setup, dataset, parts, public)
        self.state = setup.method.init(self.fed, setup.options)

    def round(self, number: int) -> None:
        """Trains one round; `fed.seconds` then says what it spent on what."""
        self.fed.start_round()
        cohort = self.fed.cohort(number)
        self.state, _ = self.setup.method.run_round(self.state, cohort, self.fed, self.setup.options)

    def evaluate(self) -> None:
        """Tests the model as it is, or every client's that has changed."""
        before, personal = set(self.fed.outputs), self.setup.method.personal is not None
        evaluation.evaluate(self.fed, self.setup.method, self.state)
        new = len(self.fed.outputs.keys() - before)  # none where outputs are not kept: then all models are run
        self.models_tested = new or (self.fed.num_clients if personal else 1)


class PlainCnn(nn.Module):
    """The network of w1 and w2 as PyTorch's users write it."""

    def __init__(self, channels: int, image_size: int):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(channels, 32, 5), nn.Conv2d(32, 64, 5)
        self.fc1 = nn.Linear(64 * (((image_size - 4) // 2 - 4) // 2) ** 2, 512)
        self.fc2 = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits `[B, 10]` of images `[B, channels, H, W]`."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def plain_network(workload: Workload) -> nn.Module:
    """The network of a workload without anything of the project's."""
    if workload.backbone == "cnn-mcmahan":
        return PlainCnn(workload.channels, workload.image_size)
    from fedcli.core.backbones import torchvision

    return getattr(torchvision().models, workload.backbone)(num_classes=10)


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
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.model = plain_network(workload).to(fed.device, fed.dtype)
        self.parameters = sum(value.numel() for value in self.model.parameters())
        self.state = copy.deepcopy(self.model.state_dict())
        draw = torch.Generator().manual_seed(seed)
        self._loaders = []
        for part in fed.training:
            client = TensorDataset(fed.transform(dataset.x_train[part]), dataset.y_train[part])
            self._loaders.append(DataLoader(client, workload.batch_size, shuffle=True, generator=draw))

    def round(self, client_ids: Iterable[int]) -> None:
        """Trains these clients; the new model is their plain mean, since all hold equally many images."""
        states = []
        for client in client_ids:
            self.model.load_state_dict(self.state)
            optimizer = torch.optim.SGD(self.model.parameters(), **SGD)
            for _ in range(self._epochs):
                for x, y in self._loaders[client]:
                    optimizer.zero_grad()
                    self._loss(x, y).backward()
                    optimizer.step()
            states.append(copy.deepcopy(self.model.state_dict()))
        self.state = {name: sum(state[name] for state in states) / len(states) for name in self.state}

    def flops_per_sample(self, train: bool = True) -> float:
        """Floating-point operations of a training step, forward and backward, over its samples; or of the forward."""
        x, y = next(iter(self._loaders[0]))
        with FlopCounterMode(display=False) as counter:
            loss = self._loss(x, y)
            if train:
                loss.backward()
        return counter.get_total_flops() / len(x)

    def convolutions(self) -> tuple["Convolution", ...]:
        """The kinds of convolution in a training step."""
        found: dict[Convolution, None] = {}

        def note(layer: nn.Conv2d, given: tuple[Tensor], out: Tensor) -> None:
            sizes = tuple(given[0].shape), tuple(layer.weight.shape)
            found[Convolution(*sizes, layer.stride, layer.padding, layer.groups)] = None

        layers = [layer for layer in self.model.modules() if isinstance(layer, nn.Conv2d)]
        hooks = [layer.register_forward_hook(note) for layer in layers]
        self._loss(*next(iter(self._loaders[0])))
        for hook in hooks:
            hook.remove()
        return tuple(found)

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = x.to(self._device), y.to(self._device)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
            return F.cross_entropy(self.model(x), y)


class Ceilings(NamedTuple):
    """What the device does at best."""

    flops: float  # per second
    bandwidth: float  # bytes per second, read and written


class Convolution(NamedTuple):
    """A convolution as `torch.nn.functional.conv2d` is given it."""

    images: tuple[int, ...]  # [B, C, H, W]
    weight: tuple[int, ...]
    stride: tuple[int, int]
    padding: tuple[int, int]
    groups: int


@cache
def ceilings(device: torch.device, precision: str, convolutions: tuple[Convolution, ...]) -> Ceilings:
    """The ceilings of a device in the precision of a run, see the module's docstring."""
    dtype = {"float64": torch.float64, "bf16": torch.bfloat16}.get(precision, torch.float32)
    works: list[tuple[int, Callable[[], Any]]] = []  # FLOPs, and what takes them
    for side in MATMUL_SIDES[device.type]:
        left, right = torch.randn(2, side, side, device=device).to(dtype)
        works.append((2 * side**3, partial(torch.matmul, left, right)))
    for kind in convolutions:
        tensors = [torch.randn(size, device=device).to(dtype) for size in kind[:2]]
        x, weight = (tensor.to(memory_format=torch.channels_last, copy=True) for tensor in tensors)
        work = partial(F.conv2d, x, weight, stride=kind.stride, padding=kind.padding, groups=kind.groups)
        works.append((2 * work().numel() * weight[0].numel(), work))
    source = torch.zeros(COPY_BYTES // 4, device=device)
    copy = partial(torch.empty_like(source).copy_, source)
    return Ceilings(max(_rate(*work, device) for work in works), _rate(2 * COPY_BYTES, copy, device))


def _rate(amount: int, work: Callable[[], Any], device: torch.device) -> float:
    """How much of an amount goes through some work in a second at best: by all threads together, or by each alone."""
    best = 0.0
    for workers in {1, torch.get_num_threads() if device.type == "cpu" else 1}:
        once = min(_seconds(partial(_repeat, work, 1, workers), device) for _ in range(2))
        times = math.ceil(LASTING / once)
        seconds = min(_seconds(partial(_repeat, work, times, workers), device) for _ in range(TRIES))
        best = max(best, workers * times * amount / seconds)
    return best


def _repeat(work: Callable[[], Any], times: int, workers: int) -> None:
    """Does some work so many times in each of some threads, among which those of PyTorch are divided."""

    def again(_: int) -> None:
        for _ in range(times):
            work()

    threads = torch.get_num_threads()
    with ThreadPoolExecutor(workers, "", partial(torch.set_num_threads, threads // workers)) as pool:
        list(pool.map(again, range(workers)))
    torch.set_num_threads(threads)


def floors(
    workload: Workload, flops_per_sample: float, parameters: int, item_bytes: int, limits: Ceilings
) -> dict[str, float]:
    """The least seconds that a round's work needs, see the module's docstring.

    Args:
        workload: The round.
        flops_per_sample: Of a training step, over its samples.
        parameters: Of the network.
        item_bytes: Bytes of a parameter.
        limits: What the device does at best.
    """
    arithmetic = workload.samples * flops_per_sample / limits.flops
    touched = 2 * 3 * parameters * item_bytes  # parameter, gradient and momentum: each read and written
    memory = workload.steps * touched / limits.bandwidth
    return {
        "floor_seconds": max(arithmetic, memory),
        "arithmetic_floor_seconds": arithmetic,
        "memory_floor_seconds": memory,
    }


class Case(NamedTuple):
    """A measurement that has been checked and can start."""

    workload: Workload
    setup: Setup
    repeats: int  # pairs of rounds that are timed


def prepare(
    workload: Workload, *, method: str | None = None, epochs: int | None = None, repeats: int = 5, **machine: Any
) -> Case:
    """Checks a measurement; every option of its run is given, so that no protocol's values enter.

    Args:
        workload: The workload.
        method: Name of a method or path of a method file; the simplest one where None.
        epochs: Local epochs in place of the workload's.
        repeats: Rounds of each side that are timed, after the warm-up.
        **machine: `device`, `precision`, `clients_per_chunk` and `seed`, as for a run.

    Raises:
        UserError: If an option is out of range or the method unknown.
    """
    for flag, value in (("--epochs", epochs), ("--repeats", repeats)):
        if value is not None and value < 1:
            raise UserError(f"{flag} must be >= 1 (got {value}); choose a value in that range.")
    workload = replace(workload, local_epochs=epochs or workload.local_epochs)
    chosen = registry.find_method(method or simplest_method())
    known = (*dataclasses.fields(RunConfig), *dataclasses.fields(chosen.config))
    defaults = {field.name: field.default for field in known if field.default is not None}
    protocol = next(each.name for each in registry.protocols().values() if each.evaluation == "server")
    rounds = FIRST_ROUND + 1 + repeats
    own = {"protocol": protocol, "dataset": DEFAULT_DATASET, "rounds": rounds, "optimizer": "sgd", **SGD}
    shape = {name: getattr(workload, name) for name in ("backbone", "num_clients", *SHAPE)}
    if chosen.uses_public_data:
        own |= {"public_dataset": DEFAULT_DATASET, "public_examples": PUBLIC_IMAGES}
    setup = resolve(chosen, {**defaults, **own, **shape, **machine})
    # Without a protocol's setting the images are normalised by their own mean and not augmented.
    return Case(workload, replace(setup, setting=None), repeats)


def measure(case: Case, progress: Callable[[str], Any] = lambda text: None) -> dict[str, Any]:
    """Measures one workload.

    Args:
        case: What to measure.
        progress: Told what is being done.

    Returns:
        The result, by `COLUMNS`. `engine` is `Engine.mode`; spreads are [least, largest]. `peak_bytes` is
        the engine's, its images included: on CUDA what PyTorch holds, on a CPU what the process does (where the system
        cannot set the process's peak back, the largest so far). `evaluation_seconds` is a pass over the test images by
        the engine, for every model that a round has changed. `data_seconds_share` is what a round spends outside of
        local training: drawing the batches, aggregation, and the drawing of the partition, which is counted whole
        though a run does it once.
    """
    workload, setup, repeats = case
    dataset, images = load_images(workload, setup.run.seed)
    _reset_peak(setup.device)
    engine = EngineRounds(setup, dataset)
    with machine_settings(engine.fed):  # what a run would set, for both sides
        autotune(engine.fed)
        progress(f"{workload.name}: warming up")
        engine.round(FIRST_ROUND)
        engine.evaluate()
        measured = {"images": images, "repeats": repeats, "peak_bytes": peak_memory(setup.device)}
        plain = PlainRounds(workload, dataset, engine.fed)
        plain.round(engine.fed.cohort(FIRST_ROUND).client_ids)
        assert plain.parameters == engine.fed.sizes.parameters, "the two sides train different networks"
        measured |= _time_pairs(case, engine, plain, progress)
        progress(f"{workload.name}: ceilings")
        limits = ceilings(setup.device, setup.run.precision, plain.convolutions())
        measured |= floors(workload, plain.flops_per_sample(), plain.parameters, engine.fed.dtype.itemsize, limits)
        measured["floor_share"] = measured["floor_seconds"] / measured["seconds_per_round"]
        tested = engine.models_tested * len(engine.fed.test_labels)
        measured["evaluation_floor_seconds"] = tested * plain.flops_per_sample(train=False) / limits.flops
        measured |= _describe(workload, engine)
    return {name: measured[name] for name in COLUMNS}


def _time_pairs(case: Case, engine: EngineRounds, plain: PlainRounds, progress: Callable[[str], Any]) -> dict[str, Any]:
    """What the seconds of the rounds say, engine and plain loop taking turns."""
    own, server, other, tests = [], [], [], []
    workload, repeats = case.workload, case.repeats
    for number in range(FIRST_ROUND + 1, FIRST_ROUND + 1 + repeats):
        progress(f"{workload.name}: pair {number - FIRST_ROUND} of {repeats}")
        clients = engine.fed.cohort(number).client_ids
        own.append(_seconds(partial(engine.round, number), engine.fed.device))
        server.append(own[-1] - engine.fed.seconds["train"])
        other.append(_seconds(partial(plain.round, clients), engine.fed.device))
        tests.append(_seconds(engine.evaluate, engine.fed.device))
    return {
        "seconds_per_round": median(own),
        "seconds_spread": [min(own), max(own)],
        "plain_seconds_per_round": median(other),
        "plain_spread": [min(other), max(other)],
        "ratio": median(b / a for a, b in zip(own, other, strict=True)),
        "samples_per_second": workload.samples / median(own),
        "evaluation_seconds": median(tests),
        "data_seconds_share": (engine.partition_seconds + median(server)) / (engine.partition_seconds + median(own)),
    }


def _describe(workload: Workload, engine: EngineRounds) -> dict[str, Any]:
    """What was measured, on which machine."""
    fed, about = engine.fed, environment(engine.fed.device)
    return {
        "workload": workload.name,
        "engine": fed.engine.mode,
        "device": str(fed.device),
        "method": engine.setup.method.name,
        "torch": about["versions"]["torch"],
        "threads": about["hardware"]["threads"],
        "hardware": about["hardware"]["name"],
        **{name: getattr(fed.config, name) for name in ("precision", *SHAPE, "seed")},
    }


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Time of some work, until the device has done it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _reset_peak(device: torch.device) -> None:
    """Sets the peak memory back to what is used now, on Linux that of the process too."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


def result_file(path: Path, device: torch.device, ending: str) -> Path:
    """The path as it is; of a folder, the file in it that is named after the device and the version of PyTorch."""
    if not path.is_dir():
        return path
    about = environment(device)["hardware"]
    name = about["name"] if device.type == "cuda" else f"cpu {about['cores']} cores"
    words = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    return path / f"{words}-torch{torch.__version__.split('+')[0]}{ending}"


def append_csv(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Appends results to a CSV file, with `COLUMNS` as its first line where it is new; a spread is a JSON list.

    Raises:
        UserError: If the file holds something else.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    if lines and lines[0] != ",".join(COLUMNS):
        raise UserError(
            f"'{path}' does not hold results of this command (got '{lines[0][:40]}' as its first line); "
            f"choose a new file or one that --csv wrote."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not lines:
            writer.writerow(COLUMNS)
        for result in results:
            writer.writerow(json.dumps(cell) if isinstance(cell, list) else cell for cell in result.values())


TABLES = (  # column: cell, of a result; each table in the width of a terminal, times in seconds
    {
        "Workload": "{workload}",
        "Engine": "{engine}",
        "Round": "{seconds_per_round} ({seconds_spread})",
        "Plain loop": "{plain_seconds_per_round} ({plain_spread})",
        "Ratio": "{ratio}x",
        "Samples/s": "{samples_per_second}",
    },
    {
        "Workload": "{workload}",
        "Floor": "{floor_seconds} ({reached})",
        "Not training": "{data_percent} %",
        "Evaluation": "{evaluation_seconds}",
        "Its floor": "{evaluation_floor_seconds} ({evaluation_reached})",
        "Peak MiB": "{peak_mebibytes}",
        "Images": "{images}",
    },
)
MACHINE = (
    "{method} on {device} ({hardware}), threads: {threads}, torch {torch}, {precision}; times in seconds, median of "
    "{repeats} rounds (least-largest)"
)


def table_row(result: dict[str, Any], cells: dict[str, str]) -> list[str]:
    """A result as the cells of one of `TABLES`."""

    def text(value: Any) -> str:
        if isinstance(value, list):
            return "-".join(map(text, value))
        return _short(value) if isinstance(value, float) else str(value)

    def reached(share: float) -> str:
        return f"{share:.0%}" if share <= 1 else "failed: too high"

    more = {"data_percent": 100 * result["data_seconds_share"], "peak_mebibytes": result["peak_bytes"] / 2**20}
    more["reached"] = reached(result["floor_share"])
    more["evaluation_reached"] = reached(result["evaluation_floor_seconds"] / result["evaluation_seconds"])
    shown = {name: text(value) for name, value in {**result, **more}.items()}
    return [cell.format(**shown) for cell in cells.values()]


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


# Rounds divided among workers


@dataclass(frozen=True)
class Divided:
    """What a round took, medians over rounds; seconds but for the numbers.

    Attributes:
        workload: Its name.
        clients: In a round.
        workers: Processes.
        threads: Of each.
        compute: Local training by the slowest worker, scaled to the whole workload.
        gather: What tensors took to travel.
        server: All else: drawing the batches, and the server's step.
        nbytes: What travelled, of all workers together.
        rounds: How many were measured.
        machine: On which, with which version of PyTorch.
    """

    workload: str
    clients: int
    workers: int
    threads: int
    compute: float
    gather: float
    server: float
    nbytes: float
    rounds: int
    machine: str

    @property
    def seconds(self) -> float:
        """The whole round."""
        return self.compute + self.gather + self.server


def measure_divided(
    names: Sequence[str], counts: Sequence[int], progress: Callable[[str], Any], **options: Any
) -> list[Divided]:
    """Measures rounds at numbers of workers with one thread each, and of one process with a thread a core.

    Args:
        names: Of workloads, also `digits`.
        counts: Of workers.
        progress: Told what is being done.
        **options: As for `prepare`.

    Raises:
        UserError: If an option is out of range, or a worker fails.
    """
    for name in names:
        prepare(find_workload(name, DIVIDED), **options)
    cores = os.cpu_count() or 1
    cases = [(name, *how) for name in names for how in dict.fromkeys([(1, cores), *((count, 1) for count in counts)])]
    rounds: dict[tuple, list[list[float]]] = {case: [] for case in cases}
    for turn in range(TURNS):
        for case in cases:
            name, count, threads = case
            progress(f"{name}: {count} workers, {threads} threads each, turn {turn + 1} of {TURNS}")
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "rounds"
                if launch(rounds_of_worker, name, threads, options, str(file), count=count, restarts=0):
                    raise KeyboardInterrupt
                rounds[case] += json.loads(file.read_text())
    machine = f"{cores} cores of {environment(torch.device('cpu'))['hardware']['name']}, torch {torch.__version__}"
    return [
        Divided(
            name, find_workload(name, DIVIDED).cohort_size, count, threads, *map(median, zip(*found, strict=True)),
            len(found), machine,
        )
        for (name, count, threads), found in rounds.items()
    ]  # fmt: skip


def rounds_of_worker(name: str, threads: int, options: dict[str, Any], file: str) -> int:
    """Runs rounds of a workload as one of several workers; the first writes what each took, as `Divided` has it."""
    whole, images = find_workload(name, DIVIDED), SAMPLE.get(name)
    part = whole if images is None else replace(whole, images_per_client=images, local_epochs=1)
    torch.set_num_threads(threads)
    with joined() as group:
        workload, setup, repeats = prepare(part, **options)
        engine, found = EngineRounds(setup, load_images(workload, setup.run.seed)[0]), []
        with machine_settings(engine.fed):
            autotune(engine.fed)
            for number in range(FIRST_ROUND, FIRST_ROUND + 1 + repeats):  # the first warms up
                group.seconds, group.nbytes = 0.0, 0
                seconds = _seconds(partial(engine.round, number), engine.fed.device)
                training = engine.fed.seconds["train"]
                compute = (training - group.seconds) * whole.samples / part.samples
                found.append([compute, group.seconds, seconds - training, group.nbytes])
        if group.number == 0:
            Path(file).write_text(json.dumps(found[1:]))
    return 0


def modelled(rows: Sequence[Divided], workers: int) -> Divided:
    """What a round of one workload takes at a number of workers, each a device like a thread of this machine.

    A worker trains `ceil(K / W)` of K clients; it receives what the others have trained, `(W - 1) / W` of all, as fast
    as was measured with the fewest workers above one; the server's step is repeated on each.

    Args:
        rows: The workload's measurements, one worker with one thread and some number of workers among them.
        workers: Their number, W.
    """
    one = next(row for row in rows if (row.workers, row.threads) == (1, 1))
    several = min((row for row in rows if row.workers > 1), key=lambda row: row.workers)
    a_share = several.gather / (1 - 1 / several.workers)  # seconds for all bytes
    compute = one.compute * -(-one.clients // workers) / one.clients
    gather = a_share * (1 - 1 / workers)
    return Divided(one.workload, one.clients, workers, 1, compute, gather, one.server, several.nbytes, 0, one.machine)


def read_divided(file: Path) -> list[Divided]:
    """The measurements in the CSV file of a page; none where there is no file.

    Raises:
        UserError: If the file holds something else.
    """
    if not file.is_file():
        return []
    fields = dataclasses.fields(Divided)
    with file.open(newline="", encoding="utf-8") as text:
        lines = csv.reader(text)
        if next(lines, None) != [field.name for field in fields]:
            raise UserError(f"'{file}' does not hold measurements of this command (got another first line); move it.")
        return [Divided(*(field.type(cell) for field, cell in zip(fields, line, strict=True))) for line in lines]


def write_divided(file: Path, rows: Sequence[Divided]) -> list[Divided]:
    """Writes measurements in place of those of the same workloads, and of other machines.

    Returns:
        All that the file has now.
    """
    new = {row.workload for row in rows}
    kept = [row for row in read_divided(file) if row.workload not in new and row.machine == rows[0].machine]
    found = sorted([*kept, *rows], key=lambda row: list(DIVIDED).index(row.workload))
    with file.open("w", newline="", encoding="utf-8") as text:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(field.name for field in dataclasses.fields(Divided))
        writer.writerows(map(dataclasses.astuple, found))
    return found


def divided_page(rows: Sequence[Divided], figure: str) -> str:
    """A page on rounds divided among workers, in Markdown: measured, modelled, and where more stop paying.

    Args:
        rows: The measurements, of one machine.
        figure: File of `plots.divided_figure`.
    """
    counts = ",".join(str(count) for count in sorted({row.workers for row in rows if row.threads == 1}))
    names = list(dict.fromkeys(row.workload for row in rows))
    cores = os.cpu_count()
    lines = [
        "# One run on several workers",
        "",
        f"`fedcli bench {' '.join(names)} --workers {counts} --page PATH` measures this and writes the page; what is "
        "measured of one workload takes the place of its numbers in the CSV file beside the page.",
        "",
        f"On {rows[0].machine}. Medians in seconds a round; the numbers of workers take turns, {TURNS} times. Of w3 "
        f"one epoch on {SAMPLE['w3']} images a client is measured, and its computing scaled to the whole round.",
        "",
        "| workload | workers x threads | rounds | round | computing | gathering | server | MiB gathered | model |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        of_one = [one for one in rows if one.workload == row.workload]
        said = _short(modelled(of_one, row.workers).seconds) if row.threads == 1 and row.workers <= cores else ""
        numbers = (row.seconds, row.compute, row.gather, row.server, row.nbytes / 2**20)
        cells = " | ".join(map(_short, numbers))
        shared = f", sharing {cores} cores" if row.workers * row.threads > cores else ""
        lines.append(f"| {row.workload} | {row.workers} x {row.threads}{shared} | {row.rounds} | {cells} | {said} |")
    lines += ["", f"![Seconds a round over workers, measured and modelled]({figure})", ""]
    lines += [
        "The model: `ceil(K / W) / K` of what one worker computes, plus gathering, `(W - 1) / W` of the bytes at the "
        "measured bandwidth, plus the server's step, which every worker repeats. It supposes a device for each worker; "
        "those of one machine share its memory and caches.",
        "",
        f"| seconds with W workers | {' | '.join(f'W = {count}' for count in MODELLED)} | where it stops paying |",
        "|---" * (len(MODELLED) + 2) + "|",
    ]
    for name in names:
        found = [modelled([row for row in rows if row.workload == name], count) for count in MODELLED]
        cells = " | ".join(_short(row.seconds) for row in found)
        lines.append(f"| {name} | {cells} | {_end_of_gain(found)} |")
    return "\n".join(lines) + "\n"


def _end_of_gain(found: Sequence[Divided]) -> str:
    """From which number of workers on twice as many save less than a tenth, and why."""
    pairs = pairwise(found)
    last = next((row for row, twice in pairs if twice.seconds > 0.9 * row.seconds), found[-1])
    if last is found[-1]:
        return f"not up to {last.workers}"
    if last.workers >= last.clients:
        why = f"each of {last.clients} clients has a worker"
    else:
        why = "gathering" if last.gather > last.server else "the server's step"
        why = f"{why} takes {max(last.gather, last.server) / last.seconds:.0%} of the round"
    return f"{last.workers}: {why}"
