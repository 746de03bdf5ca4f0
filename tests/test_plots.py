"""Figures by what they draw: the lines' numbers, the bands, the names and signs, the counts, the files' bytes."""

from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from PIL import Image

from fedcli import figures
from fedcli.figures import line_charts, names, partitions, saving
from fedcli.results.run_records import find_records
from fedcli.results.words import describe_data
from tests.commands import error_of, output_of
from tests.example_records import as_diverged, record_with_curve, write_unsigned_record
from tests.figure_panels import first_panel
from tests.user_errors import raises_user_error

BAND = "mean ± standard deviation over 2 seeds"
RING = "headline: round with the best validation accuracy"
CROSS = "diverged after this round"


def points_of_marks(figure, gid="chosen"):
    """Returns the points of each line in the first panel of a figure that marks something, by the name of its kind."""
    axes = figure.axes[0]
    return [line.get_xydata().tolist() for line in axes.lines if line.get_gid() == gid]


def test_seeds_of_one_setting_are_one_line_with_a_band():
    """The band is of the sample deviation, within 0 and 100."""
    records = [
        record_with_curve(seed=0, accuracies=(0.2, 1)),
        record_with_curve(seed=1, accuracies=(0.4, 0.8)),
        record_with_curve("two"),
    ]
    panel = first_panel(line_charts.learning_curves(records))
    first_line, second_line = panel.lines
    (band,) = panel.bands
    assert first_line.get_xdata().tolist() == [1, 2]
    assert first_line.get_ydata() == pytest.approx([30, 90])
    assert second_line.get_ydata() == pytest.approx([20, 40, 50])
    assert first_line.get_color() != second_line.get_color()
    assert panel.legend == ["one", "two", BAND, RING]  # in the order of the last values

    deviation = 200**0.5  # of both rounds
    (outline,) = band.get_paths()
    heights = sorted(set(outline.vertices[:, 1]))
    assert heights == pytest.approx([30 - deviation, 30 + deviation, 90 - deviation, 100])
    (edge_colour,) = band.get_edgecolor()
    assert to_hex(edge_colour) == first_line.get_color().lower()
    ((_, _, _, opacity),) = band.get_facecolor()
    assert opacity < 0.2  # of many bands on each other each is seen


def test_bands_of_other_numbers_of_seeds_are_explained_once():
    records = [record_with_curve(seed=seed) for seed in (0, 1)]
    records += [record_with_curve("two", seed=seed) for seed in (0, 1, 2)]
    panel = first_panel(line_charts.learning_curves([*records, record_with_curve("three")]))
    assert len(panel.bands) == 2
    assert [words for words in panel.legend if "deviation" in words] == ["mean ± standard deviation over 2 or 3 seeds"]


def test_curves_end_with_the_rounds_that_all_runs_have_evaluated():
    """Finished runs, where there are any, are averaged without those that still go on."""
    with_gaps = record_with_curve(accuracies=(None, 0.4, None, 0.6))
    (line,) = first_panel(line_charts.learning_curves([with_gaps])).lines
    assert line.get_xydata().tolist() == [[2, 40], [4, 60]]

    running = [
        record_with_curve(accuracies=(0.2, 0.4, 0.6), status="running"),
        record_with_curve(seed=1, accuracies=(0.4, 0.6), status="running"),
    ]
    panel = first_panel(line_charts.learning_curves(running))
    (line,) = panel.lines
    assert line.get_xydata().tolist() == [[1, pytest.approx(30)], [2, pytest.approx(50)]]
    assert len(panel.bands) == 1
    assert panel.legend[0] == "one (2 unfinished)"

    panel = first_panel(line_charts.learning_curves([*running, record_with_curve(seed=2)]))
    (line,) = panel.lines
    assert line.get_ydata().tolist() == pytest.approx([20, 40, 50])
    assert panel.bands == []
    assert panel.legend[0] == "one (2 unfinished)"


def test_curves_stand_over_the_floats_that_all_clients_have_sent():
    with_floats = record_with_curve(accuracies=(0.2, 0.4, 0.5), cohort_size=3)
    for entry, floats in zip(with_floats["rounds"], (10, 10, 100), strict=True):
        entry["floats_up"] = floats  # of a client
    older = record_with_curve("two", accuracies=(None, 0.3), cohort_size=2)
    unknown = record_with_curve("three") | {"cost": None}

    figure = line_charts.learning_curves([with_floats, older, unknown], "floats")

    first_line, second_line = first_panel(figure).lines
    assert first_line.get_xdata().tolist() == [30, 60, 360]
    assert first_line.get_ydata() == pytest.approx([20, 40, 50])
    assert second_line.get_xdata().tolist() == [2 * 2 * 12400]  # by its cost; the first round was not tested
    assert second_line.get_ydata() == pytest.approx([30])
    first_mark = points_of_marks(figure)[0]
    floats_of_selected, _ = first_mark[0]
    assert floats_of_selected == 60  # of round 2
    assert figure.get_suptitle() == "left out, without values: 1"


def test_curves_stand_over_the_seconds_of_quiet_runs_alone():
    slower = record_with_curve(seed=1)
    slower["rounds"][0]["seconds"]["train"] += 10
    loud = record_with_curve(seed=2) | {"load": [{"start": 0, "end": 9, "others": 3.0}]}
    panel = first_panel(line_charts.learning_curves([record_with_curve(), slower, loud], "seconds"))
    (line,) = panel.lines
    assert line.get_xdata().tolist() == [66, 68, 70]  # 61 and 71, then 2 a round
    assert len(panel.bands) == 1


@pytest.mark.parametrize(
    ("record", "x"),
    [
        (record_with_curve(accuracies=(), status="running"), "round"),
        (record_with_curve(accuracies=(None, None), status="running"), "round"),
        (record_with_curve() | {"cost": None}, "floats"),
        (record_with_curve() | {"load": [{"start": 0, "end": 9, "others": 3.0}]}, "seconds"),
    ],
)
def test_a_run_without_an_evaluated_round_or_its_place_is_left_out(record, x):
    with raises_user_error("no run has measured its test accuracy (%) (got 1 runs)"):
        line_charts.learning_curves([record], x)
    assert len(first_panel(line_charts.learning_curves([record_with_curve("two"), record], x)).lines) == 1


def test_only_curves_have_another_axis(folder):
    write_unsigned_record(folder / "run", record_with_curve(cohort_size=2))
    command = ["plot", "run", "--out", "p.svg"]
    assert "p.svg" in output_of(*command, "--x", "floats")
    assert "unknown axis 'float'; did you mean 'floats'" in error_of(*command, "--x", "float")
    error = error_of(*command, "--kind", "accuracies", "--x", "floats")
    assert "--x is for --kind curves (got --kind accuracies)" in error


def test_a_diverged_run_ends_in_a_cross_beside_the_mean_of_the_others():
    diverged = as_diverged(record_with_curve(accuracies=(0.6, 0.1)))
    diverged_sooner = as_diverged(record_with_curve(seed=1, accuracies=(0.3,)))
    diverged_at_once = as_diverged(record_with_curve(seed=2, accuracies=()))
    finished = [record_with_curve(seed=1), record_with_curve(seed=2), record_with_curve("two")]

    panel = first_panel(line_charts.learning_curves([diverged, *finished]))
    mean, cross, two = panel.lines
    assert len(panel.bands) == 1
    assert cross.get_xydata().tolist() == [[1, 60], [2, 10]]
    assert cross.get_markevery() == [1]
    assert mean.get_ydata() == pytest.approx([20, 40, 50])
    assert cross.get_color() == mean.get_color() != two.get_color()
    assert cross.get_zorder() > max(mean.get_zorder(), two.get_zorder())  # no line goes over it
    assert panel.legend == ["one (1 diverged)", "two", BAND, CROSS, RING]

    figure = line_charts.learning_curves([diverged, diverged_sooner, diverged_at_once])
    assert points_of_marks(figure, "diverged") == [[[1, 60], [2, 10]], [[1, 30]]]
    assert first_panel(figure).bands == []
    assert first_panel(figure).legend == ["one (2 diverged)", CROSS]

    running = record_with_curve(seed=2, accuracies=(0.3, 0.5), status="running")
    panel = first_panel(line_charts.learning_curves([diverged, running]))
    assert panel.legend[0] == "one (1 diverged, 1 unfinished)"


def test_a_ring_lies_at_the_mean_headline():
    """Its place on the horizontal axis is the mean of the rounds that validation chose."""
    first = record_with_curve()
    first["summary"] |= {"selected": 0.5, "selected_round": 2}
    second = record_with_curve(seed=1, accuracies=(0.2, 0.7, 0.6))
    second["summary"] |= {"selected": 0.7, "selected_round": 1}
    figure = line_charts.learning_curves([first, second])
    assert points_of_marks(figure) == [[[2.5, pytest.approx(60)]]]  # the line has 55 in both rounds

    first["summary"]["selection"] = "last"
    second["summary"]["selection"] = "last"
    figure = line_charts.learning_curves([first, second])
    assert points_of_marks(figure) == []
    assert first_panel(figure).legend == ["one", BAND]


def test_the_papers_number_is_a_dotted_line_and_in_the_name():
    study = Path(__file__).parent.parent / "results" / "records" / "fedfa-fmnist-c2"
    figure = line_charts.learning_curves(find_records([study / "fedavg", study / "fedfa"]))
    heights = set()
    for points in points_of_marks(figure, "printed"):
        _, height = points[0]
        heights.add(height)
    assert heights == {74.6, 84.08}  # Table 5
    assert first_panel(figure).legend == [
        "FedFA (paper: 84.08)",
        "FedAvg (paper: 74.60)",
        "mean ± standard deviation over 3 seeds",
        "the paper's number for the line of its colour",
    ]


def test_titles_and_names_are_words():
    (axes,) = line_charts.learning_curves([record_with_curve("fedfm", lr=0.1), record_with_curve("fedfm", lr=0.2)]).axes
    assert axes.get_title() == "Digits, Dirichlet 0.5 (paper:skew)"
    assert axes.get_xlabel() == "Round"
    assert axes.get_ylabel() == "Test accuracy (%)"

    labelled = record_with_curve("fedavg") | {"label": "mine"}
    records = [record_with_curve("fedfm"), record_with_curve("fedproto-general"), labelled]
    assert first_panel(line_charts.learning_curves(records)).legend[:3] == ["FedFM", "FedProto, generalized", "mine"]

    (axes,) = line_charts.learning_curves([record_with_curve(protocol="fedfm:digits", rounds=4)]).axes
    title = " ".join(axes.get_title().split())
    assert title == "Digits, Dirichlet 0.5; reduced: rounds 4 of 20 (fedfm:digits)"

    assert describe_data("cifar10", "classes:2") == "CIFAR-10, 2 classes a client"
    assert describe_data("cifar10", "iid") == "CIFAR-10, IID"
    assert describe_data("cifar10", "dirichlet:0.5:plain") == "CIFAR-10, Dirichlet 0.5, plain"
    assert describe_data("cifar10", "file:my/split.json") == "CIFAR-10, file:my/split.json"


@pytest.mark.parametrize("count", [12, 40])
def test_no_two_methods_share_a_colour_however_many_there_are(count):
    assert len(set(names.choose_colours(map(str, range(count))).values())) == count


def test_charts_are_found_by_name_and_in_a_users_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from matplotlib.figure import Figure\n\ndef bars(records):\n    figure = Figure()\n"
        "    figure.add_subplot().bar([r['seed'] for r in records], 1)\n    return figure\n\n"
        "def nothing(records):\n    return records[0]['no such key']\n\ndef text(records):\n    return 'x'\n"
    )
    chart = figures.find_chart(f"{file}:bars")
    (axes,) = chart([record_with_curve(), record_with_curve(seed=1)]).axes
    assert len(axes.patches) == 2

    with raises_user_error("fails in line 9 (got KeyError"):
        figures.find_chart(f"{file}:nothing")([record_with_curve()])
    with raises_user_error(f"'text' in '{file}' is no chart (it returned str)"):
        figures.find_chart(f"{file}:text")([record_with_curve()])
    with raises_user_error("unknown chart 'curve'; did you mean 'curves'?", "confusion"):
        figures.find_chart("curve")


def test_a_partition_is_a_matrix_of_counts_with_white_where_there_is_none():
    counts = np.array([[9, 60, 3], [640, 0, 1]])
    matrix = partitions.partition_chart(counts, ["a", "b", "c"], "words").axes[0]
    (image,) = matrix.images
    assert image.get_array().filled(0).tolist() == counts.T.tolist()
    assert image.get_array().mask.sum() == 1
    assert image.get_clim() == (0, 640)
    assert [label.get_text() for label in matrix.get_yticklabels()] == ["a", "b", "c"]


def test_files_have_the_same_bytes_each_time_and_the_style_stays_inside(tmp_path):
    records = [record_with_curve(seed=0), record_with_curve(seed=1)]
    parameters = dict(matplotlib.rcParams)

    first = saving.write_figure(tmp_path / "first/dirichlet:0.5.png", line_charts.learning_curves, records)
    second = saving.write_figure(tmp_path / "second.png", line_charts.learning_curves, records)
    png, pdf = first.files
    second_png, second_pdf = second.files

    assert png.name == "dirichlet:0.5.png"
    assert pdf.name == "dirichlet:0.5.pdf"
    assert png.read_bytes().startswith(b"\x89PNG")
    assert pdf.read_bytes().startswith(b"%PDF")
    assert png.read_bytes() == second_png.read_bytes()
    assert pdf.read_bytes() == second_pdf.read_bytes()
    assert dict(matplotlib.rcParams) == parameters


def test_a_page_has_the_same_bytes_under_any_parameters(tmp_path):
    records = [record_with_curve(seed=0), record_with_curve(seed=1)]
    saving.write_page_figure(tmp_path / "plain.png", line_charts.learning_curves, records)
    others = {"text.usetex": True, "figure.facecolor": "red", "axes.linewidth": 5, "xtick.labelsize": 30}
    with matplotlib.rc_context(others):
        saving.write_page_figure(tmp_path / "page.png", line_charts.learning_curves, records)
    assert (tmp_path / "page.png").read_bytes() == (tmp_path / "plain.png").read_bytes()


def test_a_page_gets_a_small_png_alone_whose_colours_are_unharmed(tmp_path):
    records = [record_with_curve(f"m{number}", accuracies=(0.1 + number / 20,) * 4) for number in range(12)]
    saving.write_page_figure(tmp_path / "one.png", line_charts.learning_curves, records)
    (file,) = tmp_path.iterdir()
    picture = Image.open(file)
    assert picture.mode == "P"
    pixels = np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0).astype(int)
    for colour in names.LINE_COLOURS:
        wanted = np.round(255 * np.array(matplotlib.colors.to_rgb(colour)))
        assert abs(pixels - wanted).max(1).min() <= 6, colour
