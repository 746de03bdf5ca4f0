"""Which runs are the same experiment: what changes the key of a run's settings, and options that records keep."""

import dataclasses
import json
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from fedcli import Cell, Table, option
from fedcli.declarations import check_value, spec_of
from fedcli.errors import UserError
from fedcli.registry import find_method
from fedcli.results import plans
from fedcli.runs.begin import resolve_runs
from fedcli.runs.identity import NOT_SETTINGS, Experiment, differences, key_of, planned_settings
from fedcli.runs.options import RunConfig, recorded_options
from fedcli.runs.origins import DEFAULT, GivenOptions
from fedcli.runs.record import read_record
from fedcli.runs.resolve import resolve
from fedcli.userfiles import user_paths
from tests.first_version_runs import OLD_RUN_OPTIONS, OLD_RUNS
from tests.user_errors import raises_user_error

BASE = {"protocol": "fedfm:digits", "dataset": "digits", "num_clients": 4, "cohort_size": 4}
# Options that decide where and how a run is made, but not what comes of it.
WITHOUT_EFFECT = {
    "seed": 2, "device": "cpu", "clients_per_chunk": "2", "state_memory": "1M", "drift_every": 1,
    "checkpoint_every": 1, "keep_states": True, "per_class": True, "per_client_every": 2,
}  # fmt: skip


def settings_with(method: str, **options):
    """Returns the settings of a planned run with these options."""
    return planned_settings(resolve(find_method(method), {**BASE, **options}, need_data=False))


def candidates_for(field: dataclasses.Field, value):
    """Returns values to try in the place of that of an option; none where the option is a text of no choices."""
    choices = spec_of(field).choices
    if choices:
        return choices
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int | float):
        return (value + 1, value / 2, value - 1)
    return ()


def other_value(field: dataclasses.Field, value):
    """Returns another value that an option may have; None where there is none to try."""
    for other in candidates_for(field, value):
        with suppress(UserError):
            check_value(field, other)
            if other != value:
                return other
    return None


@pytest.mark.parametrize("typed", [{}, {"partition_seed": 5}], ids=str)
def test_each_of_several_seeds_is_as_if_it_had_been_typed_alone(typed, tmp_path):
    runs = resolve_runs("fedavg", GivenOptions({**BASE, **typed}), out=tmp_path, seeds=[0, 3])
    for run, seed in zip(runs, (0, 3), strict=True):
        (alone,) = resolve_runs("fedavg", GivenOptions({**BASE, **typed, "seed": seed}), out=tmp_path)
        assert run.setup.config == alone.setup.config
        assert run.setup.origins == alone.setup.origins
        assert run.setup.config.partition_seed == typed.get("partition_seed", seed)
        assert run.folder == tmp_path / f"seed-{seed}"
    too_large = [0, 2**40]
    with raises_user_error("--seed must be >= 0 and <= 4294"):
        resolve_runs("fedavg", GivenOptions(BASE), out=tmp_path, seeds=too_large)


@pytest.mark.parametrize("method", ["fedavg", "fedfm", "fedprox", "feddyn"])
def test_an_option_that_can_change_a_result_changes_the_key(method):
    before = settings_with(method)
    fields = (*dataclasses.fields(RunConfig), *dataclasses.fields(find_method(method).config))
    # The protocol says whether there are parts for `local_test`, and two are bound to other options.
    not_free = ("cohort_size", "partition_seed", "local_test")
    without_other_value = set()
    for field in fields:
        name = field.name
        if name not in before or name in not_free:
            continue
        value = other_value(field, before[name])
        if value is None:
            without_other_value.add(name)
            continue
        after = settings_with(method, **{name: value})
        assert key_of(after) != key_of(before), name
        assert differences(after, before)[name] == (value, before[name])
    assert without_other_value == {"protocol", "dataset", "partition", "post", "train_examples", "backbone"}


@pytest.mark.parametrize("method", ["fedavg", "fedfm", "fedprox", "feddyn"])
def test_no_other_option_and_no_other_spelling_changes_the_key(method):
    for name, value in WITHOUT_EFFECT.items():
        assert settings_with(method, **{name: value}) == settings_with(method)
    assert {*WITHOUT_EFFECT} == {*NOT_SETTINGS}

    assert settings_with(method, partition="dirichlet:.50") == settings_with(method, partition="dirichlet:0.5")
    experiment = Experiment.from_setup(resolve(find_method(method), {**BASE, "partition": "dirichlet:0.5"}))
    older = replace(experiment, options={**experiment.options, "partition": "dirichlet:.50"})  # as it was typed
    assert older.settings() == settings_with(method, partition="dirichlet:0.5")


def test_public_images_that_a_method_has_no_use_for_are_not_said_to_be_the_protocols():
    options = {"protocol": "fccl:digits-4", "backbone": "resnet10-3x3"}
    assert resolve(find_method("fccl-plus"), options, need_data=False).config.public_dataset is not None
    setup = resolve(find_method("fedavg"), options, need_data=False)
    assert setup.config.public_dataset is None
    assert setup.origins["public_dataset"] == DEFAULT


def test_an_older_run_stands_in_its_cell(tmp_path):
    shutil.copytree(OLD_RUNS / "finished", tmp_path / "runs" / "old")
    record = read_record(tmp_path / "runs" / "old")
    options = {name: record["config"][name] for name in (*OLD_RUN_OPTIONS, "partition", "backbone", "lr")}

    def outcome_with(**other_options):
        cell = Cell("FedAvg", "digits", "fedavg", {**options, **other_options})
        table = Table("own:1", "one cell", ("FedFM", "none"), (cell,), (record["seed"],))
        (run,) = plans.plan_table(table, tmp_path / "runs").runs
        return run.outcome

    assert outcome_with() == "finished"
    assert outcome_with(lr=0.5) == "not run"


# The options of a run as its record keeps them

RECORDS = Path(__file__).parent.parent / "results" / "records"
FILES = sorted(RECORDS.rglob("record.json"))


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.parent.relative_to(RECORDS)))
def test_a_committed_record_still_resolves_to_its_configuration(file, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # some are of a machine with a GPU
    record = json.loads(file.read_text())
    if user_paths([record["method_source"], *record["config"].values()]):
        pytest.skip("code of a study's own, which only its command names")
    method = find_method(record["method"])
    setup = resolve(method, recorded_options(record["config"], method), need_data=False)
    config = {name: value for name, value in record["config"].items() if value is not None}
    assert {name: setup.all_options()[name] for name in config} == config


@dataclass(frozen=True)
class Config:
    old: float = option(1.0, "An option that there always was")
    new: float = option(2.0, "One whose default changed the numbers", before=0.5)
    newer: float = option(3.0, "One that changes nothing where it is left alone")


def test_a_record_without_an_option_stands_at_what_was_done_before():
    method = replace(find_method("fedavg"), name="toy", config=Config)
    config = {"protocol": "fedfm:digits", "dataset": "digits", "rounds": 7, "old": 4.0, "backbone": "cnn-small"}
    assert resolve(method, recorded_options(config, method)).method_config == Config(4.0, 0.5, 3.0)
    assert resolve(method, recorded_options({**config, "new": 9.0}, method)).method_config == Config(4.0, 9.0, 3.0)
    assert resolve(method, config).method_config == Config(4.0, 2.0, 3.0)  # of a run that begins now
