"""fedcli: its `run`."""

from typing import Any

import fedcli
from sides.job import Job, Outcome, RoundClock


class Logger:
    """What fedcli tells of a run: here that a round has ended."""

    def __init__(self, clock: RoundClock):
        self._clock = clock

    def round(self, entry: dict[str, Any]) -> None:
        """Is called as a round ends."""
        self._clock.end_round()


def run(job: Job) -> Outcome:
    """Runs rounds by fedcli."""
    clock = RoundClock()
    finished = fedcli.run(
        **job.workload.options, rounds=job.rounds, eval_every=job.rounds, out=job.folder / "run", log=[Logger(clock)]
    )
    record = finished.record
    accuracy = record["rounds"][-1]["test_accuracy"]
    version = record["versions"]["fedcli"]
    commit = shorten_commit(record["commit"])
    return Outcome(clock.seconds(), accuracy, f"fedcli {version}, {commit}")


def shorten_commit(commit: str | None) -> str:
    """The first seven digits of a record's commit, with the "+" of a checkout that is modified."""
    if commit is None:
        return "unknown commit"
    mark = "+" if commit.endswith("+") else ""
    return commit[:7] + mark
