"""Images in files: what the tests of data sets write and compare."""

import numpy as np
import pytest
import torch
from PIL import Image

from fedcli.data import datasets
from fedcli.data.catalog import KNOWN
from fedcli.data.files import PARTS
from fedcli.errors import UserError

FIELDS = tuple(f"{kind}_{part}" for part in PARTS for kind in ("x", "y", "domain", "writer"))


def images(shape, num_classes, seed=0, per_class=(3, 2)):
    """Random arrays in the `.npz` form, `per_class` images of each class in train and test, shuffled."""
    rng, arrays = np.random.default_rng(seed), {}
    for part, count in zip(PARTS, per_class, strict=True):
        arrays[f"y_{part}"] = rng.permutation(np.repeat(np.arange(num_classes), count))
        arrays[f"x_{part}"] = rng.integers(0, 256, (num_classes * count, *shape), np.uint8)
    return arrays


def known_images(name, seed=0, per_class=(3, 2)):
    known = KNOWN[name]
    shape = (known.image_size, known.image_size) + ((3,) if known.channels == 3 else ())
    return images(shape, known.sizes["classes"], seed, per_class)


def imported(name, path):
    datasets.import_path(name, path)
    return datasets.load(name)


def from_npz(name, folder, **arrays):
    folder.mkdir(exist_ok=True)
    np.savez(folder / "images.npz", **arrays)
    return imported(name, folder / "images.npz")


def write_folder(folder, arrays, class_names, domain_names=None):
    for part in PARTS:
        for i, (image, label) in enumerate(zip(arrays[f"x_{part}"], arrays[f"y_{part}"], strict=True)):
            domain = domain_names[arrays[f"domain_{part}"][i]] if domain_names else ""
            path = folder / domain / part / class_names[label] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    return folder


def examples(source, part, *kinds):
    """Bytes of the pixels, channels last, and these values of each example of a data set or of arrays, sorted."""
    values = source if isinstance(source, dict) else vars(source)
    x = values[f"x_{part}"]
    x = x.permute(0, 2, 3, 1).numpy() if isinstance(x, torch.Tensor) else x
    columns = [values[f"{kind}_{part}"].tolist() for kind in kinds]
    return sorted(zip((image.tobytes() for image in x), *columns, strict=True))


def assert_same(a, b):
    assert (a.class_names, a.domain_names, a.fingerprint) == (b.class_names, b.domain_names, b.fingerprint)
    for field in FIELDS:
        left, right = getattr(a, field), getattr(b, field)
        assert (left is None and right is None) or torch.equal(left, right), field


def refused(call, *words):
    """The call raises a refusal of one line that holds all the words."""
    with pytest.raises(UserError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    for word in words:
        assert str(word) in text, text
