"""Listeners that stop a run, or watch those of a plan."""

from fedcli.results import jobs
from fedcli.runs import rounds


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


class PlanWatch(jobs.PlanListener):
    """A listener that keeps what it is told of runs, and interrupts them after more than `max_rounds` new rounds.

    It never does if `max_rounds` is None.
    """

    def __init__(self, max_rounds=None):
        self.begun = []
        self.ended = []
        self.new_rounds = set()
        self.max_rounds = max_rounds

    def begin(self, run):
        self.begun.append((run.title, run.setup.config.seed))

    def advance(self, run, rounds):
        rounds_before = len(run.record["rounds"]) if run.record else 0
        if rounds > rounds_before:
            self.new_rounds.add((run.folder, rounds))
        if self.max_rounds is not None and len(self.new_rounds) > self.max_rounds:
            raise KeyboardInterrupt

    def end(self, run, record, error):
        self.ended.append((run.title, run.setup.config.seed, error))
