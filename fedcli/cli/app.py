"""The command line; nothing else prints.

`fedcli list | show | run | resume | data | quality | plot | table | pages | smoke | bench`. PyTorch and
the papers are imported inside the commands, so that help comes at once.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from enum import StrEnum
from itertools import pairwise
from json import dumps
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_type_hints

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from fedcli import registry
from fedcli.errors import UserError

Result = TypeVar("Result")
SETTINGS = {"add_completion": False, "rich_markup_mode": "rich", "pretty_exceptions_enable": False}


def _stop(message: str, code: int) -> NoReturn:
    """Ends the program with one line on stderr."""
    typer.echo(message, err=True)
    raise typer.Exit(code)


class _Root(TyperGroup):
    """The group of all commands, where every mistake of the user's ends."""

    def list_commands(self, ctx: typer.Context) -> list[str]:
        return ["list", "show", "run", "resume", "data", "quality", "plot", "table", "pages", "smoke", "bench"]

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            _stop(f"error: {error}", 2)
        except KeyboardInterrupt:
            _stop("interrupted.", 130)


class _Methods(TyperGroup):
    """The group whose commands are the registered methods, and any path of a method file."""

    def list_commands(self, ctx: typer.Context) -> list[str]:
        return list(registry.methods())

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:
        ctx.meta["post"] = dict(pairwise(args)).get("--post")  # a user's own step has options too
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:
        return _method_command(registry.find_method(cmd_name), cmd_name, ctx.meta.get("post"))


class _HelpLast(TyperCommand):
    """A command whose `--help` stands in the last panel, so that the method's own panel is the first."""

    def get_help_option(self, ctx: typer.Context) -> Any:
        option = super().get_help_option(ctx)
        option.rich_help_panel = "Output"
        return option


app = typer.Typer(
    cls=_Root,
    no_args_is_help=True,
    help="Federated-learning papers, reproduced. Start with 'fedcli list' and 'fedcli run METHOD'.",
    **SETTINGS,
)
run_app = typer.Typer(
    cls=_Methods,
    no_args_is_help=True,
    subcommand_metavar="METHOD [OPTIONS]",
    help="Run a method, by its name or by the path of a method file.\n\n"
    "'fedcli run METHOD --help' shows a method's options, 'fedcli show METHOD' its card and its protocols.",
    **SETTINGS,
)
data_app = typer.Typer(no_args_is_help=True, help="List, download, import and show data sets.", **SETTINGS)
app.add_typer(run_app, name="run")
app.add_typer(data_app, name="data")


def main() -> None:
    """The program `fedcli`."""
    app()


def _console() -> Console:
    return Console(highlight=False)


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a table whose cells are taken as they are; the first column is never broken, numbers stand to the right.

    Args:
        columns: Titles; all empty for a table without a line of titles.
        rows: Cells, which are printed as `str` gives them.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(columns))
    for number, column in enumerate(columns):
        numbers = all(str(row[number]).isdigit() or row[number] == "" for row in rows)
        table.add_column(column, no_wrap=number == 0, justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    _console().print(table)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


# Methods and their options


@app.command("list")
def list_() -> None:
    """List the methods, the protocols and the papers' tables."""
    from fedcli.cli.describe import protocol_names

    methods = registry.methods().values()
    rows = [(method.name, method.title, protocol_names(method)) for method in methods]
    _print_table(("Method", "Title", "Default protocol"), rows)
    typer.echo()
    steps = registry.posts().values()
    _print_table(("Step after the last round, --post", "Title"), [(step.name, step.title) for step in steps])
    typer.echo()
    protocols = registry.protocols().values()
    _print_table(("Protocol", "Set-up"), [(protocol.name, protocol.summary) for protocol in protocols])
    if tables := registry.tables().values():
        typer.echo()
        _print_table(("Table", "What it shows"), [(table.name, table.title) for table in tables])
    typer.echo("\n'fedcli show METHOD' tells more of a method, 'fedcli data list' shows the data sets.")


@app.command()
def show(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="Name of a method, or path of a method file.")],
) -> None:
    """Show a method's card, its options and its protocols; or those of a step after the last round (--post)."""
    from fedcli.cli import describe

    chosen = registry.posts().get(method) or registry.find_method(method)
    typer.echo("\n".join(describe.reflow(chosen.card, _console().width)))
    more = f"'fedcli run {method} --help' shows those of every method too"
    typer.echo(f"\nOptions of its own ({f'with --post {method}' if method in registry.posts() else more})")
    rows = [(f"    {_flag(field.name)}", describe.option_help(chosen, field)) for field in fields(chosen.config)]
    _print_table(("", ""), rows or [("    none", "")])
    for protocol in describe.protocols_of(chosen):
        typer.echo(f"\nProtocol {protocol.name}")
        _print_table(("", ""), [(f"    {title}", text) for title, text in describe.protocol_rows(protocol)])


# Running


def _method_command(method: registry.Method, given_name: str, post: str | None) -> Any:
    """The command `run METHOD --post POST`, made from the fields of `RunConfig` and of the `Config` of both."""
    from fedcli.cli.describe import option_help
    from fedcli.runs.config import RunConfig, option_panels

    kinds = (RunConfig, method.config, *(step.config for step in registry.posts(method, post).values()))
    types = {name: kind for config in kinds for name, kind in get_type_hints(config).items()}
    parameters = []
    for title, panel in option_panels(method, post).items():
        for name, field in panel.items():
            parameters.append(_parameter(name, types[name], escape(option_help(method, field)), title))
            if name == "seed":
                several = "Several runs, one after the other, with these seeds, e.g. 0,1,2; each in OUT/seed-<seed>."
                parameters.append(_parameter("seeds", str, several, title))
    folder = "Folder of the run, which must not exist. \\[default: runs/<time>-<method>-<data set>]"
    parameters.append(_parameter("out", str, folder, "Output"))

    def command(**given: Any) -> None:
        _run(given_name, given)

    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    about = f"{escape(method.title)}.\n\n'fedcli show {escape(given_name)}' prints its card and its protocols."
    single = typer.Typer(**SETTINGS)
    register = single.command(
        given_name, cls=_HelpLast, help=about, short_help=escape(method.title), rich_help_panel="Methods"
    )
    register(command)
    return typer.main.get_command(single)


def _parameter(name: str, kind: Any, help_: str, panel: str) -> inspect.Parameter:
    """A parameter of a command that is None unless its flag is given."""
    flag = f"{_flag(name)}/--no-{_flag(name)[2:]}" if kind is bool else _flag(name)
    option = typer.Option(flag, help=help_, rich_help_panel=escape(panel), show_default=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _run(method: str, given: dict[str, Any]) -> None:
    """Runs a method with what was given; draws one curve over the seeds where there are several."""
    from fedcli.figures import plots
    from fedcli.results import tables
    from fedcli.runs import run as runs

    seeds = None if given["seeds"] is None else _parse_seeds(given["seeds"])
    done = _watch(lambda display: runs.run(method, **{**given, "seeds": seeds, "progress": display}))
    if seeds is not None:
        parent = done[0].path.parent
        files = plots.learning_curves(tables.find_records([parent]), parent / "curve")
        typer.echo(f"curve over the seeds: {' and '.join(map(str, files))}")


def _parse_seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--seeds must be distinct whole numbers from 0 (got '{text}'); write --seeds 0,1,2.") from None


def _watch(start: Callable[[Any], Result]) -> Result:
    """Starts a run with a display; when it fails or is interrupted, says where it stands."""
    from fedcli.cli.display import Display
    from fedcli.core.federation import NonFiniteLoss
    from fedcli.runs.records import RECORD

    display = Display(_console())
    try:
        return start(display)
    except NonFiniteLoss as error:
        _stop(f"error: {error} The record is {display.folder / RECORD}.", 1)
    except KeyboardInterrupt:
        if display.folder is None:
            _stop("interrupted before the first round.", 130)
        place = f"{len(display.record['rounds'])}/{display.record['config']['rounds']} rounds"
        _stop(f"interrupted after {place}; 'fedcli resume {display.folder}' goes on.", 130)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    changed_method: Annotated[
        bool, typer.Option("--changed-method", help="Go on although the method's file has changed since.")
    ] = False,
) -> None:
    """Take up a run that was killed or interrupted, from its last checkpoint."""
    from fedcli.runs import run as runs

    _watch(lambda display: runs.resume(run, changed_method=changed_method, progress=display))


# Data sets


@data_app.command("list")
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
    _print_table(("Data set", "Kind", "Present", "Train", "Test", "Classes", "Shape"), rows)
    typer.echo()
    _print_table(("Made", "From"), notes)
    typer.echo(f"\nDownloaded and imported sets are kept in {datasets.cache_folder()} (set FEDCLI_DATA to change it).")


@data_app.command()
def download(name: Annotated[str, typer.Argument(metavar="NAME", help="A data set of kind 'download'.")]) -> None:
    """Download a data set into the cache."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from fedcli.data import datasets

    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=_console()) as bar:
        tasks: dict[str, Any] = {}

        def moved(file: str, so_far: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bar.add_task(file)
            bar.update(tasks[file], completed=so_far, total=total)

        kept = datasets.download(name, moved)
    typer.echo(f"{name}: {kept}")


@data_app.command("import")
def import_(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A known name, or a new one of a-z, 0-9 and -.")],
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="An .npz file, an image folder, or the official archive.")
    ],
) -> None:
    """Take a data set from files into the cache."""
    from fedcli.data import datasets

    kept = datasets.import_path(name, path)
    about = datasets.describe(name)
    typer.echo(f"{name}: {about['train']} training and {about['test']} test images, {about['classes']} classes: {kept}")


@data_app.command("show")
def data_show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data set that is present.")],
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
        registry.check_value(RunConfig.__dataclass_fields__[option], value)
    if out is not None and partition is None:
        raise UserError(f"--out {out} is for the chart of a partition (got no --partition); give both or neither.")
    chosen = from_flag(partition) if partition is not None else None
    dataset = datasets.load(name)
    if train_examples is not None:
        dataset = datasets.take(dataset, train_examples, partition_seed)
    train, test, writers = len(dataset.y_train), len(dataset.y_test), dataset.writer_train
    rows = [
        ("images", f"{train:,} to train{' (reduced)' if dataset.reduced else ''}, {test:,} to test"),
        ("shape", " x ".join(map(str, dataset.x_train.shape[1:]))),
        ("classes", f"{dataset.num_classes}: {', '.join(dataset.class_names)}"),
        *([("domains", _domains(dataset))] if dataset.domain_names else []),
        *([("writers", f"{len(writers.unique()):,} to train")] if writers is not None else []),
        ("fingerprint", dataset.fingerprint),
        *([("made from", note)] if (note := datasets.describe(name)["note"]) else []),
    ]
    _print_table(("Data set", name), rows)
    if chosen is not None:
        chart = out or Path(f"{name}-partition.png")
        _show_partition(dataset, chosen.scaled(dataset.share), num_clients, partition_seed, chart)


def _domains(dataset: Any) -> str:
    """The domains with their numbers of training and test images."""
    names = dataset.domain_names
    train, test = (part.bincount(minlength=len(names)) for part in (dataset.domain_train, dataset.domain_test))
    return ", ".join(f"{name} {train[place]:,} + {test[place]:,}" for place, name in enumerate(names))


def _show_partition(dataset: Any, chosen: Any, num_clients: int, seed: int, out: Path) -> None:
    """Prints how many examples of each class each client would get, and draws the chart."""
    from fedcli.core import partition
    from fedcli.figures import plots

    parts = chosen(dataset.y_train, num_clients, seed, dataset.domain_train, dataset.writer_train)
    counts = partition.describe(parts, dataset.y_train, dataset.num_classes)
    few = dataset.num_classes <= 10  # more columns than that fit no terminal
    names = dataset.class_names if few else ()
    rows = [(client, row.sum(), (row > 0).sum(), *(row if few else ())) for client, row in enumerate(counts)]
    typer.echo(f"\npartition {chosen}, seed {seed}, fingerprint {partition.fingerprint(parts)}")
    _print_table(("Client", "Images", "Classes", *names), rows)
    title = f"{dataset.name}, {chosen}, seed {seed}"
    files = _written(out, lambda: plots.partition_chart(counts, dataset.class_names, out, title))
    typer.echo(f"chart: {' and '.join(map(str, files))}")


# Tables and figures


class Format(StrEnum):
    """Forms of a table."""

    markdown = "markdown"
    csv = "csv"
    latex = "latex"


RUNS = typer.Argument(metavar="RUN", help="Run folders, or folders that hold run folders.", show_default=False)


@app.command()
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
    _print_table(("NMI", "Silhouette", "Images", "Run"), rows)
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


@app.command()
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

        files = _written(out, lambda: embedding_chart(runs, out))
    elif kind is Kind.confusion:
        from fedcli.figures.matrices import confusion_chart

        files = _written(out, lambda: confusion_chart(runs, out))
    elif kind is Kind.clients:
        from fedcli.figures.client_features import clients_chart

        with Console(stderr=True).status("one more round of each run"):
            files = _written(out, lambda: clients_chart(runs, out))
    elif kind is Kind.correlation:
        from fedcli.figures.correlation import correlation_chart

        with Console(stderr=True).status("logits of the clients' models"):
            files = _written(out, lambda: correlation_chart(runs, out))
    else:
        draw = {
            Kind.curves: plots.learning_curves, Kind.drift: plots.drift_chart, Kind.domains: plots.domains_chart,
        }[kind]  # fmt: skip
        records = tables.find_records(runs)
        files = _written(out, lambda: draw(records, out))
    typer.echo(" and ".join(map(str, files)))


PAPERS = "A paper's table"


@app.command()
def table(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN|PAPER:ID",
            help="Run folders, or folders that hold run folders; or a paper's table, as 'fedcli list' names it.",
            show_default=False,
        ),
    ] = None,
    format: Annotated[Format, typer.Option(help="Form of the table.")] = Format.markdown,
    page: Annotated[Path | None, typer.Option(help="Folder of a study: its whole page instead, in Markdown.")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write. \\[default: the terminal]")] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Run nothing: the cost and the table as it stands.", rich_help_panel=PAPERS),
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Only rows and columns with this in their names; several name several rows or columns.",
            rich_help_panel=PAPERS,
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds, e.g. 0,1. \\[default: the table's]", rich_help_panel=PAPERS)
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Reduced version: at most so many rounds a run.", rich_help_panel=PAPERS)
    ] = None,
    local_epochs: Annotated[
        int | None, typer.Option(help="Reduced version: at most so many local epochs.", rich_help_panel=PAPERS)
    ] = None,
    train_examples: Annotated[
        int | None, typer.Option(help="Reduced version: at most so many training images.", rich_help_panel=PAPERS)
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Runs at once, each a process of its own.", rich_help_panel=PAPERS)
    ] = 1,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--runs",
            help="Where the runs are looked for and kept. \\[default: runs/tables/PAPER-ID]",
            rich_help_panel=PAPERS,
        ),
    ] = None,
) -> None:
    """Make a table of runs, or reproduce a paper's table.

    Of run folders: mean and standard deviation over seeds, from their records.

    PAPER:ID is a paper's table: what is missing of it is run, then ours stands beside the paper's.
    First it says what that costs: runs to do, hours (from runs timed here before), data sets.
    Runs whose data set is missing are left out. Ctrl-C interrupts; the same command goes on.
    """
    from fedcli.results import tables

    own = {"--dry-run": dry_run, "--only": only, "--seeds": seeds, "--rounds": rounds, "--local-epochs": local_epochs,
           "--train-examples": train_examples, "--jobs": jobs > 1, "--runs": folder}  # fmt: skip
    names = [run for run in runs or () if ":" in run and not Path(run).exists()]
    if names and (len(runs) > 1 or page is not None):
        raise UserError(f"one paper's table at a time (got {names[0]} with others); give it alone.")
    if names:
        limits = {"rounds": rounds, "local_epochs": local_epochs, "train_examples": train_examples}
        chosen = None if seeds is None else _parse_seeds(seeds)
        options = {"seeds": chosen, "only": only or (), "limits": limits}
        _paper_table(registry.find_table(names[0]), folder, options, jobs, dry_run, format, out)
        return
    if given := [flag for flag, value in own.items() if value]:
        raise UserError(f"{given[0]} is for a paper's table (got no PAPER:ID); 'fedcli list' shows the tables.")
    if bool(runs) == (page is not None):
        given = "both" if runs else "neither"
        raise UserError(f"a table is of runs or of a study's --page (got {given}); give run folders or --page STUDY.")
    if page is not None and format is not Format.markdown:
        raise UserError(f"--page is written in Markdown (got --format {format}); leave --format out.")
    forms = {Format.markdown: tables.markdown, Format.csv: tables.csv, Format.latex: tables.latex}
    text = tables.page(page) if page is not None else forms[format](tables.find_records(map(Path, runs)))
    if out is None and format is Format.markdown and _console().is_terminal:
        _console().print(Markdown(text))  # lines of a terminal's width; in a pipe the text itself
    else:
        _give(text, out)


def _paper_table(
    table: registry.Table,
    folder: Path | None,
    options: dict[str, Any],
    jobs: int,
    dry_run: bool,
    format: Format,
    out: Path | None,
) -> None:
    """Runs what a paper's table lacks and shows it; all but the table goes to stderr."""
    from fedcli.cli import display
    from fedcli.results import comparison, reproduce
    from fedcli.results.jobs import execute

    if out is not None:  # refused now rather than after hours
        _written(out, lambda: out.parent.mkdir(parents=True, exist_ok=True))
    errors: dict[Path, str] = {}
    plan = reproduce.plan(table, folder, **options)
    screen = Console(stderr=True, highlight=False)
    if any(run.to_do for run in plan.runs):
        display.say(screen, display.cost(plan))
        screen.print()
    if plan.to_run and not dry_run:
        with display.TableDisplay(screen, plan) as watch:
            try:
                errors = execute(plan, watch, jobs)
            except KeyboardInterrupt:
                place = f"{watch.ended} of {watch.total} runs"
                _stop(f"interrupted after {place}; the same command goes on.", 130)
        plan = reproduce.plan(table, folder, **options)
    compared = comparison.compare(plan, errors)
    if out is None and format is Format.markdown and _console().is_terminal:
        _console().print(display.drawn(compared, _console().width))
    else:
        forms = {Format.markdown: comparison.markdown, Format.csv: comparison.csv, Format.latex: comparison.latex}
        _give(forms[format](compared), out)
    if errors:
        raise typer.Exit(1)


@app.command()
def pages(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder with records/, one subfolder a study, and README.md.")
    ],
) -> None:
    """Write a page a paper into DIR/papers, and the table over all papers into DIR/README.md, from the records."""
    from fedcli.results.pages import pages as made

    for name, text in made(folder).items():
        _give(text, folder / name)


def _give(text: str, out: Path | None) -> None:
    """Prints a text, or writes it to a file and prints the file's name."""
    if out is None:
        typer.echo(text, nl=False)
        return
    _written(out, lambda: out.parent.mkdir(parents=True, exist_ok=True))
    _written(out, lambda: out.write_text(text, encoding="utf-8"))
    typer.echo(str(out))


# Speed


@app.command()
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
        _written(csv, lambda: bench.append_csv(csv, []), "--csv")
    if plot is not None:
        _written(plot, lambda: plot.parent.mkdir(parents=True, exist_ok=True), "--plot")
    results = []
    try:
        for case in cases:
            with Console(stderr=True).status(case.workload.name) as status:
                results.append(bench.measure(case, status.update))
            if json:
                typer.echo(dumps(results[-1]))
            if csv is not None:
                _written(csv, lambda: bench.append_csv(csv, results[-1:]), "--csv")
    finally:  # also what was measured before Ctrl-C
        if results and not json:
            for cells in bench.TABLES:
                _print_table(tuple(cells), [bench.table_row(result, cells) for result in results])
                typer.echo()
            typer.echo(bench.MACHINE.format(**results[0]))
    if plot is not None:
        files = _written(plot, lambda: plots.scaling_chart(results[len(chosen) :], plot), "--plot")
        typer.echo(f"figures: {' and '.join(map(str, files))}", err=json)


def _written(out: Path, write: Callable[[], Result], flag: str = "--out") -> Result:
    """What `write` returns; a file that cannot be written is the user's mistake."""
    try:
        return write()
    except OSError as error:
        raise UserError(f"'{out}' cannot be written ({error.strerror}); choose another file with {flag}.") from error


# Does everything run


@app.command()
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
    _print_table(("Method", "Protocol", "Data set", "Seconds", "Accuracy"), rows)
    failed = [one for one in outcomes if one.error]
    for one in failed:
        typer.echo(f"{one.method}: {one.error}", err=True)
    total = sum(one.seconds for one in outcomes)
    typer.echo(f"{len(outcomes) - len(failed)} of {len(outcomes)} methods ran, {total:.0f} seconds.")
    if failed:
        raise typer.Exit(1)
