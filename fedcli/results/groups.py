"""Runs in groups that agree in everything but the seed, which tables and figures have a row or a line of."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fedcli import registry
from fedcli.errors import unknown
from fedcli.results.frame import tabulate_runs
from fedcli.runs.identity import Settings, settings_of
from fedcli.runs.record import outcome_of
from fedcli.runs.schema import Record
from fedcli.runs.settings_text import settings_text

COMPARABLE = ["protocol", "dataset", "partition", "rounds", "train_examples", "selection"]


@dataclass(frozen=True)
class SeedGroup:
    """Runs that agree in everything but the seed."""

    title: str  # the method and its settings that most other groups do not have
    method: str  # its name, or the user's label that stands for it
    differing_settings: Settings  # those in which it differs from other groups
    selection: str  # the rule behind the headline
    records: list[Record]  # the runs, by seed

    @property
    def first(self) -> Record:
        """The run of the first seed."""
        return self.records[0]

    @property
    def all_failed(self) -> bool:
        """Whether no run came to its end, since all failed or diverged."""
        return all(outcome_of(record) in ("failed", "diverged") for record in self.records)

    @property
    def finished(self) -> list[Record]:
        """The runs that finished."""
        return [record for record in self.records if outcome_of(record) == "finished"]


def select_records(
    records: Sequence[Record], methods: Sequence[str] = (), datasets: Sequence[str] = ()
) -> list[Record]:
    """The records of these methods and data sets, of all if none is named; case does not count.

    Raises:
        UserError: If no record is of a named one.
    """
    selected = _select(records, "method", methods, "method")
    return _select(selected, "dataset", datasets, "data set")


def _select(records: Sequence[Record], field: str, names: Sequence[str], kind: str) -> list[Record]:
    """The records with one of these names in a field; `kind` is what the field holds, in words."""
    if not names:
        return list(records)
    present = {record[field].lower(): record[field] for record in records}
    for name in names:
        if name.lower() not in present:
            raise unknown(f"{kind} among the runs", name, present, f"there are {', '.join(present.values())}.")
    wanted = {name.lower() for name in names}
    return [record for record in records if record[field].lower() in wanted]


def group_by_leaderboard(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The records by protocol and data set, in order of appearance."""
    by_leaderboard: dict[str, list[Record]] = {}
    for record in records:
        leaderboard = f"{record['protocol']}, {record['dataset']}"
        by_leaderboard.setdefault(leaderboard, []).append(record)
    return by_leaderboard


def group_runs(records: Iterable[Record], *, by_seed: bool = False) -> list[SeedGroup]:
    """The records as groups that agree in everything but the seed, in order of appearance.

    Numerics and labels divide groups, and if `by_seed`, seeds. Of runs with the same seed and parameters, one counts.
    """
    runs = tabulate_runs(records).drop_duplicates(["user_label", "key", "numerics", "seed", "outcome", "parameters"])
    common = ["user_label", "key", "numerics"]
    if by_seed:
        common.append("seed")
    frames = [group_frame for _, group_frame in runs.groupby(common, sort=False)]
    user_labels = [group_frame["user_label"].iloc[0] for group_frame in frames]
    settings_of_groups = [_find_compared_settings(group_frame) for group_frame in frames]
    groups = []
    for group_frame, user_label, settings in zip(frames, user_labels, settings_of_groups, strict=True):
        method = user_label or settings["method"]
        differing = _find_differing(settings, settings_of_groups)
        unusual = {name: value for name, value in differing.items() if _is_unusual(name, settings, settings_of_groups)}
        is_told_by_name = user_labels.count(method) == 1  # a user's label that one group has is enough
        group_records = group_frame.sort_values("seed", kind="stable")["record"].tolist()
        groups.append(SeedGroup(
            title=f"{method}, {settings_text(unusual)}" if unusual and not is_told_by_name else method,
            method=method,
            differing_settings=differing,
            selection=settings["selection"],
            records=group_records,
        ))  # fmt: skip
    return groups


def _find_compared_settings(runs: pd.DataFrame) -> Settings:
    """The settings of the runs of a group, and their numerics."""
    return {**runs["settings"].iloc[0], "numerics": runs["numerics"].iloc[0]}


def _find_differing(settings: Settings, settings_of_groups: Sequence[Settings]) -> Settings:
    """The settings in which a group differs from others."""
    differing = {}
    for name, value in settings.items():
        peers = _find_peers(name, settings, settings_of_groups)
        if name != "method" and any(peer[name] != value for peer in peers):
            differing[name] = value
    return differing


def _is_unusual(name: str, settings: Settings, settings_of_groups: Sequence[Settings]) -> bool:
    """Whether at most half of the compared groups have this group's value of a setting."""
    peers = _find_peers(name, settings, settings_of_groups)
    alike = [peer for peer in peers if peer[name] == settings[name]]
    return 2 * len(alike) <= len(peers)


def _find_peers(name: str, settings: Settings, settings_of_groups: Sequence[Settings]) -> list[Settings]:
    """The groups that a setting is compared among: all, or those of the method where it is not an option of all."""
    with_setting = [other for other in settings_of_groups if name in other]
    if len(with_setting) == len(settings_of_groups) and name not in ("numerics", "code"):
        return with_setting
    return [other for other in with_setting if other["method"] == settings["method"]]


def find_comparable_groups(groups: Sequence[SeedGroup]) -> list[list[int]]:
    """The indices of groups whose numbers are compared with each other."""
    compared = pd.DataFrame([settings_of(group.first) for group in groups], dtype=object)
    return [list(indices) for indices in compared.groupby(COMPARABLE, dropna=False).groups.values()]


def find_shared_settings(records: Iterable[Record]) -> dict[str, Any]:
    """Those of protocol, data set and partition in which all records agree."""
    settings_of_records = [settings_of(record) for record in records]
    common = {}
    for name in ("protocol", "dataset", "partition"):
        values = {settings[name] for settings in settings_of_records}
        if len(values) == 1:
            common[name] = values.pop()
    return common


def find_tested_model(record: Record) -> str:
    """Which model the headline of a run is of, "global" or "personal"; empty where an older record cannot tell."""
    method = registry.methods().get(record["method"])
    return record.get("tested") or (method.tested if method else "")
