"""Curves and parameters of short runs are the bits they were, on the kinds of machine whose bits are known."""

import copy
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
    made = copy.deepcopy(known)
    made["runs"]["moon"]["norm"] += 1
    goldens.refuse_silent_changes(known, made)
    for change in ({"params_sha256": "0"}, {"curve": [0.5]}):
        made = copy.deepcopy(known)
        made["runs"]["moon"] |= change
        made["runs"]["fedfm"]["method"] += 1  # another run's number does not count
        with pytest.raises(SystemExit, match="changed: moon;"):
            goldens.refuse_silent_changes(known, made)
        for number in goldens.NUMBERS:
            raised = {**made["runs"], "moon": {**made["runs"]["moon"], number: 9}}
            goldens.refuse_silent_changes(known, {"runs": raised})


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
