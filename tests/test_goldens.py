"""Curves and parameters of short runs are the bits they were, on the kinds of machine whose bits are known."""

import json

import pytest

from tests import goldens

KNOWN = json.loads(goldens.FILE.read_text())
HERE = goldens.kind_of_machine()


def test_every_run_has_a_golden():
    """On one kind of machine at least: a run that changes can be made anew on the kinds at hand only."""
    assert {name for kind in KNOWN.values() for name in kind["runs"]} == set(goldens.names())


@pytest.mark.parametrize("name", goldens.names())
def test_golden(name):
    found = goldens.golden(name)
    if name in KNOWN.get(HERE, {"runs": {}})["runs"]:
        # The last digit of the norm depends on the threads; the numerics are no result.
        others = {number: found[number] for number in ("norm", *goldens.NUMBERS)}
        assert found == KNOWN[HERE]["runs"][name] | others, "a number has changed: see tests/goldens.py"

    for kind in KNOWN.values():  # other processors round differently; three rounds do not carry that far
        if name in kind["runs"]:
            numbers = [[run[number] for number in goldens.NUMBERS] for run in (found, kind["runs"][name])]
            assert numbers[0] == numbers[1], "run 'python -m tests.goldens'"
            assert found["norm"] == pytest.approx(kind["runs"][name]["norm"], rel=1e-3)
