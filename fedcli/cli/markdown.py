"""Markdown on a terminal."""

from typing import Any, ClassVar

from rich.markdown import Markdown, TableDataElement


class Cell(TableDataElement):
    """A cell of a table, which is broken into lines where it has no room."""

    def __init__(self, **traits: Any):
        """Make a cell as rich does."""
        super().__init__(**traits)
        self.content.overflow = "fold"


class WholeCells(Markdown):
    """Markdown as rich shows it, with tables whose cells are never cut."""

    elements: ClassVar[dict[str, Any]] = {**Markdown.elements, "th_open": Cell, "td_open": Cell}
