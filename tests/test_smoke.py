"""The smoke reproduction: built-in data for every method, and one failure does not stop the others."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from fedcli import registry, smoke
from fedcli.cli import app as cli
from fedcli.data import datasets
from fedcli.errors import UserError
from fedcli.runs import config


@pytest.mark.parametrize("name", list(registry.methods()))
def test_every_method_has_a_protocol_for_built_in_data(name):
    protocol, dataset = smoke.built_in(registry.find_method(name))
    assert dataset in datasets.BUILT_IN
    assert registry.protocols()[protocol].datasets[dataset].backbone


def test_a_method_without_built_in_data_says_so(monkeypatch):
    elsewhere = registry.protocols()["fedfm:niid-1"]
    monkeypatch.setattr(config, "default_protocol", lambda method, dataset: elsewhere)
    with pytest.raises(UserError, match="know no built-in data"):
        smoke.built_in(registry.find_method("fedavg"))


def test_a_failure_does_not_stop_the_others_and_is_told(monkeypatch):
    def broken(state, cohort, fed, config):
        raise ArithmeticError("out of luck")

    real = registry.find_method("fedavg")
    known = {"fedavg": real, "broken": replace(real, name="broken", run_round=broken)}
    monkeypatch.setattr(registry, "methods", lambda: known)
    result = CliRunner().invoke(cli.app, ["smoke"])
    assert result.exit_code == 1
    assert "1 of 2 methods ran" in result.stdout
    assert "ArithmeticError: out of luck" in result.stderr
    (fedavg_line,) = [line for line in result.stdout.splitlines() if line.startswith("fedavg")]
    assert "fedfm:digits" in fedavg_line


def test_only_some_methods_and_unknown_ones_are_refused():
    result = CliRunner().invoke(cli.app, ["smoke", "--only", "fedavg"])
    assert result.exit_code == 0
    assert "1 of 1 methods ran" in result.stdout
    assert CliRunner().invoke(cli.app, ["smoke", "--only", "fedavgg"]).exit_code == 2
