"""The comparison with PFLlib, Flower and fluke: what is refused, what is measured, and what is said of the numbers."""

import math
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from fedcli.bench import small_network
from fedcli.core import backbones
from tests.scripts import load_script
from tests.user_errors import raises_user_error

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "results" / "speed" / "peers"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
NAMES_OF_SIDES = {  # on the page
    "fedcli": "fedcli",
    "pfllib": "PFLlib",
    "flower": "Flower",
    "flower-default": "Flower, defaults",
    "fluke": "fluke",
}
peers = load_script(FOLDER / "peers.py")
clients = load_script(FOLDER / "sides" / "clients.py")
jobs = load_script(FOLDER / "sides" / "job.py")
networks = load_script(FOLDER / "networks.py")
COMMITTED_ROWS = pd.read_csv(FOLDER / "peers.csv")
EARLIER_ROWS = pd.read_csv(FOLDER / "earlier.csv")  # what earlier versions of peers.py have measured
ALL_ROWS = pd.concat([COMMITTED_ROWS, EARLIER_ROWS])


@pytest.fixture
def empty_csv(tmp_path, monkeypatch):
    """Puts a file that is not there yet in the place of the committed CSV; returns its path."""
    monkeypatch.setattr(peers, "CSV", tmp_path / "peers.csv")
    return tmp_path / "peers.csv"


@pytest.fixture
def nothing_is_measured(monkeypatch):
    """Lets a test fail that measures something."""
    monkeypatch.setattr(peers, "measure", None)


def make_row(side, turn, seconds):
    """Returns a row of the CSV: the seconds of a round of the workload 'mnist-large'."""
    return peers.CsvRow(
        quantity="seconds", workload="mnist-large", side=side, turn=turn, value=seconds, versions="1",
        torch_version="2", cores=3, processor="x",
    )  # fmt: skip


# What is said of the committed numbers


def read_ratios():
    """Returns how many times fedcli's the median of a side is: a row each quantity, workload and turn."""
    medians = peers.compute_medians(ALL_ROWS)
    return medians.div(medians["fedcli"], axis=0)


def format_spread(values):
    """Returns the median of values and their range, as a cell of a page."""
    return f"{values.median():.2f} ({values.min():.2f}-{values.max():.2f})"


def format_mean(accuracies):
    """Returns accuracies and their mean in percent, as a cell of a page."""
    percent = 100 * accuracies
    seeds = ", ".join(f"{accuracy:.2f}" for accuracy in percent)
    return f"{seeds}: {percent.mean():.2f} ± {percent.std():.2f}"


@pytest.mark.parametrize(
    ("quantity", "heading"),
    [("seconds", "Seconds a round"), ("seconds_with_test", "Seconds of a round with its test")],
)
def test_the_page_has_the_seconds_of_each_side_and_how_many_times_fedclis_they_are(quantity, heading):
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    ratios = read_ratios().loc[quantity]
    seconds_of_sides = ALL_ROWS[ALL_ROWS.quantity == quantity].groupby(["workload", "side"]).value
    for (workload, side), seconds in seconds_of_sides:
        cells = [workload, NAMES_OF_SIDES[side], format_spread(seconds), format_spread(ratios.loc[workload][side])]
        assert f"\n| {' | '.join(cells)} |" in section
    assert section.count("\n| fmnist-") + section.count("\n| mnist-") == len(seconds_of_sides)


def test_the_page_says_what_the_workloads_train():
    names_of_methods = {"fedavg": "FedAvg", "fedproto": "FedProto"}
    for name, workload in peers.WORKLOADS.items():
        training = workload.training
        network = networks.make_network(training.backbone)
        parameters = sum(value.numel() for value in network.parameters())
        leaves_images_out = training.drop_last and 600 % training.batch_size > 0
        cells = [
            name,
            names_of_methods[training.method],
            f"`{training.backbone.rpartition(':')[2]}`",
            f"{parameters:,}",
            str(training.cohort_size),
            str(training.local_epochs),
            f"{training.batch_size}, full only" if leaves_images_out else str(training.batch_size),
            str(training.lr),
        ]
        assert f"\n| {' | '.join(cells)} |\n" in PAGE
        assert training.num_clients == 100
        assert name.partition("-")[0] == workload.fedcli_options["dataset"]


def test_the_page_has_the_memory_of_each_side():
    mib = ALL_ROWS[ALL_ROWS.quantity == "peak_mib"].set_index(["workload", "side"]).value
    for workload in ("fmnist-cnn", "fmnist-cnn-batch10", "fmnist-cnn-fedproto"):
        line = f"| {workload} |"
        for side in ("fedcli", "pfllib", "flower"):
            line += f" {mib[workload, side]:,.0f} |" if (workload, side) in mib else " |"
        assert line in PAGE


def test_the_page_has_the_accuracies_and_parameters_of_each_method():
    values = ALL_ROWS.sort_values("turn").groupby(["quantity", "workload", "side"]).value
    for method, title in {"fedavg": "FedAvg", "fedprox": "FedProx", "fedproto": "FedProto"}.items():
        of_fedcli = values.get_group(("final_accuracy", method, "fedcli"))
        of_pfllib = values.get_group(("final_accuracy", method, "pfllib"))
        difference = 100 * (of_fedcli.mean() - of_pfllib.mean())
        assert f"| {title} | {format_mean(of_fedcli)} | {format_mean(of_pfllib)} | {difference:+.2f} |" in PAGE
        assert abs(of_fedcli.mean() - of_pfllib.mean()) < min(of_fedcli.std(), of_pfllib.std())

        cells = [title]
        for quantity in ("largest_difference", "median_difference", "largest_change"):
            cells.append(f"{values.get_group((quantity, method, 'pfllib')).item():.1e}")
        assert f"| {' | '.join(cells)} |" in PAGE
        assert values.get_group(("median_difference", method, "pfllib")).item() < 3e-5


def test_fedcli_and_fluke_come_to_the_same_accuracy_in_each_turn():
    accuracies = peers.compute_medians(ALL_ROWS).loc["final_accuracy"]
    for workload in ("mnist-large", "mnist-small"):
        for side in ("fedcli", "fluke"):
            (accuracy,) = accuracies.loc[workload][side].unique()
            assert re.search(rf"[|] {workload} [|] {side} [|].*[|] {100 * accuracy:.2f} [|]", PAGE)
        assert (accuracies.loc[workload].fedcli - accuracies.loc[workload].fluke).abs().max() < 0.005


def test_the_page_of_speed_has_the_medians_of_the_ratios():
    ratios = read_ratios()
    tables = (FOLDER.parent / "README.md").read_text(encoding="utf-8").partition("## Other toolkits")[2]
    lines = [line for line in tables.splitlines() if line.startswith("| `")]
    measured = [
        ("seconds", "fmnist-cnn"),
        ("seconds_with_test", "fmnist-cnn"),
        ("seconds", "fmnist-cnn-batch10"),
        ("seconds", "fmnist-small"),
        ("seconds", "mnist-large"),
        ("seconds", "mnist-small"),
    ]
    for line, (quantity, workload) in zip(lines, measured, strict=True):
        kind = "with test" if quantity == "seconds_with_test" else "without test"
        line_end = f"| {kind} |"
        for side in ("pfllib", "flower", "fluke"):
            median = ratios.loc[quantity, workload][side].median()
            line_end += " |" if math.isnan(median) else f" {median:.2f} |"
        assert line.startswith(f"| `{workload}` |")
        assert line.endswith(line_end)


def test_the_readme_has_the_medians_of_the_ratios():
    ratios = read_ratios()

    def format_ratio(quantity, workload, side):
        return f"{ratios.loc[quantity, workload][side].median():.1f}"

    pfllib = format_ratio("seconds", "fmnist-cnn", "pfllib")
    flower = format_ratio("seconds", "fmnist-cnn", "flower")
    pfllib_with_test = format_ratio("seconds_with_test", "fmnist-cnn", "pfllib")
    flower_with_test = format_ratio("seconds_with_test", "fmnist-cnn", "flower")
    pfllib_small = format_ratio("seconds", "fmnist-small", "pfllib")
    flower_small = format_ratio("seconds", "fmnist-small", "flower")
    fluke_large = format_ratio("seconds", "mnist-large", "fluke")
    fluke_small = format_ratio("seconds", "mnist-small", "fluke")
    text = " ".join(README.split())
    assert f"PFLlib takes {pfllib} times as long as fedcli and Flower {flower} times" in text
    assert f"with the test after a round {pfllib_with_test} and {flower_with_test} times" in text
    assert f"With 21,840 parameters PFLlib takes {pfllib_small} times as long and Flower {flower_small} times" in text
    sentence = (
        f"fluke takes {fluke_large} times as long with 1.66 million parameters and {fluke_small} times with 21,840."
    )
    assert sentence in text


def count_timed_rounds(rows):
    """Returns how many rounds are timed of each side in a turn, by workload, side and turn."""
    return rows[rows.quantity == "seconds"].groupby(["workload", "side", "turn"]).size()


def test_every_workload_was_measured_and_earlier_versions_timed_fewer_rounds():
    counts = count_timed_rounds(COMMITTED_ROWS)
    earlier_counts = count_timed_rounds(EARLIER_ROWS)
    num_counted = len(range(peers.ROUNDS)[peers.COUNTED_ROUNDS])
    assert num_counted == 3
    assert {*counts} == {num_counted}
    assert {*earlier_counts} == {1, 2}
    earlier_workloads = {*earlier_counts.reset_index().workload}
    assert earlier_workloads == {"fmnist-cnn", "fmnist-cnn-batch10", "fmnist-cnn-fedproto"}
    assert {*COMMITTED_ROWS.workload} | earlier_workloads == {*peers.WORKLOADS}


def test_what_was_measured_was_trained_by_sides_that_are_able_to():
    timed = ALL_ROWS.query("quantity == 'seconds' and side != 'flower-default'")
    assert set(timed.side) > {"fedcli"}
    for workload, sides in timed.groupby("workload").side:
        peers.check_sides(workload, [peers.Side(side) for side in sides.unique()])


# What is refused before anything is timed


@pytest.mark.parametrize(
    ("workload", "side", "message"),
    [
        ("fmnist-cnn-fedproto", "flower", "flower cannot train 'fmnist-cnn-fedproto', which is fedproto"),
        ("fmnist-cnn-fedproto", "fluke", "fluke cannot train 'fmnist-cnn-fedproto', which is fedproto"),
        ("fmnist-cnn", "fluke", "fluke cannot train 'fmnist-cnn', which is without the batches that are not full"),
        ("mnist-large", "pfllib", "pfllib cannot train 'mnist-large', which is with the batches that are not full"),
    ],
)
def test_a_side_that_would_train_something_else_is_refused(workload, side, message, nothing_is_measured):
    sides = [peers.Side.FEDCLI, peers.Side(side)]
    with raises_user_error(message):
        peers.main(peers.WorkloadName(workload), sides, pfllib=FOLDER)


def test_a_side_that_is_given_twice_is_refused(nothing_is_measured):
    twice = [peers.Side.FEDCLI, peers.Side.FEDCLI]
    with raises_user_error("fedcli is given twice; give each --side once"):
        peers.main(peers.WorkloadName.FMNIST_CNN, twice)


def test_a_folder_that_is_no_checkout_of_pfllib_is_refused(tmp_path, nothing_is_measured):
    sides = [peers.Side.FEDCLI, peers.Side.PFLLIB]
    with raises_user_error("has no PFLlib"):
        peers.main(peers.WorkloadName.FMNIST_CNN, sides, pfllib=tmp_path)
    (tmp_path / "system" / "flcore").mkdir(parents=True)
    with raises_user_error("is no checkout (fatal: not a git repository"):
        peers.main(peers.WorkloadName.FMNIST_CNN, sides, pfllib=tmp_path)


@pytest.mark.parametrize(("turns", "refused"), [([3, 2], 2), ([3, 3], 3)])
def test_a_turn_that_is_measured_already_is_refused(turns, refused, empty_csv, nothing_is_measured):
    peers.append_rows([make_row(peers.Side.FEDCLI, turn, 1.0) for turn in (0, 1, 2)])
    with raises_user_error(f"turn {refused} of fedcli with 'mnist-large' is in a CSV file, or was asked for"):
        peers.main(peers.WorkloadName.MNIST_LARGE, [peers.Side.FEDCLI], turns=turns)


# What is measured


def test_all_workloads_are_of_the_cpu():
    assert {workload.options["device"] for workload in peers.WORKLOADS.values()} == {"cpu"}


@pytest.mark.slow
def test_the_rounds_of_a_side_are_measured_on_the_clients_that_all_sides_read(tmp_path, empty_csv, monkeypatch):
    training = replace(peers.ONE_EPOCH, backbone="cnn-small", num_clients=4, cohort_size=2)
    options = {**peers.FMNIST, "dataset": "digits", "train_examples": 400}
    monkeypatch.setitem(peers.WORKLOADS, "fmnist-cnn-batch10", peers.Workload(training, options))
    measured = peers.measure("fmnist-cnn-batch10", [peers.Side.FEDCLI], 7, pfllib_checkout=None, python="")

    rows = pd.read_csv(empty_csv)
    assert rows.value.tolist() == pytest.approx([row.value for row in measured], rel=1e-5)
    assert rows.columns.tolist() == COMMITTED_ROWS.columns.tolist()
    assert rows.quantity.tolist() == ["seconds", "seconds", "seconds", "final_accuracy"]
    assert (rows.value > 0).all()

    peers.write_clients(tmp_path, peers.WORKLOADS["fmnist-cnn-batch10"])
    train = clients.load_client_images(tmp_path, "train")
    assert sum(map(len, train)) == 400 - 4 * 14  # a seventh of each is for testing
    assert {images.tensors[0].shape[1:] for images in train} == {(1, 8, 8)}


def test_a_turn_of_which_a_side_fails_leaves_no_rows(empty_csv, monkeypatch):
    def run_side(python, side, job):
        if side is peers.Side.FLUKE:
            raise subprocess.CalledProcessError(1, "fluke")
        outcome = SimpleNamespace(seconds=[1.0] * 5, accuracy=None, versions="1")
        return SimpleNamespace(outcome=outcome, torch_version="2", cores=3)

    monkeypatch.setattr(peers, "run_side", run_side)
    monkeypatch.setattr(peers, "write_clients", lambda folder, workload: None)
    peers.measure("mnist-large", [peers.Side.FEDCLI], 0, None, "")
    before = empty_csv.read_text()
    with pytest.raises(subprocess.CalledProcessError):
        peers.measure("mnist-large", [peers.Side.FEDCLI, peers.Side.FLUKE], 1, None, "")
    assert empty_csv.read_text() == before


def test_the_first_turn_is_0_where_none_is_measured(empty_csv):
    assert peers.find_next_turn("mnist-large") == 0


def test_turns_that_an_earlier_version_has_measured_count_too(empty_csv, nothing_is_measured):
    turns = EARLIER_ROWS[EARLIER_ROWS.workload == "fmnist-cnn"].turn
    assert {*turns} == {0, 1, 2, 3}
    assert peers.find_next_turn("fmnist-cnn") == 4
    peers.append_rows([make_row(peers.Side.FEDCLI, 7, 1.0)])
    assert peers.find_next_turn("fmnist-cnn") == 4
    with raises_user_error("turn 3 of fedcli with 'fmnist-cnn' is in a CSV file, or was asked for"):
        peers.main(peers.WorkloadName.FMNIST_CNN, [peers.Side.FEDCLI], turns=[3])


def test_a_turn_is_the_next_one_and_its_own_rows_alone_are_summed_up(empty_csv, monkeypatch, capsys):
    peers.append_rows([make_row(peers.Side.FEDCLI, turn, 7.0) for turn in (0, 1, 2)])
    measured_turns = []
    seconds_of = {peers.Side.FEDCLI: (1.0, 2.0, 9.0), peers.Side.FLUKE: (4.0, 5.0, 5.5)}

    def measure(workload, sides, turn, pfllib_checkout, python):
        measured_turns.append(turn)
        rows = []
        for side in sides:
            rows += [make_row(side, turn, seconds) for seconds in seconds_of[side]]
        return rows

    monkeypatch.setattr(peers, "measure", measure)
    peers.main(peers.WorkloadName.MNIST_LARGE, [peers.Side.FEDCLI, peers.Side.FLUKE])
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line.split() == ["mnist-large", "3", "2.0", "5.0"]
    assert measured_turns == [3]  # after 0, 1 and 2 in the CSV

    peers.main(peers.WorkloadName.MNIST_LARGE, [peers.Side.FEDCLI], turns=[5, 8])
    last_lines = capsys.readouterr().out.splitlines()[-2:]
    assert [line.split()[-2:] for line in last_lines] == [["5", "2.0"], ["8", "2.0"]]


# The processes and networks of the sides


def test_a_side_finds_the_modules_of_its_environment_too(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    paths = []

    def run(command, env, **options):
        paths.append(env["PYTHONPATH"])
        raise KeyboardInterrupt

    monkeypatch.setattr(peers.subprocess, "run", run)
    job = SimpleNamespace(to_json=lambda: "{}")
    with pytest.raises(KeyboardInterrupt):
        peers.run_side("python", peers.Side.FLUKE, job)
    assert paths == [f"{FOLDER}{os.pathsep}/elsewhere"]


def test_a_job_and_a_measurement_pass_between_processes_as_they_are(tmp_path):
    training = jobs.Training(lr=0.1, cohort_size=2, local_epochs=3, batch_size=4)
    job = jobs.Job(tmp_path, jobs.Workload(training, {"momentum": 0.0}), rounds=5, pfllib_checkout=None)
    assert jobs.Job.from_json(job.to_json()) == job
    outcome = jobs.Outcome([1.0, 2.5], accuracy=None, versions="x 1")
    measurement = jobs.Measurement(outcome, torch_version="2", cores=3)
    assert jobs.Measurement.from_json(measurement.to_json()) == measurement


def with_parameters_of(network, other):
    """Gives a network the parameters of another, which are of the same shapes in the same order; returns it."""
    with torch.no_grad():
        for value, given in zip(network.parameters(), other.parameters(), strict=True):
            assert value.shape == given.shape
            value.copy_(given)
    return network


def test_networks_that_are_written_again_are_those_of_fedcli():
    x = torch.linspace(-1, 1, 2 * 28 * 28).reshape(2, 1, 28, 28)
    mcmahan = backbones.build("cnn-mcmahan", channels=1, image_size=28, num_classes=10, seed=0)
    _, logits = mcmahan(x)
    torch.testing.assert_close(with_parameters_of(networks.make_network("cnn-mcmahan"), mcmahan)(x), logits)
    small = small_network.small(channels=1, image_size=28, num_classes=10)
    written_again = with_parameters_of(networks.make_network("networks.py:small"), small)
    torch.testing.assert_close(written_again(x), small(x))


def test_a_modified_checkout_and_one_without_a_commit_are_told_from_a_clean_one(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    fedcli_side = load_script(FOLDER / "sides" / "fedcli.py")
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert fedcli_side.shorten_commit(commit) == "0123456"
    assert fedcli_side.shorten_commit(f"{commit}+") == "0123456+"
    assert fedcli_side.shorten_commit(None) == "unknown commit"
