"""What a run needs before its first round: data, partition, federation, settings of the machine, and a record."""

import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from fedcli.core import NUMERICS, partition
from fedcli.core.batches import Transform
from fedcli.core.client_states import Store
from fedcli.core.federation import Federation, divide
from fedcli.data import datasets
from fedcli.declarations import DataSetting, PublicSetting
from fedcli.errors import UserError
from fedcli.runs.config import Setup, flags_of, given_options, parse_size
from fedcli.runs.records import SCHEMA, environment, params_hash, summarise
from fedcli.runs.settings import draft
from fedcli.runs.workers import current
from fedcli.userfiles import file_hash, own_paths

SMALL_NETWORK = 100_000  # parameters


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Lets the processor take numbers below 1e-38 in float32 as 0, until the end; it is many times slower with them.

    Weights that get no gradient and decay become such numbers. Threads inherit the setting from the one that makes
    them, so it comes before PyTorch makes threads to load data.
    """
    with ExitStack() as put_back:
        put_back.callback(torch.set_flush_denormal, sys.float_info.min / 2 == 0)
        torch.set_flush_denormal(True)  # False where the processor cannot
        yield


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Takes operations on CUDA that give the same bits each time, or PyTorch's default ones, until the end.

    PyTorch warns of an operation that has no such form. On a CPU all have it.
    """
    before, filled = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else matrix products may differ among streams
        torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads such memory
    # As use_deterministic_algorithms(on, warn_only=on), which imports the compiler and takes as long as PyTorch does.
    torch.set_deterministic_debug_mode("warn" if on else "default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled


@contextmanager
def machine_settings(fed: Federation) -> Iterator[None]:
    """Sets what this run needs in PyTorch for the whole process, until the end.

    TF32 only with --precision tf32; PyTorch's default uses it in convolutions. On CUDA the same bits each time. One
    thread for a small network that trains one client after the other on a CPU, where handing work over costs more.
    """
    on_cpu, is_small = fed.device.type == "cpu", fed.sizes.parameters < SMALL_NETWORK
    with deterministic(not on_cpu), ExitStack() as put_back:
        for operations in (torch.backends.cuda.matmul, torch.backends.cudnn):
            put_back.callback(setattr, operations, "allow_tf32", operations.allow_tf32)
            operations.allow_tf32 = fed.config.precision == "tf32"
        put_back.callback(torch.set_num_threads, torch.get_num_threads())
        if on_cpu and is_small and fed.engine.clients_per_chunk == 1:
            torch.set_num_threads(1)
        yield


def prepare(setup: Setup) -> tuple[datasets.Dataset, list, Federation]:
    """Returns a run's data set, each client's examples, and the federation; raises what `load_data` does."""
    dataset, parts, public = load_data(setup)
    memory = setup.run.state_memory and parse_size(setup.run.state_memory)
    store = Store(memory, setup.device, setup.method.state_types)
    return dataset, parts, make_federation(setup, dataset, parts, public, store=store)


def load_data(setup: Setup) -> tuple[datasets.Dataset, list, datasets.Dataset | None]:
    """Returns a run's data set, the positions of each client's examples, and any public images, all on the host.

    Raises:
        UserError: If the data cannot be read or divided as asked, or no client has enough of them.
    """
    config = setup.run
    dataset = datasets.load(config.dataset)
    if setup.protocol.evaluation == "domains" and dataset.domain_test is None:
        raise UserError(f"{config.protocol} tests on domains (got {config.dataset} without); use another --protocol.")
    if config.local_test:
        dataset = datasets.merge(dataset)
    if config.train_examples is not None:
        dataset = datasets.take(dataset, config.train_examples, config.partition_seed)
    skews = dataset.domain_train, dataset.writer_train, dataset.place_train
    parts = setup.partition.scaled(dataset.share)(dataset.y_train, config.num_clients, config.partition_seed, *skews)
    if getattr(parts, "num_test", None) and not config.local_test:
        raise UserError(
            f"the split '{config.partition}' has test lists, which the protocol {config.protocol} does not use; choose "
            "one that tests on the clients' own parts, or leave the lists out."
        )
    _, testing, _, validation = divide(parts, config)
    if setup.protocol.evaluation == "clients" and not any(map(len, testing)):
        raise UserError(f"no client has a test part (got --local-test {config.local_test:g}); use a larger share.")
    if setup.selection == "best-validation" and not any(map(len, validation)):
        raise UserError(f"no client has a validation part (got --validation {config.validation:g}); use a larger one.")
    if config.public_dataset is None:
        return dataset, parts, None
    public = datasets.public_images(config.public_dataset, dataset, config.public_examples, config.partition_seed)
    return dataset, parts, public


def make_federation(
    setup: Setup, dataset: datasets.Dataset, parts: list, public: datasets.Dataset | None = None,
    kind: type[Federation] = Federation, **more: Any,
) -> Federation:  # fmt: skip
    """Returns the federation of a run, of a class that takes what else is given."""
    dtype = torch.float64 if setup.run.precision == "float64" else torch.float32

    def transform(images: datasets.Dataset, setting: DataSetting | PublicSetting | None) -> Transform:
        has_statistics = setting and len(setting.mean) == images.channels  # not where colour is turned into grey
        mean, std = (setting.mean, setting.std) if has_statistics else datasets.channel_statistics(images)
        return Transform(tuple(mean), tuple(std), setting.augmentation if setting else "none", dtype)

    if public is not None:
        setting = setup.protocol.public.get(setup.run.public_dataset)
        more |= {"public_images": public.x_train, "public_transform": transform(public, setting)}
    fed = kind(
        setup.run, dataset, parts, setup.device, transform(dataset, setup.setting),
        evaluation=setup.protocol.evaluation, top_k=setup.setting.top_k if setup.setting else 1, **more,
    )  # fmt: skip
    fed.engine.workers = current()
    return fed


def frozen_parts(fed: Federation) -> list[dict[str, Any]]:
    """Returns number and hash of the frozen parameters of each network that has some."""
    parts = [network.frozen for network in fed.networks if network.frozen]
    return [{"parameters": sum(map(torch.Tensor.numel, part.values())), "sha256": params_hash(part)} for part in parts]


def new_record(
    setup: Setup, dataset: datasets.Dataset, parts: list, fed: Federation, source: str, chosen: str | None
) -> dict[str, Any]:
    """Returns the record of a run before its first round.

    `source` is its method's name or file; `chosen` is what `autotune` returns.
    """
    config, values, pixels, frozen = setup.run, setup.values(), fed.transform, frozen_parts(fed)
    return {
        "schema": SCHEMA, "status": "running", **draft(setup), "method_source": source,
        "numerics": {"core": NUMERICS[fed.dead_taps], "method": setup.method.numerics},
        "user_files": {path: file_hash(path) for path in own_paths([source, *values.values()])},
        "dataset_fingerprint": dataset.fingerprint,
        **({"dataset_source": dataset.source} if dataset.source else {}),
        "command": shlex.join(["fedcli", "run", source, *flags_of(given_options(values, setup.origin))]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "evaluation": setup.protocol.evaluation,
        "normalisation": {"mean": pixels.mean, "std": pixels.std}, "augmentation": pixels.augmentation,
        "partition": {
            "flag": setup.partition.scaled(dataset.share).flag, "seed": config.partition_seed,
            "fingerprint": partition.fingerprint(parts),
            "images": len(dataset.y_train), "sizes": [len(part) for part in parts],
            "class_counts": partition.count_classes(parts, dataset.y_train, dataset.num_classes).tolist(),
            **({"idle": fed.idle} if fed.idle else {}),  # clients that train no step
        },
        "class_names": list(dataset.class_names),
        "model": {
            "backbone": config.backbone,
            "parameters": fed.sizes.parameters,  # of the largest network where there are several
            "input": [dataset.channels, dataset.image_size, dataset.image_size],
            **({"frozen": frozen} if frozen else {}),
        },
        "engine": {
            "clients_per_chunk": fed.engine.clients_per_chunk, "way": fed.engine.way, "chosen": chosen,
            "workers": current().count, "device": str(fed.device), "precision": config.precision, "notes": [],
        },
        "cost": None, "resumed": [],
        "load": [],  # of the machine, once from the start and once from each round that the run was resumed in
        **environment(fed.device),
        "rounds": [], "summary": summarise([], setup.selection), "seconds_total": 0.0, "peak_bytes": 0,
    }  # fmt: skip
