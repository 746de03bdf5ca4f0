"""What the README shows works."""

import csv
import importlib.util
import re
from pathlib import Path
from statistics import fmean, median, stdev

import fedcli
from fedcli import registry, smoke
from tests import laws

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_method_of_the_readme_runs_and_reduces_to_fedavg(tmp_path):
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "METHOD" in block]
    file = tmp_path / "my_method.py"
    file.write_text(code)
    run = fedcli.run(str(file), protocol="fedfm:digits", train_examples=120, rounds=1, out=tmp_path / "run")
    assert run.record["rounds"][0]["terms"]["norm"] > 0
    laws.law_1_off_is_the_simpler_method(registry.find_method(str(file)))


def test_every_room_is_in_the_tree_and_every_method_in_the_table():
    rooms = [folder.parent.name for folder in (ROOT / "fedcli").glob("*/__init__.py")]
    assert len(rooms) == 7
    assert all(re.search(rf"^  {room}/ +\S", README, re.M) for room in rooms)
    modules = [file.stem for file in (ROOT / "fedcli").glob("*.py") if not file.stem.startswith("__")]
    (top,) = re.findall(r"^fedcli/ +(.*)$", README, re.M)
    assert all(module in top for module in modules)
    for method in registry.methods().values():
        assert f"| `{method.name}` |" in README
    built_in = {smoke.built_in(method)[0] for method in registry.methods().values()}
    for protocol in built_in:
        assert f"`{protocol}`" in README


def test_the_readme_and_the_page_say_how_fast_rounds_are():
    (file,) = ROOT.glob("results/speed/cpu*torch*.csv")
    page = (ROOT / "results/speed/README.md").read_text(encoding="utf-8")
    with file.open(encoding="utf-8", newline="") as text:
        rows = [row for row in csv.DictReader(text) if row["workload"] in ("w1", "w2")]
    for name in ("w1", "w2"):
        own = [row for row in rows if row["workload"] == name]
        assert len(own) == 3
        assert f"{median(float(row['ratio']) for row in own):.2f} ({name})" in README
        columns = ("seconds_per_round", "plain_seconds_per_round", "ratio")
        shown = (", ".join(f"{float(row[column]):.2f}" for row in own) for column in columns)
        assert f"| {name} | {' | '.join(shown)} |" in page
        assert all(float(row["floor_share"]) < 1 for row in own)


def test_the_readme_and_the_page_say_how_fast_rounds_are_on_a_gpu():
    page = (ROOT / "results/speed/README.md").read_text(encoding="utf-8")
    with (ROOT / "results/speed/nvidia-h200-torch2.11.0.csv").open(encoding="utf-8", newline="") as text:
        rows = {row["workload"]: row for row in csv.DictReader(text)}
    for name, row in rows.items():
        assert f"{float(row['ratio']):.1f} ({name}" in README
        engine, plain, tests = (
            f"{float(row[column]):.3f}"
            for column in ("seconds_per_round", "plain_seconds_per_round", "evaluation_seconds")
        )
        reached = f"{float(row['floor_share']):.0%}"
        shown = (row["engine"], engine, plain, f"{float(row['ratio']):.1f}", reached, tests)
        assert f"| {name} | {' | '.join(shown)} |" in page
    assert list(rows) == ["w1", "w2", "w3"]


def test_the_readme_says_how_much_longer_the_same_bits_each_time_take():
    with (ROOT / "results/speed/noted.csv").open(encoding="utf-8", newline="") as text:
        rows = [row for row in csv.DictReader(text) if row["section"] == "An NVIDIA H200"]
    fastest, same = (
        [float(row["value"]) for row in rows if (row["what"], row["measured"]) == (what, "seconds a round")]
        for what in ("the fastest", "all deterministic")
    )
    assert fastest
    assert f"a round of w1 takes {fmean(same) / fmean(fastest):.1f} times as long." in README


def test_what_is_said_of_others_is_what_was_measured():
    spec = importlib.util.spec_from_file_location("peers", ROOT / "results/speed/peers/peers.py")
    peers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(peers)
    rows, about = peers.read_rows()
    assert peers.PAGE.read_text(encoding="utf-8") == peers.page(rows, about)
    training, tested = (
        [f"{peers.ratio(rows, 'w1', side, what):.1f}" for side in ("pfllib", "flower", "flower-default")]
        for what in ("seconds", "tested")
    )
    said = "PFLlib {} and Flower {} times as long ({} with its defaults), and comes to the same; ".format(*training)
    assert said + "with the testing after it that each does by itself, {} and {} times ({})".format(*tested) in README
    for (what, method, side), turns in rows.items():  # and that it comes to the same
        if what == "difference":
            assert turns[0][1] < 3e-5  # of the median model
        elif what == "accuracy" and side != "fedcli":
            ours, theirs = ([v for (v,) in rows[what, method, each].values()] for each in ("fedcli", side))
            assert abs(fmean(ours) - fmean(theirs)) < min(stdev(ours), stdev(theirs))
