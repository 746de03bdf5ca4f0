"""FedCM, FedSAM and MoFedSAM: a momentum that the server sends, and two gradients a step, against plain loops."""

import pytest
import torch
import torch.nn.functional as F

from fedcli.papers.baselines import fedsam
from fedcli.papers.baselines.fedcm import mean_direction
from tests import laws, toys
from tests.reference import copied, minibatches, modules_of

COHORTS = ([0, 1, 3], [1, 2, 3], [0, 2, 3])
SIZES = (3, 13, 8, 4)  # with batches of 4 and --drop-last the first has no step, the others 3, 2 and 1 an epoch


def gradients(module, x, y):
    """The gradients of the cross-entropy, by autograd."""
    module.zero_grad()
    F.cross_entropy(module(x)[1], y).backward()
    return [parameter.grad.clone() for parameter in module.parameters()]


def climbed_gradients(module, x, y, rho):
    """The gradients at w + rho g / |g|, with the running statistics of the pass at w."""
    grads = gradients(module, x, y)
    statistics = copied(dict(module.named_buffers()))
    length = torch.cat([g.flatten() for g in grads]).norm()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with torch.no_grad():
        for parameter, g in zip(module.parameters(), grads, strict=True):
            parameter += rho / length * g
    grads = gradients(module, x, y)
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), before, strict=True):
            parameter.copy_(value)
        for name, value in module.named_buffers():
            value.copy_(statistics[name])
    return grads


def train_slowly(fed, number, client, model, direction, alpha, rho):
    """A client's model after a round of torch.optim with the mixed gradient, and its steps."""
    (module,) = modules_of(fed, {client: model})
    run = fed.config
    steps = 0
    optimizer = torch.optim.SGD(module.parameters(), fed.lr(number), run.momentum, weight_decay=run.weight_decay)
    for x, y in minibatches(fed, number, client):
        grads = climbed_gradients(module, x, y, rho) if rho else gradients(module, x, y)
        for (name, parameter), g in zip(module.named_parameters(), grads, strict=True):
            parameter.grad = alpha * g + (1 - alpha) * direction[name]
        optimizer.step()
        steps += 1
    return copied(dict(module.named_parameters())), copied(dict(module.named_buffers())), steps


def rounds_by_a_slow_loop(fed, alpha, rho, server_lr):
    """Model, statistics and direction after three rounds."""
    x, buffers = fed.initial_model()
    direction = {name: torch.zeros_like(value) for name, value in x.items()}
    for number, members in enumerate(COHORTS):
        ends = [train_slowly(fed, number, client, (x, buffers), direction, alpha, rho) for client in members]
        total = sum(SIZES[client] for client in members)
        shares = [SIZES[client] / total for client in members]
        length = fed.lr(number) / (1 - fed.config.momentum)
        moved = {name: torch.zeros_like(value) for name, value in x.items()}
        direction = {name: torch.zeros_like(value) for name, value in x.items()}
        for p, (end, _, steps) in zip(shares, ends, strict=True):
            for name in x:
                moved[name] += p * (end[name] - x[name])
                if steps:
                    direction[name] += p * (x[name] - end[name]) / (steps * length)
        x = {name: x[name] + server_lr * moved[name] for name in x}
        buffers = {name: sum(p * own[name] for p, (_, own, _) in zip(shares, ends, strict=True)) for name in buffers}
    return x, buffers, direction


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    ("method", "options", "alpha", "rho", "server_lr"),
    [
        ("fedcm", {"gradient_share": 0.3, "server_lr": 0.5}, 0.3, 0, 0.5),
        ("fedsam", {"perturbation": 0.2}, 1, 0.2, 1),
        ("mofedsam", {"gradient_share": 0.3, "perturbation": 0.2, "server_lr": 0.5}, 0.3, 0.2, 0.5),
    ],
)
def test_three_rounds_are_those_of_a_slow_loop(method, options, alpha, rho, server_lr, momentum):
    run = {
        "parts": laws.toy_parts(SIZES), "drop_last": True, "cohort_size": 3, "lr_decay": 0.5, "momentum": momentum,
        "backbone": laws.NORMED,
    }  # fmt: skip
    state = laws.simulate(*laws.federation(method, options, **run), 3, COHORTS)
    _, fed = laws.federation("fedavg", **run)
    params, buffers, direction = rounds_by_a_slow_loop(fed, alpha, rho, server_lr)
    laws.assert_agree((state.params, state.buffers), (params, buffers), "the model and its statistics")

    if hasattr(state, "direction"):
        laws.assert_agree(state.direction, direction, "the direction")


def test_the_direction_points_against_the_change_and_leaves_out_who_took_no_step():
    x = {"w": torch.tensor([1.0])}
    local = {"w": torch.tensor([[0.0], [5.0], [3.0]])}
    direction = mean_direction(x, local, torch.tensor([2.0, 4.0, 0.0]), 0.5, torch.tensor([0.5, 0.25, 0.25]))
    assert direction["w"].tolist() == [0.5 * 1 / 1 + 0.25 * -4 / 2]


def test_the_climb_has_one_length_over_all_parameters():
    w, g = ({"a": torch.tensor(a), "b": torch.tensor(b)} for a, b in (([1.0, 1.0], [2.0]), ([3.0, 0.0], [4.0])))
    climbed = fedsam.climb(w, g, 10.0)
    assert [climbed[name].tolist() for name in "ab"] == [[7.0, 1.0], [10.0]]


def test_without_a_gradient_there_is_no_climb():
    w = {"a": torch.tensor([1.0, 1.0])}
    assert torch.equal(fedsam.climb(w, {"a": torch.zeros(2)}, 10.0)["a"], w["a"])


@pytest.mark.parametrize("chunk", ["1", "4", "branches:4"])
def test_both_passes_of_a_step_have_the_same_dropout(monkeypatch, chunk):
    toys.use_tiny_network(monkeypatch)
    setup, fed = laws.federation("fedsam", {"perturbation": 1e-9}, clients_per_chunk=chunk, local_epochs=1)
    cohort = fed.cohort(0)
    _, terms = setup.method.run_round(setup.method.init(fed, setup.options), cohort, fed, setup.options)
    torch.testing.assert_close(terms["climbed"], terms["cross_entropy"], rtol=0, atol=1e-7)


def test_without_the_servers_momentum_mofedsam_is_fedsam():
    ours = laws.simulate(*laws.federation("mofedsam", {"gradient_share": 1.0}), 3)
    theirs = laws.simulate(*laws.federation("fedsam"), 3)
    laws.assert_agree(ours.params, theirs.params, "the model")
