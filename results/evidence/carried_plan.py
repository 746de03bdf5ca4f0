"""A plan that starts only what can be carried to the next machine or ends on this one."""

import math
from collections.abc import Collection

from archive import room_beside_records, select_carried

from fedcli.results.durations import estimate_plan
from fedcli.results.plans import Plan, PlannedRun, read_new_records
from fedcli.runs.signals import time_left


class CarriedPlan(Plan):
    """A plan that starts no run which can neither be carried to the next machine nor end in time."""

    def may_start(self, run: PlannedRun, active: Collection[PlannedRun]) -> bool:
        """Whether a run can be carried beside those that have begun, or ends in time, as runs like it tell."""
        candidates = [*self.begun_beside(run, active), run]
        carried = select_carried(candidates, room_beside_records(self.runs))
        carried_folders = {other.folder for other in carried}
        if run.folder in carried_folders or time_left() == math.inf:
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
