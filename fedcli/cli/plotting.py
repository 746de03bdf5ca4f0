"""The commands that draw runs: `plot` and `report`."""

import warnings
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape

from fedcli.cli.options import Datasets, Labels, Runs, given_flags, optional, records_of
from fedcli.cli.printing import say, write_and_name
from fedcli.errors import UserError, import_optional
from fedcli.figures import CHARTS, QUANTITIES, WITH_LINES, find_chart
from fedcli.run_files import refuse_file_of_a_run
from fedcli.userfiles import names_user_file, short_name

if TYPE_CHECKING:  # it imports Matplotlib, which help does not need
    from matplotlib.figure import Figure

    from fedcli.figures.options import FigureOptions

LOOK = "Look"  # a panel of the help
NAME_AND_VALUE = "NAME=VALUE"


def plot(  # noqa: PLR0913  # the parameters of a command are its options
    ctx: typer.Context,
    runs: Runs,
    kind: optional(str, "What to draw, see above; or your own, ./file.py:NAME.") = "curves",
    out: optional(Path, "File to write: .pdf, .svg, or .png with a PDF; KIND.png by default.") = None,
    x: optional(str, "Horizontal axis of curves: round, floats (sent up) or seconds.", "--x") = "round",
    y: optional(str, f"What curves show: {', '.join(QUANTITIES)}.", "--y") = "accuracy",
    method: optional(list[str], "Only runs of this method; or a file of yours.") = None,
    dataset: Datasets = None,
    label: Labels = None,
    title: optional(str, "Title in place of fedcli's; none for none.", panel=LOOK) = None,
    size: optional(str, "Inches of the file, e.g. 3.4x2.3 for a single column.", panel=LOOK, metavar="WxH") = None,
    font_size: optional(float, "Points of the text.", panel=LOOK) = None,
    style: optional(str, "A .mplstyle file, or a style of matplotlib.", panel=LOOK, metavar="FILE") = None,
    colors: optional(
        list[str], "Colour of a method or setting; may be repeated.", panel=LOOK, metavar=NAME_AND_VALUE
    ) = None,
    labels: optional(list[str], "Its name in the legend; may be repeated.", panel=LOOK, metavar=NAME_AND_VALUE) = None,
    legend: optional(str, "right, inside, below, ends (of the lines) or none.", panel=LOOK) = None,
) -> None:
    """Draw a figure of runs; several seeds give one line with a band, or only the first is drawn.

    Your matplotlibrc counts, and --style before it.

    Your own kind is a function of the records that returns a matplotlib Figure.
    """
    from fedcli.figures.line_charts import LineChart
    from fedcli.figures.options import FigureOptions, parse_colors, parse_pairs, parse_size
    from fedcli.figures.saving import write_figure

    chart = find_chart(kind)
    takes = CHARTS[kind].takes if kind in CHARTS else ()  # a chart of the user's takes records alone
    named = method or []
    files = [text for text in named if names_user_file(text)]
    methods = [text for text in named if not names_user_file(text)]
    records = records_of(runs, methods, dataset, label)
    for flag in given_flags(ctx, lambda option: option.name in {"x", "y"}.difference(takes)):
        raise UserError(f"{flag} is for --kind curves (got --kind {kind}); leave it out.")
    if files and "files" not in takes:
        raise UserError(
            f"--method {files[0]} is for --kind correlation, which runs your networks (got --kind {kind}); write the "
            "name of the method whose runs to draw, or leave it out."
        )
    options = FigureOptions(
        title="" if title == "none" else title,
        size=None if size is None else parse_size(size),
        font_size=font_size,
        style=style,
        colors=parse_colors(colors or ()),
        labels=parse_pairs("--labels", labels or ()),
        legend=legend,
    )
    has_lines = "options" in takes
    if not has_lines:
        _refuse_options_of_lines(options, kind)
    arguments = {"x": x, "y": y, "options": options, "files": files}

    def chart_by_options(records: list[dict]) -> "Figure":
        """Draw the figure with what its kind takes, in the size and with the title of the user."""
        figure = chart(records, **{name: arguments[name] for name in takes})
        if not has_lines:  # others apply the options before they place the names of lines
            options.apply(figure)
        return figure

    file = out or Path(f"{short_name(kind)}.png")
    refuse_file_of_a_run(file)
    with Console(stderr=True).status(escape(kind)), warnings.catch_warnings(record=True) as caught:
        written = write_figure(file, chart_by_options, records, options=options)
    for warning in caught:
        say(f"warning: {warning.message}", err=True)
    say(" and ".join(map(str, written.files)))
    if isinstance(written.figure, LineChart) and written.figure.caption and options.legend_place != "right":
        say(f"for the caption: {written.figure.caption}.", err=True)


def _refuse_options_of_lines(options: "FigureOptions", kind: str) -> None:
    """Refuse what is chosen of lines for a kind of figure that has none."""
    given = options.given_line_options()
    if given:
        kinds = ", ".join(WITH_LINES)
        raise UserError(f"--{given[0]} is for figures of lines, {kinds} (got --kind {kind}); leave it out.")


plot.__doc__ = (getdoc(plot) or "") + "".join(f"\n\n{name}: {chart.shows}." for name, chart in CHARTS.items())


def report(
    runs: Runs,
    out: optional(Path, "File to write.") = Path("report.html"),
    method: optional(list[str], "Only runs of this method; repeat it for several.") = None,
    dataset: Datasets = None,
    label: Labels = None,
    title: optional(str, "Title of the page.") = "Runs",
) -> None:
    """Write one HTML file, which works offline: sortable tables and curves, by protocol and data set."""
    from fedcli.results.run_records import check_number_of_labels
    from fedcli.run_files import RECORD

    import_optional("bokeh", "the report", "report")
    check_number_of_labels(label or (), len(runs))
    with_runs = [path for path in runs if path.is_file() or any(path.rglob(RECORD))]
    if with_runs:
        for path in sorted(set(runs) - set(with_runs)):
            say(f"warning: there is no run in '{path}'; it is left out.", err=True)
        if label:
            label = [name for path, name in zip(runs, label, strict=True) if path in with_runs]
        runs = with_runs
    from fedcli.figures.report import make_report  # which imports Bokeh

    records = records_of(runs, method, dataset, label)
    write_and_name(out, make_report(records, title))
