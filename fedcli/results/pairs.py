"""The pairs of runs by which a row of a table is compared with another.

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
from fedcli.runs.identity import departures, differences, is_smaller
from fedcli.runs.options import RunConfig
from fedcli.runs.schema import Record

SHARED = ["seed", "images", "partition", "core", "options"]  # by the two runs of a pair
FORM_COLUMNS = ["form", "form_than"]  # the options of the two runs that are not as in their cells
OF_RUN = ["form", "departed", "folder", "value", "tail", "rules"]  # of either run of a pair
NO_PAIRS = pd.DataFrame(columns=[*SHARED, *OF_RUN, *(f"{name}_than" for name in OF_RUN), "share"])  # of a contrast

RunsByMethod = Mapping[str, Sequence[dict[str, Any]]]


@dataclass(frozen=True)
class Contrast:
    """Two cells of a table that a claim compares."""

    row: Cell
    than: Cell
    share: float  # of their difference in the claim's; the mean over `columns` less that over `less`


def contrasts(claim: Claim, table: Table, than: str) -> list[Contrast]:
    """The cells in which a claim's row is compared with another row.

    Raises:
        UserError: If the table has not such a cell.
    """
    cells = {(cell.row, cell.column): cell for cell in table.cells}

    def cell_of(row: str, column: str) -> Cell:
        name = row if (row, column) in cells else claim.elsewhere.get(row, row)
        if (name, column) not in cells:
            raise UserError(
                f"the claim {claim.name} names a cell that {claim.table} does not have (got {name} / {column}); "
                "name a row and a column of the table."
            )
        return cells[name, column]

    compared = []
    than_columns = claim.than_columns or claim.columns
    for column, than_column in zip(claim.columns, than_columns, strict=True):
        contrast = Contrast(cell_of(claim.row, column), cell_of(than, than_column), share=1 / len(claim.columns))
        compared.append(contrast)
    for column in claim.less:
        contrast = Contrast(cell_of(claim.row, column), cell_of(than, column), share=-1 / len(claim.less))
        compared.append(contrast)
    return compared


class PlannedContrast(NamedTuple):
    """A contrast with the run that the paper has in each of its cells."""

    contrast: Contrast
    row: PlannedRun
    than: PlannedRun


def plan_contrasts(claim: Claim, table: Table) -> dict[str, list[PlannedContrast]]:
    """The contrasts of a claim with their runs, by the row that its row is compared with; each cell is planned once.

    Raises:
        UserError: As `contrasts`.
    """
    runs: dict[tuple[str, str], PlannedRun] = {}

    def run_of(cell: Cell) -> PlannedRun:
        place = (cell.row, cell.column)
        if place not in runs:
            runs[place] = plan_cell(table, cell)
        return runs[place]

    by_row: dict[str, list[PlannedContrast]] = {}
    for other in claim.others:
        by_row[other] = []
        for contrast in contrasts(claim, table, other):
            planned = PlannedContrast(contrast, run_of(contrast.row), run_of(contrast.than))
            by_row[other].append(planned)
    return by_row


def find_pairs(claim: Claim, compared: Sequence[PlannedContrast], runs: RunsByMethod) -> pd.DataFrame:
    """The pairs of runs of a claim's row and another row.

    Of one form (what the two runs have other than their cells) a seed counts only if it has a pair for each contrast.

    Args:
        claim: The claim.
        compared: The two rows' cells.
        runs: All that have ended, by method; rows of a frame, see `fedcli.results.frame`.

    Returns:
        A row a pair and contrast: the columns `SHARED`, the `share` of the contrast, and of both runs, those of the
        other row with `_than`: `form`, `departed` (what is other than in the cell), `folder`, `metric`, `value` and
        `tail` (the mean of the last tenth of the rounds), in the metrics' units.
    """
    parts = []
    for planned in compared:
        of_contrast = _pairs_of_contrast(claim, planned, runs)
        if of_contrast.empty:
            return of_contrast  # so that no seed has a pair for each contrast
        parts.append(of_contrast)
    pairs = pd.concat(parts)
    contrasts_of_seed = pairs.groupby([*FORM_COLUMNS, "seed"])["share"].transform("size")
    return pairs[contrasts_of_seed == len(compared)]


def _pairs_of_contrast(claim: Claim, planned: PlannedContrast, runs: RunsByMethod) -> pd.DataFrame:
    """The pairs for one contrast, of each form and seed the first."""
    contrast = planned.contrast
    unlike = differences(planned.row.settings, planned.than.settings).keys() | {"post"}
    common_options = [field.name for field in fields(RunConfig) if field.name not in unlike]
    shared = list(SHARED)
    if unlike & {"partition", "partition_seed"}:
        shared.remove("partition")
    first = _candidates(claim, find_metric(contrast.row.metric), planned.row, runs, common_options)
    second = _candidates(claim, find_metric(contrast.than.metric), planned.than, runs, common_options)
    if not first or not second:
        return NO_PAIRS
    pairs = _frame_of(first).merge(_frame_of(second), on=shared, suffixes=("", "_than"))
    share_rule = []
    for rules, rules_than in zip(pairs["rules"], pairs["rules_than"], strict=True):
        share_rule.append(not rules.isdisjoint(rules_than))
    comparable = pairs[pd.Series(share_rule, pairs.index, dtype=bool)]
    first_of_seed = comparable.drop_duplicates([*FORM_COLUMNS, "seed"])
    return first_of_seed.assign(share=contrast.share, metric=contrast.row.metric, metric_than=contrast.than.metric)


def _candidates(
    claim: Claim, metric: Metric, cell: PlannedRun, runs: RunsByMethod, common_options: Sequence[str]
) -> list[dict[str, Any]]:
    """The runs that can stand for a cell; the two runs of a pair share the values of `common_options`."""
    candidates = []
    for run in runs.get(cell.setup.method.name, ()):
        record = run["record"]
        departed = departures(record, run["settings"], cell.settings, metric.needs)
        if not _allows(claim, departed) or not _has_enough_rounds(record, cell, metric):
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
    columns = [*SHARED, *OF_RUN]
    return pd.DataFrame(candidates, columns=columns, dtype=object).astype({"value": float, "tail": float})


def _allows(claim: Claim, departed: Mapping[str, tuple[Any, Any]]) -> bool:
    """Whether a claim may be judged by a run whose options are not as in its cell.

    Args:
        claim: The claim.
        departed: The run's value and the cell's, by option.
    """
    instead = {"eval_every": None, **claim.instead}
    for name, (ours, papers) in departed.items():
        is_allowed = name in instead and instead[name] in (None, ours)
        if not is_allowed and not is_smaller(name, ours, papers):
            return False
    return True


def _has_enough_rounds(record: Record, cell: PlannedRun, metric: Metric) -> bool:
    """Whether a run has a tenth of its cell's rounds; what a run sends and holds is seen in its first round."""
    return metric.unit == "floats" or 10 * record["config"]["rounds"] >= cell.setup.config.rounds


def _value_of(metric: Metric, record: Record) -> float | None:
    """The metric of a run that counts; None without one."""
    values = metric.values([record])
    return values[0] if values else None


class Nearness(NamedTuple):
    """How near pairs of one form are to the paper's runs; the nearest is the largest."""

    in_full: bool
    seeds: int
    others: int  # less than zero by each option that is not as in its cell
    rounds: float
    form: str  # decides between equals, as the next
    form_than: str


def _nearness(pairs: pd.DataFrame) -> Nearness:
    first = pairs.iloc[0]
    departed = first["departed"] | first["departed_than"]
    (rounds, *_) = first["departed"].get("rounds", [inf])
    return Nearness(
        in_full=not departed,
        seeds=pairs["seed"].nunique(),
        others=-len(departed),
        rounds=rounds,
        form=first["form"],
        form_than=first["form_than"],
    )


def nearest_pairs(pairs: pd.DataFrame) -> pd.DataFrame:
    """The pairs of the form that is nearest to the paper's runs, by seed."""
    by_form = [of_form for _, of_form in pairs.groupby(FORM_COLUMNS)]
    return max(by_form, key=_nearness).sort_values("seed", kind="stable")


def of_common_form(pairs: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """The pairs in whose form the row has been compared with most others, by those it has been compared with.

    A lead on one row in one form and on another row in another form are no leads of one claim. Of several such forms
    the one counts whose least near comparison is nearest to the paper's.
    """
    nearness: dict[str, list[Nearness]] = {}  # of the comparisons with the other rows, by form
    for pairs_with_other in pairs.values():
        for form, of_form in pairs_with_other.groupby("form"):
            nearness.setdefault(str(form), []).append(_nearness(nearest_pairs(of_form)))
    if not nearness:
        return {}
    common = max(nearness, key=lambda form: _rank(nearness[form]))
    chosen = {other: of_other[of_other["form"] == common] for other, of_other in pairs.items()}
    return {other: of_other for other, of_other in chosen.items() if not of_other.empty}


def _rank(nearness: Collection[Nearness]) -> tuple[int, Nearness]:
    """What orders forms: the number of rows compared, then how near the least near comparison is."""
    return len(nearness), min(nearness)
