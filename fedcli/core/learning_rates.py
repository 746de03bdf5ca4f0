"""Learning rates: how they change from round to round, and how far a step goes at one."""

import math

from fedcli.errors import UserError


def schedule_factor(schedule: str, round: int, num_rounds: int) -> float:
    """Returns the factor on the learning rate of a round, counted from 0, over T rounds.

    Args:
        schedule: `constant`; `linear`, 1 - 0.9 max(round - 1, 0) / T, which has the full rate in rounds 0 and 1;
            `cosine`, (1 + cos(pi round / T)) / 2, as `torch.optim.lr_scheduler.CosineAnnealingLR` down to 0; or
            `step`, a tenth from half of the rounds and a hundredth from three quarters.
        round: The round.
        num_rounds: T.
    """
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return 1 - 0.9 * max(round - 1, 0) / num_rounds
    if schedule == "cosine":
        return cosine_annealing(1.0, round, num_rounds)
    if schedule == "step":
        if 4 * round >= 3 * num_rounds:
            return 0.1**2
        return 0.1 if 2 * round >= num_rounds else 1.0
    raise UserError(
        f"unknown schedule of the learning rate (got '{schedule}'); use --lr-schedule constant, linear, cosine or step."
    )


def cosine_annealing(lr: float, step: int, steps: int) -> float:
    """Returns the learning rate of a step, from `lr` down towards 0."""
    return lr * (1 + math.cos(math.pi * step / steps)) / 2


def step_length(lr: float, momentum: float) -> float:
    """Returns the length of a local step along a constant gradient, eta / (1 - rho) with momentum rho.

    Args:
        lr: eta.
        momentum: rho, in [0, 1).
    """
    return lr / (1 - momentum)
