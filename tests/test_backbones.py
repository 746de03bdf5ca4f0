"""Networks: sizes against the papers, initial weights, and batch statistics that padding does not reach."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fedcli import backbones
from fedcli.backbones import MaskedBatchNorm2d, build
from fedcli.errors import UserError
from fedcli.vision import torchvision

ROOT = Path(__file__).parent.parent


def images(batch, channels=3, size=32, seed=0, dtype=torch.float64):
    return torch.randn(batch, channels, size, size, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def parameters(module):
    return sum(value.numel() for value in module.parameters())


# Networks


@pytest.mark.parametrize(
    ("name", "channels", "size", "classes", "expected"),
    [
        ("cnn-mcmahan", 1, 28, 10, 582_026),
        ("cnn-mcmahan", 3, 32, 10, 878_538),
        ("cnn-mcmahan", 3, 32, 100, 924_708),
        ("cnn-mcmahan", 3, 64, 200, 5_694_600),
        ("cnn-2x32", 1, 28, 10, 299_306),
        ("cnn-2x64", 3, 32, 10, 797_962),
        ("cnn-3conv", 3, 28, 10, 14_213_578),
        ("cnn-3conv", 1, 28, 10, 14_213_578),
        ("cnn-small", 1, 8, 10, 160 + 4_640 + (128 * 64 + 64) + 650),
        ("cnn-small", 3, 16, 10, 448 + 4_640 + (512 * 64 + 64) + 650),
        ("resnet18", 3, 32, 10, 11_181_642),
        ("resnet18", 1, 28, 62, 11_208_318),
        ("resnet18", 3, 32, 100, 11_227_812),
        ("resnet18", 3, 32, 1000, 11_689_512),
        ("resnet18-3x3", 3, 32, 10, 11_173_962),
        ("resnet18-3x3", 1, 28, 62, 11_200_638),
        ("resnet50-3x3", 3, 32, 100, 23_705_252),
        ("resnet50", 3, 32, 100, 23_712_932),
        ("resnet10-3x3", 3, 32, 10, 4_903_242),
        ("resnet12-3x3", 3, 32, 10, 4_977_226),
        ("resnet34-3x3", 3, 32, 10, 21_282_122),
        ("resnet18-3x3-gn", 3, 32, 10, 11_173_962),
    ],
)
def test_parameter_counts_are_those_of_the_papers(name, channels, size, classes, expected):
    assert parameters(build(name, channels, size, classes, seed=0)) == expected


@pytest.mark.parametrize("name", backbones.names())
def test_features_and_head(name):
    size = 28 if name.startswith("cnn") else 8
    module = build(name, 1, size, 7, seed=0)
    features, logits = module(images(2, 1, size, dtype=torch.float32))
    assert features.shape == (2, module.feature_dim)
    assert (features >= 0).all()  # after ReLU, or an average of what is
    assert module.head.weight.shape == (7, module.feature_dim)
    torch.testing.assert_close(logits, features @ module.head.weight.T + module.head.bias)
    assert [key for key in dict(module.named_parameters()) if key.startswith("head.")] == ["head.weight", "head.bias"]
    assert all(value.dtype == torch.float32 for value in module.state_dict().values())  # can be averaged
    assert bool(list(module.buffers())) == (name.startswith("resnet") and not name.endswith("-gn"))


def test_names_are_unique_and_complete():
    depths = ["resnet10", "resnet12", "resnet18", "resnet34", "resnet50"]
    resnets = {f"{depth}{stem}{norm}" for depth in depths for stem in ("", "-3x3") for norm in ("", "-gn")}
    cnns = {"cnn-small", "cnn-mcmahan", "cnn-2x32", "cnn-2x64", "cnn-3conv"}
    assert sorted(backbones.names()) == sorted(resnets | cnns)


@pytest.mark.parametrize(
    ("name", "size", "padding", "pooled"),
    [("cnn-small", 16, 1, 2), ("cnn-mcmahan", 28, 0, 2), ("cnn-2x64", 32, 0, 2), ("cnn-3conv", 28, 2, 2)],
)
def test_cnn_is_the_papers_function(name, size, padding, pooled):
    """Convolution, ReLU, pooling in the papers' order; fully connected layers with ReLU."""
    module = build(name, 3, size, 10, seed=1).double()
    x = features = images(2, size=size)
    weights = list(module.body.parameters())
    convolutions = [pair for pair in zip(weights[::2], weights[1::2], strict=True) if pair[0].dim() == 4]
    for i, (weight, bias) in enumerate(convolutions):
        features = F.relu(F.conv2d(features, weight, bias, padding=padding))
        features = F.max_pool2d(features, 2) if i < pooled else features
    features = features.flatten(1)
    for weight, bias in zip(weights[2 * len(convolutions) :: 2], weights[2 * len(convolutions) + 1 :: 2], strict=True):
        features = F.relu(F.linear(features, weight, bias))
    torch.testing.assert_close(module(x)[0], features)


@pytest.mark.parametrize("name", ["cnn-2x64", "cnn-3conv", "resnet10", "resnet10-3x3-gn"])
def test_grey_images_are_repeated(name):
    grey = images(2, 1)
    ours = build(name, 1, 32, 10, seed=0).double()(grey)
    theirs = build(name, 3, 32, 10, seed=0).double()(grey.repeat(1, 3, 1, 1))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("name", "channels"), [("cnn-mcmahan", 1), ("cnn-mcmahan", 3), ("cnn-2x32", 1)])
def test_other_cnns_take_the_channels_that_arrive(name, channels):
    assert build(name, channels, 28, 10, seed=0).body[0].in_channels == channels


@pytest.mark.parametrize("name", ["resnet10", "resnet10-3x3-gn", "resnet50-3x3"])
@pytest.mark.parametrize("size", [1, 8])
def test_residual_networks_take_images_of_any_size(name, size):
    features, logits = build(name, 1, size, 10, seed=0)(images(1, 1, size, dtype=torch.float32))
    assert features.isfinite().all()
    assert logits.isfinite().all()


def test_stems_and_norms():
    plain, small, group = (build(name, 3, 32, 10, 0).body for name in ("resnet18", "resnet18-3x3", "resnet18-gn"))
    assert plain.conv1.kernel_size == (7, 7)
    assert isinstance(plain.maxpool, nn.MaxPool2d)
    assert (small.conv1.kernel_size, small.conv1.stride) == ((3, 3), (1, 1))
    assert small.bn1(small.conv1(images(1, dtype=torch.float32))).shape[2:] == (32, 32)
    assert isinstance(small.maxpool, nn.Identity)
    norms = [module for module in group.modules() if isinstance(module, nn.GroupNorm)]
    assert len(norms) == 20
    assert all(norm.num_groups == 2 for norm in norms)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in group.modules())


# Initial weights


@pytest.mark.parametrize("name", ["cnn-small", "resnet10", "resnet10-3x3-gn"])
def test_seed_gives_the_weights_and_leaves_the_callers_draws(name):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = build(name, 3, 16, 10, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    same, other = (build(name, 3, 16, 10, seed=seed).state_dict() for seed in (3, 4))
    assert all(torch.equal(value, same[key]) for key, value in one.items())
    assert not torch.equal(one["head.weight"], other["head.weight"])


def test_cnn_weights_are_torchs_default():
    module = build("cnn-small", 1, 8, 10, seed=3)
    torch.manual_seed(3)
    layers = [nn.Conv2d(1, 16, 3), nn.Conv2d(16, 32, 3), nn.Linear(128, 64), nn.Linear(64, 10)]
    expected = [value for layer in layers for value in layer.parameters()]
    for ours, theirs in zip(module.parameters(), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("classes", [10, 100])
def test_residual_weights_are_torchvisions_whatever_the_classes(classes):
    body = build("resnet18", 3, 32, classes, seed=3).body
    torch.manual_seed(3)
    theirs = dict(torchvision.models.resnet18().named_parameters())  # draws its classifier after its convolutions
    drawn = dict(body.named_parameters())
    assert set(theirs) - set(drawn) == {"fc.weight", "fc.bias"}
    assert torch.equal(drawn["bn1.weight"], torch.ones(64))
    for key, value in drawn.items():  # the draws are shifted by the classifier, so spreads are compared
        if value.dim() == 4:
            assert value.std().item() == pytest.approx(theirs[key].std().item(), rel=0.05)
    assert torch.equal(drawn["layer4.1.conv2.weight"], build("resnet18", 3, 32, 2, seed=3).body.layer4[1].conv2.weight)


def test_small_stem_is_drawn_like_the_other_convolutions():
    weight = build("resnet10-3x3", 3, 32, 10, seed=0).body.conv1.weight
    assert weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.1)  # kaiming, fan out; torch's own is 0.11
    assert weight.abs().max() > 2.5 * weight.std()  # normal, not uniform


def test_plain_dict_of_tensors_can_be_loaded():
    module, other = (build("resnet10", 3, 16, 10, seed=seed) for seed in (0, 1))
    module.load_state_dict({key: value.clone() for key, value in other.state_dict().items()})
    assert torch.equal(module.head.weight, other.head.weight)


# A user's mistakes


@pytest.mark.parametrize(("name", "least"), [("cnn-mcmahan", 16), ("cnn-2x32", 16), ("cnn-3conv", 4), ("cnn-small", 4)])
def test_smallest_image(name, least):
    assert build(name, 1, least, 10, seed=0)(images(1, 1, least, dtype=torch.float32))[1].shape == (1, 10)
    for size in (least - 1, 1):
        with pytest.raises(UserError, match=rf"{name} \(got {size} x {size} pixels\); {least} x {least} and larger"):
            build(name, 1, size, 10, seed=0)


def test_wrong_name_or_channels():
    with pytest.raises(UserError, match=r"unknown backbone 'resnet-18'; did you mean 'resnet18'\?"):
        build("resnet-18", 3, 32, 10, seed=0)
    with pytest.raises(UserError, match=r"\(got 4\); 1 or 3"):
        build("cnn-mcmahan", 4, 32, 10, seed=0)


# Batch statistics


def norm_pair(channels=5):
    """Our layer and torch's, with the same uncommon parameters and running statistics."""
    draws = torch.Generator().manual_seed(1)
    ours, theirs = MaskedBatchNorm2d(channels).double(), nn.BatchNorm2d(channels).double()
    for name in ("weight", "bias", "running_mean", "running_var"):
        value = torch.rand(channels, generator=draws, dtype=torch.float64) + 0.5
        getattr(ours, name).data.copy_(value)
        getattr(theirs, name).data.copy_(value)
    return ours, theirs


def run_norm(layer, x):
    """Output, gradients of an uneven loss by input, weight and bias, and the running statistics after."""
    x = x.clone().requires_grad_()
    out = layer(x)
    loss = (out * torch.linspace(-1, 1, out[0].numel(), dtype=x.dtype).reshape(out[0].shape)).square().sum()
    return [out, *torch.autograd.grad(loss, [x, layer.weight, layer.bias]), layer.running_mean, layer.running_var]


def norm_images(batch=4, size=3):
    return images(batch, 5, size) * 2 + 3


@pytest.mark.parametrize("train", [True, False])
def test_without_a_mask_it_is_torchs(train):
    ours, theirs = norm_pair()
    x = norm_images()
    for one, other in zip(run_norm(ours.train(train), x), run_norm(theirs.train(train), x), strict=True):
        assert torch.equal(one, other)


def test_full_mask_agrees_with_torch():
    ours, theirs = norm_pair()
    ours.mask = torch.ones(4, dtype=torch.bool)
    for one, other in zip(run_norm(ours, norm_images()), run_norm(theirs, norm_images()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("real", [[0], [0, 1, 2], [1, 3], [0, 2, 3]])
@pytest.mark.parametrize("filling", [0.0, 1e30, float("nan")])
def test_partial_mask_agrees_with_the_real_rows_alone(real, filling):
    ours, theirs = norm_pair()
    ours.mask = torch.zeros(4, dtype=torch.bool)
    ours.mask[real] = True
    x = norm_images()
    padded = torch.where(ours.mask[:, None, None, None], x, filling)
    x_grad = padded.clone().requires_grad_()
    out = ours(padded)
    assert torch.equal(out[~ours.mask], ours.bias[:, None, None].expand_as(out[~ours.mask]))  # finite, and no more
    ours, _ = norm_pair()
    ours.mask = torch.zeros(4, dtype=torch.bool)
    ours.mask[real] = True
    out = ours(x_grad)
    ramp = torch.linspace(-1, 1, out[0].numel(), dtype=x.dtype).reshape(out[0].shape)
    grads = torch.autograd.grad((out[real] * ramp).square().sum(), [x_grad, ours.weight, ours.bias])
    expected = run_norm(theirs, x[real])
    result = [out[real], grads[0][real], *grads[1:], ours.running_mean, ours.running_var]
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    assert not grads[0][~ours.mask].any()


def test_one_value_per_channel_has_variance_0():
    for mask in (None, torch.tensor([True])):
        ours, _ = norm_pair()
        mean, var = ours.running_mean.clone(), ours.running_var.clone()
        ours.mask = mask
        x = norm_images(batch=1, size=1)
        results = run_norm(ours, x)
        assert all(value.isfinite().all() for value in results)
        torch.testing.assert_close(results[0].flatten(), ours.bias)
        torch.testing.assert_close(ours.running_mean, 0.9 * mean + 0.1 * x.flatten())
        torch.testing.assert_close(ours.running_var, 0.9 * var)


def test_padding_alone_leaves_the_running_statistics():
    ours, _ = norm_pair()
    before = ours.running_mean.clone(), ours.running_var.clone()
    ours.mask = torch.zeros(4, dtype=torch.bool)
    results = run_norm(ours, norm_images())
    assert all(value.isfinite().all() for value in results)
    assert torch.equal(ours.running_mean, before[0])
    assert torch.equal(ours.running_var, before[1])


def test_evaluation_ignores_the_mask():
    ours, theirs = norm_pair()
    ours.mask = torch.tensor([True, False, False, True])
    assert torch.equal(ours.eval()(norm_images()), theirs.eval()(norm_images()))


def test_half_precision_input_keeps_its_type_and_the_statistics_theirs():
    ours, theirs = norm_pair()
    ours.float(), theirs.float()
    ours.mask = torch.ones(4, dtype=torch.bool)
    x = norm_images().bfloat16()
    one, other = ours(x), theirs(x)
    assert one.dtype == other.dtype == torch.bfloat16
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    assert ours.running_var.dtype == torch.float32


# The mask on its way through a network


def state(module):
    params = {key: value.detach() for key, value in module.named_parameters()}
    return params, {key: value.detach() for key, value in module.named_buffers()}


def test_mask_reaches_every_layer_and_is_taken_back():
    x, mask = images(4), torch.tensor([True, True, False, True])
    padded, plain = (build("resnet10", 3, 32, 10, seed=0).double() for _ in range(2))
    outputs, expected = padded(x, mask), plain(x[mask])
    for one, other in zip(outputs, expected, strict=True):
        torch.testing.assert_close(one[mask], other, rtol=1e-9, atol=1e-9)
    for one, other in zip(padded.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    norms = [layer for layer in padded.modules() if isinstance(layer, MaskedBatchNorm2d)]
    assert all(layer.mask is None for layer in norms)
    with pytest.raises(RuntimeError):  # the first convolution refuses float32 images
        padded(x.float(), mask)
    assert all(layer.mask is None for layer in norms)


def test_evaluation_of_a_network_ignores_the_mask():
    module, x = build("resnet10", 3, 32, 10, seed=0).double().eval(), images(3)
    assert torch.equal(module(x)[1], module(x, torch.tensor([True, False, False]))[1])


@pytest.mark.parametrize("real", [0, 1])
def test_deep_network_stays_finite_with_next_to_no_data(real):
    """In float32 and with maps of one pixel, where padding scaled by 1 / sqrt(eps) in every layer would overflow."""
    module = build("resnet50", 3, 8, 10, seed=0)
    features, logits = module(images(3, size=8, dtype=torch.float32), torch.arange(3) < real)
    assert features.isfinite().all()
    logits[:real].square().sum().add(0 * logits.sum()).backward()
    assert all(value.grad.isfinite().all() for value in module.parameters())
    assert all(value.isfinite().all() for value in module.buffers())


def objective(module):
    """Loss of one client, and its buffers after; padding has no part in it."""

    def loss(params, buffers, x, y, mask):
        buffers = {key: value.clone() for key, value in buffers.items()}
        logits = functional_call(module, (params, buffers), (x, mask))[1]
        each = F.cross_entropy(logits, y, reduction="none")
        return (each.mean() if mask is None else torch.where(mask, each, 0.0).sum() / mask.sum()), buffers

    return loss


@pytest.mark.parametrize(
    ("name", "padded"), [("resnet10", True), ("resnet10", False), ("resnet10-gn", True), ("cnn-small", False)]
)
def test_stacked_clients_agree_with_one_after_the_other(name, padded):
    sizes = [3, 2, 1] if padded else [3, 3, 3]
    modules = [build(name, 3, 16, 10, seed=seed).double() for seed in range(3)]
    draws = torch.Generator().manual_seed(0)
    for value in (value for module in modules for value in module.parameters() if value.dim() == 1):
        nn.init.uniform_(value, 0.5, 1.0, draws)  # biases of 0 after a variance of 0 would leave nothing to compare
    states = [state(module) for module in modules]
    params, buffers = ({key: torch.stack([s[i][key] for s in states]) for key in states[0][i]} for i in (0, 1))
    x, y = torch.stack([images(3, size=16, seed=seed) for seed in range(3)]), torch.arange(9).reshape(3, 3)
    mask = torch.arange(3) < torch.tensor(sizes)[:, None] if padded else None
    stacked = vmap(
        grad(objective(modules[0]), has_aux=True), in_dims=(0, 0, 0, 0, 0 if padded else None), randomness="error"
    )
    before = {key: value.clone() for key, value in buffers.items()}
    grads, after = stacked(params, buffers, x, y, mask)
    assert all(torch.equal(value, before[key]) for key, value in buffers.items())
    for k, size in enumerate(sizes):
        wanted = {key: value.clone().requires_grad_() for key, value in states[k][0].items()}
        loss, updated = objective(modules[k])(wanted, states[k][1], x[k, :size], y[k, :size], None)
        for key, value in zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True):
            assert (grads[key][k] - value).norm() <= 1e-8 * value.norm() + 1e-9
        for key, value in updated.items():
            torch.testing.assert_close(after[key][k], value, rtol=1e-9, atol=1e-9)


# torchvision

DESCRIBE = """
@torch.library.register_fake("torchvision::nms")
def nms(dets, scores, iou_threshold): ...
@torch.library.register_fake("torchvision::qnms")
def qnms(dets, scores, iou_threshold): ...
"""
DEFINE = """
library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
USE = "from fedcli import vision; print(hasattr(vision, '_schemas'), vision.torchvision.loaded)"


def python(code, path=None):
    """Output of a fresh interpreter, which finds the packages in `path` first."""
    code = f"import sys; sys.path[:0] = {[str(path)] * (path is not None) + [str(ROOT)]}\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_installed_torchvision_imports():
    result = python(
        "from fedcli.vision import torchvision as t; print(t.models.resnet18(num_classes=3).fc.out_features)"
    )
    assert (result.stdout, result.returncode) == ("3\n", 0), result.stderr


@pytest.mark.parametrize(
    ("package", "expected"),
    [(DESCRIBE, "True True\n"), (DEFINE + DESCRIBE, "False True\n")],
    ids=["operators missing", "operators there"],
)
def test_schemas_are_declared_only_where_they_are_missing(tmp_path, package, expected):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(f"import torch\n{package}\nloaded = True\n")
    result = python(USE, tmp_path)
    assert result.stdout == expected, result.stderr


def test_other_errors_of_torchvision_are_not_hidden(tmp_path):
    (tmp_path / "torchvision").mkdir()
    once = "import sys\nif not hasattr(sys, 'x'):\n    sys.x = True\n    raise RuntimeError('other CUDA')\n"
    (tmp_path / "torchvision" / "__init__.py").write_text(once)  # a second import would go through
    assert "RuntimeError: other CUDA" in python(USE, tmp_path).stderr


def test_backbones_do_not_wait_for_torchvision():
    result = python(
        "import fedcli.backbones as b; b.build('cnn-small', 1, 8, 10, 0); print('torchvision' in sys.modules)"
    )
    assert result.stdout == "False\n", result.stderr
