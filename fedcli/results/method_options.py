"""Assigns the options of a command with several methods to these methods."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fedcli.declarations import Method, fields_of, flag_of
from fedcli.errors import UserError, unknown
from fedcli.registry import find_method
from fedcli.runs.options import parse_values, recorded_field, recorded_fields

Options = dict[str, Any]


def find_methods(names: Sequence[str]) -> dict[str, Method]:
    """Finds the methods of a command; returns them by their names in the command.

    Raises:
        UserError: If there is no such method, or two have the same name and so would share a folder.
    """
    methods = [find_method(name) for name in names]
    full_names = [method.name for method in methods]
    if len(set(full_names)) < len(full_names):
        raise UserError(f"two methods have the same name (got {', '.join(full_names)}); name each once.")
    return dict(zip(names, methods, strict=True))


def select_options(method: Method, methods: Mapping[str, Method], options: Mapping[str, Any]) -> Options:
    """Selects the options of a method: all but those that belong only to other methods of the command."""
    options_of_any_method = fields_of(*(other.config for other in methods.values())).keys()
    foreign_options = options_of_any_method - recorded_fields(method).keys()
    return {name: value for name, value in options.items() if name not in foreign_options}


class OptionText(NamedTuple):
    """A text `METHOD:OPTION=VALUES` for an option of one method, or `OPTION=VALUES` for all methods that have it.

    Attributes:
        flag: The option of the command with which the text is given, `--set` or `--grid`.
        text: The whole text.
        method: The name of the method; empty for all methods that have the option.
        option: The name of the option.
        values: The values, with commas between them.
    """

    flag: str
    text: str
    method: str
    option: str
    values: str


def split_option_text(flag: str, text: str) -> OptionText:
    """Takes a text of `--set` or `--grid` apart.

    Raises:
        UserError: If it has no option or no values.
    """
    name, _, values = text.partition("=")
    if not (name and values):
        raise UserError(f"{flag} must be an option and its values (got '{text}'); write {flag} lr=0.01,0.1.")
    method, _, option = name.rpartition(":")
    return OptionText(flag, text, method, option.strip().lstrip("-").replace("-", "_"), values)


def parse_method_options(
    methods: Mapping[str, Method], texts: Iterable[OptionText], post: Any = None
) -> dict[str, Options]:
    """Reads the options that texts give to methods.

    Args:
        methods: The methods, as they are named in the command.
        texts: The texts of `--set` or `--grid`.
        post: The value of `--post` for all methods, or a tuple of several, whose options these have too.

    Returns:
        For each name of a method its options, each a tuple of the values in the text.

    Raises:
        UserError: If a method is not among those of the command or lacks the option, or an option of a method is given
            twice.
    """
    values_to_try: dict[str, Options] = {name: {} for name in methods}
    for given in texts:
        for name in _find_matching_methods(methods, given, post):
            field = recorded_field(given.option, methods[name], post)
            if given.option in values_to_try[name]:
                raise UserError(
                    f"{flag_of(given.option)} is given twice (got {given.flag} {given.text}); put all its values into "
                    "one."
                )
            values_to_try[name][given.option] = parse_values(field, given.values)
    return values_to_try


def parse_set(methods: Mapping[str, Method], texts: Iterable[str], post: Any = None) -> dict[str, Options]:
    """Reads the texts of `--set`, which gives one method's option one value; see `parse_method_options`."""
    method_options = parse_method_options(methods, [split_option_text("--set", text) for text in texts], post)
    for options in method_options.values():
        for name, values in options.items():
            options[name] = _take_only_value(name, values)
    return method_options


def _take_only_value(option: str, values: Sequence[Any]) -> Any:
    """Takes the one value that `--set` gives an option; raises UserError if there are several."""
    if len(values) > 1:
        words = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
        got = ",".join(words)
        raise UserError(
            f"--set gives an option one value (got {got} for {flag_of(option)}); 'fedcli tune --grid' tries several."
        )
    (value,) = values
    return value


def assign_options(
    methods: Mapping[str, Method], method_options: Mapping[str, Mapping[str, Any]], post: Any = None
) -> dict[str, Options]:
    """Assigns the options of single methods, as `fedcli.run(..., set=...)` takes them, to the methods of a command.

    Args:
        methods: The methods, as they are named in the command.
        method_options: The options of a method, by its name there or the one that its file declares.
        post: The value of `--post` for all methods, or a tuple of several, whose options these have too.

    Returns:
        For each name of a method its options.

    Raises:
        UserError: If a method is not among those of the command or lacks an option, or an option of a method is given
            twice.
    """
    by_name: dict[str, Options] = {name: {} for name in methods}
    for method_name, options in method_options.items():
        if not isinstance(options, Mapping):
            raise UserError(
                f"--set must have the options of each method by its name (got {method_name!r}: {options!r}); write "
                f"set={{'{next(iter(methods))}': {{'lr': 0.1}}}}."
            )
        for name in _find_names_in_command(methods, str(method_name), "--set"):
            for option in options:
                recorded_field(option, methods[name], post)  # refuses one that the method has not
                if option in by_name[name]:
                    raise UserError(
                        f"{flag_of(option)} of '{name}' is given twice (got --set {method_options}); give one."
                    )
                value = options[option]
                by_name[name][option] = _take_only_value(option, value) if isinstance(value, tuple) else value
    return by_name


def _find_matching_methods(methods: Mapping[str, Method], given: OptionText, post: Any) -> list[str]:
    """Finds the methods that a text means: the named one, or all that have the option.

    Returns:
        Their names in the command; if no method has the option, that of the first method, which then refuses it.
    """
    if given.method:
        return _find_names_in_command(methods, given.method, given.flag)
    with_option = [name for name, method in methods.items() if given.option in recorded_fields(method, post)]
    return with_option or list(methods)[:1]


def _find_names_in_command(methods: Mapping[str, Method], name: str, flag: str) -> list[str]:
    """Finds the methods of a name; returns their names in the command.

    Raises:
        UserError: If the command has no such method.
    """
    names = [other for other, method in methods.items() if name in (other, method.name)]
    if not names:
        raise unknown(f"method in {flag}", name, methods, f"this command has {', '.join(methods)}.")
    return names
