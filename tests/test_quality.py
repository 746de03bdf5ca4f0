"""Features: their quality by hand, and what is measured, kept and drawn of a model's and of the clients'."""

import json
import shutil
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from sklearn.metrics import confusion_matrix, normalized_mutual_info_score, silhouette_score

import fedcli
from fedcli import toy
from fedcli.core.trees import select
from fedcli.figures import features, find_chart, grid
from fedcli.figures.features import CLASS_COLOURS, clients_chart, embed
from fedcli.measure import client_features, quality
from fedcli.measure.client_features import features_after_one_more_round, features_of_clients
from fedcli.measure.feature_files import CLIENT_FEATURES, MODEL_FEATURES
from fedcli.measure.separation import pair_cosines, separation
from fedcli.registry import find_method
from fedcli.results.metrics import find_metric
from fedcli.results.run_records import find_records
from fedcli.runs.prepare import prepare
from fedcli.runs.record import read_record, write_record
from fedcli.runs.resolve import resolve
from fedcli.runs.resume import open_run
from tests import laws
from tests.commands import error_of, output_of, run_command
from tests.user_errors import raises_user_error

THREE_OF_FOUR = {
    "dataset": "digits", "train_examples": 200, "num_clients": 4, "cohort_size": 3, "partition": "iid", "rounds": 3,
    "local_epochs": 1, "device": "cpu",
}  # fmt: skip
NUM_ROUNDS = THREE_OF_FOUR["rounds"]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """Makes a run that no test may change."""
    return fedcli.run("fedavg", out=tmp_path_factory.mktemp("runs") / "fedavg", **THREE_OF_FOUR)


@pytest.fixture
def run(finished_run, tmp_path):
    """Makes a copy of the finished run, which a test may change."""
    return replace(finished_run, path=shutil.copytree(finished_run.path, tmp_path / "run"))


def kept_features(folder):
    """Reads the features that have been kept beside a record."""
    return MODEL_FEATURES.read(folder, read_record(folder))


def test_separation_is_that_of_the_classes_and_of_as_many_clusters():
    features = np.array([[0.0], [0.1], [0.2], [9.0], [9.1], [9.2]])
    labels = np.array([0, 0, 1, 1, 1, 1])
    expected = {
        "nmi": normalized_mutual_info_score(labels, [0, 0, 0, 1, 1, 1]),
        "silhouette": silhouette_score(features, labels),
    }
    assert separation(features, labels) == pytest.approx(expected)
    for too_few in ([1, 1, 1], [0, 1, 2]):
        with raises_user_error("two classes or more, with more images"):
            separation(np.eye(3), np.array(too_few))


def test_many_test_images_are_sampled_and_all_runs_have_the_same(run, tmp_path, monkeypatch):
    monkeypatch.setattr(quality, "MAX_IMAGES", 50)
    other = fedcli.run("fedavg", out=tmp_path / "other", **{**THREE_OF_FOUR, "seed": 3})
    assert quality.add_quality(run.path)["examples"] == 50
    assert quality.add_quality(other.path)["examples"] == 50
    labels = kept_features(run.path)["labels"].tolist()
    assert len(set(labels)) == 10  # the test images are sorted by label: no piece of them
    assert kept_features(other.path)["labels"].tolist() == labels


def test_the_record_has_the_numbers_beside_all_it_had(run):
    written = quality.add_quality(run.path)
    assert find_metric("quality:nmi").read_value(read_record(run.path)) == written["nmi"]
    assert read_record(run.path) == {**json.loads(json.dumps(run.record)), "quality": written}
    names = ["checkpoint.safetensors", "features.npz", "record.json", "selected.safetensors"]
    assert sorted(path.name for path in run.path.iterdir()) == names


@pytest.fixture(scope="module")
def finished_personal_run(tmp_path_factory):
    """Makes a run of personal models with different networks, on four domains, that no test may change."""
    options = {"dataset": "digit-domains", "protocol": "fccl:digit-domains", "num_clients": 4, "partition": "domains"}
    return fedcli.run("local", out=tmp_path_factory.mktemp("runs") / "local", **{**THREE_OF_FOUR, **options})


@pytest.fixture
def personal_run(finished_personal_run, tmp_path_factory):
    """Makes a copy of the run of personal models, which a test may change."""
    copy = tmp_path_factory.mktemp("runs") / "local"
    return replace(finished_personal_run, path=shutil.copytree(finished_personal_run.path, copy))


@pytest.mark.parametrize("client", [None, 2])
def test_the_features_are_those_of_the_last_models(run, personal_run, client):
    """They are of the last global model, or of a client's own, on the test images."""
    measured_run = run if client is None else personal_run
    written = quality.add_quality(measured_run.path, client=client, round="last")
    outputs = kept_features(measured_run.path)

    fed = open_run(measured_run.path).fed
    if client is None:
        model = measured_run.state
        network = None
    else:
        model = measured_run.state.clients[client]
        network = fed.networks[fed.architecture[client]]
    features, _, labels = fed.predict(model.params, model.buffers, None, network)
    assert set(outputs) == {"features", "labels", "predicted"}
    np.testing.assert_allclose(outputs["features"], features, rtol=1e-5, atol=1e-6)
    assert outputs["labels"].tolist() == labels.tolist()
    assert separation(outputs["features"], outputs["labels"]).items() <= written.items()
    assert written["examples"] == len(labels)
    assert written.get("client") == client
    if client is None:
        assert (outputs["predicted"] == outputs["labels"]).mean() == pytest.approx(run.record["summary"]["last"])


@pytest.mark.parametrize("round", ["selected", "last"])
def test_the_global_model_beside_personal_ones_is_no_clients(round, tmp_path):
    run = fedcli.run("ditto", out=tmp_path / "ditto", **THREE_OF_FOUR)
    quality.add_quality(run.path, round=round)
    fed = open_run(run.path).fed
    model = run.model(round=round).network
    outputs = fed.predict(dict(model.named_parameters()), dict(model.named_buffers()))
    expected = outputs.features.detach()
    np.testing.assert_allclose(kept_features(run.path)["features"], expected, rtol=1e-5, atol=1e-6)


def test_a_second_measurement_leaves_nothing_of_the_first_one(run):
    features = {"features": np.eye(2), "labels": np.arange(2)}
    MODEL_FEATURES.write(run.path, features, {"nmi": 0.5, "client": 3})
    of_clients = CLIENT_FEATURES.write(run.path, features, {"nmi": 0.1})
    assert read_record(run.path)["quality"]["client"] == 3
    of_model = MODEL_FEATURES.write(run.path, features, {"nmi": 0.7})
    expected = of_model | {f"clients_{name}": value for name, value in of_clients.items()}
    assert read_record(run.path)["quality"] == expected


def run_whose_best_round_is_not_its_last(folder):
    """Makes runs in a folder until the best model of one is not its last, and not as accurate; returns that run."""
    options = {**THREE_OF_FOUR, "rounds": 6, "lr": 0.5, "validation": 0.3, "momentum": 0.9}
    for seed in range(20):
        run = fedcli.run("fedavg", out=folder / str(seed), seed=seed, **options)
        summary = run.record["summary"]
        if summary["selected_round"] < options["rounds"] - 1 and summary["selected"] != summary["last"]:
            return run
    raise AssertionError("the best round of all runs is the last")


def test_the_model_of_the_headline_is_measured_drawn_and_exported(tmp_path):
    run = run_whose_best_round_is_not_its_last(tmp_path)
    best = run.record["summary"]["selected_round"]
    last = len(run.record["rounds"]) - 1
    for name, number in (("selected", best), ("last", last)):
        measured = quality.add_quality(run.path, round=name)
        assert measured["round"] == number
        outputs = kept_features(run.path)
        accuracy = run.record["rounds"][number]["test_accuracy"]
        assert (outputs["predicted"] == outputs["labels"]).mean() == pytest.approx(accuracy)
        axes = find_chart("confusion")(find_records([run.path])).axes[0]
        assert f"model of round {number + 1} of {last + 1}" in " ".join(axes.get_title().split())

    assert quality.add_quality(run.path)["round"] == best
    with raises_user_error("--round must be selected or last"):
        quality.add_quality(run.path, round="first")


def test_a_client_that_there_is_not_is_refused(run, personal_run):
    with raises_user_error("'fedavg' keeps one global model"):
        quality.add_quality(run.path, client=0)
    clients = "'local' keeps a model for each client, 0 to 3"
    with raises_user_error(f"{clients} (got --client 4)"):
        quality.add_quality(personal_run.path, client=4)
    with raises_user_error("got --client -1"):
        quality.add_quality(personal_run.path, client=-1)
    with raises_user_error(clients):
        quality.add_quality(personal_run.path, client=None)


def test_the_command_measures_finished_runs_alone(run, personal_run, tmp_path, folder):
    unfinished = shutil.copytree(run.path, tmp_path / "half")
    write_record(unfinished, {**run.record, "status": "interrupted"})

    output = output_of("quality", tmp_path)
    assert f"{read_record(run.path)['quality']['nmi']:.3f}" in output
    assert "quality" not in read_record(unfinished)
    run_command("quality", personal_run.path, "--client", 1)

    assert "no run has finished" in error_of("quality", unfinished)
    assert "there is no run at" in error_of("quality", tmp_path / "nowhere")


# Figures


@pytest.fixture(scope="module")
def folder_of_runs(tmp_path_factory):
    """Makes runs of two methods, of one with two seeds, and measures their features; returns their folder."""
    parent = tmp_path_factory.mktemp("runs")
    for method, seed in (("fedprox", 0), ("fedavg", 1), ("fedavg", 0)):
        run = fedcli.run(method, out=parent / f"{method}-{seed}", **{**THREE_OF_FOUR, "seed": seed})
        quality.add_quality(run.path)
    return parent


@pytest.fixture
def first_two_features(monkeypatch):
    """Draws the first two features in place of t-SNE, which takes seconds."""
    monkeypatch.setattr(features, "embed", lambda features: features[:, :2])


class FeaturePanel(NamedTuple):
    """A panel of a figure, and what it should show: a method's first seed."""

    axes: Axes
    name: str  # of the method
    measured: dict[str, Any]
    outputs: dict[str, np.ndarray]


def panels_of(figure, folder_of_runs):
    """Returns the panels of a figure of the two methods, which are in the order of the methods' names."""
    panels = []
    for axes, name in zip(figure.axes, ("FedAvg", "FedProx"), strict=True):
        folder = folder_of_runs / f"{name.lower()}-0"
        panels.append(FeaturePanel(axes, name, read_record(folder)["quality"], kept_features(folder)))
    return panels


def test_the_same_features_give_the_same_points_also_when_they_are_few():
    features = np.random.default_rng(0).normal(size=(60, 6))
    assert (embed(features) == embed(features)).all()
    assert embed(features[:5]).shape == (5, 2)  # fewer than the perplexity


@pytest.mark.parametrize("shape", [(60, 1), (1, 6)])
def test_tsne_of_one_feature_or_of_one_image_is_refused(shape):
    with raises_user_error("t-SNE needs two features of two images or more"):
        embed(np.zeros(shape))


def test_each_client_that_is_measured_has_a_marker_of_its_own():
    assert len(set(features.MARKERS)) == client_features.MAX_CLIENTS


@pytest.mark.parametrize("across", [1, 3])
def test_tsne_has_a_panel_a_setting_with_the_features_of_its_first_seed(
    across, folder_of_runs, first_two_features, monkeypatch
):
    monkeypatch.setattr(grid, "ACROSS", across)
    figure = find_chart("tsne")(find_records([folder_of_runs]))
    assert figure.get_suptitle().replace("\n", " ").startswith("Digits, IID, seed 0; reduced: ")
    for axes, name, measured, outputs in panels_of(figure, folder_of_runs):
        of_model = f"model of round {measured['round'] + 1} of {NUM_ROUNDS}"
        numbers = f"NMI {measured['nmi']:.2f}, silhouette {measured['silhouette']:.2f}"
        assert axes.get_title() == f"{name}, {of_model}\n{numbers}"

        (points,) = axes.collections
        places = points.get_offsets().tolist()
        colours = [to_hex(colour) for colour in points.get_facecolors()]
        expected_places = outputs["features"][:, :2].astype(float).tolist()
        expected_colours = [CLASS_COLOURS[label].lower() for label in outputs["labels"]]
        expected = sorted(zip(expected_places, expected_colours, strict=True))
        assert sorted(zip(places, colours, strict=True)) == expected

    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [str(digit) for digit in range(10)]
    assert [line.get_color() for line in legend.get_lines()] == list(CLASS_COLOURS)


def test_confusion_has_a_panel_a_setting_with_shares_of_each_class_in_percent(folder_of_runs):
    figure = find_chart("confusion")(find_records([folder_of_runs]))
    for axes, name, measured, outputs in panels_of(figure, folder_of_runs):
        labels = outputs["labels"]
        predicted = outputs["predicted"]
        counts = confusion_matrix(labels, predicted, labels=range(10))
        shares = counts / counts.sum(1, keepdims=True)

        (image,) = axes.images
        np.testing.assert_allclose(image.get_array(), shares)
        assert image.get_clim() == (0, 1)
        assert [text.get_text() for text in axes.texts] == [f"{share:.0%}" for share in shares.flat]
        right = f"{100 * np.mean(labels == predicted):.1f} % of {len(labels)} images right"
        assert axes.get_title() == f"{name}, model of round {measured['round'] + 1} of {NUM_ROUNDS}\n{right}"


@pytest.mark.parametrize("kind", ["tsne", "confusion"])
def test_a_clients_own_model_is_called_so(kind, personal_run, first_two_features):
    measured = quality.add_quality(personal_run.path, client=2, round="last")
    assert measured["client"] == 2
    (axes,) = [axes for axes in find_chart(kind)(find_records([personal_run.path])).axes if axes.get_title()]
    assert f"client\N{NO-BREAK SPACE}2, model of round {NUM_ROUNDS} of {NUM_ROUNDS}\n" in axes.get_title()
    assert ("common test images right" in axes.get_title()) == (kind == "confusion")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tsne", "confusion"])
def test_the_command_draws_them_and_refuses_others(kind, folder_of_runs, tmp_path, first_two_features, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = fedcli.run("fedavg", out=tmp_path / "bare", **{**THREE_OF_FOUR, "rounds": 1}).path
    with raises_user_error("is missing or is not what its record names"):
        find_chart(kind)(find_records([folder]))
    write_record(folder, {**read_record(folder), "dataset": "letters"})
    with raises_user_error("of one data set"):
        find_chart(kind)(find_records([folder_of_runs, folder]))

    output = output_of("plot", "--kind", kind, folder_of_runs, folder, "--dataset", "digits")
    assert output == f"{kind}.png and {kind}.pdf\n"


# Features of clients after one more round


def test_cosines_of_pairs_are_those_by_hand():
    features = np.array([[1.0, 0.0], [2.0, 2.0], [0.0, 0.0], [-3.0, 0.0]])
    cosines, same = pair_cosines(features, np.array([7, 7, 2, 2]))
    assert cosines == pytest.approx([0.5**0.5, 0, -1, 0, -(0.5**0.5), 0])  # 01 02 03 12 13 23
    assert same.tolist() == [True, False, False, False, False, True]


def test_a_client_shows_the_images_of_its_classes_and_domains_by_its_own_model(monkeypatch):
    setup, fed = toy.federation("fedavg")
    has_label_2 = (fed.engine.labels[fed.training[1]] == 2).numpy()
    fed.training[1] = fed.training[1][~has_label_2]
    cohort = fed.cohort_of(0, [1, 3])
    fed.start_round(keep_sent_models=True)
    laws.method_round(setup, fed, laws.initial_state(setup, fed), cohort)

    points = features_of_clients(fed, cohort)

    features_of = {}
    for k, client in enumerate((1, 3)):
        params, buffers = select((fed.exchanged.trained.params, fed.exchanged.trained.buffers), k)
        features_of[client] = fed.predict(params, buffers, None).features.numpy()
    for feature, label, client in zip(points["features"], points["labels"], points["clients"], strict=True):
        is_same = np.isclose(features_of[client], feature, rtol=1e-9, atol=0).all(1)
        assert label in fed.test_labels[torch.as_tensor(is_same)]
    classes_of_clients = set(zip(points["clients"].tolist(), points["labels"].tolist(), strict=True))
    assert classes_of_clients == {(1, 0), (1, 1), (3, 0), (3, 1), (3, 2)}
    assert len(points["labels"]) == 20 + int((fed.test_labels != 2).sum())

    # At most so many points and clients.
    monkeypatch.setattr(client_features, "MAX_FEATURES", 9)
    assert len(features_of_clients(fed, cohort)["labels"]) == 9
    monkeypatch.setattr(client_features, "MAX_CLIENTS", 1)
    assert set(features_of_clients(fed, cohort)["clients"].tolist()) == {1}
    monkeypatch.undo()

    # The images of a client's domains.
    fed.test_domains = torch.arange(20) % 2
    fed.domain_counts = np.array([[5, 0], [3, 4], [0, 9], [0, 4]])
    assert (features_of_clients(fed, cohort)["clients"] == 3).sum() == 10  # the images of one of the two


def test_one_more_round_is_run_from_the_last_checkpoint_and_changes_nothing(finished_run, tmp_path):
    files = {path.name: path.read_bytes() for path in finished_run.path.iterdir()}
    points = features_after_one_more_round(finished_run.path)
    assert {path.name: path.read_bytes() for path in finished_run.path.iterdir()} == files

    setup = resolve(find_method("fedavg"), {**THREE_OF_FOUR, "rounds": 4})
    fed = prepare(setup).fed
    cohort = fed.cohort(3)
    fed.start_round(keep_sent_models=True)
    after, _ = laws.method_round(setup, fed, finished_run.state, cohort)
    longer = fedcli.run("fedavg", out=tmp_path / "longer", **{**THREE_OF_FOUR, "rounds": 4})
    assert toy.distance(after.params, longer.state.params) == 0  # so this is the round that would have followed
    expected = features_of_clients(fed, cohort)
    assert all(np.array_equal(points[name], expected[name]) for name in expected)


def test_what_is_measured_of_one_more_round_stands_in_the_record_and_is_drawn(run, first_two_features):
    folder = run.path
    with raises_user_error("run 'fedcli quality --clients ", " first"):
        clients_chart(find_records([folder]))

    points = features_after_one_more_round(folder)
    features = points["features"].astype(np.float16).astype(float)
    cosines, is_same_class = pair_cosines(features, points["labels"])
    expected = separation(features, points["labels"])
    expected |= {
        "cosine_same": np.median(cosines[is_same_class]),
        "cosine_other": np.median(cosines[~is_same_class]),
    }

    result = run_command("quality", folder, "--clients")
    assert f"{expected['nmi']:.3f}" in result.output
    measured = read_record(folder)["quality"]
    assert measured["clients_examples"] == len(points["labels"])
    quality.add_quality(folder)  # of the last model, beside
    record = read_record(folder)
    assert record["quality"].items() >= measured.items()
    for name, value in expected.items():
        assert find_metric(f"quality:clients_{name}").read_value(record) == value

    for file in folder.glob("checkpoint*"):  # the figure needs what is kept and no more
        file.unlink()
    of_points, of_cosines = clients_chart(find_records([folder])).axes
    assert {text.get_text() for text in of_cosines.get_legend().get_texts()} == {"of one class", "of two classes"}
    assert len(of_points.collections) == len(np.unique(points["clients"]))  # a marker each
    places = np.concatenate([marked.get_offsets() for marked in of_points.collections])
    assert sorted(places.tolist()) == sorted(features[:, :2].tolist())
