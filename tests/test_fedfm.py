"""FedFM's equations against torch and hand numbers, its schedule, FedFM-Lite, its add-ons, and costs of its tables."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from fedcli import toy
from fedcli.core import weighted_mean
from fedcli.core.trees import select, stack
from fedcli.declarations import Sizes
from fedcli.papers import fedfm
from fedcli.papers.fedfm import aggregate_anchors, contrastive_guiding, l2_guiding, plain_l2_guiding
from fedcli.registry import find_method
from fedcli.results.printed_numbers import read_reported_numbers
from tests import laws
from tests.first_rounds import minibatch
from tests.tensors import randn

LABELS = torch.tensor([0, 1, 3, 2, 0, 3, 1])


def example():
    """Features of the samples and anchors of the classes."""
    return randn(7, 5), 3 * randn(4, 5, seed=1)


def test_guiding_by_torchs_losses():
    features, anchors = example()
    scores = F.cosine_similarity(features[:, None], anchors, dim=-1) / 0.1
    torch.testing.assert_close(contrastive_guiding(features, LABELS, anchors, 0.1), F.cross_entropy(scores, LABELS))
    normalised = F.mse_loss(F.normalize(features), F.normalize(anchors)[LABELS])
    torch.testing.assert_close(l2_guiding(features, LABELS, anchors), normalised)
    printed = (features - anchors[LABELS]).square().sum(1).mean()
    torch.testing.assert_close(plain_l2_guiding(features, LABELS, anchors), printed)


GUIDINGS = [partial(contrastive_guiding, temperature=0.1), l2_guiding, plain_l2_guiding]


@pytest.mark.parametrize("guiding", GUIDINGS, ids=["contrastive", "l2", "plain-l2"])
class TestGuiding:
    def test_a_class_without_anchor_is_left_out(self, guiding):
        features, anchors = example()
        keep = LABELS != 2
        has_anchor = torch.tensor([True, True, False, True])
        expected = guiding(features[keep], torch.tensor([0, 1, 2, 0, 2, 1]), anchors[has_anchor])
        torch.testing.assert_close(guiding(features, LABELS, anchors, has_anchor=has_anchor), expected)
        assert guiding(features, LABELS, anchors, has_anchor=torch.zeros(4, dtype=torch.bool)) == 0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("length", [0.0, 1e-20, 1e-8])
    def test_a_feature_without_direction_has_a_bounded_gradient(self, guiding, dtype, length):
        features, anchors = example()
        features = features.to(dtype)
        features[2] = length
        guiding(features.requires_grad_(), LABELS, anchors.to(dtype)).backward()
        assert features.grad.abs().max() < 100
        assert features.grad[[0, 1, 3]].abs().max() > 0


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [  # a client without the class counts for nothing, or for the previous anchor
        ("weighted", [[2.5, 4.0], [7.0, 7.0], [4.0, 0.0]]),
        ("uniform", [[2.0, 3.0], [7.0, 7.0], [5.5, 3.5]]),
    ],
)
def test_an_anchor_is_a_mean_over_clients_or_keeps_its_value(weighting, expected):
    means = torch.tensor([[[1.0, 1.0], [9.0, 9.0], [4.0, 0.0]], [[3.0, 5.0], [9.0, 9.0], [torch.nan, torch.nan]]])
    counts = torch.tensor([[1, 0, 2], [3, 0, 0]])
    assert aggregate_anchors(means, counts, torch.full((3, 2), 7.0), weighting).tolist() == expected


def class_means(fed, models):
    """Means of the features of each class, in evaluation mode, over the training parts of clients with these models."""
    features = []
    labels = []
    for client, model in models.items():
        own_features, _, own_labels = fed.predict(*model, fed.training[client])
        features.append(own_features)
        labels.append(own_labels)
    features = torch.cat(features)
    labels = torch.cat(labels)
    return torch.stack([features[labels == label].mean(0) for label in range(fed.num_classes)])


def test_weighted_anchors_are_the_class_means_of_all_training_parts_by_the_received_model():
    run = {"parts": toy.toy_parts((6, 5, 3, 2)), "validation": 0.2, "backbone": toy.BATCHNORM, "local_epochs": 1}
    setup, fed = toy.federation("fedfm", **run)
    assert sum(map(len, fed.training)) == 14  # two are held out
    after = toy.simulate(setup, fed, 1)
    torch.testing.assert_close(after.anchors, class_means(fed, dict.fromkeys(range(4), fed.initial_model())))
    assert after.has_anchor.all()


def test_rounds_before_start_round_are_fedavg_and_that_round_is_not():
    options = {"start_round": 2, "match_weight": 1.0}

    def params_after(rounds, method, options=None):
        return laws.state_after_rounds(rounds, method, options).params

    laws.assert_agree(params_after(1, "fedfm", options), params_after(1, "fedavg"), "before T_s")
    laws.assert_agree(params_after(2, "fedfm", options), params_after(2, "fedavg"), "before T_s")
    assert toy.distance(params_after(3, "fedfm", options), params_after(3, "fedavg")) > 1e-6


# FedFM-Lite

TERMS_ON = {"start_round": 0, "match_weight": 1.0}


def test_rounds_of_lite_are_those_of_a_plain_loop():
    """Models are exchanged after the rounds 2 and 4 and after the last, anchors after each."""
    run = {"rounds": 5, "cohort_size": 2, "backbone": toy.BATCHNORM, "local_epochs": 1}
    setup, fed = toy.federation("fedfm-lite", {**TERMS_ON, "model_interval": 2}, **run)
    state = laws.initial_state(setup, fed)
    local_loss = fedfm.make_local_loss(fed.network, setup.method_config)
    model = fed.initial_model()
    anchors = state.anchors
    kept = {}
    for round, client_ids in enumerate([[0, 1], [1, 2], [0, 3], [0, 1], [2, 3]]):
        if round % 2 == 0:
            kept = {}  # all begin with the global model after an exchange
        context = fedfm.Context(anchors, torch.full((3,), round > 0), torch.tensor(1.0, dtype=fed.dtype))
        for client in client_ids:
            alone = fed.cohort_of(round, [client])
            received = fed.broadcast(*kept.get(client, model), alone)
            trained, _ = fed.train(received, alone, local_loss, context)
            kept[client] = select((trained.params, trained.buffers), 0)
        models = {client: kept[client] for client in client_ids}
        anchors = class_means(fed, models)
        cohort = fed.cohort_of(round, client_ids)
        if round in (1, 3, 4):
            model = weighted_mean(stack(list(models.values())), cohort.weights)

        state, _ = laws.method_round(setup, fed, state, cohort)
        shared = (state.params, state.buffers, state.anchors)
        laws.assert_agree(shared, (*model, anchors), f"what all share after round {round}")
        assert state.clients.keys() == kept.keys()
        for client, expected in kept.items():
            laws.assert_agree(tuple(state.clients[client]), expected, f"what client {client} keeps after round {round}")


# Feature matching as an add-on

EQUAL_PARTS = {"parts": toy.toy_parts((4, 4, 4, 4))}


@pytest.mark.parametrize(
    ("name", "options", "run"),
    [
        ("fedprox-fm", {"proximal_weight": 0.0}, {}),
        ("moon-fm", {"contrastive_weight": 0.0}, {}),
        ("fednova-fm", {}, EQUAL_PARTS),
    ],
    ids=["fedprox-fm", "moon-fm", "fednova-fm"],
)
def test_an_add_on_without_effect_is_fedfm(name, options, run):
    """The other method's term is off, or the clients of FedNova take equal steps."""
    ours = laws.state_after_rounds(3, name, {**TERMS_ON, **options}, **run)
    fedfms = laws.state_after_rounds(3, "fedfm", TERMS_ON, **run)
    for part in ("params", "anchors", "has_anchor"):
        laws.assert_agree(getattr(ours, part), getattr(fedfms, part), part)


@pytest.mark.parametrize("name", ["fedfm", "fedfm-lite", "fedprox-fm", "fednova-fm", "moon-fm"])
def test_clipping_shortens_the_whole_step(name):
    setup, fed = toy.federation(name, {**TERMS_ON, "clip_norm": 1e-12}, weight_decay=0.0)
    state = laws.initial_state(setup, fed)
    after, _ = laws.method_round(setup, fed, state, fed.cohort(0))
    assert toy.distance(after.params, state.params) < 1e-9


@pytest.mark.parametrize("name", ["fedfm", "fedfm-lite", "fednova-fm"])
def test_no_norm_is_logged_of_a_network_without_batch_normalisation(name):
    setup, fed = toy.federation(name, {"start_round": 0})
    _, terms = laws.method_round(setup, fed, laws.initial_state(setup, fed), fed.cohort(0))
    assert "norm_before_batchnorm" not in terms


@pytest.mark.slow
def test_the_norm_before_batch_normalisation_is_logged_in_the_round_in_which_matching_starts():
    """To multiply these weights changes no output, which is why their norm sets how far a step turns them."""
    setup, fed = toy.federation("fedfm", {**TERMS_ON, "start_round": 1}, backbone="resnet10")
    state = laws.initial_state(setup, fed)
    received = {}  # the model of each round, and what it logged
    terms = {}
    for round in range(3):
        received[round] = state
        state, terms[round] = laws.method_round(setup, fed, state, fed.cohort(round))
    assert [round for round in range(3) if "norm_before_batchnorm" in terms[round]] == [1]

    model = received[1]
    convolutions = {name: value for name, value in model.params.items() if value.ndim == 4}
    norm = torch.cat([value.flatten() for value in convolutions.values()]).norm()
    torch.testing.assert_close(terms[1]["norm_before_batchnorm"], norm.expand(4))

    longer = {**model.params, **{name: 4 * value for name, value in convolutions.items()}}
    x = minibatch(fed, 5).x
    logits = fed.network(model.params, model.buffers, x).logits
    logits_of_longer = fed.network(longer, model.buffers, x).logits
    # But for the 1e-5 that is added to the variance.
    torch.testing.assert_close(logits_of_longer, logits, rtol=1e-3, atol=1e-3)


# The study of the round in which matching starts

CONTROLS = Path(__file__).parent.parent / "results" / "records" / "fedfm-start" / "controls.py"
STARTED = {**TERMS_ON, "start_round": 1}


def test_the_controls_of_the_study_are_fedfm_where_they_are_off():
    run = {"backbone": toy.BATCHNORM, "local_epochs": 1}
    ours = laws.state_after_rounds(3, str(CONTROLS), STARTED, **run)
    fedfms = laws.state_after_rounds(3, "fedfm", STARTED, **run)
    laws.assert_agree(tuple(ours), tuple(fedfms), "the states")


def test_longer_convolutions_and_their_statistics_are_the_same_function():
    setup, fed = toy.federation(str(CONTROLS), STARTED, backbone="resnet10")
    state = toy.simulate(setup, fed, 1)
    params, buffers = setup.method.module.rescale(state.params, state.buffers, 10.0)
    assert toy.distance(params, state.params) > 1

    _, logits, _ = fed.predict(state.params, state.buffers, fed.training[0])
    _, logits_of_longer, _ = fed.predict(params, buffers, fed.training[0])
    # But for the 1e-5 that is added to the variance.
    torch.testing.assert_close(logits_of_longer, logits, rtol=1e-3, atol=1e-3)


def test_statistics_that_are_estimated_anew_forget_those_before():
    """Each minibatch moves them by a tenth: of a distance of 3, 0.9^60 is left after 40 passes of 1 or 2 batches."""
    setup, fed = toy.federation(str(CONTROLS), STARTED, backbone=toy.BATCHNORM)
    params, buffers = fed.initial_model()
    other = {name: value + 3 if value.is_floating_point() else value for name, value in buffers.items()}
    post = setup.method.module.POST

    def estimated_means(before):
        """The running means that are estimated anew from these statistics on."""
        _, after, _ = post.apply(params, before, fed, post.config(reestimate_epochs=40))
        return {name: value for name, value in after.items() if name.endswith("running_mean")}

    means = estimated_means(buffers)
    torch.testing.assert_close(estimated_means(other), means, rtol=0, atol=0.01)
    assert toy.distance(means, {name: buffers[name] for name in means}) > 0.1


# The costs of Tables III, IV and VI

SIZES = {"CIFAR-10": Sizes(11_181_642, 10, 512), "CIFAR-100": Sizes(23_705_252, 100, 2048)}


def printed(table, row, column):
    """The paper's number in a cell."""
    for entry in read_reported_numbers()["FedFM"][table]["rows"]:
        if entry["method"] == row and entry["column"] == column:
            return entry["mean"]
    raise KeyError(f"{table}, {row}, {column}")


@pytest.mark.parametrize("name", ["FedAvg", "FedAvgM", "FedProx", "SCAFFOLD", "FedDyn", "FedNova", "MOON", "FedFM"])
def test_the_floats_that_the_tables_print(name):
    """The paper multiplies the models' 11,182 thousand and 23.7 million, and with FedFM's anchors 23.9 million."""
    method = find_method(name.lower())
    sent = {}
    for data, sizes in SIZES.items():
        fed = SimpleNamespace(sizes=sizes, num_classes=sizes.num_classes, feature_dim=sizes.feature_dim)
        _, sent[data] = method.costs(None, SimpleNamespace(client_ids=[0]), fed, method.config())
        memory = method.client_memory(sizes)
        assert abs(memory / 1000 - printed("Table III", name, f"{data} memory_1e3_floats")) < 2
    assert abs(sent["CIFAR-10"] / 1000 - printed("Table IV", name, "bandwidth_1e3_floats")) < 1

    for clients in (20, 30, 50, 100):  # 100 rounds
        total = printed("Table VI", name, f"K={clients} bandwidth_1e8_floats")
        assert total == pytest.approx(100 * clients * sent["CIFAR-100"] / 1e8, rel=6e-4)
