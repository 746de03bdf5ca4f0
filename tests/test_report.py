"""The page to look at: its charts and tables, what it folds, and, in a headless Chromium, that it works offline."""

import json
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fedcli.results.run_records import find_records
from tests.commands import error_of, invoke, run_command
from tests.example_records import as_diverged, make_record, write_unsigned_record
from tests.torture.nested_parts import text_entries

models = pytest.importorskip("bokeh.models", reason="bokeh is not installed (fedcli[report])")
page = pytest.importorskip("fedcli.figures.report")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
HEAD = """<script>
const errors = []
addEventListener("error", event => errors.push(event.message))
addEventListener("unhandledrejection", event => errors.push(String(event.reason)))
for (const kind of ["error", "warn"]) console[kind] = (...texts) => errors.push(texts.join(" "))
</script>"""
TAIL = """<script>addEventListener("load", () => setTimeout(() => {
  const out = document.createElement("pre")
  out.id = "seen"
  try { out.textContent = JSON.stringify([%s, errors]) } catch (error) { out.textContent = String(error) }
  document.body.append(out)
}, 1500))</script>"""
DIVERGED = as_diverged(make_record("b", rounds_done=2))


class Sight(NamedTuple):
    """What a browser shows of a page."""

    value: Any  # of the expression that was asked for
    errors: list[str]  # up to then


def look_at(text, folder, expression, width=1000):
    """Draws a page, of which this is the text, and evaluates an expression in it."""
    before, end, after = text.replace("<head>", f"<head>{HEAD}", 1).rpartition("</body>")  # scripts may hold others
    file = folder / "page.html"
    file.write_text(f"{before}{TAIL % expression}{end}{after}")
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'chrome'}",
        f"--window-size={width},900", "--virtual-time-budget=6000", "--dump-dom", f"file://{file}",
    ]  # fmt: skip
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (seen,) = re.findall(r'<pre id="seen">(.*?)</pre>', process.stdout, re.S)
    return Sight(*json.loads(unescape(seen)))


def make_records(count=6, **options):
    """Returns records of three methods and two rates, whose accuracies all differ."""
    records = []
    for number in range(count):
        method = "abc"[number % 3]
        rate = 0.1 + (number // 3) % 2
        records.append(make_record(method, seed=number // 6, selected=0.3 + 0.6 * number / count, lr=rate, **options))
    return records


class Page(NamedTuple):
    """What stands on the page of some records."""

    outline: list[str]  # the headings, tables and charts from top to bottom
    tables: list
    text: str
    charts: dict  # by their titles


def page_of(monkeypatch, records, title="Runs"):
    """Makes the page of some records; returns what stands there."""
    layouts = []

    def keep_layout(layout, *rest):
        layouts.append(layout)
        return ""

    monkeypatch.setattr(page, "file_html", keep_layout)
    page.make_report(records, title)
    (layout,) = layouts
    contents = Page(outline=[], tables=[], text="", charts={})
    texts = []
    for part in layout.children:
        if isinstance(part, models.DataTable):
            contents.outline.append("table")
            contents.tables.append(part)
        elif isinstance(part, models.Div):
            assert part.disable_math  # a name may have dollar signs
            contents.outline.extend(f"h{level}: {text}" for level, text in re.findall(r"<h(\d)>(.*?)</h\1>", part.text))
            texts.append(part.text)
        else:
            chart_title = part.title.text.partition(":")[0]
            contents.outline.append(f"chart: {chart_title}")
            contents.charts[chart_title] = part
    return contents._replace(text="\n".join(texts))


@pytest.mark.slow
@browser
def test_200_runs_fit_a_small_screen_fetch_nothing_and_can_be_sorted(tmp_path):
    many = [
        *make_records(100),
        *make_records(99, dataset="letters"),
        make_record("d", selected=0.09, dataset="letters"),
    ]
    for number, run in enumerate(many):
        run["summary"]["params_sha256"] = str(number)
    text = page.make_report(many, "Many")
    assert len(text) < 4_000_000
    look = """(() => {
      const tables = Bokeh.documents[0].roots()[0].children.filter(one => one.type === "DataTable")
      const first = tables.map((table, number) => {
        const grid = Object.values(Bokeh.index)[0].child_views.find(one => one.model === table).grid
        const column = grid.getColumns()[number * 3]  // by method, by number
        grid.onSort.notify({sortCols: [{sortCol: column, sortAsc: number === 1}]}, null, grid)
        return grid.getDataItem(0).text_0
      })
      const fetched = performance.getEntriesByType("resource").length
      return {fits: document.documentElement.scrollWidth <= innerWidth, first, fetched}
    })()"""
    sight = look_at(text, tmp_path, look, width=500)
    assert sight.errors == []
    assert sight.value == {"fits": True, "first": ["c", "d"], "fetched": 0}


@pytest.mark.slow
@browser
def test_names_from_records_are_shown_and_not_run(tmp_path):
    harm = '<img src=x onerror="alert(1)"></script>'
    records = [make_record(harm) | {"label": harm}, make_record("b", dataset=harm)]
    for number in range(len(text_entries(make_record()))):  # one record for each of its texts
        with_harm = make_record("a", number)
        container, key = text_entries(with_harm)[number]
        if key == "selection":  # no record that can be read has another than the rules for it
            continue
        container[key] = harm
        records.append(with_harm)
    text = page.make_report(records, harm)
    look = """(() => {
      const roots = [document]
      const images = []
      const texts = []
      while (roots.length) {
        const root = roots.pop()
        images.push(...root.querySelectorAll("img"))
        for (const one of root.querySelectorAll("*")) {
          if (one.shadowRoot) roots.push(one.shadowRoot)
          if (!one.children.length && !["SCRIPT", "STYLE"].includes(one.tagName)) texts.push(one.textContent)
        }
      }
      return {images: images.length, texts}
    })()"""
    sight = look_at(text, tmp_path, look)
    assert sight.errors == []
    assert sight.value["images"] == 0
    assert any(harm in shown for shown in sight.value["texts"])


def test_a_page_has_its_title_and_for_each_leaderboard_a_heading_a_table_and_curves(monkeypatch):
    records = [*make_records(2), *make_records(2, dataset="letters"), DIVERGED | {"protocol": "paper:failed"}]
    assert page_of(monkeypatch, records, title="Mine").outline == [
        "h1: Mine",
        "h2: paper:skew, digits",
        "table",
        "chart: Test accuracy over rounds",
        "h2: paper:skew, letters",
        "table",
        "chart: Test accuracy over rounds",
        "h2: paper:failed, digits",  # whose runs are folded
        "chart: Test accuracy over rounds",
    ]


def test_the_papers_numbers_and_crosses_are_on_the_page(monkeypatch):
    study = Path(__file__).parent.parent / "results" / "records" / "fedfa-fmnist-c2"
    (table,) = page_of(monkeypatch, find_records([study / "fedavg", study / "fedfa"])).tables
    index = [column.title for column in table.columns].index("Paper, %")
    assert table.source.data[f"text_{index}"] == ["74.60", "84.08"]

    contents = page_of(monkeypatch, [make_record("a"), DIVERGED])
    (table,) = contents.tables
    assert "Paper, %" not in [column.title for column in table.columns]
    curves = contents.charts["Test accuracy over rounds"].hover.renderers
    (cross,) = [curve.data_source.data for curve in curves if curve.name == "b, diverged after this round"]
    assert list(cross["x"]) == [2]
    assert list(cross["y"]) == [pytest.approx(50)]


def test_failed_runs_are_folded(monkeypatch):
    contents = page_of(monkeypatch, [make_record("a"), DIVERGED])
    (table,) = contents.tables
    assert table.source.data["text_0"] == ["a"]
    assert re.search(r"<details><summary>Failed: 1</summary><pre>b, .*diverged", contents.text)


def test_a_setting_has_one_colour_in_table_and_curves(monkeypatch):
    waiting = make_record("a", rounds_done=0, status="interrupted")
    contents = page_of(monkeypatch, [waiting, make_record("b"), make_record("c")])
    (table,) = contents.tables
    colours = table.source.data["colour"]
    assert len(set(colours)) == 3

    (legend,) = contents.charts["Test accuracy over rounds"].select(models.Legend)
    assert legend.click_policy == "hide"
    line_colours = {item.label.value: item.renderers[0].glyph.line_color for item in legend.items}
    colour_of = dict(zip(table.source.data["text_0"], colours, strict=True))
    assert line_colours["b"] == colour_of["b"]
    assert line_colours["c"] == colour_of["c"]


def test_the_command_writes_the_runs_that_are_chosen_and_warns_of_missing_ones(tmp_path, folder, monkeypatch):
    for number, run in enumerate(make_records()):
        write_unsigned_record(tmp_path / str(number), run)
    out = tmp_path / "page.html"
    command = ["report", str(tmp_path), "--out", str(out), "--method", "a", "--title", "Mine"]

    result = run_command(*command, "nowhere", "--label", "one", "--label", "other")
    assert result.stderr == "warning: there is no run in 'nowhere'; it is left out.\n"
    text = out.read_text()
    assert "Mine" in text
    assert "Runs: 2." in text
    assert "fedcli run a --seeds 0,1" in text

    label_error = error_of(*command, "nowhere", "--label", "one")
    assert "--label stands once for each path, in order (got 1 for 2)" in label_error
    assert "there is no run at 'nowhere'" in error_of("report", "nowhere", "--out", out)

    monkeypatch.setitem(sys.modules, "bokeh", None)
    assert "pip install 'fedcli[report]'" in invoke(*command).stderr
