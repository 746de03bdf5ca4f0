"""The pages of `results/`: one a study, one a paper from the card in its file and from the records, and a first one.

They are made from what is in the repository, so they are the same on every machine.
"""

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pandas as pd

from fedcli import registry
from fedcli.declarations import Cell, Method, Table
from fedcli.errors import UserError
from fedcli.results import claims, comparison, coverage, plans, tables
from fedcli.results.claims import Answer, Evidence
from fedcli.results.coverage import PrintedCell
from fedcli.results.findings import Findings, read_findings
from fedcli.results.frame import ENDED, departures, find_records, frame_of, read_runs
from fedcli.results.metrics import find_metric
from fedcli.results.plans import TablePlan
from fedcli.results.render import MISSING, between_marks, github, render
from fedcli.runs.config import describe_reductions, resolve
from fedcli.runs.records import reductions_of
from fedcli.runs.settings import draft, settings

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
    findings: Findings
    records: list[dict[str, Any]]

    @property
    def title(self) -> str:
        """The heading of its introduction."""
        return self.intro.partition("\n")[0].lstrip("# ")

    @property
    def answer(self) -> str:
        """Its first finding; empty where it has none."""
        return self.findings.lines[0] if self.findings.lines else ""


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
    records = results / "records"
    studies = find_studies(records)
    answers = claims.answers(registry.claims(), [records])
    runs = claims.ended_runs([records])
    timed = {coverage.GPU: coverage.paces_of(runs, True), coverage.usual_machine(runs): coverage.paces_of(runs)}
    answers = [replace(answer, decided=coverage.decided_by(answer, runs, timed)) for answer in answers]
    texts = {Path(f"{study.name}.md"): page_of(study) for study in studies}
    for paper in papers():
        notes = results / "papers" / "notes" / f"{paper.key}.md"
        missed = notes.read_text(encoding="utf-8") if notes.is_file() else ""
        planned = [plans.plan(table, records, seeds=table.seeds) for table in paper.tables]
        text = paper_page(paper, planned, studies, claims_of(paper, answers, records), missed)
        texts[Path("papers") / f"{paper.key}.md"] = text.replace(f"{records}/", "records/")
    texts[Path("README.md")] = readme(records, studies, answers)
    if (results.parent / "papers").is_dir():
        texts[Path("..") / "papers" / claims.SHIPPED] = render(claims.sheet(answers), "csv").replace(f"{records}/", "")
    if (first := results.parent / "README.md").is_file():
        texts[Path("..") / "README.md"] = with_front(first.read_text(encoding="utf-8"), answers)
    return texts


def find_studies(folder: Path) -> list[Study]:
    """The studies in a folder, by name."""
    return [read_study(file.parent) for file in sorted(folder.glob("*/intro.md"))]


def read_study(folder: Path) -> Study:
    """A study.

    Args:
        folder: With `intro.md`, `findings.toml` (see `fedcli.results.findings`) where it has findings, and run folders.

    Raises:
        UserError: If the introduction or the records are missing, or a finding cannot be made.
    """
    file = folder / "intro.md"
    if not file.is_file():
        raise UserError(
            f"the study has no introduction (got {folder}); write its title, question and set-up to {file.name}."
        )
    intro = file.read_text(encoding="utf-8").strip()
    return Study(folder.resolve().name, intro, read_findings(folder), find_records([folder]))


def study_page(folder: Path) -> str:
    """The page of the study in a folder; the errors are those of `read_study`."""
    return page_of(read_study(folder))


def page_of(study: Study) -> str:
    """The page of a study: its introduction, its findings, and all that follows from its records."""
    records, findings = study.records, study.findings
    tested = max(sum(entry["test_accuracy"] is not None for entry in record["rounds"]) for record in records)
    charts = {"curves": "Test accuracy over rounds"} if tested >= POINTS else {}
    charts |= findings.figures
    sections = [study.intro]
    if findings.lines:
        lines = "\n".join(f"- {line}" for line in findings.lines)
        sections.append(f"## Findings\n\n{lines}\n\n{LEGEND}")
    sections.append("## Results\n\n" + render(tables.sheet(records, findings.metrics)).strip())
    sections += [f"![{title}](figures/{study.name}-{kind}.png)" for kind, title in charts.items()]
    sections.append("## Every run\n\n" + "\n".join(tables.every_run(records)))
    sections.append("## Machines and versions\n\n" + "\n".join(tables.machines(records)))
    if typed := tables.commands(records):
        sections.append("## Commands\n\n" + "\n".join(["```console", *(f"$ {command}" for command in typed), "```"]))
    return "\n\n".join(sections) + "\n"


LEGEND = (
    "Written from the records: means over runs, and differences paired by seed, with their 95 % intervals (Student's "
    "t); accuracies in percent, their differences in points. One run has no interval: chance is not ruled out."
)


def figures(text: str) -> dict[Path, tuple[str, str]]:
    """The figures that a page shows: the study and the kind of each, by its path under the folder of the results."""
    return {Path(path): (study, kind) for path, study, kind in FIGURE.findall(text)}


def finished(plan: TablePlan) -> list[tuple[Table, Cell]]:
    """The cells of a table with a finished run."""
    cells = [cell.cell for cell in plan.cells if any(run.state == "finished" for run in cell.runs)]
    return [(plan.table, cell) for cell in cells]


def sections(card: str) -> dict[str, str]:
    """The indented sections of a card by title, as Markdown; under "" what stands before the first."""
    first, *rest = re.split(r"(?m)^(\S.*)\n(?= )", card)
    bodies = [textwrap.dedent(body).strip() for body in rest[1::2]]
    return {"": first.strip(), **dict(zip(rest[::2], bodies, strict=True))}


def paper_page(paper: Paper, planned: Sequence[TablePlan], studies: Iterable[Study], claimed: str, missed: str) -> str:
    """The page of a paper.

    Args:
        paper: The paper.
        planned: Its tables as they stand.
        studies: All studies; those that concern the paper are listed.
        claimed: Its claims, see `claims_of`.
        missed: What did not work, in Markdown; empty where nothing is written.
    """
    card = sections((paper.module.__doc__ or "").strip())
    title, *about = card[""].split("\n\n")
    blocks = [
        f"# {title.rstrip('.')}",
        *about,
        f"Its file is [papers/{paper.key}.py](../../papers/{paper.key}.py). This page is written by `make tables` from "
        "that file and the records.",
        "## Methods",
        "\n".join(github(["Name", "Method"], [[f"`{method.name}`", method.title] for method in paper.methods])),
    ]
    if claimed:
        blocks.append(f"## Claims\n\n{claimed}")
    blocks += ["## Tables", _counted(planned) + " A run counts that has all settings of the table."]
    for plan in filter(finished, planned):
        compared = render(comparison.compare(plan)).rstrip()
        blocks.append(f"{compared}\n\n`fedcli table {plan.table.name}` runs what is missing.")
    lacking = [plan.table for plan in planned if not finished(plan)]
    if lacking:
        rows = [
            [_place(table), table.title, str(len(table.cells)), f"`fedcli table {table.name}`"] for table in lacking
        ]
        blocks.append("### Without a finished run")
        blocks.append("\n".join(github(["Place", "What it shows", "Cells", "Command"], rows)))
    if reasons := registry.not_planned(paper.module):
        blocks.append("### Not planned")
        blocks.append("\n".join(f"- {name}: {reason.rstrip('.')}." for name, reason in reasons.items()))
    if listed := list(_studies_of(paper, studies)):
        blocks.append("## Studies")
        blocks.append("\n".join(listed))
    blocks += [f"## {name}\n\n{text}" for name, text in card.items() if name.startswith(SHOWN)]
    if missed:
        blocks.append(f"## What did not work\n\n{missed.strip()}")
    return "\n\n".join(blocks) + "\n"


DECIDED = (
    "Decided by: the runs that are lacking, in full and with three seeds, or with as many as would do if mean and "
    "spread stayed, and the hours of all of them one after the other: on an NVIDIA H100, if runs of such a network "
    "have been timed there (beside other runs, so that alone they take less), else on the processor that is named."
)


def _own(paper: Paper, answers: Iterable[Answer]) -> list[Answer]:
    """The claims of a paper."""
    names = {table.name for table in paper.tables}
    return [answer for answer in answers if answer.claim.table in names]


def claims_of(paper: Paper, answers: Iterable[Answer], records: Path) -> str:
    """What a paper claims, with verdicts, in Markdown; empty where its file declares no claim.

    Args:
        paper: The paper.
        answers: The claims of all papers.
        records: Folder of the studies.
    """
    own = _own(paper, answers)
    if not own:
        return ""

    def told(evidence: Evidence) -> str:
        return f"{evidence.size}: {_linked(records, '../', evidence)}"

    table = render(replace(claims.sheet(own, told), notes=())).strip()
    return f"{table}\n\n{claims.counted(own)} [Results](../README.md) says how a verdict comes about."


def _linked(records: Path, way: str, evidence: Evidence) -> str:
    """The studies among `records` that runs stand in, linked by `way`."""
    studies = dict.fromkeys(folder.relative_to(records).parts[0] for folder in evidence.folders)
    return ", ".join(f"[{study}]({way}{study}.md)" for study in studies)


def _front(answers: Sequence[Answer], records: Path) -> Iterator[tuple[str, str]]:
    """Each paper's name with its claims as a table of a line each."""
    for paper in papers():
        rows = []
        for answer in _own(paper, answers):
            claim, evidence = answer.claim, answer.evidence[0]
            told = []
            if evidence.folders:
                told.append(f"{'reduced' if evidence.reduced else 'in full'}: {_linked(records, '', evidence)}")
            if claim.see:
                told.append(f"but see [{claim.see}]({claim.see}.md)")
            if answer.decided:
                told.append(f"decided by {answer.decided}")
            text = f"`{claim.name}` {claim.text}"
            rows.append([text, evidence.judgement, answer.paper_text, answer.ours(evidence), "; ".join(told)])
        columns = ["Claim", "Verdict", "Paper", "Ours, 95 % interval (seeds)", "Runs, and what would decide it"]
        if rows:
            yield paper.name, "\n".join(github(columns, rows))


def _counted(planned: Sequence[TablePlan]) -> str:
    """How many cells the tables have, how many a number of the paper, and how many of these a finished run."""
    cells = [(plan.table, cell) for plan in planned for cell in plan.table.cells]
    done = [pair for plan in planned for pair in finished(plan)]
    return (
        f"{len(planned)} tables and figures with {len(cells)} cells. The paper prints a number for "
        f"{sum(coverage.is_printed(*place) for place in cells)} of them, and "
        f"{sum(coverage.is_printed(*place) for place in done)} of these have a finished run."
    )


def _place(table: Table) -> str:
    """Where a table stands in the paper."""
    place = table.reported[1]
    return table.name.split(":")[1] if place == plans.IN_TEXT else place


def _studies_of(paper: Paper, studies: Iterable[Study]) -> Iterator[str]:
    """The studies with a method or a protocol of the paper, each with its first finding."""
    names = {method.name for method in paper.methods}
    for study in studies:
        if any(record["method"] in names or record["protocol"] in paper.protocols for record in study.records):
            link = f"- [{study.title}](../{study.name}.md)"
            yield f"{link}: {study.answer}" if study.answer else link


def readme(records: Path, studies: Sequence[Study], answers: Sequence[Answer]) -> str:
    """The page that `results/` opens with: the claims, how much has been run, the studies, and how to redo a run.

    Args:
        records: Folder of the studies.
        studies: What is in it.
        answers: The claims of all papers.
    """
    runs = read_runs([records])
    rows = [[f"[{study.name}]({study.name}.md)", _size(study.records), study.answer or MISSING] for study in studies]
    blocks = [
        "# Results",
        "Written by `make tables` from the records in `records/`; a test fails where a page and its records differ.",
        "## What the papers claim, and what is so",
        claims.counted(answers)
        + " `fedcli claims` prints them with your own runs, and a paper's page has the commands "
        "of the runs that would decide a claim.",
        *(f"### {name}\n\n{table}" for name, table in _front(answers, records)),
        "\n".join(f"- {note}" for note in (*claims.NOTES, DECIDED)),
        "## How much of what the papers print has been run",
        *_covered(runs),
        "## Studies",
        "\n".join(github(["Study", "Size", "First finding"], rows)),
        "A difference of two methods is that of their runs, paired by seed, in points of accuracy where nothing else "
        "is said, with its 95 % interval (Student's t) and the number of seeds. "
        "[board](board/README.md) has methods side by side on small digits, ten seeds each, with tuned options. "
        "[speed](speed/README.md) holds what `fedcli bench` measured: the engine against a plain PyTorch loop.",
        "## Redo one",
        f"```console\n$ fedcli verify {_quickest(runs).relative_to(records.parent.parent).as_posix()}\n```",
        "It runs the record's own options again and compares: on such a processor with the same version of PyTorch it "
        "ends in the same bits, elsewhere near them, and it says which. With `--rounds 1` it does only so many of the "
        "rounds. The page of a study says on which machines its runs were made, and by which commands.",
    ]
    return "\n\n".join(blocks) + "\n"


def _quickest(runs: pd.DataFrame) -> Path:
    """The folder of the run that took the least time of those with ten rounds or more."""
    ended = runs[runs["state"].isin(ENDED)]
    pairs = list(zip(ended["folder"], ended["record"], strict=True))
    long = [pair for pair in pairs if pair[1]["config"]["rounds"] >= 10]
    return min(long or pairs, key=lambda pair: (pair[1]["seconds_total"], pair[0]))[0]


def _covered(runs: pd.DataFrame) -> Iterator[str]:
    """The table of what has been run of each paper, and what its columns mean."""
    ended = runs[runs["state"].isin(ENDED)]
    machine, timed = coverage.usual_machine(ended), coverage.paces_of(runs)
    rows, whole = [], []
    for paper in papers():
        cells = coverage.printed_cells(paper.tables, ended)
        open_cells = [cell for cell in cells if cell.open]
        full = [cell for cell in cells if cell.done == cell.needed]
        fewer = [cell for cell in cells if cell.done and cell.done != cell.needed]
        left = coverage.time_left(open_cells, timed, machine)
        hours = f"{left.seconds / 3600:,.0f} for {left.known} of {left.runs} runs" if left.known else MISSING
        counts = [_count(cells), _count(open_cells), _count(full), _count(fewer)]
        rows.append([f"[{paper.name}](papers/{paper.key}.md)", *counts, hours])
        lacking = {cell.table for cell in cells if cell.done != cell.needed}
        there = {cell.table for cell in cells}
        whole += [table for table in paper.tables if table.name in there - lacking]
    titles = "Paper, Printed cells (runs), With open data, In full; all seeds, In full; fewer seeds, Hours left"
    yield "\n".join(github([title.replace(";", ",") for title in titles.split(", ")], rows, 1))
    if whole:
        places = ", ".join(f"{table.reported[0]}'s {_place(table)}" for table in whole)
        yield f"Run in full, every cell here that has a printed number: {places}."
    yield (
        "A cell is a number that a paper prints and a table here plans; several may be read from one run, so the "
        "different runs, a seed each, stand beside them in brackets. Open data are built in, downloaded by `fedcli "
        "data download`, or made of such. A table has three seeds, or one where the paper prints single runs. Hours "
        "are of the runs with open data, one after the other, by quiet runs of the same network on images "
        f"of the same size on {machine[1]} ({machine[0]}); none like the other runs has been timed."
    )


def _count(cells: Sequence[PrintedCell]) -> str:
    """How many cells there are, and how many different runs: those done where a cell has any, else those needed."""
    runs = {run for cell in cells for run in (cell.done or cell.needed)}
    return f"{len(cells):,} ({len(runs):,})" if cells else "0"


def _size(records: Iterable[dict[str, Any]]) -> str:
    """What the runs of a study are smaller in than their protocols."""
    sizes = []
    for record in records:
        protocol = registry.protocols().get(record["protocol"])
        if protocol is None or record["dataset"] not in protocol.datasets or protocol.source == "not from the paper":
            sizes.append("not a setting of the paper")
        else:
            smaller = describe_reductions(reductions_of(record))
            size, others = f"reduced to {smaller}" if smaller else "in full", _others_than_planned(record)
            sizes.append(f"{size}, with {' and '.join(others)}" if others else size)
    return "; ".join(dict.fromkeys(sizes))


def _others_than_planned(record: dict[str, Any]) -> list[str]:
    """What else is other than in a run's protocol, of what a reader takes for the protocol's."""
    method = registry.find_method(record["method"])
    setup = resolve(method, {name: record[name] for name in ("protocol", "dataset", "seed")}, need_data=False)
    other = departures(frame_of([record]).iloc[0], settings(draft(setup)), find_metric("last"))
    words = {
        "partition": "another partition", "partition_seed": "another draw of the clients",
        "backbone": "another network", "lr": "another learning rate",
    }  # fmt: skip
    return [text for name, text in words.items() if name in other]


def with_front(text: str, answers: Sequence[Answer]) -> str:
    """The project's first page with the number of claims of each verdict between its two marks; else as it is."""
    rows = []
    for paper in papers():
        counts = Counter(answer.verdict for answer in _own(paper, answers))
        rows.append([f"[{paper.name}](results/papers/{paper.key}.md)", *(str(counts[one]) for one in claims.VERDICTS)])
    table = "\n".join(github(["Claims of", *(verdict.capitalize() for verdict in claims.VERDICTS)], rows, 1))
    return between_marks(text, "claims", table)
