"""Networks as people have them: attention, dropout of every form, frozen parts, torchvision's, compiled ones."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import fedcli
from fedcli.cli import display
from fedcli.core import backbones
from fedcli.core.layers import KeyedDraws
from fedcli.errors import UserError
from fedcli.registry import find_method
from fedcli.runs import run as runs
from tests import laws
from tests.test_backbones import images
from tests.test_runs import Stop, StopAfter

FEDAVG = find_method("fedavg")

NETS = """
import torchvision
import torch
from torch import nn
from torch.nn import functional as F

class Transformer(nn.Module):
    def __init__(self, channels, size, classes, dropout=0.0, first=True, attention=None):
        super().__init__()
        self.patches, self.first = nn.Conv2d(channels, 8, 2, 2), first
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=first)
        self.encoder = attention or nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        x = self.encoder(x) if self.first else self.encoder(x.transpose(0, 1)).transpose(0, 1)
        return self.head(x.mean(1))

def dropping(*shape):
    return Transformer(*shape, 0.1)

def batch_second(*shape):
    return Transformer(*shape, 0.1, False)

class MultiHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, 0.2, add_bias_kv=True, batch_first=True)

    def forward(self, x):
        return self.layer(x, x, x, need_weights=True)[0]

def weights(*shape):
    return Transformer(*shape, attention=MultiHead())

class Functions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.twice, self.whole = nn.Linear(8, 8), nn.Dropout(0.1), nn.Dropout2d(0.1)

    def forward(self, x):
        x = self.twice(nn.Tanh()(self.layer(F.dropout(x, 0.1, self.training))))
        x = self.twice(F.scaled_dot_product_attention(x, x, x, dropout_p=0.2 * self.training))
        return self.whole(x[:, :, :, None])[:, :, :, 0]

def functions(*shape):
    return Transformer(*shape, attention=Functions())

def torchvisions(channels, size, classes):
    network = torchvision.models.VisionTransformer(size, 2, 1, 2, 8, 16, 0.1, 0.1, classes)
    network.conv_proj = nn.Conv2d(channels, 8, 2, 2)
    nn.init.normal_(network.heads.head.weight, std=0.1)
    return network

def shared(channels, size, classes):
    layer = nn.Linear(8, 8)
    first = nn.Flatten(), nn.Linear(channels * size * size, 8)
    return nn.Sequential(*first, layer, nn.ReLU(), layer, nn.Linear(8, classes))

def in_place(channels, size, classes):
    first = nn.Flatten(), nn.Linear(channels * size * size, 8), nn.ReLU()
    return nn.Sequential(*first, nn.Dropout(0.2, True), nn.Linear(8, classes))

def compiled(channels, size, classes):
    first = torch.compile(nn.Conv2d(channels, 4, 3))
    network = nn.Sequential(first, nn.Hardswish(True), nn.Dropout(0.3, True), nn.Flatten(), nn.LazyLinear(classes))
    network[-2].compile()
    return torch.compile(network)

def frozen(channels, size, classes):
    network = nn.Sequential(
        nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * (size - 2) ** 2, 8), nn.ReLU(), nn.Linear(8, classes),
    )
    network[:2].requires_grad_(False)
    network[4].bias.requires_grad_(False)
    return network
"""
FROZEN = 4 * 9 + 4 + 2 * 4 + 8  # the convolution, its norm, and a bias


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    """The file in an empty folder, which is the working one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(display, "draw", lambda record, folder: None)
    Path("net.py").write_text(NETS)


def build(name):
    return backbones.build(f"./net.py:{name}", 1, 8, 10, seed=0)


TOGETHER = "in_place Transformer dropping batch_second weights functions torchvisions shared compiled frozen"


@pytest.mark.parametrize("name", TOGETHER.split())
def test_clients_train_together_as_in_the_plain_loop(name):
    """With batches that are not full, where what is drawn for an image must not depend on how many there are."""
    network = {"backbone": f"./net.py:{name}", "local_epochs": 1, "weight_decay": 0.0}
    laws.law_4_chunking_is_invisible(FEDAVG, rounds=1, parts=laws.toy_parts((7, 4, 2, 6)), **network)


def test_the_built_in_transformer_trains_by_the_function_that_it_is_tested_by():
    network, x = backbones.build("vit-tiny", 3, 8, 10, seed=0).double(), images(3, size=8)
    torch.testing.assert_close(network.train()(x)[0], network.eval()(x)[0])


def test_the_built_in_transformer_learns():
    options = {"rounds": 1, "local_epochs": 5, "num_clients": 2, "cohort_size": 2, "train_examples": 600}
    options |= {"optimizer": "adam", "lr": 0.001, "batch_size": 32, "partition": "iid"}
    run = fedcli.run("fedavg", dataset="digits", backbone="vit-tiny", out="run", **options)
    assert run.record["summary"]["last"] > 0.3


# The functions of torch


def in_functions(function, *arguments, **options):
    """What a function of torch gives in a network that trains."""
    with KeyedDraws():
        return function(*arguments, **options)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": torch.ones(5, 5).tril().bool()},
        {"attn_mask": torch.zeros(5, 5).bool()}, {"attn_mask": torch.linspace(-1, 1, 25).reshape(5, 5).double()},
    ],
)  # fmt: skip
def test_attention_is_torchs(options):
    query, key, value = torch.randn(3, 2, 4, 5, 6, dtype=torch.float64)
    function = F.scaled_dot_product_attention
    expected = function(query, key, value, **options)
    torch.testing.assert_close(in_functions(function, query, key, value, **options), expected)


def test_dropout_in_attention_drops_weights_and_is_that_of_the_key():
    ones, identity = torch.ones(8, 16, 16).double(), torch.eye(16).double().expand(8, 16, 16)
    draws = KeyedDraws()

    def weights():
        with draws:
            return F.scaled_dot_product_attention(ones, ones, identity, dropout_p=0.25)

    first, again = weights(), weights()
    draws.key.fill_(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, weights())
    assert first.unique().tolist() == [0.0, pytest.approx(1 / 16 / 0.75)]
    assert (first == 0).double().mean().item() == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize(
    ("function", "arguments", "mean", "std"),
    [
        (F.dropout, (torch.ones(4000), 0.2), 1, 0.5),
        (F.dropout2d, (torch.ones(4000, 1, 1, 1), 0.2), 1, 0.5),
        (F.dropout, (torch.ones(4000), 1.0), 0, 0),
    ],
)
def test_draws_have_torchs_distribution(function, arguments, mean, std):
    values = in_functions(function, *arguments)
    assert values.mean().item() == pytest.approx(mean, abs=0.03)
    assert values.std().item() == pytest.approx(std, abs=0.03)


def test_channels_are_dropped_whole():
    values = in_functions(F.dropout2d, torch.ones(50, 40, 3, 3))
    assert torch.equal(values, values[:, :, :1, :1].expand_as(values))
    assert (values[:, :, 0, 0] == 0).double().mean().item() == pytest.approx(0.5, abs=0.05)


# What a network is given and leaves


def test_compiled_modules_are_unwrapped():
    assert [name for name, _ in build("compiled").named_parameters()] == [
        "body.0.weight", "body.0.bias", "head.weight", "head.bias",
    ]  # fmt: skip


def test_what_is_frozen_is_neither_trained_nor_sent_nor_counted_and_is_exported(monkeypatch):
    options = {"backbone": "./net.py:frozen", "rounds": 2, "num_clients": 3, "cohort_size": 3, "train_examples": 90}
    run = fedcli.run("fedavg", dataset="digits", out="run", keep_states=True, **options)
    first, model = build("frozen"), run.model().network
    trained = {name for name, value in first.named_parameters() if not torch.equal(value, model.get_parameter(name))}
    assert trained == {"body.4.weight", "head.weight", "head.bias"}
    parameters = sum(value.numel() for value in first.parameters()) - FROZEN
    facts, cost = run.record["model"], run.record["cost"]
    assert facts["parameters"] == cost["floats_down"] == cost["floats_up"] == parameters
    assert facts["frozen"][0]["parameters"] == FROZEN
    assert display.header(run.record, run.path)["network"].endswith(f"{parameters:,} parameters, {FROZEN:,} frozen")


def test_a_run_goes_on_with_the_frozen_part_that_it_began_with_alone():
    text = NETS + "\n\ndef loaded(*shape):\n    network = frozen(*shape)\n"
    Path("net.py").write_text(text + "    network[0].bias.data += float(open('weights').read())\n    return network\n")
    Path("weights").write_text("1")
    options = {"backbone": "./net.py:loaded", "rounds": 2, "num_clients": 3, "cohort_size": 3, "train_examples": 90}
    with pytest.raises(Stop):
        fedcli.run("fedavg", dataset="digits", out="run", progress=StopAfter(1), **options)
    Path("weights").write_text("2")
    with pytest.raises(UserError, match="the frozen part of the network has changed since the run began"):
        runs.resume("run", method="./net.py")


def test_clients_that_train_no_step_are_named():
    options = {"partition": "dirichlet:0.5", "batch_size": 155, "drop_last": True, "rounds": 1}
    record = fedcli.run("fedavg", dataset="digits", backbone="cnn-small", out="run", **options).record
    held = [size - int(size * record["config"]["validation"]) for size in record["partition"]["sizes"]]
    idle = [client for client, size in enumerate(held) if size < 155]
    assert record["partition"]["idle"] == idle
    text = display.header(record, Path("run"))["idle"]
    assert text == f"clients {', '.join(map(str, idle))}, which have too few images for a step"
