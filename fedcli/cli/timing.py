"""The command `bench`."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from rich.console import Console

from fedcli import registry
from fedcli.cli.options import Device, argument, given_flags, optional
from fedcli.cli.printing import print_table
from fedcli.errors import UserError, unknown
from fedcli.userfiles import names_user_file

if TYPE_CHECKING:  # they import PyTorch, which help does not need
    from fedcli.bench.timings import Timing
    from fedcli.runs.resolve import Setup

METHOD_DATASET = "cifar10"  # of methods under their own protocols
READ_BY_COUNT = ("workloads", "precision", "json", "count")  # parameters of `bench`; a count knows no others


def bench(  # noqa: PLR0913  # the parameters of a command are its options
    ctx: typer.Context,
    workloads: argument(
        list[str] | None, "WORKLOAD|METHOD", "See above; by default w1 and w2, with --count all."
    ) = None,
    method: optional(str, "Name or file of a method.") = "fedavg",
    device: Device = "auto",
    precision: optional(str, "float32, float64, tf32 or bf16.") = "float32",
    clients_per_chunk: optional(str, "Clients trained together: auto, N or branches:N.") = "auto",
    epochs: optional(int, "Local epochs in place of the workload's.", min=1) = None,
    repeats: optional(int, "Timed rounds of each side.", min=1) = 5,
    seed: optional(int, "Seed of images, models and batches.") = 0,
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
    if count:
        flags = given_flags(ctx, lambda option: option.name not in READ_BY_COUNT)
        if flags:
            fault = f"--count reads no other options than --precision and --json (got {', '.join(flags)})"
            raise UserError(f"{fault}: it counts one step of FedAvg and measures nothing; leave --count or these out.")
        _count_steps(workloads or ["w1", "w2", "w3", "w4"], precision, bool(json))
        return
    given = {"device": device, "precision": precision, "clients_per_chunk": clients_per_chunk, "seed": seed}
    if epochs:
        given["local_epochs"] = epochs
    cases = _bench_cases(workloads or [], method, given, with_scaling=bool(scaling))
    if given_flags(ctx, lambda option: option.name == "method") and not any(
        isinstance(case, WorkloadCase) for case in cases
    ):
        raise UserError(f"--method is for workloads (got {', '.join(workloads)} alone); leave it out.")
    _time_cases(cases, repeats, bool(json), csv)


class WorkloadCase(NamedTuple):
    """A workload that is timed beside the plain loop."""

    name: str
    setup: "Setup"

    def time(self, repeats: int, progress: Callable[[str], Any]) -> "Timing":
        """Times its last rounds."""
        from fedcli.bench.speed import time_workload

        return time_workload(self.name, self.setup, repeats, progress)


class MethodCase(NamedTuple):
    """A method that is timed under its own protocol, without the plain loop."""

    name: str  # of the protocol
    setup: "Setup"

    def time(self, repeats: int, progress: Callable[[str], Any]) -> "Timing":
        """Times its last rounds."""
        from fedcli.bench.speed import time_method

        return time_method(self.name, self.setup, repeats, progress)


BenchCase = WorkloadCase | MethodCase


def _bench_cases(names: list[str], method: str, given: Mapping[str, Any], with_scaling: bool) -> list[BenchCase]:
    """Resolve the workloads and methods of these names; by default the two short workloads."""
    from fedcli.bench.workloads import SCALING

    chosen = names or ["w1", "w2"]
    if with_scaling:
        chosen = [*chosen, *(workload.name for workload in SCALING)]
    return [_bench_case(name, method, given) for name in chosen]


def _bench_case(name: str, method: str, given: Mapping[str, Any]) -> BenchCase:
    """Resolve a workload by a method, or a method under its own protocol."""
    from fedcli.bench.workloads import NAMES, find_workload, prepare_workload
    from fedcli.runs.resolve import default_options, default_protocol, resolve

    workload = find_workload(name)
    if workload is not None:
        return WorkloadCase(workload.name, prepare_workload(workload, method, **given))
    if name in registry.methods() or names_user_file(name):
        chosen = registry.find_method(name)
        protocol = default_protocol(chosen, METHOD_DATASET)
        if not default_options(protocol, METHOD_DATASET, chosen.name).options["backbone"]:
            raise UserError(
                f"'{name}' cannot be timed by its own protocol, which has no network for {METHOD_DATASET} (got "
                f"{protocol.name}); time it on a workload: 'fedcli bench w1 --method {name}'."
            )
        setup = resolve(chosen, {"dataset": METHOD_DATASET, **given}, need_data=False)
        return MethodCase(setup.protocol.name, setup)
    raise unknown("workload", name, NAMES, f"there are {', '.join(NAMES)}, and methods.")


def _time_cases(cases: Sequence[BenchCase], repeats: int, as_json: bool, csv: Path | None) -> None:
    """Measure cases one after the other; print each as JSON or all in a table, and append each to a CSV file."""
    from fedcli.bench.csv_file import append_csv, prepare_csv
    from fedcli.bench.speed import check_public_images, check_repeats

    # Refused now rather than after minutes.
    for case in cases:
        check_repeats(case.name, case.setup, repeats)
        check_public_images(case.setup)
    if csv is not None:
        prepare_csv(csv)
    timings = []
    try:
        for case in cases:
            with Console(stderr=True).status(case.name) as status:
                timing = case.time(repeats, status.update)
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
    from fedcli.bench.cells import explain_titles, format_conditions, format_timing

    by_title = [format_timing(timing) for timing in timings]
    titles = list(dict.fromkeys(chain.from_iterable(by_title)))
    rows = []
    for row in by_title:
        rows.append([row.get(title, "") for title in titles])
    print_table(titles, rows)
    typer.echo(format_conditions(timings[-1]))
    typer.echo(explain_titles(titles))


def _count_steps(names: Sequence[str], precision: str, as_json: bool) -> None:
    """Count a joint step of each workload in each way; print each as JSON or all in a table."""
    from fedcli.bench.cells import format_count
    from fedcli.bench.joint_step import count_step
    from fedcli.bench.workloads import NAMES, find_workload
    from fedcli.core.stacked import WAYS

    workloads = []
    for name in names:
        workload = find_workload(name)
        if workload is None:
            raise unknown("workload", name, NAMES, f"there are {', '.join(NAMES)}.")
        workloads.append(workload)
    rows = []
    for workload in workloads:
        for way in WAYS:
            step = count_step(workload, way, precision)
            rows.append(format_count(step))
            if as_json:
                typer.echo(dumps(step.as_dict()))
    if as_json:
        return
    (titles, *_) = rows
    print_table(list(titles), [list(row.values()) for row in rows])
