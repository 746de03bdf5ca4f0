"""CCVR: pooled statistics against the pooled features, the draws, retraining, and the step after a run."""

import json

import numpy as np
import pytest
import torch

import fedcli
from fedcli import registry, toy
from fedcli.papers.baselines import ccvr
from fedcli.results.method_options import parse_set
from fedcli.results.metrics import find_metric
from fedcli.results.tune import plan_trials
from fedcli.runs import identity, resume
from fedcli.runs.record import params_hash, read_record
from fedcli.runs.resolve import resolve
from tests import laws
from tests.run_options import FEW_DIGITS
from tests.tensors import randn
from tests.user_errors import raises_user_error

C, D = 4, 3
FOUR_CLIENTS = {
    **FEW_DIGITS, "protocol": "fedfa:digits", "train_examples": 200, "num_clients": 4, "cohort_size": 2, "rounds": 2,
    "local_epochs": 1,
}  # fmt: skip
STEP = {"post": "CCVR", "ccvr_examples": 50, "ccvr_lr": 0.05}


def features_of_clients():
    """Three clients' features and labels: class 2 has one example at client 1, class 3 nobody has, client 2 nothing."""
    labels = [torch.tensor([0, 0, 1, 0, 1]), torch.tensor([1, 2, 0, 1]), torch.tensor([], dtype=torch.long)]
    features = [
        randn(len(labels_of_client), D, seed=client) + labels_of_client[:, None]
        for client, labels_of_client in enumerate(labels)
    ]
    return features, labels


def statistics():
    features, labels = features_of_clients()
    return [
        ccvr.client_statistics(features_of_client, labels_of_client, C)
        for features_of_client, labels_of_client in zip(features, labels, strict=True)
    ]


def test_pooled_statistics_are_those_of_the_pooled_features():
    features, labels = map(torch.cat, features_of_clients())
    counts, means, covariances = ccvr.pool(iter(statistics()))
    assert counts.tolist() == [4, 4, 1, 0]

    for c in (0, 1, 2):
        features_of_class = features[labels == c]
        torch.testing.assert_close(means[c], features_of_class.mean(0), rtol=1e-12, atol=1e-12)
        expected = features_of_class.T.cov() if c < 2 else torch.zeros(D, D)
        torch.testing.assert_close(covariances[c], expected.to(features_of_class), rtol=1e-12, atol=1e-12)
    assert (means[3] == 0).all()
    assert (covariances[3] == 0).all()


def test_drawn_features_have_the_mean_and_the_covariance_they_should():
    root = torch.tensor([[1.0, 0.0, 0.0], [2.0, 3.0, 0.0], [1.0, -1.0, 0.0]], dtype=torch.float64)  # of rank 2
    mean = torch.tensor([1.0, -2.0, 5.0], dtype=torch.float64)
    covariance = root @ root.T
    normal = randn(3000, D)
    normal = normal - normal.mean(0)
    normal = normal @ torch.linalg.inv(torch.linalg.cholesky(normal.T.cov())).T  # mean 0 and covariance 1, exactly
    drawn = ccvr.draw_features(mean, covariance, normal)
    torch.testing.assert_close(drawn.mean(0), mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(drawn.T.cov(), covariance, rtol=1e-10, atol=1e-10)

    negative = covariance - 1e-14 * torch.eye(D, dtype=torch.float64)  # as rounding leaves it
    assert torch.isfinite(ccvr.draw_features(mean, negative, normal)).all()


def test_features_are_drawn_of_the_classes_somebody_has_and_by_the_seed():
    pooled = ccvr.pool(statistics())
    features, labels = ccvr.virtual_features(pooled, 5, seed=3)
    assert labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    torch.testing.assert_close(features[10:], pooled.means[2].expand(5, D))  # of one example: no covariance
    assert not torch.equal(features[0], features[1])
    assert not torch.equal(features[:5] - pooled.means[0], features[5:10] - pooled.means[1])
    again, _ = ccvr.virtual_features(pooled, 5, seed=3)
    of_another_seed, _ = ccvr.virtual_features(pooled, 5, seed=4)
    assert torch.equal(features, again)
    assert not torch.equal(features, of_another_seed)


def toy_federation(**run):
    """A federation and its first model's parameters and buffers."""
    _, fed = toy.federation("fedavg", **run)
    return fed, *fed.initial_model()


def config(**options):
    return ccvr.Config(**{"ccvr_examples": 20, "ccvr_epochs": 2, "ccvr_lr": 0.1, "ccvr_batch_size": 8, **options})


def test_retraining_is_plain_sgd_on_the_classifier_and_moves_nothing_else():
    fed, params, _ = toy_federation()
    features = randn(6, fed.feature_dim)
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    after = ccvr.retrain(params, features, labels, fed, config(ccvr_batch_size=4, ccvr_epochs=3, ccvr_momentum=0.5))
    head = torch.nn.Linear(fed.feature_dim, 3, dtype=torch.float64)
    head.load_state_dict({"weight": params["head.weight"], "bias": params["head.bias"]})
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.5)
    for epoch in range(3):
        order = fed.generator("ccvr order", epoch).permutation(6)
        for index in (order[:4], order[4:]):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(head(features[index]), labels[index]).backward()
            optimizer.step()
    trained = {"head.weight": head.weight.detach(), "head.bias": head.bias.detach()}
    laws.assert_agree(after, {**params, **trained}, "the model")


def test_what_is_drawn_follows_the_features_of_the_clients_training_parts(monkeypatch):
    fed, params, buffers = toy_federation(parts=toy.toy_parts((2, 0, 31, 1)), validation=0.1)
    virtual_features = ccvr.virtual_features
    calls = []

    def watched(pooled, *more):
        calls.append(pooled)
        return virtual_features(pooled, *more)

    monkeypatch.setattr(ccvr, "virtual_features", watched)
    after, _, floats = ccvr.apply(params, buffers, fed, config(ccvr_epochs=0))
    assert toy.distance(after, params) == 0  # without retraining it is the model before
    (pooled,) = calls

    used = [part for part in fed.training if len(part)]
    assert sum(map(len, used)) == 34 - 3  # a tenth of the third client's is held out
    features, _, labels = fed.predict(params, buffers, np.concatenate(used))
    for c in range(3):
        torch.testing.assert_close(pooled.covariances[c], features[labels == c].T.cov(), rtol=1e-9, atol=1e-12)

    floats_of_clients = 0
    for part in used:
        counts = torch.bincount(fed.engine.labels[part], minlength=3)
        floats_of_clients += ccvr.floats_sent(counts, fed.feature_dim)
    assert floats == round(floats_of_clients / 4)


@pytest.mark.parametrize("run", [{"parts": toy.toy_parts((1, 0, 0, 0))}, {"data": toy.toy_dataset(absent=(1,))}])
def test_a_single_example_and_a_class_without_examples_leave_finite_models(run):
    fed, params, buffers = toy_federation(**run)
    after, _, floats = ccvr.apply(params, buffers, fed, config())
    assert all(torch.isfinite(value).all() for value in after.values())
    assert floats > 0


def test_the_rounds_and_the_hash_are_those_without_the_step(tmp_path):
    plain = fedcli.run("fedavg", out=tmp_path / "plain", **FOUR_CLIENTS)
    after = fedcli.run("fedavg", out=tmp_path / "post", **FOUR_CLIENTS, **STEP)
    assert after.record["summary"] == plain.record["summary"]
    assert after.record["summary"]["params_sha256"] == params_hash(after.state.params)

    post = after.record["post"]
    assert post["name"] == "ccvr"
    assert post["hash"] == registry.find_post("ccvr").file_hash
    assert post["test_accuracy"] != plain.record["summary"]["last"]
    assert find_metric("post").read_value(after.record) == 100 * post["test_accuracy"]
    assert find_metric("post").read_value(plain.record) is None

    written = json.loads((after.path / "record.json").read_text())
    assert written["post"] == post
    assert written["config"]["ccvr_examples"] == 50
    assert written["origin"]["ccvr_epochs"] == "default"
    assert not any(name.startswith("ccvr") for name in plain.record["config"])


def interrupted(*arguments):
    raise KeyboardInterrupt


def test_a_run_that_ends_in_the_step_can_be_resumed(tmp_path, monkeypatch):
    whole = fedcli.run("fedavg", out=tmp_path / "whole", **FOUR_CLIENTS, **STEP)
    with monkeypatch.context() as patch:
        patch.setattr(ccvr, "retrain", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fedcli.run("fedavg", out=tmp_path / "killed", **FOUR_CLIENTS, **STEP)
    again = resume.resume(tmp_path / "killed")
    assert again.record["status"] == "finished"
    assert {**again.record["post"], "seconds": 0} == {**whole.record["post"], "seconds": 0}


OWN_STEP = """
from dataclasses import dataclass
from fedcli import Post, option

@dataclass(frozen=True)
class Config:
    NAME: float = option(0.5, "Share", low=0)

def apply(params, buffers, fed, config):
    return RETURNED, buffers, FLOATS

POST = Post("own", "A step of one's own", Config, apply)
"""


def run_with_own_step(folder, name="share", returned="params", floats="0"):
    text = OWN_STEP.replace("NAME", name).replace("RETURNED", returned).replace("FLOATS", floats)
    (folder / "own.py").write_text(text)
    return fedcli.run("fedavg", out=folder / "run", post=f"{folder}/own.py:POST", **FOUR_CLIENTS)


def test_the_options_of_a_step_of_ones_own_are_known_as_those_of_others(tmp_path):
    """They are known where runs are compared, and where options of single methods are given."""
    record = run_with_own_step(tmp_path).record
    method = registry.find_method("fedavg")
    assert not identity.outdated(record, method)
    settings = identity.settings_of(record)
    assert settings["share"] == 0.5
    plan = identity.planned_settings(resolve(method, FOUR_CLIENTS))
    assert identity.differences_from_plan(record, settings, plan, "selected") == {}
    plan_with_step = identity.planned_settings(resolve(method, {**FOUR_CLIENTS, "post": f"{tmp_path}/own.py:POST"}))
    assert identity.differences_from_plan(record, settings, plan_with_step, "selected") == {}

    options = {**FOUR_CLIENTS, "post": f"{tmp_path}/own.py:POST"}
    run = fedcli.run("fedavg", out=tmp_path / "set", set={"fedavg": {"share": 0.25}}, **options)
    assert run.record["config"]["share"] == 0.25
    methods = {"fedavg": method}
    assert parse_set(methods, ["fedavg:share=0.75"], options["post"]) == {"fedavg": {"share": 0.75}}
    # Also where --post has several values.
    assert parse_set(methods, ["share=0.75"], ("ccvr", options["post"])) == {"fedavg": {"share": 0.75}}
    with raises_user_error("unknown option of 'fedavg' '--share'"):
        parse_set(methods, ["fedavg:share=0.75"])
    trials = plan_trials("fedavg", {**options, "validation": 0.2}, grid=["share=0.25,0.75"], out=tmp_path / "tuned")
    assert len(trials.runs) == 2


@pytest.mark.parametrize("name", ["lr", "num_clients", "grid"])
def test_a_step_whose_option_has_the_name_of_another_is_refused(name, tmp_path):
    with raises_user_error(f"the option name '{name}' of the step 'own' is that of"):
        run_with_own_step(tmp_path, name)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("floats", ["12.5", "__import__('torch').tensor(12.4)", "__import__('numpy').int64(12)"])
def test_a_step_may_return_a_mean_of_floats(floats, tmp_path):
    run = run_with_own_step(tmp_path, floats=floats)
    assert read_record(run.path)["post"]["floats_up"] == 12


def test_a_step_that_loses_a_parameter_is_refused_by_its_name(tmp_path):
    lost = "{name: value for name, value in params.items() if name != 'head.bias'}"
    words = "the step 'own' returns another model than it was given (got no tensor for 'head.bias', which has (10,))"
    with raises_user_error(words):
        run_with_own_step(tmp_path, returned=lost)
