"""Curves of runs as lines in panels: test accuracy, how far clients drift apart, and accuracy by domain and client."""

from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import cycle
from math import ceil
from statistics import fmean
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator

from fedcli.errors import UserError, unknown
from fedcli.figures.plots import DASHES, method_name, setting_colours, setting_name, title_words, write_title
from fedcli.results.comparison import printed_accuracy
from fedcli.results.frame import clients_of, rounds_of, state_of
from fedcli.results.tables import SeedGroup, boards, group
from fedcli.runs.records import quiet

WIDTH, HEIGHT = 6.4, 2.8  # inches of a panel with its legend
FEW = 20  # points of a line up to which each is marked
TOP = 4  # the level of what no line may hide; lines are at 2, legends at 5
GREY = "#555555"
BAND = {"alpha": 0.15, "linewidth": 0.4}
CHOSEN = {"marker": "o", "markersize": 7, "fillstyle": "none", "linestyle": "none", "zorder": TOP}
DIVERGED = {"marker": "X", "markersize": 7, "markeredgewidth": 0, "linewidth": 0.8, "zorder": TOP}
PRINTED = {"linestyle": ":", "linewidth": 0.8}  # the paper's number
RULES = {
    "best-validation": "the headline: the round chosen by validation",
    "best-test": "the headline: the best round on the test set",
}
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
        printed = printed_accuracy(member.records[0]) if measure == ACCURACY else None
        chosen, chosen_rounds = None, [record["summary"]["selected_round"] for record in runs]
        if measure == ACCURACY and member.selection in RULES and len(line) and None not in chosen_rounds:
            headline = fmean(100 * record["summary"]["selected"] for record in runs)
            chosen = float(np.interp(fmean(chosen_rounds), line.index, line.x)), headline
        if len(line) or diverged:
            curves.append(Curve(member, runs, line, diverged, chosen, printed))
    return curves


def points(record: dict, measure: str, x: str) -> pd.DataFrame:
    """The rounds of a run, counted from 0, with a value `y` of a measure and its place `x`, see `find_curves`.

    NaN stands where the record does not say, or not reliably.
    """
    if measure == OF_CLIENTS:
        accuracies = clients_of(record).accuracy.dropna().sort_values(ignore_index=True)
        return pd.DataFrame({"x": accuracies.index + 1, "y": accuracies})
    table = rounds_of(record)
    columns = [name for name in table if name == measure or name.startswith(f"{measure}/")]
    places = table["round"]
    if x == "floats":
        last = (record.get("cost") or {}).get("floats_up")  # older records have that of the last round alone
        sent = pd.Series([row.get("floats_up", last) for row in record["rounds"]], dtype=float)
        places = record["config"]["cohort_size"] * sent.cumsum()
    elif x == "seconds":
        places = table.filter(like="seconds/").sum(axis=1).cumsum() if quiet(record) else np.nan
    return pd.DataFrame({"x": places, "y": table[columns].mean(axis=1)}, dtype=float)


def learning_curves(records: Iterable[dict], x: str = "round") -> Figure:
    """Draws test accuracy over rounds, floats or seconds, one line for the runs that agree in everything but the seed.

    The band is the mean ± the sample standard deviation over seeds, within 0 and 100 %. Only finished runs enter them
    where there are any; a run that diverged is a thin line that ends in a cross. The names tell what was left out. A
    ring marks the headline, at the round that the rule has chosen; both are means over seeds, so that with several it
    need not lie on the line. A dotted line is the paper's number, which the name has too, see
    `fedcli.results.comparison.printed_accuracy`.

    Runs of several protocols or data sets have a panel for each, in which a method keeps its colour.

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
    titles = [_title(panels[0][2])] if len(panels) == 1 else []
    if len(usable) < len(records):
        titles.append(f"without {x}, left out: {len(records) - len(usable)}")
    return _draw(panels, AXES[x], ", ".join(titles))


def _draw_measures(measures: dict[str, str], remedy: str, records: Iterable[dict], x_label: str = "Round") -> Figure:
    """Draws measures, with lines, bands and legends as in `learning_curves`.

    Args:
        measures: The label of each, see `find_curves`; each has a panel.
        remedy: What a user can do where no run has any.
        records: The runs; those that have none of the measures are left out.
        x_label: What the points of a line are.

    Raises:
        UserError: If no run has any.
    """
    measured = [record for record in records if any(len(points(record, name, "round").dropna()) for name in measures)]
    if not measured:
        raise UserError(f"no run has measured its {' and '.join(measures.values()).lower()} (got none); {remedy}.")
    panels = [("", label, find_curves(group(measured), name)) for name, label in measures.items()]
    return _draw(panels, x_label, _title(panels[0][2]))


# How far the clients' features and updates drift apart.
drift_figure = partial(
    _draw_measures,
    {
        "drift/feature_distance": "Distance of features",
        "drift/classifier_similarity": "Similarity of classifier updates",
    },
    "run with --drift-every",
)
# The accuracy of the clients' models on their own and on other domains.
domains_figure = partial(
    _draw_measures,
    {"intra": "Accuracy on own domains (%)", "inter": "Accuracy on other domains (%)"},
    "draw runs of a protocol with evaluation by domain",
)
# The accuracies of single clients after the last round, the worst first.
accuracies_figure = partial(
    _draw_measures,
    {OF_CLIENTS: "Accuracy of single clients (%)"},
    "draw runs with validation or own models",
    x_label="Clients, sorted",
)


def _title(curves: list[Curve]) -> str:
    """What all runs have in common, in words: method, data and the number of seeds."""
    records = [record for curve in curves for record in curve.setting.records]
    most = max(len(curve.runs or curve.setting.records) for curve in curves)
    names = {method_name(record) for record in records}
    words = title_words(records, f"{most} seeds" if most > 1 else "1 seed")
    return f"{names.pop()}, {words}" if len(names) == 1 else words


def _draw(panels: list[tuple[str, str, list[Curve]]], x_label: str, title: str) -> Figure:
    """The figure of panels: title, label of the vertical axis, lines; a setting looks the same in all of them."""
    colours = setting_colours([[curve.setting for curve in curves] for *_, curves in panels])
    dashes = dict(zip(dict.fromkeys(colours.values()), cycle(DASHES), strict=False))
    across = 1 if len(panels) <= 2 else 2
    down = ceil(len(panels) / across)
    figure, longest, signs = Figure(layout="constrained"), 0, {}
    for number, (heading, y_label, curves) in enumerate(panels, 1):
        axes = figure.add_subplot(down, across, number, xlabel=x_label, ylabel=y_label)
        axes.set_title(fill(heading, 60) if len(panels) > 1 else "")
        lines = {}
        for curve in curves:
            colour = colours[curve.setting.label]
            lines[_draw_curve(axes, curve, colour, dashes[colour], signs)] = curve.last
        handles = sorted(lines, key=lines.get, reverse=True)
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1.03), handlelength=3)
        longest = max(longest, sum(line.get_label().count("\n") + 1 for line in handles))
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1, steps=(1, 2, 5, 10)))
        axes.grid(axis="y")
        axes.margins(x=0.02)
        if x_label == AXES["floats"]:
            axes.xaxis.set_major_formatter(EngFormatter())
        elif x_label != AXES["seconds"]:  # there is no round 0
            axes.set_xlim(left=0.5)
    figure.legend(handles=list(signs.values()), loc="outside lower left", ncols=across, handlelength=3.4)
    height = max(HEIGHT, 0.6 + 0.17 * longest)  # a line of text takes 0.17 inches
    figure.set_size_inches(across * WIDTH, down * height + 0.16 * ceil(len(signs) / across))
    write_title(figure, title)
    return figure


def _draw_curve(axes: Axes, curve: Curve, colour: str, dash: Any, signs: dict[str, Artist]) -> Line2D:
    """Draws mean and band of a curve, the runs that diverged, and the numbers it is judged by.

    Returns:
        The line; what the legend below all panels explains of the others, by its text, is added to `signs`.
    """

    def explain(words: str, sign: Any, **look: Any) -> None:
        signs[words] = sign(label=words, color=GREY, **look)

    line, look, sign = curve.line, {"color": colour, "linestyle": dash}, partial(Line2D, [], [])
    (drawn,) = axes.plot(line.x, line.y, label=curve.name, marker="." if len(line) <= FEW else "", **look)
    if len(curve.runs) > 1:
        axes.fill_between(line.x, line.low, line.high, color=colour, **BAND)
        explain(f"mean ± standard deviation over {len(curve.runs)} seeds", Patch, **BAND)
    for lost in curve.diverged:
        axes.plot(lost.x, lost.y, gid="diverged", markevery=[len(lost) - 1], **look | DIVERGED)
        explain("diverged after this round", sign, **DIVERGED)
    if curve.chosen is not None:
        axes.plot(*curve.chosen, gid="chosen", color=colour, clip_on=False, **CHOSEN)
        explain(RULES[curve.setting.selection], sign, **CHOSEN)
    if curve.printed is not None:
        axes.axhline(curve.printed, gid="printed", color=colour, **PRINTED)
        explain("the paper's number for the line of its colour", sign, **PRINTED)
    return drawn
