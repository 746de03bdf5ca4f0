"""FML: its objective by hand, two steps that do not touch each other, and what is averaged and sent."""

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
from tests.reference import train_pair

FML = find_method("fml")
NORMALISED = {
    "backbone": f"cnn-small,{laws.NORMED}", "local_epochs": 1, "parts": laws.toy_parts((4, 3, 2, 3)),
    "data": laws.toy_dataset(num_train=12, channels=3),
}  # fmt: skip


def test_divergence_is_torchs_without_padding_and_its_teacher_learns_too():
    logits, teacher = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    teacher.requires_grad_()
    mask = torch.tensor([True, True, False, True, True, False])
    expected = F.kl_div(F.log_softmax(logits[mask], 1), F.softmax(teacher[mask], 1), reduction="batchmean")
    found = divergence(logits, teacher, mask)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, teacher)[0] for loss in (found, expected)))


def one_batch(method, **more):
    """A client's two networks with their parameters under one roof, a batch, and what both give for it."""
    _, fed = laws.federation(method, **TWO_KINDS)
    shared, private = fed.networks
    params, _ = (joined(*trees) for trees in zip(*map(fed.initial_model, (private, shared)), strict=True))
    params |= {name: make(private, shared, fed) for name, make in more.items()}
    params = {name: value.requires_grad_() for name, value in params.items()}
    x, y = fed.engine.gather(np.arange(6))
    batch = Batch(x, y, None, torch.tensor(True), torch.tensor(1), torch.tensor(0.1))
    pair = ((private, fml.PRIVATE), (shared, fml.SHARED))
    return (private, shared), params, batch, *(net(part(params, prefix), {}, x) for net, prefix in pair)


def assert_gradients(params, loss, expected):
    """A loss has the gradients of another one, by the prefix of the parameters."""
    for prefix, other in expected.items():
        names = [name for name in params if name.startswith(prefix)]
        tensors = [params[name] for name in names]
        grads = (torch.autograd.grad(each, tensors, retain_graph=True) for each in (loss, other))
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("config", [fml.Config(), fml.Config(0.3, 0.8)])
def test_each_network_follows_its_own_loss(config):
    networks, params, batch, own, meme = one_batch(FML)
    loss, aux = fml.make_local_loss(*networks, config)(params, {}, batch, None)
    alpha, beta = config.private_task_share, config.shared_task_share
    to_own, to_meme = divergence(own.logits, meme.logits.detach()), divergence(meme.logits, own.logits.detach())
    private_loss = alpha * F.cross_entropy(own.logits, batch.y) + (1 - alpha) * to_own
    shared_loss = beta * F.cross_entropy(meme.logits, batch.y) + (1 - beta) * to_meme
    torch.testing.assert_close(loss, private_loss + shared_loss)
    assert_gradients(params, loss, {fml.PRIVATE: private_loss, fml.SHARED: shared_loss})
    assert aux.outputs.shape == (6, 512)  # the private network's features


CODE = {"form": "code", "private_task_share": 0.3, "shared_task_share": 0.6}
TWO_KINDS = {"backbone": "cnn-small,cnn-mcmahan", "data": laws.toy_dataset(size=16)}


def slow_round(fed, setup, number, models, sent_down):
    """One round of the code's form by plain torch; returns private models, the mean shared one, and clipped steps."""
    alpha, beta, after, sent, cut = setup.options.private_task_share, setup.options.shared_task_share, {}, [], 0

    def losses(own, shared, y):
        (_, output), (_, output_g) = own, shared  # 3 classes: the code's divergence is a mean over them too
        yield F.cross_entropy(output, y) * alpha + divergence(output, output_g) / 3 * (1 - alpha)
        yield F.cross_entropy(output_g, y) * beta + divergence(output_g, output) / 3 * (1 - beta)

    for client in range(fed.num_clients):
        own = models.get(client, fed.initial_model(fed.networks[fed.architecture[client]]))
        pair = [own, (sent_down, {})]
        (params, shared), more = train_pair(fed, number, client, pair, [], losses, fml.CLIP_NORM)
        after[client], cut = (params, {}), cut + more
        sent.append(shared)
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
