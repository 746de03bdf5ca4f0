"""One board: every method on the built-in digits, ten seeds each, by options that were tuned on an eleventh.

    python results/board/board.py           # runs what has not run in runs/board, then writes CSV, page and figure
    python results/board/board.py global    # the same for the two boards of one global model; or personal
    python results/board/board.py --page    # the page and its figure from the CSV alone

Each method gets three learning rates, with each of them up to four values of the one option that says most of it, its
weight as a rule; `GRIDS` has them. What wins on held-out training examples stands in `options.json`, so that only a
method that is not there is tuned. The page says how long all runs take, and all trials. `git diff` of `board.csv` says
which came out otherwise. The board does not compare papers: the images are few and small, and the set-ups are no
paper's.

`seconds.csv` has the mean seconds of the runs of some seeds, two at a time as here and with nothing else going on.
"""

import csv
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from math import prod
from multiprocessing import get_context, parent_process
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure

from fedcli import Cell, Table
from fedcli.figures.plots import LINE_COLOURS, write
from fedcli.results import jobs, metrics, reproduce, tune
from fedcli.results.metrics import Interval, interval
from fedcli.results.render import github
from fedcli.runs.models import remove_models
from fedcli.runs.signals import end_with_parent, exit_code

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
# By name: title and protocols.
TABLES = {
    "global": ("One global model", ("fedfa:digits", "fedfm:digits")),
    "personal": ("Models of their own", ("fedsa:digits-mixed",)),
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
RUNS, PROCESSES = Path("runs/board"), 2
PUBLIC = {"public_dataset": "photos", "public_examples": 500, "public_batch_size": 125}
WITH_PUBLIC = ("fedmd", "feddf", "feddf-client", "rhfl", "fedmatch", "fccl", "fccl-plus")


def fixed(method: str, protocol: str) -> dict[str, Any]:
    """Options of a method that are not tuned with it."""
    found = {"protocol": protocol, "dataset": "digits", **(PUBLIC if method in WITH_PUBLIC else {})}
    if method == "fedproc":  # under FedFA's protocols it has the form of FedFA's code, which has no temperature
        found["prototypes"] = "means"
    base, option = ON_TOP.get(method, ("", ""))
    return found | ({option: tuned()[protocol][base][option]} if base in tuned().get(protocol, {}) else {})


def grid(protocol: str, method: str) -> dict[str, tuple[float, ...]]:
    """The values that are tried, each with each, by option."""
    return {"lr": RATES[protocol], **GRIDS[protocol][method]}


def tuned() -> dict[str, dict[str, dict[str, Any]]]:
    """The options that were chosen, by protocol and method."""
    file = HERE / "options.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def lines_of(protocol: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """The method of each line of a board, and what it has instead of its tuned options."""
    found = {method: (method, {}) for method in GRIDS[protocol]}
    return found | {name: (method, own) for name, (method, own, _) in VARIANTS.items() if method in found}


def table(name: str, title: str, protocols: tuple[str, ...]) -> Table:
    """A table of every method's headline under a protocol, and of its mean over the last tenth of the rounds."""
    options, cells = tuned(), []
    for protocol in protocols:
        heading = HEADINGS[protocol]
        for row, (method, own) in lines_of(protocol).items():
            settings = {**fixed(method, protocol), **options.get(protocol, {}).get(method, {}), **own}
            cells.append(Cell(row, heading, method, settings))
            cells.append(Cell(row, f"{heading}, last tenth", method, settings, "last-tenth"))
    return Table(name, title, ("Board", name), tuple(cells), SEEDS)


def tables() -> dict[str, Table]:
    """The tables, with the options that have been chosen."""
    return {name: table(name, *about) for name, about in TABLES.items()}


def begin_process() -> None:
    """Gives a process its one thread, and lets it end with the one that started it, however that ends."""
    torch.set_num_threads(1)
    end_with_parent(parent_process().sentinel)


def call(work: Callable[..., Any], given: tuple) -> Any:
    """Calls `work`; interrupted, it ends the process, which would otherwise go on with what waits."""
    try:
        return work(*given)
    except KeyboardInterrupt as error:
        os._exit(exit_code(error))


def side_by_side(work: Callable[..., Any], given: Iterable[tuple]) -> Iterator[tuple[tuple, Any]]:
    """Calls `work` in two processes of one thread each; yields its arguments and its result as each ends."""
    with ProcessPoolExecutor(PROCESSES, get_context("spawn"), begin_process) as pool:
        futures = {pool.submit(call, work, one): one for one in given}
        for future in as_completed(futures):
            yield futures[future], future.result()


def tune_one(protocol: str, method: str) -> tuple[dict[str, Any], float]:
    """The options that win on held-out examples, and their accuracy."""
    texts = [f"{option}={','.join(map(str, values))}" for option, values in grid(protocol, method).items()]
    out = RUNS / "tune" / protocol.replace(":", "-") / method
    trials, _ = tune.tune(method, texts, out=out, **fixed(method, protocol))
    return trials[0].values, trials[0].accuracy


def tune_all(protocols: Iterable[str]) -> None:
    """Tunes every method that has no options yet under the protocols, and keeps what wins."""
    chosen = tuned()
    left = [(at, method) for at in protocols for method in GRIDS[at] if method not in chosen.get(at, {})]
    for on_top in (False, True):  # they need what the others were tuned to
        part = [(at, method) for at, method in left if (method in ON_TOP) == on_top]
        for (protocol, method), (best, accuracy) in side_by_side(tune_one, part):
            chosen.setdefault(protocol, {})[method] = best
            (HERE / "options.json").write_text(json.dumps(chosen, indent=1, sort_keys=True) + "\n")
            print(f"{protocol} {method}: {best}, {accuracy:.4f} on held-out examples", flush=True)


def planned(name: str, seed: int) -> reproduce.TablePlan:
    """A table with one seed, whose runs have a folder of their own."""
    return reproduce.plan(tables()[name], RUNS / name / f"seed-{seed}", seeds=(seed,))


def run_seed(name: str, seed: int) -> dict[Path, str]:
    """Runs what has not ended, and keeps the records alone; returns the errors by folder."""
    plan = planned(name, seed)
    errors = jobs.execute(plan, jobs.Watch())
    for run in plan.runs:
        if run.folder not in errors:
            remove_models(run.folder)
    return errors


def rows(name: str) -> Iterator[dict[str, Any]]:
    """What the CSV says of every run of a table: accuracies in percent, floats of a client in the mean round."""
    cells = {seed: planned(name, seed).cells for seed in SEEDS}
    for same in zip(*cells.values(), strict=True):
        if same[0].cell.metric != "selected":
            continue
        for run in (run for cell in same for run in cell.runs):
            if run.record is None or run.state not in reproduce.ENDED:
                raise SystemExit(f"the run '{run.folder}' has not ended (it is {run.state}); run this file again.")
            record = run.record
            sent = [entry["floats_down"] + entry["floats_up"] for entry in record["rounds"]]
            names = ("selected", "last-tenth", "classifier")
            values = {metric: metrics.find_metric(metric).value(record) for metric in names}
            yield {
                "protocol": record["protocol"], "method": same[0].cell.row, "seed": record["seed"],
                "status": record["status"], **values,
                "floats_sent": round(fmean(sent)) if sent else 0,
                "memory_floats": (record["cost"] or {"memory_floats": 0})["memory_floats"],
                "params_sha256": record["summary"].get("params_sha256", ""),
                "machine": f"{record['hardware']['name']}, torch {record['versions']['torch']}",
            }  # fmt: skip


class Line(NamedTuple):
    """A line of a board: its runs, with accuracies in percent, machines and costs.

    Attributes:
        method: Its name.
        headline: By seed.
        last_tenth: Means of the last tenth of the rounds.
        classifier: Of the classifier, where the headline is the nearest prototype's.
        diverged: Number of runs that did.
        machines: On which they ran.
        floats_sent: By a client in the mean round.
        memory_floats: That a client holds.
    """

    method: str
    headline: dict[int, float]
    last_tenth: list[float]
    classifier: list[float]
    diverged: int
    machines: set[str]
    floats_sent: int
    memory_floats: int

    @property
    def mean(self) -> Interval | None:
        """The mean headline; None where every run diverged."""
        return interval(list(self.headline.values()))

    def ahead_of(self, other: "Line") -> Interval | None:
        """By how much it leads, paired over the seeds that both have."""
        return interval(
            [value - other.headline[seed] for seed, value in self.headline.items() if seed in other.headline]
        )


def stored() -> list[dict[str, str]]:
    """The rows of the CSV, a run each."""
    if not (HERE / "board.csv").is_file():
        return []
    with (HERE / "board.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def keep(found: Sequence[dict[str, Any]], protocols: Sequence[str]) -> None:
    """Puts all rows of some protocols into the CSV, in place of those that it has of them."""
    places = list(HEADINGS)
    others = [row for row in stored() if row["protocol"] not in protocols]
    with (HERE / "board.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, found[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted([*others, *found], key=lambda row: places.index(row["protocol"])))


def read() -> dict[str, list[Line]]:
    """The boards by protocol, the best mean first."""
    found: dict[str, dict[str, list[dict[str, str]]]] = {}
    if not (runs := stored()):
        raise SystemExit("there is no board.csv yet; run this file without --page.")
    for run in runs:
        found.setdefault(run["protocol"], {}).setdefault(run["method"], []).append(run)
    boards = {}
    for protocol, methods in found.items():
        lines = []
        for method, runs in methods.items():
            whole = [run for run in runs if run["status"] == "finished"]
            tenths = [float(run["last-tenth"]) for run in whole]
            headline = {int(run["seed"]): float(run["selected"]) for run in whole}
            classifier = [float(run["classifier"]) for run in whole if run["classifier"]]
            costs = (max(int(run[name]) for run in runs) for name in ("floats_sent", "memory_floats"))
            machines = {run["machine"] for run in runs}
            lines.append(Line(method, headline, tenths, classifier, len(runs) - len(whole), machines, *costs))
        boards[protocol] = sorted(lines, key=lambda line: line.mean.mean if line.mean else -1.0, reverse=True)
    return boards


def seconds(protocol: str) -> dict[str, float]:
    """What a run of each line takes beside another."""
    with (HERE / "seconds.csv").open(newline="") as file:
        return {row["method"]: float(row["seconds"]) for row in csv.DictReader(file) if row["protocol"] == protocol}


def told(found: Interval | None, form: str = ".2f") -> str:
    """A mean with its interval, as text."""
    if found is None:
        return "–"
    ends = f" [{found.low:{form}}, {found.high:{form}}]" if found.low is not None else ""
    return f"{found.mean:{form}}{ends}"


def at_an_end(value: float, tried: tuple[float, ...]) -> str:
    """An arrow to the side on which no value was tried."""
    return " ↓" if value == min(tried) else " ↑" if value == max(tried) else ""


def section(protocol: str, lines: list[Line]) -> Iterator[str]:
    """A board of the page."""
    plain = next(line for line in lines if line.method == PLAIN[protocol])
    against = {line.method: line.ahead_of(plain) for line in lines if line is not plain}
    clear = {method: found for method, found in against.items() if found and found.leaves_out_zero}
    ahead = [method for method, found in clear.items() if found.mean > 0]
    behind = [method for method, found in clear.items() if found.mean < 0]
    level = [method for method, found in against.items() if found and method not in clear]
    yield f"## {HEADINGS[protocol]} (`{protocol}`)"
    yield ""
    yield (
        f"Ahead of {plain.method}, beyond chance: {', '.join(ahead) or 'none'}. "
        f"Behind it: {', '.join(behind) or 'none'}. "
        f"Not to be told from it with {len(SEEDS)} seeds: {', '.join(level) or 'none'}."
    )
    yield ""
    options, rows = tuned()[protocol], []
    if highest := [name for name in GRIDS[protocol] if options.get(name, {}).get("lr") == max(RATES[protocol])]:
        yield f"Tuned to the highest learning rate tried, so that a higher one may be better: {', '.join(highest)}."
        yield ""
    by_prototypes = [line.method for line in lines if line.classifier]
    for line in lines:
        lead = "" if line is plain else told(against[line.method], "+.2f")
        method, own = lines_of(protocol)[line.method]
        tried = grid(protocol, method)
        chosen = ", ".join(
            f"{name.replace('_', ' ')} {value:g}{at_an_end(value, tried[name])}"
            for name, value in sorted(options[method].items(), key=lambda pair: pair[0] != "lr")
            if name not in own
        )
        seeds = f"{len(line.headline)}" + (f", {line.diverged} diverged" if line.diverged else "")
        costs = (f"{value:,}" for value in (line.floats_sent, line.memory_floats))
        by_classifier = [told(interval(line.classifier)) if line.classifier else ""] if by_prototypes else []
        accuracies = (told(line.mean), lead, told(interval(line.last_tenth)), *by_classifier)
        rows.append([line.method, chosen, *accuracies, *costs, seeds])
    if (gap := lines[0].ahead_of(lines[1])) and gap.leaves_out_zero and gap.mean > 0:
        rows[0][2] = f"**{rows[0][2]}**"
    yield from github(
        ["Method", "Tuned", "Accuracy, %", f"Ahead of {plain.method}", "Last tenth of the rounds, %",
         *(["By the classifier, %"] if by_prototypes else []), "Floats sent a round", "Floats held", "Seeds"], rows, 2,
    )  # fmt: skip
    yield ""
    if by_prototypes:
        yield f"By the nearest prototype, not by the classifier, are tested: {', '.join(by_prototypes)}.\n"
    yield from (f"{why}\n" for name, (_, _, why) in VARIANTS.items() if name in against)


def page(boards: dict[str, list[Line]]) -> str:
    """The text of README.md."""
    trials = {(at, method): prod(map(len, grid(at, method).values())) for at in boards for method in GRIDS[at]}
    taken = {at: seconds(at) for at in boards}  # without a board that has not been run
    hours = {
        name: len(SEEDS) * sum(sum(taken.get(at, {}).values()) for at in protocols) / 3600 / PROCESSES
        for name, (_, protocols) in TABLES.items()
    }
    count = len(SEEDS) * sum(len(lines_of(at)) for at in boards)
    more = sum(number * taken[at][method] for (at, method), number in trials.items()) / 3600 / PROCESSES
    machines = sorted(set().union(*(line.machines for board in boards.values() for line in board)))
    lines = [
        "# One board of all methods",
        "",
        f"Every method on the built-in digits, seeds {SEEDS[0]} to {SEEDS[-1]}, options tuned on another seed by "
        "held-out training examples: three learning rates, with each up to four values of the option named "
        f"({sum(trials.values())} trials; ↓ and ↑ mark the lowest and the highest value tried). FedProx-FM and MOON-FM "
        "have the weight that FedProx and MOON were tuned to, which was decided after a first board, with their "
        f"default weights. `python results/board/board.py` does all {count} runs again with the options that were "
        f"chosen, `options.json`: {60 * hours['global']:.0f} minutes of two cores for one global model, which "
        f"`board.py global` does alone, and {60 * hours['personal']:.0f} for models of their own, `board.py personal`, "
        "by `seconds.csv`. Without `options.json` it tunes first, "
        f"{more:.1f} hours more if a trial takes what a run does. `--page` writes only this page from "
        f"`board.csv`, which has every run with its `params_sha256` ({'; '.join(machines)}). The images are few and "
        "small and the set-ups are no paper's: the board says whether a method earns its keep on an easy task, not "
        "what it does on the papers' data.",
        "",
        "![Mean accuracy of every method with its interval; the plain one in another colour](board.png)",
        "",
    ]
    for protocol, board in boards.items():
        lines += section(protocol, board)
    lines += [
        f"## {heading} (`{protocol}`)\n\nNot all of its runs have ended.\n"
        for protocol, heading in HEADINGS.items() if protocol not in boards
    ]  # fmt: skip
    lines += [
        "Means over seeds with their 95 % interval (Student's t); a difference is paired over the seeds, and of twenty "
        "intervals about one leaves out zero where there is no difference. The "
        "accuracy is the protocol's headline. Bold: the first, where the interval of its lead over the second "
        "leaves out zero. Floats: what one client sends and receives in a round (the mean over rounds), and what it "
        "holds of models and of the method's own.",
        "",
    ]
    return "\n".join(lines)


def figure(boards: dict[str, list[Line]]) -> Figure:
    """The means with their intervals, a panel a board."""
    tallest = max(map(len, boards.values()))
    drawn = Figure((3.2 * len(boards), 0.22 * tallest + 0.7), layout="constrained")
    for axes, (protocol, lines) in zip(np.atleast_1d(drawn.subplots(1, len(boards))), boards.items(), strict=True):
        shown = [line for line in lines if line.mean]
        for place, line in enumerate(shown):
            mean, low, high, _ = line.mean
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
    """Does what is left to do of the tables that are named, or of all, one after the other."""
    wanted = sys.argv[1:] or [*TABLES]
    if wanted == ["--page"]:
        write_page()
        return
    if not TABLES.keys() >= {*wanted}:
        raise SystemExit(__doc__)
    for name in wanted:
        _, protocols = TABLES[name]
        tune_all(protocols)
        for given, errors in side_by_side(run_seed, [(name, seed) for seed in SEEDS]):
            print(*given, *(f"{folder}: {error}" for folder, error in errors.items()), sep="\n  ", flush=True)
        keep(list(rows(name)), protocols)
        write_page()


def write_page() -> None:
    """Writes the page and its figure."""
    boards = read()
    (HERE / "README.md").write_text(page(boards))
    write(HERE / "board.png", figure, boards, page=True)


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, BrokenProcessPool):
        raise SystemExit("interrupted; the same command goes on.") from None
