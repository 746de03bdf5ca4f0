"""Papers' tables: what is planned, run and gone on with."""

import importlib
import inspect
import json
import os
import pickle
import pkgutil
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

import fedcli
from fedcli import Cell, grid, registry
from fedcli.cli import plan_display
from fedcli.results import durations, jobs, paper_tables, plans, printed_numbers, run_records
from fedcli.runs.record import write_record
from tests.commands import invoke, run_command
from tests.listeners import PlanWatch, Stop, StopAfter
from tests.programs import WaitingRuns, start_program
from tests.small_tables import COLUMN, ROWS, RUN_OPTIONS, SMALL_TABLE, make_table
from tests.user_errors import raises_user_error

pytestmark = [pytest.mark.long(worker=0), pytest.mark.usefixtures("folder")]


@pytest.fixture
def offer(monkeypatch):
    """Returns a function that makes a table the only one."""
    return lambda table: monkeypatch.setattr(registry, "tables", lambda: {table.name: table})


def read_records():
    """Reads the records below the working folder, by their folders."""
    return {file.parent: json.loads(file.read_text()) for file in sorted(Path().rglob("record.json"))}


DOMAINS_OF_DIGITS = ("M", "U", "SV", "SY", "AVG")
# Cells of tables that their papers do not print, which notes of the tables say.
NOT_PRINTED = {
    "fccl:8": {("local training of equal length", f"Digits inter {domain}") for domain in DOMAINS_OF_DIGITS},
    "fedsa:4": {("FedProto", "Cifar100 HtFE8 accuracy")},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(registry.tables()))
def test_every_table_resolves_without_data_and_stands_in_the_paper(name):
    table = registry.find_table(name)
    places = [(cell.row, cell.column) for cell in table.cells]
    assert len(set(places)) == len(places)

    _, title = name.split(":")
    _, source = table.reported
    is_drawn = title.startswith("Fig") and source == "in-text"
    if not is_drawn:
        not_printed = set(places) - printed_numbers.find_printed_cells(table).keys()
        assert not_printed == NOT_PRINTED.get(name, set())
        for row, _ in not_printed:
            assert any(row in note for note in table.notes), row

    # A cell in floats stands beside floats, and nothing else does.
    for planned in plans.plan_table(table).cells:
        assert (planned.metric.kind.unit == "floats") == planned.cell.column.endswith("_floats")


def test_names_of_tables_are_unique():
    names = []
    for module in {method.module for method in registry.methods().values()}:
        names += [table.name for table in getattr(module, "TABLES", ())]
    assert len(names) == len(set(names))


def test_grid_is_rows_by_columns_and_a_row_comes_before_a_column():
    first, second = grid({"A": ("one", {"lr": 1})}, {"x": {"lr": 2, "rounds": 3}, "y": {}}, "last")
    assert first == Cell("A", "x", "one", {"lr": 1, "rounds": 3}, "last")
    assert second == Cell("A", "y", "one", {"lr": 1}, "last")


@pytest.mark.slow
def test_cells_of_the_same_settings_share_runs():
    """The folders of these runs have names that are readable and stay the same."""
    protocols_lr = 0.05
    memory = grid(ROWS, {"CIFAR-10 memory_1e3_floats": {**RUN_OPTIONS, "lr": protocols_lr}}, "memory-floats")
    plan = plans.plan_table(make_table(SMALL_TABLE.cells + memory))
    assert len(plan.runs) == 4  # two methods, two seeds
    fedavg_accuracy, _, fedavg_memory, _ = plan.cells
    assert fedavg_accuracy.runs == fedavg_memory.runs

    first, second = fedavg_accuracy.runs
    assert re.fullmatch(r"runs/tables/fedfm-III/fedavg-digits-iid-[0-9a-f]{8}/seed-0", str(first.folder))
    assert second.folder == first.folder.parent / "seed-1"

    with_other_lr = replace(fedavg_accuracy.cell, settings={**RUN_OPTIONS, "lr": 0.06})
    other, _ = plans.plan_table(make_table([with_other_lr])).runs
    assert other.folder.parent != first.folder.parent


@pytest.mark.slow
def test_the_option_only_names_rows_and_columns():
    rows = {name: ("fedavg", {}) for name in ("FedAvg", "FedAvgM", "FedFM")}
    six_cells = make_table(grid(rows, {"NIID-1": RUN_OPTIONS, "NIID-2": RUN_OPTIONS}))

    def places(*only):
        plan = plans.plan_table(six_cells, only=only)
        return [(planned.cell.row, planned.cell.column) for planned in plan.cells]

    assert places("fedavg") == [("FedAvg", "NIID-1"), ("FedAvg", "NIID-2")]  # a whole name
    assert places("FedFM", "AvgM", "niid-1") == [("FedAvgM", "NIID-1"), ("FedFM", "NIID-1")]
    assert places("NIID-2") == [(row, "NIID-2") for row in rows]


def test_limits_only_make_smaller():
    plan = plans.plan_table(SMALL_TABLE, limits={"rounds": 2, "local_epochs": 5, "train_examples": None})
    assert {run.setup.config.rounds for run in plan.runs} == {2}
    assert {run.setup.config.local_epochs for run in plan.runs} == {2}
    assert plan.reduction == "at most 2 rounds"

    all_images = 1438  # for training
    whole = make_table([Cell("FedAvg", COLUMN, "fedavg", {**RUN_OPTIONS, "train_examples": None})])
    assert plans.plan_table(whole, limits={"train_examples": all_images}).reduction == ""
    fewer = plans.plan_table(whole, limits={"train_examples": all_images - 1})
    assert fewer.reduction == "at most 1,437 training images"

    # Nor is the cell's own data set another one.
    assert plans.plan_table(SMALL_TABLE, dataset=RUN_OPTIONS["dataset"]).reduction == ""

    # A run in full that a reduced cell shares makes the table no full one, whichever cell comes first.
    in_full = Cell("in full", COLUMN, "fedavg", {**RUN_OPTIONS, "rounds": 2})
    reduced = Cell("reduced", COLUMN, "fedavg", {**RUN_OPTIONS, "rounds": 4})
    for cells_of_table in ([in_full, reduced], [reduced, in_full]):
        plan = plans.plan_table(make_table(cells_of_table), limits={"rounds": 2})
        assert len(plan.runs) == len(plan.seeds)
        assert plan.reduction == "at most 2 rounds"


def test_a_papers_table_on_other_data_has_the_divisions_of_its_cells():
    table = registry.find_table("fedfm:III")
    plan = plans.plan_table(table, Path("nowhere"), seeds=[0], only=["FedAvg", "CIFAR-10 NIID-1"], dataset="digits")
    (run,) = plan.runs
    assert plan.reduction == "digits"
    assert run.setup.config.dataset == "digits"
    assert run.setup.partition.flag == "dirichlet:0.5"
    assert run.setup.config.rounds == 20

    of_fedcme = plans.plan_table(registry.find_table("fedcme:II"), Path("nowhere"), seeds=[0], dataset="digits")
    assert all(run.setup.config.cohort_size <= run.setup.config.num_clients for run in of_fedcme.runs)

    settings = {**table.cells[0].settings, "rounds": 500, "match_weight": 1.0}
    cell = replace(table.cells[0], method="fedfm", settings=settings)
    (run,) = plans.plan_table(replace(table, cells=(cell,)), Path(), seeds=[0], dataset="digits").runs
    assert run.setup.config.rounds == 20  # those of the data set
    assert run.setup.method_config.match_weight == 1.0  # that of the cell


def write_tuned(folder, method, **options):
    """Writes what `fedcli tune` has chosen for a method."""
    folder.mkdir(parents=True)
    facts = {"method": method, "seed": "1000", "options": options, "trials": []}
    (folder / "tuned.json").write_text(json.dumps(facts))


def test_tuned_options_are_those_of_their_method_unless_the_table_names_others():
    write_tuned(Path("chosen/fedfm"), "fedfm", lr=0.02, match_weight=7.0)
    with_weight = Cell("FedFM, 3", COLUMN, "fedfm", {**RUN_OPTIONS, "match_weight": 3.0})
    table = make_table([*SMALL_TABLE.cells, with_weight], seeds=[0])
    plan = plans.plan_table(table, tuned="chosen")
    untuned = plans.plan_table(table)

    fedavg, fedfm, named = [planned.runs[0] for planned in plan.cells]
    assert fedavg.settings == untuned.cells[0].runs[0].settings
    assert (fedfm.setup.config.lr, fedfm.setup.method_config.match_weight) == (0.02, 7.0)
    assert (named.setup.config.lr, named.setup.method_config.match_weight) == (0.02, 3.0)
    assert fedfm.given.sources.keys() == {"lr", "match_weight"}
    assert named.given.sources.keys() == {"lr"}
    assert fedfm.folder != untuned.cells[1].runs[0].folder  # other settings, so other runs

    note = "Tuned by validation accuracy: fedfm: lr 0.02, match weight 7.0; fedfm: lr 0.02."
    assert note in paper_tables.compare_with_paper(plan).notes
    assert not any("Tuned" in line for line in paper_tables.compare_with_paper(untuned).notes)


def test_tuned_options_of_other_methods_or_of_none_are_refused():
    write_tuned(Path("chosen"), "moon", lr=0.02)
    Path("empty").mkdir()
    with raises_user_error("--tuned chosen has options of moon, none of which is here"):
        plans.plan_table(SMALL_TABLE, tuned="chosen")
    with raises_user_error("--tuned empty has nothing that 'fedcli tune' wrote"):
        plans.plan_table(SMALL_TABLE, tuned="empty")


def test_a_wrong_option_of_a_cell_is_told_with_its_place():
    wrong = make_table([Cell("FedAvg", COLUMN, "fedavg", {**RUN_OPTIONS, "wieght": 1})])
    with raises_user_error(f"row 'FedAvg', column '{COLUMN}': unknown option of 'fedavg' '--wieght"):
        plans.plan_table(wrong)


@pytest.mark.parametrize("num_jobs", [0, -1, True])
def test_a_plan_is_not_executed_by_no_run_at_once(num_jobs):
    with raises_user_error(f"--jobs must be a whole number from 1 on (got {num_jobs})"):
        jobs.execute(plans.plan_table(SMALL_TABLE, Path("runs")), jobs.PlanListener(), num_jobs)
    assert not Path("runs").exists()


def test_an_interrupted_table_goes_on_without_repeating_anything():
    """Another table shares the runs that have finished."""
    with pytest.raises(KeyboardInterrupt):
        jobs.execute(plans.plan_table(SMALL_TABLE), PlanWatch(max_rounds=4))  # after the second run's second round
    before = read_records()
    finished_record, stopped_record = before.values()
    assert finished_record["status"] == "finished"
    assert len(finished_record["rounds"]) == 3
    assert stopped_record["status"] == "interrupted"
    assert len(stopped_record["rounds"]) == 2

    plan = plans.plan_table(SMALL_TABLE)
    assert [run.outcome for run in plan.runs] == ["finished", "unfinished", "not run", "not run"]
    runs_of_other_table = plans.plan_table(replace(SMALL_TABLE, name="fedfm:IV")).runs
    assert [run.outcome for run in runs_of_other_table] == ["finished", "not run", "not run", "not run"]
    folders_of_tables = [str(run.folder.relative_to("runs/tables").parts[0]) for run in runs_of_other_table]
    assert folders_of_tables == ["fedfm-III", "fedfm-IV", "fedfm-IV", "fedfm-IV"]

    watch = PlanWatch()
    assert jobs.execute(plan, watch) == {}
    assert watch.begun == [(f"FedAvg, {COLUMN}", 1), (f"FedFM, {COLUMN}", 0), (f"FedFM, {COLUMN}", 1)]
    after = read_records()
    first, second = before
    assert after[first] == finished_record
    assert after[second]["resumed"] == [2]
    assert after[second]["rounds"][:2] == stopped_record["rounds"]
    assert [record["status"] for record in after.values()] == ["finished"] * 4


def outcome_of_only_run(table, **options):
    """Returns the outcome of the run of a plan that has no other."""
    (run,) = plans.plan_table(table, **options).runs
    return run.outcome


def test_a_record_is_of_a_run_only_if_all_settings_are():
    place = Path("runs/tables/fedfm-III/one")
    record = fedcli.run("fedfm", **RUN_OPTIONS, seed=0, out=place).record

    def outcome_with(removed_option="", **changes):
        config = {name: value for name, value in record["config"].items() if name != removed_option}
        write_record(place, {**record, "config": config, **changes})
        return outcome_of_only_run(SMALL_TABLE, seeds=[0], only=["FedFM"])

    assert outcome_with(seed=1) == "not run"
    assert outcome_with(summary={**record["summary"], "selection": "last"}) == "not run"
    assert outcome_with(config={**record["config"], "lost_option": 1}) == "not run"

    assert outcome_with(status="failed", error="NonFiniteLoss: the term") == "diverged"
    assert outcome_with(status="failed", error="OutOfMemoryError: ") == "failed"
    assert outcome_with(status="running") == "unfinished"

    # Older than an option whose default the run has; and than one that the protocol sets to another value.
    assert outcome_with(removed_option="lr_decay") == "finished"
    assert outcome_with(removed_option="momentum") == "not run"


def test_a_run_tested_in_other_rounds_counts_for_numbers_that_allow_it():
    """It goes on, and counts where the number does not need those rounds."""
    last = {**RUN_OPTIONS, "protocol": "fedfa:digits", "cohort_size": 3}
    stopped = {"eval_every": 2, "checkpoint_every": 2, "post": "ccvr", "progress": StopAfter(2)}
    with pytest.raises(Stop):
        fedcli.run("fedavg", **last, **stopped, seed=0, out="runs/tables/fedfm-III/by-hand")
    plan = plans.plan_table(make_table([Cell("FedAvg", COLUMN, "fedavg", last)]), seeds=[0])
    assert jobs.execute(plan, PlanWatch()) == {}

    def outcome_for(*metrics):
        cells = [Cell("FedAvg", metric, "fedavg", last, metric) for metric in metrics]
        return outcome_of_only_run(make_table(cells), seeds=[0])

    assert {outcome_for(metric) for metric in ("last", "selected", "memory-floats")} == {"finished"}
    assert {outcome_for(metric) for metric in ("best", "last-tenth", "rounds-to:20", "at:1/3")} == {"not run"}
    assert outcome_for("last", "best") == "not run"  # one run for both cells, and one of them needs more


def test_the_shipped_runs_are_found_and_never_gone_on_with(monkeypatch):
    def seeds_with_a_record():
        plan = plans.plan_table(registry.find_table("fedfa:2"), only=["FMNIST #C=2", "FedFA"])
        (planned,) = plan.cells
        assert planned.cell.row == "FedFA"
        return [run.setup.config.seed for run in planned.runs if run.record]

    assert seeds_with_a_record() == [2021, 2022, 2023]

    (folder,) = run_records.find_shipped_folders()
    stopped = [replace(run, outcome="unfinished") for run in run_records.read_runs([folder]) if run.method == "fedfa"]
    monkeypatch.setattr(plans, "read_runs", lambda folders: stopped)
    assert seeds_with_a_record() == []


# Refused when the data are there, before there is a record.
WRONG = Cell("FedAvg", COLUMN, "fedavg", {**RUN_OPTIONS, "batch_size": 1000, "drop_last": True})
DIVERGING = Cell("FedAvg", "CIFAR-10 NIID-2", "fedavg", {**RUN_OPTIONS, "lr": 1e8})
GOOD = Cell("FedFM", COLUMN, "fedfm", RUN_OPTIONS)
FAILING = make_table([WRONG, DIVERGING, GOOD], seeds=(0,))


def test_a_failed_run_does_not_stop_the_others_and_the_command_fails_after_all(offer):
    offer(FAILING)
    result = invoke("table", "fedfm:III")
    assert result.exit_code == 1
    assert "[1/3] FedAvg, CIFAR-10 NIID-1, seed 0: failed: --batch-size 1000" in result.stderr
    assert "| ours | not run | diverged |" in result.stdout
    assert re.search(r"\n- Failed: .*\(NonFiniteLoss: the term", result.stdout)
    later = plans.plan_table(FAILING)  # what has diverged is not tried again
    assert [run.outcome for run in later.runs] == ["not run", "diverged", "finished"]
    assert [run.title for run in later.startable_runs] == ["FedAvg, CIFAR-10 NIID-1"]


def test_runs_whose_data_are_missing_are_left_out(monkeypatch):
    timed_before = [folder / "fedfm-cifar10-resnet18" for folder in durations.find_shipped_folders()]
    monkeypatch.setattr(durations, "find_shipped_folders", lambda: timed_before)
    absent = Cell("FedAvg", "CINIC-10 NIID-1", "fedavg", {"protocol": "fedfm:niid-1", "dataset": "cifar10"})
    plan = plans.plan_table(make_table([*SMALL_TABLE.cells, absent]), seeds=[0])
    assert [run.title for run in plan.startable_runs] == ["FedAvg, CIFAR-10 NIID-1", "FedFM, CIFAR-10 NIID-1"]
    cost_of = dict(plan_display.cost_rows(plan))
    assert cost_of["runs"] == "3, seeds 0: 3 not run; 2 to run"
    assert "'fedcli data download cifar10'" in cost_of["left out"]
    assert re.match("about .* for 1 of 3 runs", cost_of["time"])  # by the shipped runs


KILLED = """
import os
from dataclasses import replace
from fedcli.registry import find_method

METHOD = replace(find_method("fedavg"), name="killed", run_round=lambda *given: os.kill(os.getpid(), 9))
"""


@pytest.mark.slow
def test_several_jobs_are_processes_that_run_resume_fail_and_may_be_killed(monkeypatch):
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.05)
    Path("killed.py").write_text(KILLED)
    with pytest.raises(KeyboardInterrupt):
        jobs.execute(plans.plan_table(FAILING, only=["FedFM"]), PlanWatch(max_rounds=1))
    several = replace(FAILING, cells=(WRONG, GOOD, Cell("Killed", COLUMN, "./killed.py", RUN_OPTIONS)))
    watch = PlanWatch()

    errors = jobs.execute(plans.plan_table(several), watch, jobs=2, records_only=True)

    assert [title for title, _ in watch.begun] == [f"{row}, {COLUMN}" for row in ("FedFM", "FedAvg", "Killed")]
    impossible, resumed, killed = plans.plan_table(several).runs
    assert errors.keys() == {impossible.folder, killed.folder}
    assert impossible.outcome == "not run"
    assert errors[impossible.folder].startswith("--batch-size 1000 is larger than every client's training part")
    assert killed.outcome == "unfinished"
    assert errors[killed.folder].startswith("BrokenProcessPool: ")
    assert resumed.outcome == "finished"
    assert resumed.record["resumed"] == [2]
    origins = {name: origin.text for name, origin in resumed.setup.origins.items()}
    assert resumed.record["origin"] == origins  # every setting was given, and no other
    # Of a table's runs nobody asks for figures, and here not for models either.
    assert [file.name for file in resumed.folder.iterdir()] == ["record.json"]


@pytest.mark.slow
def test_interrupting_several_jobs_interrupts_each_of_them(folder):
    waiting = WaitingRuns(folder)
    table = start_program(folder, "table", "./table.py:TABLE", "--runs", "runs", "--jobs", "2")
    waiting.wait_for()
    table.send_signal(signal.SIGINT)
    table.communicate()
    assert waiting.have_ended()
    assert [record["status"] for record in read_records().values()] == ["interrupted"] * 2


@pytest.mark.slow
def test_no_process_is_left_of_several_jobs_that_were_interrupted(folder):
    """One that is left could no longer be told to end once this process ends."""
    waiting = WaitingRuns(folder)
    processes = []

    class Interrupting(PlanWatch):
        def advance(self, run, rounds):
            processes.extend(waiting.wait_for())
            raise KeyboardInterrupt

    plan = plans.plan_table(registry.find_table("./table.py:TABLE"), folder / "runs")
    with pytest.raises(KeyboardInterrupt):
        jobs.execute(plan, Interrupting(), jobs=2)
    assert len(processes) == 2
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def find_exceptions():
    """Returns all exceptions of the package, by their names."""
    classes = {}
    for module in pkgutil.walk_packages(fedcli.__path__, "fedcli."):
        if module.name.endswith("__main__"):
            continue
        for thing in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(thing) and issubclass(thing, BaseException) and thing.__module__ == module.name:
                classes[f"{module.name}.{thing.__name__}"] = thing
    return classes


def test_every_exception_passes_to_the_process_that_started_a_run():
    # One that does not breaks the executor, whose signal then meets a process that is about to end.
    exceptions = find_exceptions()
    assert "fedcli.errors.UserError" in exceptions
    for name, kind in exceptions.items():
        error = kind("a text")
        error.code = 7
        passed = pickle.loads(pickle.dumps(error))
        assert type(passed) is kind, name
        assert str(passed) == str(error), name
        assert passed.code == 7, name


def test_the_reduced_label_is_on_every_form(offer):
    offer(SMALL_TABLE)
    labels = {"markdown": "**Reduced: at most 2 rounds.", "latex": "% Reduced:", "csv": ",at most 2 r"}
    for form, label in labels.items():
        result = invoke("table", "fedfm:III", "--rounds", 2, "--dry-run", "--format", form)
        assert label in result.stdout
        assert ("ours, reduced" in result.stdout) == (form != "csv")
        assert "reduced    at most 2 rounds; not the paper's setting" in result.stderr
    assert "educed" not in invoke("table", "fedfm:III", "--rounds", 3, "--dry-run").stdout


def test_the_command_runs_what_is_missing_and_then_only_prints(offer, monkeypatch):
    monkeypatch.setattr(durations, "is_undisturbed", lambda record: True)  # whatever else this machine does
    monkeypatch.setattr(durations, "find_shipped_folders", list)
    offer(SMALL_TABLE)
    result = run_command("table", "FEDFM:iii", "--seeds", "0")
    assert "runs 2, seeds 0: 2 not run; 2 to run time not known" in " ".join(result.stderr.split())
    assert "[2/2] FedFM, CIFAR-10 NIID-1, seed 0: " in result.stderr
    assert result.stdout.startswith("### FedFM, Table III: Test accuracy\n")

    again = invoke("table", "fedfm:III", "--seeds", "0", "--out", "new/table.md")
    assert again.stdout == "new/table.md\n"
    assert again.stderr == ""
    assert Path("new/table.md").read_text() == result.stdout

    planned = invoke("table", "fedfm:III", "--seeds", "0,1", "--dry-run")
    assert "runs 4, seeds 0, 1: 2 finished, 2 not run; 2 to run time about 1 min" in " ".join(planned.stderr.split())
    assert len(read_records()) == 2


def test_a_run_that_failed_keeps_what_it_goes_on_from(monkeypatch):
    watch = PlanWatch()

    def fail_after_second_round(run, rounds):
        if rounds == 2:
            raise ValueError("the second round")

    monkeypatch.setattr(watch, "advance", fail_after_second_round)
    plan = plans.plan_table(SMALL_TABLE, seeds=[0], only=["FedAvg"])
    (run,) = plan.runs

    (error,) = jobs.execute(plan, watch, records_only=True).values()

    assert "ValueError: the second round" in error
    assert (run.folder / "checkpoint.safetensors").is_file()
