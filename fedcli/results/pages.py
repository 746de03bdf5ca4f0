"""The pages of `results/`: one a study, one a paper from the card in its file and from the records, and one table.

They are made from text and numbers that are in the repository, so they are the same on every machine. So are the data
of the figures that they show: `figures/<study>-<kind>.png` is the figure of that kind of the study's records.
"""

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from fedcli import registry
from fedcli.errors import UserError
from fedcli.registry import Cell, Method, Table
from fedcli.results import comparison, reproduce, tables
from fedcli.results.metrics import find_metric
from fedcli.results.prose import fill_in
from fedcli.results.render import MISSING, github, render
from fedcli.results.reproduce import ENDED, PlannedCell, TablePlan
from fedcli.results.tables import find_records

BEGIN, END = "<!-- papers: written by 'make tables' -->", "<!-- papers: end -->"
FIGURE = re.compile(r"\]\((figures/([\w.-]+)-([a-z]+)\.png)\)")
POINTS = 3  # tested rounds that a learning curve needs to say anything
SHOWN = ("Readings", "Known")  # how the titles begin of a card's sections that a page repeats


class Paper(NamedTuple):
    """A paper's file and what it declares."""

    module: ModuleType
    methods: tuple[Method, ...]
    protocols: frozenset[str]
    tables: tuple[Table, ...]

    @property
    def key(self) -> str:
        """The name of its file and of its page."""
        return self.module.__name__.rsplit(".")[-1]

    @property
    def name(self) -> str:
        """As it is called in papers/reported.json."""
        return self.tables[0].reported[0]


class Study(NamedTuple):
    """A folder of runs with an introduction."""

    name: str
    intro: str
    records: list[dict[str, Any]]


class Standing(NamedTuple):
    """A table as it stands: the plan where a cell has a finished run, else None."""

    table: Table
    plan: TablePlan | None

    @property
    def finished(self) -> list[Cell]:
        """Cells with a finished run."""
        cells = self.plan.cells if self.plan else ()
        return [cell.cell for cell in cells if any(run.state == "finished" for run in cell.runs)]

    def printed(self, cells: Iterable[Cell]) -> int:
        """Of how many of the table's cells the paper prints a number."""
        paper = comparison.printed(self.table)
        return sum(
            paper.get((cell.row, cell.column), {}).get(find_metric(cell.metric).field) is not None for cell in cells
        )


def papers() -> list[Paper]:
    """The papers, which are the registered files that declare tables, in the order of the registry."""
    methods = registry.methods().values()
    modules = [module for module in dict.fromkeys(method.module for method in methods) if hasattr(module, "TABLES")]
    return [
        Paper(
            module,
            tuple(method for method in methods if method.module is module),
            frozenset(protocol.name for protocol in getattr(module, "PROTOCOLS", ())),
            module.TABLES,
        )
        for module in modules
    ]


def pages(results: Path) -> dict[Path, str]:
    """All pages.

    Args:
        results: Folder with `records/<study>`, `papers/notes/<paper>.md` where there are notes, and a `README.md`.

    Returns:
        Texts by path under `results`.

    Raises:
        UserError: If the README is missing or lacks the two lines that the table stands between.
    """
    studies = find_studies(results / "records")
    texts: dict[Path, str] = {
        Path(f"{study.name}.md"): study_page(results / "records" / study.name) for study in studies
    }
    rows = []
    for paper in papers():
        standings = [standing(table, results / "records", studies) for table in paper.tables]
        notes = results / "papers" / "notes" / f"{paper.key}.md"
        missed = fill_in(notes.read_text(encoding="utf-8"), results / "records") if notes.is_file() else ""
        text = paper_page(paper, standings, studies, missed)
        texts[Path("papers") / f"{paper.key}.md"] = text.replace(f"{results / 'records'}/", "records/")
        rows.append(summary_row(paper, standings))
    file = results / "README.md"
    old = file.read_text(encoding="utf-8") if file.is_file() else ""
    texts[Path("README.md")] = with_summary(old, summary(rows), file)
    return texts


def find_studies(folder: Path) -> list[Study]:
    """The studies in a folder, by name."""
    files = sorted(folder.glob("*/intro.md"))
    return [Study(file.parent.name, _introduction(file.parent), find_records([file.parent])) for file in files]


def _introduction(study: Path) -> str:
    """The prose of a study with its numbers."""
    file = study / "intro.md"
    if not file.is_file():
        raise UserError(f"the study has no introduction (got {study}); write its question and protocol to {file.name}.")
    return fill_in(file.read_text(encoding="utf-8").strip(), study)


def study_page(study: Path) -> str:
    """The page of a study: its introduction, and all that follows from its records.

    Args:
        study: Folder with `intro.md`, whose numbers stand as `fedcli.results.prose` says, and run folders.

    Raises:
        UserError: If the introduction or the records are missing, or one of its numbers.
    """
    intro, records = _introduction(study), find_records([study])
    tested = max(sum(entry["test_accuracy"] is not None for entry in record["rounds"]) for record in records)
    sections = [
        intro,
        "## Results\n\n" + render(tables.sheet(records)).strip(),
        *([f"![Test accuracy over rounds](figures/{study.resolve().name}-curves.png)"] if tested >= POINTS else []),
        "## Every run\n\n" + "\n".join(tables.every_run(tables.group(records))),
        "## Machines and versions\n\n" + "\n".join(tables.machines(records)),
    ]
    typed = [record["command"] for record in records if record.get("command", "").startswith("fedcli ")]
    if commands := dict.fromkeys(typed):
        sections.append("## Commands\n\n" + "\n".join(["```console", *(f"$ {command}" for command in commands), "```"]))
    return "\n\n".join(sections) + "\n"


def figures(text: str) -> dict[Path, tuple[str, str]]:
    """The figures that a page shows: the study and the kind of each, by its path under the folder of the results."""
    return {Path(path): (study, kind) for path, study, kind in FIGURE.findall(text)}


def standing(table: Table, folder: Path, studies: Sequence[Study]) -> Standing:
    """A table with the runs at full size among the records.

    A run with a seed that is not the table's stands for one of the table's that was not run.

    Args:
        table: The table.
        folder: The studies' own.
        studies: What it holds.
    """
    wanted = {(cell.method, cell.settings.get("dataset")) for cell in table.cells}
    records = [record for study in studies for record in study.records if reproduce.state_of(record) in ENDED]
    seeds = {record["seed"] for record in records if (record["method"], record["dataset"]) in wanted}
    if not seeds:
        return Standing(table, None)
    kinds: dict[str, list[Cell]] = {}  # a run that only some cells can be read from counts for these
    for cell in table.cells:
        kinds.setdefault(find_metric(cell.metric).needs, []).append(cell)
    every = sorted({*table.seeds, *seeds})
    plans = [reproduce.plan(replace(table, cells=tuple(cells)), folder, seeds=every) for cells in kinds.values()]
    found = {(one.cell.row, one.cell.column): _chosen(one, len(table.seeds)) for plan in plans for one in plan.cells}
    cells = tuple(found[cell.row, cell.column] for cell in table.cells)
    runs = tuple({run.folder: run for cell in cells for run in cell.runs}.values())
    if not any(run.state in ENDED for run in runs):
        return Standing(table, None)
    return Standing(table, replace(plans[0], table=table, cells=cells, runs=runs, seeds=table.seeds))


def _chosen(cell: PlannedCell, planned: int) -> PlannedCell:
    """The cell with the runs that there are and, up to as many as are `planned`, those that lack."""
    there = [run for run in cell.runs if run.state in ENDED]
    lacking = [run for run in cell.runs if run.record is None]
    return replace(cell, runs=(*there, *lacking[: max(0, planned - len(there))]))


def sections(card: str) -> dict[str, str]:
    """The indented sections of a card by title, as Markdown; under "" what stands before the first."""
    first, *rest = re.split(r"(?m)^(\S.*)\n(?= )", card)
    bodies = [textwrap.dedent(body).strip() for body in rest[1::2]]
    return {"": first.strip(), **dict(zip(rest[::2], bodies, strict=True))}


def paper_page(paper: Paper, standings: Sequence[Standing], studies: Iterable[Study], missed: str) -> str:
    """The page of a paper.

    Args:
        paper: The paper.
        standings: Its tables.
        studies: All studies; those that concern the paper are listed.
        missed: What did not work, in Markdown; empty where nothing is written.
    """
    card = sections((paper.module.__doc__ or "").strip())
    title, *about = card[""].split("\n\n")
    done = [one for one in standings if one.finished]
    blocks = [
        f"# {title.rstrip('.')}",
        *about,
        f"Its file is [papers/{paper.key}.py](../../papers/{paper.key}.py). This page is written by `make tables` from "
        "that file and the records.",
        "## Methods",
        "\n".join(github(["Name", "Method"], [[f"`{one.name}`", one.title] for one in paper.methods])),
        "## Tables",
        _counted(standings) + " A run counts that has all settings of the table, whatever its seed.",
        *(f"{_compared(one)}\n\n`fedcli table {one.table.name}` runs what is missing." for one in done),
        *_not_run([one.table for one in standings if not one.finished]),
        *_not_planned(paper),
        *_its_studies(paper, studies),
        *(f"## {name}\n\n{text}" for name, text in card.items() if name.startswith(SHOWN)),
    ]
    if missed:
        blocks.append(f"## What did not work\n\n{missed.strip()}")
    return "\n\n".join(blocks) + "\n"


def _counts(standings: Iterable[Standing]) -> tuple[int, int, int]:
    """All cells, those of which the paper prints a number, and those of these that have a finished run."""
    each = [(len(s.table.cells), s.printed(s.table.cells), s.printed(s.finished)) for s in standings]
    return tuple(sum(counts) for counts in zip(*each, strict=True))


def _counted(standings: Sequence[Standing]) -> str:
    cells, printed, done = _counts(standings)
    return (
        f"{len(standings)} tables and figures with {cells} cells. The paper prints a number for {printed} of them, and "
        f"{done} of these have a finished run."
    )


def _compared(standing: Standing) -> str:
    """A table beside the paper's, with the seeds that are not the table's."""
    others = {run.setup.run.seed for run in standing.plan.runs if run.record} - set(standing.table.seeds)
    note = f"- In place of the table's seeds: {', '.join(map(str, sorted(others)))}.\n" if others else ""
    return (render(comparison.sheet(comparison.compare(standing.plan))) + note).rstrip()


def _not_run(tables: Sequence[Table]) -> Iterator[str]:
    if tables:
        rows = [[_place(one), one.title, str(len(one.cells)), f"`fedcli table {one.name}`"] for one in tables]
        yield "### Without a finished run"
        yield "\n".join(github(["Place", "What it shows", "Cells", "Command"], rows))


def _not_planned(paper: Paper) -> Iterator[str]:
    """What the paper has and no table of its file plans, with the reasons."""
    if reasons := registry.not_planned(paper.module):
        yield "### Not planned"
        yield "\n".join(f"- {what}: {reason.rstrip('.')}." for what, reason in reasons.items())


def _place(table: Table) -> str:
    """Where a table stands in the paper."""
    place = table.reported[1]
    return table.name.split(":")[1] if place == reproduce.IN_TEXT else place


def _its_studies(paper: Paper, studies: Iterable[Study]) -> Iterator[str]:
    """The studies with a method or a protocol of the paper, each with the first sentence of its introduction."""
    names = {method.name for method in paper.methods}
    lines = []
    for study in studies:
        if any(record["method"] in names or record["protocol"] in paper.protocols for record in study.records):
            heading, _, text = study.intro.strip().partition("\n")
            first = re.split(r"(?<=[.?!]) ", " ".join(text.split()))[0]
            lines.append(f"- [{heading.lstrip('# ')}](../{study.name}.md): {first}")
    if lines:
        yield "## Studies"
        yield "\n".join(lines)


def summary_row(paper: Paper, standings: Sequence[Standing]) -> list[str]:
    """The row of a paper in the table over all papers."""
    _, printed, done = _counts(standings)
    link = f"[{paper.name}](papers/{paper.key}.md)"
    return [link, str(len(standings)), str(printed), str(done), _largest_difference(standings)]


def _largest_difference(standings: Sequence[Standing]) -> str:
    """Of accuracies, where it is, and both numbers."""
    found = []
    for one in standings:
        for (row, column), entry in comparison.compare(one.plan).entries.items() if one.plan else ():
            paper, ours = entry.values.get("paper"), entry.values.get("ours")
            if entry.values.get("unit") == "percent" and None not in (paper, ours):
                where = f"{row}, {comparison.heading(column)} ({_place(one.table)})"
                text = f"{entry.difference}: {where}, paper {entry.paper}, ours {entry.ours}"
                found.append((abs(ours - paper), text))
    return max(found)[1] if found else MISSING


def summary(rows: Sequence[Sequence[str]]) -> str:
    """The table over all papers."""
    done, largest = "With a finished run at full size", "Largest difference of an accuracy, %"
    columns = ["Paper", "Tables", "Cells with a printed number", done, largest]
    return "\n".join(github(columns, [list(row) for row in rows]))


def with_summary(text: str, table: str, file: Path) -> str:
    """A README with the table between its two marks.

    Raises:
        UserError: If it has not these marks.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise UserError(f"there is no place for the table (got {file}); put the lines '{BEGIN}' and '{END}' into it.")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"
