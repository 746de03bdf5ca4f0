"""How far clients' models drift apart: known answers on hand-made clients, what a run records, and the two figures."""

import shutil

import numpy as np
import pytest
import torch

import fedcli
from fedcli.core.trees import select
from fedcli.figures import plots, quality
from fedcli.figures.quality import add_quality, client_points, one_more_round, pair_cosines, separation
from fedcli.registry import find_method
from fedcli.results.frame import find_records
from fedcli.results.metrics import find_metric
from fedcli.runs import drift
from fedcli.runs.config import resolve
from fedcli.runs.prepare import prepare
from fedcli.runs.records import read_record
from fedcli.runs.rounds import one_round
from tests import laws
from tests.files import refused
from tests.programs import invoke
from tests.test_plots import curve, drawn
from tests.test_runs import TINY as RUN

TINY = {**RUN, "protocol": "fedfa:digits", "train_examples": 200, "cohort_size": 3, "rounds": 3}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run that no test may change."""
    return fedcli.run("fedavg", out=tmp_path_factory.mktemp("runs") / "run", **TINY)


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


# The two numbers


def test_distance_of_features_by_hand():
    features = doubles([[[0, 0], [1, 1]], [[3, 4], [1, 1]], [[0, 0], [1, 2]]])  # 3 clients, 2 images
    assert drift.feature_distance(features) == pytest.approx((5 + 0 + 5 + 0 + 1 + 1) / 6, rel=1e-12)
    assert drift.feature_distance(features[:1]) is None


def test_similarity_of_classifier_updates_by_hand():
    received = doubles([[1, 1], [0, 2]])
    updates = doubles([[[1, 0], [0, 2]], [[0, 3], [0, -1]], [[-1, 0], [0, 5]]])  # 3 clients, 2 classes
    cosines = [0, -1, 0, -1, 1, -1]  # of clients 0 and 1, 0 and 2, 1 and 2: class 0, then class 1
    assert drift.classifier_similarity(received + updates, received) == pytest.approx(sum(cosines) / 6, rel=1e-12)
    updates = doubles([[[1, 0], [0, 0]], [[1, 1], [0, -1]], [[0, 0], [0, 5]]])  # not moved, no direction
    similarity = drift.classifier_similarity(received + updates, received)
    assert similarity == pytest.approx((0.5**0.5 - 1) / 2, rel=1e-12)  # class 0: clients 0 and 1; class 1: 1 and 2
    for weights in (received + updates[:1], received.expand(3, 2, 2)):
        assert drift.classifier_similarity(weights, received) is None


# Watching a round


def watched(**run):
    setup, fed = laws.federation("fedavg", drift_every=1, **run)
    return setup, fed, setup.method.init(fed, setup.options)


@pytest.mark.parametrize(("chunk", "at_once"), [("1", 7), ("4", 100)])
def test_what_a_round_records_is_of_the_models_before_they_are_aggregated(chunk, at_once, monkeypatch):
    monkeypatch.setattr(drift, "AT_ONCE", at_once)
    setup, fed, state = watched(clients_per_chunk=chunk, backbone="resnet10-3x3")  # BatchNorm, in evaluation mode
    cohort = fed.cohort(0)
    after, entry = one_round(setup, fed, state, cohort)
    models = [select((fed.trained.params, fed.trained.buffers), k) for k in range(len(cohort.client_ids))]
    features = torch.stack([fed.predict(*model, None)[0] for model in models])
    assert entry["drift"]["feature_distance"] == pytest.approx(drift.feature_distance(features), rel=1e-9)
    similarity = drift.classifier_similarity(fed.trained.params["head.weight"], fed.received["head.weight"])
    assert entry["drift"]["classifier_similarity"] == pytest.approx(similarity, rel=1e-9)
    fed.broadcast({name: value + 1 for name, value in state.params.items()}, state.buffers, cohort)
    assert laws.distance(fed.received, state.params) == 0  # the model that is received first
    shares = fed.trained.params["head.weight"] * cohort.weights[:, None, None]
    torch.testing.assert_close(shares.sum(0), after.params["head.weight"], rtol=1e-10, atol=1e-12)
    fed.received = None
    assert [name for name, value in drift.measure_drift(fed, cohort).items() if value] == ["feature_distance"]
    fed.start_round()  # forgets the clients
    assert list(drift.measure_drift(fed, cohort).values()) == [None, None]


def test_images_are_the_same_for_all_runs_and_at_most_so_many(monkeypatch):
    chosen = []
    monkeypatch.setattr(drift, "local_features", lambda fed, cohort, index: chosen.append(index.tolist()))
    monkeypatch.setattr(drift, "feature_distance", lambda features: None)
    for most, seed in ((500, 0), (6, 0), (6, 5)):
        monkeypatch.setattr(drift, "EXAMPLES", most)
        setup, fed, state = watched(seed=seed)
        one_round(setup, fed, state, fed.cohort(0))
    assert chosen[0] == list(range(20))  # all that there are
    assert len(set(chosen[1])) == 6
    assert chosen[1] == sorted(chosen[1]) == chosen[2]


def test_a_run_measures_every_so_many_rounds_and_after_the_last(finished, tmp_path):
    record = fedcli.run("fedavg", out=tmp_path / "run", drift_every=2, **TINY).record
    assert [("drift" in entry) for entry in record["rounds"]] == [False, True, True]
    assert all(value > 0 for value in record["rounds"][1]["drift"].values())
    assert record["summary"] == finished.record["summary"]
    assert not any("drift" in entry for entry in finished.record["rounds"])


# Curves over rounds


def drifting(method="one", seed=0, values=((1, 0.5), None, (3, -0.5))):
    record = curve(method, seed)
    for entry, pair in zip(record["rounds"], values, strict=True):
        if pair:
            entry["drift"] = dict(zip(("feature_distance", "classifier_similarity"), pair, strict=True))
    return record


def test_curves_are_means_over_seeds_of_the_rounds_measured():
    runs = [drifting(), drifting(seed=1, values=((3, 0.1), (9, 9), (5, -0.5))), drifting("two"), curve("three")]
    figure = plots.drift_figure(runs)
    left, right = figure.axes
    assert left.lines[0].get_xydata().tolist() == [[1, 2], [3, 4]]
    assert right.lines[0].get_xydata() == pytest.approx(np.array([[1, 0.3], [3, -0.5]]))
    assert [len(axes.lines) for axes in figure.axes] == [2, 2]  # the run that did not measure is left out
    assert [len(axes.collections) for axes in figure.axes] == [1, 1]
    assert drawn(figure)[2] == ["one", "two", "mean ± standard deviation over 2 seeds"]
    (line,) = plots.drift_figure([drifting(), curve(seed=1)]).axes[0].lines  # one seed did not measure
    assert line.get_xydata().tolist() == [[1, 1], [3, 3]]
    refused(lambda: plots.drift_figure([curve()]), "no run has measured its distance of features", "--drift-every")


# The clients' features


def test_cosines_of_pairs_by_hand():
    features = np.array([[1.0, 0.0], [2.0, 2.0], [0.0, 0.0], [-3.0, 0.0]])
    cosines, same = pair_cosines(features, np.array([7, 7, 2, 2]))
    assert cosines == pytest.approx([0.5**0.5, 0, -1, 0, -(0.5**0.5), 0])  # 01 02 03 12 13 23
    assert same.tolist() == [True, False, False, False, False, True]


def test_a_client_shows_the_images_of_its_classes_and_domains_by_its_own_model(monkeypatch):
    setup, fed, state = watched()
    fed.training[1] = fed.training[1][(fed.engine.labels[fed.training[1]] != 2).numpy()]
    cohort = fed.cohort_of(0, [1, 3])
    setup.method.run_round(state, cohort, fed, setup.options)
    points = client_points(fed, cohort)
    models = [select((fed.trained.params, fed.trained.buffers), k) for k in (0, 1)]
    features = {client: fed.predict(*model, None)[0].numpy() for client, model in zip((1, 3), models, strict=True)}
    for feature, label, client in zip(*points.values(), strict=True):
        same = np.isclose(features[client], feature, rtol=1e-9, atol=0).all(1)
        assert label in fed.test_labels[torch.as_tensor(same)]
    shown = set(zip(points["clients"].tolist(), points["labels"].tolist(), strict=True))
    assert shown == {(1, 0), (1, 1), (3, 0), (3, 1), (3, 2)}
    assert len(points["labels"]) == 20 + int((fed.test_labels != 2).sum())
    monkeypatch.setattr(quality, "POINTS", 9)
    assert len(client_points(fed, cohort)["labels"]) == 9
    monkeypatch.setattr(quality, "CLIENTS", 1)
    assert set(client_points(fed, cohort)["clients"].tolist()) == {1}
    monkeypatch.undo()
    fed.test_domains = torch.arange(20) % 2
    fed.domain_counts = np.array([[5, 0], [3, 4], [0, 9], [0, 4]])
    assert (client_points(fed, cohort)["clients"] == 3).sum() == 10  # the images of one of the two


def test_one_more_round_is_run_from_the_last_checkpoint_and_changes_nothing(finished, tmp_path):
    files = {path.name: path.read_bytes() for path in finished.path.iterdir()}
    points = one_more_round(finished.path)
    assert {path.name: path.read_bytes() for path in finished.path.iterdir()} == files
    longer = fedcli.run("fedavg", out=tmp_path / "longer", **{**TINY, "rounds": 4})
    setup = resolve(find_method("fedavg"), {**TINY, "rounds": 4, "drift_every": 1})
    again = prepare(setup)[2]
    after, _ = setup.method.run_round(finished.state, again.cohort(3), again, setup.options)
    assert laws.distance(after.params, longer.state.params) == 0  # so this is the round that would have followed
    expected = client_points(again, again.cohort(3))
    assert all(np.array_equal(points[name], expected[name]) for name in expected)


def test_what_is_measured_of_one_more_round_stands_in_the_record_and_is_drawn(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(quality, "embed", lambda features: features[:, :2])
    folder = shutil.copytree(finished.path, tmp_path / "run")
    refused(lambda: quality.clients_chart(find_records([folder])), "run 'fedcli quality --clients ", " first")
    points = one_more_round(folder)
    features = points["features"].astype(np.float16).astype(float)
    cosines, same = pair_cosines(features, points["labels"])
    expected = separation(features, points["labels"])
    expected |= {"cosine_same": np.median(cosines[same]), "cosine_other": np.median(cosines[~same])}
    ended = invoke("quality", folder, "--clients")
    assert ended.exit_code == 0, ended.output
    assert f"{expected['nmi']:.3f}" in ended.output
    measured = read_record(folder)["quality"]
    assert measured["clients_examples"] == len(points["labels"])
    add_quality(folder)  # of the last model, beside
    record = read_record(folder)
    assert record["quality"].items() >= measured.items()
    for name, value in expected.items():
        assert find_metric(f"quality:clients_{name}").value(record) == value
    for file in folder.glob("checkpoint*"):  # the figure needs what is kept and no more
        file.unlink()
    above, below = quality.clients_chart(find_records([folder])).axes
    assert {text.get_text() for text in below.get_legend().get_texts()} == {"of one class", "of two classes"}
    places = [tuple(point) for part in above.collections for point in part.get_offsets().tolist()]
    assert sorted(places) == sorted(map(tuple, features[:, :2].tolist()))
    assert len(above.collections) == len(np.unique(points["clients"]))  # a marker each
