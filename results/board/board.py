"""One board: every method on the built-in digits, ten seeds each, by options that were tuned on an eleventh.

    python results/board/board.py                 # runs what has not run in runs/board, writes CSV, page and figure
    python results/board/board.py fedfa:digits    # the same for one of the boards, by its protocol
    python results/board/board.py --page          # the page and its figure from the CSV alone

Each method gets three learning rates, with each of them up to four values of the one option that says most of it, its
weight as a rule; `GRIDS` has them. What wins on held-out training examples stands in `options.json`, so that only a
method that is not there is tuned. `git diff` of `board.csv` says which came out otherwise. The board does not compare
papers: the images are few and small, and the set-ups are no paper's.
"""

import csv
import json
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from fedcli import Cell, Table
from fedcli.figures.plots import LINE_COLOURS, write
from fedcli.results import jobs, metrics, reproduce, tune
from fedcli.results.metrics import Interval, interval
from fedcli.results.render import MISSING, github

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
# Lines of a method with its tuned options and others, to tell why it stands out.
VARIANTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "fedfm-lite (all rounds)": (
        "fedfm-lite", {"model_interval": 1},
        "FedFM-Lite exchanges models in every fifth round; with *all rounds* it does so in each.",
    ),
    "fccl-plus (without FNTD)": (
        "fccl-plus", {"regularizer": "none"},
        "FCCL+ distils what its model knew of the other classes into its local phase; *without FNTD* that has "
        "cross-entropy alone.",
    ),
    "fccl-plus (Adam)": (
        "fccl-plus", {"optimizer": "adam", "lr": 0.001},
        "All are trained by SGD, FCCL+ in its paper by Adam; with *Adam* it has the learning rate from there, too.",
    ),
    "local (Adam)": (
        "local", {"optimizer": "adam", "lr": 0.001},
        "So has *local (Adam)*: how far the two lie from those by SGD is the doing of optimizer and rate, how far "
        "apart that of the method.",
    ),
    "feddf (without distillation)": (
        "feddf", {"distillation_epochs": 0},
        "FedDF tests all clients of a network with one model, the mean of theirs, into which it distils the ensemble; "
        "*without distillation* it is the mean alone.",
    ),
}  # fmt: skip
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
    return lines | {name: (method, own) for name, (method, own, _) in VARIANTS.items() if method in lines}


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
            trials, _ = tune.tune(method, texts, out=out, spread=side_by_side, **fixed(method, protocol))
            chosen.setdefault(protocol, {})[method] = trials[0].values
            (HERE / "options.json").write_text(json.dumps(chosen, indent=1, sort_keys=True) + "\n")


def side_by_side(plan: Any) -> dict[Path, str]:
    """Runs what has not ended in processes of their own; returns the errors by folder."""
    return jobs.execute(plan, jobs.Watch(), JOBS, records_only=True)


def run_all(protocol: str) -> None:
    """Runs what has not ended of a board, and puts its rows into the CSV in place of those that it has."""
    folder = RUNS / protocol.replace(":", "-")
    errors = side_by_side(reproduce.plan(table(protocol), folder))
    if errors:
        raise SystemExit(f"{len(errors)} runs have failed (the first: {next(iter(errors.items()))}); run this again.")
    rows = [
        row(cell.cell.row, run.record) for cell in reproduce.plan(table(protocol), folder).cells for run in cell.runs
    ]
    others = [old for old in stored() if old["protocol"] != protocol]
    rows = sorted([*others, *rows], key=lambda row: list(HEADINGS).index(row["protocol"]))
    with (HERE / "board.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[-1].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


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


def stored() -> list[dict[str, str]]:
    """The rows of the CSV, a run each."""
    if not (HERE / "board.csv").is_file():
        return []
    with (HERE / "board.csv").open(newline="") as file:
        return list(csv.DictReader(file))


class Line(NamedTuple):
    """A line of a board: its name, and the rows of its runs."""

    method: str
    runs: list[dict[str, str]]

    def values(self, column: str) -> dict[int, float]:
        """A column of the finished runs in which it is not empty, by seed."""
        finished = [run for run in self.runs if run["status"] == "finished" and run[column]]
        return {int(run["seed"]): float(run[column]) for run in finished}

    def mean(self, column: str = "selected") -> Interval | None:
        """The mean of a column; None where no run has a value."""
        return interval(list(self.values(column).values()))

    def ahead_of(self, other: "Line") -> Interval | None:
        """By how much its headline leads, paired over the seeds that both have."""
        ours, theirs = self.values("selected"), other.values("selected")
        return interval([ours[seed] - theirs[seed] for seed in ours if seed in theirs])


def read() -> dict[str, list[Line]]:
    """The boards by protocol, the best mean first."""
    groups: dict[str, dict[str, list[dict[str, str]]]] = {}
    for run in stored():
        groups.setdefault(run["protocol"], {}).setdefault(run["method"], []).append(run)
    boards = {}
    for protocol, methods in groups.items():
        lines = [Line(method, runs) for method, runs in methods.items()]
        boards[protocol] = sorted(lines, key=lambda line: line.mean().mean if line.mean() else -1.0, reverse=True)
    return boards


def told(mean: Interval | None, form: str = ".2f") -> str:
    """A mean with its interval, as text."""
    if mean is None:
        return MISSING
    ends = f" [{mean.low:{form}}, {mean.high:{form}}]" if mean.low is not None else ""
    return f"{mean.mean:{form}}{ends}"


def options_text(protocol: str, line: str) -> str:
    """The tuned options of a line, with an arrow to the side on which no value was tried."""
    method, own = lines_of(protocol)[line]
    tried, texts = grid(protocol, method), []
    for name, value in sorted(tuned()[protocol][method].items(), key=lambda pair: pair[0] != "lr"):
        if name not in own:
            arrow = " ↓" if value == min(tried[name]) else " ↑" if value == max(tried[name]) else ""
            texts.append(f"{name.replace('_', ' ')} {value:g}{arrow}")
    return ", ".join(texts)


def section(protocol: str, lines: list[Line]) -> Iterator[str]:
    """The paragraphs of a board."""
    plain = next(line for line in lines if line.method == PLAIN[protocol])
    by_classifier = any(line.values("classifier") for line in lines)
    columns = ["Method", "Tuned", "Accuracy, %", f"Ahead of {plain.method}", "Last tenth of the rounds, %"]
    columns += ["By the classifier, %"] if by_classifier else []
    columns += ["Floats sent a round", "Floats held", "Seeds"]
    rows, sides = [], {"ahead": [], "behind": [], "level": []}
    for line in lines:
        lead, done = line.ahead_of(plain), line.values("selected")
        if lead is not None and line is not plain:
            side = "level" if not lead.leaves_out_zero else "ahead" if lead.mean > 0 else "behind"
            sides[side].append(line.method)
        cells = [line.method, options_text(protocol, line.method), told(line.mean())]
        cells += ["" if line is plain else told(lead, "+.2f"), told(line.mean("last-tenth"))]
        if by_classifier:
            cells.append(told(line.mean("classifier")) if line.values("classifier") else "")
        cells += [f"{max(int(run[name]) for run in line.runs):,}" for name in ("floats_sent", "memory_floats")]
        lost = len(line.runs) - len(done)
        rows.append([*cells, f"{len(done)}" + (f", {lost} diverged" if lost else "")])
    first = lines[0].ahead_of(lines[1])
    if first and first.leaves_out_zero and first.mean > 0:
        rows[0][2] = f"**{rows[0][2]}**"
    names = {side: ", ".join(methods) or "none" for side, methods in sides.items()}
    yield f"## {HEADINGS[protocol]} (`{protocol}`)"
    yield (
        f"Ahead of {plain.method}, beyond chance: {names['ahead']}. Behind it: {names['behind']}. Not to be told from "
        f"it with {len(SEEDS)} seeds: {names['level']}."
    )
    yield "\n".join(github(columns, rows, 2))
    yield from (why for name, (_, _, why) in VARIANTS.items() if any(line.method == name for line in lines))


def page(boards: dict[str, list[Line]]) -> str:
    """The text of README.md."""
    trials = sum(prod(map(len, grid(protocol, method).values())) for protocol in boards for method in GRIDS[protocol])
    machines = sorted({run["machine"] for lines in boards.values() for line in lines for run in line.runs})
    blocks = [HEAD.format(first=SEEDS[0], last=SEEDS[-1], trials=trials, machines="; ".join(machines))]
    for protocol, lines in boards.items():
        blocks += section(protocol, lines)
    return "\n\n".join([*blocks, FOOT]) + "\n"


HEAD = """\
# One board of all methods

Every method on the built-in digits, seeds {first} to {last}, options tuned on another seed by held-out training
examples: three learning rates, with each up to four values of the option named ({trials} trials; ↓ and ↑ mark the
lowest and the highest value tried, beyond which a better one may lie). FedProx-FM and MOON-FM have the weight that
FedProx and MOON were tuned to, which was decided after a first board. `python results/board/board.py` does all runs
again with the options that were chosen, [options.json](options.json), in an hour or two on two cores; without that
file it tunes first. `--page` writes only this page, from [board.csv](board.csv), which has every run with its
`params_sha256` ({machines}). The images are few and small and the set-ups are no paper's: the board says whether a
method earns its keep on an easy task, not what it does on the papers' data.

![Mean accuracy of every method with its interval; the plain one in another colour](board.png)"""
FOOT = """\
Means over seeds with their 95 % interval (Student's t); a difference is paired over the seeds, and of twenty
intervals about one leaves out zero where there is no difference. The accuracy is the protocol's headline; where a
column has it by the classifier too, it is the nearest prototype's. Bold: the first, where the interval of its lead
over the second leaves out zero. Floats: what one client sends and receives in a round (the mean over rounds), and
what it holds of models and of the method's own."""


def figure(boards: dict[str, list[Line]]) -> Figure:
    """The means with their intervals, a panel a board."""
    tallest = max(map(len, boards.values()))
    drawn = Figure((3.2 * len(boards), 0.22 * tallest + 0.7), layout="constrained")
    for axes, (protocol, lines) in zip(np.atleast_1d(drawn.subplots(1, len(boards))), boards.items(), strict=True):
        shown = [line for line in lines if line.mean()]
        for place, line in enumerate(shown):
            mean, low, high, _ = line.mean()
            colour = LINE_COLOURS[1] if line.method == PLAIN[protocol] else LINE_COLOURS[0]
            if low is not None:
                axes.plot([low, high], [place, place], color=colour)
            axes.plot(mean, place, "o", color=colour)
        axes.set_yticks(range(len(shown)), [line.method for line in shown])
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
    boards = read()
    (HERE / "README.md").write_text(page(boards))
    write(HERE / "board.png", figure, boards)


if __name__ == "__main__":
    main()
