"""How long the runs of a table take: by rounds, local steps and runs that are alike."""

import math
from pathlib import Path
from typing import NamedTuple

import pytest

import fedcli
from fedcli import Cell, grid
from fedcli.results import durations, plans
from fedcli.runs.record import read_record, write_record
from tests.small_tables import COLUMN, ROWS, RUN_OPTIONS, SMALL_TABLE, make_table

pytestmark = pytest.mark.usefixtures("folder")


class Estimate(NamedTuple):
    """How long the runs of a table take."""

    seconds: float
    known_runs: int  # of which the seconds are
    other_machines: set[str]  # by which they are known


def estimate(cells, **options):
    """Estimates how long the runs of a table of these cells take."""
    times = durations.estimate_plan(plans.plan_table(make_table(cells), **options))
    known_seconds = [time.seconds for time in times if not math.isnan(time.seconds)]
    machines = set()
    for time in times:
        machines |= time.machines
    return Estimate(sum(known_seconds), len(known_seconds), machines)


def write_timed_run(folder, seconds, seed=0):
    """Writes a run whose rounds took so many seconds; returns its record."""
    record = fedcli.run("fedavg", **RUN_OPTIONS, seed=seed, out=folder).record
    for entry in record["rounds"]:
        entry["seconds"] = {"train": seconds - 0.25, "evaluate": 0.25}
    write_record(Path(folder), {**record, "load": []})  # whatever else this machine does
    return record


def test_the_estimate_goes_by_rounds_and_local_steps(monkeypatch):
    monkeypatch.setattr(durations, "find_shipped_folders", list)  # which know what methods take beside each other
    record = write_timed_run("runs/tables/timed", 2.0)
    # the other method's by this one's: 3 runs of 3 rounds
    assert estimate(SMALL_TABLE.cells) == Estimate(pytest.approx(3 * 3 * 2), known_runs=3, other_machines=set())

    # 4 runs of 2 rounds, each with half of the epochs on half of the images
    limits = {"local_epochs": 1, "rounds": 2, "train_examples": 60}
    reduced = estimate(SMALL_TABLE.cells, limits=limits)
    assert reduced == Estimate(pytest.approx(4 * 2 * 2 / 4), known_runs=4, other_machines=set())

    # 2 runs of 3 rounds, in each half of the clients
    half_of_the_clients = grid(ROWS, {"CIFAR-10 NIID-1": {**RUN_OPTIONS, "num_clients": 6, "cohort_size": 3}})
    assert estimate(half_of_the_clients, seeds=[0]).seconds == pytest.approx(2 * 3 * 2 / 2)

    # a run of which two rounds are there
    stopped = Path("runs/tables/fedfm-III/stopped")
    stopped.mkdir(parents=True)
    write_record(stopped, {**record, "seed": 1, "status": "interrupted", "rounds": record["rounds"][:2]})
    assert estimate(SMALL_TABLE.cells, seeds=[1], only=["FedAvg"]).seconds == pytest.approx(2)


def test_the_estimate_is_by_similar_runs_here_or_else_elsewhere(monkeypatch):
    """By runs of the same network on images of the same size, here or else on another machine."""
    monkeypatch.setattr(durations, "find_shipped_folders", list)
    seconds_of = {Path("runs/tables/0"): 1.0, Path("runs/tables/1"): 2.0, Path("runs/tables/2"): 9.0}
    for folder, seconds in seconds_of.items():
        write_timed_run(folder, seconds, seed=9)

    def estimate_of_fedavg(**settings):
        return estimate([Cell("FedAvg", COLUMN, "fedavg", {**RUN_OPTIONS, **settings})], seeds=[0])

    of_median_run = Estimate(pytest.approx(3 * 2), known_runs=1, other_machines=set())
    assert estimate_of_fedavg() == of_median_run

    for folder in seconds_of:
        record = read_record(folder)
        write_record(folder, {**record, "hardware": {**record["hardware"], "name": "another machine"}})
    assert estimate_of_fedavg() == of_median_run._replace(other_machines={"another machine"})

    write_timed_run("runs/tables/3", 5.0, seed=9)
    of_run_here = Estimate(pytest.approx(3 * 5), known_runs=1, other_machines=set())
    assert estimate_of_fedavg() == of_run_here

    # what other work disturbed says less
    disturbed = write_timed_run("runs/tables/4", 500.0, seed=9)
    write_record(Path("runs/tables/4"), {**disturbed, "load": [{"round": 0, "start": 99.0, "end": 99.0}]})
    assert estimate_of_fedavg() == of_run_here

    # of another network nothing is known
    assert estimate_of_fedavg(backbone="cnn-2x64") == Estimate(0, known_runs=0, other_machines=set())
