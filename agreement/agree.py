"""Runs every peer that is at hand beside fedcli, and writes what differs: results.json, and results/agreement.md.

    python -m agreement.agree --peers DIR                 # from the folder of the repository
    python -m agreement.agree --peers DIR --only fluke    # one peer; the others keep what they had
    python -m agreement.page                              # the page alone, from results.json

DIR has a clone of each project by its name (PFLlib, FL-bench, NIID-Bench, FL-Simulator, Flower, FedDecorr, FedNTD), at
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
from agreement.exchange import CLONE_VARIABLE, PeerOutcome, outcome_file, problem_file
from agreement.fedcli_side import FinalVectors
from agreement.peers import load_peers
from agreement.results import Comparison, PeerResult, RowResult
from agreement.rows import Package, Peer
from fedcli.errors import UserError

HERE = Path(__file__).parent


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
    changes = read_output("git", "-C", str(clone), "status", "--porcelain")
    if changes:
        raise UserError(f"'{clone}' was changed since its commit; take the changes back:\n{changes}")


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
    of_peer = environments / peer.module / "bin" / "python"
    of_all = environments / "all" / "bin" / "python"
    if of_peer.is_file():
        return of_peer
    if of_all.is_file():
        return of_all
    raise UserError(f"{peer.name} has no environment (looked for '{of_peer}' and '{of_all}'); make one of them.")


def run_peer(peer: Peer, peers_folder: Path, exchange_folder: Path) -> PeerOutcome:
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
    return torch.load(outcome_file(exchange_folder, peer.module), weights_only=False)


def compare(peer: Peer, peer_outcome: PeerOutcome, of_fedcli: Mapping[str, FinalVectors]) -> PeerResult:
    """How each row of a peer differs from what fedcli ended with, by case.

    Raises:
        UserError: If a row has failed, has a quantity that fedcli does not end with, or has not as many values of one
            as fedcli, or if a value of fedcli is not finite.
    """
    row_results = {}
    for row in peer.rows:
        outcome = peer_outcome.row_outcomes[row.label]
        if outcome.failure:
            raise UserError(f"{peer.name}, '{row.label}', did not run:\n{outcome.failure}")
        comparisons = {}
        for quantity, theirs in outcome.final_vectors.items():
            ours = of_fedcli[row.case].get(quantity)
            if ours is None:
                raise UserError(
                    f"{peer.name}, '{row.label}', has '{quantity}', which fedcli does not end with in '{row.case}' "
                    f"(it has {', '.join(of_fedcli[row.case])}); compare what both have."
                )
            if theirs.shape != ours.shape or not len(theirs):
                raise UserError(
                    f"{peer.name}, '{row.label}', has {len(theirs)} values of '{quantity}' and fedcli "
                    f"{len(ours)}; compare what both have."
                )
            if not ours.isfinite().all():
                raise UserError(f"fedcli's own '{quantity}' in '{row.case}' is not finite; mend that first.")
            comparisons[quantity] = compare_vectors(theirs, ours)
        row_results[row.label] = RowResult(comparisons)
    return PeerResult(peer_outcome.python_version, peer_outcome.torch_version, row_results)


def compare_vectors(theirs: Tensor, ours: Tensor) -> Comparison:
    """How a vector of a peer differs from fedcli's."""
    if not theirs.isfinite().all():
        return Comparison(difference=None, projections=None)
    return Comparison(difference=(theirs - ours).abs().max().item(), projections=results.project(theirs))


def choose_peers(names: Collection[str]) -> list[Peer]:
    """The peers of these names; all of them if there are none.

    Raises:
        UserError: If a name is of no peer.
    """
    all_peers = load_peers()
    known = [peer.name for peer in all_peers]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(f"there is no peer '{unknown[0]}'; choose from {', '.join(known)}.")
    if not names:
        return all_peers
    return [peer for peer in all_peers if peer.name in names]


def run_fedcli(chosen: Sequence[Peer], exchange_folder: Path) -> dict[str, FinalVectors]:
    """Runs fedcli in the cases of the rows of peers, and writes their problems; returns what each case ends with."""
    torch.set_num_threads(1)
    names_of_cases = dict.fromkeys(row.case for peer in chosen for row in peer.rows)
    of_fedcli = {}
    for name in names_of_cases:
        case = CASES[name]
        setup, fed = problem.make_federation(case)
        of_fedcli[name] = fedcli_side.run_case(setup, fed)
        torch.save(problem.make_problem(case), problem_file(exchange_folder, name))
    return of_fedcli


def run_and_compare(chosen: Sequence[Peer], peers_folder: Path, known: dict[str, PeerResult]) -> None:
    """Runs peers beside fedcli, and puts the result of each into the known ones, which are written after each."""
    with tempfile.TemporaryDirectory() as folder:
        exchange_folder = Path(folder)
        of_fedcli = run_fedcli(chosen, exchange_folder)
        for peer in chosen:
            outcome = run_peer(peer, peers_folder, exchange_folder)
            known[peer.name] = compare(peer, outcome, of_fedcli)
            results.write(known)
            print(f"{peer.name}: {len(peer.rows)} rows")


def main(
    peers_folder: Annotated[Path, typer.Option("--peers", help="Folder with clones and environments")],
    only: Annotated[list[str], typer.Option(help="Name of a peer to run; all by default")] = [],  # noqa: B006
) -> None:
    """Run the peers, compare, and write results.json and the page."""
    chosen = choose_peers(only)
    for peer in chosen:
        check_peer(peer, peers_folder)
    known = results.read()
    page.check_labels([peer for peer in load_peers() if peer not in chosen], known)
    run_and_compare(chosen, peers_folder, known)
    page.write(known)


if __name__ == "__main__":
    try:
        typer.run(main)
    except UserError as error:
        sys.exit(f"error: {error}")
