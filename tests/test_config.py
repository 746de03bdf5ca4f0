"""The options of a run as its record keeps them: they still resolve, also where options have been added since."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from fedcli import option
from fedcli.registry import find_method
from fedcli.runs.config import recorded_options, resolve

RECORDS = Path(__file__).parent.parent / "results" / "records"
FILES = sorted(RECORDS.rglob("record.json"))


def test_there_are_records():
    assert FILES


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.parent.relative_to(RECORDS)))
def test_a_committed_record_still_resolves(file):
    record = json.loads(file.read_text())
    method = find_method(record["method"])
    setup = resolve(method, recorded_options(record["config"], method), need_data=False)
    config = {name: value for name, value in record["config"].items() if value is not None}
    assert {name: setup.values()[name] for name in config} == config


@dataclass(frozen=True)
class Config:
    old: float = option(1.0, "An option that there always was")
    new: float = option(2.0, "One whose default changed the numbers", before=0.5)
    newer: float = option(3.0, "One that changes nothing where it is left alone")


def test_a_record_without_an_option_stands_at_what_was_done_before():
    method = replace(find_method("fedavg"), name="toy", config=Config)
    config = {"protocol": "fedfm:digits", "dataset": "digits", "rounds": 7, "old": 4.0}
    assert resolve(method, recorded_options(config, method)).options == Config(4.0, 0.5, 3.0)
    assert resolve(method, recorded_options({**config, "new": 9.0}, method)).options == Config(4.0, 9.0, 3.0)
    assert resolve(method, config).options == Config(4.0, 2.0, 3.0)  # of a run that begins now
