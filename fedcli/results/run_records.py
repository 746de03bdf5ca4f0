"""The records of the runs under folders, and the numbers of their rounds and clients.

It does without pandas, which is slow to import, since the curve of a single run needs these too.
"""

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from fedcli.errors import UserError
from fedcli.results.record_numbers import ClassCounts, balanced_accuracy, class_accuracies, macro_f1
from fedcli.run_files import RECORD
from fedcli.runs.identity import Settings, key_of, settings_of
from fedcli.runs.loggers import flat_numbers
from fedcli.runs.machine import checkout
from fedcli.runs.record import outcome_of, read_record
from fedcli.runs.schema import Record

RoundNumbers = dict[str, float | None]  # of one round, by column
# Groups of numbers of a round that are accuracies, beside those whose name ends in "accuracy".
GROUPS_OF_ACCURACIES = ("domains", "intra", "inter", "clients", "macro_f1", "class_accuracy")


@dataclass(frozen=True)
class RunFacts:
    """A record, with what tells which runs are comparable.

    Attributes:
        record: The record.
        method: The name of the method.
        user_label: The label that stands in the place of the method's name; empty if the user has given none.
        seed: The seed.
        outcome: One of `fedcli.runs.record.RUN_OUTCOMES`.
        numerics: The versions of the arithmetic of the core and of the method, with a dot between them.
        images: The fingerprint of the images.
        partition: The fingerprint of the partition.
        parameters: The fingerprint of the final parameters; None if the record has none.
        settings: The settings, which say which experiment the run is.
        key: The hash of the settings.
    """

    record: Record
    method: str
    user_label: str
    seed: int
    outcome: str
    numerics: str
    images: str
    partition: str
    parameters: str | None
    settings: Settings
    key: str

    @classmethod
    def of(cls, record: Record) -> "RunFacts":
        """Collects the facts from a record."""
        settings = settings_of(record)
        return RunFacts(
            record=record,
            method=record["method"],
            user_label=record.get("label", ""),
            seed=record["seed"],
            outcome=outcome_of(record),
            numerics=".".join(map(str, record["numerics"].values())),
            images=record["dataset_fingerprint"],
            partition=record["partition"]["fingerprint"],
            parameters=record["summary"].get("params_sha256"),
            settings=settings,
            key=key_of(settings),
        )


@dataclass(frozen=True)
class ReadRun(RunFacts):
    """A record that was read from a file.

    Attributes:
        folder: The folder of the run.
    """

    folder: Path


class _FileVersion(NamedTuple):
    """What tells whether a file has changed: its time of change in nanoseconds, and its size in bytes."""

    changed: int
    size: int


class _ReadFile(NamedTuple):
    """What was read from a version of a record file; the run is None if the record cannot be read."""

    version: _FileVersion
    run: ReadRun | None


_read_files: dict[Path, _ReadFile] = {}  # since pages read each many times; of each the last version alone


def _find_run(file: Path) -> ReadRun | None:
    """Returns the run of a record file, which is read only if it has changed since it was last read.

    If the file cannot be read, warns and returns None.
    """
    try:
        stat = file.stat()
    except OSError as error:  # it was there when its folder was searched
        logging.getLogger("fedcli").warning("left out: '%s' cannot be read (%s)", file, error.strerror)
        return None
    version = _FileVersion(stat.st_mtime_ns, stat.st_size)
    if file not in _read_files or _read_files[file].version != version:
        _read_files[file] = _ReadFile(version, _read_run(file))
    return _read_files[file].run


def _read_run(file: Path) -> ReadRun | None:
    """Reads the run of a record file; if the record cannot be read, warns and returns None."""
    try:
        facts = RunFacts.of(read_record(file))
    except UserError as error:
        logging.getLogger("fedcli").warning("left out: %s", error)
        return None
    return ReadRun(**vars(facts), folder=file.parent)


def _find_record_files(folder: Path) -> list[Path]:
    """Finds the record files in a folder at any depth, sorted by path; a missing folder has none."""
    return sorted(folder.rglob(RECORD))


def read_runs(folders: Iterable[Path]) -> list[ReadRun]:
    """Reads the runs in folders at any depth, each once; a missing folder has none.

    Warns of records that cannot be read, and leaves them out.
    """
    files: dict[Path, Path] = {}
    for folder in folders:
        for file in _find_record_files(folder):
            files.setdefault(file.resolve(), file)
    runs = []
    for file in files.values():
        run = _find_run(file)
        if run is not None:
            runs.append(run)
    return runs


def find_records(paths: Iterable[str | Path], user_labels: Sequence[str] = ()) -> list[Record]:
    """Finds the records under some paths, each once, in the order of the paths and sorted by file within each.

    Args:
        paths: Record files, or folders that hold runs at any depth.
        user_labels: A label for each path, which stands in the place of the name of its runs' method, or before it if
            the runs are of several methods; empty for no labels.

    Returns:
        The records, each with the `folder` of its run, and with its `label` if labels are given.

    Raises:
        UserError: If a path holds no record, or one that cannot be read, or if labels are given and a run would have
            two.
    """
    roots = [Path(path) for path in paths]
    check_number_of_labels(user_labels, len(roots))
    records: dict[Path, Record] = {}
    for root, user_label in zip_longest(roots, user_labels):
        files = _find_record_files(root) if root.is_dir() else [root]
        if not files:
            raise UserError(f"there is no run in '{root}' (got no {RECORD} in it or below); give the folder of a run.")
        for file in files:
            record = {**read_record(file), "folder": file.parent}
            if user_labels:
                record["label"] = user_label
            first = records.setdefault(file.resolve(), record)
            if user_labels and first["label"] != user_label:
                raise UserError(
                    f"the run '{file.parent}' would have two labels (got --label '{first['label']}' and "
                    f"'{user_label}' for paths that both hold it); give paths that share no run."
                )
    if user_labels:
        _tell_methods_apart(records.values())
    return list(records.values())


def check_number_of_labels(user_labels: Sequence[str], num_paths: int) -> None:
    """Refuses labels that are not one for each path."""
    if len(user_labels) not in (0, num_paths):
        raise UserError(
            f"--label stands once for each path, in order (got {len(user_labels)} for {num_paths}); give {num_paths}."
        )


def _tell_methods_apart(records: Collection[Record]) -> None:
    """Appends the method to each label that runs of several methods have."""
    methods: dict[str, set[str]] = {}  # by label
    for record in records:
        methods.setdefault(record["label"], set()).add(record["method"])
    for record in records:
        if len(methods[record["label"]]) > 1:
            record["label"] += f": {record['method']}"


def select_finished(records: list[Record]) -> list[Record]:
    """Selects the records of finished runs.

    Raises:
        UserError: If no run has finished.
    """
    finished = [record for record in records if record["status"] == "finished"]
    if not finished:
        raise UserError(f"no run has finished (got {len(records)} unfinished); 'fedcli resume RUN' takes one up again.")
    return finished


def list_round_numbers(record: Record) -> list[RoundNumbers]:
    """Lists the numbers of each round of a run, by column; see `fedcli.results.run_tables.tabulate_rounds`.

    A number that a round does not have is missing or None.
    """
    rows = []
    for entry in record["rounds"]:
        row: RoundNumbers = {"round": entry["round"] + 1, "test_accuracy": None, **flat_numbers(entry)}
        if "per_class" in entry:
            row |= _compute_class_scores(entry["per_class"], record["class_names"])
        rows.append({name: _to_percent(name, number) for name, number in row.items()})
    return rows


def _to_percent(name: str, number: float | None) -> float | None:
    """Returns the number of a column as it is, or in percent if it is an accuracy."""
    group, slash, _ = name.partition("/")
    is_own_accuracy = name.endswith("_accuracy") and not slash  # a user's term may be called so too
    if number is None or not (is_own_accuracy or group in GROUPS_OF_ACCURACIES):
        return number
    return 100 * number


def _compute_class_scores(counts: ClassCounts, class_names: Sequence[str]) -> dict[str, float | None]:
    """Computes the scores that follow from a round's counts of the classes, as fractions, by column."""
    scores: dict[str, float | None] = {"macro_f1": macro_f1(counts), "balanced_accuracy": balanced_accuracy(counts)}
    for name, accuracy in zip(class_names, class_accuracies(counts), strict=True):
        scores[f"class_accuracy/{name}"] = accuracy
    return scores


def list_client_accuracies(record: Record) -> list[float | None]:
    """Lists the accuracy in percent of each client of a run after the last round; None for one that was not tested."""
    measured = (record["rounds"] or [{}])[-1].get("client_accuracy") or {}
    accuracies = []
    for client, _ in enumerate(record["partition"]["sizes"]):
        accuracy = measured.get(str(client))
        accuracies.append(None if accuracy is None else 100 * accuracy)
    return accuracies


def find_shipped_folders() -> list[Path]:
    """Returns the folder of the checkout's records in a list, which is empty if the package has no checkout."""
    folder = checkout()
    return [folder / "results" / "records"] if folder else []
