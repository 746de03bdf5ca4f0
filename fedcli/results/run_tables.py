"""Tables of the rounds and clients of runs."""

from collections.abc import Callable, Iterable

import pandas as pd

from fedcli.results.run_records import list_client_accuracies, list_round_numbers
from fedcli.runs.identity import FIRST_SETTINGS, key_of, settings_of
from fedcli.runs.schema import Record


def tabulate_rounds(record: Record) -> pd.DataFrame:
    """Makes a table of the numbers of a run's rounds, a row a round.

    Returns:
        The columns `round`, which counts from 1, `test_accuracy`, `terms/<name>`, `seconds/<part>`, `domains/<name>`
        and so on; of runs with `--per-class` also `macro_f1`, `balanced_accuracy` and `class_accuracy/<name>`.
        Accuracies are in percent; NaN stands for a missing number.
    """
    rows = list_round_numbers(record)
    columns = None if rows else ["round", "test_accuracy"]
    return pd.DataFrame(rows, columns=columns).astype({"test_accuracy": float})


def tabulate_clients(record: Record) -> pd.DataFrame:
    """Makes a table of the clients of a run, a row a client.

    Returns:
        The columns `client`, which counts from 0; `accuracy` after the last round, in percent, NaN for a client that
        was not tested, see `fedcli.core.evaluation.evaluate`; `examples`, their number; and `class/<name>`, the number
        of examples of a class.
    """
    division = record["partition"]
    accuracies = list_client_accuracies(record)
    table = pd.DataFrame({"client": range(len(accuracies)), "accuracy": accuracies, "examples": division["sizes"]})
    counts = pd.DataFrame(division["class_counts"], columns=record["class_names"])
    return table.astype({"accuracy": float}).join(counts.add_prefix("class/"))


def tabulate_client_rounds(record: Record) -> pd.DataFrame:
    """Makes a table of the clients' accuracies in the rounds in which they were recorded, a row a round and client.

    These rounds are the selected one, the last, and with `--per-client-every` every n-th.

    Returns:
        The columns `round`, which counts from 1; `client`, which counts from 0; and `accuracy` in percent.
    """
    rows = []
    for entry in record["rounds"]:
        accuracies = entry.get("client_accuracy")  # a fraction for each client; None where they were not tested
        if accuracies is None:
            continue
        for client, accuracy in accuracies.items():
            rows.append((entry["round"] + 1, int(client), 100 * accuracy))
    return pd.DataFrame(rows, columns=["round", "client", "accuracy"])


def tabulate_all(records: Iterable[Record], tabulate: Callable[[Record], pd.DataFrame]) -> pd.DataFrame:
    """Tabulates the rounds or clients of several runs.

    Args:
        records: The runs.
        tabulate: What makes the table of one run, as `tabulate_rounds` or `tabulate_clients`.

    Returns:
        The rows of all runs, with further columns before them that tell the runs apart.
    """
    frames = []
    for record in records:
        frame = tabulate(record)
        settings = settings_of(record)
        run_columns = {name: settings[name] for name in FIRST_SETTINGS}
        run_columns |= {"seed": record["seed"], "settings": key_of(settings)}
        if "label" in record:
            run_columns["method"] = record["label"]
        frames.append(frame.assign(**run_columns)[[*run_columns, *frame]])
    return pd.concat(frames, ignore_index=True)
