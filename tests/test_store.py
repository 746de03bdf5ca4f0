"""What a run goes on from: what its clients keep, in memory as far as it may be, and its files, whose damage is seen.

A damaged file, or another run's, is refused in a line that says how the run goes on.
"""

import shutil

import pytest
import torch
from safetensors.torch import load_file

import fedcli
from fedcli.core import Model
from fedcli.core.client_states import STATES, Store, types_by_name
from fedcli.core.optimizers import Adam, AdamState
from fedcli.core.tree_files import load_tree, save_tree
from fedcli.measure.client_features import features_after_one_more_round
from fedcli.runs import checkpoints, resume, rounds
from fedcli.runs.options import parse_size
from tests.run_options import SHORT_RUN
from tests.torture.source_runs import stopped_run
from tests.toy_methods import ToyState
from tests.user_errors import raises_user_error

STATE_BYTES = 40  # of a state of ten numbers
OPTIONS = {
    **SHORT_RUN,
    "train_examples": 60,
    "num_clients": 6,
    "batch_size": 8,
    "backbone": "cnn-small",
    "state_memory": "0",
}


def make_states(*numbers):
    """Returns for each number a state full of it, by client, which is the last digit of the number."""
    return {number % 10: ToyState({"w": torch.full((10,), float(number))}) for number in numbers}


def numbers_of(kept):
    """Returns by client the number of which its state is full."""
    return {client: state.params["w"].unique().item() for client, state in kept.items()}


def open_store(folder, memory, name=STATES):
    """Makes a store of so many bytes whose files are in a folder."""
    store = Store(memory, torch.device("cpu"), [ToyState])
    store.keep_files_in(folder / name)
    return store


def names_of_state_files(folder):
    """Returns the names of the files of states in the folder of a run, without their suffix."""
    return sorted(path.name.removesuffix(".safetensors") for path in (folder / STATES).glob("*"))


def test_what_does_not_fit_into_memory_lies_in_files(tmp_path):
    """The state that was kept first goes there first."""
    store = open_store(tmp_path, 2 * STATE_BYTES)
    kept = store.keep({}, make_states(2), 0)
    kept = store.keep(kept, make_states(1), 0)
    assert names_of_state_files(tmp_path) == []

    kept = store.keep(kept, make_states(4), 1)
    assert names_of_state_files(tmp_path) == ["000002-0"]
    assert [client for client, version in kept.versions.items() if version.state is not None] == [1, 4]
    assert numbers_of(kept) == {1: 1, 2: 2, 4: 4}
    assert isinstance(kept[2], ToyState)
    assert list(kept) == [1, 2, 4]
    assert 2 in kept
    assert kept.get(7, "none") == "none"

    fewer = kept.select([2, 4])  # which fit
    assert numbers_of(fewer) == {2: 2, 4: 4}
    assert all(version.state is not None for version in fewer.versions.values())


@pytest.mark.parametrize("memory", [0, 2 * STATE_BYTES, 10**6])
def test_older_states_stay_as_long_as_a_method_holds_them(memory, tmp_path):
    store = open_store(tmp_path, memory)
    first_states = make_states(1, 2)
    old = store.keep({}, first_states, 0)
    first_states[1].params["w"].zero_()  # they are copies
    new = store.keep(old, make_states(12), 1)
    new = store.keep(new, make_states(22), 1)  # twice in a round
    assert numbers_of(old) == {1: 1, 2: 2}
    assert numbers_of(new) == {1: 1, 2: 22}

    del old
    newest = store.keep(new, make_states(3), 2)
    assert numbers_of(newest) == {1: 1, 2: 22, 3: 3}
    if memory == 0:
        # Nobody holds the first two states of client 2 any more.
        assert names_of_state_files(tmp_path) == ["000001-0", "000002-1-again", "000003-2"]


def test_a_file_that_has_changed_is_not_read(tmp_path):
    kept = open_store(tmp_path, 0).keep({}, make_states(1, 2), 0)
    file = tmp_path / STATES / "000001-0.safetensors"
    shutil.copy(tmp_path / STATES / "000002-0.safetensors", file)
    with raises_user_error(f"'{file}' is missing or damaged"):
        kept[1]


def test_a_checkpoint_leaves_what_other_workers_keep_for_themselves(tmp_path):
    open_store(tmp_path, 0).keep({}, make_states(1), 0)
    of_other_worker = open_store(tmp_path, 0, f"{STATES}-1").keep({}, make_states(1), 0)
    checkpoints.remove_unreferenced_states(tmp_path)  # after a checkpoint that names nothing
    assert numbers_of(of_other_worker) == {1: 1}
    assert [path.name for path in tmp_path.iterdir()] == [f"{STATES}-1"]
    checkpoints.remove_states_of_other_workers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_sizes_are_bytes_or_have_a_unit_of_1024_and_all_else_is_refused():
    bytes_of = {"0": 0, "1000": 1000, "3k": 3 * 1024, "256M": 256 * 1024**2, "4G": 4 * 1024**3}
    for text, size in bytes_of.items():
        assert parse_size(text) == size
    for text in ("", "M", "1.5G", "-1", "256MB", "lots"):
        with raises_user_error("--state-memory must be a number of bytes"):
            parse_size(text)


# In runs


def clients_of_round(run, number):
    """Returns the clients that take part in a round of a run."""
    return resume.restore(run.record, ()).fed.cohort(number).client_ids


@pytest.mark.parametrize("memory", ["0", "1G"])
def test_a_checkpoint_writes_what_its_cohort_keeps_and_only_once(memory, tmp_path):
    times_of_rounds = []  # after each round, when each file was written

    class Watch(rounds.Listener):
        def round(self, entry):
            files = (tmp_path / "run" / STATES).iterdir()
            times_of_rounds.append({file.stem: file.stat().st_mtime_ns for file in files})

    options = {**OPTIONS, "rounds": 6, "state_memory": memory}
    run = fedcli.run("scaffold", out=tmp_path / "run", progress=Watch(), **options)

    with_checkpoint = times_of_rounds[:-1]
    assert len(with_checkpoint) == 5
    times_before = {}
    names_before = {}  # of the last checkpoint's files, by client
    for number, times in enumerate(with_checkpoint):
        new_names = {client: f"{client:06}-{number}" for client in clients_of_round(run, number)}
        assert times.keys() - times_before.keys() == {*new_names.values()}
        assert all(times[name] == times_before[name] for name in times.keys() & times_before.keys())
        names = names_before | new_names
        assert times.keys() == {*names_before.values(), *names.values()}  # of this checkpoint and the one before
        times_before = times
        names_before = names


def test_a_finished_run_keeps_what_is_needed_of_it(tmp_path):
    personal = fedcli.run("local", out=tmp_path / "personal", **OPTIONS)
    assert len(names_of_state_files(personal.path)) == len(personal.state.clients) > 2

    needed = fedcli.run("scaffold", out=tmp_path / "needed", keep_states=False, **OPTIONS)
    everything = fedcli.run("scaffold", out=tmp_path / "everything", keep_states=True, **OPTIONS)
    assert len(everything.state.clients) > len(needed.state.clients)
    assert set(needed.state.clients) == set(everything.state.clients) & set(clients_of_round(needed, OPTIONS["rounds"]))
    for run in (needed, everything):
        clients = [int(name.partition("-")[0]) for name in names_of_state_files(run.path)]
        assert clients == list(run.state.clients)
    points = features_after_one_more_round(needed.path)
    expected = features_after_one_more_round(everything.path)
    assert all((points[name] == expected[name]).all() for name in ("features", "labels", "clients"))


# Damage


# How the folder of a run may be damaged. Each function returns the damaged file.


def change_byte(folder, position):
    checkpoint = folder / checkpoints.CHECKPOINT
    content = bytearray(checkpoint.read_bytes())
    content[position] ^= 1
    checkpoint.write_bytes(content)
    return checkpoint


def change_digest(folder):
    return change_byte(folder, 60)


def change_structure(folder):
    return change_byte(folder, 200)


def change_tensors(folder):
    return change_byte(folder, -5)


def cut_checkpoint(folder):
    checkpoint = folder / checkpoints.CHECKPOINT
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    return checkpoint


def take_checkpoint_of_another_run(folder):
    checkpoint = folder / checkpoints.CHECKPOINT
    other = stopped_run("client state", seed=1)
    shutil.copy(other.folder / checkpoint.name, checkpoint)
    return checkpoint


def list_client_states(folder):
    """Returns the files of the states that clients kept in the last round."""
    return sorted((folder / STATES).glob("*-1.safetensors"))


def remove_client_state(folder):
    client_state, *_ = list_client_states(folder)
    client_state.unlink()
    return client_state


def exchange_client_state(folder):
    client_state, other, *_ = list_client_states(folder)
    shutil.copy(other, client_state)
    return client_state


DAMAGES = (
    change_digest, change_structure, change_tensors, cut_checkpoint, remove_client_state, exchange_client_state,
)  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        *[(damage, "is missing or damaged") for damage in DAMAGES],
        (take_checkpoint_of_another_run, "is of another run"),
    ],
)
def test_damage_is_refused_and_the_checkpoint_before_ends_in_the_same_bits(damage, fault, tmp_path):
    source = stopped_run("client state")
    folder = shutil.copytree(source.folder, tmp_path / "run")
    damaged = damage(folder)
    with raises_user_error(f"'{damaged}' {fault}; restore it, or delete "):
        resume.resume(folder)

    (folder / checkpoints.CHECKPOINT).unlink()
    record = resume.resume(folder).record
    assert record["summary"]["params_sha256"] == source.outcome
    assert record["resumed"] == [1]


def adam_states(wrap):
    """Returns what a method may keep of a client that trains by Adam, whose state `wrap` makes of its parts."""
    moments = {"w": torch.tensor([0.5, -2.0])}
    squares = {"w": torch.tensor([0.25, 4.0])}
    return {"model": Model({"w": torch.ones(2)}, {}), "local": wrap(torch.tensor(3.0), moments, squares)}


@pytest.mark.parametrize("wrap", [AdamState, lambda *parts: parts], ids=["named", "the plain tuple of before"])
def test_adam_goes_on_from_a_file(tmp_path, wrap):
    kept = adam_states(wrap)
    grads = {"w": torch.tensor([1.0, 2.0])}
    expected, _ = Adam().update(kept["model"].params, grads, adam_states(AdamState)["local"], torch.tensor(0.1))
    save_tree(tmp_path / "file", kept, {})

    loaded = load_tree(tmp_path / "file", types_by_name(())).tree

    assert type(loaded["local"]) is type(kept["local"])
    params, state = Adam().update(loaded["model"].params, grads, loaded["local"], torch.tensor(0.1))
    assert torch.equal(params["w"], expected["w"])
    assert state.steps == 4


def test_tensors_are_read_as_they_were_written(tmp_path):
    shared = torch.tensor([float("nan"), float("-inf"), 1, 2])
    tree = {
        "half": shared.bfloat16(), "double": shared.double(), "scalar": torch.tensor(7), "empty": torch.zeros(0, 4),
        "mask": shared > 1, "part": shared[1:], "shared": shared, "strided": torch.arange(6).expand(3, 6).T,
    }  # fmt: skip
    facts = {"number": 0.1, "list": [1, None]}
    save_tree(tmp_path / "file", tree, facts)

    tensors = load_file(tmp_path / "file")  # as another program reads it
    loaded = load_tree(tmp_path / "file", {})
    assert loaded.facts == facts
    for name, tensor in tree.items():
        torch.testing.assert_close(tensors[f"/{name}"], tensor, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(loaded.tree[name], tensor, rtol=0, atol=0, equal_nan=True)
