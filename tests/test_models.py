"""Trained models out of a run: kept by the run, taken out as modules, and as files that plain PyTorch loads."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import fedcli
from fedcli.data import datasets
from fedcli.runs import checkpoints, models, resume
from fedcli.runs.exports import export
from fedcli.runs.record import write_record
from tests.accuracies import accuracies_by_pytorch, accuracy
from tests.commands import output_of
from tests.listeners import Stop, StopAfter
from tests.run_options import SHORT_RUN
from tests.run_parts import file_names
from tests.torture.signed_files import content_of, sign_state
from tests.user_errors import raises_user_error

SMALL_RUN = {**SHORT_RUN, "num_clients": 2, "batch_size": 8, "rounds": 2}
GLOBAL_MODEL_RUN = {
    **SMALL_RUN, "method": "fedfm", "protocol": "fedfm:digits", "validation": 0.2, "rounds": 5, "lr": 0.1, "seed": 2,
}  # fmt: skip
NETWORK_WITH_NORM = """
from torch import nn

def small(channels, size, classes):
    width = 4 * (size // 2) ** 2
    return nn.Sequential(nn.Conv2d(channels, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
                         nn.Linear(width, 8), nn.Dropout(0.1), nn.Linear(8, classes))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs by kind: of a global model, personal ones, a network with normalisation, and prototypes."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "net.py").write_text(NETWORK_WITH_NORM)
    with_norms = f"{folder}/net.py:small"
    unvalidated = {**SMALL_RUN, "protocol": "fedfm:digits", "validation": 0}
    options_by_kind = {
        "global": GLOBAL_MODEL_RUN,
        "personal": {**unvalidated, "method": "local", "backbone": f"cnn-small,{with_norms}"},  # one for each client
        "norms": {**unvalidated, "method": "fedavg", "backbone": with_norms},
        "prototypes": {**SMALL_RUN, "method": "fedproto", "protocol": "fedsa:digits"},
    }
    return {kind: fedcli.run(**options, out=folder / kind) for kind, options in options_by_kind.items()}


def copy_run(run, folder):
    """Returns a run that is loaded from a copy of its folder, as another process finds it."""
    return fedcli.load(shutil.copytree(run.path, folder / "copy"))


@pytest.mark.slow
def test_plain_pytorch_reproduces_the_records_accuracies(runs, tmp_path):
    files = []
    for kind, client in (("global", None), ("norms", None), ("personal", 0), ("personal", 1)):
        file, _ = export(runs[kind], client=client, out=tmp_path / f"{kind}-{client}.pt2")
        files.append(file)

    accuracies = accuracies_by_pytorch(files, tmp_path)
    assert accuracies[0] == runs["global"].record["summary"]["selected"]
    assert accuracies[1] == runs["norms"].record["summary"]["selected"]
    of_clients = accuracies[2:]
    assert len(of_clients) == 2
    assert np.mean(of_clients) == runs["personal"].record["summary"]["selected"]
    assert runs["personal"].record["rounds"][-1]["clients"]["worst"] == min(of_clients)


def test_the_selected_model_is_not_the_last_one(runs, tmp_path):
    run = copy_run(runs["global"], tmp_path)
    summary = run.record["summary"]
    data = datasets.load("digits")
    assert accuracy(run.model(round="selected"), data.x_test, data.y_test) == summary["selected"]
    assert accuracy(run.model(round="last"), data.x_test, data.y_test) == summary["last"]
    assert summary["selected_round"] < run.record["rounds"][-1]["round"]


def test_a_model_takes_images_from_0_to_1_and_is_not_trained(runs):
    run = runs["global"]
    data = datasets.load("digits")
    model = run.model()
    assert not model.training
    assert not any(value.requires_grad for value in model.parameters())
    images = data.x_test[:5] / 255
    mean = torch.tensor(run.record["normalisation"]["mean"])[:, None, None]
    std = torch.tensor(run.record["normalisation"]["std"])[:, None, None]
    _, logits = model.network((images - mean) / std)
    assert torch.equal(model(images), logits)


@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_that_was_stopped_keeps_the_same_selected_model(stop, runs, tmp_path):
    whole = runs["global"].path
    folder = tmp_path / "run"
    with pytest.raises(Stop):
        fedcli.run(**GLOBAL_MODEL_RUN, out=folder, progress=StopAfter(stop))
    resume.resume(folder)
    assert file_names(folder) == file_names(whole)
    assert (folder / models.SELECTED).read_bytes() == (whole / models.SELECTED).read_bytes()


def test_selected_models_are_kept_only_where_they_differ_and_are_small(runs, tmp_path, monkeypatch):
    """Where the last round is selected, its models are kept anyway."""
    assert models.SELECTED in file_names(runs["global"].path)
    for kind in ("personal", "norms"):  # without a validation part the last round is the headline
        assert models.SELECTED not in file_names(runs[kind].path)
    better = fedcli.run(**{**GLOBAL_MODEL_RUN, "rounds": 4}, out=tmp_path / "better")
    assert better.record["summary"]["selected_round"] == 3  # after another round was selected, and kept
    assert models.SELECTED not in file_names(better.path)

    monkeypatch.setattr(models, "LARGEST_BYTES", 1000)
    run = fedcli.run(**GLOBAL_MODEL_RUN, out=tmp_path / "run")
    assert models.SELECTED not in file_names(run.path)
    with raises_user_error(f"{models.SELECTED}' lacks the models of round", "use round last"):
        run.model()
    assert run.model(round="last")


def test_models_classify_by_prototypes_and_by_the_classifier_as_accurately_as_the_record_says(runs, tmp_path):
    run = copy_run(runs["prototypes"], tmp_path)
    fed = resume.open_run(run.path).fed

    def accuracy_of_clients(prototypes):
        hits = 0.0
        for client, part in enumerate(fed.testing):
            model = run.model(client, round="last", prototypes=prototypes)
            hits += accuracy(model, fed.engine.images[part], fed.engine.labels[part]) * len(part)
        return hits / sum(map(len, fed.testing))

    last = run.record["rounds"][-1]
    assert accuracy_of_clients(prototypes=True) == pytest.approx(last["test_accuracy"], abs=1e-12)
    assert accuracy_of_clients(prototypes=False) == pytest.approx(last["classifier_accuracy"], abs=1e-12)

    file, card = export(run, client=1, round="last", prototypes=True)
    assert file.name == "model-client-1-last-prototypes.pt2"
    assert "gives minus the squared distances" in card.read_text()
    program = torch.export.load(file).module()
    images = torch.rand(7, *run.record["model"]["input"])
    assert torch.equal(program(images), run.model(1, round="last", prototypes=True)(images))


@pytest.mark.parametrize(
    ("kind", "act", "words"),
    [
        ("personal", lambda run: run.model(2), ["a model for each client, 0 to 1 (got client 2)"]),
        ("global", lambda run: run.model(round="first"), ["selected or last", "first"]),
        ("global", lambda run: run.model(prototypes=True), ["does not classify by prototypes"]),
        ("global", lambda run: run.model()(torch.zeros(1, 1, 8, 8, dtype=torch.uint8)), ["torch.uint8", "255"]),
        ("global", lambda run: run.model()(torch.zeros(2, 8, 8, 1)), ["[N, 1, height, width] (got [2, 8, 8, 1])"]),
        ("global", lambda run: run.predict(torch.zeros(1, 8, 8)), ["(got [1, 8, 8])", "image[None]"]),
        ("global", lambda run: export(run, "onnx"), ["pt or safetensors", "onnx"]),
    ],
)
def test_a_model_that_there_is_not_is_refused(kind, act, words, runs):
    with raises_user_error(*words):
        act(runs[kind])


def test_models_of_another_run_or_an_unfinished_one_are_refused(runs, tmp_path):
    run = copy_run(runs["global"], tmp_path)
    shutil.copy(run.path / checkpoints.CHECKPOINT, run.path / models.SELECTED)
    with raises_user_error(models.SELECTED, "use round last"):
        run.model()

    content = content_of(run.path / checkpoints.CHECKPOINT)
    content.parts["about"]["identity"] = "another"
    sign_state(run.path / checkpoints.CHECKPOINT, content)
    with raises_user_error(f"{checkpoints.CHECKPOINT}' lacks the models of round 5"):
        run.model(round="last")

    shutil.copy(runs["personal"].path / checkpoints.CHECKPOINT, run.path / checkpoints.CHECKPOINT)
    with raises_user_error("another kind of state", "use the method that wrote it"):
        run.model(round="last")

    write_record(run.path, {**run.record, "status": "interrupted"})
    with raises_user_error("has not finished"):
        fedcli.load(run.path).model()


def test_safetensors_have_the_tensors_of_the_module(runs, tmp_path):
    file, _ = export(runs["norms"], "safetensors", out=tmp_path / "norms")
    with safe_open(file, "pt") as opened:  # what is in the tensors is compared in test_old_runs.py
        assert json.loads(opened.metadata()["class_names"]) == runs["norms"].record["class_names"]
        assert {"body.1.running_mean", "head.weight", "mean"} <= set(opened.keys())


def test_a_name_with_a_dot_stays_whole(runs, tmp_path):
    names = ["model-lr0.1", "model-lr0.2", "model.safetensors"]
    files = [export(runs["norms"], "safetensors", out=tmp_path / name).file.name for name in names]
    assert files == ["model-lr0.1.safetensors", "model-lr0.2.safetensors", "model.safetensors"]


def test_the_command_writes_a_model_and_a_card_that_can_be_followed(runs, tmp_path, monkeypatch):
    run = copy_run(runs["global"], tmp_path)
    monkeypatch.chdir(run.path)

    output = output_of("export", run.path)

    assert output.split() == [f"{run.path}/model.pt2", f"{run.path}/model.pt2.md"]
    card = Path("model.pt2.md").read_text()
    summary = run.record["summary"]
    assert f"{summary['selected_round'] + 1} of 5" in card
    assert f"{100 * summary['selected']:.2f} %" in card
    assert "`fedfm:digits`" in card
    assert "--lr=0.1" in card
    _, _, loading = card.rpartition(": `")
    model = eval(loading.strip("`\n"), {"torch": torch, "file": "model.pt2"})
    assert model(torch.rand(8, 1, 8, 8)).shape == (8, 10)


def test_a_folder_that_is_there_gets_the_file_under_its_own_name(runs, tmp_path):
    assert export(runs["norms"], "safetensors", out=tmp_path).file == tmp_path / "model.safetensors"


def test_tensors_of_any_memory_format_are_exported_in_the_order_of_their_axes(tmp_path):
    text = NETWORK_WITH_NORM.replace(
        "nn.Conv2d(channels, 4, 3, 2, 1)", "nn.Conv2d(channels, 4, 3, 2, 1).to(memory_format=LAST)"
    )
    (tmp_path / "net.py").write_text(f"import torch\nLAST = torch.channels_last\n{text}")
    options = {**SMALL_RUN, "protocol": "fedfm:digits", "rounds": 1, "backbone": f"{tmp_path}/net.py:small"}
    run = fedcli.run("fedavg", out=tmp_path / "run", **options)
    file, _ = export(run, "safetensors", out=tmp_path / "norms")
    assert torch.equal(load_file(file)["body.0.weight"], run.model().state_dict()["network.body.0.weight"])
