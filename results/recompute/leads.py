"""How far one row is ahead of another, and what that says of a claim."""

from typing import NamedTuple

import pandas as pd
from readings import MISSING
from scipy import stats


class Lead(NamedTuple):
    """How far a claim's row is ahead of another: the mean over seeds and its 95 % interval."""

    mean: float
    low: float
    high: float
    n: int  # seeds

    def text(self) -> str:
        """The lead with its interval and number of seeds, to ten decimals."""
        return f"{self.mean:.10f} [{self.low:.10f}, {self.high:.10f}] ({self.n})"


NO_LEAD = Lead(MISSING, MISSING, MISSING, 0)


def interval(leads: pd.Series) -> Lead:
    """Mean and 95 % interval of the leads of seeds, by Student's t."""
    leads = leads.dropna()
    mean = leads.mean()
    n = len(leads)
    if n < 2:
        return Lead(mean, MISSING, MISSING, n)
    half_width = leads.sem() * stats.t.ppf(0.975, n - 1)
    return Lead(mean, mean - half_width, mean + half_width, n)


class WithoutValue(NamedTuple):
    """Whether runs have no value, since they diverged or never got there."""

    row: bool  # a run of the claim's row
    other_row: bool  # a run of the row that it is compared with


def judge(lead: Lead, direction: str, is_exact: bool, without_value: WithoutValue) -> str:
    """The verdict on a lead; an exact one, of counts, needs no interval.

    The seeds of runs without a value are missing from a lead. That decides nothing where they are of the row ahead.
    """
    if is_exact:
        is_above = lead.mean > 0
        is_below = lead.mean < 0
    else:
        is_above = lead.n >= 3 and lead.low > 0
        is_below = lead.n >= 3 and lead.high < 0
    if not (is_above or is_below):
        return "undecided"
    is_as_claimed = is_above if direction == "higher" else is_below
    is_better_without_value = without_value.row if is_as_claimed else without_value.other_row
    if is_better_without_value:
        return "undecided"
    return "reproduced" if is_as_claimed else "contradicted"


def lead_over_row(pairs: pd.DataFrame, column: str) -> Lead:
    """The lead over one other row, by a column of differences between the runs of each pair.

    A seed has no lead where one of its pairs has no value.
    """
    by_seed = pairs.groupby("seed")[column].agg(lambda differences: differences.sum(skipna=False))
    return interval(by_seed)


def smallest(leads: list[Lead], sign: int) -> Lead:
    """The lead that is the least in the direction of a claim, of those with a value if one has it."""
    with_value = [lead for lead in leads if lead.n]
    return min(with_value or leads, key=lambda lead: sign * lead.mean)
