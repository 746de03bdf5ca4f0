import pytest
import torch

torch.set_num_threads(1)  # tiny networks, and two workers share two cores


# Their tests wait for other processes or are long, so that one at the end would leave the other worker with nothing.
FIRST = ("test_workers", "test_cluster", "test_lock", "test_doors", "test_notebook")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem not in FIRST)


@pytest.fixture(autouse=True)
def own_data_folder(tmp_path, monkeypatch):
    """No test sees the data sets of the person who runs it."""
    monkeypatch.setenv("FEDCLI_DATA", str(tmp_path / "fedcli-data"))
