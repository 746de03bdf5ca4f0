"""Forks that share a process's work: results, failures, kills and interruptions, and which runs have them."""

import os
import re
import runpy
import signal
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from socket import socketpair
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import fedcli
from fedcli import check, toy
from fedcli.core import evaluation, forks
from fedcli.core.forks import Processes
from fedcli.papers.baselines import fedavg
from fedcli.registry import find_method, methods
from fedcli.run_files import RECORD
from fedcli.runs import cores, workers
from fedcli.runs.cores import allowed_cores
from fedcli.runs.machine import is_undisturbed, machine_settings
from fedcli.runs.options import flags_of
from fedcli.runs.record import read_record
from fedcli.runs.rounds import Listener
from tests import fake_cuda_runs, laws, workers_law
from tests.commands import invoke, run_command
from tests.networks import MIXED_NETWORKS
from tests.programs import start_program
from tests.run_options import THREE_ROUNDS
from tests.slow import parameters_of
from tests.toy_methods import QUICK_OPTIONS, STATEFUL, MethodCase, fedavg_round


class Meeting:
    """Two processes, this one and a fork of it, that wait for each other once."""

    def __init__(self):
        self.pid = os.getpid()
        self.has_met = False
        self.ends = socketpair()

    @property
    def in_fork(self):
        return os.getpid() != self.pid

    def meet(self):
        """Returns when both processes are here, if they have not met before."""
        if self.has_met:
            return
        mine, other = self.ends
        if self.in_fork:
            mine, other = other, mine
        other.close()  # so that who waits for a process that has died is told
        mine.send(b".")
        assert mine.recv(1) == b"."
        self.has_met = True

    def close(self):
        for end in self.ends:
            end.close()


class Shared(Meeting):
    """Two processes, each of which is given one of two items and begins it once the other has one too."""

    def __init__(self):
        super().__init__()
        self.notes = []
        self.processes = Processes(2, self.notes.append)

    def __call__(self, act):
        """What `act` gives for the items 1 and 2."""

        def run(item):
            self.meet()
            return act(item)

        return self.processes.map_with_forks(run, [1, 2], count=2)


@pytest.fixture(autouse=True)
def no_other_process():
    """A thread watches the process of the fake CUDA device, and where there is such a thread nothing is forked."""
    fake_cuda_runs.end_process()


def children():
    """The processes that this one has started and that have not been waited for."""
    lists = [file.read_text().split() for file in Path("/proc/self/task").glob("*/children")]
    return set(chain(*lists))


@pytest.fixture
def shared():
    """A process and a fork, of which none is left at the end."""
    before = children()
    made = Shared()
    yield made
    made.processes.reap()
    assert children() <= before
    made.close()


@pytest.fixture
def always(monkeypatch, two_threads):
    """Work is shared as soon as it is known how long it takes, however short."""
    monkeypatch.setattr(forks, "FORK_COST", 0)


@pytest.fixture
def meetings(monkeypatch, always):
    """One for each work that was shared, of which either process has done an item for certain."""
    map_with_forks = Processes.map_with_forks
    held = []

    def map_by_both(self, run, items, count, begin):
        meeting = Meeting()

        def run_by_both(item):
            meeting.meet()
            return run(item)

        assert count == 2
        results = map_with_forks(self, run_by_both, items, count, begin)
        assert self.count == 2  # what the fork has done was received
        meeting.close()
        held.append(meeting)
        return results

    monkeypatch.setattr(Processes, "map_with_forks", map_by_both)
    return held


# What is shared


def test_a_fork_does_its_part_and_sends_tensors_with_their_strides(shared):
    values = torch.arange(6.0).reshape(2, 3)
    results = shared(lambda item: {"values": item * values.T, "forked": shared.in_fork, "none": None})
    assert [result["forked"] for result in results] in ([False, True], [True, False])

    for item, result in zip((1, 2), results, strict=True):
        assert torch.equal(result["values"], item * values.T)
        assert result["values"].stride() == (1, 3)
        assert result["none"] is None
    assert shared.notes == []
    assert shared.processes.count == 2
    assert shared.processes.active == 1


@pytest.mark.parametrize("count", [1, 7, 3000])  # the last are more than wait to be taken
def test_each_item_is_done_once_and_results_are_in_order(count):
    processes = Processes(3)
    results = processes.map_with_forks(lambda item: -item, range(count), count=3)
    processes.reap()
    assert results == [-item for item in range(count)]


def test_what_an_item_maps_is_not_handed_out_again(shared):
    def map_two(item):
        return shared.processes.map("count", lambda part: shared.processes.count, [1, 2], None)

    assert shared(map_two) == [[1, 1], [1, 1]]


def test_only_work_that_has_shown_to_be_long_is_shared(monkeypatch):
    now = 0.0
    counts = []

    def map_with_forks(run, items, count, begin):
        counts.append(count)
        return [run(item) for item in items]

    def work(seconds):
        nonlocal now
        now += seconds
        return seconds

    monkeypatch.setattr(forks, "time", Mock(perf_counter=lambda: now))

    processes = Processes(4)
    monkeypatch.setattr(processes, "map_with_forks", map_with_forks)
    fork = forks.FORK_COST * forks.FORK_SECONDS
    assert processes.map("work", work, [fork / 10] * 9, None) == [fork / 10] * 9
    assert counts == []
    assert processes.map("work", work, [10 * fork] * 9, None) == [10 * fork] * 9
    assert counts.pop() == 4  # the eight after the first one

    processes.map("work", work, [10 * fork] * 9, None)
    assert counts.pop() == 4  # all nine

    processes.map("work", work, [fork * 1.2] * 3, None)
    assert counts.pop() == 3

    processes.map("work", work, [fork * 1.2] * 3, None)
    assert counts.pop() == 2  # a third process would take as long as it saves
    assert counts == []


# What goes wrong


def test_an_item_that_fails_in_a_fork_fails_here_in_its_own_words(shared):
    def fail(item):
        if item == 2:
            raise ValueError(f"broken {item}")
        return item

    with pytest.raises(ValueError, match="broken 2") as caught:
        shared(fail)
    assert caught.traceback[-1].name == "fail"


@pytest.mark.parametrize(
    ("act", "note"),
    [
        pytest.param(lambda shared: os.kill(os.getpid(), signal.SIGKILL), r"has died \(got SIGKILL\)", id="killed"),
        pytest.param(lambda shared: os._exit(3), r"has died \(exit code 3, .*\)", id="exit"),
        pytest.param(lambda shared: sys.exit("end"), r"has failed \(SystemExit: end\)", id="SystemExit"),
        pytest.param(
            lambda shared: lambda: None, r"cannot send what it has done \(.*\)", id="result that cannot be sent"
        ),
        pytest.param(lambda shared: torch.rand(1), "has drawn from PyTorch's global generator", id="random draw"),
    ],
)
def test_what_a_fork_has_not_done_is_done_here_and_forks_come_to_an_end(act, note, shared):
    def run(item):
        return act(shared) if shared.in_fork else item

    assert shared(run) == [1, 2]
    assert len(shared.notes) == 1
    assert re.fullmatch(f"a process that shared the work {note}; one process .* from here on", shared.notes[0])
    assert shared.processes.count == 1


def test_where_there_can_be_no_more_processes_there_are_fewer(monkeypatch):
    def fork():
        raise BlockingIOError("no more")

    monkeypatch.setattr(forks.os, "fork", fork)
    notes = []
    processes = Processes(3, notes.append)
    assert processes.map_with_forks(lambda item: -item, [1, 2], count=2) == [-1, -2]
    assert notes == ["no more processes can be started (no more); from here on the work is shared by 1"]


def test_a_system_without_prctl_has_forks_too(shared, monkeypatch):
    monkeypatch.setattr(forks, "_prctl", lambda: None)
    assert shared(lambda item: -item) == [-1, -2]
    assert shared.notes == []


def test_an_interruption_ends_the_forks(shared):
    never, _ = os.pipe()

    def run(item):
        if shared.in_fork:
            os.kill(os.getpid(), signal.SIGINT)  # as the terminal does to all processes; it is for the first
            os.read(never, 1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shared(run)
    assert shared.processes.count == 2
    assert shared.processes.active == 1


def test_forks_end_with_the_process_that_is_killed(tmp_path):
    alive, life = os.pipe()
    never, _ = os.pipe()

    def work(item):
        os.write(life, b".")
        os.read(never, 1)

    running = start_program(tmp_path, main=lambda: Processes(2).map_with_forks(work, [1, 2], count=2))
    os.close(life)
    assert os.read(alive, 1) + os.read(alive, 1) == b".."

    running.kill()
    running.join()
    assert os.read(alive, 1) == b""  # nobody is left who could write


# Runs


METHODS = [*methods().values(), STATEFUL]
METHODS_OF_MIXED_NETWORKS = [method for method in METHODS if method.mixed_networks]
VARIANTS = list(chain.from_iterable(map(check.variants_of, METHODS)))


@pytest.mark.parametrize("method", parameters_of([*METHODS, *VARIANTS]))
def test_law_8_forks_are_invisible(method, meetings, monkeypatch):
    if method in VARIANTS:
        monkeypatch.setattr(workers_law, "ROUNDS", 1)  # what clients keep comes back from a fork as without the variant
    assert_forks_are_invisible(meetings, method)


@pytest.mark.parametrize("method", parameters_of(METHODS_OF_MIXED_NETWORKS))
def test_law_8_forks_are_invisible_where_clients_have_different_networks(method, meetings, monkeypatch):
    monkeypatch.setattr(workers_law, "ROUNDS", 1)
    assert_forks_are_invisible(meetings, method, backbone=MIXED_NETWORKS)


def assert_forks_are_invisible(meetings, method, **run):
    name, _, _ = method.name.partition(" ")  # without that of its variant
    case = MethodCase(method, QUICK_OPTIONS.get(name), run)
    in_two_processes = workers_law.result_of(case)
    assert meetings

    torch.set_num_threads(1)
    in_one_process = workers_law.result_of(case)
    assert in_one_process == in_two_processes


def test_law_8_catches_what_only_the_process_of_an_item_knows(meetings):
    def run_round(state, cohort, fed, config):
        """Defect: the steps are counted beside what clients give, and the count matters."""
        task = fedavg.make_local_loss(fed.network)
        steps = []

        def local_loss(params, buffers, batch, context):
            steps.append(batch)
            return task(params, buffers, batch, context)

        state, terms = fedavg_round(state, cohort, fed, local_loss)
        return state._replace(params={name: value * len(steps) for name, value in state.params.items()}), terms

    planted = replace(find_method("fedavg"), name="planted", run_round=run_round)
    with pytest.raises(AssertionError, match="=="):
        assert_forks_are_invisible(meetings, planted)
    assert meetings


MISTAKE = """
from dataclasses import replace
import torch
from fedcli.papers.baselines import fedavg
from fedcli.registry import find_method
from fedcli.core.objectives import plain_loss

def run_round(state, cohort, fed, config):
    loss = plain_loss(fed.network)

    def local_loss(params, buffers, batch, context):
        value, aux = loss(params, buffers, batch, context)
        if cohort.round == 1:
            value = value.WRONG()
        return value, aux

    clients = fed.broadcast(state.params, state.buffers, cohort)
    clients, terms = fed.train(clients, cohort, local_loss)
    return state, terms

METHOD = replace(find_method("fedavg"), name="mine", run_round=run_round)
"""


def test_a_mistake_in_a_users_file_is_told_by_its_line(folder, always):
    (folder / "mine.py").write_text(MISTAKE)
    result = invoke("run", "./mine.py", *flags_of(THREE_ROUNDS))
    assert result.exit_code == 2
    assert "mine.py' fails in line 14 (got AttributeError: 'Tensor' object has no attribute 'WRONG')" in result.stderr


def test_header_and_record_say_how_many_processes_share_a_run(folder, always):
    """Records of earlier versions have one."""
    result = invoke("run", "fedavg", *flags_of(THREE_ROUNDS), "--out", "two")
    assert "cpu, float32, one client in each of 2 processes\n" in result.output

    result = invoke("run", "fedavg", *flags_of(THREE_ROUNDS), "--out", "one", "--workers", "1")
    assert "cpu, float32, one client after the other\n" in result.output

    with_forks = read_record(folder / "two")
    without_forks = read_record(folder / "one")
    assert with_forks["engine"]["processes"] == 2
    assert without_forks["engine"]["processes"] == 1
    assert with_forks["summary"] == without_forks["summary"]

    file = folder / "two" / RECORD
    older = re.sub(r',\s*"processes": 2', "", file.read_text())
    older = re.sub(r',\s*"digest": "\w+"', "", older)
    file.write_text(older)
    assert read_record(folder / "two")["engine"]["processes"] == 1


@pytest.mark.parametrize(("threads", "processes"), [(1, 2), (2, 1)])
def test_a_run_goes_on_with_another_number_of_processes_to_the_same_bits(threads, processes, folder, always):
    class InterruptFirstRound(Listener):
        def round(self, entry):
            raise KeyboardInterrupt

    whole = fedcli.run("scaffold", out="whole", **THREE_ROUNDS)

    torch.set_num_threads(threads)
    with pytest.raises(KeyboardInterrupt):
        fedcli.run("scaffold", out="parts", progress=InterruptFirstRound(), **THREE_ROUNDS)

    torch.set_num_threads(processes)
    run_command("resume", "parts")
    torch.set_num_threads(2)

    parts = read_record(folder / "parts")
    assert parts["engine"]["processes"] == processes
    assert parts["summary"] == whole.record["summary"]


def test_samples_are_counted_while_several_processes_train(folder, always):
    class Counts(Listener):
        seen = 0

        def samples(self, count):
            self.seen += count

    counts = Counts()
    fedcli.run("fedavg", out="run", progress=counts, dataset="digits", rounds=2, train_examples=200, num_clients=4)
    assert counts.seen > 0


# Which runs have forks, and how many


@contextmanager
def other_thread():
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    yield
    ends.set()
    thread.join()


def test_a_process_forks_where_that_is_safe_and_it_has_the_cores_to_itself(monkeypatch):
    assert workers.may_fork()

    with other_thread():
        assert not workers.may_fork()

    answers = []
    thread = threading.Thread(target=lambda: answers.append(workers.may_fork()), daemon=True)
    thread.start()
    thread.join()
    assert answers == [False]

    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert not workers.may_fork()

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        assert not workers.may_fork()

    with workers.joined(allows_forks=False):
        assert not workers.may_fork()

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    assert workers.may_fork()

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    assert not workers.may_fork()


@pytest.mark.parametrize(
    ("options", "threads", "threads_in_run", "processes_in_run"),
    [
        ({}, 2, 1, 2),
        ({}, 1, 1, 1),
        ({"clients_per_chunk": "2"}, 2, 2, 1),
        ({"backbone": f"{workers_law.__file__}:wide"}, 2, 2, 1),
    ],
    ids=["two threads", "one thread", "together", "large network"],
)
def test_only_small_networks_that_train_one_by_one_are_shared(
    options, threads, threads_in_run, processes_in_run, two_threads
):
    torch.set_num_threads(threads)
    _, fed = toy.federation(find_method("fedavg"), **options)
    with machine_settings(fed):
        assert torch.get_num_threads() == threads_in_run
        assert fed.engine.runner.processes.count == processes_in_run

    torch.set_num_threads(2)
    assert fed.engine.runner.processes.count == 1


def write_lines(folder, texts):
    """Writes files of a line each, by path."""
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")


@pytest.mark.parametrize(
    ("listing", "files", "expected"),
    [
        pytest.param("0::/", {}, 64, id="no limit"),
        pytest.param("0::/", {"cpu.max": "max 100000"}, 64, id="max"),
        pytest.param("0::/", {"cpu.max": "250000 100000"}, 3, id="a quota"),
        pytest.param(
            "0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2, id="the quota of a parent"
        ),
        pytest.param(
            "4:memory:/x\n3:cpu,cpuacct:/a",
            {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"},
            1,
            id="cgroup 1",
        ),
        pytest.param(
            "3:cpu:/elsewhere",
            {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"},
            4,
            id="cgroup 1 elsewhere",
        ),
        pytest.param(
            "3:cpu:/",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            64,
            id="cgroup 1 without a quota",
        ),
    ],
)
def test_a_process_has_the_cores_of_its_binding_and_its_container(listing, files, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda number: range(64))
    write_lines(tmp_path, files | {"listing": listing})
    assert allowed_cores(tmp_path, tmp_path / "listing") == expected


def test_a_run_has_no_more_threads_than_cores_unless_it_is_told_so(monkeypatch, two_threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cores, "allowed_cores", lambda: 1)
    _, fed = toy.federation(find_method("fedavg"), clients_per_chunk="2")
    with machine_settings(fed):
        assert torch.get_num_threads() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with machine_settings(fed):
        assert torch.get_num_threads() == 2


def unset_until_the_end(monkeypatch, name):
    """Takes a variable out of the environment, and makes monkeypatch undo what the test lets others set."""
    monkeypatch.setenv(name, "")  # else it would keep nothing of a variable that is not there
    monkeypatch.delenv(name)


def test_workers_have_as_many_threads_as_one_process(monkeypatch, two_threads):
    unset_until_the_end(monkeypatch, "OMP_NUM_THREADS")  # `launch` sets it
    monkeypatch.setattr(cores, "allowed_cores", lambda: 1)
    monkeypatch.setattr("torch.distributed.run.run", lambda options: None)
    monkeypatch.setattr(workers.logging, "disable", lambda: None)
    assert workers.launch(2, ["fedcli", "run"]) == 0
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_seconds_count_where_no_more_than_a_runs_own_processes_were_busy():
    load = {"round": 0, "start": 0.0, "end": 2.4}
    record = {"hardware": {"threads": 1}, "engine": {"processes": 2}, "load": [load], "moved": []}
    assert is_undisturbed(record)
    assert not is_undisturbed({**record, "engine": {"processes": 1}})

    busier_there = {"load": [load, {"round": 3, "start": 4.4, "end": 0.0}]}
    assert not is_undisturbed({**record, **busier_there})
    moved = [{"round": 3, "hardware": {"threads": 2}}]
    assert is_undisturbed({**record, **busier_there, "moved": moved})
    assert not is_undisturbed({**record, "load": [{**load, "end": 4.4}], "moved": moved})


SCRIPT = """
import fedcli

print("begins")
run = fedcli.run("fedavg", dataset="digits", rounds=2, train_examples=120, device="cpu", out="run")
print(run.record["engine"]["processes"])
"""


def test_a_script_without_a_guard_shares_its_run(folder, always, capfd):
    (folder / "script.py").write_text(SCRIPT)
    runpy.run_path("script.py", run_name="__main__")
    output, errors = capfd.readouterr()
    assert output.split() == ["begins", "2"]
    assert errors == ""


def test_a_model_that_a_fork_has_tested_is_not_tested_again_while_it_stays_the_same(always, shared, monkeypatch):
    setup, fed = toy.federation(find_method("local"))
    predict = fed.predict
    tested_here = 0  # models, in this process and not in its fork

    def watched(*arguments, **options):
        nonlocal tested_here
        tested_here += 1
        if fed.engine.runner.processes.active == 2:
            shared.meet()
        return predict(*arguments, **options)

    monkeypatch.setattr(fed, "predict", watched)
    with machine_settings(fed):
        state = laws.initial_state(setup, fed)
        state, _ = laws.method_round(setup, fed, state, fed.cohort(0))
        first = evaluation.evaluate(fed, setup.method, state)
        assert 0 < tested_here < fed.num_clients

        tested_here = 0
        assert evaluation.evaluate(fed, setup.method, state) == first
        assert tested_here == 0
