"""Small networks, which are named by this file as a user names networks of a file, or replace all others."""

import torch
from torch import nn

from fedcli.core import backbones
from fedcli.core.body_and_head import Backbone
from fedcli.core.keyed_draws import KeyedDropout
from fedcli.core.layers import MaskedBatchNorm2d
from fedcli.toy import toy_dataset

# Options of a federation whose clients have one of two architectures.
TWO_NETWORKS = {"backbone": "cnn-small,cnn-mcmahan", "data": toy_dataset(size=16)}


def three_layers(channels, image_size, num_classes):
    """Makes a network of linear layers with 16 features, as `two_layers` has."""
    num_pixels = channels * image_size**2
    return nn.Sequential(
        nn.Flatten(), nn.Linear(num_pixels, 32), nn.ReLU(), nn.Linear(32, 16), nn.Linear(16, num_classes)
    )


def two_layers(channels, image_size, num_classes):
    """Makes a network of two linear layers with 16 features."""
    num_pixels = channels * image_size**2
    return nn.Sequential(nn.Flatten(), nn.Linear(num_pixels, 16), nn.ReLU(), nn.Linear(16, num_classes))


MIXED_NETWORKS = f"{__file__}:three_layers,{__file__}:two_layers"


def replace_all_networks(monkeypatch):
    """Makes every network that a test builds one with batch normalisation and two dropouts, for images of 8 x 8."""

    def build(name, channels, image_size, num_classes, seed):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            # The last layers are made first, and so their weights are drawn first.
            last_layers = (nn.Linear(4 * 36, 6), nn.ReLU(), KeyedDropout(0.3))
            first_layers = (nn.Conv2d(1, 4, 3), MaskedBatchNorm2d(4), KeyedDropout(0.3), nn.Flatten())
            body = nn.Sequential(*first_layers, *last_layers)
            return Backbone(body, 6, num_classes, colour=False)

    monkeypatch.setattr(backbones, "build", build)
