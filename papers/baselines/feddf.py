"""FedDF: the clients' mean logits on public images are distilled, into the averaged model or into every client.

T. Lin, L. Kong, S. U. Stich, M. Jaggi, "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS
2020, https://arxiv.org/abs/2006.07242. Algorithms 1 and 3.

The ensemble of the clients' models, which gives the mean of their logits, is better than the mean of their weights. The
server starts from the latter and trains it on public images without labels to come near the ensemble,

    KL( softmax(mean_k f(x, theta_k)) || softmax(f(x, theta)) ).

Two methods: `feddf` is that one; where clients have different networks, each kind has a student of its own, and all
kinds are its teachers. `feddf-client` is what FCCL+ compares with under this name: clients keep their models, and each
distils the ensemble into its own.

Notation
    code            paper                           shape
    students        x_t, one of each architecture   dicts of tensors
    logits          f(x_k, d)                       [K, B, C], of a public batch
    target          their mean                      [B, C]

Readings and deviations
    1. Temperature 1; Adam with rate 0.001 and cosine annealing to 0, new in every round, without weight decay, as in
       the paper and the authors' code. Batches of 128 there; here they are the run's public batches.
    2. The paper stops when the accuracy on a validation set of the server no longer rises, after 10,000 steps at most.
       Here the server has none, so the number of passes over the public images is fixed. 5 is chosen here, to be
       affordable: 100 steps under FCCL+'s protocols.
    3. All teachers count the same, and are in evaluation mode. The student's first weights are averaged by examples.
    4. Where no client of a round has an architecture, its student stays as it is.
    5. A client is tested with the student of its architecture. If all have the same, that is the global model.
    6. `feddf-client` follows FCCL+'s code: in every public batch first all clients' logits, in training mode, the own
       ones in the mean, then one step of plain SGD with rate 0.001 and the run's weight decay, then the local phase.
       With `--average-parameters`, for equal networks, models are averaged between the two.

Run it
    fedcli run feddf --dataset digit-domains
    fedcli run feddf-client --dataset digit-domains
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedcli import Costs, Method, both_ways, option
from fedcli.core import (
    Batch,
    Buffers,
    Client,
    ClientState,
    Params,
    Step,
    copies,
    cosine_annealing,
    divergence,
    model_of,
    own_models,
    plain_loss,
    train_own_models,
    weighted_mean,
)
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.core.own_models import average_models, refuse_mixed_average
from fedcli.core.public_images import all_logits, exchange_logits, learn_from_public, make_public_loss


@dataclass(frozen=True)
class Config:
    """What FedDF adds to FedAvg."""

    distillation_epochs: int = option(
        5, "Passes over the public images in the server's distillation", source="Algorithm 1", low=0, off=0
    )
    distillation_lr: float = option(0.001, "First learning rate of the distillation", low=0, open_low=True)


class Student(NamedTuple):
    """The model of one architecture."""

    params: Params
    buffers: Buffers


class ServerState(NamedTuple):
    """What the server keeps between rounds."""

    students: tuple[Student, ...]  # one of each architecture
    architecture: Tensor  # [N], which of them a client has


def mean_model(clients: Client, weights: Tensor, fed: Federation) -> Student:
    """The mean of clients' models, weighted by examples; the plain mean where none of them has any."""
    weights = weights if weights.sum() > 0 else torch.ones_like(weights)
    return Student(*weighted_mean(fed.upload_model(clients), weights))


class Teachers(NamedTuple):
    """The clients of a round that have one architecture, and their mean."""

    architecture: int
    group: Cohort
    clients: Client  # after their local training, stacked
    mean: Student
    terms: Terms  # of their training


def train_clients(architecture: int, student: Student, group: Cohort, fed: Federation) -> Teachers:
    """The clients of one architecture, trained from their student, and the mean of their models."""
    clients = fed.broadcast(student.params, student.buffers, group)
    clients, terms = fed.train(clients, group, plain_loss(group.network))
    return Teachers(architecture, group, clients, mean_model(clients, group.weights, fed), terms)


@dataclass
class Learner:
    """A student while it learns from the ensemble, as the only client of a group."""

    model: Client  # [1, ...]
    group: Cohort
    step: Step
    mean_loss: Tensor  # of the steps so far the sum, over the number of all steps


def make_learner(teachers: Teachers, fed: Federation) -> Learner:
    """A student of one architecture that begins at the mean of its clients' models."""
    stacked = copies(teachers.mean, 1)
    model = Client(stacked.params, stacked.buffers)
    alone = teachers.group._replace(client_ids=teachers.group.client_ids[:1])
    loss = make_public_loss(alone.network, "distillation", divergence)
    step = fed.optimizer_step(loss, optimizer="adam", weight_decay=0.0, key="server")
    return Learner(model, alone, step, mean_loss=alone.weights.new_zeros(()))


class Distilled(NamedTuple):
    """What has become of a student."""

    student: Student
    loss: Tensor  # scalar, the mean over its steps


def distil(ensemble: list[Teachers], cohort: Cohort, fed: Federation, config: Config) -> list[Distilled]:
    """The ensemble of all clients into a student of each architecture."""
    learners = [make_learner(teachers, fed) for teachers in ensemble]
    of_architectures = [teachers.clients for teachers in ensemble]
    num_steps = config.distillation_epochs * len(fed.public_batch_sizes)
    steps_done = 0
    for epoch in range(config.distillation_epochs):
        for batch in fed.public_batches(cohort.round, epoch):
            rate = cosine_annealing(config.distillation_lr, steps_done, num_steps)
            batch = batch._replace(lr=torch.full_like(batch.lr, rate))
            steps_done += 1
            target = all_logits(of_architectures, cohort, fed, batch.x, train=False).mean(0)  # [B, C]
            for learner in learners:
                learner.model, aux = fed.step(learner.model, learner.group, learner.step, batch, target)
                (loss,) = aux.terms["distillation"]
                learner.mean_loss = learner.mean_loss + loss / num_steps
    distilled = []
    for learner in learners:
        model = model_of(learner.model, 0)
        distilled.append(Distilled(Student(model.params, model.buffers), learner.mean_loss))
    return distilled


def init(fed: Federation, config: Config) -> ServerState:
    """The initial model of each architecture."""
    students = []
    for network in fed.networks:
        params, buffers = fed.initial_model(network)
        students.append(Student(params, buffers))
    return ServerState(tuple(students), torch.as_tensor(fed.architecture))


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """Algorithm 1 (and 3, for several architectures), one round."""
    groups = fed.groups(cohort)
    ensemble = []
    for group in groups:
        architecture = fed.networks.index(group.network)
        ensemble.append(train_clients(architecture, state.students[architecture], group, fed))
    distilled = distil(ensemble, cohort, fed, config)
    students = list(state.students)  # Reading 4
    terms = []
    for teachers, (student, loss) in zip(ensemble, distilled, strict=True):
        students[teachers.architecture] = student
        of_clients = loss.expand(len(teachers.group.client_ids))
        terms.append({**teachers.terms, "distillation": of_clients})
    return state._replace(students=tuple(students)), fed.in_order(cohort, groups, terms)


METHOD = Method(
    name="feddf",
    title="FedDF: the averaged model learns from the ensemble of the clients' models",
    config=Config, init=init, run_round=run_round,
    reduces_to=None,  # without distillation it is FedAvg, with a model for each client: see its tests
    state_types=(ServerState, Student),
    costs=both_ways(lambda sizes: sizes.parameters),
    default_protocol="fccl:digits-4",
    personal=lambda state: {client: state.students[kind] for client, kind in enumerate(state.architecture.tolist())},
    mixed_networks=True, uses_public_data=True,
)  # fmt: skip


# What FCCL+ compares with


@dataclass(frozen=True)
class ClientConfig:
    """What distillation in the clients adds to local training."""

    distillation_epochs: int = option(1, "Passes over the public images in a round", low=0, off=0)
    distillation_lr: float = option(
        0.001, "Learning rate of the distillation", source="FCCL+'s code", low=0, open_low=True
    )
    average_parameters: bool = option(
        False, "Average the models between distillation and local training, for equal networks", source="FCCL+'s code"
    )


class Clients(NamedTuple):
    """The state of the simulation; the server itself keeps nothing."""

    clients: Mapping[int, ClientState]  # of those that have taken part


def distil_into_clients(
    models: list[Client], cohort: Cohort, fed: Federation, config: ClientConfig
) -> tuple[list[Client], Terms]:
    """The ensemble into each of its members; returns the models and the mean loss of each client, `[K]`."""
    steps = []
    for group in fed.groups(cohort):
        loss = make_public_loss(group.network, "distillation", divergence)
        steps.append(fed.optimizer_step(loss, optimizer="sgd", lr=config.distillation_lr, momentum=0.0, key="public"))

    def exchange(models: list[Client], batch: Batch) -> Tensor:
        return exchange_logits(models, cohort, fed, batch.x)

    return learn_from_public(models, steps, exchange, cohort, fed, range(config.distillation_epochs))


def init_clients(fed: Federation, config: ClientConfig) -> Clients:
    """Nobody has trained yet."""
    if config.average_parameters:
        refuse_mixed_average(fed)
    return Clients({})


def run_client_round(state: Clients, cohort: Cohort, fed: Federation, config: ClientConfig) -> tuple[Clients, Terms]:
    """One round of FCCL+'s comparison."""
    models = [own_models(state.clients, group, fed) for group in fed.groups(cohort)]
    models, terms = distil_into_clients(models, cohort, fed, config)
    if config.average_parameters:
        models = average_models(models, cohort, fed)
    states, trained = train_own_models(models, state.clients, cohort, fed)
    return Clients(states), {**terms, **trained}


def client_costs(state: Clients, cohort: Cohort, fed: Federation, config: ClientConfig) -> Costs:
    """Logits of the public images both ways, in every pass; and the model where it is averaged."""
    of_client = config.distillation_epochs * sum(fed.public_batch_sizes) * fed.num_classes
    if config.average_parameters:
        of_client += fed.sizes.parameters
    total = len(cohort.client_ids) * of_client
    return Costs(down=total, up=total)


CLIENT_FORM = Method(
    name="feddf-client",
    title="FedDF in the clients: each learns from the mean logits on public images",
    config=ClientConfig, init=init_clients, run_round=run_client_round,
    reduces_to=("local", {"distillation_epochs": 0, "average_parameters": False}),
    state_types=(Clients, ClientState),
    variants={"averaged": {"average_parameters": True}},
    costs=client_costs,
    default_protocol="fccl:digits-4",
    personal=lambda state: state.clients,
    mixed_networks=True, uses_public_data=True,
)  # fmt: skip

METHODS = (CLIENT_FORM,)
