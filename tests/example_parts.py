"""The documentation's example of a user's data set, partition and network, and options of a run with all three."""

from pathlib import Path

PARTS_FILE = Path(__file__).parent.parent / "docs/examples/my_parts.py"

PARTS_OPTIONS = {
    "dataset": "./parts.py:blobs", "partition": "./parts.py:by_halves", "backbone": "./parts.py:tiny",
    "protocol": "fedfm:digits", "num_clients": 3, "cohort_size": 2, "device": "cpu", "batch_size": 8,
}  # fmt: skip
