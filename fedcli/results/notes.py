"""What a reader of a table of runs must know of its numbers and runs, each sentence only where it applies."""

from collections import Counter
from collections.abc import Sequence

from fedcli import registry
from fedcli.declarations import flag_of
from fedcli.results.columns import Columns
from fedcli.results.groups import SeedGroup, find_comparable_groups, find_tested_model
from fedcli.results.render import escape_markdown
from fedcli.runs.identity import FIRST_SETTINGS, NOT_SETTINGS, recorded_changes
from fedcli.runs.options import given_options, inactive_term
from fedcli.runs.origins import recorded_origins
from fedcli.runs.record import outcome_of
from fedcli.runs.schema import Record
from fedcli.runs.settings_text import reductions, settings_text


def _bold_sentence(best: str, interval: str = "95 % interval (Student's t)") -> str:
    return f"Bold: the best {best}, where the {interval} of its lead over the second, paired by seed, leaves out zero."


BOLD_AMONG_ROWS = _bold_sentence(
    "mean among rows with the same protocol, data set, partition, rounds and selection rule"
)
BOLD_IN_COLUMN = _bold_sentence("mean of ours in a column")
BOLD_IN_CAPTION = _bold_sentence("accuracy", interval="95 % interval")
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


def write_notes_on_numbers(groups: Sequence[SeedGroup]) -> list[str]:
    """What a reader must know to read the numbers of a table, each only where it applies."""
    records = _list_records(groups)
    notes = ["Mean ± sample standard deviation over runs (number of runs); a value without ± is one run."]
    if len(set(map(find_tested_model, records))) > 1:
        notes.append(MODELS)
    if "diverged" in map(outcome_of, records):
        notes.append(DIVERGED)
    return notes


def write_notes_on_leads(groups: Sequence[SeedGroup], *, has_leads: bool, has_bold: bool) -> list[str]:
    """What a reader must know of leads and bold, each only where it applies."""
    notes = []
    if has_leads:
        notes.append(LEADS)
    if has_bold:
        notes.append(BOLD_AMONG_ROWS)
    if (has_bold or has_leads) and compares_models(groups):
        notes.append(ACROSS_MODELS)
    return notes


def compares_models(groups: Sequence[SeedGroup]) -> bool:
    """Whether rows with a global model are compared with rows of personal ones."""
    for indices in find_comparable_groups(groups):
        kinds = {find_tested_model(groups[index].first) for index in indices}
        if {"global", "personal"} <= kinds:
            return True
    return False


def write_notes_on_runs(groups: Sequence[SeedGroup]) -> list[str]:
    """What a reader must know of the runs behind a table, each only where it applies."""
    notes = [
        *_write_notes_on_repeated_seeds(groups),
        *_write_notes_on_reductions(groups),
        *_write_notes_on_inactive_terms(groups),
        *write_notes_on_changes(groups),
        *_write_notes_on_given_options(groups),
    ]
    return list(dict.fromkeys(notes))


def _write_notes_on_repeated_seeds(groups: Sequence[SeedGroup]) -> list[str]:
    """Which rows have several finished runs of one seed that differ in their parameters; copies of a run count once."""
    notes = []
    for group in groups:
        num_runs = Counter(record["seed"] for record in group.finished)
        for seed, count in num_runs.items():
            if count > 1:
                notes.append(
                    f"{escape_markdown(group.title)} has {count} runs of seed {seed}, which came out differently: its "
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
            notes.append(f"Inactive in {escape_markdown(group.title)}: {term}.")
    return notes


def _write_notes_on_given_options(groups: Sequence[SeedGroup]) -> list[str]:
    """The options that were given with the runs, but for those that the table shows."""
    options: dict[str, None] = {}  # in words, each once
    for group in groups:
        record = group.first
        shown = {*FIRST_SETTINGS, "rounds", *NOT_SETTINGS, *group.differing_settings, *reductions(record)}
        for name, value in given_options(record["config"], recorded_origins(record["origin"])).items():
            if name not in shown:
                options[settings_text({name: value})] = None
    return [f"Options given with the runs: {escape_markdown('; '.join(options))}."] if options else []


def write_notes_on_metrics(groups: Sequence[SeedGroup], columns: Columns) -> list[str]:
    """Which runs lack a metric or have another than the others, a sentence for each such metric."""
    sentences = []
    for metric in columns.metrics.values():
        without = []
        for group in groups:
            seeds = [str(record["seed"]) for record in group.finished if not record["config"].get(metric.run_option)]
            if metric.run_option and seeds:
                without.append(f"{escape_markdown(group.title)} (seed {', '.join(seeds)})")
        if without:
            sentences.append(
                f"{metric.name} is not in the records of {', '.join(without)}: it needs runs with "
                f"{flag_of(metric.run_option)}."
            )
    return [*sentences, *_write_notes_on_different_rounds(groups, columns)]


def _write_notes_on_different_rounds(groups: Sequence[SeedGroup], columns: Columns) -> list[str]:
    """Which rows have values of the last round's models where others have those of the headline's."""
    sentences = []
    for metric in columns.metrics.values():
        if not metric.are_of_different_rounds(_list_records(groups)):
            continue
        last = []
        for group in groups:
            measured = [record for record in group.records if metric.read_value(record) is not None]
            seeds = [
                str(record["seed"]) for record in measured if "selected" not in metric.find_measured_rounds(record)
            ]
            if seeds:
                last.append(f"{escape_markdown(group.title)} (seed {', '.join(seeds)})")
        sentences.append(
            f"{metric.name} is of the last round's models of {', '.join(last)} and of the headline's of the others, "
            "which do not compare: 'fedcli quality' measures the headline's."
        )
    return sentences


def write_notes_on_changes(groups: Sequence[SeedGroup]) -> list[str]:
    """What of code, machine and versions has changed between the rounds of runs, a sentence each."""
    changes = []
    for group in groups:
        for record in group.records:
            run_title = f"{escape_markdown(group.title)}, seed {record['seed']}"
            changes += [f"{run_title}: {escape_markdown(change)}." for change in recorded_changes(record)]
    return changes


def _list_records(groups: Sequence[SeedGroup]) -> list[Record]:
    return [record for group in groups for record in group.records]
