"""One HTML file that shows runs without a network: tables to sort, curves to look into, partitions, costs, commands.

All is Bokeh's, whose script stands in the file; the module is imported only where Bokeh is installed. What records say
is escaped: names in them may be anybody's.
"""

import re
from collections.abc import Iterable, Sequence
from html import escape
from statistics import fmean
from typing import Any

import numpy as np
from bokeh import models
from bokeh.embed import file_html
from bokeh.layouts import column
from bokeh.palettes import Viridis256
from bokeh.plotting import figure
from bokeh.resources import INLINE

from fedcli.figures.plots import colours, setting_name
from fedcli.figures.series import find_curves, floats_sent
from fedcli.results.boards import boards, sheets
from fedcli.results.comparison import printed_accuracies
from fedcli.results.tables import SeedGroup, commands, group

POINTS = 250  # of a curve at most; of more, as many that lie evenly between the first and the last
MOST = 20_000  # cells of a partition that is drawn
CELL = (  # <%- escapes
    '<span title="<%- text_{0} %>" style="font-weight: <%= bold_{0} %>; color: <%= colour_{0} %>">'
    "<%- text_{0} %></span>"
)
WIDE = {"sizing_mode": "stretch_width"}


def report(records: Iterable[dict], title: str = "Runs", missing: Sequence[str] = ()) -> str:
    """The page of some runs: of each protocol and data set a table, curves, costs and partition, and the commands.

    Args:
        records: The runs.
        title: Of the page.
        missing: Paths at which no run is, which the page says.

    Raises:
        UserError: If there is no record.
    """
    records = list(records)
    use = "Click a column's title to sort by it, a name beside curves to switch its line on or off."
    parts: list[Any] = [_text(f"<h1>{escape(title)}</h1>Runs: {len(records)}. {use}")]
    parts += [_text(f"No run is there, left out: {escape(path)}") for path in missing]
    for (name, runs), sheet in zip(boards(records).items(), sheets(records), strict=True):
        groups = group(runs)
        colour = colours(member.label for member in groups)
        lines = [line for block in sheet.blocks for line in block]
        rows = list(zip(groups, lines, strict=True))
        failed = [pair for pair in rows if all(record["status"] == "failed" for record in pair[0].records)]
        shown = [pair for pair in rows if pair not in failed]
        parts.append(_text(f"<h2>{escape(name)}</h2>"))
        if shown:
            parts.append(_table(sheet.columns, sheet.numbers, shown, colour))
        parts.append(_text("".join(f"<li>{escape(note)}</li>" for note in sheet.notes)))
        for summary, texts in (
            (f"Failed: {len(failed)}", [", ".join(text for text, _ in line if text) for _, line in failed]),
            ("Commands", commands(runs)),
        ):
            if texts:
                typed = escape("\n".join(texts))
                parts.append(_text(f"<details><summary>{summary}</summary><pre>{typed}</pre></details>"))
        charts = [_curves(groups, colour), _costs(groups, colour), _partition(runs[0])]
        parts += [chart for chart in charts if chart is not None]
    return file_html(column(parts, **WIDE, margin=10), INLINE, title)


def _text(html: str) -> models.Div:
    return models.Div(text=html, styles={"font-size": "14px"}, **WIDE)


def _table(
    columns: Sequence[str], numbers: int, rows: list[tuple[SeedGroup, Any]], colour: dict[str, str]
) -> models.DataTable:
    """A board's table with the paper's numbers behind the headline; columns of numbers are sorted as numbers.

    Args:
        columns: Titles.
        numbers: The first column of numbers, the headline.
        rows: Each setting with its cells, text and mark.
        colour: Of each setting's line, by label.
    """
    printed = printed_accuracies([member.records[0] for member, _ in rows])
    titles = list(columns)
    cells = [list(line) for _, line in rows]
    if any(number is not None for number in printed):
        titles.insert(numbers + 1, "Paper, %")
        for line, number in zip(cells, printed, strict=True):
            line.insert(numbers + 1, ("" if number is None else f"{number:.2f}", ""))
    data: dict[str, list] = {}
    for place in range(len(titles)):
        texts = [line[place][0] for line in cells]
        data[f"text_{place}"] = texts
        data[f"bold_{place}"] = ["bold" if line[place][1] == "best" else "normal" for line in cells]
        data[f"colour_{place}"] = ["inherit" if place else colour[member.label] for member, _ in rows]
        data[f"sort_{place}"] = [_number(text) for text in texts] if place >= numbers else texts
    shown = []
    for place, title in enumerate(titles):
        longest = max(len(text) for text in (*data[f"text_{place}"], title))
        formatter = models.HTMLTemplateFormatter(template=CELL.replace("{0}", str(place)))
        width = 20 + 7 * min(longest, 40)
        shown.append(models.TableColumn(field=f"sort_{place}", title=title, formatter=formatter, width=width))
    return models.DataTable(
        source=models.ColumnDataSource(data), columns=shown, index_position=None, autosize_mode="none",
        reorderable=False, height=60 + 25 * min(len(rows), 20), **WIDE,
    )  # fmt: skip


def _number(text: str) -> float:
    """The number that a cell begins with, by which it is sorted; those without one stand first or last."""
    match = re.match(r"-?\d[\d,]*\.?\d*", text)
    return float(match[0].replace(",", "")) if match else -1.0


def _figure(title: str, x_label: str, y_label: str, tooltips: Sequence[tuple[str, str]], **more: Any) -> Any:
    """An empty chart."""
    chart = figure(
        title=title, x_axis_label=x_label, y_axis_label=y_label, height=340, min_width=300, toolbar_location="right",
        tools="pan,box_zoom,reset,save", **WIDE, **more,
    )  # fmt: skip
    chart.toolbar.logo = None
    chart.add_tools(models.HoverTool(tooltips=list(tooltips)))
    return chart


def _curves(groups: list[SeedGroup], colour: dict[str, str]) -> Any:
    """The lines of `curves.learning_curves` with their bands, crosses and paper's numbers; None without a value."""
    curves = sorted(find_curves(groups), key=lambda curve: curve.last, reverse=True)
    if not curves:
        return None
    tips = [("", "@name"), ("round", "@round"), ("accuracy", "@value{0.00} %")]
    chart = _figure("Test accuracy over rounds", "Round", "Test accuracy (%)", tips)
    items, hovered = [], []
    for curve in curves:
        name = setting_name(curve.setting)
        look = {"color": colour[curve.setting.label]}
        parts = []
        thinned = np.unique(np.linspace(0, len(curve.mean) - 1, min(len(curve.mean), POINTS)).astype(int))
        if len(thinned):
            rounds, mean = curve.rounds[thinned], curve.mean[thinned]
            source = {"name": [name] * len(rounds), "round": rounds, "value": mean}
            parts.append(chart.line("round", "value", source=source, line_width=2, **look))
            hovered.append(parts[-1])
            if curve.deviation is not None:
                low = np.clip(mean - curve.deviation[thinned], 0, 100)
                high = np.clip(mean + curve.deviation[thinned], 0, 100)
                parts.append(chart.varea(rounds, low, high, alpha=0.15, **look))
        for rounds, values in curve.diverged:
            source = {"name": [f"{name}, diverged after this round"], "round": rounds[-1:], "value": values[-1:]}
            parts.append(chart.line(rounds, values, **look))
            parts.append(chart.scatter("round", "value", source=source, marker="x", size=9, **look))
            hovered.append(parts[-1])
        if curve.printed is not None:
            ends = [1, int(curve.rounds.max(initial=1))]
            source = {"name": [f"{name}, the paper's number"] * 2, "round": ends, "value": [curve.printed] * 2}
            parts.append(chart.line("round", "value", source=source, line_dash="dotted", **look))
            hovered.append(parts[-1])
        items.append(models.LegendItem(label=name, renderers=parts))
    chart.hover.renderers = hovered
    chart.add_layout(models.Legend(items=items, click_policy="hide", label_text_font_size="11px"), "right")
    return chart


def _costs(groups: list[SeedGroup], colour: dict[str, str]) -> Any:
    """A point for each setting: floats that all clients sent in a run, and the headline; None without any."""
    points: dict[str, list] = {"name": [], "floats": [], "value": [], "colour": []}
    for member in groups:
        sent = [floats[-1] for record in member.finished if (floats := floats_sent(record))]
        selected = [record["summary"].get("selected") for record in member.finished]
        selected = [100 * accuracy for accuracy in selected if accuracy is not None]
        if sent and selected:
            for key, value in zip(points, (member.label, sent[0], fmean(selected), colour[member.label]), strict=True):
                points[key].append(value)
    if not points["name"]:
        return None
    scale = "log" if 0 < 10 * min(points["floats"]) < max(points["floats"]) else "linear"
    tips = [("", "@name"), ("floats sent", "@floats{0,0}"), ("accuracy", "@value{0.00} %")]
    title, label = "Accuracy over what all clients send", "Floats sent by all clients"
    chart = _figure(title, label, "The table's accuracy (%)", tips, x_axis_type=scale)
    chart.scatter("floats", "value", source=points, size=10, color="colour")
    return chart


def _partition(record: dict) -> Any:
    """How many images of each class each client of one run holds; None where a record has no counts."""
    counts = np.array(record["partition"].get("class_counts") or [[]])
    clients, classes = counts.nonzero()
    if not len(clients) or len(clients) > MOST:
        return None
    names = record.get("class_names") or [str(label) for label in range(counts.shape[1])]
    images = counts[clients, classes]
    source = {"client": clients, "class": classes, "images": images, "name": [names[label] for label in classes]}
    tips = [("client", "@client"), ("class", "@name"), ("images", "@images{0,0}")]
    title = f"Images of each class at each client: {record['partition']['flag']}, seed {record['seed']}"
    chart = _figure(title, "Client", "Class", tips)
    mapper = models.LinearColorMapper(Viridis256[::-1], low=0, high=int(images.max()))
    colour = {"field": "images", "transform": mapper}
    chart.rect("client", "class", 1, 1, source=source, line_color=None, fill_color=colour)
    chart.yaxis.ticker = models.BasicTicker(min_interval=1, num_minor_ticks=0)
    chart.add_layout(models.ColorBar(color_mapper=mapper, width=8), "right")
    return chart
