"""FCCL+'s equations against torch and hand numbers; both phases against a plain loop; FCCL; EWC."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fedcli import toy
from fedcli.core.clients import Client
from fedcli.core.network import NetworkOutput
from fedcli.core.trees import select, stack
from fedcli.papers import fccl_plus
from fedcli.papers.baselines import ewc, fedavg
from fedcli.papers.baselines.ewc import Anchor, draw_labels, fisher_diagonal, penalty
from tests import laws
from tests.first_rounds import minibatch, prepare_public_phase
from tests.plain_federation import PlainFederation
from tests.public_phases import PublicPhase, stacked_by_network
from tests.tensors import randn

ALONE = {"correlation_weight": 0.0, "similarity_weight": 0.0}  # no exchange


def test_cross_correlation_of_the_clients_classes_with_the_means():
    logits = 1000 * randn(6, 3)
    mean = 2 + 5 * randn(6, 3, seed=1)

    def standardised(logits):
        return (logits - logits.mean(0)) / (logits.var(0).sqrt() + 1e-5)

    expected = standardised(logits).T @ standardised(mean) / 6
    torch.testing.assert_close(fccl_plus.cross_correlation(logits, mean), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fccl_plus.cross_correlation(logits, logits).diagonal(), torch.full((3,), 5 / 6).double())


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_column_without_spread_correlates_with_nothing(size):
    logits = randn(size, 3).requires_grad_()
    mean = randn(size, 3, seed=1)
    mean[:, 2] = 7.0
    flat = torch.where(torch.arange(3) == 1, 4.0, logits)
    correlation = fccl_plus.cross_correlation(flat, mean)
    assert (correlation[1] == 0).all()
    assert (correlation[:, 2] == 0).all()

    fccl_plus.fccm_loss(correlation, 0.0051).backward()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[:, 1] == 0).all()


def test_fccm_by_hand():
    correlation = torch.tensor([[0.5, 0.25], [-1.0, 1.0]])
    assert fccl_plus.fccm_loss(correlation, 0.1).item() == pytest.approx(0.25 + 0.1 * 1.25**2)
    plain = fccl_plus.fccm_loss(correlation, 0.1, off_diagonal_target=0.0)
    assert plain.item() == pytest.approx(0.25 + 0.1 * (0.25**2 + 1))
    assert fccl_plus.fccm_loss(2 * torch.eye(3) - 1, 0.0051) == 0  # the target of Fig. 2


def test_similarity_is_the_cosine_with_every_other_image():
    features = randn(5, 4)
    cosines = F.cosine_similarity(features[:, None], features, dim=-1)
    others = ~torch.eye(5, dtype=torch.bool)
    torch.testing.assert_close(fccl_plus.similarity(features, 0.7), cosines[others].reshape(5, 4) / 0.7)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_zero_feature_and_one_or_two_images_align_nothing(size):
    """A zero feature is similar to none."""
    features = torch.where(torch.arange(size)[:, None] == 1, 0.0, randn(size, 3)).requires_grad_()
    ours = fccl_plus.similarity(features, 0.02)
    assert ours.shape == (size, size - 1)
    assert (ours[1:2] == 0).all()
    loss = fccl_plus.fisl_loss(ours, fccl_plus.similarity(randn(size, 3, seed=1), 0.02))
    loss.backward()
    assert torch.isfinite(features.grad).all()
    has_nothing_to_align = size < 3
    assert (loss.item() == 0) == has_nothing_to_align
    assert (features.grad.abs().max() == 0) == has_nothing_to_align


def test_fisl_is_the_divergence_of_the_softmax_of_a_row():
    similarity = randn(4, 3)
    mean = randn(4, 3, seed=1)
    expected = F.kl_div(similarity.log_softmax(1), mean.softmax(1), reduction="batchmean")
    torch.testing.assert_close(fccl_plus.fisl_loss(similarity, mean), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("factor", "weight"), [("square", 9.0), ("one", 1.0)])  # "one" is Eq. 13 as printed
def test_fntd_is_the_divergence_of_the_other_classes(renormalize, factor, weight):
    student = 2 * randn(5, 4)
    teacher = 2 * randn(5, 4, seed=1)
    labels = torch.tensor([0, 3, 1, 1, 2])
    others = ~F.one_hot(labels, 4).bool()
    q = (student / 3).softmax(1)[others].reshape(5, 3)
    p = (teacher / 3).softmax(1)[others].reshape(5, 3)
    if renormalize:
        q = q / q.sum(1, keepdim=True)
        p = p / p.sum(1, keepdim=True)
    expected = weight * (p * (p / q).log()).sum(1).mean()
    ours = fccl_plus.fntd_loss(student, teacher, labels, 3.0, renormalize, factor=factor)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)


def test_plain_distillation_is_the_divergence_with_the_factor():
    student = randn(5, 4)
    teacher = randn(5, 4, seed=1)
    expected = 9 * F.kl_div((student / 3).log_softmax(1), (teacher / 3).softmax(1), reduction="batchmean")
    torch.testing.assert_close(fccl_plus.kd_loss(student, teacher, 3.0), expected)


def after_both_phases(fed, setup, cohort, states):
    """The clients' stacked parameters after a round from these states, and the round's terms."""
    after, terms = laws.method_round(setup, fed, fccl_plus.ServerState(states), cohort)
    return stack([after.clients[client].params for client in range(fed.num_clients)]), terms


@pytest.mark.parametrize(
    ("lifetime", "size", "backbone"),
    [("batch", 8, f"{toy.BATCHNORM},cnn-small"), ("phase", 16, "cnn-mcmahan,cnn-small")],
)
def test_collaboration_is_the_plain_loop_with_all_targets_before_any_update(lifetime, size, backbone):
    run = {"backbone": backbone, "num_clients": 2, "optimizer": "adam", "lr": 0.003, "parts": toy.toy_parts((5, 4))}
    data = toy.toy_dataset(size=size)
    setup, fed, cohort, clients = prepare_public_phase("fccl-plus", {"public_optimizer": lifetime}, data=data, **run)
    fed.public_images = fed.public_images[:8]  # batches of 5 and 3

    def objective(k, scores_of_client, scores_of_all):
        z_bar = torch.stack([scores.logits for scores in scores_of_all]).mean(0)
        s_bar = torch.stack([fccl_plus.similarity(scores.features, 0.02) for scores in scores_of_all]).mean(0)
        fccm = fccl_plus.fccm_loss(fccl_plus.cross_correlation(scores_of_client.logits, z_bar), 0.0051)
        fisl = fccl_plus.fisl_loss(fccl_plus.similarity(scores_of_client.features, 0.02), s_bar)
        return (fccm + 3 * fisl,)

    optimizer = partial(torch.optim.Adam, lr=0.003)
    phase = PublicPhase(fccl_plus.collaborate, objective, optimizer, has_fresh_optimizers=lifetime == "batch")
    terms, _ = laws.assert_public_phase_agrees(phase, fed, cohort, clients, setup.method_config)
    assert {name: values.shape for name, values in terms.items()} == {"fccm": (2,), "fisl": (2,)}


@pytest.mark.parametrize(
    "overrides",
    [{"teacher": "collaborative"}, {"teacher_mode": "train"}, {**ALONE, "average_parameters": True}],
)
def test_the_teacher_is_the_model_that_the_option_names(overrides):
    """It is the previous model, or the one after the collaborative phase, each in its mode."""
    run = {"backbone": toy.BATCHNORM, "batch_size": 20, "local_epochs": 1}
    setup, fed, cohort, clients = prepare_public_phase("fccl-plus", overrides, **run)
    ((model,), _) = fccl_plus.collaborate(stacked_by_network(fed, cohort, clients), cohort, fed, setup.method_config)
    _, terms = after_both_phases(fed, setup, cohort, clients)
    in_training = "teacher_mode" in overrides
    for client, part in enumerate(fed.training):
        x, y = fed.engine.gather(part)
        collaborative = select((model.params, model.buffers), client)
        teacher = collaborative if "teacher" in overrides else (clients[client].params, clients[client].buffers)
        student_logits = fed.network(*collaborative, x).logits
        teacher_logits = fed.network(*teacher, x, train=in_training).logits
        expected = fccl_plus.fntd_loss(student_logits, teacher_logits, y, 3.0).item()
        assert terms["fntd"][client].item() == pytest.approx(expected, rel=1e-9)


def test_plain_distillation_comes_in_the_first_epochs():
    setup, fed, cohort, clients = prepare_public_phase("fccl-plus", {**ALONE, "plain_share": 0.5})
    params, terms = after_both_phases(fed, setup, cohort, clients)
    (model,) = stacked_by_network(fed, cohort, clients)
    teacher = fccl_plus.Teacher(model.params, model.buffers)

    kd_loss = fccl_plus.make_local_loss(fed.network, setup.method_config, "kd")
    model, first_terms = fed.train(model, cohort, kd_loss, teacher, 0, range(0, 1))
    fntd_loss = fccl_plus.make_local_loss(fed.network, setup.method_config, "fntd")
    model, second_terms = fed.train(model, cohort, fntd_loss, teacher, 0, range(1, 2))
    laws.assert_agree(params, model.params, "parameters")
    torch.testing.assert_close(terms["kd"], first_terms["kd"] / 2)
    torch.testing.assert_close(terms["fntd"], second_terms["fntd"] / 2)
    cross_entropy = (first_terms["cross_entropy"] + second_terms["cross_entropy"]) / 2
    torch.testing.assert_close(terms["cross_entropy"], cross_entropy)


def test_with_ewc_a_client_holds_on_to_the_collaborative_phase():
    setup, fed, cohort, clients = prepare_public_phase("fccl-plus", {"regularizer": "ewc", "ewc_weight": 2.0})
    params, _ = after_both_phases(fed, setup, cohort, clients)
    ((model,), _) = fccl_plus.collaborate(stacked_by_network(fed, cohort, clients), cohort, fed, setup.method_config)
    assert model.optimizer == {}  # local training begins with one of its own
    unseen = next(iter(fed.public_batches(0, epoch=1))).x  # the phase has gone through epoch 0
    anchor = ewc.anchors(model, cohort, fed, unseen)
    expected, _ = fed.train(model, cohort, ewc.make_local_loss(fed.network, 2.0), anchor, 0)
    laws.assert_agree(params, expected.params, "EWC")


@pytest.mark.parametrize("form", ["run", "code"])
def test_rounds_begin_at_the_pretrained_model(form):
    """As in the authors' code, it is trained with a cosine rate and without weight decay."""
    options = {**ALONE, "distillation_weight": 0.0, "pretrain_epochs": 3, "pretraining": form}
    state = laws.state_after_rounds(1, "fccl", options)
    setup, plain = toy.federation("fccl", options, federation_type=PlainFederation)
    cohort = plain.cohort(0)
    task = fedavg.make_local_loss(plain.network)
    model = Client(*plain.recall({}, cohort, plain.initial_model()), optimizer={})
    for epoch, share in enumerate((1.0, 0.75, 0.25)):  # (1 + cos(pi e / 3)) / 2
        of_code = {"lr": share * setup.config.lr, "weight_decay": 0.0} if form == "code" else {}
        # Two local epochs have the draws 0 and 1.
        model, _ = plain.train(model, cohort, plain.optimizer_step(task, **of_code), epochs=range(2 + epoch, 3 + epoch))
    trained, _ = plain.train(model._replace(optimizer={}), cohort, task)
    for client, client_state in state.clients.items():
        laws.assert_agree(client_state.pretrained.params, select(model.params, client), "theta*")
        laws.assert_agree(client_state.params, select(trained.params, client), "the model after round 0")


def test_the_pretrained_model_stays_and_newcomers_get_theirs():
    setup, fed = toy.federation("fccl", cohort_size=2)
    cohorts = [[0, 1], [1, 3]]
    state = toy.simulate(setup, fed, 1, cohorts)
    later = toy.simulate(setup, fed, 2, cohorts)
    initial_params, _ = fed.initial_model()
    assert toy.distance(later.clients[1].pretrained, state.clients[1].pretrained) == 0
    assert toy.distance(later.clients[1].params, state.clients[1].params) > 0
    assert toy.distance(later.clients[3].pretrained.params, initial_params) > 0
    assert sorted(later.clients) == [0, 1, 3]


def test_conference_objective_has_both_teachers():
    setup, fed, _, clients = prepare_public_phase("fccl", {"distillation_weight": 0.5})
    loss = fccl_plus.make_conference_loss(fed.network, setup.method_config)
    student = clients[0]
    previous = clients[1]
    pretrained = clients[2]
    teachers = fccl_plus.Teachers(
        fccl_plus.Teacher(previous.params, previous.buffers), fccl_plus.Teacher(pretrained.params, pretrained.buffers)
    )
    batch = minibatch(fed, 5)
    value, _ = loss(student.params, {}, batch, teachers)

    logits = fed.network(student.params, {}, batch.x).logits
    previous_logits = fed.network(previous.params, {}, batch.x).logits
    pretrained_logits = fed.network(pretrained.params, {}, batch.x).logits
    distilled = fccl_plus.kd_loss(logits, previous_logits, 1.0) + fccl_plus.kd_loss(logits, pretrained_logits, 1.0)
    torch.testing.assert_close(value, F.cross_entropy(logits, batch.y) + 0.5 * distilled)


def test_the_teacher_of_the_code_drops_other_units_than_the_student():
    _, fed = toy.federation("fccl-plus", backbone="mobilenet-v2-dropout-512", data=toy.toy_dataset(size=32))
    params, buffers = fed.initial_model()
    batch = minibatch(fed, 5)

    def buffers_with_key(key):
        """The buffers with the key of a batch's draws."""
        keys = {name: torch.tensor(key) for name in buffers if name.endswith(".key")}
        return {**buffers, **keys}

    student = fed.network(params, buffers_with_key(7), batch.x).logits.detach()
    teacher = fccl_plus.Teacher(params, buffers)
    in_batch = fccl_plus.predict_in_training(fed.network, teacher, buffers_with_key(7), batch)
    in_next_batch = fccl_plus.predict_in_training(fed.network, teacher, buffers_with_key(9), batch)
    assert toy.distance(in_batch, student) > 1e-3
    assert toy.distance(in_batch, in_next_batch) > 1e-3


# EWC


def linear(params, buffers, x, mask=None, train=True):
    """Logits W x + b of two classes."""
    features = x.flatten(1)
    return NetworkOutput(features, features @ params["W"].T + params["b"], buffers)


def test_ewcs_penalty_by_hand():
    anchor = Anchor(
        {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([0.0])},
        {"w": torch.tensor([3.0, 0.0]), "b": torch.tensor([2.0])},
    )
    params = {"w": torch.tensor([3.0, 9.0]), "b": torch.tensor([-1.0])}
    assert penalty(params, anchor) == (3 * 4 + 0 + 2 * 1) / 2


def test_labels_are_drawn_in_proportion():
    logits = torch.tensor([0.2, 0.5, 0.3]).double().log().expand(6, 3)
    assert draw_labels(logits, torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71, 1.0])).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("label", [0, 1])
def test_fisher_squares_the_gradient_of_each_image(label):
    params = {"W": randn(2, 4), "b": randn(2)}
    x = randn(3, 1, 2, 2, seed=1)
    ours = fisher_diagonal(linear, params, {}, x, torch.full((3,), float(label)).double())
    errors = linear(params, {}, x).logits.softmax(1) - torch.eye(2)[label]  # of the logits, for that label
    gradients = errors[:, :, None] * x.flatten(1)[:, None]
    torch.testing.assert_close(ours, {"W": gradients.square().mean(0), "b": errors.square().mean(0)})


def test_fisher_is_of_the_model_in_evaluation_mode():
    _, fed = toy.federation("fedmd", backbone=toy.BATCHNORM)
    params, buffers = fed.initial_model()
    shifted = {name: value + 0.5 for name, value in buffers.items()}
    x = minibatch(fed, 1).x
    uniform = torch.tensor([0.3]).double()
    fisher = fisher_diagonal(fed.network, params, buffers, x, uniform)
    shifted_fisher = fisher_diagonal(fed.network, params, shifted, x, uniform)
    assert toy.distance(fisher, shifted_fisher) > 0.01  # running statistics matter, at which training does not look


def test_each_client_has_draws_of_its_own():
    _, fed = toy.federation("fedmd")
    clients = fed.broadcast(*fed.initial_model(), fed.cohort(1))
    fisher = ewc.anchors(clients, fed.cohort(1), fed, minibatch(fed, 5).x).fisher
    assert toy.distance(select(fisher, 0), select(fisher, 1)) > 0


def test_ewcs_objective_is_the_cross_entropy_and_the_weighted_penalty():
    _, fed = toy.federation("fedmd")
    params, buffers = fed.initial_model()
    anchor = Anchor({name: value + 1 for name, value in params.items()}, params)
    batch = minibatch(fed, 5)
    value, aux = ewc.make_local_loss(fed.network, 0.7)(params, buffers, batch, anchor)
    plain, _ = fedavg.make_local_loss(fed.network)(params, buffers, batch, None)
    torch.testing.assert_close(value, plain + 0.7 * penalty(params, anchor))
    torch.testing.assert_close(aux.terms["ewc"], penalty(params, anchor))


# The study of FCCL+ without the exchange

CONTROLS = Path(__file__).parent.parent / "results" / "records" / "fccl-digits-real-4-control" / "controls.py"


@pytest.mark.parametrize("alone", [False, True])
def test_the_control_of_the_study_is_fccl_plus_where_it_is_off_or_nobody_else_takes_part(alone):
    one_at_a_time = [[0], [1], [0]] if alone else None
    ours = laws.state_after_rounds(3, str(CONTROLS), {"alone": alone}, cohorts=one_at_a_time)
    fccl_pluss = laws.state_after_rounds(3, "fccl-plus", cohorts=one_at_a_time)
    laws.assert_agree(tuple(ours), tuple(fccl_pluss), "the states")


@pytest.mark.parametrize("alone", [True, False])
def test_the_control_of_the_study_hears_nothing_from_the_others(alone):
    """In two rounds, since before the first all clients have the same model and the mean of its outputs is its own."""
    with_one = laws.state_after_rounds(2, str(CONTROLS), {"alone": alone}, cohorts=[[0, 1], [0, 1]])
    with_two = laws.state_after_rounds(2, str(CONTROLS), {"alone": alone}, cohorts=[[0, 1, 2], [0, 1, 2]])
    distance = toy.distance(tuple(with_one.clients[0]), tuple(with_two.clients[0]))
    assert distance < 1e-12 if alone else distance > 1e-3
