"""Profiles joint steps of a workload on a GPU, once all of them are replays of graphs: kernels by their time.

Run `python results/evidence/kernels.py w3 --precision=tf32 --out=kernels.txt`; workloads are those of `fedcli bench`.
With `--device=cpu`, for a trial, operations take the place of kernels.
"""

import argparse
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from fedcli.bench.workloads import WORKLOADS, prepare_workload, with_random_images
from fedcli.core.federation import Federation
from fedcli.data import datasets
from fedcli.runs.autotune import MAX_PASSES, autotune, until_captured
from fedcli.runs.machine import machine_settings
from fedcli.runs.prepare import prepare
from fedcli.runs.resolve import Setup

ROWS = 40  # of the table
STEPS = 16  # with full batches


def kernels(workload: str, precision: str, device: str, way: str) -> str:
    """Returns a table of the kernels of some joint steps, those first that take longest."""
    setup = short_setup(workload, precision, device, way)
    fed = prepare(setup).fed
    profiler = profile_of_round(setup, fed)
    is_cuda = fed.device.type == "cuda"
    table = profiler.key_averages().table(
        sort_by="self_cuda_time_total" if is_cuda else "self_cpu_time_total", row_limit=ROWS, max_name_column_width=90
    )
    return f"{STEPS} joint steps of {workload}, {precision}, {fed.engine.mode}\n{table}"


def short_setup(workload: str, precision: str, device: str, way: str) -> Setup:
    """Returns the setup of a workload whose rounds have `STEPS` steps, on random images where its own are not here."""
    options = WORKLOADS[workload]
    cohort_size = options["cohort_size"]
    few_steps = {
        "local_epochs": 1,
        "num_clients": cohort_size,
        "train_examples": STEPS * cohort_size * options["batch_size"],
    }
    setup = prepare_workload(options | few_steps, device=device, precision=precision, clients_per_chunk=way)
    if datasets.is_present(setup.config.dataset):
        return setup
    return with_random_images(setup)


def profile_of_round(setup: Setup, fed: Federation) -> profile:
    """Returns what the profiler has seen of a round, after so many that all steps are replays of graphs."""
    activities = [ProfilerActivity.CPU]
    if fed.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with machine_settings(fed):
        autotune(fed)
        state = setup.method.init(fed, setup.method_config)
        for _ in until_captured(fed.engine, MAX_PASSES):
            fed.start_round()
            state, _ = setup.method.run_round(state, fed.cohort(0), fed, setup.method_config)
        with profile(activities=activities) as profiler:
            fed.start_round()
            setup.method.run_round(state, fed.cohort(1), fed, setup.method_config)
    return profiler


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--way", default="auto", help="as --clients-per-chunk")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_text(kernels(args.workload, args.precision, args.device, args.way))
