"""t-SNE of the features that `fedcli.figures.quality` has kept: one panel a setting, in rows of five.

Where the features are of a client's own model and of test images of several domains, a setting is a row, with a panel
for each domain, the client's own first.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from sklearn.manifold import TSNE

from fedcli.errors import UserError
from fedcli.figures.plots import STYLE, save
from fedcli.figures.quality import FEATURES, one_a_setting

# Paul Tol's muted scheme, which colour-blind readers tell apart, and black. Further classes are not drawn.
COLOURS = (
    "#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#AA4499", "#000000",
)  # fmt: skip
PERPLEXITY = 30
ACROSS = 5  # panels in a row where each is a setting
PANEL = 1.7  # inches, width and height
TITLE = 28  # characters that a panel is wide


class Panel(NamedTuple):
    """One setting's features in the plane."""

    title: str
    points: np.ndarray  # [n, 2]
    labels: np.ndarray  # [n]
    row: str = ""  # the setting, in the first of several panels


def embedding_chart(paths: Iterable[Path], out: Path) -> list[Path]:
    """Draws the features of finished runs in the plane, a panel or a row for those that differ in more than the seed.

    Of several seeds the first is drawn, and of more than ten classes the first ten.

    Args:
        paths: Run folders, or folders that hold run folders.
        out: Where to write, without suffix.

    Returns:
        The two files, PNG and PDF.

    Raises:
        UserError: If the runs are of several data sets, or their features have not been kept.
    """
    shown, title = one_a_setting(paths)
    rows = [_row(*run) for run in shown]
    columns = max(map(len, rows))
    if columns == 1:  # one panel a setting: as many in a row as a page is wide
        columns, every = min(len(rows), ACROSS), [panel for row in rows for panel in row]
        rows = [every[start : start + columns] for start in range(0, len(every), columns)]
    panels = [panel for row in rows for panel in (*row, *[None] * (columns - len(row)))]
    with matplotlib.rc_context(STYLE):
        return save(embedding_figure(panels, shown[0].record["class_names"], title, columns), out)


def _row(label: str, record: dict, folder: Path) -> list[Panel]:
    """The panels of one run."""
    if "quality" not in record or not (folder / FEATURES).is_file():
        raise UserError(
            f"the features of '{folder}' have not been kept (got no {FEATURES}); run 'fedcli quality' first."
        )
    with np.load(folder / FEATURES) as file:
        kept = dict(file)
    quality = record["quality"]
    label += f", client\N{NO-BREAK SPACE}{quality['client']}" if "client" in quality else ""
    if "domains" not in quality:
        return [_panel(label, kept["features"], kept["labels"], quality)]
    names, own = list(quality["domains"]), quality["domain"]
    row = []
    for name in (own, *(other for other in names if other != own)):
        shown = kept["domains"] == names.index(name)
        about = quality["domains"][name]
        row.append(_panel(f"{own} → {name}", kept["features"][shown], kept["labels"][shown], about))
    return [row[0]._replace(row=label), *row[1:]]


def _panel(title: str, features: np.ndarray, labels: np.ndarray, quality: dict[str, float]) -> Panel:
    """The panel of some features."""
    shown = labels < len(COLOURS)
    numbers = f"NMI {quality['nmi']:.2f}, silhouette {quality['silhouette']:.2f}"
    return Panel(f"{fill(title, TITLE)}\n{numbers}", embed(features[shown]), labels[shown])


def embed(features: np.ndarray) -> np.ndarray:
    """t-SNE in two dimensions.

    Args:
        features: `[n, D]`.

    Returns:
        `[n, 2]`.
    """
    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    return TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(features)


def embedding_figure(panels: Sequence[Panel | None], class_names: Sequence[str], title: str, columns: int) -> Figure:
    """The figure of `embedding_chart`, to be drawn under `STYLE`, in rows of so many `columns`; None stays empty."""
    present = sorted({int(label) for panel in panels if panel for label in np.unique(panel.labels)})
    rows = len(panels) // columns
    figure = Figure(figsize=(PANEL * max(columns, 2), rows * (PANEL + 0.4) + 0.5), layout="constrained")
    for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, panels, strict=True):
        if panel is None:
            axes.set_axis_off()
            continue
        order = np.random.default_rng(0).permutation(len(panel.labels))  # so that no class lies above all others
        colours = np.array(COLOURS)[panel.labels[order]]
        axes.scatter(*panel.points[order].T, c=colours, s=3, linewidths=0, rasterized=True)
        axes.set(title=panel.title, ylabel=fill(panel.row, TITLE), xticks=[], yticks=[])
        axes.set_box_aspect(1)
        axes.spines[:].set_visible(True)
    left_out = len(class_names) - len(COLOURS)
    note = f"; the first {len(COLOURS)} of {len(class_names)} classes" if left_out > 0 else ""
    figure.suptitle(title + note, fontsize=STYLE["axes.titlesize"], fontweight="bold")
    handles = [
        Line2D([], [], linestyle="none", marker="o", markeredgewidth=0, color=COLOURS[label], label=class_names[label])
        for label in present
    ]
    label_width = 0.4 + 0.065 * max(len(class_names[label]) for label in present)  # inches
    side_by_side = max(1, min(len(handles), int(figure.get_figwidth() / label_width)))
    figure.legend(handles=handles, loc="outside lower center", ncols=side_by_side, columnspacing=1, handletextpad=0.2)
    return figure
