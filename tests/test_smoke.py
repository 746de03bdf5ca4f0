"""The smoke reproduction; that every method has a protocol for built-in data is what the goldens rest on."""

from dataclasses import replace

from fedcli import registry
from tests.programs import invoke


def test_a_failure_does_not_stop_the_others_and_is_told(monkeypatch):
    def broken(state, cohort, fed, config):
        raise ArithmeticError("out of luck")

    real = registry.find_method("fedavg")
    methods = {"broken": replace(real, name="broken", run_round=broken), "fedavg": real}
    monkeypatch.setattr(registry, "methods", lambda: methods)
    result = invoke("smoke")
    assert result.exit_code == 1
    assert "1 of 2 methods ran" in result.stdout
    assert "ArithmeticError: out of luck" in result.stderr
    (row,) = [line.split() for line in result.stdout.splitlines() if line.startswith("fedavg")]
    assert row[1:3] == ["fedfm:digits", "digits"]
