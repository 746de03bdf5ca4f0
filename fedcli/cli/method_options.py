"""The options of a command that runs methods: those of the methods that it names, beside its own."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import Field, make_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import typer
from rich.markup import escape
from typer.core import TyperCommand

from fedcli import registry
from fedcli.cli.completion import completion
from fedcli.cli.describe import find_summary
from fedcli.cli.groups import NoSuchOption
from fedcli.cli.index import Summary, index
from fedcli.cli.option_words import option_help
from fedcli.cli.options import optional, refuse_twice
from fedcli.declarations import facts_of, flag_of
from fedcli.errors import UserError
from fedcli.userfiles import is_from_file

if TYPE_CHECKING:  # late, as help of all commands does not need it
    from fedcli.runs.options import HasOptions


class MethodCommand(TyperCommand):
    """A command, `run` or `tune`, that has the options of the method that it is given, beside its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put in what `--config` and `--from` stand for; take underscores for dashes; collect the method's options."""
        ctx.meta["options"] = []
        if not args or args[0] in ("-h", "--help"):
            ctx.meta["given"] = {}
            return super().parse_args(ctx, args)
        from fedcli.runs.options import typed_options, unknown_option
        from fedcli.runs.sources import expand

        typed = [re.sub(r"^--\w+(?==|$)", _with_dashes, word) for word in args]
        expanded, ctx.meta["sources"] = expand(typed, ctx.info_name)
        (names, *_) = expanded
        first_name, *other_names = names.split(",")
        post = typed_options(expanded).get("post")
        steps: Mapping[str, HasOptions] = index().posts
        first = find_summary(first_name)
        others = [find_summary(name) for name in other_names]
        if is_from_file(first_name) or is_from_file(post or ""):
            steps = registry.posts(registry.find_method(first_name), post)
        options = make_options(first, others, steps)
        ctx.meta["options"] = options
        for option in options:
            _refuse_two_values(option, typed)
        try:
            rest = super().parse_args(ctx, expanded)
        except NoSuchOption as error:
            raise unknown_option(error.option_name, first, steps, post, others) from error
        values = {option.name: ctx.params.pop(option.name) for option in options}
        ctx.meta["given"] = {name: value for name, value in values.items() if value is not None}
        return rest

    def get_params(self, ctx: Any) -> list[Any]:
        """List the options of the method before those of the command."""
        return [*ctx.meta.get("options", ()), *super().get_params(ctx)]


def _with_dashes(flag: re.Match) -> str:
    return flag[0].replace("_", "-")


def _refuse_two_values(option: Any, typed: Sequence[str]) -> None:
    """Refuse an option of a method that is typed twice."""
    flag, *_ = option.opts
    if flag == "--seed":
        refuse_twice(typed, flag, "--seeds")
    else:
        takes_several = option.metavar == "VALUE"
        refuse_twice(typed, flag, flag if takes_several else None)


def make_options(first: Summary, others: Sequence[Summary], steps: "Mapping[str, HasOptions]") -> list[Any]:
    """Make the options of a run, of steps after it and of the methods.

    An option is None unless it is given; several values are a tuple. Where methods have an option of the same name,
    the help is that of the first.
    """
    from fedcli.runs.options import fields_of, option_panels

    panels = option_panels(first, steps)
    names = {name for panel in panels.values() for name in panel}
    for method in others:
        own = fields_of(method.config)
        panels[method.title] = {name: field for name, field in own.items() if name not in names}
        names |= own.keys()
    parameters = []
    for title, panel in panels.items():
        for field in panel.values():
            kind = _option(field, option_help(field, first.defaults), title)
            parameters.append((field.name, kind, None))
    app = typer.Typer(add_completion=False)
    app.command()(make_dataclass("Options", parameters))
    return typer.main.get_command(app).params


def _option(field: Field, help: str, panel: str) -> Any:
    """Make the type of the option that a field describes."""
    choices = facts_of(field).choices
    traits: dict[str, Any] = {"autocompletion": completion(field.name, choices=choices)}
    is_number = not {int, float}.isdisjoint({field.type, *get_args(field.type)})
    if choices or is_number:
        traits["parser"] = partial(_parse_values, field)
        traits["metavar"] = "<int>" if field.name == "seed" else "VALUE"
    flag = flag_of(field.name)
    if field.type is bool:
        flag = f"{flag}/--no-{flag[2:]}"
    return optional(field.type, escape(help), flag, panel=escape(panel), show_default=False, **traits)


def _parse_values(field: Any, text: str) -> Any:
    """Read the values of an option, one or a tuple; `--checkpoint-every auto` is as if it were not given."""
    from fedcli.runs.options import parse_values

    if field.name == "checkpoint_every" and text == "auto":
        return None
    values = parse_values(field, text)
    if field.name == "seed" and len(values) > 1:
        raise UserError(f"--seed takes one seed (got '{text}'); write --seeds {text}.")
    if len(values) > 1:
        return values
    (value,) = values
    return value


def settings_of_single(names: Sequence[str], set_: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """Read `--set` as options of single methods, by their names; without it, nothing slow is imported."""
    if not set_:
        return {}
    from fedcli.results.comparison import single_settings

    return single_settings(names, set_)
