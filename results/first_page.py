"""The first page: the claims of all papers, how much of their tables has been run, and the studies."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
from deciding_runs import describe_deciding_runs, tabulate_benchmarks
from paper_page import Paper
from sections import LEGEND, join_sections
from studies import Study, describe_modified_checkouts

from fedcli import registry
from fedcli.results import claim_tables, durations, paper_tables, plans, verdicts
from fedcli.results.frame import read_runs
from fedcli.results.render import MISSING, render, render_github_table

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
    """The first page: the claims, how much of what the papers print has been run, and the studies."""
    counts = claim_tables.describe_counts(answers)
    sections = {
        "## What the papers claim, and what is so": f"{counts} {ABOUT_CLAIMS}\n\n{render_claims(records, answers)}",
        "## How much of what the papers print has been run": render_coverage(papers),
        "## Studies": f"{render_studies(studies)}\n\n{LEGEND}\n{OTHER_PAGES}",
    }
    return join_sections(f"# Results\n\n{ABOUT_THIS_PAGE}", sections)


def render_claims(records: Path, answers: Sequence[verdicts.Answer]) -> str:
    """The claims with their verdicts, differences and runs."""
    timed_runs = durations.tabulate_times(read_runs([records]))
    timed_benchmarks = tabulate_benchmarks(records.parent / "speed")
    timed = pd.concat([timed_runs, timed_benchmarks])
    table = claim_tables.build_claims_table(answers, [describe_runs(answer, records, timed) for answer in answers])
    notes = [*table.notes, *list_code_notes(answers), ABOUT_MODIFIED_CHECKOUTS]
    return render(replace(table, notes=notes)).rstrip()


def render_studies(studies: Iterable[Study]) -> str:
    """The studies with links to their pages."""
    rows = []
    for study in studies:
        first_finding = study.finding_lines[0] if study.finding_lines else MISSING
        rows.append([f"[{study.name}]({study.name}.md)", first_finding])
    return render_github_table(["Study", "First finding"], rows)


def describe_runs(answer: verdicts.Answer, records: Path, timed: pd.DataFrame) -> str:
    """Which runs a claim has, with links to the pages of their studies, and what would decide it."""
    remarks = []
    folders = answer.comparison.evidence.folders
    study_names = dict.fromkeys(folder.relative_to(records).parts[0] for folder in folders)
    if study_names:
        links = ", ".join(f"[{name}]({name}.md)" for name in study_names)
        remarks.append(f"{answer.size}: {links}")
    by_modified = describe_modified_checkouts(run.record for run in read_runs(folders))
    if by_modified:
        remarks.append(by_modified)
    limiting_study = answer.claim.limiting_study
    if study_names and limiting_study:
        remarks.append(f"but see [{limiting_study}]({limiting_study}.md)")
    deciding = describe_deciding_runs(answer, records, timed)
    if deciding:
        remarks.append(f"decided by {deciding}")
    return "; ".join(remarks)


def list_code_notes(answers: Iterable[verdicts.Answer]) -> list[str]:
    """Where claims were run in full by the authors' code, what the papers' texts have instead, a line a text."""
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
    """How many of the numbers that the papers print have been run in full."""
    lines = []
    complete = []  # names of tables
    for paper in papers:
        num_printed = 0
        num_in_full = 0
        for plan in paper.tables:
            are_in_full = cells_in_full(plan)
            num_printed += len(are_in_full)
            num_in_full += sum(are_in_full)
            if are_in_full and all(are_in_full):
                complete.append(plan.table.name)
        link = f"[{paper.title}](papers/{paper.name}.md)"
        lines.append([link, f"{num_printed:,}", f"{num_in_full:,}"])
    table = render_github_table(["Paper", "Printed cells", "In full, all seeds"], lines, number_columns=(1, 2))
    names = ", ".join(complete) or "none"
    return f"{table}\n\nRun in full, every cell here that has a printed number: {names}.\n\n{ABOUT_COVERAGE}"


def cells_in_full(plan: plans.TablePlan) -> list[bool]:
    """For each cell of a table that the paper prints, whether all its runs count."""
    in_full = []
    for cell in paper_tables.compare_cells(plan).values():
        if cell.paper_value is not None and cell.runs is not None:
            in_full.append(cell.runs.are_complete)
    return in_full
