"""Experiments that are written down: options from a TOML file or a record, and lists of values that make a grid."""

import dataclasses
import itertools
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from fedcli.declarations import check_value, flag_of
from fedcli.errors import UserError
from fedcli.registry import find_method, spelt
from fedcli.runs.config import EXPERIMENT, given_options, recorded_fields, unknown_option
from fedcli.runs.records import is_packaged, read_record
from fedcli.userfiles import own_paths

Grid = dict[str, tuple[Any, ...]]  # the values to try, by option


def parse_values(field: dataclasses.Field, text: str) -> tuple[Any, ...]:
    """The values of an option, made by `fedcli.option`, from a text with commas between them, as "0.01,0.1".

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
    """Method and options of a file for `--config`, by field name; their values are checked later.

    It is a TOML file whose keys are options as they are typed, with dashes or underscores, beside `method`, which is
    None where there is none; a list stands for several values.

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


def gather(method: str, typed: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """All options of a run that are given: typed ones, before those of `--config`, before those of `--from`.

    A list in a file becomes a tuple, whose values make a grid. Of a record's options those are taken that the run was
    given, its protocol and data set among them: what came from the protocol comes from it again, so that it follows
    where another protocol is given. Options of another method are left out.

    Args:
        method: As the user names it.
        typed: The typed options, `config` and `from_` among them; None counts as not given. A file of the user's that a
            record names must be named anew here.

    Returns:
        The options without these two, and where those come from that were not typed.

    Raises:
        UserError: If a file cannot be read or has an option that does not exist or may not have several values, or a
            file of the user's is not named.
    """
    options = {name: value for name, value in typed.items() if value is not None}
    config, from_ = options.pop("config", None), options.pop("from_", None)
    sources: dict[str, str] = {}

    def take(more: Mapping[str, Any], source: str) -> None:
        seeded = "seed" in options or "seeds" in options
        for name, value in more.items():
            if name not in options and not (seeded and name in ("seed", "seeds")):
                options[name], sources[name] = value, source

    if config is not None:
        chosen, lines = find_method(method), read_config(config)[1]
        post = options.get("post", lines.get("post"))
        fields = recorded_fields(chosen, post)
        for name, value in lines.items():
            if name not in (*fields, *EXPERIMENT) or name in ("config", "from_"):
                raise unknown_option(name, chosen, post, f" in '{config}'")
            if isinstance(value, list) and name in fields:
                if not takes_several(fields[name]) or not value:
                    raise UserError(f"'{name}' in '{config}' must be one value (got {value!r}); give one.")
                for each in value:
                    check_value(fields[name], each)
                lines[name] = value[0] if len(value) == 1 else tuple(value)
        take(lines, f"file {config}")
    if from_ is not None:
        record, chosen = read_record(Path(from_)), find_method(method)
        fields = recorded_fields(chosen, options.get("post"))
        recorded = given_options(record["config"], record["origin"])
        recorded |= {name: record["config"].get(name) for name in ("protocol", "dataset")}
        for name, value in list(recorded.items()):
            if value is None or name in options or (chosen.name != record["method"] and name not in fields):
                del recorded[name]
            elif own_paths([value]):
                part = f"{flag_of(name)} {value}"
                raise UserError(
                    f"the record '{from_}' has code of yours in {part}, which is run only if you name it; add {part}."
                )
        take(recorded, f"run {from_}")
    return options, sources
