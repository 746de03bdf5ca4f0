"""Curves and parameters of short runs are the bits they were, on the kinds of machine whose bits are known."""

import json

import pytest

from tests import goldens

KNOWN = json.loads(goldens.FILE.read_text())
HERE = goldens.kind_of_machine()


def test_every_run_has_a_golden():
    """On one kind of machine at least: a run that changes can be made anew on the kinds at hand only."""
    assert {name for kind in KNOWN.values() for name in kind["runs"]} == set(goldens.names())


def test_a_golden_is_not_overwritten_unless_a_number_was_raised():
    known = next(iter(KNOWN.values()))
    runs = {**known["runs"], "fedfm": {**known["runs"]["fedfm"], "method": 9}}  # another run's number does not count

    def refuse(**change):
        goldens.refuse_silent_changes(known, {"runs": {**runs, "moon": {**runs["moon"], **change}}})

    refuse(norm=9.0)
    for change in ({"params_sha256": "0"}, {"curve": [0.5]}):
        with pytest.raises(SystemExit, match="changed: moon;"):
            refuse(**change)
        for number in goldens.NUMBERS:
            refuse(**change, **{number: 9})


@pytest.mark.parametrize("name", goldens.names())
def test_golden(name):
    found = goldens.golden(name)
    if name in KNOWN.get(HERE, {"runs": {}})["runs"]:
        expected = KNOWN[HERE]["runs"][name]
        assert goldens.numbers_of(found) == goldens.numbers_of(expected), "a number has changed: see tests/goldens.py"
    for kind in KNOWN.values():  # other processors round differently; three rounds do not carry that far
        if name in kind["runs"]:
            numbers = [[run[number] for number in goldens.NUMBERS] for run in (found, kind["runs"][name])]
            assert numbers[0] == numbers[1], "run 'python -m tests.goldens'"
            assert found["norm"] == pytest.approx(kind["runs"][name]["norm"], rel=1e-3)
