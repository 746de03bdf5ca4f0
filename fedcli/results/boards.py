"""Mixed runs: which are shown, and in which boards, one for each protocol and data set.

Numbers of two protocols or data sets cannot be compared, so they share no table and no panel.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fedcli.errors import UserError, unknown
from fedcli.results.render import Sheet
from fedcli.results.tables import sheet

LONG = 40  # characters of settings from which they are numbered and listed below their table


def select(records: Iterable[dict], methods: Sequence[str] = (), datasets: Sequence[str] = ()) -> list[dict]:
    """The records of these methods and data sets; of all where none is named. Case does not count.

    Raises:
        UserError: If no record is of one of those that are named.
    """
    kept = list(records)
    for key, names, kind in (("method", methods, "method"), ("dataset", datasets, "data set")):
        there = {record[key].lower(): record[key] for record in kept}
        for name in names:
            if name.lower() not in there:
                found = ", ".join(dict.fromkeys(there.values()))
                raise unknown(f"{kind} among the runs", name, there, f"there are {found}.")
        kept = [record for record in kept if not names or record[key].lower() in {name.lower() for name in names}]
    return kept


def boards(records: Iterable[dict]) -> dict[str, list[dict]]:
    """The records by protocol and data set, in the order in which these appear."""
    found: dict[str, list[dict]] = {}
    for record in records:
        found.setdefault(f"{record['protocol']}, {record['dataset']}", []).append(record)
    return found


def sheets(
    records: Iterable[dict], metrics: Sequence[str] = (), columns: Sequence[str] = (), title: str = ""
) -> list[Sheet]:
    """A table for each board, see `fedcli.results.tables.sheet`; settings that are long are numbered.

    Args:
        records: The runs.
        metrics: Names of metrics that get a column of their own.
        columns: Parts of the titles of the columns that are shown, in this order; all where empty.
        title: Of the tables.

    Raises:
        UserError: If there is no record, or no table has such a column.
    """
    records = list(records)
    parts = boards(records) or {"": records}
    made = [
        replace(_numbered(sheet(own, metrics)), title=", ".join(filter(None, (title, name if len(parts) > 1 else ""))))
        for name, own in parts.items()
    ]
    common = set.intersection(*(set(one.notes) for one in made))  # said once, below the last table
    made[:-1] = [replace(one, notes=[note for note in one.notes if note not in common]) for one in made[:-1]]
    titles = list(dict.fromkeys(column for one in made for column in one.columns))
    for text in columns:
        if not any(text.lower() in column.lower() for column in titles):
            raise UserError(f"no column has '{text}' in its title; there are: {', '.join(titles)}.")
    return [_with_columns(one, columns) for one in made] if columns else made


def _numbered(one: Sheet) -> Sheet:
    """The table with a number in the place of its settings, which stand below it, where one of them is long."""
    if "Settings" not in one.columns:
        return one
    place = one.columns.index("Settings")
    texts = dict.fromkeys(line[place][0] for block in one.blocks for line in block)
    if max(map(len, texts)) <= LONG:
        return one
    numbers = {text: f"[{number}]" for number, text in enumerate(filter(None, texts), 1)} | {"": ""}
    blocks = [
        [[*line[:place], (numbers[line[place][0]], line[place][1]), *line[place + 1 :]] for line in block]
        for block in one.blocks
    ]
    return replace(one, blocks=blocks, notes=[*(f"{n} {text}" for text, n in numbers.items() if text), *one.notes])


def _with_columns(one: Sheet, columns: Sequence[str]) -> Sheet:
    """The table with the columns whose titles begin with one of these texts, or else have it, in the texts' order."""
    titles = [title.lower() for title in one.columns]
    found = (
        [place for place, title in enumerate(titles) if title.startswith(text.lower())]
        or [place for place, title in enumerate(titles) if text.lower() in title]
        for text in columns
    )
    places = list(dict.fromkeys(place for own in found for place in own))
    if not places:
        raise UserError(f"the table '{one.title}' has none of these columns (got {', '.join(columns)}); name others.")
    blocks = [[[line[place] for place in places] for line in block] for block in one.blocks]
    texts = [place < one.numbers for place in places]
    numbers = texts.index(False) if False in texts else len(texts)
    return replace(one, columns=[one.columns[place] for place in places], blocks=blocks, numbers=numbers)
