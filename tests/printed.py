"""Whether every number that a paper prints has a place."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from fedcli.registry import not_planned


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
