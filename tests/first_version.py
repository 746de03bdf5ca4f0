"""Runs of the first version that users have, written by commit ed4e392.

`stopped` is SCAFFOLD after two of four rounds with half of four clients a round; `personal` trained all four clients'
own networks for two rounds. Both need `net.py`. `finished` is FedAvg, whose best round by validation is not its last.
`model-client-1.safetensors` and `model.safetensors` were exported then.
"""

from pathlib import Path

OLD = Path(__file__).parent / "old_runs"
NET = OLD / "net.py"
SETTINGS = {
    "dataset": "digits", "protocol": "fedfm:digits", "train_examples": 120, "num_clients": 4, "cohort_size": 2,
    "local_epochs": 1, "batch_size": 16, "device": "cpu", "rounds": 4, "state_memory": "0",
}  # fmt: skip
