"""FedFA: the equations against slow loops, local training against plain torch, and what the papers' protocols say."""

import copy
import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcli.core import backbones, partition
from fedcli.core.batches import generator
from fedcli.declarations import method_options
from fedcli.papers import fedfa
from fedcli.registry import find_method, find_protocol, find_table
from fedcli.results import claims
from fedcli.results.comparison import printed, printed_by_table, reported
from fedcli.results.metrics import find_metric
from fedcli.results.reproduce import plan
from fedcli.results.tables import NOT_IN_IDENTITY, find_records
from fedcli.runs.config import resolve
from fedcli.runs.rounds import one_round
from tests import laws
from tests.forms import assert_laws
from tests.printed import unaccounted
from tests.reference import load

FEDFA = find_method("fedfa")
RECORDS = Path(__file__).parent.parent / "results" / "records"
C, D = 5, 4


def example(seed=0):
    """Features, labels (class 3 is absent) and anchors."""
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(9, D, dtype=torch.float64, generator=draw)
    labels = torch.tensor([0, 1, 2, 4, 4, 0, 4, 2, 4])
    return features, labels, torch.randn(C, D, dtype=torch.float64, generator=draw)


def slow_anchor_loss(features, labels, anchors, form):
    squares = [float(sum((f - anchors[y]) ** 2)) for f, y in zip(features, labels.tolist(), strict=True)]
    if form == "paper":
        return sum(squares) / len(squares) / 2
    total = 0.0
    for c in range(len(anchors)):
        own = [square for square, y in zip(squares, labels.tolist(), strict=True) if y == c]
        total += sum(own) / len(own) if own else 0.0
    return total / len(anchors)


@pytest.mark.parametrize("form", ["paper", "code"])
def test_anchor_loss_against_a_loop(form):
    features, labels, anchors = example()
    expected = slow_anchor_loss(features, labels, anchors, form)
    assert fedfa.anchor_loss(features, labels, anchors, form).item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(lambda f: fedfa.anchor_loss(f, labels, anchors, form), features.requires_grad_())


def test_with_two_classes_of_ten_in_a_batch_the_codes_form_is_two_and_a_half_times_weaker():
    features, anchors = torch.tensor([[3.0, 0.0], [0.0, 1.0]]), torch.zeros(10, 2)
    labels = torch.tensor([7, 2])
    assert fedfa.anchor_loss(features, labels, anchors, "paper").item() == 2.5  # (9 + 1) / 2 / 2
    assert fedfa.anchor_loss(features, labels, anchors, "code").item() == 1.0  # (9 + 1) / 10
    assert fedfa.anchor_loss(features, labels, anchors) == fedfa.anchor_loss(features, labels, anchors, "code")


def test_the_codes_form_weighs_classes_alike():
    features, labels = torch.tensor([[1.0], [1.0], [1.0], [5.0]]), torch.tensor([0, 0, 0, 1])
    assert fedfa.anchor_loss(features, labels, torch.zeros(2, 1), "code").item() == (1 + 25) / 2
    assert fedfa.anchor_loss(features, labels, torch.zeros(2, 1), "paper").item() == (1 + 1 + 1 + 25) / 4 / 2


@pytest.mark.parametrize("form", ["paper", "code"])
def test_padding_counts_nowhere_even_if_it_is_nan(form):
    features, labels, anchors = example()
    padded = torch.cat([features, torch.full((2, D), torch.nan, dtype=torch.float64)]).requires_grad_()
    mask = torch.arange(11) < 9
    more = torch.cat([labels, torch.tensor([3, 0])])
    loss = fedfa.anchor_loss(padded, more, anchors, form, mask)
    assert loss.item() == pytest.approx(fedfa.anchor_loss(features, labels, anchors, form).item(), rel=1e-12)
    loss.backward()
    assert torch.isfinite(padded.grad).all()
    assert (padded.grad[9:] == 0).all()


def test_calibration_loss_against_a_loop():
    _, _, anchors = example()
    weight, bias = example(seed=1)[2], torch.arange(C).double() / 3
    losses = []
    for c in range(C):
        logits = [float(weight[q] @ anchors[c] + bias[q]) for q in range(C)]
        losses.append(-math.log(math.exp(logits[c]) / sum(math.exp(logit) for logit in logits)))
    assert fedfa.calibration_loss(weight, bias, anchors).item() == pytest.approx(np.mean(losses), rel=1e-12)


@pytest.mark.parametrize(("classes", "dim"), [(10, 64), (10, 10)])
def test_orthogonal_anchors_are_distinct_rows_of_the_identity_in_random_order(classes, dim):
    draws = [fedfa.orthogonal_anchors(classes, dim, generator(seed, "anchors")) for seed in (0, 0, 1)]
    assert draws[0].shape == (classes, dim)
    assert torch.equal(draws[0] @ draws[0].T, torch.eye(classes, dtype=torch.float64))
    assert set(draws[0].flatten().tolist()) == {0.0, 1.0}
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert draws[0].argmax(1).tolist() != sorted(draws[0].argmax(1).tolist())


def test_anchors_are_random_directions_where_there_are_too_few_rows():
    anchors = fedfa.orthogonal_anchors(400, 3, generator(0, "anchors"))
    torch.testing.assert_close(anchors.norm(dim=1), torch.ones(400, dtype=torch.float64))
    assert len(anchors.unique(dim=0)) == 400
    assert anchors.mean(0).abs().max() < 0.1  # uniform on the sphere: standard deviation 0.03
    assert torch.equal(anchors, fedfa.random_anchors(400, 3, generator(0, "anchors")))


def test_class_features_of_an_epoch_shrink_for_a_class_that_batches_lack():
    first = fedfa.batch_class_features(torch.tensor([[2.0], [4.0], [10.0]]), torch.tensor([0, 0, 1]), 3, 2)
    second = fedfa.batch_class_features(torch.tensor([[5.0]]), torch.tensor([0]), 3, torch.tensor(2))
    assert first.tolist() == [[1.5], [5.0], [0.0]]  # (3, 10, -) / 2
    assert (first + second).tolist() == [[4.0], [5.0], [0.0]]  # class 1 has mean 10, in one of two batches
    masked = fedfa.batch_class_features(
        torch.tensor([[2.0], [torch.nan]]), torch.tensor([0, 1]), 3, 2, torch.tensor([True, False])
    )
    assert masked.tolist() == [[1.0], [0.0], [0.0]]


def test_anchors_decay_from_the_received_one_and_those_of_absent_classes_stay():
    anchors, has_class = torch.tensor([[8.0], [8.0]]), torch.tensor([True, False])
    for epoch_mean, expected in ((4.0, 5.0), (1.0, 2.0)):  # 0.25 * 8 + 0.75 * 4; 0.25 * 5 + 0.75 * 1
        anchors = fedfa.decay_anchors(anchors, torch.tensor([[epoch_mean], [0.0]]), has_class, 0.25)
        assert anchors.tolist() == [[expected], [8.0]]
    assert fedfa.decay_anchors(anchors, torch.zeros(2, 1), has_class, 1.0).tolist() == [[2.0], [8.0]]
    assert fedfa.decay_anchors(anchors, torch.zeros(2, 1), has_class, 0.0).tolist() == [[0.0], [8.0]]


def test_anchors_of_clients_are_averaged_with_or_without_those_that_lack_the_class():
    local = torch.tensor([[[1.0], [10.0], [5.0]], [[3.0], [20.0], [6.0]]])
    weights = torch.tensor([0.25, 0.75])
    assert fedfa.aggregate_anchors(local, weights).tolist() == [[2.5], [17.5], [5.75]]
    has_class = torch.tensor([[True, True, False], [True, False, False]])
    previous = torch.full((3, 1), 7.0)
    assert fedfa.aggregate_present(local, weights, has_class, previous).tolist() == [[2.5], [10.0], [7.0]]


def plain_client(fed, config, state, cohort, k):
    """Client k's round with plain modules and torch.optim: its parameters and anchors."""
    module = load(copy.deepcopy(fed.network.module), state.params, state.buffers)
    run, received = fed.config, state.anchors
    sgd = torch.optim.SGD(module.parameters(), lr=run.lr, momentum=run.momentum, weight_decay=run.weight_decay)
    second = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[config.calibration_optimizer]
    calibration = second(module.head.parameters(), lr=config.calibration_lr)
    anchors, gathered, met = received.clone(), torch.zeros_like(received), set()
    batches = fed.plan(cohort)
    for t in range(batches.steps[k]):
        x, y = fed.engine.gather(batches.index[t, k, : batches.size[t, k]])
        features, logits = module(x)
        loss = torch.nn.functional.cross_entropy(logits, y)
        anchor = sum((features[y == c] - received[c]).square().sum(1).mean() for c in y.unique())
        sgd.zero_grad()
        (loss + config.anchor_weight * anchor / len(received)).backward()
        sgd.step()
        end = batches.epoch_end[t, k]
        if config.calibration == "batch" or (config.calibration == "epoch" and end):
            calibration.zero_grad()
            torch.nn.functional.cross_entropy(module.head(received), torch.arange(len(received))).backward()
            calibration.step()
        for c in y.unique().tolist():
            gathered[c] += features[y == c].detach().mean(0)
            met.add(c)
        if end:
            for c in met:
                mean = gathered[c] / batches.num_batches[k]
                anchors[c] = config.anchor_decay * anchors[c] + (1 - config.anchor_decay) * mean
            gathered = torch.zeros_like(received)
    return {name: value.detach() for name, value in module.named_parameters()}, anchors


def trained_clients(setup, fed, state):
    """The clients of round 0 after training."""
    sent = {}
    fed.upload = lambda stacked: sent.setdefault("anchors", stacked)
    fed.upload_model = lambda clients: sent.setdefault("model", (clients.params, clients.buffers))
    setup.method.run_round(state, fed.cohort(0), fed, setup.options)
    return sent["model"][0], sent["anchors"]


@pytest.mark.parametrize("chunk", ["1", "4"])
@pytest.mark.parametrize(
    "options",
    [
        {"calibration": "batch", "calibration_optimizer": "adam", "calibration_lr": 0.03},
        {"calibration": "batch", "calibration_optimizer": "sgd", "calibration_lr": 0.2},
        {"calibration": "epoch", "calibration_optimizer": "adam", "calibration_lr": 0.03},
        {"calibration": "never"},
    ],
)
def test_two_epochs_of_every_client_against_a_plain_loop(options, chunk):
    two_classes = np.array([0, 1, 3, 4, 6, 7, 9, 10, 12])  # the classes are 0, 1, 2, 0, 1, 2, ...
    parts = [two_classes, np.arange(30, 37), np.arange(40, 50), np.array([], np.int64)]
    options = {"anchor_weight": 0.5, "anchor_decay": 0.3, **options}
    setup, fed = laws.federation(FEDFA, options, parts=parts, clients_per_chunk=chunk)
    start = setup.method.init(fed, setup.options)
    params, anchors = trained_clients(setup, fed, start)
    for k in range(4):
        expected, its_anchors = plain_client(fed, setup.options, start, fed.cohort(0), k)
        laws.assert_agree({name: value[k] for name, value in params.items()}, expected, f"client {k}")
        laws.assert_agree(anchors[k], its_anchors, f"the anchors of client {k}")
    assert torch.equal(anchors[0, 2], start.anchors[2])  # a class that it lacks
    assert torch.equal(anchors[3], start.anchors)  # a client without examples
    assert not torch.equal(anchors[0, 0], start.anchors[0])


@pytest.mark.parametrize(("second", "lr"), [("adam", 0.05), ("sgd", 0.3)])
def test_one_local_step_is_one_update_of_everything_and_one_of_the_head(second, lr):
    options = {"calibration_optimizer": second, "calibration_lr": lr, "anchor_form": "paper", "anchor_weight": 0.7}
    run = {"parts": [np.arange(6)], "num_clients": 1, "batch_size": 6, "local_epochs": 1, "weight_decay": 0.1}
    setup, fed = laws.federation(FEDFA, {**options, "anchor_init": "random"}, **run)
    start = setup.method.init(fed, setup.options)
    params, anchors = trained_clients(setup, fed, start)
    module = load(copy.deepcopy(fed.network.module), start.params, start.buffers)
    sgd = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    calibration = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[second](module.head.parameters(), lr=lr)
    x, y = fed.engine.gather(np.arange(6))
    features, logits = module(x)
    anchor = (features - start.anchors[y]).square().sum(1).mean() / 2
    (torch.nn.functional.cross_entropy(logits, y) + 0.7 * anchor).backward()
    sgd.step()
    body = {name: value.detach().clone() for name, value in module.named_parameters() if name not in fedfa.HEAD}
    calibration.zero_grad()
    torch.nn.functional.cross_entropy(module.head(start.anchors), torch.arange(3)).backward()
    calibration.step()
    expected = {name: value.detach() for name, value in module.named_parameters()}
    laws.assert_agree({name: value[0] for name, value in params.items()}, expected, "the client")
    laws.assert_agree({name: params[name][0] for name in body}, body, "what calibration does not touch")
    for c in range(3):  # features of the forward pass before the step
        mean = features[y == c].detach().mean(0)
        torch.testing.assert_close(anchors[0, c], 0.5 * start.anchors[c] + 0.5 * mean, rtol=1e-10, atol=1e-12)


def test_calibration_has_no_gradient_for_the_body_and_leaves_the_anchors():
    _, fed = laws.federation(FEDFA)
    params, buffers = fed.initial_model()
    params = {name: value.requires_grad_() for name, value in params.items()}
    anchors = fedfa.random_anchors(3, fed.feature_dim, generator(0))
    loss, aux = fedfa.calibration_objective(params, buffers, None, fedfa.Context(anchors, None))
    grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    moved = {name for name, grad in zip(params, grads, strict=True) if grad is not None}
    assert moved == set(fedfa.HEAD)
    assert aux.terms["calibration"] is loss
    running = {"mean": torch.ones(1)}
    assert fedfa.calibration_objective(params, running, None, fedfa.Context(anchors, None))[1].buffers is running


def test_initial_anchors():
    states = {}
    for start in ("orthogonal", "random", "fedavg-round"):
        setup, fed = laws.federation(FEDFA, {"anchor_init": start})
        states[start] = setup.method.init(fed, setup.options).anchors
        assert states[start].shape == (fed.num_classes, fed.feature_dim)
        assert states[start].dtype == fed.dtype
    assert torch.equal(states["orthogonal"], fedfa.orthogonal_anchors(3, 64, generator(0, "anchors")))
    assert torch.equal(states["random"], fedfa.random_anchors(3, 64, generator(0, "anchors")))
    other = laws.federation(FEDFA, seed=1)
    assert not torch.equal(other[0].method.init(other[1], other[0].options).anchors, states["orthogonal"])


def test_a_first_round_of_fedavg_gives_the_anchors():
    data = laws.toy_dataset(num_train=12)  # classes 0, 1, 2, 0, 1, 2, ...
    parts = [np.array([0, 3, 1]), np.array([6, 9]), np.array([2, 5]), np.array([8, 11])]
    run = {"data": data, "parts": parts, "batch_size": 8}  # one batch an epoch
    setup, fed = laws.federation(FEDFA, {"anchor_init": "fedavg-round"}, **run)
    base, base_fed = laws.federation("fedavg", **run)
    cohorts = ([0, 1], [2, 3])
    start = setup.method.init(fed, setup.options)
    first = laws.simulate(setup, fed, 1, cohorts)
    laws.assert_agree(first.params, laws.simulate(base, base_fed, 1, cohorts).params, "round 0")
    one_epoch, _ = fed.train(
        fed.broadcast(start.params, start.buffers, fed.cohort_of(0, [0, 1])), fed.cohort_of(0, [0, 1]),
        find_method("fedavg").module.make_local_loss(fed.network), epochs=range(1),
    )  # fmt: skip
    features = []
    for k, part in enumerate(parts[:2]):
        x, _ = fed.engine.gather(part)
        model = {name: value[k] for name, value in one_epoch.params.items()}
        features.append(fed.network(model, start.buffers, x, train=False).features.detach())
    expected = torch.stack(
        [0.6 * features[0][:2].mean(0) + 0.4 * features[1].mean(0), features[0][2], start.anchors[2]]
    )
    laws.assert_agree(first.anchors, expected, "class means before the second of two steps")
    later = laws.simulate(setup, fed, 2, cohorts)
    assert laws.distance(later.params, laws.simulate(base, base_fed, 2, cohorts).params) > 1e-6
    laws.assert_agree(later.anchors[:2], first.anchors[:2], "classes that the second cohort lacks")


def test_absent_classes_damp_the_anchors_by_the_clients_full_weight():
    data = laws.toy_dataset(num_train=12)
    parts = [np.array([0, 3, 6]), np.array([1, 4, 7, 10, 2])]
    setup, fed = laws.federation(FEDFA, data=data, parts=parts, num_clients=2)
    start = setup.method.init(fed, setup.options)
    _, local = trained_clients(setup, fed, start)
    fresh = laws.federation(FEDFA, data=data, parts=parts, num_clients=2)
    after = laws.simulate(*fresh, 1)
    laws.assert_agree(after.anchors[0], 3 / 8 * local[0, 0] + 5 / 8 * start.anchors[0], "class 0")
    laws.assert_agree(after.anchors[2], 3 / 8 * start.anchors[2] + 5 / 8 * local[1, 2], "class 2")


def test_with_lambda_1_the_anchors_are_never_updated():
    setup, fed = laws.federation(FEDFA, {"anchor_decay": 1.0})
    after = laws.simulate(setup, fed, 2)
    torch.testing.assert_close(after.anchors, setup.method.init(fed, setup.options).anchors, rtol=1e-12, atol=0)


def test_every_option_matters():
    base = laws.simulate(*laws.federation(FEDFA), 2)
    others = [
        {"anchor_weight": 0.0}, {"anchor_form": "paper"}, {"anchor_decay": 0.9}, {"anchor_init": "random"},
        {"anchor_init": "fedavg-round"}, {"calibration": "epoch"}, {"calibration": "never"}, {"calibration_lr": 0.01},
        {"calibration_optimizer": "sgd"},
    ]  # fmt: skip
    for other in others:
        assert laws.distance(laws.simulate(*laws.federation(FEDFA, other), 2).params, base.params) > 1e-6, other


def test_terms_and_costs_of_a_round():
    setup, fed = laws.federation(FEDFA, cohort_size=2)
    _, entry = one_round(setup, fed, setup.method.init(fed, setup.options), fed.cohort(0))
    assert set(entry["terms"]) == {"cross_entropy", "anchor", "calibration"}
    model, anchors = fed.sizes.parameters, fed.num_classes * fed.feature_dim
    for sent in (fed.sent_down, fed.sent_up):
        assert (sent["params"], sent["other"]) == (2 * model, 2 * anchors)
    assert setup.method.client_memory(fed.sizes) == model + 3 * anchors


@pytest.mark.parametrize(
    ("protocol", "data", "shape", "classes", "count", "feature_dim"),
    [
        ("fedfa:fmnist-c2", "fmnist", (1, 28), 10, 299_306, 192),
        ("fedfa:cifar10-c2", "cifar10", (3, 32), 10, 797_962, 192),
        ("fedfa:mixed-digits", "mixed-digits", (3, 28), 10, 14_213_578, 512),
        ("fedfa:cifar100-c20", "cifar100", (3, 32), 100, 11_588_516, 256),
    ],
)
def test_networks_have_the_papers_sizes(protocol, data, shape, classes, count, feature_dim):
    name = find_protocol(protocol, FEDFA).datasets[data].backbone
    network = backbones.build(name, *shape, classes, seed=0)
    assert sum(value.numel() for value in network.parameters()) == count
    assert network.feature_dim == feature_dim
    assert {name for name, _ in network.named_parameters() if name.startswith("head")} == set(fedfa.HEAD)


def test_the_papers_values():
    setup = resolve(FEDFA, {"protocol": "fedfa:fmnist-c2", "dataset": "fmnist"}, need_data=False)
    assert setup.options == fedfa.Config(0.1, "code", 0.5, "orthogonal", "batch", "adam", 0.001)
    run = setup.run
    assert (run.num_clients, run.cohort_size, run.rounds, run.local_epochs, run.batch_size) == (100, 10, 200, 5, 64)
    assert (run.optimizer, run.lr, run.lr_decay, run.momentum, run.weight_decay) == ("sgd", 0.01, 0.99, 0.0, 1e-3)
    assert (run.validation, run.drop_last, run.backbone, str(setup.partition)) == (0.0, False, "cnn-2x32", "classes:2")
    assert (setup.setting.mean, setup.setting.std, setup.selection) == ((0.1307,), (0.3081,), "last")
    large = {"protocol": "fedfa:cifar100-alpha-0.1", "dataset": "cifar100"}
    assert resolve(FEDFA, large, need_data=False).run.momentum == 0.9
    moon = [find_protocol(f"fedfa:{name}-c2", FEDFA).method_options["moon"] for name in ("fmnist", "cifar10")]
    assert [options["contrastive_weight"] for options in moon] == [1.0, 5.0]


@pytest.mark.parametrize("protocol", fedfa.PROTOCOLS, ids=lambda protocol: protocol.name)
def test_protocols_can_be_run_by_every_method_that_they_tune(protocol):
    for data in protocol.datasets:
        for name in ("fedfa", *protocol.method_options):
            setup = resolve(find_method(name), {"protocol": protocol.name, "dataset": data}, need_data=False)
            assert setup.options == method_options(setup.method, protocol.method_options.get(name, {}))


def test_every_number_of_the_paper_has_a_cell_or_a_reason():
    cells = {}
    for table in fedfa.TABLES:
        for cell in table.cells:
            field = find_metric(cell.metric).field
            cells.setdefault((table.reported[1], cell.row, cell.column), set()).add(field)
    left_out = set()
    for table, content in reported()["FedFA"].items():
        for entry in content["rows"]:
            numbers = {field for field in ("mean", "rounds_to_target") if entry.get(field) is not None}
            if numbers - cells.get((table, entry["method"], entry["column"]), set()):
                left_out.add(f"{table}: {entry['method']}")
    in_reported = {key for key in fedfa.NOT_PLANNED if key.partition(":")[0] in reported()["FedFA"]}
    assert left_out == in_reported
    assert unaccounted(FEDFA.module, reported()["FedFA"]) == []


def test_no_cell_stands_for_a_number_the_paper_does_not_print():
    for table in fedfa.TABLES:
        cells = {(cell.row, cell.column) for cell in table.cells}
        if "Fig" in table.name:  # curves, of which no number is printed
            assert not printed(table)
        else:
            assert cells <= printed(table).keys()


def test_targets_of_table_8_are_the_papers_and_four_fifths_of_fedavgs_accuracy():
    fedavg = reported()["FedFA"]["Table 2"]["rows"]
    means = {entry["column"]: entry["mean"] for entry in fedavg if entry["method"] == "FedAvg"}
    for name, kind in (("fedfa:8", "rounds-to"), ("fedfa:8-accuracy", "reached")):
        table = find_table(name)
        for cell in table.cells:
            target = printed(table)["target accuracy", cell.column]["mean"]
            assert cell.metric == f"{kind}:{target}"
            assert cell.settings["protocol"].endswith("-iid") == cell.row.endswith("w/o skew")
            assert target == pytest.approx(0.8 * means[cell.column], abs=0.01)


def test_seeds_are_those_of_the_paper_and_one_where_it_prints_single_values():
    single = {"5", "6", "7", "F.2", "Fig12", "Fig13"}
    for table in fedfa.TABLES:
        assert table.seeds == ((2021,) if table.name.removeprefix("fedfa:") in single else (2021, 2022, 2023))


def test_every_table_with_other_methods_says_which_form_each_takes():
    for table in fedfa.TABLES:
        text = " ".join(table.notes)
        for name in {cell.method for cell in table.cells} - {"fedavg"}:
            assert find_method(name).title.split(":")[0] in text, (table.name, name)


@pytest.mark.parametrize("dataset", ["fmnist", "mixed-digits"])
def test_clients_of_the_validation_experiment_have_the_papers_images(dataset):
    protocol = find_protocol("fedfa:validation", FEDFA)
    setup = resolve(FEDFA, {"protocol": protocol.name, "dataset": dataset}, need_data=False)
    domains = np.repeat(np.arange(5), 2000)
    labels = np.tile(np.arange(10), 1000)
    parts = setup.partition(labels, setup.run.num_clients, setup.run.partition_seed, domains)
    counts = partition.count_classes(parts, labels, 10)
    assert setup.run.train_examples == 10_000
    if dataset == "fmnist":
        assert (np.sort(counts, 1)[:, -2:] == 500).all()
        assert (counts.sum(1) == 1000).all()
        assert (counts.sum(0) == 1000).all()
    else:
        assert (counts == 100).all()
        assert [set(domains[part]) for part in parts] == [{i // 2} for i in range(10)]


@pytest.mark.parametrize(("data", "shape", "count"), [("fmnist", (1, 28), 262_966), ("mixed-digits", (3, 28), 540_438)])
def test_networks_of_the_validation_experiment_have_100_features(data, shape, count):
    name = find_protocol("fedfa:validation", FEDFA).datasets[data].backbone
    network = backbones.build(name, *shape, 10, seed=0)
    assert network.feature_dim == 100
    assert sum(value.numel() for value in network.parameters()) == count


def test_with_two_classes_in_a_digit_set_each_client_has_exactly_two():
    setup = resolve(FEDFA, {"protocol": "fedfa:mixed-digits-c2", "dataset": "mixed-digits"}, need_data=False)
    labels, domains = np.tile(np.arange(10), 5 * 743), np.repeat(np.arange(5), 7430)
    parts = setup.partition(labels, setup.run.num_clients, setup.run.partition_seed, domains)
    assert ((partition.count_classes(parts, labels, 10) > 0).sum(1) == 2).all()
    assert {len(part) for part in parts} == {2 * (743 // 4)}


def test_emnist_is_offered_by_shares_as_in_the_code_and_by_writers_as_in_the_text():
    flags = {}
    for name in ("emnist", "emnist-writers"):
        given = {"protocol": f"fedfa:{name}", "dataset": "femnist-digits"}
        flags[name] = str(resolve(FEDFA, given, need_data=False).partition)
    assert flags == {"emnist": "writers:shares", "emnist-writers": "writers"}
    used = {cell.settings["protocol"] for cell in find_table("fedfa:1").cells if cell.column.startswith("EMNIST")}
    assert used == {"fedfa:emnist"}


def test_columns_on_fashion_mnist_are_run_as_the_paper_says():
    tables = ("2", "3", "5", "6", "7", "8", "8-accuracy")
    cells = [cell for name in tables for cell in find_table(f"fedfa:{name}").cells]
    on_fmnist = [cell for cell in cells if cell.settings["dataset"] == "fmnist"]
    assert len(on_fmnist) == 20 + 4 + 7 + 11 + 3 + 24 + 24
    for cell in on_fmnist:
        run = resolve(find_method(cell.method), cell.settings, need_data=False).run
        assert (run.num_clients, run.cohort_size, run.rounds, run.local_epochs, run.batch_size) == (100, 10, 200, 5, 64)
        assert (run.lr, run.lr_decay, run.momentum, run.weight_decay, run.optimizer) == (0.01, 0.99, 0, 1e-3, "sgd")
        assert (run.eval_every, run.backbone, run.train_examples) == (1, "cnn-2x32", None)
        assert cell.settings["protocol"] in {f"fedfa:fmnist-{end}" for end in ("c2", "alpha-0.1", "alpha-0.5", "iid")}


def test_table_8_and_figure_4_need_no_runs_but_those_of_tables_1_and_2(tmp_path):
    def runs(name):
        planned = plan(find_table(f"fedfa:{name}"), tmp_path).runs
        return {run.folder for run in planned}, planned

    label, mixed = runs("2")[0], runs("1")[0]
    assert runs("8")[0] | runs("8-accuracy")[0] <= label
    assert runs("Fig18")[0] <= mixed
    measured, planned = runs("Fig4")
    assert measured <= label | mixed
    assert {run.setup.run.drift_every for run in planned} == {10}


def of_the_seeds(folder, metric):
    """A metric of a committed method's three runs, [3]."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("seed-*/record.json"))]
    assert [record["seed"] for record in records] == [2021, 2022, 2023]
    return np.array(find_metric(metric).values(records))


def differences(record, other):
    """The options in which two runs differ, but for the seed and those that no result depends on."""
    config = record["config"]
    return {key for key in config if config[key] != other["config"].get(key)} - {*NOT_IN_IDENTITY}


def test_the_committed_runs_are_those_of_table_2():
    study = RECORDS / "fedfa-fmnist-c2"
    planned = plan(find_table("fedfa:2"), study, only=["FMNIST #C=2"]).runs
    found = {(run.setup.method.name, run.setup.run.seed) for run in planned if run.state == "finished"}
    methods = ("fedavg", "fedprox", "feddyn", "moon", "fedproc", "fedfa")
    assert found == {(method, seed) for method in methods for seed in (2021, 2022, 2023)}


def test_the_rounds_of_table_8_are_counted_from_0_by_the_committed_runs():
    """As the page of the study says: the accuracies printed for evenly divided images are ours of the next round."""
    study, table = RECORDS / "fedfa-fmnist-iid", find_table("fedfa:8")
    found = []
    for cell in plan(table, study).cells:
        records = [run.record for run in cell.runs if run.record]
        entry = printed(table).get((cell.cell.row, cell.cell.column))
        if len(records) == 3 and cell.cell.row.endswith("w/o skew"):
            number = entry["rounds_to_target"]
            same, following = (
                np.mean([100 * record["rounds"][place]["test_accuracy"] for record in records])
                for place in (number - 1, number)
            )
            found.append(number)
            assert abs(entry["mean"] - following) < 2 < abs(entry["mean"] - same)
            later = np.mean(find_metric(cell.cell.metric).values(records)) - number
            assert 0.5 < later < 1.5
    assert sorted(found) == [1, 2, 3, 3, 4, 6]


def test_with_shares_of_a_tenth_the_draw_moves_the_rounds_to_the_target_more_than_the_seed():
    """As the pages of the two studies say, where the paper prints 34 rounds for FedAvg and FedDyn."""
    studies = RECORDS
    table, column = find_table("fedfa:8"), "FMNIST alpha=0.1"
    (metric,) = {cell.metric for cell in table.cells if cell.column == column}

    def rounds(folder):
        found = sorted((studies / folder).glob("**/record.json"))
        return find_metric(metric).values([json.loads(path.read_text()) for path in found])

    seeds, draws = rounds("fedfa-fmnist-a0.1/fedavg"), rounds("fedfa-fmnist-a0.1-draws")
    assert len(draws) == 2
    assert max(draws) - min(draws) > max(seeds) - min(seeds)
    assert max(seeds) < min(draws) < max(draws) < 34
    for method, row in (("fedavg", "FedAvg"), ("feddyn", "FedDyn")):
        found = rounds(f"fedfa-fmnist-a0.1/{method}")
        reach = 4.303 * np.std(found, ddof=1) / math.sqrt(3)  # Student's t, two degrees of freedom, 95 %
        assert len(found) == 3
        assert np.mean(found) + reach < printed(table)[row, column]["rounds_to_target"] == 34


@pytest.mark.parametrize(
    ("study", "other"),
    [
        ("fedfa-fmnist-c2", {"fedprox", "feddyn", "moon", "fedproc"}),
        ("fedfa-fmnist-a0.1", {"moon"}),
        ("fedfa-fmnist-a0.5", set()),
    ],
)
def test_the_pages_name_the_methods_that_ran_on_another_kind_of_processor(study, other):
    processors = {}
    for path in (RECORDS / study).glob("*/seed-*/record.json"):
        processors.setdefault(path.parts[-3], set()).add(json.loads(path.read_text())["machine"]["processor"])
    (usual,) = processors["fedfa"]
    assert {method for method, names in processors.items() if usual not in names} == other
    assert all(len(names) == 1 for names in processors.values())


def test_with_two_classes_a_client_all_but_moon_are_level_with_fedavg_as_in_the_paper():
    """As the page of the study says, and what it says of the rounds to the target of Table 8."""
    study, level = RECORDS / "fedfa-fmnist-c2", ("FedAvg", "FedProx", "FedDyn", "FedProc")
    rows = *level, "MOON"
    paper = {row: printed(find_table("fedfa:2"))[row, "FMNIST #C=2"]["mean"] for row in rows}
    late = {row: of_the_seeds(study / row.lower(), "mean-of-last:50") for row in rows}
    for row in level:
        assert abs(late[row] - late["FedAvg"]).max() < 1
        assert abs(np.mean(late[row] - late["FedAvg"])) < 0.25
    assert (late["MOON"] < late["FedAvg"] - 2).all()
    for metric in ("last", "drift:feature_distance"):
        assert (of_the_seeds(study / "moon", metric) < of_the_seeds(study / "fedavg", metric)).all()
    assert all(abs(paper[row] - paper["FedAvg"]) < 0.5 for row in rows)

    table = find_table("fedfa:8")
    (metric,) = {cell.metric for cell in table.cells if cell.column == "FMNIST #C=2"}
    assert metric in (study / "intro.md").read_text()
    target = {row: printed(table)[row, "FMNIST #C=2"]["rounds_to_target"] for row in rows}
    assert target == {"FedAvg": 25, "FedProx": 25, "FedDyn": 28, "FedProc": 29, "MOON": 28}
    rounds = {row: of_the_seeds(study / row.lower(), metric) for row in rows}
    reach = {row: 4.303 * np.std(found, ddof=1) / math.sqrt(3) for row, found in rounds.items()}  # Student's t, 95 %
    assert {row for row in rows if abs(rounds[row].mean() - target[row]) > reach[row]} == {"FedDyn"}
    assert np.ptp(rounds["FedAvg"]) > 5 * np.ptp(rounds["FedDyn"])
    begins = {row: of_the_seeds(study / row.lower(), "rounds-to:30") for row in ("FedAvg", "FedProc")}
    assert (begins["FedProc"] > begins["FedAvg"]).all()


def test_with_shares_of_a_half_fedfa_fedavg_and_the_order_are_the_papers_and_the_rounds_too_counted_from_0():
    """As the page of the study says."""
    study, column = RECORDS / "fedfa-fmnist-a0.5", "FMNIST alpha=0.5"
    accuracies, rounds = printed(find_table("fedfa:2")), printed(find_table("fedfa:8"))
    for row, target in (("FedAvg", 12), ("FedProx", 13), ("FedDyn", 12), ("MOON", 13), ("FedFA", 5)):
        within, least = (0.5, 0.5) if row in ("FedAvg", "FedFA") else (2.5 if row == "MOON" else 1, 0)
        assert abs(of_the_seeds(study / row.lower(), "last").mean() - accuracies[row, column]["mean"]) < within
        assert rounds[row, column]["rounds_to_target"] == target
        assert least < of_the_seeds(study / row.lower(), "rounds-to:66.24").mean() - target < 1.5
    names = ("fedavg", "fedprox", "feddyn", "moon", "fedproc", "fedfa")
    late = {row: of_the_seeds(study / row, "mean-of-last:50") for row in names}
    assert abs(late["fedprox"] - late["fedavg"]).max() < 0.25
    assert abs(late["fedproc"] - late["fedavg"]).max() < 0.5
    begins = {row: of_the_seeds(study / row, "rounds-to:66.24") for row in ("fedavg", "fedproc")}
    assert (begins["fedproc"] > begins["fedavg"] + 3).all()
    assert rounds["FedProc", column]["rounds_to_target"] == 22
    assert (late["fedfa"] > late["fedavg"] + 5).all()
    assert (late["feddyn"] > late["fedavg"] + 1).all()
    last = {row: of_the_seeds(study / row, "last") for row in ("fedavg", "moon")}
    for found in (late, last):
        assert (found["moon"] < found["fedavg"] - 1).all()
    assert 0 < accuracies["FedAvg", column]["mean"] - accuracies["MOON", column]["mean"] < 0.1


def test_in_the_experiment_of_f2_the_accuracy_without_skew_is_the_papers_and_the_lead_depends_on_the_pairs():
    """As the page of the study says."""
    study, column = RECORDS / "fedfa-fmnist-validation", "validation label skew FMNIST, 15 rounds"
    rows = ("FedAvg", "FedProx", "FedDyn", "MOON", "FedProc", "FedFA")
    paper = {row: printed(find_table("fedfa:F.2"))[row, column]["mean"] for row in (*rows, "FedAvg without skew")}

    def found(metric, name):
        return find_metric(metric).values(find_records([study / name]))[0]

    last = {row: found("last", row.lower()) - paper[row] for row in rows}
    assert abs(found("last", "fedavg-iid") - paper["FedAvg without skew"]) < 0.5
    assert all(9.5 < last[row] < 11.5 for row in ("FedAvg", "FedProx", "MOON", "FedProc"))
    assert last["FedFA"] < 0 < last["FedDyn"] < 5
    assert found("least-of-last:5", "fedavg-other-pairs") > paper["FedAvg"] + 8
    settings = [f"../fedfa-fmnist-validation-settings/{name}" for name in ("batch-128", "no-decay", "linear", "relu")]
    for names in (["fedavg", "fedavg-other-pairs", "fedavg-separate-pairs"], ["fedavg", *settings]):
        above = [found("last", name) - paper["FedAvg"] for name in names]
        assert min(above) == above[-1] > 5
    assert max(above) == above[3] > above[0]  # the network of Table 4 to the letter is furthest
    leads = [found("mean-of-last:5", f"fedfa{pairs}") - found("mean-of-last:5", f"fedavg{pairs}")
             for pairs in ("-separate-pairs", "", "-other-pairs")]  # fmt: skip
    assert 5 < leads[0] < leads[1] < leads[2] - 5 < paper["FedFA"] - paper["FedAvg"]
    for pairs, different in (("", 10), ("-other-pairs", 10), ("-separate-pairs", 5)):
        for record in find_records([study / f"fedavg{pairs}", study / f"fedfa{pairs}"]):
            counts = record["partition"]["class_counts"]
            assert all(sorted(own)[-3:] == [0, 500, 500] for own in counts)
            assert len({tuple(own) for own in counts}) == different  # five pairs of ten classes: none is in two


def test_each_run_with_other_settings_in_the_experiment_of_f2_changes_what_its_page_says():
    (usual,) = find_records([RECORDS / "fedfa-fmnist-validation" / "fedavg"])
    changes = {
        "batch-128": {"batch_size": 128},
        "no-decay": {"lr_decay": 1, "weight_decay": 0},
        "linear": {"backbone": "cnn-2x32-100-linear"},
        "relu": {"backbone": "cnn-2x32"},
    }
    for name, changed in changes.items():
        (record,) = find_records([RECORDS / "fedfa-fmnist-validation-settings" / name])
        assert {key: value for key, value in record["config"].items() if value != usual["config"][key]} == changed


def test_of_fedfas_parts_calibration_brings_the_most_and_moving_anchors_some_with_every_seed():
    """As the page of the study says."""
    study, records = RECORDS / "fedfa-fmnist-c2-parts", RECORDS / "fedfa-fmnist-c2"
    still = find_records([RECORDS / "fedfa-fmnist-c2-momentum" / "lambda-1", study / "no-updating"])
    whole = {record["seed"]: record for record in find_records([records / "fedfa"])}
    assert [(record["seed"], record["config"]["anchor_decay"]) for record in still] == [(2021, 1), (2022, 1), (2023, 1)]
    alone = find_records([study / "no-calibration"])
    starts = find_records([study / "random-start"])
    for option, found in {"anchor_decay": still, "calibration": alone, "anchor_init": starts}.items():
        assert [differences(record, whole[record["seed"]]) for record in found] == 3 * [{option}]
        assert [record["seed"] for record in found] == [2021, 2022, 2023]
    assert {record["config"]["calibration"] for record in alone} == {"never"}
    assert {record["config"]["anchor_init"] for record in starts} == {"random"}
    for metric in ("last", "mean-of-last:50"):
        lead = np.array(find_metric(metric).values(starts)) - of_the_seeds(records / "fedfa", metric)
        assert abs(lead).max() < 0.5
        assert min(lead) < 0 < max(lead) or metric == "mean-of-last:50"
    for metric in ("last", "mean-of-last:50"):
        fedavg, fedfa, alone = (of_the_seeds(folder, metric) for folder in (
            records / "fedavg", records / "fedfa", study / "no-calibration"
        ))  # fmt: skip
        anchored = np.array(find_metric(metric).values(still))
        assert (fedavg < alone).all()
        assert (alone < anchored).all()
        assert (anchored < fedfa).all()


def test_the_more_often_the_classifier_is_calibrated_the_better_and_ccvr_brings_more_than_printed():
    """As the page of the study says."""
    study, column = RECORDS / "fedfa-fmnist-c2-phases", "FMNIST #C=2 accuracy"
    paper = {row: entry["mean"] for (row, found), entry in printed(find_table("fedfa:5")).items() if found == column}
    records = {name: find_records([study / name])[0] for name in ("fedavg", "never", "epoch", "batch")}
    for name, record in records.items():
        assert record["config"].get("calibration", "fedavg") == name
        assert (record["seed"], record["config"]["post"]) == (2021, None if name == "epoch" else "ccvr")
        assert record["hardware"]["name"] == "AMD EPYC"
    assert differences(records["batch"], records["never"]) == {"calibration"}
    assert differences(records["epoch"], records["batch"]) == {"calibration", "post"}

    def found(metric, *names):
        return np.array([find_metric(metric).values([records[name]])[0] for name in names])

    for metric in ("last", "mean-of-last:50"):
        fedavg, never, epoch, batch = found(metric, *records)
        assert fedavg < never < epoch - 2
        assert epoch < batch - 1
    after = found("post", "fedavg", "never", "batch")
    gain = after - found("last", "fedavg", "never", "batch")
    rows = (
        ("FedAvg w/ CCVR", "FedAvg"),
        ("FedFA w/o CC but w/ CCVR", "FedFA w/o CC"),
        ("FedFA w/ CC and CCVR", "FedFA"),
    )
    there = [paper[row] - paper[before] for row, before in rows]
    assert there[0] > 2 > 0.2 > max(there[1:])
    assert gain[0] > gain[1] > 2 > gain[2] > 1
    assert after[1] < found("last", "batch") - 2
    order = ["FedFA", "FedFA w/ CC at the end of each local epoch", "FedFA w/o CC but w/ CCVR", "FedFA w/o CC"]
    assert [row for row in sorted(paper, key=paper.get, reverse=True) if row in order] == order


def test_neither_other_seeds_nor_other_pairs_make_the_accuracy_printed_in_f2_likely():
    """As the page of the study says."""
    usual, study = RECORDS / "fedfa-fmnist-validation", RECORDS / "fedfa-fmnist-validation-chance"
    paper = printed(find_table("fedfa:F.2"))["FedAvg", "validation label skew FMNIST, 15 rounds"]["mean"]
    seeds = find_records([usual / "fedavg", study / "seeds"])
    pairs = find_records([usual / "fedavg-other-pairs", study / "pairs"])
    assert [record["seed"] for record in seeds] == [*range(2021, 2027)]

    draw, labels = partition.from_flag("classes:2"), np.repeat(np.arange(10), 1000)
    drawn = {seed: partition.count_classes(draw(labels, 10, seed), labels, 10).tolist() for seed in range(3, 18)}
    of_two = {seed: counts for seed, counts in drawn.items() if all(own.count(500) == 2 for own in counts)}
    assert {record["config"]["partition_seed"]: record["partition"]["class_counts"] for record in pairs} == of_two
    assert len(pairs) == len(seeds) == 6

    told = []
    for records, differing in ((seeds, set()), (pairs, {"partition_seed", "partition"})):
        for record in records:
            assert differences(record, seeds[0]) == differing
            assert record["seed"] == 2021 or not differing
        last = find_metric("last").values(records)
        reach = 2.571 * np.std(last, ddof=1) * math.sqrt(1 + 1 / 6)  # Student's t, five degrees of freedom, 95 %
        told += [np.mean(last) - reach, np.mean(last) + reach]
        assert paper < told[-2] < min(last)
    text = (study / "intro.md").read_text()
    assert re.findall(r"`(\d+\.\d)`", text) == [f"{number:.1f}" for number in told]


def test_below_1_the_momentum_of_the_anchors_makes_no_difference_and_at_1_it_costs():
    """As the page of the study says."""
    study, values = RECORDS / "fedfa-fmnist-c2-momentum", [f"{tenths / 10:g}" for tenths in range(10)]
    records = {value: find_records([study / f"lambda-{value}"]) for value in values}
    paper = {value: printed(find_table("fedfa:6"))["FedFA", f"lambda={value}"]["mean"] for value in values}

    def ends(found):
        return min(found, key=found.get), max(found, key=found.get)

    late, last = (
        {value: find_metric(metric).values(records[value])[0] for value in values}
        for metric in ("mean-of-last:50", "last")
    )
    assert (ends(late), ends(last), ends(paper)) == (("0.1", "0.6"), ("0.4", "0.8"), ("0.4", "0.9"))
    assert max(abs(last[value] - paper[value]) for value in values) < 0.5
    (still,) = find_records([study / "lambda-1"])
    (late_still,) = find_metric("mean-of-last:50").values([still])
    assert 2 < late["0.5"] - late_still < 3
    fedavg = of_the_seeds(RECORDS / "fedfa-fmnist-c2" / "fedavg", "mean-of-last:50")[0]
    assert late_still - fedavg > (late["0.5"] - fedavg) / 2
    assert still["config"]["anchor_decay"] == 1
    for value, (record,) in records.items():
        assert (record["config"]["anchor_decay"], record["hardware"]["name"]) == (float(value), "NVIDIA H200")


TUNED = {"fedavg": None, "fedprox": "proximal_weight", "feddyn": "alpha", "moon": "contrastive_weight",
         "fedfa": "anchor_weight"}  # fmt: skip


@pytest.mark.parametrize(("name", "count"), [("fedavg", 5), ("fedprox", 9), ("moon", 9), ("feddyn", 12), ("fedfa", 12)])
def test_options_were_tuned_as_the_page_of_the_study_says(name, count):
    study, usual, weight = RECORDS / "fedfa-fmnist-c2-tuned", RECORDS / "fedfa-fmnist-c2", TUNED[name]
    about = json.loads((study / name / "tuned.json").read_text())
    assert (about["seed"], about["rounds"], about["validation"]) == (1000, 30, 0.2)
    trials = {tuple(one["options"].values()): one["validation_accuracy"] for one in about["trials"]}
    chosen = about["options"]
    assert len(trials) == len(about["trials"]) == count
    assert trials[tuple(chosen.values())] == max(found for found in trials.values() if found is not None)
    rates = {"fedavg": {0.003, 0.01}, "feddyn": {1}, "fedfa": {0.01}}.get(name, set()) | {0.03, 0.1, 0.3}
    assert min(rates) < chosen["lr"] < max(rates)
    weights = [(0.1, 1, 10) if name == "moon" else (0.01, 0.1, 1)] * (weight is not None)
    assert {*trials} == {*itertools.product(rates, *weights)}
    assert all(found is None for trial, found in trials.items() if trial[0] == 0.3) == (name != "feddyn")
    if weight is not None:
        assert chosen[weight] == min(*weights)
        alike = sorted(found for trial, found in trials.items() if trial[0] == chosen["lr"])
        assert (alike[-1] - alike[-2] < 0.01) == (name in ("fedprox", "fedfa"))
    if name == "moon":
        assert all(trials[rate, 0.1] > trials[rate, 1] > trials[rate, 10] for rate in (0.03, 0.1))
    for record, other in zip(find_records([study / name]), find_records([usual / name]), strict=True):
        assert record["seed"] == other["seed"] != 1000
        assert differences(record, other) == {*chosen}
        assert {option: record["config"][option] for option in chosen} == chosen
        assert {key for key, origin in record["origin"].items() if origin.startswith("tuned by val")} == {*chosen}
        assert record["hardware"]["name"] == "NVIDIA H100 80GB HBM3"
        assert other["hardware"]["device"] == "cpu"


def test_tuned_fedfa_keeps_less_than_a_third_of_its_lead_on_fedavg_and_feddyn_is_close():
    """As the page of the study says."""
    study, usual = RECORDS / "fedfa-fmnist-c2-tuned", RECORDS / "fedfa-fmnist-c2"

    def found(metric, folder=study):
        return {name: of_the_seeds(folder / name, metric) for name in TUNED}

    late, last, before = found("mean-of-last:50"), found("last"), found("mean-of-last:50", usual)
    for one in (late, last):
        assert (one["fedfa"] > one["fedavg"]).all()
    assert 0 < np.mean(late["fedfa"] - late["fedavg"]) < np.mean(before["fedfa"] - before["fedavg"]) / 3
    gains = {name: np.mean(late[name] - before[name]) for name in TUNED}
    assert sorted(gains, key=gains.get)[:2] == ["fedfa", "fedavg"]
    assert sorted(TUNED, key=lambda name: late[name].mean())[-2:] == ["feddyn", "fedfa"]
    assert (late["feddyn"] < late["fedfa"]).all()
    assert sum(last["feddyn"] > last["fedfa"]) == 1
    for one in (late, last):
        assert abs(one["fedprox"] - one["fedavg"]).mean() < 1
        assert min(one["fedprox"] - one["fedavg"]) < 0 < max(one["fedprox"] - one["fedavg"])
    assert (late["moon"] < late["fedavg"]).all()
    rounds, moves = found("rounds-to:59.682666"), found("deviation-of-last:50")
    assert any(rounds["fedfa"] >= rounds["fedavg"])
    assert all((moves["fedfa"] < moves[name]).all() for name in TUNED if name != "fedfa")
    clipped, feddyn = find_records([study / "feddyn-alpha-0"]), find_records([study / "feddyn"])
    assert [differences(*pair) for pair in zip(clipped, feddyn, strict=True)] == 3 * [{"alpha"}]
    for record in (*clipped, *feddyn):
        config = record["config"]
        assert (config["form"], config["clip_norm"]) == ("simplified", 10)
        assert (config["alpha"] == 0) == (record["hardware"]["device"] == "cpu")


def test_the_start_of_the_anchors_makes_no_difference_in_the_last_round():
    """As the page of the study says, and what it says of the rounds before."""
    study, paper = RECORDS / "fedfa-fmnist-c2-momentum", printed(find_table("fedfa:7"))
    starts = {
        "FedFA (lambda=0.9)": ("lambda-0.9", "orthogonal"),
        "FedFA random init": ("lambda-0.9-random", "random"),
        "FedFA init from one FedAvg round": ("lambda-0.9-fedavg-round", "fedavg-round"),
    }
    records = {row: find_records([study / name]) for row, (name, _) in starts.items()}
    (orthogonal,) = records["FedFA (lambda=0.9)"]
    for row, (_, start) in starts.items():
        (record,) = records[row]
        assert (record["config"]["anchor_init"], record["config"]["anchor_decay"]) == (start, 0.9)
        assert differences(record, orthogonal) <= {"anchor_init"}

    def found(metric):
        return [find_metric(metric).values(own)[0] for own in records.values()]

    last, late, target = found("last"), found("mean-of-last:50"), found("rounds-to:59.682666")
    assert np.ptp(last) == last[1] - last[0]
    assert (
        max(abs(value - paper[row, "accuracy"]["mean"]) for row, value in zip(starts, last, strict=True))
        < np.ptp(last) + 0.01
    )
    assert target[2] == max(target) > 2 * min(target)
    assert late[2] == min(late) < late[0] < late[1]


def test_fedproc_of_the_code_is_level_with_fedavg_as_in_the_paper_and_moon_and_that_of_the_text_behind():
    """As the page of the study says, which also has FedAvg, FedProx and FedDyn above what is printed."""
    study = RECORDS / "fedfa-fmnist-a0.1"
    paper = {row: entry["mean"] for (row, column), entry in printed(find_table("fedfa:2")).items() if "=0.1" in column
             and column.startswith("FMNIST")}  # fmt: skip

    def found(metric, method):
        return of_the_seeds(study / method, metric)

    late = {
        method: found("mean-of-last:50", method)
        for method in ("fedavg", "fedprox", "feddyn", "moon", "fedproc", "fedproc-text")
    }
    assert (late["fedproc-text"] < late["fedavg"] - 3).all()
    assert abs(late["fedproc"] - late["fedavg"]).max() < 0.5
    target = [found("rounds-to:55.85066", method).mean() for method in ("fedavg", "fedproc", "fedproc-text")]
    assert target == sorted(target)
    rounds = printed(find_table("fedfa:8"))
    there = [rounds[row, "FMNIST alpha=0.1"]["rounds_to_target"] for row in ("FedProc", "FedAvg")]
    assert there == [32, 34]
    assert abs(paper["FedProc"] - paper["FedAvg"]) < 0.5
    assert (late["moon"] < late["fedavg"] - 2).all()
    assert (found("last", "moon") < found("last", "fedavg")).all()
    assert (found("rounds-to:55.85066", "moon") == found("rounds-to:55.85066", "fedavg")).all()
    assert min(paper, key=paper.get) == "MOON"
    assert rounds["MOON", "FMNIST alpha=0.1"]["rounds_to_target"] == 34
    for row in ("FedAvg", "FedProx", "FedDyn"):
        assert abs(late[row.lower()] - late["fedavg"]).max() < 1.5
        assert found("last", row.lower()).mean() > paper[row]


def test_dirichlet_shares_are_drawn_by_the_runs_seed_and_other_divisions_by_that_of_the_code():
    for cell in (cell for table in fedfa.TABLES for cell in table.cells):
        run = resolve(find_method(cell.method), {**cell.settings, "seed": 2022}, need_data=False).run
        drawn = 3 if run.dataset == "mixed-digits" else 2022
        assert run.partition_seed == (drawn if "dirichlet" in run.partition else 1), cell


def test_committed_runs_of_one_division_are_of_no_cell_but_still_tell_of_the_claim():
    """Runs from before the shares were drawn by the run's seed, with the seed 1 for all of them."""
    records = find_records([RECORDS / "fedfa-fmnist-a0.1", RECORDS / "fedfa-fmnist-a0.5"])
    assert {record["config"]["partition_seed"] for record in records} == {1}
    assert not [record for record in records if printed_by_table(record)]
    (claim,) = (one for one in fedfa.CLAIMS if one.name == "fedfa:best-other")
    answer = claims.answer(claim, claims.by_method([RECORDS / "fedfa-fmnist-a0.1"]), lambda name: True)
    assert (answer.verdict, answer.evidence[0].seeds) == ("reproduced", (2021, 2022, 2023))
    assert answer.evidence[0].reduced == "another partition seed"


def test_clipping_shortens_the_step_of_alignment_and_not_that_of_calibration():
    setup, fed = laws.federation(FEDFA, {"clip_norm": 1e-12}, weight_decay=0.0)
    first = setup.method.init(fed, setup.options)
    state, _ = setup.method.run_round(first, fed.cohort(0), fed, setup.options)
    moved = {name: float((value - first.params[name]).abs().max()) for name, value in state.params.items()}
    for name, distance in moved.items():
        assert (distance > 1e-4) == (name in fedfa.HEAD), (name, distance)


def test_laws_hold_with_clipped_gradients():
    assert_laws(FEDFA, clip_norm=0.5)
