"""One board: every method on the built-in digits, ten seeds each, with options tuned on an eleventh seed.

    python results/board/board.py                        # run what has not ended below runs/board, then write all
    python results/board/board.py --only own:personal    # of one board; board.csv keeps the rows of the others
    python results/board/board.py --page                 # write the tables of README.md from board.csv alone

`options.json` has the boards by protocol, each with its rows: a method with its options, and in brackets how it differs
from the method's own. To add one, tune it with `fedcli tune` on values like those that README.md lists, and write the
best into `options.json`. After a run, `git diff board.csv` shows which rows came out otherwise.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import typer

from fedcli import Cell, Table
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
PERSONAL = "own:personal"  # the board with global models beside personal ones


class Row(NamedTuple):
    """A row of a board."""

    method: str
    options: dict[str, Any]  # as tuned


class Board(NamedTuple):
    """The rows that are compared on one protocol."""

    protocol: str
    baseline: str  # the row that others are compared with
    settings: dict[str, Any]  # of all rows, in place of the protocol's
    rows: dict[str, Row]  # by name, which the CSV has as `method`


def read_boards() -> dict[str, Board]:
    """Returns the boards of `options.json`, by protocol."""
    boards = {}
    for protocol, entry in json.loads((HERE / "options.json").read_text()).items():
        rows = {name: Row(**row) for name, row in entry["rows"].items()}
        boards[protocol] = Board(protocol, entry["baseline"], entry["settings"], rows)
    return boards


def as_table(board: Board) -> Table:
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


def run(board: Board) -> pd.DataFrame:
    """Runs what has not ended of a board, and returns the rows of the CSV, one a run."""
    folder = RUNS / board.protocol.replace(":", "-")
    plan = plans.plan_table(as_table(board), folder)
    errors = jobs.execute(plan, jobs.PlanListener(), jobs=2, records_only=True)
    if errors:
        raise SystemExit(f"{len(errors)} runs have failed (the first: {next(iter(errors.items()))}); run this again.")
    of_runs = []
    for planned in plans.plan_table(as_table(board), folder).cells:  # with the new records
        for record in planned.records:
            of_runs.append({"protocol": board.protocol, "method": planned.cell.row, **numbers_of(record)})
    return pd.DataFrame(of_runs)


def numbers_of(record: Record) -> dict[str, Any]:
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


def mean_text(accuracies: pd.Series, sign: str = "") -> str:
    """Returns the mean of accuracies, or of their differences, with its 95 % interval and the number of seeds."""
    return format_interval(ACCURACY, mean_interval(accuracies.dropna().tolist()), sign=sign)


def runs_by_mark(runs: pd.DataFrame, board: Board) -> dict[str, pd.DataFrame]:
    """Returns the runs of a board by the marks of its tables; global and personal models stand in two tables.

    The column `headline` is the accuracy by which a table compares them.
    """
    of_board = runs[runs.protocol == board.protocol]
    by_selected = of_board.assign(headline=of_board.selected)
    if board.protocol != PERSONAL:
        return {board.protocol: by_selected}
    is_global = of_board.tested == "global"
    has_both = of_board.groupby("method")["global"].transform("count") > 0
    is_baseline = of_board.method == board.baseline
    by_global_model = of_board.assign(headline=of_board["global"].where(has_both, of_board.selected))
    return {
        f"{board.protocol}, global": by_global_model[is_global | has_both],
        f"{board.protocol}, personal": by_selected[~is_global | is_baseline],
    }


def table_text(runs: pd.DataFrame, board: Board) -> str:
    """Returns a table of runs of a board for the page, the best row first."""
    headline = by_row_and_seed(runs, "headline")
    means = headline.mean()
    order = means.sort_values(ascending=False, kind="stable").index
    headline = headline[order]
    last_tenth = by_row_and_seed(runs, "last-tenth")
    classifier = by_row_and_seed(runs, "classifier")
    leads = headline.sub(headline[board.baseline], axis=0)
    is_tested_once = "eval_every" in board.settings
    by_row = runs.groupby("method")
    diverged = by_row.size() - headline.count()
    table = pd.DataFrame({
        "Method": order.to_series(),
        "Options": {name: settings_text(row.options) for name, row in board.rows.items()},
        "Accuracy, %": headline.apply(mean_text),
        f"Ahead of {board.baseline}": leads.apply(mean_text, sign="+").where(order != board.baseline, ""),
        "Last tenth of the rounds, %": "" if is_tested_once else last_tenth.apply(mean_text),
        "By the classifier, %": classifier.apply(mean_text).where(classifier.notna().any(), ""),
        "Floats sent a round": by_row.floats_sent.max().map("{:,}".format),
        "Floats held": by_row.memory_floats.max().map("{:,}".format),
        "Diverged": diverged.map(lambda count: str(count or "")),
    }).loc[order]  # fmt: skip
    if is_ahead(headline):
        best = order[0]
        table.loc[best, "Accuracy, %"] = f"**{table.loc[best, 'Accuracy, %']}**"
    filled = table.loc[:, table.ne("").any()]
    return render_github_table([*filled], filled.to_numpy().tolist(), first_number_column=2)


def by_row_and_seed(runs: pd.DataFrame, accuracy: str) -> pd.DataFrame:
    """Returns an accuracy of finished runs, a column a row of the board, a row a seed."""
    finished = runs[accuracy].where(runs.status == "finished")
    return runs.assign(accuracy=finished).pivot(index="seed", columns="method", values="accuracy")


def is_ahead(headline: pd.DataFrame) -> bool:
    """Returns whether the best row, in the first column, leads on the second by more than chance."""
    best, second, *_ = headline.columns
    leads = headline[best] - headline[second]
    return mean_interval(leads.dropna().tolist()).low > 0


def run_all(boards: Mapping[str, Board]) -> pd.DataFrame:
    """Runs what has not ended of boards, and returns the rows of the CSV."""
    return pd.concat([run(board) for board in boards.values()])


def run_one(board: Board) -> pd.DataFrame:
    """Runs what has not ended of a board, and returns its rows of the CSV after those of the others."""
    runs = pd.read_csv(HERE / "board.csv")
    of_others = runs[runs.protocol != board.protocol]
    return pd.concat([of_others, run(board)])


def write_page(boards: Mapping[str, Board]) -> None:
    """Writes the tables of the page from the CSV."""
    runs = pd.read_csv(HERE / "board.csv")
    file = HERE / "README.md"
    text = file.read_text()
    for board in boards.values():
        for mark, runs_of_table in runs_by_mark(runs, board).items():
            text = replace_between_marks(text, mark, table_text(runs_of_table, board))
    file.write_text(text)


def main(page: bool = False, only: str = "") -> None:
    """Runs the boards, or only that of a protocol, unless the page alone is asked for, and writes the page."""
    boards = read_boards()
    if page and only:
        sys.exit("error: --page runs nothing, so --only has no effect; leave out one of them.")
    if only and only not in boards:
        sys.exit(f"error: --only must be a protocol of a board (got '{only}'); there are {', '.join(boards)}.")
    if not page:
        runs = run_one(boards[only]) if only else run_all(boards)
        runs.to_csv(HERE / "board.csv", index=False)
    write_page(boards)


if __name__ == "__main__":
    typer.run(main)
