"""Figures from run records, partitions and measured speeds, each as PNG and PDF; the same input gives the same bytes.

A function that returns a figure becomes a kind of `fedcli plot` by `@chart`; `write` draws it in `STYLE` and saves it.

Figures are made without pyplot, so no global state is touched and no window system is needed.
"""

import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import fmean, mode
from textwrap import fill
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.collections import EllipseCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator

from fedcli.data.files import write_atomically
from fedcli.errors import UserError, unknown
from fedcli.results.boards import boards
from fedcli.results.comparison import printed_accuracy
from fedcli.results.tables import SeedGroup, group, headline, settings_text
from fedcli.runs.records import quiet
from fedcli.userfiles import FromFile

STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that every machine draws the same
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.5,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,  # fonts as text that can be edited and searched
}
# Okabe and Ito's colours, which colour-blind readers tell apart; their yellow is too pale for lines on white.
LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", (0, (5, 1.5)), (0, (4, 1.2, 1, 1.2)), (0, (1.2, 1.2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
RING = {"marker": "o", "markersize": 8, "fillstyle": "none", "linestyle": "none"}
LINES = 7  # curves in a panel at most, as many as there are colours; of more, FEW go into each of several panels
FEW = 4
ACROSS = 3  # panels of curves in a row
CURVES, PANEL = (4.8, 3.0), (3.2, 2.6)  # inches, width and height of a panel that is alone, and of one of several
DIRECT = 44  # characters of the longest label that still stands at the end of its line, else there is a legend
WRAP = 22  # characters in a line of such a label
LEADER = {"arrowstyle": "-", "linewidth": 0.5, "shrinkA": 1, "shrinkB": 2, "relpos": (0, 0.5)}  # from line to label
LINE_HEIGHT = 0.15  # inches that such a line takes
BOARD = (2.6, 2.3)  # inches, width and height of a panel of mixed runs without its legend
DRIFT = {"feature_distance": "Distance of features", "classifier_similarity": "Similarity of classifier updates"}
DOMAINS = {"intra": "Accuracy on own domains (%)", "inter": "Accuracy on other domains (%)"}
CHART_WIDTH = 5.8  # inches, the largest width of the partition chart's grid
CELL = 0.3  # inches, the largest side of one of its cells
BUBBLE = 0.1  # inches, the least diameter of its largest bubble; in narrow columns bubbles may overlap
LABEL_HEIGHT = 0.13  # inches that a line of labels takes
LABEL_WIDTH = 0.24  # inches that a label of up to three characters takes; longer ones stand upright


@dataclass(frozen=True)
class Chart:
    """A kind of figure of runs, `fedcli plot --kind NAME`.

    Attributes:
        draw: From the runs to the figure.
        help: What it shows, one line.
        needs: What `draw` takes: the "records" of the runs; or, where a figure needs more of them, the "folders" given;
            or the folders and the user's files that their "models" need.
    """

    draw: Callable[..., Figure]
    help: str
    needs: str = "records"


CHARTS: dict[str, Chart] = {}


def chart(name: str, help: str, needs: str = "records") -> Callable[[Callable[..., Figure]], Callable[..., Figure]]:
    """Registers the function below it as a kind of figure; the arguments are those of `Chart`."""

    def register(draw: Callable[..., Figure]) -> Callable[..., Figure]:
        CHARTS[name] = Chart(draw, help, needs)
        return draw

    return register


FRAME = {"bbox_inches": "tight", "pad_inches": 0.04}


def write(out: Path, draw: Callable[..., Figure], *given: Any) -> list[Path]:
    """Draws a figure in the style of all figures and writes it, without dates, so that equal figures are equal files.

    Args:
        out: Where to write, with or without suffix: `.pdf` and `.svg` alone, else PNG and PDF.
        draw: A function of this package or of a user that returns the figure.
        *given: What it is given.

    Returns:
        The files.

    Raises:
        UserError: If the suffix is of another kind of image.
    """
    undated = {
        ".png": {"Software": None}, ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
        ".svg": {"Date": None, "Creator": None},
    }  # fmt: skip
    if out.suffix not in undated and out.suffix[1:] in FigureCanvasBase.get_supported_filetypes():
        raise UserError(f"a figure is written as .png, .pdf or .svg (got '{out}'); choose one of them with --out.")
    stem = out.with_suffix("") if out.suffix in undated else out  # "dirichlet:0.5" has no suffix
    suffixes = (out.suffix,) if out.suffix in (".pdf", ".svg") else (".png", ".pdf")
    files = [stem.with_name(stem.name + suffix) for suffix in suffixes]
    parse = isinstance(draw, FromFile)  # a name of ours may have a dollar sign
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "fedcli", "text.parse_math": parse}):
        figure = draw(*given)
        stem.parent.mkdir(parents=True, exist_ok=True)
        for file in files:
            about = {"format": file.suffix[1:], "metadata": undated[file.suffix]}
            write_atomically(file, lambda path, about=about: figure.savefig(path, **about, **FRAME))
    return files


class Curve(NamedTuple):
    """What is drawn of the runs of a setting.

    Attributes:
        setting: The runs.
        drawn: Those behind the line: the finished ones, else the unfinished ones, else those that diverged.
        rounds: The rounds, counted from 1, in which all of these have a value; `[R]`.
        places: Where these stand on the horizontal axis, the mean over the runs; `[R]`.
        values: `[n, R]`.
        diverged: Places and values of each run that diverged and has any.
        printed: The paper's number where the runs are of a cell of one of its tables, in percent.
    """

    setting: SeedGroup
    drawn: list[dict]
    rounds: np.ndarray
    places: np.ndarray
    values: np.ndarray
    diverged: list[tuple[np.ndarray, np.ndarray]]
    printed: float | None

    @property
    def all_diverged(self) -> bool:
        """Whether there is no other run."""
        return self.drawn == self.setting.diverged

    @property
    def has_band(self) -> bool:
        """Whether there are several seeds to draw a deviation of."""
        return len(self.values) > 1 and not self.all_diverged


@chart("curves", "test accuracy over rounds; runs that differ only in the seed are one line with a band")
def learning_curves(records: Iterable[dict], x: str = "round") -> Figure:
    """Draws test accuracy over rounds, floats or seconds, one line for the runs that agree in everything but the seed.

    The band is the mean ± the sample standard deviation over seeds. Only finished runs enter them where there are any;
    a run that diverged is a thin line that ends in a cross. The names tell what was left out. A ring marks the best
    round of a single run, where the rule takes it. A dotted line is the paper's number where the runs are of a cell of
    one of its tables. More than `LINES` curves are drawn in several panels.

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
    if len(panels) > 1:
        return _board_panels(panels, label)
    (curves,) = panels.values()
    left_out = len(records) - len(known)
    title = _title(curves) + (f"; without {x}, left out: {left_out}" if left_out else "")
    return _curves_figure({"Test accuracy (%)": curves}, title, label, headline=True)


def _board_panels(panels: dict[str, list[Curve]], x_label: str) -> Figure:
    """Curves of mixed runs, a panel for each protocol and data set; settings are numbered and listed below."""
    every = [curve for curves in panels.values() for curve in curves]
    methods = dict.fromkeys(curve.setting.method for curve in every)
    colours = {method: LINE_COLOURS[place % len(LINE_COLOURS)] for place, method in enumerate(methods)}
    rows, longest = ceil(len(panels) / ACROSS), max(map(len, panels.values()))
    across = min(len(panels), ACROSS)
    figure = Figure(figsize=(BOARD[0] * across, rows * (BOARD[1] + 0.12 * ceil(longest / 2))), layout="constrained")
    numbers: dict[str, str] = {}
    for place, (title, curves) in enumerate(panels.items(), 1):
        axes, seen, looks, short = figure.add_subplot(rows, across, place), dict.fromkeys(LINE_COLOURS, 0), {}, {}
        for index, curve in enumerate(curves):
            method, settings = curve.setting.method, settings_text(curve.setting.settings)
            number = numbers.setdefault(settings, f" [{len(numbers) + 1}]") if settings else ""
            colour = colours[method]  # which other methods may have; its lines differ in a panel
            own = {"color": colour, "linestyle": DASHES[seen[colour] % len(DASHES)]}
            looks[curve.setting.label] = _look(index, len(curves)) | own
            seen[colour] += 1
            short[curve.setting.label] = method + number
        names = _names(curves, short)
        _draw_curves(axes, curves, looks, names, headline=True)
        axes.set_title(title, fontsize=7)
        axes.set(xlabel=x_label, ylabel="Test accuracy (%)" if place % across == 1 or across == 1 else "")
        columns = 1 + (max(map(len, names.values())) <= WRAP)
        axes.legend(fontsize=6, ncols=columns, loc="upper center", bbox_to_anchor=(0.5, -0.22), handlelength=2.6)
    width = int(19 * figure.get_figwidth())  # characters in a line of this size
    listed = "\n".join(fill(f"{number.strip()} {text}", width) for text, number in numbers.items())
    _legend(figure, every, direct=True, listed=listed)
    return figure


def _rounds(record: dict) -> list[float]:
    """The rounds, counted from 1."""
    return [row["round"] + 1 for row in record["rounds"]]


def floats_sent(record: dict) -> list[float]:
    """Floats that all clients together have sent up to the end of each round; none where that is not recorded."""
    last = (record.get("cost") or {}).get("floats_up")  # older records have that of the last round alone
    sent = [row.get("floats_up", last) for row in record["rounds"]]
    clients = record["config"].get("cohort_size")
    return [] if None in (*sent, clients) else (clients * np.cumsum(sent, dtype=float)).tolist()


def _seconds_taken(record: dict) -> list[float]:
    """Seconds up to the end of each round; none of a run that other work disturbed."""
    return np.cumsum([sum(row["seconds"].values()) for row in record["rounds"]]).tolist() if quiet(record) else []


# What the curves can stand over: the label, and of a record a value for each round that it has.
AXES: dict[str, tuple[str, Callable[[dict], list[float]]]] = {
    "round": ("Round", _rounds),
    "floats": ("Floats sent by all clients", floats_sent),
    "seconds": ("Seconds", _seconds_taken),
}


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


def _accuracy(row: dict) -> float | None:
    """Test accuracy of a round in percent; None where it was not evaluated."""
    accuracy = row.get("test_accuracy")
    return None if accuracy is None else 100 * accuracy


def find_curves(
    groups: list[SeedGroup],
    read: Callable[[dict], float | None] = _accuracy,
    along: Callable[[dict], list[float]] = _rounds,
) -> list[Curve]:
    """The curve of each group with a value.

    Args:
        groups: The groups.
        read: From what a record says of a round to the value; None where there is none.
        along: From a record to the places of its rounds on the horizontal axis.
    """

    def points(record: dict) -> dict[int, tuple[float, float]]:
        rows = zip(along(record), record["rounds"], strict=True)
        return {row["round"] + 1: (place, value) for place, row in rows if (value := read(row)) is not None}

    found = []
    for member in groups:
        ended = [points(record) for record in member.diverged]
        diverged = [tuple(np.array([*one.values()]).T) for one in ended if one]
        drawn = member.finished or [one for one in member.records if one not in member.diverged] or member.diverged
        curves = [points(record) for record in drawn]
        rounds = sorted(set.intersection(*map(set, curves)))
        if rounds or diverged:
            shape = len(curves), len(rounds), 2
            both = np.array([[curve[number] for number in rounds] for curve in curves]).reshape(shape)
            places, values = both[..., 0].mean(0), both[..., 1]
            found.append(Curve(member, drawn, np.array(rounds), places, values, diverged, printed_accuracy(drawn[0])))
    return found


def _curves_figure(columns: dict[str, list[Curve]], title: str, x_label: str, headline: bool = False) -> Figure:
    """Curves in as many panels as they need, with their names where the lines end, or in a legend where these are long.

    Args:
        columns: What is measured, the curves of it by the label of the axis.
        title: Of the figure.
        x_label: Of the horizontal axes.
        headline: Whether it is the accuracy that the runs are judged by: the selected round and the paper's number are
            shown too.
    """
    settings = list(dict.fromkeys(curve.setting.label for curves in columns.values() for curve in curves))
    looks = {label: _look(index, len(settings)) for index, label in enumerate(settings)}
    rows = 1 if len(settings) <= LINES else ceil(len(settings) / FEW)
    parts = [part.tolist() for part in np.array_split(settings, rows)]
    names = _names([curve for curves in columns.values() for curve in curves])
    direct = max(map(len, names.values())) <= DIRECT
    drawn = [(part, label, curves) for part in parts for label, curves in columns.items()]
    across = min(len(drawn), ACROSS) if len(columns) == 1 else len(columns)
    size = CURVES if len(drawn) == 1 else PANEL
    figure = Figure(figsize=(across * size[0], ceil(len(drawn) / across) * size[1]), layout="constrained")
    grid = figure.subplots(ceil(len(drawn) / across), across, squeeze=False, sharey=len(columns) == 1)
    for place, axes in enumerate(grid.flat):
        if place >= len(drawn):
            axes.set_axis_off()
            continue
        part, label, curves = drawn[place]
        shown = [curve for curve in curves if curve.setting.label in part]
        _draw_curves(axes, shown, looks, names, headline)
        axes.set(xlabel=x_label, ylabel=label if len(columns) > 1 or place % across == 0 else "")
    if direct:
        last = [place for place in range(len(drawn)) if len(columns) == 1 or (place + 1) % across == 0]
        for place in last:
            part, _, curves = drawn[place]
            shown = [curve for curve in curves if curve.setting.label in part]
            _name_lines(grid.flat[place], shown, looks, names, size[1] - 0.7)
    figure.suptitle(fill(title, int(16 * figure.get_figwidth())), fontsize=STYLE["axes.titlesize"])
    _legend(figure, [curve for curves in columns.values() for curve in curves], direct)
    return figure


def _look(index: int, count: int) -> dict[str, Any]:
    """How the line of that number looks; the markers of different lines stand at different rounds."""
    return {
        "color": LINE_COLOURS[index % len(LINE_COLOURS)], "linestyle": DASHES[index % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)], "start": index / count,
    }  # fmt: skip


def _draw_curves(
    axes: Axes, curves: list[Curve], looks: dict[str, dict], names: dict[str, str], headline: bool
) -> None:
    """Draws mean and band of each group."""
    for curve in curves:
        look = dict(looks[curve.setting.label])
        colour, start = look["color"], look.pop("start")
        mean = curve.values.mean(0)
        if curve.has_band:
            spread = curve.values.std(0, ddof=1)
            axes.fill_between(curve.places, mean - spread, mean + spread, color=colour, alpha=0.18, linewidth=0)
        every = max(1, len(mean) // 8)
        shown = ([], []) if curve.all_diverged else (curve.places, mean)
        axes.plot(
            *shown, label=names[curve.setting.label], markevery=(int(start * every), every),
            markeredgecolor="white", markeredgewidth=0.4, **look,
        )  # fmt: skip
        for places, values in curve.diverged:
            axes.plot(
                places, values, color=colour, linestyle=look["linestyle"], linewidth=0.8, marker="X", markersize=7,
                markevery=[len(places) - 1], markeredgewidth=0, gid="diverged",
            )  # fmt: skip
        if headline and len(curve.drawn) == 1:
            _mark_selected(axes, curve, colour)
        if headline and curve.printed is not None:
            axes.axhline(curve.printed, color=colour, linestyle=":", linewidth=1, gid="printed")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.margins(x=0.02)
    axes.grid(axis="y")


def _name_lines(axes: Axes, curves: list[Curve], looks: dict, names: dict[str, str], height: float) -> None:
    """Writes the names of the lines and the paper's numbers to the right of axes that are so many inches high."""
    low, high = axes.get_ylim()
    last = max(curve.places.max(initial=0) for curve in curves)  # no leader goes through the curves from before it
    entries = []
    for curve in curves:
        colour = looks[curve.setting.label]["color"]
        for places, values in curve.diverged if curve.all_diverged else [(curve.places, curve.values.mean(0))]:
            entries.append(
                (places[-1], values[-1], fill(names[curve.setting.label], WRAP, break_long_words=False), colour)
            )
        if any(line.get_gid() == "printed" and line.get_color() == colour for line in axes.lines):
            entries.append((axes.get_xlim()[1], curve.printed, f"paper: {curve.printed:.2f}", colour))
    heights = [(text.count("\n") + 1) * LINE_HEIGHT / height * (high - low) for *_, text, _ in entries]
    levels = apart([entry[1] for entry in entries], heights, low, high)
    for (place, value, text, colour), level in zip(entries, levels, strict=True):
        axes.annotate(
            text, (place, value), (1.05, level), textcoords=axes.get_yaxis_transform(), color=colour, va="center",
            gid="name", annotation_clip=False,
            arrowprops={**LEADER, "color": colour} if place >= last else None,
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
        axes.plot(*point, **RING, color=colour, gid="selected", clip_on=False)


def _names(curves: list[Curve], short: Mapping[str, str] | None = None) -> dict[str, str]:
    """The names of the lines, `short` if given, with the number of runs where others have more and what is left out."""
    most, names = max(len(curve.drawn) for curve in curves), {}
    for curve in curves:
        member, n = curve.setting, len(curve.drawn)
        left_out = len(member.records) - n - len(member.diverged)
        notes = [
            *([f"n = {n}"] if n < most else []),
            *(["diverged"] if curve.all_diverged else ["unfinished"] if not member.finished else []),
            *([f"{left_out} unfinished not shown"] if left_out and not curve.all_diverged else []),
            *([f"{len(member.diverged)} diverged"] if member.diverged and not curve.all_diverged else []),
        ]
        whole = (note.replace(" ", "\N{NO-BREAK SPACE}") for note in notes)
        name = short[member.label] if short else member.label
        names[member.label] = f"{name} ({', '.join(whole)})" if notes else name
    return names


def _title(curves: list[Curve]) -> str:
    """What all runs have in common, what makes them smaller than their protocol, and how many there are of each."""
    methods = {curve.setting.method for curve in curves}
    most = max(len(curve.drawn) for curve in curves)
    about = headline(record for curve in curves for record in curve.setting.records)
    if len(methods) == 1:
        about = f"{methods.pop()}, {about}"
    return f"{about}; {most} seeds" if most > 1 else f"{about}; one seed"


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
        entries[about] = Patch(color="#555555", alpha=0.18, linewidth=0)
    for gid, label, look in (
        ("selected", "selected round", RING),
        ("diverged", "diverged after this round", {"marker": "X", "markersize": 7, "linestyle": "none"}),
        ("printed", "the paper's number for the line of its colour", {"linestyle": ":", "linewidth": 1}),
    ):
        if any(line.get_gid() == gid for axes in every for line in axes.lines):
            entries[label] = Line2D([], [], color="#555555", **look)
    if entries or listed:
        width, height = figure.get_size_inches()
        columns = max(1, int(width / (0.055 * max(map(len, entries), default=1) + 0.6)))
        lines = ceil(len(entries) / columns) + 0.7 * len(listed.splitlines())
        figure.set_size_inches(width, height + 0.16 * lines)  # a line of text is 0.16 inches
        figure.legend(
            entries.values(), entries.keys(), loc="outside lower center", ncols=columns, handlelength=3.4,
            title=listed or None, title_fontsize=6, alignment="left",
        )  # fmt: skip


def partition_figure(class_counts: np.ndarray, class_names: Sequence[str], title: str) -> Figure:
    """Draws how many examples of each class each client holds; the area of a bubble is the number of examples.

    The longer of clients and classes runs across.

    Args:
        class_counts: `[K, C]` examples per client and class.
        class_names: C names.
        title: Title of the chart.

    Raises:
        UserError: If there is no example.
    """
    counts = np.asarray(class_counts)
    if counts.size == 0 or counts.max() <= 0:
        raise UserError(f"the partition holds no example (got counts {list(counts.shape)}); give each client some.")
    clients = [str(client) for client in range(counts.shape[0])]
    sides = [("Client", clients), ("Class", list(class_names))]
    if counts.shape[1] > counts.shape[0]:
        sides.reverse()
        counts = counts.T
    return _bubbles(counts, sides, title)


def scaling_rows(file: Path) -> list[dict]:
    """Of the CSV that `fedcli bench --csv` has written, the rows of the figure; of a workload measured twice the last.

    Args:
        file: The CSV.
    """
    with file.open(encoding="utf-8", newline="") as lines:
        rows = {row["workload"]: row for row in csv.DictReader(lines) if " K=" in row["workload"]}
    numbers = ("cohort_size", "batch_size", "seconds_per_round", "seconds_spread", "plain_seconds_per_round",
               "plain_spread")  # fmt: skip
    return [{**row, **{name: json.loads(row[name]) for name in numbers}} for row in rows.values()]


def scaling_figure(rows: Sequence[dict]) -> Figure:
    """Draws seconds a round of the engine and of the plain loop, over clients per round and over batch sizes.

    A line is the median, its band from least to largest.

    Args:
        rows: Results of `fedcli.bench.measure` that differ in the clients per round or in the batch size.
    """
    figure = Figure(figsize=(CHART_WIDTH, 2.8), layout="constrained")
    panels = (("cohort_size", "Clients per round", "batch_size"), ("batch_size", "Batch size", "cohort_size"))
    for axes, (varied, label, other) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        usual = mode(row[other] for row in rows)  # the value it has where it is not varied itself
        shown = sorted((row for row in rows if row[other] == usual), key=lambda row: row[varied])
        values = [row[varied] for row in shown]
        _draw_seconds(axes, 0, "engine", values, shown, "seconds_per_round", "seconds_spread")
        _draw_seconds(axes, 1, "plain loop", values, shown, "plain_seconds_per_round", "plain_spread")
        axes.set(xscale="log", yscale="log", xlabel=label, title=f"{other.replace('_', ' ')} {usual}")
        axes.set_xticks(values, map(str, values))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.grid(axis="y")
    figure.axes[0].set_ylabel("Seconds a round")
    same = rows[0]
    figure.suptitle(f"{same['method']}, {same['device']}, {same['precision']}, local epochs: {same['local_epochs']}")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, handlelength=3.4)
    return figure


def divided_figure(rows: Sequence[Any], model: Sequence[Any]) -> Figure:
    """Draws seconds a round over numbers of workers, a panel a workload: measured points and the modelled line.

    Args:
        rows: Measurements, `fedcli.bench.Divided`, of workers with one thread.
        model: Modelled rounds of the same workloads, likewise.
    """
    names = list(dict.fromkeys(row.workload for row in model))
    figure = Figure(figsize=(CHART_WIDTH, 2.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        line = [row for row in model if row.workload == name]
        dots = [row for row in rows if row.workload == name]
        counts = [row.workers for row in line]
        for index, part in enumerate(("seconds", "compute", "gather", "server")):
            label = "round, modelled" if part == "seconds" else part
            values = [getattr(row, part) or None for row in line]
            style = {"color": LINE_COLOURS[index], "linestyle": DASHES[index], "linewidth": 1.4 if index == 0 else 0.9}
            axes.plot(counts, [np.nan if value is None else value for value in values], label=label, **style)
        measured = [row.workers for row in dots], [row.seconds for row in dots]
        axes.plot(*measured, "o", label="round, measured", color=LINE_COLOURS[0], markersize=4)
        axes.set(xscale="log", yscale="log", xlabel="Workers", title=name)
        axes.set_xticks(counts[::2], map(str, counts[::2]))  # all do not fit beside each other
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.grid(axis="y")
    figure.axes[0].set_ylabel("Seconds a round")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, handlelength=2.4)
    return figure


def _draw_seconds(
    axes: Axes, index: int, label: str, values: list[int], rows: list[dict], seconds: str, spread: str
) -> None:
    """A line through `row[seconds]` and a band over `row[spread]`."""
    colour = LINE_COLOURS[index]
    low, high = np.array([row[spread] for row in rows]).T
    axes.fill_between(values, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(
        values, [row[seconds] for row in rows], label=label, color=colour, linestyle=DASHES[index],
        marker=MARKERS[index], markeredgecolor="white", markeredgewidth=0.4,
    )  # fmt: skip


def _bubbles(counts: np.ndarray, sides: list[tuple[str, list[str]]], title: str) -> Figure:
    """A grid of bubbles.

    Args:
        counts: `[X, Y]` numbers of examples, X across.
        sides: Of X and of Y: what it is, and the labels.
        title: Title of the chart.
    """
    columns, rows = counts.shape
    width = min(CHART_WIDTH / columns, CELL)
    height = max(width, min(LABEL_HEIGHT, CHART_WIDTH / rows))  # inches, room for a line of labels where it goes
    figure = Figure(figsize=(columns * width, rows * height))
    axes = figure.add_axes((0, 0, 1, 1))  # labels stand outside; the file is cut to what is drawn
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(-0.5, rows - 0.5), title=title)
    axes.spines[:].set_visible(True)
    (across, x_labels), (up, y_labels) = sides
    upright = max(map(len, x_labels)) > 3
    step = _label_step(LABEL_HEIGHT if upright else LABEL_WIDTH, width)
    axes.set_xticks(range(0, columns, step), x_labels[::step], rotation=90 if upright else 0)
    step = _label_step(LABEL_HEIGHT, height)
    axes.set_yticks(range(0, rows, step), y_labels[::step])
    axes.set(xlabel=across, ylabel=up)
    axes.grid(True)
    filled = np.argwhere(counts > 0)
    largest = min(max(0.94 * width, BUBBLE), 0.94 * height) / width  # in columns
    areas = counts / counts.max() * largest**2
    _circles(axes, filled, areas[tuple(filled.T)])
    sizes = _key_sizes(counts.max())
    _size_key(axes, sizes, np.array(sizes) / counts.max() * largest**2, width, height)
    return figure


def _circles(axes: Axes, centres: np.ndarray, areas: np.ndarray) -> None:
    """Circles at `centres` [n, 2] with squared diameters `areas` [n] in columns; the small lie on the large."""
    order = np.argsort(-areas, kind="stable")
    diameters = np.sqrt(areas[order])
    circles = EllipseCollection(
        diameters, diameters, np.zeros(len(areas)), units="x", offsets=centres[order],
        offset_transform=axes.transData, color=LINE_COLOURS[0], linewidth=0, alpha=0.85,
        clip_on=False, zorder=3,
    )  # fmt: skip
    axes.add_collection(circles)


def _size_key(axes: Axes, sizes: list[int], areas: np.ndarray, width: float, height: float) -> None:
    """Bubbles with their numbers of examples to the right of the grid, whose cells are `width` x `height` inches."""
    left, top = axes.get_xlim()[1] + 0.1 / width, axes.get_ylim()[1]
    line = 1.1 * max(np.sqrt(areas.max()) * width, LABEL_HEIGHT) / height  # in rows
    centres = np.array([(left + np.sqrt(areas.max()) / 2, top - (0.5 + place) * line) for place in (1, 2, 3)])
    centres = centres[: len(sizes)]
    _circles(axes, centres, areas)
    axes.text(left, top - 0.5 * line, "Examples", va="center")
    for (across, up), size in zip(centres, sizes, strict=True):
        axes.text(across + np.sqrt(areas.max()) / 2 + 0.06 / width, up, f"{size:,}", va="center_baseline")


def _key_sizes(largest: int) -> list[int]:
    """Up to three round numbers of examples, the first the largest of the form 1, 2 or 5 times a power of ten."""
    steps = [factor * 10**power for power in range(12) for factor in (1, 2, 5)]
    below = [step for step in steps if step <= largest]
    return below[::-2][:3]


def _label_step(needed: float, cell: float) -> int:
    """Every how many cells a label stands so that each has `needed` inches: 1, 2, 5, 10, ..."""
    return next(
        step for power in range(12) for step in (10**power, 2 * 10**power, 5 * 10**power) if step * cell >= needed
    )
