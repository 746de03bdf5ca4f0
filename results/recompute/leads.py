"""How far one row is ahead of another, and what that says of a claim. A lead above zero is on the claim's side."""

from collections.abc import Sequence
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

    def negated(self) -> "Lead":
        """The lead as seen from the other side."""
        return Lead(-self.mean, -self.high, -self.low, self.n)

    def text(self) -> str:
        """The lead with its interval and number of seeds, to ten decimals."""
        return f"{self.mean:.10f} [{self.low:.10f}, {self.high:.10f}] ({self.n})"


NO_LEAD = Lead(MISSING, MISSING, MISSING, 0)


def mean_lead(leads: pd.Series) -> Lead:
    """The mean and the 95 % interval of the leads of seeds, by Student's t."""
    leads = leads.dropna()
    mean = leads.mean()
    n = len(leads)
    if n < 2:
        return Lead(mean, MISSING, MISSING, n)
    half_width = leads.sem() * stats.t.ppf(0.975, n - 1)
    return Lead(mean, mean - half_width, mean + half_width, n)


class LacksValue(NamedTuple):
    """Whether a run of the better row has no value, since it diverged or never got there; see `verdict_on_lead`."""

    if_ahead: bool  # of the row that is better if the claim's row is ahead
    if_behind: bool  # of the row that is better if it is behind


def verdict_on_lead(lead: Lead, is_exact: bool, lacks_value: LacksValue) -> str:
    """The verdict on a lead; an exact one, of counts, needs no interval.

    The seeds of runs without a value are missing from a lead. That decides nothing where they are of the better row.
    """
    if is_exact:
        is_ahead = lead.mean > 0
        is_behind = lead.mean < 0
    else:
        is_ahead = lead.n >= 3 and lead.low > 0
        is_behind = lead.n >= 3 and lead.high < 0
    if is_ahead and not lacks_value.if_ahead:
        return "reproduced"
    if is_behind and not lacks_value.if_behind:
        return "contradicted"
    return "undecided"


def lead_over_row(pairs: pd.DataFrame, column: str) -> Lead:
    """The lead over one other row, by a column of differences between the runs of each pair.

    A seed has no lead where one of its pairs has no value.
    """
    by_seed = pairs.groupby("seed")[column].agg(lambda differences: differences.sum(skipna=False))
    return mean_lead(by_seed)


def smallest_lead(leads: Sequence[Lead]) -> Lead:
    """The smallest of leads with a value; `NO_LEAD` if none has one."""
    with_value = [lead for lead in leads if lead.n]
    return min(with_value, key=lambda lead: lead.mean, default=NO_LEAD)
