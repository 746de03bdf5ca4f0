"""Runs every peer that is at hand beside fedcli, and writes what differs: results.json, and results/agreement.md.

    python -m agreement.agree --peers DIR                 # from the folder of the repository
    python -m agreement.agree --peers DIR --only fluke    # one peer; the others keep what they had
    python -m agreement.page                              # the page alone, from results.json

DIR has a clone of each peer by its name (PFLlib, FL-bench, NIID-Bench, FL-Simulator, Flower, FedDecorr, FedNTD), at
the commits that agreement/peers names, and `envs/MODULE/bin/python`, by the module there, for those that need an
environment of their own; the others run in `envs/all`. Nothing is downloaded, installed or built.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from agreement import fedcli_side, page, problem, results
from agreement.cases import CASES
from agreement.exchange import CLONE_VARIABLE, PeerRun, RowFailure, VectorByQuantity, problem_file, run_file
from agreement.peers import load_peers
from agreement.results import PeerComparison, QuantityComparison, RowComparison
from agreement.rows import Package, Peer
from fedcli.errors import UserError

HERE = Path(__file__).parent
NUM_LISTED_CHANGES = 10  # of a clone that is refused


def read_output(*command: str) -> str:
    """What a command prints."""
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    return finished.stdout.strip()


def check_clone(clone: Path, peer: Peer) -> None:
    """Refuses a clone that is missing, at another commit, or changed since."""
    if not clone.is_dir():
        raise UserError(f"there is no clone of {peer.name} (looked for '{clone}'); clone it there, or leave it out.")
    try:
        commit = read_output("git", "-C", str(clone), "rev-parse", "HEAD")
    except subprocess.CalledProcessError as error:
        raise UserError(
            f"'{clone}' is no clone of {peer.name} ({error.stderr.strip()}); clone it there, or leave it out."
        ) from None
    if commit != peer.commit:
        raise UserError(f"'{clone}' is at another commit (got {commit}); check out {peer.commit}, whose code was read.")
    changes = read_output("git", "-C", str(clone), "status", "--porcelain").splitlines()
    if changes:
        first_changes = "\n".join(changes[:NUM_LISTED_CHANGES])
        raise UserError(
            f"'{clone}' was changed since its commit; take the changes back, {len(changes)} by git:\n{first_changes}"
        )


def check_package(python: Path, package: Package) -> None:
    """Refuses an environment that has no such package or another version of it."""
    ask = f"import importlib.metadata as m; print([*m.distributions(name='{package.name}')][0].version)"
    finished = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=False)
    version = finished.stdout.strip()
    if version != package.version:
        raise UserError(f"'{python}' does not have {package} (got {version or 'none'}); install that version.")


def check_peer(peer: Peer, peers_folder: Path) -> None:
    """Refuses a peer whose environment or clone is missing or is another one."""
    python = find_python(peer, peers_folder)
    if peer.package:
        check_package(python, peer.package)
    if peer.commit:
        check_clone(peers_folder / peer.name, peer)


def find_python(peer: Peer, peers_folder: Path) -> Path:
    """The interpreter of a peer's environment."""
    environments = peers_folder / "envs"
    own_python = environments / peer.module / "bin" / "python"
    common_python = environments / "all" / "bin" / "python"
    if own_python.is_file():
        return own_python
    if common_python.is_file():
        return common_python
    raise UserError(
        f"{peer.name} has no environment (looked for '{own_python}' and '{common_python}'); make one of them."
    )


def run_peer(peer: Peer, peers_folder: Path, exchange_folder: Path) -> PeerRun:
    """Runs the rows of a peer on the problems in the exchange folder.

    Raises:
        UserError: If its process fails, as where its adapter cannot be imported.
    """
    python = find_python(peer, peers_folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if peer.commit:
        environment[CLONE_VARIABLE] = str((peers_folder / peer.name).resolve())
    command = [str(python), "-m", "agreement.peer_process", peer.module, str(exchange_folder)]
    finished = subprocess.run(command, cwd=HERE.parent, env=environment, check=False)
    if finished.returncode:
        raise UserError(
            f"the adapter of {peer.name} does not run in '{python}' (what it says stands above); install what is "
            "missing, or leave this peer out."
        )
    # An object that our own process has saved.
    return torch.load(run_file(exchange_folder, peer.module), weights_only=False)


def compare(peer: Peer, peer_run: PeerRun, fedcli_runs: Mapping[str, VectorByQuantity]) -> PeerComparison:
    """How each row of a peer differs from what fedcli ended with, by case.

    Raises:
        UserError: If a row has failed, has a quantity that fedcli does not end with, or has not as many values of one
            as fedcli, or if a value of fedcli is not finite.
    """
    compared_rows = {}
    for row in peer.rows:
        row_run = peer_run.rows[row.label]
        if isinstance(row_run, RowFailure):
            raise UserError(f"{peer.name}, '{row.label}', did not run:\n{row_run.traceback}")
        compared_quantities = {}
        for quantity, theirs in row_run.items():
            ours = fedcli_runs[row.case].get(quantity)
            if ours is None:
                raise UserError(
                    f"{peer.name}, '{row.label}', has '{quantity}', which fedcli does not end with in '{row.case}' "
                    f"(it has {', '.join(fedcli_runs[row.case])}); compare what both have."
                )
            if theirs.shape != ours.shape or not len(theirs):
                raise UserError(
                    f"{peer.name}, '{row.label}', has {len(theirs)} values of '{quantity}' and fedcli "
                    f"{len(ours)}; compare what both have."
                )
            if not ours.isfinite().all():
                raise UserError(f"fedcli's own '{quantity}' in '{row.case}' is not finite; mend that first.")
            compared_quantities[quantity] = compare_vectors(theirs, ours)
        compared_rows[row.label] = RowComparison(compared_quantities)
    return PeerComparison(peer_run.python_version, peer_run.torch_version, compared_rows)


def compare_vectors(theirs: Tensor, ours: Tensor) -> QuantityComparison:
    """How a vector of a peer differs from fedcli's."""
    if not theirs.isfinite().all():
        return QuantityComparison(difference=None, projections=None)
    return QuantityComparison(difference=(theirs - ours).abs().max().item(), projections=results.project(theirs))


def choose_peers(names: Collection[str]) -> list[Peer]:
    """The peers of these names; all of them if there are none.

    Raises:
        UserError: If a name is of no peer.
    """
    all_peers = load_peers()
    names_of_all = [peer.name for peer in all_peers]
    unknown = [name for name in names if name not in names_of_all]
    if unknown:
        raise UserError(f"there is no peer '{unknown[0]}'; choose from {', '.join(names_of_all)}.")
    if not names:
        return all_peers
    return [peer for peer in all_peers if peer.name in names]


def run_fedcli(chosen: Sequence[Peer], exchange_folder: Path) -> dict[str, VectorByQuantity]:
    """Runs fedcli in the cases of the rows of peers, and writes their problems; returns what each case ends with."""
    torch.set_num_threads(1)
    names_of_cases = dict.fromkeys(row.case for peer in chosen for row in peer.rows)
    fedcli_runs = {}
    for name in names_of_cases:
        case = CASES[name]
        setup, fed = problem.make_federation(case)
        fedcli_runs[name] = fedcli_side.run_case(setup, fed)
        torch.save(problem.make_problem(case), problem_file(exchange_folder, name))
    return fedcli_runs


def run_and_compare(chosen: Sequence[Peer], peers_folder: Path, comparisons: dict[str, PeerComparison]) -> None:
    """Runs peers beside fedcli; puts how each compares into the comparisons, and writes them, after each."""
    with tempfile.TemporaryDirectory() as folder:
        exchange_folder = Path(folder)
        fedcli_runs = run_fedcli(chosen, exchange_folder)
        for peer in chosen:
            peer_run = run_peer(peer, peers_folder, exchange_folder)
            comparisons[peer.name] = compare(peer, peer_run, fedcli_runs)
            results.write(comparisons)
            print(f"{peer.name}: {len(peer.rows)} rows")


def main(
    peers_folder: Annotated[Path, typer.Option("--peers", help="Folder with clones and environments")],
    only: Annotated[list[str], typer.Option(help="Name of a peer to run; all by default")] = [],  # noqa: B006
) -> None:
    """Run the peers, compare, and write results.json and the page."""
    peers_folder = peers_folder.resolve()  # peers run in another folder
    chosen = choose_peers(only)
    for peer in chosen:
        check_peer(peer, peers_folder)
    comparisons = results.read()
    page.check_labels([peer for peer in load_peers() if peer not in chosen], comparisons)
    run_and_compare(chosen, peers_folder, comparisons)
    page.write(comparisons)


if __name__ == "__main__":
    try:
        typer.run(main)
    except UserError as error:
        sys.exit(f"error: {error}")
