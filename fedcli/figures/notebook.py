"""Runs in a notebook: their progress while they go on, and what they show of themselves."""

import base64
import io
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from fedcli.errors import UserError
from fedcli.runs import rounds
from fedcli.runs import run as runs
from fedcli.runs.owner import owned
from fedcli.runs.records import RECORD
from fedcli.runs.trackers import flat, with_loggers

UPDATE = 0.2  # seconds between two looks of the display
DPI = 110  # of a picture in a notebook


@dataclass(frozen=True, repr=False)
class Run(runs.Run):
    """A run that has ended.

    Attributes:
        record: All that is known of it, as in its `record.json`; rounds are counted from 0 there.
        state: The method's server state after the last round; None for a run that had ended before.
        path: Its folder.
    """

    @property
    def history(self) -> dict[str, list[float | None]]:
        """The numbers of all rounds by name, a list each, as `pandas.DataFrame` takes it.

        `round` counts from 1. Accuracies are fractions. None stands where a round has no such number.
        """
        rows = [flat(entry) for entry in self.record["rounds"]]
        names = dict.fromkeys(name for row in rows for name in row)
        rounds = {"round": [entry["round"] + 1 for entry in self.record["rounds"]]}
        return rounds | {name: [row.get(name) for row in rows] for name in names}

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


def _set_aside(folder: Path) -> None:
    """Renames a folder of a run, or of runs with several seeds, that no process owns; another folder stays."""
    own = [file.parent for file in (folder / RECORD, *folder.glob(f"seed-*/{RECORD}")) if file.is_file()]
    if not own:
        return
    for one in own:
        with owned(one):
            pass
    places = (folder.with_name(f"{folder.name}-{number}") for number in count(1))
    folder.rename(next(place for place in places if not place.exists()))


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
            self._update()

    def note(self, text: str) -> None:
        """Shows what the engine has to say."""
        self.notes.append(text)
        self._update()

    def round(self, entry: dict[str, Any]) -> None:
        """Shows what a round came to."""
        self.in_round = 0
        self._update()

    def finish(self, record: dict[str, Any]) -> None:
        """Shows how the run ended."""
        self._update()

    def skip(self, record: dict[str, Any], folder: Path) -> None:
        """Says that a run has ended before."""
        self.display(self.html(escape(f"skipped: {folder}, which has {record['status']}")))

    def _update(self) -> None:
        self.shown = time.perf_counter()
        self.handle.update(self.html(self._text()))

    def _text(self) -> str:
        entries, total, now = self.record["rounds"], self.record["config"]["rounds"], time.perf_counter()
        done = min(len(entries) + min(self.in_round / self.expected, 1), total)
        left = (now - self.began) / (done - self.first) * (total - done) if done > self.first else None
        parts = [f"{self.record['method']} on {self.record['dataset']}, seed {self.record['seed']}"]
        parts += [f"round {len(entries)}/{total}"] + ([f"{left:,.0f} s left"] if left else [])
        tested = next((entry for entry in reversed(entries) if entry["test_accuracy"] is not None), None)
        parts += [f"test {100 * tested['test_accuracy']:.2f} %"] if tested else []
        parts += [f"{name} {value:.4g}" for entry in entries[-1:] for name, value in entry["terms"].items()]
        parts += [self.record["status"]] if self.record["status"] not in ("running", "finished") else []
        bar = f'<progress value="{done:g}" max="{total}" style="width: 20em"></progress>'
        return "<br>".join([f"{bar} {escape(' · '.join(parts))}", *map(escape, self.notes)])


def _facts(run: runs.Run) -> list[tuple[str, str]]:
    """What a run was and came to, as pairs of title and text."""
    record, summary = run.record, run.record["summary"]
    known = {name: summary[name] for name in ("selected", "last") if summary.get(name) is not None}
    percent = {"selected": "–", "last": "–"} | {name: f"{100 * value:.2f} %" for name, value in known.items()}
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
    rows = zip(*map(_facts, shown := list(shown)), strict=True)
    cells = [(row[0][0], [escape(text) for _, text in row]) for row in rows]
    lines = [f"<tr><th>{title}</th>{''.join(f'<td>{text}</td>' for text in texts)}</tr>" for title, texts in cells]
    try:
        picture = base64.b64encode(_png(_curves([run.record for run in shown]))).decode()
    except UserError:  # nothing was evaluated
        return f"<table>{''.join(lines)}</table>"
    image = f'<img alt="learning curves" style="max-width: 100%" src="data:image/png;base64,{picture}">'
    return f"<table>{''.join(lines)}</table>{image}"


def _curves(records: list[dict[str, Any]], x: str = "round") -> Any:
    """The figure of learning curves, which shows itself in a notebook, also without pyplot."""
    from matplotlib import rc_context

    from fedcli.figures import curves, plots

    with rc_context(plots.STYLE):
        figure = curves.learning_curves(records, x)
    figure._repr_png_ = lambda: _png(figure)
    return figure


def _png(figure: Any) -> bytes:
    from matplotlib import rc_context

    from fedcli.figures import plots

    file = io.BytesIO()
    with rc_context(plots.STYLE):
        figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None}, **plots.FRAME)
    return file.getvalue()
