"""The page of a paper: what its file's card says, its tables with the runs that count, and its studies."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from sections import join_sections
from studies import Study

from fedcli import registry
from fedcli.results import paper_tables, plans
from fedcli.results.render import escape_markdown, render, render_github_table

SHOWN_SECTIONS = ("Readings", "Known")  # how the titles begin of those of a card that its page repeats


@dataclass(frozen=True)
class Paper:
    """A paper's file, and its tables with the runs that there are.

    Attributes:
        name: The name of the file, without `.py`.
        module: The module of the file.
        tables: The tables, with their runs.
    """

    name: str
    module: ModuleType
    tables: Sequence[plans.TablePlan]

    @property
    def title(self) -> str:
        """The name of the paper."""
        return self.module.TABLES[0].reported_paper


@dataclass(frozen=True)
class Card:
    """What the docstring of a paper's file has.

    Attributes:
        title: The first line.
        paragraphs: The paragraphs before the sections.
        sections: The texts of the sections, without indentation, by their titles.
    """

    title: str
    paragraphs: list[str]
    sections: dict[str, str]


def read_card(docstring: str) -> Card:
    """Reads the card in a docstring, of which a section is a title over indented lines."""
    head, *section_texts = re.split(r"^(?=\S.*\n )", docstring, flags=re.MULTILINE)
    title, *paragraphs = head.strip().split("\n\n")
    sections = {}
    for text in section_texts:
        section_title, _, content = text.partition("\n")
        sections[section_title] = textwrap.dedent(content).strip()
    return Card(title.rstrip("."), paragraphs, sections)


def find_paper_modules() -> dict[str, ModuleType]:
    """Finds the files of registered methods that declare tables; returns them by their names without `.py`."""
    modules = {}
    for method in registry.methods().values():
        if hasattr(method.module, "TABLES"):
            _, _, name = method.module.__name__.rpartition(".")
            modules[name] = method.module
    return modules


def plan_papers(records: Path) -> list[Paper]:
    """Plans the tables of all papers, with the runs that a folder has of them."""
    papers = []
    for name, module in find_paper_modules().items():
        tables = [plans.plan_table(table, records, seeds=table.seeds) for table in module.TABLES]
        papers.append(Paper(name, module, tables))
    return papers


def make_paper_page(paper: Paper, studies: Iterable[Study], notes: str) -> str:
    """Makes the page of a paper: its tables, those of the `studies` that are its own, and `notes` on its runs."""
    module = paper.module
    card = read_card(module.__doc__ or "")
    sections = make_table_sections(paper.tables)
    reasons: dict[str, str] = getattr(module, "NOT_PLANNED", {})
    not_planned = [f"- {where}: {reason.rstrip('.')}." for where, reason in reasons.items()]
    sections["### Not planned"] = "\n".join(not_planned)
    sections["## Studies"] = "\n".join(list_study_links(module, studies))
    for title, text in card.sections.items():
        if title.startswith(SHOWN_SECTIONS):
            sections[f"## {title}"] = text
    sections["## What did not work"] = notes.strip()

    file = f"papers/{paper.name}.py"
    links = f"Its file is [{file}](../../{file}). Its claims stand on [the first page](../README.md)."
    head = "\n\n".join([f"# {card.title}", *card.paragraphs, links])
    return join_sections(head, sections)


def make_table_sections(planned: Iterable[plans.TablePlan]) -> dict[str, str]:
    """Makes the sections of the tables that have a finished run, beside the paper's numbers, and of the others."""
    shown = ["A run counts that has all settings of the table."]
    lacking = []
    for plan in planned:
        command = f"`fedcli table {plan.table.name}`"
        if any(run.outcome == "finished" for run in plan.runs):
            shown.append(render(paper_tables.compare_with_paper(plan)).rstrip())
            if any(run.needs_running for run in plan.runs):
                shown.append(f"{command} runs what is missing.")
        else:
            lacking.append([escape_markdown(plan.title), str(len(plan.cells)), command])
    sections = {"## Tables": "\n\n".join(shown)}
    if lacking:
        sections["### Without a finished run"] = render_github_table(["Table", "Cells", "Command"], lacking)
    return sections


def list_study_links(module: ModuleType, studies: Iterable[Study]) -> list[str]:
    """Lists the studies that run a method or a protocol of a paper's file, a line each with its first finding."""
    protocols = {protocol.name for protocol in module.PROTOCOLS}
    methods = {method.name for method in registry.methods().values() if method.module is module}
    lines = []
    for study in studies:
        runs_protocol = any(record["protocol"] in protocols for record in study.records)
        runs_method = any(record["method"] in methods for record in study.records)
        if not (runs_protocol or runs_method):
            continue
        first_line, _, _ = study.intro.partition("\n")
        line = f"- [{first_line.lstrip('# ')}](../{study.name}.md)"
        if study.finding_lines:
            line += f": {study.finding_lines[0]}"
        lines.append(line)
    return lines
