"""Whether every number that a paper prints has a place, and every table and figure."""

import re
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from fedcli.registry import not_planned

NUMBER = r"(?:\d+|[IVX]+)"
PLACES = re.compile(rf"\b(Table|Fig)(?:ure)?s?\.? ?({NUMBER}(?:(?:, | and | to ){NUMBER})*)")
ROMAN = ("I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", "XI", "XII")


def unaccounted(module: ModuleType, printed: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The numbers a paper prints that belong to no cell of its file and have no reason in `NOT_PLANNED`.

    Args:
        module: The paper's file.
        printed: The paper's part of papers/reported.json, by table.

    Returns:
        Each as "table: row: column".
    """
    planned = {
        (table.reported[1], cell.row, cell.column) for table in module.TABLES for cell in (*table.cells, *table.gains)
    }
    reasons = not_planned(module)
    return [
        f"{table}: {entry['method']}: {entry['column']}"
        for table, content in printed.items()
        for entry in content["rows"]
        if any(isinstance(value, int | float) for value in entry.values())
        and (table, entry["method"], entry["column"]) not in planned
        and reasons.keys().isdisjoint({table, f"{table}: {entry['method']}", f"{table}: {entry['column']}"})
    ]


def unnamed(module: ModuleType, tables: int, figures: int) -> list[str]:
    """The tables and figures of a paper that its file neither plans nor has in `NOT_PLANNED`.

    Args:
        module: The paper's file.
        tables: How many the paper has.
        figures: How many the paper has.

    Returns:
        Each as "Table 1" or "Fig 1".
    """
    planned = (text for table in module.TABLES for text in (table.name, table.title, table.reported[1]))
    named = {place for text in (*planned, *not_planned(module)) for place in _places(text)}
    every = [("Table", number) for number in range(1, tables + 1)]
    every += [("Fig", number) for number in range(1, figures + 1)]
    return [f"{kind} {number}" for kind, number in every if (kind, number) not in named]


def _places(text: str) -> Iterator[tuple[str, int]]:
    """The tables and figures that a text names; those of "Figs. 2 and 4 to 6" are four."""
    for kind, numbers in PLACES.findall(text):
        for first, last in re.findall(rf"({NUMBER})(?: to ({NUMBER}))?", numbers):
            yield from ((kind, number) for number in range(_value(first), _value(last or first) + 1))


def _value(number: str) -> int:
    return int(number) if number.isdigit() else ROMAN.index(number) + 1
