"""A network in two parts, which is what clients train: a body that gives features, and a linear head."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from fedcli.core.keyed_draws import KeyedDraws, KeyedDropout
from fedcli.core.layers import MaskedBatchNorm2d
from fedcli.core.switches import under_vmap


class Backbone(nn.Module):
    """A network in two parts: a body that gives features, and a linear head that gives logits.

    Attributes:
        feature_dim: Width D of the features.
        head: The map from features to logits; its parameters are `head.weight` `[C, D]` and `head.bias` `[C]`.
        draws: From which its layers of dropout and attention draw; None where nothing is drawn.
        norms: Its layers of batch normalisation, which are told the mask.
    """

    def __init__(
        self, body: nn.Module, feature_dim: int, num_classes: int, colour: bool = True,
        draws: KeyedDraws | None = None, guard: Callable[[], AbstractContextManager] = nullcontext,
    ):  # fmt: skip
        """Puts a head on a body.

        Args:
            body: From images to features `[B, feature_dim]`.
            feature_dim: D.
            num_classes: C.
            colour: Whether the body takes three channels; grey images are repeated for it.
            draws: From which its layers of dropout and attention draw; None where nothing is drawn.
            guard: Makes the context in which the body works.
        """
        super().__init__()
        self.feature_dim = feature_dim
        self.body = body
        self.head = nn.Linear(feature_dim, num_classes)
        self._colour = colour
        self.draws = draws
        self._guard = guard
        self.norms = [module for module in body.modules() if isinstance(module, MaskedBatchNorm2d)]
        number_dropouts(body)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns features `[B, D]` and logits `[B, C]` of normalised images `[B, channels, H, W]`.

        `mask` `[B]` is False for padding, which stays out of batch statistics; None where there is none.
        """
        for layer in self.norms:
            layer.mask = mask
        drawing: AbstractContextManager[Any] = nullcontext()
        if self.draws is not None and (self.training or under_vmap.get()):
            drawing = self.draws
        if self._colour:
            x = x.expand(-1, 3, -1, -1)
        with self._guard(), drawing:
            features = self.body(x)
        return features, self.head(features)


def number_dropouts(network: nn.Module) -> None:
    """Tells the layers of dropout of a network apart."""
    layers = [layer for layer in network.modules() if isinstance(layer, KeyedDropout)]
    for number, layer in enumerate(layers):
        layer.number = number
