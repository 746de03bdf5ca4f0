"""What a record may hold, which is refused in a line where it is read; and what has happened to a run."""

import copy
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import fedcli
from fedcli.declarations import Cell, Table
from fedcli.figures import names
from fedcli.figures.curves import find_curves
from fedcli.registry import find_method
from fedcli.results import paper_tables, plans, run_records, tables
from fedcli.results.render import render
from fedcli.run_files import RECORD
from fedcli.runs import identity
from fedcli.runs.record import read_record, write_record
from fedcli.runs.resume import resume
from fedcli.runs.rounds import Listener
from fedcli.runs.value_checks import Fault, number
from fedcli.userfiles import file_hash
from tests.commands import invoke, run_command
from tests.example_records import make_record, write_unsigned_record
from tests.listeners import Stop, StopAfter
from tests.run_options import SHORT_RUN
from tests.small_tables import with_records
from tests.torture.faults import faults_of
from tests.torture.mutated_records import COMMITTED_RECORDS, read_mutated_record
from tests.torture.nested_parts import entry_at
from tests.torture.signed_files import sign_record
from tests.user_errors import raises_user_error

pytestmark = pytest.mark.long(worker=1)


class Wrong(NamedTuple):
    """A value that a part of a record may not have, and what a user is told."""

    value: Any
    message: str


WRONG = {  # by the path to the part
    "origin.lr": Wrong(1, "'origin.lr' must be a text (got 1)"),
    "summary": Wrong(None, "'summary' must be parts by name (got None)"),
    "summary.selection": Wrong("<img src=x>", "'summary.selection' must be best-validation or"),
    "summary.selected": Wrong(1.5, "'summary.selected' must be a finite number from 0 to 1 (got 1.5)"),
    "summary.selected_round": Wrong(99, "must be a tested round (got 99)"),
    "load": Wrong(0, "'load' must be a list (got 0)"),
    "rounds.1.seconds.evaluate": Wrong(None, "'rounds.1.seconds.evaluate' must be a finite number (got None)"),
    "rounds.1.test_accuracy": Wrong(-0.1, "'rounds.1.test_accuracy' must be a finite number from 0 to 1 (got -0.1)"),
    "rounds.1.round": Wrong(5, "the number of each round"),
    "rounds.0.terms.cross_entropy": Wrong(float("nan"), "must be a finite number (got nan)"),
    "partition.sizes": Wrong([3], "the clients' images"),
    "partition.class_counts.0": Wrong([], "the clients' images"),
    "rounds.0.client_accuracy": Wrong(
        {"0": None}, "'rounds.0.client_accuracy.0' must be a finite number from 0 to 1 (got None)"
    ),
    "rounds.1.client_accuracy": Wrong({"x": 0.5}, "'client_accuracy' must be by client, 0 to "),
    "config.lr": Wrong(-1.0, "--lr must be > 0 (got -1.0)"),
    "config.rounds": Wrong("10", "--rounds must be of type int (got '10')"),
    "config.dataset": Wrong("../x", "must be the name of a data set (got '../x')"),
    "config.optimizer": Wrong("evil", "--optimizer must be"),
    "config.unheard": Wrong({}, "'config.unheard' must be a text"),
    "partition.seed": Wrong(True, "'partition.seed' must be a whole number from 0"),
    "seed": Wrong(2**32, "'seed' must be a whole number from 0 to 4294967295 (got 4294967296)"),
    "status": Wrong("done", "'status' must be running or"),
    "engine.way": Wrong("sideways", "'engine.way' must be stacked or"),
    "class_names.0": Wrong("\ud800", "'class_names.0' must be a text"),
    "cost.floats_up": Wrong(10**30, "'cost.floats_up' must be a whole number"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A record as it is written."""
    run = fedcli.run("fedavg", out=tmp_path_factory.mktemp("whole") / "run", **{**SHORT_RUN, "rounds": 2})
    return read_record(run.path)


@pytest.mark.parametrize("path", WRONG)
def test_a_wrong_part_of_a_record_is_refused_by_all_that_read(path, whole, tmp_path):
    """In a line, be it of another type or out of range."""
    wrong = WRONG[path]
    record = copy.deepcopy(whole)
    keys = [int(key) if key.isdigit() else key for key in path.split(".")]
    container, key = entry_at(record, tuple(keys))
    container[key] = wrong.value
    sign_record(tmp_path, record)
    with raises_user_error(RECORD, wrong.message):
        read_record(tmp_path)


def test_a_number_that_has_a_largest_alone_is_refused_with_it():
    with pytest.raises(Fault, match=r"a finite number to 1 \(got 2\)"):
        number(high=1)(2)


@pytest.mark.slow
def test_the_records_of_the_project_are_read():
    files = sorted(COMMITTED_RECORDS.rglob(RECORD))
    assert len(files) > 300
    for file in files:
        read_record(file)


@pytest.mark.slow
def test_a_short_round_of_mutations_breaks_nothing():
    assert not faults_of(read_mutated_record, 30)


# What has happened to a run

METHOD = """
from dataclasses import replace
from fedcli.papers.baselines import fedavg
METHOD = replace(fedavg.METHOD, name="mine", default_protocol="fedfm:digits")
"""


@pytest.fixture
def changed(tmp_path, monkeypatch):
    """A run whose method was edited after its second round."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(METHOD)
    with pytest.raises(Stop):
        fedcli.run("./mine.py", out="run", progress=StopAfter(2), **SHORT_RUN)
    Path("mine.py").write_text(METHOD + "# edited\n")
    with raises_user_error("has changed since the run began"):
        resume("run", files="mine.py")
    return resume("run", files="mine.py", changed_method=True).record


def test_a_run_whose_method_was_changed_says_so_in_tables_figures_and_reports(changed):
    assert changed["changed"] == [{"round": 2, "what": "its method"}]
    records = run_records.find_records(["run"])
    words = "its method changed after round 2"
    assert f"- mine, seed 0: {words}." in render(tables.build_table(records))
    assert words in render(tables.build_table(records), "latex")
    assert words in render(tables.build_table(records), "csv")
    curves = find_curves(tables.group_runs(records))
    assert words in curves[0].name().replace("\n", " ")
    assert fedcli.frame("run")["changed"].tolist() == [words]

    run_command("report", "run", "--out", "page.html")
    assert Path("page.html").read_text().count(words) >= 2  # below the table and beside the curve


def test_older_records_say_of_a_users_file_alone_that_it_changed():
    older = make_record() | {"method_hash": "a, then b"}
    assert identity.recorded_code_changes(older) == []  # a registered method, of which numerics count
    assert identity.recorded_code_changes(older | {"method_source": "/me/one.py"}) == [
        "its method changed when it was resumed"
    ]


def test_a_papers_table_says_whose_code_was_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = Table("fedfm:III", "", ("FedFM", "Table III"), (Cell("A", "x", "fedavg", SHORT_RUN),), seeds=(0,))
    plan = plans.plan_table(table)
    (run,) = plan.runs
    changed = make_record("fedavg") | {"changed": [{"round": 1, "what": "its method"}]}
    compared = paper_tables.compare_with_paper(with_records(plan, {run.folder: changed}))
    assert f"{run.folder}: its method changed after round 1." in compared.notes


def test_a_methods_version_is_its_numerics_or_its_files_hash(tmp_path):
    """That of a built-in method its numerics, that of a user's file the file's hash."""
    fedavg = find_method("fedavg")
    with pytest.raises(Stop):
        fedcli.run("fedavg", out=tmp_path / "reworded", progress=StopAfter(2), **SHORT_RUN)
    renumbered = shutil.copytree(tmp_path / "reworded", tmp_path / "of other numerics")
    record = read_record(tmp_path / "reworded")

    write_record(tmp_path / "reworded", {**record, "method_hash": "0" * 16})
    after = resume(tmp_path / "reworded").record
    assert after["status"] == "finished"
    assert after["changed"] == []
    assert after["method_hash"].endswith(fedavg.file_hash)

    write_record(renumbered, {**record, "numerics": {"core": 1, "method": 0}})
    with raises_user_error("got numerics", "--changed-method"):
        resume(renumbered)
    after = resume(renumbered, changed_method=True).record
    now = identity.current_numerics(after, fedavg)
    assert after["changed"] == [{"round": 2, "what": "the arithmetic of fedcli", "numerics": now}]


def stop_run_of_other_numerics(folder, numerics):
    """Stops a run after its first round and writes other numerics into its record; returns those it had."""
    with pytest.raises(Stop):
        fedcli.run("fedavg", out=folder, progress=StopAfter(1), **SHORT_RUN)
    record = read_record(folder)
    write_record(folder, {**record, "numerics": numerics})
    return {**record["numerics"]}


def test_one_consent_holds_for_the_numerics_to_which_it_was_given(tmp_path, monkeypatch):
    now = stop_run_of_other_numerics(tmp_path, {"core": 1, "method": 0})
    for consents in (True, False):
        with pytest.raises(Stop):
            resume(tmp_path, changed_method=consents, progress=StopAfter(1))
    record = read_record(tmp_path)
    assert record["changed"] == [{"round": 1, "what": "the arithmetic of fedcli", "numerics": now}]
    assert identity.outdated(record, find_method("fedavg"))  # today's code would not repeat its first round

    newer = {**now, "method": now["method"] + 1}
    monkeypatch.setattr("fedcli.runs.identity.current_numerics", lambda record, method: newer)
    with raises_user_error(f"got numerics {newer}, was {now}", "--changed-method"):
        resume(tmp_path)
    after = resume(tmp_path, changed_method=True).record
    assert [change["round"] for change in after["changed"]] == [1, 3]


def test_a_consent_is_recorded_before_rounds_of_the_new_code(tmp_path):
    """Before a checkpoint has such rounds."""
    stop_run_of_other_numerics(tmp_path, {"core": 1, "method": 0})

    class Killed(Listener):
        def samples(self, count):
            record = read_record(tmp_path)
            assert [change["round"] for change in record["changed"]] == [1]
            raise Stop

    with pytest.raises(Stop):
        resume(tmp_path, changed_method=True, progress=Killed())


def test_a_run_without_a_round_is_of_the_code_that_computes_its_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(METHOD)

    class Killed(Listener):
        def samples(self, count):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedcli.run("./mine.py", out="run", progress=Killed(), **SHORT_RUN)
    Path("mine.py").write_text(METHOD + "# edited\n")
    record = resume("run", files="mine.py", changed_method=True).record
    assert record["method_hash"] == file_hash("mine.py")
    assert record["changed"] == []
    assert identity.recorded_changes(record) == []


# Labels


def test_a_label_of_several_methods_stands_before_their_names(tmp_path):
    methods = ("fedavg", "fedprox", "moon")
    folders = [tmp_path / method for method in methods]
    for folder, method in zip(folders, methods, strict=True):
        write_unsigned_record(folder, make_record(method))
    records = run_records.find_records(folders, ["Ours", "Ours", "M"])
    groups = tables.group_runs(records)
    assert [group.title for group in groups] == ["Ours: fedavg", "Ours: fedprox", "M"]
    assert len({*names.choose_setting_colours([groups]).values()}) == 3
    result = invoke("table", tmp_path, "--label", "Ours", "--format", "latex")
    assert all(f"Ours: {method}" in result.output for method in methods)
