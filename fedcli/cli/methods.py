"""The commands that tell of methods: `list` and `show`."""

import ast
import re
import textwrap
from typing import Annotated, Any

import typer

from fedcli import registry
from fedcli.cli.common import completion, console, print_table
from fedcli.cli.describe import PAPERS, index, protocol_rows, protocols_of, summary
from fedcli.errors import UserError
from fedcli.userfiles import is_from_file


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
    name: Annotated[
        str,
        typer.Argument(
            metavar="METHOD|PROTOCOL",
            help="Name of a method or of a protocol, or path of a method file.",
            autocompletion=completion("method", "protocol", "post"),
        ),
    ],
) -> None:
    """Show what a protocol fixes, or a method's card, options and protocols; also of a file or a step for --post."""
    methods, protocols = {**index()["method"], **index()["post"]}, index()["protocol"]
    name = registry.spelt(name, (*methods, *protocols, *index()["table"]))
    if name in index()["table"]:
        raise UserError(f"'{name}' is a paper's table; 'fedcli table {name} --dry-run' shows it.")
    if ":" in name and not is_from_file(name):
        if name not in protocols:
            registry.find_protocol(name)  # refuses it
        _print_protocol(name, protocols[name])
        return
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
