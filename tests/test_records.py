"""What a record says of code, machine and size; and how a finished run is opened again."""

import dataclasses
import json
import shutil
from typing import NamedTuple

import pytest

import fedcli
from fedcli import toy
from fedcli.core.tree_files import save_tree
from fedcli.registry import find_method
from fedcli.run_files import RECORD
from fedcli.runs import checkpoints, resume, verify
from fedcli.runs.identity import current_numerics, identity_of, outdated
from fedcli.runs.record import read_record, write_record
from tests.run_options import SHORT_RUN
from tests.user_errors import raises_user_error


class AnotherState(NamedTuple):
    """The state of another method than FedAvg."""

    params: dict
    buffers: dict


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """Makes a run that no test may change."""
    return fedcli.run("fedavg", out=tmp_path_factory.mktemp("runs") / "fedavg", **{**SHORT_RUN, "rounds": 2})


def test_a_finished_run_is_opened_with_all_it_had(finished_run):
    opened = resume.open_run(finished_run.path)
    assert opened.record == read_record(finished_run.path)
    assert opened.setup.method.name == "fedavg"
    assert opened.setup.config.rounds == 2
    assert toy.distance(opened.state.params, finished_run.state.params) == 0
    assert [len(part) for part in opened.fed.examples] == opened.record["partition"]["sizes"]


def test_a_record_that_is_changed_on_disk_is_refused(finished_run, tmp_path):
    write_record(tmp_path, finished_run.record)
    file = tmp_path / RECORD
    whole = read_record(tmp_path)

    # a value is another one
    text = file.read_text()
    file.write_text(text.replace('"status": "finished"', '"status": "failed"'))
    with raises_user_error("is damaged or was changed by hand"):
        read_record(tmp_path)
    file.write_text(text.replace(f'"seed": {whole["seed"]},', '"seed": 77,'))
    with raises_user_error("is damaged or was changed by hand"):
        read_record(tmp_path)

    # it is no record
    for other_text in ("[" * 100_000, "[]", "{}"):
        file.write_text(other_text)
        with raises_user_error("cannot be read"):
            read_record(tmp_path)
    file.write_text('{"schema": 2}')
    with raises_user_error("schema 2"):
        read_record(tmp_path)

    # a part is lost
    for lost in ("config", "rounds", "partition", "cost"):
        write_record(tmp_path, {name: value for name, value in whole.items() if name != lost})
        for reader in (resume.resume, fedcli.load, fedcli.frame, verify.verify):
            with raises_user_error(f"'{file}' is no record of a run: it lacks {lost}; put"):
                reader(tmp_path)

    # an older one has neither numerics nor a digest
    older = {name: value for name, value in whole.items() if name != "numerics"}
    file.write_text(json.dumps(older))
    assert read_record(tmp_path) == whole


def test_a_run_that_cannot_be_opened_is_refused(finished_run, tmp_path):
    folder = shutil.copytree(finished_run.path, tmp_path / "run")
    record = finished_run.record

    def assert_refused_with(message, **change):
        write_record(folder, {**record, **change})
        with raises_user_error(message):
            resume.open_run(folder)

    assert_refused_with("has not finished", status="interrupted")
    assert_refused_with("unknown option of 'fedavg' '--gone'", config={**record["config"], "gone": 1})
    assert_refused_with("data set has changed", dataset_fingerprint="0" * 16)
    assert_refused_with("partition has changed", partition={**record["partition"], "fingerprint": "0"})

    # Another word in the method's file does not hinder it.
    write_record(folder, {**record, "method_hash": "0" * 16})
    assert resume.open_run(folder).record["method_hash"] == "0" * 16

    file = folder / checkpoints.CHECKPOINT
    state = finished_run.state
    name = next(iter(state.params))
    of_other_model = state._replace(params={**state.params, name: state.params[name] + 1})
    progress = {key: record[key] for key in ("rounds", "cost", "seconds_total", "peak_bytes")}
    facts = {"identity": identity_of(record), "record": progress, "states": []}
    save_tree(file, of_other_model, facts)
    with raises_user_error("the run's last model (got "):
        resume.open_run(folder)
    save_tree(file, AnotherState(*state), facts)
    with raises_user_error("another kind of state (got 'AnotherState')"):
        resume.open_run(folder)
    file.unlink()
    with raises_user_error("(got no checkpoint"):
        resume.open_run(folder)


FEDPROX = find_method("fedprox")


@pytest.mark.parametrize(
    ("record_changes", "method_changes", "is_outdated"),
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
def test_a_record_is_outdated_by_numerics_lost_options_and_changed_files(record_changes, method_changes, is_outdated):
    first_option = dataclasses.fields(FEDPROX.config)[0]
    record = {
        "model": {},
        "method": "fedprox",
        "method_source": "fedprox",
        "method_hash": FEDPROX.file_hash,
        "config": {"rounds": 3, first_option.name: 0.1},
        "changed": [],
    }
    record["numerics"] = current_numerics(record | record_changes, FEDPROX)
    method = dataclasses.replace(FEDPROX, **method_changes)
    assert outdated(record | record_changes, method) == is_outdated
