"""The commands that try the engine on this machine: `smoke`, `bench` and `check`."""

from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory

import typer
from rich.console import Console
from rich.markup import escape

from fedcli import registry
from fedcli.cli.common import argument, optional, print_table, show_traceback
from fedcli.errors import UserError, unknown
from fedcli.userfiles import is_from_file

Device = optional(str, "auto, cpu, cuda or cuda:N.")


def smoke(only: optional(list[str], "A method to try; repeat it for several.") = None) -> None:
    """Run every registered method for two rounds on built-in data, which needs no network.

    Exit code 1 if one of them fails. It shows that every method runs and ends with finite numbers; accuracies after two
    rounds say nothing of how good a method is.
    """
    from fedcli.runs import run

    names, rows, errors = [registry.find_method(name).name for name in only or registry.methods()], [], []
    small = {"rounds": 2, "train_examples": 240, "local_epochs": 2, "checkpoint_every": 2}
    with Console(stderr=True).status("") as status, TemporaryDirectory() as folder:
        for name in names:
            status.update(escape(name))
            try:
                record = run.run(name, out=f"{folder}/{name}", **small).record
            except Exception as error:
                errors.append(f"{name}: {type(error).__name__}: {error}")
                continue
            accuracy = f"{100 * record['summary']['last']:.1f} %"
            rows.append((name, record["protocol"], record["dataset"], f"{record['seconds_total']:.1f}", accuracy))
    print_table(("Method", "Protocol", "Data set", "Seconds", "Accuracy"), rows)
    typer.echo(f"{len(rows)} of {len(names)} methods ran.")
    if errors:
        typer.echo("\n".join(errors), err=True)
        raise typer.Exit(1)


def bench(
    workloads: argument(list[str] | None, "WORKLOAD|METHOD", "See above; w1 and w2 if none is given.") = None,
    method: optional(str, "Name or file of a method.") = "fedavg",
    device: Device = "auto",
    precision: optional(str, "float32, float64, tf32 or bf16.") = "float32",
    clients_per_chunk: optional(str, "Clients trained together: auto, N or branches:N.") = "auto",
    epochs: optional(int, "Local epochs; the workload's if not given.", min=1) = None,
    repeats: optional(int, "Timed rounds of each side.", min=1) = 5,
    seed: optional(int, "Seed of images, models and batches.") = 0,
    json: optional(bool, "Print one JSON object a line in place of the table.", "--json") = None,
    csv: optional(Path, "File to append the results of workloads to.") = None,
    scaling: optional(bool, "Measure w1 over clients and over batch sizes, too.", "--scaling") = None,
) -> None:
    """Measure the engine against a plain PyTorch loop in the same run.

    cnn-five-epochs, w1: 28 x 28 grey images, 100 clients x 600, 10 a round, 5 epochs, batch 64, cnn-mcmahan.
    cnn-small-batches, w2: the same images, 20 clients a round, 1 epoch, batch 10.
    resnet18, w3: 32 x 32 colour images, 10 clients x 4,000, 10 epochs, batch 64; hours on a CPU.
    METHOD: rounds of its own protocol on CIFAR-10, testing included, without the plain loop; how long all will take.
    Real images where fmnist and cifar10 are there, random ones otherwise; the output says which.
    """
    from fedcli.bench import measure, rounds
    from fedcli.runs.config import resolve

    given = {"device": device, "precision": precision, "clients_per_chunk": clients_per_chunk, "seed": seed}
    if epochs is not None:
        given["local_epochs"] = epochs
    options_of, cases = rounds.WORKLOADS | rounds.SCALING, []
    for name in [*(workloads or (() if scaling else ("w1", "w2"))), *(rounds.SCALING if scaling else ())]:
        if name in options_of:
            cases.append((name, rounds.prepare_workload(options_of[name], method, **given), True))
        elif name in registry.methods() or is_from_file(name):
            setup = resolve(registry.find_method(name), {"dataset": "cifar10", **given}, need_data=False)
            cases.append((setup.protocol.name, setup, False))
        else:
            names = ", ".join(rounds.WORKLOADS)
            raise unknown("workload", name, rounds.WORKLOADS, f"there are {names}, and methods.")
    if csv is not None:  # refused now rather than after minutes
        measure.check_csv(csv)
    rows = []
    for name, setup, with_plain in cases:
        with Console(stderr=True).status(name) as status:
            result = measure.measure(name, setup, repeats, status.update, with_plain)
        rows.append(measure.cells(result))
        if json:
            typer.echo(dumps(result))
        if csv is not None:
            measure.append_csv(csv, result)
    if not json:
        columns = list(dict.fromkeys(title for row in rows for title in row))
        print_table(columns, [[row.get(title, "") for title in columns] for row in rows])
        typer.echo(measure.MACHINE.format(**result))


def check(
    ctx: typer.Context,
    methods: argument(list[str] | None, "METHOD|FILE", "Methods or files; if none, one of each kind.") = None,
    device: Device = "auto",
    law: optional(list[int], "A law to check, 1 to 7 or 9; repeat it for several.") = None,
    all_: optional(bool, "Check every registered method; takes minutes.", "--all") = None,
) -> None:
    """Check that methods, also your own, obey the laws of all methods, on small random images in float64.

    1: switched off, a method equals the simpler one. 2: switched on, it differs. 3: stored client states are read.
    4: training clients together equals one by one, also with BatchNorm and, on CUDA, as captured graphs.
    5: client order does not matter. 6: edge cases give finite numbers. 7: a resumed run equals an uninterrupted one.
    9: what is sent is what is declared. Variants that a named method declares are checked too.
    Exit code 1 if a law is broken.
    """
    from fedcli import check as laws
    from fedcli.runs.config import find_device

    if absent := set(law or ()) - laws.LAWS.keys():
        titles = ", ".join(f"{number} ({each.title})" for number, each in laws.LAWS.items())
        raise UserError(f"unknown law {min(absent)}; there are {titles}.")
    numbers = [number for number in laws.LAWS if not law or number in law]
    chosen = registry.methods() if all_ else {method.name: method for method in laws.one_of_each_kind()}
    if methods:
        chosen = {name: registry.find_method(name) for name in methods}
        for method in list(chosen.values()):
            chosen |= {variant.name: variant for variant in laws.variants_of(method)}
    cases = [(name, method, number) for name, method in chosen.items() for number in numbers]
    device, rows, broken, left_out = str(find_device(device)), [], 0, 0
    with Console(stderr=True).status("") as status:
        for name, method, number in cases:
            status.update(escape(f"{name}: {laws.LAWS[number].title}"))
            findings = laws.check(method, number, device)
            cells = [finding.cells for finding in findings]
            cells = cells or [(f"nothing, as it declares no {laws.LAWS[number].needs}", "", "", "left out")]
            rows += [(method.name, number, *texts) for texts in cells]
            broken += not all(finding.holds for finding in findings)
            left_out += not findings
            for finding in findings:
                if finding.error is not None:
                    show_traceback(ctx, finding.error)
                if not finding.holds:
                    typer.echo(f"{name}, law {number}: {finding}", err=True)
    print_table(("Checked", "Law", "Compared", "Figure", "Tolerance", ""), rows)
    count, beside = len(cases) - left_out, f"; {left_out} left out, see above" if left_out else ""
    typer.echo(f"{count - broken} of {count} laws hold on {device}{beside}.")
    if broken:
        raise typer.Exit(1)
