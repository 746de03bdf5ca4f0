"""What results/ shows is what its records say."""

from pathlib import Path

import pytest

from fedcli import tables

RESULTS = Path(__file__).parent.parent / "results"
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
