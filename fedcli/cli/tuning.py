"""The command `tune`."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from fedcli.cli.completion import completion
from fedcli.cli.method_options import given_options, read_set
from fedcli.cli.options import (
    GRID,
    OUTPUT,
    Cpus,
    Gpus,
    Jobs,
    LogFile,
    On,
    Quiet,
    Seeds,
    Set,
    TimeLimit,
    argument,
    optional,
    place_runs,
)  # fmt: skip
from fedcli.cli.printing import Output, consoles, print_table, say
from fedcli.declarations import flag_of

if TYPE_CHECKING:
    from fedcli.results.tune import Ranking


def tune(  # noqa: PLR0913  # the parameters of a command are its options
    ctx: typer.Context,
    method: argument(str, "METHOD", "A method or a method file.", autocompletion=completion("method")),
    grid: optional(
        list[str], "Values to try, e.g. lr=0.01,0.1, or fedprox:lr=0.1,1 for one method; may be repeated.", panel=GRID
    ) = None,
    trials: optional(int, "Trials of each method; those of the smallest grid by default.", panel=GRID, min=1) = None,
    set_: Set = None,
    seeds: Seeds = None,
    jobs: Jobs = None,
    on: On = None,
    cpus_per_run: Cpus = None,
    gpus_per_run: Gpus = None,
    time_limit: TimeLimit = None,
    out: optional(str, "Folder of the trials, by default in tuning/; none runs twice.", panel=OUTPUT) = None,
    log_file: LogFile = None,
    quiet: Quiet = None,
) -> None:
    """Run a grid of options and choose by validation accuracy, never by test accuracy.

    Several methods, with commas between them, get the same number of trials; a larger grid is drawn from.
    All other options are the same in every trial; with several seeds, the mean counts.
    'fedcli run METHOD --tuned FOLDER' then uses what was chosen.
    """
    from fedcli.cli.plan_display import run_plan, warn_of_protocols
    from fedcli.results import tune
    from fedcli.runs.options import flags_of

    names = method.split(",")
    given = given_options(ctx).values
    method_options = read_set(names, set_, given.get("post"))
    plan = tune.plan_trials(
        method,
        given,
        grid=grid or (),
        num_trials=trials,
        seeds=seeds,
        out=out,
        method_options=method_options,
    )
    placement = place_runs(jobs, on, cpus_per_run, gpus_per_run)
    warn_of_protocols(plan)
    for text in tune.write_notes_on_drawn_trials(plan):
        say(f"{text}.", err=True)
    with consoles(Output(quiet=quiet, log_file=log_file), stderr=True) as screens:
        errors = run_plan(plan, screens, placement=placement, records_only=True)
    rankings = tune.rank_and_write_best(plan, errors)
    for ranking in rankings:
        print_trials(ranking, with_method=len(rankings) > 1)
    for text in tune.write_notes_on_edges(rankings):
        say(f"warning: {text}; try values beyond.", err=True)
    tuned = shlex.join(["--tuned", str(plan.folder)])
    if len(rankings) > 1:
        say(f"{_describe_budget(rankings)}; use fedcli run {method} {tuned}")
        return
    flags = shlex.join(flags_of(rankings[0].best.options))
    say(f"use {flags}, or {tuned} ({plan.folder / tune.TUNED})")


def _describe_budget(rankings: "Sequence[Ranking]") -> str:
    """Describe how many trials the methods have had."""
    counts = {ranking.method.name: len(ranking.trials) for ranking in rankings}
    if len(set(counts.values())) == 1:
        return f"{max(counts.values())} trials each"
    return "trials: " + ", ".join(f"{name} {count}" for name, count in counts.items())


def print_trials(ranking: "Ranking", *, with_method: bool) -> None:
    """Print the trials of a method, the best first, with the mean and deviation of their validation accuracies."""
    from fedcli.results.metrics import find_metric

    metric = find_metric("validation")
    rows = []
    for trial in ranking.trials:
        text = "diverged"
        if not trial.has_diverged:
            text = metric.format_mean([100 * accuracy for accuracy in trial.accuracies])
        rows.append([*trial.options.values(), text])
    columns = [*map(flag_of, ranking.best.options), "Validation accuracy, %"]
    if with_method:
        columns = ["Method", *columns]
        rows = [[ranking.method.name, *row] for row in rows]
    print_table(columns, rows)
