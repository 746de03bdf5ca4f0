"""FCCL+'s equations against slow loops and hand numbers; both phases against a plain loop; costs, FCCL, protocols."""

import dataclasses
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fedcli.core.clients import Client
from fedcli.core.trees import select, stack, tree_map
from fedcli.papers import fccl_plus
from fedcli.papers.baselines import ewc
from fedcli.papers.fccl_plus import (
    ClientState,
    ServerState,
    Teacher,
    Teachers,
    collaborate,
    cross_correlation,
    fccm_loss,
    fisl_loss,
    fntd_loss,
    kd_loss,
    similarity,
)
from fedcli.registry import find_method, find_table
from fedcli.runs.config import resolve
from tests import laws
from tests.reference import exchange_plainly, models_of, modules_of

PLUS, FCCL, LOCAL = find_method("fccl-plus"), find_method("fccl"), find_method("local")
ALONE = {"correlation_weight": 0.0, "similarity_weight": 0.0}  # no exchange


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def softmax(values):
    exps = [math.exp(value) for value in values]
    return [value / sum(exps) for value in exps]


# FCCM


def test_cross_correlation_of_the_clients_classes_with_the_means():
    own, mean = 1000 * randn(6, 3), 2 + 5 * randn(6, 3, seed=1)
    first, second = ((value - value.mean(0)) / (value.var(0).sqrt() + 1e-5) for value in (own, mean))
    torch.testing.assert_close(cross_correlation(own, mean), first.T @ second / 6, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(cross_correlation(own, own).diagonal(), torch.full((3,), 5 / 6).double())


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_column_without_spread_correlates_with_nothing(size):
    own = randn(size, 3).requires_grad_()
    mean = randn(size, 3, seed=1)
    mean[:, 2] = 7.0
    flat = torch.where(torch.arange(3) == 1, 4.0, own)
    correlation = cross_correlation(flat, mean)
    assert (correlation[1] == 0).all()
    assert (correlation[:, 2] == 0).all()
    fccm_loss(correlation, 0.0051).backward()
    assert torch.isfinite(own.grad).all()
    assert (own.grad[:, 1] == 0).all()


def test_fccm_by_hand():
    correlation = torch.tensor([[0.5, 0.25], [-1.0, 1.0]])
    assert fccm_loss(correlation, 0.1).item() == pytest.approx(0.25 + 0.1 * 1.25**2)
    assert fccm_loss(correlation, 0.1, off_diagonal_target=0.0).item() == pytest.approx(0.25 + 0.1 * (0.25**2 + 1))
    assert fccm_loss(2 * torch.eye(3) - 1, 0.0051) == 0  # the target of Fig. 2


# FISL


def test_similarity_is_the_cosine_with_every_other_image():
    features = randn(5, 4)
    cosines = F.cosine_similarity(features[:, None], features, dim=-1)
    others = ~torch.eye(5, dtype=torch.bool)
    torch.testing.assert_close(similarity(features, 0.7), cosines[others].reshape(5, 4) / 0.7)


def test_a_zero_feature_is_like_none_and_has_a_finite_gradient():
    features = torch.where(torch.arange(4)[:, None] == 1, 0.0, randn(4, 3)).requires_grad_()
    found = similarity(features, 0.5)
    assert (found[1] == 0).all()
    fisl_loss(found, similarity(randn(4, 3, seed=1), 0.5)).backward()
    assert torch.isfinite(features.grad).all()


@pytest.mark.parametrize("size", [1, 2])
def test_one_or_two_images_have_nothing_to_align(size):
    own = randn(size, 3).requires_grad_()
    found = similarity(own, 0.02)
    assert found.shape == (size, size - 1)
    loss = fisl_loss(found, similarity(randn(size, 3, seed=1), 0.02))
    loss.backward()
    assert loss == 0
    assert (own.grad == 0).all()


def test_fisl_is_the_divergence_of_the_softmax_of_a_row():
    own, mean = randn(4, 3), randn(4, 3, seed=1)
    expected = F.kl_div(own.log_softmax(1), mean.softmax(1), reduction="batchmean")
    torch.testing.assert_close(fisl_loss(own, mean), expected, rtol=1e-12, atol=0)
    assert torch.autograd.gradcheck(lambda rows: fisl_loss(rows, mean), own.requires_grad_())


# FNTD


def distillation(seed=0):
    labels = torch.tensor([0, 3, 1, 1, 2])
    return 2 * randn(5, 4, seed=seed), 2 * randn(5, 4, seed=seed + 1), labels


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_fntd_against_a_loop(renormalize, temperature):
    student, teacher, labels = distillation()
    rows = []
    for own, known, label in zip(student.tolist(), teacher.tolist(), labels.tolist(), strict=True):
        p, q = (softmax([value / temperature for value in logits]) for logits in (known, own))
        others = [u for u in range(4) if u != label]
        sums = [sum(each[u] for u in others) if renormalize else 1.0 for each in (p, q)]
        rows.append(sum(p[u] / sums[0] * math.log(p[u] / sums[0] / (q[u] / sums[1])) for u in others))
    expected = temperature**2 * sum(rows) / 5
    found = fntd_loss(student, teacher, labels, temperature, renormalize)
    assert found.item() == pytest.approx(expected, rel=1e-12)


def test_without_the_factor_fntd_is_equation_13_as_printed():
    student, teacher, labels = distillation()
    printed = fntd_loss(student, teacher, labels, 3.0, factor="one")
    torch.testing.assert_close(9 * printed, fntd_loss(student, teacher, labels, 3.0))


def test_plain_distillation_is_the_divergence_with_the_factor():
    student, teacher, _ = distillation()
    expected = 9 * F.kl_div((student / 3).log_softmax(1), (teacher / 3).softmax(1), reduction="batchmean")
    torch.testing.assert_close(kd_loss(student, teacher, 3.0), expected)


@pytest.mark.parametrize("renormalize", [False, True])
def test_masked_samples_are_not_distilled(renormalize):
    student, teacher, labels = distillation()
    mask = torch.tensor([True, False, True, True, False])
    kept = fntd_loss(student[mask], teacher[mask], labels[mask], 3.0, renormalize)
    student[1], teacher[4] = torch.nan, torch.nan
    student.requires_grad_()
    found = fntd_loss(student, teacher, labels, 3.0, renormalize, mask)
    torch.testing.assert_close(found, kept)
    found.backward()
    assert torch.isfinite(student.grad[mask]).all()


# The collaborative phase against a plain loop


def started(method, overrides=None, **run):
    """A federation, its clients' different models under its networks, and the whole cohort."""
    setup, fed = laws.federation(method, overrides, **run)
    cohort = fed.cohort(0)
    clients = {}
    for client in range(fed.num_clients):
        params, buffers = fed.initial_model(fed.networks[fed.architecture[client]])
        moved = {name: value + 0.05 * randn(*value.shape, seed=client) for name, value in params.items()}
        clients[client] = ClientState(moved, buffers)
    return setup, fed, cohort, clients


def kept(fed, cohort, clients):
    """The clients' states by network, stacked."""
    return [fed.recall(clients, group, None) for group in fed.groups(cohort)]


@pytest.mark.parametrize(
    ("lifetime", "size", "backbone"), [("batch", 8, f"{laws.NORMED},cnn-small"), ("phase", 16, "cnn-mcmahan,cnn-small")]
)
def test_collaboration_is_the_plain_loop_with_all_targets_before_any_update(lifetime, size, backbone):
    run = {"backbone": backbone, "num_clients": 2, "optimizer": "adam", "lr": 0.003, "parts": laws.toy_parts((5, 4))}
    data = laws.toy_dataset(size=size)
    setup, fed, cohort, clients = started(PLUS, {"public_optimizer": lifetime}, data=data, **run)
    fed.public_images = fed.public_images[:8]  # batches of 5 and 3

    def objective(k, features, logits, everyone):
        z_bar = torch.stack([said for _, said in everyone]).mean(0)
        s_bar = torch.stack([similarity(own, 0.02) for own, _ in everyone]).mean(0)
        correlation = cross_correlation(logits, z_bar)
        return (fccm_loss(correlation, 0.0051) + 3 * fisl_loss(similarity(features, 0.02), s_bar),)

    optimizer, fresh = partial(torch.optim.Adam, lr=0.003), lifetime == "batch"
    expected, _ = exchange_plainly(modules_of(fed, clients), fed.public_batches(0), objective, optimizer, fresh)
    models, terms = collaborate(kept(fed, cohort, clients), cohort, fed, setup.options)
    laws.assert_agree(models_of(fed.groups(cohort), models), expected, "the models")
    assert all(model.optimizer == {} for model in models)
    assert {name: values.shape for name, values in terms.items()} == {"fccm": (2,), "fisl": (2,)}


# Equal networks


def test_average_is_uniform_and_of_buffers_too():
    overrides = {**ALONE, "average_parameters": True}
    run = {"backbone": laws.NORMED, "data": laws.toy_dataset(num_train=34), "parts": laws.toy_parts((7, 5))}
    setup, fed, cohort, clients = started(PLUS, overrides, num_clients=2, **run)
    clients[1] = clients[1]._replace(buffers={name: value + 2.0 for name, value in clients[1].buffers.items()})
    ((model,), _) = collaborate(kept(fed, cohort, clients), cohort, fed, setup.options)
    mean = tree_map(lambda one, other: (one + other) / 2, tuple(clients[0][:2]), tuple(clients[1][:2]))
    for k in (0, 1):
        laws.assert_agree(select((model.params, model.buffers), k), mean, "the mean")


# The local phase


@pytest.mark.parametrize(
    "overrides", [{"teacher": "previous"}, {"teacher": "collaborative"}, {**ALONE, "average_parameters": True}]
)
def test_the_teacher_is_the_model_after_the_previous_local_phase_or_the_collaborative_one(overrides):
    setup, fed, cohort, clients = started(PLUS, overrides, batch_size=20, local_epochs=1)
    previous = kept(fed, cohort, clients)
    ((model,), _) = collaborate(previous, cohort, fed, setup.options)
    _, terms = setup.method.run_round(ServerState(clients), cohort, fed, setup.options)
    for client, part in enumerate(fed.training):
        x, y = fed.engine.gather(part)
        student = fed.network(select(model.params, client), {}, x).logits
        known = select(model.params, client) if "collaborative" in overrides.values() else clients[client].params
        teacher = fed.network(known, {}, x).logits
        assert terms["fntd"][client].item() == pytest.approx(fntd_loss(student, teacher, y, 3.0).item(), rel=1e-9)


def test_in_round_0_the_teacher_is_the_initial_network():
    setup, fed = laws.federation(PLUS, ALONE, batch_size=20, local_epochs=1)
    _, terms = setup.method.run_round(setup.method.init(fed, setup.options), fed.cohort(0), fed, setup.options)
    assert terms["fntd"].abs().max() < 1e-12  # student and teacher are still one


def test_plain_distillation_comes_in_the_first_epochs():
    setup, fed, cohort, clients = started(PLUS, {**ALONE, "plain_share": 0.5})
    after, terms = setup.method.run_round(ServerState(clients), cohort, fed, setup.options)
    (previous,) = kept(fed, cohort, clients)
    model, found = Client(previous.params, previous.buffers, optimizer={}), []
    for epoch, term in enumerate(("kd", "fntd")):
        loss = fccl_plus.make_local_loss(fed.network, setup.options, term)
        teacher = Teacher(previous.params, previous.buffers)
        model, own = fed.train(model, cohort, loss, teacher, 0, range(epoch, epoch + 1))
        found.append(own)
    laws.assert_agree(stack([after.clients[client].params for client in range(4)]), model.params, "parameters")
    torch.testing.assert_close(terms["kd"], found[0]["kd"] / 2)
    torch.testing.assert_close(terms["fntd"], found[1]["fntd"] / 2)
    torch.testing.assert_close(terms["cross_entropy"], (found[0]["cross_entropy"] + found[1]["cross_entropy"]) / 2)


# EWC


def test_with_ewc_a_client_holds_on_to_the_collaborative_phase():
    setup, fed, cohort, clients = started(PLUS, {"regularizer": "ewc", "ewc_weight": 2.0})
    after, _ = setup.method.run_round(ServerState(clients), cohort, fed, setup.options)
    ((model,), _) = collaborate(kept(fed, cohort, clients), cohort, fed, setup.options)
    unseen = next(iter(fed.public_batches(0, epoch=1))).x  # the phase has gone through epoch 0
    anchor = ewc.anchors(model, cohort, fed, unseen)
    expected, _ = fed.train(model, cohort, ewc.make_local_loss(fed.network, 2.0), anchor, 0)
    laws.assert_agree(stack([after.clients[client].params for client in range(4)]), expected.params, "EWC")


# The conference version


def test_rounds_begin_at_the_pretrained_model():
    setup, fed = laws.federation(FCCL, {**ALONE, "distillation_weight": 0.0, "pretrain_epochs": 3})
    cohort = fed.cohort(0)
    state, _ = setup.method.run_round(setup.method.init(fed, setup.options), cohort, fed, setup.options)
    task = LOCAL.module.make_local_loss(fed.network)
    first = Client(*fed.recall({}, cohort, fed.initial_model()), optimizer={})
    pretrained, _ = fed.train(first, cohort, task, epochs=range(2, 5))  # 2 local epochs have the draws 0 and 1
    trained, _ = fed.train(pretrained._replace(optimizer={}), cohort, task)
    for client, own in state.clients.items():
        laws.assert_agree(own.pretrained.params, select(pretrained.params, client), "theta*")
        laws.assert_agree(own.params, select(trained.params, client), "the model after round 0")


def test_pretraining_of_the_code_has_a_cosine_rate_and_no_weight_decay():
    own = {**ALONE, "distillation_weight": 0.0, "pretrain_epochs": 3, "pretraining": "code"}
    setup, fed = laws.federation(FCCL, own, lr=0.05)
    state, _ = setup.method.run_round(setup.method.init(fed, setup.options), fed.cohort(0), fed, setup.options)
    _, plain = laws.federation(FCCL, own, lr=0.05, reference=True)
    model = Client(*plain.recall({}, plain.cohort(0), plain.initial_model()), optimizer={})
    task = LOCAL.module.make_local_loss(plain.network)
    for epoch, share in enumerate((1.0, 0.75, 0.25)):  # (1 + cos(pi e / 3)) / 2
        step = plain.optimizer_step(task, lr=0.05 * share, weight_decay=0.0)
        model, _ = plain.train(model, plain.cohort(0), step, epochs=range(2 + epoch, 3 + epoch))
    for client, own in state.clients.items():
        laws.assert_agree(own.pretrained.params, select(model.params, client), "theta*")


def test_the_pretrained_model_stays_and_newcomers_get_theirs():
    setup, fed = laws.federation(FCCL, cohort_size=2)
    state = laws.simulate(setup, fed, 1, [[0, 1]])
    later, _ = setup.method.run_round(state, fed.cohort_of(1, [1, 3]), fed, setup.options)
    assert laws.distance(later.clients[1].pretrained, state.clients[1].pretrained) == 0
    assert laws.distance(later.clients[1].params, state.clients[1].params) > 0
    assert laws.distance(later.clients[3].pretrained.params, fed.initial_model()[0]) > 0
    assert sorted(later.clients) == [0, 1, 3]


def test_conference_objective_has_both_teachers():
    setup, fed, _, clients = started(FCCL, {"distillation_weight": 0.5})
    loss = fccl_plus.make_conference_loss(fed.network, setup.options)
    teachers = Teachers(*(Teacher(*clients[client][:2]) for client in (1, 2)))
    batch = next(iter(fed.public_batches(0)))._replace(y=torch.tensor([0, 2, 1, 1, 0]))
    value, _ = loss(clients[0].params, {}, batch, teachers)
    own, previous, pretrained = (fed.network(clients[client].params, {}, batch.x).logits for client in range(3))
    expected = F.cross_entropy(own, batch.y) + 0.5 * (kd_loss(own, previous, 1.0) + kd_loss(own, pretrained, 1.0))
    torch.testing.assert_close(value, expected)


def test_the_teacher_of_the_code_drops_other_units_than_the_student():
    _, fed = laws.federation(PLUS, backbone="mobilenet-v2-dropout-512", data=laws.toy_dataset(num_train=34, size=32))
    params, buffers = fed.initial_model()
    batch = next(iter(fed.public_batches(0)))
    drawn = [
        {name: torch.tensor(7 + number) if name.endswith(".key") else value for name, value in buffers.items()}
        for number in (0, 2)  # of two batches
    ]
    student = fed.network(params, drawn[0], batch.x).logits.detach()
    first, second = (fccl_plus.predict_in_training(fed.network, Teacher(params, buffers), own, batch) for own in drawn)
    assert laws.distance(first, student) > 1e-3
    assert laws.distance(first, second) > 1e-3


@pytest.mark.parametrize("mode", ["evaluate", "train"])
def test_a_local_step_of_two_clients_distils_from_the_teacher_in_its_mode(mode):
    run = {"backbone": "resnet10-3x3", "num_clients": 2, "batch_size": 20, "local_epochs": 1, "clients_per_chunk": "2"}
    data, parts = laws.toy_dataset(num_train=34), laws.toy_parts((6, 5))
    setup, fed, cohort, clients = started(PLUS, {**ALONE, "teacher_mode": mode}, data=data, parts=parts, **run)
    previous = {k: own._replace(params=clients[1 - k].params) for k, own in clients.items()}  # another model
    (stacked,) = kept(fed, cohort, previous)
    (own,) = kept(fed, cohort, clients)
    loss = fccl_plus.make_local_loss(fed.network, setup.options, "fntd")
    model = Client(own.params, own.buffers, optimizer={})
    _, terms = fed.train(model, cohort, loss, Teacher(stacked.params, stacked.buffers), 0)
    teachers = [module.train(mode == "train") for module in modules_of(fed, previous)]
    for client, (student, teacher) in enumerate(zip(modules_of(fed, clients), teachers, strict=True)):
        x, y = fed.engine.gather(fed.training[client])
        expected = fntd_loss(student.train()(x)[1], teacher(x)[1].detach(), y, 3.0).item()
        assert terms["fntd"][client].item() == pytest.approx(expected, rel=1e-9)


def test_protocols_of_the_paper_have_the_forms_of_the_code():
    for protocol in fccl_plus.PROTOCOLS[:-1]:  # less the built-in one
        given = {"protocol": protocol.name, "dataset": next(iter(protocol.datasets))}
        assert resolve(PLUS, given, need_data=False).options.teacher_mode == "train"
        fedmd = resolve(find_method("fedmd"), given, need_data=False).options
        assert (fedmd.exchange, fedmd.pretrain_epochs) == ("batch", 40)
        kinds = {own.augmentation for own in protocol.public.values()}
        end = protocol.name.rpartition("-")[2]
        assert kinds == {{"crop": "crop-flip", "strong": "resized-crop-colour"}.get(end, "resized-crop")}
    fields = {own.name: own for method in (PLUS, find_method("fedmd")) for own in dataclasses.fields(method.config)}
    assert fields["teacher_mode"].metadata["before"] == "evaluate"  # of records from before
    assert fields["pretrain_epochs"].metadata["before"] == 0


def test_in_table_15_three_methods_have_the_batch_size_of_the_code():
    sizes = {cell.row: resolve(find_method(cell.method), cell.settings, need_data=False).run.batch_size
             for cell in find_table("fccl:15").cells}  # fmt: skip
    assert {row for row, size in sizes.items() if size == 64} == {
        "FedAvg", "FedProx", "MOON (mu=5, printed tau)", "MOON (mu=1, printed tau)",
    }  # fmt: skip
    assert {size for size in sizes.values() if size != 64} == {128}
