"""fedcli: federated-learning papers, reproduced.

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


def run(
    method, *, out=None, seeds=None, tuned=None, continue_=None, log=None, exist_ok=False, progress=None, **options
):
    """Runs a method and returns the run; in a notebook, with a live display.

    Args:
        method: Name of a method, as `fedcli list` shows it, or path of a method file.
        out: Folder of the run, which must not exist; by default `runs/<time>-<method>-<dataset>`.
        seeds: Several runs, one after the other, in the folders `seed-<seed>` of `out`.
        tuned: A folder of `fedcli tune`, or its `tuned.json`; options given here override those in it.
        continue_: Go on with what is in `out` already, by the same call.
        log: Where each round's numbers go as well: "tensorboard", "wandb", "./mine.py:Logger", an object with some of
            the methods of `fedcli.runs.rounds.Listener`, or a list of these.
        exist_ok: Rename a run that is in `out` already, to `out` with a number behind it.
        progress: A `fedcli.runs.rounds.Listener` in place of the display.
        **options: Any option of `fedcli run METHOD --help`, with underscores, as `dataset="digits"`, `rounds=5`,
            `lr=0.1`; None counts as not given.

    Returns:
        The run, or a list of runs with `seeds`. A run has `record`, `state`, `path`, `history` (a `pandas.DataFrame`, a
        row a round, accuracies in percent) and `plot()`; a notebook shows it as a table and a curve.

    Raises:
        UserError: A run cannot start; nothing is written then.
        NonFiniteLoss: A loss becomes infinite or NaN; the record says so.

    Example:
        >>> run = fedcli.run("fedavg", dataset="digits", rounds=5)  # doctest: +SKIP
        >>> run.history["test_accuracy"]  # doctest: +SKIP
    """
    from fedcli.api import run as run_  # late: a method file imports this module before the engine exists

    return run_(method, out, log, exist_ok, progress, seeds=seeds, tuned=tuned, continue_=continue_, **options)


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
