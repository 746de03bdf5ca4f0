"""A plan that starts only what the archive has room for or what ends on this machine."""

import math
from collections.abc import Collection
from dataclasses import dataclass

from archive import Contents
from open_runs import OpenRun

from fedcli.results.durations import estimate_plan
from fedcli.results.plans import Plan, read_new_records
from fedcli.runs.signals import time_left


@dataclass(frozen=True)
class CarriedPlan(Plan):
    """A plan that starts no run which can neither be carried to the next machine nor end in time."""

    runs: tuple[OpenRun, ...]

    def may_start(self, run: OpenRun, active: Collection[OpenRun]) -> bool:
        """Whether the archive has room for a run, or it ends in time, as runs like it tell."""
        if time_left() == math.inf or self.has_room_for(run, active):
            return True
        (expected,) = estimate_plan(Plan(self.folder, (run,)))
        if math.isnan(expected.seconds):  # nobody knows whether it ends in time, since no run like it was timed
            return False
        return expected.seconds < time_left()

    def has_room_for(self, run: OpenRun, active: Collection[OpenRun]) -> bool:
        """Whether the archive has room for a run beside the others that have started and not ended."""
        contents = Contents(self.runs)
        for other in self.list_unended_beside(run, active):
            contents.add_run(other)
        return contents.add_run(run)

    def list_unended_beside(self, run: OpenRun, active: Collection[OpenRun]) -> list[OpenRun]:
        """Returns the other runs that have started and not ended; a run of `active` may not have a record yet.

        The features of runs that have finished are measured before the archive is packed, so these need no room.
        """
        others = [other for other in self.runs if other.needs_running and other.folder != run.folder]
        active_folders = {other.folder for other in active}
        unended = []
        for other in read_new_records(others):  # since the plan was made, some have started and some have ended
            has_started = other.record or other.folder in active_folders
            if has_started and other.needs_running:
                unended.append(other)
        return unended
