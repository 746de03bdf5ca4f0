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
from fedcli.results.metrics import Interval
from fedcli.results.pages import Standing
from fedcli.results.tables import find_records
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

Does it run?

Answer: It runs
{{ config.rounds a }} rounds.

Set-up: small.
"""


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
        numbers = [int(number) for number in re.findall(r"^ {3,4}(\d+)\. ", paper.module.__doc__, re.M)]
        assert numbers == list(range(1, len(numbers) + 1))
        assert [int(number) for number in re.findall(r"^ ?(\d+)\. ", page, re.M)] == numbers
        assert page.startswith(f"# {paper.module.__doc__.splitlines()[0].rstrip('.')}\n\n")
        for table in paper.tables:
            assert f"| {len(table.cells)} | `fedcli table {table.name}` |" in page
        assert "What did not work" not in page


def test_a_page_has_the_claims_of_its_paper_with_their_verdicts(tmp_path):
    found = claims.answers(registry.claims(), [])
    for paper in pages.papers():
        standings = [Standing(table, None) for table in paper.tables]
        page = pages.paper_page(paper, standings, [], pages.claims_of(paper, found, tmp_path), "")
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
    told = "| reduced to rounds 5 of 200: [one]({0}one.md), [two]({0}two.md) |"
    assert told.format("../") in pages.claims_of(paper, found, tmp_path)
    quoted = pages.with_front(f"{pages.BEGIN}{pages.END}", found, tmp_path)
    assert told.format("results/") in quoted
    assert others[0].claim.text not in quoted


def test_a_run_with_another_seed_stands_for_one_of_the_tables(results):
    studies = pages.find_studies(results / "records")
    standing = pages.standing(TABLE, results / "records", studies)
    assert standing.finished == list(CELLS[:2])
    means = {run.setup.run.seed: 100 * run.record["summary"]["last"] for run in standing.plan.runs if run.record}
    assert list(means) == [0, 7]
    found = entries(standing)
    assert found["FedAvg", "FMNIST #C=2"].startswith(f"{(means[0] + means[7]) / 2:.2f} ± ")
    assert found["FedAvg", "FMNIST #C=2"].endswith(" (2 of 3)")
    # The best of rounds that were not tested is not known: only the run that was tested in every round counts.
    assert found["FedAvg", "FMNIST alpha=0.1"].endswith(" (1 of 3)")
    assert found["FedProx", "FMNIST #C=2"] == "not run"  # one had another learning rate, one has not ended


def test_runs_of_another_setting_do_not_count(results):
    studies = pages.find_studies(results / "records")
    other = Table(**{**vars(TABLE), "cells": (Cell("A", "B", "fedavg", {**TINY, "rounds": 3}),)})
    assert pages.standing(other, results / "records", studies) == Standing(other, None)


@pytest.mark.parametrize(("seeds", "used"), [((0,), [0]), ((7,), [7]), ((5,), [0]), ((5, 7), [7, 0])])
def test_runs_of_other_seeds_are_left_out_where_the_tables_own_are_there(results, seeds, used):
    studies = pages.find_studies(results / "records")
    table = Table(**{**vars(TABLE), "cells": CELLS[:1], "seeds": seeds})
    runs = pages.standing(table, results / "records", studies).plan.runs
    assert [run.setup.run.seed for run in runs] == used
    assert {run.state for run in runs} == {"finished"}


def test_the_page_shows_tables_with_runs_first_and_the_studies_of_the_paper(results):
    studies = pages.find_studies(results / "records")
    paper = next(paper for paper in pages.papers() if paper.key == "fedfa")._replace(tables=(TABLE,))
    standing = pages.standing(TABLE, results / "records", studies)
    empty = Standing(Table("fedfa:3", "Ablation", ("FedFA", "Table 3"), CELLS[:1]), None)
    page = pages.paper_page(paper, [standing, empty], studies, "", "- It | missed.\n")
    counts = "with 4 cells. The paper prints a number for 3 of them, and 2 of these have a finished run."
    assert f"2 tables and figures {counts}" in page
    assert page.index("### FedFA, Table 2: Accuracy under label skew") < page.index("### Without a finished run")
    assert "- In place of the table's seeds: 7." in page
    assert "| Table 3 | Ablation | 1 | `fedcli table fedfa:3` |" in page
    assert "- [A tiny study](../tiny.md): It runs 2 rounds.\n" in page
    linked = [study._replace(intro="# A\n\nAnswer: [so](b.md), [there](https://c.d).") for study in studies]
    answers = "- [A](../tiny.md): [so](../b.md), [there](https://c.d).\n"
    assert answers in pages.paper_page(paper, [standing], linked, "", "- x\n")
    unanswered = [study._replace(intro="# A tiny study\n\nDoes it run?") for study in studies]
    assert "- [A tiny study](../tiny.md)\n" in pages.paper_page(paper, [standing], unanswered, "", "- x\n")
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
    first.write_text(f"# Project\n\n{pages.BEGIN}\nold\n{pages.END}\n\nEnd.\n")
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
    assert text.startswith(f"# Project\n\n{pages.BEGIN}\n\n| Claim | Verdict | Paper |")
    assert text.endswith(f"\n\n{pages.END}\n\nEnd.\n")
    assert "old" not in text
    assert (folder / "papers" / "fedsa.md").read_text().endswith("## What did not work\n\n- Nothing yet.\n")
    nowhere = CliRunner().invoke(cli.app, ["pages", str(tmp_path / "other")])
    assert (nowhere.exit_code, (tmp_path / "other").exists()) == (2, False)
    first.write_text("# Without a place\n")
    assert pages.pages(folder)[Path("..") / "README.md"] == "# Without a place\n"


def test_a_study_has_its_size_and_its_answer(results):
    (study,) = pages.find_studies(results / "records")
    name, size, finding = pages._study_row(study)
    assert name == "[tiny](tiny.md)"
    assert size == "2 rounds, 1 to 2 seeds; not a setting of the paper"
    assert finding == study.answer == "It runs 2 rounds."
    assert pages.Study("x", "# Heading\n\nNo Answer: here.", []).answer == ""
    assert pages.Study("x", "# Heading\n\nSo the\nAnswer: no.", []).answer == ""  # in the middle of a paragraph
    assert pages.Study("x", "# Heading\n\nAnswer:\nthe last\nparagraph.", []).answer == "the last paragraph."

    about = {"protocol": "fedfa:fmnist-c2", "dataset": "fmnist"}

    def row(*rounds):
        clients = {"what": "num_clients", "protocol": 100, "run": 3}
        smaller = [[{"what": "rounds", "protocol": 200, "run": run}, clients] for run in rounds]
        records = [{**record, **about, "reduced": one} for one in smaller for record in study.records]
        return pages._study_row(pages.Study("x", "", records))[1:]

    assert row(2) == ["2 of 200 rounds, 1 to 2 of 3 seeds, clients 3 of 100", "–"]

    def of_size(run, records):
        reduced = [{"what": "rounds", "protocol": 200, "run": run}]
        return [
            {**record, **about, "reduced": reduced, "config": {**record["config"], "rounds": run}} for record in records
        ]

    other = [{**record, "protocol": "fedfa:validation"} for record in of_size(15, study.records)]
    both = pages._study_row(pages.Study("x", "", [*of_size(2, study.records), *other]))[1]
    assert both == "2 of 200 rounds, 1 to 2 of 3 seeds; 15 of 200 rounds, 1 to 2 seeds"  # F.2 has one seed

    apart = [*of_size(2, study.records), *of_size(20, [one for one in study.records if one["seed"] == 0])]
    sizes = pages._study_row(pages.Study("x", "", apart))[1]
    assert sizes == "2 of 200 rounds, 1 to 2 of 3 seeds; 20 of 200 rounds, 1 of 3 seeds"


@pytest.mark.parametrize(
    ("study", "size"),
    [
        ("fedfa-fmnist-c2", "200 of 200 rounds, 3 of 3 seeds"),  # Table 2
        ("fedfa-fmnist-c2-parts", "200 of 200 rounds, 2 to 3 of 3 seeds"),  # Table 3; one run is of Table 6 too
        ("fedfa-fmnist-c2-phases", "200 of 200 rounds, 1 of 1 seed"),  # Table 5, with the data and set-up of Table 2
        ("fedfa-fmnist-validation-chance", "15 of 15 rounds, 1 to 5 seeds"),  # more than the one of F.2
    ],
)
def test_the_seeds_are_counted_against_the_table_that_has_most_of_the_runs(study, size):
    records = find_records([Path(__file__).parent.parent / "results" / "records" / study])
    assert pages._study_row(pages.Study(study, "", records))[1] == size
