"""Files of a run that are damaged, cut or another run's: refused in a line, or without effect on the result."""

import random
import shutil
from contextlib import suppress
from pathlib import Path

import torch

import fedcli
from fedcli.errors import UserError
from fedcli.figures import quality
from fedcli.runs import run as runs
from fedcli.runs.models import ROUNDS
from fedcli.runs.records import params_hash
from tests.test_runs import Stop, StopAfter

TINY = {
    "train_examples": 60, "num_clients": 4, "cohort_size": 2, "rounds": 3, "local_epochs": 1, "batch_size": 8,
    "device": "cpu", "checkpoint_every": 1, "backbone": "cnn-small",
}  # fmt: skip
KINDS = {
    "global model": {"method": "fedfm"},
    "client state": {"method": "scaffold"},
    "personal": {"method": "local"},
    "heterogeneous": {"method": "fedproto", "protocol": "fedsa:digits-mixed", "backbone": None},
    "public": {
        "method": "fccl-plus", "protocol": "fccl:digit-domains", "public_examples": 12, "public_batch_size": 6,
        "cohort_size": 4, "backbone": None,
    },
    "server training": {"method": "fedgen"},
    "finished, with features": {"method": "fedavg"},
}  # fmt: skip


def make(kind: str, folder: Path) -> str:
    """Makes a run of a kind, and one of another seed; all but finished ones stop after two of three rounds.

    Returns:
        What the first should come to.
    """
    finished = kind.startswith("finished")
    for name, seed in (("run", 0), ("other", 1)):
        with suppress(Stop):
            progress = StopAfter(9 if finished else 2)
            fedcli.run(**{**TINY, **KINDS[kind], "seed": seed}, out=folder / name, progress=progress)
        if finished:
            quality.add_quality(folder / name)
    return ending(shutil.copytree(folder / "run", folder / "whole"))


def ending(folder: Path) -> str:
    """What a run comes to: its parameters once it is resumed, or, where it has features, these and its models."""
    if not (folder / quality.FEATURES).is_file():
        return runs.resume(folder).record["summary"]["params_sha256"]
    run, ((shown,), _) = fedcli.load(folder), quality.one_a_setting([folder])
    parts = [quality.kept_outputs(shown)[1], *(run.model(round=name).state_dict() for name in ROUNDS)]
    return params_hash((name, torch.as_tensor(value)) for part in parts for name, value in part.items())


def spoil(folder: Path, other: Path, draw: random.Random) -> str:
    """Flips a bit of one of the files of a run, cuts it, or puts the other run's in its place; says what it did."""
    file = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    content = bytearray(file.read_bytes())
    own = other / file.relative_to(folder)
    if file.parent.name == "states" and not own.is_file():
        own = next((other / "states").iterdir())
    how = draw.choice(("flip", "cut", "exchange" if own.is_file() else "cut"))  # not all keep a selected model
    if how == "flip":
        place = draw.randrange(len(content))
        content[place] ^= 1 << draw.randrange(8)
    elif how == "cut":
        del content[draw.randrange(len(content)) :]
    else:
        content = own.read_bytes()
    file.write_bytes(content)
    return f"{how} {file.name}"


def fault(folder: Path, end: str, what: str) -> str:
    """What is wrong with a run that was spoilt so, unless that is refused in a line or the run comes to its end."""
    try:
        found = ending(folder)
    except UserError as error:
        return "a refusal of several lines" if "\n" in str(error) else ""
    if what in ("exchange record.json", "exchange checkpoint.safetensors"):
        return f"{what} is not refused"
    return "" if found == end else f"other bits after {what}"
