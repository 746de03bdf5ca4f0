"""FedFA: the equations against plain loops, local training against plain torch, and how protocols divide."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcli import toy
from fedcli.core import head_names
from fedcli.core.draws import generator
from fedcli.core.trees import select
from fedcli.papers import fedfa
from tests import laws
from tests.plain_loops import minibatches, modules_of, params_of, sgd_of
from tests.tensors import randn

C, D = 5, 4


LABELS = torch.tensor([0, 1, 2, 4, 4, 0, 4, 2, 4])  # class 3 is absent


def test_anchor_loss_of_the_paper_is_half_the_mean_of_squares():
    features = randn(9, D)
    anchors = randn(C, D, seed=1)
    expected = (features - anchors[LABELS]).square().sum(1).mean() / 2
    torch.testing.assert_close(fedfa.anchor_loss(features, LABELS, anchors, "paper"), expected)


def test_orthogonal_anchors_are_distinct_rows_of_the_identity_in_random_order():
    def draw(seed):
        return fedfa.orthogonal_anchors(10, 10, generator(seed, "anchors"))  # all rows there are

    anchors = draw(0)
    assert torch.equal(anchors @ anchors.T, torch.eye(10, dtype=torch.float64))
    assert set(anchors.flatten().tolist()) == {0.0, 1.0}
    assert torch.equal(anchors, draw(0))
    assert not torch.equal(anchors, draw(1))
    rows = anchors.argmax(1).tolist()
    assert rows != sorted(rows)


def test_anchors_are_random_directions_where_there_are_too_few_rows():
    anchors = fedfa.orthogonal_anchors(400, 3, generator(0, "anchors"))
    torch.testing.assert_close(anchors.norm(dim=1), torch.ones(400, dtype=torch.float64))
    assert len(anchors.unique(dim=0)) == 400
    assert anchors.mean(0).abs().max() < 0.1  # uniform on the sphere: standard deviation 0.03
    assert torch.equal(anchors, fedfa.random_anchors(400, 3, generator(0, "anchors")))


def test_anchors_are_averaged_with_those_of_clients_that_lack_the_class_or_without_them():
    local = torch.tensor([[[1.0], [10.0], [5.0]], [[3.0], [20.0], [6.0]]])
    weights = torch.tensor([0.25, 0.75])
    assert fedfa.aggregate_anchors(local, weights).tolist() == [[2.5], [17.5], [5.75]]
    has_class = torch.tensor([[True, True, False], [True, False, False]])
    previous = torch.full((3, 1), 7.0)
    assert fedfa.aggregate_present(local, weights, has_class, previous).tolist() == [[2.5], [10.0], [7.0]]


class TrainedClient(NamedTuple):
    """What a client sends after a round."""

    params: dict[str, torch.Tensor]
    anchors: torch.Tensor  # [C, D]


def train_client(fed, options, state, cohort, k):
    """Client k after a round with plain modules and torch.optim."""
    received = state.anchors
    classes = torch.arange(len(received))
    (module,) = modules_of(fed, {k: (state.params, state.buffers)})
    sgd = sgd_of(fed, module.parameters())
    calibration_kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[options.calibration_optimizer]
    calibration = calibration_kind(module.head.parameters(), lr=options.calibration_lr)

    anchors = received.clone()
    gathered = torch.zeros_like(received)  # sums of the class means of an epoch's batches
    met = set()
    plan = fed.plan(cohort)
    for step, (x, y) in enumerate(minibatches(fed, 0, k)):
        # Alignment.
        features, logits = module(x)
        distances = sum((features[y == c] - received[c]).square().sum(1).mean() for c in y.unique())
        loss = F.cross_entropy(logits, y) + options.anchor_weight * distances / len(received)
        sgd.zero_grad()
        loss.backward()
        sgd.step()

        # Calibration.
        is_epoch_end = plan.epoch_end[step, k]
        if options.calibration == "batch" or (options.calibration == "epoch" and is_epoch_end):
            calibration.zero_grad()
            F.cross_entropy(module.head(received), classes).backward()
            calibration.step()

        # The client's anchors.
        for c in y.unique().tolist():
            gathered[c] += features[y == c].detach().mean(0)
            met.add(c)
        if is_epoch_end:
            for c in met:
                mean = gathered[c] / plan.num_batches[0, k]
                anchors[c] = options.anchor_decay * anchors[c] + (1 - options.anchor_decay) * mean
            gathered = torch.zeros_like(received)
    return TrainedClient(params_of(module), anchors)


def send_after_a_round(setup, fed, state):
    """What the clients send after round 0, stacked."""
    sent = {}

    def upload(stacked):
        sent["anchors"] = stacked
        return stacked

    def upload_model(clients):
        sent["params"] = clients.params
        return clients.params, clients.buffers

    fed.upload = upload
    fed.upload_model = upload_model
    laws.method_round(setup, fed, state, fed.cohort(0))
    return TrainedClient(**sent)


@pytest.mark.parametrize(
    "options",
    [
        {"calibration": "batch", "calibration_optimizer": "sgd", "calibration_lr": 0.2},
        {"calibration": "epoch", "calibration_optimizer": "adam", "calibration_lr": 0.03},
        {"calibration": "never"},
    ],
)
def test_two_epochs_of_every_client_against_a_plain_loop(options):
    two_classes = np.array([0, 1, 3, 4, 6, 7, 9, 10, 12])  # the classes are 0, 1, 2, 0, 1, 2, ...
    parts = [two_classes, np.arange(30, 37), np.arange(40, 50), np.array([], np.int64)]
    options = {"anchor_weight": 0.5, "anchor_decay": 0.3, **options}
    setup, fed = toy.federation("fedfa", options, parts=parts)
    start = laws.initial_state(setup, fed)
    sent = send_after_a_round(setup, fed, start)
    for k in range(4):
        expected = train_client(fed, setup.method_config, start, fed.cohort(0), k)
        laws.assert_agree({name: value[k] for name, value in sent.params.items()}, expected.params, f"client {k}")
        laws.assert_agree(sent.anchors[k], expected.anchors, f"the anchors of client {k}")
    assert torch.equal(sent.anchors[0, 2], start.anchors[2])  # a class that it lacks
    assert torch.equal(sent.anchors[3], start.anchors)  # a client without examples
    assert not torch.equal(sent.anchors[0, 0], start.anchors[0])


def test_a_first_round_of_fedavg_gives_the_anchors():
    data = toy.toy_dataset(num_train=12)  # classes 0, 1, 2, 0, 1, 2, ...
    parts = [np.array([0, 3, 1]), np.array([6, 9]), np.array([2, 5]), np.array([8, 11])]
    run = {"data": data, "parts": parts, "batch_size": 8}  # one batch an epoch
    setup, fed = toy.federation("fedfa", {"anchor_init": "fedavg-round"}, **run)
    fedavg, fedavg_fed = toy.federation("fedavg", **run)
    cohorts = ([0, 1], [2, 3])
    start = laws.initial_state(setup, fed)
    first = toy.simulate(setup, fed, 1, cohorts)
    laws.assert_agree(first.params, toy.simulate(fedavg, fedavg_fed, 1, cohorts).params, "round 0")

    cohort = fed.cohort_of(0, [0, 1])
    received = fed.broadcast(start.params, start.buffers, cohort)
    task = fedavg.method.module.make_local_loss(fed.network)
    one_epoch, _ = fed.train(received, cohort, task, epochs=range(1))
    features_0, _, _ = fed.predict(select(one_epoch.params, 0), {}, parts[0])  # of the classes 0, 0, 1
    features_1, _, _ = fed.predict(select(one_epoch.params, 1), {}, parts[1])  # of the class 0
    class_0 = 0.6 * features_0[:2].mean(0) + 0.4 * features_1.mean(0)
    class_1 = features_0[2]
    expected = torch.stack([class_0, class_1, start.anchors[2]])
    laws.assert_agree(first.anchors, expected, "class means before the second of two steps")

    later = toy.simulate(setup, fed, 2, cohorts)
    assert toy.distance(later.params, toy.simulate(fedavg, fedavg_fed, 2, cohorts).params) > 1e-6
    laws.assert_agree(later.anchors[:2], first.anchors[:2], "classes that the second cohort lacks")


def test_clipping_shortens_the_step_of_alignment_and_not_that_of_calibration():
    setup, fed = toy.federation("fedfa", {"clip_norm": 1e-12}, weight_decay=0.0)
    first = laws.initial_state(setup, fed)
    state, _ = laws.method_round(setup, fed, first, fed.cohort(0))
    for name, value in state.params.items():
        distance = float((value - first.params[name]).abs().max())
        assert (distance > 1e-4) == (name in head_names(fed.network)), (name, distance)
