"""Experiments that are written down: options from a TOML file or a record, and lists of values that make a grid."""

import itertools
import tomllib
from contextlib import suppress
from dataclasses import Field
from pathlib import Path
from typing import Any, get_args

from fedcli.data.files import reading
from fedcli.declarations import check_value, flag_of
from fedcli.errors import UserError
from fedcli.registry import find_method
from fedcli.runs.config import flags_of, given_options, recorded_fields
from fedcli.userfiles import own_paths

SWITCHES = ("quiet", "continue")  # of a command; off unless they are given, without a form that begins with `--no-`


def parse_values(field: Field, text: str) -> tuple[Any, ...]:
    """The values of an option, each once, from a text with commas between them, as "0.01,0.1".

    Raises:
        UserError: A value is of the wrong type or out of range.
    """
    kinds, values = get_args(field.type) or (field.type,), []
    for part in map(str.strip, text.split(",")):
        value: Any = {"true": True, "false": False}.get(part.lower(), part) if bool in kinds else part
        for kind in (float, int):  # a whole number is an int where both are allowed
            with suppress(ValueError):
                value = kind(part) if kind in kinds else value
        check_value(field, value)
        values.append(value)
    return tuple(dict.fromkeys(values))


def typed_options(args: list[str]) -> dict[str, str]:
    """The options among arguments, by name, with their values; that of a switch is the word after it."""
    typed = {}
    for word, following in itertools.zip_longest(args, args[1:], fillvalue=""):
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            typed[flag[2:].replace("-", "_").removeprefix("no_")] = value if equals else following
    return typed


def expand(args: list[str], command: str) -> tuple[list[str], dict[str, str]]:
    """The arguments of a command with the options that `--config` and `--from` stand for, the method first.

    Typed options override those of the file, and these those of the run; `--seed` overrides `--seeds`, and the other
    way round. A list in a file stands for several values.

    Returns:
        The arguments, and where the options come from that were not typed, by name.

    Raises:
        UserError: A file cannot be read, no method is named, or a file of the user's is not.
    """
    typed = typed_options(args)
    if not args[0].startswith("-"):
        typed["method"], *args = args
    in_file = _options_in_file(typed["config"]) if "config" in typed else {}
    in_run: dict[str, Any] = {}
    if "from" in typed:
        from fedcli.runs.records import read_record  # late, as it imports PyTorch

        record = read_record(Path(typed["from"]))
        # Not what came from the protocol: it comes from there again, and follows where another one is given.
        in_run = {name: record["config"].get(name) for name in ("protocol", "dataset")}
        in_run |= {"method": record["method_source"]} | given_options(record["config"], record["origin"])
    seeds = {"seed", "seeds"}
    if seeds & {*typed, *in_file}:
        in_run.pop("seed", None)
    taken = typed.keys() | (seeds if seeds & typed.keys() else ())
    options = {name: value for name, value in {**in_run, **in_file}.items() if name not in taken}
    for name, value in options.items():
        if name not in in_file and own_paths([value]):
            part = value if name == "method" else f"{flag_of(name)} {value}"
            raise UserError(f"'{typed['from']}' has code of yours in {part}, run only if you name it; add {part}.")
    method = typed.get("method", options.pop("method", None))
    if not isinstance(method, str):
        remedy = f"write 'fedcli {command} METHOD', see 'fedcli list'"
        raise UserError(f'no method given (got {args[0]}); {remedy}, or set method = "fedavg" in the --config file.')
    if in_run and (chosen := find_method(method.split(",")[0])).name != record["method"]:
        in_run = {name: value for name, value in in_run.items() if name in recorded_fields(chosen)}
        options = {name: value for name, value in options.items() if name in in_run or name in in_file}
    sources = {name: f"file {typed['config']}" if name in in_file else f"run {typed['from']}" for name in options}
    return [method, *flags_of(options), *args], sources


def _options_in_file(path: str) -> dict[str, Any]:
    """The options in a TOML file for `--config`, and `method`; its keys have dashes or underscores."""
    with reading(path, "a TOML file, e.g. lr = 0.1"):
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    options = {}
    for key, value in table.items():
        if isinstance(value, dict) or key in ("config", "from"):
            raise UserError(f"'{key}' in '{path}' is no option with a value or a list (got {value!r}); leave it out.")
        if key not in SWITCHES or value is not False:
            options[key.replace("-", "_")] = ",".join(map(str, value)) if isinstance(value, list) else value
    return options
