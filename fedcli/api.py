"""What `import fedcli` gives: `run`, `tune`, `load` and `frame`, as functions that import the engine when called."""

import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcli.arguments import (
    as_list,
    convert_jobs,
    convert_method_options,
    convert_options,
    convert_seeds,
    spell_grid,
    spell_methods,
)
from fedcli.errors import UserError
from fedcli.keywords import in_keywords, keywords_for_flags
from fedcli.userfiles import user_paths

if TYPE_CHECKING:  # a method file imports `fedcli` before the engine exists, and help needs no PyTorch
    from fedcli.returned import Run, Runs, Tuned
    from fedcli.runs.origins import GivenOptions
    from fedcli.runs.rounds import Listener


def run(  # noqa: PLR0913  # what a user calls: one keyword for each choice
    method: str | Path | Sequence[str | Path],
    *,
    out: str | Path | None = None,
    seeds: Iterable[int] | None = None,
    tuned: "Tuned | str | Path | None" = None,
    continue_: bool | None = None,
    log: Any = None,
    exist_ok: bool = False,
    progress: "Listener | None" = None,
    jobs: int = 1,
    set: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> "Run | Runs":
    """Runs a method, or several, and returns the run or the runs; in a notebook, with a live display.

    Args:
        method: Name of a method, as `fedcli list` shows it, or path of a method file; several in a list, or with
            commas between them.
        out: Folder of the run, which must not exist; by default `runs/<time>-<method>-<dataset>`.
        seeds: Several runs, a seed each, in the folders `seed-<seed>` of `out`.
        tuned: What `tune` has returned, or its folder; options given here override those in it.
        continue_: Go on with what is in `out` already, by the same call.
        log: Where each round's numbers go as well: "tensorboard", "wandb", "./mine.py:Logger", an object with some of
            the methods of `fedcli.runs.rounds.Listener`, or a list of these.
        exist_ok: Rename `out` where it holds a run, or the runs of one call, to `out` with a number behind it.
        progress: A `fedcli.runs.rounds.Listener` in place of the display, for runs of one method.
        jobs: Runs at once, each of several in a process of its own.
        set: Options of single methods by name, as `{"fedprox": {"proximal_weight": 0.1}}`.
        **options: Any option of `fedcli run METHOD --help`, with underscores, as `dataset="digits"`, `rounds=5`,
            `lr=0.1`; None counts as not given. A list stands for several values, of which every combination runs. With
            several methods, an option that only some of them have is for these.

    Returns:
        The run; with several methods, seeds or values, or `jobs`, a list of runs. A run has `record`, `state`, `path`,
        `history` (a `pandas.DataFrame`, a row a round, accuracies in percent), `plot()`, `model()`, `data()`,
        `predict()`, `confusion()`, `per_class()` and `clients` (each client's accuracies); a list has `frame()`,
        `table()` and `plot()`. A notebook shows both as a table and curves.

    Raises:
        UserError: A run cannot start; nothing is written then.
        NonFiniteLoss: A loss becomes infinite or NaN; the record says so. Other seeds run before it is raised. Of
            several methods or values, or with `jobs`, the others run on, and a warning tells.

    Example:
        >>> run = fedcli.run("fedavg", dataset="digits", rounds=5)  # doctest: +SKIP
        >>> run.history["test_accuracy"]  # doctest: +SKIP
        >>> runs = fedcli.run("fedavg,fedprox", dataset="digits", seeds=range(3), jobs=2)  # doctest: +SKIP
        >>> runs.table()  # doctest: +SKIP
    """
    from fedcli.runs.old_runs import old_runs_renamed
    from fedcli.runs.origins import GivenOptions

    with in_keywords():
        experiment = _Experiment(
            methods=spell_methods(method).split(","),
            given=GivenOptions(convert_options(options), tuned=None if tuned is None else os.fspath(tuned)),
            method_options=convert_method_options({} if set is None else set),
            out=out,
            seeds=convert_seeds(seeds),
            continue_=continue_,
        )
        jobs = convert_jobs(jobs)
        if exist_ok and continue_:
            raise UserError(
                "--exist-ok renames the runs that are there, and --continue goes on with them (got both); leave one of "
                "the two out."
            )
        old_runs = old_runs_renamed(Path(out)) if exist_ok and out is not None else nullcontext()
        with old_runs:
            if experiment.is_grid or jobs > 1:
                if progress is not None:
                    raise UserError(
                        "--progress is for one method with one value of each option (got several, or --jobs "
                        f"{jobs}); leave it out, or start the runs one by one."
                    )
                return experiment.run_grid(log, jobs)
            return experiment.run_method(log, progress)


@dataclass(frozen=True)
class _Experiment:
    """What a call of `run` asks for, as the command line has it; the names are those of `run`."""

    methods: list[str]
    given: "GivenOptions"
    method_options: dict[str, Any]  # options of single methods, by the method's name
    out: str | Path | None
    seeds: list[Any] | None
    continue_: bool | None

    @property
    def is_grid(self) -> bool:
        """Whether it has several methods, or several values of an option."""
        return len(self.methods) > 1 or self.given.has_several_values

    def run_method(self, log: Any, progress: "Listener | None") -> "Run | Runs":
        """Runs the one method, once or with each seed."""
        from fedcli.results.method_options import assign_options, find_methods
        from fedcli.returned import Run, Runs
        from fedcli.runs.begin import run_method
        from fedcli.runs.loggers import Loggers
        from fedcli.runs.progress import NotebookProgress

        (method,) = self.methods
        given = self.given
        if self.method_options:
            methods = find_methods(self.methods)
            given = given.with_typed(assign_options(methods, self.method_options, given.values.get("post"))[method])
        if progress is None and _is_notebook():
            progress = NotebookProgress()
        ended = run_method(
            method,
            given,
            out=self.out,
            seeds=self.seeds,
            continue_=self.continue_,
            progress=Loggers(progress, log),
        )
        if isinstance(ended, list):
            return Runs(map(Run.of, ended))
        return Run.of(ended)

    def run_grid(self, log: Any, jobs: int) -> "Runs":
        """Runs all methods with all combinations of values and all seeds; warns of the runs that fail."""
        from fedcli.results.grids import describe_protocols, plan_grid
        from fedcli.results.jobs import PlanListener, execute
        from fedcli.returned import Runs
        from fedcli.run_files import RECORD

        if log is not None and jobs > 1:
            raise UserError(f"--log is for runs one after the other (got --jobs {jobs}); leave one of them out.")
        plan = plan_grid(
            self.methods,
            self.given,
            method_options=self.method_options,
            out=self.out,
            seeds=self.seeds,
            continue_=self.continue_,
        )
        mixed = describe_protocols(plan.runs)
        if mixed:
            warnings.warn(keywords_for_flags(mixed), stacklevel=3)
        errors = execute(plan, PlanListener(), jobs=jobs, loggers=log)
        for folder, error in errors.items():
            warnings.warn(f"the run '{folder}' has failed: {error}", stacklevel=3)
        # One that has failed before its first round has no record.
        begun = [run for run in plan.runs if run.folder not in errors or (run.folder / RECORD).is_file()]
        opened = Runs()
        for run in begun:
            files = user_paths([run.method_source, *run.setup.all_options().values()])
            opened.append(_open(run.folder, files))
        return opened


def _is_notebook() -> bool:
    """Whether a notebook runs this program."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and type(ipython.get_ipython()).__name__ == "ZMQInteractiveShell"


def tune(
    method: str | Path | Sequence[str | Path],
    *,
    grid: Mapping[str, Any] | str | Sequence[str] = (),
    out: str | Path | None = None,
    seeds: Iterable[int] | None = None,
    trials: int | None = None,
    jobs: int = 1,
    set: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> "Tuned":
    """Chooses options of one method or several by validation accuracy, each with the same number of trials.

    Args:
        method: As for `run`.
        grid: The values to try, as `{"lr": [0.01, 0.1], "fedprox:proximal_weight": [0.01, 0.1]}`; those that the
            method's own options suggest if not given.
        out: Folder of the trials, of which none runs twice; in `tuning/` if not given.
        seeds: Several of each trial, of which the mean counts.
        trials: Trials of each method; those of the smallest grid if not given.
        jobs: As for `run`.
        set: As for `run`.
        **options: As for `run`; the same in every trial.

    Returns:
        What was chosen, with `options`, `trials` (a `pandas.DataFrame`) and `folder`; give it to `run` as `tuned`.

    Raises:
        UserError: There is nothing to try, or a trial cannot start.

    Example:
        >>> best = fedcli.tune("fedavg,fedprox", grid={"lr": [0.01, 0.1]}, dataset="digits")  # doctest: +SKIP
        >>> runs = fedcli.run("fedavg,fedprox", tuned=best, dataset="digits", seeds=range(5))  # doctest: +SKIP
    """
    from fedcli.results import tune as tuning
    from fedcli.results.grids import describe_protocols
    from fedcli.results.jobs import PlanListener, execute
    from fedcli.returned import Tuned

    with in_keywords():
        jobs = convert_jobs(jobs)
        options = convert_options(options)
        method_options = convert_method_options({} if set is None else set)
        plan = tuning.plan_trials(
            spell_methods(method),
            options,
            grid=spell_grid(grid),
            num_trials=trials,
            out=out,
            seeds=convert_seeds(seeds),
            method_options=method_options,
        )
        for text in (describe_protocols(plan.runs), *tuning.write_notes_on_drawn_trials(plan)):
            if text:
                warnings.warn(keywords_for_flags(text), stacklevel=2)
        errors = execute(plan, PlanListener(), jobs=jobs, records_only=True)
        rankings = tuning.rank_and_write_best(plan, errors)
        for text in tuning.write_notes_on_edges(rankings):
            warnings.warn(keywords_for_flags(f"{text}; try values beyond"), stacklevel=2)
    best_options = {ranking.method.name: ranking.best.options for ranking in rankings}
    return Tuned(plan.folder, tuning.tabulate_trials(rankings), best_options)


@in_keywords()
def load(path: str | Path, method: str | Path | Sequence[str | Path] = ()) -> "Run | Runs":
    """Opens a run from its folder, as `run` returns it without its `state`, or all runs below a folder.

    Args:
        path: The folder of a run, its `record.json`, or a folder that holds runs at any depth.
        method: The user's files that the runs need; a file that a record names is imported only if it is named here.

    Returns:
        The run, or several as `run` returns them.

    Raises:
        UserError: There is no run, or a record cannot be read.
    """
    from fedcli.returned import Runs
    from fedcli.run_files import RECORD

    folder = Path(path)
    if not folder.is_dir() or (folder / RECORD).is_file():
        return _open(folder, method)
    folders = sorted(file.parent for file in folder.rglob(RECORD))
    if not folders:
        return _open(folder, method)  # which says that there is none
    return Runs(_open(run, method) for run in folders)


def _open(path: Path, method: str | Path | Sequence[str | Path]) -> "Run":
    from fedcli.returned import Run
    from fedcli.runs import resume

    return Run.of(resume.load(path, method))


@in_keywords()
def frame(*paths: str | Path, metrics: str | Sequence[str] = ()) -> Any:
    """Reads all runs under some folders as a `pandas.DataFrame`; see `fedcli.results.tables.read_numbers`."""
    from fedcli.results.tables import read_numbers

    return read_numbers(paths, as_list(metrics))
