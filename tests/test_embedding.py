"""The figures of what `fedcli quality` has kept: features by t-SNE and confusion, and what they refuse."""

import json

import numpy as np
import pytest
from matplotlib.colors import to_hex
from sklearn.metrics import confusion_matrix

import fedcli
from fedcli.errors import UserError
from fedcli.figures import find_chart, quality
from fedcli.figures.quality import CLASS_COLOURS
from fedcli.results.frame import find_records
from fedcli.runs.records import read_record, write_record
from tests.programs import invoke
from tests.test_quality import TINY


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


def shown(axes):
    """The points of a panel with their colours, in a fixed order."""
    (points,) = axes.collections
    return sorted(zip(points.get_offsets().tolist(), map(to_hex, points.get_facecolors()), strict=True))


def expected(features, labels):
    colours = [CLASS_COLOURS[label].lower() for label in labels]
    return sorted(zip(features[:, :2].astype(float).tolist(), colours, strict=True))


def test_the_same_features_give_the_same_points_also_when_they_are_few():
    features = np.random.default_rng(0).normal(size=(60, 6))
    assert (quality.embed(features) == quality.embed(features)).all()
    assert quality.embed(features[:5]).shape == (5, 2)  # fewer than the perplexity


def test_tsne_has_a_panel_a_setting_with_the_features_of_its_first_seed(runs, quick):
    figure = find_chart("tsne")(find_records([runs]))
    assert len(figure.axes) == 2
    assert figure.get_suptitle().replace("\n", " ").startswith("Digits, IID, seed 0; reduced: ")
    for axes, method, name in zip(figure.axes, ("fedavg", "fedprox"), ("FedAvg", "FedProx"), strict=True):
        folder = runs / f"{method}-0"
        found = json.loads((folder / "record.json").read_text())["quality"]
        numbers = f"NMI {found['nmi']:.2f}, silhouette {found['silhouette']:.2f}"
        assert axes.get_title() == f"{name}\n{numbers}"
        with np.load(folder / "features.npz") as kept:
            assert shown(axes) == expected(kept["features"], kept["labels"])
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [str(digit) for digit in range(10)]
    assert [line.get_color() for line in legend.get_lines()] == list(CLASS_COLOURS)


def test_confusion_has_a_panel_a_setting_with_shares_of_each_class_in_percent(runs):
    panels = find_chart("confusion")(find_records([runs])).axes
    assert len(panels) == 2
    for axes, method, name in zip(panels, ("fedavg", "fedprox"), ("FedAvg", "FedProx"), strict=True):
        with np.load(runs / f"{method}-0" / "features.npz") as kept:
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
    result = invoke("plot", "--kind", kind, runs / "fedavg-0")
    assert (result.exit_code, result.stdout) == (0, f"{kind}.png and {kind}.pdf\n")
    folder = fedcli.run("fedavg", out=tmp_path / "bare", **{**TINY, "rounds": 1}).path
    with pytest.raises(UserError, match="is missing or is not what its record names"):
        find_chart(kind)(find_records([folder]))
    write_record(folder, {**read_record(folder), "dataset": "letters"})
    with pytest.raises(UserError, match="of one data set"):
        find_chart(kind)(find_records([runs, folder]))
