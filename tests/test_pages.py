"""The pages of the papers: what of a card they repeat, which runs count, and the table over all papers."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedcli
from fedcli import Cell, Table, registry
from fedcli.cli import app as cli
from fedcli.registry import not_planned
from fedcli.results import claims, comparison, pages
from fedcli.results.findings import Findings
from fedcli.results.metrics import Interval
from fedcli.results.pages import Standing
from fedcli.runs.records import read_record, write_record

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

CARD = """NAME: does things.

Somebody, "Title", 2020.

An idea, with an equation

    a = b                                     (1)

and more.

Notation
    code    paper

Readings and deviations
    1.  First,
        in two lines.
    2.  Second.

Readings of the rest
   10. Tenth.

Known from code only
    A constant.

Run it
    fedcli run name
"""


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


def entries(standing):
    compared = comparison.compare(standing.plan).entries
    return {(cell.row, cell.column): compared[cell.row, cell.column].ours for cell in standing.table.cells}


def test_the_papers_are_the_files_with_tables():
    names = {path.stem for path in (Path(__file__).parent.parent / "papers").glob("*.py")} - {"__init__"}
    assert {paper.key for paper in pages.papers()} == names
    for paper in pages.papers():
        assert {table.reported[0] for table in paper.tables} == {paper.name}
        assert {method.file.stem for method in paper.methods} == {paper.key}


def test_a_card_falls_into_its_sections():
    found = pages.sections(CARD)
    assert list(found) == [
        "", "Notation", "Readings and deviations", "Readings of the rest", "Known from code only", "Run it",
    ]  # fmt: skip
    assert found[""].startswith("NAME: does things.")
    assert "    a = b" in found[""]
    assert found[""].endswith("and more.")
    assert found["Readings and deviations"] == "1.  First,\n    in two lines.\n2.  Second."
    assert found["Readings of the rest"] == "10. Tenth."


def test_a_page_has_every_reading_of_its_card():
    for paper in pages.papers():
        page = pages.paper_page(paper, [Standing(table, None) for table in paper.tables], [], "", "")
        numbers = [int(number) for number in re.findall(r"^ {3,4}(?:\| )?(\d+)\. ", paper.module.__doc__, re.M)]
        assert numbers == list(range(1, len(numbers) + 1))
        assert [int(number) for number in re.findall(r"^ ?(?:\| )?(\d+)\. ", page, re.M)] == numbers
        assert page.startswith(f"# {paper.module.__doc__.splitlines()[0].rstrip('.')}\n\n")
        for table in paper.tables:
            assert f"| {len(table.cells)} | `fedcli table {table.name}` |" in page
        assert "What did not work" not in page


def test_a_page_has_the_claims_of_its_paper_with_their_verdicts(tmp_path):
    found = claims.answers(registry.claims(), [])
    for paper in pages.papers():
        standings = [Standing(table, None) for table in paper.tables]
        page = pages.paper_page(paper, standings, [], pages.claims_of(paper, found, tmp_path, {}), "")
        own = [one for one in found if one.claim.table in {table.name for table in paper.tables}]
        assert len(own) >= 3
        for one in found:
            row = f"\n| `{one.claim.name}` {one.claim.text} | {one.verdict} | "
            assert page.count(row) == (one in own)
        assert f"\n{claims.counted(own)} " in page
        assert "## Claims" not in pages.paper_page(paper, standings, [], "", "")


def test_a_claim_leads_to_the_studies_of_its_runs(tmp_path):
    paper = next(paper for paper in pages.papers() if paper.key == "fedfa")
    first, *others = claims.answers(registry.claims("fedfa"), [])
    folders = tuple(tmp_path / run for run in ("one/fedfa/seed-0", "two/fedavg/seed-0", "one/fedfa/seed-1"))
    runs = claims.Evidence("undecided", "n = 2", "rounds 5 of 200", (0, 1), Interval(1.0, None, None, 2), None, folders)
    found = [replace(first, evidence=(runs,)), *others]
    told, decided = "[one]({0}one.md), [two]({0}two.md)", {first.claim.name: "6 runs"}
    page = pages.claims_of(paper, found, tmp_path, decided)
    assert f"| reduced to rounds 5 of 200: {told.format('../')}; decided by 6 runs, `fedcli table " in page
    quoted = pages.with_front(MARKS, found, tmp_path, decided)
    limits = f"; but see [{first.claim.see}](results/{first.claim.see}.md)" if first.claim.see else ""
    assert f"| reduced: {told.format('results/')}{limits}; decided by 6 runs |" in quoted
    assert others[0].claim.text not in quoted


def test_a_table_stands_as_its_seeds_have_been_run(results):
    studies = pages.find_studies(results / "records")
    standing = pages.standing(TABLE, results / "records", studies)
    assert standing.finished == list(CELLS[:2])
    compared = comparison.compare(standing.plan).entries
    # The run with seed 7 is not the table's; one of FedProx had another learning rate, one has not ended.
    assert [compared[cell.row, cell.column].ours.partition("(")[2] for cell in CELLS] == ["1 of 3)", "1 of 3)", ""]
    other = replace(TABLE, cells=(Cell("A", "B", "fedavg", {**TINY, "rounds": 3}),))
    assert pages.standing(other, results / "records", studies) == Standing(other, None)


def test_the_page_shows_tables_with_runs_first_and_the_studies_of_the_paper(results):
    studies = pages.find_studies(results / "records")
    paper = next(paper for paper in pages.papers() if paper.key == "fedfa")._replace(tables=(TABLE,))
    standing = pages.standing(TABLE, results / "records", studies)
    empty = Standing(Table("fedfa:3", "Ablation", ("FedFA", "Table 3"), CELLS[:1]), None)
    page = pages.paper_page(paper, [standing, empty], studies, "", "- It | missed.\n")
    counts = "with 4 cells. The paper prints a number for 3 of them, and 2 of these have a finished run."
    assert f"2 tables and figures {counts}" in page
    assert page.index("### FedFA, Table 2: Accuracy under label skew") < page.index("### Without a finished run")
    assert "| Table 3 | Ablation | 1 | `fedcli table fedfa:3` |" in page
    assert "- [A tiny study](../tiny.md): It runs. one, rounds to 1 %: 1, 1 run\n" in page
    bare = [study._replace(findings=Findings()) for study in studies]
    assert "- [A tiny study](../tiny.md)\n" in pages.paper_page(paper, [standing], bare, "", "- x\n")
    assert page.endswith("## What did not work\n\n- It | missed.\n")
    unrelated = [study._replace(records=[]) for study in studies]
    assert "tiny" not in pages.paper_page(paper, [empty], unrelated, "", "")


def test_cells_of_which_the_paper_prints_no_number_are_not_counted(results):
    studies, paper = pages.find_studies(results / "records"), pages.papers()[0]
    ours = Cell("FedAvg", "a column of ours", "fedavg", TINY)
    table = Table(**{**vars(TABLE), "cells": (*CELLS, ours)})
    standing = pages.standing(table, results / "records", studies)
    assert ours in standing.finished
    assert "The paper prints a number for 3 of them, and 2 of these" in pages.paper_page(paper, [standing], [], "", "")
    figure = Table("fedfa:Fig3", "Curves", ("FedFA", "in-text"), (ours,))
    standing = pages.standing(figure, results / "records", studies)
    assert "The paper prints a number for 0 of them, and 0 of these" in pages.paper_page(paper, [standing], [], "", "")
    assert "| ours | " in pages.paper_page(paper, [standing], [], "", "")  # it is shown all the same


def test_what_is_not_planned_stands_on_the_page_with_its_reason():
    for paper in pages.papers():
        page = pages.paper_page(paper, [Standing(table, None) for table in paper.tables], [], "", "")
        reasons = not_planned(paper.module)
        assert ("### Not planned" in page) == bool(reasons)
        for what, reason in reasons.items():
            assert f"\n- {what}: {reason.rstrip('.')}.\n" in page
    assert any(not_planned(paper.module) for paper in pages.papers())


def test_tuned_options_are_listed_where_their_runs_stand(results, tmp_path):
    folder = shutil.copytree(results / "records", tmp_path / "records")
    record = read_record(folder / "tiny" / "a")
    origin = {**record["origin"], "lr": "tuned by validation accuracy, seed 1000"}
    write_record(folder / "tiny" / "a", {**record, "origin": origin})
    studies = pages.find_studies(folder)
    paper = next(paper for paper in pages.papers() if paper.key == "fedfa")._replace(tables=(TABLE,))
    told = f"- Tuned by validation accuracy (seed 1000): FedAvg --lr {record['config']['lr']} on digits.\n"
    assert told in pages.paper_page(paper, [pages.standing(TABLE, folder, studies)], [], "", "")
    assert told in pages.study_page(folder / "tiny")
    assert "Tuned by" not in pages.study_page(results / "records" / "tiny")


def test_the_command_writes_the_pages_and_what_the_first_page_quotes(results, tmp_path, monkeypatch):
    folder = shutil.copytree(results, tmp_path / "results")
    (folder / "papers" / "notes").mkdir(parents=True)
    (folder / "papers" / "notes" / "fedsa.md").write_text("- Nothing yet.\n")
    committed = Path(__file__).parent.parent / "results" / "speed"
    shutil.copytree(committed, folder / "speed", ignore=shutil.ignore_patterns("*.png", "*.pdf"))
    first = tmp_path / "README.md"
    first.write_text(f"# Project\n\n{MARKS.replace('-->', '-->old', 1)}\n\nEnd.\n")
    monkeypatch.setenv("FEDCLI_DATA", str(tmp_path / "none"))
    ended = CliRunner().invoke(cli.app, ["pages", str(folder)])
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
    assert text.startswith(
        f"# Project\n\n<!-- claims: written by 'make tables' -->\n\nOf {len(registry.claims())} claims: "
    )
    assert text.endswith("\n\n<!-- claims: end -->\n\nEnd.\n")
    assert "old" not in text
    assert (folder / "papers" / "fedsa.md").read_text().endswith("## What did not work\n\n- Nothing yet.\n")
    nowhere = CliRunner().invoke(cli.app, ["pages", str(tmp_path / "other")])
    assert (nowhere.exit_code, (tmp_path / "other").exists()) == (2, False)
    first.write_text("# Without a place\n")
    assert pages.pages(folder)[Path("..") / "README.md"] == "# Without a place\n"


def test_a_study_has_its_introduction_its_findings_and_what_follows_from_its_records(results):
    study = pages.read_study(results / "records" / "tiny")
    page = pages.page_of(study)
    assert page.startswith(f"{INTRO}\n## Findings\n\n- It runs. one, rounds to 1 %: 1, 1 run\n\n")
    assert "| best, % |" in page
    assert pages.figures(page) == {
        Path("figures/tiny-curves.png"): ("tiny", "curves")
    }  # it is too short for one by itself
    assert page == pages.study_page(results / "records" / "tiny")
    assert "## Findings" not in pages.page_of(study._replace(findings=Findings()))


def test_a_study_tells_what_is_smaller_than_in_its_protocol(results):
    study = pages.read_study(results / "records" / "tiny")
    planned = {"partition": "classes:2", "partition_seed": 1, "backbone": "cnn-2x32", "lr": 0.01}
    records = [
        {**record, "protocol": "fedfa:fmnist-c2", "dataset": "fmnist", "config": {**record["config"], **planned}}
        for record in study.records
    ]
    smaller = [{**record, "reduced": [{"what": "rounds", "protocol": 200, "run": 2}]} for record in records]
    full = [{**record, "reduced": []} for record in records]
    assert pages._size(study.records) == "not a setting of the paper"
    assert pages._size(smaller[:2]) == "reduced to rounds 2 of 200"
    assert pages._size([*full, smaller[0]]) == "in full; reduced to rounds 2 of 200"
    other = {**full[0], "config": {**full[0]["config"], "partition_seed": 2, "lr": 0.1}}
    assert pages._size([other]) == "in full, with another draw of the clients and another learning rate"
