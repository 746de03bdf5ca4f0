"""Speed of the engine against a plain PyTorch loop, both measured in the same run, and how a result is shown and kept.

The plain loop is what a user of PyTorch writes: one module in the default memory layout (torchvision's own for w3),
`torch.optim.SGD`, a `DataLoader` over a client's normalised float images, which go to the device batch by batch; a copy
of the `state_dict` in, the mean of the `state_dict`s out. It trains the engine's clients, on the same images.

Both sides run under the same threads and precision; the engine, as in a run, by operations that give the same bits each
time, the plain loop by PyTorch's default ones. After a round each to warm up (of the engine on CUDA as many as it takes
until all steps are replays) they take turns, so that a noisy machine hits both. The ratio is the median over these
pairs of plain seconds over engine seconds: above 1 the engine is faster.

A lower bound, called "floor" in files, is the time that the arithmetic or the memory traffic takes at this machine's
own peak rates, the larger of the two. Arithmetic: the FLOPs of the plain loop's round over those of a large matrix
product in the same precision, done by each thread or process alone. Memory: the bytes of parameters, gradients and
momentum, each read and written once in every step of every client, over those of a large copy. A bound above the
measured time has failed, most likely because other programs took the cores meanwhile.
"""

import copy
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from fedcli import registry
from fedcli.bench import small_network
from fedcli.core.engine import Engine
from fedcli.core.federation import Federation
from fedcli.core.layers import use_live_taps
from fedcli.data import datasets
from fedcli.data.dataset import Dataset
from fedcli.errors import UserError
from fedcli.runs.autotune import PASSES, autotune, peak_memory, until_captured
from fedcli.runs.machine import deterministic, environment, flushed_denormals, machine_settings
from fedcli.runs.options import RunConfig
from fedcli.runs.prepare import prepare
from fedcli.runs.resolve import DEFAULT_DATASET, Setup, resolve
from fedcli.runs.rounds import one_round
from fedcli.vision import torchvision

SGD: dict[str, Any] = {"lr": 0.01, "momentum": 0.9}  # of all workloads
ROUNDS = 1000  # of a workload's run, whose last ones are timed: in these all of a method's terms have begun
PROTOCOL = "own:data"  # all images of the test part are tested on; every option has a value of the workload's
_GREY = {"dataset": "fmnist", "train_examples": 60_000, "num_clients": 100, "backbone": "cnn-mcmahan"}
SMALL_NETWORK = f"{small_network.__file__}:small"
_COLOUR = {"dataset": "cifar10", "train_examples": 40_000, "num_clients": 10, "backbone": "resnet18"}
# Options of runs; all clients hold equally many images.
_CNN_FIVE_EPOCHS = {**_GREY, "cohort_size": 10, "local_epochs": 5, "batch_size": 64}
_CNN_SMALL_BATCHES = {**_GREY, "cohort_size": 20, "local_epochs": 1, "batch_size": 10}
_RESNET18 = {**_COLOUR, "cohort_size": 10, "local_epochs": 10, "batch_size": 64}
_SMALL_NETWORK = {**_CNN_FIVE_EPOCHS, "backbone": SMALL_NETWORK}
WORKLOADS = {  # by the short names that files of measurements have, and by those that say what they are
    "w1": _CNN_FIVE_EPOCHS,
    "w2": _CNN_SMALL_BATCHES,
    "w3": _RESNET18,
    "w4": _SMALL_NETWORK,
    "cnn-five-epochs": _CNN_FIVE_EPOCHS,
    "cnn-small-batches": _CNN_SMALL_BATCHES,
    "resnet18": _RESNET18,
    "small-network": _SMALL_NETWORK,
}


def _scaling() -> dict[str, dict[str, Any]]:
    """The first workload with one local epoch, by its name, over clients a round and then over batch sizes."""
    sizes = [{"cohort_size": cohort_size, "batch_size": 64} for cohort_size in (1, 2, 5, 10, 20, 50, 100)]
    sizes += [{"cohort_size": 10, "batch_size": batch_size} for batch_size in (10, 32, 128)]
    workloads = {}
    for size in sizes:
        name = f"w1 K={size['cohort_size']} B={size['batch_size']}"
        workloads[name] = {**_CNN_FIVE_EPOCHS, "local_epochs": 1, **size}
    return workloads


SCALING = _scaling()
PUBLIC_IMAGES = 512  # for the methods that need some; the plain loop has no part in that
MACHINE = (
    "{device} ({hardware}), threads: {threads}, torch {torch}, {precision}; seconds, median of {repeats} rounds (least-"
    "largest); Plain: of a plain PyTorch loop, Test: of the test images"
)
RANDOM_IMAGES = Path(__file__).with_name("random_images.py")  # a function for each data set of a workload
MATMUL_SIDE = {"cpu": 2048, "cuda": 8192}
COPY_BYTES = 2**28  # beyond any cache
TRIES = 10  # of each rate, of which the fastest counts


def prepare_workload(workload: dict[str, Any], method: str = "fedavg", **given: Any) -> Setup:
    """Sets up the run of a workload with the options that are given beside its own.

    Every option has a value then, so that none comes from a protocol.
    """
    chosen = registry.find_method(method)
    options = {
        **vars(RunConfig()),
        **vars(chosen.config()),
        "protocol": PROTOCOL,
        "rounds": ROUNDS,
        "optimizer": "sgd",
    }
    if chosen.uses_public_data:
        options["public_dataset"] = DEFAULT_DATASET
        options["public_examples"] = PUBLIC_IMAGES
    options |= {**SGD, **workload, **given}
    # Without a protocol's setting the images are normalised by their own mean and not augmented.
    return replace(resolve(chosen, options, need_data=False), setting=None)


def with_random_images(setup: Setup) -> Setup:
    """The same run on random images in the shape of its data set."""
    run = replace(setup.run, dataset=f"{RANDOM_IMAGES}:{setup.dataset}")
    return replace(setup, run=run)


def plain_network(backbone: str, channels: int, image_size: int) -> nn.Module:
    """The network of a workload as PyTorch's users write it, without anything of the project's."""
    if backbone == SMALL_NETWORK:
        return small_network.small(channels, image_size, num_classes=10)
    if backbone != "cnn-mcmahan":
        return getattr(torchvision().models, backbone)(num_classes=10)
    side = (image_size - 4) // 2  # of an image after one convolution and pooling
    side = (side - 4) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * side**2, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


class PlainRounds:
    """Rounds of federated averaging by a plain PyTorch loop.

    Attributes:
        model: The one module that all clients train, one after the other.
        state: The global model, a `state_dict`.
    """

    def __init__(self, fed: Federation, dataset: Dataset):
        """Takes the images of the engine's clients and the sizes of its run, and nothing else of it."""
        self._run = fed.config
        self._device = fed.device
        torch.manual_seed(self._run.seed)
        draws = torch.Generator().manual_seed(self._run.seed)
        network = plain_network(self._run.backbone, dataset.channels, dataset.image_size)
        self.model = network.to(fed.device, fed.dtype)
        self.state = copy.deepcopy(self.model.state_dict())
        self._loaders = []
        for part in fed.training:
            own_images = TensorDataset(fed.transform(dataset.x_train[part]), dataset.y_train[part])
            self._loaders.append(DataLoader(own_images, self._run.batch_size, shuffle=True, generator=draws))

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
        for name in self.state:
            total = sum(state[name] for state in states)
            self.state[name] = total / len(states)

    def flops_per_sample(self) -> float:
        """Floating-point operations of a training step, forward and backward, over its samples.

        Taps that meet padding only are left out, see `fedcli.core.layers.LiveConv2d`.
        """
        x, y = next(iter(self._loaders[0]))
        live = copy.deepcopy(self.model)
        use_live_taps(live, *x.shape[1:3])
        with FlopCounterMode(display=False) as counter:
            self._loss(live, x, y).backward()
        return counter.get_total_flops() / len(x)

    def _loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = x.to(self._device)
        y = y.to(self._device)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._run.precision == "bf16"):
            return F.cross_entropy(model(x), y)


@flushed_denormals()
def measure(name: str, setup: Setup, repeats: int, progress: Callable[[str], Any], with_plain: bool) -> dict[str, Any]:
    """Times the last rounds of a run, in which all of a method's terms have begun.

    Args:
        name: Of the workload, or of the protocol.
        setup: Of the run; see `prepare_workload`.
        repeats: Rounds to time.
        progress: Told what is being done.
        with_plain: Whether a round of the plain loop follows each round of the engine.

    Returns:
        What was run and what it took; spreads are [least, largest]. `peak_bytes` is of the engine's first round: on
        CUDA what PyTorch holds, on a CPU what the process does (the largest so far where the system cannot reset it).
        `evaluation_seconds` is a test of every model that a round has changed, `data_seconds_share` what a round spends
        on drawing batches and on aggregation. Without the plain loop `whole_seconds`, of all rounds, replaces bounds.
    """
    images = "real"
    if not datasets.present(setup.dataset):
        images = "random"
        setup = with_random_images(setup)
    run = setup.run
    reset_peak_memory(setup.device)
    prepared = prepare(setup)
    fed = prepared.fed
    examples = len(prepared.dataset.y_train) // run.num_clients  # of a client
    passes = setup.cohort_size * run.local_epochs  # in a round, over a client's examples
    with machine_settings(fed):  # what a run would set, for both sides, as are denormal numbers
        autotune(fed)
        timed = _time_rounds(name, setup, fed, prepared.dataset if with_plain else None, repeats, progress)
        result = {
            "workload": name,
            "engine": fed.engine.mode,
            "device": str(setup.device),
            "method": setup.method.name,
            **_times(timed, samples=passes * examples),
            "images": images,
            **_conditions(setup),
            "repeats": repeats,
        }
        if timed.plain is None:
            tested = timed.rounds + timed.seconds["evaluate"]
            return result | {"whole_seconds": run.rounds * tested.median()}
        progress(f"{name}: peak rates")
        bounds = _lower_bounds(fed, timed.plain, passes, examples)
        return result | _comparison(timed) | _shares(bounds, timed.rounds.median())


def reset_peak_memory(device: torch.device) -> None:
    """Lets `peak_memory` count from here on, where the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


class _Timed(NamedTuple):
    """What was measured of some rounds."""

    seconds: pd.DataFrame  # of the parts of each round, a row a round, and of the loop's round as `plain`
    peak_bytes: int  # of the engine's first round
    plain: PlainRounds | None

    @property
    def around_training(self) -> pd.Series:
        """Of the parts of each of the engine's rounds before and after local training."""
        return self.seconds["data"] + self.seconds["aggregate"]

    @property
    def rounds(self) -> pd.Series:
        """Of each of the engine's rounds, without the test after it."""
        return self.seconds["train"] + self.around_training


def _time_rounds(
    name: str, setup: Setup, fed: Federation, dataset: Dataset | None, repeats: int,
    progress: Callable[[str], Any],
) -> _Timed:  # fmt: skip
    """Times the last rounds of a run after warming up, in turns with a plain loop on the data set, if one is given."""
    warm_up = max(setup.run.rounds - repeats - 1, 0)  # number of the round before the timed ones
    cohort = fed.cohort(warm_up)
    state = setup.method.init(fed, setup.options)
    if fed.engine.graphs is None:
        state, _ = one_round(setup, fed, state, cohort)
    else:
        for _ in until_captured(fed.engine, PASSES):
            state, _ = one_round(setup, fed, state, cohort)
    peak_bytes = peak_memory(setup.device)
    plain = None
    if dataset is not None:
        plain = PlainRounds(fed, dataset)
        plain.round(cohort.client_ids)
    rows = []
    for repeat in range(1, repeats + 1):
        progress(f"{name}: round {repeat} of {repeats}")
        cohort = fed.cohort(warm_up + repeat)
        state, entry = one_round(setup, fed, state, cohort)
        seconds = dict(entry["seconds"])
        if plain is not None:
            seconds["plain"] = seconds_of(partial(plain.round, cohort.client_ids), setup.device)
        rows.append(seconds)
    return _Timed(pd.DataFrame(rows), peak_bytes, plain)


class _LowerBounds(NamedTuple):
    """Seconds that a round takes at least."""

    arithmetic: float
    memory: float


def _lower_bounds(fed: Federation, plain: PlainRounds, passes: int, examples: int) -> _LowerBounds:
    """Measures this machine's peak rates, and what they allow for so many passes over so many examples."""
    dtype = torch.bfloat16 if fed.config.precision == "bf16" else fed.dtype
    rates = peak_rates(fed.engine, dtype)
    arithmetic = passes * examples * plain.flops_per_sample() / rates.flops
    steps = passes * math.ceil(examples / fed.batch_size)
    # Parameter, gradient and momentum, each read and written.
    memory = steps * 2 * 3 * fed.sizes.parameters * fed.dtype.itemsize / rates.bytes
    return _LowerBounds(arithmetic, memory)


def _times(timed: _Timed, samples: int) -> dict[str, Any]:
    """What the engine took for a round of so many samples."""
    pace = timed.rounds.median()
    return {
        "seconds_per_round": pace,
        "seconds_spread": _spread(timed.rounds),
        "samples_per_second": samples / pace,
        "peak_bytes": timed.peak_bytes,
        "evaluation_seconds": timed.seconds["evaluate"].median(),
        "data_seconds_share": timed.around_training.median() / pace,
    }


def _conditions(setup: Setup) -> dict[str, Any]:
    """Under what a run was timed."""
    run = setup.run
    hardware = environment(setup.device)["hardware"]
    return {
        "torch": torch.__version__,
        "threads": hardware["threads"],
        "hardware": hardware["name"],
        "precision": run.precision,
        "cohort_size": run.cohort_size,
        "local_epochs": run.local_epochs,
        "batch_size": run.batch_size,
        "seed": run.seed,
    }


def _comparison(timed: _Timed) -> dict[str, Any]:
    """What the plain loop took, and how many times as long as the engine."""
    plain = timed.seconds["plain"]
    return {
        "plain_seconds_per_round": plain.median(),
        "plain_spread": _spread(plain),
        "ratio": (plain / timed.rounds).median(),
    }


def _shares(bounds: _LowerBounds, pace: float) -> dict[str, Any]:
    """The lower bounds of a round, and the larger one's share of what a round took."""
    floor = max(bounds.arithmetic, bounds.memory)
    return {
        "floor_seconds": floor,
        "floor_share": floor / pace,
        "arithmetic_floor_seconds": bounds.arithmetic,
        "memory_floor_seconds": bounds.memory,
    }


def _spread(seconds: pd.Series) -> list[float]:
    return [*seconds.agg(["min", "max"])]


class PeakRates(NamedTuple):
    """What a machine does in a second at best."""

    flops: float
    bytes: float


def peak_rates(engine: Engine, dtype: torch.dtype) -> PeakRates:
    """Measures the rates in a product of square matrices and in a large copy."""
    device = engine.images.device
    side = MATMUL_SIDE[device.type]
    left, right = torch.randn(2, side, side, device=device).to(dtype)
    products = times_per_second(partial(torch.matmul, left, right), engine)
    source = torch.zeros(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    copies = times_per_second(partial(target.copy_, source), engine)
    return PeakRates(flops=2 * side**3 * products, bytes=2 * COPY_BYTES * copies)


def times_per_second(work: Callable[[], Any], engine: Engine) -> float:
    """Returns how many times a second some work is done at best, on a CPU by all threads or processes, each alone."""
    device = engine.images.device
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    processes = engine.processes

    def by_one(number: int) -> float:
        return 1 / min(seconds_of(work, device) for _ in range(TRIES))

    if processes.count > 1:  # at once, and not as soon as it has shown that this is faster
        return sum(processes.share(by_one, range(processes.count), processes.count, lambda: None))
    return sum(engine.side_by_side(by_one, range(threads)))


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Returns the time of some work, until the device has done it."""
    synchronize = torch.get_device_module(device).synchronize
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def check_csv(path: Path) -> None:
    """Refuses to append to a file that holds something else than results."""
    if path.exists() and not path.read_bytes().startswith(b"workload,"):
        raise UserError(f"'{path}' does not hold results of this command; choose a new file or one that --csv wrote.")
    path.parent.mkdir(parents=True, exist_ok=True)


def append_csv(path: Path, result: dict[str, Any]) -> None:
    """Appends a result to a CSV file, whose first line has the names of the columns; a spread is a JSON list."""
    columns = pd.read_csv(path, nrows=0).columns if path.exists() else None
    pd.DataFrame([result]).reindex(columns=columns).to_csv(path, mode="a", header=columns is None, index=False)


def cells(result: dict[str, Any]) -> dict[str, str]:
    """Returns cells of a table by their titles, times in seconds; what was not measured is left out."""
    spread = "-".join(map(short, result["seconds_spread"]))
    row = {
        "Workload": result["workload"],
        "Method": result["method"],
        "Engine": result["engine"],
        "Round": f"{short(result['seconds_per_round'])} ({spread})",
    }
    if "ratio" in result:
        share = f"{result['floor_share']:.0%}" if result["floor_share"] <= 1 else "failed: too high"
        row["Plain"] = short(result["plain_seconds_per_round"])
        row["Ratio"] = f"{short(result['ratio'])}x"
        row["Bound"] = f"{short(result['floor_seconds'])} ({share})"
    row["Test"] = short(result["evaluation_seconds"])
    if "whole_seconds" in result:
        row["Whole run"] = short(result["whole_seconds"])
    row["MiB"] = short(result["peak_bytes"] / 2**20)
    row["Images"] = result["images"]
    return row


def short(number: float) -> str:
    """Formats a number with three digits or, from 100 on, without a fraction."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
