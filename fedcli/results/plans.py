"""Runs that are planned: of a paper's table or of a grid; which there are, and which are to do.

A run of a table is known by its settings, wherever it lies, so that a table goes on where it was interrupted, shares
runs with other tables, and takes in runs that were made by hand. A run of a grid is known by its folder.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedcli.data import datasets
from fedcli.declarations import Cell, Method, Table
from fedcli.errors import UserError
from fedcli.registry import find_method, find_protocol, protocols
from fedcli.results.frame import ENDED, Record, departures, read_runs, shipped, state_of
from fedcli.results.metrics import Metric, find_metric
from fedcli.runs.config import Setup, num_images, resolve
from fedcli.runs.prepare import load_data
from fedcli.runs.records import outdated
from fedcli.runs.run import begun, check_seeds, new_folder
from fedcli.runs.run import plan as plan_runs
from fedcli.runs.settings import Settings, draft, is_smaller, key, settings, settings_text
from fedcli.userfiles import short_name

HOME = Path("runs/tables")  # of the runs of all tables, unless another folder is given
IN_TEXT = "in-text"  # in papers/reported.json: the numbers that stand in no table
REDUCTIONS = {  # what can make the runs of a table smaller, in words
    "dataset": "{}", "rounds": "at most {:,} rounds", "local_epochs": "at most {:,} local epochs",
    "train_examples": "at most {:,} training images",
}  # fmt: skip
DIVISION = ("partition", "partition_seed", "validation", "local_test")  # options of how images are divided


@dataclass
class PlannedRun:
    """A run that a plan needs."""

    label: str  # what it is called: row and column of the first cell that needs it, or the values of a grid
    method: str  # its name, or the path of its file
    given: dict[str, Any]  # the options that it is run with, the seed among them
    setup: Setup  # the same, resolved
    folder: Path  # where it is, or will be
    values: dict[str, Any]  # those of `given` by which it differs: from what its table says, or from others of its grid
    record: Record | None = None  # what there is of it; None before it has begun

    @property
    def state(self) -> str:
        """One of `fedcli.results.frame.STATES`."""
        return "not run" if self.record is None else state_of(self.record)

    @property
    def to_do(self) -> bool:
        """Whether running it can bring anything; one that has diverged would diverge again."""
        return self.state not in ENDED

    @property
    def outdated(self) -> bool:
        """True where the code of now would not repeat it."""
        if self.record is None:
            return False
        config = {**self.record["config"], "backbone": self.setup.run.backbone}  # where the user's file is now
        return outdated({**self.record, "config": config}, self.setup.method)

    @property
    def rounds_done(self) -> int:
        """Rounds that its record has."""
        return len(self.record["rounds"]) if self.record else 0


@dataclass(frozen=True)
class Plan:
    """Runs as they stand."""

    folder: Path  # where new runs are put, and those that were interrupted go on
    runs: tuple[PlannedRun, ...]  # each stands there once

    @property
    def missing_data(self) -> dict[str, str]:
        """The data sets of runs to do that are not on this machine, with what to do about it."""
        lacking = {}
        for name in sorted({name for run in self.runs if run.to_do for name in run.setup.data_sets}):
            try:
                datasets.available(name)
            except UserError as error:
                lacking[name] = str(error)
        return lacking

    @property
    def to_run(self) -> list[PlannedRun]:
        """The runs to do whose data sets are there, those that have begun first."""
        missing = self.missing_data.keys()
        can = [run for run in self.runs if run.to_do and missing.isdisjoint(run.setup.data_sets)]
        return sorted(can, key=lambda run: run.record is None)

    def accuracy_text(self, record: Record) -> str:
        """What is told of a run as soon as it has finished."""
        return f"test {100 * record['summary']['selected']:.2f} %"


@dataclass(frozen=True)
class PlannedCell:
    """A cell of a table with the runs, one for each seed, that it is read from."""

    cell: Cell
    metric: Metric
    runs: tuple[PlannedRun, ...]

    @property
    def records(self) -> list[Record]:
        """Of those runs that have begun."""
        return [run.record for run in self.runs if run.record is not None]


@dataclass(frozen=True)
class TablePlan(Plan):
    """A table, or the part of it that was asked for, as it stands."""

    table: Table  # the whole table
    cells: tuple[PlannedCell, ...]  # those that were asked for
    seeds: tuple[int, ...]  # of each cell
    reduction: str  # what makes runs smaller, in words; empty where nothing does

    @property
    def title(self) -> str:
        """The table in the paper, and what it shows; of a figure there are only numbers in the text."""
        paper, where = self.table.reported
        return f"{paper}, {self.table.name.split(':')[1] if where == IN_TEXT else where}: {self.table.title}"


def home_of(table: Table) -> Path:
    """Where the runs of a table are kept, unless another folder is given."""
    return HOME / table.name.replace(":", "-")


def plan(
    table: Table,
    folder: Path | None = None,
    *,
    seeds: Sequence[int] | None = None,
    only: Sequence[str] = (),
    limits: Mapping[str, int | None] | None = None,
    dataset: str | None = None,
) -> TablePlan:
    """What a table needs and what is there of it; nothing is run and no data set is read.

    Args:
        table: The table.
        folder: Where its runs are; where not given, `runs/tables/<paper>-<ID>`, and what has ended elsewhere in
            `runs/tables` or is shipped counts, too.
        seeds: In place of the table's own.
        only: Names of rows or columns or parts of such, in any case; a whole name means that one alone. A cell stays if
            its row is among the named rows, should there be any, and its column among the columns.
        limits: Largest number of rounds, local epochs and training images, by option.
        dataset: In place of each cell's, with the network and the training that the paper's protocol for it has.

    Raises:
        UserError: If `only` leaves nothing, or a seed or a limit is out of range.
    """
    homes = [home_of(table), HOME, *shipped()] if folder is None else [folder]
    folder, seeds = homes[0], tuple(check_seeds(table.seeds if seeds is None else seeds))
    rows = read_runs(homes)
    # Elsewhere only what has ended counts.
    rows = rows[rows["state"].isin(ENDED) | rows["folder"].map(lambda path: path.is_relative_to(folder)).astype(bool)]
    there = {name: part.to_dict("records") for name, part in rows.groupby(["method", "seed"])}
    runs: dict[Path, PlannedRun] = {}  # by the folder of a new one, as is what there is of each
    usable: dict[Path, list[dict[str, Any]]] = {}
    cells, smaller = [], {}
    for cell in _chosen(table, only):
        metric, planned = find_metric(cell.metric), []
        for seed in seeds:
            run = _planned_run(table, cell, seed, limits or {}, dataset, folder)
            values = settings(draft(run.setup))
            rows = usable.get(run.folder, there.get((run.setup.method.name, seed), []))
            usable[run.folder] = [row for row in rows if not departures(row, values, metric)]
            planned.append(runs.setdefault(run.folder, run))
            smaller |= run.values
        cells.append(PlannedCell(cell, metric, tuple(planned)))
    for home, run in runs.items():
        if usable[home]:
            furthest = max(usable[home], key=lambda row: (row["state"] in ENDED, len(row["record"]["rounds"])))
            run.folder, run.record = furthest["folder"], furthest["record"]
    reduction = ", ".join(text.format(smaller[name]) for name, text in REDUCTIONS.items() if name in smaller)
    return TablePlan(folder, tuple(runs.values()), table, tuple(cells), seeds, reduction)


class Wanted(NamedTuple):
    """A cell as a run: its setup with seed 0, its settings, and what is read."""

    setup: Setup
    settings: Settings
    metric: Metric


def wanted(cell: Cell) -> Wanted:
    """A cell as a run."""
    setup = resolve(find_method(cell.method), {**cell.settings, "seed": 0}, need_data=False)
    return Wanted(setup, settings(draft(setup)), find_metric(cell.metric))


def _chosen(table: Table, only: Sequence[str]) -> list[Cell]:
    """The cells of the rows and columns that `only` names."""
    rows, columns = (dict.fromkeys(getattr(cell, name) for cell in table.cells) for name in ("row", "column"))
    meant: set[str] = set()
    for text in only:
        parts = [name for name in (*rows, *columns) if text.lower() in name.lower()]
        if not parts:
            raise UserError(
                f"no row or column of {table.name} has '{text}' in its name; rows: {'; '.join(rows)}; columns: "
                f"{'; '.join(columns)}."
            )
        meant.update([name for name in parts if name.lower() == text.lower()] or parts)
    shown = [names.keys() & meant or names.keys() for names in (rows, columns)]
    chosen = [cell for cell in table.cells if cell.row in shown[0] and cell.column in shown[1]]
    if not chosen:
        raise UserError(f"{table.name} has no cell in these rows and columns (got {', '.join(only)}); name others.")
    return chosen


def _planned_run(
    table: Table, cell: Cell, seed: int, limits: Mapping[str, int | None], dataset: str | None, folder: Path
) -> PlannedRun:
    """The run of a cell, before it is looked for."""
    method, given, smaller = find_method(cell.method), {**cell.settings, "seed": seed}, {}
    try:
        if dataset is not None:
            given = _on_other_data(method, given, dataset)
            smaller["dataset"] = given["dataset"]
        setup = resolve(method, given, need_data=False)
        for name, limit in limits.items():
            full = getattr(setup.run, name) or (num_images(setup.run.dataset) if name == "train_examples" else None)
            if is_smaller(name, limit, full):
                smaller[name] = limit
        given |= smaller
        setup = resolve(method, given, need_data=False)
    except UserError as error:
        raise UserError(f"{table.name}, row '{cell.row}', column '{cell.column}': {error}") from error
    # Runs that differ only in the seed share a folder.
    partition = short_name(setup.partition.flag).replace(":", "-").replace("/", "-")
    name = f"{method.name}-{short_name(setup.run.dataset)}-{partition}-{key(settings(draft(setup)))[:8]}"
    label = f"{cell.row}, {cell.column}"
    return PlannedRun(label, cell.method, given, setup, folder / name / f"seed-{seed}", smaller)


def _on_other_data(method: Method, given: Mapping[str, Any], dataset: str) -> dict[str, Any]:
    """The options of a cell's run under the paper's protocol for another data set, with the division of its own."""
    dataset, protocol = datasets.find_name(dataset), find_protocol(given["protocol"], method)
    if dataset in protocol.datasets:
        return {**given, "dataset": dataset}
    paper = protocol.name.partition(":")[0]
    others = [other for other in protocols().values() if other.name.partition(":")[0] == paper]
    suited = [other for other in others if dataset in other.datasets]
    if not suited:
        names = ", ".join(dict.fromkeys(name for other in others for name in other.datasets))
        raise UserError(f"no protocol of '{paper}' is for '{dataset}'; it has {names}.")
    options = {**protocol.settings, **protocol.datasets[given["dataset"]].settings, **given}
    division = {name: options[name] for name in DIVISION if name in options}
    kept = {name: value for name, value in given.items() if name not in suited[0].settings and name != "backbone"}
    return {**kept, **division, "protocol": suited[0].name, "dataset": dataset}


def plan_grid(
    names: Sequence[str],
    given: Mapping[str, Any],
    *,
    seeds: Iterable[int] | None = None,
    out: str | Path | None = None,
    tuned: str | Path | None = None,
    continue_: bool | None = None,
) -> Plan:
    """Every method with every combination of some options' values and every seed, all checked; nothing is run.

    Args:
        names: Names of methods, or paths of method files.
        given: Options; a tuple of values divides the runs.
        seeds: Of each combination; where not given, one run with the seed of `given`.
        out: Folder of the runs, `<method>/<option>=<value>,…/seed-<seed>` in it without what there is but one of;
            `runs/<time>-<method>-<data set>` where not given.
        tuned: See `fedcli.runs.run.run`.
        continue_: Count what is in `out` by the same call.

    Raises:
        UserError: If one of them cannot start.
    """
    called = [find_method(name).name for name in names]
    if len(set(called)) < len(called):  # their runs would share folders
        raise UserError(f"two methods have the same name (got {', '.join(called)}); name each once.")
    if continue_ and out is None:
        raise UserError("--continue needs a folder (got no --out); name it with --out.")
    grid = {name: values for name, values in given.items() if isinstance(values, tuple)}
    runs = []
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    for method, values in itertools.product(names, points):
        for setup, end in plan_runs(method, out=Path(), seeds=seeds, tuned=tuned, **{**given, **values}):
            several = setup.method.name if len(names) > 1 else ""
            point = ",".join(f"{name}={value}" for name, value in values.items())
            label = ", ".join(filter(None, [several, settings_text(values)])) or setup.method.name
            launched = {**given, **values, "tuned": None if tuned is None else str(tuned)}
            launched |= {} if seeds is None else {"seed": setup.run.seed}
            runs.append(PlannedRun(label, method, launched, setup, Path(several, point, end), values))
    folder = Path(out or new_folder(runs[0].setup))
    for run in runs:
        run.folder = folder / run.folder
        run.record = begun(run.setup, run.folder, bool(continue_))
        if run.record is None:
            load_data(run.setup)  # which refuses what cannot run
    return Plan(folder, tuple(runs))
