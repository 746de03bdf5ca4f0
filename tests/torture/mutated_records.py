"""Real records of which a part is another."""

import json
import math
import random
import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import fedcli
from fedcli import registry
from fedcli.declarations import Claim
from fedcli.figures import line_charts, report, saving
from fedcli.results import claims, tables
from fedcli.results.render import render
from fedcli.results.run_records import find_records
from fedcli.results.run_tables import tabulate_all, tabulate_clients, tabulate_rounds
from fedcli.run_files import RECORD
from fedcli.runs.exports import export
from fedcli.runs.identity import digest_of
from fedcli.runs.record import read_record
from fedcli.runs.schema import FIRST_OPTIONS
from tests.torture.faults import attempt
from tests.torture.nested_parts import VALUES, entry_at, paths_in
from tests.torture.signed_files import sign_record
from tests.torture.source_runs import run_with_features

COMMITTED_RECORDS = Path(__file__).parents[2] / "results" / "records"
NAMES = ("", "another", "-1", "99", "٣", "9" * 5000, "x" * 300)
FORBIDDEN_TEXTS = ("\ud800", "\0")
UNREAD_PARTS = {"reduced", "public"}  # parts of older records


@lru_cache
def real_records() -> list[Path]:
    """Returns the files of real records: first one of a run with features and models, then the committed ones."""
    return [run_with_features().folder / RECORD, *sorted(COMMITTED_RECORDS.rglob(RECORD))]


class Mutation(NamedTuple):
    """A change in a part of a real record."""

    record: dict[str, Any]  # with the change
    path: tuple  # to the part
    change: str  # what the part is now
    must_refuse: bool


def mutate(draw: random.Random) -> Mutation:
    """Removes a part of a real record, gives it another name or another value."""
    files = real_records()
    file = draw.choice([files[0]] * 8 + files)  # the one with features is drawn more often than each other
    record = json.loads(file.read_text())
    record.pop("digest", None)

    path = draw.choice(sorted({*paths_in(record)}, key=str))
    container, key = entry_at(record, path)
    chance = draw.random()

    is_removed = chance < 0.15
    if is_removed:
        del container[key]
        return Mutation(record, path, "removed", must_refuse=False)

    is_renamed = chance < 0.3 and isinstance(key, str)
    if is_renamed:
        name = draw.choice(NAMES)
        container[name] = container.pop(key)
        return Mutation(record, path, f"now '{name:.40}'", must_refuse=False)

    old = container[key]
    new = draw.choice(VALUES)
    container[key] = new
    return Mutation(record, path, f"{new!r:.40}", must_refuse=is_wrong(path, old, new))


def is_wrong(path: tuple, old: Any, new: Any) -> bool:
    """Returns whether a record must be refused whose part at a path has a new value."""
    section = path[0]
    if section in UNREAD_PARTS:
        return False
    if new is None or old is None:  # for a part that a run has not
        return False
    if isinstance(new, float) and not math.isfinite(new):
        return True
    if is_number(old) and is_number(new):
        was_count = type(old) is int and section != "config" and "terms" not in path
        is_count = type(new) is int and new >= 0
        return was_count and not is_count
    if type(old) is type(new):
        return isinstance(new, str) and new in FORBIDDEN_TEXTS
    if section == "config":  # where an option may be a number or a text
        return type(new) in (list, dict) or path[-1] in FIRST_OPTIONS
    return True


def is_number(value: Any) -> bool:
    """Returns whether a value is a number, which True and False are not."""
    return type(value) in (int, float)


def read_mutated_record(number: int) -> str | None:
    """A real record with another part is refused in a line where it is read, or taken by all that reads records."""
    mutation = mutate(random.Random(number))
    dotted_path = ".".join(map(str, mutation.path))
    description = f"{dotted_path} {mutation.change}"
    with TemporaryDirectory() as parent:
        folder = Path(parent, "run")
        if "quality" in mutation.record:
            shutil.copytree(run_with_features().folder, folder)
        folder.mkdir(exist_ok=True)
        sign_record(folder, mutation.record)

        record_read, fault = attempt(lambda: read_record(folder), description)
        if record_read is None:
            return fault
        if mutation.must_refuse:
            return f"{description}: not refused"
        return fault_of_readers(folder, record_read, description)


def fault_of_readers(folder: Path, record: dict[str, Any], description: str) -> str | None:
    """Returns the first fault of all that reads records; None where there is none."""
    records = find_records([folder])

    def render_tables() -> None:
        for table in tables.build_tables(records):
            for form in ("markdown", "latex", "csv"):
                render(table, form)

    def read_clients_and_rounds() -> None:
        tabulate_all(records, tabulate_clients)
        tabulate_all(records, tabulate_rounds)

    readers: dict[str, Callable[[], object]] = {
        "table": render_tables,
        "clients": read_clients_and_rounds,
        "plot": lambda: saving.write_figure(folder / "curves.svg", line_charts.learning_curves, records),
        "report": lambda: report.make_report(records),
        "claims": lambda: claims.answer_claims(some_claims(record), [folder]),
        "export": lambda: export(fedcli.load(folder), "safetensors", out=folder / "model"),
    }
    for name, reader in readers.items():
        fault = attempt(reader, f"{description}, {name}").fault
        if fault is not None:
            return fault
    return None


def some_claims(record: dict[str, Any]) -> list[Claim]:
    """Returns every thirtieth claim, since all take too long; which one is the first depends on the record."""
    step = 30
    first = int(digest_of(record)[:4], 16) % step
    return registry.claims()[first::step]
