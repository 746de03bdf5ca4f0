"""Runs in a notebook: the quickstart is executed, and what a run shows of itself."""

from pathlib import Path
from unittest.mock import Mock

import pytest

import fedcli
from fedcli import returned
from fedcli.errors import NonFiniteLoss, UserError
from fedcli.runs import progress
from fedcli.runs.lock import InUse, locked
from fedcli.runs.record import write_record
from tests.example_records import make_record

pytestmark = pytest.mark.long(worker=1)

DOCS = Path(__file__).parent.parent / "docs"
QUICKSTART = DOCS / "quickstart.ipynb"
COMPARISON = DOCS / "comparison.ipynb"
TWO_CLIENTS = {
    "dataset": "digits", "protocol": "fedfm:digits", "train_examples": 60, "num_clients": 2, "cohort_size": 2,
    "rounds": 2, "device": "cpu", "partition": "iid",
}  # fmt: skip


def outputs(book):
    """What the cells have shown or printed, in their order."""
    return [output for cell in book.cells for output in cell.get("outputs", ())]


def outputs_of_kind(book, kind):
    """What the cells have shown in one form."""
    return [output["data"][kind] for output in outputs(book) if kind in output.get("data", {})]


def test_the_quickstart_runs_and_is_committed_with_its_pictures(tmp_path):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    book = nbformat.read(QUICKSTART, as_version=4)
    assert QUICKSTART.stat().st_size < 200_000
    assert len(outputs_of_kind(book, "image/png")) == 1
    assert sum("data:image/png" in page for page in outputs_of_kind(book, "text/html")) == 2

    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()

    assert len(outputs_of_kind(book, "image/png")) == 1
    pages = outputs_of_kind(book, "text/html")
    assert sum("data:image/png" in page for page in pages) == 2
    assert sum("<progress" in page and 'value="3" max="3"' in page for page in pages) == 5


def test_the_comparison_tunes_draws_and_writes_a_table_in_twelve_cells(tmp_path):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    book = nbformat.read(COMPARISON, as_version=4)
    assert len(book.cells) <= 12
    assert COMPARISON.stat().st_size < 200_000
    assert len(outputs_of_kind(book, "image/png")) == 2
    for cell in book.cells:
        cell.source = cell.source.replace('"rounds": 4', '"rounds": 1, "local_epochs": 1')

    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()

    trials, table = outputs_of_kind(book, "text/html")
    assert trials.count("<tr") == 1 + 9
    assert table.count("<tr") == 1 + 3
    assert len(outputs_of_kind(book, "image/png")) == 2
    assert (tmp_path / "curves.pdf").read_bytes().startswith(b"%PDF")
    *_, latex = [output["text"] for output in outputs(book) if "text" in output]
    methods = []
    for line in latex.splitlines():
        if line.endswith(r"\\") and "Method" not in line:
            method, *_ = line.split(" & ")
            methods.append(method)
    assert methods == ["FedAvg", "FedProx", "SCAFFOLD"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fedcli.run("fedavg", out=tmp_path_factory.mktemp("runs") / "<b>one", eval_every=2, **TWO_CLIENTS)


def test_the_history_is_a_table_of_rounds_with_accuracies_in_percent(run):
    history = run.history
    rounds = run.record["rounds"]
    *_, last = rounds
    assert history["round"].tolist() == [1, 2]
    assert history["test_accuracy"].isna().tolist() == [True, False]
    assert history["test_accuracy"].iloc[-1] == 100 * last["test_accuracy"]
    assert history["terms/cross_entropy"].tolist() == [entry["terms"]["cross_entropy"] for entry in rounds]
    assert history["seconds/train"].tolist() == [entry["seconds"]["train"] for entry in rounds]
    assert fedcli.load(run.path).history.equals(history)
    assert fedcli.load(run.path).plot().axes


def test_a_run_shows_itself_in_a_line_a_table_and_a_picture(run):
    assert repr(run).startswith("Run(fedavg on digits, seed 0: ")
    page = run._repr_html_()
    assert "data:image/png;base64," in page
    assert "&lt;b&gt;one" in page
    assert "<b>" not in page
    figure = run.plot()
    assert figure.axes[0].lines[0].get_xdata().tolist() == [2]
    assert figure._repr_png_().startswith(b"\x89PNG")
    several = returned.Runs([run]) + returned.Runs([run])
    assert several._repr_html_().count("fedavg") == 2
    assert isinstance(several.plot(), type(figure))


def test_exist_ok_moves_the_run_before_aside_and_no_folder_of_a_user(tmp_path):
    first = fedcli.run("fedavg", out=tmp_path / "one", **TWO_CLIENTS)
    with pytest.raises(UserError, match="never overwritten"):
        fedcli.run("fedavg", out=tmp_path / "one", **TWO_CLIENTS)

    second = fedcli.run("fedavg", out=tmp_path / "one", exist_ok=True, **{**TWO_CLIENTS, "rounds": 1})
    assert (second.path / "record.json").is_file()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one", "one-1"]
    assert len(second.record["rounds"]) == 1
    assert fedcli.load(tmp_path / "one-1").record["rounds"] == first.record["rounds"]

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(UserError, match="never overwritten"):
        fedcli.run("fedavg", out=tmp_path / "mine", exist_ok=True, **TWO_CLIENTS)


@pytest.mark.parametrize("out", [".", "one/..", "../here"])
def test_exist_ok_refuses_to_rename_the_working_folder(out, tmp_path, monkeypatch):
    folder = tmp_path / "here"
    (folder / "one").mkdir(parents=True)
    write_record(folder, make_record())
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match="exist_ok cannot rename the working folder"):
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
    with pytest.raises(UserError, match="never overwritten"):
        fedcli.run("fedavg", **{**options, "out": tmp_path})


def test_runs_of_folders_are_a_table_with_the_options_in_which_they_differ(run, tmp_path):
    of_two_seeds = fedcli.run("fedavg", out=tmp_path / "two", lr=0.5, seeds=[0, 1], **TWO_CLIENTS)
    runs = [run, *of_two_seeds]

    table = fedcli.frame(run.path, tmp_path, metrics=["best", "clients:mean"])
    assert table["folder"].tolist() == [run.path for run in runs]
    assert table["lr"].tolist() == [0.05, 0.5, 0.5]
    assert table["eval_every"].tolist() == [2, 1, 1]
    assert table["seed"].tolist() == [0, 0, 1]
    assert table["selected"].tolist() == [100 * run.record["summary"]["selected"] for run in runs]
    assert (table["best, %"] >= table["last"]).all()
    assert "rounds" not in table

    with pytest.raises(UserError, match="there is no run at"):
        fedcli.frame(tmp_path / "none")


def test_a_run_that_fails_in_its_first_round_shows_no_time_that_is_left(monkeypatch):
    """The time would be longer than Python counts."""
    monkeypatch.setattr(progress, "time", Mock(perf_counter=Mock(side_effect=[0.0, 1e5])))
    listener = progress.ProgressListener()
    listener.start({"rounds": [], "config": {"rounds": 10**4}}, Path("run"), 100, 0)
    assert listener.position() == (0, ["round 0/10000", "0 samples/s"])
