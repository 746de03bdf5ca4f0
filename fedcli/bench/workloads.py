"""The workloads of `fedcli bench`, with every option, so that no value comes from a protocol, and random images."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedcli import registry
from fedcli.bench import small_network
from fedcli.data import datasets
from fedcli.runs.options import RunConfig
from fedcli.runs.resolve import DEFAULT_DATASET, Setup, resolve

SGD: dict[str, Any] = {"lr": 0.01, "momentum": 0.9}  # of all workloads
ROUNDS = 1000  # of a workload's run, whose last ones are timed: in these all of a method's terms have begun
PROTOCOL = "own:data"  # all images of the test part are tested on; every option has a value of the workload's
PUBLIC_EXAMPLES = 512  # for the methods that need some
RANDOM_IMAGES = Path(__file__).with_name("random_images.py")  # a function for each data set of a workload
SMALL_NETWORK = f"{small_network.__file__}:small"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Rounds of local training, which the plain loop can do by FedAvg; all clients hold equally many examples.

    Attributes:
        name: The short name.
        alias: The name in words; empty if there is none.
        dataset: This and what follows are options of a run.
    """

    name: str
    alias: str = ""
    dataset: str
    backbone: str
    train_examples: int
    num_clients: int
    cohort_size: int
    local_epochs: int
    batch_size: int

    @property
    def names(self) -> set[str]:
        """Returns the names by which it is chosen."""
        names = {self.name}
        if self.alias:
            names.add(self.alias)
        return names

    @property
    def options(self) -> dict[str, Any]:
        """Returns the options of its run by name."""
        options = asdict(self)
        del options["name"], options["alias"]
        return options


W1 = Workload(
    name="w1",
    alias="cnn-five-epochs",
    dataset="fmnist",
    backbone="cnn-mcmahan",
    train_examples=60_000,
    num_clients=100,
    cohort_size=10,
    local_epochs=5,
    batch_size=64,
)
W2 = replace(W1, name="w2", alias="cnn-small-batches", cohort_size=20, local_epochs=1, batch_size=10)
W3 = Workload(
    name="w3",
    alias="resnet18",
    dataset="cifar10",
    backbone="resnet18",
    train_examples=40_000,
    num_clients=10,
    cohort_size=10,
    local_epochs=10,
    batch_size=64,
)
W4 = replace(W1, name="w4", alias="small-network", backbone=SMALL_NETWORK)
WORKLOADS = [W1, W2, W3, W4]
NAMES = [workload.name for workload in WORKLOADS]
NAMES += [workload.alias for workload in WORKLOADS]


def _scale_w1(cohort_size: int, batch_size: int) -> Workload:
    """Returns w1 with one local epoch, and other numbers of clients a round and of examples a batch."""
    name = f"w1 K={cohort_size} B={batch_size}"
    return replace(W1, name=name, alias="", local_epochs=1, cohort_size=cohort_size, batch_size=batch_size)


SCALING = [_scale_w1(cohort_size, batch_size=64) for cohort_size in (1, 2, 5, 10, 20, 50, 100)]
SCALING += [_scale_w1(10, batch_size) for batch_size in (10, 32, 128)]


def find_workload(name: str) -> Workload | None:
    """Returns the workload of a name, in any case; None if there is none."""
    workloads_by_name: dict[str, Workload] = {}
    for workload in [*WORKLOADS, *SCALING]:
        workloads_by_name |= dict.fromkeys(workload.names, workload)
    return workloads_by_name.get(registry.in_declared_case(name, workloads_by_name))


def prepare_workload(workload: Workload, method: str = "fedavg", **given: Any) -> Setup:
    """Sets up the run of a workload with the options that are given beside its own.

    Every option has a value then, so that none comes from a protocol.
    """
    found_method = registry.find_method(method)
    options = {
        **vars(RunConfig()),
        **vars(found_method.config()),
        "protocol": PROTOCOL,
        "rounds": ROUNDS,
        "optimizer": "sgd",
    }
    if found_method.uses_public_data:
        options["public_dataset"] = DEFAULT_DATASET
        options["public_examples"] = PUBLIC_EXAMPLES
    options |= {**SGD, **workload.options, **given}
    # Without a protocol's setting the images are normalised by their own mean and not augmented.
    return replace(resolve(found_method, options, need_data=False), data_setting=None)


def with_random_images(setup: Setup) -> Setup:
    """Returns the same run on random images in the shape of its data set."""
    config = replace(setup.config, dataset=f"{RANDOM_IMAGES}:{setup.dataset}")
    return replace(setup, config=config)


def with_images_at_hand(setup: Setup) -> Setup:
    """Returns the run itself or, where its images are not on this machine, the same run on random ones."""
    if datasets.is_present(setup.dataset):
        return setup
    return with_random_images(setup)


def has_random_images(setup: Setup) -> bool:
    """Returns whether a run is on random images in the place of a data set's."""
    return setup.dataset.startswith(f"{RANDOM_IMAGES}:")
