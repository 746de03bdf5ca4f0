"""Runs in a notebook: the quickstart is executed, and what a run shows of itself."""

from pathlib import Path
from unittest.mock import Mock

import pytest

import fedcli
from fedcli import returned
from fedcli.runs import progress
from tests.run_options import TWO_CLIENTS
from tests.user_errors import raises_user_error

pytestmark = [pytest.mark.long(worker=1), pytest.mark.slow]

DOCS = Path(__file__).parent.parent / "docs"
QUICKSTART = DOCS / "quickstart.ipynb"
COMPARISON = DOCS / "comparison.ipynb"


def outputs_of(book):
    """Returns what the cells have shown or printed, in their order."""
    outputs = []
    for cell in book.cells:
        outputs += cell.get("outputs", ())
    return outputs


def outputs_of_kind(book, kind):
    """Returns what the cells have shown in one form."""
    return [output["data"][kind] for output in outputs_of(book) if kind in output.get("data", {})]


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
    texts = [output["text"] for output in outputs_of(book) if "text" in output]
    methods = []
    for line in texts[-1].splitlines():
        if line.endswith(r"\\") and "Method" not in line:
            method, _, _ = line.partition(" & ")
            methods.append(method)
    assert methods == ["FedAvg", "FedProx", "SCAFFOLD"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fedcli.run("fedavg", out=tmp_path_factory.mktemp("runs") / "<b>one", eval_every=2, **TWO_CLIENTS)


def test_the_history_is_a_table_of_rounds_with_accuracies_in_percent(run):
    history = run.history
    rounds = run.record["rounds"]
    assert history["round"].tolist() == [1, 2]
    assert history["test_accuracy"].isna().tolist() == [True, False]
    assert history["test_accuracy"].iloc[-1] == 100 * rounds[-1]["test_accuracy"]
    assert history["terms/cross_entropy"].tolist() == [entry["terms"]["cross_entropy"] for entry in rounds]
    assert history["seconds/train"].tolist() == [entry["seconds"]["train"] for entry in rounds]
    assert fedcli.load(run.path).history.equals(history)
    assert fedcli.load(run.path).plot().axes


def test_a_run_shows_itself_in_a_line_a_table_and_a_picture(run):
    assert repr(run).startswith("Run(fedavg on digits, seed 0: ")
    page = run._repr_html_()
    assert "tex2jax_ignore" in page  # a name may have dollar signs
    assert "data:image/png;base64," in page
    assert "&lt;b&gt;one" in page
    assert "<b>" not in page
    figure = run.plot()
    assert figure.axes[0].lines[0].get_xdata().tolist() == [2]
    assert figure._repr_png_().startswith(b"\x89PNG")
    several = returned.Runs([run]) + returned.Runs([run])
    assert several._repr_html_().count("fedavg") == 2
    assert isinstance(several.plot(), type(figure))


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

    with raises_user_error("there is no run at"):
        fedcli.frame(tmp_path / "none")


def test_a_run_that_fails_in_its_first_round_shows_no_time_that_is_left(monkeypatch):
    """The time would be longer than Python counts."""
    monkeypatch.setattr(progress, "time", Mock(perf_counter=Mock(side_effect=[0.0, 1e5])))
    listener = progress.ProgressListener()
    listener.start({"rounds": [], "config": {"rounds": 10**4}}, Path("run"), 100, 0)
    assert listener.position() == (0, ["round 0/10000", "0 samples/s"])
