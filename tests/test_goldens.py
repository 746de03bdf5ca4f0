"""Curves and parameters of short runs are the bits they were, on the kinds of machine whose bits are known."""

import json

import pytest

from tests import goldens

KNOWN = json.loads(goldens.FILE.read_text())
HERE = goldens.kind_of_machine()


def test_every_run_has_a_golden():
    """One kind of machine is enough: a run that changes can be made anew on the kinds at hand only."""
    runs_of_kinds = [kind["runs"] for kind in KNOWN.values()]
    assert set().union(*runs_of_kinds) == set(goldens.names())


@pytest.mark.parametrize("name", goldens.names())
def test_a_run_made_now_is_its_golden(name):
    made = goldens.golden(name)
    runs_here = KNOWN.get(HERE, {"runs": {}})["runs"]
    if name in runs_here:
        # The last digit of the norm depends on the threads; the numerics are no result.
        not_compared = {key: made[key] for key in ("norm", *goldens.NUMBERS)}
        assert made == runs_here[name] | not_compared, "a number has changed: see tests/goldens.py"

    for kind in KNOWN.values():  # other processors round differently; three rounds do not carry that far
        if name in kind["runs"]:
            golden = kind["runs"][name]
            for numerics in goldens.NUMBERS:
                assert made[numerics] == golden[numerics], "run 'python -m tests.goldens'"
            assert made["norm"] == pytest.approx(golden["norm"], rel=1e-3)
