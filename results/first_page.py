"""The first page: the claims of all papers, how much of their tables has been run, and the studies."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from deciding_runs import describe_deciding_runs, tabulate_benchmarks
from paper_page import Paper
from sections import LEGEND, join_sections
from studies import Study, describe_modified_checkouts

from fedcli import registry
from fedcli.results import claim_tables, durations, paper_tables, plans, verdicts
from fedcli.results.render import MISSING, render, render_github_table
from fedcli.results.run_records import read_runs

ABOUT_THIS_PAGE = "Written by `make tables` from the records in `records/`; a test fails where they differ."
ABOUT_CLAIMS = (
    "`fedcli claims` prints them with your own runs, and the commands that would decide them. [How a verdict comes "
    "about](../docs/tables-and-claims.md#claims)."
)
ABOUT_COVERAGE = (
    "A cell is a number that a paper prints and a table here plans, with three seeds, or one where the paper prints "
    "single runs."
)
OTHER_PAGES = (
    "[board](board/README.md) has tuned methods side by side on small digits, ten seeds each. "
    "[speed](speed/README.md) has the engine against a plain PyTorch loop, by `fedcli bench`."
)
ABOUT_MODIFIED_CHECKOUTS = (
    "By a modified checkout: the record's commit ends in `+`, so the code that ran is that commit's with changes, of "
    "which the record has the hash of the method's file alone."
)


def make_first_page(
    records: Path, studies: Sequence[Study], answers: Sequence[verdicts.Answer], papers: Iterable[Paper]
) -> str:
    """Makes the first page: the claims, how much of what the papers print has been run, and the studies."""
    counts = claim_tables.describe_counts(answers)
    claims = render_claims(records, studies, answers)
    sections = {
        "## What the papers claim, and what is so": f"{counts} {ABOUT_CLAIMS}\n\n{claims}",
        "## How much of what the papers print has been run": render_coverage(papers),
        "## Studies": f"{render_studies(studies)}\n\n{LEGEND}\n{OTHER_PAGES}",
    }
    return join_sections(f"# Results\n\n{ABOUT_THIS_PAGE}", sections)


def render_claims(records: Path, studies: Iterable[Study], answers: Sequence[verdicts.Answer]) -> str:
    """Renders the claims with their verdicts, differences and runs."""
    names = [study.name for study in studies]
    timed_runs = durations.tabulate_times(read_runs([records]))
    timed_benchmarks = tabulate_benchmarks(records.parent / "speed")
    timed = pd.concat([timed_runs, timed_benchmarks])
    run_texts = [describe_runs(answer, records, names, timed) for answer in answers]
    table = claim_tables.build_claims_table(answers, run_texts)
    notes = [*table.notes, *list_code_notes(answers), ABOUT_MODIFIED_CHECKOUTS]
    return render(replace(table, notes=notes)).rstrip()


def render_studies(studies: Iterable[Study]) -> str:
    """Renders the studies with links to their pages."""
    rows = []
    for study in studies:
        first_finding = study.finding_lines[0] if study.finding_lines else MISSING
        rows.append([f"[{study.name}]({study.name}.md)", first_finding])
    return render_github_table(["Study", "First finding"], rows)


def describe_runs(
    answer: verdicts.Answer, records: Path, study_names: Collection[str], timed: pd.DataFrame
) -> str:  # fmt: skip
    """Describes which runs a claim has, with links to the pages of their studies, and what would decide it.

    A folder of runs that is no study has no page, so its name is no link.
    """
    remarks = []
    folders = answer.comparison.evidence.folders
    folder_names = dict.fromkeys(folder.relative_to(records).parts[0] for folder in folders)
    if folder_names:
        links = ", ".join(f"[{name}]({name}.md)" if name in study_names else name for name in folder_names)
        remarks.append(f"{answer.size}: {links}")
    by_modified = describe_modified_checkouts(run.record for run in read_runs(folders))
    if by_modified:
        remarks.append(by_modified)
    limiting_study = answer.claim.limiting_study
    if folder_names and limiting_study:
        remarks.append(f"but see [{limiting_study}]({limiting_study}.md)")
    deciding = describe_deciding_runs(answer, records, timed)
    if deciding:
        remarks.append(f"decided by {deciding}")
    return "; ".join(remarks)


def list_code_notes(answers: Iterable[verdicts.Answer]) -> list[str]:
    """Lists what the papers' texts have instead where claims were run in full by the authors' code, a line a text."""
    papers_of: dict[str, set[str]] = {}
    for answer in answers:
        evidence = answer.comparison.evidence
        if evidence.folders and answer.context.text_has and not evidence.reduction:
            paper = registry.find_table(answer.claim.table).reported_paper
            papers_of.setdefault(answer.context.text_has, set()).add(paper)
    notes = []
    for text, names in papers_of.items():
        notes.append(f"In full, by the authors' code: the text of {' and '.join(sorted(names))} has {text}.")
    return notes


def render_coverage(papers: Iterable[Paper]) -> str:
    """Renders how many of the numbers that the papers print have been run in full."""
    lines = []
    complete = []  # names of tables
    for paper in papers:
        num_printed = 0
        num_in_full = 0
        for plan in paper.tables:
            coverage = count_printed_cells(plan)
            num_printed += coverage.num_printed
            num_in_full += coverage.num_in_full
            if coverage.is_complete:
                complete.append(plan.table.name)
        link = f"[{paper.title}](papers/{paper.name}.md)"
        lines.append([link, f"{num_printed:,}", f"{num_in_full:,}"])
    table = render_github_table(["Paper", "Printed cells", "In full, all seeds"], lines, number_columns=(1, 2))
    names = ", ".join(complete) or "none"
    return f"{table}\n\nRun in full, every cell here that has a printed number: {names}.\n\n{ABOUT_COVERAGE}"


class Coverage(NamedTuple):
    """How many of the cells of a table that the paper prints have been run.

    Attributes:
        num_printed: The number of printed cells.
        num_in_full: The number of those of which all runs count.
    """

    num_printed: int
    num_in_full: int

    @property
    def is_complete(self) -> bool:
        """Whether there are printed cells and all of them have been run in full."""
        return 0 < self.num_printed == self.num_in_full


def count_printed_cells(plan: plans.TablePlan) -> Coverage:
    """Counts the cells of a table that the paper prints, and those of them that have been run in full."""
    cells = paper_tables.compare_cells(plan).values()
    runs_of_printed = [cell.runs for cell in cells if cell.paper_value is not None and cell.runs is not None]
    return Coverage(len(runs_of_printed), sum(runs.are_complete for runs in runs_of_printed))
