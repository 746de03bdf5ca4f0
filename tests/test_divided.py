"""Rounds divided among workers: what is kept of them, the model, and the scaling of a sample."""

import json

import pytest
from typer.testing import CliRunner

from fedcli.bench import divided
from fedcli.cli import app as cli
from fedcli.errors import UserError
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
    page = divided.page([one, two], "workers.png")
    assert "| w | 2 x 1 | 4 | 5.3 | 4.5 | 0.2 | 0.6 | 1 | 4.7 |" in page
    assert "each of 10 clients has a worker" in page


def test_what_is_computed_on_a_sample_is_scaled_to_the_whole_workload(monkeypatch, tmp_path):
    monkeypatch.setattr(divided, "DIVIDED", {"half": TINY})
    monkeypatch.setattr(divided, "SAMPLE", {"half": TINY.images_per_client // 2})
    seconds = iter([1.0, 3.0, 5.0])

    def timed(work, device):
        work()
        work.func.__self__.fed.seconds["train"] = taken = next(seconds)
        return taken + 0.25

    monkeypatch.setattr(divided, "seconds_of", timed)
    assert divided.rounds_of_worker("half", 1, {"device": "cpu", "repeats": 2}, str(tmp_path / "rounds")) == 0
    found = json.loads((tmp_path / "rounds").read_text())
    assert found == [[3.0 * 2 * TINY.local_epochs, 0.0, 0.25, 0], [5.0 * 2 * TINY.local_epochs, 0.0, 0.25, 0]]


def test_numbers_of_workers_begin_with_one(tmp_path):
    result = CliRunner().invoke(cli.app, ["bench", "--workers", "2,4"])
    assert result.exit_code == 2
    assert "--workers must be distinct numbers of workers, 1 among them (got 2,4)" in result.output
