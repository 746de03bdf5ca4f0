"""Metrics against records of which the answer is known by hand."""

from fractions import Fraction

import numpy as np
import pytest

from fedcli.results import metrics
from fedcli.results.metric_kinds import MetricKind
from fedcli.results.metrics import Metric
from tests.user_errors import raises_user_error


def make_entry(number, test, validation=None, **parts):
    """Returns the entry of a round in a record; accuracies are from 0 to 1."""
    return {"round": number, "test_accuracy": test, "validation_accuracy": validation, "domains": None, **parts}


def record_of_rounds(*rounds, selection="last", selected_round=None, selected=None, **parts):
    """Returns a record with these entries of rounds; `parts` are further ones of the record, by key."""
    tested = [row["test_accuracy"] for row in rounds if row["test_accuracy"] is not None]
    summary = {
        "selection": selection,
        "selected": selected,
        "selected_round": selected_round,
        "last": tested[-1] if tested else None,
    }
    config = {"rounds": len(rounds), "cohort_size": 4}
    return {"rounds": list(rounds), "summary": summary, "config": config, "cost": None, **parts}


def metric_value(name, record):
    return metrics.find_metric(name).read_value(record)


def metric_values(names, record):
    return {name: metric_value(name, record) for name in names}


RECORD = record_of_rounds(
    make_entry(0, 0.2, 0.3), make_entry(1, 0.57, 0.9, classifier_accuracy=0.25), make_entry(2, None),
    make_entry(3, 0.7, 0.8, classifier_accuracy=0.5), make_entry(4, 0.6, 0.1),
    selection="best-validation", selected_round=1, selected=0.57, quality={"nmi": 0.413},
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("{}", {"selected": 57, "last": 60, "best": 70, "validation": 90, "classifier": 25, "largest-step": 37}),
        ("{}", {"quality:nmi": 0.413, "quality:silhouette": None}),
        ("round:{}", {1: 20, 3: None, 4: 70, 6: None}),
        ("mean-of-last:{}", {1: 60, 2: 65, 3: 65, 5: 51.75}),  # the third round was not tested
        ("least-of-last:{}", {2: 60, 9: 20}),
        ("deviation-of-last:{}", {1: None, 2: 100 * 0.005**0.5}),
        ("classifier-of-last:{}", {1: None, 2: 50, 5: 37.5}),
        ("at:{}", {"1/5": 20, "2/5": 57, "4/5": 70, "1": 60, "1/100": 20, "1/2": None}),  # 1/2: the third round
        ("rounds:{}", {"1-2": 38.5, "2-4": 63.5, "3-3": None}),
        ("reached:{}", {57: 57, 57.01: 70, 70: 70, 70.1: None, 0: 20}),
        ("rounds-to:{}", {57: 2, 57.01: 4, 70: 4, 70.1: None, 0: 1}),
    ],
)
def test_accuracies_are_percent_and_rounds_count_from_one(name, answers):
    for parameter, answer in answers.items():
        metric = name.format(parameter)
        if answer is None:
            assert metric_value(metric, RECORD) is None, metric
        else:
            assert metric_value(metric, RECORD) == pytest.approx(answer), metric


def test_the_last_tenth_and_fractions_are_of_the_planned_rounds():
    """The rounds that are done do not count."""
    assert metric_value("last-tenth", RECORD) == pytest.approx(60)

    rounds = [make_entry(number, 0.01 * number) for number in range(29)]
    rounds[18] = make_entry(18, None)
    assert metric_value("last-tenth", record_of_rounds(*rounds)) == pytest.approx(27.5)
    # Of its two rounds, the second alone was tested.
    assert metric_value("last-tenth", record_of_rounds(*rounds[:20])) == pytest.approx(19)
    assert metric_value("last-tenth", {**record_of_rounds(*rounds), "config": {"rounds": 400}}) is None  # not there yet

    half_done = {**RECORD, "config": {"rounds": 10, "cohort_size": 4}}
    assert metric_value("at:1/5", half_done) == pytest.approx(57)
    assert metric_value("at:1", half_done) is None


def test_drift_and_terms_are_those_of_the_last_round_that_has_them():
    record = record_of_rounds(
        make_entry(0, 0.5, terms={"cross_entropy": 2.0}, drift={"a": 1.0, "b": None}),
        make_entry(1, 0.5, terms={"cross_entropy": 0.5}, drift={"a": 2.0, "b": None}),
        make_entry(2, None, terms={"cross_entropy": 0.5}),
    )
    answers = {"drift:a": 2, "drift:b": None, "term:cross_entropy": 0.5, "term:proximal": None}
    assert metric_values(answers, record) == answers
    of_no_round = {"drift:a": None, "term:cross_entropy": None}
    assert metric_values(of_no_round, record_of_rounds()) == of_no_round


def test_accuracies_by_domain_and_client_are_of_the_selected_rounds():
    """A metric that names no domain is the mean over the domains."""

    def make_tested_entry(number, a, b):
        return make_entry(
            number,
            0.5,
            domains={"a": a, "b": b},
            intra={"a": 1.0, "b": 0.5},
            inter={"a": a / 2, "b": b / 2},
            clients={"mean": a, "std": 0.25, "worst": b},
        )

    rounds = [
        make_tested_entry(0, 0.0, 0.0),
        make_tested_entry(1, 0.2, 0.4),
        make_tested_entry(2, 0.4, 0.6),
        make_tested_entry(3, 0.6, 0.2),
    ]
    answers = {
        "domain:a": 60, "domain": 40, "domain:c": None, "inter:a": 30, "inter": 20, "intra:b": 50, "intra": 75,
        "clients:mean": 60, "clients:std": 25, "clients:worst": 20,
    }  # fmt: skip
    assert metric_values(answers, record_of_rounds(*rounds, selected_round=3)) == pytest.approx(answers)

    of_last_three = record_of_rounds(*rounds, selection="mean-last-3", selected_round=3)
    answers = {"domain:a": 40, "domain": 40, "inter:b": 20}
    assert metric_values(answers, of_last_three) == pytest.approx(answers)


def test_scores_of_classes_are_of_the_selected_rounds():
    """They leave out absent classes, as scikit-learn does."""
    even_counts = {"right": [3, 0, 0, 1], "predicted": [4, 1, 0, 1], "actual": [3, 2, 0, 1]}
    odd_counts = {"right": [3, 1, 0, 0], "predicted": [3, 1, 0, 2], "actual": [3, 2, 0, 1]}
    rounds = [
        make_entry(0, 0.5, per_class=even_counts),
        make_entry(1, 0.5, per_class=odd_counts),
        make_entry(2, 0.5, per_class=even_counts),
        make_entry(3, 0.5, per_class=odd_counts),
    ]
    names = {"class_names": ["a", "b", "c", "d"]}
    record = record_of_rounds(*rounds, selected_round=2, **names)
    f1 = 100 * (6 / 7 + 0 + 1) / 3
    answers = {"macro-f1": f1, "balanced-accuracy": 100 * 2 / 3, "class:b": 0, "class:c": None, "class:e": None}
    assert metric_values(answers, record) == pytest.approx(answers)

    of_last_three = record_of_rounds(*rounds, selection="mean-last-3", selected_round=3, **names)
    assert metric_value("class:b", of_last_three) == pytest.approx(100 / 3)  # 50, 0 and 50 %

    uncounted = record_of_rounds(*rounds, make_entry(4, 0.5), selection="mean-last-3", selected_round=4, **names)
    answers = {"macro-f1": None, "balanced-accuracy": None, "class:a": None}
    assert metric_values(answers, uncounted) == answers


def test_costs_are_of_a_client_in_the_mean_round_and_of_all_in_all_rounds():
    rounds = [make_entry(0, 0.5, floats_up=10), make_entry(1, 0.5, floats_up=10), make_entry(2, 0.5, floats_up=100)]
    cost = {"floats_up": 100, "floats_down": 90, "memory_floats": 300}  # older records have the last
    record = record_of_rounds(*rounds, cost=cost)
    answers = {
        "floats-up": 40,
        "floats-down": 90,
        "memory-floats": 300,
        "total-floats": 4 * 120,
        "total-memory-floats": 4 * 3 * 300,
    }
    assert metric_values(answers, record) == answers


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "unknown metric ''; there are selected, last, "),
        ("at", "'at' is no metric; write at:PARAMETER, which is from 0 to 1."),
        ("at:", "'at:' is no metric; write at:PARAMETER, which is from 0 to 1."),
        ("at:1e-9999999", "'at:1e-9999999' is no metric; write at:PARAMETER, which is from 0 to 1."),
        ("rounds-to", "'rounds-to' is no metric; write rounds-to:PARAMETER, which is from 0 to 100."),
        ("quality", "'quality' is no metric; write quality:PARAMETER, which is one of nmi, "),
        ("domain:", "'domain:' is no metric; write domain:PARAMETER."),
        ("selected:1", "'selected:1' is no metric; write selected."),
        ("floats-up:x", "'floats-up:x' is no metric; write floats-up."),
    ],
)
def test_an_unknown_name_is_refused(name, message):
    with raises_user_error(message):
        metrics.find_metric(name)


@pytest.mark.parametrize(
    ("names", "allowed"),
    [
        (["mean-of-last:0", "mean-of-last:-5", "least-of-last:0", "deviation-of-last:-1"], "a whole number from 1"),
        (["classifier-of-last:0", "round:0", "round:-1", "mean-of-last:2.5"], "a whole number from 1"),
        (["rounds:9-3", "rounds:0-3", "rounds:5", "rounds:1-2-3"], "FIRST-LAST of rounds from 1"),
        (["rounds-to:nan", "rounds-to:inf", "rounds-to:-1", "reached:nan", "reached:101"], "from 0 to 100"),
        (["at:nan", "at:2"], "from 0 to 1"),
        (["clients:wort", "clients:"], "one of mean, std, worst"),
        (["quality:round", "quality:seed", "quality:client", "quality:examples", "quality:features_sha256"], "nmi, "),
    ],
)
def test_a_parameter_that_no_run_can_have_is_refused(names, allowed):
    for name in names:
        with raises_user_error(f"'{name}' is no metric; write ", allowed):
            metrics.find_metric(name)


def test_a_target_that_is_met_to_the_last_digit_is_reached():
    """60.02 / 100 is more than 6002 / 10000 by a rounding error."""
    record = record_of_rounds(make_entry(0, 0.5), make_entry(1, 6002 / 10000))
    assert metric_value("rounds-to:60.02", record) == 2
    assert metric_value("reached:60.02", record) == pytest.approx(60.02)
    assert metric_value("rounds-to:60.0201", record) is None


def test_less_spread_among_clients_is_better():
    better = {name: metrics.find_metric(f"clients:{name}").better for name in ("mean", "std", "worst")}
    assert better == {"mean": "higher", "std": "lower", "worst": "higher"}


@pytest.mark.parametrize("number", [np.int64(3), np.float32(3), Fraction(3), 3, 3.0])
def test_a_metric_of_ones_own_may_return_any_real_number(number):
    metric = Metric(MetricKind("own", lambda record: number, unit=""), "own")
    assert metric.read_value(RECORD) == 3
    assert type(metric.read_value(RECORD)) in (int, float)


@pytest.mark.parametrize("other", [True, np.bool_(True), "3", 3j])
def test_a_metric_that_is_no_number_is_refused(other):
    metric = Metric(MetricKind("own", lambda record: other, unit=""), "own")
    with raises_user_error("the metric 'own' is no number (got "):
        metric.read_value(RECORD)
