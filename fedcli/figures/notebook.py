"""Runs in a notebook: their progress while they go on, and what they show of themselves."""

import base64
import sys
import time
from collections.abc import Iterable, Sequence
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
        return _curves([self.record], x)

    def __repr__(self) -> str:
        return f"Run({', '.join(f'{name}: {text}' for name, text in _facts(self))})"

    def _repr_html_(self) -> str:
        return _html([self])


class Runs(list[Run]):
    """Several runs, as of `fedcli.run(..., seeds=[0, 1])`."""

    def __add__(self, others: list[Run]) -> "Runs":
        return Runs([*self, *others])

    def plot(self, x: str = "round") -> Any:
        """Draws their learning curves; those that differ only in the seed are a line with a band. See `Run.plot`."""
        return _curves([run.record for run in self], x)

    def _repr_html_(self) -> str:
        return _html(self)


def run(
    method: str, out: str | Path | None, log: Any, exist_ok: bool, progress: rounds.Listener | None, **options: Any
) -> Run | Runs:
    """Runs a method; the function behind `fedcli.run`, which says what the arguments are."""
    if exist_ok and out is not None:
        _set_aside(Path(out))
    progress = progress or (Progress() if in_notebook() else None)
    done = runs.run(method, out=out, progress=with_loggers(progress, log), **options)
    return Runs(Run(**vars(one)) for one in done) if isinstance(done, list) else Run(**vars(done))


def load(path: str | Path, method: str | Path | Sequence[str | Path] = ()) -> Run:
    """Opens a run; see `fedcli.runs.run.load`, which says what the arguments are."""
    return Run(**vars(runs.load(path, method)))


def _set_aside(folder: Path) -> None:
    """Renames a folder of a run, or of runs with several seeds, that no process owns; another folder stays."""
    records = [file for file in (folder / RECORD, *folder.glob(f"seed-*/{RECORD}")) if file.is_file()]
    if records:
        for file in records:
            with locked(file.parent):
                pass
        names = (folder.with_name(f"{folder.name}-{number}") for number in count(1))
        folder.rename(next(name for name in names if not name.exists()))


def in_notebook() -> bool:
    """Whether a notebook's kernel runs this."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


class Progress(rounds.Listener):
    """Shows a run in a notebook: a bar, the last round's numbers and the time that is left."""

    def __init__(self):
        self.display, self.html = (getattr(import_module("IPython.display"), name) for name in ("display", "HTML"))

    def start(self, record: dict[str, Any], folder: Path, samples_per_round: int, first_round: int) -> None:
        """Shows the bar."""
        self.record, self.first, self.expected = record, first_round, max(samples_per_round, 1)
        self.began, self.shown, self.in_round, self.notes = time.perf_counter(), 0.0, 0, []
        self.handle = self.display(self.html(self._text()), display_id=True)

    def samples(self, count: int) -> None:
        """Moves the bar, a few times a second."""
        self.in_round += count
        if time.perf_counter() - self.shown > UPDATE:
            self.finish(self.record)

    def note(self, text: str) -> None:
        """Shows what the engine has to say."""
        self.notes.append(text)
        self.finish(self.record)

    def round(self, entry: dict[str, Any]) -> None:
        """Shows what a round came to."""
        self.in_round = 0
        self.finish(self.record)

    def finish(self, record: dict[str, Any]) -> None:
        """Shows how the run stands, or has ended."""
        self.shown = time.perf_counter()
        self.handle.update(self.html(self._text()))

    def skip(self, record: dict[str, Any], folder: Path) -> None:
        """Says that a run has ended before."""
        self.display(self.html(escape(f"skipped: {folder}, which has {record['status']}")))

    def _text(self) -> str:
        entries, total = self.record["rounds"], self.record["config"]["rounds"]
        done = min(len(entries) + min(self.in_round / self.expected, 1), total)
        parts = [f"{self.record['method']} on {self.record['dataset']}, seed {self.record['seed']}"]
        parts.append(f"round {len(entries)}/{total}")
        if done > self.first:
            left = (time.perf_counter() - self.began) / (done - self.first) * (total - done)
            parts.append(f"{left:,.0f} s left")
        tested = [entry["test_accuracy"] for entry in entries if entry["test_accuracy"] is not None]
        if tested:
            parts.append(f"test {100 * tested[-1]:.2f} %")
        parts += [f"{name} {value:.4g}" for entry in entries[-1:] for name, value in entry["terms"].items()]
        if self.record["status"] not in ("running", "finished"):
            parts.append(self.record["status"])
        bar = f'<progress value="{done:g}" max="{total}" style="width: 20em"></progress>'
        return "<br>".join([f"{bar} {escape(' · '.join(parts))}", *map(escape, self.notes)])


def _facts(run: runs.Run) -> list[tuple[str, str]]:
    """What a run was and came to, as pairs of title and text."""
    record, summary = run.record, run.record["summary"]
    percent = {}
    for name in ("selected", "last"):
        value = summary.get(name)
        percent[name] = "–" if value is None else f"{100 * value:.2f} %"
    return [
        ("method", record["method"]),
        ("protocol", record["protocol"]),
        ("data set", f"{record['dataset']}, {record['partition']['flag']}"),
        ("seed", str(record["seed"])),
        ("rounds", f"{len(record['rounds'])} of {record['config']['rounds']}, {record['status']}"),
        ("selected", f"{percent['selected']} ({summary['selection']})"),
        ("last round", percent["last"]),
        ("seconds", f"{record['seconds_total']:,.1f}"),
        ("folder", str(run.path)),
    ]


def _html(shown: Iterable[runs.Run]) -> str:
    """A small table of runs, a column each, and their curves."""
    shown = list(shown)
    lines = []
    for pairs in zip(*(_facts(run) for run in shown), strict=True):
        cells = "".join(f"<td>{escape(text)}</td>" for _, text in pairs)
        lines.append(f"<tr><th>{pairs[0][0]}</th>{cells}</tr>")
    table = f"<table>{''.join(lines)}</table>"
    try:
        picture = _curves([run.record for run in shown])._repr_png_()
    except UserError:  # nothing was evaluated
        return table
    source = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    return f'{table}<img alt="learning curves" style="max-width: 100%" src="{source}">'


def _curves(records: list[dict[str, Any]], x: str = "round") -> Any:
    """The figure of learning curves, which shows itself in a notebook, also without pyplot."""
    from matplotlib import rc_context

    from fedcli.figures import curves, plots

    def png() -> bytes:
        with rc_context(plots.STYLE):
            return plots.small_png(figure)

    with rc_context(plots.STYLE):
        figure = curves.learning_curves(records, x)
    figure._repr_png_ = png
    return figure
