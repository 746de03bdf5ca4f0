"""The workloads of `fedcli bench`, with every option, so that no value comes from a protocol, and random images."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from fedcli import registry
from fedcli.bench import small_network
from fedcli.runs.options import RunConfig
from fedcli.runs.resolve import DEFAULT_DATASET, Setup, resolve

SGD: dict[str, Any] = {"lr": 0.01, "momentum": 0.9}  # of all workloads
ROUNDS = 1000  # of a workload's run, whose last ones are timed: in these all of a method's terms have begun
PROTOCOL = "own:data"  # all images of the test part are tested on; every option has a value of the workload's
PUBLIC_IMAGES = 512  # for the methods that need some; the plain loop has no part in that
RANDOM_IMAGES = Path(__file__).with_name("random_images.py")  # a function for each data set of a workload
SMALL_NETWORK = f"{small_network.__file__}:small"

# Options of runs; all clients hold equally many images.
_GREY = {"dataset": "fmnist", "train_examples": 60_000, "num_clients": 100, "backbone": "cnn-mcmahan"}
_COLOUR = {"dataset": "cifar10", "train_examples": 40_000, "num_clients": 10, "backbone": "resnet18"}
_FIVE_EPOCHS = {**_GREY, "cohort_size": 10, "local_epochs": 5, "batch_size": 64}
WORKLOADS = {  # by the short names that files of measurements have
    "w1": _FIVE_EPOCHS,
    "w2": {**_GREY, "cohort_size": 20, "local_epochs": 1, "batch_size": 10},
    "w3": {**_COLOUR, "cohort_size": 10, "local_epochs": 10, "batch_size": 64},
    "w4": {**_FIVE_EPOCHS, "backbone": SMALL_NETWORK},
}
ALIASES = {"cnn-five-epochs": "w1", "cnn-small-batches": "w2", "resnet18": "w3", "small-network": "w4"}
NAMES = (*WORKLOADS, *ALIASES)


def _make_scaling_workloads() -> dict[str, dict[str, Any]]:
    """Makes w1 with one local epoch, over the clients of a round and then over batch sizes, by name."""
    sizes = [{"cohort_size": cohort_size, "batch_size": 64} for cohort_size in (1, 2, 5, 10, 20, 50, 100)]
    sizes += [{"cohort_size": 10, "batch_size": batch_size} for batch_size in (10, 32, 128)]
    workloads = {}
    for size in sizes:
        name = f"w1 K={size['cohort_size']} B={size['batch_size']}"
        workloads[name] = {**_FIVE_EPOCHS, "local_epochs": 1, **size}
    return workloads


SCALING = _make_scaling_workloads()


def find_workload(name: str) -> dict[str, Any]:
    """Returns the options of a workload by its name, one of `NAMES` or `SCALING`."""
    workloads = WORKLOADS | SCALING
    return workloads[ALIASES.get(name, name)]


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
    return replace(resolve(chosen, options, need_data=False), data_setting=None)


def with_random_images(setup: Setup) -> Setup:
    """Returns the same run on random images in the shape of its data set."""
    config = replace(setup.config, dataset=f"{RANDOM_IMAGES}:{setup.dataset}")
    return replace(setup, config=config)
