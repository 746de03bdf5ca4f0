"""Metrics against records of which the answer is known by hand."""

import pytest

from fedcli.errors import UserError
from fedcli.results import metrics


def entry(number, test, validation=None, **more):
    return {"round": number, "test_accuracy": test, "validation_accuracy": validation, "domains": None, **more}


def record(*rounds, selection="last", selected_round=None, selected=None, **more):
    tested = [row for row in rounds if row["test_accuracy"] is not None]
    summary = {"selection": selection, "selected": selected, "selected_round": selected_round}
    summary["last"] = tested[-1]["test_accuracy"] if tested else None
    config = {"rounds": len(rounds), "cohort_size": 4}
    return {"rounds": list(rounds), "summary": summary, "config": config, "cost": None, **more}


def value(name, of):
    return metrics.find_metric(name).value(of)


RUN = record(
    entry(0, 0.2, 0.3), entry(1, 0.57, 0.9), entry(2, None), entry(3, 0.7, 0.8), entry(4, 0.6, 0.1),
    selection="best-validation", selected_round=1, selected=0.57,
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "answer"),
    [("selected", 57), ("last", 60), ("best", 70), ("validation", 90)],
)
def test_accuracies_are_percent(name, answer):
    assert value(name, RUN) == pytest.approx(answer)
    assert metrics.find_metric(name).unit == "percent"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("at:1/5", 20), ("at:2/5", 57), ("at:4/5", 70), ("at:1", 60), ("at:1/100", 20), ("at:1/2", None),
        ("rounds:1-2", 38.5), ("rounds:2-4", 63.5), ("rounds:3-3", None),
    ],
)  # fmt: skip
def test_accuracy_at_a_fraction_of_the_planned_rounds(name, answer):
    found = value(name, RUN)  # 1/2 of 5 rounds is the third one, to the nearest, which was not evaluated
    assert found == (None if answer is None else pytest.approx(answer))


@pytest.mark.parametrize(("target", "answer"), [("57", 57), ("57.01", 70), ("70", 70), ("70.1", None), ("0", 20)])
def test_accuracy_of_the_round_that_reaches_a_target(target, answer):
    metric = metrics.find_metric(f"reached:{target}")
    assert metric.value(RUN) == (None if answer is None else pytest.approx(answer))
    assert (metric.unit, metric.field, metric.none) == ("percent", "mean", "never")


def test_the_last_tenth_of_the_rounds_is_at_least_one_of_them():
    assert value("last-tenth", RUN) == pytest.approx(60)
    rounds = [entry(number, 0.01 * number if number != 18 else None) for number in range(20)]
    assert value("last-tenth", record(*rounds)) == pytest.approx(19)  # of rounds 18 and 19, the second alone was tested
    rounds = [entry(number, 0.01 * number) for number in range(29)]
    assert value("last-tenth", record(*rounds)) == pytest.approx(27.5)
    assert value("last-tenth", {**record(*rounds), "config": {"rounds": 400}}) is None  # not there yet


def test_drift_is_that_of_the_last_round_in_which_it_was_measured():
    rounds = [entry(0, 0.5, drift={"a": 1.0, "b": None}), entry(1, 0.5, drift={"a": 2.0, "b": None}), entry(2, 0.5)]
    assert value("drift:a", record(*rounds)) == 2
    assert value("drift:b", record(*rounds)) is None
    assert value("drift:a", RUN) is None


def test_a_term_is_that_of_the_last_round():
    run = record(entry(0, 0.5, terms={"cross_entropy": 2.0}), entry(1, None, terms={"cross_entropy": 0.5}))
    assert value("term:cross_entropy", run) == 0.5
    assert value("term:proximal", run) is None
    assert value("term:cross_entropy", record()) is None
    assert metrics.find_metric("term:cross_entropy").unit == ""


def test_a_name_that_no_run_has_is_refused_where_they_have_others():
    first = record(
        entry(0, 0.5, terms={"cross_entropy": 2.0}, drift={"angle": 1.0}, domains={"mnist": 0.5}),
        entry(1, None, terms={"cross_entropy": 0.5}),
    )
    runs = [first, {**record(entry(0, 0.5, terms={"proximal": 2.0})), "quality": {"nmi": 0.5, "features_sha256": "ab"}}]
    for name in ("term:proximal", "drift:angle", "domain:mnist", "domain", "quality:nmi", "last", "rounds-to:99"):
        metrics.refuse_absent(name, runs)
    metrics.refuse_absent("intra:mnist", runs)  # none has any: that is not a wrong name
    for name, there in [
        ("term:proximate", "cross_entropy, proximal"),
        ("drift:angles", "angle"),
        ("domain:minst", "mnist"),
        ("quality:features_sha256", "nmi"),
    ]:
        kind, _, wrong = name.partition(":")
        with pytest.raises(UserError, match=f"^unknown {kind} '{wrong}'; (did you mean .*)?the runs have {there}.$"):
            metrics.refuse_absent(name, runs)


@pytest.mark.parametrize(("target", "answer"), [("57", 2), ("57.01", 4), ("70", 4), ("70.1", None), ("0", 1)])
def test_rounds_to_a_target_count_from_one_and_include_equality(target, answer):
    metric = metrics.find_metric(f"rounds-to:{target}")
    assert metric.value(RUN) == answer
    assert (metric.unit, metric.better, metric.field, metric.none) == ("rounds", "lower", "rounds_to_target", "never")


def test_fractions_count_the_planned_rounds_not_those_that_are_done():
    short = {**RUN, "config": {"rounds": 10, "cohort_size": 4}}
    assert value("at:1/5", short) == pytest.approx(57)
    assert value("at:1", short) is None


DOMAINS = [
    entry(number, 0.5, domains={"a": a, "b": b}, intra={"a": 1.0, "b": 0.5}, inter={"a": a / 2, "b": b / 2})
    for number, (a, b) in enumerate([(0.0, 0.0), (0.2, 0.4), (0.4, 0.6), (0.6, 0.2)])
]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("domain:a", 60),
        ("domain:b", 20),
        ("domain", 40),
        ("inter:a", 30),
        ("inter", 20),
        ("intra:b", 50),
        ("intra", 75),
    ],
)
def test_domains_at_the_selected_round(name, answer):
    assert value(name, record(*DOMAINS, selected_round=3)) == pytest.approx(answer)


@pytest.mark.parametrize(("name", "answer"), [("domain:a", 40), ("domain", 40), ("inter:b", 20)])
def test_domains_over_the_last_three_rounds(name, answer):
    assert value(name, record(*DOMAINS, selection="mean-last-3", selected_round=3)) == pytest.approx(answer)


def test_what_a_run_does_not_have_is_none():
    run = record(entry(0, 0.5), selected_round=0)
    for name in ("validation", "classifier", "domain", "domain:a", "inter", "quality:nmi", "floats-up", "total-floats"):
        assert value(name, run) is None
    assert value("best", record(entry(0, None))) is None
    assert value("domain:c", record(*DOMAINS, selected_round=3)) is None


def test_classifier_and_quality():
    run = record(entry(0, 0.5, classifier_accuracy=0.25), selected_round=0, quality={"nmi": 0.413})
    assert value("classifier", run) == 25
    assert value("quality:nmi", run) == 0.413
    assert metrics.find_metric("quality:nmi").unit == ""


def test_costs_of_a_client_and_of_all_in_all_rounds():
    run = record(entry(0, 0.5), entry(1, 0.5), cost={"floats_up": 100, "floats_down": 90, "memory_floats": 300})
    answers = {
        "floats-up": 100,
        "floats-down": 90,
        "memory-floats": 300,
        "total-floats": 800,
        "total-memory-floats": 2400,
    }
    assert {name: value(name, run) for name in answers} == answers  # 4 clients, 2 rounds
    assert {(metrics.find_metric(name).unit, metrics.find_metric(name).better) for name in answers} == {("floats", "")}


def test_the_floats_of_a_run_are_those_of_all_its_rounds():
    rounds = [entry(number, 0.5, floats_up=floats) for number, floats in enumerate((10, 10, 100))]
    run = record(*rounds, cost={"floats_up": 100})
    assert value("total-floats", run) == 4 * 120
    assert value("floats-up", run) == 40
    assert value("floats-up", record(entry(0, 0.5), cost={"floats_up": 100})) == 100  # older ones have the last alone


@pytest.mark.parametrize(
    "name", ["accuracy", "at", "at:", "rounds:5", "rounds-to", "quality", "selected:1", "floats-up:x", "", "at:x"]
)
def test_an_unknown_name_is_refused(name):
    with pytest.raises(UserError, match="metric"):
        metrics.find_metric(name)
