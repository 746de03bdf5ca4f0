"""Planned runs, and those of a paper's table: which there are, and which are to do.

A table finds its runs by their settings in any folder, also those of other tables and those made by hand.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from fedcli.data import datasets
from fedcli.data.datasets import num_images
from fedcli.data.imports import import_if_path
from fedcli.declarations import Cell, Method, Table
from fedcli.errors import UserError
from fedcli.registry import find_method, find_protocol, protocols
from fedcli.results.metrics import Metric, find_metric
from fedcli.results.run_records import ReadRun, find_shipped_folders, read_runs
from fedcli.runs.begin import check_seeds, read_begun
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
from fedcli.runs.record import ENDED, outcome_of
from fedcli.runs.resolve import Setup, resolve
from fedcli.runs.schema import Record
from fedcli.runs.sources import list_tuned_methods, read_tuned
from fedcli.userfiles import short_name

TABLES_FOLDER = Path("runs/tables")  # of all tables' runs, unless another folder is given
IN_TEXT = "in-text"  # in papers/reported.json: numbers outside tables
NO_LIMITS: Mapping[str, int | None] = MappingProxyType({})
PARTITION_OPTIONS = ("partition", "partition_seed", "validation", "local_test")  # of images among clients


@dataclass(frozen=True)
class PlannedRun:
    """A run that a plan needs.

    Attributes:
        title: What the run is called on a terminal: the row and the column of the first cell that needs it, or the
            values of a grid.
        method_source: The name of the method, or the path of the method's file.
        given: The options with which the run is made, the seed among them.
        setup: The same options, resolved.
        settings: The settings of the record that the run will have.
        folder: The folder of the run, which may not be there yet.
        reduced: The options by which the run is smaller than its cell of a table, or on another data set; empty in a
            grid.
        record: The record; None if the run has not begun.
    """

    title: str
    method_source: str
    given: GivenOptions
    setup: Setup
    settings: Settings
    folder: Path
    reduced: dict[str, Any] = field(default_factory=dict)
    record: Record | None = None

    def with_seed(self, seed: int) -> "PlannedRun":
        """Returns the same run with another seed, which is no part of its settings, in a folder beside this one."""
        return replace(
            self,
            given=self.given.with_typed({"seed": seed}),
            setup=self.setup.with_seed(seed),
            folder=self.folder.with_name(f"seed-{seed}"),
        )

    @property
    def outcome(self) -> str:
        """The outcome, one of `fedcli.runs.record.RUN_OUTCOMES`."""
        return "not run" if self.record is None else outcome_of(self.record)

    @property
    def needs_running(self) -> bool:
        """Whether the run has not ended; a run that has diverged has ended, since it would diverge again."""
        return self.outcome not in ENDED

    @property
    def is_outdated(self) -> bool:
        """Whether today's code would not repeat the run, so that its record is of older code."""
        if self.record is None:
            return False
        config = {**self.record["config"], "backbone": self.setup.config.backbone}  # where the user's file is now
        return outdated({**self.record, "config": config}, self.setup.method)

    @property
    def rounds_done(self) -> int:
        """The number of rounds in the record."""
        return len(self.record["rounds"]) if self.record else 0


AnyRun = TypeVar("AnyRun", bound=PlannedRun)


def read_new_records(runs: Iterable[AnyRun]) -> list[AnyRun]:
    """Reads the records of runs anew; returns the runs with the records that they have now."""
    return [replace(run, record=read_begun(run.folder)) for run in runs]


@dataclass(frozen=True)
class Plan:
    """The runs that are needed for something, with the records that there are.

    Attributes:
        folder: The folder of new runs.
        runs: The runs, each once.
    """

    folder: Path
    runs: tuple[PlannedRun, ...]

    @property
    def missing_data(self) -> dict[str, str]:
        """For each data set that this machine lacks, how to get it, by the name of the data set."""
        needed: set[str] = set()
        for run in self.runs:
            if run.needs_running:
                needed.update(run.setup.data_sets)
        lacking = {}
        for name in sorted(needed):
            try:
                datasets.refuse_unavailable(name)
            except UserError as error:
                lacking[name] = str(error)
        return lacking

    @property
    def startable_runs(self) -> list[PlannedRun]:
        """The runs that need running and whose data are there; those that have begun come first."""
        lacking = self.missing_data.keys()
        startable = [run for run in self.runs if run.needs_running and lacking.isdisjoint(run.setup.data_sets)]
        return sorted(startable, key=lambda run: run.record is None)

    def may_start(self, run: PlannedRun, active: Collection[PlannedRun]) -> bool:
        """Returns whether a run may start beside the `active` ones; it is asked again after one of these has ended.

        Here any run may; a subclass may hold back a run. One that is held back while none is active stays as it is,
        which is no error.
        """
        return True

    def format_accuracy(self, record: Record) -> str:
        """Formats the accuracy that is shown of a run that has finished."""
        return f"test {100 * record['summary']['selected']:.2f} %"


class Place(NamedTuple):
    """The row and the column of a cell of a table, which no two cells share."""

    row: str
    column: str

    @classmethod
    def of(cls, cell: Cell) -> "Place":
        """Returns the place of a cell."""
        return cls(cell.row, cell.column)


@dataclass(frozen=True)
class PlannedCell:
    """A cell of a table with its runs, one for each seed."""

    cell: Cell
    metric: Metric
    runs: tuple[PlannedRun, ...]

    @property
    def place(self) -> Place:
        """The place of the cell in its table."""
        return Place.of(self.cell)

    @property
    def records(self) -> list[Record]:
        """The records of the runs that have begun."""
        return [run.record for run in self.runs if run.record is not None]


@dataclass(frozen=True)
class TablePlan(Plan):
    """The runs that a table, or a part of it, needs.

    Attributes:
        table: The whole table.
        cells: The cells of the part.
        seeds: The seeds of each cell.
        reduction: What makes the runs smaller than the paper's, in words; empty if they are run in full.
    """

    table: Table
    cells: tuple[PlannedCell, ...]
    seeds: tuple[int, ...]
    reduction: str

    @property
    def title(self) -> str:
        """The name of the table in the paper, or ours for numbers in the text, and what it shows."""
        paper = self.table.reported_paper
        name = self.table.reported_table
        if name == IN_TEXT:
            _, name = self.table.name.split(":")
        return f"{paper}, {name}: {self.table.title}"


def find_table_folder(table: Table) -> Path:
    """Returns the folder of a table's runs for which no folder is given."""
    return TABLES_FOLDER / table.name.replace(":", "-")


def plan_table(
    table: Table, folder: Path | None = None, *, seeds: Sequence[int] | None = None, only: Sequence[str] = (),
    limits: Mapping[str, int | None] = NO_LIMITS, dataset: str | None = None, tuned: str | None = None,
) -> TablePlan:  # fmt: skip
    """Plans the runs that a table needs, and finds their records; nothing is run and no data set is read.

    Args:
        table: The table.
        folder: The folder of the runs. If None, it is `runs/tables/<paper>-<ID>`; then ended runs elsewhere in
            `runs/tables` and shipped runs count, too.
        seeds: The seeds of each cell; if None, those of the table.
        only: Names of rows and columns, or parts of names, in any case; a whole name means that row or column alone. If
            rows are named, a cell must be in one of them, and likewise for columns.
        limits: The largest numbers of rounds, local epochs and training images, by option.
        dataset: A data set in the place of each cell's, under the paper's protocol for it; None for the cells' own.
        tuned: What `fedcli tune` has written, which counts for the options of its methods that no cell names.

    Raises:
        UserError: If `only` leaves nothing, a seed or a limit is out of range, or `tuned` has no method of the cells.
    """
    own_folder = find_table_folder(table) if folder is None else folder
    search_folders = [own_folder]
    if folder is None:
        search_folders += [TABLES_FOLDER, *find_shipped_folders()]
    seeds = check_seeds(table.seeds if seeds is None else seeds)
    selected = _select_cells(table, only)
    tuned_methods = set() if tuned is None else _find_tuned_methods(selected, tuned)
    planned_cells = []  # without records, as if nothing had begun
    for cell in selected:
        tuned_of_cell = tuned if cell.method in tuned_methods else None
        first_run = plan_cell(table, cell, seeds[0], own_folder, limits, dataset, tuned_of_cell)
        new_runs = tuple(first_run.with_seed(seed) for seed in seeds)
        planned_cells.append(PlannedCell(cell, find_metric(cell.metric), new_runs))
    runs = _attach_records(planned_cells, own_folder, search_folders)
    cells = []
    for planned_cell in planned_cells:
        runs_of_cell = tuple(runs[new_run.folder] for new_run in planned_cell.runs)
        cells.append(replace(planned_cell, runs=runs_of_cell))
    return TablePlan(
        own_folder,
        tuple(runs.values()),
        table=table,
        cells=tuple(cells),
        seeds=tuple(seeds),
        reduction=_describe_reduction(planned_cells),
    )


def _find_tuned_methods(cells: Sequence[Cell], tuned: str) -> set[str]:
    """Finds the methods of cells, as the cells name them, for which `fedcli tune` has chosen options."""
    tuned_methods = list_tuned_methods(tuned)
    of_cells = {cell.method for cell in cells if find_method(cell.method).name in tuned_methods}
    if not of_cells:
        raise UserError(
            f"--tuned {tuned} has options of {', '.join(sorted(tuned_methods))}, none of which is here; tune another "
            "method, or leave it out."
        )
    return of_cells


def _attach_records(
    planned_cells: Iterable[PlannedCell], own_folder: Path, search_folders: Iterable[Path]
) -> dict[Path, PlannedRun]:
    """Finds the folder and the record of what has begun of the runs that cells need.

    In the table's own folder all runs count, in other folders those that have ended.

    Returns:
        The runs, each once, by the folder that a new run would have. A run that several cells need is that of the
        first cell.
    """
    new_runs: dict[Path, PlannedRun] = {}
    needed_rounds: dict[Path, set[str]] = {}
    for planned_cell in planned_cells:
        for new_run in planned_cell.runs:
            new_runs.setdefault(new_run.folder, new_run)
            needed_rounds.setdefault(new_run.folder, set()).add(planned_cell.metric.kind.needed_rounds)
    countable = []
    for run in read_runs(search_folders):
        if run.outcome in ENDED or run.folder.is_relative_to(own_folder):
            countable.append(run)
    runs = {}
    for new_folder, new_run in new_runs.items():
        matching = _find_matching_runs(new_run, countable, needed_rounds[new_folder])
        if matching:
            furthest = max(matching, key=_measure_progress)
            runs[new_folder] = replace(new_run, folder=furthest.folder, record=furthest.record)
        else:
            runs[new_folder] = new_run
    return runs


class _Progress(NamedTuple):
    """How far a run has come; the furthest run has the largest tuple."""

    has_ended: bool
    num_rounds: int


def _measure_progress(run: ReadRun) -> _Progress:
    return _Progress(run.outcome in ENDED, len(run.record["rounds"]))


def _describe_reduction(cells: Iterable[PlannedCell]) -> str:
    """Describes what makes the runs of cells smaller than the paper's; returns an empty text if nothing does."""
    reduced: dict[str, Any] = {}
    for cell in cells:
        reduced |= cell.runs[0].reduced
    words = [f"at most {reduced[name]:,} {word}" for name, word in SIZES.items() if name in reduced]
    if "dataset" in reduced:
        words.insert(0, reduced["dataset"])
    return ", ".join(words)


def _find_matching_runs(planned: PlannedRun, runs: Iterable[ReadRun], needed_rounds: Iterable[str]) -> list[ReadRun]:
    """Finds the recorded runs that can stand for a planned run; for `needed_rounds` see `differences_from_plan`."""
    matching = []
    for run in runs:
        if run.method != planned.setup.method.name or run.seed != planned.setup.config.seed:
            continue
        differing = [differences_from_plan(run.record, run.settings, planned.settings, name) for name in needed_rounds]
        if not any(differing):
            matching.append(run)
    return matching


def _select_cells(table: Table, only: Sequence[str]) -> list[Cell]:
    """Selects the cells in the rows and columns that `only` names, see `plan_table`."""
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
    dataset: str | None = None, tuned: str | None = None,
) -> PlannedRun:  # fmt: skip
    """Plans the run of a cell with one seed, without looking for its record; for the arguments see `plan_table`."""
    method = find_method(cell.method)
    options = {**cell.settings, "seed": seed}
    reduced: dict[str, Any] = {}
    sources: dict[str, str] = {}  # of options that the cell does not name
    try:
        if dataset is not None:
            options = _move_to_other_data(method, options, dataset)
            if options["dataset"] != cell.settings["dataset"]:
                reduced["dataset"] = options["dataset"]
        if tuned is not None:
            tuning = read_tuned(tuned, method, options.keys())
            sources = dict.fromkeys(tuning.options.keys() - options.keys(), tuning.source)
            options = {**tuning.options, **options}
        setup = resolve(method, options, sources=sources, need_data=False)
        sizes = setup.all_options()
        if not sizes["train_examples"]:
            sizes["train_examples"] = num_images(setup.dataset)
        for name, limit in limits.items():
            if is_smaller(name, limit, sizes[name]):
                reduced[name] = limit
        if reduced:
            options |= reduced
            setup = resolve(method, options, sources=sources, need_data=False)
    except UserError as error:
        raise UserError(f"{table.name}, row '{cell.row}', column '{cell.column}': {error}") from error
    settings = planned_settings(setup)
    return PlannedRun(
        title=f"{cell.row}, {cell.column}",
        method_source=cell.method,
        given=GivenOptions(options, sources),
        setup=setup,
        settings=settings,
        folder=folder / make_folder_name(setup, settings) / f"seed-{seed}",
        reduced=reduced,
    )


def make_folder_name(setup: Setup, settings: Settings) -> str:
    """Makes the name of the folder that runs share which differ only in the seed."""
    partition = short_name(setup.partition.flag).replace(":", "-").replace("/", "-")
    return f"{setup.method.name}-{short_name(setup.dataset)}-{partition}-{key_of(settings)[:8]}"


def _move_to_other_data(method: Method, options: Mapping[str, Any], dataset: str) -> dict[str, Any]:
    """Moves the options of a cell to another data set: to the paper's protocol for it, with the cell's partition."""
    dataset = import_if_path(dataset)
    protocol = find_protocol(options["protocol"], method)
    if dataset in protocol.datasets:
        return {**options, "dataset": dataset}
    protocols_of_paper = [other for other in protocols().values() if other.paper == protocol.paper]
    suited = [other for other in protocols_of_paper if dataset in other.datasets]
    if not suited:
        names = ", ".join(dict.fromkeys(name for other in protocols_of_paper for name in other.datasets))
        raise UserError(f"no protocol of '{protocol.paper}' is for '{dataset}'; it has {names}.")
    new_protocol = suited[0]
    options_in_cell = {**protocol.settings, **protocol.datasets[options["dataset"]].settings, **options}
    partition = {name: options_in_cell[name] for name in PARTITION_OPTIONS if name in options_in_cell}
    protocols_choice = {*new_protocol.settings, "backbone"}
    others = {name: value for name, value in options.items() if name not in protocols_choice}
    data = {"protocol": new_protocol.name, "dataset": dataset}
    # The new protocol wins over the cell's own options, and the cell's division over the new protocol's.
    return {**others, **partition, **data}
