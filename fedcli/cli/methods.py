"""The commands that tell of methods: `list` and `show`."""

import textwrap
from dataclasses import fields
from typing import Annotated

import typer

from fedcli import registry
from fedcli.cli.printing import completion, console, print_table
from fedcli.declarations import Protocol, flag_of
from fedcli.errors import UserError
from fedcli.userfiles import is_from_file


def list_() -> None:
    """List the methods, the protocols, the networks and the papers' tables."""
    from fedcli.cli.describe import protocol_names
    from fedcli.core.backbones import BACKBONES

    methods = [(method.name, method.title, protocol_names(method)) for method in registry.methods().values()]
    steps = [(step.name, step.title) for step in registry.posts().values()]
    protocols = [(protocol.name, protocol.summary) for protocol in registry.protocols().values()]
    tables = [(table.name, table.title) for table in registry.tables().values()]
    for columns, rows in (
        (("Method", "Title", "Default protocol"), methods),
        (("Step after the last round, --post", "Title"), steps),
        (("Protocol", "Set-up"), protocols),
        (("Table", "What it shows"), tables),
    ):
        print_table(columns, rows)
        typer.echo()
    typer.echo("Networks, --backbone")
    typer.echo(textwrap.fill(", ".join(BACKBONES), console().width, break_on_hyphens=False))
    typer.echo("\n'fedcli show NAME' tells more of a method or a protocol, 'fedcli run METHOD' runs it.")
    typer.echo("'fedcli data list' shows the data sets.")


def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="METHOD|PROTOCOL",
            help="Name of a method or of a protocol, or path of a method file.",
            autocompletion=completion("shown"),
        ),
    ],
) -> None:
    """Show what a protocol fixes, or a method's card, options and protocols; also of a file or a step for --post."""
    from fedcli.cli import describe

    if ":" in name and not is_from_file(name):
        table = registry.spelt(name, registry.tables())
        if table in registry.tables():
            raise UserError(f"'{name}' is a paper's table; 'fedcli table {table} --dry-run' shows it.")
        _print_protocol(registry.find_protocol(name))
        return
    chosen = registry.posts().get(name) or registry.find_method(name)
    typer.echo("\n".join(describe.reflow(chosen.card, console().width)))
    more = f"'fedcli run {name} --help' shows those of every method too"
    typer.echo(f"\nOptions of its own ({f'with --post {name}' if name in registry.posts() else more})")
    rows = [(f"    {flag_of(field.name)}", describe.option_help(chosen, field)) for field in fields(chosen.config)]
    print_table(("", ""), rows or [("    none", "")])
    for protocol in describe.protocols_of(chosen):
        typer.echo()
        _print_protocol(protocol)


def _print_protocol(protocol: Protocol) -> None:
    """Print what a protocol fixes."""
    from fedcli.cli import describe

    typer.echo(f"Protocol {protocol.name}")
    print_table(("", ""), [(f"    {title}", text) for title, text in describe.protocol_rows(protocol)])
