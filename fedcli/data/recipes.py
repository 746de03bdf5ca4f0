"""Data sets that are made from others: several domains at one size, a part of each, and other divisions.

Everything random comes from fixed seeds. A recipe is given a function from the name of a set to its arrays, which are
those of `fedcli.data.files` in canonical order.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from fedcli.core.augment import resize
from fedcli.core.batches import generator
from fedcli.data.catalog import KNOWN
from fedcli.data.files import PARTS, Arrays
from fedcli.errors import UserError

Load = Callable[[str], Arrays]


class Share(NamedTuple):
    """What a mixture takes of one domain: examples drawn at random, all of a part where the number is None.

    `division` says which examples may be trained and tested on:
        parts    those of the set's own training and test part
        pooled   any to train, and all the others to test
        leaky    the first 80 % in the order of classes to train, so none of the last classes, and all of them to test,
                 those of the training part included
    """

    source: str  # name of the set
    num_train: int
    num_test: int | None = None
    domain: str | None = None  # of the source, where it has several
    division: str = "parts"


class Recipe(NamedTuple):
    """How a data set is made."""

    needs: tuple[str, ...]  # the sets it is made from
    make: Callable[[Load], Arrays]
    note: str = ""

    @property
    def about(self) -> str:
        """Of what and how, in a line."""
        return ", ".join(self.needs) + (f"; {self.note}" if self.note else "")


def _mixture(name: str, shares: tuple[Share, ...], note: str = "") -> Recipe:
    needs = tuple(dict.fromkeys(share.source for share in shares))
    return Recipe(needs, partial(_mixed, name, shares), note)


def _mixed(name: str, shares: tuple[Share, ...], load: Load) -> Arrays:
    """The arrays of a set with a domain from each share, in the size and with the domains of the known set."""
    known, sources, taken = KNOWN[name], {}, []
    for share, domain in zip(shares, known.domain_names, strict=True):
        if share.source not in sources:
            sources = {share.source: load(share.source)}  # one at a time: some are large
        taken.append(_taken(name, share, domain, sources[share.source]))
    arrays: Arrays = {"class_names": _same_classes(name, shares, taken), "domain_names": np.array(known.domain_names)}
    for part in PARTS:
        arrays[f"x_{part}"] = np.concatenate([_shaped(one[f"x_{part}"], known.image_size) for one in taken])
        arrays[f"y_{part}"] = np.concatenate([one[f"y_{part}"] for one in taken])
        arrays[f"domain_{part}"] = np.repeat(np.arange(len(taken)), [len(one[f"y_{part}"]) for one in taken])
    return arrays


def _taken(name: str, share: Share, domain: str, source: Arrays) -> Arrays:
    """The examples of one share."""
    own = {part: _of_domain(source, share.domain, part) for part in PARTS}
    if share.division != "parts":
        own["train"] = own["test"] = tuple(map(np.concatenate, zip(*own.values(), strict=True)))
    rng = generator(0, "recipe", name, domain)
    x, y = own["train"]
    allowed = _first_classes(y) if share.division == "leaky" else np.arange(len(y))
    train = rng.permutation(allowed)[: share.num_train]
    if len(train) < share.num_train:
        raise UserError(
            f"'{share.source}' is too small for '{name}' (got {len(allowed)} training images for its domain "
            f"'{domain}'); {share.num_train} are needed; import the whole set."
        )
    test = np.arange(len(own["test"][1]))
    if share.division == "pooled":
        test = np.setdiff1d(test, train)
    if share.num_test is not None:
        test = rng.permutation(test)[: share.num_test]
    parts = {"x_train": x[train], "y_train": y[train], "x_test": own["test"][0][test], "y_test": own["test"][1][test]}
    return parts | {"class_names": source["class_names"]}


def _of_domain(source: Arrays, domain: str | None, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one domain of a part; all of them where there is no domain to choose."""
    x, y = source[f"x_{part}"], source[f"y_{part}"]
    if domain is None:
        return x, y
    chosen = source[f"domain_{part}"] == source["domain_names"].tolist().index(domain)
    return x[chosen], y[chosen]


def _first_classes(labels: np.ndarray) -> np.ndarray:
    """The first 80 % of the positions `[N]` sorted by label: as many as have a remainder below 8 when divided by 10."""
    count = int((np.arange(len(labels)) % 10 < 8).sum())
    return np.argsort(labels, kind="stable")[:count]


def _same_classes(name: str, shares: tuple[Share, ...], taken: list[Arrays]) -> np.ndarray:
    first = taken[0]["class_names"]
    for share, one in zip(shares, taken, strict=True):
        if one["class_names"].tolist() != first.tolist():
            raise UserError(
                f"the classes of '{share.source}' do not fit '{name}' (got {len(one['class_names'])} others than those "
                f"of '{shares[0].source}'); all its sets must have the same; import '{share.source}' anew."
            )
    return first


def _shaped(images: np.ndarray, size: int) -> np.ndarray:
    """Images `[n, size, size, 3]` of images `[n, H, W, 1 or 3]`."""
    tensor = torch.from_numpy(np.ascontiguousarray(np.moveaxis(images, 3, 1)))
    return np.moveaxis(resize(tensor, size).expand(-1, 3, -1, -1).numpy(), 1, 3)


def _mnist_m(load: Load) -> Arrays:
    """MNIST's digits as the difference from random pieces of scikit-learn's photographs, in the place of BSDS500's."""
    from fedcli.data.builtin import blended  # late: it needs scikit-learn and matplotlib

    arrays = load("mnist")
    images = {f"x_{part}": blended(arrays[f"x_{part}"][..., 0], seed) for seed, part in enumerate(PARTS)}
    return arrays | images


def _femnist_digits(load: Load) -> Arrays:
    """The ten digits of all of FEMNIST's writers; nine tenths of each writer's, rounded down, are the training part."""
    source = load("femnist")
    if "writer_train" not in source:
        raise UserError(
            "'femnist' does not say who wrote what (got images and labels only); 'femnist-digits' is made from LEAF's "
            "files; import 'femnist' from those."
        )
    x, y, writer = (np.concatenate([source[f"{kind}_{part}"] for part in PARTS]) for kind in ("x", "y", "writer"))
    digits = y < 10
    x, y, writer = x[digits], y[digits], writer[digits]
    order = generator(0, "recipe", "femnist-digits").permutation(len(y))
    order = order[np.argsort(writer[order], kind="stable")]  # by writer, random inside
    counts = np.bincount(writer)
    rank = np.arange(len(y)) - np.repeat(counts.cumsum() - counts, counts)
    test = np.empty(len(y), bool)
    test[order] = rank >= np.maximum(1, counts * 9 // 10)[writer[order]]
    arrays: Arrays = {"class_names": source["class_names"][:10]}
    for part, chosen in (("train", ~test), ("test", test)):
        arrays |= {f"x_{part}": x[chosen], f"y_{part}": y[chosen], f"writer_{part}": writer[chosen]}
    return arrays


def _office(name: str, numbers: tuple[int, ...]) -> dict[str, Recipe]:
    """Two sets made from one of several domains, with so many training images of each; one of them leaky."""
    recipes = {}
    for kind, division, note in (
        ("private", "parts", ""),
        ("leaky", "leaky", "tested on its training images too"),
    ):
        pairs = zip(KNOWN[name].domain_names, numbers, strict=True)
        shares = tuple(Share(name, count, None, domain, division) for domain, count in pairs)
        recipes[f"{name}-{kind}"] = _mixture(f"{name}-{kind}", shares, note)
    return recipes


RECIPES = {
    "mnist-m": Recipe(("mnist",), _mnist_m, "blended with scikit-learn's photographs"),
    "femnist-digits": Recipe(("femnist",), _femnist_digits),
    "mixed-digits": _mixture(
        "mixed-digits",
        (
            Share("mnist", 7430),
            Share("svhn", 7430),
            Share("usps", 7430, division="pooled"),  # its official training part has 7,291 images
            Share("synth-digits", 7430),
            Share("mnist-m", 7430),
        ),
    ),
    "digits-4": _mixture(
        "digits-4",
        (Share("mnist", 150), Share("usps", 80), Share("svhn", 5000), Share("synth-digits", 1800)),
    ),
    # For real images without more than MNIST, in numbers as uneven as those of digits-4.
    "digits-real-4": _mixture(
        "digits-real-4",
        (
            Share("mnist", 150, num_test=1000),
            Share("digits", 80),
            Share("digit-domains", 1200, domain="photo"),
            Share("digit-domains", 600, domain="font"),
        ),
    ),
    **_office("office-caltech", (368, 431, 60, 113)),
    **_office("office31", (1082, 192, 305)),
    **_office("office-home", (1400, 2000, 2500, 2000)),
}
