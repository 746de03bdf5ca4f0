"""FedAvg: known answers."""

import numpy as np
import pytest
import torch

from fedcli.core.evaluation import evaluate
from tests import laws, toys


def test_weights_are_shares_of_the_cohorts_examples_validation_included():
    _, fed = laws.federation("fedavg", validation=0.25)
    np.testing.assert_allclose(fed.cohort_of(0, [0, 3]).weights.numpy(), [13 / 17, 4 / 17])
    assert [len(part) for part in fed.training] == [10, 6, 8, 3]
    assert [len(part) for part in fed.validation] == [3, 1, 2, 1]


def test_a_round_is_the_weighted_mean_of_parameters_and_buffers():
    run = {"backbone": laws.NORMED, "parts": laws.toy_parts((5, 3, 2, 2))}
    fed, cohort, received, local_loss = toys.first_round(**run)
    clients, _ = fed.train(received, cohort, local_loss)
    mean = {name: sum(n * value[k] for k, n in enumerate((5, 3, 2, 2))) / 12
            for tree in (clients.params, clients.buffers) for name, value in tree.items()}  # fmt: skip
    state = laws.simulate(*laws.federation("fedavg", **run), 1)
    laws.assert_agree({**state.params, **state.buffers}, mean, "the mean")
    assert laws.distance(state.buffers, fed.initial_model()[1]) > 1e-3


def test_the_learning_rate_decays_from_round_to_round():
    decaying, quarter = laws.federation("fedavg", lr=0.04, lr_decay=0.5), laws.federation("fedavg", lr=0.01)
    assert [decaying[1].lr(number) for number in range(3)] == [0.04, 0.02, 0.01]
    third = [laws.simulate(*each, 3, state=each[0].method.init(each[1], None), first=2) for each in (decaying, quarter)]
    laws.assert_agree(*third, "the third round at a quarter of the learning rate")
    _, linear = laws.federation("fedmd", lr_schedule="linear", rounds=40, lr=0.001)
    rates = [linear.lr(number) for number in (0, 1, 2, 39)]
    assert rates == pytest.approx([0.001, 0.001, 0.001 * (1 - 0.9 / 40), 0.001 * (1 - 0.9 * 38 / 40)])
    assert next(linear.public_batches(39)).lr.item() == pytest.approx(rates[3])


def test_validation_accuracy_is_pooled_and_the_clients_spread_is_not():
    setup, fed = laws.federation("fedavg", validation=0.3)
    hits = []
    for part in fed.validation:
        _, logits, labels = fed.predict(*fed.initial_model(), part)
        hits.append((logits.argmax(1) == labels).double())
    assert [len(part) for part in hits] == [3, 2, 3, 1]
    result = evaluate(fed, setup.method, setup.method.init(fed, setup.options))
    own = torch.stack([part.mean() for part in hits])
    assert len(set(own.tolist())) > 1
    assert result["validation_accuracy"] == torch.cat(hits).mean()
    assert result["clients"] == {"mean": own.mean(), "std": own.std(correction=0), "worst": own.min()}
