"""Runs on a Ray cluster: two nodes on this machine, of which one is lost."""

import fcntl
import sys
from pathlib import Path

import pytest

import fedcli
from fedcli.cli.options import place_runs
from fedcli.results import jobs, plans
from fedcli.runs import begin
from fedcli.runs.origins import GivenOptions
from fedcli.runs.record import read_record
from tests.listeners import PlanWatch, Stop, StopAfter
from tests.run_options import SHORT_RUN
from tests.small_tables import SMALL_TABLE
from tests.user_errors import raises_user_error

pytestmark = [pytest.mark.long(worker=0), pytest.mark.slow]

cluster_utils = pytest.importorskip("ray.cluster_utils")


def test_a_table_on_a_cluster_that_loses_a_node_is_the_serial_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    serial = plans.plan_table(SMALL_TABLE, Path("serial"), seeds=range(3))
    spread = plans.plan_table(SMALL_TABLE, Path("spread"), seeds=range(3))
    memory = {"object_store_memory": 80 * 2**20}
    nodes = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **memory})
    lost = nodes.add_node(num_cpus=1, **memory)

    class Losing(PlanWatch):
        def end(self, *ended):
            if not self.ended:  # when the first run on the cluster has ended
                nodes.remove_node(lost, allow_graceful=False)
            super().end(*ended)

    watch = Losing()
    try:
        placement = place_runs(None, f"ray:{nodes.address}", None, None)
        assert jobs.execute(spread, watch, cluster=placement.cluster) == {}
    finally:
        nodes.shutdown()
    assert sorted(watch.ended) == sorted((run.title, run.setup.config.seed, "") for run in spread.runs)
    assert jobs.execute(serial, PlanWatch()) == {}

    for serial_run, spread_run in zip(serial.runs, spread.runs, strict=True):
        assert read_record(spread_run.folder)["summary"] == read_record(serial_run.folder)["summary"]


def test_a_task_goes_on_with_what_the_process_of_a_lost_node_begins_late(tmp_path, monkeypatch):
    prepare = begin.prepare

    def late(*given):
        monkeypatch.setattr(begin, "prepare", prepare)
        with pytest.raises(Stop):
            fedcli.run("fedavg", out=tmp_path / "run", progress=StopAfter(2), **SHORT_RUN)
        return prepare(*given)

    monkeypatch.setattr(begin, "prepare", late)
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0)
    assert jobs.run_task({}, jobs.Task("fedavg", tmp_path / "run", GivenOptions(SHORT_RUN))) == ""

    record = read_record(tmp_path / "run")
    assert record["status"] == "finished"
    assert record["resumed"] == [2]


def test_a_task_waits_for_a_process_that_is_about_to_write_its_record(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    writing = (tmp_path / "run" / ".lock").open("w")
    fcntl.flock(writing, fcntl.LOCK_EX)

    def dies(seconds):
        assert seconds == jobs.POLL_SECONDS
        writing.close()

    monkeypatch.setattr(jobs.time, "sleep", dies)
    assert jobs.run_task({}, jobs.Task("fedavg", tmp_path / "run", GivenOptions(SHORT_RUN))) == ""
    assert writing.closed
    assert read_record(tmp_path / "run")["status"] == "finished"
    # As where a node is lost after the last round.
    assert jobs.run_task({}, jobs.Task("fedavg", tmp_path / "run", GivenOptions(SHORT_RUN))) == ""


def test_where_ray_cannot_run_them_is_refused(monkeypatch):
    with raises_user_error("--on must be ray or ray:ADDRESS"):
        place_runs(None, "slurm", None, None)
    with raises_user_error("--cpus-per-run and --gpus-per-run are for Ray (got no --on)"):
        place_runs(None, None, 2, None)
    with raises_user_error("(got --jobs 2)"):
        place_runs(2, "ray", None, None)
    with raises_user_error("--gpus-per-run must be"):
        place_runs(None, "ray", None, 1.5)
    monkeypatch.setitem(sys.modules, "ray", None)
    with raises_user_error("pip install 'fedcli[ray]'"):
        place_runs(None, "ray", None, None)


def test_each_job_has_a_device_in_turn(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    devices = [jobs.choose_device(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(3)]
    assert devices == ["2", "5", "2"]
