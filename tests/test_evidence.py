"""The open claims, run in pieces on one machine after the other: the same bits, and nothing begun that is lost."""

import math
import random
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fedcli import registry
from fedcli.core.client_states import STATES
from fedcli.data import datasets
from fedcli.errors import UserError
from fedcli.results import durations, plans
from fedcli.run_files import CHECKPOINT, RECORD, SELECTED
from fedcli.runs.machine import environment
from fedcli.runs.record import read_record
from fedcli.runs.signals import Interrupted, set_time_limit
from tests.scripts import load_script

pytestmark = pytest.mark.long(worker=1)

FILE = Path(__file__).parent.parent / "results" / "evidence" / "run_open_claims.py"
MIB = 2**20


@pytest.fixture
def evidence(tmp_path, monkeypatch):
    """The script, in an empty folder, with the committed records out of sight."""
    module = load_script(FILE)
    monkeypatch.setattr(plans, "find_shipped_folders", list)
    monkeypatch.setattr(durations, "find_shipped_folders", list)
    monkeypatch.setattr(module.deadline, "interrupt_on_signals", lambda numbers: None)
    monkeypatch.setattr(module.deadline, "RESERVED_SECONDS", 0)
    monkeypatch.chdir(tmp_path)
    yield module
    set_time_limit(math.inf)


def work_in(folder, monkeypatch, evidence, **given):
    """Goes on with the open claims in a folder of its own; returns the records there by method."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    evidence.main(tiny=True, **given)
    set_time_limit(math.inf)
    return {record["method"]: record for record in map(read_record, folder.rglob("record.json"))}


@pytest.mark.slow
def test_runs_that_are_stopped_carried_and_taken_up_end_in_the_same_bits(evidence, tmp_path, monkeypatch, capsys):
    fedfm = evidence.open_runs.CellsToRun("fedfm:V", only=("FedFM", "NMI"), seeds=(0,))
    scaffold = evidence.open_runs.CellsToRun("fedfm:V", only=("SCAFFOLD", "NMI"), seeds=(0,))
    monkeypatch.setattr(evidence.open_runs, "CELLS_TO_RUN", [fedfm, scaffold])
    monkeypatch.setattr(evidence.archive, "PART_SIZE", 2**16)
    whole = work_in(tmp_path / "whole", monkeypatch, evidence)
    late_records = work_in(tmp_path / "late", monkeypatch, evidence, time_limit="0s", archive_folder=Path("out"))
    assert late_records == {}  # nothing starts

    class Expiring(evidence.CountingDisplay):
        def begin(self, run):
            set_time_limit(0)  # the time is over in the first round

    class Interrupting(evidence.CountingDisplay):
        def advance(self, run, rounds):
            if run.method_source == "scaffold":  # as by SIGTERM
                raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(evidence, "CountingDisplay", Expiring)
        late = Path("../late/out")
        first = work_in(tmp_path / "first", monkeypatch, evidence, earlier_archive=late, archive_folder=Path("out"))
        patched.setattr(evidence, "CountingDisplay", Interrupting)
        from_first = Path("../first/out")
        second = work_in(
            tmp_path / "second", monkeypatch, evidence, earlier_archive=from_first, archive_folder=Path("out")
        )
    assert {name: len(record["rounds"]) for name, record in first.items()} == {"fedfm": 1}
    assert {name: len(record["rounds"]) for name, record in second.items()} == {"fedfm": 3, "scaffold": 1}
    assert ", seed 0: 1 of 3 rounds, " in capsys.readouterr().out

    parts = sorted(Path("out").iterdir())
    assert len(parts) > 1
    assert max(part.stat().st_size for part in parts) <= 2**16

    third = work_in(tmp_path / "third", monkeypatch, evidence, earlier_archive=Path("../second/out"))
    assert list((tmp_path / "third").rglob(f"{STATES}/*")) != []  # SCAFFOLD's clients

    for method, record in third.items():
        assert record["summary"]["params_sha256"] == whole[method]["summary"]["params_sha256"]
        assert record["resumed"] == [1]
        assert "quality" in record
    assert len(third) == len(whole) == 2


@pytest.fixture
def planned(evidence):
    """The open claims' runs, of which none is there."""
    return evidence.carried_plan.CarriedPlan(Path(), tuple(evidence.open_runs.plan_open_runs("float32")))


def first_run_of(method, planned):
    return next(run for run in planned.runs if run.setup.method.name == method)


def test_a_run_carries_a_model_and_those_of_scaffolds_clients(evidence, planned):
    def nbytes(method):
        return evidence.archive.nbytes_to_resume(first_run_of(method, planned))

    assert 42 * MIB < nbytes("fedavg") < 44 * MIB
    assert nbytes("fedfm") == nbytes("fedavg")
    assert nbytes("scaffold") == 11 * nbytes("fedavg")


def test_each_client_carries_its_own_network_and_no_server_that_has_none(evidence, planned):
    fccl = first_run_of("fccl", planned)
    config = fccl.setup.config
    names = config.backbone.split(",")
    sizes = [evidence.archive.nbytes_of_network(name, config.dataset) for name in names]
    assert len({*sizes}) == config.num_clients == 4
    assert evidence.archive.nbytes_to_resume(fccl) == sum(sizes)


def test_nothing_starts_that_can_neither_end_in_time_nor_be_carried(evidence, planned, monkeypatch):
    records = {}  # by the folders of their runs, in place of files
    monkeypatch.setattr(plans, "read_begun", records.get)
    monkeypatch.setattr(
        durations, "read_runs", lambda folders: [SimpleNamespace(record=record) for record in records.values()]
    )
    fedfm = first_run_of("fedfm", planned)
    fedavg = first_run_of("fedavg", planned)
    scaffold = first_run_of("scaffold", planned)

    assert planned.may_start(scaffold, [])  # without a time limit it ends here
    set_time_limit(500)
    assert planned.may_start(fedfm, [])
    assert not planned.may_start(scaffold, [])  # nobody knows yet how long it takes
    assert not planned.may_start(fedavg, [fedfm])  # only one of them can be carried

    records[fedfm.folder] = {
        "method": "fedfm", "config": fedfm.setup.all_options(), "status": "interrupted", "moved": [],
        "hardware": environment(fedfm.setup.device)["hardware"], "engine": {"processes": 1},
        "model": {"input": datasets.describe("cifar10")["shape"]}, "partition": {"sizes": [50000]},
        "rounds": [{"seconds": {"train": 6.0, "evaluate": 0.0}}] * 2,
    }  # fmt: skip
    assert planned.may_start(fedfm, [])
    assert not planned.may_start(fedavg, [])
    assert not planned.may_start(scaffold, [])

    set_time_limit(700)
    assert planned.may_start(fedavg, [])
    assert planned.may_start(scaffold, [])


def test_nothing_starts_that_the_archive_has_no_room_for(planned, monkeypatch):
    monkeypatch.setattr(plans, "read_begun", lambda folder: None)
    monkeypatch.setattr(durations, "read_runs", lambda folders: [])
    fedfm = first_run_of("fedfm", planned)
    set_time_limit(500)
    other, *_ = (run for run in planned.runs if run.folder != fedfm.folder)
    other.folder.mkdir(parents=True)
    record = other.folder / RECORD
    record.write_bytes(bytes(3 * 10 * MIB))
    assert planned.may_start(fedfm, [])  # 43 MiB beside 10
    record.write_bytes(bytes(3 * 20 * MIB))
    assert not planned.may_start(fedfm, [])


def test_the_models_of_the_best_round_go_with_a_run_whose_features_are_to_be_measured(
    evidence, planned, monkeypatch, capsys
):
    fedfm = first_run_of("fedfm", planned)
    fedfm.folder.mkdir(parents=True)
    for name, nbytes in ((RECORD, 3), (CHECKPOINT, 100), (SELECTED, 50)):
        (fedfm.folder / name).write_bytes(bytes(nbytes))

    def packed(run):
        """The names of the files that come out of an archive of a run."""
        evidence.archive.pack([run], Path("out"))
        shutil.rmtree(fedfm.folder.parent)
        evidence.archive.unpack(Path("out"))
        return {file.name for file in fedfm.folder.iterdir()}

    finished = replace(fedfm, record={"status": "finished"})
    assert evidence.archive.nbytes_to_resume(finished) == 150
    assert packed(finished) == {RECORD, CHECKPOINT, SELECTED}
    interrupted = replace(fedfm, record={"status": "interrupted"})
    assert evidence.archive.nbytes_to_resume(interrupted) == 100
    assert packed(interrupted) == {RECORD, CHECKPOINT, SELECTED}
    assert "left behind" not in capsys.readouterr().out

    monkeypatch.setattr(evidence.archive, "ARCHIVE_SIZE", 120)
    assert packed(interrupted) == {RECORD, CHECKPOINT}
    assert ": the models of its best round so far, 0 MiB" in capsys.readouterr().out
    (fedfm.folder / SELECTED).write_bytes(bytes(50))
    assert packed(finished) == {RECORD}  # of no use without them
    assert ": what it goes on from, 0 MiB" in capsys.readouterr().out


def test_a_new_archive_takes_the_place_of_the_old_one_only_if_it_is_whole(evidence, monkeypatch):
    monkeypatch.setattr(evidence.archive, "PART_SIZE", 100)
    Path("record.json").write_bytes(random.Random(0).randbytes(300))
    evidence.archive.write_archive([Path("record.json")], Path("out"))
    parts = {part.name: part.read_bytes() for part in Path("out").iterdir()}
    assert len(parts) > 3

    with pytest.raises(subprocess.CalledProcessError):
        evidence.archive.write_archive([Path("record.json"), Path("missing.json")], Path("out"))
    assert {part.name: part.read_bytes() for part in Path("out").iterdir()} == parts

    Path("record.json").write_text("")
    evidence.archive.write_archive([Path("record.json")], Path("out"))
    assert len([*Path("out").iterdir()]) < len(parts)
    for part in Path("out").iterdir():
        part.write_bytes(part.read_bytes()[:50])
    with pytest.raises(subprocess.CalledProcessError):
        evidence.archive.unpack(Path("out"))


def test_features_are_measured_without_an_alarm_and_within_what_is_left_for_them(evidence, monkeypatch):
    monkeypatch.setattr(evidence.deadline, "RESERVED_SECONDS", 45)
    monkeypatch.setattr(evidence.open_runs, "CELLS_TO_RUN", [])
    alarms = []

    def note_alarm(*arguments):
        seconds, _ = signal.getitimer(signal.ITIMER_REAL)
        alarms.append(seconds)

    monkeypatch.setattr(evidence, "run_in_time", note_alarm)
    monkeypatch.setattr(evidence, "measure_features", note_alarm)
    evidence.main(time_limit="100s", tiny=True)
    seconds_in_runs, seconds_in_measuring = alarms
    assert 65 < seconds_in_runs <= 70
    assert seconds_in_measuring == 0

    set_time_limit(-5)
    assert 29 < evidence.deadline.seconds_to_measure() <= 30
    set_time_limit(math.inf)
    assert evidence.deadline.seconds_to_measure() is None


def test_features_are_measured_after_runs_that_were_late_but_not_after_an_interruption(evidence, monkeypatch, capsys):
    monkeypatch.setattr(evidence.open_runs, "CELLS_TO_RUN", [])
    measured = []
    monkeypatch.setattr(evidence, "measure_features", measured.append)
    for number, num_measured in ((signal.SIGTERM, 0), (signal.SIGALRM, 1)):

        def interrupt(plan, display, jobs, number=number):
            raise Interrupted("interrupted", 128 + number)

        monkeypatch.setattr(evidence, "run_in_time", interrupt)
        evidence.main(tiny=True)
        assert len(measured) == num_measured
        assert capsys.readouterr().out.startswith("interrupted\n")


def test_a_measurement_that_takes_too_long_is_ended(evidence, monkeypatch, capsys):
    def run(command, check, timeout):
        raise subprocess.TimeoutExpired(command, timeout)

    finished = SimpleNamespace(folder=Path("run"), lacks_quality=True)
    monkeypatch.setattr(evidence, "read_new_records", lambda runs: runs)
    monkeypatch.setattr(evidence.subprocess, "run", run)
    evidence.measure_features([finished])
    assert "'fedcli quality' has not ended in time" in capsys.readouterr().out


def test_features_that_cannot_be_measured_are_counted_and_the_others_measured(evidence, monkeypatch):
    measured = []

    def run(command, check, timeout):
        *_, folder = command
        measured.append(folder)
        return subprocess.CompletedProcess(command, 2 if folder == Path("lost") else 0)

    runs = [SimpleNamespace(folder=Path(name), lacks_quality=True) for name in ("lost", "there")]
    monkeypatch.setattr(evidence, "read_new_records", lambda runs: runs)
    monkeypatch.setattr(evidence.subprocess, "run", run)
    assert evidence.measure_features(runs) == 1
    assert measured == [Path("lost"), Path("there")]

    monkeypatch.setattr(evidence.open_runs, "CELLS_TO_RUN", [])
    monkeypatch.setattr(evidence, "measure_features", lambda runs: 1)
    monkeypatch.setattr(evidence, "read_new_records", list)
    with pytest.raises(SystemExit, match=r"^the features of 1 could not be measured$"):
        evidence.main(tiny=True)


def test_a_refusal_ends_the_script_by_an_error_after_what_has_run_is_packed(evidence, monkeypatch):
    def refuse(plan, display, jobs):
        raise UserError("the folder is in use.")

    packed = []
    monkeypatch.setattr(evidence.open_runs, "CELLS_TO_RUN", [])
    monkeypatch.setattr(evidence, "execute", refuse)
    monkeypatch.setattr(evidence.archive, "pack", lambda runs, folder: packed.append(folder))
    with pytest.raises(SystemExit, match=r"^error: the folder is in use\.$"):
        evidence.main(tiny=True, archive_folder=Path("out"))
    assert packed == [Path("out")]


def test_the_list_of_kernels_makes_its_folder_first_and_refuses_options_in_a_line(tmp_path, monkeypatch):
    kernels = load_script(FILE.with_name("kernels.py"))
    out = tmp_path / "new" / "kernels.txt"
    with pytest.raises(SystemExit, match=r"^error: --precision must be .*got 'float31'"):
        kernels.main("w3", out, precision="float31", device="cpu")
    assert out.parent.is_dir()
    monkeypatch.setattr(kernels, "render_kernels", lambda *options: "a table")
    kernels.main("w3", out)
    assert out.read_text() == "a table"


def test_runs_with_other_options_have_folders_of_their_own(evidence):
    cells = evidence.open_runs.CellsToRun("fedfm:V", only=("FedFM", "NMI"), seeds=(0,))
    planned, *_ = plans.plan_table(registry.find_table(cells.table), seeds=cells.seeds, only=cells.only).runs
    folders = set()
    for changes in ({}, {"rounds": 3}, {"lr": 0.5}):
        run = evidence.open_runs.make_open_run(planned, cells, changes, Path("home"))
        folders.add(run.folder)
        assert run.folder.name == "seed-0"
    assert len(folders) == 3
    assert Path("home", *planned.folder.parts[-2:]) in folders


def test_failed_runs_are_counted_at_the_end(evidence, monkeypatch, capsys):
    cells = evidence.open_runs.CellsToRun("fedfm:V", only=("FedFM", "NMI"), seeds=(0,), note="a trial")
    monkeypatch.setattr(evidence.open_runs, "CELLS_TO_RUN", [cells])
    run_task = "fedcli.results.jobs.run_task"
    monkeypatch.setattr(run_task, lambda environment, task, progress: "no space left")
    with pytest.raises(SystemExit, match=r"^1 failed$"):
        evidence.main(tiny=True)
    assert "'fedcli claims' says what they decide" in capsys.readouterr().out

    monkeypatch.setattr(run_task, lambda environment, task, progress: "")
    evidence.main(tiny=True, precision="bf16")
    assert "fedcli claims" not in capsys.readouterr().out  # they count float32 alone


def test_a_folder_without_an_archive_is_refused(evidence):
    with pytest.raises(SystemExit, match=r"^error: there is no archive to go on from \(got nowhere, "):
        evidence.main(earlier_archive=Path("nowhere"), tiny=True)


def test_a_time_that_is_none_is_refused_by_the_name_of_its_option(evidence):
    with pytest.raises(SystemExit, match=r"^error: --time must be a time \(got 'soon'\)"):
        evidence.main(time_limit="soon")


class Programs:
    """Stands in for the clock and the programs of `measure_new_gpu.py`; each takes so many seconds, if it has them."""

    def __init__(self, seconds, failing=None):
        self.seconds = seconds
        self.failing = failing  # a word of those that fail
        self.now = 1000.0
        self.given = []  # of each its words, its seconds and its folder

    def monotonic(self):
        return self.now

    def run(self, command, cwd, env, check):
        assert command[:2] == ["timeout", "--kill-after=5"]
        _, _, seconds, _, *words = command
        assert env["PYTHONPATH"].split(":")[0] == str(cwd.resolve())
        self.given.append((" ".join(words), float(seconds), cwd))
        self.now += min(self.seconds, float(seconds))
        if self.seconds > float(seconds):
            return subprocess.CompletedProcess(command, 124)
        has_failed = self.failing in words
        return subprocess.CompletedProcess(command, 1 if has_failed else 0)

    def seconds_of(self, start):
        """The seconds that those programs were given whose words begin so."""
        return [seconds for words, seconds, _ in self.given if words.startswith(start)]


@pytest.fixture
def minutes(tmp_path, monkeypatch):
    """The script of the first minutes, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    Path("fedcli").mkdir()
    Path("papers").mkdir()
    return load_script(FILE.parent / "measure_new_gpu.py")


def use(programs, minutes, monkeypatch):
    """Puts programs in the place of the real ones."""
    monkeypatch.setattr(minutes, "time", programs)
    monkeypatch.setattr(minutes, "subprocess", programs)


def test_each_of_the_first_minutes_ends_in_its_time(minutes, monkeypatch):
    programs = Programs(seconds=50)
    use(programs, minutes, monkeypatch)
    minutes.check_and_bench(Path("out"))
    assert programs.seconds_of("-m pytest -q -p no:cacheprovider tests/test_graphs.py ") == [60]
    assert programs.seconds_of("-m fedcli check fedavg fedfm scaffold --device=cuda") == [10]
    assert programs.seconds_of("-m fedcli run ") == [60]  # and nothing after `verify`, whose time was over
    assert programs.seconds_of("-m fedcli verify ") == [10]
    assert programs.seconds_of("-m pytest -q -p no:cacheprovider tests/test_graphs.py::") == [30]
    assert programs.seconds_of("-m fedcli bench w1 w2 ") == [90, 40]
    left = 9 * 60 - (60 + 60 + 30 + 90)
    words, seconds, _ = programs.given[-1]
    start = f"results/evidence/run_open_claims.py --time={left - 60} --jobs=1 --precision=float32 --carry="
    assert words.startswith(start)
    assert seconds == left
    assert "--tiny" not in words
    assert "--from" not in words


def test_quick_programs_of_the_first_minutes_all_run(minutes, monkeypatch):
    programs = Programs(seconds=1)
    use(programs, minutes, monkeypatch)
    minutes.check_and_bench(Path("out"), tiny=True)
    assert programs.seconds_of("-m fedcli check fedavg fedfm scaffold --law=9 --device=cpu") == [59]
    assert programs.seconds_of("-m fedcli run ") == [60, 58]
    assert programs.seconds_of("-m fedcli verify ") == [59, 57]
    assert programs.seconds_of("-m fedcli bench w2 --epochs=1 --repeats=1 ") == [90, 89, 88]
    words, _, _ = programs.given[-1]
    assert "--tiny" in words


class NewFolders(Programs):
    """Fails, as `fedcli run` does, where the folder of a run is there."""

    def run(self, command, cwd, env, check):
        ended = super().run(command, cwd, env, check)
        *_, last_word = command
        if "run" not in command:
            return ended
        folder = Path(last_word.removeprefix("--out="))
        if folder.exists():
            return subprocess.CompletedProcess(command, 2)
        folder.mkdir(parents=True)
        return ended


def test_the_first_minutes_repeat_in_the_same_folder(minutes, monkeypatch):
    programs = NewFolders(seconds=1)
    use(programs, minutes, monkeypatch)
    for _ in range(2):
        minutes.check_and_bench(Path("out"))
    assert len(programs.seconds_of("-m fedcli verify ")) == 2 * 4
    assert [*Path("out").iterdir()] == []  # the runs were not kept


def test_the_second_minutes_bench_both_commits_and_go_on(minutes, tmp_path, monkeypatch):
    programs = Programs(seconds=50)
    use(programs, minutes, monkeypatch)
    before = tmp_path / "before"
    (before / "fedcli").mkdir(parents=True)
    minutes.profile_and_compare(
        Path("out"), earlier_archive=Path("first"), before=before, probe="probe.py --fast", minutes=10
    )
    assert programs.seconds_of("results/evidence/kernels.py w3 --precision=float32 --device=cuda ") == [30]
    assert programs.seconds_of("probe.py --fast --budget=240") == [260]
    benched = [(folder, seconds) for words, seconds, folder in programs.given if words.startswith("-m fedcli bench")]
    assert benched == [(before, 60), (before, 10), (Path(), 60), (Path(), 10)]
    words, _, _ = programs.given[-1]
    assert words.startswith("results/evidence/run_open_claims.py --time=340 ")
    assert words.endswith(" --from=first")


def test_a_folder_or_a_precision_that_is_none_is_refused_before_anything_runs(minutes, monkeypatch):
    programs = Programs(seconds=1)
    use(programs, minutes, monkeypatch)
    Path("first").mkdir()
    commands = (
        "check-and-bench --out=out --precision=float31",
        "profile-and-compare --out=out --from=firs",
        "profile-and-compare --out=out --from=first --before=befor",
    )
    for command in commands:
        assert CliRunner().invoke(minutes.app, command.split()).exit_code == 2
    assert programs.given == []


def test_no_minutes_start_nothing(minutes, monkeypatch):
    programs = Programs(seconds=1)
    use(programs, minutes, monkeypatch)
    session = minutes.Session(scope=minutes.ON_GPU, out=Path("out"), end=programs.now)
    minutes.run_claims(session, "tf32")
    assert not session.run_python("-c", "", end=programs.now)
    assert programs.given == []
    assert len(session.out_of_time) == 2


def test_few_minutes_are_kept_and_leave_time_for_the_archive(minutes, tmp_path, monkeypatch, capsys):
    before = tmp_path / "before"
    (before / "fedcli").mkdir(parents=True)
    for program, given in ((minutes.check_and_bench, {}), (minutes.profile_and_compare, {"before": before})):
        programs = Programs(seconds=1000)
        use(programs, minutes, monkeypatch)
        start = programs.now
        if given:
            given |= {"earlier_archive": Path("first"), "probe": "probe.py"}
        program(Path("out"), minutes=3, **given)
        words, seconds, _ = programs.given[-1]
        assert words.startswith("results/evidence/run_open_claims.py --time=60 ")
        assert seconds == 120
        assert programs.now == start + 180
        assert "out of time: -m fedcli bench" in capsys.readouterr().out


def test_programs_that_fail_are_named_after_all_others_have_run(minutes, monkeypatch, capsys):
    programs = Programs(seconds=1, failing="check")
    use(programs, minutes, monkeypatch)
    with pytest.raises(SystemExit, match="1 programs have failed"):
        minutes.check_and_bench(Path("out"))
    assert "failed: -m fedcli check fedavg fedfm scaffold --device=cuda\n" in capsys.readouterr().out
    assert "run_open_claims.py" in programs.given[-1][0]


def test_the_list_runs_both_rows_of_the_claims_that_it_names(evidence):
    def folders(runs):
        return {run.folder.parts[-2:] for run in runs}

    def rows_of(claim, row):
        only = [row, *claim.columns, *claim.subtracted_columns]
        return folders(plans.plan_table(registry.find_table(claim.table), seeds=range(3), only=only).runs)

    all_claims = {claim.name: claim for claim in registry.claims()}
    names = set()
    for cells in evidence.open_runs.CELLS_TO_RUN:
        assert bool(cells.claims) != bool(cells.note), cells
        assert {*cells.claims} <= all_claims.keys(), cells
        if not cells.options:
            names |= {*cells.claims}
            continue
        for name in cells.claims:  # whose runs have other folders than the table's
            claim = all_claims[name]
            assert {claim.row, *claim.other_rows, *claim.columns} <= {*cells.only}, claim
            for option, value in cells.options.items():
                assert claim.allowed_options[option] == value, claim
    claims = [all_claims[name] for name in names]
    assert len(claims) == 9

    planned = folders(evidence.open_runs.plan_open_runs("float32"))
    for claim in claims:
        assert rows_of(claim, claim.row) <= planned, claim
        assert any(rows_of(claim, row) <= planned for row in claim.other_rows), claim
