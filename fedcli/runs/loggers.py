"""Loggers beside the display of a run: TensorBoard, Weights & Biases, or a user's own.

A logger is any object with some of the methods of `fedcli.runs.rounds.Listener`. Steps are rounds counted from 1, so
that they go on after a run is resumed.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fedcli.errors import UserError, import_optional, unknown
from fedcli.runs.rounds import Listener
from fedcli.runs.schema import Record, RoundEntry
from fedcli.userfiles import find_user_function, names_user_file


def flat_numbers(entry: RoundEntry, above: str = "") -> dict[str, float]:
    """Returns the numbers of a round's entry, as `terms/cross_entropy`, without its own and those of clients."""
    numbers: dict[str, float] = {}
    for key, value in entry.items():
        if isinstance(value, dict) and key != "client_accuracy":
            numbers |= flat_numbers(value, f"{above}{key}/")
        elif isinstance(value, int | float) and (above or key != "round"):
            numbers[f"{above}{key}"] = value
    return numbers


class TensorBoard(Listener):
    """Writes the numbers of each round into the run's folder `tensorboard`."""

    def start(self, record: Record, folder: Path, samples_per_round: int, first_round: int) -> None:
        """Opens an event file, and hides what a killed process wrote of rounds that come again."""
        from torch.utils.tensorboard import SummaryWriter  # late: only some users have it

        self.writer = SummaryWriter(folder / "tensorboard", purge_step=first_round + 1)

    def round(self, entry: RoundEntry) -> None:
        """Adds a point to each curve."""
        for name, value in flat_numbers(entry).items():
            self.writer.add_scalar(name, value, entry["round"] + 1)
        self.writer.flush()

    def finish(self, record: Record) -> None:
        """Closes the file."""
        self.writer.close()


class WeightsAndBiases(Listener):
    """Logs to Weights & Biases, into the project `fedcli` or that of WANDB_PROJECT; a resumed run goes on."""

    def start(self, record: Record, folder: Path, samples_per_round: int, first_round: int) -> None:
        """Begins a run there, or goes on: its id follows from what never changes in a record."""
        import wandb  # late: likewise

        lasting = json.dumps([record[key] for key in ("started", "command", "seed", "dataset_fingerprint")])
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedcli"), name=folder.name, dir=folder, resume="allow",
            id=hashlib.sha256(lasting.encode()).hexdigest()[:16],
            config={"method": record["method"], **record["config"]},
        )  # fmt: skip

    def round(self, entry: RoundEntry) -> None:
        """Logs the numbers of a round."""
        self.run.log(flat_numbers(entry), step=entry["round"] + 1)

    def finish(self, record: Record) -> None:
        """Sets the summary, and ends the run there."""
        self.run.summary.update({key: value for key, value in record["summary"].items() if value is not None})
        self.run.finish(exit_code=int(record["status"] != "finished"))


LOGGERS: dict[str, Callable[[], Any]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


class Loggers(Listener):
    """Tells a display and each logger; one that fails is left out."""

    def __init__(self, display: Listener | None, log: Any):
        """Takes a display, and what `find_loggers` takes."""
        self.display = display or Listener()
        self.loggers = find_loggers(log)

    def start(self, record: Record, folder: Path, samples_per_round: int, first_round: int) -> None:
        """Tells all that the run begins."""
        self._tell("start", record, folder, samples_per_round, first_round)

    def samples(self, count: int) -> None:
        """Tells all of samples."""
        self._tell("samples", count)

    def note(self, text: str) -> None:
        """Tells all what the user has to know."""
        self._tell("note", text)

    def round(self, entry: RoundEntry) -> None:
        """Tells all of a round."""
        self._tell("round", entry)

    def finish(self, record: Record) -> None:
        """Tells all that the run has ended."""
        self._tell("finish", record)

    def skip(self, record: Record, folder: Path) -> None:
        """Tells all that the run had ended before."""
        self._tell("skip", record, folder)

    def _tell(self, event: str, *facts: Any) -> None:
        """Calls the method of `Listener` of that name of the display, and of the loggers that have it."""
        getattr(self.display, event)(*facts)
        for logger in list(self.loggers):
            try:
                getattr(logger, event, lambda *_: None)(*facts)
            except Exception as error:
                self.loggers.remove(logger)
                self.display.note(f"the logger {type(logger).__name__} fails ({type(error).__name__}: {error})")


def _several(log: Any) -> Iterable[Any]:
    """Returns the loggers of what `log` may be: nothing, names with commas between them, one logger, or a list."""
    if log is None:
        return ()
    if isinstance(log, str):
        return log.split(",")
    return log if isinstance(log, list | tuple | set) else [log]


def _refuse_deaf(logger: object) -> None:
    """Refuses an object that has none of a listener's methods, which would be told nothing."""
    events = [name for name in vars(Listener) if not name.startswith("_")]
    if not any(hasattr(logger, event) for event in events):
        raise UserError(
            f"a logger needs one of the methods {', '.join(events)} (got {logger!r:.80}, which has none); give it one."
        )


def find_loggers(log: Any) -> list[Any]:
    """Makes the loggers named `tensorboard`, `wandb` or `./file.py:NAME`, with commas or in a list with made ones.

    Raises:
        UserError: If a logger is not known, or no logger.
    """
    loggers: list[Any] = []
    for logger in _several(log):
        if not isinstance(logger, str):
            _refuse_deaf(logger)
            loggers.append(logger)
        elif names_user_file(logger):
            loggers.append(find_user_function(logger, "logger")())
        elif logger in LOGGERS:
            import_optional(logger, f"--log {logger}", logger)
            loggers.append(LOGGERS[logger]())
        else:
            raise unknown("logger", logger, LOGGERS, f"there are {', '.join(LOGGERS)}, and your own by ./file.py:NAME.")
    return loggers
