"""FedFM: match every client's features to anchors that all clients share.

R. Ye, Z. Ni, C. Xu, J. Wang, S. Chen, Y. C. Eldar, "FedFM: Anchor-Based Feature Matching for Data Heterogeneity in
Federated Learning", IEEE Transactions on Signal Processing 71, 2023, https://doi.org/10.1109/TSP.2023.3314277.

The mean feature of each class over all clients is that class's anchor. While a client trains, each of its features is
drawn to the anchor of its class and, with contrastive guiding, kept away from the others. Algorithm 1; Eqs. 2, 3,
8 to 11 and the contrastive-guiding loss of Section IV-C.

FedFM-Lite (`fedfm-lite`, Section VI) and feature matching as an add-on (`fedprox-fm`, `fednova-fm`, `moon-fm`, Section
VII-D.2) follow after it.

Notation
    code                    paper           shape
    params                  w               dict of tensors
    features                f_mid(w, x)     [B, D], the input of the last fully connected layer
    anchors                 a_c             [C, D]
    prototypes              a_{k,c}         [K, C, D]
    class_counts            |B_{k,c}|       [K, C]
    cohort.weights          p_k             [K]
    match_weight            lambda
    temperature             alpha
    start_round             T_s
    model_interval          a

Readings and deviations
    1. "The feature is normalised" (Section VII-A): features and anchors are, inside the loss, so the logits are cosines
       over the temperature. The anchors themselves are kept and averaged as plain class means (Eqs. 8, 9).
    2. l2 guiding is the mean over samples *and* the D coordinates, (2 - 2 cos) / D, as in the authors' code. With
       lambda = 50 and D = 512 this is 0.098 times the squared distance of the normalised vectors; lambda = 25,600 gives
       50 times it. Eq. 3 has plain vectors and the sum (`--guiding l2-sum`). Section V analyses that form, and its
       Lemma 2 needs it: new anchors are the class means of plain features, which minimise no other sum.
    3. Anchors are taken over every example of a client's training part, without augmentation, by the received model in
       evaluation mode; in FedFM-Lite by the client's own model after training (Reading 13). (The authors' loader
       shuffles, augments and drops the last batch; the rows left over count as zero features of class 0.)
    4. Rounds are counted from 0, so T_s = 20 makes rounds 0 to 19 FedAvg. Anchors are refreshed in them all the same.
    5. Uniform anchors (Sections IV-D.2 and VII-D.1): plain mean over clients; for a class that a client lacks, it
       contributes the previous anchor, as in the authors' code.
    6. A class that no client of the cohort has keeps its anchor; one that has never had an anchor is left out of the
       softmax, and samples of it out of the mean. With all clients taking part neither occurs.
    7. A zero feature vector has no direction: its cosines are 0 and it gets no gradient.
    8. The weights p_k count a client's validation examples too.

Readings of FedFM-Lite, of which the paper says little; no code is known
    9.  A round keeps its E local epochs with a new optimizer, so the local steps of a run do not depend on a.
    10. Until the next exchange a client goes on from its own model, its running statistics included. One that has not
        taken part since the last exchange begins with the global model. After an exchange all begin with the new one.
    11. Models are exchanged after every a-th round and after the last one, also in the first T_s rounds, where only
        the matching is off: with models in each of these, a = 5 would not save the five times of Section VII-C.4.
    12. Where not all clients take part, the mean is over those of the exchange's own round. What others have learnt
        since the last exchange reaches the server by the anchors alone.
    13. The anchors of round t are class means by the models that round t - 1 has left the clients with; round 0 has
        none, so no matching. So a = 1 is not FedFM, whose anchors are means by the model that round t begins with.
    14. Between two exchanges the last global model is tested, the only one that the server has.
    15. A round without an exchange costs C D floats each way, an interval of a rounds N + a C D. Fig. 7 has their
        mean, N / a + C D. The record's `cost` is that of the last round, which has an exchange.

Readings of the add-on, lambda Q_k in the local objective of another method, whose other steps stay as they are
    16. Anchors are made and sent as in FedFM, which is FedAvg with matching. The matching enters the objective alone:
        FedNova's effective steps and MOON's last local model are those of the training with it.
    17. An option that both methods have is FedFM's; the other's has its method before its name (`--moon-temperature`).

Readings of clipping, which the paper does not have
    18. The paper does not clip gradients; `--clip-norm 10` does, as FedDyn's authors do. Without it ResNet-18 fell to
        chance in round T_s of all our runs, which are smaller than the paper's: weights before batch normalisation have
        no scale of their own, so how far a step turns them depends on their norm. In round T_s the record of a network
        with batch normalisation has that norm as the term `norm_before_batchnorm`.

Known from the authors' code only
    Fresh optimizer in every round, no decay of the learning rate, incomplete last batches dropped in training, running
    statistics of batch normalisation averaged with p_k, augmentation for CIFAR-100 alone, the constants of the
    normalisation, and the best round chosen by validation accuracy pooled over clients. One of the released run scripts
    sets T_s = 200 for 100 rounds, which is FedAvg; the paper's T_s = 20 is taken here.

Run it
    fedcli run fedfm --dataset cifar10
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcli import (
    Cell,
    Claim,
    Costs,
    DataSetting,
    Gain,
    Method,
    Protocol,
    Row,
    Table,
    both_ways,
    column,
    grid,
    join_configs,
    option,
    row,
)
from fedcli.core import (
    Aux,
    Batch,
    Buffers,
    Client,
    ClientState,
    LocalLoss,
    Network,
    Params,
    axes_of,
    cross_entropy,
    masked_mean,
    weighted_mean,
)
from fedcli.core.class_vectors import EXCLUDED_LOGIT, ClassVectors, no_vectors, unit
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.papers.baselines import fedavg, fednova, fedprox, moon


@dataclass(frozen=True)
class Config:
    """What FedFM adds to FedAvg."""

    match_weight: float = option(
        50.0, "Weight of feature matching", symbol="λ", source="Eq. 2", low=0, off=0,
        tune=(0.1, 0.5, 1.0, 5.0, 10.0, 50.0),
    )  # fmt: skip
    temperature: float = option(
        0.1, "Temperature of contrastive guiding", symbol="α", source="Section IV-C", low=0, open_low=True,
        only_with={"guiding": ("contrastive",)},
    )  # fmt: skip
    start_round: int = option(
        20, "Rounds of plain FedAvg before matching starts", symbol="T_s", source="Section VII-A", unit="rounds", low=0
    )
    guiding: str = option(
        "contrastive", "Form of the matching loss: contrastive, or squared distance, as in the authors' code or as "
        "Eq. 3 prints it", source="Eq. 3, Section IV-C", choices=("contrastive", "l2", "l2-sum"),
    )  # fmt: skip
    anchor_weighting: str = option(
        "weighted", "Mean over clients that makes the anchors", source="Eq. 9, Table VIII",
        choices=("weighted", "uniform"),
    )  # fmt: skip
    clip_norm: float = option(
        0.0, "Norm to which longer gradients are shortened", source="none; FedDyn's code: 10", low=0, off=0
    )


class Context(NamedTuple):
    """What a client is given for a round; all clients share it."""

    anchors: Tensor  # [C, D]
    has_anchor: Tensor  # [C], bool
    weight: Tensor  # scalar, lambda, 0 before round T_s


class ServerState(NamedTuple):
    """What the server keeps between rounds."""

    params: Params  # global model w^(t)
    buffers: Buffers
    anchors: Tensor  # [C, D]
    has_anchor: Tensor  # [C], bool: whether any client has ever had the class


def _usable(labels: Tensor, has_anchor: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """The samples `[B]` that are real and whose class has an anchor (Reading 6); None if all are."""
    if has_anchor is None:
        return mask
    return has_anchor[labels] if mask is None else has_anchor[labels] & mask.bool()


def contrastive_guiding(
    features: Tensor, labels: Tensor, anchors: Tensor, temperature: float, has_anchor: Tensor | None = None, *,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Section IV-C: cross-entropy of softmax_n(<a_n, f> / alpha) against the label, mean over samples, in nats.

    Args:
        features: `[B, D]`; normalised here.
        labels: `[B]`.
        anchors: `[C, D]`; normalised here.
        temperature: alpha, positive.
        has_anchor: `[C]`, bool; None if all classes have one.
        mask: `[B]`, False for padding.
    """
    logits = unit(features) @ unit(anchors).T / temperature  # [B, C]; Reading 1
    if has_anchor is not None:
        logits = torch.where(has_anchor, logits, EXCLUDED_LOGIT)  # Reading 6
    return cross_entropy(logits, labels, _usable(labels, has_anchor, mask))


def l2_guiding(
    features: Tensor, labels: Tensor, anchors: Tensor, has_anchor: Tensor | None = None, *, mask: Tensor | None = None
) -> Tensor:
    """Eq. 3 on normalised vectors: mean over samples and coordinates of (f - a_y)^2, which is (2 - 2 cos) / D.

    Arguments as of `contrastive_guiding`; a scalar.
    """
    squares = (unit(features) - unit(anchors)[labels]).square().mean(-1)  # [B]; Readings 1 and 2
    return masked_mean(squares, _usable(labels, has_anchor, mask))


def plain_l2_guiding(
    features: Tensor, labels: Tensor, anchors: Tensor, has_anchor: Tensor | None = None, *, mask: Tensor | None = None
) -> Tensor:
    """Eq. 3 as printed: mean over samples of ||f - a_y||^2, neither of them normalised.

    Arguments as of `contrastive_guiding`; a scalar.
    """
    squares = (features - anchors[labels]).square().sum(-1)  # [B]; Reading 2
    return masked_mean(squares, _usable(labels, has_anchor, mask))


def aggregate_anchors(
    prototypes: Tensor, class_counts: Tensor, previous: Tensor, weighting: str = "weighted"
) -> Tensor:
    """Eq. 9: a_c = sum_k |B_kc| a_kc / sum_k |B_kc|; or the plain mean over clients; `[C, D]`.

    Args:
        prototypes: `[K, C, D]`, ignored where the count is 0.
        class_counts: `[K, C]`.
        previous: `[C, D]`, the anchors so far. Weighted: kept for a class that no client has. Uniform: also what a
            client contributes for a class it lacks.
        weighting: "weighted" or "uniform".
    """
    present = (class_counts > 0)[..., None]  # [K, C, 1]
    if weighting == "uniform":
        return torch.where(present, prototypes, previous).mean(0)  # Reading 5
    counts = class_counts.to(prototypes.dtype)[..., None]
    total = counts.sum(0)  # [C, 1]
    mean = (torch.where(present, prototypes, 0.0) * counts).sum(0) / torch.where(total > 0, total, 1.0)
    return torch.where(total > 0, mean, previous)  # Reading 6


def feature_matching(features: Tensor, batch: Batch, context: Context, config: Config) -> Tensor:
    """Q_k of Eq. 2 on the features `[B, D]` of a minibatch, in the chosen form of guiding; a scalar."""
    anchors = context.anchors
    has_anchor = context.has_anchor
    if config.guiding == "l2":
        return l2_guiding(features, batch.y, anchors, has_anchor, mask=batch.mask)
    if config.guiding == "l2-sum":
        return plain_l2_guiding(features, batch.y, anchors, has_anchor, mask=batch.mask)
    return contrastive_guiding(features, batch.y, anchors, config.temperature, has_anchor, mask=batch.mask)


def make_local_loss(network: Network, config: Config) -> LocalLoss:
    """The local objective of Eq. 2, F_k + lambda Q_k, on a minibatch of one client."""

    def local_loss(params, buffers, batch, context):
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)  # f_mid and f_full of w
        task = cross_entropy(logits, batch.y, batch.mask)  # F_k
        matching = feature_matching(features, batch, context, config)  # Q_k
        loss = task + context.weight * matching  # Eq. 2: F_k + lambda Q_k
        return loss, Aux(buffers, {"cross_entropy": task, "matching": matching})

    return local_loss


def exchange_anchors(
    clients: Client, state: "ServerState | StateWithClients", cohort: Cohort, fed: Federation, config: Config
) -> ClassVectors:
    """Eqs. 8 and 9: anchors `[C, D]` by the clients' models, of the classes that any client has ever had."""
    prototypes, class_counts = fed.upload(fed.class_means(clients, cohort))  # Eq. 8; Reading 3
    anchors = aggregate_anchors(prototypes, class_counts, state.anchors, config.anchor_weighting)
    return ClassVectors(anchors, state.has_anchor | (class_counts.sum(0) > 0))


def matching_context(anchors: Tensor, has_anchor: Tensor, cohort: Cohort, config: Config) -> Context:
    """The anchors with lambda, which is 0 before round T_s."""
    weight = config.match_weight if cohort.round >= config.start_round else 0.0  # Reading 4
    return Context(anchors, has_anchor, anchors.new_tensor(weight))


def init(fed: Federation, config: Config) -> ServerState:
    """The initial model w^(0); no class has an anchor."""
    params, buffers = fed.initial_model()
    anchors, has_anchor = no_vectors(fed)
    return ServerState(params, buffers, anchors, has_anchor)


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """Algorithm 1, round t; the lines are those of its for loop."""
    clients = fed.broadcast(state.params, state.buffers, cohort)  # line 1: w^(t) to every client
    anchors, has_anchor = exchange_anchors(clients, state, cohort, fed, config)  # lines 2 and 3, Eqs. 8 and 9
    context = matching_context(fed.download(anchors, cohort), has_anchor, cohort, config)
    local_step = fed.optimizer_step(make_local_loss(fed.network, config), clip_norm=config.clip_norm)  # Reading 18
    clients, terms = fed.train(clients, cohort, local_step, context)  # line 4, Eq. 10
    terms |= start_terms(state, cohort, config)
    params, buffers = weighted_mean(fed.upload_model(clients), cohort.weights)  # line 5, Eq. 11; Reading 8
    return ServerState(params, buffers, anchors, has_anchor), terms


METHOD = Method(
    name="fedfm",
    title="FedFM: anchor-based feature matching",
    config=Config, init=init, run_round=run_round,
    reduces_to=("fedavg", {"match_weight": 0.0, "clip_norm": 0.0}),
    state_types=(ServerState,),
    variants={
        "l2": {"guiding": "l2", "anchor_weighting": "uniform"},
        "Eq. 3": {"guiding": "l2-sum", "match_weight": 0.1},
    },
    costs=both_ways(lambda sizes: sizes.parameters + sizes.num_classes * sizes.feature_dim),  # Table II
    client_memory=lambda sizes: sizes.parameters + sizes.num_classes * sizes.feature_dim,  # Table II
)  # fmt: skip


# A diagnostic that the paper does not have: the term `norm_before_batchnorm` of round T_s (Reading 18)


def norm_before_batchnorm(params: Params, buffers: Buffers) -> Tensor | None:
    """The norm of all convolutions' weights together, a scalar; None in a network without batch normalisation.

    To multiply these weights changes no output, but a step turns longer ones less.
    """
    has_batchnorm = any(name.endswith("running_var") for name in buffers)
    convolutions = [value for value in params.values() if value.ndim == 4]  # [out, in, height, width]
    if not convolutions or not has_batchnorm:
        return None
    return torch.stack([torch.linalg.vector_norm(weight) for weight in convolutions]).norm()


def start_terms(state: "ServerState | StateWithClients", cohort: Cohort, config: Config) -> Terms:
    """What round T_s logs beside the terms of the objective, in all forms of FedFM: `[K]`, the same for all clients."""
    if cohort.round != config.start_round:
        return {}
    norm = norm_before_batchnorm(state.params, state.buffers)
    if norm is None:
        return {}
    return {"norm_before_batchnorm": norm.expand(len(cohort.client_ids))}


# FedFM-Lite, Section VI


@dataclass(frozen=True)
class LiteConfig(Config):
    """FedFM's options, and what FedFM-Lite adds to them."""

    model_interval: int = option(
        5, "Rounds between two exchanges of models", symbol="a", source="Section VI", unit="rounds", low=1
    )


class StateWithClients(NamedTuple):
    """What the server keeps between rounds, and the clients' own models."""

    params: Params  # last global model
    buffers: Buffers
    anchors: Tensor  # [C, D]
    has_anchor: Tensor  # [C], bool: whether any client has ever had the class
    clients: Mapping[int, ClientState]  # by id, each one's model after its last round


def init_lite(fed: Federation, config: LiteConfig) -> StateWithClients:
    """The initial model; no class has an anchor and no client a model of its own."""
    params, buffers = fed.initial_model()
    anchors, has_anchor = no_vectors(fed)
    return StateWithClients(params, buffers, anchors, has_anchor, clients={})


def ends_interval(round: int, config: LiteConfig) -> bool:
    """Whether a round, counted from 0, is an a-th one."""
    return (round + 1) % config.model_interval == 0


def states_since_exchange(state: StateWithClients, cohort: Cohort, config: LiteConfig) -> Mapping[int, ClientState]:
    """The clients' own models since the last exchange, by id; none where the last round had one."""
    return {} if ends_interval(cohort.round - 1, config) else state.clients


def own_models(state: StateWithClients, states: Mapping[int, ClientState], cohort: Cohort, fed: Federation) -> Client:
    """Each client's own model; the global one is sent to those that have none (Reading 10)."""
    newcomers = [client for client in cohort.client_ids if int(client) not in states]
    fed.count_broadcast(state.params, state.buffers, len(newcomers))
    recalled = fed.recall(states, cohort, ClientState(state.params, state.buffers))
    return Client(recalled.params, recalled.buffers)  # with a new optimizer, Reading 9


def has_exchange(round: int, fed: Federation, config: LiteConfig) -> bool:
    """Whether a round ends with an exchange of models: every a-th, and the last (Reading 11)."""
    return ends_interval(round, config) or round + 1 == fed.num_rounds


def run_lite_round(
    state: StateWithClients, cohort: Cohort, fed: Federation, config: LiteConfig
) -> tuple[StateWithClients, Terms]:
    """Section VI and Fig. 5, round t of FedFM-Lite."""
    states = states_since_exchange(state, cohort, config)
    clients = own_models(state, states, cohort, fed)
    anchors = state.anchors
    if cohort.round > 0:
        anchors = fed.download(anchors, cohort)  # the answer to the last round's hand-shake; Reading 13
    context = matching_context(anchors, state.has_anchor, cohort, config)
    local_step = fed.optimizer_step(make_local_loss(fed.network, config), clip_norm=config.clip_norm)
    clients, terms = fed.train(clients, cohort, local_step, context)  # Eq. 10
    terms |= start_terms(state, cohort, config)
    states = fed.remember(states, cohort, ClientState(clients.params, clients.buffers))
    anchors, has_anchor = exchange_anchors(clients, state, cohort, fed, config)  # Eqs. 8 and 9; Reading 13
    params = state.params  # Reading 14
    buffers = state.buffers
    if has_exchange(cohort.round, fed, config):
        # Eq. 11, in the same hand-shake; Reading 12
        params, buffers = weighted_mean(fed.upload_model(clients), cohort.weights)
    return StateWithClients(params, buffers, anchors, has_anchor, states), terms


def lite_costs(state: StateWithClients, cohort: Cohort, fed: Federation, config: LiteConfig) -> Costs:
    """The anchors both ways; the model to clients that have none and, in an exchange, from all (Reading 15)."""
    model_floats = fed.sizes.parameters
    size = len(cohort.client_ids)
    anchor_floats = size * fed.num_classes * fed.feature_dim
    states = states_since_exchange(state, cohort, config)
    receivers = len({*cohort.client_ids.tolist()} - states.keys())
    floats_down = receivers * model_floats
    if cohort.round > 0:
        floats_down += anchor_floats
    floats_up = anchor_floats
    if has_exchange(cohort.round, fed, config):
        floats_up += size * model_floats
    return Costs(down=floats_down, up=floats_up)


LITE = replace(
    METHOD,
    name="fedfm-lite",
    title="FedFM-Lite: anchors in every round, models in every a-th",
    config=LiteConfig,
    init=init_lite,
    run_round=run_lite_round,
    reduces_to=("fedavg", {"match_weight": 0.0, "clip_norm": 0.0, "model_interval": 1}),
    state_types=(StateWithClients, ClientState),
    costs=lite_costs,
)


# Feature matching as an add-on, Section VII-D.2 and Fig. 8(a)


class AddOnContext(NamedTuple):
    """What a client is given for a round: for the matching, and for the objective to which it is added."""

    matching: Context
    base: Any


def add_matching(objective: LocalLoss, config: Config) -> LocalLoss:
    """A local objective that returns its features, plus lambda Q_k."""

    def local_loss(params, buffers, batch, context):
        loss, aux = objective(params, buffers, batch, context.base)
        matching = feature_matching(aux.outputs, batch, context.matching, config)
        return loss + context.matching.weight * matching, aux.with_term("matching", matching)

    return local_loss


@dataclass(frozen=True)
class ExtendedMethod:
    """A method to which feature matching is added: its objective plus lambda Q_k, FedFM's anchors, all else as it is.

    Attributes:
        method: The method as it is. The functions below take its own options.
        server_state: With matching: the fields of the method's own server state, and the anchors.
        client_states: Types of what its clients keep.
        make_local_loss: From a network and options to its objective, which returns the features `[B, D]` as outputs.
        local_context: `(state, cohort, fed, config)` to what its clients train with, and the axes of that.
        aggregate: `(state, clients, cohort, fed, config)` to the server's state after the round.
    """

    method: Method
    server_state: type
    client_states: tuple[type, ...]
    make_local_loss: Callable[[Network, Any], LocalLoss]
    local_context: Callable[..., tuple[Any, Any]]
    aggregate: Callable[..., Any]

    @property
    def title(self) -> str:
        """Its name as it is printed."""
        title, _, _ = self.method.title.partition(":")
        return title

    @cached_property
    def options(self):
        """FedFM's options and its own (Reading 17)."""
        return join_configs(Config, self.method.config, prefix=self.method.name, source=self.title)

    def init(self, fed: Federation, config):
        """Its initial state; no class has an anchor."""
        base_state = self.method.init(fed, self.options.second_of(config))
        anchors, has_anchor = no_vectors(fed)
        return self.server_state(**base_state._asdict(), anchors=anchors, has_anchor=has_anchor)

    def run_round(self, state, cohort: Cohort, fed: Federation, config):
        """Its round t, in which clients match their features too."""
        base_config = self.options.second_of(config)
        clients = fed.broadcast(state.params, state.buffers, cohort)
        anchors, has_anchor = exchange_anchors(clients, state, cohort, fed, config)  # as in FedFM
        base_context, base_axes = self.local_context(state, cohort, fed, base_config)
        matching = matching_context(fed.download(anchors, cohort), has_anchor, cohort, config)
        axes = axes_of(AddOnContext, matching=None, base=base_axes)
        local_loss = add_matching(self.make_local_loss(fed.network, base_config), config)  # Reading 16
        local_step = fed.optimizer_step(local_loss, clip_norm=config.clip_norm)
        clients, terms = fed.train(clients, cohort, local_step, AddOnContext(matching, base_context), axes)
        terms |= start_terms(state, cohort, config)
        base_state = self.aggregate(state, clients, cohort, fed, base_config)
        return self.server_state(**base_state._asdict(), anchors=anchors, has_anchor=has_anchor), terms

    def costs(self, state, cohort: Cohort, fed: Federation, config) -> Costs:
        """Its costs, and the anchors both ways."""
        assert self.method.costs is not None  # each of the methods declares its own
        down, up = self.method.costs(state, cohort, fed, self.options.second_of(config))
        anchor_floats = len(cohort.client_ids) * fed.num_classes * fed.feature_dim
        return Costs(down=down + anchor_floats, up=up + anchor_floats)

    def with_matching(self) -> Method:
        """The method with feature matching."""
        return Method(
            name=f"{self.method.name}-fm",
            title=f"{self.title} with feature matching",
            config=self.options.config,
            init=self.init,
            run_round=self.run_round,
            reduces_to=(self.method.name, {"match_weight": 0.0, "clip_norm": 0.0}),
            state_types=(self.server_state, *self.client_states),
            costs=self.costs,
            optimizers=self.method.optimizers,
            client_memory=lambda sizes: self.method.client_memory(sizes) + sizes.num_classes * sizes.feature_dim,
        )


_FEDPROX_BASE = ExtendedMethod(
    method=fedprox.METHOD,
    server_state=ServerState,
    client_states=(),
    make_local_loss=fedprox.make_local_loss,
    local_context=fedprox.local_context,
    aggregate=fedprox.aggregate,
)
_FEDNOVA_BASE = ExtendedMethod(
    method=fednova.METHOD,
    server_state=ServerState,
    client_states=(),
    make_local_loss=fedavg.make_local_loss,  # its clients train as FedAvg's
    local_context=fedavg.local_context,
    aggregate=fednova.aggregate,
)
_MOON_BASE = ExtendedMethod(
    method=moon.METHOD,
    server_state=StateWithClients,
    client_states=(ClientState,),
    make_local_loss=moon.make_local_loss,
    local_context=moon.local_context,
    aggregate=moon.aggregate,
)

METHODS = (LITE, _FEDPROX_BASE.with_matching(), _FEDNOVA_BASE.with_matching(), _MOON_BASE.with_matching())


# The paper's experiments: protocols

_CIFAR10 = DataSetting(
    backbone="resnet18",  # Section VII-A; 11,182 thousand parameters in Table III are torchvision's 7 x 7 stem
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2023, 0.1994, 0.2010),
    source="authors' code; no augmentation",
    method_options={"moon": {"contrastive_weight": 5.0}, "moon-fm": {"contrastive_weight": 5.0}},  # MOON's authors'
)
_CINIC10 = DataSetting(
    backbone="resnet18",
    mean=(0.47889522, 0.47227842, 0.43047404),
    std=(0.24205776, 0.23828046, 0.25874835),
    source="not stated, no loader in the authors' code; constants of the data set's authors, no augmentation",
)
_CIFAR100 = DataSetting(
    backbone="resnet50-3x3",  # Section VII-A; 23,705 thousand parameters in Table III are the 3 x 3 stem
    mean=(0.50707, 0.48655, 0.44092),
    std=(0.26733, 0.25644, 0.27615),
    source="authors' code",
    augmentation="crop-flip-rotate",
    method_options={"moon": {"contrastive_weight": 1.0}, "moon-fm": {"contrastive_weight": 1.0}},  # MOON's authors'
)
_TRAINING = {
    "num_clients": 10, "rounds": 100, "local_epochs": 10, "batch_size": 64, "drop_last": True, "optimizer": "sgd",
    "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5, "validation": 0.2,
}  # fmt: skip
_BASELINE_OPTIONS = {"fedavgm": {"server_lr": 0.1}}  # 1 - beta: the damped form
_FEDAVGM_NOTE = (
    "FedAvgM is damped, v <- 0.9 v + 0.1 Delta (--server-lr 0.1), as in MOON's code, of which the authors' is a fork. "
    "Its own paper does not damp (--server-lr 1). The printed numbers suggest damping, as they are near FedAvg's "
    "(Table III, CIFAR-10 NIID-1: 66.85 and 66.69; Table VI, K=20: 58.36 and 58.48)."
)
_SOURCE = "Section VII-A; validation by pooled accuracy and dropped last batches from the authors' code"


def _protocol(
    name: str, summary: str, cifar10: str, cinic10: str, cifar100: str, notes: tuple[str, ...] = ()
) -> Protocol:
    """A protocol of Section VII-A, which differ in how the classes are divided among the ten clients."""
    datasets = {
        "cifar10": replace(_CIFAR10, settings={"partition": cifar10}),
        "cinic10": replace(_CINIC10, settings={"partition": cinic10}),
        "cifar100": replace(_CIFAR100, settings={"partition": cifar100}),
    }
    return Protocol(
        name=f"fedfm:{name}",
        summary=summary,
        source=_SOURCE,
        settings=_TRAINING,
        datasets=datasets,
        selection="best-validation",
        method_options=_BASELINE_OPTIONS,
        notes=(*notes, _FEDAVGM_NOTE),
    )


_DIGITS = {
    name: DataSetting(
        backbone="cnn-small", mean=(0.5,) * channels, std=(0.5,) * channels, source="chosen here: pixels in [-1, 1]"
    )
    for name, channels in (("digits", 1), ("digit-domains", 3))
}

PROTOCOLS = (
    _protocol(
        "niid-1",
        "Class shares of a client from Dir(0.5)",
        cifar10="dirichlet:0.5",
        cinic10="dirichlet:0.5",
        cifar100="dirichlet:0.5",
    ),
    _protocol(
        "niid-2",
        "Each client has dominant classes",
        cifar10="dominant:1",
        cinic10="dominant:1:share=4/9",
        cifar100="dominant:10",
        notes=("CINIC-10: 90,000 training images, 500 of each class and 4,000 more of one, as in the authors' code.",),
    ),
    _protocol(
        "niid-3",
        "Each client lacks classes",
        cifar10="missing:3",
        cinic10="missing:3",
        cifar100="missing:30",
        notes=("Table IV has missing:1, :2, :3, :5 and :7 on CIFAR-10; the two other data sets are our analogues.",),
    ),
    replace(
        _protocol(
            "partial",
            "Class shares from Dir(0.5), 10 of 100 clients in a round",
            cifar10="dirichlet:0.5",
            cinic10="dirichlet:0.5",
            cifar100="dirichlet:0.5",
            notes=("Table XI stands in an appendix that is not available: these numbers of clients are ours.",),
        ),
        settings={**_TRAINING, "num_clients": 100, "cohort_size": 10, "drop_last": False},
        source="not from the paper",
    ),
    Protocol(
        name="fedfm:femnist",
        summary="Handwritten characters, each client a writer, 7 of 3,150 in a round",
        source="Section VII-C.3; rounds and training of Section VII-A",
        settings={**_TRAINING, "num_clients": 3150, "cohort_size": 7, "drop_last": False, "partition": "writers"},
        datasets={
            "femnist": DataSetting(
                backbone="resnet18", mean=(0.5,), std=(0.5,), source="not stated; pixels in [-1, 1], no augmentation"
            )
        },
        selection="best-validation",
        method_options=_BASELINE_OPTIONS,
        notes=(
            "Of 3,500 clients a tenth is held out: 350 writers for testing, 3,150 for training. 0.2 % of 3,500 is 7.",
            "Rounds, epochs, batch size and learning rate are not stated for this data set; those of Section VII-A, "
            "which speaks of all experiments, are taken.",
            "Incomplete batches are kept: a writer has about 230 images, 184 of them for training, so that dropping "
            "them would lose almost a third.",
            _FEDAVGM_NOTE,
        ),
    ),
    Protocol(
        name="fedfm:motivation",
        summary="Two clients of 5,000 images, half of each from one class, train once from the same model",
        source="Section III-B, Figs. 1 and 2",
        settings={**_TRAINING, "rounds": 1, "cohort_size": 2, "partition": "dominant:1:share=4/9"},
        datasets={"cifar10": _CIFAR10},
        selection="best-validation",
        method_options={"fedfm": {"start_round": 0}},
        notes=(
            "The two are drawn from ten such clients, one for each class; the paper's have airplanes and cars.",
            "2,499 of 4,992 images are of the dominant class, 277 of each other one.",
            "The paper does not say by which model the anchors of Fig. 1 are made; here it is the initial one.",
        ),
    ),
    Protocol(
        name="fedfm:digits",
        summary="Built-in digits, no network needed: seconds a run",
        source="not from the paper",
        settings={
            "num_clients": 10,
            "rounds": 20,
            "local_epochs": 2,
            "batch_size": 16,
            "optimizer": "sgd",
            "lr": 0.05,
            "momentum": 0.9,
            "weight_decay": 1e-5,
            "validation": 0.2,
            "partition": "dirichlet:0.5",
        },
        datasets=_DIGITS,
        selection="best-validation",
        method_options={
            "fedfm-lite": {"match_weight": 0.5, "start_round": 5},
            **{
                name: {"match_weight": 5.0, "start_round": 5}
                for name in ("fedfm", "fedprox-fm", "fednova-fm", "moon-fm")
            },
        },
        notes=("Learning rate and match weights: by validation accuracy with seed 0, so that all methods learn.",),
    ),
)


# The paper's experiments: tables

_ROWS = {
    "FedAvg": row("fedavg"),
    "FedAvgM": row("fedavgm"),
    "FedProx": row("fedprox"),
    "SCAFFOLD": row("scaffold"),
    "FedDyn": row("feddyn"),
    "FedNova": row("fednova"),
    "MOON": row("moon"),
    "FedFM": row("fedfm"),
}
_FEDFM_L2 = row("fedfm", guiding="l2")
_GUIDING_ROWS = {"FedAvg": _ROWS["FedAvg"], "FedFM l2": _FEDFM_L2, "FedFM CG": _ROWS["FedFM"]}
_DATASETS = {"CIFAR-10": "cifar10", "CINIC-10": "cinic10", "CIFAR-100": "cifar100"}
_CIFAR10_NIID_1 = column("fedfm:niid-1", "cifar10")
_CIFAR100_NIID_1 = column("fedfm:niid-1", "cifar100")
_IN_TEXT = "in-text"  # of figures no numbers are printed, but for some in the text

_TUNING_NOTE = (
    "The baselines' constants are not given, only that they were tuned: here they are the defaults of their files, and "
    "MOON's weight its authors', 5 on CIFAR-10 and 1 on CIFAR-100. --tuned takes what 'fedcli tune' has chosen instead."
)
_BASELINE_NOTES = (  # none of the baselines is in the authors' code
    _TUNING_NOTE,
    _FEDAVGM_NOTE,
    "SCAFFOLD: the gradient's norm is clipped at 10, as FedDyn's authors do in theirs, and a local step counts as "
    "eta / (1 - rho), for the momentum rho of 0.9; its own paper has neither, and no momentum. It diverges without "
    "(readings 3 and 8 of papers/baselines/scaffold.py).",
    "FedDyn: the gradient's norm is clipped at 10, as in its authors' code.",
)


def _rows(*names: str) -> dict[str, Row]:
    """Some of the rows."""
    return {name: _ROWS[name] for name in names}


def _with_suffix(suffix: str, columns: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The columns with one more word in their names."""
    return {f"{name} {suffix}": settings for name, settings in columns.items()}


def _table(
    name: str, title: str, cells: tuple[Cell, ...], *, printed: str, notes: tuple[str, ...] = _BASELINE_NOTES,
    gains: tuple[Gain, ...] = (),
) -> Table:  # fmt: skip
    """A table or figure of the paper; `printed` says where its numbers are."""
    return Table(name=f"fedfm:{name}", title=title, reported=("FedFM", printed), cells=cells, notes=notes, gains=gains)


# Fig. 1: two clients' features by their own models, after one round from the same model. 9 runs.
_MOTIVATION = column("fedfm:motivation", "cifar10")
_FIG_1 = _table(
    "Fig1",
    "Features of two clients that have half of their images from one class",
    grid(_GUIDING_ROWS, {"Fig. 1 NMI": _MOTIVATION}, "quality:clients_nmi")
    + grid(_GUIDING_ROWS, {"Fig. 1 silhouette": _MOTIVATION}, "quality:clients_silhouette"),
    printed=_IN_TEXT,
    notes=(
        "NMI and silhouette are of both clients' features together, each by its own model, as measured by 'fedcli "
        "quality RUNS --clients' on the finished runs.",
        "That, and Figs. 1 and 2 as 'fedcli plot RUNS --kind clients' draws them, are of one more round, so of two "
        "other clients than those that trained in the run.",
    ),
)

# Table III: test accuracy, Dirichlet 0.5 and one dominant class, on three data sets, and floats held. 144 runs.


def _two_skews() -> dict[str, dict[str, Any]]:
    """The columns of accuracy: two divisions of each data set."""
    columns = {}
    for title, dataset in _DATASETS.items():
        columns[f"{title} NIID-1"] = column("fedfm:niid-1", dataset)
        columns[f"{title} NIID-2"] = column("fedfm:niid-2", dataset)
    return columns


_TWO_SKEWS = _two_skews()
_DATASETS_NIID_1 = {title: column("fedfm:niid-1", dataset) for title, dataset in _DATASETS.items()}
_TABLE_3 = _table(
    "III",
    "Dirichlet shares and dominant classes on three data sets",
    grid(_ROWS, _TWO_SKEWS) + grid(_ROWS, _with_suffix("memory_1e3_floats", _DATASETS_NIID_1), "memory-floats"),
    printed="Table III",
)

# Table IV: test accuracy where each client lacks x classes, and floats held and sent. 120 runs.
_MISSING = {f"Missing {x}": column("fedfm:niid-3", "cifar10", partition=f"missing:{x}") for x in (1, 2, 3, 5, 7)}
_TABLE_4 = _table(
    "IV",
    "Clients that lack classes",
    grid(_ROWS, _MISSING)
    + grid(_ROWS, {"memory_1e3_floats": _MISSING["Missing 3"]}, "memory-floats")
    + grid(_ROWS, {"bandwidth_1e3_floats": _MISSING["Missing 3"]}, "floats-up"),
    printed="Table IV",
)

# Table V: quality of the global model's features, NMI and silhouette. 24 runs, all of Table III.
_TABLE_5 = _table(
    "V",
    "Quality of the feature space",
    grid(_ROWS, {"NMI": _CIFAR10_NIID_1}, "quality:nmi") + grid(_ROWS, {"SS": _CIFAR10_NIID_1}, "quality:silhouette"),
    printed="Table V",
    notes=(
        "Measured by 'fedcli quality' on the finished runs. How many images were sampled is not stated.",
        "The accuracies quoted with the table are those of NIID-1 in Table III, so its runs are taken.",
        *_BASELINE_NOTES,
    ),
)

# Table VI: accuracy and all floats held and sent with 20 to 100 clients, on CIFAR-100. 96 runs.
_CLIENTS = {f"K={clients}": column("fedfm:niid-1", "cifar100", num_clients=clients) for clients in (20, 30, 50, 100)}
_TABLE_6 = _table(
    "VI",
    "Many clients",
    grid(_ROWS, _with_suffix("accuracy", _CLIENTS))
    + grid(_ROWS, _with_suffix("memory_1e8_floats", _CLIENTS), "total-memory-floats")
    + grid(_ROWS, _with_suffix("bandwidth_1e8_floats", _CLIENTS), "total-floats"),
    printed="Table VI",
    notes=("The partition is not stated; NIID-1 is taken.", *_BASELINE_NOTES),
)

# Table VII: test accuracy on LEAF's FEMNIST. 18 runs.
_TABLE_7 = _table(
    "VII",
    "Writers as clients",
    grid(
        _rows("FedAvg", "SCAFFOLD", "FedFM"),
        {
            "ResNet18-v1": column("fedfm:femnist", "femnist", backbone="resnet18"),
            "ResNet18-v2": column("fedfm:femnist", "femnist", backbone="resnet18-3x3"),
        },
    ),
    printed="Table VII",
    notes=(
        "Of v2 only the first kernel is told, 3 in place of 7. A reading: the network for small images, stride 1 "
        "there and no pooling after it. With stride 2 and the pooling it would have as many parameters.",
        "The text says that SCAFFOLD's parameters become NaN late in training, so its printed numbers are of runs that "
        "broke; ours clips its gradients.",
        *_BASELINE_NOTES,
    ),
)

# Table VIII: anchors weighted by class counts, and uniform. 9 runs.
_TABLE_8 = _table(
    "VIII",
    "How anchors are aggregated",
    grid(
        {
            "FedAvg": _ROWS["FedAvg"],
            "FedFM (weighted)": _ROWS["FedFM"],
            "FedFM (uniform)": row("fedfm", anchor_weighting="uniform"),
        },
        {"accuracy": _CIFAR10_NIID_1},
    ),
    printed="Table VIII",
    notes=(
        "The paper's sentence is that uniform anchors do as well as weighted ones, 0.02 less. A claim here is a lead: "
        "fedfm:uniform has that of uniform anchors on FedAvg. The two rows stand beside each other.",
    ),
)

# Table IX: the temperature of contrastive guiding. 36 runs.


def _with_temperatures(title: str, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Columns of one data set."""
    return {f"{title} alpha={alpha}": {**settings, "temperature": alpha} for alpha in (0.01, 0.1, 1.0, 10.0)}


_TABLE_9 = _table(
    "IX",
    "Temperature of contrastive guiding",
    grid(_rows("FedFM"), _with_temperatures("CIFAR-10", _CIFAR10_NIID_1))
    + grid(_rows("FedAvg", "SCAFFOLD"), {"CIFAR-10 reference": _CIFAR10_NIID_1})
    + grid(_rows("FedFM"), _with_temperatures("CIFAR-100", _CIFAR100_NIID_1))
    + grid(_rows("FedAvg", "SCAFFOLD"), {"CIFAR-100 reference": _CIFAR100_NIID_1}),
    printed="Table IX",
)

# Section VII in words: generalized FedProto, and FedFM with the squared distance. 9 runs, 3 of them Table III's.
_TEXT = _table(
    "text",
    "What is told in the text alone",
    grid(
        {
            "generalized FedProto": row("fedproto-general"),
            "FedFM with squared l2 penalty": _FEDFM_L2,
            "FedFM": _ROWS["FedFM"],
        },
        {"CIFAR-10 NIID-1 accuracy": _CIFAR10_NIID_1},
    ),
    printed=_IN_TEXT,
)

# Fig. 7: FedFM-Lite, (a) accuracy against floats, (b) beside SCAFFOLD at the same floats. 36 runs.
_LITE_ROWS = {f"FedFM-Lite a={interval}": row("fedfm-lite", model_interval=interval) for interval in (1, 2, 5, 10)}
_LITE_1 = "FedFM-Lite a=1"
_EQUAL_FLOATS = f"accuracy at the floats of all rounds of {_LITE_1}"
_FIG_7 = _table(
    "Fig7",
    "FedFM-Lite: accuracy, and floats sent in all rounds",
    grid({**_ROWS, **_LITE_ROWS}, {"accuracy": _CIFAR10_NIID_1})
    + grid({**_ROWS, **_LITE_ROWS}, {"bandwidth_1e8_floats": _CIFAR10_NIID_1}, "total-floats")
    # SCAFFOLD sends two models in a round, FedFM-Lite with a = 1 one with its anchors.
    + grid({_LITE_1: _LITE_ROWS[_LITE_1]}, {_EQUAL_FLOATS: _CIFAR10_NIID_1}, "last")
    + grid(_rows("SCAFFOLD"), {_EQUAL_FLOATS: _CIFAR10_NIID_1}, "at:1/2"),
    printed=_IN_TEXT,
    notes=(
        "The text's gaps, 2.34 over FedDyn and 0.75 over SCAFFOLD, both give 70.66 for a = 5.",
        "Fig. 7(b) is the curves of SCAFFOLD and FedFM-Lite over floats sent, which 'fedcli plot RUNS --x floats' "
        "draws; no number of it is printed.",
        *_BASELINE_NOTES,
    ),
    gains=(
        Gain(
            row="FedFM-Lite a=5 minus FedDyn",
            column="accuracy gap (5x less communication)",
            leading_rows=("FedFM-Lite a=5",),
            other_rows=("FedDyn",),
            columns=("accuracy",),
        ),
        Gain(
            row="FedFM-Lite a=5 minus SCAFFOLD",
            column="accuracy gap (10x less communication)",
            leading_rows=("FedFM-Lite a=5",),
            other_rows=("SCAFFOLD",),
            columns=("accuracy",),
        ),
    ),
)

# Fig. 8(a): feature matching added to four methods. 24 runs.
_METHODS_WITH_MATCHING = {"FedAvg": "fedfm", "FedProx": "fedprox-fm", "FedNova": "fednova-fm", "MOON": "moon-fm"}


def _without_and_with_matching() -> tuple[Cell, ...]:
    """A column for each of the four methods."""
    cells: tuple[Cell, ...] = ()
    for title, extended in _METHODS_WITH_MATCHING.items():
        cells += grid({"without FM": _ROWS[title], "with FM": row(extended)}, {title: _CIFAR10_NIID_1})
    return cells


_FIG_8A = _table(
    "Fig8a",
    "Feature matching as an add-on",
    _without_and_with_matching(),
    printed=_IN_TEXT,
    gains=(
        Gain(
            row="FM+CG added to FedAvg/FedProx/FedNova/MOON",
            column="mean accuracy gain, CIFAR-10 NIID-1 (Fig. 8a)",
            leading_rows=("with FM",),
            other_rows=("without FM",),
            columns=tuple(_METHODS_WITH_MATCHING),
        ),
    ),
)

# Fig. 8(b): forms of guiding under three degrees of skew. 27 runs.
_FIG_8B = _table(
    "Fig8b",
    "Forms of guiding",
    grid(
        _GUIDING_ROWS,
        {f"beta={beta}": {**_CIFAR10_NIID_1, "partition": f"dirichlet:{beta}"} for beta in (0.1, 0.5, 1.0)},
    ),
    printed=_IN_TEXT,
    notes=("Which values of beta the figure has is not known; these are chosen here.",),
)

# Fig. 8(c): the weight of feature matching, and the round it starts in. 66 runs.
_WEIGHTS = (1.0, 5.0, 10.0, 50.0, 100.0, 500.0, 1000.0)
_FIG_8C = _table(
    "Fig8c",
    "Weight of feature matching, and the round it starts in",
    grid(_rows("FedAvg"), {"lambda=0": _CIFAR10_NIID_1})
    + grid(
        {f"FedFM T_s={start}": row("fedfm", start_round=start) for start in (1, 20, 40)},
        {f"lambda={weight:g}": {**_CIFAR10_NIID_1, "match_weight": weight} for weight in _WEIGHTS},
    ),
    printed=_IN_TEXT,
    notes=(),
)

TABLES = (
    _FIG_1, _TABLE_3, _TABLE_4, _TABLE_5, _TABLE_6, _TABLE_7, _TABLE_8, _TABLE_9, _TEXT, _FIG_7, _FIG_8A, _FIG_8B,
    _FIG_8C,
)  # fmt: skip
NOT_PLANNED = {
    "Tables I and II": "what is known of the methods, and formulas: no results; `fedcli table fedfm:IV` counts the "
    "floats that a client holds and sends",
    "Tables X and XII": "local epochs, homogeneous data; in the online appendix, which is not available",
    "Table XI": "partial participation; in the online appendix, which is not available; `fedcli run fedfm --protocol "
    "fedfm:partial --dataset cifar10` has 10 of 100 clients in a round",
    "Fig. 2": "features of two clients by t-SNE, without numbers; `fedcli quality RUNS --clients`, then `fedcli plot "
    "RUNS --kind clients`, draw it from FedAvg's runs of Fig. 1",
    "Figs. 3 to 5": "sketches of the method, of its two forms of guiding and of FedFM-Lite, without numbers",
    "Fig. 6": "features by t-SNE, without numbers; `fedcli quality RUNS`, then `fedcli plot RUNS --kind tsne`, draw it "
    "from Table V's runs",
    "Fig. 9": "how many images of each class a client has; in the online appendix, which is not available; `fedcli "
    "data show cifar10 --partition dirichlet:0.5` draws ours of NIID-1, `dominant:1` and `missing:3` those of NIID-2 "
    "and NIID-3",
    "Figs. 10 and 11": "how anchors move; in that appendix; `docs/examples/my_anchor_path.py` keeps those of all "
    "rounds",
}


# The paper's experiments: claims

_CIFAR10_NIID_1_COLUMN = ("CIFAR-10 NIID-1",)
_OTHERS = tuple(name for name in _ROWS if name != "FedFM")
_EARLIER_START = {"start_round": 8}  # a fifth of the rounds, where these are 40
CLAIMS = (
    Claim(
        name="fedfm:fedavg",
        text="Under Dirichlet shares of 0.5 on CIFAR-10, FedFM is ahead of FedAvg",
        table="fedfm:III",
        row="FedFM",
        other_rows=("FedAvg",),
        columns=_CIFAR10_NIID_1_COLUMN,
        allowed_options=_EARLIER_START,
        limiting_study="fedfm-start",
    ),
    Claim(
        name="fedfm:second-best",
        text="Under Dirichlet shares of 0.5 on CIFAR-10, FedFM is ahead of all seven others",
        table="fedfm:III",
        row="FedFM",
        other_rows=_OTHERS,
        columns=_CIFAR10_NIID_1_COLUMN,
        allowed_options=_EARLIER_START,
    ),
    Claim(
        name="fedfm:all-tasks",
        text="On average over three data sets and two skews, FedFM is ahead of all seven others",
        table="fedfm:III",
        row="FedFM",
        other_rows=_OTHERS,
        columns=tuple(_TWO_SKEWS),
    ),
    Claim(
        name="fedfm:missing",
        text="Where clients lack 1 to 7 classes of CIFAR-10, FedFM is on average ahead of FedAvg",
        table="fedfm:IV",
        row="FedFM",
        other_rows=("FedAvg",),
        columns=tuple(_MISSING),
    ),
    Claim(
        name="fedfm:missing-others",
        text="Where clients lack classes of CIFAR-10, FedFM is on average ahead of all others",
        table="fedfm:IV",
        row="FedFM",
        other_rows=_OTHERS,
        columns=tuple(_MISSING),
    ),
    Claim(
        name="fedfm:features",
        text="FedFM's features cluster better by class than FedAvg's, by NMI",
        table="fedfm:V",
        row="FedFM",
        other_rows=("FedAvg",),
        columns=("NMI",),
        allowed_options=_EARLIER_START,
    ),
    Claim(
        name="fedfm:silhouette",
        text="FedFM separates the features of classes better than FedAvg, by silhouette",
        table="fedfm:V",
        row="FedFM",
        other_rows=("FedAvg",),
        columns=("SS",),
        allowed_options=_EARLIER_START,
    ),
    Claim(
        name="fedfm:features-others",
        text="FedFM's features cluster better by class than those of all seven others, by NMI",
        table="fedfm:V",
        row="FedFM",
        other_rows=_OTHERS,
        columns=("NMI",),
        allowed_options=_EARLIER_START,
    ),
    Claim(
        name="fedfm:silhouette-others",
        text="FedFM separates the features of classes better than all seven others, by silhouette",
        table="fedfm:V",
        row="FedFM",
        other_rows=_OTHERS,
        columns=("SS",),
        allowed_options=_EARLIER_START,
    ),
    Claim(
        name="fedfm:many-clients",
        text="With 100 clients on CIFAR-100, FedFM is ahead of all seven others",
        table="fedfm:VI",
        row="FedFM",
        other_rows=_OTHERS,
        columns=("K=100 accuracy",),
    ),
    Claim(
        name="fedfm:bandwidth",
        text="A client of FedFM sends fewer floats in a round than one of SCAFFOLD",
        table="fedfm:IV",
        row="FedFM",
        other_rows=("SCAFFOLD",),
        columns=("bandwidth_1e3_floats",),
        direction="lower",
        allowed_options={"protocol": None, "partition": None},
        construction="SCAFFOLD sends two models and FedFM one with its anchors: arithmetic",
    ),
    Claim(
        name="fedfm:writers",
        text="On writers' characters (FEMNIST) FedFM is ahead of FedAvg and SCAFFOLD, with both networks",
        table="fedfm:VII",
        row="FedFM",
        other_rows=("FedAvg", "SCAFFOLD"),
        columns=("ResNet18-v1", "ResNet18-v2"),
    ),
    Claim(
        name="fedfm:guiding",
        text="Contrastive guiding is ahead of the squared distance",
        table="fedfm:text",
        row="FedFM",
        other_rows=("FedFM with squared l2 penalty",),
        columns=("CIFAR-10 NIID-1 accuracy",),
    ),
    Claim(
        name="fedfm:fedproto",
        text="FedFM is ahead of FedProto in the form of Section VII-C",
        table="fedfm:text",
        row="FedFM",
        other_rows=("generalized FedProto",),
        columns=("CIFAR-10 NIID-1 accuracy",),
    ),
    Claim(
        name="fedfm:uniform",
        text="With uniform anchors, too, for which no client tells its numbers of images, FedFM is ahead of FedAvg",
        table="fedfm:VIII",
        row="FedFM (uniform)",
        other_rows=("FedAvg",),
        columns=("accuracy",),
    ),
    Claim(
        name="fedfm:lite-1",
        text="FedFM-Lite, which sends models in every round, is ahead of all seven others",
        table="fedfm:Fig7",
        row=_LITE_1,
        other_rows=_OTHERS,
        columns=("accuracy",),
    ),
    Claim(
        name="fedfm:lite-2",
        text="FedFM-Lite, which sends models in every second round, is ahead of all seven others",
        table="fedfm:Fig7",
        row="FedFM-Lite a=2",
        other_rows=_OTHERS,
        columns=("accuracy",),
    ),
    Claim(
        name="fedfm:lite-floats",
        text="Where as many floats have been sent FedFM-Lite is ahead of SCAFFOLD",
        table="fedfm:Fig7",
        row=_LITE_1,
        other_rows=("SCAFFOLD",),
        columns=(_EQUAL_FLOATS,),
    ),
    Claim(
        name="fedfm:lite",
        text="FedFM-Lite, which sends models in every fifth round, is ahead of FedDyn and SCAFFOLD",
        table="fedfm:Fig7",
        row="FedFM-Lite a=5",
        other_rows=("FedDyn", "SCAFFOLD"),
        columns=("accuracy",),
    ),
    Claim(
        name="fedfm:add-on",
        text="Feature matching added to FedAvg, FedProx, FedNova and MOON lifts their mean accuracy",
        table="fedfm:Fig8a",
        row="with FM",
        other_rows=("without FM",),
        columns=tuple(_METHODS_WITH_MATCHING),
    ),
)
