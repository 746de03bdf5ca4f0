"""Runs every peer that is at hand beside fedcli, and writes what differs: results.json, and results/agreement.md.

    python -m agreement.agree --peers DIR                 # from the folder of the repository
    python -m agreement.agree --peers DIR --only fluke    # one peer; the others keep what they had
    python -m agreement.agree --page                      # the page alone, from results.json

DIR has a clone of each project by its name (PFLlib, FL-bench, NIID-Bench, FL-Simulator, Flower, FedDecorr, FedNTD), at
the commits that agreement/peers names, and `envs/NAME/bin/python` for those that need an environment of their own; the
others run in `envs/all`. Nothing is downloaded, installed or built.
"""

import importlib
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from agreement import page, problem, results
from agreement.results import Comparison, PeerResult, RowResult
from agreement.rows import CASES, Peer
from fedcli.errors import UserError

HERE = Path(__file__).parent
MODULES = ("fluke", "flower", "pfllib", "flbench", "niid_bench", "fl_simulator", "feddecorr", "fedntd")


def peers() -> list[Peer]:
    """The peers, in the order of the page."""
    return [importlib.import_module(f"agreement.peers.{module}").PEER for module in MODULES]


def output_of(*command: str) -> str:
    """What a command prints."""
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    return finished.stdout.strip()


def check_commit(clone: Path, peer: Peer) -> None:
    """Refuses a clone that is missing or at another commit."""
    if not clone.is_dir():
        raise UserError(f"there is no clone of {peer.name} (looked for '{clone}'); clone it there, or leave it out.")
    commit = output_of("git", "-C", str(clone), "rev-parse", "HEAD")
    if commit != peer.commit:
        raise UserError(f"'{clone}' is at another commit (got {commit}); check out {peer.commit}, whose code was read.")


def python_of(peer: Peer, folder: Path) -> Path:
    """The interpreter of a peer's environment."""
    environments = folder / "envs"
    of_peer = environments / peer.module / "bin" / "python"
    of_all = environments / "all" / "bin" / "python"
    if of_peer.is_file():
        return of_peer
    if of_all.is_file():
        return of_all
    raise UserError(f"{peer.name} has no environment (looked for '{of_peer}' and '{of_all}'); make one of them.")


@dataclass(frozen=True)
class PeerRun:
    """What the rows of a peer ended with."""

    ends: dict[str, dict[str, Tensor] | str]  # by label and by what is compared; a traceback where the row failed
    python_version: str
    torch_version: str


def run_peer(peer: Peer, folder: Path, work: Path) -> PeerRun:
    """Runs the rows of a peer on the problems in `work`."""
    python = python_of(peer, folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if peer.commit:
        check_commit(folder / peer.name, peer)
        environment["CLONE"] = str((folder / peer.name).resolve())
    command = [str(python), "-m", "agreement.side", peer.module, str(work)]
    subprocess.run(command, cwd=HERE.parent, env=environment, check=True)
    ask = "import torch, platform; print(platform.python_version(), torch.__version__)"
    python_version, torch_version = output_of(str(python), "-c", ask).split()
    return PeerRun(torch.load(work / f"{peer.module}.pt"), python_version, torch_version)


def compare(peer: Peer, peer_run: PeerRun, outcomes: dict[str, dict[str, Tensor]]) -> PeerResult:
    """How each row of a peer differs from what fedcli ended with, by case.

    Raises:
        UserError: If a row has failed.
    """
    rows = {}
    for row in peer.rows:
        ends = peer_run.ends[row.label]
        if isinstance(ends, str):
            raise UserError(f"{peer.name}, '{row.label}', did not run:\n{ends}")
        ours = outcomes[row.case]
        rows[row.label] = RowResult({what: compare_vectors(theirs, ours[what]) for what, theirs in ends.items()})
    return PeerResult(peer_run.python_version, peer_run.torch_version, rows)


def compare_vectors(theirs: Tensor, ours: Tensor) -> Comparison:
    """How a vector of a peer differs from fedcli's, to two digits."""
    difference = (theirs - ours).abs().max().item()
    return Comparison(
        difference=float(f"{difference:.2g}") if math.isfinite(difference) else None,
        projections=problem.projections(theirs) if theirs.isfinite().all() else None,
    )


def run_and_compare(chosen: Iterable[Peer], peers_folder: Path) -> dict[str, PeerResult]:
    """Runs fedcli and peers on the problems; returns the results of the peers by their names."""
    torch.set_num_threads(1)
    outcomes = {}
    for name, case in CASES.items():
        setup, fed = problem.federation(case)
        outcomes[name] = problem.outcome(setup, fed)
    compared = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        problems = {(case.partition, case.network) for case in CASES.values()}
        for partition, network in problems:
            torch.save(problem.describe(partition, network), work / f"problem-{partition}-{network}.pt")
        for peer in chosen:
            peer_run = run_peer(peer, peers_folder, work)
            compared[peer.name] = compare(peer, peer_run, outcomes)
            print(f"{peer.name}: {len(peer.rows)} rows")
    return compared


def main(
    peers_folder: Annotated[Path | None, typer.Option("--peers", help="Folder with clones and environments")] = None,
    only: Annotated[list[str], typer.Option(help="Names of peers to run; all by default")] = [],  # noqa: B006
    only_page: Annotated[bool, typer.Option("--page", help="Write the page from results.json alone")] = False,
) -> None:
    """Run the peers, compare, and write results.json and the page."""
    known = results.read()
    if not only_page:
        if peers_folder is None:
            raise UserError("the peers are not known (got no --peers); name the folder with their clones.")
        chosen = [peer for peer in peers() if not only or peer.name in only]
        known |= run_and_compare(chosen, peers_folder)
        results.write(known)
    page.PAGE.write_text(page.text(peers(), known))


if __name__ == "__main__":
    try:
        typer.run(main)
    except UserError as error:
        sys.exit(f"error: {error}")
