"""Tuning: which combinations run, how one is chosen, and what a run then says of its options."""

import json
import math
import shutil
from pathlib import Path

import pytest

import fedcli
from fedcli.results import jobs, tune
from fedcli.runs.options import flags_of
from fedcli.runs.record import read_record, write_record
from tests.files import refused
from tests.programs import invoke

TINY = {"dataset": "digits", "train_examples": 120, "rounds": 2, "local_epochs": 1}
GRID = {"proximal_weight": (0.01,), "lr": (0.005, 0.1, 1e30)}


def ranked(method, **given):
    """The trials of a grid, run one after the other, and their folder."""
    plan = tune.plan(method, **given)
    return tune.rank(plan, jobs.execute(plan, jobs.Watch(), records_only=True)), plan.folder


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ("best-validation", 0.9),  # the best round
        ("best-test", 0.9),
        ("last", 0.45),  # the mean over the last tenth of 20 rounds
        ("mean-last-3", (0.3 + 0.4 + 0.5) / 3),
    ],
)
def test_a_run_is_judged_by_its_protocols_rule_on_validation_examples(selection, expected):
    accuracies = [0.1] * 16 + [0.9, None, 0.3, 0.4, 0.5]
    rounds = [{"validation_accuracy": value, "test_accuracy": 1 - (value or 0)} for value in accuracies]
    record = {"summary": {"selection": selection}, "rounds": rounds}
    assert tune.validation_accuracy(record) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "'fedavg' has no grid of its own"),
        ({"grid": ["lrr=1"]}, "unknown option to tune 'lrr'; did you mean 'lr'"),
        ({"grid": ["seed=1,2"]}, "unknown option to tune 'seed'"),
        ({"grid": ["lr"]}, "--grid must be an option and its values"),
        ({"grid": ["lr=0.1", "lr=0.2"]}, "--lr is given twice"),
        ({"grid": ["rounds=1,2"]}, "--rounds is given twice"),
        ({"grid": ["lr=0.1"], "seed": 0}, "--seed 0 is one that the paper's tables report"),
        ({"grid": ["lr=0.1"], "seed": 3, "seeds": [1000]}, "--seed 3 was given with --seeds"),
    ],
)
def test_what_cannot_be_tuned_is_refused(given, message):
    refused(lambda: tune.plan("fedavg", **TINY, **given), message)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A grid of three trials, one of which diverges."""
    return ranked("fedprox", out=tmp_path_factory.mktemp("tuned") / "grid", **GRID, **TINY)


def test_the_best_trial_by_validation_is_written_down_and_used(tuned, tmp_path):
    trials, folder = tuned
    best, second, lost = trials["accuracy"]
    assert best >= second
    assert (trials["options"].iloc[-1]["lr"], math.isnan(lost)) == (1e30, True)
    facts = json.loads((folder / "tuned.json").read_text())
    assert (facts["seed"], facts["options"]) == ("1000", trials["options"].iloc[0])
    assert [each["options"] for each in facts["trials"]] == trials["options"].tolist()
    assert [each["validation_accuracy"] for each in facts["trials"]] == [best, second, None]
    record = fedcli.run("fedprox", tuned=folder, lr=0.02, out=tmp_path / "run", **TINY).record
    chosen = {name: (record["config"][name], record["origin"][name]) for name in ("proximal_weight", "lr")}
    source = "tuned by validation accuracy, seed 1000"
    assert chosen == {"proximal_weight": (0.01, source), "lr": (0.02, "command line")}  # what is given goes before
    for place, message in ((folder, "has options of 'fedprox'"), (tmp_path, "cannot be read")):
        refused(lambda: fedcli.run("moon", tuned=place, out=tmp_path / "other", **TINY), message)  # noqa: B023
    for options in ("--seeds=0,1", "--batch-size=8,16"):
        result = invoke("run", "fedprox", "--tuned", folder, options, "--out", tmp_path / options, *flags_of(TINY))
        assert result.exit_code == 0, result.output
        weights = [read_record(file)["config"]["proximal_weight"] for file in (tmp_path / options).rglob("record.json")]
        assert weights == [0.01, 0.01]
    result = invoke("run", "fedprox,fedavg", "--tuned", folder, "--out", tmp_path / "both", *flags_of(TINY))
    assert (result.exit_code, "has options of 'fedprox' (got 'fedavg')" in result.stderr) == (2, True)


def test_trials_keep_their_records_alone_and_are_not_run_again(tuned, tmp_path):
    _, folder = tuned
    again = shutil.copytree(folder, tmp_path / "grid")
    assert {file.suffix for file in again.rglob("*") if file.is_file()} <= {".json", ".png", ".lock"}
    for file in again.rglob("record.json"):
        record = read_record(file)
        for entry in record["rounds"]:  # by a hundredth better where the rate is 0.1, and worse on test images
            entry["validation_accuracy"] = 0.6 + record["config"]["lr"] / 10
            entry["test_accuracy"] = 1.0 - entry["validation_accuracy"]
        write_record(file.parent, record)
    before = [file.stat().st_mtime_ns for file in sorted(again.rglob("record.json"))]
    trials, _ = ranked("fedprox", out=again, **GRID, **TINY)
    assert [options["lr"] for options in trials["options"]] == [0.1, 0.005, 1e30]
    assert [file.stat().st_mtime_ns for file in sorted(again.rglob("record.json"))] == before
    refused(
        lambda: tune.plan("fedprox", out=again, **{**GRID, **TINY, "rounds": 3}), "holds a run with another --rounds"
    )


def test_the_command_tells_validation_accuracies_with_their_spread_and_keeps_trials_from_runs(folder):
    result = invoke("tune", "fedavg", "--grid", "lr=0.05", "--seeds", "1000,1001", *flags_of(TINY))
    assert result.exit_code == 0, result.output
    (home,) = Path("tuning").iterdir()
    records = [read_record(file) for file in sorted(home.rglob("record.json"))]
    first, second = (100 * tune.validation_accuracy(record) for record in records)
    for number, accuracy in enumerate((first, second)):
        assert f"[{number + 1}/2] lr 0.05, seed {1000 + number}: validation {accuracy:.2f} % in" in result.stderr
    assert f"0.05  {(first + second) / 2:.2f} ± {abs(first - second) / 2**0.5:.2f}" in result.stdout
    assert home.name == "fedavg-fedfm-digits-digits"
    assert not Path("runs").exists()


def test_a_fifth_is_held_out_where_the_protocol_holds_out_nothing(tmp_path):
    few = {**TINY, "protocol": "fedfa:digits", "num_clients": 4, "cohort_size": 4, "lr": (0.05,)}
    for given, share in (({}, 0.2), ({"validation": 0.4}, 0.4)):
        (run,) = tune.plan("fedavg", out=tmp_path / "grid", **few, **given).runs
        assert run.setup.run.validation == share
    refused(
        lambda: ranked("fedavg", validation=0.01, out=tmp_path / "none", **few), "no client has validation examples"
    )


def test_trials_that_have_all_diverged_choose_nothing(tmp_path):
    refused(lambda: ranked("fedavg", lr=(1e30,), out=tmp_path / "grid", **TINY), "all 1 trials have diverged")
