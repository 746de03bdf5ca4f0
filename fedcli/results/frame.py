"""The runs under folders, a row each, and the rounds and clients of a run as tables."""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedcli.errors import UserError
from fedcli.results.metrics import ClassCounts, balanced_accuracy, class_accuracies, macro_f1
from fedcli.runs.identity import FIRST_SETTINGS, Settings, key_of, settings_of
from fedcli.runs.loggers import flat_numbers
from fedcli.runs.machine import checkout
from fedcli.runs.record import RECORD, outcome_of, read_record
from fedcli.runs.schema import Record

# Groups of numbers of a round that are accuracies, beside those whose name ends in "accuracy".
GROUPS_OF_ACCURACIES = ("domains", "intra", "inter", "clients", "macro_f1", "class_accuracy")


class RunRow(NamedTuple):
    """A record that was read from a file, with what tells which runs are comparable."""

    folder: Path
    record: Record
    method: str
    user_label: str  # in the place of the method's name; empty without one
    seed: int
    outcome: str  # one of `fedcli.runs.record.RUN_OUTCOMES`
    numerics: str  # the versions of the arithmetic of core and method, with a dot between them
    images: str  # a fingerprint, as the next two
    partition: str
    parameters: str | None
    settings: Settings  # which say which experiment the run is
    key: str  # the hash of the settings


def tabulate_runs(records: Iterable[Record]) -> pd.DataFrame:
    """Records as a table, a row a run, with the fields of `RunRow` but for the folder as columns."""
    columns = [name for name in RunRow._fields if name != "folder"]
    return pd.DataFrame([_collect_facts(record) for record in records], columns=columns)


def _collect_facts(record: Record) -> dict[str, Any]:
    """The fields of `RunRow` but for the folder."""
    settings = settings_of(record)
    return {
        "record": record,
        "method": record["method"],
        "user_label": record.get("label", ""),
        "seed": record["seed"],
        "outcome": outcome_of(record),
        "numerics": ".".join(map(str, record["numerics"].values())),
        "images": record["dataset_fingerprint"],
        "partition": record["partition"]["fingerprint"],
        "parameters": record["summary"].get("params_sha256"),
        "settings": settings,
        "key": key_of(settings),
    }


class _FileVersion(NamedTuple):
    """What tells whether a file has changed."""

    changed: int  # in nanoseconds
    size: int


class _ReadFile(NamedTuple):
    """What was read from a record file."""

    version: _FileVersion
    row: RunRow | None  # None where the record cannot be read


_read_files: dict[Path, _ReadFile] = {}  # since pages read each many times; of each the last version alone


def _find_row(file: Path) -> RunRow | None:
    """The row of a record file, which is read again if it has changed; None after a warning."""
    try:
        stat = file.stat()
    except OSError as error:  # it was there when its folder was searched
        logging.getLogger("fedcli").warning("left out: '%s' cannot be read (%s)", file, error.strerror)
        return None
    version = _FileVersion(stat.st_mtime_ns, stat.st_size)
    if file not in _read_files or _read_files[file].version != version:
        _read_files[file] = _ReadFile(version, _read_row(file))
    return _read_files[file].row


def _read_row(file: Path) -> RunRow | None:
    """The row of a record file; None after a warning where it cannot be read."""
    try:
        return RunRow(folder=file.parent, **_collect_facts(read_record(file)))
    except UserError as error:
        logging.getLogger("fedcli").warning("left out: %s", error)
        return None


def _find_record_files(folder: Path) -> list[Path]:
    """The records of the runs in a folder at any depth, by path; a missing folder has none."""
    return sorted(folder.rglob(RECORD))


def read_runs(folders: Iterable[Path]) -> list[RunRow]:
    """The readable runs in folders at any depth, each once; a missing folder has none."""
    files: dict[Path, Path] = {}
    for folder in folders:
        for file in _find_record_files(folder):
            files.setdefault(file.resolve(), file)
    rows = []
    for file in files.values():
        row = _find_row(file)
        if row is not None:
            rows.append(row)
    return rows


def find_records(paths: Iterable[str | Path], user_labels: Sequence[str] = ()) -> list[Record]:
    """The records under `paths`, each once and with its `folder`, in the order given and by path within each.

    Args:
        paths: Record files, or folders that hold runs at any depth.
        user_labels: For each path a name for its runs in place of their method, or before it if they are of several
            methods, the `label` of the records; or none.

    Raises:
        UserError: If a path holds no record, or one that cannot be read.
    """
    roots = [Path(path) for path in paths]
    if len(user_labels) not in (0, len(roots)):
        raise UserError(
            f"--label stands once for each path, in order (got {len(user_labels)} for {len(roots)}); give {len(roots)}."
        )
    records: dict[Path, Record] = {}
    for root, user_label in zip_longest(roots, user_labels):
        files = _find_record_files(root) if root.is_dir() else [root]
        if not files:
            raise UserError(f"there is no run in '{root}' (got no {RECORD} in it or below); give the folder of a run.")
        for file in files:
            record = {**read_record(file), "folder": file.parent}
            if user_labels:
                record["label"] = user_label
            records.setdefault(file.resolve(), record)
    if user_labels:
        _tell_methods_apart(records.values())
    return list(records.values())


def _tell_methods_apart(records: Collection[Record]) -> None:
    """Puts the method behind each label that runs of several methods have."""
    methods: dict[str, set[str]] = {}  # by label
    for record in records:
        methods.setdefault(record["label"], set()).add(record["method"])
    for record in records:
        if len(methods[record["label"]]) > 1:
            record["label"] += f": {record['method']}"


def select_finished(records: list[Record]) -> list[Record]:
    """The finished runs among records.

    Raises:
        UserError: If no run has finished.
    """
    finished = [record for record in records if record["status"] == "finished"]
    if not finished:
        raise UserError(f"no run has finished (got {len(records)} unfinished); 'fedcli resume RUN' takes one up again.")
    return finished


def tabulate_rounds(record: Record) -> pd.DataFrame:
    """The numbers of a run's rounds, a row each: `round` counts from 1, accuracies are in percent.

    Other columns are `terms/<name>`, `seconds/<part>`, `domains/<name>` and so on, with `--per-class` also `macro_f1`,
    `balanced_accuracy` and `class_accuracy/<name>`; NaN stands for a missing number.
    """
    rows = []
    for entry in record["rounds"]:
        row = {"round": entry["round"] + 1, "test_accuracy": None, **flat_numbers(entry)}
        if "per_class" in entry:
            row |= _compute_class_scores(entry["per_class"], record["class_names"])
        rows.append(row)
    table = pd.DataFrame(rows, columns=None if rows else ["round", "test_accuracy"]).astype({"test_accuracy": float})
    for name in table:
        group, slash, _ = name.partition("/")
        is_own_accuracy = name.endswith("_accuracy") and not slash  # a user's term may be called so too
        if is_own_accuracy or group in GROUPS_OF_ACCURACIES:
            table[name] *= 100
    return table


def _compute_class_scores(counts: ClassCounts, class_names: Sequence[str]) -> dict[str, float | None]:
    """What a round's counts of the classes say, as fractions, by column."""
    scores: dict[str, float | None] = {"macro_f1": macro_f1(counts), "balanced_accuracy": balanced_accuracy(counts)}
    for name, accuracy in zip(class_names, class_accuracies(counts), strict=True):
        scores[f"class_accuracy/{name}"] = accuracy
    return scores


def tabulate_clients(record: Record) -> pd.DataFrame:
    """The clients of a run, a row each: `client`, from 0, `accuracy`, `examples` and `class/<name>`, their number.

    The accuracy is that after the last round in percent; NaN if there is none, see `fedcli.core.evaluation.evaluate`.
    """
    division = record["partition"]
    measured = (record["rounds"] or [{}])[-1].get("client_accuracy") or {}
    accuracies = [100 * measured.get(str(client), np.nan) for client, _ in enumerate(division["sizes"])]
    table = pd.DataFrame({"client": range(len(accuracies)), "accuracy": accuracies, "examples": division["sizes"]})
    return table.join(pd.DataFrame(division["class_counts"], columns=record["class_names"]).add_prefix("class/"))


def tabulate_client_rounds(record: Record) -> pd.DataFrame:
    """The clients' accuracies in percent in the rounds that a run's record has them of, a row each.

    The columns are `round`, from 1, `client`, from 0, and `accuracy`. Those rounds are the selected one, the last, and
    with `--per-client-every` every n-th.
    """
    rows = []
    for entry in record["rounds"]:
        accuracies = entry.get("client_accuracy")  # a fraction for each client; None where they were not tested
        if accuracies is None:
            continue
        for client, accuracy in accuracies.items():
            rows.append((entry["round"] + 1, int(client), 100 * accuracy))
    return pd.DataFrame(rows, columns=["round", "client", "accuracy"])


def tabulate_all(records: Iterable[Record], tabulate: Callable[[Record], pd.DataFrame]) -> pd.DataFrame:
    """Tabulates the rounds or clients of several runs.

    Args:
        records: The runs.
        tabulate: What makes the table of one run, as `tabulate_rounds` or `tabulate_clients`.

    Returns:
        The rows of all runs, with further columns before them that tell the runs apart.
    """
    frames = []
    for record in records:
        frame = tabulate(record)
        settings = settings_of(record)
        run_columns = {name: settings[name] for name in FIRST_SETTINGS}
        run_columns |= {"seed": record["seed"], "settings": key_of(settings)}
        if "label" in record:
            run_columns["method"] = record["label"]
        frames.append(frame.assign(**run_columns)[[*run_columns, *frame]])
    return pd.concat(frames, ignore_index=True)


def find_shipped_folders() -> list[Path]:
    """The folder of the checkout's records; none if the package is installed without a checkout."""
    folder = checkout()
    return [folder / "results" / "records"] if folder else []
