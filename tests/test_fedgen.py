"""FedGen: its generator against a plain module, and rounds against a plain loop."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedcli.core.batches import generator
from fedcli.papers.baselines import fedgen
from fedcli.papers.baselines.fedgen import HIDDEN, NOISE, draw_samples, initial_generator
from tests import laws
from tests.reference import train_plainly
from tests.toys import randn

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


def slow_round(fed, setup, number, kept, shared):
    """One round by plain torch: every client, the mean head, and the generator, which the code's form leaves alone."""
    (head, made), run, code, after, heads = shared, setup.run, setup.options.form == "code", {}, []
    counts = torch.bincount(torch.cat([fed.engine.labels[torch.as_tensor(own)] for own in fed.training]), minlength=3)
    weight = setup.options.generator_weight if code or number else 0.0
    for client in range(fed.num_clients):
        params, buffers = kept.get(client, fed.initial_model(fed.networks[fed.architecture[client]]))
        module, draw = plain(made).train(code), generator(run.seed, number, client, "generated")
        most = run.local_epochs * -(-max(len(own) for own in fed.training) // run.batch_size)
        samples = zip(*draw_samples(counts, most, run.batch_size, draw, uniform=code), strict=True)

        def objective(network, features, logits, y, module=module, samples=samples):
            noise, labels = next(samples)
            generated = F.cross_entropy(network.head(module(inputs(noise, labels))), labels)
            return F.cross_entropy(logits, y) + weight * generated

        own = train_plainly(fed, number, client, ({**params, **head}, buffers), objective)
        after[client] = {name: value for name, value in own.items() if name not in head}, {}
        heads.append({name: own[name] for name in head})
    sizes = [len(own) / sum(map(len, fed.training)) for own in fed.training]
    head = {name: sum(w * one[name] for w, one in zip(sizes, heads, strict=True)) for name in head}
    if not code:
        draw = generator(run.seed, number, "generator")
        samples = draw_samples(counts, setup.options.generator_steps, run.batch_size, draw)
        made = fedgen.train_generator(made, head, samples, setup.options.generator_lr)
    return after, (head, made)


@pytest.mark.parametrize("form", ["paper", "code"])
def test_three_rounds_are_those_of_a_plain_loop(form):
    run = {"momentum": 0.0, "weight_decay": 0.0, "backbone": "cnn-2x32,cnn-2x64", "data": laws.toy_dataset(size=16)}
    options = {"form": form, "generator_weight": 2.0, "generator_steps": 5, "generator_lr": 0.01}
    setup, fed = laws.federation("fedgen", options, **run)
    first = setup.method.init(fed, setup.options)
    counts = torch.bincount(fed.engine.labels[:34]).tolist()  # of all clients, in the code's form at once
    assert first.class_counts.tolist() == (counts if form == "code" else [1, 1, 1])
    shared = first.head, first.generator
    state = laws.assert_rounds_agree(setup, fed, slow_round, shared, lambda state: (state.head, state.generator))
    assert state.class_counts.tolist() == counts


def test_class_counts_are_kept_where_nobody_has_an_example():
    previous = torch.tensor([1, 2, 3])
    assert fedgen.sum_counts(torch.tensor([[1, 0, 4], [2, 0, 0]]), previous).tolist() == [3, 0, 4]
    assert fedgen.sum_counts(torch.zeros(2, 3, dtype=torch.int64), previous).tolist() == [1, 2, 3]
