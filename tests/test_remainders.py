"""Images that no client gets: what is left of a division into equal shards, and classes that nobody has."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedcli
from fedcli.core.tree_files import load_tree, save_tree
from fedcli.registry import find_method
from fedcli.runs.checkpoints import CHECKPOINT
from fedcli.runs.identity import Experiment, differences, identity_of, key_of, planned_settings, settings_of
from fedcli.runs.record import read_record, write_record
from fedcli.runs.resolve import refuse_without_effect, resolve
from fedcli.runs.resume import resume
from tests.commands import run_command
from tests.listeners import Stop, StopAfter
from tests.run_options import SHORT_RUN
from tests.user_errors import raises_user_error

RECORDS = Path(__file__).parent.parent / "results" / "records"
SHARDS = {
    "protocol": "fedfm:digits", "dataset": "digits", "partition": "classes:2", "train_examples": 120, "num_clients": 7,
    "cohort_size": 3,
}  # fmt: skip


def settings_before_the_option(setup):
    """Returns the settings of a run whose record is from before there was an option for the remainder."""
    experiment = Experiment.from_setup(setup)
    options = {name: value for name, value in experiment.options.items() if name != "remainder"}
    return replace(experiment, options=options).settings()


def test_the_rule_for_a_remainder_is_a_setting_where_there_is_one():
    equal_shards = resolve(find_method("fedavg"), {**SHARDS, "num_clients": 6})  # 120 images in 12
    assert settings_before_the_option(equal_shards) == planned_settings(equal_shards)
    assert "remainder" not in planned_settings(equal_shards)

    unequal_shards = resolve(find_method("fedavg"), SHARDS)
    old = settings_before_the_option(unequal_shards)
    new = planned_settings(unequal_shards)
    assert differences(new, old) == {"remainder": ("spread", "drop")}
    assert key_of(new) != key_of(old)
    with_old_rule = resolve(find_method("fedavg"), {**SHARDS, "remainder": "drop"})
    assert planned_settings(with_old_rule) == old


def test_committed_records_of_shards_have_the_rule_for_a_remainder_in_one_study_alone():
    """Its images do not divide into equal shards, and its runs are of the old rule."""
    num_compared = 0
    for file in RECORDS.rglob("record.json"):
        record = json.loads(file.read_text())
        if "classes:" in record["config"]["partition"]:
            study = file.relative_to(RECORDS).parts[0]
            assert ("remainder" in settings_of(record)) == (study == "digits-personal-c2"), file
            num_compared += 1
    assert num_compared > 20


def test_a_stopped_run_of_before_the_rule_goes_on_under_the_old_one(tmp_path):
    options = {**SHORT_RUN, "partition": "classes:2", "num_clients": 7, "rounds": 2, "out": tmp_path / "run"}
    whole = fedcli.run("fedavg", **{**options, "out": tmp_path / "whole", "remainder": "drop"})
    with pytest.raises(Stop):
        fedcli.run("fedavg", progress=StopAfter(1), remainder="drop", **options)

    # The run as a version before the rule would have left it.
    record = read_record(tmp_path / "run")
    del record["config"]["remainder"]
    del record["origin"]["remainder"]
    del record["partition"]["unused"]
    write_record(tmp_path / "run", record)
    file = tmp_path / "run" / CHECKPOINT
    state, facts = load_tree(file, {kind.__name__: kind for kind in find_method("fedavg").state_types})
    save_tree(file, state, {**facts, "identity": identity_of(record)})

    with raises_user_error("another remainder (got spread, was drop)"):
        fedcli.run("fedavg", continue_=True, **options)
    again = resume(tmp_path / "run").record
    assert again["summary"]["params_sha256"] == whole.record["summary"]["params_sha256"]
    assert again["partition"]["sizes"] == [16] * 7  # 120 images in 14 shards of 8
    assert whole.record["partition"]["unused"] == 8
    assert whole.record["partition"]["images"] == 120


def words_of(command):
    """Runs a command that must succeed; returns the words that it prints, with a space between two of them."""
    result = run_command(*command.split())
    return " ".join(result.output.split())


def test_header_and_data_show_tell_how_many_images_nobody_has(folder):
    run_briefly = "run fedavg --dataset digits --rounds 1 --device cpu"
    output = words_of(f"{run_briefly} --train-examples 120 --partition missing:3 --num-clients 10 --out run")
    unused = read_record(folder / "run")["partition"]["unused"]
    assert 0 < unused < 60
    assert f"{unused} of 120 images, which no client holds" in output

    output = words_of("data show digits --partition missing:3 --out chart.png")
    assert "of 1,438 images, which no client holds" in output

    shards = "--partition classes:2 --num-clients 20 --cohort-size 2 --remainder drop"
    output = words_of(f"{run_briefly} --train-examples 159 {shards} --out dropped")
    assert "39 of 159 images, which no client holds; none of the classes 8, 9" in output


@pytest.mark.parametrize(("flag", "clients", "num_lost"), [("missing:8", 3, 4), ("missing:9", 4, 6)])
def test_a_class_that_no_client_would_have_is_refused(flag, clients, num_lost, tmp_path, folder):
    options = {**SHORT_RUN, "train_examples": 1000, "partition": flag, "num_clients": clients, "out": tmp_path / "run"}
    with raises_user_error(f"'{flag}' gives no client an image of {num_lost} of 10 classes"):
        fedcli.run("fedavg", **options)
    assert not (tmp_path / "run").exists()
    output = words_of(f"data show digits --partition {flag} --num-clients {clients} --out chart.png")
    assert "classes that no client has: " in output
    Path("own.py").write_text("def half(labels, num_clients, rng):\n    return [[k] for k in range(num_clients)]\n")
    run = fedcli.run("fedavg", **{**options, "partition": "./own.py:half", "rounds": 1, "validation": 0.0})
    assert run.record["partition"]["unused"] == 1000 - clients


def test_shards_of_the_digits_keep_every_class(tmp_path):
    options = {**SHORT_RUN, "train_examples": None, "partition": "classes:2", "num_clients": 200, "rounds": 1}
    record = fedcli.run("fedavg", out=tmp_path / "run", **{**options, "checkpoint_every": None}).record
    counts = torch.tensor(record["partition"]["class_counts"]).sum(0)
    assert counts.tolist() == [142, 146, 142, 146, 145, 146, 145, 143, 139, 144]
    assert record["partition"]["unused"] == 0


def test_the_rule_for_a_remainder_is_refused_where_there_are_no_shards():
    setup = resolve(find_method("fedavg"), {**SHARDS, "partition": "iid", "remainder": "drop"})
    with raises_user_error("--remainder is for --partition classes:C (got iid)"):
        refuse_without_effect(setup)
