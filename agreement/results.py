"""What results.json has: how every row of a peer differs from fedcli."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from agreement.rows import Quantity

FILE = Path(__file__).parent / "results.json"
AGREEMENT_TOLERANCE = 1e-12  # a row agrees whose parameters differ by no more
NUM_PROJECTIONS = 8
PROJECTION_SEED = 73


@dataclass(frozen=True)
class Comparison:
    """How one thing that a row compares differs from fedcli's."""

    difference: float | None  # the largest of any value; None where the peer's are not finite
    projections: list[float] | None  # of the peer's values, see `project`; None likewise


@dataclass(frozen=True)
class RowResult:
    """How a row differs from fedcli."""

    comparisons: Mapping[Quantity, Comparison]

    @property
    def largest_difference(self) -> float | None:
        """The largest difference of all that the row compares; None where some of the peer's is not finite."""
        differences = []
        for comparison in self.comparisons.values():
            if comparison.difference is None:
                return None
            differences.append(comparison.difference)
        return max(differences)

    @property
    def agrees(self) -> bool:
        """Whether the row differs by rounding alone."""
        largest = self.largest_difference
        return largest is not None and largest <= AGREEMENT_TOLERANCE


@dataclass(frozen=True)
class PeerResult:
    """How the rows of a peer differ, and where the peer ran."""

    python_version: str
    torch_version: str
    row_results: Mapping[str, RowResult]  # by label


def read() -> dict[str, PeerResult]:
    """The results of the peers by their names; none where there is no file yet."""
    if not FILE.is_file():
        return {}
    content = json.loads(FILE.read_text())
    return {name: parse_peer_result(entry) for name, entry in content.items()}


def parse_peer_result(entry: Mapping) -> PeerResult:
    """What the file has of one peer."""
    row_results = {}
    for label, entry_of_row in entry["rows"].items():
        comparisons = {Quantity(quantity): Comparison(**fields) for quantity, fields in entry_of_row.items()}
        row_results[label] = RowResult(comparisons)
    return PeerResult(entry["python"], entry["torch"], row_results)


def write(results: Mapping[str, PeerResult]) -> None:
    """Writes the results of all peers."""
    content = {name: make_entry(result) for name, result in results.items()}
    FILE.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def make_entry(result: PeerResult) -> dict:
    """What the file has of one peer: rows by label, and in each what is compared by `Quantity`."""
    entries_of_rows = {}
    for label, row_result in result.row_results.items():
        entries_of_rows[label] = {name: asdict(comparison) for name, comparison in row_result.comparisons.items()}
    return {"python": result.python_version, "torch": result.torch_version, "rows": entries_of_rows}


def project(vector: Tensor) -> list[float]:
    """Projections of a vector on normal ones, which NumPy's legacy generator draws alike in every version."""
    directions = np.random.RandomState(PROJECTION_SEED).standard_normal((NUM_PROJECTIONS, len(vector)))
    return (directions @ vector.numpy() / np.sqrt(len(vector))).tolist()
