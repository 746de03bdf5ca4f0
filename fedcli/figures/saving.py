"""Figures as files, always of the same bytes: `write_figure` for a user, `write_page_figure` for pages of a repository.

Figures are made without pyplot, which keeps global state and wants a window system.
"""

import io
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from PIL import Image

from fedcli.errors import UserError, first_line
from fedcli.figures.options import FigureOptions, Parameters
from fedcli.figures.warn import warnings_in_words
from fedcli.files import write_atomically

# What keeps the date out of each kind of file.
UNDATED: dict[str, dict[str, Any]] = {
    ".png": {"metadata": {}},
    ".pdf": {"metadata": {"CreationDate": None}},
    ".svg": {"metadata": {"Date": None}},
    ".pgf": {},
}


class WrittenFigure(NamedTuple):
    """A figure, and the files that show it."""

    figure: Figure
    files: list[Path]


def write_figure(
    out: Path, chart: Callable[..., Figure], *given: Any, options: FigureOptions | None = None
) -> WrittenFigure:
    """Writes the figure that `chart(*given)` returns, without dates.

    Args:
        out: A `.pdf`, `.svg`, `.png` or `.pgf` file; a PDF is written beside a PNG.
        chart: Draws the figure, with the size and the title of the options.
        *given: Its arguments.
        options: What the user changes, for matplotlib's parameters.

    Raises:
        UserError: If `out` has another suffix, or is a `.pgf` without LaTeX.
    """
    if out.suffix not in UNDATED:
        raise UserError(f"--out must end in .png, .pdf, .svg or .pgf (got '{out}'); choose one of them.")
    options = options or FigureOptions()
    with matplotlib.rc_context(options.parameters()), warnings_in_words():
        if out.suffix == ".pgf":
            _refuse_without_latex()
        figure = chart(*given)
        out.parent.mkdir(parents=True, exist_ok=True)
        files = [out]
        if out.suffix == ".png":
            files.append(out.with_suffix(".pdf"))
        if out.suffix == ".pgf":
            return WrittenFigure(figure, _write_pgf(out, figure))
        for file in files:
            write_atomically(file, partial(figure.savefig, format=file.suffix[1:], **UNDATED[file.suffix]))
    return WrittenFigure(figure, files)


def write_page_figure(out: Path, chart: Callable[..., Figure], *given: Any) -> None:
    """Writes the figure that `chart(*given)` returns as one small PNG, for a page in a repository.

    No setting of the user's or of a program's counts, so that it looks the same on every machine.
    """
    parameters: Parameters = dict(matplotlib.rcParamsDefault)
    del parameters["backend"]  # to set it would close the figures of a program
    parameters |= FigureOptions(is_page=True).parameters()
    with matplotlib.rc_context(parameters), warnings_in_words():
        picture = encode_small_png(chart(*given))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, lambda path: path.write_bytes(picture))


def _write_pgf(out: Path, figure: Figure) -> list[Path]:
    """Writes a figure for LaTeX, and beside it the PNGs that it includes, which are called after it; returns all.

    Raises:
        UserError: If LaTeX cannot set a text of the figure.
    """
    written = []
    with TemporaryDirectory(dir=out.parent, prefix=".") as folder:
        try:
            figure.savefig(Path(folder, out.name))
        except (ValueError, RuntimeError) as error:  # matplotlib's LaTeX error is one of them
            raise UserError(
                f"LaTeX cannot set a text of the figure (got {first_line(error)}); rename what has &, # or $ in its "
                "name, as by --labels, or write a .pdf."
            ) from error
        after_what_it_includes = sorted(Path(folder).iterdir(), key=lambda file: file.suffix == ".pgf")
        for file in after_what_it_includes:
            written.append(file.replace(out.with_name(file.name)))
    return sorted(written)


def _refuse_without_latex() -> None:
    program = matplotlib.rcParams["pgf.texsystem"]
    if shutil.which(program) is None:
        raise UserError(
            f"a .pgf file needs LaTeX to measure its text (got no program '{program}'); install it, set pgf.texsystem "
            "in a --style file, or write a .pdf."
        )


def encode_small_png(figure: Figure) -> bytes:
    """Encodes a figure as a PNG for a screen, with a palette of 256 colours: a third of the bytes."""
    picture = io.BytesIO()
    small = io.BytesIO()
    with matplotlib.rc_context(FigureOptions(is_page=True).parameters()):
        figure.savefig(picture, format="png", dpi=110)
    Image.open(picture).convert("RGB").quantize(256).save(small, "png", optimize=True)
    return small.getvalue()
