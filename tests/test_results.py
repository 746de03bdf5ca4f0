"""What results/ shows is what its records say."""

import re
from pathlib import Path

import pytest

from fedcli.results import pages, tables

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
STUDIES = sorted(path.parent for path in RESULTS.glob("records/*/intro.md"))


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_a_committed_page_equals_its_records(study):
    page = (RESULTS / f"{study.name}.md").read_text(encoding="utf-8")
    assert page == tables.page(study), "run 'make tables'"


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_a_committed_page_has_its_figure(study):
    assert (RESULTS / "figures" / f"{study.name}-curves.png").is_file(), "run 'make tables'"


def test_there_are_results():
    assert STUDIES


def test_the_pages_of_the_papers_equal_their_files_and_the_records(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDCLI_DATA", str(tmp_path))  # no data set is there
    monkeypatch.chdir(ROOT)
    made = pages.pages(Path("results"))
    for name, text in made.items():
        assert (RESULTS / name).read_text(encoding="utf-8") == text, f"run 'make tables': {name}"
    written = {path.name for path in made if path.parent.name == "papers"}
    assert {path.name for path in (RESULTS / "papers").glob("*.md")} == written
    assert "fedfa:label-skew" in made[Path("README.md")]
    assert pages.BEGIN in made[Path("..") / "README.md"]  # the project's first page quotes them
    monkeypatch.chdir(tmp_path)
    assert pages.pages(RESULTS) == made  # wherever it is called from


def test_the_links_of_the_pages_lead_somewhere():
    for file in (*RESULTS.glob("*.md"), *RESULTS.glob("papers/*.md")):
        for target in re.findall(r"\]\(([^)#:\s]+)\)", file.read_text(encoding="utf-8")):
            assert (file.parent / target).exists(), (file.name, target)
    listed = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert [study.name for study in STUDIES if f"({study.name}.md)" not in listed] == []


def test_one_cell_is_redone_by_a_command_of_the_first_page_of_results():
    (command,) = re.findall(r"^\$ fedcli verify (.+)$", (RESULTS / "README.md").read_text(encoding="utf-8"), re.M)
    (record,) = tables.find_records([ROOT / command])
    assert record["status"] == "finished"


def test_how_far_one_method_is_ahead_in_the_last_round_is_what_the_records_say():
    def last(method, seed):
        (record,) = tables.find_records([RESULTS / "records" / "fmnist-nine-methods" / method / f"seed-{seed}"])
        return 100 * record["summary"]["last"]

    ahead = " and ".join(f"{last('fedfm', seed) - last('fedavg', seed):.1f}" for seed in (0, 1))
    assert f"it is {ahead} points ahead" in (RESULTS / "fmnist-nine-methods.md").read_text()
