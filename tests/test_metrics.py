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
    entry(0, 0.2, 0.3), entry(1, 0.57, 0.9, classifier_accuracy=0.25), entry(2, None),
    entry(3, 0.7, 0.8, classifier_accuracy=0.5), entry(4, 0.6, 0.1),
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
        assert value(name.format(parameter), RUN) == (answer if answer is None else pytest.approx(answer)), parameter


def test_the_last_tenth_and_fractions_are_of_the_planned_rounds_not_of_those_that_are_done():
    assert value("last-tenth", RUN) == pytest.approx(60)
    rounds = [entry(number, 0.01 * number if number != 18 else None) for number in range(29)]
    assert value("last-tenth", record(*rounds)) == pytest.approx(27.5)
    assert value("last-tenth", record(*rounds[:20])) == pytest.approx(19)  # of two, the second alone was tested
    assert value("last-tenth", {**record(*rounds), "config": {"rounds": 400}}) is None  # not there yet
    short = {**RUN, "config": {"rounds": 10, "cohort_size": 4}}
    assert [value(name, short) for name in ("at:1/5", "at:1")] == [pytest.approx(57), None]


def test_drift_and_terms_are_those_of_the_last_round_that_has_them():
    terms = [{"cross_entropy": 2.0}, {"cross_entropy": 0.5}]
    drifts = [{"a": 1.0, "b": None}, {"a": 2.0, "b": None}]
    run = record(*(entry(n, 0.5, terms=terms[n], drift=drifts[n]) for n in (0, 1)), entry(2, None, terms=terms[1]))
    names = "drift:a", "drift:b", "term:cross_entropy", "term:proximal"
    assert [value(name, run) for name in names] == [2, None, 0.5, None]
    assert [value(name, record()) for name in ("drift:a", "term:cross_entropy")] == [None, None]


def test_accuracies_by_domain_and_client_are_of_the_selected_rounds_and_else_the_mean_over_domains():
    rounds = [
        entry(
            number, 0.5, domains={"a": a, "b": b}, intra={"a": 1.0, "b": 0.5}, inter={"a": a / 2, "b": b / 2},
            clients={"mean": a, "std": 0.25, "worst": b},
        )
        for number, (a, b) in enumerate([(0.0, 0.0), (0.2, 0.4), (0.4, 0.6), (0.6, 0.2)])
    ]  # fmt: skip
    answers = {"domain:a": 60, "domain": 40, "domain:c": None, "inter:a": 30, "inter": 20, "intra:b": 50, "intra": 75}
    answers |= {"clients:mean": 60, "clients:std": 25, "clients:worst": 20}
    assert {name: value(name, record(*rounds, selected_round=3)) for name in answers} == pytest.approx(answers)
    three = record(*rounds, selection="mean-last-3", selected_round=3)
    assert [value(name, three) for name in ("domain:a", "domain", "inter:b")] == pytest.approx([40, 40, 20])


def test_scores_of_classes_are_of_the_selected_rounds_and_leave_out_absent_classes_as_scikit_learn_does():
    counts = [
        {"right": [3, 0, 0, 1], "predicted": [4, 1, 0, 1], "actual": [3, 2, 0, 1]},
        {"right": [3, 1, 0, 0], "predicted": [3, 1, 0, 2], "actual": [3, 2, 0, 1]},
    ]
    rounds = [entry(number, 0.5, per_class=counts[number % 2]) for number in range(4)]
    names = {"class_names": ["a", "b", "c", "d"]}
    run = record(*rounds, selected_round=2, **names)
    f1 = 100 * (6 / 7 + 0 + 1) / 3
    answers = {"macro-f1": f1, "balanced-accuracy": 100 * 2 / 3, "class:b": 0, "class:c": None, "class:e": None}
    assert {name: value(name, run) for name in answers} == pytest.approx(answers)
    three = record(*rounds, selection="mean-last-3", selected_round=3, **names)
    assert value("class:b", three) == pytest.approx(100 / 3)  # 50, 0 and 50 %
    older = record(*rounds, entry(4, 0.5), selection="mean-last-3", selected_round=4, **names)
    assert [value(name, older) for name in ("macro-f1", "balanced-accuracy", "class:a")] == [None] * 3


def test_costs_are_of_a_client_in_the_mean_round_and_of_all_in_all_rounds():
    rounds = [entry(number, 0.5, floats_up=floats) for number, floats in enumerate((10, 10, 100))]
    run = record(*rounds, cost={"floats_up": 100, "floats_down": 90, "memory_floats": 300})  # older ones have the last
    answers = {"floats-up": 40, "floats-down": 90, "memory-floats": 300}
    answers |= {"total-floats": 4 * 120, "total-memory-floats": 4 * 3 * 300}
    assert {name: value(name, run) for name in answers} == answers


@pytest.mark.parametrize(
    "name",
    ["rounds:5", "at", "at:", "rounds-to", "quality", "selected:1", "floats-up:x", "", "at:1e-9999999", "domain:"],
)
def test_an_unknown_name_is_refused(name):
    with pytest.raises(UserError, match="metric"):
        metrics.find_metric(name)
