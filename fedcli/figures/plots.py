"""The look, words and files of all figures; partitions as matrices, and curves of runs.

`write` draws a figure in `STYLE` and saves it; the same input gives the same bytes. Figures are made without pyplot,
which keeps global state and wants a window system.
"""

import io
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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
from PIL import Image

from fedcli.declarations import SELECTIONS
from fedcli.errors import UserError, unknown
from fedcli.files import write_atomically
from fedcli.registry import methods
from fedcli.results.frame import clients_of, rounds_of
from fedcli.results.tables import SeedGroup, agreed, boards, group, printed_accuracy
from fedcli.runs.identity import is_packaged, reductions
from fedcli.runs.machine import quiet
from fedcli.runs.record import state_of

STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that every machine draws the same
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.titlesize": 9,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "savefig.bbox": "tight",  # cut to what it shows
    "savefig.dpi": 300,
    "savefig.pad_inches": 0.04,
    "pdf.fonttype": 42,  # fonts as text that can be edited and searched
    "svg.hashsalt": "fedcli",
    "text.parse_math": False,  # a name may have a dollar sign
}
# Okabe and Ito's colours, which colour-blind readers tell apart, and five more; their yellow is too pale on white.
LINE_COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000",
    "#882255", "#999933", "#888888", "#6A3D9A", "#8B4513",
)  # fmt: skip
# Each has more gaps than the one before, and hides no line that is drawn earlier.
DASHES = (
    "-", (0, (5, 1.5)), (0, (4, 1.2, 1, 1.2)), (0, (3, 2)), (0, (6, 2, 1, 2, 1, 2)), (0, (1.2, 1.2)), (0, (1.2, 3)),
)  # fmt: skip
UNDATED = {".png": {}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}  # metadata of each kind of file
DATASETS = {
    "mnist": "MNIST", "fmnist": "Fashion-MNIST", "mnist-m": "MNIST-M", "femnist": "FEMNIST", "svhn": "SVHN",
    "usps": "USPS", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "cinic10": "CINIC-10",
    "tiny-imagenet": "Tiny-ImageNet",
}  # fmt: skip
PARTITIONS = {  # words for `--partition NAME:VALUE`
    "iid": "IID", "dirichlet": "Dirichlet {}", "classes": "{} classes a client", "writers": "whole writers",
    "dominant": "dominant classes a client: {}", "missing": "missing classes a client: {}",
}  # fmt: skip
NAMED = 26  # classes of a partition; the names of more would overlap
LEGEND_LINE = 0.17  # inches of a line of text in a legend
SIGN = {"markersize": 7, "zorder": 4}  # of rings and crosses, which no line hides; lines are at 2, legends at 5
ACCURACY, OF_CLIENTS = "test_accuracy", "accuracy of the clients"
AXES = {"round": "Round", "floats": "Floats sent by all clients", "seconds": "Seconds"}  # of learning curves


def colours(names: Iterable[str]) -> dict[str, str]:
    """A different colour for each name."""
    names = list(dict.fromkeys(names))
    shades = map(to_hex, matplotlib.colormaps["turbo"](np.linspace(0.02, 0.98, len(names))))
    return dict(zip(names, LINE_COLOURS if len(names) <= len(LINE_COLOURS) else shades, strict=False))


def setting_colours(boards: Sequence[Sequence[SeedGroup]]) -> dict[str, str]:
    """A colour for each setting, by its label; one a method where no board has several settings of a method."""
    members = [member for board in boards for member in board]
    if all(len({member.method for member in board}) == len(board) for board in boards):
        of_method = colours(member.method for member in members)
        return {member.label: of_method[member.method] for member in members}
    return colours(member.label for member in members)


def setting_name(member: SeedGroup) -> str:
    """The label of a setting, with the method's name as in its paper unless the user has given a label."""
    record = member.records[0]
    method = methods().get(record["method"])
    if "label" in record or method is None or not is_packaged(record):
        return member.label
    return method.title.partition(":")[0] + member.label.removeprefix(method.name)


def data_words(dataset: str = "", partition: str = "", *more: str) -> str:
    """Data in words, as in "Digits, Dirichlet 0.5"; other partitions than those of `PARTITIONS` as they are typed."""
    name, _, value = partition.partition(":")
    division = PARTITIONS.get(name, partition).format(value.replace(":", ", "))
    return ", ".join(filter(None, [DATASETS.get(dataset, dataset[:1].upper() + dataset[1:]), division, *more]))


def title_words(records: Sequence[dict], *more: str) -> str:
    """What runs share, in words: "Digits, Dirichlet 0.5, seed 0; reduced: rounds 4 of 100"."""
    shared = agreed(records)
    title = data_words(shared.get("dataset", ""), shared.get("partition", ""), *more)
    smaller = {", ".join(reductions(record).values()) for record in records} - {""}
    return f"{title}; reduced: {' or '.join(sorted(smaller))}" if smaller else title


def write_title(figure: Figure, title: str) -> None:
    """Writes the title over a figure, in lines as wide as the figure."""
    figure.suptitle(fill(title, int(15 * figure.get_figwidth())))


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


def write(out: Path, draw: Callable[..., Figure], *given: Any, page: bool = False) -> list[Path]:
    """Writes the figure that `draw(*given)` returns, in `STYLE` and without dates.

    Args:
        out: A `.pdf`, `.svg` or `.png` file; a PDF is written beside a PNG.
        draw: Returns the figure.
        *given: Its arguments.
        page: Write one small PNG, for a page in a repository.

    Returns:
        The files.

    Raises:
        UserError: If `out` has another suffix.
    """
    if out.suffix not in UNDATED:
        raise UserError(f"--out must end in .png, .pdf or .svg (got '{out}'); choose one of them.")
    files = [out, out.with_suffix(".pdf")] if out.suffix == ".png" and not page else [out]
    with matplotlib.rc_context(STYLE):
        figure = draw(*given)
        out.parent.mkdir(parents=True, exist_ok=True)
        for file in files:
            save = partial(figure.savefig, format=file.suffix[1:], metadata=UNDATED[file.suffix])
            write_atomically(file, (lambda path: path.write_bytes(small_png(figure))) if page else save)
    return files


def small_png(figure: Figure) -> bytes:
    """The figure as a PNG for a screen, with a palette of 256 colours: a third of the bytes."""
    picture, small = io.BytesIO(), io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(picture, format="png", dpi=110)
    Image.open(picture).convert("RGB").quantize(256).save(small, "png", optimize=True)
    return small.getvalue()


# Curves of runs as lines in panels


class Curve(NamedTuple):
    """A setting's runs as a line.

    Attributes:
        setting: All runs.
        runs: Those behind the line: the finished ones, else the unfinished; none where all diverged.
        line: Their means, a row for each round in which all have a value: `x`, `y`, and the band `low` to `high`, the
            mean less and plus the sample standard deviation.
        diverged: `x` and `y` of each run that diverged and has values.
        chosen: Of accuracies, the mean headline at the mean of the rounds that the rule has chosen, `(x, y)`; it may
            lie off the line. None where no rule looks for a round.
        printed: Of accuracies, the paper's number in percent or None, see `printed_accuracy`.
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
        """The name in a legend, with the numbers of runs that have not finished, and the paper's number."""
        states = Counter(map(state_of, self.setting.records))
        notes = [f"{count}\N{NO-BREAK SPACE}{state}" for state, count in states.items() if state != "finished"]
        if self.printed is not None:
            notes.append(f"paper:\N{NO-BREAK SPACE}{self.printed:.2f}")
        name = setting_name(self.setting) + (f" ({', '.join(notes)})" if notes else "")
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
    for member in groups:
        lost = [record for record in member.records if state_of(record) == "diverged"]
        runs = member.finished or [record for record in member.records if record not in lost]
        rounds = pd.concat([points(record, measure, x) for record in runs or lost]).groupby(level=0)
        line = rounds.mean()[rounds.size() == len(runs)]
        deviation = rounds.y.std()[line.index]
        line = line.assign(low=(line.y - deviation).clip(*limits), high=(line.y + deviation).clip(*limits))
        diverged = [values for record in lost if len(values := points(record, measure, x))]
        if line.empty and not diverged:
            continue
        chosen = printed = None
        if measure == ACCURACY:
            printed = printed_accuracy(member.records[0])
            ends = [record["summary"] for record in runs if member.selection.startswith("best")]
            selected = [(end["selected_round"], 100 * end["selected"]) for end in ends if end["selected"] is not None]
            if len(line) and selected:
                number, headline = map(fmean, zip(*selected, strict=True))
                chosen = float(np.interp(number, line.index, line.x)), headline
        curves.append(Curve(member, runs, line, diverged, chosen, printed))
    return curves


def points(record: dict, measure: str, x: str) -> pd.DataFrame:
    """The rounds of a run, by number from 0, that have a value `y` of a measure and an `x`, see `find_curves`."""
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
    return pd.DataFrame({"x": positions, "y": values}, dtype=float).dropna()


def _draw_measures(
    measures: dict[str, str], remedy: str, records: Iterable[dict], x: str = "round", x_label: str = ""
) -> Figure:
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

    Raises:
        UserError: If no run has a value, or none has the floats or the undisturbed seconds.
    """
    if x not in AXES:
        raise unknown("axis", x, AXES, f"there are {', '.join(AXES)}.")
    records, panels = list(records), []
    measured = [record for record in records if any(len(points(record, name, x)) for name in measures)]
    for runs in boards(measured).values():
        members, heading = group(runs), f"{title_words(runs)} ({runs[0]['protocol']})"
        panels += [(heading, label, find_curves(members, name, x)) for name, label in measures.items()]
    if not panels:
        labels = " and ".join(measures.values()).lower()
        raise UserError(f"no run has measured its {labels} (got {len(records)} runs); {remedy}.")
    left_out = len(records) - len(measured)
    return _draw(panels, x_label or AXES[x], f"left out, without values: {left_out}" if left_out else "")


# Test accuracy.
learning_curves = partial(
    _draw_measures, {ACCURACY: "Test accuracy (%)"},
    "wait for a round to end, or use --x round, as seconds beside other work do not count",
)  # fmt: skip
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


def _draw(panels: list[tuple[str, str, list[Curve]]], x_label: str, title: str) -> Figure:
    """The figure of panels: heading, label of the vertical axis, lines; a setting looks the same in all of them."""
    colours = setting_colours([[curve.setting for curve in curves] for *_, curves in panels])
    dashes = dict(zip(dict.fromkeys(colours.values()), cycle(DASHES), strict=False))
    longest = max(sum(curve.name.count("\n") + 1 for curve in curves) for *_, curves in panels)
    figure = Figure(layout="constrained")
    signs = {}  # what the lines carry, by what the legend below all panels says of it
    for number, (heading, y_label, curves) in enumerate(panels, 1):
        axes = figure.add_subplot(len(panels), 1, number, xlabel=x_label, ylabel=y_label, title=fill(heading, 60))
        lines = {}
        for curve in curves:
            colour = colours[curve.setting.label]
            lines[_draw_curve(axes, curve, {"color": colour, "linestyle": dashes[colour]})] = curve.last
        signs |= {item.get_label(): item for item in axes.get_legend_handles_labels()[0] if item not in lines}
        handles = sorted(lines, key=lines.get, reverse=True)
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1.03), handlelength=3)
        axes.locator_params("x", integer=True, min_n_ticks=1, steps=(1, 2, 5, 10))
        axes.grid(axis="y")
        axes.margins(x=0.02)
        if x_label not in (AXES["floats"], AXES["seconds"]):  # rounds and clients count from 1
            axes.set_xlim(left=0.5)
    for sign in figure.legend(signs.values(), signs, loc="outside lower left", handlelength=3.4).legend_handles:
        sign.set(color="black", alpha=0.4)
    figure.set_size_inches(6.4, max(3, 0.6 + LEGEND_LINE * longest) * len(panels) + LEGEND_LINE * len(signs))
    write_title(figure, title)
    return figure


def _draw_curve(axes: Axes, curve: Curve, look: dict[str, Any]) -> Any:
    """Draws mean and band of a curve, the runs that diverged, and the numbers it is judged by; returns the mean."""
    line, colour = curve.line, look["color"]
    (drawn,) = axes.plot(line.x, line.y, label=curve.name, marker="." if len(line) <= 20 else "", **look)
    if len(curve.runs) > 1:
        words = f"mean ± standard deviation over {len(curve.runs)} seeds"
        axes.fill_between(line.x, line.low, line.high, color=colour, label=words, alpha=0.15, linewidth=0.4)
    for lost in curve.diverged:
        cross = {**look, **SIGN, "marker": "X", "markeredgewidth": 0, "markevery": [len(lost) - 1], "linewidth": 0.8}
        axes.plot(lost.x, lost.y, gid="diverged", label="diverged after this round", **cross)
    if curve.chosen is not None:
        words = f"headline: {SELECTIONS[curve.setting.selection]}"
        axes.plot(*curve.chosen, "o", gid="chosen", label=words, color=colour, fillstyle="none", clip_on=False, **SIGN)
    if curve.printed is not None:
        words = "the paper's number for the line of its colour"
        axes.axhline(curve.printed, gid="printed", label=words, color=colour, linestyle=":", linewidth=0.8)
    return drawn
