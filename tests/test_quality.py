"""The quality of features: clusters with known answers, the model that is measured, what is written, and figures."""

import json
import shutil

import numpy as np
import pytest
from matplotlib.colors import to_hex
from sklearn.metrics import confusion_matrix, normalized_mutual_info_score, silhouette_score

import fedcli
from fedcli.errors import UserError
from fedcli.figures import find_chart, quality
from fedcli.figures.quality import CLASS_COLOURS
from fedcli.results.frame import find_records
from fedcli.results.metrics import find_metric
from fedcli.runs.records import read_record, write_record
from fedcli.runs.run import Run, open_run
from tests.programs import invoke

TINY = {
    "dataset": "digits", "train_examples": 200, "num_clients": 4, "partition": "iid", "rounds": 2, "local_epochs": 1,
    "device": "cpu",
}  # fmt: skip


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


@pytest.mark.parametrize("labels", [[1, 1, 1], [0, 1, 2]])
def test_too_few_classes_or_images_are_refused(labels):
    with pytest.raises(UserError, match="two classes or more, with more images"):
        quality.separation(np.eye(3), np.array(labels))


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
    written = quality.add_quality(chosen.path, client=client)
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


def test_a_client_that_there_is_not_is_refused(run, personal):
    for folder, client, message in (
        (run.path, 0, "'fedavg' keeps one global model"),
        (personal.path, 4, r"'local' keeps a model for each client, 0 to 3 \(got --client 4\)"),
        (personal.path, -1, "got --client -1"),
        (personal.path, None, "'local' keeps a model for each client, 0 to 3"),
    ):
        with pytest.raises(UserError, match=message):
            quality.add_quality(folder, client)


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
    monkeypatch.setattr(quality, "embed", lambda features: features[:, :2])


def panels(figure, runs):
    """The panels of the first seeds, each with its method's name, what was measured, and the arrays."""
    for axes, method, name in zip(figure.axes, ("fedavg", "fedprox"), ("FedAvg", "FedProx"), strict=True):
        folder = runs / f"{method}-0"
        yield axes, name, read_record(folder)["quality"], arrays(folder)


def test_the_same_features_give_the_same_points_also_when_they_are_few():
    features = np.random.default_rng(0).normal(size=(60, 6))
    assert (quality.embed(features) == quality.embed(features)).all()
    assert quality.embed(features[:5]).shape == (5, 2)  # fewer than the perplexity


@pytest.mark.parametrize("across", [1, 3])
def test_tsne_has_a_panel_a_setting_with_the_features_of_its_first_seed(across, runs, quick, monkeypatch):
    monkeypatch.setattr(quality, "ACROSS", across)
    figure = find_chart("tsne")(find_records([runs]))
    assert figure.get_suptitle().replace("\n", " ").startswith("Digits, IID, seed 0; reduced: ")
    for axes, name, measured, kept in panels(figure, runs):
        assert axes.get_title() == f"{name}\nNMI {measured['nmi']:.2f}, silhouette {measured['silhouette']:.2f}"
        (points,) = axes.collections
        shown = zip(points.get_offsets().tolist(), map(to_hex, points.get_facecolors()), strict=True)
        colours = [CLASS_COLOURS[label].lower() for label in kept["labels"]]
        assert sorted(shown) == sorted(zip(kept["features"][:, :2].astype(float).tolist(), colours, strict=True))
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [str(digit) for digit in range(10)]
    assert [line.get_color() for line in legend.get_lines()] == list(CLASS_COLOURS)


def test_confusion_has_a_panel_a_setting_with_shares_of_each_class_in_percent(runs):
    for axes, name, _, kept in panels(find_chart("confusion")(find_records([runs])), runs):
        labels, predicted = kept["labels"], kept["predicted"]
        counts = confusion_matrix(labels, predicted, labels=range(10))
        shares = counts / counts.sum(1, keepdims=True)
        (image,) = axes.images
        np.testing.assert_allclose(image.get_array(), shares)
        assert image.get_clim() == (0, 1)
        assert [text.get_text() for text in axes.texts] == [f"{share:.0%}" for share in shares.flat]
        right = f"{100 * np.mean(labels == predicted):.1f} % of {len(labels)} images right"
        assert axes.get_title() == f"{name}\n{right}"


@pytest.mark.parametrize("kind", ["tsne", "confusion"])
def test_the_command_draws_them_and_refuses_others(kind, runs, tmp_path, quick, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = fedcli.run("fedavg", out=tmp_path / "bare", **{**TINY, "rounds": 1}).path
    with pytest.raises(UserError, match="is missing or is not what its record names"):
        find_chart(kind)(find_records([folder]))
    write_record(folder, {**read_record(folder), "dataset": "letters"})
    with pytest.raises(UserError, match="of one data set"):
        find_chart(kind)(find_records([runs, folder]))
    result = invoke("plot", "--kind", kind, runs, folder, "--dataset", "digits")
    assert (result.exit_code, result.stdout) == (0, f"{kind}.png and {kind}.pdf\n")
