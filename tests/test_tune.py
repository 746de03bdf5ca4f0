"""Tuning: which combinations run, how one is chosen, and what a run then says of its options."""

import json

import pytest

import fedcli
from fedcli.errors import UserError
from fedcli.registry import find_method, find_protocol
from fedcli.results.tune import Trial, at_the_edge, parse_grid, tune
from fedcli.runs.records import read_record, write_record

TINY = {"dataset": "digits", "train_examples": 120, "rounds": 2, "local_epochs": 1}


def trial(protocol, accuracies, status="finished"):
    """A trial whose rounds have these validation accuracies, and test accuracies that say the opposite."""
    rounds = [{"validation_accuracy": value, "test_accuracy": 1 - (value or 0)} for value in accuracies]
    selection = find_protocol(protocol, find_method("fedavg")).selection
    record = {"status": status, "protocol": protocol, "summary": {"selection": selection}, "rounds": rounds}
    return Trial({}, [record])


@pytest.mark.parametrize(
    ("protocol", "expected"),
    [
        ("fedfm:digits", 0.9),  # best-validation: the best round
        ("fedfa:digits", 0.45),  # last: the mean over the last tenth of 20 rounds
        ("fccl:digit-domains", (0.3 + 0.4 + 0.5) / 3),  # mean-last-3
    ],
)
def test_a_trial_is_judged_by_its_protocols_rule_on_validation_examples(protocol, expected):
    accuracies = [0.1] * 16 + [0.9, None, 0.3, 0.4, 0.5]
    assert trial(protocol, accuracies).accuracy == pytest.approx(expected)
    assert trial(protocol, accuracies, "failed").accuracy is None


def test_a_grid_is_every_combination_in_the_options_own_types():
    grid = parse_grid(find_method("fedprox"), ["proximal-weight=0.1,1", "local_epochs=1,2", "optimizer=adam"])
    assert grid == {"proximal_weight": (0.1, 1.0), "local_epochs": (1, 2), "optimizer": ("adam",)}
    assert [type(value) for value in grid["proximal_weight"] + grid["local_epochs"]] == [float, float, int, int]


@pytest.mark.parametrize(
    ("method", "tried", "expected"),
    [
        ("fedprox", [{"lr": 0.03}, {"lr": 0.01}, {"lr": 0.1}], []),
        ("fedprox", [{"lr": 0.01}, {"lr": 0.03}], [("lr", "smaller")]),
        ("fedprox", [{"lr": 0.1}, {"lr": 0.03}], [("lr", "larger")]),
        ("fedprox", [{"lr": 0.1, "proximal_weight": 0.01}, {"lr": 0.01, "proximal_weight": 1.0}],
         [("lr", "larger"), ("proximal_weight", "smaller")]),
        ("fedprox", [{"lr": 0.1, "proximal_weight": 1.0}, {"lr": 0.01, "proximal_weight": 1.0}], [("lr", "larger")]),
        ("fedprox", [{"proximal_weight": 0.0}, {"proximal_weight": 1.0}], []),  # its least value
        ("fedprox", [{"local_epochs": 1}, {"local_epochs": 5}], []),
        ("feddyn", [{"clip_norm": 0.0}, {"clip_norm": 10.0}], []),
        ("feddyn", [{"clip_norm": 1.0}, {"clip_norm": 10.0}], [("clip_norm", "smaller")]),
        ("fedfa", [{"anchor_decay": 1.0}, {"anchor_decay": 0.5}], []),  # its largest value
        ("feddyn", [{"form": "simplified", "drop_last": True}, {"form": "original", "drop_last": False}], []),
    ],
)  # fmt: skip
def test_a_value_that_was_chosen_from_the_end_of_a_grid_is_named_where_one_beyond_is_possible(method, tried, expected):
    assert at_the_edge(find_method(method), [Trial(values, []) for values in tried]) == expected


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["proximal-wait=1"], "unknown option to tune 'proximal_wait'; did you mean 'proximal_weight'"),
        (["lr"], "--grid must be an option and its values"),
        (["lr="], "--grid must be an option and its values"),
        (["lr=0.1", "lr=0.2"], "--grid has 'lr' twice"),
        (["lr=0"], "--lr must be > 0"),
        (["local-epochs=1.5"], "--local-epochs must be of type int"),
        (["seed=1,2"], "unknown option to tune 'seed'"),
    ],
)
def test_what_is_no_grid_is_refused(texts, message):
    with pytest.raises(UserError, match=message):
        parse_grid(find_method("fedprox"), texts)


def test_without_a_grid_a_method_must_name_values_worth_trying():
    with pytest.raises(UserError, match="'fedavg' names no values worth trying"):
        parse_grid(find_method("fedavg"), [])


def test_the_best_trial_by_validation_is_written_down_and_used(tmp_path):
    trials, folder = tune("fedprox", ["proximal-weight=0.01,100", "lr=0.05"], out=tmp_path / "grid", **TINY)
    assert [trial.values for trial in trials] == [
        {"proximal_weight": 0.01, "lr": 0.05}, {"proximal_weight": 100.0, "lr": 0.05},
    ]  # fmt: skip
    accuracies = [-1 if trial.accuracy is None else trial.accuracy for trial in trials]
    assert accuracies == sorted(accuracies, reverse=True)
    assert {trial.records[0]["seed"] for trial in trials} == {1000}
    about = json.loads((folder / "tuned.json").read_text())
    assert about["options"] == trials[0].values
    told = [(one["options"], one["validation_accuracy"]) for one in about["trials"]]
    assert told == [(one.values, one.accuracy) for one in trials]
    held_out = trials[0].records[0]["config"]["validation"]
    assert (about["rounds"], about["validation"]) == (TINY["rounds"], held_out)
    run = fedcli.run("fedprox", tuned=folder, lr=0.02, out=tmp_path / "run", **TINY)
    config, origin = run.record["config"], run.record["origin"]
    assert (config["proximal_weight"], origin["proximal_weight"]) == (0.01, "tuned by validation accuracy, seed 1000")
    assert (config["lr"], origin["lr"]) == (0.02, "command line")  # what is given goes before
    with pytest.raises(UserError, match="has options of 'fedprox'"):
        fedcli.run("moon", tuned=folder, out=tmp_path / "other", **TINY)
    with pytest.raises(UserError, match="cannot be read"):
        fedcli.run("moon", tuned=tmp_path, out=tmp_path / "other", **TINY)


def test_the_choice_does_not_see_a_test_image(tmp_path):
    trials, folder = tune("fedprox", ["lr=0.01,0.05"], out=tmp_path / "grid", **TINY)
    for one in trials:
        place = folder / f"lr={one.values['lr']}"
        record = read_record(place)
        for entry in record["rounds"]:
            entry["test_accuracy"] = 1.0 - entry["test_accuracy"]
        write_record(place, record)
    again, _ = tune("fedprox", ["lr=0.01,0.05"], out=tmp_path / "grid", **TINY)
    assert [one.values for one in again] == [one.values for one in trials]
    assert again[0].records[0]["rounds"][0]["test_accuracy"] == 1.0 - trials[0].records[0]["rounds"][0]["test_accuracy"]


def test_a_fifth_is_held_out_where_the_protocol_holds_out_nothing(tmp_path):
    few = {**TINY, "protocol": "fedfa:digits", "num_clients": 4, "cohort_size": 4}
    trials, _ = tune("fedavg", ["lr=0.05"], out=tmp_path / "grid", **few)
    assert trials[0].records[0]["config"]["validation"] == 0.2
    trials, _ = tune("fedavg", ["lr=0.05"], validation=0.4, out=tmp_path / "own", **few)
    assert trials[0].records[0]["config"]["validation"] == 0.4
    with pytest.raises(UserError, match="no client holds out an example"):
        tune("fedavg", ["lr=0.05"], validation=0.01, out=tmp_path / "none", **few)


def test_a_trial_that_diverges_is_no_choice_and_is_not_run_again(tmp_path):
    given = {**TINY, "out": tmp_path / "grid"}
    trials, folder = tune("fedavg", ["lr=1e30,0.05"], **given)
    assert [(one.values["lr"], one.accuracy is None) for one in trials] == [(0.05, False), (1e30, True)]
    written = (folder / "lr=1e+30" / "record.json").stat().st_mtime_ns
    tune("fedavg", ["lr=1e30,0.05"], **given)
    assert (folder / "lr=1e+30" / "record.json").stat().st_mtime_ns == written
    with pytest.raises(UserError, match="all 1 trials have diverged"):
        tune("fedavg", ["lr=1e30"], **{**given, "out": tmp_path / "other"})


def test_what_every_trial_has_alike_is_written_down_and_what_was_tuned_is_not(tmp_path):
    few = {name: value for name, value in TINY.items() if name != "rounds"}
    _, folder = tune("fedavg", ["rounds=1,2"], validation=0.4, out=tmp_path / "grid", **few)
    about = json.loads((folder / "tuned.json").read_text())
    assert about["validation"] == 0.4
    assert "rounds" not in about


def test_trials_keep_their_records_alone(tmp_path):
    few = {**TINY, "protocol": "fedsa:digits", "num_clients": 3, "cohort_size": 3, "out": tmp_path / "grid"}
    tune("fedproto", ["lr=1e30,0.05"], **few)  # one of them diverges
    kept = {file.suffix for file in (tmp_path / "grid").rglob("*") if file.is_file()}
    assert kept <= {".json", ".png", ".pdf"}
    assert not [*(tmp_path / "grid").rglob("states")]


def test_what_cannot_be_tuned_honestly_is_refused(tmp_path):
    with pytest.raises(UserError, match="--seed 0 is one that the paper's tables report"):
        tune("fedavg", ["lr=0.05"], seed=0, protocol="fedfm:digits", **TINY)
    with pytest.raises(UserError, match="--lr is given and in --grid"):
        tune("fedavg", ["lr=0.05"], lr=0.1, **TINY)
    tune("fedavg", ["lr=0.05"], out=tmp_path / "grid", **TINY)
    with pytest.raises(UserError, match="holds a run with another --rounds"):
        tune("fedavg", ["lr=0.05"], out=tmp_path / "grid", **{**TINY, "rounds": 3})
