"""FedTGP: own models that share class prototypes, and a server that trains the global ones to lie apart.

J. Zhang, Y. Liu, Y. Hua, J. Cao, "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive
Learning for Data and Model Heterogeneity in Federated Learning", AAAI 2024, https://arxiv.org/abs/2401.03230.
Algorithm 1, Eqs. 2 and 9 to 11.

As in FedProto clients send class means of features, train on CE + lambda * distance to the global prototypes, and are
tested by the nearest of these. But the server does not average what it receives: the global prototypes are the output
of a small network, which it trains to bring each class's near the clients' prototypes of that class and, by a margin,
far from those of the other classes.

Notation
    code                        paper                   shape
    network                     P-ring^c, theta_F       dict of tensors: a vector a class, and two linear layers
    global_prototypes(network)  P-hat^c                 [C, D]
    class_means                 P_i^c                   [K, C, D]
    centres                     Q^c                     [C, D]
    margin                      delta(t)                scalar
    prototype_weight            lambda
    margin_threshold            tau
    server_epochs               S

Readings and deviations
    1. The clients' distance is the squared error of each sample's feature, mean over samples and coordinates, with
       lambda = 10, as in the authors' code and script. Eq. 11 has the Euclidean distance of prototypes, the text 0.1.
    2. The margin is the largest over classes of the distance from a class's centre to the nearest other one, as in the
       authors' code. Eq. 9 is the largest distance of any two (`--margin-form pairs`). Of fewer than two it is 0, in
       the authors' code tau (`--form code`).
    3. Clients' prototypes are class means over the training part, in evaluation mode, by the trained model (Eq. 2 and
       Algorithm 1, line 6). In the authors' code `train` collects them before it saves the trained model, and by the
       model that is saved: so they are of the model *before* the training of this round, in a client's first round of
       the untrained network (`--form code`, which FedSA's protocols have). There, where the last batch is dropped, its
       examples do not count.
    4. The server trains by plain SGD with rate 0.01 in batches of 10 prototypes, shuffled in every epoch, and goes on
       from its last network. These are the authors' values; theirs follow the clients' rate and batch size.
    5. In the first round clients train on cross-entropy alone, as in the authors' code; Algorithm 1 would send the
       untrained prototypes. Afterwards every class has a prototype, also a class that no client has.
    6. At distance 0 the gradient of a distance is taken as 0. In the authors' code it is NaN.

Run it
    fedcli run fedtgp --dataset digits
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedcli import Method, option, rows_by_class
from fedcli.core import ClientState, Params, own_models
from fedcli.core.class_vectors import distances_between, margin_logits, mean_over_owners
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.core.own_models import GroupRound, train_by_network
from fedcli.papers.baselines.fedproto import Context, make_local_loss


@dataclass(frozen=True)
class Config:
    """What FedTGP adds to local training."""

    prototype_weight: float = option(
        10.0, "Weight of the distance to the prototypes", symbol="λ", source="Eq. 11", low=0, off=0
    )
    margin_threshold: float = option(100.0, "Largest margin", symbol="τ", source="Eq. 9", low=0, off=0)
    form: str = option(
        "paper", "Prototypes of the trained model, or as in the authors' code of the model before training",
        source="Algorithm 1, line 6", choices=("paper", "code"),
    )  # fmt: skip
    margin_form: str = option(
        "nearest",
        "Margin before the threshold: largest distance of a class's centre to the nearest other, or of any pair",
        source="Eq. 9", choices=("nearest", "pairs"),
    )  # fmt: skip
    server_epochs: int = option(100, "Epochs of the server's training", symbol="S", source="Table 7", low=0)
    server_batch_size: int = option(10, "Prototypes in a batch of the server's training", low=1)
    server_lr: float = option(0.01, "Learning rate of the server's training", low=0, open_low=True)


class ServerState(NamedTuple):
    """What the server keeps, and by client id what the clients keep."""

    network: Params
    has_prototype: Tensor  # [C], bool: False before the first training
    clients: Mapping[int, ClientState]  # of those that have taken part


def initial_network(num_classes: int, dim: int, generator: np.random.Generator) -> Params:
    """Vectors from N(0, I) and linear layers from U(-1/sqrt(D), 1/sqrt(D)), as torch draws them by default."""
    bound = dim**-0.5
    shapes = {"hidden.weight": (dim, dim), "hidden.bias": (dim,), "out.weight": (dim, dim), "out.bias": (dim,)}
    layers = {name: torch.from_numpy(generator.uniform(-bound, bound, shape)) for name, shape in shapes.items()}
    return {"vectors": torch.from_numpy(generator.standard_normal((num_classes, dim))), **layers}


def global_prototypes(network: Params) -> Tensor:
    """P-hat = F(P-ring; theta_F), two linear layers with ReLU between them; `[C, D]`."""
    hidden = F.linear(network["vectors"], network["hidden.weight"], network["hidden.bias"]).relu()
    return F.linear(hidden, network["out.weight"], network["out.bias"])


def adaptive_margin(centres: Tensor, has_class: Tensor, threshold: float, form: str = "nearest") -> Tensor:
    """Eq. 9: the largest distance between centres of classes, at most tau; 0 where there are fewer than two.

    Args:
        centres: `[C, D]`.
        has_class: `[C]`; the others do not count.
        threshold: tau.
        form: "nearest", each class's distance to the nearest other, or "pairs", all distances.
    """
    distances, others = distances_between(centres, has_class)
    if form == "pairs":
        gaps = torch.where(others, distances, 0.0)
    else:
        nearest = torch.where(others, distances, torch.inf).amin(1)
        gaps = torch.where(others.any(1), nearest, 0.0)
    return gaps.amax().clamp(max=threshold)


def contrastive_loss(prototypes: Tensor, labels: Tensor, targets: Tensor, margin: Tensor) -> Tensor:
    """Eq. 10, mean over prototypes: cross-entropy of minus the distances, with the margin added to the own class's.

    Args:
        prototypes: Of clients, `[n, D]`.
        labels: `[n]`.
        targets: Global prototypes, `[C, D]`.
        margin: Scalar.
    """
    return F.cross_entropy(margin_logits(prototypes, labels, targets, margin), labels)


def train_network(
    network: Params, prototypes: Tensor, labels: Tensor, margin: Tensor, orders: list[np.ndarray], config: Config
) -> Params:
    """The server's training by SGD on Eq. 10.

    Args:
        network: Before.
        prototypes: Of clients, `[n, D]`.
        labels: `[n]`.
        margin: Scalar.
        orders: One permutation of the prototypes for each epoch.
        config: The method's.
    """
    network = {name: value.clone().requires_grad_() for name, value in network.items()}
    for permutation in torch.as_tensor(np.array(orders), device=labels.device):  # copied to the device at once
        for index in permutation.split(config.server_batch_size):
            loss = contrastive_loss(prototypes[index], labels[index], global_prototypes(network), margin)
            grads = torch.autograd.grad(loss, list(network.values()))
            with torch.no_grad():
                for value, grad in zip(network.values(), grads, strict=True):
                    value -= config.server_lr * grad
    return {name: value.detach() for name, value in network.items()}


def margin_of_round(class_means: Tensor, counts: Tensor, config: Config) -> Tensor:
    """Eq. 9 for the prototypes of a round, `[K, C, D]`, of as many examples as `counts` `[K, C]`; a scalar."""
    centres = mean_over_owners(class_means, counts, torch.zeros_like(class_means[0]))
    has_class = (counts > 0).any(0)
    margin = adaptive_margin(centres, has_class, config.margin_threshold, config.margin_form)
    if config.form == "code":  # Reading 2
        margin = torch.where(has_class.sum() < 2, config.margin_threshold, margin)
    return margin


def update_network(
    network: Params, class_means: Tensor, counts: Tensor, cohort: Cohort, fed: Federation, config: Config
) -> Params:
    """Algorithm 1, lines 8 and 9, from prototypes P_i^c `[K, C, D]` of as many examples as `counts` `[K, C]`.

    Clients are taken in order of id, so that the cohort's order does not matter.
    """
    by_id = torch.as_tensor(np.argsort(cohort.client_ids), device=counts.device)
    class_means = class_means[by_id]
    counts = counts[by_id]
    margin = margin_of_round(class_means, counts, config)
    client, labels = (counts > 0).nonzero(as_tuple=True)
    prototypes = class_means[client, labels]  # [n, D]
    orders = []
    for epoch in range(config.server_epochs):
        generator = fed.generator(cohort.round, "server order", epoch)
        orders.append(generator.permutation(len(labels)))
    return train_network(network, prototypes, labels, margin, orders, config)


def init(fed: Federation, config: Config) -> ServerState:
    """The server's first network; nobody has trained yet. Refuses networks whose features differ in width."""
    network = initial_network(fed.num_classes, fed.feature_dim, fed.generator("server network"))
    network = {name: value.to(fed.device, fed.dtype) for name, value in network.items()}
    return ServerState(network, torch.zeros(fed.num_classes, dtype=torch.bool, device=fed.device), {})


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """Algorithm 1, iteration t."""
    context = Context(fed.download(global_prototypes(state.network), cohort), state.has_prototype)  # line 3

    def train_group(group: Cohort) -> GroupRound:  # clients with the same network
        model = own_models(state.clients, group, fed)
        local_loss = make_local_loss(group.network, config)  # Eq. 11
        trained, terms = fed.train(model, group, local_loss, context)  # line 5
        source = model if config.form == "code" else trained  # Reading 3
        means_and_counts = fed.class_means(source, group)  # line 6
        return GroupRound(ClientState(trained.params, trained.buffers), means_and_counts, terms)

    states, (class_means, counts), terms = train_by_network(train_group, state.clients, cohort, fed)
    class_means = fed.upload(class_means, counts > 0)  # line 7
    network = update_network(state.network, class_means, counts, cohort, fed, config)  # lines 8, 9
    has_prototype = state.has_prototype | (counts > 0).any()
    return ServerState(network, has_prototype, states), terms


METHOD = Method(
    name="fedtgp",
    title="FedTGP: own models that share trained class prototypes",
    config=Config, init=init, run_round=run_round,
    reduces_to=("local", {"prototype_weight": 0.0}),
    state_types=(ServerState, ClientState),
    variants={"pairs": {"margin_form": "pairs"}, "code": {"form": "code"}},
    costs=rows_by_class(lambda sizes: sizes.feature_dim),
    default_protocol="fedsa:cifar10-silo",
    client_memory=lambda sizes: sizes.parameters + 2 * sizes.num_classes * sizes.feature_dim,  # received and own
    personal=lambda state: state.clients,
    prototypes=lambda state: (global_prototypes(state.network), state.has_prototype),
    mixed_networks=True,
)  # fmt: skip
