"""Runs in Python and in a notebook, and their progress."""

import base64
import math
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from html import escape
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from fedcli.errors import UserError
from fedcli.runs import begin, resume, rounds
from fedcli.runs.lock import locked
from fedcli.runs.models import Run
from fedcli.runs.record import RECORD
from fedcli.runs.trackers import Loggers

# The columns of a table's CSV that a run shows.
SHOWN = [
    "method", "protocol", "dataset", "config.partition", "seed", "status", "rounds_done", "selection", "selected",
    "last", "folder",
]  # fmt: skip


@dataclass(frozen=True, repr=False)
class Run(Run):
    """A run that has ended.

    Attributes:
        record: The content of its `record.json`, where rounds count from 0.
        state: The method's server state after the last round; None for a run that had ended before.
        path: Its folder.
    """

    @property
    def history(self) -> Any:
        """A `pandas.DataFrame` with a row for each round; `round` counts from 1, accuracies are in percent."""
        from fedcli.results.frame import rounds_of  # late: pandas takes half a second

        return rounds_of(self.record)

    def plot(self, x: str = "round", **look: Any) -> Any:
        """Draws the learning curve over `round`, `floats` or `seconds`; `look` as for `Runs.plot`."""
        return Runs([self]).plot(x, **look)

    def __repr__(self) -> str:
        record = self.record
        accuracy = f"{record['summary']['selected'] or math.nan:.2%} ({record['summary']['selection']})"
        return f"Run({record['method']} on {record['dataset']}, seed {record['seed']}: {accuracy}, in {self.path})"

    def _repr_html_(self) -> str:
        return Runs([self])._repr_html_()


class Runs(list[Run]):
    """Several runs, as of `fedcli.run(..., seeds=[0, 1])`."""

    def __add__(self, others: list[Run]) -> "Runs":
        return Runs([*self, *others])

    def plot(self, x: str = "round", **look: Any) -> Any:
        """Draws their learning curves; several seeds are a line with a band. A notebook shows the figure.

        Args:
            x: The horizontal axis: `round`, `floats` or `seconds`.
            **look: As the options of `fedcli plot`: `title`, `size=(3.4, 2.3)` in inches, `font_size`, `style`,
                `colors={"fedavg": "#0072B2"}`, `labels={"fedavg": "FedAvg"}`, `legend`.

        Returns:
            A `matplotlib.figure.Figure`, which can be changed further and saved.
        """
        from matplotlib import rc_context

        from fedcli.figures import plots
        from fedcli.figures.look import Look

        chosen = Look(**look)
        with rc_context(chosen.parameters()):
            figure = plots.learning_curves([run.record for run in self], x, look=chosen)
            plots.apply(chosen, figure)
        figure._repr_png_ = lambda: plots.small_png(figure)  # a notebook shows it, also without pyplot
        return figure

    def _repr_html_(self) -> str:
        """A table of the runs, a column each, and their curves."""
        import pandas as pd

        from fedcli.results.tables import numbers_of

        table = pd.DataFrame({**numbers_of(run.record), "folder": run.path} for run in self)
        with pd.option_context("display.max_colwidth", None):
            page = table[SHOWN].T.to_html(header=False, float_format="{:,.2f}".format)
        with suppress(UserError):  # nothing was evaluated
            picture = base64.b64encode(self.plot()._repr_png_()).decode()
            page += f'<img alt="learning curves" style="max-width: 100%" src="data:image/png;base64,{picture}">'
        return page


def run(
    method: str, out: str | Path | None, log: Any, exist_ok: bool, progress: rounds.Listener | None, **options: Any
) -> Run | Runs:
    """Runs a method; see `fedcli.run`."""
    if exist_ok and out is not None:
        _set_aside(Path(out))
    ipython = sys.modules.get("IPython")
    if progress is None and ipython and type(ipython.get_ipython()).__name__ == "ZMQInteractiveShell":  # in a notebook
        progress = Progress()
    done = begin.run(str(method), out=out, progress=Loggers(progress, log), **options)
    return Runs(Run(**vars(each)) for each in done) if isinstance(done, list) else Run(**vars(done))


def load(path: str | Path, method: str | Path | Sequence[str | Path] = ()) -> Run:
    """Opens a run; see `fedcli.runs.resume.load`."""
    return Run(**vars(resume.load(path, method)))


def _set_aside(folder: Path) -> None:
    """Renames the folder of a run, or of several seeds, unless a process runs in it; leaves other folders."""
    records = [file for file in (folder / RECORD, *folder.glob(f"seed-*/{RECORD}")) if file.is_file()]
    for file in records:
        with locked(file.parent):
            pass
    if records:
        names = (folder.with_name(f"{folder.name}-{number}") for number in count(1))
        folder.rename(next(name for name in names if not name.exists()))


class Standing(rounds.Listener):
    """Counts how far the run in `folder` is, None where none goes on; a display of it has a `show`."""

    folder: Path | None = None
    record: dict[str, Any]

    def start(self, record: dict[str, Any], folder: Path, samples_per_round: int, first_round: int) -> None:
        """Starts the clock."""
        self.record, self.folder, self._first, self._per_round = record, folder, first_round, max(samples_per_round, 1)
        self._in_round, self._all, self._began = 0, 0, time.perf_counter()

    def samples(self, count: int) -> None:
        """Counts samples, of the round that goes on and of all."""
        self._in_round, self._all = self._in_round + count, self._all + count
        self.show()

    def round(self, entry: dict[str, Any]) -> None:
        """Ends the count of a round."""
        self._in_round = 0
        self.show()

    def show(self) -> None:
        """Shows how far the run is."""

    def standing(self) -> tuple[float, list[str]]:
        """The number of rounds done, with the part of the one that goes on; and the last round's numbers as texts."""
        entries, total = self.record["rounds"], self.record["config"]["rounds"]
        done = min(len(entries) + min(self._in_round / self._per_round, 1), total)
        elapsed, texts = max(time.perf_counter() - self._began, 1e-9), [f"round {len(entries)}/{total}"]
        for entry in entries[-1:]:
            accuracies = {"test": entry["test_accuracy"], "validation": entry["validation_accuracy"]}
            texts += [f"{name} {100 * value:.2f} %" for name, value in accuracies.items() if value is not None]
            texts += [f"{name} {value:.4g}" for name, value in entry["terms"].items()]
        left = elapsed / max(done - self._first, 1e-9) * (total - done)
        return done, [*texts, f"{self._all / elapsed:,.0f} samples/s", f"{timedelta(seconds=round(left))} left"]


class Progress(Standing):
    """Shows a run in a notebook: a bar, the last round's numbers and the time that is left."""

    def start(self, record: dict[str, Any], folder: Path, samples_per_round: int, first_round: int) -> None:
        """Shows the bar."""
        super().start(record, folder, samples_per_round, first_round)
        self._shown, self._handle = 0.0, import_module("IPython.display").display(display_id=True)

    def finish(self, record: dict[str, Any]) -> None:
        """Shows how the run has ended."""
        self.round({})

    def show(self) -> None:
        """Shows how far the run is, five times a second and after each round."""
        if self._in_round and time.perf_counter() - self._shown < 0.2:
            return
        self._shown, (done, texts) = time.perf_counter(), self.standing()
        run = f"{self.record['method']} on {self.record['dataset']}, seed {self.record['seed']}"
        notes = [note["text"] for note in self.record["engine"]["notes"]]
        bar = f'<progress value="{done:g}" max="{self.record["config"]["rounds"]}" style="width: 20em"></progress>'
        text = escape(" · ".join([run, *texts, self.record["status"], *notes]))
        self._handle.update({"text/html": f"{bar} {text}"}, raw=True)
