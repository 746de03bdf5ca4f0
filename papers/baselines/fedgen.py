"""FedGen: LG-FedAvg, and a generator of features from the server, on which every client also trains its head.

Z. Zhu, J. Hong, J. Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021,
https://arxiv.org/abs/2105.10056. Algorithm 1. Here in the form for different networks (the paper's variant that shares
the predictor alone), which FedSA compares with.

From noise and a label the generator makes a feature vector. The server trains it so that the clients' heads together
give the vector its label, and sends it with the averaged head. A client's head so learns also from features of classes
that the client lacks:

    J(theta_k) = cross-entropy + weight * mean over y ~ p(y) and z ~ G(.|y) of the head's cross-entropy on (z, y)

Notation
    code                            paper           shape
    head                            theta^p         `head.weight` [C, D] and `head.bias` [C]
    ClientState.params              theta^f_k       the client's own extractor
    Generator                       w               331,776 parameters for D = 512, C = 100
    noise, labels                   epsilon, y      [steps, B, 32], [steps, B]
    class_counts                    p(y)            [C], in examples; the c_k of the clients, summed

Readings and deviations
    1. As in LG-FedAvg extractors stay where they are, and the last linear layer is averaged, weighted by examples. The
       paper averages whole models without weights.
    2. The generator is trained on the mean of the heads' logits. Heads are linear, so these are the logits of the mean
       head, the same one that the server sends.
    3. The generator is a linear layer of 512, batch normalisation, ReLU and a linear layer. Its input is the noise and
       the label as one of C. Clients run it in evaluation mode, as in the authors' code.
    4. What the clients receive is the trained generator. In HtFLlib, on which FedSA's code is built, the trained one is
       not stored: clients learn random features of an untrained one, in training mode and from the first round on, with
       labels from the class counts of all clients. That is `--form code`, which FedSA's protocols have; the server does
       not train then. Counts are of whole training parts, there without a dropped last batch.
    5. The noise is normal, as in the paper; the authors' code and HtFLlib, and so the code's form, draw it uniformly
       from [0, 1).
    6. In the first round the generator is untrained and clients train without it, as in the authors' code.
    7. The authors' code has more than the paper's objectives: a diversity loss of the generator, decaying weights, and
       a distance between outputs for real and for generated features. HtFLlib has none of the three, nor has this.
    8. p(y) are the class counts of the round's clients in the paper's form; the paper starts from a uniform one. A
       generated batch is as large as a real one. The server trains for 100 steps of Adam (rate 0.1), new in every
       round, as in HtFLlib.

Run it
    fedcli run fedgen --dataset digits
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedcli import Costs, Method, option
from fedcli.core import (
    Aux,
    Buffers,
    Client,
    LocalLoss,
    Network,
    Params,
    Step,
    axes_of,
    composed,
    copies,
    cross_entropy,
    stack,
    tree_map,
    weighted_mean,
)
from fedcli.core.federation import Cohort, Federation, Terms
from fedcli.core.own_models import CohortRound, GroupRound, train_by_network
from fedcli.papers.baselines.lg_fedavg import HEAD, ClientState, with_mean_head, without_head

NOISE = 32  # width of the generator's input, beside the label
HIDDEN = 512  # width of its hidden layer


@dataclass(frozen=True)
class Config:
    """What FedGen adds to LG-FedAvg."""

    generator_weight: float = option(
        1.0, "Weight of the cross-entropy on generated features", source="Algorithm 1", low=0, off=0
    )
    generator_steps: int = option(
        100, "Steps of the generator's training in a round", source="Algorithm 1", low=1, only_with={"form": ("paper",)}
    )
    generator_lr: float = option(
        0.1, "Learning rate of the generator's training", symbol="α", low=0, open_low=True,
        only_with={"form": ("paper",)},
    )  # fmt: skip
    form: str = option(
        "paper", "The paper's method, or that of HtFLlib, whose generator is never trained", choices=("paper", "code"),
        before="paper",
    )  # fmt: skip


class Generator(NamedTuple):
    """The generator G."""

    params: Params
    buffers: Buffers  # running statistics of its batch normalisation


class Samples(NamedTuple):
    """Draws for some minibatches of generated features."""

    noise: Tensor  # [steps, B, NOISE]
    labels: Tensor  # [steps, B]


class Context(NamedTuple):
    """What a client is given for a round, and its own draws."""

    generator: Generator
    samples: Samples


CONTEXT_AXES = axes_of(Context, generator=None, samples=0)


class ServerState(NamedTuple):
    """What the server keeps, and by client id what the clients keep."""

    head: Params
    generator: Generator
    class_counts: Tensor  # [C], int64
    clients: Mapping[int, ClientState]  # of those that have taken part


def initial_generator(num_classes: int, dim: int, rng: np.random.Generator) -> Generator:
    """A generator with linear layers from U(-1/sqrt(n), 1/sqrt(n)), n inputs, as torch draws them by default."""
    params = {"norm.weight": torch.ones(HIDDEN), "norm.bias": torch.zeros(HIDDEN)}

    def add_linear(name: str, inputs: int, outputs: int) -> None:
        bound = inputs**-0.5
        params[f"{name}.weight"] = torch.from_numpy(rng.uniform(-bound, bound, (outputs, inputs)))
        params[f"{name}.bias"] = torch.from_numpy(rng.uniform(-bound, bound, outputs))

    add_linear("hidden", NOISE + num_classes, HIDDEN)
    add_linear("out", HIDDEN, dim)
    return Generator(params, {"norm.mean": torch.zeros(HIDDEN), "norm.var": torch.ones(HIDDEN)})


def generate(params: Params, buffers: Buffers, noise: Tensor, labels: Tensor, num_classes: int, train: bool) -> Tensor:
    """G(epsilon, y): features for some labels; `[B, D]`.

    Args:
        params: Of the generator.
        buffers: Of the generator; updated in place in training. In training they may be empty.
        noise: `[B, NOISE]`.
        labels: `[B]`.
        num_classes: C.
        train: Whether batch normalisation uses the batch's statistics.
    """
    one_hot = (labels[:, None] == torch.arange(num_classes, device=labels.device)).to(noise)
    hidden = F.linear(torch.cat([noise, one_hot], 1), params["hidden.weight"], params["hidden.bias"])
    mean = buffers.get("norm.mean")
    var = buffers.get("norm.var")
    hidden = F.batch_norm(hidden, mean, var, params["norm.weight"], params["norm.bias"], train)
    return F.linear(hidden.relu(), params["out.weight"], params["out.bias"])


def draw_samples(
    class_counts: Tensor, steps: int, size: int, rng: np.random.Generator, uniform: bool = False
) -> Samples:
    """Noise from N(0, I), or from [0, 1) alike, and labels from p(y).

    Args:
        class_counts: `[C]`, not all 0.
        steps: How many minibatches.
        size: Of each.
        rng: Where the draws come from.
        uniform: Whether the noise is uniform.
    """
    shares = class_counts.cpu().double().numpy()
    labels = rng.choice(len(shares), (steps, size), p=shares / shares.sum())
    draw_noise = rng.random if uniform else rng.standard_normal  # Reading 5
    noise = draw_noise((steps, size, NOISE))
    return Samples(torch.from_numpy(noise), torch.from_numpy(labels))


def on_device(samples: Samples, fed: Federation) -> Samples:
    """The samples where the federation computes, the noise in its type of numbers."""
    return Samples(samples.noise.to(fed.device, fed.dtype), samples.labels.to(fed.device))


def train_generator(generator: Generator, head: Params, samples: Samples, lr: float) -> Generator:
    """The generator after some steps of Adam on the cross-entropy of the mean head on generated features.

    Args:
        generator: Of the last round.
        head: The mean of the clients' heads.
        samples: One minibatch for each step.
        lr: Learning rate.
    """
    params = {name: value.clone().requires_grad_() for name, value in generator.params.items()}
    buffers = tree_map(torch.clone, generator.buffers)
    optimizer = torch.optim.Adam(params.values(), lr)
    for noise, labels in zip(samples.noise, samples.labels, strict=True):
        features = generate(params, buffers, noise, labels, len(head["head.bias"]), train=True)
        loss = F.cross_entropy(F.linear(features, head["head.weight"], head["head.bias"]), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Generator(tree_map(Tensor.detach, params), buffers)


def make_local_loss(network: Network, weight: float, batch_statistics: bool) -> LocalLoss:
    """The local objective J(theta_k); the context's samples are those of one minibatch.

    Args:
        network: The client's.
        weight: That of the cross-entropy on generated features.
        batch_statistics: Whether the generator normalises by the statistics of its batch, as in HtFLlib; else by its
            running ones. Readings 3 and 4.
    """

    def local_loss(params, buffers, batch, context):
        features, logits, buffers = network(params, buffers, batch.x, batch.mask)
        task = cross_entropy(logits, batch.y, batch.mask)
        noise = context.samples.noise  # [B, NOISE]
        labels = context.samples.labels
        generator = context.generator
        running = {} if batch_statistics else generator.buffers
        num_classes = logits.shape[-1]
        made = generate(generator.params, running, noise, labels, num_classes, train=batch_statistics)
        generated = cross_entropy(F.linear(made, params["head.weight"], params["head.bias"]), labels)
        terms = {"cross_entropy": task, "generated": generated}
        return task + weight * generated, Aux(buffers, terms, features)

    return local_loss


def sampling(step: Step) -> Step:
    """The step, given the next of the client's samples; the client's memory counts them."""

    def update(client, batch, context):
        step_index = client.memory[None]
        samples = tree_map(lambda leaf: leaf.index_select(0, step_index).squeeze(0), context.samples)
        client, aux = step.update(client, batch, context._replace(samples=samples))
        return client._replace(memory=client.memory + 1), aux

    return composed(update, step)


def client_samples(class_counts: Tensor, cohort: Cohort, fed: Federation, size: int, uniform: bool) -> Samples:
    """Every client's draws for the round, `[K, steps, ...]`: enough for the client with the most steps.

    Args:
        class_counts: `[C]`.
        cohort: The clients.
        fed: The federation.
        size: Generated features in a step.
        uniform: Whether the noise is uniform.
    """
    most_examples = max(map(len, fed.training))
    steps = fed.local_epochs * math.ceil(most_examples / fed.batch_size)
    samples = []
    for client in cohort.client_ids:
        rng = fed.generator(cohort.round, client, "generated")
        samples.append(draw_samples(class_counts, steps, size, rng, uniform))
    return on_device(stack(samples), fed)


def sum_counts(counts: Tensor, previous: Tensor) -> Tensor:
    """Class counts of the cohort, `[C]`, from those of its clients `[K, C]`; the previous ones where all are 0."""
    total = counts.sum(0)
    return torch.where(total.sum() > 0, total, previous)


def init(fed: Federation, config: Config) -> ServerState:
    """The first head and generator, and p(y): uniform, or the counts of all clients; nobody has trained yet."""
    first = initial_generator(fed.num_classes, fed.feature_dim, fed.generator("generator"))
    first_network, *_ = fed.networks
    params, _ = fed.initial_model(first_network)
    class_counts = torch.ones(fed.num_classes, dtype=torch.int64, device=fed.device)
    if config.form == "code":  # Reading 4
        class_counts = fed.class_counts(fed.cohort_of(0, range(fed.num_clients))).sum(0)
    head = {name: params[name] for name in HEAD}
    generator = tree_map(lambda leaf: leaf.to(fed.device, fed.dtype), first)
    return ServerState(head, generator, class_counts, {})


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """One round, in the paper's form or in that of HtFLlib."""
    if config.form == "code":
        return htfllib_round(state, cohort, fed, config)
    return paper_round(state, cohort, fed, config)


def count_generator(generator: Generator, cohort: Cohort, fed: Federation) -> None:
    """Counts the generator as sent to the cohort; p(y) goes too, in integers, which cost nothing."""
    fed.count_broadcast(generator.params, generator.buffers, len(cohort.client_ids))


def paper_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """Algorithm 1, one round: the clients train with the generator that the server trained in the last one."""
    weight = config.generator_weight if cohort.round else 0.0  # Reading 6
    head = fed.download(state.head, cohort)
    if weight:
        count_generator(state.generator, cohort, fed)
    samples = client_samples(state.class_counts, cohort, fed, fed.batch_size, uniform=False)
    make_loss = partial(make_local_loss, weight=weight, batch_statistics=False)
    states, heads, terms = train_clients(state, head, samples, cohort, fed, make_loss)
    head = weighted_mean(fed.upload(heads), cohort.weights)
    class_counts = sum_counts(fed.upload(fed.class_counts(cohort)), state.class_counts)
    generator = state.generator
    if config.generator_weight:
        size = max(fed.batch_size, 2)  # batch normalisation needs two
        rng = fed.generator(cohort.round, "generator")
        batches = on_device(draw_samples(class_counts, config.generator_steps, size, rng), fed)
        generator = train_generator(generator, head, batches, config.generator_lr)
    return ServerState(head, generator, class_counts, states), terms


def htfllib_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """One round of HtFLlib, whose server sends a generator that nobody trains. Reading 4."""
    head = fed.download(state.head, cohort)
    if config.generator_weight:
        count_generator(state.generator, cohort, fed)
    size = max(fed.batch_size, 2)  # batch normalisation in training mode needs two
    samples = client_samples(state.class_counts, cohort, fed, size, uniform=True)
    make_loss = partial(make_local_loss, weight=config.generator_weight, batch_statistics=True)
    states, heads, terms = train_clients(state, head, samples, cohort, fed, make_loss)
    head = weighted_mean(fed.upload(heads), cohort.weights)
    return ServerState(head, state.generator, state.class_counts, states), terms


def train_clients(
    state: ServerState, head: Params, samples: Samples, cohort: Cohort, fed: Federation,
    make_loss: Callable[[Network], LocalLoss],
) -> CohortRound:  # fmt: skip
    """All clients' local training; a client keeps its extractor, and what it sends is its head.

    Args:
        state: Before the round.
        head: As received.
        samples: Each client's draws, `[K, steps, ...]`.
        cohort: The clients.
        fed: The federation.
        make_loss: From a client's network to its objective.
    """

    def train_group(group: Cohort) -> GroupRound:  # clients with the same network
        size = len(group.client_ids)
        params, buffers = fed.initial_model(group.network)
        private = fed.recall(state.clients, group, ClientState(without_head(params, head), buffers))
        first_step = state.class_counts.new_zeros(size)
        clients = Client({**private.params, **copies(head, size)}, private.buffers, memory=first_step)
        step = sampling(fed.optimizer_step(make_loss(group.network)))
        context = Context(state.generator, fed.of_group(samples, cohort, group))
        clients, terms = fed.train(clients, group, step, context, CONTEXT_AXES)
        extractor = ClientState(without_head(clients.params, head), clients.buffers)
        own_head = {name: clients.params[name] for name in HEAD}
        return GroupRound(extractor, sent=own_head, terms=terms)

    return train_by_network(train_group, state.clients, cohort, fed)


def costs(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> Costs:
    """The head both ways, and the generator down wherever it is used."""
    size = len(cohort.client_ids)
    head_floats = fed.num_classes * (fed.feature_dim + 1)
    is_used = config.form == "code" or cohort.round > 0  # Reading 6
    floats_down = head_floats
    if config.generator_weight and is_used:
        floats_down += sum(value.numel() for value in state.generator.params.values())
    return Costs(down=size * floats_down, up=size * head_floats)


def generator_floats(num_classes: int, dim: int) -> int:
    """Parameters of the generator: of its hidden layer with the normalisation, and of its last layer."""
    hidden = HIDDEN * (NOISE + num_classes + 3)
    out = dim * (HIDDEN + 1)
    return hidden + out


METHOD = Method(
    name="fedgen",
    title="FedGen: own extractors under one averaged head that also learns generated features",
    config=Config, init=init, run_round=run_round,
    reduces_to=("lg-fedavg", {"generator_weight": 0.0}),
    state_types=(ServerState, ClientState, Generator),
    variants={"code": {"form": "code"}},
    costs=costs,
    default_protocol="fedsa:cifar10-silo",
    client_memory=lambda sizes: sizes.parameters + generator_floats(sizes.num_classes, sizes.feature_dim),
    personal=with_mean_head,
    mixed_networks=True,
)  # fmt: skip
