"""Refusals of problems whose optimizer a peer does not have."""

from agreement.exchange import Problem


def refuse_momentum(problem: Problem) -> None:
    """Refuses a problem with momentum, of which a peer knows nothing.

    Raises:
        ValueError: If the problem has momentum.
    """
    if problem.momentum:
        raise ValueError(f"its clients train without momentum (got {problem.momentum}).")


def refuse_weight_decay(problem: Problem, *, fixed: float) -> None:
    """Refuses a problem with a weight decay that is not the one that a peer has, whatever it is told.

    A problem without weight decay is taken: that the peer has one nevertheless is what a row shows.

    Raises:
        ValueError: If the problem has another weight decay.
    """
    if problem.weight_decay not in (0, fixed):
        raise ValueError(f"its clients train with weight decay {fixed} (got {problem.weight_decay}).")
