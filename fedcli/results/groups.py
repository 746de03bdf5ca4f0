"""Runs in groups that agree in everything but the seed, which tables and figures have a row or a line of."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from fedcli import registry
from fedcli.errors import unknown
from fedcli.results.run_records import RunFacts
from fedcli.runs.identity import Settings, settings_of
from fedcli.runs.record import outcome_of
from fedcli.runs.schema import Record
from fedcli.runs.settings_text import settings_text

COMPARABLE = ["protocol", "dataset", "partition", "rounds", "train_examples", "selection"]


@dataclass(frozen=True)
class SeedGroup:
    """Runs that agree in everything but the seed.

    Attributes:
        title: The method, and those of its settings that most other groups do not have.
        method: The name of the method, or the user's label that stands for it.
        differing_settings: The settings in which the group differs from other groups.
        selection: The rule that selects the round of the headline.
        records: The records of the runs, sorted by seed.
    """

    title: str
    method: str
    differing_settings: Settings
    selection: str
    records: list[Record]

    @property
    def first(self) -> Record:
        """The record of the first seed."""
        return self.records[0]

    @property
    def all_failed(self) -> bool:
        """Whether all runs failed or diverged."""
        return all(outcome_of(record) in ("failed", "diverged") for record in self.records)

    @property
    def finished(self) -> list[Record]:
        """The records of the runs that finished."""
        return [record for record in self.records if outcome_of(record) == "finished"]


def select_records(
    records: Sequence[Record], methods: Sequence[str] = (), datasets: Sequence[str] = ()
) -> list[Record]:
    """Selects the records of some methods and data sets, whose names may be in any case.

    Args:
        records: The records.
        methods: The names of the methods; empty for all.
        datasets: The names of the data sets; empty for all.

    Raises:
        UserError: If no record is of one of these methods or data sets.
    """
    selected = _select(records, "method", methods, "method")
    return _select(selected, "dataset", datasets, "data set")


def _select(records: Sequence[Record], field: str, names: Sequence[str], kind: str) -> list[Record]:
    """Selects the records that have one of some names in a field; `kind` says in words what the field holds."""
    if not names:
        return list(records)
    present = {record[field].lower(): record[field] for record in records}
    for name in names:
        if name.lower() not in present:
            raise unknown(f"{kind} among the runs", name, present, f"there are {', '.join(present.values())}.")
    wanted = {name.lower() for name in names}
    return [record for record in records if record[field].lower() in wanted]


def group_by_leaderboard(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Groups records by protocol and data set, in order of appearance; returns them by "PROTOCOL, DATASET"."""
    by_leaderboard: dict[str, list[Record]] = {}
    for record in records:
        leaderboard = f"{record['protocol']}, {record['dataset']}"
        by_leaderboard.setdefault(leaderboard, []).append(record)
    return by_leaderboard


def group_runs(records: Iterable[Record], *, by_seed: bool = False) -> list[SeedGroup]:
    """Groups records that agree in everything but the seed, in order of appearance.

    Runs with other numerics or another label of the user are in another group. Of several runs with the same seed and
    the same parameters, one counts.

    Args:
        records: The records.
        by_seed: Whether each seed is a group of its own.
    """
    runs_by_group: dict[_GroupKey, dict[_RunIdentity, RunFacts]] = {}
    for record in records:
        run = RunFacts.of(record)
        group_key = _GroupKey(run.user_label, run.key, run.numerics, run.seed if by_seed else None)
        runs_by_identity = runs_by_group.setdefault(group_key, {})
        runs_by_identity.setdefault(_RunIdentity(run.seed, run.outcome, run.parameters), run)
    runs_of_groups = [list(runs_by_identity.values()) for runs_by_identity in runs_by_group.values()]
    settings_of_groups = [_find_compared_settings(runs[0]) for runs in runs_of_groups]
    num_groups_of_label = Counter(runs[0].user_label for runs in runs_of_groups)
    groups = []
    for runs, settings in zip(runs_of_groups, settings_of_groups, strict=True):
        method = runs[0].user_label or settings["method"]
        differing = _find_differing(settings, settings_of_groups)
        unusual = {name: value for name, value in differing.items() if _is_unusual(name, settings, settings_of_groups)}
        is_told_by_name = num_groups_of_label[method] == 1  # a user's label that one group has is enough
        by_seeds = sorted(runs, key=attrgetter("seed"))
        groups.append(SeedGroup(
            title=f"{method}, {settings_text(unusual)}" if unusual and not is_told_by_name else method,
            method=method,
            differing_settings=differing,
            selection=settings["selection"],
            records=[run.record for run in by_seeds],
        ))  # fmt: skip
    return groups


class _GroupKey(NamedTuple):
    """What the runs of a group have in common; the seed is None if a group may have several."""

    user_label: str
    settings_key: str
    numerics: str
    seed: int | None


class _RunIdentity(NamedTuple):
    """What tells the runs of a group apart, and copies of one run have in common."""

    seed: int
    outcome: str
    parameters: str | None


def _find_compared_settings(run: RunFacts) -> Settings:
    """Returns the settings of a run, with its numerics."""
    return {**run.settings, "numerics": run.numerics}


def _find_differing(settings: Settings, settings_of_groups: Sequence[Settings]) -> Settings:
    """Returns the settings in which a group differs from others."""
    differing = {}
    for name, value in settings.items():
        peers = _find_peers(name, settings, settings_of_groups)
        if name != "method" and any(peer[name] != value for peer in peers):
            differing[name] = value
    return differing


def _is_unusual(name: str, settings: Settings, settings_of_groups: Sequence[Settings]) -> bool:
    """Returns whether at most half of the compared groups have this group's value of a setting."""
    peers = _find_peers(name, settings, settings_of_groups)
    alike = [peer for peer in peers if peer[name] == settings[name]]
    return 2 * len(alike) <= len(peers)


def _find_peers(name: str, settings: Settings, settings_of_groups: Sequence[Settings]) -> list[Settings]:
    """Returns the settings of the groups that are compared by one setting.

    These are all groups, or those with the same method if not all groups have the setting.
    """
    with_setting = [other for other in settings_of_groups if name in other]
    if len(with_setting) == len(settings_of_groups) and name not in ("numerics", "code"):
        return with_setting
    return [other for other in with_setting if other["method"] == settings["method"]]


def find_comparable_groups(groups: Sequence[SeedGroup]) -> list[dict[int, SeedGroup]]:
    """Finds the groups whose numbers may be compared with each other; returns them by their indices in `groups`."""
    by_values: dict[tuple, dict[int, SeedGroup]] = {}
    for index, group in enumerate(groups):
        settings = settings_of(group.first)
        values = tuple(settings.get(name) for name in COMPARABLE)
        by_values.setdefault(values, {})[index] = group
    return list(by_values.values())


def find_shared_settings(records: Iterable[Record]) -> dict[str, Any]:
    """Finds which of protocol, data set and partition all records share; returns their values by name."""
    settings_of_records = [settings_of(record) for record in records]
    common = {}
    for name in ("protocol", "dataset", "partition"):
        values = {settings[name] for settings in settings_of_records}
        if len(values) == 1:
            common[name] = values.pop()
    return common


def find_tested_model(record: Record) -> str:
    """Finds which model the headline of a run is measured on.

    Returns:
        "global" or "personal"; empty if an older record does not tell.
    """
    method = registry.methods().get(record["method"])
    return record.get("tested") or (method.tested if method else "")
