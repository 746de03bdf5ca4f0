"""Networks as features + head, built from a name and a seed; `fedcli.core.networks` says what the names stand for."""

import torch
from torch import Tensor, nn

from fedcli.core import networks
from fedcli.core.layers import KeyedDropout, MaskedBatchNorm2d
from fedcli.core.networks import names
from fedcli.errors import UserError, unknown

__all__ = ["Backbone", "build", "names"]


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
        for number, layer in enumerate(module for module in body.modules() if isinstance(module, KeyedDropout)):
            layer.number = number

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


def build(name: str, channels: int, image_size: int, num_classes: int, seed: int) -> Backbone:
    """A network with the initial weights of a seed, in float32 on the CPU.

    Weights are drawn as torch draws them by default, those of torchvision's networks as torchvision does. The same
    seed gives the same weights; torch's own random state is left as it was.

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
    _refuse_small_images(name, image_size)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would touch the generators of GPUs too
        body, feature_dim, colour = networks.body(name, channels, image_size)
        return Backbone(body, feature_dim, num_classes, colour)


def _refuse_small_images(name: str, image_size: int) -> None:
    """Raises UserError where nothing would be left of the image after the last pooling."""
    least = networks.least_image_size(name)
    if image_size < least:
        raise UserError(
            f"images are too small for the network {name} (got {image_size} x {image_size} pixels); "
            f"{least} x {least} and larger are allowed; choose another network with --backbone."
        )
