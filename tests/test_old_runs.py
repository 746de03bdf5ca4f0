"""Runs of the first version that users have are resumed, loaded and exported."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

import fedcli
from fedcli.core.client_states import STATES
from fedcli.core.trees import leaves
from fedcli.measure.quality import add_quality
from fedcli.registry import find_method
from fedcli.runs import resume
from fedcli.runs.checkpoints import CHECKPOINT
from fedcli.runs.exports import export
from fedcli.runs.record import read_record, write_record
from tests.first_version_runs import NETWORK_FILE, OLD_RUN_OPTIONS, OLD_RUNS
from tests.user_errors import raises_user_error


@pytest.mark.parametrize("damaged", [None, CHECKPOINT, f"{STATES}/000003-1.safetensors"])
def test_a_stopped_run_goes_on_also_from_the_checkpoint_before(damaged, tmp_path):
    folder = shutil.copytree(OLD_RUNS / "stopped", tmp_path / "run")
    if damaged is not None:
        content = bytearray((folder / damaged).read_bytes())
        content[-5] ^= 1
        (folder / damaged).write_bytes(content)
        with raises_user_error("is missing or damaged"):
            resume.resume(folder, files=NETWORK_FILE, changed_method=True)
        (folder / CHECKPOINT).unlink()

    run = resume.resume(folder, files=NETWORK_FILE, changed_method=True)

    rounds_done = 2 if damaged is None else 1
    assert run.record["resumed"] == [rounds_done]
    whole = fedcli.run("scaffold", out=tmp_path / "whole", backbone=f"{NETWORK_FILE}:tiny", **OLD_RUN_OPTIONS)
    assert list(run.state.clients) == list(whole.state.clients)
    for client in run.state.clients:  # on another machine rounding may differ
        torch.testing.assert_close(run.state.clients[client], whole.state.clients[client], rtol=1e-3, atol=1e-5)
    for tensor, expected in zip(leaves(run.state[:2]), leaves(whole.state[:2]), strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("name", "client", "file"), [("finished", None, "model"), ("personal", 1, "model-client-1")])
def test_a_finished_run_is_loaded_and_exported(name, client, file, tmp_path):
    folder = shutil.copytree(OLD_RUNS / name, tmp_path / "run")
    run = fedcli.load(folder, method=NETWORK_FILE)

    exported, _ = export(run, "safetensors", client, out=tmp_path / "new.safetensors")

    tensors = load_file(exported)
    expected = load_file((folder / file).with_suffix(".safetensors"))
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    model = run.model(client, round="last")
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 10)


def test_a_run_of_older_numerics_is_opened_and_only_resume_asks(tmp_path):
    folder = shutil.copytree(OLD_RUNS / "finished", tmp_path / "finished")
    numerics = {"core": 0, "method": 1}
    write_record(folder, {**read_record(folder), "numerics": numerics})
    quality = add_quality(folder)
    assert read_record(folder)["quality"] == quality

    stopped = shutil.copytree(OLD_RUNS / "stopped", tmp_path / "stopped")
    facts = {"method_hash": find_method("scaffold").file_hash, "numerics": numerics}
    write_record(stopped, {**read_record(stopped), **facts})
    with raises_user_error("got numerics {'core': 1,", " was {'core': 0,", "--changed-method"):
        resume.resume(stopped, files=NETWORK_FILE)
