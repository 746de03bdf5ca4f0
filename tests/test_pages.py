"""The pages of the papers: what of a card they repeat, which runs count, and the table over all papers."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import fedcli
from fedcli import Cell, Table, registry
from fedcli.results import claims, comparison, pages, plans
from fedcli.results.findings import read_study
from fedcli.results.metrics import Interval
from fedcli.runs.records import write_record
from tests.programs import invoke

TINY = {
    "protocol": "fedfa:digits", "dataset": "digits", "train_examples": 120, "num_clients": 3, "cohort_size": 3,
    "partition": "iid", "rounds": 2, "local_epochs": 1, "device": "cpu",
}  # fmt: skip
CELLS = (
    Cell("FedAvg", "FMNIST #C=2", "fedavg", TINY),
    Cell("FedAvg", "FMNIST alpha=0.1", "fedavg", TINY, "best"),
    Cell("FedProx", "FMNIST #C=2", "fedprox", TINY),
)
TABLE = Table("fedfa:2", "Accuracy under label skew", ("FedFA", "Table 2"), CELLS)

INTRO = """\
# A tiny study

Does it run? Set-up: small.
"""
FINDINGS = """\
metrics = ["best"]

[figures]
curves = "Accuracy"

[runs]
one = "a"

[[findings]]
says = "It runs"
metric = "rounds-to:1"
of = "one"
"""


MARKS = "<!-- claims: written by 'make tables' --><!-- claims: end -->"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A study of finished runs, one with a seed and rounds of testing that are not the table's, and of two others."""
    folder = tmp_path_factory.mktemp("results")
    study = folder / "records" / "tiny"
    fedcli.run("fedavg", out=study / "a", seed=0, **TINY)
    fedcli.run("fedavg", out=study / "b", seed=7, eval_every=2, **TINY)
    fedcli.run("fedavg", out=study / "again", seed=0, eval_every=2, **TINY)  # a seed counts once
    with pytest.raises(Exception, match="not finite"):
        fedcli.run("fedprox", out=study / "c", seed=0, lr=1e9, **TINY)
    record = fedcli.run("fedprox", out=study / "d", seed=7, eval_every=2, **TINY).record
    write_record(study / "d", {**record, "status": "interrupted"})
    for checkpoint in study.glob("*/checkpoint*"):
        checkpoint.unlink()
    (study / "intro.md").write_text(INTRO)
    (study / "findings.toml").write_text(FINDINGS)
    return folder


def test_the_papers_are_the_files_with_tables():
    names = {path.stem for path in (Path(__file__).parent.parent / "papers").glob("*.py")} - {"__init__"}
    assert {paper.key for paper in pages.papers()} == names


@pytest.mark.parametrize("paper", pages.papers(), ids=lambda paper: paper.key)
def test_a_page_has_the_readings_of_its_card_its_tables_and_what_is_not_planned(paper, tmp_path):
    page = pages.paper_page(
        paper, [plans.plan(table, tmp_path, seeds=[0]) for table in paper.module.TABLES], [], "", ""
    )
    numbers = [int(number) for number in re.findall(r"^ {3,4}(?:\| )?(\d+)\. ", paper.module.__doc__, re.M)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert [int(number) for number in re.findall(r"^ ?(?:\| )?(\d+)\. ", page, re.M)] == numbers
    assert page.startswith(f"# {paper.module.__doc__.splitlines()[0].rstrip('.')}\n\n")
    for table in paper.module.TABLES:
        assert f"| {len(table.cells)} | `fedcli table {table.name}` |" in page
    assert ("### Not planned" in page) == hasattr(paper.module, "NOT_PLANNED")
    for table, reason in getattr(paper.module, "NOT_PLANNED", {}).items():
        assert f"\n- {table}: {reason.rstrip('.')}.\n" in page


def test_a_claim_leads_to_the_studies_of_its_runs(tmp_path):
    paper = next(paper for paper in pages.papers() if paper.key == "fedfa")
    first, *others = claims.answers(registry.claims("fedfa"), [])
    folders = tuple(tmp_path / run for run in ("one/fedfa/seed-0", "two/fedavg/seed-0", "one/fedfa/seed-1"))
    first = replace(
        first, verdict="undecided", why="n = 2", reduced="rounds 5 of 200", seeds=(0, 1), runs=folders,
        difference=Interval(1.0, None, None, 2), decided="6 runs", claim=replace(first.claim, see="three"),
    )  # fmt: skip
    told = "| reduced to rounds 5 of 200: [one]({0}one.md), [two]({0}two.md); but see [three]({0}three.md); decided"
    assert f"{told.format('../')} by 6 runs |\n" in pages.claims_table(paper, [first, *others], tmp_path, "../")
    assert f"{told.format('')} by 6 runs |\n" in pages.claims_table(paper, [first, *others], tmp_path)
    quoted = pages.with_front(MARKS, [first, *others])
    assert pages.with_front("# Without a place\n", [first, *others]) == "# Without a place\n"
    line = next(line for line in quoted.splitlines() if "papers/fedfa.md" in line)
    assert line.startswith("| [FedFA](results/papers/fedfa.md) | 0 | 0 | 1 | ")
    assert sum(map(int, line.split("|")[2:7])) == 1 + len(others)


def test_the_page_shows_tables_with_runs_first_and_the_studies_of_the_paper(results):
    study = read_study(results / "records" / "tiny")
    paper = next(paper for paper in pages.papers() if paper.key == "fedfa")
    plan = plans.plan(TABLE, results / "records")
    # The run with seed 7 is not the table's; one of FedProx had another learning rate, one has not ended.
    counted = {(value["row"], value["column"]): value["runs_counted"] for value in comparison.compare(plan).values}
    assert [counted[cell.row, cell.column] for cell in CELLS] == [1, 1, 0]
    empty = plans.plan(Table("fedfa:3", "Ablation", ("FedFA", "Table 3"), CELLS[:1]), Path("nowhere"))
    page = pages.paper_page(paper, [empty, plan], [study], "", "- It | missed.\n")
    assert page.index("### FedFA, Table 2: Accuracy under label skew") < page.index("### Without a finished run")
    assert "| FedFA, Table 3: Ablation | 1 | `fedcli table fedfa:3` |" in page
    assert "- [A tiny study](../tiny.md): It runs. one, rounds to 1: 1, 1 run\n" in page
    assert page.endswith("## What did not work\n\n- It | missed.\n")
    other = pages.paper_page(paper, [empty], [replace(study, records=[])], "", "")
    assert "tiny" not in other
    assert "What did not work" not in other


def test_the_command_writes_the_pages_and_what_the_first_page_quotes(results, tmp_path, monkeypatch):
    folder = shutil.copytree(results, tmp_path / "results")
    (folder / "papers" / "notes").mkdir(parents=True)
    (folder / "papers" / "notes" / "fedsa.md").write_text("- Nothing yet.\n")
    committed = Path(__file__).parent.parent / "results" / "speed"
    shutil.copytree(committed, folder / "speed", ignore=shutil.ignore_patterns("*.png", "*.pdf"))
    first = tmp_path / "README.md"
    first.write_text(f"# Project\n\n{MARKS.replace('-->', '-->old', 1)}\n\nEnd.\n")
    monkeypatch.setenv("FEDCLI_DATA", str(tmp_path / "none"))
    ended = invoke("pages", folder)
    assert ended.exit_code == 0, ended.output
    assert {file.name for file in folder.glob("speed/*.png")} == {file.name for file in committed.glob("*.png")}
    readme = (folder / "README.md").read_text()
    sections = ["## What the papers claim", "## How much of what the papers print", "## Studies", "## Redo one"]
    assert [line for line in readme.splitlines() if line.startswith("## ")] == [
        next(line for line in readme.splitlines() if line.startswith(section)) for section in sections
    ]
    assert all(f"`{one.name}` {one.text}" in readme for one in registry.claims())
    assert readme.count("](papers/") == len(pages.papers()) == len(list(folder.glob("papers/*.md")))
    text = first.read_text()
    assert text.startswith("# Project\n\n<!-- claims: written by 'make tables' -->\n\n| Claims of | Reproduced |")
    assert text.endswith("\n\n<!-- claims: end -->\n\nEnd.\n")
    assert "old" not in text
    assert (folder / "papers" / "fedsa.md").read_text().endswith("## What did not work\n\n- Nothing yet.\n")
    nowhere = invoke("pages", tmp_path / "other")
    assert (nowhere.exit_code, (tmp_path / "other").exists()) == (2, False)


def test_a_study_has_its_introduction_its_findings_and_what_follows_from_its_records(results):
    page = pages.study_page(read_study(results / "records" / "tiny"))
    assert page.startswith(f"{INTRO}\n## Findings\n\n- It runs. one, rounds to 1: 1, 1 run\n\n")
    assert "| best, % |" in page
    # It is too short for a figure by itself.
    assert pages.figures(page) == {Path("figures/tiny-curves.png"): ("tiny", "curves")}
