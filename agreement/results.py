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
class QuantityComparison:
    """How one thing that a row compares differs from fedcli's."""

    difference: float | None  # the largest of any value; None where the peer's are not finite
    projections: list[float] | None  # of the peer's values, see `project`; None likewise


@dataclass(frozen=True)
class RowComparison:
    """How a row differs from fedcli."""

    quantities: Mapping[Quantity, QuantityComparison]

    @property
    def largest_difference(self) -> float | None:
        """The largest difference of all that the row compares; None where some of the peer's is not finite."""
        differences = []
        for comparison in self.quantities.values():
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
class PeerComparison:
    """How the rows of a peer differ, and where the peer ran."""

    python_version: str
    torch_version: str
    rows: Mapping[str, RowComparison]  # by label


def read() -> dict[str, PeerComparison]:
    """The comparisons of the peers by their names; none where there is no file yet."""
    if not FILE.is_file():
        return {}
    content = json.loads(FILE.read_text())
    return {name: parse_peer(entry) for name, entry in content.items()}


def parse_peer(entry: Mapping) -> PeerComparison:
    """What the file has of one peer."""
    rows = {}
    for label, entry_of_row in entry["rows"].items():
        quantities = {Quantity(name): QuantityComparison(**fields) for name, fields in entry_of_row.items()}
        rows[label] = RowComparison(quantities)
    return PeerComparison(entry["python"], entry["torch"], rows)


def write(comparisons: Mapping[str, PeerComparison]) -> None:
    """Writes the comparisons of all peers."""
    content = {name: make_entry(comparison) for name, comparison in comparisons.items()}
    FILE.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def make_entry(comparison: PeerComparison) -> dict:
    """What the file has of one peer: rows by label, and in each what is compared by `Quantity`."""
    entries_of_rows = {}
    for label, row in comparison.rows.items():
        entries_of_rows[label] = {name: asdict(quantity) for name, quantity in row.quantities.items()}
    return {"python": comparison.python_version, "torch": comparison.torch_version, "rows": entries_of_rows}


def project(vector: Tensor) -> list[float]:
    """Projections of a vector on normal ones, which NumPy's legacy generator draws alike in every version."""
    directions = np.random.RandomState(PROJECTION_SEED).standard_normal((NUM_PROJECTIONS, len(vector)))
    return (directions @ vector.numpy() / np.sqrt(len(vector))).tolist()
