"""Partitions of the training examples among clients: how a flag names one, and what is counted of it.

To add a rule, write it into `partition_rules.py`, enter it in `PARTITION_KINDS`, and name it in the help of `partition`
in fedcli/runs/options.py. `./file.py:NAME` is a function of the user's own.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedcli.core.draws import generator
from fedcli.core.image_set import ImageSet
from fedcli.core.numbers_in_flags import read_number
from fedcli.core.partition_files import listed_parts
from fedcli.core.partition_rules import (
    Unfit,
    classes,
    dirichlet,
    domains,
    dominant,
    iid,
    missing,
    writers,
)
from fedcli.core.parts import Parts
from fedcli.errors import UserError, unknown
from fedcli.userfiles import UserFunction, blame, find_user_function, names_user_file


class Option(NamedTuple):
    """A word of a partition's flag, between colons."""

    prefix: str  # with which it begins; empty for the required one, which comes first
    keyword: str  # of the rule
    read: Callable[[str], Any]  # its value, of what stands behind the prefix
    is_default_scaled: bool = False  # by `Partition.scaled`, so that the default itself is not left out of a flag


class PartitionKind(NamedTuple):
    """A kind of partition that a flag can name."""

    name: str  # with which its flag begins
    # Of labels, number of clients, seed and its options, and of the data by the names of its arguments: `domain`,
    # `writer`, `place`, `domain_names` or `groups`.
    rule: Callable[..., Parts]
    usage: str  # how its flag is written
    options: tuple[Option, ...] = ()
    column: str = ""  # that the data set must have beside labels: "domain", "writer" or "place"; or none
    takes_path: bool = False  # as its only option, which may have colons
    title: str = ""  # what titles call it, with `{}` for its options; empty where the flag itself stands there

    def takes(self, keyword: str) -> bool:
        """Whether the rule has an argument of this name."""
        return keyword in signature(self.rule).parameters

    def default_of(self, option: Option) -> Any:
        """Returns the value of an option that a flag leaves out."""
        return signature(self.rule).parameters[option.keyword].default


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


def _read_path(text: str) -> str:
    """Reads a path; raises ValueError for none."""
    if not text:
        raise ValueError
    return text


PARTITION_KINDS = (
    PartitionKind("iid", iid, "iid", title="IID"),
    PartitionKind(
        "dirichlet", dirichlet,
        "dirichlet:ALPHA[:plain][:min=COUNT][:draw=pfllib], such as dirichlet:0.5, ALPHA from 1e-6 to 1e6",
        options=(
            Option("", "alpha", partial(read_number, read=float, low=1e-6, high=1e6)),
            Option("plain", "capped", partial(_read_switch, value=False)),
            Option("min=", "min_examples", read_number, is_default_scaled=True),
            Option("draw=", "draw", partial(_read_word, allowed=("own", "pfllib"))),
        ),
        title="Dirichlet {}",
    ),
    PartitionKind(
        "classes", classes, "classes:COUNT, such as classes:2",
        options=(Option("", "classes_per_client", read_number),), title="{} classes a client",
    ),
    PartitionKind(
        "dominant", dominant, "dominant:COUNT[:share=FRACTION], such as dominant:1:share=4/9",
        options=(
            Option("", "dominant_classes", read_number),
            Option("share=", "share", partial(read_number, read=Fraction, low=1e-6, high=1)),
        ),
        title="dominant classes a client: {}",
    ),
    PartitionKind(
        "missing", missing, "missing:COUNT, such as missing:3",
        options=(Option("", "missing_classes", partial(read_number, low=0)),),
        title="missing classes a client: {}",
    ),
    PartitionKind(
        "domains", domains, "domains or domains+LABEL_SKEW, such as domains+dirichlet:0.5", column="domain",
    ),
    PartitionKind(
        "writers", writers, "writers[:shares]",
        options=(Option("shares", "by_shares", partial(_read_switch, value=True)),),
        column="writer", title="whole writers",
    ),
    PartitionKind(
        "file", listed_parts, "file:PATH, such as file:split.json", options=(Option("", "path", _read_path),),
        column="place", takes_path=True,
    ),
)  # fmt: skip
PARTITIONS = {kind.name: kind for kind in PARTITION_KINDS}


@dataclass(frozen=True)
class Partition:
    """A partition that is chosen but not yet drawn; two are equal whose flags are."""

    flag: str  # in the one canonical spelling
    kind: PartitionKind = field(compare=False)
    values: dict[str, Any] = field(compare=False)  # of the rule's keywords

    def __call__(  # all that a rule may need of a data set
        self, labels: ArrayLike, num_clients: int, seed: int, domain: Any = None, writer: Any = None, place: Any = None,
        domain_names: Sequence[str] = (),
    ) -> Parts:  # fmt: skip
        """Shares labels `[N]` out among K clients; domain, writer and place are `[N]`, where the data have them.

        In messages a domain is called by its name in `domain_names`, or by its number where these are not given.

        Raises:
            UserError: The data do not allow this partition.
        """
        labels = np.asarray(labels, np.int64)
        if not 1 <= num_clients <= len(labels):
            raise UserError(
                f"every client needs a training image (got {num_clients} clients and {len(labels)} images); use "
                f"--num-clients 1 to {len(labels)}."
            )
        columns = {"domain": domain, "writer": writer, "place": place}
        needed = self.kind.column
        if needed and columns[needed] is None:
            raise UserError(
                f"partition '{self.flag}' needs a data set with {needed}s (got one without); choose such a data "
                "set, import this one anew, or use --partition iid."
            )
        image_facts: dict[str, Any] = {
            name: None if column is None else np.asarray(column, np.int64) for name, column in columns.items()
        }
        image_facts["domain_names"] = domain_names
        image_facts["groups"] = image_facts["writer"] if domain is None else image_facts["domain"]
        arguments = {name: value for name, value in image_facts.items() if self.kind.takes(name)}
        try:
            return self.kind.rule(labels, num_clients, seed=seed, **arguments, **self.values)
        except Unfit as why:
            sizes = np.bincount(labels)
            raise UserError(
                f"partition '{self.flag}' does not fit the data (got {num_clients} clients and {len(labels)} training "
                f"examples of {len(sizes)} classes; the rarest, class {sizes.argmin()}, has {sizes.min()}); {why}."
            ) from None

    def divide(self, images: ImageSet, num_clients: int, seed: int) -> Parts:
        """Shares the training images of a data set out among K clients; raises what a call raises."""
        return self(
            images.y_train,
            num_clients,
            seed,
            domain=images.domain_train,
            writer=images.writer_train,
            place=images.place_train,
            domain_names=images.domain_names,
        )

    @property
    def is_listed(self) -> bool:
        """Whether a file lists the images of each client, by their places in the set's files."""
        return self.kind.column == "place"

    @property
    def within(self) -> "Partition | None":
        """The partition of the examples of each domain; None where the partition does not go by domains."""
        return self.values.get("within")

    def scaled(self, share: float) -> "Partition":
        """Returns the partition for a share of the data: the default of `min=` shrinks with it, at least to 1."""
        if share >= 1:
            return self
        if self.within is not None:
            return _within_domains(self.within.scaled(share))
        scaled_defaults = {}
        for option in self.kind.options:
            if option.is_default_scaled and option.keyword not in self.values:
                scaled_defaults[option.keyword] = max(1, round(share * self.kind.default_of(option)))
        if not scaled_defaults:
            return self
        return _with_values(self.kind, {**self.values, **scaled_defaults})


def from_flag(flag: str, remainder: str = "spread") -> Partition:
    """Reads a partition from a flag; checks what needs no data. For the remainder see `classes`.

    Raises:
        UserError: An unknown name, or a parameter that is missing, superfluous or out of range.
    """
    if names_user_file(flag):
        function = find_user_function(flag, "partition")
        function.refuse_other_order("labels", "num_clients", "rng", by_keyword=["groups"])
        return Partition(flag, _USER_KIND, {"function": function})
    around, plus, skew = flag.partition("+")
    if around == "domains":
        within = from_flag(skew if plus else "iid", remainder)
        if within.kind.column:
            raise UserError(f"partition 'domains' needs a label skew (got '{flag}'); write domains+dirichlet:0.5.")
        return _within_domains(within)
    name, *texts = flag.split(":")
    if name not in PARTITIONS:
        raise unknown("partition", name, PARTITIONS, f"the partitions are {', '.join(PARTITIONS)}, and ./file.py:NAME.")
    kind = PARTITIONS[name]
    if kind.takes_path:
        _, *texts = flag.split(":", maxsplit=1)
    try:
        values = _read_options(kind, texts)
    except (LookupError, ValueError, ZeroDivisionError):  # the last for a share of 4/0
        raise UserError(f"partition '{name}' cannot be read (got '{flag[:80]}'); write {kind.usage}.") from None
    if kind.takes("remainder"):
        values["remainder"] = remainder
    return _with_values(kind, values)


def _with_values(kind: PartitionKind, values: dict[str, Any]) -> Partition:
    """Returns the partition of a kind with these values of its options."""
    return Partition(":".join([kind.name, *_spell_options(kind, values)]), kind, values)


def _within_domains(within: Partition) -> Partition:
    """Returns the partition by domains that divides the examples of each as another one does."""
    flag = f"domains+{within.flag}".removesuffix("+iid")
    return Partition(flag, PARTITIONS["domains"], {"within": within})


def takes_remainder(flag: str) -> bool:
    """Whether a flag names a partition into shards, perhaps within domains, which the option `remainder` is for."""
    name, _, _ = flag.removeprefix("domains+").partition(":")
    return name in PARTITIONS and PARTITIONS[name].takes("remainder")


def leaves_remainder(flag: str, num_clients: int, num_images: int | None) -> bool:
    """Whether `classes:C` cannot deal so many images in equal shards, so that `remainder` matters.

    It may matter where the number of images, or those of the single domains, are not known.
    """
    if not takes_remainder(flag):
        return False
    chosen = from_flag(flag)
    if chosen.within is not None or num_images is None:
        return True
    num_shards = num_clients * chosen.values["classes_per_client"]
    return num_images % num_shards > 0


def _read_options(kind: PartitionKind, texts: Sequence[str]) -> dict[str, Any]:
    """The values of a partition's options, by keyword, from the words of its flag.

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


def _spell_options(kind: PartitionKind, values: dict[str, Any]) -> list[str]:
    """The words of a flag that say these values, in the order of the options; a default is left out, see `Option`."""
    texts = []
    for option in kind.options:
        value = values.get(option.keyword)
        is_left_out = value == kind.default_of(option) and not option.is_default_scaled
        if value is None or is_left_out:
            continue
        text = option.prefix
        if isinstance(value, float):
            text += str(value).removesuffix(".0")
        elif not isinstance(value, bool):
            text += str(value)
        texts.append(text)
    return texts


def _parts_from_user(
    labels: np.ndarray, num_clients: int, seed: int, function: UserFunction, groups: np.ndarray | None
) -> Parts:
    """Returns what a user's function gives, checked, as int64.

    It gets `groups` `[N]`, domains or else writers, if it has such an argument and the data have them.
    """
    keywords = {}
    if groups is not None and "groups" in signature(function.function).parameters:
        keywords["groups"] = groups.copy()
    with blame(function.path):
        lists = function(labels.copy(), num_clients, generator(seed, "partition"), **keywords)
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
    return Parts([part.astype(np.int64) for part in parts])


def _are_positions(part: np.ndarray, num_examples: int) -> bool:
    """Whether an array is a list of whole numbers below the number of examples; an empty list is, of any type."""
    if part.ndim != 1:
        return False
    if len(part) == 0:
        return True
    are_whole = part.dtype.kind in "iu"
    return are_whole and part.min() >= 0 and part.max() < num_examples


_USER_KIND = PartitionKind("./file.py:NAME", _parts_from_user, "./file.py:NAME")


def fingerprint(parts: Parts) -> str:
    """Returns the first 16 hexadecimal digits of a SHA-256 over sizes and positions, the same on every platform."""
    sizes = [len(part) for part in parts]
    sizes += parts.num_test or []
    digest = hashlib.sha256(np.array(sizes, "<i8").tobytes())
    for part in parts:
        digest.update(np.asarray(part, "<i8").tobytes())
    return digest.hexdigest()[:16]


def count_classes(parts: Parts, labels: ArrayLike, num_classes: int) -> np.ndarray:
    """Counts each client's examples of each class, int64 `[K, C]`; labels are `[N]`, from 0 to C - 1."""
    array = np.asarray(labels)
    return np.stack([np.bincount(array[part], minlength=num_classes) for part in parts])


def count_unused(parts: Parts, num_examples: int) -> int:
    """Returns how many of the examples no client holds."""
    return num_examples - len(np.unique(np.concatenate(parts)))


def lost_classes(parts: Parts, labels: ArrayLike) -> list[int]:
    """Returns the classes that have examples in `labels` `[N]` of which no client holds any."""
    array = np.asarray(labels)
    return np.setdiff1d(array, array[np.concatenate(parts).astype(np.int64)]).tolist()
