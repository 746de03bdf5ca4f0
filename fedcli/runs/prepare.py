"""What a run needs before its first round: its data, their partition and the federation."""

from typing import Any, NamedTuple

import torch

from fedcli.core import partition
from fedcli.core.augment import Transform
from fedcli.core.client_states import Store
from fedcli.core.federation import Federation
from fedcli.core.parts import Parts, divide
from fedcli.data import datasets
from fedcli.data.dataset import Dataset, channel_statistics, merge_splits, stratified_subset
from fedcli.declarations import SELECTIONS, DataSetting, PublicSetting
from fedcli.errors import UserError
from fedcli.runs.chunking import parse_chunking
from fedcli.runs.options import parse_size
from fedcli.runs.resolve import Setup
from fedcli.runs.workers import worker_group
from fedcli.userfiles import user_paths


class Prepared(NamedTuple):
    """What a run's first round needs."""

    dataset: Dataset
    parts: Parts
    fed: Federation


def prepare(setup: Setup) -> Prepared:
    """Returns what a run needs; raises what `load_data` does."""
    dataset, parts, public = load_data(setup)
    memory = parse_size(setup.config.state_memory) if setup.config.state_memory else None
    store = Store(memory, setup.device, setup.method.state_types)
    return Prepared(dataset, parts, make_federation(setup, dataset, parts, public, store=store))


class Data(NamedTuple):
    """The images of a run, on the host."""

    dataset: Dataset
    parts: Parts
    public: Dataset | None


def load_data(setup: Setup) -> Data:
    """Returns a run's images and their division among clients.

    Raises:
        UserError: If the data cannot be read or divided as asked, or no client has enough of them.
    """
    config = setup.config
    dataset = datasets.load(setup.dataset)
    if setup.protocol.evaluation == "domains" and dataset.domain_test is None:
        raise UserError(f"{config.protocol} tests on domains (got {config.dataset} without); use another --protocol.")
    if config.local_test:
        dataset = merge_splits(dataset)
    if config.train_examples is not None:
        dataset = stratified_subset(dataset, config.train_examples, config.partition_seed)
    scaled = setup.partition.scaled(dataset.share)
    parts = scaled.divide(dataset, config.num_clients, config.partition_seed)
    if parts.num_test and not config.local_test:
        raise UserError(
            f"the split '{config.partition}' has test lists, which the protocol {config.protocol} does not use; choose "
            "one that tests on the clients' own parts, or leave the lists out."
        )
    _refuse_lacking_parts(setup, parts)
    if config.public_dataset is None:
        return Data(dataset, parts, None)
    public = datasets.public_images(config.public_dataset, dataset, config.public_examples, config.partition_seed)
    return Data(dataset, parts, public)


def _refuse_lacking_parts(setup: Setup, parts: Parts) -> None:
    """Refuses a division that leaves no client a part for testing or validation where the protocol needs one."""
    config = setup.config
    division = divide(parts, config)
    if setup.protocol.evaluation == "clients" and not any(map(len, division.testing)):
        raise UserError(f"no client has a test part (got --local-test {config.local_test:g}); use a larger share.")
    if SELECTIONS[setup.selection].needs_validation and not any(map(len, division.validation)):
        raise UserError(f"no client has a validation part (got --validation {config.validation:g}); use a larger one.")


def refuse_lost_classes(setup: Setup, dataset: Dataset, parts: Parts) -> None:
    """Refuses a partition that gives no client an image of a class; lists and functions of a user's own may.

    So may a run that asks for what earlier versions did.
    """
    lost_classes = partition.lost_classes(parts, dataset.y_train)
    is_own = user_paths([setup.config.partition]) or setup.partition.is_listed
    if lost_classes and not is_own and setup.config.remainder != "drop":
        names = ", ".join(dataset.class_names[label] for label in lost_classes[:5])
        raise UserError(
            f"partition '{setup.partition.flag}' gives no client an image of {len(lost_classes)} of "
            f"{dataset.num_classes} classes (got {setup.config.num_clients} clients; without images: {names}); use "
            "more clients or another flag."
        )


def make_federation(
    setup: Setup, dataset: Dataset, parts: Parts, public: Dataset | None = None,
    federation_type: type[Federation] = Federation, **options: Any,
) -> Federation:  # fmt: skip
    """Returns the federation of a run, of a class that takes these options beside."""
    dtype = torch.float64 if setup.config.precision == "float64" else torch.float32
    if public is not None:
        setting = setup.protocol.public.get(setup.config.public_dataset or "")
        options |= {"public_images": public.x_train, "public_transform": _transform(public, setting, dtype)}
    return federation_type(
        setup.config,
        dataset,
        parts,
        setup.device,
        _transform(dataset, setup.data_setting, dtype),
        evaluation=setup.protocol.evaluation,
        top_k=setup.data_setting.top_k if setup.data_setting else 1,
        workers=worker_group(),
        chunking=parse_chunking(setup.config.clients_per_chunk),
        **options,
    )


def _transform(images: Dataset, setting: DataSetting | PublicSetting | None, dtype: torch.dtype) -> Transform:
    """Returns what a protocol's setting makes of images; without one they are normalised by their own statistics."""
    augmentation = setting.augmentation if setting else "none"
    if setting is not None and len(setting.mean) == images.channels:  # not where colour is turned into grey
        return Transform(tuple(setting.mean), tuple(setting.std), augmentation, dtype)
    mean, std = channel_statistics(images)
    return Transform(mean, std, augmentation, dtype)
