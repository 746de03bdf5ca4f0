"""The figures of curves: learning curves, drift, accuracies by domain and of single clients."""

from collections.abc import Iterable, Sequence
from itertools import chain, cycle
from textwrap import fill
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedcli.declarations import SELECTIONS
from fedcli.errors import UserError, unknown
from fedcli.figures import QUANTITIES, Quantity
from fedcli.figures.curves import AXES, CLIENTS, Axis, Curve, Point, find_curves, find_points
from fedcli.figures.legends import Symbols, draw_legends, name_ends, spread_names, widen_legend
from fedcli.figures.names import choose_setting_colours, describe_runs, find_sharers
from fedcli.figures.options import FigureOptions
from fedcli.figures.saving import encode_small_png
from fedcli.figures.text import count_characters, write_title
from fedcli.figures.warn import warn_of_no_room
from fedcli.results.groups import SeedGroup, group_by_leaderboard, group_runs
from fedcli.runs.schema import Record

# Each has more gaps than the one before, and hides no line that is drawn earlier.
DASHES = (
    "-", (0, (5, 1.5)), (0, (4, 1.2, 1, 1.2)), (0, (3, 2)), (0, (6, 2, 1, 2, 1, 2)), (0, (1.2, 1.2)), (0, (1.2, 3)),
)  # fmt: skip
PANEL_HEIGHT = 3.0  # inches, at least
LEGEND_LINE = 0.17  # inches of a line of text in a legend
AROUND_LEGEND = 0.6  # inches of a panel above and below the legend beside it
PANEL_SHARE = 0.625  # of the width of a figure, where the names of lines stand beside the panels
LONGEST_HEADING = 60  # characters of a line
# Of rings and crosses, which no line hides: lines are at 2, legends at 5.
MARKER_STYLE: dict[str, Any] = {"markersize": 7, "zorder": 4}


class LineChart(Figure):
    """A figure of lines.

    Attributes:
        caption: What its caption should say of its bands, rings, crosses and dotted lines.
    """

    caption: str = ""

    def _repr_png_(self) -> bytes:
        """A notebook shows a figure by this method, also without pyplot."""
        return encode_small_png(self)


class Panel(NamedTuple):
    """What a panel shows."""

    heading: str
    x_axis: Axis
    y_label: str
    curves: list[Curve]


def learning_curves(
    records: Iterable[Record], x: str = "round", y: str = "accuracy", options: FigureOptions | None = None
) -> LineChart:
    """Draws the test accuracy, or another of `QUANTITIES`, see `_draw_quantities`."""
    if y not in QUANTITIES:
        raise unknown("curve", y, QUANTITIES, f"there are {', '.join(QUANTITIES)}.")
    if x not in AXES:
        raise unknown("axis", x, AXES, f"there are {', '.join(AXES)}.")
    return _draw_quantities([QUANTITIES[y]], records, options, x)


def drift_chart(records: Iterable[Record], options: FigureOptions | None = None) -> LineChart:
    """Draws how far the clients' features and updates drift apart, see `_draw_quantities`."""
    remedy = "run with --drift-every"
    quantities = [
        Quantity(column="drift/feature_distance", label="Distance of features", remedy=remedy, is_percentage=False),
        Quantity(
            column="drift/classifier_similarity",
            label="Similarity of classifier updates",
            remedy=remedy,
            is_percentage=False,
        ),
    ]
    return _draw_quantities(quantities, records, options)


def domains_chart(records: Iterable[Record], options: FigureOptions | None = None) -> LineChart:
    """Draws the accuracy of the clients' models on their own and on other domains, see `_draw_quantities`."""
    remedy = "draw runs of a protocol with evaluation by domain"
    quantities = [
        Quantity(column="intra", label="Accuracy on own domains (%)", remedy=remedy),
        Quantity(column="inter", label="Accuracy on other domains (%)", remedy=remedy),
    ]
    return _draw_quantities(quantities, records, options)


def accuracies_chart(records: Iterable[Record], options: FigureOptions | None = None) -> LineChart:
    """Draws the accuracies of single clients after the last round, the worst first, see `_draw_quantities`."""
    remedy = "draw runs with validation or own models"
    quantity = Quantity(column="accuracy", label="Accuracy of single clients (%)", remedy=remedy, of_clients=True)
    return _draw_quantities([quantity], records, options)


def _draw_quantities(
    quantities: Sequence[Quantity], records: Iterable[Record], options: FigureOptions | None, x: str = "round"
) -> LineChart:
    """Draws quantities over rounds, floats or seconds, a line a setting and panels for each protocol and data set.

    A line is the mean of the finished runs, where there are any, and its band the sample standard deviation over seeds,
    within 0 and 100 %. A run that diverged is a thin line that ends in a cross. A ring marks the headline, see `Curve`.
    A dotted line is the paper's number. A method keeps its colour in all panels. The title counts runs without a value.

    Args:
        quantities: What the panels show.
        records: The runs.
        options: Colours, labels and place of the legend, where the user changes them.
        x: One of `AXES`, at which the rounds of a line stand.

    Raises:
        UserError: If no run has a value, or none has the floats or the undisturbed seconds.
    """
    records = list(records)
    measured = [record for record in records if _has_points(record, quantities, x)]
    if not measured:
        labels = " and ".join(quantity.label for quantity in quantities).lower()
        remedy = " or ".join(dict.fromkeys(quantity.remedy for quantity in quantities))
        raise UserError(f"no run has measured its {labels} (got {len(records)} runs); {remedy}.")
    panels = []
    for runs in group_by_leaderboard(measured).values():
        settings = group_runs(runs)
        (first, *_) = runs  # all have one protocol
        heading = f"{describe_runs(runs)} ({first['protocol']})"
        for quantity in quantities:
            x_axis = CLIENTS if quantity.of_clients else AXES[x]
            curves = find_curves(settings, quantity, x)
            panels.append(Panel(heading=heading, x_axis=x_axis, y_label=quantity.label, curves=curves))
    left_out = len(records) - len(measured)
    title = f"left out, without values: {left_out}" if left_out else ""
    return _draw_panels(panels, title, options or FigureOptions())


def _has_points(record: Record, quantities: Sequence[Quantity], x: str) -> bool:
    """Whether a run has a value of one of some quantities."""
    return any(len(find_points(record, quantity, x)) for quantity in quantities)


def _draw_panels(panels: list[Panel], title: str, options: FigureOptions) -> LineChart:
    """Draws the figure of panels; a setting looks the same in all of them."""
    curves = list(chain.from_iterable(panel.curves for panel in panels))
    settings = [curve.setting for curve in curves]
    methods = [setting.method for setting in settings]
    options = options.for_names([*methods, *[setting.title for setting in settings]])
    styles = _choose_line_styles(panels, options)
    figure = LineChart(layout="constrained")
    figure.set_size_inches(options.size or (options.width, PANEL_HEIGHT * len(panels)))
    ends_of_panels = []
    symbols: Symbols = {}
    band_words = _describe_bands(curves)
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(len(panels), 1, number)
        axes.set(xlabel=panel.x_axis.label, ylabel=panel.y_label, title=_write_heading(panel, options))
        drawn = _draw_curves(axes, panel.curves, styles, options, band_words)
        ends_of_panels.append(drawn.ends)
        symbols |= drawn.symbols
        _set_ticks(axes, panel, options)
    figure.caption = "; ".join(symbols)
    rows = draw_legends(figure, [list(ends) for ends in ends_of_panels], symbols, options.legend_place)
    if options.size is None:
        panel_height = max(PANEL_HEIGHT, AROUND_LEGEND + LEGEND_LINE * rows.beside)
        figure.set_size_inches(options.width, panel_height * len(panels) + LEGEND_LINE * rows.below)
    write_title(figure, title)
    _fit(figure, ends_of_panels, options)
    return figure


def _describe_bands(curves: Iterable[Curve]) -> str:
    """Describes the bands of some curves, which may be of different numbers of seeds, in words for one legend."""
    counts = sorted({len(curve.runs) for curve in curves if len(curve.runs) > 1})
    return f"mean ± standard deviation over {' or '.join(map(str, counts))} seeds"


def _write_heading(panel: Panel, options: FigureOptions) -> str:
    """Writes the heading of a panel in lines; of a size that the user gives, `FigureOptions.apply` divides it."""
    if options.size is not None:
        return panel.heading
    width = options.width
    if options.legend_place in ("right", "ends"):
        width *= PANEL_SHARE
    return fill(panel.heading, min(count_characters(width), LONGEST_HEADING))


def _set_ticks(axes: Axes, panel: Panel, options: FigureOptions) -> None:
    """Sets the numbers at the axis of a panel, its grid, and where it begins."""
    axes.locator_params("x", integer=True, min_n_ticks=1, steps=(1, 2, 5, 10))
    if options.draws_grid:
        axes.grid(axis="y")
    axes.margins(x=0.02)
    if panel.x_axis.counts_from_1:
        axes.set_xlim(left=0.5)


def _fit(figure: Figure, ends_of_panels: list[dict[Line2D, Point]], options: FigureOptions) -> None:
    """Gives a figure of lines its size and title, and its names the room that there is; warns where that is too small.

    Args:
        figure: The figure, with its legends unless names stand at the ends of lines.
        ends_of_panels: The point where each line of each panel ends, in the order of their names.
        options: Size, title and place of the names.
    """
    names_of_panels = []
    if options.legend_place == "ends":
        for axes, ends in zip(figure.axes, ends_of_panels, strict=True):
            names_of_panels.append(name_ends(figure, axes, ends))
    options.apply(figure)
    for axes, names in zip(figure.axes, names_of_panels, strict=False):
        spread_names(figure, axes, names)  # by the height of the panels, which the title has changed
    if options.legend_place == "inside":
        for axes in figure.axes:
            widen_legend(axes)
    if options.size is not None:
        figure.draw_without_rendering()  # the layout settles further by each drawing
        warn_of_no_room(figure)


def _choose_line_styles(panels: list[Panel], options: FigureOptions) -> dict[str, dict[str, Any]]:
    """Chooses colour and dashes of each setting by its label, as arguments of `Axes.plot`.

    Settings that share a colour of ours share the dashes; those to which the user gives one colour differ in them.
    """
    settings_of_panels = []
    for panel in panels:
        settings_of_panels.append([curve.setting for curve in panel.curves])
    colours = _choose_colours(settings_of_panels, options)
    sharer_of_setting = find_sharers(settings_of_panels)
    dashes = dict(zip(dict.fromkeys(sharer_of_setting.values()), cycle(DASHES), strict=False))
    styles = {}
    for label, sharer in sharer_of_setting.items():
        styles[label] = {"color": colours[label], "linestyle": dashes[sharer]}
    return styles


def _choose_colours(panels: list[list[SeedGroup]], options: FigureOptions) -> dict[str, str]:
    """Chooses a colour for each setting by its label: the user's by that label or by the method, else ours."""
    settings = {setting.title: setting for setting in chain.from_iterable(panels)}
    colours = choose_setting_colours(panels, taken={to_hex(colour) for colour in options.colors.values()})
    for label, setting in settings.items():
        colour_of_method = options.colors.get(setting.method, colours[label])
        colours[label] = options.colors.get(label, colour_of_method)
    return colours


class DrawnPanel(NamedTuple):
    """What is drawn in a panel.

    Attributes:
        ends: The point where the line of each curve ends, the highest first, in which order their names stand.
        symbols: What is drawn beside them.
    """

    ends: dict[Line2D, Point]
    symbols: Symbols


def _draw_curves(
    axes: Axes, curves: list[Curve], styles: dict[str, dict[str, Any]], options: FigureOptions, band_words: str
) -> DrawnPanel:
    """Draws the curves of a panel; `band_words` says in the legend what their bands are."""
    ends = {}
    symbols: Symbols = {}
    for curve in curves:
        name = curve.name(options.labels)
        drawn = _draw_curve(axes, curve, name, styles[curve.setting.title], band_words)
        ends[drawn.line] = curve.end
        symbols |= drawn.symbols
    highest_first = sorted(ends, key=lambda line: ends[line].y, reverse=True)
    return DrawnPanel(ends={line: ends[line] for line in highest_first}, symbols=symbols)


class DrawnCurve(NamedTuple):
    """The mean of a curve as a line, and what is drawn beside it."""

    line: Line2D
    symbols: Symbols


def _draw_curve(axes: Axes, curve: Curve, name: str, style: dict[str, Any], band_words: str) -> DrawnCurve:
    """Draws mean and band of a curve, the runs that diverged, and the numbers it is judged by.

    An SVG has the group identifiers, `gid`, for whoever changes it further.
    """
    line = curve.line
    colour = style["color"]
    (mean,) = axes.plot(line.x, line.y, label=name, marker="." if len(line) <= 20 else "", **style)
    symbols: Symbols = {}
    if len(curve.runs) > 1:
        symbols[band_words] = axes.fill_between(
            line.x, line.low, line.high, color=colour, label=band_words, alpha=0.15, linewidth=0.4
        )
    for points in curve.diverged:
        words = "diverged after this round"
        cross = {"marker": "X", "markeredgewidth": 0, "markevery": [len(points) - 1], "linewidth": 0.8}
        (symbols[words],) = axes.plot(
            points.x, points.y, gid="diverged", label=words, **{**style, **MARKER_STYLE, **cross}
        )
    if curve.chosen is not None:
        words = f"headline: {SELECTIONS[curve.setting.selection].words}"
        ring: dict[str, Any] = {"marker": "o", "linestyle": "", "fillstyle": "none", "clip_on": False}
        (symbols[words],) = axes.plot(
            curve.chosen.x, curve.chosen.y, gid="chosen", label=words, color=colour, **MARKER_STYLE, **ring
        )
    if curve.printed is not None:
        words = "the paper's number for the line of its colour"
        symbols[words] = axes.axhline(
            curve.printed, gid="printed", label=words, color=colour, linestyle=":", linewidth=0.8
        )
    return DrawnCurve(line=mean, symbols=symbols)
