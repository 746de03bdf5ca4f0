"""Figures by what they draw: the lines' numbers, the bands, the labels, the areas of bubbles, the files' bytes."""

import json
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import EllipseCollection, PolyCollection
from matplotlib.text import Text
from typer.testing import CliRunner

from fedcli import figures
from fedcli.cli.app import app
from fedcli.errors import UserError
from fedcli.figures import bubbles, curves, plots, speed
from fedcli.registry import protocols
from fedcli.results import comparison
from fedcli.results.tables import find_records
from tests.test_tables import record


def curve(method="one", seed=0, accuracies=(0.2, 0.4, 0.5), **keywords):
    """A record with these test accuracies; None for a round that was not evaluated."""
    run = record(method, seed, done=len(accuracies), **keywords)
    for entry, accuracy in zip(run["rounds"], accuracies, strict=True):
        entry["test_accuracy"] = accuracy
    return run


def drawn(figure):
    """The lines and the bands of the figure's first axes, the names at the ends of all lines, and then the legend."""
    axes = figure.axes[0]
    lines = [line for line in axes.lines if line.get_gid() not in ("selected", "printed")]
    bands = [item for item in axes.collections if isinstance(item, PolyCollection)]
    names = [text.get_text().replace("\n", " ").replace("\xa0", " ") for axes in figure.axes for text in axes.texts]
    legends = [text.get_text().replace("\xa0", " ") for legend in figure.legends for text in legend.get_texts()]
    return lines, bands, names + legends


def rings(figure):
    return [line.get_xydata().tolist() for line in figure.axes[0].lines if line.get_gid() == "selected"]


def circles(figure):
    """The bubbles of the grid: positions [n, 2] and squared diameters [n]."""
    grid = next(item for item in figure.axes[0].collections if isinstance(item, EllipseCollection))
    return grid.get_offsets(), grid.get_widths() ** 2


def test_a_line_of_very_many_rounds_is_thin():
    (short, long), _, _ = drawn(curves.learning_curves([curve("short"), curve("long", accuracies=(0.2, 0.4) * 200)]))
    assert short.get_linewidth() > 1 > long.get_linewidth()


def test_seeds_of_one_setting_are_one_line_with_a_band_of_the_sample_deviation():
    runs = [curve(seed=0, accuracies=(0.2, 0.4)), curve(seed=1, accuracies=(0.4, 0.4)), curve("two")]
    (one, two), (band,), labels = drawn(curves.learning_curves(runs))
    assert one.get_xdata().tolist() == [1, 2]
    assert one.get_ydata() == pytest.approx([30, 40])
    assert two.get_ydata() == pytest.approx([20, 40, 50])
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((30 - 200**0.5, 30 + 200**0.5))  # variance 200 in round 1
    assert labels == ["one", "two (n = 1)", "band: mean ± standard deviation over 2 seeds", "selected round"]


def test_rounds_that_were_not_evaluated_are_left_out():
    (line,), _, _ = drawn(curves.learning_curves([curve(accuracies=(None, 0.4, None, 0.6))]))
    assert line.get_xydata().tolist() == [[2, 40], [4, 60]]


def test_an_unfinished_run_is_left_out_of_a_group_with_finished_ones_and_said_so():
    runs = [curve(), curve(seed=1, accuracies=(0.9,), status="interrupted")]
    (line,), bands, labels = drawn(curves.learning_curves(runs))
    assert line.get_ydata() == pytest.approx([20, 40, 50])
    assert bands == []
    assert labels[0] == "one (1 unfinished not shown)"


def test_unfinished_runs_alone_are_drawn_over_the_rounds_they_share():
    runs = [curve(accuracies=(0.2, 0.4, 0.6), status="running"), curve(seed=1, accuracies=(0.4, 0.6), status="running")]
    (line,), (_,), labels = drawn(curves.learning_curves(runs))
    assert line.get_xydata().tolist() == [[1, pytest.approx(30)], [2, pytest.approx(50)]]
    assert labels == ["one (unfinished)", "band: mean ± standard deviation over 2 seeds"]


def test_curves_stand_over_the_floats_that_all_clients_have_sent():
    runs = [curve(accuracies=(0.2, 0.4, 0.5), cohort_size=3), curve("two", accuracies=(None, 0.3), cohort_size=2)]
    for entry, floats in zip(runs[0]["rounds"], (10, 10, 100), strict=True):
        entry["floats_up"] = floats  # of a client
    figure = curves.learning_curves(runs, "floats")
    one, two = (line.get_xydata().tolist() for line in drawn(figure)[0])
    assert one == [[30, pytest.approx(20)], [60, pytest.approx(40)], [360, pytest.approx(50)]]
    assert two == [[2 * 2 * 12400, pytest.approx(30)]]  # an older record, by its cost; the first round was not tested
    assert rings(figure)[0] == [[60, 40]]
    assert figure.axes[0].get_xlabel() == "Floats sent by all clients"
    unknown = curve("three") | {"cost": None}
    figure = curves.learning_curves([*runs, unknown], "floats")
    assert len(drawn(figure)[0]) == 2
    assert figure.get_suptitle().replace("\n", " ").endswith("; without floats, left out: 1")
    with pytest.raises(UserError, match="no run tells what it sent"):
        curves.learning_curves([unknown], "floats")


def test_curves_stand_over_the_seconds_of_quiet_runs_alone():
    slower = curve(seed=1)
    slower["rounds"][0]["seconds"]["train"] += 10
    loud = curve(seed=2) | {"load": [{"start": 0, "end": 9, "others": 3.0}]}
    (line,), (_,), labels = drawn(curves.learning_curves([curve(), slower, loud], "seconds"))
    assert line.get_xdata().tolist() == [66, 68, 70]  # 61 and 71, then 2 a round
    assert labels[0] == "one"
    with pytest.raises(UserError, match="no run has measured its seconds on a quiet machine"):
        curves.learning_curves([loud], "seconds")


def test_only_curves_have_another_axis(tmp_path):
    (tmp_path / "record.json").write_text(json.dumps(curve(cohort_size=2)))
    invoke = lambda *given: CliRunner().invoke(app, ["plot", str(tmp_path), "--out", str(tmp_path / "p.svg"), *given])  # noqa: E731
    assert invoke("--x", "floats").exit_code == 0
    assert "unknown axis 'float'; did you mean 'floats'" in invoke("--x", "float").output
    assert "--x is for learning curves" in invoke("--kind", "drift", "--x", "floats").output


def diverged(seed=0, accuracies=(0.6, 0.1), **keywords):
    return curve(seed=seed, accuracies=accuracies, status="failed", **keywords) | {"error": "NonFiniteLoss: the term"}


def crosses(figure):
    """Of each line that ends in a cross: its points, and which of them have the cross."""
    lines = [line for line in figure.axes[0].lines if line.get_gid() == "diverged"]
    return [(line.get_xydata().tolist(), line.get_markevery()) for line in lines]


def test_a_diverged_run_ends_in_a_cross_beside_the_mean_of_the_others():
    figure = curves.learning_curves([curve(seed=0), curve(seed=1), diverged(seed=2), curve("two")])
    assert crosses(figure) == [([[1, 60], [2, 10]], [1])]
    (mean, cross, two), bands, labels = drawn(figure)
    assert mean.get_ydata() == pytest.approx([20, 40, 50])
    assert len(bands) == 1
    assert cross.get_color() == mean.get_color() != two.get_color()
    assert cross.get_zorder() > max(mean.get_zorder(), two.get_zorder())  # no line goes over it
    assert labels == [
        "one (1 diverged)", "two (n = 1)", "band: mean ± standard deviation over 2 seeds", "selected round",
        "diverged after this round",
    ]  # fmt: skip


def test_diverged_runs_alone_are_single_lines_and_not_called_unfinished():
    figure = curves.learning_curves([diverged(), diverged(seed=1, accuracies=(0.3,)), diverged(seed=2, accuracies=())])
    assert crosses(figure) == [([[1, 60], [2, 10]], [1]), ([[1, 30]], [0])]
    lines, bands, labels = drawn(figure)
    assert [len(line.get_xdata()) for line in lines] == [0, 2, 1]  # the first is the mean, of which there is none
    assert bands == []
    assert labels == ["one (diverged)", "one (diverged)", "diverged after this round"]  # at the end of each
    (mean, *_), bands, _ = drawn(curves.learning_curves([diverged(), diverged(seed=1)]))
    assert (len(mean.get_xdata()), bands) == (0, [])


def test_diverged_runs_stand_beside_unfinished_ones_and_over_any_axis():
    lost = [diverged(), diverged(seed=1)]
    for entry in (row for run in lost for row in run["rounds"]):
        entry["floats_up"] = 7
    running = curve(seed=2, accuracies=(0.3, 0.5), status="running")
    figure = curves.learning_curves([*lost, running], "floats")
    assert crosses(figure) == 2 * [([[70, 60], [140, 10]], [1])]  # of ten clients
    assert drawn(figure)[0][0].get_ydata() == pytest.approx([30, 50])
    assert drawn(figure)[2] == ["one (unfinished, 2 diverged)", "selected round", "diverged after this round"]


def test_a_run_diverged_while_another_has_no_value_yet():
    figure = curves.learning_curves([diverged(), curve(seed=1, accuracies=(None,), status="running"), curve("two")])
    assert crosses(figure) == [([[1, 60], [2, 10]], [1])]
    assert [text.get_text() for text in figure.axes[0].texts] == ["two"]


def test_the_best_round_of_a_single_diverged_run_is_ringed():
    assert rings(curves.learning_curves([diverged()])) == [[[2, 10]]]


def test_charts_are_found_by_name_and_in_a_users_file(tmp_path):
    assert {"curves", "drift", "domains", "tsne", "clients", "confusion", "correlation"} <= set(figures.charts())
    assert all(chart.help and chart.needs in ("records", "folders", "models") for chart in figures.charts().values())
    file = tmp_path / "mine.py"
    file.write_text(
        "from matplotlib.figure import Figure\n\ndef bars(records):\n    figure = Figure()\n"
        "    figure.add_subplot().bar([r['seed'] for r in records], 1)\n    return figure\n\n"
        "def nothing(records):\n    return records[0]['no such key']\n\ndef text(records):\n    return 'x'\n"
    )
    chart = figures.find_chart(f"{file}:bars")
    assert len(chart.draw([curve(), curve(seed=1)]).axes[0].patches) == 2
    png, _ = plots.write(tmp_path / "bars.png", chart.draw, [curve()])
    assert png.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match=r"fails in line 9 \(got KeyError"):
        figures.find_chart(f"{file}:nothing").draw([curve()])
    with pytest.raises(UserError, match=r"'text' in .* is no chart \(it returned str\)"):
        figures.find_chart(f"{file}:text").draw([curve()])
    with pytest.raises(UserError, match=r"unknown chart 'curve'; did you mean 'curves'\?.*confusion"):
        figures.find_chart("curve")


@pytest.mark.parametrize("accuracies", [(), (None, None)])
def test_without_an_evaluated_round_there_is_nothing_to_draw(accuracies):
    with pytest.raises(UserError, match="no run has an evaluated round"):
        curves.learning_curves([curve(accuracies=accuracies, status="running")])
    lines, _, _ = drawn(curves.learning_curves([curve("two"), curve(accuracies=accuracies, status="running")]))
    assert len(lines) == 1


def test_the_best_round_of_single_runs_is_ringed():
    figure = curves.learning_curves([curve(), curve("two", 0), curve("two", 1)])
    assert rings(figure) == [[[2, 40]]]
    assert drawn(figure)[2][-1] == "selected round"
    (ring,) = (line for line in figure.axes[0].lines if line.get_gid() == "selected")
    assert ring.get_zorder() > max(line.get_zorder() for line in drawn(figure)[0])  # no line goes over it
    last = curve()
    last["summary"]["selection"] = "last"
    figure = curves.learning_curves([last])
    assert rings(figure) == []
    assert drawn(figure)[2] == ["one"]


def test_title_and_axes_say_what_is_shared_and_measured():
    figure = curves.learning_curves([curve(lr=0.1), curve(lr=0.2)])
    axes = figure.axes[0]
    assert figure.get_suptitle() == "one, paper:skew, digits, dirichlet:0.5; one seed"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Round", "Test accuracy (%)")
    figure = curves.learning_curves([curve(dataset="a"), curve("two", dataset="b")])
    assert [axes.get_title() for axes in figure.axes] == ["paper:skew, a", "paper:skew, b"]
    assert [axes.get_legend().get_texts()[0].get_text() for axes in figure.axes] == ["one", "two"]
    smaller = curve() | {"reduced": [{"what": "rounds", "protocol": 100, "run": 4}]}
    assert curves.learning_curves([smaller]).get_suptitle().endswith("; reduced: rounds 4 of 100; one seed")


def test_lines_differ_in_more_than_colour():
    figure = curves.learning_curves([curve(f"m{number}") for number in range(20)])
    lines = [line for axes in figure.axes for line in axes.lines if line.get_gid() is None]
    assert len({(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines}) == 20
    assert len({line.get_marker() for line in lines[: len(plots.MARKERS)]}) == len(plots.MARKERS)


@pytest.mark.parametrize(("count", "datasets"), [(3, "a"), (5, "a"), (7, "a"), (9, "a"), (5, "ab")])
def test_of_lines_that_lie_on_one_another_all_are_seen(count, datasets):
    accuracies = [0.5 + 0.2 * (number % 3) for number in range(60)]
    runs = [(f"m{number}", dataset) for number in range(count) for dataset in datasets]
    figure = curves.learning_curves([curve(name, 0, accuracies, rounds=60, dataset=dataset) for name, dataset in runs])
    lines = [(axes, line) for axes in figure.axes for line in axes.lines if line.get_gid() is None]
    assert len(lines) == len(runs)
    for _, line in lines:
        line.set_marker("none")
    figure.set_dpi(200)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    for axes, line in lines:
        (left, low), (right, high) = axes.get_window_extent().get_points().astype(int)
        inside = slice(-high, -low - 9), slice(left + 9, right - 9)  # one line is black, as the axes are
        pixels = np.asarray(canvas.buffer_rgba())[*inside, :3]
        colour = np.round(255 * np.array(matplotlib.colors.to_rgb(line.get_color())))
        assert (abs(pixels - colour).max(2) < 2).sum() > 20, line.get_label()


@pytest.mark.parametrize(("count", "panels"), [(7, [7]), (8, [4, 4]), (9, [3, 3, 3])])
def test_more_than_seven_lines_are_drawn_in_several_panels(count, panels):
    figure = curves.learning_curves([curve(f"m{number}") for number in range(count)])
    assert [sum(line.get_gid() is None for line in axes.lines) for axes in figure.axes if axes.axison] == panels
    assert drawn(figure)[2][:count] == [f"m{number}" for number in range(count)]


def test_names_at_the_ends_of_lines_do_not_overlap_and_are_inside():
    heights = np.array([4, 8, 4, 4, 4, 6])
    levels = curves.apart([50, 50.1, 20, 99, 50, 1], heights, 0, 100)
    order = np.argsort(levels)
    edges = np.array(levels) + np.array([[-1], [1]]) * heights / 2
    assert levels[2] == 20  # nothing is near
    assert (edges[0, order[1:]] - edges[1, order[:-1]] > -0.01).all()
    assert edges.min() >= 0
    assert edges.max() <= 100
    assert abs(np.mean([levels[place] for place in (0, 1, 4)]) - 50) < 1


def test_a_line_is_named_at_its_end_in_its_colour():
    figure = curves.learning_curves([curve("one"), curve("two", accuracies=(0.3, 0.1))])
    one, two = figure.axes[0].texts
    for text, line, end in ((one, drawn(figure)[0][0], (3, 50)), (two, drawn(figure)[0][1], (2, 10))):
        assert text.get_color() == line.get_color()
        assert text.xy == pytest.approx(end)
        assert text.xyann == (1, pytest.approx(end[1]))  # to the right of the axes
        assert text.arrow_patch.get_edgecolor() == matplotlib.colors.to_rgba(line.get_color())
        assert text.get_zorder() < line.get_zorder()  # that from the end of two lies below the line of one


def test_the_numbers_of_rounds_stand_apart_in_narrow_panels():
    figure = curves.learning_curves([curve(f"method-{number}", 0, [0.5] * 200, rounds=200) for number in range(9)])
    figure.draw_without_rendering()
    assert len(figure.axes) == 3
    for axes in figure.axes:
        (low, high), labels = axes.get_xlim(), axes.get_xticklabels()
        shown = [one.get_window_extent() for one in labels if low <= one.get_position()[0] <= high]
        assert len(shown) >= 3
        assert all(left.x1 + 5 < right.x0 for left, right in pairwise(shown))


@pytest.mark.parametrize(
    ("rounds", "numbers"),
    [
        (1, [1]), (3, [1, 2, 3]), (11, [1, 3, 5, 7, 9, 11]), (20, [1, 5, 10, 15, 20]),
        (100, [1, 20, 40, 60, 80, 100]), (200, [1, 50, 100, 150, 200]),
    ],
)  # fmt: skip
def test_rounds_are_numbered_from_the_first_one_which_is_1(rounds, numbers):
    axes = curves.learning_curves([curve(accuracies=[0.5] * rounds)]).axes[0]
    low, high = axes.get_xlim()
    assert [number for number in axes.get_xticks() if low <= number <= high] == numbers


def test_the_first_round_is_on_the_axis_also_where_no_curve_begins_there():
    figures = [curves.learning_curves([curve(accuracies=[None] * 9 + [0.5] * 91)])]
    late = curve(accuracies=[0.5] * 100)
    for entry in late["rounds"][9::10]:
        entry["drift"] = {"feature_distance": 1.0, "classifier_similarity": 0.5}
    figures.append(curves.drift_figure([late]))
    for axes in (axes for figure in figures for axes in figure.axes):
        assert axes.get_xticks()[0] == 1 >= axes.get_xlim()[0]
    sent = curves.learning_curves([curve(accuracies=[0.5] * 100)], "floats").axes[0]
    assert sent.get_xticks()[0] <= 0  # which are none before the first round


def names_apart(figure):
    """The names of the lines of each axes, after a check that these are inside the figure and do not overlap."""
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = sorted((Text.get_window_extent(text) for text in axes.texts), key=lambda box: box.y0)
        assert all(low.y1 <= high.y0 for low, high in pairwise(boxes))
        assert all(axes.bbox.x1 < box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
        assert all(box.y0 >= 0 and box.y1 <= figure.bbox.y1 for box in boxes)
    return [[text.get_text() for text in axes.texts] for axes in figure.axes]


def with_options(count, *names):
    """That many runs, the first of them without these options; they are named by all that the others have."""
    return [curve("one"), *(curve("two", **dict.fromkeys(names, number)) for number in range(1, count))]


@pytest.mark.parametrize(("count", "panels"), [(3, [3]), (6, [6]), (7, [7]), (11, [4, 4, 3])])
def test_names_of_several_lines_stand_at_the_ends_in_a_panel_that_is_high_enough(count, panels):
    with matplotlib.rc_context(plots.STYLE):
        runs = with_options(count, "distillation_factor", "similarity_weight", "correlation_weight")
        figure = curves.learning_curves(runs)
        names = names_apart(figure)
    assert [len(own) for own in names] == panels
    two = "two,\ndistillation factor 1,\nsimilarity weight 1,\ncorrelation weight 1"  # no line ends within a setting
    assert names[0][1].replace("\xa0", " ") == two
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["selected round"]


def test_names_of_long_words_or_many_lines_stand_in_a_legend():
    figure = curves.learning_curves([curve("a" * curves.DIRECT), curve("b" * (curves.DIRECT + 1))])
    assert len(figure.axes[0].texts) == 0
    assert [text.get_text()[0] for text in figure.legends[0].get_texts()[:2]] == ["a", "b"]
    figure = curves.learning_curves(with_options(7, *(f"a_long_name_{number}" for number in range(12))))
    assert len(figure.axes[0].texts) == 0
    assert all("\n" not in text.get_text() for text in figure.legends[0].get_texts())


def test_the_title_tells_what_was_given_with_all_runs():
    given = {"precision": "command line", "lr": "command line", "rounds": "command line", "partition_seed": "seed"}
    title = lambda *runs: curves.learning_curves(runs).get_suptitle().replace("\n", " ")  # noqa: E731
    runs = [curve(lr=rate, precision="bf16", drop_last=True, origin=given) for rate in (0.1, 0.2)]
    assert title(*runs) == "one, paper:skew, digits, dirichlet:0.5; with precision bf16; one seed"
    assert title(runs[0]) == "one, paper:skew, digits, dirichlet:0.5; with lr 0.1, precision bf16; one seed"
    assert title(*runs, curve("two")) == "paper:skew, digits, dirichlet:0.5; one seed"
    usual = next(iter(protocols().values()))
    name, value = next((name, value) for name, value in usual.settings.items() if name not in curves.SHOWN)
    both = curve(protocol=usual.name, **{name: value, "precision": "bf16"}, origin=given | {name: "command line"})
    assert "; with precision bf16, " not in title(both)  # what the protocol says anyway is left out


def test_the_papers_numbers_beside_each_other_are_of_one_table():
    records = Path(__file__).parent.parent / "results" / "records"

    def printed(*runs):
        first = [find_records([records / one])[0] for one in runs]
        return comparison.printed_accuracies([*first, curve()])[:-1]  # one of no table stands beside them

    never, still = "fedfa-fmnist-c2-parts/no-calibration", "fedfa-fmnist-c2-momentum/lambda-1"
    assert printed(never, still) == [78.07, 81.89]  # Table 3
    assert printed("fedfa-fmnist-c2-momentum/lambda-0.1", still) == [83.83, 81.55]  # Table 6
    afterwards = [f"fedfa-fmnist-c2-phases/{one}" for one in ("fedavg", "batch", "never")]
    assert printed(*afterwards[:2]) == [74.6, 84.08]  # Table 2, which comes before Table 5
    assert printed(*afterwards) == [73.19, 84.9, 76.81]  # Table 5 has all three


def test_the_papers_number_is_a_line_where_a_run_is_of_a_cell_of_its_table():
    results = Path(__file__).parent.parent / "results" / "records" / "fedfa-fmnist-c2"
    runs = find_records([results / "fedavg", results / "fedfa"])
    printed = lambda runs: [  # noqa: E731
        (line.get_ydata()[0], line.get_color()) for line in curves.learning_curves(runs).axes[0].lines
        if line.get_gid() == "printed"
    ]  # fmt: skip
    colours = [line.get_color() for line in drawn(curves.learning_curves(runs))[0]]
    assert printed(runs) == list(zip((74.6, 84.08), colours, strict=True))
    figure = curves.learning_curves(runs)
    names = drawn(figure)[2]
    assert names[:2] == ["fedavg (paper: 74.60)", "fedfa (paper: 84.08)"]
    assert names.count("the paper's number for the line of its colour") == 1
    assert {value for value, _ in printed([*runs, curve()])} == {74.6, 84.08}  # also beside another board
    shorter = [{**run, "config": {**run["config"], "rounds": 199}} for run in runs]
    assert printed(shorter) == []
    assert drawn(curves.learning_curves(shorter))[2][:2] == ["fedavg", "fedfa"]
    for row in (row for run in runs for row in run["rounds"]):
        row |= {"intra": {"a": 0.5}, "inter": {"a": 0.4}}
    lines = [line for axes in curves.domains_figure(runs).axes for line in axes.lines]
    assert not any(line.get_gid() for line in lines)  # which are of something else
    assert drawn(curves.domains_figure(runs))[2][:2] == ["fedavg", "fedfa"]


def by_domain(method="one", seed=0, accuracies=((0.5, 0.7), None, (0.9, 0.7)), **keywords):
    """A record with these accuracies of two domains, intra; inter is a tenth. None: the round was not evaluated."""
    run = curve(method, seed, [None] * len(accuracies), protocol="paper:domains", **keywords)
    for entry, pair in zip(run["rounds"], accuracies, strict=True):
        if pair:
            entry["intra"] = dict(zip(("a", "b"), pair, strict=True))
            entry["inter"] = {name: value / 10 for name, value in entry["intra"].items()}
    return run


def test_accuracy_on_own_and_other_domains_is_the_mean_over_domains():
    runs = [by_domain(), by_domain(seed=1, accuracies=((0.1, 0.3), (1, 1), (0.2, 0.4))), by_domain("two"), curve("no")]
    figure = curves.domains_figure(runs)
    left, right = figure.axes
    assert left.lines[0].get_xydata() == pytest.approx(np.array([[1, 40], [3, 55]]))
    assert left.lines[1].get_xydata() == pytest.approx(np.array([[1, 60], [3, 80]]))
    assert right.lines[0].get_xydata() == pytest.approx(np.array([[1, 4], [3, 5.5]]))
    assert [len(axes.lines) for axes in figure.axes] == [2, 2]  # the run that was not tested by domain is left out
    assert [len(axes.collections) for axes in figure.axes] == [1, 1]
    assert [len(axes.texts) for axes in figure.axes] == [0, 2]  # the names
    assert (left.get_ylabel(), right.get_ylabel()) == ("Accuracy on own domains (%)", "Accuracy on other domains (%)")
    assert drawn(figure)[2] == ["one", "two (n = 1)", "band: mean ± standard deviation over 2 seeds"]


def test_runs_that_were_not_tested_by_domain_are_refused():
    with pytest.raises(UserError, match=r"own and other domains \(got paper:domains, paper:skew\)"):
        curves.domains_figure([curve(), by_domain(accuracies=(None, None))])


def test_the_area_of_a_bubble_is_the_number_of_examples():
    counts = np.array([[100, 0, 25], [4, 1, 0], [0, 64, 50], [9, 9, 9]])
    positions, areas = circles(bubbles.partition_figure(counts, ["a", "b", "c"], "title"))
    assert len(areas) == np.count_nonzero(counts)
    shown = np.zeros(counts.shape)
    for (client, label), area in zip(positions.astype(int), areas, strict=True):
        shown[client, label] = area
    assert shown / shown.max() * 100 == pytest.approx(counts)


def tick_labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def test_the_longer_side_runs_across():
    names = [f"class {number}" for number in range(4)]
    tall = bubbles.partition_figure(np.eye(9, 4), names, "").axes[0]
    assert (tall.get_xlabel(), tall.get_ylabel()) == ("Client", "Class")
    assert tick_labels(tall.yaxis) == names
    wide = bubbles.partition_figure(np.eye(2, 4), names, "").axes[0]
    assert (wide.get_xlabel(), wide.get_ylabel()) == ("Class", "Client")
    assert tick_labels(wide.xaxis) == names
    positions, _ = circles(bubbles.partition_figure(np.array([[0, 0, 7], [0, 0, 0]]), list("abc"), ""))
    assert positions.tolist() == [[2, 0]]


def test_the_key_of_bubbles_has_round_numbers_in_the_same_scale():
    counts = np.array([[9, 60, 3], [640, 0, 1]])
    figure = bubbles.partition_figure(counts, list("abc"), "")
    grid, key = (item for item in figure.axes[0].collections if isinstance(item, EllipseCollection))
    areas = grid.get_widths() ** 2
    assert areas.tolist() == sorted(areas, reverse=True)  # the small lie on the large
    about, *numbers = figure.axes[0].texts
    assert [text.get_text() for text in (about, *numbers)] == ["Examples", "500", "100", "20"]
    assert key.get_widths() ** 2 / areas.max() * 640 == pytest.approx([500, 100, 20])
    heights = [text.get_position()[1] for text in (about, *numbers)]
    assert heights == sorted(heights, reverse=True)
    assert [centre[1] for centre in key.get_offsets()] == heights[1:]
    few = bubbles.partition_figure(np.array([[1234, 0]]), list("ab"), "").axes[0].texts
    assert [text.get_text() for text in few] == ["Examples", "1,000", "200", "50"]
    assert len(bubbles.partition_figure(np.array([[2]]), ["a"], "").axes[0].texts) == 2


@pytest.mark.parametrize("shape", [(100, 10), (10, 100), (100, 100), (3500, 10), (1, 1)])
def test_the_labels_of_large_partitions_are_thinned_to_fit(shape):
    figure = bubbles.partition_figure(np.ones(shape, int), [f"name {number}" for number in range(shape[1])], "")
    across, up = figure.axes[0].xaxis, figure.axes[0].yaxis
    prefixes = ("", "name ") if shape[0] >= shape[1] else ("name ", "")
    for axis, prefix, inches, count in zip(
        (across, up), prefixes, figure.get_size_inches(), (max(shape), min(shape)), strict=True
    ):
        assert tick_labels(axis) == [f"{prefix}{place}" for place in axis.get_ticklocs()]
        if count > 1:
            assert inches * np.diff(axis.get_ticklocs()).min() / count >= bubbles.LABEL_HEIGHT


def test_a_partition_without_examples_is_refused():
    for counts in (np.zeros((3, 2)), np.zeros((0, 2))):
        with pytest.raises(UserError, match="no example"):
            bubbles.partition_figure(counts, ["a", "b"], "")


def measured(clients, batch, seconds):
    return {
        "cohort_size": clients, "batch_size": batch, "local_epochs": 1, "method": "m", "device": "cpu",
        "precision": "float32", "seconds_per_round": seconds, "seconds_spread": [seconds - 1, seconds + 1],
        "plain_seconds_per_round": 2 * seconds, "plain_spread": [seconds, 3 * seconds],
    }  # fmt: skip


def test_the_scaling_figure_draws_each_side_over_what_is_varied():
    rows = [measured(10, 64, 8), measured(1, 64, 2), measured(20, 64, 16), measured(10, 10, 30), measured(10, 128, 5)]
    figure = speed.scaling_figure(rows)
    left, right = figure.axes
    assert [line.get_xydata().tolist() for line in left.lines] == [
        [[1, 2], [10, 8], [20, 16]], [[1, 4], [10, 16], [20, 32]]
    ]  # fmt: skip
    assert [line.get_xydata().tolist() for line in right.lines] == [
        [[10, 30], [64, 8], [128, 5]], [[10, 60], [64, 16], [128, 10]]
    ]  # fmt: skip
    heights = [band.get_paths()[0].vertices[:, 1] for band in right.collections]
    assert [(band.min(), band.max()) for band in heights] == [(4, 31), (5, 90)]
    assert (left.get_xlabel(), right.get_xlabel()) == ("Clients per round", "Batch size")
    assert (left.get_title(), right.get_title()) == ("batch size 64", "cohort size 10")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["engine", "plain loop"]
    assert figure.get_suptitle() == "m, cpu, float32, local epochs: 1"


def test_both_files_are_written_with_the_same_bytes_each_time(tmp_path):
    counts = np.array([[5, 1], [2, 3]])
    for out in ("first/dirichlet:0.5", "second.png"):
        lines = plots.write(tmp_path / f"curves-{out}", curves.learning_curves, [curve(seed=seed) for seed in (0, 1)])
        charts = plots.write(tmp_path / f"chart-{out}", bubbles.partition_figure, counts, ["a", "b"], "title")
        for png, pdf in (lines, charts):
            assert png.read_bytes().startswith(b"\x89PNG")
            assert pdf.read_bytes().startswith(b"%PDF")
    names = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.p*"))
    assert "curves-first/dirichlet:0.5.png" in names
    assert "curves-second.pdf" in names
    for kind in ("curves", "chart"):
        for suffix in (".png", ".pdf"):
            first, second = tmp_path / f"{kind}-first/dirichlet:0.5{suffix}", tmp_path / f"{kind}-second{suffix}"
            assert first.read_bytes() == second.read_bytes()


def test_the_style_stays_inside(tmp_path):
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        before = dict(matplotlib.rcParams)
        plots.write(tmp_path / "curves.svg", curves.learning_curves, [curve()])
        plots.write(tmp_path / "chart.svg", bubbles.partition_figure, np.ones((2, 2)), ["a", "b"], "")
        assert dict(matplotlib.rcParams) == before
