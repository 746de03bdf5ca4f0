"""The commands about methods: `list`, `show` and `new`."""

import ast
import re
from dataclasses import fields
from pathlib import Path
from typing import Literal

import typer

from fedcli import registry
from fedcli.cli.cards import fit
from fedcli.cli.completion import completion
from fedcli.cli.describe import find_summary, protocol_rows
from fedcli.cli.index import PAPERS, SETUP, Rows, Summary, index
from fedcli.cli.option_words import option_help
from fedcli.cli.options import argument, optional
from fedcli.cli.printing import console, print_table, say
from fedcli.declarations import flag_of
from fedcli.errors import UserError, unknown
from fedcli.userfiles import names_user_file

TEMPLATE = Path(__file__).parent / "my_method.txt"  # what `new` writes; the README shows it


def list_(all_: optional(bool, "Also list steps, protocols and the papers' tables.", "--all") = False) -> None:
    """List the methods and the networks."""
    tables = {"Method": [(name, method.title) for name, method in index().methods.items()]}
    if all_:
        tables["Step after the last round, --post"] = [(name, step.title) for name, step in index().posts.items()]
        tables["Protocol, --protocol"] = [(name, dict(rows)[SETUP]) for name, rows in index().protocols.items()]
        tables["Table, 'fedcli table NAME'"] = list(index().tables.items())
    for kind, rows in tables.items():
        print_table((kind, "Title"), rows)
        typer.echo()
    console().print(f"Networks, --backbone\n{', '.join(index().backbones)}\n")
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
    posts = index().posts
    protocols = index().protocols
    names = [*index().methods, *posts, *protocols]
    name = registry.in_declared_case(name, names)
    rows = protocols.get(name)
    if names_user_file(name):
        rows = _protocol_of_file(name)
    elif name not in names:
        if ":" in name:
            registry.pick(name, "protocol", protocols)  # refuses it, with the protocols of its paper
        raise unknown("method, step or protocol", name, names, "'fedcli list --all' shows all.")
    if rows is not None:
        print_table((f"Protocol {name}", ""), rows)
    elif name in posts:
        _show_summary(posts[name], f"with --post {name}")
    else:
        _show_summary(find_summary(name), f"'fedcli run {name} --help' shows all options")


def _protocol_of_file(name: str) -> Rows | None:
    """List what the protocol `./file.py:NAME` fixes; None where the name is that of a method."""
    if ":" not in name:
        return None
    try:
        return protocol_rows(registry.find_protocol(name))
    except UserError:
        return None


def _show_summary(summary: Summary, hint: str) -> None:
    """Show the options, the card and the protocols of a method or a step."""
    values = f", with the values of protocol {summary.defaults['protocol']}" if summary.defaults else ""
    typer.echo(f"{summary.title}\n\nOptions of its own{values} ({hint})")
    options = [(flag_of(field.name), option_help(field, summary.defaults)) for field in fields(summary.config)]
    print_table(("", ""), options or [("none", "")])
    code = (PAPERS / summary.file).read_text(encoding="utf-8")
    card = ast.get_docstring(ast.parse(code), clean=False) or ""
    if console().is_terminal:
        card = fit(card, console().width)
    typer.echo(f"\n{card}".rstrip())
    if summary.protocols:
        typer.echo("\nProtocols ('fedcli show PROTOCOL' shows all that one fixes)")
        print_table(("", ""), summary.protocols)


def new(
    kind: argument(Literal["method"], "method", "What to write."),
    name: argument(str, "NAME", "Its name, of a-z, 0-9, - and _."),
) -> None:
    """Write NAME.py, a method to start from: FedAvg with a term of its own, which keeps all laws."""
    file = Path(f"{name}.py")
    is_taken = name in index().methods or file.exists()
    if is_taken or not re.fullmatch("[a-z][a-z0-9_-]*", name):
        rule = "begin with a letter, use only a-z, 0-9, - and _, and no name of a method or a file here"
        raise UserError(f"'{name}' cannot be the name of a new method; {rule}.")
    code = TEMPLATE.read_text(encoding="utf-8").replace('"my_method"', f'"{name}"')
    file.write_text(code, encoding="utf-8")
    say(f"{file}: 'fedcli run ./{file}' runs it, 'fedcli check ./{file}' checks it.")
