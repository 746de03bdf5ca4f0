"""The pages of `results/`: one a study, one a paper from its file's card and the records, and a first one.

    python results/pages.py [DIR]    # write all pages in DIR, this folder by default, and their figures

They are made from the repository alone, so they are the same on every machine.
"""

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, NamedTuple

import pandas as pd
import typer
from studies import Study, modified, named, read_study

from fedcli import registry
from fedcli.figures import find_chart
from fedcli.figures.saving import write_figure
from fedcli.files import write_atomically
from fedcli.results import claim_sheets, claims, durations, paper_tables, plans, tables, verdicts
from fedcli.results.frame import read_runs
from fedcli.results.render import MISSING, between_marks, github, render

HERE = Path(__file__).parent
# Sections of a paper's file that its page repeats: a title, then indented lines.
CARD = re.compile(r"^((?:Readings|Known)\b.*)\n((?:(?: .*)?\n)+)", re.MULTILINE)
LEGEND = (
    "Means over runs and differences paired by seed, with 95 % intervals (Student's t) and, in brackets, the number of "
    "runs or seeds; accuracies in percent. One run has no interval: chance is not ruled out."
)
VERIFY = "`fedcli verify RECORD` repeats a run also where a default has changed since."
MADE = "Written by `make tables` from the records in `records/`; a test fails where they differ."
CLAIMS = (
    "`fedcli claims` prints them with your own runs, and the commands that would decide them. [How a verdict comes "
    "about](../docs/tables-and-claims.md#claims)."
)
COVERAGE = (
    "A cell is a number that a paper prints and a table here plans, with three seeds, or one where the paper prints "
    "single runs."
)
OTHERS = (
    "[board](board/README.md) has tuned methods side by side on small digits, ten seeds each. "
    "[speed](speed/README.md) has the engine against a plain PyTorch loop, by `fedcli bench`."
)
MODIFIED = (
    "By a modified checkout: the record's commit ends in `+`, so the code that ran is that commit's with changes, of "
    "which the record has the hash of the method's file alone."
)


def papers() -> dict[str, ModuleType]:
    """The files of registered methods that declare tables, by their names without `.py`."""
    modules = {}
    for method in registry.methods().values():
        if hasattr(method.module, "TABLES"):
            modules[_file_name(method.module)] = method.module
    return modules


def _file_name(module: ModuleType) -> str:
    """The name of a paper's file, without `.py`."""
    _, _, name = module.__name__.rpartition(".")
    return name


class Figure(NamedTuple):
    """A figure that a page shows."""

    study: Study
    kind: str  # of the chart

    @property
    def path(self) -> Path:
        """Where it stands, under `results`."""
        return Path("figures") / f"{self.study.name}-{self.kind}.png"


@dataclass(frozen=True)
class Page:
    """A page, and the figures that it shows."""

    path: Path  # under `results`
    text: str
    figures: tuple[Figure, ...] = ()


def pages(results: Path) -> list[Page]:
    """All pages of `results`, a folder with `records/<study>` and `papers/notes/<paper>.md`.

    A `README.md` beside the folder gets the number of claims between two marks, and a folder `papers` beside it the
    verdicts that are installed with the package.
    """
    records = results / "records"
    studies = [read_study(file.parent) for file in sorted(records.glob("*/intro.md"))]
    answers = claims.answers(registry.claims(), [records])
    planned = {}
    for name, module in papers().items():
        planned[name] = [plans.plan_table(table, records, seeds=table.seeds) for table in module.TABLES]

    made = []
    for study in studies:
        figures = tuple(Figure(study, kind) for kind in _charts(study))
        made.append(Page(Path(f"{study.name}.md"), study_page(study), figures))
    for name, module in papers().items():
        tables_of_paper = [named_from(results, plan) for plan in planned[name]]
        missed = _notes_on(name, results)
        made.append(Page(Path("papers") / f"{name}.md", paper_page(module, tables_of_paper, studies, missed)))
    made.append(Page(Path("README.md"), first_page(records, studies, answers, coverage(planned))))

    readme = results.parent / "README.md"
    if readme.is_file():
        table = claims_by_paper(planned, answers)
        text = between_marks(readme.read_text(encoding="utf-8"), "claims", table)
        made.append(Page(Path("../README.md"), text))
    if (results.parent / "papers").is_dir():
        made.append(Page(Path("../papers") / claim_sheets.SHIPPED, csv_of_verdicts(records, answers)))
    return made


def _notes_on(paper: str, results: Path) -> str:
    """What a person has written about a paper's runs; empty where there is nothing."""
    notes = results / "papers" / "notes" / f"{paper}.md"
    return notes.read_text(encoding="utf-8") if notes.is_file() else ""


def named_from(results: Path, plan: plans.TablePlan) -> plans.TablePlan:
    """A planned table whose runs have the folders that its page names, those below `results`."""
    runs = []
    for run in plan.runs:
        runs.append(replace(run, folder=run.folder.relative_to(results)))
    return replace(plan, folder=plan.folder.relative_to(results), runs=tuple(runs))


def csv_of_verdicts(records: Path, answers: Iterable[verdicts.Answer]) -> str:
    """The CSV of the claims that is installed with the package; its folders are those below `records`."""
    shipped = []
    for answer in answers:
        folders = tuple(folder.relative_to(records) for folder in answer.evidence.folders)
        pairs = []
        for pair in answer.evidence.pairs:
            folder = pair["folder"].relative_to(records)
            folder_than = pair["folder_than"].relative_to(records)
            pairs.append({**pair, "folder": folder, "folder_than": folder_than})
        evidence = replace(answer.evidence, folders=folders, pairs=tuple(pairs))
        shipped.append(replace(answer, evidence=evidence))
    return render(claim_sheets.claims_sheet(shipped), "csv")


def coverage(planned: Mapping[str, Sequence[plans.TablePlan]]) -> str:
    """How many of the numbers that the papers print have been run in full, by the papers' tables as `planned`."""
    lines = []
    complete = []  # names of tables
    for name, tables_of_paper in planned.items():
        num_printed = 0
        num_in_full = 0
        for plan in tables_of_paper:
            are_in_full = cells_in_full(plan)
            num_printed += len(are_in_full)
            num_in_full += sum(are_in_full)
            if are_in_full and all(are_in_full):
                complete.append(plan.table.name)
        link = f"[{_title(tables_of_paper)}](papers/{name}.md)"
        lines.append([link, f"{num_printed:,}", f"{num_in_full:,}"])
    table = github(["Paper", "Printed cells", "In full, all seeds"], lines, first_number_column=1)
    names = ", ".join(complete) or "none"
    return f"{table}\n\nRun in full, every cell here that has a printed number: {names}.\n\n{COVERAGE}"


def claims_by_paper(planned: Mapping[str, Sequence[plans.TablePlan]], answers: Sequence[verdicts.Answer]) -> str:
    """How many claims of each paper have which verdict, as a table."""
    lines = []
    for name, tables_of_paper in planned.items():
        table_names = {plan.table.name for plan in tables_of_paper}
        counts = Counter(answer.verdict for answer in answers if answer.claim.table in table_names)
        numbers = [str(counts[verdict]) for verdict in verdicts.VERDICTS]
        lines.append([f"[{_title(tables_of_paper)}](results/papers/{name}.md)", *numbers])
    titles = ["Claims of", *(verdict.capitalize() for verdict in verdicts.VERDICTS)]
    return github(titles, lines, first_number_column=1)


def _title(tables_of_paper: Sequence[plans.TablePlan]) -> str:
    """The name of the paper whose tables are planned."""
    first_plan, *_ = tables_of_paper
    title, _ = first_plan.table.reported
    return title


def cells_in_full(plan: plans.TablePlan) -> list[bool]:
    """For each cell of a table that the paper prints, whether all its runs count."""
    in_full = []
    for cell in paper_tables.compare(plan).values:
        if cell["paper"] is not None and "runs_planned" in cell:
            in_full.append(cell["runs_counted"] == cell["runs_planned"])
    return in_full


def _page(head: str, sections: Mapping[str, str]) -> str:
    """A page in Markdown: its head, and texts by their headings, without empty ones."""
    blocks = [head]
    for heading, text in sections.items():
        if text:
            blocks.append(f"{heading}\n\n{text}")
    return "\n\n".join(blocks) + "\n"


def first_page(records: Path, studies: Sequence[Study], answers: Sequence[verdicts.Answer], covered: str) -> str:
    """The first page: the claims, how much of the papers is `covered`, and the studies."""
    timed = pd.concat([durations.paces(read_runs([records])), durations.benched(records.parent / "speed")])
    sheet = claim_sheets.claims_sheet(answers)
    lines = []
    for line, answer in zip(sheet.lines, answers, strict=True):
        *cells, _ = line  # the last one says which runs there are, here with links to their pages
        lines.append([*cells, _runs_of_claim(answer, records, timed)])
    notes = (*sheet.notes, *texts_instead(answers), MODIFIED)
    claimed = render(replace(sheet, lines=lines, notes=notes)).rstrip()
    rows = []
    for study in studies:
        first_finding = study.findings[0] if study.findings else MISSING
        rows.append([f"[{study.name}]({study.name}.md)", first_finding])
    listed = github(["Study", "First finding"], rows)
    sections = {
        "## What the papers claim, and what is so": f"{claim_sheets.counted(answers)} {CLAIMS}\n\n{claimed}",
        "## How much of what the papers print has been run": covered,
        "## Studies": f"{listed}\n\n{LEGEND}\n{OTHERS}",
    }
    return _page(f"# Results\n\n{MADE}", sections)


def _runs_of_claim(answer: verdicts.Answer, records: Path, timed: pd.DataFrame) -> str:
    """Which runs a claim has, with links to the pages of their studies, and what would decide it."""
    remarks = []
    studies = dict.fromkeys(folder.relative_to(records).parts[0] for folder in answer.evidence.folders)
    if studies:
        links = ", ".join(f"[{name}]({name}.md)" for name in studies)
        remarks.append(f"{answer.size}: {links}")
    by_modified = modified(read_runs(answer.evidence.folders)["record"])
    if by_modified:
        remarks.append(by_modified)
    limiting_study = answer.claim.limiting_study
    if studies and limiting_study:
        remarks.append(f"but see [{limiting_study}]({limiting_study}.md)")
    deciding = durations.decided_by(answer, records, timed)
    if deciding:
        remarks.append(f"decided by {deciding}")
    return "; ".join(remarks)


def texts_instead(answers: Iterable[verdicts.Answer]) -> list[str]:
    """What the papers' texts have where claims were run in full by the authors' code, a line a text."""
    papers_of: dict[str, set[str]] = {}
    for answer in answers:
        if answer.evidence.folders and answer.text_has and not answer.evidence.reduced:
            paper, _ = registry.find_table(answer.claim.table).reported
            papers_of.setdefault(answer.text_has, set()).add(paper)
    notes = []
    for text, names in papers_of.items():
        notes.append(f"In full, by the authors' code: the text of {' and '.join(sorted(names))} has {text}.")
    return notes


def study_page(study: Study) -> str:
    """The page of a study."""
    records = study.records
    sections = {}
    if study.findings:
        lines = "\n".join(f"- {line}" for line in study.findings)
        sections["## Findings"] = f"{lines}\n\n{LEGEND}"

    shown = [render(tables.sheet(records, study.metrics)).strip()]
    for kind, title in _charts(study).items():
        figure = Figure(study, kind)
        shown.append(f"![{title}]({figure.path.as_posix()})")
    sections["## Results"] = "\n\n".join(shown)

    by_seed = tables.sheet(records, study.metrics, by_seed=True)
    sections["## Every run"] = render(replace(by_seed, subject="", notes=())).strip()

    machines = list(tables.machines(records))
    by_modified = modified(records)
    if by_modified:
        machines.append(f"- {by_modified}: their commit ends in `+`.")
    sections["## Machines and versions"] = "\n".join(machines)

    commands = tables.commands(records)
    if commands:
        typed = "\n".join(f"$ {command}" for command in commands)
        sections["## Commands"] = f"```console\n{typed}\n```\n\n{VERIFY}"
    return _page(study.intro, sections)


def _charts(study: Study) -> dict[str, str]:
    """What the figures of a study show, by the kind of the chart."""
    tested_rounds = []
    for record in study.records:
        tested_rounds.append(sum(entry["test_accuracy"] is not None for entry in record["rounds"]))
    if max(tested_rounds) <= 2:  # two points say nothing
        return study.figures
    return {"curves": "Test accuracy over rounds", **study.figures}


def paper_page(module: ModuleType, planned: Iterable[plans.TablePlan], studies: Iterable[Study], missed: str) -> str:
    """The page of a paper: its `planned` tables, those of the `studies` that are its own, and what was `missed`."""
    before_sections, *_ = re.split(r"(?m)^\S.*\n(?= )", module.__doc__)  # at a title over indented lines
    title, *paragraphs = before_sections.strip().split("\n\n")
    name = _file_name(module)
    paragraphs.append(
        f"Its file is [papers/{name}.py](../../papers/{name}.py). Its claims stand on [the first page](../README.md)."
    )
    shown = ["A run counts that has all settings of the table."]
    lacking = []
    for plan in planned:
        command = f"`fedcli table {plan.table.name}`"
        if any(run.state == "finished" for run in plan.runs):
            shown.append(render(paper_tables.compare(plan)).rstrip())
            shown.append(f"{command} runs what is missing.")
        else:
            lacking.append([plan.title, str(len(plan.cells)), command])
    sections = {"## Tables": "\n\n".join(shown)}
    if lacking:
        sections["### Without a finished run"] = github(["Table", "Cells", "Command"], lacking)
    not_planned = [f"- {where}: {reason.rstrip('.')}." for where, reason in module.NOT_PLANNED.items()]
    sections["### Not planned"] = "\n".join(not_planned)
    sections["## Studies"] = "\n".join(_links(module, studies))
    for heading, text in CARD.findall(module.__doc__):
        sections[f"## {heading}"] = textwrap.dedent(text).strip()
    sections["## What did not work"] = missed.strip()
    head = "\n\n".join([f"# {title.rstrip('.')}", *paragraphs])
    return _page(head, sections)


def _links(module: ModuleType, studies: Iterable[Study]) -> list[str]:
    """A line for each study that runs a method or a protocol of a paper's file, with its first finding."""
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
        if study.findings:
            line += f": {study.findings[0]}"
        lines.append(line)
    return lines


def main(folder: Annotated[Path, typer.Argument()] = HERE) -> None:
    """Writes all pages in a folder and their figures: one a study, one a paper, and a first one, README.md."""
    if not (folder / "records").is_dir():
        raise SystemExit(f"'{folder}' has no runs for pages (got no folder 'records' in it); name one that has it.")
    for page in pages(folder):
        file = folder / page.path
        write_atomically(file, partial(Path.write_text, data=page.text, encoding="utf-8"))
        print(file)
        for figure in page.figures:
            write_figure(folder / figure.path, find_chart(figure.kind), named(figure.study), page=True)


if __name__ == "__main__":
    typer.run(main)
