"""What a user changes in a figure for a paper: size, text, style, colours, names and the legend."""

import json
import warnings
from itertools import pairwise

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from PIL import Image

import fedcli
from fedcli.errors import UserError
from fedcli.figures import line_charts, saving
from fedcli.figures.look import LEGENDS, Look, parse_pairs, parse_size
from tests.programs import invoke
from tests.test_plots import curve


def names_below(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_a_file_has_the_size_that_was_asked_for(tmp_path):
    saving.write_figure(tmp_path / "one.png", line_charts.learning_curves, [curve()], look=Look(size=(3.4, 2.3)))
    assert Image.open(tmp_path / "one.png").size == (3.4 * 300, 2.3 * 300)


def test_a_title_replaces_that_of_one_panel_and_stands_over_several():
    one = line_charts.learning_curves([curve()])
    saving.apply_look(Look(title="Mine"), one)
    assert (one.axes[0].get_title(), one.get_suptitle()) == ("", "Mine")
    two = line_charts.learning_curves([curve(), curve(protocol="paper:other")])
    headings = [axes.get_title() for axes in two.axes]
    saving.apply_look(Look(title="Mine"), two)
    assert ([axes.get_title() for axes in two.axes], two.get_suptitle()) == (headings, "Mine")


def test_a_colour_and_a_name_count_for_a_method_and_before_it_for_a_setting():
    runs = [curve("fedfm", lr=0.1), curve("fedfm", lr=0.2), curve("two")]
    look = Look(colors={"fedfm": "red", "fedfm, lr 0.2": "#00ff00"}, labels={"fedfm": "Ours", "two": "Theirs"})
    figure = line_charts.learning_curves(runs, look=look)
    lines = {line.get_label(): to_hex(line.get_color()) for line in figure.axes[0].lines if not line.get_gid()}
    assert lines.pop("Theirs") not in ("#ff0000", "#00ff00")
    assert lines == {"Ours": "#ff0000", "Ours, lr 0.2": "#00ff00"}


@pytest.mark.parametrize("option", ["colors", "labels"])
def test_a_name_that_the_figure_does_not_draw_is_refused(option):
    with pytest.raises(UserError, match=rf"unknown name in {option} 'twoo'; did you mean 'two'\? the figure draws one"):
        line_charts.learning_curves([curve(), curve("two")], look=Look(**{option: {"twoo": "red"}}))


def test_a_narrow_figure_has_its_names_below_in_columns_and_leaves_the_rest_to_the_caption():
    runs = [curve(f"method-{number}") for number in range(12)]
    figure = line_charts.learning_curves([*runs, curve("method-0", seed=1)], look=Look(size=(3.4, 3)))
    assert names_below(figure) == [f"method-{number}" for number in range(12)]
    assert figure.axes[0].get_legend() is None
    assert figure.get_label().startswith("mean ± standard deviation over 2 seeds; headline")
    figure.draw_without_rendering()
    lefts = {round(text.get_window_extent().x0) for text in figure.legends[0].get_texts()}
    assert len(lefts) == 2  # columns
    assert figure.axes[0].get_window_extent().height > 0.25 * figure.bbox.height


def test_one_long_name_takes_no_column_from_the_short_ones():
    runs = [curve(f"method-{number}") for number in range(12)]
    look = Look(size=(3.4, 2.3), font_size=7, title="", labels={"method-9": "FedNova with feature matching"})
    with matplotlib.rc_context(look.parameters()):
        figure = line_charts.learning_curves(runs, look=look)
        figure.draw_without_rendering()
    (legend,) = figure.legends
    assert len({round(text.get_window_extent().x0) for text in legend.get_texts()}) == 2
    panel = figure.axes[0].get_tightbbox()
    assert legend.get_window_extent().y1 <= panel.y0 + 1
    assert figure.axes[0].get_window_extent().height > 0.25 * figure.bbox.height


LONG_NAMES = ("FedNova with feature matching and anchors", "a-method-of-a-very-long-name-indeed", "Ours")


def drawn_within(look, num_methods):
    """Draws curves of methods, some with long names, and returns the figure, with whether it warns of a lack of room.

    Also holds that whatever leaves the figure, or lies on its panel, is warned of.
    """
    runs = []
    for number in range(num_methods):
        for seed in (0, 1):
            runs.append(curve(f"method-{number}", seed, accuracies=(0.2, 0.4 + number / 50, 0.5 + number / 30)))
    with matplotlib.rc_context(look.parameters()), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        figure = line_charts.learning_curves(runs, look=look)
        figure.draw_without_rendering()
    box = figure.get_tightbbox()
    boxes = [box.x0, box.y0, *(figure.get_size_inches() - box.max)]
    for axes in figure.axes:
        legend = axes.get_legend()
        if legend is not None:
            box = legend.get_window_extent()
            boxes += [box.x0, box.y0, *(figure.bbox.max - box.max)]
    for legend in figure.legends:
        boxes.append(min(axes.get_tightbbox().y0 for axes in figure.axes) - legend.get_window_extent().y1 + 1)
    if look.legend_place == "ends":
        names = [text for axes in figure.axes for text in axes.texts]
        assert max(name.get_window_extent().width for name in names) <= figure.bbox.width / 2
    assert caught or min(boxes) > -0.01
    return figure, bool(caught)


@pytest.mark.parametrize("place", LEGENDS)
def test_no_text_leaves_the_figure_unless_it_is_warned_of(place):
    """Of four short names in a column's width the default legend was cut at both sides."""
    title = "A title that is longer than a column is wide, as many are"
    for num_methods, num_long in ((2, 2), (4, 0), (5, 3), (12, 1)):
        labels = {f"method-{number}": LONG_NAMES[number] for number in range(num_long)}
        for size in ((3.4, 2.3), (7, 4)):
            has_room = size == (7, 4) or num_methods < (5 if place == "right" else 12)
            _, is_warned_of = drawn_within(Look(size=size, legend=place, labels=labels, title=title), num_methods)
            assert not (has_room and is_warned_of)
    _, is_warned_of = drawn_within(Look(size=(7, 4), font_size=11, legend=place), 4)
    assert not is_warned_of


def test_four_short_names_stand_below_in_more_than_one_column():
    figure, _ = drawn_within(Look(size=(3.4, 2.3)), 4)
    assert len({round(text.get_window_extent().x0) for text in figure.legends[0].get_texts()}) >= 2


def test_names_that_leave_no_room_for_lines_are_warned_of_once(tmp_path):
    runs = [curve(f"a-method-of-a-very-long-name-{number}") for number in range(12)]
    with pytest.warns(UserWarning, match="the names leave the figure no room for its lines; choose a larger") as caught:
        saving.write_figure(tmp_path / "one.svg", line_charts.learning_curves, runs, look=Look(size=(3.4, 1.2)))
    assert len(caught) == 1


def test_a_warning_of_a_figure_drawn_in_python_names_keywords(tmp_path):
    run = fedcli.run("fedavg", dataset="digits", train_examples=120, rounds=1, local_epochs=1, out=tmp_path / "run")
    words = "choose a larger size, a smaller font_size, shorter labels, or another legend"
    with pytest.warns(UserWarning, match=words) as caught:
        run.plot(size=(1.2, 0.8), font_size=12)
    assert len(caught) == 1


@pytest.mark.parametrize("heights", [np.full(12, 0.5), np.linspace(0.1, 0.12, 12), np.linspace(0.2, 0.9, 3)])
def test_names_at_the_ends_of_lines_keep_their_order_and_do_not_overlap(heights):
    runs = [curve(f"m{number:02}", accuracies=(0.2, height)) for number, height in enumerate(heights)]
    figure = line_charts.learning_curves(runs, look=Look(legend="ends", size=(5, 3.5)))
    figure.draw_without_rendering()
    axes = figure.axes[0]
    texts = sorted(axes.texts, key=lambda text: text.get_window_extent().y0)
    assert len(texts) == len(heights)
    boxes = [text.get_window_extent() for text in texts]
    assert all(upper.y0 >= lower.y1 - 1 for lower, upper in pairwise(boxes))
    if heights[0] != heights[-1]:
        assert [text.get_text() for text in texts] == [f"m{number:02}" for number in range(len(heights))]
    colours = {line.get_label(): line.get_color() for line in axes.lines}
    assert all(text.get_color() == colours[text.get_text()] for text in texts)


def test_the_title_is_settled_before_names_are_placed_at_the_ends_of_lines():
    figure = line_charts.learning_curves([curve()], look=Look(legend="ends", title=""))
    assert figure.axes[0].get_title() == ""


def test_no_legend_is_drawn_where_none_is_asked_for_and_one_in_the_panel_inside():
    bare = line_charts.learning_curves([curve()], look=Look(legend="none"))
    assert (bare.axes[0].get_legend(), bare.legends) == (None, [])
    inside = line_charts.learning_curves([curve()], look=Look(legend="inside"))
    assert [text.get_text() for text in inside.axes[0].get_legend().get_texts()] == ["one"]


def test_the_options_go_before_the_style_the_style_before_the_matplotlibrc_and_that_before_ours(tmp_path, monkeypatch):
    own, style = tmp_path / "matplotlibrc", tmp_path / "mine.mplstyle"
    own.write_text("font.size: 11\nlines.linewidth: 3\naxes.labelsize: 12\nbackend: agg\n")
    style.write_text("lines.linewidth: 4\naxes.labelsize: 13\n")
    assert Look().parameters()["font.size"] == 8
    monkeypatch.setattr(matplotlib, "matplotlib_fname", lambda: str(own))
    names = ("font.size", "lines.linewidth", "axes.labelsize")

    def values(**options):
        parameters = Look(**options).parameters()
        assert "backend" not in parameters
        return [parameters[name] for name in names]

    assert values() == [11, 3, 12]
    assert values(style=style) == [11, 4, 13]
    assert values(style=style, font_size=9) == [9, 4, 9]
    assert values(style="seaborn-v0_8-ticks") == [11, 3, 12]  # changes none of them
    assert Look(is_page=True).parameters()["font.size"] == 8  # a page looks the same on every machine


def test_a_style_takes_the_grid_away(tmp_path):
    def lines_of_grid(**options):
        axes = line_charts.learning_curves([curve()], look=Look(**options)).axes[0]
        return [line for line in axes.get_ygridlines() if line.get_visible()]

    style = tmp_path / "bare.mplstyle"
    style.write_text("axes.grid: False\n")
    assert lines_of_grid() != []
    assert lines_of_grid(style=style) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": (3.4, 0)}, r"from 0.5 to 40 inches a side \(got 3.4x0\)"),
        ({"size": (float("nan"), 2)}, "from 0.5 to 40 inches"),
        ({"font_size": 0.0}, r"from 1 to 100 points \(got 0\)"),
        ({"colors": {"fedavg": "blu"}}, r"the colour of 'fedavg' is none that matplotlib knows \(got 'blu'\)"),
        ({"legend": "belo"}, "unknown legend 'belo'; did you mean 'below'"),
    ],
)
def test_a_look_that_cannot_be_is_refused(options, words):
    with pytest.raises(UserError, match=words):
        Look(**options)


def test_a_style_that_is_none_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no such style \(got 'nothing'\).*ggplot"):
        Look(style="nothing").parameters()
    bad = tmp_path / "bad.mplstyle"
    bad.write_text("lines.linewidth: wide\n")
    with pytest.raises(UserError, match=r"bad.mplstyle' cannot be read"):
        Look(style=bad).parameters()


def test_options_are_read_from_text():
    assert parse_size("3.4x2.3") == (3.4, 2.3)
    with pytest.raises(UserError, match=r"--size must be WIDTHxHEIGHT in inches \(got '3.4'\)"):
        parse_size("3.4")
    assert parse_pairs("--labels", ["a=b=c", "d=e"]) == {"a": "b=c", "d": "e"}
    for text in ("a", "=b", "a="):
        with pytest.raises(UserError, match="--labels must be NAME=VALUE"):
            parse_pairs("--labels", [text])


def test_characters_that_the_font_lacks_are_named_once(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saving.write_figure(
            tmp_path / "one.png", line_charts.learning_curves, [curve()], look=Look(title="\u5b57\u5b57 \u4e2d")
        )
    (warning,) = caught
    assert "the font DejaVu Sans has no '\u5b57\u4e2d'" in str(warning.message)


def test_a_pgf_without_latex_is_refused(tmp_path, monkeypatch):
    style = tmp_path / "no.mplstyle"
    style.write_text("pgf.texsystem: pdflatex\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="got no program 'pdflatex'"):
        saving.write_figure(tmp_path / "one.pgf", line_charts.learning_curves, [curve()], look=Look(style=style))


def test_the_command_takes_the_look_and_says_what_belongs_into_the_caption(tmp_path):
    for seed in (0, 1):
        (tmp_path / f"{seed}").mkdir()
        (tmp_path / f"{seed}/record.json").write_text(json.dumps(curve("fedavg", seed)))
    out = tmp_path / "one.svg"
    look = ["--size", "3.4x2.3", "--colors", "fedavg=#123456", "--labels", "fedavg=Ours", "--title", "none"]
    result = invoke("plot", tmp_path, "--out", out, *look)
    assert result.exit_code == 0
    assert "for the caption: mean ± standard deviation over 2 seeds; headline" in result.output
    assert "#123456" in out.read_text()
    result = invoke("plot", tmp_path, "--out", out, "--kind", "confusion", "--legend", "inside")
    assert result.exit_code == 2
    assert "--legend is for figures of lines, curves, drift, domains, accuracies (got --kind confusion)" in " ".join(
        result.output.split()
    )
