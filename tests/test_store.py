"""What clients keep: in memory as far as it may be, the rest in files that a checkpoint names."""

import shutil

import pytest
import torch

import fedcli
from fedcli.core.federation import NonFiniteLoss
from fedcli.figures.quality import one_more_round
from fedcli.runs import checkpoints, config, rounds
from fedcli.runs import run as runs
from fedcli.runs.checkpoints import STATES
from fedcli.runs.models import SELECTED
from tests.files import refused
from tests.test_runs import TINY as RUN
from tests.test_runs import Stop, StopAfter
from tests.toys import ClientState

BYTES = 40  # of a state of ten numbers
TINY = {**RUN, "train_examples": 60, "num_clients": 6, "batch_size": 8, "backbone": "cnn-small", "state_memory": "0"}


def state(number):
    return ClientState({"w": torch.full((10,), float(number))})


def states(*numbers):
    return {number % 10: state(number) for number in numbers}


def opened(folder, memory, worker=0):
    made = checkpoints.Store(memory, torch.device("cpu"), [ClientState])
    made.open(folder, worker)
    return made


def files(folder):
    return sorted(path.name.removesuffix(".safetensors") for path in (folder / STATES).glob("*"))


def held(kept):
    return {client: own.params["w"][0].item() for client, own in kept.items()}


def test_what_does_not_fit_into_memory_lies_in_files_the_one_used_last_at_last(tmp_path):
    made = opened(tmp_path, 2 * BYTES)
    first = made.keep(made.keep({}, states(1), 0), states(2), 0)
    assert files(tmp_path) == []
    assert torch.equal(first[1].params["w"], torch.ones(10))  # used now: 2 goes first
    later = made.keep(first, states(4), 1)
    assert files(tmp_path) == ["000002-0"]
    assert [version.client for version in later.data.values() if version.state is not None] == [1, 4]
    assert held(later) == {1: 1, 2: 2, 4: 4}
    assert isinstance(later[2], ClientState)
    assert (list(later), len(later), 2 in later, 7 in later) == ([1, 2, 4], 3, True, False)
    assert later.get(7, "none") == "none"


@pytest.mark.parametrize("memory", [0, 2 * BYTES, 10**6])
def test_older_states_stay_as_long_as_a_method_holds_them(memory, tmp_path):
    made = opened(tmp_path, memory)
    old = made.keep({}, states(1, 2), 0)
    new = made.keep(made.keep(old, states(12), 1), states(22), 1)  # twice in a round
    assert held(old) == {1: 1, 2: 2}
    assert held(new) == {1: 1, 2: 22}
    del old
    newest = made.keep(new, states(3), 2)
    assert held(newest) == {1: 1, 2: 22, 3: 3}
    if memory == 0:
        assert files(tmp_path) == ["000001-0", "000002-1-again", "000003-2"]  # nobody holds 2's first two any more


def test_states_are_copies_and_nothing_is_written_before_there_is_a_folder(tmp_path):
    made = checkpoints.Store(0, torch.device("cpu"), [ClientState])
    given = state(1)
    kept = made.keep({}, {1: given}, 0)
    given.params["w"].zero_()
    assert held(kept) == {1: 1}
    made.open(tmp_path)
    later = made.keep(kept, states(2), 1)
    assert held(later) == {1: 1, 2: 2}
    assert files(tmp_path) == ["000001-0", "000002-1"]


def test_a_state_that_is_not_finite_is_refused_with_its_place(tmp_path):
    with pytest.raises(NonFiniteLoss, match="'clients/3/params/w' of the state is not finite in round 6"):
        opened(tmp_path, 0).keep({}, {3: ClientState({"w": torch.tensor([1.0, torch.inf])})}, 5)


def test_a_file_that_has_changed_is_not_read(tmp_path):
    kept = opened(tmp_path, 0).keep({}, states(1, 2), 0)
    one, other = (tmp_path / STATES / f"00000{client}-0.safetensors" for client in (1, 2))
    shutil.copy(other, one)
    refused(lambda: kept[1], "what client 1 keeps ", "cannot be read (the SHA-256 of", "'fedcli resume'")
    one.unlink()
    refused(lambda: kept[1], "000001-0.safetensors' is missing")


def test_a_checkpoint_leaves_what_other_workers_keep_for_themselves(tmp_path):
    _, other = (opened(tmp_path, 0, worker).keep({}, states(1), 0) for worker in (0, 1))
    checkpoints.clear(tmp_path)  # after a checkpoint that names nothing
    assert files(tmp_path) == []
    assert held(other) == {1: 1}
    checkpoints.clear(tmp_path, at_rest=True)
    assert list(tmp_path.iterdir()) == []


def test_sizes():
    assert [config.parse_size(text) for text in ("0", "1000", "3k", "256M", "4G")] == [0, 1000, 3072, 2**28, 2**32]
    for text in ("", "M", "1.5G", "-1", "256MB", "lots"):
        refused(lambda text=text: config.parse_size(text), "--state-memory must be a number of bytes")


# In runs


class Watch(rounds.Listener):
    """Notes after each round which files there are, and when they were written."""

    def __init__(self, folder):
        self.folder, self.rounds = folder, []

    def round(self, entry):
        there = (self.folder / STATES).glob("*")
        self.rounds.append({path.name.removesuffix(".safetensors"): path.stat().st_mtime_ns for path in there})


@pytest.mark.parametrize("memory", ["0", "1G"])
def test_a_checkpoint_writes_what_its_cohort_keeps_and_only_once(memory, tmp_path):
    watch = Watch(tmp_path / "run")
    given = {**TINY, "rounds": 6, "state_memory": memory}
    run = fedcli.run("scaffold", out=watch.folder, progress=watch, **given)
    fed = runs.restore(run.record, runs.find_method("scaffold"))[1]
    assert len(watch.rounds) == 6
    before, last = {}, {}
    for number, found in enumerate(watch.rounds[:-1]):
        cohort = [f"{client:06}-{number}" for client in fed.cohort(number).client_ids]
        assert sorted(found.keys() - before.keys()) == cohort
        assert all(found[name] == before[name] for name in found.keys() & before.keys())
        now = {**last, **{name[:6]: name for name in cohort}}
        assert found.keys() == {*last.values(), *now.values()}  # of this checkpoint and the one before
        before, last = found, now


def test_a_finished_run_keeps_what_is_needed_of_it(tmp_path):
    own = fedcli.run("local", out=tmp_path / "own", **TINY)
    assert len(files(own.path)) == len(own.state.clients) > 2
    folders = [tmp_path / "rest", tmp_path / "all"]
    rest, everything = (
        fedcli.run("scaffold", out=folder, keep_states=folder.name == "all", **TINY) for folder in folders
    )
    following = runs.restore(rest.record, runs.find_method("scaffold"))[1].cohort(TINY["rounds"]).client_ids
    assert set(rest.state.clients) == set(everything.state.clients) & set(following)
    for run in (rest, everything):
        assert [int(name[:6]) for name in files(run.path)] == list(run.state.clients)
    expected = {checkpoints.CHECKPOINT, "record.json", STATES}
    assert {path.name for path in run.path.iterdir()} - {SELECTED} == expected
    assert len(everything.state.clients) > len(rest.state.clients)
    points, expected = map(one_more_round, folders)
    assert all((points[name] == expected[name]).all() for name in ("features", "labels", "clients"))


def test_what_a_kill_leaves_is_removed_when_the_run_goes_on(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Stop):
        fedcli.run("scaffold", **TINY, out=folder, progress=StopAfter(2))
    before = files(folder)
    for name in ("000003-2.safetensors", ".000004-2.safetensors.1.partial"):
        (folder / STATES / name).write_bytes(b"half")

    class First(rounds.Listener):
        def start(self, record, folder, samples_per_round, first_round):
            raise Stop

    with pytest.raises(Stop):
        runs.resume(folder, progress=First())
    assert files(folder) == before
