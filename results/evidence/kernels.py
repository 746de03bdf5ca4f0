"""Lists the kernels of a workload's joint steps on a GPU by their time, once all steps are replays of graphs.

Run `python results/evidence/kernels.py w3 --precision=tf32 --out=kernels.txt`; workloads are those of `fedcli bench`.
With `--device=cpu`, for a trial, it lists operations.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from torch.profiler import ProfilerActivity, profile

from fedcli.bench.engine_rounds import EngineRounds, warmed_up_rounds
from fedcli.bench.workloads import NAMES, find_workload, prepare_workload, with_images_at_hand
from fedcli.errors import UserError
from fedcli.runs.resolve import Setup

ROWS = 40  # of the table, at most
STEPS = 16  # of a round, with full batches


def render_kernels(workload: str, precision: str, device: str, clients_per_chunk: str) -> str:
    """Returns a table of the kernels of `STEPS` joint steps, longest first."""
    setup = make_short_setup(workload, precision, device, clients_per_chunk)
    with warmed_up_rounds(setup, round_index=0) as rounds:
        profiler = profile_round(rounds)
        sort_column = f"self_{rounds.fed.device.type}_time_total"
        table = profiler.key_averages().table(sort_by=sort_column, row_limit=ROWS, max_name_column_width=90)
        return f"{STEPS} joint steps of {workload}, {precision}, {rounds.fed.engine.mode}\n{table}"


def make_short_setup(name: str, precision: str, device: str, clients_per_chunk: str) -> Setup:
    """Returns the setup of a workload with `STEPS` steps a round, on random images where its own are not here."""
    workload = find_workload(name)
    few_steps = replace(
        workload,
        local_epochs=1,
        num_clients=workload.cohort_size,
        train_examples=STEPS * workload.cohort_size * workload.batch_size,
    )
    setup = prepare_workload(few_steps, device=device, precision=precision, clients_per_chunk=clients_per_chunk)
    return with_images_at_hand(setup)


def profile_round(rounds: EngineRounds) -> profile:
    """Returns the profile of a round in which all steps are replays of graphs."""
    setup = rounds.setup
    fed = rounds.fed
    activities = [ProfilerActivity.CPU]
    if fed.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        fed.start_round()
        setup.method.run_round(rounds.state, fed.cohort(1), fed, setup.method_config)
    return profiler


def main(
    workload: str,
    out: Annotated[Path, typer.Option(help="File for the table.", dir_okay=False)],
    precision: str = "float32",
    device: str = "cuda",
    clients_per_chunk: Annotated[str, typer.Option(help="As --clients-per-chunk.")] = "auto",
) -> None:
    """Profiles joint steps of a workload of `fedcli bench`, and writes a table of its kernels by their time."""
    if workload not in NAMES:
        sys.exit(f"error: '{workload}' is no workload; there are {', '.join(NAMES)}.")
    out.parent.mkdir(parents=True, exist_ok=True)  # before the profile, which takes minutes
    try:
        table = render_kernels(workload, precision, device, clients_per_chunk)
    except UserError as error:
        sys.exit(f"error: {error}")
    out.write_text(table)


if __name__ == "__main__":
    typer.run(main)
