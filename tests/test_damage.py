"""Files of a run that are damaged, cut or another run's: refused in a line, or without effect on the result."""

import json
import random
import shutil

import numpy as np
import pytest
import torch

import fedcli
from fedcli.errors import UserError
from fedcli.figures import quality
from fedcli.runs import checkpoints, records
from fedcli.runs import run as runs

TINY = {
    "train_examples": 60, "num_clients": 4, "cohort_size": 2, "rounds": 3, "local_epochs": 1, "batch_size": 8,
    "device": "cpu", "checkpoint_every": 1, "backbone": "cnn-small",
}  # fmt: skip
KINDS = {
    "global model": {"method": "fedfm"},
    "client state": {"method": "scaffold"},
    "personal": {"method": "local"},
    "heterogeneous": {"method": "fedproto", "protocol": "fedsa:digits-mixed", "backbone": None},
    "public": {
        "method": "fccl-plus", "protocol": "fccl:digit-domains", "public_examples": 12, "public_batch_size": 6,
        "cohort_size": 4, "backbone": None,
    },
    "server training": {"method": "fedgen"},
}  # fmt: skip


class Stop(Exception):
    """Ends a run from outside."""


class StopAfterTwo(runs.Listener):
    def round(self, entry):
        if entry["round"] == 1:
            raise Stop


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Of each kind a run that stopped after two of three rounds, one of another seed, and how it should end."""
    found = {}
    for kind, options in KINDS.items():
        folder = tmp_path_factory.mktemp("runs")
        for name, seed in (("run", 0), ("other", 1)):
            with pytest.raises(Stop):
                fedcli.run(**{**TINY, **options, "seed": seed}, out=folder / name, progress=StopAfterTwo())
        end = runs.resume(shutil.copytree(folder / "run", folder / "whole")).record["summary"]["params_sha256"]
        found[kind] = folder, end
    return found


def spoil(folder, other, draw):
    """Flips a bit of one of the files of a run, cuts it, or puts the other run's in its place; says what it did."""
    file = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    content = bytearray(file.read_bytes())
    own = other / file.relative_to(folder)
    if file.parent.name == "states" and not own.is_file():
        own = next((other / "states").iterdir())
    how = draw.choice(("flip", "cut", "exchange" if own.is_file() else "cut"))  # not all keep a selected model
    if how == "flip":
        place = draw.randrange(len(content))
        content[place] ^= 1 << draw.randrange(8)
    elif how == "cut":
        del content[draw.randrange(len(content)) :]
    else:
        content = own.read_bytes()
    file.write_bytes(content)
    return f"{how} {file.name}"


def refused_or_the_same(folder, end):
    """Resumes a run that was spoilt; True where that was refused, in one line."""
    try:
        record = runs.resume(folder).record
    except UserError as error:
        return "\n" not in str(error)
    assert record["summary"]["params_sha256"] == end
    return False


@pytest.mark.parametrize("number", range(60))
def test_a_damaged_run_is_refused_or_ends_in_the_same_bits(number, made, tmp_path):
    draw = random.Random(number)
    kind = list(KINDS)[number % len(KINDS)]
    source, end = made[kind]
    folder = shutil.copytree(source / "run", tmp_path / "run")
    other = source / "other"
    what = spoil(folder, other, draw)
    refused = refused_or_the_same(folder, end)
    assert refused or what not in ("exchange record.json", "exchange checkpoint.safetensors")


@pytest.mark.parametrize("part", ["digest", "length", "structure", "tensors", "cut"])
def test_after_damage_a_run_goes_on_from_the_checkpoint_before(part, made, tmp_path):
    source, end = made["client state"]
    folder = shutil.copytree(source / "run", tmp_path / "run")
    file = folder / checkpoints.CHECKPOINT
    content = bytearray(file.read_bytes())
    content[{"digest": 40, "length": 0, "structure": 200, "tensors": -5, "cut": 0}[part]] ^= 1
    file.write_bytes(content[: 1000 if part == "cut" else None])
    record = runs.resume(folder).record
    assert record["summary"]["params_sha256"] == end
    assert record["resumed"] == [1]
    [note] = record["engine"]["notes"]
    assert f"'{file}' is damaged" in note["text"]
    assert records.read_record(folder) == record


def test_where_both_checkpoints_are_damaged_the_line_says_what_to_do(made, tmp_path):
    source, end = made["global model"]
    folder = shutil.copytree(source / "run", tmp_path / "run")
    for name in (checkpoints.CHECKPOINT, checkpoints.PREVIOUS):
        (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    with pytest.raises(UserError, match=r"is damaged .* and .* is damaged .*; delete both to resume from the first"):
        runs.resume(folder)
    for file in folder.glob("checkpoint*"):
        file.unlink()
    assert runs.resume(folder).record["summary"]["params_sha256"] == end


def test_another_runs_checkpoint_is_refused_and_left_alone(made, tmp_path):
    source, end = made["personal"]
    folder = shutil.copytree(source / "run", tmp_path / "run")
    file, own = folder / checkpoints.CHECKPOINT, (source / "run" / checkpoints.CHECKPOINT).read_bytes()
    shutil.copy(source / "other" / checkpoints.CHECKPOINT, file)
    with pytest.raises(UserError, match=r"is of another run .*; put the run's own back"):
        runs.resume(folder)
    file.write_bytes(own)
    assert runs.resume(folder).record["summary"]["params_sha256"] == end


def test_an_older_checkpoint_is_refused(made, tmp_path):
    folder = shutil.copytree(made["personal"][0] / "run", tmp_path / "run")
    for file in folder.glob("checkpoint*"):
        file.unlink()
    torch.save({}, folder / "checkpoint.pt")
    with pytest.raises(UserError, match="has the form of an older version"):
        runs.resume(folder)


def test_a_record_changed_by_hand_is_refused_and_one_without_a_digest_is_older(made, tmp_path):
    folder = shutil.copytree(made["global model"][0] / "run", tmp_path / "run")
    file, whole = folder / "record.json", records.read_record(folder)
    text = file.read_text()
    file.write_text(text.replace('"rounds": 3', '"rounds": 2'))
    with pytest.raises(UserError, match="damaged or was changed by hand"):
        records.read_record(folder)
    file.write_text(json.dumps(whole))
    assert records.read_record(folder) == whole


def test_features_that_the_record_does_not_name_are_refused(tmp_path):
    folders = [fedcli.run("fedavg", **TINY, seed=seed, out=tmp_path / str(seed)).path for seed in (0, 1)]
    for folder in folders:
        quality.add_quality(folder)
    shown, _ = quality.one_a_setting([folders[0]])
    file = folders[0] / quality.FEATURES
    whole = file.read_bytes()
    assert set(quality.kept_outputs(shown[0])[1]) == {"features", "labels", "predicted"}
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 4
    for content in (flipped, whole[:-1], (folders[1] / quality.FEATURES).read_bytes()):
        file.write_bytes(content)
        with pytest.raises(UserError, match="is not what the run's record names"):
            quality.kept_outputs(shown[0])


def test_a_tree_is_read_as_it_was_written(tmp_path):
    draw = torch.Generator().manual_seed(0)
    tree = {
        3: (torch.randn(2, 3, generator=draw), None, 1.5), 10: [torch.tensor(7), torch.zeros(0, 4), "word"],
        "a": {"b/c": torch.tensor([True, False, True])}, "a/b": {"c": torch.randn(3, generator=draw).double()},
        "half": torch.randn(5, generator=draw).bfloat16(), "expanded": torch.tensor([1, 2]).expand(3, 2).T,
        "nan": torch.tensor([float("nan"), float("-inf")]), "empty": {}, "int": 2**60,
    }  # fmt: skip
    about = {"number": 0.1, "list": [1, None]}
    checkpoints.save(tmp_path / "file", tree, about)
    found, said = checkpoints.load(tmp_path / "file")
    assert said == about
    assert list(found) == list(tree)
    assert (found[3][1:], found[10][2], found["empty"], found["int"]) == ((None, 1.5), "word", {}, 2**60)
    pairs = [
        (found[3][0], tree[3][0]), *zip(found[10][:2], tree[10][:2], strict=True), (found["half"], tree["half"]),
        (found["a"]["b/c"], tree["a"]["b/c"]), (found["a/b"]["c"], tree["a/b"]["c"]),
        (found["expanded"], tree["expanded"]), (found["nan"], tree["nan"]),
    ]  # fmt: skip
    for one, other in pairs:
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one.nan_to_num(9), other.nan_to_num(9))


def test_a_file_has_the_form_of_safetensors(tmp_path):
    checkpoints.save(tmp_path / "file", {"x": torch.arange(6.0).reshape(2, 3), "y": torch.tensor([1, 2])}, {})
    content = (tmp_path / "file").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    assert size % 8 == 0
    assert set(header["__metadata__"]) == {"sha256", "tree", "about"}
    assert all(isinstance(value, str) for value in header["__metadata__"].values())
    assert header["/x"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [16, 40]}
    assert header["/y"] == {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}
    assert np.frombuffer(content[8 + size + 16 :], "<f4").tolist() == [0, 1, 2, 3, 4, 5]
