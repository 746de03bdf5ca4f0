"""One HTML file that shows runs without a network: tables to sort, curves to look into, commands.

All is Bokeh's, whose script stands in the file. Texts of records are escaped, since anybody may have written them.
"""

from collections.abc import Sequence
from html import escape
from typing import Any

from bokeh import models
from bokeh.embed import file_html
from bokeh.layouts import column
from bokeh.plotting import figure
from bokeh.resources import INLINE

from fedcli.figures.plots import Curve, find_curves, setting_colours, setting_name
from fedcli.results.paper_tables import printed_accuracies
from fedcli.results.render import Best, Sheet
from fedcli.results.tables import SeedGroup, boards, commands, group, sheets

# By the number that a cell begins with; cells without one stand first or last.
BY_NUMBER = """const number = text => { const n = parseFloat(text.replaceAll(',', '')); return isNaN(n) ? -1 : n }
return Math.sign(number(x) - number(y))"""
# Break the titles of columns into lines, since they are longer than the cells.
TITLES = ".slick-header-column.slick-header-column { height: 4em; line-height: 1.25em; white-space: normal; }"
WIDE = {"sizing_mode": "stretch_width"}


def report(records: Sequence[dict], title: str = "Runs") -> str:
    """The page of some runs: for each protocol and data set a table, curves and commands."""
    use = "Click a column's title to sort by it, a name beside curves to switch its line on or off."
    parts: list[Any] = [_text(f"<h1>{escape(title)}</h1>Runs: {len(records)}. {use}")]
    by_board = boards(records)
    groups = [group(runs) for runs in by_board.values()]
    colour = setting_colours(groups)
    for (name, runs), members, sheet in zip(by_board.items(), groups, sheets(records), strict=True):
        rows = [*zip(members, sheet.lines, strict=True)]
        failed = [(member, line) for member, line in rows if member.has_failed]
        shown = [(member, line) for member, line in rows if not member.has_failed]
        parts.append(_text(f"<h2>{escape(name)}</h2>"))
        if shown:
            parts.append(_table(sheet, shown, colour))
        texts = [f"<li style='margin-left: 1em'>{escape(note)}</li>" for note in sheet.notes]
        lines = [", ".join(filter(None, line)) for _, line in failed]
        for summary, folded in ((f"Failed: {len(failed)}", lines), ("Commands", commands(runs))):
            if folded:
                text = escape("\n".join(folded))
                texts.append(f"<details><summary>{summary}</summary><pre>{text}</pre></details>")
        parts.append(_text("".join(texts)))
        if curves := find_curves(members):
            parts.append(_curves(curves, colour))
    return file_html(column(parts, **WIDE, margin=10), INLINE, title)


def _text(html: str) -> models.Div:
    return models.Div(text=html, styles={"font-size": "14px"}, **WIDE)


def _table(sheet: Sheet, rows: list[tuple[SeedGroup, Any]], colour: dict[str, str]) -> models.DataTable:
    """A board's table of `rows`, settings with their cells, and the paper's numbers."""
    columns = []
    for place, title in enumerate(sheet.columns):
        columns.append((title, [line[place] for _, line in rows]))
    printed = printed_accuracies([member.records[0] for member, _ in rows])
    if any(printed):
        columns.insert(sheet.numbers + 1, ("Paper, %", [f"{number:.2f}" if number else "" for number in printed]))
    data = {"colour": [colour[member.label] for member, _ in rows]}
    shown = []
    for number, (title, texts) in enumerate(columns):
        text = f"text_{number}"
        style = f"style_{number}"
        data |= {text: texts, style: ["bold" if isinstance(cell, Best) else "normal" for cell in texts]}
        formatter = models.StringFormatter(
            font_style={"field": style}, text_color=None if number else {"field": "colour"}
        )
        sorter = models.CustomJSCompare(code=BY_NUMBER) if number >= sheet.numbers else None
        width = 12 + 6 * min(max(map(len, (*texts, *title.split()))), 40)
        # A title is HTML to the table, unlike the texts of its cells.
        look = {"formatter": formatter, "sorter": sorter, "width": width}
        shown.append(models.TableColumn(field=text, title=escape(title), **look))
    return models.DataTable(
        source=models.ColumnDataSource(data), columns=shown, index_position=None, autosize_mode="none",
        reorderable=False, height=100 + 25 * min(len(rows), 20), stylesheets=[TITLES], **WIDE,
    )  # fmt: skip


def _curves(curves: list[Curve], colour: dict[str, str]) -> Any:
    """The lines of `plots.learning_curves` with their bands and crosses."""
    chart = figure(
        title="Test accuracy over rounds", x_axis_label="Round", y_axis_label="Test accuracy (%)", height=340,
        tooltips=[("", "$name"), ("round", "@x"), ("accuracy", "@y{0.00} %")], min_width=300, toolbar_location="right",
        tools="pan,box_zoom,reset,save", **WIDE,
    )  # fmt: skip
    chart.xaxis.ticker = models.BasicTicker(min_interval=1, num_minor_ticks=0)
    hovered = []
    for curve in sorted(curves, key=lambda curve: curve.last, reverse=True):
        name = "; ".join([setting_name(curve.setting), *curve.changes])
        look = {"color": colour[curve.setting.label], "legend_label": name}
        hovered.append(chart.line("x", "y", source=dict(curve.line), name=name, line_width=2, **look))
        if len(curve.runs) > 1:
            chart.varea("x", "low", "high", source=dict(curve.line), alpha=0.12, **look)
        for lost in curve.diverged:
            chart.line(lost.x, lost.y, **look)
            words = f"{name}, diverged after this round"
            hovered.append(chart.scatter("x", "y", source=dict(lost[-1:]), name=words, marker="x", size=9, **look))
    chart.hover.renderers = hovered
    chart.legend[0].update(click_policy="hide", label_text_font_size="11px")
    chart.add_layout(chart.legend[0], "right")
    return chart
