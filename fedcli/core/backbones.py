"""Networks as features and head, built from a name and a seed. To add one is one entry of `BACKBONES`.

Names have parts; which network a paper uses stands in its protocols:

* `resnet18` is torchvision's, with a 7 x 7 stem and max-pooling. `-3x3` has a 3 x 3 stem of stride 1 without pooling,
  `-gn` GroupNorm with two groups for every BatchNorm, `-projection` two more linear layers (512, ReLU, 256).
* `-512` is one of torchvision's networks with the vector before its classifier averaged to 512 features. `-dropout`
  keeps the dropout of MobileNetV2's classifier.
* `-32` is a variant for 32 x 32 images.
* `-100` has 100 features instead of 192; `-linear` has no ReLU behind them.
* `vit-tiny` is torchvision's vision transformer, 128 wide, of 4 layers with 4 heads.
"""

import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedcli.core.body_and_head import Backbone
from fedcli.core.draws import preserve_random_state
from fedcli.core.keyed_draws import KeyedDraws, KeyedDropout
from fedcli.core.layers import MaskedBatchNorm2d, use_live_taps
from fedcli.core.user_networks import network_from_user
from fedcli.errors import UserError, unknown
from fedcli.userfiles import find_user_function, names_user_file
from fedcli.vision import torchvision


class BackboneRecipe(NamedTuple):
    """How a network is made."""

    make: Callable[[int, int, int], Backbone]  # of channels, image size and number of classes
    min_size: int = 1  # height and width in pixels of the smallest images that it takes


def find(name: str) -> BackboneRecipe:
    """Returns the recipe of a name of `BACKBONES` or of a user's `./file.py:NAME`; refuses an unknown name."""
    if names_user_file(name):
        return BackboneRecipe(partial(network_from_user, find_user_function(name, "backbone")))
    if name not in BACKBONES:
        raise unknown("network", name, BACKBONES, "'fedcli list' shows all.")
    return BACKBONES[name]


def build(name: str, channels: int, image_size: int, num_classes: int, seed: int) -> Backbone:
    """Builds a network with the initial weights of a seed, in float32 on the CPU and in training mode.

    Weights are drawn by torch's defaults, or torchvision's for its networks; torch's own random state is left as it
    was. Images have 1 or 3 `channels` and are `image_size` pixels high and wide. For `name` see `find`.

    Raises:
        UserError: If the name is unknown, the images are too small or have other channels, or a user's network breaks
            a rule of `network_from_user`.
    """
    recipe = find(name)
    least = recipe.min_size
    if channels not in (1, 3):
        raise UserError(f"images have the wrong channels (got {channels}); 1 or 3 are allowed; convert the images.")
    if image_size < least:
        raise UserError(
            f"images are too small for the network {name} (got {image_size} x {image_size} pixels); {least} x {least} "
            "and larger are allowed; choose another network with --backbone."
        )
    with preserve_random_state():
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed GPUs too
        np.random.seed(seed % 2**32)
        random.seed(seed)
        return recipe.make(channels, image_size, num_classes)


def have_dead_taps(names: str, channels: int, image_size: int) -> bool:
    """Says whether one of the networks in `names`, with commas between, has dead taps, see `use_live_taps`."""
    for name in names.split(","):
        function = find_user_function(name, "backbone").function if names_user_file(name) else None
        if _has_dead_taps(name, function, channels, image_size):
            return True
    return False


@cache
def _has_dead_taps(name: str, function: Callable | None, channels: int, image_size: int) -> bool:
    """Says whether a network has dead taps; a user's `function` is another one when its file has been edited."""
    return use_live_taps(build(name, channels, image_size, 2, seed=0), channels, image_size)


def plain_cnn(  # noqa: PLR0913  # a declaration: one keyword for each trait of a network
    min_size: int, kernel: int, padding: int, widths: Sequence[int], pooled: Sequence[int], hidden: Sequence[int],
    stride: int = 1, colour: bool = False, linear_features: bool = False,
) -> BackboneRecipe:  # fmt: skip
    """Describes a network of convolutions, then fully connected layers, each followed by ReLU.

    Convolutions have one kernel size and padding, and `widths` channels; those `pooled`, counted from 0, are followed
    by 2 x 2 max-pooling; the first alone has the `stride`. The last of the widths `hidden` is that of the features,
    without ReLU if `linear_features`. A network of `colour` takes three channels.
    """

    def make(channels: int, image_size: int, num_classes: int) -> Backbone:
        channels = 3 if colour else channels
        layers: list[nn.Module] = []
        for number, (width, out) in enumerate(pairwise((channels, *widths))):
            stride_here = stride if number == 0 else 1
            layers.append(nn.Conv2d(width, out, kernel, stride_here, padding))
            if number in pooled:  # before ReLU it is the same function with a quarter of ReLU's work
                layers.append(nn.MaxPool2d(2))
            layers.append(nn.ReLU())
        layers.append(nn.Flatten())
        flat = nn.Sequential(*layers)(torch.zeros(1, channels, image_size, image_size))
        for width, out in pairwise((flat.shape[1], *hidden)):
            layers += [nn.Linear(width, out), nn.ReLU()]
        if linear_features:
            layers.pop()  # the last ReLU
        body = nn.Sequential(*layers)
        return Backbone(body, hidden[-1], num_classes, colour)

    return BackboneRecipe(make, min_size)


class _ResNet(NamedTuple):
    """The blocks of a residual network."""

    block: str  # torchvision's class
    num_blocks: list[int]  # in each of the four stages


_RESNETS = {
    "resnet10": _ResNet("BasicBlock", [1, 1, 1, 1]),
    "resnet12": _ResNet("BasicBlock", [2, 1, 1, 1]),
    "resnet18": _ResNet("BasicBlock", [2, 2, 2, 2]),
    "resnet34": _ResNet("BasicBlock", [3, 4, 6, 3]),
    "resnet50": _ResNet("Bottleneck", [3, 4, 6, 3]),
    "resnet101": _ResNet("Bottleneck", [3, 4, 23, 3]),
    "resnet152": _ResNet("Bottleneck", [3, 8, 36, 3]),
}
_VARIANTS = [depth + kind for depth in _RESNETS for kind in ("", "-gn", "-3x3", "-3x3-gn", "-512")]


def _resnet(name: str, channels: int, image_size: int, num_classes: int) -> Backbone:
    """Makes torchvision's residual network, which takes images of any size."""
    depth, *variations = name.split("-")
    blocks = _RESNETS[depth]
    resnet = torchvision().models.resnet
    block = getattr(resnet, blocks.block)
    norm = partial(nn.GroupNorm, 2) if "gn" in variations else MaskedBatchNorm2d
    # The classifier goes; its one class keeps the body's weights independent of the number of classes.
    body = resnet.ResNet(block, blocks.num_blocks, num_classes=1, norm_layer=norm)
    width = body.fc.in_features
    body.fc = nn.Identity()
    if "3x3" in variations:
        body.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(body.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's ResNet
        body.maxpool = nn.Identity()
    if "512" in variations:
        width = 512
        body.fc = nn.AdaptiveAvgPool1d(width)
    if "projection" in variations:
        body.fc = nn.Sequential(nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, 256))
        width = 256
    return Backbone(body, width, num_classes)


def _mobilenet_v2_512(channels: int, image_size: int, num_classes: int, *, dropout: bool) -> Backbone:
    """Makes torchvision's MobileNetV2, perhaps with its classifier's dropout of 0.2 before the averaging."""
    body = torchvision().models.MobileNetV2(num_classes=1, norm_layer=MaskedBatchNorm2d)
    averaged = nn.AdaptiveAvgPool1d(512)
    body.classifier = nn.Sequential(KeyedDropout(0.2), averaged) if dropout else nn.Sequential(averaged)
    return Backbone(body, 512, num_classes)


def _convolution(**options: Any) -> Callable[..., nn.Module]:
    """Returns torchvision's padded convolution with norm and activation, by default BatchNorm and ReLU."""
    return partial(torchvision().ops.Conv2dNormActivation, **{"norm_layer": MaskedBatchNorm2d, **options})


def _inception(conv: Callable[..., nn.Module]) -> Callable[..., Any]:
    """Returns torchvision's block of GoogLeNet, made of such convolutions."""
    module = import_module("torchvision.models.googlenet")  # `models.googlenet` is a function
    return partial(module.Inception, conv_block=conv)


def _googlenet(conv: Callable[..., nn.Module], inception: Callable[..., nn.Module]) -> Any:
    """Makes torchvision's GoogLeNet of such convolutions and blocks, without auxiliary classifiers."""
    blocks = [conv, inception, nn.Identity]
    return torchvision().models.GoogLeNet(num_classes=1, aux_logits=False, init_weights=False, blocks=blocks)


def _googlenet_512(channels: int, image_size: int, num_classes: int) -> Backbone:
    """Makes torchvision's GoogLeNet; the features lie behind its dropout."""
    conv = _convolution(norm_layer=partial(MaskedBatchNorm2d, eps=0.001))
    body = _googlenet(conv, _inception(conv))
    for module in body.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, std=0.01)  # torchvision's, without its truncation at 200 deviations
    body.dropout = KeyedDropout(body.dropout.p)
    body.fc = nn.AdaptiveAvgPool1d(512)
    return Backbone(body, 512, num_classes)


def _googlenet_32(channels: int, image_size: int, num_classes: int) -> Backbone:
    """Makes GoogLeNet for small images, with torch's default weights.

    It has one 3 x 3 convolution for its stem, two for each 5 x 5, biases, and no dropout.
    """
    conv = _convolution(bias=True)

    def inception(channels: int, *widths: int) -> nn.Module:
        block = _inception(conv)(channels, *widths)
        _, _, _, _, width_of_5x5, _ = widths
        block.branch3.append(conv(width_of_5x5, width_of_5x5))
        return block

    body = _googlenet(conv, inception)
    body.conv1 = conv(3, 192)
    for name in ("conv2", "conv3", "maxpool1", "maxpool2", "dropout", "fc"):
        setattr(body, name, nn.Identity())
    for name in ("maxpool3", "maxpool4"):
        setattr(body, name, nn.MaxPool2d(3, stride=2, padding=1))
    return Backbone(body, 1024, num_classes)


class _Sum(nn.ModuleDict):
    """A residual connection."""

    def forward(self, x: Tensor) -> Tensor:
        return self["block"](x) + self["shortcut"](x)


class _Stage(NamedTuple):
    """A stage of MobileNetV2."""

    expansion: int
    width: int
    blocks: int
    stride: int  # of the first block


_STAGES = (
    _Stage(1, 16, 1, 1), _Stage(6, 24, 2, 1), _Stage(6, 32, 3, 2), _Stage(6, 64, 4, 2), _Stage(6, 96, 3, 1),
    _Stage(6, 160, 3, 2), _Stage(6, 320, 1, 1),
)  # fmt: skip


def _mobilenet_v2_32(channels: int, image_size: int, num_classes: int) -> Backbone:
    """Makes MobileNetV2 with stride 1 in its stem and second stage, ReLU, no dropout, and torch's default weights.

    All blocks of stride 1 have a shortcut, through a convolution where the width changes, and the first block has an
    expansion, by the factor 1.
    """
    conv = _convolution()
    linear = _convolution(kernel_size=1, activation_layer=None)
    width = 32
    layers = [conv(3, width)]
    for stage in _STAGES:
        for number in range(stage.blocks):
            stride = stage.stride if number == 0 else 1
            inner = stage.expansion * width
            depthwise = conv(inner, inner, 3, stride, groups=inner)
            block = nn.Sequential(conv(width, inner, 1), depthwise, linear(inner, stage.width))
            shortcut = nn.Identity() if width == stage.width else linear(width, stage.width)
            layers.append(_Sum({"block": block, "shortcut": shortcut}) if stride == 1 else block)
            width = stage.width
    layers += [conv(width, 1280, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return Backbone(nn.Sequential(*layers), 1280, num_classes)


def _efficientnet_b0_32(channels: int, image_size: int, num_classes: int) -> Backbone:
    """Makes torchvision's EfficientNet-B0 with stride 1 in its stem, without the last convolution.

    The features lie behind its dropout of 0.2. Stochastic depth rises linearly from 0 in the first block towards 0.2.
    Weights are torch's default.
    """
    body = torchvision().models.efficientnet_b0(norm_layer=MaskedBatchNorm2d)
    stem_convolution = body.features[0][0]
    stem_convolution.stride = (1, 1)
    last_convolution = body.features[-1][0]
    width = last_convolution.in_channels
    body.features[-1] = nn.Identity()
    dropout = body.classifier[0]
    body.classifier = KeyedDropout(dropout.p)
    for module in body.modules():
        if isinstance(module, torchvision().models.efficientnet.MBConv):
            module.stochastic_depth = KeyedDropout(module.stochastic_depth.p, whole_examples=True)
        if isinstance(module, nn.Conv2d):
            module.reset_parameters()
    return Backbone(body, width, num_classes)


def _vit_tiny(channels: int, image_size: int, num_classes: int) -> Backbone:
    """Makes torchvision's vision transformer, 128 wide, of 4 layers with 4 heads, without dropout.

    Patches have the smallest side, from 2 pixels, of which at most 8 make that of an image.
    """
    sides = [side for side in range(2, image_size + 1) if image_size % side == 0 and 8 * side >= image_size]
    body = torchvision().models.VisionTransformer(
        image_size, patch_size=min(sides), num_layers=4, num_heads=4, hidden_dim=128, mlp_dim=256, num_classes=1
    )
    body.heads = nn.Identity()
    return Backbone(body, 128, num_classes, draws=KeyedDraws())


BACKBONES: dict[str, BackboneRecipe] = {
    "cnn-small": plain_cnn(min_size=4, kernel=3, padding=1, widths=(16, 32), pooled=(0, 1), hidden=(64,)),
    "cnn-mcmahan": plain_cnn(min_size=16, kernel=5, padding=0, widths=(32, 64), pooled=(0, 1), hidden=(512,)),
    "cnn-2x32": plain_cnn(min_size=16, kernel=5, padding=0, widths=(32, 32), pooled=(0, 1), hidden=(384, 192)),
    "cnn-2x32-100": plain_cnn(min_size=16, kernel=5, padding=0, widths=(32, 32), pooled=(0, 1), hidden=(384, 100)),
    "cnn-2x32-100-linear": plain_cnn(
        min_size=16, kernel=5, padding=0, widths=(32, 32), pooled=(0, 1), hidden=(384, 100), linear_features=True
    ),
    "cnn-2x64": plain_cnn(
        min_size=16, kernel=5, padding=0, widths=(64, 64), pooled=(0, 1), hidden=(384, 192), colour=True
    ),
    "cnn-2x64-100": plain_cnn(
        min_size=16, kernel=5, padding=0, widths=(64, 64), pooled=(0, 1), hidden=(384, 100), colour=True
    ),
    "cnn-3conv": plain_cnn(
        min_size=4, kernel=5, padding=2, widths=(64, 64, 128), pooled=(0, 1), hidden=(2048, 512), colour=True
    ),
    # The usual form of AlexNet for CIFAR: 3 x 3 convolutions, 2 x 2 pooling after the first, second and fifth, and of
    # a 32 x 32 image 2 x 2 x 256 values for the fully connected layers. Without AlexNet's dropout before each of those.
    "alexnet-32": plain_cnn(
        min_size=15, kernel=3, padding=1, widths=(64, 192, 384, 256, 256), pooled=(0, 1, 4), hidden=(4096, 4096),
        stride=2, colour=True,
    ),
    **{name: BackboneRecipe(partial(_resnet, name)) for name in (*_VARIANTS, "resnet18-3x3-gn-projection")},
    "vit-tiny": BackboneRecipe(_vit_tiny, min_size=2),
    "mobilenet-v2-512": BackboneRecipe(partial(_mobilenet_v2_512, dropout=False)),
    "mobilenet-v2-dropout-512": BackboneRecipe(partial(_mobilenet_v2_512, dropout=True)),
    "googlenet-512": BackboneRecipe(_googlenet_512, min_size=15),
    "googlenet-32": BackboneRecipe(_googlenet_32),
    "mobilenet-v2-32": BackboneRecipe(_mobilenet_v2_32),
    "efficientnet-b0-32": BackboneRecipe(_efficientnet_b0_32),
}  # fmt: skip
