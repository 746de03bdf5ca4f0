"""Runs of the first version of fedcli, commit ed4e392, as users still have them, in `tests/old_runs`.

`stopped` is a run of SCAFFOLD after two of its four rounds, with two of four clients a round. `personal` has trained
the four clients' own networks for two rounds. Both need `net.py`. `finished` is a run of FedAvg whose best round by
validation is not its last. `model-client-1.safetensors` and `model.safetensors` were exported by that version.
"""

from pathlib import Path

OLD_RUNS = Path(__file__).parent / "old_runs"
NETWORK_FILE = OLD_RUNS / "net.py"
OLD_RUN_OPTIONS = {
    "dataset": "digits", "protocol": "fedfm:digits", "train_examples": 120, "num_clients": 4, "cohort_size": 2,
    "local_epochs": 1, "batch_size": 16, "device": "cpu", "rounds": 4, "state_memory": "0",
}  # fmt: skip
