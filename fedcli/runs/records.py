"""The record of a run: what is written to disk, atomically, and what it says of machine and code."""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections import ChainMap
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcli.data.files import reading
from fedcli.errors import UserError
from fedcli.files import write_atomically
from fedcli.userfiles import THEN, replace_paths

SCHEMA = 1
RECORD = "record.json"
PARTS = (  # that every record has
    "status", "method", "method_source", "method_hash", "protocol", "dataset", "dataset_fingerprint", "seed", "config",
    "origin", "command", "normalisation", "partition", "class_names", "model", "engine", "hardware", "versions", "cost",
    "rounds", "summary", "resumed",
)  # fmt: skip


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Writes `record.json` with its digest; refuses a number that is not finite, since JSON has none."""
    text = json.dumps({**record, "digest": _digest(record)}, indent=1, allow_nan=False)
    write_atomically(folder / RECORD, lambda path: path.write_text(text + "\n"))


def read_record(path: Path) -> dict[str, Any]:
    """The record in a run folder or a record file, without its digest.

    Older records have no digest, no numerics, both of which began at 1, and no way of the engine, which had one.

    Raises:
        UserError: There is none, it is no record or lacks a part, or its digest or schema is another one.
    """
    file = path / RECORD if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"there is no run at '{file}' (got no {RECORD}); give the folder of a run, which holds one.")
    with reading(file, "a record as fedcli has written it"):
        record = json.loads(file.read_text())
        if record["schema"] != SCHEMA:
            raise UserError(f"'{file}' has schema {record['schema']} (this version reads {SCHEMA}); update fedcli.")
        if record.pop("digest", None) not in (None, _digest(record)):
            raise UserError(f"the record '{file}' is damaged or was changed by hand; put a copy back, or run it again.")
        if lost := [name for name in PARTS if name not in record]:
            raise UserError(f"the record '{file}' lacks {', '.join(lost)}; put a copy back, or run it again.")
        engine = {"way": "stacked", "notes": [], **record["engine"]}
        return {"numerics": {"core": 1, "method": 1}, **record, "engine": engine}


def identity(record: dict[str, Any]) -> str:
    """SHA-256 over a run's method, configuration, data and partition.

    A user's file counts by its hash when the run began, so that it may be moved.
    """
    first = {path: hashes.split(THEN)[0] for path, hashes in record.get("user_files", {}).items()}
    config = {name: replace_paths(value, first) for name, value in record["config"].items()}
    return _digest([record["method"], config, record["dataset_fingerprint"], record["partition"]["fingerprint"]])


def _digest(value: Any) -> str:
    """SHA-256 over a value's JSON with sorted keys and without spaces."""
    plain = json.loads(json.dumps(value))  # numbers as keys become texts, which sort in another order
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def is_packaged(record: dict[str, Any]) -> bool:
    """Whether a run's method is a registered one and not of a user's file."""
    return record["method_source"] == record["method"]


def params_hash(params: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over names and bytes of parameters in order of name; pairs must come in it."""
    digest = hashlib.sha256()
    for name, value in sorted(params.items()) if isinstance(params, dict) else params:
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def environment(device: torch.device) -> dict[str, Any]:
    """Hardware, system, library versions and the commit of the code."""
    cpuinfo, commit, on_cuda = Path("/proc/cpuinfo"), "", device.type == "cuda"
    text = cpuinfo.read_text() if cpuinfo.is_file() else ""
    model = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    processor = (model[1] if model else platform.processor() or platform.machine()).strip()
    flushes = torch.set_flush_denormal(sys.float_info.min / 2 == 0)  # leaves it as it is, and says whether it can be
    if folder := checkout():
        # Without locks, since another git may be at work there.
        command = ["git", "--no-optional-locks", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
        with suppress(OSError):  # git is not there
            commit = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "hardware": {
            "device": device.type,
            "name": torch.cuda.get_device_name(device) if on_cuda else processor,
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "machine": {
            "processor": processor,
            # The instructions that arithmetic on arrays depends on.
            "flags": sorted(set(re.findall(r"\b(?:avx|amx|fma|f16c|neon|asimd|sve)\w*", text))),
            "system": platform.platform(),
            "denormals": "0 in a run" if flushes else "kept",
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,  # with the part after "+", which says for which CUDA it was built
            **{library: version(library) for library in ("torchvision", "numpy", "scikit-learn", "fedcli")},
            "cuda": torch.version.cuda if on_cuda else None,
        },
        "commit": commit or None,  # of the checkout, with "+" if it was changed since; None outside of one
    }


ENVIRONMENT_KEYS = ("hardware", "machine", "versions")  # on which the bits of a run depend


def note_move(record: dict[str, Any], device: torch.device) -> list[str]:
    """Records the current machine if it has changed since the run last trained; returns what to note."""
    here, before = environment(device), ChainMap(*reversed(record.get("moved", [])), record)
    other = {name: here[name] for name in ENVIRONMENT_KEYS if name in before and before[name] != here[name]}
    if not other:
        return []
    record.setdefault("moved", []).append({"round": len(record["rounds"]), **other})
    return [f"{' and '.join(other)} are not what they were in the rounds before; bits may be those of neither place"]


NOISE = 0.5  # cores


def quiet(record: dict[str, Any]) -> bool:
    """Whether no other work disturbed a run, so that its seconds say something.

    The load averages at its start and end may be half a core above the run's own threads. Older records have the cores
    that `others` kept busy, or nothing, and count as disturbed.
    """
    busy = []
    for load in record.get("load", [{"others": 2 * NOISE}]):
        others = load.get("others")
        busy.append(max(load["start"], load["end"]) - record["hardware"]["threads"] if others is None else others)
    return max(busy, default=0) <= NOISE


def checkout() -> Path | None:
    """The checkout that the package lies in, if it lies in one of this project."""
    above = Path(__file__).resolve().parents[2]
    return above if (above / ".git").exists() else None


def summarise(rounds: list[dict[str, Any]], selection: str) -> dict[str, Any]:
    """The headline of a run by its protocol's rule, and beside it the last round.

    Args:
        rounds: The rounds so far.
        selection: "best-validation" (the first round with the highest validation accuracy), "last", "mean-last-3"
            or "best-test" (the best round on the test set, which flatters).

    Returns:
        `selected` and `last` (fractions; None before the first evaluation), `selected_round`, `rounds`, `selection`.
    """
    tested = [entry for entry in rounds if entry["test_accuracy"] is not None]
    summary = {"selection": selection, "selected": None, "selected_round": None, "last": None, "rounds": len(rounds)}
    if tested:
        ranked_by = {"best-validation": "validation_accuracy", "best-test": "test_accuracy"}.get(selection)
        chosen = max(tested, key=lambda entry: entry[ranked_by]) if ranked_by else tested[-1]
        averaged = tested[-3:] if selection == "mean-last-3" else [chosen]
        summary |= {
            "selected": float(np.mean([entry["test_accuracy"] for entry in averaged])),
            "selected_round": chosen["round"],
            "last": tested[-1]["test_accuracy"],
        }
    return summary
