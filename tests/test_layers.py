"""Layers: batch statistics that padding does not reach, and dropout whose mask is a function of a key."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedcli.core import backbones, layers
from fedcli.core.keyed_draws import KeyedDraws, KeyedDropout, _random_words
from fedcli.core.layers import LiveConv2d, MaskedBatchNorm2d, use_live_taps
from fedcli.core.switches import set_to
from tests.tensors import image_batch

# Batch statistics


def norm_pair(channels=5):
    """Our layer and torch's, with the same uncommon parameters and running statistics."""
    draws = torch.Generator().manual_seed(1)
    ours = MaskedBatchNorm2d(channels).double()
    theirs = nn.BatchNorm2d(channels).double()
    for name in ("weight", "bias", "running_mean", "running_var"):
        value = torch.rand(channels, generator=draws, dtype=torch.float64) + 0.5
        getattr(ours, name).data.copy_(value)
        getattr(theirs, name).data.copy_(value)
    return ours, theirs


def output_and_gradients(layer, x, rows=slice(None)):
    """Returns the output of a layer, and the gradients of an uneven loss of some rows by input, weight and bias."""
    x = x.clone().requires_grad_()
    out = layer(x)
    factors = torch.linspace(-1, 1, out[0].numel(), dtype=x.dtype).reshape(out[0].shape)
    loss = (out[rows] * factors).square().sum()
    return [out, *torch.autograd.grad(loss, [x, layer.weight, layer.bias])]


def output_gradients_and_statistics(layer, x, rows=slice(None)):
    """Returns the same of a norm layer, and its running statistics afterwards."""
    return [*output_and_gradients(layer, x, rows), layer.running_mean, layer.running_var]


def assert_close(results, expected, **tolerances):
    for value, expected_value in zip(results, expected, strict=True):
        torch.testing.assert_close(value, expected_value, **tolerances)


def norm_images(batch=4, size=3):
    return image_batch(batch, 5, size) * 2 + 3


@pytest.mark.parametrize("train", [True, False])
def test_without_a_mask_and_in_evaluation_batch_normalisation_is_torchs(train):
    ours, theirs = norm_pair()
    ours.mask = None if train else torch.tensor([True, False, False, True])
    x = norm_images()
    expected = output_gradients_and_statistics(theirs.train(train), x)
    assert_close(output_gradients_and_statistics(ours.train(train), x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("real", [[0], [0, 1, 2], [1, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("filling", [0.0, 1e30, float("nan")])
def test_partial_mask_agrees_with_the_real_rows_alone(real, filling):
    ours, theirs = norm_pair()
    ours.mask = torch.zeros(4, dtype=torch.bool)
    ours.mask[real] = True
    x = norm_images()
    padded = torch.where(ours.mask[:, None, None, None], x, filling)

    out, grad, *rest = output_gradients_and_statistics(ours, padded, real)

    expected = output_gradients_and_statistics(theirs, x[real])
    assert_close([out[real], grad[real], *rest], expected, rtol=1e-11, atol=1e-11)
    out_of_padding = out[~ours.mask]
    assert torch.equal(out_of_padding, ours.bias[:, None, None].expand_as(out_of_padding))  # finite, and no more
    assert not grad[~ours.mask].any()


def test_one_value_per_channel_has_variance_0():
    for mask in (None, torch.tensor([True])):
        ours, _ = norm_pair()
        mean = ours.running_mean.clone()
        var = ours.running_var.clone()
        ours.mask = mask
        x = norm_images(batch=1, size=1)

        out, *rest = output_gradients_and_statistics(ours, x)

        assert all(value.isfinite().all() for value in (out, *rest))
        torch.testing.assert_close(out.flatten(), ours.bias)
        torch.testing.assert_close(ours.running_mean, 0.9 * mean + 0.1 * x.flatten())
        torch.testing.assert_close(ours.running_var, 0.9 * var)


def test_half_precision_input_keeps_its_type_and_the_statistics_theirs():
    ours, theirs = norm_pair()
    ours.float()
    theirs.float()
    ours.mask = torch.ones(4, dtype=torch.bool)
    x = norm_images().bfloat16()
    out = ours(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, theirs(x))
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    assert ours.running_var.dtype == torch.float32


# Dropout


def dropout(p=0.2, key=0, number=0, whole_examples=False):
    layer = KeyedDropout(p, whole_examples)
    layer.key.fill_(key)
    layer.number = number
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
        words = _random_words(torch.tensor(key), number, (2, 100))
        assert torch.equal(words, torch.tensor(expected).reshape(2, 100))


# Functions of torch that draw from a key


def in_functions(function, *arguments, **options):
    """What a function of torch gives in a network that trains."""
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
    function = F.scaled_dot_product_attention
    expected = function(query, key, value, **options)
    torch.testing.assert_close(in_functions(function, query, key, value, **options), expected)


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
    values = in_functions(function, *arguments)
    assert values.mean().item() == pytest.approx(mean, abs=0.03)
    assert values.std().item() == pytest.approx(std, abs=0.03)


def test_channels_are_dropped_whole():
    values = in_functions(F.dropout2d, torch.ones(50, 40, 3, 3))
    assert torch.equal(values, values[:, :, :1, :1].expand_as(values))
    assert values[0].unique().tolist() == [0, 2]  # and not the whole image
    assert (values[:, :, 0, 0] == 0).double().mean().item() == pytest.approx(0.5, abs=0.05)


# Live taps


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "dilation", "live"),
    [
        (1, 3, 1, 1, 1, slice(1, 2)),
        (2, 3, 2, 1, 1, slice(1, 3)),
        (2, 5, 1, 2, 1, slice(1, 4)),
        (1, 7, 2, 3, 1, slice(3, 4)),
        (2, 3, 1, 2, 2, slice(1, 2)),
        (2, 3, 1, 1, 1, None),
        (8, 3, 2, 1, 1, None),
        (1, 1, 2, 1, 1, None),  # padding alone, of which nothing can be left out
        (2, 5, 3, 3, 1, None),  # the sides would need another padding each
    ],
)
def test_a_convolution_by_its_live_taps_or_by_few_places_is_the_convolution(
    size, kernel, stride, padding, dilation, live, channels_last, monkeypatch
):
    layer = nn.Conv2d(4, 6, kernel, stride, padding, dilation, groups=dilation).double()
    x = image_batch(3, 4, size)
    if channels_last:
        layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
    expected = output_and_gradients(layer, x)
    assert use_live_taps(nn.Sequential(layer), 4, size) == (live is not None)
    taps = live or slice(0, kernel)
    assert getattr(layer, "live", (taps, taps)) == (taps, taps)
    assert_close(output_and_gradients(layer, x), expected, rtol=1e-12, atol=1e-12)

    if dilation == 1 and size < 8:  # at most 2 x 2 places
        monkeypatch.setattr(layers.F, "conv2d", None)
    with set_to(layers.by_places, True):
        assert_close(output_and_gradients(layer, x), expected, rtol=1e-12, atol=1e-12)


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


def test_the_parameters_that_a_network_needs_of_an_image():
    network = backbones.build("resnet18", 3, 32, 10, 0)
    buffers = {name: value.clone() for name, value in network.named_buffers()}
    parameters = list(network.state_dict())

    assert use_live_taps(network, 3, 32)
    layers = [layer for layer in network.modules() if isinstance(layer, LiveConv2d)]
    dead = sum(layer.weight.numel() - layer.weight[:, :, *layer.live].numel() for layer in layers)
    assert dead == 6_946_816

    assert network.training
    assert list(network.state_dict()) == parameters
    assert all(torch.equal(value, buffers[name]) for name, value in network.named_buffers())

    assert not backbones.have_dead_taps("cnn-small,resnet18-3x3", 3, 32)
    assert backbones.have_dead_taps("cnn-small,resnet18", 3, 32)


def test_heads_of_a_query_may_share_those_of_key_and_value():
    query = torch.randn(2, 6, 5, 4, dtype=torch.float64)
    key, value = torch.randn(2, 2, 3, 5, 4, dtype=torch.float64)
    function = F.scaled_dot_product_attention
    expected = function(query, key, value, enable_gqa=True)
    torch.testing.assert_close(in_functions(function, query, key, value, enable_gqa=True), expected)


def test_a_single_image_without_a_batch_is_convolved_too():
    layer = nn.Conv2d(4, 6, 3, padding=1).double()
    image = image_batch(1, 4, 2)[0]
    expected = layer(image)
    use_live_taps(nn.Sequential(layer), 4, 2)
    with set_to(layers.by_places, True):
        torch.testing.assert_close(layer(image), expected, rtol=1e-12, atol=1e-12)
