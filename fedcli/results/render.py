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

    row: int
    column: int


@dataclass(frozen=True)
class TextTable:
    """A table that can be written."""

    columns: Sequence[str]  # titles
    rows: Sequence[Sequence[str]]  # the texts of its cells
    first_number_column: int  # the index of the first one that holds numbers, which stand to the right from there on
    csv_rows: Sequence[dict[str, Any]] = ()  # what the CSV has instead, in full precision: a run or a cell each
    title: str = ""
    subject: str = ""  # what the whole table is of, in a sentence
    notes: Sequence[str] = ()  # what a reader must know of the numbers
    is_markdown: bool = False  # whether its texts are Markdown already
    caption: str = ""  # of a table in a paper, which stands in LaTeX's `table`
    latex_label: str = ""  # of that `table`
    best: Collection[CellIndex] = frozenset()  # the cells that stand out among those they are compared with
    block_starts: Collection[int] = ()  # the rows, from 0, above which LaTeX has a rule, since each begins a block


def render(table: TextTable, format: str = "markdown") -> str:
    """A table as "markdown", "latex" or "csv", which has rows of its own."""
    if format == "csv":
        return render_csv(pd.DataFrame(table.csv_rows, dtype=object))
    return _to_latex(table) if format == "latex" else _to_markdown(table)


def _to_markdown(table: TextTable) -> str:
    escape = printable if table.is_markdown else escape_markdown
    rows = _mark_rows(table, escape, "**{}**")
    text = render_github_table([*map(escape_markdown, table.columns)], rows, table.first_number_column)
    notes = "\n".join(f"- {note}" for note in table.notes)
    heading = f"### {table.title}" if table.title else ""
    parts = [heading, table.subject, text, notes]
    return "\n\n".join(filter(None, parts)) + "\n"


def _to_latex(table: TextTable) -> str:
    r"""A `tabular` for `\usepackage{booktabs}`, in a `table` if it has a caption."""
    alignment = "l" * table.first_number_column + "r" * (len(table.columns) - table.first_number_column)
    lines = [f"% {printable(text)}".replace("*", "") for text in (table.title, table.subject) if text]
    lines.append(r"% needs \usepackage{booktabs}")
    if table.caption:
        lines += [r"\begin{table}", r"\centering", rf"\caption{{{_escape_tex(table.caption)}}}"]
        lines += [rf"\label{{{table.latex_label}}}", r"\smallskip"]
    lines += [rf"\begin{{tabular}}{{{alignment}}}", r"\toprule"]
    lines.append(" & ".join(map(_escape_tex, table.columns)) + r" \\")
    marked_rows = _mark_rows(table, _escape_tex, r"\textbf{{{}}}")
    for number, marked_row in enumerate(marked_rows):
        if number == 0 or number in table.block_starts:
            lines.append(r"\midrule")
        lines.append(" & ".join(marked_row) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    if table.caption:
        lines.append(r"\end{table}")
    notes = [f"% {printable(note)}" for note in table.notes]
    return "\n".join([*lines, *notes]) + "\n"


def _mark_rows(table: TextTable, escape: Callable[[str], str], bold: str) -> list[list[str]]:
    """The escaped texts of the cells, in bold if they stand out."""
    marked_rows = []
    for number, row in enumerate(table.rows):
        marked_row = []
        for column, text in enumerate(row):
            escaped = escape(text)
            marked_row.append(bold.format(escaped) if CellIndex(number, column) in table.best else escaped)
        marked_rows.append(marked_row)
    return marked_rows


def render_csv(table: pd.DataFrame) -> str:
    """A CSV in which each text is on one line and none is a formula to a spreadsheet, also above a column."""
    texts: set[str] = set()
    for _, column in table.items():
        texts.update(value for value in column if isinstance(value, str))
    plain = {text: _make_plain(text) for text in texts if _make_plain(text) != text}
    return table.replace(plain).rename(columns=_make_plain).to_csv(index=False, lineterminator="\n")


def _make_plain(text: str) -> str:
    return _FORMULA.sub("'", printable(text))


def render_github_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], first_number_column: int | None = None
) -> str:
    """A GitHub table with these titles and cells; the columns from `first_number_column` on stand to the right."""
    num_texts = len(columns) if first_number_column is None else first_number_column
    rules = ["---"] * num_texts + ["---:"] * (len(columns) - num_texts)
    lines = [columns, rules]
    for row in rows:
        lines.append([re.sub(r"(?<!\\)\|", r"\|", cell) for cell in row])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def escape_markdown(text: str) -> str:
    """A text for Markdown on one line, without markup, HTML or mathematics."""
    return _MARKUP.sub(r"\\\g<0>", printable(text))


def _escape_tex(text: str) -> str:
    r"""A text for LaTeX, with minus signs and percentages on one line, without Markdown's marks of code.

    `\\` and `\midrule` would take a `[` or `*` that follows them for their argument, so a leading one stands in braces.
    """
    escaped = printable(text).translate(_TEX)
    escaped = re.sub(r"^(\s*)([\[*])", r"\1{\2}", escaped)
    escaped = re.sub(r"(?<=\d) (?=\\%)", r"\\,", escaped)
    return re.sub(r"(?<![\w-])-(?=\d)", "$-$", escaped)


def replace_between_marks(text: str, name: str, content: str) -> str:
    """A text with `content` between its marks `<!-- NAME: written by 'make tables' -->` and `… end -->`, if any."""
    marks = rf"(?s)(<!-- {re.escape(name)}: written by 'make tables' -->).*?(<!-- {re.escape(name)}: end -->)"
    return re.sub(marks, lambda match: f"{match[1]}\n\n{content}\n\n{match[2]}", text, count=1)
