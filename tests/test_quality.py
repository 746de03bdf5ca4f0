"""Features: their quality, how far those of the clients drift apart, by hand, and what is measured, kept and drawn."""

import json
import shutil

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from sklearn.metrics import confusion_matrix, normalized_mutual_info_score, silhouette_score

import fedcli
from fedcli.core import drift
from fedcli.core.trees import select
from fedcli.figures import features, find_chart, grid, line_charts
from fedcli.figures.features import CLASS_COLOURS, clients_chart, embed
from fedcli.measure import quality
from fedcli.measure.quality import client_points, one_more_round, pair_cosines
from fedcli.registry import find_method
from fedcli.results.frame import find_records
from fedcli.results.metrics import find_metric
from fedcli.runs.models import Run
from fedcli.runs.prepare import prepare
from fedcli.runs.record import read_record, write_record
from fedcli.runs.resolve import resolve
from fedcli.runs.resume import open_run
from fedcli.runs.rounds import one_round
from tests import laws
from tests.files import refused
from tests.programs import invoke
from tests.test_plots import curve, drawn

TINY = {
    "dataset": "digits", "train_examples": 200, "num_clients": 4, "cohort_size": 3, "partition": "iid", "rounds": 3,
    "local_epochs": 1, "device": "cpu",
}  # fmt: skip


ROUNDS = TINY["rounds"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run that no test may change."""
    return fedcli.run("fedavg", out=tmp_path_factory.mktemp("runs") / "fedavg", **TINY)


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it."""
    return Run(finished.record, finished.state, shutil.copytree(finished.path, tmp_path / "run"))


def arrays(folder):
    """What has been kept beside a record."""
    return quality.read_outputs(folder, read_record(folder))


def test_separation_is_that_of_the_classes_and_of_as_many_clusters():
    features, labels = np.array([[0.0], [0.1], [0.2], [9.0], [9.1], [9.2]]), np.array([0, 0, 1, 1, 1, 1])
    expected = {
        "nmi": normalized_mutual_info_score(labels, [0, 0, 0, 1, 1, 1]),
        "silhouette": silhouette_score(features, labels),
    }
    assert quality.separation(features, labels) == pytest.approx(expected)
    for few in ([1, 1, 1], [0, 1, 2]):
        refused(lambda few=few: quality.separation(np.eye(3), np.array(few)), "two classes or more, with more images")


def test_many_test_images_are_sampled_and_all_runs_have_the_same(run, tmp_path, monkeypatch):
    monkeypatch.setattr(quality, "EXAMPLES", 50)
    other = fedcli.run("fedavg", out=tmp_path / "other", **{**TINY, "seed": 3}).path
    chosen = []
    for folder in (run.path, other):
        assert quality.add_quality(folder)["examples"] == 50
        chosen.append(arrays(folder)["labels"].tolist())
    assert len(set(chosen[0])) == 10  # the test images are sorted by label: no piece of them
    assert chosen[0] == chosen[1]


def test_the_record_has_the_numbers_beside_all_it_had(run):
    written = quality.add_quality(run.path)
    assert find_metric("quality:nmi").value(read_record(run.path)) == written["nmi"]
    assert read_record(run.path) == {**json.loads(json.dumps(run.record)), "quality": written}
    names = ["checkpoint.safetensors", "features.npz", "record.json", "selected.safetensors"]
    assert sorted(path.name for path in run.path.iterdir()) == names


@pytest.fixture(scope="module")
def personal(tmp_path_factory):
    """A finished run of personal models with different networks, on four domains."""
    own = {"dataset": "digit-domains", "protocol": "fccl:digit-domains", "num_clients": 4, "partition": "domains"}
    return fedcli.run("local", out=tmp_path_factory.mktemp("runs") / "local", **{**TINY, **own})


@pytest.mark.parametrize("client", [None, 2])
def test_the_features_are_those_of_the_last_model_or_a_clients_own_on_test_images(run, personal, client):
    chosen = run if client is None else personal
    written = quality.add_quality(chosen.path, client=client, round="last")
    fed = open_run(chosen.path).fed
    model = chosen.state if client is None else chosen.state.clients[client]
    network = None if client is None else fed.networks[fed.architecture[client]]
    features, _, labels = fed.predict(model.params, model.buffers, None, network)
    kept = arrays(chosen.path)
    assert set(kept) == {"features", "labels", "predicted"}
    np.testing.assert_allclose(kept["features"], features, rtol=1e-5, atol=1e-6)
    assert kept["labels"].tolist() == labels.tolist()
    assert quality.separation(kept["features"], kept["labels"]).items() <= written.items()
    assert (written["examples"], written.get("client")) == (len(labels), client)
    if client is None:
        assert (kept["predicted"] == kept["labels"]).mean() == pytest.approx(run.record["summary"]["last"])


def test_the_model_of_the_headline_is_measured_drawn_and_exported(tmp_path):
    options = {**TINY, "rounds": 6, "lr": 0.5, "validation": 0.3, "momentum": 0.9}
    for seed in range(20):  # until the best round is not the last
        run = fedcli.run("fedavg", out=tmp_path / str(seed), seed=seed, **options)
        best, last = run.record["summary"]["selected_round"], len(run.record["rounds"]) - 1
        if best < last and run.record["summary"]["selected"] != run.record["summary"]["last"]:
            break
    assert best < last
    for name, number in (("selected", best), ("last", last)):
        measured = quality.add_quality(run.path, round=name)
        assert measured["round"] == number
        kept, accuracy = arrays(run.path), run.record["rounds"][number]["test_accuracy"]
        assert (kept["predicted"] == kept["labels"]).mean() == pytest.approx(accuracy)
        (axes,) = find_chart("confusion")(find_records([run.path])).axes[:1]
        assert f"model of round {number + 1} of {last + 1}" in " ".join(axes.get_title().split())
    assert quality.add_quality(run.path)["round"] == best
    refused(lambda: quality.add_quality(run.path, round="first"), "--round must be selected or last")


def test_a_client_that_there_is_not_is_refused(run, personal):
    for folder, client, message in (
        (run.path, 0, "'fedavg' keeps one global model"),
        (personal.path, 4, "'local' keeps a model for each client, 0 to 3 (got --client 4)"),
        (personal.path, -1, "got --client -1"),
        (personal.path, None, "'local' keeps a model for each client, 0 to 3"),
    ):
        refused(lambda folder=folder, client=client: quality.add_quality(folder, client), message)


def test_the_command_measures_finished_runs_alone(run, personal, tmp_path):
    write_record(shutil.copytree(run.path, tmp_path / "half"), {**run.record, "status": "interrupted"})
    result = invoke("quality", tmp_path)
    assert result.exit_code == 0, result.output
    assert f"{read_record(run.path)['quality']['nmi']:.3f}" in result.stdout
    assert "quality" not in read_record(tmp_path / "half")
    for path, message in ((tmp_path / "half", "no run has finished"), (tmp_path / "nowhere", "there is no run at")):
        result = invoke("quality", path)
        assert (result.exit_code, message in result.stderr) == (2, True)
    assert invoke("quality", personal.path, "--client", 1).exit_code == 0


# Figures


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two methods, one of them with two seeds, with their features."""
    parent = tmp_path_factory.mktemp("runs")
    for method, seed in (("fedprox", 0), ("fedavg", 1), ("fedavg", 0)):
        quality.add_quality(fedcli.run(method, out=parent / f"{method}-{seed}", **{**TINY, "seed": seed}).path)
    return parent


@pytest.fixture
def quick(monkeypatch):
    """The first two features in place of t-SNE, which takes seconds."""
    monkeypatch.setattr(features, "embed", lambda features: features[:, :2])


def panels(figure, runs):
    """The panels of the first seeds, each with its method's name, what was measured, and the arrays."""
    for axes, method, name in zip(figure.axes, ("fedavg", "fedprox"), ("FedAvg", "FedProx"), strict=True):
        folder = runs / f"{method}-0"
        yield axes, name, read_record(folder)["quality"], arrays(folder)


def test_the_same_features_give_the_same_points_also_when_they_are_few():
    features = np.random.default_rng(0).normal(size=(60, 6))
    assert (embed(features) == embed(features)).all()
    assert embed(features[:5]).shape == (5, 2)  # fewer than the perplexity


@pytest.mark.parametrize("across", [1, 3])
def test_tsne_has_a_panel_a_setting_with_the_features_of_its_first_seed(across, runs, quick, monkeypatch):
    monkeypatch.setattr(grid, "ACROSS", across)
    figure = find_chart("tsne")(find_records([runs]))
    assert figure.get_suptitle().replace("\n", " ").startswith("Digits, IID, seed 0; reduced: ")
    for axes, name, measured, kept in panels(figure, runs):
        of_model = f"model of round {measured['round'] + 1} of {ROUNDS}"
        numbers = f"NMI {measured['nmi']:.2f}, silhouette {measured['silhouette']:.2f}"
        assert axes.get_title() == f"{name}, {of_model}\n{numbers}"
        (points,) = axes.collections
        shown = zip(points.get_offsets().tolist(), map(to_hex, points.get_facecolors()), strict=True)
        colours = [CLASS_COLOURS[label].lower() for label in kept["labels"]]
        assert sorted(shown) == sorted(zip(kept["features"][:, :2].astype(float).tolist(), colours, strict=True))
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [str(digit) for digit in range(10)]
    assert [line.get_color() for line in legend.get_lines()] == list(CLASS_COLOURS)


def test_confusion_has_a_panel_a_setting_with_shares_of_each_class_in_percent(runs):
    for axes, name, measured, kept in panels(find_chart("confusion")(find_records([runs])), runs):
        labels, predicted = kept["labels"], kept["predicted"]
        counts = confusion_matrix(labels, predicted, labels=range(10))
        shares = counts / counts.sum(1, keepdims=True)
        (image,) = axes.images
        np.testing.assert_allclose(image.get_array(), shares)
        assert image.get_clim() == (0, 1)
        assert [text.get_text() for text in axes.texts] == [f"{share:.0%}" for share in shares.flat]
        right = f"{100 * np.mean(labels == predicted):.1f} % of {len(labels)} images right"
        assert axes.get_title() == f"{name}, model of round {measured['round'] + 1} of {ROUNDS}\n{right}"


@pytest.mark.parametrize("kind", ["tsne", "confusion"])
def test_the_command_draws_them_and_refuses_others(kind, runs, tmp_path, quick, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = fedcli.run("fedavg", out=tmp_path / "bare", **{**TINY, "rounds": 1}).path
    refused(lambda: find_chart(kind)(find_records([folder])), "is missing or is not what its record names")
    write_record(folder, {**read_record(folder), "dataset": "letters"})
    refused(lambda: find_chart(kind)(find_records([runs, folder])), "of one data set")
    result = invoke("plot", "--kind", kind, runs, folder, "--dataset", "digits")
    assert (result.exit_code, result.stdout) == (0, f"{kind}.png and {kind}.pdf\n")


# How far the clients' models drift apart


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


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


def watched(**run):
    setup, fed = laws.federation("fedavg", drift_every=1, **run)
    return setup, fed, setup.method.init(fed, setup.options)


@pytest.mark.parametrize(("chunk", "at_once"), [("1", 7), ("4", 100)])
def test_what_a_round_records_is_of_the_models_before_they_are_aggregated(chunk, at_once, monkeypatch):
    monkeypatch.setattr(drift, "AT_ONCE", at_once)
    setup, fed, state = watched(clients_per_chunk=chunk, backbone=laws.NORMED)  # BatchNorm, in evaluation mode
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
    assert all(abs(value) > 0 for value in record["rounds"][1]["drift"].values())
    assert record["summary"] == finished.record["summary"]
    assert not any("drift" in entry for entry in finished.record["rounds"])


def drifting(method="one", seed=0, values=((1, 0.5), None, (3, -0.5))):
    record = curve(method, seed)
    for entry, pair in zip(record["rounds"], values, strict=True):
        if pair:
            entry["drift"] = dict(zip(("feature_distance", "classifier_similarity"), pair, strict=True))
    return record


def test_curves_are_means_over_seeds_of_the_rounds_measured():
    runs = [drifting(), drifting(seed=1, values=((3, 0.1), (9, 9), (5, -0.5))), drifting("two"), curve("three")]
    figure = line_charts.drift_chart(runs)
    left, right = figure.axes
    assert left.lines[0].get_xydata().tolist() == [[1, 2], [3, 4]]
    assert right.lines[0].get_xydata() == pytest.approx(np.array([[1, 0.3], [3, -0.5]]))
    assert [len(axes.lines) for axes in figure.axes] == [2, 2]  # the run that did not measure is left out
    assert [len(axes.collections) for axes in figure.axes] == [1, 1]
    assert drawn(figure)[2] == ["one", "two", "mean ± standard deviation over 2 seeds"]
    (line,) = line_charts.drift_chart([drifting(), curve(seed=1)]).axes[0].lines  # one seed did not measure
    assert line.get_xydata().tolist() == [[1, 1], [3, 3]]
    refused(lambda: line_charts.drift_chart([curve()]), "no run has measured its distance of features", "--drift-every")


def test_cosines_of_pairs_by_hand():
    features = np.array([[1.0, 0.0], [2.0, 2.0], [0.0, 0.0], [-3.0, 0.0]])
    cosines, same = pair_cosines(features, np.array([7, 7, 2, 2]))
    assert cosines == pytest.approx([0.5**0.5, 0, -1, 0, -(0.5**0.5), 0])  # 01 02 03 12 13 23
    assert same.tolist() == [True, False, False, False, False, True]


def test_a_client_shows_the_images_of_its_classes_and_domains_by_its_own_model(monkeypatch):
    setup, fed, state = watched()
    fed.training[1] = fed.training[1][(fed.engine.labels[fed.training[1]] != 2).numpy()]
    cohort = fed.cohort_of(0, [1, 3])
    fed.start_round(keep_sent_models=True)
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
    setup = resolve(find_method("fedavg"), {**TINY, "rounds": 4})
    again = prepare(setup)[2]
    again.start_round(keep_sent_models=True)
    after, _ = setup.method.run_round(finished.state, again.cohort(3), again, setup.options)
    assert laws.distance(after.params, longer.state.params) == 0  # so this is the round that would have followed
    expected = client_points(again, again.cohort(3))
    assert all(np.array_equal(points[name], expected[name]) for name in expected)


def test_what_is_measured_of_one_more_round_stands_in_the_record_and_is_drawn(run, quick):
    folder = run.path
    refused(lambda: clients_chart(find_records([folder])), "run 'fedcli quality --clients ", " first")
    points = one_more_round(folder)
    features = points["features"].astype(np.float16).astype(float)
    cosines, same = pair_cosines(features, points["labels"])
    expected = quality.separation(features, points["labels"])
    expected |= {"cosine_same": np.median(cosines[same]), "cosine_other": np.median(cosines[~same])}
    ended = invoke("quality", folder, "--clients")
    assert ended.exit_code == 0, ended.output
    assert f"{expected['nmi']:.3f}" in ended.output
    measured = read_record(folder)["quality"]
    assert measured["clients_examples"] == len(points["labels"])
    quality.add_quality(folder)  # of the last model, beside
    record = read_record(folder)
    assert record["quality"].items() >= measured.items()
    for name, value in expected.items():
        assert find_metric(f"quality:clients_{name}").value(record) == value
    for file in folder.glob("checkpoint*"):  # the figure needs what is kept and no more
        file.unlink()
    above, below = clients_chart(find_records([folder])).axes
    assert {text.get_text() for text in below.get_legend().get_texts()} == {"of one class", "of two classes"}
    places = [tuple(point) for part in above.collections for point in part.get_offsets().tolist()]
    assert sorted(places) == sorted(map(tuple, features[:, :2].tolist()))
    assert len(above.collections) == len(np.unique(points["clients"]))  # a marker each
