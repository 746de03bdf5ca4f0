"""Where options come from that are not typed: a TOML file, the record of another run, and what `fedcli tune` wrote."""

import json
import shlex
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedcli.declarations import Method, flag_of
from fedcli.errors import UserError
from fedcli.reading import reading
from fedcli.registry import find_method
from fedcli.runs.options import REPEATABLE_OPTIONS, flags_of, given_options, recorded_fields, typed_options
from fedcli.runs.origins import recorded_origins
from fedcli.userfiles import user_paths

if TYPE_CHECKING:  # it imports PyTorch, which help does not need
    from fedcli.runs.schema import Record

TUNED = "tuned.json"  # what `fedcli tune` writes beside the trials of a method


class Expanded(NamedTuple):
    """The arguments of a command with what `--config` and `--from` stand for."""

    arguments: list[str]
    sources: dict[str, str]  # where the options come from that were not typed, by name


def expand(args: list[str], command: str) -> Expanded:
    """Returns the arguments of a command with the options that `--config` and `--from` stand for, the method first.

    Typed options override those of the file, and these those of the run; `--seed` overrides `--seeds`, and the other
    way round. A list in a file stands for several values.

    Raises:
        UserError: A file cannot be read, no method is named, or a file of the user's is not.
    """
    typed = typed_options(args)
    typed_flags = args
    first = args[0]
    if not first.startswith("-"):
        typed["method"] = first
        typed_flags = args[1:]
    file_options = _options_of_file(typed["config"]) if "config" in typed else {}
    record: Record | None = None
    run_options: dict[str, Any] = {}
    if "from" in typed:
        from fedcli.runs.record import read_record  # late, as it imports PyTorch

        record = read_record(Path(typed["from"]))
        run_options = _options_of_run(record)
    options = _not_overridden(typed, file_options, run_options)
    options_of_run = {name: value for name, value in options.items() if name not in file_options}
    _refuse_unnamed_code(options_of_run, typed.get("from"))
    method = {**options, **typed}.get("method")
    if not isinstance(method, str):
        raise UserError(
            f"no method given (got {first}); write 'fedcli {command} METHOD', see 'fedcli list', or set method = "
            '"fedavg" in the --config file.'
        )
    left_out = {"method"}
    if record is not None:
        post = {**options, **typed}.get("post")
        left_out |= _options_of_other_method(options_of_run, record, method, post)
    added = {name: value for name, value in options.items() if name not in left_out}
    sources = {}
    for name in added:
        sources[name] = f"file {typed['config']}" if name in file_options else f"run {typed['from']}"
    return Expanded([method, *flags_of(added), *typed_flags], sources)


def _not_overridden(
    typed: Mapping[str, str], file_options: Mapping[str, Any], run_options: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the options of a file and of a run that count beside typed ones; those of the file win over the run's."""
    seeds = {"seed", "seeds"}  # one overrides the other
    options = dict(run_options)
    if seeds & {*typed, *file_options}:
        options.pop("seed", None)
    options |= file_options
    overridden = set(typed)
    overridden |= {name for name, value in options.items() if isinstance(value, bool) and f"no_{name}" in typed}
    if seeds & typed.keys():
        overridden |= seeds
    return {name: value for name, value in options.items() if name not in overridden}


def _options_of_run(record: "Record") -> dict[str, Any]:
    """Returns the options of a run, and `method`, but for those of its protocol.

    They come from there again, and follow where another one is given.
    """
    return {
        "method": record["method_source"],
        "protocol": record["config"]["protocol"],
        "dataset": record["config"]["dataset"],
        **given_options(record["config"], recorded_origins(record["origin"])),
    }


def _options_of_other_method(options: Mapping[str, Any], record: "Record", methods: str, post: Any) -> set[str]:
    """Returns the options of a run that none of these methods has, where its own is not among them.

    Args:
        options: The options of the run that count.
        record: Its record.
        methods: The names of the methods, with commas between them.
        post: The value of `--post`.
    """
    declared = [find_method(name) for name in methods.split(",")]
    if record["method"] in [method.name for method in declared]:
        return set()
    known: set[str] = set()
    for method in declared:
        known |= recorded_fields(method, post).keys()
    return options.keys() - known


def _refuse_unnamed_code(options: Mapping[str, Any], source: object) -> None:
    """Refuses options that were not typed and name a user's file."""
    for name, value in options.items():
        if user_paths([value]):
            part = value if name == "method" else f"{flag_of(name)} {shlex.quote(value)}"
            raise UserError(f"'{source}' has code of yours in {part}, run only if you name it; add {part}.")


def _options_of_file(path: str) -> dict[str, Any]:
    """Returns the options in a TOML file for `--config`, and `method`; its keys have dashes or underscores."""
    with reading(path, "a TOML file, e.g. lr = 0.1"):
        table = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))  # some editors begin a file with a mark
    options = {}
    for key, value in table.items():
        if isinstance(value, dict) or key in ("config", "from"):
            raise UserError(f"'{key}' in '{path}' is no option with a value or a list (got {value!r}); leave it out.")
        if key in ("quiet", "continue") and value is False:  # these two have no form that begins with `--no-`
            continue
        if isinstance(value, list) and key not in REPEATABLE_OPTIONS:
            value = ",".join(map(str, value))
        name = key.replace("-", "_")
        if name in options:
            raise UserError(f"'{key}' in '{path}' stands there twice (got it with - and with _); leave one out.")
        options[name] = value
    return options


class TunedOptions(NamedTuple):
    """What `fedcli tune` has chosen for a method."""

    options: dict[str, Any]
    source: str  # where they come from, in words


def read_tuned(path: str | Path, method: Method, typed: Collection[str] = ()) -> TunedOptions:
    """Returns the options for a method that `fedcli tune` has written, and where they come from.

    They stand in the `tuned.json` of the folder, or, where several methods were tuned, of a folder by the method's
    name in it.

    Raises:
        UserError: It cannot be read, is of another method, or an option that is not `typed` names a user's file.
    """
    file = Path(path)
    if file.is_dir():
        file_of_method = file / method.name / TUNED
        file = file_of_method if file_of_method.is_file() else file / TUNED
    with reading(file, "what 'fedcli tune' wrote"):
        written = json.loads(file.read_text(encoding="utf-8"))
        if written["method"] != method.name:
            raise UserError(
                f"--tuned {path} has options of '{written['method']}' (got '{method.name}'); tune this one."
            )
        options = dict(written["options"])
        _refuse_unnamed_code({name: value for name, value in options.items() if name not in typed}, file)
        return TunedOptions(options, source=f"tuned by validation accuracy, seed {written['seed']}")


def list_tuned_methods(path: str | Path) -> set[str]:
    """Returns the names of the methods for which `fedcli tune` has written options, see `read_tuned`.

    Raises:
        UserError: There are none, or a file of them cannot be read.
    """
    folder = Path(path)
    files = [folder] if folder.is_file() else [*folder.glob(TUNED), *folder.glob(f"*/{TUNED}")]
    if not files:
        raise UserError(f"--tuned {path} has nothing that 'fedcli tune' wrote; name the folder of its --out.")
    names = set()
    for file in files:
        with reading(file, "what 'fedcli tune' wrote"):
            names.add(json.loads(file.read_text(encoding="utf-8"))["method"])
    return names
