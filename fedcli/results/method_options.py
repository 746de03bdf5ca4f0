"""Several methods in one command: which options go to which of them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedcli.declarations import Method, flag_of
from fedcli.errors import UserError, unknown
from fedcli.registry import find_method
from fedcli.runs.options import fields_of, parse_values, recorded_field, recorded_fields

Options = dict[str, Any]


def find_methods(names: Sequence[str]) -> list[Method]:
    """Finds the methods of a command, whose runs have folders by name.

    Raises:
        UserError: If there is no such method, or two have the same name.
    """
    methods = [find_method(name) for name in names]
    full_names = [method.name for method in methods]
    if len(set(full_names)) < len(full_names):
        raise UserError(f"two methods have the same name (got {', '.join(full_names)}); name each once.")
    return methods


def options_of(method: Method, methods: Sequence[Method], options: Mapping[str, Any]) -> Options:
    """Leaves out the options that belong to other methods of the command and not to this one."""
    options_of_any_method = fields_of(*(other.config for other in methods)).keys()
    foreign_options = options_of_any_method - recorded_fields(method).keys()
    return {name: value for name, value in options.items() if name not in foreign_options}


def parse_method_options(names: Sequence[str], texts: Iterable[str], flag: str) -> dict[str, Options]:
    """Reads `METHOD:OPTION=VALUE`, an option of one method, or of all methods that have it without `METHOD:`.

    Args:
        names: The methods, as they are named in the command.
        texts: The texts, as of `--set` or `--grid`.
        flag: The option whose texts they are.

    Returns:
        For each name of a method its options, each a tuple of the values in the text.

    Raises:
        UserError: If a text has no values, a method is not among those of the command or lacks the option, or an
            option of a method is given twice.
    """
    methods = dict(zip(names, find_methods(names), strict=True))
    values_to_try: dict[str, Options] = {name: {} for name in names}
    for text in texts:
        option, equals, values = text.partition("=")
        if not (option and equals and values):
            raise UserError(f"{flag} must be an option and its values (got '{text}'); write {flag} lr=0.01,0.1.")
        method_name, _, option = option.rpartition(":")
        option = option.strip().lstrip("-").replace("-", "_")
        for name in _matching_methods(methods, method_name, option, flag):
            field = recorded_field(option, methods[name])
            if option in values_to_try[name]:
                raise UserError(f"{flag_of(option)} is given twice (got {flag} {text}); put all its values into one.")
            values_to_try[name][option] = parse_values(field, values)
    return values_to_try


def parse_set(names: Sequence[str], texts: Iterable[str]) -> dict[str, Options]:
    """Reads the texts of `--set`, which gives one method's option one value; see `parse_method_options`."""
    method_options = parse_method_options(names, texts, "--set")
    for options in method_options.values():
        for name, values in options.items():
            options[name] = _only_value(name, values)
    return method_options


def _only_value(option: str, values: Sequence[Any]) -> Any:
    """The value that `--set` gives an option; refuses several."""
    if len(values) > 1:
        words = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
        got = ",".join(words)
        raise UserError(
            f"--set gives an option one value (got {got} for {flag_of(option)}); 'fedcli tune --grid' tries several."
        )
    (value,) = values
    return value


def options_by_method(names: Sequence[str], method_options: Mapping[str, Mapping[str, Any]]) -> dict[str, Options]:
    """Finds the methods that options of single methods are for, as `fedcli.run(..., set=...)` takes them.

    Args:
        names: The methods, as they are named in the command.
        method_options: The options of a method, by its name there or the one that its file declares.

    Returns:
        For each of `names` its options.

    Raises:
        UserError: If a method is not among those of the command or lacks an option, or an option of a method is given
            twice.
    """
    by_name: dict[str, Options] = {name: {} for name in names}
    if not method_options:
        return by_name
    methods = dict(zip(names, find_methods(names), strict=True))
    for method_name, options in method_options.items():
        if not isinstance(options, Mapping):
            raise UserError(
                f"--set must have the options of each method by its name (got {method_name!r}: {options!r}); write "
                f"set={{'{names[0]}': {{'lr': 0.1}}}}."
            )
        for name in _names_in_command(methods, str(method_name), "--set"):
            for option in options:
                recorded_field(option, methods[name])  # refuses one that the method has not
                if option in by_name[name]:
                    raise UserError(
                        f"{flag_of(option)} of '{name}' is given twice (got --set {method_options}); give one."
                    )
                value = options[option]
                by_name[name][option] = _only_value(option, value) if isinstance(value, tuple) else value
    return by_name


def _matching_methods(methods: Mapping[str, Method], name: str, option: str, flag: str) -> list[str]:
    """The methods that a text means, as they are named in the command: the named one, or all that have the option."""
    if not name:
        with_option = [other for other, method in methods.items() if option in recorded_fields(method)]
        return with_option or list(methods)[:1]  # of which the option is then refused
    return _names_in_command(methods, name, flag)


def _names_in_command(methods: Mapping[str, Method], name: str, flag: str) -> list[str]:
    """The methods of a name, as they are named in the command; refuses one that the command has not."""
    names = [other for other, method in methods.items() if name in (other, method.name)]
    if not names:
        raise unknown(f"method in {flag}", name, methods, f"this command has {', '.join(methods)}.")
    return names
