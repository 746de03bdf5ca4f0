"""The open claims, run in pieces on one machine after the other: the same bits, and nothing begun that is lost."""

import json
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from fedcli import registry
from fedcli.data import datasets
from fedcli.results import plans
from fedcli.runs.checkpoints import STATES
from fedcli.runs.records import environment, read_record
from tests.programs import invoke, load_script

FILE = Path(__file__).parent.parent / "results" / "evidence" / "evidence.py"
MIB = 2**20


@pytest.fixture
def evidence(tmp_path, monkeypatch):
    """The script, in an empty folder, with the committed records out of sight."""
    module = load_script(FILE)
    for user in (plans, module):
        monkeypatch.setattr(user, "shipped", list)
    monkeypatch.setattr(module, "interrupt_on_signals", lambda: None)
    monkeypatch.chdir(tmp_path)
    return module


class Process(SimpleNamespace):
    """A program that has ended."""

    __hash__ = object.__hash__
    poll = lambda self: self.returncode  # noqa: E731
    wait = terminate = lambda self: None


def start_here(command, jobs):
    """Runs `fedcli` in this process."""
    return Process(returncode=invoke(*command).exit_code)


def ended(folder):
    """Where the runs under a folder ended, by method."""
    records = [read_record(file) for file in folder.rglob("record.json")]
    return {record["method"]: record["summary"]["params_sha256"] for record in records}


def test_runs_that_are_stopped_carried_and_taken_up_end_in_the_same_bits(evidence, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "WORK", [evidence.Work("", "fedfm:V", (row, "NMI")) for row in ("FedFM", "SCAFFOLD")])
    monkeypatch.setattr(evidence, "start", start_here)
    started = []
    for name in ("whole", "first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir("whole")
    evidence.main(["--tiny"])
    monkeypatch.chdir(tmp_path / "first")

    def start_once_round(command, jobs):
        started.append(start_here([*command, "--time-limit=0s"], jobs))
        if len(started) == 2:
            raise KeyboardInterrupt  # as by SIGTERM
        return started[-1]

    monkeypatch.setattr(evidence, "start", start_once_round)
    monkeypatch.setattr(evidence, "PART", 2**16)
    evidence.main(["--tiny", "--carry", "out"])
    parts = sorted(Path("out").iterdir())
    assert len(parts) > 1 >= max(part.stat().st_size for part in parts) / 2**16
    monkeypatch.setattr(evidence, "start", start_here)
    monkeypatch.chdir(tmp_path / "second")
    evidence.main(["--tiny", "--from", "../first/out"])
    assert {len(read_record(file)["rounds"]) for file in (tmp_path / "first").rglob("record.json")} == {1}
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
        "model": {"input": datasets.describe(run.setup.run.dataset)["shape"]}, "partition": {"sizes": [50000]},
        "rounds": [{"seconds": {"train": seconds, "evaluate": 0.0}}] * 2,
    }  # fmt: skip


def test_nothing_starts_that_can_neither_end_in_time_nor_be_carried(evidence, records):
    runs = evidence.planned_runs("float32", tiny=False)[0]
    firsts = {run.setup.method.name: run for run in reversed(runs)}
    fedfm, fedavg, scaffold = (firsts[name] for name in ("fedfm", "fedavg", "scaffold"))
    assert 42 * MIB < evidence.nbytes_of(fedfm) == evidence.nbytes_of(fedavg) < 44 * MIB
    assert evidence.nbytes_of(scaffold) == 11 * evidence.nbytes_of(fedavg)

    def starts(run, active=(), left=500.0, carry=True):
        return not evidence.obstacle(run, runs, active, left, carry)

    assert starts(fedfm)
    assert not starts(scaffold)  # nobody knows yet how long it takes
    assert starts(scaffold, carry=False)
    assert not starts(fedavg, active=[fedfm])  # only one of them can be carried
    records[fedfm.folder] = begun(fedfm, 6.0)
    assert starts(fedfm)
    assert not starts(fedavg)
    assert not starts(scaffold)
    assert starts(fedavg, left=601)
    assert starts(scaffold, left=601)
    assert not starts(fedavg, left=0)


def test_the_list_runs_both_rows_of_the_claims_that_it_names(evidence):
    runs = evidence.planned_runs("float32", tiny=False)[0]
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
