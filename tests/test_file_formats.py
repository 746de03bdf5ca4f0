"""Tiny files in every form that is read: the official ones, image folders, archives of them, and downloads."""

import bz2
import gzip
import hashlib
import io
import json
import os
import pickle
import shutil
import socket
import string
import struct
import subprocess
import tarfile
import zlib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from threading import Thread
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import scipy.io
from PIL import EpsImagePlugin, ExifTags, Image

from fedcli import reading
from fedcli.data import datasets, file_formats, imports
from fedcli.data.catalog import KNOWN
from fedcli.data.dataset_info import Archive
from fedcli.data.image_arrays import SPLITS, choose_splits
from fedcli.vision import torchvision
from tests.image_files import (
    assert_same_dataset,
    encode_image,
    image_arrays,
    import_arrays,
    import_dataset,
    known_images,
    random_pixels,
    sorted_examples,
    write_folder_of_one_class,
    write_image_folder,
    write_zip,
)
from tests.user_errors import raises_user_error


def write_files(folder, contents):
    """A folder with these contents by path."""
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def write_tar(path, contents, prefix="", **attributes):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(prefix + name)
            member.size = len(content)
            for key, value in attributes.items():
                setattr(member, key, value)
            archive.addfile(member, io.BytesIO(content))
    return path


# What the sites give, by path


def each_image(arrays):
    """Part, number in it, pixels and label of each image."""
    for split in SPLITS:
        pairs = zip(arrays[f"x_{split}"], arrays[f"y_{split}"], strict=True)
        for number, (image, label) in enumerate(pairs):
            yield split, number, image, label


def idx(array):
    """The bytes of MNIST's format: the kind of numbers, the shape, the numbers."""
    kind = bytes([0, 0, 8, array.ndim])
    shape = np.array(array.shape, ">i4")
    return kind + shape.tobytes() + array.astype(np.uint8).tobytes()


def mnist_files(arrays, name):
    contents = {}
    for split, word in zip(SPLITS, ("train", "t10k"), strict=True):
        contents[f"{word}-images-idx3-ubyte.gz"] = gzip.compress(idx(arrays[f"x_{split}"]))
        contents[f"{word}-labels-idx1-ubyte.gz"] = gzip.compress(idx(arrays[f"y_{split}"]))
    return contents


def emnist_files(arrays, name):
    emnist_split = KNOWN[name].emnist_split
    first_label = 1 if emnist_split == "letters" else 0
    contents = {"gzip/emnist-mnist-train-images-idx3-ubyte.gz": gzip.compress(b"?")}
    for split in SPLITS:
        lying = arrays[f"x_{split}"].transpose(0, 2, 1)
        labels = arrays[f"y_{split}"] + first_label
        contents[f"gzip/emnist-{emnist_split}-{split}-images-idx3-ubyte.gz"] = gzip.compress(idx(lying))
        contents[f"gzip/emnist-{emnist_split}-{split}-labels-idx1-ubyte.gz"] = gzip.compress(idx(labels))
    return contents


def cifar_files(arrays, name):
    source = getattr(torchvision().datasets, name.upper())
    labels_key = "fine_labels" if name == "cifar100" else "labels"
    class_names = arrays.get("class_names", KNOWN[name].class_names)
    contents = {source.meta["filename"]: {source.meta["key"]: list(class_names)}}
    for split, batches in (("train", source.train_list), ("test", source.test_list)):
        for number, (file, _) in enumerate(batches):
            pixels = arrays[f"x_{split}"][number :: len(batches)]
            labels = arrays[f"y_{split}"][number :: len(batches)]
            rows = pixels.transpose(0, 3, 1, 2).reshape(-1, 3072)
            contents[file] = {"data": rows, labels_key: labels.tolist()}
    return {f"{source.base_folder}/{file}": pickle.dumps(content, 2) for file, content in contents.items()}


def matlab_files(arrays, name):
    prefix = "" if name == "svhn" else "synth_"
    contents = {}
    for split in SPLITS:
        labels = arrays[f"y_{split}"]
        labels = np.where(labels == 0, 10, labels).astype(np.uint8)  # the files call the digit 0 the class 10
        file = io.BytesIO()
        scipy.io.savemat(file, {"X": arrays[f"x_{split}"].transpose(1, 2, 3, 0), "y": labels[:, None]})
        contents[f"{prefix}{split}_32x32.mat"] = file.getvalue()
    return contents


def usps_files(arrays, name):
    texts = {"train": "", "test": ""}
    for split, _, image, label in each_image(arrays):
        values = (image.ravel() + 0.5) / 255 * 2 - 1  # half a step up, as torchvision rounds down
        columns = " ".join(f"{column}:{value:.6f}" for column, value in enumerate(values, start=1))
        texts[split] += f"{label + 1} {columns}\n"
    return {
        "usps.bz2": bz2.compress(texts["train"].encode()),
        "usps.t.bz2": bz2.compress(texts["test"].encode()),
    }


def cinic_files(arrays, name):
    contents = {"README.md": b"CINIC-10", "imagenet-contributors.csv": b"synset,image\n"}
    for split, number, image, label in each_image(arrays):
        class_name = KNOWN[name].class_names[label]
        contents[f"{split}/{class_name}/n02690373_{number}.png"] = encode_image(image)
        contents[f"valid/{class_name}/cifar10-train-{number}.png"] = encode_image(255 - image)
    return contents


def tiny_files(arrays, name):
    contents = {"wnids.txt": b"n00000000\n", "val/val_annotations.txt": b""}
    for split, number, image, label in each_image(arrays):
        class_name = f"n{label:08}"
        folder = f"train/{class_name}" if split == "train" else "val"
        contents[f"{folder}/images/{number}.JPEG"] = encode_image(image)
        contents[f"test/images/{number}.JPEG"] = encode_image(image)
        contents[f"{folder}/{class_name}_boxes.txt"] = b"0\t0\t63\t63\n"
        if split == "test":
            contents["val/val_annotations.txt"] += f"{number}.JPEG\t{class_name}\t0\t32\t44\t62\n".encode()
    return contents


def mnist_m_files(arrays, name="mnist-m"):
    contents = {f"mnist_m_{split}_labels.txt": b"" for split in SPLITS}
    for split, number, image, label in each_image(arrays):
        contents[f"mnist_m_{split}/{number:08}.png"] = encode_image(image)
        contents[f"mnist_m_{split}_labels.txt"] += f"{number:08}.png {label}\n".encode()
    return contents


FILES = {
    "mnist": mnist_files, "emnist-digits": emnist_files, "emnist-letters": emnist_files, "cifar10": cifar_files,
    "cifar100": cifar_files, "svhn": matlab_files, "usps": usps_files, "cinic10": cinic_files,
    "tiny-imagenet": tiny_files, "synth-digits": matlab_files, "mnist-m": mnist_m_files,
}  # fmt: skip


def md5(content):
    return hashlib.md5(content).hexdigest()


def official_files(name, monkeypatch):
    """Tiny files of a set, taken for the official ones, and the arrays that they hold."""
    arrays = known_images(name)
    if name in ("cifar100", "tiny-imagenet"):  # the files name the classes
        arrays["class_names"] = [f"n{label:08}" for label in range(KNOWN[name].sizes["classes"])]
    if name == "usps":  # its pixels are at most 254 after half a step up
        for split in SPLITS:
            arrays[f"x_{split}"] = np.minimum(arrays[f"x_{split}"], 254)

    contents = FILES[name](arrays, name)
    if name.startswith("cifar"):
        source = getattr(torchvision().datasets, name.upper())
        sums = {file.removeprefix(f"{source.base_folder}/"): md5(content) for file, content in contents.items()}
        for field in ("train_list", "test_list"):
            monkeypatch.setattr(source, field, [[file, sums[file]] for file, _ in getattr(source, field)])
        monkeypatch.setattr(source, "meta", source.meta | {"md5": sums[source.meta["filename"]]})
    return contents, arrays


# Their images lie in folders of folders; the files of the other sets lie side by side.
SETS_OF_FOLDERS = ("cinic10", "tiny-imagenet", "mnist-m")


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_official_files_are_read_in_folders_and_archives(name, tmp_path, monkeypatch):
    contents, arrays = official_files(name, monkeypatch)
    expected = import_arrays(name, tmp_path / "npz", **arrays)
    folder = write_files(tmp_path / "folder", contents)
    zipped = write_zip(tmp_path / "set.zip", contents)
    tarred = write_tar(tmp_path / "set.tgz", contents, "./one/folder/more/")
    for path in (folder, zipped, tarred):
        assert_same_dataset(expected, import_dataset(name, path))

    innermost = folder
    if name not in SETS_OF_FOLDERS:
        (innermost,) = {file.parent for file in folder.rglob("*") if file.is_file()}
    monkeypatch.chdir(innermost.rename(tmp_path / "called otherwise"))
    assert_same_dataset(expected, import_dataset(name, "."))


def unpacked(files, suffix, decompress):
    """The files by their names and contents without compression."""
    return {name.removesuffix(suffix): decompress(content) for name, content in files.items()}


def test_unpacked_and_differently_compressed_files_of_mnist_are_read(tmp_path):
    arrays = known_images("mnist")
    expected = import_arrays("mnist", tmp_path / "npz", **arrays)
    official = mnist_files(arrays, "mnist")
    raw = unpacked(official, ".gz", gzip.decompress)
    kaggle = {name.replace("-idx", ".idx"): content for name, content in raw.items()}
    compressed_less = {name: gzip.compress(raw[name.removesuffix(".gz")], 1) for name in official}
    forms_of_mnist = {"raw": raw, "kaggle": kaggle, "compressed less": compressed_less, "both": raw | official}
    for form, contents in forms_of_mnist.items():
        folder = write_files(tmp_path / form / "MNIST" / "raw", contents)
        assert_same_dataset(expected, import_dataset("mnist", folder))


def test_unpacked_files_of_usps_are_read(tmp_path):
    arrays = {key: np.minimum(values, 254) for key, values in known_images("usps").items()}
    expected = import_arrays("usps", tmp_path / "npz", **arrays)
    raw = unpacked(usps_files(arrays, "usps"), ".bz2", bz2.decompress)
    assert_same_dataset(expected, import_dataset("usps", write_files(tmp_path / "usps", raw)))


def test_a_folder_with_the_files_of_several_data_sets_is_refused(tmp_path):
    raw = unpacked(mnist_files(known_images("mnist"), "mnist"), ".gz", gzip.decompress)
    for name in ("MNIST", "FashionMNIST"):
        write_files(tmp_path / "raw" / name / "raw", raw)
    with raises_user_error("several data sets", "FashionMNIST/raw, MNIST/raw"):
        imports.import_path("mnist", tmp_path / "raw")


# Downloads


class Site(NamedTuple):
    """A folder whose files a server gives, and the server's address."""

    folder: Any
    address: str


@pytest.fixture
def site(tmp_path):
    folder = tmp_path / "site"
    folder.mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever).start()
        yield Site(folder, f"http://127.0.0.1:{server.server_port}/")
        server.shutdown()


def serve(name, contents, site, monkeypatch):
    """Has the site give the files of a set, and torchvision ask it for them."""
    source = getattr(torchvision().datasets, KNOWN[name].torchvision_class or "", None)
    if name in ("mnist", "svhn"):
        write_files(site.folder, contents)
        sums = {file: md5(content) for file, content in contents.items()}
        entries = [[site.address + file, file, md5_sum] for file, md5_sum in sums.items()]
        monkeypatch.setattr(source, "split_list", dict(zip(SPLITS, entries, strict=False)), raising=False)
        monkeypatch.setattr(source, "resources", list(sums.items()), raising=False)
        monkeypatch.setattr(source, "mirrors", [f"{site.address}nowhere/", site.address], raising=False)
    elif name == "emnist-letters":
        archive = write_zip(site.folder / "gzip.zip", contents)
        monkeypatch.setattr(source, "url", f"{site.address}gzip.zip")
        monkeypatch.setattr(source, "md5", md5(archive.read_bytes()))
    else:
        archive = write_tar(site.folder / "a.tar.gz", contents)
        served = Archive(address=f"{site.address}a.tar.gz", md5=md5(archive.read_bytes()))
        known = KNOWN[name]._replace(archive=served)
        monkeypatch.setitem(KNOWN, name, known)


@pytest.mark.parametrize("name", ["mnist", "emnist-letters", "svhn", "cinic10"])
def test_downloads_are_checked_and_read(name, tmp_path, cache, site, monkeypatch):
    contents, arrays = official_files(name, monkeypatch)
    expected = import_arrays(name, tmp_path / "npz", **arrays)
    (cache / f"{name}.npz").unlink()
    serve(name, contents, site, monkeypatch)
    largest_file = max(site.folder.iterdir(), key=lambda path: path.stat().st_size)
    whole = largest_file.read_bytes()

    largest_file.write_bytes(whole[:-100])
    with raises_user_error(f"'{name}' could not be downloaded", "corrupted", f"import {name} PATH"):
        imports.download(name)

    largest_file.unlink()
    with raises_user_error(f"'{name}' could not be downloaded", "HTTP Error 404"):
        imports.download(name)
    assert not list(cache.iterdir())

    largest_file.write_bytes(whole)
    assert imports.download(name) == cache / f"{name}.npz"
    assert_same_dataset(expected, datasets.load(name))

    largest_file.unlink()
    assert imports.download(name) == cache / f"{name}.npz"  # it is there


@pytest.fixture
def own_timeout():
    """A limit in seconds that the program has set for all its connections."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(7)
    yield 7
    socket.setdefaulttimeout(before)


def test_a_download_leaves_the_programs_own_timeout_as_it_was(own_timeout, cache, site, monkeypatch):
    serve("cinic10", {}, site, monkeypatch)
    for file in site.folder.iterdir():
        file.unlink()
    with raises_user_error("could not be downloaded"):
        imports.download("cinic10")
    assert socket.getdefaulttimeout() == own_timeout


# FEMNIST, whose writers are held out


def leaf_files(num_writers=20, per_file=8, first=0):
    """LEAF's files by name, and of each writer images and labels."""
    rng = np.random.default_rng(first)
    written = {}
    contents = {}
    for position, number in enumerate(rng.permutation(num_writers)):
        count = rng.integers(1, 9)
        user = f"f{first + number:04}_{number % 50:02}"
        pixels = rng.integers(0, 256, (count, 28, 28), np.uint8)
        labels = rng.integers(0, 62, count)
        written[user] = (pixels, labels)

        content = contents.setdefault(f"all_data_{position // per_file}.json", {"users": [], "user_data": {}})
        content["users"].append(user)
        content["user_data"][user] = {"x": (pixels.reshape(-1, 784) / 255).tolist(), "y": labels.tolist()}
    return {name: json.dumps(content).encode() for name, content in contents.items()}, written


def by_writer(dataset, split):
    """The images, with labels, of each writer's number."""
    writers = {}
    for pixels, label, writer in sorted_examples(dataset, split, "y", "writer"):
        writers.setdefault(writer, []).append((pixels, label))
    return writers


def test_femnist_holds_writers_out(tmp_path):
    contents, written = leaf_files()
    dataset = import_dataset("femnist", write_files(tmp_path / "all_data", contents))
    assert dataset.class_names == (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)
    assert dataset.fingerprint == "53bf9db4fce3e4f2"  # the tenth is a fixed one
    assert (dataset.writer_train[dataset.place_train.argsort()].diff() >= 0).all()  # positions go by writer

    train = by_writer(dataset, "train")
    test = by_writer(dataset, "test")
    assert len(test) == 2
    assert not set(train) & set(test)

    for number, name in enumerate(sorted(written)):
        pixels, labels = written[name]
        assert {**train, **test}[number] == sorted_examples({"x_train": pixels, "y_train": labels}, "train", "y")


def test_femnist_is_the_same_set_under_other_names_and_beside_the_same_or_fewer_writers(tmp_path):
    contents, _ = leaf_files()
    dataset = import_dataset("femnist", write_files(tmp_path / "all_data", contents))
    renamed = {f"all_data/all_data_{9 - number}.json": content for number, content in enumerate(contents.values())}
    sampled = {"sampled_data/all_data_1_niid.json": contents["all_data_0.json"]}
    again = {"old/all_data/all_data_0.json": contents["all_data_0.json"]}  # whose writers count once
    _, notes = imports.import_path("femnist", write_files(tmp_path / "data", renamed | sampled | again))
    assert_same_dataset(dataset, datasets.load("femnist"))
    assert notes[0] == "left out: sampled_data"


def test_the_limit_of_memory_counts_the_images_of_femnist_and_not_their_text(tmp_path, monkeypatch):
    contents, _ = leaf_files()
    dataset = import_dataset("femnist", write_files(tmp_path / "all_data", contents))
    text_bytes = sum(map(len, contents.values()))
    image_bytes = 784 * (len(dataset.y_train) + len(dataset.y_test))
    monkeypatch.setattr(reading, "MAX_GIB", text_bytes / 2**32)
    for write in (write_zip, write_tar):
        assert_same_dataset(dataset, import_dataset("femnist", write(tmp_path / write.__name__, contents)))
        hollow = write(tmp_path / f"hollow {write.__name__}", {"all_data_0.json": b" " * 10**7})
        with raises_user_error(hollow, "2,000,000 bytes, more than"):
            imports.import_path("femnist", hollow)

    monkeypatch.setattr(reading, "MAX_GIB", (image_bytes - 1) / 2**30)
    with raises_user_error("more than", "MAX_GIB=1"):
        imports.import_path("femnist", tmp_path / "all_data")


@pytest.mark.parametrize("spelling", [str.lower, str.title, str.upper])
def test_a_split_that_leaf_has_made_is_taken(spelling, tmp_path):
    train, _ = leaf_files()
    test, written_in_test = leaf_files(6, first=100)
    contents = {f"{spelling('train')}/{name}": content for name, content in train.items()}
    for name, content in test.items():
        contents[f"{spelling('test')}/{name}"] = content
        contents[f"all_data/{name}"] = content

    _, notes = imports.import_path("femnist", write_files(tmp_path / "data", contents))

    dataset = datasets.load("femnist")
    assert len(by_writer(dataset, "train")) == 20
    assert len(by_writer(dataset, "test")) == 6
    assert len(dataset.y_test) == sum(len(labels) for _, labels in written_in_test.values())
    assert notes == ["left out: all_data", "without training images: 5, 7, 17, 23, 36 and 7 more"]


# Files that are wrong


def leaf_file_of(change):
    """A file of LEAF's whose first writer's data `change` has changed."""
    contents, _ = leaf_files(num_writers=4, per_file=4)
    (text,) = contents.values()
    content = json.loads(text)
    first_writer = content["users"][0]
    change(content["user_data"][first_writer])
    return {"all_data_0.json": json.dumps(content).encode()}


def leaf_with_pixel(value):
    def change(writer):
        first_image = writer["x"][0]
        first_image[3] = value

    return leaf_file_of(change)


def leaf_with_label(label):
    def change(writer):
        writer["y"][0] = label

    return leaf_file_of(change)


def leaf_with_a_label_too_many():
    return leaf_file_of(lambda writer: writer["y"].append(1))


def leaf_with_other_images_in_another_file():
    contents, _ = leaf_files(num_writers=4, per_file=4)
    (file,) = contents.values()
    (other_file,) = leaf_with_pixel(0.25).values()
    return {"all_data/all_data_0.json": file, "old/all_data/all_data_0.json": other_file}


def leaf_with_one_writer():
    contents, _ = leaf_files(num_writers=1)
    return contents


def without(contents, name):
    return {file: content for file, content in contents.items() if not file.endswith(name)}


def with_line(contents, line):
    """MNIST-M's files, with one more line in the list of the test images."""
    name = "mnist_m_test_labels.txt"
    return contents | {name: contents[name] + line}


SYNTH = matlab_files(known_images("synth-digits"), "synth-digits")
LISTED = mnist_m_files(known_images("mnist-m"))
TINY_IMAGENET = tiny_files(image_arrays((4, 4), 9), "tiny-imagenet")
MNIST = mnist_files(known_images("mnist"), "mnist")
MNIST_IMAGES = "t10k-images-idx3-ubyte.gz"
IDX_OF_TOO_MANY_IMAGES = b"\0\0\x08\3" + b"\0\1\0\0" * 3
IDX_OF_MORE_LABELS_THAN_SAID = b"\0\0\x08\1\0\0\0\1" + bytes(9)


class BadFiles(NamedTuple):
    dataset: str
    contents: dict[str, bytes]
    words: tuple[str, ...]  # of the refusal


BAD_FILES = {
    "no numbers": BadFiles("femnist", leaf_with_pixel(np.nan), ("0 to 1",)),
    "bytes": BadFiles("femnist", leaf_with_pixel(128), ("from 0 to 1",)),
    "class 62": BadFiles("femnist", leaf_with_label(62), ("0 to 61",)),
    "labels missing": BadFiles("femnist", leaf_with_a_label_too_many(), ("a label",)),
    "one writer": BadFiles("femnist", leaf_with_one_writer(), ("0 images are to train",)),
    "two of a writer": BadFiles(
        "femnist", leaf_with_other_images_in_another_file(), ("another file has other images of the writer f0",)
    ),
    "two classes": BadFiles(
        "mnist-m", with_line(LISTED, b"00000000.png 10\n"), ("has two classes for '00000000.png'",)
    ),
    "a class of two words": BadFiles(
        "mnist-m", with_line(LISTED, b"a.png tiger cat\n"), ("the line 'a.png tiger cat' of", "put a tab between")
    ),
    "no class": BadFiles("mnist-m", with_line(LISTED, b"a.png\n"), ("the line 'a.png' of", "put a tab between")),
    "an empty class": BadFiles(
        "mnist-m", with_line(LISTED, b"a.png\t\n"), ("the line 'a.png' of", "put a tab between")
    ),
    "an empty file name": BadFiles("mnist-m", with_line(LISTED, b"\t7\n"), ("the line '7' of", "put a tab between")),
    "a class of two words, one a number": BadFiles(
        "mnist-m", with_line(LISTED, b"a.png class 7\n"), ("the line 'a.png class 7' of", "put a tab between")
    ),
    "two lists": BadFiles(
        "mnist-m",
        LISTED | {"mnist_m_test/test_labels.txt": b"00000000.png 1\n"},
        ("a second list of the classes in test",),
    ),
    "an image missing": BadFiles("tiny-imagenet", without(TINY_IMAGENET, "val/images/7.JPEG"), ("7.JPEG",)),
    "an image not listed": BadFiles(
        "mnist-m", LISTED | {"mnist_m_test/9.png": encode_image(np.eye(9) > 0)}, ("do not fit", "9.png")
    ),
    "a cut file": BadFiles(
        "synth-digits", SYNTH | {"synth_test_32x32.mat": b"MATLAB 5.0"}, ("synth_test", "cannot be read")
    ),
    "no test": BadFiles("synth-digits", without(SYNTH, "test_32x32.mat"), ("no array x_test",)),
    "a cut gzip": BadFiles("mnist", MNIST | {MNIST_IMAGES: MNIST[MNIST_IMAGES][:-9]}, ("t10k-images",)),
    "too large": BadFiles("mnist", MNIST | {"train-images-idx3-ubyte": IDX_OF_TOO_MANY_IMAGES}, ("than 4 GiB",)),
    "more than said": BadFiles(
        "mnist", MNIST | {"train-labels-idx1-ubyte": IDX_OF_MORE_LABELS_THAN_SAID}, ("of size 2 ",)
    ),
    "nothing": BadFiles("mnist", {".hidden": b""}, ("it is empty", "image folders")),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused(tmp_path, cache, case):
    bad = BAD_FILES[case]
    folder = write_files(tmp_path / "files", bad.contents)
    with raises_user_error(*bad.words):
        imports.import_path(bad.dataset, folder)
    assert not cache.exists()


def test_batches_of_cifar10_that_are_not_the_official_ones_are_refused(tmp_path, cache):
    folder = write_files(tmp_path / "files", cifar_files(known_images("cifar10"), "cifar10"))
    with raises_user_error(".meta", "corrupted"):
        imports.import_path("cifar10", folder)
    assert not cache.exists()


def test_archives_that_are_damaged_or_lead_astray_are_refused(tmp_path, cache):
    contents = cinic_files(known_images("cinic10"), "cinic10")
    cut_tar = write_tar(tmp_path / "a.tar.gz", contents)
    cut_zip = write_zip(tmp_path / "a.zip", contents)
    for path in (cut_tar, cut_zip):
        path.write_bytes(path.read_bytes()[:-5000])

    flipped = write_tar(tmp_path / "b.tar.gz", contents)
    content = bytearray(flipped.read_bytes())
    content[-6] ^= 1  # in the checksum at the end
    flipped.write_bytes(content)

    unknown = tmp_path / "flowers.parquet"
    unknown.write_bytes(b"hello")
    outside = write_tar(tmp_path / "c.tar.gz", contents, "../")
    linked = write_tar(tmp_path / "d.tar.gz", contents, type=tarfile.SYMTYPE, linkname="/etc/passwd")

    for path in (cut_tar, cut_zip, flipped, unknown, outside, linked):
        with raises_user_error(path, "cannot be read", ".zip or", "LEAF's"):
            imports.import_path("cinic10", path)
    assert not cache.exists()


def test_archives_and_folders_above_the_limit_of_memory_are_refused(tmp_path, cache, monkeypatch):
    contents = cinic_files(known_images("cinic10"), "cinic10")
    tarred = write_tar(tmp_path / "a.tar.gz", contents)
    zipped = write_zip(tmp_path / "a.zip", contents)
    folder = write_files(tmp_path / "folder", contents)
    monkeypatch.setenv("FEDCLI_MAX_GIB", "1e-5")
    for path in (zipped, tarred, folder):
        with raises_user_error(path, "more than", "MAX_GIB=1"):
            imports.import_path("cinic10", path)
    assert not cache.exists()

    monkeypatch.setenv("FEDCLI_MAX_GIB", "1")
    file, _ = imports.import_path("cinic10", folder)
    assert file.is_file()


# Image folders


def test_domains_come_from_npz_and_folders_alike(tmp_path):
    arrays = image_arrays((4, 4), 2, per_class=(6, 4))
    arrays |= {"domain_train": np.tile([1, 0], 6), "domain_test": np.tile([1, 0], 4)}
    arrays |= {"y_train": np.repeat([0, 1], 6), "y_test": np.repeat([0, 1], 4)}
    arrays["x_train"][1] = arrays["x_train"][0]  # the same picture in two domains
    npz = import_arrays(
        "offices", tmp_path / "a", **arrays, class_names=["bag", "cup"], domain_names=["amazon", "webcam"]
    )
    folder = write_image_folder(tmp_path / "b", arrays, ["bag", "cup"], ["amazon", "webcam"])

    assert_same_dataset(npz, import_dataset("offices", folder))
    assert npz.domain_train.bincount().tolist() == [6, 6]
    assert import_arrays("offices", tmp_path / "c", **arrays).domain_names == ("0", "1")


@pytest.mark.parametrize("spelling", [str.lower, str.title, str.upper])
@pytest.mark.parametrize(
    "words", [("train", "test"), ("training", "testing"), ("train", "val"), ("train", "valid"), ("train", "validation")]
)
def test_the_folders_of_splits_may_be_spelled_in_any_way(words, spelling, tmp_path):
    arrays = image_arrays((4, 4), 2)
    expected = import_arrays("mine", tmp_path / "npz", **arrays, class_names=["ant", "bee"])
    folder = write_image_folder(tmp_path / "images", arrays, ["ant", "bee"])
    for split, word in zip(SPLITS, words, strict=True):
        (folder / split).rename(folder / f"renamed_{split}")
        (folder / f"renamed_{split}").rename(folder / spelling(word))
    assert_same_dataset(expected, import_dataset("mine", folder))


@pytest.mark.parametrize("domains", [[""], ["real", "sketch"]])
def test_a_class_may_be_called_as_a_split_is(domains, tmp_path):
    classes = ["Train", "bus", "test", "training", "val", "validation"]
    pictures = {}
    for number, (domain, name) in enumerate(product(domains, classes)):
        pictures[domain, name] = [random_pixels(10 * number + image, (4, 4)) for image in range(5)]
    _, notes = imports.import_path("vehicles", write_office(tmp_path / "images", pictures, "images"))
    assert notes[0] == "read as classes, without folders of classes in them: Train, test, training, val, validation"

    dataset = datasets.load("vehicles")
    assert dataset.class_names == tuple(classes)
    assert dataset.domain_names == tuple(filter(None, domains))
    assert len(dataset.y_train) + len(dataset.y_test) == 5 * len(pictures)


@pytest.mark.parametrize("inner", ["images", "Images"])
def test_a_folder_images_hides_only_what_lies_beside_it(inner, tmp_path):
    pictures = {}
    for number, (domain, name) in enumerate(product([f"amazon/{inner}", "sketch", "amazon/masks"], ["ant", "bee"])):
        pictures[domain, name] = [random_pixels(10 * number + image, (4, 4)) for image in range(5)]
    folder = write_office(tmp_path / "set", pictures)
    write_files(folder, {"amazon/plan.png": encode_image(random_pixels(99, (4, 4)))})
    _, notes = imports.import_path("mine", folder)
    assert notes[0] == "left out: 11 images beside a folder 'images'"

    dataset = datasets.load("mine")
    assert dataset.domain_names == ("amazon", "sketch")
    assert len(dataset.y_train) + len(dataset.y_test) == 20


@pytest.mark.parametrize("inner", ["images", "Images", "IMAGES", "images/Images", "images/images/images"])
def test_a_folder_images_within_a_class_is_no_class(inner, tmp_path):
    pictures = {}
    for number, name in enumerate(["ant", "bee"]):
        pictures[name, inner] = [random_pixels(10 * number + image, (4, 4)) for image in range(5)]
    dataset = import_dataset("mine", write_office(tmp_path / "set", pictures))
    assert dataset.class_names == ("ant", "bee")
    assert dataset.domain_names == ()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_lists_of_classes_may_be_of_windows_and_name_classes_of_several_words(encoding, line_end, tmp_path):
    contents = {}
    for split in SPLITS:
        lines = ["my first.png\ttiger cat", "2.png\ttiger shark", "", "3.png ant", ""]
        contents[f"{split}_labels.txt"] = line_end.join(lines).encode(encoding)
        for name in ("my first", "2", "3"):
            contents[f"{split}/{name}.png"] = encode_image(random_pixels(len(contents), (4, 4)))
    dataset = import_dataset("mine", write_files(tmp_path / "set", contents))
    assert dataset.class_names == ("ant", "tiger cat", "tiger shark")
    assert dataset.y_train.tolist() == dataset.y_test.tolist() == [0, 1, 2]


def test_a_box_may_follow_the_class_of_a_file_behind_tabs_or_spaces(tmp_path):
    with_tabs = import_dataset("mine", write_files(tmp_path / "tabs", TINY_IMAGENET))
    name = "val/val_annotations.txt"
    spaced = TINY_IMAGENET | {name: TINY_IMAGENET[name].replace(b"\t", b" ")}
    assert_same_dataset(with_tabs, import_dataset("mine", write_files(tmp_path / "spaces", spaced)))


def test_folders_may_hold_hidden_files_links_and_mixed_colours(tmp_path):
    folder = write_image_folder(tmp_path / "images", image_arrays((4, 4), 2), ["ant", "bee"])
    for parent in (folder, folder / "train" / "ant"):
        (parent / ".DS_Store").touch()
        os.mkfifo(parent / "pipe.png")
    (folder / "README.md").touch()
    (folder / "train" / "bee").rename(tmp_path / "elsewhere")
    (folder / "train" / "bee").symlink_to(tmp_path / "elsewhere")
    grey = import_dataset("mine", folder)
    assert grey.channels == 1

    file = next((folder / "test" / "bee").glob("*.png"))
    Image.open(file).convert("RGB").save(file)
    colour = import_dataset("mine", folder)
    assert colour.channels == 3
    assert len(colour.y_train) == 6
    assert sorted_examples(colour, "train") == sorted_examples({"x_train": grey.x_train.expand(-1, 3, -1, -1)}, "train")


def test_images_of_mixed_sizes_are_resized_where_a_size_is_given(tmp_path):
    folder = write_image_folder(tmp_path / "images", image_arrays((8, 8, 3), 2), ["ant", "bee"])
    wide = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 9, 3), np.uint8))
    wide.save(folder / "train" / "ant" / "wide.png")
    with raises_user_error("wide.png", "its size is (9, 5)", "--size N"):
        imports.import_path("mine", folder)

    imports.import_path("mine", folder, 8)
    resized = np.asarray(wide.resize((8, 8), Image.Resampling.BILINEAR))
    assert (resized.tobytes(),) in sorted_examples(datasets.load("mine"), "train")

    np.savez(tmp_path / "a.npz", **image_arrays((16, 16, 3), 2))
    imports.import_path("mine", tmp_path / "a.npz", 8)
    assert datasets.load("mine").x_test.shape == (4, 3, 8, 8)


def png_chunk(kind, content):
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)


PNG_HEADER = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 8, 0, 0, 0, 0))
PNG_OF_900_MILLION_PIXELS = b"\x89PNG\r\n\x1a\n" + PNG_HEADER + png_chunk(b"IDAT", b"")
CUT_PNG = encode_image(np.random.default_rng(0).integers(0, 256, (4, 4), np.uint8))[:-30]


def add_a_huge_image(folder):
    (folder / "train" / "ant" / "z.png").write_bytes(PNG_OF_900_MILLION_PIXELS)


def add_a_cut_image(folder):
    (folder / "test" / "bee" / "cut.png").write_bytes(CUT_PNG)


def add_folders_within_a_class(folder):
    shutil.copytree(folder / "train", folder / "test" / "ant" / "a")


def add_an_image_of_16_bits(folder):
    Image.new("I;16", (4, 4)).save(folder / "test" / "ant" / "deep.png")


def remove_the_test_images(folder):
    shutil.rmtree(folder / "test")


def add_a_folder_within_a_class_without_splits(folder):
    (folder / "train").rename(folder / "cat")
    (folder / "test" / "ant").rename(folder / "dog")
    shutil.rmtree(folder / "test")


def leave_a_table_only(folder):
    shutil.rmtree(folder)
    write_files(folder, {"0.csv": b"1,2"})


def spell_a_class_otherwise(folder):
    (folder / "test" / "ant").rename(folder / "test" / "Ant")


def spell_a_domain_otherwise(folder):
    for split in SPLITS:
        domain = "Art" if split == "train" else "art"
        (folder / domain).mkdir()
        (folder / split).rename(folder / domain / split)


def compose_a_class_otherwise(folder):
    (folder / "train" / "ant").rename(folder / "train" / "\xe9")
    (folder / "test" / "ant").rename(folder / "test" / "e\u0301")


class BadFolder(NamedTuple):
    spoil: Any  # what makes it bad
    words: tuple[str, ...]  # of the refusal


BAD_FOLDERS = {
    "a huge image": BadFolder(add_a_huge_image, ("z.png", "decompression bomb")),
    "a partial image": BadFolder(add_a_cut_image, ("cut.png", "an image")),
    "too deep": BadFolder(add_folders_within_a_class, ("test/ant/a/ant", "too deep")),
    "mixed depths": BadFolder(
        add_a_folder_within_a_class_without_splits, ("cat/ant/", "a folder within a class", "but 'dog/", "in none")
    ),
    "case of a class": BadFolder(
        spell_a_class_otherwise, ("are of 'ant' and test images of 'Ant'", "spell both alike")
    ),
    "case of a domain": BadFolder(spell_a_domain_otherwise, ("are of 'Art' and test images of 'art'", "spell both")),
    "Unicode of a class": BadFolder(compose_a_class_otherwise, ("'\xe9' is in class_names", "in another Unicode form")),
    "16 bits": BadFolder(add_an_image_of_16_bits, ("deep.png", "8 bits")),
    "no test": BadFolder(remove_the_test_images, ("0 to test on",)),
    "no form": BadFolder(leave_a_table_only, ("0.csv", *file_formats.FILE_FORMATS)),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_bad_folders_are_refused(tmp_path, cache, case):
    bad = BAD_FOLDERS[case]
    folder = write_image_folder(tmp_path / "images", image_arrays((4, 4), 2), ["ant", "bee"])
    bad.spoil(folder)

    with raises_user_error(*bad.words):
        imports.import_path("mine", folder)
    assert not cache.exists()


def office_pictures(domains, classes):
    """For each domain and class some pictures of different sizes, by the names of their files."""
    rng = np.random.default_rng(0)
    pictures = {}
    for domain, name in product(domains, classes):
        shapes = [(*rng.integers(20, 60, 2), 3) for _ in range(rng.integers(5, 16))]
        pictures[domain, name] = [rng.integers(0, 256, shape, np.uint8) for shape in shapes]
    return pictures


def write_office(folder, pictures, inner="", spelling=str):
    for (domain, name), pixels in pictures.items():
        path = folder / spelling(domain) / inner / name
        write_files(path, {f"frame_{number:04}.jpg": encode_image(image) for number, image in enumerate(pixels)})
    return folder


def test_whole_domains_become_a_set_of_one_size(tmp_path):
    """Images are resized and divided by class, and domains get their official names."""
    classes = [f"thing_{number:02}" for number in range(31)]
    pictures = office_pictures(["amazon", "dslr", "webcam"], classes)
    dataset = import_dataset("office31", write_office(tmp_path / "a", pictures, "images"))
    assert dataset.domain_names == ("amazon", "dslr", "webcam")
    assert dataset.class_names == tuple(classes)
    assert dataset.x_train.shape[1:] == (3, 32, 32)
    assert dataset.fingerprint == "1c5609dee62989e3"

    expected = []
    for (domain, name), cell_pictures in pictures.items():
        number = dataset.domain_names.index(domain)
        label = classes.index(name)
        for pixels in cell_pictures:
            resized = Image.fromarray(pixels).resize((32, 32), Image.Resampling.BILINEAR)
            expected.append((np.asarray(resized).tobytes(), label, number))
        in_test = (dataset.y_test == label) & (dataset.domain_test == number)
        assert in_test.sum() == round(len(cell_pictures) / 5)

    train = sorted_examples(dataset, "train", "y", "domain")
    test = sorted_examples(dataset, "test", "y", "domain")
    assert sorted(train + test) == sorted(expected)

    reordered = {cell: sorted(pixels, key=np.size) for cell, pixels in pictures.items()}
    folder = write_office(tmp_path / "b", reordered, spelling=str.title)
    assert_same_dataset(dataset, import_dataset("office31", folder))

    (folder / "Dslr").rename(folder / "z")
    with raises_user_error("the domains are 3", "'office31'", "amazon, dslr"):
        imports.import_path("office31", folder)

    without_domains = write_image_folder(tmp_path / "c", image_arrays((32, 32, 3), 31), classes)
    with raises_user_error("the domains are 0"):
        imports.import_path("office31", without_domains)


def test_undivided_folders_are_divided_and_that_is_said(tmp_path):
    pictures = {}
    for (domain, name), pixels in office_pictures(["one"], ["ant", "bee"]).items():
        pictures[domain, name] = [image[:16, :16] for image in pixels]
    ants = pictures["one", "ant"]
    bees = pictures["one", "bee"]

    _, notes = imports.import_path("mine", write_office(tmp_path / "b", pictures) / "one")
    assert notes == ["a fixed fifth of each class is kept to test on"]

    from_folder = datasets.load("mine")
    assert from_folder.domain_names == ()
    assert from_folder.class_names == ("ant", "bee")
    assert from_folder.y_test.bincount().tolist() == [round(len(ants) / 5), round(len(bees) / 5)]

    pixels = np.concatenate([bees, ants])
    labels = np.repeat([1, 0], [len(bees), len(ants)])
    from_arrays = import_arrays("arrays", tmp_path / "npz", images=pixels, labels=labels, class_names=["ant", "bee"])
    assert_same_dataset(from_folder, from_arrays)


# Images as people see them


def has_image(name, expected):
    """Whether a data set has an image with these pixels to train on."""
    pixels = datasets.load(name).x_train.permute(0, 2, 3, 1).numpy()
    return any(np.array_equal(image, expected) for image in pixels)


def with_transparency(mode):
    """An image whose shape is told by its transparency alone, and the grey one that people see on a white page."""
    alpha = random_pixels(1, (4, 4)) // 255 * 255
    alpha[:2] = 128
    alpha[3, 1:] = 255
    if mode == "P":
        image = Image.fromarray((alpha > 0).astype(np.uint8), "P")
        image.putpalette([255, 0, 0, 0, 0, 0])
        image.info["transparency"] = 0
        return image, np.where(alpha > 0, 0, 255).astype(np.uint8)
    bands = [np.zeros_like(alpha)] * (len(mode) - 1)
    image = Image.merge(mode, [Image.fromarray(band) for band in (*bands, alpha)])
    return image, 255 - alpha


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_places_are_white_and_that_is_said(mode, tmp_path):
    image, seen = with_transparency(mode)
    _, notes = imports.import_path("mine", write_folder_of_one_class(tmp_path / "set", image))
    assert has_image("mine", np.repeat(seen[..., None], 3, 2))
    assert notes == ["the alpha channel was composed over white in 1 of 4 images"]


def test_an_alpha_channel_that_hides_nothing_changes_nothing(tmp_path):
    pixels = random_pixels(1, (4, 4, 3))
    opaque = Image.fromarray(np.concatenate([pixels, np.full((4, 4, 1), 255, np.uint8)], 2))
    _, notes = imports.import_path("mine", write_folder_of_one_class(tmp_path / "set", opaque))
    assert notes == []
    assert has_image("mine", pixels)


@pytest.mark.parametrize("orientation", range(2, 9))
def test_an_image_is_turned_as_its_exif_data_say_and_that_is_said(orientation, tmp_path):
    pixels = random_pixels(1, (4, 4, 3))
    turned = {  # what stands at the top and at the left of the image, by the numbers of the standard
        2: pixels[:, ::-1], 3: pixels[::-1, ::-1], 4: pixels[::-1], 5: pixels.transpose(1, 0, 2),
        6: np.rot90(pixels, -1), 7: pixels[::-1, ::-1].transpose(1, 0, 2), 8: np.rot90(pixels),
    }  # fmt: skip
    image = Image.fromarray(pixels)
    image.getexif()[ExifTags.Base.Orientation] = orientation
    _, notes = imports.import_path("mine", write_folder_of_one_class(tmp_path / "set", image))
    assert has_image("mine", turned[orientation])
    assert notes == ["the EXIF orientation was applied in 1 of 4 images"]


def test_an_orientation_that_means_nothing_is_not_said_to_be_applied(tmp_path):
    pixels = random_pixels(1, (4, 4, 3))
    image = Image.fromarray(pixels)
    image.getexif()[ExifTags.Base.Orientation] = 0
    _, notes = imports.import_path("mine", write_folder_of_one_class(tmp_path / "set", image))
    assert has_image("mine", pixels)
    assert notes == []


def test_files_by_other_suffixes_are_counted_and_all_broken_images_are_named(tmp_path):
    folder = write_folder_of_one_class(tmp_path / "set")
    ants = folder / "train" / "ant"
    (ants / "Thumbs.db").write_bytes(b"no image")
    (ants / "labels.csv").write_bytes(b"no image")
    _, notes = imports.import_path("mine", folder)
    assert notes == ["left out: 2 files that are no images by their suffix"]
    assert len(datasets.load("mine").y_train) == 2

    first_frame = Image.fromarray(random_pixels(0, (4, 4)))
    second_frame = Image.fromarray(random_pixels(1, (4, 4)))
    first_frame.save(ants / "moves.gif", save_all=True, append_images=[second_frame])
    (ants / "cut.png").write_bytes(CUT_PNG)
    (ants / "empty.jpg").write_bytes(b"")
    words = ("3 of 6 images", "cut.png", "empty.jpg", "moves.gif' (it has 2 frames)", "an image of 8 bits")
    with raises_user_error(*words):
        imports.import_path("mine", folder)

    for number in range(30):
        (ants / f"{number}.png").write_bytes(b"")
    with raises_user_error("33 of 36 images", " and 13 more"):
        imports.import_path("mine", folder)


def test_images_without_a_class_are_counted_and_dangling_links_are_named(tmp_path):
    folder = write_image_folder(tmp_path / "set", image_arrays((4, 4), 2), ["ant", "bee"])
    for number in range(7):
        write_files(folder, {f"test/{number}.png": encode_image(random_pixels(number, (4, 4)))})
    _, notes = imports.import_path("mine", folder)
    assert notes == ["left out: 7 images in no folder of a class"]
    assert len(datasets.load("mine").y_test) == 4

    (folder / "train" / "ant" / "gone.png").symlink_to(tmp_path / "gone.png")
    for start in (lambda: imports.import_path("mine", folder), lambda: imports.import_if_path(str(folder))):
        with raises_user_error("1 of 11 images cannot be read", "train/ant/gone.png", "No such file"):
            start()


def test_no_other_program_is_started_for_an_image(tmp_path, monkeypatch):
    """For an EPS Pillow starts Ghostscript, whatever the file is called."""
    folder = write_folder_of_one_class(tmp_path / "set")
    Image.fromarray(random_pixels(0, (4, 4, 3))).save(folder / "train" / "ant" / "0.png", "EPS")
    started = Mock(side_effect=OSError("started"))
    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", started)
    with raises_user_error("1 of 4 images", "0.png", "cannot identify image file"):
        imports.import_path("mine", folder)
    assert not started.called


def test_a_size_that_no_memory_holds_is_refused_before_any_work(tmp_path, monkeypatch):
    resize = Mock(side_effect=AssertionError("has begun"))
    monkeypatch.setattr(Image.Image, "resize", resize)
    monkeypatch.setattr(imports, "resize_rows", resize)
    np.savez(tmp_path / "a.npz", **image_arrays((4, 4), 2))
    for path in (write_folder_of_one_class(tmp_path / "set"), tmp_path / "a.npz"):
        with raises_user_error("bytes, more than 4 GiB"):
            imports.import_path("mine", path, 100_000)


def test_images_in_no_part_are_left_out_in_words():
    notes = []
    assert choose_splits({"", "train", "test", "val"}, notes) == ["train", "test"]
    assert notes == ["left out: what is in no part, val"]
