"""The commands for data sets: `data list | download | import | show`."""

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedcli import declarations
from fedcli.cli.printing import Command, completion, console, print_table, try_write
from fedcli.errors import UserError

app = typer.Typer(no_args_is_help=True, help="List, download, import and show data sets.")


@app.command("list", cls=Command)
def data_list() -> None:
    """List the data sets: built in, to be downloaded or imported, made from others, and your own."""
    from fedcli.data import datasets

    rows, notes = [], []
    for name in datasets.names():
        try:
            about = datasets.describe(name)
        except UserError:
            rows.append((name, "damaged: import or download it again", *[""] * 5))
            continue
        numbers = ("" if about[key] is None else about[key] for key in ("train", "test", "classes"))
        shape = " x ".join(map(str, about["shape"]))
        rows.append((name, about["kind"], "yes" if about["present"] else "no", *numbers, shape))
        notes += [(name, about["note"])] if about["note"] else []
    print_table(("Data set", "Kind", "Present", "Train", "Test", "Classes", "Shape"), rows)
    typer.echo()
    print_table(("Made", "From"), notes)
    typer.echo(f"\nDownloaded and imported sets are kept in {datasets.cache_folder()} (set FEDCLI_DATA to change it).")


@app.command(cls=Command)
def download(name: Annotated[str, typer.Argument(metavar="NAME", help="A data set of kind 'download'.")]) -> None:
    """Download a data set into the cache."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from fedcli.data import datasets

    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console()) as bar:
        tasks: dict[str, Any] = {}

        def moved(file: str, so_far: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bar.add_task(file)
            bar.update(tasks[file], completed=so_far, total=total)

        kept = datasets.download(datasets.find_name(name), moved)
    typer.echo(f"{name}: {kept}")


@app.command("import", cls=Command)
def import_(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A known name, or a new one of a-z, 0-9 and -.")],
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="An .npz file, an image folder, or the official archive.")
    ],
    convert: Annotated[
        bool,
        typer.Option(
            "--convert",
            help="Bring images and labels into form: pixels in 0 to 1 or -1 to 1, channels first, sides that differ "
            "(padded), labels from 1.",
        ),
    ] = False,
    source: Annotated[
        Literal["pfllib"] | None,
        typer.Option("--from", help="PATH is a folder that PFLlib's generator wrote: images, clients, test parts."),
    ] = None,
) -> None:
    """Take a data set from files into the cache."""
    from fedcli.data import datasets

    if source is None:
        kept = datasets.import_path(name, path, convert)
    else:
        kept, split, clients = datasets.import_pfllib(name, path)
    about = datasets.describe(name)
    typer.echo(f"{name}: {about['train']} training and {about['test']} test images, {about['classes']} classes: {kept}")
    if source is not None:
        flags = shlex.join(["--partition", f"file:{split}", "--num-clients", str(clients)])
        typer.echo(f"its clients: {flags}, under a protocol that tests on their own parts")


@app.command("show", cls=Command)
def data_show(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A data set that is present.", autocompletion=completion("dataset")),
    ],
    partition: Annotated[str | None, typer.Option(help="A partition to draw, as for 'fedcli run'.")] = None,
    num_clients: Annotated[int, typer.Option(help="Clients of the partition.")] = 10,
    partition_seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    train_examples: Annotated[int | None, typer.Option(help="Use a stratified part of the training images.")] = None,
    out: Annotated[Path | None, typer.Option(help="Chart of the partition. \\[default: <name>-partition.png]")] = None,
) -> None:
    """Show what a data set holds and, with --partition, what each client would get."""
    from fedcli.core.partition import from_flag
    from fedcli.data import datasets
    from fedcli.runs.config import RunConfig

    for option, value in (("num_clients", num_clients), ("partition_seed", partition_seed)):
        declarations.check_value(RunConfig.__dataclass_fields__[option], value)
    if out is not None and partition is None:
        raise UserError(f"--out {out} is for the chart of a partition (got no --partition); give both or neither.")
    chosen = from_flag(partition) if partition is not None else None
    name = datasets.find_name(name)
    dataset = datasets.load(name)
    if partition is not None and partition.startswith("file:"):
        dataset = datasets.merge(dataset)  # its lists count the test images too
    if train_examples is not None:
        dataset = datasets.take(dataset, train_examples, partition_seed)
    train, test, writers = len(dataset.y_train), len(dataset.y_test), dataset.writer_train
    rows = [
        ("images", f"{train:,} to train{' (reduced)' if dataset.reduced else ''}, {test:,} to test"),
        ("shape", " x ".join(map(str, dataset.x_train.shape[1:]))),
        ("classes", f"{dataset.num_classes}: {_classes(dataset.class_names)}"),
        *([("domains", _domains(dataset))] if dataset.domain_names else []),
        *([("writers", f"{len(writers.unique()):,} to train")] if writers is not None else []),
        ("fingerprint", dataset.fingerprint),
        *([("made from", note)] if (note := datasets.describe(name)["note"]) else []),
    ]
    print_table(("Data set", name), rows)
    if chosen is not None:
        chart = out or Path(f"{name}-partition.png")
        _show_partition(dataset, chosen.scaled(dataset.share), num_clients, partition_seed, chart)


def _classes(names: Any) -> str:
    """Name the classes, with their numbers unless these are the names."""
    return ", ".join(name if name == str(number) else f"{number} {name}" for number, name in enumerate(names))


def _domains(dataset: Any) -> str:
    """Name the domains with their numbers of training and test images."""
    names = dataset.domain_names
    train, test = (part.bincount(minlength=len(names)) for part in (dataset.domain_train, dataset.domain_test))
    return ", ".join(f"{name} {train[place]:,} + {test[place]:,}" for place, name in enumerate(names))


def _show_partition(dataset: Any, chosen: Any, num_clients: int, seed: int, out: Path) -> None:
    """Print how many examples of each class each client would get, and draw the chart."""
    from fedcli.core import partition
    from fedcli.figures import partition as chart
    from fedcli.figures import plots

    parts = chosen(dataset.y_train, num_clients, seed, dataset.domain_train, dataset.writer_train, dataset.place_train)
    counts = partition.count_classes(parts, dataset.y_train, dataset.num_classes)
    few = dataset.num_classes <= 10  # more columns than that fit no terminal
    names = range(dataset.num_classes) if few else ()  # the classes' own names would not fit
    rows = [(client, row.sum(), (row > 0).sum(), *(row if few else ())) for client, row in enumerate(counts)]
    typer.echo(f"\npartition {chosen}, seed {seed}, fingerprint {partition.fingerprint(parts)}")
    print_table(("Client", "Images", "Classes", *map(str, names)), rows, gap=1)
    title = f"{plots.dataset_words(dataset.name)}, {plots.partition_words(str(chosen))}, seed {seed}"
    files = try_write(out, lambda: plots.write(out, chart.partition_figure, counts, dataset.class_names, title))
    typer.echo(f"chart: {' and '.join(map(str, files))}")
