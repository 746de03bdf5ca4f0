"""The names of methods and data in tables and figures, as the papers write them."""

from fedcli.core.partition import PARTITIONS
from fedcli.data.catalog import KNOWN
from fedcli.registry import methods
from fedcli.runs.identity import is_packaged
from fedcli.runs.schema import Record


def name_method(record: Record) -> str:
    """Returns the name of a run's method as its paper writes it.

    A label that the user has given stands in its place. A user's own method has the name that its file declares.
    """
    if "label" in record:
        return record["label"]
    method = methods().get(record["method"])
    if method is None or not is_packaged(record):
        return record["method"]
    name, _, _ = method.title.partition(":")
    return name


def describe_data(dataset: str = "", partition: str = "", *details: str) -> str:
    """Describes data in words, as in "Digits, Dirichlet 0.5".

    Args:
        dataset: The name of the data set; empty to leave it out.
        partition: The partition as it is typed, as "dirichlet:0.5"; empty to leave it out.
        *details: Further words, which follow.
    """
    title = dataset[:1].upper() + dataset[1:]
    if dataset in KNOWN and KNOWN[dataset].title:
        title = KNOWN[dataset].title
    name, _, value = partition.partition(":")
    shown = partition
    if name in PARTITIONS and PARTITIONS[name].title:
        shown = PARTITIONS[name].title.format(value.replace(":", ", "))
    return ", ".join(filter(None, [title, shown, *details]))


def join_words(words: list[str]) -> str:
    """Joins words into a list as it stands in a sentence, as "a, b and c"."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
