"""A paper's table as runs: which it needs, what is there of them, and what the rest costs.

A run is known by what it was run with, wherever it lies, so that a table goes on where it was interrupted, shares runs
with other tables, and takes in runs that were made by hand.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from fedcli.data import datasets
from fedcli.declarations import Cell, Table, check_value
from fedcli.errors import UserError
from fedcli.registry import find_method
from fedcli.results.metrics import Metric, diverged, find_metric
from fedcli.results.tables import NOT_IN_IDENTITY
from fedcli.runs import models
from fedcli.runs.config import RunConfig, Setup, recorded_fields, recorded_value, resolve
from fedcli.runs.records import RECORD, checkout, environment, outdated, quiet, read_record
from fedcli.runs.run import check_seeds
from fedcli.userfiles import is_from_file, short_name

HOME = Path("runs/tables")  # of the runs of all tables, unless another folder is given
IN_TEXT = "in-text"  # in papers/reported.json: the numbers that stand in no table
STATES = ("finished", "diverged", "failed", "unfinished", "not run")
ENDED = STATES[:2]
ALIKE = 4  # traits that a timed run must share with one whose time it tells, see `_traits`
LIMITS = {"rounds": "rounds", "local_epochs": "local epochs", "train_examples": "training images"}


@dataclass(frozen=True)
class PlannedRun:
    """A run that a table needs.

    Attributes:
        label: Row and column of the first cell that needs it.
        method: Its name, or the path of its file.
        given: The options that it is run with, the seed among them.
        setup: The same, resolved.
        limits: What makes it smaller than the table says, by option.
        folder: Where it is, or will be.
        record: What there is of it; None before it has begun.
    """

    label: str
    method: str
    given: dict[str, Any]
    setup: Setup
    limits: dict[str, int]
    folder: Path
    record: dict[str, Any] | None

    @property
    def state(self) -> str:
        """One of `STATES`."""
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

    @property
    def data(self) -> tuple[str, ...]:
        """The data sets that it reads."""
        return tuple(filter(None, (self.setup.run.dataset, self.setup.run.public_dataset)))

    @property
    def round_work(self) -> float:
        """Examples that are trained on in a round, all clients and local epochs together."""
        return round_examples(self.setup.values()) or 1.0


@dataclass(frozen=True)
class PlannedCell:
    """A cell of a table with the runs, one for each seed, that it is read from."""

    cell: Cell
    metric: Metric
    runs: tuple[PlannedRun, ...]


@dataclass(frozen=True)
class TablePlan:
    """A table, or the part of it that was asked for, as it stands.

    Attributes:
        table: The whole table.
        cells: The cells that were asked for.
        runs: Their runs; each stands there once.
        seeds: Seeds of each cell.
        limits: Those that make a run smaller, by option.
        folder: Where new runs are put, and those that were interrupted go on.
        search: Where finished runs are looked for too.
        damaged: What is wrong with the records there that cannot be read; their runs are made anew elsewhere.
    """

    table: Table
    cells: tuple[PlannedCell, ...]
    runs: tuple[PlannedRun, ...]
    seeds: tuple[int, ...]
    limits: dict[str, int]
    folder: Path
    search: tuple[Path, ...]
    damaged: tuple[str, ...] = ()

    @property
    def reduction(self) -> str:
        """The limits in words; empty where there are none."""
        return ", ".join(f"at most {limit:,} {LIMITS[name]}" for name, limit in self.limits.items())

    @property
    def title(self) -> str:
        """The table in the paper, and what it shows; of a figure there are only numbers in the text."""
        paper, place = self.table.reported
        return f"{paper}, {self.table.name.split(':')[1] if place == IN_TEXT else place}: {self.table.title}"

    @property
    def missing_data(self) -> dict[str, str]:
        """The data sets of runs to do that are not on this machine, with what to do about it."""
        needed = sorted({name for run in self.runs if run.to_do for name in run.data})
        return {name: lack for name in needed if (lack := _lack(name))}

    @property
    def to_run(self) -> list[PlannedRun]:
        """The runs to do whose data sets are there, those that have begun first."""
        missing = self.missing_data.keys()
        can = [run for run in self.runs if run.to_do and missing.isdisjoint(run.data)]
        return sorted(can, key=lambda run: run.record is None)


def home_of(table: Table) -> Path:
    """Where the runs of a table are kept, unless another folder is given."""
    return HOME / table.name.replace(":", "-")


def plan(
    table: Table,
    folder: Path | None = None,
    *,
    seeds: Sequence[int] | None = None,
    only: Sequence[str] = (),
    limits: Mapping[str, int] | None = None,
) -> TablePlan:
    """What a table needs and what is there of it; nothing is run and no data set is read.

    Args:
        table: The table.
        folder: Where its runs are; where not given, `runs/tables/<paper>-<ID>`, and the finished runs of other tables
            in `runs/tables` count too, and those that the checkout ships.
        seeds: In place of the table's own.
        only: Names of rows or columns or parts of such, whatever the case; what is a whole name means that name
            alone. A cell stays if its row is among the rows that are named, should any be, and its column among the
            columns.
        limits: Largest number of rounds, local epochs and training images, by option.

    Raises:
        UserError: If `only` leaves nothing, or a seed or a limit is out of range.
    """
    search = (HOME, *shipped()) if folder is None else ()
    folder = folder or home_of(table)
    seeds = tuple(check_seeds(table.seeds if seeds is None else seeds))
    limits = {name: limit for name, limit in (limits or {}).items() if limit is not None}
    for name, limit in limits.items():
        check_value(RunConfig.__dataclass_fields__[name], limit)
    planned: dict[Path, PlannedRun] = {}
    metrics: dict[Path, list[Metric]] = {}
    places: list[tuple[Cell, list[Path]]] = []
    for cell in _chosen(table, only):
        its_runs = [_planned_run(table, cell, seed, limits, folder) for seed in seeds]
        for run in its_runs:
            planned.setdefault(run.folder, run)
            metrics.setdefault(run.folder, []).append(find_metric(cell.metric))
        places.append((cell, [run.folder for run in its_runs]))
    records, damaged = all_runs([folder, *search])
    runs = {place: _with_record(run, metrics[place], folder, records) for place, run in planned.items()}
    cells = [PlannedCell(cell, find_metric(cell.metric), tuple(map(runs.get, its))) for cell, its in places]
    used = {name: limit for run in planned.values() for name, limit in run.limits.items()}
    return TablePlan(table, tuple(cells), tuple(runs.values()), seeds, used, folder, search, damaged)


class Pace(NamedTuple):
    """How fast a timed run was, and what tells how near it is to another, see `_traits`."""

    train: float  # seconds of a round but for its test, for each example that is trained on
    test: float  # seconds of the test after a round
    traits: tuple


def _traits(config: Mapping[str, Any], method: str, shape: Iterable[int], machine: tuple[str, str]) -> tuple:
    """What the time of a run depends on: `ALIKE` traits that two runs must share, then the others by their weight."""
    device, name = machine
    return (
        device, config["backbone"], tuple(shape), config["precision"],
        name, config["dataset"], config["batch_size"], method,
    )  # fmt: skip


def round_examples(config: Mapping[str, Any]) -> float | None:
    """Examples that the local steps of a round take, of all clients; None where the data set's size is not known."""
    examples = config["train_examples"] or train_size(config["dataset"])
    return examples and config["cohort_size"] / config["num_clients"] * config["local_epochs"] * examples


def paces(folders: Iterable[Path], planned: Iterable[str], disturbed: bool = False) -> list[Pace]:
    """Measures the quiet runs under folders.

    Args:
        folders: Where they are looked for.
        planned: The data sets of runs to do; a file that only a record names is not run for its size.
        disturbed: Measure the others, too: what they took is the most that such a run takes.
    """
    planned, timed = set(planned), []
    for _, record in itertools.chain(*all_runs(folders)[0].values()):
        config, shape, hardware = record["config"], record["model"].get("input"), record["hardware"]
        if not record["rounds"] or shape is None or "moved" in record or not (disturbed or quiet(record)):
            continue
        if is_from_file(config["dataset"]) and config["dataset"] not in planned:
            continue
        if examples := round_examples(config):
            test = fmean(entry["seconds"]["evaluate"] for entry in record["rounds"])
            train = fmean(sum(entry["seconds"].values()) for entry in record["rounds"]) - test
            traits = _traits(config, record["method"], shape, (hardware["device"], hardware["name"]))
            timed.append(Pace(train / examples, test, traits))
    return timed


def seconds_a_round(setup: Setup, timed: Sequence[Pace], machine: tuple[str, str]) -> tuple[float, set[str]] | None:
    """Estimates the seconds of a round by the nearest of the runs that were timed, scaled by its local steps.

    Args:
        setup: The run.
        timed: See `paces`.
        machine: Kind and name of what the run would use.

    Returns:
        The seconds, and the names of the machines that they were measured on; None where no run is like this one.
    """
    config = setup.values()
    examples = round_examples(config)
    if not timed or examples is None:
        return None
    traits = _traits(config, setup.method.name, datasets.describe(setup.run.dataset)["shape"], machine)
    likeness = [[mine == other for mine, other in zip(traits, pace.traits, strict=True)] for pace in timed]
    nearest = [pace for pace, shared in zip(timed, likeness, strict=True) if shared == max(likeness)]
    if not all(max(likeness)[:ALIKE]):
        return None
    return median(pace.train * examples + pace.test for pace in nearest), {pace.traits[ALIKE] for pace in nearest}


@dataclass
class Cost:
    """What is known of the time of runs to do.

    Attributes:
        runs: How many they are.
        known: Of how many the seconds are known.
        seconds: Of these, one after the other.
        by: Where the timed runs ran, of those that are not of this machine: "timed on <machine>".
    """

    runs: int = 0
    known: int = 0
    seconds: float = 0.0
    by: set[str] = field(default_factory=set)

    def add(self, setup: Setup, rounds_done: int, timed: Sequence[Pace], machine: tuple[str, str]) -> None:
        """Counts a run to do.

        Args:
            setup: The run.
            rounds_done: Rounds that there are of it.
            timed: See `paces`.
            machine: Kind and name of what it would run on.
        """
        self.runs += 1
        estimated = seconds_a_round(setup, timed, machine)
        if estimated is not None:
            seconds, names = estimated
            self.known += 1
            self.seconds += seconds * (setup.run.rounds - rounds_done)
            self.by |= {f"timed on {name}" for name in names if name != machine[1]}


def estimate(plan: TablePlan) -> dict[str, Cost]:
    """Estimates seconds that the runs to do take, by the runs where the table looks for runs, and the shipped ones.

    Returns:
        By column, also for runs whose data set is missing; a run of several columns counts in the first.
    """
    columns = {run.folder: cell.cell.column for cell in reversed(plan.cells) for run in cell.runs if run.to_do}
    if not columns:
        return {}
    hardware = environment(plan.runs[0].setup.device)["hardware"]
    timed = paces([plan.folder, *plan.search, *shipped()], {run.setup.run.dataset for run in plan.runs})
    costs: dict[str, Cost] = {}
    for run in plan.runs:
        if run.to_do:
            cost = costs.setdefault(columns[run.folder], Cost())
            cost.add(run.setup, run.rounds_done, timed, (hardware["device"], hardware["name"]))
    return costs


def bytes_kept(plan: TablePlan) -> int:
    """Bytes of the models that the runs to do leave, at least; those of a data set of unknown classes are left out."""
    total = 0
    for run in (run for run in plan.runs if run.to_do):
        with suppress(UserError):  # of a damaged file, which the run will refuse
            about = datasets.describe(run.setup.run.dataset)
            if about["classes"] is not None:
                total += models.bytes_kept(run.setup, *about["shape"][:2], about["classes"])
    return total


def _lack(dataset: str) -> str:
    """Why a data set cannot be used; empty where it can."""
    try:
        datasets.available(dataset)
    except UserError as error:
        return str(error)
    return ""


def _chosen(table: Table, only: Sequence[str]) -> list[Cell]:
    """The cells of the rows and columns that `only` names."""
    rows, columns = {cell.row for cell in table.cells}, {cell.column for cell in table.cells}
    meant: set[str] = set()
    for text in only:
        whole = {name for name in rows | columns if name.lower() == text.lower()}
        found = whole or {name for name in rows | columns if text.lower() in name.lower()}
        meant |= found
        if not found:
            raise UserError(
                f"no row or column of {table.name} has '{text}' in its name; "
                f"rows: {'; '.join(dict.fromkeys(cell.row for cell in table.cells))}; "
                f"columns: {'; '.join(dict.fromkeys(cell.column for cell in table.cells))}."
            )
    rows, columns = rows & meant or rows, columns & meant or columns
    chosen = [cell for cell in table.cells if cell.row in rows and cell.column in columns]
    if not chosen:
        raise UserError(f"{table.name} has no cell in these rows and columns (got {', '.join(only)}); name others.")
    return chosen


def _planned_run(table: Table, cell: Cell, seed: int, limits: Mapping[str, int], folder: Path) -> PlannedRun:
    method = find_method(cell.method)
    try:
        given = {**cell.settings, "seed": seed}
        setup = resolve(method, given, need_data=False)
        if lower := _lower(setup, limits):
            given |= lower
            setup = resolve(method, given, need_data=False)
    except UserError as error:
        raise UserError(f"{table.name}, row '{cell.row}', column '{cell.column}': {error}") from error
    place = folder / _folder_name(setup) / f"seed-{seed}"
    return PlannedRun(f"{cell.row}, {cell.column}", cell.method, given, setup, lower, place, None)


def _with_record(run: PlannedRun, metrics: Sequence[Metric], folder: Path, records: dict) -> PlannedRun:
    """The run with the record that has come furthest, if there is one that all its cells can be read from."""
    found = [
        (path, record)
        for path, record in records.get((run.setup.method.name, run.setup.run.seed), ())
        if _is_of(record, run.setup, metrics) and (path.is_relative_to(folder) or state_of(record) in ENDED)
    ]
    if not found:
        return replace(run, folder=_free(run.folder))
    path, record = max(found, key=lambda pair: (state_of(pair[1]) in ENDED, len(pair[1]["rounds"])))
    return replace(run, folder=path, record=record)


def state_of(record: dict[str, Any]) -> str:
    """Which of `STATES` a run is in."""
    if diverged(record):
        return "diverged"
    return record["status"] if record["status"] in ("finished", "failed") else "unfinished"


def _lower(setup: Setup, limits: Mapping[str, int]) -> dict[str, int]:
    """The limits that are below what the run would have."""
    planned = {name: getattr(setup.run, name) for name in limits}
    if planned.get("train_examples", 0) is None:
        planned["train_examples"] = train_size(setup.run.dataset)
    return {name: limit for name, limit in limits.items() if planned[name] is None or limit < planned[name]}


def train_size(dataset: str) -> int | None:
    """Training images of a data set; None where they are not known."""
    try:
        return datasets.describe(dataset)["train"]
    except UserError:
        return None


def _what(setup: Setup) -> dict[str, Any]:
    """All that a run's result depends on, but for the seed."""
    return {name: value for name, value in setup.values().items() if name not in NOT_IN_IDENTITY}


def _folder_name(setup: Setup) -> str:
    """Method, data set, partition and a hash of all settings; runs that differ only in the seed share it."""
    what = {name: value for name, value in _what(setup).items() if setup.origin.get(name) != "seed"}
    digest = hashlib.sha256(json.dumps([setup.selection, what], sort_keys=True).encode()).hexdigest()[:8]
    partition = short_name(str(setup.partition)).replace(":", "-").replace("/", "-")
    return f"{setup.method.name}-{short_name(setup.run.dataset)}-{partition}-{digest}"


def shipped() -> list[Path]:
    """The folder of the records that the checkout ships; none where the package is installed without one."""
    here = checkout()
    return [here / "results" / "records"] if here else []


def _free(place: Path) -> Path:
    """The place of a new run: that one, or beside a damaged record, which stays as it is."""
    others = (place.with_name(f"{place.name}-{count}") for count in itertools.count(2))
    return next(folder for folder in itertools.chain([place], others) if not (folder / RECORD).exists())


def all_runs(folders: Iterable[Path]) -> tuple[dict[tuple[str, int], list[tuple[Path, dict]]], tuple[str, ...]]:
    """The runs under folders with their records, by method and seed, none twice; what is wrong with other records."""
    found: dict[tuple[str, int], list[tuple[Path, dict]]] = {}
    damaged, files = [], {}
    for file in (file for folder in folders for file in sorted(folder.rglob(RECORD))):
        files.setdefault(file.resolve(), file)
    for file in files.values():
        try:
            record = read_record(file)
        except UserError as error:
            damaged.append(str(error))
            continue
        found.setdefault((record["method"], record["seed"]), []).append((file.parent, record))
    return found, tuple(damaged)


def _is_of(record: dict[str, Any], setup: Setup, metrics: Iterable[Metric] = ()) -> bool:
    """Whether a record of the same method and seed is of that set-up, as far as these numbers need it.

    For an option that is newer than the record counts what runs did before. A run with a step after the last round has
    all that the run without it has.
    """
    fields = recorded_fields(setup.method, setup.run.post)
    config = record["config"] if setup.post is not None else {**record["config"], "post": None}
    wanted = {name: value for name, value in _what(setup).items() if name != "eval_every"}
    same = all(recorded_value(config, fields[name]) == value for name, value in wanted.items())
    same = same and config.keys() <= fields.keys() and record["summary"]["selection"] == setup.selection
    return same and all(metric.fits(record, setup.run.eval_every) for metric in metrics)


def is_run_of(record: dict[str, Any], table: Table, cell: Cell) -> bool:
    """Whether a cell of a table can be read from a run of its method, whatever the seed."""
    setup = _planned_run(table, cell, record["seed"], {}, HOME).setup
    return _is_of(record, setup, [find_metric(cell.metric)])
