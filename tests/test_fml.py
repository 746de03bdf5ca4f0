"""FML: its objective by hand, two steps that do not touch each other, and what is averaged and sent."""

import torch
import torch.nn.functional as F

from fedcli.core.clients import Client
from fedcli.core.trees import tree_map
from fedcli.papers.baselines import fml
from fedcli.papers.baselines.fml import divergence, joined, part
from tests import laws
from tests.reference import train_pair
from tests.toys import TWO_NETWORKS, minibatch, randn


def test_divergence_is_torchs_and_its_teacher_learns_too():
    logits, teacher = randn(2, 6, 4)
    teacher.requires_grad_()
    expected = F.kl_div(F.log_softmax(logits, 1), F.softmax(teacher, 1), reduction="batchmean")
    ours = divergence(logits, teacher)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, teacher)[0] for loss in (ours, expected)))


def one_batch(method, **more):
    """A client's two networks with their parameters under one roof, a batch, and what both give for it."""
    _, fed = laws.federation(method, **TWO_NETWORKS)
    shared, private = fed.networks
    params, _ = (joined(*trees) for trees in zip(*map(fed.initial_model, (private, shared)), strict=True))
    params |= {name: make(private, shared, fed) for name, make in more.items()}
    params = {name: value.requires_grad_() for name, value in params.items()}
    batch, pair = minibatch(fed, 6), ((private, fml.PRIVATE), (shared, fml.SHARED))
    return (private, shared), params, batch, *(net(part(params, prefix), {}, batch.x) for net, prefix in pair)


def assert_gradients(params, loss, expected):
    """A loss has the gradients of another one, by the prefix of the parameters."""
    for prefix, other in expected.items():
        names = [name for name in params if name.startswith(prefix)]
        tensors = [params[name] for name in names]
        grads = (torch.autograd.grad(each, tensors, retain_graph=True) for each in (loss, other))
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_each_network_follows_its_own_loss():
    networks, params, batch, own, meme = one_batch("fml")
    loss, aux = fml.make_local_loss(*networks, fml.Config(0.3, 0.8))(params, {}, batch, None)
    to_own, to_meme = divergence(own.logits, meme.logits.detach()), divergence(meme.logits, own.logits.detach())
    private_loss = 0.3 * F.cross_entropy(own.logits, batch.y) + 0.7 * to_own
    shared_loss = 0.8 * F.cross_entropy(meme.logits, batch.y) + 0.2 * to_meme
    torch.testing.assert_close(loss, private_loss + shared_loss)
    assert_gradients(params, loss, {fml.PRIVATE: private_loss, fml.SHARED: shared_loss})
    assert aux.outputs.shape == (6, 512)  # the private network's features


def test_three_rounds_of_the_codes_form_are_those_of_a_plain_loop(monkeypatch):
    monkeypatch.setattr(fml, "CLIP_NORM", 0.05)  # which is reached
    options = {"form": "code", "private_task_share": 0.3, "shared_task_share": 0.6}
    setup, fed = laws.federation("fml", options, **TWO_NETWORKS, momentum=0.0, weight_decay=0.0, lr=0.2)
    cut = []

    def losses(own, shared, y):
        (_, output), (_, output_g) = own, shared  # 3 classes: the code's divergence is a mean over them too
        yield F.cross_entropy(output, y) * 0.3 + divergence(output, output_g) / 3 * 0.7
        yield F.cross_entropy(output_g, y) * 0.6 + divergence(output_g, output) / 3 * 0.4

    def slow_round(fed, setup, number, models, received):
        after, sent = {}, []
        for client in range(fed.num_clients):
            own = models.get(client, fed.initial_model(fed.networks[fed.architecture[client]]))
            pair = [own, (received, {})]
            (params, shared), more = train_pair(fed, number, client, pair, [], losses, fml.CLIP_NORM)
            after[client] = params, {}
            sent.append(shared)
            cut.append(more)
        return after, {name: sum(params[name] for params in sent) / len(sent) for name in received}

    shared = setup.method.init(fed, setup.options).params
    laws.assert_rounds_agree(setup, fed, slow_round, shared, lambda state: state.params)
    assert sum(cut) > 10


def test_shared_networks_with_their_statistics_are_averaged_without_weights():
    setup, fed = laws.federation("fml", backbone=f"{laws.NORMED},cnn-small", local_epochs=1)
    cohort, start = fed.cohort(0), setup.method.init(fed, setup.options)
    sent = []
    for group in fed.groups(cohort):
        models = (fed.broadcast(*fed.initial_model(group.network), group), fed.broadcast(*start[:2], group))
        both = Client(joined(*(own.params for own in models)), joined(*(own.buffers for own in models)), {})
        both, _ = fed.train(both, group, fml.make_local_loss(group.network, fed.networks[0], setup.options))
        sent.append((part(both.params, fml.SHARED), part(both.buffers, fml.SHARED)))
    after, _ = setup.method.run_round(start, cohort, fed, setup.options)
    mean = tree_map(lambda first, second: torch.cat([first, second]).mean(0), *sent)
    laws.assert_agree((after.params, after.buffers), mean, "the shared network")
    assert after.buffers
