"""How a figure looks: fedcli's own style, and the options by which a user changes it for a paper."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.colors import is_color_like
from matplotlib.figure import Figure

from fedcli.errors import UserError, unknown
from fedcli.figures.text import wrap_headings, write_title

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
    "pgf.rcfonts": False,  # the fonts of the document that includes the figure
    "svg.hashsalt": "fedcli",
    "text.parse_math": False,  # a name may have a dollar sign
    "text.usetex": False,  # or a %
}
Parameters = dict[Any, Any]  # matplotlib's by name; which names there are depends on its version
LEGENDS = ("right", "inside", "below", "ends", "none")
WIDTH = 6.4  # inches of a figure of lines, which is matplotlib's own width
NARROW = 5.0  # inches; a legend beside the panels of a narrower figure would leave them no room
SMALLEST = 0.5  # inches of a side
LARGEST = 40.0


@dataclass(frozen=True)
class FigureOptions:
    """What a user changes in a figure; the defaults leave everything as fedcli draws it.

    Attributes:
        title: The title in place of fedcli's; empty for none.
        size: Width and height of the file in inches.
        font_size: Size of the text in points; titles are larger in proportion.
        style: A matplotlib style: a file, or the name of one that matplotlib knows.
        colors: Colours by the name of a method or the label of a setting.
        labels: Names in the legend, likewise.
        legend: One of `LEGENDS`; None for `right`, or `below` in a figure narrower than `NARROW`.
        is_page: Draw for a page of the repository, where no `matplotlibrc` of the user counts.

    Raises:
        UserError: If a value is none of these.
    """

    title: str | None = None
    size: tuple[float, float] | None = None
    font_size: float | None = None
    style: str | Path | None = None
    colors: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    legend: str | None = None
    is_page: bool = False

    def __post_init__(self) -> None:
        """Refuses values that are none, also of another type, as from Python."""
        if self.title is not None and not isinstance(self.title, str):
            raise UserError(f"--title must be a text (got {self.title!r}); write 'Mine', or '' for none.")
        if self.size is not None:
            _refuse_size(self.size)
        if self.font_size is not None:
            _refuse_font_size(self.font_size)
        if self.style is not None and not isinstance(self.style, str | Path):
            raise UserError(f"--style must be a file or a name (got {self.style!r}); write 'mine.mplstyle'.")
        _refuse_colors(self.colors)
        _refuse_labels(self.labels)
        if self.legend is not None:
            _refuse_legend(self.legend)

    @property
    def width(self) -> float:
        """The width of the figure in inches."""
        return WIDTH if self.size is None else self.size[0]

    @property
    def legend_place(self) -> str:
        """The place of the legend, chosen by the width where the user has chosen none."""
        if self.legend is not None:
            return self.legend
        return "below" if self.width < NARROW else "right"

    @property
    def draws_grid(self) -> bool:
        """Whether curves stand on lines of a grid: unless the user's style or `matplotlibrc` says otherwise."""
        return bool(self.parameters().get("axes.grid", True))

    def parameters(self) -> Parameters:
        """Returns matplotlib's parameters: fedcli's, then the user's `matplotlibrc`, the style, and the options.

        Raises:
            UserError: If there is no such style, it has a value that matplotlib refuses, or LaTeX is to set the texts.
        """
        parameters: Parameters = dict(STYLE)
        if not self.is_page:
            parameters |= _read_user_settings()
        if self.style is not None:
            parameters |= _read_style(self.style)
        if parameters["text.usetex"]:
            raise UserError(
                "text.usetex cannot be on (got True in a style or matplotlibrc), since LaTeX takes %, _ and & of a "
                "text as its own; write text.usetex: False into a --style file, or the figure as a .pgf."
            )
        if self.font_size is not None:
            texts = ("font.size", "axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize")
            parameters |= dict.fromkeys(texts, self.font_size)
            parameters |= {
                "axes.titlesize": self.font_size + 0.5,
                "figure.titlesize": self.font_size + 1,
            }
        if self.size is not None:
            parameters["savefig.bbox"] = "standard"  # "tight" would cut the figure to another size
        parameters.pop("backend", None)  # figures are drawn without a window
        return parameters

    def apply(self, figure: Figure) -> None:
        """Gives a drawn figure the size and the title of the user; a title stands over one panel or over all."""
        title = figure.get_suptitle()
        if self.title is not None:
            title = self.title
            panels_with_heading = [axes for axes in figure.axes if axes.get_title()]
            if len(panels_with_heading) == 1:
                (panel,) = panels_with_heading
                panel.set_title("")
        if self.size is not None:
            figure.set_size_inches(self.size)
        if self.title is not None or self.size is not None:
            write_title(figure, title)
        if self.size is not None:
            wrap_headings(figure)

    def given_line_options(self) -> list[str]:
        """Returns the names of the given options that change lines and their legend, which only curves have."""
        options = {"colors": self.colors, "labels": self.labels, "legend": self.legend}
        return [name for name, value in options.items() if value]

    def for_names(self, names: Iterable[str]) -> "FigureOptions":
        """Returns the options for a figure that draws these names, which tell where in `NAME=LABEL` the name ends.

        Args:
            names: The names of the methods and the labels of the settings in the figure.

        Raises:
            UserError: If there is a colour or a label for a method or setting that the figure does not draw.
        """
        drawn = list(dict.fromkeys(names))
        labels = dict(_split_at_drawn(name, label, drawn) for name, label in self.labels.items())
        _refuse_others("colors", self.colors, drawn)
        _refuse_others("labels", labels, drawn)
        return replace(self, labels=labels)


def _refuse_size(size: Any) -> None:
    is_pair = isinstance(size, Sequence) and len(size) == 2 and all(isinstance(side, int | float) for side in size)
    if not is_pair:
        raise UserError(f"--size must be a width and a height in inches (got {size!r}); write (3.4, 2.3).")
    if not all(SMALLEST <= side <= LARGEST for side in size):
        given = "x".join(f"{side:g}" for side in size)
        raise UserError(
            f"the size of a figure must be from {SMALLEST:g} to {LARGEST:g} inches a side (got {given}); "
            "choose one of them, as 3.4x2.3 for a single column."
        )


def _refuse_font_size(font_size: Any) -> None:
    if not isinstance(font_size, int | float):
        raise UserError(f"--font-size must be a number of points (got {font_size!r}); write 8.")
    if not 1 <= font_size <= 100:
        raise UserError(
            f"the font size of a figure must be from 1 to 100 points (got {font_size:g}); papers have 7 to 10."
        )


def _refuse_colors(colors: Any) -> None:
    _refuse_no_names("--colors", colors)
    for name, color in colors.items():
        if not is_color_like(color):
            raise UserError(
                f"the colour of '{name}' is none that matplotlib knows (got '{color}'); write one as #0072B2 or "
                "tab:blue."
            )


def _refuse_labels(labels: Any) -> None:
    _refuse_no_names("--labels", labels)
    for name, label in labels.items():
        if not isinstance(label, str):
            raise UserError(f"--labels must have texts (got {label!r} for '{name}'); write {{'{name}': '...'}}.")


def _refuse_no_names(flag: str, values: Any) -> None:
    """Refuses what has no values by the names of methods and settings."""
    if not isinstance(values, Mapping):
        raise UserError(f"{flag} must be a dict (got {values!r}); write {{'fedavg': '...'}}.")
    for name in values:
        if not isinstance(name, str):
            raise UserError(f"{flag} must name methods or settings (got {name!r}); write {{'fedavg': '...'}}.")


def _refuse_legend(legend: Any) -> None:
    remedy = f"there are {', '.join(LEGENDS)}."
    if not isinstance(legend, str):
        raise UserError(f"--legend must be a text (got {legend!r}); {remedy}")
    if legend not in LEGENDS:
        raise unknown("legend", legend, LEGENDS, remedy)


def _split_at_drawn(name: str, label: str, drawn: list[str]) -> tuple[str, str]:
    """Splits a name and its label, which were one text if no such name is drawn: those of settings may hold a `=`."""
    text = f"{name}={label}"
    starts = [candidate for candidate in drawn if text.startswith(f"{candidate}=")]
    if name in drawn or not starts:
        return name, label
    longest = max(starts, key=len)
    return longest, text.removeprefix(f"{longest}=")


def _refuse_others(option: str, given: Iterable[str], drawn: list[str]) -> None:
    for name in given:
        if name not in drawn:
            raise unknown(f"name in {option}", name, drawn, f"the figure draws {', '.join(drawn)}.")


def parse_size(text: str) -> tuple[float, float]:
    """Reads `3.4x2.3`, width and height in inches.

    Raises:
        UserError: If the text is no size.
    """
    width, _, height = text.lower().partition("x")
    try:
        return float(width), float(height)
    except ValueError:
        raise UserError(f"--size must be WIDTHxHEIGHT in inches (got '{text}'); write 3.4x2.3.") from None


def parse_pairs(flag: str, texts: Iterable[str]) -> dict[str, str]:
    """Reads `NAME=VALUE` of an option that may be repeated; see also `FigureOptions.for_names`.

    Raises:
        UserError: If a text is no pair.
    """
    pairs = {}
    for text in texts:
        name, _, value = text.partition("=")
        _refuse_no_pair(flag, text, name, value)
        pairs[name] = value
    return pairs


def parse_colors(texts: Iterable[str]) -> dict[str, str]:
    """Reads `NAME=COLOUR` of `--colors`; the names of settings may hold a `=`, and colours have none.

    Raises:
        UserError: If a text is no pair.
    """
    colors = {}
    for text in texts:
        name, _, color = text.rpartition("=")
        _refuse_no_pair("--colors", text, name, color)
        colors[name] = color
    return colors


def _refuse_no_pair(flag: str, text: str, name: str, value: str) -> None:
    if not (name and value):
        raise UserError(f"{flag} must be NAME=VALUE (got '{text}'); write {flag} fedavg=VALUE, once for each name.")


def _read_user_settings() -> Parameters:
    """Reads the user's `matplotlibrc`; no settings where matplotlib reads the one that it comes with."""
    file = Path(matplotlib.matplotlib_fname())
    if file.is_relative_to(matplotlib.get_data_path()):
        return {}
    return dict(matplotlib.rc_params_from_file(file, use_default_template=False))


def _read_style(name: str | Path) -> Parameters:
    from matplotlib import style  # late: it reads all of matplotlib's styles

    if str(name) in style.library:
        return dict(style.library[str(name)])
    if not Path(name).is_file():
        raise UserError(
            f"there is no such style (got '{name}'); name a .mplstyle file, or one of matplotlib's: "
            f"{', '.join(sorted(map(str, style.available)))}."
        )
    try:
        return dict(matplotlib.rc_params_from_file(name, fail_on_error=True, use_default_template=False))
    except (ValueError, OSError) as error:
        raise UserError(f"the style '{name}' cannot be read (got {error}); correct the file.") from None
