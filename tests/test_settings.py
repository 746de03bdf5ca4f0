"""Which runs are the same experiment: what changes the key of a run's settings, and options that records keep."""

import dataclasses
import json
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import pytest
import torch

import fedcli
from fedcli import Cell, Table, option
from fedcli.core.tree_files import load_tree, save_tree
from fedcli.declarations import check_value
from fedcli.errors import UserError
from fedcli.registry import find_method
from fedcli.results import claims, frame, plans
from fedcli.results.tables import commands
from fedcli.runs.begin import resolve_runs
from fedcli.runs.checkpoints import CHECKPOINT
from fedcli.runs.identity import NOT_SETTINGS, differences, draft, identity, key, settings
from fedcli.runs.options import RunConfig, recorded_options
from fedcli.runs.record import read_record, write_record
from fedcli.runs.resolve import refuse_without_effect, resolve
from fedcli.runs.resume import resume
from fedcli.userfiles import own_paths
from tests.files import refused
from tests.programs import invoke
from tests.test_old_runs import OLD, SETTINGS
from tests.test_runs import TINY, Stop, StopAfter

BASE = {"protocol": "fedfm:digits", "dataset": "digits", "num_clients": 4, "cohort_size": 4}
# What decides where and how a run is made, but not what comes of it.
OTHERWISE = {
    "seed": 2, "device": "cpu", "clients_per_chunk": "2", "state_memory": "1M", "drift_every": 1,
    "checkpoint_every": 1, "keep_states": True, "per_class": True, "per_client_every": 2,
}  # fmt: skip


def settings_of(method: str, **options):
    """The settings of a planned run."""
    return settings(draft(resolve(find_method(method), {**BASE, **options}, need_data=False)))


def other_value(field: dataclasses.Field, value):
    """Another value of an option, which it may have; None where there is none to try."""
    tried = field.metadata["choices"]
    if not tried and isinstance(value, int | float):
        tried = (not value,) if isinstance(value, bool) else (value + 1, value / 2, value - 1)
    for other in tried:
        with suppress(UserError):
            check_value(field, other)
            if other != value:
                return other
    return None


@pytest.mark.parametrize("typed", [{}, {"partition_seed": 5}], ids=str)
def test_each_of_several_seeds_is_as_if_it_had_been_typed_alone(typed, tmp_path):
    several = resolve_runs("fedavg", out=tmp_path, seeds=[0, 3], **BASE, **typed)
    assert [run.setup.run.partition_seed for run in several] == ([5, 5] if typed else [0, 3])
    for run, seed in zip(several, (0, 3), strict=True):
        ((alone, _),) = resolve_runs("fedavg", out=tmp_path, seed=seed, **BASE, **typed)
        assert (run.setup.run, run.setup.origin) == (alone.run, alone.origin)
        assert run.folder == tmp_path / f"seed-{seed}"
    refused(lambda: resolve_runs("fedavg", out=tmp_path, seeds=[0, 2**40], **BASE), "--seed must be >= 0 and <= 4294")


@pytest.mark.parametrize("method", ["fedavg", "fedfm", "fedprox", "feddyn"])
def test_an_option_that_can_change_a_result_changes_the_key_and_the_others_do_not(method):
    before = settings_of(method)
    for field in (*dataclasses.fields(RunConfig), *dataclasses.fields(find_method(method).config)):
        # The protocol says whether there are parts for `local_test`, and two are bound to other options.
        if field.name in before and field.name not in ("cohort_size", "partition_seed", "local_test"):
            value = other_value(field, before[field.name])
            if value is not None:
                after = settings_of(method, **{field.name: value})
                assert key(after) != key(before), field.name
                assert differences(after, before)[field.name] == (value, before[field.name])
    for name, value in OTHERWISE.items():
        assert settings_of(method, **{name: value}) == before
    assert {*OTHERWISE} == {*NOT_SETTINGS}
    assert settings_of(method, partition="dirichlet:.50") == settings_of(method, partition="dirichlet:0.5")
    older = draft(resolve(find_method(method), {**BASE, "partition": "dirichlet:0.5"}))
    older["config"]["partition"] = "dirichlet:.50"  # as it was typed
    assert settings(older) == settings_of(method, partition="dirichlet:0.5")


def test_an_older_run_stands_in_its_cell(tmp_path):
    shutil.copytree(OLD / "finished", tmp_path / "runs" / "old")
    record = read_record(tmp_path / "runs" / "old")
    given = {name: record["config"][name] for name in (*SETTINGS, "partition", "backbone", "lr")}
    cell = Cell("FedAvg", "digits", "fedavg", given)
    table = Table("own:1", "one cell", ("FedFM", "none"), (cell,), (record["seed"],))
    plan = plans.plan_table(table, tmp_path / "runs")
    assert [run.state for run in plan.runs] == ["finished"]
    other = dataclasses.replace(table, cells=(Cell("FedAvg", "digits", "fedavg", {**given, "lr": 0.5}),))
    assert [run.state for run in plans.plan_table(other, tmp_path / "runs").runs] == ["not run"]


def test_files_of_rounds_and_of_clients_count_from_one_and_in_percent(tmp_path):
    options = {"dataset": "digits", "rounds": 3, "train_examples": 120, "device": "cpu"}
    records = [fedcli.run(name, out=tmp_path / "r" / name, **options).record for name in ("fedavg", "fedprox")]
    tables = {}
    for kind in ("round", "client"):
        invoke("table", tmp_path / "r", "--per", kind, "--out", tmp_path / "table.csv")
        tables[kind] = pd.read_csv(tmp_path / "table.csv")
        assert tables[kind]["method"].unique().tolist() == ["fedavg", "fedprox"]
    assert tables["round"]["round"].tolist() == [1, 2, 3] * 2
    assert (len(tables["client"]), tables["client"]["client"].min()) == (20, 0)
    accuracies = [100 * share for share in records[0]["rounds"][-1]["client_accuracy"].values()]
    assert tables["client"].accuracy[:10].dropna().tolist() == pytest.approx(accuracies)
    kept = [entry["round"] for entry in records[0]["rounds"] if "client_accuracy" in entry]
    assert kept == sorted({records[0]["summary"]["selected_round"], 2})
    drawn = invoke("plot", tmp_path / "r", "--kind", "accuracies", "--out", tmp_path / "accuracies.png")
    assert drawn.exit_code == 0, drawn.output


def test_the_clients_accuracies_of_every_nth_round_are_kept(tmp_path):
    options = {"dataset": "digits", "rounds": 5, "train_examples": 120, "local_epochs": 1}
    run = fedcli.run("fedavg", out=tmp_path / "run", per_client_every=2, **options)
    kept = {2, 4, 5, run.record["summary"]["selected_round"] + 1}
    assert set(run.clients["round"]) == kept
    assert read_record(run.path)["rounds"] == run.record["rounds"]
    last = run.clients[run.clients["round"] == 5].set_index("client")["accuracy"]
    assert last.to_dict() == {int(c): 100 * a for c, a in run.record["rounds"][-1]["client_accuracy"].items()}
    invoke("table", run.path, "--per", "client-round", "--out", tmp_path / "table.csv")
    assert pd.read_csv(tmp_path / "table.csv")["round"].tolist() == run.clients["round"].tolist()


def test_clients_without_anything_of_their_own_and_rounds_without_a_test_have_no_accuracies():
    for options, words in (
        ({"per_client_every": 3, "eval_every": 2}, "--per-client-every 3 has rounds that are not tested (got"),
        (
            {"per_client_every": 2, "validation": 0.0, "protocol": "fedfa:digits"},
            "--per-client-every 2 needs images or",
        ),
    ):
        refused(lambda options=options: settings_of("fedavg", **options), words)
    for options in ({"protocol": "own:personal"}, {"validation": 0.1}):
        settings_of("fedavg", per_client_every=2, **options)
    settings_of("local", per_client_every=2, validation=0.0)


def test_a_papers_table_on_other_data_has_the_divisions_of_its_cells():
    table = fedcli.registry.find_table("fedfm:III")
    plan = plans.plan_table(table, Path("nowhere"), seeds=[0], only=["FedAvg", "CIFAR-10 NIID-1"], dataset="digits")
    (run,) = plan.runs
    assert (run.setup.run.dataset, run.setup.partition.flag) == ("digits", "dirichlet:0.5")
    assert (plan.reduction, run.setup.run.rounds) == ("digits", 20)
    others = plans.plan_table(fedcli.registry.find_table("fedcme:II"), Path("nowhere"), seeds=[0], dataset="digits")
    assert all(run.setup.run.cohort_size <= run.setup.run.num_clients for run in others.runs)
    special = {**table.cells[0].settings, "rounds": 500, "match_weight": 1.0}
    cell = dataclasses.replace(table.cells[0], method="fedfm", settings=special)
    (run,) = plans.plan_table(dataclasses.replace(table, cells=(cell,)), Path(), seeds=[0], dataset="digits").runs
    assert (run.setup.run.rounds, run.setup.options.match_weight) == (20, 1.0)  # that of the data set, and the cell's


def test_the_verdicts_that_are_installed_are_those_of_the_records():
    """Of one paper; tests/test_results.py holds the file of all to what the records give."""
    told = []
    for given in ({"folders": frame.shipped()}, {"folders": [], "shipped": True}):
        answers = claims.answers(fedcli.registry.claims("fedfa"), **given)
        told.append({each.claim.name: (each.verdict, each.ours, each.seeds) for each in answers if each.runs})
    assert told[0] == told[1]
    assert len(told[0]) >= 5


# The options of a run as its record keeps them


RECORDS = Path(__file__).parent.parent / "results" / "records"
FILES = sorted(RECORDS.rglob("record.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.parent.relative_to(RECORDS)))
def test_a_committed_record_still_resolves_to_its_configuration(file, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # some are of a machine with a GPU
    record = json.loads(file.read_text())
    if own_paths([record["method_source"], *record["config"].values()]):
        pytest.skip("code of a study's own, which only its command names")
    method = find_method(record["method"])
    setup = resolve(method, recorded_options(record["config"], method), need_data=False)
    config = {name: value for name, value in record["config"].items() if value is not None}
    assert {name: setup.values()[name] for name in config} == config


def test_commands_are_those_of_the_runs_without_their_folders_and_each_once():
    typed = ["fedcli run feddyn --seed 0", *(f"fedcli run feddyn --out{out} --seed 0" for out in ("=/a", " '/b c'"))]
    assert commands({"command": command} for command in [*typed, "python run.py"]) == typed[:1]


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


# What becomes of images that do not divide into equal shards

SHARDS = {**BASE, "partition": "classes:2", "train_examples": 120, "num_clients": 7, "cohort_size": 3}


def old_record(setup):
    """What a record of before the option says."""
    old = draft(setup)
    old["config"] = {name: value for name, value in old["config"].items() if name != "remainder"}
    return old


def test_the_rule_for_a_remainder_is_a_setting_where_there_is_one():
    setups = {count: resolve(find_method("fedavg"), {**SHARDS, "num_clients": count}) for count in (6, 7)}
    assert settings(old_record(setups[6])) == settings(draft(setups[6]))  # 120 images in 12 shards
    assert "remainder" not in settings(draft(setups[6]))
    old, new = settings(old_record(setups[7])), settings(draft(setups[7]))
    assert differences(new, old) == {"remainder": ("spread", "drop")}
    assert key(new) != key(old)
    assert settings_of("fedavg", **{**SHARDS, "remainder": "drop"}) == old


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.parent.relative_to(RECORDS)))
def test_committed_records_of_shards_have_the_settings_that_a_run_of_now_would_have_but_of_one_study(file):
    record = json.loads(file.read_text())
    study = file.relative_to(RECORDS).parts[0]
    if "classes:" in record["config"]["partition"]:  # that study's images do not divide, and it is of the old rule
        assert ("remainder" in settings(record)) == (study == "digits-personal-c2")


def test_a_stopped_run_of_before_the_rule_goes_on_under_the_old_one(tmp_path):
    options = {**TINY, "partition": "classes:2", "num_clients": 7, "rounds": 2, "out": tmp_path / "run"}
    whole = fedcli.run("fedavg", **{**options, "out": tmp_path / "whole", "remainder": "drop"})
    with pytest.raises(Stop):
        fedcli.run("fedavg", progress=StopAfter(1), remainder="drop", **options)
    record = read_record(tmp_path / "run")
    del record["config"]["remainder"], record["origin"]["remainder"], record["partition"]["unused"]
    write_record(tmp_path / "run", record)
    file = tmp_path / "run" / CHECKPOINT
    state, facts = load_tree(file, {kind.__name__: kind for kind in find_method("fedavg").state_types})
    save_tree(file, state, {**facts, "identity": identity(record)})
    refused(lambda: fedcli.run("fedavg", continue_=True, **options), "another remainder (got spread, was drop)")
    again = resume(tmp_path / "run").record
    assert again["summary"]["params_sha256"] == whole.record["summary"]["params_sha256"]
    assert again["partition"]["sizes"] == [16] * 7  # 120 images in 14 shards of 8
    assert (whole.record["partition"]["unused"], whole.record["partition"]["images"]) == (8, 120)


def test_header_and_data_show_tell_how_many_images_nobody_has(tmp_path, folder):
    run = "run fedavg --dataset digits --train-examples 120 --rounds 1 --device cpu --partition"
    result = invoke(*run.split(), "missing:3", "--num-clients", "10", "--out", "run")
    unused = read_record(folder / "run")["partition"]["unused"]
    assert 0 < unused < 60
    assert f"{unused} of 120 images, which no client holds" in " ".join(result.output.split())
    shown = invoke("data", "show", "digits", "--partition", "missing:3", "--out", "chart.png").output
    assert "of 1,438 images, which no client holds" in shown
    dropped = "classes:2 --train-examples 159 --num-clients 20 --cohort-size 2 --remainder drop --out dropped"
    result = invoke(*run.replace("--train-examples 120 ", "").split(), *dropped.split())
    words = "39 of 159 images, which no client holds; none of the classes 8, 9"
    assert words in " ".join(result.output.split())


@pytest.mark.parametrize(("flag", "clients", "lost"), [("missing:8", 3, 4), ("missing:9", 4, 6)])
def test_a_class_that_no_client_would_have_is_refused(flag, clients, lost, tmp_path, folder):
    options = {**TINY, "train_examples": 1000, "partition": flag, "num_clients": clients, "out": tmp_path / "run"}
    refused(lambda: fedcli.run("fedavg", **options), f"'{flag}' gives no client an image of {lost} of 10 classes")
    assert not (tmp_path / "run").exists()
    shown = invoke("data", "show", "digits", "--partition", flag, "--num-clients", clients, "--out", "chart.png").output
    assert "classes that no client has: " in shown
    Path("own.py").write_text("def half(labels, num_clients, rng):\n    return [[k] for k in range(num_clients)]\n")
    own = fedcli.run("fedavg", **{**options, "partition": "./own.py:half", "rounds": 1, "validation": 0.0})
    assert own.record["partition"]["unused"] == 1000 - clients


def test_shards_of_the_digits_keep_every_class(tmp_path):
    options = {**TINY, "train_examples": None, "partition": "classes:2", "num_clients": 200, "rounds": 1}
    record = fedcli.run("fedavg", out=tmp_path / "run", **{**options, "checkpoint_every": None}).record
    held = torch.tensor(record["partition"]["class_counts"]).sum(0)
    assert held.tolist() == [142, 146, 142, 146, 145, 146, 145, 143, 139, 144]
    assert record["partition"]["unused"] == 0


def test_the_rule_for_a_remainder_is_refused_where_there_are_no_shards():
    setup = resolve(find_method("fedavg"), {**SHARDS, "partition": "iid", "remainder": "drop"})
    refused(lambda: refuse_without_effect(setup), "--remainder is for --partition classes:C (got iid)")
