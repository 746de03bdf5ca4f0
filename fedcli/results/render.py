"""A table of texts as Markdown, LaTeX or CSV."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedcli.errors import printable

MISSING = "–"
Line = Sequence[tuple[str, str]]  # of each cell its text and its mark: "best" or ""
MARKS = {
    "markdown": {"best": "**{}**", "": "{}"},
    "latex": {"best": r"\textbf{{{}}}", "": "{}"},
}
SPECIAL = {character: "\\" + character for character in "&%$#_{}"}
SPECIAL |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
SPECIAL |= {"±": r"$\pm$", MISSING: "--"}
WRAPPED = 40  # characters; a column with longer texts is set in lines
# Of GitHub's Markdown, with its HTML and mathematics.
_MARKUP = re.compile(r"[\\`*<>$|~]|\[(?=\^|[^\]]*\][(\[:])|(?<!\w)_|_(?!\w)|&(?=#?\w+;)")


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


def render(sheet: Sheet, form: str = "markdown") -> str:
    """The text of a table in one of `FORMS`."""
    return FORMS[form](sheet)


def _markdown(sheet: Sheet) -> str:
    lines = [line for block in sheet.blocks for line in block]
    shown = printable if sheet.marked_up else markdown
    rows = [[MARKS["markdown"][mark].format(shown(text)) for text, mark in line] for line in lines]
    above = [f"### {sheet.title}"] if sheet.title else []
    above += [sheet.setting] if sheet.setting else []
    table = "\n".join(github([markdown(column) for column in sheet.columns], rows, sheet.numbers))
    return "\n\n".join([*above, table, "\n".join(f"- {note}" for note in sheet.notes)]).rstrip() + "\n"


def _latex(sheet: Sheet) -> str:
    r"""A `tabular`, with a rule between blocks of several lines; it needs `\usepackage{booktabs}`."""
    kept = [place for place, column in enumerate(sheet.columns) if column not in sheet.details]
    shown = _code if sheet.marked_up else _tex

    def kind(place: int) -> str:
        if place >= sheet.numbers:
            return "r"
        longest = max((len(line[place][0]) for block in sheet.blocks for line in block), default=0)
        return "l" if longest <= WRAPPED else r"p{0.3\linewidth}"

    lines = [f"% {printable(text)}".replace("*", "") for text in (sheet.title, sheet.setting) if text]
    lines += [r"% needs \usepackage{booktabs}"]
    lines += [rf"\begin{{tabular}}{{{''.join(map(kind, kept))}}}", r"\toprule"]
    lines.append(" & ".join(_tex(sheet.columns[place]) for place in kept) + r" \\")
    ruled = any(len(block) > 1 for block in sheet.blocks)
    for number, block in enumerate(sheet.blocks):
        lines += [r"\midrule"] if ruled or number == 0 else []
        for line in block:
            cells = (MARKS["latex"][line[place][1]].format(shown(line[place][0])) for place in kept)
            lines.append(" & ".join(cells) + r" \\")
    notes = (f"% {printable(note)}" for note in sheet.notes)
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *notes]) + "\n"


def _csv(sheet: Sheet) -> str:
    """One line for each of the values; those that a line lacks stay empty."""
    out = io.StringIO()
    columns = list(dict.fromkeys(column for row in sheet.values for column in row))
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: csv_cell(value) for key, value in row.items()} for row in sheet.values)
    return out.getvalue()


def csv_cell(value: Any) -> Any:
    """A cell that no spreadsheet takes for a formula: a text that begins like one gets an apostrophe before it."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


FORMS = {"markdown": _markdown, "csv": _csv, "latex": _latex}


def github(columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: int | None = None) -> list[str]:
    """The lines of a GitHub table with these titles and cells; the columns from `numbers` on stand to the right."""
    texts = len(columns) if numbers is None else numbers
    rules = ["---" if place < texts else "---:" for place in range(len(columns))]
    whole = [[re.sub(r"(?<!\\)\|", r"\|", cell) for cell in row] for row in rows]
    lines = [columns, rules, *whole]
    return ["| " + " | ".join(line) + " |" for line in lines]


def markdown(text: str) -> str:
    """A text for Markdown, in which none of it is markup, HTML or mathematics, on one line."""
    return _MARKUP.sub(r"\\\g<0>", printable(text))


def _tex(text: str) -> str:
    """The text with LaTeX's special characters escaped, and a minus sign before a negative number."""
    text = printable(text)
    return re.sub(r"(?<![\w-])-(?=\d)", "$-$", text.translate(str.maketrans(SPECIAL)))


def _code(text: str) -> str:
    """Markdown's code in LaTeX's, the rest as a text."""
    return re.sub(r"`([^`]*)`", r"\\texttt{\1}", _tex(text))


def between_marks(text: str, name: str, content: str) -> str:
    """A text with `content` between the marks of that name, `<!-- NAME: written by 'make tables' -->` and `… end -->`.

    Without these marks it stays as it is.
    """
    begin, end = f"<!-- {name}: written by 'make tables' -->", f"<!-- {name}: end -->"
    before, first, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    return f"{before}{begin}\n\n{content}\n\n{end}{after}" if first and last else text
