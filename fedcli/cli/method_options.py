"""The options of a command that runs methods: those of the methods that it names, beside its own."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, make_dataclass
from functools import partial
from itertools import chain
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
from fedcli.declarations import fields_of, flag_of, spec_of
from fedcli.errors import UserError
from fedcli.runs.origins import GivenOptions
from fedcli.userfiles import names_user_file

if TYPE_CHECKING:  # late, as help of all commands does not need it
    from fedcli.runs.options import HasOptions

# Keys of what a command's context carries.
PARAMETERS = "method_parameters"  # all options of the methods, as Typer has them, for `MethodCommand.get_params`
GIVEN = "given_options"  # those of them that are given, see `given_options`


def given_options(ctx: typer.Context) -> GivenOptions:
    """Return the options that a `MethodCommand` is given of the methods that it runs."""
    return ctx.meta[GIVEN]


@dataclass(frozen=True, kw_only=True)
class NamedMethods:
    """The methods that a command names, and the steps after the last round that there are.

    Attributes:
        first: The first method.
        others: The other methods.
        post: The step that `--post` names.
        steps: All steps by name, one in a file of the user's with them.
    """

    first: Summary
    others: list[Summary]
    post: str | None
    steps: "Mapping[str, HasOptions]"


@dataclass(frozen=True, kw_only=True)
class MethodOption:
    """An option of a run, of a step after it or of a method.

    Attributes:
        parameter: The option as Typer has it.
        several: The option that takes several values of it, with commas between them; None if none does.
    """

    parameter: Any
    several: str | None

    def refuse_twice(self, words: Sequence[str]) -> None:
        """Refuse the option where the words of a command line give it twice."""
        flag, *_ = self.parameter.opts
        refuse_twice(words, flag, self.several)


class MethodCommand(TyperCommand):
    """A command, `run` or `tune`, that has the options of the method that it is given, beside its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put in what `--config` and `--from` stand for; take underscores for dashes; collect the method's options."""
        ctx.meta[PARAMETERS] = []
        if not args or args[0] in ("-h", "--help"):
            return super().parse_args(ctx, args)
        from fedcli.runs.options import EXPERIMENT_OPTIONS, unknown_option
        from fedcli.runs.sources import expand

        words = [re.sub(r"^--\w+(?==|$)", _with_dashes, word) for word in args]
        expanded = expand(words, ctx.info_name)
        named = _find_methods(expanded.arguments)
        options = make_options(named)
        parameters = [option.parameter for option in options]
        ctx.meta[PARAMETERS] = parameters
        for option in options:
            option.refuse_twice(words)
        try:
            rest = super().parse_args(ctx, expanded.arguments)
        except NoSuchOption as error:
            raise unknown_option(
                error.option_name, named.first, named.steps, named.post, named.others, beside=EXPERIMENT_OPTIONS
            ) from error
        values = {parameter.name: ctx.params.pop(parameter.name) for parameter in parameters}
        given = {name: value for name, value in values.items() if value is not None}
        ctx.meta[GIVEN] = GivenOptions(values=given, sources=expanded.sources)
        return rest

    def get_params(self, ctx: Any) -> list[Any]:
        """List the options of the method before those of the command."""
        return [*ctx.meta.get(PARAMETERS, ()), *super().get_params(ctx)]


def _find_methods(args: list[str]) -> NamedMethods:
    """Find the methods that arguments name, the first of them, and the steps after the last round."""
    from fedcli.runs.options import typed_options

    (names, *_) = args
    first_name, *other_names = names.split(",")
    post = typed_options(args).get("post")
    steps: Mapping[str, HasOptions] = index().posts
    first = find_summary(first_name)
    others = [find_summary(name) for name in other_names]
    if names_user_file(first_name) or names_user_file(post or ""):
        steps = registry.posts(registry.find_method(first_name), post)
    return NamedMethods(first=first, others=others, post=post, steps=steps)


def _with_dashes(flag: re.Match) -> str:
    return flag[0].replace("_", "-")


def make_options(named: NamedMethods) -> list[MethodOption]:
    """Make the options of a run, of steps after it and of the methods.

    An option is None unless it is given; several values are a tuple. Where methods have an option of the same name,
    the help is that of the first.
    """
    from fedcli.runs.options import option_panels, refuse_reserved_names

    first = named.first
    refuse_reserved_names(first, named.steps)
    panels = option_panels(first, named.steps)
    names = set(chain.from_iterable(panels.values()))
    for method in named.others:
        own = fields_of(method.config)
        panels[method.title] = {name: field for name, field in own.items() if name not in names}
        names |= own.keys()
    fields = []
    types = {}
    for title, panel in panels.items():
        for field in panel.values():
            fields.append(field)
            types[field.name] = _option_type(field, option_help(field, first.defaults), title)
    parameters = _make_parameters(types)
    return [MethodOption(parameter=parameters[field.name], several=_option_of_several(field)) for field in fields]


def _make_parameters(types: dict[str, Any]) -> dict[str, Any]:
    """Make options as Typer has them of their types, by name; it makes them of a whole command alone."""
    app = typer.Typer(add_completion=False)
    app.command()(make_dataclass("Options", [(name, kind, None) for name, kind in types.items()]))
    return {parameter.name: parameter for parameter in typer.main.get_command(app).params}


def _takes_values(field: Field) -> bool:
    """Whether an option is a number or a choice, of which there may be several, a run for each."""
    is_number = not {int, float}.isdisjoint({field.type, *get_args(field.type)})
    return is_number or bool(spec_of(field).choices)


def _option_of_several(field: Field) -> str | None:
    """Find the option that takes several values of what a field describes; None if none does."""
    if field.name == "seed":
        return "--seeds"
    return flag_of(field.name) if _takes_values(field) else None


def _option_type(field: Field, help: str, panel: str) -> Any:
    """Make the type of the option that a field describes."""
    traits: dict[str, Any] = {"autocompletion": completion(field.name, choices=spec_of(field).choices)}
    if _takes_values(field):
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


def read_set(names: Sequence[str], set_: Sequence[str] | None, post: Any) -> dict[str, dict[str, Any]]:
    """Read `--set` as options of single methods, by their names, and of the step that `--post` has for all of them.

    Without it, nothing slow is imported.
    """
    if not set_:
        return {}
    from fedcli.results.method_options import find_methods, parse_set

    return parse_set(find_methods(names), set_, post)
