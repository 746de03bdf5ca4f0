"""Figures by what they draw: the lines' numbers, the bands, the names and signs, the counts, the files' bytes."""

import json
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from PIL import Image

from fedcli import figures
from fedcli.errors import UserError
from fedcli.figures import line_charts, names, partitions, saving
from fedcli.results.frame import find_records
from fedcli.results.words import data_words
from tests.programs import invoke
from tests.test_tables import record

BAND = "mean ± standard deviation over 2 seeds"
RING = "headline: round with the best validation accuracy"
CROSS = "diverged after this round"


def curve(method="one", seed=0, accuracies=(0.2, 0.4, 0.5), **keywords):
    """A record with these test accuracies; None for a round that was not evaluated."""
    run = record(method, seed, done=len(accuracies), **keywords)
    for entry, accuracy in zip(run["rounds"], accuracies, strict=True):
        entry["test_accuracy"] = accuracy
    return run


def diverged(seed=0, accuracies=(0.6, 0.1), **keywords):
    return curve(seed=seed, accuracies=accuracies, status="failed", **keywords) | {"error": "NonFiniteLoss: the term"}


def drawn(figure):
    """The lines and the bands of the figure's first axes, the names in its legend and then the signs below."""
    axes = figure.axes[0]
    lines = [line for line in axes.lines if line.get_gid() not in ("chosen", "printed")]
    bands = [item for item in axes.collections if isinstance(item, PolyCollection)]
    texts = [text for legend in (axes.get_legend(), *figure.legends) for text in legend.get_texts()]
    return lines, bands, [text.get_text().replace("\n", " ").replace("\xa0", " ") for text in texts]


def marked(figure, gid="chosen"):
    return [line.get_xydata().tolist() for line in figure.axes[0].lines if line.get_gid() == gid]


def test_seeds_of_one_setting_are_one_line_with_a_band_of_the_sample_deviation_within_0_and_100():
    runs = [curve(seed=0, accuracies=(0.2, 1)), curve(seed=1, accuracies=(0.4, 0.8)), curve("two")]
    (one, two), (band,), labels = drawn(line_charts.learning_curves(runs))
    assert one.get_xdata().tolist() == [1, 2]
    assert one.get_ydata() == pytest.approx([30, 90])
    assert two.get_ydata() == pytest.approx([20, 40, 50])
    heights = sorted(set(band.get_paths()[0].vertices[:, 1]))
    deviation = 200**0.5  # of both rounds
    assert heights == pytest.approx([30 - deviation, 30 + deviation, 90 - deviation, 100])
    assert one.get_color() != two.get_color()
    assert to_hex(band.get_edgecolor()[0]) == one.get_color().lower()
    assert band.get_facecolor()[0][3] < 0.2  # of many bands on each other each is seen
    assert labels == ["one", "two", BAND, RING]  # in the order of the last values


def test_of_runs_that_go_on_those_rounds_are_drawn_that_all_have_evaluated_and_finished_ones_go_before():
    (line,), _, _ = drawn(line_charts.learning_curves([curve(accuracies=(None, 0.4, None, 0.6))]))
    assert line.get_xydata().tolist() == [[2, 40], [4, 60]]
    runs = [curve(accuracies=(0.2, 0.4, 0.6), status="running"), curve(seed=1, accuracies=(0.4, 0.6), status="running")]
    (line,), (_,), labels = drawn(line_charts.learning_curves(runs))
    assert line.get_xydata().tolist() == [[1, pytest.approx(30)], [2, pytest.approx(50)]]
    assert labels[0] == "one (2 unfinished)"
    (line,), bands, labels = drawn(line_charts.learning_curves([*runs, curve(seed=2)]))
    assert (line.get_ydata().tolist(), bands) == (pytest.approx([20, 40, 50]), [])
    assert labels[0] == "one (2 unfinished)"


def test_curves_stand_over_the_floats_that_all_clients_have_sent():
    runs = [curve(accuracies=(0.2, 0.4, 0.5), cohort_size=3), curve("two", accuracies=(None, 0.3), cohort_size=2)]
    for entry, floats in zip(runs[0]["rounds"], (10, 10, 100), strict=True):
        entry["floats_up"] = floats  # of a client
    unknown = curve("three") | {"cost": None}
    figure = line_charts.learning_curves([*runs, unknown], "floats")
    one, two = (line.get_xydata().tolist() for line in drawn(figure)[0])
    assert one == [[30, pytest.approx(20)], [60, pytest.approx(40)], [360, pytest.approx(50)]]
    assert two == [[2 * 2 * 12400, pytest.approx(30)]]  # an older record, by its cost; the first round was not tested
    assert marked(figure)[0][0][0] == 60  # of round 2
    assert figure.get_suptitle() == "left out, without values: 1"


def test_curves_stand_over_the_seconds_of_quiet_runs_alone():
    slower = curve(seed=1)
    slower["rounds"][0]["seconds"]["train"] += 10
    loud = curve(seed=2) | {"load": [{"start": 0, "end": 9, "others": 3.0}]}
    (line,), (_,), _ = drawn(line_charts.learning_curves([curve(), slower, loud], "seconds"))
    assert line.get_xdata().tolist() == [66, 68, 70]  # 61 and 71, then 2 a round


@pytest.mark.parametrize(
    ("run", "x"),
    [
        (curve(accuracies=(), status="running"), "round"),
        (curve(accuracies=(None, None), status="running"), "round"),
        (curve() | {"cost": None}, "floats"),
        (curve() | {"load": [{"start": 0, "end": 9, "others": 3.0}]}, "seconds"),
    ],
)
def test_a_run_without_an_evaluated_round_or_its_place_is_left_out(run, x):
    with pytest.raises(UserError, match=r"no run has measured its test accuracy \(%\) \(got 1 runs\)"):
        line_charts.learning_curves([run], x)
    assert len(drawn(line_charts.learning_curves([curve("two"), run], x))[0]) == 1


def test_only_curves_have_another_axis(tmp_path):
    (tmp_path / "record.json").write_text(json.dumps(curve(cohort_size=2)))
    for given, words in (
        (["--x", "floats"], "p.svg"),
        (["--x", "float"], "unknown axis 'float'; did you mean 'floats'"),
    ):
        assert words in invoke("plot", tmp_path, "--out", tmp_path / "p.svg", *given).output


def test_a_diverged_run_ends_in_a_cross_beside_the_mean_of_the_others():
    figure = line_charts.learning_curves([curve(seed=0), curve(seed=1), diverged(seed=2), curve("two")])
    (mean, cross, two), (_,), labels = drawn(figure)
    assert (cross.get_xydata().tolist(), cross.get_markevery()) == ([[1, 60], [2, 10]], [1])
    assert mean.get_ydata() == pytest.approx([20, 40, 50])
    assert cross.get_color() == mean.get_color() != two.get_color()
    assert cross.get_zorder() > max(mean.get_zorder(), two.get_zorder())  # no line goes over it
    assert labels == ["one (1 diverged)", "two", BAND, CROSS, RING]
    figure = line_charts.learning_curves(
        [diverged(), diverged(seed=1, accuracies=(0.3,)), diverged(seed=2, accuracies=())]
    )
    assert marked(figure, "diverged") == [[[1, 60], [2, 10]], [[1, 30]]]
    assert drawn(figure)[1:] == ([], ["one (2 diverged)", CROSS])
    figure = line_charts.learning_curves([diverged(), curve(seed=2, accuracies=(0.3, 0.5), status="running")])
    assert drawn(figure)[2][0] == "one (1 diverged, 1 unfinished)"


def test_a_ring_lies_at_the_mean_headline_and_the_mean_round_chosen_by_validation():
    runs = [curve(), curve(seed=1, accuracies=(0.2, 0.7, 0.6))]
    for run, chosen, selected in zip(runs, (2, 1), (0.5, 0.7), strict=True):
        run["summary"] |= {"selected": selected, "selected_round": chosen}
    assert marked(line_charts.learning_curves(runs)) == [[[2.5, pytest.approx(60)]]]  # the line has 55 in both rounds
    for run in runs:
        run["summary"]["selection"] = "last"
    figure = line_charts.learning_curves(runs)
    assert (marked(figure), drawn(figure)[2]) == ([], ["one", BAND])


def test_the_papers_number_is_a_dotted_line_and_in_the_name():
    study = Path(__file__).parent.parent / "results" / "records" / "fedfa-fmnist-c2"
    figure = line_charts.learning_curves(find_records([study / "fedavg", study / "fedfa"]))
    assert {points[0][1] for points in marked(figure, "printed")} == {74.6, 84.08}  # Table 5
    assert drawn(figure)[2] == [
        "FedFA (paper: 84.08)", "FedAvg (paper: 74.60)", "mean ± standard deviation over 3 seeds",
        "the paper's number for the line of its colour",
    ]  # fmt: skip


def test_titles_and_names_are_words():
    figure = line_charts.learning_curves([curve("fedfm", lr=0.1), curve("fedfm", lr=0.2)])
    assert figure.axes[0].get_title() == "Digits, Dirichlet 0.5 (paper:skew)"
    assert (figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()) == ("Round", "Test accuracy (%)")
    three = [curve("fedfm"), curve("fedproto-general"), curve("fedavg") | {"label": "mine"}]
    assert drawn(line_charts.learning_curves(three))[2][:3] == ["FedFM", "FedProto, generalized", "mine"]
    smaller = curve(protocol="fedfm:digits", rounds=4)
    title = line_charts.learning_curves([smaller]).axes[0].get_title().replace("\n", " ")
    assert title == "Digits, Dirichlet 0.5; reduced: rounds 4 of 20 (fedfm:digits)"
    for flag, words in {"classes:2": "2 classes a client", "iid": "IID", "dirichlet:0.5:plain": "Dirichlet 0.5, plain",
                        "file:my/split.json": "file:my/split.json"}.items():  # fmt: skip
        assert data_words("cifar10", flag) == f"CIFAR-10, {words}"


@pytest.mark.parametrize("count", [12, 40])
def test_no_two_methods_share_a_colour_however_many_there_are(count):
    assert len(set(names.colours(map(str, range(count))).values())) == count


def test_charts_are_found_by_name_and_in_a_users_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from matplotlib.figure import Figure\n\ndef bars(records):\n    figure = Figure()\n"
        "    figure.add_subplot().bar([r['seed'] for r in records], 1)\n    return figure\n\n"
        "def nothing(records):\n    return records[0]['no such key']\n\ndef text(records):\n    return 'x'\n"
    )
    chart = figures.find_chart(f"{file}:bars")
    assert len(chart([curve(), curve(seed=1)]).axes[0].patches) == 2
    with pytest.raises(UserError, match=r"fails in line 9 \(got KeyError"):
        figures.find_chart(f"{file}:nothing")([curve()])
    with pytest.raises(UserError, match=r"'text' in .* is no chart \(it returned str\)"):
        figures.find_chart(f"{file}:text")([curve()])
    with pytest.raises(UserError, match=r"unknown chart 'curve'; did you mean 'curves'\?.*confusion"):
        figures.find_chart("curve")


def test_a_partition_is_a_matrix_of_counts_with_white_where_there_is_none():
    counts = np.array([[9, 60, 3], [640, 0, 1]])
    figure = partitions.partition_chart(counts, ["a", "b", "c"], "words")
    (image,) = figure.axes[0].images
    assert image.get_array().filled(0).tolist() == counts.T.tolist()
    assert image.get_array().mask.sum() == 1
    assert image.get_clim() == (0, 640)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["a", "b", "c"]


def test_files_have_the_same_bytes_each_time_and_the_style_stays_inside(tmp_path):
    runs, before = [curve(seed=seed) for seed in (0, 1)], dict(matplotlib.rcParams)
    first = saving.write_figure(tmp_path / "first/dirichlet:0.5.png", line_charts.learning_curves, runs)
    second = saving.write_figure(tmp_path / "second.png", line_charts.learning_curves, runs)
    assert [file.name for file in first] == ["dirichlet:0.5.png", "dirichlet:0.5.pdf"]
    assert [file.read_bytes()[:4] for file in second] == [b"\x89PNG", b"%PDF"]
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]
    assert dict(matplotlib.rcParams) == before


def test_a_page_gets_a_small_png_alone_whose_colours_are_unharmed(tmp_path):
    runs = [curve(f"m{number}", accuracies=(0.1 + number / 20,) * 4) for number in range(12)]
    (file,) = saving.write_figure(tmp_path / "one.png", line_charts.learning_curves, runs, page=True)
    picture = Image.open(file)
    assert picture.mode == "P"
    pixels = np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0).astype(int)
    for colour in names.LINE_COLOURS:
        wanted = np.round(255 * np.array(matplotlib.colors.to_rgb(colour)))
        assert abs(pixels - wanted).max(1).min() <= 6, colour
