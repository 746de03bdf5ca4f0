"""How every figure looks and is written, the words in it, and a partition as a picture.

`write` draws a figure in `STYLE` and saves it; the same input gives the same bytes. Figures are made without pyplot, so
no global state is touched and no window system is needed.
"""

import io
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from fedcli.data.files import write_atomically
from fedcli.errors import UserError
from fedcli.registry import methods
from fedcli.results.tables import SeedGroup, agreed
from fedcli.runs.records import is_packaged
from fedcli.runs.settings import reductions

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
# Each has more gaps than those before it: drawn after them it hides none.
DASHES = (
    "-", (0, (5, 1.5)), (0, (4, 1.2, 1, 1.2)), (0, (3, 2)), (0, (6, 2, 1, 2, 1, 2)), (0, (1.2, 1.2)), (0, (1.2, 3)),
)  # fmt: skip
SCREEN_DPI = 110  # of a picture on a page or in a notebook
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
NAMED = 26  # classes of a partition; of more, names would overlap


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name, none twice, in the order of the names."""
    names = list(dict.fromkeys(names))
    shades = map(to_hex, matplotlib.colormaps["turbo"](np.linspace(0.02, 0.98, len(names))))
    return dict(zip(names, LINE_COLOURS if len(names) <= len(LINE_COLOURS) else shades, strict=False))


def setting_colours(boards: Sequence[Sequence[SeedGroup]]) -> dict[str, str]:
    """A colour for each setting, by its label; one for each method where no board has several settings of a method."""
    members = [member for board in boards for member in board]
    if all(len({member.method for member in board}) == len(board) for board in boards):
        of_method = colours(member.method for member in members)
        return {member.label: of_method[member.method] for member in members}
    return colours(member.label for member in members)


def setting_name(member: SeedGroup) -> str:
    """The label of a setting, with the method as its paper writes it unless a label of the user's stands for it."""
    record = member.records[0]
    method = methods().get(record["method"])
    if "label" in record or method is None or not is_packaged(record):
        return member.label
    return method.title.partition(":")[0] + member.label.removeprefix(method.name)


def data_words(dataset: str = "", partition: str = "", *more: str) -> str:
    """Data in words, as in "Digits, Dirichlet 0.5"; a partition of a file, or of two parts, as it is typed."""
    name, _, value = partition.partition(":")
    division = PARTITIONS.get(name, partition).format(value.replace(":", ", "))
    return ", ".join(filter(None, [DATASETS.get(dataset, dataset[:1].upper() + dataset[1:]), division, *more]))


def title_words(records: Sequence[dict], *more: str) -> str:
    """What runs share, in words, with `more` behind: "Digits, Dirichlet 0.5, 3 seeds; reduced: rounds 4 of 100"."""
    shared = agreed(records)
    title = data_words(shared.get("dataset", ""), shared.get("partition", ""), *more)
    smaller = {", ".join(reductions(record).values()) for record in records} - {""}
    return f"{title}; reduced: {' or '.join(sorted(smaller))}" if smaller else title


def write_title(figure: Figure, title: str) -> None:
    """Writes the title over a figure, in lines that are no longer than the figure is wide."""
    figure.suptitle(fill(title, int(15 * figure.get_figwidth())))


def partition_figure(class_counts: np.ndarray, class_names: Sequence[str], title: str) -> Figure:
    """Draws how many examples of each class each client holds, a column a client, white where there is none.

    Args:
        class_counts: `[K, C]` examples per client and class.
        class_names: C names.
        title: Title of the chart.
    """
    figure = Figure((5.8, 1.1 + 0.16 * min(len(class_names), NAMED)), layout="constrained")
    axes = figure.add_subplot(xlabel="Client", ylabel="Class")
    # The palest colour of the map differs from white, which stands for no example.
    shown = np.ma.masked_equal(class_counts.T, 0)
    image = axes.imshow(shown, cmap="viridis_r", vmin=0, aspect="auto", interpolation="nearest")
    axes.locator_params(integer=True)
    if len(class_names) <= NAMED:
        axes.set_yticks(range(len(class_names)), class_names)
    figure.colorbar(image, label="Examples")
    write_title(figure, title)
    return figure


def write(out: Path, draw: Callable[..., Figure], *given: Any, page: bool = False) -> list[Path]:
    """Draws a figure in the style of all figures and writes it, without dates, so that equal figures are equal files.

    Args:
        out: Where to write: `.pdf`, `.svg`, or `.png`, beside which a PDF is written.
        draw: Returns the figure.
        *given: What it is drawn of.
        page: Whether to write a small PNG alone, as pages in a repository show it.

    Raises:
        UserError: If the suffix is of another kind of image.
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
            figure.set_layout_engine("none")  # the next file is laid out as this one
    return files


def small_png(figure: Figure) -> bytes:
    """The figure as a PNG for a screen, with a palette of 256 colours, a third of the bytes."""
    picture, small = io.BytesIO(), io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(picture, format="png", dpi=SCREEN_DPI)
    Image.open(picture).convert("RGB").quantize(256).save(small, "png", optimize=True)
    return small.getvalue()
