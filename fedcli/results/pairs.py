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
from fedcli.results.frame import RunRow
from fedcli.results.metrics import Metric, find_metric
from fedcli.results.plans import PlannedRun, plan_cell
from fedcli.runs.identity import Differences, differences, differences_from_plan, is_smaller
from fedcli.runs.options import RunConfig
from fedcli.runs.schema import Record

RunsByMethod = Mapping[str, Sequence[RunRow]]


class Shared(NamedTuple):
    """What is equal in both runs of a pair."""

    seed: int
    images: str  # their fingerprint
    partition: str  # its fingerprint; empty where the two cells have different partitions
    core: str  # the version of the core's arithmetic
    options: str  # JSON of the options in which the two planned runs agree


@dataclass(frozen=True)
class Candidate:
    """A run that can stand for a planned one."""

    shared: Shared
    conditions: str  # JSON of the options that are not as in its cell
    differences: Differences  # from the run of its cell
    folder: Path
    value: float | None  # of the metric, in its unit
    tail: float | None  # the mean of the last tenth of the rounds
    measured_rounds: set[str]  # see `Metric.measured_rounds`


@dataclass(frozen=True)
class Contrast:
    """A cell of a claim's row and the cell of another row that it is compared with."""

    other_row: str  # as the claim names it; its cell here may be of a row that stands for it
    cell: Cell
    other_cell: Cell
    weight: float  # of their difference in the claim's; the mean over `columns` less that over `subtracted_columns`


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
    def differences(self) -> Differences:
        """What the two runs have other than the runs of their cells; of an option of both, that of the claim's row."""
        return self.other_run.differences | self.run.differences

    @property
    def lead(self) -> float | None:
        """By how much the claim's row is ahead, times the weight of the contrast; None where a run has no value."""
        return self._weighted_difference(self.run.value, self.other_run.value)

    @property
    def tail_lead(self) -> float | None:
        """The same over the last tenth of the rounds."""
        return self._weighted_difference(self.run.tail, self.other_run.tail)

    def _weighted_difference(self, value: float | None, other_value: float | None) -> float | None:
        if value is None or other_value is None:
            return None
        return self.contrast.weight * (value - other_value)


def contrasts_with(claim: Claim, table: Table, other_row: str) -> list[Contrast]:
    """The cells in which a claim's row is compared with another row.

    Raises:
        UserError: If the table has not such a cell.
    """
    cells = {(cell.row, cell.column): cell for cell in table.cells}

    def cell_of(row: str, column: str) -> Cell:
        name = row if (row, column) in cells else claim.row_aliases.get(row, row)
        if (name, column) not in cells:
            raise UserError(
                f"the claim {claim.name} names a cell that {claim.table} does not have (got {name} / {column}); "
                "name a row and a column of the table."
            )
        return cells[name, column]

    contrasts = []
    other_columns = claim.other_columns or claim.columns
    for column, other_column in zip(claim.columns, other_columns, strict=True):
        cell = cell_of(claim.row, column)
        other_cell = cell_of(other_row, other_column)
        contrasts.append(Contrast(other_row, cell, other_cell, weight=1 / len(claim.columns)))
    for column in claim.subtracted_columns:
        cell = cell_of(claim.row, column)
        other_cell = cell_of(other_row, column)
        contrasts.append(Contrast(other_row, cell, other_cell, weight=-1 / len(claim.subtracted_columns)))
    return contrasts


class PlannedContrast(NamedTuple):
    """A contrast with the run that the paper has in each of its cells."""

    contrast: Contrast
    run: PlannedRun
    other_run: PlannedRun


def plan_contrasts(claim: Claim, table: Table) -> dict[str, list[PlannedContrast]]:
    """The contrasts of a claim with their runs, by the row that its row is compared with; each cell is planned once.

    Raises:
        UserError: As `contrasts_with`.
    """
    runs: dict[tuple[str, str], PlannedRun] = {}

    def run_of(cell: Cell) -> PlannedRun:
        if (cell.row, cell.column) not in runs:
            runs[cell.row, cell.column] = plan_cell(table, cell)
        return runs[cell.row, cell.column]

    by_other_row: dict[str, list[PlannedContrast]] = {}
    for other_row in claim.other_rows:
        by_other_row[other_row] = []
        for contrast in contrasts_with(claim, table, other_row):
            planned = PlannedContrast(contrast, run_of(contrast.cell), run_of(contrast.other_cell))
            by_other_row[other_row].append(planned)
    return by_other_row


def find_pairs(claim: Claim, planned_contrasts: Sequence[PlannedContrast], runs: RunsByMethod) -> list[Pair]:
    """The pairs of runs of a claim's row and another row, a pair for each contrast.

    Under the same conditions a seed counts only if it has a pair for each contrast.

    Args:
        claim: The claim.
        planned_contrasts: Those of the two rows.
        runs: All that have ended, by method.
    """
    pairs: list[Pair] = []
    for planned in planned_contrasts:
        pairs += _pairs_of_contrast(claim, planned, runs)
    num_contrasts = Counter((pair.conditions, pair.seed) for pair in pairs)
    return [pair for pair in pairs if num_contrasts[pair.conditions, pair.seed] == len(planned_contrasts)]


def _pairs_of_contrast(claim: Claim, planned: PlannedContrast, runs: RunsByMethod) -> list[Pair]:
    """The pairs for one contrast, of each seed the first under the same conditions."""
    contrast = planned.contrast
    differing_options = differences(planned.run.settings, planned.other_run.settings).keys() | {"post"}
    common_options = [field.name for field in fields(RunConfig) if field.name not in differing_options]
    metric = find_metric(contrast.cell.metric)
    other_metric = find_metric(contrast.other_cell.metric)
    other_candidates: dict[Shared, list[Candidate]] = {}
    for candidate in _candidates(claim, other_metric, planned.other_run, runs, common_options):
        other_candidates.setdefault(candidate.shared, []).append(candidate)
    first_pairs: dict[tuple[Conditions, int], Pair] = {}
    for candidate in _candidates(claim, metric, planned.run, runs, common_options):
        for other_candidate in other_candidates.get(candidate.shared, ()):
            are_comparable = not candidate.measured_rounds.isdisjoint(other_candidate.measured_rounds)
            if are_comparable:
                pair = Pair(contrast, candidate, other_candidate)
                first_pairs.setdefault((pair.conditions, pair.seed), pair)
    return list(first_pairs.values())


def _candidates(
    claim: Claim, metric: Metric, planned: PlannedRun, runs: RunsByMethod, common_options: Sequence[str]
) -> list[Candidate]:
    """The runs that can stand for a planned one; the two runs of a pair share the values of `common_options`."""
    have_same_partition = {"partition", "partition_seed"} <= set(common_options)
    candidates = []
    for run in runs.get(planned.setup.method.name, ()):
        record = run.record
        differing = differences_from_plan(record, run.settings, planned.settings, metric.needed_rounds)
        if not _allows(claim, differing) or not _has_enough_rounds(record, planned, metric):
            continue
        value = metric.included_value(record)
        if value is None and metric.missing_text != "never" and metric.includes(record):
            continue  # finished, and not measured
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
                differences=differing,
                folder=run.folder,
                value=value,
                tail=find_metric("last-tenth").included_value(record),
                measured_rounds={"last", "selected"} if value is None else metric.measured_rounds(record),
            )
        )
    return candidates


def _allows(claim: Claim, differing: Differences) -> bool:
    """Whether a claim may be judged by a run with these differences from the run of its cell."""
    allowed_values = {"eval_every": None, **claim.allowed_options}  # None for any
    for name, difference in differing.items():
        is_allowed = name in allowed_values and allowed_values[name] in (None, difference.value)
        if not is_allowed and not is_smaller(name, difference.value, difference.other_value):
            return False
    return True


def _has_enough_rounds(record: Record, planned: PlannedRun, metric: Metric) -> bool:
    """Whether a run has a tenth of the planned rounds; what a run sends and holds is seen in its first round."""
    return metric.unit == "floats" or 10 * record["config"]["rounds"] >= planned.setup.config.rounds


def closeness(pairs: Sequence[Pair]) -> tuple:
    """How close pairs under the same conditions are to the paper's runs, a key to order by; the closest is the largest.

    In full comes before reduced; then more seeds, fewer options that are not as in their cells, and more rounds. The
    conditions decide between equals.
    """
    example = pairs[0]
    in_full = not example.differences
    num_seeds = len({pair.seed for pair in pairs})
    num_rounds = example.run.differences["rounds"].value if "rounds" in example.run.differences else inf
    return (in_full, num_seeds, -len(example.differences), num_rounds, example.conditions)


def closest_pairs(pairs: Iterable[Pair]) -> list[Pair]:
    """The pairs under the conditions that are closest to those of the paper's runs, by seed."""
    pairs_by_conditions: dict[Conditions, list[Pair]] = {}
    for pair in pairs:
        pairs_by_conditions.setdefault(pair.conditions, []).append(pair)
    closest = max(pairs_by_conditions.values(), key=closeness)
    return sorted(closest, key=lambda pair: pair.seed)


def pairs_under_common_conditions(pairs_by_row: Mapping[str, Sequence[Pair]]) -> dict[str, list[Pair]]:
    """The pairs of the conditions under which a claim's row has been compared with most others, by these other rows.

    A lead on one row under some conditions and on another row under others are no leads of one claim. Of several such
    conditions those count whose least close comparison is closest to the paper's.
    """
    comparisons: dict[str, list[tuple]] = {}  # with the other rows, how close each is, by the conditions
    for pairs in pairs_by_row.values():
        for conditions, same_conditions in _by_conditions_of_row(pairs).items():
            comparisons.setdefault(conditions, []).append(closeness(closest_pairs(same_conditions)))
    if not comparisons:
        return {}
    most_rows = max(map(len, comparisons.values()))
    with_most_rows = [conditions for conditions, compared in comparisons.items() if len(compared) == most_rows]
    common = max(with_most_rows, key=lambda conditions: min(comparisons[conditions]))
    common_pairs_by_row = {}
    for other_row, pairs in pairs_by_row.items():
        common_pairs = [pair for pair in pairs if pair.run.conditions == common]
        if common_pairs:
            common_pairs_by_row[other_row] = common_pairs
    return common_pairs_by_row


def _by_conditions_of_row(pairs: Iterable[Pair]) -> dict[str, list[Pair]]:
    """The pairs by the conditions of the runs of the claim's row."""
    grouped: dict[str, list[Pair]] = {}
    for pair in pairs:
        grouped.setdefault(pair.run.conditions, []).append(pair)
    return grouped
