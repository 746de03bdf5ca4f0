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

import copy
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from fedcli.core.clients import under_vmap
from fedcli.core.draws import kept_draws
from fedcli.core.layers import KeyedDraws, KeyedDropout, MaskedBatchNorm2d, become, use_live_taps
from fedcli.core.trees import leaves
from fedcli.errors import UserError, unknown
from fedcli.userfiles import FromFile, blame, from_file, is_from_file
from fedcli.vision import torchvision


class Backbone(nn.Module):
    """A network in two parts: a body that gives features, and a linear head that gives logits.

    Attributes:
        feature_dim: Width D of the features.
        head: The map from features to logits; its parameters are `head.weight` `[C, D]` and `head.bias` `[C]`.
    """

    def __init__(
        self, body: nn.Module, feature_dim: int, num_classes: int, colour: bool = True, draws: KeyedDraws | None = None
    ):
        """Puts a head on a body, from images to features; `colour` repeats grey images for it."""
        super().__init__()
        self.feature_dim = feature_dim
        self.body = body
        self.head = nn.Linear(feature_dim, num_classes)
        self._colour = colour
        self.draws = draws
        self._guard: Callable = nullcontext  # around the body's work
        self._norms = [module for module in body.modules() if isinstance(module, MaskedBatchNorm2d)]
        _number_dropouts(body)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns features `[B, D]` and logits `[B, C]` of normalised images `[B, channels, H, W]`.

        `mask` `[B]` is False for padding, which stays out of batch statistics; None where there is none.
        """
        for layer in self._norms:
            layer.mask = mask
        drawing: AbstractContextManager[Any] = nullcontext()
        if self.draws is not None and (self.training or under_vmap.get()):
            drawing = self.draws
        if self._colour:
            x = x.expand(-1, 3, -1, -1)
        with self._guard(), drawing:
            features = self.body(x)
        return features, self.head(features)


def _number_dropouts(network: nn.Module) -> None:
    """Tells the layers of dropout of a network apart."""
    layers = [layer for layer in network.modules() if isinstance(layer, KeyedDropout)]
    for number, layer in enumerate(layers):
        layer.number = number


class Recipe(NamedTuple):
    """How a network is made."""

    make: Callable[[int, int, int], "Backbone"]  # of channels, image size and number of classes
    least: int = 1  # height and width in pixels of the smallest images that it takes


def find(name: str) -> Recipe:
    """Returns the recipe of a name of `BACKBONES` or of a user's `./file.py:NAME`; refuses an unknown name."""
    if is_from_file(name):
        return Recipe(partial(_network_from_user, from_file(name, "backbone")))
    if name not in BACKBONES:
        raise unknown("network", name, BACKBONES, "'fedcli list' shows all.")
    return BACKBONES[name]


def build(name: str, channels: int, image_size: int, num_classes: int, seed: int) -> Backbone:
    """Builds a network with the initial weights of a seed, in float32 on the CPU and in training mode.

    Weights are drawn by torch's defaults, or torchvision's for its networks; torch's own random state is left as it
    was. Images have 1 or 3 `channels` and are `image_size` pixels high and wide. For `name` see `find`.

    Raises:
        UserError: If the name is unknown, the images are too small or have other channels, or a user's network breaks
            a rule of `_network_from_user`.
    """
    recipe = find(name)
    if channels not in (1, 3):
        raise UserError(f"images have the wrong channels (got {channels}); 1 or 3 are allowed; convert the images.")
    if image_size < recipe.least:
        raise UserError(
            f"images are too small for the network {name} (got {image_size} x {image_size} pixels); {recipe.least} x "
            f"{recipe.least} and larger are allowed; choose another network with --backbone."
        )
    with kept_draws():
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed GPUs too
        np.random.seed(seed % 2**32)
        random.seed(seed)
        return recipe.make(channels, image_size, num_classes)


@cache
def have_dead_taps(names: str, channels: int, image_size: int) -> bool:
    """Says whether one of the networks in `names`, with commas between, has dead taps, see `use_live_taps`."""
    networks = (build(name, channels, image_size, 2, seed=0) for name in names.split(","))
    return any(use_live_taps(network, channels, image_size) for network in networks)


def plain_cnn(  # noqa: PLR0913  # a declaration: one keyword for each trait of a network
    least: int, kernel: int, padding: int, widths: Sequence[int], pooled: Sequence[int], hidden: Sequence[int],
    stride: int = 1, colour: bool = False, linear_features: bool = False,
) -> Recipe:  # fmt: skip
    """Describes a network of convolutions, then fully connected layers, each followed by ReLU.

    Convolutions have one kernel size and padding, and `widths` channels; those `pooled`, counted from 0, are followed
    by 2 x 2 max-pooling; the first alone has the `stride`. The last of the widths `hidden` is that of the features,
    without ReLU if `linear_features`. A network of `colour` takes three channels.
    """

    def make(channels: int, image_size: int, num_classes: int) -> Backbone:
        channels = 3 if colour else channels
        layers: list[nn.Module] = []
        for i, (width, out) in enumerate(pairwise((channels, *widths))):
            layers.append(nn.Conv2d(width, out, kernel, stride if i == 0 else 1, padding))
            if i in pooled:  # before ReLU it is the same function with a quarter of ReLU's work
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

    return Recipe(make, least)


_RESNETS = {  # kind of block, blocks in each of the four stages
    "resnet10": ("BasicBlock", [1, 1, 1, 1]),
    "resnet12": ("BasicBlock", [2, 1, 1, 1]),
    "resnet18": ("BasicBlock", [2, 2, 2, 2]),
    "resnet34": ("BasicBlock", [3, 4, 6, 3]),
    "resnet50": ("Bottleneck", [3, 4, 6, 3]),
    "resnet101": ("Bottleneck", [3, 4, 23, 3]),
    "resnet152": ("Bottleneck", [3, 8, 36, 3]),
}
_VARIANTS = [depth + kind for depth in _RESNETS for kind in ("", "-gn", "-3x3", "-3x3-gn", "-512")]


def _resnet(name: str, channels: int, image_size: int, num_classes: int) -> Backbone:
    """Makes torchvision's residual network, which takes images of any size."""
    depth, *parts = name.split("-")
    block, blocks = _RESNETS[depth]
    resnet = torchvision().models.resnet
    norm = partial(nn.GroupNorm, 2) if "gn" in parts else MaskedBatchNorm2d
    # The classifier goes; its one class keeps the body's weights independent of the number of classes.
    body = resnet.ResNet(getattr(resnet, block), blocks, num_classes=1, norm_layer=norm)
    width = body.fc.in_features
    body.fc = nn.Identity()
    if "3x3" in parts:
        body.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(body.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's ResNet
        body.maxpool = nn.Identity()
    if "512" in parts:
        width = 512
        body.fc = nn.AdaptiveAvgPool1d(width)
    if "projection" in parts:
        body.fc = nn.Sequential(nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, 256))
        width = 256
    return Backbone(body, width, num_classes)


def _mobilenet_v2_512(dropout: bool, channels: int, image_size: int, num_classes: int) -> Backbone:
    """Makes torchvision's MobileNetV2, perhaps with its classifier's dropout of 0.2 before the averaging."""
    body = torchvision().models.MobileNetV2(num_classes=1, norm_layer=MaskedBatchNorm2d)
    averaged = nn.AdaptiveAvgPool1d(512)
    body.classifier = nn.Sequential(KeyedDropout(0.2), averaged) if dropout else nn.Sequential(averaged)
    return Backbone(body, 512, num_classes)


def _convolution(**options: Any) -> Callable[..., nn.Module]:
    """Returns torchvision's padded convolution with norm and activation, by default BatchNorm and ReLU."""
    return partial(torchvision().ops.Conv2dNormActivation, **{"norm_layer": MaskedBatchNorm2d, **options})


def _googlenet(is_small: bool, channels: int, image_size: int, num_classes: int) -> Backbone:
    """Makes torchvision's GoogLeNet without auxiliary classifiers; the features lie behind its dropout.

    The small one has one 3 x 3 convolution for its stem, two for each 5 x 5, biases, no dropout, and torch's default
    weights.
    """
    conv = _convolution(bias=True) if is_small else _convolution(norm_layer=partial(MaskedBatchNorm2d, eps=0.001))

    def inception(channels: int, *widths: int) -> nn.Module:
        module = import_module("torchvision.models.googlenet")  # `models.googlenet` is a function
        block = module.Inception(channels, *widths, conv_block=conv)
        if is_small:
            _, _, _, _, width_of_5x5, _ = widths
            block.branch3.append(conv(width_of_5x5, width_of_5x5))
        return block

    body = torchvision().models.GoogLeNet(
        num_classes=1, aux_logits=False, init_weights=False, blocks=[conv, inception, nn.Identity]
    )
    if is_small:
        body.conv1 = conv(3, 192)
        body.conv2 = body.conv3 = body.maxpool1 = body.maxpool2 = body.dropout = body.fc = nn.Identity()
        body.maxpool3 = body.maxpool4 = nn.MaxPool2d(3, stride=2, padding=1)
        return Backbone(body, 1024, num_classes)
    for module in body.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, std=0.01)  # torchvision's, without its truncation at 200 deviations
    body.dropout = KeyedDropout(body.dropout.p)
    body.fc = nn.AdaptiveAvgPool1d(512)
    return Backbone(body, 512, num_classes)


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
    stem, *_, last = body.features
    stem_convolution, *_ = stem
    stem_convolution.stride = (1, 1)
    last_convolution, *_ = last
    width = last_convolution.in_channels
    body.features[-1] = nn.Identity()
    dropout, _ = body.classifier
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


BACKBONES: dict[str, Recipe] = {
    "cnn-small": plain_cnn(least=4, kernel=3, padding=1, widths=(16, 32), pooled=(0, 1), hidden=(64,)),
    "cnn-mcmahan": plain_cnn(least=16, kernel=5, padding=0, widths=(32, 64), pooled=(0, 1), hidden=(512,)),
    "cnn-2x32": plain_cnn(least=16, kernel=5, padding=0, widths=(32, 32), pooled=(0, 1), hidden=(384, 192)),
    "cnn-2x32-100": plain_cnn(least=16, kernel=5, padding=0, widths=(32, 32), pooled=(0, 1), hidden=(384, 100)),
    "cnn-2x32-100-linear": plain_cnn(
        least=16, kernel=5, padding=0, widths=(32, 32), pooled=(0, 1), hidden=(384, 100), linear_features=True
    ),
    "cnn-2x64": plain_cnn(
        least=16, kernel=5, padding=0, widths=(64, 64), pooled=(0, 1), hidden=(384, 192), colour=True
    ),
    "cnn-2x64-100": plain_cnn(
        least=16, kernel=5, padding=0, widths=(64, 64), pooled=(0, 1), hidden=(384, 100), colour=True
    ),
    "cnn-3conv": plain_cnn(
        least=4, kernel=5, padding=2, widths=(64, 64, 128), pooled=(0, 1), hidden=(2048, 512), colour=True
    ),
    # The usual form of AlexNet for CIFAR: 3 x 3 convolutions, 2 x 2 pooling after the first, second and fifth, and of
    # a 32 x 32 image 2 x 2 x 256 values for the fully connected layers. Without AlexNet's dropout before each of those.
    "alexnet-32": plain_cnn(
        least=15, kernel=3, padding=1, widths=(64, 192, 384, 256, 256), pooled=(0, 1, 4), hidden=(4096, 4096),
        stride=2, colour=True,
    ),
    **{name: Recipe(partial(_resnet, name)) for name in (*_VARIANTS, "resnet18-3x3-gn-projection")},
    "vit-tiny": Recipe(_vit_tiny, least=2),
    "mobilenet-v2-512": Recipe(partial(_mobilenet_v2_512, False)),
    "mobilenet-v2-dropout-512": Recipe(partial(_mobilenet_v2_512, True)),
    "googlenet-512": Recipe(partial(_googlenet, False), least=15),
    "googlenet-32": Recipe(partial(_googlenet, True)),
    "mobilenet-v2-32": Recipe(_mobilenet_v2_32),
    "efficientnet-b0-32": Recipe(_efficientnet_b0_32),
}  # fmt: skip


def _network_from_user(function: FromFile, channels: int, image_size: int, num_classes: int) -> Backbone:
    """Makes a network of a user's module: its last nn.Linear becomes the head, whose input are the features.

    nn.BatchNorm2d and nn.Dropout become the layers that take mask and key. Runs on random images show that the
    function is still the user's, that no image changes another's output, and that all draws come from the key.

    Raises:
        UserError: The first of these that does not hold, or what an engine that trains copies of the network's tensors
            could not keep.
    """
    with kept_draws():
        tried_again = _try_module(function, channels, image_size, num_classes)
    tried = _try_module(function, channels, image_size, num_classes)
    module = tried.module
    if isinstance(tried.logits, Tensor) and not torch.equal(tried_again.logits.nan_to_num(), tried.logits.nan_to_num()):
        raise function.refuse(
            "is another network each time it is made, so that a loaded model would not be the trained one",
            "draw by torch, numpy.random or random as they are seeded, or read what was drawn from a file",
        )
    shape = tuple(tried.logits.shape) if isinstance(tried.logits, Tensor) else type(tried.logits).__name__
    if shape != (len(tried.x), num_classes):
        raise function.refuse(
            f"gives no logits of {num_classes} classes (got {shape} of 4 images)", "return logits [B, C]"
        )
    head = _find_head(tried, function)
    _refuse_shared_memory(module, function)

    def layer_with_mask_or_key(layer: nn.Module) -> nn.Module:
        if type(layer) is nn.BatchNorm2d:
            become(layer, MaskedBatchNorm2d, num_batches_tracked=None, mask=None)
        if type(layer) is nn.Dropout and layer.p < 1 and _is_called_once(layer, tried) and not _has_hooks(layer):
            return KeyedDropout(layer.p)
        return layer

    _swap_layers(module, layer_with_mask_or_key)
    whole = copy.deepcopy(module)  # with the head in its place
    head_name = next(name for name, layer in module.named_modules() if layer is head)
    _swap_layers(module, lambda layer: nn.Identity() if layer is head else layer)
    network = Backbone(module, head.in_features, num_classes, colour=False, draws=KeyedDraws())
    network.head = head
    network._guard = partial(blame, function.path, passes=(torch.OutOfMemoryError,))
    with torch.no_grad():
        _refuse_unfit(network, whole, head_name, function, tried.x)
    return network.train()


def _is_called_once(layer: nn.Module, tried: "TriedModule") -> bool:
    """Says whether a layer took all images at once, first the three and then the four."""
    calls = [call for call in (*tried.calls_of_few, *tried.calls) if call.layer is layer]
    sizes = [len(call.output) for call in calls if call.output.dim()]
    return sizes == [3, 4]


def _find_head(tried: "TriedModule", function: FromFile) -> nn.Linear:
    """Returns the last linear layer that was called; refuses another kind of layer there, and a frozen one."""
    head = next((call.layer for call in reversed(tried.calls) if isinstance(call.layer, nn.Linear)), None)
    if type(head) is not nn.Linear or head.bias is None or not (head.weight.requires_grad and head.bias.requires_grad):
        *_, last = [call.layer for call in tried.calls if not call.layer._modules]  # of the innermost
        raise function.refuse(
            f"does not end in an nn.Linear with bias that is trained, of features [B, D] (got {type(last).__name__})",
            "let it be the last layer, and freeze other layers only",
        )
    return head


class LayerCall(NamedTuple):
    """A call of a layer while a network ran."""

    layer: nn.Module
    output: Tensor  # a copy of what the layer gave, or of a tensor in it


class TriedModule(NamedTuple):
    """A user's module, and what its layers and itself give of four images before it is trained."""

    module: nn.Module
    x: Tensor  # the images
    calls_of_few: list[LayerCall]  # of its layers, for the first three of them
    calls: list[LayerCall]  # those for all
    logits: Any


def _try_module(function: FromFile, channels: int, image_size: int, num_classes: int) -> TriedModule:
    """Makes a user's module, without wrappers of `torch.compile`, and lets it take some images in evaluation mode."""
    module = function(channels, image_size, num_classes)
    if not isinstance(module, nn.Module):
        raise function.refuse(f"gives no torch.nn.Module (got {type(module).__name__})", "return one")
    module = _not_compiled(module)
    _swap_layers(module, _not_compiled)
    _refuse_batch_statistics(module, function)
    _refuse_types_and_hooks(module, function)
    x = torch.randn(4, channels, image_size, image_size)
    # With our functions of attention: torch's own for evaluation leave out the layers inside.
    with torch.no_grad(), blame(function.path), KeyedDraws():
        few = _watch(module.eval(), x[:3])  # lazy layers get their shapes
        all_images = _watch(module, x)
    return TriedModule(module, x, few.calls, all_images.calls, all_images.output)


def _refuse_batch_statistics(module: nn.Module, function: FromFile) -> None:
    """Refuses batch normalisation that mixes images in evaluation, or whose statistics cannot be averaged."""
    for name, layer in module.named_modules():
        if type(layer) is nn.BatchNorm2d and not layer.track_running_stats:
            raise function.refuse(
                f"has the nn.BatchNorm2d '{name}' with track_running_stats=False, which mixes images in evaluation too",
                "leave track_running_stats=True",
            )
        if type(layer) is nn.BatchNorm2d and layer.momentum is None:
            raise function.refuse(
                f"has the nn.BatchNorm2d '{name}' with momentum=None, whose count of batches cannot be averaged",
                "give it a momentum, such as momentum=0.1",
            )


def _refuse_types_and_hooks(module: nn.Module, function: FromFile) -> None:
    """Refuses tensors that are not float32, and hooks on parameters."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise function.refuse(
                f"has a hook on the parameter '{name}', which would not be called",
                "freeze it by requires_grad_(False), or change the gradient in the method's local step",
            )
    tensors: dict[str, dict[str, Tensor]] = {
        "parameter": dict(module.named_parameters()), "buffer": dict(module.named_buffers()),
    }  # fmt: skip
    for kind, named in tensors.items():
        for name, value in named.items():
            if value.is_complex():
                raise function.refuse(
                    f"has the {kind} '{name}' of type {value.dtype}", "keep real and imaginary part as two of float32"
                )
            if value.is_floating_point() and value.dtype != torch.float32:
                raise function.refuse(
                    f"has the {kind} '{name}' of type {value.dtype}",
                    "leave out .half(), .bfloat16() or .double(), and choose the type by --precision",
                )
            _, _, last_part = name.rpartition(".")
            if last_part == "key" and kind == "buffer":
                raise function.refuse(f"has a buffer '{name}', as those of dropout are called", "call it otherwise")


def _has_hooks(layer: nn.Module) -> bool:
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return any(hooks)


def _refuse_shared_memory(module: nn.Module, function: FromFile) -> None:
    """Refuses a parameter in two places, and two tensors in the same memory, which would come apart."""
    names: dict[nn.Parameter, str] = {}
    for prefix, part in module.named_modules():
        for name, value in part.named_parameters(prefix, recurse=False, remove_duplicate=False):
            if names.setdefault(value, name) != name:
                raise function.refuse(f"has a parameter in two places, '{names[value]}' and '{name}'", "make it two")
    owners: dict[int, str] = {}  # by the address of the memory
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        address = value.untyped_storage().data_ptr()
        if value.numel() and owners.setdefault(address, name) != name:
            raise function.refuse(
                f"has '{owners[address]}' and '{name}' in the same memory", "give each its own, as by .clone()"
            )


def _perturb_tensor(value: Tensor, draws: torch.Generator, is_buffer: bool) -> None:
    """Moves a tensor by a tenth of its size, so that what is the identity for its first value is so no more."""
    size = value.square().mean().sqrt().nan_to_num(0, 0, 0)
    size = torch.where(size > 0, size, 1.0) / 10
    if is_buffer:  # upwards, since a variance must stay positive
        value.add_(size * torch.rand(value.shape, generator=draws))
    else:
        value.add_(size * torch.randn(value.shape, generator=draws))


_Module = TypeVar("_Module", bound=nn.Module)


def _perturbed(network: _Module) -> _Module:
    """Moves parameters and buffers of a network, by fixed draws, and returns it."""
    draws = torch.Generator().manual_seed(1)
    for parameter in network.parameters():
        _perturb_tensor(parameter, draws, is_buffer=False)
    for buffer in network.buffers():
        if buffer.is_floating_point():
            _perturb_tensor(buffer, draws, is_buffer=True)
    return network


def _refuse_other_function(network: Backbone, whole: nn.Module, head_name: str, function: FromFile, x: Tensor) -> None:
    """Refuses a network which is not its body and then its head, whatever its parameters are, in training or not.

    `whole` is the user's module with the head, of that name, where it stands in it.
    """
    theirs = _perturbed(copy.deepcopy(whole))
    _number_dropouts(theirs)
    ours = _copied(network)
    our_tensors = {**dict(ours.named_parameters()), **dict(ours.named_buffers())}
    for name, value in (*theirs.named_parameters(), *theirs.named_buffers()):
        layer, _, last_part = name.rpartition(".")
        our_name = f"head.{last_part}" if layer == head_name else f"body.{name}"
        our_tensors[our_name].copy_(value)
    for train in (False, True):
        their_copy = copy.deepcopy(theirs).train(train)
        our_copy = _copied(ours).train(train)
        heads = (cast(nn.Linear, their_copy.get_submodule(head_name)), our_copy.head)
        for scale in (1.0, 1e4):  # large logits too, for what is the identity on small ones
            for head in heads:
                head.weight.mul_(scale)
                head.bias.mul_(scale)
            with blame(function.path), KeyedDraws():
                expected = their_copy(x)
            _, logits = our_copy(x)
            bound = 1e-4 * expected.abs().nan_to_num(0, 0, 0).max().item()
            if not torch.allclose(logits, expected, 1e-4, bound, equal_nan=True):
                raise function.refuse(
                    "does not end in its last nn.Linear", "let that give the logits, and be called once"
                )


def _swap_layers(module: nn.Module, new: Callable[[nn.Module], nn.Module]) -> None:
    """Puts `new(layer)` in the place of every layer inside a module."""
    for parent in list(module.modules()):
        for key, layer in parent._modules.items():
            parent._modules[key] = None if layer is None else new(layer)


def _not_compiled(layer: nn.Module) -> nn.Module:
    """Returns the layer that `torch.compile` has wrapped, or the layer without its compiled call."""
    layer = getattr(layer, "_orig_mod", layer)
    layer._compiled_call_impl = None
    return layer


class Watched(NamedTuple):
    """What a network gives, and the calls of its layers in the order in which they end."""

    output: Any
    calls: list[LayerCall]


def _watch(network: nn.Module, x: Tensor) -> Watched:
    """Runs a network, and notes what its layers give."""
    calls: list[LayerCall] = []

    def note(layer: nn.Module, arguments: tuple, output: Any) -> None:
        calls.extend(LayerCall(layer, leaf.clone()) for leaf in leaves(output) if isinstance(leaf, Tensor))

    with register_module_forward_hook(note):
        return Watched(network(x), calls)


def _copied(network: Backbone) -> Backbone:
    """Returns a copy that tells the same `draws` whether they are used."""
    return copy.deepcopy(network, {id(network.draws): network.draws})


def _refuse_unfit(network: Backbone, whole: nn.Module, head_name: str, function: FromFile, x: Tensor) -> None:
    """Refuses a user's network that draws without the key, is another function, mixes images, or hides a state."""
    perturbed = _perturbed(_copied(network))
    random_state = torch.get_rng_state()
    outputs_of_two = _outputs_of_layers(perturbed, x[:2], function)
    outputs_again = _outputs_of_layers(perturbed, x[:2], function)
    outputs_of_all = _outputs_of_layers(perturbed, x, function)
    where = _first_difference(outputs_of_two, outputs_again, torch.equal)
    if where or not torch.equal(torch.get_rng_state(), random_state):
        raise function.refuse(f"draws random numbers {where or 'without effect'}", "use nn.Dropout or F.dropout")
    _refuse_other_function(network, whole, head_name, function, x)
    if network.draws is not None and not network.draws.used:
        network.draws = None
    where = _first_difference(outputs_of_two, outputs_of_all, partial(torch.allclose, rtol=1e-4, atol=1e-4))
    if where:
        raise function.refuse(
            f"mixes the images of a batch {where}",
            "use nn.BatchNorm2d, nn.GroupNorm or nn.LayerNorm, and attention with batch_first=True",
        )
    _refuse_hidden_state(_copied(perturbed).train(), function, x)


class LayerOutput(NamedTuple):
    """What a layer has given in training, or a buffer's value after it."""

    words: str  # the layer's name and type
    output: Tensor


def _outputs_of_layers(network: Backbone, x: Tensor, function: FromFile) -> list[LayerOutput]:
    """Returns what the layers of a copy give in training, but without batch statistics, and its buffers.

    Raises:
        UserError: The network puts a new tensor into a buffer.
    """
    trial = _copied(network).train()
    for norm in trial._norms:
        norm.eval()
    buffers = dict(trial.named_buffers(remove_duplicate=False))
    calls = _watch(trial, x).calls
    if any(value is not buffers[name] for name, value in trial.named_buffers(remove_duplicate=False)):
        raise function.refuse("puts a new tensor into a buffer", "change it in place, as by self.name.copy_(...)")
    calls += [LayerCall(trial, value) for value in buffers.values()]
    names = {layer: name.removeprefix("body.") for name, layer in trial.named_modules()}
    outputs = []
    for call in calls:
        words = f"'{names.get(call.layer, '')}' ({type(call.layer).__name__})"
        outputs.append(LayerOutput(words, call.output))
    return outputs


def _first_difference(outputs: list[LayerOutput], others: list[LayerOutput], is_same: Callable[..., bool]) -> str:
    """Says where some images give something else when they are the first among others; empty where they do not."""
    for alone, among_others in zip(outputs, others, strict=False):
        output = among_others.output
        if alone.output.dim():
            output = output[: len(alone.output)]
        if alone.output.shape == output.shape and not is_same(alone.output, output):
            return f"before or in the layer {alone.words}"
    return ""


def _refuse_hidden_state(network: Backbone, function: FromFile, x: Tensor) -> None:
    """Refuses a network that changes a parameter or a shared buffer, or keeps what is in no buffer from batch to batch.

    Clients, threads and a run that is resumed would have other values, or the same where each should have its own.
    """
    tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    before = {name: value.clone() for name, value in tensors.items()}
    _, first_logits = network(x)
    for name, parameter in network.named_parameters():
        if not torch.equal(parameter, before[name]):
            changed = name.removeprefix("body.")
            raise function.refuse(f"changes the parameter '{changed}' in its forward", "change buffers only, in place")
    for name, buffer in network.named_buffers(remove_duplicate=False):
        first_name = next(other for other, tensor in network.named_buffers() if tensor is buffer)
        if name != first_name and not torch.equal(buffer, before[first_name]):
            both = f"'{first_name.removeprefix('body.')}' and '{name.removeprefix('body.')}'"
            raise function.refuse(
                f"changes a buffer in two places, {both}, which come apart on another device", "keep it in one layer"
            )
    for name, value in tensors.items():
        value.copy_(before[name])
    _, logits = network(x)
    if not torch.allclose(logits, first_logits, 1e-5, 1e-6, equal_nan=True):
        raise function.refuse(
            "keeps something from one batch to the next that is in no buffer",
            "register it by self.register_buffer, and change it in place",
        )
