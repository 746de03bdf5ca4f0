"""Runs the rows of one peer in its own environment: `python -m agreement.peer_process MODULE EXCHANGE_FOLDER`.

EXCHANGE_FOLDER has the problems, and gets what the rows end with.
"""

import contextlib
import importlib
import io
import platform
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

from agreement.adapters import Adapter
from agreement.adapters.patches import Patch, change_nothing
from agreement.exchange import PeerRun, Problem, RowFailure, VectorByQuantity, clone_folder, problem_file, run_file
from agreement.peers import load_peer
from agreement.rows import Peer, Row
from agreement.small_networks import flatten


def make_importable(peer: Peer) -> None:
    """Lets Python find the modules of a peer's clone, and stands in for those that its environment lacks."""
    if peer.commit:
        for folder in peer.source_folders:
            sys.path.insert(0, str(clone_folder() / folder))
    for name, attributes in peer.absent_modules.items():
        if name in sys.modules:
            continue
        module = ModuleType(name)
        vars(module).update(attributes)
        sys.modules[name] = module
        package, _, child = name.rpartition(".")
        if package:
            setattr(sys.modules[package], child, module)


def find_patch(row: Row, adapter: Adapter) -> Patch:
    """What changes the peer's code for a row."""
    if row.change and row.change.patch:
        return adapter.PATCHES[row.change.patch]
    return change_nothing


def run_row(row: Row, adapter: Adapter, problem: Problem) -> VectorByQuantity | RowFailure:
    """Runs the peer, and takes what the row compares."""
    with (
        tempfile.TemporaryDirectory() as scratch,
        contextlib.chdir(scratch),  # some write logs or models
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            final_tensors = adapter.run(row.config, problem, find_patch(row, adapter))
            return {quantity: flatten(final_tensors[quantity]) for quantity in row.compared}
        except (Exception, SystemExit):  # a peer that is a script exits where it does not know an option
            return RowFailure(traceback.format_exc())
        finally:
            mock.patch.stopall()


def main(module: str, exchange_folder: Path) -> None:
    """Runs every row of a peer."""
    torch.set_default_dtype(torch.float64)
    peer = load_peer(module)
    make_importable(peer)
    adapter = importlib.import_module(f"agreement.adapters.{module}")
    rows = {}
    for row in peer.rows:
        # Objects that our own process has saved.
        problem = torch.load(problem_file(exchange_folder, row.case), weights_only=False)
        rows[row.label] = run_row(row, adapter, problem)
    peer_run = PeerRun(rows, platform.python_version(), str(torch.__version__))
    torch.save(peer_run, run_file(exchange_folder, module))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve())
