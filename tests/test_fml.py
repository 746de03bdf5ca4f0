"""FML: its objective by hand, two steps that do not touch each other, and what is averaged and sent."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedcli.core.batches import Batch
from fedcli.core.trees import select
from fedcli.papers.baselines import fml
from fedcli.papers.baselines.fml import divergence, joined, part
from fedcli.registry import find_method
from tests import laws
from tests.reference import load, minibatches

FML = find_method("fml")
NORMALISED = {
    "backbone": f"cnn-small,{laws.NORMED}", "local_epochs": 1, "parts": laws.toy_parts((4, 3, 2, 3)),
    "data": laws.toy_dataset(num_train=12, channels=3),
}  # fmt: skip


def test_divergence_by_hand_and_without_padding():
    logits = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]], dtype=torch.float64)
    teacher = torch.tensor([[math.log(3), 0.0], [math.log(3), 0.0]], dtype=torch.float64)
    first = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)  # KL((3/4, 1/4) || (1/2, 1/2))
    assert divergence(logits, teacher).item() == pytest.approx(first / 2)  # the second sample agrees
    assert divergence(logits, teacher, torch.tensor([True, False])).item() == pytest.approx(first)
    other_way = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert divergence(teacher, logits).item() == pytest.approx(other_way / 2)


def test_divergence_against_torch_and_its_gradients():
    draw = torch.Generator().manual_seed(0)
    logits, teacher = (torch.randn(6, 4, dtype=torch.float64, generator=draw).requires_grad_() for _ in range(2))
    expected = F.kl_div(F.log_softmax(logits, 1), F.softmax(teacher, 1), reduction="batchmean")
    torch.testing.assert_close(divergence(logits, teacher), expected)
    (ours,), (theirs,) = (
        torch.autograd.grad(loss, teacher, retain_graph=True) for loss in (divergence(logits, teacher), expected)
    )
    torch.testing.assert_close(ours, theirs)  # the teacher learns too, unless the caller detaches it
    divergence(logits, teacher.detach()).backward()
    torch.testing.assert_close(logits.grad, (F.softmax(logits, 1) - F.softmax(teacher, 1)).detach() / 6)
    assert teacher.grad is None


def losses(config):
    """Our local objective on a batch, and the two losses by the networks as they are."""
    _, fed = laws.federation(FML, backbone="cnn-small,cnn-mcmahan", data=laws.toy_dataset(size=16))
    shared, private = fed.networks
    models = [fed.initial_model(network) for network in (private, shared)]
    params, buffers = (joined(*trees) for trees in zip(*models, strict=True))
    params = {name: value.requires_grad_() for name, value in params.items()}
    x, y = fed.engine.gather(np.arange(6))
    batch = Batch(x, y, None, torch.tensor(True), torch.tensor(1), torch.tensor(0.1))
    loss, aux = fml.make_local_loss(private, shared, config)(params, buffers, batch, None)
    own, meme = (
        network(part(params, prefix), {}, x).logits for network, prefix in ((private, "private."), (shared, "shared."))
    )
    kind = {"reduction": "batchmean"}
    to_own = F.kl_div(F.log_softmax(own, 1), F.softmax(meme, 1).detach(), **kind)
    to_meme = F.kl_div(F.log_softmax(meme, 1), F.softmax(own, 1).detach(), **kind)
    alpha, beta = config.private_task_share, config.shared_task_share
    private_loss = alpha * F.cross_entropy(own, y) + (1 - alpha) * to_own
    shared_loss = beta * F.cross_entropy(meme, y) + (1 - beta) * to_meme
    return params, loss, private_loss, shared_loss, aux


@pytest.mark.parametrize("config", [fml.Config(), fml.Config(0.3, 0.8)])
def test_each_network_follows_its_own_loss(config):
    params, loss, private_loss, shared_loss, aux = losses(config)
    torch.testing.assert_close(loss, private_loss + shared_loss)
    grads = dict(zip(params, torch.autograd.grad(loss, list(params.values()), retain_graph=True), strict=True))
    for expected, prefix in ((private_loss, "private."), (shared_loss, "shared.")):
        names = [name for name in params if name.startswith(prefix)]
        own = torch.autograd.grad(expected, [params[name] for name in names], retain_graph=True)
        for name, grad in zip(names, own, strict=True):
            torch.testing.assert_close(grads[name], grad)
    assert aux.outputs.shape == (6, 512)  # the private network's features
    assert set(aux.terms) == {"cross_entropy", "divergence", "shared_cross_entropy", "shared_divergence"}


CODE = {"form": "code", "private_task_share": 0.3, "shared_task_share": 0.6}
TWO_KINDS = {"backbone": "cnn-small,cnn-mcmahan", "data": laws.toy_dataset(size=16)}


def slow_round(fed, setup, number, models, sent_down):
    """One round of the code's form by plain torch; returns private models, the mean shared one, and clipped steps."""
    run, options, after, sent, cut = setup.run, setup.options, {}, [], 0

    def kl(log_p, target):  # torch's default, the mean over samples and classes
        return F.kl_div(log_p, target, reduction="sum") / target.numel()

    for client in range(fed.num_clients):
        network = fed.networks[fed.architecture[client]]
        own = load(copy.deepcopy(network.module), *models.get(client, fed.initial_model(network))).train()
        shared = load(copy.deepcopy(fed.networks[0].module), sent_down, {}).train()
        optimizers = [torch.optim.SGD(net.parameters(), run.lr) for net in (own, shared)]
        for x, y in minibatches(fed, number, client):
            output, output_g = own(x)[1], shared(x)[1]
            to_own, to_shared = (
                kl(F.log_softmax(a, 1), F.softmax(b, 1)) for a, b in ((output, output_g), (output_g, output))
            )
            loss = F.cross_entropy(output, y) * options.private_task_share + to_own * (1 - options.private_task_share)
            loss_g = F.cross_entropy(output_g, y) * options.shared_task_share
            loss_g = loss_g + to_shared * (1 - options.shared_task_share)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward(retain_graph=True)
            loss_g.backward()
            for net in (own, shared):
                cut += int(torch.nn.utils.clip_grad_norm_(net.parameters(), fml.CLIP_NORM) > fml.CLIP_NORM)
            for optimizer in optimizers:
                optimizer.step()
        after[client] = {name: value.detach() for name, value in own.named_parameters()}, {}
        sent.append({name: value.detach() for name, value in shared.named_parameters()})
    return after, {name: sum(params[name] for params in sent) / len(sent) for name in sent_down}, cut


def test_three_rounds_of_the_codes_form_are_those_of_a_plain_loop(monkeypatch):
    monkeypatch.setattr(fml, "CLIP_NORM", 0.05)  # which is reached
    setup, fed = laws.federation(FML, CODE, **TWO_KINDS, momentum=0.0, weight_decay=0.0, lr=0.2)
    state, models = setup.method.init(fed, setup.options), {}
    shared, cut = state.params, 0
    for number in range(3):
        models, shared, more = slow_round(fed, setup, number, models, shared)
        cut += more
        state, _ = setup.method.run_round(state, fed.cohort(number), fed, setup.options)
        laws.assert_agree(state.params, shared, "the shared network")
        for client, model in models.items():
            laws.assert_agree(tuple(state.clients[client]), model, f"client {client} in round {number}")
    assert cut > 10


def test_shared_networks_with_their_statistics_are_averaged_without_weights():
    setup, fed = laws.federation(FML, **{**NORMALISED, "backbone": f"{laws.NORMED},cnn-small"})
    cohort, start = fed.cohort(0), setup.method.init(fed, setup.options)
    sent = {}
    for group in fed.groups(cohort):
        own = fed.initial_model(group.network)
        received = fed.broadcast(*start[:2], group)
        own = fed.broadcast(*own, group)
        both = type(own)(joined(own.params, received.params), joined(own.buffers, received.buffers), {})
        both, _ = fed.train(both, group, fml.make_local_loss(group.network, fed.networks[0], setup.options))
        for k, client in enumerate(group.client_ids):
            sent[client] = select((part(both.params, "shared."), part(both.buffers, "shared.")), k)
    after, _ = setup.method.run_round(start, cohort, fed, setup.options)
    for i in (0, 1):
        expected = {name: sum(sent[client][i][name] for client in sent) / 4 for name in after[i]}
        laws.assert_agree(after[i], expected, "the shared network")
    assert after.buffers
    assert laws.distance(sent[0][1], sent[1][1]) > 1e-6
