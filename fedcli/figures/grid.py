"""A grid of panels, a column for each setting. Of several seeds, the first is drawn."""

from math import ceil
from textwrap import fill
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from fedcli.errors import UserError
from fedcli.figures.names import describe_runs, name_setting
from fedcli.figures.text import write_title
from fedcli.results.groups import group_runs
from fedcli.results.run_records import select_finished
from fedcli.runs.schema import Record

SIDE = 2.5  # inches of a panel
ACROSS = 3  # panels in a row
LEGEND_WIDTH = 1.2  # inches beside the panels
HEADING_HEIGHT = 0.7  # inches above a panel
TITLE_HEIGHT = 0.4  # inches above all
LONGEST_NAME = 28  # characters of a line


class PanelColumn(NamedTuple):
    """The panels of a setting, one below the other."""

    run: Record  # of its first finished one
    name: str  # of the setting, in lines
    panels: np.ndarray  # of axes


class Grid(NamedTuple):
    """A figure of such columns."""

    figure: Figure
    columns: list[PanelColumn]


def make_grid(records: list[Record], rows: int = 1) -> Grid:
    """Makes a figure with a column of `rows` panels for each setting, of which `ACROSS` stand side by side.

    Raises:
        UserError: If there is no finished run, or they are of several data sets.
    """
    finished = select_finished(records)
    datasets = sorted({record["dataset"] for record in finished})
    if len(datasets) > 1:
        raise UserError(f"a figure shows the classes of one data set (got {', '.join(datasets)}); use --dataset.")
    settings = group_runs(finished)
    across = min(len(settings), ACROSS)
    down = ceil(len(settings) / ACROSS)  # blocks of columns, one below the other
    width = SIDE * max(across, 2) + LEGEND_WIDTH
    height = (SIDE + HEADING_HEIGHT) * rows * down + TITLE_HEIGHT
    figure = Figure((width, height), layout="constrained")
    runs = [setting.first for setting in settings]
    seeds = sorted({str(run["seed"]) for run in runs})
    write_title(figure, describe_runs(runs, "seed " + " or ".join(seeds)))
    panels = figure.subplots(rows * down, across, squeeze=False)
    columns = []
    for number, setting in enumerate(settings):
        block, position = divmod(number, across)
        panels_of_setting = panels[rows * block : rows * (block + 1), position]
        columns.append(PanelColumn(setting.first, fill(name_setting(setting), LONGEST_NAME), panels_of_setting))
    last_block = panels[-rows:]
    filled = len(settings) - across * (down - 1)  # columns of the last block
    for empty in last_block[:, filled:].flat:
        empty.remove()
    return Grid(figure, columns)


def describe_model(run: Record) -> str:
    """Describes which model the outputs of a run are of: "model of round 7 of 20", or with "client 3" before it.

    Older records are of the last round.
    """
    quality = run["quality"]
    num_rounds = len(run["rounds"])
    number = quality.get("round", num_rounds - 1)
    words = f"model of round {number + 1} of {num_rounds}"
    if "client" in quality:
        words = f"client\N{NO-BREAK SPACE}{quality['client']}, {words}"
    return words
