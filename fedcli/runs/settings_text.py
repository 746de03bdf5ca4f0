"""Settings of runs in words: in what two differ, and in which sizes a run is smaller than its protocol says."""

from collections.abc import Mapping
from typing import Any

from fedcli.data.datasets import num_images_of_record
from fedcli.registry import protocols
from fedcli.runs.identity import AS_SEED, SIZES, Difference, Differences, is_smaller
from fedcli.runs.resolve import default_options
from fedcli.runs.schema import Record

NAMELESS = ("protocol", "dataset", "partition", "backbone")  # their values speak for themselves


def reductions(record: Record) -> dict[str, str]:
    """Returns the sizes in which a run is smaller than its protocol says: `{"rounds": "rounds 20 of 200"}`.

    A user's file is not run to count its images. A protocol of a user's file or for own data has no full size.
    """
    options = record["config"]
    protocol = protocols().get(record["protocol"])
    if protocol is None or not protocol.datasets:
        return {}
    full = default_options(protocol, record["dataset"]).options
    if full["cohort_size"] is None:
        full["cohort_size"] = full["num_clients"]
    if options.get("train_examples") is not None and full["train_examples"] is None:
        full["train_examples"] = num_images_of_record(record["dataset"], options.get("local_test"))
    if options.get("public_examples") is not None and full["public_examples"] is None:
        full["public_examples"] = num_images_of_record(options.get("public_dataset"))
    reduced = {}
    for name in SIZES:
        value = options.get(name)
        if is_smaller(name, value, full[name]):
            reduced[name] = differences_text({name: Difference(value, full[name])})
    return reduced


def settings_text(settings: Mapping[str, Any]) -> str:
    """Settings as text, `cifar10, lr 0.1, drop last on`."""
    texts = []
    for name, value in settings.items():
        value_text = _value_text(value)
        texts.append(value_text if name in NAMELESS else f"{name.replace('_', ' ')} {value_text}")
    return ", ".join(texts)


def _value_text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "the run's" if value == AS_SEED else str(value)


def differences_text(differing: Differences) -> str:
    """Differences as text, `rounds 15 of 40, lr 0.1 for 0.01`."""
    texts = []
    for name, difference in differing.items():
        value = difference.value
        other_value = difference.other_value
        if is_smaller(name, value, other_value):
            full_text = "all" if other_value is None else f"{other_value:,}"
            texts.append(f"{SIZES[name]} {value:,} of {full_text}")
        else:
            texts.append(f"{settings_text({name: value})} for {_value_text(other_value)}")
    return ", ".join(texts)
