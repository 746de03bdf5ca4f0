"""The page and the figure of the one board, from a made-up CSV: order, leads, ties and runs that diverged."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from fedcli.results.metrics import interval
from fedcli.runs.config import refuse_without_effect
from tests.programs import load_script
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
    PERSONAL: {"local": (50.0, 52.0, 54.0)},
}
OPTIONS = {at: {method: {"lr": 0.2} for method in methods} for at, methods in RUNS.items()}
OPTIONS[GLOBAL]["fedprox"] = {"lr": 0.4, "proximal_weight": 0.001}
OPTIONS[GLOBAL]["moon"] = {"lr": 0.2, "contrastive_weight": 1.0}


@pytest.fixture
def board(tmp_path, monkeypatch):
    """The script, in a folder with the made-up CSV."""
    module = load_script(FILE)
    monkeypatch.setattr(module, "HERE", tmp_path)
    (tmp_path / "options.json").write_text(json.dumps(OPTIONS))
    rows = []
    for protocol, methods in RUNS.items():
        for method, values in methods.items():
            for seed, value in enumerate(values):
                done = value is not None
                rows.append({
                    "protocol": protocol, "method": method, "seed": seed, "status": "finished" if done else "failed",
                    "selected": value if done else 99.0, "last-tenth": value - 1 if done else 99.0,
                    "classifier": None, "floats_sent": 12345 - seed, "memory_floats": 678,
                })  # fmt: skip
    pd.DataFrame(rows).to_csv(tmp_path / "board.csv")
    return module


def read(board):
    return pd.read_csv(board.HERE / "board.csv")


def told(values, form=".2f"):
    mean, low, high, _ = interval(values)
    return f"{mean:{form}} [{low:{form}}, {high:{form}}]"


def test_the_page_has_every_method_the_best_first_beside_the_plain_one(board):
    text = board.section(read(board), GLOBAL)
    said = "Ahead of fedavg, beyond chance: scaffold, moon. Behind it: fedprox. Not to be told from it with 10 seeds: "
    assert text.startswith(f"{said}fednova.\n\n")
    assert "**" not in text  # the first two are equal
    rows = {row["Method"]: row for row in cells(text.partition("\n\n")[2])}
    assert [*rows] == ["scaffold", "moon", "fednova", "fedavg", "fedprox", "feddyn"]
    assert rows["fedprox"] == {
        "Method": "fedprox", "Tuned": "lr 0.4 ↑, proximal weight 0.001 ↓", "Accuracy, %": told([60.0, 63.0]),
        "Ahead of fedavg": told([-10.0, -11.0], "+.2f"), "Last tenth of the rounds, %": told([59.0, 62.0]),
        "Floats sent a round": "12,345", "Floats held": "678", "Seeds": "2, 1 diverged",
    }  # fmt: skip
    assert (rows["fedavg"]["Ahead of fedavg"], rows["feddyn"]["Accuracy, %"]) == ("", "–")


def test_the_committed_page_is_that_of_the_committed_runs(board, tmp_path, monkeypatch):
    for name in ("README.md", "board.csv", "options.json"):
        shutil.copy(FILE.parent / name, tmp_path)
    monkeypatch.setattr(board, "write", lambda *given, **how: None)
    board.main([])
    text, rows = (FILE.parent / "README.md").read_text(encoding="utf-8"), read(board)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == text
    for protocol in board.BOARDS:
        counts = rows[rows.protocol == protocol].groupby("method").size()
        assert counts.to_dict() == dict.fromkeys(board.lines_of(protocol), len(board.SEEDS))
        assert f"<!-- {protocol}: end -->" in text


def test_no_run_of_the_committed_options_is_refused(board, tmp_path, monkeypatch):
    monkeypatch.setattr(board, "HERE", FILE.parent)
    plans = [board.plans.plan(board.table(protocol), tmp_path, seeds=[0]) for protocol in board.BOARDS]
    runs = {run.label: run for plan in plans for run in plan.runs}
    assert len(runs) == 56
    for run in runs.values():
        refuse_without_effect(run.setup)


def test_matching_on_top_is_tuned_after_its_methods_with_their_weight(board, tmp_path, monkeypatch):
    assert board.fixed("fedprox-fm", GLOBAL)["proximal_weight"] == 0.001
    assert "proximal_weight" not in board.fixed("fedprox-fm", "fedfm:digits")  # not tuned there
    (tmp_path / "options.json").write_text("{}")
    asked = {}

    best = SimpleNamespace(values={"lr": 0.1, "proximal_weight": 0.5, "contrastive_weight": 5.0})
    monkeypatch.setattr(board.tune, "plan", lambda method, out, **given: asked.update({method: given}))
    monkeypatch.setattr(board.tune, "rank", lambda plan, errors: [best])
    monkeypatch.setattr(board, "EXECUTE", lambda plan: {})
    board.tune_all(GLOBAL)
    assert sorted(asked) == sorted(board.GLOBAL)
    assert [*asked][-2:] == ["fedprox-fm", "moon-fm"]
    assert asked["fedprox-fm"]["proximal_weight"] == 0.5
    board.tune_all(GLOBAL)  # nothing is left
    assert len(asked) == len(board.tuned(GLOBAL))


def test_the_rows_of_a_board_that_is_run_take_the_place_of_its_old_ones(board, tmp_path, monkeypatch):
    run = record("fedavg", 1, status="finished", protocol=GLOBAL)
    run["hardware"]["name"] = "CPU"
    for number, entry in enumerate(run["rounds"]):
        entry.update(floats_down=100, floats_up=0 if number else 2 * len(run["rounds"]), classifier_accuracy=0.2)
    planned = SimpleNamespace(
        cells=[SimpleNamespace(cell=SimpleNamespace(row="fedavg"), runs=[SimpleNamespace(record=run)])]
    )
    monkeypatch.setattr(board.plans, "plan", lambda *given: planned)
    monkeypatch.setattr(board, "EXECUTE", lambda plan: {})
    others = read(board)
    board.run_all(GLOBAL)
    new, *kept = read(board).to_dict("records")
    assert [row["method"] for row in kept] == list(others[others.protocol == PERSONAL].method)
    assert {name: new[name] for name in ("selected", "classifier", "floats_sent", "machine")} == {
        "selected": 50.0, "classifier": 20.0, "floats_sent": 102, "machine": "CPU, torch 2.13",
    }  # fmt: skip
    monkeypatch.setattr(board, "EXECUTE", lambda plan: {tmp_path: "no space left"})
    with pytest.raises(SystemExit, match="1 runs have failed"):
        board.run_all(GLOBAL)


def test_the_figure_has_means_and_intervals(board, monkeypatch):
    monkeypatch.setattr(board, "BOARDS", {at: board.BOARDS[at] for at in RUNS})
    left, right = board.figure(read(board)).axes
    names = ["scaffold", "moon", "fednova", "fedavg", "fedprox"]
    assert [label.get_text() for label in left.get_yticklabels()] == names
    mean, low, high, _ = interval(list(RUNS[GLOBAL]["scaffold"]))
    dots, bars = zip(*((dot, bar) for dot, _, (bar,) in left.containers), strict=True)
    assert dots[0].get_xydata().tolist() == [[pytest.approx(mean), 0]]
    assert bars[0].get_segments()[0].ravel() == pytest.approx([low, 0, high, 0])
    assert [dots[3].get_color() == dot.get_color() for dot in dots] == [False] * 3 + [True, False]
    assert len(right.containers) == 1
