"""The record of a run: what is written to disk, atomically, and what it says of machine and code."""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fedcli
from fedcli.core import NUMERICS
from fedcli.core.backbones import have_dead_taps
from fedcli.core.clients import Params
from fedcli.core.engine import WAYS
from fedcli.data.files import reading, write_atomically
from fedcli.declarations import Method
from fedcli.errors import UserError
from fedcli.runs.config import recorded_fields
from fedcli.userfiles import THEN, is_hash_of, replace_paths

SCHEMA = 1
RECORD = "record.json"
PARTS = (  # that every record has
    "status", "method", "method_source", "method_hash", "protocol", "dataset", "dataset_fingerprint", "seed", "config",
    "origin", "partition", "model", "engine", "hardware", "rounds", "summary", "resumed",
)  # fmt: skip


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Writes `record.json` with its digest; a number that is not finite is refused, since JSON has none."""
    content = {key: value for key, value in record.items() if key != "digest"}
    text = json.dumps({**content, "digest": _digest(content)}, indent=1, allow_nan=False)
    write_atomically(folder / RECORD, lambda path: path.write_text(text + "\n"))


def read_record(path: Path) -> dict[str, Any]:
    """The record in a run folder or of a record file, without its digest; older records have none.

    An older one is filled up with what it lacks: its numerics, both of which began at 1, and of its engine, which then
    had one way, no notes.

    Raises:
        UserError: If there is none, it is no record, or its digest or its schema is another one.
    """
    file = path / RECORD if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"there is no run at '{file}' (got no {RECORD}); give the folder of a run, which holds one.")
    with reading(file, "a record as fedcli has written it"):
        record = json.loads(file.read_text())
        if record["schema"] != SCHEMA:
            raise UserError(f"'{file}' has schema {record['schema']} (this version reads {SCHEMA}); update fedcli.")
        digest = record.pop("digest", None)
        if digest is not None and digest != _digest(record):
            raise UserError(f"the record '{file}' is damaged or was changed by hand; put a copy back, or run it again.")
        if lost := [name for name in PARTS if name not in record]:
            raise UserError(f"the record '{file}' lacks {', '.join(lost)}; put a copy back, or run it again.")
        record["engine"] = {"way": WAYS[0], "notes": [], **record["engine"]}
        return {"numerics": {"core": 1, "method": 1}, **record}


def identity(record: dict[str, Any]) -> str:
    """SHA-256 over what makes a run the one it is: its method, configuration, data and partition.

    A user's file counts by its hash when the run began, so that it may be moved.
    """
    first = {path: known.split(THEN)[0] for path, known in record.get("user_files", {}).items()}
    config = {name: replace_paths(value, first) for name, value in record["config"].items()}
    return _digest([record["method"], config, record["dataset_fingerprint"], record["partition"]["fingerprint"]])


def _digest(value: Any) -> str:
    """SHA-256 over a value's JSON in its one form: keys sorted, no spaces."""
    plain = json.loads(json.dumps(value))  # numbers as keys become texts, which sort in another order
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def numerics(record: dict[str, Any], method: Method) -> dict[str, int]:
    """The current versions of the numerics for a run, of core and method; raised when code changes results.

    The networks of its options are built, which say whether they have dead taps; without their input, none have. Those
    from a user's file must be named by the user, see `fedcli.userfiles`.
    """
    shape = record.get("model", {}).get("input")
    dead_taps = shape is not None and have_dead_taps(record["config"]["backbone"], *shape[:2])
    return {"core": NUMERICS[dead_taps], "method": method.numerics}


def is_packaged(record: dict[str, Any]) -> bool:
    """True where a run's method came by its name and not from a user's own file."""
    return record["method_source"] == record["method"]


def is_other_method(record: dict[str, Any], method: Method) -> bool:
    """True where a run's method is another by now: a user's file has changed, or options of the run are gone.

    The file of a registered method may change its words; what it computes is counted by `numerics`.
    """
    changed_file = not is_packaged(record) and not is_hash_of(record["method_hash"], method.file)
    return changed_file or bool(record["config"].keys() - recorded_fields(method).keys())


def outdated(record: dict[str, Any], method: Method) -> bool:
    """True where the code would not repeat a run: it is another method, or has other numerics."""
    return is_other_method(record, method) or record["numerics"] != numerics(record, method)


def params_hash(params: Params | Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over the names and bytes of parameters, in order of name; pairs must come in it."""
    digest = hashlib.sha256()
    for name, value in sorted(params.items()) if isinstance(params, dict) else params:
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def environment(device: torch.device) -> dict[str, Any]:
    """Hardware, system, library versions and the commit of the code."""
    cpuinfo, commit = Path("/proc/cpuinfo"), ""
    text = cpuinfo.read_text() if cpuinfo.is_file() else ""
    model = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    processor = (model[1] if model else platform.processor() or platform.machine()).strip()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor
    flushes = torch.set_flush_denormal(sys.float_info.min / 2 == 0)  # leaves it as it is, and says whether it can be
    if folder := checkout():
        command = ["git", "--no-optional-locks", "-C", folder]  # another git may be at work there
        command += ["describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
        with suppress(OSError):  # git is not there
            commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "hardware": {"device": device.type, "name": name, "cores": os.cpu_count(), "threads": torch.get_num_threads()},
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
            "cuda": torch.version.cuda if device.type == "cuda" else None,
        },
        "commit": commit or None,  # of the checkout, with "+" if it was changed since; None outside of one
    }


ENVIRONMENT_KEYS = ("hardware", "machine", "versions")  # of what `environment` tells, what the bits of a run depend on


def note_move(record: dict[str, Any], device: torch.device) -> str:
    """Records the current machine if it has changed since the run last trained; returns a note, or an empty text."""
    here, before = environment(device), dict(record)
    for move in record.get("moved", ()):
        before |= move
    other = {name: here[name] for name in ENVIRONMENT_KEYS if name in before and before[name] != here[name]}
    if not other:
        return ""
    record.setdefault("moved", []).append({"round": len(record["rounds"]), **other})
    return f"the run goes on where {' and '.join(other)} are not what they were; its bits may be those of neither place"


NOISE = 0.5  # cores


def quiet(record: dict[str, Any]) -> bool:
    """False where other work disturbed a run, so that its seconds say little: they are not shown then, nor built on.

    The load averages at its start and at its end may be half a core above the run's own threads. Older records have
    instead the number of cores that `others` kept busy, or nothing: what else the machine did then is not known.
    """
    threads, busy = record["hardware"]["threads"], [0.0]
    for load in record.get("load", [{"others": inf}]):
        others = load.get("others")
        busy.append(max(load["start"], load["end"]) - threads if others is None else others)
    return max(busy) <= NOISE


def checkout() -> Path | None:
    """The checkout that the package lies in; None outside of one, also inside of some other project's."""
    above = Path(fedcli.__file__).resolve().parent.parent
    return above if (above / ".git").exists() else None


def summarise(rounds: list[dict[str, Any]], selection: str) -> dict[str, Any]:
    """The headline of a run by its protocol's rule, and beside it the last round.

    Args:
        rounds: The rounds so far.
        selection: "best-validation" (the first round with the highest validation accuracy), "last", "mean-last-3"
            or "best-test" (the round that was best on the test set, which flatters).

    Returns:
        `selected` and `last` (fractions; None before the first evaluation), `selected_round`, `rounds`, `selection`.
    """
    tested = [entry for entry in rounds if entry["test_accuracy"] is not None]
    summary = {"selection": selection, "selected": None, "selected_round": None, "last": None, "rounds": len(rounds)}
    if not tested:
        return summary
    ranked_by = {"best-validation": "validation_accuracy", "best-test": "test_accuracy"}.get(selection)
    chosen = max(tested, key=lambda entry: entry[ranked_by]) if ranked_by else tested[-1]
    averaged = tested[-3:] if selection == "mean-last-3" else [chosen]
    selected = float(np.mean([entry["test_accuracy"] for entry in averaged]))
    return {**summary, "selected": selected, "selected_round": chosen["round"], "last": tested[-1]["test_accuracy"]}
