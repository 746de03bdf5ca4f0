"""A table of texts as Markdown, LaTeX or CSV."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from fedcli.errors import printable

MISSING = "–"
WRAPPED = 40  # characters; a column with longer texts is set in lines
Line = Sequence[tuple[str, str]]  # of each cell its text and its mark, "best" or ""
# Of GitHub's Markdown, with its HTML and mathematics.
_MARKUP = re.compile(r"[\\`*<>$|~]|\[(?=\^|[^\]]*\][(\[:])|(?<!\w)_|_(?!\w)|&(?=#?\w+;)")
_FORMULA = re.compile(r"^(?=[=+\-@\t\r])")  # for a spreadsheet; an apostrophe before it makes it a text
_TEX = str.maketrans(
    {character: "\\" + character for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", MISSING: "--"}
)


@dataclass(frozen=True)
class Sheet:
    """A table that can be written.

    Attributes:
        columns: Titles.
        blocks: Its lines, those that belong together in one block.
        numbers: The first of the columns that hold numbers, which stand to the right.
        values: The same with full precision, a line of the CSV each.
        title: Of the table; empty for none.
        setting: What the whole table is of, in a sentence; empty for nothing.
        notes: What a reader must know of the numbers.
        details: Columns that the LaTeX leaves out.
        marked_up: Whether its texts are Markdown already.
    """

    columns: Sequence[str]
    blocks: Sequence[Sequence[Line]]
    numbers: int
    values: Sequence[dict[str, Any]]
    title: str = ""
    setting: str = ""
    notes: Sequence[str] = ()
    details: Sequence[str] = ()
    marked_up: bool = False

    def select(self, places: Sequence[int]) -> "Sheet":
        """The table with the columns at these places alone, in this order."""
        texts = [place < self.numbers for place in places]
        return replace(
            self,
            columns=[self.columns[place] for place in places],
            blocks=[[[line[place] for place in places] for line in block] for block in self.blocks],
            numbers=texts.index(False) if False in texts else len(texts),
        )


def render(sheet: Sheet, form: str = "markdown") -> str:
    """The text of a table as "markdown", "latex" or "csv", which has the values."""
    if form == "csv":
        return csv_of(pd.DataFrame(sheet.values, dtype=object))
    return _latex(sheet) if form == "latex" else _markdown(sheet)


def _markdown(sheet: Sheet) -> str:
    escape, rows = printable if sheet.marked_up else markdown, []
    for line in (line for block in sheet.blocks for line in block):
        rows.append([f"**{escape(text)}**" if mark else escape(text) for text, mark in line])
    table = "\n".join(github([markdown(column) for column in sheet.columns], rows, sheet.numbers))
    parts = [f"### {sheet.title}" if sheet.title else "", sheet.setting, table]
    parts.append("\n".join(f"- {note}" for note in sheet.notes))
    return "\n\n".join(filter(None, parts)) + "\n"


def _latex(sheet: Sheet) -> str:
    r"""A `tabular`, with a rule between blocks of several lines; it needs `\usepackage{booktabs}`."""
    sheet = sheet.select([place for place, column in enumerate(sheet.columns) if column not in sheet.details])
    all_lines = [line for block in sheet.blocks for line in block]
    longest = [max((len(line[place][0]) for line in all_lines), default=0) for place in range(sheet.numbers)]
    form = "".join(r"p{0.3\linewidth}" if length > WRAPPED else "l" for length in longest)
    form += "r" * (len(sheet.columns) - sheet.numbers)
    lines = [f"% {printable(text)}".replace("*", "") for text in (sheet.title, sheet.setting) if text]
    lines += [r"% needs \usepackage{booktabs}", rf"\begin{{tabular}}{{{form}}}", r"\toprule"]
    lines.append(" & ".join(map(_tex, sheet.columns)) + r" \\")
    ruled = len(all_lines) > len(sheet.blocks)
    for number, block in enumerate(sheet.blocks):
        lines += [r"\midrule"] if ruled or number == 0 else []
        for line in block:
            cells = [(_tex(text, sheet.marked_up), mark) for text, mark in line]
            lines.append(" & ".join(rf"\textbf{{{text}}}" if mark else text for text, mark in cells) + r" \\")
    notes = (f"% {printable(note)}" for note in sheet.notes)
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *notes]) + "\n"


def csv_of(table: pd.DataFrame) -> str:
    """A CSV in which no text is a formula to a spreadsheet; what a row lacks stays empty."""
    return table.replace(_FORMULA, "'", regex=True).to_csv(index=False, lineterminator="\n")


def github(columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: int | None = None) -> list[str]:
    """The lines of a GitHub table with these titles and cells; the columns from `numbers` on stand to the right."""
    texts = len(columns) if numbers is None else numbers
    rules = ["---" if place < texts else "---:" for place in range(len(columns))]
    whole = [[re.sub(r"(?<!\\)\|", r"\|", cell) for cell in row] for row in rows]
    return ["| " + " | ".join(line) + " |" for line in (columns, rules, *whole)]


def markdown(text: str) -> str:
    """A text for Markdown, in which none of it is markup, HTML or mathematics, on one line."""
    return _MARKUP.sub(r"\\\g<0>", printable(text))


def _tex(text: str, marked_up: bool = False) -> str:
    """A text for LaTeX, with a minus sign before a negative number, and Markdown's code in LaTeX's."""
    text = re.sub(r"(?<![\w-])-(?=\d)", "$-$", printable(text).translate(_TEX))
    return re.sub(r"`([^`]*)`", r"\\texttt{\1}", text) if marked_up else text


def between_marks(text: str, name: str, content: str) -> str:
    """A text with `content` between the marks of that name, `<!-- NAME: written by 'make tables' -->` and `… end -->`.

    Without these marks it stays as it is.
    """
    begin, end = f"<!-- {name}: written by 'make tables' -->", f"<!-- {name}: end -->"
    before, first, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    return f"{before}{begin}\n\n{content}\n\n{end}{after}" if first and last else text
