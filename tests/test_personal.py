"""Methods with personal models, against plain loops: three rounds of some clients, of a network with BatchNorm.

In a loop all share one whole model and each client has tensors of its own beside it, by name.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import fedcli
from fedcli.core import evaluation
from fedcli.data import datasets
from fedcli.papers.baselines import apfl, fedrod, pfedme
from fedcli.registry import find_method, methods
from fedcli.results.tables import sheet
from fedcli.runs.models import export
from fedcli.runs.options import flags_of
from fedcli.runs.resolve import resolve
from tests import laws
from tests.files import refused
from tests.programs import invoke
from tests.reference import copied, minibatches, modules_of
from tests.toys import randn

SIZES = (12, 4, 8, 6)
COHORTS = ([0, 1, 3], [1, 2, 3], [0, 2])  # somebody is new in the second and third, and somebody sits out
HEAD = {"head.weight", "head.bias"}
NORM = {f"body.0.1.{leaf}" for leaf in ("weight", "bias", "running_mean", "running_var")}


def module_of(fed, model):
    """A plain module with these parameters and buffers."""
    (module,) = modules_of(fed, {0: model})
    return module


def split_model(module):
    """Copies of a module's parameters and buffers."""
    return copied(dict(module.named_parameters())), copied(dict(module.named_buffers()))


def replaced(model, tensors):
    """A model, parameters and buffers, with some tensors replaced by name."""
    return tuple({name: tensors.get(name, value) for name, value in tree.items()} for tree in model)


def chosen(model, names):
    """The tensors of a model that have these names."""
    return {name: value for tree in model for name, value in tree.items() if name in names}


def mean_of(models, clients):
    """The mean of the clients' models, weighted by examples."""
    total = sum(SIZES[client] for client in clients)
    shares = [SIZES[client] / total for client in clients]
    trees = [[model[kind] for model in models] for kind in (0, 1)]
    return tuple(
        {name: sum(share * tree[name] for share, tree in zip(shares, kind, strict=True)) for name in kind[0]}
        for kind in trees
    )


def optimizer_of(fed, parameters):
    run = fed.config
    return torch.optim.SGD(list(parameters), run.lr, run.momentum, weight_decay=run.weight_decay)


def train(fed, number, client, model, *, names=None, epochs=None, distance=None):
    """A client's model after SGD on the minibatches of a round, or of other epochs of it.

    Parameters outside of `names` stand still; `distance` goes from the module to a term of the objective.
    """
    module = module_of(fed, model)
    moving = [value for name, value in module.named_parameters() if names is None or name in names]
    optimizer = optimizer_of(fed, moving)
    for x, y in minibatches(fed, number, client, epochs):
        _, logits = module(x)
        loss = F.cross_entropy(logits, y)
        if distance is not None:
            loss = loss + distance(module)
        module.zero_grad()
        loss.backward()
        optimizer.step()
    return split_model(module)


def squared_distance(point):
    """From a module to the squared distance of its parameters to a point."""
    return lambda module: sum((value - point[name]).square().sum() for name, value in module.named_parameters())


# One round of each method: from what all share, and what the clients keep, to both after it and the personal models


def own_tensors(names):
    """The round of a method whose clients keep the tensors of these names."""

    def slow_round(fed, options, number, clients, shared, own):
        ends = []
        for client in clients:
            kept = own.get(client, chosen(fed.initial_model(), names))
            ends.append(train(fed, number, client, replaced(shared, kept)))
            own[client] = chosen(ends[-1], names)
        shared = mean_of(ends, clients)
        return shared, own, {client: replaced(shared, own[client]) for client in own}

    return slow_round


def fedrep_round(fed, options, number, clients, shared, own):
    ends, local = [], fed.local_epochs
    for client in clients:
        model = replaced(shared, own.get(client, chosen(fed.initial_model(), HEAD)))
        heads = train(fed, number, client, model, names=HEAD, epochs=range(local, local + options.head_epochs))
        own[client] = chosen(heads, HEAD)
        body = {*shared[0]} - HEAD
        ends.append(train(fed, number, client, replaced(shared, own[client]), names=body))
    shared = mean_of(ends, clients)
    return shared, own, {client: replaced(shared, own[client]) for client in own}


def fedbabu_round(fed, options, number, clients, shared, own):
    body, local = {*shared[0]} - HEAD, fed.local_epochs
    shared = mean_of([train(fed, number, client, shared, names=body) for client in clients], clients)
    tuning = range(local, local + options.tuning_epochs)
    tuned = {client: train(fed, number, client, shared, epochs=tuning) for client in range(len(SIZES))}
    return shared, own, tuned


def ditto_round(fed, options, number, clients, shared, own):
    ends, to_received = [], squared_distance(shared[0])

    def distance(module):
        return options.proximal_weight / 2 * to_received(module)

    for client in clients:
        own[client] = train(fed, number, client, own.get(client, fed.initial_model()), distance=distance)
        ends.append(train(fed, number, client, shared))
    return mean_of(ends, clients), own, own


def mixed(own, other, alpha):
    return {name: alpha * value + (1 - alpha) * other[name] for name, value in own.items()}


def apfl_round(fed, options, number, clients, shared, own):
    ends = []
    for client in clients:
        v_model, alpha = own.get(client, (fed.initial_model(), options.mixing))
        v, w, passes = (module_of(fed, model) for model in (v_model, shared, v_model))
        optimizers = [optimizer_of(fed, module.parameters()) for module in (v, w)]
        for step, (x, y) in enumerate(minibatches(fed, number, client)):
            point = mixed(*(dict(module.named_parameters()) for module in (v, w)), alpha)
            point = {name: value.detach().requires_grad_() for name, value in point.items()}
            _, logits = functional_call(passes, point, (x,))  # the buffers of `passes` are updated in place
            grads = torch.autograd.grad(F.cross_entropy(logits, y), list(point.values()))
            w.zero_grad()
            F.cross_entropy(w(x)[1], y).backward()
            slope = 0.0
            for (value, other), grad in zip(zip(v.parameters(), w.parameters(), strict=True), grads, strict=True):
                slope += ((value - other) * grad).sum().item()
                value.grad = alpha * grad
            for optimizer in optimizers:
                optimizer.step()
            if options.adaptive and step == 0:
                alpha = min(max(alpha - fed.config.lr * slope, 0.0), 1.0)
        own[client] = (copied(dict(v.named_parameters())), copied(dict(passes.named_buffers()))), alpha
        ends.append(split_model(w))
    shared = mean_of(ends, clients)
    tested = {client: (mixed(params, shared[0], alpha), buffers) for client, ((params, buffers), alpha) in own.items()}
    return shared, own, tested


def pfedme_round(fed, options, number, clients, shared, own):
    ends = []
    for client in clients:
        theta = module_of(fed, shared)
        local, optimizer = copied(shared[0]), optimizer_of(fed, theta.parameters())
        for x, y in minibatches(fed, number, client):
            for _ in range(options.personal_steps):
                _, logits = theta(x)
                term = options.proximal_weight / 2 * squared_distance(local)(theta)
                optimizer.zero_grad()
                (F.cross_entropy(logits, y) + term).backward()
                optimizer.step()
            with torch.no_grad():
                for name, value in theta.named_parameters():
                    local[name] -= options.outer_lr * options.proximal_weight * (local[name] - value)
        own[client] = split_model(theta)
        ends.append((local, own[client][1]))
    params, buffers = mean_of(ends, clients)
    beta = options.server_mixing
    params = {name: (1 - beta) * shared[0][name] + beta * value for name, value in params.items()}
    return (params, buffers), own, own


def fedrod_round(fed, options, number, clients, shared, own):
    ends = []
    for client in clients:
        module = module_of(fed, shared)
        head = nn.Linear(module.feature_dim, fed.num_classes, dtype=fed.dtype)
        first = {key: fed.initial_model()[0][f"head.{key}"] for key in ("weight", "bias")}
        head.load_state_dict(own.get(client, first))
        labels = fed.engine.labels[fed.training[client]].tolist()
        counts = torch.tensor([labels.count(c) for c in range(fed.num_classes)], dtype=fed.dtype)
        optimizer = optimizer_of(fed, [*module.parameters(), *head.parameters()])
        for x, y in minibatches(fed, number, client):
            features, logits = module(x)
            balanced = counts**options.prior_exponent * logits.exp()
            generic = -(balanced[range(len(y)), y] / balanced.sum(1)).log().mean()
            personal = F.cross_entropy(logits.detach() + head(features.detach()), y)
            optimizer.zero_grad()
            (generic + personal).backward()
            optimizer.step()
        own[client] = copied(head.state_dict())
        ends.append(split_model(module))
    shared = mean_of(ends, clients)
    tested = {}
    for client, head in own.items():
        summed = {f"head.{key}": shared[0][f"head.{key}"] + value for key, value in head.items()}
        tested[client] = replaced(shared, summed)
    return shared, own, tested


CASES = {
    "fedper": (own_tensors(HEAD), {}),
    "fedbn": (own_tensors(NORM), {}),
    "fedrep": (fedrep_round, {"head_epochs": 3}),
    "fedbabu": (fedbabu_round, {"tuning_epochs": 3}),
    "ditto": (ditto_round, {"proximal_weight": 0.7}),
    "apfl": (apfl_round, {"mixing": 0.3}),
    "apfl adaptive": (apfl_round, {"mixing": 0.4, "adaptive": True}),
    "pfedme": (pfedme_round, {"personal_steps": 3, "proximal_weight": 2.0, "outer_lr": 0.2, "server_mixing": 0.6}),
    "fedrod": (fedrod_round, {"prior_exponent": 0.7}),
}


@pytest.mark.parametrize("case", CASES)
def test_three_rounds_are_those_of_a_plain_loop(case):
    slow_round, options = CASES[case]
    parts = laws.toy_parts(SIZES)
    setup, fed = laws.federation(case.split()[0], options, parts=parts, backbone=laws.NORMED, cohort_size=3)
    method, shared, own = setup.method, fed.initial_model(), {}
    for number, clients in enumerate(COHORTS):
        shared, own, tested = slow_round(fed, setup.options, number, clients, shared, own)
        state = laws.simulate(setup, fed, number + 1, COHORTS)
        personal = method.personal(state)
        assert set(personal) == set(tested)
        for client, model in tested.items():
            laws.assert_agree(in_order(personal[client]), in_order(model), f"client {client} after round {number}")
        if method.shared is not None:
            laws.assert_agree(in_order(method.shared(state)), in_order(shared), f"the model after round {number}")


def in_order(model):
    return tuple(dict(sorted(tree.items())) for tree in model)


# What a plain loop on these images does not reach


def test_an_adaptive_share_moves_in_the_first_step_of_a_round_and_stays_between_0_and_1():
    alpha = torch.full((4,), 0.5)
    stepped = torch.tensor([-0.2, 0.3, 1.2, 1.2])
    is_first = torch.tensor([True, True, True, False])
    assert apfl.next_alpha(alpha, stepped, is_first).tolist() == pytest.approx([0.0, 0.3, 1.0, 0.5])


def test_the_balanced_risk_leaves_out_a_class_that_the_client_has_not():
    logits, counts = randn(5, 4), torch.tensor([3.0, 0.0, 1.0, 8.0], dtype=torch.float64)
    prior = fedrod.log_prior(counts, 2.0)
    weights = counts**2 * logits.exp()
    labels = torch.tensor([0, 2, 3, 3, 0])
    expected = -(weights[range(5), labels] / weights.sum(1)).log().mean()
    torch.testing.assert_close(fedrod.balanced_risk(logits, labels, prior), expected)
    assert fedrod.log_prior(counts, 0.0).tolist() == [0, 0, 0, 0]


def test_a_clients_share_is_cut_and_stands_still_after_the_first_step():
    first, alpha = torch.tensor([True, True, True, False]), torch.tensor([0.5, 0.5, 0.5, 0.5])
    stepped = torch.tensor([-0.2, 0.7, 1.3, 0.7])
    assert apfl.next_alpha(alpha, stepped, first).tolist() == pytest.approx([0.0, 0.7, 1.0, 0.5])


def test_pfedmes_local_and_global_steps_by_hand():
    w, theta = ({"a": torch.tensor(value)} for value in (4.0, 1.0))
    assert pfedme.update_local(w, theta, 0.5)["a"].item() == 2.5
    assert pfedme.mix(w, theta, 2.0)["a"].item() == -2.0


def test_fedbn_without_batchnorm_is_fedavg():
    runs = {"parts": laws.toy_parts(SIZES), "cohort_size": 3}
    setup, fed = laws.federation("fedbn", **runs)
    state = laws.simulate(setup, fed, 3, COHORTS)
    average = laws.simulate(*laws.federation("fedavg", **runs), 3, COHORTS)
    for client, (params, _) in setup.method.personal(state).items():
        laws.assert_agree(params, average.params, f"client {client}")


LINEAR = """
from torch import nn

def linear(channels, image_size, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, num_classes))
"""


@pytest.mark.parametrize(
    ("method", "network", "count"),
    [
        ("fedbn", "cnn-small", 1),
        ("fedbn", laws.NORMED, 0),
        ("lg-fedavg", "./linear.py:linear", 1),
        ("fedper", laws.NORMED, 0),
    ],
)
def test_a_run_says_once_that_nothing_stays_with_a_client(method, network, count, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("linear.py").write_text(LINEAR)
    setup, fed = laws.federation(method, parts=laws.toy_parts(SIZES), backbone=network, cohort_size=3)
    laws.simulate(setup, fed, 3, COHORTS)
    said = [note for note in fed.engine.notes if note.startswith("nothing stays with a client")]
    assert len(said) == count


def test_fedbabu_tunes_only_for_a_test_and_sends_nothing_for_it():
    setup, fed = laws.federation("fedbabu", eval_every=2, rounds=3)
    state = setup.method.init(fed, setup.options)
    tuned = []
    for number in range(3):
        fed.start_round()
        state, _ = setup.method.run_round(state, fed.cohort(number), fed, setup.options)
        tuned.append(sorted(state.tuned))
        assert fed.sent_down["params"] == 4 * sum(value.numel() for value in state.params.values())
    assert tuned == [[], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_a_global_model_beside_personal_ones_is_tested_as_if_it_stood_alone():
    setup, fed = laws.federation("ditto", cohort_size=2, validation=0.2)
    state = laws.simulate(setup, fed, 1)
    result = evaluation.evaluate(fed, setup.method, state)
    alone = evaluation.evaluate(fed, find_method("fedavg"), state)
    personal = evaluation.evaluate(fed, find_method("local"), state)
    assert result == {**personal, "global_accuracy": alone["test_accuracy"]}
    assert result["global_accuracy"] not in result["client_accuracy"].values()


def test_any_method_runs_under_the_protocol_of_personal_tests():
    for method in methods().values():
        public = {"public_dataset": "digits"} if method.uses_public_data else {}
        setup = resolve(method, {"protocol": "own:personal", "dataset": "digits", **public})
        assert (setup.protocol.evaluation, setup.run.local_test) == ("clients", 0.25)


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_each_client_counts_by_its_part_in_a_personal_test(method, tmp_path):
    given = {"protocol": "own:personal", "dataset": "digits", "train_examples": 200, "rounds": 1, "device": "cpu"}
    said = invoke("run", method, *flags_of(given), "--out", tmp_path / "run").stdout
    record = fedcli.load(tmp_path / "run").record
    sizes = [int(size * 0.25) for size in record["partition"]["sizes"]]
    assert len(set(sizes)) > 1
    (entry,) = record["rounds"]
    own = [accuracy * sizes[int(client)] for client, accuracy in entry["client_accuracy"].items()]
    assert entry["test_accuracy"] == pytest.approx(sum(own) / sum(sizes))
    assert ("global_accuracy" in entry) == (method == "ditto")
    shown = f"global      {100 * entry.get('global_accuracy', 0):.2f} % (the global model"
    assert (shown in said) == (method == "ditto")


def test_a_run_with_both_models_keeps_both_and_a_table_says_which_is_tested(tmp_path):
    given = {"protocol": "fedfm:digits", "train_examples": 120, "rounds": 1, "num_clients": 2, "device": "cpu"}
    runs = {name: fedcli.run(name, out=tmp_path / name, **given) for name in ("fedavg", "ditto", "fedrep")}
    data, (entry,) = datasets.load("digits"), runs["ditto"].record["rounds"]

    def accuracy(model):
        return (model(data.x_test / 255).argmax(1) == data.y_test).double().mean().item()

    assert accuracy(runs["ditto"].model()) == entry["global_accuracy"]
    assert accuracy(runs["ditto"].model(client=1)) == entry["client_accuracy"]["1"]
    assert runs["ditto"].history["global_accuracy"].tolist() == [100 * entry["global_accuracy"]]
    _, card = export(runs["ditto"], format="safetensors")
    assert f"in this round: {100 * entry['global_accuracy']:.2f} %" in card.read_text()
    both = "one global model and a model for each client, 0 to 1"
    refused(lambda: runs["ditto"].model(client=2), f"'ditto' keeps {both} (got client 2)")
    refused(lambda: runs["fedrep"].model(), "'fedrep' keeps a model for each client, 0 to 1 (got client None)")

    table = sheet([run.record for run in runs.values()])
    at = [table.columns.index(title) for title in ("Method", "Model", "global, %")]
    cells = [[row[index] for index in at] for row in table.lines]
    assert cells == [
        ["fedavg", "global", ""], ["ditto", "personal", f"{100 * entry['global_accuracy']:.2f} (1)"],
        ["fedrep", "personal", ""],
    ]  # fmt: skip
    assert [note for note in table.notes if note.startswith("Model: which one is tested")]
    alone = sheet([runs["ditto"].record])
    assert "Model" not in alone.columns
