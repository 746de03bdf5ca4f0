"""Data sets in files: makes random images, writes them in the forms that users have, imports and compares them."""

import io
import zipfile
from itertools import product

import numpy as np
import torch
from PIL import Image

from fedcli.data import datasets, imports
from fedcli.data.catalog import KNOWN
from fedcli.data.image_arrays import SPLITS

# Attributes of a data set that hold a value for each example.
EXAMPLE_FIELDS = tuple(f"{name}_{split}" for split, name in product(SPLITS, ("x", "y", "domain", "writer")))


def image_arrays(shape, num_classes, seed=0, per_class=(3, 2)):
    """Returns random arrays as an `.npz` file holds them: `x_train`, `y_train`, `x_test` and `y_test`, shuffled.

    `shape` is that of an image, [H, W] or [H, W, C], and `per_class` has the numbers of images of each class in train
    and in test. Images are of type uint8.
    """
    rng = np.random.default_rng(seed)
    arrays = {}
    for split, count in zip(SPLITS, per_class, strict=True):
        arrays[f"y_{split}"] = rng.permutation(np.repeat(np.arange(num_classes), count))
        arrays[f"x_{split}"] = rng.integers(0, 256, (num_classes * count, *shape), np.uint8)
    return arrays


def known_images(name, seed=0, per_class=(3, 2)):
    """Returns random arrays whose images have the size, the channels and the classes of a known data set."""
    known = KNOWN[name]
    shape = (known.image_size, known.image_size)
    if known.channels == 3:
        shape = (*shape, 3)
    return image_arrays(shape, known.sizes["classes"], seed, per_class)


def import_dataset(name, path):
    """Imports a data set from a path under a name, and returns it as a run loads it."""
    imports.import_path(name, path)
    return datasets.load(name)


def import_arrays(name, folder, **arrays):
    """Writes arrays into `images.npz` in a folder, imports this file as a data set, and returns the data set."""
    folder.mkdir(exist_ok=True)
    np.savez(folder / "images.npz", **arrays)
    return import_dataset(name, folder / "images.npz")


def write_image_folder(folder, arrays, class_names, domain_names=None):
    """Writes images into `[DOMAIN/]SPLIT/CLASS/NUMBER.png` in a folder, which is returned.

    Without `domain_names` there are no folders of domains.
    """
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


def sorted_examples(source, split, *names):
    """Returns the examples of a split, sorted: of each the bytes of its pixels and the values that `names` ask for.

    `source` is a data set or a dictionary of arrays. Pixels have their channels last; a name is "y", "domain" or
    "writer".
    """
    values = source if isinstance(source, dict) else vars(source)
    images = values[f"x_{split}"]
    if isinstance(images, torch.Tensor):
        images = images.permute(0, 2, 3, 1).numpy()
    pixels = [image.tobytes() for image in images]
    columns = [values[f"{name}_{split}"].tolist() for name in names]
    return sorted(zip(pixels, *columns, strict=True))


def assert_same_dataset(expected, dataset):
    """Asserts that a data set equals another one in all but its name."""
    assert dataset.class_names == expected.class_names
    assert dataset.domain_names == expected.domain_names
    assert dataset.fingerprint == expected.fingerprint
    for field in EXAMPLE_FIELDS:
        values = getattr(dataset, field)
        expected_values = getattr(expected, field)
        if expected_values is None:
            assert values is None, field
        else:
            assert torch.equal(values, expected_values), field


def write_zip(path, contents):
    """Writes a zip archive of these contents, text or bytes by the names of the files; returns its path."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return path


def encode_image(pixels, format="PNG"):
    """Returns the bytes of a file that holds an image, of pixels [H, W] or [H, W, C]."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format)
    return file.getvalue()


def random_pixels(seed=0, shape=(6, 4, 3)):
    """Returns random pixels of type uint8."""
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def write_folder_of_one_class(path, *images):
    """Writes a folder of images of one class: in train two random ones and these, in test a random one."""
    train = path / "train" / "ant"
    test = path / "test" / "ant"
    train.mkdir(parents=True)
    test.mkdir(parents=True)
    Image.fromarray(random_pixels(9, (4, 4, 3))).save(train / "plain0.png")
    Image.fromarray(random_pixels(10, (4, 4, 3))).save(train / "plain1.png")
    Image.fromarray(random_pixels(11, (4, 4, 3))).save(test / "plain2.png")
    for number, image in enumerate(images):
        image.save(train / f"{number}.png", exif=image.getexif())
    return path
