"""Matrices of classes by classes: what images are taken for, and how alike the clients' logits are.

`confusion` draws what the test images that `quality` has kept are taken for: a panel a setting, in rows of three.

`correlation` draws cross-correlations of the clients' logits, class by class. Every client's own model after the last
round, in evaluation mode, is given the same images: some of the public ones, and some of each client's own training
images. A client's logits are correlated with the mean logits of all clients, on the public images and on its own ones,
and the matrices are averaged over the clients. They go into the records, so that the figure can be drawn again.
"""

from collections.abc import Iterable, Sequence
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from fedcli.core.batches import generator
from fedcli.core.clients import Network, Params
from fedcli.core.evaluation import Model, models
from fedcli.core.federation import Federation
from fedcli.core.trees import tree_map
from fedcli.errors import UserError
from fedcli.figures.plots import STYLE, chart
from fedcli.figures.quality import Shown, kept_outputs, one_a_setting
from fedcli.registry import find_method
from fedcli.runs.consent import with_own_files
from fedcli.runs.owner import owned
from fedcli.runs.prepare import machine_settings
from fedcli.runs.records import read_record, write_record
from fedcli.runs.run import open_run

SHARES_MAP = "Blues"  # one hue from white: the same order in grey print and for colour-blind readers, and little ink
NUMBERED = 10  # classes; of more, numbers and names would overlap
ACROSS = 3  # panels of confusion in a row
SIDE, CORRELATION_SIDE = 2.5, 2.0  # inches, width and height of a matrix
DARK = 71  # percent, from where on white numbers can be read better than black ones
NUMBER = 5.5  # points, the size of the numbers
TITLE, ROW_TITLE = 38, 30  # characters that a panel of confusion is wide, and one of correlation high
EXAMPLES = 500  # public images at most, and of each client's own
SEED = 0  # of their choice, so that all runs are measured on the same ones
SMALL = 1e-5  # added to deviations, which can be 0
CORRELATIONS_MAP = "RdBu_r"  # diverging, white at 0; colour-blind readers tell its ends apart


class Confusion(NamedTuple):
    """One setting's matrix."""

    title: str
    shares: np.ndarray  # [C, C]


class Matrices(NamedTuple):
    """One setting's cross-correlations, means over the clients; a row is a class of a client, a column of the mean."""

    title: str
    public: np.ndarray  # [C, C]
    private: np.ndarray  # [C, C]


@chart("confusion", "what the test images of each class are taken for, after 'fedcli quality'", "folders")
def confusion_chart(paths: Iterable[Path]) -> Figure:
    """Draws what finished runs take the test images of each class for, a panel for those that differ beside the seed.

    Of several seeds the first is drawn.

    Args:
        paths: Run folders, or folders that hold run folders.

    Raises:
        UserError: If the runs are of several data sets, or their outputs have not been kept.
    """
    shown, title = one_a_setting(paths)
    return confusion_figure([_confusion(run) for run in shown], shown[0].record["class_names"], title)


def _confusion(run: Shown) -> Confusion:
    """The panel of one run."""
    label, kept = kept_outputs(run)
    labels, predicted = kept["labels"], kept["predicted"]
    right = 100 * (labels == predicted).mean()
    title = f"{fill(label, TITLE)}\n{right:.1f} % of {len(labels):,} images right"
    return Confusion(title, confusion(labels, predicted, len(run.record["class_names"])))


def confusion(labels: np.ndarray, predicted: np.ndarray, num_classes: int) -> np.ndarray:
    """How many percent of the images of a class are taken for each class.

    Args:
        labels: Their classes, `[n]`.
        predicted: What they are taken for, `[n]`.
        num_classes: C.

    Returns:
        `[C, C]`, row by true class, each row with the sum 100; NaN for a class without images.
    """
    counts = np.zeros((num_classes, num_classes))
    np.add.at(counts, (labels, predicted), 1)
    sizes = counts.sum(1, keepdims=True)
    return 100 * np.divide(counts, sizes, out=np.full_like(counts, np.nan), where=sizes > 0)


def confusion_figure(panels: Sequence[Confusion], class_names: Sequence[str], title: str) -> Figure:
    """The figure of such panels, in rows."""
    columns = min(len(panels), ACROSS)
    rows = ceil(len(panels) / columns)
    figure = Figure(figsize=(SIDE * columns + 0.9, (SIDE + 1.3) * rows - 0.3), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    numbered = len(class_names) <= NUMBERED
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, panel in zip(grid.flat, panels, strict=False):
        first = axes in grid[:, 0]
        image = axes.imshow(panel.shares, cmap=SHARES_MAP, vmin=0, vmax=100)
        axes.set(title=panel.title, xlabel="taken for", xticks=[], yticks=[])
        axes.spines[:].set_visible(True)
        if numbered:
            places = range(len(class_names))
            longest = max(map(len, class_names))
            axes.set_xticks(places, class_names, rotation=90 if longest > 2 else 0)
            axes.set_yticks(places, class_names if first else [""] * len(class_names))
            axes.tick_params(length=0)
            _write_numbers(axes, panel.shares)
        if first:
            axes.set_ylabel("class" if numbered else f"{len(class_names)} classes")
    figure.colorbar(image, ax=grid, label="% of the class", shrink=0.8 / rows, pad=0.02)
    figure.suptitle(title, fontsize=STYLE["axes.titlesize"])
    return figure


def _write_numbers(axes: Axes, shares: np.ndarray) -> None:
    """Writes each cell's percentage into it, white where the cell is dark, nothing where it rounds to 0."""
    for (row, column), share in np.ndenumerate(shares):
        if share >= 0.5:
            colour = "white" if share > DARK else "black"
            axes.text(column, row, f"{share:.0f}", ha="center", va="center", fontsize=NUMBER, color=colour)


@chart("correlation", "how alike the logits of personal models are, on public and on private images", "models")
def correlation_chart(paths: Iterable[Path], method: Sequence[str] = ()) -> Figure:
    """Draws the cross-correlation of the clients' logits with their mean, a row for runs that differ beyond the seed.

    On the left they are of public images: those of the run, or where it has none those of the first one shown that
    has. On the right they are of the clients' own training images. Of several seeds the first is drawn. Where all
    records have their matrices these are drawn, and no checkpoint is needed.

    Args:
        paths: Run folders, or folders that hold run folders.
        method: The user's files that the runs need, see `resume`.

    Raises:
        UserError: If the runs are of several data sets or none has public images, or one has no personal models, no
            checkpoint or another one's.
    """
    shown, title = one_a_setting(paths)
    kept = [run.record.get("correlation") for run in shown]
    if not all(kept):
        kept = _measure(shown, method)
    rows = []
    for run, own in zip(shown, kept, strict=True):
        rows.append(Matrices(run.label, np.array(own["public"]), np.array(own["private"])))
    return correlation_figure(rows, title)


def _measure(shown: Sequence[Shown], method: Sequence[str]) -> list[dict[str, list]]:
    """Measures the matrices of runs, `public` and `private`, and writes them into their records."""
    _refuse(shown, method)
    lender = next(run.folder for run in shown if run.record["config"].get("public_dataset"))
    lent = public_sample(open_run(lender, method).fed)
    found = []
    for run in shown:
        public, private = correlations(run.folder, lent, method)
        found.append({"public": public.tolist(), "private": private.tolist()})
        with owned(run.folder):
            write_record(run.folder, {**read_record(run.folder), "correlation": found[-1]})
    return found


def _refuse(shown: Sequence[Shown], method: Sequence[str]) -> None:
    """Refuses runs that no figure can be made of."""
    for _, record, folder in shown:
        own = with_own_files(record, method, "the same command with")
        if find_method(own["method_source"]).personal is None:
            raise UserError(f"'{record['method']}' has no personal models (got {folder}); leave the run out.")
    if not any(run.record["config"].get("public_dataset") for run in shown):
        raise UserError(f"no run has public images (got {len(shown)} without); add a run of a method that uses them.")


def correlations(folder: Path, lent: Tensor, method: Sequence[str] = ()) -> tuple[np.ndarray, np.ndarray]:
    """The mean cross-correlations `[C, C]` of a finished run on public images and on private ones.

    Args:
        folder: Of the run, with its last checkpoint.
        lent: `[n, channels, H, W]`, normalised public images for a run that has none.
        method: The user's files that the run needs, see `resume`.

    Raises:
        UserError: If the checkpoint is missing or another one's, or no client has two images.
    """
    run = open_run(folder, method)
    fed = run.fed
    with machine_settings(fed):
        clients = [model for _, model in models(fed, run.method, run.state, range(fed.num_clients))]
        public = lent.to(fed.device, fed.dtype) if fed.public_images is None else public_sample(fed)
        return on_public(clients, public).cpu().numpy(), on_private(clients, fed).cpu().numpy()


def public_sample(fed: Federation) -> Tensor:
    """Some public images `[n, channels, H, W]`, normalised and not augmented."""
    chosen = generator(SEED, "correlation").permutation(len(fed.public_images))[:EXAMPLES]
    return fed.public_transform(fed.public_images[torch.as_tensor(chosen, device=fed.device)])


def private_sample(fed: Federation, client: int) -> Tensor:
    """Some of a client's training images `[n, channels, H, W]`, normalised and not augmented."""
    part = fed.training[client]
    chosen = part[generator(SEED, client, "correlation").permutation(len(part))[:EXAMPLES]]
    return fed.transform(fed.engine.images[torch.as_tensor(chosen, device=fed.device)])


def on_public(clients: Sequence[Model], images: Tensor) -> Tensor:
    """The clients' mean cross-correlation `[C, C]` on the same images `[n, channels, H, W]`."""
    logits = score(clients, images)
    return torch.stack([cross_correlation(own, logits.mean(0)) for own in logits]).mean(0)


def on_private(clients: Sequence[Model], fed: Federation) -> Tensor:
    """The clients' mean cross-correlation `[C, C]`, each on its own images; those with less than two are left out."""
    found = []
    for client, part in enumerate(fed.training):
        if len(part) > 1:
            logits = score(clients, private_sample(fed, client))
            found.append(cross_correlation(logits[client], logits.mean(0)))
    if not found:
        raise UserError("no client has two training images (got one or none each); a correlation needs larger clients.")
    return torch.stack(found).mean(0)


@torch.no_grad()
def score(clients: Sequence[Model], images: Tensor) -> Tensor:
    """Logits `[N, n, C]` of the clients' models in evaluation mode, in double precision."""

    def logits(network: Network, *model: Params) -> Tensor:
        params, buffers = tree_map(lambda leaf: leaf.to(images.device), model)
        return network(params, buffers, images, train=False).logits

    return torch.stack([logits(*model) for model in clients]).double()


def cross_correlation(logits: Tensor, mean_logits: Tensor) -> Tensor:
    """Correlation of each class's logits with each class's mean logits, over images.

    Columns are standardised by their unbiased deviation, and the sum over images is divided by n: the correlation of a
    column with itself is (n - 1) / n, or 0 where it is constant.

    Args:
        logits: Of one client, `[n, C]`, n at least 2.
        mean_logits: Of all clients, `[n, C]`.

    Returns:
        `[C, C]`, in [-1, 1]; a row is a class of the client, a column one of the mean.
    """
    return standardise(logits).T @ standardise(mean_logits) / len(logits)


def standardise(logits: Tensor) -> Tensor:
    """Every column minus its mean, over its unbiased deviation; `[n, C]`."""
    return (logits - logits.mean(0)) / (logits.std(0) + SMALL)


def correlation_figure(rows: Sequence[Matrices], title: str) -> Figure:
    """The figure with a row for each setting; all panels have one scale, from -1 to 1."""
    figure = Figure(
        figsize=(2 * CORRELATION_SIDE + 1.9, len(rows) * (CORRELATION_SIDE + 0.3) + 0.8), layout="constrained"
    )
    panels = figure.subplots(len(rows), 2, squeeze=False, sharex=True, sharey=True)
    for pair, row in zip(panels, rows, strict=True):
        for axes, matrix in zip(pair, row[1:], strict=True):
            drawn = axes.imshow(matrix, cmap=CORRELATIONS_MAP, vmin=-1, vmax=1, interpolation="nearest")
            axes.set_title(_numbers(matrix))
            axes.spines[:].set_visible(True)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        pair[0].set_ylabel(f"{fill(row.title, ROW_TITLE)}\n\nClass of a client")
    for axes, heading in zip(panels[0], ("Public images", "Private images"), strict=True):
        axes.set_title(f"{heading}\n{axes.get_title()}")
    for axes in panels[-1]:
        axes.set_xlabel("Class of the mean")
    figure.suptitle(title, fontsize=STYLE["axes.titlesize"])
    figure.colorbar(drawn, ax=panels, label="Cross-correlation of logits", shrink=min(1, 1.5 / len(rows)), aspect=25)
    return figure


def _numbers(matrix: np.ndarray) -> str:
    """Mean of the diagonal and of the rest."""
    same = np.eye(len(matrix), dtype=bool)
    return f"diagonal {matrix[same].mean():.2f}, others {matrix[~same].mean():.2f}"
