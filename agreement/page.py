"""Writes results/agreement.md from results.json and the rows of the peers: `python -m agreement.page`."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agreement import results
from agreement.bridges import BRIDGES
from agreement.cases import CASES, DEFAULT_NETWORK, Case
from agreement.peers import load_peers
from agreement.problem import RUN
from agreement.results import PeerComparison
from agreement.rows import Peer, Row
from fedcli.errors import UserError
from fedcli.results.render import render_github_table
from fedcli.runs.options import flags_of

PRINTED_FLOOR = 1e-13  # no smaller difference is printed: those are other ones in each run
PAGE = Path(__file__).parents[1] / "results/agreement.md"
INTRODUCTION = """# Agreement with code that others wrote

Peers are projects that others wrote. Their own classes are run beside fedcli on one small problem: the same clients
with digits of scikit-learn, the same first weights, the same batches in the same order, two local epochs of SGD, three
rounds, float64. A row compares all parameters after the last round with fedcli's. Rounding makes differences of about
1e-16; what is larger has a cause. The cause is shown by a second run, in which what it names is changed in the peer's
code or done in fedcli too, and nothing else.

Four clients have 23, 41, 64 and 90 examples of five or six classes (skew), or 48 each (equal); with half, two of the
equal ones take part in a round. A row says what is so in a peer's code at one commit, and not which peer is good:
defaults and readings differ, and papers leave things open. [How it is run](../agreement/README.md).
"""
NOT_RUN = """## Not run

* FedGen of PFLlib with a trained generator. Read and not run, its code (servergen.py, clientgen.py) differs in five
  things: clients learn from the generator in the first round too, when it is untrained; they run it in training mode,
  so that each batch of generated features is normalised by itself; labels are drawn from the counts of all clients
  and not of the round's; noise is uniform and not normal; the generator's Adam lives on from round to round.
* Everything that depends on draws of a peer's own, such as its partitions and its choice of clients.
"""


def name_backbone(network_name: str) -> str:
    """A network as `--backbone` takes it, in the repository's folder."""
    return f"agreement/small_networks.py:{network_name}"


def describe_shared_options() -> str:
    """A paragraph of the options that all runs of fedcli have."""
    options = {**RUN, "backbone": name_backbone(DEFAULT_NETWORK)}
    flags = " ".join(flags_of(options))
    return (
        "The column fedcli says what `fedcli run` takes in the folder of this repository. What it does not say is\n"
        f"`{flags}`\n"
        "in all runs. The clients' examples are given from Python; no option divides them so.\n"
    )


def format_command(case: Case) -> str:
    """A method and its options as they are typed, without those that all runs have."""
    name = f"agreement/bridges.py:{case.method}" if case.method in BRIDGES else case.method
    options = {**case.options, **case.run_options}
    if case.network_name != DEFAULT_NETWORK:
        options["backbone"] = name_backbone(case.network_name)
    return " ".join([name, *flags_of(options)])


@dataclass(frozen=True)
class RowsByAgreement:
    """The rows of a peer, apart by whether they agree."""

    peer: Peer
    comparison: PeerComparison
    agreeing: tuple[Row, ...]
    differing: tuple[Row, ...]

    def format_difference(self, label: str) -> str:
        """The largest difference of a row."""
        largest = self.comparison.rows[label].largest_difference
        if largest is None:
            return "not finite"
        return f"{largest:.1e}" if largest >= PRINTED_FLOOR else f"< {PRINTED_FLOOR:.0e}"


def check_labels(peers: Sequence[Peer], peer_comparisons: Mapping[str, PeerComparison]) -> None:
    """Refuses peers with a row of which there is no result, though there is one of the peer.

    Raises:
        UserError: If there is one.
    """
    for peer in peers:
        if peer.name not in peer_comparisons:
            continue
        for row in peer.rows:
            if row.label not in peer_comparisons[peer.name].rows:
                raise UserError(f"there is no result of {peer.name}, '{row.label}'; run this peer again.")


def split_by_agreement(peer: Peer, comparison: PeerComparison) -> RowsByAgreement:
    """The rows of a peer that agree, and those that do not."""
    agreeing = tuple(row for row in peer.rows if comparison.rows[row.label].agrees)
    differing = tuple(row for row in peer.rows if not comparison.rows[row.label].agrees)
    return RowsByAgreement(peer, comparison, agreeing, differing)


def check_explanations(by_agreement: RowsByAgreement) -> None:
    """Refuses a row that differs without a cause or agrees with one, or is closed by a row that differs too.

    Raises:
        UserError: If there is one.
    """
    for row in by_agreement.agreeing:
        if row.explanation is not None:
            name = f"{by_agreement.peer.name}, '{row.label}'"
            raise UserError(f"{name}, agrees, and says why it differs; take its `explanation` out.")
    for row in by_agreement.differing:
        name = f"{by_agreement.peer.name}, '{row.label}'"
        if row.explanation is None:
            raise UserError(f"{name}, differs; say why in its row, `explanation`.")
        closed_by = row.explanation.closed_by
        if closed_by in by_agreement.differing:
            raise UserError(
                f"{name}, is not closed by '{closed_by.label}', which differs too; leave `closed_by` empty, or mend "
                "that row."
            )


def count_closed(by_agreement: RowsByAgreement) -> int:
    """The number of rows that differ and whose cause is shown by another row."""
    return sum(row.explanation.closed_by is not None for row in by_agreement.differing)


def make_table_of_peers(peers: Sequence[RowsByAgreement]) -> str:
    """A line a peer: what was run, and how many rows agree."""
    lines = []
    for by_agreement in peers:
        peer = by_agreement.peer
        num_closed = count_closed(by_agreement)
        num_open = len(by_agreement.differing) - num_closed
        sources = []
        if peer.package:
            sources.append(str(peer.package))
        if peer.commit:
            sources.append(peer.commit[:10])
        versions = f"Python {by_agreement.comparison.python_version}, torch {by_agreement.comparison.torch_version}"
        num_agreeing = len(by_agreement.agreeing)
        cells = [peer.name, ", ".join(sources), len(peer.rows), num_agreeing, num_closed, num_open, versions]
        lines.append([str(cell) for cell in cells])
    titles = ("Peer", "Version", "Rows", "Agree", "Differ, closed", "Open", "Environment")
    return render_github_table(titles, lines)


def make_table_of_agreeing(by_agreement: RowsByAgreement) -> str:
    """The rows of a peer that agree."""
    lines = []
    for row in by_agreement.agreeing:
        case = CASES[row.case]
        change = row.change.text if row.change else "nothing"
        compared = " and ".join(row.compared)
        difference = by_agreement.format_difference(row.label)
        lines.append([row.label, change, f"`{format_command(case)}`", case.partition, compared, difference])
    titles = (by_agreement.peer.name, "Changed in it", "fedcli", "Clients", "Compared", "Largest difference")
    return render_github_table(titles, lines, number_columns=range(5, len(titles)))


def make_table_of_differing(by_agreement: RowsByAgreement) -> str:
    """The rows of a peer that differ, each with its cause and what closes it."""
    lines = []
    for row in by_agreement.differing:
        explanation = row.explanation
        closed_by = explanation.closed_by
        closed = f"{closed_by.label}: {by_agreement.format_difference(closed_by.label)}" if closed_by else "open"
        difference = by_agreement.format_difference(row.label)
        lines.append([row.label, difference, explanation.cause, explanation.paper_says, closed])
    titles = (by_agreement.peer.name, "Largest difference", "Cause", "What the paper says", "Closed by")
    return render_github_table(titles, lines)


def make_page(peers: Sequence[Peer], peer_comparisons: Mapping[str, PeerComparison]) -> str:
    """The page, of the peers that have results.

    Raises:
        UserError: If a row has no result, or differs without an explanation that holds.
    """
    check_labels(peers, peer_comparisons)
    peers_on_page = []
    for peer in peers:
        if peer.name in peer_comparisons:
            by_agreement = split_by_agreement(peer, peer_comparisons[peer.name])
            check_explanations(by_agreement)
            peers_on_page.append(by_agreement)
    paragraphs = [INTRODUCTION, describe_shared_options(), make_table_of_peers(peers_on_page)]
    for by_agreement in peers_on_page:
        paragraphs += [f"## {by_agreement.peer.name}", make_table_of_agreeing(by_agreement)]
        if by_agreement.differing:
            paragraphs.append(make_table_of_differing(by_agreement))
    paragraphs.append(NOT_RUN)
    return "\n\n".join(paragraph.strip("\n") for paragraph in paragraphs) + "\n"


def write(peer_comparisons: Mapping[str, PeerComparison]) -> None:
    """Writes the page.

    Raises:
        UserError: If there are no results.
    """
    if not peer_comparisons:
        raise UserError(f"there are no results (looked for '{results.FILE}'); run `python -m agreement.agree` first.")
    PAGE.write_text(make_page(load_peers(), peer_comparisons))


if __name__ == "__main__":
    try:
        write(results.read())
    except UserError as error:
        sys.exit(f"error: {error}")
