"""Runs in a notebook: their progress while they go on, and what they show of themselves."""

import base64
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcli.errors import UserError
from fedcli.runs import rounds
from fedcli.runs import run as runs
from fedcli.runs.lock import locked
from fedcli.runs.records import RECORD
from fedcli.runs.trackers import with_loggers

if TYPE_CHECKING:
    import pandas

UPDATE = 0.2  # seconds between two looks of the display


@dataclass(frozen=True, repr=False)
class Run(runs.Run):
    """A run that has ended.

    Attributes:
        record: All that is known of it, as in its `record.json`; rounds are counted from 0 there.
        state: The method's server state after the last round; None for a run that had ended before.
        path: Its folder.
    """

    @property
    def history(self) -> "pandas.DataFrame":
        """The numbers of all rounds, a row each; `round` counts from 1, accuracies are in percent."""
        from fedcli.results.frame import rounds_of  # late: pandas takes half a second

        return rounds_of(self.record)

    def plot(self, x: str = "round") -> Any:
        """Draws the learning curve.

        Args:
            x: What it stands over: `round`, `floats` or `seconds`.

        Returns:
            A matplotlib Figure, which a notebook shows.
        """
        return Runs([self]).plot(x)

    def __repr__(self) -> str:
        return f"Run({', '.join(f'{name}: {text}' for name, text in _facts(self).items())})"

    def _repr_html_(self) -> str:
        return Runs([self])._repr_html_()


class Runs(list[Run]):
    """Several runs, as of `fedcli.run(..., seeds=[0, 1])`."""

    def __add__(self, others: list[Run]) -> "Runs":
        return Runs([*self, *others])

    def plot(self, x: str = "round") -> Any:
        """Draws their learning curves; those that differ only in the seed are a line with a band. See `Run.plot`."""
        from matplotlib import rc_context

        from fedcli.figures import curves, plots

        with rc_context(plots.STYLE):
            figure = curves.learning_curves([run.record for run in self], x)
        figure._repr_png_ = lambda: plots.small_png(figure)  # a notebook shows it, also without pyplot
        return figure

    def _repr_html_(self) -> str:
        """A small table of the runs, a column each, and their curves."""
        facts = [_facts(run) for run in self]
        lines = []
        for title in facts[0] if facts else ():
            cells = "".join(f"<td>{escape(of_run[title])}</td>" for of_run in facts)
            lines.append(f"<tr><th>{title}</th>{cells}</tr>")
        table = f"<table>{''.join(lines)}</table>"
        try:
            picture = base64.b64encode(self.plot()._repr_png_()).decode()
        except UserError:  # nothing was evaluated
            return table
        return f'{table}<img alt="learning curves" style="max-width: 100%" src="data:image/png;base64,{picture}">'


def _facts(run: runs.Run) -> dict[str, str]:
    """What a run was and came to, as titles and texts."""
    record, summary = run.record, run.record["summary"]
    percent = {}
    for name in ("selected", "last"):
        percent[name] = "–" if summary.get(name) is None else f"{100 * summary[name]:.2f} %"
    return {
        "method": record["method"],
        "protocol": record["protocol"],
        "data set": f"{record['dataset']}, {record['partition']['flag']}",
        "seed": str(record["seed"]),
        "rounds": f"{len(record['rounds'])} of {record['config']['rounds']}, {record['status']}",
        "selected": f"{percent['selected']} ({summary['selection']})",
        "last round": percent["last"],
        "seconds": f"{record['seconds_total']:,.1f}",
        "folder": str(run.path),
    }


def run(
    method: str, out: str | Path | None, log: Any, exist_ok: bool, progress: rounds.Listener | None, **options: Any
) -> Run | Runs:
    """Runs a method; the function behind `fedcli.run`, which says what the arguments are."""
    if exist_ok and out is not None:
        _set_aside(Path(out))
    if progress is None and in_notebook():
        progress = Progress()
    done = runs.run(method, out=out, progress=with_loggers(progress, log), **options)
    return Runs(Run(**vars(each)) for each in done) if isinstance(done, list) else Run(**vars(done))


def load(path: str | Path, method: str | Path | Sequence[str | Path] = ()) -> Run:
    """Opens a run; see `fedcli.runs.run.load`, which says what the arguments are."""
    return Run(**vars(runs.load(path, method)))


def _set_aside(folder: Path) -> None:
    """Renames a folder of a run, or of runs with several seeds, that no process owns; another folder stays."""
    records = [file for file in (folder / RECORD, *folder.glob(f"seed-*/{RECORD}")) if file.is_file()]
    for file in records:
        with locked(file.parent):
            pass
    if records:
        names = (folder.with_name(f"{folder.name}-{number}") for number in count(1))
        folder.rename(next(name for name in names if not name.exists()))


def in_notebook() -> bool:
    """Whether a notebook's kernel runs this."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


class Progress(rounds.Listener):
    """Shows a run in a notebook: a bar, the last round's numbers and the time that is left."""

    def __init__(self):
        self.ipython = import_module("IPython.display")

    def start(self, record: dict[str, Any], folder: Path, samples_per_round: int, first_round: int) -> None:
        """Shows the bar."""
        self.record, self.first, self.expected = record, first_round, max(samples_per_round, 1)
        self.began, self.in_round, self.notes = time.perf_counter(), 0, []
        self.handle = self.ipython.display(display_id=True)
        self.show()

    def samples(self, count: int) -> None:
        """Moves the bar, a few times a second."""
        self.in_round += count
        if time.perf_counter() - self.shown > UPDATE:
            self.show()

    def note(self, text: str) -> None:
        """Shows what the engine has to say."""
        self.notes.append(text)
        self.show()

    def round(self, entry: dict[str, Any]) -> None:
        """Shows what a round came to."""
        self.in_round = 0
        self.show()

    def finish(self, record: dict[str, Any]) -> None:
        """Shows how the run has ended."""
        self.show()

    def skip(self, record: dict[str, Any], folder: Path) -> None:
        """Says that a run has ended before."""
        self.ipython.display(self.ipython.HTML(escape(f"skipped: {folder}, which has {record['status']}")))

    def show(self) -> None:
        """Shows how the run stands."""
        self.shown = time.perf_counter()
        entries, total = self.record["rounds"], self.record["config"]["rounds"]
        done = min(len(entries) + min(self.in_round / self.expected, 1), total)
        run = f"{self.record['method']} on {self.record['dataset']}, seed {self.record['seed']}"
        parts = [run, f"round {len(entries)}/{total}"]
        if done > self.first:
            left = (self.shown - self.began) / (done - self.first) * (total - done)
            parts.append(f"{left:,.0f} s left")
        tested = [entry["test_accuracy"] for entry in entries if entry["test_accuracy"] is not None]
        if tested:
            parts.append(f"test {100 * tested[-1]:.2f} %")
        if entries:
            parts += [f"{name} {value:.4g}" for name, value in entries[-1]["terms"].items()]
        if self.record["status"] not in ("running", "finished"):
            parts.append(self.record["status"])
        bar = f'<progress value="{done:g}" max="{total}" style="width: 20em"></progress>'
        text = "<br>".join([f"{bar} {escape(' · '.join(parts))}", *map(escape, self.notes)])
        self.handle.update(self.ipython.HTML(text))
