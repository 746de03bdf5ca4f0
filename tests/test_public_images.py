"""Methods whose clients say something of public images: FedMD, FedMatch, RHFL and FedDF.

What they exchange is held to a plain loop, and its parts to hand numbers.
"""

import itertools
import math
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedcli import toy
from fedcli.core.clients import Client
from fedcli.core.trees import select, tree_map
from fedcli.papers.baselines import feddf, fedmatch, rhfl
from fedcli.papers.baselines.fedavg import make_local_loss
from fedcli.papers.baselines.fedmd import ClientState, ServerState, digest
from fedcli.registry import find_method
from tests import laws
from tests.first_rounds import prepare_public_phase
from tests.networks import TWO_NETWORKS
from tests.plain_loops import modules_of
from tests.public_phases import PublicPhase, models_of, stacked_by_network
from tests.tensors import doubles, randn

# FedMD

BATCHNORM = f"{toy.BATCHNORM},cnn-small"
LOCAL = find_method("local")
ADAM = {"optimizer": "adam", "lr": 0.003}


def logits_of(modules, x):
    """The scores of each network, [K, B, C]."""
    outputs = [module(x) for module in modules]
    return torch.stack([logits for _, logits in outputs])


def test_fedmds_digest_is_a_plain_loop():
    """Its targets are mean scores in evaluation mode, taken before any update."""
    setup, fed, cohort, states = prepare_public_phase("fedmd", {"digest_epochs": 2}, backbone=BATCHNORM, **ADAM)
    modules = [module.eval() for module in modules_of(fed, states)]
    batches = list(fed.public_batches(0))
    with torch.no_grad():
        means = [logits_of(modules, batch.x).mean(0) for batch in batches]
    steps = itertools.product(means * 2, modules)  # in each step all clients learn from one mean

    def objective(k, scores_of_client, scores_of_all):
        mean, _ = next(steps)
        return (F.l1_loss(scores_of_client.logits, mean),)

    optimizer = partial(torch.optim.Adam, lr=0.003)  # without weight decay
    phase = PublicPhase(digest, objective, optimizer, has_fresh_optimizers=False, batches=batches * 2)
    terms, _ = laws.assert_public_phase_agrees(phase, fed, cohort, states, setup.method_config)
    assert terms["digest"].shape == (4,)


def test_fedmd_by_batch_is_a_plain_loop():
    """Every batch has an optimizer of its own, and its targets are scores in training mode."""
    overrides = {"digest_epochs": 2, "exchange": "batch"}
    setup, fed, cohort, states = prepare_public_phase("fedmd", overrides, backbone=BATCHNORM, **ADAM)

    def objective(k, scores_of_client, scores_of_all):
        mean = torch.stack([scores.logits for scores in scores_of_all]).mean(0)
        return (F.l1_loss(scores_of_client.logits, mean),)

    optimizer = partial(torch.optim.Adam, lr=0.003)
    batches = [*fed.public_batches(0, epoch=0), *fed.public_batches(0, epoch=1)]
    # The exchange leaves the running statistics alone.
    phase = PublicPhase(digest, objective, optimizer, batches=batches)
    laws.assert_public_phase_agrees(phase, fed, cohort, states, setup.method_config)


@pytest.mark.parametrize("averaged", [False, True])
def test_fedmds_local_training_begins_at_the_digested_models(averaged):
    """With the option `average_parameters` it begins at their average."""
    overrides = {"exchange": "batch", "average_parameters": averaged}
    setup, fed, cohort, states = prepare_public_phase("fedmd", overrides, backbone=toy.BATCHNORM)

    digested, _ = digest(stacked_by_network(fed, cohort, states), cohort, fed, setup.method_config)
    models = models_of(fed.groups(cohort), digested)
    if averaged:  # uniformly, buffers too
        mean = tree_map(lambda *leaves: sum(leaves) / 4, *models.values())
        models = dict.fromkeys(models, mean)
    between = {client: ClientState(*model) for client, model in models.items()}
    expected, _ = LOCAL.run_round(ServerState(between), cohort, fed, setup.method_config)

    state, terms = laws.method_round(setup, fed, ServerState(states), cohort)
    laws.assert_agree(state.clients, expected.clients, "a round")
    assert set(terms) == {"digest", "cross_entropy"}


def test_fedmds_newcomers_train_on_their_own_data_before_their_first_digest():
    """Of two clients one comes later; who has taken part is not trained so again."""
    options = {"parts": toy.toy_parts((6, 5)), "num_clients": 2}
    setup, fed = toy.federation("fedmd", {"pretrain_epochs": 3}, **options)
    plain_setup, plain_fed = toy.federation("fedmd", **options)
    state = laws.initial_state(setup, fed)
    expected = {}
    for number, clients in enumerate([[0], [0, 1]]):
        cohort = fed.cohort_of(number, clients)
        state, _ = laws.method_round(setup, fed, state, cohort)

        for newcomer in set(clients) - expected.keys():
            alone = fed.cohort_of(number, [newcomer])
            fresh = fed.broadcast(*fed.initial_model(), alone)
            trained, _ = fed.train(fresh, alone, make_local_loss(fed.network), epochs=range(2, 5))
            params, buffers = select((trained.params, trained.buffers), 0)
            expected[newcomer] = ClientState(params, buffers)
        plain_state = ServerState(expected)
        plain_state, _ = laws.method_round(plain_setup, plain_fed, plain_state, cohort)
        expected = dict(plain_state.clients)

        laws.assert_agree(state.clients, expected, f"round {number}")


def test_images_turned_grey_are_not_normalised_as_colours():
    _, fed = toy.federation("fccl-plus", protocol="fccl:digits-4", public_dataset="cifar100")
    assert len(fed.public_transform.mean) == fed.public_images.shape[1] == 1


# FedMatch


def test_fedmatchs_agreed_label_is_the_majoritys_and_the_lowest_in_a_tie():
    logits = torch.tensor([[0.1, 0.2, 0.7], [0.1, 0.2, 0.7], [0.3, 0.3, 0.4]]).log()
    helpers = torch.tensor([[[0.0, 0, 1], [1, 0, 0], [0, 1, 0]], [[0.0, 1, 0], [1, 0, 0], [1, 0, 0]]])
    assert fedmatch.agreed_labels(logits, helpers).tolist() == [2, 0, 0]  # in the last row each of three says another
    assert fedmatch.consistency(logits, helpers, fedmatch.Config(confidence=0.9)) == (0, 0)  # nobody is so sure


def test_ties_between_helpers_go_to_the_lower_id_in_any_order():
    predictions = torch.zeros(4, 2, 3)
    assert fedmatch.find_helpers(predictions[:2], np.arange(2), 2).tolist() == [[1], [0]]  # there are no more
    assert fedmatch.find_helpers(predictions, np.arange(4), 2).tolist() == [[1, 2], [0, 2], [0, 1], [0, 1]]
    ids = np.array([7, 3, 9, 5])
    helpers = fedmatch.find_helpers(predictions, ids, 2)
    assert ids[helpers].tolist() == [[3, 5], [5, 7], [3, 5], [3, 7]]


def test_fedmatchs_public_phase_against_a_plain_loop():
    options = {"confidence": 0.4, "consistency_weight": 0.7, "agreement_weight": 0.3, "helpers": 2}
    setup, fed = toy.federation("fedmatch", options, momentum=0.9, weight_decay=0.1, **TWO_NETWORKS)
    states = toy.simulate(setup, fed, 1).clients

    def objective(k, scores_of_client, scores_of_all):
        p = [scores.logits.softmax(1) for scores in scores_of_all]  # of each client, [B, C]

        def distance(other):
            return ((p[other] - p[k]) ** 2).sum().item()

        nearest = sorted(range(4), key=distance)
        nearest.remove(k)
        helpers = nearest[:2]

        log_p = F.log_softmax(scores_of_client.logits, 1)
        divergence = agreement = 0 * log_p.sum()
        sure = [i for i in range(len(log_p)) if p[k][i].max() >= 0.4]
        for i in sure:
            divergences = [F.kl_div(log_p[i], p[helper][i], reduction="sum") for helper in helpers]
            divergence = divergence + sum(divergences) / 2 / len(sure)
            votes = [int(p[client][i].argmax()) for client in (k, *helpers)]
            label = max(range(3), key=votes.count)
            agreement = agreement - log_p[i][label] / len(sure)
        return 0.7 * divergence + 0.3 * agreement, divergence, agreement

    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)  # no weight decay
    phase = PublicPhase(fedmatch.agree, objective, optimizer, has_fresh_optimizers=False)
    terms, means = laws.assert_public_phase_agrees(phase, fed, fed.cohort(1), states, setup.method_config)
    divergences, agreements = means
    assert terms["consistency"].tolist() == pytest.approx(divergences)
    assert terms["agreement"].tolist() == pytest.approx(agreements)


# RHFL

ALL = torch.tensor([True, True, True])  # clients have a loss of an earlier round


def test_rhfls_symmetric_cross_entropy_by_its_equation_with_bounded_logarithms():
    logits = 3 * randn(6, 4)
    labels = torch.tensor([0, 1, 3, 2, 0, 1])
    logits[1, 2] = 1000.0  # the other classes' p is 1e-7 at least
    truth = F.one_hot(labels, 4).double().clamp(min=1e-4)
    reverse = -(logits.softmax(1).clamp(min=1e-7) * truth.log()).sum(1)
    expected = 0.3 * F.cross_entropy(logits, labels) + 2 * reverse.mean()
    config = rhfl.Config(cross_entropy_weight=0.3, reverse_weight=2.0)
    torch.testing.assert_close(rhfl.symmetric_cross_entropy(logits, labels, config), expected)


def test_rhfls_weights_by_hand():
    # q = (2-1)/1 = 1, (3-2)/2 = 1/2, (1-2)/2 = -1/2, sum 1; a = 1/2 + 1/2 (1, 1/2, -1/2) = 1, 3/4, 1/4
    weights = rhfl.confidence_weights(doubles([2, 3, 1]), doubles([1, 2, 2]), ALL, 0.5)
    powers = [math.exp(a) for a in (1.0, 0.75, 0.25)]
    assert weights.tolist() == pytest.approx([power / sum(powers) for power in powers], rel=1e-12)


def test_rhfls_weights_where_there_is_nothing_to_compare():
    assert rhfl.confidence_weights(doubles([0, 0, 0]), doubles([1, 2, 2]), ~ALL, 0.5).tolist() == [0.5] * 3
    third = pytest.approx([1 / 3] * 3)
    assert rhfl.confidence_weights(doubles([2, 2, 2]), doubles([2, 2, 2]), ALL, 0.5).tolist() == third
    assert rhfl.confidence_weights(doubles([3, 1, 2]), doubles([2, 2, 2]), ALL, 0.5).tolist() == third  # 1/2 - 1/2 + 0
    # A newcomer and a client without examples have q = 0: a = 1/2 + 1/2 (1, 0, 0)
    newcomer = rhfl.confidence_weights(doubles([3, 0, 5]), doubles([2, 4, 0]), torch.tensor([True, False, True]), 0.5)
    powers = [math.exp(1), math.exp(0.5), math.exp(0.5)]
    assert newcomer.tolist() == pytest.approx([power / sum(powers) for power in powers])
    assert rhfl.confidence_weights(doubles([0]), doubles([1]), torch.tensor([False]), 0.5).tolist() == [1]


def test_rhfls_public_phase_against_a_plain_loop():
    setup, fed = toy.federation("rhfl", optimizer="adam", lr=0.01, **TWO_NETWORKS)
    states = toy.simulate(setup, fed, 1).clients
    weights = doubles([0.1, 0.2, 0.3, 0.4])

    def objective(k, scores_of_client, scores_of_all):
        log_p = F.log_softmax(scores_of_client.logits, 1)
        loss = 0
        for other, scores in enumerate(scores_of_all):
            if other != k:
                target = scores.logits.softmax(1)
                loss += weights[other] * F.kl_div(log_p, target, reduction="batchmean")
        return loss, loss

    def align(clients, *rest):
        return rhfl.align(clients, weights, *rest)

    optimizer = partial(torch.optim.Adam, lr=0.01)
    phase = PublicPhase(align, objective, optimizer)
    terms, (losses,) = laws.assert_public_phase_agrees(phase, fed, fed.cohort(1), states, setup.method_config)
    assert terms["alignment"].tolist() == pytest.approx(losses)


def test_rhfls_losses_are_those_of_the_training_parts():
    options = {"validation": 0.3, "parts": toy.toy_parts((0, 13, 7, 10)), **TWO_NETWORKS}
    config = rhfl.Config()
    _, fed, cohort, states = prepare_public_phase("local", **options)

    losses = rhfl.own_losses(stacked_by_network(fed, cohort, states), cohort, fed, config)

    assert losses[0] == 0  # of the client without examples
    for client in (1, 2, 3):
        params, buffers = states[client]
        network = fed.networks[client % 2]
        _, logits, labels = fed.predict(params, buffers, fed.training[client], network)
        torch.testing.assert_close(losses[client], rhfl.symmetric_cross_entropy(logits, labels, config))


class ComparedLosses(NamedTuple):
    """What RHFL's weights of a round are made of, [K] each."""

    previous: Tensor
    current: Tensor
    has_previous: Tensor


def test_rhfls_previous_loss_is_that_of_a_clients_last_round(monkeypatch):
    losses_of_rounds = []
    confidence_weights = rhfl.confidence_weights

    def observed_weights(previous, current, has_previous, *rest):
        losses_of_rounds.append(ComparedLosses(previous, current, has_previous))
        return confidence_weights(previous, current, has_previous, *rest)

    monkeypatch.setattr(rhfl, "confidence_weights", observed_weights)
    setup, fed = toy.federation("rhfl", cohort_size=2)

    state = toy.simulate(setup, fed, 3, [[0, 1], [2, 0], [1, 3]])

    first, second, third = losses_of_rounds
    assert first.has_previous.tolist() == [False, False]
    assert second.has_previous.tolist() == [False, True]
    assert third.has_previous.tolist() == [True, False]
    client_0, client_1 = first.current
    _, previous_of_client_0 = second.previous
    previous_of_client_1, _ = third.previous
    assert previous_of_client_0 == client_0
    assert previous_of_client_1 == client_1

    _, current_of_client_0 = second.current
    assert state.clients[0].loss == current_of_client_0
    assert current_of_client_0 < client_0  # it has learned


# FedDF


class TaughtStudent(NamedTuple):
    """The parameters of a student after its steps, and the mean of its losses."""

    params: dict[str, Tensor]
    loss: float


def teach_by_plain_adam(network, start, batches, targets, lr):
    """Teaches a student by torch.optim: a step of Adam with cosine annealing for each batch."""
    params = {name: value.clone().requires_grad_() for name, value in start.items()}
    optimizer = torch.optim.Adam(params.values(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
    losses = []
    for x, target in zip(batches, targets, strict=True):
        logits = network(params, {}, x, train=True).logits
        loss = F.kl_div(F.log_softmax(logits, 1), F.softmax(target, 1), reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return TaughtStudent({name: value.detach() for name, value in params.items()}, np.mean(losses))


def test_without_distillation_feddf_is_fedavg():
    setup, fed = toy.federation("feddf", {"distillation_epochs": 0})
    state = toy.simulate(setup, fed, 3)
    average = laws.state_after_rounds(3, "fedavg")
    (student,) = state.students
    laws.assert_agree(student.params, average.params, "feddf against fedavg")


def test_each_architecture_has_a_student_taught_by_all_clients():
    options = {"distillation_epochs": 2, "distillation_lr": 0.01}
    setup, fed = toy.federation("feddf", options, **TWO_NETWORKS)
    cohort = fed.cohort(0)
    start = laws.initial_state(setup, fed)
    after, terms = laws.method_round(setup, fed, start, cohort)

    groups = fed.groups(cohort)
    trained_clients = []
    means = []
    for group in groups:
        received = fed.broadcast(*fed.initial_model(group.network), group)
        clients, _ = fed.train(received, group, make_local_loss(group.network))
        trained_clients.append(clients)
        means.append(feddf.mean_model(clients, group.weights, fed))
    images = [batch.x for batch in (*fed.public_batches(0, epoch=0), *fed.public_batches(0, epoch=1))]
    modules = [module.eval() for module in modules_of(fed, models_of(groups, trained_clients))]
    with torch.no_grad():
        targets = [logits_of(modules, x).mean(0) for x in images]
    personal = setup.method.personal(after)
    for kind, (network, mean) in enumerate(zip(fed.networks, means, strict=True)):
        student = after.students[kind]
        expected = teach_by_plain_adam(network, mean.params, images, targets, 0.01)
        laws.assert_agree(student.params, expected.params, f"the student of {fed.backbones[kind]}")
        assert terms["distillation"][kind::2].tolist() == pytest.approx([expected.loss] * 2)
        assert personal[kind] is student
        assert personal[kind + 2] is student


def test_an_architecture_that_nobody_has_in_a_round_keeps_its_student():
    setup, fed = toy.federation("feddf", cohort_size=2, **TWO_NETWORKS)
    start = toy.simulate(setup, fed, 0)
    after = toy.simulate(setup, fed, 1, [[0, 2]])
    trained_before, absent_before = start.students
    trained_after, absent_after = after.students
    assert toy.distance(absent_after, absent_before) == 0
    assert toy.distance(trained_after, trained_before) > 1e-4


def test_clients_without_examples_are_averaged_plainly():
    _, fed = toy.federation("feddf")
    clients = Client({"w": torch.tensor([[1.0], [3.0]])}, {}, {})
    assert feddf.mean_model(clients, torch.zeros(2), fed).params["w"].tolist() == [2]
    assert feddf.mean_model(clients, torch.tensor([0.3, 0.1]), fed).params["w"].item() == pytest.approx(1.5)


def test_clients_learn_from_all_logits_before_any_of_them_moves():
    setup, fed = toy.federation("feddf-client", {"distillation_lr": 0.3}, weight_decay=0.01, **TWO_NETWORKS)
    states = toy.simulate(setup, fed, 1).clients

    def objective(k, scores_of_client, scores_of_all):
        target = torch.stack([scores.logits for scores in scores_of_all]).mean(0)
        loss = F.kl_div(F.log_softmax(scores_of_client.logits, 1), F.softmax(target, 1), reduction="batchmean")
        return loss, loss

    optimizer = partial(torch.optim.SGD, lr=0.3, weight_decay=0.01)
    phase = PublicPhase(feddf.distil_into_clients, objective, optimizer)
    terms, (losses,) = laws.assert_public_phase_agrees(phase, fed, fed.cohort(1), states, setup.method_config)
    assert terms["distillation"].tolist() == pytest.approx(losses)
