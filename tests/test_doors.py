"""What a user brings in a file of their own: found, run, resumed, and refused in a line where it cannot be right."""

import builtins
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fedcli
from fedcli import registry, userfiles
from fedcli.cli import app as cli
from fedcli.cli import display
from fedcli.core import backbones, partition
from fedcli.core.layers import KeyedDropout, MaskedBatchNorm2d
from fedcli.data import datasets
from fedcli.errors import UserError
from fedcli.results import comparison, reproduce
from fedcli.runs import rounds
from fedcli.runs import run as runs
from tests.files import refused

NETS = """
import torch
from torch import nn

def tiny(channels, image_size, num_classes):
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3),
        nn.Linear(4 * image_size**2, 12), nn.ReLU(), nn.Linear(12, num_classes),
    )
"""
SPLIT = """
import numpy as np

def by_halves(labels, num_clients, rng, groups=None):
    order = rng.permutation(len(labels))[: len(labels) // 2]
    return np.array_split(order, num_clients)
"""
DATA = """
import numpy as np

def blobs():
    rng, y = np.random.default_rng(0), np.arange(120) % 4
    x = rng.integers(0, 120, (120, 8, 8)).astype(np.uint8)
    x[np.arange(120), y, y] = 255
    return {"x_train": x[:80], "y_train": y[:80], "x_test": x[80:], "y_test": y[80:]}
"""
OPTIONS = {"dataset": "./data.py:blobs", "partition": "./split.py:by_halves", "backbone": "./nets.py:tiny"}
SMALL = {"protocol": "fedfm:digits", "num_clients": 3, "cohort_size": 2, "device": "cpu", "batch_size": 8}

FLAGS = [text for key, value in {**OPTIONS, **SMALL}.items() for text in ("--" + key.replace("_", "-"), str(value))]


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """The three files in an empty folder, which is the working one."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(display, "draw", lambda record, folder: None)
    for name, text in (("nets.py", NETS), ("split.py", SPLIT), ("data.py", DATA)):
        Path(name).write_text(text)


def build(body, size=8, classes=5):
    """The network of a file whose function `net` has this body."""
    lines = "\n".join(f"    {line}" for line in body.strip().split("\n"))
    Path("net.py").write_text(
        "import numpy as np\nimport torch\nfrom torch import nn\n\n"
        f"def net(channels, image_size, num_classes):\n{lines}\n"
    )
    return backbones.build("./net.py:net", 1, size, classes, seed=3)


# Running


def test_all_three_run_and_resume_to_the_same_bits(monkeypatch):
    whole = fedcli.run("fedavg", rounds=3, out="whole", **OPTIONS, **SMALL)
    assert whole.record["user_files"] == {
        str(Path(name).resolve()): userfiles.file_hash(name) for name in ("data.py", "split.py", "nets.py")
    }
    assert whole.record["partition"]["sizes"] == [14, 13, 13]
    assert set(whole.state.params) >= {"head.weight", "head.bias"}

    class Stops(rounds.Listener):
        def round(self, entry):
            if entry["round"] == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedcli.run("fedavg", rounds=3, out="part", progress=Stops(), checkpoint_every=1, **OPTIONS, **SMALL)
    monkeypatch.chdir("..")  # the record has absolute paths
    resumed = runs.resume("work/part", method=["work/nets.py", "work/split.py", "work/data.py"])
    assert resumed.record["resumed"] == [2]
    assert resumed.record["summary"]["params_sha256"] == whole.record["summary"]["params_sha256"]
    assert resumed.record["user_files"] == whole.record["user_files"]


@pytest.mark.parametrize("name", ["nets.py", "split.py", "data.py"])
def test_a_changed_file_is_refused_on_resume_unless_it_is_allowed(name):
    class Stops(rounds.Listener):
        def round(self, entry):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedcli.run("fedavg", rounds=2, out="part", progress=Stops(), **OPTIONS, **SMALL)
    before = userfiles.file_hash(name)
    Path(name).write_text(Path(name).read_text() + "# another line\n")
    after = userfiles.file_hash(name)
    files = ["nets.py", "split.py", "data.py"]
    refused(lambda: runs.resume("part", method=files), name, f"hash {after}, was {before}", "--changed-method")
    resumed = runs.resume("part", method=files, changed_method=True)
    assert resumed.record["user_files"][str(Path(name).resolve())] == f"{before}, then {after}"


def test_it_stands_among_several_networks():
    options = {**OPTIONS, "backbone": "./nets.py:tiny,cnn-small"}
    record = fedcli.run("feddistill", rounds=1, out="run", **options, **{**SMALL, "cohort_size": 3}).record
    assert [name.rpartition(":")[2] for name in record["model"]["networks"]] == ["tiny", "cnn-small"]


METHODS = """
from dataclasses import dataclass, replace
from fedcli import Cell, DataSetting, Post, Protocol, Table, option
from fedcli.papers.baselines import fedavg

PLAIN = replace(fedavg.METHOD, name="plain")
METHODS = (PLAIN, replace(fedavg.METHOD, name="other"))
PROTOCOLS = (Protocol("mine:digits", "s", "s", {"rounds": 1, "num_clients": 2}, {
    "digits": DataSetting("cnn-small", (0.5,), (0.5,), "s")}, "last"),)
TABLES = (Table("mine:1", "title", ("mine", "1"), (
    Cell("a", "b", "plain", {"protocol": "mine:digits", "post": "half"}), Cell("a", "c", "fedprox", {}))),)

@dataclass(frozen=True)
class Config:
    share: float = option(0.5, "Share")

def apply(params, buffers, fed, config):
    return {name: value * config.share for name, value in params.items()}, buffers, 0

POST = Post("half", "Halve the parameters", Config, apply)
"""


def test_a_file_brings_methods_protocols_tables_and_a_step_after():
    Path("mine.py").write_text(METHODS)
    path = str(Path("mine.py").resolve())
    assert registry.find_method("./mine.py:other").name == "other"
    assert registry.find_method("./mine.py:PLAIN").name == "plain"
    refused(lambda: registry.find_method("./mine.py"), "several", "plain, other", "./mine.py:NAME")
    refused(lambda: registry.find_method("./mine.py:othr"), "did you mean 'other'?")
    table = registry.find_table("./mine.py:mine:1")
    assert [cell.method for cell in table.cells] == [f"{path}:plain", "fedprox"]
    assert table.cells[0].settings == {"protocol": f"{path}:mine:digits", "post": f"{path}:half"}
    shown = comparison.compare(reproduce.plan(table))
    assert (shown.rows, shown.columns, shown.has_paper) == (("a",), ("b", "c"), False)
    assert not any("paper" in note for note in shown.notes)
    given = {**table.cells[0].settings, "share": 0.25}
    run = fedcli.run(table.cells[0].method, **given, device="cpu", out="run", train_examples=40)
    assert run.record["protocol"] == "mine:digits"
    assert run.record["post"]["name"] == "half"
    assert run.record["config"]["share"] == 0.25
    assert run.record["user_files"] == {path: userfiles.file_hash("mine.py")}


BORROWED = '''"""My card."""

from dataclasses import replace

from fedcli import DataSetting, Protocol
from fedcli.papers.baselines import fedprox
from fedcli.papers.baselines.fedavg import METHOD as SIMPLE

METHOD = replace(SIMPLE, name="mine", default_protocol="")
METHODS = (replace(fedprox.METHOD, name="also-mine"), SIMPLE)
PROTOCOLS = (Protocol("mine:digits", "s", "s", {"rounds": 1, "num_clients": 2}, {
    "digits": DataSetting("cnn-small", (0.5,), (0.5,), "s")}, "last"),)
'''


def test_a_method_made_of_a_papers_is_that_of_the_users_file():
    Path("mine.py").write_text(BORROWED)
    for name in ("./mine.py", "./mine.py:also-mine"):
        method = registry.find_method(name)
        assert method.file == Path("mine.py").resolve()
        assert (method.card, method.file_hash) == ("My card.", userfiles.file_hash("mine.py"))
        assert registry.find_protocol("mine:digits", method).name == "mine:digits"
    record = fedcli.run("./mine.py", out="run", train_examples=40, device="cpu").record
    assert (record["protocol"], record["method_hash"]) == ("mine:digits", userfiles.file_hash("mine.py"))
    simple = registry.find_method("fedavg")
    assert registry.find_method("./mine.py:SIMPLE") is simple  # imported, not declared
    assert (simple.file.name, registry.find_method("fedprox").file.name) == ("fedavg.py", "fedprox.py")
    (Path.cwd() / "other.py").write_text("from fedcli import registry\nMETHOD = registry.find_method('./mine.py')\n")
    assert registry.find_method("./other.py").file == Path("mine.py").resolve()


def test_a_papers_protocol_is_the_default_of_a_method_made_of_its():
    first = next(method for method in registry.methods().values() if not method.default_protocol)
    Path("mine.py").write_text(f"from dataclasses import replace\nfrom fedcli import registry\n"
                               f"METHOD = replace(registry.find_method({first.name!r}), name='mine')\n")  # fmt: skip
    mine = registry.find_method("./mine.py")
    assert registry.default_protocol(mine, None) == registry.default_protocol(first, None)


def test_a_step_of_a_users_own_has_its_options_on_the_command_line():
    Path("mine.py").write_text(METHODS)
    small = "--protocol fedfm:digits --train-examples 40 --rounds 1 --device cpu --num-clients 2 --out run"
    command = ["run", "fedavg", *small.split(), "--post", "./mine.py:POST", "--share", "0.25"]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    record = json.loads(Path("run/record.json").read_text())
    assert (record["post"]["name"], record["config"]["share"]) == ("half", 0.25)


# Finding


def test_what_is_a_file_and_what_it_is_called():
    assert all(map(userfiles.is_from_file, ("./a.py:b", "a.py", "/x/a.py:b:c")))
    assert not any(map(userfiles.is_from_file, ("fedavg", "dominant:1:share=4/9", "a.pyc")))
    here = Path.cwd()
    assert userfiles.absolute("cnn-small,./nets.py:tiny") == f"cnn-small,{here}/nets.py:tiny"
    assert userfiles.absolute("fedavg") == "fedavg"
    assert [userfiles.short_name(text) for text in ("./nets.py:tiny", "digits", "a/mine.py")] == [
        "tiny",
        "digits",
        "mine",
    ]
    assert userfiles.user_files(["a", None, 3, "x,./nets.py:a,nets.py:b"]) == {
        f"{here}/nets.py": userfiles.file_hash("nets.py")
    }


def test_a_file_is_imported_once_and_anew_when_it_has_changed():
    count = "import builtins\nbuiltins.times = getattr(builtins, 'times', 0) + 1\ndef f(): return times\n"
    Path("counts.py").write_text(count)
    try:
        one, two = (userfiles.from_file("counts.py:f", "metric") for _ in range(2))
        assert one.function is two.function
        assert one() == 1
        Path("counts.py").write_text(count + "#\n")
        assert userfiles.from_file("counts.py:f", "metric")() == 2
    finally:
        del builtins.times


def test_a_file_called_papers_hides_nothing():
    Path("papers.py").write_text(NETS)
    userfiles.from_file("papers.py:tiny", "backbone")
    assert "papers" not in sys.modules
    assert registry.find_method("fedavg").file.parent.parent.name == "papers"


@pytest.mark.parametrize(
    ("text", "content", "words"),
    [
        ("./none.py:f", "", "there is no metric file at"),
        ("./own.py", "def f(): pass\n", "write ./own.py:NAME, of f."),
        ("./own.py:g", "def f(): pass\n", "unknown metric in"),
        ("./own.py:f", "x = 1\nf = x\n", "it must be a function or a class; there are"),
        ("./own.py:f", "x = 1\nraise SystemExit(3)\n", "line 2 (got SystemExit: 3)"),
        ("./own.py:f", "x = 1\n\nimport nothing_of_that_name\n", "line 3 (got ModuleNotFoundError"),
        ("./own.py:f", "def f(:\n", "line 1 (got SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_a_line(text, content, words):
    if "none" not in text:
        Path("own.py").write_text(content)
    refused(lambda: userfiles.from_file(text, "metric"), words)


def test_an_error_inside_names_the_line_and_keeps_its_cause():
    Path("own.py").write_text("def g(x):\n    return x[5]\n\ndef f(x):\n    return g(x)\n")
    function = userfiles.from_file("own.py:f", "metric")
    with pytest.raises(
        UserError, match=r"own.py' fails in line 2 \(got IndexError: list index out of range\)"
    ) as caught:
        function([1])
    assert isinstance(caught.value.__cause__, IndexError)
    with pytest.raises(UserError, match=r"fails in line 4 \(got TypeError: f\(\) takes 1 positional argument"):
        function(1, 2)
    with pytest.raises(KeyError), userfiles.blame("own.py", passes=(KeyError,)):
        raise KeyError("left alone")


HELPERS = """
import shapes

def twice(x):
    return 2 * x + shapes.NOTHING
"""


def test_a_file_may_import_those_beside_it_and_they_count_in_its_hash(tmp_path):
    def folder(name, helpers):
        (tmp_path / name).mkdir()
        own = "import helpers\n\ndef f(x):\n    from helpers import twice\n    return twice(x)\n"
        bad = {"torch": "1 / 0", "json": "1 / 0"}
        for file, text in {"own": own, "helpers": helpers, "shapes": "NOTHING = 0\n", **bad}.items():
            (tmp_path / name / f"{file}.py").write_text(text)
        return f"{tmp_path / name / 'own.py'}:f"

    one, other = folder("one", HELPERS), folder("other", HELPERS.replace("2 *", "3 *") + "import json, torch\n")
    assert [userfiles.from_file(text, "metric")(5) for text in (one, other, one)] == [10, 15, 10]
    assert "helpers" not in sys.modules
    path = tmp_path / "one" / "own.py"
    before = userfiles.file_hash(path)
    (tmp_path / "one" / "torch.py").write_text("2 / 0")  # is not imported
    assert userfiles.file_hash(path) == before
    (tmp_path / "one" / "shapes.py").write_text("NOTHING = 100\n")
    assert userfiles.file_hash(path) != before
    assert userfiles.from_file(one, "metric")(5) == 110
    (tmp_path / "one" / "shapes.py").write_text("\nNOTHING = 1 / 0\n")
    refused(lambda: userfiles.from_file(one, "metric"), "shapes.py' fails in line 2 (got ZeroDivisionError")


def test_a_file_alone_has_the_hash_of_its_bytes():
    assert userfiles.file_hash("nets.py") == hashlib.sha256(Path("nets.py").read_bytes()).hexdigest()[:16]


# Local objectives

LOSS = """
import torch
from dataclasses import replace
from fedcli.core import Aux, cross_entropy, weighted_mean
from fedcli.papers.baselines import fedavg

def run_round(state, cohort, fed, config):
    def local_loss(params, buffers, batch, context):
        features, logits, buffers = fed.network(params, buffers, batch.x, batch.mask)
        loss = cross_entropy(logits, batch.y, batch.mask)
        LINE
        return loss, Aux(buffers, {"loss": loss})

    clients, terms = fed.train(fed.broadcast(state.params, state.buffers, cohort), cohort, local_loss)
    return fedavg.ServerState(*weighted_mean(fed.upload_model(clients), cohort.weights)), terms

METHOD = replace(fedavg.METHOD, name="mine", run_round=run_round)
"""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("loss = loss * loss.item()", "reads a number out of a tensor"),
        ("loss = loss if loss > 1 else loss", "reads a number out of a tensor"),
        ("loss = loss + 0 * torch.rand(3).sum()", "draws random numbers"),
        ("loss = loss + 0 * torch.nn.functional.dropout(features).sum()", "draws random numbers"),
        ("loss = torch.where(loss > 1, loss, loss)", ""),
    ],
)
def test_what_cannot_train_together_is_refused_alone_too_with_the_line(line, words):
    Path("mine.py").write_text(LOSS.replace("LINE", line))
    run = lambda: fedcli.run("./mine.py", out="run", rounds=2, **OPTIONS, **SMALL)  # noqa: E731
    if words:
        refused(run, f"mine.py' fails in line 11 (got RuntimeError: a local objective {words}")
    else:
        assert run().record["status"] == "finished"


# Backbones


def test_the_last_linear_becomes_the_head_and_layers_know_padding_and_keys():
    module = build(NETS.split(":\n", 1)[1].replace("\n    ", "\n").strip())
    torch.manual_seed(3)
    theirs = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 12), nn.ReLU(),
        nn.Linear(12, 5),
    )  # fmt: skip
    for ours, other in zip(module.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours, other)
    x = torch.randn(6, 1, 8, 8)
    features, logits = module.eval()(x)
    torch.testing.assert_close(logits, theirs.eval()(x))
    torch.testing.assert_close(features, theirs[:-1](x))
    assert module.feature_dim == 12
    assert [type(layer) for layer in module.body if isinstance(layer, MaskedBatchNorm2d | KeyedDropout)] == [
        MaskedBatchNorm2d, KeyedDropout
    ]  # fmt: skip
    torch.testing.assert_close(module.body[1].running_mean, torch.zeros(4))  # the trial leaves no trace
    mask = torch.tensor([True] * 4 + [False] * 2)
    module.body[4].p = 0.0
    one = module.train()(x, mask)[1][:4]
    torch.testing.assert_close(one, theirs.train()(x[:4]), rtol=1e-5, atol=1e-5)


def test_lazy_layers_and_a_module_of_its_own_class():
    module = build(
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.conv, self.fc = nn.LazyConv2d(3, 3), nn.LazyLinear(num_classes)\n"
        "    def forward(self, x):\n        return self.fc(self.conv(x).relu().mean((2, 3)))\nreturn Net()"
    )
    assert module.head.weight.shape == (5, 3)
    assert [name for name, _ in module.named_parameters()] == [
        "body.conv.weight", "body.conv.bias", "head.weight", "head.bias"
    ]  # fmt: skip


COUNTER = "self.register_buffer('n', torch.zeros(1))"


def net(forward, layers=""):
    """A function that returns a module with a layer `first`, a last one `fc`, and more."""
    return (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.first, self.fc = nn.Linear(image_size**2, 6), nn.Linear(6, num_classes)\n"
        f"        {layers or 'pass'}\n    def forward(self, x):\n"
        f"        x = x.flatten(1)\n        {forward}\nreturn Net()"
    )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return 3", "gives no torch.nn.Module (got int)"),
        (net("return self.first(x)"), "gives no logits of 5 classes (got (4, 6) of 4 images)"),
        (net("return self.fc(self.first(x)), x"), "gives no logits of 5 classes (got tuple"),
        (net("return self.fc(self.first(x)).log_softmax(1)"), "does not end in an nn.Linear"),
        (net("return self.fc(self.first(x)).relu_()"), "does not end in an nn.Linear"),
        (net("return self.fc(self.first(x))", "self.fc = nn.Linear(6, num_classes, bias=False)"), "with bias"),
        (net("return self.fc(self.first(x) + 0 * self.fc(self.first(x)).sum())"), "uses its last nn.Linear"),
        (net("return self.fc(self.drop(self.drop(self.first(x))))", "self.drop = nn.Dropout(0.5)"), "nn.Dropout twice"),
        (
            net("return self.fc(self.first(x)) + 0 * self.fc.weight.sum()"),
            "has no attribute 'weight'",
        ),
        (
            net("return self.fc(self.norm(self.first(x)))", "self.norm = nn.BatchNorm1d(6)"),
            "padding would reach",
        ),
        (
            net("return self.fc(self.drop(self.first(x)))", "self.drop = nn.AlphaDropout(0.5)"),
            "draws by itself",
        ),
        (net("return self.fc(self.drop(self.first(x)))", "self.drop = nn.Dropout(0.5, True)"), "not in place"),
        (net("return self.fc(self.first(x) + torch.rand(6) * self.training)"), "draws random numbers"),
        (net("return self.fc(self.first(x) + float(np.random.rand()) * self.training)"), "draws random numbers"),
        (net("return self.fc(nn.functional.dropout(self.first(x), training=self.training))"), "draws random numbers"),
        (net("x = self.first(x); return self.fc(x - x.mean(0) * self.training)"), "mixes the images of a batch"),
        (net("self.n = self.n + 1; return self.fc(self.first(x))", COUNTER), "puts a new tensor"),
        (net("return self.fc(self.first(x))", "self.first.weight.requires_grad_(False)"), "one that is not trained"),
        (net("return self.fc(self.first(x))", "self.again = nn.ParameterList([self.first.weight])"), "in two places"),
        (net("return self.fc(self.first(x[:, :7]))"), "line 13 (got RuntimeError: mat1 and mat2"),
        ("raise ValueError('too small')", "line 6 (got ValueError: too small)"),
    ],
)
def test_a_network_that_breaks_a_rule_is_refused_in_a_line(body, words):
    refused(lambda: build(body), words, "net.py")


def test_one_that_only_counts_is_fine_and_its_counts_are_put_back():
    module = build(net("self.n.add_(1); return self.fc(self.first(x))", COUNTER))
    assert module.body.n.max() <= 2  # of the passes in evaluation that found the head
    assert module.training


# Partitions


def split(text, num_clients=2, count=10, **groups):
    Path("own.py").write_text(f"import numpy as np\ndef f(labels, num_clients, rng, *, groups):\n    return {text}\n")
    chosen = partition.from_flag("./own.py:f")
    return chosen(np.arange(count) % 3, num_clients, 7, **groups)


GROUPS = {"domain": np.repeat([0, 1], 5)}


def test_a_partition_gets_labels_a_generator_and_groups():
    parts = split("[np.flatnonzero(groups == k).tolist() for k in range(num_clients)]", **GROUPS)
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert all(part.dtype == np.int64 for part in parts)
    drawn = [split("np.split(rng.permutation(10), 2)", **GROUPS) for _ in range(2)]
    assert partition.fingerprint(drawn[0]) == partition.fingerprint(drawn[1])
    chosen = partition.from_flag("./own.py:f")
    assert chosen.scaled(0.5) == chosen
    assert str(chosen) == "./own.py:f"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[0], [1], [2]]", "gives no list of 2 clients (got 3)"),
        ("7", "gives no list of 2 clients (got int)"),
        ("[[0], [10]]", "gives wrong positions to client 1 (got int64 10 ...)"),
        ("[[0], [-1]]", "gives wrong positions to client 1"),
        ("[[0.0], [1]]", "gives wrong positions to client 0 (got float64"),
        ("[[[0]], [1]]", "gives wrong positions to client 0"),
        ("[[True, False], [1]]", "gives wrong positions to client 0 (got bool"),
        ("[[0, 1], [1]]", "uses an example twice (got position 1)"),
        ("[[], []]", "gives nobody an example"),
        ("labels.nothing", "line 3 (got AttributeError"),
    ],
)
def test_a_partition_that_is_wrong_is_refused(text, words):
    refused(lambda: split(text, **GROUPS), words, "own.py")


def test_a_partition_that_needs_groups_says_so():
    refused(lambda: split("[[0], [1]]"), "needs groups")
    refused(lambda: partition.from_flag("domains+./own.py:f"), "domains+dirichlet:0.5")
    refused(lambda: partition.from_flag("./own.py:g"), "unknown partition in")


# Data sets


def test_a_data_set_is_checked_and_in_canonical_order():
    one = datasets.load("./data.py:blobs")
    assert (one.name, one.num_classes, one.channels, one.image_size) == ("blobs", 4, 1, 8)
    assert one.y_train.tolist() == sorted(one.y_train.tolist())
    Path("data.py").write_text(DATA.replace("x[:80]", "x[:80][::-1]").replace("y[:80]", "y[:80][::-1]"))
    other = datasets.load("./data.py:blobs")  # the same images in another order
    assert other is not one
    assert other.fingerprint == one.fingerprint
    assert datasets.describe("./data.py:blobs")["train"] == 80


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("3", "gives no arrays by name (got int)"),
        ("{}", "has no x_train"),
        ("{key: np.zeros((3, 4, 4)) for key in ('x_train', 'y_train', 'x_test', 'y_test')}", "must be uint8 images"),
        ("np.nothing", "line 3 (got AttributeError"),
    ],
)
def test_a_data_set_that_is_wrong_is_refused(text, words):
    Path("own.py").write_text(f"import numpy as np\ndef f():\n    return {text}\n")
    refused(lambda: datasets.load("./own.py:f"), words, "own.py")


# Installed


PROGRAM = """
import sys
sys.path.insert(1, {place!r})
from fedcli.__main__ import main
for line in sys.argv[1:]:
    sys.argv[1:] = line.split()
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The words that start a program from a wheel in a folder of its own, which is given lines of commands."""
    root, place = Path(__file__).parent.parent, tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    (place / "source").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "fedcli", "papers"):
        os.symlink(root / name, place / "source" / name)
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", place / "wheels", place / "source"]
    subprocess.run(wheel, check=True)
    (made,) = (place / "wheels").glob("*.whl")
    target = ["--no-compile", "--target", place / "target"]
    subprocess.run([*pip, "install", "--no-deps", *target, made], check=True)
    there = {path.name for path in (place / "target").iterdir() if path.name != "bin"}
    assert {name for name in there if not name.endswith(".dist-info")} == {"fedcli"}
    return [sys.executable, "-c", PROGRAM.format(place=str(place / "target"))]


def test_a_wheel_runs_them_beside_a_file_called_papers(installed):
    """The wheel has one top-level package, and what is around the working folder does not get into its way."""
    root = Path(__file__).parent.parent
    Path("papers.py").write_text("raise RuntimeError('not this one')\n")
    # What is a user's own is a copy, and the laws need no file of the checkout.
    for name in ("my_method.py", "my_parts.py"):
        shutil.copy(root / "docs" / "examples" / name, name)
    text = Path("my_method.py").read_text()
    Path("broken.py").write_text(text.replace("fed.remember(state.clients, cohort, kept)", "state.clients"))
    lines = (
        " ".join(["run fedavg --rounds 1 --quiet --out run", *FLAGS]),
        "table run --metric ./my_parts.py:my_metric,last",
        "plot run --kind ./my_parts.py:my_chart",
        "check ./my_method.py --device cpu --law 1 --law 3 --law 5",
        "check ./broken.py --device cpu --law 3 --law 5",
    )
    done = subprocess.run([*installed, *lines], capture_output=True, text=True)
    assert done.stderr.startswith("./broken.py, law 3: remembered-means, clients that took part whose state is not")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "1 of 2 laws hold on cpu."), done.stderr
    assert "\n3 of 3 laws hold on cpu.\n" in done.stdout
    record = json.loads(Path("run/record.json").read_text())
    assert len(record["user_files"]) == 3
    assert record["config"]["backbone"] == f"{Path('nets.py').resolve()}:tiny"
    assert record["commit"] is None  # of the installed package, not of a checkout
    assert "my_metric" in done.stdout
    assert f"{record['rounds'][0]['test_accuracy']:.2f}"[:4] in done.stdout
    assert "\nmy_chart.png and my_chart.pdf\n" in done.stdout
    assert all(Path(f"my_chart{kind}").stat().st_size > 1000 for kind in (".png", ".pdf"))


EXPERIMENT = """
method = "fedavg"
dataset = "shapes"
protocol = "fedfm:digits"
backbone = "./nets.py:tiny"
partition = "./split.py:by_halves"
num-clients = 3
cohort-size = 2
batch-size = 8
rounds = 2
lr = [0.01, 0.1]
seeds = [0, 1, 2]
device = "cpu"
"""


def test_a_newcomers_list(installed, tmp_path):
    """From the wheel, in a folder with nothing but the newcomer's files.

    Own data, network and split; a grid over two rates and three seeds in parallel, killed and continued; table, plot,
    a report; the best model exported; the same run logged to TensorBoard and read back.
    """
    pytest.importorskip("bokeh", reason="bokeh is not installed (fedcli[report])")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def fedcli_(*lines):
        done = subprocess.run([*installed, *lines], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done

    scope: dict = {}
    exec(DATA, scope)
    np.savez("shapes.npz", **scope["blobs"]())
    Path("exp.toml").write_text(EXPERIMENT)
    grid = "run --config exp.toml --jobs 2 --out grid"
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*installed, "data import shapes shapes.npz", grid], **pipes) as program:
        ended = next(line for line in program.stderr if line.startswith("["))
        program.kill()
    assert ended.startswith("[1/6] lr 0.01, seed ")
    for lock in Path("grid").rglob(".lock"):  # the runs of the killed program end by themselves
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
    done = fedcli_(f"{grid} --continue", "table grid --columns seeds", "plot grid --out p.svg", "report grid")
    assert not done.stderr.splitlines()[-1].startswith("[6/6]")  # what had ended was not run again
    places = [Path(f"grid/lr={lr}/seed-{seed}") for lr in (0.01, 0.1) for seed in (0, 1, 2)]
    records = [json.loads((place / "record.json").read_text()) for place in places]
    assert {record["status"] for record in records} == {"finished"}
    table = Path("grid/table.md").read_text()
    assert table in done.stdout
    assert all(f"| lr {lr} | 0, 1, 2 |" in table for lr in (0.01, 0.1))
    assert {path.name for path in Path("grid").glob("[ct]*")} == {"curves.pdf", "curves.png", "table.md"}
    assert "| Seeds |\n| --- |\n| 0, 1, 2 |\n| 0, 1, 2 |\n" in done.stdout
    assert "<!-- lr 0.01 -->" in Path("p.svg").read_text()
    assert {"lr 0.01", "lr 0.1"} <= set(re.findall(r"lr 0\.\d+", Path("report.html").read_text()))

    best = max(range(6), key=lambda place: records[place]["summary"]["selected"])
    own = "--backbone ./nets.py:tiny --partition ./split.py:by_halves"
    again = f"run --from {places[best]} {own} --log tensorboard --out again"
    files = " ".join(f"--method {name}" for name in ("nets.py", "split.py"))
    fedcli_(again, f"export {places[best]} --out best.pt2 {files}")
    record = json.loads(Path("again/record.json").read_text())
    assert record["summary"] == records[best]["summary"]
    read = reader.EventAccumulator("again/tensorboard")
    read.Reload()
    tested = [(1 + entry["round"], pytest.approx(entry["test_accuracy"])) for entry in record["rounds"]]
    assert [(event.step, event.value) for event in read.Scalars("test_accuracy")] == tested
    arrays = np.load("shapes.npz")
    logits = torch.export.load("best.pt2").module()(torch.from_numpy(arrays["x_test"])[:, None] / 255)
    correct = logits.argmax(1).numpy() == arrays["y_test"]
    assert correct.mean() == pytest.approx(record["summary"]["selected"])
