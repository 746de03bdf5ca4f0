"""fedcli: methods of federated-learning papers, implemented and compared.

`fedcli.run("fedavg", dataset="digits")` is `fedcli run fedavg --dataset digits` from Python; a method file imports
`Method`, `Protocol`, `DataSetting` and `option` from here. `fedcli.load(RUN).model()` is a trained model.
"""

import os

# Before PyTorch is loaded: limit OpenMP's spinning, which starves other processes. A waiting thread looks 300,000 times
# before it sleeps, which makes a small operation ten times as long where another program has a core.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

from fedcli.declarations import (
    Cell,
    Claim,
    DataSetting,
    Gain,
    Method,
    Post,
    Protocol,
    PublicSetting,
    Table,
    both_ways,
    grid,
    option,
    params_both_ways,
    rows_by_class,
)  # fmt: skip
from fedcli.errors import UserError

__all__ = [
    "Cell", "Claim", "DataSetting", "Gain", "Method", "Post", "Protocol", "PublicSetting", "Table", "UserError",
    "both_ways", "frame", "grid", "load", "option", "params_both_ways", "rows_by_class", "run",
]  # fmt: skip


def run(  # noqa: PLR0913  # what a user calls: one keyword for each choice
    method, *, out=None, seeds=None, tuned=None, continue_=None, log=None, exist_ok=False, progress=None, jobs=1,
    set=None, **options,
):  # fmt: skip
    """Runs a method, or several, and returns the run or the runs; in a notebook, with a live display.

    Args:
        method: Name of a method, as `fedcli list` shows it, or path of a method file; several with commas between them.
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
        NonFiniteLoss: A loss becomes infinite or NaN; the record says so. Of several methods or values the others run
            on, and a warning tells.

    Example:
        >>> run = fedcli.run("fedavg", dataset="digits", rounds=5)  # doctest: +SKIP
        >>> run.history["test_accuracy"]  # doctest: +SKIP
        >>> runs = fedcli.run("fedavg,fedprox", dataset="digits", seeds=range(3), jobs=2)  # doctest: +SKIP
        >>> runs.table()  # doctest: +SKIP
    """
    from fedcli.api import run as run_  # late: a method file imports this module before the engine exists

    return run_(
        method,
        options,
        out=out,
        seeds=seeds,
        tuned=tuned,
        continue_=continue_,
        log=log,
        exist_ok=exist_ok,
        progress=progress,
        jobs=jobs,
        set=set or {},
    )


def tune(method, *, grid=(), out=None, seeds=None, trials=None, jobs=1, set=None, **options):
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
    from fedcli.api import tune as tune_

    return tune_(method, options, grid=grid, out=out, seeds=seeds, trials=trials, jobs=jobs, set=set or {})


def load(path, method=()):
    """Opens a run from its folder, as `run` returns it without its `state`, or all runs below a folder.

    Args:
        path: The folder of a run, its `record.json`, or a folder that holds runs at any depth.
        method: The user's files that the runs need; a file that a record names is imported only if it is named here.

    Returns:
        The run, or several as `run` returns them.

    Raises:
        UserError: There is no run, or a record cannot be read.
    """
    from fedcli.api import load as load_

    return load_(path, method)


def frame(*paths, metrics=()):
    """Reads all runs under some folders as a `pandas.DataFrame`; see `fedcli.results.tables.numbers_of_runs`."""
    from fedcli.results.tables import numbers_of_runs  # late: pandas takes half a second

    return numbers_of_runs(paths, metrics)
