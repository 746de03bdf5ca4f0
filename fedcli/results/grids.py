"""Planned runs of a grid: all methods with all combinations of options' values and all seeds.

A grid finds its runs by their folders.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fedcli.declarations import Method
from fedcli.errors import UserError
from fedcli.results.method_options import assign_options, find_methods, select_options
from fedcli.results.plans import Plan, PlannedRun
from fedcli.runs.begin import ResolvedRun, new_folder, record_to_continue, refuse_existing, resolve_runs
from fedcli.runs.identity import planned_settings
from fedcli.runs.origins import TYPED, GivenOptions
from fedcli.runs.prepare import load_data
from fedcli.runs.settings_text import settings_text
from fedcli.userfiles import short_name


@dataclass(frozen=True)
class GridPoint:
    """A method with one value for each option that has several.

    Attributes:
        method: The method.
        varied: The values at this point, by option, of the options that have several.
        runs: The runs, one for each seed.
    """

    method: Method
    varied: dict[str, Any]
    runs: tuple[PlannedRun, ...]

    @property
    def title(self) -> str:
        """The title of its runs."""
        return self.runs[0].title


@dataclass(frozen=True)
class GridPlan(Plan):
    """The runs of all points of a grid."""

    points: tuple[GridPoint, ...]


def plan_grid(
    names: Sequence[str], given: GivenOptions, *, seeds: Iterable[int] | None = None,
    out: str | Path | None = None, continue_: bool | None = None,
    method_options: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> GridPlan:  # fmt: skip
    """Plans the runs of all methods with all combinations of options' values and all seeds; nothing is run.

    Args:
        names: The names of the methods, or the paths of their files.
        given: The options of all runs; an option that only some of the methods have is for these alone.
        seeds: The seeds of each combination; if None, the seed of `given`.
        out: The folder; if None, `runs/<time>-<method>-<data set>`. Runs stand in it as
            `<method>/<option>=<value>,…/seed-<seed>`, without the parts that all runs share.
        continue_: Whether to go on with runs in `out` that the same call has made.
        method_options: The options of single methods, by the method's name; they go before `given`.

    Raises:
        UserError: If one of the runs cannot start.
    """
    methods = find_methods(names)
    if continue_ and out is None:
        raise UserError("--continue needs a folder (got no --out); name it with --out.")
    seeds = None if seeds is None else list(seeds)
    own_options = assign_options(methods, method_options, given.values.get("post"))
    resolved_points = []
    for name, method in methods.items():
        options_for_method = select_options(method, methods, given.values)
        given_to_method = replace(given, values=options_for_method).with_typed(own_options[name])
        grid = {}
        for option, values in given_to_method.values.items():
            if isinstance(values, tuple):
                grid[option] = drop_repeated(values)
        for combination in itertools.product(*grid.values()):
            varied = dict(zip(grid, combination, strict=True))
            given_at_point = replace(given_to_method, values={**given_to_method.values, **varied})
            runs = resolve_runs(name, given_at_point, out=Path(), seeds=seeds)
            point = _ResolvedPoint(name, method, varied=varied, given=given_at_point, runs=runs)
            resolved_points.append(point)
    first_run = resolved_points[0].runs[0]
    folder = Path(out or new_folder(first_run.setup))
    has_several_methods = len(methods) > 1
    points = [
        _plan_point(point, folder, has_several_methods=has_several_methods, continue_=bool(continue_))
        for point in resolved_points
    ]
    _refuse_shared_folders(points)
    return GridPlan(folder, list_runs(points), tuple(points))


def drop_repeated(values: tuple) -> tuple:
    """Drops repeated values and keeps the order; the values need not be hashable, since a list may be among them."""
    distinct: list[Any] = []
    for value in values:
        if value not in distinct:
            distinct.append(value)
    return tuple(distinct)


def list_runs(points: Iterable[GridPoint]) -> tuple[PlannedRun, ...]:
    """Lists the runs of some points of a grid, in their order."""
    return tuple(itertools.chain.from_iterable(point.runs for point in points))


def describe_protocols(runs: Iterable[PlannedRun]) -> str:
    """Describes which methods of a comparison run under which protocol; returns an empty text if all have the same."""
    protocols_by_method: dict[str, dict[str, None]] = {}
    for run in runs:
        protocols_by_method.setdefault(run.setup.method.name, {})[run.setup.protocol.name] = None
    methods_by_protocols: dict[str, list[str]] = {}
    for method, names in protocols_by_method.items():
        methods_by_protocols.setdefault(", ".join(names), []).append(method)
    if len(methods_by_protocols) < 2:
        return ""
    parts = "; ".join(f"{names}: {', '.join(methods)}" for names, methods in methods_by_protocols.items())
    most_common = max(methods_by_protocols, key=lambda names: len(methods_by_protocols[names]))
    return (
        f"these methods have different protocols, so that clients and training differ too ({parts}); give all of them "
        f"one, such as --protocol={most_common}"
    )


class _ResolvedPoint(NamedTuple):
    """A point of a grid whose runs can start, before their folders and records are known.

    Attributes:
        name_in_command: The method as the command names it.
        method: The method.
        varied: The values at this point, see `GridPoint`.
        given: The options of its runs, without their seeds.
        runs: The runs, in folders relative to that of the point.
    """

    name_in_command: str
    method: Method
    varied: dict[str, Any]
    given: GivenOptions
    runs: list[ResolvedRun]


def _make_name_for_folder(value: Any) -> str:
    """Makes a part of a folder's name from a value: without the path of a user's file, and never a path itself."""
    return short_name(str(value)).replace("/", "-")


def _refuse_shared_folders(points: Iterable[GridPoint]) -> None:
    """Refuses values whose runs would have the same folder, as two parts of one name in two files of the user."""
    values_by_folder: dict[Path, dict[str, Any]] = {}
    for point in points:
        folder = point.runs[0].folder
        values = values_by_folder.setdefault(folder, point.varied)
        if values != point.varied:
            got = " and ".join(settings_text(varied) for varied in (values, point.varied))
            raise UserError(f"two runs would have the folder '{folder}' (got {got}); give their parts different names.")


def _plan_point(point: _ResolvedPoint, folder: Path, *, has_several_methods: bool, continue_: bool) -> GridPoint:
    """Plans the runs of a point of a grid in the folder of the grid, where they may have begun.

    Titles and folders name the method where the grid has several.
    """
    name_of_method = point.method.name if has_several_methods else ""
    values_text = ",".join(f"{option}={_make_name_for_folder(value)}" for option, value in point.varied.items())
    point_folder = folder / name_of_method / values_text
    title = ", ".join(filter(None, [name_of_method, settings_text(point.varied)])) or point.method.name
    runs = []
    for resolved in point.runs:
        setup = resolved.setup
        run_folder = point_folder / resolved.folder
        record = None
        if continue_:
            record = record_to_continue(setup, run_folder)
        else:
            refuse_existing(run_folder)
        if record is None:
            load_data(setup)  # refuses data that are not there or do not suit the run, before any run begins
        given = point.given
        if setup.origins["seed"] == TYPED:  # of several seeds, the one of this run
            given = given.with_typed({"seed": setup.config.seed})
        run = PlannedRun(
            title=title,
            method_source=point.name_in_command,
            given=given,
            setup=setup,
            settings=planned_settings(setup),
            folder=run_folder,
            record=record,
        )
        runs.append(run)
    return GridPoint(point.method, point.varied, tuple(runs))
