"""CCVR: classifier calibration with virtual representations, a step after the last round of any other method.

M. Luo, F. Chen, D. Hu, Y. Zhang, J. Liang, J. Feng, "No Fear of Heterogeneity: Classifier Calibration for Federated
Learning with Non-IID Data", NeurIPS 2021, https://arxiv.org/abs/2106.05001.

The last layer is the one that skewed labels spoil most. After training, the server learns from the clients how the
features of each class are distributed, as a Gaussian, draws features from these and trains the classifier on them; the
feature extractor stays as it is. Section 4.

Notation
    code                       paper                 shape
    features                   z = f_theta(x)        [n, D], the input of the last fully connected layer
    Statistics.counts          N_c,k; N_c            [C]
    Statistics.means           mu_c,k; mu_c          [C, D]
    Statistics.covariances     Sigma_c,k; Sigma_c    [C, D, D]
    params["head..."]          phi                   classifier
    ccvr_examples              M_c

Readings and deviations
    1. All clients send, not those of one round alone. Each looks at the images it trains on, without augmentation.
    2. M_c may follow the share of a class; in the paper's experiments it is one number, 100 for CIFAR-10 and 500 for
       CIFAR-100 (as others report; not checked against the PDF). One number here. A class that no client has is not
       drawn; a class of a single example is that feature again and again.
    3. Epochs, learning rate, momentum and batch size of retraining are not known to us from the paper, and there is no
       code of the authors'. They are those of a re-implementation by others, https://github.com/smduan/Fed-CCVR, and so
       is M_c, as these five belong together.
    4. A client's covariance needs two examples of the class; with one it sends the mean alone.
    5. Features behind a ReLU are not negative, Gaussian ones are drawn as they come. A covariance without full rank is
       no obstacle: its root is taken by eigenvalues, those that rounding has made negative set to zero.
    6. Statistics and draws are in float64.

Sent, by a client and once: D + D^2 floats for each of its classes; the counts, which are integers, are left out of the
records' floats. (A symmetric matrix could be sent in D (D + 1) / 2.)

Run it
    fedcli run fedavg --post ccvr
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fedcli import Post, option
from fedcli.core import Aux, Batch, Buffers, Client, Params, cross_entropy, generator, head_names
from fedcli.core.federation import Federation

_SOURCE = "from others' code"


@dataclass(frozen=True)
class Config:
    """How the classifier is trained on drawn features."""

    # Readings 2, 3
    ccvr_examples: int = option(2000, "Features drawn of each class", symbol="M_c", source=_SOURCE, low=1)
    ccvr_epochs: int = option(10, "Passes over the drawn features", source=_SOURCE, low=0, off=0)
    ccvr_lr: float = option(0.001, "Learning rate of the classifier", source=_SOURCE, low=0, open_low=True)
    ccvr_momentum: float = option(
        0.9, "Momentum of the classifier's SGD", source=_SOURCE, low=0, high=1, open_high=True, off=0
    )
    ccvr_batch_size: int = option(64, "Drawn features in a minibatch", source=_SOURCE, low=1)


class Statistics(NamedTuple):
    """How the features of each class are distributed, of one client or of all."""

    counts: Tensor  # [C], int64
    means: Tensor  # [C, D], zero without an example
    covariances: Tensor  # [C, D, D], unbiased, zero with less than two examples


def client_statistics(features: Tensor, labels: Tensor, num_classes: int) -> Statistics:
    """Section 4: mu_c,k = mean z, Sigma_c,k = sum (z - mu_c,k) (z - mu_c,k)^T / (N_c,k - 1), over a client's class c.

    Args:
        features: `[n, D]`.
        labels: `[n]`.
        num_classes: C.
    """
    counts = torch.bincount(labels, minlength=num_classes)
    width = features.shape[1]
    means = features.new_zeros(num_classes, width)
    covariances = features.new_zeros(num_classes, width, width)
    for c in counts.nonzero().flatten().tolist():
        of_class = features[labels == c]
        means[c] = of_class.mean(0)
        centred = of_class - means[c]
        covariances[c] = centred.T @ centred / max(len(of_class) - 1, 1)  # Reading 4
    return Statistics(counts, means, covariances)


def pool(sent: Iterable[Statistics]) -> Statistics:
    """Section 4: mean and unbiased covariance of the features of all clients, from what each has sent.

    mu_c = sum_k N_c,k mu_c,k / N_c; Sigma_c = (sum_k [(N_c,k - 1) Sigma_c,k + N_c,k mu_c,k mu_c,k^T] - N_c mu_c mu_c^T)
    / (N_c - 1).

    Args:
        sent: Of the clients, one after the other.
    """
    counts: Any = 0  # N_c
    sums: Any = 0  # of the features
    moments: Any = 0  # of their outer products
    for client in sent:
        n = client.counts[:, None].to(client.means)  # [C, 1]
        counts = counts + client.counts
        sums = sums + n * client.means
        within = (n - 1).clamp(min=0)[..., None] * client.covariances
        moments = moments + within + n[..., None] * _outer(client.means)
    n = counts[:, None].to(sums)
    means = sums / n.clamp(min=1)
    covariances = (moments - n[..., None] * _outer(means)) / (n - 1).clamp(min=1)[..., None]
    return Statistics(counts, means, covariances)


def _outer(vectors: Tensor) -> Tensor:
    """`[C, D, D]`, v v^T of each of C vectors `[C, D]`."""
    return vectors[:, :, None] * vectors[:, None, :]


def floats_sent(counts: Tensor, dim: int) -> int:
    """Floats of one client: D for each class it has, and D^2 where it has two examples or more.

    Args:
        counts: `[C]`, N_c,k.
        dim: D.
    """
    return int((counts > 0).sum()) * dim + int((counts > 1).sum()) * dim**2


def draw_features(mean: Tensor, covariance: Tensor, normal: Tensor) -> Tensor:
    """Features `[M, D]` from the Gaussian of a class, N(mu_c, Sigma_c).

    Args:
        mean: `[D]`.
        covariance: `[D, D]`, symmetric, of any rank.
        normal: `[M, D]`, standard normal.
    """
    values, vectors = torch.linalg.eigh(covariance)
    return mean + (normal * values.clamp(min=0).sqrt()) @ vectors.T  # Reading 5


def virtual_features(statistics: Statistics, examples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Drawn features of all classes that anybody has, `[n, D]`, and their labels `[n]`.

    Args:
        statistics: Of all clients together.
        examples: M_c.
        seed: Of the run.
    """
    present = statistics.counts.nonzero().flatten().tolist()  # Reading 2
    width = statistics.means.shape[1]
    drawn = []
    for c in present:
        normal = torch.as_tensor(generator(seed, "ccvr", c).standard_normal((examples, width)))
        drawn.append(draw_features(statistics.means[c], statistics.covariances[c], normal))
    return torch.cat(drawn), torch.tensor(present).repeat_interleave(examples)


def retrain(params: Params, features: Tensor, labels: Tensor, fed: Federation, config: Config) -> Params:
    """The global model's parameters, its classifier trained by SGD on drawn features `[n, D]` and labels `[n]`."""

    def loss(params, buffers, batch, context):
        task = cross_entropy(batch.x @ params["head.weight"].T + params["head.bias"], batch.y)
        return task, Aux(buffers, {"cross_entropy": task})

    step = fed.optimizer_step(
        loss, optimizer="sgd", lr=config.ccvr_lr, momentum=config.ccvr_momentum, weight_decay=0.0,
        names=head_names(fed.network),
    )  # fmt: skip
    client = Client(params, buffers={}, optimizer=step.init_optimizer(params))
    unused = torch.zeros((), dtype=fed.dtype, device=fed.device)  # of a batch's fields; the learning rate is the step's
    for epoch in range(config.ccvr_epochs):
        order = torch.as_tensor(fed.generator("ccvr order", epoch).permutation(len(labels)))
        for index in order.to(fed.device).split(config.ccvr_batch_size):
            batch = Batch(
                x=features[index], y=labels[index], mask=None, epoch_end=unused, num_batches=unused, lr=unused
            )
            client, _ = step.update(client, batch, None)
    return client.params


def statistics_of_clients(params: Params, buffers: Buffers, fed: Federation) -> Iterator[Statistics]:
    """What each client sends, one client at a time: C D^2 floats of each would not fit."""
    for part in fed.training:  # Reading 1
        predicted = fed.predict(params, buffers, part)
        features = cast(Tensor, predicted.features).double()  # Reading 6
        yield client_statistics(features, predicted.labels, fed.num_classes)


def apply(params: Params, buffers: Buffers, fed: Federation, config: Config) -> tuple[Params, Buffers, int]:
    """Section 4: the model with its classifier trained anew, and the floats that a client sends."""
    pooled = pool(statistics_of_clients(params, buffers, fed))
    features, labels = virtual_features(pooled, config.ccvr_examples, fed.seed)
    params = retrain(params, features.to(fed.device, fed.dtype), labels.to(fed.device), fed, config)
    everybody = fed.cohort_of(0, range(fed.num_clients))
    sent = [floats_sent(counts, fed.feature_dim) for counts in fed.class_counts(everybody)]
    return params, buffers, round(sum(sent) / len(sent))


POST = Post(
    name="ccvr",
    title="CCVR: classifier calibration with virtual representations",
    config=Config, apply=apply,
)  # fmt: skip
