"""A paper's table of two methods with runs of a second, and who watches how its runs go."""

from dataclasses import replace

from fedcli import Table, grid
from fedcli.results import jobs

SETTINGS = {
    "protocol": "fedfm:digits", "dataset": "digits", "train_examples": 120, "num_clients": 3, "partition": "iid",
    "rounds": 3, "local_epochs": 2, "device": "cpu",
}  # fmt: skip
ROWS = {"FedAvg": ("fedavg", {}), "FedFM": ("fedfm", {})}
PLACE = "CIFAR-10 NIID-1"  # the column


def table(cells, **options):
    """A table of these cells, two seeds each."""
    options = {"seeds": (0, 1), **options}
    return Table("fedfm:III", "Test accuracy", ("FedFM", "Table III"), tuple(cells), **options)


SMALL_TABLE = table(grid(ROWS, {PLACE: SETTINGS}))


class Watch(jobs.PlanListener):
    """Keeps what it is told, and interrupts the table after so many rounds."""

    def __init__(self, patience=10**9):
        self.begun = []
        self.ended = []
        self.new_rounds = set()
        self.patience = patience

    def begin(self, run):
        self.begun.append((run.label, run.setup.config.seed))

    def advance(self, run, rounds):
        rounds_before = len(run.record["rounds"]) if run.record else 0
        if rounds in (1, 2, 3) and rounds > rounds_before:
            self.new_rounds.add((run.folder, rounds))
        if len(self.new_rounds) > self.patience:
            raise KeyboardInterrupt

    def end(self, run, record, error):
        self.ended.append((run.label, run.setup.config.seed, error))


def with_records(plan, records):
    """The plan of a table whose runs have these records, by their folders."""
    runs = {run.folder: replace(run, record=records[run.folder]) for run in plan.runs}
    cells = []
    for planned_cell in plan.cells:
        runs_of_cell = tuple(runs[run.folder] for run in planned_cell.runs)
        cells.append(replace(planned_cell, runs=runs_of_cell))
    return replace(plan, runs=tuple(runs.values()), cells=tuple(cells))
