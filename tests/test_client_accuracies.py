"""The accuracies of single clients: in which rounds they are kept, and the files that have them."""

import pandas as pd
import pytest

import fedcli
from fedcli.registry import find_method
from fedcli.runs.record import read_record
from fedcli.runs.resolve import resolve
from tests.commands import output_of
from tests.user_errors import raises_user_error


def test_files_of_rounds_and_of_clients_count_from_one_and_in_percent(tmp_path):
    options = {"dataset": "digits", "rounds": 3, "train_examples": 120, "device": "cpu"}
    record = fedcli.run("fedavg", out=tmp_path / "r" / "fedavg", **options).record
    fedcli.run("fedprox", out=tmp_path / "r" / "fedprox", **options)

    def table_per(kind):
        output_of("table", tmp_path / "r", "--per", kind, "--out", tmp_path / "table.csv")
        table = pd.read_csv(tmp_path / "table.csv")
        assert table["method"].unique().tolist() == ["fedavg", "fedprox"]
        return table

    assert table_per("round")["round"].tolist() == [1, 2, 3] * 2
    clients = table_per("client")
    assert len(clients) == 20
    assert clients["client"].min() == 0
    accuracies = [100 * share for share in record["rounds"][-1]["client_accuracy"].values()]
    of_fedavg = clients["accuracy"][clients["method"] == "fedavg"]
    assert of_fedavg.dropna().tolist() == pytest.approx(accuracies)

    rounds_with_clients = [entry["round"] for entry in record["rounds"] if "client_accuracy" in entry]
    assert rounds_with_clients == sorted({record["summary"]["selected_round"], 2})
    output_of("plot", tmp_path / "r", "--kind", "accuracies", "--out", tmp_path / "accuracies.png")


def test_the_clients_accuracies_of_every_nth_round_are_kept(tmp_path):
    options = {"dataset": "digits", "rounds": 5, "train_examples": 120, "local_epochs": 1}
    run = fedcli.run("fedavg", out=tmp_path / "run", per_client_every=2, **options)

    assert set(run.clients["round"]) == {2, 4, 5, run.record["summary"]["selected_round"] + 1}
    assert read_record(run.path)["rounds"] == run.record["rounds"]
    last_entry = run.record["rounds"][-1]
    percent_of = {int(client): 100 * share for client, share in last_entry["client_accuracy"].items()}
    of_last_round = run.clients[run.clients["round"] == 5]
    assert of_last_round.set_index("client")["accuracy"].to_dict() == percent_of

    output_of("table", run.path, "--per", "client-round", "--out", tmp_path / "table.csv")
    assert pd.read_csv(tmp_path / "table.csv")["round"].tolist() == run.clients["round"].tolist()


def resolve_with(method, **options):
    """Resolves the options of a run on the digits, whose protocol has a validation part unless they name another."""
    return resolve(find_method(method), {"protocol": "fedfm:digits", "dataset": "digits", **options}, need_data=False)


def test_accuracies_of_clients_are_only_where_there_are_any():
    """Clients without anything of their own have none, nor have rounds without a test."""
    with raises_user_error("--per-client-every 3 has rounds that are not tested (got"):
        resolve_with("fedavg", per_client_every=3, eval_every=2)
    with raises_user_error("--per-client-every 2 needs images or"):
        resolve_with("fedavg", per_client_every=2, validation=0.0, protocol="fedfa:digits")
    resolve_with("fedavg", per_client_every=2, protocol="own:personal")
    resolve_with("fedavg", per_client_every=2, validation=0.1)
    resolve_with("local", per_client_every=2, validation=0.0)
