"""The words and files of all figures; partitions as matrices, and curves of runs.

`write` draws a figure in a `Look` and saves it; the same input gives the same bytes. Figures are made without pyplot,
which keeps global state and wants a window system.
"""

import io
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Annotation, Text
from PIL import Image

from fedcli.declarations import SELECTIONS
from fedcli.errors import UserError, printable, unknown
from fedcli.figures import CURVES
from fedcli.figures.look import Look
from fedcli.files import write_atomically
from fedcli.results.frame import clients_of, rounds_of
from fedcli.results.paper_tables import printed_accuracies
from fedcli.results.tables import SeedGroup, agreed, boards, group
from fedcli.results.words import data_words, method_name
from fedcli.runs.identity import code_changes, reductions
from fedcli.runs.machine import quiet
from fedcli.runs.record import state_of

# Okabe and Ito's colours, which colour-blind readers tell apart, and five more; their yellow is too pale on white.
LINE_COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000",
    "#882255", "#999933", "#888888", "#6A3D9A", "#8B4513",
)  # fmt: skip
# Each has more gaps than the one before, and hides no line that is drawn earlier.
DASHES = (
    "-", (0, (5, 1.5)), (0, (4, 1.2, 1, 1.2)), (0, (3, 2)), (0, (6, 2, 1, 2, 1, 2)), (0, (1.2, 1.2)), (0, (1.2, 3)),
)  # fmt: skip
# What keeps the date out of each kind of file.
UNDATED: dict[str, dict[str, Any]] = {
    ".png": {"metadata": {}},
    ".pdf": {"metadata": {"CreationDate": None}},
    ".svg": {"metadata": {"Date": None}},
    ".pgf": {},
}
NAMED = 26  # classes of a partition; the names of more would overlap
LEGEND_LINE = 0.17  # inches of a line of text in a legend
MARGIN = 0.04  # inches between a text and the side of the figure
LEAST_SHARE = 0.15  # of a side of the figure that a panel must have
BESIDE_END = 7  # points from the end of a line to its name, beside the ring that may be there
SIGN: dict[str, Any] = {
    "markersize": 7,
    "zorder": 4,
}  # of rings and crosses, which no line hides; lines are at 2, legends at 5
ACCURACY, OF_CLIENTS = "test_accuracy", "accuracy of the clients"
NO_ROOM = (
    "the names leave the figure no room for its lines; choose a larger --size, a smaller --font-size, shorter "
    "--labels, or another --legend."
)
NO_LABELS: Mapping[str, str] = {}
AXES = {"round": "Round", "floats": "Floats sent by all clients", "seconds": "Seconds"}  # of learning curves


def colours(names: Iterable[str]) -> dict[str, str]:
    """A different colour for each name."""
    names = list(dict.fromkeys(names))
    shades = map(to_hex, matplotlib.colormaps["turbo"](np.linspace(0.02, 0.98, len(names))))
    return dict(zip(names, LINE_COLOURS if len(names) <= len(LINE_COLOURS) else shades, strict=False))


def setting_colours(boards: Sequence[Sequence[SeedGroup]]) -> dict[str, str]:
    """A colour for each setting, by its label; one a method where no board has several settings of a method."""
    members = [member for board in boards for member in board]
    num_methods = [len(Counter(member.method for member in board)) for board in boards]
    if num_methods == [len(board) for board in boards]:
        of_method = colours(member.method for member in members)
        return {member.label: of_method[member.method] for member in members}
    return colours(member.label for member in members)


def setting_name(member: SeedGroup, labels: Mapping[str, str] = NO_LABELS) -> str:
    """The label of a setting, with the method's name as in its paper unless the user has given a label.

    `labels` are the user's, by the label of the setting or by the name of its method.
    """
    if member.label in labels:
        return labels[member.label]
    name = labels.get(member.method, method_name(member.records[0]))
    return name + member.label.removeprefix(member.method)


def title_words(records: Sequence[dict], *more: str) -> str:
    """What runs share, in words: "Digits, Dirichlet 0.5, seed 0; reduced: rounds 4 of 100"."""
    shared = agreed(records)
    title = data_words(shared.get("dataset", ""), shared.get("partition", ""), *more)
    smaller = {", ".join(reductions(record).values()) for record in records} - {""}
    return f"{title}; reduced: {' or '.join(sorted(smaller))}" if smaller else title


def characters(inches: float) -> int:
    """How many characters of a text fit into a width, in the current font size."""
    return max(int(120 * inches / matplotlib.rcParams["font.size"]), 1)


def write_title(figure: Figure, title: str) -> None:
    """Writes the title over a figure, in lines as wide as the figure."""
    wrap(figure.suptitle(fill(title, max(len(title), 1))), _room(figure))


def wrap(text: Text, room: float) -> None:
    """Divides the lines of a text further until it takes at most a length in pixels, as it is drawn."""
    lines = text.get_text().split("\n")
    for width in range(max(map(len, lines)), 0, -1):
        if _length(text) <= room:
            return
        text.set_text("\n".join(fill(line, width) for line in lines))


def _length(text: Text) -> float:
    """The pixels that a text takes in the direction of its lines."""
    extent = text.get_window_extent()
    return extent.height if text.get_rotation() == 90 else extent.width


def _room(figure: Figure) -> float:
    """The pixels of the width of a figure between its margins."""
    return figure.bbox.width - 2 * MARGIN * figure.dpi


def partition_figure(class_counts: np.ndarray, class_names: Sequence[str], title: str) -> Figure:
    """Draws the numbers of examples per client and class, `class_counts` `[K, C]`, a column a client; white for 0."""
    figure = Figure((5.8, 1.1 + 0.16 * min(len(class_names), NAMED)), layout="constrained")
    axes = figure.add_subplot(xlabel="Client", ylabel="Class")
    shown = np.ma.masked_equal(class_counts.T, 0)  # white, which the palest colour of the map is not
    image = axes.imshow(shown, cmap="viridis_r", vmin=0, aspect="auto", interpolation="nearest")
    axes.locator_params(integer=True)
    if len(class_names) <= NAMED:
        axes.set_yticks(range(len(class_names)), class_names)
    figure.colorbar(image, label="Examples")
    write_title(figure, title)
    return figure


def write(
    out: Path, draw: Callable[..., Figure], *given: Any, page: bool = False, look: Look | None = None
) -> list[Path]:
    """Writes the figure that `draw(*given)` returns, without dates.

    Args:
        out: A `.pdf`, `.svg`, `.png` or `.pgf` file; a PDF is written beside a PNG.
        draw: Returns the figure.
        *given: Its arguments.
        page: Write one small PNG, for a page in a repository.
        look: What the user changes; title and size are applied here, what else there is to lines by `draw`.

    Returns:
        The files.

    Raises:
        UserError: If `out` has another suffix, or is a `.pgf` without LaTeX.
    """
    if out.suffix not in UNDATED:
        raise UserError(f"--out must end in .png, .pdf, .svg or .pgf (got '{out}'); choose one of them.")
    look = Look(is_page=page) if look is None else look
    files = [out]
    if out.suffix == ".png" and not page:
        files.append(out.with_suffix(".pdf"))
    with matplotlib.rc_context(look.parameters()), warnings_in_words():
        if out.suffix == ".pgf":
            _refuse_without_latex()
        figure = draw(*given)
        apply(look, figure)
        out.parent.mkdir(parents=True, exist_ok=True)
        for file in files:
            save = partial(figure.savefig, format=file.suffix[1:], **UNDATED[file.suffix])
            write_atomically(file, (lambda path: path.write_bytes(small_png(figure))) if page else save)
    return files


def apply(look: Look, figure: Figure) -> None:
    """Gives a figure the size and the title of a look; a title stands over one panel or over all of them."""
    if look.title is not None:
        panels = [axes for axes in figure.axes if axes.get_title()]
        if len(panels) == 1:
            panels[0].set_title("")
        write_title(figure, look.title)
    if look.size is not None:
        figure.set_size_inches(look.size)
        write_title(figure, figure.get_suptitle())
        _wrap_headings(figure)


def _wrap_headings(figure: Figure) -> None:
    """Divides titles and labels of panels into lines that do not leave the figure; they stand over a panel's middle."""
    figure.draw_without_rendering()  # settles where the panels are
    margin = MARGIN * figure.dpi
    for axes in figure.axes:
        panel = axes.get_window_extent()
        middle = (panel.x0 + panel.x1) / 2
        to_side = min(middle, figure.bbox.width - middle)
        for text in (axes.title, axes.xaxis.label):
            wrap(text, 2 * (to_side - margin))
        middle = (panel.y0 + panel.y1) / 2
        to_side = min(middle, figure.bbox.height - middle)
        wrap(axes.yaxis.label, 2 * (to_side - margin))


def warn_of_cut(figure: Figure) -> None:
    """Warns of a figure whose texts leave it, or leave its panels less than `LEAST_SHARE` of a side."""
    figure.draw_without_rendering()
    drawn = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    is_cut = drawn.x0 < -MARGIN or drawn.y0 < -MARGIN or drawn.x1 > width + MARGIN or drawn.y1 > height + MARGIN
    panels = [axes.get_window_extent() for axes in figure.axes]
    narrowest = min(panel.width for panel in panels)
    lowest = min(panel.height for panel in panels) * len(panels)
    is_small = narrowest < LEAST_SHARE * figure.bbox.width or lowest < LEAST_SHARE * figure.bbox.height
    has_high_legend = any(
        legend.get_window_extent().height > panel.height
        for legend, panel in zip(map(Axes.get_legend, figure.axes), panels, strict=True)
        if legend is not None and not legend.get_in_layout()
    )
    if is_cut or is_small or has_high_legend:
        warnings.warn(NO_ROOM, stacklevel=3)


def _refuse_without_latex() -> None:
    program = matplotlib.rcParams["pgf.texsystem"]
    if shutil.which(program) is None:
        raise UserError(
            f"a .pgf file needs LaTeX to measure its text (got no program '{program}'); install it, set pgf.texsystem "
            "in a --style file, or write a .pdf."
        )


@contextmanager
def warnings_in_words(worded: Callable[[str], str] = str) -> Iterator[None]:
    """Turns matplotlib's warnings of what a figure lacks, glyphs or room, into one each, which names a remedy.

    Args:
        worded: Writes a warning for its reader, as `fedcli.api.keywords_for_flags` does in Python.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    missing = {}
    lacks_room = False
    for warning in caught:
        if str(warning.message).startswith(("constrained_layout not applied", NO_ROOM)):
            lacks_room = True
            continue
        glyph = re.match(r"Glyph (\d+) .* missing from font\(s\) (.*?)\.?$", str(warning.message))
        if glyph is None:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        else:
            missing[chr(int(glyph[1]))] = glyph[2]
    if lacks_room:
        warnings.warn(worded(NO_ROOM), stacklevel=3)
    if missing:
        fonts = ", ".join(dict.fromkeys(missing.values()))
        text = (
            f"the font {fonts} has no '{printable(''.join(missing))}', which the figure shows as boxes; choose another "
            "font by font.family in a --style file."
        )
        warnings.warn(worded(text), stacklevel=3)


def small_png(figure: Figure) -> bytes:
    """The figure as a PNG for a screen, with a palette of 256 colours: a third of the bytes."""
    picture = io.BytesIO()
    small = io.BytesIO()
    with matplotlib.rc_context(Look(is_page=True).parameters()):
        figure.savefig(picture, format="png", dpi=110)
    Image.open(picture).convert("RGB").quantize(256).save(small, "png", optimize=True)
    return small.getvalue()


# Curves of runs as lines in panels


class Point(NamedTuple):
    """A point of a panel."""

    x: float
    y: float


class Curve(NamedTuple):
    """A setting's runs as a line.

    Attributes:
        setting: All runs.
        runs: Those behind the line: the finished ones, else the unfinished; none where all diverged.
        line: Their means, a row for each round in which all have a value: `x`, `y`, and the band `low` to `high`, the
            mean less and plus the sample standard deviation.
        diverged: `x` and `y` of each run that diverged and has values.
        chosen: Of accuracies, the mean headline at the mean of the rounds that the rule has chosen; it may lie
            off the line. None where no rule looks for a round.
        printed: Of accuracies, the paper's number in percent or None, see `printed_accuracies`.
    """

    setting: SeedGroup
    runs: list[dict]
    line: pd.DataFrame
    diverged: list[pd.DataFrame]
    chosen: Point | None
    printed: float | None

    @property
    def last(self) -> float:
        """The value of the last round, by which legends are ordered."""
        lines = [self.line] if len(self.line) else self.diverged
        return max(values.y.iloc[-1] for values in lines)

    @property
    def changes(self) -> list[str]:
        """What of the code has changed between the rounds of its runs, in words."""
        return list(dict.fromkeys(change for record in self.setting.records for change in code_changes(record)))

    def name(self, labels: Mapping[str, str] = NO_LABELS) -> str:
        """The name in a legend, with what it stands for beside finished runs of one code, and the paper's number."""
        states = Counter(map(state_of, self.setting.records))
        notes = [f"{count}\N{NO-BREAK SPACE}{state}" for state, count in states.items() if state != "finished"]
        notes += self.changes
        if self.printed is not None:
            notes.append(f"paper:\N{NO-BREAK SPACE}{self.printed:.2f}")
        name = setting_name(self.setting, labels)
        if notes:
            name += f" ({', '.join(notes)})"
        return fill(name, 30, break_long_words=False, break_on_hyphens=False)


def find_curves(groups: list[SeedGroup], measure: str = ACCURACY, x: str = "round") -> list[Curve]:
    """The curve of each group with a value.

    Args:
        groups: The groups.
        measure: A column of `rounds_of`; a name before a slash, as "intra", for the mean of its columns; or
            `OF_CLIENTS`, whose points are clients.
        x: One of `AXES`.
    """
    limits = (None, None) if measure.startswith("drift") else (0, 100)
    curves = []
    printed_numbers: list[float | None] = [None] * len(groups)
    if measure == ACCURACY:
        printed_numbers = printed_accuracies([member.records[0] for member in groups])
    for member, printed in zip(groups, printed_numbers, strict=True):
        lost = [record for record in member.records if state_of(record) == "diverged"]
        runs = member.finished or [record for record in member.records if record not in lost]
        rounds = pd.concat([points(record, measure, x) for record in runs or lost]).groupby(level=0)
        line = rounds.mean()[rounds.size() == len(runs)]
        deviation = rounds.y.std()[line.index]
        line = line.assign(low=(line.y - deviation).clip(*limits), high=(line.y + deviation).clip(*limits))
        of_diverged = [points(record, measure, x) for record in lost]
        diverged = [values for values in of_diverged if len(values)]
        if line.empty and not diverged:
            continue
        looks_for_a_round = measure == ACCURACY and member.selection.startswith("best")
        chosen = _headline(runs, line) if looks_for_a_round else None
        curves.append(Curve(member, runs, line, diverged, chosen, printed))
    return curves


def _headline(runs: list[dict], line: pd.DataFrame) -> Point | None:
    """The runs' mean headline at the mean of its rounds, for a rule that looks for a round; None without a value."""
    summaries = [record["summary"] for record in runs]
    chosen = [summary for summary in summaries if summary["selected"] is not None]
    if line.empty or not chosen:
        return None
    number = fmean(summary["selected_round"] for summary in chosen)
    headline = fmean(100 * summary["selected"] for summary in chosen)
    return Point(float(np.interp(number, line.index, line.x)), headline)


def points(record: dict, measure: str, x: str) -> pd.DataFrame:
    """The rounds of a run, by number from 0, that have a value `y` of a measure and an `x`, see `find_curves`."""
    if measure == OF_CLIENTS:
        accuracies = clients_of(record).accuracy.dropna().sort_values(ignore_index=True)
        return pd.DataFrame({"x": accuracies.index + 1, "y": accuracies})
    table = rounds_of(record)
    positions = table["round"]
    if x == "floats":
        last = (record["cost"] or {}).get("floats_up")  # older records have that of the last round alone
        sent = pd.Series([row.get("floats_up", last) for row in record["rounds"]], dtype=float)
        positions = record["config"]["cohort_size"] * sent.cumsum()
    elif x == "seconds":
        positions = table.filter(like="seconds/").sum(axis=1).cumsum() if quiet(record) else np.nan
    values = table.filter(regex=f"^{measure}(/|$)").mean(axis=1)
    return pd.DataFrame({"x": positions, "y": values}, dtype=float).dropna()


class Panel(NamedTuple):
    """What a panel shows."""

    heading: str
    y_label: str
    curves: list[Curve]


def _draw_measures(
    measures: dict[str, str], remedy: str, records: Iterable[dict], x: str = "round", x_label: str = "",
    look: Look | None = None,
) -> Figure:  # fmt: skip
    """Draws measures over rounds, floats or seconds, a line a setting and panels for each protocol and data set.

    A line is the mean of the finished runs, where there are any, and its band the sample standard deviation over seeds,
    within 0 and 100 %. A run that diverged is a thin line that ends in a cross. A ring marks the headline, see `Curve`.
    A dotted line is the paper's number. A method keeps its colour in all panels. The title counts runs without a value.

    Args:
        measures: The label of each, see `find_curves`.
        remedy: What a user can do where no run has a value.
        records: The runs.
        x: One of `AXES`.
        x_label: What the points of a line are, if nothing of `AXES`.
        look: Colours, labels and place of the legend, where the user changes them.

    Raises:
        UserError: If no run has a value, or none has the floats or the undisturbed seconds.
    """
    if x not in AXES:
        raise unknown("axis", x, AXES, f"there are {', '.join(AXES)}.")
    records = list(records)
    panels = []
    measured = [record for record in records if any(len(points(record, name, x)) for name in measures)]
    for runs in boards(measured).values():
        members = group(runs)
        heading = f"{title_words(runs)} ({runs[0]['protocol']})"
        panels += [Panel(heading, label, find_curves(members, name, x)) for name, label in measures.items()]
    if not panels:
        labels = " and ".join(measures.values()).lower()
        raise UserError(f"no run has measured its {labels} (got {len(records)} runs); {remedy}.")
    left_out = len(records) - len(measured)
    title = f"left out, without values: {left_out}" if left_out else ""
    return _draw(panels, x_label or AXES[x], title, look or Look())


def learning_curves(records: Iterable[dict], x: str = "round", y: str = "accuracy", look: Look | None = None) -> Figure:
    """Draws the test accuracy, or another of `CURVES`, see `_draw_measures`."""
    if y not in CURVES:
        raise unknown("curve", y, CURVES, f"there are {', '.join(CURVES)}.")
    measure, label, remedy = CURVES[y]
    return _draw_measures({measure: label}, remedy, records, x, look=look)


# How far the clients' features and updates drift apart.
drift_figure = partial(_draw_measures, {
    "drift/feature_distance": "Distance of features", "drift/classifier_similarity": "Similarity of classifier updates",
}, "run with --drift-every")  # fmt: skip
# The accuracy of the clients' models on their own and on other domains.
domains_figure = partial(_draw_measures, {
    "intra": "Accuracy on own domains (%)", "inter": "Accuracy on other domains (%)",
}, "draw runs of a protocol with evaluation by domain")  # fmt: skip
# The accuracies of single clients after the last round, the worst first.
accuracies_figure = partial(_draw_measures, {
    OF_CLIENTS: "Accuracy of single clients (%)",
}, "draw runs with validation or own models", x_label="Clients, sorted")  # fmt: skip


def _draw(panels: list[Panel], x_label: str, title: str, look: Look) -> Figure:
    """The figure of panels; a setting looks the same in all of them."""
    settings = []
    for panel in panels:
        settings.append([curve.setting for curve in panel.curves])
    colours = _chosen_colours(settings, look)
    dashes = dict(zip(dict.fromkeys(colours.values()), cycle(DASHES), strict=False))
    figure = Figure(layout="constrained")
    figure.set_size_inches(look.size or (look.width, 3.0 * len(panels)))
    panel_width = look.width * (0.625 if look.legend_place in ("right", "ends") else 1)
    legends = []
    signs: dict[str, Any] = {}  # what the lines carry, by what the legend below all panels says of it
    for number, panel in enumerate(panels, 1):
        # Where the user gives a size, the heading is divided when the width of the panel is settled.
        heading = panel.heading
        if look.size is None:
            heading = fill(heading, min(characters(panel_width), 60))
        axes = figure.add_subplot(len(panels), 1, number, xlabel=x_label, ylabel=panel.y_label, title=heading)
        lines = {}
        for curve in panel.curves:
            colour = colours[curve.setting.label]
            line = _draw_curve(axes, curve, curve.name(look.labels), {"color": colour, "linestyle": dashes[colour]})
            lines[line] = curve.last
        legends.append(sorted(lines, key=lambda line: lines[line], reverse=True))
        others = [item for item in axes.get_legend_handles_labels()[0] if item not in lines]
        signs |= {str(item.get_label()): item for item in others}
        axes.locator_params("x", integer=True, min_n_ticks=1, steps=(1, 2, 5, 10))
        if look.draws_grid:
            axes.grid(axis="y")
        axes.margins(x=0.02)
        if x_label not in (AXES["floats"], AXES["seconds"]):  # rounds and clients count from 1
            axes.set_xlim(left=0.5)
    rows = _draw_legends(figure, legends, signs, look)
    if look.size is None:
        panel_height = max(3, 0.6 + LEGEND_LINE * rows.beside)
        figure.set_size_inches(look.width, panel_height * len(panels) + LEGEND_LINE * rows.below)
    write_title(figure, title)
    _fit(figure, legends, look)
    return figure


def _fit(figure: Figure, legends: list[list[Any]], look: Look) -> None:
    """Gives a figure of lines its size and title, and its names the room that there is; warns where that is too small.

    Args:
        figure: The figure, with its legends unless names stand at the ends of lines.
        legends: The lines of each panel, in the order of their names.
        look: Size, title and place of the names.
    """
    names_at_ends = []
    if look.legend_place == "ends":
        names_at_ends = [_name_ends(figure, axes, lines) for axes, lines in zip(figure.axes, legends, strict=True)]
    apply(look, figure)
    for axes, names in zip(figure.axes, names_at_ends, strict=False):
        _spread(figure, axes, names)  # by the height of the panels, which the title has changed
    if look.legend_place == "inside":
        for axes in figure.axes:
            _widen_legend(axes, axes.get_legend())
    if look.size is not None:
        warn_of_cut(figure)


def _chosen_colours(panels: list[list[SeedGroup]], look: Look) -> dict[str, str]:
    """A colour for each setting by its label: the user's by that label or by the method, else ours."""
    members = {member.label: member for panel in panels for member in panel}
    methods_drawn = [member.method for member in members.values()]
    look.refuse_unused([*methods_drawn, *members])
    colours = setting_colours(panels)
    for label, member in members.items():
        of_method = look.colors.get(member.method, colours[label])
        colours[label] = look.colors.get(label, of_method)
    return colours


class LegendRows(NamedTuple):
    """Lines of text of the longest legend beside a panel, and of the legend below all panels."""

    beside: int
    below: int


def _draw_legends(figure: Figure, legends: list[list[Any]], signs: dict[str, Any], look: Look) -> LegendRows:
    """Draws the names of the lines where the look has them.

    What else the lines carry stands below the panels in fedcli's own look. In a figure for a paper that belongs into
    the caption, so that the words for it are the figure's label.

    Args:
        figure: The figure, whose panels have no legend.
        legends: The lines of each panel, in the order of their names.
        signs: Bands, rings, crosses and dotted lines, by the words for them.
        look: Where the names stand.
    """
    figure.set_label("; ".join(signs))
    if look.legend_place == "right":
        return _legends_beside(figure, legends, signs)
    if look.legend_place == "inside":
        for axes, lines in zip(figure.axes, legends, strict=True):
            # On a pale ground, since the names of many lines lie on some of them wherever they stand.
            legend = axes.legend(
                handles=lines,
                loc="best",
                handlelength=3,
                frameon=True,
                framealpha=0.75,
                edgecolor="none",
                fancybox=False,
            )
            legend.set_in_layout(False)  # else a panel that is lower than its legend would shrink further
    if look.legend_place == "below":
        return LegendRows(0, _legend_below(figure, legends))
    return LegendRows(0, 0)


def _legends_beside(figure: Figure, legends: list[list[Any]], signs: dict[str, Any]) -> LegendRows:
    """Draws the names of each panel's lines at its right, and the words for the signs below all panels."""
    longest = 0
    for axes, lines in zip(figure.axes, legends, strict=True):
        legend = axes.legend(handles=lines, loc="upper left", bbox_to_anchor=(1, 1.03), handlelength=3)
        _wrap_names(legend, figure.bbox.width / 2)
        longest = max(longest, sum(_num_lines(text) for text in legend.get_texts()))
    legend = figure.legend(signs.values(), signs, loc="outside lower left", handlelength=3.4)
    _wrap_names(legend, _room(figure))
    for sign in legend.legend_handles:
        if sign is not None:
            sign.set(color="black", alpha=0.4)
    return LegendRows(longest, sum(_num_lines(text) for text in legend.get_texts()))


def _legend_below(figure: Figure, legends: list[list[Any]]) -> int:
    """Draws the names of all panels' lines below them, in as many columns as fit; returns its lines of text."""
    lines = {line.get_label(): line for panel in legends for line in panel}
    for num_columns in range(len(lines), 0, -1):
        legend = figure.legend(
            lines.values(), lines, loc="outside lower center", handlelength=3, columnspacing=1, labelspacing=0.3,
            ncols=num_columns,
        )  # fmt: skip
        if num_columns == 1 or legend.get_window_extent().width <= _room(figure):
            break
        legend.remove()
    _wrap_names(legend, _room(figure))
    num_lines = [_num_lines(text) for text in legend.get_texts()]
    columns = np.array_split(num_lines, num_columns)  # as a legend divides them
    return max(int(column.sum()) for column in columns)


def _wrap_names(legend: Legend, room: float) -> None:
    """Divides the names of a legend of one column into lines, so that it takes at most a width in pixels."""
    texts = legend.get_texts()
    if not texts:
        return
    beside_names = legend.get_window_extent().width - max(map(_length, texts))
    for text in texts:
        wrap(text, room - beside_names)


def _widen_legend(axes: Axes, legend: Any) -> None:
    """Gives a legend that is higher than its panel more columns, as long as the panel is wide enough for them."""
    panel = axes.get_window_extent()
    for num_columns in range(2, len(legend.get_texts()) + 1):
        if legend.get_window_extent().height <= panel.height:
            return
        legend.set_ncols(num_columns)
        if legend.get_window_extent().width > panel.width:
            legend.set_ncols(num_columns - 1)
            return


def _num_lines(text: Text) -> int:
    return text.get_text().count("\n") + 1


def _name_ends(figure: Figure, axes: Axes, lines: list[Any]) -> list[Annotation]:
    """Writes the name of each line at its right end."""
    lines = [line for line in lines if len(line.get_xdata())]
    texts = []
    for line in lines:
        text = axes.annotate(
            line.get_label(),
            (line.get_xdata()[-1], line.get_ydata()[-1]),
            xytext=(BESIDE_END, 0),
            textcoords="offset points",
            va="center",
            color=line.get_color(),
            annotation_clip=False,
        )
        wrap(text, figure.bbox.width / 2)
        texts.append(text)
    return texts


def _spread(figure: Figure, axes: Axes, texts: list[Annotation]) -> None:
    """Moves names at the ends of lines up and down, until they are apart from each other by a line of text."""
    from sklearn.isotonic import isotonic_regression  # late: it takes a second, and few figures need it

    figure.draw_without_rendering()  # settles the height of the panel, of which the distances are shares
    height = 72 * axes.get_window_extent().height / figure.dpi  # points
    bottom, top = axes.get_ylim()
    texts.sort(key=lambda text: text.xy[1])
    wanted = np.array([height * (text.xy[1] - bottom) / (top - bottom) for text in texts])
    sizes = [1.25 * float(text.get_fontsize()) * (text.get_text().count("\n") + 1) for text in texts]
    below = np.cumsum([0.0, *sizes[:-1]])  # what the names under each one take
    # The nearest heights, in the sense of least squares, at which each name stands above the one before.
    heights = isotonic_regression(wanted - below, y_max=max(height - below[-1], 0.0)) + below
    for text, shift in zip(texts, heights - wanted, strict=True):
        text.set_position((BESIDE_END, shift))


def _draw_curve(axes: Axes, curve: Curve, name: str, look: dict[str, Any]) -> Any:
    """Draws mean and band of a curve, the runs that diverged, and the numbers it is judged by; returns the mean."""
    line = curve.line
    colour = look["color"]
    (drawn,) = axes.plot(line.x, line.y, label=name, marker="." if len(line) <= 20 else "", **look)
    if len(curve.runs) > 1:
        words = f"mean ± standard deviation over {len(curve.runs)} seeds"
        axes.fill_between(line.x, line.low, line.high, color=colour, label=words, alpha=0.15, linewidth=0.4)
    for lost in curve.diverged:
        cross = {**look, **SIGN, "marker": "X", "markeredgewidth": 0, "markevery": [len(lost) - 1], "linewidth": 0.8}
        axes.plot(lost.x, lost.y, gid="diverged", label="diverged after this round", **cross)
    if curve.chosen is not None:
        words = f"headline: {SELECTIONS[curve.setting.selection]}"
        axes.plot(
            curve.chosen.x,
            curve.chosen.y,
            "o",
            gid="chosen",
            label=words,
            color=colour,
            fillstyle="none",
            clip_on=False,
            **SIGN,
        )
    if curve.printed is not None:
        words = "the paper's number for the line of its colour"
        axes.axhline(curve.printed, gid="printed", label=words, color=colour, linestyle=":", linewidth=0.8)
    return drawn
