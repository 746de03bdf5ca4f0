"""Layers of stacked clients as operations on all of them: the values and gradients of PyTorch's, client by client."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from fedcli.bench.count import Count
from fedcli.core.joint_layers import JointLayers
from fedcli.core.layers import use_live_taps
from fedcli.core.trees import select
from tests import laws

K, B = 3, 5


class Bent(nn.Module):
    """A layer between others that are not linear, so that second derivatives tell something."""

    def __init__(self, layer, *more):
        super().__init__()
        self.layers = nn.Sequential(layer, *more)

    def forward(self, x):
        return self.layers(x.tanh()).tanh()


def dead_taps():
    network = nn.Conv2d(2, 3, 7, padding=3, bias=False)
    assert use_live_taps(network, 2, 2)
    return network


NETWORKS = {
    "convolution": lambda: Bent(nn.Conv2d(2, 4, 3, padding=1)),
    "convolution of two groups without a bias": lambda: Bent(nn.Conv2d(2, 4, 3, stride=2, groups=2, bias=False)),
    "live taps": lambda: Bent(nn.AdaptiveAvgPool2d(2), dead_taps()),
    "linear": lambda: Bent(nn.Flatten(), nn.Linear(2 * 36, 4)),
    "linear without a bias": lambda: Bent(nn.Linear(6, 4, bias=False)),
    "pooling behind a convolution": lambda: Bent(nn.Conv2d(2, 4, 1), nn.MaxPool2d(2)),
    "pooling first": lambda: Bent(nn.MaxPool2d((3, 2), stride=2, padding=(1, 0), ceil_mode=True)),
    "normalised images": lambda: Bent(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4, momentum=0.3, eps=1e-3)),
    "normalised vectors": lambda: Bent(nn.Flatten(), nn.BatchNorm1d(2 * 36)),
    "normalised without scale": lambda: Bent(nn.BatchNorm2d(2, affine=False)),
}


def objective(network, order):
    """Makes an objective of one client that also gives new buffers; of the second `order`, by a squared gradient."""

    def first(params, buffers, x, target):
        buffers = {name: value.clone() for name, value in buffers.items()}
        output = functional_call(network, {**params, **buffers}, (x,)).flatten(1)
        loss = F.cross_entropy(output, target % output.shape[1], reduction="none").mean()
        return loss + output.pow(3).mean(), buffers

    def second(params, buffers, x, target):
        (by_parameter, by_input), buffers = grad(first, argnums=(0, 2), has_aux=True)(params, buffers, x, target)
        of_parameters = sum(value.square().sum() for value in by_parameter.values())
        return of_parameters + by_input.square().sum(), buffers

    return {1: first, 2: second}[order]


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("shared", ["nothing", "images", "parameters"])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_and_running_statistics_are_those_of_each_client_alone(name, shared, order):
    torch.manual_seed(0)
    network = NETWORKS[name]().double()
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.num_batches_tracked = None
    params = {key: torch.randn(K, *value.shape).double() for key, value in network.named_parameters()}
    buffers = {key: torch.rand(K, *value.shape).double() for key, value in network.named_buffers()}
    x, target = torch.randn(K, B, 2, 6, 6).double(), torch.randint(4, (K, B))
    axes = {"params": 0, "x": 0}
    if shared == "images":
        x, axes["x"] = x[0], None
    if shared == "parameters":
        params, axes["params"] = {key: value[0] for key, value in params.items()}, None
    of_client = grad(objective(network, order), argnums=(0, 2), has_aux=True)
    with JointLayers():
        jointly = vmap(of_client, in_dims=(axes["params"], 0, axes["x"], 0))(params, buffers, x, target)
    for k in range(K):
        own = params if axes["params"] is None else {key: value[k] for key, value in params.items()}
        own_buffers = {key: value[k] for key, value in buffers.items()}
        alone = of_client(own, own_buffers, x if axes["x"] is None else x[k], target[k])
        laws.assert_agree(select(jointly, k), alone, f"{name} of client {k}")


def test_a_network_of_stacked_clients_is_one_operation_a_layer_and_copies_no_activation():
    network = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten()
    )
    network[1].num_batches_tracked = None
    params = {key: torch.rand(K, *value.shape) for key, value in network.named_parameters()}
    buffers = {key: torch.rand(K, *value.shape) for key, value in network.named_buffers()}
    of_client = grad(objective(network, 1), has_aux=True)
    counts = {}
    for mode in (JointLayers(), nullcontext()):
        with Count() as count, mode:
            vmap(of_client)(params, buffers, torch.rand(K, B, 2, 8, 8), torch.randint(4, (K, B)))
        counts[type(mode)] = count.kernels
    jointly, without = counts.values()
    # Copied are the input, forwards and backwards, two tensors of weights, and two running statistics.
    assert (jointly["clone"], jointly["native_batch_norm"], jointly["native_batch_norm_backward"]) == (6, 1, 1)
    assert without["clone"] > jointly["clone"]
    assert "where" not in jointly
    assert jointly.total() < 0.7 * without.total()


def test_running_statistics_that_clients_share_are_not_written_over():
    network = nn.BatchNorm2d(2)
    network.num_batches_tracked = None
    with JointLayers(), pytest.raises(RuntimeError, match="running statistics that clients share"):
        vmap(network)(torch.rand(K, B, 2, 4, 4))
