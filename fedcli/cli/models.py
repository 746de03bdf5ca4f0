"""The commands about the models of finished runs: `quality` and `export`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from fedcli.cli.options import Client, CodeFiles, Runs, argument, given_flags, optional, records_of
from fedcli.cli.printing import print_table, say
from fedcli.errors import UserError


def quality(
    ctx: typer.Context,
    runs: Runs,
    client: Client = None,
    clients: optional(bool, "Use the clients' own models after one more round.", "--clients") = False,
    round: optional(str, "Round of the model: selected, as in the headline, or last.") = "selected",
    files: CodeFiles = None,
) -> None:
    """Measure how well the features of finished runs separate the classes: NMI after K-means, and silhouette.

    Takes the global model of the headline and at most 2,000 test images. Both go into the records, and the features
    beside them; 'fedcli plot --kind tsne' draws these.
    With --client: of that client's own model.
    With --clients: of all clients' features after one more round; 'fedcli plot --kind clients' draws them.
    """
    from fedcli.measure.quality import add_clients_quality, add_quality
    from fedcli.results.run_records import select_finished

    measure: Callable[..., dict[str, Any]] = partial(add_quality, client=client, round=round)
    if clients:
        flags = given_flags(ctx, lambda option: option.name in ("client", "round"))
        if flags:
            fault = f"--clients takes no --client and no --round (got {', '.join(flags)})"
            reason = "it measures the models of all clients after one more round"
            raise UserError(f"{fault}: {reason}; leave --clients or these out.")
        measure = add_clients_quality
    rows = []
    for record in select_finished(records_of(runs, None, None, None)):
        folder = record["folder"]
        with Console(stderr=True).status(escape(str(folder))):
            measured = measure(folder, files=files or ())
        nmi = f"{measured['nmi']:.3f}"
        silhouette = f"{measured['silhouette']:.3f}"
        rows.append((nmi, silhouette, measured["examples"], folder))
    print_table(("NMI", "Silhouette", "Images", "Run"), rows)


def export(
    run: argument(Path, "RUN", "Folder of a finished run."),
    format: optional(str, "pt, a program that needs only PyTorch; or safetensors.") = "pt",
    client: Client = None,
    round: optional(str, "Round of the model: selected, as in the headline, or last.") = "selected",
    prototypes: optional(bool, "Classify by the nearest prototype.", "--prototypes") = False,
    out: optional(Path, "File to write; by default in RUN.") = None,
    files: CodeFiles = None,
) -> None:
    """Write a run's model to a file that needs no fedcli, and a card that says how to load it.

    The model takes float images in 0 to 1, which it normalises, and gives logits.
    """
    from fedcli.runs.exports import export as export_model
    from fedcli.runs.resume import load

    written = export_model(load(run, files or ()), format, client, round, prototypes, out)
    for file in written:
        say(file)
