"""Rounds divided among workers: what is measured and kept of them, the model, the page, the table and the figure."""

import itertools
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fedcli.bench import divided
from fedcli.cli import app as cli
from fedcli.errors import UserError
from fedcli.runs.workers import current
from tests.test_bench import TINY


def pair(name, machine="here"):
    one = divided.Divided(name, 10, 1, 1, 8.0, 0.0, 0.5, 0.0, rounds=4, machine=machine)
    return one, divided.Divided(name, 10, 2, 1, 4.5, 0.2, 0.6, 2.0**20, rounds=4, machine=machine)


def test_what_was_measured_of_a_workload_takes_its_place_among_what_is_kept(tmp_path):
    file = tmp_path / "page.csv"
    assert divided.read(file) == []
    divided.write(file, pair("digits"))
    assert divided.write(file, pair("w1")) == divided.read(file) == [*pair("w1"), *pair("digits")]
    assert divided.write(file, pair("w1")[:1]) == [pair("w1")[0], *pair("digits")]
    assert divided.write(file, pair("w2", "there")) == list(pair("w2", "there"))
    file.write_text("a,b\n")
    with pytest.raises(UserError, match="does not hold measurements"):
        divided.read(file)


def test_rounds_at_other_numbers_of_workers_are_modelled_by_what_was_measured():
    one, two = pair("w")
    four = divided.modelled([one, two], 4)
    assert (four.compute, four.server) == (8.0 * 3 / 10, 0.5)
    assert four.gather == pytest.approx(0.4 * 3 / 4)
    assert divided.modelled([one, two], 1).seconds == one.seconds
    whole, many = replace(one, threads=2, compute=5.0), replace(two, workers=4, gather=9.0)
    assert divided.modelled([whole, one, many, two], 4) == four  # by one thread alone and the fewest workers


def test_the_page_tells_what_shares_the_cores_and_models_the_others(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    one, two = pair("w")
    many = replace(two, workers=4, gather=0.3)
    rows = [replace(one, threads=3, compute=1230.0), many, replace(two, workers=3), two, one]
    page = divided.page(rows)
    assert "fedcli bench w --workers 1,2,3,4 --page PATH" in page
    assert [line for line in page.splitlines() if line.startswith("| w | ")][:5] == [
        "| w | 1 x 3 | 4 | 1,230 | 1,230 | 0 | 0.5 | 0 |  |",
        "| w | 4 x 1, sharing 3 cores | 4 | 5.4 | 4.5 | 0.3 | 0.6 | 1 |  |",
        "| w | 3 x 1 | 4 | 5.3 | 4.5 | 0.2 | 0.6 | 1 | 3.97 |",
        "| w | 2 x 1 | 4 | 5.3 | 4.5 | 0.2 | 0.6 | 1 | 4.7 |",
        "| w | 1 x 1 | 4 | 8.5 | 8 | 0 | 0.5 | 0 | 8.5 |",
    ]


@pytest.mark.parametrize(
    ("clients", "gather", "server", "expected"),
    [
        (10, 0.0, 0.0, "16: each of 10 clients has a worker"),
        (1000, 0.0, 0.0, "not up to 64"),
        (1000, 4.0, 1.0, "1: with 2, gathering takes 44% of the round"),  # 8 + 1 seconds, then 4 + 4 + 1
        (1000, 0.5, 8.0, "4: with 8, the server's step takes 81% of the round"),  # 2 + 0.75 + 8, then 1 + 0.875 + 8
    ],
)
def test_where_more_workers_stop_paying_by_hand(clients, gather, server, expected):
    rows = [replace(row, clients=clients, gather=gather * row.gather / 0.2, server=server) for row in pair("w")]
    assert f" {expected} |" in divided.page(rows)


def test_numbers_of_workers_take_turns_and_the_medians_are_of_all_turns(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    asked, code = [], 0

    def launch(work, name, threads, options, file, *, count, restarts):
        assert (work, options, restarts) == (divided.rounds_of_worker, {"device": "cpu", "repeats": 3}, 0)
        asked.append((name, count, threads))
        first = 10.0 * asked.count(asked[-1])
        Path(file).write_text(json.dumps([[first + number, 2.0, 3.0, 4] for number in (0, 1, 5)]))
        return code

    monkeypatch.setattr(divided, "launch", launch)
    rows = divided.measure(["w1"], [1, 2], lambda text: None, device="cpu", repeats=3)
    assert asked == 2 * [("w1", 1, 2), ("w1", 1, 1), ("w1", 2, 1)]
    assert [(row.workers, row.threads, row.numbers, row.rounds) for row in rows] == [
        (*how, (22.5, 17.5, 2.0, 3.0, 4 / 2**20), 6)  # of 10, 11, 15, 20, 21 and 25
        for how in ((1, 2), (1, 1), (2, 1))
    ]
    assert (rows[0].clients, rows[0].machine[:8]) == (10, "2 cores ")
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    asked.clear()
    assert len(divided.measure(["w1"], [1, 2], lambda text: None, device="cpu", repeats=3)) == 2
    assert asked == 2 * [("w1", 1, 1), ("w1", 2, 1)]
    asked.clear()
    with pytest.raises(UserError, match="--precision must be"):
        divided.measure(["w1", "digits"], [1, 2], lambda text: None, device="cpu", repeats=3, precision="half")
    assert asked == []
    code = 130
    with pytest.raises(KeyboardInterrupt):
        divided.measure(["w1"], [1, 2], lambda text: None, device="cpu", repeats=3)


def test_what_is_computed_on_a_sample_is_scaled_to_the_whole_workload(monkeypatch, tmp_path):
    workload = replace(TINY, image_size=8, backbone="cnn-small")
    monkeypatch.setattr(divided, "DIVIDED", {"half": workload})
    monkeypatch.setattr(divided, "SAMPLE", {"half": TINY.images_per_client // 2})
    small, threads, seconds = [], [], itertools.cycle([1.0, 3.0, 5.0])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)

    def timed(work, device):
        small.append(sys.float_info.min / 2)
        work()
        work.func.__self__.fed.seconds["train"] = taken = next(seconds)
        current().seconds += 0.5  # of the training
        current().nbytes += 7
        return taken + 0.25

    monkeypatch.setattr(divided, "seconds_of", timed)
    given = "half", 2, {"device": "cpu", "repeats": 2}
    assert divided.rounds_of_worker(*given, str(tmp_path / "rounds")) == 0
    found = json.loads((tmp_path / "rounds").read_text())
    assert found == [[train * 2 * TINY.local_epochs, 0.5, 0.25, 7] for train in (2.5, 4.5)]  # the first round warms up
    assert threads == [2, 1, 1]  # one for a small network, as in a run
    if torch.set_flush_denormal(False):  # as in a run, where the processor can
        assert small == [0, 0, 0]
    monkeypatch.setattr(current(), "number", 1)
    divided.rounds_of_worker(*given, str(tmp_path / "second"))
    assert not (tmp_path / "second").exists()


def test_the_command_prints_a_table_and_writes_a_page_with_its_figure(monkeypatch, tmp_path):
    asked = []

    def measure(names, counts, progress, **options):
        asked.append((names, counts, options))
        one, two = pair("digits")
        return [replace(one, threads=2, compute=1230.0), one, two]

    monkeypatch.setattr(divided, "measure", measure)
    monkeypatch.setenv("COLUMNS", "120")
    page = tmp_path / "new" / "workers.md"
    bench = lambda *given: CliRunner().invoke(cli.app, ["bench", *map(str, given), "--workers", "2,1"])  # noqa: E731
    result = bench("--repeats", "7", "--seed", "3", "--device", "cpu", "--precision", "bf16", "--method", "fedfm")
    lines = [re.split(" {2,}", line.strip()) for line in result.output.splitlines()]
    assert lines == [
        ["Workload", "Workers", "Threads", "Round", "Computing", "Gathering", "Server", "MiB gathered"],
        ["digits", "1", "2", "1,230", "1,230", "0", "0.5", "0"],
        ["digits", "1", "1", "8.5", "8", "0", "0.5", "0"],
        ["digits", "2", "1", "5.3", "4.5", "0.2", "0.6", "1"],
    ]
    options = {"method": "fedfm", "precision": "bf16", "repeats": 7, "seed": 3, "device": "cpu"}
    assert asked == [(["w1", "w2", "digits"], [1, 2], options)]
    page.parent.mkdir()
    divided.write(page.with_suffix(".csv"), pair("w1"))
    result = bench("digits", "--page", page)
    assert result.output.splitlines()[-1] == str(page)
    assert len(divided.read(page.with_suffix(".csv"))) == 5
    assert page.read_text() == divided.page(divided.read(page.with_suffix(".csv")))
    page.with_suffix(".csv").write_text("a,b\n")
    assert "does not hold measurements" in bench("--page", page).output
    assert len(asked) == 2  # it is not measured for a page that cannot be written


def test_numbers_of_workers_begin_with_one(tmp_path):
    result = CliRunner().invoke(cli.app, ["bench", "--workers", "2,4"])
    assert result.exit_code == 2
    assert "--workers must be distinct numbers of workers, 1 among them (got 2,4)" in result.output
