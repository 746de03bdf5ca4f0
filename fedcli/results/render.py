"""A table of texts as Markdown, LaTeX or CSV."""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from fedcli.errors import printable

MISSING = "–"
# Of GitHub's Markdown, with its HTML and mathematics.
_MARKUP = re.compile(r"[\\`*<>$|~]|\[(?=\^|[^\]]*\][(\[:])|(?<!\w)_|_(?!\w)|&(?=#?\w+;)")
_FORMULA = re.compile(r"^(?=[=+\-@\t\r])")  # for a spreadsheet; an apostrophe before it makes it a text
_TEX = str.maketrans({
    **{character: "\\" + character for character in "&%$#_{}"},
    "`": "", "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    MISSING: "--",
})  # fmt: skip


class CellIndex(NamedTuple):
    """Where a cell stands in a table, from 0."""

    line: int
    column: int


@dataclass(frozen=True)
class Sheet:
    """A table that can be written."""

    columns: Sequence[str]  # titles
    lines: Sequence[Sequence[str]]  # the texts of its cells
    first_number_column: int  # the index of the first one that holds numbers, which stand to the right from there on
    values: Sequence[dict[str, Any]] = ()  # the same with full precision, a line of the CSV each
    title: str = ""
    subject: str = ""  # what the whole table is of, in a sentence
    notes: Sequence[str] = ()  # what a reader must know of the numbers
    is_markdown: bool = False  # whether its texts are Markdown already
    caption: str = ""  # of a table in a paper, which stands in a `table` with a label
    label: str = ""
    best: Collection[CellIndex] = frozenset()  # the cells that stand out among those they are compared with


def render(sheet: Sheet, format: str = "markdown") -> str:
    """A table as "markdown", "latex" or "csv", which has the values."""
    if format == "csv":
        return csv_of(pd.DataFrame(sheet.values, dtype=object))
    return _latex(sheet) if format == "latex" else _markdown(sheet)


def _markdown(sheet: Sheet) -> str:
    escape = printable if sheet.is_markdown else markdown
    rows = _marked_lines(sheet, escape, "**{}**")
    table = github([*map(markdown, sheet.columns)], rows, sheet.first_number_column)
    notes = "\n".join(f"- {note}" for note in sheet.notes)
    heading = f"### {sheet.title}" if sheet.title else ""
    parts = [heading, sheet.subject, table, notes]
    return "\n\n".join(filter(None, parts)) + "\n"


def _latex(sheet: Sheet) -> str:
    r"""A `tabular` for `\usepackage{booktabs}`, in a `table` if it has a caption.

    A line without a text in the first column belongs to the one above.
    """
    has_blocks = not all(line[0] for line in sheet.lines)
    alignment = "l" * sheet.first_number_column + "r" * (len(sheet.columns) - sheet.first_number_column)
    lines = [f"% {printable(text)}".replace("*", "") for text in (sheet.title, sheet.subject) if text]
    lines.append(r"% needs \usepackage{booktabs}")
    if sheet.caption:
        lines += [r"\begin{table}", r"\centering", rf"\caption{{{_tex(sheet.caption)}}}"]
        lines += [rf"\label{{{sheet.label}}}", r"\smallskip"]
    lines += [rf"\begin{{tabular}}{{{alignment}}}", r"\toprule"]
    lines.append(" & ".join(map(_tex, sheet.columns)) + r" \\")
    marked_lines = _marked_lines(sheet, _tex, r"\textbf{{{}}}")
    for number, marked_line in enumerate(marked_lines):
        begins_block = has_blocks and sheet.lines[number][0]
        if number == 0 or begins_block:
            lines.append(r"\midrule")
        lines.append(" & ".join(marked_line) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    if sheet.caption:
        lines.append(r"\end{table}")
    notes = [f"% {printable(note)}" for note in sheet.notes]
    return "\n".join([*lines, *notes]) + "\n"


def _marked_lines(sheet: Sheet, escape: Callable[[str], str], bold: str) -> list[list[str]]:
    """The escaped texts of the cells, in bold if they stand out."""
    marked_lines = []
    for number, line in enumerate(sheet.lines):
        marked_line = []
        for column, text in enumerate(line):
            escaped = escape(text)
            marked_line.append(bold.format(escaped) if CellIndex(number, column) in sheet.best else escaped)
        marked_lines.append(marked_line)
    return marked_lines


def csv_of(table: pd.DataFrame) -> str:
    """A CSV in which each text is on one line and none is a formula to a spreadsheet, also above a column."""
    texts: set[str] = set()
    for _, column in table.items():
        texts.update(value for value in column if isinstance(value, str))
    plain = {text: _plain(text) for text in texts if _plain(text) != text}
    return table.replace(plain).rename(columns=_plain).to_csv(index=False, lineterminator="\n")


def _plain(text: str) -> str:
    return _FORMULA.sub("'", printable(text))


def github(columns: Sequence[str], rows: Sequence[Sequence[str]], first_number_column: int | None = None) -> str:
    """A GitHub table with these titles and cells; the columns from `first_number_column` on stand to the right."""
    num_texts = len(columns) if first_number_column is None else first_number_column
    rules = ["---"] * num_texts + ["---:"] * (len(columns) - num_texts)
    lines = [columns, rules]
    for row in rows:
        lines.append([re.sub(r"(?<!\\)\|", r"\|", cell) for cell in row])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown(text: str) -> str:
    """A text for Markdown on one line, without markup, HTML or mathematics."""
    return _MARKUP.sub(r"\\\g<0>", printable(text))


def _tex(text: str) -> str:
    """A text for LaTeX, with minus signs and percentages on one line, without Markdown's marks of code."""
    escaped = printable(text).translate(_TEX)
    escaped = re.sub(r"(?<=\d) (?=\\%)", r"\\,", escaped)
    return re.sub(r"(?<![\w-])-(?=\d)", "$-$", escaped)


def between_marks(text: str, name: str, content: str) -> str:
    """A text with `content` between its marks `<!-- NAME: written by 'make tables' -->` and `… end -->`, if any."""
    marks = rf"(?s)(<!-- {re.escape(name)}: written by 'make tables' -->).*?(<!-- {re.escape(name)}: end -->)"
    return re.sub(marks, lambda match: f"{match[1]}\n\n{content}\n\n{match[2]}", text, count=1)
