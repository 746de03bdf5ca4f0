"""What every test has: seeded draws, one thread, a folder of data sets of its own, and no figures of its runs."""

import copy
import gc

import pytest
import torch

from fedcli import toy
from fedcli.cli import display
from fedcli.core import backbones
from fedcli.data import official
from tests import networks
from tests.bench_parts import measure_three_rounds, reduce_workloads
from tests.commands import use_plain_terminal

torch.set_num_threads(1)  # tiny networks, and two workers share two cores


def pytest_collection_modifyitems(items):
    """Puts long tests where the two workers begin: one at the first test, the other in the middle."""
    long = {0: [], 1: []}  # by the worker that begins with them
    rest = []
    for item in items:
        marker = item.get_closest_marker("long")
        if marker is None:
            rest.append(item)
        else:
            long[marker.kwargs["worker"]].append(item)
    num_before_middle = max(len(items) // 2 - len(long[0]), 0)
    items[:] = [*long[0], *rest[:num_before_middle], *long[1], *rest[num_before_middle:]]


def pytest_collection_finish():
    """Takes what all modules have made out of the sight of the garbage collector, which would look at it in vain."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Seeds the global generator, so that what a test draws does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture
def two_threads():
    """Gives PyTorch two threads during a test."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_thread():
    """Asserts that a test leaves one thread to those after it, which more threads make slower and of other bits."""
    yield
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert num_threads == 1


@pytest.fixture(scope="session", autouse=True)
def cache_of_session(tmp_path_factory):
    """Gives fixtures that last for a module, which are made before those of a test, a folder of data sets as well."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("FEDCLI_DATA", str(tmp_path_factory.mktemp("session") / "cache"))
        yield


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Gives each test a folder of data sets of its own, apart from that of the person who runs the tests."""
    monkeypatch.setenv("FEDCLI_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def accept_other_images(monkeypatch):
    """Lets tests import random images as `cifar10` and the like, which a user may not."""
    monkeypatch.setattr(official, "refuse_other_images", lambda dataset: None)


TOY_FILES = (networks.__file__, toy.__file__)  # with networks that are named as a user's own are


class CachingFind:
    """Finds networks as `backbones.find` does, but checks those of the toy files once for each seed and shape.

    The check takes most of the time of a law. Copies of the checked network are given after that. Networks of other
    files are checked each time, as users' are.
    """

    def __init__(self, find):
        self.find = find
        self.checked = {}

    def __call__(self, name):
        recipe = self.find(name)
        path, _, _ = name.rpartition(":")
        if path not in TOY_FILES:
            return recipe

        def make(*shape):
            key = (name, shape, torch.initial_seed())
            if key not in self.checked:
                self.checked[key] = recipe.make(*shape)
            return copy.deepcopy(self.checked[key])

        return recipe._replace(make=make)


CACHING_FIND = CachingFind(backbones.find)


@pytest.fixture(autouse=True)
def toys_checked_once(monkeypatch):
    """Checks the networks of the toy files once for all tests, and not each time that one is made."""
    monkeypatch.setattr(backbones, "find", CACHING_FIND)


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """Keeps commands from drawing figures of their runs, which takes longer than the runs."""
    monkeypatch.setattr(display, "plot_run", lambda record, folder: None)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Makes an empty working folder, for commands that print plain text in 120 columns; returns its path."""
    use_plain_terminal(monkeypatch)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture
def reduced_workloads(folder, monkeypatch):
    """Reduces the workloads of `fedcli bench`, in an empty working folder."""
    reduce_workloads(monkeypatch, folder)


@pytest.fixture(scope="session")
def three_rounds(tmp_path_factory):
    """Three timed rounds of a reduced workload, whose seconds are given."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        reduce_workloads(monkeypatch, tmp_path_factory.mktemp("reduced"))
        return measure_three_rounds(monkeypatch)
