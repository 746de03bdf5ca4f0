"""A record is run again: by 'fedcli verify', and by the command that it has."""

import shlex
from pathlib import Path

import pytest

import fedcli
from fedcli.cli import display
from fedcli.core.federation import NonFiniteLoss
from fedcli.results.costs import paces
from fedcli.results.frame import read_runs
from fedcli.results.tables import machines
from fedcli.runs.records import read_record, write_record
from fedcli.runs.run import resume
from fedcli.runs.verify import compare
from tests.programs import invoke
from tests.test_runs import TINY, Stop, StopAfter, essence
from tests.test_trust import NETS

ANOTHER = "another result on the same machine and version"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(display, "draw", lambda record, folder: None)
    monkeypatch.chdir(tmp_path)


def last_line(result):
    return result.stdout.splitlines()[-1]


def test_a_record_is_verified_and_one_that_was_changed_is_not():
    record = fedcli.run("fedavg", out="a run", **TINY, clients_per_chunk="2").record
    result = invoke("verify", "a run/record.json", "--out", "again")
    assert (result.exit_code, last_line(result)) == (0, "same bits")
    assert read_record(Path("again"))["engine"]["clients_per_chunk"] == 2
    record["summary"]["params_sha256"] = "0" * 64
    write_record(Path("a run"), record)
    result = invoke("verify", "a run", "--out", "third")
    assert result.exit_code == 1
    assert last_line(result).startswith(f"{ANOTHER}: the parameters")
    write_record(Path("a run"), {**record, "status": "interrupted"})
    result = invoke("verify", "a run")
    assert (result.exit_code, "has not finished (it is interrupted)" in result.stderr) == (2, True)


def test_a_run_of_a_device_that_is_not_here_is_verified_on_another():
    record = fedcli.run("fedavg", out="a run", **TINY).record
    write_record(Path("a run"), {**record, "config": {**record["config"], "device": "cuda:7"}})
    assert "--device cuda:7 not found" in invoke("verify", "a run").stderr
    result = invoke("verify", "a run", "--device", "cpu")
    assert (result.exit_code, last_line(result)) == (0, "same bits")


def test_a_run_that_diverged_is_verified_by_its_curve_and_its_end():
    with pytest.raises(NonFiniteLoss):
        fedcli.run("fedavg", out="a run", **{**TINY, "rounds": 5, "lr": 1e9})
    record = read_record(Path("a run"))
    number = len(record["rounds"]) + 1
    result = invoke("verify", "a run")
    assert (result.exit_code, last_line(result)) == (0, f"same bits until both diverge in round {number}")
    assert compare(record, {**record, "error": "NonFiniteLoss: later"}) == (
        f"another end: NonFiniteLoss: later; was: {record['error']}", False
    )  # fmt: skip
    whole = {name: value for name, value in record.items() if name != "error"} | {"status": "finished"}
    text, same = compare(record, {**whole, "versions": "unknown"})
    assert (text.startswith("another end: finished; was: NonFinite"), text.endswith("(other versions)")) == (True, True)
    assert not same
    write_record(Path("a run"), {**record, "config": {**record["config"], "dataset": "mnist"}})
    result = invoke("verify", "a run")
    assert (result.exit_code, "data download mnist" in result.stderr) == (2, True)
    assert len([*Path("runs").iterdir()]) == 1  # nothing is left of it


def test_a_run_that_goes_on_elsewhere_says_so_and_is_not_held_to_the_bits():
    folder, elsewhere = Path("a run"), {"processor": "of another kind", "flags": [], "system": "another"}
    with pytest.raises(Stop):
        fedcli.run("fedavg", out=folder, progress=StopAfter(1), **TINY)
    record = read_record(folder)
    here, threads = record["machine"], record["hardware"]["threads"]
    hardware = {**record["hardware"], "name": "of another kind", "threads": threads + 1}
    write_record(folder, {**record, "machine": elsewhere, "hardware": hardware})
    with pytest.raises(Stop):
        resume(folder, progress=StopAfter(1))
    moved = [{"round": 1, "hardware": record["hardware"], "machine": here}]
    assert read_record(folder)["moved"] == moved
    record = resume(folder).record  # on the same machine
    assert (record["moved"], record["resumed"]) == (moved, [1, 2])
    assert [note["round"] for note in record["engine"]["notes"]] == [1]
    assert "hardware and machine are not what they were" in record["engine"]["notes"][0]["text"]
    (line,) = machines([record])
    assert f"threads {threads + 1} · " in line
    assert f" · from round 2 on device cpu, name {record['moved'][0]['hardware']['name']}, " in line
    assert compare(record, changed(record, accuracy=0.01))[0] == (
        "same within 1.00 points of accuracy (other hardware in round 2, machine in round 2)"
    )
    assert paces(read_runs([Path()]), {"digits"}) == []
    del record["moved"]
    write_record(folder, {**record, "load": []})
    assert paces(read_runs([Path()]), {"digits"}) != []


def changed(record, *, accuracy=0.0, **parts):
    """The record with another first accuracy, and other parts."""
    rounds = [dict(entry) for entry in record["rounds"]]
    rounds[0]["test_accuracy"] += accuracy
    return {**record, "rounds": rounds, **parts}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The record of a run."""
    return fedcli.run("fedavg", out=tmp_path_factory.mktemp("whole") / "run", **{**TINY, "rounds": 2}).record


@pytest.mark.parametrize(
    ("accuracy", "params", "versions", "text", "is_same"),
    [
        (0, "", "", "same bits", True),
        (0.01, "0", "0", "same within 1.00 points of accuracy (other versions)", True),
        (0.03, "0", "0", "another curve: by 3.00 points of accuracy in round 1 (other versions)", False),
        (0.01, "", "", f"{ANOTHER}: the curve by 1.00 points of accuracy in round 1", False),
        (0, "0", "", f"{ANOTHER}: the parameters, and not the curve", False),
    ],
)
def test_what_differs_is_told(accuracy, params, versions, text, is_same, whole):
    other = {"versions": versions} if versions else {}
    if params:
        other["summary"] = {**whole["summary"], "params_sha256": params}
    assert compare(whole, changed(whole, accuracy=accuracy, **other)) == (text, is_same)


def test_another_partition_and_fewer_rounds_are_told(whole):
    text, same = compare(whole, {**whole, "partition": {**whole["partition"], "fingerprint": "0"}})
    assert (text.startswith("another partition: fingerprint 0, was"), same) == (True, False)
    assert not compare(whole, {**whole, "rounds": whole["rounds"][:1]})[1]


def test_the_first_rounds_of_a_record_are_verified_and_the_repetition_can_go_on():
    """FedProc's objective depends on how many rounds are planned, so these must be the record's."""
    record = fedcli.run("fedproc", out="run", **{**TINY, "rounds": 3}).record
    result = invoke("verify", "run", "--rounds", 2, "--out", "again")
    assert (result.exit_code, last_line(result)) == (0, "same to the last digit in the first 2 of 3 rounds")
    part = read_record(Path("again"))
    assert (part["status"], len(part["rounds"]), part["config"]["rounds"]) == ("interrupted", 2, 3)
    assert compare(record, resume("again").record) == ("same bits", True)
    result = invoke("verify", "run", "--rounds", 3)
    assert last_line(result) == "same bits"

    lost = {"status": "failed", "error": "NonFiniteLoss: in round 4"}
    write_record(Path("run"), {**record, **lost})
    assert invoke("verify", "run", "--rounds", 2).exit_code == 0
    assert len([*Path("runs").iterdir()]) == 1  # that of all rounds

    record["rounds"][1]["terms"]["cross_entropy"] += 1e-15
    later = [{"round": 2, "machine": {}}]
    write_record(Path("run"), {**record, "moved": later})
    assert invoke("verify", "run", "--rounds", 1).exit_code == 0
    result = invoke("verify", "run", "--rounds", 2)
    assert (result.exit_code, last_line(result)) == (1, f"{ANOTHER}: the terms of the objective, and not the curve")
    write_record(Path("run"), {**record, "machine": {}})
    result = invoke("verify", "run", "--rounds", 2)
    assert result.exit_code == 0
    assert last_line(result).startswith("same within 0.00 points of accuracy in the first 2 of 3 rounds (other")


def test_rounds_that_a_record_has_not_or_that_have_no_accuracy_are_refused():
    fedcli.run("fedavg", out="run", **{**TINY, "rounds": 3, "eval_every": 2})
    for rounds in (0, 1, 4):
        result = invoke("verify", "run", "--rounds", rounds, "--out", "again")
        assert result.exit_code == 2
        assert f"from 2, the first that was tested, to 3 (got {rounds})" in result.stderr
    assert not Path("again").exists()


@pytest.mark.parametrize("place", ["here", "in a place; with 'quotes'"])
def test_the_command_of_a_record_gives_the_same_record_in_a_fresh_folder(place, tmp_path, monkeypatch):
    Path(place).mkdir(exist_ok=True)
    Path(place, "nets.py").write_text(NETS)
    options = {**TINY, "backbone": f"./{place}/nets.py:tiny", "drop_last": False, "lr": 0.013, "match_weight": 2.5}
    runs = fedcli.run("fedfm", out="runs-here", seeds=[3, 4], **options)
    (tmp_path / "fresh").mkdir()
    monkeypatch.chdir(tmp_path / "fresh")
    program, *arguments = shlex.split(runs[1].record["command"])
    assert program == "fedcli"
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    (again,) = Path("runs").iterdir()
    record = read_record(again)
    assert essence(record) == essence(runs[1].record)
    assert record["origin"] == runs[1].record["origin"]
    assert record["command"] == runs[1].record["command"]
