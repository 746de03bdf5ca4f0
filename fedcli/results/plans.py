"""Planned runs, and those of a paper's table: which there are, and which are to do.

A table finds its runs by their settings in any folder, also those of other tables and those made by hand.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fedcli.data import datasets
from fedcli.data.datasets import num_images
from fedcli.data.imports import import_if_path
from fedcli.declarations import Cell, Method, Table
from fedcli.errors import UserError
from fedcli.registry import find_method, find_protocol, protocols
from fedcli.results.frame import RunRow, read_runs, rows_of, shipped_folders
from fedcli.results.metrics import Metric, find_metric
from fedcli.runs.begin import check_seeds
from fedcli.runs.identity import (
    SIZES,
    Settings,
    differences_from_plan,
    is_smaller,
    key_of,
    outdated,
    planned_settings,
)
from fedcli.runs.origins import GivenOptions
from fedcli.runs.record import ENDED, state_of
from fedcli.runs.resolve import Setup, resolve
from fedcli.runs.schema import Record
from fedcli.userfiles import short_name

TABLES_FOLDER = Path("runs/tables")  # of all tables' runs, unless another folder is given
IN_TEXT = "in-text"  # in papers/reported.json: numbers outside tables
NO_LIMITS: Mapping[str, int | None] = MappingProxyType({})
PARTITION_OPTIONS = ("partition", "partition_seed", "validation", "local_test")  # of images among clients


@dataclass(frozen=True)
class PlannedRun:
    """A run that a plan needs."""

    label: str  # what it is called on a terminal: row and column of the first cell that needs it, or a grid's values
    method: str  # its name, or the path of its file
    given: GivenOptions  # with which it is run, the seed among them
    setup: Setup  # the same, resolved
    settings: Settings  # of the record that it will have
    folder: Path  # where it is, or will be
    # The options by which it is smaller than its table's cell, or on another data set; none in a grid.
    reduced: dict[str, Any] = field(default_factory=dict)
    record: Record | None = None  # None before it has begun

    def with_seed(self, seed: int) -> "PlannedRun":
        """The same run with another seed, which is no part of its settings, in a folder beside it."""
        return replace(
            self,
            given=self.given.with_values({"seed": seed}),
            setup=self.setup.with_seed(seed),
            folder=self.folder.with_name(f"seed-{seed}"),
        )

    @property
    def state(self) -> str:
        """One of `fedcli.runs.record.RUN_STATES`."""
        return "not run" if self.record is None else state_of(self.record)

    @property
    def to_do(self) -> bool:
        """Whether it has not ended; a run that has diverged would diverge again."""
        return self.state not in ENDED

    @property
    def outdated(self) -> bool:
        """Whether today's code would not repeat it."""
        if self.record is None:
            return False
        config = {**self.record["config"], "backbone": self.setup.config.backbone}  # where the user's file is now
        return outdated({**self.record, "config": config}, self.setup.method)

    @property
    def rounds_done(self) -> int:
        """Rounds in its record."""
        return len(self.record["rounds"]) if self.record else 0


@dataclass(frozen=True)
class Plan:
    """Runs as they stand."""

    folder: Path  # of new runs
    runs: tuple[PlannedRun, ...]  # each once

    @property
    def missing_data(self) -> dict[str, str]:
        """The data sets that this machine lacks, and how to get them."""
        needed: set[str] = set()
        for run in self.runs:
            if run.to_do:
                needed.update(run.setup.data_sets)
        lacking = {}
        for name in sorted(needed):
            try:
                datasets.refuse_unavailable(name)
            except UserError as error:
                lacking[name] = str(error)
        return lacking

    @property
    def to_run(self) -> list[PlannedRun]:
        """The runs to do whose data are there, begun ones first."""
        lacking = self.missing_data.keys()
        startable = [run for run in self.runs if run.to_do and lacking.isdisjoint(run.setup.data_sets)]
        return sorted(startable, key=lambda run: run.record is None)

    def may_start(self, run: PlannedRun, active: Collection[PlannedRun]) -> bool:
        """Whether a run may start beside those that go on."""
        return True

    def accuracy_text(self, record: Record) -> str:
        """What is shown of a run that has finished."""
        return f"test {100 * record['summary']['selected']:.2f} %"


@dataclass(frozen=True)
class PlannedCell:
    """A cell of a table with its runs, one for each seed."""

    cell: Cell
    metric: Metric
    runs: tuple[PlannedRun, ...]

    @property
    def records(self) -> list[Record]:
        """The records of the runs that have begun."""
        return [run.record for run in self.runs if run.record is not None]


@dataclass(frozen=True)
class TablePlan(Plan):
    """A table, or a part of it, as it stands."""

    table: Table  # the whole table
    cells: tuple[PlannedCell, ...]  # of the part
    seeds: tuple[int, ...]  # of each cell
    reduction: str  # what makes runs smaller, in words; empty in full

    @property
    def title(self) -> str:
        """Its name in the paper, ours for numbers in the text, and what it shows."""
        paper, name = self.table.reported
        if name == IN_TEXT:
            _, name = self.table.name.split(":")
        return f"{paper}, {name}: {self.table.title}"


def table_folder(table: Table) -> Path:
    """The folder of a table's runs, unless another is given."""
    return TABLES_FOLDER / table.name.replace(":", "-")


def plan_table(
    table: Table, folder: Path | None = None, *, seeds: Sequence[int] | None = None, only: Sequence[str] = (),
    limits: Mapping[str, int | None] = NO_LIMITS, dataset: str | None = None,
) -> TablePlan:  # fmt: skip
    """The runs that a table needs and their records; nothing is run and no data set is read.

    Args:
        table: The table.
        folder: Of its runs. If not given, `runs/tables/<paper>-<ID>`; then ended runs elsewhere in `runs/tables` and
            shipped ones count, too.
        seeds: In place of the table's own.
        only: Names of rows and columns, or parts of such, in any case; a whole name means that one alone. A cell needs
            a named row, if there is any, and a named column, if there is any.
        limits: Largest number of rounds, local epochs and training images, by option.
        dataset: In place of each cell's, under the paper's protocol for it.

    Raises:
        UserError: If `only` leaves nothing, or a seed or a limit is out of range.
    """
    folders = [table_folder(table), TABLES_FOLDER, *shipped_folders()] if folder is None else [folder]
    (folder, *_) = folders
    seeds = check_seeds(table.seeds if seeds is None else seeds)
    cells = []
    reduced: dict[str, Any] = {}
    first_seed, *other_seeds = seeds
    for cell in _selected_cells(table, only):
        first_run = plan_cell(table, cell, first_seed, folder, limits, dataset)
        reduced |= first_run.reduced
        other_runs = [first_run.with_seed(seed) for seed in other_seeds]
        cells.append(PlannedCell(cell, find_metric(cell.metric), (first_run, *other_runs)))
    begun = _find_begun_runs(cells, folders)
    runs = {}  # by the folder of a new one
    for folder_if_new, run in _runs_of(cells).items():
        runs[folder_if_new] = _as_begun(run, begun.get(folder_if_new))
    cells_with_records = []
    for planned_cell in cells:
        shared = tuple(runs[run.folder] for run in planned_cell.runs)
        cells_with_records.append(replace(planned_cell, runs=shared))
    return TablePlan(
        folder,
        tuple(runs.values()),
        table=table,
        cells=tuple(cells_with_records),
        seeds=tuple(seeds),
        reduction=_reduction_text(reduced),
    )


def _runs_of(cells: Iterable[PlannedCell]) -> dict[Path, PlannedRun]:
    """The runs that cells need, by the folder of a new one; of a run that several need, the first cell's."""
    runs: dict[Path, PlannedRun] = {}
    for planned_cell in cells:
        for run in planned_cell.runs:
            runs.setdefault(run.folder, run)
    return runs


def _find_begun_runs(cells: Iterable[PlannedCell], folders: Sequence[Path]) -> dict[Path, RunRow]:
    """The runs that have begun, by the folder that a new one would have.

    In the first of these folders all runs count, in the others those that have ended.
    """
    needed_rounds: dict[Path, set[str]] = {}
    for planned_cell in cells:
        for run in planned_cell.runs:
            needed_rounds.setdefault(run.folder, set()).add(planned_cell.metric.needed_rounds)
    (own_folder, *_) = folders
    countable = []
    for row in rows_of(read_runs(folders)):
        assert row.folder is not None  # the records have been read from files
        if row.state in ENDED or row.folder.is_relative_to(own_folder):
            countable.append(row)
    begun = {}
    for folder_if_new, run in _runs_of(cells).items():
        matching = _matching_rows(run, countable, needed_rounds[folder_if_new])
        if matching:
            begun[folder_if_new] = max(matching, key=_progress)
    return begun


def _as_begun(run: PlannedRun, row: RunRow | None) -> PlannedRun:
    """A planned run with the folder and the record of the row; without a row, as it is."""
    if row is None:
        return run
    assert row.folder is not None
    return replace(run, folder=row.folder, record=row.record)


class Progress(NamedTuple):
    """How far a run has come; the one to take is the largest."""

    has_ended: bool
    num_rounds: int


def _progress(row: RunRow) -> Progress:
    return Progress(row.state in ENDED, len(row.record["rounds"]))


def _reduction_text(reduced: Mapping[str, Any]) -> str:
    """What makes the runs of a table smaller, in words; empty for nothing."""
    words = [f"at most {reduced[name]:,} {word}" for name, word in SIZES.items() if name in reduced]
    if "dataset" in reduced:
        words.insert(0, reduced["dataset"])
    return ", ".join(words)


def _matching_rows(run: PlannedRun, rows: Iterable[RunRow], needed_rounds: Iterable[str]) -> list[RunRow]:
    """The rows that can stand for a planned run; for `needed_rounds` see `differences_from_plan`."""
    matching = []
    for row in rows:
        if row.method != run.setup.method.name or row.seed != run.setup.config.seed:
            continue
        differing = [differences_from_plan(row.record, row.settings, run.settings, name) for name in needed_rounds]
        if not any(differing):
            matching.append(row)
    return matching


def _selected_cells(table: Table, only: Sequence[str]) -> list[Cell]:
    """The cells in the rows and columns that `only` names."""
    rows = dict.fromkeys(cell.row for cell in table.cells)
    columns = dict.fromkeys(cell.column for cell in table.cells)
    named: set[str] = set()
    for text in only:
        containing = [name for name in (*rows, *columns) if text.lower() in name.lower()]
        if not containing:
            raise UserError(
                f"no row or column of {table.name} has '{text}' in its name; "
                f"rows: {'; '.join(rows)}; columns: {'; '.join(columns)}."
            )
        equal = [name for name in containing if name.lower() == text.lower()]
        named.update(equal or containing)
    selected_rows = rows.keys() & named or rows.keys()
    selected_columns = columns.keys() & named or columns.keys()
    selected = [cell for cell in table.cells if cell.row in selected_rows and cell.column in selected_columns]
    if not selected:
        raise UserError(f"{table.name} has no cell in these rows and columns (got {', '.join(only)}); name others.")
    return selected


def plan_cell(
    table: Table, cell: Cell, seed: int = 0, folder: Path = TABLES_FOLDER, limits: Mapping[str, int | None] = NO_LIMITS,
    dataset: str | None = None,
) -> PlannedRun:  # fmt: skip
    """The run of a cell, without its record; see `plan_table`."""
    method = find_method(cell.method)
    options = {**cell.settings, "seed": seed}
    reduced: dict[str, Any] = {}
    try:
        if dataset is not None:
            options = _on_other_data(method, options, dataset)
            reduced["dataset"] = options["dataset"]
        setup = resolve(method, options, need_data=False)
        sizes = setup.all_options()
        if not sizes["train_examples"]:
            sizes["train_examples"] = num_images(setup.dataset)
        for name, limit in limits.items():
            if is_smaller(name, limit, sizes[name]):
                reduced[name] = limit
        if reduced:
            options |= reduced
            setup = resolve(method, options, need_data=False)
    except UserError as error:
        raise UserError(f"{table.name}, row '{cell.row}', column '{cell.column}': {error}") from error
    # Runs that differ only in the seed share a folder.
    partition = short_name(setup.partition.flag).replace(":", "-").replace("/", "-")
    settings = planned_settings(setup)
    name = f"{method.name}-{short_name(setup.dataset)}-{partition}-{key_of(settings)[:8]}"
    return PlannedRun(
        label=f"{cell.row}, {cell.column}",
        method=cell.method,
        given=GivenOptions(options),
        setup=setup,
        settings=settings,
        folder=folder / name / f"seed-{seed}",
        reduced=reduced,
    )


def _on_other_data(method: Method, options: Mapping[str, Any], dataset: str) -> dict[str, Any]:
    """The options of a cell on another data set: those of the paper's protocol for it, with the cell's division."""
    dataset = import_if_path(dataset)
    protocol = find_protocol(options["protocol"], method)
    if dataset in protocol.datasets:
        return {**options, "dataset": dataset}
    protocols_of_paper = [other for other in protocols().values() if other.paper == protocol.paper]
    suited = [other for other in protocols_of_paper if dataset in other.datasets]
    if not suited:
        names = ", ".join(dict.fromkeys(name for other in protocols_of_paper for name in other.datasets))
        raise UserError(f"no protocol of '{protocol.paper}' is for '{dataset}'; it has {names}.")
    (new_protocol, *_) = suited
    resolved = {**protocol.settings, **protocol.datasets[options["dataset"]].settings, **options}
    partition_options = {name: resolved[name] for name in PARTITION_OPTIONS if name in resolved}
    replaced = {*new_protocol.settings, "backbone"}
    remaining = {name: value for name, value in options.items() if name not in replaced}
    return {**remaining, **partition_options, "protocol": new_protocol.name, "dataset": dataset}


def protocols_text(runs: Iterable[PlannedRun]) -> str:
    """Says which methods of a comparison run under which protocol, where these differ; empty where they do not."""
    protocols_by_method: dict[str, dict[str, None]] = {}
    for run in runs:
        protocols_by_method.setdefault(run.setup.method.name, {})[run.setup.protocol.name] = None
    methods_by_protocols: dict[str, list[str]] = {}
    for method, names in protocols_by_method.items():
        methods_by_protocols.setdefault(", ".join(names), []).append(method)
    if len(methods_by_protocols) < 2:
        return ""
    parts = "; ".join(f"{names}: {', '.join(methods)}" for names, methods in methods_by_protocols.items())
    most_common = max(methods_by_protocols, key=lambda names: len(methods_by_protocols[names]))
    return (
        f"these methods have different protocols, so that clients and training differ too ({parts}); give all of them "
        f"one, such as --protocol={most_common}"
    )
