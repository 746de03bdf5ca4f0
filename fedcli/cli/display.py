"""What a run shows while it goes on: a header, its progress, its headline; and the figures it leaves in its folder.

The same for a paper's table: what it costs, and the progress of its runs.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from shutil import disk_usage
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.markdown import Markdown
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from fedcli.cli.describe import SELECTIONS as HEADLINES
from fedcli.cli.printing import stop
from fedcli.errors import printable
from fedcli.results import claims
from fedcli.results.claims import Answer
from fedcli.results.comparison import heading
from fedcli.results.costs import Cost, bytes_kept, estimate
from fedcli.results.frame import ENDED
from fedcli.results.jobs import Watch, execute
from fedcli.results.plans import Plan, PlannedRun, TablePlan
from fedcli.results.render import MISSING, Sheet, render
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
    together, threads = engine["clients_per_chunk"], record["hardware"]["threads"]
    mode = "one client after the other" if together == 1 else f"{together} clients {HOW[engine['way']]}"
    if engine["device"] == "cpu" and threads > 1:
        mode = f"{threads} threads, in each {mode}"
    if engine.get("workers", 1) > 1:
        mode = f"{engine['workers']} workers, {mode}"
    if engine.get("chosen"):
        mode += f" ({engine['chosen']})"
    epochs = f"{config['local_epochs']} local epoch{'s' * (config['local_epochs'] > 1)}"
    return [
        ("method", f"{record['method']}, protocol {record['protocol']}"),
        ("data set", data + (f", reduced: {reduced}" if reduced else "")),
        ("partition", f"{record['partition']['flag']}, {min(sizes):,} to {max(sizes):,} images a client"),
        ("network", f"{record['model']['backbone']}, {record['model']['parameters']:,} parameters"),
        ("clients", f"{config['num_clients']}, of which {config['cohort_size']} in each of {config['rounds']} rounds"),
        ("training", f"{config['optimizer']}, rate {config['lr']:g}, {epochs}, batches of {config['batch_size']}"),
        ("headline", f"{MEASURES[record['evaluation']]}, {HEADLINES[record['summary']['selection']]}"),
        ("machine", f"{engine['device']}, {engine['precision']}, {mode}"),
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
        ("time", f"{timedelta(seconds=round(record['seconds_total']))}"),
        ("record", str(folder / RECORD)),
        ("figures", "curve and partition beside it, .png and .pdf"),
    ]


def draw(record: dict[str, Any], folder: Path) -> None:
    """Draw a run's learning curve and its partition into its folder, as PNG and PDF."""
    from fedcli.figures import curves, partition, plots  # late: it takes a second

    plots.write(folder / "curve", curves.learning_curves, [record])
    title = plots.title_words([record], f"seed {record['partition']['seed']}")
    counts = np.array(record["partition"]["class_counts"])
    plots.write(folder / "partition", partition.partition_figure, counts, record["class_names"], title)


def _print_line(consoles: Iterable[Console], *parts: str | tuple[str, str]) -> None:
    """Print a line, which is not broken, on each console; its parts are texts, or texts with their styles."""
    for console in consoles:
        console.print(Text.assemble(*parts), soft_wrap=True)


class Display(Listener):
    """Show a run: a live bar on a terminal, one line a round elsewhere. Rounds are counted from 1.

    Attributes:
        folder: Folder of the run that goes on; None where none does.
        record: Its record.
        bar: Its progress in rounds, drawn on a terminal only.
    """

    def __init__(self, console: Console, *logs: Console):
        """Makes a display on a console, whose lines go to `logs` too."""
        self._consoles = (console, *logs)
        self.folder: Path | None = None
        self.record: dict[str, Any] = {}

    def start(self, record: dict[str, Any], folder: Path, samples_per_round: int, first_round: int) -> None:
        """Print the header and start the clock."""
        self.record, self.folder, self._first, self._rounds = record, folder, first_round, record["config"]["rounds"]
        self._expected, self._in_round, self._all, self._began = max(samples_per_round, 1), 0, 0, time.perf_counter()
        self._print(header(record, folder))
        if first_round:
            self._print([("resumed", f"after {first_round}/{self._rounds} rounds")])
        self.bar = Progress(console=self._consoles[0], disable=not self._consoles[0].is_terminal)
        self._task = self.bar.add_task(f"round {first_round}/{self._rounds}", total=self._rounds, completed=first_round)
        self.bar.start()

    def samples(self, count: int) -> None:
        """Move the bar by a part of the round that goes on."""
        self._in_round, self._all = self._in_round + count, self._all + count
        part = min(self._in_round / self._expected, 1)
        self.bar.update(self._task, completed=len(self.record["rounds"]) + part)

    def note(self, text: str) -> None:
        """Show what the engine has to say."""
        self._print([("engine", text)])

    def round(self, entry: dict[str, Any]) -> None:
        """Show what a round came to."""
        done, elapsed = entry["round"] + 1, max(time.perf_counter() - self._began, 1e-9)
        left, self._in_round = elapsed / (done - self._first) * (self._rounds - done), 0
        if done == self._first + 1 and left >= LONG:
            self._print([("time", f"about {left / 3600:,.0f} hours here; {SMALLER}")])
        accuracies = {"test": entry["test_accuracy"], "validation": entry["validation_accuracy"]}
        shown = [f"{name} {100 * value:.2f} %" for name, value in accuracies.items() if value is not None]
        self.bar.update(self._task, completed=done, description=", ".join([f"round {done}/{self._rounds}", *shown]))
        shown += [f"{name} {value:.4g}" for name, value in entry["terms"].items()]
        shown += [f"{self._all / elapsed:,.0f} samples/s", f"{timedelta(seconds=round(left))} left"]
        without_bar = [console for console in self._consoles if not console.is_terminal]
        _print_line(without_bar, f"round {done}/{self._rounds}: {', '.join(shown)}")

    def finish(self, record: dict[str, Any]) -> None:
        """Stop the bar; for a run that has gone through, draw its figures and print its headline."""
        self.bar.stop()
        if record["status"] == "finished":
            draw(record, self.folder)
            self._print(headline(record, self.folder))
            self._consoles[0].print()
            self.folder = None

    def log(self, text: str) -> None:
        """Write a line into the logs only."""
        _print_line(self._consoles[1:], text)

    def skip(self, record: dict[str, Any], folder: Path) -> None:
        """Says that a run has ended before, and draws its figures where a kill came before them."""
        finished = record["status"] == "finished"
        figures = [folder / f"{stem}{kind}" for stem in ("curve", "partition") for kind in (".png", ".pdf")]
        if finished and not all(figure.is_file() for figure in figures):
            draw(record, folder)
        self._print([("skipped", f"{folder}, which has {'finished' if finished else 'diverged'}")])

    def _print(self, pairs: list[tuple[str, str]]) -> None:
        for title, text in pairs:
            _print_line(self._consoles, (f"{title:<12}", "bold"), printable(text))


# A paper's table


def cost(plan: TablePlan, records_only: bool = False) -> list[tuple[str, str]]:
    """Say what running a table takes, as pairs of title and text; disk where models that are kept take some."""
    todo, states = plan.to_run, [run.state for run in plan.runs]
    begun = sum(run.record is not None for run in todo)
    counts = {state: states.count(state) for state in ENDED}
    counts |= {"to go on with": begun, "to start": len(todo) - begun}
    counts["left out"] = len(plan.runs) - sum(counts.values())
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
    runs, timed = sum(cost.runs for cost in costs), sum(cost.known for cost in costs)
    count = f"{runs} run{'s' * (runs > 1)}" if timed in (0, runs) else f"{timed} of {runs} runs"
    if not timed:
        return f"not known for {count}, none like them was timed"
    minutes = sum(cost.seconds for cost in costs) / 60
    whole = max(1, round(minutes))
    text = f"{minutes / 60:,.1f} hours" if minutes >= 90 else f"{whole} minute{'s' * (whole > 1)}"
    rest = ", not known for the others" if timed < runs else ""
    machines = sorted(set().union(*(cost.by for cost in costs)))
    return f"about {text} for {count}{rest}" + (f" ({', '.join(machines)})" if machines else "")


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
        total: Number of runs to do.
        bar: The bar, in units of work.
    """

    def __init__(self, console: Console, plan: Plan, *logs: Console):
        """Makes a display on a console, whose lines go to `logs` too."""
        self._consoles, self.ended, self.total = (console, *logs), 0, len(plan.to_run)
        self._done: dict[Path, float] = {}  # work, by folder
        work = sum(run.round_work * (run.setup.run.rounds - run.rounds_done) for run in plan.to_run)
        self.bar = Progress(console=console, disable=not console.is_terminal, transient=True)
        self._task = self.bar.add_task(f"0/{self.total} runs", total=work)

    def begin(self, run: PlannedRun) -> None:
        """Say that a run starts or goes on."""
        self._print(run, "starts" if run.record is None else f"goes on after {run.rounds_done} rounds")

    def advance(self, run: PlannedRun, rounds: float) -> None:
        """Move the bar."""
        self._done[run.folder] = run.round_work * max(rounds - run.rounds_done, 0)
        text = f"{self.ended}/{self.total} runs"
        self.bar.update(self._task, completed=sum(self._done.values()), description=text)

    def end(self, run: PlannedRun, record: dict[str, Any] | None, error: str) -> None:
        """Say what has become of a run."""
        self.ended += 1
        self.advance(run, run.setup.run.rounds)
        text = f"failed: {error}"
        if not error:
            seconds = timedelta(seconds=round(record["seconds_total"]))
            text = f"{100 * record['summary']['selected']:.2f} % in {seconds}"
        self._print(run, text, f"[{self.ended}/{self.total}] ", "red" if error else "")

    def _print(self, run: PlannedRun, text: str, before: str = "", style: str = "") -> None:
        line = f"{before}{run.label}, seed {run.setup.run.seed}: {text}"
        _print_line(self._consoles, (printable(line), style))


def run_plan(plan: Plan, consoles: Sequence[Console], again: str = "the same command", **where: Any) -> dict[Path, str]:
    """Run what is to do of a plan, and show it; after an interruption say what goes on."""
    display = TableDisplay(consoles[0], plan, *consoles[1:])
    try:
        with display.bar:
            return execute(plan, display, **where)
    except KeyboardInterrupt as error:  # outside: its bar, which goes, would take the line with it
        words = str(error) or "interrupted"
        stop(f"{words} after {display.ended} of {display.total} runs; {again} goes on.", exit_code(error))


def drawn(sheet: Sheet, width: int) -> Group:
    """Lay out a table in portions of as many columns of numbers as fit, so that no number is broken."""
    lines = [line for block in sheet.blocks for line in block]
    texts = sum(max(len(line[place][0]) for line in lines) + 3 for place in range(sheet.numbers))
    across, parts = max(1, (width - texts) // NUMBER_WIDTH), []
    for start in range(sheet.numbers, len(sheet.columns), across):
        kept = [*range(sheet.numbers), *range(len(sheet.columns))[start : start + across]]
        blocks = [[[line[place] for place in kept] for line in block] for block in sheet.blocks]
        part = replace(sheet, columns=[sheet.columns[place] for place in kept], blocks=blocks)
        if start > sheet.numbers:
            part = replace(part, title="", setting="")
        if start + across < len(sheet.columns):
            part = replace(part, notes=())
        parts.append(Markdown(render(part)))
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
