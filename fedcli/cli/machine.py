"""The commands that try the engine on this machine: `smoke`, `bench` and `check`."""

from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from fedcli import registry
from fedcli.cli.printing import print_table, show_traceback, try_write
from fedcli.errors import UserError
from fedcli.userfiles import is_from_file


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
        typer.Argument(
            metavar="WORKLOAD|METHOD", help="See above. \\[default: w1 w2; none with --scaling]", show_default=False
        ),
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
    scaling: Annotated[
        bool, typer.Option("--scaling", help="Measure w1 over clients per round and over batch sizes, too.")
    ] = False,
) -> None:
    """Measure the engine against a plain PyTorch loop in the same run.

    cnn-five-epochs, w1: 28 x 28 grey images, 100 clients x 600, 10 a round, 5 epochs, batch 64, cnn-mcmahan.
    cnn-small-batches, w2: the same images, 20 clients a round, 1 epoch, batch 10.
    resnet18, w3: 32 x 32 colour images, 10 clients x 4,000, 10 epochs, batch 64; hours on a CPU.
    METHOD: rounds of its own protocol on CIFAR-10, testing included, without the plain loop; how long all will take.
    Real images where fmnist and cifar10 are there, random ones otherwise; the output says which.
    """
    from fedcli.bench import measure, rounds

    named = workloads or (() if scaling else rounds.DEFAULT_WORKLOADS)
    methods = [name for name in named if name in registry.methods() or is_from_file(name)]
    chosen = [rounds.find_workload(name) for name in named if name not in methods]
    chosen += rounds.scaling_workloads() if scaling else []
    options = {
        "method": method, "device": device, "precision": precision, "clients_per_chunk": clients_per_chunk,
        "epochs": epochs, "repeats": repeats, "seed": seed,
    }  # fmt: skip
    cases = [rounds.prepare(workload, **options) for workload in chosen]
    machine = {name: value for name, value in options.items() if name != "method"}
    for setup in [rounds.prepare_run(name, **machine) for name in methods]:
        with Console(stderr=True).status(setup.method.name) as status:
            result = measure.measure_run(setup, repeats, status.update)
        typer.echo(dumps(result) if json else measure.describe_run(result))
    if not cases:
        return
    csv = csv and measure.result_file(csv, cases[0].setup.device, ".csv")
    if csv is not None:  # refused now rather than after minutes
        try_write(csv, lambda: measure.append_csv(csv, []), "--csv")
    results = []
    try:
        for case in cases:
            with Console(stderr=True).status(case.workload.name) as status:
                results.append(measure.measure(case, status.update))
            if json:
                typer.echo(dumps(results[-1]))
            if csv is not None:
                try_write(csv, lambda: measure.append_csv(csv, results[-1:]), "--csv")
    finally:  # also what was measured before Ctrl-C
        if results and not json:
            for cells in measure.TABLES:
                print_table(tuple(cells), [measure.table_row(result, cells) for result in results])
                typer.echo()
            typer.echo(measure.MACHINE.format(**results[0]))


def check(
    ctx: typer.Context,
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="METHOD|FILE",
            help="Names of methods, or paths of method files. \\[default: the engine, and a method of each kind]",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    law: Annotated[list[int] | None, typer.Option(help="A law to check, 1 to 7 or 9; repeat it for several.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every registered method, minutes.")] = False,
) -> None:
    """Check methods, your own too, by the laws that every method must keep, on small random images in float64.

    1: switched off, a method is the simpler one. 2: switched on, it is not. 3: what a client stores is read.
    4: clients that train together are clients one by one, with BatchNorm too, and on CUDA as captured graphs.
    5: their order does not matter. 6: data at the edge give finite numbers. 7: a resumed run is an uninterrupted one.
    9: what is sent is what is declared. Variants that a named method declares are checked too.
    Exit code 1 if one of them is broken. Of several methods the table has the worst figure of each law.
    """
    from fedcli import check as laws
    from fedcli.runs.config import find_device

    if methods and all_:
        raise UserError(f"--all checks every method (got {methods[0]} too); give one of the two.")
    numbers = laws.find_laws(law or ())
    if methods:
        chosen = []
        for name in methods:
            method = registry.find_method(name)
            chosen.append(laws.Case(name, method, numbers))
            chosen += [laws.Case(variant.name, variant, numbers) for variant in laws.variants_of(method)]
    else:
        kinds = registry.methods().values() if all_ else laws.one_of_each_kind()
        engine = replace(laws.engine(), laws=tuple(number for number in laws.engine().laws if number in numbers))
        chosen = [engine, *(laws.Case(method.name, method, numbers) for method in kinds)]
    outcomes = []
    with Console(stderr=True).status("") as status:
        for outcome in laws.check(chosen, device, lambda text: status.update(escape(text))):
            outcomes.append(outcome)
    rows = [row for outcome in outcomes for row in _law_rows(outcome, whole=len(chosen) == 1)]
    print_table(("Checked", "Law", "Compared", "Figure", "Tolerance", ""), rows)
    broken = [outcome for outcome in outcomes if outcome.errors]
    for outcome in broken:
        for error in outcome.errors:
            show_traceback(ctx, error)
            text = str(error) if isinstance(error, laws.Broken) else f"{type(error).__name__}: {error}"
            typer.echo(f"{outcome.case.name}, law {outcome.law}: {text.strip().splitlines()[0]}", err=True)
    held = sum(outcome.left_out is None for outcome in outcomes)
    typer.echo(f"{held - len(broken)} of {held} laws hold on {find_device(device)}.")
    if broken:
        raise typer.Exit(1)


def _law_rows(outcome: Any, whole: bool) -> list[tuple[str, ...]]:
    """Make the rows of a law: all that was measured or, of several methods, what is broken or else the worst."""
    name, law = outcome.case.name, f"{outcome.law}"
    if outcome.left_out is not None:
        return [(name, law, f"nothing, as {outcome.left_out}", "", "", "left out")]
    findings = outcome.findings
    if not whole:
        wrong = [one for one in findings if not one.holds]
        findings = wrong or sorted(findings, key=lambda one: one.figure if not one.above else -1)[-1:]
    rows = [
        (name, law, one.what, f"{one.figure:.1e}", one.tolerance, "pass" if one.holds else "FAIL") for one in findings
    ]
    raised = [error for error in outcome.errors if not hasattr(error, "findings")]
    return [*rows, *((name, law, f"raised {type(error).__name__}", "", "", "FAIL") for error in raised)]
