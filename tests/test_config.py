"""The options of a run as its record keeps them: they still resolve, also where options have been added since."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from fedcli import option
from fedcli.registry import find_method
from fedcli.results.tables import commands
from fedcli.runs.config import recorded_options, resolve

RECORDS = Path(__file__).parent.parent / "results" / "records"
FILES = sorted(RECORDS.rglob("record.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.parent.relative_to(RECORDS)))
def test_a_committed_record_still_resolves_to_its_configuration(file, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # some are of a machine with a GPU
    record = json.loads(file.read_text())
    method = find_method(record["method"])
    setup = resolve(method, recorded_options(record["config"], method), need_data=False)
    config = {name: value for name, value in record["config"].items() if value is not None}
    assert {name: setup.values()[name] for name in config} == config


def test_commands_are_those_of_the_runs_without_their_folders_and_each_once():
    typed = ["fedcli run feddyn --seed 0", *(f"fedcli run feddyn --out{out} --seed 0" for out in ("=/a", " '/b c'"))]
    assert commands({"command": command} for command in [*typed, "python run.py"]) == typed[:1]
    assert commands([{}]) == []


@dataclass(frozen=True)
class Config:
    old: float = option(1.0, "An option that there always was")
    new: float = option(2.0, "One whose default changed the numbers", before=0.5)
    newer: float = option(3.0, "One that changes nothing where it is left alone")


def test_a_record_without_an_option_stands_at_what_was_done_before():
    method = replace(find_method("fedavg"), name="toy", config=Config)
    config = {"protocol": "fedfm:digits", "dataset": "digits", "rounds": 7, "old": 4.0, "backbone": "cnn-small"}
    assert resolve(method, recorded_options(config, method)).options == Config(4.0, 0.5, 3.0)
    assert resolve(method, recorded_options({**config, "new": 9.0}, method)).options == Config(4.0, 9.0, 3.0)
    assert resolve(method, config).options == Config(4.0, 2.0, 3.0)  # of a run that begins now
