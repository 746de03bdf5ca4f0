"""What a user changes in a figure for a paper: size, text, style, colours, names and the legend."""

import os
import shutil
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

import fedcli
from fedcli.figures import line_charts
from fedcli.figures.options import LEGENDS, FigureOptions, parse_colors, parse_pairs, parse_size
from fedcli.figures.partitions import partition_chart
from fedcli.figures.saving import write_figure
from fedcli.figures.warn import NoRoom
from fedcli.results.groups import group_runs
from fedcli.returned import Runs
from tests.commands import error_of, run_command
from tests.example_records import as_diverged, record_with_curve, write_unsigned_record
from tests.user_errors import raises_user_error


def legend_below(figure):
    (legend,) = figure.legends
    return legend


def write_curves(file, records, options):
    """Writes the learning curves of some records with some options."""
    draw = partial(line_charts.learning_curves, options=options)
    write_figure(file, draw, records, options=options)


def num_columns(legend):
    """The number of columns of a drawn legend."""
    return len({round(text.get_window_extent().x0) for text in legend.get_texts()})


def test_a_file_has_the_size_that_was_asked_for(tmp_path):
    options = FigureOptions(size=(3.4, 2.3))
    write_curves(tmp_path / "one.png", [record_with_curve()], options)
    assert Image.open(tmp_path / "one.png").size == (3.4 * 300, 2.3 * 300)


def test_a_title_replaces_that_of_one_panel_and_stands_over_several():
    one_panel = line_charts.learning_curves([record_with_curve()])
    FigureOptions(title="Mine").apply(one_panel)
    assert [axes.get_title() for axes in one_panel.axes] == [""]
    assert one_panel.get_suptitle() == "Mine"

    two_panels = line_charts.learning_curves([record_with_curve(), record_with_curve(protocol="paper:other")])
    titles = [axes.get_title() for axes in two_panels.axes]
    FigureOptions(title="Mine").apply(two_panels)
    assert [axes.get_title() for axes in two_panels.axes] == titles
    assert two_panels.get_suptitle() == "Mine"


def test_a_colour_and_a_name_count_for_a_method_and_before_it_for_a_setting():
    records = [record_with_curve("fedfm", lr=0.1), record_with_curve("fedfm", lr=0.2), record_with_curve("two")]
    options = FigureOptions(
        colors={"fedfm": "red", "fedfm, lr 0.2": "#00ff00"}, labels={"fedfm": "Ours", "two": "Theirs"}
    )
    (axes,) = line_charts.learning_curves(records, options=options).axes
    colours = {line.get_label(): to_hex(line.get_color()) for line in axes.lines if not line.get_gid()}
    assert colours.pop("Theirs") not in ("#ff0000", "#00ff00")
    assert colours == {"Ours": "#ff0000", "Ours, lr 0.2": "#00ff00"}


class LineLook(NamedTuple):
    """How a line looks."""

    colour: str
    dashes: str


def looks_of_lines(options, methods):
    """Returns how the line of each method looks, by method."""
    records = [record_with_curve(method) for method in methods]
    (axes,) = line_charts.learning_curves(records, options=options).axes
    looks = {}
    for line in axes.lines:
        if not line.get_gid():
            looks[line.get_label()] = LineLook(to_hex(line.get_color()), str(line._unscaled_dash_pattern))
    return looks


@pytest.mark.parametrize("count", [2, 12, 14])
def test_no_line_gets_the_colour_that_another_was_given(count):
    methods = [f"m{number:02}" for number in range(count)]
    colours = {look.colour for look in looks_of_lines(FigureOptions(), methods).values()}
    for colour in colours:
        looks = looks_of_lines(FigureOptions(colors={"m01": colour.upper()}), methods)
        assert [method for method, look in looks.items() if look.colour == colour] == ["m01"]
        assert len(set(looks.values())) == count


def test_lines_of_one_given_colour_have_different_dashes():
    looks = looks_of_lines(FigureOptions(colors={"one": "red", "two": "red"}), ["one", "two"])
    assert {look.colour for look in looks.values()} == {"#ff0000"}
    assert len({look.dashes for look in looks.values()}) == 2


@pytest.mark.parametrize("option", ["colors", "labels"])
def test_a_name_that_the_figure_does_not_draw_is_refused(option):
    options = FigureOptions(**{option: {"twoo": "red"}})
    with raises_user_error(f"unknown name in {option} 'twoo'; did you mean 'two'? the figure draws one"):
        line_charts.learning_curves([record_with_curve(), record_with_curve("two")], options=options)


def test_a_narrow_figure_has_its_names_below_in_columns():
    """What the band and the ring mean is left to the caption."""
    records = [record_with_curve(f"method-{number}") for number in range(12)]
    records.append(record_with_curve("method-0", seed=1))
    figure = line_charts.learning_curves(records, options=FigureOptions(size=(3.4, 3)))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    legend = legend_below(figure)
    assert [text.get_text() for text in legend.get_texts()] == [f"method-{number}" for number in range(12)]
    assert num_columns(legend) == 2
    assert axes.get_legend() is None
    assert axes.get_window_extent().height > 0.25 * figure.bbox.height
    assert figure.caption.startswith("mean ± standard deviation over 2 seeds; headline")


def test_one_long_name_takes_no_column_from_the_short_ones():
    records = [record_with_curve(f"method-{number}") for number in range(12)]
    options = FigureOptions(
        size=(3.4, 2.3), font_size=7, title="", labels={"method-9": "FedNova with feature matching"}
    )
    with matplotlib.rc_context(options.parameters()):
        figure = line_charts.learning_curves(records, options=options)
        figure.draw_without_rendering()
    (axes,) = figure.axes
    legend = legend_below(figure)
    assert num_columns(legend) == 2
    assert legend.get_window_extent().y1 <= axes.get_tightbbox().y0 + 1
    assert axes.get_window_extent().height > 0.25 * figure.bbox.height


LONG_NAMES = ("FedNova with feature matching and anchors", "a-method-of-a-very-long-name-indeed", "Ours")


class DrawnFigure(NamedTuple):
    """A figure, and whether it warned of a lack of room."""

    figure: Figure
    is_warned_of: bool


def warning_of_no_room(warning):
    """Returns whether a warning is of names that leave a figure no room: ours, or matplotlib's of its layout."""
    is_ours = issubclass(warning.category, NoRoom)
    return is_ours or str(warning.message).startswith("constrained_layout not applied")


def draw_with_room(options, num_methods):
    """Draws curves of methods; asserts that whatever leaves the figure, or lies on its panel, is warned of."""
    records = []
    for number in range(num_methods):
        accuracies = (0.2, 0.4 + number / 50, 0.5 + number / 30)
        records += [record_with_curve(f"method-{number}", seed, accuracies) for seed in (0, 1)]
    with matplotlib.rc_context(options.parameters()), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        figure = line_charts.learning_curves(records, options=options)
        figure.draw_without_rendering()
    (axes,) = figure.axes

    # How far everything is within the borders of what it should not leave.
    all_content = figure.get_tightbbox()
    distances = [*all_content.min, *(figure.get_size_inches() - all_content.max)]
    legend_inside = axes.get_legend()
    if legend_inside is not None:
        box = legend_inside.get_window_extent()
        distances += [*box.min, *(figure.bbox.max - box.max)]
    for legend in figure.legends:
        distances.append(axes.get_tightbbox().y0 - legend.get_window_extent().y1 + 1)
    if options.legend_place == "ends":
        assert max(name.get_window_extent().width for name in axes.texts) <= figure.bbox.width / 2
    is_warned_of = any(warning_of_no_room(warning) for warning in caught)
    assert is_warned_of or min(distances) > -0.01
    return DrawnFigure(figure, is_warned_of)


COLUMN = (3.4, 2.3)  # sizes of figures in inches, for a column of a paper and for its whole width
PAGE = (7, 4)
LONG_TITLE = "A title that is longer than a column is wide, as many are"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_methods", "num_long_names", "places_without_room"),
    [(2, 2, ()), (4, 0, ()), (5, 3, ("right",)), (12, 1, ("right", "inside", "below"))],
)
@pytest.mark.parametrize("place", LEGENDS)
def test_no_text_leaves_a_figure_of_a_column_unless_it_is_warned_of(
    place, num_methods, num_long_names, places_without_room
):
    """Of four short names the default legend was cut at both sides."""
    labels = {f"method-{number}": LONG_NAMES[number] for number in range(num_long_names)}
    options = FigureOptions(size=COLUMN, legend=place, labels=labels, title=LONG_TITLE)
    drawn = draw_with_room(options, num_methods)
    assert drawn.is_warned_of == (place in places_without_room)


@pytest.mark.slow
@pytest.mark.parametrize("place", LEGENDS)
def test_a_figure_of_a_page_has_room_for_names_and_for_large_text(place):
    options = FigureOptions(size=PAGE, legend=place, labels={"method-0": LONG_NAMES[0]}, title=LONG_TITLE)
    of_many_methods = draw_with_room(options, 12)
    assert not of_many_methods.is_warned_of
    with_large_text = draw_with_room(FigureOptions(size=PAGE, font_size=11, legend=place), 4)
    assert not with_large_text.is_warned_of


def test_four_short_names_stand_below_in_more_than_one_column():
    drawn = draw_with_room(FigureOptions(size=COLUMN), 4)
    assert num_columns(legend_below(drawn.figure)) >= 2


def test_names_that_leave_no_room_for_lines_are_warned_of_once(tmp_path):
    records = [record_with_curve(f"a-method-of-a-very-long-name-{number}") for number in range(12)]
    with pytest.warns(UserWarning, match="the names leave the figure no room for its lines; choose a larger") as caught:
        write_curves(tmp_path / "one.svg", records, FigureOptions(size=(3.4, 1.2)))
    assert len(caught) == 1


def test_a_warning_of_a_figure_drawn_in_python_names_keywords(tmp_path):
    run = fedcli.run("fedavg", dataset="digits", train_examples=120, rounds=1, local_epochs=1, out=tmp_path / "run")
    words = "choose a larger size, a smaller font_size, shorter labels, or another legend"
    with pytest.warns(UserWarning, match=words) as caught:
        run.plot(size=(1.2, 0.8), font_size=12)
    assert len(caught) == 1


@pytest.mark.parametrize("heights", [np.full(12, 0.5), np.linspace(0.1, 0.12, 12), np.linspace(0.2, 0.9, 3)])
def test_names_at_the_ends_of_lines_keep_their_order_and_do_not_overlap(heights):
    records = [record_with_curve(f"m{number:02}", accuracies=(0.2, height)) for number, height in enumerate(heights)]
    figure = line_charts.learning_curves(records, options=FigureOptions(legend="ends", size=(5, 3.5)))
    figure.draw_without_rendering()
    (axes,) = figure.axes

    texts = sorted(axes.texts, key=lambda text: text.get_window_extent().y0)
    assert len(texts) == len(heights)
    boxes = [text.get_window_extent() for text in texts]
    assert all(upper.y0 >= lower.y1 - 1 for lower, upper in pairwise(boxes))
    if heights[0] != heights[-1]:
        assert [text.get_text() for text in texts] == [f"m{number:02}" for number in range(len(heights))]

    colours = {line.get_label(): line.get_color() for line in axes.lines}
    assert all(text.get_color() == colours[text.get_text()] for text in texts)


def test_a_setting_whose_runs_all_diverged_has_its_name_where_the_highest_ends():
    lower = as_diverged(record_with_curve(accuracies=(0.2, 0.1)))
    higher = as_diverged(record_with_curve(seed=1, accuracies=(0.3,)))
    (axes,) = line_charts.learning_curves([lower, higher], options=FigureOptions(legend="ends")).axes
    (name,) = axes.texts
    assert name.get_text() == "one (2\N{NO-BREAK SPACE}diverged)"
    assert name.xy == (1, 30)


def test_the_title_is_settled_before_names_are_placed_at_the_ends_of_lines():
    (axes,) = line_charts.learning_curves([record_with_curve()], options=FigureOptions(legend="ends", title="")).axes
    assert axes.get_title() == ""


def test_the_legend_is_drawn_where_the_option_says():
    """It is nowhere if none is asked for, and in the panel if it is to be inside."""
    without = line_charts.learning_curves([record_with_curve()], options=FigureOptions(legend="none"))
    (axes,) = without.axes
    assert axes.get_legend() is None
    assert without.legends == []

    (axes,) = line_charts.learning_curves([record_with_curve()], options=FigureOptions(legend="inside")).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["one"]


def test_options_go_before_the_style_and_the_matplotlibrc(tmp_path, monkeypatch):
    """The style goes before the matplotlibrc, and that before our own look."""
    matplotlibrc = tmp_path / "matplotlibrc"
    matplotlibrc.write_text("font.size: 11\nlines.linewidth: 3\naxes.labelsize: 12\nbackend: agg\n")
    style = tmp_path / "mine.mplstyle"
    style.write_text("lines.linewidth: 4\naxes.labelsize: 13\n")
    assert FigureOptions().parameters()["font.size"] == 8
    monkeypatch.setattr(matplotlib, "matplotlib_fname", lambda: str(matplotlibrc))
    names = ("font.size", "lines.linewidth", "axes.labelsize")

    def values(**options):
        parameters = FigureOptions(**options).parameters()
        assert "backend" not in parameters
        return [parameters[name] for name in names]

    assert values() == [11, 3, 12]
    assert values(style=style) == [11, 4, 13]
    assert values(style=style, font_size=9) == [9, 4, 9]
    assert values(style="seaborn-v0_8-ticks") == [11, 3, 12]  # changes none of them
    assert FigureOptions(is_page=True).parameters()["font.size"] == 8  # a page looks the same on every machine


def test_a_style_takes_the_grid_away(tmp_path):
    def lines_of_grid(**options):
        (axes,) = line_charts.learning_curves([record_with_curve()], options=FigureOptions(**options)).axes
        return [line for line in axes.get_ygridlines() if line.get_visible()]

    style = tmp_path / "bare.mplstyle"
    style.write_text("axes.grid: False\n")
    assert lines_of_grid() != []
    assert lines_of_grid(style=style) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": (3.4, 0)}, "from 0.5 to 40 inches a side (got 3.4x0)"),
        ({"size": (float("nan"), 2)}, "from 0.5 to 40 inches"),
        ({"font_size": 0.0}, "from 1 to 100 points (got 0)"),
        ({"colors": {"fedavg": "blu"}}, "the colour of 'fedavg' is none that matplotlib knows (got 'blu')"),
        ({"legend": "belo"}, "unknown legend 'belo'; did you mean 'below'"),
    ],
)
def test_a_look_that_cannot_be_is_refused(options, words):
    with raises_user_error(words):
        FigureOptions(**options)


def test_a_style_that_is_none_is_refused(tmp_path):
    with raises_user_error("no such style (got 'nothing')", "ggplot"):
        FigureOptions(style="nothing").parameters()
    bad = tmp_path / "bad.mplstyle"
    bad.write_text("lines.linewidth: wide\n")
    with raises_user_error("bad.mplstyle' cannot be read"):
        FigureOptions(style=bad).parameters()


def test_options_are_read_from_text():
    assert parse_size("3.4x2.3") == (3.4, 2.3)
    with raises_user_error("--size must be WIDTHxHEIGHT in inches (got '3.4')"):
        parse_size("3.4")
    assert parse_pairs("--labels", ["a=b=c", "d=e"]) == {"a": "b=c", "d": "e"}
    assert parse_colors(["a=b=c", "d=e"]) == {"a=b": "c", "d": "e"}
    for text in ("a", "=b", "a="):
        with raises_user_error("--colors must be NAME=VALUE"):
            parse_colors([text])
        with raises_user_error("--labels must be NAME=VALUE"):
            parse_pairs("--labels", [text])


def test_the_name_of_a_setting_may_hold_an_equals_sign():
    records = [record_with_curve(partition=partition) for partition in ("dirichlet:0.5:min=5", "iid")]
    title = group_runs(records)[0].title
    assert "=" in title
    options = FigureOptions(colors=parse_colors([f"{title}=red"]), labels=parse_pairs("--labels", [f"{title}=a=b"]))
    (axes,) = line_charts.learning_curves(records, options=options).axes
    (line,) = [line for line in axes.lines if line.get_label() == "a=b"]
    assert to_hex(line.get_color()) == "#ff0000"


def test_characters_that_the_font_lacks_are_named_once(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = FigureOptions(title="\u5b57\u5b57 \u4e2d")
        write_curves(tmp_path / "one.png", [record_with_curve()], options)
    (warning,) = caught
    assert "the font DejaVu Sans has no '\u5b57\u4e2d'" in str(warning.message)


def test_a_pgf_without_latex_is_refused(tmp_path, monkeypatch):
    style = tmp_path / "no.mplstyle"
    style.write_text("pgf.texsystem: pdflatex\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    with raises_user_error("got no program 'pdflatex'"):
        write_curves(tmp_path / "one.pgf", [record_with_curve()], FigureOptions(style=style))


def test_the_command_takes_the_look_and_says_what_belongs_into_the_caption(folder):
    for seed in (0, 1):
        write_unsigned_record(folder / "runs" / f"seed-{seed}", record_with_curve("fedavg", seed))

    options = ["--size", "3.4x2.3", "--colors", "fedavg=#123456", "--labels", "fedavg=Ours", "--title", "none"]
    result = run_command("plot", "runs", "--out", "one.svg", *options)
    assert "for the caption: mean ± standard deviation over 2 seeds; headline" in result.output
    assert "#123456" in Path("one.svg").read_text()

    error = error_of("plot", "runs", "--out", "one.svg", "--kind", "confusion", "--legend", "inside")
    assert "--legend is for figures of lines, curves, drift, domains, accuracies (got --kind confusion)" in error


@pytest.mark.parametrize(
    ("look", "words"),
    [
        ({"size": "3.4x2.3"}, "size must be a width and a height in inches (got '3.4x2.3')"),
        ({"size": 3}, "size must be a width and a height in inches (got 3)"),
        ({"font_size": "7"}, "font_size must be a number of points (got '7')"),
        ({"colors": "red"}, "colors must be a dict (got 'red')"),
        ({"labels": ["red"]}, "labels must be a dict (got ['red'])"),
        ({"labels": {"fedavg": 1}}, "labels must have texts (got 1 for 'fedavg')"),
        ({"colors": {1: "red"}}, "colors must name methods or settings (got 1)"),
        ({"legend": False}, "legend must be a text (got False)"),
        ({"title": 1}, "title must be a text (got 1)"),
        ({"style": 1}, "style must be a file or a name (got 1)"),
    ],
)
def test_an_option_of_another_type_is_refused_in_a_line(look, words):
    with raises_user_error(words):
        Runs().plot(**look)


def test_latex_sets_no_text_but_of_a_pgf(tmp_path):
    style = tmp_path / "mine.mplstyle"
    style.write_text("text.usetex: True\n")
    with raises_user_error("text.usetex cannot be on ", " into a style file"):
        Runs().plot(style=style)
    with matplotlib.rc_context({"text.usetex": True}):
        write_curves(tmp_path / "one.png", [record_with_curve()], FigureOptions())


def test_a_pgf_is_put_in_place_after_what_it_includes(tmp_path, monkeypatch):
    placed = []
    replace_file = Path.replace

    def replace_and_list(file, target):
        placed.append(file.name)
        return replace_file(file, target)

    class FigureOfPixels:
        def savefig(self, file):
            for name in ("p-img0.png", "p-img1.png", "p.pgf"):
                file.with_name(name).touch()

    monkeypatch.setattr(Path, "replace", replace_and_list)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "xelatex").touch(mode=0o755)  # it is looked for, and not run
    write_figure(tmp_path / "p.pgf", FigureOfPixels)
    assert placed[-1] == "p.pgf"
    assert sorted(placed) == ["p-img0.png", "p-img1.png", "p.pgf"]


@pytest.mark.skipif(shutil.which("xelatex") is None, reason="needs LaTeX")
def test_a_pgf_with_pixels_names_the_pictures_beside_it(tmp_path):
    def write():
        chart = partial(partition_chart, np.array([[1, 2], [3, 4]]), ["a", "b"], "title")
        write_figure(tmp_path / "p.pgf", chart)
        return {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    files = write()
    assert sorted(files) == ["p-img0.png", "p-img1.png", "p.pgf"]
    assert b"p-img0.png" in files["p.pgf"]
    assert write() == files
