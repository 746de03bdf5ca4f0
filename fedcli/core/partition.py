"""Shares training examples out among clients: pure functions of labels, and of domains or writers.

A partitioner takes the class of each example (`labels`, `[N]`), the number of clients K from 1 to N and a seed. It
returns K int64 arrays of positions in `labels`, each in random order, because the end of a client's list becomes its
validation part; no example is used twice. It raises UserError where the data do not suffice. To add one, enter it in
`PARTITIONS`, as fedcli/data/datasets.py does for `file:PATH`, and name it in the help of `--partition`
(fedcli/runs/options.py). `./file.py:NAME` is a function of the user's own.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedcli.core.draws import generator
from fedcli.core.numbers_in_flags import read_number
from fedcli.core.parts import named_test_sizes
from fedcli.errors import UserError, unknown
from fedcli.userfiles import FromFile, blame, from_file, is_from_file

Parts = list[np.ndarray]
MIN_EXAMPLES = 10
MAX_DRAWS = 1000  # how often a Dirichlet partition is drawn before it is refused; seconds for 100 classes, 100 clients


def _deal(counts: np.ndarray, labels: np.ndarray, rng: Any, order: Parts | None = None) -> Parts:
    """Gives each client its number of examples of each class, `counts` `[K, C]`, and mixes them.

    A class's positions go out in the order `[C][...]`, which is random where None.
    """
    order = order or [rng.permutation(np.flatnonzero(labels == c)) for c in range(counts.shape[1])]
    ends = counts.cumsum(0)
    starts = ends - counts
    parts = []
    for k in range(len(counts)):
        # What comes after the last client's examples of a class is what nobody holds.
        pieces = [positions[starts[k, c] : ends[k, c]] for c, positions in enumerate(order)]
        parts.append(rng.permutation(np.concatenate(pieces)))
    return parts


def iid(labels: np.ndarray, num_clients: int, seed: int) -> Parts:
    """Shares the examples out at random, in sizes that differ by at most one."""
    return np.array_split(generator(seed, "partition").permutation(len(labels)), num_clients)


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
    rng: Any = generator(seed, "partition")
    draw_shares: Callable[..., np.ndarray | None] = _draw_shares
    if draw == "pfllib":
        rng = np.random.RandomState(seed % 2**32)
        draw_shares = _draw_shares_of_pfllib
    by_class = [np.flatnonzero(labels == c) for c in range(labels.max() + 1)]
    can_fit = num_clients * min_examples <= len(labels)
    max_draws = MAX_DRAWS if can_fit else 0
    for _ in range(max_draws):
        order = [positions.copy() for positions in by_class]
        counts = _draw_counts(order, num_clients, capped, partial(draw_shares, alpha=alpha, rng=rng))
        if counts.sum(1).min() >= min_examples:
            return _deal(counts, labels, rng, order if draw == "pfllib" else None)
    raise _unfit(
        f"dirichlet:{alpha:g}", labels, num_clients, f"no draw gave every client min={min_examples}; use fewer "
        "clients, a larger concentration or a lower min=",
    )  # fmt: skip


def _draw_counts(
    order: Parts, num_clients: int, capped: bool, draw_shares: Callable[[np.ndarray, np.ndarray], np.ndarray | None]
) -> np.ndarray:
    """Draws once how many examples of each class, positions `[C][...]`, each client holds: `[K, C]`.

    For each class, `draw_shares` is given its positions and which clients take more, `[K]`, and returns the cumulative
    shares of the clients, `[K]`. Where it returns None, nobody holds anything.
    """
    num_examples = sum(map(len, order))
    counts = np.zeros((num_clients, len(order)), np.int64)
    takes_more = np.ones(num_clients, bool)
    for c, positions in enumerate(order):
        if capped:
            takes_more = counts.sum(1) * num_clients < num_examples
        cumulative = draw_shares(positions, takes_more)
        if cumulative is None:
            return np.zeros_like(counts)
        bounds = (cumulative * len(positions)).astype(np.int64)
        counts[:, c] = np.diff(bounds[:-1], prepend=0, append=len(positions))
    return counts


def _draw_shares(positions: np.ndarray, takes_more: np.ndarray, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Draws cumulative shares, in logarithms, so that not all underflow where alpha is tiny and the cap is reached."""
    num_clients = len(takes_more)
    # A Gamma(alpha) variate is one of Gamma(alpha + 1) times U^(1/alpha).
    log_p = np.log(rng.standard_gamma(alpha + 1, num_clients)) + np.log1p(-rng.random(num_clients)) / alpha
    log_p[~takes_more] = -np.inf
    cumulative = np.exp(log_p - log_p.max()).cumsum()
    return cumulative / cumulative[-1]


def _draw_shares_of_pfllib(
    positions: np.ndarray, takes_more: np.ndarray, alpha: float, rng: np.random.RandomState
) -> np.ndarray | None:
    """Shuffles a class's positions, then draws cumulative shares; None where floats have none, with alpha near 0."""
    rng.shuffle(positions)
    p = np.where(takes_more, rng.dirichlet(np.full(len(takes_more), alpha)), 0.0)
    if not 0 < p.sum() < np.inf:
        return None
    return np.cumsum(p / p.sum())


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
        remedy = f"it takes {num_shards} shards; use fewer classes or clients"
        raise _unfit(f"classes:{classes_per_client}", labels, num_clients, remedy)
    rng = generator(seed, "partition")
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")].astype(np.int64)  # sorted by label, random inside
    if remainder == "drop":
        order = order[: len(order) // num_shards * num_shards]
    shards = np.array_split(order, num_shards)
    dealt = rng.permutation(num_shards).reshape(num_clients, -1)
    parts = []
    for held in dealt:
        own_shards = [shards[shard] for shard in held]
        parts.append(rng.permutation(np.concatenate(own_shards)))
    return parts


def leaves_remainder(flag: str, num_clients: int, num_images: int | None) -> bool:
    """Whether `classes:C` cannot deal so many images in equal shards, so that `remainder` matters.

    It may matter where the number of images, or those of the single domains, are not known.
    """
    kind, _, skew = flag.rpartition("+")
    name, _, count = skew.partition(":")
    if name != "classes":
        return False
    return bool(kind) or num_images is None or num_images % (num_clients * int(count)) > 0


def count_unused(parts: Sequence[np.ndarray], num_examples: int) -> int:
    """Returns how many of the examples no client holds."""
    return num_examples - len(np.unique(np.concatenate(parts)))


def lost_classes(parts: Sequence[np.ndarray], labels: ArrayLike) -> list[int]:
    """Returns the classes that have examples in `labels` `[N]` of which no client holds any."""
    array = np.asarray(labels)
    return np.setdiff1d(array, array[np.concatenate(parts).astype(np.int64)]).tolist()


def dominant(
    labels: np.ndarray, num_clients: int, dominant_classes: int, seed: int, share: Fraction | float = Fraction(2, 5)
) -> Parts:
    """Gives all clients equally much: a share from their d dominant classes each, the rest from all C classes alike.

    With m the size of the rarest class and n = floor(C m / K), a client gets floor(n (1 - share) / C) examples of
    every class and floor(n share / d) more of each dominant one; those of client i are (i d + j) mod C, j < d.
    """
    sizes = np.bincount(labels)
    exact = Fraction(share).limit_denominator(10**6)  # in floats, 500 * (1 - 0.8) / 10 is below 10
    budget = len(sizes) * int(sizes.min()) // num_clients
    base = int(budget * (1 - exact) / len(sizes))
    extra = int(budget * exact / dominant_classes)
    first = dominant_classes * np.arange(num_clients)[:, None]
    counts = base + extra * ((np.arange(len(sizes)) - first) % len(sizes) < dominant_classes)  # [K, C]
    lacks_a_part = extra == 0 or (base == 0 and exact < 1)
    is_too_much = dominant_classes > len(sizes) or (counts.sum(0) > sizes).any()
    if lacks_a_part or is_too_much:
        remedy = f"make the clients times their dominant classes a multiple of {len(sizes)}, or choose another share"
        raise _unfit(f"dominant:{dominant_classes}", labels, num_clients, remedy)
    return _deal(counts, labels, generator(seed, "partition"))


def missing(labels: np.ndarray, num_clients: int, missing_classes: int, seed: int) -> Parts:
    """Gives client i the C - x classes from floor(i C / K) on (mod C), of each as many as all classes suffice for."""
    sizes = np.bincount(labels)
    first = np.arange(num_clients)[:, None] * len(sizes) // num_clients
    held = (np.arange(len(sizes)) - first) % len(sizes) < len(sizes) - missing_classes  # [K, C]
    holders = held.sum(0)  # may be 0 where there are fewer clients than classes
    quotas = np.where(holders > 0, sizes // np.maximum(holders, 1), len(labels))
    if missing_classes >= len(sizes) or quotas.min() == 0:
        raise _unfit(f"missing:{missing_classes}", labels, num_clients, "use fewer missing classes or fewer clients")
    return _deal(held * quotas.min(), labels, generator(seed, "partition"))


def _unfit(flag: str, labels: np.ndarray, num_clients: int, remedy: str) -> UserError:
    sizes = np.bincount(labels)
    return UserError(
        f"partition '{flag}' does not fit the data (got {num_clients} clients and {len(labels)} training examples of "
        f"{len(sizes)} classes; the rarest, class {sizes.argmin()}, has {sizes.min()}); {remedy}."
    )


def domains(labels: np.ndarray, num_clients: int, domain: np.ndarray, seed: int, within: "Partition") -> Parts:
    """Gives every client examples of one domain: the first K/D clients share the first, the next ones the second.

    `domain` is that of each example, `[N]`; `within` shares a domain's examples out among its clients.
    """
    names = np.unique(domain)
    if num_clients % len(names):
        raise UserError(
            f"--num-clients {num_clients} does not fit the data (got {len(names)} domains); use a multiple of "
            f"{len(names)}."
        )
    parts = []
    for name in names.tolist():
        positions = np.flatnonzero(domain == name)
        domain_seed = int(generator(seed, "domain", name).integers(2**63))  # two domains must not be cut alike
        try:
            shares = within(labels[positions], num_clients // len(names), domain_seed)
        except UserError as mistake:
            raise UserError(f"in domain {name}, {mistake}") from None
        parts += [positions[share] for share in shares]
    return parts


def writers(labels: np.ndarray, num_clients: int, writer: np.ndarray, seed: int, by_shares: bool = False) -> Parts:
    """Deals whole writers to the clients at random, in numbers that differ by at most one.

    By shares, K writers are drawn and only counted: every class's examples, whoever wrote them, are cut among the
    clients in proportion to these writers' numbers of that class, alike where none of them has it.
    """
    names, number_of_writer = np.unique(writer, return_inverse=True)  # of each example, `[N]`
    if num_clients > len(names):
        raise UserError(
            f"partition 'writers' cannot give each of {num_clients} clients a writer (got {len(names)} writers); use 1 "
            f"to {len(names)} clients."
        )
    rng = generator(seed, "partition")
    if by_shares:
        counts = np.zeros((len(names), labels.max() + 1), np.int64)
        np.add.at(counts, (number_of_writer, labels), 1)
        drawn = counts[rng.permutation(len(names))[:num_clients]]  # [K, C]
        cumulative = np.where(drawn.any(0), drawn, 1).cumsum(0)
        bounds = cumulative * np.bincount(labels) // cumulative[-1]
        return _deal(np.diff(bounds, axis=0, prepend=0), labels, rng)
    client_of = np.empty(len(names), np.int64)
    client_of[rng.permutation(len(names))] = np.sort(np.arange(len(names)) % num_clients)
    client_of_example = client_of[number_of_writer]
    order = rng.permutation(len(labels))
    order = order[np.argsort(client_of_example[order], kind="stable")].astype(np.int64)  # by client, random inside
    ends = np.bincount(client_of_example).cumsum()
    return np.split(order, ends[:-1])


class Option(NamedTuple):
    """A part of a partition's flag between colons."""

    prefix: str  # with which it begins; empty for the required one, which comes first
    keyword: str  # of the function
    read: Callable[[str], Any]  # its value, of what stands behind the prefix


class Kind(NamedTuple):
    """A partition that a flag can name."""

    function: Callable[..., Parts]
    form: str  # how its flag is written
    options: tuple[Option, ...] = ()
    needs: str = ""  # of the data set beside labels: "domain", "writer", "place" or nothing
    takes_remainder: bool = False  # as `classes`, of what is left over when images are divided into shards
    words: str = ""  # in titles, with `{}` for its options; empty where the flag itself stands there


def _read_switch(text: str, value: bool) -> bool:
    """Reads an option that is a word alone, and so has nothing behind it; raises ValueError where it has."""
    if text:
        raise ValueError
    return value


def _read_word(text: str, allowed: Sequence[str]) -> str:
    """Reads one of the words allowed; raises ValueError for another."""
    if text not in allowed:
        raise ValueError
    return text


PARTITIONS = {
    "iid": Kind(iid, "iid", words="IID"),
    "dirichlet": Kind(
        dirichlet, "dirichlet:ALPHA[:plain][:min=COUNT][:draw=pfllib], such as dirichlet:0.5, ALPHA from 1e-6 to 1e6",
        options=(
            Option("", "alpha", partial(read_number, read=float, low=1e-6, high=1e6)),
            Option("plain", "capped", partial(_read_switch, value=False)),
            Option("min=", "min_examples", read_number),
            Option("draw=", "draw", partial(_read_word, allowed=("own", "pfllib"))),
        ),
        words="Dirichlet {}",
    ),
    "classes": Kind(
        classes, "classes:COUNT, such as classes:2", options=(Option("", "classes_per_client", read_number),),
        takes_remainder=True, words="{} classes a client",
    ),
    "dominant": Kind(
        dominant, "dominant:COUNT[:share=FRACTION], such as dominant:1:share=4/9",
        options=(
            Option("", "dominant_classes", read_number),
            Option("share=", "share", partial(read_number, read=Fraction, low=1e-6, high=1)),
        ),
        words="dominant classes a client: {}",
    ),
    "missing": Kind(
        missing, "missing:COUNT, such as missing:3",
        options=(Option("", "missing_classes", partial(read_number, low=0)),),
        words="missing classes a client: {}",
    ),
    "domains": Kind(domains, "domains or domains+LABEL_SKEW, such as domains+dirichlet:0.5", needs="domain"),
    "writers": Kind(
        writers, "writers[:shares]",
        options=(Option("shares", "by_shares", partial(_read_switch, value=True)),),
        needs="writer", words="whole writers",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Partition:
    """A partition that is chosen but not yet drawn; two are equal whose flags are."""

    flag: str  # in the one canonical spelling
    function: Callable[..., Parts] = field(compare=False)  # of labels, number of clients, what it needs, and the seed
    needs: str = field(default="", compare=False)  # see `Kind`

    def __call__(
        self, labels: ArrayLike, num_clients: int, seed: int, domain: Any = None, writer: Any = None, place: Any = None
    ) -> Parts:
        """Shares labels `[N]` out among K clients; domain, writer and place are `[N]`, where the data have them.

        Raises:
            UserError: The data do not allow this partition.
        """
        labels = np.asarray(labels, np.int64)
        if not 1 <= num_clients <= len(labels):
            raise UserError(
                f"every client needs a training image (got {num_clients} clients and {len(labels)} images); use "
                f"--num-clients 1 to {len(labels)}."
            )
        groups = writer if domain is None else domain
        column = {"domain": domain, "writer": writer, "place": place, "groups": groups}.get(self.needs)
        if column is None and self.needs not in ("", "groups"):
            raise UserError(
                f"partition '{self.flag}' needs a data set with {self.needs}s (got one without); choose such a data "
                "set, import this one anew, or use --partition iid."
            )
        needed = {} if column is None else {self.needs: np.asarray(column, np.int64)}
        return self.function(labels, num_clients, seed=seed, **needed)

    def scaled(self, share: float) -> "Partition":
        """Returns the partition for a share of the data: the default of `min=` shrinks with it, at least to 1."""
        if share >= 1 or not re.match(r"(domains\+)?dirichlet:(?!.*:min=)", self.flag):
            return self
        return from_flag(f"{self.flag}:min={max(1, round(share * MIN_EXAMPLES))}")


def from_flag(flag: str, remainder: str = "spread") -> Partition:
    """Reads a partition from a flag; checks what needs no data. For the remainder see `classes`.

    Raises:
        UserError: An unknown name, or a parameter that is missing, superfluous or out of range.
    """
    if is_from_file(flag):
        return Partition(flag, partial(_parts_from_user, from_file(flag, "partition")), "groups")
    kind_of_domains, plus, skew = flag.partition("+")
    if kind_of_domains == "domains":
        within = from_flag(skew if plus else "iid", remainder)
        if within.needs:
            raise UserError(f"partition 'domains' needs a label skew (got '{flag}'); write domains+dirichlet:0.5.")
        return Partition(f"domains+{within.flag}".removesuffix("+iid"), partial(domains, within=within), "domain")
    name, *texts = flag.split(":")
    if name not in PARTITIONS:
        raise unknown("partition", name, PARTITIONS, f"the partitions are {', '.join(PARTITIONS)}, and ./file.py:NAME.")
    kind = PARTITIONS[name]
    try:
        values = _read_options(kind, texts)
    except (LookupError, ValueError, ZeroDivisionError):  # the last for a share of 4/0
        raise UserError(f"partition '{name}' cannot be read (got '{flag[:80]}'); write {kind.form}.") from None
    spelling = ":".join([name, *_spelled(kind, values)])
    if kind.takes_remainder:
        values["remainder"] = remainder
    return Partition(spelling, partial(kind.function, **values), kind.needs)


def _read_options(kind: Kind, texts: Sequence[str]) -> dict[str, Any]:
    """The values of a partition's options, by keyword, from the parts of its flag.

    Raises:
        LookupError, ValueError, ZeroDivisionError: One is missing, there twice, unknown, or out of range.
    """
    left = list(kind.options)
    if not texts and any(option.prefix == "" for option in left):
        texts = [""]  # the required option, without a value
    values = {}
    for text in texts:
        option = _find_option(left, text)
        left.remove(option)  # what stands twice is not there any more
        values[option.keyword] = option.read(text.removeprefix(option.prefix))
    return values


def _find_option(options: Sequence[Option], text: str) -> Option:
    """The first of some options with whose prefix a text begins; raises LookupError where there is none."""
    for option in options:
        if text.startswith(option.prefix):
            return option
    raise LookupError


def _spelled(kind: Kind, values: dict[str, Any]) -> list[str]:
    """The parts of a flag that say these values, in the order of the options; a default is left out."""
    texts = []
    for option in kind.options:
        value = values.get(option.keyword)
        default = signature(kind.function).parameters[option.keyword].default
        if value not in (None, default):
            is_switch = isinstance(value, bool)
            texts.append(option.prefix if is_switch else option.prefix + str(value).removesuffix(".0"))
    return texts


def _parts_from_user(
    function: FromFile, labels: np.ndarray, num_clients: int, seed: int, **groups: np.ndarray
) -> Parts:
    """Returns what a user's function gives, checked, as int64; it gets `groups` `[N]` if it has such an argument."""
    asked_for = {name: groups[name].copy() for name in signature(function.function).parameters if name in groups}
    with blame(function.path):
        lists = function(labels.copy(), num_clients, generator(seed, "partition"), **asked_for)
        parts = [*map(np.asarray, lists)]
    if len(parts) != num_clients:
        raise function.refuse(f"gives no list of {num_clients} clients (got {len(parts)})", "return one list for each")
    for client, part in enumerate(parts):
        if not _are_positions(part, len(labels)):
            first_five = str(part.ravel()[:5])[1:-1]
            raise function.refuse(
                f"gives wrong positions to client {client} (got {part.dtype} {first_five} ...)",
                f"return a list of whole numbers from 0 to {len(labels) - 1}",
            )
    positions, times = np.unique(np.concatenate(parts), return_counts=True)
    if (times > 1).any():
        twice = positions[times.argmax()]
        raise function.refuse(f"uses an example twice (got position {twice:.0f})", "use it once")
    return [part.astype(np.int64) for part in parts]


def _are_positions(part: np.ndarray, num_examples: int) -> bool:
    """Whether an array is a list of whole numbers below the number of examples; an empty list is, of any type."""
    if part.ndim != 1:
        return False
    if len(part) == 0:
        return True
    are_whole = part.dtype.kind in "iu"
    return are_whole and part.min() >= 0 and part.max() < num_examples


def fingerprint(parts: Sequence[np.ndarray]) -> str:
    """Returns the first 16 hexadecimal digits of a SHA-256 over sizes and positions, the same on every platform."""
    sizes = [len(part) for part in parts]
    sizes += named_test_sizes(parts) or []
    digest = hashlib.sha256(np.array(sizes, "<i8").tobytes())
    for part in parts:
        digest.update(np.asarray(part, "<i8").tobytes())
    return digest.hexdigest()[:16]


def count_classes(parts: Sequence[np.ndarray], labels: ArrayLike, num_classes: int) -> np.ndarray:
    """Counts each client's examples of each class, int64 `[K, C]`; labels are `[N]`, from 0 to C - 1."""
    array = np.asarray(labels)
    return np.stack([np.bincount(array[part], minlength=num_classes) for part in parts])
