"""What a run takes to the next machine, and a plan that starts only what can be taken there or ends here."""

from collections.abc import Collection
from pathlib import Path

import torch
from open_runs import with_new_records

from fedcli.check import keeps_state
from fedcli.core import backbones
from fedcli.core.client_states import STATES
from fedcli.data import datasets
from fedcli.results.durations import estimate_plan
from fedcli.results.plans import Plan, PlannedRun
from fedcli.runs.checkpoints import CHECKPOINT
from fedcli.runs.signals import time_left

MIB = 2**20
CARRIED_SIZE = 60 * MIB  # bytes at most of all runs that are carried


def resume_files(run: PlannedRun) -> list[Path]:
    """What a run goes on from, beside its record; the model of the best round so far is not needed for that."""
    return [*run.folder.glob(CHECKPOINT), *run.folder.glob(f"{STATES}/*")]


def nbytes_to_carry(run: PlannedRun) -> int:
    """Bytes of a run's `resume_files`; before there are any, of a model of the server and of each client's own."""
    files = resume_files(run)
    if files:
        return sum(file.stat().st_size for file in files)
    num_models = 1
    if keeps_state(run.setup.method):
        num_models += run.setup.config.num_clients
    return num_models * nbytes_of_model(run)


def nbytes_of_model(run: PlannedRun) -> int:
    """Bytes of a model of a run, by the first of its networks."""
    config = run.setup.config
    images = datasets.describe(config.dataset)
    channels, height, _ = images["shape"]
    backbone, *_ = config.backbone.split(",")
    with torch.device("meta"):
        network = backbones.build(backbone, channels, height, images["classes"], seed=0)
    return sum(value.nbytes for value in network.state_dict().values())


class CarriedPlan(Plan):
    """Runs of which none starts that can neither be carried to the next machine nor end in time."""

    def may_start(self, run: PlannedRun, active: Collection[PlannedRun]) -> bool:
        """Whether a run can be carried beside those that have begun, or ends in time, as runs like it tell."""
        nbytes = nbytes_to_carry(run)
        for other in self.begun_beside(run, active):
            nbytes_of_other = nbytes_to_carry(other)
            if nbytes_of_other <= CARRIED_SIZE:  # else it is left behind
                nbytes += nbytes_of_other
        if nbytes <= CARRIED_SIZE:
            return True
        seconds = estimate_plan(Plan(self.folder, (run,)))["seconds"].item()
        return seconds < time_left()

    def begun_beside(self, run: PlannedRun, active: Collection[PlannedRun]) -> list[PlannedRun]:
        """The other runs that have begun and not ended; a run of `active` may not have a record yet."""
        others = [other for other in self.runs if other.needs_running and other.folder != run.folder]
        active_folders = {other.folder for other in active}
        begun = []
        for other in with_new_records(others):  # since the plan was made, some have begun and some have ended
            has_begun = other.record or other.folder in active_folders
            if has_begun and other.needs_running:
                begun.append(other)
        return begun
