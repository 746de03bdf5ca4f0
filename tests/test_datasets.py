"""Data sets: built in, imported, kept in canonical order, reduced, and refused where something is wrong."""

import hashlib
import os
import pickle
import pwd
import string
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import fedcli
from fedcli.data import catalog as known
from fedcli.data import datasets, file_formats, imports, official
from fedcli.data.cache import cache_folder
from fedcli.data.conversion import convert
from fedcli.data.dataset import Dataset, channel_statistics, from_arrays, stratified_subset
from fedcli.data.image_arrays import SPLITS, canonical_arrays, join_splits
from fedcli.vision import torchvision
from tests.image_files import (
    EXAMPLE_FIELDS,
    assert_same_dataset,
    image_arrays,
    import_arrays,
    import_dataset,
    known_images,
    sorted_examples,
    write_image_folder,
)
from tests.user_errors import raises_user_error


def test_class_names_may_be_of_any_kind_of_text(tmp_path):
    arrays = image_arrays((4, 4), 2)
    expected = import_arrays("plain", tmp_path / "npz", **arrays, class_names=["ant", "bee"])
    for kind in (object, np.dtypes.StringDType()):
        labels = np.array(["ant", "bee"], kind)
        named = {key: labels[values] if key.startswith("y") else values for key, values in arrays.items()}
        columns = convert(join_splits(named, []), [])
        assert_same_dataset(expected, from_arrays("named", canonical_arrays(columns)))


def test_two_arrays_of_one_meaning_are_refused(tmp_path):
    arrays = image_arrays((4, 4), 2)
    words = ("it has 'train_images' and another array of the same meaning",)
    with raises_user_error(*words):
        import_arrays("two", tmp_path / "npz", **arrays, train_images=255 - arrays["x_train"])


# Built in


@pytest.mark.parametrize(
    ("name", "fingerprint"),
    [("digits", "f189372feed12906"), ("digit-domains", "0786ac5c8f7a8b88"), ("photos", "5abcbde18938ec7c")],
)
def test_built_in_sets_are_those_of_the_records_and_what_describe_says(name, fingerprint):
    dataset = datasets.load(name)
    assert dataset.fingerprint == fingerprint

    shape = (dataset.channels, dataset.image_size, dataset.image_size)
    assert datasets.describe(name) == {
        "name": name, "kind": "built-in", "present": True, "note": "", "train": len(dataset.x_train),
        "test": len(dataset.x_test), "classes": dataset.num_classes, "shape": shape,
    }  # fmt: skip
    assert dataset.x_train.shape[1:] == shape
    assert dataset.x_train.dtype == torch.uint8
    assert dataset.y_train.dtype == torch.long
    assert dataset.x_train.is_contiguous()

    for split in SPLITS:
        keys = rank_plainly(dataset, split)
        assert keys == sorted(keys)


# Canonical order


def rank_plainly(dataset, split):
    """Rank of each example by label, hash of its pixels with the channels last, and domain."""
    images = getattr(dataset, f"x_{split}")
    labels = getattr(dataset, f"y_{split}")
    domains = getattr(dataset, f"domain_{split}")
    if domains is None:
        domains = torch.zeros_like(labels)
    keys = []
    for image, label, domain in zip(images, labels, domains, strict=True):
        pixels = hashlib.blake2b(image.permute(1, 2, 0).numpy().tobytes(), digest_size=8)
        keys.append((label.item(), pixels.digest(), domain.item()))
    return keys


@pytest.mark.parametrize("shape", [(5, 5), (5, 5, 3)])
def test_the_order_of_the_file_and_its_kind_are_invisible(tmp_path, shape):
    arrays = image_arrays(shape, 3)
    first = import_arrays("mine", tmp_path / "a", **arrays, class_names=["ant", "bee", "cow"])
    shuffled = {}
    for split in SPLITS:
        labels = arrays[f"y_{split}"]
        order = np.random.default_rng(1).permutation(len(labels))
        shuffled[f"x_{split}"] = arrays[f"x_{split}"][order]
        shuffled[f"y_{split}"] = labels[order]
    shuffled["y_train"] = shuffled["y_train"].astype(np.uint8)

    assert_same_dataset(first, import_arrays("mine", tmp_path / "b", **shuffled, class_names=["ant", "bee", "cow"]))
    assert_same_dataset(
        first, import_dataset("mine", write_image_folder(tmp_path / "c", arrays, ["ant", "bee", "cow"]))
    )
    channels = 1 if len(shape) == 2 else 3
    assert first.x_train.shape == (9, channels, 5, 5)
    assert sorted_examples(first, "train", "y") == sorted_examples(arrays, "train", "y")


def test_the_fingerprint_sees_pixels_labels_domains_writers_and_part():
    def fingerprint(change=lambda arrays: None):
        arrays = {key: torch.arange(4) % 2 for key in EXAMPLE_FIELDS}
        arrays |= {f"x_{split}": torch.arange(16).reshape(4, 1, 2, 2).to(torch.uint8) for split in SPLITS}
        change(arrays)
        return Dataset("toy", class_names=("a", "b"), **arrays).fingerprint

    whole = fingerprint()
    assert len(whole) == 16
    assert fingerprint() == whole

    for key in EXAMPLE_FIELDS:
        assert fingerprint(lambda arrays, key=key: arrays[key].view(-1)[-1:].add_(1)) != whole, key


# A subset of the training images, channel statistics


@pytest.mark.parametrize("name", ["digits", "digit-domains"])
@pytest.mark.parametrize("count", [40, 100, 777, 1438])
def test_take_is_stratified_by_class_and_domain(name, count):
    whole = datasets.load(name)
    subset = stratified_subset(whole, count, 3)
    count_all = len(whole.y_train)

    num_domains = max(len(whole.domain_names), 1)

    def count_cells(dataset):
        """How many examples each class, a row, has in each domain, a column."""
        domain = 0 if dataset.domain_train is None else dataset.domain_train
        cell = dataset.y_train * num_domains + domain
        return cell.bincount(minlength=10 * num_domains).reshape(10, num_domains)

    all_cells = count_cells(whole)
    cells = count_cells(subset)
    of_class = cells.sum(1, keepdim=True)
    all_of_class = all_cells.sum(1, keepdim=True)
    assert ((of_class - count * all_of_class / count_all).abs() < 1).all()
    assert ((cells - all_cells * of_class / all_of_class).abs() <= 1).all()
    assert subset.share == count / count_all
    assert subset.x_test is whole.x_test

    keys = rank_plainly(subset, "train")
    assert keys == sorted(keys)
    assert set(keys) <= set(rank_plainly(whole, "train"))
    assert set(rank_plainly(stratified_subset(whole, count // 2, 3), "train")) <= set(keys)
    assert (stratified_subset(whole, count, 4).fingerprint == subset.fingerprint) == (count == count_all)


def test_take_keeps_one_of_every_class_however_rare():
    labels = torch.tensor([0] * 95 + [1, 1, 2, 3, 4])
    x = torch.arange(100, dtype=torch.uint8).reshape(100, 1, 1, 1)
    toy = Dataset("toy", x, labels, x, labels, tuple("abcde"))
    assert stratified_subset(toy, 50, 0).y_train.bincount().tolist() == [46, 1, 1, 1, 1]
    for count in (4, 101):
        with raises_user_error(f"--train-examples {count}", "use 5", "to 100"):
            stratified_subset(toy, count, 0)


def test_channel_statistics_are_over_all_pixels_and_a_flat_channel_is_not_scaled():
    dataset = datasets.load("digit-domains")
    pixels = dataset.x_train.numpy().astype(np.float64) / 255
    mean, std = channel_statistics(dataset)
    assert mean == pytest.approx(pixels.mean((0, 2, 3)), abs=1e-12)
    assert std == pytest.approx(pixels.std((0, 2, 3)), abs=1e-12)
    flat = replace(dataset, x_train=torch.full((2, 1, 2, 2), 51, dtype=torch.uint8))
    assert channel_statistics(flat) == (pytest.approx((0.2,)), (1.0,))


# Names


def test_names_are_those_of_built_in_sets_then_of_known_and_of_imported_ones(tmp_path, cache):
    import_arrays("zebra", tmp_path / "a", **image_arrays((4, 4), 2))
    import_arrays("ape", tmp_path / "a", **image_arrays((4, 4), 2))
    (cache / "Not A Name.npz").touch()
    assert datasets.names()[:4] == ["digits", "digit-domains", "photos", "mnist"]
    assert datasets.names()[-3:] == ["office-home-leaky", "ape", "zebra"]
    assert {path.name for path in cache.iterdir()} == {"ape.npz", "zebra.npz", "Not A Name.npz"}  # nothing left over


@pytest.mark.parametrize(("given", "folder"), [("~/data", "data"), ("", ".cache/fedcli")])
def test_the_cache_is_in_the_folder_of_the_variable_or_below_home(monkeypatch, tmp_path, given, folder):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FEDCLI_DATA", given)
    assert cache_folder() == tmp_path / folder


def have_no_home(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDCLI_DATA")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError("uid not found")))


def have_no_permission(monkeypatch, tmp_path):
    denied = Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(os, "scandir", denied)
    monkeypatch.setattr(os, "mkdir", denied)


def name_a_folder_below_a_file(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDCLI_DATA", str(tmp_path / "a.npz" / "below"))


@pytest.mark.parametrize("take_away_the_cache", [have_no_home, have_no_permission, name_a_folder_below_a_file])
def test_without_a_cache_only_built_in_sets_are_there(tmp_path, monkeypatch, take_away_the_cache):
    """For others the error says what to set."""
    np.savez(tmp_path / "a.npz", **image_arrays((4, 4), 2))
    monkeypatch.chdir(tmp_path)
    take_away_the_cache(monkeypatch, tmp_path)
    assert len(datasets.load(imports.import_if_path("digits")).y_test) == 359
    with raises_user_error("'mnist' is not on this machine"):
        datasets.refuse_unavailable("mnist")
    with raises_user_error("cannot be kept", "FEDCLI_DATA"):
        imports.import_path("mine", tmp_path / "a.npz")
    assert not Path("~").exists()


def test_an_import_that_fails_leaves_the_old_set_and_the_next_clears_what_a_killed_one_wrote(tmp_path, monkeypatch):
    before = import_arrays("mine", tmp_path / "a", **image_arrays((4, 4), 2))
    np.savez(tmp_path / "a.npz", **image_arrays((4, 4), 2, seed=1))
    old = cache_folder() / ".1.partial.set.npz"
    old.touch()
    os.utime(old, (0, 0))
    new = cache_folder() / ".2.partial.set.npz"
    new.touch()

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
        with raises_user_error("(No space left on device)", "FEDCLI_DATA"):
            imports.import_path("mine", tmp_path / "a.npz")
    assert_same_dataset(datasets.load("mine"), before)

    imports.import_path("mine", tmp_path / "a.npz")
    assert not old.exists()
    assert new.exists()
    assert not torch.equal(datasets.load("mine").x_train, before.x_train)


def test_describe_knows_what_is_not_there_and_reads_what_is(tmp_path):
    absent = {"name": "cifar10", "kind": "download", "present": False, "note": ""}
    sizes = {"train": 50_000, "test": 10_000, "classes": 10, "shape": (3, 32, 32)}
    assert datasets.describe("cifar10") == absent | sizes

    import_arrays("cifar10", tmp_path / "a", **known_images("cifar10"))
    assert datasets.describe("cifar10") == absent | sizes | {"present": True, "train": 30, "test": 20}

    import_arrays("mine", tmp_path / "a", **image_arrays((4, 4), 3))
    assert datasets.describe("mine") == {
        "name": "mine", "kind": "imported", "present": True, "note": str(tmp_path / "a" / "images.npz"), "train": 9,
        "test": 6, "classes": 3, "shape": (1, 4, 4),
    }  # fmt: skip
    with raises_user_error("unknown data set 'cifra10'", "did you mean 'cifar10'"):
        datasets.describe("cifra10")


def test_a_damaged_cache_file_is_refused(tmp_path, cache):
    import_arrays("mine", tmp_path / "a", **image_arrays((8, 8), 3))
    content = (cache / "mine.npz").read_bytes()
    (cache / "mine.npz").write_bytes(content[: len(content) // 2])
    datasets.refuse_unavailable("mine")
    with raises_user_error("mine.npz", "must be a whole .npz file"):
        datasets.load("mine")
    with raises_user_error("mine.npz", "must be a whole .npz file"):
        datasets.describe("mine")

    changed = bytearray(content)
    changed[200] ^= 1
    (cache / "mine.npz").write_bytes(changed)
    with raises_user_error("mine.npz", "cannot be read"):
        datasets.load("mine")


@pytest.mark.parametrize("name", ["digits", "office31-leaky", "My Set", "../x", "", "-x", "a_b"])
def test_no_set_is_imported_under_a_name_of_another_or_one_that_is_no_name(tmp_path, name):
    np.savez(tmp_path / "a.npz", **image_arrays((4, 4), 2))
    with raises_user_error(f"the name '{name}'"):
        imports.import_path(name, tmp_path / "a.npz")


def test_a_file_or_folder_is_taken_where_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arrays = image_arrays((8, 8), 2, per_class=(15, 3))
    np.savez("My set.npz", **arrays)
    record = fedcli.run("fedavg", dataset="./My set.npz", rounds=1, num_clients=2, device="cpu").record
    name = imports.import_if_path("My set.npz")
    assert record["dataset"] == name
    assert record["protocol"] == "own:data"
    assert name.startswith("my-set-")
    assert record["dataset_source"] == str(tmp_path / "My set.npz")
    assert record["dataset_fingerprint"] == datasets.load(name).fingerprint

    np.savez("My set.npz", **image_arrays((8, 8), 2, seed=1))
    assert imports.import_if_path(str(tmp_path / "My set.npz")) != name

    write_image_folder(tmp_path / "folder", arrays, ["0", "1"])
    folder = imports.import_if_path("folder")
    assert datasets.load(folder).fingerprint == record["dataset_fingerprint"]

    image = next((tmp_path / "folder").rglob("*.png"))
    image.rename(tmp_path / "folder" / "train" / "1" / "other.png")
    assert imports.import_if_path("folder") != folder


def edit(folder):
    next(folder.rglob("*.png")).write_bytes(b"another")


def add(folder):
    (folder / "train" / "0" / "new.png").write_bytes(b"new")


def take_away(folder):
    next(folder.rglob("*.png")).unlink()


@pytest.mark.parametrize("change", [edit, add, take_away])
@pytest.mark.parametrize("begin", [imports.import_if_path, lambda path: imports.import_path("mine", Path(path))])
def test_a_folder_that_changes_while_it_is_read_is_refused(begin, change, tmp_path, cache, monkeypatch):
    """What was read would be kept for good, under the hash of what was there before."""
    folder = write_image_folder(tmp_path / "folder", image_arrays((8, 8), 2), ["0", "1"])
    read = file_formats.read

    def read_and_change(path, *arguments):
        columns = read(path, *arguments)
        change(folder)
        return columns

    with monkeypatch.context() as patch:
        patch.setattr(file_formats, "read", read_and_change)
        with raises_user_error(".png' has changed while", "start again when all of it is there"):
            begin(str(folder))
    assert not cache.exists()


# .npz files that are wrong


ARRAYS = image_arrays((4, 4), 3)  # that are right: 9 images to train and 6 to test
CLASS_NAMES = {"class_names": np.array(["a", "b", "c"])}


class BadArrays(NamedTuple):
    arrays: dict[str, np.ndarray]
    words: tuple[str, ...]  # of the refusal


def bad_arrays(*words, **changes):
    """The right arrays with some in another form, and the words of their refusal."""
    return BadArrays(ARRAYS | CLASS_NAMES | changes, words)


WITHOUT_LABELS = {name: values for name, values in (ARRAYS | CLASS_NAMES).items() if name != "y_test"}
WILD_LABEL = ARRAYS | {"y_train": ARRAYS["y_train"] * 10**9}  # without names of classes

BAD_ARRAYS = {
    "no labels": BadArrays(WITHOUT_LABELS, ("no array y_test (its arrays: y_train, ", "arrays x_train, y_tr")),
    "floats beside bytes": bad_arrays("one part are uint8 and", x_train=ARRAYS["x_train"] / 255),
    "two scales": bad_arrays(
        "of one part reach 1 and those of the other 249",
        x_train=ARRAYS["x_train"] / 1.0,
        x_test=(ARRAYS["x_test"] > 99) * 1.0,
    ),
    "names beside numbers": bad_arrays(
        "the labels of one part are names and", y_train=np.array(["a", "b", "c"])[ARRAYS["y_train"]]
    ),
    "numbers beside names": bad_arrays(
        "the labels of one part are names and", y_test=np.array([b"a", b"b", b"c"])[ARRAYS["y_test"]]
    ),
    "labels of other names": bad_arrays(
        "the label 'd' is none of class_names",
        y_train=np.array(["a", "b", "d"])[ARRAYS["y_train"]],
        y_test=np.array(["a", "b", "c"])[ARRAYS["y_test"]],
    ),
    "no squares": bad_arrays("(15, 3)", x_train=ARRAYS["x_train"][:, 0, :3], x_test=ARRAYS["x_test"][:, 0, :3]),
    "parts of other sizes": bad_arrays("must match exactly", x_test=ARRAYS["x_test"][:, :3]),
    "labels of another part": bad_arrays(
        "y_train has 8 entries for 9 images", y_train=ARRAYS["y_train"][:-1], y_test=np.zeros(7, int)
    ),
    "several labels": bad_arrays("y_train or y_test", "(15, 9)", y_train=np.eye(9), y_test=np.ones((6, 9))),
    "labels between": bad_arrays("y_train or y_test", "float64", y_train=ARRAYS["y_train"] / 2),
    "negative labels": bad_arrays("y_train or y_test", "-1 to 2", "0 to 2", y_test=ARRAYS["y_test"] - 1),
    "labels beyond class_names": bad_arrays("0 to 2", "0 to 1", "class_names", class_names=np.array(["a", "b"])),
    "a wild label": BadArrays(WILD_LABEL, ("0 to 2000000000", "0 to 8")),
    "a name twice": bad_arrays("class_names has a name twice", class_names=np.array([["a"], ["b"], ["a"]])),
    "a name in two spellings": bad_arrays("another array of the same", Class_Names=np.array(["b", "a", "c"])),
    "a name in two Unicode forms": bad_arrays("another Unicode form", class_names=np.array(["\xe9", "e\u0301", "c"])),
    "a name with a space": bad_arrays(
        "'a' is in class_names with other spaces", class_names=np.array(["a", "a ", "c"])
    ),
    "names of no domains": bad_arrays("but no array domain_train", domain_names=np.array(["p", "q"])),
    "writers by name": bad_arrays(
        "writer_train or writer_test is of type <U1", writer_train=np.full(9, "p"), writer_test=np.full(6, "p")
    ),
    "a name of two lines": bad_arrays("of several lines", class_names=np.array(["two\nlines", "b", "c"])),
    "pickled names": bad_arrays("allow_pickle=False", class_names=np.array(["a", 1, None], object)),
    "half the writers": bad_arrays("no array writer_train", writer_test=np.zeros(6, int)),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_bad_arrays_are_refused(tmp_path, cache, case):
    bad = BAD_ARRAYS[case]
    with raises_user_error("images.npz", *bad.words):
        import_arrays("mine", tmp_path / "a", **bad.arrays)
    assert not cache.exists()


def test_files_that_are_no_npz_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "images.npz"
    with raises_user_error("there is nothing at", "images.npz' to import"):
        imports.import_path("mine", path)
    for content in (b"", b"hello", pickle.dumps({"x_train": 1})):
        path.write_bytes(content)
        with raises_user_error("images.npz", "must be a whole .npz file"):
            imports.import_path("mine", path)
    monkeypatch.setenv("FEDCLI_MAX_GIB", "4 GiB")
    arrays = image_arrays((4, 4), 2)
    with raises_user_error("FEDCLI_MAX_GIB", "'4 GiB'", "a number."):
        import_arrays("mine", tmp_path / "a", **arrays)


# Known names


@pytest.mark.parametrize("name", ["cifar10", "fmnist", "emnist-letters", "tiny-imagenet"])
def test_known_names_have_one_shape(tmp_path, name):
    sizes = known.KNOWN[name].sizes
    classes = sizes["classes"]
    channels, size, _ = sizes["shape"]
    too_large = image_arrays((size + 1, size + 1, channels), classes)
    of_other_channels = image_arrays((size, size, 4 - channels), classes)
    of_more_classes = image_arrays((size, size, channels), classes + 1)

    def import_known(arrays):
        import_arrays(name, tmp_path / "a", **arrays)

    with raises_user_error(f"those of '{name}'", f"not ({size}, {size}"):
        import_known(too_large)
    with raises_user_error(f"those of '{name}'", f"not ({size}, {size}"):
        import_known(of_other_channels)
    with raises_user_error(f"those of '{name}'", f"are {classes + 1} ("):
        import_known(of_more_classes)


SPELLINGS = {  # of the names of classes
    "cifar10": str.title,
    "fmnist": lambda text: {"t-shirt": "T-shirt_top", "ankle-boot": "Ankle boot"}.get(text, text),
    "emnist-letters": str.upper,
    "emnist-byclass": str,
    "mnist": str,
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_class_folders_of_known_names_get_the_official_labels_however_they_are_spelled(tmp_path, name):
    arrays = known_images(name)
    classes = known.KNOWN[name].class_names
    npz = import_arrays(name, tmp_path / "a", **arrays)
    assert npz.class_names == classes
    spelled = [SPELLINGS[name](text) for text in classes]
    assert_same_dataset(npz, import_dataset(name, write_image_folder(tmp_path / "b", arrays, spelled)))


@pytest.mark.parametrize("name", SPELLINGS)
def test_labels_in_another_order_are_told_by_the_names_of_their_classes(tmp_path, name):
    arrays = known_images(name)
    classes = known.KNOWN[name].class_names
    npz = import_arrays(name, tmp_path / "a", **arrays)
    order = np.random.default_rng(5).permutation(len(classes))
    other = arrays | {f"y_{split}": np.argsort(order)[arrays[f"y_{split}"]] for split in SPLITS}
    names = [SPELLINGS[name](classes[label]) for label in order]
    assert_same_dataset(npz, import_arrays(name, tmp_path / "a", **other, class_names=names))


@pytest.mark.parametrize("name", SPELLINGS)
def test_class_folders_of_known_names_may_be_called_by_their_labels(tmp_path, name):
    arrays = known_images(name)
    classes = known.KNOWN[name].class_names
    npz = import_arrays(name, tmp_path / "a", **arrays)
    numbers = write_image_folder(tmp_path / "c", arrays, [str(label) for label in range(len(classes))])
    assert_same_dataset(npz, import_dataset(name, numbers))


def test_known_class_names_are_those_of_torchvision():
    sets = torchvision().datasets
    sources = {"emnist-byclass": sets.EMNIST.classes_split_dict["byclass"], "fmnist": sets.FashionMNIST.classes}
    for name, source in sources.items():
        assert official.official_order(source, known.KNOWN[name].class_names) == list(range(len(source)))
    assert known.KNOWN["emnist-letters"].class_names == tuple(string.ascii_lowercase)


# What a name says

OFFICIAL = official.refuse_other_images  # which tests/conftest.py takes away


@pytest.fixture
def official_only(monkeypatch):
    """Names mean the official images, as for a user."""
    monkeypatch.setattr(official, "refuse_other_images", OFFICIAL)


@pytest.mark.parametrize("name", sorted(known.KNOWN.keys() - known.MADE.keys() - {"femnist", "mnist-m"}))
def test_other_images_do_not_get_a_known_name(name, tmp_path, official_only, cache):
    arrays = known_images(name, per_class=(4, 2))
    if known.KNOWN[name].domain_names:
        domains = len(known.KNOWN[name].domain_names)
        arrays |= {f"domain_{split}": np.arange(len(arrays[f"y_{split}"])) % domains for split in SPLITS}
        arrays["domain_names"] = np.array(known.KNOWN[name].domain_names)

    with raises_user_error(f"not the images of '{name}' (got", f"such as my-{name}"):
        import_arrays(name, tmp_path / "a", **arrays)
    assert not cache.exists()
    assert import_arrays(f"my-{name}", tmp_path / "a", **arrays).num_classes == len(known.KNOWN[name].class_names)


def test_sets_of_the_right_size_are_known_by_the_numbers_of_their_classes(tmp_path, official_only, monkeypatch):
    counts = {"train_counts": (3,) * 10, "test_counts": (2,) * 10}
    monkeypatch.setitem(known.KNOWN, "usps", known.KNOWN["usps"]._replace(num_train=30, num_test=20, **counts))
    arrays = known_images("usps")
    assert import_arrays("usps", tmp_path / "a", **arrays).name == "usps"
    arrays["y_train"][arrays["y_train"] == 0] = 1
    arrays["y_train"][0] = 0
    with raises_user_error("training images of its classes, not 3, 3, 3"):
        import_arrays("usps", tmp_path / "a", **arrays)


def test_numbers_of_known_sets_add_up():
    of_counted_classes = [info for info in known.KNOWN.values() if info.train_counts or info.test_counts]
    assert len(of_counted_classes) == 6
    for info in of_counted_classes:
        assert sum(info.train_counts) == info.num_train
        assert len(info.train_counts) == len(info.class_names)
        assert sum(info.test_counts) == info.num_test
        assert len(info.test_counts) == len(info.class_names)

    of_domains = [info for info in known.KNOWN.values() if info.domain_counts and not info.make]
    assert len(of_domains) == 3
    for info in of_domains:
        assert len(info.domain_counts) == len(info.domain_names)


def test_what_was_kept_under_a_known_name_is_compared_also_for_a_set_made_of_it(tmp_path, official_only, monkeypatch):
    with monkeypatch.context() as before:
        before.setattr(official, "refuse_other_images", lambda dataset: None)
        import_arrays("mnist", tmp_path / "a", **image_arrays((28, 28), 10, per_class=(16, 101)))
    for name in ("mnist", "digits-real-4"):
        with raises_user_error("not the images of 'mnist' (got fingerprint", "94a3db3da708f867"):
            datasets.load(name)


# Labels, and sets of one image


@pytest.mark.parametrize(
    ("kind", "noun", "names"), [("y", "classes", "class_names"), ("domain", "domains", "domain_names")]
)
def test_numbers_with_gaps_count_the_classes_and_domains_that_there_are(kind, noun, names, tmp_path):
    """Labels that leave some numbers out are no classes or domains without images."""
    arrays = image_arrays((4, 4), 3, per_class=(8, 3))
    arrays |= {f"domain_{split}": np.arange(len(arrays[f"y_{split}"])) % 3 for split in SPLITS}
    for split in SPLITS:
        arrays[f"{kind}_{split}"] = np.array([0, 5, 9])[arrays[f"{kind}_{split}"]]
    np.savez(tmp_path / "a.npz", **arrays)
    _, notes = imports.import_path("mine", tmp_path / "a.npz")
    assert notes == [f"3 {noun}, whose numbers are 0, 5, 9"]

    dataset = datasets.load("mine")
    assert getattr(dataset, names) == ("0", "5", "9")

    values = getattr(dataset, f"{kind}_train").bincount()
    assert len(values) == 3
    assert (values > 0).all()


def test_named_classes_without_training_images_are_said(tmp_path):
    arrays = image_arrays((4, 4), 3) | {"class_names": np.array([f"class{number}" for number in range(10)])}
    np.savez(tmp_path / "a.npz", **arrays)
    _, notes = imports.import_path("mine", tmp_path / "a.npz")
    assert notes == ["without training images: class3, class4, class5, class6, class7 and 2 more"]


def test_arrays_of_no_meaning_are_said(tmp_path):
    arrays = image_arrays((4, 4), 3) | {"client_train": np.zeros(9), "Class_Names": np.array(["a", "b", "c"])}
    np.savez(tmp_path / "a.npz", **arrays)
    _, notes = imports.import_path("mine", tmp_path / "a.npz")
    assert notes == ["left out: the arrays client_train"]
    arrays |= {f"weight{number}": np.zeros(1) for number in range(20)}
    np.savez(tmp_path / "a.npz", **arrays)
    _, notes = imports.import_path("mine", tmp_path / "a.npz")
    assert notes == ["left out: the arrays client_train, weight0, weight1, weight2, weight3 and 16 more"]
    del arrays["y_test"]
    np.savez(tmp_path / "a.npz", **arrays)
    with raises_user_error(
        "no array y_test (its arrays: y_train, x_train, x_test, client_train, Class_Names and 20 more)"
    ):
        imports.import_path("mine", tmp_path / "a.npz")


def test_images_that_are_all_alike_are_refused(tmp_path, cache):
    arrays = image_arrays((4, 4), 3)
    for split in SPLITS:
        arrays[f"x_{split}"][:] = 7
    with raises_user_error("all of its 15 images are alike"):
        import_arrays("mine", tmp_path / "a", **arrays)
    assert not cache.exists()
