"""Python says and does what the command line does: several methods, grids, tuning, processes and messages."""

import os
import re
import subprocess
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from inspect import signature
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch

import fedcli
from fedcli.declarations import flag_of
from fedcli.errors import NonFiniteLoss, UserError
from fedcli.keywords import keywords_for_flags
from fedcli.results import jobs
from fedcli.results.grids import plan_grid
from fedcli.results.tune import plan_trials
from fedcli.returned import Run, Runs
from fedcli.runs.begin import resolve_runs, run_method
from fedcli.runs.identity import key_of, settings_of
from fedcli.runs.options import EXPERIMENT_OPTIONS, RESERVED_NAMES, flags_of
from fedcli.runs.origins import GivenOptions
from fedcli.runs.record import read_record
from fedcli.runs.rounds import Listener
from tests.commands import PROGRAM, invoke, run_command
from tests.example_records import make_record
from tests.run_options import TWO_ROUNDS
from tests.user_errors import raises_user_error

pytestmark = pytest.mark.long(worker=1)


def configs(runs):
    return [(run.record["method"], run.record["seed"], run.record["config"]["lr"]) for run in runs]


@pytest.fixture(scope="module")
def folder_of_runs(tmp_path_factory):
    return tmp_path_factory.mktemp("api") / "all"


@pytest.fixture(scope="module")
def runs(folder_of_runs):
    """Runs of two methods with two values of an option and two seeds."""
    return fedcli.run("fedavg,fedprox", lr=[0.01, 0.1], seeds=range(2), out=folder_of_runs, **TWO_ROUNDS)


def test_several_methods_values_and_seeds_are_a_list_of_runs(runs, folder_of_runs):
    expected = [(name, seed, lr) for name, lr, seed in product(("fedavg", "fedprox"), (0.01, 0.1), (0, 1))]
    assert configs(runs) == expected
    assert configs(fedcli.load(folder_of_runs)) == expected
    assert len(runs.frame()) == 8


def test_one_value_in_the_place_of_several_is_one(runs, folder_of_runs, tmp_path):
    assert len(fedcli.frame(folder_of_runs, metrics="best")["best, %"]) == len(runs)
    with pytest.raises(UserError, match=r"^unknown option of 'fedavg' 'lrr'; did you mean 'lr'"):
        fedcli.tune("fedavg", grid="lrr=0.01,0.1", out=tmp_path / "new", **TWO_ROUNDS)


def test_several_methods_may_be_a_list(tmp_path):
    runs = fedcli.run(["fedavg", "fedprox"], out=tmp_path / "runs", **TWO_ROUNDS)
    assert [run.record["method"] for run in runs] == ["fedavg", "fedprox"]


def test_an_unknown_method_in_a_list_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"^unknown method 'fedprx'"):
        fedcli.run(["fedavg", "fedprx"], out=tmp_path / "new", **TWO_ROUNDS)
    with pytest.raises(UserError, match=r"^unknown method 'fedprx'"):
        fedcli.tune(["fedavg", "fedprx"], grid={"lr": [0.01, 0.1]}, out=tmp_path / "new", **TWO_ROUNDS)


def test_some_of_several_runs_are_runs(runs):
    first, second = runs[:2]
    assert runs[0] is first
    assert isinstance(runs[:2], Runs)
    assert runs[:2] == [first, second]


def test_runs_of_which_none_has_begun_say_so():
    assert "no runs" in Runs()._repr_html_()
    with raises_user_error("a table needs a run"):
        Runs().table()
    assert len(Runs().frame()) == 0


def test_a_table_of_runs_has_a_row_a_setting_and_the_columns_that_are_named(runs):
    assert len(runs.table()) == 4
    _, method = runs.table(columns=["Selected", "Method"], digits=0).iloc[0]
    assert method == "fedavg"
    assert "FedProx & lr 0.1 & " in runs.table(format="latex", digits=1)
    assert r"\label{tab:mine}" in runs.table(format="latex", label="tab:mine")
    with raises_user_error("unknown column in columns 'Metod'; did you mean 'Method'"):
        runs.table(format="latex", columns=["Metod"])


def test_a_plot_of_runs_has_a_line_a_setting(runs):
    axes, *_ = runs.plot().axes
    labels = [line.get_label() for line in axes.lines]
    names = [label for label in labels if not label.startswith("headline: ")]  # those are marks
    assert names == ["FedAvg, lr 0.01", "FedAvg, lr 0.1", "FedProx, lr 0.01", "FedProx, lr 0.1"]


def test_the_command_line_makes_the_same_runs(runs, tmp_path):
    command = ["run", "fedavg,fedprox", "--lr", "0.01,0.1", "--seeds", "0-1", "--out", tmp_path / "typed"]
    run_command(*command, *flags_of(TWO_ROUNDS), "--quiet")

    typed = fedcli.load(tmp_path / "typed")
    assert [run.record["summary"] for run in typed] == [run.record["summary"] for run in runs]


def test_an_option_of_one_method_is_given_by_name_or_to_those_that_have_it(tmp_path):
    options = {"set": {"fedprox": {"lr": 0.3}}, "proximal_weight": 0.5, **TWO_ROUNDS}
    fedavg, fedprox = fedcli.run("fedavg,fedprox", out=tmp_path / "set", **options)
    assert "proximal_weight" not in fedavg.record["config"]
    assert fedprox.record["config"]["proximal_weight"] == 0.5
    assert fedprox.record["config"]["lr"] == 0.3


SEVERAL = "fedavg,fedprox"
UNKNOWN_METHOD = "unknown method in set 'fedpox'; did you mean 'fedprox'? this command has fedavg, fedprox"


@pytest.mark.parametrize("call", [fedcli.run, fedcli.tune])
@pytest.mark.parametrize(
    ("methods", "options", "message"),
    [
        pytest.param(SEVERAL, {"set": {"fedpox": {"lr": 0.3}}}, UNKNOWN_METHOD, id="misspelt method"),
        pytest.param(SEVERAL, {"set": {"fedpox": {}}}, UNKNOWN_METHOD, id="misspelt method without options"),
        pytest.param(
            "fedavg",
            {"set": {"fedpox": {"lr": 0.3}}},
            "unknown method in set 'fedpox'; this command has fedavg",
            id="misspelt method beside one",
        ),
        pytest.param(
            "fedavg",
            {"set": {"lr": 0.3}},
            "set must have the options of each method by its name (got 'lr': 0.3)",
            id="options without a method",
        ),
        pytest.param("fedavg", {"set": 3}, "set must have the options of each method by its name (got 3)", id="number"),
        pytest.param(
            "fedavg",
            {"set": "fedavg:lr=0.1"},
            "set must have the options of each method by its name (got 'fedavg:lr=0.1')",
            id="text",
        ),
        pytest.param(
            SEVERAL,
            {"set": {"fedavg": {"proximal_weight": 1}}},
            "unknown option of 'fedavg' 'proximal_weight'",
            id="option of another method",
        ),
        pytest.param(
            "fedavg",
            {"set": {"fedavg": {"out": "elsewhere"}}},
            "out is an option of the command 'fedcli run'",
            id="option of the command",
        ),
        pytest.param(SEVERAL, {"set": {"fedprox": {"lr": -1}}}, "lr must be", id="value out of range"),
        pytest.param(
            SEVERAL,
            {"set": {"fedprox": {"lr": (0.1, 0.2)}}},
            "set gives an option one value (got 0.1,0.2 for lr)",
            id="several values",
        ),
        pytest.param(
            "fedavg",
            {"set": {"fedavg": {"lr": np.array([1, 2])}}},
            "set gives an option one value (got 1,2 for lr)",
            id="an array",
        ),
        pytest.param("fedavg", {"set": {"fedavg": {"lr": ()}}}, "lr has no value (got ())", id="no value"),
    ],
)
def test_options_of_single_methods_that_no_run_would_have_are_refused(call, methods, options, message, tmp_path):
    grid = {"grid": {"batch_size": [8, 16]}} if call is fedcli.tune else {}
    with raises_user_error(message):
        call(methods, out=tmp_path / "out", **grid, **options, **TWO_ROUNDS)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("call", [fedcli.run, fedcli.tune])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"lr": []}, "lr has no value (got []); give one or several.", id="empty list"),
        pytest.param(
            {"lr": np.array([])},
            "lr has no value (got array([], dtype=float64)); give one or several.",
            id="empty array",
        ),
        pytest.param({"lr": [[0.1]]}, "lr must be of type float (got [0.1])", id="list in a list"),
        pytest.param({"lr": np.array([[0.1]])}, "lr must be of type float (got [0.1])", id="array of two axes"),
        pytest.param({"lr": {0.1}}, "lr must be of type float (got {0.1})", id="set"),
        pytest.param(
            {"batch_size": np.float64(8)},
            "batch_size must be of type int (got 8.0)",
            id="NumPy float for a whole number",
        ),
        pytest.param(
            {"batch_size": torch.tensor([8.0])}, "batch_size must be of type int (got 8.0)", id="tensor of floats"
        ),
        pytest.param(
            {"seeds": 3}, "seeds must be several (got 3); write seed=3, or seeds=range(3).", id="number as seeds"
        ),
        pytest.param(
            {"seeds": np.int64(3)},
            "seeds must be several (got 3); write seed=3, or seeds=range(3).",
            id="NumPy number as seeds",
        ),
        pytest.param({"seeds": "0-2"}, "seeds must be numbers and no text (got '0-2')", id="text as seeds"),
        pytest.param({"seeds": np.str_("3")}, "seeds must be numbers and no text (got '3')", id="NumPy's text"),
        pytest.param({"seeds": b"02"}, "seeds must be numbers and no text (got b'02')", id="bytes as seeds"),
        pytest.param(
            {"seeds": np.array([0.0, 1.0])},
            "seeds must be distinct whole numbers from 0 (got '0.0,1.0')",
            id="floats as seeds",
        ),
        pytest.param(
            {"batch_size": 10**5000}, "a whole number is larger than any option's (got one of", id="huge number"
        ),
        pytest.param({"protocol": 5}, "protocol must be of type str (got 5)", id="number as protocol"),
        pytest.param({"dataset": 5}, "dataset must be of type str (got 5)", id="number as data set"),
        pytest.param({"post": {"a": 1}}, "post must be of type str (got {'a': 1})", id="dict as step"),
        pytest.param({"seeds": [10**5000]}, "a whole number is larger than any option's (got one of", id="huge seed"),
    ],
)
def test_what_is_neither_a_value_nor_several_is_refused_by_name(call, options, message, tmp_path):
    grid = {"grid": {"momentum": [0.5, 0.9]}} if call is fedcli.tune else {}
    with raises_user_error(message):
        call("fedavg", out=tmp_path / "out", **grid, **{**TWO_ROUNDS, **options})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("call", [fedcli.run, fedcli.tune])
@pytest.mark.parametrize("jobs", [0, -1, 1.5, True, None])
def test_parallel_runs_are_a_whole_number_from_1_on(call, jobs, tmp_path):
    grid = {"grid": {"momentum": [0.5, 0.9]}} if call is fedcli.tune else {}
    with raises_user_error(f"jobs must be a whole number from 1 on (got {jobs!r})"):
        call("fedavg", out=tmp_path / "out", jobs=jobs, **grid, **TWO_ROUNDS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": [0.1, 0.2], "progress": Listener()}, "progress is for one method with one value of each option"),
        ({"jobs": 2, "progress": Listener()}, "progress is for one method with one value of each option"),
        ({"exist_ok": True, "continue_": True}, "exist_ok renames the runs that are there, and continue_ goes on"),
    ],
)
def test_arguments_of_which_one_would_be_ignored_are_refused(options, message, tmp_path):
    with raises_user_error(message):
        fedcli.run("fedavg", out=tmp_path / "out", **TWO_ROUNDS, **options)
    assert not (tmp_path / "out").exists()


def test_a_whole_number_in_the_place_of_a_float_is_the_same_experiment(tmp_path):
    options = {**TWO_ROUNDS, "rounds": 1}
    runs = [fedcli.run("fedavg", out=tmp_path / f"{value}", momentum=value, **options) for value in (0, 0.0)]
    assert type(runs[0].record["config"]["momentum"]) is float
    older = runs[1].record
    older["config"]["momentum"] = 0  # as a record had it before
    assert key_of(settings_of(older)) == key_of(settings_of(runs[0].record))


def test_an_interval_of_checkpoints_may_be_auto_in_a_grid(tmp_path):
    tuned = fedcli.tune("fedavg", grid={"lr": [0.1]}, out=tmp_path, **{**TWO_ROUNDS, "checkpoint_every": "auto"})
    assert len(tuned.trials) == 1


def test_none_counts_as_not_given(tmp_path):
    run = fedcli.run("fedavg", lr=None, set={"fedavg": {"momentum": None}}, out=tmp_path / "run", **TWO_ROUNDS)
    assert run.record["origin"]["lr"] == run.record["origin"]["momentum"] == "protocol fedfm:digits"
    nothing = {"validation": None, "set": {"fedavg": {"momentum": None}}}
    tuned = fedcli.tune("fedavg", grid={"lr": [0.1]}, out=tmp_path / "tuned", **nothing, **TWO_ROUNDS)
    assert len(tuned.trials) == 1


def test_numbers_of_numpy_and_pytorch_are_those_of_python(tmp_path):
    options = {
        "lr": np.float64(0.25), "momentum": np.array([0.5]), "batch_size": torch.tensor(8),
        "drop_last": np.bool_(True), "partition": np.str_("iid"), "num_clients": [np.int64(4)],
    }  # fmt: skip
    values = {name: value[0] if name in ("momentum", "num_clients") else value for name, value in options.items()}
    expected = {name: value.item() for name, value in values.items()}

    def assert_recorded(run):
        recorded = {name: run.record["config"][name] for name in expected}
        assert repr(recorded) == repr(expected)  # also of the same types

    assert_recorded(fedcli.run("fedavg", set={"fedavg": options}, out=tmp_path / "one", **TWO_ROUNDS))
    (run,) = fedcli.run("fedavg", seeds=np.arange(1), out=tmp_path / "seeds", **TWO_ROUNDS, **options)
    assert_recorded(run)
    runs = fedcli.run("fedavg", lr=torch.tensor([0.25, 0.5]), jobs=np.int64(1), out=tmp_path / "two", **TWO_ROUNDS)
    assert [run.record["config"]["lr"] for run in runs] == [0.25, 0.5]
    grid = {"lr": np.float64(0.25), "momentum": np.array([0.5, 0.75])}
    with pytest.warns(UserWarning, match="at the edge of its grid"):  # as either momentum is
        tuned = fedcli.tune("fedavg", grid=grid, jobs=torch.tensor(1), out=tmp_path / "tuned", **TWO_ROUNDS)
    tried = [repr(options) for options in tuned.trials["options"]]
    assert sorted(tried) == ["{'lr': 0.25, 'momentum': 0.5}", "{'lr': 0.25, 'momentum': 0.75}"]


def test_a_value_that_a_grid_would_replace_is_refused(tmp_path):
    single = {"fedprox": {"lr": 0.3}}
    for grid in ({"lr": [0.01, 0.1]}, {"fedavg:lr": [0.1], "fedprox:lr": [0.01, 0.1]}):
        with raises_user_error("lr of 'fedprox' is given twice (got grid and set)"):
            fedcli.tune(SEVERAL, grid=grid, set=single, out=tmp_path / "tuned", **TWO_ROUNDS)
    with raises_user_error("unknown method in grid 'fedpox'"):
        fedcli.tune(SEVERAL, grid={"fedpox:lr": [0.01, 0.1]}, out=tmp_path / "tuned", **TWO_ROUNDS)


def test_methods_under_different_protocols_are_warned_of(tmp_path):
    words = (
        r"\(fedfm:digits: fedavg, fedprox; fedfa:digits: fedfa\); give all of them one, such as protocol=fedfm:digits"
    )
    with pytest.warns(UserWarning, match=words):
        fedcli.run("fedavg,fedfa,fedprox", out=tmp_path / "mixed", **TWO_ROUNDS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fedcli.run("fedavg,fedfa,fedprox", protocol="fedfm:digits", out=tmp_path / "one", **TWO_ROUNDS)
    result = invoke("tune", "fedavg,fedfa", "--grid=lr=0.1", "--out", tmp_path / "tuned", *flags_of(TWO_ROUNDS))
    assert "warning: these methods have different protocols" in result.stderr
    assert "such as --protocol=fedfm:digits" in result.stderr


DIVERGING = """
import torch
from dataclasses import replace
from fedcli.papers.baselines.fedavg import METHOD as SIMPLE

def run_round(state, cohort, fed, config):
    state, terms = SIMPLE.run_round(state, cohort, fed, config)
    factor = torch.inf if fed.config.seed == 0 else 1
    return state, {name: factor * value for name, value in terms.items()}

METHOD = replace(SIMPLE, name="mine", run_round=run_round)
"""


@pytest.mark.slow
def test_seeds_after_one_that_diverges_are_run(tmp_path, monkeypatch):
    """Whether they run one after the other or in processes."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(DIVERGING)
    with pytest.raises(NonFiniteLoss):
        fedcli.run("mine.py", seeds=[0, 1], out="one", **TWO_ROUNDS)
    with pytest.warns(UserWarning, match="seed-0' has failed"):
        fedcli.run("mine.py", seeds=[0, 1], out="both", jobs=2, **TWO_ROUNDS)
    for folder in ("one", "both"):
        statuses = [fedcli.load(f"{folder}/seed-{seed}").record["status"] for seed in (0, 1)]
        assert statuses == ["failed", "finished"]


def test_a_run_that_diverges_is_warned_of_and_the_others_are_there(tmp_path):
    with pytest.warns(UserWarning, match="seed-0' has failed|lr=1e\\+30' has failed"):
        runs = fedcli.run("fedavg", lr=[0.01, 1e30], out=tmp_path / "all", **TWO_ROUNDS)
    assert [run.record["status"] for run in runs] == ["finished", "failed"]


def fail_fedprox_before_its_record(monkeypatch):
    """A run of FedProx fails from here on before it has a record."""
    start_or_resume = jobs._start_or_resume

    def fails(task, progress):
        if task.method_source == "fedprox":
            raise OSError("no images")
        start_or_resume(task, progress)

    monkeypatch.setattr(jobs, "_start_or_resume", fails)


def test_a_run_that_fails_before_its_record_is_warned_of_and_the_others_are_there(tmp_path, monkeypatch):
    fail_fedprox_before_its_record(monkeypatch)
    with pytest.warns(UserWarning, match="fedprox.*has failed: OSError: no images"):
        (run,) = fedcli.run("fedavg,fedprox", protocol="fedfm:digits", out=tmp_path / "both", **TWO_ROUNDS)
    assert run.record["method"] == "fedavg"
    result = invoke("run", "fedprox", "--seeds", "0,1", "--out", tmp_path / "none", *flags_of(TWO_ROUNDS))
    assert result.exit_code == 1
    assert "OSError: no images" in result.stderr


def test_an_accuracy_of_zero_is_shown_and_none_is_nan(tmp_path):
    for selected, shown in ((0.0, "0.00%"), (None, "nan%")):
        record = make_record()
        record["summary"]["selected"] = selected
        assert f": {shown} (best-validation), in" in repr(Run(record=record, state=None, path=tmp_path))


def test_what_is_tuned_is_given_to_a_run(tmp_path):
    edge = pytest.warns(UserWarning, match="fed.*: the best (lr|proximal_weight), .* is at the edge of its grid")
    with edge, pytest.warns(UserWarning, match="fedprox: 2 of its 4 combinations, .*; trials=4 tries all"):
        best = fedcli.tune(
            "fedavg,fedprox", grid={"lr": [0.01, 0.1], "fedprox:proximal_weight": [0.1, 1]}, seeds=[1000],
            out=tmp_path / "tuned", **TWO_ROUNDS,
        )  # fmt: skip
    assert best.trials.groupby("method").size().tolist() == [2, 2]
    assert re.fullmatch(r"Tuned\(fedavg: lr 0.0?1; fedprox: lr 0.0?1, proximal weight \S+; in '.*tuned'\)", repr(best))

    runs = fedcli.run("fedavg,fedprox", tuned=best, out=tmp_path / "runs", **TWO_ROUNDS)
    for run in runs:
        chosen = best.options[run.record["method"]]
        assert {name: run.record["config"][name] for name in chosen} == chosen


@pytest.mark.slow
def test_processes_start_from_a_script_without_a_guard(tmp_path):
    script = tmp_path / "study.py"
    script.write_text(
        "import fedcli\nprint('once')\n"
        f"runs = fedcli.run('fedavg', seeds=range(2), jobs=2, out={str(tmp_path / 'runs')!r}, **{TWO_ROUNDS!r})\n"
        "print([run.record['status'] for run in runs])\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.stdout == "once\n['finished', 'finished']\n", done.stderr
    assert read_record(tmp_path / "runs" / "seed-1")["status"] == "finished"


def test_processes_of_the_users_own_program_go_on(tmp_path):
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        before = pool.submit(os.getpid).result()
        fedcli.run("fedavg", seeds=[0], jobs=2, out=tmp_path / "runs", **TWO_ROUNDS)
        assert pool.submit(os.getpid).result() == before


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(
            lambda out: fedcli.run("fedavg", lr=-1, out=out, **TWO_ROUNDS), "lr must be", id="value out of range"
        ),
        pytest.param(
            lambda out: fedcli.run("fedavg", seeds=[0, 0], out=out, **TWO_ROUNDS),
            "seeds must be distinct",
            id="seed twice",
        ),
        pytest.param(
            lambda out: fedcli.run("fedavg", local_epoch=1, out=out, **TWO_ROUNDS),
            "did you mean 'local_epochs'",
            id="misspelt option",
        ),
        pytest.param(
            lambda out: fedcli.run("fedavg", continue_=True, **TWO_ROUNDS),
            "name it with out.",
            id="continue_ without out",
        ),
        pytest.param(
            lambda out: fedcli.tune("fedavg", grid={"lrr": [1]}, out=out, **TWO_ROUNDS),
            "did you mean 'lr'",
            id="misspelt option of a grid",
        ),
    ],
)
def test_a_refusal_names_keyword_arguments(call, words, tmp_path):
    with raises_user_error(words) as caught:
        call(tmp_path / "new")
    assert "--" not in str(caught.value).replace("fedcli run fedavg --help", "")


@pytest.mark.parametrize("path", ["/a/--lr/b.py", "/a/--no-lr/b.csv", "--lr/b.csv", "/a/the --lr/b.csv", "a/--lr"])
def test_a_refusal_leaves_a_path_as_it_is(path):
    assert keywords_for_flags(f"'{path}' is no file; see --num-clients.") == f"'{path}' is no file; see num_clients."


def test_a_switch_that_must_be_off_is_named_with_its_value(tmp_path):
    with raises_user_error("or less, or drop_last=False"):
        fedcli.run("fedavg", batch_size=1000, drop_last=True, out=tmp_path / "new", **TWO_ROUNDS)


@pytest.mark.parametrize("name", ["run", "tune"])
def test_no_method_may_have_an_option_that_a_command_or_a_call_has(name):
    call = getattr(fedcli, name)
    keywords = {keyword for keyword in signature(call).parameters if keyword != "options"}  # `**options`
    flags = set()
    for parameter in PROGRAM.commands[name].params:
        flags |= {flag for flag in parameter.opts if flag.startswith("--")}
    assert keywords <= RESERVED_NAMES
    assert flags <= set(map(flag_of, RESERVED_NAMES))


def test_an_option_of_the_command_line_alone_is_refused_as_such(tmp_path):
    alone = set(EXPERIMENT_OPTIONS) - set(signature(fedcli.run).parameters)
    assert {"workers", "config", "from_"} <= alone
    for name in alone:
        refuse = f"{name} is an option of the command 'fedcli run', and of no single run"
        remedy = f"as in 'fedcli run fedavg {flag_of(name)} ...', or leave it out"
        for call in (fedcli.run, partial(fedcli.tune, grid={"lr": [0.01, 0.1]})):
            with pytest.raises(UserError, match=f"^{refuse}.*{remedy}.$"):
                call("fedavg", out=tmp_path / "new", **{**TWO_ROUNDS, name: 1})
    for name in EXPERIMENT_OPTIONS:
        with pytest.raises(UserError, match=f"^{name} is an option of the command"):
            fedcli.run("fedavg", set={"fedavg": {name: 1}}, out=tmp_path / "new", **TWO_ROUNDS)
    with raises_user_error() as caught:
        fedcli.run("fedavg", worker=1, out=tmp_path / "new", **TWO_ROUNDS)
    assert "did you mean" not in str(caught.value)  # no call takes `workers`


@pytest.mark.parametrize("call", [fedcli.run, fedcli.tune])
def test_an_argument_of_what_a_call_is_made_of_is_an_unknown_option(call, tmp_path):
    """As any other name that is none; it does not get there by name."""
    inner_calls = (run_method, resolve_runs, plan_grid, plan_trials, GivenOptions)
    names = {name for inner in inner_calls for name in signature(inner).parameters}
    names -= {*signature(call).parameters, *EXPERIMENT_OPTIONS}
    assert {"sources", "values", "given", "method_options"} <= names
    grids = [{"grid": {"lr": [0.1]}}] if call is fedcli.tune else [{}, {"lr": [0.01, 0.1]}]
    for name, value, grid in product(names, ({}, "x", [1, 2]), grids):
        with pytest.raises(UserError, match=f"^unknown option of 'fedavg' '{name}'"):
            call("fedavg", out=tmp_path / "new", **TWO_ROUNDS, **grid, **{name: value})
    assert not (tmp_path / "new").exists()


def test_a_cell_that_runs_twice_is_told_what_to_write(tmp_path):
    fedcli.run("fedavg", out=tmp_path / "one", **TWO_ROUNDS)
    with raises_user_error("go on with continue_=True, rename the old one by exist_ok=True, or choose"):
        fedcli.run("fedavg", out=tmp_path / "one", **TWO_ROUNDS)
