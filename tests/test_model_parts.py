"""Which leaves of a network are its head's, which batch normalisation's, and a model cut in two."""

import pytest
import torch

from fedcli.core import batchnorm_names, head_names, split
from fedcli.core.backbones import BACKBONES, build
from fedcli.core.network import Network
from fedcli.toy import BATCHNORM

RESIDUAL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.main = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.downsample = nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width))

    def forward(self, x):
        return self.main(x) + self.downsample(x)

def own(channels, size, classes):
    width = 2 * channels
    body = nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), Block(width), nn.GroupNorm(1, width), nn.Flatten())
    return nn.Sequential(body, nn.Linear(width * size**2, 5), nn.ReLU(), nn.Linear(5, classes))
"""


def network_of(name, size=32, device="meta"):
    """A network of 10 classes, without values unless on a device."""
    with torch.device(device):
        module = build(name, 3, size, 10, seed=0)
    return Network(module, "float32", torch.device(device))


@pytest.mark.parametrize("name", list(BACKBONES))
def test_every_built_in_network_has_one_head_and_the_leaves_of_its_batchnorms(name):
    network = network_of(name)
    assert head_names(network) == {"head.weight", "head.bias"}
    expected = set()
    for buffer in network.buffers:
        if buffer.endswith(".running_mean"):
            layer = buffer.removesuffix(".running_mean")
            expected |= {buffer, f"{layer}.running_var", f"{layer}.weight", f"{layer}.bias"}
    assert batchnorm_names(network) == expected
    assert expected <= {*network.params, *network.buffers}
    is_without = name.startswith(("cnn", "alexnet", "vit")) or name.endswith(("-gn", "projection"))
    assert bool(expected) == (not is_without)


def test_a_users_network_has_one_head_and_only_its_batchnorms(tmp_path):
    """No GroupNorm counts among its BatchNorms."""
    (tmp_path / "net.py").write_text(RESIDUAL)
    network = network_of(f"{tmp_path}/net.py:own", size=8, device="cpu")
    assert head_names(network) == {"head.weight", "head.bias"}
    leaves = ("weight", "bias", "running_mean", "running_var")
    of_main = {f"body.0.1.main.1.{leaf}" for leaf in leaves}
    of_downsample = {f"body.0.1.downsample.1.{leaf}" for leaf in leaves}
    assert batchnorm_names(network) == of_main | of_downsample  # and no GroupNorm


def test_a_model_is_cut_in_two_and_nothing_is_lost():
    network = network_of(BATCHNORM, size=8, device="cpu")
    norms = batchnorm_names(network)
    for tree in (network.params, network.buffers):
        named, rest = split(tree, norms)
        assert {*named} == {*tree} & norms
        assert {*rest} == {*tree} - norms
        assert all(named[name] is tree[name] for name in named)
        assert all(rest[name] is tree[name] for name in rest)
    assert split(network.params, ()) == ({}, network.params)
