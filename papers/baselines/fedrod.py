"""FedRoD: one body with two heads, a generic one trained on a balanced risk and averaged, and an own one on top of it.

H.-Y. Chen, W.-L. Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022,
https://arxiv.org/abs/2107.00778. The linear form.

The generic head learns by a softmax that makes up for the client's classes (balanced softmax), so that clients with
different classes pull one way. The own head adds to its logits and learns by the plain risk, without moving the rest.

Notation
    code                    paper       shape
    params                  theta, psi  body and generic head, dict of tensors
    "own." parameters       phi_m       the client's head: weight [C, D], bias [C]
    counts                  N_{m,c}     training examples of each class, [K, C]
    prior_exponent          gamma
    features, logits        z, g        [B, D], [B, C]

Readings and deviations
    1. The own head is linear; the paper's hypernetwork, which makes one of the class counts, is left out.
    2. log N_{m,c} is added to the generic logits in training. A class of which the client has no example leaves the
       softmax, by -1e4 in place of -inf.
    3. The own head begins as a copy of the initial generic one, as in two reimplementations (PFLlib, FL-bench); the
       authors have published no code.
    4. A client is tested by the sum of both heads on the averaged body: a network of the same form. The global model,
       body and generic head, is tested beside. A client that has never taken part is tested with the initial model.
    5. Weights are n_m / n of the cohort.

Run it
    fedcli run fedrod --dataset digits
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcli import Method, both_ways, option
from fedcli.core import (
    Aux,
    Buffers,
    LocalLoss,
    Model,
    Network,
    Params,
    axes_of,
    cross_entropy,
    head_names,
    split,
    weighted_mean,
)
from fedcli.core.federation import Cohort, Federation, Terms

OWN = "own."  # what the names of the own head's tensors begin with while both heads are trained
LOGIT_WITHOUT_EXAMPLES = -1e4  # a logit that leaves the softmax


@dataclass(frozen=True)
class Config:
    """What FedRoD adds to FedAvg."""

    prior_exponent: float = option(
        1.0, "How far the softmax makes up for the client's classes; 0 is the plain one", symbol="γ",
        low=0, off=0, tune=(0.5, 1.0, 2.0),
    )  # fmt: skip


class Context(NamedTuple):
    """What a client knows of its data."""

    log_prior: Tensor  # [C], gamma log N_c


CONTEXT_AXES = axes_of(Context, log_prior=0)


class ClientState(NamedTuple):
    """What a client keeps between rounds."""

    head: Params  # its own


class ServerState(NamedTuple):
    """What the server keeps, and by client id what the clients keep."""

    params: Params  # body and generic head
    buffers: Buffers
    clients: Mapping[int, ClientState]  # of those that have taken part


def log_prior(counts: Tensor, prior_exponent: float) -> Tensor:
    """gamma log N_c, and `LOGIT_WITHOUT_EXAMPLES` for a class without examples; zero where gamma is 0.

    Args:
        counts: Examples of each class, `[K, C]`, floating-point.
        prior_exponent: gamma.
    """
    if prior_exponent == 0:
        return torch.zeros_like(counts)
    return torch.where(counts > 0, prior_exponent * counts.clamp(min=1).log(), LOGIT_WITHOUT_EXAMPLES)


def balanced_risk(logits: Tensor, labels: Tensor, prior: Tensor, mask: Tensor | None = None) -> Tensor:
    """The balanced risk: -log of  N_y^gamma e^{g_y} / sum_c N_c^gamma e^{g_c},  mean over samples; a scalar.

    Args:
        logits: `[B, C]`.
        labels: `[B]`.
        prior: gamma log N_c, `[C]`.
        mask: `[B]`, False for padding.
    """
    return cross_entropy(logits + prior, labels, mask)


def own_head(both: Params) -> Params:
    """The own head of a client that trains both heads, under the names of a head."""
    return {name.removeprefix(OWN): value for name, value in both.items() if name.startswith(OWN)}


def body_and_generic_head(both: Params) -> Params:
    """The rest of its parameters."""
    return {name: value for name, value in both.items() if not name.startswith(OWN)}


def with_own_head(params: Params, head: Params) -> Params:
    """A network of the same form whose head is the sum of the generic and the own one."""
    return {**params, **{name: params[name] + value for name, value in head.items()}}


def make_local_loss(network: Network) -> LocalLoss:
    """Balanced risk of the generic logits, and plain risk of their sum with the own head's, which moves that alone."""

    def local_loss(params, buffers, batch, context):
        own = own_head(params)
        features, logits, buffers = network(body_and_generic_head(params), buffers, batch.x, batch.mask)
        added = F.linear(features.detach(), own["head.weight"], own["head.bias"])
        balanced = balanced_risk(logits, batch.y, context.log_prior, batch.mask)
        personal = cross_entropy(logits.detach() + added, batch.y, batch.mask)
        return balanced + personal, Aux(buffers, {"balanced_risk": balanced, "personal_risk": personal}, features)

    return local_loss


def init(fed: Federation, config: Config) -> ServerState:
    """The initial model; nobody has trained yet."""
    params, buffers = fed.initial_model()
    return ServerState(params, buffers, {})


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """One round: body and generic head down, training of both heads, body and generic head up."""
    first, _ = split(fed.initial_model().params, head_names(fed.network))  # Reading 3
    received = fed.broadcast(state.params, state.buffers, cohort)
    own = fed.recall(state.clients, cohort, ClientState(first))
    both = received.params | {OWN + name: value for name, value in own.head.items()}
    counts = fed.class_counts(cohort).to(fed.dtype)
    context = Context(log_prior(counts, config.prior_exponent))
    clients = received._replace(params=both)
    clients, terms = fed.train(clients, cohort, make_local_loss(fed.network), context, CONTEXT_AXES)

    states = fed.remember(state.clients, cohort, ClientState(own_head(clients.params)))
    sent = fed.upload_model(Model(body_and_generic_head(clients.params), clients.buffers))
    params, buffers = weighted_mean(sent, cohort.weights)
    return ServerState(params, buffers, states), terms


def personal_models(state: ServerState) -> dict[int, tuple[Params, Buffers]]:
    """The sum of both heads on the averaged body, of each client (Reading 4)."""
    models = {}
    for client, own in state.clients.items():
        head = {name: value.to(state.params[name].device) for name, value in own.head.items()}  # from the host
        models[client] = with_own_head(state.params, head), state.buffers
    return models


METHOD = Method(
    name="fedrod",
    title="FedRoD: a generic head on a balanced risk, and an own one on top",
    config=Config, init=init, run_round=run_round,
    reduces_to=None,  # without the prior the global model is FedAvg's, but what is tested has a head more
    state_types=(ServerState, ClientState),
    variants={"plain softmax": {"prior_exponent": 0.0}},
    costs=both_ways(lambda sizes: sizes.parameters),
    default_protocol="fedfm:niid-1",
    client_memory=lambda sizes: sizes.parameters + sizes.num_classes * (sizes.feature_dim + 1),  # and the own head
    personal=personal_models,
    shared=lambda state: (state.params, state.buffers),
)  # fmt: skip
