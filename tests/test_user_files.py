"""What a user brings in a file of their own: found, run, resumed, and refused in a line where it cannot be right."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import fedcli
from fedcli import check, registry, userfiles
from fedcli.core import backbones, partition
from fedcli.data import datasets
from fedcli.results import plans
from fedcli.runs import resume
from fedcli.runs.begin import begin
from fedcli.runs.identity import planned_settings, settings_of
from fedcli.runs.options import flags_of
from fedcli.runs.record import read_record
from fedcli.runs.resolve import resolve
from fedcli.userfiles import modules
from tests.commands import output_of, run_command
from tests.example_parts import PARTS_FILE, PARTS_OPTIONS
from tests.listeners import Stop, StopAfter
from tests.network_sources import NETWORKS
from tests.run_options import SHORT_RUN
from tests.user_errors import raises_user_error


@pytest.fixture(autouse=True)
def files(folder):
    """Writes the files with parts and networks into the working folder, which is empty otherwise."""
    shutil.copy(PARTS_FILE, "parts.py")
    Path("nets.py").write_text(NETWORKS)


FILE_OF_METHODS = '''"""My card."""

from dataclasses import dataclass, replace
from fedcli import Cell, DataSetting, Post, Protocol, Table, option
from fedcli.papers.baselines import fedprox
from fedcli.papers.baselines.fedavg import METHOD as SIMPLE

PLAIN = replace(SIMPLE, name="plain", default_protocol="")
METHODS = (PLAIN, replace(fedprox.METHOD, name="other"), SIMPLE)
PROTOCOLS = (Protocol("mine:digits", "s", "s", {"rounds": 1, "num_clients": 2}, {
    "digits": DataSetting("cnn-small", (0.5,), (0.5,), "s")}, "last"),)
TABLES = (Table("mine:1", "title", ("mine", "1"), (
    Cell("a", "b", "plain", {"post": "half"}), Cell("a", "c", f"{__file__}:plain", {"post": "half"}),
    Cell("a", "d", "fedprox", {"protocol": "mine:digits", "post": "half"}))),)

@dataclass(frozen=True)
class Config:
    share: float = option(0.5, "Share")

def apply(params, buffers, fed, config):
    return {name: value * config.share for name, value in params.items()}, buffers, 0

POST = Post("half", "Halve the parameters", Config, apply)
'''


@pytest.fixture
def methods_file():
    """Writes a file with methods, a protocol, a table and a step after a run; returns its path."""
    Path("mine.py").write_text(FILE_OF_METHODS)
    return str(Path("mine.py").resolve())


@pytest.mark.parametrize(("text", "name"), [("other", "other"), ("PLAIN", "plain")])
def test_a_method_of_a_file_is_found_by_its_name_or_its_variable(text, name, methods_file):
    method = registry.find_method(f"./mine.py:{text}")  # made of a paper's, and that of the user's file
    assert method.name == name
    assert method.file_hash == userfiles.file_hash("mine.py")
    assert str(method.file) == methods_file
    assert registry.find_protocol("mine:digits", method).name == "mine:digits"


def test_a_method_that_a_file_imports_is_not_its_own(methods_file):
    assert registry.find_method("./mine.py:SIMPLE") is registry.find_method("fedavg")


def test_a_name_that_a_file_does_not_have_is_refused(methods_file):
    with raises_user_error("unknown METHOD in", "plain, other", "mine.py:NAME"):
        registry.find_method("./mine.py")
    with raises_user_error("did you mean 'other'?"):
        registry.find_method("./mine.py:othr")

    Path("empty.py").write_text("")
    with raises_user_error("defines no METHOD; add METHOD = fedcli.Method(...)."):
        registry.find_method("./empty.py")


PROTOCOL_WITH_FILES = """from fedcli import DataSetting, Protocol
SIZES = {"rounds": 2, "num_clients": 2, "batch_size": 8}
SETTINGS = {**SIZES, "partition": "parts/parts.py:by_halves", "post": "beside.py:POST"}
DATA = {"parts/parts.py:blobs": DataSetting("parts/parts.py:tiny", (0.5,), (0.5,), "s", top_k=2)}
PROTOCOL = Protocol("mine:files", "s", "s", SETTINGS, DATA, "last")
"""


def test_files_that_a_protocol_names_are_seen_from_its_folder_or_from_the_working_one(tmp_path, monkeypatch):
    """Runs have their paths, so that they go on and are opened anywhere."""
    home = tmp_path / "home"
    (home / "parts").mkdir(parents=True)
    shutil.copy(PARTS_FILE, home / "parts/parts.py")
    (home / "protocol.py").write_text(PROTOCOL_WITH_FILES)
    Path("beside.py").write_text(FILE_OF_METHODS)
    with pytest.raises(Stop):
        fedcli.run("fedavg", out=home / "run", protocol=f"{home}/protocol.py:PROTOCOL", progress=StopAfter(1))
    record = fedcli.load(home / "run").record
    parts = f"{(home / 'parts/parts.py').resolve()}"
    step = str(Path("beside.py").resolve())
    config = record["config"]
    assert config["backbone"] == f"{parts}:tiny"
    assert config["partition"] == f"{parts}:by_halves"
    assert config["dataset"] == f"{parts}:blobs"
    assert config["post"] == f"{step}:POST"

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    files = [str(home / "protocol.py"), parts, step]
    record = resume.resume(home / "run", files=files).record
    assert len(record["rounds"]) == 2
    assert record["normalisation"]["mean"] == [0.5]
    assert fedcli.load(home / "run", method=files).model()


def test_a_method_made_of_another_files_method_has_its_protocols():
    """Runs of it go on, too."""
    text = FILE_OF_METHODS.replace('"rounds": 1', '"rounds": 2').replace("METHODS = (PLAIN, ", "METHODS = (ROUNDS, ")
    rounds = "def run_round(*parts): return SIMPLE.run_round(*parts)\nROUNDS = replace(PLAIN, run_round=run_round)\n"
    Path("base.py").write_text(text.replace("METHODS = (", f"{rounds}METHODS = ("))
    Path("mine.py").write_text(
        "import base\nfrom dataclasses import replace\nMETHOD = replace(base.ROUNDS, name='mine')"
    )
    with pytest.raises(Stop):
        fedcli.run("mine.py", out="run", train_examples=40, device="cpu", progress=StopAfter(1))
    record = resume.resume("run", files="mine.py").record
    assert record["protocol"] == "mine:digits"
    assert len(record["rounds"]) == 2


def test_a_protocol_of_a_file_may_have_a_step_after():
    Path("stepped.py").write_text(FILE_OF_METHODS.replace('"num_clients": 2', '"num_clients": 2, "post": "ccvr"'))
    assert resolve(registry.find_method("./stepped.py:plain"), {"dataset": "digits"}).post.name == "ccvr"


def test_the_cells_of_a_files_table_are_runs_of_its_methods_and_of_others(methods_file):
    cells = plans.plan_table(registry.find_table("./mine.py:mine:1")).cells
    setups = [cell.runs[0].setup for cell in cells]
    assert [setup.method.name for setup in setups] == ["plain", "plain", "fedprox"]
    assert {setup.protocol.name for setup in setups} == {"mine:digits"}
    assert {setup.post.name for setup in setups} == {"half"}


def test_a_run_of_a_method_of_a_file_records_the_file(methods_file):
    command = "run ./mine.py:plain --post ./mine.py:POST --share 0.25 --train-examples 40"
    run_command(*command.split(), "--device", "cpu", "--out", "run")

    file_hash = userfiles.file_hash("mine.py")
    record = json.loads(Path("run/record.json").read_text())
    assert record["protocol"] == "mine:digits"
    assert record["post"]["name"] == "half"
    assert record["config"]["share"] == 0.25
    assert record["method_hash"] == file_hash
    assert record["user_files"] == {methods_file: file_hash}


# A method that is made of no other, and one that is made of a paper's.
OWN_METHOD = """from fedcli import Method
from fedcli.papers.baselines.fedavg import Config, ServerState, init
def run_round(state, cohort, fed, config): return state, {}
METHOD = Method('mine', 'Mine', Config, init, run_round, SIMPLER, state_types=(ServerState,))
"""
PAPERS_METHOD = """from dataclasses import replace
from fedcli.papers import fedcme
METHOD = replace(fedcme.METHOD, name='mine')
"""


@pytest.mark.parametrize(
    ("text", "protocol"),
    [
        pytest.param(PAPERS_METHOD, "fedcme:digits", id="of a paper"),
        pytest.param(OWN_METHOD.replace("SIMPLER", "('fedavg', {})"), "fedfm:digits", id="with a simpler method"),
        pytest.param(OWN_METHOD.replace("SIMPLER", "None"), "own:data", id="without a simpler method"),
    ],
)
def test_a_method_without_a_protocol_has_that_of_its_paper_or_of_its_simpler_method(text, protocol):
    Path("mine.py").write_text(text)
    assert registry.default_protocol(registry.find_method("./mine.py"), "digits").name == protocol


def test_a_method_without_a_simpler_one_leaves_the_laws_out_that_compare_them():
    Path("mine.py").write_text(OWN_METHOD.replace(" SIMPLER,", ""))
    result = run_command("check", "./mine.py", "--law", "1", "--law", "2", "--law", "5", "--device", "cpu")
    assert result.output.count("nothing, without reduces_to") == 2
    assert "1 of 1 laws hold on cpu; 2 left out, see above." in result.output


def test_personal_models_are_not_compared_with_a_global_one():
    of_local = PAPERS_METHOD.replace("import fedcme", "import fedcme\nfrom fedcli.papers.baselines import local")
    Path("mine.py").write_text(
        of_local.replace("fedcme.METHOD, name='mine'", "local.METHOD, name='mine', reduces_to=('fedavg', {})")
    )
    method = registry.find_method("./mine.py")
    for number in (1, 2):
        findings = check.check(method, number, "cpu")
        assert findings
        for finding in findings:
            assert "the tested models of 'mine' are personal and those of 'fedavg' global" in str(finding)


def test_a_file_is_imported_once_and_anew_when_it_has_changed():
    Path("counts.py").write_text("def f(): return 1\n")
    metric = userfiles.find_user_function("counts.py:f", "metric")
    again = userfiles.find_user_function("counts.py:f", "metric")
    assert metric.function is again.function

    Path("counts.py").write_text("def f(): return 2\n")
    assert userfiles.find_user_function("counts.py:f", "metric")() == 2


def test_an_error_inside_names_the_line_and_keeps_its_cause():
    Path("own.py").write_text("def g(x):\n    return x[5]\n\ndef f(x):\n    return g(x)\n")
    function = userfiles.find_user_function("own.py:f", "metric")
    with raises_user_error("own.py' fails in line 2 (got IndexError: list index out of range)") as caught:
        function([1])
    assert isinstance(caught.value.__cause__, IndexError)
    with raises_user_error("fails in line 4 (got TypeError: f() takes 1 positional argument"):
        function(1, 2)
    with pytest.raises(KeyError), userfiles.blame("own.py", passes=lambda error: isinstance(error, KeyError)):
        raise KeyError("left alone")


def test_a_file_may_import_those_beside_it_whose_names_may_be_taken_elsewhere(tmp_path):
    source = "import helpers\n\ndef f(x):\n    from late import LATE\n    return helpers.twice(x) + LATE\n"
    for name, factor in (("one", 2), ("other", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.py").write_text(source)
        (tmp_path / name / "helpers.py").write_text(f"import shapes\ndef twice(x): return {factor} * x + shapes.NONE\n")
        (tmp_path / name / "shapes.py").write_text("NONE = 0\n")
        (tmp_path / name / "late.py").write_text(f"LATE = {factor}00\n")

    metric = userfiles.find_user_function(f"{tmp_path}/one/own.py:f", "metric")
    other_metric = userfiles.find_user_function(f"{tmp_path}/other/own.py:f", "metric")
    assert metric(5) == 2 * 5 + 200
    assert other_metric(5) == 3 * 5 + 300
    assert "helpers" not in sys.modules

    (tmp_path / "one" / "shapes.py").write_text("NONE = 1\n")
    # It is imported anew, though it is the same.
    assert userfiles.find_user_function(f"{tmp_path}/one/own.py:f", "metric")(5) == 211


@pytest.mark.slow
@pytest.mark.parametrize(
    "several",
    [{}, {"seeds": [0]}, {"lr": [0.01, 0.1]}, {"seeds": [0], "jobs": 2}],
    ids=["a run", "seeds", "values", "processes"],
)
def test_runs_that_a_call_returns_have_all_files_that_they_need(several, methods_file):
    options = {**PARTS_OPTIONS, "protocol": "mine.py:mine:digits", "post": "mine.py:POST"}
    returned = fedcli.run("mine.py:plain", out="run", **options, **several)
    runs = returned if several else [returned]
    for run in runs:
        assert len(run.record["user_files"]) == 2
        assert run.model()


def test_a_function_imports_the_file_beside_it_as_it_was_when_its_own_file_was_imported():
    Path("main.py").write_text("def f():\n    import helper\n    return helper.VALUE\n")
    Path("helper.py").write_text("VALUE = 1\n")
    function = userfiles.find_user_function("main.py:f", "metric")
    later_function = userfiles.find_user_function("main.py:f", "metric")
    assert function() == 1
    Path("helper.py").write_text("VALUE = 2\n")
    assert function() == later_function() == 1

    new_function = userfiles.find_user_function("main.py:f", "metric")
    Path("helper.py").write_text("VALUE = 3\n")
    with raises_user_error("helper.py' has changed since", "main.py' was imported; start again."):
        new_function()
    assert userfiles.find_user_function("main.py:f", "metric")() == 3


def test_a_file_that_is_edited_while_it_is_imported_is_refused(monkeypatch):
    """A record would have the hash of the one, and results of the other."""
    Path("main.py").write_text("def f():\n    return 1\n")

    def hash_and_edit(path):
        digest = userfiles.file_hash(path)
        monkeypatch.setattr(modules, "file_hash", userfiles.file_hash)
        Path(path).write_text("def f():\n    return 2\n")
        return digest

    monkeypatch.setattr(modules, "file_hash", hash_and_edit)
    with raises_user_error("main.py' or one that it imports has changed while it was read; start again."):
        userfiles.find_user_function("main.py:f", "metric")
    assert userfiles.find_user_function("main.py:f", "metric")() == 2


def test_a_record_has_the_hashes_of_the_code_that_ran_though_its_files_were_edited_meanwhile():
    """The method and the partition are those of the set-up; the network is imported when the run begins."""
    method_text = """
from dataclasses import replace
import torch
from fedcli.papers.baselines.fedavg import METHOD as SIMPLE
def run_round(state, cohort, fed, config):
    state, terms = SIMPLE.run_round(state, cohort, fed, config)
    return state, terms | {"version": torch.full((len(cohort.client_ids),), 1.0)}
METHOD = replace(SIMPLE, name="mine", run_round=run_round)
"""
    parts_text = Path("parts.py").read_text()
    networks_text = Path("nets.py").read_text()
    Path("mine.py").write_text(method_text)
    options = {**SHORT_RUN, "rounds": 2, "backbone": "nets.py:shared", "partition": "parts.py:by_halves"}
    setup = resolve(registry.find_method("./mine.py"), options)
    hash_before = {name: userfiles.file_hash(name) for name in ("mine.py", "parts.py")}
    Path("mine.py").write_text(method_text.replace("1.0", "2.0"))
    Path("parts.py").write_text(parts_text + "\n")
    Path("nets.py").write_text(networks_text + "\n")

    source = str(Path("mine.py").resolve())
    record = begin(setup, Path("run"), source, until=1).record

    assert record["rounds"][0]["terms"]["version"] == 1
    assert record["method_hash"] == hash_before["mine.py"]
    recorded_hashes = {Path(path).name: file_hash for path, file_hash in record["user_files"].items()}
    assert recorded_hashes == {**hash_before, "nets.py": userfiles.file_hash("nets.py")}
    files = ["mine.py", "parts.py", "nets.py"]
    with raises_user_error("has changed since the run began"):
        resume.resume("run", files=files)
    again = resume.resume("run", files=files, changed_method=True).record
    assert [entry["terms"]["version"] for entry in again["rounds"]] == [1, 2]


def test_a_run_of_two_versions_of_a_file_is_refused():
    """The partition is that of the set-up; the network would be that of the file as it is now."""
    parts_and_networks = Path("parts.py").read_text() + Path("nets.py").read_text()
    Path("both.py").write_text(parts_and_networks)
    options = {**SHORT_RUN, "backbone": "both.py:shared", "partition": "both.py:by_halves"}
    setup = resolve(registry.find_method("fedavg"), options)
    Path("both.py").write_text(parts_and_networks + "\n")
    with raises_user_error("both.py' has changed since the run was set up; start again."):
        begin(setup, Path("run"), "fedavg", until=1)
    assert not Path("run").exists()


METHOD_TEMPLATE = """
import random
import numpy
import torch
from dataclasses import replace
from fedcli.core import Aux, cross_entropy, weighted_mean
from fedcli.papers.baselines import fedavg

def run_round(state, cohort, fed, config):
    def local_loss(params, buffers, batch, context):
        features, logits, buffers = fed.network(params, buffers, batch.x, batch.mask)
        loss = cross_entropy(logits, batch.y, batch.mask) + TERM
        return loss, Aux(buffers, {"loss": loss})

    clients, terms = fed.train(fed.broadcast(state.params, state.buffers, cohort), cohort, local_loss)
    state = fedavg.ServerState(*weighted_mean(fed.upload_model(clients), cohort.weights))
    return OUTCOME

def init(fed, config):
    INIT
    return fedavg.init(fed, config)

METHOD = replace(fedavg.METHOD, name="mine", run_round=run_round, init=init)
"""


# A method whose state has another structure after a round than at first.
SETTLING_METHOD = """
from dataclasses import replace
from typing import NamedTuple
from fedcli.papers.baselines import fedavg

class ServerState(NamedTuple):
    params: dict
    buffers: dict
    momentum: object

def init(fed, config):
    return ServerState(*fedavg.init(fed, config), FIRST)

def run_round(state, cohort, fed, config):
    new, terms = fedavg.run_round(fedavg.ServerState(state.params, state.buffers), cohort, fed, config)
    return ServerState(*new, {name: value - state.params[name] for name, value in new.params.items()}), terms

METHOD = replace(fedavg.METHOD, name="mine", init=init, run_round=run_round, state_types=(ServerState,))
"""


@pytest.mark.parametrize("first", ["{}", "None", "()"])
def test_a_state_that_no_checkpoint_could_give_back_is_refused_in_the_first_round(first):
    Path("mine.py").write_text(SETTLING_METHOD.replace("FIRST", first))
    words = "not like the one of init: 'momentum"
    with raises_user_error(words, "let init give the whole"):
        fedcli.run("mine.py", out="run", rounds=2, **PARTS_OPTIONS)
    (failure,) = check.check(registry.find_method("mine.py"), 7, "cpu")
    assert not failure.holds
    assert words in str(failure.error)


# A method whose state is no NamedTuple.
PLAIN_STATE_METHOD = """
from dataclasses import replace
from fedcli.papers.baselines import fedavg

def init(fed, config):
    params, buffers = fed.initial_model()
    return STATE

def run_round(state, cohort, fed, config):
    (params, buffers), terms = fedavg.run_round(fedavg.ServerState(*model(state)), cohort, fed, config)
    return STATE, terms

def model(state):
    return MODEL

METHOD = replace(fedavg.METHOD, name="mine", init=init, run_round=run_round, model=model, state_types=())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "model"),
    [
        ("{'w': params, 'b': buffers}", "state['w'], state['b']"),
        ("(params, buffers)", "state"),
        ("[params, buffers]", "tuple(state)"),
    ],
)
def test_a_state_may_be_a_dict_a_tuple_or_a_list_where_the_method_says_what_its_model_is(state, model):
    Path("mine.py").write_text(PLAIN_STATE_METHOD.replace("STATE", state).replace("MODEL", model))
    options = {**PARTS_OPTIONS, "checkpoint_every": 1}
    whole = fedcli.run("mine.py", out="whole", rounds=2, **options).record
    with pytest.raises(Stop):
        fedcli.run("mine.py", out="run", rounds=2, progress=StopAfter(1), **options)
    again = resume.resume("run", files=["mine.py", "parts.py"]).record
    assert again["status"] == "finished"
    assert again["summary"] == whole["summary"]


@pytest.mark.parametrize("kind", ["dict", "list", "Outer"])
def test_what_clients_keep_is_refused_where_no_checkpoint_would_have_it(kind):
    """It is found among the fields of the state alone."""
    Path("mine.py").write_text(f"""
from dataclasses import replace
from typing import NamedTuple
from fedcli.papers.baselines import fedavg

class Inner(NamedTuple):
    model: fedavg.ServerState
    clients: dict

class Outer(NamedTuple):
    inner: Inner

STATE_OF = {{
    "dict": lambda inner: dict(model=inner.model, clients=inner.clients),
    "list": lambda inner: [inner.model, inner.clients],
    "Outer": Outer,
}}

def inner_of(state):
    if isinstance(state, Outer):
        return state.inner
    return Inner(*(state.values() if isinstance(state, dict) else state))

def init(fed, config):
    return STATE_OF["{kind}"](Inner(fedavg.init(fed, config), {{}}))

def run_round(state, cohort, fed, config):
    inner = inner_of(state)
    model, terms = fedavg.run_round(inner.model, cohort, fed, config)
    clients = fed.remember(inner.clients, cohort, {{"weight": cohort.weights}})
    return STATE_OF["{kind}"](Inner(model, clients)), terms

METHOD = replace(
    fedavg.METHOD, name="mine", init=init, run_round=run_round, model=lambda state: inner_of(state).model,
    state_types=(Outer, Inner, fedavg.ServerState),
)
""")
    with raises_user_error("must be a field of the NamedTuple that is the state"):
        fedcli.run("mine.py", out="run", rounds=2, **PARTS_OPTIONS)


def test_a_plan_with_a_data_set_of_the_users_has_the_settings_of_its_run():
    """Its 400 images divide into equal shards, which a record says, and only the user's function for a plan."""
    options = {**PARTS_OPTIONS, "partition": "classes:2", "num_clients": 4, "rounds": 1}
    planned = planned_settings(resolve(registry.find_method("fedavg"), options))
    assert "remainder" not in planned
    assert planned == settings_of(fedcli.run("fedavg", out="run", **options).record)


@pytest.mark.parametrize(
    "change",
    [
        "state.params[name].add_(1)",
        "state.params[name].data.add_(1)",
        "state.params[name].data = state.params[name] + 1",
        "buffer, *_ = state.buffers.values(); buffer.data = buffer + 1",
        "state.params[name] = state.params[name] + 1",
        "state.params['more'] = state.params.pop(name)",
    ],
)
def test_a_round_that_changes_the_state_that_it_is_given_is_refused(change):
    source = method_source(outcome="new, terms").replace("    return new", f"    {change}\n    return new")
    source = source.replace("    state = fedavg.", "    name, *_ = state.params\n    new = fedavg.")
    Path("mine.py").write_text(source)
    words = "run_round of 'mine' changes the state that it is given, in round 1 (got other values at '/"
    with raises_user_error(words):
        fedcli.run("./mine.py", out="run", rounds=2, **PARTS_OPTIONS)
    record = json.loads(Path("run/record.json").read_text())
    assert record["status"] == "failed"
    assert words in record["error"]


def method_source(term="0", outcome="state, terms", init="pass"):
    """Returns the text of a method with this term in its loss, this outcome of a round and this line in its init."""
    return METHOD_TEMPLATE.replace("TERM", term).replace("OUTCOME", outcome).replace("INIT", init)


def run_with(**parts):
    """Runs a method that has these parts, see `method_source`."""
    Path("mine.py").write_text(method_source(**parts))
    return fedcli.run("./mine.py", out="run", rounds=2, **PARTS_OPTIONS)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        pytest.param(
            {"outcome": "state"},
            "of 'mine' returns no state and terms (got ServerState); end it with 'return state, terms'",
            id="no terms",
        ),
        pytest.param(
            {"outcome": "{}, terms"}, "no params and buffers (got dict); let init and run_round", id="a dict as state"
        ),
        pytest.param(
            {"outcome": "state._replace(buffers={client: 1 for client in cohort.client_ids}), terms"},
            "must be texts or whole numbers (got ",
            id="array's numbers as keys",
        ),
        pytest.param(
            {"outcome": "state._replace(buffers={'rate': float('inf')}), terms"},
            "a number of a tree must be finite (got inf at '/buffers/rate')",
            id="infinite number",
        ),
        pytest.param(
            {"outcome": "state, {'own': torch.ones(2, 1)}"},
            "the term 'own' must have one value for each client of the cohort, [2] (got shape (2, 1))",
            id="term of another shape",
        ),
        pytest.param({"outcome": "state, {'own': 1.0}"}, "[2] (got float)", id="term that is no tensor"),
        pytest.param(
            {"term": "0 * torch.rand(3).sum()"},
            "'mine' draws from PyTorch's global generator in round 1",
            id="PyTorch in a round",
        ),
        pytest.param(
            {"term": "0 * numpy.random.rand()"},
            "'mine' draws from NumPy's global generator in round 1",
            id="NumPy in a round",
        ),
        pytest.param(
            {"term": "0 * random.random()"},
            "'mine' draws from Python's global generator in round 1",
            id="random in a round",
        ),
        pytest.param(
            {"init": "torch.rand(3)"},
            "init of 'mine' draws from PyTorch's global generator; use fed.generator",
            id="PyTorch in init",
        ),
        pytest.param(
            {"init": "numpy.random.rand()"},
            "init of 'mine' draws from NumPy's global generator; use fed.generator",
            id="NumPy in init",
        ),
    ],
)
def test_a_faulty_round_of_a_users_method_is_refused_in_a_line(wrong, words):
    """It returns something else, or draws random numbers by itself."""
    with raises_user_error(words):
        run_with(**wrong)


WITH_TEXTS_AS_TYPES = """from __future__ import annotations
from dataclasses import dataclass, replace
from fedcli import option
from fedcli.papers.baselines.fedavg import METHOD as SIMPLE
@dataclass(frozen=True)
class Config:
    strength: TYPE = option(0.5, "Strength", low=0)
METHOD = replace(SIMPLE, name="mine", config=Config)
"""


def test_a_type_that_is_a_text_for_python_is_a_type():
    """In a file that begins with `from __future__ import annotations` all types are texts."""
    Path("mine.py").write_text(WITH_TEXTS_AS_TYPES.replace("TYPE", "float | None"))
    command = ["run", "./mine.py", *flags_of({**PARTS_OPTIONS, "rounds": 1}), "--out", "run"]
    run_command(*command, "--strength", "2")
    assert json.loads(Path("run/record.json").read_text())["config"]["strength"] == 2.0
    assert "--strength" in output_of("show", "./mine.py")
    words = "strength must be of type float (got 'x')"
    with raises_user_error(words):
        fedcli.run("./mine.py", strength="x", **PARTS_OPTIONS)

    Path("mine.py").write_text(WITH_TEXTS_AS_TYPES.replace("TYPE", "tuple"))
    words = "the option 'strength' has a type that no record can have (got <class 'tuple'>)"
    with raises_user_error(words):
        fedcli.run("./mine.py", **PARTS_OPTIONS)

    Path("mine.py").write_text(WITH_TEXTS_AS_TYPES.replace("TYPE", "Real"))
    words = "the type of the option 'strength' cannot be read (got 'Real': name 'Real' is not defined)"
    with raises_user_error(words):
        fedcli.run("./mine.py", **PARTS_OPTIONS)


def test_attention_draws_nothing():
    attention = "torch.nn.functional.scaled_dot_product_attention(*[features[None]] * 3)"
    assert run_with(term=f"0 * {attention}.sum()").record["status"] == "finished"


def write_function(signature, value):
    """Writes a file whose function `f` returns this expression."""
    Path("own.py").write_text(f"import numpy as np\ndef f({signature}):\n    return {value}\n")


def split_by(value):
    """Divides ten examples among two clients by a partition whose function returns this expression."""
    write_function("labels, num_clients, rng, *, groups", value)
    own_partition = partition.from_flag("./own.py:f")
    return own_partition(np.arange(10) % 3, 2, 7, domain=np.repeat([0, 1], 5))


def load_data(value):
    """Loads a data set whose function returns this expression."""
    write_function("", value)
    return datasets.load("./own.py:f")


def build_network(value):
    """Builds a network whose function returns this expression."""
    write_function("*sizes", value)
    return backbones.build("./own.py:f", 1, 8, 5, seed=3)


def test_a_partition_gets_labels_a_generator_and_groups():
    parts = split_by("[np.flatnonzero(groups == k).tolist() for k in range(num_clients)]")
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert all(part.dtype == np.int64 for part in parts)

    drawn = split_by("np.split(rng.permutation(10), 2)")
    drawn_again = split_by("np.split(rng.permutation(10), 2)")
    assert partition.fingerprint(drawn) == partition.fingerprint(drawn_again)


@pytest.mark.parametrize(
    ("arguments", "misplaced"),
    [
        ("labels, rng, num_clients", "rng"),
        ("labels, num_clients, groups", "groups"),
        ("labels, groups, num_clients, rng", "groups"),
        ("labels, k, groups, generator", "groups"),
    ],
)
def test_arguments_of_a_partition_in_another_order_are_refused(arguments, misplaced):
    write_function(arguments, "[]")
    with raises_user_error("'f' in", f"has its argument {misplaced} at another place (got {arguments})"):
        partition.from_flag("./own.py:f")


@pytest.mark.parametrize(
    "arguments", ["labels, num_clients, rng, least=1, groups=None", "*given, groups", "labels, *given, groups=None"]
)
def test_groups_of_a_partition_may_stand_anywhere_else(arguments):
    write_function(arguments, "[np.flatnonzero(groups == k) for k in range(2)]")
    own_partition = partition.from_flag("./own.py:f")
    parts = own_partition(np.arange(10) % 3, 2, 7, domain=np.repeat([0, 1], 5))
    assert [len(part) for part in parts] == [5, 5]


def test_what_is_changed_or_left_out_of_a_data_set_is_said():
    arrays = "x=np.arange(192).reshape(12, 4, 4) / 255, y=np.arange(12) % 3, client=np.arange(12)"
    dataset = load_data(f"dict({arrays}, Class_Names=np.array(['ant', 'bee', 'cat']))")
    assert dataset.class_names == ("ant", "bee", "cat")
    path, *notes = dataset.source.split("; ")
    assert path == "./own.py:f"
    assert notes == [
        "left out: the arrays client",
        "pixels x from 0 to 0.74902 became 8 bits, (x + 0) * 255",
        "a fixed fifth of each class is kept to test on",
    ]


def test_a_data_set_is_checked_and_in_canonical_order():
    blobs = datasets.load("./parts.py:blobs")
    assert blobs.name == "blobs"
    assert blobs.num_classes == 4
    assert blobs.channels == 1
    assert blobs.image_size == 8
    assert blobs.y_train.tolist() == sorted(blobs.y_train.tolist())

    Path("parts.py").write_text(PARTS_FILE.read_text().replace("s[:400]", "s[:400][::-1]"))
    reversed_blobs = datasets.load("./parts.py:blobs")
    assert reversed_blobs is not blobs
    assert reversed_blobs.fingerprint == blobs.fingerprint
    assert datasets.describe("./parts.py:blobs")["train"] == 400


@pytest.mark.parametrize(
    ("place", "text", "words"),
    [
        pytest.param("./none.py:f", "", "there is no metric file at", id="no file"),
        pytest.param("./own.py", "def f(): pass", "NAME with a function or class of it: f.", id="no name"),
        pytest.param("./own.py:f", "x = 1\nf = x", "it has none.", id="no function"),
        pytest.param(
            "./own.py:f",
            "x = 1\nimport nothing_of_that_name",
            "line 3 (got ModuleNotFoundError",
            id="import that fails",
        ),
    ],
)
def test_a_place_without_a_function_is_refused_in_a_line(place, text, words):
    Path("own.py").write_text(f"import numpy as np\n{text}\n")
    with raises_user_error(words):
        userfiles.find_user_function(place, "metric")


ONE_ARRAY_FOR_ALL = "dict.fromkeys(('x_train', 'y_train', 'x_test', 'y_test'), np.ones((3, 4, 4)))"


@pytest.mark.parametrize(
    ("use", "value", "words"),
    [
        pytest.param(split_by, "[[0], [1], [2]]", "gives no list of 2 clients (got 3)", id="too many clients"),
        pytest.param(
            split_by,
            "[[0], [10]]",
            "gives wrong positions to client 1 (got int64 10 ...)",
            id="position beyond the last",
        ),
        pytest.param(split_by, "[[True, False], [1]]", "gives wrong positions to client 0 (got bool", id="booleans"),
        pytest.param(split_by, "[None, [1]]", "gives wrong positions to client 0 (got object None ...)", id="None"),
        pytest.param(split_by, "[[0, 1], [1]]", "uses an example twice (got position 1)", id="an example twice"),
        pytest.param(split_by, "labels.nothing", "line 3 (got AttributeError", id="an error inside"),
        pytest.param(load_data, "3", "'int' object has no attribute 'items'", id="a number as data"),
        pytest.param(load_data, ONE_ARRAY_FOR_ALL, "name for each", id="one array for all"),
        pytest.param(build_network, "3", "gives no torch.nn.Module (got int)", id="a number as network"),
    ],
)
def test_a_part_that_cannot_be_used_is_refused_in_a_line(use, value, words):
    with raises_user_error(words):
        use(value)


def test_a_path_that_no_text_can_hold_is_refused_in_a_line():
    folder = os.fsdecode(b"M\xfcller")
    Path(folder).mkdir()
    Path(folder, "mine.py").write_text("METHOD = 0")
    with raises_user_error("is no UTF-8"):
        fedcli.run(f"./{folder}/mine.py", **PARTS_OPTIONS)


def test_memory_of_a_client_may_be_declared_by_a_fraction():
    Path("mine.py").write_text(method_source().replace("init=init)", "init=init, client_memory=lambda sizes: 1.5 * 3)"))
    run = fedcli.run("./mine.py", out="run", rounds=1, **PARTS_OPTIONS)
    assert read_record(run.path)["cost"]["memory_floats"] == 4
