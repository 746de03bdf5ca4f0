"""What a run shows while it goes on: a header, its progress, its headline; and the figures it leaves in its folder.

The same for a paper's table: what it costs, and the progress of its runs.
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from shutil import disk_usage
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.markdown import Markdown
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fedcli.cli.describe import SELECTIONS as HEADLINES
from fedcli.cli.printing import stop
from fedcli.errors import printable
from fedcli.results import claims
from fedcli.results.claims import Answer
from fedcli.results.comparison import heading
from fedcli.results.grids import GridPlan
from fedcli.results.jobs import Watch, execute
from fedcli.results.render import MISSING, Sheet, render
from fedcli.results.reproduce import Cost, PlannedRun, TablePlan, bytes_kept, estimate
from fedcli.runs.config import describe_reductions
from fedcli.runs.records import RECORD, reductions_of
from fedcli.runs.rounds import Listener
from fedcli.runs.signals import exit_code

SELECTIONS = {
    "best-validation": "best on validation: round {round}",
    "best-test": "best on the test set: round {round}",
    "last": "the last round",
    "mean-last-3": "mean of the last three rounds",
}
MEASURES = {
    "server": "accuracy on the official test images",
    "clients": "accuracy on the clients' own test parts",
    "domains": "accuracy on other domains",
}
HOW = {"stacked": "stacked", "branches": "as branches"}
LONG = 2 * 3600  # seconds from which a run is said to take long
SMALLER = (
    "lower --rounds, --local-epochs or --train-examples, or a smaller --backbone, make it less, and the record is then "
    "labelled reduced"
)
NUMBER_WIDTH = 16  # characters of a column of numbers in a table
VERDICTS = {"reproduced": "green", "contradicted": "red", "undecided": "yellow"}


def header(record: dict[str, Any], folder: Path) -> list[tuple[str, str]]:
    """Say what is run, as pairs of title and text."""
    config, sizes, engine = record["config"], record["partition"]["sizes"], record["engine"]
    reduced = describe_reductions(reductions_of(record))
    data = f"{record['dataset']}, {sum(sizes):,} training images on {len(sizes)} clients"
    together, threads, workers = engine["clients_per_chunk"], record["hardware"]["threads"], engine.get("workers", 1)
    mode = "one client after the other" if together == 1 else f"{together} clients {HOW[engine['way']]}"
    if engine["device"] == "cpu" and threads > 1:
        mode = f"{threads} threads, in each {mode}"
    if workers > 1:
        mode = f"{workers} workers, {mode}"
    chosen = f" ({engine['chosen']})" if engine.get("chosen") else ""
    epochs = f"{config['local_epochs']} local epoch{'s' * (config['local_epochs'] > 1)}"
    return [
        ("method", f"{record['method']}, protocol {record['protocol']}"),
        ("data set", data + (f", reduced: {reduced}" if reduced else "")),
        ("partition", f"{record['partition']['flag']}, {min(sizes):,} to {max(sizes):,} images a client"),
        ("network", f"{record['model']['backbone']}, {record['model']['parameters']:,} parameters"),
        ("clients", f"{config['num_clients']}, of which {config['cohort_size']} in each of {config['rounds']} rounds"),
        ("training", f"{config['optimizer']}, rate {config['lr']:g}, {epochs}, batches of {config['batch_size']}"),
        ("headline", f"{MEASURES[record['evaluation']]}, {HEADLINES[record['summary']['selection']]}"),
        ("machine", f"{engine['device']}, {engine['precision']}, {mode}{chosen}"),
        ("seed", str(record["seed"])),
        ("folder", str(folder)),
    ]


def headline(record: dict[str, Any], folder: Path) -> list[tuple[str, str]]:
    """Say at the end what a run came to, as pairs of title and text."""
    summary, post = record["summary"], record.get("post")
    rule = SELECTIONS[summary["selection"]].format(round=f"{summary['selected_round'] + 1}/{summary['rounds']}")
    return [
        ("selected", f"{100 * summary['selected']:.2f} % ({rule})"),
        ("last round", f"{100 * summary['last']:.2f} %"),
        *([(f"after {post['name']}", f"{100 * post['test_accuracy']:.2f} %")] if post else []),
        ("time", _clock(record["seconds_total"])),
        ("record", str(folder / RECORD)),
        ("figures", "curve and partition beside it, .png and .pdf"),
    ]


def draw(record: dict[str, Any], folder: Path) -> None:
    """Draw a run's learning curve and its partition into its folder, as PNG and PDF."""
    from fedcli.figures import curves, partition, plots  # late: it takes a second

    gc.freeze()  # else each search for garbage among what drawing leaves goes through all that PyTorch has
    plots.write(folder / "curve", curves.learning_curves, [record])
    title = plots.title_words([record], f"seed {record['partition']['seed']}")
    counts = np.array(record["partition"]["class_counts"])
    plots.write(folder / "partition", partition.partition_figure, counts, record["class_names"], title)
    gc.unfreeze()


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


class Display(Listener):
    """Show a run: a live bar on a terminal, one line a round elsewhere. Rounds are counted from 1.

    Attributes:
        folder: Folder of the run that goes on; None where none does.
        record: Its record.
        bar: Its progress in rounds, drawn on a terminal only.
    """

    def __init__(self, console: Console, *logs: Console):
        """Makes a display on a console, whose lines go to `logs` too."""
        self.console, self._consoles = console, (console, *logs)
        self.folder: Path | None = None
        self.record: dict[str, Any] = {}

    def start(self, record: dict[str, Any], folder: Path, samples_per_round: int, first_round: int) -> None:
        """Print the header and start the clock."""
        self.record, self.folder, self._first = record, folder, first_round
        self._expected, self._in_round, self._all, self._began = max(samples_per_round, 1), 0, 0, time.perf_counter()
        self._print(header(record, folder))
        if first_round:
            self._print([("resumed", f"after {first_round}/{record['config']['rounds']} rounds")])
        columns = "{task.description}", BarColumn(), TimeRemainingColumn(), "{task.fields[last]}"
        self.bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self._task = self.bar.add_task("", total=record["config"]["rounds"], completed=first_round, last="")
        self.samples(0)
        self.bar.start()

    def samples(self, count: int) -> None:
        """Move the bar to the rounds done, the one that goes on by its samples."""
        done, rounds = len(self.record["rounds"]), self.record["config"]["rounds"]
        self._in_round, self._all = self._in_round + count, self._all + count
        completed = min(done + min(self._in_round / self._expected, 1), rounds)
        self.bar.update(self._task, completed=completed, description=f"round {min(done + 1, rounds)}/{rounds}")

    def note(self, text: str) -> None:
        """Show what the engine has to say."""
        self._print([("engine", text)])

    def round(self, entry: dict[str, Any]) -> None:
        """Show what a round came to."""
        self._in_round = 0
        self.samples(0)
        accuracies = {"test": entry["test_accuracy"], "validation": entry["validation_accuracy"]}
        shown = [f"{name} {100 * value:.2f} %" for name, value in accuracies.items() if value is not None]
        if shown:
            self.bar.update(self._task, last=", ".join(shown))
        done, rounds = entry["round"] + 1, self.record["config"]["rounds"]
        elapsed = max(time.perf_counter() - self._began, 1e-9)
        left = elapsed / (done - self._first) * (rounds - done)
        if done == self._first + 1 and left >= LONG:
            self._print([("time", f"about {left / 3600:,.0f} hours here; {SMALLER}")])
        shown += [f"{name} {value:.4g}" for name, value in entry["terms"].items()]
        shown += [f"{self._all / elapsed:,.0f} samples/s", f"{_clock(left)} left"]
        for console in self._consoles:
            if not console.is_terminal:
                line = f"round {done}/{rounds}: {', '.join(shown)}"
                console.print(line, soft_wrap=True, markup=False, highlight=False)

    def finish(self, record: dict[str, Any]) -> None:
        """Stop the bar; for a run that has gone through, print its headline and then draw its figures."""
        self.bar.stop()
        if record["status"] == "finished":
            self._print(headline(record, self.folder))
            self.console.print()
            draw(record, self.folder)
            self.folder = None

    def log(self, text: str) -> None:
        """Write a line into the logs only."""
        for console in self._consoles[1:]:
            console.print(text, soft_wrap=True, markup=False, highlight=False)

    def skip(self, record: dict[str, Any], folder: Path) -> None:
        """Says that a run has ended before, and draws its figures where a kill came before them."""
        figures = [folder / f"{stem}.{kind}" for stem in ("curve", "partition") for kind in ("png", "pdf")]
        if record["status"] == "finished" and not all(file.is_file() for file in figures):
            draw(record, folder)
        ended = "finished" if record["status"] == "finished" else "diverged"
        self._print([("skipped", f"{folder}, which has {ended}")])

    def _print(self, pairs: list[tuple[str, str]]) -> None:
        for title, text in pairs:
            line = Text.assemble((f"{title:<12}", "bold"), printable(text))
            for console in self._consoles:
                console.print(line, soft_wrap=True, highlight=False)


# A paper's table


def cost(plan: TablePlan, records_only: bool = False) -> list[tuple[str, str]]:
    """Say what running a table takes, as pairs of title and text; disk where models that are kept take some."""
    todo, states = plan.to_run, [run.state for run in plan.runs]
    begun = sum(run.record is not None for run in todo)
    counts = {
        "finished": states.count("finished"), "diverged": states.count("diverged"), "to go on with": begun,
        "to start": len(todo) - begun, "left out": sum(run.to_do for run in plan.runs) - len(todo),
    }  # fmt: skip
    shown = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    lines = [("table", plan.title)]
    if plan.limits:
        lines.append(("reduced", f"{plan.reduction}; not the paper's setting"))
    lines.append(("runs", f"{len(plan.runs)}, seeds {', '.join(map(str, plan.seeds))}: {shown}"))
    costs = estimate(plan)
    if costs:
        lines.append(("time", _time(list(costs.values())) + ", one run after the other"))
    if len(costs) > 1:
        lines += [("", f"{heading(column)}: {_time([one])}") for column, one in costs.items()]
    kept = bytes_kept(plan) / 2**30
    if not records_only and kept >= 1:
        disk = next(path for path in (plan.folder, *plan.folder.absolute().parents) if path.is_dir())
        free = disk_usage(disk).free / 2**30
        text = f"{kept:,.0f} GiB or more for the models that the runs leave, {free:,.0f} GiB are free"
        lines.append(("disk", f"{text}; --records-only leaves none"))
    if todo:
        lines.append(("data sets", ", ".join(sorted({name for run in todo for name in run.data}))))
    lines += [("left out", lack) for lack in (*plan.missing_data.values(), *plan.damaged)]
    shared = f"; finished runs in {' and '.join(map(str, plan.search))} count too" if plan.search else ""
    return [*lines, ("folder", f"{plan.folder}{shared}")]


def _time(costs: list[Cost]) -> str:
    """Say what is known of the time that the runs to do of some columns take."""
    runs, timed = sum(one.runs for one in costs), sum(one.known for one in costs)
    count = f"{runs} run{'s' * (runs > 1)}" if timed in (0, runs) else f"{timed} of {runs} runs"
    if not timed:
        return f"not known for {count}, none like them was timed"
    hours = sum(one.seconds for one in costs) / 3600
    minutes = max(1, round(60 * hours))
    text = f"{hours:,.1f} hours" if hours >= 1.5 else f"{minutes} minute{'s' * (minutes > 1)}"
    rest = ", not known for the others" if timed < runs else ""
    by = sorted(set().union(*(one.by for one in costs)))
    return f"about {text} for {count}{rest}" + (f" ({', '.join(by)})" if by else "")


def say(console: Console, pairs: list[tuple[str, str]]) -> None:
    """Print pairs of title and text, the text wrapped beside the title."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=11, style="bold")
    grid.add_column(overflow="fold")
    for title, text in pairs:
        grid.add_row(title, Text(printable(text)))
    console.print(grid)


class TableDisplay(Watch):
    """Show the runs of a table or a grid: a bar for all of them on a terminal, and a line for each that ends.

    Attributes:
        ended: Number of runs that have ended.
        bar: The bar, in units of work.
    """

    def __init__(self, console: Console, plan: TablePlan | GridPlan, *logs: Console):
        """Makes a display on a console, whose lines go to `logs` too."""
        self._consoles, self.ended, self._total = (console, *logs), 0, len(plan.to_run)
        self._left = {run.folder: run.round_work * (run.setup.run.rounds - run.rounds_done) for run in plan.to_run}
        self._done = dict.fromkeys(self._left, 0.0)  # work, by folder
        self._begun: dict[Path, float] = {}
        columns = "{task.description}", BarColumn(), TimeRemainingColumn()
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self.bar.add_task(f"0/{self._total} runs", total=sum(self._left.values()))

    def begin(self, run: PlannedRun) -> None:
        """Say that a run starts or goes on."""
        self._begun[run.folder] = time.perf_counter()
        text = "starts" if run.record is None else f"goes on after {run.rounds_done} rounds"
        self._line(f"{_label(run)}: {text}")

    def advance(self, run: PlannedRun, rounds: float) -> None:
        """Move the bar."""
        work = run.round_work * max(rounds - run.rounds_done, 0)
        self._done[run.folder] = min(work, self._left[run.folder])
        text = f"{self.ended}/{self._total} runs"
        self.bar.update(self._task, completed=sum(self._done.values()), description=text)

    def end(self, run: PlannedRun, record: dict[str, Any] | None, error: str) -> None:
        """Say what has become of a run."""
        self.ended += 1
        self.advance(run, run.setup.run.rounds)
        seconds = time.perf_counter() - self._begun[run.folder]
        text = f"failed: {error}" if error else f"{100 * record['summary']['selected']:.2f} % in {_clock(seconds)}"
        self._line(f"[{self.ended}/{self._total}] {_label(run)}: {text}", "red" if error else "")

    def _line(self, text: str, style: str = "") -> None:
        for console in self._consoles:
            console.print(Text(printable(text), style), soft_wrap=True, highlight=False)


def _label(run: PlannedRun) -> str:
    return f"{run.label}, seed {run.setup.run.seed}"


def run_plan(
    plan: TablePlan | GridPlan, consoles: Sequence[Console], again: str = "the same command", **where: Any
) -> dict[Path, str]:
    """Run what is to do of a plan, and show it; after an interruption say what goes on."""
    display = TableDisplay(consoles[0], plan, *consoles[1:])
    try:
        with display.bar:
            return execute(plan, display, **where)
    except KeyboardInterrupt as error:  # outside: its bar, which goes, would take the line with it
        words = str(error) or "interrupted"
        stop(f"{words} after {display.ended} of {display._total} runs; {again} goes on.", exit_code(error))


def drawn(sheet: Sheet, width: int) -> Group:
    """Lay out a table in portions of as many columns of numbers as fit, so that no number is broken."""
    lines = [line for block in sheet.blocks for line in block]
    texts = sum(max(len(line[place][0]) for line in lines) + 3 for place in range(sheet.numbers))
    across = max(1, (width - texts) // NUMBER_WIDTH)
    parts = []
    for start in range(sheet.numbers, len(sheet.columns), across):
        kept = [*range(sheet.numbers), *range(start, min(start + across, len(sheet.columns)))]
        blocks = [[[line[place] for place in kept] for line in block] for block in sheet.blocks]
        notes = sheet.notes if start + across >= len(sheet.columns) else ()
        part = replace(sheet, columns=[sheet.columns[place] for place in kept], blocks=blocks, notes=notes)
        parts.append(Markdown(render(part if start == sheet.numbers else replace(part, title="", setting=""))))
    return Group(*parts)


def drawn_claims(answers: Sequence[Answer]) -> Group:
    """Lay out claims, the verdict before each sentence and the numbers below it."""
    table = Table("Verdict", "Claim, the paper's difference and ours", box=None, pad_edge=False)
    for block in claims.sheet(answers).blocks:
        for line in block:
            claim, verdict, paper, ours, tail, runs = (text.replace("`", "") for text, _ in line)
            numbers = f"paper {paper or MISSING}, ours {ours}, last tenth {tail}; {runs}"
            style = VERDICTS.get(verdict.partition(",")[0], "")
            table.add_row(Text(verdict, style), Text("\n".join(filter(None, (claim, numbers)))))
    notes = Markdown("\n".join(f"- {note}" for note in claims.NOTES))
    return Group(table, Text(f"\n{claims.counted(answers)}", "bold"), notes)
