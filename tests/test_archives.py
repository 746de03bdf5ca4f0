"""Tiny files in the layouts that torchvision does not read: archives, folders and whole domains."""

import hashlib
import io
import json
import shutil
import string
import tarfile
import zipfile

import numpy as np
import pytest
import scipy.io
from PIL import Image

from fedcli.data import archives as official
from fedcli.data import datasets
from fedcli.data.files import PARTS
from tests.files import assert_same, examples, from_npz, images, imported, known_images, refused, write_folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("FEDCLI_DATA", str(folder))
    return folder


def encoded(pixels, format="PNG"):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format)
    return file.getvalue()


def pixels_of(content):
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def write_files(folder, files):
    """A folder with these contents by path."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def write_zip(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def write_tar(path, files, prefix="./"):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(prefix + name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def make_official(name, path, monkeypatch):
    """Has the archive at `path` taken for the true one, also for a download."""
    content = hashlib.md5(path.read_bytes()).hexdigest()
    changed = official.ARCHIVES[name]._replace(md5=content, urls=(path.as_uri(),))
    monkeypatch.setitem(official.ARCHIVES, name, changed)


# CINIC-10


def cinic_files(arrays):
    files = {"README.md": b"CINIC-10", "imagenet-contributors.csv": b"synset,image\n"}
    names = datasets.KNOWN["cinic10"].class_names
    for part in PARTS:
        for i, (image, label) in enumerate(zip(arrays[f"x_{part}"], arrays[f"y_{part}"], strict=True)):
            files[f"{part}/{names[label]}/n02690373_{i}.png"] = encoded(image)
            files[f"valid/{names[label]}/cifar10-train-{i}.png"] = encoded(255 - image)
    return files


def test_cinic10_leaves_its_validation_split_out(tmp_path, cache, monkeypatch):
    arrays = known_images("cinic10")
    expected, files = from_npz("cinic10", tmp_path / "npz", **arrays), cinic_files(arrays)
    archive = write_tar(tmp_path / "CINIC-10.tar.gz", files)
    refused(lambda: datasets.import_path("cinic10", archive), "CINIC-10.tar.gz", "MD5", "get it again from https")
    make_official("cinic10", archive, monkeypatch)
    assert_same(expected, imported("cinic10", archive))
    assert_same(expected, imported("cinic10", write_files(tmp_path / "unpacked", files)))
    assert_same(expected, imported("cinic10", archive.rename(tmp_path / "other.tgz")))
    (cache / "cinic10.npz").unlink()
    (tmp_path / "other.tgz").rename(archive)
    datasets.download("cinic10")
    assert_same(expected, datasets.load("cinic10"))
    assert datasets.describe("cinic10")["train"] == 30
    monkeypatch.setitem(official.SHA256, official.ARCHIVES["cinic10"].md5, "0" * 64)
    refused(lambda: datasets.import_path("cinic10", archive), "got SHA256", f"must have {'0' * 64}")


def test_an_archive_without_the_images_is_refused(tmp_path, cache, monkeypatch):
    archive = write_tar(tmp_path / "CINIC-10.tar.gz", {"valid/cat/a.png": encoded(np.zeros((32, 32, 3), np.uint8))})
    make_official("cinic10", archive, monkeypatch)
    refused(lambda: datasets.import_path("cinic10", archive), "got none to train", "train/<class>/*.png")
    write_tar(archive, cinic_files(known_images("cinic10")))
    archive.write_bytes(archive.read_bytes()[:-5000])
    make_official("cinic10", archive, monkeypatch)
    refused(lambda: datasets.import_path("cinic10", archive), "cannot be read", "official archive")
    assert not cache.exists()


# Tiny-ImageNet


def tiny_files(num_classes=200, size=64):
    """The files, and for each part pixels and class of its images."""
    rng, files, expected = np.random.default_rng(0), {}, {part: [] for part in PARTS}
    names = [f"n{1443537 + 7919 * number:08}" for number in rng.permutation(num_classes)]
    lines = []
    for number, name in enumerate(names):
        contents = [encoded(rng.integers(0, 256, (size, size, 3), np.uint8), "JPEG") for _ in range(3)]
        if number == 5:  # some are grey
            contents[0] = encoded(rng.integers(0, 256, (size, size), np.uint8), "JPEG")
        for i, content in enumerate(contents[:2]):
            files[f"train/{name}/images/{name}_{i}.JPEG"] = content
            expected["train"].append((pixels_of(content).tobytes(), name))
        files[f"train/{name}/{name}_boxes.txt"] = b"0\t0\t63\t63\n"
        files[f"val/images/val_{number}.JPEG"] = contents[2]
        expected["test"].append((pixels_of(contents[2]).tobytes(), name))
        lines.append(f"val_{number}.JPEG\t{name}\t0\t32\t44\t62\n")
        files[f"test/images/test_{number}.JPEG"] = contents[2]
    files["val/val_annotations.txt"] = "".join(lines).encode()
    files["wnids.txt"] = "\n".join(names).encode()
    return {f"tiny-imagenet-200/{name}": content for name, content in files.items()}, expected


def test_tiny_imagenet_is_tested_on_its_labelled_split(tmp_path, monkeypatch):
    files, expected = tiny_files()
    archive = write_zip(tmp_path / "tiny-imagenet-200.zip", files)
    make_official("tiny-imagenet", archive, monkeypatch)
    dataset = imported("tiny-imagenet", archive)
    assert dataset.class_names == tuple(sorted({name for _, name in expected["train"]}))
    assert dataset.x_train.shape == (400, 3, 64, 64)
    for part in PARTS:
        named = [(pixels, dataset.class_names[label]) for pixels, label in examples(dataset, part, "y")]
        assert named == sorted(expected[part])
    unpacked = write_files(tmp_path / "unpacked", files)
    assert_same(dataset, imported("tiny-imagenet", unpacked / "tiny-imagenet-200"))
    assert_same(dataset, imported("tiny-imagenet", unpacked))


# FEMNIST


def leaf_files(num_writers=20, per_file=8, seed=0):
    """LEAF's files by name, and of each writer images and labels."""
    rng, written, files = np.random.default_rng(seed), {}, {}
    for number in rng.permutation(num_writers):
        count = rng.integers(1, 9)
        written[f"f{number:04}_{number % 50:02}"] = (
            rng.integers(0, 256, (count, 28, 28), np.uint8),
            rng.integers(0, 62, count),
        )
    names = list(written)
    for start in range(0, num_writers, per_file):
        users = names[start : start + per_file]
        data = {
            user: {"x": (written[user][0].reshape(-1, 784) / 255).tolist(), "y": written[user][1].tolist()}
            for user in users
        }
        content = {"users": users, "num_samples": [len(written[user][1]) for user in users], "user_data": data}
        files[f"all_data_{start // per_file}.json"] = json.dumps(content).encode()
    return files, written


def by_writer(dataset, part):
    """The images, with labels, of each writer's number."""
    writers = {}
    for pixels, label, writer in examples(dataset, part, "y", "writer"):
        writers.setdefault(writer, []).append((pixels, label))
    return writers


def test_femnist_holds_writers_out(tmp_path):
    files, written = leaf_files()
    dataset = imported("femnist", write_files(tmp_path / "all_data", files))
    assert dataset.class_names == (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)
    train, test = by_writer(dataset, "train"), by_writer(dataset, "test")
    assert len(test) == 2
    assert not set(train) & set(test)
    for number, name in enumerate(sorted(written)):
        x, y = written[name]
        assert {**train, **test}[number] == examples({"x_train": x, "y_train": y}, "train", "y")
    renamed = {f"all_data_{9 - number}.json": content for number, content in enumerate(files.values())}
    assert_same(dataset, imported("femnist", write_files(tmp_path / "data" / "all_data", renamed).parent))
    file, alone = leaf_files(5, per_file=5)
    single = imported("femnist", write_files(tmp_path / "single", file) / "all_data_0.json")
    assert len(by_writer(single, "train")) == 4
    assert len(single.y_train) + len(single.y_test) == sum(len(y) for _, y in alone.values())


def test_writers_come_from_npz_too(tmp_path):
    arrays = images((5, 5), 2)
    arrays |= {"writer_train": np.arange(6) % 4, "writer_test": np.arange(4) + 10}
    dataset = from_npz("letters", tmp_path / "a", **arrays)
    assert by_writer(dataset, "train").keys() == {0, 1, 2, 3}
    assert examples(dataset, "train", "writer") == examples(arrays, "train", "writer")
    part = datasets.take(dataset, 4, 0)
    assert set(examples(part, "train", "writer")) < set(examples(dataset, "train", "writer"))
    whole = datasets.merge(dataset)
    assert whole.writer_train.tolist() == dataset.writer_train.tolist() + dataset.writer_test.tolist()


# SynthDigits and MNIST-M


def synth_files(arrays):
    files = {}
    for part in PARTS:
        file, labels = io.BytesIO(), arrays[f"y_{part}"].astype(np.uint8)[:, None]
        scipy.io.savemat(file, {"X": arrays[f"x_{part}"].transpose(1, 2, 3, 0), "y": labels})
        files[f"synth_{part}_32x32.mat"] = file.getvalue()
    return files


def test_synth_digits(tmp_path):
    arrays = known_images("synth-digits")
    expected = from_npz("synth-digits", tmp_path / "npz", **arrays)
    files = synth_files(arrays)
    assert_same(expected, imported("synth-digits", write_files(tmp_path / "a", files)))
    assert_same(expected, imported("synth-digits", write_zip(tmp_path / "SynthDigits.zip", files)))
    tens = {part: np.where(arrays[f"y_{part}"] == 0, 10, arrays[f"y_{part}"]) for part in PARTS}
    as_ten = synth_files(arrays | {f"y_{part}": tens[part] for part in PARTS})
    assert_same(expected, imported("synth-digits", write_files(tmp_path / "b", as_ten)))


def mnist_m_files(arrays):
    files = {}
    for part in PARTS:
        names = [f"{i:08}.png" for i in range(len(arrays[f"y_{part}"]))]
        files |= {f"mnist_m_{part}/{name}": encoded(x) for name, x in zip(names, arrays[f"x_{part}"], strict=True)}
        lines = [f"{name} {label}\n" for name, label in zip(names, arrays[f"y_{part}"], strict=True)]
        files[f"mnist_m_{part}_labels.txt"] = "".join(lines).encode()
    return {f"mnist_m/{name}": content for name, content in files.items()}


def test_mnist_m_is_resized(tmp_path):
    arrays = images((32, 32, 3), 10)
    small = {
        f"x_{part}": np.stack(
            [np.asarray(Image.fromarray(x).resize((28, 28), Image.Resampling.BILINEAR)) for x in arrays[f"x_{part}"]]
        )
        for part in PARTS
    }
    expected = from_npz("mnist-m", tmp_path / "npz", **(arrays | small))
    files = mnist_m_files(arrays)
    assert_same(expected, imported("mnist-m", write_tar(tmp_path / "mnist_m.tar.gz", files)))
    unpacked = write_files(tmp_path / "a", files)
    assert_same(expected, imported("mnist-m", unpacked))
    assert_same(expected, imported("mnist-m", unpacked / "mnist_m"))
    assert_same(expected, imported("mnist-m", write_folder(tmp_path / "b", arrays, string.digits)))


# Files that are wrong


def leaf(change):
    """A file of LEAF's whose content was changed."""
    content = json.loads(next(iter(leaf_files(4, 4)[0].values())))
    change(content)
    return {"all_data_0.json": json.dumps(content).encode()}


def without(files, name):
    return {file: content for file, content in files.items() if not file.endswith(name)}


def twice():
    files, _ = leaf_files()
    return files | {"copy.json": files["all_data_1.json"]}


SYNTH = synth_files(known_images("synth-digits"))
LISTED = mnist_m_files(known_images("mnist-m"))
BAD_FILES = {
    "no JSON": ("femnist", {"all_data_0.json": b"users"}, "all_data_0.json", "not one of LEAF's files"),
    "another JSON": ("femnist", {"all_data_0.json": b'["a"]'}, "not one of LEAF's files"),
    "no data of a writer": ("femnist", leaf(lambda c: c["user_data"].pop(c["users"][1])), "not one of LEAF's files"),
    "bytes": ("femnist", leaf(lambda c: c["user_data"][c["users"][0]]["x"][0].__setitem__(3, 128)), "from 0 to 1"),
    "other images": ("femnist", leaf(lambda c: c["user_data"][c["users"][0]].update(x=[[0.5] * 783])), "784 values"),
    "class 62": ("femnist", leaf(lambda c: c["user_data"][c["users"][0]]["y"].__setitem__(0, 62)), "0 to 61"),
    "labels missing": ("femnist", leaf(lambda c: c["user_data"][c["users"][0]]["y"].append(1)), "is not usable"),
    "one writer": ("femnist", leaf_files(1)[0], "too few writers", "got 1"),
    "a writer twice": ("femnist", twice(), "is there twice", "remove one"),
    "199 classes": ("tiny-imagenet", lambda: tiny_files(199, 64)[0], "'tiny-imagenet'", "got 199", "be 200"),
    "32 pixels": ("tiny-imagenet", lambda: tiny_files(200, 32)[0], "'tiny-imagenet'", "32 x 32", "64 x 64"),
    "an image missing": ("tiny-imagenet", lambda: without(tiny_files(9)[0], "/val_7.JPEG"), "do not fit", "val_7.JPEG"),
    "no list": ("mnist-m", without(LISTED, "test_labels.txt"), "do not fit", "the same files"),
    "a cut file": ("synth-digits", SYNTH | {"synth_test_32x32.mat": b"MATLAB 5.0"}, "synth_test_32x32", "get it again"),
    "no test": ("synth-digits", without(SYNTH, "test_32x32.mat"), "has no x_test"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused(tmp_path, cache, case):
    name, files, *words = BAD_FILES[case]
    files = files() if callable(files) else files
    refused(lambda: datasets.import_path(name, write_files(tmp_path / "files", files)), *words)
    assert not cache.exists()


def test_a_file_that_is_no_archive_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"hello")
    for name in ("mnist-m", "synth-digits"):
        refused(lambda name=name: datasets.import_path(name, tmp_path / "file"), "cannot be read", "official archive")
    refused(lambda: datasets.import_path("office31", tmp_path / "file"), "'office31' an official archive", "folder")


# Whole domains


def office_pictures(domains, classes, seed=0):
    """For each domain and class some pictures of different sizes, by the names of their files."""
    rng = np.random.default_rng(seed)
    return {
        (domain, name): {
            f"frame_{i:04}.jpg": rng.integers(0, 256, (*rng.integers(20, 60, 2), 3), np.uint8)
            for i in range(rng.integers(5, 16))
        }
        for domain in domains
        for name in classes
    }


def write_office(folder, pictures, inner=""):
    for (domain, name), files in pictures.items():
        write_files(folder / domain / inner / name, {file: encoded(x) for file, x in files.items()})
    return folder


OFFICE31 = [f"thing_{number:02}" for number in range(31)]


def test_whole_domains_are_resized_and_divided_by_class(tmp_path):
    pictures = office_pictures(["amazon", "dslr", "webcam"], OFFICE31)
    dataset = imported("office31", write_office(tmp_path / "a", pictures, "images"))
    assert (dataset.domain_names, dataset.class_names) == (("amazon", "dslr", "webcam"), tuple(OFFICE31))
    assert dataset.x_train.shape[1:] == (3, 32, 32)
    expected = [
        (np.asarray(Image.fromarray(x).resize((32, 32), 2)).tobytes(), OFFICE31.index(name), domain)
        for (domain, name), files in pictures.items()
        for x in files.values()
    ]
    rows = [row for part in PARTS for row in examples(dataset, part, "y", "domain")]
    named = [(pixels, label, dataset.domain_names[number]) for pixels, label, number in rows]
    assert sorted(named) == sorted(expected)  # every picture once
    for (domain, name), files in pictures.items():
        cell = (dataset.y_test == OFFICE31.index(name)) & (dataset.domain_test == dataset.domain_names.index(domain))
        assert cell.sum() == round(len(files) / 5)
    named = {
        cell: {f"{i}.png": x for i, x in enumerate(sorted(files.values(), key=np.size))}
        for cell, files in pictures.items()
    }
    assert_same(dataset, imported("office31", write_office(tmp_path / "b", named)))


def test_domains_get_the_official_names_and_order(tmp_path):
    names = ["Art", "Clipart", "Product", "Real World"]
    classes = [f"class{number:02}" for number in range(65)]
    pictures = {cell: dict(list(files.items())[:5]) for cell, files in office_pictures(names, classes).items()}
    first = imported("office-home", write_office(tmp_path / "a", pictures))
    assert first.domain_names == tuple(names)
    spelling = {"Art": "z", "Clipart": "clipart", "Product": "PRODUCT", "Real World": "real_world"}
    other = {
        (spelling[domain] if domain != "Art" else "art", name): files for (domain, name), files in pictures.items()
    }
    assert_same(first, imported("office-home", write_office(tmp_path / "b", other)))
    wrong = {(spelling[domain], name): files for (domain, name), files in pictures.items()}
    folder = write_office(tmp_path / "c", wrong)
    refused(lambda: datasets.import_path("office-home", folder), "the domains in", "'office-home'", "Art, Clipart")
    shutil.rmtree(folder / "z" / "class00")
    refused(lambda: datasets.import_path("office-home", folder), "not alike: class00")
    single = write_folder(tmp_path / "d", images((32, 32, 3), 65), classes)
    refused(lambda: datasets.import_path("office-home", single), "the domains in", "got 0")


def test_own_whole_domains_must_have_one_size(tmp_path):
    pictures = office_pictures(["left", "right"], ["ant", "bee"])
    refused(lambda: datasets.import_path("mine", write_office(tmp_path / "a", pictures)), "another size")
    same = {cell: {file: x[:16, :16] for file, x in files.items()} for cell, files in pictures.items()}
    dataset = imported("mine", write_office(tmp_path / "b", same))
    assert (dataset.domain_names, dataset.x_train.shape[2:]) == (("left", "right"), (16, 16))
    assert len(dataset.y_train) + len(dataset.y_test) == sum(map(len, same.values()))


def test_sets_without_domains_refuse_them(tmp_path):
    arrays = known_images("mnist") | {"domain_train": np.arange(30) % 2, "domain_test": np.arange(20) % 2}
    refused(lambda: from_npz("mnist", tmp_path / "a", **arrays), "the domains in", "'mnist'")
