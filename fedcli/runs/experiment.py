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


def parse_values(field: dataclasses.Field, text: str) -> tuple[Any, ...]:
    """The values of an option, made by `fedcli.option`, from a text with commas between them, as "0.01,0.1".

    Raises:
        UserError: If a value is of the wrong type or out of range, or one stands there twice.
    """
    values = []
    for part in map(str.strip, text.split(",")):
        value: Any = spelt(part, field.metadata["choices"])
        if bool in _types(field):
            value = {"true": True, "false": False}.get(part.lower(), part)
        for kind in (float, int):  # a whole number is an int where both are allowed
            with suppress(ValueError):
                value = kind(part) if kind in _types(field) else value
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
    """Method and options of a TOML file for `--config`, by field name; their values are checked later.

    Its keys are options as they are typed, with dashes or underscores, beside `method`, which is None where there is
    none; a list stands for several values.

    Raises:
        UserError: If it cannot be read.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--config {path} cannot be read ({error}); give a TOML file, e.g. lr = 0.1.") from error
    options = {"continue_" if key == "continue" else key.replace("-", "_"): value for key, value in table.items()}
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
        again = f"'fedcli run {record['method_source']} --from {path}'"
        raise UserError(f"the method of '{path}' is a file of yours, which is run only if you name it; write {again}.")
    return record["method"]


def gather(method: str, typed: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """All options of a run that are given: typed ones, before those of `--config`, before those of `--from`.

    A list in a file becomes a tuple, whose values make a grid. Of a record's options those are taken that the run was
    given, its protocol and data set among them: what came from the protocol comes from it again, so that it follows
    where another protocol is given. Options of another method are left out. A file of the user's that a record names
    must be named anew.

    Args:
        method: As the user names it.
        typed: The typed options, `config` and `from_` among them; None counts as not given.

    Returns:
        The options without these two, and where those come from that were not typed.

    Raises:
        UserError: If a file cannot be read or has an option that does not exist or may not have several values, or a
            file of the user's is not named.
    """
    options = {name: value for name, value in typed.items() if value is not None}
    config, from_ = options.pop("config", None), options.pop("from_", None)
    chosen, sources = find_method(method), {}

    def take(more: Mapping[str, Any], source: str) -> None:
        taken = {"seed", "seeds", *options} if {"seed", "seeds"} & options.keys() else {*options}
        sources.update(dict.fromkeys(more.keys() - taken, source))
        options.update({name: value for name, value in more.items() if name not in taken})

    if config is not None:
        lines = read_config(config)[1]
        post = options.get("post", lines.get("post"))
        fields = recorded_fields(chosen, post)
        for name, value in lines.items():
            kinds = (object,) if name in fields else EXPERIMENT.get(name, ())
            if not kinds:
                raise unknown_option(name, chosen, post, f" in '{config}'")
            if not isinstance(value, kinds):
                types = " or ".join(kind.__name__ for kind in kinds)
                raise UserError(f"'{name}' in '{config}' must be of type {types} (got {value!r}); give such a value.")
            if isinstance(value, list) and name in fields:
                if not takes_several(fields[name]) or not value:
                    raise UserError(f"'{name}' in '{config}' must be one value (got {value!r}); give one.")
                for each in value:
                    check_value(fields[name], each)
                lines[name] = value[0] if len(value) == 1 else tuple(value)
        take(lines, f"file {config}")
    if from_ is not None:
        record = read_record(Path(from_))
        recorded = given_options(record["config"], record["origin"])
        recorded |= {name: record["config"].get(name) for name in ("protocol", "dataset")}
        fields = recorded if chosen.name == record["method"] else recorded_fields(chosen, options.get("post"))
        recorded = {name: value for name, value in recorded.items() if value is not None and name in fields}
        for name in sorted(recorded.keys() - options.keys()):
            if own_paths([recorded[name]]):
                part = f"{flag_of(name)} {recorded[name]}"
                raise UserError(f"'{from_}' has code of yours in {part}, run only if you name it; add {part}.")
        take(recorded, f"run {from_}")
    return options, sources
