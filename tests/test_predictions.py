"""What the headline's models make of a run's images: equal to the record, to the last image."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedcli
from fedcli.measure.feature_files import MODEL_FEATURES
from fedcli.measure.predictions import per_class
from fedcli.measure.quality import add_quality
from fedcli.runs.record import read_record
from tests.commands import error_of, run_command
from tests.user_errors import raises_user_error

FOUR_CLIENTS = {"dataset": "digits", "train_examples": 240, "rounds": 2, "local_epochs": 1, "num_clients": 4}


# The options of a run, by the kind of its headline.
KINDS = {
    "global": {"method": "fedavg", "protocol": "fedfm:digits"},
    "best round": {"method": "fedavg", "protocol": "fedfm:digits", "lr": 0.2, "rounds": 3},
    "own test images": {"method": "fedavg", "protocol": "own:personal"},
    "personal": {"method": "ditto", "protocol": "own:personal"},
    "personal, common images": {"method": "ditto", "protocol": "fedfm:digits"},
    "prototypes": {"method": "fedproto", "protocol": "fedfm:digits"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Makes a run of each kind of headline, by kind; no test may change them."""
    folder = tmp_path_factory.mktemp("runs")
    by_kind = {}
    for kind, options in KINDS.items():
        out = folder / kind.replace(" ", "-")
        by_kind[kind] = fedcli.run(**{**FOUR_CLIENTS, **options}, out=out, per_class=True)
    assert by_kind["best round"].record["summary"]["selected_round"] < 2  # before the last of three
    return by_kind


@pytest.mark.parametrize("kind", KINDS)
def test_the_confusion_matrix_has_the_headlines_accuracy_to_the_last_image(kind, runs):
    run = runs[kind]
    counts = run.confusion()
    accuracy = counts.trace() / counts.sum()
    assert accuracy == pytest.approx(run.record["summary"]["selected"], abs=1e-12)
    last = run.confusion(round="last")
    assert last.trace() / last.sum() == pytest.approx(run.record["summary"]["last"], abs=1e-12)


def test_the_confusion_matrix_counts_true_classes_by_predicted_ones(runs):
    run = runs["global"]
    images, labels = run.data("test")
    predicted = run.predict(images)
    expected = np.zeros((10, 10), dtype=int)
    for label, prediction in zip(labels.tolist(), predicted.tolist(), strict=True):
        expected[label, prediction] += 1
    assert run.confusion().tolist() == expected.tolist()
    assert torch.equal(predicted, run.model()(images).argmax(1))


def test_predictions_are_those_of_the_nearest_prototype_where_the_headline_is(runs):
    run = runs["prototypes"]
    images, _ = run.data("test")
    nearest = run.model(0, prototypes=True)(images).argmax(1)
    assert torch.equal(run.predict(images, client=0), nearest)


@pytest.mark.parametrize("kind", ["global", "personal, common images", "prototypes"])
def test_quality_keeps_the_predictions_of_the_headlines_models(kind, runs, tmp_path):
    finished = runs[kind]
    run = replace(finished, path=shutil.copytree(finished.path, tmp_path / "run"))
    client = None if kind == "global" else 0
    add_quality(run.path, client=client)
    images, _ = run.data("test")
    kept = MODEL_FEATURES.read(run.path, read_record(run.path))["predicted"]
    assert kept.tolist() == run.predict(images, client=client).tolist()


def test_predictions_and_counts_are_by_prototypes_whatever_accuracies_the_record_has_beside(runs):
    run = runs["prototypes"]
    rounds = []
    for entry in run.record["rounds"]:
        assert "classifier_accuracy" in entry
        rounds.append({name: value for name, value in entry.items() if name != "classifier_accuracy"})
    old = replace(run, record={**run.record, "rounds": rounds})
    images, _ = run.data("test")
    assert torch.equal(old.predict(images, client=0), run.predict(images, client=0))
    assert old.confusion().tolist() == run.confusion().tolist()


def test_a_clients_own_counts_add_up_to_all(runs):
    run = runs["personal"]
    counts_of_clients = [run.confusion(client=client) for client in range(4)]
    assert sum(counts_of_clients).tolist() == run.confusion().tolist()
    for client, counts in enumerate(counts_of_clients):
        images, labels = run.data("test", client=client)
        assert len(labels) == counts.sum()
        assert (run.predict(images, client=client) == labels).sum() == counts.trace()


def test_data_are_as_models_take_them_and_each_clients_are_its_own(runs):
    run = runs["global"]
    images, labels = run.data("train")
    assert images.dtype == torch.float32
    assert images.shape[1:] == tuple(run.record["model"]["input"])
    assert 0 <= images.min() < images.max() == 1

    sizes = [len(run.data("train", client=client).labels) for client in range(4)]
    held_out = [len(run.data("validation", client=client).labels) for client in range(4)]
    assert np.add(sizes, held_out).tolist() == run.record["partition"]["sizes"]
    assert len(labels) == sum(sizes)


def test_accuracy_precision_and_f1_by_class_are_those_by_hand():
    table = per_class(np.array([[3, 1, 0], [2, 2, 0], [0, 0, 0]]), ["a", "b", "c"])
    assert table.loc["a"].tolist() == pytest.approx([4, 75, 60, 200 / 3])
    assert table.loc["b"].tolist() == pytest.approx([4, 50, 200 / 3, 100 * 4 / 7])
    assert table.loc["c", "images"] == 0
    assert table.loc["c", ["accuracy", "precision", "f1"]].isna().all()


def test_accuracies_by_class_have_the_names_of_the_data(runs):
    table = runs["global"].per_class()
    assert table.index.tolist() == runs["global"].record["class_names"]
    weighted = (table["images"] * table["accuracy"]).sum() / table["images"].sum()
    assert weighted == pytest.approx(100 * runs["global"].record["summary"]["selected"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: run.data("tests"), "unknown part of the data 'tests'; did you mean 'test'"),
        (lambda run: run.data("train", client=4), "there is no client 4; the run has the clients 0 to 3"),
        (lambda run: run.data("test", client=0), "the test images belong to no client (got client 0)"),
        (lambda run: run.confusion(client=4), "there is no client 4; the run has the clients 0 to 3"),
        (lambda run: run.confusion(client=0), "'fedavg' has one model for all (got client 0)"),
        (lambda run: run.confusion(round="first"), "selected or last"),
    ],
)
def test_what_a_run_has_not_is_refused(call, message, runs):
    with raises_user_error(message):
        call(runs["global"])


def test_a_folder_of_runs_is_loaded_as_several_and_one_run_as_one(runs):
    folder = runs["global"].path.parent
    several = fedcli.load(folder)
    assert [run.path for run in several] == sorted(run.path for run in runs.values())
    assert fedcli.load(runs["global"].path).record["seed"] == 0
    assert several.frame()["selected"].tolist() == [100 * run.record["summary"]["selected"] for run in several]
    assert len(several[:2]) == 2  # a part of them is also one of runs
    with raises_user_error("there is no run"):
        fedcli.load(folder / "nothing")


# Counts of the classes in records


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_has_the_counts_of_the_confusion_matrix(kind, runs):
    run = runs[kind]
    selected = run.record["rounds"][run.record["summary"]["selected_round"]]
    counts = selected["per_class"]
    confusion = run.confusion()
    assert counts["right"] == confusion.diagonal().tolist()
    assert counts["predicted"] == confusion.sum(0).tolist()
    assert counts["actual"] == confusion.sum(1).tolist()


def test_tables_and_curves_have_recorded_scores_of_classes(runs, tmp_path):
    run = runs["global"]
    selected_round = run.record["summary"]["selected_round"]
    history = run.history
    accuracy_of_three = run.per_class()["accuracy"]["3"]
    assert history["class_accuracy/3"][selected_round] == pytest.approx(accuracy_of_three)

    without = fedcli.run("fedprox", out=tmp_path / "without", protocol="fedfm:digits", **FOUR_CLIENTS)
    assert "macro_f1" not in without.history
    table = run_command("table", run.path, without.path, "--metric", "macro-f1,class:3").output
    assert f"| {history['macro_f1'][selected_round]:.2f} (1) | {accuracy_of_three:.2f} (1) |" in table
    assert "macro-f1 is not in the records of fedprox (seed 0): it needs runs with --per-class." in table

    (axes,) = run.plot(y="macro-f1").axes
    line = axes.lines[0]
    assert line.get_ydata().tolist() == history["macro_f1"].tolist()
    with raises_user_error("has measured its balanced accuracy", "run with per_class"):
        without.plot(y="balanced-accuracy")
    with raises_user_error("unknown curve 'macro-f2'; did you mean 'macro-f1'"):
        run.plot(y="macro-f2")


def test_options_of_curves_and_of_correlations_are_refused_for_other_figures(runs, folder):
    path = runs["global"].path
    for axis, value in [("x", "floats"), ("x", "round"), ("y", "global")]:
        assert f"--{axis} is for --kind curves" in error_of("plot", path, "--kind", "drift", f"--{axis}", value)
    error = error_of("plot", path, "--method", "./mine.py")  # which is not opened
    assert "--method ./mine.py is for --kind correlation" in error
