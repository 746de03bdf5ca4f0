"""The commands about methods, `list`, `show` and `new`, and what help and completion tell of methods.

Importing the papers imports PyTorch, which takes seconds. What `list`, `show` and completion tell of them is therefore
kept in papers/index.json, which `make index` writes.
"""

import ast
import hashlib
import json
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

import typer

from fedcli import declarations, papers, registry
from fedcli.cli.common import argument, console, print_table
from fedcli.declarations import Method, Post, Protocol, flag_of
from fedcli.errors import UserError
from fedcli.userfiles import is_from_file

PAPERS = Path(*papers.__path__)
INDEX = PAPERS / "index.json"
TEMPLATE = Path(__file__).parent / "my_method.txt"  # what `new` writes; the README shows it
SELECTIONS = {
    "best-validation": "the round with the best validation accuracy",
    "best-test": "the round with the best test accuracy",
    "last": "the last round",
    "mean-last-3": "the mean of the last three rounds",
}
EVALUATIONS = {
    "server": "on the official test images",
    "clients": "on each client's own test part",
    "domains": "on each domain's test images",
}


@cache
def index() -> dict[str, Any]:
    """Methods, steps, protocols, tables and networks by name; made anew where a paper's file is not as it was."""
    stored = json.loads(INDEX.read_text(encoding="utf-8"))
    return stored if stored["sha256"] == _hash() else make_index()


def make_index() -> dict[str, Any]:
    """Make the index from what is registered."""
    from fedcli.core.backbones import BACKBONES

    return {
        "sha256": _hash(),
        "method": {name: summary(method) for name, method in registry.methods().items()},
        "post": {name: summary(step) for name, step in registry.posts().items()},
        "protocol": {name: protocol_rows(protocol) for name, protocol in registry.protocols().items()},
        "table": {name: table.title for name, table in registry.tables().items()},
        "backbone": list(BACKBONES),
    }


def _hash() -> str:
    """SHA-256 of the papers' files."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(PAPERS.rglob("*.py")))).hexdigest()


def summary(method: Method | Post) -> dict[str, Any]:
    """Tell of a method, or of a step after the last round: title, default protocol, file, options and protocols."""
    return {
        "title": method.title,
        "protocol": protocol_names(method),
        "file": os.path.relpath(method.file, PAPERS),
        "options": [(flag_of(field.name), option_help(method, field)) for field in fields(method.config)],
        "protocols": [protocol.name for protocol in protocols_of(method)],
    }


def protocols_of(method: Method | Post) -> list[Protocol]:
    """Find the protocols of the method's file; where it has none, those of the paper of its default protocol.

    A step after the last round has none.
    """
    paper = getattr(method, "default_protocol", "").split(":")[0]
    of_paper = [protocol for protocol in registry.protocols().values() if protocol.name.split(":")[0] == paper]
    return list(getattr(method.module, "PROTOCOLS", ()) or of_paper)


def protocol_names(method: Method | Post) -> str:
    """Name the method's default protocol, and in brackets the one for built-in data where it is another."""
    if not protocols_of(method):
        return ""
    from fedcli.runs.config import DEFAULT_DATASET

    first, built_in = (registry.default_protocol(method, dataset).name for dataset in (None, DEFAULT_DATASET))
    return first if first == built_in else f"{first} ({built_in} for built-in data)"


def protocol_rows(protocol: Protocol) -> list[tuple[str, str]]:
    """Tell what a protocol fixes, as pairs of title and text."""
    rows = [("set-up", protocol.summary), ("source", protocol.source), ("values", _settings(protocol.settings))]
    for name, setting in protocol.datasets.items():
        options = f"; {_settings(setting.settings)}" if setting.settings else ""
        networks = setting.backbone.replace(",", ", ")
        rows.append((name, f"{networks}, augmentation {setting.augmentation}{options} ({setting.source})"))
    rows += [(f"for {name}", _settings(options)) for name, options in protocol.method_options.items()]
    for dataset, setting in protocol.datasets.items():
        rows += [(f"for {name} on {dataset}", _settings(options)) for name, options in setting.method_options.items()]
    rows += [("headline", SELECTIONS[protocol.selection]), ("evaluation", EVALUATIONS[protocol.evaluation])]
    return rows + [("note", note) for note in protocol.notes]


def option_help(method: Method | Post, field: Field) -> str:
    """Write the help of an option of a method, or of a step after the last round, with its default.

    The default is told as far as it is known without a data set, and not where the help says it in words.
    """
    every = [*registry.protocols().values(), *protocols_of(method)]
    settings = [setting for protocol in every for setting in (protocol, *protocol.datasets.values())]
    default = "" if field.default is None else _word(field.default)
    if field.name == "protocol":
        default = protocol_names(method)
    elif field.name == "backbone" or any(field.name in protocol.settings for protocol in every):
        default = "from the protocol"
    elif any(field.name in setting.method_options.get(method.name, ()) for setting in settings):
        default += ", unless the protocol says otherwise"
    return declarations.help_text(field.metadata) + (f" [default: {default}]" if default else "")


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_word(value)}" for name, value in settings.items())


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def completion(*kinds: str, choices: Sequence[str] = ()) -> Callable[[str], list[str]]:
    """Make what tells a shell the choices that a text begins, and the names of some kinds: "method", "dataset", ..."""

    def complete(incomplete: str) -> list[str]:
        names = list(choices)
        for kind in kinds:
            if kind.endswith("dataset"):
                from fedcli.data import datasets

                names += datasets.names()
            names += index().get(kind, ())
        return [name for name in names if name.startswith(incomplete.lower())]

    return complete


def list_() -> None:
    """List the methods, the protocols, the networks and the papers' tables."""
    methods = [(name, method["title"], method["protocol"]) for name, method in index()["method"].items()]
    steps = [(name, step["title"]) for name, step in index()["post"].items()]
    protocols = [(name, dict(rows)["set-up"]) for name, rows in index()["protocol"].items()]
    for columns, rows in (
        (("Method", "Title", "Default protocol"), methods),
        (("Step after the last round, --post", "Title"), steps),
        (("Protocol", "Set-up"), protocols),
        (("Table", "What it shows"), list(index()["table"].items())),
    ):
        print_table(columns, rows)
        typer.echo()
    networks = textwrap.fill(", ".join(index()["backbone"]), console().width, break_on_hyphens=False)
    typer.echo(f"Networks, --backbone\n{networks}\n")
    typer.echo("'fedcli show NAME' tells more of a method or a protocol, 'fedcli run METHOD' runs it.")
    typer.echo("'fedcli data list' shows the data sets.")


def show(
    name: argument(
        str,
        "METHOD|PROTOCOL",
        "Name of a method or of a protocol, or path of a method file.",
        autocompletion=completion("method", "protocol", "post"),
    ),
) -> None:
    """Show what a protocol fixes, or a method's card, options and protocols; also of a file or a step for --post."""
    methods, protocols = {**index()["method"], **index()["post"]}, index()["protocol"]
    name = registry.spelt(name, (*methods, *protocols, *index()["table"]))
    if name in index()["table"]:
        raise UserError(f"'{name}' is a paper's table; 'fedcli table {name} --dry-run' shows it.")
    if name in protocols:
        _print_protocol(name, protocols[name])
        return
    if ":" in name and not is_from_file(name):
        registry.find_protocol(name)  # refuses it
    if name not in methods:
        method = registry.find_method(name)
        methods[name] = summary(method)
        protocols = {protocol.name: protocol_rows(protocol) for protocol in protocols_of(method)}
    code = (PAPERS / methods[name]["file"]).read_text(encoding="utf-8")
    typer.echo("\n".join(reflow((ast.get_docstring(ast.parse(code), clean=False) or "").strip(), console().width)))
    more = f"'fedcli run {name} --help' shows those of every method too"
    typer.echo(f"\nOptions of its own ({f'with --post {name}' if name in index()['post'] else more})")
    print_table(("", ""), [(f"    {flag}", text) for flag, text in methods[name]["options"]] or [("    none", "")])
    for protocol in methods[name]["protocols"]:
        typer.echo()
        _print_protocol(protocol, protocols[protocol])


def _print_protocol(name: str, rows: list[tuple[str, str]]) -> None:
    """Print what a protocol fixes."""
    typer.echo(f"Protocol {name}")
    print_table(("", ""), [(f"    {title}", text) for title, text in rows])


def reflow(card: str, width: int) -> list[str]:
    """Break a card that is wider than `width` into lines: fill paragraphs and items, keep tables and commands.

    A numbered item or a paragraph continues in lines of the same indent.
    """
    if max(map(len, card.splitlines()), default=0) <= width:
        return card.splitlines()
    blocks: list[list[Any]] = []  # text, and the indent of what continues it
    for line in card.splitlines():
        text, indent, item = line.strip(), len(line) - len(line.lstrip()), re.match(r"\s*\d+\. +", line)
        begins = not text or item or "  " in text or text.startswith("fedcli ")
        if blocks and not begins and indent == blocks[-1][1]:
            blocks[-1][0] += f" {text}"
        else:
            # Where an item's text begins, or a table's last column, or a formula or paragraph.
            start = (item or re.match(r"(.*\s{2,})?", line)).end()
            blocks.append([line, (start if start <= 0.6 * width else indent) if text else -1])
    filled, whole = [], {"break_long_words": False, "break_on_hyphens": False}
    for text, hang in blocks:
        filled += textwrap.wrap(text, width, subsequent_indent=" " * hang, **whole) or [""]
    return filled


def new(
    kind: argument(Literal["method"], "method", "What to write."),
    name: argument(str, "NAME", "Its name, of a-z, 0-9, - and _."),
) -> None:
    """Write NAME.py, a method to start from: FedAvg with a term of its own, which keeps all laws."""
    file = Path(f"{name}.py")
    if not re.fullmatch("[a-z][a-z0-9_-]*", name):
        raise UserError(f"the name '{name}' is invalid; begin with a letter and use only a-z, 0-9, - and _.")
    if name in index()["method"] or file.exists():
        raise UserError(f"there is a method or a file of that name (got '{name}'); choose another name.")
    file.write_text(TEMPLATE.read_text(encoding="utf-8").replace('"my_method"', f'"{name}"'), encoding="utf-8")
    typer.echo(f"{file}: 'fedcli run ./{file}' runs it, 'fedcli check ./{file}' checks it.")


if __name__ == "__main__":
    INDEX.write_text(json.dumps(make_index(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
