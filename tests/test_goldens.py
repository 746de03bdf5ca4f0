"""Curves and parameters of short runs are the bits they were, on the kinds of machine whose bits are known."""

from typing import NamedTuple

import pytest

from fedcli.registry import methods
from tests import goldens
from tests.slow import parameters_of

KNOWN = goldens.read_goldens()  # by the kind of machine and the name
GOLDENS_HERE = KNOWN.get(goldens.kind_of_machine(), {})


def test_every_run_has_a_golden():
    """One kind of machine is enough: a run that changes can be made anew on the kinds at hand only."""
    assert set().union(*KNOWN.values()) == set(goldens.names())


@pytest.mark.parametrize("text", [None, "processor\t: 0\nCPU implementer\t: 0x41\n"])
def test_a_machine_of_which_linux_does_not_tell_the_model_has_a_kind(text, tmp_path, monkeypatch):
    """As macOS, which has no such file, and Linux on ARM."""
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(goldens, "CPU_INFO", tmp_path / "cpuinfo")
    kind = goldens.kind_of_machine()
    assert not kind.startswith(",")
    assert kind not in KNOWN


class GoldenRun(NamedTuple):
    """A golden's run that was made now."""

    name: str
    values: dict


OTHER_RUNS = [pytest.param(name, marks=pytest.mark.slow) for name in goldens.OTHER_RUNS]
GOLDEN_RUNS = [*parameters_of(methods()), *OTHER_RUNS]


@pytest.fixture(scope="module")
def golden_run(request):
    return GoldenRun(request.param, goldens.make(request.param))


@pytest.mark.parametrize("golden_run", GOLDEN_RUNS, indirect=True)
def test_a_run_made_now_has_the_bits_of_its_golden_on_this_kind_of_machine(golden_run):
    golden = GOLDENS_HERE.get(golden_run.name)
    if golden is None:
        pytest.skip("no golden was made on this kind of machine")
    # The last digit of the norm depends on the threads; the numerics are no result.
    not_compared = {key: golden_run.values[key] for key in ("norm", *goldens.NUMERICS)}
    assert golden_run.values == golden | not_compared, "a number has changed: see tests/goldens.py"


@pytest.mark.parametrize("golden_run", GOLDEN_RUNS, indirect=True)
def test_a_run_made_now_is_near_its_golden_on_every_kind_of_machine(golden_run):
    """Other processors round differently; three rounds do not carry that far."""
    for goldens_of_kind in KNOWN.values():
        if golden_run.name in goldens_of_kind:
            golden = goldens_of_kind[golden_run.name]
            for numerics in goldens.NUMERICS:
                assert golden_run.values[numerics] == golden[numerics], "run 'python -m tests.goldens'"
            assert golden_run.values["norm"] == pytest.approx(golden["norm"], rel=1e-3)
            assert golden_run.values["curve"] == pytest.approx(golden["curve"], abs=0.05)
