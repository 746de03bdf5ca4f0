"""FedGen: its generator against a plain module, what the clients are given, and its costs."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedcli.core.batches import Batch, generator
from fedcli.core.clients import Client, Step
from fedcli.errors import UserError
from fedcli.papers.baselines import fedgen
from fedcli.papers.baselines.fedgen import HIDDEN, NOISE, Context, Samples, draw_samples, generate, initial_generator
from fedcli.registry import find_method
from tests import laws
from tests.forms import assert_laws
from tests.reference import load

FEDGEN = find_method("fedgen")
COUNTS = torch.tensor([3, 0, 1])


def example(num_classes=3, dim=5):
    made = initial_generator(num_classes, dim, np.random.default_rng(0))
    made = fedgen.Generator(*({name: value.double() for name, value in tree.items()} for tree in made))
    return made, draw_samples(COUNTS, 4, 6, np.random.default_rng(1))


def plain(made, num_classes=3):
    """The generator as a module."""
    params, buffers = made
    width = len(params["out.bias"])
    module = nn.Sequential(
        nn.Linear(NOISE + num_classes, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, width)
    ).double()
    names = {"0": "hidden", "1": "norm", "3": "out"}
    tensors = {
        f"{layer}.{part}": params[f"{name}.{part}"] for layer, name in names.items() for part in ("weight", "bias")
    }
    statistics = {"1.running_mean": buffers["norm.mean"], "1.running_var": buffers["norm.var"]}
    module.load_state_dict({**tensors, **statistics, "1.num_batches_tracked": torch.tensor(0)})
    return module


def inputs(noise, labels, num_classes=3):
    return torch.cat([noise, F.one_hot(labels, num_classes).double()], 1)


@pytest.mark.parametrize("train", [True, False])
def test_the_generator_is_the_plain_module(train):
    made, (noise, labels) = example()
    module = plain(made).train(train)
    expected = module(inputs(noise[0], labels[0]))
    torch.testing.assert_close(generate(*made, noise[0], labels[0], 3, train=train), expected)
    torch.testing.assert_close(made.buffers["norm.mean"], module[1].running_mean)
    torch.testing.assert_close(made.buffers["norm.var"], module[1].running_var)


def test_its_size_is_that_of_fedsa():
    params = initial_generator(100, 512, np.random.default_rng(0)).params
    assert sum(value.numel() for value in params.values()) == 331_776
    assert params["hidden.weight"].abs().max() <= 132**-0.5
    assert params["out.weight"].abs().max() <= 512**-0.5


def test_noise_is_normal_and_labels_follow_the_class_counts():
    samples = draw_samples(COUNTS, 50, 40, np.random.default_rng(0))
    assert samples.noise.mean().abs() < 0.01
    assert samples.noise.std().item() == pytest.approx(1, abs=0.01)
    shares = torch.bincount(samples.labels.flatten(), minlength=3) / 2000
    torch.testing.assert_close(shares, torch.tensor([0.75, 0.0, 0.25]), atol=0.03, rtol=0)
    assert shares[1] == 0


def test_training_is_plain_adam_on_the_mean_head():
    made, samples = example()
    draw = torch.Generator().manual_seed(0)
    head = {"head.weight": torch.randn(3, 5, generator=draw).double(), "head.bias": torch.randn(3).double()}
    before = {name: value.clone() for name, value in made.params.items()}
    after = fedgen.train_generator(made, head, samples, lr=0.01)
    module = plain(made)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for noise, labels in zip(*samples, strict=True):
        optimizer.zero_grad()
        F.cross_entropy(module(inputs(noise, labels)) @ head["head.weight"].T + head["head.bias"], labels).backward()
        optimizer.step()
    torch.testing.assert_close(after.params["out.weight"], module[3].weight.detach())
    torch.testing.assert_close(after.params["hidden.weight"], module[0].weight.detach())
    torch.testing.assert_close(after.buffers["norm.var"], module[1].running_var)
    assert all(torch.equal(made.params[name], value) for name, value in before.items())
    assert made.buffers["norm.mean"].abs().max() == 0


def test_the_mean_heads_logits_are_the_mean_of_the_heads_logits():
    draw = torch.Generator().manual_seed(0)
    weight, bias, z = (torch.randn(*shape, generator=draw) for shape in ((4, 3, 5), (4, 3), (7, 5)))
    shares = torch.tensor([0.1, 0.2, 0.3, 0.4])
    ensemble = sum(share * F.linear(z, w, b) for share, w, b in zip(shares, weight, bias, strict=True))
    mean = F.linear(z, torch.tensordot(shares, weight, 1), shares @ bias)
    torch.testing.assert_close(mean, ensemble)


def loss_and_grads(weight):
    _, fed = laws.federation(FEDGEN)
    params, buffers = fed.initial_model()
    params = {name: value.requires_grad_() for name, value in params.items()}
    made, samples = example(dim=fed.feature_dim)
    x, y = fed.engine.gather(np.arange(4))
    batch = Batch(x, y, None, torch.tensor(True), torch.tensor(1), torch.tensor(0.1))
    context = Context(made, Samples(samples.noise[2], samples.labels[2]))
    loss, aux = fedgen.make_local_loss(fed.network, fedgen.Config(generator_weight=weight))(
        params, buffers, batch, context
    )
    grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
    features = plain(made).eval()(inputs(*context.samples))
    logits = F.linear(features, params["head.weight"], params["head.bias"])
    expected = F.cross_entropy(fed.network(params, buffers, x).logits, y)
    expected = expected + weight * F.cross_entropy(logits, context.samples.labels)
    return loss, expected, grads, aux


def test_the_local_objective_adds_the_cross_entropy_of_the_head_on_generated_features():
    loss, expected, grads, aux = loss_and_grads(2.0)
    torch.testing.assert_close(loss, expected)
    _, _, without, _ = loss_and_grads(0.0)
    for name, grad in grads.items():
        assert torch.equal(grad, without[name]) != name.startswith("head.")  # the extractor learns nothing of it
    assert set(aux.terms) == {"cross_entropy", "generated"}
    assert aux.outputs.shape == (4, 64)


def test_every_step_of_a_client_has_samples_of_its_own():
    seen = []

    def update(client, batch, context):
        seen.append(context.samples)
        return client, None

    samples = draw_samples(COUNTS, 3, 6, np.random.default_rng(0))
    client = Client({}, {}, {}, memory=torch.tensor(0))
    for _ in range(3):
        client, _ = fedgen.sampling(Step(update, dict)).update(client, None, Context(None, samples))
    for t, (noise, labels) in enumerate(seen):
        assert torch.equal(noise, samples.noise[t])
        assert torch.equal(labels, samples.labels[t])


def test_draws_depend_on_client_and_round_alone():
    _, fed = laws.federation(FEDGEN)
    first = fedgen.client_samples(COUNTS, fed.cohort_of(1, [0, 1, 3]), fed)
    assert first.noise.shape == (3, 2 * 4, 4, NOISE)  # two epochs of the largest client's four batches
    other = fedgen.client_samples(COUNTS, fed.cohort_of(1, [3]), fed)
    assert torch.equal(first.noise[2], other.noise[0])
    assert torch.equal(first.labels[2], other.labels[0])
    later = fedgen.client_samples(COUNTS, fed.cohort_of(2, [3]), fed)
    assert not torch.equal(first.noise[2], first.noise[1])
    assert not torch.equal(later.noise[0], other.noise[0])


def test_the_first_round_is_lg_fedavg_and_later_ones_are_not():
    ours, base = laws.federation(FEDGEN), laws.federation("lg-fedavg")
    first = laws.simulate(*ours, 1)
    laws.assert_agree(first.head, laws.simulate(*base, 1).head, "round 0")
    assert laws.distance(laws.simulate(*ours, 2).head, laws.simulate(*base, 2).head) > 1e-4
    assert first.class_counts.tolist() == torch.bincount(ours[1].engine.labels[:34]).tolist()


def test_clients_are_given_the_trained_generator():
    setup, fed = laws.federation(FEDGEN, lr=1e-12)  # nobody moves, so every step sees the received head
    state = laws.simulate(setup, fed, 1)
    first = setup.method.init(fed, setup.options)
    assert laws.distance(state.generator.params, first.generator.params) > 0.1
    _, terms = setup.method.run_round(state, fed.cohort(1), fed, setup.options)
    for k, steps in enumerate((8, 4, 6, 2)):
        draw = generator(fed.config.seed, 1, k, "generated")
        samples = draw_samples(state.class_counts, 8, 4, draw)
        module, losses = plain(state.generator).eval(), []
        for noise, labels in zip(samples.noise[:steps], samples.labels[:steps], strict=True):
            features = module(inputs(noise, labels))
            logits = F.linear(features, state.head["head.weight"], state.head["head.bias"])
            losses.append(F.cross_entropy(logits, labels).item())
        assert terms["generated"][k].item() == pytest.approx(np.mean(losses), rel=1e-6)
    untrained = state._replace(generator=first.generator)
    _, of_untrained = setup.method.run_round(untrained, fed.cohort(1), fed, setup.options)
    assert 2 * terms["generated"].mean() < of_untrained["generated"].mean()


def test_noise_of_the_codes_form_is_uniform():
    noise, labels = draw_samples(COUNTS, 50, 40, np.random.default_rng(0), uniform=True)
    assert 0 <= noise.min() < 0.001
    assert 0.999 < noise.max() < 1
    assert noise.mean().item() == pytest.approx(0.5, abs=0.01)
    assert torch.equal(labels, draw_samples(COUNTS, 50, 40, np.random.default_rng(0)).labels)


def slow_round(fed, setup, number, kept, head, untrained, counts):
    """One round of the code's form by plain torch: every client, the head, and a generator that nobody trains."""
    run, after, heads = setup.run, {}, []
    for client in range(fed.num_clients):
        network = fed.networks[fed.architecture[client]]
        params, buffers = kept.get(client, fed.initial_model(network))
        module = load(copy.deepcopy(network.module), {**params, **head}, buffers).train()
        optimizer = torch.optim.SGD(module.parameters(), run.lr)
        made = plain(untrained).train()
        plan = fed.plan(fed.cohort_of(number, [client]))
        draw = generator(run.seed, number, client, "generated")
        most = max(len(own) for own in fed.training)
        samples = draw_samples(
            counts, run.local_epochs * -(-most // run.batch_size), run.batch_size, draw, uniform=True
        )
        for t in range(int(plan.steps[0])):
            x, y = fed.engine.gather(plan.index[t, 0, : plan.size[t, 0]])
            noise, labels = samples.noise[t], samples.labels[t]
            loss = F.cross_entropy(module(x)[1], y)
            loss = loss + setup.options.generator_weight * F.cross_entropy(
                module.head(made(inputs(noise, labels))), labels
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        own = {name: value.detach() for name, value in module.named_parameters()}
        after[client] = {name: value for name, value in own.items() if name not in head}, {}
        heads.append({name: own[name] for name in head})
    sizes = [len(own) / sum(map(len, fed.training)) for own in fed.training]
    return after, {name: sum(w * one[name] for w, one in zip(sizes, heads, strict=True)) for name in head}


def test_three_rounds_of_the_codes_form_are_those_of_a_plain_loop():
    run = {"momentum": 0.0, "weight_decay": 0.0, "backbone": "cnn-2x32,cnn-2x64", "data": laws.toy_dataset(size=16)}
    setup, fed = laws.federation(FEDGEN, {"form": "code", "generator_weight": 2.0}, **run)
    state, kept = setup.method.init(fed, setup.options), {}
    head, first = state.head, state.generator
    counts = torch.bincount(torch.cat([fed.engine.labels[torch.as_tensor(own)] for own in fed.training]), minlength=3)
    for number in range(3):
        kept, head = slow_round(fed, setup, number, kept, head, first, counts)
        state, _ = setup.method.run_round(state, fed.cohort(number), fed, setup.options)
        laws.assert_agree(state.head, head, "the head")
        for client, own in kept.items():
            laws.assert_agree(tuple(state.clients[client]), own, f"client {client} in round {number}")
    assert laws.distance(state.generator, first) == 0


def test_labels_of_the_codes_form_come_from_all_clients():
    setup, fed = laws.federation(FEDGEN, {"form": "code"}, cohort_size=1)
    state = setup.method.init(fed, setup.options)
    expected = torch.bincount(fed.engine.labels[:34]).tolist()
    assert state.class_counts.tolist() == expected
    assert laws.simulate(setup, fed, 2).class_counts.tolist() == expected


def test_the_laws_hold_in_the_codes_form():
    assert_laws(FEDGEN, form="code")


def test_class_counts_are_kept_where_nobody_has_an_example():
    previous = torch.tensor([1, 2, 3])
    assert fedgen.sum_counts(torch.tensor([[1, 0, 4], [2, 0, 0]]), previous).tolist() == [3, 0, 4]
    assert fedgen.sum_counts(torch.zeros(2, 3, dtype=torch.int64), previous).tolist() == [1, 2, 3]


def test_costs():
    setup, fed = laws.federation(FEDGEN)
    state = laws.simulate(setup, fed, 1)
    head = 3 * (64 + 1)
    assert fed.sent_down == {"params": 0, "buffers": 0, "other": 4 * head}  # no generator in the first round
    fed.start_round()
    setup.method.run_round(state, fed.cohort(1), fed, setup.options)
    size = sum(value.numel() for value in state.generator.params.values())
    assert fed.sent_down == {"params": 4 * size, "buffers": 4 * 2 * HIDDEN, "other": 4 * head}
    assert fed.sent_up == {"params": 0, "buffers": 0, "other": 4 * head}
    assert setup.method.client_memory(fed.sizes) == fed.sizes.parameters + size


def test_different_networks_need_features_of_one_width():
    data = laws.toy_dataset(size=16)
    setup, fed = laws.federation(FEDGEN, backbone="cnn-2x32,cnn-2x64", data=data, local_epochs=1)
    state = laws.simulate(setup, fed, 2)
    shapes = [len(own.params) for own in state.clients.values()]
    assert shapes == [8, 8, 8, 8]  # without the head
    setup, fed = laws.federation(FEDGEN, backbone="cnn-2x32,cnn-small", data=data)
    with pytest.raises(UserError, match="features of one width"):
        setup.method.init(fed, setup.options)
