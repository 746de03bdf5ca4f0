"""Draws: what they depend on and what they cover; resizing and augmentation, against torchvision and plain loops."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from fedcli import toy
from fedcli.core.augment import NUM_DRAWS, TRIES, Transform, augment, colour_jitter, crop_flip, resized_crop
from fedcli.core.batches import plan_batches
from fedcli.core.draws import generator
from fedcli.core.parts import Parts
from fedcli.data import resizing
from fedcli.declarations import PublicSetting
from fedcli.runs.prepare import make_federation
from fedcli.vision import torchvision

PARTS = [np.arange(0, 10), np.arange(10, 13), np.arange(13, 13)]


def plan(parts=PARTS, clients=(4, 7, 9), seed=0, round=0, epochs=range(2), drop_last=False, num_draws=4):
    return plan_batches(parts, clients, seed, round, epochs, 4, drop_last, num_draws)


def test_every_epoch_covers_each_client_once():
    drawn = plan()
    assert drawn.num_steps.tolist() == [6, 2, 0]
    assert drawn.num_batches.tolist() == [[3, 1, 0]] * 6

    for k, part in enumerate(PARTS):
        count = drawn.num_batches[0, k]
        for epoch in range(2):
            examples = []
            for step in range(epoch * count, (epoch + 1) * count):
                size = drawn.size[step, k]
                examples += drawn.index[step, k, :size].tolist()
            assert sorted(examples) == part.tolist()
    assert np.flatnonzero(drawn.epoch_end[:, 0]).tolist() == [2, 5]
    assert np.flatnonzero(drawn.epoch_end[:, 1]).tolist() == [0, 1]
    assert not drawn.epoch_end[:, 2].any()


def test_drop_last_leaves_incomplete_batches_out():
    drawn = plan(drop_last=True)
    assert drawn.num_steps.tolist() == [4, 0, 0]
    assert set(drawn.size[drawn.size > 0]) == {4}


@pytest.mark.parametrize("drop_last", [False, True])
def test_local_steps_are_those_of_the_batches_that_are_drawn(drop_last):
    _, fed = toy.federation("fedavg", parts=toy.toy_parts((0, 3, 8, 9)), local_epochs=2, drop_last=drop_last)
    cohort = fed.cohort(0)
    assert fed.local_steps(cohort).tolist() == fed.plan(cohort).num_steps.tolist()
    assert len(set(fed.local_steps(cohort).tolist())) > 1


def test_draws_depend_on_seed_round_client_and_epoch_and_on_nothing_else():
    base = plan()
    alone = plan_batches([PARTS[1]], [7], 0, 0, range(2), 4, False, 4)
    assert (alone.index[:2, 0] == base.index[:2, 1]).all()
    assert (alone.draws[:2, 0] == base.draws[:2, 1]).all()

    second = plan(epochs=range(1, 2))
    assert (second.index[:, 0] == base.index[3:, 0]).all()
    assert (second.draws[:, 0] == base.draws[3:, 0]).all()

    for other in (plan(seed=1), plan(round=1), plan(clients=(5, 7, 9))):
        assert (other.index[:, 0] != base.index[:, 0]).any()
    assert (base.index[:3, 0] != base.index[3:, 0]).any()
    assert (plan(num_draws=0).index == base.index).all()


def test_cohorts_are_sorted_distinct_and_new_every_round():
    run = {"num_clients": 20, "cohort_size": 5, "parts": toy.toy_parts([1] * 20)}
    _, fed = toy.federation("fedavg", seed=0, **run)
    _, fed_of_another_seed = toy.federation("fedavg", seed=1, **run)

    cohorts = [tuple(fed.cohort(number).client_ids) for number in range(50)]
    for cohort in cohorts:
        assert len(cohort) == 5
        assert list(cohort) == sorted(set(cohort))
    assert len(set(cohorts)) > 40
    assert set().union(*cohorts) == set(range(20))
    assert tuple(fed_of_another_seed.cohort(0).client_ids) != cohorts[0]


def augment_plainly(image, draw, rotate):
    """One grey image, pixel by pixel: turn(mirror(crop(pad(image))))."""
    size = len(image)
    right_draw, down_draw, mirror_draw, angle_draw = draw.astype(float)
    right = math.floor(right_draw * 9) - 4
    down = math.floor(down_draw * 9) - 4
    padded = np.pad(image, (4, 5))
    cropped = padded[4 + down : 4 + down + size, 4 + right : 4 + right + size]
    mirrored = cropped[:, ::-1] if mirror_draw < 0.5 else cropped
    if not rotate:
        return mirrored

    angle = math.radians((2 * angle_draw - 1) * 15)
    out = np.zeros_like(image)
    middle = (size - 1) / 2
    for i, j in np.ndindex(size, size):
        row = math.cos(angle) * (i - middle) - math.sin(angle) * (j - middle) + middle
        column = math.sin(angle) * (i - middle) + math.cos(angle) * (j - middle) + middle
        if 0 <= round(row) < size and 0 <= round(column) < size:
            out[i, j] = mirrored[round(row), round(column)]
    return out


@pytest.mark.parametrize("rotate", [False, True])
def test_cropping_mirroring_and_turning_are_those_of_a_plain_loop_over_pixels(rotate):
    draw = np.random.default_rng(0)
    images = draw.random((30, 1, 9, 9))
    draws = draw.random((30, 4)).astype(np.float32)
    draws[0] = 1  # as float32 rounds what is next to it
    ours = crop_flip(torch.tensor(images), torch.tensor(draws), rotate)
    for image, image_draws, augmented in zip(images[:, 0], draws, ours[:, 0].numpy(), strict=True):
        np.testing.assert_array_equal(augmented, augment_plainly(image, image_draws, rotate))


def test_transform_normalises_each_channel():
    means = (0.1, 0.2, 0.3)
    stds = (0.5, 1.0, 2.0)
    images = torch.randint(0, 256, (2, 3, 3, 5, 5), dtype=torch.uint8)
    transform = Transform(means, stds, "none", torch.float64)
    normalised = transform(images)
    assert normalised.dtype == torch.float64
    for channel in range(3):
        expected = (images[:, :, channel] / 255.0 - means[channel]) / stds[channel]
        torch.testing.assert_close(normalised[:, :, channel], expected, check_dtype=False)


# Resizing and augmentation, against torchvision and plain loops


F = torchvision().transforms.functional
COLOUR = slice(2 * TRIES + 3, None)


def random_images(count=12, channels=3, size=16, seed=0, dtype=torch.float64):
    return torch.rand(count, channels, size, size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def random_draws(augmentation, count=12, seed=1):
    return torch.rand(count, NUM_DRAWS[augmentation], generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("before", "after"), [(16, 28), (28, 16), (64, 32), (9, 9)])
def test_resizing_is_pillows_to_a_rounding(before, after, monkeypatch):
    monkeypatch.setattr(resizing, "RESIZED_AT_ONCE", 4)
    pixels = (random_images(6, size=before) * 255).round().to(torch.uint8)
    ours = resizing.resize(pixels, after)
    assert ours.dtype == torch.uint8
    assert ours.shape == (6, 3, after, after)
    for image, resized in zip(pixels.movedim(1, 3).numpy(), ours.movedim(1, 3).numpy(), strict=True):
        theirs = Image.fromarray(image).resize((after, after), Image.Resampling.BILINEAR)
        assert abs(resized.astype(int) - np.asarray(theirs)).max() <= 1


def find_box_plainly(draw, height, width):
    """The rectangle of one image by torchvision's rule: the first try that fits."""
    for number in range(TRIES):
        area = height * width * (0.2 + 0.8 * float(draw[2 * number]))
        ratio = math.exp(math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * float(draw[2 * number + 1]))
        columns = round(math.sqrt(area * ratio))
        rows = round(math.sqrt(area / ratio))
        if 0 < columns <= width and 0 < rows <= height:
            break
    else:
        rows, columns = height, width
    top = math.floor(float(draw[-3]) * (height - rows + 1))
    left = math.floor(float(draw[-2]) * (width - columns + 1))
    return top, left, rows, columns


@pytest.mark.parametrize("channels", [1, 3])
def test_resized_crop_is_torchvisions(channels):
    x = random_images(40, channels)
    draws = random_draws("resized-crop", 40)
    draws[0, :20] = torch.tensor([0.99, 0.0] * 10)  # no try fits: the whole image
    draws[1, :20] = torch.tensor([0.99, 1.0 - 1e-6] * 9 + [0.0, 0.5])  # the last one does
    _, _, rows, columns = find_box_plainly(draws[0], 16, 16)
    assert (rows, columns) == (16, 16)
    _, _, rows, columns = find_box_plainly(draws[1], 16, 16)
    assert (rows, columns) == (7, 7)

    beyond = draws[:2].clone()
    beyond[:, 20:22] = 1.0  # a draw just below it, rounded to float32
    just_below = draws[:2].clone()
    just_below[:, 20:22] = 1.0 - 1e-6
    assert torch.equal(resized_crop(x[:2], beyond), resized_crop(x[:2], just_below))

    ours = resized_crop(x, draws)
    for image, draw, cropped in zip(x, draws, ours, strict=True):
        top, left, rows, columns = find_box_plainly(draw, 16, 16)
        theirs = F.resized_crop(image, top, left, rows, columns, [16, 16], antialias=True)
        if draw[-1] < 0.5:
            theirs = F.hflip(theirs)
        torch.testing.assert_close(cropped, theirs, rtol=0, atol=1e-12)


def jitter_plainly(image, draw):
    """torchvision's ColorJitter and RandomGrayscale with the parameters that the draws stand for."""
    jitter_draw, *order_draws, brightness, contrast, saturation, hue, grey_draw = draw.tolist()
    changes = [
        lambda x: F.adjust_brightness(x, 1 + 0.4 * (2 * brightness - 1)),
        lambda x: F.adjust_contrast(x, 1 + 0.4 * (2 * contrast - 1)),
        lambda x: F.adjust_saturation(x, 1 + 0.4 * (2 * saturation - 1)),
        lambda x: F.adjust_hue(x, 0.1 * (2 * hue - 1)),
    ]
    if jitter_draw < 0.8:
        for number in np.argsort(order_draws):
            image = changes[number](image)
    return F.rgb_to_grayscale(image, 3) if grey_draw < 0.2 else image


def test_colour_jitter_is_torchvisions():
    x = random_images(60)
    draws = random_draws("resized-crop-colour", 60)[:, COLOUR]
    x[0] = 0.5  # grey pixels
    x[1, :, :8] = 0.0  # black ones
    x[2, 0] = 1.0  # saturated ones
    ours = colour_jitter(x, draws)
    for image, draw, jittered in zip(x, draws, ours, strict=True):
        # torchvision's change of hue is in float32.
        torch.testing.assert_close(jittered, jitter_plainly(image, draw), rtol=0, atol=5e-6)
    assert 0 <= ours.min() < ours.max() <= 1


def test_grey_images_stay_grey_and_keep_their_channel():
    x = random_images(30, channels=1)
    draws = random_draws("resized-crop-colour", 30)[:, COLOUR]
    three = colour_jitter(x.expand(-1, 3, -1, -1), draws)
    torch.testing.assert_close(three, colour_jitter(x, draws).expand(-1, 3, -1, -1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("augmentation", NUM_DRAWS)
def test_the_transform_augments_by_the_name_of_its_augmentation(augmentation):
    pixels = (random_images(6) * 255).to(torch.uint8)
    draws = random_draws(augmentation, 6)
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


def test_an_unknown_augmentation_is_no_other_one():
    for name in ("colour", "crop-flip-turn"):
        with pytest.raises(ValueError, match=f"unknown augmentation '{name}'"):
            augment(torch.rand(2, 3, 8, 8), torch.rand(2, 33), name)


def test_public_and_private_batches_get_the_draws_of_their_augmentation():
    setup, _ = toy.federation("fedavg")
    public = {"toy": PublicSetting((0.0,), (1.0,), "here", "resized-crop")}
    setting = replace(setup.data_setting, mean=(0.0,), std=(1.0,), augmentation="resized-crop-colour")
    config = replace(setup.config, public_dataset="toy", public_batch_size=25)
    setup = replace(setup, protocol=replace(setup.protocol, public=public), data_setting=setting, config=config)
    data = toy.toy_dataset()
    fed = make_federation(setup, data, Parts(toy.toy_parts()), data)
    assert fed.plan(fed.cohort(0)).draws.shape[-1] == NUM_DRAWS["resized-crop-colour"]

    order = generator(config.seed, 2, "public order", 0).permutation(60)
    uniform = generator(config.seed, 2, "public augment", 0).random((60, NUM_DRAWS["resized-crop"])).astype(np.float32)
    expected = resized_crop(data.x_train[order].double() / 255, torch.tensor(uniform))
    batches = list(fed.public_batches(2))
    assert [len(batch.x) for batch in batches] == [25, 25, 10]
    torch.testing.assert_close(torch.cat([batch.x for batch in batches]), expected)
