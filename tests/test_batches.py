"""Draws: what they depend on, what they cover; augmentation against a slow loop."""

import math

import numpy as np
import pytest
import torch

from fedcli.core.augment import crop_flip
from fedcli.core.batches import Transform, plan_batches
from tests import laws

PARTS = [np.arange(0, 10), np.arange(10, 13), np.arange(13, 13)]


def plan(parts=PARTS, clients=(4, 7, 9), seed=0, round=0, epochs=range(2), drop_last=False, num_draws=4):
    return plan_batches(parts, clients, seed, round, epochs, 4, drop_last, num_draws)


def test_every_epoch_covers_each_client_once():
    drawn = plan()
    assert drawn.steps.tolist() == [6, 2, 0]
    assert drawn.num_batches.tolist() == [[3, 1, 0]] * 6
    for k, part in enumerate(PARTS):
        for epoch in range(2):
            count = drawn.num_batches[0, k]
            seen = [i for t in range(epoch * count, (epoch + 1) * count) for i in drawn.index[t, k, : drawn.size[t, k]]]
            assert sorted(seen) == part.tolist()
    assert np.flatnonzero(drawn.epoch_end[:, 0]).tolist() == [2, 5]
    assert np.flatnonzero(drawn.epoch_end[:, 1]).tolist() == [0, 1]
    assert not drawn.epoch_end[:, 2].any()


def test_drop_last_leaves_incomplete_batches_out():
    drawn = plan(drop_last=True)
    assert drawn.steps.tolist() == [4, 0, 0]
    assert set(drawn.size[drawn.size > 0]) == {4}


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
    run = {"num_clients": 20, "cohort_size": 5, "parts": laws.toy_parts([1] * 20)}
    federations = [laws.federation("fedavg", seed=seed, **run)[1] for seed in (0, 1)]
    cohorts = [tuple(federations[0].cohort(number).client_ids) for number in range(50)]
    assert all(list(cohort) == sorted(set(cohort)) and len(cohort) == 5 for cohort in cohorts)
    assert len(set(cohorts)) > 40
    assert {client for cohort in cohorts for client in cohort} == set(range(20))
    assert tuple(federations[1].cohort(0).client_ids) != cohorts[0]


def slow_augment(image, draw, rotate):
    """One grey image, pixel by pixel: turn(mirror(crop(pad(image))))."""
    size = len(image)
    right, down = (math.floor(float(draw[i]) * 9) - 4 for i in (0, 1))
    padded = np.pad(image, 4)
    cropped = padded[4 + down : 4 + down + size, 4 + right : 4 + right + size]
    mirrored = cropped[:, ::-1] if draw[2] < 0.5 else cropped
    if not rotate:
        return mirrored
    angle = math.radians((2 * float(draw[3]) - 1) * 15)
    out = np.zeros_like(image)
    middle = (size - 1) / 2
    for i in range(size):
        for j in range(size):
            row = math.cos(angle) * (i - middle) - math.sin(angle) * (j - middle) + middle
            column = math.sin(angle) * (i - middle) + math.cos(angle) * (j - middle) + middle
            if 0 <= round(row) < size and 0 <= round(column) < size:
                out[i, j] = mirrored[round(row), round(column)]
    return out


@pytest.mark.parametrize("rotate", [False, True])
def test_augmentation_against_a_slow_loop(rotate):
    draw = np.random.default_rng(0)
    images, draws = draw.random((30, 1, 9, 9)), draw.random((30, 4)).astype(np.float32)
    ours = crop_flip(torch.tensor(images), torch.tensor(draws), rotate)
    for n in range(30):
        np.testing.assert_array_equal(ours[n, 0].numpy(), slow_augment(images[n, 0], draws[n], rotate))


def test_transform_normalises_each_channel():
    images = torch.randint(0, 256, (2, 3, 3, 5, 5), dtype=torch.uint8)
    transform = Transform((0.1, 0.2, 0.3), (0.5, 1.0, 2.0), "none", torch.float64)
    out = transform(images)
    assert out.dtype == torch.float64
    for c, (mean, std) in enumerate(zip((0.1, 0.2, 0.3), (0.5, 1.0, 2.0), strict=True)):
        torch.testing.assert_close(out[:, :, c], (images[:, :, c] / 255.0 - mean) / std, check_dtype=False)
