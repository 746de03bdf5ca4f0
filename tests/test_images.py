"""Resizing and augmentation, against torchvision and slow loops."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from fedcli.core.augment import NUM_DRAWS, TRIES, augment, colour_jitter, crop_flip, resized_crop
from fedcli.core.backbones import torchvision
from fedcli.core.batches import Transform, generator
from fedcli.data import catalog
from fedcli.declarations import PublicSetting
from fedcli.runs.prepare import make_federation
from tests import laws

F = torchvision().transforms.functional
COLOUR = slice(2 * TRIES + 3, None)


def random_images(count=12, channels=3, size=16, seed=0, dtype=torch.float64):
    return torch.rand(count, channels, size, size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def random_draws(augmentation, count=12, seed=1):
    return torch.rand(count, NUM_DRAWS[augmentation], generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("before", "after"), [(16, 28), (28, 16), (64, 32), (9, 9)])
def test_resizing_is_pillows_to_a_rounding(before, after, monkeypatch):
    monkeypatch.setattr(catalog, "_RESIZED_AT_ONCE", 4)
    pixels = (random_images(6, size=before) * 255).round().to(torch.uint8)
    ours = catalog.resize(pixels, after)
    assert (ours.dtype, ours.shape) == (torch.uint8, (6, 3, after, after))
    for image, resized in zip(pixels.movedim(1, 3).numpy(), ours.movedim(1, 3).numpy(), strict=True):
        theirs = Image.fromarray(image).resize((after, after), Image.Resampling.BILINEAR)
        assert abs(resized.astype(int) - np.asarray(theirs)).max() <= 1


def slow_box(draw, height, width):
    """The rectangle of one image by torchvision's rule: the first try that fits."""
    for number in range(TRIES):
        area = height * width * (0.2 + 0.8 * float(draw[2 * number]))
        ratio = math.exp(math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * float(draw[2 * number + 1]))
        columns, rows = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < columns <= width and 0 < rows <= height:
            break
    else:
        rows, columns = height, width
    top, left = (math.floor(float(draw[-3]) * (height - rows + 1)), math.floor(float(draw[-2]) * (width - columns + 1)))
    return top, left, rows, columns


@pytest.mark.parametrize("channels", [1, 3])
def test_resized_crop_is_torchvisions(channels):
    x, draws = random_images(40, channels), random_draws("resized-crop", 40)
    draws[0, :20] = torch.tensor([0.99, 0.0] * 10)  # no try fits: the whole image
    draws[1, :20] = torch.tensor([0.99, 1.0 - 1e-6] * 9 + [0.0, 0.5])  # the last one does
    assert [slow_box(draw, 16, 16)[2:] for draw in draws[:2]] == [(16, 16), (7, 7)]
    ours = resized_crop(x, draws)
    for n in range(40):
        top, left, rows, columns = slow_box(draws[n], 16, 16)
        theirs = F.resized_crop(x[n], top, left, rows, columns, [16, 16], antialias=True)
        theirs = F.hflip(theirs) if draws[n, -1] < 0.5 else theirs
        torch.testing.assert_close(ours[n], theirs, rtol=0, atol=1e-12)


def slow_jitter(image, draw):
    """torchvision's ColorJitter and RandomGrayscale with the parameters that the draws stand for."""
    strengths = [1 + 0.4 * (2 * float(u) - 1) for u in draw[5:8]]
    changes = [
        lambda x: F.adjust_brightness(x, strengths[0]),
        lambda x: F.adjust_contrast(x, strengths[1]),
        lambda x: F.adjust_saturation(x, strengths[2]),
        lambda x: F.adjust_hue(x, 0.1 * (2 * float(draw[8]) - 1)),
    ]
    if draw[0] < 0.8:
        for number in sorted(range(4), key=lambda i: float(draw[1 + i])):
            image = changes[number](image)
    return F.rgb_to_grayscale(image, 3) if draw[9] < 0.2 else image


def test_colour_jitter_is_torchvisions():
    x, draws = random_images(60), random_draws("resized-crop-colour", 60)[:, COLOUR]
    x[0], x[1, :, :8], x[2, 0] = 0.5, 0.0, 1.0  # grey, black and saturated pixels
    ours = colour_jitter(x, draws)
    for n in range(60):
        # Its change of hue is in float32.
        torch.testing.assert_close(ours[n], slow_jitter(x[n], draws[n]), rtol=0, atol=5e-6)
    assert 0 <= ours.min() < ours.max() <= 1


def test_grey_images_stay_grey_and_keep_their_channel():
    x, draws = random_images(30, channels=1), random_draws("resized-crop-colour", 30)[:, COLOUR]
    three = colour_jitter(x.expand(-1, 3, -1, -1), draws)
    torch.testing.assert_close(three, colour_jitter(x, draws).expand(-1, 3, -1, -1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("augmentation", NUM_DRAWS)
def test_augmentation_by_name_through_the_transform(augmentation):
    pixels, draws = (random_images(6) * 255).to(torch.uint8), random_draws(augmentation, 6)
    x = pixels.double() / 255
    expected = {
        "none": lambda: x,
        "crop-flip": lambda: crop_flip(x, draws, rotate=False),
        "crop-flip-rotate": lambda: crop_flip(x, draws, rotate=True),
        "resized-crop": lambda: resized_crop(x, draws),
        "resized-crop-colour": lambda: colour_jitter(resized_crop(x, draws[:, :23]), draws[:, 23:]),
    }[augmentation]()
    assert torch.equal(augment(x, draws, augmentation), expected)
    transform = Transform((0.0,) * 3, (1.0,) * 3, augmentation, torch.float64)
    stacked = transform(pixels.reshape(2, 3, 3, 16, 16), draws.reshape(2, 3, -1))
    torch.testing.assert_close(stacked.flatten(0, 1), expected)
    assert torch.equal(transform(pixels), x)
    single = Transform((0.0,) * 3, (1.0,) * 3, augmentation, torch.float32)(pixels, draws)
    torch.testing.assert_close(single, expected.float(), rtol=0, atol=1e-5)


def test_public_and_private_batches_get_the_draws_of_their_augmentation():
    setup, _ = laws.federation("fedavg")
    public = {"toy": PublicSetting((0.0,), (1.0,), "here", "resized-crop")}
    setting = replace(setup.setting, mean=(0.0,), std=(1.0,), augmentation="resized-crop-colour")
    run = replace(setup.run, public_dataset="toy", public_batch_size=25)
    setup = replace(setup, protocol=replace(setup.protocol, public=public), setting=setting, run=run)
    data = laws.toy_dataset()
    fed = make_federation(setup, data, laws.toy_parts(), data)
    assert fed.plan(fed.cohort(0)).draws.shape[-1] == NUM_DRAWS["resized-crop-colour"]
    order = generator(run.seed, 2, "public order", 0).permutation(60)
    uniform = generator(run.seed, 2, "public augment", 0).random((60, NUM_DRAWS["resized-crop"])).astype(np.float32)
    expected = resized_crop(data.x_train[order].double() / 255, torch.tensor(uniform))
    batches = list(fed.public_batches(2))
    assert [len(batch.x) for batch in batches] == [25, 25, 10]
    torch.testing.assert_close(torch.cat([batch.x for batch in batches]), expected)
