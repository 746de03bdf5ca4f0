"""Files of a run that are damaged, cut or another run's are refused in a line that says how the run goes on."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from fedcli.runs import checkpoints
from fedcli.runs import run as runs
from tests.files import refused
from tests.torture.trials import stopped_run


@pytest.mark.parametrize("part", ["digest", "structure", "tensors", "cut", "missing state", "exchanged state"])
def test_damage_is_refused_and_the_checkpoint_before_ends_in_the_same_bits(part, tmp_path):
    source, end = stopped_run("client state")
    folder = shutil.copytree(source / "run", tmp_path / "run")
    checkpoint = file = folder / checkpoints.CHECKPOINT
    if part.endswith("state"):
        file, second, *_ = sorted((folder / checkpoints.STATES).glob("*-1.safetensors"))
    if part == "missing state":
        file.unlink()
    elif part == "exchanged state":
        shutil.copy(second, file)
    else:
        content = bytearray(file.read_bytes())
        content[{"digest": 60, "structure": 200, "tensors": -5, "cut": 0}[part]] ^= 1
        file.write_bytes(content[: 1000 if part == "cut" else None])
    refused(lambda: runs.resume(folder), f"'{file}' is missing or not as it was", ", or delete checkpoint.safetensors")
    checkpoint.unlink()
    record = runs.resume(folder).record
    assert (record["summary"]["params_sha256"], record["resumed"]) == (end, [1])


def test_the_checkpoint_of_another_run_is_refused(tmp_path):
    source, end = stopped_run("client state")
    folder = shutil.copytree(source / "run", tmp_path / "run")
    shutil.copy(source / "other" / checkpoints.CHECKPOINT, folder)
    refused(lambda: runs.resume(folder), "is of another run", "put the run's own back")
    shutil.copy(source / "run" / checkpoints.CHECKPOINT, folder)
    assert runs.resume(folder).record["summary"]["params_sha256"] == end


def test_tensors_are_read_as_they_were_written(tmp_path):
    shared = torch.tensor([float("nan"), float("-inf"), 1, 2])
    tree = {
        "half": shared.bfloat16(), "double": shared.double(), "scalar": torch.tensor(7), "empty": torch.zeros(0, 4),
        "mask": shared > 1, "part": shared[1:], "shared": shared, "strided": torch.arange(6).expand(3, 6).T,
    }  # fmt: skip
    about = {"number": 0.1, "list": [1, None]}
    checkpoints.save(tmp_path / "file", tree, about)
    tensors = load_file(tmp_path / "file")  # as another program reads it
    loaded, said = checkpoints.load(tmp_path / "file", {})
    assert said == about
    for name, tensor in tree.items():
        torch.testing.assert_close(tensors[f"/{name}"], tensor, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0, equal_nan=True)
