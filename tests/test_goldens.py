"""Curves and parameters of short runs are the bits they were, on the kinds of machine whose bits are known."""

import copy
import json

import pytest

from fedcli.core import NUMERICS
from tests import goldens

KNOWN = json.loads(goldens.FILE.read_text())
HERE = goldens.kind_of_machine()


def test_every_run_has_a_golden():
    """On one kind of machine at least: a run that changes can be made anew on the kinds at hand only."""
    assert {name for kind in KNOWN.values() for name in kind["runs"]} == set(goldens.names())


@pytest.mark.parametrize("kind", KNOWN)
def test_the_goldens_are_those_of_the_numerics_of_now(kind):
    assert KNOWN[kind]["core"] == NUMERICS, "run 'python -m tests.goldens'"
    assert {name: run["method"] for name, run in KNOWN[kind]["runs"].items()} == {
        name: goldens.numerics(name) for name in KNOWN[kind]["runs"]
    }


def test_a_golden_is_not_overwritten_unless_a_number_was_raised():
    known = next(iter(KNOWN.values()))
    made = copy.deepcopy(known)
    made["runs"]["moon"]["norm"] += 1
    goldens.refuse_silent_changes(known, made)
    for change in ({"params_sha256": "0"}, {"curve": [0.5]}):
        made = copy.deepcopy(known)
        made["runs"]["moon"] |= change
        made["runs"]["fedfm"]["method"] += 1  # another method's number does not count
        with pytest.raises(SystemExit, match="changed: moon;"):
            goldens.refuse_silent_changes(known, made)
        goldens.refuse_silent_changes(known, {**made, "core": known["core"] + 1})
        made["runs"]["moon"]["method"] += 1
        goldens.refuse_silent_changes(known, made)


@pytest.mark.parametrize("name", goldens.names())
def test_golden(name):
    found = goldens.golden(name)
    if name in KNOWN.get(HERE, {"runs": {}})["runs"]:
        expected = KNOWN[HERE]["runs"][name]
        assert goldens.numbers_of(found) == goldens.numbers_of(expected), "a number has changed: see tests/goldens.py"
    for kind in KNOWN.values():  # other processors round differently; three rounds do not carry that far
        if name in kind["runs"]:
            assert found["norm"] == pytest.approx(kind["runs"][name]["norm"], rel=1e-3)
