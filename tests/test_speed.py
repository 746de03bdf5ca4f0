"""The page of speed, and what the README quotes of it, say what the CSV files beside the page do."""

import re
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.programs import load_script

ROOT = Path(__file__).parent.parent
SPEED = ROOT / "results" / "speed"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (SPEED / "README.md").read_text(encoding="utf-8")
NOTED = pd.read_csv(SPEED / "noted.csv", dtype=str)
(CPU,) = map(pd.read_csv, SPEED.glob("cpu*torch*.csv"))
(GPU,) = map(pd.read_csv, SPEED.glob("nvidia-h200-*.csv"))


def test_every_number_that_was_noted_stands_on_the_page():
    numbers = set(re.findall(r"[\d.,]*\d", re.sub(r"(?<=\d),(?=\d{3})", "", PAGE)))
    earlier = NOTED.what.str.endswith(" before")  # of which the page says less
    assert earlier.any()
    assert {*NOTED.value[~earlier].str.rstrip("%")} <= numbers


@pytest.mark.parametrize("name", ["w1", "w2"])
def test_rounds_on_a_cpu(name):
    own = CPU[CPU.workload == name]
    assert len(own) == 3
    assert f"{own.ratio.median():.2f} ({name})" in README
    columns = ("seconds_per_round", "plain_seconds_per_round", "ratio")
    shown = (", ".join(map("{:.2f}".format, own[column])) for column in columns)
    assert f"| {name} | {' | '.join(shown)} |" in PAGE


@pytest.mark.parametrize("row", [*GPU.itertuples()], ids=GPU.workload)
def test_rounds_on_a_gpu(row):
    assert f"{row.ratio:.1f} ({row.workload}" in README
    seconds = f"{row.seconds_per_round:.3f} | {row.plain_seconds_per_round:.3f} | {row.ratio:.1f}"
    shown = f"{row.engine} | {seconds} | {row.floor_share:.0%} | {row.evaluation_seconds:.3f}"
    assert f"| {row.workload} | {shown} |" in PAGE


def test_the_same_bits_each_time_take_longer():
    rows = NOTED[(NOTED.section == "An NVIDIA H200") & (NOTED.measured == "seconds a round")]
    means = rows.value.astype(float).groupby(rows.what).mean()
    assert f"with which w1 takes {means['all deterministic'] / means['the fastest']:.1f} times as long." in README


def test_what_is_said_of_others_is_what_was_measured():
    peers = load_script(SPEED / "peers" / "peers.py")
    rows, text = pd.read_csv(peers.CSV), peers.PAGE.read_text(encoding="utf-8")
    assert f"\n\n{peers.table(rows)}\n\n<!-- seconds: end -->" in text
    of = [(what, side) for what in ("seconds", "tested") for side in ("pfllib", "flower")]
    numbers = [f"{peers.ratios(rows, what, 'w1', side).median():.1f}" for what, side in of]
    said = (
        "PFLlib takes {} times as long for w1 and Flower {} times, at equal accuracy, and with the evaluation after a "
    )
    assert (said + "round {} and {} times").format(*numbers) in README
    for method in ("fedavg", "fedprox", "fedproto"):  # and that it comes to the same
        values = rows[rows.workload == method].groupby(["what", "side"]).value
        ours, theirs = (values.get_group(("accuracy", side)) for side in ("fedcli", "pfllib"))
        assert abs(ours.mean() - theirs.mean()) < min(ours.std(), theirs.std())
        assert values.get_group(("difference", "pfllib")).iloc[1] < 3e-5  # of the median model


def test_the_rounds_of_a_side_are_measured_on_the_clients_that_all_sides_read(tmp_path, monkeypatch):
    peers = load_script(SPEED / "peers" / "peers.py")
    small = {"dataset": "digits", "backbone": "cnn-small", "num_clients": 4, "cohort_size": 2, "train_examples": 400}
    monkeypatch.setitem(peers.WORKLOADS, "w2", {**peers.WORKLOADS["w2"], **small})
    monkeypatch.setattr(peers, "CSV", tmp_path / "peers.csv")
    peers.measure("w2", {"fedcli": sys.executable}, 7, "")
    rows = pd.read_csv(peers.CSV)
    assert [*rows] == [*pd.read_csv(SPEED / "peers" / "peers.csv")]
    assert len(rows) == peers.ROUNDS - 2
    assert (rows.value > 0).all()
    peers.write_clients(tmp_path, peers.WORKLOADS["w2"])
    train = [peers.np.load(file, allow_pickle=True)["data"].item() for file in tmp_path.glob("dataset/train/*.npz")]
    assert sum(len(images["y"]) for images in train) == 400 - 4 * 14  # a seventh of each is for testing
    assert {images["x"].shape[1:] for images in train} == {(1, 8, 8)}
