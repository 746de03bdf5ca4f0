"""Figures from records and from finished runs."""

from importlib import import_module
from typing import Any

from fedcli.errors import unknown
from fedcli.userfiles import from_file, is_from_file


def charts() -> dict[str, Any]:
    """The kinds of figures of runs by name, each a `fedcli.figures.plots.Chart`."""
    for module in ("curves", "features", "matrices"):  # which add theirs as they are imported; here, as that is slow
        import_module(f"fedcli.figures.{module}")
    return import_module("fedcli.figures.plots").CHARTS


def find_chart(name: str) -> Any:
    """The kind of figure of that name, or a user's own, `./file.py:NAME`, which is given the records.

    Raises:
        UserError: If there is none; of a user's own also when it is drawn and does not return a figure.
    """
    known = charts()
    if not is_from_file(name):
        if name not in known:
            raise unknown("chart", name, known, f"there are {', '.join(known)}, and your own by ./file.py:NAME.")
        return known[name]
    plots, own = import_module("fedcli.figures.plots"), from_file(name, "chart")

    def draw(records: list[dict]) -> plots.Figure:
        figure = own(records)
        if not isinstance(figure, plots.Figure):
            raise own.refuse(f"is no chart (it returned {type(figure).__name__})", "return a matplotlib Figure")
        return figure

    return plots.Chart(draw, own.name)
