"""What tables and figures call methods and data: as the papers write them."""

from fedcli.core.partition import PARTITIONS
from fedcli.data.catalog import KNOWN
from fedcli.registry import methods
from fedcli.runs.identity import is_packaged
from fedcli.runs.schema import Record


def name_method(record: Record) -> str:
    """The name of a run's method as its paper writes it; the user's label or the name of a user's method as it is."""
    if "label" in record:
        return record["label"]
    method = methods().get(record["method"])
    if method is None or not is_packaged(record):
        return record["method"]
    name, _, _ = method.title.partition(":")
    return name


def describe_data(dataset: str = "", partition: str = "", *details: str) -> str:
    """Data in words, as in "Digits, Dirichlet 0.5"; a partition without words of its own as it is typed."""
    title = dataset[:1].upper() + dataset[1:]
    if dataset in KNOWN and KNOWN[dataset].title:
        title = KNOWN[dataset].title
    name, _, value = partition.partition(":")
    shown = partition
    if name in PARTITIONS and PARTITIONS[name].title:
        shown = PARTITIONS[name].title.format(value.replace(":", ", "))
    return ", ".join(filter(None, [title, shown, *details]))


def join_words(words: list[str]) -> str:
    """Words as a list in a sentence: "a, b and c"."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
