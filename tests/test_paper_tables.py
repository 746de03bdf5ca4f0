"""A paper's table and ours beside it, against hand numbers: cells, differences, and numbers that follow from cells."""

import csv
import io
from dataclasses import replace
from typing import NamedTuple

import pytest

from fedcli import Cell, Gain, grid, registry
from fedcli.results import paper_tables, plans
from fedcli.results.render import render
from tests.commands import markdown_rows
from tests.example_records import as_diverged
from tests.small_tables import COLUMN, RUN_OPTIONS, make_table, with_records

pytestmark = pytest.mark.usefixtures("folder")


def plan_with_records(table, records_of_rows):
    """Returns the plan of a table of one column whose runs have these records, by row, a record for each seed.

    A run of another row, or whose record is None, is not there.
    """
    num_seeds = max(len(records) for records in records_of_rows.values())
    plan = plans.plan_table(table, seeds=range(num_seeds))
    records_by_folder = {}
    for planned in plan.cells:
        records = records_of_rows.get(planned.cell.row, [None] * num_seeds)
        for run, record in zip(planned.runs, records, strict=True):
            records_by_folder[run.folder] = record and {**record, "seed": run.setup.config.seed}
    return with_records(plan, records_by_folder)


def finished_record(selected, *, cost=None, rounds=()):
    """Returns the record of a finished run with this accuracy, and with those of its rounds."""
    return {
        "status": "finished",
        "method": "m",
        "method_source": "m",
        "method_hash": registry.find_method("fedavg").file_hash,
        "numerics": {"core": 1, "method": 1},
        "config": {"rounds": 3, "cohort_size": 10},
        "origin": {},
        "model": {},
        "rounds": [{"round": number, "test_accuracy": accuracy} for number, accuracy in enumerate(rounds)],
        "summary": {"selected": selected, "last": selected, "selection": "last", "selected_round": 0},
        "cost": cost,
        "moved": [],
        "changed": [],
    }


DIVERGED = as_diverged(finished_record(0.9))
UNFINISHED = {**finished_record(0.9), "status": "running"}
ROWS = {name: ("fedavg", {"lr": len(name)}) for name in ("FedAvg", "FedProx", "MOON", "FedFM")}
FOUR_METHODS = make_table(grid(ROWS, {COLUMN: RUN_OPTIONS}))


def cell_texts(table, **records_of_rows):
    """Returns the Markdown cells of each row, by its name and its part: paper, ours, difference."""
    markdown = render(paper_tables.compare_with_paper(plan_with_records(table, records_of_rows)))
    texts_of = {}
    row = ""
    for line in markdown_rows(markdown):
        name, part, *texts = line.values()
        row = name or row  # a name stands in its first line alone
        texts_of[row, part] = texts
    return texts_of


def records_with(*accuracies):
    """Returns records of finished runs with these accuracies, a seed each."""
    return [finished_record(accuracy) for accuracy in accuracies]


def test_paper_ours_and_difference_are_those_of_known_values():
    # 66, 66.5, 68: mean 66.8333, sample variance (0.6944 + 0.1111 + 1.3611) / 2 = 1.0833, deviation 1.0408,
    # t 4.3027: half of the interval 2.5855 around 66.8333 - 66.69
    text = cell_texts(FOUR_METHODS, FedAvg=records_with(0.66, 0.665, 0.68))
    assert text["FedAvg", "paper"] == ["66.69 ± 0.69"]
    assert text["FedAvg", "ours"] == ["66.83 ± 1.04 (3)"]
    assert text["FedAvg", "difference"] == ["+0.14 [-2.44, +2.73]"]
    assert text["FedProx", "ours"] == ["not run"]
    assert ("FedProx", "difference") not in text


def test_of_one_seed_there_is_no_interval():
    text = cell_texts(FOUR_METHODS, FedAvg=[finished_record(0.5)])
    assert text["FedAvg", "difference"] == ["-16.69"]


def test_runs_that_are_missing_or_have_not_finished_are_counted():
    failed = {**DIVERGED, "error": "OutOfMemoryError: too large"}
    text = cell_texts(
        FOUR_METHODS,
        FedAvg=[finished_record(0.66), DIVERGED, None],
        FedProx=[finished_record(0.66), finished_record(0.68), failed],
        MOON=[UNFINISHED, None, None],
        FedFM=[DIVERGED, failed, UNFINISHED],
    )
    assert text["FedAvg", "ours"] == ["66.00 (1 of 3 runs; 1 diverged)"]
    assert text["FedProx", "ours"] == ["67.00 ± 1.41 (2 of 3 runs; 1 failed)"]
    assert text["MOON", "ours"] == ["unfinished"]
    assert text["FedFM", "ours"] == ["diverged"]


def test_the_best_is_in_bold():
    text = cell_texts(
        FOUR_METHODS,
        FedAvg=records_with(0.5, 0.6, 0.7),
        FedProx=records_with(0.53, 0.64, 0.75),
        MOON=records_with(0.1, 0.2, 0.3),
    )
    assert text["FedProx", "ours"] == ["**64.00 ± 11.00 (3)**"]


GAINS = (
    Gain("mean gain", "gap", ("MOON", "FedFM"), ("FedAvg", "FedProx"), columns=(COLUMN,)),
    Gain("less the best other", COLUMN, ("FedFM",), ("FedAvg", "FedProx", "MOON"), over_best=True),
)


def test_numbers_that_follow_from_cells_by_hand():
    with_gains = replace(FOUR_METHODS, gains=GAINS)
    text = cell_texts(
        with_gains,
        FedAvg=records_with(0.5, 0.54),
        FedProx=records_with(0.6, 0.6),
        MOON=records_with(0.7, 0.7),
        FedFM=records_with(0.66, 0.66),
    )
    assert text["mean gain", "ours"] == ["", "+12.00"]  # (70 + 66) / 2 - (52 + 60) / 2
    assert text["less the best other", "ours"] == ["-4.00", ""]

    text = cell_texts(with_gains, FedAvg=records_with(0.5), MOON=records_with(0.7), FedFM=records_with(0.66))
    assert text["mean gain", "ours"] == ["", "not run"]
    assert "gain" not in render(paper_tables.compare_with_paper(plans.plan_table(with_gains, only=["FedFM"])))


def record_that_reaches_half_in(round_number):
    """Returns a record whose test accuracy is 0.5 in this round, counted from 1, and less before."""
    return finished_record(0.5, rounds=[0.1] * (round_number - 1) + [0.5])


def test_the_best_other_in_rounds_to_an_accuracy_is_the_fastest():
    cells = tuple(replace(cell, metric="rounds-to:50") for cell in FOUR_METHODS.cells)
    text = cell_texts(
        replace(FOUR_METHODS, cells=cells, gains=GAINS),
        FedAvg=[record_that_reaches_half_in(2)],
        FedProx=[record_that_reaches_half_in(4)],
        MOON=[record_that_reaches_half_in(6)],
        FedFM=[record_that_reaches_half_in(3)],
    )
    assert text["less the best other", "ours"] == ["+1.0", ""]  # 3 rounds, where the best other needs 2


SENT = {
    **finished_record(0.5, cost={"floats_up": 23_705_252}, rounds=[0.5]),
    "config": {"rounds": 100, "cohort_size": 20},
}


class MetricCase(NamedTuple):
    """A cell of a paper's table, the records of its runs, and what stands in its lines."""

    row: str
    column: str
    metric: str
    reported: tuple[str, str]
    records: list[dict]
    paper: str
    ours: str
    difference: str | None


METRIC_CASES = {
    "floats in memory": MetricCase(
        "FedFM", "CIFAR-100 memory_1e3_floats", "memory-floats", ("FedFM", "Table III"),
        [finished_record(0.5, cost={"memory_floats": 23_910_052})] * 2,
        paper="23,909,000", ours="23,910,052 ± 0 (2)", difference="+1,000",
    ),
    "floats sent": MetricCase(
        "FedAvg", "K=20 bandwidth_1e8_floats", "total-floats", ("FedFM", "Table VI"), [SENT],
        paper="47,400,000,000", ours="47,410,504,000 (1)", difference="+0",
    ),
    "rounds to an accuracy": MetricCase(  # the round, not the accuracy beside it
        "FedAvg", "CIFAR-100 #C=20", "rounds-to:60", ("FedFA", "Table 8"),
        [finished_record(0.5, rounds=[0.1, 0.6, 0.7])],
        paper="52", ours="2 (1)", difference="-50.0",
    ),
    "an accuracy never reached": MetricCase(
        "FedDyn", "CIFAR-100 #C=20", "rounds-to:60", ("FedFA", "Table 8"), [finished_record(0.5, rounds=[0.5])],
        paper="never", ours="never (1)", difference=None,
    ),
    "quality measured in one of two runs": MetricCase(
        "FedAvg", "NMI", "quality:nmi", ("FedFM", "Table V"),
        [{**finished_record(0.5), "quality": {"nmi": 0.4}}, finished_record(0.5)],
        paper="0.413", ours="0.400 (1 of 2 runs)", difference="-0.013",
    ),
    "quality not measured": MetricCase(
        "FedAvg", "NMI", "quality:nmi", ("FedFM", "Table V"), [finished_record(0.5)],
        paper="0.413", ours="not measured (1)", difference=None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", METRIC_CASES.values(), ids=METRIC_CASES)
def test_every_metric_stands_in_the_papers_unit(case):
    cell = Cell(case.row, case.column, "fedavg", RUN_OPTIONS, case.metric)
    of_one_cell = replace(make_table([cell]), reported=case.reported)

    text = cell_texts(of_one_cell, **{case.row: case.records})

    assert text[case.row, "paper"] == [case.paper]
    assert text[case.row, "ours"] == [case.ours]
    if case.difference is None:
        assert (case.row, "difference") not in text
    else:
        assert text[case.row, "difference"] == [case.difference]


def test_csv_has_a_line_a_cell_in_full_precision():
    records_of_rows = {
        "FedAvg": [finished_record(1 / 3), DIVERGED],
        "MOON": [None, UNFINISHED],
        "FedFM": records_with(0.5, 0.6),
    }
    text = render(paper_tables.compare_with_paper(plan_with_records(FOUR_METHODS, records_of_rows)), "csv")
    fedavg, fedprox, moon, fedfm = csv.DictReader(io.StringIO(text))

    assert float(fedavg["ours"]) == pytest.approx(100 / 3, abs=1e-12)
    assert fedavg["ours_std"] == ""
    assert fedavg["row"] == "FedAvg"
    assert fedavg["paper"] == "66.69"
    assert fedavg["paper_std"] == "0.69"
    assert fedavg["runs_planned"] == "2"
    assert fedavg["runs_finished"] == "1"
    assert fedavg["runs_diverged"] == "1"
    assert fedprox["ours"] == ""
    assert fedprox["runs_not_run"] == "2"
    assert moon["runs_unfinished"] == "1"

    difference = 55 - 72.89
    half_width = 12.706205 * 5  # t of one degree of freedom, times 7.07 / sqrt(2)
    assert float(fedfm["difference_low"]) == pytest.approx(difference - half_width, abs=1e-4)
    assert float(fedfm["difference_high"]) == pytest.approx(difference + half_width, abs=1e-4)


def test_a_run_of_another_version_of_its_method_is_pointed_out():
    of_other_version = {**finished_record(0.5), "numerics": {"core": 0, "method": 1}}
    plan = plan_with_records(FOUR_METHODS, {"FedAvg": [of_other_version], "FedProx": [finished_record(0.5)]})
    notes = paper_tables.compare_with_paper(plan).notes
    (note,) = [note for note in notes if "another version" in note]
    assert note.count("seed-0") == 1
