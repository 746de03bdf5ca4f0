"""Curves of runs as lines in panels: test accuracy, how far clients drift apart, and accuracy by domain."""

from collections import Counter
from collections.abc import Callable, Iterable
from math import ceil
from statistics import fmean
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fedcli.errors import UserError, unknown
from fedcli.figures.plots import DASHES, method_name, setting_colours, setting_name, title_words, write_title
from fedcli.registry import protocols
from fedcli.results.comparison import printed_accuracies
from fedcli.results.tables import SeedGroup, boards, group
from fedcli.runs.config import given_options
from fedcli.runs.records import quiet, reductions_of
from fedcli.runs.settings import NOT_SETTINGS, settings_text

WIDTH, HEIGHT = 6.4, 2.8  # inches of a panel with its legend
STACKED = 2  # panels that stand above each other; more stand two in a row
LEGEND_WIDTH = 30  # characters in a line of a legend
MANY, THIN = 300, 0.7  # points of a line from which it is so thin, as it would look like a surface
FEW = 20  # points of a line up to which each is marked
TOP = 4  # the level of what no line may hide; lines are at 2, legends at 5
GREY = "#555555"
BAND = {"alpha": 0.18, "linewidth": 0}  # around a line, in its colour
HEADLINE = {"marker": "o", "markersize": 7, "fillstyle": "none", "linestyle": "none", "zorder": TOP}
DIVERGED = {"marker": "X", "markersize": 7, "markeredgewidth": 0, "linewidth": 0.8, "zorder": TOP}
PRINTED = {"linestyle": ":", "linewidth": 0.8}  # the paper's number
RULES = {"best-validation": "the round chosen by validation", "best-test": "the best round on the test set"}
TOLD = {"protocol", "dataset", "partition", "rounds", "eval_every", *NOT_SETTINGS}  # titles and axes tell them
READ = Callable[[dict], float | None]  # from what a record says of a round to a value; None where there is none
ALONG = Callable[[dict], list[float]]  # from a record to the places of its rounds on the horizontal axis


# The numbers


class Curve(NamedTuple):
    """What is drawn of the runs of a setting.

    Attributes:
        setting: The runs.
        runs: Those behind the line: the finished ones, else the unfinished, else those that diverged.
        places: Where the rounds in which all of these have a value stand on the horizontal axis; mean over runs, `[R]`.
        mean: Mean over runs `[R]`; empty where all diverged, as each is drawn alone then.
        band: Mean less and plus the sample standard deviation, within the limits; None of a single run.
        diverged: Places and values `[2, R]` of each run that diverged and has any.
        headline: Of accuracies, place and height of the number in tables, means over runs; None where no rule looks for
            a round.
        printed: Of accuracies, the paper's number in percent, see `printed_accuracies`; None where there is none.
    """

    setting: SeedGroup
    runs: list[dict]
    places: np.ndarray
    mean: np.ndarray
    band: tuple[np.ndarray, np.ndarray] | None
    diverged: list[np.ndarray]
    headline: tuple[float, float] | None
    printed: float | None

    @property
    def last(self) -> float:
        """The value of the last round, by which legends are ordered."""
        return self.mean[-1] if len(self.mean) else max(values[-1] for _, values in self.diverged)


def round_numbers(record: dict) -> list[float]:
    """The rounds, counted from 1."""
    return [row["round"] + 1 for row in record["rounds"]]


def floats_sent(record: dict) -> list[float]:
    """Floats that all clients together have sent up to the end of each round; none where that is not recorded."""
    last = (record.get("cost") or {}).get("floats_up")  # older records have that of the last round alone
    sent = [row.get("floats_up", last) for row in record["rounds"]]
    return [] if None in sent else (record["config"]["cohort_size"] * np.cumsum(sent, dtype=float)).tolist()


def seconds_taken(record: dict) -> list[float]:
    """Seconds up to the end of each round; none of a run that other work disturbed."""
    return np.cumsum([sum(row["seconds"].values()) for row in record["rounds"]]).tolist() if quiet(record) else []


# What learning curves can stand over: the label, the places, and what no run does where none has any.
AXES: dict[str, tuple[str, ALONG, str]] = {
    "round": ("Round", round_numbers, "has ended a round"),
    "floats": ("Floats sent by all clients", floats_sent, "tells what it sent"),
    "seconds": ("Seconds", seconds_taken, "has measured its seconds on a quiet machine"),
}


def accuracy_percent(row: dict) -> float | None:
    """Test accuracy of a round in percent; None where it was not evaluated."""
    accuracy = row.get("test_accuracy")
    return None if accuracy is None else 100 * accuracy


def find_curves(
    groups: list[SeedGroup],
    read: READ = accuracy_percent,
    along: ALONG = round_numbers,
    limits: tuple[float, float] = (0, 100),
) -> list[Curve]:
    """The curve of each group with a value.

    Args:
        groups: The groups.
        read: See `READ`.
        along: See `ALONG`.
        limits: The least and the largest value that there can be.
    """

    def points(record: dict) -> np.ndarray:  # places and values, NaN where there is none: [2, R]
        return np.array([along(record), [read(row) for row in record["rounds"]]], dtype=float)

    curves, judged = [], read is accuracy_percent
    numbers = printed_accuracies([member.records[0] for member in groups]) if judged else [None] * len(groups)
    for member, printed in zip(groups, numbers, strict=True):
        lost = member.diverged
        diverged = [run[:, ~np.isnan(run[1])] for run in map(points, lost)]
        diverged = [run for run in diverged if run.size]
        drawn = member.finished or [record for record in member.records if record not in lost] or lost
        shortest = min(len(record["rounds"]) for record in drawn)
        table = np.array([points(record)[:, :shortest] for record in drawn])  # [n, 2, R]
        shared = np.flatnonzero(~np.isnan(table).any((0, 1)))  # rounds, counted from 0
        if not len(shared) and not diverged:
            continue
        places, mean = table[..., shared].mean(0)
        band = headline = None
        if len(table) > 1:
            deviation = table[:, 1, shared].std(0, ddof=1)
            band = np.clip(mean - deviation, *limits), np.clip(mean + deviation, *limits)
        summaries = [record["summary"] for record in drawn]
        searched = all(each["selection"].startswith("best") and each["selected"] is not None for each in summaries)
        if judged and searched and len(shared):
            place = np.interp(fmean(each["selected_round"] for each in summaries), shared, places)
            headline = float(place), 100 * fmean(each["selected"] for each in summaries)
        if drawn is lost:
            places, mean, band = places[:0], mean[:0], None
        curves.append(Curve(member, drawn, places, mean, band, diverged, headline, printed))
    return curves


# The figures


class Panel(NamedTuple):
    """What one panel shows."""

    title: str
    y_label: str
    curves: list[Curve]


def learning_curves(records: Iterable[dict], x: str = "round") -> Figure:
    """Draws test accuracy over rounds, floats or seconds, one line for the runs that agree in everything but the seed.

    The band is the mean ± the sample standard deviation over seeds, within 0 and 100 %. Only finished runs enter them
    where there are any; a run that diverged is a thin line that ends in a cross. The names tell what was left out. A
    ring has the height of the number in tables and stands at the round, the mean over seeds, that the rule has chosen.
    A dotted line is the paper's number, which the name has too, see `fedcli.results.comparison.printed_accuracies`.

    Runs of several protocols or data sets have a panel for each, in which a method keeps its colour.

    Args:
        records: The runs.
        x: One of `AXES`.

    Raises:
        UserError: If no run has an evaluated round, or none the floats or undisturbed seconds that are asked for.
    """
    if x not in AXES:
        raise unknown("axis", x, AXES, f"there are {', '.join(AXES)}.")
    x_label, along, lack = AXES[x]
    records = list(records)
    usable = [record for record in records if not record["rounds"] or along(record)]
    if records and not usable:
        raise UserError(f"no run {lack} (got {len(records)}); draw them with --x round.")
    panels = []
    for runs in boards(usable).values():
        curves = find_curves(group(runs), along=along)
        if curves:
            panels.append(Panel(f"{title_words(runs)} ({runs[0]['protocol']})", "Test accuracy (%)", curves))
    if not panels:
        raise UserError("no run has an evaluated round (got none to draw); a curve needs one; wait for a round to end.")
    titles = []
    if len(panels) == 1:
        titles.append(_title(panels[0].curves))
        panels = [panels[0]._replace(title="")]
    if len(usable) < len(records):
        titles.append(f"without {x}, left out: {len(records) - len(usable)}")
    return _draw(panels, x_label, ", ".join(titles))


def drift_figure(records: Iterable[dict]) -> Figure:
    """Draws over rounds the distance of the clients' features and the similarity of their classifiers' updates.

    Lines, bands and legends are those of `learning_curves`; runs that did not measure it are left out.

    Raises:
        UserError: If no run has measured it.
    """
    measures = {
        "Distance of features": lambda row: row.get("drift", {}).get("feature_distance"),
        "Similarity of classifier updates": lambda row: row.get("drift", {}).get("classifier_similarity"),
    }
    return _draw_measures(list(records), measures, (-np.inf, np.inf), "run with --drift-every")


def domains_figure(records: Iterable[dict]) -> Figure:
    """Draws over rounds the accuracy of the clients' models on their own domains and on the others, means over domains.

    Lines, bands and legends are those of `learning_curves`; runs that were not tested by domain are left out.

    Raises:
        UserError: If no run was tested by domain.
    """
    measures = {
        "Accuracy on own domains (%)": lambda row: _percent(row.get("intra")),
        "Accuracy on other domains (%)": lambda row: _percent(row.get("inter")),
    }
    return _draw_measures(list(records), measures, (0, 100), "draw runs of a protocol with evaluation by domain")


def _percent(accuracies: dict[str, float] | None) -> float | None:
    return 100 * fmean(accuracies.values()) if accuracies else None


def _draw_measures(records: list[dict], measures: dict[str, READ], limits: tuple[float, float], remedy: str) -> Figure:
    """The figure of the runs that have any of some measures over rounds, a panel for each measure by its label."""
    measured = []
    for record in records:
        values = [read(row) for row in record["rounds"] for read in measures.values()]
        if any(value is not None for value in values):
            measured.append(record)
    if not measured:
        wanted = " and ".join(measures).lower()
        raise UserError(f"no run has measured its {wanted} (got {len(records)} runs); {remedy}.")
    groups = group(measured)
    panels = [Panel("", label, find_curves(groups, read, limits=limits)) for label, read in measures.items()]
    return _draw(panels, "Round", _title(panels[0].curves))


def _title(curves: list[Curve]) -> str:
    """What all runs have in common, in words: method, data, seeds, and where all leave the protocol."""
    records = [record for curve in curves for record in curve.setting.records]
    smaller = {reduction["what"] for record in records for reduction in reductions_of(record)}
    protocol = protocols().get(records[0]["protocol"])
    usual = protocol.settings if protocol else {}
    options = [given_options(record["config"], record.get("origin", {})) for record in records]
    shared = {}
    for name, value in options[0].items():
        is_told = name in TOLD | smaller or (name in usual and usual[name] == value)
        if not is_told and all((name, value) in given.items() for given in options):
            shared[name] = value
    most = max(len(curve.runs) for curve in curves)
    words = [f"{most} seeds" if most > 1 else "1 seed"]
    if shared:
        words.append(f"with {settings_text(shared)}")
    names = {method_name(record) for record in records}
    start = f"{names.pop()}, " if len(names) == 1 else ""
    return start + title_words(records, *words)


def _draw(panels: list[Panel], x_label: str, title: str) -> Figure:
    """The figure of some panels; a setting looks the same in all of them."""
    colours = setting_colours([[curve.setting for curve in panel.curves] for panel in panels])
    dashes = {colour: DASHES[number % len(DASHES)] for number, colour in enumerate(dict.fromkeys(colours.values()))}
    across = 1 if len(panels) <= STACKED else 2
    down = ceil(len(panels) / across)
    figure = Figure(layout="constrained")
    longest = 0
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(down, across, number, xlabel=x_label, ylabel=panel.y_label)
        axes.set_title(fill(panel.title, 60))
        most = max(len(curve.runs) for curve in panel.curves)
        lines = {}
        for curve in panel.curves:
            colour = colours[curve.setting.label]
            line = _draw_curve(axes, curve, {"color": colour, "linestyle": dashes[colour]})
            line.set_label(_name(curve, most))
            lines[line] = curve.last
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1, steps=(1, 2, 5, 10)))
        axes.margins(x=0.02)
        axes.grid(axis="y")
        if x_label == AXES["round"][0]:  # there is no round 0
            axes.set_xlim(left=1 if max(axes.dataLim.x1, 1) > FEW else 0.5)
        by_last_value = sorted(lines, key=lines.get, reverse=True)
        legend = axes.legend(handles=by_last_value, loc="upper left", bbox_to_anchor=(1, 1.03), handlelength=3)
        longest = max(longest, sum(text.get_text().count("\n") + 1 for text in legend.get_texts()))
    signs = _signs(panels)
    figure.legend(handles=signs, loc="outside lower left", ncols=across, handlelength=3.4)
    height = max(HEIGHT, 0.6 + 0.17 * longest)  # a line of text takes 0.17 inches
    figure.set_size_inches(across * WIDTH, down * height + 0.16 * ceil(len(signs) / across))
    write_title(figure, title)
    return figure


def _draw_curve(axes: Axes, curve: Curve, look: dict[str, Any]) -> Line2D:
    """Draws mean and band of a curve, the runs that diverged, and the numbers it is judged by; its line."""
    colour, points = look["color"], len(curve.mean)
    (line,) = axes.plot(curve.places, curve.mean, marker="." if points <= FEW else "", **look)
    if points > MANY:
        line.set_linewidth(THIN)
    if curve.band is not None:
        axes.fill_between(curve.places, *curve.band, color=colour, **BAND)
    for places, values in curve.diverged:
        axes.plot(places, values, gid="diverged", markevery=[len(values) - 1], **{**look, **DIVERGED})
    if curve.headline is not None:
        axes.plot(*curve.headline, gid="headline", color=colour, clip_on=False, **HEADLINE)
    if curve.printed is not None:
        axes.axhline(curve.printed, gid="printed", color=colour, **PRINTED)
    return line


def _name(curve: Curve, most: int) -> str:
    """The name of a line, with the number of runs where others have more, and with what is left out."""
    member = curve.setting
    notes = [f"n = {len(curve.runs)}"] if len(curve.runs) < most else []
    if not member.finished:
        notes.append("unfinished" if len(curve.mean) else "diverged")
    others = [record for record in member.records if record not in curve.runs]
    states = ("diverged" if record in member.diverged else "unfinished not shown" for record in others)
    notes += [f"{count} {state}" for state, count in Counter(states).items()]
    if curve.printed is not None:
        notes.append(f"paper:\N{NO-BREAK SPACE}{curve.printed:.2f}")
    name = setting_name(member) + (f" ({', '.join(notes)})" if notes else "")
    return fill(name, LEGEND_WIDTH, break_long_words=False, break_on_hyphens=False)


def _signs(panels: list[Panel]) -> list[Patch | Line2D]:
    """What the legend below all panels explains: bands, rings, crosses and dotted lines, each where there is one."""
    curves = [curve for panel in panels for curve in panel.curves]
    signs: list[Patch | Line2D] = []
    counts = sorted({len(curve.runs) for curve in curves if curve.band is not None})
    if counts:
        seeds = " or ".join(map(str, counts))
        signs.append(Patch(label=f"mean ± standard deviation over {seeds} seeds", color=GREY, **BAND))
    rules = sorted({curve.setting.selection for curve in curves if curve.headline is not None})
    if rules:
        rounds = " or ".join(RULES.get(rule, rule) for rule in rules)
        signs.append(Line2D([], [], label=f"the tables' number, at {rounds}", color=GREY, **HEADLINE))
    if any(curve.diverged for curve in curves):
        signs.append(Line2D([], [], label="diverged after this round", color=GREY, **DIVERGED))
    if any(curve.printed is not None for curve in curves):
        signs.append(Line2D([], [], label="the paper's number for the line of its colour", color=GREY, **PRINTED))
    return signs
