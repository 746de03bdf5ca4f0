"""Files of a run that are damaged, cut or another run's: refused in a line, or without effect on the result."""

import random
import shutil
from pathlib import Path

import fedcli
from fedcli.errors import UserError
from fedcli.runs import rounds
from fedcli.runs import run as runs

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
}  # fmt: skip


class Stop(Exception):
    """Ends a run from outside."""


class StopAfterTwo(rounds.Listener):
    def round(self, entry):
        if entry["round"] == 1:
            raise Stop


def make(kind: str, folder: Path) -> str:
    """Makes a run of a kind that stopped after two of three rounds, and one of another seed; how it should end."""
    for name, seed in (("run", 0), ("other", 1)):
        try:
            fedcli.run(**{**TINY, **KINDS[kind], "seed": seed}, out=folder / name, progress=StopAfterTwo())
        except Stop:
            continue
        raise AssertionError("the run was to stop")
    return runs.resume(shutil.copytree(folder / "run", folder / "whole")).record["summary"]["params_sha256"]


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
    """Resumes a run that was spoilt so; what is wrong unless that is refused in a line, or ends in the same bits."""
    try:
        record = runs.resume(folder).record
    except UserError as error:
        return "a refusal of several lines" if "\n" in str(error) else ""
    if what in ("exchange record.json", "exchange checkpoint.safetensors"):
        return f"{what} is not refused"
    return "" if record["summary"]["params_sha256"] == end else f"other bits after {what}"
