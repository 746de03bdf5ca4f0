"""What would decide an open claim, and how long that takes by the runs and benchmarks that were timed."""

from pathlib import Path

import pandas as pd

from fedcli.data import datasets
from fedcli.registry import find_table
from fedcli.results import verdicts
from fedcli.results.durations import (
    REFERENCE_METHOD,
    TIMED_COLUMNS,
    describe_sum,
    describe_time,
    estimate_times,
    list_other_machines,
)
from fedcli.results.plans import plan_table

H100 = "NVIDIA H100 80GB HBM3"
# Workloads of `fedcli bench` that train as a paper does, with what the runs that they stand for have in common.
BENCHED_WORKLOADS = {"w3": {"backbone": "resnet18", "shape": "[3, 32, 32]"}}


def times_of_benchmarks(folder: Path) -> pd.DataFrame:
    """The times of FedAvg in the workloads that `fedcli bench` has timed on CUDA; see `times_of_runs`.

    Args:
        folder: Of the CSV files of `fedcli bench --csv`, one a machine.
    """
    rows = []
    for file in sorted(folder.glob("*-torch*.csv")):
        measured = pd.read_csv(file)
        on_cuda = measured[(measured["device"] == "cuda") & measured["workload"].isin(BENCHED_WORKLOADS)]
        for bench in on_cuda.to_dict("records"):
            examples = bench["samples_per_second"] * bench["seconds_per_round"]
            rows.append({
                "seconds": (bench["seconds_per_round"] + bench["evaluation_seconds"]) / examples,
                "examples": examples,
                "threads": 1,
                "undisturbed": True,
                "machine": bench["hardware"],
                "method": REFERENCE_METHOD,
                "device": bench["device"],
                **BENCHED_WORKLOADS[bench["workload"]],
                "precision": bench["precision"],
            })  # fmt: skip
    return pd.DataFrame(rows, columns=TIMED_COLUMNS).astype({"undisturbed": bool})


def deciding_runs_text(answer: verdicts.Answer, folder: Path, timed_runs: pd.DataFrame) -> str:
    """What would decide a claim and how long that takes, in words; empty where it is decided.

    Of the `timed_runs`, those on an H100 count, else on another GPU; and those on a CPU.
    """
    if answer.comparison.verdict.outcome not in verdicts.OPEN_OUTCOMES:
        return ""
    seeds = answer.needed_seeds
    if seeds is None:
        return f"more than {verdicts.MOST_SEEDS} seeds, if their spread stays"
    table = find_table(answer.claim.table)
    plan = plan_table(table, folder, seeds=seeds, only=verdicts.list_rows_and_columns(answer.claim))
    lacking = [run for run in plan.runs if run.needs_running]
    words = f"{len(lacking)} runs in full"
    if len(seeds) > verdicts.FEWEST_SEEDS:
        words += f", to have {len(seeds)} seeds"
    needed = {name for run in lacking for name in run.setup.data_sets}
    closed = sorted(name for name in needed if not datasets.is_open_to_all(name))
    if closed:
        words += f" on {' and '.join(closed)}, whose images are not open"
    on_gpu = estimate_times(lacking, timed_runs, "cuda", H100)
    on_cpu = estimate_times(lacking, timed_runs, "cpu", "")
    times = []
    if on_gpu["seconds"].count():
        machines = " and ".join(list_other_machines(on_gpu)) or H100
        times.append(f"{describe_sum(on_gpu['seconds'], 'h', 'min')}, timed on {machines}")
    if on_cpu["core_seconds"].count():
        machines = " and ".join(list_other_machines(on_cpu))
        times.append(f"{describe_sum(on_cpu['core_seconds'], 'core-hours', 'core-minutes')}, timed on {machines}")
    if not times:
        times.append(describe_time(on_cpu))  # which says that it is not known
    return f"{words}; time: {'; '.join(times)}"
