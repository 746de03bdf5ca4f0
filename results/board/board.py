"""One board: every method on the built-in digits, ten seeds each, by options that were tuned on an eleventh.

    python results/board/board.py                 # runs what has not run in runs/board, writes CSV, page and figure
    python results/board/board.py fedfa:digits    # the same for one of the boards, by its protocol
    python results/board/board.py --page          # the page and its figure from the CSV alone

Each method gets three learning rates, with each of them up to four values of the one option that says most of it, its
weight as a rule; `GRIDS` has them. What wins on held-out training examples stands in `options.json`, so that only a
method that is not there is tuned. `git diff` of `board.csv` says which came out otherwise. The board does not compare
papers: the images are few and small, and the set-ups are no paper's.
"""

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from fedcli import Cell, Table
from fedcli.figures.plots import LINE_COLOURS, write
from fedcli.results import jobs, metrics, plans, tune
from fedcli.results.metrics import Interval, interval
from fedcli.results.render import MISSING, between_marks, github

HERE = Path(__file__).parent
SEEDS = tuple(range(10))
RATES = {"fedfa:digits": (0.1, 0.2, 0.4), "fedfm:digits": (0.025, 0.05, 0.1), "fedsa:digits-mixed": (0.01, 0.02, 0.05)}
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
HEADINGS = {
    "fedfa:digits": "One global model, two classes a client",
    "fedfm:digits": "One global model, Dirichlet shares of 0.5",
    "fedsa:digits-mixed": "Models of their own on two networks, Dirichlet shares of 0.1",
}
# What the others are held to.
PLAIN = {"fedfa:digits": "fedavg", "fedfm:digits": "fedavg", "fedsa:digits-mixed": "local"}
GRIDS = {"fedfa:digits": GLOBAL, "fedfm:digits": GLOBAL, "fedsa:digits-mixed": PERSONAL}
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
RUNS, JOBS = Path("runs/board"), 2
PUBLIC = {"public_dataset": "photos", "public_examples": 500, "public_batch_size": 125}
WITH_PUBLIC = ("fedmd", "feddf", "feddf-client", "rhfl", "fedmatch", "fccl", "fccl-plus")
ACCURACIES = ("selected", "last-tenth", "classifier")  # columns of the CSV, in percent


def tuned() -> dict[str, dict[str, dict[str, Any]]]:
    """The options that were chosen, by protocol and method."""
    file = HERE / "options.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def fixed(method: str, protocol: str) -> dict[str, Any]:
    """Options of a method that are not tuned with it."""
    options = {"protocol": protocol, "dataset": "digits", **(PUBLIC if method in WITH_PUBLIC else {})}
    if method == "fedproc":  # under FedFA's protocols it has the form of FedFA's code, which has no temperature
        options["prototypes"] = "means"
    base, option = ON_TOP.get(method, ("", ""))
    return options | ({option: tuned()[protocol][base][option]} if base in tuned().get(protocol, {}) else {})


def grid(protocol: str, method: str) -> dict[str, tuple[float, ...]]:
    """The values that are tried, each with each, by option."""
    return {"lr": RATES[protocol], **GRIDS[protocol][method]}


def lines_of(protocol: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """The method of each line of a board, and what it has instead of its tuned options."""
    lines = {method: (method, {}) for method in GRIDS[protocol]}
    return lines | {name: (method, own) for name, (method, own) in VARIANTS.items() if method in lines}


def table(protocol: str) -> Table:
    """Every line's headline under a protocol, with the options that have been chosen."""
    cells = []
    for line, (method, own) in lines_of(protocol).items():
        settings = {**fixed(method, protocol), **tuned().get(protocol, {}).get(method, {}), **own}
        cells.append(Cell(line, HEADINGS[protocol], method, settings))
    return Table(protocol, HEADINGS[protocol], ("Board", protocol), tuple(cells), SEEDS)


def tune_all(protocol: str) -> None:
    """Tunes every method that has no options yet, those on top of others last, and keeps what wins."""
    chosen = tuned()
    for method in sorted(GRIDS[protocol], key=lambda method: method in ON_TOP):
        if method not in chosen.get(protocol, {}):
            texts = [f"{option}={','.join(map(str, values))}" for option, values in grid(protocol, method).items()]
            out = RUNS / "tune" / protocol.replace(":", "-") / method
            trials, _ = tune.tune(method, texts, out=out, execute=side_by_side, **fixed(method, protocol))
            chosen.setdefault(protocol, {})[method] = trials[0].values
            (HERE / "options.json").write_text(json.dumps(chosen, indent=1, sort_keys=True) + "\n")


def side_by_side(plan: Any) -> dict[Path, str]:
    """Runs what has not ended in processes of their own; returns the errors by folder."""
    return jobs.execute(plan, jobs.Watch(), JOBS, records_only=True)


def run_all(protocol: str) -> None:
    """Runs what has not ended of a board, and puts its rows into the CSV in place of those that it has."""
    folder = RUNS / protocol.replace(":", "-")
    errors = side_by_side(plans.plan(table(protocol), folder))
    if errors:
        raise SystemExit(f"{len(errors)} runs have failed (the first: {next(iter(errors.items()))}); run this again.")
    cells = plans.plan(table(protocol), folder).cells
    rows = pd.DataFrame([row(cell.cell.row, run.record) for cell in cells for run in cell.runs])
    others = read()
    boards = [rows if name == protocol else others[others.protocol == name] for name in HEADINGS]
    pd.concat(boards).to_csv(HERE / "board.csv", index=False)


def row(line: str, record: dict[str, Any]) -> dict[str, Any]:
    """What the CSV says of a run: accuracies in percent, floats of a client in the mean round."""
    sent = [entry["floats_down"] + entry["floats_up"] for entry in record["rounds"]]
    return {
        "protocol": record["protocol"], "method": line, "seed": record["seed"], "status": record["status"],
        **{name: metrics.find_metric(name).value(record) for name in ACCURACIES},
        "floats_sent": round(fmean(sent)) if sent else 0,
        "memory_floats": (record["cost"] or {"memory_floats": 0})["memory_floats"],
        "params_sha256": record["summary"].get("params_sha256", ""),
        "machine": f"{record['hardware']['name']}, torch {record['versions']['torch']}",
    }  # fmt: skip


def read() -> pd.DataFrame:
    """The rows of the CSV, a run each."""
    return pd.read_csv(HERE / "board.csv")


def values(rows: pd.DataFrame, protocol: str, column: str) -> pd.DataFrame:
    """A column of the finished runs of a board, by seed and line, the line with the best headline first."""
    board = rows[rows.protocol == protocol]
    done = board[board.status == "finished"]
    means = done.groupby("method").selected.mean().reindex(board.method.unique()).round(6)
    order = means.sort_values(ascending=False, kind="stable").index
    return done.pivot(index="seed", columns="method", values=column).reindex(columns=order)


def told(mean: Interval | None, form: str = ".2f") -> str:
    """A mean with its interval, as text."""
    if mean is None:
        return MISSING
    ends = f" [{mean.low:{form}}, {mean.high:{form}}]" if mean.low is not None else ""
    return f"{mean.mean:{form}}{ends}"


def mean_of(numbers: pd.Series) -> Interval | None:
    """The mean of what is there of a column, with its interval."""
    return interval(list(numbers.dropna()))


def options_text(protocol: str, line: str) -> str:
    """The tuned options of a line, with an arrow to the side on which no value was tried."""
    method, own = lines_of(protocol)[line]
    tried, texts = grid(protocol, method), []
    for name, value in sorted(tuned()[protocol][method].items(), key=lambda pair: pair[0] != "lr"):
        if name not in own:
            arrow = " ↓" if value == min(tried[name]) else " ↑" if value == max(tried[name]) else ""
            texts.append(f"{name.replace('_', ' ')} {value:g}{arrow}")
    return ", ".join(texts)


def section(rows: pd.DataFrame, protocol: str) -> str:
    """A board: what is ahead of the plain method, and the table."""
    headline, tenths, classifier = (values(rows, protocol, column) for column in ACCURACIES)
    plain = PLAIN[protocol]
    leads = headline.sub(headline[plain], axis=0)
    columns = ["Method", "Tuned", "Accuracy, %", f"Ahead of {plain}", "Last tenth of the rounds, %"]
    by_classifier = classifier.notna().any(axis=None)
    columns += ["By the classifier, %"] if by_classifier else []
    lines, sides = [], {"ahead": [], "behind": [], "level": []}
    for line in headline:
        runs = rows[(rows.protocol == protocol) & (rows.method == line)]
        lead = mean_of(leads[line])
        if line != plain and lead is not None:
            side = "level" if not lead.leaves_out_zero else "ahead" if lead.mean > 0 else "behind"
            sides[side].append(line)
        cells = [line, options_text(protocol, line), told(mean_of(headline[line]))]
        cells += ["" if line == plain else told(lead, "+.2f"), told(mean_of(tenths[line]))]
        if by_classifier:
            cells.append(told(mean_of(classifier[line])) if classifier[line].notna().any() else "")
        lost = int((runs.status != "finished").sum())
        cells += [f"{runs.floats_sent.max():,}", f"{runs.memory_floats.max():,}"]
        lines.append([*cells, f"{len(runs) - lost}" + (f", {lost} diverged" if lost else "")])
    first, second = headline.columns[:2]
    gap = mean_of(headline[first] - headline[second])
    if gap is not None and gap.leaves_out_zero and gap.mean > 0:
        lines[0][2] = f"**{lines[0][2]}**"
    names = {side: ", ".join(methods) or "none" for side, methods in sides.items()}
    summary = (
        f"Ahead of {plain}, beyond chance: {names['ahead']}. Behind it: {names['behind']}. Not to be told from it with "
        f"{len(SEEDS)} seeds: {names['level']}."
    )
    return "\n".join([summary, "", *github([*columns, "Floats sent a round", "Floats held", "Seeds"], lines, 2)])


def page(rows: pd.DataFrame, text: str) -> str:
    """The page with its boards written anew."""
    for protocol in HEADINGS:
        text = between_marks(text, protocol, section(rows, protocol))
    return text


def figure(rows: pd.DataFrame) -> Figure:
    """The means with their intervals, a panel a board."""
    boards = {protocol: values(rows, protocol, "selected").dropna(axis=1, how="all") for protocol in HEADINGS}
    tallest = max(len(headline.columns) for headline in boards.values())
    drawn = Figure((3.2 * len(boards), 0.22 * tallest + 0.7), layout="constrained")
    for axes, (protocol, headline) in zip(drawn.subplots(1, len(boards)), boards.items(), strict=True):
        for place, line in enumerate(headline):
            mean, low, high, _ = mean_of(headline[line])
            colour = LINE_COLOURS[1] if line == PLAIN[protocol] else LINE_COLOURS[0]
            axes.plot([low, high], [place, place], color=colour)
            axes.plot(mean, place, "o", color=colour)
        axes.set_yticks(range(len(headline.columns)), headline.columns)
        axes.invert_yaxis()
        axes.grid(axis="x")
        axes.set_xlabel("Accuracy (%)")
        axes.set_title(HEADINGS[protocol].replace(", ", ",\n"))
    return drawn


def main() -> None:
    """Does what is left to do of the boards that are named, or of all, and writes the page and its figure."""
    protocols = sys.argv[1:] or [*HEADINGS]
    if protocols != ["--page"]:
        if not HEADINGS.keys() >= {*protocols}:
            raise SystemExit(__doc__)
        for protocol in protocols:
            tune_all(protocol)
            run_all(protocol)
    (HERE / "README.md").write_text(page(read(), (HERE / "README.md").read_text()))
    write(HERE / "board.png", figure, read(), page=True)


if __name__ == "__main__":
    main()
