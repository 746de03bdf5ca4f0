"""A user's network is trained, loaded and exported as it was written, or refused by name before anything is written."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedcli
from fedcli import registry, toy
from fedcli.cli import display
from fedcli.core import backbones
from fedcli.core.keyed_draws import KeyedDropout
from fedcli.core.layers import MaskedBatchNorm2d
from fedcli.data import datasets
from fedcli.runs import resume
from fedcli.runs.exports import export
from fedcli.toy import federation
from fedcli.userfiles import find_user_function
from tests import laws
from tests.accuracies import accuracies_by_pytorch, accuracy
from tests.example_parts import PARTS_FILE
from tests.listeners import Stop, StopAfter
from tests.network_sources import NETWORKS, NETWORKS_WITH_STATE, RETURN_LOGITS, network_source
from tests.user_errors import raises_user_error

FEDAVG = registry.find_method("fedavg")


@pytest.fixture(autouse=True)
def files(folder):
    """The files with networks in an empty folder, which is the working one."""
    Path("nets.py").write_text(NETWORKS + NETWORKS_WITH_STATE)


def write_network(forward, layers):
    """Writes `net.py`, a network with these layers and this way through them."""
    Path("net.py").write_text("import torch\n" + network_source(forward, layers))


def build(forward, layers):
    write_network(forward, layers)
    return backbones.build("./net.py:Net", 1, 8, 5, seed=3)


def build_network_of_file(name):
    """Builds a network of the file with networks, for the digits."""
    return backbones.build(f"./nets.py:{name}", 1, 8, 10, seed=0)


# What is refused

SCALE = "self.t = nn.Parameter(torch.zeros(1))"


@pytest.mark.parametrize(
    ("forward", "layers"),
    [
        ("return self.fc(self.first(x)) * self.t.exp()", SCALE),
        ("y = self.fc(self.first(x)); return y + self.t * y.tanh()", SCALE),
        ("return self.fc(self.first(x)) / self.n", "self.register_buffer('n', torch.ones(1))"),
        ("return self.fc(self.first(x)).clamp(-50, 50)", ""),
        ("return self.drop(self.fc(self.first(x)))", "self.drop = nn.Dropout(0.3)"),
        ("y = self.fc(self.first(x)); return 2 * y if self.training else y", ""),
        ("y = self.fc(self.first(x)); return y if self.training else y * self.t.exp()", SCALE),
        ("return self.fc(self.first(x)) + self.t * x.sum(1, True)", SCALE),
        ("return self.fc(self.first(x)).log_softmax(1)", ""),
    ],
    ids=[
        "a temperature",
        "a residual",
        "a buffer",
        "a clamp",
        "dropout",
        "another one in training",
        "a temperature in evaluation",
        "a second path",
        "a softmax",
    ],
)
def test_what_stands_behind_the_last_layer_is_seen(forward, layers):
    """It is seen also where it begins as the identity."""
    with raises_user_error("does not end in its last nn.Linear", "net.py"):
        build(forward, layers)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ("self.first.weight.register_hook(lambda g: g * 0)", "has a hook on the parameter 'first.weight'"),
        ("self.fc.bias.register_post_accumulate_grad_hook(print)", "has a hook on the parameter 'fc.bias'"),
        ("self.w = nn.Parameter(torch.ones(2, dtype=torch.complex64))", "the parameter 'w' of type torch.complex64"),
        ("self.register_buffer('w', torch.ones(2, dtype=torch.complex64))", "the buffer 'w' of type torch.complex64"),
        ("self.half()", "the parameter 'first.weight' of type torch.float16; leave out .half()"),
        ("self.first.double()", "the parameter 'first.weight' of type torch.float64"),
        ("self.register_buffer('w', torch.ones(2).double())", "the buffer 'w' of type torch.float64"),
        ("self.register_buffer('key', torch.tensor(0))", "has a buffer 'key', as those of dropout"),
        ("self.p = nn.Parameter(self.first.weight[:2].detach())", "'p' and 'first.weight' in the same memory"),
        ("w = torch.ones(4); self.register_buffer('a', w[:2]); self.register_buffer('b', w)", "same memory"),
        ("self.n = nn.BatchNorm2d(1, track_running_stats=False)", "leave track_running_stats=True"),
        ("self.n = nn.BatchNorm2d(1, momentum=None)", "give it a momentum, such as momentum=0.1"),
    ],
)
def test_what_the_engine_cannot_keep_is_refused_by_name(layers, words):
    with raises_user_error(words, "net.py"):
        build(RETURN_LOGITS, layers)


@pytest.mark.parametrize(
    "draw", ["np.random.default_rng().random()", "int.from_bytes(os.urandom(3)) / 2**24", "next(COUNT)"]
)
def test_a_network_that_is_another_one_each_time_it_is_made_is_refused(draw):
    """Its loaded model would not be the trained one, since a constant in no buffer is not kept."""
    layers = f"import os, itertools, numpy as np; globals().setdefault('COUNT', itertools.count()); self.c = {draw}"
    with raises_user_error("is another network each time it is made", "net.py"):
        build("x = x + self.c; " + RETURN_LOGITS, layers)


def test_a_network_that_is_made_once_is_refused():
    """All seeds would have its weights."""
    write_network(RETURN_LOGITS, "")
    source = Path("net.py").read_text()
    Path("net.py").write_text(f"{source}\nNET = Net(1, 8, 5)\ndef made_once(*sizes):\n    return NET\n")
    with raises_user_error("'made_once' in", "gives the same module each time", "make a new one"):
        backbones.build("./net.py:made_once", 1, 8, 5, seed=3)


@pytest.mark.parametrize(
    ("arguments", "misplaced"),
    [
        ("num_classes, channels, image_size", "num_classes"),
        ("channels, num_classes, image_size", "num_classes"),
        ("channels, image_size=8, width=4, num_classes=5", "num_classes"),
        ("*sizes, channels=1", "channels"),
        ("size, channels, num_classes", "channels"),
    ],
)
def test_arguments_of_a_network_in_another_order_are_refused(arguments, misplaced):
    """They are given by position; numbers that happen to be equal would hide that they are others."""
    Path("net.py").write_text(f"from torch import nn\ndef net({arguments}):\n    return nn.Linear(8, 8)\n")
    with raises_user_error(f"'net' in '{Path('net.py').resolve()}' has its argument {misplaced} at another place"):
        backbones.build("./net.py:net", 1, 8, 8, seed=3)


@pytest.mark.parametrize(
    ("forward", "layers", "words"),
    [
        (
            "self.first.weight.data.mul_(0.9); " + RETURN_LOGITS,
            "",
            "changes the parameter 'first.weight' in its forward",
        ),
        ("self.calls += 1; x = x * self.calls; " + RETURN_LOGITS, "self.calls = 0", "from one batch to the next"),
        (
            "self.n = 0.9 * self.n + self.first.bias.detach()[0]; x = x - self.n; " + RETURN_LOGITS,
            "self.n = 0",
            "to the next",
        ),
        ("x = x - self.t * x.mean(0) * self.training; " + RETURN_LOGITS, SCALE, "mixes the images of a batch"),
        ("x = self.first(x); return self.fc(x - x.mean(0) * self.training)", "", "mixes the images of a batch"),
    ],
)
def test_a_forward_that_changes_what_is_no_buffer_or_hides_a_mean_is_refused(forward, layers, words):
    with raises_user_error(words, "net.py"):
        build(forward, layers)


@pytest.mark.parametrize(
    ("forward", "layers", "words"),
    [
        pytest.param(
            "return self.first(x)", "", "gives no logits of 5 classes (got (4, 6) of 4 images)", id="features as logits"
        ),
        pytest.param(
            RETURN_LOGITS, "self.fc = nn.Linear(6, num_classes, bias=False)", "D] (got Linear)", id="head without bias"
        ),
        pytest.param(
            "return self.fc(self.first(x) + self.fc(self.first(x)).sum())",
            "",
            "in its last nn.Linear; let that give",
            id="head called twice",
        ),
        pytest.param(
            "return self.fc(self.first(x)) + 0 * self.fc.weight.sum()",
            "",
            "has no attribute 'weight'",
            id="weight of the head read",
        ),
        pytest.param(
            "return self.fc(self.norm(self.first(x)))",
            "self.norm = nn.BatchNorm1d(6)",
            "mixes the images of a batch before or in the layer 'norm' (BatchNorm1d); use nn.BatchNorm2d,",
            id="BatchNorm1d",
        ),
        pytest.param(
            "return self.fc(self.drop(self.first(x)))",
            "self.drop = nn.AlphaDropout(0.5)",
            "draws random numbers before or in the layer 'drop' (AlphaDropout); use nn.Dropout or",
            id="AlphaDropout",
        ),
        pytest.param(
            "return self.fc(self.first(self.att(x, x, x)[0]))",
            "self.att = nn.MultiheadAttention(64, 2)",
            "mixes the images of a batch before or in the layer 'att' (MultiheadAttention)",
            id="attention between images",
        ),
        pytest.param(
            f"self.n = self.n + 1; {RETURN_LOGITS}",
            "self.register_buffer('n', self.fc.bias[:1].detach())",
            "puts a new tensor",
            id="new tensor as buffer",
        ),
        pytest.param(
            RETURN_LOGITS,
            "self.fc.weight.requires_grad_(False)",
            "nn.Linear with bias that is trained",
            id="frozen head",
        ),
        pytest.param(
            RETURN_LOGITS,
            "self.again = nn.ParameterList([self.first.weight])",
            "in two places, 'first.weight' and 'again.0'",
            id="shared parameter",
        ),
        pytest.param(
            "F = nn.functional; return F.linear(F.linear(x, self.first.weight), self.fc.weight)",
            "",
            "of features [B, D] (got no layer that was called)",
            id="weights alone",
        ),
        pytest.param(
            "return self.fc(self.first(x[:, :7]))", "", "line 11 (got RuntimeError: mat1 and mat2", id="another shape"
        ),
    ],
)
def test_a_network_that_breaks_a_rule_is_refused_in_a_line(forward, layers, words):
    with raises_user_error(words, "net.py"):
        build(forward, layers)


def test_a_refused_network_leaves_no_folder():
    write_network(RETURN_LOGITS, "self.half()")
    options = {"dataset": "digits", "backbone": "./net.py:Net", "device": "cpu"}
    with raises_user_error(".half()"):
        fedcli.run("fedavg", out="run", **options)
    assert not Path("run").exists()


# What is kept

OWN_NETWORKS = (
    "counting", "passing", "constant_in_two_places", "plain_norm", "backward_hook", "hooked_dropout", "spectral",
    "weight_norm", "old_function", "checkpointed", "drawing", "new_tensor", "Transformer", "dropping", "weights",
    "functions", "shared", "in_place", "compiled", "frozen",
)  # fmt: skip
BUILT_IN_NETWORKS = ("cnn-small", "resnet10-3x3", "vit-tiny")
SMALL_RUN = {
    "dataset": "digits", "train_examples": 80, "num_clients": 2, "cohort_size": 2, "rounds": 1, "local_epochs": 1,
    "batch_size": 20, "lr": 0.05, "device": "cpu", "protocol": "fedfm:digits", "validation": 0.0, "partition": "iid",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OWN_NETWORKS, *BUILT_IN_NETWORKS])
def test_every_accepted_network_gives_the_recorded_accuracy_when_it_is_loaded(name, tmp_path):
    is_built_in = name in BUILT_IN_NETWORKS
    backbone = name if is_built_in else f"./nets.py:{name}"
    run = fedcli.run("fedavg", out=tmp_path / "run", backbone=backbone, **SMALL_RUN)

    loaded = fedcli.load(run.path, method=[] if is_built_in else "nets.py").model()

    data = datasets.load("digits")
    assert accuracy(loaded, data.x_test, data.y_test) == run.record["summary"]["selected"]

    file, _ = export(run, "safetensors", out=tmp_path / "model")
    buffers = {name for name, _ in loaded.network.named_buffers() if not name.endswith(".key")}
    assert buffers <= set(load_file(file))


@pytest.mark.slow
def test_plain_pytorch_gives_the_recorded_accuracy_with_any_buffers(tmp_path):
    """The networks have buffers of every kind."""
    files = []
    recorded = []
    for name in ("passing", "spectral"):
        run = fedcli.run("fedavg", out=tmp_path / name, backbone=f"./nets.py:{name}", **SMALL_RUN)
        recorded.append(run.record["summary"]["selected"])
        file, _ = export(run, out=tmp_path / f"{name}.pt2")
        files.append(file)

    assert accuracies_by_pytorch(files, tmp_path) == recorded


def test_a_buffer_that_changes_in_two_places_is_refused():
    with raises_user_error("changes a buffer in two places, '2.size' and '2.again'"):
        backbones.build("./nets.py:doubled", 1, 8, 5, seed=3)


def make_users_network(name):
    """The module as the user's function makes it, with the weights of seed 0."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return find_user_function(f"./nets.py:{name}", "backbone")(1, 8, 3)


@pytest.mark.parametrize("name", ["plain_norm", "backward_hook", "hooked_dropout", "passing", "weight_norm"])
def test_gradients_of_a_users_network_are_those_of_plain_pytorch(name):
    """Both are in training mode, and dropout is taken out of both."""
    _, fed = federation("fedavg", backbone=f"./nets.py:{name}")
    plain = make_users_network(name).double().train()
    for layer in (*plain.modules(), *fed.network.module.modules()):
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64)

    params, buffers = fed.initial_model()
    params = {key: value.requires_grad_() for key, value in params.items()}
    loss = fed.network(params, buffers, x).logits.square().sum()
    gradients = torch.autograd.grad(loss, list(params.values()))

    expected = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))
    torch.testing.assert_close(gradients, expected)


def test_layers_of_a_users_network_become_the_products():
    """The last linear layer becomes the head, and others those that know padding and keys."""
    shutil.copy(PARTS_FILE, "parts.py")
    module = backbones.build("./parts.py:tiny", 1, 8, 5, seed=3)
    torch.manual_seed(3)
    theirs = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 32), nn.ReLU(),
        nn.Linear(32, 5),
    )  # fmt: skip
    for ours, other in zip(module.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours, other)

    images = torch.randn(6, 1, 8, 8)
    features, logits = module.eval()(images)
    torch.testing.assert_close(logits, theirs.eval()(images))
    torch.testing.assert_close(features, theirs[:-1](images))
    assert module.feature_dim == 32

    norm = module.body[1]
    assert type(norm) is MaskedBatchNorm2d
    assert type(module.body[4]) is KeyedDropout
    torch.testing.assert_close(norm.running_mean, torch.zeros(8))  # the trial leaves no trace


def test_compiled_modules_are_unwrapped():
    assert [name for name, _ in build_network_of_file("compiled").named_parameters()] == [
        "body.0.weight", "body.0.bias", "head.weight", "head.bias",
    ]  # fmt: skip


def test_batch_normalisation_without_weights_leaves_padding_out():
    layer = MaskedBatchNorm2d(3, affine=False).double()
    plain = nn.BatchNorm2d(3, affine=False).double()
    x = torch.randn(5, 3, 4, 4, dtype=torch.float64)
    layer.mask = torch.tensor([True, True, True, False, False])
    torch.testing.assert_close(layer(x)[:3], plain(x[:3]))
    torch.testing.assert_close(layer.running_var, plain.running_var)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "in_place", "Transformer", "dropping", "batch_second", "weights", "functions", "torchvisions", "shared",
        "compiled", "frozen", "plain_norm", "constant_in_two_places", "counting",
    ],
)  # fmt: skip
def test_clients_train_together_as_one_by_one_and_as_in_the_plain_loop(name):
    """Batches are not full, and what is drawn for an image must not depend on how many there are."""
    run_options = {"backbone": f"./nets.py:{name}", "local_epochs": 1, "weight_decay": 0.0}
    laws.law_4_chunking_is_invisible(FEDAVG, rounds=1, parts=toy.toy_parts((7, 4, 2, 6)), **run_options)


@pytest.mark.parametrize("name", ["spectral", "old_function", "checkpointed", "new_tensor", "backward_hook"])
def test_what_vmap_does_not_take_trains_one_by_one_and_that_is_said(name, tmp_path):
    options = {**SMALL_RUN, "backbone": f"./nets.py:{name}"}
    one_by_one = fedcli.run("fedavg", out=tmp_path / "one", clients_per_chunk="1", **options).record
    in_pairs = fedcli.run("fedavg", out=tmp_path / "two", clients_per_chunk="2", **options).record

    assert in_pairs["summary"]["params_sha256"] == one_by_one["summary"]["params_sha256"]
    assert in_pairs["engine"]["clients_per_chunk"] == 1
    (note,) = in_pairs["engine"]["notes"]
    network = f"{Path('nets.py').resolve()}:{name}"
    assert f"clients train one by one: vmap does not take the network {network}" in note["text"]
    assert one_by_one["engine"]["notes"] == []


def test_dead_taps_are_those_of_the_file_as_it_is_now():
    """A notebook may edit a network between two runs."""
    with_taps = "nn.Sequential(nn.Conv2d(channels, 4, 3, padding=1), nn.Flatten(), nn.Linear(4, num_classes))"
    text = f"from torch import nn\ndef net(channels, image_size, num_classes):\n    return {with_taps}\n"
    Path("net.py").write_text(text)
    assert backbones.have_dead_taps("./net.py:net", 1, 1)  # of an image of one pixel
    Path("net.py").write_text(text.replace("3, padding=1", "1"))
    assert not backbones.have_dead_taps("./net.py:net", 1, 1)


@pytest.mark.parametrize("error", ["torch.OutOfMemoryError('no memory')", "RuntimeError('CUDA error: out of memory')"])
def test_a_device_without_memory_is_not_blamed_on_the_file_of_the_network(error):
    """The engine then tries fewer clients together."""
    write_network(f"if len(x) == 6: raise {error}\n        {RETURN_LOGITS}", "")
    network = backbones.build("./net.py:Net", 1, 8, 5, seed=0)
    with pytest.raises(RuntimeError, match="memory"):
        network(torch.zeros(6, 1, 8, 8))


def test_a_parameter_of_whole_numbers_stays_as_it_is():
    network = build(RETURN_LOGITS, "self.n = nn.Parameter(torch.arange(3), requires_grad=False)")
    assert dict(network.named_parameters())["body.n"].tolist() == [0, 1, 2]


# What is frozen

NUM_FROZEN = 4 * 9 + 4 + 2 * 4 + 8  # the convolution, its norm, and a bias


def test_what_is_frozen_is_only_exported():
    """It is neither trained nor sent nor counted."""
    initial = build_network_of_file("frozen")
    options = {"rounds": 2, "num_clients": 3, "cohort_size": 3, "train_examples": 90}
    run = fedcli.run("fedavg", dataset="digits", backbone="./nets.py:frozen", out="run", keep_states=True, **options)

    final = run.model().network
    trained = {name for name, value in initial.named_parameters() if not torch.equal(value, final.get_parameter(name))}
    assert trained == {"body.4.weight", "head.weight", "head.bias"}

    parameters = sum(value.numel() for value in initial.parameters()) - NUM_FROZEN
    assert run.record["model"]["parameters"] == parameters
    assert run.record["cost"]["floats_down"] == parameters
    assert run.record["cost"]["floats_up"] == parameters

    (frozen,) = run.record["model"]["frozen"]
    assert frozen["parameters"] == NUM_FROZEN

    header = display.header_texts(run.record, run.path)
    assert header["network"].endswith(f"{parameters:,} parameters, {NUM_FROZEN:,} frozen")


def test_a_run_goes_on_with_the_frozen_part_that_it_began_with_alone():
    text = NETWORKS + "\n\ndef loaded(*shape):\n    network = frozen(*shape)\n"
    Path("net.py").write_text(text + "    network[0].bias.data += float(open('weights').read())\n    return network\n")
    Path("weights").write_text("1")
    options = {"backbone": "./net.py:loaded", "rounds": 2, "num_clients": 3, "cohort_size": 3, "train_examples": 90}
    with pytest.raises(Stop):
        fedcli.run("fedavg", dataset="digits", out="run", progress=StopAfter(1), **options)
    Path("weights").write_text("2")
    with raises_user_error("the frozen part of the network has changed since the run"):
        resume.resume("run", files="./net.py")
