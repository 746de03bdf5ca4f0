"""The page of speed, and what the README quotes of it, say what the CSV files beside the page do."""

import csv
import re
from pathlib import Path
from statistics import fmean, median

import pytest

from tests.programs import load_script

ROOT = Path(__file__).parent.parent
SPEED = ROOT / "results" / "speed"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (SPEED / "README.md").read_text(encoding="utf-8")


def rows_of(name):
    (file,) = SPEED.glob(name)
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def test_every_number_that_was_noted_stands_on_the_page():
    numbers = set(re.findall(r"[\d.,]*\d", re.sub(r"(?<=\d),(?=\d{3})", "", PAGE)))
    earlier = [row for row in rows_of("noted.csv") if row["what"].endswith(" before")]  # of which the page says less
    assert earlier
    assert [row for row in rows_of("noted.csv") if row not in earlier and row["value"].rstrip("%") not in numbers] == []


@pytest.mark.parametrize("name", ["w1", "w2"])
def test_rounds_on_a_cpu(name):
    own = [row for row in rows_of("cpu*torch*.csv") if row["workload"] == name]
    assert len(own) == 3
    assert f"{median(float(row['ratio']) for row in own):.2f} (`{name}`)" in README
    columns = ("seconds_per_round", "plain_seconds_per_round", "ratio")
    shown = (", ".join(f"{float(row[column]):.2f}" for row in own) for column in columns)
    assert f"| {name} | {' | '.join(shown)} |" in PAGE


@pytest.mark.parametrize("row", rows_of("nvidia-h200-*.csv"), ids=lambda row: row["workload"])
def test_rounds_on_a_gpu(row):
    assert f"{float(row['ratio']):.1f} (`{row['workload']}`" in README
    seconds = (f"{float(row[column]):.3f}" for column in ("seconds_per_round", "plain_seconds_per_round"))
    shown = (row["engine"], *seconds, f"{float(row['ratio']):.1f}", f"{float(row['floor_share']):.0%}")
    assert f"| {row['workload']} | {' | '.join(shown)} | {float(row['evaluation_seconds']):.3f} |" in PAGE


def test_the_same_bits_each_time_take_longer():
    rows = [row for row in rows_of("noted.csv") if row["section"] == "An NVIDIA H200"]
    fastest, same = (
        fmean(float(row["value"]) for row in rows if (row["what"], row["measured"]) == (what, "seconds a round"))
        for what in ("the fastest", "all deterministic")
    )
    assert f"with which `w1` takes {same / fastest:.1f} times as long." in README


def test_what_is_said_of_others_is_what_was_measured():
    peers = load_script(SPEED / "peers" / "peers.py")
    rows, page = peers.pd.read_csv(peers.CSV), (SPEED / "peers" / "README.md").read_text(encoding="utf-8")
    medians = peers.medians(rows)
    ratios = medians.div(medians["fedcli"], axis=0)
    for (workload, side), seconds in rows[rows.what == "seconds"].groupby(["workload", "side"]).value:
        columns = seconds, ratios.loc["seconds", workload][side]
        shown = (f" | {each.median():.2f} ({each.min():.2f}-{each.max():.2f})" for each in columns)
        assert re.search(
            f"{workload} [|] {side.partition('-')[0]}[^|]*{re.escape(''.join(shown))}", page, re.IGNORECASE
        )
    of = [(what, side) for what in ("seconds", "tested") for side in ("pfllib", "flower")]
    numbers = [f"{ratios.loc[what, 'w1'][side].median():.1f}" for what, side in of]
    said = "PFLlib takes {} times as long as fedcli for `w1` and Flower {} times, at equal accuracy, and with the "
    assert (said + "evaluation after a round {} and {} times").format(*numbers) in " ".join(README.split())
    large, small = (f"{ratios.loc['seconds', workload]['fluke'].median():.1f}" for workload in ("large", "small"))
    assert f"fluke takes {large} times as long with 1.66 million parameters and {small} times with 21,840." in README
    ends = medians.loc["end"]
    for workload in ("large", "small"):
        accuracies = ends.loc[workload].mean()
        for side in ("fedcli", "fluke"):
            assert re.search(f"{workload} [|] {side} [|].*[|] {100 * accuracies[side]:.2f} [|]", page)
        assert abs(accuracies["fedcli"] - accuracies["fluke"]) < 0.005
    for method in ("fedavg", "fedprox", "fedproto"):  # and that it comes to the same
        values = rows[rows.workload == method].groupby(["what", "side"]).value
        ours, theirs = (values.get_group(("accuracy", side)) for side in ("fedcli", "pfllib"))
        assert abs(ours.mean() - theirs.mean()) < min(ours.std(), theirs.std())
        assert values.get_group(("difference", "pfllib")).iloc[1] < 3e-5  # of the median model


def test_the_rounds_of_a_side_are_measured_on_the_clients_that_all_sides_read(tmp_path, monkeypatch):
    peers, sides = (load_script(SPEED / "peers" / f"{name}.py") for name in ("peers", "sides"))
    small = {"dataset": "digits", "backbone": "cnn-small", "num_clients": 4, "cohort_size": 2, "train_examples": 400}
    monkeypatch.setitem(peers.WORKLOADS, "w2", {**peers.WORKLOADS["w2"], **small})
    monkeypatch.setattr(peers, "CSV", tmp_path / "peers.csv")
    peers.measure("w2", ["fedcli"], 7, "", "")
    rows = peers.pd.read_csv(peers.CSV)
    assert [*rows] == [*peers.pd.read_csv(SPEED / "peers" / "peers.csv")]
    assert [*rows.what] == ["seconds"] * (peers.ROUNDS - 2) + ["end"]
    assert (rows.value > 0).all()
    peers.write_clients(tmp_path, peers.WORKLOADS["w2"])
    train = sides.user_data(str(tmp_path), "train")
    assert sum(map(len, train)) == 400 - 4 * 14  # a seventh of each is for testing
    assert {images.tensors[0].shape[1:] for images in train} == {(1, 8, 8)}
