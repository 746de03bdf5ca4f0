"""The figure of features: which points and colours it draws, its titles, and what it refuses."""

import json

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from typer.testing import CliRunner

import fedcli
from fedcli.cli import app as cli
from fedcli.errors import UserError
from fedcli.figures import features as embedding
from fedcli.figures import plots, quality
from fedcli.figures.features import CLASS_COLOURS, Scatter
from fedcli.figures.quality import Shown
from tests.test_quality import TINY


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two methods, one of them with two seeds, with their features."""
    parent = tmp_path_factory.mktemp("runs")
    for method, seed in (("fedprox", 0), ("fedavg", 1), ("fedavg", 0)):
        quality.add_quality(fedcli.run(method, out=parent / f"{method}-{seed}", **{**TINY, "seed": seed}).path)
    return parent


def panel(title="one", count=30, classes=3, seed=0):
    draw = np.random.default_rng(seed)
    return Scatter(title, draw.normal(size=(count, 2)), np.arange(count) % classes)


def drawn(axes):
    """The points [n, 2] of a panel and their colours, in a fixed order."""
    (points,) = axes.collections
    pairs = zip(points.get_offsets().tolist(), map(to_hex, points.get_facecolors()), strict=True)
    return sorted((tuple(place), colour) for place, colour in pairs)


def test_every_point_is_drawn_in_the_colour_of_its_class():
    panels = [panel("one"), panel("two", count=20, classes=2, seed=1)]
    figure = embedding.embedding_figure(panels, ["a", "b", "c"], "digits, iid", 2)
    assert len(figure.axes) == 2
    for axes, shown in zip(figure.axes, panels, strict=True):
        expected = sorted(
            (tuple(place), CLASS_COLOURS[label].lower())
            for place, label in zip(shown.points.tolist(), shown.labels, strict=True)
        )
        assert drawn(axes) == [(pytest.approx(place), colour) for place, colour in expected]
        assert axes.get_title() == shown.title
    entries = figure.legends[0]
    assert [text.get_text() for text in entries.get_texts()] == ["a", "b", "c"]
    assert [to_hex(line.get_color()) for line in entries.get_lines()] == [
        colour.lower() for colour in CLASS_COLOURS[:3]
    ]
    assert figure.get_suptitle() == "digits, iid"


def test_of_several_columns_a_setting_is_a_row():
    panels = [panel("a → a")._replace(row="one"), panel("a → b"), panel("two"), None]
    figure = embedding.embedding_figure(panels, ["a", "b", "c"], "", 2)
    assert {axes.get_subplotspec().get_gridspec().get_geometry() for axes in figure.axes} == {(2, 2)}
    assert [axes.get_title() for axes in figure.axes] == ["a → a", "a → b", "two", ""]
    assert [axes.get_ylabel() for axes in figure.axes] == ["one", "", "", ""]
    assert [axes.axison for axes in figure.axes] == [True, True, True, False]


def test_of_many_classes_the_first_ten_are_said_to_be_drawn():
    figure = embedding.embedding_figure([panel(classes=10)], [str(label) for label in range(100)], "cifar100", 1)
    assert figure.get_suptitle() == "cifar100; the first 10 of 100 classes"


def test_separate_clusters_stay_separate_and_the_same_features_give_the_same_points():
    draw = np.random.default_rng(0)
    centres = 50 * np.eye(3, 6)
    features, labels = np.repeat(centres, 20, 0) + draw.normal(size=(60, 6)), np.repeat(np.arange(3), 20)
    points = embedding.embed(features)
    assert points.shape == (60, 2)
    middles = np.stack([points[labels == label].mean(0) for label in range(3)])
    nearest = np.linalg.norm(points[:, None] - middles, axis=2).argmin(1)
    assert nearest.tolist() == labels.tolist()
    assert (points == embedding.embed(features)).all()
    assert embedding.embed(features[:5]).shape == (5, 2)  # fewer than the perplexity


def test_the_chart_has_a_panel_a_setting_with_the_features_of_its_first_seed(runs, tmp_path, monkeypatch):
    figures = []

    def kept(*arguments):
        figures.append(arguments)
        return embedding_figure(*arguments)

    embedding_figure = embedding.embedding_figure
    monkeypatch.setattr(embedding, "embedding_figure", kept)
    monkeypatch.setattr(embedding, "embed", lambda features: features[:, :2])
    before = dict(matplotlib.rcParams)
    files = plots.write(tmp_path / "one.png", embedding.embedding_chart, [runs])
    assert dict(matplotlib.rcParams) == before
    assert [file.name for file in files] == ["one.png", "one.pdf"]
    ((panels, names, title, columns),) = figures
    assert columns == 2
    assert len(names) == 10
    assert ", digits, iid; reduced: " in title
    assert title.endswith("; seed 0")
    for shown, method in zip(panels, ("fedavg", "fedprox"), strict=True):
        folder = runs / f"{method}-0"
        found = json.loads((folder / "record.json").read_text())["quality"]
        assert shown.title == f"{method} (reduced)\nNMI {found['nmi']:.2f}, silhouette {found['silhouette']:.2f}"
        with np.load(folder / "features.npz") as features:
            assert (shown.points == features["features"][:, :2]).all()
            assert (shown.labels == features["labels"]).all()


def test_settings_of_one_panel_fill_rows(runs, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(embedding, "ACROSS", 2)
    monkeypatch.setattr(embedding, "embedding_figure", lambda *given: figures.append(given))
    monkeypatch.setattr(embedding, "_row", lambda run: [run.label])
    settings = [Shown(str(number), {"class_names": []}, tmp_path) for number in range(5)]
    monkeypatch.setattr(embedding, "one_a_setting", lambda paths: (settings, "title"))
    embedding.embedding_chart([runs])
    assert figures == [(["0", "1", "2", "3", "4", None], [], "title", 2)]


def test_runs_without_features_or_of_two_data_sets_are_refused(runs, tmp_path):
    folder = fedcli.run("fedavg", out=tmp_path / "bare", **TINY).path
    with pytest.raises(UserError, match="have not been kept"):
        plots.write(tmp_path / "out", embedding.embedding_chart, [folder])
    other = fedcli.run("fedavg", out=tmp_path / "other", **{**TINY, "dataset": "digit-domains"}).path
    with pytest.raises(UserError, match="of one data set"):
        plots.write(tmp_path / "out", embedding.embedding_chart, [runs, other])
    assert not (tmp_path / "out.png").exists()


def test_a_clients_features_are_drawn_by_domain_its_own_first(runs, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(embedding, "embedding_figure", lambda *given: figures.append(given))
    monkeypatch.setattr(embedding, "embed", lambda features: features[:, :2])
    given = {"protocol": "fccl:digit-domains", "dataset": "digit-domains", "rounds": 1, "local_epochs": 1,
             "train_examples": 200}  # fmt: skip
    folder = fedcli.run("local", out=tmp_path / "run", **given).path
    found = quality.add_quality(folder, client=1)
    embedding.embedding_chart([folder])
    ((panels, _, _, columns),) = figures
    names = list(found["domains"])
    assert columns == 4
    assert panels[0].row == "local (reduced), client\N{NO-BREAK SPACE}1"
    with np.load(folder / "features.npz") as kept:
        for shown, domain in zip(panels, (1, 0, 2, 3), strict=True):
            own, about = kept["domains"] == domain, found["domains"][names[domain]]
            numbers = f"NMI {about['nmi']:.2f}, silhouette {about['silhouette']:.2f}"
            assert shown.title == f"{names[1]} → {names[domain]}\n{numbers}"
            assert (shown.points == kept["features"][own][:, :2]).all()
            assert (shown.labels == kept["labels"][own]).all()
    averaged = {**given, "backbone": "cnn-small"}
    other = fedcli.run("fedavg", out=tmp_path / "other", **averaged).path  # a global model has one panel
    quality.add_quality(other)
    embedding.embedding_chart([other, folder])
    assert [bool(shown) for shown in figures[1][0]] == [True, False, False, False] + [True] * 4


def test_the_command_draws_it(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, ["plot", "--kind", "tsne", str(runs / "fedavg-0")])
    assert result.exit_code == 0, result.output
    assert result.stdout == "tsne.png and tsne.pdf\n"
    assert (tmp_path / "tsne.png").read_bytes().startswith(b"\x89PNG")
