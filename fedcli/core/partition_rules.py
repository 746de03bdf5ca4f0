"""The rules by which training examples are shared out among clients: pure functions of labels, domains or writers.

A rule takes the class of each example (`labels`, `[N]`), the number of clients K from 1 to N and a seed. It returns
the parts of K clients, positions in `labels`, each in random order, because the end of a part becomes the client's
validation images; no example is used twice. It raises Unfit, or UserError, where the data do not suffice.
`partition.PARTITIONS` has the flag of each.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from fedcli.core.draws import generator
from fedcli.core.numbers_in_flags import exact_share
from fedcli.core.parts import Parts
from fedcli.errors import UserError

MIN_EXAMPLES = 10
MAX_DRAWS = 1000  # how often a Dirichlet partition is drawn before it is refused; seconds for 100 classes, 100 clients

OF_ALL_CLASSES = "it takes examples of every class; choose another --partition, or --dataset"


class Unfit(Exception):
    """Says that a rule does not fit the labels and the number of clients; its text is why, and what to do instead."""


def _find_classes(labels: np.ndarray) -> list[np.ndarray]:
    """Finds the examples of each class: their positions, ascending, `[C][...]`."""
    return [np.flatnonzero(labels == label) for label in range(labels.max() + 1)]


def _mix_classes(labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Finds the examples of each class, `[C][...]`, and mixes those of each."""
    return [rng.permutation(positions) for positions in _find_classes(labels)]


def _deal(counts: np.ndarray, by_class: list[np.ndarray], rng: Any) -> Parts:
    """Gives each client its number of examples of each class, `counts` `[K, C]`, and mixes them.

    The positions of a class, `by_class` `[C][...]`, go out in their order; nobody holds those that are left.
    """
    ends = counts.cumsum(0)
    starts = ends - counts
    parts = []
    for client in range(len(counts)):
        pieces = []
        for label, positions in enumerate(by_class):
            pieces.append(positions[starts[client, label] : ends[client, label]])
        parts.append(rng.permutation(np.concatenate(pieces)))
    return Parts(parts)


def iid(labels: np.ndarray, num_clients: int, seed: int) -> Parts:
    """Shares the examples out at random, in sizes that differ by at most one."""
    mixed = generator(seed, "partition").permutation(len(labels))
    return Parts(np.array_split(mixed, num_clients))


def dirichlet(
    labels: np.ndarray, num_clients: int, alpha: float, seed: int, capped: bool = True,
    min_examples: int = MIN_EXAMPLES, draw: str = "own",
) -> Parts:  # fmt: skip
    """Cuts every class among the clients by p ~ Dir(alpha, ..., alpha), drawn anew until all have `min_examples`.

    Capped, a client that already holds N/K examples or more gets none of the classes still to come: its entry of p is
    set to zero and p renormalised (classes come in order). Refused after `MAX_DRAWS` draws.

    `draw="pfllib"` takes numpy's `RandomState(seed)` in the order of PFLlib, so that labels in the order of its files
    give its clients. Here labels come sorted and images of a class by their hash: how many examples of each class a
    client has is then as there, which images of the class these are is not.
    """
    least = num_clients * min_examples
    if least > len(labels):
        raise Unfit(f"min={min_examples} takes {least} examples; use fewer clients or a lower min=")
    draws = _DrawsOfPfllib(alpha, seed) if draw == "pfllib" else _Draws(alpha, seed)
    ascending = _find_classes(labels)
    for _ in range(MAX_DRAWS):
        by_class = [positions.copy() for positions in ascending]  # PFLlib's draw mixes them
        counts = _draw_counts(by_class, num_clients, capped, draws)
        if counts.sum(1).min() >= min_examples:
            return _deal(counts, draws.mix_classes(by_class), draws.rng)
    raise Unfit(
        f"no draw gave every client min={min_examples}; use fewer clients, a larger concentration or a lower min="
    )


class _Draws:
    """The random draws of a Dirichlet partition."""

    def __init__(self, alpha: float, seed: int):
        self.alpha = alpha
        self.rng: Any = generator(seed, "partition")

    def draw_shares(self, positions: np.ndarray, takes_more: np.ndarray) -> np.ndarray | None:
        """Draws the clients' cumulative shares `[K]` of a class; None where nobody holds anything.

        In logarithms, so that not all underflow where alpha is tiny and the cap is reached.

        Args:
            positions: Of the examples of the class.
            takes_more: `[K]`, False for a client that gets nothing of it.
        """
        num_clients = len(takes_more)
        # A Gamma(alpha) variate is one of Gamma(alpha + 1) times U^(1/alpha).
        log_gamma = np.log(self.rng.standard_gamma(self.alpha + 1, num_clients))
        log_uniform = np.log1p(-self.rng.random(num_clients))
        log_p = log_gamma + log_uniform / self.alpha
        log_p[~takes_more] = -np.inf
        cumulative = np.exp(log_p - log_p.max()).cumsum()
        return cumulative / cumulative[-1]

    def mix_classes(self, by_class: list[np.ndarray]) -> list[np.ndarray]:
        """Mixes the positions of each class, `[C][...]`, before they are dealt."""
        return [self.rng.permutation(positions) for positions in by_class]


class _DrawsOfPfllib(_Draws):
    """Those of PFLlib, which mixes a class before it draws its shares, and so needs not do it again."""

    def __init__(self, alpha: float, seed: int):
        self.alpha = alpha
        self.rng = np.random.RandomState(seed % 2**32)

    def draw_shares(self, positions: np.ndarray, takes_more: np.ndarray) -> np.ndarray | None:
        """Shuffles the positions in place, then draws; None where floats have no shares, with alpha near 0."""
        self.rng.shuffle(positions)
        p = np.where(takes_more, self.rng.dirichlet(np.full(len(takes_more), self.alpha)), 0.0)
        if not 0 < p.sum() < np.inf:
            return None
        return np.cumsum(p / p.sum())

    def mix_classes(self, by_class: list[np.ndarray]) -> list[np.ndarray]:
        """Leaves them as `draw_shares` has mixed them."""
        return by_class


def _draw_counts(by_class: list[np.ndarray], num_clients: int, capped: bool, draws: _Draws) -> np.ndarray:
    """Draws once how many examples of each class, positions `[C][...]`, each client holds: `[K, C]`."""
    num_examples = sum(map(len, by_class))
    counts = np.zeros((num_clients, len(by_class)), np.int64)
    takes_more = np.ones(num_clients, bool)
    for label, positions in enumerate(by_class):
        if capped:
            takes_more = counts.sum(1) * num_clients < num_examples
        cumulative = draws.draw_shares(positions, takes_more)
        if cumulative is None:
            return np.zeros_like(counts)
        bounds = (cumulative * len(positions)).astype(np.int64)
        counts[:, label] = np.diff(bounds[:-1], prepend=0, append=len(positions))
    return counts


def classes(
    labels: np.ndarray, num_clients: int, classes_per_client: int, seed: int, remainder: str = "spread"
) -> Parts:
    """Cuts the label-sorted examples into shards and deals `classes_per_client` of them to each client, at random.

    There are S = K * classes_per_client shards. Their sizes differ by at most one, the larger ones first in the order
    of labels. With the remainder "drop", all have floor(N/S) examples, and the last classes lose what is left over, as
    in earlier versions. A client's shards may be of one class, and a shard holds two where the class sizes are no
    multiples of the shard's.
    """
    num_shards = num_clients * classes_per_client
    if classes_per_client > len(np.unique(labels)) or num_shards > len(labels):
        raise Unfit(f"it takes {num_shards} shards; use fewer classes or clients")
    rng = generator(seed, "partition")
    by_label = _sort_by(labels, rng)
    if remainder == "drop":
        shard_size = len(by_label) // num_shards
        by_label = by_label[: shard_size * num_shards]
    shards = np.array_split(by_label, num_shards)
    shards_of_client = rng.permutation(num_shards).reshape(num_clients, -1)
    parts = []
    for numbers in shards_of_client:
        pieces = [shards[number] for number in numbers]
        parts.append(rng.permutation(np.concatenate(pieces)))
    return Parts(parts)


def _sort_by(groups: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Sorts the positions `[N]` of the examples by their groups `[N]`, in random order within each, int64."""
    mixed = rng.permutation(len(groups))
    in_order = np.argsort(groups[mixed], kind="stable")
    return mixed[in_order].astype(np.int64)


def dominant(
    labels: np.ndarray, num_clients: int, dominant_classes: int, seed: int, share: Fraction | float = Fraction(2, 5)
) -> Parts:
    """Gives all clients equally much: a share from their d dominant classes each, the rest from all C classes alike.

    With m the size of the rarest class and n = floor(C m / K), a client gets floor(n (1 - share) / C) examples of
    every class and floor(n share / d) more of each dominant one; those of client i are (i d + j) mod C, j < d.
    """
    sizes = np.bincount(labels)
    num_classes = len(sizes)
    if dominant_classes > num_classes:
        raise Unfit(f"use at most {num_classes} dominant classes")
    dominant_share = exact_share(share)
    budget = num_classes * int(sizes.min()) // num_clients
    base = int(budget * (1 - dominant_share) / num_classes)
    extra = int(budget * dominant_share / dominant_classes)
    first = dominant_classes * np.arange(num_clients)
    is_dominant = _consecutive(first, dominant_classes, num_classes)  # [K, C]
    counts = base + extra * is_dominant
    lacks_base = base == 0 and dominant_share < 1
    lacks_extra = extra == 0
    is_too_much = (counts.sum(0) > sizes).any()
    if lacks_base or lacks_extra or is_too_much:
        remedy = f"make the clients times their dominant classes a multiple of {num_classes}, or choose another share"
        if sizes.min() == 0:
            remedy = OF_ALL_CLASSES
        raise Unfit(remedy)
    rng = generator(seed, "partition")
    return _deal(counts, _mix_classes(labels, rng), rng)


def missing(labels: np.ndarray, num_clients: int, missing_classes: int, seed: int) -> Parts:
    """Gives client i the C - x classes from floor(i C / K) on (mod C), of each as many as all classes suffice for."""
    sizes = np.bincount(labels)
    num_classes = len(sizes)
    first = np.arange(num_clients) * num_classes // num_clients
    holds = _consecutive(first, num_classes - missing_classes, num_classes)  # [K, C]
    num_holders = holds.sum(0)  # may be 0 where there are fewer clients than classes
    suffices_for = sizes // np.maximum(num_holders, 1)  # each of a class's holders gets so many examples
    quota = np.where(num_holders > 0, suffices_for, len(labels)).min()
    if missing_classes >= num_classes or quota == 0:
        raise Unfit(OF_ALL_CLASSES if sizes.min() == 0 else "use fewer missing classes or fewer clients")
    rng = generator(seed, "partition")
    return _deal(holds * quota, _mix_classes(labels, rng), rng)


def _consecutive(first: np.ndarray, count: int, num_classes: int) -> np.ndarray:
    """Says whether each class is among the `count` from each client's `first` `[K]` on (mod C), bool `[K, C]`."""
    steps_after_first = (np.arange(num_classes) - first[:, None]) % num_classes
    return steps_after_first < count


def domains(
    labels: np.ndarray, num_clients: int, domain: np.ndarray, seed: int,
    within: Callable[[np.ndarray, int, int], Parts], domain_names: Sequence[str] = (),
) -> Parts:  # fmt: skip
    """Gives every client examples of one domain: the first K/D clients share the first, the next ones the second.

    `domain` is that of each example, `[N]`; `within` is the rule for a domain's examples, of labels, clients and seed;
    `domain_names` are what the domains are called in a refusal.
    """
    numbers = np.unique(domain)
    num_domains = len(numbers)
    if num_clients % num_domains:
        raise UserError(
            f"--num-clients {num_clients} does not fit the data (got {num_domains} domains); use a multiple of "
            f"{num_domains}."
        )
    parts = []
    for number in numbers.tolist():
        positions = np.flatnonzero(domain == number)
        domain_seed = int(generator(seed, "domain", number).integers(2**63))  # two domains must not be cut alike
        try:
            parts_within = within(labels[positions], num_clients // num_domains, domain_seed)
        except UserError as mistake:
            name = f"'{domain_names[number]}'" if domain_names else number
            raise UserError(f"in domain {name}, {mistake}") from None
        parts += [positions[part] for part in parts_within]
    return Parts(parts)


def writers(labels: np.ndarray, num_clients: int, writer: np.ndarray, seed: int, by_shares: bool = False) -> Parts:
    """Deals whole writers to the clients at random, in numbers that differ by at most one.

    By shares, K writers are drawn and only counted: every class's examples, whoever wrote them, are cut among the
    clients in proportion to these writers' numbers of that class, alike where none of them has it.
    """
    names, writer_number = np.unique(writer, return_inverse=True)  # the number of each example's writer, `[N]`
    num_writers = len(names)
    if num_clients > num_writers:
        raise UserError(
            f"partition 'writers' cannot give each of {num_clients} clients a writer (got {num_writers} writers); use "
            f"1 to {num_writers} clients."
        )
    rng = generator(seed, "partition")
    if by_shares:
        return _deal_by_shares(labels, num_clients, writer_number, rng)
    client_of_writer = np.empty(num_writers, np.int64)
    client_of_writer[rng.permutation(num_writers)] = np.sort(np.arange(num_writers) % num_clients)
    client_of_example = client_of_writer[writer_number]
    by_client = _sort_by(client_of_example, rng)
    ends = np.bincount(client_of_example).cumsum()
    return Parts(np.split(by_client, ends[:-1]))


def _deal_by_shares(labels: np.ndarray, num_clients: int, writer_number: np.ndarray, rng: np.random.Generator) -> Parts:
    """Cuts every class among the clients in proportion to its numbers among as many drawn writers."""
    sizes = np.bincount(labels)
    num_writers = writer_number.max() + 1
    counts_of_writers = np.zeros((num_writers, len(sizes)), np.int64)
    np.add.at(counts_of_writers, (writer_number, labels), 1)
    drawn = counts_of_writers[rng.permutation(num_writers)[:num_clients]]  # [K, C]
    has_any = drawn.any(0)
    cumulative = np.where(has_any, drawn, 1).cumsum(0)
    bounds = cumulative * sizes // cumulative[-1]
    counts = np.diff(bounds, axis=0, prepend=0)
    return _deal(counts, _mix_classes(labels, rng), rng)
