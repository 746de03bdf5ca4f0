"""The pairs of runs by which a row of a table is compared with another row.

A run can stand for a cell if it has the cell's settings, smaller sizes, or values that the claim allows; what differs
is kept beside it. Two runs are a pair if they share seed, partition, images, numerics of the core, and all options in
which their two cells agree.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from math import inf
from typing import Any, NamedTuple

import pandas as pd

from fedcli.declarations import Cell, Claim, Table
from fedcli.errors import UserError
from fedcli.results.metrics import Metric, find_metric
from fedcli.results.plans import PlannedRun, plan_cell
from fedcli.runs.identity import Differences, departures, differences, is_smaller
from fedcli.runs.options import RunConfig
from fedcli.runs.schema import Record

SHARED_COLUMNS = ["seed", "images", "partition", "core", "options"]  # equal in both runs of a pair
RUN_COLUMNS = ["form", "departed", "folder", "value", "tail", "rules"]  # of the row's run; of the other's with `_other`
OTHER_RUN_COLUMNS = [f"{name}_other" for name in RUN_COLUMNS]
FORM_COLUMNS = ["form", "form_other"]  # the options of the two runs that are not as in their cells
NO_PAIRS = pd.DataFrame(columns=[*SHARED_COLUMNS, *RUN_COLUMNS, *OTHER_RUN_COLUMNS, "weight"])  # of a contrast

RunsByMethod = Mapping[str, Sequence[dict[str, Any]]]  # rows of a frame, see `fedcli.results.frame`


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
        place = (cell.row, cell.column)
        if place not in runs:
            runs[place] = plan_cell(table, cell)
        return runs[place]

    by_other_row: dict[str, list[PlannedContrast]] = {}
    for other_row in claim.other_rows:
        by_other_row[other_row] = []
        for contrast in contrasts_with(claim, table, other_row):
            planned = PlannedContrast(contrast, run_of(contrast.cell), run_of(contrast.other_cell))
            by_other_row[other_row].append(planned)
    return by_other_row


def find_pairs(claim: Claim, planned_contrasts: Sequence[PlannedContrast], runs: RunsByMethod) -> pd.DataFrame:
    """The pairs of runs of a claim's row and another row.

    Of one form (what the two runs have other than their cells) a seed counts only if it has a pair for each contrast.

    Args:
        claim: The claim.
        planned_contrasts: Those of the two rows.
        runs: All that have ended, by method.

    Returns:
        A row a pair and contrast: the `SHARED_COLUMNS`, the `weight` of the contrast, and of both runs, those of the
        other row with `_other`: `form`, `departed` (what is other than in the cell), `folder`, `metric`, `value` and
        `tail` (the mean of the last tenth of the rounds), in the metrics' units.
    """
    frames = []
    for planned in planned_contrasts:
        pairs_of_contrast = _pairs_of_contrast(claim, planned, runs)
        if pairs_of_contrast.empty:
            return pairs_of_contrast  # so that no seed has a pair for each contrast
        frames.append(pairs_of_contrast)
    pairs = pd.concat(frames)
    contrasts_of_seed = pairs.groupby([*FORM_COLUMNS, "seed"])["weight"].transform("size")
    return pairs[contrasts_of_seed == len(planned_contrasts)]


def _pairs_of_contrast(claim: Claim, planned: PlannedContrast, runs: RunsByMethod) -> pd.DataFrame:
    """The pairs for one contrast, of each form and seed the first."""
    contrast = planned.contrast
    unlike = differences(planned.run.settings, planned.other_run.settings).keys() | {"post"}
    common_options = [field.name for field in fields(RunConfig) if field.name not in unlike]
    shared_columns = list(SHARED_COLUMNS)
    if unlike & {"partition", "partition_seed"}:
        shared_columns.remove("partition")
    metric = contrast.cell.metric
    other_metric = contrast.other_cell.metric
    candidates = _candidates(claim, find_metric(metric), planned.run, runs, common_options)
    other_candidates = _candidates(claim, find_metric(other_metric), planned.other_run, runs, common_options)
    if not candidates or not other_candidates:
        return NO_PAIRS
    pairs = _frame_of(candidates).merge(_frame_of(other_candidates), on=shared_columns, suffixes=("", "_other"))
    have_common_rule = []
    for rules, other_rules in zip(pairs["rules"], pairs["rules_other"], strict=True):
        have_common_rule.append(not rules.isdisjoint(other_rules))
    comparable = pairs[pd.Series(have_common_rule, pairs.index, dtype=bool)]
    first_of_seed = comparable.drop_duplicates([*FORM_COLUMNS, "seed"])
    return first_of_seed.assign(weight=contrast.weight, metric=metric, metric_other=other_metric)


def _candidates(
    claim: Claim, metric: Metric, planned: PlannedRun, runs: RunsByMethod, common_options: Sequence[str]
) -> list[dict[str, Any]]:
    """The runs that can stand for a planned one; the two runs of a pair share the values of `common_options`."""
    candidates = []
    for run in runs.get(planned.setup.method.name, ()):
        record = run["record"]
        departed = departures(record, run["settings"], planned.settings, metric.needs)
        if not _allows(claim, departed) or not _has_enough_rounds(record, planned, metric):
            continue
        value = _value_of(metric, record)
        if value is None and metric.none != "never" and metric.counts(record):
            continue  # finished, and not measured
        candidates.append({
            "seed": run["seed"],
            "images": run["images"],
            "partition": run["partition"],
            "core": run["numerics"].partition(".")[0],
            "options": json.dumps([run["settings"].get(name) for name in common_options]),
            "form": json.dumps({name: ours for name, (ours, _) in departed.items()}),
            "departed": departed,
            "folder": run["folder"],
            "value": value,
            "tail": _value_of(find_metric("last-tenth"), record),
            "rules": {"last", "selected"} if value is None else metric.rules(record),
        })  # fmt: skip
    return candidates


def _frame_of(candidates: Sequence[dict[str, Any]]) -> pd.DataFrame:
    columns = [*SHARED_COLUMNS, *RUN_COLUMNS]
    return pd.DataFrame(candidates, columns=columns, dtype=object).astype({"value": float, "tail": float})


def _allows(claim: Claim, departed: Differences) -> bool:
    """Whether a claim may be judged by a run whose options are not as in its cell.

    Args:
        claim: The claim.
        departed: The run's value and the cell's, by option.
    """
    allowed_values = {"eval_every": None, **claim.allowed_options}  # None for any
    for name, (ours, papers) in departed.items():
        is_allowed = name in allowed_values and allowed_values[name] in (None, ours)
        if not is_allowed and not is_smaller(name, ours, papers):
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
    """How near pairs of one form are to the paper's runs; the nearest is the largest."""

    in_full: bool
    num_seeds: int
    minus_num_departed: int  # each option that is not as in its cell takes one off
    rounds: float
    form: str  # decides between equals, as the next
    form_other: str


def _nearness(pairs: pd.DataFrame) -> Nearness:
    first = pairs.iloc[0]
    departed = first["departed"] | first["departed_other"]
    (rounds, *_) = first["departed"].get("rounds", [inf])
    return Nearness(
        in_full=not departed,
        num_seeds=pairs["seed"].nunique(),
        minus_num_departed=-len(departed),
        rounds=rounds,
        form=first["form"],
        form_other=first["form_other"],
    )


def nearest_pairs(pairs: pd.DataFrame) -> pd.DataFrame:
    """The pairs of the form that is nearest to the paper's runs, by seed."""
    pairs_by_form = [pairs_of_form for _, pairs_of_form in pairs.groupby(FORM_COLUMNS)]
    return max(pairs_by_form, key=_nearness).sort_values("seed", kind="stable")


def pairs_of_common_form(by_other_row: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """The pairs in whose form the row has been compared with most others, by those it has been compared with.

    A lead on one row in one form and on another row in another form are no leads of one claim. Of several such forms
    the one counts whose least near comparison is nearest to the paper's.
    """
    nearness_by_form: dict[str, list[Nearness]] = {}  # of the comparisons with the other rows
    for pairs in by_other_row.values():
        for form, pairs_of_form in pairs.groupby("form"):
            nearness_by_form.setdefault(str(form), []).append(_nearness(nearest_pairs(pairs_of_form)))
    if not nearness_by_form:
        return {}
    common_form = max(nearness_by_form, key=lambda form: _rank(nearness_by_form[form]))
    of_common_form = {}
    for other_row, pairs in by_other_row.items():
        pairs_of_form = pairs[pairs["form"] == common_form]
        if not pairs_of_form.empty:
            of_common_form[other_row] = pairs_of_form
    return of_common_form


def _rank(nearness: Collection[Nearness]) -> tuple[int, Nearness]:
    """What orders forms: the number of rows compared, then how near the least near comparison is."""
    return len(nearness), min(nearness)
