"""The page of speed, and what the README quotes of it, say what the CSV files beside the page do."""

import csv
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace

import pytest
import torch

from fedcli.bench import small_network
from fedcli.core import backbones
from fedcli.errors import UserError
from tests.scripts import load_script

ROOT = Path(__file__).parent.parent
SPEED = ROOT / "results" / "speed"
EARLIER = SPEED / "peers" / "earlier.csv"  # what earlier versions of peers.py have measured
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (SPEED / "README.md").read_text(encoding="utf-8")


def rows_of(name):
    (file,) = SPEED.glob(name)
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def test_every_number_that_was_noted_stands_on_the_page():
    without_thousands_commas = re.sub(r"(?<=\d),(?=\d{3})", "", PAGE)
    numbers = set(re.findall(r"[\d.,]*\d", without_thousands_commas))
    earlier = [row for row in rows_of("noted.csv") if row["what"].endswith(" before")]  # of which the page says less
    assert earlier
    of_now = [row for row in rows_of("noted.csv") if row not in earlier]
    assert [row for row in of_now if row["value"].rstrip("%") not in numbers] == []


FROM_OTHER_FILES = {("Speed", 0), ("An NVIDIA H200", 0)}  # tables, each by its passage and its number there
WITHOUT_ROWS = {
    ("Flat parameters and live taps", 2),
    ("Kernels and bytes of a joint step", 0),
    ("Convolutions of few places", 0),
    ("Convolutions of few places", 1),
}


def tables_of(page):
    """The numbers in the cells of every table, by passage and number there, but for ranges in brackets."""
    tables = {}
    passage = ""
    for block in page.split("\n\n"):
        heading = re.match(r"#+ (.+)|\*\*(.+?)\.?\*\*", block)
        if heading:
            passage = heading[1] or heading[2]
        if not block.startswith("|"):
            continue
        _, _, *lines = block.splitlines()
        numbers = []
        for line in lines:
            _, *cells = line.strip("|").split("|")
            for cell in cells:
                text = re.sub(r"\(.*?\)", "", cell).strip()
                if re.fullmatch(r"[\d.,%]+(?:(?:, | to )[\d.,]+%?)*", text):
                    numbers += re.split(", | to ", re.sub(r"(?<=\d),(?=\d{3})", "", text))
        number = sum(before == passage for before, _ in tables)
        tables[passage, number] = numbers
    return tables


def test_every_number_in_a_table_of_the_page_was_noted_or_the_page_says_that_it_was_not():
    tables = tables_of(PAGE)
    assert tables.keys() > FROM_OTHER_FILES | WITHOUT_ROWS
    for (passage, number), numbers in tables.items():
        noted = {row["value"] for row in rows_of("noted.csv") if row["section"] == passage}
        missing = [value for value in numbers if value not in noted]
        if (passage, number) in FROM_OTHER_FILES | WITHOUT_ROWS:
            assert missing, (passage, number)
        else:
            assert numbers, (passage, number)
            assert missing == [], (passage, number)
    left_out = "the third table of flat parameters, kernels, operations and memory of a joint step, and convolutions of"
    assert left_out in " ".join(PAGE.split())


@pytest.mark.parametrize("name", ["w1", "w2"])
def test_rounds_on_a_cpu_are_on_the_page_and_their_median_ratio_in_the_readme(name):
    rows = [row for row in rows_of("cpu*torch*.csv") if row["workload"] == name]
    assert len(rows) == 3
    ratio = median(float(row["ratio"]) for row in rows)
    assert f"{ratio:.2f} (`{name}`)" in README

    def cell(column):
        return ", ".join(f"{float(row[column]):.2f}" for row in rows)

    line = f"| {name} | {cell('seconds_per_round')} | {cell('plain_seconds_per_round')} | {cell('ratio')} |"
    assert line in PAGE


@pytest.mark.parametrize("row", rows_of("nvidia-h200-*.csv"), ids=lambda row: row["workload"])
def test_rounds_on_a_gpu_are_on_the_page_and_their_ratio_in_the_readme(row):
    ratio = f"{float(row['ratio']):.1f}"
    assert f"{ratio} (`{row['workload']}`" in README
    cells = [
        row["workload"],
        row["engine"],
        f"{float(row['seconds_per_round']):.3f}",
        f"{float(row['plain_seconds_per_round']):.3f}",
        ratio,
        f"{float(row['floor_share']):.0%}",
        f"{float(row['evaluation_seconds']):.3f}",
    ]
    assert f"| {' | '.join(cells)} |" in PAGE


def test_the_readme_says_how_much_longer_the_same_bits_each_time_take():
    rows = [row for row in rows_of("noted.csv") if row["section"] == "An NVIDIA H200"]

    def seconds_of_round(what):
        return fmean(
            float(row["value"]) for row in rows if row["what"] == what and row["measured"] == "seconds a round"
        )

    ratio = seconds_of_round("all deterministic") / seconds_of_round("the fastest")
    assert f"with which `w1` takes {ratio:.1f} times as long." in README


def spread(values):
    """The median of values and their range, as a cell of a page."""
    return f"{values.median():.2f} ({values.min():.2f}-{values.max():.2f})"


def test_what_is_said_of_others_is_what_was_measured():
    peers = load_script(SPEED / "peers" / "peers.py")
    page = (SPEED / "peers" / "README.md").read_text(encoding="utf-8")
    rows = peers.pd.concat([peers.pd.read_csv(file) for file in (peers.CSV, EARLIER)])
    medians = peers.compute_medians(rows)
    ratios = medians.div(medians["fedcli"], axis=0)

    # The page has the seconds of each side, and how many times fedcli's they are.
    for (workload, side), seconds in rows[rows.quantity == "seconds"].groupby(["workload", "side"]).value:
        name, _, _ = side.partition("-")
        cells = re.escape(f" | {spread(seconds)} | {spread(ratios.loc['seconds', workload][side])}")
        assert re.search(f"{workload} [|] {name}[^|]*{cells}", page, re.IGNORECASE)

    # The README has the medians of the ratios.
    def ratio(quantity, workload, side):
        return f"{ratios.loc[quantity, workload][side].median():.1f}"

    sentence = (
        f"PFLlib takes {ratio('seconds', 'w1', 'pfllib')} times as long as fedcli for `w1` and Flower "
        f"{ratio('seconds', 'w1', 'flower')} times, at equal accuracy, and with the evaluation after a round "
        f"{ratio('seconds_with_test', 'w1', 'pfllib')} and {ratio('seconds_with_test', 'w1', 'flower')} times"
    )
    assert sentence in " ".join(README.split())
    large = ratio("seconds", "large", "fluke")
    small = ratio("seconds", "small", "fluke")
    assert f"fluke takes {large} times as long with 1.66 million parameters and {small} times with 21,840." in README

    # All come to the same accuracy.
    for workload in ("large", "small"):
        accuracies = medians.loc["final_accuracy"].loc[workload].mean()
        for side in ("fedcli", "fluke"):
            assert re.search(f"{workload} [|] {side} [|].*[|] {100 * accuracies[side]:.2f} [|]", page)
        assert abs(accuracies["fedcli"] - accuracies["fluke"]) < 0.005
    for method in ("fedavg", "fedprox", "fedproto"):
        values = rows[rows.workload == method].groupby(["quantity", "side"]).value
        of_fedcli = values.get_group(("final_accuracy", "fedcli"))
        of_pfllib = values.get_group(("final_accuracy", "pfllib"))
        assert abs(of_fedcli.mean() - of_pfllib.mean()) < min(of_fedcli.std(), of_pfllib.std())
        assert values.get_group(("median_difference", "pfllib")).item() < 3e-5


def test_the_rounds_of_a_side_are_measured_on_the_clients_that_all_sides_read(tmp_path, monkeypatch):
    peers = load_script(SPEED / "peers" / "peers.py")
    clients = load_script(SPEED / "peers" / "sides" / "clients.py")
    training = replace(peers.ONE_EPOCH, backbone="cnn-small", num_clients=4, cohort_size=2)
    options = {**peers.FMNIST, "dataset": "digits", "train_examples": 400}
    monkeypatch.setitem(peers.WORKLOADS, "w2", peers.Workload(training, options))
    monkeypatch.setattr(peers, "CSV", tmp_path / "peers.csv")
    measured = peers.measure("w2", [peers.Side.FEDCLI], 7, pfllib_checkout=None, python="")

    rows = peers.pd.read_csv(peers.CSV)
    assert [*rows.value] == pytest.approx([row.value for row in measured], rel=1e-5)
    assert [*rows] == [*peers.pd.read_csv(SPEED / "peers" / "peers.csv")]
    assert [*rows.quantity] == ["seconds"] * 3 + ["final_accuracy"]
    assert (rows.value > 0).all()

    peers.write_clients(tmp_path, peers.WORKLOADS["w2"])
    train = clients.load_client_images(tmp_path, "train")
    assert sum(map(len, train)) == 400 - 4 * 14  # a seventh of each is for testing
    assert {images.tensors[0].shape[1:] for images in train} == {(1, 8, 8)}


REFUSED = {
    ("proto", "flower"): "flower cannot train 'proto', which is fedproto",
    ("proto", "fluke"): "fluke cannot train 'proto', which is fedproto",
    ("w1", "fluke"): "fluke cannot train 'w1', which is without the batches that are not full",
    ("large", "pfllib"): "pfllib cannot train 'large', which is with the batches that are not full",
}


@pytest.mark.parametrize(("workload", "side"), REFUSED)
def test_a_side_that_would_train_something_else_is_refused_before_anything_is_timed(workload, side, monkeypatch):
    peers = load_script(SPEED / "peers" / "peers.py")
    monkeypatch.setattr(peers, "measure", None)
    with pytest.raises(UserError, match=REFUSED[workload, side]):
        peers.main(peers.WorkloadName(workload), [peers.Side.FEDCLI, peers.Side(side)], pfllib=SPEED)


def test_a_side_that_is_given_twice_is_refused_before_anything_is_timed(monkeypatch):
    peers = load_script(SPEED / "peers" / "peers.py")
    monkeypatch.setattr(peers, "measure", None)
    with pytest.raises(UserError, match="fedcli is given twice; give each --side once"):
        peers.main(peers.WorkloadName.W1, [peers.Side.FEDCLI, peers.Side.FEDCLI])


def test_a_folder_that_is_no_checkout_of_pfllib_is_refused_before_anything_is_timed(tmp_path, monkeypatch):
    peers = load_script(SPEED / "peers" / "peers.py")
    monkeypatch.setattr(peers, "measure", None)
    sides = [peers.Side.FEDCLI, peers.Side.PFLLIB]
    with pytest.raises(UserError, match="has no PFLlib"):
        peers.main(peers.WorkloadName.W1, sides, pfllib=tmp_path)
    (tmp_path / "system" / "flcore").mkdir(parents=True)
    with pytest.raises(UserError, match=r"is no checkout \(fatal: not a git repository"):
        peers.main(peers.WorkloadName.W1, sides, pfllib=tmp_path)


def test_a_turn_of_which_a_side_fails_leaves_no_rows(tmp_path, monkeypatch):
    peers = load_script(SPEED / "peers" / "peers.py")

    def run_side(python, side, job):
        if side is peers.Side.FLUKE:
            raise subprocess.CalledProcessError(1, "fluke")
        outcome = SimpleNamespace(seconds=[1.0] * 5, accuracy=None, versions="1")
        return SimpleNamespace(outcome=outcome, torch_version="2", cores=3)

    monkeypatch.setattr(peers, "run_side", run_side)
    monkeypatch.setattr(peers, "write_clients", lambda folder, workload: None)
    monkeypatch.setattr(peers, "CSV", tmp_path / "peers.csv")
    peers.measure("large", [peers.Side.FEDCLI], 0, None, "")
    before = peers.CSV.read_text()
    with pytest.raises(subprocess.CalledProcessError):
        peers.measure("large", [peers.Side.FEDCLI, peers.Side.FLUKE], 1, None, "")
    assert peers.CSV.read_text() == before


def test_a_side_finds_the_modules_of_its_environment_too(tmp_path, monkeypatch):
    peers = load_script(SPEED / "peers" / "peers.py")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    paths = []

    def run(command, env, **options):
        paths.append(env["PYTHONPATH"])
        raise KeyboardInterrupt

    monkeypatch.setattr(peers.subprocess, "run", run)
    job = SimpleNamespace(to_json=lambda: "{}")
    with pytest.raises(KeyboardInterrupt):
        peers.run_side("python", peers.Side.FLUKE, job)
    assert paths == [f"{SPEED / 'peers'}{os.pathsep}/elsewhere"]


def with_weights_of(network, other):
    """A network with the parameters of another, which are of the same shapes in the same order."""
    pairs = [*zip(network.parameters(), other.parameters(), strict=True)]
    assert [value.shape for value, _ in pairs] == [given.shape for _, given in pairs]
    with torch.no_grad():
        for value, given in pairs:
            value.copy_(given)
    return network


def test_networks_that_are_written_again_are_those_of_fedcli():
    networks = load_script(SPEED / "peers" / "networks.py")
    x = torch.linspace(-1, 1, 2 * 28 * 28).reshape(2, 1, 28, 28)
    mcmahan = backbones.build("cnn-mcmahan", channels=1, image_size=28, num_classes=10, seed=0)
    _, logits = mcmahan(x)
    torch.testing.assert_close(with_weights_of(networks.make_network("cnn-mcmahan"), mcmahan)(x), logits)
    small = small_network.small(channels=1, image_size=28, num_classes=10)
    torch.testing.assert_close(with_weights_of(networks.make_network("networks.py:small"), small)(x), small(x))


def test_a_job_and_a_measurement_pass_between_processes_as_they_are(tmp_path):
    jobs = load_script(SPEED / "peers" / "sides" / "job.py")
    training = jobs.Training(lr=0.1, cohort_size=2, local_epochs=3, batch_size=4)
    job = jobs.Job(tmp_path, jobs.Workload(training, {"momentum": 0.0}), rounds=5, pfllib_checkout=None)
    assert jobs.Job.from_json(job.to_json()) == job
    outcome = jobs.Outcome([1.0, 2.5], accuracy=None, versions="x 1")
    measurement = jobs.Measurement(outcome, torch_version="2", cores=3)
    assert jobs.Measurement.from_json(measurement.to_json()) == measurement


def test_all_sides_train_on_the_cpu():
    peers = load_script(SPEED / "peers" / "peers.py")
    assert {workload.options["device"] for workload in peers.WORKLOADS.values()} == {"cpu"}


def test_a_turn_is_the_next_one_and_its_own_rows_alone_are_summed_up(monkeypatch, capsys):
    peers = load_script(SPEED / "peers" / "peers.py")
    measured = []

    def measure(workload, sides, turn, pfllib_checkout, python):
        measured.append(turn)
        side = {"versions": "1", "torch_version": "2", "cores": 3, "processor": "x"}
        values = {"fedcli": (1.0, 2.0, 9.0), "fluke": (4.0, 5.0, 5.5)}
        return [
            peers.CsvRow(quantity="seconds", workload=workload, side=name, turn=turn, value=value, **side)
            for name in sides
            for value in values[name]
        ]

    monkeypatch.setattr(peers, "measure", measure)
    peers.main(peers.WorkloadName.LARGE, [peers.Side.FEDCLI, peers.Side.FLUKE])
    *_, last_line = capsys.readouterr().out.splitlines()
    assert last_line.split() == ["large", "3", "2.0", "5.0"]
    assert measured == [3]  # after 0, 1 and 2 in the CSV
    peers.main(peers.WorkloadName.LARGE, [peers.Side.FEDCLI], turns=[5, 8])
    assert [line.split()[-2:] for line in capsys.readouterr().out.splitlines()[-2:]] == [["5", "2.0"], ["8", "2.0"]]


@pytest.mark.parametrize("turns", [[3, 2], [3, 3]])
def test_a_turn_that_is_measured_already_is_refused_before_anything_is_timed(turns, monkeypatch):
    peers = load_script(SPEED / "peers" / "peers.py")
    monkeypatch.setattr(peers, "measure", None)
    with pytest.raises(UserError, match=f"turn {turns[1]} of fedcli with 'large' is in the CSV, or was asked for"):
        peers.main(peers.WorkloadName.LARGE, [peers.Side.FEDCLI], turns=turns)


def test_the_first_turn_is_0_where_there_is_no_csv(tmp_path, monkeypatch):
    peers = load_script(SPEED / "peers" / "peers.py")
    monkeypatch.setattr(peers, "CSV", tmp_path / "peers.csv")
    assert peers.find_next_turn("w1") == 0


def test_the_seconds_of_earlier_versions_are_those_of_fewer_rounds():
    peers = load_script(SPEED / "peers" / "peers.py")
    rows = peers.pd.read_csv(peers.CSV)
    counts = rows[rows.quantity == "seconds"].groupby(["workload", "side", "turn"]).size()
    assert {*counts} == {3}
    assert {*rows.workload} == {"large", "small", "w4"}
    earlier_rows = peers.pd.read_csv(EARLIER)
    earlier_counts = earlier_rows[earlier_rows.quantity == "seconds"].groupby(["workload", "side", "turn"]).size()
    assert {*earlier_counts} == {1, 2}
    assert {*earlier_counts.reset_index().workload} == {"w1", "w2", "proto"}


def test_what_was_measured_was_trained_by_sides_that_are_able_to():
    peers = load_script(SPEED / "peers" / "peers.py")
    rows = peers.pd.concat([peers.pd.read_csv(file) for file in (peers.CSV, EARLIER)])
    timed = rows.query("quantity == 'seconds' and side != 'flower-default'")
    assert set(timed.side) > {"fedcli"}
    for workload, sides in timed.groupby("workload").side:
        peers.check_sides(workload, [*map(peers.Side, sides.unique())])


def test_a_modified_checkout_and_one_without_a_commit_are_told_from_a_clean_one(monkeypatch):
    monkeypatch.syspath_prepend(SPEED / "peers")
    fedcli_side = load_script(SPEED / "peers" / "sides" / "fedcli.py")
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert fedcli_side.shorten_commit(commit) == "0123456"
    assert fedcli_side.shorten_commit(f"{commit}+") == "0123456+"
    assert fedcli_side.shorten_commit(None) == "unknown commit"
