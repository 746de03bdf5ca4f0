"""What a run takes to the next machine, and a plan that starts only what can be taken there or ends here."""

import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch

from fedcli.check import keeps_state
from fedcli.core import backbones
from fedcli.core.client_states import STATES
from fedcli.data import datasets
from fedcli.declarations import Method
from fedcli.results.durations import estimate_plan
from fedcli.results.plans import AnyRun, Plan, PlannedRun, read_new_records
from fedcli.runs.checkpoints import CHECKPOINT
from fedcli.runs.options import RunConfig
from fedcli.runs.record import RECORD
from fedcli.runs.signals import time_left

MIB = 2**20
ARCHIVE_SIZE = 62 * MIB  # bytes of the archive at most
RECORD_COMPRESSION = 3  # by how much a record is smaller in it, at least


def resume_files(run: PlannedRun) -> list[Path]:
    """Returns the files that a run goes on from beside its record; the model of its best round is not one of them."""
    return [*run.folder.glob(CHECKPOINT), *run.folder.glob(f"{STATES}/*")]


def nbytes_to_carry(run: PlannedRun) -> int:
    """Returns the bytes of a run's `resume_files`; before there are any, of the models that they will have."""
    files = resume_files(run)
    if files:
        return sum(file.stat().st_size for file in files)
    return nbytes_of_models(run.setup.method, run.setup.config)


def nbytes_of_models(method: Method, config: RunConfig) -> int:
    """Returns the bytes of the models in the state of a run: a model of its own for each client, and the server's.

    Where clients keep nothing there is one for each network; else the server has one if its state has parameters.
    """
    backbone_names = config.backbone.split(",")
    sizes = [nbytes_of_network(name, config.dataset) for name in backbone_names]
    if not keeps_state(method):
        return sum(sizes)
    nbytes = 0
    if any(kind.__name__ == "ServerState" and "params" in kind._fields for kind in method.state_types):
        nbytes += sizes[0]
    for client in range(config.num_clients):
        nbytes += sizes[client % len(sizes)]
    return nbytes


def nbytes_of_network(name: str, dataset: str) -> int:
    """Returns the bytes of a network's parameters and buffers for the images of a data set."""
    images = datasets.describe(dataset)
    channels, height, _ = images["shape"]
    with torch.device("meta"):
        network = backbones.build(name, channels, height, images["classes"], seed=0)
    return sum(value.nbytes for value in network.state_dict().values())


def room_beside_records(runs: Iterable[PlannedRun]) -> float:
    """Returns the bytes that the archive has beside the records of runs, for what unfinished ones go on from."""
    files = [run.folder / RECORD for run in runs]
    nbytes_of_records = sum(file.stat().st_size for file in files if file.is_file())
    return ARCHIVE_SIZE - nbytes_of_records / RECORD_COMPRESSION


def divide_by_room(runs: Sequence[AnyRun], room: float) -> tuple[list[AnyRun], list[AnyRun]]:
    """Returns the runs that are carried in so many bytes, earlier ones first, and those that do not fit."""
    taken = []
    left_behind = []
    for run in runs:
        nbytes = nbytes_to_carry(run)
        if nbytes < room:
            taken.append(run)
            room -= nbytes
        else:
            left_behind.append(run)
    return taken, left_behind


class CarriedPlan(Plan):
    """A plan that starts no run which can neither be carried to the next machine nor end in time."""

    def may_start(self, run: PlannedRun, active: Collection[PlannedRun]) -> bool:
        """Whether a run can be carried beside those that have begun, or ends in time, as runs like it tell."""
        candidates = [*self.begun_beside(run, active), run]
        taken, _ = divide_by_room(candidates, room_beside_records(self.runs))
        if any(other is run for other in taken) or time_left() == math.inf:
            return True
        seconds = estimate_plan(Plan(self.folder, (run,)))["seconds"].item()
        if math.isnan(seconds):  # nobody knows whether it ends in time, since no run like it was timed
            return False
        return seconds < time_left()

    def begun_beside(self, run: PlannedRun, active: Collection[PlannedRun]) -> list[PlannedRun]:
        """Returns the other runs that have begun and not ended; a run of `active` may not have a record yet.

        The features of runs that have finished are measured before the archive is packed, so these need no room.
        """
        others = [other for other in self.runs if other.needs_running and other.folder != run.folder]
        active_folders = {other.folder for other in active}
        begun = []
        for other in read_new_records(others):  # since the plan was made, some have begun and some have ended
            has_begun = other.record or other.folder in active_folders
            if has_begun and other.needs_running:
                begun.append(other)
        return begun
