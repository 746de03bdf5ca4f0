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
        """All of it, to ten decimals."""
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


def judge(lead: Lead, direction: str, is_exact: bool) -> str:
    """The verdict on a lead; an exact one, of counts, needs no interval."""
    if is_exact:
        is_above = lead.mean > 0
        is_below = lead.mean < 0
    else:
        is_above = lead.n >= 3 and lead.low > 0
        is_below = lead.n >= 3 and lead.high < 0
    if not (is_above or is_below):
        return "undecided"
    is_as_claimed = is_above if direction == "higher" else is_below
    return "reproduced" if is_as_claimed else "contradicted"


def leads_over_others(differences: pd.DataFrame, column: str) -> list[Lead]:
    """The lead over each other row, by a column of differences between the runs of a pair."""
    by_seed = differences.groupby(["other", "seed"])[column].sum(min_count=1)
    return [interval(leads) for _, leads in by_seed.groupby("other")]


def smallest(leads: list[Lead], sign: int) -> Lead:
    """The lead that is the least in the direction of a claim, of those with a value if one has it."""
    with_value = [lead for lead in leads if lead.n]
    return min(with_value or leads, key=lambda lead: sign * lead.mean)
