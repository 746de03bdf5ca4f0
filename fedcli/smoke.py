"""A smoke reproduction: every registered method, two rounds on built-in data, which shows that all of them run.

Accuracies after two rounds say nothing of a method; what counts is that it ends with finite numbers.
"""

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedcli import declarations, registry
from fedcli.data import datasets
from fedcli.errors import UserError
from fedcli.runs import config
from fedcli.runs import run as runs

ROUNDS, EXAMPLES = 2, 240


@dataclass(frozen=True)
class Outcome:
    """What became of one method."""

    method: str
    protocol: str
    dataset: str
    seconds: float
    accuracy: float | None  # of the last round, a fraction; None where the run failed
    error: str = ""


def built_in(method: declarations.Method) -> tuple[str, str]:
    """The protocol and the built-in data set on which a method is tried.

    Raises:
        UserError: If its paper has no protocol for built-in data.
    """
    found = config.built_in(method)
    if found is None:
        raise UserError(
            f"the protocols of '{method.name}' know no built-in data (got {method.default_protocol or 'no default'}); "
            f"add one for one of {', '.join(datasets.BUILT_IN)}."
        )
    return found[1], found[0]


def smoke(names: Iterable[str], begin: Callable[[str], None] = lambda name: None) -> Iterator[Outcome]:
    """Runs methods one after the other; a failure of one does not stop the others.

    Args:
        names: Of registered methods.
        begin: Told the name of each method before it runs.

    Yields:
        What became of each.
    """
    for name in names:
        begin(name)
        protocol = dataset = ""
        start, accuracy, error = time.perf_counter(), None, ""
        try:
            protocol, dataset = built_in(registry.find_method(name))
            accuracy = _try(name, protocol, dataset)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        yield Outcome(name, protocol, dataset, time.perf_counter() - start, accuracy, error)


def _try(name: str, protocol: str, dataset: str) -> float:
    """Accuracy after the last round of a short run."""
    with tempfile.TemporaryDirectory() as folder:
        run = runs.run(
            name, protocol=protocol, dataset=dataset, rounds=ROUNDS, train_examples=EXAMPLES, local_epochs=2,
            checkpoint_every=ROUNDS, out=Path(folder) / "run",
        )  # fmt: skip
    return run.record["summary"]["last"]
