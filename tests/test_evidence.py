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
    """The script, in an empty folder, with the committed records out of sight; it runs `fedcli` in this process."""
    module = load_script(FILE)
    for user in (plans, module):
        monkeypatch.setattr(user, "shipped", list)
    monkeypatch.setattr(module, "interrupt_on_signals", lambda: None)
    monkeypatch.setattr(module, "start", start)
    monkeypatch.chdir(tmp_path)
    return module


class Process(SimpleNamespace):
    """A program that has ended."""

    __hash__ = object.__hash__
    poll = lambda self: self.returncode  # noqa: E731
    wait = terminate = lambda self: None


def start(command):
    return Process(returncode=invoke(*command).exit_code)


def records_in(folder):
    return [read_record(file) for file in sorted(folder.rglob("record.json"))]


def test_runs_that_are_stopped_carried_and_taken_up_end_in_the_same_bits(evidence, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "WORK", [evidence.Work("", "fedfm:V", (row, "NMI")) for row in ("FedFM", "SCAFFOLD")])
    whole, first, second = (tmp_path / name for name in ("whole", "first", "second"))
    started = []

    def start_once_round(command):
        started.append(start([*command, "--time-limit=0s"]))
        if len(started) == 2:
            raise KeyboardInterrupt  # as by SIGTERM
        return started[-1]

    for folder in (whole, first, second):
        folder.mkdir()
    monkeypatch.chdir(whole)
    evidence.main(tiny=True)
    monkeypatch.chdir(first)
    monkeypatch.setattr(evidence, "start", start_once_round)
    monkeypatch.setattr(evidence, "PART", 2**16)
    evidence.main(tiny=True, carry=Path("out"))
    parts = sorted(Path("out").iterdir())
    assert len(parts) > 1 >= max(part.stat().st_size for part in parts) / 2**16
    assert [len(record["rounds"]) for record in records_in(first)] == [1, 1]
    monkeypatch.setattr(evidence, "start", start)
    monkeypatch.chdir(second)
    evidence.main(tiny=True, origin="../first/out")
    assert list(second.rglob(f"{STATES}/*")) != []  # SCAFFOLD's clients
    ends = [[record["summary"]["params_sha256"] for record in records_in(folder)] for folder in (whole, second)]
    assert len(ends[0]) == 2
    assert ends[0] == ends[1]
    assert all("quality" in record for record in records_in(second))


def test_nothing_starts_that_can_neither_end_in_time_nor_be_carried(evidence, monkeypatch):
    records = {}  # by the folders of the runs, in place of files
    monkeypatch.setattr(evidence, "read_begun", records.get)
    monkeypatch.setattr(evidence, "read_runs", lambda folders: pd.DataFrame({"record": list(records.values())}))
    monkeypatch.setattr(datasets, "present", lambda name: True)
    runs = evidence.planned_runs(tiny=False)
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
    records[fedfm.folder] = {  # of two rounds that took six seconds each
        "method": "fedfm", "config": fedfm.setup.values(), "status": "interrupted", "partition": {"sizes": [50000]},
        "hardware": environment(fedfm.setup.device)["hardware"], "model": {"input": (3, 32, 32)},
        "rounds": [{"seconds": {"train": 6.0, "evaluate": 0.0}}] * 2,
    }  # fmt: skip
    assert starts(fedfm)
    assert not starts(fedavg)
    assert not starts(scaffold)
    assert starts(fedavg, left=601)
    assert starts(scaffold, left=601)
    assert not starts(fedavg, left=0)


def test_the_list_runs_both_rows_of_the_claims_that_it_names(evidence):
    runs = evidence.planned_runs(tiny=False)
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
