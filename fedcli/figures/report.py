"""One HTML file that shows runs without a network: boards to sort, curves to look into, partitions, costs, commands.

The charts are Bokeh's, whose script stands in the file. What records say is escaped: names in them may be anybody's.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from importlib import import_module
from statistics import fmean
from typing import Any

import numpy as np

from fedcli.errors import needed
from fedcli.figures.plots import LINE_COLOURS
from fedcli.figures.series import find_curves, floats_sent
from fedcli.results.boards import boards, sheets
from fedcli.results.comparison import printed_accuracies
from fedcli.results.render import Sheet
from fedcli.results.tables import SeedGroup, commands, group

DASHES = ("solid", "7 3", "2 2", "8 3 2 3", "13 4")  # pixels of line and gap; SVG takes the word as solid
POINTS = 250  # of a curve at most; of more, as many that lie evenly between the first and the last
PARTS = ("line", "band", "cost", "diverged", "cross", "paper")  # what a box switches
MOST = 4000  # bubbles of a partition that are drawn

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 70rem; padding: 1rem; color: #1a1a1a; }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.5rem; overflow-wrap: anywhere }
h3 { font-size: 1rem; margin-bottom: 0.3rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: 0.85rem; width: 100% }
th, td { border-bottom: 1px solid #ddd; padding: 0.25rem 0.5rem; text-align: left; vertical-align: top }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums } td.number { white-space: nowrap }
th button { all: unset; cursor: pointer; font-weight: 600 }
th button:focus-visible { outline: 2px solid #0072B2 }
th[aria-sort=ascending] button::after { content: " \\25B2" }
th[aria-sort=descending] button::after { content: " \\25BC" }
td:nth-child(2) { min-width: 8rem; max-width: 14rem; overflow-wrap: anywhere } label { white-space: nowrap }
ul { font-size: 0.85rem; padding-left: 1.2rem } pre { font-size: 0.8rem; overflow-x: auto; white-space: pre-wrap;
  overflow-wrap: anywhere; background: #f5f5f5; padding: 0.6rem }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem }
.chart { break-inside: avoid; min-width: 0 }
@media print { body { max-width: none } .scroll { overflow: visible } input { display: none }
  th, td { padding: 0.1rem 0.2rem; font-size: 6.5pt } td.number { white-space: normal } td:nth-child(2) { min-width: 0 }
  details > pre { white-space: pre-wrap } h2 { break-after: avoid } tr { break-inside: avoid } }
"""

SCRIPT = """
for (const item of ITEMS) Bokeh.embed.embed_item(item)
for (const table of document.querySelectorAll("table.board")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0]
  heads.forEach((head, place) => head.querySelector("button")?.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") === "descending"
    for (const other of heads) other.removeAttribute("aria-sort")
    head.setAttribute("aria-sort", up ? "ascending" : "descending")
    const value = row => row.cells[place].textContent.trim()
    const number = row => parseFloat(value(row).replaceAll(",", ""))
    const compare = (a, b) => {
      const [x, y] = [number(a), number(b)]
      if (isNaN(x) !== isNaN(y)) return isNaN(x) ? 1 : -1  // what has no number is last in both orders
      const order = isNaN(x) ? value(a).localeCompare(value(b)) : x - y
      return up ? order : -order
    }
    body.append(...[...body.rows].sort(compare))
  }))
}
const shown = (line, visible) => {
  for (const part of PARTS) for (const page of Bokeh.documents) {
    const model = page.get_model_by_name(line + "-" + part)
    if (model) model.visible = visible
  }
}
for (const box of document.querySelectorAll("input[data-line]"))
  box.addEventListener("change", () => shown(box.dataset.line, box.checked))
for (const all of document.querySelectorAll("input[data-all]"))
  all.addEventListener("change", () => {
    for (const box of all.closest("table").querySelectorAll("input[data-line]")) {
      box.checked = all.checked
      shown(box.dataset.line, box.checked)
    }
  })
"""


def report(records: Iterable[dict], title: str = "Runs") -> str:
    """The page of some runs: of each protocol and data set a board, its curves, costs and partition, and the commands.

    Args:
        records: The runs.
        title: Of the page.

    Raises:
        UserError: If there is no record, or Bokeh is not installed.
    """
    embed, resources = (needed(f"bokeh.{name}", "the report", "report") for name in ("embed", "resources"))
    records = list(records)
    parts, charts, tables, body = boards(records), {}, [], []
    for number, (own, sheet) in enumerate(zip(parts.values(), sheets(records), strict=True)):
        groups = group(own)
        tables.append(_with_paper(sheet, groups))
        drawn = {
            "Test accuracy over rounds": _curves(groups, number),
            "Accuracy over what all clients send": _costs(groups, number),
            _partition_title(own[0]): _partition(own[0]),
        }
        charts |= {(number, about): chart for about, chart in drawn.items() if chart is not None}
    places = {key: f"chart-{place}" for place, key in enumerate(charts)}
    items = [embed.json_item(charts[key], place) for key, place in places.items()]
    library = "".join(resources.Resources(mode="inline", components=["bokeh"]).js_raw).replace("</script", r"<\/script")
    for number, ((name, own), sheet) in enumerate(zip(parts.items(), tables, strict=True)):
        shown = {about: place for (board, about), place in places.items() if board == number}
        body.append(_section(number, name, own, sheet, shown))
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{STYLE}</style><script>{library}</script></head><body>",
            f"<h1>{escape(title)}</h1>",
            f"<p>Runs: {len(records)}. Click a column's title to sort by it, a box to switch a line on or off.</p>",
            *body,
            f"<script>const ITEMS = {_script(items)}, PARTS = {_script(PARTS)}{SCRIPT}</script></body></html>\n",
        ]
    )


def _script(value: Any) -> str:
    """The value as a script may hold it; no text in it can end the script."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _section(number: int, name: str, records: list[dict], sheet: Sheet, charts: dict[str, str]) -> str:
    """A board, places for its charts, by title the ids, and its commands."""
    typed = "\n".join(commands(records))
    notes = "".join(f"<li>{escape(note)}</li>" for note in sheet.notes)
    places = "".join(
        f'<div class="chart"><h3>{escape(about)}</h3><div id="{place}"></div></div>' for about, place in charts.items()
    )
    return "\n".join(
        [
            f'<section><h2>{escape(name)}</h2><div class="scroll">{_table(number, sheet)}</div><ul>{notes}</ul>',
            f'<div class="charts">{places}</div>',
            f"<details><summary>Commands</summary><pre>{escape(typed)}</pre></details>" if typed else "",
            "</section>",
        ]
    )


def _with_paper(sheet: Sheet, groups: list[SeedGroup]) -> Sheet:
    """The board with the paper's numbers beside the headline, where a row is of a cell of one of its tables."""
    printed = printed_accuracies([member.records[0] for member in groups])
    if not any(printed):
        return sheet
    at = sheet.numbers + 1
    texts = ["" if number is None else f"{number:.2f}" for number in printed]
    lines = [line for block in sheet.blocks for line in block]
    rows = [[*line[:at], (text, ""), *line[at:]] for line, text in zip(lines, texts, strict=True)]
    return replace(sheet, columns=[*sheet.columns[:at], "Paper, %", *sheet.columns[at:]], blocks=[rows])


def _table(number: int, sheet: Sheet) -> str:
    """A board, with a box and the look of its line before every row."""
    kinds = ["number" if place >= sheet.numbers else "" for place in range(len(sheet.columns))]
    heads = "".join(
        f'<th class="{kind}"><button>{escape(column)}</button></th>'
        for column, kind in zip(sheet.columns, kinds, strict=True)
    )
    rows = []
    for place, line in enumerate(line for block in sheet.blocks for line in block):
        texts = [f"<b>{escape(text)}</b>" if mark == "best" else escape(text) for text, mark in line]
        cells = "".join(f'<td class="{kind}">{text}</td>' for text, kind in zip(texts, kinds, strict=True))
        colour, dash = _look(place)
        stroke = f'stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dash}"'
        look = f'<svg width="30" height="9"><line x1="0" y1="5" x2="30" y2="5" {stroke}/></svg>'
        name = escape(f"show {line[0][0]}", quote=True)
        box = f'<input type="checkbox" checked data-line="{number}-{place}" aria-label="{name}">'
        rows.append(f"<tr><td><label>{box} {look}</label></td>{cells}</tr>")
    every = '<input type="checkbox" checked data-all aria-label="show all">'
    return f'<table class="board"><thead><tr><th>{every}</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _look(place: int) -> tuple[str, str]:
    """Colour and dashes of the line of that number; both change, so that 35 differ."""
    return LINE_COLOURS[place % len(LINE_COLOURS)], DASHES[place // len(LINE_COLOURS) % len(DASHES)]


def _figure(x_label: str, y_label: str, tooltips: Sequence[tuple[str, str]] = (), **more: Any) -> Any:
    """An empty chart as wide as its place."""
    plotting, models = import_module("bokeh.plotting"), import_module("bokeh.models")
    figure = plotting.figure(
        height=320, sizing_mode="stretch_width", x_axis_label=x_label, y_axis_label=y_label,
        tools="pan,box_zoom,reset,save", toolbar_location="above", **more,
    )  # fmt: skip
    figure.toolbar.logo = None
    compact = "return Intl.NumberFormat('en', {notation: 'compact', maximumSignificantDigits: 5}).format(tick)"
    figure.xaxis.formatter = models.CustomJSTickFormatter(code=compact)
    if more.get("x_axis_type") != "log":
        figure.xaxis.ticker = models.BasicTicker(min_interval=1, num_minor_ticks=0, desired_num_ticks=5)
    if tooltips:
        figure.add_tools(models.HoverTool(tooltips=list(tooltips), mode="mouse"))
    return figure


def _curves(groups: list[SeedGroup], number: int) -> Any:
    """The lines of `curves.learning_curves`, with bands, the paper's numbers and crosses; None without a value."""
    found = find_curves(groups)
    if not found:
        return None
    tips = [("", "@name"), ("round", "@round"), ("accuracy", "@value{0.00} %")]
    figure = _figure("Round", "Test accuracy (%)", tips)
    for curve in found:
        place = next(place for place, member in enumerate(groups) if member is curve.setting)
        (colour, dash), names = _look(place), {part: f"{number}-{place}-{part}" for part in PARTS}
        look = {"color": colour, "line_dash": dash}
        count = len(curve.rounds) if not curve.all_diverged else 0
        kept = np.unique(np.linspace(0, count - 1, min(count, POINTS)).astype(int))
        rounds, values, label = curve.rounds[kept].tolist(), curve.values[:, kept], curve.setting.label
        if count and curve.has_band:
            low, high = ((values.mean(0) + sign * values.std(0, ddof=1)).tolist() for sign in (-1, 1))
            figure.varea(rounds, low, high, color=colour, alpha=0.15, name=names["band"])
        if count:
            own = _points(label, rounds, values.mean(0).tolist())
            figure.line("round", "value", source=own, line_width=2, name=names["line"], **look)
        if curve.diverged:
            at, lost = ([line.tolist() for line in lines] for lines in zip(*curve.diverged, strict=True))
            figure.multi_line(at, lost, name=names["diverged"], **look)
            ends = ([line[-1] for line in lines] for lines in (at, lost))
            own = _points(f"{label}, diverged after this round", *ends)
            figure.scatter("round", "value", source=own, marker="x", size=9, color=colour, name=names["cross"])
        if curve.printed is not None:
            own = _points(f"{label}, the paper's number", [1, int(curve.rounds.max(initial=1))], [curve.printed] * 2)
            figure.line("round", "value", source=own, color=colour, line_dash="dotted", name=names["paper"])
    figure.hover.renderers = [one for one in figure.renderers if one.name.endswith(("line", "cross", "paper"))]
    return figure


def _points(name: str, rounds: list[int], values: list[float]) -> dict[str, list]:
    return {"name": [name] * len(rounds), "round": rounds, "value": values}


def _costs(groups: list[SeedGroup], number: int) -> Any:
    """A point for each group: floats that all clients sent in a run, and the headline; None without any."""
    points = []
    for place, member in enumerate(groups):
        sent = [floats[-1] for run in member.finished if (floats := floats_sent(run))]
        selected = [100 * one for run in member.finished if (one := run["summary"].get("selected")) is not None]
        if sent and selected:
            points.append((place, member.label, sent[0], fmean(selected)))
    if not points:
        return None
    sent = [floats for _, _, floats, _ in points]
    tips = [("", "@name"), ("floats sent", "@floats{0,0}"), ("selected", "@value{0.00} %")]
    scale = "log" if 0 < 10 * min(sent) < max(sent) else "linear"
    figure = _figure("Floats sent by all clients", "Selected accuracy (%)", tips, x_axis_type=scale)
    for place, name, floats, value in points:
        source = {"floats": [floats], "value": [value], "name": [name]}
        figure.scatter("floats", "value", source=source, size=10, color=_look(place)[0], name=f"{number}-{place}-cost")
    return figure


def _partition_title(record: dict) -> str:
    return f"Images of each class at each client: {record['partition']['flag']}, seed {record['seed']}"


def _partition(record: dict) -> Any:
    """Bubbles whose areas are numbers of images, of the partition of one run; None where a record has no counts."""
    counts = np.array(record["partition"].get("class_counts") or [[]])
    clients, classes = counts.nonzero()
    if not len(clients) or len(clients) > MOST:
        return None
    names = record.get("class_names") or [str(label) for label in range(counts.shape[1])]
    tips = [("client", "@client"), ("class", "@name"), ("images", "@images{0,0}")]
    figure = _figure("Client", "Class", tips, y_range=(-0.7, counts.shape[1] - 0.3))
    figure.yaxis.ticker = import_module("bokeh.models").BasicTicker(min_interval=1, num_minor_ticks=0)
    images = counts[clients, classes]
    widest = min(26.0, 320 / max(1, counts.shape[1]), 560 / max(1, counts.shape[0])) * 1.1
    source = {
        "client": clients.tolist(), "class": classes.tolist(), "images": images.tolist(),
        "name": [names[label] for label in classes],
        "size": [max(1.5, widest * math.sqrt(count / images.max())) for count in images],
    }  # fmt: skip
    figure.scatter("client", "class", source=source, size="size", color=LINE_COLOURS[0], alpha=0.8)
    return figure
