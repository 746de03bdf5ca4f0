"""Tiny networks of tests, some of which are named by this file as a user's own are."""

import copy

import torch
from torch import nn

import fedcli.toy
from fedcli.core import backbones
from fedcli.core.body_and_head import Backbone
from fedcli.core.keyed_draws import KeyedDropout
from fedcli.core.layers import MaskedBatchNorm2d
from fedcli.toy import toy_dataset

TWO_NETWORKS = {"backbone": "cnn-small,cnn-mcmahan", "data": toy_dataset(size=16)}


def narrow(channels, image_size, num_classes):
    """An architecture whose features are as wide as those of `narrower`."""
    num_pixels = channels * image_size**2
    return nn.Sequential(
        nn.Flatten(), nn.Linear(num_pixels, 32), nn.ReLU(), nn.Linear(32, 16), nn.Linear(16, num_classes)
    )


def narrower(channels, image_size, num_classes):
    num_pixels = channels * image_size**2
    return nn.Sequential(nn.Flatten(), nn.Linear(num_pixels, 16), nn.ReLU(), nn.Linear(16, num_classes))


MIXED = f"{__file__}:narrow,{__file__}:narrower"

TOY_FILES = (__file__, fedcli.toy.__file__)  # with networks that are named as a user's own are


class ToysCheckedOnce:
    """`backbones.find` that checks a network of the toy files once for each seed and shape, and then copies it.

    The check takes most of the time of a law; networks of other files are checked each time, as users' are.
    """

    def __init__(self, find):
        self.find = find
        self.checked = {}

    def __call__(self, name):
        recipe = self.find(name)
        path, _, _ = name.rpartition(":")
        if path not in TOY_FILES:
            return recipe

        def make(*shape):
            key = (name, shape, torch.initial_seed())
            if key not in self.checked:
                self.checked[key] = recipe.make(*shape)
            return copy.deepcopy(self.checked[key])

        return recipe._replace(make=make)


def use_tiny_network(monkeypatch):
    """Every network that is built from now on has batch normalisation and two layers of dropout, and 8 x 8 images."""

    def build(name, channels, image_size, num_classes, seed):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            # of one layer after the other, whose weights are drawn in this order
            last_layers = (nn.Linear(4 * 36, 6), nn.ReLU(), KeyedDropout(0.3))
            first_layers = (nn.Conv2d(1, 4, 3), MaskedBatchNorm2d(4), KeyedDropout(0.3), nn.Flatten())
            body = nn.Sequential(*first_layers, *last_layers)
            return Backbone(body, 6, num_classes, colour=False)

    monkeypatch.setattr(backbones, "build", build)
