"""The pages of `results/`: one a study, one a paper from its file's card and the records, and a first one.

    python results/pages.py [DIR]    # write all pages in DIR, this folder by default, and their figures

They are made from the repository alone, so they are the same on every machine. The findings of a study are lines made
from the records that its `findings.toml` names:

metrics = ["mean-of-last:50"]         # optional: more columns of the study's table

[figures]                             # optional: more figures, the kind of the chart and what it shows
drift = "Distance of the clients' features"

[runs]                                # groups of runs: a name, and their folders beside the file
Ours = "ours"
Theirs = ["theirs/seed-0", "../another-study/theirs"]

[[findings]]
says = "Ours is ahead"                # optional: a sentence without a number
metric = "last"
of = "Ours"
than = "Theirs"                       # optional: take the difference, paired by seed
than_metric = "classifier"            # optional: another metric for the second group
paper = ["paper:2", "a column"]       # optional: table and column of printed numbers, in rows named as the groups
"""

import re
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import pandas as pd
import typer

from fedcli import registry
from fedcli.declarations import SELECTIONS
from fedcli.errors import UserError
from fedcli.figures import find_chart, plots
from fedcli.files import write_atomically
from fedcli.results import claims, durations, paper_tables, plans, tables
from fedcli.results.frame import find_records, frame_of, read_runs
from fedcli.results.metrics import Metric, find_metric
from fedcli.results.render import MISSING, between_marks, github, render
from fedcli.results.statistics import difference, interval, interval_text
from fedcli.runs.record import Record

HERE = Path(__file__).parent
FIGURE = re.compile(r"\]\((figures/([\w.-]+)-([a-z]+)\.png)\)")
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
WORDS = {  # of metrics whose names say too little
    "last": "last round", "intra": "own domain", "inter": "other domains", "inter:": "other domains than",
}  # fmt: skip


@dataclass(frozen=True)
class Study:
    """A folder of runs, and what its page shows."""

    name: str  # of the folder
    intro: str  # its title, question and set-up, in Markdown
    records: list[Record]
    findings: list[str]  # each a line of Markdown
    metrics: list[str]  # more columns of its table
    figures: dict[str, str]  # what more figures show, by the kind of the chart
    names: dict[Path, str]  # those of its groups of runs, by folder; figures name the runs so


def read_study(folder: Path) -> Study:
    """The study in a folder of runs with `intro.md` and, if it has findings, `findings.toml`.

    Raises:
        UserError: If it has no records, or a finding cannot be made.
    """
    file, groups, lines = folder / "findings.toml", {}, []
    entry: Any = "its text"
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        for name, entry in content.get("runs", {}).items():
            groups[name] = find_records(folder / path for path in ([entry] if isinstance(entry, str) else entry))
        for entry in content.get("findings", []):
            lines.append(finding(entry, groups))
    except (KeyError, ValueError, UserError) as error:  # a TOMLDecodeError is a ValueError
        raise UserError(f"{file} cannot be read ({error}; got {entry}); see the head of results/pages.py.") from error
    intro, shown = (folder / "intro.md").read_text(encoding="utf-8").strip(), content.get("figures", {})
    names = {folder / path: name for name, path in content.get("runs", {}).items() if isinstance(path, str)}
    records = find_records([folder])
    return Study(folder.resolve().name, intro, records, lines, content.get("metrics", []), shown, names)


def named(study: Study) -> list[Record]:
    """The records of a study, those of a group under its name in the place of the method's."""
    records = []
    for record in study.records:
        above = [path for path in (record["folder"], *record["folder"].parents) if path in study.names]
        records.append({**record, "label": study.names[above[0]]} if above else record)
    return records


def modified(records: Iterable[Record]) -> str:
    """How many runs are of a checkout with changes that are not committed, in words; empty for none."""
    records = list(records)
    count = sum(record["commit"].endswith("+") for record in records if record.get("commit"))
    return f"{count} of {len(records)} runs by a modified checkout" if count else ""


def finding(entry: Mapping[str, Any], groups: Mapping[str, list[Record]]) -> str:
    """A finding as a line, "Ours - Theirs, last round: +3.31 [+2.44, +4.19] (3); paper +9.48".

    Args:
        entry: Its keys, see the head of this file.
        groups: Runs by name.

    Raises:
        KeyError: If a key or a group is missing.
        ValueError: If runs have no such value, or are no pairs.
    """
    of, than = entry["of"], entry.get("than")
    metric, second = (find_metric(entry.get(key, entry["metric"])) for key in ("metric", "than_metric"))
    words, sign, result = _words(metric, groups[of]), "", interval(metric.values(groups[of]))
    line = f"{of}, {words}"
    if than:
        pairs = frame_of(groups[of]).merge(frame_of(groups[than]), on="seed")
        faulty = pairs.query("seed.duplicated() or images_x != images_y or partition_x != partition_y")["seed"]
        if len(faulty):
            raise ValueError(f"the runs of seed {faulty.min()} are no pair: several, or of other data or partitions")
        sign, result = "+", difference(metric, groups[of], second, groups[than])
        line = f"{of} - {than}, {words}"
        if second.name != metric.name:
            line = f"{of} ({words}) - {than} ({_words(second, groups[than])})"
    if not result.n:
        raise ValueError("no run has this value, or no seed has both runs")
    line += f": {interval_text(metric, result, sign=sign)}"
    if "paper" in entry:
        table, column = registry.find_table(entry["paper"][0]), entry["paper"][1]
        lead = (
            paper_tables.printed_lead(table, of, than, (column,), metric)
            if than
            else paper_tables.printed_value(table, of, column, metric)
        )
        if lead is None:
            raise ValueError(f"{table.name} has no number in {column} for {of}{f' or {than}' if than else ''}")
        line += f"; paper {metric.text(lead, sign)}"
    return f"{entry['says']}. {line}" if "says" in entry else line


def _words(metric: Metric, records: Iterable[Record]) -> str:
    """What a metric is, in words."""
    if metric.name == "selected":
        return " or ".join(sorted({SELECTIONS[record["summary"]["selection"]] for record in records}))
    name, colon, parameter = metric.name.partition(":")
    return f"{WORDS.get(name + colon, name.replace('-', ' '))} {parameter.replace('_', ' ')}".rstrip()


def papers() -> dict[str, ModuleType]:
    """The files of registered methods that declare tables, by their names without `.py`."""
    modules = dict.fromkeys(method.module for method in registry.methods().values())
    return {module.__name__.rpartition(".")[2]: module for module in modules if hasattr(module, "TABLES")}


def pages(results: Path) -> dict[Path, str]:
    """All pages by their paths under `results`, a folder with `records/<study>` and `papers/notes/<paper>.md`.

    A `README.md` beside the folder gets the number of claims between two marks.
    """
    records = results / "records"
    studies = [read_study(file.parent) for file in sorted(records.glob("*/intro.md"))]
    answers = claims.answers(registry.claims(), [records])
    texts = {Path(f"{study.name}.md"): study_page(study) for study in studies}
    counts, covered, complete = [], [], []
    for name, module in papers().items():
        planned = [plans.plan_table(table, records, seeds=table.seeds) for table in module.TABLES]
        notes = results / "papers" / "notes" / f"{name}.md"
        text = paper_page(module, planned, studies, notes.read_text(encoding="utf-8") if notes.is_file() else "")
        texts[Path("papers") / f"{name}.md"] = text.replace(f"{records}/", "records/")
        in_full = {plan.table.name: cells_in_full(plan) for plan in planned}
        complete += [table for table, cells in in_full.items() if cells and all(cells)]
        title, cells = module.TABLES[0].reported[0], [cell for cells in in_full.values() for cell in cells]
        covered.append([f"[{title}](papers/{name}.md)", f"{len(cells):,}", f"{sum(cells):,}"])
        verdicts = Counter(answer.verdict for answer in answers if answer.claim.table in in_full)
        numbers = [str(verdicts[verdict]) for verdict in claims.VERDICTS]
        counts.append([f"[{title}](results/papers/{name}.md)", *numbers])
    coverage = (
        f"{github(['Paper', 'Printed cells', 'In full, all seeds'], covered, 1)}\n\n"
        f"Run in full, every cell here that has a printed number: {', '.join(complete) or 'none'}.\n\n{COVERAGE}"
    )
    texts[Path("README.md")] = first_page(records, studies, answers, coverage)
    if (first := results.parent / "README.md").is_file():
        table = github(["Claims of", *map(str.capitalize, claims.VERDICTS)], counts, 1)
        texts[Path("../README.md")] = between_marks(first.read_text(encoding="utf-8"), "claims", table)
    if (results.parent / "papers").is_dir():
        verdicts = render(claims.claims_sheet(answers), "csv").replace(f"{records}/", "")
        texts[Path("../papers") / claims.SHIPPED] = verdicts
    return texts


def cells_in_full(plan: plans.TablePlan) -> list[bool]:
    """For each cell of a table that the paper prints, whether all its runs count."""
    cells = [cell for cell in paper_tables.compare(plan).values if cell["paper"] is not None and "runs_planned" in cell]
    return [cell["runs_counted"] == cell["runs_planned"] for cell in cells]


def _page(head: str, parts: Mapping[str, str]) -> str:
    """A page in Markdown: its head, and texts by their headings, without empty ones."""
    return "\n\n".join([head, *(f"{heading}\n\n{text}" for heading, text in parts.items() if text)]) + "\n"


def first_page(records: Path, studies: Sequence[Study], answers: Sequence[claims.Answer], covered: str) -> str:
    """The first page: the claims, how much of the papers is `covered`, and the studies."""
    timed = pd.concat([durations.paces(read_runs([records])), durations.benched(records.parent / "speed")])
    sheet, lines = claims.claims_sheet(answers), []
    for line, answer in zip(sheet.lines, answers, strict=True):
        deciding, see = durations.decided_by(answer, records, timed), answer.claim.see
        names = dict.fromkeys(folder.relative_to(records).parts[0] for folder in answer.runs)
        remarks = [
            f"{answer.size}: {', '.join(f'[{name}]({name}.md)' for name in names)}" if names else "",
            modified(read_runs(answer.runs)["record"]),
            f"but see [{see}]({see}.md)" if names and see else "",
            f"decided by {deciding}" if deciding else "",
        ]
        lines.append([*line[:-1], "; ".join(filter(None, remarks))])
    claimed = render(replace(sheet, lines=lines, notes=(*sheet.notes, *texts_instead(answers), MODIFIED))).rstrip()
    rows = [[f"[{study.name}]({study.name}.md)", (study.findings or [MISSING])[0]] for study in studies]
    parts = {
        "## What the papers claim, and what is so": f"{claims.counted(answers)} {CLAIMS}\n\n{claimed}",
        "## How much of what the papers print has been run": covered,
        "## Studies": f"{github(['Study', 'First finding'], rows)}\n\n{LEGEND}\n{OTHERS}",
    }
    return _page(f"# Results\n\n{MADE}", parts)


def texts_instead(answers: Iterable[claims.Answer]) -> list[str]:
    """What the papers' texts have where claims were run in full by the authors' code, a line a text."""
    papers_of: dict[str, set[str]] = {}
    for answer in answers:
        if answer.runs and answer.text_has and not answer.reduced:
            paper, _ = registry.find_table(answer.claim.table).reported
            papers_of.setdefault(answer.text_has, set()).add(paper)
    return [f"In full, by the authors' code: the text of {' and '.join(sorted(names))} has {text}."
            for text, names in papers_of.items()]  # fmt: skip


def study_page(study: Study) -> str:
    """The page of a study."""
    records = study.records
    tested = max(sum(entry["test_accuracy"] is not None for entry in record["rounds"]) for record in records)
    charts = {"curves": "Test accuracy over rounds"} if tested > 2 else {}  # two points say nothing
    lines = "\n".join(f"- {line}" for line in study.findings)
    results = [render(tables.sheet(records, study.metrics)).strip()]
    results += [f"![{title}](figures/{study.name}-{kind}.png)" for kind, title in (charts | study.figures).items()]
    typed = "\n".join(f"$ {command}" for command in tables.commands(records))
    checkouts = [f"- {modified(records)}: their commit ends in `+`."] if modified(records) else []
    parts = {
        "## Findings": f"{lines}\n\n{LEGEND}" if lines else "",
        "## Results": "\n\n".join(results),
        "## Every run": render(
            replace(tables.sheet(records, study.metrics, by_seed=True), setting="", notes=())
        ).strip(),
        "## Machines and versions": "\n".join([*tables.machines(records), *checkouts]),
        "## Commands": f"```console\n{typed}\n```\n\n{VERIFY}" if typed else "",
    }
    return _page(study.intro, parts)


def figures(text: str) -> dict[Path, tuple[str, str]]:
    """The figures that a page shows: study and kind of each, by its path under `results`."""
    return {Path(path): (study, kind) for path, study, kind in FIGURE.findall(text)}


def paper_page(module: ModuleType, planned: Iterable[plans.TablePlan], studies: Iterable[Study], missed: str) -> str:
    """The page of a paper: its `planned` tables, those of the `studies` that are its own, and what was `missed`."""
    title, *about = re.split(r"(?m)^\S.*\n(?= )", module.__doc__)[0].strip().split("\n\n")  # before the first section
    name = module.__name__.rpartition(".")[2]
    about.append(
        f"Its file is [papers/{name}.py](../../papers/{name}.py). Its claims stand on [the first page](../README.md)."
    )
    shown, lacking = ["A run counts that has all settings of the table."], []
    for plan in planned:
        command = f"`fedcli table {plan.table.name}`"
        if any(run.state == "finished" for run in plan.runs):
            shown += [render(paper_tables.compare(plan)).rstrip(), f"{command} runs what is missing."]
        else:
            lacking.append([plan.title, str(len(plan.cells)), command])
    methods = (method for method in registry.methods().values() if method.module is module)
    names, listed = {each.name for each in (*methods, *module.PROTOCOLS)}, []
    for study in studies:
        if any(names & {record["method"], record["protocol"]} for record in study.records):
            heading = study.intro.partition("\n")[0].lstrip("# ")
            listed.append(": ".join([f"- [{heading}](../{study.name}.md)", *study.findings[:1]]))
    parts = {
        "## Tables": "\n\n".join(shown),
        "### Without a finished run": github(["Table", "Cells", "Command"], lacking) if lacking else "",
        "### Not planned": "\n".join(f"- {name}: {reason.rstrip('.')}." for name, reason in module.NOT_PLANNED.items()),
        "## Studies": "\n".join(listed),
        **{f"## {heading}": textwrap.dedent(text).strip() for heading, text in CARD.findall(module.__doc__)},
        "## What did not work": missed.strip(),
    }
    return _page("\n\n".join([f"# {title.rstrip('.')}", *about]), parts)


def main(folder: Annotated[Path, typer.Argument()] = HERE) -> None:
    """Writes all pages in a folder and their figures: one a study, one a paper, and a first one, README.md."""
    if not (folder / "records").is_dir():
        raise SystemExit(f"'{folder}' has no runs for pages (got no folder 'records' in it); name one that has it.")
    for name, text in pages(folder).items():
        write_atomically(folder / name, lambda file, text=text: file.write_text(text, encoding="utf-8"))
        print(folder / name)
        for path, (study, kind) in figures(text).items():
            plots.write(folder / path, find_chart(kind), named(read_study(folder / "records" / study)), page=True)


if __name__ == "__main__":
    typer.run(main)
