"""No code from data: a path in a record is imported only if the user names the file, unchanged."""

import json
import shutil
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import fedcli
from fedcli import figures, registry, userfiles
from fedcli.core import backbones, partition
from fedcli.data import datasets, imports
from fedcli.declarations import Cell, Table
from fedcli.errors import UserError
from fedcli.papers.baselines import fedavg
from fedcli.results import durations, jobs, metrics, plans
from fedcli.runs import loggers, resume
from fedcli.runs.record import read_record, write_record
from fedcli.userfiles import file_hash
from tests.commands import error_of, invoke, run_command
from tests.listeners import Stop, StopAfter
from tests.network_sources import ONE_LAYER_NETWORK
from tests.run_options import SHORT_RUN
from tests.torture.named_code import COMMANDS_THAT_READ, NAMING_PARTS, SPELLINGS, forge_record
from tests.torture.nested_parts import paths_in
from tests.user_errors import raises_user_error

pytestmark = pytest.mark.long(worker=0)

TRACE = "\nopen('imported', 'a').close()\n"  # what a file does that is imported


@pytest.fixture(autouse=True)
def user_code(folder):
    """Writes a user's method and network into the working folder, which leave a trace when they are imported."""
    text = Path(fedavg.__file__).read_text().replace('name="fedavg"', 'name="mine"')
    Path("mine.py").write_text(text + TRACE)
    Path("nets.py").write_text(ONE_LAYER_NETWORK + TRACE)


def run_and_stop(method="./mine.py", rounds=1, **options):
    """Begins a run, which stops after so many rounds."""
    with pytest.raises(Stop):
        fedcli.run(method, out="run", protocol="fedfm:digits", progress=StopAfter(rounds), **{**SHORT_RUN, **options})


def name_evil_file(folder="run", **changes):
    """Lets a run's record name, where `changes` says, a file that does something when imported."""
    evil = Path("evil.py").resolve()
    evil.write_text(Path("mine.py").read_text().replace("'imported'", "'evil-ran'"))
    record = read_record(Path(folder))
    record |= {"user_files": {str(evil): "0" * 16}, "status": "finished"}
    for name, value in changes.items():
        if name in record["config"]:
            record["config"][name] = value
        if name in record:
            record[name] = value
    write_record(Path(folder), record)


COMMANDS = ("resume", "quality", "quality --clients", "verify", "export", "plot --kind correlation")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("named", [(), ("--method", "evil.py")], ids=["unnamed", "another file than the recorded one"])
def test_no_command_imports_a_file_that_only_a_record_names(command, named, folder):
    run_and_stop()
    status = "interrupted" if command == "resume" else "finished"
    public = {"public_dataset": "digits"} if "correlation" in command else {}
    name_evil_file(method_source=f"{folder}/evil.py", status=status, **public)

    error = error_of(*command.split(), "run", *named)

    words = "has changed since the run began" if named else f"--method {folder}/evil.py."
    assert words in error
    assert not Path("evil-ran").exists()


def test_no_network_is_imported_that_stands_beside_the_options(folder):
    run_and_stop(rounds=2)
    model = {**read_record(Path("run"))["model"], "backbone": f"{folder}/evil.py:tiny"}
    name_evil_file(model=model, status="interrupted", user_files={f"{folder}/mine.py": file_hash("mine.py")})
    assert resume.resume("run", files="mine.py").record["status"] == "finished"
    assert not Path("evil-ran").exists()


class MovedFiles(NamedTuple):
    """Where the user's files are after they were moved."""

    method: str
    networks: str


def move_user_files(name_of_method="mine.py"):
    """Moves the user's files into another folder, that of the method under a name."""
    Path("new").mkdir()
    return MovedFiles(shutil.move("mine.py", f"new/{name_of_method}"), shutil.move("nets.py", "new/nets.py"))


def test_in_python_the_files_to_name_are_a_keyword_argument(folder):
    run_and_stop(backbone="./nets.py:tiny", rounds=2)
    run = fedcli.load("run")
    for call in (run.model, run.data, run.confusion):
        with raises_user_error("mine.py", f"add method={[f'{folder}/mine.py', f'{folder}/nets.py']}."):
            call()


def test_named_files_may_move_but_change_only_where_allowed(folder):
    """Runs go on with them."""
    run_and_stop(backbone="./nets.py:tiny", rounds=2)
    with raises_user_error("mine.py", f"add --method {folder}/mine.py --method {folder}/nets.py."):
        resume.resume("run")
    with raises_user_error("nets.py"):
        resume.resume("run", files="./mine.py")
    files = move_user_files("renamed.py")
    before = file_hash("new/nets.py")
    Path("new/nets.py").write_text(Path("new/nets.py").read_text() + "\n")
    after = file_hash("new/nets.py")
    with raises_user_error(f"since the run began (hash {after}, was {before}", "--changed-"):
        resume.resume("run", files=files)

    again = resume.resume("run", files=files, changed_method=True).record

    method = f"{folder}/new/renamed.py"
    networks = f"{folder}/new/nets.py"
    assert again["status"] == "finished"
    assert again["resumed"] == [2]
    assert again["method_source"] == method
    assert again["config"]["backbone"] == f"{networks}:tiny"
    assert again["user_files"] == {method: file_hash(method), networks: f"{before}, then {after}"}


def test_a_file_that_is_not_there_is_refused_in_a_line(folder):
    run_and_stop("fedavg", backbone="./nets.py:tiny", rounds=2)
    shutil.move("nets.py", "moved.py")
    for files in ("nets.py", "typo.py", ["moved.py", "typo.py"]):
        missing = "nets.py" if files == "nets.py" else "typo.py"
        words = f"there is no file '{folder}/{missing}' (got it as --method); give the path where it is now."
        with raises_user_error(words):
            resume.resume("run", files=files)
    words = f"your code in '{folder}/nets.py' (hash "
    with raises_user_error(words, "it is no longer there, so add --method with the path"):
        resume.resume("run")
    with raises_user_error("so add method with the path where it is now."):
        fedcli.load("run").model()
    assert resume.resume("run", files="moved.py").record["resumed"] == [2]


def test_a_file_is_known_where_its_folder_has_become_a_link():
    Path("old").mkdir()
    shutil.move("nets.py", "old/nets.py")
    run_and_stop("fedavg", backbone="old/nets.py:tiny", rounds=2)
    Path("old").rename("elsewhere")
    Path("old").symlink_to("elsewhere")
    assert resume.resume("run", files="old/nets.py").record["resumed"] == [2]
    Path("elsewhere/nets.py").write_text(ONE_LAYER_NETWORK)
    with raises_user_error("has changed since the run began (hash"):
        fedcli.load("run", method="old/nets.py").model()


def test_a_file_that_another_imports_counts_as_a_part_of_it(folder):
    Path("nets.py").write_text("from shapes import WIDTH\n" + ONE_LAYER_NETWORK)
    Path("shapes.py").write_text("import sizes\nWIDTH = sizes.WIDTH\n")
    Path("sizes.py").write_text("WIDTH = 3\n")
    run_and_stop("fedavg", backbone="nets.py:tiny", rounds=2)
    Path("beside.py").write_text("")  # which nothing imports
    recorded = read_record(Path("run"))["user_files"][f"{folder}/nets.py"]
    assert recorded == file_hash("nets.py")

    Path("sizes.py").write_text("WIDTH = 4\n")
    words = f"nets.py' or one that it imports has changed since the run began (hash {file_hash('nets.py')}, was "
    with raises_user_error(words):
        fedcli.load("run", method="nets.py").model()
    with raises_user_error(words):
        resume.resume("run", files="nets.py")
    again = resume.resume("run", files="nets.py", changed_method=True).record
    assert again["changed"] == [{"round": 2, "what": "its file nets.py"}]


def test_the_hash_of_an_older_version_is_of_the_file_alone():
    Path("nets.py").write_text("import shapes\n" + ONE_LAYER_NETWORK)
    alone = file_hash("nets.py")
    Path("shapes.py").write_text("")
    assert file_hash("nets.py") != alone
    assert userfiles.is_hash_of(alone, "nets.py")


IMPORTS = {  # of a helper beside a file
    "after a semicolon": "import os; import helper",
    "after a backslash": "from \\\n    helper import WIDTH",
    "under an if": "if True: import helper",
    "in a function": "def f():\n    from helper import WIDTH",
    "relative": "from .helper import WIDTH",
}
NO_IMPORTS = {
    "a name that is imported from elsewhere": "from os import path, helper",
    "a docstring": '"""Networks.\n\nimport helper\n"""',
    "what cannot be read": "import helper\ndef f(:",
    "a zero byte": "import helper\n\0",
}


@pytest.mark.parametrize("text", IMPORTS.values(), ids=IMPORTS)
def test_a_helper_counts_wherever_it_is_imported(text):
    Path("main.py").write_text(text)
    alone = file_hash("main.py")
    Path("helper.py").write_text("WIDTH = 3\n")
    before = file_hash("main.py")
    Path("helper.py").write_text("WIDTH = 4\n")
    assert len({alone, before, file_hash("main.py")}) == 3


def test_a_helper_may_have_letters_beyond_ascii():
    Path("main.py").write_text("import größe\n", encoding="utf-8")
    alone = file_hash("main.py")
    Path("größe.py").write_text("")
    assert file_hash("main.py") != alone


@pytest.mark.parametrize("text", ["import parts", "import parts.small.one", "from parts.small import one"])
def test_all_files_of_a_package_beside_a_file_count(text):
    """An older version counted none of them; what it has recorded is known."""
    Path("main.py").write_text(text)
    alone = file_hash("main.py")
    Path("parts/small").mkdir(parents=True)
    Path("parts/small/one.py").write_text("WIDTH = 3\n")
    before = file_hash("main.py")
    Path("parts/small/one.py").write_text("WIDTH = 4\n")
    assert len({alone, before, file_hash("main.py")}) == 3
    assert userfiles.is_hash_of(alone, "main.py")
    assert not userfiles.is_hash_of(before, "main.py")


def test_what_editors_leave_in_a_package_beside_a_file_does_not_count():
    """A lock of Emacs is a link to nothing, and Jupyter keeps copies of what it saves."""
    Path("main.py").write_text("import parts")
    Path("parts/.ipynb_checkpoints").mkdir(parents=True)
    Path("parts/one.py").write_text("WIDTH = 3\n")
    before = file_hash("main.py")
    Path("parts/.#one.py").symlink_to("someone@somewhere.1:2")
    Path("parts/.ipynb_checkpoints/one-checkpoint.py").write_text("WIDTH = 2\n")
    Path("parts/more.py").mkdir()
    assert file_hash("main.py") == before


def test_a_package_beside_a_file_that_python_does_not_see_is_refused():
    Path("parts").mkdir()
    Path("parts/one.py").write_text("WIDTH = 3\n")
    Path("main.py").write_text("from parts.one import WIDTH\n")
    with raises_user_error(
        "imports the folder 'parts' beside it (got no such package on Python's path); set PYTHONPATH="
    ):
        userfiles.find_user_function("main.py:f", "metric")


@pytest.mark.parametrize("text", NO_IMPORTS.values(), ids=NO_IMPORTS)
def test_a_file_that_is_not_imported_does_not_count(text):
    """An older version counted it where a line began with its import; what it has recorded is known."""
    Path("main.py").write_text(text)
    alone = file_hash("main.py")
    Path("helper.py").write_text("")
    assert file_hash("main.py") == alone
    recorded = sha256(f"{alone} {file_hash('helper.py')}".encode()).hexdigest()[:16]
    assert userfiles.is_hash_of(recorded, "main.py")
    assert not userfiles.is_hash_of(recorded, "helper.py")


def test_continue_is_consent_and_knows_a_moved_file():
    run_and_stop(backbone="./nets.py:tiny", rounds=2)
    moved = move_user_files()

    def go_on(backbone):
        return fedcli.run(
            moved.method, out="run", continue_=True, protocol="fedfm:digits", backbone=backbone, **SHORT_RUN
        )

    assert go_on(f"{moved.networks}:tiny").record["resumed"] == [2]
    with raises_user_error("another backbone (got cnn-small, was"):
        go_on("cnn-small")


def test_a_run_that_is_skipped_has_only_the_files_that_are_named(folder):
    fedcli.run("./mine.py", out="run", protocol="fedfm:digits", **{**SHORT_RUN, "rounds": 1})
    with raises_user_error(f"add --method {folder}/mine.py."):
        resume.resume("run", skip_ended=True).model()
    moved = move_user_files()
    assert resume.resume("run", files=moved.method, skip_ended=True).model()


@pytest.mark.parametrize("again", [{}, {"continue_": True}], ids=["the plain command", "--continue"])
def test_a_run_without_a_finished_round_starts_anew_once_its_file_is_fixed(again):
    options = {**SHORT_RUN, "protocol": "fedfm:digits", "out": "run", "rounds": 1}
    text = Path("mine.py").read_text()
    Path("mine.py").write_text(text.replace("    clients, terms =", "    1 / 0\n    clients, terms ="))
    with raises_user_error("mine.py' fails in line", "ZeroDivisionError"):
        fedcli.run("./mine.py", **options)
    Path("mine.py").write_text(text)
    record = fedcli.run("./mine.py", **options, **again).record
    assert record["status"] == "finished"
    assert record["resumed"] == []
    assert record["method_hash"] == file_hash("mine.py")
    with raises_user_error("never overwritten; go on with continue_=True"):
        fedcli.run("./mine.py", **options)


def table_of(method, settings):
    """Returns a table of one cell."""
    return Table("fedfm:III", "", ("FedFM", "Table III"), (Cell("A", "x", method, settings),), seeds=(0,))


def test_a_table_takes_the_plans_method_and_not_the_records(folder):
    settings = {**SHORT_RUN, "protocol": "fedfm:digits", "rounds": 2}
    table = table_of("./mine.py", settings)
    (run,) = plans.plan_table(table, Path("runs")).runs
    with pytest.raises(Stop):
        fedcli.run("./mine.py", out=run.folder, progress=StopAfter(1), **settings)

    assert jobs.execute(plans.plan_table(table, Path("runs")), jobs.PlanListener()) == {}
    record = read_record(run.folder)
    assert record["resumed"] == [1]
    assert record["status"] == "finished"

    name_evil_file(run.folder, method_source=f"{folder}/evil.py", status="interrupted")
    assert list(jobs.execute(plans.plan_table(table, Path("runs")), jobs.PlanListener())) == [run.folder]
    assert not Path("evil-ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["method", "method_source", "protocol", "dataset", "backbone", "post"])
def test_reports_and_tables_import_no_file_that_a_record_names(name, folder):
    run_and_stop("fedavg")
    record = read_record(Path("run"))
    record["origin"] |= {"backbone": "given", "post": "given"}
    write_record(Path("run"), {**record, "load": [], "command": "fedcli run fedavg"})
    name_evil_file(**{name: f"{folder}/evil.py:some"})
    for command in ("report run --out report.html", "table run"):
        run_command(*command.split())
    assert "fedcli run fedavg" in Path("report.html").read_text()
    durations.estimate_plan(plans.plan_table(table_of("fedavg", SHORT_RUN), Path()))
    assert not Path("evil-ran").exists()


def spell_evil_file(folder):
    """Returns the ways to write a part of the file `evil.py` in a folder."""
    return [text.format(folder / "evil.py", folder.name) for text in SPELLINGS]


def openers():
    """Returns everything that opens a text which may name a file."""
    return (
        registry.find_method, registry.find_protocol, registry.find_post, registry.find_table, registry.claims,
        partition.from_flag, datasets.load, imports.import_if_path, metrics.find_metric, figures.find_chart,
        loggers.find_loggers, lambda text: [backbones.find(part) for part in text.split(",")],
    )  # fmt: skip


@pytest.fixture
def opened_files(monkeypatch):
    """Lets no file be imported; returns the list of those that would have been."""
    opened = []

    def open_file(path, kind):
        opened.append(path)
        return ModuleType("m")

    monkeypatch.setattr(userfiles.modules, "import_file", open_file)
    monkeypatch.setattr(registry, "import_file", open_file)
    return opened


def test_what_the_reader_of_paths_does_not_see_is_opened_nowhere(folder, opened_files):
    num_opened = 0
    for text in spell_evil_file(folder):
        for opener in openers():
            opened_files.clear()
            with suppress(UserError):
                opener(text)
            num_opened += len(opened_files)
            if "\0" in text:  # which `user_paths` refuses
                assert not opened_files, (text, opener)
            else:
                assert {*opened_files} <= {*userfiles.user_paths([text])}, (text, opener)
    assert num_opened > 50


def test_a_path_that_no_option_can_name_is_refused():
    Path("a,b").mkdir()
    shutil.copy("mine.py", "a,b/mine.py")
    with raises_user_error("unknown method"):
        registry.find_method("./a,b/mine.py")
    Path("link.py").symlink_to("a,b/mine.py")
    with raises_user_error("a,b/mine.py' cannot be named (got a comma"):
        registry.find_method("./link.py")
    with raises_user_error("got a zero byte"):
        registry.find_method("./mine\0.py")
    Path("loop.py").symlink_to("loop.py")
    with raises_user_error("there is no method file"):
        registry.find_method("./loop.py")
    assert not Path("imported").exists()


def test_tuned_options_open_no_file_that_is_not_typed(folder):
    Path("evil.py").write_text(ONE_LAYER_NETWORK + TRACE.replace("imported", "evil-ran"))
    for spelling in (f"{folder}/evil.py:tiny", f"{folder}/evil.py:tiny,cnn-small", f"cnn-small,{folder}/evil.py:tiny"):
        facts = {"method": "fedavg", "seed": "0", "options": {"backbone": spelling, "lr": 0.2}}
        Path("tuned.json").write_text(json.dumps(facts))
        with raises_user_error(f"add backbone={spelling!r}."):
            fedcli.run("fedavg", out="run", tuned="tuned.json", **SHORT_RUN)
        assert "add --backbone" in error_of("run", "fedavg", "--tuned", "tuned.json", "--out", "run")
    assert not Path("evil-ran").exists()

    config = fedcli.run("fedavg", out="run", tuned="tuned.json", backbone="cnn-small", **SHORT_RUN).record["config"]
    assert config["lr"] == 0.2
    assert config["backbone"] == "cnn-small"


@pytest.fixture(scope="module")
def finished_folder(tmp_path_factory):
    """Makes a finished run; returns its folder, which no test may change."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    fedcli.run("fedavg", out=folder, **{**SHORT_RUN, "rounds": 2})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS_THAT_READ)
def test_no_command_imports_what_any_part_of_a_record_names(command, finished_folder, folder, opened_files):
    """Parts from which something could be taken with each command, and all others with one of the commands in turn."""
    turn = COMMANDS_THAT_READ.index(command)
    others = sorted({*paths_in(read_record(finished_folder))} - {*NAMING_PARTS}, key=str)
    paths = [*NAMING_PARTS, *others[turn :: len(COMMANDS_THAT_READ)]]
    if command.startswith("claims"):  # each reads all records of the project, too
        paths = paths[:3]
    texts = spell_evil_file(folder)
    for number, path in enumerate(paths, start=turn):
        text = texts[number % len(texts)]
        shutil.rmtree("r", ignore_errors=True)
        shutil.copytree(finished_folder, "r")
        forge_record(Path("r"), path, text, is_stopped=number % 2 == 1, user_files={})
        Path("tuned.json").write_text(json.dumps({"method": "fedavg", "seed": "0", "options": {"backbone": text}}))

        result = invoke(*command.split())

        assert not opened_files, (path, text)
        assert result.exit_code in (0, 1, 2), (path, text, result.output)
        assert isinstance(result.exception, SystemExit | None), (path, text, result.exception)


def trusted_networks(named, **options):
    """Returns where two recorded networks, of files of one name, are looked for among the named files."""
    config = {"backbone": f"{Path('a/nets.py').resolve()}:tiny", "method_file": f"{Path('b/nets.py').resolve()}:tiny"}
    hashes = {path.partition(":")[0]: file_hash(path.partition(":")[0]) for path in config.values()}
    record = {"method_source": "fedavg", "config": config, "user_files": hashes}
    record = userfiles.trust_files(record, named, **options)
    return list(record["config"].values())


def write_namesakes(folder, *texts):
    """Writes `a/nets.py` and `b/nets.py` into a folder."""
    for name, text in zip("ab", texts, strict=True):
        file = folder / name / "nets.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_each_of_two_equal_files_of_one_name_stays_the_one_it_was(folder):
    write_namesakes(folder, ONE_LAYER_NETWORK, ONE_LAYER_NETWORK)
    trusted = trusted_networks(["a/nets.py", "b/nets.py"])
    assert trusted == [f"{folder}/a/nets.py:tiny", f"{folder}/b/nets.py:tiny"]


def test_two_moved_and_changed_files_of_one_name_are_not_guessed(folder):
    write_namesakes(folder, ONE_LAYER_NETWORK, ONE_LAYER_NETWORK + "# b\n")
    write_namesakes(folder / "moved", ONE_LAYER_NETWORK + "# c\n", ONE_LAYER_NETWORK + "# d\n")
    named = ["moved/a/nets.py", "moved/b/nets.py"]
    with raises_user_error("several files have its name"):
        trusted_networks(named, allow_changed=True)


def test_a_file_whose_hash_was_not_recorded_gets_that_of_now():
    assert userfiles.add_hash("", "abc") == "abc"
    assert userfiles.add_hash("abc", "def") == "abc, then def"
