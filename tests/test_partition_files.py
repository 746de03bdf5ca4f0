"""Partitions made elsewhere: lists in a file, folders as PFLlib writes them; and arrays that are converted."""

import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

import fedcli
from fedcli.core.partition import fingerprint, from_flag
from fedcli.core.parts import divide
from fedcli.data import datasets, imports
from fedcli.data.dataset import merge_splits
from fedcli.data.image_arrays import SPLITS
from tests.commands import invoke
from tests.image_files import image_arrays, import_arrays
from tests.user_errors import raises_user_error


class PartitionOptions:
    """What `divide` reads of a run's options."""

    local_test = 0.25
    validation = 0.0
    partition_seed = 0
    drop_last = False
    batch_size = 1


def write_split(folder, split):
    """Writes a split into a file; returns the flag of the partition."""
    file = folder / "split.json"
    file.write_text(json.dumps(split))
    return f"file:{file}"


def deal_parts(dataset, flag, num_clients, seed=0):
    """Returns the positions of the examples of each client under a partition."""
    deal = from_flag(flag)
    return deal(dataset.y_train, num_clients, seed, None, None, dataset.place_train)


def pixels(dataset, positions):
    return [image.numpy().tobytes() for image in dataset.x_train[positions]]


def test_positions_are_those_in_the_files_and_go_on_into_the_test_images(tmp_path):
    arrays = image_arrays((4, 4), 3)
    dataset = merge_splits(import_arrays("mine", tmp_path / "a", **arrays))
    all_images = [image.tobytes() for image in (*arrays["x_train"], *arrays["x_test"])]  # 9 and 6
    split = {"train": [[8, 0, 3], [10], [2]], "test": [[1, 9], [14, 9], []]}
    flag = write_split(tmp_path, split)

    parts = deal_parts(dataset, flag, 3)
    kept, testing, training, _ = divide(parts, PartitionOptions)

    for client in range(3):
        to_train_on = sorted(all_images[position] for position in split["train"][client])
        to_test_on = sorted(all_images[position] for position in split["test"][client])
        assert sorted(pixels(dataset, training[client])) == to_train_on
        assert sorted(pixels(dataset, kept[client])) == to_train_on
        assert sorted(pixels(dataset, testing[client])) == to_test_on
    assert fingerprint(parts) == fingerprint(deal_parts(dataset, flag, 3, seed=5))
    moved = {"train": [[8, 0, 3, 1], [10], [2]], "test": [[9], [14, 9], []]}  # from a client's test part to its own
    assert fingerprint(deal_parts(dataset, write_split(tmp_path, moved), 3)) != fingerprint(parts)


def test_a_list_alone_and_an_npz_file_are_the_same_split(tmp_path):
    dataset = import_arrays("mine", tmp_path / "a", **image_arrays((4, 4), 3))
    lists = [[8, 0], [], [2]]
    np.savez(tmp_path / "split.npz", train_0=[8, 0], train_1=np.array([], int), train_2=[2])
    expected = fingerprint(deal_parts(dataset, f"file:{tmp_path / 'split.npz'}", 3))
    assert fingerprint(deal_parts(dataset, write_split(tmp_path, lists), 3)) == expected
    assert fingerprint(deal_parts(dataset, write_split(tmp_path, {"train": lists}), 3)) == expected
    assert from_flag("file:split.json").flag == "file:split.json"
    for flag in ("file", "file:"):
        with raises_user_error("cannot be read", "write file:PATH"):
            fedcli.run("fedavg", partition=flag)


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ([[0], [1], [2]], ["lists of 3 clients, not 2", "--num-clients 3"]),
        ([[0], [99]], ["position 99 is not among the 9 images", "clients' own parts"]),
        ([[0], [-1]], ["position -1"]),
        ([[0, 1], [1]], ["position 1 is in two lists"]),
        ({"train": [[0, 1], [2]], "test": [[3], [1]]}, ["position 1 is in two lists"]),
        ({"train": [[0], [1]], "test": [[5, 5], [4]]}, ["position 5 is twice in one list"]),
        ([[2, 2], [1]], ["position 2 is twice in one list"]),
        ({"train": [[0], [1]], "test": [[2]]}, ["must be lists", "2 lists to train on, 1 to test on"]),
        ([[0.5], [1]], ["must be lists", "'float' object"]),
        ({"one": [0]}, ["must be lists", "train_0"]),
    ],
)
def test_wrong_splits_are_refused(tmp_path, split, words):
    dataset = import_arrays("mine", tmp_path / "a", **image_arrays((4, 4), 3))
    with raises_user_error(*words):
        deal_parts(dataset, write_split(tmp_path, split), 2)


def test_missing_files_unknown_places_and_pickles_are_refused(tmp_path):
    dataset = import_arrays("mine", tmp_path / "a", **image_arrays((4, 4), 3))
    with raises_user_error("'none.json' cannot be read (", "No such file", '{"train"'):
        deal_parts(dataset, "file:none.json", 2)
    np.savez(tmp_path / "split.npz", train_0=np.array([{"a": 1}], dtype=object))
    with raises_user_error("must be lists", "allow_pickle=False"):
        deal_parts(dataset, f"file:{tmp_path / 'split.npz'}", 1)
    flag = write_split(tmp_path, [[0], [1]])
    with raises_user_error("needs a data set with places", "import this one anew"):
        from_flag(flag)(dataset.y_train, 2, 0)


def test_a_run_tests_on_the_lists_of_the_file_and_its_record_tells(tmp_path, monkeypatch):
    split = {"train": [[0, 1, 2, 1700], [3, 4, 5]], "test": [[6, 1701], [7]]}  # 1,797 digits, of which some to test
    write_split(tmp_path, split)
    monkeypatch.chdir(tmp_path)
    options = {
        "protocol": "fedsa:digits", "partition": "file:split.json", "num_clients": 2, "cohort_size": 2, "rounds": 1,
        "batch_size": 2, "device": "cpu",
    }  # fmt: skip
    record = fedcli.run("fedavg", out=tmp_path / "run", per_class=True, **options).record
    assert record["config"]["partition"] == f"file:{tmp_path / 'split.json'}"
    assert record["partition"]["sizes"] == [6, 4]
    digits = merge_splits(datasets.load("digits"))
    is_tested = torch.isin(digits.place_train, torch.tensor([6, 1701, 7]))
    (entry,) = record["rounds"]
    assert entry["per_class"]["actual"] == torch.bincount(digits.y_train[is_tested], minlength=10).tolist()

    write_split(tmp_path, {"train": [[0], [1]], "test": [[2], [3]]})
    options |= {"protocol": "fedfm:digits", "out": tmp_path / "other"}
    with raises_user_error("has test lists, which the protocol fedfm:digits does"):
        fedcli.run("fedavg", **options)
    assert not (tmp_path / "other").exists()


# PFLlib's folders


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

    result = invoke("data", "import", "mine", tmp_path / "Set")
    assert result.exit_code == 0, result.output
    flag = next(word for word in result.output.split() if word.startswith("file:"))
    assert "18 training and 6 test images, 3 classes" in result.output
    assert "--num-clients 3" in result.output

    dataset = merge_splits(datasets.load("mine"))
    _, testing, training, _ = divide(deal_parts(dataset, flag, 3), PartitionOptions)
    for split, positions in (("train", training), ("test", testing)):
        for client in range(3):
            x, y = examples[split, client]
            expected = sorted(zip(y.tolist(), [image.tobytes() for image in x], strict=True))
            labels = dataset.y_train[positions[client]].tolist()
            assert sorted(zip(labels, pixels(dataset, positions[client]), strict=True)) == expected

    result = invoke("data", "show", "mine", "--partition", flag, "--num-clients", 3, "--out", tmp_path / "p.png")
    assert "18 to train, 6 to test" in result.output
    assert f"partition {flag}, seed 0, fingerprint " in result.output


def test_images_and_clients_of_a_folder_are_kept_by_one_step(tmp_path, cache, monkeypatch):
    """Whatever fills the disk at whatever moment, the clients are those of the images."""
    write_pfllib_folder(tmp_path / "Set")
    imports.import_path("mine", tmp_path / "Set")
    before = {path.name: path.read_bytes() for path in cache.iterdir()}
    write_pfllib_folder(tmp_path / "Other", seed=1)
    replace = Path.replace
    replaced = []

    def replace_while_space_is_left(path, target):
        if len(replaced) == allowed:
            raise OSError(28, "No space left on device")
        replaced.append(target)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", replace_while_space_is_left)
    allowed = 0
    with raises_user_error("No space left on device"):
        imports.import_path("mine", tmp_path / "Other")
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == before
    allowed = 1
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
    (tmp_path / "Set" / "test" / "2.npz").unlink()
    with raises_user_error("2.npz", "cannot be read"):
        imports.import_path("mine", tmp_path / "Set")
    assert not cache.exists()


# Arrays that are brought into form


WHOLE = image_arrays((4, 4, 3), 3)
WHOLE["x_train"][0, 0, :2] = np.array([0, 255])[:, None]
GREY = image_arrays((4, 4), 3)
NAMED = {"class_names": ["a", "b", "c"]}


def change_images(change, whole=WHOLE):
    """Returns arrays with a change of the images of both splits."""
    return whole | {f"x_{split}": change(whole[f"x_{split}"]) for split in SPLITS}


def change_labels(change, whole=WHOLE):
    """Returns arrays with a change of the labels of both splits."""
    return whole | {f"y_{split}": change(whole[f"y_{split}"]) for split in SPLITS}


def scale_images(arrays, low, high):
    """Returns arrays whose pixels are from `low` to `high` in place of 0 to 255."""
    return change_images(lambda x: x / 255 * (high - low) + low, arrays)


MEDICAL = {
    "train_images": WHOLE["x_train"],
    "train_labels": WHOLE["y_train"][:, None],
    "val_images": WHOLE["x_test"],
    "val_labels": WHOLE["y_test"],
    "test_images": WHOLE["x_test"],
    "test_labels": WHOLE["y_test"][:, None],
}
KERAS = {
    "X_train": WHOLE["x_train"],
    "Targets_train": WHOLE["y_train"],
    "X_val": WHOLE["x_test"],
    "Targets_val": WHOLE["y_test"],
}
BORDER = np.array([[1], [1], [1], [0]], np.uint8)


class Form(NamedTuple):
    """Arrays in another form, those in ours with the same images, and what a user is told."""

    arrays: dict[str, np.ndarray]
    ours: dict[str, np.ndarray]
    message: str


FORMS = {
    "from 0 to 255": Form(scale_images(WHOLE, 0, 255), WHOLE, "pixels x from 0 to 255 became 8 bits"),
    "from 0 to 1": Form(scale_images(WHOLE, 0, 1), WHOLE, "pixels x from 0 to 1 became 8 bits"),
    "from -1 to 1": Form(scale_images(WHOLE, -1, 1), WHOLE, "pixels x from -1 to 1 became 8 bits"),
    "channels first": Form(change_images(lambda x: x.transpose(0, 3, 1, 2)), WHOLE, "the images' channels came first"),
    "labels from 1": Form(change_labels(lambda y: y + 1), WHOLE, "the labels counted from 1"),
    "named labels from 1": Form(change_labels(lambda y: y + 1) | NAMED, WHOLE | NAMED, "from 1"),
    "4 x 3": Form(
        change_images(lambda x: x[:, :, :3]),
        change_images(lambda x: x * BORDER),
        "black borders made the images 4 x 4",
    ),
    "of two types": Form(change_images(lambda x: x.astype("float32" if len(x) == 9 else int)), WHOLE, "became 8 bits"),
    "one-hot labels": Form(change_labels(lambda y: np.eye(3)[y]), WHOLE, ""),
    "labels in a column": Form(change_labels(lambda y: y[:, None] / 1), WHOLE, "9 training and 6 test"),
    "MedMNIST": Form(MEDICAL, WHOLE, "left out: val"),
    "Keras": Form(KERAS, WHOLE, ""),
    "labels in words": Form(change_labels(lambda y: np.array(["a", "b", "c"])[y]), WHOLE | NAMED, ""),
    "rows": Form(change_images(lambda x: x.reshape(-1, 16), GREY), GREY, "rows of 16 pixels became images of 4 x 4"),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_arrays_in_another_form_are_converted_and_that_is_said(tmp_path, form):
    expected = import_arrays("whole", tmp_path / "a", **form.ours)
    np.savez(tmp_path / "odd.npz", **form.arrays)
    result = invoke("data", "import", "mine", tmp_path / "odd.npz")
    assert form.message in result.output
    imported = datasets.load("mine")
    assert imported.fingerprint == expected.fingerprint
    assert imported.class_names == expected.class_names


def test_labels_from_1_that_their_names_explain_stay(tmp_path):
    arrays = change_labels(lambda y: y + 1, image_arrays((4, 4), 2))
    dataset = import_arrays("mine", tmp_path / "a", **arrays, class_names=["none", "a", "b"])
    assert dataset.y_train.unique().tolist() == [1, 2]


def test_pixels_in_no_known_range_are_refused(tmp_path):
    too_wide = scale_images(image_arrays((4, 4), 3), -2, 2.5)
    with raises_user_error("-2 to 2", "normalisation"):
        import_arrays("mine", tmp_path / "a", **too_wide)

    with_nan = scale_images(image_arrays((4, 4), 3), 0, 1)
    with_nan["x_test"][0, 0, 0] = np.nan
    with raises_user_error("nan to nan", "normalisation"):
        import_arrays("mine", tmp_path / "a", **with_nan)
