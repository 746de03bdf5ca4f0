"""The pages of speed, and what the README quotes of them, say what the CSV files beside the pages do."""

import csv
import re
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
SPEED = ROOT / "results" / "speed"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (SPEED / "README.md").read_text(encoding="utf-8")
TRIALS = (SPEED / "trials.md").read_text(encoding="utf-8")
THOUSANDS_COMMA = r"(?<=\d),(?=\d{3})"


def read_rows(pattern):
    """Reads the rows of the only file beside the page whose name has this pattern."""
    (file,) = SPEED.glob(pattern)
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


NOTED_ROWS = read_rows("noted.csv")


def test_every_number_that_was_noted_stands_on_a_page():
    numbers = set(re.findall(r"[\d.,]*\d", re.sub(THOUSANDS_COMMA, "", PAGE + TRIALS)))
    earlier = [row for row in NOTED_ROWS if row["what"].endswith(" before")]  # of which the pages say less
    assert earlier
    of_now = [row for row in NOTED_ROWS if row not in earlier]
    assert [row for row in of_now if row["value"].rstrip("%") not in numbers] == []


class TablePlace(NamedTuple):
    """Where a table stands on a page."""

    passage: str
    number: int  # among the tables of the passage, from 0


IN_WORDS = TablePlace("Trials of speed", 0)  # what was tried
FROM_OTHER_FILES = {
    TablePlace("Two cores of an Intel Xeon", 0),
    TablePlace("Clients and batch sizes", 0),
    TablePlace("An NVIDIA H200", 0),
    TablePlace("Other toolkits", 0),
}
WITHOUT_ROWS = {
    TablePlace("Flat parameters and live taps", 2),
    TablePlace("Testing", 2),
    TablePlace("Kernels and bytes of a joint step", 0),
    TablePlace("Convolutions of few places", 0),
}


def numbers_in_cells(lines):
    """Returns the numbers in the cells of a table's lines, but for those of the first column and in brackets."""
    numbers = []
    for line in lines:
        cells = line.strip("|").split("|")
        for cell in cells[1:]:
            text = re.sub(r"\(.*?\)", "", cell).strip()
            if re.fullmatch(r"[\d.,%]+(?:(?:, | to )[\d.,]+%?)*", text):
                numbers += re.split(", | to ", re.sub(THOUSANDS_COMMA, "", text))
    return numbers


def numbers_of_tables(page):
    """Returns the numbers in every table of a page, by the place of the table."""
    numbers_by_place = {}
    passage = ""
    num_tables = 0  # of the passage so far
    for block in page.split("\n\n"):
        heading = re.match(r"#+ (.+)|\*\*(.+?)\.?\*\*", block)
        if heading:
            passage = heading[1] or heading[2]
            num_tables = 0
        if block.startswith("|"):
            lines_below_head = block.splitlines()[2:]
            place = TablePlace(passage, num_tables)
            assert place not in numbers_by_place, "two passages have one heading"
            numbers_by_place[place] = numbers_in_cells(lines_below_head)
            num_tables += 1
    return numbers_by_place


def test_every_number_in_a_table_of_the_pages_was_noted_or_the_page_says_that_it_was_not():
    tables = numbers_of_tables(f"{PAGE}\n{TRIALS}")
    assert tables.pop(IN_WORDS) == []
    assert tables.keys() > FROM_OTHER_FILES | WITHOUT_ROWS
    for place, numbers in tables.items():
        noted = {row["value"] for row in NOTED_ROWS if row["section"] == place.passage}
        missing = [value for value in numbers if value not in noted]
        if place in FROM_OTHER_FILES | WITHOUT_ROWS:
            assert missing, place
        else:
            assert numbers, place
            assert missing == [], place
    left_out = (
        "the third table of flat parameters, the third table of testing, kernels, operations and memory of a joint "
        "step, and convolutions of few places."
    )
    assert left_out in " ".join(PAGE.split())


@pytest.mark.parametrize("name", ["w1", "w2"])
def test_rounds_on_a_cpu_are_on_the_page_and_their_median_ratio_in_the_readme(name):
    rows = [row for row in read_rows("cpu*torch*.csv") if row["workload"] == name]
    assert len(rows) == 3
    ratio = median(float(row["ratio"]) for row in rows)
    assert f"{ratio:.2f} (`{name}`)" in README

    def cell(column):
        return ", ".join(f"{float(row[column]):.2f}" for row in rows)

    line = f"| {name} | {cell('seconds_per_round')} | {cell('plain_seconds_per_round')} | {cell('ratio')} |"
    assert line in PAGE


def test_clients_and_batch_sizes_on_the_page_are_those_of_the_csv_file():
    rows = [row for row in read_rows("cpu*torch*.csv") if row["workload"].startswith("w1 K=")]
    lines = []
    for row in rows:
        assert row["workload"] == f"w1 K={row['cohort_size']} B={row['batch_size']}"
        cells = [
            row["cohort_size"],
            row["batch_size"],
            f"{float(row['seconds_per_round']):.2f}",
            f"{float(row['plain_seconds_per_round']):.2f}",
            f"{float(row['ratio']):.2f}",
            f"{float(row['bound_share']):.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    assert len(lines) == 10
    assert "\n".join(lines) in PAGE


@pytest.mark.parametrize("row", read_rows("nvidia-h200-*.csv"), ids=lambda row: row["workload"])
def test_rounds_on_a_gpu_are_on_the_page_and_their_ratio_in_the_readme(row):
    ratio = f"{float(row['ratio']):.1f}"
    assert f"{ratio} (`{row['workload']}`" in README
    cells = [
        row["workload"],
        row["engine"],
        f"{float(row['seconds_per_round']):.3f}",
        f"{float(row['plain_seconds_per_round']):.3f}",
        ratio,
        f"{float(row['bound_share']):.0%}",
        f"{float(row['evaluation_seconds']):.3f}",
    ]
    assert f"| {' | '.join(cells)} |" in PAGE


def test_what_is_said_of_fedfa_and_fedsa_on_a_gpu_was_noted():
    value_of = {row["what"]: row["value"] for row in NOTED_ROWS if row["section"] == "Runs on an H200"}
    fastest = value_of["a round of FedFA on Fashion-MNIST with shares of 0.5, the fastest operations"]
    on_one_core = value_of["the same round on one core"]
    to_round_12 = value_of["FedFA's curve beside the CPU's, the most in rounds 1 to 12"]
    to_round_15 = value_of["FedFA's curve beside the CPU's, the most in rounds 1 to 15"]
    of_fedsa = value_of["a round of FedSA with 10 of 100 clients of CIFAR-10's size"]
    by_mps = value_of["ten runs of FedFA at once by MPS, two classes a client, deterministic convolutions"]
    sentences = (
        f"A round of FedFA on Fashion-MNIST with `dirichlet:0.5` took {fastest} seconds on this GPU by the fastest "
        f"operations, against {on_one_core} on a core of an AMD EPYC. The first 12 rounds of that run's curve were "
        f"within {to_round_12} points of the CPU's, the first 15 within {to_round_15}; its record was not kept. A "
        f"round of FedSA with 10 of 100 clients of CIFAR-10's size took {of_fedsa} seconds. Ten runs of FedFA at once "
        "with two classes a client, by NVIDIA's MPS and with deterministic convolutions, came to "
        f"{by_mps} rounds a second."
    )
    assert sentences in " ".join(TRIALS.split())


def test_the_readme_says_how_much_longer_the_same_bits_each_time_take():
    rows = [row for row in NOTED_ROWS if row["section"] == "An NVIDIA H200"]

    def seconds_of_round(operations):
        return fmean(float(row["value"]) for row in rows if row["what"] == operations)

    ratio = seconds_of_round("all deterministic") / seconds_of_round("the fastest")
    assert f"with which `w1` takes {ratio:.1f} times as long." in README
