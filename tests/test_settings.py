"""Which runs are the same experiment: what changes the key of a run's settings, and options that records keep."""

import dataclasses
import json
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional, Union

import pandas as pd
import pytest
import torch

import fedcli
from fedcli import Cell, Gain, Table, join_configs, option
from fedcli.core.tree_files import load_tree, save_tree
from fedcli.declarations import check_value, spec_of
from fedcli.errors import UserError
from fedcli.registry import find_method, find_protocol, find_table
from fedcli.results import claims, frame, plans
from fedcli.results.tables import list_commands
from fedcli.runs.begin import resolve_runs
from fedcli.runs.checkpoints import CHECKPOINT
from fedcli.runs.identity import (
    NOT_SETTINGS,
    Experiment,
    differences,
    identity_of,
    key_of,
    planned_settings,
    settings_of,
)
from fedcli.runs.options import RunConfig, recorded_options
from fedcli.runs.origins import GivenOptions
from fedcli.runs.record import read_record, write_record
from fedcli.runs.resolve import refuse_without_effect, resolve
from fedcli.runs.resume import resume
from fedcli.userfiles import user_paths
from tests.commands import invoke
from tests.first_version_runs import OLD_RUN_OPTIONS, OLD_RUNS
from tests.tiny_runs import TINY, Stop, StopAfter
from tests.user_errors import raises_user_error

BASE = {"protocol": "fedfm:digits", "dataset": "digits", "num_clients": 4, "cohort_size": 4}
# What decides where and how a run is made, but not what comes of it.
OTHERWISE = {
    "seed": 2, "device": "cpu", "clients_per_chunk": "2", "state_memory": "1M", "drift_every": 1,
    "checkpoint_every": 1, "keep_states": True, "per_class": True, "per_client_every": 2,
}  # fmt: skip


def settings_with(method: str, **options):
    """The settings of a planned run."""
    return planned_settings(resolve(find_method(method), {**BASE, **options}, need_data=False))


def other_value(field: dataclasses.Field, value):
    """Another value of an option, which it may have; None where there is none to try."""
    candidates = spec_of(field).choices
    if isinstance(value, bool):
        candidates = candidates or (not value,)
    elif isinstance(value, int | float):
        candidates = candidates or (value + 1, value / 2, value - 1)
    for other in candidates:
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
def test_only_an_option_that_can_change_a_result_changes_the_key(method):
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

    for name, value in OTHERWISE.items():
        assert settings_with(method, **{name: value}) == before
    assert {*OTHERWISE} == {*NOT_SETTINGS}

    # Another spelling is no other value.
    assert settings_with(method, partition="dirichlet:.50") == settings_with(method, partition="dirichlet:0.5")
    experiment = Experiment.from_setup(resolve(find_method(method), {**BASE, "partition": "dirichlet:0.5"}))
    older = replace(experiment, options={**experiment.options, "partition": "dirichlet:.50"})  # as it was typed
    assert older.settings() == settings_with(method, partition="dirichlet:0.5")


def test_an_older_run_stands_in_its_cell(tmp_path):
    shutil.copytree(OLD_RUNS / "finished", tmp_path / "runs" / "old")
    record = read_record(tmp_path / "runs" / "old")
    options = {name: record["config"][name] for name in (*OLD_RUN_OPTIONS, "partition", "backbone", "lr")}

    def state(**other_options):
        cell = Cell("FedAvg", "digits", "fedavg", {**options, **other_options})
        table = Table("own:1", "one cell", ("FedFM", "none"), (cell,), (record["seed"],))
        (run,) = plans.plan_table(table, tmp_path / "runs").runs
        return run.outcome

    assert state() == "finished"
    assert state(lr=0.5) == "not run"


def test_files_of_rounds_and_of_clients_count_from_one_and_in_percent(tmp_path):
    options = {"dataset": "digits", "rounds": 3, "train_examples": 120, "device": "cpu"}
    fedavg = fedcli.run("fedavg", out=tmp_path / "r" / "fedavg", **options).record
    fedcli.run("fedprox", out=tmp_path / "r" / "fedprox", **options)

    def table_per(kind):
        invoke("table", tmp_path / "r", "--per", kind, "--out", tmp_path / "table.csv")
        table = pd.read_csv(tmp_path / "table.csv")
        assert table["method"].unique().tolist() == ["fedavg", "fedprox"]
        return table

    assert table_per("round")["round"].tolist() == [1, 2, 3] * 2
    clients = table_per("client")
    assert len(clients) == 20
    assert clients["client"].min() == 0
    *_, last = fedavg["rounds"]
    accuracies = [100 * share for share in last["client_accuracy"].values()]
    of_fedavg = clients["accuracy"][clients["method"] == "fedavg"]
    assert of_fedavg.dropna().tolist() == pytest.approx(accuracies)

    rounds_with_clients = [entry["round"] for entry in fedavg["rounds"] if "client_accuracy" in entry]
    assert rounds_with_clients == sorted({fedavg["summary"]["selected_round"], 2})
    drawn = invoke("plot", tmp_path / "r", "--kind", "accuracies", "--out", tmp_path / "accuracies.png")
    assert drawn.exit_code == 0, drawn.output


def test_the_clients_accuracies_of_every_nth_round_are_kept(tmp_path):
    options = {"dataset": "digits", "rounds": 5, "train_examples": 120, "local_epochs": 1}
    run = fedcli.run("fedavg", out=tmp_path / "run", per_client_every=2, **options)

    assert set(run.clients["round"]) == {2, 4, 5, run.record["summary"]["selected_round"] + 1}
    assert read_record(run.path)["rounds"] == run.record["rounds"]
    *_, last = run.record["rounds"]
    percent_of = {int(client): 100 * share for client, share in last["client_accuracy"].items()}
    of_last_round = run.clients[run.clients["round"] == 5]
    assert of_last_round.set_index("client")["accuracy"].to_dict() == percent_of

    invoke("table", run.path, "--per", "client-round", "--out", tmp_path / "table.csv")
    assert pd.read_csv(tmp_path / "table.csv")["round"].tolist() == run.clients["round"].tolist()


def test_accuracies_of_clients_are_only_where_there_are_any():
    """Clients without anything of their own have none, nor have rounds without a test."""
    with raises_user_error("--per-client-every 3 has rounds that are not tested (got"):
        settings_with("fedavg", per_client_every=3, eval_every=2)
    with raises_user_error("--per-client-every 2 needs images or"):
        settings_with("fedavg", per_client_every=2, validation=0.0, protocol="fedfa:digits")
    settings_with("fedavg", per_client_every=2, protocol="own:personal")
    settings_with("fedavg", per_client_every=2, validation=0.1)
    settings_with("local", per_client_every=2, validation=0.0)


def test_a_papers_table_on_other_data_has_the_divisions_of_its_cells():
    table = fedcli.registry.find_table("fedfm:III")
    plan = plans.plan_table(table, Path("nowhere"), seeds=[0], only=["FedAvg", "CIFAR-10 NIID-1"], dataset="digits")
    (run,) = plan.runs
    assert plan.reduction == "digits"
    assert run.setup.config.dataset == "digits"
    assert run.setup.partition.flag == "dirichlet:0.5"
    assert run.setup.config.rounds == 20

    of_fedcme = plans.plan_table(fedcli.registry.find_table("fedcme:II"), Path("nowhere"), seeds=[0], dataset="digits")
    assert all(run.setup.config.cohort_size <= run.setup.config.num_clients for run in of_fedcme.runs)

    first, *_ = table.cells
    cell = replace(first, method="fedfm", settings={**first.settings, "rounds": 500, "match_weight": 1.0})
    (run,) = plans.plan_table(replace(table, cells=(cell,)), Path(), seeds=[0], dataset="digits").runs
    assert run.setup.config.rounds == 20  # those of the data set
    assert run.setup.method_config.match_weight == 1.0  # that of the cell


def test_the_verdicts_that_are_installed_are_those_of_the_records():
    """Of one paper; tests/test_results.py holds the file of all to what the records give."""

    def verdicts(**sources):
        answers = claims.answer_claims(fedcli.registry.claims("fedfa"), **sources)
        with_runs = [answer for answer in answers if answer.comparison.evidence.folders]
        return {answer.claim.name: verdict_lead_and_seeds(answer) for answer in with_runs}

    def verdict_lead_and_seeds(answer):
        comparison = answer.comparison
        return comparison.verdict.outcome, comparison.lead.format(answer.context.metric), comparison.evidence.seeds

    of_records = verdicts(folders=frame.find_shipped_folders())
    assert verdicts(folders=[], shipped=True) == of_records
    assert len(of_records) >= 5


# The options of a run as its record keeps them


RECORDS = Path(__file__).parent.parent / "results" / "records"
FILES = sorted(RECORDS.rglob("record.json"))


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


def test_commands_are_those_of_the_runs_without_their_folders_and_each_once():
    typed = [
        "fedcli run feddyn --seed 0",
        "fedcli run feddyn --out=/a --seed 0",
        "fedcli run feddyn --out '/b c' --seed 0",
        "python run.py",
    ]
    assert list_commands({"command": command} for command in typed) == ["fedcli run feddyn --seed 0"]


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


# What becomes of images that do not divide into equal shards

SHARDS = {**BASE, "partition": "classes:2", "train_examples": 120, "num_clients": 7, "cohort_size": 3}


def settings_before_the_option(setup):
    """The settings of a record of before there was an option for the remainder."""
    experiment = Experiment.from_setup(setup)
    options = {name: value for name, value in experiment.options.items() if name != "remainder"}
    return replace(experiment, options=options).settings()


def test_the_rule_for_a_remainder_is_a_setting_where_there_is_one():
    equal_shards = resolve(find_method("fedavg"), {**SHARDS, "num_clients": 6})  # 120 images in 12
    assert settings_before_the_option(equal_shards) == planned_settings(equal_shards)
    assert "remainder" not in planned_settings(equal_shards)

    unequal_shards = resolve(find_method("fedavg"), {**SHARDS, "num_clients": 7})
    old = settings_before_the_option(unequal_shards)
    new = planned_settings(unequal_shards)
    assert differences(new, old) == {"remainder": ("spread", "drop")}
    assert key_of(new) != key_of(old)
    assert settings_with("fedavg", **{**SHARDS, "remainder": "drop"}) == old


def test_committed_records_of_shards_have_the_rule_for_a_remainder_in_one_study_alone():
    """Its images do not divide into equal shards, and its runs are of the old rule."""
    num_compared = 0
    for file in FILES:
        record = json.loads(file.read_text())
        if "classes:" in record["config"]["partition"]:
            study, *_ = file.relative_to(RECORDS).parts
            assert ("remainder" in settings_of(record)) == (study == "digits-personal-c2"), file
            num_compared += 1
    assert num_compared > 20


def test_a_stopped_run_of_before_the_rule_goes_on_under_the_old_one(tmp_path):
    options = {**TINY, "partition": "classes:2", "num_clients": 7, "rounds": 2, "out": tmp_path / "run"}
    whole = fedcli.run("fedavg", **{**options, "out": tmp_path / "whole", "remainder": "drop"})
    with pytest.raises(Stop):
        fedcli.run("fedavg", progress=StopAfter(1), remainder="drop", **options)

    # as a version before the rule would have left it
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


def test_header_and_data_show_tell_how_many_images_nobody_has(tmp_path, folder):
    def output_of_run(options):
        command = f"run fedavg --dataset digits --rounds 1 --device cpu {options}"
        return " ".join(invoke(*command.split()).output.split())

    output = output_of_run("--train-examples 120 --partition missing:3 --num-clients 10 --out run")
    unused = read_record(folder / "run")["partition"]["unused"]
    assert 0 < unused < 60
    assert f"{unused} of 120 images, which no client holds" in output

    output = invoke("data", "show", "digits", "--partition", "missing:3", "--out", "chart.png").output
    assert "of 1,438 images, which no client holds" in output

    shards = "--partition classes:2 --num-clients 20 --cohort-size 2 --remainder drop"
    output = output_of_run(f"--train-examples 159 {shards} --out dropped")
    assert "39 of 159 images, which no client holds; none of the classes 8, 9" in output


@pytest.mark.parametrize(("flag", "clients", "num_lost"), [("missing:8", 3, 4), ("missing:9", 4, 6)])
def test_a_class_that_no_client_would_have_is_refused(flag, clients, num_lost, tmp_path, folder):
    options = {**TINY, "train_examples": 1000, "partition": flag, "num_clients": clients, "out": tmp_path / "run"}
    with raises_user_error(f"'{flag}' gives no client an image of {num_lost} of 10 classes"):
        fedcli.run("fedavg", **options)
    assert not (tmp_path / "run").exists()
    output = invoke(
        "data", "show", "digits", "--partition", flag, "--num-clients", clients, "--out", "chart.png"
    ).output
    assert "classes that no client has: " in output
    Path("own.py").write_text("def half(labels, num_clients, rng):\n    return [[k] for k in range(num_clients)]\n")
    run = fedcli.run("fedavg", **{**options, "partition": "./own.py:half", "rounds": 1, "validation": 0.0})
    assert run.record["partition"]["unused"] == 1000 - clients


def test_shards_of_the_digits_keep_every_class(tmp_path):
    options = {**TINY, "train_examples": None, "partition": "classes:2", "num_clients": 200, "rounds": 1}
    record = fedcli.run("fedavg", out=tmp_path / "run", **{**options, "checkpoint_every": None}).record
    counts = torch.tensor(record["partition"]["class_counts"]).sum(0)
    assert counts.tolist() == [142, 146, 142, 146, 145, 146, 145, 143, 139, 144]
    assert record["partition"]["unused"] == 0


def test_the_rule_for_a_remainder_is_refused_where_there_are_no_shards():
    setup = resolve(find_method("fedavg"), {**SHARDS, "partition": "iid", "remainder": "drop"})
    with raises_user_error("--remainder is for --partition classes:C (got iid)"):
        refuse_without_effect(setup)


@dataclass(frozen=True)
class Matching:
    """Options of a method that is added to another."""

    temperature: float = option(0.1, "Temperature", source="Eq. 1")
    form: str = option("a", "Form", choices=("a", "b"))


@dataclass(frozen=True)
class Extended:
    """Options of the other."""

    form: str = option("x", "Form", choices=("x", "y"))
    weight: float = option(2.0, "Weight", source="Eq. 4", low=0, only_with={"form": ("x",)})


def test_joined_options_are_those_of_both_methods_under_names_of_their_own():
    joined = join_configs(Matching, Extended, prefix="other", source="Other")
    values = joined.config(temperature=0.5, form="b", other_form="y", weight=3.0)
    assert joined.second_of(values) == Extended(form="y", weight=3.0)
    assert joined.second_of(joined.config()) == Extended()

    entries = {entry.name: entry for entry in dataclasses.fields(joined.config)}
    assert [*entries] == ["temperature", "form", "other_form", "weight"]
    weight = spec_of(entries["weight"])
    assert weight == replace(
        spec_of(Extended.__dataclass_fields__["weight"]), source="Other, Eq. 4", only_with={"other_form": ("x",)}
    )
    assert spec_of(entries["other_form"]).source == "Other"
    with raises_user_error("--other-form must be x or y"):
        check_value(entries["other_form"], "b")


@dataclass(frozen=True)
class WithMomentum:
    """An option that is used with one of the run's own, whose name is that of another method's."""

    temperature: float = option(0.9, "Momentum", only_with={"optimizer": ("sgd",)})


def test_a_joined_option_may_be_for_a_value_of_an_option_of_the_run():
    joined = join_configs(Extended, WithMomentum, prefix="other", source="Other")
    assert spec_of(joined.config.__dataclass_fields__["temperature"]).only_with == {"optimizer": ("sgd",)}


def test_joined_options_of_one_name_are_refused():
    @dataclass(frozen=True)
    class Taken(Matching):
        other_form: str = option("a", "Form")

    words = "two options of the joined methods are called 'other_form' (got the prefix 'other'); choose another."
    with raises_user_error(words):
        join_configs(Taken, Extended, prefix="other", source="Other")


def test_a_whole_number_in_the_place_of_a_float_has_the_floats_limit():
    (weight,) = [entry for entry in dataclasses.fields(Extended) if entry.name == "weight"]
    check_value(weight, 3_000_000_000)
    with raises_user_error("--weight must be >= 0 and <= 3e+38"):
        check_value(weight, 10**39)


def declared(**types_and_options):
    """The fields of a configuration of these options, each a type and what `option` returns."""
    config = dataclasses.make_dataclass("Config", [(name, *pair) for name, pair in types_and_options.items()])
    return {field.name: field for field in dataclasses.fields(config)}


@pytest.mark.parametrize("number", [10**400, 1e308, float("inf"), float("nan")])
def test_a_number_without_an_end_has_the_largest_that_can_be_computed(number):
    weight = declared(weight=(float, option(0.1, "Weight", low=0, high=float("inf"))))["weight"]
    with raises_user_error("--weight must be >= 0 and <= 3e+38 (got "):
        check_value(weight, number)


def test_an_option_of_some_texts_may_be_none_where_its_type_says_so():
    fields = declared(
        mean=(str | None, option(None, "Mean", choices=("a", "b"))), form=(str, option("a", "Form", choices=("a",)))
    )
    check_value(fields["mean"], None)
    with raises_user_error("--mean must be a or b (got 'c')"):
        check_value(fields["mean"], "c")
    with raises_user_error("--form must be of type str (got None)"):
        check_value(fields["form"], None)


@pytest.mark.parametrize("kind", [list[int], tuple[float, ...], dict[str, int]])
def test_an_option_of_a_type_that_no_record_has_is_refused(kind):
    field = declared(widths=(kind, option(None, "Widths")))["widths"]
    with raises_user_error("the option 'widths' has a type that no record can have (got "):
        check_value(field, 3)


@pytest.mark.parametrize("kind", [Optional[int], Union[int, None], int | None])  # noqa: UP007, UP045
def test_an_option_of_two_types_may_have_either(kind):
    field = declared(width=(kind, option(None, "Width")))["width"]
    check_value(field, None)
    check_value(field, 3)
    with raises_user_error("--width must be of type int (got '3')"):
        check_value(field, "3")


NO_TUPLES = {  # a comma forgotten
    "choices of the option 'Mean'": lambda: option("mean", "Mean", choices="mean"),
    "only_with['optimizer'] of the option 'Rate'": lambda: option(0.1, "Rate", only_with={"optimizer": "mean"}),
    "optimizers of the method 'fedavg'": lambda: replace(find_method("fedavg"), optimizers="mean"),
    "notes of the protocol 'fedfm:digits'": lambda: replace(find_protocol("fedfm:digits"), notes="mean"),
    "notes of the table 'fedfm:III'": lambda: replace(find_table("fedfm:III"), notes="mean"),
    "leading_rows of the gain 'gap'": lambda: Gain("gap", "x", "mean", ("FedAvg",)),
    "other_rows of the gain 'gap'": lambda: Gain("gap", "x", ("FedAvg",), "mean"),
    "columns of the gain 'gap'": lambda: Gain("gap", "x", ("FedAvg",), ("FedFM",), "mean"),
}


@pytest.mark.parametrize(("field", "value"), [("selection", "Last"), ("evaluation", "Clients")])
def test_a_protocol_of_a_selection_or_an_evaluation_that_is_none_is_refused(field, value):
    words = f"{field} of the protocol 'fedfm:digits' must be "
    with raises_user_error(words, f"(got '{value}'); choose"):
        replace(find_protocol("fedfm:digits"), **{field: value})


@pytest.mark.parametrize("subject", NO_TUPLES)
def test_a_text_in_the_place_of_a_tuple_is_refused_where_it_is_declared(subject):
    with raises_user_error(f"{subject} must be a tuple of ", "(got 'mean'); write ('mean',)."):
        NO_TUPLES[subject]()
