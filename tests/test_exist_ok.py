"""A run in the place of one that is there: `exist_ok` renames what was there before, and no folder of a user."""

import pytest

import fedcli
from fedcli.errors import NonFiniteLoss, UserError
from fedcli.runs.lock import InUse, locked
from fedcli.runs.record import write_record
from tests.example_records import make_record
from tests.run_options import TWO_CLIENTS
from tests.user_errors import raises_user_error

pytestmark = pytest.mark.long(worker=1)


def test_exist_ok_moves_the_run_before_aside_and_no_folder_of_a_user(tmp_path):
    first = fedcli.run("fedavg", out=tmp_path / "one", **TWO_CLIENTS)
    with raises_user_error("never overwritten"):
        fedcli.run("fedavg", out=tmp_path / "one", **TWO_CLIENTS)

    second = fedcli.run("fedavg", out=tmp_path / "one", exist_ok=True, **{**TWO_CLIENTS, "rounds": 1})
    assert (second.path / "record.json").is_file()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one", "one-1"]
    assert len(second.record["rounds"]) == 1
    assert fedcli.load(tmp_path / "one-1").record["rounds"] == first.record["rounds"]

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with raises_user_error("never overwritten"):
        fedcli.run("fedavg", out=tmp_path / "mine", exist_ok=True, **TWO_CLIENTS)


@pytest.mark.parametrize("out", [".", "one/..", "../here"])
def test_exist_ok_refuses_to_rename_the_working_folder(out, tmp_path, monkeypatch):
    folder = tmp_path / "here"
    (folder / "one").mkdir(parents=True)
    write_record(folder, make_record())
    monkeypatch.chdir(folder)
    with raises_user_error("exist_ok cannot rename the working folder"):
        fedcli.run("fedavg", out=out, exist_ok=True, **TWO_CLIENTS)
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@pytest.mark.parametrize("methods", ["fedavg", "fedavg,fedprox"])
@pytest.mark.parametrize(
    "refused",
    [
        {"lr": -1},
        {"learning_rate": 0.1},
        {"dataset": "no-such-set"},
        {"backbone": "resnet19"},
        {"seeds": []},
        {"tuned": "nowhere"},
        {"set": {"fedpox": {"lr": 0.1}}},
        {"log": "tensorbord"},
    ],
    ids=lambda refused: next(iter(refused)),
)
def test_a_call_that_is_refused_leaves_the_runs_before_under_their_name(methods, refused, tmp_path):
    fedcli.run(methods, out=tmp_path / "out", **{**TWO_CLIENTS, "rounds": 1})
    with pytest.raises((UserError, TypeError)):
        fedcli.run(methods, out=tmp_path / "out", exist_ok=True, **{**TWO_CLIENTS, "rounds": 1, **refused})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert len(list(tmp_path.rglob("record.json"))) == len(methods.split(","))


def test_a_run_that_fails_once_it_has_begun_leaves_both_folders(tmp_path):
    fedcli.run("fedavg", out=tmp_path / "out", **{**TWO_CLIENTS, "rounds": 1})
    with pytest.raises(NonFiniteLoss):
        fedcli.run("fedavg", out=tmp_path / "out", exist_ok=True, **{**TWO_CLIENTS, "lr": 1e30})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out-1"]
    assert fedcli.load(tmp_path / "out").record["status"] == "failed"
    assert fedcli.load(tmp_path / "out-1").record["status"] == "finished"


def test_exist_ok_leaves_a_folder_alone_in_which_a_process_runs(tmp_path):
    fedcli.run("fedavg,fedprox", out=tmp_path / "out", **{**TWO_CLIENTS, "rounds": 1})
    with locked(tmp_path / "out" / "fedprox"), pytest.raises(InUse):
        fedcli.run("fedavg,fedprox", out=tmp_path / "out", exist_ok=True, **{**TWO_CLIENTS, "rounds": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_exist_ok_keeps_the_runs_of_several_methods_and_values_together(tmp_path):
    options = {**TWO_CLIENTS, "rounds": 1, "out": tmp_path / "out", "exist_ok": True}

    def assert_runs_are_in_the_folder(runs):
        assert [run.path for run in fedcli.load(tmp_path / "out")] == sorted(run.path for run in runs)

    assert_runs_are_in_the_folder(fedcli.run("fedavg,fedprox", **options))
    assert_runs_are_in_the_folder(fedcli.run("fedavg,fedprox,local", **options))
    assert_runs_are_in_the_folder(fedcli.run("fedavg", lr=[0.1, 0.2], **options))
    assert len(fedcli.load(tmp_path / "out-1")) == 2
    assert len(fedcli.load(tmp_path / "out-2")) == 3
    assert len(fedcli.load(tmp_path / "out")) == 2
    fedcli.run("fedavg,fedprox", seeds=[0, 1], **options)
    assert len(fedcli.load(tmp_path / "out-3")) == 2

    # A folder of the runs of several calls is none of one call.
    with raises_user_error("never overwritten"):
        fedcli.run("fedavg", **{**options, "out": tmp_path})
