"""Images in files: what the tests of data sets write and compare."""

import io
import zipfile
from itertools import product

import numpy as np
import torch
from PIL import Image

from fedcli.data import datasets, imports
from fedcli.data.catalog import KNOWN
from fedcli.data.image_arrays import SPLITS

FIELDS = tuple(f"{name}_{split}" for split, name in product(SPLITS, ("x", "y", "domain", "writer")))


def image_arrays(shape, num_classes, seed=0, per_class=(3, 2)):
    """Random arrays in the `.npz` form, `per_class` images of each class in train and test, shuffled."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for split, count in zip(SPLITS, per_class, strict=True):
        arrays[f"y_{split}"] = rng.permutation(np.repeat(np.arange(num_classes), count))
        arrays[f"x_{split}"] = rng.integers(0, 256, (num_classes * count, *shape), np.uint8)
    return arrays


def known_images(name, seed=0, per_class=(3, 2)):
    """The same in the size and with the classes of a known set."""
    known = KNOWN[name]
    shape = (known.image_size, known.image_size)
    if known.channels == 3:
        shape = (*shape, 3)
    return image_arrays(shape, known.sizes["classes"], seed, per_class)


def imported(name, path):
    """The data set of this name after it was imported from a path."""
    imports.import_path(name, path)
    return datasets.load(name)


def from_npz(name, folder, **arrays):
    """The data set of this name after arrays were written into a file and imported from it."""
    folder.mkdir(exist_ok=True)
    np.savez(folder / "images.npz", **arrays)
    return imported(name, folder / "images.npz")


def write_folder(folder, arrays, class_names, domain_names=None):
    """A folder of images by the names of their domains, if there are any, their split and their class."""
    for split in SPLITS:
        images_with_labels = zip(arrays[f"x_{split}"], arrays[f"y_{split}"], strict=True)
        for number, (image, label) in enumerate(images_with_labels):
            parent = folder
            if domain_names:
                domain = arrays[f"domain_{split}"][number]
                parent = folder / domain_names[domain]
            path = parent / split / class_names[label] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    return folder


def examples(source, split, *names):
    """Bytes of the pixels, channels last, and these values of each example of a data set or of arrays, sorted."""
    values = source if isinstance(source, dict) else vars(source)
    images = values[f"x_{split}"]
    if isinstance(images, torch.Tensor):
        images = images.permute(0, 2, 3, 1).numpy()
    pixels = [image.tobytes() for image in images]
    columns = [values[f"{name}_{split}"].tolist() for name in names]
    return sorted(zip(pixels, *columns, strict=True))


def assert_same(expected, dataset):
    """Holds a data set to another one in all but its name."""
    assert dataset.class_names == expected.class_names
    assert dataset.domain_names == expected.domain_names
    assert dataset.fingerprint == expected.fingerprint
    for field in FIELDS:
        values = getattr(dataset, field)
        expected_values = getattr(expected, field)
        if expected_values is None:
            assert values is None, field
        else:
            assert torch.equal(values, expected_values), field


def write_zip(path, contents):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return path


def encoded(pixels, format="PNG"):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format)
    return file.getvalue()


def picture(seed=0, shape=(6, 4, 3)):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def folder_of(path, *images):
    """A folder whose images, of one class in two splits, are these and others."""
    train = path / "train" / "ant"
    test = path / "test" / "ant"
    train.mkdir(parents=True)
    test.mkdir(parents=True)
    Image.fromarray(picture(9, (4, 4, 3))).save(train / "plain0.png")
    Image.fromarray(picture(10, (4, 4, 3))).save(train / "plain1.png")
    Image.fromarray(picture(11, (4, 4, 3))).save(test / "plain2.png")
    for number, image in enumerate(images):
        image.save(train / f"{number}.png", exif=image.getexif())
    return path
