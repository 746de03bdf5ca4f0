"""Numbers that stand in a flag, as in `dirichlet:0.5`, `rounds-to:60` and `--local-test 0.29`."""

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any


def read_number(text: str, read: Callable[[str], Any] = int, low: float = 1, high: float = math.inf) -> Any:
    """Reads a number from `low` to `high` in a flag; raises ValueError for anything else."""
    has_short_exponent = re.fullmatch(r"[^e]*(e[+-]?\d{1,3})?", text.lower())
    if not has_short_exponent:  # Fraction would make ten million digits of 1e-9999999
        raise ValueError
    value = read(text)
    if not low <= value <= high:
        raise ValueError
    return value


def exact_share(share: Fraction | float) -> Fraction:
    """Returns a share as it was written, 29/100 for 0.29: in floats, 0.29 of 100 is below 29."""
    return Fraction(share).limit_denominator(10**6)
