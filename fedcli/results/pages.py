"""The pages of `results/`: one a study, one a paper from the card in its file and from the records, and a first one.

They are made from what is in the repository, so they are the same on every machine.
"""

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from fedcli import registry
from fedcli.results import claims, comparison, costs, plans, tables
from fedcli.results.claims import Answer
from fedcli.results.findings import Study, read_study
from fedcli.results.plans import TablePlan
from fedcli.results.render import MISSING, between_marks, github, render

FIGURE = re.compile(r"\]\((figures/([\w.-]+)-([a-z]+)\.png)\)")
POINTS = 3  # tested rounds that a learning curve needs to say anything
SHOWN = ("Readings", "Known")  # how the titles begin of a card's sections that a page repeats
LEGEND = (
    "Written from the records: means over runs, and differences paired by seed, with their 95 % intervals (Student's "
    "t); accuracies in percent, their differences in points. One run has no interval: chance is not ruled out."
)
VERIFY = "As they were typed. `fedcli verify RECORD` repeats a run also where a default has changed since."


class Paper(NamedTuple):
    """A paper's file."""

    module: ModuleType
    key: str  # the name of the file and of its page
    name: str  # as it is called in papers/reported.json

    def its(self, answers: Iterable[Answer]) -> list[Answer]:
        """The claims of the paper among others."""
        names = {table.name for table in self.module.TABLES}
        return [answer for answer in answers if answer.claim.table in names]


def papers() -> list[Paper]:
    """The papers, which are the registered files that declare tables, in the order of the registry."""
    modules = dict.fromkeys(method.module for method in registry.methods().values())
    return [
        Paper(module, module.__name__.rpartition(".")[2], module.TABLES[0].reported[0])
        for module in modules
        if hasattr(module, "TABLES")
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
    studies = [read_study(file.parent) for file in sorted(records.glob("*/intro.md"))]
    runs = claims.ended_runs([records])
    timed = costs.paces(runs)
    answers = [
        replace(answer, decided=costs.decided_by(answer, records, timed))
        for answer in claims.answers(registry.claims(), [records])
    ]
    texts = {Path(f"{study.name}.md"): study_page(study) for study in studies}
    planned = {}
    for paper in papers():
        notes = results / "papers" / "notes" / f"{paper.key}.md"
        missed = notes.read_text(encoding="utf-8") if notes.is_file() else ""
        planned[paper] = [plans.plan(table, records, seeds=table.seeds) for table in paper.module.TABLES]
        text = paper_page(paper, planned[paper], studies, claims_table(paper, answers, records, "../"), missed)
        texts[Path("papers") / f"{paper.key}.md"] = text.replace(f"{records}/", "records/")
    texts[Path("README.md")] = first_page(records, studies, answers, coverage(planned))
    if (results.parent / "papers").is_dir():
        verdicts = render(claims.claims_sheet(answers), "csv")
        texts[Path("..") / "papers" / claims.SHIPPED] = verdicts.replace(f"{records}/", "")
    if (first := results.parent / "README.md").is_file():
        texts[Path("..") / "README.md"] = with_front(first.read_text(encoding="utf-8"), answers)
    return texts


def _page(head: str, parts: Mapping[str, str]) -> str:
    """A page in Markdown: its head, and texts by their headings; one without a text is left out."""
    return "\n\n".join([head, *(f"{heading}\n\n{text}" for heading, text in parts.items() if text)]) + "\n"


def first_page(records: Path, studies: Sequence[Study], answers: Sequence[Answer], covered: str) -> str:
    """The page that `results/` opens with: the claims, how much has been run, the studies, and how to redo a run."""
    rows = [[f"[{study.name}]({study.name}.md)", (study.findings or [MISSING])[0]] for study in studies]
    parts = {
        "## What the papers claim, and what is so": f"{claims.counted(answers)} `fedcli claims` prints them with your "
        "own runs, and the commands of the runs that would decide a claim.",
        **{f"### {paper.name}": claims_table(paper, answers, records) for paper in papers()},
        "### How a verdict comes about": "\n".join(f"- {note}" for note in claims.NOTES),
        "## How much of what the papers print has been run": covered,
        "## Studies": "\n".join(github(["Study", "First finding"], rows)) + "\n\n"
        "A difference of two methods is that of their runs, paired by seed, in points of accuracy where nothing else "
        "is said, with its 95 % interval (Student's t) and the number of seeds. "
        "[board](board/README.md) has methods side by side on small digits, ten seeds each, with tuned options. "
        "[speed](speed/README.md) holds what `fedcli bench` measured: the engine against a plain PyTorch loop.",
        "## Redo one": "`fedcli verify` with the folder of a record, as `results/records/STUDY/RUN`, "
        "runs the record's own options again and compares: on such a processor with the same version of PyTorch it "
        "ends in the same bits, elsewhere near them, and it says which. With `--rounds 1` it does only so many of the "
        "rounds. The page of a study says on which machines its runs were made, and by which commands.",
    }
    made = "Written by `make tables` from the records in `records/`; a test fails where a page and its records differ."
    return _page(f"# Results\n\n{made}", parts)


def study_page(study: Study) -> str:
    """The page of a study: its introduction, its findings, and all that follows from its records."""
    records = study.records
    tested = max(sum(entry["test_accuracy"] is not None for entry in record["rounds"]) for record in records)
    charts = {"curves": "Test accuracy over rounds"} if tested >= POINTS else {}
    lines = "\n".join(f"- {line}" for line in study.findings)
    results = [render(tables.sheet(records, study.metrics)).strip()]
    results += [f"![{title}](figures/{study.name}-{kind}.png)" for kind, title in (charts | study.figures).items()]
    typed = "\n".join(f"$ {command}" for command in tables.commands(records))
    parts = {
        "## Findings": f"{lines}\n\n{LEGEND}" if lines else "",
        "## Results": "\n\n".join(results),
        "## Every run": render(replace(tables.sheet(records, study.metrics, each=True), setting="", notes=())).strip(),
        "## Machines and versions": "\n".join(tables.machines(records)),
        "## Commands": f"```console\n{typed}\n```\n\n{VERIFY}" if typed else "",
    }
    return _page(study.intro, parts)


def figures(text: str) -> dict[Path, tuple[str, str]]:
    """The figures that a page shows: the study and the kind of each, by its path under the folder of the results."""
    return {Path(path): (study, kind) for path, study, kind in FIGURE.findall(text)}


def paper_page(paper: Paper, planned: Sequence[TablePlan], studies: Iterable[Study], claimed: str, missed: str) -> str:
    """The page of a paper.

    Args:
        paper: The paper.
        planned: Its tables as they stand.
        studies: All studies; those that concern the paper are listed.
        claimed: Its claims, see `claims_table`.
        missed: What did not work, in Markdown; empty where nothing is written.
    """
    head, *sections = re.split(r"(?m)^(\S.*)\n(?= )", (paper.module.__doc__ or "").strip())  # a title, then its text
    title, *about = head.strip().split("\n\n")
    about.append(
        f"Its file is [papers/{paper.key}.py](../../papers/{paper.key}.py). This page is written by `make tables` from "
        "that file and the records."
    )
    card = {name: textwrap.dedent(text).strip() for name, text in zip(sections[::2], sections[1::2], strict=True)}
    methods = {name: method for name, method in registry.methods().items() if method.module is paper.module}
    shown, lacking = ["A run counts that has all settings of the table."], []
    for plan in planned:
        command = f"`fedcli table {plan.table.name}`"
        if any(run.state == "finished" for run in plan.runs):
            shown += [render(comparison.compare(plan)).rstrip(), f"{command} runs what is missing."]
        else:
            lacking.append([plan.title, str(len(plan.cells)), command])
    names = {*methods, *(protocol.name for protocol in getattr(paper.module, "PROTOCOLS", ()))}
    listed = []
    for study in studies:
        if any(names & {record["method"], record["protocol"]} for record in study.records):
            heading = study.intro.partition("\n")[0].lstrip("# ")
            listed.append(": ".join([f"- [{heading}](../{study.name}.md)", *study.findings[:1]]))
    reasons = getattr(paper.module, "NOT_PLANNED", {})
    rows = [[f"`{name}`", method.title] for name, method in methods.items()]
    parts = {
        "## Methods": "\n".join(github(["Name", "Method"], rows)),
        "## Claims": f"{claimed} [Results](../README.md) says how a verdict comes about, `fedcli claims` which "
        "commands make the runs that are lacking."
        if claimed
        else "",
        "## Tables": "\n\n".join(shown),
        "### Without a finished run": "\n".join(github(["Table", "Cells", "Command"], lacking)) if lacking else "",
        "### Not planned": "\n".join(f"- {name}: {reason.rstrip('.')}." for name, reason in reasons.items()),
        "## Studies": "\n".join(listed),
        **{f"## {name}": text for name, text in card.items() if name.startswith(SHOWN)},
        "## What did not work": missed.strip(),
    }
    return _page("\n\n".join([f"# {title.rstrip('.')}", *about]), parts)


def claims_table(paper: Paper, answers: Iterable[Answer], records: Path, way: str = "") -> str:
    """What a paper claims, with verdicts, in Markdown; empty where its file declares no claim.

    Args:
        paper: The paper.
        answers: The claims of all papers.
        records: Folder of the studies.
        way: From the page to those of the studies.
    """

    def told(answer: Answer) -> str:
        studies = dict.fromkeys(folder.relative_to(records).parts[0] for folder in answer.runs)
        links, see = ", ".join(f"[{study}]({way}{study}.md)" for study in studies), answer.claim.see
        return f"{answer.size}: {links}" + (f"; but see [{see}]({way}{see}.md)" if see else "")

    its = paper.its(answers)
    return f"{render(replace(claims.claims_sheet(its, told), notes=()))}\n{claims.counted(its)}" if its else ""


def coverage(planned: Mapping[Paper, Sequence[TablePlan]]) -> str:
    """How much has been run of what the papers print, in Markdown.

    Args:
        planned: The papers' tables as they stand.
    """
    rows, in_full = [], []
    for paper, its_plans in planned.items():
        cells = []
        for plan in its_plans:
            of_table = []
            for cell in plan.cells:
                if comparison.printed_value(plan.table, cell.cell.row, cell.cell.column, cell.metric) is not None:
                    said = [not run.to_do and claims.says_something(run.record, cell.metric) for run in cell.runs]
                    of_table.append(all(said))
            in_full += [plan.table.name] if of_table and all(of_table) else []
            cells += of_table
        rows.append([f"[{paper.name}](papers/{paper.key}.md)", f"{len(cells):,}", f"{sum(cells):,}"])
    table = "\n".join(github(["Paper", "Printed cells", "In full, all seeds"], rows, 1))
    return (
        f"{table}\n\nRun in full, every cell here that has a printed number: {', '.join(in_full) or 'none'}.\n\n"
        "A cell is a number that a paper prints and a table here plans; several may be read from one run. A table has "
        "three seeds, or one where the paper prints single runs."
    )


def with_front(text: str, answers: Sequence[Answer]) -> str:
    """The project's first page with the number of claims of each verdict between its two marks; else as it is."""
    rows = []
    for paper in papers():
        counts = Counter(answer.verdict for answer in paper.its(answers))
        numbers = [str(counts[verdict]) for verdict in claims.VERDICTS]
        rows.append([f"[{paper.name}](results/papers/{paper.key}.md)", *numbers])
    table = "\n".join(github(["Claims of", *(verdict.capitalize() for verdict in claims.VERDICTS)], rows, 1))
    return between_marks(text, "claims", table)
