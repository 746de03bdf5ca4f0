"""One board: every method on the built-in digits, ten seeds each, with options tuned on an eleventh seed.

    python results/board/board.py                        # run what has not ended below runs/board, then write all
    python results/board/board.py --only own:personal    # of one board; board.csv keeps the rows of the others
    python results/board/board.py --page                 # write the tables of README.md from board.csv alone

`options.json` has the rows of each board, by protocol, with their options: a method, or a method and in brackets how
the row differs from the method's own. To add one, tune it with `fedcli tune` on values like those that README.md
lists, and write the best into `options.json`. After a run, `git diff board.csv` shows which rows came out otherwise.
"""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import typer

from fedcli import Cell, Table
from fedcli.registry import find_method
from fedcli.results import jobs, plans
from fedcli.results.metrics import find_metric
from fedcli.results.render import between_marks, github
from fedcli.results.statistics import interval, interval_text
from fedcli.runs.identity import settings_text
from fedcli.runs.schema import Record

HERE = Path(__file__).parent
RUNS = Path("runs/board")
PLAIN = {  # what others are held to
    "fedfa:digits": "fedavg", "fedfm:digits": "fedavg", "fedsa:digits-mixed": "local", "own:personal": "fedavg",
}  # fmt: skip
SETTINGS = {"own:personal": {"rounds": 12, "local_epochs": 1, "eval_every": 12}}  # where not the protocol's
SEEDS = tuple(range(10))
PUBLIC = {"public_dataset": "photos", "public_examples": 500, "public_batch_size": 125}
ACCURACIES = ("selected", "last-tenth", "classifier", "global")  # columns of the CSV, in percent
OPTIONS = json.loads((HERE / "options.json").read_text())  # of each row, by protocol


def table(protocol: str) -> Table:
    """Returns a board as a table, whose runs can be planned."""
    cells = []
    for row, options in OPTIONS[protocol].items():
        method, _, _ = row.partition(" (")
        settings = {"protocol": protocol, "dataset": "digits", **SETTINGS.get(protocol, {})}
        if find_method(method).uses_public_data:
            settings |= PUBLIC
        cells.append(Cell(row=row, column=protocol, method=method, settings={**settings, **options}))
    return Table(
        name=protocol,
        title="Methods on the built-in digits",
        reported=("Board", protocol),
        cells=tuple(cells),
        seeds=SEEDS,
    )


def run(protocol: str) -> pd.DataFrame:
    """Runs what has not ended of a board, and returns the rows of the CSV, one a run."""
    folder = RUNS / protocol.replace(":", "-")
    plan = plans.plan_table(table(protocol), folder)
    errors = jobs.execute(plan, jobs.PlanListener(), jobs=2, records_only=True)
    if errors:
        raise SystemExit(f"{len(errors)} runs have failed (the first: {next(iter(errors.items()))}); run this again.")
    rows = []
    for planned in plans.plan_table(table(protocol), folder).cells:  # with the new records
        for record in planned.records:
            rows.append({"protocol": protocol, "method": planned.cell.row, **numbers_of(record)})
    return pd.DataFrame(rows)


def numbers_of(record: Record) -> dict[str, Any]:
    """Returns what the CSV has of a run, beside its board and its row there."""
    accuracies = {name: find_metric(name).value(record) for name in ACCURACIES}
    floats_down = find_metric("floats-down").value(record) or 0
    floats_up = find_metric("floats-up").value(record) or 0
    return {
        "seed": record["seed"],
        "status": record["status"],
        "tested": record["tested"],
        **accuracies,
        "floats_sent": round(floats_down + floats_up),
        "memory_floats": find_metric("memory-floats").value(record) or 0,
        "params_sha256": record["summary"].get("params_sha256", ""),
        "machine": f"{record['hardware']['name']}, torch {record['versions']['torch']}",
    }


def mean_text(numbers: pd.Series, sign: str = "") -> str:
    """Returns the mean of a column with its 95 % interval and the number of its seeds."""
    return interval_text(find_metric("selected"), interval(numbers.dropna().tolist()), sign=sign)


def rows_by_mark(rows: pd.DataFrame, protocol: str) -> dict[str, pd.DataFrame]:
    """Returns the rows of a board by the marks of its tables; global and personal models stand in two tables."""
    rows = rows[rows.protocol == protocol]
    if protocol != "own:personal":
        return {protocol: rows}
    is_global = rows.tested == "global"
    has_both = rows.groupby("method")["global"].transform("count") > 0
    is_plain = rows.method == PLAIN[protocol]
    by_global_model = rows.assign(selected=rows["global"].where(has_both, rows.selected))
    return {
        f"{protocol}, global": by_global_model[is_global | has_both],
        f"{protocol}, personal": rows[~is_global | is_plain],
    }


def section(rows: pd.DataFrame, protocol: str) -> str:
    """Returns a table of a board for the page, the best method first."""
    plain = PLAIN[protocol]
    accuracies = accuracies_by_metric(rows)
    headline = accuracies["selected"]
    last_tenth = accuracies["last-tenth"]
    classifier = accuracies["classifier"]
    order = headline.columns
    leads = headline.sub(headline[plain], axis=0)
    is_tested_once = "eval_every" in SETTINGS.get(protocol, {})
    runs = rows.groupby("method")
    diverged = runs.size() - headline.count()
    table = pd.DataFrame({
        "Method": order.to_series(),
        "Options": {row: settings_text(options) for row, options in OPTIONS[protocol].items()},
        "Accuracy, %": headline.apply(mean_text),
        f"Ahead of {plain}": leads.apply(mean_text, sign="+").where(order != plain, ""),
        "Last tenth of the rounds, %": "" if is_tested_once else last_tenth.apply(mean_text),
        "By the classifier, %": classifier.apply(mean_text).where(classifier.notna().any(), ""),
        "Floats sent a round": runs.floats_sent.max().map("{:,}".format),
        "Floats held": runs.memory_floats.max().map("{:,}".format),
        "Diverged": diverged.map(lambda count: str(count or "")),
    }).loc[order]  # fmt: skip
    if is_ahead(headline):
        best = order[0]
        table.loc[best, "Accuracy, %"] = f"**{table.loc[best, 'Accuracy, %']}**"
    filled = table.loc[:, table.ne("").any()]
    return github([*filled], filled.to_numpy().tolist(), first_number_column=2)


def accuracies_by_metric(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Returns each accuracy of finished runs, a row a seed, a column a method, the best method first."""
    finished = rows[[*ACCURACIES]].where(rows.status == "finished")
    accuracies = pd.concat([rows[["seed", "method"]], finished], axis=1).pivot(index="seed", columns="method")
    means = accuracies["selected"].mean()
    order = means.sort_values(ascending=False, kind="stable").index
    return {name: accuracies[name][order] for name in ACCURACIES}


def is_ahead(headline: pd.DataFrame) -> bool:
    """Returns whether the best method, in the first column, leads on the second by more than chance."""
    best, second, *_ = headline.columns
    leads = headline[best] - headline[second]
    return interval(leads.dropna().tolist()).low > 0


def main(page: bool = False, only: str = "") -> None:
    """Runs the boards, or only that of a protocol, unless the page alone is asked for, and writes the page."""
    csv = HERE / "board.csv"
    if not page:
        run_into(csv, [only] if only else list(PLAIN))
    rows = pd.read_csv(csv)
    file = HERE / "README.md"
    text = file.read_text()
    for protocol in PLAIN:
        for mark, rows_of_table in rows_by_mark(rows, protocol).items():
            text = between_marks(text, mark, section(rows_of_table, protocol))
    file.write_text(text)


def run_into(csv: Path, protocols: list[str]) -> None:
    """Runs boards, and writes their runs into the CSV, which keeps the rows of the others."""
    boards = []
    if len(protocols) < len(PLAIN):
        committed = pd.read_csv(csv)
        boards.append(committed[~committed.protocol.isin(protocols)])
    for protocol in protocols:
        boards.append(run(protocol))
    pd.concat(boards).to_csv(csv, index=False)


if __name__ == "__main__":
    typer.run(main)
