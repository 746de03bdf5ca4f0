"""The commands that try the engine on this machine: `smoke` and `bench`."""

from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fedcli import registry
from fedcli.cli.printing import print_table, try_write


def smoke(
    only: Annotated[list[str] | None, typer.Option(help="A method to try; repeat it for several.")] = None,
) -> None:
    """Run every registered method for two rounds on built-in data, which needs no network.

    Exit code 1 if one of them fails. The accuracies show that something was learnt, not how good a method is.
    """
    from fedcli.smoke import smoke as try_all

    names = only or list(registry.methods())
    for name in names:
        registry.find_method(name)
    outcomes = []
    with Console(stderr=True).status("") as status:
        for outcome in try_all(names, lambda name: status.update(escape(name))):
            outcomes.append(outcome)
    rows = []
    for one in outcomes:
        accuracy = "failed" if one.accuracy is None else f"{100 * one.accuracy:.1f} %"
        rows.append((one.method, one.protocol, one.dataset, f"{one.seconds:.1f}", accuracy))
    print_table(("Method", "Protocol", "Data set", "Seconds", "Accuracy"), rows)
    failed = [one for one in outcomes if one.error]
    for one in failed:
        typer.echo(f"{one.method}: {one.error}", err=True)
    total = sum(one.seconds for one in outcomes)
    typer.echo(f"{len(outcomes) - len(failed)} of {len(outcomes)} methods ran, {total:.0f} seconds.")
    if failed:
        raise typer.Exit(1)


def bench(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(metavar="WORKLOAD", help="w1, w2, w3. \\[default: w1 w2; none with --plot]", show_default=False),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="Name of a method, or path of a method file. \\[default: the simplest]")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    precision: Annotated[str, typer.Option(help="float32, float64, tf32 or bf16.")] = "float32",
    clients_per_chunk: Annotated[str, typer.Option(help="Clients that the engine trains together.")] = "auto",
    epochs: Annotated[int | None, typer.Option(help="Local epochs. \\[default: the workload's]")] = None,
    repeats: Annotated[int, typer.Option(help="Timed rounds of each side.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of images, models and batches.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line in place of the table.")] = False,
    csv: Annotated[
        Path | None, typer.Option(help="File to append the results to; in a folder, one named after device and torch.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Figures to write, PNG and PDF, named likewise: w1 over clients per round and batch sizes."),
    ] = None,
) -> None:
    """Measure the engine against a plain PyTorch loop in the same run.

    w1: 28 x 28 grey images, 100 clients x 600, 10 a round, 5 epochs, batch 64, cnn-mcmahan.
    w2: the same images, 20 clients a round, 1 epoch, batch 10.
    w3: 32 x 32 colour images, 10 clients x 4,000, 10 epochs, batch 64, resnet18; hours on a CPU.
    Real images where fmnist and cifar10 are there, random ones otherwise; the output says which.
    """
    from fedcli import bench
    from fedcli.figures import plots

    chosen = [bench.find_workload(name) for name in workloads or (() if plot else bench.DEFAULT_WORKLOADS)]
    scaling = bench.scaling_workloads() if plot else []
    options = {
        "method": method, "device": device, "precision": precision, "clients_per_chunk": clients_per_chunk,
        "epochs": epochs, "repeats": repeats, "seed": seed,
    }  # fmt: skip
    cases = [bench.prepare(workload, **options) for workload in [*chosen, *scaling]]
    csv = csv and bench.result_file(csv, cases[0].setup.device, ".csv")
    plot = plot and bench.result_file(plot, cases[0].setup.device, "-scaling.png")
    if csv is not None:  # refused now rather than after minutes
        try_write(csv, lambda: bench.append_csv(csv, []), "--csv")
    if plot is not None:
        try_write(plot, lambda: plot.parent.mkdir(parents=True, exist_ok=True), "--plot")
    results = []
    try:
        for case in cases:
            with Console(stderr=True).status(case.workload.name) as status:
                results.append(bench.measure(case, status.update))
            if json:
                typer.echo(dumps(results[-1]))
            if csv is not None:
                try_write(csv, lambda: bench.append_csv(csv, results[-1:]), "--csv")
    finally:  # also what was measured before Ctrl-C
        if results and not json:
            for cells in bench.TABLES:
                print_table(tuple(cells), [bench.table_row(result, cells) for result in results])
                typer.echo()
            typer.echo(bench.MACHINE.format(**results[0]))
    if plot is not None:
        files = try_write(plot, lambda: plots.scaling_chart(results[len(chosen) :], plot), "--plot")
        typer.echo(f"figures: {' and '.join(map(str, files))}", err=json)
