"""A record is run again: by 'fedcli verify', and by the command that it has."""

import shlex
from pathlib import Path

import pytest

import fedcli
from fedcli.core.federation import NonFiniteLoss
from fedcli.results.durations import paces
from fedcli.results.frame import read_runs
from fedcli.results.tables import machines
from fedcli.runs.record import read_record, write_record
from fedcli.runs.resume import resume
from fedcli.runs.verify import compare_records
from tests.programs import invoke
from tests.test_runs import TINY, Stop, StopAfter, essence
from tests.test_trust import NETS

ANOTHER = "another result on the same machine and version"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The record of a run."""
    options = {**TINY, "rounds": 2, "clients_per_chunk": "2"}
    return fedcli.run("fedavg", out=tmp_path_factory.mktemp("whole") / "run", **options).record


def verify(record, *options):
    """What 'fedcli verify' makes of a record: its exit code and the last line that it prints."""
    Path("run").mkdir(exist_ok=True)
    write_record(Path("run"), record)
    result = invoke("verify", "run", *options)
    return result.exit_code, (result.stdout + result.stderr).splitlines()[-1]


def test_a_record_of_a_finished_run_is_verified_on_a_device_that_is_there(whole):
    assert verify(whole, "--out", "again") == (0, "same bits")
    assert read_record(Path("again"))["engine"]["clients_per_chunk"] == 2
    code, text = verify({**whole, "status": "interrupted"})
    assert (code, "has not finished (it is interrupted)" in text) == (2, True)
    elsewhere = {**whole, "config": {**whole["config"], "device": "cuda:7"}}
    assert "(got 'cuda:7'); this machine has " in verify(elsewhere)[1]
    assert verify(elsewhere, "--device", "cpu") == (0, "same bits")


def test_versions_are_compared_as_they_stand(whole):
    versions = {**whole["versions"], "torch": "9" * 5000}  # no number that Python reads
    assert verify({**whole, "versions": versions}) == (0, "same bits")


def test_a_run_that_diverged_is_verified_by_its_curve_and_its_end():
    with pytest.raises(NonFiniteLoss):
        fedcli.run("fedavg", out="a run", **{**TINY, "rounds": 5, "lr": 1e9})
    record = read_record(Path("a run"))
    assert verify(record) == (0, "same bits")
    text = f"another end: NonFiniteLoss: later, was {record['error']}"
    assert compare_records(record, {**record, "error": "NonFiniteLoss: later"}) == (text, False)
    text, same = compare_records(record, {**record, "error": "", "status": "finished", "versions": "unknown"})
    assert (text[:22], text[-16:], same) == ("another end: finished,", "(other versions)", False)
    code, text = verify({**record, "config": {**record["config"], "dataset": "mnist"}})
    assert (code, "data download mnist" in text) == (2, True)
    assert len([*Path("runs").iterdir()]) == 1  # nothing is left of it


def test_a_run_that_goes_on_elsewhere_says_so_and_is_not_held_to_the_bits():
    folder = Path("a run")
    with pytest.raises(Stop):
        fedcli.run("fedavg", out=folder, progress=StopAfter(1), **TINY)
    record = read_record(folder)
    threads = record["hardware"]["threads"] + 1
    elsewhere = {"machine": {"processor": "of another kind"}, "hardware": {**record["hardware"], "threads": threads}}
    write_record(folder, {**record, **elsewhere})
    with pytest.raises(Stop):
        resume(folder, progress=StopAfter(1))
    moved = [{"round": 1, "hardware": record["hardware"], "machine": record["machine"]}]
    record = resume(folder).record  # on the same machine
    assert (record["moved"], record["resumed"]) == (moved, [1, 2])
    [note] = record["engine"]["notes"]
    assert (note["round"], "hardware and machine are not what they were" in note["text"]) == (1, True)
    now, before = machines([record])
    assert f"threads {threads}, " in now
    assert f"- 1 run: device cpu, name {moved[0]['hardware']['name']}, " in before
    assert compare_records(record, changed(record, accuracy=0.01))[0] == (
        "same within 1.00 points of accuracy (other machine from round 2 on)"
    )
    assert paces(read_runs([Path()])).empty
    del record["moved"]
    write_record(folder, record)
    assert len(paces(read_runs([Path()]))) == 1


def changed(record, accuracy=0.0, **parts):
    """The record with another first accuracy, and other parts."""
    first, *later = record["rounds"]
    first = {**first, "test_accuracy": first["test_accuracy"] + accuracy}
    return {**record, "rounds": [first, *later], **parts}


def test_what_differs_is_told(whole):
    other = {"versions": "0", "summary": {**whole["summary"], "params_sha256": "0"}}
    for repetition, verdict in (
        (whole, ("same bits", True)),
        (changed(whole, 0.01, **other), ("same within 1.00 points of accuracy (other versions)", True)),
        (changed(whole, 0.03, **other), ("another curve: by 3.00 points of accuracy (other versions)", False)),
        (changed(whole, 0.01), (f"{ANOTHER}: curves within 1.00 points of accuracy", False)),
    ):
        assert compare_records(whole, repetition) == verdict
    text, same = compare_records(whole, {**whole, "partition": {**whole["partition"], "fingerprint": "0"}})
    assert (text.startswith("another partition: 0, was"), same) == (True, False)
    shorter = {**whole, "rounds": whole["rounds"][:1]}
    assert compare_records(whole, shorter) == ("another number of rounds: 1, was 2", False)


def test_the_first_rounds_of_a_record_are_verified_and_the_repetition_can_go_on():
    """FedProc's objective depends on how many rounds are planned, so these must be the record's."""
    record = fedcli.run("fedproc", out="a run", **{**TINY, "rounds": 3}).record
    assert verify(record, "--rounds", 2, "--out", "again") == (0, "same to the last digit")
    again = read_record(Path("again"))
    assert (again["status"], len(again["rounds"]), again["config"]["rounds"]) == ("interrupted", 2, 3)
    assert compare_records(record, resume("again").record) == ("same bits", True)
    assert verify(record, "--rounds", 3) == (0, "same bits")
    assert verify({**record, "status": "failed", "error": "NonFiniteLoss: in round 4"}, "--rounds", 2)[0] == 0
    assert len([*Path("runs").iterdir()]) == 1  # that of all rounds

    record["rounds"][1]["terms"]["cross_entropy"] += 1e-15
    later = {**record, "moved": [{"round": 2, "machine": {}}]}
    assert verify(later, "--rounds", 1)[0] == 0
    assert verify(later, "--rounds", 2) == (1, f"{ANOTHER}: curves within 0.00 points of accuracy")
    code, text = verify({**record, "machine": {}}, "--rounds", 2)
    assert (code, text[:42]) == (0, "same within 0.00 points of accuracy (other")


def test_rounds_that_a_record_has_not_or_that_have_no_accuracy_are_refused(whole):
    first, second = whole["rounds"]
    summary = {**whole["summary"], "selected_round": 1, "selected": second["test_accuracy"]}
    record = {**whole, "rounds": [{**first, "test_accuracy": None}, second], "summary": summary}
    for rounds in (0, 1, 3):
        code, text = verify(record, "--rounds", rounds, "--out", "again")
        assert (code, f"from 2, the first that was tested, to 2 (got {rounds})" in text) == (2, True), text
    assert not Path("again").exists()


@pytest.mark.parametrize("place", ["here", "in a place; with 'quotes'"])
def test_the_command_of_a_record_gives_the_same_record_in_a_fresh_folder(place, tmp_path, monkeypatch):
    Path(place).mkdir()
    Path(place, "nets.py").write_text(NETS)
    options = {**TINY, "backbone": f"./{place}/nets.py:tiny", "drop_last": False, "lr": 0.013, "match_weight": 2.5}
    expected = fedcli.run("fedfm", out="runs-here", seeds=[3, 4], **options)[1].record
    (tmp_path / "fresh").mkdir()
    monkeypatch.chdir(tmp_path / "fresh")
    program, *arguments = shlex.split(expected["command"])
    result = invoke(*arguments)
    assert (program, result.exit_code) == ("fedcli", 0), result.output
    (again,) = Path("runs").iterdir()
    record = read_record(again)
    assert essence(record) == essence(expected)
    assert (record["origin"], record["command"]) == (expected["origin"], expected["command"])
