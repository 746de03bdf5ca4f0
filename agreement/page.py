"""results/agreement.md, from results.json and the rows of the peers."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from agreement.bridges import BRIDGES
from agreement.results import PeerResult, RowResult
from agreement.rows import CASES, Case, Peer, Row
from fedcli.results.render import github_table
from fedcli.runs.options import flags_of

PAGE = Path(__file__).parents[1] / "results/agreement.md"
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


def difference_text(row: RowResult) -> str:
    """The largest difference of a row."""
    largest = row.largest_difference
    if largest is None:
        return "not finite"
    return f"{largest:.1e}" if largest >= ROUNDING else f"< {ROUNDING:.0e}"


def command(case: Case) -> str:
    """What fedcli runs, as it is typed."""
    name = f"bridges.py:{case.method}" if case.method in BRIDGES else case.method
    return " ".join([name, *flags_of({**case.options, **case.run})])


def overview(peers: Sequence[Peer], results: Mapping[str, PeerResult]) -> str:
    """A line a peer: what was run, and how many rows agree."""
    lines = []
    for peer in peers:
        result = results[peer.name]
        same, other = agreeing_and_differing(peer, result)
        num_closed = sum(bool(row.closed_by) for row in other)
        num_open = len(other) - num_closed
        source = ", ".join(filter(None, (peer.package, peer.commit[:10])))
        versions = f"Python {result.python}, torch {result.torch}"
        cells = [peer.name, source, len(peer.rows), len(same), num_closed, num_open, versions]
        lines.append([str(cell) for cell in cells])
    titles = ("Project", "Version", "Rows", "Agree", "Differ, closed", "Open", "Environment")
    return github_table(titles, lines)


def agreeing_and_differing(peer: Peer, result: PeerResult) -> tuple[list[Row], list[Row]]:
    """The rows of a peer that agree, and those that do not."""
    same = []
    other = []
    for row in peer.rows:
        rows = same if result.rows[row.label].agrees else other
        rows.append(row)
    return same, other


def agreeing(peer: Peer, rows: Sequence[Row], result: PeerResult) -> str:
    """The rows of a peer that agree."""
    lines = []
    for row in rows:
        case = CASES[row.case]
        change = row.change or "nothing"
        compared = " and ".join(row.compared)
        difference = difference_text(result.rows[row.label])
        lines.append([row.label, change, f"`{command(case)}`", case.partition, compared, difference])
    titles = (peer.name, "Changed in it", "fedcli", "Clients", "Compared", "Largest difference")
    return github_table(titles, lines, first_number_column=5)


def differing(peer: Peer, rows: Sequence[Row], result: PeerResult) -> str:
    """The rows of a peer that differ, each with its cause and what closes it."""
    lines = []
    for row in rows:
        closed = "open"
        if row.closed_by:
            closed = f"{row.closed_by}: {difference_text(result.rows[row.closed_by])}"
        difference = difference_text(result.rows[row.label])
        lines.append([row.label, difference, row.cause, row.decided_by, closed])
    return github_table((peer.name, "Largest difference", "Cause", "What the paper has", "Closed by"), lines)


def text(peers: Sequence[Peer], results: Mapping[str, PeerResult]) -> str:
    """The page."""
    parts = [INTRODUCTION, overview(peers, results)]
    for peer in peers:
        result = results[peer.name]
        same, other = agreeing_and_differing(peer, result)
        parts += [f"## {peer.name}", agreeing(peer, same, result)]
        if other:
            parts.append(differing(peer, other, result))
    parts.append(NOT_RUN)
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"
