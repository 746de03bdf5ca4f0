import pytest
import torch

torch.set_num_threads(1)  # tiny networks, and two workers share two cores


@pytest.fixture(autouse=True)
def own_data_folder(tmp_path, monkeypatch):
    """No test sees the data sets of the person who runs it."""
    monkeypatch.setenv("FEDCLI_DATA", str(tmp_path / "fedcli-data"))
