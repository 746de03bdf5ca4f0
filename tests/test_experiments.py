"""Experiments that are written down: options from files and records, grids, and what goes on beside them."""

from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import Result

import fedcli
from fedcli.cli import display
from fedcli.declarations import flag_of
from fedcli.figures import saving
from fedcli.papers.baselines import fedavg
from fedcli.runs import rounds
from fedcli.runs.options import REPEATABLE_OPTIONS, RunConfig, flags_of
from fedcli.runs.sources import expand
from tests.commands import PROGRAM, error_of, invoke, output_of, record_in, use_plain_terminal
from tests.network_sources import ONE_LAYER_NETWORK
from tests.run_options import ONE_ROUND

WITHOUT_ROUNDS = {**ONE_ROUND, "rounds": None}  # so that a test may give their number

FIELDS = RunConfig.__dataclass_fields__
TOML = """
method = "fedprox"
train-examples = 200
num_clients = 4
partition = "iid"
rounds = 1
proximal-weight = 0.5
device = "cpu"
drop-last = false
"""


@pytest.fixture(autouse=True)
def written(folder):
    Path("exp.toml").write_text(TOML)


def test_a_file_names_method_and_options_and_what_is_typed_goes_before():
    output_of("run", "--config", "exp.toml", "--rounds", 2, "--out", "a")
    record = record_in("a")
    assert record["method"] == "fedprox"

    expected = {"num_clients": 4, "train_examples": 200, "proximal_weight": 0.5, "rounds": 2, "drop_last": False}
    assert {name: record["config"][name] for name in expected} == expected

    origins = {"rounds": "command line", "num_clients": "file exp.toml", "proximal_weight": "file exp.toml"}
    assert {name: record["origin"][name] for name in origins} == origins
    assert "--num-clients=4" in record["command"]  # which needs no file

    others = TOML.replace("proximal-weight = 0.5\n", "quiet = false\ncontinue = false\n")
    Path("exp.toml").write_text(others)
    output_of("run", "fedavg", "--config=exp.toml", "--out", "b")  # so does the method
    assert record_in("b")["method"] == "fedavg"


def test_typed_seeds_go_before_the_seed_of_a_file_which_may_name_a_step_with_its_options():
    Path("exp.toml").write_text(f"{TOML}seed = 7\npost = 'ccvr'\nccvr-epochs = 1\n")
    output_of("run", "--config", "exp.toml", "--seeds", "0,1", "--out", "a")
    for seed in (0, 1):
        record = record_in(f"a/seed-{seed}")
        assert record["seed"] == seed
        assert record["post"]["name"] == "ccvr"
        assert record["config"]["ccvr_epochs"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(f"{TOML}lr = 'fast'", "--lr must be of type float (got 'fast')", id="text as a number"),
        pytest.param(f"{TOML}lr = [0.1, -1]", "--lr must be > 0 (got -1.0)", id="value out of range in a list"),
        pytest.param(
            f"{TOML}[out]\na = 1", "'out' in 'exp.toml' is no option with a value or a list (got {'a': 1});", id="table"
        ),
        pytest.param(
            f"{TOML}from = 'a'",
            "'from' in 'exp.toml' is no option with a value or a list (got 'a'); leave it out.",
            id="from",
        ),
        pytest.param(
            f"{TOML}eval-every = 1\neval_every = 2",
            "'eval_every' in 'exp.toml' stands there twice (got it with - and with _); leave one out.",
            id="two spellings",
        ),
        pytest.param(f"{TOML}lr = ", "'exp.toml' cannot be read (", id="no TOML"),
        pytest.param(f"{TOML}seed = 1\nseeds = [1]", "--seed 1 was given with --seeds", id="seed and seeds"),
        pytest.param(
            "rounds = 1", "no method given (got --config); write 'fedcli run METHOD', see 'fedcli list'", id="no method"
        ),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_a_line(text, message):
    Path("exp.toml").write_text(f"{text}\n")
    assert message in error_of("run", "--config", "exp.toml")


def test_a_run_is_run_again_from_its_record_and_every_option_can_be_overridden():
    fedcli.run("fedfm", **ONE_ROUND, lr=0.03, match_weight=2, seed=5, out="a")
    output_of("run", "--from", "a", "--out", "b")
    first = record_in("a")
    again = record_in("b")
    assert again["config"] == first["config"]
    assert again["summary"] == first["summary"]
    assert again["origin"]["match_weight"] == "run a"

    output_of("run", "fedavg", "--from", "a/record.json", "--lr", 0.5, "--num-clients", 3, "--out", "c")
    # What follows from an option follows.
    changed = {"lr": 0.5, "num_clients": 3, "cohort_size": 3}
    kept = {name: value for name, value in first["config"].items() if name in FIELDS}
    assert record_in("c")["config"] == kept | changed


def test_options_of_a_run_are_for_those_of_several_methods_that_have_them():
    fedcli.run("fedfm", **ONE_ROUND, match_weight=2, out="a")
    assert "--match-weight=2.0" in expand(["fedavg,fedfm", "--from", "a"], "run").arguments
    assert not any("match-weight" in word for word in expand(["fedavg,fedprox", "--from", "a"], "run").arguments)


def test_no_overrides_a_switch_alone():
    Path("exp.toml").write_text("drop-last = true\ndecay = 1\nno-decay = 2\n")
    typed = ["--config", "exp.toml", "--no-drop-last", "--no-decay=3"]
    assert expand(["fedavg", *typed], "run").arguments == ["fedavg", "--decay=1", *typed]


def test_a_list_of_a_file_is_an_option_for_each_where_the_command_lets_it_be_repeated():
    Path("exp.toml").write_text(
        'set = ["fedprox:lr=0.2", "fedprox:momentum=0.5"]\ngrid = ["lr=0.1,1"]\nseeds = [0, 1]\n'
    )
    arguments = ["fedprox", "--set=fedprox:lr=0.2", "--set=fedprox:momentum=0.5", "--grid=lr=0.1,1", "--seeds=0,1"]
    typed = ["--config", "exp.toml"]
    assert expand(["fedprox", *typed], "tune").arguments == [*arguments, *typed]

    repeatable = set()
    for command in ("run", "tune"):
        repeatable |= {flag for option in PROGRAM.commands[command].params if option.multiple for flag in option.opts}
    assert repeatable == set(map(flag_of, REPEATABLE_OPTIONS))


def test_a_file_may_begin_with_the_mark_of_its_encoding():
    Path("exp.toml").write_text("lr = 0.5\n", encoding="utf-8-sig")
    assert "--lr=0.5" in expand(["fedavg", "--config", "exp.toml"], "run").arguments


def test_code_that_a_record_names_is_run_only_if_the_user_names_it():
    Path("mine.py").write_text(Path(fedavg.__file__).read_text().replace('name="fedavg"', 'name="mine"'))
    Path("nets.py").write_text(ONE_LAYER_NETWORK)
    here = Path.cwd()
    named = ("./mine.py", "--backbone", "./nets.py:tiny")
    output_of("run", *named, *flags_of(ONE_ROUND), "--protocol", "fedfm:digits", "--out", "a")
    assert error_of("run", "--from", "a").endswith(f"run only if you name it; add {here}/mine.py.")
    assert error_of("run", "./mine.py", "--from", "a").endswith(f"add --backbone {here}/nets.py:tiny.")

    output_of("run", *named, "--from", "a", "--out", "b")
    assert record_in("b")["summary"] == record_in("a")["summary"]


GRID = (
    "run",
    "fedavg",
    *flags_of(WITHOUT_ROUNDS),
    "--lr",
    "0.01,0.1,0.01",
    "--seeds",
    "0,1",
    "--rounds",
    2,
    "--out",
    "g",
)


def interrupt_after(number, monkeypatch):
    """Interrupts a command at the beginning of a round, when so many have ended."""
    one_round = rounds.one_round
    num_ended = 0

    def interrupted(*arguments):
        nonlocal num_ended
        if num_ended == number:
            raise KeyboardInterrupt
        num_ended += 1
        return one_round(*arguments)

    monkeypatch.setattr(rounds, "one_round", interrupted)


class RunGrid(NamedTuple):
    """A grid that was interrupted and went on."""

    folder: Path  # the working one
    interrupted: Result  # of the command that was interrupted
    text: str  # that the command printed that went on


@pytest.fixture(scope="module")
def run_grid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grid")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        use_plain_terminal(monkeypatch)
        monkeypatch.setattr(display, "plot_run", lambda record, folder: None)
        with pytest.MonkeyPatch.context() as patch:
            interrupt_after(3, patch)  # in the second round of the second run
            interrupted = invoke(*GRID)
        text = output_of(*GRID, "--continue", "--log-file", "log.txt")
    return RunGrid(folder, interrupted, text)


def test_a_grid_that_is_interrupted_says_how_it_goes_on(run_grid):
    assert run_grid.interrupted.exit_code == 130
    end = "interrupted at 1/4 runs; resume by the same command with --out g --continue."
    assert run_grid.interrupted.stderr.splitlines()[-1] == end


def test_values_with_commas_are_a_grid_in_one_folder_with_a_table_and_curves(run_grid, monkeypatch):
    monkeypatch.chdir(run_grid.folder)
    for lr, seed in product((0.01, 0.1), (0, 1)):
        record = record_in(f"g/lr={lr}/seed-{seed}")
        assert record["config"]["lr"] == lr
        assert record["seed"] == seed
        was_interrupted = (lr, seed) == (0.01, 1)
        resumed_after = [1] if was_interrupted else []
        assert record["resumed"] == resumed_after
    assert Path("g/table.md").read_text() in run_grid.text
    assert "| lr 0.01 | 0, 1 |" in run_grid.text
    assert "| lr 0.1 | 0, 1 |" in run_grid.text
    assert Path("g/curves.png").stat().st_size > 1000


def test_the_log_of_a_grid_that_goes_on_has_its_runs(run_grid):
    first_line, *lines = (run_grid.folder / "log.txt").read_text().splitlines()
    assert first_line == "lr 0.01, seed 1: goes on after 1 rounds"
    assert [line[:5] for line in lines if line.startswith("[")] == ["[1/3]", "[2/3]", "[3/3]"]


def test_a_grid_that_has_ended_goes_on_with_nothing_and_is_not_run_again(run_grid, monkeypatch):
    monkeypatch.chdir(run_grid.folder)
    assert output_of(*GRID, "--continue", "--quiet") == ""
    assert "the output folder 'g/lr=0.01/seed-0' exists" in error_of(*GRID)


def test_a_grid_does_not_go_on_with_other_options(run_grid, monkeypatch):
    monkeypatch.chdir(run_grid.folder)
    other = error_of(*GRID, "--batch-size", 7, "--continue")
    assert "'g/lr=0.01/seed-0' holds a run with another --batch-size (got 7, was" in other


def test_a_run_of_a_grid_that_diverges_is_told_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(saving, "write_page_figure", lambda *given, **more: [])
    result = invoke("run", "fedavg", *flags_of(WITHOUT_ROUNDS), "--lr", "1e6,0.1", "--rounds", 3, "--out", "g")
    assert result.exit_code == 1
    assert "lr 1000000.0, seed 0: failed: the term 'cross_entropy' is not finite" in result.stderr
    assert record_in("g/lr=0.1")["status"] == "finished"
    assert "| diverged |" in result.stdout


def test_the_lines_go_to_a_file_and_nowhere_else_if_quiet(monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_after(1, patch)
        result = invoke(
            "run",
            "fedavg",
            *flags_of(WITHOUT_ROUNDS),
            "--rounds",
            2,
            "--out",
            "a",
            "--quiet",
            "--log-file",
            "logs/a.txt",
        )
    said = "interrupted after 1/2 rounds; to resume: fedcli resume a\n"
    assert result.stdout == ""
    assert result.stderr == said
    assert result.exit_code == 130
    assert output_of("resume", "a", "--quiet", "--log-file", "logs/a.txt") == ""

    lines = Path("logs/a.txt").read_text().splitlines()
    assert lines[0] == "method      fedavg, protocol fedfm:digits"
    assert [line[:9] for line in lines if line.startswith("round")] == ["round 1/2", "round 2/2"]
    assert said.strip() in lines

    refused = invoke("resume", "a", "--log-file", "logs/a.txt")  # whose line is also in the file
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: ")
    assert Path("logs/a.txt").read_text().splitlines()[-1] == refused.stderr.removesuffix("\n")
    assert "logs' cannot be used" in error_of("run", "fedavg", *flags_of(ONE_ROUND), "--log-file", "logs")


def test_the_header_warns_of_rounds_that_end_before_the_methods_term():
    arguments = ("run", "fedfm", *flags_of(ONE_ROUND), "--start-round")
    late = "starts after 1 rounds: this run is fedavg; lower --start-round, or give more --rounds\n"
    assert f"inactive    the method's own term, which {late}" in output_of(*arguments, 1)
    assert "inactive" not in output_of(*arguments, 0)


def test_clients_that_train_no_step_are_named():
    options = {"partition": "dirichlet:0.5", "batch_size": 155, "drop_last": True, "rounds": 1}
    record = fedcli.run("fedavg", dataset="digits", backbone="cnn-small", out="run", **options).record
    share = record["config"]["validation"]
    training_sizes = [size - int(size * share) for size in record["partition"]["sizes"]]
    idle = [client for client, size in enumerate(training_sizes) if size < 155]
    assert record["partition"]["idle"] == idle
    text = display.header_texts(record, Path("run"))["idle"]
    assert text == f"clients {', '.join(map(str, idle))}, which have too few images for a step"
