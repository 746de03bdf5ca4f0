"""EWC: hold the weights that matter for what was learnt before. A local objective, not a method of its own.

J. Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks", PNAS 2017,
https://arxiv.org/abs/1612.00796. Eq. 3. FCCL+ compares its distillation with it (Table 16; `--regularizer ewc`).

    L(theta) = L_B(theta) + lambda sum_i F_i / 2 (theta_i - theta*_i)^2
    F_i = E_x E_{y ~ p(y | x, theta*)} (d log p(y | x, theta*) / d theta_i)^2

L_B is the cross-entropy on the data of now, theta* the weights after what was learnt before, and F the diagonal of the
Fisher information at theta*, on the data of then.

Notation
    code                paper           shape
    params              theta           dict of tensors
    anchor.params       theta*_A        dict of tensors
    anchor.fisher       F               dict of tensors as params
    weight              lambda

Readings
    1. The label of each image is drawn from the model's own prediction, as the definition of F has it, so the images
       need no labels. Draws are those of a seed, a round and a client.
    2. One gradient an image is squared; the square of a batch's mean gradient is another thing, and smaller.
    3. The model is in evaluation mode, so that an image's gradient does not depend on the others.
"""

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcli.core import Buffers, Client, LocalLoss, Network, Params, model_of, plain_loss, stack
from fedcli.core.federation import Cohort, Federation


class Anchor(NamedTuple):
    """What a client holds on to; the context of its local objective, with axes 0."""

    params: Params  # theta*_A
    fisher: Params  # F


def penalty(params: Params, anchor: Anchor) -> Tensor:
    """Eq. 3 without lambda: sum_i F_i / 2 (theta_i - theta*_i)^2, a scalar.

    Args:
        params: theta.
        anchor: theta* and F, with the same names and shapes.
    """
    parts = [(anchor.fisher[name] * (value - anchor.params[name]).square()).sum() for name, value in params.items()]
    return cast(Tensor, sum(parts)) / 2


def draw_labels(logits: Tensor, uniform: Tensor) -> Tensor:
    """Labels `[B]` drawn from softmax(logits) `[B, C]` by uniform draws `[B]` in [0, 1)."""
    below = F.softmax(logits, dim=1).cumsum(1) <= uniform[:, None]
    return below.sum(1).clamp(max=logits.shape[1] - 1)  # rounding may leave the last sum below 1


def fisher_diagonal(network: Network, params: Params, buffers: Buffers, x: Tensor, uniform: Tensor) -> Params:
    """F, as `params`: the mean over images of the squared gradient of log p(y | x), with y drawn from the model.

    Args:
        network: The client's network.
        params: theta*.
        buffers: Of the same model.
        x: `[B, channels, H, W]`.
        uniform: `[B]`, draws in [0, 1), one for each label.
    """
    wanted = {name: value.detach().requires_grad_() for name, value in params.items()}
    total = {name: torch.zeros_like(value) for name, value in params.items()}
    for image, draw in zip(x, uniform, strict=True):  # on a CPU core `vmap` takes half as long again
        logits = network(wanted, buffers, image[None], train=False).logits  # Reading 3
        label = draw_labels(logits.detach(), draw[None])  # Reading 1
        loss = F.cross_entropy(logits, label)
        grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True, materialize_grads=True)
        # Reading 2
        total = {name: total[name] + grad.square() for name, grad in zip(wanted, grads, strict=True)}
    return {name: value / len(x) for name, value in total.items()}


def anchors(clients: Client, cohort: Cohort, fed: Federation, x: Tensor) -> Anchor:
    """The clients' models as they are, with F on the images `x` that all are given; stacked `[K, ...]`."""
    diagonals = []
    for k, client in enumerate(cohort.client_ids):
        draws = fed.generator(cohort.round, client, "fisher").random(len(x))
        uniform = torch.as_tensor(draws, dtype=fed.dtype, device=fed.device)
        model = model_of(clients, k)
        diagonals.append(fisher_diagonal(cohort.network, model.params, model.buffers, x, uniform))
    return Anchor(clients.params, stack(diagonals))


def make_local_loss(network: Network, weight: float) -> LocalLoss:
    """The objective of Eq. 3: cross-entropy + lambda penalty; its context is the client's `Anchor`."""
    task = plain_loss(network)

    def local_loss(params, buffers, batch, anchor):
        loss, aux = task(params, buffers, batch, None)
        held = penalty(params, anchor)
        return loss + weight * held, aux.with_term("ewc", held)

    return local_loss
