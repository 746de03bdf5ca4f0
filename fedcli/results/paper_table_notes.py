"""What a reader must know of a paper's table beside ours, each sentence only where it applies."""

from collections.abc import Iterable

from fedcli.declarations import Table
from fedcli.results.notes import BOLD_IN_COLUMN, DIVERGED
from fedcli.results.plans import IN_TEXT, PlannedRun, TablePlan
from fedcli.results.printed_numbers import find_reported_table
from fedcli.runs.identity import recorded_changes
from fedcli.runs.options import inactive_term

DIFFERENCE = (
    "Difference: ours less the paper's, taken as exact, with a 95 % interval over seeds (Student's t); floats are "
    "rounded as the paper's."
)


def notes_on_paper_table(plan: TablePlan, *, has_differences: bool, has_bold: bool) -> list[str]:
    """All that applies to a planned table, each once."""
    notes = ["Ours: mean ± sample standard deviation over seeds (runs)."]
    if has_differences:
        notes.append(DIFFERENCE)
    if any(run.outcome == "diverged" for run in plan.runs):
        notes.append(DIVERGED)
    if has_bold:
        notes.append(BOLD_IN_COLUMN)
    notes.append(_note_on_selections(plan.runs))
    notes += _notes_on_failures(plan.runs)
    notes += _notes_on_inactive_terms(plan.runs)
    notes += _notes_on_outdated_runs(plan.runs)
    notes += _notes_on_other_folders(plan)
    notes += _notes_on_changes(plan.runs)
    notes += _notes_of_paper(plan.table)
    notes += plan.table.notes
    return list(dict.fromkeys(notes))


def _note_on_selections(runs: Iterable[PlannedRun]) -> str:
    selections = sorted({run.setup.selection for run in runs})
    return f"The round that counts in a run: {', '.join(selections)}."


def _notes_on_failures(runs: Iterable[PlannedRun]) -> list[str]:
    failed = [f"{run.folder} ({run.record['error']})" for run in runs if run.record and "error" in run.record]
    return [f"Failed: {'; '.join(failed)}."] if failed else []


def _notes_on_inactive_terms(runs: Iterable[PlannedRun]) -> list[str]:
    terms = [inactive_term(run.setup.all_options(), run.setup.method) for run in runs]
    return [f"Inactive: {term}." for term in terms if term]


def _notes_on_outdated_runs(runs: Iterable[PlannedRun]) -> list[str]:
    folders = [str(run.folder) for run in runs if run.is_outdated]
    if not folders:
        return []
    return [f"Made with another version of the code, which computed something else: {', '.join(folders)}."]


def _notes_on_other_folders(plan: TablePlan) -> list[str]:
    begun = {run.folder for run in plan.runs if run.record}
    elsewhere = {folder for folder in begun if not folder.is_relative_to(plan.folder)}
    if not elsewhere:
        return []
    parents = ", ".join(sorted({str(folder.parent) for folder in elsewhere}))
    return [f"Runs that were there before, elsewhere than in {plan.folder}: {len(elsewhere)}, in {parents}."]


def _notes_on_changes(runs: Iterable[PlannedRun]) -> list[str]:
    """What of code, machine and versions has changed between the rounds of runs."""
    notes = []
    for run in runs:
        if run.record:
            notes += [f"{run.folder}: {change}." for change in recorded_changes(run.record)]
    return sorted(notes)


def _notes_of_paper(table: Table) -> list[str]:
    """What the paper says of its table; numbers outside tables have no such remarks in common."""
    _, name_in_paper = table.reported
    if name_in_paper == IN_TEXT:
        return []
    reported = find_reported_table(table)
    return [f"Paper: {reported[key].rstrip('.')}." for key in ("setting", "notes") if reported.get(key)]
