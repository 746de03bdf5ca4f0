"""A table of two methods whose runs take a second."""

from dataclasses import replace

from fedcli import Table, grid

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


def with_records(plan, records):
    """Returns the plan of a table as if its runs had these records, by the folders of the runs."""
    runs = {run.folder: replace(run, record=records[run.folder]) for run in plan.runs}
    cells = []
    for planned_cell in plan.cells:
        runs_of_cell = tuple(runs[run.folder] for run in planned_cell.runs)
        cells.append(replace(planned_cell, runs=runs_of_cell))
    return replace(plan, runs=tuple(runs.values()), cells=tuple(cells))
