"""The page of the one board, from a made-up CSV: order, leads, ties and runs that diverged."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from fedcli.runs.record import read_record
from fedcli.runs.resolve import refuse_without_effect
from tests.commands import markdown_rows
from tests.scripts import load_script

FILE = Path(__file__).parent.parent / "results" / "board" / "board.py"
GLOBAL = "fedfa:digits"
# By method the headlines of seeds 0, 1, 2; None for a run that diverged.
RUNS = {
    "fedavg": (70.0, 72.0, 74.0),
    "scaffold": (80.0, 84.0, 85.0),  # 10, 12 and 11 ahead
    "fedprox": (60.0, None, 63.0),  # 10 and 11 behind
    "moon": (80.0, 84.0, 85.0),  # as the first
    "feddyn": (None, None, None),
}


@pytest.fixture
def board(tmp_path, monkeypatch):
    """The script, in a folder with the made-up CSV."""
    module = load_script(FILE)
    rows = []
    monkeypatch.setattr(module, "HERE", tmp_path)
    for method, values in RUNS.items():
        for seed, value in enumerate(values):
            status = "failed" if value is None else "finished"
            rows.append({
                "protocol": GLOBAL, "method": method, "seed": seed, "status": status, "selected": value or 99.0,
                "last-tenth": (value or 99.0) - 1, "classifier": None, "global": None, "tested": "global",
                "floats_sent": 12345, "memory_floats": 678,
            })  # fmt: skip
    pd.DataFrame(rows).to_csv(tmp_path / "board.csv")
    return module


def made_up_board(board, protocol, options):
    """A board of rows named as their methods, with their options."""
    rows = {method: board.TunedMethod(method, of_row) for method, of_row in options.items()}
    return board.Board(protocol, baseline="fedavg", settings={}, rows=rows)


def read(board):
    return pd.read_csv(board.HERE / "board.csv")


def test_the_page_has_every_method_the_best_first_beside_the_plain_one(board):
    options = {**{method: {"lr": 0.2} for method in RUNS}, "fedprox": {"lr": 0.4, "proximal_weight": 0.001}}
    made_up = made_up_board(board, GLOBAL, options)
    (table,) = board.split_runs(read(board), made_up)
    assert table.mark == GLOBAL
    runs = table.runs
    text = board.render_board(runs, made_up)
    assert "**" not in text  # the first two are equal

    rows = {row["Method"]: row for row in markdown_rows(text)}
    assert [*rows] == ["moon", "scaffold", "fedavg", "fedprox", "feddyn"]
    assert rows["fedprox"] == {  # 12.7062 is Student's t with one degree of freedom
        "Method": "fedprox", "Options": "lr 0.4, proximal weight 0.001", "Accuracy, %": "61.50 [42.44, 80.56] (2)",
        "Ahead of fedavg": "-10.50 [-16.85, -4.15] (2)", "Last tenth of the rounds, %": "60.50 [41.44, 79.56] (2)",
        "Floats sent a round": "12,345", "Floats held": "678", "Diverged": "1",
    }  # fmt: skip
    assert rows["fedavg"]["Ahead of fedavg"] == ""
    assert rows["feddyn"]["Accuracy, %"] == "–"

    ahead = board.render_board(runs[runs.method != "moon"], made_up)
    assert markdown_rows(ahead)[0]["Accuracy, %"].startswith("**83.00 [")

    of_scaffold_and_one_worse = runs[runs.method.isin(["scaffold", "fedavg"])]
    diverged = of_scaffold_and_one_worse.assign(status="finished")
    diverged.loc[(diverged.method == "scaffold") & (diverged.seed == 2), "status"] = "failed"
    assert "**" not in board.render_board(diverged, made_up)  # the best lacks a seed
    (row,) = markdown_rows(board.render_board(runs[runs.method == "fedavg"], made_up))
    assert row["Accuracy, %"].startswith("72.00 [")


def test_global_and_personal_models_stand_in_two_tables(board):
    personal = "own:personal"
    rows = []
    # Of each method the headlines of two seeds, and the accuracies of its global model where it has one beside.
    values = {
        "fedavg": ("global", [70.0, 72.0], [None, None]),
        "fedper": ("personal", [90.0, 96.0], [None, None]),
        "ditto": ("personal", [80.0, 99.0], [75.0, None]),
    }
    diverged = ("ditto", 1)  # method and seed
    for method, (tested, headlines, beside) in values.items():
        for seed, (headline, accuracy_of_global) in enumerate(zip(headlines, beside, strict=True)):
            status = "failed" if (method, seed) == diverged else "finished"
            rows.append({
                "protocol": personal, "method": method, "seed": seed, "status": status, "tested": tested,
                "selected": headline, "last-tenth": headline, "classifier": None, "global": accuracy_of_global,
                "floats_sent": 10, "memory_floats": 5,
            })  # fmt: skip
    made_up = made_up_board(board, personal, {method: {"lr": 0.2} for method in values})
    made_up = made_up._replace(settings={"eval_every": 12}, compared_models=("global", "personal"))
    tables = {}
    for table in board.split_runs(pd.DataFrame(rows), made_up):
        tables[table.mark] = {row["Method"]: row for row in markdown_rows(board.render_board(table.runs, made_up))}

    of_global = tables[f"{personal}, global"]
    assert [*of_global] == ["ditto", "fedavg"]
    assert of_global["ditto"]["Accuracy, %"] == "75.00 (1)"
    assert of_global["ditto"]["Ahead of fedavg"] == "+5.00 (1)"
    assert of_global["ditto"]["Diverged"] == "1"

    of_personal = tables[f"{personal}, personal"]
    assert [*of_personal] == ["fedper", "ditto", "fedavg"]
    assert of_personal["ditto"]["Accuracy, %"] == "80.00 (1)"
    assert of_personal["ditto"]["Diverged"] == "1"
    assert "Last tenth of the rounds, %" not in of_personal["fedper"]  # its last round alone is tested


def test_the_committed_page_is_that_of_the_committed_runs(board, tmp_path):
    for name in ("README.md", "board.csv", "options.json"):
        shutil.copy(FILE.parent / name, tmp_path)
    board.main(page=True)
    text = (FILE.parent / "README.md").read_text(encoding="utf-8")
    rows = read(board)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == text
    assert [*rows.columns] == board.COLUMNS
    order = [(protocol, row) for protocol, of_protocol in board.read_boards().items() for row in of_protocol.rows]
    assert [*dict.fromkeys(zip(rows.protocol, rows.method, strict=True))] == order

    for protocol, committed in board.read_boards().items():
        counts = rows[rows.protocol == protocol].groupby("method").size()
        assert counts.to_dict() == dict.fromkeys(committed.rows, len(board.SEEDS))
        for table in board.split_runs(rows, committed):
            assert f"<!-- {table.mark}: end -->" in text


def test_options_that_name_no_board_or_cancel_each_other_are_refused(board, tmp_path):
    shutil.copy(FILE.parent / "options.json", tmp_path)
    with pytest.raises(SystemExit, match=r"^error: --only must be a protocol of a board \(got 'own:persona'\)"):
        board.main(only="own:persona")
    with pytest.raises(SystemExit, match=r"^error: --page runs nothing, so --only has no effect"):
        board.main(page=True, only="own:personal")


def test_a_part_of_a_page_without_the_rows_of_the_others_is_refused(board, tmp_path):
    shutil.copy(FILE.parent / "options.json", tmp_path)
    (tmp_path / "board.csv").unlink()
    for given in ({"only": "own:personal"}, {"page": True}):
        with pytest.raises(
            SystemExit, match=r"^error: --page and --only take the other rows from board\.csv, which is "
        ):
            board.main(**given)


@pytest.mark.parametrize("missing", ["baseline", "settings", "rows"])
def test_a_board_that_lacks_a_part_is_refused(missing, board, tmp_path):
    entry = {"baseline": "fedavg", "settings": {}, "rows": {}}
    del entry[missing]
    (tmp_path / "options.json").write_text(json.dumps({GLOBAL: entry}))
    with pytest.raises(SystemExit, match=f"^error: the board {GLOBAL} must have {missing} \\(got "):
        board.main(page=True)


def test_a_row_that_is_gone_and_a_board_that_was_not_run_yet_leave_the_page_whole(board, tmp_path):
    entry = {"baseline": "fedavg", "settings": {}, "rows": {"fedavg": {"method": "fedavg", "options": {}}}}
    (tmp_path / "options.json").write_text(json.dumps({GLOBAL: entry, "own:personal": entry}))
    marks = (f"<!-- {name}: written by 'make tables' --><!-- {name}: end -->" for name in (GLOBAL, "own:personal"))
    (tmp_path / "README.md").write_text("\n".join(marks))
    board.main(page=True)
    text = (tmp_path / "README.md").read_text()
    assert "| fedavg |" in text
    assert "| scaffold |" not in text
    assert "Without runs of fedavg yet" in text

    entry["rows"]["fedavg"] = {"method": "fedavg", "option": {}}
    (tmp_path / "options.json").write_text(json.dumps({GLOBAL: entry}))
    with pytest.raises(
        SystemExit, match=r"^error: the row 'fedavg' of .* must have method and options \(got method, option"
    ):
        board.main(page=True)


def test_a_board_that_is_run_alone_keeps_its_place_in_the_csv(board, tmp_path, monkeypatch):
    made_up = {"baseline": "fedavg", "settings": {}, "rows": {"fedavg": {"method": "fedavg", "options": {}}}}
    protocols = [GLOBAL, "fedfm:digits", "own:personal"]
    (tmp_path / "options.json").write_text(json.dumps(dict.fromkeys(protocols, made_up)))
    rows = [dict.fromkeys(board.COLUMNS, 0) | {"protocol": protocol, "seed": 1} for protocol in protocols]
    pd.DataFrame(rows).to_csv(tmp_path / "board.csv", index=False)
    monkeypatch.setattr(board, "write_page", lambda boards: None)
    monkeypatch.setattr(
        board, "run_board", lambda run: pd.DataFrame([{**rows[0], "protocol": run.protocol, "seed": 2}])
    )
    board.main(only="fedfm:digits")
    assert [*read(board).protocol] == protocols
    assert [*read(board).seed] == [1, 2, 1]


def test_no_run_of_the_committed_options_is_refused(board, tmp_path):
    shutil.copy(FILE.parent / "options.json", tmp_path)
    runs = []
    for committed in board.read_boards().values():
        runs += board.plans.plan_table(board.make_table(committed), tmp_path, seeds=[0]).runs
    assert len(runs) == 99
    for run in runs:
        refuse_without_effect(run.setup)


def test_the_boards_are_run_and_their_runs_written_into_the_csv(board, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = {"train_examples": 120, "rounds": 2, "local_epochs": 1, "device": "cpu"}
    entries = {
        "fedavg": {"method": "fedavg", "options": small},
        "fedavg (slow)": {"method": "fedavg", "options": {**small, "lr": 0.01}},
    }
    made_up = {GLOBAL: {"baseline": "fedavg", "settings": {}, "rows": entries}}
    (tmp_path / "options.json").write_text(json.dumps(made_up))
    (tmp_path / "README.md").write_text("")
    monkeypatch.setattr(board, "SEEDS", (0,))
    execute = board.jobs.execute
    monkeypatch.setattr(board.jobs, "execute", lambda plan, watch, jobs, records_only: execute(plan, watch))
    board.main()
    rows = read(board)
    assert [*rows.method] == ["fedavg", "fedavg (slow)"]
    assert [*rows.columns] == board.COLUMNS
    assert rows.params_sha256.nunique() == 2

    for folder in board.RUNS.glob("*/*/seed-0"):
        record = read_record(folder)
        (row,) = rows[rows.params_sha256 == record["summary"]["params_sha256"]].to_dict("records")
        assert row["selected"] == pytest.approx(100 * record["summary"]["selected"])
        assert row["floats_sent"] == record["cost"]["floats_down"] + record["cost"]["floats_up"]
        assert row["memory_floats"] == record["cost"]["memory_floats"]

    monkeypatch.setattr(board.jobs, "execute", lambda plan, watch, jobs, records_only: {tmp_path: "no space left"})
    with pytest.raises(SystemExit, match=rf"1 runs have failed \(the first: no space left, in {tmp_path}\)"):
        board.main()
