"""Runs the rows of one peer in its own environment: `python -m agreement.side MODULE FOLDER`.

FOLDER has the problems, and gets the peer's ends. The peer's clone, if it has one, is named by the variable CLONE.
"""

import importlib
import os
import sys
import traceback
from pathlib import Path

import torch

from agreement.rows import CASES


def main(module: str, folder: Path) -> None:
    """Runs every row, or those whose label has a word of the command line in it."""
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
            ends[row.label] = {
                what: torch.cat([each.double().flatten() for each in reached[what]]) for what in row.compared
            }
        except Exception:
            ends[row.label] = traceback.format_exc()
    torch.save(ends, folder / f"{module}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
