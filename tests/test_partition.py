"""Partitions by rules: every rule deals each example at most once, as its definition says, or refuses the data."""

import hashlib
import itertools
import math
import re
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedcli.core import partition, partition_rules
from fedcli.core.draws import generator
from fedcli.core.partition import PARTITIONS, count_classes, fingerprint, from_flag
from fedcli.core.parts import Parts, divide
from fedcli.declarations import spec_of
from fedcli.runs.options import RunConfig
from tests.user_errors import raises_user_error


def shuffled_labels(sizes, seed=0):
    """Labels with so many examples of each class, in no order."""
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))


CIFAR10 = shuffled_labels([5000] * 10)
CIFAR100 = shuffled_labels([500] * 100)
LABEL_SETS = {
    "balanced": shuffled_labels([100] * 10),
    "ragged": shuffled_labels([7, 301, 42, 150, 99]),
    "single example of a class": shuffled_labels([200, 1, 200, 300]),
    "empty class": shuffled_labels([300, 0, 200, 0, 310]),
    "one class": shuffled_labels([250]),
    "digits": shuffled_labels([178, 182, 177, 183, 181, 182, 181, 179, 174, 180]),
}
FLAGS = (
    "iid", "dirichlet:0.5", "dirichlet:0.5:plain", "dirichlet:0.3:min=1", "dirichlet:1e-6:min=1", "dirichlet:1e3",
    "dirichlet:0.5:draw=pfllib", "classes:1", "classes:2", "classes:5", "dominant:1", "dominant:2:share=4/9",
    "missing:1", "missing:3",
)  # fmt: skip

SEED_OF = {1: 0, 3: 1, 40: 2, 2: 3, 7: 4, 13: 5}  # by the number of clients
ALWAYS = tuple(SEED_OF)
TEN_EACH = {"ragged": (40,), "single example of a class": (40,), "empty class": (40,), "one class": (13, 40)}
# By the flag and the name of the labels: the numbers of clients that the examples are not enough for.
REFUSED = {
    "dirichlet:0.5": TEN_EACH,
    "dirichlet:0.5:plain": TEN_EACH,
    "dirichlet:0.5:draw=pfllib": TEN_EACH,
    "dirichlet:0.3:min=1": {"one class": (40,)},
    "dirichlet:1e-6:min=1": {
        "balanced": (13, 40), "ragged": (7, 13, 40), "single example of a class": (7, 13, 40),
        "empty class": (7, 13, 40), "one class": (2, 3, 7, 13, 40), "digits": (13, 40),
    },
    "dirichlet:1e3": {"one class": (40,)},
    "classes:2": {"one class": ALWAYS},
    "classes:5": {"single example of a class": ALWAYS, "empty class": ALWAYS, "one class": ALWAYS},
    "dominant:1": {
        "balanced": (1, 2, 3, 7, 13), "ragged": (1, 2, 7, 13, 40), "single example of a class": ALWAYS,
        "empty class": ALWAYS, "digits": (1, 2, 3, 7, 13),
    },
    "dominant:2:share=4/9": {
        "balanced": (1, 2, 3, 7), "ragged": (1, 7, 13, 40), "single example of a class": ALWAYS,
        "empty class": ALWAYS, "one class": ALWAYS, "digits": (1, 2, 3, 7, 13),
    },
    "missing:1": {
        "ragged": (13, 40), "single example of a class": (3, 7, 13, 40), "empty class": ALWAYS, "one class": ALWAYS,
    },
    "missing:3": {
        "ragged": (40,), "single example of a class": (7, 13, 40), "empty class": ALWAYS, "one class": ALWAYS,
    },
}  # fmt: skip


def assert_partition(parts, num_examples, num_clients):
    """Asserts that every client has examples, and no example two clients."""
    assert len(parts) == num_clients
    assert all(part.dtype == np.int64 and part.ndim == 1 and len(part) for part in parts)
    joined = np.concatenate(parts)
    assert joined.min() >= 0
    assert joined.max() < num_examples
    assert len(np.unique(joined)) == len(joined)


def assert_all_are_dealt(parts, num_examples, num_clients):
    """Asserts that every client has examples, and every example one client."""
    assert_partition(parts, num_examples, num_clients)
    assert count_dealt(parts) == num_examples


def count_dealt(parts):
    """Returns how many examples all clients have together."""
    return sum(len(part) for part in parts)


@pytest.mark.slow
@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("name", LABEL_SETS)
def test_every_input_is_partitioned_or_refused(flag, name):
    labels = LABEL_SETS[name]
    deal = from_flag(flag)
    least = 1 if "min=1" in flag else 10
    refused = REFUSED.get(flag, {}).get(name, ())

    for num_clients, seed in SEED_OF.items():
        if num_clients in refused:
            with raises_user_error("does not fit the data"):
                deal(labels, num_clients, seed)
            continue
        parts = deal(labels, num_clients, seed)
        assert_partition(parts, len(labels), num_clients)
        if flag.startswith(("iid", "dirichlet")):
            assert count_dealt(parts) == len(labels)
        if flag.startswith("dirichlet"):
            assert min(map(len, parts)) >= least


@pytest.mark.parametrize("flag", FLAGS)
def test_each_seed_has_its_own_partition(flag):
    deal = from_flag(flag)
    fingerprints = {fingerprint(deal(LABEL_SETS["balanced"], 10, seed)) for seed in range(6)}
    assert len(fingerprints) == 6


@pytest.mark.parametrize(("labels", "count", "shard"), [(CIFAR10, 2, 250), (CIFAR100, 20, 25)])
def test_classes_deals_whole_shards_of_one_class(labels, count, shard):
    parts = partition_rules.classes(labels, 100, count, 1)
    assert_all_are_dealt(parts, len(labels), 100)
    assert {len(part) for part in parts} == {500}
    counts = count_classes(parts, labels, labels.max() + 1)
    assert (counts % shard == 0).all()
    assert (counts.max(1) > shard).any()  # two shards of one class do occur,
    assert (counts > 0).sum(1).mean() > 0.8 * count  # but are not the rule


CLIENTS_AND_CLASSES = [(3, 2), (7, 1), (20, 3), (40, 2), (100, 2)]


def shard_cases():
    """Yields names of labels, numbers of clients, and how many shards each client has."""
    for name in LABEL_SETS:
        if name == "one class":
            yield name, 7, 1
            continue
        for num_clients, count in CLIENTS_AND_CLASSES:
            yield name, num_clients, count


@pytest.mark.parametrize(("name", "num_clients", "count"), list(shard_cases()))
def test_shards_lose_nobody_and_differ_by_at_most_one(name, num_clients, count):
    labels = LABEL_SETS[name]
    parts = partition_rules.classes(labels, num_clients, count, 0)
    assert_all_are_dealt(parts, len(labels), num_clients)
    shard = len(labels) // (num_clients * count)
    assert {len(part) for part in parts} <= set(range(count * shard, count * (shard + 1) + 1))
    held = count_classes(parts, labels, labels.max() + 1)
    assert held.sum(0).tolist() == np.bincount(labels).tolist()


@pytest.mark.parametrize("flag", ["iid", "dirichlet:0.3:min=1", "classes:1", "classes:3", "writers", "writers:shares"])
@pytest.mark.parametrize("name", LABEL_SETS)
def test_a_partition_that_has_no_rule_to_leave_examples_out_uses_all(flag, name):
    labels = LABEL_SETS[name]
    deal = from_flag(flag)
    writers = np.arange(len(labels)) % 50
    for num_clients in (1, 7, 33):
        has_too_few = flag == "classes:3" or (flag, num_clients) == ("dirichlet:0.3:min=1", 33)
        if name == "one class" and has_too_few:
            with raises_user_error("does not fit the data"):
                deal(labels, num_clients, 0, writer=writers)
            continue
        parts = deal(labels, num_clients, 0, writer=writers)
        assert partition.count_unused(parts, len(labels)) == 0
        assert partition.lost_classes(parts, labels) == []


def deal_without_remainder(labels, num_clients, count, seed):
    """What versions before the option `remainder` did, in lists: equal shards, and nobody has what is left over."""
    rng = generator(seed, "partition")
    size = len(labels) // (num_clients * count)
    order = rng.permutation(len(labels)).tolist()
    order.sort(key=lambda position: labels[position])
    shards = [order[number * size : (number + 1) * size] for number in range(num_clients * count)]
    dealt = rng.permutation(len(shards)).tolist()
    parts = []
    for client in range(num_clients):
        shards_of_client = [shards[number] for number in dealt[client * count : (client + 1) * count]]
        parts.append(rng.permutation(np.concatenate(shards_of_client)))
    return Parts(parts)


@pytest.mark.parametrize(
    ("name", "num_clients", "count", "rules"),
    [
        ("balanced", 10, 2, ("drop", "spread")),
        ("one class", 25, 1, ("drop", "spread")),
        ("ragged", 3, 2, ("drop",)),
        ("digits", 40, 2, ("drop",)),
    ],
)
def test_where_examples_divide_both_rules_are_the_old_one_to_the_bit(name, num_clients, count, rules):
    labels = LABEL_SETS[name]
    one_domain = np.zeros(len(labels), int)
    expected = deal_without_remainder(labels, num_clients, count, 5)
    for rule in rules:
        parts = from_flag(f"classes:{count}", rule)(labels, num_clients, 5)
        assert fingerprint(parts) == fingerprint(expected)
        of_one_domain = from_flag(f"domains+classes:{count}", rule)(labels, num_clients, 5, one_domain)
        assert sum(map(len, of_one_domain)) == sum(map(len, expected))


@pytest.mark.parametrize(
    ("flag", "num_clients", "num_images", "matters"),
    [
        ("classes:2", 10, 1000, False),
        ("classes:2", 10, 1001, True),
        ("classes:3", 10, 1000, True),
        ("classes:2", 10, None, True),
        ("domains+classes:2", 10, 1000, True),
        ("iid", 3, 1000, False),
        ("domains+dirichlet:0.5", 3, 1000, False),
        ("./parts.py:by_halves", 3, 1000, False),
    ],
)
def test_the_remainder_matters_where_shards_cannot_be_equal(flag, num_clients, num_images, matters):
    assert partition.leaves_remainder(flag, num_clients, num_images) == matters


@pytest.mark.parametrize(
    ("labels", "count", "share", "of_every_class", "more_of_dominant"),
    [
        (CIFAR100, 10, 0.4, 30, 200),
        (shuffled_labels([9000] * 10), 1, Fraction(4, 9), 500, 4000),
        (shuffled_labels([500] * 10), 1, 0.8, 10, 400),  # 500 * (1 - 0.8) is a little less than 100 in floats
    ],
)
def test_dominant_classes_have_their_share(labels, count, share, of_every_class, more_of_dominant):
    """A client has them beside an equal number of images of every class."""
    parts = partition_rules.dominant(labels, 10, count, 0, share=share)
    assert_partition(parts, len(labels), 10)
    num_classes = int(labels.max()) + 1
    expected = np.full((10, num_classes), of_every_class)
    for client in range(10):
        expected[client, client * count : (client + 1) * count] += more_of_dominant
    assert (count_classes(parts, labels, num_classes) == expected).all()


def test_dominant_classes_wrap_around_and_the_rarest_class_sets_the_size():
    labels = shuffled_labels([60, 90, 80])
    # n = 3 * 60 // 3 = 60: 60 * 0.6 / 3 = 12 of every class, 60 * 0.4 / 2 = 12 more of two classes
    counts = count_classes(partition_rules.dominant(labels, 3, 2, 0), labels, 3)
    assert counts.tolist() == [[24, 24, 12], [24, 12, 24], [12, 24, 24]]
    everywhere = count_classes(partition_rules.dominant(labels, 3, 3, 0), labels, 3)
    assert everywhere.tolist() == [[20] * 3] * 3


@pytest.mark.parametrize(
    ("absent", "first_classes", "of_each_class"),
    [
        (0, range(10), 500),
        (3, range(10), 714),
        (7, range(10), 1666),
        (6, [0, 2, 5, 7], 2500),
        (6, [client // 2 for client in range(20)], 625),
    ],
)
def test_clients_lack_their_missing_classes(absent, first_classes, of_each_class):
    """They have the same number of images of each other class."""
    num_clients = len(first_classes)
    parts = partition_rules.missing(CIFAR10, num_clients, absent, 0)
    assert_partition(parts, len(CIFAR10), num_clients)
    expected = np.zeros((num_clients, 10), int)
    for client, first in enumerate(first_classes):
        classes = (first + np.arange(10 - absent)) % 10
        expected[client, classes] = of_each_class
    assert (count_classes(parts, CIFAR10, 10) == expected).all()


@pytest.mark.parametrize(("sizes", "alpha"), [([500] * 10, 0.05), ([30, 900, 0, 400, 70], 0.3)])
def test_dirichlet_cap_stops_a_client_that_has_its_share(sizes, alpha):
    labels = shuffled_labels(sizes)
    counts = count_classes(partition_rules.dirichlet(labels, 8, alpha, 0, min_examples=1), labels, len(sizes))
    before = counts.cumsum(1) - counts  # what a client held when the class was given out
    assert (before[counts > 0] < len(labels) / 8).all()


@pytest.mark.parametrize("alpha", [1e-3, 0.5, 50.0])
def test_dirichlet_proportions_have_the_right_moments(alpha):
    labels = np.repeat(np.arange(1000), 300)
    parts = partition_rules.dirichlet(labels, 4, alpha, 0, capped=False, min_examples=1)
    shares = count_classes(parts, labels, 1000) / 300
    variance = 0.25 * 0.75 / (4 * alpha + 1)  # of an entry of Dir(alpha) over 4 clients
    assert shares.mean(1) == pytest.approx([0.25] * 4, abs=5 * np.sqrt(variance / 1000) + 2e-3)
    assert np.mean((shares - 0.25) ** 2) == pytest.approx(variance, rel=0.08)


def divide_as_pfllib(labels, num_clients, alpha, least, seed):
    """The split of PFLlib as its description has it, in lists.

    Class by class: shuffle its examples, draw the clients' shares, strike out who has N / K examples or more, scale to
    one, cut at the rounded-down cumulative shares. Again until the smallest client has enough. Last, each client's own
    examples are mixed, as for the cut in training and test part.
    """
    rng = np.random.RandomState(seed)
    fair_size = len(labels) / num_clients
    parts = []
    while not parts or min(map(len, parts)) < least:
        parts = [[] for _ in range(num_clients)]
        for label in range(max(labels) + 1):
            of_class = np.array([position for position, other in enumerate(labels) if other == label])
            rng.shuffle(of_class)
            shares = rng.dirichlet([alpha] * num_clients)
            shares[[len(part) >= fair_size for part in parts]] = 0.0
            cumulative = np.cumsum(shares / shares.sum())[:-1]
            cuts = [int(share * len(of_class)) for share in cumulative]
            edges = [0, *cuts, len(of_class)]
            for client in range(num_clients):
                parts[client] += of_class[edges[client] : edges[client + 1]].tolist()
    return [np.array(part)[rng.permutation(len(part))] for part in parts]


@pytest.mark.parametrize(
    ("sizes", "num_clients", "alpha", "least", "seed"),
    [
        ([600] * 10, 20, 0.1, 1, 1),
        ([60] * 10, 12, 0.1, 10, 3),
        ([7, 301, 42, 150, 99], 5, 0.5, 40, 0),
    ],
)
def test_pfllibs_draw_order_is_followed_index_for_index(sizes, num_clients, alpha, least, seed):
    labels = shuffled_labels(sizes)
    flag = f"dirichlet:{alpha}:min={least}:draw=pfllib"
    expected = divide_as_pfllib(labels.tolist(), num_clients, alpha, least, seed)
    for ours, theirs in zip(from_flag(flag)(labels, num_clients, seed), expected, strict=True):
        assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("within", ["", "+dirichlet:0.5:min=5", "+classes:2"])
def test_domains_keep_to_themselves(within):
    labels = np.tile(np.arange(5), 240)
    domain = np.repeat([0, 2, 7], [300, 500, 400])[np.random.default_rng(0).permutation(1200)]
    parts = from_flag(f"domains{within}")(labels, 6, 0, torch.from_numpy(domain))

    assert_partition(parts, 1200, 6)
    assert [set(domain[part]) for part in parts] == [{0}, {0}, {2}, {2}, {7}, {7}]
    if not within:
        assert count_dealt(parts) == 1200
        assert [len(part) for part in parts] == [150, 150, 250, 250, 200, 200]
    elif within == "+classes:2":
        assert (count_classes(parts, labels, 5) > 0).sum(1).max() <= 4
    else:
        assert count_classes(parts, labels, 5).std(1).min() > 5


@pytest.mark.parametrize("num_clients", [1, 4, 23])
def test_writers_are_dealt_whole(num_clients):
    rng = np.random.default_rng(0)  # the writers are not numbered from 0 and wrote 1 to 40 examples each, in no order
    writer = rng.permutation(np.repeat(7 * np.arange(23) + 5, rng.integers(1, 41, 23)))
    labels = np.arange(len(writer)) % 3
    parts = from_flag("writers")(labels, num_clients, 0, None, torch.from_numpy(writer))
    assert_all_are_dealt(parts, len(writer), num_clients)
    writers_of_clients = [set(writer[part]) for part in parts]
    counts = [len(writers) for writers in writers_of_clients]
    assert sum(counts) == 23
    assert {*counts} <= {math.floor(23 / num_clients), math.ceil(23 / num_clients)}
    fingerprints = {fingerprint(partition_rules.writers(labels, num_clients, writer, seed)) for seed in range(4)}
    assert len(fingerprints) == 4


def test_by_shares_every_class_is_cut_as_the_writers_who_are_drawn_have_it():
    labels = np.array([0, 0, 1, 0, 1, 1, 1, 2, 2, 0])
    writer = np.array([7, 7, 7, 9, 9, 9, 9, 5, 5, 5])
    counts_of_writers = [(2, 1, 0), (1, 3, 0), (1, 0, 2)]  # of each class, by 7, 9 and 5
    class_sizes = np.array([4, 4, 2])
    possible = []
    for first, second in itertools.permutations(np.array(counts_of_writers), 2):
        both = first + second
        shares = np.where(both > 0, first / np.maximum(both, 1), 0.5)
        of_first = np.floor(shares * class_sizes + 1e-9).astype(int)
        of_second = class_sizes - of_first
        possible.append((tuple(of_first), tuple(of_second)))

    dealt = set()
    for seed in range(6):
        parts = from_flag("writers:shares")(labels, 2, seed, None, writer)
        assert sorted(np.concatenate(parts)) == list(range(10))  # nothing is left out, whoever wrote it
        counts = tuple(tuple(np.bincount(labels[part], minlength=3)) for part in parts)
        assert counts in possible
        dealt.add(counts)
    assert len(dealt) > 2


def assert_partition_refused(flag, num_clients, words, labels=LABEL_SETS["balanced"], **groups):
    """Asserts that labels are not dealt under the flag, by a message with these words."""
    with raises_user_error(*words):
        from_flag(flag)(labels, num_clients, 0, **groups)


@pytest.mark.parametrize(
    ("flag", "num_clients", "words"),
    [
        ("", 4, ["unknown partition ''", "dirichlet"]),
        ("iid", 0, ["0 clients", "1 to 1000"]),
        ("iid", 1001, ["1001 clients", "1 to 1000"]),
        ("dirichlet:", 4, ["(got 'dirichlet:')", "write dirichlet:ALPHA[:plain][:min=COUNT]", "from 1e-6 to 1e6"]),
        (
            "dirichlet:0.5:plain:min=11",
            100,
            [
                "'dirichlet:0.5:plain:min=11'",
                "got 100 clients and 1000",
                "min=11 takes 1100 examples; use fewer clients or a lower min=",
            ],
        ),
        ("dirichlet:1e-3", 40, ["dirichlet:0.001", "min=10", "larger concentration or a lower min="]),
        ("dirichlet:1e-6:min=1:draw=pfllib", 4, ["no draw gave every client min=1"]),  # whose proportions are 0 / 0
        ("classes", 4, ["(got 'classes')", "such as classes:2."]),
        ("iid:2", 2, ["(got 'iid:2')", "write iid."]),
        ("classes:3", 500, ["500 clients and 1000", "1500 shards"]),
        ("dominant:11", 10, ["dominant:11", "10 classes"]),
        ("dominant:99999999999999999999", 10, ["at most 10 dominant classes"]),
        ("classes:99999999999999999999", 10, ["use fewer classes"]),
        ("missing:99999999999999999999", 10, ["use fewer missing classes"]),
        ("dominant:1:share=4/9", 3, ["'dominant:1:share=4/9'", "multiple of 10"]),
        ("dominant:1", 3, ["3 clients", "class 0, has 100", "multiple of 10"]),
        ("missing:10", 10, ["missing:10", "10 classes"]),
        ("domains+domains", 4, ["needs a label skew", "domains+dirichlet:0.5"]),
        ("domains+dirichlet:0.5", 4, ["domains+dirichlet:0.5", "with domains", "without"]),
        ("writers", 4, ["partition 'writers'", "with writers", "without"]),
    ],
)
def test_what_cannot_be_dealt_is_refused(flag, num_clients, words):
    assert_partition_refused(flag, num_clients, words)


def test_values_groups_and_classes_that_do_not_suffice_are_refused():
    for values in ("0", "0.5:0.5", "0.5:min=2.5", "0.5:min=1:min=2", "nan"):
        assert_partition_refused(f"dirichlet:{values}", 4, ["cannot be read"])
    for flag in ("classes:0", "dominant:1:share=4/0", "dominant:1:share=1E-99999999", "dominant:1:min=3"):
        assert_partition_refused(flag, 10, ["cannot be read"])
    labels = LABEL_SETS["balanced"]
    assert_partition_refused(
        "dominant:1", 10, ["does not fit", "class 4, has 0", "of every class"], labels[labels != 4]
    )
    assert_partition_refused("missing:1", 10, ["class 4, has 0", "examples of every class"], labels[labels != 4])
    assert_partition_refused("domains", 5, ["5", "2 domains", "multiple of 2"], domain=labels % 2)
    assert_partition_refused("domains+dirichlet:0.5:min=60", 20, ["in domain 0", "500 training"], domain=labels % 2)
    assert_partition_refused(
        "domains+dirichlet:0.5:min=60",
        20,
        ["in domain 'odd'", "500"],
        domain=1 - labels % 2,
        domain_names=("odd", "even"),
    )
    assert_partition_refused("writers", 11, ["each of 11 clients", "got 10 writers", "1 to 10"], writer=labels)


@pytest.mark.parametrize(
    ("flag", "canonical"),
    [
        ("iid", "iid"),
        ("dirichlet:.50", "dirichlet:0.5"),
        ("dirichlet:1e+2", "dirichlet:100"),
        ("dirichlet:0.5:min=1:plain", "dirichlet:0.5:plain:min=1"),
        ("dirichlet:0.5:draw=own", "dirichlet:0.5"),
        ("dirichlet:0.5:min=10", "dirichlet:0.5:min=10"),
        ("file:2024-01-01T10:00/split-v1.0", "file:2024-01-01T10:00/split-v1.0"),
        ("dirichlet:0.5:draw=pfllib:min=1", "dirichlet:0.5:min=1:draw=pfllib"),
        ("dominant:01:share=0.40", "dominant:1"),
        ("dominant:1:share=4/9", "dominant:1:share=4/9"),
        ("domains+iid", "domains"),
        ("domains+dirichlet:1e+2:min=1", "domains+dirichlet:100:min=1"),
        ("writers:shares", "writers:shares"),
    ],
)
def test_flag_has_one_canonical_spelling(flag, canonical):
    chosen = from_flag(flag)
    assert chosen.flag == canonical
    assert from_flag(canonical) == chosen
    assert hash(from_flag(canonical)) == hash(chosen)


def test_the_help_names_every_partition():
    named = re.findall(r"[\w/.]+", spec_of(RunConfig.__dataclass_fields__["partition"]).help)
    assert PARTITIONS.keys() - named == set()


def test_the_fingerprint_is_a_hash_of_sizes_and_positions():
    parts = Parts([np.array([3, 1]), np.array([2])])
    text = np.array([2, 1, 3, 1, 2], "<i8").tobytes()
    assert fingerprint(parts) == hashlib.sha256(text).hexdigest()[:16]
    assert fingerprint(Parts([part.astype(np.int32) for part in parts])) == fingerprint(parts)


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("iid", "bd2b76f267677e41"),
        ("dirichlet:0.5", "a86ef6777c224812"),
        ("classes:2", "a67c20097230926a"),
        ("dominant:1", "3c4806f0eb807d5f"),
        ("missing:3", "871ad493abc5cae0"),
        ("writers", "04913ce8db594f14"),
        ("domains+dirichlet:0.5", "33a9729c48eba515"),
        ("writers:shares", "719dde85da5c6670"),
    ],
)
def test_partition_of_a_seed_never_changes(flag, expected):
    # Records name these: a change here makes old runs impossible to compare with new ones.
    labels = torch.arange(10, dtype=torch.uint8).tile(180)
    domain = np.arange(1800) // 900
    writer = np.arange(1800) // 7
    global_state = np.random.get_state(legacy=False)["state"]["key"].copy()

    parts = from_flag(flag)(labels, 10, 0, domain, writer)

    assert fingerprint(parts) == expected
    state_after = np.random.get_state(legacy=False)["state"]["key"]
    assert (state_after == global_state).all()


@pytest.mark.parametrize(
    ("flag", "share", "expected"),
    [
        ("dirichlet:0.1", 1.0, "dirichlet:0.1"),
        ("dirichlet:0.1", 0.25, "dirichlet:0.1:min=2"),
        ("dirichlet:0.1:plain", 0.001, "dirichlet:0.1:plain:min=1"),
        ("dirichlet:0.1:min=12", 0.25, "dirichlet:0.1:min=12"),
        ("dirichlet:0.1:min=10", 0.25, "dirichlet:0.1:min=10"),
        ("domains+dirichlet:0.5", 0.3, "domains+dirichlet:0.5:min=3"),
        ("domains+classes:2", 0.3, "domains+classes:2"),
    ],
)
def test_the_least_size_shrinks_with_the_data_unless_it_was_named(flag, share, expected):
    assert from_flag(flag).scaled(share).flag == expected


@pytest.mark.parametrize("share", [0.29, 0.2, 0.57, 0.1])
def test_shares_of_a_clients_part_are_whole_where_they_divide_it(share):
    options = {"partition_seed": 0, "drop_last": False}
    tested = divide(Parts([np.arange(100)]), SimpleNamespace(local_test=share, validation=0.0, **options))
    assert len(tested.testing[0]) == round(100 * share)
    validated = divide(Parts([np.arange(100)]), SimpleNamespace(local_test=0.0, validation=share, **options))
    assert len(validated.validation[0]) == round(100 * share)
