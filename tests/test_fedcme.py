"""FedCME: matching against its definition, a whole round against a plain loop, equations, memory, costs, protocols."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcli.core.batches import generator
from fedcli.core.clients import Client
from fedcli.papers.fedcme import (
    aggregate_features,
    alignment_loss,
    cosine,
    evaluation_sample,
    evaluation_vector,
    exchange_with_partners,
    exchanged_names,
    match_clients,
    match_many_to_one,
)
from fedcli.registry import find_method
from fedcli.runs.config import resolve
from tests import laws
from tests.reference import means_by_class, minibatches, modules_of

FEDCME = find_method("fedcme")


def vectors(size, seed, num_classes=4):
    return torch.rand(size, num_classes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def likeness(a, b):
    return F.cosine_similarity(a, b, dim=0).item()


def matched_slowly(evaluation):
    """Pairs by the words of Section IV-A, for vectors without ties."""
    mean = sum(evaluation) / len(evaluation)
    left, partner = set(range(len(evaluation))), {}
    while len(left) > 1:
        k = min(left, key=lambda i: likeness(evaluation[i], mean))
        left.remove(k)
        j = min(left, key=lambda i: likeness(evaluation[k], evaluation[i]))
        left.remove(j)
        partner[k], partner[j] = j, k
    return [partner.get(i, i) for i in range(len(evaluation))]


@pytest.mark.parametrize("size", range(1, 8))
@pytest.mark.parametrize("seed", range(3))
def test_matching_takes_the_least_similar_twice(size, seed):
    evaluation = vectors(size, seed)
    partner = match_clients(evaluation)
    assert partner.tolist() == matched_slowly(evaluation)
    assert torch.equal(partner[partner], torch.arange(size))  # it is mutual
    assert (partner == torch.arange(size)).sum() == size % 2  # one of an odd number keeps its own


def test_ties_go_by_priority():
    nothing = torch.zeros(5, 3)
    priority = torch.tensor([0.9, 0.1, 0.5, 0.3, 0.7])  # the order 1, 3, 2, 4, 0
    assert match_clients(nothing, priority).tolist() == [0, 3, 4, 1, 2]
    assert match_clients(nothing).tolist() == [1, 0, 3, 2, 4]
    alike = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    assert match_clients(alike, torch.tensor([0.2, 0.4, 0.3, 0.1])).tolist() == [1, 0, 3, 2]


def test_a_client_without_evaluation_is_unlike_everybody():
    evaluation = torch.tensor([[0.5, 0.5], [0.6, 0.4], [0.0, 0.0], [0.0, 1.0]])
    assert cosine(evaluation[:, None], evaluation)[2].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("match", [match_clients, match_many_to_one])
@pytest.mark.parametrize("seed", range(5))
def test_matching_does_not_depend_on_the_order_of_the_cohort(match, seed):
    draw = torch.Generator().manual_seed(seed)
    evaluation = torch.randint(0, 3, (9, 3), generator=draw).double() / 2  # many ties, zeros among them
    priority = torch.rand(9, generator=draw)
    partner = match(evaluation, priority)
    order = torch.randperm(9, generator=draw)
    assert torch.equal(order[match(evaluation[order], priority[order])], partner[order])


@pytest.mark.parametrize("size", range(2, 7))
def test_many_to_one_takes_the_least_similar_of_all_others(size):
    evaluation = vectors(size, seed=size)
    expected = [
        min((j for j in range(size) if j != k), key=lambda j: likeness(evaluation[k], evaluation[j]))
        for k in range(size)
    ]
    assert match_many_to_one(evaluation).tolist() == expected


def test_many_to_one_sends_tied_clients_to_different_ones():
    assert match_many_to_one(torch.zeros(4, 3), torch.tensor([0.4, 0.1, 0.3, 0.2])).tolist() == [1, 3, 0, 2]
    assert match_many_to_one(torch.ones(1, 3)).tolist() == [0]


@pytest.mark.parametrize(
    ("part", "params", "buffers"),
    [
        ("head", [False, True], [False]),
        ("body", [True, False], [True]),
        ("model", [True, True], [True]),
        ("none", [False, False], [False]),
    ],
)
def test_parts_of_a_model_and_their_buffers(part, params, buffers):
    _, fed = laws.federation(FEDCME)
    stacked = torch.arange(2.0)[:, None]
    clients = Client({"body.1.weight": stacked, "head.weight": stacked}, {"body.1.running_mean": stacked}, {})
    after = exchange_with_partners(clients, torch.tensor([1, 0]), part, fed)
    assert [bool(value[0] == 1) for value in after.params.values()] == params
    assert [bool(value[0] == 1) for value in after.buffers.values()] == buffers
    assert exchanged_names(fed.initial_model()[0], "head") == ["head.weight", "head.bias"]


def batch_of_features(seed=0):
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(8, 5, dtype=torch.float64, generator=draw)
    labels = torch.tensor([0, 1, 1, 3, 0, 1, 3, 3])  # no example of class 2
    return features, labels, torch.randn(4, 5, dtype=torch.float64, generator=draw)


@pytest.mark.parametrize("padded", [False, True])
def test_alignment_against_a_loop(padded):
    features, labels, global_features = batch_of_features()
    has_class = torch.tensor([True, True, True, False])
    mask = torch.tensor([True, True, False, True, True, True, False, True]) if padded else None
    expected = 0.0
    for c in range(4):
        own = [f for i, f in enumerate(features) if labels[i] == c and (mask is None or mask[i])]
        if own and has_class[c]:
            expected += float((sum(own) / len(own) - global_features[c]).square().sum())
    if padded:
        features[~mask] = torch.nan
    loss = alignment_loss(features, labels, global_features, has_class, mask)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    if not padded:
        loss = lambda f: alignment_loss(f, labels, global_features, has_class)  # noqa: E731
        assert torch.autograd.gradcheck(loss, features.requires_grad_())


def test_alignment_without_global_features_is_0_and_has_no_gradient():
    features, labels, global_features = batch_of_features()
    features.requires_grad_()
    nothing = torch.zeros(4, dtype=torch.bool)
    loss = alignment_loss(features, labels, torch.full_like(global_features, torch.nan), nothing)
    (gradient,) = torch.autograd.grad(loss, features)
    assert loss == 0
    assert (gradient == 0).all()


def test_global_features_by_hand():
    features = torch.tensor([[[1.0], [4.0], [0.0], [torch.nan]], [[3.0], [torch.nan], [0.0], [8.0]]])
    present = torch.tensor([[True, True, False, False], [True, False, False, True]])
    previous, has_class = torch.tensor([[9.0], [2.0], [7.0], [0.0]]), torch.tensor([True, True, True, False])
    new, has = aggregate_features(features, present, previous, has_class)
    # Both have class 0; the second gives class 1's old feature; nobody has class 2; class 3 is new.
    assert new.tolist() == [[2], [3], [7], [8]]
    assert has.all()
    new, has = aggregate_features(features, present, torch.zeros(4, 1), torch.zeros(4, dtype=torch.bool))
    assert new.tolist() == [[2], [4], [0], [8]]
    assert has.tolist() == [True, True, False, True]


def test_evaluation_vector_by_hand():
    correct = torch.tensor([True, False, True, True, False])
    vector = evaluation_vector(correct, torch.tensor([0, 0, 2, 0, 3]), 5)
    assert vector.tolist() == pytest.approx([2 / 3, 0, 1, 0, 0])
    assert evaluation_vector(correct[:0], torch.zeros(0, dtype=torch.int64), 2).tolist() == [0, 0]


@pytest.mark.parametrize(("size", "drawn"), [(0, 0), (1, 1), (2, 1), (5, 1), (13, 3), (100, 20)])
def test_a_fifth_of_the_examples_is_evaluated(size, drawn):
    part = np.arange(size) + 50
    sample = evaluation_sample(part, generator(0, 1, 2, "evaluation"))
    assert len(sample) == len(set(sample) & set(part)) == drawn


PARTS = (7, 5, 9, 4)


def plain_round(fed, state, cohort, partner, config):
    """One round as a plain loop over modules and torch.optim; returns the parts of the next state."""
    run, number, weight = fed.config, cohort.round, config.alignment_weight
    modules = modules_of(fed, dict.fromkeys(cohort.client_ids, (state.params, {})))
    optimizers = [torch.optim.SGD(module.parameters(), lr=run.lr, momentum=run.momentum) for module in modules]
    features = [{c: [] for c in range(fed.num_classes)} for _ in modules]
    for epoch in range(run.local_epochs):
        if epoch == run.local_epochs // 2 and config.exchange != "none":
            heads = [copy.deepcopy(module.head.state_dict()) for module in modules]
            for k, module in enumerate(modules):
                module.head.load_state_dict(heads[partner[k]])
        for k, module in enumerate(modules):
            for x, y in minibatches(fed, number, cohort.client_ids[k], range(epoch, epoch + 1)):
                out, logits = module(x)
                loss = F.cross_entropy(logits, y)
                for c in y.unique().tolist():
                    features[k][c] += list(out[y == c].detach())
                    if state.has_class[c]:
                        loss = loss + weight * (out[y == c].mean(0) - state.global_features[c]).square().sum()
                optimizers[k].zero_grad()
                loss.backward()
                optimizers[k].step()
    trained = [dict(module.named_parameters()) for module in modules]
    params = {n: sum(w * own[n].detach() for w, own in zip(cohort.weights, trained, strict=True)) for n in state.params}
    old = {c: state.global_features[c] for c in range(fed.num_classes) if state.has_class[c]}
    local = [{**old, **means_by_class(own)} for own in features]
    means = means_by_class({c: [own[c] for own in local if c in own] for c in range(fed.num_classes)})
    global_features = torch.stack([means.get(c, state.global_features[c]) for c in range(fed.num_classes)])
    evaluation = state.evaluation.clone()
    for module, client in zip(modules, cohort.client_ids, strict=True):
        part, draw = fed.training[client], generator(run.seed, number, client, "evaluation")
        x, y = fed.engine.gather(draw.choice(part, round(len(part) / 5), replace=False))
        right = module(x)[1].argmax(1) == y
        evaluation[client] = torch.tensor([right[y == c].double().mean() if (y == c).any() else 0.0 for c in range(3)])
    return params, global_features, evaluation


@pytest.mark.parametrize(
    ("epochs", "options", "momentum"),
    [
        (1, {}, 0.0),
        (3, {}, 0.9),  # momentum stays with the client when the classifier goes
        (2, {"exchange": "none", "alignment_weight": 0.3}, 0.0),
        (2, {"matching": "many-to-one"}, 0.0),
    ],
)
def test_a_round_against_a_plain_loop(epochs, options, momentum):
    parts = np.split(np.arange(25)[np.argsort(np.arange(25) % 3, kind="stable")], np.cumsum(PARTS)[:-1])  # by class
    run = {"local_epochs": epochs, "momentum": momentum, "weight_decay": 0.0, "lr": 0.1}
    setup, fed = laws.federation(FEDCME, options, data=laws.toy_dataset(num_train=25), parts=parts, **run)
    state = setup.method.init(fed, setup.options)
    for number, ids in enumerate(([0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3])):
        known = torch.tensor([[1.0, 0.0, 0.2], [0.0, 1.0, 0.1], [0.3, 1.0, 0.3], [0.2, 0.1, 1.0]], dtype=fed.dtype)
        state = state._replace(evaluation=known + 0.01 * number)
        cohort = fed.cohort_of(number, ids)
        own = state.evaluation[ids]
        if setup.options.matching == "pairs":
            partner = matched_slowly(own)
        else:
            partner = [min(set(range(len(ids))) - {k}, key=lambda j: likeness(own[k], own[j])) for k in range(len(ids))]
        after, terms = setup.method.run_round(state, cohort, fed, setup.options)
        params, global_features, evaluation = plain_round(fed, state, cohort, partner, setup.options)
        laws.assert_agree(after.params, params, f"parameters of round {number}")
        laws.assert_agree(after.global_features, global_features, f"global features of round {number}")
        assert torch.equal(after.evaluation, evaluation)
        assert all(values.shape == (len(ids),) for values in terms.values())
        state = after
    assert state.has_class.all()


def test_only_random_matching_minds_no_evaluation_vectors():
    def trained(matching, likes):
        setup, fed = laws.federation(FEDCME, {"matching": matching})
        state = setup.method.init(fed, setup.options)
        state = state._replace(evaluation=torch.eye(3, dtype=fed.dtype)[likes])
        return setup.method.run_round(state, fed.cohort(0), fed, setup.options)[0].params

    for matching, same in (("pairs", False), ("many-to-one", False), ("random", True)):
        # Clients 0 and 1 alike, or 0 and 2: whom client 0 does not meet.
        distance = laws.distance(trained(matching, [0, 0, 1, 1]), trained(matching, [0, 1, 0, 1]))
        assert (distance == 0) == same


def test_terms_are_means_over_all_local_epochs():
    setup, fed = laws.federation(FEDCME, {"exchange": "none", "alignment_weight": 0.0}, local_epochs=3)
    base_setup, base_fed = laws.federation("fedavg", local_epochs=3)
    cohort = fed.cohort(0)
    _, ours = setup.method.run_round(setup.method.init(fed, setup.options), cohort, fed, setup.options)
    _, base = base_setup.method.run_round(base_setup.method.init(base_fed, None), cohort, base_fed, None)
    torch.testing.assert_close(ours["cross_entropy"], base["cross_entropy"])


def test_the_papers_values(monkeypatch):
    monkeypatch.setattr("fedcli.data.datasets.available", lambda name: None)
    setup = resolve(FEDCME, {"dataset": "fmnist"})
    assert setup.protocol.name == "fedcme:fmnist-a0.1-k50-m10"
    assert setup.options == FEDCME.config(0.01, "head", "pairs")
    run = setup.run
    assert (run.num_clients, run.cohort_size, run.local_epochs, run.batch_size, run.lr) == (50, 10, 6, 32, 0.01)
    assert (run.momentum, run.partition, run.backbone, setup.selection) == (0, "dirichlet:0.1", "cnn-mcmahan", "last")
    run = resolve(FEDCME, {"protocol": "fedcme:cifar10-a0.5-k80-m30", "dataset": "cifar10"}).run
    assert (run.num_clients, run.cohort_size, run.batch_size, run.partition) == (80, 30, 64, "dirichlet:0.5")
    assert (run.partition_seed, run.rounds) == (0, 200)
    assert run.backbone == "alexnet-32"
