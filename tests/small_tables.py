"""A table of two methods whose runs take a second, and a listener that watches such runs."""

from dataclasses import replace

from fedcli import Table, grid
from fedcli.results import jobs

RUN_OPTIONS = {
    "protocol": "fedfm:digits", "dataset": "digits", "train_examples": 120, "num_clients": 3, "partition": "iid",
    "rounds": 3, "local_epochs": 2, "device": "cpu",
}  # fmt: skip
ROWS = {"FedAvg": ("fedavg", {}), "FedFM": ("fedfm", {})}
COLUMN = "CIFAR-10 NIID-1"


def make_table(cells, **options):
    """Returns a table of test accuracies with these cells, each of two seeds unless `options` have others."""
    options = {"seeds": (0, 1), **options}
    return Table("fedfm:III", "Test accuracy", ("FedFM", "Table III"), tuple(cells), **options)


SMALL_TABLE = make_table(grid(ROWS, {COLUMN: RUN_OPTIONS}))


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


def with_records(plan, records):
    """Returns the plan of a table as if its runs had these records, by the folders of the runs."""
    runs = {run.folder: replace(run, record=records[run.folder]) for run in plan.runs}
    cells = []
    for planned_cell in plan.cells:
        runs_of_cell = tuple(runs[run.folder] for run in planned_cell.runs)
        cells.append(replace(planned_cell, runs=runs_of_cell))
    return replace(plan, runs=tuple(runs.values()), cells=tuple(cells))
