"""Curves of runs as lines in panels: test accuracy, how far clients drift apart, and accuracy by domain."""

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
from fedcli.figures.plots import DASHES, colours, method_name, setting_name, title_words, write_title
from fedcli.figures.series import AXES, Curve, find_curves
from fedcli.registry import protocols
from fedcli.results.boards import boards
from fedcli.results.tables import group
from fedcli.runs.config import given_options
from fedcli.runs.records import reductions_of
from fedcli.runs.settings import NOT_SETTINGS, settings_text

WIDTH, HEIGHT = 6.4, 2.8  # inches of a panel with its legend
STACKED = 2  # panels that stand above each other; more stand two in a row
LEGEND_WIDTH = 30  # characters in a line of a legend
MANY, THIN = 300, 0.7  # points of a line from which it is so thin, as it would look like a surface
FEW = 20  # points of a line up to which each is marked
TOP = 4  # the level of what no line may hide; lines are at 2, legends at 5
BAND = {"alpha": 0.18, "linewidth": 0}  # around a line, in its colour
HEADLINE = {"marker": "o", "markersize": 7, "fillstyle": "none", "linestyle": "none", "zorder": TOP}
DIVERGED = {"marker": "X", "markersize": 7, "markeredgewidth": 0, "linewidth": 0.8, "zorder": TOP}
PRINTED = {"linestyle": ":", "linewidth": 0.8}  # the paper's number
RULES = {"best-validation": "the round chosen by validation", "best-test": "the best round on the test set"}
DRIFT = {"feature_distance": "Distance of features", "classifier_similarity": "Similarity of classifier updates"}
DOMAINS = {"intra": "Accuracy on own domains (%)", "inter": "Accuracy on other domains (%)"}
SHOWN = ("protocol", "dataset", "partition", "rounds", "eval_every")  # options that titles and curves tell anyway


class Panel(NamedTuple):
    """What one panel shows.

    Attributes:
        curves: The curves.
        y_label: Of the vertical axis.
        limits: The least and the largest value that there can be.
        headline: Whether it is the accuracy that the runs are judged by: the paper's number is shown too, and the
            number of our tables where a rule chooses a round.
        title: Above the panel.
    """

    curves: list[Curve]
    y_label: str
    limits: tuple[float, float]
    headline: bool = False
    title: str = ""


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
    x_label, along = AXES[x]
    records = list(records)
    usable = [record for record in records if not record["rounds"] or along(record)]
    if records and not usable:
        why = "has measured its seconds on a quiet machine" if x == "seconds" else "tells what it sent"
        raise UserError(f"no run {why} (got {len(records)}); draw them with --x round.")
    panels = []
    for runs in boards(usable).values():
        if curves := find_curves(group(runs), along=along):
            title = f"{title_words(runs)} ({runs[0]['protocol']})"
            panels.append(Panel(curves, "Test accuracy (%)", (0, 100), headline=True, title=title))
    if not panels:
        raise UserError("no run has an evaluated round (got none to draw); a curve needs one; wait for a round to end.")
    notes = [f"without {x}, left out: {len(records) - len(usable)}"] if len(usable) < len(records) else []
    if len(panels) == 1:
        notes.insert(0, _title(panels[0].curves))
        panels = [panels[0]._replace(title="")]
    return _panels_figure(panels, x_label, ", ".join(notes))


def drift_figure(records: Iterable[dict]) -> Figure:
    """Draws over rounds the distance of the clients' features and the similarity of their classifiers' updates.

    Lines, bands and legends are those of `learning_curves`; runs that did not measure it are left out.

    Raises:
        UserError: If no run has measured it.
    """

    def read(row: dict, key: str) -> float | None:
        return row.get("drift", {}).get(key)

    measured = []
    for record in records:
        values = [read(row, key) for row in record["rounds"] for key in DRIFT]
        if any(value is not None for value in values):
            measured.append(record)
    if not measured:
        raise UserError("no run has measured the drift of its clients (got none to draw); run with --drift-every.")
    return _two_measures(measured, DRIFT, read, (-np.inf, np.inf))


def domains_figure(records: Iterable[dict]) -> Figure:
    """Draws over rounds the accuracy of the clients' models on their own domains and on the others, means over domains.

    Lines, bands and legends are those of `learning_curves`; runs that were not tested by domain are left out.

    Raises:
        UserError: If no run was tested by domain.
    """

    def read(row: dict, key: str) -> float | None:
        accuracies = row.get(key)
        return 100 * fmean(accuracies.values()) if accuracies else None

    records = list(records)
    measured = [record for record in records if any(row.get("intra") for row in record["rounds"])]
    if not measured:
        protocols = ", ".join(sorted({record["protocol"] for record in records})) or "no run"
        raise UserError(
            f"no run was tested on its clients' own and other domains (got {protocols}); only protocols with "
            f"evaluation by domain do so; draw runs of these."
        )
    return _two_measures(measured, DOMAINS, read, (0, 100))


def _two_measures(
    records: list[dict],
    labels: dict[str, str],
    read: Callable[[dict, str], float | None],
    limits: tuple[float, float],
) -> Figure:
    """Curves over rounds, a panel for each measure.

    Args:
        records: The runs.
        labels: By the key of each measure the label of its axis.
        read: From what a record says of a round, and the key, to the value; None where there is none.
        limits: The least and the largest value that there can be.
    """
    groups = group(records)
    panels = []
    for key, label in labels.items():
        panels.append(Panel(find_curves(groups, lambda row, key=key: read(row, key)), label, limits))
    return _panels_figure(panels, "Round", _title(panels[0].curves))


def _panels_figure(panels: list[Panel], x_label: str, title: str) -> Figure:
    """The figure of some panels; a setting looks the same in all of them."""
    once = all(len({curve.setting.method for curve in panel.curves}) == len(panel.curves) for panel in panels)
    key = "method" if once else "label"  # a method keeps its look where no panel has several settings of one
    names = [getattr(curve.setting, key) for panel in panels for curve in panel.curves]
    looks = {}
    for index, (name, colour) in enumerate(colours(names).items()):
        looks[name] = {"color": colour, "linestyle": DASHES[index % len(DASHES)]}
    across = 1 if len(panels) <= STACKED else 2
    down = ceil(len(panels) / across)
    figure = Figure(layout="constrained")
    longest = 0
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(down, across, number)
        of_curves = [looks[getattr(curve.setting, key)] for curve in panel.curves]
        _draw_curves(axes, panel, of_curves, x_label == AXES["round"][0])
        axes.set(title=fill(panel.title, 60), xlabel=x_label, ylabel=panel.y_label)
        longest = max(longest, sum(text.get_text().count("\n") + 1 for text in axes.get_legend().get_texts()))
    signs = _signs(panels)
    figure.legend(handles=signs, loc="outside lower left", ncols=across, handlelength=3.4)
    height = max(HEIGHT, 0.6 + 0.17 * longest)  # a line of text takes 0.17 inches
    figure.set_size_inches(across * WIDTH, down * height + 0.16 * ceil(len(signs) / across))
    write_title(figure, title)
    return figure


def _draw_curves(axes: Axes, panel: Panel, looks: list[dict[str, Any]], over_rounds: bool) -> None:
    """Draws mean and band of each curve, and a legend in the order of their last values."""
    lines = {}
    most = max(len(curve.drawn) for curve in panel.curves)
    for curve, look in zip(panel.curves, looks, strict=True):
        colour = look["color"]
        places = curve.places[: len(curve.mean)]
        thin = {"linewidth": THIN} if len(places) > MANY else {}
        marker = "." if len(places) <= FEW else ""
        (line,) = axes.plot(places, curve.mean, label=_name(curve, panel, most), marker=marker, **look, **thin)
        lines[line] = curve.last
        if curve.deviation is not None:
            low = np.clip(curve.mean - curve.deviation, *panel.limits)
            high = np.clip(curve.mean + curve.deviation, *panel.limits)
            axes.fill_between(places, low, high, color=colour, **BAND)
        for run_places, values in curve.diverged:
            axes.plot(run_places, values, gid="diverged", markevery=[len(values) - 1], **{**look, **DIVERGED})
        if panel.headline and curve.headline is not None:
            axes.plot(*curve.headline, gid="headline", color=colour, clip_on=False, **HEADLINE)
        if panel.headline and curve.printed is not None:
            axes.axhline(curve.printed, gid="printed", color=colour, **PRINTED)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1, steps=(1, 2, 5, 10)))
    axes.margins(x=0.02)
    axes.grid(axis="y")
    if over_rounds:  # there is no round 0
        axes.set_xlim(left=1 if max(axes.dataLim.x1, 1) > FEW else 0.5)
    by_last_value = sorted(lines, key=lines.get, reverse=True)
    axes.legend(handles=by_last_value, loc="upper left", bbox_to_anchor=(1, 1.03), handlelength=3)


def _name(curve: Curve, panel: Panel, most: int) -> str:
    """The name of a line, with the number of runs where others have more, and with what is left out."""
    member, count = curve.setting, len(curve.drawn)
    left_out = len(member.records) - count - len(member.diverged)
    notes = [f"n = {count}"] if count < most else []
    if curve.all_diverged:
        notes.append("diverged")
    else:
        if not member.finished:
            notes.append("unfinished")
        if left_out:
            notes.append(f"{left_out} unfinished not shown")
        if member.diverged:
            notes.append(f"{len(member.diverged)} diverged")
    if panel.headline and curve.printed is not None:
        notes.append(f"paper:\N{NO-BREAK SPACE}{curve.printed:.2f}")
    name = setting_name(member) + (f" ({', '.join(notes)})" if notes else "")
    return fill(name, LEGEND_WIDTH, break_long_words=False, break_on_hyphens=False)


def _title(curves: list[Curve]) -> str:
    """What all runs have in common, in words, and how many there are of each setting."""
    records = [record for curve in curves for record in curve.setting.records]
    most = max(len(curve.drawn) for curve in curves)
    words = [f"{most} seeds" if most > 1 else "1 seed"]
    if shared := settings_text(_shared_options(records)):
        words.append(f"with {shared}")
    names = {method_name(record) for record in records}
    start = f"{names.pop()}, " if len(names) == 1 else ""
    return start + title_words(records, *words)


def _shared_options(records: list[dict]) -> dict[str, Any]:
    """The options given with all runs of a protocol that are not what it says, nor told by the rest of the figure."""
    told = {*SHOWN, *NOT_SETTINGS}
    for record in records:
        told |= {reduction["what"] for reduction in reductions_of(record)}
    protocol = protocols().get(records[0]["protocol"])
    usual = protocol.settings if protocol else {}
    options = [given_options(record["config"], record.get("origin", {})) for record in records]
    shared = {}
    for name, value in options[0].items():
        is_usual = name in usual and usual[name] == value
        if name not in told and not is_usual and all((name, value) in given.items() for given in options):
            shared[name] = value
    return shared


def _signs(panels: list[Panel]) -> list[Patch | Line2D]:
    """What the legend below all panels explains: bands, rings, crosses and dotted lines, each where there is one."""
    curves = [curve for panel in panels for curve in panel.curves]
    judged = [curve for panel in panels for curve in panel.curves if panel.headline]
    signs: list[Patch | Line2D] = []
    if counts := sorted({len(curve.values) for curve in curves if curve.deviation is not None}):
        seeds = " or ".join(map(str, counts))
        signs.append(Patch(label=f"mean ± standard deviation over {seeds} seeds", color="#555555", **BAND))
    if rules := {curve.setting.selection for curve in judged if curve.headline is not None}:
        rounds = " or ".join(RULES.get(rule, rule) for rule in sorted(rules))
        signs.append(Line2D([], [], label=f"the tables' number, at {rounds}", color="#555555", **HEADLINE))
    if any(curve.diverged for curve in curves):
        signs.append(Line2D([], [], label="diverged after this round", color="#555555", **DIVERGED))
    if any(curve.printed is not None for curve in judged):
        label = "the paper's number for the line of its colour"
        signs.append(Line2D([], [], label=label, color="#555555", **PRINTED))
    return signs
