"""What a record says of code, machine and size; and how a finished run is opened again."""

import dataclasses
import json
import shutil
from typing import NamedTuple

import pytest

import fedcli
from fedcli.core.tree_files import save_tree
from fedcli.registry import find_method
from fedcli.runs import checkpoints, resume, verify
from fedcli.runs.identity import identity, numerics, outdated
from fedcli.runs.record import RECORD, read_record, write_record
from tests import laws
from tests.files import refused
from tests.test_runs import TINY


class AnotherState(NamedTuple):
    params: dict
    buffers: dict


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return fedcli.run("fedavg", out=tmp_path_factory.mktemp("runs") / "fedavg", **{**TINY, "rounds": 2})


def test_a_finished_run_is_opened_with_all_it_had(finished):
    opened = resume.open_run(finished.path)
    assert opened.record == read_record(finished.path)
    assert (opened.setup.method.name, opened.setup.run.rounds) == ("fedavg", 2)
    assert laws.distance(opened.state.params, finished.state.params) == 0
    assert [len(part) for part in opened.fed.parts] == opened.record["partition"]["sizes"]


def test_a_record_that_is_changed_on_disk_is_refused(finished, tmp_path):
    write_record(tmp_path, finished.record)
    file, whole = tmp_path / RECORD, read_record(tmp_path)
    text = file.read_text()
    for change in (('"status": "finished"', '"status": "failed"'), (f'"seed": {whole["seed"]},', '"seed": 77,')):
        file.write_text(text.replace(*change))
        refused(lambda: read_record(tmp_path), "is damaged or was changed by hand")
    for wrong in ("[" * 100_000, "[]", "{}", '{"schema": 2}'):
        file.write_text(wrong)
        refused(lambda: read_record(tmp_path), "schema 2" if "2" in wrong else "cannot be read")
    for lost in ("config", "rounds", "partition", "cost"):
        write_record(tmp_path, {name: value for name, value in whole.items() if name != lost})
        for act in (resume.resume, fedcli.load, fedcli.frame, verify.verify):
            refused(lambda act=act: act(tmp_path), f"'{file}' is no record of a run: it lacks {lost}; put")
    older = {name: value for name, value in whole.items() if name != "numerics"}  # and has no digest
    file.write_text(json.dumps(older))
    assert read_record(tmp_path) == whole


def test_a_run_that_cannot_be_opened_is_refused(finished, tmp_path):
    folder, record = shutil.copytree(finished.path, tmp_path / "run"), finished.record
    for change, message in (
        ({"status": "interrupted"}, "has not finished"),
        ({"config": {**record["config"], "gone": 1}}, "unknown option of 'fedavg' '--gone'"),
        ({"dataset_fingerprint": "0" * 16}, "data set has changed"),
        ({"partition": {**record["partition"], "fingerprint": "0"}}, "partition has changed"),
    ):
        write_record(folder, {**record, **change})
        refused(lambda: resume.open_run(folder), message)
    write_record(folder, {**record, "method_hash": "0" * 16})  # another word in the method's file
    assert resume.open_run(folder).record["method_hash"] == "0" * 16
    file, state = folder / checkpoints.CHECKPOINT, finished.state
    name, value = next(iter(state.params.items()))
    progress = {key: record[key] for key in ("rounds", "cost", "seconds_total", "peak_bytes")}
    for spoilt, message in (
        (state._replace(params={**state.params, name: value + 1}), "the run's last model (got "),
        (AnotherState(*state), "another kind of state (got 'AnotherState')"),
    ):
        save_tree(file, spoilt, {"identity": identity(record), "record": progress, "states": []})
        refused(lambda: resume.open_run(folder), message)
    file.unlink()
    refused(lambda: resume.open_run(folder), "(got no checkpoint")


FEDPROX = find_method("fedprox")


@pytest.mark.parametrize(
    ("record", "method", "changes"),
    [
        ({}, {}, False),
        ({"method_hash": "moved or worded anew"}, {}, False),
        ({"config": {}}, {}, False),  # all its options have been added since
        ({"config": {"rounds": 3, "gone": 1}}, {}, True),
        ({}, {"numerics": 2}, True),
        ({"numerics": {"core": 0, "method": 1}}, {}, True),
        ({"method_source": "elsewhere/fedprox.py"}, {}, False),  # of a user's own file the hash counts
        ({"method_source": "elsewhere/fedprox.py", "method_hash": "changed"}, {}, True),
        ({"method_source": "elsewhere/f.py", "method_hash": f"then, then {FEDPROX.file_hash}"}, {}, False),
    ],
)
def test_a_record_is_outdated_by_numerics_lost_options_and_changed_files(record, method, changes):
    record = {"model": {}, "method": "fedprox", "method_source": "fedprox", "method_hash": FEDPROX.file_hash, **record}
    record = {"config": {"rounds": 3, dataclasses.fields(FEDPROX.config)[0].name: 0.1}, **record}
    record = {"numerics": numerics(record, FEDPROX), "changed": [], **record}
    assert outdated(record, dataclasses.replace(FEDPROX, **method)) == changes
