"""The commands about data sets: `data list`, `data download`, `data import` and `data show`."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedcli.cli.completion import completion
from fedcli.cli.groups import HelpfulGroup
from fedcli.cli.options import argument, given_flags, optional
from fedcli.cli.printing import print_table, say
from fedcli.errors import UserError
from fedcli.run_files import refuse_file_of_a_run

if TYPE_CHECKING:  # they import PyTorch, which help does not need
    from fedcli.core.parts import Parts
    from fedcli.data.dataset import Dataset

data = typer.Typer(cls=HelpfulGroup, help="List, download, import and show data sets.")


@data.command("list")
def data_list() -> None:
    """List the data sets: built in, to be downloaded or imported, made from others, and your own."""
    from fedcli.data import datasets
    from fedcli.data.cache import cache_folder

    rows = []
    for name in datasets.names():
        try:
            traits = datasets.describe(name)
        except UserError:
            rows.append((name, "damaged: import or download it again", "", "", "", "", ""))
        else:
            numbers = ["" if traits[trait] is None else traits[trait] for trait in ("train", "test", "classes")]
            present = "yes" if traits["present"] else "no"
            shape = " x ".join(map(str, traits["shape"]))
            rows.append((name, traits["kind"], present, *numbers, shape))
    print_table(("Data set", "Kind", "Present", "Train", "Test", "Classes", "Shape"), rows)
    typer.echo("\n'fedcli data show NAME' says what a made set is made from.")
    say(f"Downloads and imports are in {cache_folder()} (set FEDCLI_DATA to change it).")


@data.command()
def download(name: argument(str, "NAME", "A download of 'fedcli data list'.")) -> None:
    """Download a data set into the cache."""
    from fedcli.data import datasets, imports

    say(f"{name}: {imports.download(datasets.find_name(name))}")


@data.command("import")
def import_(
    name: argument(str, "NAME", "A name of 'fedcli data list', or a new one of a-z, 0-9 and -."),
    path: argument(Path, "PATH", "An .npz file, a folder of images, official files, or hf:FOLDER of Hugging Face."),
    size: optional(int, "Resize images to SIZE x SIZE pixels.", min=1) = None,
) -> None:
    """Import a data set from an archive or a folder into the cache.

    Its form is detected, and converted with a note. PFLlib sets include their clients.
    """
    from fedcli.data import datasets, imports

    file, notes = imports.import_path(name, path, size)
    traits = datasets.describe(name)
    numbers = f"{traits['train']} training and {traits['test']} test images, {traits['classes']} classes"
    say(f"{name}: {numbers}: {file}")
    for note in notes:
        say(note)


@data.command("show")
def data_show(
    ctx: typer.Context,
    name: argument(str, "NAME", "A data set.", autocompletion=completion("dataset")),
    partition: optional(str, "Partition to draw, e.g. dirichlet:0.5.") = None,
    num_clients: optional(int, "Clients of the partition.", min=1) = 10,
    partition_seed: optional(int, "Seed of the partition.", min=0, max=2**32 - 1) = 0,
    out: optional(Path, "Chart of it; NAME-partition.png by default.") = None,
) -> None:
    """Show what a data set holds and, with --partition, what each client would get."""
    from fedcli.core.partition import from_flag
    from fedcli.data import datasets
    from fedcli.data.dataset import merge_splits
    from fedcli.data.imports import import_if_path

    if partition is None:
        flags = given_flags(ctx, lambda option: option.name in ("num_clients", "partition_seed", "out"))
        if flags:
            raise UserError(f"{flags[0]} is for a partition (got none); add --partition, or leave it out.")
    loaded_name = import_if_path(name)
    dataset = datasets.load(loaded_name)
    chosen = from_flag(partition) if partition else None
    rows = {
        "images": f"{len(dataset.y_train):,} to train, {len(dataset.y_test):,} to test",
        "shape": " x ".join(map(str, dataset.x_train.shape[1:])),
        "classes": f"{dataset.num_classes}: {', '.join(dataset.class_names)}",
        "domains": ", ".join(dataset.domain_names),
        "writers": "" if dataset.writer_train is None else f"{len(dataset.writer_train.unique()):,} to train",
        "fingerprint": dataset.fingerprint,
        "made from": datasets.describe(loaded_name)["note"],
    }
    print_table(("Data set", dataset.name), [(title, text) for title, text in rows.items() if text])
    if chosen is None:
        return
    if chosen.is_listed:
        dataset = merge_splits(dataset)  # its lists count the test images too
    parts = chosen.divide(dataset, num_clients, partition_seed)
    _print_partition(dataset, chosen.flag, partition_seed, parts)
    refuse_file_of_a_run(out or Path())
    _write_chart(dataset, chosen.flag, partition_seed, parts, out or Path(f"{dataset.name}-partition.png"))


def _print_partition(dataset: "Dataset", flag: str, seed: int, parts: "Parts") -> None:
    """Print what each client gets, and which images and classes nobody does."""
    from fedcli.core.partition import count_classes, count_unused, fingerprint, lost_classes

    counts = count_classes(parts, dataset.y_train, dataset.num_classes)
    shown = range(dataset.num_classes if dataset.num_classes <= 10 else 0)  # more columns fit no terminal
    typer.echo()
    say(f"partition {flag}, seed {seed}, fingerprint {fingerprint(parts)}")
    rows = [(client, client_counts.sum(), *client_counts[shown]) for client, client_counts in enumerate(counts)]
    print_table(("Client", "Images", *map(str, shown)), rows)
    num_images = len(dataset.y_train)
    unused = count_unused(parts, num_images)
    if unused:
        typer.echo(f"unused: {unused:,} of {num_images:,} images, which no client holds")
    lost_names = [dataset.class_names[label] for label in lost_classes(parts, dataset.y_train)]
    if lost_names:
        say(f"classes that no client has: {', '.join(lost_names)}")


def _write_chart(dataset: "Dataset", flag: str, seed: int, parts: "Parts", file: Path) -> None:
    """Write the chart of a partition, and print the names of its files."""
    from fedcli.core.partition import count_classes
    from fedcli.figures.partitions import partition_chart  # here, since it imports Matplotlib
    from fedcli.figures.saving import write_figure
    from fedcli.results.words import describe_data

    counts = count_classes(parts, dataset.y_train, dataset.num_classes)
    title = describe_data(dataset.name, flag, f"seed {seed}")
    written = write_figure(file, partition_chart, counts, dataset.class_names, title)
    say(f"chart: {' and '.join(map(str, written.files))}")
