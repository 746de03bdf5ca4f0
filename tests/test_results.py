"""What results/ shows is what its records say."""

import re
import shutil
from pathlib import Path

import pytest

from fedcli import figures
from fedcli.figures import features
from fedcli.registry import find_method, methods
from fedcli.results import frame, printed_numbers
from tests.scripts import load_script

pytestmark = pytest.mark.long(worker=1)

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
paper_page = load_script(RESULTS / "paper_page.py")
STUDIES = sorted(path.parent for path in RESULTS.glob("records/*/intro.md"))
FIGURE = re.compile(r"\]\((?P<path>figures/(?P<study>[\w.-]+)-(?P<kind>[a-z]+)\.png)\)")
LINES = 10  # by hand at the head of a study's page
# Names of settings and of places in a paper have decimals too.
SETTINGS = r"`[^`]*`|\]\([^)]*\)|^#.*|(Dirichlet|Table|Figs?\.|Eq\.)\s[\d.]+"


def figures_of_pages():
    """The figures that pages of studies show: their study and kind by path."""
    of_pages = {}
    for file in RESULTS.glob("*.md"):
        for match in FIGURE.finditer(file.read_text(encoding="utf-8")):
            of_pages[Path(match["path"])] = match["study"], match["kind"]
    return of_pages


def test_pages_show_the_figures_that_make_tables_draws():
    """No other figure stands in the folder of figures."""
    drawn = set(figures_of_pages())
    assert {file.relative_to(RESULTS) for file in RESULTS.glob("figures/*.*")} == drawn

    committed_pages = [file for file in RESULTS.rglob("*.md") if "records" not in file.parts]
    for file in (*committed_pages, ROOT / "README.md"):
        for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", file.read_text(encoding="utf-8")):
            path = (file.parent / target).resolve().relative_to(RESULTS)
            assert path in drawn, f"{file.name} shows {target}, which 'make tables' does not draw"

    recipe = re.search(r"^tables:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)[1]
    for command in ("results/pages.py", "results/board/board.py --page"):
        assert command in recipe


@pytest.mark.parametrize(("study", "kind"), sorted(figures_of_pages().values()))
def test_the_data_of_every_figure_are_committed(study, kind, monkeypatch, tmp_path):
    bare = tmp_path / study  # what is kept of a run in the repository, and nothing else
    shutil.copytree(RESULTS / "records" / study, bare, ignore=shutil.ignore_patterns("checkpoint*", "*.png", "*.pdf"))
    monkeypatch.setattr(features, "embed", lambda points: points[:, :2])  # t-SNE takes seconds
    assert figures.find_chart(kind)(frame.find_records([bare])).axes


def test_what_is_written_by_hand_is_short_and_has_no_measured_number():
    for file in (*RESULTS.glob("records/*/intro.md"), *RESULTS.glob("papers/notes/*.md")):
        text = file.read_text(encoding="utf-8")
        assert re.findall(r"(?<![\w-])[+-]?\d+\.\d+", re.sub(SETTINGS, "", text, flags=re.M)) == [], file
        if file.name == "intro.md":
            assert len([line for line in text.splitlines() if line]) <= LINES, file
            assert text.startswith("# "), file
            assert "?\n" in text or "? " in text, file
    for file in RESULTS.glob("records/*/findings.toml"):
        for text in re.findall(r'(?m)^says = "(.*)"$', file.read_text(encoding="utf-8")):
            assert not re.search(r"\d\.\d", re.sub(r"Eq\. [\d.]+|F\.2", "", text)), (file, text)


@pytest.mark.parametrize("paper", paper_page.find_paper_modules().values(), ids=paper_page.find_paper_modules())
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


def test_pages_name_the_runs_of_earlier_versions_of_a_methods_file():
    """No other run is of an earlier version."""
    old = set()
    for run in frame.read_runs([RESULTS / "records"]):
        is_registered = run.method in methods()  # a study's own file is known by its hash
        if is_registered and run.record["numerics"]["method"] != find_method(run.method).numerics:
            study, *_ = run.folder.relative_to(RESULTS / "records").parts
            old.add((study, run.method))
    assert old == {("fmnist-nine-methods", "scaffold")}
    assert "SCAFFOLD's runs are of an earlier version of its file" in (RESULTS / "fmnist-nine-methods.md").read_text()


def test_every_study_has_findings():
    for study in STUDIES:
        assert "\n## Findings\n\n- " in (RESULTS / f"{study.name}.md").read_text(encoding="utf-8"), study.name


def test_the_readme_counts_every_claim_of_every_paper():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    num_claims = {}
    for paper, counts in re.findall(r"^\| \[[^]]+\]\(results/papers/(\w+)\.md\) \| (.*) \|$", readme, re.M):
        num_claims[paper] = sum(int(count) for count in counts.split(" | "))
    assert num_claims == {name: len(paper.CLAIMS) for name, paper in paper_page.find_paper_modules().items()}


def test_make_recompute_holds_the_committed_pages_to_the_records():
    recipe = re.search(r"^recompute:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)[1]
    assert "results/pages.py --check" in recipe
    assert "make recompute" in (ROOT / ".ci" / "run").read_text()


def test_the_first_page_names_the_tables_that_have_been_run_in_full():
    in_full = "Run in full, every cell here that has a printed number: fedfa:5, fedfa:6, fedfa:7.\n"
    assert in_full in (RESULTS / "README.md").read_text(encoding="utf-8")
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "Only FedFA's Tables 5, 6 and 7 have been run in full, except one row of Table 7, which starts" in readme
