"""The page to look at, in a headless Chromium: what is sorted and switched, 200 runs, a small screen, no network."""

import json
import re
import sys
from pathlib import Path

import numpy as np
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


LOST = record("b", done=2, status="failed") | {"error": "NonFiniteLoss: the term"}


def drawn(monkeypatch, runs):
    """The charts of a page, by their places, and its text."""
    found = {}
    monkeypatch.setattr("bokeh.embed.json_item", lambda chart, place: found.update({place: chart}))
    page = re.sub(r"<script>.*?</script>", "", report(runs), flags=re.S)
    return [*found.values()], page


def data(chart, name):
    """What stands behind the part of a chart that has this name."""
    return chart.select_one({"name": name}).data_source.data


def test_the_papers_numbers_and_crosses_are_on_the_page(monkeypatch):
    study = Path(__file__).parent.parent / "results" / "records" / "fedfa-fmnist-c2"
    own = find_records([study / "fedavg", study / "fedfa"])
    (curves, *_), page = drawn(monkeypatch, own)
    heads, *rows = (re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall("<tr>.*?</tr>", page))
    place = next(at for at, head in enumerate(heads) if "Paper, %" in head)
    assert heads[place - 1].startswith("<button>Selected")
    printed = {row[1]: row[place] for row in rows}
    assert {name.removeprefix("<b>").removesuffix("</b>"): number for name, number in printed.items()} == {
        "fedavg": "74.60", "fedfa": "84.08"
    }  # fmt: skip
    for number, row in enumerate(rows):
        paper = data(curves, f"0-{number}-paper")
        assert paper["value"] == 2 * [float(row[place])]
        assert paper["round"] == [1, own[0]["config"]["rounds"]]
    assert len(curves.hover.renderers) == 4  # lines and the paper's
    (curves, *_), page = drawn(monkeypatch, find_records([study.with_name("fedfa-fmnist-c2-phases")]))
    assert sorted(re.findall(r"<td[^>]*>(\d\d\.\d\d)</td>", page)) == ["73.19", "76.81", "82.05", "84.90"]  # Table 5
    (curves, *_), page = drawn(monkeypatch, [record("a"), LOST])
    assert "Paper, %" not in page
    cross = data(curves, "0-1-cross")
    assert (cross["name"], cross["round"]) == (["b, diverged after this round"], [2])
    assert cross["value"] == pytest.approx([50])
    assert data(curves, "0-1-diverged")["xs"] == [[1, 2]]
    assert len(curves.hover.renderers) == 2


def test_long_curves_are_thinned_evenly_between_the_first_round_and_the_last(monkeypatch):
    (curves, *_), _ = drawn(monkeypatch, [record("a", seed, 0.5 + seed / 10, done=600, rounds=600) for seed in (0, 1)])
    shown, band = data(curves, "0-0-line"), data(curves, "0-0-band")
    rounds = np.array(shown["round"])
    assert (len(rounds), rounds[0], rounds[-1]) == (250, 1, 600)
    assert set(np.diff(rounds)) == {2, 3}
    assert shown["value"] == pytest.approx(55 - 10 * np.abs(rounds - 2))
    deviation = 50**0.5  # of two values 10 apart
    assert (band["x"], band["y1"][0], band["y2"][0]) == (rounds.tolist(), *(
        pytest.approx(45 + sign * deviation) for sign in (-1, 1)
    ))  # fmt: skip


def test_costs_and_looks_are_those_of_the_boards_rows(monkeypatch):
    waiting = record("a", done=0, status="interrupted")
    found = [record("b", seed, 0.5 + seed / 5, cohort_size=2) for seed in (0, 1)]
    (curves, costs), _ = drawn(monkeypatch, [waiting, *found, LOST, record("c", cohort_size=30)])
    cost = data(costs, "0-1-cost")
    assert (cost["floats"], cost["value"]) == ([2 * 4 * 12400], [pytest.approx(60)])
    colours = [curves.select_one({"name": f"0-{row}-line"}).glyph.line_color for row in (1, 3)]
    assert [costs.select_one({"name": f"0-{row}-cost"}).glyph.fill_color for row in (1, 3)] == colours
    assert colours[0] != colours[1]
    assert type(costs.x_scale).__name__ == "LogScale"
    assert curves.select_one({"name": "0-0-line"}) is None


def test_the_area_of_a_bubble_is_the_number_of_images_and_every_board_has_its_own(monkeypatch):
    other = record("a", dataset="letters")
    other["partition"] |= {"class_counts": [[0, 0, 4], [1, 0, 0]]}
    charts, page = drawn(monkeypatch, [*runs(1), other])
    assert [re.findall(r'id="chart-(\d)"', part) for part in page.split("<section>")[1:]] == [[*"012"], [*"345"]]
    (bubbles,) = charts[5].renderers
    bubbles = bubbles.data_source.data
    assert (bubbles["client"], bubbles["class"], bubbles["images"]) == ([0, 1], [2, 0], [4, 1])
    assert bubbles["name"] == ["2", "0"]
    assert bubbles["size"][0] == 2 * bubbles["size"][1]


def test_the_same_runs_give_the_same_page():
    def page():
        """With Bokeh's numbers, which count on in a process, in the place of each that of its first use."""
        places = {}
        return re.sub(r'"p\d+"', lambda found: str(places.setdefault(found[0], len(places))), report(runs()))

    assert page() == page()


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
