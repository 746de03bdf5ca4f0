"""What Typer raises and does not export, and a group of commands that prints its help where none is named."""

from typing import Any

import typer
from typer.core import TyperGroup

# Typer brings a copy of click under a private name, so that classes of click's own would catch none of its errors.
UsageError: Any = typer.BadParameter.__base__
NoSuchOption: Any = next(kind for kind in UsageError.__subclasses__() if kind.__name__ == "NoSuchOption")


class HelpfulGroup(TyperGroup):
    """A group of commands that prints its help, and ends with code 2, where none is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Print the help if there are no arguments; `ctx` is a class of Typer's that it does not export."""
        if not args:
            help = ctx.get_help()  # which Typer may have printed already
            if help:
                typer.echo(help)
            raise typer.Exit(2)
        return super().parse_args(ctx, args)
