"""The bodies of the networks: what gives the features; every layer but the head.

Names are neutral; which network a paper uses is written in its protocols. Names have parts:

* `resnet18` is torchvision's network, with a 7 x 7 stem and max-pooling. `-3x3` gives it a 3 x 3 stem of stride 1
  without pooling, `-gn` GroupNorm with two groups in the place of every BatchNorm, `-projection` two linear layers
  (512 to 512, ReLU, 512 to 256) behind its features.
* `-512` is one of torchvision's networks whose classifier is replaced by averaging neighbours in the vector before it,
  so that 512 features are left whatever its width. `-dropout` keeps the dropout that is lost with MobileNetV2's.
* `-32` is a variant for 32 x 32 images.
* `-100` has 100 features, where the network without it has 192.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor, nn

from fedcli.core.layers import KeyedDropout, MaskedBatchNorm2d


class Body(NamedTuple):
    """A network without its head."""

    module: nn.Module  # from images to features [B, feature_dim]
    feature_dim: int
    colour: bool  # whether it always takes three channels


@dataclass(frozen=True)
class _Cnn:
    """A plain convolutional network: convolutions, then fully connected layers, each followed by ReLU."""

    kernel: int
    padding: int
    widths: tuple[int, ...]  # channels of the convolutions
    pooled: tuple[int, ...]  # which of them, counted from 0, are followed by 2 x 2 max-pooling
    hidden: tuple[int, ...]  # widths of the fully connected layers; the last is the feature width
    stride: int = 1  # of the first convolution; the others have 1
    colour: bool = False  # whether it always takes three channels

    def side(self, image_size: int) -> int:
        """Height and width of the last feature map; less than 1 where the image is too small."""
        for i in range(len(self.widths)):
            image_size += 2 * self.padding - self.kernel
            image_size = image_size // (self.stride if i == 0 else 1) + 1
            if i in self.pooled:
                image_size //= 2
        return image_size

    def body(self, channels: int, image_size: int) -> Body:
        """The layers up to the features."""
        channels = 3 if self.colour else channels
        layers: list[nn.Module] = []
        for i, width in enumerate(self.widths):
            stride = self.stride if i == 0 else 1
            layers.append(nn.Conv2d(channels, width, self.kernel, stride, self.padding))
            if i in self.pooled:
                layers.append(nn.MaxPool2d(2))  # before ReLU: the same function with a quarter of the ReLU work
            layers.append(nn.ReLU())
            channels = width
        layers.append(nn.Flatten())
        width = channels * self.side(image_size) ** 2
        for hidden in self.hidden:
            layers += [nn.Linear(width, hidden), nn.ReLU()]
            width = hidden
        return Body(nn.Sequential(*layers), width, self.colour)


_CNNS = {
    "cnn-small": _Cnn(kernel=3, padding=1, widths=(16, 32), pooled=(0, 1), hidden=(64,)),
    "cnn-mcmahan": _Cnn(kernel=5, padding=0, widths=(32, 64), pooled=(0, 1), hidden=(512,)),
    "cnn-2x32": _Cnn(kernel=5, padding=0, widths=(32, 32), pooled=(0, 1), hidden=(384, 192)),
    "cnn-2x32-100": _Cnn(kernel=5, padding=0, widths=(32, 32), pooled=(0, 1), hidden=(384, 100)),
    "cnn-2x64": _Cnn(kernel=5, padding=0, widths=(64, 64), pooled=(0, 1), hidden=(384, 192), colour=True),
    "cnn-2x64-100": _Cnn(kernel=5, padding=0, widths=(64, 64), pooled=(0, 1), hidden=(384, 100), colour=True),
    "cnn-3conv": _Cnn(kernel=5, padding=2, widths=(64, 64, 128), pooled=(0, 1), hidden=(2048, 512), colour=True),
    # The usual form of AlexNet for CIFAR: 3 x 3 convolutions, 2 x 2 pooling after the first, second and fifth, and of
    # a 32 x 32 image 2 x 2 x 256 values for the fully connected layers. Without AlexNet's dropout before each of those.
    "alexnet-32": _Cnn(
        kernel=3, padding=1, widths=(64, 192, 384, 256, 256), pooled=(0, 1, 4), hidden=(4096, 4096), stride=2,
        colour=True,
    ),
}  # fmt: skip
_RESNETS = {  # kind of block, blocks in each of the four stages
    "resnet10": ("BasicBlock", [1, 1, 1, 1]),
    "resnet12": ("BasicBlock", [2, 1, 1, 1]),
    "resnet18": ("BasicBlock", [2, 2, 2, 2]),
    "resnet34": ("BasicBlock", [3, 4, 6, 3]),
    "resnet50": ("Bottleneck", [3, 4, 6, 3]),
    "resnet101": ("Bottleneck", [3, 4, 23, 3]),
    "resnet152": ("Bottleneck", [3, 8, 36, 3]),
}
_VARIANTS = ("", "-gn", "-3x3", "-3x3-gn", "-512")


def _resnet(name: str) -> Body:
    """torchvision's residual network.

    Images of any size will do: every layer is padded, and the last map is averaged.
    """
    from fedcli.core.vision import torchvision  # in each function, because it is slow and most commands do without

    depth, *parts = name.split("-")
    block, blocks = _RESNETS[depth]
    resnet = torchvision.models.resnet
    norm = partial(nn.GroupNorm, 2) if "gn" in parts else MaskedBatchNorm2d
    # One class, because the classifier goes: the body's weights then do not depend on the number of classes.
    body = resnet.ResNet(getattr(resnet, block), blocks, num_classes=1, norm_layer=norm)
    width, body.fc = body.fc.in_features, nn.Identity()
    if "3x3" in parts:
        body.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(body.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's ResNet
        body.maxpool = nn.Identity()
    if "512" in parts:
        width, body.fc = 512, nn.AdaptiveAvgPool1d(512)
    if "projection" in parts:
        body.fc = nn.Sequential(nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, 256))
        width = 256
    return Body(body, width, colour=True)


def _mobilenet_v2_512() -> Body:
    """torchvision's MobileNetV2 without its dropout, which goes with the classifier whose first layer it is."""
    from fedcli.core.vision import torchvision

    body = torchvision.models.MobileNetV2(num_classes=1, norm_layer=MaskedBatchNorm2d)
    body.classifier = nn.AdaptiveAvgPool1d(512)
    return Body(body, 512, colour=True)


def _mobilenet_v2_dropout_512() -> Body:
    """torchvision's MobileNetV2, whose dropout of 0.2 is kept and stands before the averaging to 512 features."""
    network = _mobilenet_v2_512()
    network.module.classifier = nn.Sequential(KeyedDropout(0.2), network.module.classifier)
    return network


def _convolution(**options: Any) -> Callable[..., nn.Module]:
    """torchvision's convolution with norm and activation, by default BatchNorm and ReLU, and padded."""
    from fedcli.core.vision import torchvision

    return partial(torchvision.ops.Conv2dNormActivation, **{"norm_layer": MaskedBatchNorm2d, **options})


def _googlenet(conv: Callable[..., nn.Module], double: bool) -> nn.Module:
    """torchvision's GoogLeNet without auxiliary classifiers, with weights drawn as torch does by default.

    Args:
        conv: Its convolution, norm and ReLU.
        double: Whether two 3 x 3 convolutions in a row stand for each 5 x 5, or one as in torchvision.
    """
    from fedcli.core.vision import torchvision

    original = import_module("torchvision.models.googlenet").Inception  # `models.googlenet` is a function

    def inception(channels: int, *widths: int) -> nn.Module:
        block = original(channels, *widths, conv_block=conv)
        if double:
            block.branch3.append(conv(widths[4], widths[4]))
        return block

    blocks = [conv, inception, nn.Identity]
    return torchvision.models.GoogLeNet(num_classes=1, aux_logits=False, init_weights=False, blocks=blocks)


def _googlenet_512() -> Body:
    """torchvision's GoogLeNet; the features lie behind its dropout."""
    body = _googlenet(_convolution(norm_layer=partial(MaskedBatchNorm2d, eps=0.001)), double=False)
    for module in body.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, std=0.01)  # torchvision's, without its truncation at 200 deviations
    body.dropout, body.fc = KeyedDropout(body.dropout.p), nn.AdaptiveAvgPool1d(512)
    return Body(body, 512, colour=True)


def _googlenet_32() -> Body:
    """GoogLeNet with one 3 x 3 convolution for its stem, two of them for each 5 x 5, biases, and no dropout.

    Weights are drawn as torch does by default.
    """
    conv = _convolution(bias=True)
    body = _googlenet(conv, double=True)
    body.conv1 = conv(3, 192)
    body.conv2 = body.conv3 = body.maxpool1 = body.maxpool2 = nn.Identity()
    body.maxpool3 = body.maxpool4 = nn.MaxPool2d(3, stride=2, padding=1)
    body.dropout = body.fc = nn.Identity()
    return Body(body, 1024, colour=True)


class _Sum(nn.Module):
    """A residual connection."""

    def __init__(self, block: nn.Module, shortcut: nn.Module):
        super().__init__()
        self.block, self.shortcut = block, shortcut

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.shortcut(x)


def _mobilenet_v2_32() -> Body:
    """MobileNetV2 with stride 1 in its stem and second stage, ReLU, and no dropout.

    Blocks of stride 1 that change the width have a shortcut too, through a convolution, and the first block has an
    expansion, by the factor 1. Weights are drawn as torch does by default.
    """
    conv, linear = _convolution(), _convolution(kernel_size=1, activation_layer=None)
    layers, width = [conv(3, 32)], 32
    # Factor of expansion, width, blocks, stride of the first block.
    stages = (1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)
    for factor, out, repeats, first_stride in stages:
        for stride in (first_stride, *[1] * (repeats - 1)):
            inner = factor * width
            depthwise = conv(inner, inner, 3, stride, groups=inner)
            block = nn.Sequential(conv(width, inner, 1), depthwise, linear(inner, out))
            shortcut = nn.Identity() if width == out else linear(width, out)
            layers.append(_Sum(block, shortcut) if stride == 1 else block)
            width = out
    layers += [conv(width, 1280, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return Body(nn.Sequential(*layers), 1280, colour=True)


def _efficientnet_b0_32() -> Body:
    """torchvision's EfficientNet-B0 with stride 1 in its stem and without the last convolution.

    The features lie behind its dropout of 0.2. Stochastic depth rises linearly from 0 in the first block towards 0.2.
    Weights are drawn as torch does by default.
    """
    from fedcli.core.vision import torchvision

    body = torchvision.models.efficientnet_b0(norm_layer=MaskedBatchNorm2d)
    body.features[0][0].stride = (1, 1)
    width, body.features[-1] = body.features[-1][0].in_channels, nn.Identity()
    body.classifier = KeyedDropout(body.classifier[0].p)
    for module in body.modules():
        if isinstance(module, torchvision.models.efficientnet.MBConv):
            module.stochastic_depth = KeyedDropout(module.stochastic_depth.p, whole_examples=True)
        if isinstance(module, nn.Conv2d):
            module.reset_parameters()
    return Body(body, width, colour=True)


_OTHERS: dict[str, Callable[[], Body]] = {
    "efficientnet-b0-32": _efficientnet_b0_32,
    "mobilenet-v2-32": _mobilenet_v2_32,
    "googlenet-32": _googlenet_32,
    "mobilenet-v2-512": _mobilenet_v2_512,
    "mobilenet-v2-dropout-512": _mobilenet_v2_dropout_512,
    "googlenet-512": _googlenet_512,
}


def names() -> list[str]:
    """The names of all networks."""
    resnets = [depth + variant for depth in _RESNETS for variant in _VARIANTS]
    return [*_CNNS, *resnets, "resnet18-3x3-gn-projection", *_OTHERS]


def least_image_size(name: str) -> int:
    """Height and width in pixels of the smallest images of which something is left after the last pooling."""
    if name in _CNNS:
        return next(size for size in count(1) if _CNNS[name].side(size) >= 1)
    return 15 if name == "googlenet-512" else 1  # its pooling is not padded


def body(name: str, channels: int, image_size: int) -> Body:
    """The body of a network, with weights from torch's random state.

    Args:
        name: One of `names()`.
        channels: Of the images, 1 or 3.
        image_size: At least `least_image_size(name)`.
    """
    if name in _CNNS:
        return _CNNS[name].body(channels, image_size)
    return _OTHERS[name]() if name in _OTHERS else _resnet(name)
