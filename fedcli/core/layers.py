"""Layers that torch has not in the form that training many clients together needs."""

from math import prod

import torch
from torch import Tensor, nn


class MaskedBatchNorm2d(nn.BatchNorm2d):
    """Batch normalisation whose statistics leave out the padding of a batch.

    Without a mask it is torch's; so it is in evaluation, where the running statistics are used and the mask does not
    matter. A batch with one value per channel, which torch refuses, is normalised with variance 0.

    Attributes:
        mask: `[B]`, False for padding; set by the network for the time of one forward pass.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1):
        super().__init__(num_features, eps, momentum)
        self.num_batches_tracked = None  # an integer buffer, which could not be averaged; only `momentum=None` needs it
        self.mask: Tensor | None = None

    # BatchNorm's own version looks for `num_batches_tracked` in a plain dict of tensors.
    _load_from_state_dict = nn.Module._load_from_state_dict

    def forward(self, x: Tensor) -> Tensor:
        """Normalises activations `[B, C, H, W]`; in training a row of padding comes out as the bias.

        The running statistics are then updated in place.
        """
        single = x.numel() == x.shape[1]
        if not self.training or (self.mask is None and not single):
            return super().forward(x)
        mask = x.new_ones(len(x), dtype=torch.bool) if self.mask is None else self.mask
        return self._normalise(x.to(self.running_mean.dtype), mask[:, None, None, None]).to(x.dtype)

    def _normalise(self, x: Tensor, real: Tensor) -> Tensor:
        """Normalises in training over the rows `real` `[B, 1, 1, 1]`; without a branch on data, for the sake of vmap.

        The padding is taken out by `where`, before and after the mean: whatever stands there, NaN included, reaches
        neither sums nor gradients. Its output is the bias and not a multiple of 1 / sqrt(eps), which would overflow
        after some layers where the real rows have no variance.
        """
        # Values per channel, in the type of x: from integers torch would make quotients in float32.
        values = real.sum().to(x.dtype) * (x.shape[2] * x.shape[3])
        divisor = values.clamp(min=1)  # a batch of padding only
        mean = torch.where(real, x, 0.0).sum((0, 2, 3)) / divisor
        centred = torch.where(real, x - mean[:, None, None], 0.0)
        var = centred.square().sum((0, 2, 3)) / divisor
        with torch.no_grad():
            rate = self.momentum * (values > 0).to(x.dtype)
            unbiased = var * (divisor / (values - 1).clamp(min=1))
            self.running_mean.add_(rate * (mean - self.running_mean))
            self.running_var.add_(rate * (unbiased - self.running_var))
        scale = self.weight * (var + self.eps).rsqrt()
        return centred * scale[:, None, None] + self.bias[:, None, None]


class KeyedDropout(nn.Module):
    """Dropout whose mask is computed from a key: randomness that arrives as data.

    A value is kept or not by a hash of the key, the layer's number, and its place in the batch and in the example.
    Equal keys give equal masks, whatever else the batch holds and whichever clients are trained together.

    Attributes:
        key: int64 scalar, a buffer; whoever trains puts a new one there before each step.
        number: Tells the layers of one network apart; set by the network.
    """

    def __init__(self, p: float, whole_examples: bool = False):
        """Makes a layer that drops nothing in evaluation.

        Args:
            p: Probability of being set to 0, in [0, 1); what is kept is divided by 1 - p.
            whole_examples: Drop all values of an example together (stochastic depth), or each by itself.
        """
        super().__init__()
        self.p, self.whole_examples, self.number = p, whole_examples, 0
        self.key: Tensor
        self.register_buffer("key", torch.tensor(0), persistent=False)  # no part of what the network has learned

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x` `[B, ...]` with some of its values set to 0 in training; as it is in evaluation."""
        if not self.training:
            return x
        shape = (len(x), *[1] * (x.dim() - 1)) if self.whole_examples else x.shape
        dropped = _random_words(self.key, self.number, shape) < round(self.p * 2**32)
        return torch.where(dropped, 0.0, x / (1 - self.p))


_WORD = 2**32 - 1


def _random_words(key: Tensor, number: int, shape: tuple[int, ...]) -> Tensor:
    """Returns integers in [0, 2^32) that look random, int64 of a shape; a function of key, number and place alone.

    The step from one number to the next, 2^32 divided by the golden ratio, keeps 100 layers apart as long as none has
    more than 20 million values.
    """
    words = torch.arange(prod(shape), device=key.device).reshape(shape) + (number + 1) * 0x9E3779B9
    for part in (key & _WORD, (key >> 32) & _WORD):
        words = _mix(words & _WORD) + _mix(part)
    return _mix(words & _WORD)


def _mix(word: Tensor) -> Tensor:
    """Permutes the integers below 2^32 such that every bit of the result depends on every bit of the argument.

    Shifts and multiplications in turn; the factors are below 2^30, so that no product leaves int64.
    """
    word = (word ^ (word >> 15)) * 0x2C1B3C6D & _WORD
    word = (word ^ (word >> 12)) * 0x297A2D39 & _WORD
    return word ^ (word >> 15)
