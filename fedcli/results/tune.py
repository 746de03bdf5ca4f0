"""Tuning a method's options by validation accuracy; test accuracies play no part.

The accuracy of a run, on the clients' held-out examples, follows its protocol: the best round, the mean of the last
three, or, where the last round counts, the mean over the last tenth of the tested rounds.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan, prod
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from fedcli import registry
from fedcli.arguments import convert_trials
from fedcli.declarations import SELECTIONS, Method, fields_of, flag_of, spec_of
from fedcli.errors import UserError
from fedcli.files import write_atomically
from fedcli.results.grids import GridPoint, drop_repeated, list_runs, plan_grid
from fedcli.results.method_options import (
    Options,
    OptionText,
    assign_options,
    find_methods,
    parse_method_options,
    select_options,
    split_option_text,
)
from fedcli.results.plans import PARTITION_OPTIONS, Plan, PlannedRun
from fedcli.results.run_records import ReadRun, read_runs
from fedcli.runs.options import recorded_fields
from fedcli.runs.origins import GivenOptions
from fedcli.runs.record import ENDED
from fedcli.runs.resolve import Setup, resolve
from fedcli.runs.schema import Record
from fedcli.runs.settings_text import settings_text
from fedcli.runs.sources import TUNED

TUNING_FOLDER = Path("tuning")  # of all trials, outside `runs`, so that no table of its runs has them
TRIAL_SEED = 1000  # of the trials, if none is given
UNTUNABLE = ("seed", "device", "dataset", "protocol", *PARTITION_OPTIONS)  # the same for all trials
VALIDATION_SHARE = 0.2  # share of each client's examples held out, if the protocol holds out none


@dataclass(frozen=True)
class PlannedTrials:
    """The trials of a method, before they have run.

    Attributes:
        method: The method.
        folder: The folder of the trials.
        values: The values to try, by option.
        points: The combinations of these values that are tried.
    """

    method: Method
    folder: Path
    values: Mapping[str, Sequence[Any]]
    points: tuple[GridPoint, ...]

    @property
    def num_combinations(self) -> int:
        """The number of all combinations of the values."""
        return prod(map(len, self.values.values()))


@dataclass(frozen=True)
class Tuning(Plan):
    """The runs by which options are chosen; their test accuracy is not shown.

    Attributes:
        by_method: The trials of each method, in the order of the command.
    """

    by_method: tuple[PlannedTrials, ...]

    def format_accuracy(self, record: Record) -> str:
        """Formats the accuracy by which trials are ranked."""
        return f"validation {100 * validation_accuracy(record):.2f} %"


def validation_accuracy(record: Record) -> float:
    """Computes the accuracy of a finished run on held-out examples, as a fraction, by its protocol's rule.

    Raises:
        UserError: If no client has held out an example.
    """
    accuracies = []
    for entry in record["rounds"]:
        if entry["validation_accuracy"] is not None:
            accuracies.append(entry["validation_accuracy"])
    if not accuracies:
        raise UserError(
            f"no client has validation examples (got --validation {record['config']['validation']:g}); "
            "give a larger share or fewer clients."
        )
    selection = SELECTIONS[record["summary"]["selection"]]
    if selection.best_by is not None:
        return max(accuracies)
    if selection.is_of_last_round:
        return _mean_of_last_tenth_tested(accuracies)
    return fmean(accuracies[-selection.num_averaged :])


def _mean_of_last_tenth_tested(accuracies: Sequence[float]) -> float:
    """Computes the mean over the last tenth of the tested rounds; the metric `last-tenth` goes by planned rounds."""
    num_last = max(len(accuracies) // 10, 1)
    return fmean(accuracies[-num_last:])


def plan_trials(
    method: str, options: Mapping[str, Any], *, grid: Sequence[str] = (), num_trials: int | None = None,
    out: str | Path | None = None, seeds: Sequence[int] | None = None,
    method_options: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Tuning:  # fmt: skip
    """Plans trials of combinations of options' values, for one method or several.

    `jobs.execute` runs them, and `rank_and_write_best` then tells which is the best.

    Each method has the same number of trials. A method with more combinations tries as many of them, drawn at random,
    the same ones each time.

    Args:
        method: The name of a method, or the path of its file; several with commas between them.
        options: The options of `fedcli run`, by name; the seed is `TRIAL_SEED` if not given. A tuple has the values to
            try of an option; if nothing is to be tried, the values that the method's own options suggest are.
        grid: Options with the values to try, as "lr=0.01,0.1" for all methods that have the option, or as
            "fedprox:proximal-weight=0.01,0.1" for one of them.
        num_trials: The number of trials of each method; if None, the size of the smallest grid.
        out: The folder of the trials, of which none runs twice; if None, a folder in `tuning/`.
        seeds: The seeds of each trial, over which the mean counts; if None, the seed of `options`.
        method_options: The options of single methods, by the method's name.

    Raises:
        UserError: If there is nothing to try, a method or an option is unknown, an option is given twice, a trial
            cannot start, or the table of a paper whose protocol is used reports a seed.
    """
    num_trials = convert_trials(num_trials)
    methods = find_methods(method.split(","))
    post = options.get("post")
    grid_texts = [split_option_text("--grid", text) for text in grid]
    for text in grid_texts:
        _refuse_grid(text, options)
    values_to_try = parse_method_options(methods, grid_texts, post)
    own_options = assign_options(methods, method_options, post)
    if seeds is None:
        options = {"seed": TRIAL_SEED, **options}
    searches = _plan_searches(methods, options, own_options, values_to_try, seeds)
    folder = _choose_default_folder(searches) if out is None else Path(out)
    has_several_methods = len(searches) > 1
    all_planned = []
    for search in searches:
        folder_of_method = folder / search.method.name if has_several_methods else folder
        given = GivenOptions(search.options)
        points = plan_grid([search.name_in_command], given, seeds=seeds, out=folder_of_method, continue_=True).points
        if has_several_methods:
            points = tuple(map(_name_method_in_titles, points))
        all_planned.append(PlannedTrials(search.method, folder_of_method, search.values_to_try, points))
    by_method = _draw_equally(all_planned, num_trials)
    runs: list[PlannedRun] = []
    for planned in by_method:
        runs += list_runs(planned.points)
    return Tuning(folder, tuple(runs), tuple(by_method))


@dataclass(frozen=True)
class _Search:
    """A method with what its trials try, before their folders are known.

    Attributes:
        name_in_command: The method as the command names it.
        method: The method.
        options: The options of all trials; a tuple has the values to try.
        values_to_try: The values to try, by option.
        setup: The setup of the first trial, without the share of examples that is held out for it.
    """

    name_in_command: str
    method: Method
    options: Mapping[str, Any]
    values_to_try: Mapping[str, tuple]
    setup: Setup


def _plan_searches(
    methods: Mapping[str, Method], options: Mapping[str, Any], own_options: Mapping[str, Options],
    values_to_try: Mapping[str, Options], seeds: Sequence[int] | None,
) -> list[_Search]:  # fmt: skip
    """Finds what the trials of each method try.

    Args:
        methods: The methods by their names in the command.
        options: The options of all methods, see `select_options`.
        own_options: The options of single methods, by their names in the command.
        values_to_try: The values of `--grid` by option, by the names of the methods in the command.
        seeds: The seeds of each trial; if None, the seed of `options`.

    Raises:
        UserError: See `plan_trials`.
    """
    searches = []
    for name, method in methods.items():
        for option in own_options[name].keys() & values_to_try[name].keys():
            raise UserError(f"{flag_of(option)} of '{name}' is given twice (got --grid and --set); leave one out.")
        trial_options = {**select_options(method, methods, options), **own_options[name], **values_to_try[name]}
        searches.append(_plan_search(name, method, trial_options, seeds))
    return searches


def _plan_search(name: str, method: Method, options: Mapping[str, Any], seeds: Sequence[int] | None) -> _Search:
    """Finds what the trials of a method try, and makes them hold out examples.

    Raises:
        UserError: See `plan_trials`.
    """
    values_to_try = _find_values_to_try(method, options)
    trial_options = {**options, **values_to_try}
    first_values = {option: values[0] for option, values in values_to_try.items()}
    setup = resolve(method, {**trial_options, **first_values})
    _refuse_reported(setup, [setup.config.seed] if seeds is None else seeds)
    if not setup.config.validation:
        _refuse_no_validation(method, trial_options)
        trial_options["validation"] = VALIDATION_SHARE
    return _Search(name, method, trial_options, values_to_try, setup)


def _name_method_in_titles(point: GridPoint) -> GridPoint:
    """Returns the same point with runs whose titles name their method too."""
    title = f"{point.method.name}, {settings_text(point.varied)}"
    return replace(point, runs=tuple(replace(run, title=title) for run in point.runs))


def _refuse_no_validation(method: Method, options: Mapping[str, Any]) -> None:
    """Refuses `--validation 0`, which a protocol may have, but trials may not."""
    if "validation" in options:
        raise UserError(
            f"'{method.name}' is tuned by validation accuracy (got --validation 0); give --validation "
            f"{VALIDATION_SHARE}, or leave it out."
        )


def _refuse_grid(grid: OptionText, options: Mapping[str, Any]) -> None:
    """Refuses a text of `--grid` whose option cannot be tried, or is given beside the grid."""
    option = grid.option
    _refuse_untunable(option, f"--grid {grid.text}")
    if option in options:
        raise UserError(
            f"{flag_of(option)} is given twice (got --grid {grid.text}); put all its values into one --grid."
        )


def _refuse_untunable(option: str, given: str) -> None:
    """Refuses an option that all trials must share, so that they compare; `given` is what the user wrote."""
    if option in UNTUNABLE:
        raise UserError(f"{flag_of(option)} is no option to tune (got {given}); give it once, for all trials.")


def _find_values_to_try(method: Method, options: Mapping[str, Any]) -> dict[str, tuple]:
    """Finds the values to try by option: those that are given, or else those that the method's own options suggest."""
    values_to_try = {name: drop_repeated(values) for name, values in options.items() if isinstance(values, tuple)}
    for name, values in values_to_try.items():
        _refuse_untunable(name, f"{name}={values}")
    if not values_to_try:
        suggested = {name: spec_of(field).tune for name, field in fields_of(method.config).items()}
        values_to_try = {name: values for name, values in suggested.items() if values}
    if not values_to_try:
        raise UserError(f"'{method.name}' has no grid of its own (got no --grid); give one, e.g. --grid lr=0.01,0.1.")
    return values_to_try


def _choose_default_folder(searches: Sequence[_Search]) -> Path:
    """Chooses the folder of trials for which none is given: by the methods, and the first one's protocol and data."""
    names = "+".join(search.method.name for search in searches)
    setup = searches[0].setup
    paper, _, setting = setup.protocol.name.partition(":")
    return TUNING_FOLDER / f"{names}-{paper}-{setting}-{setup.dataset}"


def find_reported_seeds(protocol: str, dataset: str) -> set[int]:
    """Finds the seeds that papers' tables report for runs of a protocol on a data set.

    Options must not be fitted to runs that are then compared with the paper.
    """
    seeds: set[int] = set()
    for table in registry.tables().values():
        for cell in table.cells:
            same_data = cell.settings.get("dataset", dataset) == dataset
            if cell.settings.get("protocol") == protocol and same_data:
                seeds.update(table.seeds)
    return seeds


def _refuse_reported(setup: Setup, seeds: Sequence[int]) -> None:
    reported = find_reported_seeds(setup.protocol.name, setup.dataset)
    for seed in seeds:
        if seed in reported:
            raise UserError(
                f"--seed {seed} is one that the paper's tables report, of {sorted(reported)}; tune with {TRIAL_SEED}."
            )


def _draw_equally(all_planned: Sequence[PlannedTrials], num_trials: int | None) -> list[PlannedTrials]:
    """Draws the same number of trials for each method; if None, the number of the fewest combinations."""
    if num_trials is None:
        num_trials = min(len(planned.points) for planned in all_planned)
    return [replace(planned, points=_draw(planned.points, num_trials)) for planned in all_planned]


def _draw(points: tuple[GridPoint, ...], num_points: int) -> tuple[GridPoint, ...]:
    """Draws at most `num_points` points of a grid without replacement; returns them in their order."""
    if len(points) <= num_points:
        return points
    drawn = np.random.default_rng(0).choice(len(points), num_points, replace=False)
    return tuple(points[index] for index in sorted(drawn))


@dataclass(frozen=True)
class Trial:
    """A trial that has run.

    Attributes:
        point: The values that were tried, and the runs.
        accuracies: The validation accuracies of the runs as fractions, NaN where a run diverged.
    """

    point: GridPoint
    accuracies: tuple[float, ...]

    @property
    def options(self) -> Options:
        """The values that were tried, by option."""
        return self.point.varied

    @property
    def accuracy(self) -> float:
        """The mean of the accuracies; NaN if a run diverged."""
        return fmean(self.accuracies)

    @property
    def has_diverged(self) -> bool:
        """Whether a run diverged."""
        return isnan(self.accuracy)


@dataclass(frozen=True)
class Ranking:
    """The trials of a method that have run.

    Attributes:
        planned: The trials as they were planned.
        trials: The trials, the best first; those that diverged come last.
    """

    planned: PlannedTrials
    trials: tuple[Trial, ...]

    @property
    def method(self) -> Method:
        """The method."""
        return self.planned.method

    @property
    def best(self) -> Trial:
        """The best trial."""
        return self.trials[0]


def rank_and_write_best(plan: Tuning, errors: Mapping[Path, str]) -> list[Ranking]:
    """Ranks the trials of a plan, and writes the best options of each method into the file that `--tuned` reads.

    Args:
        plan: The plan, which `jobs.execute` has run.
        errors: The errors of failed runs by their folders, which `jobs.execute` returns.

    Returns:
        The ranking of each method, in the order of the plan.

    Raises:
        UserError: If a trial has not ended, or all trials of a method have diverged.
    """
    runs = _read_ended_runs(plan, errors)
    rankings = [_rank(planned, _read_trials(planned, runs)) for planned in plan.by_method]
    for ranking in rankings:  # after all are ranked, so that nothing is written where one is refused
        _write_best(ranking)
    return rankings


def _read_ended_runs(plan: Tuning, errors: Mapping[Path, str]) -> dict[Path, ReadRun]:
    """Reads the runs of a plan by their folders; raises UserError if one has not ended."""
    runs = {run.folder: run for run in read_runs([plan.folder])}
    for planned_run in plan.runs:
        folder = planned_run.folder
        outcome = runs[folder].outcome if folder in runs else "not run"
        if outcome not in ENDED:
            raise UserError(f"the trial '{folder}' has not ended ({errors.get(folder, outcome)}); see its record.")
    return runs


def _read_trials(planned: PlannedTrials, runs: Mapping[Path, ReadRun]) -> list[Trial]:
    """Reads the trials of a method, which have run, in the order of the plan."""
    trials = []
    for point in planned.points:
        accuracies = [_read_accuracy(runs[run.folder]) for run in point.runs]
        trials.append(Trial(point, tuple(accuracies)))
    return trials


def _read_accuracy(run: ReadRun) -> float:
    """Reads the validation accuracy of a run that has ended, as a fraction; returns NaN if it diverged."""
    return validation_accuracy(run.record) if run.outcome == "finished" else nan


def _rank(planned: PlannedTrials, trials: Sequence[Trial]) -> Ranking:
    """Sorts the trials of a method; raises UserError if all have diverged."""
    diverged = [trial for trial in trials if trial.has_diverged]
    if len(diverged) == len(trials):
        raise UserError(
            f"all {len(trials)} trials of '{planned.method.name}' have diverged; try smaller values, e.g. of --lr."
        )
    others = [trial for trial in trials if not trial.has_diverged]
    best_first = sorted(others, key=lambda trial: trial.accuracy, reverse=True)
    return Ranking(planned, (*best_first, *diverged))


def _write_best(ranking: Ranking) -> None:
    """Writes the options of a method's best trial, and all its trials, into the file that `--tuned` reads."""
    seeds = dict.fromkeys(str(run.setup.config.seed) for run in list_runs(ranking.planned.points))
    trials = []
    for trial in ranking.trials:
        accuracy = None if trial.has_diverged else trial.accuracy
        trials.append({"options": trial.options, "validation_accuracy": accuracy})
    facts = {
        "method": ranking.method.name,
        "seed": ", ".join(seeds),
        "options": ranking.best.options,
        "trials": trials,
    }
    text = json.dumps(facts, indent=1) + "\n"
    write_atomically(ranking.planned.folder / TUNED, lambda path: path.write_text(text, encoding="utf-8"))


def tabulate_trials(rankings: Iterable[Ranking]) -> pd.DataFrame:
    """Makes a table of trials, a row a trial, with the best trial of each method first.

    Returns:
        The columns `method`; `options`; `accuracies`, the validation accuracies of the runs as fractions, NaN where a
        run diverged; and `accuracy`, their mean, NaN where any run did. The rows are named by the titles of the trials.
    """
    titles = []
    rows = []
    for ranking in rankings:
        for trial in ranking.trials:
            titles.append(trial.point.title)
            rows.append({
                "method": ranking.method.name,
                "options": trial.options,
                "accuracies": list(trial.accuracies),
                "accuracy": trial.accuracy,
            })  # fmt: skip
    return pd.DataFrame(rows, index=titles)


def write_notes_on_drawn_trials(plan: Tuning) -> list[str]:
    """Says of each method that tries a part of its combinations how many, and how to try all."""
    texts = []
    for planned in plan.by_method:
        num_trials = len(planned.points)
        num_combinations = planned.num_combinations
        if num_trials < num_combinations:
            texts.append(
                f"{planned.method.name}: {num_trials} of its {num_combinations} combinations, drawn at random, so "
                f"that each method has as many trials; --trials={num_combinations} tries all"
            )
    return texts


def write_notes_on_edges(rankings: Iterable[Ranking]) -> list[str]:
    """Says of each method in which options its best trial lies at the edge of the values of its grid.

    A better value may lie beyond. A value that switches a term off, or the smallest or largest that is allowed, has
    nothing beyond.
    """
    texts = []
    for ranking in rankings:
        method = ranking.method
        first_run, *_ = ranking.best.point.runs
        fields = recorded_fields(method, first_run.setup.config.post)
        for name, best in ranking.best.options.items():
            if not is_number(best):
                continue
            values = sorted(filter(is_number, ranking.planned.values[name]))  # None, for all, may stand among them
            spec = spec_of(fields[name])
            is_bound = best in (spec.low, spec.high, spec.off)
            is_at_edge = best in (values[0], values[-1])
            if len(values) > 1 and is_at_edge and not is_bound:
                listed = ", ".join(f"{value:g}" for value in values)
                flag = flag_of(name)
                texts.append(f"{method.name}: the best {flag}, {best:g}, is at the edge of its grid ({listed})")
    return texts


def is_number(value: Any) -> bool:
    """Returns whether a value of an option is a number, so that values have an order; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)
