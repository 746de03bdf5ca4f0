"""Files that are none, streams that are closed, outputs in the place of a run: each is a line, and nothing hangs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fedcli
from fedcli.cli.cards import fit
from fedcli.data import datasets
from fedcli.reading import reading
from fedcli.run_files import FILES_OF_A_RUN
from fedcli.runs.options import flags_of
from fedcli.runs.record import read_record
from tests.commands import error_of, invoke, run_command, stamps_of_files
from tests.run_options import SHORT_RUN
from tests.run_parts import file_contents


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return fedcli.run("fedavg", out=tmp_path_factory.mktemp("runs") / "run", **{**SHORT_RUN, "rounds": 2}).path


@pytest.mark.parametrize(
    "command",
    [
        "run fedavg --config pipe", "run fedavg --from pipe", "run fedavg --tuned pipe", "run fedavg --dataset ./pipe",
        "run fedavg --partition file:pipe", "data import mine pipe", "table pipe", "plot pipe", "resume pipe",
        "run ./pipe.py", "run fedavg --config /dev/zero", "run fedavg --dataset /dev/zero", "table loop", "plot loop",
        "run fedavg --config loop", "run fedavg --out loop/run", "run fedavg --config nul.toml", "export loop",
    ],
)  # fmt: skip
def test_a_pipe_a_device_and_a_path_that_leads_to_itself_are_refused_in_a_line(command, folder):
    for pipe in ("pipe", "pipe.py"):
        os.mkfifo(pipe)
    Path("loop").symlink_to("loop")
    Path("nul.toml").write_text('backbone = "a\\u0000.py:x"\n')
    error_of(*command.split())


def test_what_is_read_must_be_a_file(folder):
    os.mkfifo("pipe")
    with pytest.raises(fedcli.UserError, match="got a pipe or a device"), reading("pipe", "text"):
        raise AssertionError("it is not come to")


def test_a_folder_in_the_cache_is_no_data_set(cache, folder):
    (cache / "mine.npz").mkdir(parents=True)
    assert "mine" not in datasets.names()
    run_command("data", "list")
    assert "unknown data set 'mine'" in error_of("data", "show", "mine")


@pytest.mark.parametrize(("number", "command"), [(1, ["list"]), (2, ["show", "fedavg"])], ids=["stdout", "stderr"])
def test_a_program_without_a_stream_ends_well(number, command, folder):
    words = [sys.executable, "-m", "fedcli", *command]
    program = f"import os, sys; os.close({number}); os.execv(sys.executable, {words})"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stderr
    assert "Traceback" not in process.stdout + process.stderr


ODD = """
from dataclasses import replace
from fedcli.papers.baselines import fedavg
class Odd(BaseException): pass
def run_round(*given): raise Odd("words")
METHOD = replace(fedavg.METHOD, name="odd", run_round=run_round, default_protocol="fedfm:digits")
"""


def test_whatever_a_method_raises_is_a_line_and_the_record_says_failed(folder):
    Path("odd.py").write_text(ODD)
    result = invoke("run", "./odd.py", *flags_of(SHORT_RUN), "--out", "run")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "odd.py' fails in line 5 (got Odd: words)" in result.stderr
    assert read_record(Path("run"))["status"] == "failed"


def test_quiet_prints_the_error_of_a_run_of_several(folder):
    Path("odd.py").write_text(ODD.replace("BaseException", "Exception"))
    result = invoke("run", "./odd.py,fedavg", *flags_of(SHORT_RUN), "--out", "runs", "--quiet")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: odd, seed 0: the file ")
    assert result.stderr.count("\n") == 1


# Outputs


@pytest.mark.parametrize(
    "command",
    [
        "table run --out run/record.json", "table run --per round --out run/record.json",
        "report run --out run/record.json",
        "export run --format safetensors --out run/selected", "export run --format safetensors --out run/checkpoint",
        "plot run --out run/curve.png", "table run --out link", "table copy.json --out copy.json",
        "run fedavg --rounds 1 --log-file run/record.json --out new", "table run --out run/states/000001-0.safetensors",
        "table run --out run/states-12/000001-0.safetensors",
    ],
)  # fmt: skip
def test_an_output_never_replaces_a_file_of_a_run(command, finished, folder):
    shutil.copytree(finished, "run")
    shutil.copy("run/record.json", "copy.json")
    Path("link").symlink_to("run/record.json")
    before = file_contents(Path("run"))
    assert "is a file of the run" in error_of(*command.split())
    assert file_contents(Path("run")) == before
    read_record(Path("copy.json"))


@pytest.mark.parametrize("name", ["states_by_client", "statesman", "states-0", "states-a"])
def test_an_output_may_lie_in_a_folder_called_nearly_as_that_of_the_states(name, finished, folder):
    shutil.copytree(finished, "run")
    out = Path("run", name, "rounds.csv")
    out.parent.mkdir()
    run_command("table", "run", "--out", out)
    assert out.stat().st_size > 0


@pytest.mark.parametrize(("out", "words"), [("loop.png", "loop.png"), ("run/partition.png", "is a file of the run")])
def test_a_chart_is_refused_after_the_data_are_shown(out, words, finished, folder):
    shutil.copytree(finished, "run")
    Path("loop.png").symlink_to("loop.png")
    before = stamps_of_files()
    result = invoke("data", "show", "digits", "--partition", "iid", "--out", out)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr
    assert stamps_of_files() == before


def test_the_files_of_a_run_are_those_that_a_run_has(finished, folder):
    shutil.copytree(finished, "run")
    run_command("run", "--from", "run", "--out", "again", "--rounds", "1")
    run_command("quality", "again")
    files = {path.name for path in Path("run").iterdir()}
    files |= {path.name for path in Path("again").iterdir() if path.is_file()}
    assert files <= {*FILES_OF_A_RUN}
    run_command("table", "again", "--out", "again/table.md")
    run_command("export", "again", "--format", "safetensors")


def test_a_papers_table_of_which_nothing_can_run_is_no_success(folder):
    result = invoke("table", "fedfm:III", "--only", "FedAvg", "--runs", "none", "--seeds", "0")
    assert result.exit_code == 2
    *_, last_line = result.stderr.splitlines()
    assert "that is missing can start (got the data set" in last_line
    run_command("table", "fedfm:III", "--only", "FedAvg", "--runs", "none", "--seeds", "0", "--dry-run")


def test_a_dry_run_says_which_runs_were_there_before(folder):
    dry = invoke("table", "fedfa:2", "--dry-run").output
    assert "Runs that were there before, elsewhere than in runs/tables/fedfa-2: " in dry
    assert "results/records/" in dry


CARD = """A method: with words that are long enough to be broken.

Two lines of a text that is wider than the terminal of the user, which
go on here.

    Delta = w_g - sum_k p_k w_k,    v <- beta v + Delta,    w_g <- w_g - eta v

Readings
    1.  An item whose text is wider than the terminal, and that goes on
        in another line.
    2. Another.
"""


def test_a_card_is_broken_between_words_and_a_formula_at_its_gaps():
    text = fit(CARD, 40)
    assert max(map(len, text.splitlines())) <= 40
    assert text.split() == CARD.split()
    formula = "    Delta = w_g - sum_k p_k w_k,\n    v <- beta v + Delta,\n    w_g <- w_g - eta v"
    assert formula in text
    assert "\nReadings\n    1.  An item whose text is wider" in text
    assert fit(CARD, 200) == CARD
