"""How alike the clients' logits are, class by class: cross-correlation matrices on public and on private images.

Every client's own model after the last round, in evaluation mode, is given the same images: some of the public ones,
and some of each client's own training images. A client's logits are correlated with the mean logits of all clients, on
the public images and on its own ones, and the matrices are averaged over the clients.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from fedcli.core.batches import generator
from fedcli.core.evaluation import Model, models
from fedcli.core.federation import Federation
from fedcli.errors import UserError
from fedcli.figures.plots import STYLE, save
from fedcli.figures.quality import Shown, final_state, one_a_setting
from fedcli.registry import find_method
from fedcli.runs.records import read_record
from fedcli.runs.run import machine_settings, restore

EXAMPLES = 500  # public images at most, and of each client's own
SEED = 0  # of their choice, so that all runs are measured on the same ones
SMALL = 1e-5  # added to deviations, which can be 0
COLOURS = "RdBu_r"  # diverging, white at 0; colour-blind readers tell its ends apart
PANEL = 2.0  # inches, width and height
TITLE = 30  # characters that a panel is high


class Matrices(NamedTuple):
    """One setting's cross-correlations, means over the clients; a row is a class of a client, a column of the mean."""

    title: str
    public: np.ndarray  # [C, C]
    private: np.ndarray  # [C, C]


def correlation_chart(paths: Iterable[Path], out: Path) -> list[Path]:
    """Draws the cross-correlation of the clients' logits with their mean, a row for runs that differ beyond the seed.

    On the left they are of public images: those of the run, or where it has none those of the first one shown that
    has. On the right they are of the clients' own training images. Of several seeds the first is drawn.

    Args:
        paths: Run folders, or folders that hold run folders.
        out: Where to write, without suffix.

    Returns:
        The two files, PNG and PDF.

    Raises:
        UserError: If the runs are of several data sets or none has public images, or one has no personal models, no
            checkpoint or another one's.
    """
    shown, title = one_a_setting(paths)
    _refuse(shown)
    lender = next(run.record for run in shown if run.record["config"].get("public_dataset"))
    lent = public_sample(restore(lender, find_method(lender["method_source"]))[1])
    rows = [Matrices(run.label, *measure(run.folder, lent)) for run in shown]
    with matplotlib.rc_context(STYLE):
        return save(correlation_figure(rows, title), out)


def _refuse(shown: Sequence[Shown]) -> None:
    """Refuses runs that no figure can be made of."""
    for _, record, folder in shown:
        if find_method(record["method_source"]).personal is None:
            raise UserError(f"'{record['method']}' has no personal models (got {folder}); leave the run out.")
    if not any(run.record["config"].get("public_dataset") for run in shown):
        raise UserError(f"no run has public images (got {len(shown)} without); add a run of a method that uses them.")


def measure(folder: Path, lent: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The mean cross-correlations `[C, C]` of a finished run on public images and on private ones.

    Args:
        folder: Of the run, with its last checkpoint.
        lent: `[n, channels, H, W]`, normalised public images for a run that has none.

    Raises:
        UserError: If the checkpoint is missing or another one's, or no client has two images.
    """
    record = read_record(folder)
    method = find_method(record["method_source"])
    setup, fed = restore(record, method)
    with machine_settings(fed):
        clients = [model for _, model in models(fed, method, final_state(folder, record, method, setup, fed))]
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
    return torch.stack(
        [network(params, buffers, images, train=False).logits for network, params, buffers in clients]
    ).double()


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
    """The figure of `correlation_chart`, to be drawn under `STYLE`; all panels have one scale, from -1 to 1."""
    figure = Figure(figsize=(2 * PANEL + 1.9, len(rows) * (PANEL + 0.3) + 0.8), layout="constrained")
    panels = figure.subplots(len(rows), 2, squeeze=False, sharex=True, sharey=True)
    for pair, row in zip(panels, rows, strict=True):
        for axes, matrix in zip(pair, row[1:], strict=True):
            drawn = axes.imshow(matrix, cmap=COLOURS, vmin=-1, vmax=1, interpolation="nearest")
            axes.set_title(_numbers(matrix))
            axes.spines[:].set_visible(True)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        pair[0].set_ylabel(f"{fill(row.title, TITLE)}\n\nClass of a client")
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
