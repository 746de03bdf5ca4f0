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

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from sklearn.metrics import ConfusionMatrixDisplay, confusion_matrix
from torch import Tensor

from fedcli.core.batches import generator
from fedcli.core.evaluation import Model, models
from fedcli.core.federation import Federation
from fedcli.core.trees import tree_map
from fedcli.errors import UserError
from fedcli.figures.plots import write_title
from fedcli.figures.quality import Shown, kept_outputs, one_a_setting
from fedcli.registry import find_method
from fedcli.runs.lock import locked
from fedcli.runs.prepare import machine_settings
from fedcli.runs.records import read_record, write_record
from fedcli.runs.run import open_run
from fedcli.runs.trust import trust_files

NUMBERED = 10  # classes; of more, numbers and names would overlap
ACROSS = 3  # panels of confusion in a row
SIDE = 2.5  # inches, width and height of a matrix
TITLE = 38  # characters that a panel is wide
EXAMPLES = 500  # public images at most, and of each client's own
SEED = 0  # of their choice, so that all runs are measured on the same ones
SMALL = 1e-5  # added to deviations, which can be 0


def confusion_chart(paths: Iterable[Path]) -> Figure:
    """Draws what finished runs take the test images of each class for, a panel for those that differ beside the seed.

    A cell is a share of its row in percent. Of several seeds the first is drawn.

    Args:
        paths: Run folders, or folders that hold run folders.

    Raises:
        UserError: If the runs are of several data sets, or their outputs have not been kept.
    """
    shown, title = one_a_setting(paths)
    class_names = shown[0].record["class_names"]
    numbered = len(class_names) <= NUMBERED
    columns = min(len(shown), ACROSS)
    rows = ceil(len(shown) / columns)
    figure = Figure(figsize=(SIDE * columns + 0.9, (SIDE + 1) * rows), layout="constrained")
    panels = []
    for number, run in enumerate(shown):
        label, kept = kept_outputs(run)
        labels, predicted = kept["labels"], kept["predicted"]
        shares = 100 * confusion_matrix(labels, predicted, labels=range(len(class_names)), normalize="true")
        axes = figure.add_subplot(rows, columns, number + 1)
        display = ConfusionMatrixDisplay(shares, display_labels=class_names if numbered else None)
        display.plot(
            ax=axes, cmap="Blues", colorbar=False, include_values=numbered, values_format=".0f",
            im_kw={"vmin": 0, "vmax": 100}, text_kw={"fontsize": 5.5}, xticks_rotation="vertical",
        )  # fmt: skip
        right = 100 * (labels == predicted).mean()
        axes.set(title=f"{fill(label, TITLE)}\n{right:.1f} % of {len(labels):,} images right", xlabel="taken for")
        axes.set_ylabel("" if number % columns else "class" if numbered else f"{len(class_names)} classes")
        if number % columns or not numbered:
            axes.set_yticks([])
        if not numbered:
            axes.set_xticks([])
        panels.append(axes)
    figure.colorbar(display.im_, ax=panels, label="% of the class", shrink=0.8 / rows, pad=0.02)
    write_title(figure, title)
    return figure


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
    figure = Figure(figsize=(2 * SIDE + 1.2, len(shown) * (SIDE + 0.3) + 0.8), layout="constrained")
    panels = figure.subplots(len(shown), 2, squeeze=False, sharex=True, sharey=True)
    for pair, run, matrices in zip(panels, shown, kept, strict=True):
        for axes, key in zip(pair, ("public", "private"), strict=True):
            matrix = np.array(matrices[key])
            same = np.eye(len(matrix), dtype=bool)
            image = axes.imshow(matrix, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
            numbers = f"diagonal {matrix[same].mean():.2f}, others {matrix[~same].mean():.2f}"
            axes.set(title=f"{key.capitalize()} images\n{numbers}", xlabel="Class of the mean")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        pair[0].set_ylabel(f"{fill(run.label, TITLE)}\n\nClass of a client")
    figure.colorbar(image, ax=panels, label="Cross-correlation of logits", shrink=min(1, 1.5 / len(shown)), aspect=25)
    write_title(figure, title)
    return figure


def _measure(shown: Sequence[Shown], method: Sequence[str]) -> list[dict[str, list]]:
    """Measures the matrices of runs, `public` and `private`, and writes them into their records."""
    for _, record, folder in shown:
        source = trust_files(record, method)["method_source"]
        if find_method(source).personal is None:
            raise UserError(f"'{record['method']}' has no personal models (got {folder}); leave the run out.")
    lenders = [run.folder for run in shown if run.record["config"].get("public_dataset")]
    if not lenders:
        raise UserError(f"no run has public images (got {len(shown)} without); add a run of a method that uses them.")
    lent = public_sample(open_run(lenders[0], method).fed)
    measured = []
    for run in shown:
        public, private = correlations(run.folder, lent, method)
        measured.append({"public": public.tolist(), "private": private.tolist()})
        with locked(run.folder):
            write_record(run.folder, {**read_record(run.folder), "correlation": measured[-1]})
    return measured


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
        logits = score(clients, public)
        on_public = torch.stack([cross_correlation(own, logits.mean(0)) for own in logits]).mean(0)
        return on_public.cpu().numpy(), on_private(clients, fed).cpu().numpy()


def public_sample(fed: Federation) -> Tensor:
    """Some public images `[n, channels, H, W]`, normalised and not augmented."""
    chosen = generator(SEED, "correlation").permutation(len(fed.public_images))[:EXAMPLES]
    return fed.public_transform(fed.public_images[torch.as_tensor(chosen, device=fed.device)])


def private_sample(fed: Federation, client: int) -> Tensor:
    """Some of a client's training images `[n, channels, H, W]`, normalised and not augmented."""
    part = fed.training[client]
    chosen = part[generator(SEED, client, "correlation").permutation(len(part))[:EXAMPLES]]
    return fed.transform(fed.engine.images[torch.as_tensor(chosen, device=fed.device)])


def on_private(clients: Sequence[Model], fed: Federation) -> Tensor:
    """The clients' mean cross-correlation `[C, C]`, each on its own images; those with less than two are left out."""
    matrices = []
    for client, part in enumerate(fed.training):
        if len(part) > 1:
            logits = score(clients, private_sample(fed, client))
            matrices.append(cross_correlation(logits[client], logits.mean(0)))
    if not matrices:
        raise UserError("no client has two training images (got one or none each); a correlation needs larger clients.")
    return torch.stack(matrices).mean(0)


@torch.no_grad()
def score(clients: Sequence[Model], images: Tensor) -> Tensor:
    """Logits `[N, n, C]` of the clients' models in evaluation mode, in double precision."""
    logits = []
    for network, *model in clients:
        params, buffers = tree_map(lambda leaf: leaf.to(images.device), model)
        logits.append(network(params, buffers, images, train=False).logits)
    return torch.stack(logits).double()


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

    def standardise(columns: Tensor) -> Tensor:
        return (columns - columns.mean(0)) / (columns.std(0) + SMALL)

    return standardise(logits).T @ standardise(mean_logits) / len(logits)
