"""Divisions made elsewhere: lists in a file, folders in the form of PFLlib's, arrays that are brought into form."""

import io
import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

import fedcli
from fedcli.core.partition import fingerprint, from_flag
from fedcli.core.parts import divide
from fedcli.data import datasets
from fedcli.data.files import PARTS
from tests.files import from_npz, images, refused
from tests.programs import invoke


class Config:
    """What `divide` reads of a run's options."""

    local_test, validation, partition_seed, drop_last, batch_size = 0.25, 0.0, 0, False, 1


def written(folder, split):
    file = folder / "split.json"
    file.write_text(json.dumps(split))
    return f"file:{file}"


def taken(dataset, flag, num_clients, seed=0):
    return from_flag(flag)(dataset.y_train, num_clients, seed, None, None, dataset.place_train)


def pixels(dataset, positions):
    return [image.numpy().tobytes() for image in dataset.x_train[positions]]


def test_positions_are_those_in_the_files_and_go_on_into_the_test_images(tmp_path):
    arrays = images((4, 4), 3)
    dataset = datasets.merge(from_npz("mine", tmp_path / "a", **arrays))
    both = [image.tobytes() for part in PARTS for image in arrays[f"x_{part}"]]  # 9 and 6
    split = {"train": [[8, 0, 3], [10], [2]], "test": [[1, 9], [14, 9], []]}
    parts = taken(dataset, written(tmp_path, split), 3)
    kept, testing, training, _ = divide(parts, Config)
    for lists, positions in ((split["train"], training), (split["train"], kept), (split["test"], testing)):
        for client in range(3):
            assert sorted(pixels(dataset, positions[client])) == sorted(both[position] for position in lists[client])
    assert fingerprint(parts) == fingerprint(taken(dataset, written(tmp_path, split), 3, seed=5))
    moved = {"train": [[8, 0, 3, 1], [10], [2]], "test": [[9], [14, 9], []]}  # from a client's test part to its own
    assert fingerprint(taken(dataset, written(tmp_path, moved), 3)) != fingerprint(parts)


def test_a_list_alone_and_an_npz_file_are_the_same_split(tmp_path):
    dataset, lists = from_npz("mine", tmp_path / "a", **images((4, 4), 3)), [[8, 0], [], [2]]
    np.savez(tmp_path / "split.npz", **{f"train_{k}": np.array(own, int) for k, own in enumerate(lists)})
    expected = fingerprint(taken(dataset, f"file:{tmp_path / 'split.npz'}", 3))
    for split in (lists, {"train": lists}):
        assert fingerprint(taken(dataset, written(tmp_path, split), 3)) == expected
    assert from_flag("file:split.json").flag == "file:split.json"


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ([[0], [1], [2]], ["lists of 3 clients, not 2", "--num-clients 3"]),
        ([[0], [99]], ["position 99 is not among the 9 images", "clients' own parts"]),
        ([[0], [-1]], ["position -1"]),
        ([[0, 1], [1]], ["position 1 is in two lists"]),
        ({"train": [[0, 1], [2]], "test": [[3], [1]]}, ["position 1 is in two lists"]),
        ({"train": [[0], [1]], "test": [[2]]}, ["must be lists", "2 lists to train on, 1 to test on"]),
        ([[0.5], [1]], ["must be lists", "'float' object"]),
        ({"one": [0]}, ["must be lists", "train_0"]),
    ],
)
def test_wrong_splits_are_refused(tmp_path, split, words):
    dataset = from_npz("mine", tmp_path / "a", **images((4, 4), 3))
    refused(lambda: taken(dataset, written(tmp_path, split), 2), *words)


def test_missing_files_unknown_places_and_pickles_are_refused(tmp_path):
    dataset = from_npz("mine", tmp_path / "a", **images((4, 4), 3))
    refused(lambda: taken(dataset, "file:none.json", 2), "'none.json' cannot be read (", "No such file", '{"train"')
    np.savez(tmp_path / "split.npz", train_0=np.array([{"a": 1}], dtype=object))
    refused(lambda: taken(dataset, f"file:{tmp_path / 'split.npz'}", 1), "must be lists", "allow_pickle=False")
    flag = written(tmp_path, [[0], [1]])
    refused(lambda: from_flag(flag)(dataset.y_train, 2, 0), "needs a data set with places", "import this one anew")


def test_a_run_tests_on_the_lists_of_the_file_and_its_record_tells(tmp_path, monkeypatch):
    split = {"train": [[0, 1, 2, 1700], [3, 4, 5]], "test": [[6, 1701], [7]]}  # 1,797 digits, of which some to test
    written(tmp_path, split)
    monkeypatch.chdir(tmp_path)
    options = {"protocol": "fedsa:digits", "partition": "file:split.json", "num_clients": 2, "cohort_size": 2}
    options |= {"rounds": 1, "batch_size": 2, "device": "cpu"}
    record = fedcli.run("fedavg", out=tmp_path / "run", **options).record
    assert record["config"]["partition"] == f"file:{tmp_path / 'split.json'}"
    assert record["partition"]["sizes"] == [6, 4]
    assert record["rounds"][0]["test_accuracy"] * 3 == pytest.approx(round(record["rounds"][0]["test_accuracy"] * 3))
    written(tmp_path, {"train": [[0], [1]], "test": [[2], [3]]})
    options |= {"protocol": "fedfm:digits", "out": tmp_path / "other"}
    refused(lambda: fedcli.run("fedavg", **options), "has test lists, which the protocol fedfm:digits does")
    assert not (tmp_path / "other").exists()


# PFLlib's folders


def pfllib(folder, seed=0):
    """A folder in PFLlib's form: three clients, grey 4 x 4 images normalised to [-1, 1], dicts pickled by NumPy."""
    rng, own = np.random.default_rng(seed), {}
    for part, count in (("train", 6), ("test", 2)):
        (folder / part).mkdir(parents=True)
        for client in range(3):
            x = rng.integers(0, 256, (count, 1, 4, 4)).astype(np.uint8)
            y = rng.integers(0, 3, count)
            y[:2] = 0, 2
            own[part, client] = x[:, 0], y
            with (folder / part / f"{client}.npz").open("wb") as file:
                np.savez_compressed(file, data={"x": (x.astype(np.float32) / 255 - 0.5) / 0.5, "y": y})
    (folder / "config.json").write_text('{"num_clients": 3}')
    return own


def test_a_folder_of_pfllibs_gives_the_same_images_clients_and_test_parts(tmp_path):
    own = pfllib(tmp_path / "Set")
    result = invoke("data", "import", "mine", tmp_path / "Set")
    assert result.exit_code == 0, result.output
    flag = next(word for word in result.output.split() if word.startswith("file:"))
    assert "18 training and 6 test images, 3 classes" in result.output
    assert "--num-clients 3" in result.output
    dataset = datasets.merge(datasets.load("mine"))
    _, testing, training, _ = divide(taken(dataset, flag, 3), Config)
    for part, positions in (("train", training), ("test", testing)):
        for client in range(3):
            x, y = own[part, client]
            expected = sorted((label, image.tobytes()) for label, image in zip(y.tolist(), x, strict=True))
            labels = dataset.y_train[positions[client]].tolist()
            assert sorted(zip(labels, pixels(dataset, positions[client]), strict=True)) == expected
    shown = invoke("data", "show", "mine", "--partition", flag, "--num-clients", 3, "--out", tmp_path / "p.png")
    assert "18 to train, 6 to test" in shown.output
    assert f"partition {flag}, seed 0, fingerprint " in shown.output


def test_images_and_clients_of_a_folder_are_kept_by_one_step(tmp_path, cache, monkeypatch):
    """Whatever fills the disk at whatever moment, the clients are those of the images."""
    pfllib(tmp_path / "Set")
    datasets.import_path("mine", tmp_path / "Set")
    before = {path.name: path.read_bytes() for path in cache.iterdir()}
    pfllib(tmp_path / "Other", seed=1)
    replace, done = Path.replace, []

    def fill(path, target):
        if len(done) == allowed:
            raise OSError(28, "No space left on device")
        done.append(target)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", fill)
    allowed = 0
    refused(lambda: datasets.import_path("mine", tmp_path / "Other"), "No space left on device")
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == before
    allowed = 1
    datasets.import_path("mine", tmp_path / "Other")
    assert len(done) == 1
    assert [path.name for path in cache.iterdir()] == ["mine.npz"]


class Harmful:
    """What a pickle may do: call any function."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


def stored(path, array, protocol=4):
    """Writes an .npz file whose `data` is this, pickled."""
    with zipfile.ZipFile(path, "w") as archive:
        member = io.BytesIO()
        np.lib.format.write_array_header_1_0(member, {"descr": "|O", "fortran_order": False, "shape": ()})
        archive.writestr("data.npy", member.getvalue() + pickle.dumps(array, protocol))


def test_nothing_in_a_pickle_is_run(tmp_path):
    pfllib(tmp_path / "Set")
    file, sign = tmp_path / "Set" / "train" / "1.npz", tmp_path / "sign"
    for harm in (Harmful(sign), {"x": np.zeros((2, 1, 4, 4)), "y": Harmful(sign)}):
        stored(file, np.array(harm, object))
        refused(lambda: datasets.import_path("mine", tmp_path / "Set"), "1.npz", "which no array needs")
        assert not sign.exists()
    with np.load(file, allow_pickle=True) as loaded:
        loaded["data"]
    assert sign.exists()  # NumPy's own reader has run it
    for whole in (np.array({"x": 1}, object), np.array([1, 2]), "text"):
        stored(file, whole)
        refused(lambda: datasets.import_path("mine", tmp_path / "Set"), "1.npz", "cannot be read")


@pytest.mark.parametrize("protocol", [3, 4])
def test_arrays_of_every_kind_and_order_are_read(tmp_path, protocol):
    pfllib(tmp_path / "Set")
    x = np.asfortranarray(np.arange(32).reshape(2, 1, 4, 4) / 255, ">f8" if protocol == 3 else None)
    stored(tmp_path / "Set" / "test" / "0.npz", np.array({"x": x, "y": np.array([1, 2], np.int32)}, object), protocol)
    datasets.import_path("mine", tmp_path / "Set")
    expected = np.rint((x[:, 0] + 1) * 127.5).astype(np.uint8)  # the others reach below 0
    found = {image.numpy().tobytes() for image in datasets.load("mine").x_test}
    assert {image.tobytes() for image in np.ascontiguousarray(expected)} < found


def test_a_name_or_folder_that_does_not_fit_is_refused(tmp_path, cache):
    pfllib(tmp_path / "Set")
    refused(lambda: datasets.import_path("fmnist", tmp_path / "Set"), "'fmnist' is not possible", "fmnist-pfllib")
    (tmp_path / "Set" / "test" / "2.npz").unlink()
    refused(lambda: datasets.import_path("mine", tmp_path / "Set"), "2.npz", "cannot be read")
    assert not cache.exists()


# Arrays that are brought into form


def scaled(arrays, low, high):
    return arrays | {f"x_{part}": arrays[f"x_{part}"] / 255 * (high - low) + low for part in PARTS}


WHOLE, GREY, NAMED = images((4, 4, 3), 3), images((4, 4), 3), {"class_names": ["a", "b", "c"]}
WHOLE["x_train"][0, 0, :2] = np.array([0, 255])[:, None]


def changed(kind, change, whole=WHOLE):
    """Arrays with a change of the images or labels of both parts."""
    return whole | {f"{kind}_{part}": change(whole[f"{kind}_{part}"]) for part in PARTS}


MEDICAL = {f"{part}_images": WHOLE[f"x_{part}"] for part in PARTS} | {"val_images": WHOLE["x_test"]}
MEDICAL |= {f"{part}_labels": WHOLE[f"y_{part}"][:, None] for part in PARTS} | {"val_labels": WHOLE["y_test"]}
KERAS = {{"x": "X", "y": "Targets"}[key[0]] + key[1:].replace("test", "val"): values for key, values in WHOLE.items()}
BORDER = np.array([[1], [1], [1], [0]], np.uint8)
FROM_1 = changed("y", lambda y: y + 1)
CASES = [  # arrays in another form, what stays of them, and what is said
    (scaled(WHOLE, 0, 255), WHOLE, "pixels x from 0 to 255 became 8 bits"),
    (scaled(WHOLE, 0, 1), WHOLE, "pixels x from 0 to 1 became 8 bits"),
    (scaled(WHOLE, -1, 1), WHOLE, "pixels x from -1 to 1 became 8 bits"),
    (changed("x", lambda x: x.transpose(0, 3, 1, 2)), WHOLE, "the images' channels came first"),
    (FROM_1, WHOLE, "the labels counted from 1"),
    (FROM_1 | NAMED, WHOLE | NAMED, "from 1"),
    (changed("x", lambda x: x[:, :, :3]), changed("x", lambda x: x * BORDER), "black borders made the images 4 x 4"),
    (changed("x", lambda x: x.astype("float32" if len(x) == 9 else int)), WHOLE, "became 8 bits"),
    (changed("y", lambda y: np.eye(3)[y]), WHOLE, ""),
    (changed("y", lambda y: y[:, None] / 1), WHOLE, "9 training and 6 test"),
    (MEDICAL, WHOLE, "left out: val"),
    (KERAS, WHOLE, ""),
    (changed("y", lambda y: np.array(["a", "b", "c"])[y]), WHOLE | NAMED, ""),
    (changed("x", lambda x: x.reshape(-1, 16), GREY), GREY, "rows of 16 pixels became images of 4 x 4"),
]


@pytest.mark.parametrize(("arrays", "whole", "words"), CASES)
def test_arrays_in_another_form_are_converted_and_that_is_said(tmp_path, arrays, whole, words):
    expected = from_npz("whole", tmp_path / "a", **whole)
    np.savez(tmp_path / "odd.npz", **arrays)
    result = invoke("data", "import", "mine", tmp_path / "odd.npz")
    assert words in result.output
    mine = datasets.load("mine")
    assert (mine.fingerprint, mine.class_names) == (expected.fingerprint, expected.class_names)


def test_labels_from_1_that_their_names_explain_stay(tmp_path):
    arrays = images((4, 4), 2)
    labels = {f"y_{part}": arrays[f"y_{part}"] + 1 for part in PARTS}
    dataset = from_npz("mine", tmp_path / "a", **arrays | labels, class_names=["none", "a", "b"])
    assert dataset.y_train.unique().tolist() == [1, 2]


def test_pixels_in_no_known_range_are_refused(tmp_path):
    wide, holed = (scaled(images((4, 4), 3), low, high) for low, high in ((-2, 2.5), (0, 1)))
    holed["x_test"][0, 0, 0] = np.nan
    for arrays, words in ((wide, "-2 to 2"), (holed, "nan to nan")):
        refused(lambda arrays=arrays: from_npz("mine", tmp_path / "a", **arrays), words, "normalisation")
