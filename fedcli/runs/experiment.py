"""Experiments that are written down: options from a TOML file or a record, and lists of values that make a grid."""

import dataclasses
import itertools
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from fedcli.declarations import Method, check_value, flag_of
from fedcli.errors import UserError
from fedcli.registry import find_method, spelt
from fedcli.runs.config import EXPERIMENT, given_options, recorded_fields, unknown_option
from fedcli.runs.records import is_packaged, read_record
from fedcli.userfiles import own_paths

Grid = dict[str, tuple[Any, ...]]  # the values to try, by option


def parse_values(field: dataclasses.Field, text: str) -> tuple[Any, ...]:
    """The values of an option from a text with commas between them.

    Args:
        field: The option, made by `fedcli.option`.
        text: For example "0.01,0.1".

    Raises:
        UserError: If a value is of the wrong type or out of range, or one stands there twice.
    """
    types, values = _types(field), []
    for part in map(str.strip, text.split(",")):
        value: Any = spelt(part, field.metadata["choices"])
        if bool in types:
            value = {"true": True, "false": False}.get(part.lower(), part)
        for kind in (float, int):  # a whole number is an int where both are allowed
            if kind in types:
                with suppress(ValueError):
                    value = kind(part)
        check_value(field, value)
        values.append(value)
    if len(set(values)) < len(values):
        raise UserError(f"{flag_of(field.name)} has a value twice (got {text}); give each value once.")
    return tuple(values)


def takes_several(field: dataclasses.Field) -> bool:
    """Whether commas divide values of an option: of numbers and of fixed choices, but for the seed (see `--seeds`)."""
    return field.name != "seed" and bool(_types(field) & {int, float} or field.metadata["choices"])


def _types(field: dataclasses.Field) -> set[type]:
    """The types that an option's values may have."""
    return {*get_args(field.type)} or {field.type}


def combinations(grid: Mapping[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Every combination of a grid's values, by option; a single empty one of no grid."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def place(values: Mapping[str, Any]) -> str:
    """What the folder of a combination is called, as `lr=0.01,batch_size=32`."""
    return ",".join(f"{name}={value}" for name, value in values.items())


def read_config(path: str | Path) -> tuple[str | None, dict[str, Any]]:
    """Method and options of a file for `--config`.

    Args:
        path: A TOML file whose keys are options as they are typed, with dashes or underscores, beside `method`; a list
            stands for several values.

    Returns:
        The method, None where the file names none, and the options by field name; their values are checked later.

    Raises:
        UserError: If it cannot be read.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"--config {path} cannot be read ({error}); give a TOML file, with lines as lr = 0.1."
        ) from error
    options: dict[str, Any] = {}
    for key, value in table.items():
        name = "continue_" if key == "continue" else key.replace("-", "_")
        if name in options:
            raise UserError(f"the option '{key}' stands twice in '{path}' (with a dash and an underscore); keep one.")
        if isinstance(value, dict):
            raise UserError(f"'{path}' has a table [{key}]; options stand alone, with lines as lr = 0.1.")
        options[name] = value
    method = options.pop("method", None)
    if method is not None and not isinstance(method, str):
        raise UserError(f"the method in '{path}' must be a text (got {method!r}); write method = \"fedavg\".")
    return method, options


def check_config(path: str | Path, options: Mapping[str, Any], method: Method, chosen: str | None) -> dict[str, Any]:
    """Returns the options of the file `path` for a method and its `--post`; lists as tuples.

    Raises:
        UserError: If an option is not known, or has several values and may not.
    """
    fields = recorded_fields(method, chosen)
    checked = {}
    for name, value in options.items():
        if name not in (*fields, *EXPERIMENT) or name in ("config", "from_"):
            raise unknown_option(name, method, chosen, f"'{path}'")
        if isinstance(value, list) and name in fields:
            if not takes_several(fields[name]) or not value:
                raise UserError(f"'{name}' in '{path}' must be one value (got {value!r}); give one.")
            for each in value:
                check_value(fields[name], each)
            value = value[0] if len(value) == 1 else tuple(value)
        checked[name] = value
    return checked


def recorded_method(path: str | Path) -> str:
    """The method of a run, to be run again by `--from`.

    Raises:
        UserError: If it is the user's own file, which is imported only where the user names it.
    """
    record = read_record(Path(path))
    if not is_packaged(record):
        source = record["method_source"]
        raise UserError(
            f"the record '{path}' has code of yours in '{source}', which is run only if you name it; write 'fedcli run "
            f"{source} --from {path}'."
        )
    return record["method"]


def from_record(path: str | Path, method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a run was given, whose protocol and data set are among them.

    What came from the protocol comes from it again, so that it follows where another protocol is given. Options of
    another method are left out.

    Args:
        path: Folder of the run, or its record.
        method: What is run with them, as the user names it.
        given: What goes before them; a file of the user's in the record must be named anew here.

    Raises:
        UserError: If there is no such record, or one of its files is not named.
    """
    record, chosen = read_record(Path(path)), find_method(method)
    config, fields = record["config"], recorded_fields(chosen, given.get("post"))
    recorded = given_options(config, record["origin"])
    recorded |= {name: config[name] for name in ("protocol", "dataset") if config.get(name) is not None}
    options = {}
    for name, value in recorded.items():
        if name in given or (chosen.name != record["method"] and name not in fields):
            continue
        if own_paths([value]):
            part = f"{flag_of(name)} {value}"
            raise UserError(
                f"the record '{path}' has code of yours in {part}, which is run only if you name it; add {part}."
            )
        options[name] = value
    return options


def gather(method: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """All options of a run that are given: typed ones, before those of `--config`, before those of `--from`.

    Args:
        method: As the user names it.
        given: The typed options, `config` and `from_` among them; None counts as not given.

    Returns:
        The options without these two, and where those come from that were not typed.

    Raises:
        UserError: If a file cannot be read, or has an option that does not exist.
    """
    options = {name: value for name, value in given.items() if value is not None}
    config, from_ = options.pop("config", None), options.pop("from_", None)
    sources: dict[str, str] = {}

    def add(more: Mapping[str, Any], source: str) -> None:
        seeded = "seed" in options or "seeds" in options
        for name, value in more.items():
            if name not in options and not (seeded and name in ("seed", "seeds")):
                options[name], sources[name] = value, source

    if config is not None:
        lines = read_config(config)[1]
        add(check_config(config, lines, find_method(method), options.get("post", lines.get("post"))), f"file {config}")
    if from_ is not None:
        add(from_record(from_, method, options), f"run {from_}")
    return options, sources
