"""Shares training examples out among clients: pure functions of labels, and of domains or writers.

A partition takes the class of each example (`labels`, `[N]`), the number of clients K from 1 to N and a seed. It
returns K parts, one for each client: int64 arrays of positions in `labels`, each in random order, because the end of a
part becomes the client's validation images; no example is used twice. It raises UserError where the data do not
suffice. To add one, enter it in `PARTITIONS`, as fedcli/data/datasets.py does for `file:PATH`, and name it in the help
of `--partition` (fedcli/runs/options.py). `./file.py:NAME` is a function of the user's own.
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


def _classes_in_order(labels: np.ndarray) -> Parts:
    """The ascending positions of the examples of each class, `[C][...]`."""
    return [np.flatnonzero(labels == label) for label in range(labels.max() + 1)]


def _classes_mixed(labels: np.ndarray, rng: np.random.Generator) -> Parts:
    """The positions of the examples of each class, `[C][...]`, in random order."""
    return [rng.permutation(positions) for positions in _classes_in_order(labels)]


def _deal(counts: np.ndarray, by_class: Parts, rng: Any) -> Parts:
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
    can_fit = num_clients * min_examples <= len(labels)
    max_draws = MAX_DRAWS if can_fit else 0
    in_order = _classes_in_order(labels)
    for _ in range(max_draws):
        by_class = [positions.copy() for positions in in_order]  # PFLlib's draw mixes them
        counts = _draw_counts(by_class, num_clients, capped, partial(draw_shares, alpha=alpha, rng=rng))
        if counts.sum(1).min() >= min_examples:
            if draw == "own":
                by_class = _classes_mixed(labels, rng)
            return _deal(counts, by_class, rng)
    raise _unfit(
        f"dirichlet:{alpha:g}", labels, num_clients, f"no draw gave every client min={min_examples}; use fewer "
        "clients, a larger concentration or a lower min=",
    )  # fmt: skip


def _draw_counts(
    by_class: Parts, num_clients: int, capped: bool, draw_shares: Callable[[np.ndarray, np.ndarray], np.ndarray | None]
) -> np.ndarray:
    """Draws once how many examples of each class, positions `[C][...]`, each client holds: `[K, C]`.

    For each class, `draw_shares` is given its positions and which clients take more, `[K]`, and returns the cumulative
    shares of the clients, `[K]`. Where it returns None, nobody holds anything.
    """
    num_examples = sum(map(len, by_class))
    counts = np.zeros((num_clients, len(by_class)), np.int64)
    takes_more = np.ones(num_clients, bool)
    for label, positions in enumerate(by_class):
        if capped:
            takes_more = counts.sum(1) * num_clients < num_examples
        cumulative = draw_shares(positions, takes_more)
        if cumulative is None:
            return np.zeros_like(counts)
        bounds = (cumulative * len(positions)).astype(np.int64)
        counts[:, label] = np.diff(bounds[:-1], prepend=0, append=len(positions))
    return counts


def _draw_shares(positions: np.ndarray, takes_more: np.ndarray, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Draws cumulative shares, in logarithms, so that not all underflow where alpha is tiny and the cap is reached."""
    num_clients = len(takes_more)
    # A Gamma(alpha) variate is one of Gamma(alpha + 1) times U^(1/alpha).
    log_gamma = np.log(rng.standard_gamma(alpha + 1, num_clients))
    log_uniform = np.log1p(-rng.random(num_clients))
    log_p = log_gamma + log_uniform / alpha
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
    by_label = _sorted_by(labels, rng)
    if remainder == "drop":
        shard_size = len(by_label) // num_shards
        by_label = by_label[: shard_size * num_shards]
    shards = np.array_split(by_label, num_shards)
    shards_of_client = rng.permutation(num_shards).reshape(num_clients, -1)
    parts = []
    for numbers in shards_of_client:
        own_shards = [shards[number] for number in numbers]
        parts.append(rng.permutation(np.concatenate(own_shards)))
    return parts


def _sorted_by(groups: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Positions `[N]` of the examples in order of their groups `[N]`, in random order within each, int64."""
    mixed = rng.permutation(len(groups))
    in_order = np.argsort(groups[mixed], kind="stable")
    return mixed[in_order].astype(np.int64)


def leaves_remainder(flag: str, num_clients: int, num_images: int | None) -> bool:
    """Whether `classes:C` cannot deal so many images in equal shards, so that `remainder` matters.

    It may matter where the number of images, or those of the single domains, are not known.
    """
    around, _, skew = flag.rpartition("+")
    name, _, count = skew.partition(":")
    if name != "classes":
        return False
    is_within_domains = around != ""
    if is_within_domains or num_images is None:
        return True
    num_shards = num_clients * int(count)
    return num_images % num_shards > 0


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
    num_classes = len(sizes)
    exact_share = Fraction(share).limit_denominator(10**6)  # in floats, 500 * (1 - 0.8) / 10 is below 10
    budget = num_classes * int(sizes.min()) // num_clients
    base = int(budget * (1 - exact_share) / num_classes)
    extra = int(budget * exact_share / dominant_classes)
    first = dominant_classes * np.arange(num_clients)
    is_dominant = _consecutive(first, dominant_classes, num_classes)  # [K, C]
    counts = base + extra * is_dominant
    lacks_base = base == 0 and exact_share < 1
    lacks_extra = extra == 0
    is_too_much = dominant_classes > num_classes or (counts.sum(0) > sizes).any()
    if lacks_base or lacks_extra or is_too_much:
        remedy = f"make the clients times their dominant classes a multiple of {num_classes}, or choose another share"
        raise _unfit(f"dominant:{dominant_classes}", labels, num_clients, remedy)
    rng = generator(seed, "partition")
    return _deal(counts, _classes_mixed(labels, rng), rng)


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
        raise _unfit(f"missing:{missing_classes}", labels, num_clients, "use fewer missing classes or fewer clients")
    rng = generator(seed, "partition")
    return _deal(holds * quota, _classes_mixed(labels, rng), rng)


def _consecutive(first: np.ndarray, count: int, num_classes: int) -> np.ndarray:
    """Whether each class is among the `count` from each client's `first` `[K]` on (mod C), bool `[K, C]`."""
    steps_after_first = (np.arange(num_classes) - first[:, None]) % num_classes
    return steps_after_first < count


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
            raise UserError(f"in domain {number}, {mistake}") from None
        parts += [positions[part] for part in parts_within]
    return parts


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
        return _like_writers(labels, num_clients, writer_number, rng)
    client_of_writer = np.empty(num_writers, np.int64)
    client_of_writer[rng.permutation(num_writers)] = np.sort(np.arange(num_writers) % num_clients)
    client_of_example = client_of_writer[writer_number]
    by_client = _sorted_by(client_of_example, rng)
    ends = np.bincount(client_of_example).cumsum()
    return np.split(by_client, ends[:-1])


def _like_writers(labels: np.ndarray, num_clients: int, writer_number: np.ndarray, rng: np.random.Generator) -> Parts:
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
    return _deal(counts, _classes_mixed(labels, rng), rng)


class Option(NamedTuple):
    """A part of a partition's flag between colons."""

    prefix: str  # with which it begins; empty for the required one, which comes first
    keyword: str  # of the function
    read: Callable[[str], Any]  # its value, of what stands behind the prefix


class PartitionKind(NamedTuple):
    """A kind of partition that a flag can name."""

    function: Callable[..., Parts]
    usage: str  # how its flag is written
    options: tuple[Option, ...] = ()
    needs: str = ""  # of the data set beside labels: "domain", "writer", "place" or nothing
    takes_remainder: bool = False  # as `classes`, of what is left over when images are divided into shards
    title: str = ""  # what titles call it, with `{}` for its options; empty where the flag itself stands there


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
    "iid": PartitionKind(iid, "iid", title="IID"),
    "dirichlet": PartitionKind(
        dirichlet, "dirichlet:ALPHA[:plain][:min=COUNT][:draw=pfllib], such as dirichlet:0.5, ALPHA from 1e-6 to 1e6",
        options=(
            Option("", "alpha", partial(read_number, read=float, low=1e-6, high=1e6)),
            Option("plain", "capped", partial(_read_switch, value=False)),
            Option("min=", "min_examples", read_number),
            Option("draw=", "draw", partial(_read_word, allowed=("own", "pfllib"))),
        ),
        title="Dirichlet {}",
    ),
    "classes": PartitionKind(
        classes, "classes:COUNT, such as classes:2", options=(Option("", "classes_per_client", read_number),),
        takes_remainder=True, title="{} classes a client",
    ),
    "dominant": PartitionKind(
        dominant, "dominant:COUNT[:share=FRACTION], such as dominant:1:share=4/9",
        options=(
            Option("", "dominant_classes", read_number),
            Option("share=", "share", partial(read_number, read=Fraction, low=1e-6, high=1)),
        ),
        title="dominant classes a client: {}",
    ),
    "missing": PartitionKind(
        missing, "missing:COUNT, such as missing:3",
        options=(Option("", "missing_classes", partial(read_number, low=0)),),
        title="missing classes a client: {}",
    ),
    "domains": PartitionKind(domains, "domains or domains+LABEL_SKEW, such as domains+dirichlet:0.5", needs="domain"),
    "writers": PartitionKind(
        writers, "writers[:shares]",
        options=(Option("shares", "by_shares", partial(_read_switch, value=True)),),
        needs="writer", title="whole writers",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Partition:
    """A partition that is chosen but not yet drawn; two are equal whose flags are."""

    flag: str  # in the one canonical spelling
    function: Callable[..., Parts] = field(compare=False)  # of labels, number of clients, what it needs, and the seed
    needs: str = field(default="", compare=False)  # see `PartitionKind`

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
        if self.needs == "":
            return self.function(labels, num_clients, seed=seed)
        groups = writer if domain is None else domain
        columns = {"domain": domain, "writer": writer, "place": place, "groups": groups}
        needed = columns[self.needs]
        if needed is None and self.needs == "groups":  # a user's function gets them where there are some
            return self.function(labels, num_clients, seed=seed)
        if needed is None:
            raise UserError(
                f"partition '{self.flag}' needs a data set with {self.needs}s (got one without); choose such a data "
                "set, import this one anew, or use --partition iid."
            )
        return self.function(labels, num_clients, seed=seed, **{self.needs: np.asarray(needed, np.int64)})

    def scaled(self, share: float) -> "Partition":
        """Returns the partition for a share of the data: the default of `min=` shrinks with it, at least to 1."""
        has_default = re.match(r"(domains\+)?dirichlet:(?!.*:min=)", self.flag)
        if share >= 1 or not has_default:
            return self
        least = max(1, round(share * MIN_EXAMPLES))
        return from_flag(f"{self.flag}:min={least}")


def from_flag(flag: str, remainder: str = "spread") -> Partition:
    """Reads a partition from a flag; checks what needs no data. For the remainder see `classes`.

    Raises:
        UserError: An unknown name, or a parameter that is missing, superfluous or out of range.
    """
    if is_from_file(flag):
        return Partition(flag, partial(_parts_from_user, from_file(flag, "partition")), "groups")
    around, plus, skew = flag.partition("+")
    if around == "domains":
        within = from_flag(skew if plus else "iid", remainder)
        if within.needs:
            raise UserError(f"partition 'domains' needs a label skew (got '{flag}'); write domains+dirichlet:0.5.")
        spelling = f"domains+{within.flag}".removesuffix("+iid")
        return Partition(spelling, partial(domains, within=within), "domain")
    name, *texts = flag.split(":")
    if name not in PARTITIONS:
        raise unknown("partition", name, PARTITIONS, f"the partitions are {', '.join(PARTITIONS)}, and ./file.py:NAME.")
    kind = PARTITIONS[name]
    try:
        values = _read_options(kind, texts)
    except (LookupError, ValueError, ZeroDivisionError):  # the last for a share of 4/0
        raise UserError(f"partition '{name}' cannot be read (got '{flag[:80]}'); write {kind.usage}.") from None
    spelling = ":".join([name, *_spelled(kind, values)])
    if kind.takes_remainder:
        values["remainder"] = remainder
    return Partition(spelling, partial(kind.function, **values), kind.needs)


def _read_options(kind: PartitionKind, texts: Sequence[str]) -> dict[str, Any]:
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


def _spelled(kind: PartitionKind, values: dict[str, Any]) -> list[str]:
    """The parts of a flag that say these values, in the order of the options; a default is left out."""
    texts = []
    for option in kind.options:
        value = values.get(option.keyword)
        default = signature(kind.function).parameters[option.keyword].default
        if value in (None, default):
            continue
        if isinstance(value, bool):
            texts.append(option.prefix)
        else:
            texts.append(option.prefix + str(value).removesuffix(".0"))
    return texts


def _parts_from_user(
    function: FromFile, labels: np.ndarray, num_clients: int, seed: int, **groups: np.ndarray
) -> Parts:
    """Returns what a user's function gives, checked, as int64; it gets `groups` `[N]` if it has such an argument."""
    parameters = signature(function.function).parameters
    asked_for = {name: values.copy() for name, values in groups.items() if name in parameters}
    with blame(function.path):
        lists = function(labels.copy(), num_clients, generator(seed, "partition"), **asked_for)
        parts = [np.asarray(positions) for positions in lists]
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
