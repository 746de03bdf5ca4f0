"""The cells of tables that are still to be run, most for open claims, in this order, and the runs that they lack."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedcli.registry import find_method, find_table
from fedcli.results.plans import PlannedRun, make_folder_name, plan_table, read_new_records
from fedcli.runs.identity import planned_settings
from fedcli.runs.origins import GivenOptions
from fedcli.runs.resolve import resolve

RUNS = Path("runs/evidence")
QUALITY_TABLE = "fedfm:V"  # its cells are measured by `fedcli quality`
CLAIMS_ON_FEDAVG = ("fedfm:fedavg", "fedfm:features", "fedfm:silhouette")
TINY_OPTIONS = {
    "dataset": "digits", "backbone": "cnn-small", "num_clients": 4, "cohort_size": 2, "rounds": 3, "local_epochs": 1,
    "batch_size": 8, "device": "cpu",
}  # fmt: skip


@dataclass(frozen=True)
class CellsToRun:
    """Cells of a table that are to be run, as by `fedcli table TABLE --only ... --seeds ...`."""

    table: str
    only: tuple[str, ...]
    seeds: tuple[int, ...]
    claims: tuple[str, ...] = ()  # the names of the claims that they decide
    note: str = ""  # what they are run for where they decide no claim
    options: Mapping[str, Any] = field(default_factory=dict)  # in place of the table's; a protocol is among them

    @property
    def purpose(self) -> str:
        """What the cells are run for."""
        return self.note or " ".join(self.claims)


CELLS_TO_RUN = (
    CellsToRun("fedfm:V", only=("FedFM", "NMI"), seeds=(0,), claims=CLAIMS_ON_FEDAVG),
    CellsToRun("fedfm:V", only=("FedAvg", "NMI"), seeds=(0,), claims=CLAIMS_ON_FEDAVG),
    CellsToRun(
        "fedsa:1", only=("FedSA", "FedProto", "cross-silo Cifar10"), seeds=(0, 1, 2), claims=("fedsa:cross-silo",)
    ),
    CellsToRun(
        "fedsa:1", only=("FedSA", "FedTGP", "cross-device Cifar100"), seeds=(0, 1, 2), claims=("fedsa:cifar100",)
    ),
    CellsToRun("fedsa:4", only=("EMA+R+ER+MCL+CC", "EMA+R+ER+CC"), seeds=(0, 1, 2), claims=("fedsa:margin",)),
    CellsToRun("fedfm:V", only=("FedFM", "FedAvg", "NMI"), seeds=(1, 2), claims=CLAIMS_ON_FEDAVG),
    CellsToRun("fedfm:V", only=("SCAFFOLD", "NMI"), seeds=(0, 1, 2), claims=("fedfm:second-best",)),
    CellsToRun(
        "fedcme:II",
        only=("FedAvg", "FedCME(0.01)", "CIFAR10 alpha=0.1 K=80", "CIFAR10 alpha=0.5 K=80"),
        seeds=(0, 1, 2),
        claims=("fedcme:more-skew",),
    ),
    CellsToRun(
        "fedcme:III",
        only=("FedCME(0.01)", "FedAvg", "FedRS(0.5)", "K=80,M=30", "K=50,M=20"),
        seeds=(0, 1, 2),
        claims=("fedcme:sooner",),
    ),
    # The blank leaves out CIFAR-100.
    CellsToRun("fedfa:2", only=("CIFAR-10 ",), seeds=(2021, 2022, 2023), note="FedFA's Table 2"),
    CellsToRun(
        "fccl:8",
        only=("FCCL+", "FCCL", "BASE", "local training of equal length", "Digits inter AVG"),
        seeds=(0, 1, 2),
        claims=("fccl:base", "fccl:fccl-base"),
        options={"protocol": "fccl:digit-domains", "dataset": "digits-real-4"},
    ),
    CellsToRun("fedfm:III", only=("CIFAR-10 NIID-1", "CIFAR-10 NIID-2"), seeds=(0, 1, 2), note="FedFM's Table III"),
)


@dataclass(frozen=True)
class OpenRun(PlannedRun):
    """A run of `CELLS_TO_RUN`."""

    needs_quality: bool = field(kw_only=True)  # whether its cell is a number that `fedcli quality` measures

    @property
    def lacks_quality(self) -> bool:
        """Whether it has finished and `fedcli quality` has not measured its features yet."""
        return self.needs_quality and self.outcome == "finished" and "quality" not in self.record


def plan_open_runs(precision: str) -> list[OpenRun]:
    """Returns the runs of `CELLS_TO_RUN` in a precision, each once.

    Those with the options of their table are left out if they have a committed record; for others none is looked up.
    """
    changes = changes_for_precision(precision)
    runs: dict[Path, OpenRun] = {}
    for cells in CELLS_TO_RUN:
        for run in plan_cells(cells):
            if run.needs_running or changes or cells.options:
                open_run = make_open_run(run, cells, changes, RUNS / precision)
                runs.setdefault(open_run.folder, open_run)
    return read_new_records(runs.values())


def plan_tiny_runs(precision: str) -> list[OpenRun]:
    """Returns a small run for the CPU for each of `CELLS_TO_RUN`."""
    changes = changes_for_precision(precision) | TINY_OPTIONS
    runs: dict[Path, OpenRun] = {}
    for cells in CELLS_TO_RUN:
        first_run, *_ = plan_cells(cells)
        tiny_run = make_open_run(first_run, cells, changes, RUNS / f"tiny-{precision}")
        runs.setdefault(tiny_run.folder, tiny_run)
    return read_new_records(runs.values())


def changes_for_precision(precision: str) -> dict[str, Any]:
    """Returns the options of a precision; none for float32, which all tables have."""
    return {} if precision == "float32" else {"precision": precision}


def plan_cells(cells: CellsToRun) -> list[PlannedRun]:
    """Returns the runs of cells as their table has them, by seed."""
    plan = plan_table(find_table(cells.table), seeds=cells.seeds, only=cells.only)
    return sorted(plan.runs, key=lambda run: run.setup.config.seed)


def find_table_options(run: PlannedRun, cells: CellsToRun) -> Mapping[str, Any]:
    """Returns the options that a run of a table brings along.

    For another protocol these are all options, so that it has those that the table's protocol sets.
    """
    return run.setup.all_options() if cells.options else run.given.values


def make_open_run(run: PlannedRun, cells: CellsToRun, changes: Mapping[str, Any], home: Path) -> OpenRun:
    """Returns a run of a table as it is done here: with other options, in a folder below `home`.

    The folder is named by these options, so that runs which differ in one of them never share a folder.
    """
    options = {**find_table_options(run, cells), **changes, **cells.options}
    setup = resolve(find_method(run.method_source), options, need_data=False)
    settings = planned_settings(setup)
    return OpenRun(
        title=f"{cells.purpose}: {cells.table} {run.title}",
        method_source=run.method_source,
        given=GivenOptions(options),
        setup=setup,
        settings=settings,
        folder=home / make_folder_name(setup, settings) / f"seed-{setup.config.seed}",
        reduced=run.reduced,
        needs_quality=cells.table == QUALITY_TABLE,
    )
