"""FCCL+'s equations against torch and hand numbers; both phases against a plain loop; FCCL; EWC."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fedcli.core.clients import Client, Output
from fedcli.core.trees import select, stack
from fedcli.papers import fccl_plus
from fedcli.papers.baselines import ewc, fedavg
from fedcli.papers.baselines.ewc import Anchor, draw_labels, fisher_diagonal, penalty
from tests import laws
from tests.reference import stacked_by_network
from tests.toys import minibatch, randn, with_different_models

ALONE = {"correlation_weight": 0.0, "similarity_weight": 0.0}  # no exchange


def test_cross_correlation_of_the_clients_classes_with_the_means():
    own, mean = 1000 * randn(6, 3), 2 + 5 * randn(6, 3, seed=1)
    first, second = ((value - value.mean(0)) / (value.var(0).sqrt() + 1e-5) for value in (own, mean))
    torch.testing.assert_close(fccl_plus.cross_correlation(own, mean), first.T @ second / 6, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fccl_plus.cross_correlation(own, own).diagonal(), torch.full((3,), 5 / 6).double())


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_column_without_spread_correlates_with_nothing(size):
    own = randn(size, 3).requires_grad_()
    mean = randn(size, 3, seed=1)
    mean[:, 2] = 7.0
    flat = torch.where(torch.arange(3) == 1, 4.0, own)
    correlation = fccl_plus.cross_correlation(flat, mean)
    assert (correlation[1] == 0).all()
    assert (correlation[:, 2] == 0).all()
    fccl_plus.fccm_loss(correlation, 0.0051).backward()
    assert torch.isfinite(own.grad).all()
    assert (own.grad[:, 1] == 0).all()


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
def test_a_zero_feature_is_like_none_and_one_or_two_images_have_nothing_to_align(size):
    features = torch.where(torch.arange(size)[:, None] == 1, 0.0, randn(size, 3)).requires_grad_()
    ours = fccl_plus.similarity(features, 0.02)
    assert ours.shape == (size, size - 1)
    assert (ours[1:2] == 0).all()
    loss = fccl_plus.fisl_loss(ours, fccl_plus.similarity(randn(size, 3, seed=1), 0.02))
    loss.backward()
    assert torch.isfinite(features.grad).all()
    assert (loss.item() == features.grad.abs().max() == 0) == (size < 3)


def test_fisl_is_the_divergence_of_the_softmax_of_a_row():
    own, mean = randn(4, 3), randn(4, 3, seed=1)
    expected = F.kl_div(own.log_softmax(1), mean.softmax(1), reduction="batchmean")
    torch.testing.assert_close(fccl_plus.fisl_loss(own, mean), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("factor", "weight"), [("square", 9.0), ("one", 1.0)])  # "one" is Eq. 13 as printed
def test_fntd_is_the_divergence_of_the_other_classes(renormalize, factor, weight):
    student, teacher, labels = 2 * randn(5, 4), 2 * randn(5, 4, seed=1), torch.tensor([0, 3, 1, 1, 2])
    others = ~F.one_hot(labels, 4).bool()
    q, p = ((logits / 3).softmax(1)[others].reshape(5, 3) for logits in (student, teacher))
    if renormalize:
        q, p = q / q.sum(1, keepdim=True), p / p.sum(1, keepdim=True)
    expected = weight * (p * (p / q).log()).sum(1).mean()
    ours = fccl_plus.fntd_loss(student, teacher, labels, 3.0, renormalize, factor=factor)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)


def test_plain_distillation_is_the_divergence_with_the_factor():
    student, teacher = randn(5, 4), randn(5, 4, seed=1)
    expected = 9 * F.kl_div((student / 3).log_softmax(1), (teacher / 3).softmax(1), reduction="batchmean")
    torch.testing.assert_close(fccl_plus.kd_loss(student, teacher, 3.0), expected)


def after_both_phases(fed, setup, cohort, states):
    """The clients' stacked parameters after a round from these states, and the round's terms."""
    after, terms = setup.method.run_round(fccl_plus.ServerState(states), cohort, fed, setup.options)
    return stack([after.clients[client].params for client in range(fed.num_clients)]), terms


@pytest.mark.parametrize(
    ("lifetime", "size", "backbone"), [("batch", 8, f"{laws.NORMED},cnn-small"), ("phase", 16, "cnn-mcmahan,cnn-small")]
)
def test_collaboration_is_the_plain_loop_with_all_targets_before_any_update(lifetime, size, backbone):
    run = {"backbone": backbone, "num_clients": 2, "optimizer": "adam", "lr": 0.003, "parts": laws.toy_parts((5, 4))}
    data = laws.toy_dataset(size=size)
    setup, fed, cohort, clients = with_different_models("fccl-plus", {"public_optimizer": lifetime}, data=data, **run)
    fed.public_images = fed.public_images[:8]  # batches of 5 and 3

    def objective(k, features, logits, everyone):
        z_bar = torch.stack([said for _, said in everyone]).mean(0)
        s_bar = torch.stack([fccl_plus.similarity(own, 0.02) for own, _ in everyone]).mean(0)
        fccm = fccl_plus.fccm_loss(fccl_plus.cross_correlation(logits, z_bar), 0.0051)
        return (fccm + 3 * fccl_plus.fisl_loss(fccl_plus.similarity(features, 0.02), s_bar),)

    optimizer, fresh = partial(torch.optim.Adam, lr=0.003), lifetime == "batch"
    terms, _ = laws.assert_public_phase_agrees(
        setup, fed, cohort, clients, fccl_plus.collaborate, objective, optimizer, fresh=fresh
    )
    assert {name: values.shape for name, values in terms.items()} == {"fccm": (2,), "fisl": (2,)}


@pytest.mark.parametrize(
    "overrides",
    [{"teacher": "collaborative"}, {"teacher_mode": "train"}, {**ALONE, "average_parameters": True}],
)
def test_the_teacher_is_the_previous_model_or_the_one_after_the_collaborative_phase_in_its_mode(overrides):
    run = {"backbone": laws.NORMED, "batch_size": 20, "local_epochs": 1}
    setup, fed, cohort, clients = with_different_models("fccl-plus", overrides, **run)
    ((model,), _) = fccl_plus.collaborate(stacked_by_network(fed, cohort, clients), cohort, fed, setup.options)
    _, terms = after_both_phases(fed, setup, cohort, clients)
    in_training = "teacher_mode" in overrides
    for client, part in enumerate(fed.training):
        x, y = fed.engine.gather(part)
        own = select((model.params, model.buffers), client)
        teacher = own if "teacher" in overrides else clients[client][:2]
        student_logits, teacher_logits = fed.network(*own, x).logits, fed.network(*teacher, x, train=in_training).logits
        expected = fccl_plus.fntd_loss(student_logits, teacher_logits, y, 3.0).item()
        assert terms["fntd"][client].item() == pytest.approx(expected, rel=1e-9)


def test_plain_distillation_comes_in_the_first_epochs():
    setup, fed, cohort, clients = with_different_models("fccl-plus", {**ALONE, "plain_share": 0.5})
    params, terms = after_both_phases(fed, setup, cohort, clients)
    (model,) = stacked_by_network(fed, cohort, clients)
    teacher, trained = fccl_plus.Teacher(model.params, model.buffers), []
    for epoch, term in enumerate(("kd", "fntd")):
        loss = fccl_plus.make_local_loss(fed.network, setup.options, term)
        model, own = fed.train(model, cohort, loss, teacher, 0, range(epoch, epoch + 1))
        trained.append(own)
    laws.assert_agree(params, model.params, "parameters")
    halves = {"kd": trained[0]["kd"], "fntd": trained[1]["fntd"]}
    expected = {**halves, "cross_entropy": trained[0]["cross_entropy"] + trained[1]["cross_entropy"]}
    for name, value in expected.items():
        torch.testing.assert_close(terms[name], value / 2)


def test_with_ewc_a_client_holds_on_to_the_collaborative_phase():
    setup, fed, cohort, clients = with_different_models("fccl-plus", {"regularizer": "ewc", "ewc_weight": 2.0})
    params, _ = after_both_phases(fed, setup, cohort, clients)
    ((model,), _) = fccl_plus.collaborate(stacked_by_network(fed, cohort, clients), cohort, fed, setup.options)
    assert model.optimizer == {}  # local training begins with one of its own
    unseen = next(iter(fed.public_batches(0, epoch=1))).x  # the phase has gone through epoch 0
    anchor = ewc.anchors(model, cohort, fed, unseen)
    expected, _ = fed.train(model, cohort, ewc.make_local_loss(fed.network, 2.0), anchor, 0)
    laws.assert_agree(params, expected.params, "EWC")


@pytest.mark.parametrize("form", ["run", "code"])
def test_rounds_begin_at_the_pretrained_model_which_in_the_code_has_a_cosine_rate_and_no_weight_decay(form):
    options = {**ALONE, "distillation_weight": 0.0, "pretrain_epochs": 3, "pretraining": form}
    state = laws.simulate(*laws.federation("fccl", options), 1)
    setup, plain = laws.federation("fccl", options, reference=True)
    cohort, task = plain.cohort(0), fedavg.make_local_loss(plain.network)
    model = Client(*plain.recall({}, cohort, plain.initial_model()), optimizer={})
    for epoch, share in enumerate((1.0, 0.75, 0.25)):  # (1 + cos(pi e / 3)) / 2
        of_code = {"lr": share * setup.run.lr, "weight_decay": 0.0} if form == "code" else {}
        # Two local epochs have the draws 0 and 1.
        model, _ = plain.train(model, cohort, plain.optimizer_step(task, **of_code), epochs=range(2 + epoch, 3 + epoch))
    trained, _ = plain.train(model._replace(optimizer=[{}] * 4), cohort, task)
    for client, own in state.clients.items():
        laws.assert_agree(own.pretrained.params, select(model.params, client), "theta*")
        laws.assert_agree(own.params, select(trained.params, client), "the model after round 0")


def test_the_pretrained_model_stays_and_newcomers_get_theirs():
    setup, fed = laws.federation("fccl", cohort_size=2)
    state, later = (laws.simulate(setup, fed, rounds, [[0, 1], [1, 3]]) for rounds in (1, 2))
    assert laws.distance(later.clients[1].pretrained, state.clients[1].pretrained) == 0
    assert laws.distance(later.clients[1].params, state.clients[1].params) > 0
    assert laws.distance(later.clients[3].pretrained.params, fed.initial_model()[0]) > 0
    assert sorted(later.clients) == [0, 1, 3]


def test_conference_objective_has_both_teachers():
    setup, fed, _, clients = with_different_models("fccl", {"distillation_weight": 0.5})
    loss = fccl_plus.make_conference_loss(fed.network, setup.options)
    teachers = fccl_plus.Teachers(*(fccl_plus.Teacher(*clients[client][:2]) for client in (1, 2)))
    batch = minibatch(fed, 5)
    value, _ = loss(clients[0].params, {}, batch, teachers)
    own, previous, pretrained = (fed.network(clients[client].params, {}, batch.x).logits for client in range(3))
    distilled = sum(fccl_plus.kd_loss(own, teacher, 1.0) for teacher in (previous, pretrained))
    torch.testing.assert_close(value, F.cross_entropy(own, batch.y) + 0.5 * distilled)


def test_the_teacher_of_the_code_drops_other_units_than_the_student():
    _, fed = laws.federation("fccl-plus", backbone="mobilenet-v2-dropout-512", data=laws.toy_dataset(size=32))
    (params, buffers), batch, drawn = fed.initial_model(), minibatch(fed, 5), []
    for key in (7, 9):  # of two batches
        keys = {name: torch.tensor(key) for name in buffers if name.endswith(".key")}
        drawn.append({**buffers, **keys})
    student = fed.network(params, drawn[0], batch.x).logits.detach()
    teacher = fccl_plus.Teacher(params, buffers)
    first, second = (fccl_plus.predict_in_training(fed.network, teacher, own, batch) for own in drawn)
    assert laws.distance(first, student) > 1e-3
    assert laws.distance(first, second) > 1e-3


# EWC


def linear(params, buffers, x, mask=None, train=True):
    """Logits W x + b of two classes."""
    features = x.flatten(1)
    return Output(features, features @ params["W"].T + params["b"], buffers)


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
    params, x = {"W": randn(2, 4), "b": randn(2)}, randn(3, 1, 2, 2, seed=1)
    ours = fisher_diagonal(linear, params, {}, x, torch.full((3,), float(label)).double())
    errors = linear(params, {}, x).logits.softmax(1) - torch.eye(2)[label]  # of the logits, for that label
    expected = {"W": (errors[:, :, None] * x.flatten(1)[:, None]).square().mean(0), "b": errors.square().mean(0)}
    torch.testing.assert_close(ours, expected)


def test_fisher_is_of_the_model_in_evaluation_mode():
    _, fed = laws.federation("fedmd", backbone=laws.NORMED)
    params, buffers = fed.initial_model()
    shifted = {name: value + 0.5 for name, value in buffers.items()}
    x, uniform = minibatch(fed, 1).x, torch.tensor([0.3]).double()
    ours, other = (fisher_diagonal(fed.network, params, own, x, uniform) for own in (buffers, shifted))
    assert laws.distance(ours, other) > 0.01  # running statistics matter, and training would not look at them


def test_each_client_has_draws_of_its_own():
    _, fed = laws.federation("fedmd")
    clients = fed.broadcast(*fed.initial_model(), fed.cohort(1))
    fisher = ewc.anchors(clients, fed.cohort(1), fed, minibatch(fed, 5).x).fisher
    assert laws.distance(select(fisher, 0), select(fisher, 1)) > 0


def test_ewcs_objective_is_the_cross_entropy_and_the_weighted_penalty():
    _, fed = laws.federation("fedmd")
    params, buffers = fed.initial_model()
    anchor, batch = Anchor({name: value + 1 for name, value in params.items()}, params), minibatch(fed, 5)
    value, aux = ewc.make_local_loss(fed.network, 0.7)(params, buffers, batch, anchor)
    plain, _ = fedavg.make_local_loss(fed.network)(params, buffers, batch, None)
    torch.testing.assert_close(value, plain + 0.7 * penalty(params, anchor))
    torch.testing.assert_close(aux.terms["ewc"], penalty(params, anchor))
