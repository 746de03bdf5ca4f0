"""Runs on a Ray cluster: three nodes on this machine, of which one is lost."""

import os
from pathlib import Path

import pytest

import fedcli
from fedcli.errors import UserError
from fedcli.results import jobs, plans
from fedcli.runs import run as runs
from fedcli.runs.records import read_record
from tests.test_reproduce import SMALL, Watch
from tests.test_runs import TINY, Stop, StopAfter

cluster_utils = pytest.importorskip("ray.cluster_utils")

SEEDS = range(6)


class Losing(Watch):
    """Removes a node when the first run on the cluster has begun."""

    def __init__(self, cluster, node):
        super().__init__()
        self.cluster, self.node = cluster, node

    def begin(self, run):
        super().begin(run)
        if self.node is not None:
            self.cluster.remove_node(self.node, allow_graceful=False)
            self.node = None


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    import ray

    monkeypatch.chdir(tmp_path)
    memory = {"object_store_memory": 80 * 2**20}
    nodes = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **memory})
    others = [nodes.add_node(num_cpus=1, **memory) for _ in range(2)]
    ray.init(nodes.address, log_to_driver=False)
    yield nodes, others[0]
    ray.shutdown()
    nodes.shutdown()


def hashes(plan):
    return {(run.label, run.setup.run.seed): read_record(run.folder)["summary"] for run in plan.runs}


def test_a_table_on_a_cluster_that_loses_a_node_is_the_serial_one(cluster):
    nodes, lost = cluster
    serial, spread = (plans.plan(SMALL, Path(name), seeds=SEEDS) for name in ("serial", "spread"))
    assert len(spread.runs) == 12
    watch = Losing(nodes, lost)
    assert jobs.execute(spread, watch, cluster=jobs.Cluster(nodes.address)) == {}
    assert watch.node is None
    assert sorted(watch.ended) == sorted((*one, "") for one in watch.begun)
    assert len(watch.ended) == 12
    assert jobs.execute(serial, Watch()) == {}
    assert hashes(spread) == hashes(serial)


def test_a_task_goes_on_with_what_the_process_of_a_lost_node_begins_late(tmp_path, monkeypatch):
    prepare = runs.prepare

    def late(*given):
        monkeypatch.setattr(runs, "prepare", prepare)
        with pytest.raises(Stop):
            fedcli.run("fedavg", out=tmp_path / "run", progress=StopAfter(2), **TINY)
        return prepare(*given)

    monkeypatch.setattr(runs, "prepare", late)
    monkeypatch.setattr(jobs, "POLL", 0)
    assert jobs.task({}, "fedavg", tmp_path / "run", TINY, None, False) == ""
    record = read_record(tmp_path / "run")
    assert (record["status"], record["resumed"]) == ("finished", [2])


def test_a_task_waits_for_a_process_that_is_about_to_write_its_record(tmp_path, monkeypatch):
    writing = tmp_path / "run" / f".record.json.{os.getppid()}.partial"
    writing.parent.mkdir()
    for file in (writing, writing.with_name(".lock")):
        file.touch()

    def dies(seconds):
        assert seconds == jobs.POLL
        writing.unlink()

    monkeypatch.setattr(jobs.time, "sleep", dies)
    assert jobs.task({}, "fedavg", tmp_path / "run", TINY, None, False) == ""
    assert not writing.exists()
    assert read_record(tmp_path / "run")["status"] == "finished"


@pytest.mark.parametrize(
    ("on", "gpus", "message"),
    [("slurm", None, r"--on must be ray or ray:ADDRESS \(got 'slurm'\)"), ("ray", 1.5, "--gpus-per-run must be")],
)
def test_what_is_no_cluster_is_refused(on, gpus, message):
    with pytest.raises(UserError, match=message):
        jobs.find_cluster(on, None, gpus)


def test_a_machine_without_ray_is_told_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'fedcli\[ray\]'"):
        jobs.find_cluster("ray")


def test_each_job_has_a_device_in_turn(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    devices = [jobs.device_of(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(3)]
    assert devices == ["2", "5", "2"]
