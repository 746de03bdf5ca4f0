"""The options of a run as its record keeps them: they still resolve, also where options have been added since."""

import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import typer

from fedcli import option
from fedcli.cli.app import app
from fedcli.registry import find_method
from fedcli.results.tables import commands
from fedcli.runs.config import filled_up, recorded_fields, recorded_options, resolve
from fedcli.runs.settings import NOT_SETTINGS

RECORDS = Path(__file__).parent.parent / "results" / "records"
FILES = sorted(RECORDS.rglob("record.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.parent.relative_to(RECORDS)))
def test_a_committed_record_still_resolves_and_the_command_that_a_page_tells_makes_the_same_run(file, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # some are of a machine with a GPU
    record = json.loads(file.read_text())
    method = find_method(record["method"])
    setup = resolve(method, recorded_options(record["config"], method), need_data=False)
    config = {name: value for name, value in record["config"].items() if value is not None}
    assert {name: setup.values()[name] for name in config} == config
    for command in commands([record]):
        name, *words = shlex.split(command)[2:]
        run = typer.main.get_command(app).commands["run"]
        given = run.get_command(typer.Context(run), name).make_context(name, words).params
        given = {key: value for key, value in given.items() if value is not None and key != "seeds"}
        values = resolve(find_method(name), {**given, "seed": record["seed"]}, need_data=False).values()
        recorded = filled_up(record["config"], recorded_fields(method, record["config"].get("post")))
        had = {key: recorded[key] for key in values if key not in NOT_SETTINGS}
        assert (name, {key: values[key] for key in had}) == (record["method"], had)


def test_a_command_gets_the_options_that_a_default_or_a_protocol_would_set_otherwise_by_now():
    record = json.loads((RECORDS / "fmnist-nine-methods" / "feddyn" / "seed-0" / "record.json").read_text())
    typed, _, folder = record["command"].partition(" --out ")
    assert folder.endswith("/feddyn/seed-0")  # of an older record, and there is something now
    assert commands([record, record]) == [f"{typed} --clip-norm=0.0"]  # the default has moved
    old = {**record, "config": {**record["config"], "lr": 0.3, "clip_norm": 10.0}}
    assert commands([old]) == [f"{typed} --lr=0.3"]
    same = {**record, "config": {**record["config"], "clip_norm": 10.0}}
    for out in ("=/my/runs", " '/my runs/x y'", "='a b'"):
        assert commands([{**same, "command": f"{typed.removesuffix(' --seed 0')} --out{out} --seed 0"}]) == [typed]
    no_step = {"config": {**record["config"], "post": 3}, "origin": {**record["origin"], "post": "given"}}
    for other in ({"method": "of-mine"}, {"protocol": "gone"}, no_step):
        assert commands([{**record, **other}]) == [typed]
    assert commands([{**record, "command": "python run.py"}]) == []


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
