"""The page and the figure of the one board, from a made-up CSV: order, leads, ties and runs that diverged."""

import csv
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedcli.results.metrics import interval
from fedcli.runs.config import refuse_without_effect
from tests.test_tables import cells, record

FILE = Path(__file__).parent.parent / "results" / "board" / "board.py"
GLOBAL, PERSONAL = "fedfa:digits", "fedsa:digits-mixed"
# By protocol and method the headlines of seeds 0, 1, ...; None for a run that diverged.
RUNS = {
    GLOBAL: {
        "fedavg": (70.0, 72.0, 74.0),
        "scaffold": (80.0, 84.0, 85.0),  # 10, 12 and 11 ahead
        "fedprox": (60.0, None, 63.0),  # 10 and 11 behind
        "moon": (80.0, 84.0, 85.0),  # as the first
        "feddyn": (None, None, None),
        "fednova": (69.0, 72.0, 78.0),  # by chance
    },
    PERSONAL: {"fedproto": (51.0, 53.0, 55.1), "local": (50.0, 52.0, 54.0), "fccl": (61.0, 63.0, 65.0)},
}
BY_CLASSIFIER = {"fedproto": (81.0, 82.0, 84.0)}  # the headline is the nearest prototype's
OPTIONS = {
    GLOBAL: {
        **{method: {"lr": 0.2} for method in RUNS[GLOBAL]},
        "fedprox": {"lr": 0.4, "proximal_weight": 0.001},
        "moon": {"lr": 0.2, "contrastive_weight": 1.0},
    },
    PERSONAL: {method: {"lr": 0.02} for method in RUNS[PERSONAL]},
}


@pytest.fixture
def board(tmp_path, monkeypatch):
    """The script, in a folder with the made-up CSV."""
    spec = importlib.util.spec_from_file_location("board", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "HERE", tmp_path)
    (tmp_path / "options.json").write_text(json.dumps(OPTIONS))
    with (tmp_path / "board.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        accuracies = ("selected", "last-tenth", "classifier")
        costs = ("floats_sent", "memory_floats", "params_sha256")
        writer.writerow(("protocol", "method", "seed", "status", *accuracies, *costs, "machine"))
        for protocol, methods in RUNS.items():
            for method, values in methods.items():
                for seed, value in enumerate(values):
                    done = ("failed", 99.0, 99.0) if value is None else ("finished", value, value - 1)
                    classifier = BY_CLASSIFIER[method][seed] if method in BY_CLASSIFIER else ""
                    writer.writerow((protocol, method, seed, *done, classifier, 12345 - seed, 678, "", "CPU"))
    return module


def told(values, form=".2f"):
    mean, low, high, _ = interval(values)
    return f"{mean:{form}} [{low:{form}}, {high:{form}}]"


def test_the_page_has_every_method_the_best_first_beside_the_plain_one(board):
    first, second = (f"Method{board.section(board.read(), at).partition('| Method')[2]}" for at in (GLOBAL, PERSONAL))
    rows = {row["Method"]: row for row in cells(f"| {first}")}
    assert [*rows] == ["scaffold", "moon", "fednova", "fedavg", "fedprox", "feddyn"]
    assert rows["fedprox"] == {
        "Method": "fedprox", "Tuned": "lr 0.4 ↑, proximal weight 0.001 ↓", "Accuracy, %": told([60.0, 63.0]),
        "Ahead of fedavg": told([-10.0, -11.0], "+.2f"), "Last tenth of the rounds, %": told([59.0, 62.0]),
        "Floats sent a round": "12,345", "Floats held": "678", "Seeds": "2, 1 diverged",
    }  # fmt: skip
    assert (rows["fedavg"]["Ahead of fedavg"], rows["feddyn"]["Accuracy, %"]) == ("", "–")
    assert "**" not in first  # the first two are equal
    said = "Ahead of fedavg, beyond chance: scaffold, moon. Behind it: fedprox. Not to be told from it with 10 seeds: "
    assert board.section(board.read(), GLOBAL).startswith(f"{said}fednova.\n\n")
    rows = cells(f"| {second}")
    assert [row["Method"] for row in rows] == ["fccl", "fedproto", "local"]
    assert [row["By the classifier, %"] for row in rows] == ["", told([81.0, 82.0, 84.0]), ""]
    assert rows[0]["Accuracy, %"] == f"**{told([61.0, 63.0, 65.0])}**"  # ahead by 10, 10 and 9.9


def test_the_committed_page_is_that_of_the_committed_runs(board, monkeypatch):
    monkeypatch.setattr(board, "HERE", FILE.parent)
    text, rows = (FILE.parent / "README.md").read_text(encoding="utf-8"), board.read()
    assert board.page(rows, text) == text
    for protocol in board.HEADINGS:
        assert f"<!-- {protocol}: end -->" in text
        counts = rows[rows.protocol == protocol].groupby("method").size()
        assert counts.to_dict() == dict.fromkeys(board.lines_of(protocol), len(board.SEEDS))


def test_no_run_of_the_committed_options_is_refused(board, tmp_path, monkeypatch):
    monkeypatch.setattr(board, "HERE", FILE.parent)
    plans = [board.plans.plan(board.table(protocol), tmp_path, seeds=[0]) for protocol in board.HEADINGS]
    runs = {run.label: run for plan in plans for run in plan.runs}
    assert len(runs) == 56
    for run in runs.values():
        refuse_without_effect(run.setup)


def test_matching_on_top_is_tuned_after_its_methods_with_their_weight(board, tmp_path, monkeypatch):
    assert board.fixed("fedprox-fm", GLOBAL)["proximal_weight"] == 0.001
    assert "proximal_weight" not in board.fixed("fedprox-fm", "fedfm:digits")  # not tuned there
    (tmp_path / "options.json").write_text("{}")
    asked = {}

    def tune(method, texts, out, execute, **given):
        asked[method] = given
        return [SimpleNamespace(values={"lr": 0.1, "proximal_weight": 0.5, "contrastive_weight": 5.0})], out

    monkeypatch.setattr(board.tune, "tune", tune)
    board.tune_all(GLOBAL)
    assert sorted(asked) == sorted(board.GLOBAL)
    assert [*asked][-2:] == ["fedprox-fm", "moon-fm"]
    assert asked["fedprox-fm"]["proximal_weight"] == 0.5
    board.tune_all(GLOBAL)  # nothing is left
    assert len(asked) == len(board.tuned()[GLOBAL])


def test_the_rows_of_a_board_that_is_run_take_the_place_of_its_old_ones(board, tmp_path, monkeypatch):
    run = record("fedavg", 1, status="finished", protocol=GLOBAL)
    run["hardware"]["name"] = "CPU"
    for number, entry in enumerate(run["rounds"]):
        entry.update(floats_down=100, floats_up=0 if number else 2 * len(run["rounds"]), classifier_accuracy=0.2)
    planned = SimpleNamespace(
        cells=[SimpleNamespace(cell=SimpleNamespace(row="fedavg"), runs=[SimpleNamespace(record=run)])]
    )
    monkeypatch.setattr(board.plans, "plan", lambda *given: planned)
    monkeypatch.setattr(board, "side_by_side", lambda plan: {})
    others = board.read()
    board.run_all(GLOBAL)
    new, *kept = board.read().to_dict("records")
    assert [row["method"] for row in kept] == list(others[others.protocol == PERSONAL].method)
    assert {name: new[name] for name in ("selected", "classifier", "floats_sent", "machine")} == {
        "selected": 50.0, "classifier": 20.0, "floats_sent": 102, "machine": "CPU, torch 2.13",
    }  # fmt: skip
    monkeypatch.setattr(board, "side_by_side", lambda plan: {tmp_path: "no space left"})
    with pytest.raises(SystemExit, match="1 runs have failed"):
        board.run_all(GLOBAL)


def test_the_figure_has_a_panel_a_board_with_means_and_intervals(board, monkeypatch):
    monkeypatch.setattr(board, "HEADINGS", {at: board.HEADINGS[at] for at in (GLOBAL, PERSONAL)})
    left, right = board.figure(board.read()).axes
    names = [label.get_text() for label in left.get_yticklabels()]
    assert names == ["scaffold", "moon", "fednova", "fedavg", "fedprox"]
    dots = [line for line in left.lines if line.get_marker() == "o"]
    bars = [line for line in left.lines if line.get_marker() != "o"]
    mean, low, high, _ = interval(list(RUNS[GLOBAL]["scaffold"]))
    assert dots[0].get_xydata().tolist() == [[pytest.approx(mean), 0]]
    assert bars[0].get_xydata().ravel() == pytest.approx([low, 0, high, 0])
    assert [dots[3].get_color() == dot.get_color() for dot in dots] == [False] * 3 + [True, False]
    assert len(right.lines) == 6


def test_page_alone_is_made_from_the_csv(board, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(board, "write", lambda *given, **how: drawn.append(given[:2]))
    monkeypatch.setattr(board, "HEADINGS", {GLOBAL: board.HEADINGS[GLOBAL]})
    (tmp_path / "README.md").write_text(f"<!-- {GLOBAL}: written by 'make tables' -->\nold\n<!-- {GLOBAL}: end -->\n")
    monkeypatch.setattr(sys, "argv", ["board.py", "--page"])
    board.main()
    assert board.section(board.read(), GLOBAL) in (tmp_path / "README.md").read_text()
    assert drawn == [(tmp_path / "board.png", board.figure)]
    monkeypatch.setattr(sys, "argv", ["board.py", "globe"])
    with pytest.raises(SystemExit, match=r"board.py fedfa:digits"):
        board.main()
