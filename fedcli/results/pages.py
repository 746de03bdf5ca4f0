"""The pages of `results/`: one a study, one a paper from the card in its file and from the records, and a first one.

They are made from text and numbers that are in the repository, so they are the same on every machine. So are the data
of the figures that they show: `figures/<study>-<kind>.png` is the figure of that kind of the study's records.
"""

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from fedcli import registry
from fedcli.declarations import Cell, Method, Table
from fedcli.errors import UserError
from fedcli.results import claims, comparison, reproduce, tables
from fedcli.results.claims import Answer, Line
from fedcli.results.metrics import find_metric
from fedcli.results.prose import fill_in
from fedcli.results.render import MISSING, github, render
from fedcli.results.reproduce import ENDED, PlannedCell, TablePlan
from fedcli.results.tables import SeedGroup, find_records
from fedcli.runs.config import describe_reductions
from fedcli.runs.records import reductions_of

BEGIN, END = "<!-- claims: written by 'make tables' -->", "<!-- claims: end -->"
FIGURE = re.compile(r"\]\((figures/([\w.-]+)-([a-z]+)\.png)\)")
ANSWER = re.compile(r"(?:\A|\n\n)Answer:\s+(.+?)(?:\n\n|\Z)", re.DOTALL)
LINK = re.compile(r"\]\((?![a-z]+:|#)")  # to another page
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

    @property
    def answer(self) -> str:
        """The paragraph of its introduction that begins with "Answer:", on one line; empty where there is none."""
        found = ANSWER.search(self.intro)
        return " ".join(found[1].split()) if found else ""


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
        results: Folder with `records/<study>` and `papers/notes/<paper>.md` where there are notes; beside it may be a
            `README.md` that quotes the claims between two marks.

    Returns:
        Texts by path under `results`.
    """
    studies = find_studies(results / "records")
    found = claims.answers(registry.claims(), [results / "records"])
    texts: dict[Path, str] = {
        Path(f"{study.name}.md"): study_page(results / "records" / study.name) for study in studies
    }
    for paper in papers():
        standings = [standing(table, results / "records", studies) for table in paper.tables]
        notes = results / "papers" / "notes" / f"{paper.key}.md"
        missed = fill_in(notes.read_text(encoding="utf-8"), results / "records") if notes.is_file() else ""
        text = paper_page(paper, standings, studies, claims_of(paper, found, results / "records"), missed)
        texts[Path("papers") / f"{paper.key}.md"] = text.replace(f"{results / 'records'}/", "records/")
    texts[Path("README.md")] = readme(results, studies, found)
    if (first := results.parent / "README.md").is_file():
        texts[Path("..") / "README.md"] = with_front(first.read_text(encoding="utf-8"), found, results / "records")
    return texts


def find_studies(folder: Path) -> list[Study]:
    """The studies in a folder, by name."""
    files = sorted(folder.glob("*/intro.md"))
    return [Study(file.parent.name, _introduction(file.parent), find_records([file.parent])) for file in files]


def _introduction(study: Path) -> str:
    """The prose of a study with its numbers."""
    file = study / "intro.md"
    if not file.is_file():
        raise UserError(
            f"the study has no introduction (got {study}); write its question, answer and protocol to {file.name}."
        )
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
    if typed := tables.commands(records):
        sections.append("## Commands\n\n" + "\n".join(["```console", *(f"$ {command}" for command in typed), "```"]))
    return "\n\n".join(sections) + "\n"


def figures(text: str) -> dict[Path, tuple[str, str]]:
    """The figures that a page shows: the study and the kind of each, by its path under the folder of the results."""
    return {Path(path): (study, kind) for path, study, kind in FIGURE.findall(text)}


def standing(table: Table, folder: Path, studies: Sequence[Study]) -> Standing:
    """A table with the runs at full size among the records.

    A run with a seed that is not the table's stands for one of the table's that was not run; others are left out.

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
    found = {(one.cell.row, one.cell.column): _chosen(one, table.seeds) for plan in plans for one in plan.cells}
    cells = tuple(found[cell.row, cell.column] for cell in table.cells)
    runs = tuple({run.folder: run for cell in cells for run in cell.runs}.values())
    if not any(run.state in ENDED for run in runs):
        return Standing(table, None)
    return Standing(table, replace(plans[0], table=table, cells=cells, runs=runs, seeds=table.seeds))


def _chosen(cell: PlannedCell, seeds: Sequence[int]) -> PlannedCell:
    """The cell with the runs of the table's seeds and, in place of those that were not run, of others that were."""
    own = [run for run in cell.runs if run.setup.run.seed in seeds]
    there = [run for run in own if run.state in ENDED]
    others = [run for run in cell.runs if run.state in ENDED and run not in own][: len(seeds) - len(there)]
    lacking = [run for run in cell.runs if run.record is None][: len(seeds) - len(there) - len(others)]
    return replace(cell, runs=(*there, *others, *lacking))


def sections(card: str) -> dict[str, str]:
    """The indented sections of a card by title, as Markdown; under "" what stands before the first."""
    first, *rest = re.split(r"(?m)^(\S.*)\n(?= )", card)
    bodies = [textwrap.dedent(body).strip() for body in rest[1::2]]
    return {"": first.strip(), **dict(zip(rest[::2], bodies, strict=True))}


def paper_page(paper: Paper, standings: Sequence[Standing], studies: Iterable[Study], claimed: str, missed: str) -> str:
    """The page of a paper.

    Args:
        paper: The paper.
        standings: Its tables.
        studies: All studies; those that concern the paper are listed.
        claimed: Its claims, see `claims_of`.
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
        *([f"## Claims\n\n{claimed}"] if claimed else []),
        "## Tables",
        _counted(standings)
        + " A run counts that has all settings of the table, of other seeds than the table's only where these were not "
        "run.",
        *(f"{_compared(one)}\n\n`fedcli table {one.table.name}` runs what is missing." for one in done),
        *_not_run([one.table for one in standings if not one.finished]),
        *_not_planned(paper),
        *_its_studies(paper, studies),
        *(f"## {name}\n\n{text}" for name, text in card.items() if name.startswith(SHOWN)),
    ]
    if missed:
        blocks.append(f"## What did not work\n\n{missed.strip()}")
    return "\n\n".join(blocks) + "\n"


def claims_of(paper: Paper, found: Iterable[Answer], records: Path) -> str:
    """What a paper claims, with verdicts, in Markdown; empty where its file declares no claim.

    Args:
        paper: The paper.
        found: The claims of all papers.
        records: Folder of the studies.
    """
    names = {table.name for table in paper.tables}
    own = [one for one in found if one.claim.table in names]
    if not own:
        return ""
    table = render(replace(claims.sheet(own, _with_studies(records, "../")), notes=())).strip()
    return f"{table}\n\n{claims.counted(own)} [Results](../README.md) says how a verdict comes about."


def _with_studies(records: Path, way: str) -> Callable[[Line], str]:
    """How a claim's runs are told: their size, and the studies among `records` that they stand in, linked by `way`."""

    def told(line: Line) -> str:
        studies = dict.fromkeys(folder.relative_to(records).parts[0] for folder in line.folders)
        return ": ".join(filter(None, (line.size, ", ".join(f"[{study}]({way}{study}.md)" for study in studies))))

    return told


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
    """The studies with a method or a protocol of the paper, each with its answer."""
    names = {method.name for method in paper.methods}
    lines = []
    for study in studies:
        if any(record["method"] in names or record["protocol"] in paper.protocols for record in study.records):
            heading = study.intro.strip().partition("\n")[0]
            link = f"[{heading.lstrip('# ')}](../{study.name}.md)"
            lines.append("- " + ": ".join(filter(None, (link, LINK.sub("](../", study.answer)))))
    if lines:
        yield "## Studies"
        yield "\n".join(lines)


def readme(results: Path, studies: Sequence[Study], found: Sequence[Answer]) -> str:
    """The page that `results/` opens with: the claims, how much has been run, the studies, and how to redo a cell.

    Args:
        results: Folder with `records/<study>`.
        studies: What is in it.
        found: The claims of all papers.
    """
    blocks = [
        "# Results",
        "Written by `make tables` from the records in `records/`; a test fails where a page and its records differ.",
        "## What the papers claim, and what is so",
        claims.counted(found) + " `fedcli claims` prints them with your own runs.",
        render(claims.sheet(found, _with_studies(results / "records", ""))).strip(),
        "## How much of what the papers print has been run",
        *_covered(results / "records"),
        "## Studies",
        "\n".join(github(["Study", "Size", "Finding"], [_study_row(study) for study in studies])),
        "A difference of two methods that has brackets behind it is that of their runs, paired by seed, in points of "
        "accuracy where nothing else is said, with its 95 % interval (Student's t) and the number of seeds; one "
        "without is of single runs or printed. "
        "[board](board/README.md) has methods side by side on small digits, ten seeds each, with tuned options. "
        "[speed](speed/README.md) holds what `fedcli bench` measured: the engine against a plain PyTorch loop.",
        "## Redo one",
        *_redo(results / "records"),
    ]
    return "\n\n".join(blocks) + "\n"


def _covered(folder: Path) -> Iterator[str]:
    """The table of what has been run of each paper, and what its columns mean."""
    records = claims.by_method([folder])
    kinds = [tuple(one["hardware"][key] for key in ("device", "name")) for runs in records.values() for _, one in runs]
    machine = max(set(kinds), key=lambda kind: (kinds.count(kind), kind), default=("cpu", ""))
    known = {cell.settings.get("dataset", "") for table in registry.tables().values() for cell in table.cells}
    paces = reproduce.paces([folder], known)
    rows = []
    for paper in papers():
        one = claims.coverage(paper.tables, records, paces, machine)
        pairs = [(one.cells, one.runs), one.open, one.full, one.fewer]
        hours = f"{one.left.seconds / 3600:,.0f} for {one.left.known} of {one.left.runs} runs"
        texts = [f"{cells:,} ({runs:,})" if cells else "0" for cells, runs in pairs]
        rows.append([f"[{paper.name}](papers/{paper.key}.md)", *texts, hours if one.left.known else MISSING])
    columns = [
        "Paper",
        "Printed cells (runs)",
        "With open data",
        "In full, all seeds",
        "In full, fewer seeds",
        "Hours left",
    ]
    yield "\n".join(github(columns, rows, 1))
    if whole := run_in_full(records):
        yield f"Run in full, every cell here that has a printed number: {', '.join(map(_place_of_paper, whole))}."
    yield (
        "A cell is a number that a paper prints and a table here plans; several may be read from one run, so the "
        "different runs, a seed each, stand beside them in brackets. Open data are built in, downloaded by `fedcli "
        "data download`, or made of such. A table has three seeds, or one where the paper prints single runs. Hours "
        "are of the runs with open data, one after the other, by quiet runs of the same network on images "
        f"of the same size on {machine[1]} ({machine[0]}); none like the other runs has been timed."
    )


def run_in_full(records: claims.Runs) -> list[Table]:
    """The tables of which every cell with a printed number has been run in full, with all seeds.

    Args:
        records: See `fedcli.results.claims.by_method`.
    """
    found = []
    for table in registry.tables().values():
        one = claims.coverage([table], records, {}, ("cpu", ""))
        if one.cells and one.full[0] == one.cells:
            found.append(table)
    return found


def _place_of_paper(table: Table) -> str:
    """A table as it is called in its paper, with the paper's name."""
    return f"{table.reported[0]}'s {_place(table)}"


def _study_row(study: Study) -> list[str]:
    """Name, size and answer of a study."""
    groups = tables.group(study.records)
    kinds = [[member for member in groups if _kind(member) == kind] for kind in dict.fromkeys(map(_kind, groups))]
    sizes = dict.fromkeys(map(_size, kinds))
    return [f"[{study.name}]({study.name}.md)", "; ".join(sizes), study.answer or MISSING]


def _kind(member: SeedGroup) -> tuple[str, str, str]:
    """What runs of one size agree in: protocol, data set and reductions."""
    record = member.records[0]
    return record["protocol"], record["dataset"], str(reductions_of(record))


def _size(alike: Sequence[SeedGroup]) -> str:
    """Rounds and seeds of a study's runs of one size, each with the paper's, and what else is smaller."""
    record = alike[0].records[0]
    protocol, rounds = registry.protocols().get(record["protocol"]), record["config"]["rounds"]
    counts = sorted({len({one["seed"] for one in member.finished}) for member in alike} - {0})
    seeds = " to ".join(str(count) for count in dict.fromkeys([counts[0], counts[-1]])) if counts else "0"
    if protocol is None or record["dataset"] not in protocol.datasets or protocol.source == "not from the paper":
        return f"{rounds} rounds, {seeds} seed{'s' * (seeds != '1')}; not a setting of the paper"
    smaller = {one["what"]: one for one in reductions_of(record)}
    full = smaller.pop("rounds", {"protocol": rounds})["protocol"]
    planned = _planned_seeds(alike)
    of = f" of {planned}" if planned >= max(counts, default=1) else ""
    rest = describe_reductions(list(smaller.values()))
    many = "s" * ((str(planned) if of else seeds) != "1")
    return f"{rounds:,} of {full:,} round{'s' * (full != 1)}, {seeds}{of} seed{many}" + (f", {rest}" if rest else "")


def _planned_seeds(alike: Sequence[SeedGroup]) -> int:
    """How many seeds the paper has: in the table that has most of these settings, else the most with their protocol."""
    if own := Counter(name for member in alike for name in comparison.printed_by_table(member.records[0])):
        return len(registry.tables()[max(own, key=own.__getitem__)].seeds)
    setting = _kind(alike[0])[:2]
    every = registry.tables().values()
    return max(
        (
            len(table.seeds)
            for table in every
            if any((cell.settings.get("protocol"), cell.settings.get("dataset")) == setting for cell in table.cells)
        ),
        default=0,
    )


def _redo(folder: Path) -> Iterator[str]:
    """How to redo a cell that has been run in full: of the runs that say most of their machine, the fastest."""
    runs = [pair for pairs in reproduce.all_runs([folder])[0].values() for pair in pairs]
    found = [
        (-len(record["machine"]), record["seconds_total"], path, record, table, cell)
        for table in registry.tables().values() for cell in table.cells for path, record in runs
        if (record["method"], record["status"]) == (cell.method, "finished") and record["hardware"]["device"] == "cpu"
        and "machine" in record and _is_cell(record, cell)
    ]  # fmt: skip
    if not found:
        return
    *_, path, record, table, cell = min(found, key=lambda one: one[:3])
    hardware, torch = record["hardware"], record["versions"]["torch"].partition("+")[0]
    minutes, threads = f"{record['seconds_total'] / 60:.0f} minutes", hardware["threads"]
    yield (
        f"For example {cell.row}, {cell.column} of `fedcli table {table.name}`, after `fedcli data download "
        f"{record['dataset']}`; the run took {minutes} with {threads} thread{'s' * (threads > 1)} on "
        f"{hardware['name']}:"
    )
    yield f"```console\n$ fedcli verify results/{path.relative_to(folder.parent).as_posix()}\n```"
    part = max(record["config"]["rounds"] // 10, 1)
    yield (
        f"It runs the record's own options again and compares: on such a processor with torch {torch} it ends in the "
        f"same bits, elsewhere near them, and it says which. With `--rounds {part}` it does only so many of the "
        f"{record['config']['rounds']} rounds."
    )


def _is_cell(record: dict[str, Any], cell: Cell) -> bool:
    """Whether a run is that cell in full."""
    named = (cell.settings.get("protocol"), cell.settings.get("dataset"))
    return named == (record["protocol"], record["dataset"]) and claims.departures(record, claims.wanted(cell), {}) == {}


def front(found: Sequence[Answer], records: Path) -> str:
    """What the first page of the project quotes of the claims: those with runs."""
    told = _with_studies(records, "results/")
    rows = []
    for one in found:
        if one.evidence:
            line, paper = claims.lines(one)[0], MISSING if one.paper is None else one.metric.signed(one.paper)
            rows.append([one.claim.text, claims.said(line), paper, line.ours, told(line)])
    table = "\n".join(github(["Claim", "Verdict", "Paper", "Ours, 95 % interval (seeds)", "Runs"], rows))
    return f"{table}\n\n{claims.counted(found)}"


def with_front(text: str, found: Sequence[Answer], records: Path) -> str:
    """The project's first page with the claims between its two marks; without them it stays as it is."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{front(found, records)}\n\n{END}{after}" if begin and end else text
