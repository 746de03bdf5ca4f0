"""The page to look at: its charts and tables, what it folds, and, in a headless Chromium, that it works offline."""

import json
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

from fedcli.results.frame import find_records
from tests.programs import invoke
from tests.test_tables import record, write
from tests.torture import text_places

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
LOST = record("b", done=2, status="failed") | {"error": "NonFiniteLoss: the term"}


def seen(page, folder, look, width=1000):
    """What an expression gives in the page once it is drawn, and the errors up to then."""
    file = folder / "page.html"
    before, end, after = page.replace("<head>", f"<head>{HEAD}", 1).rpartition("</body>")  # scripts may hold others
    file.write_text(f"{before}{TAIL % look}{end}{after}")
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'chrome'}"]
    command += [f"--window-size={width},900", "--virtual-time-budget=6000", "--dump-dom", f"file://{file}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (text,) = re.findall(r'<pre id="seen">(.*?)</pre>', done.stdout, re.S)
    return unescape(text)


def runs(count=6, **more):
    """Runs of three methods and several rates; the accuracies all differ."""
    made = []
    for number in range(count):
        rate = 0.1 + (number // 3) % 2
        made.append(record("abc"[number % 3], number // 6, 0.3 + 0.6 * number / count, lr=rate, **more))
    return made


def drawn(monkeypatch, records, **more):
    """What stands on the page of some records: its tables, its texts and its charts by their titles."""
    found = []
    monkeypatch.setattr(page, "file_html", lambda layout, *given: found.append(layout) or "")
    page.report(records, **more)
    children = found[0].children
    charts = {one.title.text.partition(":")[0]: one for one in children if hasattr(one, "title")}
    tables = [one for one in children if isinstance(one, models.DataTable)]
    return tables, "\n".join(one.text for one in children if isinstance(one, models.Div)), charts


def lines(chart):
    """The points of each line with a name, by name."""
    sources = {one.name: one.data_source.data for one in chart.hover.renderers}
    return {name: (list(data["x"]), list(data["y"])) for name, data in sources.items()}


@browser
def test_200_runs_fit_a_small_screen_fetch_nothing_and_can_be_sorted(tmp_path):
    many = [*runs(100), *runs(99, dataset="letters"), record("d", selected=0.09, dataset="letters")]
    for number, own in enumerate(many):
        own["summary"]["params_sha256"] = str(number)
    text = page.report(many, "Many")
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
      return [document.documentElement.scrollWidth <= innerWidth, first, fetched]
    })()"""
    assert json.loads(seen(text, tmp_path, look, width=500)) == [[True, ["c", "d"], 0], []]


@browser
def test_names_from_records_are_shown_and_not_run(tmp_path):
    harm = '<img src=x onerror="alert(1)"></script>'
    bad = []
    for number, _ in enumerate(text_places(record())):  # one record for each of its texts
        one = record("a", number)
        container, key = text_places(one)[number]
        container[key] = harm
        bad.append(one)
    text = page.report([*bad, record(harm) | {"label": harm}, record("b", dataset=harm)], harm)
    look = """(() => {
      const roots = [document]
      const images = []
      while (roots.length) {
        const root = roots.pop()
        images.push(...root.querySelectorAll("img"))
        for (const one of root.querySelectorAll("*")) if (one.shadowRoot) roots.push(one.shadowRoot)
      }
      return images.length
    })()"""
    assert json.loads(seen(text, tmp_path, look)) == [0, []]


def test_the_papers_numbers_and_crosses_are_on_the_page(monkeypatch):
    study = Path(__file__).parent.parent / "results" / "records" / "fedfa-fmnist-c2"
    (table,), _, _ = drawn(monkeypatch, find_records([study / "fedavg", study / "fedfa"]))
    place = [column.title for column in table.columns].index("Paper, %")
    assert table.source.data[f"text_{place}"] == ["74.60", "84.08"]
    (table,), _, charts = drawn(monkeypatch, [record("a"), LOST])
    assert "Paper, %" not in [column.title for column in table.columns]
    assert lines(charts["Test accuracy over rounds"])["b, diverged after this round"] == ([2], [pytest.approx(50)])


def test_failed_runs_are_folded(monkeypatch):
    (table,), text, _ = drawn(monkeypatch, [record("a"), LOST])
    assert table.source.data["text_0"] == ["a"]
    assert re.search(r"<details><summary>Failed: 1</summary><pre>b, .*diverged", text)


def test_a_setting_has_one_colour_in_table_and_curves(monkeypatch):
    waiting = record("a", done=0, status="interrupted")
    (table,), _, charts = drawn(monkeypatch, [waiting, record("b"), record("c")])
    assert len(set(table.source.data["colour"])) == 3
    (legend,) = charts["Test accuracy over rounds"].select(models.Legend)
    looks = {item.label.value[0]: item.renderers[0].glyph.line_color for item in legend.items}
    assert legend.click_policy == "hide"
    assert [looks["b"], looks["c"]] == table.source.data["colour"][1:]


def test_the_command_writes_the_runs_that_are_chosen_and_warns_of_missing_ones(tmp_path, monkeypatch):
    for number, own in enumerate(runs()):
        write(tmp_path / str(number), own)
    out = tmp_path / "page.html"
    command = ["report", str(tmp_path), "--out", str(out), "--method", "a", "--title", "Mine"]
    result = invoke(*command, "nowhere", "--label", "one", "--label", "other")
    assert result.exit_code == 0, result.output
    assert result.stderr == "warning: there is no run in 'nowhere'; it is left out.\n"
    words = ("Mine", "Runs: 2.", "fedcli run a --seeds 0,1")
    assert all(text in out.read_text() for text in words)
    result = invoke("report", "nowhere", "--out", out)
    assert (result.exit_code, "there is no run at 'nowhere'" in result.stderr) == (2, True)
    monkeypatch.setitem(sys.modules, "bokeh", None)
    assert "pip install 'fedcli[report]'" in invoke(*command).stderr
