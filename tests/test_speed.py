"""The numbers of the page of speed, and those that the README quotes of it, are those of the CSV files beside the page.

The numbers of other toolkits are in `test_peers.py`, and the sizes of the workloads in `test_workloads.py`.
"""

import csv
import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from fedcli.bench.workloads import find_workload

ROOT = Path(__file__).parent.parent
SPEED = ROOT / "results" / "speed"
README = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
PAGE = (SPEED / "README.md").read_text(encoding="utf-8")
THOUSANDS_COMMA = r"(?<=\d),(?=\d{3})"
MODE = "Mode"
SUMMARY_OF_METHOD = "What it does beside local training"
SAME_BITS = "The same two rounds, trained twice, end in"
TITLES_WITHOUT_NUMBERS = {MODE, SUMMARY_OF_METHOD, SAME_BITS}
XEON_SECTION = "Two cores of an Intel Xeon"
EPYC_SECTION = "Two cores of an AMD EPYC"
PRINTED_SECTIONS = [
    EPYC_SECTION, "A small network on both cores", "Other methods", "bf16 on a CPU", "Deterministic operations",
]  # fmt: skip
GPU_SECTION = "Beside the plain loop, non-deterministic"


def read_rows(pattern):
    """Reads the rows of the only file beside the page whose name has this pattern."""
    (file,) = SPEED.glob(pattern)
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def read_tables(page):
    """Returns the only table of each section that has one, by the heading: its lines, each as cells by their titles."""
    tables = {}
    for section in re.split(r"^#+ ", page, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        lines = [split_line(line) for line in text.splitlines() if line.startswith("|")]
        if lines:
            titles, _, *cells_of_lines = lines
            assert heading not in tables, "two sections have one heading"
            tables[heading] = [dict(zip(titles, cells, strict=True)) for cells in cells_of_lines]
    return tables


def split_line(line):
    """Returns the cells of a line of a table, without marks of code and commas in numbers."""
    plain = re.sub(THOUSANDS_COMMA, "", line.replace("`", ""))
    return [cell.strip() for cell in plain.strip("|").split("|")]


PRINTED_ROWS = read_rows("printed.csv")
CPU_ROWS = read_rows("cpu*torch*.csv")
GPU_ROWS = read_rows("nvidia-h200-*.csv")
TABLES = read_tables(PAGE)
FIRST_LINES = " ".join(PAGE.partition("## What is timed")[0].split())


def format_range(numbers, digits):
    """Returns the least and the largest of numbers, as a page has them."""
    return f"{min(numbers):.{digits}f}-{max(numbers):.{digits}f}"


# Numbers that were printed only


class Place(NamedTuple):
    """The place of a cell on the page."""

    section: str  # the heading above the table
    row: str  # the first cell of the line
    column: str  # the title


def find_place(printed):
    """Returns the place of the cell that a number was printed for."""
    return Place(printed["section"], printed["row"], printed["column"])


def find_printed(place):
    """Returns the numbers that were printed for a cell, by their statistic."""
    return {printed["statistic"]: printed["value"] for printed in PRINTED_ROWS if find_place(printed) == place}


def format_printed(values):
    """Returns the text of the cell that has these numbers, which are given by their statistic."""
    if "least median" in values:
        return f"{values['least median']}-{values['largest median']}"
    if "largest" in values:
        return f"{values['median']} ({values['least']}-{values['largest']})"
    (value,) = values.values()
    return value


def test_each_printed_number_has_a_place_of_its_own():
    places = [(*find_place(printed), printed["statistic"]) for printed in PRINTED_ROWS]
    assert len(places) == len(set(places))


def test_each_table_of_measurements_is_held_to_a_file():
    not_of_these_files = {"What is timed", "Other toolkits"}
    assert {*TABLES} == {*PRINTED_SECTIONS, XEON_SECTION, GPU_SECTION, *not_of_these_files}


def test_each_printed_number_is_in_its_cell_and_no_cell_has_another():
    places = set()
    for section in PRINTED_SECTIONS:
        for line in TABLES[section]:
            title_of_rows, *columns = line
            for column in columns:
                place = Place(section, line[title_of_rows], column)
                values = find_printed(place)
                if column in TITLES_WITHOUT_NUMBERS:
                    assert not values
                else:
                    places.add(place)
                    assert line[column] == format_printed(values)
    assert places == {find_place(printed) for printed in PRINTED_ROWS}


def read_printed_column(section, column):
    """Returns the texts of a column of a section's table by the first cell of the line."""
    lines = TABLES[section]
    title_of_rows, *_ = lines[0]
    return {line[title_of_rows]: line[column] for line in lines}


# Numbers of the other files


def format_timing(row, digits_of_seconds, digits_of_ratio):
    """Returns the cells of a row of a file of `fedcli bench` by their titles on the page."""

    def format_seconds(column):
        return f"{float(row[column]):.{digits_of_seconds}f}"

    return {
        "Engine, s": format_seconds("seconds_per_round"),
        "Plain loop, s": format_seconds("plain_seconds_per_round"),
        "Ratio": f"{float(row['ratio']):.{digits_of_ratio}f}",
        "Estimate, %": f"{100 * float(row['estimate_share']):.0f}",
        "Test, s": format_seconds("test_seconds"),
    }


def test_rounds_on_a_cpu_are_on_the_page():
    lines = []
    for name in ("w1", "w2"):
        rows = [row for row in CPU_ROWS if row["workload"] == name]
        assert len(rows) == 3
        for call, row in enumerate(rows, start=1):
            timing = format_timing(row, digits_of_seconds=2, digits_of_ratio=2)
            lines.append({"Workload": name, "Call": str(call), **timing})
            assert (row["hardware"], row["threads"], row["repeats"]) == ("Intel(R) Xeon(R) Processor", "2", "5")
            assert (row["images"], row["torch"]) == ("real", "2.13.0+cpu")
    assert TABLES[XEON_SECTION] == lines


def test_the_page_has_the_ratios_for_other_numbers_of_clients_and_batch_sizes():
    rows = [row for row in CPU_ROWS if row["workload"].startswith("w1 K=")]
    assert len(rows) == 10
    for row in rows:
        assert row["workload"] == f"w1 K={row['cohort_size']} B={row['batch_size']}"
        assert (row["local_epochs"], row["repeats"]) == ("1", "2")
    cohort_sizes = [int(row["cohort_size"]) for row in rows]
    batch_sizes = [int(row["batch_size"]) for row in rows]
    ratios = [float(row["ratio"]) for row in rows]
    sentence = (
        f"For `w1` with one local epoch, and {min(cohort_sizes)} to {max(cohort_sizes)} clients a round or batches of "
        f"{min(batch_sizes)} to {max(batch_sizes)}, the ratio is {format_range(ratios, 2)} (two rounds of each)."
    )
    assert sentence in " ".join(PAGE.split())


def test_rounds_on_a_gpu_are_on_the_page_and_their_ratios_in_the_readme():
    lines = []
    for row in GPU_ROWS:
        workload = find_workload(row["workload"])
        name = workload.name
        if int(row["local_epochs"]) != workload.local_epochs:
            assert row["local_epochs"] == "1"
            name += ", 1 epoch"
        timing = format_timing(row, digits_of_seconds=3, digits_of_ratio=1)
        lines.append({"Workload": name, MODE: row["mode"], **timing})
        images = "random" if workload.name == "w3" else "real"
        assert (row["hardware"], row["torch"], row["images"]) == ("NVIDIA H200", "2.11.0+cu130", images)
    assert TABLES[GPU_SECTION] == lines
    w1, w2, w3 = (line["Ratio"] for line in lines)
    assert f"the plain loop took {w1} (`w1`), {w2} (`w2`) and {w3} times as long (`w3`, 1 epoch)." in README


# What is said of the tables


def read_ratios(section):
    """Returns the ratios of a section's table by the first cell of the line; both ends of a range."""
    ratios = defaultdict(list)
    for line in TABLES[section]:
        first_cell = next(iter(line.values()))
        ratios[first_cell] += map(float, re.findall(r"[\d.]+", line["Ratio"]))
    return ratios


def test_the_first_lines_of_the_page_are_what_its_tables_say():
    on_two_cores = []
    for section in (XEON_SECTION, EPYC_SECTION):
        ratios = read_ratios(section)
        on_two_cores += [*ratios["w1"], *ratios["w2"]]
    for text in (FIRST_LINES, README):
        assert f"takes {format_range(on_two_cores, 2)} times as long as fedcli for" in text

    on_a_gpu = [ratio for ratios in read_ratios(GPU_SECTION).values() for ratio in ratios]
    spread = f"{min(on_a_gpu):.1f}-{max(on_a_gpu):.0f}"
    assert f"took {spread} times as long for `w1`, `w2` and an epoch of `w3`." in FIRST_LINES

    of_others = []
    for line in TABLES["Other toolkits"]:
        if line["Round"] == "without test":
            of_others += [float(line[side]) for side in ("PFLlib", "Flower", "fluke") if line[side]]
    spread = format_range(of_others, 1)
    assert f"take {spread} times as long as fedcli on two CPU cores, without the test" in FIRST_LINES
    page_of_peers = " ".join((SPEED / "peers" / "README.md").read_text(encoding="utf-8").split())
    assert f"On two CPU cores {spread} times as long, without the test after it." in page_of_peers


def test_the_pages_have_the_ratios_of_the_small_network():
    ratios = read_printed_column("A small network on both cores", "Ratio")
    sentence = f"For `w4` it takes {ratios['two']} times as long where fedcli has a process on each core"
    assert sentence in FIRST_LINES
    assert f"and {ratios['one']} times where each has one." in FIRST_LINES
    for_w4 = (
        f"for `w4` the plain loop takes {ratios['two']} times as long, on one core, and {ratios['one']} times as long"
    )
    assert for_w4 in README


def test_the_pages_say_how_long_deterministic_operations_take():
    seconds = read_printed_column("Deterministic operations", "Engine, s")
    non_deterministic = fmean(map(float, seconds["non-deterministic"].split("-")))
    ratio = float(seconds["deterministic"]) / non_deterministic
    for text in (FIRST_LINES, README):
        assert f"a round of `w1` takes {seconds['deterministic']} seconds" in text
        assert f"was {ratio:.1f} times as fast for `w1`" in text
