"""FedGen: its generator against a plain module, and what the clients are given."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedcli.core.batches import generator
from fedcli.papers.baselines import fedgen
from fedcli.papers.baselines.fedgen import HIDDEN, NOISE, Context, Samples, draw_samples, generate, initial_generator
from tests import laws
from tests.reference import train_plainly
from tests.toys import minibatch, randn

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
    values = {**params, "norm.running_mean": buffers["norm.mean"], "norm.running_var": buffers["norm.var"]}
    values["norm.num_batches_tracked"] = torch.tensor(0)
    layers = {"hidden": "0", "norm": "1", "out": "3"}
    module.load_state_dict({f"{layers[name.partition('.')[0]]}.{name.partition('.')[2]}": value
                            for name, value in values.items()})  # fmt: skip
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


@pytest.mark.parametrize(("uniform", "mean", "std"), [(False, 0, 1), (True, 0.5, 12**-0.5)])
def test_noise_is_normal_or_uniform_and_labels_follow_the_class_counts(uniform, mean, std):
    noise, labels = draw_samples(COUNTS, 50, 40, np.random.default_rng(0), uniform=uniform)
    assert noise.mean().item() == pytest.approx(mean, abs=0.01)
    assert noise.std().item() == pytest.approx(std, abs=0.01)
    assert (0 <= noise.min() < 0.001 < 0.999 < noise.max() < 1) == uniform
    shares = torch.bincount(labels.flatten(), minlength=3) / 2000
    torch.testing.assert_close(shares, torch.tensor([0.75, 0.0, 0.25]), atol=0.03, rtol=0)
    assert shares[1] == 0


def test_training_is_plain_adam_on_the_mean_head():
    made, samples = example()
    head = {"head.weight": randn(3, 5), "head.bias": randn(3)}
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
    assert laws.distance(made, example()[0]) == 0  # it is left as it was


def test_the_local_objective_adds_the_cross_entropy_of_the_head_on_generated_features():
    _, fed = laws.federation("fedgen")
    params, buffers = fed.initial_model()
    params = {name: value.requires_grad_() for name, value in params.items()}
    made, samples = example(dim=fed.feature_dim)
    context = Context(made, Samples(samples.noise[2], samples.labels[2]))
    batch, local_loss = minibatch(fed, 4), fedgen.make_local_loss(fed.network, fedgen.Config(generator_weight=2.0))
    loss, aux = local_loss(params, buffers, batch, context)
    features = plain(made).eval()(inputs(*context.samples))
    generated = F.cross_entropy(F.linear(features, params["head.weight"], params["head.bias"]), context.samples.labels)
    task = F.cross_entropy(fed.network(params, buffers, batch.x).logits, batch.y)
    torch.testing.assert_close(loss, task + 2 * generated)
    body = [value for name, value in params.items() if not name.startswith("head.")]
    gradients = (torch.autograd.grad(each, body, retain_graph=True) for each in (loss, task))
    for ours, plainly in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plainly)  # the extractor learns nothing of it
    assert aux.outputs.shape == (4, 64)


def test_the_first_round_is_lg_fedavg_and_later_ones_are_not():
    ours, base = laws.federation("fedgen"), laws.federation("lg-fedavg")
    first = laws.simulate(*ours, 1)
    laws.assert_agree(first.head, laws.simulate(*base, 1).head, "round 0")
    assert laws.distance(laws.simulate(*ours, 2).head, laws.simulate(*base, 2).head) > 1e-4
    assert first.class_counts.tolist() == torch.bincount(ours[1].engine.labels[:34]).tolist()


def test_clients_are_given_the_trained_generator():
    setup, fed = laws.federation("fedgen", lr=1e-12)  # nobody moves, so every step sees the received head
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


def slow_round(fed, setup, number, kept, head):
    """One round of the code's form by plain torch: every client, the head, and a generator that nobody trains."""
    run, after, heads, untrained = setup.run, {}, [], setup.method.init(fed, setup.options).generator
    counts = torch.bincount(torch.cat([fed.engine.labels[torch.as_tensor(own)] for own in fed.training]), minlength=3)
    for client in range(fed.num_clients):
        params, buffers = kept.get(client, fed.initial_model(fed.networks[fed.architecture[client]]))
        made, draw = plain(untrained).train(), generator(run.seed, number, client, "generated")
        most = run.local_epochs * -(-max(len(own) for own in fed.training) // run.batch_size)
        samples = zip(*draw_samples(counts, most, run.batch_size, draw, uniform=True), strict=True)

        def objective(module, features, logits, y, made=made, samples=samples):
            noise, labels = next(samples)
            generated = F.cross_entropy(module.head(made(inputs(noise, labels))), labels)
            return F.cross_entropy(logits, y) + setup.options.generator_weight * generated

        own = train_plainly(fed, number, client, ({**params, **head}, buffers), objective)
        after[client] = {name: value for name, value in own.items() if name not in head}, {}
        heads.append({name: own[name] for name in head})
    sizes = [len(own) / sum(map(len, fed.training)) for own in fed.training]
    return after, {name: sum(w * one[name] for w, one in zip(sizes, heads, strict=True)) for name in head}


def test_three_rounds_of_the_codes_form_are_those_of_a_plain_loop():
    run = {"momentum": 0.0, "weight_decay": 0.0, "backbone": "cnn-2x32,cnn-2x64", "data": laws.toy_dataset(size=16)}
    setup, fed = laws.federation("fedgen", {"form": "code", "generator_weight": 2.0}, **run)
    first = setup.method.init(fed, setup.options)
    assert first.class_counts.tolist() == torch.bincount(fed.engine.labels[:34]).tolist()  # of all clients, at once
    state = laws.assert_rounds_agree(setup, fed, slow_round, first.head, lambda state: state.head)
    assert laws.distance(state.generator, first.generator) == 0


def test_class_counts_are_kept_where_nobody_has_an_example():
    previous = torch.tensor([1, 2, 3])
    assert fedgen.sum_counts(torch.tensor([[1, 0, 4], [2, 0, 0]]), previous).tolist() == [3, 0, 4]
    assert fedgen.sum_counts(torch.zeros(2, 3, dtype=torch.int64), previous).tolist() == [1, 2, 3]
