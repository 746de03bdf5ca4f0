"""The figure of confusion: its percentages, its cells and numbers, and what it refuses."""

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

import fedcli
from fedcli.cli import app as cli
from fedcli.errors import UserError
from fedcli.figures import matrices as confusion
from fedcli.figures import plots, quality
from fedcli.figures.matrices import Confusion
from fedcli.figures.quality import Shown
from tests.test_quality import TINY

SHARES = np.array([[75.0, 25.0, 0.0], [0.3, 99.7, 0.0], [np.nan, np.nan, np.nan]])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two methods, one of them with two seeds, with their outputs."""
    parent = tmp_path_factory.mktemp("runs")
    for method, seed in (("fedprox", 0), ("fedavg", 1), ("fedavg", 0)):
        quality.add_quality(fedcli.run(method, out=parent / f"{method}-{seed}", **{**TINY, "seed": seed}).path)
    return parent


def test_rows_are_true_classes_in_percent():
    labels, predicted = np.array([0, 0, 0, 0, 1, 3]), np.array([0, 0, 0, 1, 1, 0])
    expected = [[75, 25, 0, 0], [0, 100, 0, 0], [np.nan] * 4, [100, 0, 0, 0]]
    np.testing.assert_array_equal(confusion.confusion(labels, predicted, 4), expected)


def test_cells_have_their_colours_and_numbers():
    figure = confusion.confusion_figure(
        [Confusion("one", SHARES), Confusion("two", SHARES.T)], ["a", "b", "c"], "digits, iid"
    )
    first, second, bar = figure.axes
    assert figure.get_suptitle() == "digits, iid"
    for axes, shares in ((first, SHARES), (second, SHARES.T)):
        (image,) = axes.images
        np.testing.assert_array_equal(image.get_array().filled(np.nan), shares)
        assert (image.norm.vmin, image.norm.vmax) == (0, 100)
    written = {(text.get_position()[1], text.get_position()[0]): text for text in first.texts}
    assert {place: text.get_text() for place, text in written.items()} == {(0, 0): "75", (0, 1): "25", (1, 1): "100"}
    assert [text.get_color() for text in written.values()] == ["white", "black", "white"]
    assert [label.get_text() for label in first.get_xticklabels()] == ["a", "b", "c"]
    assert [label.get_text() for label in first.get_yticklabels()] == ["a", "b", "c"]
    assert (first.get_ylabel(), first.get_xlabel(), bar.get_ylabel()) == ("class", "taken for", "% of the class")
    assert {axes.get_subplotspec().get_gridspec().get_geometry() for axes in (first, second)} == {(1, 2)}


def test_the_numbers_can_be_read_on_their_colours():
    """Contrast by WCAG 2, at least 4.5 to 1 as for small text."""

    def luminance(colour):
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in colour[:3]]
        return np.dot([0.2126, 0.7152, 0.0722], linear)

    figure = Figure()
    axes = figure.subplots()
    shades = matplotlib.colormaps[confusion.SHARES_MAP]
    shares = np.arange(1.0, 101.0).reshape(10, 10)
    confusion._write_numbers(axes, shares)
    for text, share in zip(axes.texts, shares.flat, strict=True):
        pair = sorted((luminance(matplotlib.colors.to_rgb(text.get_color())), luminance(shades(share / 100))))
        assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, share
    grey = [luminance(shades(share / 100)) for share in range(101)]
    assert grey == sorted(grey, reverse=True)  # the same order in grey print


def test_many_classes_have_neither_numbers_nor_names():
    names = [str(label) for label in range(11)]
    (axes, _) = confusion.confusion_figure([Confusion("one", 100 * np.eye(11))], names, "").axes
    assert (len(axes.texts), axes.get_ylabel(), list(axes.get_xticks())) == (0, "11 classes", [])


def test_the_chart_has_a_panel_a_setting_with_the_outputs_of_its_first_seed(runs, tmp_path, monkeypatch):
    figures = []

    def kept(*arguments):
        figures.append(arguments)
        return confusion_figure(*arguments)

    confusion_figure = confusion.confusion_figure
    monkeypatch.setattr(confusion, "confusion_figure", kept)
    before = dict(matplotlib.rcParams)
    files = plots.write(tmp_path / "one.png", confusion.confusion_chart, [runs])
    assert dict(matplotlib.rcParams) == before
    assert [file.name for file in files] == ["one.png", "one.pdf"]
    ((panels, names, title),) = figures
    assert len(names) == 10
    assert ", digits, iid; reduced: " in title
    assert title.endswith("; seed 0")
    for shown, method in zip(panels, ("fedavg", "fedprox"), strict=True):
        with np.load(runs / f"{method}-0" / "features.npz") as outputs:
            labels, predicted = outputs["labels"], outputs["predicted"]
        right = f"{100 * np.mean(labels == predicted):.1f} % of {len(labels)} images right"
        assert shown.title == f"{method} (reduced)\n{right}"
        np.testing.assert_array_equal(shown.shares, confusion.confusion(labels, predicted, 10))
    again = plots.write(tmp_path / "two.png", confusion.confusion_chart, [runs])
    assert [file.read_bytes() for file in again] == [file.read_bytes() for file in files]


def test_a_panel_of_a_client_says_which(runs):
    folder = runs / "fedavg-0"
    record = fedcli.runs.records.read_record(folder)
    record["quality"]["client"] = 3
    assert confusion._confusion(Shown("local", record, folder)).title.startswith("local, client\N{NO-BREAK SPACE}3\n")


def test_runs_without_outputs_or_of_two_data_sets_are_refused(runs, tmp_path):
    folder = fedcli.run("fedavg", out=tmp_path / "bare", **TINY).path
    with pytest.raises(UserError, match="have not been kept"):
        plots.write(tmp_path / "out", confusion.confusion_chart, [folder])
    other = fedcli.run("fedavg", out=tmp_path / "other", **{**TINY, "dataset": "digit-domains"}).path
    with pytest.raises(UserError, match="of one data set"):
        plots.write(tmp_path / "out", confusion.confusion_chart, [runs, other])
    assert not (tmp_path / "out.png").exists()


def test_the_command_draws_it(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, ["plot", "--kind", "confusion", str(runs / "fedavg-0")])
    assert result.exit_code == 0, result.output
    assert result.stdout == "confusion.png and confusion.pdf\n"
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")


def test_many_panels_fill_rows(monkeypatch):
    monkeypatch.setattr(confusion, "ACROSS", 2)
    panels = [confusion.Confusion(str(number), np.eye(2) * 100) for number in range(3)]
    figure = confusion.confusion_figure(panels, ["a", "b"], "title")
    shown = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_subplotspec().get_gridspec().get_geometry() for axes in shown] == [(2, 2)] * 3
    assert [axes.get_ylabel() for axes in shown] == ["class", "", "class"]
    assert [axes.axison for axes in figure.axes[:4]] == [True, True, True, False]
