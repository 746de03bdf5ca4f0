"""Curves of runs as lines in panels: test accuracy, how far clients drift apart, and accuracy by domain and client."""

from collections import Counter
from collections.abc import Iterable
from itertools import cycle
from statistics import fmean
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedcli.errors import UserError, unknown
from fedcli.figures.plots import DASHES, setting_colours, setting_name, title_words, write_title
from fedcli.results.comparison import printed_accuracy
from fedcli.results.frame import clients_of, rounds_of, state_of
from fedcli.results.tables import SeedGroup, boards, group
from fedcli.runs.records import quiet

WIDTH, HEIGHT = 6.4, 2.8  # inches of a panel with its legend
LEGEND_LINE = 0.17  # inches of a line of text in a legend
FEW = 20  # points of a line up to which each is marked
TOP = 4  # the level of what no line may hide; lines are at 2, legends at 5
BAND = {"alpha": 0.15, "linewidth": 0.4}
CHOSEN = {"marker": "o", "markersize": 7, "fillstyle": "none", "linestyle": "none", "zorder": TOP}
DIVERGED = {"marker": "X", "markersize": 7, "markeredgewidth": 0, "linewidth": 0.8, "zorder": TOP}
ACCURACY, OF_CLIENTS = "test_accuracy", "accuracy of the clients"
AXES = {"round": "Round", "floats": "Floats sent by all clients", "seconds": "Seconds"}  # of learning curves


class Curve(NamedTuple):
    """What is drawn of the runs of a setting.

    Attributes:
        setting: The runs.
        runs: Those behind the line: the finished ones, else the unfinished; none where all diverged.
        line: Their means, a row for each round in which all have a value: `x`, `y`, and of several runs `low` and
            `high`, the mean less and plus the sample standard deviation.
        diverged: `x` and `y` of each run that diverged and has any.
        chosen: Of accuracies, the mean over the runs of the headline and of the round that the rule has chosen for it;
            None where no rule looks for a round. Where runs chose different rounds it lies off the line.
        printed: Of accuracies, the paper's number in percent, see `printed_accuracy`; None where there is none.
    """

    setting: SeedGroup
    runs: list[dict]
    line: pd.DataFrame
    diverged: list[pd.DataFrame]
    chosen: tuple[float, float] | None
    printed: float | None

    @property
    def last(self) -> float:
        """The value of the last round, by which legends are ordered."""
        return max(values.y.iloc[-1] for values in ([self.line] if len(self.line) else self.diverged))

    @property
    def name(self) -> str:
        """What it is called in a legend, with what is left out and with the paper's number."""
        notes = [] if self.setting.finished else ["unfinished" if self.runs else "diverged"]
        others = [state_of(record) for record in self.setting.records if self.runs and record not in self.runs]
        notes += [f"{count} {state}" for state, count in Counter(others).items()]
        if self.printed is not None:
            notes.append(f"paper:\N{NO-BREAK SPACE}{self.printed:.2f}")
        name = setting_name(self.setting) + (f" ({', '.join(notes)})" if notes else "")
        return fill(name, 30, break_long_words=False, break_on_hyphens=False)


def find_curves(groups: list[SeedGroup], measure: str = ACCURACY, x: str = "round") -> list[Curve]:
    """The curve of each group with a value.

    Args:
        groups: The groups.
        measure: A column of `rounds_of`, or what the columns begin with whose mean is drawn, as "intra"; or
            `OF_CLIENTS`, of which the points are clients in place of rounds.
        x: One of `AXES`.
    """
    limits = (None, None) if measure.startswith("drift") else (0, 100)
    curves = []
    for member in groups:
        lost = [record for record in member.records if state_of(record) == "diverged"]
        runs = member.finished or [record for record in member.records if record not in lost]
        rounds = pd.concat([points(record, measure, x) for record in runs or lost]).dropna().groupby(level=0)
        line = rounds.mean()[rounds.size() == len(runs)]
        deviation = rounds.y.std()[line.index]
        line = line.assign(low=(line.y - deviation).clip(*limits), high=(line.y + deviation).clip(*limits))
        diverged = [values for record in lost if len(values := points(record, measure, x).dropna())]
        if line.empty and not diverged:
            continue
        chosen = printed = None
        if measure == ACCURACY:
            printed = printed_accuracy(member.records[0])
            rounds = [record["summary"]["selected_round"] for record in runs]
            if len(line) and member.selection.startswith("best") and None not in rounds:
                headline = fmean(100 * record["summary"]["selected"] for record in runs)
                chosen = float(np.interp(fmean(rounds), line.index, line.x)), headline
        curves.append(Curve(member, runs, line, diverged, chosen, printed))
    return curves


def points(record: dict, measure: str, x: str) -> pd.DataFrame:
    """The rounds of a run, counted from 0, with a value `y` of a measure at `x`, see `find_curves`.

    NaN stands where the record does not say, or not reliably.
    """
    if measure == OF_CLIENTS:
        accuracies = clients_of(record).accuracy.dropna().sort_values(ignore_index=True)
        return pd.DataFrame({"x": accuracies.index + 1, "y": accuracies})
    table = rounds_of(record)
    positions = table["round"]
    if x == "floats":
        last = (record.get("cost") or {}).get("floats_up")  # older records have that of the last round alone
        sent = pd.Series([row.get("floats_up", last) for row in record["rounds"]], dtype=float)
        positions = record["config"]["cohort_size"] * sent.cumsum()
    elif x == "seconds":
        positions = table.filter(like="seconds/").sum(axis=1).cumsum() if quiet(record) else np.nan
    values = table.filter(regex=f"^{measure}(/|$)").mean(axis=1)
    return pd.DataFrame({"x": positions, "y": values}, dtype=float)


def learning_curves(records: Iterable[dict], x: str = "round") -> Figure:
    """Draws test accuracy over rounds, floats or seconds, one line for the runs that agree in everything but the seed.

    The band is the mean ± the sample standard deviation over seeds, within 0 and 100 %. Only finished runs enter them
    where there are any; a run that diverged is a thin line that ends in a cross. The names tell what was left out. A
    ring marks the headline, at the round that the rule has chosen; both are means over seeds, so that with several it
    need not lie on the line. A dotted line is the paper's number, which the name has too, see
    `fedcli.results.comparison.printed_accuracy`.

    Each protocol and data set has a panel, in which a method keeps its colour.

    Args:
        records: The runs.
        x: One of `AXES`.

    Raises:
        UserError: If no run has an evaluated round, or none the floats or undisturbed seconds that are asked for.
    """
    if x not in AXES:
        raise unknown("axis", x, AXES, f"there are {', '.join(AXES)}.")
    records, panels = list(records), []
    usable = [record for record in records if points(record, ACCURACY, x)["x"].notna().all()]
    for runs in boards(usable).values():
        if curves := find_curves(group(runs), x=x):
            panels.append((f"{title_words(runs)} ({runs[0]['protocol']})", "Test accuracy (%)", curves))
    if not panels:
        raise UserError(
            f"no run has an evaluated round with its {x} (got {len(records)} runs; seconds beside other work do not "
            "count); wait for a round to end, or use --x round."
        )
    left_out = len(records) - len(usable)
    return _draw(panels, AXES[x], f"without {x}, left out: {left_out}" if left_out else "")


def drift_figure(records: Iterable[dict]) -> Figure:
    """Draws how far the clients' features and updates drift apart, see `_draw_measures`."""
    labels = "Distance of features", "Similarity of classifier updates"
    measures = dict(zip(("drift/feature_distance", "drift/classifier_similarity"), labels, strict=True))
    return _draw_measures(records, measures, "run with --drift-every")


def domains_figure(records: Iterable[dict]) -> Figure:
    """Draws the accuracy of the clients' models on their own and on other domains, see `_draw_measures`."""
    measures = {"intra": "Accuracy on own domains (%)", "inter": "Accuracy on other domains (%)"}
    return _draw_measures(records, measures, "draw runs of a protocol with evaluation by domain")


def accuracies_figure(records: Iterable[dict]) -> Figure:
    """Draws the accuracies of single clients after the last round, the worst first, see `_draw_measures`."""
    measures = {OF_CLIENTS: "Accuracy of single clients (%)"}
    return _draw_measures(records, measures, "draw runs with validation or own models", "Clients, sorted")


def _draw_measures(records: Iterable[dict], measures: dict[str, str], remedy: str, x_label: str = "Round") -> Figure:
    """Draws measures, with lines, bands and legends as in `learning_curves`.

    Args:
        records: The runs; those that have none of the measures are left out.
        measures: The label of each, see `find_curves`; each has a panel.
        remedy: What a user can do where no run has any.
        x_label: What the points of a line are.

    Raises:
        UserError: If no run has any.
    """
    measured = [record for record in records if any(len(points(record, name, "round").dropna()) for name in measures)]
    if not measured:
        raise UserError(f"no run has measured its {' and '.join(measures.values()).lower()} (got none); {remedy}.")
    panels = [("", label, find_curves(group(measured), name)) for name, label in measures.items()]
    return _draw(panels, x_label, title_words(measured))


def _draw(panels: list[tuple[str, str, list[Curve]]], x_label: str, title: str) -> Figure:
    """The figure of panels: heading, label of the vertical axis, lines; a setting looks the same in all of them."""
    colours = setting_colours([[curve.setting for curve in curves] for *_, curves in panels])
    dashes = dict(zip(dict.fromkeys(colours.values()), cycle(DASHES), strict=False))
    longest = max(sum(curve.name.count("\n") + 1 for curve in curves) for *_, curves in panels)
    height = max(HEIGHT, 0.6 + LEGEND_LINE * longest)
    figure = Figure((WIDTH, height * len(panels)), layout="constrained")
    signs = {}  # what the lines carry, by what the legend below all panels says of it
    for number, (heading, y_label, curves) in enumerate(panels, 1):
        axes = figure.add_subplot(len(panels), 1, number, xlabel=x_label, ylabel=y_label, title=fill(heading, 60))
        lines = {}
        for curve in curves:
            colour = colours[curve.setting.label]
            lines[_draw_curve(axes, curve, colour, dashes[colour])] = curve.last
        signs |= {item.get_label(): item for item in axes.get_legend_handles_labels()[0] if item not in lines}
        handles = sorted(lines, key=lines.get, reverse=True)
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1.03), handlelength=3)
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1, steps=(1, 2, 5, 10)))
        axes.grid(axis="y")
        axes.margins(x=0.02)
        if x_label not in (AXES["floats"], AXES["seconds"]):  # rounds and clients count from 1
            axes.set_xlim(left=0.5)
    for sign in figure.legend(signs.values(), signs, loc="outside lower left", handlelength=3.4).legend_handles:
        sign.set(color="black", alpha=0.4)
    write_title(figure, title)
    return figure


def _draw_curve(axes: Axes, curve: Curve, colour: str, dash: Any) -> Line2D:
    """Draws mean and band of a curve, the runs that diverged, and the numbers it is judged by; returns the mean."""
    line, look = curve.line, {"color": colour, "linestyle": dash}
    (drawn,) = axes.plot(line.x, line.y, label=curve.name, marker="." if len(line) <= FEW else "", **look)
    if len(curve.runs) > 1:
        words = f"mean ± standard deviation over {len(curve.runs)} seeds"
        axes.fill_between(line.x, line.low, line.high, color=colour, label=words, **BAND)
    for lost in curve.diverged:
        words, cross = "diverged after this round", look | DIVERGED
        axes.plot(lost.x, lost.y, gid="diverged", label=words, markevery=[len(lost) - 1], **cross)
    if curve.chosen is not None:
        words = f"the headline: {curve.setting.selection}"
        axes.plot(*curve.chosen, gid="chosen", label=words, color=colour, clip_on=False, **CHOSEN)
    if curve.printed is not None:
        words = "the paper's number for the line of its colour"
        axes.axhline(curve.printed, gid="printed", label=words, color=colour, linestyle=":", linewidth=0.8)
    return drawn
