"""Tuning a method's options by validation accuracy; test accuracies play no part.

The accuracy of a run, on the clients' held-out examples, follows its protocol: the best round, the mean of the last
three, or, where the last round counts, the mean over the last tenth of the rounds.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from fedcli import registry
from fedcli.declarations import flag_of
from fedcli.errors import UserError, unknown
from fedcli.files import write_atomically
from fedcli.results.frame import read_runs
from fedcli.results.plans import Plan, plan_grid
from fedcli.runs.options import fields_of, parse_values, recorded_fields
from fedcli.runs.record import ENDED, Record
from fedcli.runs.resolve import resolve

HOME = Path("tuning")  # of all trials, outside `runs`, so that no table of its runs has them
SEED = 1000  # of the trials, if none is given
VALIDATION = 0.2  # share of each client's examples held out, if the protocol holds out none
TUNED = "tuned.json"


class Tuning(Plan):
    """Runs that choose options; their test accuracy is not shown."""

    def accuracy_text(self, record: Record) -> str:
        """The accuracy that ranks trials."""
        return f"validation {100 * validation_accuracy(record):.2f} %"


def validation_accuracy(record: Record) -> float:
    """Accuracy of a finished run on held-out examples, as a fraction, by its protocol's rule.

    Raises:
        UserError: If no client has held out an example.
    """
    accuracies = [value for entry in record["rounds"] if (value := entry["validation_accuracy"]) is not None]
    if not accuracies:
        raise UserError(
            f"no client has validation examples (got --validation {record['config']['validation']:g}); "
            "give a larger share or fewer clients."
        )
    count = {"mean-last-3": 3, "last": max(len(accuracies) // 10, 1)}.get(record["summary"]["selection"])
    return max(accuracies) if count is None else fmean(accuracies[-count:])


def plan(
    method: str, *, grid: Sequence[str] = (), out: str | Path | None = None, seeds: Sequence[int] | None = None,
    **given: Any,
) -> Tuning:  # fmt: skip
    """All combinations of options' values as runs of one method, for `jobs.execute` and then `rank`.

    Args:
        method: Name of a method, or path of a method file.
        grid: Options with the values to try, as "proximal-weight=0.01,0.1".
        out: Folder of the trials, of which none runs twice; `tuning/<method>-<protocol>-<data set>` if not given.
        seeds: Several of each trial, of which the mean counts; no table may report one.
        **given: Options of `fedcli run`; the seed is `SEED` if not given. Tuples of values are tried, too; without any,
            those that the method's own options suggest.

    Raises:
        UserError: If there is nothing to try, an option is unknown or given twice, a trial cannot start, or a table
            reports a seed.
    """
    chosen = registry.find_method(method)
    fields = recorded_fields(chosen)
    for text in grid:
        flag, _, values = text.partition("=")
        name = flag.strip().lstrip("-").replace("-", "_")
        if not values:
            raise UserError(f"--grid must be an option and its values (got '{text}'); write --grid lr=0.01,0.1.")
        if name in ("seed", "device", "dataset", "protocol") or name not in fields:
            raise unknown("option to tune", name, fields, f"'fedcli tune {method} --help' shows all.")
        if name in given:
            raise UserError(f"{flag_of(name)} is given twice (got --grid {text}); put all its values into one --grid.")
        given[name] = parse_values(fields[name], values)
    tried = {name: values for name, values in given.items() if isinstance(values, tuple)}
    tried = tried or {name: field.metadata["tune"] for name, field in fields_of(chosen.config).items()}
    tried = {name: values for name, values in tried.items() if values}
    if not tried:
        raise UserError(f"'{chosen.name}' has no grid of its own (got no --grid); give one, e.g. --grid lr=0.01,0.1.")
    if seeds is None:
        given.setdefault("seed", SEED)
    first = resolve(chosen, {**given, **{name: values[0] for name, values in tried.items()}})
    if not first.run.validation:
        given["validation"] = VALIDATION
    paper, _, setting = first.protocol.name.partition(":")
    tables = [table for name, table in registry.tables().items() if name.startswith(f"{paper}:")]
    reported = sorted({seed for table in tables for seed in table.seeds})  # to which options must not be fitted
    for seed in {*reported}.intersection([given["seed"]] if seeds is None else seeds):
        raise UserError(f"--seed {seed} is one that the paper's tables report, of {reported}; tune with {SEED}.")
    folder = out or HOME / f"{chosen.name}-{paper}-{setting}-{first.run.dataset}"
    planned = plan_grid([method], {**given, **tried}, seeds=seeds, out=folder, continue_=True)
    return Tuning(planned.folder, planned.runs)


def rank(planned: Tuning, errors: Mapping[Path, str]) -> pd.DataFrame:
    """The trials of a plan that `jobs.execute` has run, with its errors, the best first; writes them for `--tuned`.

    Returns:
        A row a trial: its `options`, the validation `accuracies` of its runs as fractions, NaN where a run diverged,
        and their mean, `accuracy`, NaN where any did.

    Raises:
        UserError: If a trial has not ended, or all trials have diverged.
    """
    runs = read_runs([planned.folder]).set_index("folder").reindex([run.folder for run in planned.runs])
    for folder in runs.index[~runs["state"].isin(ENDED)]:
        raise UserError(f"the trial '{folder}' has not ended ({errors.get(folder)}); see its record.")
    accuracies = runs["record"].where(runs["state"] == "finished").map(validation_accuracy, na_action="ignore")
    trials = pd.DataFrame({"options": {run.label: run.values for run in planned.runs}})
    trials["accuracies"] = accuracies.groupby([run.label for run in planned.runs]).agg(list)
    trials["accuracy"] = trials["accuracies"].map(fmean)
    trials = trials.sort_values("accuracy", ascending=False, kind="stable")
    if trials["accuracy"].isna().all():
        raise UserError(f"all {len(trials)} trials have diverged; try smaller values, e.g. of --lr.")
    listed = trials[["options", "accuracy"]].rename(columns={"accuracy": "validation_accuracy"})
    facts = {
        "method": planned.runs[0].setup.method.name,
        "seed": ", ".join(dict.fromkeys(str(run.setup.run.seed) for run in planned.runs)),
        "options": trials["options"].iloc[0],
        "trials": listed.astype(object).where(listed.notna(), None).to_dict("records"),
    }
    write_atomically(planned.folder / TUNED, lambda path: path.write_text(json.dumps(facts, indent=1) + "\n"))
    return trials
