"""Curves of runs as lines in panels: test accuracy, how far clients drift apart, and accuracy by domain."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from math import ceil
from statistics import fmean
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import offset_copy

from fedcli.errors import UserError, unknown
from fedcli.figures.plots import BAND, LINE_COLOURS, STYLE, chart, look
from fedcli.figures.series import AXES, Curve, find_curves
from fedcli.registry import protocols
from fedcli.results.boards import boards
from fedcli.results.tables import NOT_IN_IDENTITY, group, headline, settings_text
from fedcli.runs.config import given_options
from fedcli.runs.records import reductions_of

RING = {"marker": "o", "markersize": 8, "fillstyle": "none", "linestyle": "none"}
LEADERS = 1.5  # below all lines, as that from a run which ended early goes through those of the others
TOP = 3  # the level of what no line may hide; lines are at 2, one above those drawn before it
LINES = 7  # curves in a panel at most, as many as there are colours; of more, FEW go into each of several panels
FEW = 4
ACROSS = 3  # panels of curves in a row
CURVES, PANEL = (4.8, 3.0), (3.2, 2.6)  # inches, width and height of a panel that is alone, and of one of several
AROUND = 0.7  # inches of a panel's height above and below its axes
WRAP = 26  # characters in a line of a label that stands at the end of its curve, where no word is longer
DIRECT, HIGHEST = 32, 4.5  # characters of a line of labels, and a panel's inches, from which there is a legend instead
BESIDE = 0.2  # inches between such a label and the axes
WORDS = {"break_long_words": False, "break_on_hyphens": False}
UNBROKEN = "\N{NO-BREAK SPACE}"
LEADER = {"arrowstyle": "-", "linewidth": 0.5, "shrinkA": 1, "shrinkB": 2, "relpos": (0, 0.5)}  # from line to label
LINE_HEIGHT = 0.15  # inches that such a line takes, and one of the title
MANY, THIN = 300, 0.7  # points of a line from which it is so thin, as it would look like a surface
PAPER = {"linestyle": ":", "linewidth": 0.8}  # the paper's number
BOARD = (2.6, 2.3)  # inches, width and height of a panel of mixed runs without its legend
PAIRED = 22  # characters of the longest name with which that legend has two columns
DRIFT = {"feature_distance": "Distance of features", "classifier_similarity": "Similarity of classifier updates"}
DOMAINS = {"intra": "Accuracy on own domains (%)", "inter": "Accuracy on other domains (%)"}
SHOWN = ("protocol", "dataset", "partition", "rounds", "eval_every")  # options that titles and curves tell anyway


class RoundLocator(MaxNLocator):
    """Ticks at 1, the first round, and at round numbers after it."""

    def tick_values(self, vmin: float, vmax: float) -> np.ndarray:
        """Ticks between two rounds."""
        ticks = super().tick_values(max(1, vmin), max(1, vmax))
        after = ticks[ticks > 1] + (np.diff(ticks[:2]) == 2)  # every second round is an odd one, from 1 on
        return np.array([1, *after])


@chart("curves", "test accuracy over rounds; runs that differ only in the seed are one line with a band")
def learning_curves(records: Iterable[dict], x: str = "round") -> Figure:
    """Draws test accuracy over rounds, floats or seconds, one line for the runs that agree in everything but the seed.

    The band is the mean ± the sample standard deviation over seeds. Only finished runs enter them where there are any;
    a run that diverged is a thin line that ends in a cross. The names tell what was left out. A ring marks the best
    round of a single run, where the rule takes it. A dotted line is the paper's number, which the name has too, see
    `fedcli.results.comparison.printed_accuracies`. More than `LINES` curves are drawn in several panels.

    Runs of several protocols or data sets have a panel for each, in which a method keeps its colour.

    Args:
        records: The runs.
        x: One of `AXES`.

    Raises:
        UserError: If no run has an evaluated round, or none the floats or undisturbed seconds that are asked for.
    """
    if x not in AXES:
        raise unknown("axis", x, AXES, f"there are {', '.join(AXES)}.")
    label, along = AXES[x]
    records = list(records)
    known = [record for record in records if not record["rounds"] or along(record)]
    if records and not known:
        why = "has measured its seconds on a quiet machine" if x == "seconds" else "tells what it sent"
        raise UserError(f"no run {why} (got {len(records)}); draw them with --x round.")
    panels = {name: found for name, own in boards(known).items() if (found := find_curves(group(own), along=along))}
    if not panels:
        raise UserError("no run has an evaluated round (got none to draw); a curve needs one; wait for a round to end.")
    left_out = f"without {x}, left out: {len(records) - len(known)}" if len(known) < len(records) else ""
    if len(panels) > 1:
        return _board_panels(panels, label, left_out)
    (curves,) = panels.values()
    title = "; ".join(filter(None, (_title(curves), left_out)))
    return _curves_figure({"Test accuracy (%)": curves}, title, label, headline=True)


def _board_panels(panels: dict[str, list[Curve]], x_label: str, left_out: str) -> Figure:
    """Curves of mixed runs, a panel for each protocol and data set; settings are numbered and listed below.

    What was left out stands below them.
    """
    every = [curve for curves in panels.values() for curve in curves]
    methods = dict.fromkeys(curve.setting.method for curve in every)
    colours = {method: LINE_COLOURS[place % len(LINE_COLOURS)] for place, method in enumerate(methods)}
    rows, across, longest = ceil(len(panels) / ACROSS), min(len(panels), ACROSS), 0
    figure = Figure(layout="constrained")
    numbers: dict[str, str] = {}
    for place, (title, curves) in enumerate(panels.items(), 1):
        axes, looks, short = figure.add_subplot(rows, across, place), {}, {}
        for index, curve in enumerate(curves):
            method, settings = curve.setting.method, settings_text(curve.setting.settings)
            number = numbers.setdefault(settings, f" [{len(numbers) + 1}]") if settings else ""
            looks[curve.setting.label] = _look(index, len(curves)) | {"color": colours[method]}
            short[curve.setting.label] = method + number
        names = _names(curves, headline=True, short=short)
        _draw_curves(axes, curves, looks, names, x_label, headline=True)
        axes.set_title(title, fontsize=7)
        axes.set(ylabel="Test accuracy (%)" if place % across == 1 or across == 1 else "")
        columns = 1 + (max(map(len, names.values())) <= PAIRED)
        longest = max(longest, ceil(len(names) / columns))
        axes.legend(
            fontsize=6, ncols=columns, loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=5, handlelength=2.6
        )
    figure.set_size_inches(BOARD[0] * across, rows * (BOARD[1] + 0.12 * longest))
    width = int(19 * figure.get_figwidth())  # characters in a line of this size
    listed = [fill(f"{number.strip()} {text}", width) for text, number in numbers.items()]
    _legend(figure, every, direct=True, listed="\n".join(filter(None, (*listed, left_out))))
    return figure


@chart("drift", "how far the clients' models drift apart, of runs with --drift-every")
def drift_figure(records: Iterable[dict]) -> Figure:
    """Draws over rounds the distance of the clients' features and the similarity of their classifiers' updates.

    Lines, bands and the legend are those of `learning_curves`; runs that did not measure it are left out.

    Raises:
        UserError: If no run has measured it.
    """
    measured = [
        record for record in records if any(set(row.get("drift", {}).values()) - {None} for row in record["rounds"])
    ]
    if not measured:
        raise UserError("no run has measured the drift of its clients (got none to draw); run with --drift-every.")
    return _curves_side_by_side(measured, DRIFT, lambda row, key: row.get("drift", {}).get(key))


@chart("domains", "accuracy of the clients' models on their own and on the other domains")
def domains_figure(records: Iterable[dict]) -> Figure:
    """Draws over rounds the accuracy of the clients' models on their own domains and on the others, means over domains.

    Lines, bands and the legend are those of `learning_curves`; runs that were not tested by domain are left out.

    Raises:
        UserError: If no run was tested by domain.
    """
    records = list(records)
    measured = [record for record in records if any(row.get("intra") for row in record["rounds"])]
    if not measured:
        protocols = ", ".join(sorted({record["protocol"] for record in records})) or "no run"
        raise UserError(
            f"no run was tested on its clients' own and other domains (got {protocols}); only protocols with "
            f"evaluation by domain do so; draw runs of these."
        )
    return _curves_side_by_side(measured, DOMAINS, _mean_accuracy)


def _curves_side_by_side(
    records: list[dict], labels: dict[str, str], read: Callable[[dict, str], float | None]
) -> Figure:
    """Curves over rounds, two panels.

    Args:
        records: The runs.
        labels: Of each panel: the key of its value, and the label of its axis.
        read: From what a record says of a round, and the key, to the value; None where there is none.
    """
    groups = group(records)
    columns = {label: find_curves(groups, lambda row, key=key: read(row, key)) for key, label in labels.items()}
    return _curves_figure(columns, _title(next(iter(columns.values()))), "Round")


def _mean_accuracy(row: dict, key: str) -> float | None:
    """Mean over the domains of a round's accuracies, in percent; None where it was not evaluated."""
    accuracies = row.get(key)
    return 100 * fmean(accuracies.values()) if accuracies else None


def _curves_figure(columns: dict[str, list[Curve]], title: str, x_label: str, headline: bool = False) -> Figure:
    """Curves in as many panels as they need, with their names where the lines end, or in a legend where these are long.

    A panel is as high as its names need.

    Args:
        columns: What is measured, the curves of it by the label of the axis.
        title: Of the figure.
        x_label: Of the horizontal axes.
        headline: Whether it is the accuracy that the runs are judged by: the selected round and the paper's number are
            shown too.
    """
    every = [curve for curves in columns.values() for curve in curves]
    settings = list(dict.fromkeys(curve.setting.label for curve in every))
    looks = {label: _look(index, len(settings)) for index, label in enumerate(settings)}
    rows = 1 if len(settings) <= LINES else ceil(len(settings) / FEW)
    names = _names(every, headline)
    wrapped = {label: fill(name, WRAP, **WORDS).replace(UNBROKEN, " ") for label, name in names.items()}
    drawn = [
        (label, [curve for curve in curves if curve.setting.label in part])
        for part in np.array_split(settings, rows) for label, curves in columns.items()
    ]  # fmt: skip
    across = min(len(drawn), ACROSS) if len(columns) == 1 else len(columns)
    width, usual = CURVES if len(drawn) == 1 else PANEL
    lines = max(sum(len(_ends(curve)) * _lines(wrapped[curve.setting.label]) for curve in part) for _, part in drawn)
    height = max(usual, lines * LINE_HEIGHT + AROUND)
    longest = max(len(line) for name in wrapped.values() for line in name.splitlines())
    direct = longest <= DIRECT and height <= HIGHEST
    height = height if direct else usual
    down, title = ceil(len(drawn) / across), fill(title, int(16 * across * width), **WORDS)
    size = across * width, down * height + LINE_HEIGHT * title.count("\n")
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(down, across, squeeze=False, sharey=len(columns) == 1)
    for axes in grid.flat[len(drawn) :]:
        axes.set_axis_off()
    for place, (axes, (label, curves)) in enumerate(zip(grid.flat, drawn, strict=False)):
        _draw_curves(axes, curves, looks, names, x_label, headline)
        axes.set(ylabel=label if len(columns) > 1 or place % across == 0 else "")
    if direct:  # once all are drawn, as they share an axis
        for place, (axes, (_, curves)) in enumerate(zip(grid.flat, drawn, strict=False)):
            if len(columns) == 1 or (place + 1) % across == 0:
                _name_lines(axes, curves, looks, wrapped, height - AROUND)
    figure.suptitle(title, fontsize=STYLE["axes.titlesize"])
    _legend(figure, every, direct)
    return figure


def _look(index: int, count: int) -> dict[str, Any]:
    """How the line of that number looks; the markers of different lines stand at different rounds."""
    return look(index) | {"start": index / count}


def _draw_curves(
    axes: Axes, curves: list[Curve], looks: dict[str, dict], names: dict[str, str], x_label: str, headline: bool
) -> None:
    """Draws mean and band of each group."""
    for curve in curves:
        own = dict(looks[curve.setting.label]) | ({"linewidth": THIN} if len(curve.places) > MANY else {})
        colour, start = own["color"], own.pop("start")
        mean = curve.values.mean(0)
        if curve.has_band:
            spread = curve.values.std(0, ddof=1)
            axes.fill_between(curve.places, mean - spread, mean + spread, color=colour, **BAND)
        every = max(1, len(mean) // 8)
        shown = ([], []) if curve.all_diverged else (curve.places, mean)
        axes.plot(*shown, label=names[curve.setting.label], markevery=(int(start * every), every), **own)
        for places, values in curve.diverged:
            axes.plot(
                places, values, color=colour, linestyle=own["linestyle"], linewidth=0.8, marker="X", markersize=7,
                markevery=[len(places) - 1], markeredgewidth=0, gid="diverged", zorder=TOP,
            )  # fmt: skip
        if headline and len(curve.drawn) == 1:
            _mark_selected(axes, curve, colour)
        if headline and curve.printed is not None:
            axes.axhline(curve.printed, **PAPER, color=colour, gid="printed")
    rounds = x_label == AXES["round"][0]
    if rounds:
        axes.update_datalim([(1, 0)], updatey=False)  # also where the first value is of a later one
    locator = RoundLocator if rounds else MaxNLocator
    axes.xaxis.set_major_locator(locator("auto", integer=True, min_n_ticks=1, steps=(1, 2, 5, 10)))
    axes.set_xlabel(x_label)
    axes.margins(x=0.02)
    axes.grid(axis="y")


def _whole(text: str) -> str:
    """A setting or a note without a place to break a line, if it fits into one."""
    return text.replace(" ", UNBROKEN) if len(text) <= WRAP else text


def _lines(text: str) -> int:
    return text.count("\n") + 1


def _ends(curve: Curve) -> list[tuple[float, float]]:
    """The points at which its name stands: its last one, or that of each run where all diverged."""
    lines = curve.diverged if curve.all_diverged else [(curve.places, curve.values.mean(0))]
    return [(places[-1], values[-1]) for places, values in lines if len(places)]


def _name_lines(axes: Axes, curves: list[Curve], looks: dict, names: dict[str, str], height: float) -> None:
    """Writes the names of the lines to the right of axes that are so many inches high."""
    low, high = axes.get_ylim()
    entries = [(end, curve.setting.label) for curve in curves for end in _ends(curve)]
    heights = [_lines(names[label]) * LINE_HEIGHT / height * (high - low) for _, label in entries]
    levels = apart([value for (_, value), _ in entries], heights, low, high)
    beside = offset_copy(axes.get_yaxis_transform(), axes.figure, BESIDE)
    for (end, label), level in zip(entries, levels, strict=True):
        colour = looks[label]["color"]
        axes.annotate(
            names[label], end, (1, level), textcoords=beside, color=colour, va="center",
            gid="name", annotation_clip=False, arrowprops={**LEADER, "color": colour}, zorder=LEADERS,
        )  # fmt: skip
    axes.set_ylim(low, high)


def apart(wanted: Sequence[float], heights: Sequence[float], low: float, high: float) -> list[float]:
    """The middles of labels that do not overlap, as near as may be to where they are wanted.

    Args:
        wanted: Their middles.
        heights: How high they are; together at most `high - low`.
        low: Where they may begin.
        high: Where they must end.
    """
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    levels = list(wanted)
    for _ in range(20 * len(order)):  # each step halves an overlap
        for one, other in pairwise(order):
            overlap = max(0, (heights[one] + heights[other]) / 2 - (levels[other] - levels[one]))
            levels[one], levels[other] = levels[one] - overlap / 2, levels[other] + overlap / 2
        for one, bound in ((order[0], max), (order[-1], min)):
            levels[one] = bound(levels[one], low + heights[one] / 2 if bound is max else high - heights[one] / 2)
    return levels


def _mark_selected(axes: Axes, curve: Curve, colour: str) -> None:
    """A ring around the selected round of a single run, where the rule looks for the best one."""
    summary = curve.drawn[0].get("summary") or {}
    place = np.flatnonzero(curve.rounds - 1 == summary.get("selected_round"))
    if (summary.get("selection") or "").startswith("best") and len(place):
        point = curve.places[place], curve.values[0, place]
        axes.plot(*point, **RING, color=colour, gid="selected", clip_on=False, zorder=TOP)


def _names(curves: list[Curve], headline: bool, short: Mapping[str, str] | None = None) -> dict[str, str]:
    """The names of the lines, `short` if given, with the number of runs where others have more and what is left out.

    If it is the `headline` that is drawn, they have the paper's number too.
    """
    most, names = max(len(curve.drawn) for curve in curves), {}
    for curve in curves:
        member, n = curve.setting, len(curve.drawn)
        left_out = len(member.records) - n - len(member.diverged)
        notes = [
            *([f"n = {n}"] if n < most else []),
            *(["diverged"] if curve.all_diverged else ["unfinished"] if not member.finished else []),
            *([f"{left_out} unfinished not shown"] if left_out and not curve.all_diverged else []),
            *([f"{len(member.diverged)} diverged"] if member.diverged and not curve.all_diverged else []),
            *([f"paper: {curve.printed:.2f}"] if headline and curve.printed is not None else []),
        ]
        name, about = (short[member.label] if short else member.label).split(", "), map(_whole, notes)
        names[member.label] = ", ".join(map(_whole, name)) + (f" ({', '.join(about)})" if notes else "")
    return names


def _title(curves: list[Curve]) -> str:
    """What all runs have in common, what makes them smaller than their protocol, and how many there are of each."""
    methods = {curve.setting.method for curve in curves}
    most = max(len(curve.drawn) for curve in curves)
    records = [record for curve in curves for record in curve.setting.records]
    about = headline(records)
    if len(methods) == 1:
        about = f"{methods.pop()}, {about}"
    given = settings_text(_given_with_all(records))
    seeds = f"{most} seeds" if most > 1 else "one seed"
    return "; ".join([about, *([f"with {given}"] if given else []), seeds])


def _given_with_all(records: list[dict]) -> dict[str, Any]:
    """The options given with all runs of a protocol that are not what it says, nor told by the rest of the figure."""
    said = {*SHOWN, *NOT_IN_IDENTITY, *(one["what"] for record in records for one in reductions_of(record))}
    rows = [given_options(record["config"], record.get("origin", {})) for record in records]
    protocol = protocols().get(records[0]["protocol"])
    usual = protocol.settings.items() if protocol else ()
    return {
        name: value for name, value in rows[0].items()
        if name not in said and (name, value) not in usual and all((name, value) in row.items() for row in rows)
    }  # fmt: skip


def _legend(figure: Figure, curves: list[Curve], direct: bool, listed: str = "") -> None:
    """The legend below the axes, where it can hide no curve, with lines listed above; the figure grows by it.

    It has the curves' names unless these stand beside them (`direct`).
    """
    every = [axes for axes in figure.axes if axes.axison]
    entries = (
        {} if direct else {line.get_label(): line for axes in every for line in axes.lines if line.get_gid() is None}
    )
    if counts := sorted({len(curve.values) for curve in curves if curve.has_band}):
        about = f"band: mean ± standard deviation over {' or '.join(map(str, counts))} seeds"
        entries[about] = Patch(color="#555555", **BAND)
    for gid, label, sign in (
        ("selected", "selected round", RING),
        ("diverged", "diverged after this round", {"marker": "X", "markersize": 7, "linestyle": "none"}),
        ("printed", "the paper's number for the line of its colour", PAPER),
    ):
        if any(line.get_gid() == gid for axes in every for line in axes.lines):
            entries[label] = Line2D([], [], color="#555555", **sign)
    if entries or listed:
        width, height = figure.get_size_inches()
        columns = max(1, int(width / (0.055 * max(map(len, entries), default=1) + 0.6)))
        lines = ceil(len(entries) / columns) + 0.7 * len(listed.splitlines())
        figure.set_size_inches(width, height + 0.16 * lines)  # a line of text is 0.16 inches
        figure.legend(
            entries.values(), entries.keys(), loc="outside lower center", ncols=columns, handlelength=3.4,
            title=listed or None, title_fontsize=6, alignment="left",
        )  # fmt: skip
