"""Methods with personal models, against plain loops: three rounds of some clients, of a network with BatchNorm.

In a loop all share one whole model and each client has tensors of its own beside it, by name.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import fedcli
from fedcli import toy
from fedcli.core import evaluation
from fedcli.data import datasets
from fedcli.papers.baselines import apfl, fedrod, pfedme
from fedcli.registry import find_method, methods
from fedcli.results.tables import build_table
from fedcli.runs.exports import export
from fedcli.runs.options import flags_of
from fedcli.runs.resolve import resolve
from tests import laws
from tests.accuracies import accuracy
from tests.commands import output_of
from tests.network_sources import ONE_LAYER_NETWORK
from tests.plain_loops import Model, copy_tensors, minibatches, model_of, modules_of, sgd_of, train_plainly
from tests.tensors import randn
from tests.user_errors import raises_user_error

SIZES = (12, 4, 8, 6)
COHORTS = ([0, 1, 3], [1, 2, 3], [0, 2])  # somebody is new in the second and third, and somebody sits out
HEAD = {"head.weight", "head.bias"}
NORM = {f"body.0.1.{leaf}" for leaf in ("weight", "bias", "running_mean", "running_var")}


def module_of(fed, model):
    """A plain module with these parameters and buffers."""
    (module,) = modules_of(fed, {0: model})
    return module


def first_model(fed):
    """The model from which the server and every client begin."""
    return Model(*fed.initial_model())


def with_tensors(model, tensors):
    """A model with some tensors replaced by name."""
    params = {name: tensors.get(name, value) for name, value in model.params.items()}
    buffers = {name: tensors.get(name, value) for name, value in model.buffers.items()}
    return Model(params, buffers)


def tensors_of(model, names):
    """The tensors of a model that have these names."""
    tensors = {**model.params, **model.buffers}
    return {name: tensors[name] for name in tensors if name in names}


def weighted_sum(trees, weights):
    """The sum of tensors by name, each of the trees times its weight."""
    total = {}
    for tree, weight in zip(trees, weights, strict=True):
        for name, value in tree.items():
            total[name] = total.get(name, 0) + weight * value
    return total


def mean_of(models, clients):
    """The mean of the clients' models, weighted by examples."""
    total = sum(SIZES[client] for client in clients)
    shares = [SIZES[client] / total for client in clients]
    params = weighted_sum([model.params for model in models], shares)
    buffers = weighted_sum([model.buffers for model in models], shares)
    return Model(params, buffers)


def squared_distance(module, point):
    """The squared distance of a module's parameters to a point."""
    return sum((value - point[name]).square().sum() for name, value in module.named_parameters())


# One round of each method, from what all share and the clients' states; `uploads` are the models that clients send.


class AfterRound(NamedTuple):
    """What a round of a plain loop comes to."""

    shared: Model
    states: dict[int, Any]  # that clients keep
    personal: dict[int, Model]


def round_with_own_tensors(names):
    """The round of a method whose clients keep the tensors of these names."""

    def plain_round(fed, options, round, clients, shared, states):
        uploads = []
        for client in clients:
            own_part = states.get(client, tensors_of(first_model(fed), names))
            trained = train_plainly(fed, round, client, with_tensors(shared, own_part))
            states[client] = tensors_of(trained, names)
            uploads.append(trained)
        shared = mean_of(uploads, clients)
        personal = {client: with_tensors(shared, own_part) for client, own_part in states.items()}
        return AfterRound(shared, states, personal)

    return plain_round


def fedrep_round(fed, options, round, clients, shared, states):
    body = shared.params.keys() - HEAD
    head_epochs = range(fed.local_epochs, fed.local_epochs + options.head_epochs)
    uploads = []
    for client in clients:
        head = states.get(client, tensors_of(first_model(fed), HEAD))
        with_new_head = train_plainly(fed, round, client, with_tensors(shared, head), names=HEAD, epochs=head_epochs)
        states[client] = tensors_of(with_new_head, HEAD)
        uploads.append(train_plainly(fed, round, client, with_tensors(shared, states[client]), names=body))
    shared = mean_of(uploads, clients)
    personal = {client: with_tensors(shared, head) for client, head in states.items()}
    return AfterRound(shared, states, personal)


def fedbabu_round(fed, options, round, clients, shared, states):
    body = shared.params.keys() - HEAD
    shared = mean_of([train_plainly(fed, round, client, shared, names=body) for client in clients], clients)
    tuning_epochs = range(fed.local_epochs, fed.local_epochs + options.tuning_epochs)
    tuned = {client: train_plainly(fed, round, client, shared, epochs=tuning_epochs) for client in range(len(SIZES))}
    return AfterRound(shared, states, tuned)


def ditto_round(fed, options, round, clients, shared, states):
    def objective(module, features, logits, y):
        return F.cross_entropy(logits, y) + options.proximal_weight / 2 * squared_distance(module, shared.params)

    uploads = []
    for client in clients:
        states[client] = train_plainly(fed, round, client, states.get(client, first_model(fed)), objective)
        uploads.append(train_plainly(fed, round, client, shared))
    return AfterRound(mean_of(uploads, clients), states, states)


def mixed(v, w, alpha):
    """The mixture of two trees of parameters: alpha v + (1 - alpha) w."""
    return {name: alpha * v[name] + (1 - alpha) * w[name] for name in v}


class ApflClient(NamedTuple):
    """What a client of APFL keeps: its own model and by how much it counts."""

    model: Model
    alpha: float


def apfl_round(fed, options, round, clients, shared, states):
    uploads = []
    for client in clients:
        own_model, alpha = states.get(client, ApflClient(first_model(fed), options.mixing))
        v = module_of(fed, own_model)
        w = module_of(fed, shared)
        mixture = module_of(fed, own_model)  # called at the mixed parameters, it updates its buffers in place
        v_optimizer = sgd_of(fed, v.parameters())
        w_optimizer = sgd_of(fed, w.parameters())
        for step, (x, y) in enumerate(minibatches(fed, round, client)):
            point = mixed(dict(v.named_parameters()), dict(w.named_parameters()), alpha)
            point = {name: value.detach().requires_grad_() for name, value in point.items()}
            _, mixed_logits = functional_call(mixture, point, (x,))
            grads = torch.autograd.grad(F.cross_entropy(mixed_logits, y), list(point.values()))

            _, w_logits = w(x)
            w_optimizer.zero_grad()
            F.cross_entropy(w_logits, y).backward()

            slope = 0.0  # of the mixture's loss in alpha
            for v_value, w_value, grad in zip(v.parameters(), w.parameters(), grads, strict=True):
                slope += ((v_value - w_value) * grad).sum().item()
                v_value.grad = alpha * grad
            v_optimizer.step()
            w_optimizer.step()
            if options.adaptive and step == 0:
                alpha = min(max(alpha - fed.config.lr * slope, 0.0), 1.0)
        new_model = Model(model_of(v).params, model_of(mixture).buffers)
        states[client] = ApflClient(new_model, alpha)
        uploads.append(model_of(w))
    shared = mean_of(uploads, clients)
    personal = {}
    for client, (model, alpha) in states.items():
        personal[client] = Model(mixed(model.params, shared.params, alpha), model.buffers)
    return AfterRound(shared, states, personal)


def pfedme_round(fed, options, round, clients, shared, states):
    uploads = []
    for client in clients:
        theta = module_of(fed, shared)
        optimizer = sgd_of(fed, theta.parameters())
        local = copy_tensors(shared.params)
        for x, y in minibatches(fed, round, client):
            for _ in range(options.personal_steps):
                _, logits = theta(x)
                term = options.proximal_weight / 2 * squared_distance(theta, local)
                optimizer.zero_grad()
                (F.cross_entropy(logits, y) + term).backward()
                optimizer.step()
            with torch.no_grad():
                for name, value in theta.named_parameters():
                    local[name] -= options.outer_lr * options.proximal_weight * (local[name] - value)
        states[client] = model_of(theta)
        uploads.append(Model(local, states[client].buffers))
    mean = mean_of(uploads, clients)
    beta = options.server_mixing
    params = {name: (1 - beta) * shared.params[name] + beta * value for name, value in mean.params.items()}
    return AfterRound(Model(params, mean.buffers), states, states)


def fedrod_round(fed, options, round, clients, shared, states):
    first_params = first_model(fed).params
    first_head = {"weight": first_params["head.weight"], "bias": first_params["head.bias"]}
    uploads = []
    for client in clients:
        module = module_of(fed, shared)
        head = nn.Linear(module.feature_dim, fed.num_classes, dtype=fed.dtype)
        head.load_state_dict(states.get(client, first_head))
        labels = fed.engine.labels[fed.training[client]].tolist()
        counts = torch.tensor([labels.count(label) for label in range(fed.num_classes)], dtype=fed.dtype)
        optimizer = sgd_of(fed, [*module.parameters(), *head.parameters()])
        for x, y in minibatches(fed, round, client):
            features, logits = module(x)
            balanced = counts**options.prior_exponent * logits.exp()
            generic = -(balanced[range(len(y)), y] / balanced.sum(1)).log().mean()
            personal = F.cross_entropy(logits.detach() + head(features.detach()), y)
            optimizer.zero_grad()
            (generic + personal).backward()
            optimizer.step()
        states[client] = copy_tensors(head.state_dict())
        uploads.append(model_of(module))
    shared = mean_of(uploads, clients)
    personal = {}
    for client, head in states.items():
        summed = {f"head.{key}": shared.params[f"head.{key}"] + value for key, value in head.items()}
        personal[client] = with_tensors(shared, summed)
    return AfterRound(shared, states, personal)


class PlainCase(NamedTuple):
    """A method, its plain loop and its options."""

    method: str
    plain_round: Callable
    options: dict[str, Any]


PFEDME = {"personal_steps": 3, "proximal_weight": 2.0, "outer_lr": 0.2, "server_mixing": 0.6}
CASES = {
    "fedper": PlainCase("fedper", round_with_own_tensors(HEAD), {}),
    "fedbn": PlainCase("fedbn", round_with_own_tensors(NORM), {}),
    "fedrep": PlainCase("fedrep", fedrep_round, {"head_epochs": 3}),
    "fedbabu": PlainCase("fedbabu", fedbabu_round, {"tuning_epochs": 3}),
    "ditto": PlainCase("ditto", ditto_round, {"proximal_weight": 0.7}),
    "apfl": PlainCase("apfl", apfl_round, {"mixing": 0.3}),
    "apfl adaptive": PlainCase("apfl", apfl_round, {"mixing": 0.4, "adaptive": True}),
    "pfedme": PlainCase("pfedme", pfedme_round, PFEDME),
    "fedrod": PlainCase("fedrod", fedrod_round, {"prior_exponent": 0.7}),
}


@pytest.mark.parametrize("case", CASES)
def test_three_rounds_are_those_of_a_plain_loop(case):
    name, plain_round, options = CASES[case]
    parts = toy.toy_parts(SIZES)
    setup, fed = toy.federation(name, options, parts=parts, backbone=toy.BATCHNORM, cohort_size=3)
    method = setup.method
    shared = first_model(fed)
    states = {}
    for round, clients in enumerate(COHORTS):
        shared, states, expected = plain_round(fed, setup.method_config, round, clients, shared, states)

        state = toy.simulate(setup, fed, round + 1, COHORTS)
        personal = method.personal(state)

        assert set(personal) == set(expected)
        for client, model in expected.items():
            laws.assert_agree(in_order(personal[client]), in_order(model), f"client {client} after round {round}")
        if method.shared is not None:
            laws.assert_agree(in_order(method.shared(state)), in_order(shared), f"the model after round {round}")


def in_order(model):
    """A model with its tensors by name, in alphabetical order."""
    params, buffers = model
    return dict(sorted(params.items())), dict(sorted(buffers.items()))


# What a plain loop on these images does not reach


def test_an_adaptive_share_moves_in_the_first_step_of_a_round():
    """The share stays between 0 and 1."""
    alpha = torch.full((4,), 0.5)
    stepped = torch.tensor([-0.2, 0.3, 1.2, 1.2])
    is_first = torch.tensor([True, True, True, False])
    assert apfl.next_alpha(alpha, stepped, is_first).tolist() == pytest.approx([0.0, 0.3, 1.0, 0.5])


def test_the_balanced_risk_leaves_out_a_class_that_the_client_has_not():
    logits = randn(5, 4)
    labels = torch.tensor([0, 2, 3, 3, 0])
    counts = torch.tensor([3.0, 0.0, 1.0, 8.0], dtype=torch.float64)
    prior = fedrod.log_prior(counts, 2.0)
    weights = counts**2 * logits.exp()
    expected = -(weights[range(5), labels] / weights.sum(1)).log().mean()
    torch.testing.assert_close(fedrod.balanced_risk(logits, labels, prior), expected)
    assert fedrod.log_prior(counts, 0.0).tolist() == [0, 0, 0, 0]


def test_pfedmes_local_and_global_steps_by_hand():
    w = {"a": torch.tensor(4.0)}
    theta = {"a": torch.tensor(1.0)}
    assert pfedme.update_local(w, theta, 0.5)["a"].item() == 2.5
    assert pfedme.mix(w, theta, 2.0)["a"].item() == -2.0


def test_fedbn_without_batchnorm_is_fedavg():
    run_options = {"parts": toy.toy_parts(SIZES), "cohort_size": 3}
    setup, fed = toy.federation("fedbn", **run_options)
    state = toy.simulate(setup, fed, 3, COHORTS)
    average = laws.state_after_rounds(3, "fedavg", cohorts=COHORTS, **run_options)
    for client, (params, _) in setup.method.personal(state).items():
        laws.assert_agree(params, average.params, f"client {client}")


@pytest.mark.parametrize(
    ("method", "network", "count"),
    [
        ("fedbn", "cnn-small", 1),
        ("fedbn", toy.BATCHNORM, 0),
        ("lg-fedavg", "./nets.py:tiny", 1),
        ("fedper", toy.BATCHNORM, 0),
    ],
)
def test_a_run_says_once_that_nothing_stays_with_a_client(method, network, count, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(ONE_LAYER_NETWORK)
    setup, fed = toy.federation(method, parts=toy.toy_parts(SIZES), backbone=network, cohort_size=3)
    toy.simulate(setup, fed, 3, COHORTS)
    notes = [note for note in fed.engine.notes if note.startswith("nothing stays with a client")]
    assert len(notes) == count


def test_fedbabu_tunes_only_for_a_test_and_sends_nothing_for_it():
    setup, fed = toy.federation("fedbabu", eval_every=2, rounds=3)
    state = laws.initial_state(setup, fed)
    tuned = []
    for round in range(3):
        fed.start_round()
        state, _ = laws.method_round(setup, fed, state, fed.cohort(round))
        tuned.append(sorted(state.tuned))
        assert fed.traffic.down["params"] == 4 * sum(value.numel() for value in state.params.values())
    assert tuned == [[], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_a_global_model_beside_personal_ones_is_tested_as_if_it_stood_alone():
    setup, fed = toy.federation("ditto", cohort_size=2, validation=0.2)
    state = toy.simulate(setup, fed, 1)
    result = evaluation.evaluate(fed, setup.method, state)
    alone = evaluation.evaluate(fed, find_method("fedavg"), state)
    personal = evaluation.evaluate(fed, find_method("local"), state)
    assert result == {**personal, "global_accuracy": alone["test_accuracy"]}
    assert result["global_accuracy"] not in result["client_accuracy"].values()


@pytest.mark.parametrize("method", methods().values(), ids=methods())
def test_any_method_resolves_under_the_protocol_of_personal_tests(method):
    public = {"public_dataset": "digits"} if method.uses_public_data else {}
    setup = resolve(method, {"protocol": "own:personal", "dataset": "digits", **public})
    assert setup.protocol.evaluation == "clients"
    assert setup.config.local_test == 0.25


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_each_client_counts_by_its_part_in_a_personal_test(method, tmp_path):
    options = {"protocol": "own:personal", "dataset": "digits", "train_examples": 200, "rounds": 1, "device": "cpu"}
    output = output_of("run", method, *flags_of(options), "--out", tmp_path / "run")
    record = fedcli.load(tmp_path / "run").record

    test_sizes = [int(size * 0.25) for size in record["partition"]["sizes"]]
    assert len(set(test_sizes)) > 1
    (entry,) = record["rounds"]
    hits = [accuracy * test_sizes[int(client)] for client, accuracy in entry["client_accuracy"].items()]
    assert entry["test_accuracy"] == pytest.approx(sum(hits) / sum(test_sizes))

    has_global_model = method == "ditto"
    assert ("global_accuracy" in entry) == has_global_model
    line = f"global      {100 * entry.get('global_accuracy', 0):.2f} % (the global model"
    assert (line in output) == has_global_model


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of a method with a global model, of one with personal models beside it, and of one with these alone."""
    folder = tmp_path_factory.mktemp("runs")
    options = {"protocol": "fedfm:digits", "train_examples": 120, "rounds": 1, "num_clients": 2, "device": "cpu"}
    return {method: fedcli.run(method, out=folder / method, **options) for method in ("fedavg", "ditto", "fedrep")}


def test_a_run_with_a_global_model_beside_personal_ones_keeps_and_tests_both(runs):
    ditto = runs["ditto"]
    (entry,) = ditto.record["rounds"]
    data = datasets.load("digits")
    assert accuracy(ditto.model(), data.x_test, data.y_test) == entry["global_accuracy"]
    assert accuracy(ditto.model(client=1), data.x_test, data.y_test) == entry["client_accuracy"]["1"]
    assert ditto.history["global_accuracy"].tolist() == [100 * entry["global_accuracy"]]
    card = export(ditto, format="safetensors").card
    assert f"in this round: {100 * entry['global_accuracy']:.2f} %" in card.read_text()


def test_a_model_that_a_run_does_not_keep_is_refused(runs):
    with raises_user_error("'ditto' keeps one global model and a model for each client, 0 to 1 (got client 2)"):
        runs["ditto"].model(client=2)
    with raises_user_error("'fedrep' keeps a model for each client, 0 to 1 (got client None)"):
        runs["fedrep"].model()


def test_a_table_says_which_model_is_tested_where_its_runs_differ(runs):
    (entry,) = runs["ditto"].record["rounds"]
    table = build_table([run.record for run in runs.values()])
    rows = [dict(zip(table.titles, row, strict=True)) for row in table.rows]
    assert [row["Method"] for row in rows] == ["fedavg", "ditto", "fedrep"]
    assert [row["Model"] for row in rows] == ["global", "personal", "personal"]
    assert [row["global, %"] for row in rows] == ["", f"{100 * entry['global_accuracy']:.2f} (1)", ""]
    assert any(note.startswith("Model: which one is tested") for note in table.notes)
    assert "Model" not in build_table([runs["ditto"].record]).titles
