"""Numbers in the prose of a page, which are read from records and from what the papers print.

Between double braces stand terms with + or - between them, and how many decimals are shown:

    {{ selected ours - selected theirs : 1 }}        a metric of runs, its mean over them
    {{ config.rounds ours }}                         what the records of all these runs say alike; of a list its length
    {{ protocol.rounds ours }}                       the same setting as the runs' protocol has it
    {{ least partition.sizes ours/seed-0 }}          the smallest number there, or with `most` the largest
    {{ least last ours }}                            the same of a metric of single runs
    {{ rounds-ahead ours theirs }}                   in how many rounds the first has the higher test accuracy
    {{ largest-gap ours theirs }}                    in any round, by how many points their test accuracies lie apart
    {{ lead last ours theirs }}                      by how much the first are ahead in a metric, with the 95 % interval
                                                     and the number of seeds that both have; stands alone
    {{ printed paper:2 "a row" "a column" }}         the paper's number, by table, row and column
    {{ rounds ours/seed-0 + 1 }}                     a number

Runs are named by their folder, or by several with commas between them. A negative number is refused, since the words
around it would be wrong then; where both signs are right, `: +2` shows the sign.
"""

import re
import shlex
from collections.abc import Iterator
from functools import partial, reduce
from pathlib import Path
from statistics import fmean
from typing import Any

from fedcli.errors import UserError
from fedcli.registry import find_table, protocols
from fedcli.results.claims import difference_text
from fedcli.results.comparison import printed
from fedcli.results.metrics import DECIMALS, METRICS, find_metric, lead
from fedcli.results.tables import find_records

EXPRESSION = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
FORM = re.compile(r"(?P<sum>.*?)(?:\s:\s*(?P<sign>\+?)(?P<decimals>\d))?\s*", re.DOTALL)
ENDS = {"least": min, "most": max}


def fill_in(text: str, folder: Path) -> str:
    """The text with its numbers.

    Args:
        text: Prose.
        folder: Where the folders of runs lie that it names.

    Raises:
        UserError: If a number cannot be read.
    """
    return EXPRESSION.sub(partial(_number, folder), text)


def _number(folder: Path, found: re.Match) -> str:
    form = FORM.fullmatch(found[1])
    try:
        words = shlex.split(form["sum"])
        value, text = _lead(words[1:], folder, form) if words[:1] == ["lead"] else _sum(words, folder, form)
    except (UserError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"the number {found[0]} cannot be read (got {error}); see the head of fedcli/results/prose.py, and mend it."
        ) from error
    if value < 0 and not form["sign"]:
        raise UserError(f"the number {found[0]} is negative (got {value:g}); turn the sentence round.")
    return text


def _lead(words: list[str], folder: Path, form: re.Match) -> tuple[float, str]:
    """By how much one group of runs is ahead of another in a metric, and the same as text with interval and seeds."""
    if len(words) != 3:
        raise ValueError("a lead is of a metric and two groups of runs, and stands alone")
    what, first, second = words
    metric, sides = find_metric(what), [_named(runs, folder) for runs in (first, second)]
    if any(len({one["seed"] for one in side}) < len(side) for side in sides):
        raise ValueError("two runs of one seed")
    found = lead(metric, *sides)
    if found is None:
        raise ValueError("no seed that both have")
    if form["decimals"] and (own := DECIMALS.get(metric.unit, 1)) != int(form["decimals"]):
        raise ValueError(f"a lead in {metric.name} has {own} decimals")
    return found.mean, difference_text(metric, found)


def _sum(words: list[str], folder: Path, form: re.Match) -> tuple[float, str]:
    """The sum of terms, and the same as text."""
    value, decimals = 0, 0
    for sign, term in _terms(words):
        one, own = _value(term, folder)
        value, decimals = (value + one if sign == "+" else value - one), max(decimals, own)
    decimals = int(form["decimals"] or decimals)
    if decimals or isinstance(value, int) or form["decimals"]:
        return value, f"{value:{form['sign'] or ''},.{decimals}f}"
    return value, f"{value:g}"  # 0.01, 1e-05


def _terms(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """The terms with their signs."""
    sign, term = "+", []
    for word in [*words, "+"]:
        if word not in ("+", "-"):
            term.append(word)
            continue
        if not term:
            raise ValueError("no number before a sign")
        yield sign, term
        sign, term = word, []


def _value(term: list[str], folder: Path) -> tuple[float, int]:
    """A term's number and its usual decimals."""
    name, *rest = term
    if not rest:
        return int(name), 0
    if name == "printed":
        table, row, column = rest
        return printed(find_table(table))[row, column]["mean"], DECIMALS["percent"]
    if name in ("rounds-ahead", "largest-gap"):
        first, second = (_accuracies(_named(runs, folder)) for runs in rest)
        gaps = [first[place] - second[place] for place in first.keys() & second.keys()]
        if not gaps:
            raise ValueError("no round that both have tested")
        if name == "largest-gap":
            return 100 * max(map(abs, gaps)), DECIMALS["percent"]
        return sum(gap > 0 for gap in gaps), 0
    what, runs = rest if name in ENDS else (name, *rest)
    records = _named(runs, folder)
    if what.partition(":")[0] in METRICS:
        metric = find_metric(what)
        values = metric.values(records)
        if not values:
            raise ValueError("no run that has it")
        return ENDS.get(name, fmean)(values), DECIMALS.get(metric.unit, 0)
    values = [_at(record, what) for record in records]
    if name in ENDS:
        return ENDS[name](one for value in values for one in (value if isinstance(value, list) else [value])), 0
    if any(value != values[0] for value in values):
        raise ValueError(f"different values, {', '.join(map(str, values))}")
    return (len(values[0]) if isinstance(values[0], list) else values[0]), 0


def _named(runs: str, folder: Path) -> list[dict[str, Any]]:
    """The records of the runs that one or several names stand for."""
    return find_records([folder / one for one in runs.split(",")])


def _at(record: dict[str, Any], path: str) -> Any:
    """What stands in a record, or in its protocol, at a path with dots."""
    first, _, name = path.partition(".")
    if first == "protocol":
        return protocols()[record["protocol"]].settings[name]
    return reduce(lambda part, key: part[key], path.split("."), record)


def _accuracies(records: list[dict[str, Any]]) -> dict[tuple[int, int], float]:
    """Test accuracies by seed and round."""
    tested = ((record["seed"], entry) for record in records for entry in record["rounds"])
    return {(seed, one["round"]): one["test_accuracy"] for seed, one in tested if one["test_accuracy"] is not None}
