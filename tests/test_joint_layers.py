"""Layers of stacked clients as operations on all of them: the values and gradients of PyTorch's, client by client."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from fedcli.bench.operation_counts import OperationCounter
from fedcli.core.joint_layers import JointLayers
from fedcli.core.layers import use_live_taps
from fedcli.core.trees import select
from tests import laws

K, B = 3, 5


class Nonlinear(nn.Module):
    """A layer between others that are not linear, so that second derivatives tell something."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x.tanh()).tanh()


def dead_taps():
    network = nn.Conv2d(2, 3, 7, padding=3, bias=False)
    assert use_live_taps(network, 2, 2)
    return network


NETWORKS = {
    "convolution": lambda: Nonlinear(nn.Conv2d(2, 4, 3, padding=1)),
    "convolution of two groups without a bias": lambda: Nonlinear(nn.Conv2d(2, 4, 3, stride=2, groups=2, bias=False)),
    "live taps": lambda: Nonlinear(nn.AdaptiveAvgPool2d(2), dead_taps()),
    "linear": lambda: Nonlinear(nn.Flatten(), nn.Linear(2 * 36, 4)),
    "linear without a bias": lambda: Nonlinear(nn.Linear(6, 4, bias=False)),
    "pooling behind a convolution": lambda: Nonlinear(nn.Conv2d(2, 4, 1), nn.MaxPool2d(2)),
    "pooling first": lambda: Nonlinear(nn.MaxPool2d((3, 2), stride=2, padding=(1, 0), ceil_mode=True)),
    "normalised images": lambda: Nonlinear(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4, momentum=0.3, eps=1e-3)),
    "normalised vectors": lambda: Nonlinear(nn.Flatten(), nn.BatchNorm1d(2 * 36)),
    "normalised without scale": lambda: Nonlinear(nn.BatchNorm2d(2, affine=False)),
}


def make_loss(network):
    """An objective of one client, which also gives new buffers."""

    def loss(params, buffers, x, target):
        buffers = {name: value.clone() for name, value in buffers.items()}
        output = functional_call(network, {**params, **buffers}, (x,)).flatten(1)
        cross_entropy = F.cross_entropy(output, target % output.shape[1], reduction="none").mean()
        return cross_entropy + output.pow(3).mean(), buffers

    return loss


def make_gradient_norm(network):
    """An objective whose gradient has second derivatives: the squared norm of the other's."""
    gradients = grad(make_loss(network), argnums=(0, 2), has_aux=True)

    def gradient_norm(params, buffers, x, target):
        (by_parameter, by_input), buffers = gradients(params, buffers, x, target)
        of_parameters = sum(value.square().sum() for value in by_parameter.values())
        return of_parameters + by_input.square().sum(), buffers

    return gradient_norm


OBJECTIVES = {1: make_loss, 2: make_gradient_norm}  # by the order of their derivatives


def random_clients(network):
    """Parameters and buffers of K clients."""
    params = {key: torch.randn(K, *value.shape).double() for key, value in network.named_parameters()}
    buffers = {key: torch.rand(K, *value.shape).double() for key, value in network.named_buffers()}
    return params, buffers


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("shared", ["nothing", "images", "parameters"])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_and_running_statistics_are_those_of_each_client_alone(name, shared, order):
    torch.manual_seed(0)
    network = NETWORKS[name]().double()
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.num_batches_tracked = None
    params, buffers = random_clients(network)
    x = torch.randn(K, B, 2, 6, 6).double()
    target = torch.randint(4, (K, B))
    axis_of_params = axis_of_x = 0
    if shared == "parameters":
        params = select(params, 0)
        axis_of_params = None
    if shared == "images":
        x = x[0]
        axis_of_x = None
    gradients = grad(OBJECTIVES[order](network), argnums=(0, 2), has_aux=True)

    with JointLayers():
        jointly = vmap(gradients, in_dims=(axis_of_params, 0, axis_of_x, 0))(params, buffers, x, target)

    for k in range(K):
        own_params = params if shared == "parameters" else select(params, k)
        own_x = x if shared == "images" else x[k]
        alone = gradients(own_params, select(buffers, k), own_x, target[k])
        laws.assert_agree(select(jointly, k), alone, f"{name} of client {k}")


def test_stacked_clients_need_one_operation_a_layer_and_no_copy_of_an_activation():
    norm = nn.BatchNorm2d(4)
    norm.num_batches_tracked = None
    network = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), norm, nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten()
    ).double()
    params, buffers = random_clients(network)
    x = torch.rand(K, B, 2, 8, 8).double()
    target = torch.randint(4, (K, B))

    def kernels(mode):
        with OperationCounter() as counter, mode:
            vmap(grad(make_loss(network), has_aux=True))(params, buffers, x, target)
        by_name = Counter()
        for operation in counter.operations:
            by_name[operation.name] += operation.kernels
        return by_name

    jointly = kernels(JointLayers())
    without = kernels(nullcontext())
    # Copied are the input, forwards and backwards, two tensors of weights, and two running statistics.
    assert jointly["clone"] == 6
    assert jointly["native_batch_norm"] == 1
    assert jointly["native_batch_norm_backward"] == 1
    assert without["clone"] > jointly["clone"]
    assert "where" not in jointly
    assert jointly.total() < 0.7 * without.total()


def test_running_statistics_that_clients_share_are_not_written_over():
    network = nn.BatchNorm2d(2)
    network.num_batches_tracked = None
    with JointLayers(), pytest.raises(RuntimeError, match="running statistics that clients share"):
        vmap(network)(torch.rand(K, B, 2, 4, 4))
