"""Tiny files in every form that is read: the official ones, image folders, archives of them, and downloads."""

import bz2
import gzip
import hashlib
import io
import json
import os
import pickle
import shutil
import string
import struct
import subprocess
import tarfile
import zipfile
import zlib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from unittest.mock import Mock

import numpy as np
import pytest
import scipy.io
from PIL import EpsImagePlugin, ExifTags, Image

from fedcli.data import datasets, files, forms
from fedcli.data.catalog import KNOWN
from fedcli.data.files import PARTS
from fedcli.vision import torchvision
from tests.files import assert_same, examples, from_npz, images, imported, known_images, refused, write_folder


def write_files(folder, contents):
    """A folder with these contents by path."""
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def write_zip(path, contents):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return path


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


def each(arrays):
    """Part, number in it, pixels and label of each image."""
    for part in PARTS:
        for number, (image, label) in enumerate(zip(arrays[f"x_{part}"], arrays[f"y_{part}"], strict=True)):
            yield part, number, image, label


def encoded(pixels, format="PNG"):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format)
    return file.getvalue()


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.astype(np.uint8).tobytes()


def mnist_files(arrays, name):
    contents = {}
    for part, word in zip(PARTS, ("train", "t10k"), strict=True):
        contents[f"{word}-images-idx3-ubyte.gz"] = gzip.compress(idx(arrays[f"x_{part}"]))
        contents[f"{word}-labels-idx1-ubyte.gz"] = gzip.compress(idx(arrays[f"y_{part}"]))
    return contents


def emnist_files(arrays, name):
    split, contents = KNOWN[name].split, {"gzip/emnist-mnist-train-images-idx3-ubyte.gz": gzip.compress(b"?")}
    for part in PARTS:
        lying, labels = arrays[f"x_{part}"].transpose(0, 2, 1), arrays[f"y_{part}"] + (split == "letters")
        for kind, values in (("images-idx3", lying), ("labels-idx1", labels)):
            contents[f"gzip/emnist-{split}-{part}-{kind}-ubyte.gz"] = gzip.compress(idx(values))
    return contents


def cifar_files(arrays, name):
    source, label = getattr(torchvision().datasets, name.upper()), "fine_labels" if name == "cifar100" else "labels"
    contents = {source.meta["filename"]: {source.meta["key"]: list(arrays.get("class_names", KNOWN[name].class_names))}}
    for part, batches in (("train", source.train_list), ("test", source.test_list)):
        for number, (file, _) in enumerate(batches):
            x, y = (arrays[f"{kind}_{part}"][number :: len(batches)] for kind in "xy")
            contents[file] = {"data": x.transpose(0, 3, 1, 2).reshape(-1, 3072), label: y.tolist()}
    return {f"{source.base_folder}/{file}": pickle.dumps(content, 2) for file, content in contents.items()}


def matlab_files(arrays, name):
    contents = {}
    for part in PARTS:
        file, labels = io.BytesIO(), np.where(arrays[f"y_{part}"] == 0, 10, arrays[f"y_{part}"]).astype(np.uint8)
        scipy.io.savemat(file, {"X": arrays[f"x_{part}"].transpose(1, 2, 3, 0), "y": labels[:, None]})
        contents[f"{'' if name == 'svhn' else 'synth_'}{part}_32x32.mat"] = file.getvalue()
    return contents


def usps_files(arrays, name):
    lines = {part: [] for part in PARTS}
    for part, _, image, label in each(arrays):
        values = (image.ravel() + 0.5) / 255 * 2 - 1  # half a step up, as torchvision rounds down
        lines[part].append(f"{label + 1} " + " ".join(f"{i + 1}:{value:.6f}" for i, value in enumerate(values)))
    names = {"train": "usps.bz2", "test": "usps.t.bz2"}
    return {names[part]: bz2.compress(("\n".join(lines[part]) + "\n").encode()) for part in PARTS}


def cinic_files(arrays, name):
    contents = {"README.md": b"CINIC-10", "imagenet-contributors.csv": b"synset,image\n"}
    for part, i, image, label in each(arrays):
        contents[f"{part}/{KNOWN[name].class_names[label]}/n02690373_{i}.png"] = encoded(image)
        contents[f"valid/{KNOWN[name].class_names[label]}/cifar10-train-{i}.png"] = encoded(255 - image)
    return contents


def tiny_files(arrays, name):
    contents = {"wnids.txt": b"n00000000\n", "val/val_annotations.txt": b""}
    for part, i, image, label in each(arrays):
        folder = f"train/n{label:08}" if part == "train" else "val"
        contents[f"{folder}/images/{i}.JPEG"] = contents[f"test/images/{i}.JPEG"] = encoded(image)
        contents[f"{folder}/n{label:08}_boxes.txt"] = b"0\t0\t63\t63\n"
        if part == "test":
            contents["val/val_annotations.txt"] += f"{i}.JPEG\tn{label:08}\t0\t32\t44\t62\n".encode()
    return contents


def mnist_m_files(arrays, name="mnist-m"):
    contents = {f"mnist_m_{part}_labels.txt": b"" for part in PARTS}
    for part, i, image, label in each(arrays):
        contents[f"mnist_m_{part}/{i:08}.png"] = encoded(image)
        contents[f"mnist_m_{part}_labels.txt"] += f"{i:08}.png {label}\n".encode()
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
        arrays |= {f"x_{part}": np.minimum(arrays[f"x_{part}"], 254) for part in PARTS}
    contents = FILES[name](arrays, name)
    if name.startswith("cifar"):
        source = getattr(torchvision().datasets, name.upper())
        sums = {file.partition("/")[2]: md5(content) for file, content in contents.items()}
        for field in ("train_list", "test_list"):
            monkeypatch.setattr(source, field, [[file, sums[file]] for file, _ in getattr(source, field)])
        monkeypatch.setattr(source, "meta", source.meta | {"md5": sums[source.meta["filename"]]})
    return contents, arrays


@pytest.mark.parametrize("name", FILES)
def test_official_files_are_read_in_folders_and_archives(name, tmp_path, monkeypatch):
    contents, arrays = official_files(name, monkeypatch)
    expected = from_npz(name, tmp_path / "npz", **arrays)
    folder = write_files(tmp_path / "folder", contents)
    for path in (
        folder,
        write_zip(tmp_path / "set.zip", contents),
        write_tar(tmp_path / "set.tgz", contents, "./one/folder/more/"),
    ):
        assert_same(expected, imported(name, path))
    (parent,) = {file.parent for file in folder.rglob("*") if file.is_file()} if name not in DEEP else (folder,)
    monkeypatch.chdir(parent.rename(tmp_path / "called otherwise"))
    assert_same(expected, imported(name, "."))


DEEP = ("cinic10", "tiny-imagenet", "mnist-m")


def test_unpacked_and_differently_compressed_files_of_mnist_are_read(tmp_path):
    arrays = known_images("mnist")
    expected, contents = from_npz("mnist", tmp_path / "npz", **arrays), mnist_files(arrays, "mnist")
    raw = {name.removesuffix(".gz"): gzip.decompress(content) for name, content in contents.items()}
    kaggle = {name.replace("-idx", ".idx"): content for name, content in raw.items()}
    again = {name: gzip.compress(raw[name.removesuffix(".gz")], 1) for name in contents}
    for number, names in enumerate((raw, kaggle, again, {**raw, **contents})):
        assert_same(expected, imported("mnist", write_files(tmp_path / str(number) / "MNIST" / "raw", names)))
    arrays = {key: np.minimum(values, 254) for key, values in known_images("usps").items()}
    raw_usps = {name[:-4]: bz2.decompress(content) for name, content in usps_files(arrays, "usps").items()}
    expected = from_npz("usps", tmp_path / "npz", **arrays)
    assert_same(expected, imported("usps", write_files(tmp_path / "usps", raw_usps)))
    write_files(tmp_path / "0" / "FashionMNIST" / "raw", raw)
    refused(lambda: datasets.import_path("mnist", tmp_path / "0"), "several data sets", "FashionMNIST/raw, MNIST/raw")


# Downloads


@pytest.fixture
def site(tmp_path):
    """A folder that a server gives, and its address."""
    (tmp_path / "site").mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path / "site")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever).start()
        yield tmp_path / "site", f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def serve(name, contents, folder, address, monkeypatch):
    """Has the site give the files of a set, and torchvision ask it for them."""
    source = getattr(torchvision().datasets, KNOWN[name].source or "", None)
    if name in ("mnist", "svhn"):
        write_files(folder, contents)
        entries = [[address + file, file, md5(content)] for file, content in contents.items()]
        monkeypatch.setattr(source, "split_list", dict(zip(PARTS, entries, strict=False)), raising=False)
        monkeypatch.setattr(source, "resources", [entry[1:] for entry in entries], raising=False)
        monkeypatch.setattr(source, "mirrors", [f"{address}nowhere/", address], raising=False)
        return
    if name == "emnist-letters":
        monkeypatch.setattr(source, "url", f"{address}gzip.zip")
        monkeypatch.setattr(source, "md5", md5(write_zip(folder / "gzip.zip", contents).read_bytes()))
    else:
        total = md5(write_tar(folder / "a.tar.gz", contents).read_bytes())
        monkeypatch.setitem(KNOWN, name, KNOWN[name]._replace(source=f"{address}a.tar.gz", md5=total))


@pytest.mark.parametrize("name", ["mnist", "emnist-letters", "svhn", "cinic10"])
def test_downloads_are_checked_and_read(name, tmp_path, cache, site, monkeypatch):
    contents, arrays = official_files(name, monkeypatch)
    expected = from_npz(name, tmp_path / "npz", **arrays)
    (cache / f"{name}.npz").unlink()
    serve(name, contents, *site, monkeypatch)
    file = max(site[0].iterdir(), key=lambda path: path.stat().st_size)
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    refused(lambda: datasets.download(name), f"'{name}' could not be downloaded", "corrupted", f"import {name} PATH")
    file.unlink()
    refused(lambda: datasets.download(name), f"'{name}' could not be downloaded", "HTTP Error 404")
    assert not list(cache.iterdir())
    file.write_bytes(whole)
    assert datasets.download(name) == cache / f"{name}.npz"
    assert_same(expected, datasets.load(name))
    file.unlink()
    assert datasets.download(name) == cache / f"{name}.npz"  # it is there


# FEMNIST, whose writers are held out


def leaf_files(num_writers=20, per_file=8, first=0):
    """LEAF's files by name, and of each writer images and labels."""
    rng, written, contents = np.random.default_rng(first), {}, {}
    for position, number in enumerate(rng.permutation(num_writers)):
        count, user = rng.integers(1, 9), f"f{first + number:04}_{number % 50:02}"
        x, y = written[user] = rng.integers(0, 256, (count, 28, 28), np.uint8), rng.integers(0, 62, count)
        content = contents.setdefault(f"all_data_{position // per_file}.json", {"users": [], "user_data": {}})
        content["users"].append(user)
        content["user_data"][user] = {"x": (x.reshape(-1, 784) / 255).tolist(), "y": y.tolist()}
    return {name: json.dumps(content).encode() for name, content in contents.items()}, written


def by_writer(dataset, part):
    """The images, with labels, of each writer's number."""
    writers = {}
    for pixels, label, writer in examples(dataset, part, "y", "writer"):
        writers.setdefault(writer, []).append((pixels, label))
    return writers


def test_femnist_holds_writers_out(tmp_path, monkeypatch):
    contents, written = leaf_files()
    dataset = imported("femnist", write_files(tmp_path / "all_data", contents))
    assert dataset.class_names == (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)
    assert dataset.fingerprint == "53bf9db4fce3e4f2"  # the tenth is a fixed one
    assert (dataset.writer_train[dataset.place_train.argsort()].diff() >= 0).all()  # positions go by writer
    train, test = by_writer(dataset, "train"), by_writer(dataset, "test")
    assert len(test) == 2
    assert not set(train) & set(test)
    for number, name in enumerate(sorted(written)):
        x, y = written[name]
        assert {**train, **test}[number] == examples({"x_train": x, "y_train": y}, "train", "y")
    renamed = {f"all_data/all_data_{9 - number}.json": content for number, content in enumerate(contents.values())}
    other = {"sampled_data/all_data_1_niid.json": contents["all_data_0.json"]}
    again = {"old/all_data/all_data_0.json": contents["all_data_0.json"]}  # whose writers count once
    _, notes = datasets.import_path("femnist", write_files(tmp_path / "data", renamed | other | again))
    assert_same(dataset, datasets.load("femnist"))
    assert notes[0] == "left out: sampled_data"
    monkeypatch.setattr(files, "MAX_GIB", sum(map(len, contents.values())) / 2**32)  # of the images, not of their text
    for write in (write_zip, write_tar):
        assert_same(dataset, imported("femnist", write(tmp_path / write.__name__, contents)))
        hollow = write(tmp_path / f"hollow {write.__name__}", {"all_data_0.json": b" " * 10**7})
        refused(lambda hollow=hollow: datasets.import_path("femnist", hollow), hollow, "2,000,000 bytes, more than")
    monkeypatch.setattr(files, "MAX_GIB", (784 * (len(dataset.y_train) + len(dataset.y_test)) - 1) / 2**30)
    refused(lambda: datasets.import_path("femnist", tmp_path / "all_data"), "more than", "MAX_GIB=1")


def test_a_split_that_leaf_has_made_is_taken(tmp_path):
    train, (test, of_test) = leaf_files()[0], leaf_files(6, first=100)
    contents = {f"train/{name}": content for name, content in train.items()}
    contents |= {f"{folder}/{name}": content for name, content in test.items() for folder in ("test", "all_data")}
    _, notes = datasets.import_path("femnist", write_files(tmp_path / "data", contents))
    dataset = datasets.load("femnist")
    assert (len(by_writer(dataset, "train")), len(by_writer(dataset, "test"))) == (20, 6)
    assert len(dataset.y_test) == sum(len(y) for _, y in of_test.values())
    assert notes == ["left out: all_data", "without training images: 5, 7, 17, 23, 36 and 7 more"]


# Files that are wrong


def leaf(change):
    """A file of LEAF's whose content was changed."""
    content = json.loads(next(iter(leaf_files(4, 4)[0].values())))
    change(content)
    return {"all_data_0.json": json.dumps(content).encode()}


def without(contents, name):
    return {file: content for file, content in contents.items() if not file.endswith(name)}


SYNTH = matlab_files(known_images("synth-digits"), "synth-digits")
LISTED = mnist_m_files(known_images("mnist-m"))
MNIST = mnist_files(known_images("mnist"), "mnist")
BAD_FILES = {
    "no numbers": ("femnist", leaf(lambda c: c["user_data"][c["users"][0]]["x"][0].__setitem__(3, np.nan)), "0 to 1"),
    "bytes": ("femnist", leaf(lambda c: c["user_data"][c["users"][0]]["x"][0].__setitem__(3, 128)), "from 0 to 1"),
    "class 62": ("femnist", leaf(lambda c: c["user_data"][c["users"][0]]["y"].__setitem__(0, 62)), "0 to 61"),
    "labels missing": ("femnist", leaf(lambda c: c["user_data"][c["users"][0]]["y"].append(1)), "a label"),
    "one writer": ("femnist", leaf_files(1)[0], "0 images are to train"),
    "an image missing": ("tiny-imagenet", without(tiny_files(images((4, 4), 9), ""), "val/images/7.JPEG"), "7.JPEG"),
    "an image not listed": ("mnist-m", LISTED | {"mnist_m_test/9.png": encoded(np.eye(9) > 0)}, "do not fit", "9.png"),
    "a cut file": ("synth-digits", SYNTH | {"synth_test_32x32.mat": b"MATLAB 5.0"}, "synth_test", "cannot be read"),
    "no test": ("synth-digits", without(SYNTH, "test_32x32.mat"), "no array x_test"),
    "a cut gzip": ("mnist", {**MNIST, **{k: v[:-9] for k, v in MNIST.items() if "t10k-i" in k}}, "t10k-images"),
    "too large": ("mnist", MNIST | {"train-images-idx3-ubyte": b"\0\0\x08\3" + b"\0\1\0\0" * 3}, "than 4 GiB"),
    "more than said": ("mnist", MNIST | {"train-labels-idx1-ubyte": b"\0\0\x08\1\0\0\0\1" + bytes(9)}, "of size 2 "),
    "a batch changed": ("cifar10", lambda: cifar_files(known_images("cifar10"), "cifar10"), ".meta", "corrupted"),
    "nothing": ("mnist", {".hidden": b""}, "it is empty", "image folders"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused(tmp_path, cache, case):
    name, contents, *words = BAD_FILES[case]
    contents = contents() if callable(contents) else contents
    refused(lambda: datasets.import_path(name, write_files(tmp_path / "files", contents)), *words)
    assert not cache.exists()


def test_archives_that_are_damaged_or_lead_astray_are_refused(tmp_path, cache, monkeypatch):
    contents = cinic_files(known_images("cinic10"), "cinic10")
    paths = [write_tar(tmp_path / "a.tar.gz", contents), write_zip(tmp_path / "a.zip", contents)]
    for path in paths:
        path.write_bytes(path.read_bytes()[:-5000])
    flipped = write_tar(tmp_path / "b.tar.gz", contents)
    content = bytearray(flipped.read_bytes())
    content[-6] ^= 1  # in the checksum at the end
    flipped.write_bytes(content)
    (tmp_path / "flowers.parquet").write_bytes(b"hello")
    outside = write_tar(tmp_path / "c.tar.gz", contents, "../")
    linked = write_tar(tmp_path / "d.tar.gz", contents, type=tarfile.SYMTYPE, linkname="/etc/passwd")
    for path in (*paths, flipped, tmp_path / "flowers.parquet", outside, linked):
        refused(lambda path=path: datasets.import_path("cinic10", path), path, "cannot be read", ".zip or", "LEAF's")
    monkeypatch.setenv("FEDCLI_MAX_GIB", "1e-5")
    for path in (write_zip(paths[1], contents), write_tar(paths[0], contents), write_files(tmp_path / "f", contents)):
        refused(lambda path=path: datasets.import_path("cinic10", path), path, "more than", "MAX_GIB=1")
    assert not cache.exists()
    monkeypatch.setenv("FEDCLI_MAX_GIB", "1")
    assert datasets.import_path("cinic10", path)[0].is_file()


# Image folders


def test_domains_come_from_npz_and_folders_alike(tmp_path):
    arrays = images((4, 4), 2, per_class=(6, 4))
    arrays |= {"domain_train": np.tile([1, 0], 6), "domain_test": np.tile([1, 0], 4)}
    arrays |= {f"y_{part}": np.repeat([0, 1], count) for part, count in (("train", 6), ("test", 4))}
    arrays["x_train"][1] = arrays["x_train"][0]  # the same picture in two domains
    npz = from_npz("offices", tmp_path / "a", **arrays, class_names=["bag", "cup"], domain_names=["amazon", "webcam"])
    folder = write_folder(tmp_path / "b", arrays, ["bag", "cup"], ["amazon", "webcam"])
    assert_same(npz, imported("offices", folder))
    assert npz.domain_train.bincount().tolist() == [6, 6]
    assert from_npz("offices", tmp_path / "c", **arrays).domain_names == ("0", "1")


def test_folders_may_hold_hidden_files_links_and_mixed_colours(tmp_path):
    arrays = images((4, 4), 2)
    folder = write_folder(tmp_path / "images", arrays, ["ant", "bee"])
    for place in (folder, folder / "train" / "ant"):
        (place / ".DS_Store").touch()
        os.mkfifo(place / "pipe.png")
    (folder / "README.md").touch()
    (folder / "train" / "bee").rename(tmp_path / "elsewhere")
    (folder / "train" / "bee").symlink_to(tmp_path / "elsewhere")
    grey = imported("mine", folder)
    file = next((folder / "test" / "bee").glob("*.png"))
    Image.open(file).convert("RGB").save(file)
    colour = imported("mine", folder)
    assert (grey.channels, colour.channels, len(colour.y_train)) == (1, 3, 6)
    assert examples(colour, "train") == examples({"x_train": grey.x_train.expand(-1, 3, -1, -1)}, "train")


def test_images_of_mixed_sizes_are_resized_where_a_size_is_given(tmp_path):
    folder = write_folder(tmp_path / "images", images((8, 8, 3), 2), ["ant", "bee"])
    wide = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 9, 3), np.uint8))
    wide.save(folder / "train" / "ant" / "wide.png")
    refused(lambda: datasets.import_path("mine", folder), "wide.png", "its size is (9, 5)", "--size N")
    datasets.import_path("mine", folder, 8)
    pixels = np.asarray(wide.resize((8, 8), Image.Resampling.BILINEAR)).tobytes()
    assert pixels in {image for (image,) in examples(datasets.load("mine"), "train")}
    np.savez(tmp_path / "a.npz", **images((16, 16, 3), 2))
    datasets.import_path("mine", tmp_path / "a.npz", 8)
    assert datasets.load("mine").x_test.shape == (4, 3, 8, 8)


BOMB = b"\x89PNG\r\n\x1a\n"  # 900 million pixels
for chunk in (b"IHDR" + struct.pack(">IIBBBBB", 30_000, 30_000, 8, 0, 0, 0, 0), b"IDAT"):
    BOMB += struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
CUT = encoded(np.random.default_rng(0).integers(0, 256, (4, 4), np.uint8))[:-30]
BAD_FOLDERS = {
    "a huge image": (lambda f: (f / "train" / "ant" / "z.png").write_bytes(BOMB), "z.png", "decompression bomb"),
    "a partial image": (lambda f: (f / "test" / "bee" / "cut.png").write_bytes(CUT), "cut.png", "an image"),
    "too deep": (lambda f: shutil.copytree(f / "train", f / "test" / "ant" / "a"), "test/ant/a/ant", "too deep"),
    "16 bits": (lambda f: Image.new("I;16", (4, 4)).save(f / "test" / "ant" / "deep.png"), "deep.png", "8 bits"),
    "no test": (lambda f: shutil.rmtree(f / "test"), "0 to test on"),
    "no form": (lambda f: [shutil.rmtree(f), write_files(f, {"0.csv": b"1,2"})], "0.csv", *forms.FORMS),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_bad_folders_are_refused(tmp_path, cache, case):
    spoil, *words = BAD_FOLDERS[case]
    folder = write_folder(tmp_path / "images", images((4, 4), 2), ["ant", "bee"])
    spoil(folder)
    refused(lambda: datasets.import_path("mine", folder), *words)
    assert not cache.exists()


def office_pictures(domains, classes):
    """For each domain and class some pictures of different sizes, by the names of their files."""
    rng, pictures = np.random.default_rng(0), {}
    for domain in domains:
        for name in classes:
            shapes = [(*rng.integers(20, 60, 2), 3) for _ in range(rng.integers(5, 16))]
            pictures[domain, name] = [rng.integers(0, 256, shape, np.uint8) for shape in shapes]
    return pictures


def write_office(folder, pictures, inner="", spelling=str):
    for (domain, name), pixels in pictures.items():
        path = folder / spelling(domain) / inner / name
        write_files(path, {f"frame_{i:04}.jpg": encoded(x) for i, x in enumerate(pixels)})
    return folder


def test_whole_domains_are_resized_divided_by_class_and_get_their_official_names(tmp_path):
    classes = [f"thing_{number:02}" for number in range(31)]
    pictures = office_pictures(["amazon", "dslr", "webcam"], classes)
    dataset = imported("office31", write_office(tmp_path / "a", pictures, "images"))
    assert (dataset.domain_names, dataset.class_names) == (("amazon", "dslr", "webcam"), tuple(classes))
    assert (dataset.x_train.shape[1:], dataset.fingerprint) == ((3, 32, 32), "1c5609dee62989e3")
    expected = []
    for (domain, name), pixels in pictures.items():
        number, label = dataset.domain_names.index(domain), classes.index(name)
        expected += [(np.asarray(Image.fromarray(x).resize((32, 32), 2)).tobytes(), label, number) for x in pixels]
        cell = (dataset.y_test == label) & (dataset.domain_test == number)
        assert cell.sum() == round(len(pixels) / 5)
    assert sorted(row for part in PARTS for row in examples(dataset, part, "y", "domain")) == sorted(expected)
    reordered = {cell: sorted(pixels, key=np.size) for cell, pixels in pictures.items()}
    assert_same(dataset, imported("office31", write_office(tmp_path / "b", reordered, spelling=str.title)))
    (tmp_path / "b" / "Dslr").rename(tmp_path / "b" / "z")
    refused(lambda: datasets.import_path("office31", tmp_path / "b"), "the domains are 3", "'office31'", "amazon, dslr")
    single = write_folder(tmp_path / "c", images((32, 32, 3), 31), classes)
    refused(lambda: datasets.import_path("office31", single), "the domains are 0")


def test_undivided_folders_are_divided_and_that_is_said(tmp_path):
    pictures = {cell: [x[:16, :16] for x in pixels] for cell, pixels in office_pictures("l", ["ant", "bee"]).items()}
    folder = write_office(tmp_path / "b", pictures) / "l"
    assert datasets.import_path("mine", folder)[1] == ["a fixed fifth of each class is kept to test on"]
    alone = datasets.load("mine")
    assert (alone.domain_names, alone.class_names) == ((), ("ant", "bee"))
    assert alone.y_test.bincount().tolist() == [round(len(pictures["l", name]) / 5) for name in alone.class_names]
    x = np.concatenate([pictures["l", "bee"], pictures["l", "ant"]])
    y = np.repeat([1, 0], [len(pictures["l", name]) for name in ("bee", "ant")])
    assert_same(alone, from_npz("arrays", tmp_path / "npz", images=x, labels=y, class_names=["ant", "bee"]))


# Images as people see them


def picture(seed=0, shape=(6, 4, 3)):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def folder_of(path, *images):
    """A folder whose images, of one class in two parts, are these and others."""
    for number in range(3):
        place = path / ("test" if number == 2 else "train") / "ant"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(number + 9, (4, 4, 3))).save(place / f"plain{number}.png")
    for number, image in enumerate(images):
        image.save(path / "train" / "ant" / f"{number}.png", exif=image.getexif())
    return path


def first_pixels(name, expected):
    """Whether a data set has an image with these pixels."""
    x = datasets.load(name).x_train.permute(0, 2, 3, 1).numpy()
    return any(np.array_equal(image, expected) for image in x)


def with_transparency(mode):
    """An image whose shape is told by its transparency alone, and the grey one that people see on a white page."""
    alpha = picture(1, (4, 4)) // 255 * 255
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
    notes = datasets.import_path("mine", folder_of(tmp_path / "set", image))[1]
    assert first_pixels("mine", np.repeat(seen[..., None], 3, 2))
    assert notes == ["the alpha channel was composed over white in 1 of 4 images"]


def test_an_alpha_channel_that_hides_nothing_changes_nothing(tmp_path):
    pixels = picture(1, (4, 4, 3))
    opaque = Image.fromarray(np.concatenate([pixels, np.full((4, 4, 1), 255, np.uint8)], 2))
    assert datasets.import_path("mine", folder_of(tmp_path / "set", opaque))[1] == []
    assert first_pixels("mine", pixels)


@pytest.mark.parametrize("orientation", range(2, 9))
def test_an_image_is_turned_as_its_exif_data_say_and_that_is_said(orientation, tmp_path):
    pixels = picture(1, (4, 4, 3))
    turned = {  # what stands at the top and at the left of the image, by the numbers of the standard
        2: pixels[:, ::-1], 3: pixels[::-1, ::-1], 4: pixels[::-1], 5: pixels.transpose(1, 0, 2),
        6: np.rot90(pixels, -1), 7: pixels[::-1, ::-1].transpose(1, 0, 2), 8: np.rot90(pixels),
    }  # fmt: skip
    image = Image.fromarray(pixels)
    image.getexif()[ExifTags.Base.Orientation] = orientation
    notes = datasets.import_path("mine", folder_of(tmp_path / "set", image))[1]
    assert first_pixels("mine", turned[orientation])
    assert notes == ["the EXIF orientation was applied in 1 of 4 images"]


def test_files_by_other_suffixes_are_counted_and_all_broken_images_are_named(tmp_path):
    folder = folder_of(tmp_path / "set")
    for name in ("Thumbs.db", "labels.csv"):
        (folder / "train" / "ant" / name).write_bytes(b"no image")
    assert datasets.import_path("mine", folder)[1] == ["left out: 2 files that are no images by their suffix"]
    assert len(datasets.load("mine").y_train) == 2
    frames = [Image.fromarray(picture(seed, (4, 4))) for seed in range(2)]
    frames[0].save(folder / "train" / "ant" / "moves.gif", save_all=True, append_images=frames[1:])
    for name in ("cut.png", "empty.jpg"):
        (folder / "train" / "ant" / name).write_bytes(CUT if name == "cut.png" else b"")
    words = "3 of 6 images", "cut.png", "empty.jpg", "moves.gif' (it has 2 frames)", "an image of 8 bits"
    refused(lambda: datasets.import_path("mine", folder), *words)
    for number in range(30):
        (folder / "train" / "ant" / f"{number}.png").write_bytes(b"")
    refused(lambda: datasets.import_path("mine", folder), "33 of 36 images", " and 13 more")


def test_no_other_program_is_started_for_an_image(tmp_path, monkeypatch):
    """For an EPS Pillow starts Ghostscript, whatever the file is called."""
    folder = folder_of(tmp_path / "set")
    Image.fromarray(picture(0, (4, 4, 3))).save(folder / "train" / "ant" / "0.png", "EPS")
    started = Mock(side_effect=OSError("started"))
    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", started)
    refused(lambda: datasets.import_path("mine", folder), "1 of 4 images", "0.png", "cannot identify image file")
    assert not started.called


def test_a_size_that_no_memory_holds_is_refused_before_any_work(tmp_path, monkeypatch):
    resize = Mock(side_effect=AssertionError("has begun"))
    monkeypatch.setattr(Image.Image, "resize", resize)
    monkeypatch.setattr(datasets, "resized", resize)
    np.savez(tmp_path / "a.npz", **images((4, 4), 2))
    for path in (folder_of(tmp_path / "set"), tmp_path / "a.npz"):
        refused(lambda path=path: datasets.import_path("mine", path, 100_000), "bytes, more than 4 GiB")
