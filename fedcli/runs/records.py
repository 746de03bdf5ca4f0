"""The record of a run: what is written to disk, atomically, and what it says of machine and code."""

import hashlib
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedcli
from fedcli.core import NUMERICS
from fedcli.core.clients import Params
from fedcli.data.files import write_atomically
from fedcli.errors import UserError
from fedcli.registry import Method
from fedcli.runs.config import recorded_fields

SCHEMA = 1
RECORD, CHECKPOINT = "record.json", "checkpoint.pt"
NEEDED = (  # of a record, so that its run can be taken up again
    "status", "method_source", "method_hash", "config", "origin", "dataset_fingerprint", "partition", "rounds",
    "resumed", "summary", "seconds_total", "peak_bytes",
)  # fmt: skip


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Writes `record.json`; a number that is not finite is refused, since JSON has none."""
    text = json.dumps(record, indent=1, allow_nan=False)
    write_atomically(folder / RECORD, lambda path: path.write_text(text + "\n"))


def read_record(path: Path) -> dict[str, Any]:
    """The record in a run folder or of a record file.

    Raises:
        UserError: If there is none, it is not JSON, or its schema is another one.
    """
    file = path / RECORD if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"there is no record at '{file}'; give the folder of a run, which holds {RECORD}.")
    try:
        record = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"the record '{file}' is not JSON ({error}); run the experiment again.") from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        found = record.get("schema") if isinstance(record, dict) else type(record).__name__
        raise UserError(f"the record '{file}' has schema {found}; this version reads schema {SCHEMA}.")
    if absent := [key for key in NEEDED if key not in record]:
        raise UserError(f"the record '{file}' lacks {', '.join(absent)}; run the experiment again.")
    return record


def numerics(method: Method) -> dict[str, int]:
    """The numbers that are raised when the code begins to compute something else: the core's and the method's."""
    return {"core": NUMERICS, "method": method.numerics}


def numerics_of(record: dict[str, Any]) -> dict[str, int]:
    """The numbers that a record was made with; those without any are older than both numbers, which began at 1."""
    return record.get("numerics", {"core": 1, "method": 1})


def is_packaged(record: dict[str, Any]) -> bool:
    """True where a run's method came by its name and not from a user's own file."""
    return record["method_source"] == record["method"]


def outdated(record: dict[str, Any], method: Method) -> bool:
    """True where the code would not repeat a run: other numerics, or an option that its method no longer has.

    The hash of the method's file decides only for a user's own file, whose changes nobody counts; the file of a
    registered method may change its words.

    Args:
        record: Of the run.
        method: Its method as it is now.
    """
    changed_file = not is_packaged(record) and not record["method_hash"].endswith(method.file_hash)
    lost_options = record["config"].keys() - recorded_fields(method).keys()
    return changed_file or numerics_of(record) != numerics(method) or bool(lost_options)


def params_hash(params: Params) -> str:
    """SHA-256 over the names and bytes of parameters, in order of name."""
    digest = hashlib.sha256()
    for name in sorted(params):
        digest.update(name.encode())
        digest.update(params[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def environment(device: torch.device) -> dict[str, Any]:
    """Hardware, library versions and the commit of the code."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        "hardware": {"device": device.type, "name": name, "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "cuda": torch.version.cuda if device.type == "cuda" else None,
        },
        "commit": _commit(),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the checkout that the package lies in, with "+" if it was changed since; None outside of one."""
    here = Path(fedcli.__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", here, *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        if git("rev-parse", "--show-toplevel") != str(here.parent):
            return None  # installed inside of some other project's checkout
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


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
    if selection == "best-validation":
        chosen = max(tested, key=lambda entry: entry["validation_accuracy"])
    elif selection == "best-test":
        chosen = max(tested, key=lambda entry: entry["test_accuracy"])
    else:
        chosen = tested[-1]
    selected = chosen["test_accuracy"]
    if selection == "mean-last-3":
        selected = float(np.mean([entry["test_accuracy"] for entry in tested[-3:]]))
    return {**summary, "selected": selected, "selected_round": chosen["round"], "last": tested[-1]["test_accuracy"]}
