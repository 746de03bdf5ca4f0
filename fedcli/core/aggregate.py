"""Means over clients, classes and samples, and quotients and roots that are safe at 0: pure functions of tensors.

A mask `[B]` is False for padding, which counts nowhere; None where every sample is real.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcli.core.trees import Tree, tree_map


def weighted_mean(tree: Tree, weights: Tensor) -> Tree:
    """Returns the mean over the client axis, sum_k weights_k x_k / sum_k weights_k, in each leaf's precision.

    Args:
        tree: Leaves `[K, ...]`. Integer leaves are averaged in float64 and rounded.
        weights: `[K]`, not negative, with a positive sum; they need not be normalised.
    """
    shares = weights.double() / weights.double().sum()

    def mean(leaf: Tensor) -> Tensor:
        if leaf.is_floating_point():
            return torch.tensordot(shares.to(leaf), leaf, dims=1)
        return torch.tensordot(shares.to(leaf.device), leaf.double(), dims=1).round().to(leaf.dtype)

    return tree_map(mean, tree)


def quotient(numerator: Tensor | float, denominator: Tensor) -> Tensor:
    """Returns the quotient, elementwise; 0 where the denominator is not positive, and no gradient is NaN there."""
    is_positive = denominator > 0
    return torch.where(is_positive, numerator / torch.where(is_positive, denominator, 1.0), 0.0)


def root(squares: Tensor) -> Tensor:
    """Returns the square root, elementwise; 0 where a square is 0, and its gradient there is 0 and not infinite."""
    is_positive = squares > 0
    return torch.where(is_positive, torch.where(is_positive, squares, 1.0).sqrt(), 0.0)


def class_sums(features: Tensor, labels: Tensor, num_classes: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the sum `[C, D]` of each class's features `[B, D]`, and its number of examples `[C]` (int64)."""
    member = labels[:, None] == torch.arange(num_classes, device=labels.device)  # [B, C]
    if mask is not None:
        member = member & mask.bool()[:, None]
        features = torch.where(mask.bool()[:, None], features, 0.0)  # a NaN in the padding must not pass
    return member.to(features.dtype).T @ features, member.sum(0)


def mean_by_class(sums: Tensor, counts: Tensor) -> Tensor:
    """Returns the means `[..., C, D]` of sums `[..., C, D]` over counts `[..., C]`; 0 for a class without any."""
    return sums / counts.clamp(min=1)[..., None]


def class_means(
    features: Tensor, labels: Tensor, num_classes: int, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns each class's mean features `[C, D]`, zero for one without examples, and its number of examples `[C]`."""
    sums, counts = class_sums(features, labels, num_classes, mask)
    return mean_by_class(sums, counts), counts


def masked_mean(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns the mean of values `[B]` over the real samples; 0 if there are none."""
    if mask is None:
        return values.mean()
    mask = mask.bool()
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def cross_entropy(logits: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns the mean cross-entropy of logits `[B, C]` and labels `[B]` over the real samples."""
    return masked_mean(F.cross_entropy(logits, labels, reduction="none"), mask)


def divergence(logits: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns KL(softmax(teacher) || softmax(logits)), mean over the real samples; a scalar, in nats.

    Args:
        logits: `[B, C]`.
        teacher: Logits `[B, C]`.
        mask: `[B]`, False for padding.
    """
    target = F.log_softmax(teacher, -1)
    return masked_mean((target.exp() * (target - F.log_softmax(logits, -1))).sum(-1), mask)
