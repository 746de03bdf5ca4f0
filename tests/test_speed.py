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
OF_SEVERAL_RUNS = ", one of several runs"  # of what was noted, of which the page has the least and the largest


def find_passages(page):
    """Returns the text of a page below each heading, up to the next."""
    passages = {}
    for passage in re.split(r"^#+ ", page, flags=re.MULTILINE)[1:]:
        heading, _, text = passage.partition("\n")
        assert heading not in passages, "two passages have one heading"
        passages[heading] = text
    return passages


def find_numbers(text):
    return set(re.findall(r"[\d.,]*\d", re.sub(THOUSANDS_COMMA, "", text)))


def test_every_number_that_was_noted_stands_below_the_heading_that_it_is_noted_for():
    passages = find_passages(f"{PAGE}\n{TRIALS}")
    of_several_runs = [row for row in NOTED_ROWS if row["what"].endswith(OF_SEVERAL_RUNS)]
    assert of_several_runs
    others = [row for row in NOTED_ROWS if row not in of_several_runs]
    assert {row["section"] for row in NOTED_ROWS} <= passages.keys()
    missing = [row for row in others if row["value"].rstrip("%") not in find_numbers(passages[row["section"]])]
    assert missing == []


@pytest.mark.parametrize("name", ["w1", "w2"])
def test_of_several_runs_the_page_has_the_least_and_the_largest(name):
    def cell(measured):
        rows = [row for row in NOTED_ROWS if row["what"] == name + OF_SEVERAL_RUNS and row["measured"] == measured]
        values = [row["value"] for row in rows]
        return f"{min(values, key=float)} to {max(values, key=float)}"

    assert f"| {name} | {cell('engine, seconds a round')} | {cell('ratio')} |" in PAGE


class TablePlace(NamedTuple):
    """Where a table stands on a page."""

    passage: str
    number: int  # among the tables of the passage, from 0


SUMMARY = TablePlace("Trials of speed", 0)  # of numbers from all sections
OF_WORKLOADS = TablePlace("What is measured", 0)  # see tests/test_workloads.py
WITHOUT_NUMBERS = {TablePlace("How to run it again", 0), TablePlace("Versions that were compared", 0)}
FROM_OTHER_FILES = {
    TablePlace("Two cores of an Intel Xeon", 0),
    TablePlace("Clients and batch sizes", 0),
    TablePlace("An NVIDIA H200", 0),
    TablePlace("Other toolkits", 0),
    TablePlace("Lower bound of a test", 0),
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
    for passage, text in find_passages(page).items():
        tables = [block for block in text.split("\n\n") if block.startswith("|")]
        for number, table in enumerate(tables):
            lines_below_head = table.splitlines()[2:]
            numbers_by_place[TablePlace(passage, number)] = numbers_in_cells(lines_below_head)
    return numbers_by_place


def test_every_number_in_a_table_of_the_pages_was_noted_or_is_of_another_file():
    tables = numbers_of_tables(f"{PAGE}\n{TRIALS}")
    noted_anywhere = {row["value"] for row in NOTED_ROWS}
    summary = tables.pop(SUMMARY)
    assert summary
    assert [value for value in summary if value not in noted_anywhere] == []
    assert tables.pop(OF_WORKLOADS)
    for place in WITHOUT_NUMBERS:
        assert tables.pop(place) == []
    assert tables.keys() > FROM_OTHER_FILES
    for place, numbers in tables.items():
        noted = {row["value"] for row in NOTED_ROWS if row["section"] == place.passage}
        missing = [value for value in numbers if value not in noted]
        if place in FROM_OTHER_FILES:
            assert missing, place
        else:
            assert numbers, place
            assert missing == [], place


@pytest.mark.parametrize("name", ["w1", "w2"])
def test_rounds_on_a_cpu_are_on_the_page_and_their_median_ratio_in_the_readme(name):
    rows = [row for row in read_rows("cpu*torch*.csv") if row["workload"] == name]
    assert len(rows) == 3
    ratio = median(float(row["ratio"]) for row in rows)
    assert f"{ratio:.2f} (`{name}`)" in README

    for run, row in enumerate(rows, start=1):
        test_seconds = f"{float(row['evaluation_seconds']):.2f}"
        cells = [
            name,
            str(run),
            f"{float(row['seconds_per_round']):.2f}",
            f"{float(row['plain_seconds_per_round']):.2f}",
            f"{float(row['ratio']):.2f}",
            f"{float(row['bound_share']):.0%}",
            test_seconds,
        ]
        assert f"| {' | '.join(cells)} |" in PAGE
        bound_of_test = f"{float(row['evaluation_bound_seconds']):.2f}"
        assert f"| {name} | {run} | {test_seconds} | {bound_of_test} |" in TRIALS


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
        row["way"],
        f"{float(row['seconds_per_round']):.3f}",
        f"{float(row['plain_seconds_per_round']):.3f}",
        ratio,
        f"{float(row['bound_share']):.0%}",
        f"{float(row['evaluation_seconds']):.3f}",
    ]
    assert f"| {' | '.join(cells)} |" in PAGE


def test_what_is_said_of_fedfa_and_fedsa_on_a_gpu_was_noted():
    value_of = {row["what"]: row["value"] for row in NOTED_ROWS if row["section"] == "Methods on an H200"}
    fastest = value_of["a round of FedFA on Fashion-MNIST with shares of 0.5, the fastest operations"]
    on_one_core = value_of["the same round on one core"]
    to_round_12 = value_of["FedFA's curve beside the CPU's, the most in rounds 1 to 12"]
    to_round_15 = value_of["FedFA's curve beside the CPU's, the most in rounds 1 to 15"]
    of_fedsa = value_of["a round of FedSA with 10 of 100 clients of CIFAR-10's size"]
    by_mps = value_of["ten runs of FedFA at once by MPS, two classes a client, deterministic convolutions"]
    assert f"| FedFA | Fashion-MNIST, `dirichlet:0.5` | {fastest} | {on_one_core} |" in PAGE
    assert f"| FedSA | of CIFAR-10's size, 10 of 100 clients | {of_fedsa} | not timed |" in PAGE
    sentences = (
        f"The learning curve of that run of FedFA was within {to_round_12} points of the CPU's in the first 12 rounds. "
        f"In the first 15 rounds it was within {to_round_15} points. Its record was not kept. Ten runs of FedFA at "
        f"once, with two classes a client, came to {by_mps} rounds a second, by NVIDIA's MPS and with deterministic "
        "convolutions."
    )
    assert sentences in " ".join(PAGE.split())


def test_the_pages_say_how_much_longer_the_same_bits_each_time_take():
    rows = [row for row in NOTED_ROWS if row["section"] == "What deterministic operations cost"]

    def seconds_of_round(operations):
        return fmean(float(row["value"]) for row in rows if row["what"] == operations)

    ratio = seconds_of_round("all deterministic") / seconds_of_round("the fastest")
    assert f"with which `w1` takes {ratio:.1f} times as long." in README
    assert f"with them `w1` takes {ratio:.1f} times as long in the engine" in PAGE
