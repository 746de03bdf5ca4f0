"""Options of runs that take a second, a listener that stops a run, and the parts of runs that tests compare."""

from fedcli.runs import rounds
from fedcli.runs.checkpoints import PREVIOUS

FEW_DIGITS = {"dataset": "digits", "train_examples": 120, "device": "cpu"}

# Four rounds with a checkpoint after each.
TINY = {
    **FEW_DIGITS, "num_clients": 4, "cohort_size": 2, "rounds": 4, "local_epochs": 1, "batch_size": 16,
    "checkpoint_every": 1,
}  # fmt: skip
# Three rounds of as many epochs as the protocol has.
THREE_ROUNDS = {
    **FEW_DIGITS, "protocol": "fedfm:digits", "num_clients": 4, "cohort_size": 2, "rounds": 3, "batch_size": 16,
    "partition": "iid",
}  # fmt: skip
# Two rounds, with the clients of a protocol.
TWO_ROUNDS = {"dataset": "digits", "train_examples": 120, "rounds": 2, "local_epochs": 1}
# Two rounds of two clients with half as many digits.
TWO_CLIENTS = {
    "dataset": "digits", "protocol": "fedfm:digits", "train_examples": 60, "num_clients": 2, "cohort_size": 2,
    "rounds": 2, "device": "cpu", "partition": "iid",
}  # fmt: skip
# One round, for any data set.
ONE_ROUND = {"train_examples": 200, "num_clients": 4, "partition": "iid", "rounds": 1, "device": "cpu"}


class Stop(Exception):
    """The error by which a test ends a run."""


class StopAfter(rounds.Listener):
    """Raises `Stop` after so many rounds."""

    def __init__(self, num_rounds):
        self.rounds_left = num_rounds

    def round(self, entry):
        self.rounds_left -= 1
        if self.rounds_left == 0:
            raise Stop


def without_times(entries):
    """Returns the entries of a record's rounds without how long the rounds took."""
    untimed = []
    for entry in entries:
        untimed.append({key: value for key, value in entry.items() if key != "seconds"})
    return untimed


def reproducible_parts(record):
    """Returns the parts of a record that must not depend on whether its run was interrupted."""
    parts = {key: record[key] for key in ("summary", "status", "config", "cost", "partition")}
    return parts | {"rounds": without_times(record["rounds"])}


def file_names(folder):
    """Returns what is in a folder, but for the checkpoint before the last, which a slow machine may not have."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != PREVIOUS)


def file_contents(folder):
    """Returns the bytes of the files in a folder, by name, without the checkpoint before the last."""
    files = {name: folder / name for name in file_names(folder)}
    return {name: file.read_bytes() for name, file in files.items() if file.is_file()}
