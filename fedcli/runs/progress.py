"""How far a run is: counted for any display, and shown in a notebook."""

import time
from datetime import timedelta
from html import escape
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from fedcli.runs import rounds
from fedcli.runs.schema import Record, RoundEntry

SECONDS_BETWEEN_SHOWS = 0.2  # within a round


class Position(NamedTuple):
    """How far a run is."""

    rounds: float  # that are done, with the part of the one that goes on
    texts: list[str]  # the last round's numbers, the speed and the time that is left


class ProgressListener(rounds.Listener):
    """Counts how far the run in `folder` is, None where none goes on; a display of it has a `show`."""

    folder: Path | None = None
    record: Record

    def start(self, record: Record, folder: Path, samples_per_round: int, first_round: int) -> None:
        """Starts the clock."""
        self.record = record
        self.folder = folder
        self._first_round = first_round
        self._samples_per_round = max(samples_per_round, 1)
        self._samples_in_round = 0
        self._num_samples = 0
        self._began = time.perf_counter()

    def samples(self, count: int) -> None:
        """Counts samples, of the round that goes on and of all."""
        self._samples_in_round += count
        self._num_samples += count
        self.show()

    def round(self, entry: RoundEntry) -> None:
        """Ends the count of a round."""
        self._samples_in_round = 0
        self.show()

    def show(self) -> None:
        """Shows how far the run is."""

    def position(self) -> Position:
        """Returns how far the run is."""
        entries = self.record["rounds"]
        total = self.record["config"]["rounds"]
        part_of_round = min(self._samples_in_round / self._samples_per_round, 1)
        done = min(len(entries) + part_of_round, total)
        elapsed = max(time.perf_counter() - self._began, 1e-9)
        num_done = done - self._first_round
        texts = [f"round {len(entries)}/{total}"]
        if entries:
            texts += _numbers_of_round(entries[-1])
        texts.append(f"{self._num_samples / elapsed:,.0f} samples/s")
        if num_done > 0:  # else nothing says how long a round takes
            left = timedelta(seconds=round(elapsed / num_done * (total - done)))
            texts.append(f"{left} left")
        return Position(done, texts)


def _numbers_of_round(entry: RoundEntry) -> list[str]:
    """Accuracies and terms of a round, as texts."""
    accuracies = {
        "test": entry["test_accuracy"],
        "global": entry.get("global_accuracy"),
        "validation": entry["validation_accuracy"],
    }
    texts = [f"{name} {100 * value:.2f} %" for name, value in accuracies.items() if value is not None]
    return texts + [f"{name} {value:.4g}" for name, value in entry["terms"].items()]


class NotebookProgress(ProgressListener):
    """Shows a run in a notebook: a bar, the last round's numbers and the time that is left."""

    def start(self, record: Record, folder: Path, samples_per_round: int, first_round: int) -> None:
        """Shows the bar."""
        super().start(record, folder, samples_per_round, first_round)
        self._shown = 0.0
        self._handle = import_module("IPython.display").display(display_id=True)

    def finish(self, record: Record) -> None:
        """Shows how the run has ended."""
        self._samples_in_round = 0  # a round that was interrupted is lost
        self._draw()

    def show(self) -> None:
        """Shows how far the run is, five times a second and after each round."""
        is_in_round = self._samples_in_round > 0
        if is_in_round and time.perf_counter() - self._shown < SECONDS_BETWEEN_SHOWS:
            return
        self._draw()

    def _draw(self) -> None:
        """Shows how far the run is, and how it has ended."""
        self._shown = time.perf_counter()
        done, texts = self.position()
        run = f"{self.record['method']} on {self.record['dataset']}, seed {self.record['seed']}"
        notes = [note["text"] for note in self.record["engine"]["notes"]]
        bar = f'<progress value="{done:g}" max="{self.record["config"]["rounds"]}" style="width: 20em"></progress>'
        text = escape(" · ".join([run, *texts, self.record["status"], *notes]))
        self._handle.update({"text/html": f"{bar} {text}"}, raw=True)
