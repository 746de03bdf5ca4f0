"""The command `fedcli bench`: what it times by a name, with which options, and what it prints."""

import json
import re
from dataclasses import replace

import pandas as pd
import pytest
import torch

from fedcli import registry
from fedcli.bench import cases, speed, workloads
from fedcli.bench.cases import BenchCase, find_case
from fedcli.errors import UserError
from fedcli.runs.resolve import resolve
from tests.bench_parts import TINY_CNN, run_bench
from tests.commands import error_of, invoke, output_of

pytestmark = pytest.mark.usefixtures("reduced_workloads")


def test_each_row_has_the_threads_of_its_own_workload(monkeypatch):
    """A small network trains in processes of one thread each."""
    small = [replace(workload, backbone=workloads.SMALL_NETWORK) for workload in workloads.WORKLOADS[1:2]]
    monkeypatch.setattr(workloads, "WORKLOADS", [workloads.WORKLOADS[0], *small])
    lines = [json.loads(line) for line in run_bench("w1", "w2", "--json").splitlines()]
    assert [line["threads"] for line in lines] == [torch.get_num_threads(), 1]


def test_options_reach_the_measurement_and_results_go_to_json_and_csv():
    options = ("--epochs", 1, "--precision", "float64", "--clients-per-chunk", 2, "--seed", 4, "--method", "fedfm")
    lines = run_bench("w2", "w1", "--json", "--csv", "deep/out.csv", *options).splitlines()
    results = [json.loads(line) for line in lines]
    expected = {
        "local_epochs": 1, "precision": "float64", "mode": "stacked x 2", "seed": 4, "method": "fedfm",
        "device": "cpu", "repeats": 1,
    }  # fmt: skip
    first, _ = results
    assert first.items() >= expected.items()

    # A file that another version wrote has its columns in another order.
    rows = pd.read_csv("deep/out.csv")
    rows[["workload", *sorted(rows.columns.drop("workload"))]].to_csv("deep/out.csv", index=False)
    run_bench("w1", "--csv", "deep/out.csv")

    rows = pd.read_csv("deep/out.csv")
    assert list(rows.workload) == ["w2", "w1", "w1"]
    assert list(rows.examples_per_second[:2]) == [result["examples_per_second"] for result in results]
    spreads = [json.loads(spread) for spread in rows.seconds_spread[:2]]
    assert spreads == [result["seconds_spread"] for result in results]
    assert set(rows.seed) == {4, 0}


def test_more_rounds_than_a_run_has_after_one_that_warms_up_are_refused_before_any_is_run(monkeypatch):
    monkeypatch.setattr(speed, "time_case", None)
    protocol = resolve(registry.find_method("fedavg"), {"dataset": "cifar10"}, need_data=False)
    rounds_of_case = {"w1": workloads.ROUNDS, "fedavg": protocol.config.rounds}
    for case, rounds in rounds_of_case.items():
        fault = error_of("bench", "w2", case, "--repeats", rounds, "--device", "cpu")
        assert f"has {rounds} rounds, one of which warms up; give at most {rounds - 1}." in fault

    case = BenchCase(setup=replace(protocol, config=replace(protocol.config, rounds=40)))
    with pytest.raises(UserError, match=rf"^--repeats 40 is too many for {case.name}: its run has 40 rounds, "):
        case.check(40)
    case.check(39)


def test_names_are_read_in_any_case_and_an_unknown_one_is_told_the_nearest_workload_or_method():
    assert find_case("W1", "FedAvg", {"device": "cpu"}).workload.name == "w1"
    assert find_case("FedFM", "fedavg", {"device": "cpu"}).setup.method.name == "fedfm"
    assert "unknown workload 'fedfn'; did you mean 'fedfm'? there are w1, " in error_of("bench", "fedfn")


OWN_PROTOCOL = """
from dataclasses import replace
from fedcli import Protocol, DataSetting
from fedcli.papers.baselines import fedavg
METHOD = replace(fedavg.METHOD, name="mine", default_protocol="mine:double")
PROTOCOL = Protocol("mine:double", "s", "s", {
    "rounds": 2, "num_clients": 2, "cohort_size": 2, "train_examples": 20, "local_epochs": 1, "batch_size": 5,
    "partition": "iid", "precision": "float64", "seed": 7,
}, {"cifar10": DataSetting("cnn-small", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), "s")}, "last")
"""


def test_a_method_is_timed_as_its_protocol_says_but_for_what_is_given(folder):
    (folder / "mine.py").write_text(OWN_PROTOCOL)
    as_declared = json.loads(run_bench("./mine.py", "--json"))
    assert as_declared["precision"] == "float64"
    assert as_declared["seed"] == 7
    as_given = json.loads(run_bench("./mine.py", "--json", "--precision", "float32", "--seed", "0"))
    assert as_given["precision"] == "float32"
    assert as_given["seed"] == 0


def test_a_method_whose_protocol_has_no_network_for_the_images_is_refused_with_a_workload_instead():
    fault = error_of("bench", "fccl-plus", "--device", "cpu")
    assert "(got fccl:digits-4); time it on a workload: 'fedcli bench w1 --method fccl-plus'." in fault


def test_a_run_of_one_round_leaves_none_to_time():
    setup = workloads.prepare_workload(TINY_CNN, device="cpu")
    with pytest.raises(
        UserError, match=r"^the run of own:data has one round, which warms up, so that none is left to time"
    ):
        BenchCase(setup=replace(setup, config=replace(setup.config, rounds=1))).check(1)


def test_what_was_timed_before_a_case_failed_is_printed(monkeypatch):
    time_case = speed.time_case

    def time_or_fail(case, *arguments):
        if case.name == "w2":
            raise UserError("no memory.")
        return time_case(case, *arguments)

    monkeypatch.setattr(speed, "time_case", time_or_fail)
    outcome = invoke("bench", "w1", "w2", "--device", "cpu", "--repeats", "1")
    assert outcome.exit_code != 0
    assert outcome.stdout.splitlines()[1].startswith("w1 ")


def test_by_any_of_its_names_a_workload_is_written_by_its_short_one():
    (line,) = run_bench("resnet18", "--json", "--csv", "out.csv").splitlines()
    assert json.loads(line)["workload"] == "w3"
    assert [*pd.read_csv("out.csv").workload] == ["w3"]
    for line in output_of("bench", "resnet18", "--count", "--json").splitlines():
        assert json.loads(line)["workload"] == "w3"


def test_public_images_that_are_missing_are_refused_before_anything_is_timed(monkeypatch):
    monkeypatch.setattr(speed, "time_case", None)
    resolve_run = resolve

    def resolve_with_public_images(*arguments, **options):
        setup = resolve_run(*arguments, **options)
        return replace(setup, config=replace(setup.config, public_dataset="cifar100"))

    monkeypatch.setattr(cases, "resolve", resolve_with_public_images)
    fault = error_of("bench", "w1", "fedavg", "--device", "cpu", "--repeats", "1")
    assert "the data set 'cifar100' is not on this machine" in fault


@pytest.mark.slow
def test_the_chosen_workloads_are_measured_into_a_table(monkeypatch):
    """By default these are the two short workloads, else those that are named, and those of scaling."""
    monkeypatch.setattr(workloads, "SCALING", [replace(TINY_CNN, name=name) for name in ("w1 K=1 B=8", "w1 K=2 B=8")])
    title, first, second, machine, meanings = run_bench().splitlines()
    assert [line.split()[0] for line in (title, first, second)] == ["Workload", "w1", "w2"]
    assert first.strip().endswith("random")
    assert f"torch {torch.__version__}, float32; one round" in machine
    assert meanings.startswith("Engine: seconds of a round by fedcli; Plain loop: seconds of a round by a plain ")
    titles = re.split("  +", title.strip())
    for line in (first, second):
        cells = re.split("  +", line.strip())
        assert cells[titles.index("Threads")] == str(torch.get_num_threads())
    lines = run_bench("w2", "--scaling").splitlines()
    assert [line.split("  ")[0] for line in lines[1:4]] == ["w2", "w1 K=1 B=8", "w1 K=2 B=8"]
    lines = run_bench("--scaling").splitlines()
    assert [line.split("  ")[0] for line in lines[1:5]] == ["w1", "w2", "w1 K=1 B=8", "w1 K=2 B=8"]
