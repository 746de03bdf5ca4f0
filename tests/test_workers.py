"""Several workers of one run: law 8, kills, interruptions and errors on one of them."""

import json
import os
import signal

import fedcli
from fedcli.runs.records import read_record
from tests import law_8
from tests.programs import SMALL, Waiting, start
from tests.test_runs import essence

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
    running = start(tmp_path, tmp_path, program=("-c", "from tests.law_8 import main; main()"))
    expected = law_8.endings()
    _, errors = running.communicate(timeout=SLOW)
    assert running.returncode == 0, errors
    for count in law_8.COUNTS:
        found = json.loads((tmp_path / str(count)).read_text())
        assert found.keys() == expected.keys()
        assert [name for name in expected if found[name] != expected[name]] == []


def test_a_killed_worker_an_interruption_and_another_number_of_workers_leave_the_same_bits(tmp_path):
    waiting = Waiting(tmp_path)
    options = (*SMALL, "--out", "run", "--checkpoint-every", "1")
    running = start(tmp_path, "run", "./waits.py", *options, "--workers", "2")
    os.kill(waiting.two(SLOW)[0], signal.SIGKILL)
    waiting.two(SLOW)  # both, started again
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=SLOW)
    assert running.returncode == 130, errors
    assert errors.splitlines()[-1].startswith("interrupted after 1/3 rounds; 'fedcli resume run")
    assert "Traceback" not in errors
    waiting.free()
    again = start(tmp_path, "resume", "run", "--method", "./waits.py", "--workers", "3")
    output, errors = again.communicate(timeout=SLOW)
    assert (again.returncode, errors) == (0, "")
    assert output.count("round 3/3:") == 1

    given = dict(zip((flag[2:].replace("-", "_") for flag in SMALL[::2]), SMALL[1::2], strict=True))
    numbers = {name: int(value) if value.isdecimal() else value for name, value in given.items()}
    whole = fedcli.run(str(tmp_path / "waits.py"), out=tmp_path / "whole", checkpoint_every=1, **numbers)
    record = read_record(tmp_path / "run")
    assert essence(record)["rounds"] == essence(whole.record)["rounds"]
    assert record["summary"] == whole.record["summary"]
    assert record["resumed"] == [1, 1]
    assert (record["engine"]["workers"], whole.record["engine"]["workers"]) == (3, 1)


def test_an_error_on_one_worker_ends_all_with_one_line(tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    process = start(tmp_path, "run", "./fails.py", *SMALL, "--out", "run", "--workers", "2")
    _, errors = process.communicate(timeout=SLOW)
    assert process.returncode == 2
    assert len(errors.splitlines()) == 1
    assert errors.startswith("error: on worker 1, ")
    assert "only here" in errors
    assert read_record(tmp_path / "run")["status"] == "failed"
