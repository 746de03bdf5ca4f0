"""The record of a run: what it has, how it begins, and the only functions that read it and write it, atomically."""

import hashlib
import json
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcli.core import partition
from fedcli.core.federation import Federation
from fedcli.core.parts import Parts
from fedcli.data.dataset import Dataset
from fedcli.declarations import SELECTIONS
from fedcli.errors import NonFiniteLoss, UserError
from fedcli.files import write_atomically
from fedcli.reading import reading
from fedcli.run_files import RECORD
from fedcli.runs.identity import digest_of, numerics_of
from fedcli.runs.machine import environment
from fedcli.runs.options import flags_of, given_options
from fedcli.runs.resolve import Setup
from fedcli.runs.schema import Record, RoundEntry, check_record, tested_rounds
from fedcli.runs.workers import worker_group
from fedcli.userfiles import imported_hash, user_paths

SCHEMA = 1
ENDED = ("finished", "diverged")  # outcomes of a run that would end in the same way again
RUN_OUTCOMES = (*ENDED, "failed", "unfinished", "not run")  # the furthest first


def write_record(folder: Path, record: Record) -> None:
    """Writes `record.json` with its digest; refuses a number that is not finite, since JSON has none."""
    text = json.dumps({**record, "digest": digest_of(record)}, indent=1, allow_nan=False)
    write_atomically(folder / RECORD, lambda path: path.write_text(text + "\n", encoding="utf-8"))


def read_record(path: Path) -> Record:
    """Returns the record in a run folder or a record file, without its digest, with what an older one lacks.

    Raises:
        UserError: There is none, its digest or schema is another one, or it is not what `check_record` demands.
    """
    file = path / RECORD if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"there is no run at '{file}' (got no {RECORD}); give the folder of a run, which holds one.")
    with reading(file, "a record as fedcli has written it"):
        record = json.loads(file.read_text(encoding="utf-8"))
        if record["schema"] != SCHEMA:
            raise UserError(f"'{file}' has schema {record['schema']} (this version reads {SCHEMA}); update fedcli.")
        if record.pop("digest", None) not in (None, digest_of(record)):
            raise UserError(f"the record '{file}' is damaged or was changed by hand; put a copy back, or run it again.")
    try:
        check_record(record)
    except UserError as error:
        fault = str(error).removesuffix(".")
        raise UserError(f"'{file}' is no record of a run: {fault}; put a copy back, or run it again.") from error
    return _with_later_parts(record)


def _with_later_parts(record: Record) -> Record:
    """Returns a record with the parts that came after it, as they were in its run.

    The numbers of numerics began at 1, and a run trained its clients in one way.
    """
    later = {"numerics": {"core": 1, "method": 1}, "user_files": {}, "moved": [], "changed": []}
    later_of_engine = {"way": "stacked", "notes": [], "processes": 1}
    return {**later, **record, "engine": {**later_of_engine, **record["engine"]}}


def new_record(
    setup: Setup, dataset: Dataset, parts: Parts, fed: Federation, method_source: str, reason: str | None
) -> Record:
    """Returns the record of a run before its first round.

    `method_source` is its method's name or file; `reason` is what `autotune` returns.
    """
    options = setup.all_options()
    pixels = fed.transform
    return {
        "schema": SCHEMA,
        "status": "running",
        "method": setup.method.name,
        "method_source": method_source,
        "method_hash": setup.method.file_hash,
        "protocol": setup.protocol.name,
        "dataset": setup.dataset,
        "seed": setup.config.seed,
        "config": options,
        "origin": {name: origin.text for name, origin in setup.origins.items()},
        "partition": _division(setup, dataset, parts, fed),
        "summary": summarise([], setup.selection),
        "numerics": numerics_of(setup.method, fed.dead_taps),
        "user_files": {path: imported_hash(path) for path in user_paths([method_source, *options.values()])},
        "dataset_fingerprint": dataset.fingerprint,
        **_where_any(dataset_source=dataset.source),
        "command": shlex.join(["fedcli", "run", method_source, *flags_of(given_options(options, setup.origins))]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "evaluation": setup.protocol.evaluation,
        "tested": setup.method.tested,
        "normalisation": {"mean": pixels.mean, "std": pixels.std},
        "augmentation": pixels.augmentation,
        "class_names": list(dataset.class_names),
        "model": _networks(setup, dataset, fed),
        "engine": _engine(setup, fed, reason),
        "resumed": [],
        "moved": [],
        "changed": [],
        "load": [],  # of the machine, once from the start and once from each round that the run was resumed in
        **environment(fed.device),
        **part_before_rounds(),
    }


def part_before_rounds() -> dict[str, Any]:
    """Returns what rounds add to a record, as it is before the first; a checkpoint keeps it."""
    return {"rounds": [], "cost": None, "seconds_total": 0.0, "peak_bytes": 0}


def _division(setup: Setup, dataset: Dataset, parts: Parts, fed: Federation) -> dict[str, Any]:
    """Returns what a record says of how the images are divided among the clients."""
    num_images = len(dataset.y_train)
    return {
        "flag": setup.partition.scaled(dataset.share).flag,
        "seed": setup.config.partition_seed,
        "fingerprint": partition.fingerprint(parts),
        "images": num_images,
        "unused": partition.count_unused(parts, num_images),
        "sizes": [len(part) for part in parts],
        "class_counts": partition.count_classes(parts, dataset.y_train, dataset.num_classes).tolist(),
        **_where_any(idle=fed.idle),  # clients that train no step
    }


def _networks(setup: Setup, dataset: Dataset, fed: Federation) -> dict[str, Any]:
    """Returns what a record says of the networks."""
    return {
        "backbone": setup.config.backbone,
        "parameters": fed.sizes.parameters,  # of the largest network where there are several
        "input": [dataset.channels, dataset.image_size, dataset.image_size],
        **_where_any(frozen=frozen_parts(fed)),
    }


def _engine(setup: Setup, fed: Federation, reason: str | None) -> dict[str, Any]:
    """Returns what a record says of how and where clients train, before the first round."""
    return {
        "clients_per_chunk": fed.engine.clients_per_chunk,
        "way": fed.engine.way,
        "chosen": reason,
        "workers": worker_group().world_size,
        "device": str(fed.device),
        "precision": setup.config.precision,
        "notes": [],
    }


def _where_any(**values: Any) -> dict[str, Any]:
    """Returns the values that are not empty, by name."""
    return {name: value for name, value in values.items() if value}


def summarise(rounds: Sequence[RoundEntry], selection: str) -> dict[str, Any]:
    """Returns the headline of a run by its protocol's rule, and beside it the last round.

    Args:
        rounds: The rounds so far.
        selection: The rule, one of `SELECTIONS`; of several best rounds it takes the first.

    Returns:
        `selected` and `last` (fractions; None before the first evaluation), `selected_round`, `rounds`, `selection`.
    """
    tested = tested_rounds(rounds)
    summary: dict[str, Any] = {
        "selection": selection, "selected": None, "selected_round": None, "last": None, "rounds": len(rounds),
    }  # fmt: skip
    if tested:
        last = tested[-1]
        rule = SELECTIONS[selection]
        if rule.best_by is None:
            selected = last
            averaged = tested[-rule.num_averaged :]
        else:
            selected = max(tested, key=itemgetter(rule.best_by))
            averaged = [selected]
        summary |= {
            "selected": float(np.mean([entry["test_accuracy"] for entry in averaged])),
            "selected_round": selected["round"],
            "last": last["test_accuracy"],
        }
    return summary


def outcome_of(record: Record) -> str:
    """Returns how a run has come out so far, one of `RUN_OUTCOMES`; diverged if a loss became infinite or NaN."""
    if record["status"] == "failed" and record.get("error", "").startswith(NonFiniteLoss.__name__):
        return "diverged"
    return record["status"] if record["status"] in ("finished", "failed") else "unfinished"


def has_ended(record: Record) -> bool:
    """Whether a run has finished, or has diverged and would again."""
    return outcome_of(record) in ENDED


def frozen_parts(fed: Federation) -> list[dict[str, Any]]:
    """Returns number and hash of the frozen parameters of each network that has some."""
    hashes = []
    for network in fed.networks:
        if network.frozen:
            count = sum(value.numel() for value in network.frozen.values())
            hashes.append({"parameters": count, "sha256": params_hash(network.frozen)})
    return hashes


def params_hash(params: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over names and bytes of parameters in order of name; pairs must come in it."""
    digest = hashlib.sha256()
    pairs = sorted(params.items()) if isinstance(params, Mapping) else params
    for name, value in pairs:
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
