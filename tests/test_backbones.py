"""Networks: sizes and functions against the papers, initial weights, and masks and keys on their way to layers."""

import math
import os
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedcli
from fedcli.core.backbones import BACKBONES, build
from fedcli.core.keyed_draws import KeyedDropout
from fedcli.core.layers import MaskedBatchNorm2d
from fedcli.vision import torchvision
from tests.tensors import image_batch
from tests.user_errors import raises_user_error

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


WITH_BATCHNORM = ("resnet", "mobilenet", "googlenet", "efficientnet")
# Without a last ReLU.
WITH_NEGATIVE_FEATURES = (
    "vit-tiny",
    "resnet18-3x3-gn-projection",
    "efficientnet-b0-32",
    "cnn-2x32-100-linear",
)


LARGE = ("resnet34", "resnet50", "resnet101", "resnet152")


@pytest.mark.parametrize("name", [name for name in BACKBONES if not name.startswith(LARGE)])
def test_the_head_maps_features_of_the_given_width_to_the_logits(name):
    size = 8
    if name.startswith(("cnn", "alexnet")):
        size = 28
    if name == "googlenet-512":
        size = 16
    module = build(name, 1, size, 7, seed=0)
    features, logits = module(image_batch(2, 1, size, dtype=torch.float32))
    assert features.shape == (2, module.feature_dim)
    assert (features >= 0).all() == (name not in WITH_NEGATIVE_FEATURES)
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
    assert bool(norms) == (name.startswith(WITH_BATCHNORM) and "-gn" not in name)


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
    x = image_batch(2, size=size)
    params = list(module.body.parameters())
    layers = list(zip(params[::2], params[1::2], strict=True))
    convolutions = [(weight, bias) for weight, bias in layers if weight.dim() == 4]
    linear_layers = layers[len(convolutions) :]

    expected = x
    for number, (weight, bias) in enumerate(convolutions):
        stride = 2 if name == "alexnet-32" and number == 0 else 1
        expected = F.relu(F.conv2d(expected, weight, bias, stride, padding))
        if number in pooled:
            expected = F.max_pool2d(expected, 2)
    expected = expected.flatten(1)
    for weight, bias in linear_layers:
        expected = F.relu(F.linear(expected, weight, bias))

    features, _ = module(x)
    torch.testing.assert_close(features, expected)


class Weights:
    """A network's parameters, to be used up in their order; normalisation as in evaluation before any training."""

    def __init__(self, module, eps=1e-5):
        self.left = [value.detach() for value in module.parameters()]
        self.eps = eps

    def conv(self, x, stride=1, has_bias=False, norm=True):
        weight = self.left.pop(0)
        bias = self.left.pop(0) if has_bias else None
        is_depthwise = weight.shape[1] < x.shape[1]
        groups = len(weight) if is_depthwise else 1
        x = F.conv2d(x, weight, bias, stride, weight.shape[2] // 2, groups=groups)
        if norm:
            scale = self.left.pop(0)
            shift = self.left.pop(0)
            x = x / (1 + self.eps) ** 0.5 * scale[:, None, None] + shift[:, None, None]
        return x


def efficientnet(x, weights):
    """Tan and Le, EfficientNet, Table 1 and Section 4, with stride 1 in the stem and without stage 9's convolution."""
    x = F.silu(weights.conv(x))
    stages = [(1, 1, 1), (6, 2, 2), (6, 2, 2), (6, 2, 3), (6, 1, 3), (6, 2, 4), (6, 1, 1)]
    for expansion, first_stride, blocks in stages:
        for block in range(blocks):
            stride = first_stride if block == 0 else 1
            y = F.silu(weights.conv(x)) if expansion > 1 else x
            y = F.silu(weights.conv(y, stride))
            mean = y.mean((2, 3), keepdim=True)
            squeezed = F.silu(weights.conv(mean, has_bias=True, norm=False))
            scale = torch.sigmoid(weights.conv(squeezed, has_bias=True, norm=False))
            y = weights.conv(y * scale)
            x = x + y if stride == 1 and x.shape == y.shape else y
    return x.mean((2, 3))


def mobilenet(x, weights):
    """Sandler et al., MobileNetV2, Table 2, as it is widespread for CIFAR."""
    x = F.relu(weights.conv(x))
    for first_stride, blocks in [(1, 1), (1, 2), (2, 3), (2, 4), (1, 3), (2, 3), (1, 1)]:
        for block in range(blocks):
            stride = first_stride if block == 0 else 1
            y = F.relu(weights.conv(x))
            y = weights.conv(F.relu(weights.conv(y, stride)))
            if stride == 1:
                shortcut = x if x.shape == y.shape else weights.conv(x)
                y = y + shortcut
            x = y
    return F.relu(weights.conv(x)).mean((2, 3))


def googlenet(x, weights):
    """Szegedy et al., GoogLeNet, Table 1 from the first inception module on, as it is widespread for CIFAR."""

    def convs(x, number):
        for _ in range(number):
            x = F.relu(weights.conv(x, has_bias=True))
        return x

    x = convs(x, 1)
    for module in range(9):
        if module in (2, 7):
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        single = convs(x, 1)
        double = convs(x, 2)
        triple = convs(x, 3)
        after_pooling = convs(F.max_pool2d(x, 3, 1, padding=1), 1)
        x = torch.cat([single, double, triple, after_pooling], 1)
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
    weights = Weights(module.body)
    x = image_batch(2)

    features, _ = module(x)

    torch.testing.assert_close(features, function(x, weights))
    assert not weights.left


class Stock(NamedTuple):
    """A network of torchvision, the layer that our pooling replaces, and options."""

    name: str
    classifier: str
    options: dict


STOCK = {
    "resnet50-512": Stock("resnet50", "fc", {}),
    "mobilenet-v2-512": Stock("mobilenet_v2", "classifier", {}),
    "googlenet-512": Stock("googlenet", "fc", {"aux_logits": False, "init_weights": True}),
}


@pytest.mark.parametrize("name", STOCK)
def test_variant_with_512_features_averages_what_torchvision_classifies(name):
    module = randomised(build(name, 3, 32, 10, seed=0)).double().eval()
    stock = STOCK[name]
    theirs = getattr(torchvision().models, stock.name)(**stock.options).double().eval()
    setattr(theirs, stock.classifier, nn.Identity())
    for ours, other in zip(module.body.parameters(), theirs.parameters(), strict=True):
        other.data.copy_(ours)

    x = image_batch(2)
    vector = theirs(x)
    width = vector.shape[1]
    averages = []
    for place in range(512):
        first = math.floor(place * width / 512)
        last = math.ceil((place + 1) * width / 512)
        averages.append(vector[:, first:last].mean(1))

    features, _ = module(x)
    torch.testing.assert_close(features, torch.stack(averages, 1))


def test_dropout_stands_between_the_1280_values_and_their_averages():
    module = build("mobilenet-v2-dropout-512", 3, 32, 10, seed=0).double()
    (dropout,) = [layer for layer in module.modules() if isinstance(layer, KeyedDropout)]
    calls = []

    def watch(layer, arguments, output):
        (values,) = arguments
        calls.append((values, output))

    dropout.register_forward_hook(watch)
    features, _ = module.train()(image_batch(6))
    ((before, after),) = calls
    assert before.shape == (6, 1280)
    assert (after == 0)[before != 0].double().mean().item() == pytest.approx(0.2, abs=0.02)
    torch.testing.assert_close(features, F.adaptive_avg_pool1d(after, 512))


def test_projection_is_two_linear_layers_behind_the_same_body():
    module = build("resnet18-3x3-gn-projection", 3, 8, 10, seed=0).double()
    plain = build("resnet18-3x3-gn", 3, 8, 10, seed=0).double()
    plain.body.load_state_dict({key: value for key, value in module.body.state_dict().items() if "fc" not in key})
    first, _, second = module.body.fc
    x = image_batch(2, size=8)

    features, _ = module(x)

    plain_features, _ = plain(x)
    torch.testing.assert_close(features, second(F.relu(first(plain_features))))


@pytest.mark.parametrize("name", ["cnn-2x64", "alexnet-32", "resnet10", "mobilenet-v2-32"])
def test_grey_images_are_repeated(name):
    grey = image_batch(2, 1)
    features, _ = build(name, 1, 32, 10, seed=0).double()(grey)
    features_of_colour, _ = build(name, 3, 32, 10, seed=0).double()(grey.repeat(1, 3, 1, 1))
    torch.testing.assert_close(features, features_of_colour)


@pytest.mark.parametrize("name", ["resnet50-3x3", "efficientnet-b0-32", "googlenet-32", "mobilenet-v2-512"])
def test_padded_networks_take_images_of_one_pixel(name):
    network = build(name, 1, 1, 10, seed=0)
    _, logits = network(image_batch(1, 1, 1, dtype=torch.float32))
    assert logits.isfinite().all()


def test_a_small_stem_is_one_convolution_of_3x3_in_place_of_7x7_and_pooling():
    stock = build("resnet10", 3, 32, 10, 0).body
    assert stock.conv1.kernel_size == (7, 7)
    assert isinstance(stock.maxpool, nn.MaxPool2d)

    small = build("resnet10-3x3", 3, 32, 10, 0).body
    assert small.conv1.kernel_size == (3, 3)
    assert small.conv1.stride == (1, 1)
    assert small.conv1.padding == (1, 1)
    assert isinstance(small.maxpool, nn.Identity)


def test_group_normalisation_has_two_groups():
    group = build("resnet10-gn", 3, 32, 10, 0).body
    assert {module.num_groups for module in group.modules() if isinstance(module, nn.GroupNorm)} == {2}


# Initial weights


@pytest.mark.parametrize("name", ["cnn-small", "resnet10-3x3-gn", "efficientnet-b0-32"])
def test_seed_gives_the_weights_and_leaves_the_callers_draws(name):
    before = torch.get_rng_state()
    weights = build(name, 3, 16, 10, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)

    torch.manual_seed(6)
    again = build(name, 3, 16, 10, seed=3).state_dict()
    of_another_seed = build(name, 3, 16, 10, seed=4).state_dict()
    for key, value in weights.items():
        assert torch.equal(value, again[key])
    assert not torch.equal(weights["head.weight"], of_another_seed["head.weight"])


def test_weights_of_the_body_do_not_depend_on_the_classes():
    ten_classes = build("resnet18", 3, 32, 10, seed=3).body
    two_classes = build("resnet18", 3, 32, 2, seed=3).body
    assert torch.equal(ten_classes.layer4[1].conv2.weight, two_classes.layer4[1].conv2.weight)


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
    stock = STOCK.get(name, Stock(name, "fc", {}))
    theirs = getattr(torchvision().models, stock.name)(**stock.options)
    body = build(name, 3, 32, 10, seed=0).body
    for ours, other in zip(body.parameters(), theirs.parameters(), strict=False):
        assert ours.shape == other.shape
        if other.dim() == 4 and other.numel() > 10_000:  # medians: PyTorch 2.11 draws -2 now and then, 200 deviations
            assert ours.abs().median().item() == pytest.approx(other.abs().median().item(), rel=0.1)
        if other.dim() == 1:
            assert torch.equal(ours, other)


@pytest.mark.slow
def test_the_built_in_transformer_learns_by_the_function_that_it_is_tested_by(tmp_path):
    network = build("vit-tiny", 3, 8, 10, seed=0).double()
    x = image_batch(3, size=8)
    features_in_training, _ = network.train()(x)
    features, _ = network.eval()(x)
    torch.testing.assert_close(features_in_training, features)

    options = {"rounds": 1, "local_epochs": 5, "num_clients": 2, "cohort_size": 2, "train_examples": 600}
    options |= {"optimizer": "adam", "lr": 0.001, "batch_size": 32, "partition": "iid"}
    run = fedcli.run("fedavg", dataset="digits", backbone="vit-tiny", out=tmp_path, **options)
    assert run.record["summary"]["last"] > 0.3


# A user's mistakes


@pytest.mark.parametrize(
    ("name", "least"), [("cnn-mcmahan", 16), ("cnn-3conv", 4), ("alexnet-32", 15), ("googlenet-512", 15)]
)
def test_images_that_are_too_small_or_of_other_channels_are_refused(name, least):
    network = build(name, 1, least, 10, seed=0)
    _, logits = network(image_batch(1, 1, least, dtype=torch.float32))
    assert logits.shape == (1, 10)

    text = f"{name} (got {least - 1} x {least - 1} pixels); {least} x {least} and larger"
    with raises_user_error(text):
        build(name, 1, least - 1, 10, seed=0)
    with raises_user_error("(got 4); 1 or 3"):
        build(name, 4, least, 10, seed=0)


# Masks and keys


def test_keyed_layers_of_a_network_draw_apart():
    module = build("efficientnet-b0-32", 3, 32, 10, seed=0)
    layers = [layer for layer in module.modules() if isinstance(layer, KeyedDropout)]
    assert [layer.number for layer in layers] == list(range(17))

    *of_blocks, of_classifier = layers
    assert [layer.p for layer in of_blocks] == pytest.approx([0.2 * block / 16 for block in range(16)])
    assert all(layer.whole_examples for layer in of_blocks)
    assert of_classifier.p == 0.2
    assert not of_classifier.whole_examples

    *_, last_key = [name for name, _ in module.named_buffers() if name.endswith(".key")]
    assert last_key == "body.classifier.key"


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


def test_torchvision_is_imported_when_needed_and_gets_the_schemas_that_it_lacks(tmp_path):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(TORCHVISION)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    result = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True, check=False, env=environment)
    assert result.stdout.splitlines() == ["False", "True"], result.stderr


def test_linear_features_are_those_of_the_same_network_before_its_last_relu():
    x = image_batch(4, 1, 28, dtype=torch.float32)
    features, _ = build("cnn-2x32-100", 1, 28, 10, seed=0)(x)
    linear_features, _ = build("cnn-2x32-100-linear", 1, 28, 10, seed=0)(x)
    assert torch.equal(features, linear_features.relu())
