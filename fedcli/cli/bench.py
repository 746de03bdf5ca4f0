"""The command `bench`."""

from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from fedcli.cli.options import Device, argument, given_flags, optional
from fedcli.cli.printing import print_table
from fedcli.errors import UserError, unknown

if TYPE_CHECKING:  # they import PyTorch, which help does not need
    from fedcli.bench.cases import BenchCase
    from fedcli.bench.timings import Timing

READ_BY_COUNT = ("workloads", "precision", "json", "count")  # parameters of `bench`; a count knows no others


def bench(  # noqa: PLR0913  # the parameters of a command are its options
    ctx: typer.Context,
    workloads: argument(
        list[str] | None, "WORKLOAD|METHOD", "See above; by default w1 and w2, with --count all."
    ) = None,
    method: optional(str, "Name or file of a method; the plain loop does fedavg alone.") = "fedavg",
    device: Device = None,
    precision: optional(str, "float32, float64, tf32 or bf16; by default float32 or the protocol's.") = None,
    clients_per_chunk: optional(
        str, "Clients trained together: auto, N or branches:N; by default auto or the protocol's."
    ) = None,
    epochs: optional(int, "Local epochs in place of the workload's.", min=1) = None,
    repeats: optional(int, "Timed rounds of each side.", min=1) = 5,
    seed: optional(int, "Seed of images, models and batches; by default 0 or the protocol's.") = None,
    json: optional(bool, "Print a JSON object a line, and no table.", "--json") = None,
    csv: optional(Path, "File to append the results to.") = None,
    scaling: optional(bool, "Measure w1 over clients and batch sizes, too.", "--scaling") = None,
    count: optional(
        bool, "Measure nothing: count a joint step as CUDA would do it, and model an H100 in float32.", "--count"
    ) = None,
) -> None:
    """Measure the engine against a plain PyTorch loop in the same run.

    cnn-five-epochs, w1: 28 x 28 grey images, 100 clients x 600, 10 a round, 5 epochs, batch 64, cnn-mcmahan.
    cnn-small-batches, w2: the same images, 20 clients a round, 1 epoch, batch 10.
    resnet18, w3: 32 x 32 colour images, 10 clients x 4,000, 10 epochs, batch 64; hours on a CPU.
    small-network, w4: as w1, with a network of 21,840 parameters.
    METHOD: rounds of its own protocol on CIFAR-10, without the plain loop; how long all will take.
    Where fmnist or cifar10 is missing, the images are random.
    """
    from fedcli.bench.cases import find_case
    from fedcli.bench.workloads import SCALING

    if count:
        flags = given_flags(ctx, lambda option: option.name not in READ_BY_COUNT)
        if flags:
            fault = f"--count reads no other options than --precision and --json (got {', '.join(flags)})"
            raise UserError(f"{fault}: it counts one step of FedAvg and measures nothing; leave --count or these out.")
        _count_steps(workloads or [], precision or "float32", bool(json))
        return
    values = {
        "device": device,
        "precision": precision,
        "clients_per_chunk": clients_per_chunk,
        "local_epochs": epochs,
        "seed": seed,
    }
    options = {name: value for name, value in values.items() if value is not None}
    names = workloads or ["w1", "w2"]
    if scaling:
        names = [*names, *(workload.name for workload in SCALING)]
    cases = [find_case(name, method, options) for name in names]
    is_method_given = bool(given_flags(ctx, lambda option: option.name == "method"))
    has_workload = any(case.workload is not None for case in cases)
    if is_method_given and not has_workload:
        raise UserError(f"--method is for workloads (got {', '.join(names)} alone); leave it out.")
    _time_cases(cases, repeats, bool(json), csv)


def _time_cases(cases: "Sequence[BenchCase]", repeats: int, as_json: bool, csv: Path | None) -> None:
    """Time cases one after the other; print each as JSON or all in a table, and append each to a CSV file."""
    from fedcli.bench.csv_file import append_csv, prepare_csv
    from fedcli.bench.speed import time_case

    for case in cases:
        case.check(repeats)
    if csv is not None:
        prepare_csv(csv)
    timings: list[Timing] = []
    try:
        for case in cases:
            with Console(stderr=True).status(case.name) as status:
                timing = time_case(case, repeats, status.update)
            timings.append(timing)
            if as_json:
                typer.echo(dumps(timing.as_dict()))
            if csv is not None:
                append_csv(csv, timing.as_dict())
    finally:  # also those before a case that failed
        if timings and not as_json:
            _print_timings(timings)


def _print_timings(timings: "Sequence[Timing]") -> None:
    """Print what was timed, a row a case, the machine, and what the titles mean."""
    from fedcli.bench.table import explain_titles, find_titles, format_conditions, format_timing

    rows = [format_timing(timing) for timing in timings]
    titles = find_titles(rows)
    _print_rows(titles, rows)
    typer.echo(format_conditions(timings))
    typer.echo(explain_titles(titles))


def _count_steps(names: Sequence[str], precision: str, as_json: bool) -> None:
    """Count a joint step of workloads, by default of all, stacked and as branches; print each as JSON or in a table."""
    from fedcli.bench.joint_step import count_step
    from fedcli.bench.table import format_count
    from fedcli.bench.workloads import NAMES, WORKLOADS, find_workload
    from fedcli.core.stacked import WAYS

    workloads = []
    for name in names:
        workload = find_workload(name)
        if workload is None:
            raise unknown("workload", name, NAMES, f"there are {', '.join(NAMES)}.")
        workloads.append(workload)
    if not workloads:
        workloads = list(WORKLOADS)
    steps = []
    for workload in workloads:
        for way in WAYS:
            step = count_step(workload, way, precision)
            steps.append(step)
            if as_json:
                typer.echo(dumps(step.as_dict()))
    if not as_json:
        rows = [format_count(step) for step in steps]
        _print_rows(list(rows[0]), rows)


def _print_rows(titles: Sequence[str], rows: Sequence[dict[str, str]]) -> None:
    """Print cells below their titles; a row has an empty cell below a title that it lacks."""
    cells_of_rows = []
    for row in rows:
        cells_of_rows.append([row.get(title, "") for title in titles])
    print_table(titles, cells_of_rows)
