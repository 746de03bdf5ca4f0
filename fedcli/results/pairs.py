"""The pairs of runs by which a row of a table is compared with another row.

A run can stand for a cell if it has the cell's settings, smaller sizes, or values that the claim allows; what differs
is kept beside it. Two runs are a pair if they share seed, partition, images, numerics of the core, and all options in
which their two cells agree.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import NamedTuple

from fedcli.declarations import Cell, Claim, Table
from fedcli.errors import UserError
from fedcli.results.metrics import Metric, find_metric
from fedcli.results.plans import Place, PlannedRun, plan_cell
from fedcli.results.run_records import ReadRun
from fedcli.runs.identity import Differences, differences, differences_from_plan, is_smaller
from fedcli.runs.options import RunConfig
from fedcli.runs.schema import Record

RunsByMethod = Mapping[str, Sequence[ReadRun]]


class Shared(NamedTuple):
    """What the two runs of a pair have in common.

    Attributes:
        seed: The seed.
        images: The fingerprint of the images.
        partition: The fingerprint of the partition; empty if the two cells have different partitions.
        core: The version of the core's arithmetic.
        options: The options in which the two planned runs agree, as JSON.
    """

    seed: int
    images: str
    partition: str
    core: str
    options: str


@dataclass(frozen=True)
class Candidate:
    """A run that can stand for the run of a cell.

    Attributes:
        shared: What the run must have in common with the other run of a pair.
        conditions: The options that are not as in the cell, as JSON.
        differences_from_cell: The same options, each with its value here and its value in the cell.
        folder: The folder of the run.
        value: The value of the metric, in its unit; None if the run diverged or never reached its target.
        last_tenth: The mean accuracy over the last tenth of the rounds, in percent; None if the run has none.
        measured_rounds: The rounds in which the value was measured, see `Metric.find_measured_rounds`.
    """

    shared: Shared
    conditions: str
    differences_from_cell: Differences
    folder: Path
    value: float | None
    last_tenth: float | None
    measured_rounds: set[str]


@dataclass(frozen=True)
class Contrast:
    """A cell of a claim's row and the cell of another row that it is compared with.

    Attributes:
        other_row: The other row as the claim names it; its cell here may be of a row that stands for it.
        cell: The cell of the claim's row.
        other_cell: The cell of the other row.
        weight: The factor of the cells' difference in that of the claim, which is the mean over its `columns` less the
            mean over its `subtracted_columns`.
    """

    other_row: str
    cell: Cell
    other_cell: Cell
    weight: float


class Conditions(NamedTuple):
    """The options of the two runs of a pair that are not as in their cells, each as JSON, which hashes and orders."""

    run: str
    other_run: str


@dataclass(frozen=True)
class Pair:
    """A run of a claim's row and a run of another row, for one contrast."""

    contrast: Contrast
    run: Candidate
    other_run: Candidate

    @property
    def seed(self) -> int:
        """The seed of both runs."""
        return self.run.shared.seed

    @property
    def conditions(self) -> Conditions:
        """The options of the two runs that are not as in their cells."""
        return Conditions(self.run.conditions, self.other_run.conditions)

    @property
    def differences_from_cells(self) -> Differences:
        """The options of the two runs that are not as in their cells, with both values.

        If both runs differ in an option, the values are those of the claim's row.
        """
        return self.other_run.differences_from_cell | self.run.differences_from_cell

    @property
    def value_difference(self) -> float | None:
        """The value of the claim's row less that of the other row, times the weight of the contrast.

        None if a run has no value.
        """
        return self._weigh_difference(self.run.value, self.other_run.value)

    @property
    def last_tenth_difference(self) -> float | None:
        """The same difference of the mean accuracies over the last tenth of the rounds; None if a run has none."""
        return self._weigh_difference(self.run.last_tenth, self.other_run.last_tenth)

    def _weigh_difference(self, value: float | None, other_value: float | None) -> float | None:
        if value is None or other_value is None:
            return None
        return self.contrast.weight * (value - other_value)


def find_contrasts(claim: Claim, table: Table, other_row: str) -> list[Contrast]:
    """Finds the cells in which a claim's row is compared with another row.

    Raises:
        UserError: If the table does not have such a cell.
    """
    cells = {Place.of(cell): cell for cell in table.cells}

    def find_cell(row: str, column: str) -> Cell:
        name = row if Place(row, column) in cells else claim.row_aliases.get(row, row)
        if Place(name, column) not in cells:
            raise UserError(
                f"the claim {claim.name} names a cell that {claim.table} does not have (got {name} / {column}); "
                "name a row and a column of the table."
            )
        return cells[Place(name, column)]

    contrasts = []
    other_columns = claim.other_columns or claim.columns
    for column, other_column in zip(claim.columns, other_columns, strict=True):
        cell = find_cell(claim.row, column)
        other_cell = find_cell(other_row, other_column)
        contrasts.append(Contrast(other_row, cell, other_cell, weight=1 / len(claim.columns)))
    for column in claim.subtracted_columns:
        cell = find_cell(claim.row, column)
        other_cell = find_cell(other_row, column)
        contrasts.append(Contrast(other_row, cell, other_cell, weight=-1 / len(claim.subtracted_columns)))
    return contrasts


class PlannedContrast(NamedTuple):
    """A contrast with the run that the paper has in each of its cells."""

    contrast: Contrast
    run: PlannedRun
    other_run: PlannedRun


def plan_contrasts(claim: Claim, table: Table) -> dict[str, list[PlannedContrast]]:
    """Plans the runs of all contrasts of a claim; each cell is planned once.

    Returns:
        The contrasts with their runs, by the row that the claim's row is compared with.

    Raises:
        UserError: If the table does not have a cell of the claim.
    """
    runs: dict[Place, PlannedRun] = {}

    def plan_run(cell: Cell) -> PlannedRun:
        place = Place.of(cell)
        if place not in runs:
            runs[place] = plan_cell(table, cell)
        return runs[place]

    by_other_row: dict[str, list[PlannedContrast]] = {}
    for other_row in claim.other_rows:
        by_other_row[other_row] = []
        for contrast in find_contrasts(claim, table, other_row):
            planned = PlannedContrast(contrast, plan_run(contrast.cell), plan_run(contrast.other_cell))
            by_other_row[other_row].append(planned)
    return by_other_row


def find_pairs(claim: Claim, planned_contrasts: Sequence[PlannedContrast], runs: RunsByMethod) -> list[Pair]:
    """Finds the pairs of runs of a claim's row and another row, one pair for each contrast.

    Under the same conditions, a seed counts only if it has a pair for each contrast.

    Args:
        claim: The claim.
        planned_contrasts: The contrasts of the two rows.
        runs: All runs that have ended, by method.
    """
    pairs: list[Pair] = []
    for planned in planned_contrasts:
        pairs += _find_pairs_of_contrast(claim, planned, runs)
    num_contrasts = Counter((pair.conditions, pair.seed) for pair in pairs)
    return [pair for pair in pairs if num_contrasts[pair.conditions, pair.seed] == len(planned_contrasts)]


def _find_pairs_of_contrast(claim: Claim, planned: PlannedContrast, runs: RunsByMethod) -> list[Pair]:
    """Finds the pairs for one contrast: the first one of each seed under the same conditions."""
    contrast = planned.contrast
    differing_options = differences(planned.run.settings, planned.other_run.settings).keys() | {"post"}
    common_options = [field.name for field in fields(RunConfig) if field.name not in differing_options]
    metric = find_metric(contrast.cell.metric)
    other_metric = find_metric(contrast.other_cell.metric)
    other_candidates: dict[Shared, list[Candidate]] = {}
    for candidate in _find_candidates(claim, other_metric, planned.other_run, runs, common_options):
        other_candidates.setdefault(candidate.shared, []).append(candidate)
    first_pairs: dict[tuple[Conditions, int], Pair] = {}
    for candidate in _find_candidates(claim, metric, planned.run, runs, common_options):
        for other_candidate in other_candidates.get(candidate.shared, ()):
            are_comparable = not candidate.measured_rounds.isdisjoint(other_candidate.measured_rounds)
            if are_comparable:
                pair = Pair(contrast, candidate, other_candidate)
                first_pairs.setdefault((pair.conditions, pair.seed), pair)
    return list(first_pairs.values())


def _find_candidates(
    claim: Claim, metric: Metric, planned: PlannedRun, runs: RunsByMethod, common_options: Sequence[str]
) -> list[Candidate]:
    """Finds the runs that can stand for a planned one.

    Args:
        claim: The claim, which may allow other options than those of the cell.
        metric: The metric of the cell.
        planned: The run that the paper has in the cell.
        runs: All runs that have ended, by method.
        common_options: The options whose values the two runs of a pair share.
    """
    have_same_partition = {"partition", "partition_seed"} <= set(common_options)
    candidates = []
    for run in runs.get(planned.setup.method.name, ()):
        record = run.record
        differing = differences_from_plan(record, run.settings, planned.settings, metric.kind.needed_rounds)
        if not _allows(claim, differing) or not _has_enough_rounds(record, planned, metric):
            continue
        if metric.is_unmeasured(record):
            continue
        value = metric.read_included_value(record)
        core, _, _ = run.numerics.partition(".")
        candidates.append(
            Candidate(
                shared=Shared(
                    seed=run.seed,
                    images=run.images,
                    partition=run.partition if have_same_partition else "",
                    core=core,
                    options=json.dumps([run.settings.get(name) for name in common_options]),
                ),
                conditions=json.dumps({name: difference.value for name, difference in differing.items()}),
                differences_from_cell=differing,
                folder=run.folder,
                value=value,
                last_tenth=find_metric("last-tenth").read_included_value(record),
                measured_rounds={"last", "selected"} if value is None else metric.find_measured_rounds(record),
            )
        )
    return candidates


def _allows(claim: Claim, differing: Differences) -> bool:
    """Returns whether a claim may be judged by a run with these differences from the run of its cell."""
    allowed_values = {"eval_every": None, **claim.allowed_options}  # None for any
    for name, difference in differing.items():
        is_allowed = name in allowed_values and allowed_values[name] in (None, difference.value)
        if not is_allowed and not is_smaller(name, difference.value, difference.other_value):
            return False
    return True


def _has_enough_rounds(record: Record, planned: PlannedRun, metric: Metric) -> bool:
    """Returns whether a run has a tenth of the planned rounds.

    For floats one round is enough, since what a run sends and holds is seen in its first round.
    """
    return metric.is_exact or 10 * record["config"]["rounds"] >= planned.setup.config.rounds


class Closeness(NamedTuple):
    """How close pairs under the same conditions are to the paper's runs; the closest is the largest tuple.

    Attributes:
        is_in_full: Whether all options are as in the cells.
        num_seeds: The number of seeds.
        minus_num_differences: The number of options that are not as in the cells, negated, since fewer are closer.
        num_rounds: The number of rounds; infinite if it is as in the cells.
        conditions: The conditions, which decide between equals.
    """

    is_in_full: bool
    num_seeds: int
    minus_num_differences: int
    num_rounds: float
    conditions: Conditions


def measure_closeness(pairs: Sequence[Pair]) -> Closeness:
    """Measures how close pairs under the same conditions are to the paper's runs."""
    example = pairs[0]
    rounds_difference = example.run.differences_from_cell.get("rounds")
    return Closeness(
        is_in_full=not example.differences_from_cells,
        num_seeds=len({pair.seed for pair in pairs}),
        minus_num_differences=-len(example.differences_from_cells),
        num_rounds=inf if rounds_difference is None else rounds_difference.value,
        conditions=example.conditions,
    )


def select_closest_pairs(pairs: Iterable[Pair]) -> list[Pair]:
    """Selects the pairs whose conditions are closest to those of the paper's runs; returns them sorted by seed."""
    pairs_by_conditions: dict[Conditions, list[Pair]] = {}
    for pair in pairs:
        pairs_by_conditions.setdefault(pair.conditions, []).append(pair)
    closest = max(pairs_by_conditions.values(), key=measure_closeness)
    return sorted(closest, key=lambda pair: pair.seed)


def select_pairs_under_common_conditions(pairs_by_row: Mapping[str, Sequence[Pair]]) -> dict[str, list[Pair]]:
    """Selects the pairs of the conditions under which a claim's row has been compared with most other rows.

    A lead on one row under some conditions and on another row under others are no leads of one claim. Of several
    conditions with as many other rows, those count whose least close comparison is closest to the paper's.

    Args:
        pairs_by_row: All pairs of runs, by the other row.

    Returns:
        The selected pairs by the other row, without rows that have none.
    """
    closeness_by_conditions: dict[str, list[Closeness]] = {}  # by the conditions of the claim's row, one a row
    for pairs in pairs_by_row.values():
        for conditions, same_conditions in _group_by_conditions_of_row(pairs).items():
            closeness = measure_closeness(select_closest_pairs(same_conditions))
            closeness_by_conditions.setdefault(conditions, []).append(closeness)
    if not closeness_by_conditions:
        return {}
    most_rows = max(map(len, closeness_by_conditions.values()))
    with_most_rows = [
        conditions for conditions, of_rows in closeness_by_conditions.items() if len(of_rows) == most_rows
    ]
    common = max(with_most_rows, key=lambda conditions: min(closeness_by_conditions[conditions]))
    common_pairs_by_row = {}
    for other_row, pairs in pairs_by_row.items():
        common_pairs = [pair for pair in pairs if pair.run.conditions == common]
        if common_pairs:
            common_pairs_by_row[other_row] = common_pairs
    return common_pairs_by_row


def _group_by_conditions_of_row(pairs: Iterable[Pair]) -> dict[str, list[Pair]]:
    """Groups pairs by the conditions of the run of the claim's row."""
    grouped: dict[str, list[Pair]] = {}
    for pair in pairs:
        grouped.setdefault(pair.run.conditions, []).append(pair)
    return grouped
