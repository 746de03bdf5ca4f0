"""A table of texts as Markdown, LaTeX or CSV."""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from fedcli.errors import printable

MISSING = "–"
# Of GitHub's Markdown, with its HTML and mathematics.
_MARKUP = re.compile(
    r"""
    [\\`*<>$|~]
    | (?<![^\W_])_ | _(?![^\W_])                        # emphasis, which does not begin or end within a word
    | \[(?=\^) | \](?=[(\[:])                           # a footnote, and what ends the text of a link
    | &(?=\#?\w+;)                                      # a character of HTML
    | ^[-+](?=\s|$) | ^-(?=[-\s]+$)                     # an item of a list, and a rule
    | ^\[(?=[ xX]\](?:\s|$))                            # the box of a task
    | ^\#(?=\#{0,5}(?:\s|$)) | (?<=\s)\#(?=\#*$)        # the begin and the end of a heading
    """,
    re.VERBOSE,
)
_ITEM_NUMBER = re.compile(r"^(\d{1,9})(?=[.)](?:\s|$))")  # of a list
_CODE_OR_ESCAPE = re.compile(r"(?P<marks>`+)(?P<code>.*?[^`])(?P=marks)(?!`)|\\(?P<escaped>[!-/:-@\[-`{-~])")
_FORMULA = re.compile(r"^(?=[=+\-@\t\r])")  # for a spreadsheet; an apostrophe before it makes it a text
_BREAK = "\0"  # between two characters that LaTeX would draw as one; `printable` leaves no text with it
_TEX = str.maketrans({
    **{character: "\\" + character for character in "&%$#_{}"},
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "`": r"\textasciigrave{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$",
    MISSING: "--",
    _BREAK: "{}",
})  # fmt: skip


class CellIndex(NamedTuple):
    """The row and the column of a cell in a table; both count from 0."""

    row: int
    column: int


@dataclass(frozen=True)
class TextTable:
    """A table of texts, with what is written around it.

    All texts are plain, and `render` escapes them for each format.

    Attributes:
        titles: The titles of the columns.
        rows: The texts of the cells, a sequence for each row.
        number_columns: The indices of the columns of numbers, which stand to the right.
        csv_rows: The rows of the CSV, which has other columns, with numbers in full precision.
        title: The title; empty for none.
        subject: A sentence on what the whole table is of; empty for none.
        is_warning: Whether the subject warns the reader, and is in bold.
        notes: Sentences on what a reader must know of the numbers.
        is_markdown: Whether the texts of cells and notes are Markdown already instead, as with code.
        caption: The caption in a paper; if there is one, the table stands in LaTeX's `table`.
        latex_label: The label of that `table`.
        best: The cells in bold.
        block_starts: The indices of the rows that begin a block, above which LaTeX has a rule.
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    number_columns: Collection[int]
    csv_rows: Sequence[dict[str, Any]] = ()
    title: str = ""
    subject: str = ""
    is_warning: bool = False
    notes: Sequence[str] = ()
    is_markdown: bool = False
    caption: str = ""
    latex_label: str = ""
    best: Collection[CellIndex] = frozenset()
    block_starts: Collection[int] = ()


def render(table: TextTable, format: str = "markdown") -> str:
    """Renders a table as a text in a `format`: "markdown", "latex" or "csv"."""
    if format == "csv":
        return render_csv(pd.DataFrame(table.csv_rows, dtype=object))
    return _render_latex(table) if format == "latex" else _render_markdown(table)


def _render_markdown(table: TextTable) -> str:
    escape = printable if table.is_markdown else escape_markdown
    rows = _mark_rows(table, escape, "**{}**")
    text = render_github_table([*map(escape_markdown, table.titles)], rows, table.number_columns)
    notes = "\n".join(f"- {escape(note)}" for note in table.notes)
    heading = f"### {escape_markdown(table.title)}" if table.title else ""
    subject = escape_markdown(table.subject)
    if subject and table.is_warning:
        subject = f"**{subject}**"
    parts = [heading, subject, text, notes]
    return "\n\n".join(filter(None, parts)) + "\n"


def _render_latex(table: TextTable) -> str:
    r"""Renders a `tabular` for `\usepackage{booktabs}`, in a `table` if it has a caption."""
    alignment = "".join("r" if index in table.number_columns else "l" for index in range(len(table.titles)))
    read = _read_markdown if table.is_markdown else str
    lines = [f"% {printable(text)}" for text in (table.title, table.subject) if text]
    lines.append(r"% needs \usepackage{booktabs}")
    if table.caption:
        lines += [r"\begin{table}", r"\centering", rf"\caption{{{_escape_tex(table.caption)}}}"]
        lines += [rf"\label{{{table.latex_label}}}", r"\smallskip"]
    lines += [rf"\begin{{tabular}}{{{alignment}}}", r"\toprule"]
    lines.append(" & ".join(map(_escape_tex, table.titles)) + r" \\")
    marked_rows = _mark_rows(table, lambda text: _escape_tex(read(text)), r"\textbf{{{}}}")
    for number, marked_row in enumerate(marked_rows):
        if number == 0 or number in table.block_starts:
            lines.append(r"\midrule")
        lines.append(" & ".join(marked_row) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    if table.caption:
        lines.append(r"\end{table}")
    notes = [f"% {printable(read(note))}" for note in table.notes]
    return "\n".join([*lines, *notes]) + "\n"


def _mark_rows(table: TextTable, escape: Callable[[str], str], bold: str) -> list[list[str]]:
    """Escapes the texts of the cells and marks those of the best cells, which `bold` formats."""
    marked_rows = []
    for number, row in enumerate(table.rows):
        marked_row = []
        for column, text in enumerate(row):
            escaped = escape(text)
            marked_row.append(bold.format(escaped) if CellIndex(number, column) in table.best else escaped)
        marked_rows.append(marked_row)
    return marked_rows


def render_csv(table: pd.DataFrame) -> str:
    """Renders a table as CSV in which each text is on one line and no text or title is a formula to a spreadsheet."""
    texts: set[str] = set()
    for _, column in table.items():
        texts.update(value for value in column if isinstance(value, str))
    plain = {text: _make_plain(text) for text in texts if _make_plain(text) != text}
    return table.replace(plain).rename(columns=_make_plain).to_csv(index=False, lineterminator="\n")


def _make_plain(text: str) -> str:
    return _FORMULA.sub("'", printable(text))


def render_github_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], number_columns: Collection[int] = ()
) -> str:
    """Renders a table in GitHub's Markdown.

    Args:
        columns: The titles of the columns.
        rows: The texts of the cells, in Markdown.
        number_columns: The indices of the columns of numbers, which stand to the right.
    """
    rules = ["---:" if index in number_columns else "---" for index in range(len(columns))]
    lines = [columns, rules]
    for row in rows:
        lines.append([re.sub(r"(?<!\\)\|", r"\|", cell) for cell in row])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def escape_markdown(text: str) -> str:
    """Escapes a text for Markdown: on one line, without markup, HTML or mathematics.

    Blanks at its ends, which Markdown does not show and may take for an indentation, are left out.
    """
    escaped = _MARKUP.sub(r"\\\g<0>", printable(text).strip())
    return _ITEM_NUMBER.sub(r"\1\\", escaped)


def format_code(text: str) -> str:
    """Formats a text as code in Markdown, on one line, between more backquotes than it has in a row."""
    code = printable(text)
    longest = max(map(len, re.findall("`+", code)), default=0)
    marks = "`" * (longest + 1)
    return f"{marks} {code} {marks}" if longest else f"{marks}{code}{marks}"


def _read_markdown(markdown: str) -> str:
    """Returns the plain text of what `escape_markdown` and `format_code` have written."""
    return _CODE_OR_ESCAPE.sub(lambda match: match["escaped"] or match["code"].strip(), markdown)


def _escape_tex(text: str) -> str:
    r"""Escapes a text for LaTeX, with minus signs and percentages on one line.

    `\\` and `\midrule` would take a `[` or `*` that follows them for their argument, so a leading one stands in braces.
    """
    without_ligatures = re.sub(r"([-',])(?=\1)", rf"\1{_BREAK}", printable(text))
    escaped = without_ligatures.translate(_TEX)
    escaped = re.sub(r"^(\s*)([\[*])", r"\1{\2}", escaped)
    escaped = re.sub(r"(?<=\d) (?=\\%)", r"\\,", escaped)
    return re.sub(r"(?<![\w-])(?<!-\{\})-(?=\d)", "$-$", escaped)


def replace_between_marks(text: str, name: str, content: str) -> str:
    """Puts `content` between a text's marks `<!-- NAME: written by 'make tables' -->` and `<!-- NAME: end -->`.

    Returns the text as it is if it has no such marks.
    """
    marks = rf"(?s)(<!-- {re.escape(name)}: written by 'make tables' -->).*?(<!-- {re.escape(name)}: end -->)"
    return re.sub(marks, lambda match: f"{match[1]}\n\n{content}\n\n{match[2]}", text, count=1)
