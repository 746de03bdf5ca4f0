"""The commands that tell of methods: `list` and `show`."""

import textwrap
from dataclasses import fields
from typing import Annotated

import typer

from fedcli import registry
from fedcli.cli.printing import completion, console, print_table
from fedcli.declarations import flag_of


def list_() -> None:
    """List the methods, the protocols, the networks and the papers' tables."""
    from fedcli.cli.describe import protocol_names
    from fedcli.core.backbones import BACKBONES

    methods = registry.methods().values()
    rows = [(method.name, method.title, protocol_names(method)) for method in methods]
    print_table(("Method", "Title", "Default protocol"), rows)
    typer.echo()
    steps = registry.posts().values()
    print_table(("Step after the last round, --post", "Title"), [(step.name, step.title) for step in steps])
    typer.echo()
    protocols = registry.protocols().values()
    print_table(("Protocol", "Set-up"), [(protocol.name, protocol.summary) for protocol in protocols])
    typer.echo()
    typer.echo("Networks, --backbone")
    typer.echo(textwrap.fill(", ".join(BACKBONES), console().width, break_on_hyphens=False))
    if tables := registry.tables().values():
        typer.echo()
        print_table(("Table", "What it shows"), [(table.name, table.title) for table in tables])
    typer.echo("\n'fedcli show METHOD' tells more of a method, 'fedcli run METHOD' runs it.")
    typer.echo("'fedcli data list' shows the data sets.")


def show(
    method: Annotated[
        str,
        typer.Argument(
            metavar="METHOD",
            help="Name of a method, or path of a method file.",
            autocompletion=completion("method"),
        ),
    ],
) -> None:
    """Show a method's card, its options and its protocols; also of a method file, or of a step for --post."""
    from fedcli.cli import describe

    chosen = registry.posts().get(method) or registry.find_method(method)
    typer.echo("\n".join(describe.reflow(chosen.card, console().width)))
    more = f"'fedcli run {method} --help' shows those of every method too"
    typer.echo(f"\nOptions of its own ({f'with --post {method}' if method in registry.posts() else more})")
    rows = [(f"    {flag_of(field.name)}", describe.option_help(chosen, field)) for field in fields(chosen.config)]
    print_table(("", ""), rows or [("    none", "")])
    for protocol in describe.protocols_of(chosen):
        typer.echo(f"\nProtocol {protocol.name}")
        print_table(("", ""), [(f"    {title}", text) for title, text in describe.protocol_rows(protocol)])
