"""Runs the rows of one peer in its own environment: `python -m agreement.side MODULE FOLDER`.

FOLDER has the problems, and gets the peer's ends. The peer's clone, if it has one, is named by the variable CLONE.
"""

import importlib
import os
import sys
import traceback
from pathlib import Path

import torch
from torch import Tensor

from agreement.rows import CASES


def vector(tensors: list[Tensor]) -> Tensor:
    """The values of tensors in one vector, in float64."""
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def main(module: str, folder: Path) -> None:
    """Runs every row of a peer; a row that fails ends in its traceback."""
    if "CLONE" in os.environ:
        sys.path.insert(0, os.environ["CLONE"])
    torch.set_default_dtype(torch.float64)
    adapter = importlib.import_module(f"agreement.peers.{module}")
    ends = {}
    for row in adapter.PEER.rows:
        case = CASES[row.case]
        problem = torch.load(folder / f"problem-{case.partition}-{case.network}.pt")
        try:
            reached = adapter.run(row, problem)
            ends[row.label] = {what: vector(reached[what]) for what in row.compared}
        except Exception:
            ends[row.label] = traceback.format_exc()
    torch.save(ends, folder / f"{module}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
