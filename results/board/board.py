"""One board: every method on the built-in digits, ten seeds each, by options that were tuned on an eleventh.

    python results/board/board.py                 # runs what has not run in runs/board, writes CSV, page and figure
    python results/board/board.py fedfa:digits    # the same for one of the boards, by its protocol
    python results/board/board.py --page          # the page and its figure from the CSV alone

Each method gets three learning rates, with each of them up to four values of the one option that says most of it, its
weight as a rule; `BOARDS` has them. What wins on held-out training examples stands in `options.json`, so that only a
method that is not there is tuned. `git diff` of `board.csv` says which came out otherwise. The board does not compare
papers: the images are few and small, and the set-ups are no paper's.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from fedcli import Cell, Table
from fedcli.figures.plots import LINE_COLOURS, write
from fedcli.registry import find_method
from fedcli.results import jobs, metrics, plans, tune
from fedcli.results.claims import interval_text
from fedcli.results.metrics import interval
from fedcli.results.render import MISSING, between_marks, github

HERE = Path(__file__).parent
SEEDS = tuple(range(10))
MATCHING = {"match_weight": (0.1, 1.0, 5.0, 50.0)}
GLOBAL: dict[str, dict[str, tuple[float, ...]]] = {
    "fedavg": {},
    "fedavgm": {"server_momentum": (0.5, 0.7, 0.9)},
    "fedprox": {"proximal_weight": (0.001, 0.01, 0.1, 1.0)},
    "scaffold": {"server_lr": (0.5, 1.0)},
    "feddyn": {"alpha": (0.001, 0.01, 0.1, 1.0)},
    "fednova": {},
    "moon": {"contrastive_weight": (0.1, 1.0, 5.0, 10.0)},
    "fedproc": {"temperature": (0.1, 0.5, 1.0)},
    "fedproto-general": {"prototype_weight": (0.01, 0.1, 1.0, 10.0)},
    "fedrs": {"scaling": (0.25, 0.5, 0.75)},
    "fedfm": MATCHING,
    "fedfm-lite": MATCHING,
    "fedprox-fm": MATCHING,
    "fednova-fm": MATCHING,
    "moon-fm": MATCHING,
    "fedfa": {"anchor_weight": (0.01, 0.1, 1.0, 10.0)},
    "fedcme": {"alignment_weight": (0.001, 0.01, 0.1, 1.0)},
}
PERSONAL: dict[str, dict[str, tuple[float, ...]]] = {
    "local": {},
    "lg-fedavg": {},
    "fedproto": {"prototype_weight": (0.1, 1.0, 10.0)},
    "fedtgp": {"prototype_weight": (0.1, 1.0, 10.0)},
    "feddistill": {"distillation_weight": (0.1, 1.0, 10.0)},
    "fedgen": {"generator_weight": (0.1, 1.0, 10.0)},
    "fml": {"private_task_share": (0.25, 0.5, 0.75)},
    "fedkd": {"distillation_weight": (0.1, 1.0, 10.0)},
    "fedmd": {},
    "feddf": {"distillation_lr": (0.0001, 0.001, 0.01)},
    "feddf-client": {"distillation_lr": (0.0001, 0.001, 0.01)},
    "rhfl": {"reverse_weight": (0.1, 1.0, 10.0)},
    "fedmatch": {"consistency_weight": (0.001, 0.01, 0.1)},
    "fccl": {"distillation_weight": (0.1, 1.0, 10.0)},
    "fccl-plus": {"similarity_weight": (0.3, 3.0, 30.0)},
    "fedsa": {"contrastive_weight": (0.01, 0.1, 1.0)},
}


class Board(NamedTuple):
    """Methods that are compared under a protocol."""

    heading: str
    plain: str  # the method that the others are held to
    rates: tuple[float, ...]  # learning rates that are tried
    grids: dict[str, dict[str, tuple[float, ...]]]  # values of the other option that are tried, by method


BOARDS = {
    "fedfa:digits": Board("One global model, two classes a client", "fedavg", (0.1, 0.2, 0.4), GLOBAL),
    "fedfm:digits": Board("One global model, Dirichlet shares of 0.5", "fedavg", (0.025, 0.05, 0.1), GLOBAL),
    "fedsa:digits-mixed": Board(
        "Models of their own on two networks, Dirichlet shares of 0.1", "local", (0.01, 0.02, 0.05), PERSONAL
    ),
}
# Feature matching on top of a method, whose own weight is that which it was tuned to alone.
ON_TOP = {"fedprox-fm": ("fedprox", "proximal_weight"), "moon-fm": ("moon", "contrastive_weight")}
# Lines of a method with its tuned options and others, to tell why it stands out; the page says what each is for.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedfm-lite (all rounds)": ("fedfm-lite", {"model_interval": 1}),
    "fccl-plus (without FNTD)": ("fccl-plus", {"regularizer": "none"}),
    "fccl-plus (Adam)": ("fccl-plus", {"optimizer": "adam", "lr": 0.001}),
    "local (Adam)": ("local", {"optimizer": "adam", "lr": 0.001}),
    "feddf (without distillation)": ("feddf", {"distillation_epochs": 0}),
}
RUNS = Path("runs/board")
EXECUTE = partial(jobs.execute, watch=jobs.Watch(), jobs=2, records_only=True)  # runs what has not ended of a plan
PUBLIC = {"public_dataset": "photos", "public_examples": 500, "public_batch_size": 125}
ACCURACIES = ("selected", "last-tenth", "classifier")  # columns of the CSV, in percent


def tuned(protocol: str) -> dict[str, dict[str, Any]]:
    """The options that were chosen under a protocol, by method."""
    file = HERE / "options.json"
    return json.loads(file.read_text()).get(protocol, {}) if file.is_file() else {}


def fixed(method: str, protocol: str) -> dict[str, Any]:
    """Options of a method that are not tuned with it."""
    options = {"protocol": protocol, "dataset": "digits", **(PUBLIC if find_method(method).uses_public_data else {})}
    if method == "fedproc":  # under FedFA's protocols it has the form of FedFA's code, which has no temperature
        options["prototypes"] = "means"
    base, option = ON_TOP.get(method, ("", ""))
    if base in tuned(protocol):
        options[option] = tuned(protocol)[base][option]
    return options


def grid(protocol: str, method: str) -> dict[str, tuple[float, ...]]:
    """The values that are tried, each with each, by option."""
    return {"lr": BOARDS[protocol].rates, **BOARDS[protocol].grids[method]}


def lines_of(protocol: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """The method of each line of a board, and what it has instead of its tuned options."""
    lines = {method: (method, {}) for method in BOARDS[protocol].grids}
    return lines | {name: (method, own) for name, (method, own) in VARIANTS.items() if method in lines}


def table(protocol: str) -> Table:
    """Every line's headline under a protocol, with the options that have been chosen."""
    heading, cells = BOARDS[protocol].heading, []
    for line, (method, own) in lines_of(protocol).items():
        settings = {**fixed(method, protocol), **tuned(protocol).get(method, {}), **own}
        cells.append(Cell(line, heading, method, settings))
    return Table(protocol, heading, ("Board", protocol), tuple(cells), SEEDS)


def tune_all(protocol: str) -> None:
    """Tunes every method that has no options yet, those on top of others last, and keeps what wins."""
    for method in sorted(BOARDS[protocol].grids, key=lambda method: method in ON_TOP):
        if method not in tuned(protocol):
            out = RUNS / "tune" / protocol.replace(":", "-") / method
            plan = tune.plan(method, out=out, **grid(protocol, method), **fixed(method, protocol))
            trials = tune.rank(plan, EXECUTE(plan))
            chosen = {name: tuned(name) for name in BOARDS}
            chosen[protocol][method] = trials[0].values
            (HERE / "options.json").write_text(json.dumps(chosen, indent=1, sort_keys=True) + "\n")


def run_all(protocol: str) -> None:
    """Runs what has not ended of a board, and puts its rows into the CSV in place of those that it has."""
    folder, rows = RUNS / protocol.replace(":", "-"), []
    if errors := EXECUTE(plans.plan(table(protocol), folder)):
        raise SystemExit(f"{len(errors)} runs have failed (the first: {next(iter(errors.items()))}); run this again.")
    for cell in plans.plan(table(protocol), folder).cells:
        for run in cell.runs:
            record = run.record
            names = (*ACCURACIES, "floats-down", "floats-up", "memory-floats")
            *accuracies, down, up, held = (metrics.find_metric(name).value(record) for name in names)
            rows.append({
                "protocol": protocol, "method": cell.cell.row, "seed": record["seed"], "status": record["status"],
                **dict(zip(ACCURACIES, accuracies, strict=True)),
                "floats_sent": round((down or 0) + (up or 0)), "memory_floats": held or 0,  # of a client, a round
                "params_sha256": record["summary"].get("params_sha256", ""),
                "machine": f"{record['hardware']['name']}, torch {record['versions']['torch']}",
            })  # fmt: skip
    others = pd.read_csv(HERE / "board.csv")
    boards = [pd.DataFrame(rows) if name == protocol else others[others.protocol == name] for name in BOARDS]
    pd.concat(boards).to_csv(HERE / "board.csv", index=False)


def by_seed(rows: pd.DataFrame, protocol: str, column: str) -> pd.DataFrame:
    """A column of the finished runs of a board, by seed and line, the line with the best headline first."""
    board = rows[rows.protocol == protocol]
    done = board[board.status == "finished"]
    means = done.groupby("method").selected.mean().reindex(board.method.unique()).round(6)
    order = means.sort_values(ascending=False, kind="stable").index
    return done.pivot(index="seed", columns="method", values=column).reindex(columns=order)


def told(numbers: pd.Series, signed: bool = False) -> str:
    """The mean of what is there of a column with its interval, as text."""
    mean = interval(numbers.dropna().tolist())
    return MISSING if mean is None else interval_text(metrics.find_metric("selected"), mean, signed)


def side(lead: pd.Series) -> str:
    """Whether a line is "ahead" of another or "behind" it, beyond chance, or "level", by its lead of each seed."""
    mean = interval(lead.dropna().tolist())
    is_decided = mean is not None and mean.leaves_out_zero
    return ("ahead" if mean.mean > 0 else "behind") if is_decided else "level"


def options_text(protocol: str, line: str) -> str:
    """The tuned options of a line, with an arrow to the side on which no value was tried."""
    method, own = lines_of(protocol)[line]
    texts = []
    for name, tried in grid(protocol, method).items():
        value = tuned(protocol)[method].get(name)
        if name not in own and value is not None:
            arrow = {min(tried): " ↓", max(tried): " ↑"}.get(value, "")
            texts.append(f"{name.replace('_', ' ')} {value:g}{arrow}")
    return ", ".join(texts)


def section(rows: pd.DataFrame, protocol: str) -> str:
    """A board: what is ahead of the plain method, and the table."""
    headline, tenths, classifier = (by_seed(rows, protocol, column) for column in ACCURACIES)
    plain, runs = BOARDS[protocol].plain, rows[rows.protocol == protocol].groupby("method")
    leads = headline.sub(headline[plain], axis=0)
    done = runs.status.apply(lambda states: (states == "finished").sum())
    table = pd.DataFrame({
        "Method": headline.columns.to_series(),
        "Tuned": {line: options_text(protocol, line) for line in headline},
        "Accuracy, %": headline.apply(told),
        f"Ahead of {plain}": leads.apply(told, signed=True).mask(headline.columns == plain, ""),
        "Last tenth of the rounds, %": tenths.apply(told),
        "By the classifier, %": classifier.apply(told).where(classifier.notna().any(), ""),
        "Floats sent a round": runs.floats_sent.max().map("{:,}".format),
        "Floats held": runs.memory_floats.max().map("{:,}".format),
        "Seeds": done.astype(str) + (runs.size() - done).map(lambda count: f", {count} diverged" if count else ""),
    }).loc[headline.columns]  # fmt: skip
    if side(headline.iloc[:, 0] - headline.iloc[:, 1]) == "ahead":
        table.iloc[0, 2] = f"**{table.iloc[0, 2]}**"
    table = table.loc[:, table.ne("").any()]
    sides = leads.drop(columns=plain).dropna(axis=1, how="all").apply(side)
    ahead, behind, level = (", ".join(sides.index[sides == name]) or "none" for name in ("ahead", "behind", "level"))
    summary = (
        f"Ahead of {plain}, beyond chance: {ahead}. Behind it: {behind}. "
        f"Not to be told from it with {len(SEEDS)} seeds: {level}."
    )
    return "\n".join([summary, "", *github([*table], table.to_numpy().tolist(), 2)])


def figure(rows: pd.DataFrame) -> Figure:
    """The means with their intervals, a panel a board."""
    headlines = {protocol: by_seed(rows, protocol, "selected").dropna(axis=1, how="all") for protocol in BOARDS}
    tallest = max(len(headline.columns) for headline in headlines.values())
    drawn = Figure((3.2 * len(BOARDS), 0.22 * tallest + 0.7), layout="constrained")
    for axes, (protocol, headline) in zip(drawn.subplots(1, len(BOARDS)), headlines.items(), strict=True):
        for line in headline:
            mean, low, *_ = interval(headline[line].dropna().tolist())
            colour = LINE_COLOURS[line == BOARDS[protocol].plain]
            axes.errorbar(mean, line, xerr=mean - low, fmt="o", color=colour)
        axes.invert_yaxis()
        axes.grid(axis="x")
        axes.set(xlabel="Accuracy (%)", title=BOARDS[protocol].heading.replace(", ", ",\n"))
    return drawn


def main(protocols: list[str]) -> None:
    """Does what is left to do of these boards, and writes the page and its figure."""
    for protocol in protocols:
        tune_all(protocol)
        run_all(protocol)
    page, rows = HERE / "README.md", pd.read_csv(HERE / "board.csv")
    text = page.read_text()
    for protocol in BOARDS:
        text = between_marks(text, protocol, section(rows, protocol))
    page.write_text(text)
    write(HERE / "board.png", figure, rows, page=True)


if __name__ == "__main__":
    given = sys.argv[1:]
    if given != ["--page"] and not BOARDS.keys() >= {*given}:
        raise SystemExit(__doc__)
    main([] if given == ["--page"] else given or [*BOARDS])
