"""The verdicts on claims by a script that shares no code with the package, where runs lack a value."""

import io
import json
import math
from pathlib import Path

import pandas as pd
import pytest

from fedcli.results.metrics import find_metric
from tests.scripts import load_script

FILE = Path(__file__).parent.parent / "results" / "recompute" / "recompute.py"
recompute = load_script(FILE)
readings = load_script(FILE.with_name("readings.py"))


def write_brief_record(folder, accuracy):
    """Writes the parts of a record that the script reads, of one round; a run without an accuracy has diverged."""
    folder.mkdir()
    record = {
        "status": "diverged" if accuracy is None else "finished",
        "config": {"rounds": 1},
        "rounds": [{"test_accuracy": accuracy}],
        "summary": {"selection": "last"},
    }
    (folder / "record.json").write_text(json.dumps(record))
    return str(folder)


def make_claim(folder, differences, lacking):
    """Returns a claim of a row that is ahead by so much in each of two columns, by seed.

    Of a seed in `lacking`, the run of that row has no value in the second column.
    """
    pairs = []
    for seed, of_columns in enumerate(differences):
        for column, difference in enumerate(of_columns):
            accuracies = {"FedFA": 0.5 + difference, "FedAvg": 0.5}
            if column == 1 and seed in lacking:
                accuracies[lacking[seed]] = None
            runs = {row: write_brief_record(folder / f"{row}-{seed}-{column}", accuracies[row]) for row in accuracies}
            pairs.append({
                "seed": seed, "share": 0.5, "than": "FedAvg", "metric": "last", "folder": runs["FedFA"],
                "metric_than": "last", "folder_than": runs["FedAvg"],
            })  # fmt: skip
    return pd.Series({
        "pairs": json.dumps(pairs), "direction": "higher", "metric": "last", "than": "FedAvg", "tail": float("nan"),
    })  # fmt: skip


AHEAD = [(0.10, 0.12), (0.11, 0.13), (0.12, 0.14), (0.13, 0.15)]
BEHIND = [(-ahead, -ahead_in_second) for ahead, ahead_in_second in AHEAD]


def test_a_seed_without_one_of_its_values_has_no_lead(tmp_path):
    answer = recompute.recompute(make_claim(tmp_path, AHEAD, lacking={3: "FedAvg"}))
    assert answer.lead.n == 3
    assert answer.lead.mean == pytest.approx(12)
    assert answer.verdict == "reproduced"


@pytest.mark.parametrize(
    ("differences", "lacking", "verdict"),
    [
        (AHEAD, {}, "reproduced"),
        (AHEAD, {3: "FedAvg"}, "reproduced"),
        (AHEAD, {3: "FedFA"}, "undecided"),
        (BEHIND, {3: "FedFA"}, "contradicted"),
        (BEHIND, {3: "FedAvg"}, "undecided"),
    ],
)
def test_runs_without_a_value_leave_a_claim_open_if_they_are_of_the_row_ahead(tmp_path, differences, lacking, verdict):
    assert recompute.recompute(make_claim(tmp_path, differences, lacking)).verdict == verdict


@pytest.mark.parametrize(
    ("differences", "lacking", "verdict"),
    [
        (BEHIND, {3: "FedFA"}, "reproduced"),  # fewer values than it should have, of the worse row
        (BEHIND, {3: "FedAvg"}, "undecided"),
        (AHEAD, {3: "FedAvg"}, "contradicted"),
        (AHEAD, {3: "FedFA"}, "undecided"),
    ],
)
def test_of_a_claim_that_its_row_is_the_worse_one_the_other_is_better(tmp_path, differences, lacking, verdict):
    claim = make_claim(tmp_path, differences, lacking)
    claim["direction"] = "lower"
    assert recompute.recompute(claim).verdict == verdict


@pytest.mark.parametrize(
    ("metric", "direction", "better"),
    [
        ("selected", "lower", "higher"),
        ("rounds-to:50", "higher", "lower"),
        ("drift:feature_distance", "lower", "lower"),
        ("floats-up", "higher", "higher"),
    ],
)
def test_which_values_are_better_is_known_of_each_metric_as_the_package_knows_it(metric, direction, better):
    assert readings.better_direction(metric, direction) == better
    assert (find_metric(metric).better or direction) == better


def test_a_row_with_too_few_seeds_is_undecided(tmp_path):
    assert recompute.recompute(make_claim(tmp_path, AHEAD[:3], lacking={0: "FedAvg"})).verdict == "undecided"


def test_a_row_without_a_value_decides_before_one_with_a_value(tmp_path):
    with_value = make_claim(tmp_path, AHEAD[:1], lacking={})
    pairs = json.loads(with_value["pairs"])
    diverged = write_brief_record(tmp_path / "diverged", None)
    without_value = [{**pair, "than": "FedProx", "folder_than": diverged} for pair in pairs]
    claim = with_value.replace({"than": "FedAvg; FedProx"})
    claim["pairs"] = json.dumps(pairs + without_value)
    answer = recompute.recompute(claim)
    assert answer.verdict == "undecided"
    assert answer.lead.n == 0


@pytest.mark.parametrize("sign", [1, -1])
def test_what_a_table_says_is_compared_in_the_direction_of_the_claim(tmp_path, sign):
    claim = make_claim(tmp_path, AHEAD if sign == 1 else BEHIND, lacking={})
    claim["direction"] = "higher" if sign == 1 else "lower"
    recomputed = recompute.recompute(claim)
    lead = recomputed.lead if sign == 1 else recomputed.lead.negated()
    nothing = {"tail": math.nan, "tail_low": math.nan, "tail_high": math.nan, "tail_n": 0}
    columns = {"verdict": "by construction", "ours": lead.mean, "low": lead.low, "high": lead.high, "n": lead.n}
    claim = pd.concat([claim.drop("tail"), pd.Series({**columns, **nothing})])
    assert math.copysign(1, lead.mean) == sign
    assert recomputed.agrees_with(recompute.answer_of_table(claim))
    claim["low"] -= 1e-6
    assert not recomputed.agrees_with(recompute.answer_of_table(claim))


@pytest.mark.parametrize(("verdict", "disagrees"), [("not run", 0), ("data not at hand", 0), ("reproduced", 1)])
def test_a_verdict_without_a_pair_of_runs_is_a_disagreement(verdict, disagrees, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"claim,verdict,pairs\nmine,{verdict},[]\n"))
    if disagrees:
        with pytest.raises(SystemExit):
            recompute.main()
    else:
        recompute.main()
    assert f"0 claims recomputed, {disagrees} disagree" in capsys.readouterr().out


def make_record_of_rounds(**columns):
    """Returns the record of a finished run of five rounds; the entries of its rounds have these values, by name."""
    num_entries = len(columns["test_accuracy"])
    rounds = []
    for number in range(num_entries):
        rounds.append({name: values[number] for name, values in columns.items()})
    return {"status": "finished", "config": {"rounds": 5}, "rounds": rounds, "summary": {}, "cost": {"floats_up": 9.0}}


def test_numbers_are_of_the_rounds_that_the_rule_of_the_headline_chooses():
    record = make_record_of_rounds(
        test_accuracy=[0.5, None, 0.2, 0.3, 0.4],
        validation_accuracy=[0.1, None, 0.9, 0.2, 0.3],
        inter=[{"a": 0.5, "b": 0.7}, None, {"a": 0.2, "b": 0.4}, {"a": 0.3, "b": 0.5}, {"a": 0.7, "b": 0.9}],
        floats_up=[1.0, 2.0, 3.0, 4.0, 5.0],
    )
    expected_by_rule = {
        "last": {"selected": 40, "inter": 80, "inter:a": 70},
        "mean-last-3": {"selected": 30, "inter": 50, "inter:a": 40},
        "best-test": {"selected": 50, "inter": 60, "inter:a": 50},
        "best-validation": {"selected": 20, "inter": 30, "inter:a": 20},
    }
    for rule, expected in expected_by_rule.items():
        record["summary"]["selection"] = rule
        for metric, value in expected.items():
            assert readings.read_value(record, metric) == pytest.approx(value), (rule, metric)
        assert math.isnan(readings.read_value(record, "inter:c"))
        assert math.isnan(readings.read_value(record, "intra"))
    assert readings.read_value(record, "floats-up") == 3  # of all rounds, also those without a test

    record["summary"]["selection"] = "best-weather"
    for metric in ("selected", "inter"):
        with pytest.raises(SystemExit, match="no reading of the rule best-weather"):
            readings.read_value(record, metric)


def test_an_accuracy_that_is_met_exactly_is_reached():
    assert 100 * 0.6002 < 60.02
    record = make_record_of_rounds(test_accuracy=[0.6001, 0.6002])
    assert readings.read_value(record, "rounds-to:60.02") == 2
    assert readings.read_value(record, "rounds-to:60.01") == 1
    assert math.isnan(readings.read_value(record, "rounds-to:60.03"))


def test_what_was_not_measured_is_missing():
    record = make_record_of_rounds(test_accuracy=[0.5], drift=[None])
    assert math.isnan(readings.read_value(record, "drift:spread"))
    assert math.isnan(readings.read_value(record, "quality:nmi"))
    record["rounds"].append({"test_accuracy": None, "drift": {"spread": 2.0}})
    assert readings.read_value(record, "drift:spread") == 2
    assert math.isnan(readings.read_value(record, "drift:other"))
    assert readings.read_value(record, "floats-up") == 9


def test_a_run_that_diverged_after_its_best_round_by_validation_has_that_rounds_numbers():
    record = make_record_of_rounds(test_accuracy=[0.5, 0.1], validation_accuracy=[0.6, 0.2])
    record |= {"status": "failed", "error": "NonFiniteLoss: the loss is nan"}
    record["summary"]["selection"] = "best-validation"
    assert readings.read_value(record, "selected") == pytest.approx(50)
    assert math.isnan(readings.read_value(record, "last"))
    record["summary"]["selection"] = "last"
    assert math.isnan(readings.read_value(record, "selected"))
    record["rounds"] = []
    record["summary"]["selection"] = "best-validation"
    assert math.isnan(readings.read_value(record, "selected"))
