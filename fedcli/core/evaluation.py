"""Accuracy of a method's models, measured as its protocol does.

    server     on the official test images: the global model, or every client's own model and their mean
    clients    on every client's own test part, pooled over the clients; a global model is tested on each part
    domains    every client's model on every domain's test images: its own (intra) and the others (inter)

A method that classifies by the nearest prototype has that as its headline and the classifier's accuracy beside it.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcli.core.clients import Network, Params
from fedcli.core.federation import Federation
from fedcli.registry import Method

NOTHING = {"test_accuracy": None, "validation_accuracy": None, "clients": None, "domains": None}


class Model(NamedTuple):
    """One model that is tested."""

    network: Network
    params: Params
    buffers: Params


class Hits(NamedTuple):
    """Whether a model is right for each of some images, `[n]` bool on the CPU."""

    classifier: Tensor
    prototype: Tensor | None  # by the nearest prototype; None where the method has none

    @property
    def headline(self) -> Tensor:
        """By the rule of the method."""
        return self.classifier if self.prototype is None else self.prototype


Score = Callable[[Model, np.ndarray | None], Hits]  # of a model on training positions or all test images


def top_k(scores: Tensor, labels: Tensor, k: int) -> Tensor:
    """Whether the label is among the k classes with the highest scores.

    Args:
        scores: `[n, C]`.
        labels: `[n]`.
        k: At least 1; with k >= C everything is right.

    Returns:
        `[n]`, bool.
    """
    best = scores.topk(min(k, scores.shape[1]), 1).indices if k > 1 else scores.argmax(1, keepdim=True)
    return (best == labels[:, None]).any(1)


def nearness(features: Tensor, prototypes: Tensor, has_class: Tensor) -> Tensor:
    """Minus the squared distance of features `[n, D]` to prototypes `[C, D]`; minus infinity for an absent class."""
    distances = torch.cdist(features, prototypes, compute_mode="donot_use_mm_for_euclid_dist").square()
    return torch.where(has_class, -distances, -torch.inf)


def evaluate(fed: Federation, method: Method, state: Any) -> dict[str, Any]:
    """Accuracies of the models in a method's state, as fractions.

    Returns:
        `test_accuracy`, the protocol's headline; `validation_accuracy`, pooled over the clients' held-out examples
        (None without any); `clients`, mean, standard deviation and worst over the clients (of their own test parts
        under `clients`, of the tests of their own models under `server`, else of their validation examples);
        `domains`, test accuracy of each domain (None without domains). Under `domains` also `intra` and `inter`, by
        the client's own domain. With prototypes also `classifier_accuracy`.
    """
    prototypes = method.prototypes(state) if method.prototypes else None

    def score(model: Model, index: np.ndarray | None) -> Hits:
        features, logits, labels = fed.predict(model.params, model.buffers, index, model.network)
        by_classifier = top_k(logits, labels, fed.top_k)
        if prototypes is None:
            return Hits(by_classifier, None)
        near = nearness(features, *(tensor.cpu() for tensor in prototypes))
        return Hits(by_classifier, top_k(near, labels, fed.top_k))

    measured = {"server": _on_test_images, "clients": _on_own_parts, "domains": _on_domains}[fed.evaluation]
    result = {**NOTHING, **measured(fed, method, state, score)}
    return {**result, **_validation(fed, method, state, score, result["clients"])}


def models(fed: Federation, method: Method, state: Any) -> Iterator[tuple[int, Model]]:
    """Every client's id and model: its own, its initial one before it has taken part, or the global one."""
    if method.personal is None:
        shared = Model(fed.network, *method.model(state))
        yield from ((client, shared) for client in range(fed.num_clients))
        return
    own = method.personal(state)
    for client in range(fed.num_clients):
        network = fed.networks[fed.architecture[client]]
        params, buffers = own[client] if client in own else fed.initial_model(network)
        to_device = {name: value.to(fed.device) for name, value in params.items()}
        yield client, Model(network, to_device, {name: value.to(fed.device) for name, value in buffers.items()})


def spread(accuracies: list[float]) -> dict[str, float]:
    """Mean, standard deviation over the clients, and worst."""
    values = np.array(accuracies)
    return {"mean": float(values.mean()), "std": float(values.std()), "worst": float(values.min())}


def _fraction(hits: Tensor) -> float:
    return hits.double().mean().item()


def _beside(name: str, hits: list[Hits]) -> dict[str, float]:
    """The classifier's accuracy, mean over `hits`, where the headline is another one."""
    if any(each.prototype is None for each in hits):
        return {}
    return {name: float(np.mean([_fraction(each.classifier) for each in hits]))}


def _by_domain(fed: Federation, hits: Tensor) -> dict[str, float] | None:
    """Accuracy of each domain's test images."""
    if fed.test_domains is None:
        return None
    return {name: _fraction(hits[fed.test_domains == d]) for d, name in enumerate(fed.domain_names)}


def _on_test_images(fed: Federation, method: Method, state: Any, score: Score) -> dict[str, Any]:
    if method.personal is None:
        hits = score(Model(fed.network, *method.model(state)), None)
        found = {"test_accuracy": _fraction(hits.headline), "domains": _by_domain(fed, hits.headline)}
        return {**found, **_beside("classifier_accuracy", [hits])}
    hits = [score(model, None) for _, model in models(fed, method, state)]
    own = [_fraction(each.headline) for each in hits]
    by_domain = [_by_domain(fed, each.headline) for each in hits]
    domains = {name: float(np.mean([one[name] for one in by_domain])) for name in by_domain[0] or ()} or None
    found = {"test_accuracy": float(np.mean(own)), "clients": spread(own), "domains": domains}
    return {**found, **_beside("classifier_accuracy", hits)}


def _on_own_parts(fed: Federation, method: Method, state: Any, score: Score) -> dict[str, Any]:
    hits = [
        score(model, fed.testing[client]) for client, model in models(fed, method, state) if len(fed.testing[client])
    ]
    pooled = torch.cat([each.headline for each in hits])
    found = {"test_accuracy": _fraction(pooled), "clients": spread([_fraction(each.headline) for each in hits])}
    if hits[0].prototype is not None:
        found["classifier_accuracy"] = _fraction(torch.cat([each.classifier for each in hits]))
    return found


def _on_domains(fed: Federation, method: Method, state: Any, score: Score) -> dict[str, Any]:
    matrix = [_by_domain(fed, score(model, None).headline) for _, model in models(fed, method, state)]  # [N][domain]
    intra, inter = {}, {}
    for d, name in enumerate(fed.domain_names):
        own = [row for client, row in enumerate(matrix) if fed.domain_of[client] == d]
        if own:
            intra[name] = float(np.mean([row[name] for row in own]))
            others = [row[other] for row in own for other in fed.domain_names if other != name]
            inter[name] = float(np.mean(others)) if others else intra[name]
    domains = {name: float(np.mean([row[name] for row in matrix])) for name in fed.domain_names}
    return {
        "test_accuracy": float(np.mean(list(inter.values()))),
        "domains": domains,
        "intra": intra,
        "inter": inter,
    }


def _validation(fed: Federation, method: Method, state: Any, score: Score, clients: dict | None) -> dict[str, Any]:
    """Accuracy on the held-out examples; the spread over clients unless the tests have given one."""
    owners = [client for client, part in enumerate(fed.validation) if len(part)]
    if not owners:
        return {"validation_accuracy": None, "clients": clients}
    if method.personal is None:
        together = np.concatenate([fed.validation[client] for client in owners])
        hits = score(Model(fed.network, *method.model(state)), together).headline
        parts = hits.split([len(fed.validation[client]) for client in owners])
    else:
        own = models(fed, method, state)
        parts = [score(model, fed.validation[client]).headline for client, model in own if client in owners]
    return {
        "validation_accuracy": _fraction(torch.cat(list(parts))),
        "clients": clients or spread([_fraction(part) for part in parts]),
    }
