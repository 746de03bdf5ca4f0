"""What a record holds: the type, the range or the allowed values of each part, declared once.

A record is checked when it is read, so that whatever takes it afterwards may rely on it. Options are checked as typed
ones are, by what their declarations allow. A part that is not declared here, as of a later version, is left alone.
"""

import math
from collections.abc import Sequence
from typing import Any

from fedcli.core.stacked import WAYS
from fedcli.data.cache import is_name
from fedcli.declarations import SELECTIONS, check_value, fields_of
from fedcli.errors import UserError
from fedcli.registry import methods, posts
from fedcli.runs.options import RunConfig
from fedcli.runs.value_checks import (
    by_name,
    each,
    mapping,
    number,
    one_of,
    optional,
    refuse_wrong,
    text,
    whole,
    wrong,
)
from fedcli.userfiles import names_user_file

Record = dict[str, Any]  # with the parts that `RECORD_SCHEMA` declares, and perhaps the run's `folder` and `label`
RoundEntry = dict[str, Any]  # a round of a record, with the parts that `ROUND_SCHEMA` declares


def data_set(value: Any) -> None:
    """The name of a data set, or a part of a user's file."""
    text(value)
    if not is_name(value) and not names_user_file(value):
        raise wrong("the name of a data set", value)


FRACTION = number(0, 1)
COUNT = whole(0)
NUMERICS = mapping({"core": COUNT, "method": COUNT})
COST = optional(mapping(dict.fromkeys(("floats_down", "floats_up", "memory_floats", "buffer_floats"), COUNT)))
ENVIRONMENT = {
    "hardware": mapping(
        {"device": text, "cores": optional(whole(1)), "threads": whole(1)}, {"name": text}
    ),
    "versions": by_name(optional(text)),
}  # fmt: skip
MACHINE = mapping({}, {"processor": text, "flags": each(text), "system": text, "denormals": text})
EVALUATION = {  # of models, beside their accuracy on the test images
    "classifier_accuracy": optional(FRACTION),
    "global_accuracy": optional(FRACTION),
    "clients": optional(mapping({"mean": FRACTION, "std": number(0), "worst": FRACTION})),
    "client_accuracy": optional(by_name(FRACTION)),
    "domains": optional(by_name(FRACTION)),
    "intra": optional(by_name(FRACTION)),
    "inter": optional(by_name(FRACTION)),
    "per_class": mapping(dict.fromkeys(("right", "predicted", "actual"), each(number(0)))),
}
ROUND_SCHEMA = mapping(
    {
        "round": COUNT,
        "test_accuracy": optional(FRACTION),
        "validation_accuracy": optional(FRACTION),
        "terms": by_name(number()),
        "seconds": by_name(number()),
    },
    {
        **EVALUATION,
        "drift": by_name(optional(number())),
        "floats_down": COUNT,
        "floats_up": COUNT,
    },
)
RECORD_SCHEMA = mapping(
    {
        "schema": one_of(1),
        "status": one_of("running", "interrupted", "failed", "finished"),
        "method": text,
        "method_source": text,
        "method_hash": text,
        "protocol": text,
        "dataset": data_set,
        "dataset_fingerprint": text,
        "seed": whole(0, 2**32 - 1),
        "config": by_name(optional(lambda value: None)),  # see `_check_options`
        "origin": by_name(text),
        "command": text,
        "normalisation": mapping({"mean": each(number()), "std": each(number(0))}),
        "partition": mapping(
            {"flag": text, "seed": COUNT, "fingerprint": text, "sizes": each(COUNT), "class_counts": each(each(COUNT))},
            {"images": COUNT, "unused": COUNT, "idle": each(COUNT)},
        ),
        "class_names": each(text),
        "model": mapping(
            {"backbone": text, "parameters": COUNT},
            {
                "input": each(whole(1), 3),
                "frozen": each(mapping({"parameters": COUNT, "sha256": text})),
                "buffers": COUNT,
                "networks": by_name(COUNT),
            },
        ),
        "engine": mapping(
            {
                "clients_per_chunk": whole(1),
                "device": text,
                "precision": text,
            },
            {
                "way": one_of(*WAYS),
                "notes": each(mapping({"round": COUNT, "text": text})),
                "chosen": optional(text),
                "workers": whole(1),
                "processes": whole(1),
                "branches": one_of(True, False),
            },
        ),
        **ENVIRONMENT,
        "cost": COST,
        "rounds": each(ROUND_SCHEMA),
        "resumed": each(COUNT),
        "seconds_total": number(0),
        "summary": mapping(
            {
                "selection": one_of(*SELECTIONS),
                "selected": optional(FRACTION),
                "selected_round": optional(COUNT),
                "last": optional(FRACTION),
                "rounds": COUNT,
            },
            {"params_sha256": text},
        ),
    },
    {
        "numerics": NUMERICS,
        "user_files": by_name(text),
        "dataset_source": text,
        "started": text,
        "commit": optional(text),
        "machine": MACHINE,
        "evaluation": one_of("server", "clients", "domains"),
        "tested": one_of("global", "personal"),
        "augmentation": text,
        "peak_bytes": COUNT,
        "load": each(mapping({"round": COUNT, "start": number(0), "end": number(0)}, {"others": optional(number())})),
        "moved": each(mapping({"round": COUNT}, {**ENVIRONMENT, "machine": MACHINE})),
        "changed": each(mapping({"round": COUNT, "what": text}, {"numerics": NUMERICS})),
        "error": text,
        "post": mapping(
            {"name": text, "hash": text, "test_accuracy": optional(FRACTION), "floats_up": COUNT, "seconds": number(0)},
            {"validation_accuracy": optional(FRACTION), **EVALUATION},
        ),
        "quality": mapping({}, {
            **dict.fromkeys(("nmi", "clients_nmi"), number(0, 1 + 1e-9)),
            **dict.fromkeys(("silhouette", "clients_silhouette"), number(-1, 1)),
            **dict.fromkeys(("clients_cosine_same", "clients_cosine_other"), number(-1 - 1e-9, 1 + 1e-9)),
            **dict.fromkeys(("examples", "clients_examples", "client", "round", "seed"), COUNT),
            **dict.fromkeys(("features_sha256", "clients_features_sha256"), text),
        }),
        "reduced": lambda value: None,  # of older records, and not read
        "public": lambda value: None,  # likewise
    },
)  # fmt: skip
# What a checkpoint has of a record.
CHECKPOINT_RECORD = mapping(
    {"rounds": each(ROUND_SCHEMA), "cost": COST}, {"seconds_total": number(0), "peak_bytes": COUNT}
)
# Options that every record has; others may be missing, see `filled_up`.
FIRST_OPTIONS = (
    "protocol", "dataset", "public_dataset", "partition", "partition_seed", "num_clients", "cohort_size", "rounds",
    "local_epochs", "batch_size", "optimizer", "lr", "validation", "train_examples", "backbone", "seed", "precision",
)  # fmt: skip


def check_record(record: Any) -> None:
    """Refuses a record with a part that is missing, of another type, out of range, or at odds with another part.

    Raises:
        UserError: Says which part, and what it must be.
    """
    refuse_wrong(RECORD_SCHEMA, record)
    _check_options(record)
    rounds = record["rounds"]
    summary = record["summary"]
    division = record["partition"]
    _agree("the number of each round", [entry["round"] for entry in rounds], [*range(len(rounds))])
    _agree("the clients' images", [sum(row) for row in division["class_counts"]], division["sizes"])
    _agree("the number of classes", {len(row) for row in division["class_counts"]}, {len(record["class_names"])})
    for entry in [*rounds, record.get("post", {})]:
        for name, counts in entry.get("per_class", {}).items():
            _agree(f"the number of classes in 'per_class.{name}'", len(counts), len(record["class_names"]))
        _check_clients(entry.get("client_accuracy") or {}, len(division["sizes"]))
    tested = [entry["round"] for entry in tested_rounds(rounds)]
    selected_round = summary["selected_round"]
    is_possible = selected_round in tested if tested else selected_round is None
    if not is_possible:
        raise UserError(f"'summary.selected_round' must be a tested round (got {selected_round})")
    if tested and None in (summary["selected"], summary["last"]):
        raise UserError("'summary' must have the accuracies of a run that has been tested (got none)")
    if record["status"] == "finished" and (not tested or record["cost"] is None):
        raise UserError("'status' must not be finished (got a run without a tested round or without its cost)")


def tested_rounds(rounds: Sequence[RoundEntry]) -> list[RoundEntry]:
    """Those of the rounds of a record whose models were tested."""
    return [entry for entry in rounds if entry["test_accuracy"] is not None]


def _check_clients(by_client: dict[str, Any], num_clients: int) -> None:
    """Refuses values by other names than the ids of clients."""
    ids = {str(client) for client in range(num_clients)}
    others = [name for name in by_client if name not in ids]
    if others:
        raise UserError(f"'client_accuracy' must be by client, 0 to {num_clients - 1} (got {others[0]!r:.80})")


def _agree(name: str, value: Any, other: Any) -> None:
    """Refuses two parts that must be equal and are not."""
    if value != other:
        raise UserError(f"{name} must be the same in two places (got {value!r:.80}, was {other!r:.80})")


def _is_plain(value: Any) -> bool:
    """Whether a value can be that of an option."""
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) in (str, int, bool)


def _check_options(record: Record) -> None:
    """Refuses an option that its declaration does not allow; of a user's method, one of every method."""
    options = record["config"]
    lacking = [name for name in FIRST_OPTIONS if name not in options]
    if lacking:
        raise UserError(f"'config' lacks {', '.join(lacking)}")
    method = methods().get(record["method"]) if record["method"] == record["method_source"] else None
    config_types = [RunConfig, *([method.config] if method else []), *(post.config for post in posts().values())]
    declared = fields_of(*config_types)
    for name, value in options.items():
        if type(value) is str:
            refuse_wrong(text, value)
        if name in declared:
            check_value(declared[name], value)
        elif not _is_plain(value):
            raise UserError(f"'config.{name}' must be a text, a finite number, true, false or null (got {value!r:.80})")
    for name in ("dataset", "public_dataset"):
        refuse_wrong(optional(data_set), options[name])
