import gc

import pytest
import torch

from fedcli.cli import display
from fedcli.core import backbones
from fedcli.data import official
from tests.commands import use_plain_terminal
from tests.networks import ToysCheckedOnce

torch.set_num_threads(1)  # tiny networks, and two workers share two cores


# Their tests wait for other processes or are long, so that one at the end would leave the other worker with nothing.
FIRST_FILES = ("test_cluster", "test_docs", "test_pages", "test_reproduce", "test_trust", "test_workers")
MIDDLE_FILES = (
    "test_api", "test_claims", "test_evidence", "test_lock", "test_notebook", "test_release", "test_results",
    "test_runs", "test_schema", "test_torture",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    """Puts long tests where the two workers begin: one at the first test, the other in the middle."""
    first = [item for item in items if item.path.stem in FIRST_FILES]
    middle = [item for item in items if item.path.stem in MIDDLE_FILES]
    rest = [item for item in items if item.path.stem not in FIRST_FILES + MIDDLE_FILES]
    num_before_middle = max(len(items) // 2 - len(first), 0)
    items[:] = [*first, *rest[:num_before_middle], *middle, *rest[num_before_middle:]]


def pytest_collection_finish():
    """Takes what all modules have made out of the sight of the garbage collector, which would look at it in vain."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_thread():
    """No test leaves more threads to those after it, which would be slower, and see another number."""
    yield
    left = torch.get_num_threads()
    torch.set_num_threads(1)
    assert left == 1


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder of data sets, which no test shares with the person who runs it."""
    monkeypatch.setenv("FEDCLI_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def tiny_sets(monkeypatch):
    """Tests import some random images as `cifar10` and the like, which a user may not."""
    monkeypatch.setattr(official, "refuse_other_images", lambda dataset: None)


TOYS_CHECKED_ONCE = ToysCheckedOnce(backbones.find)


@pytest.fixture(autouse=True)
def toys_checked_once(monkeypatch):
    """Networks of the toy files are checked as users' are, but once for all tests."""
    monkeypatch.setattr(backbones, "find", TOYS_CHECKED_ONCE)


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """Commands draw no figures of their runs, which takes longer than these."""
    monkeypatch.setattr(display, "plot_run", lambda record, folder: None)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder, and texts without colours for a terminal of 120 columns."""
    use_plain_terminal(monkeypatch)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"
