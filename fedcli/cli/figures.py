"""The commands that look into finished runs: `quality` and `plot`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fedcli.cli.printing import print_table, try_write

RUNS = typer.Argument(metavar="RUN", help="Run folders, or folders that hold run folders.", show_default=False)


def quality(
    runs: Annotated[list[Path], RUNS],
    client: Annotated[
        int | None, typer.Option(help="Whose own model, where each client keeps one. \\[default: the global model]")
    ] = None,
) -> None:
    """Measure how well the features of finished runs keep the classes apart, and keep the features for figures.

    NMI after K-means and silhouette, of the last round's global model on at most 2,000 test images.
    They are written into the records, the features beside them; 'fedcli plot --kind tsne' draws these.
    With --client, of that client's own model; where the images are of several domains, of each domain apart too.
    """
    from fedcli.figures.quality import add_quality, find_runs

    finished, others = find_runs(runs)
    rows = []
    for folder in finished:
        with Console(stderr=True).status(escape(str(folder))):
            found = add_quality(folder, client)
        rows.append((f"{found['nmi']:.3f}", f"{found['silhouette']:.3f}", found["examples"], folder))
    print_table(("NMI", "Silhouette", "Images", "Run"), rows)
    if others:
        typer.echo(f"unfinished, left out: {', '.join(map(str, others))}")


class Kind(StrEnum):
    """Figures of runs."""

    curves = "curves"
    tsne = "tsne"
    confusion = "confusion"
    drift = "drift"
    clients = "clients"
    correlation = "correlation"
    domains = "domains"


def plot(
    runs: Annotated[list[Path], RUNS],
    kind: Annotated[Kind, typer.Option(help="What to draw, see above.")] = Kind.curves,
    out: Annotated[
        Path | None, typer.Option(help="File to write; PNG and PDF are both written. \\[default: <kind>.png]")
    ] = None,
) -> None:
    """Draw the learning curves of runs; those that differ only in the seed become one line with a band.

    With --kind tsne, a panel for each setting shows the features of its first seed by t-SNE, after 'fedcli quality'.
    With --kind confusion, what the test images of each class are taken for, after 'fedcli quality' too.
    With --kind drift, how far the clients' models drift apart, of runs with --drift-every.
    With --kind clients, the features of the clients' own models, for which each run does one more round.
    With --kind correlation, how alike the logits of personal models are on public and on private images.
    With --kind domains, accuracy of the clients' models on their own and on the other domains.
    """
    from fedcli.figures import plots
    from fedcli.results import tables

    out = out or Path(f"{kind}.png")
    if kind is Kind.tsne:
        from fedcli.figures.features import embedding_chart

        files = try_write(out, lambda: embedding_chart(runs, out))
    elif kind is Kind.confusion:
        from fedcli.figures.matrices import confusion_chart

        files = try_write(out, lambda: confusion_chart(runs, out))
    elif kind is Kind.clients:
        from fedcli.figures.client_features import clients_chart

        with Console(stderr=True).status("one more round of each run"):
            files = try_write(out, lambda: clients_chart(runs, out))
    elif kind is Kind.correlation:
        from fedcli.figures.correlation import correlation_chart

        with Console(stderr=True).status("logits of the clients' models"):
            files = try_write(out, lambda: correlation_chart(runs, out))
    else:
        draw = {
            Kind.curves: plots.learning_curves, Kind.drift: plots.drift_chart, Kind.domains: plots.domains_chart,
        }[kind]  # fmt: skip
        records = tables.find_records(runs)
        files = try_write(out, lambda: draw(records, out))
    typer.echo(" and ".join(map(str, files)))
