"""Short runs whose curves and parameters must stay the same bits; `goldens.json` has these for each kind of machine.

`python -m tests.goldens` writes the file for this kind of machine. A golden that changes is a changed number: raise
`NUMERICS` of the core, or `numerics` of the one method whose file changed, and say in the commit why.
"""

import json
import platform
import re
import tempfile
from pathlib import Path
from typing import Any

import torch

import fedcli
from fedcli import registry
from fedcli.runs.models import all_params
from fedcli.runs.resolve import default_dataset

FILE = Path(__file__).with_name("goldens.json")
CPU_INFO = Path("/proc/cpuinfo")
NUMERICS = ("core", "method")  # entries of a golden: the versions of the arithmetic of its run

# Beside one run of each method: every kind of state, of training together and of what comes after the last round.
OTHER_RUNS: dict[str, dict[str, Any]] = {
    "stacked, another step after it": {"method": "fedavg", "clients_per_chunk": "4", "post": "ccvr", "num_clients": 6},
    "state of clients that sit out": {"method": "scaffold", "num_clients": 10, "cohort_size": 4, "lr": 0.01},
    "Adam, state of clients": {"method": "moon", "num_clients": 10, "cohort_size": 4, "optimizer": "adam", "lr": 1e-3},
    "normalisation layers, branches": {  # with the protocol's 0.05, other roundings end two per cent apart
        "method": "fedfm", "backbone": "resnet10-3x3", "clients_per_chunk": "branches:2", "num_clients": 4,
        "drift_every": 2, "start_round": 1, "train_examples": 80, "lr": 0.003,
    },
    "different networks": {"method": "fedproto", "protocol": "fedsa:digits-mixed", "num_clients": 4, "cohort_size": 4},
    "public images": {
        "method": "fccl-plus", "protocol": "fccl:digit-domains", "public_examples": 60, "public_batch_size": 20,
        "train_examples": 160,
    },
    "training in the server": {"method": "fedgen", "num_clients": 6, "cohort_size": 3},
}  # fmt: skip


def read_goldens() -> dict[str, dict[str, Any]]:
    """Returns the goldens of each kind of machine, by their names."""
    kinds = json.loads(FILE.read_text()) if FILE.is_file() else {}
    return {kind: entry["runs"] for kind, entry in kinds.items()}


def write_goldens(goldens: dict[str, dict[str, Any]]) -> None:
    """Writes the goldens of all kinds of machine."""
    kinds = {kind: {"runs": runs} for kind, runs in goldens.items()}
    FILE.write_text(json.dumps(kinds, indent=1) + "\n")


def names() -> list[str]:
    """Returns the names of all goldens: one for each method, by its name, and those of the other runs."""
    return [*registry.methods(), *OTHER_RUNS]


def options_of(name: str) -> dict[str, Any]:
    """Returns the options of the run of a golden, the method among them."""
    if name in OTHER_RUNS:
        return {"rounds": 3, "train_examples": 240, "local_epochs": 1, "seed": 1, **OTHER_RUNS[name]}
    sizes = {"rounds": 2, "train_examples": 240, "local_epochs": 2}
    return {"method": name, "dataset": default_dataset(registry.find_method(name)), **sizes}


def make(name: str) -> dict[str, Any]:
    """Does the run of a golden; returns its numerics, its curve, and the hash and the norm of its parameters."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # a round with a single client depends on it
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = fedcli.run(**options_of(name), device="cpu", out=Path(folder) / "run")
    finally:
        torch.set_num_threads(threads)
    curve = [entry["test_accuracy"] for entry in run.record["rounds"]]
    params = all_params(registry.find_method(run.record["method"]), run.state, run.record["config"]["num_clients"])
    norm = sum(float(value.double().square().sum()) for _, value in params) ** 0.5
    made = {
        **run.record["numerics"], "params_sha256": run.record["summary"]["params_sha256"], "norm": norm,
        "curve": curve,
    }  # fmt: skip
    if "post" in run.record:
        made["post"] = run.record["post"]["test_accuracy"]
    return made


def name_processor() -> str:
    """Returns what Linux says of an x86 processor; of another one, or on another system, what Python says."""
    text = CPU_INFO.read_text() if CPU_INFO.is_file() else ""
    facts = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text, re.M))
    if "model name" not in facts:
        return platform.processor() or platform.machine()
    return f"{facts['model name']} (family {facts['cpu family']}, model {facts['model']})"


def kind_of_machine() -> str:
    """Returns what the bits of float32 depend on: the processor, the instructions that PyTorch uses, its version."""
    version, _, _ = torch.__version__.partition("+")
    return f"{name_processor()}, {torch.backends.cpu.get_cpu_capability()}, torch {version}"


if __name__ == "__main__":
    goldens = read_goldens()
    goldens[kind_of_machine()] = {name: make(name) for name in names()}
    write_goldens(goldens)
