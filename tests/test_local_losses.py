"""FedNTD, FedLC and FedDecorr, which change the local objective alone: by hand and against plain loops."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcli import toy
from fedcli.papers.baselines import feddecorr, fedlc, fedntd
from tests import laws
from tests.first_rounds import minibatch
from tests.tensors import randn

# FedNTD


def not_true_divergence(logits, received, label, temperature):
    """tau^2 KL between the softmaxes over the classes that are not the label's, of one sample."""

    def shares_of_others(logits):
        powers = [math.exp(logits[c].item() / temperature) for c in range(len(logits)) if c != label]
        return [power / sum(powers) for power in powers]

    pairs = zip(shares_of_others(logits), shares_of_others(received), strict=True)
    return temperature**2 * sum(q * math.log(q / p) for p, q in pairs)


def test_not_true_distillation_is_a_plain_loop_over_the_other_classes():
    logits, received = 3 * randn(2, 6, 5)
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    total = 0.0
    for own_row, received_row, label in zip(logits, received, labels.tolist(), strict=True):
        total += not_true_divergence(own_row, received_row, label, 2.0)
    ours = fedntd.not_true_distillation(logits, received, labels, 2.0)
    torch.testing.assert_close(ours.item(), total / 6, rtol=1e-12, atol=0)


def test_not_true_distillation_leaves_out_padding_and_is_0_with_two_classes():
    logits, received = randn(2, 6, 5)
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    mask = torch.tensor([True] * 4 + [False] * 2)
    expected = fedntd.not_true_distillation(logits[:4], received[:4], labels[:4], 1.0)
    logits[4:] = torch.nan
    torch.testing.assert_close(fedntd.not_true_distillation(logits, received, labels, 1.0, mask), expected)
    two = fedntd.not_true_distillation(logits[:4, :2], received[:4, :2], labels[:4] % 2, 1.0)
    assert two.item() == 0


def test_the_label_has_no_gradient_in_the_distillation():
    logits, received = randn(2, 6, 5)
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    logits.requires_grad_()
    fedntd.not_true_distillation(logits, received, labels, 1.0).backward()
    assert (logits.grad.gather(1, labels[:, None]) == 0).all()
    assert (logits.grad != 0).sum() == 24


def test_fedntds_received_model_runs_in_evaluation_mode_and_is_a_constant():
    setup, fed = toy.federation("fedntd", backbone=toy.BATCHNORM, local_epochs=1)
    received_params, received_buffers = fed.initial_model()
    state = toy.simulate(setup, fed, 1)
    batch = minibatch(fed, 4)
    with_grad = {name: value.clone().requires_grad_() for name, value in received_params.items()}
    context = fedntd.Context(with_grad, received_buffers)
    local_loss = fedntd.make_local_loss(fed.network, fedntd.Config(distillation_weight=3.0, temperature=2.0))

    loss, aux = local_loss(state.params, state.buffers, batch, context)

    logits = fed.network(state.params, state.buffers, batch.x).logits
    received_logits = fed.network(received_params, received_buffers, batch.x, train=False).logits
    term = fedntd.not_true_distillation(logits, received_logits, batch.y, 2.0)
    torch.testing.assert_close(loss, F.cross_entropy(logits, batch.y) + 3 * term)
    torch.testing.assert_close(aux.terms["distillation"], term)
    assert not loss.requires_grad


# FedLC


def test_fedlcs_margins_by_hand():
    counts = torch.tensor([[1.0, 16.0, 81.0, 0.0]])
    assert fedlc.class_margins(counts, 2.0)[0].tolist() == pytest.approx([2, 1, 2 / 3, 1e4])
    assert fedlc.class_margins(counts, 0.0)[0].tolist() == [0, 0, 0, 0]


def test_calibrated_cross_entropy_is_that_of_the_classes_that_a_client_has():
    logits = 3 * randn(6, 4)
    labels = torch.tensor([0, 1, 2, 0, 2, 1])
    counts = [1, 16, 81, 0]
    expected = 0.0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        lowered = [row[c] - 0.5 * counts[c] ** -0.25 for c in range(3)]
        expected += (math.log(sum(map(math.exp, lowered))) - lowered[label]) / 6

    margins = fedlc.class_margins(torch.tensor(counts).double(), 0.5)
    logits.requires_grad_()
    loss = fedlc.calibrated_cross_entropy(logits, labels, margins)
    torch.testing.assert_close(loss.item(), expected, rtol=1e-12, atol=0)
    loss.backward()
    assert (logits.grad[:, 3] == 0).all()


def test_fedlc_counts_the_clients_own_training_part():
    parts = [np.array([0, 3, 1, 6, 4, 5, 8, 11, 14, 2]), np.array([7, 9]), np.array([10, 12, 13, 15])]
    options = {"parts": parts, "num_clients": 3, "validation": 0.2, "local_epochs": 1, "batch_size": 16}
    setup, fed = toy.federation("fedlc", **options)
    state = laws.initial_state(setup, fed)
    _, terms = laws.method_round(setup, fed, state, fed.cohort(0))

    params, buffers = fed.initial_model()
    assert [len(part) for part in fed.training] == [8, 2, 4]
    for client, part in enumerate(fed.training):
        x, y = fed.engine.gather(part)
        logits = fed.network(params, buffers, x).logits
        counts = torch.tensor([max(int((y == label).sum()), 1e-300) for label in range(3)]).double()
        lowered = torch.where(counts < 1, -torch.inf, logits - counts**-0.25)
        expected = F.cross_entropy(lowered, y)
        torch.testing.assert_close(terms["cross_entropy"][client], expected, rtol=1e-10, atol=0)


# FedDecorr


def decorrelation_entry_by_entry(features, form):
    """Returns a form of the term, in a loop over the entries of the correlation matrix."""
    z = features.numpy()
    n, d = z.shape
    standardised = (z - z.mean(0)) / np.sqrt(z.var(0, ddof=1) + 1e-8)
    total = 0.0
    for i in range(d):
        for j in range(d):
            products = standardised[:, i] * standardised[:, j]
            if form == "paper":
                total += (products.sum() / n) ** 2 / d**2
            elif i != j:
                total += products.sum() ** 2 / (d * (d - 1)) / n
    return total


@pytest.mark.parametrize("form", ["code", "paper"])
def test_decorrelation_is_a_plain_loop_over_pairs_of_features_without_padding(form):
    features = randn(6, 4) @ randn(4, 4, seed=1) + 2  # correlated, with a mean
    features[:, 3] = 1.0  # a feature that is dead
    features[4:] = torch.nan
    features.requires_grad_()
    mask = torch.tensor([True] * 4 + [False] * 2)

    ours = feddecorr.decorrelation(features, mask, form)
    expected = decorrelation_entry_by_entry(features[:4].detach(), form)
    torch.testing.assert_close(ours.item(), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(feddecorr.decorrelation(features[:4], None, form).item(), expected, rtol=1e-12, atol=0)

    ours.backward()
    assert features.grad.isfinite().all()
    assert (features.grad[4:] == 0).all()


@pytest.mark.parametrize("form", ["code", "paper"])
@pytest.mark.parametrize("real", [0, 1])
def test_a_batch_of_one_has_no_correlations(form, real):
    features = randn(3, 4).requires_grad_()
    value = feddecorr.decorrelation(features, torch.arange(3) < real, form)
    value.backward()
    assert value.item() == 0
    assert (features.grad == 0).all()


def test_a_single_feature_has_no_correlations_with_others():
    assert feddecorr.decorrelation(randn(5, 1)).item() == 0


def test_feddecorrs_objective_adds_the_term_of_the_features():
    _, fed = toy.federation("feddecorr")
    params, buffers = fed.initial_model()
    batch = minibatch(fed, 6)
    config = feddecorr.Config(decorrelation_weight=3.0, form="paper")
    local_loss = feddecorr.make_local_loss(fed.network, config)

    loss, aux = local_loss(params, buffers, batch, None)

    features, logits, _ = fed.network(params, buffers, batch.x)
    term = feddecorr.decorrelation(features, None, "paper")
    torch.testing.assert_close(loss, F.cross_entropy(logits, batch.y) + 3 * term)
    torch.testing.assert_close(aux.terms["decorrelation"], term)
