"""Runs the rows of one peer in its own environment: `python -m agreement.side MODULE FOLDER`.

FOLDER has the problems, and gets the peer's ends. The peer's clone, if it has one, is named by the variable CLONE.
"""

import contextlib
import importlib
import io
import os
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor

from agreement.adapters import Adapter
from agreement.adapters.feed import Problem
from agreement.network import flat
from agreement.rows import CASES, Peer, Row


def make_importable(peer: Peer) -> None:
    """Lets Python find the modules of a peer's clone, and stands in for those that its environment lacks."""
    if peer.commit:
        clone = Path(os.environ["CLONE"])
        for folder in peer.source_folders:
            sys.path.insert(0, str(clone / folder))
    for name, attributes in peer.absent_modules.items():
        if name in sys.modules:
            continue
        module = ModuleType(name)
        vars(module).update(attributes)
        sys.modules[name] = module
        package, _, child = name.rpartition(".")
        if package:
            setattr(sys.modules[package], child, module)


def run_row(row: Row, adapter: Adapter, problem: Problem) -> dict[str, Tensor] | str:
    """What a row compares, as vectors; the traceback if the peer fails."""
    with (
        tempfile.TemporaryDirectory() as scratch,
        contextlib.chdir(scratch),  # some write logs or models
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            ends = adapter.run(row.setup, problem)
            return {what: flat(ends[what]) for what in row.compared}
        except Exception:
            return traceback.format_exc()
        finally:
            mock.patch.stopall()


def main(module: str, folder: Path) -> None:
    """Runs every row of a peer."""
    torch.set_default_dtype(torch.float64)
    peer = importlib.import_module(f"agreement.peers.{module}").PEER
    make_importable(peer)
    adapter = importlib.import_module(f"agreement.adapters.{module}")
    ends = {}
    for row in peer.rows:
        case = CASES[row.case]
        problem = Problem(**torch.load(folder / f"problem-{case.partition}-{case.network}.pt"))
        ends[row.label] = run_row(row, adapter, problem)
    torch.save(ends, folder / f"{module}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve())
