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
from fedcli.results import claims, durations, paper_tables, plans, tables
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

    A `README.md` beside the folder gets the number of claims between two marks.
    """
    records = results / "records"
    studies = [read_study(file.parent) for file in sorted(records.glob("*/intro.md"))]
    answers = claims.answers(registry.claims(), [records])
    made = []
    for study in studies:
        figures = tuple(Figure(study, kind) for kind in _charts(study))
        made.append(Page(Path(f"{study.name}.md"), study_page(study), figures))
    planned = {}
    for name, module in papers().items():
        planned[name] = [plans.plan_table(table, records, seeds=table.seeds) for table in module.TABLES]
        notes = results / "papers" / "notes" / f"{name}.md"
        missed = notes.read_text(encoding="utf-8") if notes.is_file() else ""
        text = paper_page(module, planned[name], studies, missed)
        made.append(Page(Path("papers") / f"{name}.md", text.replace(f"{records}/", "records/")))
    made.append(Page(Path("README.md"), first_page(records, studies, answers, coverage(planned))))
    readme = results.parent / "README.md"
    if readme.is_file():
        table = claims_by_paper(planned, answers)
        made.append(Page(Path("../README.md"), between_marks(readme.read_text(encoding="utf-8"), "claims", table)))
    if (results.parent / "papers").is_dir():
        verdicts = render(claims.claims_sheet(answers), "csv")
        made.append(Page(Path("../papers") / claims.SHIPPED, verdicts.replace(f"{records}/", "")))
    return made


def coverage(planned: Mapping[str, Sequence[plans.TablePlan]]) -> str:
    """How many of the numbers that the papers print have been run in full, by the papers' tables as `planned`."""
    lines = []
    complete = []
    for name, tables_of_paper in planned.items():
        cells: list[bool] = []
        for plan in tables_of_paper:
            in_full = cells_in_full(plan)
            cells += in_full
            if in_full and all(in_full):
                complete.append(plan.table.name)
        lines.append([f"[{_title(tables_of_paper)}](papers/{name}.md)", f"{len(cells):,}", f"{sum(cells):,}"])
    table = github(["Paper", "Printed cells", "In full, all seeds"], lines, 1)
    names = ", ".join(complete) or "none"
    return f"{table}\n\nRun in full, every cell here that has a printed number: {names}.\n\n{COVERAGE}"


def claims_by_paper(planned: Mapping[str, Sequence[plans.TablePlan]], answers: Sequence[claims.Answer]) -> str:
    """How many claims of each paper have which verdict, as a table."""
    lines = []
    for name, tables_of_paper in planned.items():
        table_names = {plan.table.name for plan in tables_of_paper}
        counts = Counter(answer.verdict for answer in answers if answer.claim.table in table_names)
        numbers = [str(counts[verdict]) for verdict in claims.VERDICTS]
        lines.append([f"[{_title(tables_of_paper)}](results/papers/{name}.md)", *numbers])
    columns = ["Claims of", *map(str.capitalize, claims.VERDICTS)]
    return github(columns, lines, 1)


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


def _page(head: str, parts: Mapping[str, str]) -> str:
    """A page in Markdown: its head, and texts by their headings, without empty ones."""
    blocks = [head]
    for heading, text in parts.items():
        if text:
            blocks.append(f"{heading}\n\n{text}")
    return "\n\n".join(blocks) + "\n"


def first_page(records: Path, studies: Sequence[Study], answers: Sequence[claims.Answer], covered: str) -> str:
    """The first page: the claims, how much of the papers is `covered`, and the studies."""
    timed = pd.concat([durations.paces(read_runs([records])), durations.benched(records.parent / "speed")])
    sheet = claims.claims_sheet(answers)
    lines = []
    for line, answer in zip(sheet.lines, answers, strict=True):
        *cells, _ = line  # here the last column, of the runs, has links to their pages
        lines.append([*cells, _runs_of_claim(answer, records, timed)])
    notes = (*sheet.notes, *texts_instead(answers), MODIFIED)
    claimed = render(replace(sheet, lines=lines, notes=notes)).rstrip()
    rows = []
    for study in studies:
        first_finding = study.findings[0] if study.findings else MISSING
        rows.append([f"[{study.name}]({study.name}.md)", first_finding])
    parts = {
        "## What the papers claim, and what is so": f"{claims.counted(answers)} {CLAIMS}\n\n{claimed}",
        "## How much of what the papers print has been run": covered,
        "## Studies": f"{github(['Study', 'First finding'], rows)}\n\n{LEGEND}\n{OTHERS}",
    }
    return _page(f"# Results\n\n{MADE}", parts)


def _runs_of_claim(answer: claims.Answer, records: Path, timed: pd.DataFrame) -> str:
    """Which runs a claim has, with links to the pages of their studies, and what would decide it."""
    remarks = []
    studies = dict.fromkeys(folder.relative_to(records).parts[0] for folder in answer.runs)
    if studies:
        links = ", ".join(f"[{name}]({name}.md)" for name in studies)
        remarks.append(f"{answer.size}: {links}")
    by_modified = modified(read_runs(answer.runs)["record"])
    if by_modified:
        remarks.append(by_modified)
    see = answer.claim.see
    if studies and see:
        remarks.append(f"but see [{see}]({see}.md)")
    deciding = durations.decided_by(answer, records, timed)
    if deciding:
        remarks.append(f"decided by {deciding}")
    return "; ".join(remarks)


def texts_instead(answers: Iterable[claims.Answer]) -> list[str]:
    """What the papers' texts have where claims were run in full by the authors' code, a line a text."""
    papers_of: dict[str, set[str]] = {}
    for answer in answers:
        if answer.runs and answer.text_has and not answer.reduced:
            paper, _ = registry.find_table(answer.claim.table).reported
            papers_of.setdefault(answer.text_has, set()).add(paper)
    notes = []
    for text, names in papers_of.items():
        notes.append(f"In full, by the authors' code: the text of {' and '.join(sorted(names))} has {text}.")
    return notes


def study_page(study: Study) -> str:
    """The page of a study."""
    records = study.records
    parts = {}
    if study.findings:
        lines = "\n".join(f"- {line}" for line in study.findings)
        parts["## Findings"] = f"{lines}\n\n{LEGEND}"
    table = render(tables.sheet(records, study.metrics)).strip()
    shown = [f"![{title}]({Figure(study, kind).path.as_posix()})" for kind, title in _charts(study).items()]
    parts["## Results"] = "\n\n".join([table, *shown])
    by_seed = tables.sheet(records, study.metrics, by_seed=True)
    parts["## Every run"] = render(replace(by_seed, setting="", notes=())).strip()
    machines = tables.machines(records)
    by_modified = modified(records)
    if by_modified:
        machines = [*machines, f"- {by_modified}: their commit ends in `+`."]
    parts["## Machines and versions"] = "\n".join(machines)
    commands = tables.commands(records)
    if commands:
        typed = "\n".join(f"$ {command}" for command in commands)
        parts["## Commands"] = f"```console\n{typed}\n```\n\n{VERIFY}"
    return _page(study.intro, parts)


def _charts(study: Study) -> dict[str, str]:
    """What the figures of a study show, by the kind of the chart."""
    tested_rounds = []
    for record in study.records:
        tested_rounds.append(sum(entry["test_accuracy"] is not None for entry in record["rounds"]))
    charts = {}
    if max(tested_rounds) > 2:  # two points say nothing
        charts["curves"] = "Test accuracy over rounds"
    return charts | study.figures


def paper_page(module: ModuleType, planned: Iterable[plans.TablePlan], studies: Iterable[Study], missed: str) -> str:
    """The page of a paper: its `planned` tables, those of the `studies` that are its own, and what was `missed`."""
    before_sections, *_ = re.split(r"(?m)^\S.*\n(?= )", module.__doc__)
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
    parts = {"## Tables": "\n\n".join(shown)}
    if lacking:
        parts["### Without a finished run"] = github(["Table", "Cells", "Command"], lacking)
    not_planned = [f"- {place}: {reason.rstrip('.')}." for place, reason in module.NOT_PLANNED.items()]
    parts["### Not planned"] = "\n".join(not_planned)
    parts["## Studies"] = "\n".join(_links(module, studies))
    for heading, text in CARD.findall(module.__doc__):
        parts[f"## {heading}"] = textwrap.dedent(text).strip()
    parts["## What did not work"] = missed.strip()
    return _page("\n\n".join([f"# {title.rstrip('.')}", *paragraphs]), parts)


def _links(module: ModuleType, studies: Iterable[Study]) -> list[str]:
    """A line for each study that runs a method or a protocol of a paper's file, with its first finding."""
    names = {protocol.name for protocol in module.PROTOCOLS}
    names |= {method.name for method in registry.methods().values() if method.module is module}
    lines = []
    for study in studies:
        if any(names & {record["method"], record["protocol"]} for record in study.records):
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
        write_atomically(folder / page.path, partial(Path.write_text, data=page.text, encoding="utf-8"))
        print(folder / page.path)
        for figure in page.figures:
            write_figure(folder / figure.path, find_chart(figure.kind), named(figure.study), page=True)


if __name__ == "__main__":
    typer.run(main)
