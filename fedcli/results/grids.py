"""A grid of runs of one method: every combination of some options' values with every seed, one folder for all."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcli.errors import UserError
from fedcli.registry import find_method
from fedcli.results.reproduce import PlannedRun
from fedcli.results.tables import settings_text
from fedcli.runs.config import resolve
from fedcli.runs.experiment import Grid, combinations, place
from fedcli.runs.prepare import load_data
from fedcli.runs.run import begun, check_seeds, new_folder, read_tuned

AUTO = ("checkpoint_every", "auto")  # the word for what is done where nothing is given


@dataclass(frozen=True)
class GridPlan:
    """A grid as it stands.

    Attributes:
        folder: Of all runs; `<option>=<value>,…/seed-<seed>` in it, without what there is but one of.
        runs: One for each combination and seed.
    """

    folder: Path
    runs: tuple[PlannedRun, ...]

    @property
    def to_run(self) -> list[PlannedRun]:
        """The runs that have not ended, those that have begun first."""
        return sorted((run for run in self.runs if run.to_do), key=lambda run: run.record is None)


def plan(
    method: str,
    given: Mapping[str, Any],
    *,
    seeds: Iterable[int] | None = None,
    out: str | Path | None = None,
    tuned: str | Path | None = None,
    continue_: bool | None = None,
) -> GridPlan:
    """The runs of a grid, all of them checked; nothing is run.

    Args:
        method: Name of a method, or path of a method file.
        given: Options; a tuple of values divides the runs.
        seeds: Of each combination; where not given, one run with the seed of `given`.
        out: Folder of the runs; `runs/<time>-<method>-<data set>` where not given.
        tuned: See `fedcli.runs.run.run`.
        continue_: Count what is in `out` by the same call.

    Raises:
        UserError: If one of them cannot start.
    """
    chosen = find_method(method)
    given = {name: value for name, value in given.items() if value is not None and (name, value) != AUTO}
    options = {**(read_tuned(tuned, chosen)[0] if tuned is not None else {}), **given}
    grid: Grid = {name: values for name, values in given.items() if isinstance(values, tuple)}
    if seeds is not None and "seed" in given:
        raise UserError(f"--seed {given['seed']} was given with --seeds; one of the two is allowed, leave one out.")
    if continue_ and out is None:
        raise UserError("--continue goes on in a folder (got no --out); name it with --out.")
    each = [{}] if seeds is None else [{"seed": seed} for seed in check_seeds(seeds)]
    cases = [(values, seed) for values in combinations(grid) for seed in each]
    setups = [resolve(chosen, {**options, **values, **seed}) for values, seed in cases]
    folder = new_folder(setups[0]) if out is None else Path(out)
    planned = []
    for (values, seed), setup in zip(cases, setups, strict=True):
        parts = [place(values)] if values else []
        own = folder.joinpath(*parts, *(f"seed-{number}" for number in seed.values()))
        record = begun(setup, own, bool(continue_))
        if record is None:
            load_data(setup)  # which refuses what cannot run
        launched = {**given, **values, **seed, "tuned": None if tuned is None else str(tuned)}
        label = settings_text(values) or chosen.name
        planned.append(PlannedRun(label, method, launched, setup, {}, own, record))
    return GridPlan(folder, tuple(planned))
