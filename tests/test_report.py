"""The page to look at, in a headless Chromium: what is sorted and switched, 200 runs, a small screen, no network."""

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedcli.cli.app import app
from fedcli.errors import UserError
from fedcli.figures.report import report
from fedcli.results.tables import find_records
from tests.browser import browser, seen
from tests.test_tables import record, write

pytest.importorskip("bokeh", reason="bokeh is not installed (fedcli[report])")


def runs(count=6, **more):
    """Runs of three methods and several rates, with a partition; the accuracies all differ."""
    made = []
    for number in range(count):
        own = record("abc"[number % 3], number // 6, 0.3 + 0.6 * number / count, lr=0.1 + (number // 3) % 2, **more)
        own["partition"] |= {"class_counts": [[3, 0], [1, 7]]}
        made.append(own | {"config": {**own["config"], "cohort_size": 2}})
    return made


@browser
def test_boards_are_sorted_and_lines_switched_without_errors(tmp_path):
    look = """(() => {
      const table = document.querySelector("table.board")
      const column = at => [...table.tBodies[0].rows].map(row => row.cells[at].textContent)
      const heads = [...table.tHead.rows[0].cells]
      const place = heads.findIndex(head => head.textContent.startsWith("Selected"))
      const press = at => heads[at].querySelector("button").click()
      const visible = name => Bokeh.documents.map(d => d.get_model_by_name(name)).find(m => m).visible
      press(place)
      const down = column(place)
      press(place)
      const up = column(place)
      press(1)
      press(1)
      const methods = column(1)
      const box = document.querySelector('input[data-line="0-2"]')
      box.click()
      const switched = [visible("0-2-line"), visible("0-2-cost"), visible("0-1-line")]
      const all = document.querySelector("input[data-all]")
      all.click()
      const none = visible("0-1-line")
      all.click()
      return [down, up, methods, switched, none, visible("0-2-line")]
    })()"""
    values = [f"{number:.2f} (1)" for number in (80, 70, 60, 50, 40, 30)]
    expected = [values, values[::-1], ["a", "a", "b", "b", "c", "c"], [False, False, True], False, True]
    assert json.loads(seen(report(runs()), tmp_path, look)) == [expected, []]


@browser
def test_200_runs_fit_a_small_screen_and_fetch_nothing(tmp_path):
    many = [*runs(100), *runs(100, dataset="letters")]
    for number, own in enumerate(many):
        own["summary"]["params_sha256"] = str(number)
    page = report(many, "Many")
    assert len(page) < 2_500_000
    assert "Runs: 200" in page
    look = """(() => [
      document.documentElement.scrollWidth, innerWidth, document.querySelectorAll("table.board").length,
      performance.getEntriesByType("resource").length,
      [...document.querySelectorAll(".chart")].every(one => one.getBoundingClientRect().width <= innerWidth),
      [...document.querySelectorAll(".chart")].every(one => one.getBoundingClientRect().height > 300),
    ])()"""
    (needed, width, boards, fetched, narrow, high), errors = json.loads(seen(page, tmp_path, look, width=400))
    assert needed <= width
    assert (boards, fetched, narrow, high) == (2, 0, True, True)
    assert errors == []


def test_the_papers_numbers_and_crosses_are_on_the_page():
    lost = record("b", done=2, status="failed") | {"error": "NonFiniteLoss: the term"}
    own = find_records([Path(__file__).parent.parent / "results" / "records" / "fedfa-fmnist-c2"])
    found = [(page.count('<td class="number">74.60</td>'), page.count('<td class="number">84.08</td>'),
              "0-0-paper" in page, "diverged after this round" in page)
             for page in (report(own), report([record("a"), lost]))]  # fmt: skip
    assert found == [(1, 1, True, False), (0, 0, False, True)]


def test_names_from_records_are_escaped():
    harm = '<img src=x onerror="alert(1)"></script>'
    bad = record(harm, 0) | {"command": f"fedcli run {harm}", "dataset": harm, "class_names": [harm, "b"]}
    bad["partition"] |= {"class_counts": [[3, 0], [1, 7]], "flag": harm}
    page = report([bad, record("b", dataset=harm)], title=harm)
    assert "<img" not in page
    assert page.count("</script>") == page.count("<script")


def test_the_command_writes_the_runs_that_are_chosen(tmp_path):
    for number, own in enumerate(runs()):
        write(tmp_path / str(number), own)
    out = tmp_path / "page.html"
    given = ["report", str(tmp_path), "--out", str(out), "--method", "a", "--title", "Mine"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    page = out.read_text()
    assert "<h1>Mine</h1>" in page
    assert "Runs: 2." in page
    assert "fedcli run a --seeds 0,1" in page
    assert "http://" not in re.sub(r"<script>.*?</script>", "", page, flags=re.S)


def test_runs_without_rounds_have_a_board_and_bokeh_is_asked_for(monkeypatch):
    page = report([record(done=0, status="interrupted")])
    assert "interrupted after 0 of 4 rounds" in page
    monkeypatch.setitem(sys.modules, "bokeh.embed", None)
    with pytest.raises(UserError, match=r"pip install 'fedcli\[report\]'"):
        report([record()])
