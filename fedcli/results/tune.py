"""Tuning a method's options by validation accuracy: a grid of runs, whose test accuracies play no part.

A trial's accuracy follows the rule by which its protocol selects rounds, on the clients' held-out examples: the best
round, the mean of the last three, or, where the last round counts, the mean over the last tenth of the rounds.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from fedcli import declarations, registry, userfiles
from fedcli.core.federation import NonFiniteLoss
from fedcli.data.files import write_atomically
from fedcli.declarations import Method
from fedcli.errors import UserError, unknown
from fedcli.results.grids import GridPlan
from fedcli.results.reproduce import PlannedRun
from fedcli.runs import rounds
from fedcli.runs import run as runs
from fedcli.runs.config import RunConfig, Setup, refuse_without_effect, resolve
from fedcli.runs.experiment import Grid, combinations, parse_values, place
from fedcli.runs.models import remove_models
from fedcli.runs.records import RECORD, read_record

SEED = 1000  # of the trials, where none is given
VALIDATION = 0.2  # share of each client's examples held out, where the protocol holds out none
TUNED = "tuned.json"


@dataclass(frozen=True)
class Trial:
    """One combination of values and the record of its run."""

    values: dict[str, Any]
    record: dict[str, Any]

    @property
    def accuracy(self) -> float | None:
        """Validation accuracy as a fraction; None for a run that has diverged.

        Raises:
            UserError: If no client has held out an example.
        """
        if self.record["status"] != "finished":
            return None
        found = [entry["validation_accuracy"] for entry in self.record["rounds"]]
        found = [value for value in found if value is not None]
        if not found:
            raise UserError(
                f"no client holds out an example to choose by (--validation {self.record['config']['validation']:g} of "
                f"few); give a larger share or fewer clients."
            )
        rule = self.record["summary"]["selection"]
        if rule in ("best-validation", "best-test"):
            return max(found)
        return fmean(found[-3:] if rule == "mean-last-3" else found[-max(len(found) // 10, 1) :])


def parse_grid(method: Method, texts: Sequence[str]) -> Grid:
    """Reads `option=value,value` texts.

    Args:
        method: Whose options and every run's may be named.
        texts: As on the command line, for example "proximal-weight=0.01,0.1"; empty for the values that the method's
            own options call worth trying.

    Raises:
        UserError: If an option is unknown, named twice or has a value out of range, or there is nothing to try.
    """
    fields = _fields(method)
    if not texts:
        own = dataclasses.fields(method.config)
        worth = {field.name: field.metadata["tune"] for field in own if field.metadata["tune"]}
        if not worth:
            raise UserError(
                f"'{method.name}' names no values worth trying (got no --grid); give some, e.g. --grid lr=0.01,0.1."
            )
        return worth
    grid: Grid = {}
    for text in texts:
        flag, equals, values = text.partition("=")
        name = flag.strip().lstrip("-").replace("-", "_")
        if not equals or not values:
            raise UserError(f"--grid must be an option and its values (got '{text}'); write --grid lr=0.01,0.1.")
        if name in ("seed", "device", "dataset", "protocol") or name not in fields:
            raise unknown("option to tune", name, fields, f"'fedcli tune {method.name} --help' shows all.")
        if name in grid:
            raise UserError(f"--grid has '{name}' twice; put all its values into one, divided by commas.")
        grid[name] = parse_values(fields[name], values)
    return grid


def tune(
    method: str,
    grid: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    seed: int | None = None,
    progress: rounds.Listener | None = None,
    spread: Callable[[GridPlan], dict[Path, str]] | None = None,
    **given: Any,
) -> tuple[list[Trial], Path]:
    """Runs every combination of a grid, and writes down which one is best; trials that have run are not run again.

    Trials keep their records, and not their models.

    Args:
        method: Name of a method, or path of a method file.
        grid: See `parse_grid`.
        out: Folder of the trials; `runs/tune-<method>-<protocol>-<data set>` where not given.
        seed: Of every trial, `SEED` where not given. No table may report it.
        progress: Told how each run goes on.
        spread: Runs the trials that have not ended, elsewhere, and returns the errors of those that fail.
        **given: Any option of `fedcli run`, the same in every trial.

    Returns:
        The trials, the best first, and the folder, which holds `tuned.json` for `fedcli run --tuned`.

    Raises:
        UserError: If a trial cannot start, the seed is a reported one, or every trial has diverged.
    """
    chosen, seed = registry.find_method(method), SEED if seed is None else seed
    given = {name: value for name, value in given.items() if value is not None}
    values = parse_grid(chosen, grid)
    setups = _setups(chosen, values, {**given, "seed": seed})
    _refuse_reported_seed(seed, setups[0][1])
    first = setups[0][1].run
    folder = Path(out or Path("runs") / f"tune-{chosen.name}-{first.protocol.replace(':', '-')}-{first.dataset}")
    places = [folder / place(combination) for combination, _ in setups]
    if spread is not None:
        planned = [
            PlannedRun(
                at.name, method, {**given, "validation": setup.run.validation, **combination, "seed": seed}, setup,
                {}, at, read_record(at) if (at / RECORD).is_file() else None,
            )
            for at, (combination, setup) in zip(places, setups, strict=True)
            if _finished(at, setup) is None
        ]  # fmt: skip
        errors = spread(GridPlan(folder, tuple(planned)))
        for run in planned:
            if _finished(run.folder, run.setup) is None:
                raise UserError(f"the trial '{run.folder}' has not ended ({errors.get(run.folder)}); see its record.")
    trials = []
    for own_folder, (combination, setup) in zip(places, setups, strict=True):
        record = _finished(own_folder, setup)
        if record is None:
            try:
                if runs.read_begun(own_folder) is not None:
                    own = userfiles.own_paths([method, *setup.values().values()])
                    runs.resume(own_folder, method=own, progress=progress)
                else:
                    options = {**given, "validation": setup.run.validation, **combination, "seed": seed}
                    runs.run(method, out=own_folder, progress=progress, **options)
            except NonFiniteLoss:
                pass  # a trial that diverges is no choice, and the record says so
            record = read_record(own_folder)
        remove_models(own_folder)  # those of hundreds of trials, a model a client, fill a disk
        trials.append(Trial(combination, record))
    trials.sort(key=lambda trial: -1.0 if trial.accuracy is None else trial.accuracy, reverse=True)
    best = trials[0]
    if best.accuracy is None:
        raise UserError(f"all {len(trials)} trials have diverged; try smaller values, e.g. of --lr.")
    about = {
        "method": chosen.name, "protocol": first.protocol, "dataset": first.dataset, "seed": seed,
        **{name: getattr(first, name) for name in ("rounds", "validation") if name not in values},
        "options": best.values, "validation_accuracy": best.accuracy, "grid": {k: list(v) for k, v in values.items()},
        "trials": [{"options": trial.values, "validation_accuracy": trial.accuracy} for trial in trials],
    }  # fmt: skip
    text = json.dumps(about, indent=1) + "\n"
    write_atomically(folder / TUNED, lambda path: path.write_text(text))
    return trials, folder


def at_the_edge(method: Method, trials: Sequence[Trial]) -> list[tuple[str, str]]:
    """Options of which a value beyond those tried may be better: the best trial has the least or the largest.

    Args:
        method: Whose options they are. Beyond the last value that an option may have there is none.
        trials: As `tune` returns them, the best first. A value whose trials diverged has been tried, too.

    Returns:
        Each option with "smaller" or "larger", what is left to try.
    """
    fields, found = _fields(method), []
    for name, chosen in trials[0].values.items():
        about, tried = fields[name].metadata, {trial.values[name] for trial in trials}
        if len(tried) == 1 or any(isinstance(value, bool | str | None) for value in tried):
            continue
        if chosen == min(tried) and chosen != about["low"]:
            found.append((name, "smaller"))
        if chosen == max(tried) and chosen != about["high"]:
            found.append((name, "larger"))
    return found


def _fields(method: Method) -> dict[str, dataclasses.Field]:
    """The options that can be tuned, by name: every run's and the method's own."""
    return {field.name: field for kind in (RunConfig, method.config) for field in dataclasses.fields(kind)}


def _setups(method: Method, grid: Grid, given: Mapping[str, Any]) -> list[tuple[dict[str, Any], Setup]]:
    """Every combination of values with the run it makes, all of them checked before the first starts."""
    if clash := [name for name in grid if name in given]:
        raise UserError(f"{declarations.flag_of(clash[0])} is given and in --grid; leave one of the two out.")
    found = []
    for values in combinations(grid):
        setup = resolve(method, {**given, **values})
        if not setup.run.validation:
            setup = resolve(method, {**given, "validation": VALIDATION, **values})
        refuse_without_effect(setup, {**given, **values})
        found.append((values, setup))
    return found


def _finished(folder: Path, setup: Setup) -> dict[str, Any] | None:
    """The record of a trial that has ended, finished or diverged; None where it has yet to run.

    Raises:
        UserError: If the folder holds a run with other options.
    """
    if not (folder / RECORD).is_file():
        return None
    record = read_record(folder)
    values = setup.values()
    if other := [name for name, value in record["config"].items() if values.get(name) != value and name != "device"]:
        flag = other[0].replace("_", "-")
        raise UserError(
            f"'{folder}' holds a trial with another --{flag} (got {values.get(other[0])}, was "
            f"{record['config'][other[0]]}); choose another folder with --out."
        )
    diverged = record["status"] == "failed" and record.get("error", "").startswith(NonFiniteLoss.__name__)
    return record if record["status"] == "finished" or diverged else None


def _refuse_reported_seed(seed: int, setup: Setup) -> None:
    """Refuses a seed whose runs a table of the protocol's paper reports: its options would be fitted to it."""
    paper = setup.protocol.name.split(":")[0]
    reported = {one for table in registry.tables().values() if table.name.split(":")[0] == paper for one in table.seeds}
    if seed in reported:
        seeds = ", ".join(map(str, sorted(reported)))
        raise UserError(
            f"--seed {seed} is one that the paper's tables report (they are {seeds}); tune with another, "
            f"such as {SEED}, so that no reported run has chosen its own options."
        )
