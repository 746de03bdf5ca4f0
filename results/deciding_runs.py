"""What would decide an open claim, and how long that takes by the runs and benchmarks that were timed."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedcli.bench.csv_file import RENAMED_COLUMNS
from fedcli.bench.workloads import W3, Workload
from fedcli.data import datasets
from fedcli.declarations import Claim
from fedcli.registry import find_table
from fedcli.results import verdicts
from fedcli.results.durations import (
    REFERENCE_METHOD,
    TimedRun,
    describe_sum,
    describe_time,
    estimate_times,
    list_other_machines,
    make_table_of_times,
)
from fedcli.results.plans import PlannedRun, plan_table

PREFERRED_GPU = "NVIDIA H100 80GB HBM3"  # of most shipped runs on CUDA, whose times are known
BENCHED_WORKLOADS = (W3,)  # those of `fedcli bench` that train as a paper does


def tabulate_benchmarks(folder: Path) -> pd.DataFrame:
    """Makes a table of the times of FedAvg in the workloads that `fedcli bench` has timed on CUDA.

    Args:
        folder: The folder of the CSV files of `fedcli bench --csv`, one a machine.

    Returns:
        A row a workload, whose columns are the fields of `TimedRun`.
    """
    timed_runs = []
    for file in sorted(folder.glob("*-torch*.csv")):
        measured = pd.read_csv(file).rename(columns=RENAMED_COLUMNS)
        of_reference = measured[(measured["device"] == "cuda") & (measured["method"] == REFERENCE_METHOD)]
        for workload in BENCHED_WORKLOADS:
            of_workload = of_reference[of_reference["workload"].isin(workload.names)]
            timed_runs += [_make_timed_run(workload, timing) for timing in of_workload.to_dict("records")]
    return make_table_of_times(timed_runs)


def _make_timed_run(workload: Workload, timing: Mapping[str, Any]) -> TimedRun:
    """Returns what a row of a CSV file of `fedcli bench` says of the time of a workload."""
    shape = datasets.describe(workload.dataset)["shape"]
    examples = timing["examples_per_second"] * timing["seconds_per_round"]
    return TimedRun(
        seconds_per_example=(timing["seconds_per_round"] + timing["test_seconds"]) / examples,
        examples=examples,
        threads=1,
        undisturbed=True,
        machine=timing["hardware"],
        method=REFERENCE_METHOD,
        device=timing["device"],
        backbone=workload.backbone,
        shape=str(list(shape)),
        precision=timing["precision"],
    )


def describe_deciding_runs(answer: verdicts.Answer, folder: Path, timed_runs: pd.DataFrame) -> str:
    """Describes what would decide a claim, and how long that takes by `timed_runs`.

    Returns:
        A text without a period; empty if the claim is decided.
    """
    if answer.comparison.verdict.outcome not in verdicts.OPEN_OUTCOMES:
        return ""
    seeds = answer.needed_seeds
    if answer.has_lost_better_runs:
        return "no further seeds, since runs of the better row are lost"
    if seeds is None:
        return f"more than {verdicts.MOST_SEEDS} seeds, if their spread stays"
    lacking = find_lacking_runs(answer.claim, folder, seeds)
    num_runs = "1 run" if len(lacking) == 1 else f"{len(lacking)} runs"
    words = f"{num_runs} in full"
    if len(seeds) > verdicts.FEWEST_SEEDS:
        words += f", to have {len(seeds)} seeds"
    closed = find_closed_data_sets(lacking)
    if closed:
        words += f" on {' and '.join(closed)}, whose images are not open"
    return f"{words}; time: {describe_time_needed(lacking, timed_runs)}"


def find_lacking_runs(claim: Claim, folder: Path, seeds: Sequence[int]) -> list[PlannedRun]:
    """Finds the runs of a claim's rows and columns that have not ended, with these seeds."""
    plan = plan_table(find_table(claim.table), folder, seeds=seeds, only=verdicts.list_rows_and_columns(claim))
    return [run for run in plan.runs if run.needs_running]


def find_closed_data_sets(runs: Iterable[PlannedRun]) -> list[str]:
    """Finds the data sets of runs whose images are not open to all."""
    needed: set[str] = set()
    for run in runs:
        needed.update(run.setup.data_sets)
    return sorted(name for name in needed if not datasets.is_open_to_all(name))


def describe_time_needed(runs: Sequence[PlannedRun], timed_runs: pd.DataFrame) -> str:
    """Describes how long runs take on `PREFERRED_GPU`, else on another one, and on a CPU."""
    on_gpu = estimate_times(runs, timed_runs, "cuda", PREFERRED_GPU)
    on_cpu = estimate_times(runs, timed_runs, "cpu", "")
    texts = []
    known_on_gpu = [time for time in on_gpu if not math.isnan(time.seconds)]
    if known_on_gpu:
        machines = list_other_machines(on_gpu)
        if not all(time.machines for time in known_on_gpu):  # some were timed on no other machine
            machines = [PREFERRED_GPU, *machines]
        gpu_time = describe_sum([time.seconds for time in on_gpu], "h", "min")
        texts.append(f"{gpu_time}, timed on {' and '.join(machines)}")
    core_seconds = [time.core_seconds for time in on_cpu]
    if not all(map(math.isnan, core_seconds)):
        machines = list_other_machines(on_cpu)
        core_time = describe_sum(core_seconds, "core-hours", "core-minutes")
        texts.append(f"{core_time}, timed on {' and '.join(machines)}")
    return "; ".join(texts) or describe_time(on_cpu)  # which says that it is not known
