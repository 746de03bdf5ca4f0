"""Records that are found in folders and read: each once, anew where they have changed, and rounds of one as a table."""

import sys
from pathlib import Path

import pytest

from fedcli.results import run_records, run_tables
from tests.example_records import make_record, write_unsigned_record
from tests.user_errors import raises_user_error


def test_records_are_found_at_any_depth_and_once(tmp_path):
    write_unsigned_record(tmp_path / "a" / "deep" / "run", make_record("one"))
    write_unsigned_record(tmp_path / "b", make_record("two"))
    first, second = run_records.find_records([tmp_path / "b", tmp_path, tmp_path / "b" / "record.json"])
    assert first == {**make_record("two"), "folder": tmp_path / "b"}
    assert second == {**make_record("one"), "folder": tmp_path / "a" / "deep" / "run"}


def test_a_run_that_would_have_two_labels_is_refused(tmp_path):
    write_unsigned_record(tmp_path / "a", make_record("one"))
    write_unsigned_record(tmp_path / "b", make_record("two"))
    overlapping = [tmp_path, tmp_path / "a"]
    with raises_user_error(f"the run '{tmp_path / 'a'}' would have two labels (got --label 'all' and 'a' for "):
        run_records.find_records(overlapping, ["all", "a"])
    labels = [record["label"] for record in run_records.find_records(overlapping, ["all", "all"])]
    assert labels == ["all: one", "all: two"]


def test_a_record_that_grows_is_read_again_and_kept_once(tmp_path):
    rows = []
    for rounds_done in (2, 3, 4):
        write_unsigned_record(tmp_path, make_record(rounds_done=rounds_done, status="running"))
        rows += run_records.read_runs([tmp_path])
        assert run_records.read_runs([tmp_path])[0] is rows[-1]  # not read anew
    assert [len(row.record["rounds"]) for row in rows] == [2, 3, 4]
    # Beside this test somebody holds the last row alone.
    first, second, last = [sys.getrefcount(row) for row in rows]
    assert first == second == last - 1


def test_a_record_that_is_gone_since_its_folder_was_searched_is_left_out(tmp_path, monkeypatch, caplog):
    write_unsigned_record(tmp_path / "b", make_record("two"))
    gone = tmp_path / "a" / "record.json"
    monkeypatch.setattr(Path, "rglob", lambda folder, name: [gone, tmp_path / "b" / "record.json"])
    assert [row.method for row in run_records.read_runs([tmp_path])] == ["two"]
    assert f"left out: '{gone}' cannot be read (No such file" in caplog.text


def test_a_term_that_is_called_an_accuracy_stays_as_it_is():
    record = make_record(selected=0.5)
    for entry in record["rounds"]:
        entry["terms"] = {"own_accuracy": 0.25}
    table = run_tables.tabulate_rounds(record)
    assert table["terms/own_accuracy"].tolist() == [0.25] * 4
    assert table["test_accuracy"][1] == 50
    assert table["validation_accuracy"][1] == pytest.approx(55)
