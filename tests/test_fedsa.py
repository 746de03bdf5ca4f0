"""FedSA: equations against slow loops and hand numbers, rounds against plain torch, and the paper's set-ups."""

import copy
import dataclasses
import json
import math
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedcli.core import backbones
from fedcli.core.batches import generator
from fedcli.errors import UserError
from fedcli.papers import fedsa
from fedcli.registry import find_method, find_protocol, find_table, methods
from fedcli.results.comparison import printed
from fedcli.results.metrics import find_metric
from fedcli.runs.config import resolve
from fedcli.runs.rounds import one_round
from tests import laws
from tests.printed import unaccounted
from tests.reference import load

FEDSA = find_method("fedsa")
FAMILY = ("fedsa", "lg-fedavg", "feddistill", "fedproto", "fedtgp")
C, D = 4, 5


def example(seed=0):
    """Features, labels (class 3 is absent) and anchors."""
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(7, D, dtype=torch.float64, generator=draw)
    return features, torch.tensor([0, 1, 2, 2, 0, 2, 1]), torch.randn(C, D, dtype=torch.float64, generator=draw)


MASK = torch.tensor([True, True, True, False, True, True, False])


def slow_regularization(features, labels, anchors, form, rows):
    if form == "code":
        return np.mean([float((features[i] - anchors[labels[i]]).square().sum()) / D for i in rows])
    total = 0.0
    for c in range(C):
        own = [features[i] for i in rows if labels[i] == c]
        total += float((sum(own) / len(own) - anchors[c]).norm()) if own else 0.0
    return total


def slow_contrastive(features, labels, anchors, margin, rows):
    losses = []
    for i in rows:
        far = [float((features[i] - anchors[c]).norm()) for c in range(C)]
        far[labels[i]] += margin
        near = [math.exp(-value) for value in far]
        losses.append(-math.log(near[labels[i]] / sum(near)))
    return np.mean(losses)


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("form", ["paper", "code"])
def test_regularization_against_a_loop(form, mask):
    features, labels, anchors = example()
    rows = range(7) if mask is None else mask.nonzero()[:, 0].tolist()
    expected = slow_regularization(features, labels, anchors, form, rows)
    assert fedsa.regularization(features, labels, anchors, mask, form).item() == pytest.approx(expected, rel=1e-12)
    loss = lambda f: fedsa.regularization(f, labels, anchors, mask, form)  # noqa: E731
    assert torch.autograd.gradcheck(loss, features.requires_grad_())


@pytest.mark.parametrize("mask", [None, MASK])
def test_margin_contrastive_against_a_loop(mask):
    features, labels, anchors = example()
    rows = range(7) if mask is None else mask.nonzero()[:, 0].tolist()
    expected = slow_contrastive(features, labels, anchors, 1.5, rows)
    found = fedsa.margin_contrastive(features, labels, anchors, 1.5, mask).item()
    assert found == pytest.approx(expected, rel=1e-12)
    assert found > fedsa.margin_contrastive(features, labels, anchors, 0.0, mask).item()
    loss = lambda f: fedsa.margin_contrastive(f, labels, anchors, 1.5, mask)  # noqa: E731
    assert torch.autograd.gradcheck(loss, features.requires_grad_())


def test_no_loss_is_nan_where_a_feature_is_its_anchor():
    _, labels, anchors = example()
    for loss in (
        fedsa.regularization,
        lambda *given: fedsa.regularization(*given, form="code"),
        lambda *given: fedsa.margin_contrastive(*given, margin=2.0),
    ):
        features = anchors[labels].clone().requires_grad_()
        (grad,) = torch.autograd.grad(loss(features, labels, anchors), features)
        assert torch.isfinite(grad).all()
    assert fedsa.regularization(anchors, torch.arange(C), anchors).item() == 0


def test_margin_by_hand():
    points, everyone = torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 16.0]]).double(), torch.ones(3, dtype=torch.bool)
    far = math.hypot(3, 16)  # between the first and the last; the others are 5 and 12 apart
    assert fedsa.margin(points, everyone).item() == pytest.approx((5 + 5 + 12) / 3)
    assert fedsa.margin(points, everyone, "pairs").item() == pytest.approx((5 + 12 + far) / 3)
    for form in ("nearest", "pairs"):
        assert fedsa.margin(points, torch.tensor([True, False, True]), form).item() == pytest.approx(far)
        assert fedsa.margin(points, torch.tensor([False, True, False]), form).item() == 0
        assert fedsa.margin(points, ~everyone, form).item() == 0


def test_classifier_calibration_against_a_loop():
    _, _, anchors = example()
    weight, bias, _ = (tensor[:C] for tensor in example(1))
    bias = bias.double()
    losses = []
    for c in range(C):
        scores = [math.exp(float(weight[j] @ anchors[c] + bias[j])) for j in range(C)]
        losses.append(-math.log(scores[c] / sum(scores)))
    assert fedsa.classifier_calibration(weight, bias, anchors).item() == pytest.approx(np.mean(losses), rel=1e-12)


def test_semantic_anchors_are_one_pass_through_the_embedding():
    dim = 512
    draw = np.random.default_rng(3)
    points = torch.from_numpy(draw.standard_normal((C, dim)))
    linear = [nn.Linear(dim, dim).double() for _ in range(2)]  # their biases are torch's own and must not matter
    for layer in linear:
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(draw.uniform(-(dim**-0.5), dim**-0.5, (dim, dim))))
    norms = [nn.BatchNorm1d(dim).double() for _ in range(2)]
    embedding = nn.Sequential(linear[0], norms[0], nn.ReLU(), linear[1], norms[1], nn.ReLU())
    assert sum(value.numel() for value in embedding.parameters()) == 527_360
    anchors = fedsa.semantic_anchors(C, dim, np.random.default_rng(3))
    torch.testing.assert_close(anchors, embedding(points).detach(), rtol=0, atol=1e-9)
    assert not anchors.requires_grad
    torch.testing.assert_close(fedsa.class_anchors(C, dim, np.random.default_rng(3)), points)


def test_global_prototypes_and_anchors_by_hand():
    local = torch.tensor([[[1.0, 1.0], [0.0, 0.0], [4.0, 0.0]], [[3.0, 5.0], [0.0, 0.0], [0.0, 0.0]]])
    counts = torch.tensor([[1, 0, 2], [3, 0, 0]])
    clients = fedsa.aggregate_prototypes(local, counts)
    torch.testing.assert_close(clients, torch.tensor([[2.0, 3.0], [0.0, 0.0], [4.0, 0.0]]))
    examples = fedsa.aggregate_prototypes(local, counts, "examples")
    torch.testing.assert_close(examples, torch.tensor([[2.5, 4.0], [0.0, 0.0], [4.0, 0.0]]))
    anchors = fedsa.update_anchors(torch.full((3, 2), 8.0), clients, torch.tensor([True, False, True]), 0.75)
    torch.testing.assert_close(anchors, torch.tensor([[6.5, 6.75], [8.0, 8.0], [7.0, 6.0]]))


def slow_margin(points):
    others = [[float((p - q).norm()) for j, q in enumerate(points) if j != i] for i, p in enumerate(points)]
    return float(np.mean([min(row) for row in others])) if len(points) > 1 else 0.0


def slow_round(fed, config, number, anchors, kept):
    """One round of all clients by plain torch; returns anchors, prototypes and what the clients keep."""
    sent, after = {c: [] for c in range(fed.num_classes)}, {}
    for client in range(fed.num_clients):
        model, own_margin = kept.get(client, (fed.initial_model(), 0.0))
        module = load(copy.deepcopy(fed.network.module), *model).train()
        optimizer = torch.optim.SGD(module.parameters(), lr=fed.config.lr, momentum=fed.config.momentum,
                                    weight_decay=fed.config.weight_decay)  # fmt: skip
        margin = max(own_margin, slow_margin(list(anchors)))
        plan, found = fed.plan(fed.cohort_of(number, [client])), {c: [] for c in sent}
        for t in range(int(plan.steps[0])):
            x, y = fed.engine.gather(plan.index[t, 0, : plan.size[t, 0]])
            features, logits = module(x)
            squares = [(features[y == c].mean(0) - anchors[c]).norm() for c in y.unique()]
            distances = torch.cdist(features, anchors) + margin * F.one_hot(y, fed.num_classes)
            loss = F.cross_entropy(logits, y) + config.regularization_weight * sum(squares)
            loss = loss + config.contrastive_weight * F.cross_entropy(-distances, y)
            loss = loss + config.calibration_weight * F.cross_entropy(module.head(anchors), torch.arange(len(anchors)))
            for feature, label in zip(features.detach(), y.tolist(), strict=True):
                found[label].append(feature)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        own = {c: torch.stack(rows).mean(0) for c, rows in found.items() if rows}
        for c, prototype in own.items():
            sent[c].append(prototype)
        model = ({n: v.detach() for n, v in module.named_parameters()}, dict(module.named_buffers()))
        after[client] = model, slow_margin(list(own.values()))
    prototypes = {c: torch.stack(rows).mean(0) for c, rows in sent.items() if rows}
    moved = {c: config.anchor_decay * anchors[c] + (1 - config.anchor_decay) * p for c, p in prototypes.items()}
    return torch.stack([moved.get(c, anchors[c]) for c in range(len(anchors))]), prototypes, after


@pytest.mark.parametrize("drop_last", [False, True])
def test_three_rounds_are_those_of_a_plain_loop(drop_last):
    parts = [np.array([0, 3, 1, 6, 4, 5, 8, 11, 14, 2]), np.array([7, 10, 13, 16, 19]), np.array([9, 12]),
             np.array([15, 18, 21, 24, 22])]  # fmt: skip
    weights = {"regularization_weight": 0.3, "contrastive_weight": 0.5, "calibration_weight": 0.7, "anchor_decay": 0.9}
    setup, fed = laws.federation(FEDSA, weights, parts=parts, drop_last=drop_last, lr=0.01)
    state, kept = setup.method.init(fed, setup.options), {}
    anchors = state.anchors
    for number in range(3):
        anchors, prototypes, kept = slow_round(fed, setup.options, number, anchors, kept)
        state, _ = setup.method.run_round(state, fed.cohort(number), fed, setup.options)
        torch.testing.assert_close(state.anchors, anchors, rtol=1e-9, atol=1e-9)
        assert state.has_class.tolist() == [c in prototypes for c in range(3)]
        for c, prototype in prototypes.items():
            torch.testing.assert_close(state.prototypes[c], prototype, rtol=1e-9, atol=1e-9)
        for client, (model, margin) in kept.items():
            laws.assert_agree(state.clients[client][:2], model, f"client {client} in round {number}")
            assert state.clients[client].margin.item() == pytest.approx(margin, rel=1e-9)
    assert state.clients[1].margin == state.clients[2].margin == 0  # of one class each
    assert state.clients[0].margin > 0


def test_the_larger_margin_counts():
    setup, fed = laws.federation(FEDSA, {"contrastive_weight": 1.0})
    state = laws.simulate(setup, fed, 1)

    def after(margin):
        clients = {c: own._replace(margin=torch.tensor(margin).double()) for c, own in state.clients.items()}
        new, _ = setup.method.run_round(state._replace(clients=clients), fed.cohort(1), fed, setup.options)
        return laws.model_of(setup, new)[0]

    least = fedsa.margin(state.anchors, torch.ones(3, dtype=torch.bool)).item()
    assert laws.distance(after(0.0), after(0.9 * least)) == 0
    assert laws.distance(after(0.0), after(1.1 * least)) > 1e-9


def test_every_option_matters():
    start = {"contrastive_weight": 1.0, "anchor_decay": 0.9}
    base = laws.simulate(*laws.federation(FEDSA, start), 2)
    others = [
        {"regularization_weight": 0.0}, {"regularization_form": "code"}, {"contrastive_weight": 0.0},
        {"margin_form": "pairs"}, {"calibration_weight": 0.0}, {"anchor_decay": 1.0}, {"prototype_mean": "examples"},
        {"embedding": False},
    ]  # fmt: skip
    for other in others:
        setup, fed = laws.federation(FEDSA, {**start, **other})
        assert laws.distance(laws.simulate(setup, fed, 2).clients, base.clients) > 1e-6, other


def test_the_code_form_agrees_with_the_reference_too():
    code = {"regularization_form": "code", "regularization_weight": 10.0, "contrastive_weight": 1.0}
    laws.law_4_chunking_is_invisible(FEDSA, overrides=code)


def test_terms_costs_and_the_headline_of_a_round():
    parts = [np.array([0, 3, 6, 9, 12, 1, 4]), np.array([2, 5]), np.array([7, 8]), np.array([], int)]
    setup, fed = laws.federation(FEDSA, parts=parts)
    state, entry = one_round(setup, fed, setup.method.init(fed, setup.options), fed.cohort(0))
    assert set(entry["terms"]) == {"cross_entropy", "regularization", "contrastive", "calibration"}
    width, classes = fed.feature_dim, fed.num_classes
    assert fed.sent_down == {"params": 0, "buffers": 0, "other": 4 * classes * width}
    assert fed.sent_up == {"params": 0, "buffers": 0, "other": 5 * width}  # two classes, one, two, none
    assert setup.method.client_memory(fed.sizes) == fed.sizes.parameters + 2 * classes * width + 1
    right = []
    for client in range(4):
        features, logits, labels = fed.predict(*state.clients[client][:2], None)
        right.append((torch.cdist(features, state.prototypes).argmin(1) == labels).double().mean().item())
        right.append((logits.argmax(1) == labels).double().mean().item())
    assert entry["test_accuracy"] == pytest.approx(np.mean(right[::2]))
    assert entry["classifier_accuracy"] == pytest.approx(np.mean(right[1::2]))


def test_anchors_come_from_the_runs_seed():
    for embedding, draw in ((True, fedsa.semantic_anchors), (False, fedsa.class_anchors)):
        setup, fed = laws.federation(FEDSA, {"embedding": embedding}, seed=5)
        expected = draw(3, fed.feature_dim, generator(5, "anchors"))
        assert torch.equal(setup.method.init(fed, setup.options).anchors, expected)


@pytest.fixture
def two_networks(monkeypatch):
    """The names of two small networks whose features have the same width."""
    other = backbones.plain_cnn(kernel=3, padding=1, widths=(8,), pooled=(0,), hidden=(64,))
    monkeypatch.setitem(backbones.BACKBONES, "cnn-other", other)
    return "cnn-small,cnn-other"


@pytest.mark.parametrize("name", FAMILY)
def test_different_networks_train_together(two_networks, name):
    method = find_method(name)
    laws.law_4_chunking_is_invisible(method, backbone=two_networks, chunks=(1, 4))
    setup, fed = laws.federation(method, backbone=two_networks, clients_per_chunk="2")
    state, permuted = (laws.simulate(setup, fed, 2, [range(4), order]) for order in ([0, 1, 2, 3], [2, 1, 3, 0]))
    laws.assert_agree(permuted, state, "a permuted cohort")
    params = {client: model[0] for client, model in setup.method.personal(state).items()}
    for client, own in params.items():
        assert own["head.weight"].shape == (3, 64)
        assert own.keys() == params[client % 2].keys()
    assert params[0].keys() != params[1].keys()


@pytest.mark.parametrize("name", FAMILY)
def test_a_network_whose_clients_take_no_step(two_networks, name):
    for sizes in ((9, 0, 5, 0), (0, 9, 0, 5)):
        setup, fed = laws.federation(name, backbone=two_networks, parts=laws.toy_parts(sizes))
        _, entry = one_round(setup, fed, laws.simulate(setup, fed, 1), fed.cohort(1))
        assert entry["terms"]["cross_entropy"] > 0


@pytest.mark.parametrize("name", sorted(set(FAMILY) - {"feddistill"}))
def test_features_of_different_widths_are_refused(name):
    setup, fed = laws.federation(name, backbone="cnn-small,cnn-3conv")
    with pytest.raises(UserError, match="cnn-small 64, cnn-3conv 512"):
        setup.method.init(fed, setup.options)


@pytest.mark.parametrize(("data", "classes", "size", "count"), [
    ("cifar10", 10, 32, 878_538), ("cifar100", 100, 32, 924_708), ("tiny-imagenet", 200, 64, 5_694_600),
])  # fmt: skip
def test_networks_have_the_papers_sizes(data, classes, size, count):
    name = find_protocol(f"fedsa:{data}-device", FEDSA).datasets[data].backbone
    network = backbones.build(name, 3, size, classes, seed=0)
    assert sum(value.numel() for value in network.parameters()) == count
    assert network.feature_dim == 512


def test_the_papers_values():
    setup = resolve(FEDSA, {"protocol": "fedsa:cifar10-silo", "dataset": "cifar10"}, need_data=False)
    assert FEDSA.config() == fedsa.Config(0.1, "paper", 0.01, "nearest", 1.0, 0.9999, "clients", True)
    assert setup.options == fedsa.Config(10.0, "code", 0.01, "nearest", 1.0, 0.9999, "clients", True)
    run = setup.run
    assert (run.num_clients, run.cohort_size, run.rounds, run.local_epochs, run.batch_size) == (20, 20, 1000, 1, 10)
    assert (run.optimizer, run.lr, run.lr_decay, run.momentum, run.weight_decay) == ("sgd", 0.01, 1.0, 0.0, 0.0)
    assert (run.local_test, run.validation, run.drop_last, run.partition_seed) == (0.25, 0.0, True, 1)
    assert (str(setup.partition), setup.selection, setup.protocol.evaluation) == (
        "dirichlet:0.1:min=1:draw=pfllib", "best-test", "clients",
    )  # fmt: skip
    assert (setup.setting.mean, setup.setting.std) == ((0.5,) * 3, (0.5,) * 3)
    setup = resolve(FEDSA, {"protocol": "fedsa:cifar100-htfe8", "dataset": "cifar100"}, need_data=False)
    assert (setup.run.num_clients, setup.run.cohort_size, setup.options.contrastive_weight) == (100, 10, 1.0)
    setup = resolve(FEDSA, {"protocol": "fedsa:cifar100-htfe8-silo", "dataset": "cifar100"}, need_data=False)  # Fig. 3
    assert (setup.run.num_clients, setup.run.cohort_size, setup.run.rounds) == (20, 20, 200)
    assert setup.run.backbone.split(",")[:3] == ["cnn-mcmahan", "googlenet-512", "mobilenet-v2-dropout-512"]
    assert setup.run.backbone.count(",") == 7
    assert [len(find_protocol(f"fedsa:cifar100-htfe{x}", FEDSA).datasets["cifar100"].backbone.split(","))
            for x in (2, 3, 5, 8)] == [2, 3, 5, 8]  # fmt: skip


@pytest.mark.parametrize("protocol", fedsa.PROTOCOLS[:-2], ids=lambda protocol: protocol.name)  # less the built-in ones
def test_baselines_have_the_forms_behind_the_printed_numbers(protocol):
    (dataset,) = protocol.datasets
    for name, option, value in (
        ("fedgen", "form", "code"), ("fml", "form", "code"), ("fedkd", "form", "code"),
        ("fedproto", "gathered_epochs", "all"), ("fedtgp", "form", "code"),
    ):  # fmt: skip
        method = find_method(name)
        setup = resolve(method, {"protocol": protocol.name, "dataset": dataset}, need_data=False)
        assert getattr(setup.options, option) == value
        (field,) = (own for own in dataclasses.fields(method.config) if own.name == option)
        assert field.default == field.metadata["before"] != value  # of runs outside, and of records from before
    assert any("--form code" in note for note in protocol.notes)
    assert any("Standard deviations are not comparable" in note for note in protocol.notes)


def test_every_printed_number_is_planned_or_has_a_reason():
    reported = json.loads(files("fedcli.papers").joinpath("reported.json").read_text())["FedSA"]
    assert unaccounted(sys.modules[fedsa.__name__], reported) == []
    assert fedsa.NOT_PLANNED.keys().isdisjoint(reported)


def test_figure_3_is_planned_for_every_method():
    table = find_table("fedsa:Fig3")
    assert {cell.method for cell in table.cells} == {"fedsa", "fedgen", "fml", "fedkd", "lg-fedavg", *FAMILY}
    for cell in table.cells:
        run = resolve(find_method(cell.method), cell.settings, need_data=False).run
        assert (run.dataset, run.rounds, run.num_clients, run.cohort_size) == ("cifar100", 200, 20, 20)
        assert len(run.backbone.split(",")) == 8


@pytest.mark.parametrize("protocol", fedsa.PROTOCOLS, ids=lambda protocol: protocol.name)
def test_every_method_runs_under_every_protocol(protocol):
    (dataset,) = protocol.datasets
    for name in ("local", *FAMILY):
        setup = resolve(find_method(name), {"protocol": protocol.name, "dataset": dataset}, need_data=False)
        assert setup.protocol is protocol


@pytest.mark.parametrize("number", range(1, 6))
def test_tables_have_every_number_of_the_paper(number):
    table = find_table(f"fedsa:{number}")
    assert {(cell.row, cell.column) for cell in table.cells} == set(printed(table))
    assert len(table.cells) == len(printed(table))
    rounds = {"E=1": 1000, "E=5": 500, "E=10": 200}
    for cell in table.cells:
        if cell.method in methods():
            run = resolve(find_method(cell.method), cell.settings, need_data=False).run
            assert run.rounds == rounds.get(cell.column, 1000)
            assert (run.num_clients, run.cohort_size) == ((20, 20) if "silo" in cell.column else (100, 10))
            if number > 2 or cell.column == "HtFE8":
                assert len(run.backbone.split(",")) == 8


def test_the_ablations_are_what_their_names_say():
    cells = {cell.row: resolve(FEDSA, cell.settings, need_data=False).options for cell in find_table("fedsa:4").cells}
    for row, options in cells.items():
        parts = row.split("+")
        assert options.embedding == ("ER" in parts)
        assert (options.contrastive_weight, options.calibration_weight) == (float("MCL" in parts), float("CC" in parts))
    for cell in find_table("fedsa:5").cells:
        options = resolve(FEDSA, cell.settings, need_data=False).options
        symbol, value = cell.column.split("=")
        expected = {"lambda2": 1.0, "lambda3": 1.0, symbol: float(value)}
        assert (options.contrastive_weight, options.calibration_weight) == tuple(expected.values())


def test_the_committed_runs_of_cifar10_with_100_clients_differ_in_their_prototypes_and_not_in_their_classifiers():
    """As the page of the study says; all are accuracies in percent, by seed."""
    study = Path(__file__).parent.parent / "results" / "records" / "fedsa-cifar10-device"

    def by_seed(metric, method):
        paths = sorted((study / method).glob("seed-*/record.json"))
        found = find_metric(metric).values([json.loads(path.read_text()) for path in paths])
        assert len(found) == 3
        return np.array(found)

    best = {name: by_seed("selected", name) for name in ("fedsa", "fedproto", "local")}
    classifier = {name: by_seed("classifier", name) for name in ("fedsa", "fedproto")}
    assert (best["fedsa"] - best["fedproto"] > 7).all()
    for name in classifier:
        assert (abs(classifier[name] - best["local"]) < 1).all()
    assert (abs(best["fedsa"] - best["local"]) < 0.5).all()
