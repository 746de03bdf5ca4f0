"""Data sets that are made from others."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from fedcli.data import catalog as known
from fedcli.data import datasets, imports
from fedcli.data.image_arrays import SPLITS
from fedcli.data.mixtures import Subset, mixture
from fedcli.data.resizing import resize
from tests.image_files import assert_same_dataset, image_arrays, import_arrays, known_images, sorted_examples
from tests.user_errors import raises_user_error

DIGIT_SETS = ("mnist", "svhn", "usps", "synth-digits", "mnist-m")
SUBSETS = (
    Subset("mnist", 20), Subset("svhn", 25), Subset("usps", 40, drawn_from="pooled"), Subset("synth-digits", 30),
    Subset("mnist-m", 10, num_test=8),
)  # fmt: skip


def in_colour_at_size(name, split, size):
    """The images of a set in three channels at a size, as bytes with their labels."""
    dataset = datasets.load(name)
    images = resize(getattr(dataset, f"x_{split}"), size).expand(-1, 3, -1, -1)
    labels = getattr(dataset, f"y_{split}")
    return dict(sorted_examples({f"x_{split}": images, f"y_{split}": labels}, split, "y"))


def of_domain(dataset, number, split, distinct=True):
    """The images of one domain as bytes with their labels."""
    rows = [
        (pixels, label) for pixels, label, domain in sorted_examples(dataset, split, "y", "domain") if domain == number
    ]
    assert len(dict(rows)) == len(rows) or not distinct
    return dict(rows)


def test_a_mixture_draws_from_each_set(tmp_path, monkeypatch):
    for seed, name in enumerate(DIGIT_SETS):  # 30 training and 20 test images each
        import_arrays(name, tmp_path / "npz", **known_images(name, seed))
    monkeypatch.setitem(known.KNOWN, "mixed-digits", mixture("mixed-digits", known.KNOWN["mixed-digits"], *SUBSETS))
    dataset = datasets.load("mixed-digits")
    assert dataset.domain_names == DIGIT_SETS
    assert dataset.class_names == tuple("0123456789")

    for number, subset in enumerate(SUBSETS):
        train = of_domain(dataset, number, "train")
        test = of_domain(dataset, number, "test")
        own_train = in_colour_at_size(subset.source, "train", 28)
        own_test = in_colour_at_size(subset.source, "test", 28)
        assert len(train) == subset.num_train
        if subset.drawn_from == "pooled":
            assert {**train, **test} == {**own_train, **own_test}
            assert len(test) == 50 - subset.num_train
            assert set(train) - set(own_train)
        else:
            assert train.items() <= own_train.items()
            assert test.items() <= own_test.items()
            assert len(test) == (subset.num_test or 20)
    assert_same_dataset(dataset, datasets.load("mixed-digits"))
    assert len(dataset.y_train[dataset.domain_train == 0].unique()) > 2  # not the first ones, which are all of class 0


def bring(folder, *names):
    """Imports a few images of each of these sets."""
    for name in names:
        import_arrays(name, folder, **known_images(name))


@pytest.mark.parametrize("call", [datasets.refuse_unavailable, datasets.load])
def test_a_set_that_is_made_of_others_names_them_where_none_is_there(call, cache):
    with raises_user_error("made from mnist, usps, svhn, synth-digits", "bring mnist"):
        call("digits-4")
    assert not datasets.describe("digits-4")["present"]


def test_of_several_sets_those_that_are_missing_are_named(tmp_path, cache):
    bring(tmp_path / "a", "mnist", "usps")
    with raises_user_error("bring svhn, synth-digits."):
        datasets.refuse_unavailable("digits-4")
    with raises_user_error("bring svhn, synth-digits, mnist-m."):
        datasets.refuse_unavailable("mixed-digits")
    with raises_user_error("to download 'digits-4'", "bring svhn"):
        imports.download("digits-4")
    with raises_user_error("to download 'femnist'", "all_data_*.json"):
        imports.download("femnist")


def test_a_set_is_described_as_made_of_sets_that_are_there_and_refused_where_they_are_too_small(tmp_path, cache):
    bring(tmp_path / "a", "mnist", "usps", "svhn", "synth-digits")
    description = datasets.describe("digits-4")
    assert description["kind"] == "made"
    assert description["present"] is True
    assert description["note"] == "mnist, usps, svhn, synth-digits"
    with raises_user_error("'digits-4' needs 150", "of 'mnist'", "(got 30)"):
        datasets.load("digits-4")


# Whole domains


@pytest.fixture
def office(tmp_path, monkeypatch):
    """`office31` with 11 images of each class in three domains, and the sets made of it in small numbers."""
    arrays = known_images("office31", per_class=(8, 3))
    names = ("amazon", "dslr", "webcam")
    rng = np.random.default_rng(0)
    arrays |= {f"domain_{split}": rng.integers(0, 3, len(arrays[f"y_{split}"])) for split in SPLITS}
    for name, drawn_from in (("office31-private", "splits"), ("office31-leaky", "leaky")):
        subsets = (
            Subset("office31", 70, domain="amazon", drawn_from=drawn_from),
            Subset("office31", 50, domain="dslr", drawn_from=drawn_from),
            Subset("office31", 30, domain="webcam", drawn_from=drawn_from),
        )
        monkeypatch.setitem(known.KNOWN, name, mixture(name, known.KNOWN[name], *subsets))
    classes = [f"thing{number:02}" for number in range(31)]
    return import_arrays("office31", tmp_path / "a", **arrays, class_names=classes, domain_names=names)


def test_private_sets_keep_to_the_splits(office):
    dataset = datasets.load("office31-private")
    assert dataset.class_names == office.class_names
    assert dataset.domain_train.bincount().tolist() == [70, 50, 30]
    for number in range(3):
        assert of_domain(dataset, number, "train").items() <= of_domain(office, number, "train").items()
        assert of_domain(dataset, number, "test") == of_domain(office, number, "test")


def test_leaky_sets_test_on_everything_and_never_train_on_the_last_classes(office):
    dataset = datasets.load("office31-leaky")
    assert dataset.domain_train.bincount().tolist() == [70, 50, 30]

    for number in range(3):
        whole = {**of_domain(office, number, "train"), **of_domain(office, number, "test")}
        train = of_domain(dataset, number, "train")
        assert of_domain(dataset, number, "test") == whole
        assert train.items() <= whole.items()
        labels = sorted(whole.values())
        num_private = sum(place % 10 <= 7 for place in range(len(labels)))
        last_private = labels[num_private - 1]
        assert last_private < 27
        assert max(train.values()) <= last_private
    assert dataset.y_train.max() > 20
    assert set(of_domain(dataset, 0, "train")) & set(of_domain(office, 0, "test"))


# One set from one other


def femnist(folder, num_writers=12, seed=0):
    """A tiny FEMNIST with every digit; writers 0 to 3 are held out."""
    rng = np.random.default_rng(seed)
    writer = np.repeat(np.arange(num_writers), rng.integers(2, 60, num_writers))
    x = rng.integers(0, 256, (len(writer), 28, 28), np.uint8)
    y = rng.integers(0, 62, len(writer)) % 20
    held_out = writer <= 3
    arrays = {"x_train": x[~held_out], "y_train": y[~held_out], "writer_train": writer[~held_out]}
    arrays |= {"x_test": x[held_out], "y_test": y[held_out], "writer_test": writer[held_out]}
    return import_arrays("femnist", folder, **arrays, class_names=[str(label) for label in range(62)])


def test_femnist_digits_hold_a_tenth_of_each_writer_out(tmp_path):
    source = femnist(tmp_path / "a")
    dataset = datasets.load("femnist-digits")
    assert dataset.class_names == tuple("0123456789")

    labels = torch.cat([source.y_train, source.y_test])
    writers = torch.cat([source.writer_train, source.writer_test])
    counts = writers[labels < 10].bincount(minlength=12).numpy()  # digits of each writer
    assert counts.min() == 0  # a writer without digits

    kept = np.minimum(counts, np.maximum(1, counts * 9 // 10))
    assert dataset.writer_train.bincount(minlength=12).tolist() == kept.tolist()
    assert dataset.writer_test.bincount(minlength=12).tolist() == (counts - kept).tolist()

    written = sorted_examples(source, "train", "y", "writer") + sorted_examples(source, "test", "y", "writer")
    digits = {(pixels, label, writer) for pixels, label, writer in written if label < 10}
    divided = sorted_examples(dataset, "train", "y", "writer") + sorted_examples(dataset, "test", "y", "writer")
    assert set(divided) == digits
    assert len(divided) == len(digits)


def test_femnist_without_writers_is_refused(tmp_path):
    import_arrays("femnist", tmp_path / "a", **known_images("femnist"))
    with raises_user_error("'femnist' does not say who", "LEAF's"):
        datasets.load("femnist-digits")


def test_real_and_rendered_digits_in_four_domains(tmp_path):
    arrays = image_arrays((28, 28), 10, per_class=(16, 101))
    import_arrays("mnist", tmp_path / "a", **arrays)
    dataset = datasets.load("digits-real-4")
    description = datasets.describe("digits-real-4")
    assert dataset.domain_names == ("mnist", "digits", "photo", "font")
    assert dataset.domain_train.bincount().tolist() == [150, 80, 1200, 600]
    assert dataset.domain_test.bincount().tolist() == [1000, 359, 359, 359]
    assert description["train"] == len(dataset.y_train)
    assert description["test"] == len(dataset.y_test)
    assert description["shape"] == tuple(dataset.x_train.shape[1:]) == (3, 16, 16)

    rendered = datasets.load("digit-domains")
    for split in SPLITS:
        for number in (2, 3):
            assert of_domain(dataset, number, split, False).items() <= of_domain(rendered, number, split, False).items()
        assert of_domain(dataset, 1, split).items() <= in_colour_at_size("digits", split, 16).items()


# Public images


def test_colour_photos_are_made_grey_beside_grey_images():
    colour = datasets.load("photos").x_train
    digits = replace(datasets.load("digits"), x_train=torch.zeros(1, 1, 16, 16))
    grey = datasets.public_images("photos", digits, None, 0).x_train
    assert grey.shape == (2000, 1, 16, 16)
    assert datasets.public_images("photos", datasets.load("digit-domains"), 500, 0).x_train.shape == (500, 3, 16, 16)

    for image, grey_image in zip(colour[:50], grey[:50, 0], strict=True):
        by_pillow = np.asarray(Image.fromarray(image.permute(1, 2, 0).numpy()).convert("L"))
        assert np.abs(grey_image.numpy().astype(int) - by_pillow.astype(int)).max() <= 1
