"""Layers: batch statistics that padding does not reach, and dropout whose mask is a function of a key."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcli.core import backbones, layers
from fedcli.core.keyed_draws import KeyedDraws, KeyedDropout, random_words
from fedcli.core.layers import LiveConv2d, MaskedBatchNorm2d, use_live_taps
from fedcli.core.switches import set_to
from tests.tensors import image_batch

# Batch statistics


def make_norm(layer_type, channels=5):
    """Returns a layer of batch normalisation with uncommon parameters and statistics, the same for each type."""
    draws = torch.Generator().manual_seed(1)
    layer = layer_type(channels).double()
    for name in ("weight", "bias", "running_mean", "running_var"):
        value = torch.rand(channels, generator=draws, dtype=torch.float64) + 0.5
        getattr(layer, name).data.copy_(value)
    return layer


class Pass(NamedTuple):
    """A pass through a layer and back, from an uneven loss of some rows of the output."""

    output: Tensor
    input_grad: Tensor
    weight_grad: Tensor
    bias_grad: Tensor


def pass_through(layer, x, rows=slice(None)):
    """Passes `x` through a layer and back from a loss of some rows."""
    x = x.clone().requires_grad_()
    output = layer(x)
    factors = torch.linspace(-1, 1, output[0].numel(), dtype=x.dtype).reshape(output[0].shape)
    loss = (output[rows] * factors).square().sum()
    return Pass(output, *torch.autograd.grad(loss, [x, layer.weight, layer.bias]))


def assert_close(values, expected_values, **tolerances):
    for value, expected in zip(values, expected_values, strict=True):
        torch.testing.assert_close(value, expected, **tolerances)


def assert_same_statistics(layer, expected, **tolerances):
    """Asserts that the running statistics of a layer are those of another one."""
    torch.testing.assert_close(layer.running_mean, expected.running_mean, **tolerances)
    torch.testing.assert_close(layer.running_var, expected.running_var, **tolerances)


def norm_images(batch=4, size=3):
    return image_batch(batch, 5, size) * 2 + 3


@pytest.mark.parametrize("train", [True, False])
def test_without_a_mask_and_in_evaluation_batch_normalisation_is_torchs(train):
    masked_norm = make_norm(MaskedBatchNorm2d).train(train)
    torch_norm = make_norm(nn.BatchNorm2d).train(train)
    if not train:
        masked_norm.mask = torch.tensor([True, False, False, True])
    x = norm_images()
    expected = pass_through(torch_norm, x)
    assert_close(pass_through(masked_norm, x), expected, rtol=0, atol=0)
    assert_same_statistics(masked_norm, torch_norm, rtol=0, atol=0)


@pytest.mark.parametrize("real", [[0], [0, 1, 2], [1, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("filling", [0.0, 1e30, float("nan")])
def test_partial_mask_agrees_with_the_real_rows_alone(real, filling):
    masked_norm = make_norm(MaskedBatchNorm2d)
    torch_norm = make_norm(nn.BatchNorm2d)
    is_real = torch.zeros(4, dtype=torch.bool)
    is_real[real] = True
    masked_norm.mask = is_real
    x = norm_images()
    padded = torch.where(is_real[:, None, None, None], x, filling)

    masked = pass_through(masked_norm, padded, real)

    expected = pass_through(torch_norm, x[real])
    real_part = masked._replace(output=masked.output[real], input_grad=masked.input_grad[real])
    assert_close(real_part, expected, rtol=1e-11, atol=1e-11)
    assert_same_statistics(masked_norm, torch_norm, rtol=1e-11, atol=1e-11)
    of_padding = masked.output[~is_real]
    assert torch.equal(of_padding, masked_norm.bias[:, None, None].expand_as(of_padding))  # finite, and no more
    assert not masked.input_grad[~is_real].any()


@pytest.mark.parametrize("mask", [None, torch.tensor([True])], ids=["without a mask", "with a mask"])
def test_one_value_per_channel_has_variance_0(mask):
    layer = make_norm(MaskedBatchNorm2d)
    layer.mask = mask
    mean = layer.running_mean.clone()
    var = layer.running_var.clone()
    x = norm_images(batch=1, size=1)

    result = pass_through(layer, x)

    assert all(value.isfinite().all() for value in result)
    torch.testing.assert_close(result.output.flatten(), layer.bias)
    torch.testing.assert_close(layer.running_mean, 0.9 * mean + 0.1 * x.flatten())
    torch.testing.assert_close(layer.running_var, 0.9 * var)


def test_half_precision_input_keeps_its_type_and_the_statistics_theirs():
    masked_norm = make_norm(MaskedBatchNorm2d).float()
    torch_norm = make_norm(nn.BatchNorm2d).float()
    masked_norm.mask = torch.ones(4, dtype=torch.bool)
    x = norm_images().bfloat16()
    output = masked_norm(x)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, torch_norm(x))
    torch.testing.assert_close(masked_norm.running_var, torch_norm.running_var)
    assert masked_norm.running_var.dtype == torch.float32


# Dropout


def dropout(p=0.2, key=0, whole_examples=False):
    layer = KeyedDropout(p, whole_examples)
    layer.key.fill_(key)
    return layer


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_kept_is_divided_by_what_is_left(dtype):
    x = torch.linspace(1, 2, 4000, dtype=torch.float64).reshape(4, 1000).to(dtype)
    out = dropout(p=0.25)(x)
    assert out.dtype == dtype
    assert torch.equal(out[out != 0], (x / 0.75)[out != 0])
    assert (out == 0).double().mean().item() == pytest.approx(0.25, abs=0.03)
    assert torch.equal(dropout(p=0.0)(x), x)


def test_equal_keys_give_equal_masks_whatever_else_is_in_the_batch():
    x = image_batch(8, size=4)
    assert torch.equal(dropout(key=5)(x), dropout(key=5)(x))
    assert torch.equal(dropout(key=5)(x[:3]), dropout(key=5)(x)[:3])
    assert not torch.equal(dropout(key=5)(x), dropout(key=6)(x))
    assert torch.equal(dropout(key=5)(x.to(memory_format=torch.channels_last)), dropout(key=5)(x))
    whole = dropout(0.5, key=5, whole_examples=True)
    assert torch.equal(whole(x[:3]), whole(x)[:3])


def test_whole_examples_are_kept_or_dropped():
    x = image_batch(2000, size=2).abs() + 1
    out = dropout(p=0.2, whole_examples=True)(x)
    dropped = out[:, 0, 0, 0] == 0
    assert not out[dropped].any()
    assert torch.equal(out[~dropped], x[~dropped] / 0.8)
    assert dropped.double().mean().item() == pytest.approx(0.2, abs=0.03)


def test_a_dropped_value_has_no_gradient_even_where_it_is_not_finite():
    x = torch.full((1, 50), float("inf"), requires_grad=True)
    out = dropout(p=0.5)(x)
    (grads,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grads, torch.where(out == 0, 0.0, 2.0))


@pytest.mark.parametrize("key", [0, 1, 123456789, 2**63 - 1, -(2**63), -1])
def test_hash_is_that_of_unbounded_integers(key):
    """No product may leave int64, where devices could differ."""

    def mix(word):
        word = (word ^ word >> 15) * 0x2C1B3C6D % 2**32
        word = (word ^ word >> 12) * 0x297A2D39 % 2**32
        return word ^ word >> 15

    low_word = key % 2**32
    high_word = key % 2**64 >> 32

    def hashed(place, number):
        word = mix((place + (number + 1) * 0x9E3779B9) % 2**32) + mix(low_word)
        return mix((mix(word % 2**32) + mix(high_word)) % 2**32)

    for number in (0, 16, 99):
        expected = [hashed(place, number) for place in range(200)]
        words = random_words(torch.tensor(key), number, (2, 100))
        assert torch.equal(words, torch.tensor(expected).reshape(2, 100))


# Functions of torch that draw from a key


def call_in_training(function, *arguments, **options):
    """Calls a function of torch as a network that trains does."""
    with KeyedDraws():
        return function(*arguments, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.ones(5, 5).tril().bool()},
        {"attn_mask": torch.zeros(5, 5).bool()},
        {"attn_mask": torch.arange(25).reshape(5, 5) % 4 > 0, "is_causal": True},
        {"attn_mask": torch.linspace(-1, 1, 25).reshape(5, 5).double(), "is_causal": True},
        {"attn_mask": torch.linspace(-1, 1, 25).reshape(5, 5).double()},
    ],
)
def test_attention_that_draws_from_a_key_is_torchs_where_nothing_is_dropped(options):
    query, key, value = torch.randn(3, 2, 4, 5, 6, dtype=torch.float64)
    attention = F.scaled_dot_product_attention
    expected = attention(query, key, value, **options)
    torch.testing.assert_close(call_in_training(attention, query, key, value, **options), expected)


def test_heads_of_a_query_may_share_those_of_key_and_value():
    query = torch.randn(2, 6, 5, 4, dtype=torch.float64)
    key, value = torch.randn(2, 2, 3, 5, 4, dtype=torch.float64)
    attention = F.scaled_dot_product_attention
    expected = attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(call_in_training(attention, query, key, value, enable_gqa=True), expected)


def test_dropout_in_attention_drops_weights_and_is_that_of_the_key():
    ones = torch.ones(8, 16, 16).double()
    identity = torch.eye(16).double().expand(8, 16, 16)
    draws = KeyedDraws()

    def attention_weights():
        with draws:
            return F.scaled_dot_product_attention(ones, ones, identity, dropout_p=0.25)

    weights = attention_weights()
    assert weights.unique().tolist() == [0.0, pytest.approx(1 / 16 / 0.75)]
    assert (weights == 0).double().mean().item() == pytest.approx(0.25, abs=0.03)

    assert torch.equal(weights, attention_weights())
    draws.key.fill_(1)
    assert not torch.equal(weights, attention_weights())


@pytest.mark.parametrize(
    ("function", "arguments", "mean", "std"),
    [
        (F.dropout, (torch.ones(4000), 0.2), 1, 0.5),
        (F.dropout2d, (torch.ones(4000, 1, 1, 1), 0.2), 1, 0.5),
        (F.dropout, (torch.ones(4000), 1.0), 0, 0),
    ],
)
def test_draws_have_torchs_distribution(function, arguments, mean, std):
    values = call_in_training(function, *arguments)
    assert values.mean().item() == pytest.approx(mean, abs=0.03)
    assert values.std().item() == pytest.approx(std, abs=0.03)


def test_channels_are_dropped_whole():
    values = call_in_training(F.dropout2d, torch.ones(50, 40, 3, 3))
    assert torch.equal(values, values[:, :, :1, :1].expand_as(values))
    assert values[0].unique().tolist() == [0, 2]  # and not the whole image
    assert (values[:, :, 0, 0] == 0).double().mean().item() == pytest.approx(0.5, abs=0.05)


@pytest.mark.filterwarnings("ignore:dropout2d. Received a 3D input")
@pytest.mark.parametrize(
    ("function", "shape", "kept"),
    [
        (F.dropout1d, (40, 30), 1),  # one example [C, L]
        (F.dropout1d, (20, 40, 30), 2),
        (F.dropout2d, (20, 40, 30), 2),  # torch takes it for [B, C, L]
        (F.dropout3d, (40, 4, 3, 2), 1),  # one example [C, D, H, W]
        (F.dropout3d, (20, 40, 4, 3, 2), 2),
    ],
)
def test_channels_are_those_of_torch_with_and_without_a_batch(function, shape, kept):
    for values in (call_in_training(function, torch.ones(shape)), function(torch.ones(shape))):
        places = values.flatten(kept)
        assert torch.equal(places, places[..., :1].expand_as(places))
        assert (places[..., 0] == 0).double().mean().item() == pytest.approx(0.5, abs=0.3)
        assert places.unique().tolist() == [0, 2]


# Live taps


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("size", "options", "live"),
    [
        (1, {"kernel_size": 3, "padding": 1}, slice(1, 2)),
        (2, {"kernel_size": 3, "stride": 2, "padding": 1}, slice(1, 3)),
        (2, {"kernel_size": 5, "padding": 2}, slice(1, 4)),
        (1, {"kernel_size": 7, "stride": 2, "padding": 3}, slice(3, 4)),
        (2, {"kernel_size": 3, "padding": 2, "dilation": 2, "groups": 2}, slice(1, 2)),
        (2, {"kernel_size": 3, "padding": 1}, None),
        (8, {"kernel_size": 3, "stride": 2, "padding": 1}, None),
        (1, {"kernel_size": 1, "stride": 2, "padding": 1}, None),  # padding alone, of which nothing can be left out
        (2, {"kernel_size": 5, "stride": 3, "padding": 3}, None),  # the sides would need another padding each
    ],
)
def test_a_convolution_by_its_live_taps_or_by_few_places_is_the_convolution(
    size, options, live, channels_last, monkeypatch
):
    layer = nn.Conv2d(4, 6, **options).double()
    x = image_batch(3, 4, size)
    if channels_last:
        layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
    expected = pass_through(layer, x)
    assert use_live_taps(nn.Sequential(layer), 4, size) == (live is not None)
    taps = live or slice(0, options["kernel_size"])
    assert getattr(layer, "live", (taps, taps)) == (taps, taps)
    assert_close(pass_through(layer, x), expected, rtol=1e-12, atol=1e-12)

    has_few_places = size < 8  # at most 2 x 2
    if has_few_places and "dilation" not in options:
        monkeypatch.setattr(layers.F, "conv2d", None)
    with set_to(layers.by_places, True):
        assert_close(pass_through(layer, x), expected, rtol=1e-12, atol=1e-12)


def test_the_axes_of_an_image_have_live_taps_of_their_own():
    layer = nn.Conv2d(4, 6, (3, 5), padding=(1, 0)).double()
    network = nn.Sequential(nn.AdaptiveAvgPool2d((1, 5)), layer)
    x = image_batch(2, 4, 6)
    expected = network(x)
    assert use_live_taps(network, 4, 6)
    assert layer.live == (slice(1, 2), slice(0, 5))
    assert layer.live_padding == (0, 0)
    torch.testing.assert_close(network(x), expected, rtol=1e-12, atol=1e-12)


def test_images_of_another_size_are_convolved_with_all_taps():
    layer = nn.Conv2d(4, 6, 3, padding=1).double()
    small = image_batch(2, 4, 1)
    large = image_batch(2, 4, 4)
    expected_of_small = layer(small)
    expected_of_large = layer(large)
    assert use_live_taps(nn.Sequential(layer), 4, 1)
    torch.testing.assert_close(layer(input=small), expected_of_small, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer(input=large), expected_of_large, rtol=1e-12, atol=1e-12)


def test_live_taps_leave_a_networks_state_as_it_is():
    network = backbones.build("resnet18", 3, 32, 10, 0)
    buffers = {name: value.clone() for name, value in network.named_buffers()}
    names = list(network.state_dict())

    assert use_live_taps(network, 3, 32)
    num_dead = 0
    for layer in network.modules():
        if isinstance(layer, LiveConv2d):
            num_dead += layer.weight.numel() - layer.weight[:, :, *layer.live].numel()
    assert num_dead == 6_946_816

    assert network.training
    assert list(network.state_dict()) == names
    assert all(torch.equal(value, buffers[name]) for name, value in network.named_buffers())


def test_one_network_of_several_with_dead_taps_is_seen():
    assert not backbones.have_dead_taps("cnn-small,resnet18-3x3", 3, 32)
    assert backbones.have_dead_taps("cnn-small,resnet18", 3, 32)


def test_a_single_image_without_a_batch_is_convolved_too():
    layer = nn.Conv2d(4, 6, 3, padding=1).double()
    image = image_batch(1, 4, 2)[0]
    expected = layer(image)
    use_live_taps(nn.Sequential(layer), 4, 2)
    with set_to(layers.by_places, True):
        torch.testing.assert_close(layer(image), expected, rtol=1e-12, atol=1e-12)
