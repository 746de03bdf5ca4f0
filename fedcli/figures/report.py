"""One HTML file that shows runs without a network: tables to sort, curves to look into, commands.

All is Bokeh's, whose script stands in the file. Texts of records are escaped, since anybody may have written them.
"""

from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from bokeh import models
from bokeh.embed import file_html
from bokeh.layouts import column
from bokeh.plotting import figure
from bokeh.resources import INLINE

from fedcli.figures.curves import Curve, find_curves
from fedcli.figures.names import choose_setting_colours, name_setting
from fedcli.results.groups import SeedGroup, group_by_leaderboard, group_runs
from fedcli.results.printed_numbers import find_printed_accuracies
from fedcli.results.render import CellIndex, TextTable
from fedcli.results.tables import build_tables, list_commands
from fedcli.runs.schema import Record

# By the number that a cell begins with; cells without one stand first or last.
BY_NUMBER = """const number = text => { const n = parseFloat(text.replaceAll(',', '')); return isNaN(n) ? -1 : n }
return Math.sign(number(x) - number(y))"""
# Break the titles of columns into lines, since they are longer than the cells.
TITLES = ".slick-header-column.slick-header-column { height: 4em; line-height: 1.25em; white-space: normal; }"
WIDE = {"sizing_mode": "stretch_width"}


class _TableRow(NamedTuple):
    """A line of a leaderboard's table."""

    setting: SeedGroup
    number: int  # of the line, from 0
    cells: Sequence[str]


class _TableColumn(NamedTuple):
    """A column of a leaderboard's table."""

    title: str
    texts: list[str]
    styles: list[str]  # "bold" or "normal", one for each text
    is_number: bool


def make_report(records: Sequence[Record], title: str = "Runs") -> str:
    """Makes the page of some runs: for each protocol and data set a table, curves and commands."""
    use = "Click a column's title to sort by it, a name beside curves to switch its line on or off."
    parts: list[Any] = [_make_text(f"<h1>{escape(title)}</h1>Runs: {len(records)}. {use}")]
    runs_by_leaderboard = group_by_leaderboard(records)
    settings_by_leaderboard = [group_runs(runs) for runs in runs_by_leaderboard.values()]
    colours = choose_setting_colours(settings_by_leaderboard)
    tables = build_tables(records)
    for name, settings, table in zip(runs_by_leaderboard, settings_by_leaderboard, tables, strict=True):
        parts.append(_make_text(f"<h2>{escape(name)}</h2>"))
        parts += _make_leaderboard(settings, table, list_commands(runs_by_leaderboard[name]), colours)
    return file_html(column(parts, **WIDE, margin=10), INLINE, title)


def _make_leaderboard(
    settings: list[SeedGroup], table: TextTable, typed: list[str], colours: dict[str, str]
) -> list[Any]:
    """Makes the table of a leaderboard, its notes, what is folded below them, and its curves."""
    rows = []
    for number, (setting, cells) in enumerate(zip(settings, table.rows, strict=True)):
        rows.append(_TableRow(setting, number, cells))
    shown = [row for row in rows if not row.setting.all_failed]
    failed = [", ".join(filter(None, row.cells)) for row in rows if row.setting.all_failed]
    parts: list[Any] = []
    if shown:
        parts.append(_make_table(_make_columns(table, shown), shown, colours))
    texts = [f"<li style='margin-left: 1em'>{escape(note)}</li>" for note in table.notes]
    if failed:
        texts.append(_make_folded(f"Failed: {len(failed)}", failed))
    if typed:
        texts.append(_make_folded("Commands", typed))
    parts.append(_make_text("".join(texts)))
    curves = find_curves(settings)
    if curves:
        parts.append(_draw_curves(curves, colours))
    return parts


def _make_text(html: str) -> models.Div:
    return models.Div(text=html, disable_math=True, styles={"font-size": "14px"}, **WIDE)


def _make_folded(summary: str, lines: list[str]) -> str:
    """Writes the HTML of lines that a click on their summary shows."""
    text = escape("\n".join(lines))
    return f"<details><summary>{summary}</summary><pre>{text}</pre></details>"


def _make_columns(table: TextTable, rows: list[_TableRow]) -> list[_TableColumn]:
    """Makes the columns of a leaderboard's table, with the paper's numbers behind the first of ours."""
    columns = []
    for position, title in enumerate(table.titles):
        texts = [row.cells[position] for row in rows]
        styles = ["bold" if CellIndex(row.number, position) in table.best else "normal" for row in rows]
        columns.append(_TableColumn(title, texts, styles, is_number=position in table.number_columns))
    printed = find_printed_accuracies([row.setting.first for row in rows])
    if any(accuracy is not None for accuracy in printed):
        texts = ["" if accuracy is None else f"{accuracy:.2f}" for accuracy in printed]
        styles = ["normal"] * len(texts)
        columns.insert(min(table.number_columns) + 1, _TableColumn("Paper, %", texts, styles, is_number=True))
    return columns


def _make_table(columns: list[_TableColumn], rows: list[_TableRow], colours: dict[str, str]) -> models.DataTable:
    """Makes a leaderboard's table of these rows, with the names of settings in the colours of their curves."""
    data = {"colour": [colours[row.setting.title] for row in rows]}
    shown = []
    for number, values in enumerate(columns):
        text_field = f"text_{number}"
        style_field = f"style_{number}"
        data[text_field] = values.texts
        data[style_field] = values.styles
        formatter = models.StringFormatter(font_style={"field": style_field}, text_color=None)
        if number == 0:
            formatter.text_color = {"field": "colour"}
        longest = max(map(len, [*values.texts, *values.title.split()]))
        shown.append(
            models.TableColumn(
                field=text_field,
                title=escape(values.title),  # HTML to the table, unlike the texts of its cells
                formatter=formatter,
                sorter=models.CustomJSCompare(code=BY_NUMBER) if values.is_number else None,
                width=12 + 6 * min(longest, 40),
            )
        )
    return models.DataTable(
        source=models.ColumnDataSource(data), columns=shown, index_position=None, autosize_mode="none",
        reorderable=False, height=100 + 25 * min(len(rows), 20), stylesheets=[TITLES], **WIDE,
    )  # fmt: skip


def _draw_curves(curves: list[Curve], colours: dict[str, str]) -> Any:
    """Draws the lines of `line_charts.learning_curves` with their bands and crosses."""
    chart = figure(
        title="Test accuracy over rounds", x_axis_label="Round", y_axis_label="Test accuracy (%)", height=340,
        tooltips=[("", "$name"), ("round", "@x"), ("accuracy", "@y{0.00} %")], min_width=300, toolbar_location="right",
        tools="pan,box_zoom,reset,save", **WIDE,
    )  # fmt: skip
    chart.xaxis.ticker = models.BasicTicker(min_interval=1, num_minor_ticks=0)
    hovered = []
    for curve in sorted(curves, key=lambda curve: curve.end.y, reverse=True):
        name = "; ".join([name_setting(curve.setting), *curve.changes])
        style = {"color": colours[curve.setting.title], "legend_label": name}
        line = curve.line
        columns = {"x": line.x, "y": line.y, "low": line.low, "high": line.high}
        hovered.append(chart.line("x", "y", source=columns, name=name, line_width=2, **style))
        if len(curve.runs) > 1:
            chart.varea("x", "low", "high", source=columns, alpha=0.12, **style)
        for diverged in curve.diverged:
            chart.line(diverged.x, diverged.y, **style)
            words = f"{name}, diverged after this round"
            end = {"x": diverged.x[-1:], "y": diverged.y[-1:]}
            hovered.append(chart.scatter("x", "y", source=end, name=words, marker="x", size=9, **style))
    chart.hover.renderers = hovered
    (legend,) = chart.legend
    legend.update(click_policy="hide", label_text_font_size="11px")
    chart.add_layout(legend, "right")
    return chart
