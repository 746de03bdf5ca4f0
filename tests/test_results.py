"""What results/ shows is what its records say."""

import re
import shutil
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fedcli import figures, registry
from fedcli.figures import features
from fedcli.registry import find_method, methods
from fedcli.results import claims, printed_numbers, run_records
from tests.scripts import load_script

pytestmark = pytest.mark.long(worker=1)

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
PAPERS = load_script(RESULTS / "paper_page.py").find_paper_modules()
STUDIES = sorted(path.parent for path in RESULTS.glob("records/*/intro.md"))
FIGURE = re.compile(r"\]\((?P<path>figures/(?P<study>[\w.-]+)-(?P<kind>[a-z]+)\.png)\)")
MAX_INTRO_LINES = 10  # by hand at the head of a study's page
# Names of settings and of places in a paper have decimals too.
SETTINGS_AND_PLACES = r"`[^`]*`|\]\([^)]*\)|^#.*|(Dirichlet( shares of)?|Table|Figs?\.|Eq\.)\s+[\d.]+"


class StudyFigure(NamedTuple):
    """A figure that the page of a study shows."""

    study: str
    kind: str


def figures_of_pages():
    """Returns the figures that pages of studies show, by path."""
    shown = {}
    for file in RESULTS.glob("*.md"):
        for match in FIGURE.finditer(file.read_text(encoding="utf-8")):
            shown[Path(match["path"])] = StudyFigure(match["study"], match["kind"])
    return shown


def recipe_of(target):
    """Returns the commands of a target of the Makefile."""
    makefile = (ROOT / "Makefile").read_text()
    return re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.M)[1]


def test_pages_show_the_figures_that_make_tables_draws():
    """No other figure stands in the folder of figures."""
    drawn = set(figures_of_pages())
    assert {file.relative_to(RESULTS) for file in RESULTS.glob("figures/*.*")} == drawn

    committed_pages = [file for file in RESULTS.rglob("*.md") if "records" not in file.parts]
    for file in (*committed_pages, ROOT / "README.md"):
        for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", file.read_text(encoding="utf-8")):
            path = (file.parent / target).resolve().relative_to(RESULTS)
            assert path in drawn, f"{file.name} shows {target}, which 'make tables' does not draw"

    for command in ("results/pages.py", "results/board/board.py --page"):
        assert command in recipe_of("tables")


@pytest.mark.slow
@pytest.mark.parametrize(("study", "kind"), sorted(figures_of_pages().values()))
def test_the_data_of_every_figure_are_committed(study, kind, monkeypatch, tmp_path):
    bare = tmp_path / study  # what is kept of a run in the repository, and nothing else
    shutil.copytree(RESULTS / "records" / study, bare, ignore=shutil.ignore_patterns("checkpoint*", "*.png", "*.pdf"))
    monkeypatch.setattr(features, "embed", lambda points: points[:, :2])  # t-SNE takes seconds
    assert figures.find_chart(kind)(run_records.find_records([bare])).axes


def test_what_is_written_by_hand_is_short_and_has_no_measured_number():
    intros = [*RESULTS.glob("records/*/intro.md")]
    notes = [*RESULTS.glob("papers/notes/*.md")]
    assert intros
    assert notes
    for file in (*intros, *notes):
        text = file.read_text(encoding="utf-8")
        assert re.findall(r"(?<![\w-])[+-]?\d+\.\d+", re.sub(SETTINGS_AND_PLACES, "", text, flags=re.M)) == [], file
        if file.name == "intro.md":
            assert len([line for line in text.splitlines() if line]) <= MAX_INTRO_LINES, file
            assert text.startswith("# "), file
            assert "?\n" in text or "? " in text, file

    sentences = []
    for study in STUDIES:
        findings = tomllib.loads((study / "findings.toml").read_text(encoding="utf-8"))["findings"]
        sentences += [finding["says"] for finding in findings if "says" in finding]
    assert sentences
    for sentence in sentences:
        assert not re.search(r"\d\.\d", re.sub(r"Eq\. [\d.]+|F\.2", "", sentence)), sentence


@pytest.mark.parametrize("paper", PAPERS.values(), ids=PAPERS)
def test_every_number_that_a_paper_prints_is_planned_or_has_a_reason(paper):
    planned = set()
    for table in paper.TABLES:
        name, title = table.reported
        planned |= {(title, cell.row, cell.column) for cell in (*table.cells, *table.gains)}

    for title, content in printed_numbers.read_reported_numbers()[name].items():
        for entry in content["rows"]:
            if not any(isinstance(value, int | float) for value in entry.values()):
                continue  # which prints no number
            row = entry["method"]
            column = entry["column"]
            has_reason = paper.NOT_PLANNED.keys() & {title, f"{title}: {row}", f"{title}: {column}"}
            assert has_reason or (title, row, column) in planned, (title, row, column)


def read_mixed_digits_accuracies(table):
    """Reads the accuracies in percent that FedFA prints of Mixed Digits with feature skew alone and #C=2, by method."""
    accuracies = {}
    for entry in printed_numbers.read_reported_numbers()["FedFA"][table]["rows"]:
        if re.match(r"Mixed Digits (\(feature skew|#C=2)", entry["column"]):
            accuracies.setdefault(entry["method"], []).append(entry["mean"])
    return accuracies


def is_cut_multiple_of_a_fifteenth(percent):
    """Returns whether a number is a multiple of 1/15 that was cut after two decimals.

    Cutting takes 0.01 from one that has two decimals alone, as 83.6, where its float lies just below it.
    """
    what_was_cut = [numerator / 15 - percent for numerator in range(1501)]
    return any(0 <= round(cut, 6) <= 0.01 for cut in what_was_cut)


def test_what_fedfas_page_says_of_draws_of_500_test_images_follows_from_the_printed_numbers():
    of_table_1 = read_mixed_digits_accuracies("Table 1")
    of_table_3 = read_mixed_digits_accuracies("Table 3")
    assert len(of_table_1) == 6
    assert len(of_table_3) == 4
    deviations = []
    for accuracies in (*of_table_1.values(), *of_table_3.values()):
        for percent in accuracies:
            deviations.append((percent * (100 - percent) / 500) ** 0.5)
    page = (RESULTS / "papers" / "fedfa.md").read_text(encoding="utf-8")
    words = (
        "tests on ten images a class and set, 500 in all, drawn by the run's seed. At the printed accuracies such a "
        f"draw alone has a standard deviation of {min(deviations):.1f} to {max(deviations):.1f} points. Table 1's "
        "means of three runs are multiples of 1/15, cut after two decimals, as 500 images give them; of Table 3's only "
        "FedFA's own are."
    )
    assert words in page
    for accuracies in of_table_1.values():
        assert all(is_cut_multiple_of_a_fifteenth(percent) for percent in accuracies)
    for method, accuracies in of_table_3.items():
        assert [is_cut_multiple_of_a_fifteenth(percent) for percent in accuracies] == [method == "FedFA"] * 2


@pytest.mark.slow
def test_pages_name_the_runs_of_earlier_versions_of_a_methods_file():
    """No other run is of an earlier version."""
    old = set()
    for run in run_records.read_runs([RESULTS / "records"]):
        is_registered = run.method in methods()  # a study's own file is known by its hash
        if is_registered and run.record["numerics"]["method"] != find_method(run.method).numerics:
            study = run.folder.relative_to(RESULTS / "records").parts[0]
            old.add((study, run.method))
    assert old == {("fmnist-nine-methods", "scaffold")}
    assert "SCAFFOLD's runs are of an earlier version of its file" in (RESULTS / "fmnist-nine-methods.md").read_text()


class ShownVerdict(NamedTuple):
    """What a page shows of a claim."""

    outcome: str
    lead: str
    seeds: Any


def verdicts_of_fedfa(**sources):
    """Returns what is shown of FedFA's claims that some runs are for, by their names."""
    shown = {}
    for answer in claims.answer_claims(registry.claims("fedfa"), **sources):
        comparison = answer.comparison
        if comparison.evidence.folders:
            lead = comparison.lead.format(answer.context.metric)
            shown[answer.claim.name] = ShownVerdict(comparison.verdict.outcome, lead, comparison.evidence.seeds)
    return shown


def test_the_verdicts_that_are_installed_are_those_of_the_records():
    """Of one paper; `make recompute` holds the file of all to what the records give."""
    of_records = verdicts_of_fedfa(folders=run_records.find_shipped_folders())
    assert verdicts_of_fedfa(folders=[], shipped=True) == of_records
    assert len(of_records) >= 5


def test_every_study_has_findings():
    assert STUDIES
    for study in STUDIES:
        assert "\n## Findings\n\n- " in (RESULTS / f"{study.name}.md").read_text(encoding="utf-8"), study.name


def test_the_readme_counts_every_claim_of_every_paper():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    num_claims = {}
    for paper, counts in re.findall(r"^\| \[[^]]+\]\(results/papers/(\w+)\.md\) \| (.*) \|$", readme, re.M):
        num_claims[paper] = sum(int(count) for count in counts.split(" | "))
    assert num_claims == {name: len(paper.CLAIMS) for name, paper in PAPERS.items()}


def test_make_recompute_holds_the_committed_pages_to_the_records():
    assert "results/pages.py --check" in recipe_of("recompute")
    assert "make recompute" in (ROOT / ".ci" / "run").read_text()


def test_the_first_page_names_the_tables_that_have_been_run_in_full():
    in_full = "Run in full, every cell here that has a printed number: fedfa:5, fedfa:6, fedfa:7.\n"
    assert in_full in (RESULTS / "README.md").read_text(encoding="utf-8")
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "Only FedFA's Tables 5, 6 and 7 have been run in full, except one row of Table 7, which starts" in readme
