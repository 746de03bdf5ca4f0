"""Data sets that are made of others: a domain from each of several, or a part of one. Draws come from fixed seeds."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from fedcli.core.draws import generator
from fedcli.data.dataset_info import DatasetInfo
from fedcli.data.image_arrays import Columns, first_of_each, join_rows
from fedcli.data.resizing import resize_rows
from fedcli.errors import UserError


class Subset(NamedTuple):
    """What a mixture takes of a set for one of its domains: examples drawn at random, all where the number is None.

    `drawn_from` says which examples may be trained and tested on:
        splits   those of the set's own training and test split
        pooled   any to train, and all the others to test
        leaky    the first 80 % in the order of classes to train, and all to test
    """

    source: str  # name of the set
    num_train: int
    num_test: int | None = None
    domain: str | None = None  # of the source, where it has several
    drawn_from: str = "splits"


def mixture(name: str, info: DatasetInfo, *subsets: Subset) -> DatasetInfo:
    """Returns the set with a domain from each subset; its name decides what is drawn of them."""
    needs = tuple(dict.fromkeys(subset.source for subset in subsets))
    num_train = sum(subset.num_train for subset in subsets)
    return info._replace(num_train=num_train, make=partial(_mix, name, info, subsets), needs=needs)


def _mix(name: str, info: DatasetInfo, subsets: Sequence[Subset], load: Callable[[str], Columns]) -> Columns:
    """Returns the columns of a set with a domain from each subset, at its size and in colour."""
    size = info.image_size
    load_once = lru_cache(1)(load)  # one at a time: some are large
    domains = []
    for number, (subset, domain) in enumerate(zip(subsets, info.domain_names, strict=True)):
        source = load_once(subset.source)
        drawn = _draw_examples(subset, source, name, domain)
        rows = np.concatenate([drawn.train, drawn.test])
        images = resize_rows(source["x"][rows], size)
        columns = {
            "x": np.broadcast_to(images, (len(rows), size, size, 3)),
            "y": source["y"][rows],
            "domain": np.full(len(rows), number),
            "test": np.repeat([False, True], [len(drawn.train), len(drawn.test)]),
        }
        domains.append(columns)
    return join_rows(domains) | {"class_names": source["class_names"]}


class _Drawn(NamedTuple):
    """Examples of a set, by their positions in it."""

    train: np.ndarray
    test: np.ndarray


def _draw_examples(subset: Subset, source: Columns, name: str, domain: str) -> _Drawn:
    """Draws the examples of a domain of the known set `name` from the columns of its source.

    Raises:
        UserError: The source has fewer to train on than the subset needs.
    """
    rng = generator(0, "recipe", name, domain)
    rows = np.arange(len(source["y"]))
    if subset.domain is not None:
        domain_of_row = source["domain_names"][source["domain"]]
        rows = np.flatnonzero(domain_of_row == subset.domain)
    is_test = source["test"][rows]
    to_train = rows
    if subset.drawn_from == "splits":
        to_train = rows[~is_test]
    elif subset.drawn_from == "leaky":
        by_class = rows[np.argsort(source["y"][rows], kind="stable")]
        num_first = (np.arange(len(rows)) % 10 < 8).sum()
        to_train = by_class[:num_first]
    train = rng.permutation(to_train)[: subset.num_train]
    if len(train) < subset.num_train:
        need = f"'{name}' needs {subset.num_train} training images of '{subset.source}' for its domain '{domain}'"
        raise UserError(f"{need} (got {len(to_train)}); import the whole set.")
    test = rows
    if subset.drawn_from == "splits":
        test = rows[is_test]
    elif subset.drawn_from == "pooled":
        test = np.setdiff1d(rows, train)
    if subset.num_test is not None:
        test = rng.permutation(test)[: subset.num_test]
    return _Drawn(train, test)


def femnist_digits(load: Callable[[str], Columns]) -> Columns:
    """FEMNIST's ten digits; nine tenths of each writer's, rounded down, are the training split."""
    source = load("femnist")
    if "writer" not in source:
        raise UserError("'femnist' does not say who wrote what (got no writers); import it from LEAF's files.")
    is_digit = source["y"] < 10
    x = source["x"][is_digit]
    y = source["y"][is_digit]
    writer = source["writer"][is_digit]
    order = generator(0, "recipe", "femnist-digits").permutation(len(y))
    order = order[np.argsort(writer[order], kind="stable")]  # by writer, random inside
    train = first_of_each(order, writer, lambda size: max(1, size * 9 // 10))
    return {"x": x, "y": y, "writer": writer, "test": ~train}
