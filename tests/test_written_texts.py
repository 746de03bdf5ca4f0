"""A user's texts stand in tables of every format, and on a terminal, as the user wrote them."""

import csv
import io
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from fedcli import Claim, grid
from fedcli.cli import display
from fedcli.cli.markdown import WholeCells
from fedcli.cli.printing import print_table
from fedcli.errors import printable
from fedcli.results import claim_tables, paper_tables, plans
from fedcli.results.formats import write_tables
from fedcli.results.metrics import find_metric
from fedcli.results.render import CellIndex, TextTable, escape_markdown, format_code, render
from fedcli.results.verdicts import UNDECIDED, Answer, ClaimContext, Comparison, Evidence, Lead, Verdict
from fedcli.runs.progress import Position
from tests.example_records import as_diverged, make_record
from tests.small_tables import RUN_OPTIONS, make_table, with_records

# One text with what has a meaning anywhere in Markdown, LaTeX, HTML or the markup of rich, with a word to find it by.
NASTY = "*_MARK_* a|b <i>\\c [red]d[/red] :tada: __e__ [f [g]](h) $i$ &amp; & `j` ``k --l ''m'' ~~n~~ {%#^o}\np"
SHOWN = printable(NASTY)  # on one line
# Texts with what has a meaning at the begin or the end of a line.
ENDS = ("# a", "a ##", "#", "- a", "+ a", "---", "- -", "12. a", "3)", "[x] a", "[ ]", "> a", "_a_", "a_", "-3 a")
LINKS = ("[a](b)", "![a](b)", "[a][b]", "[^1]", "[a]: b")
TEXTS = (NASTY, *ENDS, *LINKS, "***", "a\\", "a\\|b", "<!-- a", "&#35;", "a\tb\x1b[3m")
BLOCKS = ("heading", "paragraph", "table", "thead", "tbody", "tr", "th", "td", "bullet_list", "list_item", "inline")
LATEX_COMMANDS = {
    "textbackslash": "\\", "textasciitilde": "~", "textasciicircum": "^", "textasciigrave": "`", "textless": "<",
    "textgreater": ">", "textbar": "|",
}  # fmt: skip
LATEX = re.compile(r"\\(?P<command>[a-z]+)\{\}|\\(?P<sign>[&%$#_{}])|\$-\$|\{(?P<group>[\[*]?)\}")


def read_markdown(text):
    """Returns the texts of a page in Markdown, as a reader sees them, in their order.

    Fails where they have any other markup than bold and code.
    """
    texts = []
    for token in MarkdownIt().enable(["table", "strikethrough"]).parse(text):
        assert token.type.startswith(BLOCKS)
        if token.type == "inline":
            assert {part.type for part in token.children} <= {"text", "code_inline", "strong_open", "strong_close"}
            texts.append("".join(part.content for part in token.children))
    return texts


def read_terminal(text):
    """Returns the lines of a page in Markdown on a terminal that is wide enough, without blanks at their ends."""
    console = Console(file=io.StringIO(), width=1000)
    console.print(WholeCells(text))
    lines = (line.removeprefix(" • ").strip() for line in console.file.getvalue().splitlines())
    return [line for line in lines if line]


def read_latex(text):
    """Returns the plain text of a text in LaTeX."""

    def read(match):
        if match["command"] is not None:
            return LATEX_COMMANDS[match["command"]]
        if match[0] == "$-$":
            return "-"
        return match["sign"] or match["group"] or ""

    return LATEX.sub(read, text)


def find_cells(latex):
    """Returns the plain texts of the cells of the table in a page of LaTeX, of which none is in bold."""
    cells = []
    for line in latex.splitlines():
        if line.endswith(r" \\"):
            cells += map(read_latex, line.removesuffix(r" \\").split(" & "))
    return cells


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_anywhere_in_a_table_is_shown_as_it_was_written(text):
    shown = printable(text)
    table = TextTable(
        [text, "A"],
        [[text, "1"]],
        [1],
        [{text: text}],
        title=text,
        subject=text,
        is_warning=True,
        notes=[text],
        caption=text,
        latex_label="tab:a",
    )
    markdown = render(table)
    assert read_markdown(markdown) == [shown, shown, shown, "A", shown, "1", shown]
    assert read_markdown(render(replace(table, best=[CellIndex(0, 0)])))[4] == shown

    title, subject, titles, _, cells, note = read_terminal(markdown)
    assert (title, subject, note) == (shown, shown, shown)
    assert titles.removesuffix("A").strip() == cells.removesuffix("1").strip() == shown

    latex = render(table, "latex")
    comments = [line.removeprefix("% ") for line in latex.splitlines() if line.startswith("%")]
    assert comments == [shown, shown, r"needs \usepackage{booktabs}", shown]
    (caption,) = re.findall(r"^\\caption\{(.*)\}$", latex, flags=re.MULTILINE)
    assert read_latex(caption) == shown
    assert find_cells(latex) == [shown, "A", shown, "1"]

    formula = "'" if re.match(r"[=+\-@]", shown) else ""  # which a spreadsheet takes for the sign of a text
    assert list(csv.reader(io.StringIO(render(table, "csv")))) == [[formula + shown]] * 2


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_in_a_table_that_is_markdown_is_shown_as_it_was_written(text):
    shown = printable(text)
    cells = [escape_markdown(text), format_code(text)]
    table = TextTable(["A", "B"], [cells], (), notes=cells, is_markdown=True)
    if "\\|" not in text:  # which code in a table of Markdown cannot have
        assert read_markdown(render(table)) == ["A", "B", shown, shown, shown, shown]
    latex = render(table, "latex")
    assert find_cells(latex) == ["A", "B", shown, shown]
    assert latex.splitlines()[-2:] == [f"% {shown}"] * 2


def texts_with_mark(texts):
    """Returns the texts that have the word in the nasty text; each must have it whole."""
    marked = [text for text in texts if "MARK" in text]
    assert [text for text in marked if SHOWN not in text] == []
    return marked


def texts_of_format(text, name):
    """Returns the texts of a table in a format: as a reader sees them, and comments of LaTeX as they stand."""
    if name == "csv":
        rows = list(csv.reader(io.StringIO(text)))
        return [cell for row in rows for cell in row]
    if name == "latex":
        lines = text.splitlines()
        return [line if line.startswith("%") else read_latex(line) for line in lines]
    return read_markdown(text)


# The places of the text: data set, label, backbone and term; a note on a change, one on two runs of a seed.
@pytest.mark.parametrize(("name", "num_places"), [("markdown", 6), ("latex", 6), ("csv", 12)])
def test_what_a_user_may_name_in_runs_is_shown_as_it_was_written(name, num_places):
    records = []
    for seed, backbone in ((0, NASTY), (1, NASTY), (0, "net"), (1, "net")):
        record = make_record(seed=seed, dataset=NASTY, backbone=backbone)
        record["rounds"][-1]["terms"] = {NASTY: 1.0}
        records.append({**record, "label": NASTY})
    records[0]["changed"] = [{"what": NASTY, "round": 1}]
    text = write_tables(records, [f"term:{NASTY}"], name)
    assert len(texts_with_mark(texts_of_format(text, name))) == num_places
    if name == "markdown":
        texts_with_mark(read_terminal(text))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("name", "num_places"), [("markdown", 6), ("latex", 6), ("csv", 3)])
def test_what_a_users_table_says_is_shown_as_it_was_written(name, num_places, monkeypatch):
    monkeypatch.setattr(plans, "find_shipped_folders", list)
    table = replace(make_table(grid({NASTY: ("fedavg", {})}, {NASTY: RUN_OPTIONS})), title=NASTY, notes=(NASTY,))
    plan = plans.plan_table(table)
    records = [make_record("fedavg"), {**as_diverged(make_record("fedavg", seed=1)), "error": NASTY}]
    plan = with_records(plan, {run.folder: record for run, record in zip(plan.runs, records, strict=True)})
    text = render(paper_tables.compare_with_paper(replace(plan, reduction=NASTY)), name)
    assert len(texts_with_mark(texts_of_format(text, name))) == num_places
    if name == "markdown":
        assert "\n\n**Reduced: " in text
        texts_with_mark(read_terminal(text))


@pytest.mark.parametrize(("name", "num_places"), [("markdown", 5), ("latex", 1), ("csv", 10)])
def test_what_a_users_claim_says_is_shown_as_it_was_written(name, num_places):
    claim = Claim(f"own:{NASTY}", NASTY, "fedfm:III", NASTY, (NASTY,), (NASTY,))
    context = ClaimContext(claim, find_metric("selected"), paper_difference=None, text_has="", has_data=True)
    evidence = Evidence(folders=(Path(NASTY),), reduction=NASTY)
    comparison = Comparison(Verdict(UNDECIDED, NASTY), Lead(rows_text=NASTY), Lead(rows_text=NASTY), evidence)
    text = render(claim_tables.build_claims_table([Answer(context, comparison)]), name)
    assert len(texts_with_mark(texts_of_format(text, name))) == num_places


def test_a_text_in_a_table_on_a_terminal_is_shown_as_it_was_written():
    screen = Console(file=io.StringIO(), width=1000)
    print_table((NASTY, "A"), [(NASTY, "b")], screen)
    lines = screen.file.getvalue().splitlines()
    assert [line.rstrip()[:-1].rstrip() for line in lines] == [SHOWN, SHOWN]


def test_a_term_beside_the_bar_of_a_run_is_shown_as_it_was_written(monkeypatch):
    shown = display.Display(Console(file=io.StringIO(), width=1000, force_terminal=True))
    shown.bar = display.Progress(console=shown._terminal, auto_refresh=False)
    shown._task = shown.bar.add_task("", total=2)
    text = NASTY.replace(":tada:", "")  # which a bar shows as a picture
    monkeypatch.setattr(shown, "position", Mock(return_value=Position(1, ["round 1/2", text])))
    shown.show()
    assert str(shown.bar.columns[0].render(shown.bar.tasks[0])) == f"round 1/2, {printable(text)}"
