"""The pairs of runs by which a row of a table is compared with another row.

A run can stand for a cell if it has the cell's settings, smaller sizes, or values that the claim allows; what differs
is kept beside it. Two runs are a pair if they share seed, partition, images, numerics of the core, and all options in
which their two cells agree.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from fedcli.declarations import Cell, Claim, Table
from fedcli.errors import UserError
from fedcli.results.frame import RunRow
from fedcli.results.metrics import Metric, find_metric
from fedcli.results.plans import PlannedRun, plan_cell
from fedcli.runs.identity import Differences, differences, differences_from_plan, is_smaller
from fedcli.runs.options import RunConfig
from fedcli.runs.schema import Record

RunsByMethod = Mapping[str, Sequence[RunRow]]


class Candidate(NamedTuple):
    """A run that can stand for a planned one."""

    seed: int
    images: str  # their fingerprint
    partition: str  # its fingerprint
    core: str  # the version of the core's arithmetic
    options: str  # JSON of the options in which the two planned runs agree
    conditions: str  # JSON of the options that are not as in its cell
    differences: Differences  # from the run of its cell
    folder: Path
    value: float | None  # of the metric, in its unit
    tail: float | None  # the mean of the last tenth of the rounds
    measured_rounds: set[str]  # see `Metric.measured_rounds`


SHARED_COLUMNS = ["seed", "images", "partition", "core", "options"]  # equal in both runs of a pair
RUN_COLUMNS = [name for name in Candidate._fields if name not in SHARED_COLUMNS]  # of the other run with `_other`
OTHER_RUN_COLUMNS = [f"{name}_other" for name in RUN_COLUMNS]
CONDITION_COLUMNS = ["conditions", "conditions_other"]
NO_PAIRS = pd.DataFrame(columns=[*SHARED_COLUMNS, *RUN_COLUMNS, *OTHER_RUN_COLUMNS, "weight"])  # of a contrast


@dataclass(frozen=True)
class Contrast:
    """A cell of a claim's row and the cell of another row that it is compared with."""

    cell: Cell
    other_cell: Cell
    weight: float  # of their difference in the claim's; the mean over `columns` less that over `subtracted_columns`


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
        contrasts.append(Contrast(cell, other_cell, weight=1 / len(claim.columns)))
    for column in claim.subtracted_columns:
        cell = cell_of(claim.row, column)
        other_cell = cell_of(other_row, column)
        contrasts.append(Contrast(cell, other_cell, weight=-1 / len(claim.subtracted_columns)))
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


def find_pairs(claim: Claim, planned_contrasts: Sequence[PlannedContrast], runs: RunsByMethod) -> pd.DataFrame:
    """The pairs of runs of a claim's row and another row.

    Under the same conditions (what the two runs have other than their cells) a seed counts only if it has a pair for
    each contrast.

    Args:
        claim: The claim.
        planned_contrasts: Those of the two rows.
        runs: All that have ended, by method.

    Returns:
        A row a pair and contrast: the `SHARED_COLUMNS`, the `weight` of the contrast, and of both runs, those of the
        other row with `_other`, the other fields of `Candidate` and the name of the `metric`.
    """
    frames = []
    for planned in planned_contrasts:
        pairs_of_contrast = _pairs_of_contrast(claim, planned, runs)
        if pairs_of_contrast.empty:
            return pairs_of_contrast  # so that no seed has a pair for each contrast
        frames.append(pairs_of_contrast)
    pairs = pd.concat(frames)
    contrasts_of_seed = pairs.groupby([*CONDITION_COLUMNS, "seed"])["weight"].transform("size")
    return pairs[contrasts_of_seed == len(planned_contrasts)]


def _pairs_of_contrast(claim: Claim, planned: PlannedContrast, runs: RunsByMethod) -> pd.DataFrame:
    """The pairs for one contrast, of each seed the first under the same conditions."""
    contrast = planned.contrast
    differing_options = differences(planned.run.settings, planned.other_run.settings).keys() | {"post"}
    common_options = [field.name for field in fields(RunConfig) if field.name not in differing_options]
    shared_columns = list(SHARED_COLUMNS)
    if differing_options & {"partition", "partition_seed"}:
        shared_columns.remove("partition")
    metric = contrast.cell.metric
    other_metric = contrast.other_cell.metric
    candidates = _candidates(claim, find_metric(metric), planned.run, runs, common_options)
    other_candidates = _candidates(claim, find_metric(other_metric), planned.other_run, runs, common_options)
    if not candidates or not other_candidates:
        return NO_PAIRS
    pairs = _frame_of(candidates).merge(_frame_of(other_candidates), on=shared_columns, suffixes=("", "_other"))
    are_comparable = []
    for rounds, other_rounds in zip(pairs["measured_rounds"], pairs["measured_rounds_other"], strict=True):
        are_comparable.append(not rounds.isdisjoint(other_rounds))
    comparable_pairs = pairs[pd.Series(are_comparable, pairs.index, dtype=bool)]
    first_of_seed = comparable_pairs.drop_duplicates([*CONDITION_COLUMNS, "seed"])
    return first_of_seed.assign(weight=contrast.weight, metric=metric, metric_other=other_metric)


def _candidates(
    claim: Claim, metric: Metric, planned: PlannedRun, runs: RunsByMethod, common_options: Sequence[str]
) -> list[Candidate]:
    """The runs that can stand for a planned one; the two runs of a pair share the values of `common_options`."""
    candidates = []
    for run in runs.get(planned.setup.method.name, ()):
        record = run.record
        differing = differences_from_plan(record, run.settings, planned.settings, metric.needed_rounds)
        if not _allows(claim, differing) or not _has_enough_rounds(record, planned, metric):
            continue
        value = _value_of(metric, record)
        if value is None and metric.missing_text != "never" and metric.counts(record):
            continue  # finished, and not measured
        assert run.folder is not None  # the records have been read from files
        core, _, _ = run.numerics.partition(".")
        candidates.append(
            Candidate(
                seed=run.seed,
                images=run.images,
                partition=run.partition,
                core=core,
                options=json.dumps([run.settings.get(name) for name in common_options]),
                conditions=json.dumps({name: difference.value for name, difference in differing.items()}),
                differences=differing,
                folder=run.folder,
                value=value,
                tail=_value_of(find_metric("last-tenth"), record),
                measured_rounds={"last", "selected"} if value is None else metric.measured_rounds(record),
            )
        )
    return candidates


def _frame_of(candidates: Sequence[Candidate]) -> pd.DataFrame:
    table = pd.DataFrame((candidate._asdict() for candidate in candidates), dtype=object)
    return table.astype({"value": float, "tail": float})


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


def _value_of(metric: Metric, record: Record) -> float | None:
    """The metric of a run that counts; None without one."""
    values = metric.values([record])
    return values[0] if values else None


class Nearness(NamedTuple):
    """How near pairs under the same conditions are to the paper's runs; the nearest is the largest."""

    in_full: bool
    num_seeds: int
    minus_num_differences: int  # each option that is not as in its cell takes one off
    rounds: float
    conditions: str  # decides between equals, as the next
    conditions_other: str


def _nearness(pairs: pd.DataFrame) -> Nearness:
    first = pairs.iloc[0]
    differing = first["differences"] | first["differences_other"]
    rounds = first["differences"]["rounds"].value if "rounds" in first["differences"] else inf
    return Nearness(
        in_full=not differing,
        num_seeds=pairs["seed"].nunique(),
        minus_num_differences=-len(differing),
        rounds=rounds,
        conditions=first["conditions"],
        conditions_other=first["conditions_other"],
    )


def nearest_pairs(pairs: pd.DataFrame) -> pd.DataFrame:
    """The pairs under the conditions that are nearest to those of the paper's runs, by seed."""
    pairs_by_conditions = [same_conditions for _, same_conditions in pairs.groupby(CONDITION_COLUMNS)]
    return max(pairs_by_conditions, key=_nearness).sort_values("seed", kind="stable")


def pairs_under_common_conditions(pairs_by_row: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """The pairs of the conditions under which a claim's row has been compared with most others, by these other rows.

    A lead on one row under some conditions and on another row under others are no leads of one claim. Of several such
    conditions those count whose least near comparison is nearest to the paper's.
    """
    nearness_by_conditions: dict[str, list[Nearness]] = {}  # of the comparisons with the other rows
    for pairs in pairs_by_row.values():
        for conditions, same_conditions in pairs.groupby("conditions"):
            nearness = _nearness(nearest_pairs(same_conditions))
            nearness_by_conditions.setdefault(str(conditions), []).append(nearness)
    if not nearness_by_conditions:
        return {}
    common = max(nearness_by_conditions, key=lambda conditions: _rank(nearness_by_conditions[conditions]))
    common_pairs_by_row = {}
    for other_row, pairs in pairs_by_row.items():
        common_pairs = pairs[pairs["conditions"] == common]
        if not common_pairs.empty:
            common_pairs_by_row[other_row] = common_pairs
    return common_pairs_by_row


class Rank(NamedTuple):
    """What orders conditions; those that count are the largest."""

    num_rows: int  # that have been compared
    least_near: Nearness  # of the comparisons


def _rank(nearness: Collection[Nearness]) -> Rank:
    return Rank(len(nearness), min(nearness))
