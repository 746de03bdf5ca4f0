"""Folders as PFLlib writes them: the same images, clients and test parts, and nothing in a pickle is run."""

import io
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from fedcli.core.parts import divide
from fedcli.data import datasets, imports
from fedcli.data.dataset import merge_splits
from tests.commands import run_command
from tests.partition_parts import DIVISION_OPTIONS, deal_parts, pixels
from tests.user_errors import raises_user_error


class Examples(NamedTuple):
    """Images and labels of a client."""

    x: np.ndarray
    y: np.ndarray


def write_pfllib_folder(folder, seed=0):
    """Writes a folder in the form of PFLlib: grey 4 x 4 images of three clients from -1 to 1, in pickled dictionaries.

    Returns the examples of each split and client.
    """
    rng = np.random.default_rng(seed)
    examples = {}
    for split, count in (("train", 6), ("test", 2)):
        (folder / split).mkdir(parents=True)
        for client in range(3):
            x = rng.integers(0, 256, (count, 1, 4, 4)).astype(np.uint8)
            y = rng.integers(0, 3, count)
            y[:2] = 0, 2
            examples[split, client] = Examples(x[:, 0], y)
            normalised = (x.astype(np.float32) / 255 - 0.5) / 0.5
            with (folder / split / f"{client}.npz").open("wb") as file:
                np.savez_compressed(file, data={"x": normalised, "y": y})
    (folder / "config.json").write_text('{"num_clients": 3}')
    (folder / "train" / "._0.npz").touch()  # as macOS leaves beside a file
    return examples


def test_a_folder_of_pfllibs_gives_the_same_images_clients_and_test_parts(tmp_path):
    examples = write_pfllib_folder(tmp_path / "Set")

    text = run_command("data", "import", "mine", tmp_path / "Set").output
    (flag,) = [word for word in text.split() if word.startswith("file:")]
    assert "18 training and 6 test images, 3 classes" in text
    assert "--num-clients 3" in text

    dataset = merge_splits(datasets.load("mine"))
    divided = divide(deal_parts(dataset, flag, 3), DIVISION_OPTIONS)
    for split, positions in (("train", divided.training), ("test", divided.testing)):
        for client in range(3):
            x, y = examples[split, client]
            expected = sorted(zip(y.tolist(), [image.tobytes() for image in x], strict=True))
            labels = dataset.y_train[positions[client]].tolist()
            assert sorted(zip(labels, pixels(dataset, positions[client]), strict=True)) == expected

    show = ("data", "show", "mine", "--partition", flag, "--num-clients", 3, "--out", tmp_path / "p.png")
    text = run_command(*show).output
    assert "18 to train, 6 to test" in text
    assert f"partition {flag}, seed 0, fingerprint " in text


def test_a_file_of_the_cache_that_is_imported_again_tells_where_its_clients_are(tmp_path, cache):
    write_pfllib_folder(tmp_path / "Set")
    imports.import_path("mine", tmp_path / "Set")
    file = cache / "mine.npz"
    _, notes = imports.import_path("again", file)
    assert notes == [
        "left out: the lists of clients train_0, train_1, train_2, test_0, test_1 and 1 more, which '--partition "
        "file:PATH' takes from an .npz"
    ]
    images_of_clients = []
    for name in ("mine", "again"):
        dataset = merge_splits(datasets.load(name))
        parts = deal_parts(dataset, f"file:{file}", 3)
        images_of_clients.append([pixels(dataset, part) for part in parts])
    assert images_of_clients[0] == images_of_clients[1]


def test_images_and_clients_of_a_folder_are_kept_by_one_step(tmp_path, cache, monkeypatch):
    """Whatever fills the disk at whatever moment, the clients are those of the images."""
    write_pfllib_folder(tmp_path / "Set")
    imports.import_path("mine", tmp_path / "Set")
    before = {path.name: path.read_bytes() for path in cache.iterdir()}
    write_pfllib_folder(tmp_path / "Other", seed=1)
    replace_file = Path.replace
    replaced = []
    most_replaced = 0

    def replace_while_space_is_left(path, target):
        if len(replaced) == most_replaced:
            raise OSError(28, "No space left on device")
        replaced.append(target)
        return replace_file(path, target)

    monkeypatch.setattr(Path, "replace", replace_while_space_is_left)
    with raises_user_error("No space left on device"):
        imports.import_path("mine", tmp_path / "Other")
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == before
    most_replaced = 1
    imports.import_path("mine", tmp_path / "Other")
    assert len(replaced) == 1
    assert [path.name for path in cache.iterdir()] == ["mine.npz"]


class Harmful:
    """What a pickle may do: call any function."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


def write_pickled(path, array, protocol=4):
    """Writes an .npz file whose `data` is this, pickled."""
    with zipfile.ZipFile(path, "w") as archive:
        member = io.BytesIO()
        np.lib.format.write_array_header_1_0(member, {"descr": "|O", "fortran_order": False, "shape": ()})
        archive.writestr("data.npy", member.getvalue() + pickle.dumps(array, protocol))


def test_nothing_in_a_pickle_is_run(tmp_path):
    write_pfllib_folder(tmp_path / "Set")
    file = tmp_path / "Set" / "train" / "1.npz"
    sign = tmp_path / "sign"
    for harm in (Harmful(sign), {"x": np.zeros((2, 1, 4, 4)), "y": Harmful(sign)}):
        write_pickled(file, np.array(harm, object))
        with raises_user_error("1.npz", "which no array needs"):
            imports.import_path("mine", tmp_path / "Set")
        assert not sign.exists()
    with np.load(file, allow_pickle=True) as loaded:
        loaded["data"]
    assert sign.exists()  # NumPy's own reader has run it

    for other_content in (np.array({"x": 1}, object), np.array([1, 2]), "text"):
        write_pickled(file, other_content)
        with raises_user_error("1.npz", "cannot be read"):
            imports.import_path("mine", tmp_path / "Set")


@pytest.mark.parametrize("protocol", [3, 4])
def test_arrays_of_every_kind_and_order_are_read(tmp_path, protocol):
    write_pfllib_folder(tmp_path / "Set")
    dtype = ">f8" if protocol == 3 else None
    x = np.asfortranarray(np.arange(32).reshape(2, 1, 4, 4) / 255, dtype)
    y = np.array([1, 2], np.int32)
    write_pickled(tmp_path / "Set" / "test" / "0.npz", np.array({"x": x, "y": y}, object), protocol)

    imports.import_path("mine", tmp_path / "Set")

    expected = np.rint((x[:, 0] + 1) * 127.5).astype(np.uint8)  # the others reach below 0
    imported = {image.numpy().tobytes() for image in datasets.load("mine").x_test}
    assert {image.tobytes() for image in np.ascontiguousarray(expected)} < imported


def test_a_name_or_folder_that_does_not_fit_is_refused(tmp_path, cache):
    write_pfllib_folder(tmp_path / "Set")
    with raises_user_error("'fmnist' is not possible", "fmnist-pfllib"):
        imports.import_path("fmnist", tmp_path / "Set")
    shutil.copy(tmp_path / "Set" / "test" / "2.npz", tmp_path / "Set" / "test" / "3.npz")
    with raises_user_error("'test/3.npz' is of none of the 3 clients in train"):
        imports.import_path("mine", tmp_path / "Set")
    (tmp_path / "Set" / "test" / "3.npz").unlink()
    (tmp_path / "Set" / "test" / "2.npz").unlink()
    with raises_user_error("2.npz", "cannot be read"):
        imports.import_path("mine", tmp_path / "Set")
    assert not cache.exists()
