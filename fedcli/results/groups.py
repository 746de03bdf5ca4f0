"""Runs in groups that agree in everything but the seed, which tables and figures have a row or a line of."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedcli import registry
from fedcli.errors import unknown
from fedcli.results.frame import frame_of
from fedcli.runs.identity import settings, settings_text

COMPARABLE = ["protocol", "dataset", "partition", "rounds", "train_examples", "selection"]


@dataclass(frozen=True)
class SeedGroup:
    """Runs that agree in everything but the seed."""

    label: str  # the method and its settings that most other groups do not have
    method: str  # its name, or the label that stands for it
    settings: dict[str, Any]  # those in which it differs from other groups
    selection: str  # the rule behind the headline
    records: list[dict]  # the runs, by seed

    @property
    def first(self) -> dict:
        """The run of the first seed."""
        return self.records[0]

    @property
    def has_failed(self) -> bool:
        """Whether all runs failed."""
        return all(record["status"] == "failed" for record in self.records)

    @property
    def finished(self) -> list[dict]:
        """The runs that finished."""
        return [record for record in self.records if record["status"] == "finished"]


def select_records(records: Sequence[dict], methods: Sequence[str] = (), datasets: Sequence[str] = ()) -> list[dict]:
    """The records of these methods and data sets, of all if none is named; case does not count.

    Raises:
        UserError: If no record is of a named one.
    """
    of_methods = _select(records, "method", methods, "method")
    return _select(of_methods, "dataset", datasets, "data set")


def _select(records: Sequence[dict], field: str, names: Sequence[str], kind: str) -> list[dict]:
    """The records with one of these names in a field; `kind` is what the field holds, in words."""
    if not names:
        return list(records)
    present = {record[field].lower(): record[field] for record in records}
    for name in names:
        if name.lower() not in present:
            raise unknown(f"{kind} among the runs", name, present, f"there are {', '.join(present.values())}.")
    wanted = {name.lower() for name in names}
    return [record for record in records if record[field].lower() in wanted]


def boards(records: Iterable[dict]) -> dict[str, list[dict]]:
    """The records by protocol and data set, in order of appearance."""
    by_board: dict[str, list[dict]] = {}
    for record in records:
        board = f"{record['protocol']}, {record['dataset']}"
        by_board.setdefault(board, []).append(record)
    return by_board


def group(records: Iterable[dict], by_seed: bool = False) -> list[SeedGroup]:
    """The records as groups that agree in everything but the seed, in order of appearance.

    Numerics and labels divide groups, and if `by_seed`, seeds. Of runs with the same seed and parameters, one counts.
    """
    runs = frame_of(records).drop_duplicates(["label", "key", "numerics", "seed", "state", "parameters"])
    division = ["label", "key", "numerics"]
    if by_seed:
        division.append("seed")
    parts = [part for _, part in runs.groupby(division, sort=False)]
    labels = [part["label"].iloc[0] for part in parts]
    compared = [_compared_settings(part) for part in parts]
    groups = []
    for part, label, values in zip(parts, labels, compared, strict=True):
        differing = _differing(values, compared)
        unusual = {name: value for name, value in differing.items() if _is_unusual(name, values, compared)}
        name = label or values["method"]
        is_told_by_name = labels.count(name) == 1  # a user's label that one group has is enough
        full_name = f"{name}, {settings_text(unusual)}" if unusual and not is_told_by_name else name
        members = part.sort_values("seed", kind="stable")["record"].tolist()
        groups.append(SeedGroup(full_name, name, differing, values["selection"], members))
    return groups


def _compared_settings(runs: pd.DataFrame) -> dict[str, Any]:
    """The settings of the runs of a group, and their numerics."""
    return {**runs["settings"].iloc[0], "numerics": runs["numerics"].iloc[0]}


def _differing(values: Mapping[str, Any], compared: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings in which a group differs from others."""
    differing = {}
    for name, value in values.items():
        peers = _peers(name, values, compared)
        if name != "method" and any(other[name] != value for other in peers):
            differing[name] = value
    return differing


def _is_unusual(name: str, values: Mapping[str, Any], compared: Sequence[Mapping[str, Any]]) -> bool:
    """Whether at most half of the compared groups have this group's value of a setting."""
    peers = _peers(name, values, compared)
    same = [other for other in peers if other[name] == values[name]]
    return 2 * len(same) <= len(peers)


def _peers(name: str, values: Mapping[str, Any], compared: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The groups that a setting is compared among: all, or those of the method where it is not an option of all."""
    having = [other for other in compared if name in other]
    if len(having) == len(compared) and name not in ("numerics", "code"):
        return having
    return [other for other in having if other["method"] == values["method"]]


def comparable(groups: Sequence[SeedGroup]) -> list[list[int]]:
    """The indices of groups whose numbers are compared with each other."""
    compared = pd.DataFrame([settings(member.records[0]) for member in groups], dtype=object)
    return [list(indices) for indices in compared.groupby(COMPARABLE, dropna=False).groups.values()]


def agreed(records: Iterable[dict]) -> dict[str, Any]:
    """Those of protocol, data set and partition in which all records agree."""
    compared = [settings(record) for record in records]
    same = {}
    for name in ("protocol", "dataset", "partition"):
        values = {of_record[name] for of_record in compared}
        if len(values) == 1:
            same[name] = values.pop()
    return same


def tested_model(record: dict) -> str:
    """Which model the headline of a run is of, "global" or "personal"; empty where an older record cannot tell."""
    method = registry.methods().get(record["method"])
    return record.get("tested") or (method.tested if method else "")
