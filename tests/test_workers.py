"""Several workers of one run: law 8, and errors on one of them."""

import json

from fedcli.runs.records import read_record
from tests import law_8
from tests.programs import SMALL, start

SLOW = 300  # seconds until a test fails that waits for a group of processes

# FedAvg, but on the second of two workers it fails in the second round.
FAILS = """
import os
from dataclasses import replace
from fedcli.papers.baselines import fedavg
from fedcli.registry import find_method

def run_round(state, cohort, fed, config):
    if cohort.round == 1 and os.environ.get("RANK") == "1":
        raise ValueError("only here")
    return fedavg.run_round(state, cohort, fed, config)

METHOD = replace(find_method("fedavg"), name="fails", run_round=run_round)
"""


def test_law_8_workers_are_invisible(tmp_path):
    program = ("-c", "from tests.law_8 import main; main()")
    running = [start(tmp_path, count, tmp_path / f"{count}", program=program) for count in (2, 3)]
    expected = law_8.endings()
    for count, process in zip((2, 3), running, strict=True):
        _, errors = process.communicate(timeout=SLOW)
        assert process.returncode == 0, errors
        found = json.loads((tmp_path / f"{count}").read_text())
        assert found.keys() == expected.keys()
        assert [name for name in expected if found[name] != expected[name]] == []


def test_an_error_on_one_worker_ends_all_with_one_line(tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    process = start(tmp_path, "run", "./fails.py", *SMALL, "--out", "run", "--workers", "2")
    _, errors = process.communicate(timeout=SLOW)
    assert process.returncode == 2
    assert len(errors.splitlines()) == 1
    assert errors.startswith("error: on worker 1, ")
    assert "only here" in errors
    assert read_record(tmp_path / "run")["status"] == "failed"
