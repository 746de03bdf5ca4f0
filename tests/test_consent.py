"""No code from data: a path in a record is imported only if the user names the file, unchanged."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedcli
from fedcli.cli import app as cli
from fedcli.declarations import Cell, Table
from fedcli.errors import UserError
from fedcli.papers.baselines import fedavg
from fedcli.results import jobs, reproduce
from fedcli.results.tables import commands
from fedcli.runs import run as runs
from fedcli.runs.records import read_record, write_record
from tests.test_runs import TINY, Stop, StopAfter

TRACE = "\nopen('imported', 'a').close()\n"  # what a file does that is imported
NETS = """
from torch import nn
def tiny(channels, image_size, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, num_classes))
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with a user's method and network, which leave a trace when they are imported."""
    monkeypatch.chdir(tmp_path)
    text = Path(fedavg.__file__).read_text().replace('name="fedavg"', 'name="mine"')
    Path("mine.py").write_text(text + TRACE)
    Path("nets.py").write_text(NETS + TRACE)
    return tmp_path


def begun(method="./mine.py", rounds=1, **options):
    """A run that was stopped."""
    with pytest.raises(Stop):
        fedcli.run(method, out="run", protocol="fedfm:digits", progress=StopAfter(rounds), **{**TINY, **options})


def refused(function, *parts):
    with pytest.raises(UserError) as caught:
        function()
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def malicious():
    """A record from elsewhere whose method is a file that is here and does something."""
    Path("evil.py").write_text(Path("mine.py").read_text().replace("'imported'", "'evil-ran'"))
    record = read_record(Path("run"))
    path = str(Path("evil.py").resolve())
    record |= {"method_source": path, "user_files": {path: "0" * 16}}
    write_record(Path("run"), record)


COMMANDS = [
    ("resume", "run"), ("quality", "run"), ("quality", "run", "--clients"),
    ("plot", "run", "--kind", "correlation"),
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("named", [(), ("--method", "evil.py")], ids=["unnamed", "another file than the recorded one"])
def test_no_command_imports_a_file_that_only_a_record_names(command, named, work):
    begun()
    malicious()
    if command[0] != "resume":
        record = read_record(Path("run"))
        write_record(Path("run"), {**record, "status": "finished"})
    result = CliRunner().invoke(cli.app, [*command, *named])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert ("has changed since the run began" if named else f"--method {work}/evil.py' does.") in result.stderr
    assert not Path("evil-ran").exists()


def test_a_named_file_goes_on_also_from_a_new_place(work):
    begun()
    Path("new").mkdir()
    shutil.move("mine.py", "new/place.py")
    refused(lambda: runs.resume("run"), f"'{work}/mine.py'", "--method")
    again = runs.resume("run", method="new/place.py").record
    assert again["status"] == "finished"
    assert again["method_source"] == str(work / "new/place.py")
    assert list(again["user_files"]) == [str(work / "new/place.py")]
    assert "," not in again["method_hash"]


def test_parts_need_the_same_consent(work):
    begun("fedavg", backbone="./nets.py:tiny", rounds=2)
    refused(lambda: runs.resume("run"), "nets.py", f"'fedcli resume run --method {work}/nets.py' does")
    refused(lambda: runs.resume("run", method="./mine.py"), "nets.py")
    refused(lambda: runs.resume("run", method="./none.py"), "there is no file at", "none.py")
    Path("new").mkdir()
    shutil.move("nets.py", "new/nets.py")
    Path("new/nets.py").write_text(Path("new/nets.py").read_text() + "\n")
    refused(lambda: runs.resume("run", method="new/nets.py"), "has changed since", "--changed-method")
    again = runs.resume("run", method=["new/nets.py"], changed_method=True).record
    assert again["config"]["backbone"] == f"{work}/new/nets.py:tiny"
    (known,) = again["user_files"].values()
    assert known.count(", then ") == 1


def test_continue_is_consent_and_knows_a_moved_file(work):
    begun(backbone="./nets.py:tiny", rounds=2)
    Path("new").mkdir()
    for name in ("mine.py", "nets.py"):
        shutil.move(name, f"new/{name}")
    options = {**TINY, "protocol": "fedfm:digits", "backbone": "new/nets.py:tiny"}
    assert fedcli.run("new/mine.py", out="run", continue_=True, **options).record["resumed"] == [2]
    refused(
        lambda: fedcli.run("new/mine.py", out="run", continue_=True, **{**options, "backbone": "cnn-small"}),
        "another --backbone (got cnn-small, was",
    )


@pytest.mark.parametrize("several", [1, 2])
def test_a_table_takes_the_plans_method_and_not_the_records(several, work):
    given = {**TINY, "protocol": "fedfm:digits", "rounds": 2}
    table = Table("fedfm:III", "", ("FedFM", "Table III"), (Cell("A", "x", "./mine.py", given),), seeds=(0,))
    folder = reproduce.plan(table, Path("runs")).runs[0].folder
    with pytest.raises(Stop):
        fedcli.run("./mine.py", out=folder, progress=StopAfter(1), **given)
    assert jobs.execute(reproduce.plan(table, Path("runs")), jobs.Watch(), jobs=several) == {}
    record = read_record(folder)
    assert (record["resumed"], record["status"]) == ([1], "finished")
    Path("evil.py").write_text(Path("mine.py").read_text().replace("'imported'", "'evil-ran'"))
    path = str(work / "evil.py")
    record |= {"method_source": path, "user_files": {path: "0" * 16}, "status": "interrupted"}
    write_record(folder, record)
    assert list(jobs.execute(reproduce.plan(table, Path("runs")), jobs.Watch(), jobs=several)) == [folder]
    assert not Path("evil-ran").exists()


@pytest.mark.parametrize("name", ["method", "method_source", "protocol", "dataset", "backbone", "post"])
def test_a_report_imports_no_file_that_a_record_names(name, work):
    begun("fedavg")
    Path("evil.py").write_text("open('evil-ran', 'a').close()\n")
    record = read_record(Path("run"))
    values = record if name in record else record["config"]
    values[name] = f"{work}/evil.py:some"
    record["origin"] |= {"backbone": "given", "post": "given"}
    write_record(Path("run"), {**record, "command": "fedcli run fedavg", "status": "finished"})
    assert CliRunner().invoke(cli.app, ["report", "run", "--out", "report.html"]).exit_code == 0
    assert "fedcli run fedavg" in Path("report.html").read_text()
    assert commands([read_record(Path("run"))]) == ["fedcli run fedavg"]
    assert not Path("evil-ran").exists()


def test_no_data_set_of_a_record_is_asked_for_its_size(work):
    begun("fedavg")
    Path("evil.py").write_text("open('evil-ran', 'a').close()\ndef some(): return {}\n")
    record = read_record(Path("run"))
    record["config"] |= {"dataset": f"{work}/evil.py:some", "train_examples": None}
    write_record(Path("run"), {**record, "reduced": True, "load": []})  # older records say no more
    assert CliRunner().invoke(cli.app, ["table", "run"]).exit_code == 0
    table = Table("fedfm:III", "", ("FedFM", "Table III"), (Cell("A", "x", "fedavg", TINY),), seeds=(0,))
    assert [cost.known for cost in reproduce.estimate(reproduce.plan(table, Path())).values()] == [0]
    assert not Path("evil-ran").exists()
