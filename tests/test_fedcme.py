"""FedCME: matching against its definition, a whole round against a plain loop, equations by hand."""

import copy
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcli import toy
from fedcli.core.class_vectors import ClassVectors
from fedcli.core.clients import Client
from fedcli.core.draws import generator
from fedcli.papers import fedcme
from tests import laws
from tests.plain_loops import means_by_class, minibatches, modules_of, sgd_of
from tests.tensors import randn


def vectors(size, seed, num_classes=4):
    return torch.rand(size, num_classes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def likeness(evaluation, other):
    return F.cosine_similarity(evaluation, other, dim=0).item()


def match_plainly(evaluation):
    """Pairs by the words of Section IV-A, for vectors without ties."""
    mean = sum(evaluation) / len(evaluation)
    left = set(range(len(evaluation)))
    counterpart = {}
    while len(left) > 1:
        k = min(left, key=lambda i: likeness(evaluation[i], mean))
        left.remove(k)
        j = min(left, key=lambda i: likeness(evaluation[k], evaluation[i]))
        left.remove(j)
        counterpart[k] = j
        counterpart[j] = k
    return [counterpart.get(client, client) for client in range(len(evaluation))]


@pytest.mark.parametrize("size", range(1, 8))
@pytest.mark.parametrize("seed", range(3))
def test_matching_takes_the_least_similar_twice(size, seed):
    evaluation = vectors(size, seed)
    counterpart = fedcme.match_clients(evaluation)
    assert counterpart.tolist() == match_plainly(evaluation)
    assert torch.equal(counterpart[counterpart], torch.arange(size))  # it is mutual
    assert (counterpart == torch.arange(size)).sum() == size % 2  # one of an odd number keeps its own


def test_ties_go_by_priority():
    nothing = torch.zeros(5, 3)
    priority = torch.tensor([0.9, 0.1, 0.5, 0.3, 0.7])  # the order 1, 3, 2, 4, 0
    assert fedcme.match_clients(nothing, priority).tolist() == [0, 3, 4, 1, 2]
    assert fedcme.match_clients(nothing).tolist() == [1, 0, 3, 2, 4]

    alike = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    assert fedcme.match_clients(alike, torch.tensor([0.2, 0.4, 0.3, 0.1])).tolist() == [1, 0, 3, 2]
    # Of many to one, tied clients go to different ones.
    assert fedcme.match_many_to_one(torch.zeros(4, 3), torch.tensor([0.4, 0.1, 0.3, 0.2])).tolist() == [1, 3, 0, 2]
    assert fedcme.match_many_to_one(torch.ones(1, 3)).tolist() == [0]


def test_a_client_without_evaluation_is_unlike_everybody():
    evaluation = torch.tensor([[0.5, 0.5], [0.6, 0.4], [0.0, 0.0], [0.0, 1.0]])
    assert fedcme.cosine(evaluation[:, None], evaluation)[2].tolist() == [0, 0, 0, 0]


def match_many_to_one_plainly(evaluation):
    """For each client the one least like it."""
    counterparts = []
    for k, vector in enumerate(evaluation):
        likenesses = [likeness(vector, other) for other in evaluation]
        likenesses[k] = float("inf")
        counterparts.append(likenesses.index(min(likenesses)))
    return counterparts


@pytest.mark.parametrize("size", range(2, 7))
def test_many_to_one_takes_the_least_similar_of_all_others(size):
    evaluation = vectors(size, seed=size)
    assert fedcme.match_many_to_one(evaluation).tolist() == match_many_to_one_plainly(evaluation)


@pytest.mark.parametrize(
    ("part", "body_moves", "head_moves"),
    [("head", False, True), ("body", True, False), ("model", True, True), ("none", False, False)],
)
def test_parts_of_a_model_are_exchanged_with_their_buffers(part, body_moves, head_moves):
    _, fed = toy.federation("fedcme")
    numbers = torch.tensor([[0], [1]])  # of the clients
    clients = Client({"body.1.weight": numbers, "head.weight": numbers}, {"body.1.running_mean": numbers}, {})

    after = fedcme.exchange_parts(clients, torch.tensor([1, 0]), part, fed)

    body_numbers = [[1], [0]] if body_moves else [[0], [1]]
    head_numbers = [[1], [0]] if head_moves else [[0], [1]]
    assert after.params["body.1.weight"].tolist() == body_numbers
    assert after.buffers["body.1.running_mean"].tolist() == body_numbers
    assert after.params["head.weight"].tolist() == head_numbers
    params, _ = fed.initial_model()
    assert fedcme.names_of_part(params, "head") == ["head.weight", "head.bias"]


def test_alignment_is_of_the_batchs_classes_that_have_a_global_feature():
    features = randn(3, 5).requires_grad_()
    labels = torch.tensor([0, 1, 1])
    zeta = randn(4, 5, seed=1)
    has_class = torch.tensor([True, False, True, False])
    expected = (features[0] - zeta[0]).square().sum()
    torch.testing.assert_close(fedcme.alignment_loss(features, labels, zeta, has_class), expected)

    loss = fedcme.alignment_loss(features, labels, torch.full((4, 5), torch.nan), torch.zeros(4, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(loss, features)
    assert loss == 0
    assert gradient.abs().max() == 0


def test_a_global_feature_is_a_mean_over_clients_where_one_without_the_class_gives_the_old_one():
    features = torch.tensor([[[1.0], [4.0], [0.0], [torch.nan]], [[3.0], [torch.nan], [0.0], [8.0]]])
    present = torch.tensor([[True, True, False, False], [True, False, False, True]])
    previous = torch.tensor([[9.0], [2.0], [7.0], [0.0]])
    has_class = torch.tensor([True, True, True, False])
    local = ClassVectors(features, present)
    new, has = fedcme.aggregate_features(local, ClassVectors(previous, has_class))
    # Both have class 0; the second gives class 1's old feature; nobody has class 2; class 3 is new.
    assert new.tolist() == [[2], [3], [7], [8]]
    assert has.all()

    nothing = ClassVectors(torch.zeros(4, 1), torch.zeros(4, dtype=torch.bool))
    new, has = fedcme.aggregate_features(local, nothing)
    assert new.tolist() == [[2], [4], [0], [8]]
    assert has.tolist() == [True, True, False, True]


@pytest.mark.parametrize(("size", "drawn"), [(0, 0), (1, 1), (2, 1), (5, 1), (13, 3), (100, 20)])
def test_a_fifth_of_the_examples_is_evaluated(size, drawn):
    part = np.arange(size) + 50
    sample = fedcme.evaluation_sample(part, generator(0, 1, 2, "evaluation"))
    assert len(sample) == len(set(sample) & set(part)) == drawn


PARTS = (7, 5, 9, 4)


class AfterRound(NamedTuple):
    """What a round of a plain loop comes to."""

    params: dict[str, torch.Tensor]
    global_features: torch.Tensor  # [C, D]
    evaluation: torch.Tensor  # [clients, C]


def plain_round(fed, state, cohort, counterpart, options):
    """One round as a plain loop over modules and torch.optim."""
    config = fed.config
    classes = range(fed.num_classes)
    modules = modules_of(fed, dict.fromkeys(cohort.client_ids, (state.params, {})))
    optimizers = [sgd_of(fed, module.parameters()) for module in modules]
    features = [{c: [] for c in classes} for _ in modules]

    # Local training, with the exchange in its middle.
    for epoch in range(config.local_epochs):
        if epoch == config.local_epochs // 2 and options.exchange != "none":
            heads = [copy.deepcopy(module.head.state_dict()) for module in modules]
            for k, module in enumerate(modules):
                module.head.load_state_dict(heads[counterpart[k]])
        for k, module in enumerate(modules):
            for x, y in minibatches(fed, cohort.round, cohort.client_ids[k], range(epoch, epoch + 1)):
                out, logits = module(x)
                loss = F.cross_entropy(logits, y)
                for c in y.unique().tolist():
                    of_class = out[y == c]
                    features[k][c] += list(of_class.detach())
                    if state.has_class[c]:
                        distance = (of_class.mean(0) - state.global_features[c]).square().sum()
                        loss = loss + options.alignment_weight * distance
                optimizers[k].zero_grad()
                loss.backward()
                optimizers[k].step()

    # The global model.
    params = {name: torch.zeros_like(value) for name, value in state.params.items()}
    for weight, module in zip(cohort.weights, modules, strict=True):
        for name, value in module.named_parameters():
            params[name] += weight * value.detach()

    # The global features: a client without a class gives the old feature, if there is one.
    given = {c: [] for c in classes}
    for means_of_client in map(means_by_class, features):
        for c in classes:
            if c in means_of_client:
                given[c].append(means_of_client[c])
            elif state.has_class[c]:
                given[c].append(state.global_features[c])
    means = means_by_class(given)
    global_features = torch.stack([means.get(c, state.global_features[c]) for c in classes])

    # The evaluation vectors: the accuracy by class on a sample.
    evaluation = state.evaluation.clone()
    for module, client in zip(modules, cohort.client_ids, strict=True):
        draw = generator(config.seed, cohort.round, client, "evaluation")
        x, y = fed.engine.gather(fedcme.evaluation_sample(fed.training[client], draw))
        _, logits = module(x)
        right = logits.argmax(1) == y
        for c in classes:
            of_class = right[y == c]
            evaluation[client, c] = of_class.double().mean() if len(of_class) else 0.0
    return AfterRound(params, global_features, evaluation)


@pytest.mark.parametrize(
    ("epochs", "options", "momentum"),
    [
        pytest.param(1, {}, 0.0, id="one epoch"),
        pytest.param(3, {}, 0.9, id="momentum"),  # momentum stays with the client when the classifier goes
        pytest.param(2, {"exchange": "none", "alignment_weight": 0.3}, 0.0, id="without exchange"),
        pytest.param(2, {"matching": "many-to-one"}, 0.0, id="many to one"),
    ],
)
def test_a_round_against_a_plain_loop(epochs, options, momentum):
    by_class = np.argsort(np.arange(25) % 3, kind="stable")
    parts = np.split(by_class, np.cumsum(PARTS)[:-1])
    run = {"local_epochs": epochs, "momentum": momentum, "weight_decay": 0.0, "lr": 0.1}
    setup, fed = toy.federation("fedcme", options, data=toy.toy_dataset(num_train=25), parts=parts, **run)
    match_of_form = match_plainly if setup.method_config.matching == "pairs" else match_many_to_one_plainly
    known = torch.tensor([[1.0, 0.0, 0.2], [0.0, 1.0, 0.1], [0.3, 1.0, 0.3], [0.2, 0.1, 1.0]], dtype=fed.dtype)
    state = laws.initial_state(setup, fed)
    for round, client_ids in enumerate(([0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3])):
        state = state._replace(evaluation=known + 0.01 * round)
        cohort = fed.cohort_of(round, client_ids)

        after, terms = laws.method_round(setup, fed, state, cohort)

        counterpart = match_of_form(state.evaluation[client_ids])
        expected = plain_round(fed, state, cohort, counterpart, setup.method_config)
        received = (after.params, after.global_features)
        laws.assert_agree(received, (expected.params, expected.global_features), f"round {round}")
        assert torch.equal(after.evaluation, expected.evaluation)
        assert all(values.shape == (len(client_ids),) for values in terms.values())
        state = after
    assert state.has_class.all()


def test_random_matching_minds_no_evaluation_vectors():
    setup, fed = toy.federation("fedcme", {"matching": "random"})
    state = laws.initial_state(setup, fed)
    of_class = torch.eye(3, dtype=fed.dtype)
    neighbours_alike = state._replace(evaluation=of_class[[0, 0, 1, 1]])
    others_alike = state._replace(evaluation=of_class[[0, 1, 0, 1]])

    after = toy.simulate(setup, fed, 1, state=neighbours_alike)
    after_others = toy.simulate(setup, fed, 1, state=others_alike)
    assert toy.distance(after.params, after_others.params) == 0


def test_terms_are_means_over_all_local_epochs():
    def cross_entropy(method, options):
        setup, fed = toy.federation(method, options, local_epochs=3)
        state = laws.initial_state(setup, fed)
        _, terms = laws.method_round(setup, fed, state, fed.cohort(0))
        return terms["cross_entropy"]

    switched_off = {"exchange": "none", "alignment_weight": 0.0}
    torch.testing.assert_close(cross_entropy("fedcme", switched_off), cross_entropy("fedavg", {}))
