"""The open claims, run in pieces on one machine after the other: the same bits, and nothing begun that is lost."""

import json
import math
from pathlib import Path

import pandas as pd
import pytest

from fedcli import registry
from fedcli.data import datasets
from fedcli.results import plans
from fedcli.runs.checkpoints import STATES
from fedcli.runs.config import flags_of
from fedcli.runs.records import environment, read_record
from fedcli.runs.signals import Ended, set_time_limit
from tests.programs import invoke, load_script

FILE = Path(__file__).parent.parent / "results" / "evidence" / "evidence.py"
MIB = 2**20
TINY = {
    "dataset": "digits", "backbone": "cnn-small", "num_clients": 4, "cohort_size": 2, "rounds": 3, "local_epochs": 1,
    "batch_size": 8, "device": "cpu",
}  # fmt: skip


@pytest.fixture
def evidence(tmp_path, monkeypatch):
    """The script, in an empty folder, with the committed records out of sight."""
    module = load_script(FILE)
    monkeypatch.setattr(plans, "shipped", list)
    monkeypatch.setattr(module, "interrupt_on_signals", lambda: None)
    monkeypatch.chdir(tmp_path)
    yield module
    set_time_limit(math.inf)


def ended(folder):
    """Where the runs under a folder ended, by method."""
    records = [read_record(file) for file in folder.rglob("record.json")]
    return {record["method"]: record["summary"]["params_sha256"] for record in records}


def test_runs_that_are_stopped_carried_and_taken_up_end_in_the_same_bits(evidence, tmp_path, monkeypatch):
    rows = ("FedFM", "SCAFFOLD")
    monkeypatch.setattr(evidence, "WORK", [evidence.Work("", "fedfm:V", (row, "NMI"), (0,), TINY) for row in rows])
    execute, stopped = evidence.jobs.execute, []
    for name in ("whole", "first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir("whole")
    evidence.main([])
    monkeypatch.chdir(tmp_path / "first")

    def execute_a_round_each(plan, watch, at_once):
        for run in plan.runs:
            invoke("run", run.method, *flags_of(run.given), f"--out={run.folder}", "--time-limit=0s")
            stopped.append(run.folder)
        raise Ended("interrupted", 143)  # as by SIGTERM

    monkeypatch.setattr(evidence.jobs, "execute", execute_a_round_each)
    monkeypatch.setattr(evidence, "PART", 2**16)
    evidence.main(["--carry", "out", "--jobs", "2"])
    set_time_limit(math.inf)
    parts = sorted(Path("out").iterdir())
    assert len(parts) > 1 >= max(part.stat().st_size for part in parts) / 2**16
    monkeypatch.setattr(evidence.jobs, "execute", execute)
    monkeypatch.chdir(tmp_path / "second")
    evidence.main(["--from", "../first/out"])
    assert {len(read_record(tmp_path / "first" / folder)["rounds"]) for folder in stopped} == {1}
    assert list((tmp_path / "second").rglob(f"{STATES}/*")) != []  # SCAFFOLD's clients
    assert len(ended(tmp_path / "whole")) == 2
    assert ended(tmp_path / "second") == ended(tmp_path / "whole")
    assert all("quality" in read_record(file) for file in (tmp_path / "second").rglob("record.json"))


@pytest.fixture
def records(evidence, monkeypatch):
    """Records of runs by their folders, in place of files."""
    made = {}
    monkeypatch.setattr(evidence, "read_begun", made.get)
    monkeypatch.setattr(evidence, "read_runs", lambda folders: pd.DataFrame({"record": list(made.values())}))
    monkeypatch.setattr(datasets, "present", lambda name: True)
    return made


def begun(run, seconds):
    """A record of two rounds that took so many seconds each."""
    return {
        "method": run.setup.method.name, "config": run.setup.values(), "status": "interrupted",
        "hardware": environment(run.setup.device)["hardware"],
        "model": {"input": datasets.describe(run.setup.run.dataset)["shape"]},
        "rounds": [{"seconds": {"train": seconds, "evaluate": 0.0}}] * 2,
    }  # fmt: skip


def test_nothing_starts_that_can_neither_finish_in_time_nor_be_carried(evidence, records):
    runs = evidence.planned_runs()
    firsts = {run.setup.method.name: run for run in reversed(runs)}
    fedfm, fedavg, scaffold = (firsts[name] for name in ("fedfm", "fedavg", "scaffold"))
    assert 42 * MIB < evidence.nbytes_of(fedfm) == evidence.nbytes_of(fedavg) < 44 * MIB
    assert evidence.nbytes_of(scaffold) == 11 * evidence.nbytes_of(fedavg)

    def chosen(*runs, left=500.0, carry=True, at_once=3):
        set_time_limit(left)
        return [run.setup.method.name for run in evidence.choose(evidence.refreshed(runs), at_once, carry)]

    assert chosen(fedfm, fedavg, scaffold) == ["fedfm"]  # only one can be carried, and nobody knows how long they take
    assert chosen(fedfm, fedavg, scaffold, carry=False) == ["fedfm", "fedavg", "scaffold"]
    assert chosen(fedfm, fedavg, scaffold, carry=False, at_once=2) == ["fedfm", "fedavg"]
    records[fedavg.folder] = begun(fedavg, 6.0)
    assert chosen(fedfm, fedavg, scaffold) == ["fedavg"]  # which has begun
    assert chosen(fedfm, fedavg, scaffold, left=605) == ["fedavg", "fedfm", "scaffold"]
    records[fedavg.folder]["status"] = "finished"
    assert chosen(fedfm, scaffold) == ["fedfm"]
    assert "MiB cannot be carried" in evidence.obstacle(scaffold, evidence.CARRIED)


def test_runs_follow_each_other_in_the_order_of_the_list_until_none_may_start(evidence, records, monkeypatch):
    runs = [run for run in evidence.planned_runs() if "fedfm:V" in run.label]
    started = []

    def execute(plan, watch, at_once):
        started.extend(plan.runs)
        records.update({run.folder: begun(run, 600.0) | {"status": "finished"} for run in plan.runs})
        return {}

    monkeypatch.setattr(evidence.jobs, "execute", execute)
    set_time_limit(500)
    evidence.work_through(runs, 1, carry=True)
    assert [(run.method, run.setup.run.seed) for run in started] == [
        ("fedfm", 0), ("fedavg", 0), ("fedavg", 1), ("fedfm", 1), ("fedavg", 2), ("fedfm", 2),
    ]  # fmt: skip
    evidence.work_through(evidence.refreshed(runs), 1, carry=True)
    assert len(started) == 6  # SCAFFOLD can neither finish nor be carried


def test_the_list_runs_both_rows_of_the_claims_that_it_names(evidence):
    runs = evidence.planned_runs()
    made = {(run.setup.method.name, json.dumps(run.given, sort_keys=True)) for run in runs}
    names = {name for work in evidence.WORK if not work.instead for name in work.decides.split() if ":" in name}
    claims = [claim for claim in registry.claims() if claim.name in names]
    assert len(claims) == len(names) == 9
    for claim in claims:
        complete = []
        for row in (claim.row, *claim.others):
            cells = [cell for cell in registry.find_table(claim.table).cells if cell.row == row]
            cells = [cell for cell in cells if cell.column in (*claim.columns, *claim.less)]
            options = [{**cell.settings, "seed": seed} for cell in cells for seed in (0, 1, 2)]
            complete.append({(cells[0].method, json.dumps(given, sort_keys=True)) for given in options} <= made)
        assert complete[0], claim
        assert any(complete[1:]), claim
