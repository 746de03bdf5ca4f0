"""The commands about methods and data sets, `list`, `show`, `new` and `data ...`, and what help tells of methods.

Importing the papers imports PyTorch, which takes seconds. What help, `list`, `show` and completion tell of them is
therefore kept in papers/index.json, which `make index` writes.
"""

import ast
import json
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, fields, make_dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

import typer

from fedcli import papers, registry  # type: ignore[attr-defined]  # `papers` as in `fedcli.registry`
from fedcli.cli.common import HelpfulGroup, argument, console, optional, print_table, say
from fedcli.declarations import SELECTIONS, Method, Post, Protocol, flag_of, help_text, option, paper_of
from fedcli.errors import UserError, unknown
from fedcli.runs.lock import refuse_file_of_a_run
from fedcli.userfiles import is_from_file

PAPERS = Path(*papers.__path__)
INDEX = PAPERS / "index.json"
TEMPLATE = Path(__file__).parent / "my_method.txt"  # what `new` writes; the README shows it
KINDS = {kind.__name__: kind for kind in (bool, int, float, str)}  # of options
EVALUATIONS = {
    "server": "on the official test images",
    "clients": "on each client's own test part",
    "domains": "on each domain's test images",
}


@cache
def index() -> dict[str, Any]:
    """Read papers/index.json: methods and steps as `summary` makes them, protocols, tables and networks, by name."""
    stored = json.loads(INDEX.read_text(encoding="utf-8"))
    for entries in (stored["method"], stored["post"]):
        for name, entry in entries.items():
            options = []
            for option_name, traits in entry["config"].items():
                kind = KINDS[traits.pop("type")]
                options.append((option_name, kind, option(**traits)))
            entry["config"] = make_dataclass("Config", options, init=False, repr=False, eq=False)
            entries[name] = SimpleNamespace(**entry)
    return stored


def make_index() -> dict[str, Any]:
    """Make the index from what is registered."""
    from fedcli.core.backbones import BACKBONES

    def entry(declared: Method | Post) -> dict[str, Any]:
        options = {}
        for field in fields(declared.config):
            (kind, *_) = get_args(field.type) or (field.type,)  # without what may stand behind it, None
            plain = option(field.default, "").metadata
            changed = {trait: value for trait, value in field.metadata.items() if value != plain[trait]}
            options[field.name] = {"type": kind.__name__, "default": field.default, **changed}
        return {**vars(summary(declared)), "config": options}

    return {
        "method": {name: entry(method) for name, method in registry.methods().items()},
        "post": {name: entry(step) for name, step in registry.posts().items()},
        "protocol": {name: protocol_rows(protocol) for name, protocol in registry.protocols().items()},
        "table": {name: table.title for name, table in registry.tables().items()},
        "backbone": list(BACKBONES),
    }


def summary(declared: Method | Post) -> SimpleNamespace:
    """Tell of a method, or of a step after the last round.

    Returns:
        Its `name`, `title`, `file` (relative to the papers), `config` and whether it is `personal`; `defaults`, the
        values of a run with no option given that differ from their fields' (none for a method that needs an option);
        `protocols`, names and summaries of those in its file, or else of the paper of its default protocol.
    """
    from fedcli.runs.options import recorded_fields
    from fedcli.runs.resolve import resolve

    defaults = {}
    if isinstance(declared, Method):
        options = recorded_fields(declared)
        with suppress(UserError):
            values = resolve(declared, {}, need_data=False).values()
            defaults = {name: value for name, value in values.items() if value != options[name].default}
    protocols = getattr(declared.module, "PROTOCOLS", ())
    if not protocols:
        paper = paper_of(getattr(declared, "default_protocol", ""))
        protocols = [protocol for protocol in registry.protocols().values() if protocol.paper == paper]
    return SimpleNamespace(
        name=declared.name,
        title=declared.title,
        file=os.path.relpath(declared.file, PAPERS),
        config=declared.config,
        personal=bool(getattr(declared, "personal", None)),
        defaults=defaults,
        protocols=[(protocol.name, protocol.summary) for protocol in protocols],
    )


def find_summary(name: str) -> Any:
    """Find what is told of a method, by its attributes; a registered one is not imported, nor PyTorch with it."""
    if is_from_file(name):
        return summary(registry.find_method(name))
    return registry.pick("method", name, index()["method"])


def protocol_rows(protocol: Protocol) -> list[tuple[str, str]]:
    """Tell what a protocol fixes, as pairs of title and text."""
    rows = [
        ("set-up", protocol.summary),
        ("source", protocol.source),
        ("values", _settings(protocol.settings)),
    ]
    rows += [(f"for {method}", _settings(options)) for method, options in protocol.method_options.items()]
    for name, setting in protocol.datasets.items():
        networks = setting.backbone.replace(",", ", ")
        text = f"{networks}, augmentation {setting.augmentation}"
        if setting.settings:
            text += f"; {_settings(setting.settings)}"
        rows.append((name, f"{text} ({setting.source})"))
        rows += [(f"for {method} on {name}", _settings(options)) for method, options in setting.method_options.items()]
    rows.append(("headline", f"the {SELECTIONS[protocol.selection]}"))
    rows.append(("evaluation", EVALUATIONS[protocol.evaluation]))
    rows += [("note", note) for note in protocol.notes]
    return rows


def option_help(field: Field, defaults: Mapping[str, Any]) -> str:
    """Write the help of an option; its default is that of a run with no option given, or else of its field."""
    text = help_text(field.metadata)
    value = defaults.get(field.name, field.default)
    return text if value is None else f"{text} [default: {_option_word(value)}]"


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_option_word(value)}" for name, value in settings.items())


def _option_word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def completion(*kinds: str, choices: Sequence[str] = ()) -> Callable[[str], list[str]]:
    """Make what tells a shell the choices that a text begins, and the names of some kinds: "method", "dataset", ..."""

    def complete(incomplete: str) -> list[str]:
        names = list(choices)
        for kind in kinds:
            names += index().get(kind, ())
        if kinds[0].endswith("dataset"):
            from fedcli.data import datasets

            names += datasets.names()
        return [name for name in names if name.startswith(incomplete.lower())]

    return complete


def list_(all_: optional(bool, "Also list steps, protocols and the papers' tables.", "--all") = False) -> None:
    """List the methods and the networks."""
    tables = {"Method": [(name, method.title) for name, method in index()["method"].items()]}
    if all_:
        tables["Step after the last round, --post"] = [(name, step.title) for name, step in index()["post"].items()]
        tables["Protocol, --protocol"] = [(name, dict(rows)["set-up"]) for name, rows in index()["protocol"].items()]
        tables["Table, 'fedcli table NAME'"] = list(index()["table"].items())
    for kind, rows in tables.items():
        print_table((kind, "Title"), rows)
        typer.echo()
    console().print(f"Networks, --backbone\n{', '.join(index()['backbone'])}\n")
    typer.echo("'fedcli run METHOD' runs a method, 'fedcli show METHOD' shows its options and its card.")
    typer.echo("'fedcli list --all' also lists protocols and tables, 'fedcli data list' the data sets.")


def show(
    name: argument(
        str,
        "METHOD|PROTOCOL",
        "A method, a step for --post or a protocol; or ./file.py:NAME.",
        autocompletion=completion("method", "protocol", "post"),
    ),
) -> None:
    """Show a method's options, its card and the names of its protocols, or all that a protocol fixes."""
    posts = index()["post"]
    protocols = index()["protocol"]
    names = [*index()["method"], *posts, *protocols]
    name = registry.spelt(name, names)
    rows = protocols.get(name)
    if is_from_file(name) and ":" in name:
        with suppress(UserError):  # of a method
            rows = protocol_rows(registry.find_protocol(name))
    elif ":" in name and name not in names:
        registry.pick("protocol", name, protocols)  # refuses it, with the protocols of its paper
    elif not is_from_file(name) and name not in names:
        raise unknown("method, step or protocol", name, names, "'fedcli list --all' shows all.")
    if rows is not None:
        print_table((f"Protocol {name}", ""), rows)
    elif name in posts:
        _show_declared(posts[name], f"with --post {name}")
    else:
        _show_declared(find_summary(name), f"'fedcli run {name} --help' shows all options")


def _show_declared(declared: Any, hint: str) -> None:
    """Show the options, the card and the protocols of a method or a step, by its summary."""
    values = f", with the values of protocol {declared.defaults['protocol']}" if declared.defaults else ""
    typer.echo(f"{declared.title}\n\nOptions of its own{values} ({hint})")
    options = [(flag_of(field.name), option_help(field, declared.defaults)) for field in fields(declared.config)]
    print_table(("", ""), options or [("none", "")])
    code = (PAPERS / declared.file).read_text(encoding="utf-8")
    card = ast.get_docstring(ast.parse(code), clean=False) or ""
    if console().is_terminal:
        card = fit(card, console().width)
    typer.echo(f"\n{card}".rstrip())
    if declared.protocols:
        typer.echo("\nProtocols ('fedcli show PROTOCOL' shows all that one fixes)")
        print_table(("", ""), declared.protocols)


ITEM = re.compile(r"\s*(\d+\.|[-*]) ")  # begins an item of a list


def fit(card: str, width: int) -> str:
    """Break the lines of a card that are wider than a terminal: texts between words, formulas and tables at gaps."""
    if max(map(len, card.splitlines()), default=0) <= width:
        return card
    lines: list[str] = []
    paragraph: list[str] = []  # the lines of a paragraph or an item
    for line in card.splitlines():
        pieces = re.split(r"(?<!\d\.) {2,}", line.strip())
        is_text = line.strip() and len(pieces) == 1
        if is_text and _goes_on(paragraph, line):
            paragraph.append(line)
            continue
        lines += _wrap(paragraph, width)
        paragraph = []
        if is_text:
            paragraph.append(line)
        elif len(line) <= width:
            lines.append(line)
        else:
            lines += [indent_of(line) + piece for piece in pieces]
    lines += _wrap(paragraph, width)
    return "\n".join(lines)


def _goes_on(paragraph: list[str], line: str) -> bool:
    """Whether a line goes on with the paragraph or the item before it."""
    if not paragraph or ITEM.match(line):
        return False
    indent = indent_of(paragraph[-1])
    hangs = len(paragraph) == 1 and ITEM.match(paragraph[0]) and indent_of(line) > indent
    return indent_of(line) == indent or bool(hangs)


def _wrap(paragraph: list[str], width: int) -> list[str]:
    """The lines of a paragraph or an item, broken between words; none of none."""
    if not paragraph:
        return []
    wrapper = textwrap.TextWrapper(
        width,
        initial_indent=indent_of(paragraph[0]),
        subsequent_indent=indent_of(paragraph[-1]),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapper.wrap(" ".join(line.strip() for line in paragraph))


def indent_of(line: str) -> str:
    """The spaces before a line."""
    return line[: len(line) - len(line.lstrip())]


def new(
    kind: argument(Literal["method"], "method", "What to write."),
    name: argument(str, "NAME", "Its name, of a-z, 0-9, - and _."),
) -> None:
    """Write NAME.py, a method to start from: FedAvg with a term of its own, which keeps all laws."""
    file = Path(f"{name}.py")
    is_taken = name in index()["method"] or file.exists()
    if is_taken or not re.fullmatch("[a-z][a-z0-9_-]*", name):
        rule = "begin with a letter, use only a-z, 0-9, - and _, and no name of a method or a file here"
        raise UserError(f"'{name}' cannot be the name of a new method; {rule}.")
    code = TEMPLATE.read_text(encoding="utf-8").replace('"my_method"', f'"{name}"')
    file.write_text(code, encoding="utf-8")
    say(f"{file}: 'fedcli run ./{file}' runs it, 'fedcli check ./{file}' checks it.")


data = typer.Typer(cls=HelpfulGroup, help="List, download, import and show data sets.")


@data.command("list")
def data_list() -> None:
    """List the data sets: built in, to be downloaded or imported, made from others, and your own."""
    from fedcli.data import datasets

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
    say(f"Downloads and imports are in {datasets.cache_folder()} (set FEDCLI_DATA to change it).")


@data.command()
def download(name: argument(str, "NAME", "A download of 'fedcli data list'.")) -> None:
    """Download a data set into the cache."""
    from fedcli.data import datasets

    say(f"{name}: {datasets.download(datasets.find_name(name))}")


@data.command("import")
def import_(
    name: argument(str, "NAME", "A name of 'fedcli data list', or a new one of a-z, 0-9 and -."),
    path: argument(Path, "PATH", "An .npz file, a folder of images, official files, or hf:FOLDER of Hugging Face."),
    size: optional(int, "Resize images to SIZE x SIZE pixels.", min=1) = None,
) -> None:
    """Import a data set from an archive or a folder into the cache.

    Its form is detected, and converted with a note. PFLlib sets include their clients.
    """
    from fedcli.data import datasets

    file, notes = datasets.import_path(name, path, size)
    traits = datasets.describe(name)
    numbers = f"{traits['train']} training and {traits['test']} test images, {traits['classes']} classes"
    say(f"{name}: {numbers}: {file}")
    for note in notes:
        say(note)


@data.command("show")
def data_show(
    name: argument(str, "NAME", "A data set.", autocompletion=completion("dataset")),
    partition: optional(str, "Partition to draw, e.g. dirichlet:0.5.") = None,
    num_clients: optional(int, "Clients of the partition.", min=1) = 10,
    partition_seed: optional(int, "Seed of the partition.", min=0, max=2**32 - 1) = 0,
    out: optional(Path, "Chart of it; NAME-partition.png by default.") = None,
) -> None:
    """Show what a data set holds and, with --partition, what each client would get."""
    from fedcli.core.partition import count_classes, count_unused, fingerprint, from_flag, lost_classes
    from fedcli.data import datasets  # which enters the partition `file`

    dataset = datasets.load(datasets.find_name(name))
    chosen = from_flag(partition) if partition else None
    rows = {
        "images": f"{len(dataset.y_train):,} to train, {len(dataset.y_test):,} to test",
        "shape": " x ".join(map(str, dataset.x_train.shape[1:])),
        "classes": f"{dataset.num_classes}: {', '.join(dataset.class_names)}",
        "domains": ", ".join(dataset.domain_names),
        "writers": "" if dataset.writer_train is None else f"{len(dataset.writer_train.unique()):,} to train",
        "fingerprint": dataset.fingerprint,
        "made from": datasets.describe(dataset.name)["note"],
    }
    print_table(("Data set", dataset.name), [(title, text) for title, text in rows.items() if text])
    if chosen is None:
        return
    if partition.startswith("file:"):
        dataset = datasets.merge(dataset)  # its lists count the test images too
    parts = chosen(
        dataset.y_train, num_clients, partition_seed, dataset.domain_train, dataset.writer_train, dataset.place_train
    )
    counts = count_classes(parts, dataset.y_train, dataset.num_classes)
    classes = range(dataset.num_classes if dataset.num_classes <= 10 else 0)  # more columns fit no terminal
    typer.echo(f"\npartition {chosen.flag}, seed {partition_seed}, fingerprint {fingerprint(parts)}")
    of_clients = [(client, of_client.sum(), *of_client[classes]) for client, of_client in enumerate(counts)]
    print_table(("Client", "Images", *map(str, classes)), of_clients)
    num_images = len(dataset.y_train)
    unused = count_unused(parts, num_images)
    if unused:
        typer.echo(f"unused: {unused:,} of {num_images:,} images, which no client holds")
    lost_names = [dataset.class_names[label] for label in lost_classes(parts, dataset.y_train)]
    if lost_names:
        typer.echo(f"classes that no client has: {', '.join(lost_names)}")
    from fedcli.figures.partitions import partition_chart  # here, since it imports Matplotlib
    from fedcli.figures.saving import write_figure
    from fedcli.results.words import data_words

    refuse_file_of_a_run(out or Path())
    title = data_words(dataset.name, chosen.flag, f"seed {partition_seed}")
    chart = out or Path(f"{dataset.name}-partition.png")
    files = write_figure(chart, partition_chart, counts, dataset.class_names, title)
    say(f"chart: {' and '.join(map(str, files))}")


if __name__ == "__main__":
    INDEX.write_text(json.dumps(make_index(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
