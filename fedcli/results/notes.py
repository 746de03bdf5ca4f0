"""The notes below tables: what a reader must know of the numbers and the runs, each sentence only where it applies.

There are notes on tables of runs, and notes on a paper's table beside ours. They are plain texts, which
`fedcli.results.render` escapes.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from fedcli import registry
from fedcli.declarations import Table, flag_of
from fedcli.results.columns import ColumnSet
from fedcli.results.groups import SeedGroup, find_comparable_groups, find_tested_model
from fedcli.results.metrics import Metric
from fedcli.results.plans import IN_TEXT, PlannedRun, TablePlan
from fedcli.results.printed_numbers import find_reported_table
from fedcli.runs.identity import FIRST_SETTINGS, NOT_SETTINGS, recorded_changes
from fedcli.runs.options import given_options, inactive_term
from fedcli.runs.origins import recorded_origins
from fedcli.runs.record import outcome_of
from fedcli.runs.schema import Record
from fedcli.runs.settings_text import reductions, settings_text


def _write_bold_sentence(best: str, interval: str = "95 % interval (Student's t)") -> str:
    return f"Bold: the best {best}, where the {interval} of its lead over the second, paired by seed, leaves out zero."


BOLD_AMONG_ROWS = _write_bold_sentence(
    "mean among rows with the same protocol, data set, partition, rounds and selection rule"
)
BOLD_IN_COLUMN = _write_bold_sentence("mean of ours in a column")
BOLD_IN_CAPTION = _write_bold_sentence("accuracy", interval="95 % interval")
DIVERGED = (
    "Diverged: a loss became infinite or NaN. Selection by validation takes the best round before; other means leave "
    "the run out, and say so."
)
MODELS = (
    'Model: which one is tested for the headline, the "global" one that all clients share or each client\'s own '
    '"personal" one; the column "global, %" has the global model of methods that have both.'
)
MODELS_IN_CAPTION = "Model: the one that is tested, the global one of all clients or each client's personal one."
GLOBAL_IN_CAPTION = "Global: accuracy of the global model of methods that have one beside personal models."
LEADS = "Lead: mean difference from the best other row, paired by seed, with its 95 % interval (Student's t)."
ACROSS_MODELS = (
    "A lead, or bold, of a row with personal models over one with a global model compares two tasks, since a global "
    "model serves all clients and a personal one its own."
)


DIFFERENCE = (
    "Difference: ours less the paper's, taken as exact, with a 95 % interval over seeds (Student's t); floats are "
    "rounded as the paper's."
)


# Notes on tables of runs


def write_notes_on_numbers(groups: Sequence[SeedGroup]) -> list[str]:
    """Writes what a reader must know to read the numbers of a table of runs."""
    records = _list_records(groups)
    notes = ["Mean ± sample standard deviation over runs (number of runs); a value without ± is one run."]
    if len(set(map(find_tested_model, records))) > 1:
        notes.append(MODELS)
    if "diverged" in map(outcome_of, records):
        notes.append(DIVERGED)
    return notes


def write_notes_on_leads(groups: Sequence[SeedGroup], *, has_leads: bool, has_bold: bool) -> list[str]:
    """Writes what a reader must know of leads and of bold numbers."""
    notes = []
    if has_leads:
        notes.append(LEADS)
    if has_bold:
        notes.append(BOLD_AMONG_ROWS)
    if (has_bold or has_leads) and compares_models(groups):
        notes.append(ACROSS_MODELS)
    return notes


def compares_models(groups: Sequence[SeedGroup]) -> bool:
    """Returns whether rows with a global model are compared with rows with personal models."""
    for comparable in find_comparable_groups(groups):
        models = {find_tested_model(group.first) for group in comparable.values()}
        if {"global", "personal"} <= models:
            return True
    return False


def write_notes_on_runs(groups: Sequence[SeedGroup]) -> list[str]:
    """Writes what a reader must know of the runs behind a table."""
    notes = [
        *_write_notes_on_repeated_seeds(groups),
        *_write_notes_on_reductions(groups),
        *_write_notes_on_inactive_terms(groups),
        *write_notes_on_changes(groups),
        *_write_notes_on_given_options(groups),
    ]
    return list(dict.fromkeys(notes))


def _write_notes_on_repeated_seeds(groups: Sequence[SeedGroup]) -> list[str]:
    """Says which rows have several finished runs of one seed, which differ in their parameters."""
    notes = []
    for group in groups:
        num_runs = Counter(record["seed"] for record in group.finished)
        for seed, count in num_runs.items():
            if count > 1:
                notes.append(
                    f"{group.title} has {count} runs of seed {seed}, which came out differently: its "
                    "mean counts each of them, its lead the last."
                )
    return notes


def _write_notes_on_reductions(groups: Sequence[SeedGroup]) -> list[str]:
    texts = dict.fromkeys(", ".join(reductions(record).values()) for record in _list_records(groups))
    reduced = [text for text in texts if text]
    return [f"Reduced against the protocol: {'; or '.join(reduced)}."] if reduced else []


def _write_notes_on_inactive_terms(groups: Sequence[SeedGroup]) -> list[str]:
    notes = []
    for group in groups:
        method = registry.methods().get(group.first["method"])
        term = inactive_term(group.first["config"], method) if method else ""
        if term:
            notes.append(f"Inactive in {group.title}: {term}.")
    return notes


def _write_notes_on_given_options(groups: Sequence[SeedGroup]) -> list[str]:
    """Lists the options that were given with the runs, without those that the table shows."""
    options: dict[str, None] = {}  # in words, each once
    for group in groups:
        record = group.first
        shown = {*FIRST_SETTINGS, "rounds", *NOT_SETTINGS, *group.differing_settings, *reductions(record)}
        for name, value in given_options(record["config"], recorded_origins(record["origin"])).items():
            if name not in shown:
                options[settings_text({name: value})] = None
    return [f"Options given with the runs: {'; '.join(options)}."] if options else []


def write_notes_on_metrics(groups: Sequence[SeedGroup], columns: ColumnSet) -> list[str]:
    """Says which runs lack a metric, and which have it of another round than the others, a sentence for each metric."""
    metrics = columns.metrics.values()
    return [*_write_notes_on_lacking_options(groups, metrics), *_write_notes_on_different_rounds(groups, metrics)]


def _write_notes_on_lacking_options(groups: Sequence[SeedGroup], metrics: Iterable[Metric]) -> list[str]:
    """Says which rows have runs without the option that puts a metric into their records."""
    sentences = []
    for metric in metrics:
        option = metric.kind.run_option
        if not option:
            continue
        without_option = []
        for group in groups:
            lacking = [record for record in group.finished if not record["config"].get(option)]
            if lacking:
                without_option.append(_name_with_seeds(group, lacking))
        if without_option:
            sentences.append(
                f"{metric.name} is not in the records of {', '.join(without_option)}: it needs runs with "
                f"{flag_of(option)}."
            )
    return sentences


def _write_notes_on_different_rounds(groups: Sequence[SeedGroup], metrics: Iterable[Metric]) -> list[str]:
    """Says which rows have values of the last round's models where others have those of the headline's models."""
    sentences = []
    for metric in metrics:
        if not metric.are_of_different_rounds(_list_records(groups)):
            continue
        of_last_round = []
        for group in groups:
            measured = [record for record in group.records if metric.read_value(record) is not None]
            not_selected = [record for record in measured if "selected" not in metric.find_measured_rounds(record)]
            if not_selected:
                of_last_round.append(_name_with_seeds(group, not_selected))
        sentences.append(
            f"{metric.name} is of the last round's models of {', '.join(of_last_round)} and of the headline's of the "
            "others, which do not compare: 'fedcli quality' measures the headline's."
        )
    return sentences


def _name_with_seeds(group: SeedGroup, records: Iterable[Record]) -> str:
    """Names a group with the seeds of some of its runs."""
    seeds = ", ".join(str(record["seed"]) for record in records)
    return f"{group.title} (seed {seeds})"


def write_notes_on_changes(groups: Sequence[SeedGroup]) -> list[str]:
    """Says what of code, machine and versions has changed between the rounds of runs, a sentence for each change."""
    changes = []
    for group in groups:
        for record in group.records:
            run_title = f"{group.title}, seed {record['seed']}"
            changes += [f"{run_title}: {change}." for change in recorded_changes(record)]
    return changes


def _list_records(groups: Sequence[SeedGroup]) -> list[Record]:
    return [record for group in groups for record in group.records]


# Notes on a paper's table beside ours


def write_notes_on_paper_table(plan: TablePlan, *, has_differences: bool, has_bold: bool) -> list[str]:
    """Writes what a reader must know of a paper's table beside ours."""
    notes = ["Ours: mean ± sample standard deviation over seeds (runs)."]
    if has_differences:
        notes.append(DIFFERENCE)
    if any(run.outcome == "diverged" for run in plan.runs):
        notes.append(DIVERGED)
    if has_bold:
        notes.append(BOLD_IN_COLUMN)
    notes.append(_write_note_on_selections(plan.runs))
    notes += _write_notes_on_tuned_options(plan.runs)
    notes += _write_notes_on_failures(plan.runs)
    notes += _write_notes_on_inactive_terms_of_plan(plan.runs)
    notes += _write_notes_on_outdated_runs(plan.runs)
    notes += _write_notes_on_other_folders(plan)
    notes += _write_notes_on_changes_of_plan(plan.runs)
    notes += _quote_paper(plan.table)
    notes += plan.table.notes
    return list(dict.fromkeys(notes))


def _write_note_on_selections(runs: Iterable[PlannedRun]) -> str:
    selections = sorted({run.setup.selection for run in runs})
    return f"The round that counts in a run: {', '.join(selections)}."


def _write_notes_on_tuned_options(runs: Iterable[PlannedRun]) -> list[str]:
    """Lists the options that `fedcli tune` has chosen for each method."""
    texts = []
    for run in runs:
        chosen = {name: run.given.values[name] for name in sorted(run.given.sources)}
        if chosen:
            texts.append(f"{run.setup.method.name}: {settings_text(chosen)}")
    return [f"Tuned by validation accuracy: {'; '.join(dict.fromkeys(texts))}."] if texts else []


def _write_notes_on_failures(runs: Iterable[PlannedRun]) -> list[str]:
    failed = [f"{run.folder} ({run.record['error']})" for run in runs if run.record and "error" in run.record]
    return [f"Failed: {'; '.join(failed)}."] if failed else []


def _write_notes_on_inactive_terms_of_plan(runs: Iterable[PlannedRun]) -> list[str]:
    terms = [inactive_term(run.setup.all_options(), run.setup.method) for run in runs]
    return [f"Inactive: {term}." for term in terms if term]


def _write_notes_on_outdated_runs(runs: Iterable[PlannedRun]) -> list[str]:
    folders = [str(run.folder) for run in runs if run.is_outdated]
    if not folders:
        return []
    return [f"Made with another version of the code, which computed something else: {', '.join(folders)}."]


def _write_notes_on_other_folders(plan: TablePlan) -> list[str]:
    begun = {run.folder for run in plan.runs if run.record}
    elsewhere = {folder for folder in begun if not folder.is_relative_to(plan.folder)}
    if not elsewhere:
        return []
    parents = ", ".join(sorted({str(folder.parent) for folder in elsewhere}))
    return [f"Runs that were there before, elsewhere than in {plan.folder}: {len(elsewhere)}, in {parents}."]


def _write_notes_on_changes_of_plan(runs: Iterable[PlannedRun]) -> list[str]:
    """Says what of code, machine and versions has changed between the rounds of planned runs."""
    notes = []
    for run in runs:
        if run.record:
            notes += [f"{run.folder}: {change}." for change in recorded_changes(run.record)]
    return sorted(notes)


def _quote_paper(table: Table) -> list[str]:
    """Quotes what the paper says of its table; numbers outside tables have no such remarks in common."""
    if table.reported_table == IN_TEXT:
        return []
    reported = find_reported_table(table)
    return [f"Paper: {reported[key].rstrip('.')}." for key in ("setting", "notes") if reported.get(key)]
