"""What a run shows while it goes on: a header, its progress, its headline; and the figures it leaves in its folder."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedcli import plots
from fedcli.records import RECORD
from fedcli.runs import Progress

SELECTIONS = {
    "best-validation": "best on validation: round {round}",
    "best-test": "best on the test set: round {round}",
    "last": "the last round",
    "mean-last-3": "mean of the last three rounds",
}


def header(record: dict[str, Any], folder: Path) -> list[tuple[str, str]]:
    """The lines that say what is run, as pairs of title and text."""
    config, sizes, engine = record["config"], record["partition"]["sizes"], record["engine"]
    reduced = ", reduced: part of the training images" if record["reduced"] else ""
    stacked, threads = engine["clients_per_chunk"], record["hardware"]["threads"]
    engine_mode = "one client after the other" if stacked == 1 else f"{stacked} clients stacked"
    if engine["device"] == "cpu" and threads > 1:
        engine_mode = f"{threads} threads, in each {engine_mode}"
    return [
        ("method", f"{record['method']}, protocol {record['protocol']}"),
        ("data set", f"{record['dataset']}, {sum(sizes):,} training images on {len(sizes)} clients{reduced}"),
        ("partition", f"{record['partition']['flag']}, {min(sizes):,} to {max(sizes):,} images a client"),
        ("network", f"{record['model']['backbone']}, {record['model']['parameters']:,} parameters"),
        ("clients", f"{config['num_clients']}, of which {config['cohort_size']} in each of {config['rounds']} rounds"),
        ("machine", f"{engine['device']}, {engine['precision']}, {engine_mode}"),
        ("seed", str(record["seed"])),
        ("folder", str(folder)),
    ]


def metrics(entry: dict[str, Any]) -> list[str]:
    """What is shown of a round: accuracies where it was evaluated, and the terms of the objective."""
    accuracies = {"test": entry["test_accuracy"], "validation": entry["validation_accuracy"]}
    shown = [f"{name} {100 * value:.2f} %" for name, value in accuracies.items() if value is not None]
    return [*shown, *(f"{name} {value:.4g}" for name, value in entry["terms"].items())]


def headline(record: dict[str, Any], folder: Path) -> list[tuple[str, str]]:
    """The lines at the end of a run, as pairs of title and text."""
    summary = record["summary"]
    rule = SELECTIONS[summary["selection"]].format(round=f"{summary['selected_round'] + 1}/{summary['rounds']}")
    return [
        ("selected", f"{100 * summary['selected']:.2f} % ({rule})"),
        ("last round", f"{100 * summary['last']:.2f} %"),
        ("time", _clock(record["seconds_total"])),
        ("record", str(folder / RECORD)),
        ("figures", "curve and partition beside it, .png and .pdf"),
    ]


def draw(record: dict[str, Any], folder: Path) -> None:
    """Draws a run's learning curve and its partition into its folder, as PNG and PDF."""
    partition = record["partition"]
    title = f"{record['dataset']}, {partition['flag']}, seed {partition['seed']}"
    plots.learning_curves([record], folder / "curve")
    plots.partition_chart(np.array(partition["class_counts"]), record["class_names"], folder / "partition", title)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


class Display(Progress):
    """Shows a run: a live bar on a terminal, one line a round elsewhere. Rounds are counted from 1.

    Attributes:
        folder: Folder of the run that goes on; None where none does.
        record: Its record.
    """

    def __init__(self, console: Console):
        self.console = console
        self.folder: Path | None = None
        self.record: dict[str, Any] = {}

    def start(self, record: dict[str, Any], folder: Path, samples_per_round: int, first_round: int) -> None:
        """Prints the header and starts the clock."""
        self.record, self.folder = record, folder
        self._expected, self._first = max(samples_per_round, 1), first_round
        self._samples = self._in_round = 0
        self._begun = time.perf_counter()
        self._print(header(record, folder))
        if first_round:
            self._print([("resumed", f"after {first_round}/{record['config']['rounds']} rounds")])
        self._live = Live(console=self.console, get_renderable=self._render, refresh_per_second=4)
        if self.console.is_terminal:
            self._live.start()

    def samples(self, count: int) -> None:
        """Moves the bar on inside of a round."""
        self._samples += count
        self._in_round += count

    def round(self, entry: dict[str, Any]) -> None:
        """Shows what a round came to."""
        self._in_round = 0
        if not self.console.is_terminal:
            numbers = ", ".join([*metrics(entry), self._rate(), f"{self._left()} left"])
            place = f"round {entry['round'] + 1}/{self.record['config']['rounds']}"
            self.console.print(f"{place}: {numbers}", soft_wrap=True, markup=False, highlight=False)

    def finish(self, record: dict[str, Any]) -> None:
        """Stops the bar; for a run that has gone through, draws its figures and prints its headline."""
        self._live.stop()
        if record["status"] == "finished":
            draw(record, self.folder)
            self._print(headline(record, self.folder))
            self.console.print()
            self.folder = None

    def _print(self, pairs: list[tuple[str, str]]) -> None:
        for title, text in pairs:
            line = Text.assemble((f"{title:<12}", "bold"), text)
            self.console.print(line, soft_wrap=True, highlight=False)

    def _done(self) -> float:
        """Rounds done, the one that goes on by its samples."""
        return min(len(self.record["rounds"]) + self._in_round / self._expected, self.record["config"]["rounds"])

    def _left(self) -> str:
        done = self._done()
        if done <= self._first:
            return "-:--:--"
        elapsed = time.perf_counter() - self._begun
        return _clock(elapsed / (done - self._first) * (self.record["config"]["rounds"] - done))

    def _rate(self) -> str:
        """Samples trained on a second since the start, evaluation and aggregation included in the time."""
        elapsed = max(time.perf_counter() - self._begun, 1e-9)
        return f"{self._samples / elapsed:,.0f} samples/s"

    def _render(self) -> Group:
        rounds, entries = self.record["config"]["rounds"], self.record["rounds"]
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True)
        place = f"round {min(len(entries) + 1, rounds)}/{rounds}"
        pace = f"{self._rate()}, {self._left()} left"
        grid.add_row(place, ProgressBar(total=rounds, completed=self._done()), pace)
        return Group(grid, Text("   ".join(metrics(entries[-1]) if entries else [])))
