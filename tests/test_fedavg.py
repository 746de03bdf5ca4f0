"""FedAvg: known answers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcli.core.aggregate import weighted_mean
from fedcli.core.evaluation import evaluate
from tests import laws
from tests.reference import train_plainly


def test_one_client_is_centralised_sgd():
    setup, fed = laws.federation("fedavg", parts=laws.toy_parts((13,)), num_clients=1, cohort_size=1)
    params, _ = laws.model_of(setup, laws.simulate(setup, fed, 3))
    expected, buffers = fed.initial_model()
    for number in range(3):
        model = expected, buffers
        expected = train_plainly(fed, number, 0, model, lambda module, f, logits, y: F.cross_entropy(logits, y))
    laws.assert_agree(params, expected, "one client")


def test_weights_are_shares_of_the_cohorts_examples_validation_included():
    _, fed = laws.federation("fedavg", validation=0.25)
    cohort = fed.cohort_of(0, [0, 3])
    np.testing.assert_allclose(cohort.weights.numpy(), [13 / 17, 4 / 17])
    assert [len(part) for part in fed.training] == [10, 6, 8, 3]
    assert [len(part) for part in fed.validation] == [3, 1, 2, 1]


def test_a_round_is_the_weighted_mean_of_parameters_and_buffers():
    data = laws.toy_dataset(channels=3, num_train=12)
    run = {"backbone": laws.NORMED, "data": data, "parts": laws.toy_parts((5, 3, 2, 2)), "local_epochs": 1}
    setup, fed = laws.federation("fedavg", **run)
    cohort = fed.cohort(0)
    clients, _ = fed.train(
        fed.broadcast(*fed.initial_model(), cohort), cohort, setup.method.module.make_local_loss(fed.network)
    )
    state = laws.simulate(setup, fed, 1)
    for tree, stacked in ((state.params, clients.params), (state.buffers, clients.buffers)):
        for name, value in tree.items():
            expected = sum(share * stacked[name][k] for k, share in enumerate(np.array([5, 3, 2, 2]) / 12))
            torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
    assert laws.distance(weighted_mean(clients.buffers, cohort.weights), fed.initial_model()[1]) > 1e-3


def test_the_learning_rate_decays_from_round_to_round():
    decaying, halved = laws.federation("fedavg", lr=0.04, lr_decay=0.5), laws.federation("fedavg", lr=0.01)
    assert [decaying[1].lr(number) for number in range(3)] == [0.04, 0.02, 0.01]
    results = []
    for setup, fed in (decaying, halved):
        start = setup.method.init(fed, setup.options)
        results.append(setup.method.run_round(start, fed.cohort(2), fed, setup.options)[0])
    laws.assert_agree(*results, "the third round at a quarter of the learning rate")
    _, linear = laws.federation("fedmd", lr_schedule="linear", rounds=40, lr=0.001)
    rates = [linear.lr(number) for number in (0, 1, 2, 39)]
    assert rates == pytest.approx([0.001, 0.001, 0.001 * (1 - 0.9 / 40), 0.001 * (1 - 0.9 * 38 / 40)])
    assert next(linear.public_batches(39)).lr.item() == pytest.approx(rates[3])


def test_validation_accuracy_is_pooled_and_the_clients_spread_is_not():
    setup, fed = laws.federation("fedavg", validation=0.3)
    state = setup.method.init(fed, setup.options)
    model = fed.initial_model()
    hits = []
    for part in fed.validation:
        x, y = fed.engine.gather(part)
        hits.append((fed.network(*model, x, train=False).logits.argmax(1) == y).double())
    assert [len(part) for part in hits] == [3, 2, 3, 1]
    result = evaluate(fed, setup.method, state)
    own = torch.stack([part.mean() for part in hits])
    assert len(set(own.tolist())) > 1
    assert result["validation_accuracy"] == torch.cat(hits).mean()
    assert result["clients"] == {"mean": own.mean(), "std": own.std(correction=0), "worst": own.min()}
    x, y = fed.transform(fed.test_images), fed.test_labels
    assert result["test_accuracy"] == (fed.network(*model, x, train=False).logits.argmax(1) == y).double().mean()
