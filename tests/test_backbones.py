"""Networks: sizes and functions against the papers, initial weights, and masks and keys on their way to layers."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedcli
from fedcli.core.backbones import BACKBONES, build
from fedcli.core.layers import KeyedDropout, MaskedBatchNorm2d
from fedcli.vision import torchvision
from tests.files import refused


def images(batch, channels=3, size=32, seed=0, dtype=torch.float64):
    return torch.randn(batch, channels, size, size, dtype=dtype, generator=torch.Generator().manual_seed(seed))


# Networks


@pytest.mark.parametrize(
    ("name", "channels", "size", "classes", "expected"),
    [
        ("cnn-mcmahan", 1, 28, 10, 582_026),
        ("cnn-mcmahan", 3, 32, 100, 924_708),
        ("cnn-2x32", 1, 28, 10, 299_306),
        ("cnn-2x64", 3, 32, 10, 797_962),
        ("cnn-2x32-100", 1, 28, 10, 832 + 25_632 + (512 * 384 + 384) + (384 * 100 + 100) + 1_010),
        ("cnn-3conv", 3, 28, 10, 14_213_578),
        ("cnn-small", 1, 8, 10, 160 + 4_640 + (128 * 64 + 64) + 650),
        ("resnet18", 3, 32, 10, 11_181_642),
        ("resnet18-3x3", 3, 32, 10, 11_173_962),
        ("resnet50-3x3", 3, 32, 100, 23_705_252),
        ("resnet10-3x3", 3, 32, 10, 4_903_242),
        ("resnet18-3x3-gn-projection", 3, 32, 100, 11_588_516),
        ("alexnet-32", 3, 32, 10, 23_272_266),
        # In the widespread form for CIFAR the first block has a 1 x 1 convolution and a norm that nothing goes through.
        ("efficientnet-b0-32", 3, 32, 10, 3_599_686 - (32 * 32 + 2 * 32)),
        ("mobilenet-v2-32", 3, 32, 10, 2_296_922),
        ("googlenet-32", 3, 32, 10, 6_166_250),
        ("resnet10-512", 3, 32, 100, 4_957_092),
        ("resnet18-512", 3, 32, 10, 11_176_512 + 512 * 10 + 10),
        ("resnet34-512", 3, 32, 10, 21_284_672 + 512 * 10 + 10),
        ("resnet101-512", 3, 32, 10, 42_500_160 + 512 * 10 + 10),
        ("resnet152-512", 3, 64, 200, 58_143_808 + 512 * 200 + 200),
        ("mobilenet-v2-dropout-512", 3, 32, 100, 2_275_172),
        ("googlenet-512", 3, 32, 100, 5_599_904 + 512 * 100 + 100),
        # Patches of 4 x 4 pixels, a token and 64 + 1 places, 4 layers as nn.TransformerEncoderLayer, and the last norm.
        ("vit-tiny", 1, 32, 10, 49 * 128 + 128 + 65 * 128 + 4 * 132_480 + 256 + 1_290),
    ],
)
def test_parameter_counts_are_those_of_the_papers(name, channels, size, classes, expected):
    with torch.device("meta"):  # shapes without values
        network = build(name, channels, size, classes, seed=0)
    assert sum(value.numel() for value in network.parameters()) == expected


NORMED = ("resnet", "mobilenet", "googlenet", "efficientnet")
SIGNED = ("vit-tiny", "resnet18-3x3-gn-projection", "efficientnet-b0-32", "cnn-2x32-100-linear")  # without a last ReLU


@pytest.mark.parametrize(
    "name", [name for name in BACKBONES if not name.startswith(("resnet34", "resnet50", "resnet101", "resnet152"))]
)
def test_features_and_head(name):
    size = 28 if name.startswith(("cnn", "alexnet")) else 16 if name == "googlenet-512" else 8
    module = build(name, 1, size, 7, seed=0)
    features, logits = module(images(2, 1, size, dtype=torch.float32))
    assert features.shape == (2, module.feature_dim)
    assert (features >= 0).all() == (name not in SIGNED)
    assert module.head.weight.shape == (7, module.feature_dim)
    torch.testing.assert_close(logits, features @ module.head.weight.T + module.head.bias)
    assert all(value.dtype == torch.float32 for value in module.state_dict().values())  # can be averaged


@pytest.mark.parametrize("name", BACKBONES)
def test_no_layer_has_draws_of_its_own_or_statistics_that_padding_reaches(name):
    with torch.device("meta"):
        layers = list(build(name, 3, 32, 10, seed=0).modules())
    drawing = nn.modules.dropout._DropoutNd | torchvision().ops.StochasticDepth
    assert not [layer for layer in layers if isinstance(layer, drawing) and layer.p]
    norms = [layer for layer in layers if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    assert all(isinstance(layer, MaskedBatchNorm2d) for layer in norms)
    assert bool(norms) == (name.startswith(NORMED) and "-gn" not in name)


@pytest.mark.parametrize(
    ("name", "size", "padding", "pooled"),
    [
        ("cnn-small", 16, 1, (0, 1)),
        ("cnn-mcmahan", 28, 0, (0, 1)),
        ("cnn-2x64", 32, 0, (0, 1)),
        ("cnn-3conv", 28, 2, (0, 1)),
        ("alexnet-32", 32, 1, (0, 1, 4)),
    ],
)
def test_cnn_is_the_papers_function(name, size, padding, pooled):
    """Convolution, ReLU, pooling in the papers' order; fully connected layers with ReLU."""
    module = build(name, 3, size, 10, seed=1).double()
    x = features = images(2, size=size)
    weights = list(module.body.parameters())
    convolutions = [pair for pair in zip(weights[::2], weights[1::2], strict=True) if pair[0].dim() == 4]
    for i, (weight, bias) in enumerate(convolutions):
        stride = 2 if name == "alexnet-32" and i == 0 else 1
        features = F.relu(F.conv2d(features, weight, bias, stride, padding))
        features = F.max_pool2d(features, 2) if i in pooled else features
    features = features.flatten(1)
    for weight, bias in zip(weights[2 * len(convolutions) :: 2], weights[2 * len(convolutions) + 1 :: 2], strict=True):
        features = F.relu(F.linear(features, weight, bias))
    torch.testing.assert_close(module(x)[0], features)


class Weights:
    """A network's parameters, to be used up in their order; normalisation as in evaluation before any training."""

    def __init__(self, module, eps=1e-5):
        self.left, self.eps = [value.detach() for value in module.parameters()], eps

    def conv(self, x, stride=1, bias=False, norm=True):
        weight = self.left.pop(0)
        groups = len(weight) if weight.shape[1] < x.shape[1] else 1
        x = F.conv2d(x, weight, self.left.pop(0) if bias else None, stride, weight.shape[2] // 2, groups=groups)
        if norm:
            scale, shift = self.left.pop(0), self.left.pop(0)
            x = x / (1 + self.eps) ** 0.5 * scale[:, None, None] + shift[:, None, None]
        return x


def efficientnet(x, weights):
    """Tan and Le, EfficientNet, Table 1 and Section 4, with stride 1 in the stem and without stage 9's convolution."""
    x = F.silu(weights.conv(x))
    stages = (1, 1, 1), (6, 2, 2), (6, 2, 2), (6, 2, 3), (6, 1, 3), (6, 2, 4), (6, 1, 1)  # expansion, stride, blocks
    for factor, first, blocks in stages:
        for stride in (first, *[1] * (blocks - 1)):
            y = F.silu(weights.conv(x)) if factor > 1 else x
            y = F.silu(weights.conv(y, stride))
            squeezed = F.silu(weights.conv(y.mean((2, 3), keepdim=True), bias=True, norm=False))
            y = weights.conv(y * torch.sigmoid(weights.conv(squeezed, bias=True, norm=False)))
            x = x + y if stride == 1 and x.shape == y.shape else y
    return x.mean((2, 3))


def mobilenet(x, weights):
    """Sandler et al., MobileNetV2, Table 2, as it is widespread for CIFAR."""
    x = F.relu(weights.conv(x))
    for first, blocks in (1, 1), (1, 2), (2, 3), (2, 4), (1, 3), (2, 3), (1, 1):
        for stride in (first, *[1] * (blocks - 1)):
            y = F.relu(weights.conv(x))
            y = weights.conv(F.relu(weights.conv(y, stride)))
            x = y + (x if x.shape == y.shape else weights.conv(x)) if stride == 1 else y
    return F.relu(weights.conv(x)).mean((2, 3))


def googlenet(x, weights):
    """Szegedy et al., GoogLeNet, Table 1 from the first inception module on, as it is widespread for CIFAR."""

    def convs(x, number):
        for _ in range(number):
            x = F.relu(weights.conv(x, bias=True))
        return x

    x = convs(x, 1)
    for i in range(9):
        if i in (2, 7):
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        x = torch.cat([convs(x, 1), convs(x, 2), convs(x, 3), convs(F.max_pool2d(x, 3, 1, padding=1), 1)], 1)
    return x.mean((2, 3))


def randomised(module):
    """The module with uncommon parameters where they begin as ones and zeros."""
    draws = torch.Generator().manual_seed(0)
    for value in module.parameters():
        if value.dim() == 1:
            nn.init.uniform_(value, 0.5, 1.0, draws)
    return module


@pytest.mark.parametrize(
    ("name", "function"),
    [("efficientnet-b0-32", efficientnet), ("mobilenet-v2-32", mobilenet), ("googlenet-32", googlenet)],
)
def test_variant_for_small_images_is_the_published_function(name, function):
    module = randomised(build(name, 3, 32, 10, seed=0)).double().eval()
    weights, x = Weights(module.body), images(2)
    torch.testing.assert_close(module(x)[0], function(x, weights))
    assert not weights.left


STOCK = {  # torchvision's name, the layer that our pooling replaces, and options
    "resnet50-512": ("resnet50", "fc", {}),
    "mobilenet-v2-512": ("mobilenet_v2", "classifier", {}),
    "googlenet-512": ("googlenet", "fc", {"aux_logits": False, "init_weights": True}),
}


@pytest.mark.parametrize("name", STOCK)
def test_variant_with_512_features_averages_what_torchvision_classifies(name):
    module = randomised(build(name, 3, 32, 10, seed=0)).double().eval()
    stock, classifier, options = STOCK[name]
    theirs = getattr(torchvision().models, stock)(**options).double().eval()
    setattr(theirs, classifier, nn.Identity())
    for ours, other in zip(module.body.parameters(), theirs.parameters(), strict=True):
        other.data.copy_(ours)
    x = images(2)
    vector = theirs(x)
    width = vector.shape[1]
    bounds = [(i * width // 512, -(-(i + 1) * width // 512)) for i in range(512)]
    averages = torch.stack([vector[:, first:last].mean(1) for first, last in bounds], 1)
    torch.testing.assert_close(module(x)[0], averages)


def test_dropout_stands_between_the_1280_values_and_their_averages():
    module = build("mobilenet-v2-dropout-512", 3, 32, 10, seed=0).double()
    (dropout,) = [layer for layer in module.modules() if isinstance(layer, KeyedDropout)]
    seen = []
    dropout.register_forward_hook(lambda layer, arguments, output: seen.append((arguments[0], output)))
    features, _ = module.train()(images(6))
    before, after = seen[0]
    assert before.shape == (6, 1280)
    assert (after == 0)[before != 0].double().mean().item() == pytest.approx(0.2, abs=0.02)
    torch.testing.assert_close(features, F.adaptive_avg_pool1d(after, 512))


def test_projection_is_two_linear_layers_behind_the_same_body():
    module, plain = (build(f"resnet18-3x3-gn{part}", 3, 8, 10, seed=0).double() for part in ("-projection", ""))
    plain.body.load_state_dict({key: value for key, value in module.body.state_dict().items() if "fc" not in key})
    x = images(2, size=8)
    first, second = module.body.fc[0], module.body.fc[2]
    torch.testing.assert_close(module(x)[0], second(F.relu(first(plain(x)[0]))))


@pytest.mark.parametrize("name", ["cnn-2x64", "alexnet-32", "resnet10", "mobilenet-v2-32"])
def test_grey_images_are_repeated(name):
    grey = images(2, 1)
    ours = build(name, 1, 32, 10, seed=0).double()(grey)[0]
    torch.testing.assert_close(ours, build(name, 3, 32, 10, seed=0).double()(grey.repeat(1, 3, 1, 1))[0])


@pytest.mark.parametrize("name", ["resnet50-3x3", "efficientnet-b0-32", "googlenet-32", "mobilenet-v2-512"])
def test_padded_networks_take_images_of_one_pixel(name):
    assert build(name, 1, 1, 10, seed=0)(images(1, 1, 1, dtype=torch.float32))[1].isfinite().all()


def test_stems_and_norms():
    plain, small, group = (build(name, 3, 32, 10, 0).body for name in ("resnet10", "resnet10-3x3", "resnet10-gn"))
    assert plain.conv1.kernel_size == (7, 7)
    assert isinstance(plain.maxpool, nn.MaxPool2d)
    assert (small.conv1.kernel_size, small.conv1.stride, small.conv1.padding) == ((3, 3), (1, 1), (1, 1))
    assert isinstance(small.maxpool, nn.Identity)
    assert {module.num_groups for module in group.modules() if isinstance(module, nn.GroupNorm)} == {2}


# Initial weights


@pytest.mark.parametrize("name", ["cnn-small", "resnet10-3x3-gn", "efficientnet-b0-32"])
def test_seed_gives_the_weights_and_leaves_the_callers_draws(name):
    before = torch.get_rng_state()
    one = build(name, 3, 16, 10, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    same, other = (build(name, 3, 16, 10, seed=seed).state_dict() for seed in (3, 4))
    assert all(torch.equal(value, same[key]) for key, value in one.items())
    assert not torch.equal(one["head.weight"], other["head.weight"])


def test_weights_of_the_body_do_not_depend_on_the_classes():
    ten, two = (build("resnet18", 3, 32, classes, seed=3).body.layer4[1].conv2.weight for classes in (10, 2))
    assert torch.equal(ten, two)


def test_small_stem_is_drawn_like_the_other_convolutions():
    weight = build("resnet10-3x3", 3, 32, 10, seed=0).body.conv1.weight
    assert weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.1)  # kaiming, fan out; torch's own is 0.11
    assert weight.abs().max() > 2.5 * weight.std()  # normal, not uniform


@pytest.mark.parametrize("name", ["efficientnet-b0-32", "mobilenet-v2-32", "googlenet-32"])
def test_weights_for_small_images_are_torchs_default(name):
    for layer in build(name, 3, 32, 10, seed=0).modules():
        if isinstance(layer, nn.Conv2d) and layer.weight.numel() > 1000:
            bound = layer.weight[0].numel() ** -0.5  # uniform between minus and plus the root of 1 / fan in
            assert 0.98 * bound < layer.weight.abs().max() <= bound


@pytest.mark.parametrize("name", ["resnet18", "mobilenet-v2-512", "googlenet-512"])
def test_weights_of_stock_networks_are_torchvisions(name):
    stock, _, options = STOCK.get(name, (name, "fc", {}))
    theirs = getattr(torchvision().models, stock)(**options)
    for ours, other in zip(build(name, 3, 32, 10, seed=0).body.parameters(), theirs.parameters(), strict=False):
        assert ours.shape == other.shape
        if other.dim() == 4 and other.numel() > 10_000:  # medians: PyTorch 2.11 draws -2 now and then, 200 deviations
            assert ours.abs().median().item() == pytest.approx(other.abs().median().item(), rel=0.1)
        if other.dim() == 1:
            assert torch.equal(ours, other)


def test_the_built_in_transformer_learns_by_the_function_that_it_is_tested_by(tmp_path):
    network, x = build("vit-tiny", 3, 8, 10, seed=0).double(), images(3, size=8)
    torch.testing.assert_close(network.train()(x)[0], network.eval()(x)[0])
    options = {"rounds": 1, "local_epochs": 5, "num_clients": 2, "cohort_size": 2, "train_examples": 600}
    options |= {"optimizer": "adam", "lr": 0.001, "batch_size": 32, "partition": "iid"}
    run = fedcli.run("fedavg", dataset="digits", backbone="vit-tiny", out=tmp_path, **options)
    assert run.record["summary"]["last"] > 0.3


# A user's mistakes


@pytest.mark.parametrize(
    ("name", "least"), [("cnn-mcmahan", 16), ("cnn-3conv", 4), ("alexnet-32", 15), ("googlenet-512", 15)]
)
def test_images_that_are_too_small_or_of_other_channels_are_refused(name, least):
    assert build(name, 1, least, 10, seed=0)(images(1, 1, least, dtype=torch.float32))[1].shape == (1, 10)
    text = f"{name} (got {least - 1} x {least - 1} pixels); {least} x {least} and larger"
    refused(lambda: build(name, 1, least - 1, 10, seed=0), text)
    refused(lambda: build(name, 4, least, 10, seed=0), "(got 4); 1 or 3")


# Masks and keys


def test_keyed_layers_of_a_network_draw_apart():
    module = build("efficientnet-b0-32", 3, 32, 10, seed=0)
    layers = [layer for layer in module.modules() if isinstance(layer, KeyedDropout)]
    assert [layer.number for layer in layers] == list(range(17))
    assert [layer.p for layer in layers[:-1]] == pytest.approx([0.2 * i / 16 for i in range(16)])
    assert (layers[-1].p, [layer.whole_examples for layer in layers]) == (0.2, [True] * 16 + [False])
    assert [key for key, _ in module.named_buffers() if key.endswith(".key")][-1] == "body.classifier.key"


# torchvision

TORCHVISION = """
import torch
@torch.library.register_fake("torchvision::nms")
def nms(dets, scores, iou_threshold): ...
@torch.library.register_fake("torchvision::qnms")
def qnms(dets, scores, iou_threshold): ...
loaded = True
"""
USE = """
import sys
from fedcli import vision
from fedcli.core import backbones
backbones.build("cnn-small", 1, 8, 10, 0)
print("torchvision" in sys.modules)
print(vision.torchvision().loaded)
"""


def test_torchvision_is_imported_when_it_is_needed_and_gets_the_schemas_that_it_lacks(tmp_path):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(TORCHVISION)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    result = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True, check=False, env=environment)
    assert result.stdout.splitlines() == ["False", "True"], result.stderr


def test_linear_features_are_those_of_the_same_network_before_its_last_relu():
    linear, plain = (build(f"cnn-2x32-100{end}", 1, 28, 10, seed=0) for end in ("-linear", ""))
    x = images(4, 1, 28, dtype=torch.float32)
    assert torch.equal(plain(x)[0], linear(x)[0].relu())
