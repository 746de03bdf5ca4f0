"""The page of a study: its findings, table and figures, every run, the machines and the commands."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from sections import LEGEND, join_sections
from studies import Study, describe_modified_checkouts

from fedcli.results import tables
from fedcli.results.render import escape_markdown, render
from fedcli.runs.schema import Record
from fedcli.runs.settings_text import settings_text

EVERY_RUN = "## Every run"  # the heading by which a study's page is known
VERIFY = "`fedcli verify RECORD` repeats a run also where a default has changed since."


class Figure(NamedTuple):
    """A figure that a page shows.

    Attributes:
        study: The study whose runs it shows.
        kind: The kind of the chart.
    """

    study: Study
    kind: str

    @property
    def path(self) -> Path:
        """The path of the picture, relative to `results`."""
        return Path("figures") / f"{self.study.name}-{self.kind}.png"


def make_study_page(study: Study) -> str:
    """Makes the page of a study."""
    records = study.records
    sections = {}
    if study.finding_lines:
        lines = "\n".join(f"- {line}" for line in study.finding_lines)
        sections["## Findings"] = f"{lines}\n\n{LEGEND}"

    shown = [render(tables.build_table(records, study.metrics)).strip()]
    for kind, title in list_charts(study).items():
        figure = Figure(study, kind)
        shown.append(f"![{title}]({figure.path.as_posix()})")
    sections["## Results"] = "\n\n".join(shown)

    by_seed = tables.build_table(records, study.metrics, by_seed=True)
    sections[EVERY_RUN] = render(replace(by_seed, subject="", notes=())).strip()

    machines = list_machines(records)
    by_modified = describe_modified_checkouts(records)
    if by_modified:
        machines.append(f"- {by_modified}: their commit ends in `+`.")
    sections["## Machines and versions"] = "\n".join(machines)

    commands = tables.list_commands(records)
    if commands:
        typed = "\n".join(f"$ {command}" for command in commands)
        sections["## Commands"] = f"```console\n{typed}\n```\n\n{VERIFY}"
    return join_sections(study.intro, sections)


def list_machines(records: Iterable[Record]) -> list[str]:
    """Lists the machines with their versions and the number of their runs; a run that moved counts on each."""
    counts: Counter[str] = Counter()
    for record in records:
        for part in (record, *record["moved"]):
            facts = {**part.get("hardware", {}), **part.get("versions", {})}
            recorded = {name: value for name, value in facts.items() if value is not None}
            counts[settings_text(recorded)] += 1
    lines = []
    for machine, count in counts.items():
        runs = "run" if count == 1 else "runs"
        lines.append(f"- {count} {runs}: {escape_markdown(machine)}")
    return lines


def list_charts(study: Study) -> dict[str, str]:
    """Lists what the figures of a study show, by the kind of the chart."""
    tested_rounds = []
    for record in study.records:
        tested_rounds.append(sum(entry["test_accuracy"] is not None for entry in record["rounds"]))
    if max(tested_rounds) <= 2:  # two points say nothing
        return study.figures
    return {"curves": "Test accuracy over rounds", **study.figures}
