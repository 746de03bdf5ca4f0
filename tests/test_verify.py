"""A record is run again: by 'fedcli verify', and by the command that it has."""

import copy
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

import fedcli
from fedcli.errors import NonFiniteLoss
from fedcli.results.durations import tabulate_times
from fedcli.results.run_records import read_runs
from fedcli.runs.record import read_record, write_record
from fedcli.runs.resume import resume
from fedcli.runs.verify import compare_records
from tests.commands import invoke, run_command
from tests.listeners import Stop, StopAfter
from tests.network_sources import ONE_LAYER_NETWORK
from tests.run_options import SHORT_RUN
from tests.run_parts import reproducible_parts
from tests.scripts import load_script

study_page = load_script(Path(__file__).parent.parent / "results" / "study_page.py")
ANOTHER_RESULT = "another result on the same machine and version"

pytestmark = pytest.mark.usefixtures("folder")  # in which the runs are


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The record of a run."""
    options = {**SHORT_RUN, "rounds": 2, "clients_per_chunk": "2"}
    return fedcli.run("fedavg", out=tmp_path_factory.mktemp("whole") / "run", **options).record


class VerifyOutput(NamedTuple):
    """What 'fedcli verify' makes of a record."""

    exit_code: int
    last_line: str  # that it prints


SAME_BITS = VerifyOutput(0, "same bits")


def verify(record, *options):
    """Verifies a run that has this record."""
    Path("run").mkdir(exist_ok=True)
    write_record(Path("run"), record)
    result = invoke("verify", "run", *options)
    lines = (result.stdout + result.stderr).splitlines()
    return VerifyOutput(result.exit_code, lines[-1])


def assert_cannot_verify(output, words):
    assert output.exit_code == 2
    assert words in output.last_line


def test_a_record_of_a_finished_run_is_verified_on_a_device_that_is_there(whole):
    assert verify(whole, "--out", "again") == SAME_BITS
    assert read_record(Path("again"))["engine"]["clients_per_chunk"] == 2

    assert_cannot_verify(verify({**whole, "status": "interrupted"}), "has not finished (it is interrupted)")

    elsewhere = {**whole, "config": {**whole["config"], "device": "cuda:7"}}
    assert "(got 'cuda:7'); this machine has " in verify(elsewhere).last_line
    assert verify(elsewhere, "--device", "cpu") == SAME_BITS


def test_versions_are_compared_as_they_stand(whole):
    versions = {**whole["versions"], "torch": "9" * 5000}  # no number that Python reads
    assert verify({**whole, "versions": versions}) == SAME_BITS


def test_a_run_that_diverged_is_verified_by_its_curve_and_its_end():
    with pytest.raises(NonFiniteLoss):
        fedcli.run("fedavg", out="a run", **{**SHORT_RUN, "rounds": 5, "lr": 1e9})
    record = read_record(Path("a run"))
    assert verify(record) == VerifyOutput(0, "same to the last digit")  # it has no last parameters

    later = f"another end: NonFiniteLoss: later, was {record['error']}"
    assert compare_records(record, {**record, "error": "NonFiniteLoss: later"}) == (later, False)
    finished = {**record, "error": "", "status": "finished", "versions": "unknown"}
    text, is_same = compare_records(record, finished)
    assert text.startswith("another end: finished,")
    assert text.endswith("(other versions)")
    assert not is_same

    complete = len(record["rounds"])
    assert complete < 5
    of_more_rounds = {**record, "config": {**record["config"], "rounds": 5}}
    interrupted = {**of_more_rounds, "status": "interrupted", "error": ""}
    assert compare_records(of_more_rounds, interrupted, complete) == ("same to the last digit", True)

    on_absent_data = {**record, "config": {**record["config"], "dataset": "mnist"}}
    assert_cannot_verify(verify(on_absent_data), "data download mnist")
    assert len([*Path("runs").iterdir()]) == 1  # nothing is left of it


def with_accuracy(record, difference, **parts):
    """Returns the record with its first accuracy changed by so much, and with these other parts."""
    rounds = copy.deepcopy(record["rounds"])
    rounds[0]["test_accuracy"] += difference
    return {**record, "rounds": rounds, **parts}


def test_a_run_that_goes_on_elsewhere_says_so_and_is_not_held_to_the_bits():
    folder = Path("a run")
    with pytest.raises(Stop):
        fedcli.run("fedavg", out=folder, progress=StopAfter(1), **SHORT_RUN)
    begun = read_record(folder)
    threads = begun["hardware"]["threads"] + 1
    elsewhere = {"machine": {"processor": "of another kind"}, "hardware": {**begun["hardware"], "threads": threads}}
    write_record(folder, {**begun, **elsewhere})

    with pytest.raises(Stop):
        resume(folder, progress=StopAfter(1))
    record = resume(folder).record  # on the same machine

    assert record["resumed"] == [1, 2]
    assert record["moved"] == [{"round": 1, "hardware": begun["hardware"], "machine": begun["machine"]}]
    (note,) = record["engine"]["notes"]
    assert note["round"] == 1
    assert "hardware and machine are not what they were" in note["text"]
    now, before = study_page.list_machines([record])
    assert f"threads {threads}, " in now
    assert f"- 1 run: device cpu, name {begun['hardware']['name']}, " in before
    text, _ = compare_records(record, with_accuracy(record, 0.01))
    assert text == "same within 1.00 points of accuracy (other machine from round 2 on)"

    # Its seconds are of neither machine.
    assert tabulate_times(read_runs([Path()])).empty
    del record["moved"]
    write_record(folder, record)
    assert len(tabulate_times(read_runs([Path()]))) == 1


def test_what_differs_is_told(whole):
    assert compare_records(whole, whole) == ("same bits", True)

    other_result = f"{ANOTHER_RESULT}: curves within 1.00 points of accuracy"
    assert compare_records(whole, with_accuracy(whole, 0.01)) == (other_result, False)

    of_other_version = {"versions": "0", "summary": {**whole["summary"], "params_sha256": "0"}}
    within = "same within 1.00 points of accuracy (other versions)"
    assert compare_records(whole, with_accuracy(whole, 0.01, **of_other_version)) == (within, True)
    beyond = "another curve: by 3.00 points of accuracy (other versions)"
    assert compare_records(whole, with_accuracy(whole, 0.03, **of_other_version)) == (beyond, False)

    of_other_partition = {**whole, "partition": {**whole["partition"], "fingerprint": "0"}}
    text, is_same = compare_records(whole, of_other_partition)
    assert text.startswith("another partition: 0, was")
    assert not is_same

    shorter = {**whole, "rounds": whole["rounds"][:1]}
    assert compare_records(whole, shorter) == ("another number of rounds: 1, was 2", False)


def test_the_first_rounds_of_a_record_are_verified():
    """The repetition can go on.

    FedProc's objective depends on how many rounds are planned, so these must be the record's.
    """
    record = fedcli.run("fedproc", out="a run", **{**SHORT_RUN, "rounds": 3}).record
    assert verify(record, "--rounds", 2, "--out", "again") == VerifyOutput(0, "same to the last digit")
    again = read_record(Path("again"))
    assert again["status"] == "interrupted"
    assert len(again["rounds"]) == 2
    assert again["config"]["rounds"] == 3
    assert compare_records(record, resume("again").record) == ("same bits", True)

    assert verify(record, "--rounds", 3) == SAME_BITS
    diverged_later = {**record, "status": "failed", "error": "NonFiniteLoss: in round 4"}
    assert verify(diverged_later, "--rounds", 2).exit_code == 0
    assert len([*Path("runs").iterdir()]) == 1  # that of all rounds

    record["rounds"][1]["terms"]["cross_entropy"] += 1e-15
    moved_later = {**record, "moved": [{"round": 2, "machine": {}}]}
    assert verify(moved_later, "--rounds", 1).exit_code == 0
    other_result = f"{ANOTHER_RESULT}: curves within 0.00 points of accuracy"
    assert verify(moved_later, "--rounds", 2) == VerifyOutput(1, other_result)
    of_other_machine = verify({**record, "machine": {}}, "--rounds", 2)
    assert of_other_machine.exit_code == 0
    assert of_other_machine.last_line.startswith("same within 0.00 points of accuracy (other")


def test_rounds_that_a_record_has_not_or_that_have_no_accuracy_are_refused(whole):
    first, second = whole["rounds"]
    summary = {**whole["summary"], "selected_round": 1, "selected": second["test_accuracy"]}
    record = {**whole, "rounds": [{**first, "test_accuracy": None}, second], "summary": summary}
    for rounds in (0, 1, 3):
        output = verify(record, "--rounds", rounds, "--out", "again")
        assert_cannot_verify(output, f"from 2, the first that was tested, to 2 (got {rounds})")
    assert not Path("again").exists()


@pytest.mark.parametrize("place", ["here", "in a place; with 'quotes'"])
def test_the_command_of_a_record_gives_the_same_record_in_a_fresh_folder(place, tmp_path, monkeypatch):
    Path(place).mkdir()
    Path(place, "nets.py").write_text(ONE_LAYER_NETWORK)
    options = {**SHORT_RUN, "backbone": f"./{place}/nets.py:tiny", "drop_last": False, "lr": 0.013, "match_weight": 2.5}
    _, run = fedcli.run("fedfm", out="runs-here", seeds=[3, 4], **options)
    expected = run.record
    (tmp_path / "fresh").mkdir()
    monkeypatch.chdir(tmp_path / "fresh")

    words = shlex.split(expected["command"])
    assert words[0] == "fedcli"
    run_command(*words[1:])
    (folder,) = Path("runs").iterdir()
    record = read_record(folder)
    assert reproducible_parts(record) == reproducible_parts(expected)
    assert record["origin"] == expected["origin"]
    assert record["command"] == expected["command"]
