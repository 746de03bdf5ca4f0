"""The pages of the papers and studies, which runs count, the first page, and findings against hand numbers."""

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import fedcli
from fedcli import Cell, Table, registry
from fedcli.errors import NonFiniteLoss
from fedcli.results import claims, paper_tables, plans, run_records, verdicts
from fedcli.results.durations import ExpectedTime
from fedcli.results.intervals import mean_interval
from fedcli.runs.record import write_record
from tests.example_records import make_record, write_unsigned_record
from tests.scripts import load_script
from tests.user_errors import raises_user_error

pytestmark = pytest.mark.long(worker=0)

ROOT = Path(__file__).parent.parent
deciding_runs = load_script(ROOT / "results" / "deciding_runs.py")
pages = load_script(ROOT / "results" / "pages.py")
first_page = load_script(ROOT / "results" / "first_page.py")
paper_page = load_script(ROOT / "results" / "paper_page.py")
study_page = load_script(ROOT / "results" / "study_page.py")
studies = load_script(ROOT / "results" / "studies.py")

CELL_OPTIONS = {
    "protocol": "fedfa:digits", "dataset": "digits", "train_examples": 120, "num_clients": 3, "cohort_size": 3,
    "partition": "iid", "rounds": 2, "local_epochs": 1, "device": "cpu",
}  # fmt: skip
CELLS = (
    Cell("FedAvg", "FMNIST #C=2", "fedavg", CELL_OPTIONS),
    Cell("FedAvg", "FMNIST alpha=0.1", "fedavg", CELL_OPTIONS, "best"),
    Cell("FedProx", "FMNIST #C=2", "fedprox", CELL_OPTIONS),
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
"run a" = "a"

[[findings]]
says = "It runs"
metric = "rounds-to:1"
of = "run a"
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A folder with one study: finished runs, one with a seed and rounds of testing that are no table's, two others."""
    folder = tmp_path_factory.mktemp("results")
    study = folder / "records" / "tiny"
    fedcli.run("fedavg", out=study / "a", seed=0, **CELL_OPTIONS)
    fedcli.run("fedavg", out=study / "b", seed=7, eval_every=2, **CELL_OPTIONS)
    fedcli.run("fedavg", out=study / "again", seed=0, eval_every=2, **CELL_OPTIONS)  # a seed counts once
    with pytest.raises(NonFiniteLoss):
        fedcli.run("fedprox", out=study / "c", seed=0, lr=1e9, **CELL_OPTIONS)
    record = fedcli.run("fedprox", out=study / "d", seed=7, eval_every=2, **CELL_OPTIONS).record
    write_record(study / "d", {**record, "status": "interrupted"})
    for checkpoint in study.glob("*/checkpoint*"):
        checkpoint.unlink()
    (study / "intro.md").write_text(INTRO)
    (study / "findings.toml").write_text(FINDINGS)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "module"), paper_page.find_paper_modules().items(), ids=paper_page.find_paper_modules()
)
def test_a_page_has_the_tables_of_its_paper_and_what_is_not_planned(name, module, tmp_path):
    planned = [plans.plan_table(table, tmp_path, seeds=[0]) for table in module.TABLES]
    page = paper_page.make_paper_page(paper_page.Paper(name, module, planned), [], "")

    title, source = module.__doc__.split("\n\n")[:2]
    assert page.startswith(f"# {title.rstrip('.')}\n\n{source}\n\n")
    assert f"\n\nIts file is [papers/{name}.py](../../papers/{name}.py)." in page
    for table in module.TABLES:
        assert f"| {len(table.cells)} | `fedcli table {table.name}` |" in page
    for table, reason in module.NOT_PLANNED.items():
        assert f"\n- {table}: {reason.rstrip('.')}.\n" in page

    # The card's readings are a numbered list, indented or behind a bar; the page has it at the margin.
    numbers = re.findall(r"^ {3,4}(?:\| )?(\d+)\. ", module.__doc__, re.M)
    assert numbers == [str(number + 1) for number in range(len(numbers))]
    assert re.findall(r"^ ?(?:\| )?(\d+)\. ", page, re.M) == numbers


def test_a_claim_leads_to_the_studies_of_its_runs(tmp_path):
    without_runs = claims.answer_claims(registry.claims("fedfa"), [])[0]
    claim = replace(without_runs.claim, limiting_study="three")
    comparison = verdicts.Comparison(
        verdict=verdicts.Verdict("undecided", "n = 1"),
        lead=verdicts.Lead(mean_interval([1.0])),
        evidence=verdicts.Evidence(
            folders=(tmp_path / "one/fedfa/seed-0", tmp_path / "two/fedavg/seed-0", tmp_path / "one/fedfa/seed-1"),
            seeds=(0,),
            reduction="rounds 5 of 200",
        ),
    )
    answer = verdicts.Answer(replace(without_runs.context, claim=claim), comparison)

    study = studies.Study("one", "# One", [], [], [], {}, {})
    page = first_page.make_first_page(tmp_path, [study, replace(study, name="two")], [answer], [])
    assert "Of 1 claims: 1 undecided." in page
    links = "[one](one.md), [two](two.md); but see [three](three.md)"
    assert f"| reduced to rounds 5 of 200: {links}; decided by 18 runs in full; time: " in page
    page = first_page.make_first_page(tmp_path, [study], [answer], [])
    assert "of 200: [one](one.md), two; but see " in page  # the second folder is no study, so it has no page


def test_the_time_of_runs_names_the_h100_beside_other_gpus(monkeypatch):
    machines = {"cuda": [frozenset(), frozenset({"another GPU"}), frozenset()], "cpu": [frozenset({"a CPU"})] * 3}
    seconds = {"cuda": [3600.0, 3600.0, math.nan], "cpu": [math.nan] * 3}

    def estimate_times(runs, timed_runs, device, machine):
        return list(map(ExpectedTime, seconds[device], seconds[device], machines[device]))

    monkeypatch.setattr(deciding_runs, "estimate_times", estimate_times)
    text = deciding_runs.describe_time_needed([], pd.DataFrame())
    assert text == "about 2.0 h for 2 of 3 runs, timed on NVIDIA H100 80GB HBM3 and another GPU"
    machines["cuda"][0] = machines["cuda"][1]
    assert deciding_runs.describe_time_needed([], pd.DataFrame()).endswith("runs, timed on another GPU")


def test_the_first_page_names_its_texts_and_modified_checkouts(tmp_path):
    """It says what the text of the pages has, and which runs are of modified checkouts."""
    of_commit = tmp_path / "one" / "seed-0"
    write_unsigned_record(of_commit, make_record("fedavg", 0) | {"commit": "a" * 40})
    of_modified_checkout = tmp_path / "one" / "seed-1"
    write_unsigned_record(of_modified_checkout, make_record("fedavg", 1) | {"commit": "b" * 40 + "+"})
    without_runs = claims.answer_claims(registry.claims("fedfa"), [])[0]
    comparison = verdicts.Comparison(
        verdict=verdicts.Verdict("reproduced"),
        lead=verdicts.Lead(mean_interval([1.0, 2.0])),
        evidence=verdicts.Evidence(folders=(of_commit, of_modified_checkout)),
    )
    answer = replace(without_runs, comparison=comparison)

    study = studies.Study("one", "# One", run_records.find_records([tmp_path]), [], [], {}, {})
    page = first_page.make_first_page(tmp_path, [study], [answer], [])
    assert "in full, by the authors' code: [one](one.md); 1 of 2 runs by a modified checkout; but see" in page
    assert "\n- In full, by the authors' code: the text of FedFA has a constant learning rate" in page
    assert "\n- 1 of 2 runs by a modified checkout: their commit ends in `+`.\n" in study_page.make_study_page(study)
    reduced_evidence = replace(comparison.evidence, reduction="rounds 1 of 2")
    reduced = replace(answer, comparison=replace(comparison, evidence=reduced_evidence))
    assert first_page.list_code_notes([reduced]) == []


def test_figures_name_runs_as_the_study_does(results):
    study = studies.read_study(results / "records" / "tiny")
    labels = {record["folder"].name: record.get("label") for record in studies.name_groups(study)}
    assert labels == {"a": "run a", "again": None, "b": None, "c": None, "d": None}


def test_the_page_of_a_paper_shows_tables_with_runs_first(results):
    plan = plans.plan_table(TABLE, results / "records")
    study = studies.read_study(results / "records" / "tiny")
    # The run with seed 7 is not the table's; one of FedProx had another learning rate, one has not ended.
    num_runs = {}
    for value in paper_tables.compare_with_paper(plan).csv_rows:
        num_runs[value["row"], value["column"]] = value["runs_counted"]
    assert [num_runs[cell.row, cell.column] for cell in CELLS] == [1, 1, 0]

    empty = plans.plan_table(Table("fedfa:3", "Ablation", ("FedFA", "Table 3"), CELLS[:1]), Path("nowhere"))
    fedfa = paper_page.Paper("fedfa", paper_page.find_paper_modules()["fedfa"], [empty, plan])
    page = paper_page.make_paper_page(fedfa, [study], "- It | missed.\n")
    assert page.index("### FedFA, Table 2: Accuracy under label skew") < page.index("### Without a finished run")
    assert "| FedFA, Table 3: Ablation | 1 | `fedcli table fedfa:3` |" in page
    assert page.endswith("## What did not work\n\n- It | missed.\n")
    assert "`fedcli table fedfa:2` runs what is missing." in page
    assert "- [A tiny study](../tiny.md): It runs. run a, rounds to 1: 1 (1)\n" in page

    (cell,) = [cell for cell in plan.cells if cell.place == ("FedAvg", "FMNIST #C=2")]
    finished_runs = tuple(run for run in cell.runs if not run.needs_running)
    complete = replace(
        plan,
        cells=(replace(cell, runs=finished_runs),),
        runs=finished_runs,
        table=replace(TABLE, cells=CELLS[:1]),
    )
    complete_page = paper_page.make_paper_page(replace(fedfa, tables=[complete]), [study], "")
    assert "### FedFA, Table 2" in complete_page
    assert "runs what is missing" not in complete_page

    page_without_runs = paper_page.make_paper_page(replace(fedfa, tables=[empty]), [replace(study, records=[])], "")
    assert "tiny" not in page_without_runs
    assert "What did not work" not in page_without_runs


# The script that writes all pages


SPEED = ROOT / "results" / "speed"


@pytest.fixture(scope="module")
def project(results, tmp_path_factory):
    """A project's folder with a README and results, whose pages the script has written; no test may change it."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(results, folder / "results")
    (folder / "results" / "papers" / "notes").mkdir(parents=True)
    (folder / "results" / "papers" / "notes" / "fedsa.md").write_text("- Nothing yet.\n")
    shutil.copytree(SPEED, folder / "results" / "speed", ignore=shutil.ignore_patterns("*.png", "*.pdf"))
    readme = "# Project\n\n<!-- claims: written by 'make tables' -->old<!-- claims: end -->\n\nEnd.\n"
    (folder / "README.md").write_text(readme)
    pages.main(folder / "results")
    return folder


def names_of_papers():
    return {path.stem for path in (ROOT / "papers").glob("*.py")} - {"__init__"}


@pytest.mark.slow
def test_the_script_draws_the_figures_of_speed(project):
    drawn = {file.name for file in project.glob("results/speed/*.png")}
    assert drawn == {file.name for file in SPEED.glob("*.png")}


@pytest.mark.slow
def test_the_script_writes_a_first_page_of_claims_papers_and_studies(project):
    page = (project / "results" / "README.md").read_text()
    sections = ["What the papers claim, and what is so", "How much of what the papers print has been run", "Studies"]
    assert re.findall("^## (.*)", page, re.M) == sections
    for claim in registry.claims():
        assert f"`{claim.name}` {claim.text}" in page
    assert {*re.findall(r"\]\(papers/(\w+)\.md", page)} == names_of_papers()
    assert "| [tiny](tiny.md) | It runs. run a, rounds to 1: 1 (1) |" in page


@pytest.mark.slow
def test_the_script_writes_a_page_of_a_study_with_its_figures(project):
    page = (project / "results" / "tiny.md").read_text()
    assert page.startswith(f"{INTRO}\n## Findings\n\n- It runs. run a, rounds to 1: 1 (1)\n\n")
    assert "| best, % |" in page
    # It is too short for a figure by itself.
    assert re.findall(r"\]\((.*\.png)\)", page) == ["figures/tiny-curves.png"]
    assert [file.name for file in (project / "results" / "figures").iterdir()] == ["tiny-curves.png"]


@pytest.mark.slow
def test_the_script_writes_a_page_of_each_paper_with_the_notes_on_it(project):
    assert {path.stem for path in project.glob("results/papers/*.md")} == names_of_papers()
    page = (project / "results" / "papers" / "fedsa.md").read_text()
    assert page.endswith("## What did not work\n\n- Nothing yet.\n")


@pytest.mark.slow
def test_the_script_writes_a_table_of_claims_into_the_readme_of_the_project(project):
    readme = (project / "README.md").read_text()
    assert readme.startswith("# Project\n\n<!-- claims: written by 'make tables' -->\n\n| Claims of | Repro")
    assert "| [FedFA](results/papers/fedfa.md) | 0 | 0 | 0 | 0 | 13 | 4 |" in readme
    assert readme.endswith(" |\n\n<!-- claims: end -->\n\nEnd.\n")


def test_a_folder_without_runs_gets_no_pages(tmp_path):
    with pytest.raises(SystemExit, match="has no runs for pages"):
        pages.main(tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.fixture(scope="module")
def made_files(project):
    """The files as they are made from the project's records."""
    return pages.make_files(project / "results")


@pytest.fixture
def own_results(project, tmp_path):
    """The results in a copy of the project, which a test may change."""
    shutil.copytree(project, tmp_path / "project")
    return tmp_path / "project" / "results"


@pytest.mark.slow
def test_the_script_checks_its_files_and_changes_nothing(own_results):
    pages.main(own_results, check=True)
    (own_results / "tiny.md").write_text("old")
    with pytest.raises(SystemExit, match=r"now: tiny\.md; run 'make tables'\.$"):
        pages.main(own_results, check=True)
    assert (own_results / "tiny.md").read_text() == "old"


@pytest.mark.slow
def test_the_check_names_pages_that_are_old_or_missing(own_results, made_files):
    pages.check_pages(own_results, made_files)
    (own_results / "tiny.md").write_text("old")
    (own_results / "papers" / "fedsa.md").unlink()
    with pytest.raises(SystemExit, match=r"now: tiny\.md, papers/fedsa\.md; run 'make tables'\.$"):
        pages.check_pages(own_results, made_files)


@pytest.mark.slow
def test_the_check_names_figures_that_are_missing_or_of_no_page(own_results, made_files):
    curves = own_results / "figures" / "tiny-curves.png"
    curves.rename(own_results / "figures" / "gone-curves.png")
    message = r"now: figures/tiny-curves\.png; run .*\n.* here: figures/gone-curves\.png; delete"
    with pytest.raises(SystemExit, match=message):
        pages.check_pages(own_results, made_files)


@pytest.mark.slow
def test_the_check_names_pages_of_papers_and_studies_that_are_gone_but_none_by_hand(own_results, made_files):
    (own_results / "by-hand.md").write_text("# A page that no script makes\n")
    pages.check_pages(own_results, made_files)

    (own_results / "papers" / "gone.md").write_text("of a paper that is no longer here")
    (own_results / "tiny.md").rename(own_results / "renamed.md")
    with pytest.raises(SystemExit, match=r"now: tiny\.md; run .*\n.* here: papers/gone\.md, renamed\.md; delete"):
        pages.check_pages(own_results, made_files)


# Findings of studies, against hand numbers of small runs


def record_with_accuracy(method, seed, accuracy):
    """Returns the record of a run with an accuracy in its last round."""
    record = make_record(method, seed, protocol="fedfm:niid-1")
    record["summary"]["last"] = accuracy
    record["rounds"][-1] |= {"test_accuracy": accuracy, "classifier_accuracy": 0.9}
    record["cost"]["memory_floats"] = 12345
    return record


PRINTED = ["fedfa:2", "FMNIST #C=2"]
GROUPS = {
    "FedFA": [record_with_accuracy("one", 0, 0.75), record_with_accuracy("one", 1, 0.85)],
    "FedAvg": [
        record_with_accuracy("two", 0, 0.60),
        record_with_accuracy("two", 1, 0.80),
        record_with_accuracy("two", 2, 0.10),
    ],
    "twice": [record_with_accuracy("two", 0, 0.60), record_with_accuracy("two", 0, 0.70)],
    "other clients": [record_with_accuracy("two", 1, 0.5) | {"partition": {"fingerprint": "another"}}],
}


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        # 75 - 60 and 85 - 80: the mean 10 with a half-width of 12.7062 * 5, Student's t with one degree of freedom
        ({"than": "FedAvg"}, "FedFA - FedAvg, last round: +10.00 [-53.53, +73.53] (2)"),
        ({"says": "It is high"}, "It is high. FedFA, last round: 80.00 [16.47, 143.53] (2)"),
        ({"of": "other clients"}, "other clients, last round: 50.00 (1)"),
        ({"metric": "memory-floats"}, "FedFA, memory floats: 12,345"),
        ({"metric": "classifier-of-last:1", "than": "FedAvg", "than_metric": "last"},
            "FedFA (classifier of last 1) - FedAvg (last round): +20.00 [-107.06, +147.06] (2)"),
        ({"than": "FedAvg", "paper": PRINTED}, "FedFA - FedAvg, last round: +10.00 [-53.53, +73.53] (2); paper +9.48"),
        ({"paper": PRINTED}, "FedFA, last round: 80.00 [16.47, 143.53] (2); paper 84.08"),
    ],
)  # fmt: skip
def test_a_finding_is_what_the_records_say(entry, line):
    finding = studies.read_finding({"metric": "last", "of": "FedFA", **entry})
    assert studies.describe_finding(finding, GROUPS) == line


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"than": "twice"}, "the runs of seed 0 are no pair: several"),
        ({"than": "other clients"}, "the runs of seed 1 are no pair: .* or of other data or partitions"),
        ({"metric": "quality:nmi"}, "no run has this value"),
        ({"than": "FedAvg", "paper": ["fedfa:2", "no such column"]}, "fedfa:2 has no number in no such column"),
        ({"of": "twice"}, "there are several runs of seed 0 on one partition"),
        ({"paper": PRINTED, "than": "FedAvg", "than_metric": "best"}, "'paper' and 'than_metric' do not go together"),
        ({"then": "FedAvg"}, "there is no key 'then' here, but says, metric, "),
        ({"than_metric": "best"}, "'than_metric' is of the runs that 'than' names, which is missing"),
        ({"than": "FedFA"}, "'of' and 'than' are the same runs by the same metric"),
        ({"of": "FedX"}, r"\[runs\] has no group 'FedX', but FedFA, FedAvg, "),
        ({"than": "FedX"}, r"\[runs\] has no group 'FedX'"),
        ({"metric": 3}, "'metric' must be a text"),
        ({"paper": "fedfa:2"}, "'paper' must be a list"),
        ({"paper": ["fedfa:2"]}, "'paper' must be a table and a column"),
        ({"paper": ["fedfa:2", 2]}, "2 must be a text"),
    ],
)
def test_a_finding_that_the_records_do_not_bear_is_refused(entry, message):
    with pytest.raises(ValueError, match=message):
        studies.describe_finding(studies.read_finding({"metric": "last", "of": "FedFA", **entry}), GROUPS)


# Files of findings


def test_a_file_names_groups_by_folders(tmp_path):
    study = tmp_path / "study"
    write_unsigned_record(study / "a" / "seed-0", record_with_accuracy("one", 0, 0.75))
    write_unsigned_record(tmp_path / "other" / "seed-1", record_with_accuracy("one", 1, 0.85))
    (study / "intro.md").write_text("# A study\n")
    assert studies.read_study(study).finding_lines == []
    text = '[runs]\nmine = ["a", "../other"]\n[[findings]]\nmetric = "last"\nof = "mine"\n'
    (study / "findings.toml").write_text(text)
    assert studies.read_study(study).finding_lines == ["mine, last round: 80.00 [16.47, 143.53] (2)"]
    names = [record["label"] for record in studies.name_groups(studies.read_study(study))]
    assert names == ["mine"]  # in figures too, also of a list of folders


@pytest.mark.parametrize(
    ("text", "reason", "got"),
    [
        ("runs = ", "", ""),
        ('metric = ["best"]', "there is no key 'metric' here, but metrics, figures, runs, findings", ""),
        ('[runs]\nmine = "b"', "there is no run", " got b"),
        ('[runs]\nmine = "a"\nyours = ["a"]', "the groups 'mine' and 'yours' are of the same folder", "['a']"),
        ('[[findings]]\nmetric = "last"\nof = "mine"', "[runs] has no group 'mine', but none at all; got ", "'last'"),
        ('[runs]\nmine = "a"\n[[findings]]\nof = "mine"', "a finding needs 'metric'; got ", ""),
        ("[runs]\nmine = 3", "3 must be a text; got 3", ""),
        ('metrics = "last"', "'metrics' must be a list", ""),
        ('metrics = ["bets"]', "unknown metric 'bets'", ""),
        ("findings = [3]", "it must be a table; got 3", ""),
        ('[figures]\ncurvs = "A"', "unknown ", "'curvs'"),
        ("[figures]\ncurves = 3", "3 must be a text; got curves", ""),
    ],
)
def test_a_wrong_file_is_refused_by_its_name_and_the_reason(text, reason, got, tmp_path):
    write_unsigned_record(tmp_path / "a" / "seed-0", record_with_accuracy("one", 0, 0.75))
    (tmp_path / "intro.md").write_text("# A study\n")
    (tmp_path / "findings.toml").write_text(text)
    with raises_user_error(f"findings.toml cannot be read ({reason}", got):
        studies.read_study(tmp_path)
