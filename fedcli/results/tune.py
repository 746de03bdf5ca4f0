"""Tuning a method's options by validation accuracy: a grid of runs, whose test accuracies play no part.

A run's accuracy follows the rule by which its protocol selects rounds, on the clients' held-out examples: the best
round, the mean of the last three, or, where the last round counts, the mean over the last tenth of the rounds.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from fedcli import registry
from fedcli.data.files import write_atomically
from fedcli.declarations import Method, flag_of
from fedcli.errors import UserError, unknown
from fedcli.results.frame import ENDED, Record, state_of
from fedcli.results.plans import Plan, plan_grid
from fedcli.runs.config import recorded_fields, resolve
from fedcli.runs.experiment import Grid, combinations, parse_values
from fedcli.runs.models import remove_models
from fedcli.runs.records import RECORD, read_record

HOME = Path("tuning")  # of all trials, unless a folder is given: no table of the runs in `runs` takes them in
SEED = 1000  # of the trials, where none is given
VALIDATION = 0.2  # share of each client's examples held out, where the protocol holds out none
TUNED = "tuned.json"


@dataclass(frozen=True)
class Trial:
    """One combination of values and the records of its runs, one a seed."""

    values: dict[str, Any]
    records: list[Record]

    @property
    def accuracies(self) -> list[float]:
        """Validation accuracies as fractions, one a seed; none where a run has diverged."""
        finished = all(record["status"] == "finished" for record in self.records)
        return list(map(validation_accuracy, self.records)) if finished else []

    @property
    def accuracy(self) -> float | None:
        """Their mean, by which trials are ranked; None where a run has diverged."""
        return fmean(self.accuracies) if self.accuracies else None


def validation_accuracy(record: Record) -> float:
    """Accuracy of a finished run on the clients' held-out examples, as a fraction, by its protocol's rule.

    Raises:
        UserError: If no client has held out an example.
    """
    accuracies = [entry["validation_accuracy"] for entry in record["rounds"]]
    accuracies = [value for value in accuracies if value is not None]
    if not accuracies:
        raise UserError(
            f"no client has validation examples (got --validation {record['config']['validation']:g}); "
            "give a larger share or fewer clients."
        )
    rule = record["summary"]["selection"]
    if rule in ("best-validation", "best-test"):
        return max(accuracies)
    return fmean(accuracies[-3:] if rule == "mean-last-3" else accuracies[-max(len(accuracies) // 10, 1) :])


def parse_grid(method: Method, texts: Sequence[str]) -> Grid:
    """Reads `option=value,value` texts.

    Args:
        method: Whose options and every run's may be named.
        texts: As on the command line, for example "proximal-weight=0.01,0.1"; empty for the values that the method's
            own options call worth trying.

    Raises:
        UserError: If an option is unknown, named twice or has a value out of range, or there is nothing to try.
    """
    fields, grid = recorded_fields(method), {}
    if not texts:
        options = dataclasses.fields(method.config)
        grid = {field.name: field.metadata["tune"] for field in options if field.metadata["tune"]}
    for text in texts:
        flag, _, values = text.partition("=")
        name = flag.strip().lstrip("-").replace("-", "_")
        if not values:
            raise UserError(f"--grid must be an option and its values (got '{text}'); write --grid lr=0.01,0.1.")
        if name in ("seed", "device", "dataset", "protocol") or name not in fields:
            raise unknown("option to tune", name, fields, f"'fedcli tune {method.name} --help' shows all.")
        if name in grid:
            raise UserError(f"--grid has '{name}' twice; put all its values into one, divided by commas.")
        grid[name] = parse_values(fields[name], values)
    if not grid:
        raise UserError(
            f"'{method.name}' names no values worth trying (got no --grid); give some, e.g. --grid lr=0.01,0.1."
        )
    return grid


def plan(
    method: str,
    grid: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    seeds: Sequence[int] | None = None,
    **given: Any,
) -> Plan:
    """Every combination of a grid as runs of one method, to be run and then ranked by `rank`.

    Args:
        method: Name of a method, or path of a method file.
        grid: See `parse_grid`.
        out: Folder of the trials, of which none runs twice; `tuning/<method>-<protocol>-<data set>` where not given.
        seeds: Several of each trial, of which the mean counts; no table may report one.
        **given: Any option of `fedcli run`, the same in every trial; its `seed` is `SEED` where not given.

    Raises:
        UserError: If a trial cannot start, or a seed is a reported one.
    """
    chosen = registry.find_method(method)
    values, given = parse_grid(chosen, grid), {name: value for name, value in given.items() if value is not None}
    if clash := values.keys() & given.keys():
        raise UserError(f"{flag_of(min(clash))} is given and in --grid; leave one of the two out.")
    if seeds is None:
        given.setdefault("seed", SEED)
    first = resolve(chosen, {**given, **combinations(values)[0]})
    if not first.run.validation:
        given["validation"] = VALIDATION
    protocol = first.protocol.name
    paper = protocol.partition(":")[0]
    tables = [table for table in registry.tables().values() if table.name.partition(":")[0] == paper]
    reported = {reported for table in tables for reported in table.seeds}
    for each in reported.intersection([given["seed"]] if seeds is None else seeds):
        raise UserError(  # its options would be fitted to what is reported
            f"--seed {each} is one that the paper's tables report (they are {', '.join(map(str, sorted(reported)))}); "
            f"tune with another, such as {SEED}."
        )
    folder = out or HOME / f"{chosen.name}-{protocol.replace(':', '-')}-{first.run.dataset}"
    return plan_grid([method], {**given, **values}, seeds=seeds, out=folder, continue_=True)


def rank(planned: Plan, errors: Mapping[Path, str]) -> list[Trial]:
    """The trials of a plan that has been run, the best first, which it writes down for `fedcli run --tuned`.

    They keep their records, and not their models.

    Args:
        planned: See `plan`.
        errors: Of the runs that have failed, by their folders.

    Raises:
        UserError: If a trial has not ended, or every trial has diverged.
    """
    by_label: dict[str, Trial] = {}
    for run in planned.runs:
        record = read_record(run.folder) if (run.folder / RECORD).is_file() else None
        if record is None or state_of(record) not in ENDED:
            raise UserError(f"the trial '{run.folder}' has not ended ({errors.get(run.folder)}); see its record.")
        remove_models(run.folder)  # those of hundreds of trials, a model a client, fill a disk
        by_label.setdefault(run.label, Trial(run.values, [])).records.append(record)
    trials = list(by_label.values())
    trials.sort(key=lambda trial: -1.0 if trial.accuracy is None else trial.accuracy, reverse=True)
    best, setup = trials[0], planned.runs[0].setup
    if best.accuracy is None:
        raise UserError(f"all {len(trials)} trials have diverged; try smaller values, e.g. of --lr.")
    facts = {
        "method": setup.method.name, "protocol": setup.protocol.name, "dataset": setup.run.dataset,
        "seed": ", ".join(str(record["seed"]) for record in best.records),
        **{name: getattr(setup.run, name) for name in ("rounds", "validation") if name not in best.values},
        "options": best.values, "validation_accuracy": best.accuracy,
        "trials": [{"options": trial.values, "validation_accuracy": trial.accuracy} for trial in trials],
    }  # fmt: skip
    write_atomically(planned.folder / TUNED, lambda path: path.write_text(json.dumps(facts, indent=1) + "\n"))
    return trials


def at_the_edge(method: Method, trials: Sequence[Trial]) -> list[tuple[str, str]]:
    """Options of which a value beyond those tried may be better: the best trial has the least or the largest.

    Args:
        method: Whose options they are. Beyond the last value that an option may have there is none.
        trials: As `rank` returns them, the best first. A value whose trials diverged has been tried, too.

    Returns:
        Each option with "smaller" or "larger", what is left to try.
    """
    fields, edges = recorded_fields(method), []
    for name, chosen in trials[0].values.items():
        limits, tried = fields[name].metadata, {trial.values[name] for trial in trials}
        if len(tried) == 1 or any(isinstance(value, bool | str | None) for value in tried):
            continue
        for beyond, edge, limit in (("smaller", min(tried), "low"), ("larger", max(tried), "high")):
            if chosen == edge and chosen != limits[limit]:
                edges.append((name, beyond))
    return edges
