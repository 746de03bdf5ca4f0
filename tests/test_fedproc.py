"""FedProc: its term, its schedule and its prototypes against plain loops and hand numbers."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from fedcli import toy
from fedcli.core.trees import select
from fedcli.errors import UserError
from fedcli.papers.baselines import fedavg, fedproc
from fedcli.papers.baselines.fedproc import aggregate_prototypes, prototype_contrastive, schedule
from fedcli.registry import find_method
from fedcli.runs.resolve import resolve
from tests import laws
from tests.first_rounds import minibatch
from tests.plain_loops import train_plainly
from tests.tensors import randn

LABELS = torch.tensor([0, 1, 3, 2, 0, 3, 1])


def test_the_term_is_the_cross_entropy_of_cosines_among_classes_with_a_prototype():
    features = randn(7, 5)
    prototypes = randn(4, 5, seed=1)
    has_class = torch.tensor([True, True, False, True])
    rows = has_class[LABELS]
    scores = F.cosine_similarity(features[:, None], prototypes, dim=-1) / 0.5
    expected = F.cross_entropy(scores.masked_fill(~has_class, -torch.inf)[rows], LABELS[rows])
    torch.testing.assert_close(prototype_contrastive(features, LABELS, prototypes, has_class, 0.5), expected)
    assert prototype_contrastive(features, LABELS, prototypes, torch.zeros(4, dtype=torch.bool)) == 0


def test_the_schedule_is_a_ramp_or_constant():
    """With a ramp of 0 it counts from one."""
    assert [schedule(round, 100, 7) for round in (0, 1, 50, 99, 100, 250)] == [0.0, 0.01, 0.5, 0.99, 1.0, 1.0]
    assert [schedule(round, 0, 5) for round in range(5)] == [0.2, 0.4, 0.6, 0.8, 1.0]
    for ramp in (0, 4):
        assert [schedule(round, ramp, 200, 0.3) for round in (0, 1, 9)] == [0.3, 0.3, 0.3]
    assert schedule(3, 4, 200, 0.0) == 0.0


def test_fedfas_ramp_is_over_the_rounds_of_the_run_however_many_these_are():
    def weights(rounds, **options):
        """The weight of the cross-entropy in each round under FedFA's protocol."""
        fedfas = {"protocol": "fedfa:fmnist-c2", "dataset": "fmnist", **options}
        config = resolve(find_method("fedproc"), fedfas, need_data=False).method_config
        setup, fed = toy.federation("fedproc", dataclasses.asdict(config), rounds=rounds)
        train = fed.train
        of_rounds = []

        def watched(clients, cohort, loss, context, *more):
            of_rounds.append(float(context.cross_entropy_weight))
            return train(clients, cohort, loss, context, *more)

        fed.train = watched
        toy.simulate(setup, fed, rounds)
        return of_rounds

    assert weights(4) == [0.25, 0.5, 0.75, 1.0]
    assert weights(4, prototypes="means") == [1.0, 0.5, 0.75, 1.0]  # the first round has no means yet
    assert weights(2) == [0.5, 1.0]


def test_a_prototype_is_a_mean_over_examples_or_keeps_its_value():
    sums = torch.tensor([[[1.0, 2.0], [0.0, 0.0], [1.0, 0.5]], [[5.0, 0.0], [0.0, 0.0], [0.0, 0.0]]])
    counts = torch.tensor([[1, 0, 1], [2, 0, 0]])
    previous = torch.full((3, 2), 8.0)
    has_previous = torch.tensor([True, True, False])
    new = aggregate_prototypes(sums, counts, previous, has_previous)
    torch.testing.assert_close(new, torch.tensor([[2.0, 2 / 3], [8.0, 8.0], [1.0, 0.5]]))
    remembered = aggregate_prototypes(sums, counts, previous, has_previous, 0.75)
    torch.testing.assert_close(remembered, torch.tensor([[6.5, 6 + 0.5 / 3], [8.0, 8.0], [1.0, 0.5]]))


def test_prototypes_are_means_of_normalised_features_under_the_trained_local_models():
    run = {"backbone": toy.BATCHNORM, "local_epochs": 1, "validation": 0.2, "parts": toy.toy_parts((6, 5, 3, 2))}
    setup, fed = toy.federation("fedproc", **run)
    cohort = fed.cohort(0)
    start = fed.broadcast(*fed.initial_model(), cohort)
    trained, _ = fed.train(start, cohort, fedavg.make_local_loss(fed.network))  # round 0 is cross-entropy alone
    features = []
    labels = []
    for client, part in enumerate(fed.training):
        model = select((trained.params, trained.buffers), client)
        own_features, _, own_labels = fed.predict(*model, part)
        features.append(own_features)
        labels.append(own_labels)
    features = torch.cat(features)
    labels = torch.cat(labels)
    assert len(labels) == 14  # two are held out

    state = toy.simulate(setup, fed, 1)
    for label in range(3):
        torch.testing.assert_close(state.prototypes[label], F.normalize(features[labels == label]).mean(0))
    assert state.has_prototype.all()


def test_the_objective_is_shared_out_between_its_two_terms():
    _, fed = toy.federation("fedproc")
    params, buffers = fed.initial_model()
    prototypes = randn(3, fed.feature_dim)
    batch = minibatch(fed, 5)
    context = fedproc.Context(prototypes, torch.tensor([True, True, False]), torch.tensor(0.3, dtype=torch.float64))
    loss, aux = fedproc.make_local_loss(fed.network, fedproc.Config(temperature=0.5))(params, buffers, batch, context)
    features, logits, _ = fed.network(params, buffers, batch.x)
    contrast = prototype_contrastive(features, batch.y, prototypes, context.has_prototype, 0.5)
    torch.testing.assert_close(loss, 0.3 * F.cross_entropy(logits, batch.y) + 0.7 * contrast)
    torch.testing.assert_close(aux.terms["contrastive"], contrast)


def test_with_rows_of_the_identity_the_model_alone_is_trained_and_sent():
    options = {"prototypes": "identity", "cross_entropy_weight": 0.3}
    setup, fed = toy.federation("fedproc", options, parts=toy.toy_parts((13,)), num_clients=1, cohort_size=1)
    state = toy.simulate(setup, fed, 1)
    assert torch.equal(state.prototypes, torch.eye(fed.num_classes, fed.feature_dim, dtype=torch.float64))
    assert fed.traffic.down == fed.traffic.up == {"params": fed.sizes.parameters, "buffers": 0, "other": 0}

    def objective(module, features, logits, y):
        return 0.3 * F.cross_entropy(logits, y) + 0.7 * F.cross_entropy(features[:, : fed.num_classes], y)

    trained = train_plainly(fed, 0, 0, fed.initial_model(), objective)
    laws.assert_agree(state.params, trained.params, "a round")


def test_more_classes_than_features_are_refused_beside_the_identity():
    setup, fed = toy.federation("fedproc", {"prototypes": "identity"})
    fed.num_classes = 65
    with pytest.raises(UserError, match=r"got 64 features for 65 classes.*--prototypes"):
        laws.initial_state(setup, fed)
