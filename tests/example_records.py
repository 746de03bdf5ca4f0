"""Makes records with numbers by hand: one as a run writes it, and one with a given learning curve."""

import json

from fedcli.core.partition import from_flag
from fedcli.runs.record import summarise

PLANNED_ROUNDS = 4
SELECTION = "best-validation"
# Options that a record must have, whose values do not matter to the tests.
OTHER_OPTIONS = {
    "public_dataset": None, "local_epochs": 2, "batch_size": 10, "optimizer": "sgd", "lr_decay": 1.0, "momentum": 0.0,
    "weight_decay": 0.0, "validation": 0.1, "backbone": "net", "precision": "float32", "eval_every": 1,
}  # fmt: skip


def make_record(
    method="one", seed=0, selected=0.5, *, status="finished", rounds_done=PLANNED_ROUNDS, origin=None, **run_options
):
    """Returns a record as a run writes it.

    It has `rounds_done` of the planned rounds. Round 1 is the selected one, if it is there, and its test accuracy is
    `selected`, from 0 to 1. `run_options` go before those of every record, and `origin` says where options are from.
    """
    config = {
        "protocol": "paper:skew", "dataset": "digits", "partition": "dirichlet:0.5", "partition_seed": seed,
        "rounds": PLANNED_ROUNDS, "lr": 0.1, "drop_last": False, "train_examples": None, "seed": seed, "device": "auto",
        "num_clients": 10, "cohort_size": 10, "clients_per_chunk": "auto", "checkpoint_every": 1, **OTHER_OPTIONS,
        **run_options,
    }  # fmt: skip
    rounds = [round_entry(number, selected) for number in range(rounds_done)]
    summary = summarise(rounds, SELECTION)
    cost = None
    if rounds_done:
        summary["params_sha256"] = f"{seed}" * 64
        cost = {"floats_down": 12345, "floats_up": 12400, "memory_floats": 1, "buffer_floats": 0}
    sizes = [1] * config["num_clients"]
    return {
        "schema": 1,
        "status": status,
        "command": f"fedcli run {method} --seeds 0,1",
        "method": method,
        "method_source": method,
        "method_hash": f"{method:0<16}",
        "numerics": {"core": 1, "method": 1},
        "protocol": config["protocol"],
        "dataset": config["dataset"],
        "dataset_fingerprint": "cd" * 8,
        "seed": seed,
        "config": config,
        "origin": origin or {"partition_seed": "seed"},
        "partition": {
            "flag": from_flag(config["partition"]).flag,
            "seed": seed,
            "fingerprint": "ab" * 8,
            "sizes": sizes,
            "class_counts": [[size] for size in sizes],
        },
        "class_names": ["zero"],
        "normalisation": {"mean": [0.5], "std": [0.5]},
        "model": {"backbone": "net", "parameters": 12345},
        "engine": {
            "clients_per_chunk": 1, "device": "cpu", "precision": "float32", "way": "stacked", "notes": [],
            "processes": 1,
        },
        "hardware": {"device": "cpu", "cores": 2, "threads": 1},
        "versions": {},
        "user_files": {},
        "rounds": rounds,
        "summary": summary,
        "cost": cost,
        "load": [],
        "seconds_total": 66.0,
        "resumed": [],
        "moved": [],
        "changed": [],
    }  # fmt: skip


def round_entry(number, selected):
    """Returns the entry of a round; the accuracies are best in round 1, and round 0 takes a minute to warm up."""
    return {
        "round": number,
        "test_accuracy": selected - 0.1 * abs(number - 1),
        "validation_accuracy": selected + 0.05 if number == 1 else selected - 0.2,
        "terms": {},
        "seconds": {"data": 0.5, "train": 1.0 if number else 60.0, "aggregate": 0.25, "evaluate": 0.25},
    }


def write_unsigned_record(folder, content):
    """Writes a record without a digest into a folder, which is made for it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "record.json").write_text(json.dumps(content))


def record_with_curve(method="one", seed=0, accuracies=(0.2, 0.4, 0.5), *, status="finished", **run_options):
    """Returns a record with these test accuracies, from 0 to 1; None stands for a round that was not evaluated."""
    record = make_record(method, seed, status=status, rounds_done=len(accuracies), **run_options)
    for entry, accuracy in zip(record["rounds"], accuracies, strict=True):
        entry["test_accuracy"] = accuracy
    record["summary"] |= summarise(record["rounds"], SELECTION)
    return record


def as_diverged(record):
    """Returns a record as if its run had diverged in round 2."""
    return record | {"status": "failed", "error": "NonFiniteLoss: the term 'loss' is not finite in round 2; use less"}
