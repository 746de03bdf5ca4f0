"""Modules that a command imports when it first uses them, as `late.plans`.

Help needs no PyTorch, which takes seconds, NumPy, pandas or Matplotlib, and a run no pandas.
"""

from importlib import import_module
from types import ModuleType

PACKAGES = {
    "fedcli": ("check",),
    "fedcli.bench": ("measure",),
    "fedcli.cli": ("display",),
    "fedcli.core": ("backbones", "federation", "partition"),
    "fedcli.data": ("datasets", "files"),
    "fedcli.figures": ("look", "plots", "report"),
    "fedcli.measure": ("quality",),
    "fedcli.results": (
        "claims", "comparison", "durations", "frame", "jobs", "metrics", "paper_tables", "plans", "render", "tables",
        "tune",
    ),
    "fedcli.runs": (
        "begin", "models", "options", "record", "resolve", "resume", "sources", "trackers", "verify", "workers",
    ),
}  # fmt: skip


def __getattr__(name: str) -> ModuleType:
    for package, modules in PACKAGES.items():
        if name in modules:
            return import_module(f"{package}.{name}")
    raise AttributeError(name)
