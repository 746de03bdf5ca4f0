"""The page and the figure of the one board, from a made-up CSV: order, leads, ties and runs that diverged."""

import csv
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedcli.results.metrics import interval
from fedcli.runs.config import without_effect
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
        "fedfm-lite": (40.0, 41.0, 42.0),
        "fedfm-lite (all rounds)": (68.0, 73.0, 72.0),
    },
    PERSONAL: {
        "fedproto": (51.0, 53.0, 55.1),
        "local": (50.0, 52.0, 54.0),
        "fccl": (61.0, 63.0, 65.0),
        "local (Adam)": (45.0, 48.0, 49.0),
    },
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
    monkeypatch.setitem(sys.modules, "board", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "HERE", tmp_path)
    (tmp_path / "options.json").write_text(json.dumps(OPTIONS))
    half = ("scaffold", "fccl")
    timed = [f"{at},{line},{60 if line in half else 120}" for at in RUNS for line in module.lines_of(at)]
    (tmp_path / "seconds.csv").write_text("\n".join(["protocol,method,seconds", *timed, ""]))
    with (tmp_path / "board.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            (
                "protocol",
                "method",
                "seed",
                "status",
                "selected",
                "last-tenth",
                "classifier",
                "floats_sent",
                "memory_floats",
                "machine",
            )
        )
        for protocol, methods in RUNS.items():
            for method, values in methods.items():
                for seed, value in reversed([*enumerate(values)]):
                    text = (seed, "failed", 99.0, 99.0) if value is None else (seed, "finished", value, value - 1)
                    text += (BY_CLASSIFIER[method][seed] if method in BY_CLASSIFIER else "",)
                    costs = (0 if value is None else 12345 - abs(seed - 1), 678, "CPU, torch 2" if seed else "another")
                    writer.writerow((protocol, method, *text, *costs))
    return module


def told(values, form=".2f"):
    mean, low, high, _ = interval(values)
    return f"{mean:{form}} [{low:{form}}, {high:{form}}]"


def test_the_page_has_every_method_the_best_first_beside_the_plain_one(board):
    page = board.page(board.read())
    first, second = (f"Method{part}" for part in page.split("| Method")[1:])
    rows = cells(f"| {first}")
    by_name = {row["Method"]: row for row in rows}
    assert [*by_name] == [
        "scaffold", "moon", "fednova", "fedavg", "fedfm-lite (all rounds)", "fedprox", "fedfm-lite", "feddyn",
    ]  # fmt: skip
    assert by_name["fedfm-lite (all rounds)"]["Tuned"] == by_name["fedfm-lite"]["Tuned"] == "lr 0.2"
    assert "\n\nFedFM-Lite exchanges models in every fifth round; " in first
    assert "FedFM-Lite exchanges" not in second
    assert by_name["fedprox"] == {
        "Method": "fedprox", "Tuned": "lr 0.4 ↑, proximal weight 0.001 ↓", "Accuracy, %": told([60.0, 63.0]),
        "Ahead of fedavg": told([-10.0, -11.0], "+.2f"), "Last tenth of the rounds, %": told([59.0, 62.0]),
        "Floats sent a round": "12,344", "Floats held": "678", "Seeds": "2, 1 diverged",
    }  # fmt: skip
    assert by_name["scaffold"]["Ahead of fedavg"] == told([10.0, 12.0, 11.0], "+.2f")
    assert by_name["scaffold"]["Floats sent a round"] == "12,345"  # the most of any run
    assert by_name["fedavg"]["Ahead of fedavg"] == ""
    assert (by_name["feddyn"]["Accuracy, %"], by_name["feddyn"]["Seeds"]) == ("–", "0, 3 diverged")
    assert (by_name["fedavg"]["Tuned"], by_name["fedavg"]["Seeds"]) == ("lr 0.2", "3")
    assert "(CPU, torch 2; another)" in page
    assert "(297 trials; " in page  # 3 x 57, 3 x 42
    # 18 and 20 lines with 10 seeds in two processes, 120 seconds each but for scaffold and fccl with 60
    assert " all 380 runs again " in page
    assert "`options.json`: 175 minutes of two cores for one global model," in page
    assert " and 195 for models of their own, " in page
    assert " it tunes first, 4.8 hours more " in page
    assert "(`fedfm:digits`)\n\nNot all of its runs have ended.\n" in page
    assert (
        "Ahead of fedavg, beyond chance: scaffold, moon. Behind it: fedprox, fedfm-lite. Not to be told from it" in page
    )
    assert "10 seeds: fednova, fedfm-lite (all rounds)." in page  # and not the one without a run
    assert "**" not in first  # the first two are equal
    assert "\n\nTuned to the highest learning rate tried, so that a higher one may be better: fedprox.\n" in page
    assert page.count("Tuned to the highest") == 1
    rows = cells(f"| {second}")
    assert [row["Method"] for row in rows] == ["fccl", "fedproto", "local", "local (Adam)"]
    assert [row["Tuned"] for row in rows] == ["lr 0.02"] * 3 + [""]  # it has a rate of its own
    assert "classifier" not in first
    assert [row["By the classifier, %"] for row in rows] == ["", told([81.0, 82.0, 84.0]), "", ""]
    assert "\n\nBy the nearest prototype, not by the classifier, are tested: fedproto.\n" in second
    assert rows[0]["Accuracy, %"] == f"**{told([61.0, 63.0, 65.0])}**"  # ahead by 10, 10 and 9.9
    assert "Ahead of local, beyond chance: fccl, fedproto. Behind it: local (Adam)." in page
    assert page.index(f"(`{GLOBAL}`)") < page.index(f"(`{PERSONAL}`)")


def test_the_committed_page_is_that_of_the_committed_runs(board, monkeypatch):
    monkeypatch.setattr(board, "HERE", FILE.parent)
    boards = board.read()
    assert (FILE.parent / "README.md").read_text(encoding="utf-8") == board.page(boards)
    for protocol, lines in boards.items():
        assert {line.method for line in lines} == set(board.lines_of(protocol))
        assert {len(line.headline) + line.diverged for line in lines} == {len(board.SEEDS)}


def test_matching_on_top_has_the_weight_that_its_method_was_tuned_to_and_a_variant_its_own_option(board):
    assert board.fixed("fedprox-fm", GLOBAL)["proximal_weight"] == 0.001
    assert "proximal_weight" not in board.fixed("fedprox-fm", "fedfm:digits")  # not tuned there
    assert "proximal_weight" not in board.fixed("fedprox", GLOBAL)
    settings = {cell.row: cell.settings for cell in board.table("global", "One", (GLOBAL,)).cells}
    assert settings["fedfm-lite (all rounds)"] == {**settings["fedfm-lite"], "model_interval": 1}
    assert (settings["fedfm-lite"]["lr"], settings["fedprox-fm"]["proximal_weight"]) == (0.2, 0.001)


def test_no_run_of_the_committed_options_is_refused(board, tmp_path, monkeypatch):
    monkeypatch.setattr(board, "HERE", FILE.parent)
    monkeypatch.setattr(board, "RUNS", tmp_path)
    runs = [run for name in board.TABLES for run in board.planned(name, 0).runs]
    assert len(runs) == 56
    assert {run.label: found for run in runs if (found := without_effect(run.setup, run.given))} == {}


def test_matching_on_top_is_tuned_after_its_methods(board, tmp_path, monkeypatch):
    (tmp_path / "options.json").write_text("{}")
    waves = []

    def side_by_side(work, given):
        waves.append([method for _, method in given])
        return [(one, ({"lr": 0.1}, 0.5)) for one in given]

    monkeypatch.setattr(board, "side_by_side", side_by_side)
    board.tune_all([GLOBAL])
    first, second = waves
    assert (sorted(second), sorted([*first, *second])) == (["fedprox-fm", "moon-fm"], sorted(board.GLOBAL))


def test_the_figure_has_a_panel_a_board_with_means_and_intervals(board):
    left, right = board.figure(board.read()).axes
    assert [label.get_text() for label in left.get_yticklabels()] == [
        "scaffold",
        "moon",
        "fednova",
        "fedavg",
        "fedfm-lite (all rounds)",
        "fedprox",
        "fedfm-lite",
    ]
    assert left.yaxis_inverted()
    dots = [line for line in left.lines if line.get_marker() == "o"]
    bars = [line for line in left.lines if line.get_marker() != "o"]
    found = [interval([value for value in RUNS[GLOBAL][name] if value]) for name in ("scaffold", "fedprox")]
    for at, (mean, low, high, _) in zip((0, 5), found, strict=True):
        assert dots[at].get_xydata().tolist() == [[pytest.approx(mean), at]]
        assert bars[at].get_xydata().ravel() == pytest.approx([low, at, high, at])
    assert [dots[3].get_color() == dot.get_color() for dot in dots] == [False] * 3 + [True] + [False] * 3
    assert [len(axes.lines) for axes in (left, right)] == [14, 8]
    own = [line.get_color() == dots[3].get_color() for line in right.lines if line.get_marker() == "o"]
    assert own == [False, False, True, False]  # the plain one


def test_page_alone_is_drawn_from_the_csv_and_rows_are_those_of_the_runs(board, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["board.py", "--page"])
    drawn = []
    monkeypatch.setattr(board, "write", lambda *given: drawn.append(given[:2]))
    board.main()
    assert (tmp_path / "README.md").read_text() == board.page(board.read())
    assert drawn == [(tmp_path / "board.png", board.figure)]
    monkeypatch.setattr(board, "HERE", tmp_path / "empty")
    with pytest.raises(SystemExit, match="there is no"):
        board.main()
    monkeypatch.setattr(board, "HERE", tmp_path)

    def planned(name, seed):
        run = record("fedavg", seed, status="finished" if seed else "failed", protocol=GLOBAL)
        run["hardware"]["name"] = "CPU"
        for number, entry in enumerate(run["rounds"]):
            entry.update(floats_down=100, floats_up=0 if number else 2 * len(run["rounds"]), classifier_accuracy=0.2)
        run = SimpleNamespace(record=run, state=state if seed else "diverged", folder="here")
        found = [
            SimpleNamespace(runs=[run], cell=SimpleNamespace(metric=kind, row="fedavg"))
            for kind in ("selected", "last-tenth")
        ]
        return SimpleNamespace(cells=found)

    monkeypatch.setattr(board, "planned", planned)
    monkeypatch.setattr(board, "SEEDS", (0, 1))
    state = "finished"
    lost, whole = board.rows("global")
    assert whole == {
        "protocol": GLOBAL, "method": "fedavg", "seed": 1, "status": "finished", "selected": 50.0,
        "last-tenth": pytest.approx(30.0), "classifier": 20.0, "floats_sent": 102,  # by mean
        "memory_floats": 1,
        "params_sha256": "1" * 64, "machine": "CPU, torch 2.13",
    }  # fmt: skip
    assert (lost["seed"], lost["status"]) == (0, "failed")
    state = "running"
    with pytest.raises(SystemExit, match="the run 'here' has not ended"):
        list(board.rows("global"))


def test_a_table_that_is_named_is_run_alone_and_the_rows_of_the_other_stay(board, tmp_path, monkeypatch):
    before = board.stored()
    asked = []
    for name in ("tune_all", "write"):
        monkeypatch.setattr(board, name, lambda *given: None)
    monkeypatch.setattr(board, "side_by_side", lambda work, given: asked.extend(given) or [])
    monkeypatch.setattr(board, "rows", lambda name: ({**row, "selected": 99.0} for row in before[:6]))
    monkeypatch.setattr(sys, "argv", ["board.py", "global"])
    board.main()
    assert asked == [("global", seed) for seed in range(10)]
    after = board.stored()
    assert [row["selected"] for row in after[:6]] == ["99.0"] * 6
    assert after[6:] == [row for row in before if row["protocol"] == PERSONAL]
    assert "99.00" in (tmp_path / "README.md").read_text()
    monkeypatch.setattr(sys, "argv", ["board.py", "globe"])
    with pytest.raises(SystemExit, match=r"board.py global"):
        board.main()


def test_the_page_foresees_every_line(board, monkeypatch):
    monkeypatch.setattr(board, "HERE", FILE.parent)
    for protocol in board.HEADINGS:
        assert board.seconds(protocol).keys() == board.lines_of(protocol).keys()


def test_runs_that_have_ended_keep_their_records_alone(board, tmp_path, monkeypatch):
    ended, failed = tmp_path / "ended", tmp_path / "failed"
    for folder in (ended, failed):
        folder.mkdir()
        for name in (
            "record.json",
            *(f"{kind}.safetensors" for kind in ("checkpoint", "checkpoint-before", "selected")),
        ):
            (folder / name).touch()
    runs = [SimpleNamespace(folder=folder) for folder in (ended, failed)]
    monkeypatch.setattr(board, "planned", lambda *given: SimpleNamespace(runs=runs))
    monkeypatch.setattr(board.jobs, "execute", lambda plan, watch: {failed: "no space left"})
    assert board.run_seed("personal", 0) == {failed: "no space left"}
    assert [path.name for path in ended.iterdir()] == ["record.json"]
    assert len([*failed.iterdir()]) == 4  # it goes on from there


WORK = """
from pathlib import Path

def work(number):
    Path(f"begun-{number}").touch()
    if number == 1:
        raise KeyboardInterrupt
    return 10 * number
"""
PROGRAM = """
import board, mine
board.PROCESSES = 1
for given, found in board.side_by_side(mine.work, [(number,) for number in range(5)]):
    print(given, found, flush=True)
"""


def test_a_process_that_is_interrupted_begins_nothing_more(tmp_path):
    (tmp_path / "mine.py").write_text(WORK)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (FILE.parent, tmp_path)))}
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == "(0,) 0\n"
    assert "BrokenProcessPool" in done.stderr
    assert sorted(path.name for path in tmp_path.glob("begun-*")) == ["begun-0", "begun-1"]
