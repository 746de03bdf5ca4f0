"""The commands for data sets: `data list | download | import | show`."""

from pathlib import Path

import typer

from fedcli.cli.common import argument, optional, print_table
from fedcli.cli.describe import completion
from fedcli.errors import UserError

app = typer.Typer(no_args_is_help=True, help="List, download, import and show data sets.")


@app.command("list")
def data_list() -> None:
    """List the data sets: built in, to be downloaded or imported, made from others, and your own."""
    from fedcli.data import datasets

    rows = []
    for name in datasets.names():
        try:
            traits = datasets.describe(name)
        except UserError:
            rows.append((name, "damaged: import or download it again", *[""] * 5))
            continue
        numbers = ("" if traits[key] is None else traits[key] for key in ("train", "test", "classes"))
        shape = " x ".join(map(str, traits["shape"]))
        rows.append((name, traits["kind"], "yes" if traits["present"] else "no", *numbers, shape))
    print_table(("Data set", "Kind", "Present", "Train", "Test", "Classes", "Shape"), rows)
    typer.echo("\n'fedcli data show NAME' says what a made set is made from.")
    typer.echo(f"Downloaded and imported sets are kept in {datasets.cache_folder()} (set FEDCLI_DATA to change it).")


@app.command()
def download(name: argument(str, "NAME", "A data set that 'fedcli data list' shows as a download.")) -> None:
    """Download a data set into the cache."""
    from fedcli.data import datasets

    typer.echo(f"{name}: {datasets.download(datasets.find_name(name))}")


@app.command("import")
def import_(
    name: argument(str, "NAME", "A name of 'fedcli data list', or a new one of a-z, 0-9 and -."),
    path: argument(Path, "PATH", "An .npz file, a folder of images, or official files."),
    size: optional(int, "Resize images to SIZE x SIZE pixels.", min=1) = None,
) -> None:
    """Import a data set from an archive or a folder into the cache; its format is detected.

    Pixels, channels, sizes and labels in another form are converted, with a note. PFLlib sets include their clients.
    """
    from fedcli.data import datasets

    file, notes = datasets.import_path(name, path, size)
    traits = datasets.describe(name)
    numbers = f"{traits['train']} training and {traits['test']} test images, {traits['classes']} classes"
    typer.echo("\n".join([f"{name}: {numbers}: {file}", *notes]))


@app.command("show")
def data_show(
    name: argument(str, "NAME", "A data set.", autocompletion=completion("dataset")),
    partition: optional(str, "Partition to draw, e.g. dirichlet:0.5.") = None,
    num_clients: optional(int, "Clients of the partition.", min=1) = 10,
    partition_seed: optional(int, "Seed of the partition.", min=0, max=2**32 - 1) = 0,
    out: optional(Path, "Chart of the partition; <name>-partition.png if not given.") = None,
) -> None:
    """Show what a data set holds and, with --partition, what each client would get."""
    from fedcli.core import partition as partitions
    from fedcli.data import datasets

    chosen = partitions.from_flag(partition) if partition is not None else None
    dataset = datasets.load(datasets.find_name(name))
    if (partition or "").startswith("file:"):
        dataset = datasets.merge(dataset)  # its lists count the test images too
    domains = []
    for number, text in enumerate(dataset.domain_names):
        train, test = ((part == number).sum() for part in (dataset.domain_train, dataset.domain_test))
        domains.append(f"{text} {train:,} + {test:,}")
    writers = dataset.writer_train
    rows = [
        ("images", f"{len(dataset.y_train):,} to train, {len(dataset.y_test):,} to test"),
        ("shape", " x ".join(map(str, dataset.x_train.shape[1:]))),
        ("classes", f"{dataset.num_classes}: {', '.join(dataset.class_names)}"),
        ("domains", ", ".join(domains)),
        ("writers", "" if writers is None else f"{len(writers.unique()):,} to train"),
        ("fingerprint", dataset.fingerprint),
        ("made from", datasets.describe(dataset.name)["note"]),
    ]
    print_table(("Data set", dataset.name), [row for row in rows if row[1]])
    if chosen is None:
        return
    from fedcli.figures import plots  # late: Matplotlib takes half a second

    parts = chosen(dataset.y_train, num_clients, partition_seed, dataset.domain_train, writers, dataset.place_train)
    counts = partitions.count_classes(parts, dataset.y_train, dataset.num_classes)
    classes = range(dataset.num_classes if dataset.num_classes <= 10 else 0)  # more columns fit no terminal
    rows = [(client, row.sum(), *row[classes]) for client, row in enumerate(counts)]
    typer.echo(f"\npartition {chosen.flag}, seed {partition_seed}, fingerprint {partitions.fingerprint(parts)}")
    print_table(("Client", "Images", *map(str, classes)), rows)
    title = plots.data_words(dataset.name, chosen.flag, f"seed {partition_seed}")
    out = out or Path(f"{dataset.name}-partition.png")
    files = plots.write(out, plots.partition_figure, counts, dataset.class_names, title)
    typer.echo(f"chart: {' and '.join(map(str, files))}")
