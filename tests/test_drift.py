"""How far the clients' models drift apart: by hand, as a run measures it, and as it is drawn."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import fedcli
from fedcli import toy
from fedcli.core import drift
from fedcli.core.federation import Federation
from fedcli.core.trees import select
from fedcli.figures import line_charts
from fedcli.registry import methods
from fedcli.runs.resolve import Setup
from fedcli.runs.rounds import one_round
from tests import laws
from tests.example_records import record_with_curve
from tests.figure_panels import first_panel
from tests.run_options import THREE_ROUNDS
from tests.tensors import doubles
from tests.user_errors import raises_user_error


def test_the_distance_of_features_is_that_by_hand():
    features = doubles([[[0, 0], [1, 1]], [[3, 4], [1, 1]], [[0, 0], [1, 2]]])  # 3 clients, 2 images
    assert drift.feature_distance(features) == pytest.approx((5 + 0 + 5 + 0 + 1 + 1) / 6, rel=1e-12)
    assert drift.feature_distance(features[:1]) is None


def test_the_similarity_of_classifier_updates_is_that_by_hand():
    received = doubles([[1, 1], [0, 2]])
    updates = doubles([[[1, 0], [0, 2]], [[0, 3], [0, -1]], [[-1, 0], [0, 5]]])  # 3 clients, 2 classes
    cosines = [0, -1, 0, -1, 1, -1]  # of clients 0 and 1, 0 and 2, 1 and 2: class 0, then class 1
    assert drift.classifier_similarity(received + updates, received) == pytest.approx(sum(cosines) / 6, rel=1e-12)
    updates = doubles([[[1, 0], [0, 0]], [[1, 1], [0, -1]], [[0, 0], [0, 5]]])  # not moved, no direction
    similarity = drift.classifier_similarity(received + updates, received)
    assert similarity == pytest.approx((0.5**0.5 - 1) / 2, rel=1e-12)  # class 0: clients 0 and 1; class 1: 1 and 2
    for weights in (received + updates[:1], received.expand(3, 2, 2)):
        assert drift.classifier_similarity(weights, received) is None


class DriftingRun(NamedTuple):
    """A federation that measures drift after every round, before its first."""

    setup: Setup
    fed: Federation
    state: Any


def start_drifting_run(**options):
    """Sets up FedAvg on toy data with these options of the run, which measures drift."""
    setup, fed = toy.federation("fedavg", drift_every=1, **options)
    return DriftingRun(setup, fed, laws.initial_state(setup, fed))


@pytest.mark.parametrize(("chunk", "at_once"), [("1", 7), ("4", 100)])
def test_what_a_round_records_is_of_the_models_before_they_are_aggregated(chunk, at_once, monkeypatch):
    monkeypatch.setattr(drift, "AT_ONCE", at_once)
    setup, fed, state = start_drifting_run(
        clients_per_chunk=chunk, backbone=toy.BATCHNORM
    )  # BatchNorm, in evaluation mode
    cohort = fed.cohort(0)
    after, entry = one_round(setup, fed, state, cohort)

    features_of_clients = []
    for k in range(len(cohort.client_ids)):
        params, buffers = select((fed.exchanged.trained.params, fed.exchanged.trained.buffers), k)
        features_of_clients.append(fed.predict(params, buffers, None).features)
    distance = drift.feature_distance(torch.stack(features_of_clients))
    assert entry["drift"]["feature_distance"] == pytest.approx(distance, rel=1e-9)
    received = fed.exchanged.received
    similarity = drift.classifier_similarity(fed.exchanged.trained.params["head.weight"], received["head.weight"])
    assert entry["drift"]["classifier_similarity"] == pytest.approx(similarity, rel=1e-9)

    # The model that is received first counts, and the trained ones are those that are aggregated.
    fed.broadcast({name: value + 1 for name, value in state.params.items()}, state.buffers, cohort)
    assert toy.distance(fed.exchanged.received, state.params) == 0
    shares = fed.exchanged.trained.params["head.weight"] * cohort.weights[:, None, None]
    torch.testing.assert_close(shares.sum(0), after.params["head.weight"], rtol=1e-10, atol=1e-12)

    # Without a received model there is no similarity, without clients there is nothing.
    fed.exchanged.received = None
    measured = drift.measure_drift(fed, cohort)
    assert [name for name, value in measured.items() if value] == ["feature_distance"]
    fed.start_round()  # forgets the clients
    assert list(drift.measure_drift(fed, cohort).values()) == [None, None]


@pytest.mark.parametrize("second_cohort", [[0, 1], [1, 2]])
def test_updates_are_measured_only_from_a_model_that_all_clients_were_sent(second_cohort):
    setup, fed = toy.federation("fedfm-lite", {"model_interval": 2}, cohort_size=2, drift_every=1)
    state = laws.initial_state(setup, fed)
    state, first = one_round(setup, fed, state, fed.cohort_of(0, [0, 1]))
    assert first["drift"] == {"feature_distance": None, "classifier_similarity": None}  # no exchange, so none sends
    # Clients 0 and 1 go on from their own models; client 2 is sent the server's.
    state, second = one_round(setup, fed, state, fed.cohort_of(1, second_cohort))
    assert second["drift"]["feature_distance"] > 0
    assert second["drift"]["classifier_similarity"] is None


@pytest.mark.slow
def test_a_part_of_a_model_is_not_measured_as_a_model_by_any_method():
    names = []
    for method in methods().values():
        with_norm = {"backbone": toy.BATCHNORM} if method.name == "fedbn" else {}
        setup, fed = toy.federation(method, parts=toy.toy_parts((3, 3, 3, 3)), local_epochs=1, **with_norm)
        cohort = fed.cohort(0)
        fed.start_round(keep_sent_models=True)
        laws.method_round(setup, fed, laws.initial_state(setup, fed), cohort)
        if fed.exchanged.received is not None:
            assert fed.exchanged.received.keys() in [network.params.keys() for network in fed.networks], method.name
        if fed.exchanged.trained is not None:
            drift.measure_drift(fed, cohort)  # a part would have no features
            names.append(method.name)
    assert {"fedavg", "fml", "scaffold"} <= set(names)
    assert not {"fedkd", "fedper", "fedbn"} & set(names)  # buffers, a body, all but batch normalisation


def test_images_are_the_same_for_all_runs_and_at_most_so_many(monkeypatch):
    indices = []
    monkeypatch.setattr(drift, "local_features", lambda fed, cohort, index: indices.append(index.tolist()))
    monkeypatch.setattr(drift, "feature_distance", lambda features: None)

    def images_of_first_round(most, seed):
        monkeypatch.setattr(drift, "EXAMPLES", most)
        setup, fed, state = start_drifting_run(seed=seed)
        indices.clear()
        one_round(setup, fed, state, fed.cohort(0))
        (index,) = indices
        return index

    assert images_of_first_round(most=500, seed=0) == list(range(20))  # all that there are
    six = images_of_first_round(most=6, seed=0)
    assert len(set(six)) == 6
    assert six == sorted(six)
    assert images_of_first_round(most=6, seed=5) == six


def test_a_run_measures_every_so_many_rounds_and_after_the_last(tmp_path):
    record = fedcli.run("fedavg", out=tmp_path / "run", drift_every=2, **THREE_ROUNDS).record
    assert ["drift" in entry for entry in record["rounds"]] == [False, True, True]
    assert all(abs(value) > 0 for value in record["rounds"][1]["drift"].values())

    without_drift = fedcli.run("fedavg", out=tmp_path / "without", **THREE_ROUNDS).record
    assert record["summary"] == without_drift["summary"]
    assert not any("drift" in entry for entry in without_drift["rounds"])


def make_drift_record(method="one", seed=0, distances=(1, None, 3), similarities=(0.5, None, -0.5)):
    """Returns a record with the drift of three rounds; None where it was not measured."""
    record = record_with_curve(method, seed)
    for entry, distance, similarity in zip(record["rounds"], distances, similarities, strict=True):
        if distance is not None:
            entry["drift"] = {"feature_distance": distance, "classifier_similarity": similarity}
    return record


def test_curves_are_means_over_seeds_of_the_rounds_measured():
    records = [
        make_drift_record(),
        make_drift_record(seed=1, distances=(3, 9, 5), similarities=(0.1, 9, -0.5)),
        make_drift_record("two"),
        record_with_curve("three"),
    ]
    figure = line_charts.drift_chart(records)

    of_distance, of_similarity = figure.axes
    distances, _ = of_distance.lines  # the run that did not measure is left out
    similarities, _ = of_similarity.lines
    assert distances.get_xydata().tolist() == [[1, 2], [3, 4]]
    assert similarities.get_xydata() == pytest.approx(np.array([[1, 0.3], [3, -0.5]]))
    assert len(of_distance.collections) == 1
    assert len(of_similarity.collections) == 1
    assert first_panel(figure).legend == ["one", "two", "mean ± standard deviation over 2 seeds"]

    one_of_two_measured = line_charts.drift_chart([make_drift_record(), record_with_curve(seed=1)])
    of_distance, _ = one_of_two_measured.axes
    (line,) = of_distance.lines
    assert line.get_xydata().tolist() == [[1, 1], [3, 3]]
    with raises_user_error("no run has measured its distance of features", "--drift-every"):
        line_charts.drift_chart([record_with_curve()])
