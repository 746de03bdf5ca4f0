"""The machine of a run: what a record says of it, and what a run sets for the time that it takes."""

import os
import platform
import re
import subprocess
import sys
from collections import ChainMap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcli.core.federation import Federation
from fedcli.core.forks import Processes
from fedcli.runs.cores import threads_of_run
from fedcli.runs.schema import Record
from fedcli.runs.workers import may_fork

SMALL_NETWORK_PARAMETERS = 100_000  # below which a network is small
NOISE_CORES = 0.5  # that other work may keep busy beside an undisturbed run
ENVIRONMENT_KEYS = ("hardware", "machine", "versions")  # on which the bits of a run depend


def environment(device: torch.device) -> dict[str, Any]:
    """Hardware, system, library versions and the commit of the code."""
    on_cuda = device.type == "cuda"
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.is_file() else ""
    processor = _processor(text)
    can_flush = torch.set_flush_denormal(_are_denormals_flushed())  # leaves it as it is
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
            "denormals": "0 in a run" if can_flush else "kept",
        },
        "versions": {
            "python": platform.python_version(),
            # With the part after "+", which says for which CUDA it was built; a plain text, compared as it stands.
            "torch": str(torch.__version__),
            **{library: version(library) for library in ("torchvision", "numpy", "scikit-learn", "fedcli")},
            "cuda": torch.version.cuda if on_cuda else None,
        },
        "commit": _commit(),
    }


def _processor(cpuinfo: str) -> str:
    """Returns the processor's name, from what Linux says of it, where it does."""
    model = re.search(r"^model name\s*: (?P<name>.+)$", cpuinfo, re.MULTILINE)
    name = model["name"] if model else platform.processor() or platform.machine()
    return name.strip()


def _commit() -> str | None:
    """Returns the commit of the checkout, with "+" if it was changed since; None outside of one, and without git."""
    folder = checkout()
    if folder is None:
        return None
    # Without locks, since another git may be at work there.
    command = ["git", "--no-optional-locks", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
    try:
        described = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return described.stdout.strip() or None


def note_move(record: Record, device: torch.device) -> list[str]:
    """Records the current machine if it has changed since the run last trained; returns what to note."""
    here = environment(device)
    last = ChainMap(*reversed(record["moved"]), record)
    changed = {name: here[name] for name in ENVIRONMENT_KEYS if name in last and last[name] != here[name]}
    if not changed:
        return []
    record["moved"].append({"round": len(record["rounds"]), **changed})
    return [f"{' and '.join(changed)} are not what they were in the rounds before; bits may be those of neither place"]


def load_of_last_minute() -> float:
    """Returns how many threads wanted a core at a time, as a mean over the last minute."""
    last_minute, _, _ = os.getloadavg()
    return last_minute


def is_undisturbed(record: Record) -> bool:
    """Whether no other work disturbed a run, so that its seconds say something.

    The load averages at its start and end may be half a core above the run's own threads and processes. Older records
    have the cores that `others` kept busy, or nothing, and count as disturbed.
    """
    if "load" not in record:
        return False
    for load in record["load"]:
        others = load.get("others")
        if others is None:
            moves = [move for move in record["moved"] if move["round"] <= load["round"]]
            hardware = ChainMap(*reversed(moves), record)["hardware"]
            cores_of_run = hardware["threads"] * record["engine"].get("processes", 1)
            others = max(load["start"], load["end"]) - cores_of_run
        if others > NOISE_CORES:
            return False
    return True


def _are_denormals_flushed() -> bool:
    """Whether the processor takes numbers that are too small for a normal float as 0 now."""
    return sys.float_info.min / 2 == 0


def checkout() -> Path | None:
    """Returns the checkout that the package lies in, if it lies in one of this project."""
    above = Path(__file__).resolve().parents[2]
    return above if (above / ".git").exists() else None


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Lets the processor take numbers below 1e-38 in float32 as 0, until the end; it is many times slower with them.

    Weights that get no gradient and decay become such numbers. Threads inherit the setting from the one that makes
    them, so it comes before PyTorch makes threads to load data.
    """
    for kind in (np.float32, np.float64):
        np.finfo(kind)  # kept by NumPy, which would warn that it finds no such numbers if it looked for them later
    with ExitStack() as put_back:
        put_back.callback(torch.set_flush_denormal, _are_denormals_flushed())
        torch.set_flush_denormal(True)  # False where the processor cannot
        yield


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Takes operations on CUDA that give the same bits each time, or PyTorch's default ones, until the end.

    PyTorch warns of an operation that has no such form. On a CPU all have it.
    """
    before = torch.get_deterministic_debug_mode()
    switches: Any = torch.utils.deterministic  # a module with a property, which its type does not have
    filled = switches.fill_uninitialized_memory
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else matrix products may differ among streams
        switches.fill_uninitialized_memory = False  # nothing here reads such memory
    # As use_deterministic_algorithms(on, warn_only=on), which imports the compiler and takes as long as PyTorch does.
    torch.set_deterministic_debug_mode("warn" if on else "default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        switches.fill_uninitialized_memory = filled


@contextmanager
def machine_settings(fed: Federation) -> Iterator[None]:
    """Sets what this run needs in PyTorch for the whole process, until the end.

    TF32 only with --precision tf32; PyTorch's default uses it in convolutions. On CUDA the same bits each time. On a
    CPU no more threads than the process may use cores. Steps of a small network are mostly Python, which lets one
    thread at a time go on: there one thread trains one client after the other, and so many processes share them.
    """
    on_cpu = fed.device.type == "cpu"
    is_small = fed.sizes.parameters < SMALL_NETWORK_PARAMETERS
    with deterministic(not on_cpu), ExitStack() as put_back:
        kinds: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]  # modules with properties, likewise
        for operations in kinds:
            put_back.callback(setattr, operations, "allow_tf32", operations.allow_tf32)
            operations.allow_tf32 = fed.config.precision == "tf32"
        put_back.callback(torch.set_num_threads, torch.get_num_threads())
        threads = threads_of_run()
        if on_cpu:
            torch.set_num_threads(threads)
        if on_cpu and is_small and fed.engine.clients_per_chunk == 1:
            torch.set_num_threads(1)
            if may_fork():
                processes = Processes(threads, fed.engine.notes.append)
                put_back.enter_context(fed.engine.runner.use_processes(processes))
        yield
