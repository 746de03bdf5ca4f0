"""Curves and parameters of short runs are the bits they were, on the kinds of machine whose bits are known."""

import json
from typing import NamedTuple

import pytest

from tests import goldens

KNOWN = json.loads(goldens.FILE.read_text())
RUNS_HERE = KNOWN.get(goldens.kind_of_machine(), {"runs": {}})["runs"]


def test_every_run_has_a_golden():
    """One kind of machine is enough: a run that changes can be made anew on the kinds at hand only."""
    runs_of_kinds = [kind["runs"] for kind in KNOWN.values()]
    assert set().union(*runs_of_kinds) == set(goldens.names())


@pytest.mark.parametrize("text", [None, "processor\t: 0\nCPU implementer\t: 0x41\n"])
def test_a_machine_of_which_linux_does_not_tell_the_model_has_a_kind(text, tmp_path, monkeypatch):
    """As macOS, which has no such file, and Linux on ARM."""
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(goldens, "CPU_INFO", tmp_path / "cpuinfo")
    kind = goldens.kind_of_machine()
    assert not kind.startswith(",")
    assert kind not in KNOWN


class MadeNow(NamedTuple):
    """A golden's run that was made now."""

    name: str
    values: dict


@pytest.fixture(scope="module")
def made(request):
    return MadeNow(request.param, goldens.make(request.param))


@pytest.mark.parametrize("made", goldens.names(), indirect=True)
def test_a_run_made_now_has_the_bits_of_its_golden_on_this_kind_of_machine(made):
    golden = RUNS_HERE.get(made.name)
    if golden is None:
        pytest.skip("no golden was made on this kind of machine")
    # The last digit of the norm depends on the threads; the numerics are no result.
    not_compared = {key: made.values[key] for key in ("norm", *goldens.NUMERICS)}
    assert made.values == golden | not_compared, "a number has changed: see tests/goldens.py"


@pytest.mark.parametrize("made", goldens.names(), indirect=True)
def test_a_run_made_now_is_near_its_golden_on_every_kind_of_machine(made):
    """Other processors round differently; three rounds do not carry that far."""
    for kind in KNOWN.values():
        if made.name in kind["runs"]:
            golden = kind["runs"][made.name]
            for numerics in goldens.NUMERICS:
                assert made.values[numerics] == golden[numerics], "run 'python -m tests.goldens'"
            assert made.values["norm"] == pytest.approx(golden["norm"], rel=1e-3)
            assert made.values["curve"] == pytest.approx(golden["curve"], abs=0.05)
