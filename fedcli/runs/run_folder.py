"""The folder of a run that goes on: which worker holds it, and what it writes there and when.

Of several workers the first alone writes; only clients' states are written by each, in a folder of its own.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from fedcli.core.client_states import Store
from fedcli.files import refuse_lost
from fedcli.run_files import STATES
from fedcli.runs.checkpoints import clear_finished, is_due, remove_files, write_checkpoint
from fedcli.runs.lock import guard, locked
from fedcli.runs.models import BestModels, all_params
from fedcli.runs.record import params_hash, write_record
from fedcli.runs.resolve import Setup
from fedcli.runs.schema import Record
from fedcli.runs.workers import worker_group


def locked_for_all_workers(folder: Path) -> AbstractContextManager:
    """Holds the folder by the lock of the first worker, see `locked`."""
    return locked(folder) if worker_group().is_first else nullcontext()


def prepare_folder(folder: Path, store: Store) -> None:
    """Readies the folder, which the first worker has locked, and has the store keep this worker's files in it."""
    # What a kill has left, before another worker writes there.
    worker_group().from_first(lambda: remove_files(folder, []))
    own_states = STATES
    if not worker_group().is_first:
        guard(folder)
        own_states = f"{STATES}-{worker_group().rank}"
    store.keep_files_in(folder / own_states)


class Saver:
    """What saves a run while it goes on; this one, of all workers but the first, saves nothing."""

    def write_record(self, record: Record) -> None:
        """Writes the record."""

    def after_round(self, record: Record, state: Any, now: float) -> None:
        """Writes a checkpoint and the record if they are due after the last round, which ended `now`."""

    def after_interruption(self, record: Record, state: Any) -> None:
        """Writes a checkpoint of the last round, unless there is one."""

    def after_last_round(self, record: Record, state: Any) -> None:
        """Takes the hash of the run's models into the record."""

    def refuse_lost_folder(self) -> None:
        """Refuses to go on if the folder is no longer the one that is locked."""

    def end(self, record: Record) -> None:
        """Writes the record of a run that has ended, and removes what a finished one does not need."""


class FolderSaver(Saver):
    """Saves a run in its folder: its best models, its checkpoints and its record."""

    def __init__(self, folder: Path, setup: Setup, record: Record, state: Any):
        """Begins with the state from which the rounds go on."""
        self._folder = folder
        self._setup = setup
        self._best = BestModels(folder, setup.method)
        self._best.keep_if_best(record, state)
        self._saved_rounds = len(record["rounds"])  # how many the last checkpoint has
        self._saved = time.perf_counter()  # when it was written
        self._saving_seconds = 0.0  # the time that writing it took

    def write_record(self, record: Record) -> None:
        """See `Saver`."""
        write_record(self._folder, record)

    def after_round(self, record: Record, state: Any, now: float) -> None:
        """See `Saver`."""
        config = self._setup.config
        last = len(record["rounds"]) - 1
        self._best.keep_if_best(record, state)
        if is_due(last, config.checkpoint_every, config.rounds, self._saving_seconds, now - self._saved):
            self._write_checkpoint(record, state)
            self._saved = time.perf_counter()
            self._saving_seconds = self._saved - now
            self.write_record(record)

    def after_interruption(self, record: Record, state: Any) -> None:
        """See `Saver`."""
        if self._saved_rounds < len(record["rounds"]):
            self._write_checkpoint(record, state)

    def after_last_round(self, record: Record, state: Any) -> None:
        """See `Saver`."""
        params = all_params(self._setup.method, state, self._setup.config.num_clients)
        record["summary"]["params_sha256"] = params_hash(params)

    def refuse_lost_folder(self) -> None:
        """See `Saver`."""
        refuse_lost(self._folder)

    def end(self, record: Record) -> None:
        """See `Saver`."""
        self.write_record(record)
        if record["status"] == "finished":
            clear_finished(self._folder, record)

    def _write_checkpoint(self, record: Record, state: Any) -> None:
        self._best.write_if_superseded(record)
        write_checkpoint(self._folder, record, state)
        self._saved_rounds = len(record["rounds"])


def saver_of_this_worker(folder: Path, setup: Setup, record: Record, state: Any) -> Saver:
    """Returns what saves the run that goes on from this state; of workers but the first, what saves nothing."""
    return FolderSaver(folder, setup, record, state) if worker_group().is_first else Saver()
