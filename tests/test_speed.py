"""Every number of the page of speed is one of a CSV beside it, or computed from one."""

import csv
import re
from collections import defaultdict
from pathlib import Path

SPEED = Path(__file__).parent.parent / "results" / "speed"
SHARES, AIM_OF_TESTING, AIM_OF_THREADS = "0.5", "1.3", "1.6"  # of settings
BEFORE = " before"  # runs of which the text has the least and the largest
NUMBERS = r"[\d.,]+%?(?:(?:, | to )[\d.,]+%?)*"  # a cell of a table that has nothing else


def rows_of(name):
    (file,) = SPEED.glob(name)
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def noted():
    """The numbers that were written down, by section, what was measured, and column of a table, empty for a text's."""
    found = defaultdict(list)
    for row in rows_of("noted.csv"):
        found[row["section"], row["what"], row["measured"]].append(row["value"])
    return found


def sections():
    """The text of each section, which begins with a heading or with bold words."""
    page = re.sub(r"\]\([^)]*\)", "]", (SPEED / "README.md").read_text(encoding="utf-8"))
    parts = re.split(r"(?m)^(?:##? (.+)\n|\*\*(.+?)\.?\*\*)", page)
    return {heading or bold: text for heading, bold, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True)}


def lines_of_tables(text):
    """By row and column, the cells of a section's tables; the row is what its first cell says."""
    for table in re.findall(r"(?m)(?:^\|.*\n)+", text):
        head, _, *lines = ([cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines())
        for first, *cells in lines:
            yield from ((first.replace("`", ""), column, cell) for column, cell in zip(head[1:], cells, strict=True))


def benched():
    """What `fedcli bench` has written, as the cells of the tables have it."""
    columns = {
        "engine, seconds a round": "seconds_per_round", "plain loop, seconds a round": "plain_seconds_per_round",
        "ratio": "ratio", "floor reached": "floor_share", "testing, seconds": "evaluation_seconds",
        "its floor": "evaluation_floor_seconds",
    }  # fmt: skip
    cells = defaultdict(list)
    for section, name, digits in (("Speed", "cpu-*torch*.csv", 2), ("An NVIDIA H200", "nvidia-h200-*.csv", 3)):
        for row in (row for row in rows_of(name) if " K=" not in row["workload"]):
            for column, key in columns.items():
                fewer = 1 if (key, digits) == ("ratio", 3) else digits
                form = ".0%" if key == "floor_share" else f".{fewer}f"
                cells[section, row["workload"], column].append(f"{float(row[key]):{form}}")
    return cells


def personal():
    """By how much a round of each method is above that of local training."""
    section, seconds = "Personal and two-phase methods", {}
    for (of, what, column), values in noted().items():
        if (of, column) == (section, "round"):
            seconds[what] = float(values[0])
    return {what: f"{value - seconds['local']:.2f}" for what, value in seconds.items() if what != "local"}


def computed():
    """By section, what its text says that comes of others or is a setting."""
    measured = [row for row in rows_of("cpu-*torch*.csv") if " K=" not in row["workload"]]
    shares = {name: {f"{float(row['data_seconds_share']):.1%}"[:-1] for row in measured if row["workload"] == name}
              for name in ("w1", "w2")}  # fmt: skip
    floors = [float(row["evaluation_seconds"]) / float(row["evaluation_floor_seconds"]) for row in measured]
    seconds = {key[1:]: float(values[0]) for key, values in noted().items() if key[0] == "Small networks"}
    stacked = [
        seconds[f"{at}:digits, one client after the other", threads] / seconds[f"{at}:digits, ten stacked", threads]
        for at in ("fedfm", "fedfa") for threads in ("one thread", "two threads")
    ]  # fmt: skip
    ends = set()  # of several runs
    for (_, what, _), values in noted().items():
        if what.endswith(BEFORE):
            ends.add(f"{min(values)} to {max(values)}")
    (torch,) = {row["torch"] for row in rows_of("nvidia-h200-*.csv")}
    first = 250 * 32 * 24 * 24 * 4 / 1e6  # what the first convolution writes of 250 images
    return {
        "Speed": {*shares["w1"], *shares["w2"], *ends},
        "An NVIDIA H200": {torch.rpartition(".")[0], SHARES},
        "Testing": {f"{min(floors):.1f}", f"{max(floors):.1f}", f"{first:.0f} MB", AIM_OF_TESTING},
        "Small networks": {f"{max(stacked):.1f}", AIM_OF_THREADS},
        "Personal and two-phase methods": set(personal().values()),
    }


def test_every_number_in_a_table_of_the_page_is_that_of_a_csv():
    known, used = noted() | benched(), set()
    for section, text in sections().items():
        for what, column, cell in lines_of_tables(text):
            if re.fullmatch(NUMBERS, cell):
                key = section, what, column
                numbers = [number.replace(",", "") for number in re.split(", | to ", cell)]
                assert numbers == known.get(key, [personal().get(what)]), key
                used.add(key)
    assert [key for key in noted() if key[2] and not key[1].endswith(BEFORE) and key not in used] == []


def test_every_decimal_in_the_text_of_the_page_is_that_of_a_csv_or_comes_of_one():
    for section, whole in sections().items():
        cells = [cell for _, _, cell in lines_of_tables(whole) if not re.fullmatch(NUMBERS, cell)]
        text = " ".join([re.sub(r"(?m)^\|.*$", "", whole), *cells]).replace("\n", " ")
        own = {value for (of, _, _), values in noted().items() if of == section for value in values}
        known = own | computed().get(section, set())
        assert set(re.findall(r"(?<![\d.])\d+\.\d+", re.sub("`[^`]*`", "", text))) <= known, section
        said = {values[0] for (of, _, column), values in noted().items() if (of, column) == (section, "")}
        said |= computed().get(section, set()) - {*personal().values()}
        assert [number for number in said if not re.search(rf"(?<![\d.]){re.escape(number)}(?!\.?\d)", text)] == [], (
            section
        )
