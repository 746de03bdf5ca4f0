"""What a shell completes: names of the index and of data sets, and the choices of an option."""

from collections.abc import Callable, Sequence

from fedcli.cli.index import index


def completion(*kinds: str, choices: Sequence[str] = ()) -> Callable[[str], list[str]]:
    """Make a function that completes a text to one of the choices, or to a name of a kind: "method", "dataset", ..."""

    def complete(incomplete: str) -> list[str]:
        names = list(choices)
        for kind in kinds:
            names += index().names(kind)
        if any(kind.endswith("dataset") for kind in kinds):
            from fedcli.data import datasets

            names += datasets.names()
        return [name for name in names if name.startswith(incomplete.lower())]

    return complete
