"""Tuning: which combinations run, how one is chosen, and what a run then says of its options."""

import json
import math
import shutil
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import pandas as pd
import pytest

import fedcli
from fedcli.registry import find_method
from fedcli.results import jobs, tune
from fedcli.results.grids import GridPoint, plan_grid
from fedcli.runs.options import flags_of
from fedcli.runs.origins import GivenOptions
from fedcli.runs.record import read_record, write_record
from tests.commands import error_of, invoke, run_command
from tests.network_sources import ONE_LAYER_NETWORK
from tests.run_options import TWO_ROUNDS
from tests.user_errors import raises_user_error

MINE = """
from dataclasses import replace
from fedcli.papers.baselines.fedavg import METHOD as FEDAVG

METHOD = replace(FEDAVG, name="mine", title="Mine: FedAvg by another name", reduces_to=("fedavg", {}))
"""
GRID = {"proximal_weight": (0.01,), "lr": (0.005, 0.1, 1e30)}


class Ranked(NamedTuple):
    """The trials of a grid, the best first, and their folder."""

    trials: pd.DataFrame
    folder: Path


def run_and_rank(method, options, **search):
    """Runs all trials of a grid and writes down the best one; returns them by rank."""
    plan = tune.plan_trials(method, options, **search)
    errors = jobs.execute(plan, jobs.PlanListener(), records_only=True)
    rankings = tune.rank_and_write_best(plan, errors)
    return Ranked(tune.tabulate_trials(rankings), plan.folder)


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


def test_a_value_that_is_given_twice_is_tried_once():
    plan = tune.plan_trials("fedavg", {"lr": (0.1, 0.01, 0.1), **TWO_ROUNDS})
    assert [run.setup.config.lr for run in plan.runs] == [0.1, 0.01]
    grid = plan_grid(["fedavg"], GivenOptions({"lr": (0.1, 0.01, 0.1), **TWO_ROUNDS}))
    assert [run.setup.config.lr for run in grid.runs] == [0.1, 0.01]


@pytest.mark.parametrize(
    ("options", "search", "message"),
    [
        ({}, {}, "'fedavg' has no grid of its own"),
        ({}, {"grid": ["lrr=1"]}, "unknown option of 'fedavg' '--lrr'; did you mean '--lr'"),
        ({}, {"grid": ["seed=1,2"]}, "--seed is no option to tune"),
        ({}, {"grid": ["validation=0.2,0"]}, "--validation is no option to tune (got --grid validation=0.2,0)"),
        ({}, {"grid": ["partition=iid,dirichlet:0.1"]}, "--partition is no option to tune"),
        ({"partition_seed": (0, 1)}, {}, "--partition-seed is no option to tune (got partition_seed=(0, 1))"),
        ({"seed": (1000, 1001)}, {}, "--seed is no option to tune"),
        ({"local_test": (0.1, 0.2)}, {}, "--local-test is no option to tune"),
        ({}, {"grid": ["lr"]}, "--grid must be an option and its values"),
        ({}, {"grid": ["lr=0.1", "lr=0.2"]}, "--lr is given twice"),
        ({}, {"grid": ["rounds=1,2"]}, "--rounds is given twice"),
        ({}, {"grid": ["moon:lr=0.1"]}, "unknown method in --grid 'moon'; this command has fedavg"),
        ({}, {"grid": ["lr=0.1"], "num_trials": 0}, "--trials must be a whole number from 1 on (got 0)"),
        ({}, {"grid": ["lr=0.1"], "num_trials": 1.5}, "--trials must be a whole number from 1 on (got 1.5)"),
        ({}, {"grid": ["lr=0.1"], "num_trials": True}, "--trials must be a whole number from 1 on (got True)"),
        ({"seed": 3}, {"grid": ["lr=0.1"], "seeds": [1000]}, "--seed 3 was given with --seeds"),
    ],
)
def test_what_cannot_be_tuned_is_refused(options, search, message):
    with raises_user_error(message):
        tune.plan_trials("fedavg", {**TWO_ROUNDS, **options}, **search)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A grid of three trials, one of which diverges."""
    return run_and_rank("fedprox", {**GRID, **TWO_ROUNDS}, out=tmp_path_factory.mktemp("tuned") / "grid")


@pytest.mark.slow
def test_the_best_trial_by_validation_is_written_down_and_used(tuned, tmp_path):
    trials, folder = tuned
    best, second, diverged = trials["accuracy"]
    best_options, second_options, diverged_options = trials["options"]
    assert best >= second
    assert math.isnan(diverged)
    assert diverged_options["lr"] == 1e30

    facts = json.loads((folder / "tuned.json").read_text())
    assert facts["seed"] == "1000"
    assert facts["options"] == best_options
    assert [trial["options"] for trial in facts["trials"]] == [best_options, second_options, diverged_options]
    assert [trial["validation_accuracy"] for trial in facts["trials"]] == [best, second, None]

    # A run takes them, but for what is given.
    record = fedcli.run("fedprox", tuned=folder, lr=0.02, out=tmp_path / "run", **TWO_ROUNDS).record
    assert record["config"]["proximal_weight"] == 0.01
    assert record["origin"]["proximal_weight"] == "tuned by validation accuracy, seed 1000"
    assert record["config"]["lr"] == 0.02
    assert record["origin"]["lr"] == "command line"

    # So do several runs of the method.
    for several in ("--seeds=0,1", "--batch-size=8,16"):
        out = tmp_path / several
        run_command("run", "fedprox", "--tuned", folder, several, "--out", out, *flags_of(TWO_ROUNDS))
        weights = [read_record(file)["config"]["proximal_weight"] for file in out.rglob("record.json")]
        assert weights == [0.01, 0.01]

    # No other method does.
    other = tmp_path / "other"
    with raises_user_error("has options of 'fedprox'"):
        fedcli.run("moon", tuned=folder, out=other, **TWO_ROUNDS)
    with raises_user_error("cannot be read"):
        fedcli.run("moon", tuned=tmp_path, out=other, **TWO_ROUNDS)
    result = invoke("run", "fedprox,fedavg", "--tuned", folder, "--out", other, *flags_of(TWO_ROUNDS))
    assert result.exit_code == 2
    assert "has options of 'fedprox' (got 'fedavg')" in result.stderr


def test_trials_keep_their_records_alone_and_are_not_run_again(tuned, tmp_path):
    folder = shutil.copytree(tuned.folder, tmp_path / "grid")
    assert {file.suffix for file in folder.rglob("*") if file.is_file()} <= {".json", ".png"}
    files = sorted(folder.rglob("record.json"))
    for file in files:
        record = read_record(file)
        for entry in record["rounds"]:  # by a hundredth better where the rate is 0.1, and worse on test images
            entry["validation_accuracy"] = 0.6 + min(record["config"]["lr"], 0.4) / 10
            entry["test_accuracy"] = 1.0 - entry["validation_accuracy"]
        write_record(file.parent, record)
    times = [file.stat().st_mtime_ns for file in files]

    trials, _ = run_and_rank("fedprox", {**GRID, **TWO_ROUNDS}, out=folder)

    assert [options["lr"] for options in trials["options"]] == [0.1, 0.005, 1e30]
    assert sorted(folder.rglob("record.json")) == files
    assert [file.stat().st_mtime_ns for file in files] == times
    longer = {**GRID, **TWO_ROUNDS, "rounds": 3}
    with raises_user_error("holds a run with another --rounds"):
        tune.plan_trials("fedprox", longer, out=folder)


def test_the_command_tells_validation_accuracies_with_their_spread(folder):
    """It keeps trials apart from runs."""
    result = run_command("tune", "fedavg", "--grid", "lr=0.05", "--seeds", "1000,1001", *flags_of(TWO_ROUNDS))
    (tuning,) = Path("tuning").iterdir()
    assert tuning.name == "fedavg-fedfm-digits-digits"
    assert not Path("runs").exists()

    records = [read_record(file) for file in sorted(tuning.rglob("record.json"))]
    first, second = [100 * tune.validation_accuracy(record) for record in records]
    assert f"[1/2] lr 0.05, seed 1000: validation {first:.2f} % in" in result.stderr
    assert f"[2/2] lr 0.05, seed 1001: validation {second:.2f} % in" in result.stderr
    mean = (first + second) / 2
    deviation = abs(first - second) / 2**0.5
    assert f"0.05  {mean:.2f} ± {deviation:.2f}" in result.stdout


def test_a_fifth_is_held_out_where_the_protocol_holds_out_nothing(tmp_path):
    options = {**TWO_ROUNDS, "protocol": "fedfa:digits", "num_clients": 4, "cohort_size": 4, "lr": (0.05,)}

    def held_out(**validation):
        (run,) = tune.plan_trials("fedavg", {**options, **validation}, out=tmp_path / "grid").runs
        return run.setup.config.validation

    assert held_out() == 0.2
    assert held_out(validation=0.4) == 0.4
    with raises_user_error("'fedavg' is tuned by validation accuracy (got --validation 0)"):
        held_out(validation=0.0)
    too_few = {**options, "validation": 0.01}
    with raises_user_error("no client has validation examples"):
        run_and_rank("fedavg", too_few, out=tmp_path / "none")


def test_trials_that_have_all_diverged_choose_nothing(tmp_path):
    options = {**TWO_ROUNDS, "lr": (1e30,)}
    with raises_user_error("all 1 trials of 'fedavg' have diverged"):
        run_and_rank("fedavg", options, out=tmp_path / "grid")


def test_nothing_is_written_where_the_trials_of_a_later_method_have_all_diverged(tmp_path):
    with raises_user_error("all 1 trials of 'fedprox' have diverged"):
        run_and_rank("fedavg,fedprox", TWO_ROUNDS, grid=["fedavg:lr=0.1", "fedprox:lr=1e30"], out=tmp_path / "grid")
    assert list(tmp_path.rglob("tuned.json")) == []


def test_only_the_seeds_of_a_papers_own_runs_are_refused(tmp_path, monkeypatch):
    assert tune.find_reported_seeds("fedfa:fmnist-c2", "fmnist") == {2021, 2022, 2023}
    assert tune.find_reported_seeds("fedfa:fmnist-c2", "digits") == set()
    search = {"grid": ["lr=0.1"], "out": tmp_path / "grid"}
    on_digits = tune.plan_trials("fedavg", TWO_ROUNDS, seeds=[0, 1], **search)  # of which no table has runs
    assert len(on_digits.runs) == 2

    monkeypatch.setattr(tune, "find_reported_seeds", lambda protocol, dataset: {0, 1})
    words = "--seed 1 is one that the paper's tables report"
    with raises_user_error(words):
        tune.plan_trials("fedavg", TWO_ROUNDS, seeds=[1000, 1], **search)


# Several methods

BOTH = "fedavg,fedprox"


def combinations_of(plan):
    """Returns the values that each method of a plan tries."""
    values_of = {}
    for planned in plan.by_method:
        values_of[planned.method.name] = [point.varied for point in planned.points]
    return values_of


def test_each_method_tries_its_own_and_the_shared_options(tmp_path):
    """All have the same number of trials."""
    grid = ["lr=0.01,0.1", "fedprox:proximal-weight=0.01,0.1,1"]
    search = {"grid": grid, "out": tmp_path / "two"}
    plan = tune.plan_trials(BOTH, TWO_ROUNDS, **search)

    values_of = combinations_of(plan)
    assert values_of["fedavg"] == [{"lr": 0.01}, {"lr": 0.1}]
    assert len(values_of["fedprox"]) == 2  # drawn from six, the same each time
    assert all(values.keys() == {"lr", "proximal_weight"} for values in values_of["fedprox"])
    assert combinations_of(tune.plan_trials(BOTH, TWO_ROUNDS, **search)) == values_of
    assert plan.runs[0].title == "fedavg, lr 0.01"
    for run in plan.runs:
        assert run.folder.is_relative_to(tmp_path / "two" / run.setup.method.name)

    all_of_them = combinations_of(tune.plan_trials(BOTH, TWO_ROUNDS, num_trials=9, **search))
    assert len(all_of_them["fedavg"]) == 2
    assert len(all_of_them["fedprox"]) == 6


def test_an_option_without_a_method_is_tried_by_those_that_have_it(tmp_path):
    plan = tune.plan_trials(
        BOTH, TWO_ROUNDS, grid=["lr=0.1", "proximal-weight=0.1,1"], num_trials=2, out=tmp_path / "two"
    )
    assert combinations_of(plan) == {
        "fedavg": [{"lr": 0.1}],
        "fedprox": [{"lr": 0.1, "proximal_weight": 0.1}, {"lr": 0.1, "proximal_weight": 1.0}],
    }


def test_a_tuned_comparison_is_two_commands(folder):
    Path("mine.py").write_text(MINE)
    names = "fedavg,fedprox,./mine.py"
    grid = ["--grid", "lr=0.01,0.1", "--grid", "fedprox:proximal-weight=0.01,0.1"]

    result = run_command("tune", names, *grid, "--seeds", "1000-1001", "--out", "tuned", *flags_of(TWO_ROUNDS))
    assert "fedprox: 2 of its 4 combinations, drawn at random" in result.stderr
    assert "; --trials=4 tries all." in result.stderr
    assert "2 trials each; use fedcli run fedavg,fedprox,./mine.py --tuned tuned" in result.stdout
    assert "warning: fedavg: the best --lr, " in result.stderr
    assert "is at the edge of its grid (0.01, 0.1); try values beyond" in result.stderr
    chosen = {name: json.loads(Path(f"tuned/{name}/tuned.json").read_text()) for name in ("fedavg", "fedprox", "mine")}
    assert chosen["fedprox"]["options"].keys() == {"lr", "proximal_weight"}

    run_command("run", names, "--tuned", "tuned", "--seeds", "0-1", "--out", "all", *flags_of(TWO_ROUNDS))
    for name, facts in chosen.items():
        for seed in (0, 1):
            record = read_record(Path(f"all/{name}/seed-{seed}"))
            assert {option: record["config"][option] for option in facts["options"]} == facts["options"]


def test_one_methods_option_is_set_in_a_command_of_several(folder):
    options = ["--set", "fedprox:proximal-weight=0.7", "--lr", "0.02", "--out", "two"]
    run_command("run", BOTH, *options, *flags_of(TWO_ROUNDS))
    config = read_record(Path("two/fedprox"))["config"]
    assert config["proximal_weight"] == 0.7
    assert config["lr"] == 0.02

    run_command("run", BOTH, "--proximal-weight", "0.3", "--out", "three", *flags_of(TWO_ROUNDS))
    assert read_record(Path("three/fedprox"))["config"]["proximal_weight"] == 0.3
    assert "proximal_weight" not in read_record(Path("three/fedavg"))["config"]


def test_a_value_that_is_set_is_typed_also_in_place_of_a_files(folder):
    Path("all.toml").write_text("lr = 0.05\nmomentum = 0.5\n")
    options = ["--config", "all.toml", "--set", "fedavg:lr=0.3", *flags_of(TWO_ROUNDS)]
    run_command("run", "fedavg", *options, "--out", "one")
    run_command("run", BOTH, *options, "--out", "two")
    for folder_of_fedavg in ("one", "two/fedavg"):
        record = read_record(Path(folder_of_fedavg))
        assert record["config"]["lr"] == 0.3
        assert record["origin"]["lr"] == "command line"
        assert record["origin"]["momentum"] == "file all.toml"
    other = read_record(Path("two/fedprox"))
    assert other["config"]["lr"] == 0.05
    assert other["origin"]["lr"] == "file all.toml"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "moon:lr=1"], "unknown method in --set 'moon'; this command has fedavg, fedprox."),
        (["--set", "fedavg:proximal-weight=1"], "unknown option of 'fedavg' '--proximal-weight'"),
        (["--set", "fedprox:lr"], "--set must be an option and its values (got 'fedprox:lr')"),
        (["--set", "fedprox:lr=1,2"], "--set gives an option one value (got 1,2 for --lr)"),
        (["--set", "fedprox:lr=-1"], "--lr must be > 0 (got -1"),
        (["--proximal-wait", "1"], "did you mean '--proximal-weight'"),
    ],
)
def test_an_option_that_is_set_wrongly_is_refused(words, message, folder):
    assert message in error_of("run", BOTH, *words, *flags_of(TWO_ROUNDS))


def test_a_best_value_at_the_edge_is_told_unless_nothing_lies_beyond():
    def warnings(best, *others, name="lr"):
        fedprox = find_method("fedprox")
        point = GridPoint(fedprox, {name: best}, runs=(Mock(**{"setup.config.post": None}),))
        planned = tune.PlannedTrials(fedprox, Path(), values={name: (best, *others)}, points=(point,))
        return tune.write_notes_on_edges([tune.Ranking(planned, (tune.Trial(point, (0.5,)),))])

    assert warnings(0.1, 0.01, 1.0) == []
    # Also where the other value is in no combination that was drawn.
    assert warnings(0.1, 0.01) == ["fedprox: the best --lr, 0.1, is at the edge of its grid (0.01, 0.1)"]
    assert warnings(0.1) == []  # one value is no grid
    assert warnings(0.0, 0.5, name="proximal_weight") == []  # off
    assert warnings("adam", "sgd", name="optimizer") == []
    # None, which stands for all images, is no number.
    assert warnings(60, None, 40, name="train_examples") == [
        "fedprox: the best --train-examples, 60, is at the edge of its grid (40, 60)"
    ]
    assert warnings(60, None, name="train_examples") == []
    assert warnings(None, 60, name="train_examples") == []


def test_runs_with_networks_of_ones_own_stand_in_the_folder_of_their_grid(folder):
    Path("one.py").write_text(ONE_LAYER_NETWORK)
    (folder / "deep").mkdir()
    Path("deep/two.py").write_text(ONE_LAYER_NETWORK + "small = tiny")

    def plan(*networks):
        given = GivenOptions({**TWO_ROUNDS, "backbone": networks})
        return plan_grid(["fedavg"], given, out=Path("runs/grid"))

    folders = {run.folder for run in plan("./one.py:tiny", "./deep/../deep/two.py:small").runs}
    assert folders == {Path("runs/grid/backbone=tiny"), Path("runs/grid/backbone=small")}
    both = ("./one.py:tiny", "./deep/two.py:tiny")
    with raises_user_error("two runs would have the folder 'runs/grid/backbone=tiny'", *both):
        plan(*both)
