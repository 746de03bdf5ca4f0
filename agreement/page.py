"""results/agreement.md, from results.json and the rows of the peers."""

from collections.abc import Sequence
from pathlib import Path

from agreement.bridges import BRIDGES
from agreement.rows import CASES, Case, Peer, Row
from fedcli.results.render import github
from fedcli.runs.options import flags_of

PAGE = Path(__file__).parents[1] / "results/agreement.md"
SAME = 1e-12  # a row agrees whose parameters differ by no more
ROUNDING = 1e-13  # differences below differ from run to run
INTRODUCTION = """# Agreement with code that others wrote

Other projects' own classes are run beside fedcli on one small problem: the same clients with digits of scikit-learn,
the same first weights, the same batches in the same order, two local epochs of SGD, three rounds, float64. A row holds
all parameters after the last round to fedcli's. Rounding makes differences of about 1e-16; what is larger has a cause.
The cause is shown by a second run, in which that one thing is changed in the project's code or done in fedcli too, and
nothing else.

Four clients have 23, 41, 64 and 90 examples of five or six classes (skew), or 48 each (equal); with half, two of the
equal ones take part in a round. A row says what is so in a project's code at one commit, and not which project is good:
defaults and readings differ, and papers leave things open. [How it is run](../agreement/README.md).
"""
NOT_RUN = """## Not run

* FedGen of PFLlib with a trained generator. Read and not run, its code (servergen.py, clientgen.py) differs in five
  things: clients learn from the generator in the first round too, when it is untrained; they run it in training mode,
  so that each batch of generated features is normalised by itself; labels are drawn from the counts of all clients
  and not of the round's; noise is uniform and not normal; the generator's Adam lives on from round to round.
* Everything that depends on draws of a project's own, such as its partitions and its choice of clients.
"""


def differences(results: dict, peer: Peer, label: str) -> list[float | None]:
    """The largest difference of each thing that a row compares; None where the peer's is not finite."""
    return [part["difference"] for part in results[peer.name]["rows"][label].values()]


def agrees(results: dict, peer: Peer, label: str) -> bool:
    """Whether a row differs by rounding alone."""
    return all(value is not None and value <= SAME for value in differences(results, peer, label))


def difference_text(results: dict, peer: Peer, label: str) -> str:
    """The largest difference of a row."""
    differences_of_row = differences(results, peer, label)
    if None in differences_of_row:
        return "not finite"
    largest = max(differences_of_row)
    return f"{largest:.1e}" if largest >= ROUNDING else f"< {ROUNDING:.0e}"


def command(case: Case) -> str:
    """What fedcli runs, as it is typed."""
    name = f"bridges.py:{case.method}" if case.method in BRIDGES else case.method
    return " ".join([name, *flags_of({**case.options, **case.run})])


def overview(peers: Sequence[Peer], results: dict) -> str:
    """A line a peer: what was run, and how many rows agree."""
    lines = []
    for peer in peers:
        results_of_peer = results[peer.name]
        same = [row for row in peer.rows if agrees(results, peer, row.label)]
        closed = [row for row in peer.rows if row not in same and row.closed_by]
        source = ", ".join(filter(None, (peer.package, peer.commit[:10])))
        num_open = len(peer.rows) - len(same) - len(closed)
        versions = f"Python {results_of_peer['python']}, torch {results_of_peer['torch']}"
        cells = [peer.name, source, len(peer.rows), len(same), len(closed), num_open, versions]
        lines.append([str(cell) for cell in cells])
    titles = ("Project", "Version", "Rows", "Agree", "Differ, closed", "Open", "Environment")
    return github(titles, lines)


def agreeing(peer: Peer, rows: Sequence[Row], results: dict) -> str:
    """The rows of a peer that agree."""
    lines = []
    for row in rows:
        case = CASES[row.case]
        change = row.change or "nothing"
        compared = " and ".join(row.compared)
        difference = difference_text(results, peer, row.label)
        lines.append([row.label, change, f"`{command(case)}`", case.partition, compared, difference])
    titles = (peer.name, "Changed in it", "fedcli", "Clients", "Compared", "Largest difference")
    return github(titles, lines, first_number_column=5)


def differing(peer: Peer, rows: Sequence[Row], results: dict) -> str:
    """The rows of a peer that differ, each with its cause and what closes it."""
    lines = []
    for row in rows:
        closed = f"{row.closed_by}: {difference_text(results, peer, row.closed_by)}" if row.closed_by else "open"
        lines.append([row.label, difference_text(results, peer, row.label), row.cause, row.judge, closed])
    return github((peer.name, "Largest difference", "Cause", "What the paper has", "Closed by"), lines)


def text(peers: Sequence[Peer], results: dict) -> str:
    """The page."""
    parts = [INTRODUCTION, overview(peers, results)]
    for peer in peers:
        same = [row for row in peer.rows if agrees(results, peer, row.label)]
        other = [row for row in peer.rows if row not in same]
        parts += [f"## {peer.name}", agreeing(peer, same, results)]
        if other:
            parts.append(differing(peer, other, results))
    return "\n\n".join(part.strip("\n") for part in (*parts, NOT_RUN)) + "\n"
