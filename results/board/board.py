"""Boards of all methods on the built-in digits: ten seeds each, with options tuned on an eleventh seed.

    python results/board/board.py                        # run what has not ended below runs/board, then write all
    python results/board/board.py --only own:personal    # of one board; board.csv keeps the rows of the others
    python results/board/board.py --page                 # write the tables of README.md from board.csv alone

`options.json` has the boards by protocol, each with its rows: a method with its options, and in brackets how it differs
from the method's own. To add one, tune it with `fedcli tune` on values like those that README.md lists, and write the
best into `options.json`. The rows of `board.csv` stand in the same order, so after a run `git diff board.csv` shows
which came out otherwise; those of the first three boards were written before there was a column `tested`.
"""

import json
import sys
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import typer

from fedcli import Cell, Table
from fedcli.files import write_atomically
from fedcli.registry import find_method
from fedcli.results import jobs, plans
from fedcli.results.intervals import mean_interval
from fedcli.results.metrics import find_metric
from fedcli.results.number_texts import format_interval
from fedcli.results.render import render_github_table, replace_between_marks
from fedcli.runs.schema import Record
from fedcli.runs.settings_text import settings_text

HERE = Path(__file__).parent
RUNS = Path("runs/board")
SEEDS = tuple(range(10))
PUBLIC = {"public_dataset": "photos", "public_examples": 500, "public_batch_size": 125}
ACCURACY = find_metric("selected")  # any accuracy is written as it is
ACCURACIES = ("selected", "last-tenth", "classifier", "global")  # columns of the CSV, in percent
COLUMNS = [
    "protocol", "method", "seed", "status", "selected", "last-tenth", "classifier", "floats_sent", "memory_floats",
    "params_sha256", "machine", "tested", "global",
]  # fmt: skip


class TunedMethod(NamedTuple):
    """A row of a board."""

    method: str
    options: dict[str, Any]  # as tuned


class Board(NamedTuple):
    """The rows that are compared on one protocol."""

    protocol: str
    baseline: str  # the row that others are compared with
    settings: dict[str, Any]  # of all rows, in place of the protocol's
    rows: dict[str, TunedMethod]  # by name, which the CSV has as `method`
    # "global" and "personal", each with a table of its own; without any there is one table of whatever is tested.
    compared_models: tuple[str, ...] = ()


def read_boards() -> dict[str, Board]:
    """Returns the boards of `options.json`, by protocol."""
    boards = {}
    for protocol, entry in json.loads((HERE / "options.json").read_text(encoding="utf-8")).items():
        for key in ("baseline", "settings", "rows"):
            if key not in entry:
                sys.exit(f"error: the board {protocol} must have {key} (got {', '.join(entry)}).")
        rows = {}
        for name, row in entry["rows"].items():
            if row.keys() != set(TunedMethod._fields):
                has = " and ".join(TunedMethod._fields)
                sys.exit(f"error: the row '{name}' of {protocol} must have {has} (got {', '.join(row)}).")
            rows[name] = TunedMethod(**row)
        compared_models = tuple(entry.get("compared_models", ()))
        boards[protocol] = Board(protocol, entry["baseline"], entry["settings"], rows, compared_models)
    return boards


def make_table(board: Board) -> Table:
    """Returns a board as a table, whose runs can be planned."""
    cells = []
    for name, row in board.rows.items():
        settings = {"protocol": board.protocol, "dataset": "digits", **board.settings}
        if find_method(row.method).uses_public_data:
            settings |= PUBLIC
        cells.append(Cell(row=name, column=board.protocol, method=row.method, settings={**settings, **row.options}))
    return Table(
        name=board.protocol,
        title="Methods on the built-in digits",
        reported=("Board", board.protocol),
        cells=tuple(cells),
        seeds=SEEDS,
    )


def plan_board(board: Board) -> plans.TablePlan:
    """Returns the runs of a board with the records that they have now."""
    return plans.plan_table(make_table(board), RUNS / board.protocol.replace(":", "-"))


def run_board(board: Board) -> pd.DataFrame:
    """Runs what has not ended of a board, and returns the rows of the CSV, one a run."""
    errors = jobs.execute(plan_board(board), jobs.PlanListener(), jobs=2, records_only=True)
    if errors:
        folder, error = next(iter(errors.items()))
        raise SystemExit(f"{len(errors)} runs have failed (the first: {error}, in {folder}); run this again.")
    lines = []
    for planned in plan_board(board).cells:
        for record in planned.records:
            lines.append({"protocol": board.protocol, "method": planned.cell.row, **read_numbers(record)})
    return pd.DataFrame(lines, columns=COLUMNS)


def read_numbers(record: Record) -> dict[str, Any]:
    """Returns what the CSV has of a run, beside its board and its row there."""
    accuracies = {name: find_metric(name).read_value(record) for name in ACCURACIES}
    floats_down = find_metric("floats-down").read_value(record) or 0
    floats_up = find_metric("floats-up").read_value(record) or 0
    return {
        "seed": record["seed"],
        "status": record["status"],
        "tested": record["tested"],
        **accuracies,
        "floats_sent": round(floats_down + floats_up),
        "memory_floats": find_metric("memory-floats").read_value(record) or 0,
        "params_sha256": record["summary"].get("params_sha256", ""),
        "machine": f"{record['hardware']['name']}, torch {record['versions']['torch']}",
    }


def format_mean(accuracies: pd.Series, sign: str = "") -> str:
    """Returns the mean of accuracies, or of their differences, with its 95 % interval and the number of seeds."""
    return format_interval(ACCURACY, mean_interval(accuracies.dropna().tolist()), sign=sign)


class BoardTable(NamedTuple):
    """The runs of a board that one table compares."""

    mark: str  # of its place in README.md
    runs: pd.DataFrame  # with a column `compared`, the accuracies by which they are compared


def split_runs(runs: pd.DataFrame, board: Board) -> list[BoardTable]:
    """Returns the runs of a board's rows by table; those with both models stand in two.

    The CSV may have runs of rows that the board no longer has.
    """
    of_board = runs[(runs.protocol == board.protocol) & runs.method.isin(list(board.rows))]
    by_selected = of_board.assign(compared=of_board.selected)
    if not board.compared_models:
        return [BoardTable(board.protocol, by_selected)]
    is_global = of_board.tested == "global"
    has_both = of_board.groupby("method")["global"].transform("count") > 0
    is_baseline = of_board.method == board.baseline
    by_global_model = of_board.assign(compared=of_board["global"].where(has_both, of_board.selected))
    runs_of_tables = {
        "global": by_global_model[is_global | has_both],
        "personal": by_selected[~is_global | is_baseline],
    }
    return [BoardTable(f"{board.protocol}, {models}", runs_of_tables[models]) for models in board.compared_models]


def render_board(runs: pd.DataFrame, board: Board) -> str:
    """Returns a table of runs of a board for the page, the best row first."""
    if board.baseline not in set(runs.method):
        return f"Without runs of {board.baseline} yet, with which the others are compared."
    compared = rank_rows(runs)
    columns = make_columns(runs, compared, board)
    if is_ahead(compared):
        columns["Accuracy, %"] = mark_first(columns["Accuracy, %"])
    return render_github_table([*columns], columns.to_numpy().tolist(), number_columns=range(2, len(columns.columns)))


def rank_rows(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the accuracies by which the rows of a board are compared, see `pivot_by_seed`, the best row first."""
    compared = pivot_by_seed(runs, "compared")
    order = compared.mean().sort_values(ascending=False, kind="stable").index
    return compared[order]


def make_columns(runs: pd.DataFrame, compared: pd.DataFrame, board: Board) -> pd.DataFrame:
    """Returns what the table of a board says, a row a row of the board, without the columns that would be empty."""
    by_row = runs.groupby("method")
    leads = compared.sub(compared[board.baseline], axis=0)
    last_tenth = pivot_by_seed(runs, "last-tenth")
    classifier = pivot_by_seed(runs, "classifier")
    diverged = by_row.size() - compared.count()

    columns = pd.DataFrame(index=compared.columns)
    columns["Method"] = columns.index
    columns["Options"] = pd.Series({name: settings_text(row.options) for name, row in board.rows.items()})
    columns["Accuracy, %"] = compared.apply(format_mean)
    columns[f"Ahead of {board.baseline}"] = leads.apply(format_mean, sign="+").where(
        columns.index != board.baseline, ""
    )
    if "eval_every" not in board.settings:  # else the last round alone is tested
        columns["Last tenth of the rounds, %"] = last_tenth.apply(format_mean)
    columns["By the classifier, %"] = classifier.apply(format_mean).where(classifier.notna().any(), "")
    columns["Floats sent a round"] = by_row.floats_sent.max().map("{:,.0f}".format)
    columns["Floats held"] = by_row.memory_floats.max().map("{:,.0f}".format)
    columns["Diverged"] = diverged.astype(str).where(diverged > 0, "")
    return columns.loc[:, columns.ne("").any()]


def mark_first(texts: pd.Series) -> pd.Series:
    """Returns texts with the first one in bold."""
    first, *others = texts
    return pd.Series([f"**{first}**", *others], index=texts.index)


def pivot_by_seed(runs: pd.DataFrame, accuracy: str) -> pd.DataFrame:
    """Returns an accuracy of finished runs, a column a row of the board, a row a seed."""
    finished = runs[accuracy].where(runs.status == "finished")
    return runs.assign(accuracy=finished).pivot(index="seed", columns="method", values="accuracy")


def is_ahead(compared: pd.DataFrame) -> bool:
    """Returns whether the best row, in the first column, leads on the second by more than chance.

    A row of which seeds have diverged does not: they are missing from its mean.
    """
    if len(compared.columns) == 1:
        return False
    best, second, *_ = compared.columns
    if compared[best].isna().any():
        return False
    leads = compared[best] - compared[second]
    return mean_interval(leads.dropna().tolist()).low > 0


def run_boards(boards: Mapping[str, Board], chosen: Collection[str]) -> pd.DataFrame:
    """Runs what has not ended of the chosen boards, and returns the rows of the CSV, those of the others as before."""
    runs_of_boards = []
    for protocol, board in boards.items():
        if protocol in chosen:
            runs_of_boards.append(run_board(board))
            continue
        earlier = pd.read_csv(HERE / "board.csv")
        if protocol in set(earlier.protocol):
            runs_of_boards.append(earlier[earlier.protocol == protocol])
    return pd.concat(runs_of_boards)


def write_page(boards: Mapping[str, Board]) -> None:
    """Writes the tables of the page from the CSV."""
    runs = pd.read_csv(HERE / "board.csv")
    file = HERE / "README.md"
    text = file.read_text(encoding="utf-8")
    for board in boards.values():
        for table in split_runs(runs, board):
            text = replace_between_marks(text, table.mark, render_board(table.runs, board))
    write_atomically(file, partial(Path.write_text, data=text, encoding="utf-8"))


def main(page: bool = False, only: str = "") -> None:
    """Runs the boards, or only that of a protocol, unless the page alone is asked for, and writes the page."""
    boards = read_boards()
    if page and only:
        sys.exit("error: --page runs nothing, so --only has no effect; leave out one of them.")
    if only and only not in boards:
        sys.exit(f"error: --only must be a protocol of a board (got '{only}'); there are {', '.join(boards)}.")
    if (page or only) and not (HERE / "board.csv").is_file():
        sys.exit(
            "error: --page and --only take the other rows from board.csv, which is not there; run all boards first."
        )
    if not page:
        runs = run_boards(boards, chosen=[only] if only else boards)
        runs[COLUMNS].to_csv(HERE / "board.csv", index=False, encoding="utf-8")
    write_page(boards)


if __name__ == "__main__":
    typer.run(main)
