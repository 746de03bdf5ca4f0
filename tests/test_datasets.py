"""Data sets: built in, imported, kept in canonical order, reduced, and refused where something is wrong."""

import hashlib
import os
import pickle
import pwd
import string
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import fedcli
from fedcli.data import catalog as known
from fedcli.data import datasets
from fedcli.data.files import PARTS
from fedcli.vision import torchvision
from tests.files import FIELDS, assert_same, examples, from_npz, images, imported, known_images, refused, write_folder

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
    assert (dataset.x_train.shape[1:], dataset.x_train.dtype, dataset.y_train.dtype) == (shape, torch.uint8, torch.long)
    assert dataset.x_train.is_contiguous()
    for part in PARTS:
        keys = slow_order(dataset, part)
        assert keys == sorted(keys)


# Canonical order


def slow_order(dataset, part):
    """Rank of each example by label, hash of its pixels with the channels last, and domain."""
    x, y, domain = (getattr(dataset, f"{kind}_{part}") for kind in ("x", "y", "domain"))
    keys = []
    for i in range(len(y)):
        pixels = hashlib.blake2b(x[i].permute(1, 2, 0).numpy().tobytes(), digest_size=8)
        keys.append((y[i].item(), pixels.digest(), 0 if domain is None else domain[i].item()))
    return keys


@pytest.mark.parametrize("shape", [(5, 5), (5, 5, 3)])
def test_the_order_of_the_file_and_its_kind_are_invisible(tmp_path, shape):
    arrays = images(shape, 3)
    first = from_npz("mine", tmp_path / "a", **arrays, class_names=["ant", "bee", "cow"])
    shuffled = {}
    for part, size in (("train", 9), ("test", 6)):
        order = np.random.default_rng(1).permutation(size)
        shuffled |= {f"{kind}_{part}": arrays[f"{kind}_{part}"][order] for kind in "xy"}
    shuffled["y_train"] = shuffled["y_train"].astype(np.uint8)
    assert_same(first, from_npz("mine", tmp_path / "b", **shuffled, class_names=["ant", "bee", "cow"]))
    assert_same(first, imported("mine", write_folder(tmp_path / "c", arrays, ["ant", "bee", "cow"])))
    assert first.x_train.shape == (9, 1 if len(shape) == 2 else 3, 5, 5)
    assert examples(first, "train", "y") == examples(arrays, "train", "y")


def test_the_fingerprint_sees_pixels_labels_domains_writers_and_part():
    def fingerprint(change=lambda arrays: None):
        arrays = {key: torch.arange(4) % 2 for key in FIELDS}
        arrays |= {f"x_{part}": torch.arange(16).reshape(4, 1, 2, 2).to(torch.uint8) for part in PARTS}
        change(arrays)
        return datasets.Dataset("toy", class_names=("a", "b"), **arrays).fingerprint

    whole = fingerprint()
    assert len(whole) == 16
    assert fingerprint() == whole
    for key in FIELDS:
        assert fingerprint(lambda arrays, key=key: arrays[key].view(-1)[-1:].add_(1)) != whole, key


# A part of the training images, channel statistics


@pytest.mark.parametrize("name", ["digits", "digit-domains"])
@pytest.mark.parametrize("count", [40, 100, 777, 1438])
def test_take_is_stratified_by_class_and_domain(name, count):
    whole = datasets.load(name)
    part, count_all = datasets.take(whole, count, 3), len(whole.y_train)
    domains = max(len(whole.domain_names), 1)
    cells = []
    for dataset in (whole, part):
        domain = 0 if dataset.domain_train is None else dataset.domain_train
        cells.append((dataset.y_train * domains + domain).bincount(minlength=10 * domains).reshape(10, domains))
    assert ((cells[1].sum(1) - count * cells[0].sum(1) / count_all).abs() < 1).all()
    assert ((cells[1] - cells[0] * cells[1].sum(1, keepdim=True) / cells[0].sum(1, keepdim=True)).abs() <= 1).all()
    assert (part.share, part.x_test is whole.x_test) == (count / count_all, True)
    keys = slow_order(part, "train")
    assert keys == sorted(keys)
    assert set(keys) <= set(slow_order(whole, "train"))
    assert set(slow_order(datasets.take(whole, count // 2, 3), "train")) <= set(keys)
    assert (datasets.take(whole, count, 4).fingerprint == part.fingerprint) == (count == count_all)


def test_take_keeps_one_of_every_class_however_rare():
    labels = torch.tensor([0] * 95 + [1, 1, 2, 3, 4])
    x = torch.arange(100, dtype=torch.uint8).reshape(100, 1, 1, 1)
    toy = datasets.Dataset("toy", x, labels, x, labels, tuple("abcde"))
    assert datasets.take(toy, 50, 0).y_train.bincount().tolist() == [46, 1, 1, 1, 1]
    for count in (4, 101):
        refused(lambda count=count: datasets.take(toy, count, 0), f"--train-examples {count}", "use 5", "to 100")


def test_channel_statistics():
    dataset = datasets.load("digit-domains")
    pixels = dataset.x_train.numpy().astype(np.float64) / 255
    mean, std = datasets.channel_statistics(dataset)
    assert mean == pytest.approx(pixels.mean((0, 2, 3)), abs=1e-12)
    assert std == pytest.approx(pixels.std((0, 2, 3)), abs=1e-12)
    flat = replace(dataset, x_train=torch.full((2, 1, 2, 2), 51, dtype=torch.uint8))
    assert datasets.channel_statistics(flat) == (pytest.approx((0.2,)), (1.0,))


# Names


def test_names_in_their_order(tmp_path, cache):
    from_npz("zebra", tmp_path / "a", **images((4, 4), 2))
    from_npz("ape", tmp_path / "a", **images((4, 4), 2))
    (cache / "Not A Name.npz").touch()
    assert datasets.names()[:4] == ["digits", "digit-domains", "photos", "mnist"]
    assert datasets.names()[-3:] == ["office-home-leaky", "ape", "zebra"]
    assert {path.name for path in cache.iterdir()} == {"ape.npz", "zebra.npz", "Not A Name.npz"}  # nothing left over


@pytest.mark.parametrize(("given", "folder"), [("~/data", "data"), ("", ".cache/fedcli")])
def test_the_cache_folder(monkeypatch, tmp_path, given, folder):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FEDCLI_DATA", given)
    assert datasets.cache_folder() == tmp_path / folder


@pytest.mark.parametrize("cause", ["no home", "not readable", "not writable"])
def test_without_a_cache_built_in_sets_are_there_and_others_are_told_what_to_set(tmp_path, monkeypatch, cause):
    def fail(*_, **__):
        raise {"no home": KeyError("uid not found"), "not readable": PermissionError(13, "Permission denied")}[cause]

    np.savez(tmp_path / "a.npz", **images((4, 4), 2))
    monkeypatch.chdir(tmp_path)
    if cause == "no home":
        monkeypatch.delenv("FEDCLI_DATA")
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(pwd, "getpwuid", fail)
    elif cause == "not readable":
        monkeypatch.setattr(os, "scandir", fail)
        monkeypatch.setattr(os, "mkdir", fail)
    else:
        monkeypatch.setenv("FEDCLI_DATA", str(tmp_path / "a.npz" / "below"))
    assert len(datasets.load(datasets.find_name("digits")).y_test) == 359
    refused(lambda: datasets.available("mnist"), "'mnist' is not on this machine")
    refused(lambda: datasets.import_path("mine", tmp_path / "a.npz"), "cannot be kept", "FEDCLI_DATA")
    assert not Path("~").exists()


def test_an_import_that_fails_leaves_the_old_set_and_one_clears_what_a_killed_one_was_writing(tmp_path, monkeypatch):
    before = from_npz("mine", tmp_path / "a", **images((4, 4), 2))
    np.savez(tmp_path / "a.npz", **images((4, 4), 2, seed=1))
    old, new = (datasets.cache_folder() / f".{number}.partial.set.npz" for number in (1, 2))
    for file in (old, new):
        file.touch()
    os.utime(old, (0, 0))
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
        refused(lambda: datasets.import_path("mine", tmp_path / "a.npz"), "(No space left on device)", "FEDCLI_DATA")
    assert_same(datasets.load("mine"), before)
    datasets.import_path("mine", tmp_path / "a.npz")
    assert (old.exists(), new.exists()) == (False, True)
    assert not torch.equal(datasets.load("mine").x_train, before.x_train)


def test_describe_knows_what_is_not_there_and_reads_what_is(tmp_path):
    absent = {"name": "cifar10", "kind": "download", "present": False, "note": ""}
    sizes = {"train": 50_000, "test": 10_000, "classes": 10, "shape": (3, 32, 32)}
    assert datasets.describe("cifar10") == absent | sizes
    from_npz("cifar10", tmp_path / "a", **known_images("cifar10"))
    assert datasets.describe("cifar10") == absent | sizes | {"present": True, "train": 30, "test": 20}
    from_npz("mine", tmp_path / "a", **images((4, 4), 3))
    assert datasets.describe("mine") == {
        "name": "mine", "kind": "imported", "present": True, "note": str(tmp_path / "a" / "images.npz"), "train": 9,
        "test": 6, "classes": 3, "shape": (1, 4, 4),
    }  # fmt: skip
    refused(lambda: datasets.describe("cifra10"), "unknown data set 'cifra10'", "did you mean 'cifar10'")


def test_a_damaged_cache_file_is_refused(tmp_path, cache):
    from_npz("mine", tmp_path / "a", **images((8, 8), 3))
    content = (cache / "mine.npz").read_bytes()
    (cache / "mine.npz").write_bytes(content[: len(content) // 2])
    datasets.available("mine")
    refused(lambda: datasets.load("mine"), "mine.npz", "must be a whole .npz file")
    refused(lambda: datasets.describe("mine"), "mine.npz", "must be a whole .npz file")
    changed = bytearray(content)
    changed[200] ^= 1
    (cache / "mine.npz").write_bytes(changed)
    refused(lambda: datasets.load("mine"), "mine.npz", "cannot be read")


@pytest.mark.parametrize("name", ["digits", "office31-leaky", "My Set", "../x", "", "-x", "a_b"])
def test_names_that_cannot_be_imported(tmp_path, name):
    np.savez(tmp_path / "a.npz", **images((4, 4), 2))
    refused(lambda: datasets.import_path(name, tmp_path / "a.npz"), f"the name '{name}'")


def test_a_file_or_folder_is_taken_where_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arrays = images((8, 8), 2, per_class=(15, 3))
    np.savez("My set.npz", **arrays)
    record = fedcli.run("fedavg", dataset="./My set.npz", rounds=1, num_clients=2, device="cpu").record
    name = datasets.find_name("My set.npz")
    assert (record["dataset"], record["protocol"]) == (name, "own:data")
    assert name.startswith("my-set-")
    assert record["dataset_source"] == str(tmp_path / "My set.npz")
    assert record["dataset_fingerprint"] == datasets.load(name).fingerprint
    np.savez("My set.npz", **images((8, 8), 2, seed=1))
    assert datasets.find_name(str(tmp_path / "My set.npz")) != name
    write_folder(tmp_path / "folder", arrays, ["0", "1"])
    folder = datasets.find_name("folder")
    assert datasets.load(folder).fingerprint == record["dataset_fingerprint"]
    (next((tmp_path / "folder").rglob("*.png"))).rename(tmp_path / "folder" / "train" / "1" / "other.png")
    assert datasets.find_name("folder") != folder


# .npz files that are wrong


def put(key, value):
    return lambda a: a.update({key: value(a) if callable(value) else value})


BAD_ARRAYS = {
    "no labels": (lambda a: a.pop("y_test"), "no array y_test (its arrays: y_train, ", "arrays x_train, y_tr"),
    "floats beside bytes": (put("x_train", lambda a: a["x_train"] / 255), "one part are uint8 and"),
    "no squares": (lambda a: a.update({f"x_{part}": a[f"x_{part}"][:, 0, :3] for part in PARTS}), "(15, 3)"),
    "parts of other sizes": (put("x_test", lambda a: a["x_test"][:, :3]), "must match exactly"),
    "labels of another part": (
        lambda a: a.update(y_train=a["y_train"][:-1], y_test=np.zeros(7, int)), "y_train has 8 entries for 9 images"
    ),
    "several labels": (lambda a: a.update(y_train=np.eye(9), y_test=np.ones((6, 9))), "y_train or y_test", "(15, 9)"),
    "labels between": (put("y_train", lambda a: a["y_train"] / 2), "y_train or y_test", "float64"),
    "negative labels": (put("y_test", lambda a: a["y_test"] - 1), "y_train or y_test", "-1 to 2", "0 to 2"),
    "labels beyond class_names": (put("class_names", np.array(["a", "b"])), "0 to 2", "0 to 1", "class_names"),
    "a wild label": (
        lambda a: (a.pop("class_names"), a.update(y_train=a["y_train"] * 10**9)), "0 to 2000000000", "0 to 8"
    ),
    "a name twice": (put("class_names", np.array([["a"], ["b"], ["a"]])), "class_names has a name twice"),
    "a name of two lines": (put("class_names", np.array(["two\nlines", "b", "c"])), "of several lines"),
    "pickled names": (put("class_names", np.array(["a", 1, None], object)), "allow_pickle=False"),
    "half the writers": (put("writer_test", np.zeros(6, int)), "no array writer_train"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_bad_arrays_are_refused(tmp_path, cache, case):
    change, *words = BAD_ARRAYS[case]
    arrays = images((4, 4), 3) | {"class_names": np.array(["a", "b", "c"])}
    change(arrays)
    refused(lambda: from_npz("mine", tmp_path / "a", **arrays), "images.npz", *words)
    assert not cache.exists()


def test_files_that_are_no_npz_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "images.npz"
    refused(lambda: datasets.import_path("mine", path), "there is nothing at", "images.npz' to import")
    for content in (b"", b"hello", pickle.dumps({"x_train": 1})):
        path.write_bytes(content)
        refused(lambda: datasets.import_path("mine", path), "images.npz", "must be a whole .npz file")
    monkeypatch.setenv("FEDCLI_MAX_GIB", "4 GiB")
    refused(lambda: from_npz("mine", tmp_path / "a", **images((4, 4), 2)), "FEDCLI_MAX_GIB", "'4 GiB'", "a number.")


# Known names


@pytest.mark.parametrize("name", ["cifar10", "fmnist", "emnist-letters", "tiny-imagenet"])
def test_known_names_have_one_shape(tmp_path, name):
    sizes = known.KNOWN[name].sizes
    classes, (channels, size, _) = sizes["classes"], sizes["shape"]
    for shape, count, words in (
        ((size + 1, size + 1, channels), classes, f"not ({size}, {size}"),
        ((size, size, 4 - channels), classes, f"not ({size}, {size}"),
        ((size, size, channels), classes + 1, f"are {classes + 1} ("),
    ):
        arrays = images(shape, count)
        refused(lambda arrays=arrays: from_npz(name, tmp_path / "a", **arrays), f"those of '{name}'", words)


@pytest.mark.parametrize(
    ("name", "spelling"),
    [
        ("cifar10", str.title),
        ("fmnist", lambda text: {"t-shirt": "T-shirt_top", "ankle-boot": "Ankle boot"}.get(text, text)),
        ("emnist-letters", str.upper),
        ("emnist-byclass", str),
        ("mnist", str),
    ],
)
def test_class_folders_of_known_names_get_the_official_labels(tmp_path, name, spelling):
    arrays, classes = known_images(name), known.KNOWN[name].class_names
    npz = from_npz(name, tmp_path / "a", **arrays)
    assert npz.class_names == classes
    assert_same(npz, imported(name, write_folder(tmp_path / "b", arrays, [spelling(text) for text in classes])))
    order = np.random.default_rng(5).permutation(len(classes))  # labels in another order, told by the names
    other = arrays | {f"y_{part}": np.argsort(order)[arrays[f"y_{part}"]] for part in PARTS}
    assert_same(npz, from_npz(name, tmp_path / "a", **other, class_names=[spelling(classes[i]) for i in order]))
    numbers = write_folder(tmp_path / "c", arrays, [str(label) for label in range(len(classes))])
    assert_same(npz, imported(name, numbers))


def test_known_class_names_are_those_of_torchvision():
    sets = torchvision().datasets
    sources = {"emnist-byclass": sets.EMNIST.classes_split_dict["byclass"], "fmnist": sets.FashionMNIST.classes}
    for name, source in sources.items():
        assert known.official_order(source, known.KNOWN[name].class_names) == list(range(len(source)))
    assert known.KNOWN["emnist-letters"].class_names == tuple(string.ascii_lowercase)


# What a name says

OFFICIAL = datasets.refuse_other_images  # which tests/conftest.py takes away


@pytest.fixture
def official(monkeypatch):
    """Names mean the official images, as for a user."""
    monkeypatch.setattr(datasets, "refuse_other_images", OFFICIAL)


@pytest.mark.parametrize("name", sorted(known.KNOWN.keys() - known.MADE.keys() - {"femnist", "mnist-m"}))
def test_other_images_do_not_get_a_known_name(name, tmp_path, official, cache):
    arrays = known_images(name, per_class=(4, 2))
    if known.KNOWN[name].domain_names:
        domains = len(known.KNOWN[name].domain_names)
        arrays |= {f"domain_{part}": np.arange(len(arrays[f"y_{part}"])) % domains for part in PARTS}
        arrays["domain_names"] = np.array(known.KNOWN[name].domain_names)
    words = f"not the images of '{name}' (got", f"such as my-{name}"
    refused(lambda: from_npz(name, tmp_path / "a", **arrays), *words)
    assert not cache.exists()
    assert from_npz(f"my-{name}", tmp_path / "a", **arrays).num_classes == len(known.KNOWN[name].class_names)


def test_sets_of_the_right_size_are_known_by_the_numbers_of_their_classes(tmp_path, official, monkeypatch):
    counts = {"train_counts": (3,) * 10, "test_counts": (2,) * 10}
    monkeypatch.setitem(known.KNOWN, "usps", known.KNOWN["usps"]._replace(num_train=30, num_test=20, **counts))
    arrays = known_images("usps")
    assert from_npz("usps", tmp_path / "a", **arrays).name == "usps"
    arrays["y_train"][arrays["y_train"] == 0] = 1
    arrays["y_train"][0] = 0
    refused(lambda: from_npz("usps", tmp_path / "a", **arrays), "training images of its classes, not 3, 3, 3")


def test_numbers_of_known_sets_add_up():
    for info in known.KNOWN.values():
        for total, counts in ((info.num_train, info.train_counts), (info.num_test, info.test_counts)):
            assert not counts or (sum(counts), len(counts)) == (total, len(info.class_names))
        assert not info.domain_counts or info.make or len(info.domain_counts) == len(info.domain_names)


def test_what_was_kept_under_a_known_name_is_compared_too_also_where_another_set_is_made_of_it(
    tmp_path, official, monkeypatch
):
    with monkeypatch.context() as before:
        before.setattr(datasets, "refuse_other_images", lambda dataset: None)
        from_npz("mnist", tmp_path / "a", **images((28, 28), 10, per_class=(16, 101)))
    for name in ("mnist", "digits-real-4"):
        refused(lambda name=name: datasets.load(name), "not the images of 'mnist' (got fingerprint", "94a3db3da708f867")


# Labels, and sets of one image


@pytest.mark.parametrize("kind", ["y", "domain"])
def test_numbers_that_leave_some_out_are_as_many_classes_or_domains_as_there_are(kind, tmp_path):
    arrays = images((4, 4), 3, per_class=(8, 3))
    arrays |= {f"domain_{part}": np.arange(len(arrays[f"y_{part}"])) % 3 for part in PARTS}
    for part in PARTS:
        arrays[f"{kind}_{part}"] = np.array([0, 5, 9])[arrays[f"{kind}_{part}"]]
    np.savez(tmp_path / "a.npz", **arrays)
    _, notes = datasets.import_path("mine", tmp_path / "a.npz")
    noun, names = {"y": ("classes", "class_names"), "domain": ("domains", "domain_names")}[kind]
    assert notes == [f"3 {noun}, whose numbers are 0, 5, 9"]
    dataset = datasets.load("mine")
    assert getattr(dataset, names) == ("0", "5", "9")
    values = getattr(dataset, f"{kind}_train").bincount()
    assert len(values) == 3
    assert (values > 0).all()


def test_named_classes_without_training_images_are_said(tmp_path):
    arrays = images((4, 4), 3) | {"class_names": np.array([f"class{number}" for number in range(10)])}
    np.savez(tmp_path / "a.npz", **arrays)
    _, notes = datasets.import_path("mine", tmp_path / "a.npz")
    assert notes == ["without training images: class3, class4, class5, class6, class7 and 2 more"]


def test_images_that_are_all_alike_are_refused(tmp_path, cache):
    arrays = images((4, 4), 3)
    for part in PARTS:
        arrays[f"x_{part}"][:] = 7
    refused(lambda: from_npz("mine", tmp_path / "a", **arrays), "all of its 15 images are alike")
    assert not cache.exists()
