"""Networks as features + head, built from a name and a seed.

Names are neutral; which network a paper uses is written in its protocols. Names of residual networks have parts:
`resnet18` has torchvision's 7 x 7 stem and max-pooling, `resnet18-3x3` a 3 x 3 stem of stride 1 without pooling, and
`-gn` at the end puts GroupNorm in the place of every BatchNorm.
"""

from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
from torch import Tensor, nn

from fedcli.errors import UserError, unknown


class MaskedBatchNorm2d(nn.BatchNorm2d):
    """Batch normalisation whose statistics leave out the padding of a batch.

    Without a mask it is torch's; so it is in evaluation, where the running statistics are used and the mask does not
    matter. A batch with one value per channel, which torch refuses, is normalised with variance 0.

    Attributes:
        mask: `[B]`, False for padding; set by the `Backbone` for the time of one forward pass.
    """

    def __init__(self, num_features: int):
        super().__init__(num_features)
        self.num_batches_tracked = None  # an integer buffer, which could not be averaged; only `momentum=None` needs it
        self.mask: Tensor | None = None

    # BatchNorm's own version looks for `num_batches_tracked` in a plain dict of tensors.
    _load_from_state_dict = nn.Module._load_from_state_dict

    def forward(self, x: Tensor) -> Tensor:
        """Normalised activations; in training the running statistics are updated in place.

        Args:
            x: `[B, C, H, W]`.

        Returns:
            `[B, C, H, W]`. In training, a row of padding comes out as the bias.
        """
        single = x.numel() == x.shape[1]
        if not self.training or (self.mask is None and not single):
            return super().forward(x)
        mask = x.new_ones(len(x), dtype=torch.bool) if self.mask is None else self.mask
        return self._normalise(x.to(self.running_mean.dtype), mask[:, None, None, None]).to(x.dtype)

    def _normalise(self, x: Tensor, real: Tensor) -> Tensor:
        """Training's normalisation over the rows `real` `[B, 1, 1, 1]`; without a branch on data, for the sake of vmap.

        The padding is taken out by `where`, before and after the mean: whatever stands there, NaN included, reaches
        neither sums nor gradients. Its output is the bias and not a multiple of 1 / sqrt(eps), which would overflow
        after some layers where the real rows have no variance.
        """
        # Values per channel, in the type of x: from integers torch would make quotients in float32.
        values = real.sum().to(x.dtype) * (x.shape[2] * x.shape[3])
        divisor = values.clamp(min=1)  # a batch of padding only
        mean = torch.where(real, x, 0.0).sum((0, 2, 3)) / divisor
        centred = torch.where(real, x - mean[:, None, None], 0.0)
        var = centred.square().sum((0, 2, 3)) / divisor
        with torch.no_grad():
            rate = self.momentum * (values > 0).to(x.dtype)
            unbiased = var * (divisor / (values - 1).clamp(min=1))
            self.running_mean.add_(rate * (mean - self.running_mean))
            self.running_var.add_(rate * (unbiased - self.running_var))
        scale = self.weight * (var + self.eps).rsqrt()
        return centred * scale[:, None, None] + self.bias[:, None, None]


class Backbone(nn.Module):
    """A network in two parts: a body that gives features, and a linear head that gives logits.

    Attributes:
        feature_dim: Width D of the features.
        head: The map from features to logits; its parameters are `head.weight` `[C, D]` and `head.bias` `[C]`.
    """

    def __init__(self, body: nn.Module, feature_dim: int, num_classes: int, colour: bool):
        """Puts a head on a body.

        Args:
            body: From images to features `[B, feature_dim]`.
            feature_dim: At least 1.
            num_classes: At least 1.
            colour: Whether the body wants three channels; grey images are then repeated.
        """
        super().__init__()
        self.feature_dim = feature_dim
        self.body = body
        self.head = nn.Linear(feature_dim, num_classes)
        self._colour = colour
        self._norms = [module for module in body.modules() if isinstance(module, MaskedBatchNorm2d)]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Features and logits of a batch.

        Args:
            x: `[B, channels, H, W]`, normalised images.
            mask: `[B]`, False for padding, which in training stays out of batch statistics; None where all is real.

        Returns:
            Features `[B, D]` and logits `[B, C]`.
        """
        if self._colour:
            x = x.expand(-1, 3, -1, -1)
        self._set_mask(mask)
        try:
            features = self.body(x)
        finally:
            self._set_mask(None)
        return features, self.head(features)

    def _set_mask(self, mask: Tensor | None) -> None:
        for layer in self._norms:
            layer.mask = mask


@dataclass(frozen=True)
class _Cnn:
    """A plain convolutional network: convolutions, then fully connected layers, each followed by ReLU."""

    kernel: int
    padding: int
    widths: tuple[int, ...]  # channels of the convolutions
    pooled: int  # how many of them, from the first on, are followed by 2 x 2 max-pooling
    hidden: tuple[int, ...]  # widths of the fully connected layers; the last is the feature width
    colour: bool = False  # whether it always takes three channels

    def side(self, image_size: int) -> int:
        """Height and width of the last feature map; less than 1 where the image is too small."""
        for i in range(len(self.widths)):
            image_size += 2 * self.padding - self.kernel + 1
            if i < self.pooled:
                image_size //= 2
        return image_size

    def body(self, channels: int, image_size: int) -> nn.Sequential:
        """The layers up to the features."""
        layers: list[nn.Module] = []
        for i, width in enumerate(self.widths):
            layers.append(nn.Conv2d(channels, width, self.kernel, padding=self.padding))
            if i < self.pooled:
                layers.append(nn.MaxPool2d(2))  # before ReLU: the same function with a quarter of the ReLU work
            layers.append(nn.ReLU())
            channels = width
        layers.append(nn.Flatten())
        width = channels * self.side(image_size) ** 2
        for hidden in self.hidden:
            layers += [nn.Linear(width, hidden), nn.ReLU()]
            width = hidden
        return nn.Sequential(*layers)


_CNNS = {
    "cnn-small": _Cnn(kernel=3, padding=1, widths=(16, 32), pooled=2, hidden=(64,)),
    "cnn-mcmahan": _Cnn(kernel=5, padding=0, widths=(32, 64), pooled=2, hidden=(512,)),
    "cnn-2x32": _Cnn(kernel=5, padding=0, widths=(32, 32), pooled=2, hidden=(384, 192)),
    "cnn-2x64": _Cnn(kernel=5, padding=0, widths=(64, 64), pooled=2, hidden=(384, 192), colour=True),
    "cnn-3conv": _Cnn(kernel=5, padding=2, widths=(64, 64, 128), pooled=2, hidden=(2048, 512), colour=True),
}
_RESNETS = {  # kind of block, blocks in each of the four stages
    "resnet10": ("BasicBlock", [1, 1, 1, 1]),
    "resnet12": ("BasicBlock", [2, 1, 1, 1]),
    "resnet18": ("BasicBlock", [2, 2, 2, 2]),
    "resnet34": ("BasicBlock", [3, 4, 6, 3]),
    "resnet50": ("Bottleneck", [3, 4, 6, 3]),
}


def names() -> list[str]:
    """The names that `build` knows."""
    return [*_CNNS, *(name + stem + norm for name in _RESNETS for stem in ("", "-3x3") for norm in ("", "-gn"))]


def build(name: str, channels: int, image_size: int, num_classes: int, seed: int) -> Backbone:
    """A network with the initial weights of a seed, in float32 on the CPU.

    Weights are drawn as torch draws them by default, those of residual networks as torchvision does. The same seed
    gives the same weights; torch's own random state is left as it was.

    Args:
        name: One of `names()`.
        channels: Of the images, 1 or 3.
        image_size: Height and width of the images in pixels.
        num_classes: Number of logits.
        seed: Not negative.

    Returns:
        The network, in training mode.

    Raises:
        UserError: If the name is unknown, or the images are too small or have other than 1 or 3 channels.
    """
    if name not in names():
        raise unknown("backbone", name, names(), "'fedcli run METHOD --help' shows all.")
    if channels not in (1, 3):
        raise UserError(f"images have the wrong channels (got {channels}); 1 or 3 are allowed; convert the images.")
    if name in _CNNS:
        _refuse_small_images(name, image_size)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would touch the generators of GPUs too
        if name not in _CNNS:
            body, feature_dim = _resnet_body(name)
            return Backbone(body, feature_dim, num_classes, colour=True)
        cnn = _CNNS[name]
        body = cnn.body(3 if cnn.colour else channels, image_size)
        return Backbone(body, cnn.hidden[-1], num_classes, cnn.colour)


def _refuse_small_images(name: str, image_size: int) -> None:
    """Raises UserError where nothing would be left of the image after the last pooling."""
    if _CNNS[name].side(image_size) >= 1:
        return
    least = next(size for size in count(image_size) if _CNNS[name].side(size) >= 1)
    raise UserError(
        f"images are too small for the network {name} (got {image_size} x {image_size} pixels); "
        f"{least} x {least} and larger are allowed; choose another network with --backbone."
    )


def _resnet_body(name: str) -> tuple[nn.Module, int]:
    """torchvision's residual network without its classifier, and its feature width.

    Images of any size will do: every layer is padded, and the last map is averaged.
    """
    from fedcli.vision import torchvision  # here, because it is slow and most of the command line does without

    depth, *parts = name.split("-")
    block, blocks = _RESNETS[depth]
    resnet = torchvision.models.resnet
    norm = partial(nn.GroupNorm, 2) if "gn" in parts else MaskedBatchNorm2d
    # One class, because the classifier goes: the body's weights then do not depend on the number of classes.
    body = resnet.ResNet(getattr(resnet, block), blocks, num_classes=1, norm_layer=norm)
    feature_dim, body.fc = body.fc.in_features, nn.Identity()
    if "3x3" in parts:
        body.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(body.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's ResNet
        body.maxpool = nn.Identity()
    return body, feature_dim
