"""The page of speed, and what the README quotes of it, say what the CSV files beside the page do."""

import csv
import re
from collections import defaultdict
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import pytest

from fedcli.bench.workloads import find_workload

ROOT = Path(__file__).parent.parent
SPEED = ROOT / "results" / "speed"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (SPEED / "README.md").read_text(encoding="utf-8")
THOUSANDS_COMMA = r"(?<=\d),(?=\d{3})"
NUMBER = r"[\d.]+%?"


def read_rows(pattern):
    """Reads the rows of the only file beside the page whose name has this pattern."""
    (file,) = SPEED.glob(pattern)
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


NOTED_ROWS = read_rows("noted.csv")
WITHOUT_MEASUREMENTS = {"What is timed", "On your machine"}  # the first: see tests/test_workloads.py
WITHOUT_NUMBERS = {"what it does beside local training"}  # columns
FROM_OTHER_FILES = {"Two cores of an Intel Xeon", "Clients and batch sizes", "An NVIDIA H200", "Other toolkits"}


class Cell(NamedTuple):
    """A cell of a table on a page, by what `noted.csv` calls its place."""

    section: str  # the heading above the table
    row: str  # the first cell of the line
    column: str  # the title
    text: str


def read_cells(page):
    """Returns the cells of all tables of a page behind the first column."""
    cells = []
    headings = set()
    for passage in re.split(r"^#+ ", page, flags=re.MULTILINE)[1:]:
        heading, _, text = passage.partition("\n")
        assert heading not in headings, "two passages have one heading"
        headings.add(heading)
        tables = [block for block in text.split("\n\n") if block.startswith("|")]
        for table in tables:
            titles, _, *lines = (split_line(line) for line in table.splitlines())
            for row, *texts in lines:
                for title, cell_text in zip(titles[1:], texts, strict=True):
                    cells.append(Cell(heading, row, title, cell_text))
    return cells


def split_line(line):
    """Returns the cells of a line of a table, without marks of code and commas in numbers."""
    plain = re.sub(THOUSANDS_COMMA, "", line.replace("`", ""))
    return [cell.strip() for cell in plain.strip("|").split("|")]


def find_noted(cell):
    """Returns the values that were noted for a cell, by their statistic."""
    values = defaultdict(list)
    for noted in NOTED_ROWS:
        if find_place(noted) == (cell.section, cell.row, cell.column):
            percent = "%" if noted["unit"] == "%" else ""
            values[noted["statistic"]].append(noted["value"] + percent)
    return values


def find_place(noted):
    """Returns the section, row and column of the cell that a number was noted for."""
    row, column = split_line(f"|{noted['row']}|{noted['column']}|")
    return noted["section"], row, column


def format_noted(values):
    """Returns the texts that a cell may have: the median of one statistic, or a range."""
    texts = set()
    for of_statistic in values.values():
        is_single = len(of_statistic) == 1
        texts.add(of_statistic[0] if is_single else f"{median(map(float, of_statistic)):.2f}")
    ordered = sorted(chain.from_iterable(values.values()), key=lambda value: float(value.rstrip("%")))
    if len(ordered) > 1:
        texts.add(f"{ordered[0]}-{ordered[-1]}")
    if {"median", "least", "largest"} <= values.keys():
        (middle,), (least,), (largest,) = values["median"], values["least"], values["largest"]
        texts.add(f"{middle} ({least}-{largest})")
    return texts


def test_each_number_that_was_noted_has_a_place_of_its_own():
    places = [tuple(row[name] for name in ("section", "row", "column", "statistic", "run")) for row in NOTED_ROWS]
    assert len(places) == len(set(places)) == 65


def test_each_number_that_was_noted_is_of_a_cell_of_the_page():
    places = [(cell.section, cell.row, cell.column) for cell in read_cells(PAGE)]
    for noted in NOTED_ROWS:
        assert places.count(find_place(noted)) == 1, noted


def test_every_number_in_a_table_was_noted_for_its_cell_or_is_of_another_file():
    cells = [cell for cell in read_cells(PAGE) if cell.section not in WITHOUT_MEASUREMENTS]
    assert {cell.section for cell in cells} > FROM_OTHER_FILES
    sections_with_numbers = set()
    for cell in cells:
        texts = format_noted(find_noted(cell))
        if cell.section in FROM_OTHER_FILES:
            assert not texts, cell
        elif texts or (re.fullmatch(rf"{NUMBER}( .*)?", cell.text) and cell.column not in WITHOUT_NUMBERS):
            assert cell.text in texts, cell
            sections_with_numbers.add(cell.section)
    assert sections_with_numbers == {cell.section for cell in cells} - FROM_OTHER_FILES


def find_spread(numbers, digits=1):
    return f"{min(numbers):.{digits}f}-{max(numbers):.{digits}f}"


def test_the_first_lines_of_the_page_are_what_its_tables_say():
    cells = read_cells(PAGE)
    ratios = defaultdict(list)
    for cell in cells:
        if cell.column == "ratio":
            numbers = re.findall(NUMBER, cell.text)
            ratios[cell.section].extend(map(float, numbers))
    on_two_cores = ratios["Two cores of an Intel Xeon"] + ratios["Two cores of an AMD EPYC"]
    of_w4 = max(ratios["A small network on both cores"])
    on_a_gpu = ratios["An NVIDIA H200"]
    of_others = []
    for cell in cells:
        if cell.column in {"PFLlib", "Flower", "fluke"} and cell.text and "test" not in cell.row:
            of_others.append(float(cell.text))
    first_lines = " ".join(PAGE.partition("## What is timed")[0].split())
    spread = find_spread(on_two_cores)
    assert f"takes {spread} times as long as fedcli for the workloads `w1` and `w2` below." in first_lines
    assert f"For `w4` it takes {of_w4:.1f} times as long, where fedcli has two processes" in first_lines
    assert f"take {find_spread(of_others)} times as long as fedcli on two CPU cores, without the test" in first_lines
    spread = f"{min(on_a_gpu):.1f}-{max(on_a_gpu):.0f}"
    assert f"takes {spread} times as long for `w1`, `w2` and an epoch of `w3`" in first_lines


@pytest.mark.parametrize("name", ["w1", "w2"])
def test_rounds_on_a_cpu_are_on_the_page_and_their_median_ratio_in_the_readme(name):
    rows = [row for row in read_rows("cpu*torch*.csv") if row["workload"] == name]
    assert len(rows) == 3
    ratio = median(float(row["ratio"]) for row in rows)
    assert f"{ratio:.2f} (`{name}`)" in README

    for run, row in enumerate(rows, start=1):
        cells = [
            name,
            str(run),
            f"{float(row['seconds_per_round']):.2f}",
            f"{float(row['plain_seconds_per_round']):.2f}",
            f"{float(row['ratio']):.2f}",
            f"{float(row['estimate_share']):.0%}",
            f"{float(row['test_seconds']):.2f}",
        ]
        assert f"| {' | '.join(cells)} |" in PAGE


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
            f"{float(row['estimate_share']):.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    assert len(lines) == 10
    assert "\n".join(lines) in PAGE


@pytest.mark.parametrize("row", read_rows("nvidia-h200-*.csv"), ids=lambda row: row["workload"])
def test_rounds_on_a_gpu_are_on_the_page_and_their_ratio_in_the_readme(row):
    ratio = f"{float(row['ratio']):.1f}"
    assert f"{ratio} (`{row['workload']}`" in README
    workload = find_workload(row["workload"])
    name = workload.name
    if int(row["local_epochs"]) != workload.local_epochs:
        assert row["local_epochs"] == "1"
        name += ", 1 epoch"
    cells = [
        name,
        row["mode"],
        f"{float(row['seconds_per_round']):.3f}",
        f"{float(row['plain_seconds_per_round']):.3f}",
        ratio,
        f"{float(row['estimate_share']):.0%}",
        f"{float(row['test_seconds']):.3f}",
    ]
    assert f"| {' | '.join(cells)} |" in PAGE


def test_the_page_says_how_much_longer_deterministic_operations_take():
    rows = [row for row in NOTED_ROWS if row["section"] == "Deterministic operations"]

    def seconds_of_round(operations):
        return fmean(float(row["value"]) for row in rows if row["row"] == operations)

    ratio = seconds_of_round("all deterministic") / seconds_of_round("non-deterministic")
    assert f"with which `w1` takes {ratio:.1f} times as long." in README
    assert f"with them `w1` takes {ratio:.1f} times as long in the engine" in PAGE
    first_lines = " ".join(PAGE.partition("## What is timed")[0].split())
    assert f"with which `w1` takes {ratio:.1f} times as long in fedcli." in first_lines


def test_the_page_says_how_long_a_step_in_bf16_takes():
    def milliseconds_of_step(precision):
        (milliseconds,) = find_noted(Cell("bf16 on a CPU", precision, "milliseconds a step", text=""))["least"]
        return milliseconds

    assert f"| `float32` | {milliseconds_of_step('float32')} |" in PAGE
    assert f"| `bf16` | {milliseconds_of_step('bf16')} |" in PAGE
