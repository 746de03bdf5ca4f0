"""The file that `fedcli bench --csv` appends to."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pandas as pd
import pytest

from fedcli.bench import csv_file, speed
from fedcli.bench.csv_file import RENAMED_COLUMNS, append_csv
from tests.bench_parts import run_bench
from tests.commands import error_of

NAMES_OF_COLUMNS = [  # in files of the first version that wrote them, of later ones, and today
    ("engine", "way", "mode"),
    ("samples_per_second", "examples_per_second", "examples_per_second"),
    ("data_seconds_share", "around_training_share", "around_training_share"),
    ("evaluation_seconds", "evaluation_seconds", "test_seconds"),
    ("floor_seconds", "bound_seconds", "estimate_seconds"),
    ("floor_share", "bound_share", "estimate_share"),
    ("arithmetic_floor_seconds", "arithmetic_bound_seconds", "arithmetic_estimate_seconds"),
    ("memory_floor_seconds", "memory_bound_seconds", "memory_estimate_seconds"),
    ("evaluation_floor_seconds", "evaluation_bound_seconds", "test_estimate_seconds"),
]


pytestmark = pytest.mark.usefixtures("reduced_workloads")


@pytest.mark.parametrize(
    "text",
    [
        "workload,way\nw1,looped\nw1,looped,1,2\n",
        "workload,way\nw1,looped,\n",  # of which the first field would be lost
        "workload,way,engine\nw1,looped,looped\n",  # one column by two earlier names
        "workload,mode,way\nw1,looped,looped\n",  # one by its name today and an earlier one
        "workload,mode,mode\nw1,looped,looped\n",
        "workload,,\nw1,looped,looped\n",
    ],
)
def test_a_file_that_cannot_be_appended_to_is_refused_before_anything_is_timed(text, folder, monkeypatch):
    monkeypatch.setattr(speed, "time_case", None)
    (folder / "out.csv").write_text(text)
    assert "'out.csv' cannot be read" in error_of("bench", "w1", "--device", "cpu", "--csv", "out.csv")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_rows_of_both_kinds_keep_all_their_numbers(order, three_rounds, tmp_path):
    of_workload = three_rounds.timing
    of_method = replace(of_workload, workload="fedfm:niid-1", plain=None, whole_seconds=3.5)
    written = [(of_workload, of_method)[kind].as_dict() for kind in order]
    for result in written:
        append_csv(tmp_path / "out.csv", result)
    rows = pd.read_csv(tmp_path / "out.csv", dtype=str)
    assert set(rows.columns) == set().union(*written)
    for (_, row), result in zip(rows.iterrows(), written, strict=True):
        expected = {name: str(value) for name, value in result.items() if value is not None}
        assert dict(row.dropna()) == expected


@pytest.mark.parametrize("version", [0, 1])
def test_columns_of_a_file_that_an_earlier_version_wrote_go_on_by_their_new_names(version, three_rounds, tmp_path):
    result = three_rounds.timing.as_dict()
    of_tests = "test_estimate_seconds"  # which only earlier versions measured
    earlier_names = {names[-1]: names[version] for names in NAMES_OF_COLUMNS}
    assert earlier_names.keys() <= {*result, of_tests}
    earlier = pd.DataFrame([{**result, of_tests: 0.5}]).rename(columns=earlier_names)
    earlier.to_csv(tmp_path / "out.csv", index=False)
    append_csv(tmp_path / "out.csv", result)
    rows = pd.read_csv(tmp_path / "out.csv")
    assert [*rows.columns] == [*result, of_tests]
    for name in earlier_names.keys() - {of_tests}:
        assert [*rows[name]] == [result[name]] * 2
    assert rows[of_tests][0] == 0.5


def test_results_of_several_processes_at_once_are_all_in_the_file(tmp_path, monkeypatch):
    """As of threads here, each with a descriptor of its own, which a lock tells apart as well."""
    read = csv_file._read

    def read_slowly(path):
        content = read(path)
        time.sleep(0.02)
        return content

    monkeypatch.setattr(csv_file, "_read", read_slowly)
    with ThreadPoolExecutor(4) as pool:
        for index in range(8):
            pool.submit(append_csv, tmp_path / "out.csv", {"workload": "w1", "seed": index})
    assert sorted(pd.read_csv(tmp_path / "out.csv").seed) == list(range(8))


def test_a_file_that_a_spreadsheet_wrote_goes_on(tmp_path):
    text = '"workload","note"\r\n"w1","of, the lab"\r\n'
    (tmp_path / "out.csv").write_text(text, encoding="utf-8-sig", newline="")
    csv_file.prepare_csv(tmp_path / "out.csv")
    append_csv(tmp_path / "out.csv", {"workload": "w2", "seed": 3})
    assert (tmp_path / "out.csv").read_text() == 'workload,note,seed\nw1,"of, the lab",\nw2,,3\n'


def test_every_earlier_name_of_a_column_is_tried():
    earlier_names = {}
    for *earlier, latest in NAMES_OF_COLUMNS:
        earlier_names |= {name: latest for name in earlier if name != latest}
    assert earlier_names == RENAMED_COLUMNS


def test_a_file_to_append_to_may_be_empty_and_is_a_file(folder):
    (folder / "out.csv").touch()
    run_bench("w1", "--csv", "out.csv")
    assert [*pd.read_csv("out.csv").workload] == ["w1"]
    os.mkfifo("pipe")
    (folder / "results").mkdir()
    for path in ("pipe", "results", "/dev/null"):
        assert f"'{path}' is not a file" in error_of("bench", "w1", "--device", "cpu", "--csv", path)
