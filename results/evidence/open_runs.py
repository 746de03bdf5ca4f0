"""The cells of tables that decide the open claims, in the order in which they are run, and the runs that they lack."""

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
SEPARATION_CLAIMS = ("fedfm:fedavg", "fedfm:features", "fedfm:silhouette")
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


OPEN_CELLS = (
    CellsToRun("fedfm:V", only=("FedFM", "NMI"), seeds=(0,), claims=SEPARATION_CLAIMS),
    CellsToRun("fedfm:V", only=("FedAvg", "NMI"), seeds=(0,), claims=SEPARATION_CLAIMS),
    CellsToRun(
        "fedsa:1", only=("FedSA", "FedProto", "cross-silo Cifar10"), seeds=(0, 1, 2), claims=("fedsa:cross-silo",)
    ),
    CellsToRun(
        "fedsa:1", only=("FedSA", "FedTGP", "cross-device Cifar100"), seeds=(0, 1, 2), claims=("fedsa:cifar100",)
    ),
    CellsToRun("fedsa:4", only=("EMA+R+ER+MCL+CC", "EMA+R+ER+CC"), seeds=(0, 1, 2), claims=("fedsa:margin",)),
    CellsToRun("fedfm:V", only=("FedFM", "FedAvg", "NMI"), seeds=(1, 2), claims=SEPARATION_CLAIMS),
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
class ClaimRun(PlannedRun):
    """A run of `OPEN_CELLS`."""

    table: str = field(kw_only=True)  # the first one that needs it

    @property
    def lacks_quality(self) -> bool:
        """Whether it has finished and `fedcli quality` has not measured its features, which a claim is about."""
        return self.table == QUALITY_TABLE and self.outcome == "finished" and "quality" not in self.record


def planned_runs(precision: str, tiny: bool) -> list[ClaimRun]:
    """Returns the runs of `OPEN_CELLS` that have no committed record, each once.

    Args:
        precision: Of all runs.
        tiny: Return a small run for the CPU for each of `OPEN_CELLS` instead.
    """
    home = RUNS / precision
    changes: dict[str, Any] = {}
    if precision != "float32":
        changes["precision"] = precision
    if tiny:
        home = RUNS / f"tiny-{precision}"
        changes |= TINY_OPTIONS
    runs: dict[Path, ClaimRun] = {}
    for cells in OPEN_CELLS:
        planned = plan_table(find_table(cells.table), seeds=cells.seeds, only=cells.only).runs
        by_seed = sorted(planned, key=lambda run: run.setup.config.seed)
        if tiny:
            by_seed = by_seed[:1]
        for run in by_seed:
            has_other_options = bool(changes) or bool(cells.options)  # then no committed record stands for it
            if run.needs_running or has_other_options:
                to_run = claim_run(run, cells, changes, home)
                runs.setdefault(to_run.folder, to_run)
    return read_new_records(runs.values())


def claim_run(run: PlannedRun, cells: CellsToRun, changes: Mapping[str, Any], home: Path) -> ClaimRun:
    """Returns a run of a table as it is done here: with other options, in a folder below `home`.

    The folder is named by these options, so that runs which differ in one of them never share a folder.
    """
    options = {**run.given.values, **changes}
    if cells.options:
        # Under another protocol none of the options may come from the cell's.
        options = {**run.setup.all_options(), **changes, **cells.options}
    setup = resolve(find_method(run.method_source), options, need_data=False)
    settings = planned_settings(setup)
    return ClaimRun(
        title=f"{cells.purpose}: {cells.table} {run.title}",
        method_source=run.method_source,
        given=GivenOptions(options),
        setup=setup,
        settings=settings,
        folder=home / make_folder_name(setup, settings) / f"seed-{setup.config.seed}",
        reduced=run.reduced,
        table=cells.table,
    )
