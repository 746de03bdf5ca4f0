"""No dead ends: whatever a kill or a full disk leaves in a folder, the same command goes on."""

import os

import fedcli
from fedcli.declarations import Cell, Table
from fedcli.results import jobs, plans
from fedcli.runs import run as runs
from fedcli.runs.checkpoints import CHECKPOINT
from tests.programs import SMALL, start
from tests.test_lock import names
from tests.test_runs import TINY, essence

LIMITED = """
import resource, sys
from fedcli.cli.app import main
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # room for a record, and for no checkpoint
sys.argv[0] = "fedcli"
main()
"""


def test_a_full_disk_is_one_line_leaves_no_part_of_a_file_and_the_run_goes_on(tmp_path):
    program = start(tmp_path, "run", "fedavg", *SMALL, "--out", "a run", program=("-c", LIMITED))
    _, said = program.communicate()
    place = os.path.realpath(tmp_path / "a run" / CHECKPOINT)
    assert said == (
        f"error: '{place}' cannot be written (File too large); free space; then a run goes on with "
        "'fedcli resume RUN', and all else with the same command.\n"
    )
    assert program.returncode == 1
    assert names(tmp_path / "a run") == ["record.json"]
    again = runs.resume(tmp_path / "a run")
    whole = fedcli.run("fedavg", out=tmp_path / "whole", **again.record["config"])
    assert essence(again.record)["rounds"] == essence(whole.record)["rounds"]


def test_a_damaged_record_stops_no_table_and_is_left_as_it_is(tmp_path, caplog):
    given = {**TINY, "protocol": "fedfm:digits", "rounds": 1}
    cells = tuple(Cell("FedAvg", str(lr), "fedavg", {**given, "lr": lr}) for lr in (0.1, 0.2))
    table = Table("fedfm:III", "made up", ("FedFM", "Table III"), cells, seeds=(0,))
    jobs.execute(plans.plan(table, tmp_path), jobs.Watch())
    damaged, whole = (run.folder for run in plans.plan(table, tmp_path).runs)
    (damaged / "record.json").write_text("{")
    plan = plans.plan(table, tmp_path)
    assert [run.state for run in plan.runs] == ["not run", "finished"]
    assert f"left out: '{damaged / 'record.json'}' cannot be read (" in caplog.text
    assert list(jobs.execute(plan, jobs.Watch())) == [damaged]
    assert [run.folder for run in plans.plan(table, tmp_path).runs] == [damaged, whole]
    assert (damaged / "record.json").read_text() == "{"
