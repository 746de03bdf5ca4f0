"""Measures the accuracy of a method's models as its protocol does.

    server     on the official test images: the global model, or the mean accuracy of every client's own model
    clients    on every client's own test part, pooled over the clients; a global model is tested on each part
    domains    every client's model on every domain's test images: its own (intra) and the others (inter)

A method that classifies by the nearest prototype has that as its headline and the classifier's accuracy beside it; one
that has a global model beside personal ones has the accuracy of the personal ones, and the global one's beside it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from fedcli.core.client_states import find_stored_states
from fedcli.core.clients import Buffers, Model, Params
from fedcli.core.federation import Federation
from fedcli.core.network import Network
from fedcli.core.output_cache import CachedOutputs, OutputCache
from fedcli.declarations import Method


class Spread(TypedDict):
    """The accuracies of several clients in three numbers."""

    mean: float
    std: float
    worst: float


class ClassCounts(TypedDict):
    """Numbers of images by class, `[C]` each."""

    right: list[float]  # images of the class that are taken for it
    predicted: list[float]  # those taken for it
    actual: list[float]  # those of it


class Evaluation(TypedDict, total=False):
    """What `evaluate` measures, as a record has it; accuracies are fractions.

    The first five are always there, None of what there is not. The others are there only where they were measured.
    """

    test_accuracy: float | None  # the protocol's headline
    validation_accuracy: float | None  # pooled over the clients' held-out examples
    # Of the clients: on their own test parts under `clients`; of their own models on the test images under `server`;
    # else on their validation examples.
    clients: Spread | None
    client_accuracy: dict[str, float] | None  # the same of each client by its id
    domains: dict[str, float] | None  # on the test images of each domain
    intra: dict[str, float]  # under `domains`, of the clients of each domain: on its test images
    inter: dict[str, float]  # and on those of the other domains
    classifier_accuracy: float  # of a method with prototypes, not under `domains`
    global_accuracy: float | None  # of a global model beside personal ones, measured as the headline
    per_class: ClassCounts  # where the run has `per_class`


NO_RESULTS: Evaluation = {
    "test_accuracy": None, "validation_accuracy": None, "clients": None, "client_accuracy": None, "domains": None,
}  # fmt: skip


class FullModel(NamedTuple):
    """A network, and its tensors as a client or the server has them."""

    network: Network
    params: Params
    buffers: Buffers

    @property
    def tensors(self) -> Model:
        """Its tensors."""
        return Model(self.params, self.buffers)


class ScoredPredictions(NamedTuple):
    """Which predictions of a model for some images are right."""

    hits: Tensor  # bool [n], whether each is right by the method's own rule
    classifier_hits: Tensor | None  # bool [n], by the classifier; None where the method has no other rule
    labels: Tensor  # [n]
    classes: Tensor | None  # [n], those that the method's rule predicts; None where the run records no class's counts


class TestOutcome(NamedTuple):
    """What the test of a model on some images gives."""

    predictions: ScoredPredictions
    outputs: CachedOutputs | None  # to be cached for the next evaluation; None where they are too many


class TestResults(NamedTuple):
    """What tests of models give."""

    entries: Evaluation  # a part of it
    predictions: list[ScoredPredictions]  # of each model


Positions = np.ndarray | None  # in the training set; None for all test images


def top_k(scores: Tensor, labels: Tensor, k: int) -> Tensor:
    """Returns whether each label `[n]` is among the k classes with the highest scores `[n, C]`: bool `[n]`.

    A class whose score is -inf is none of them, also where fewer than k have another score, see `nearness`.
    """
    best = scores.topk(min(k, scores.shape[1]), 1).indices if k > 1 else scores.argmax(1, keepdim=True)
    has_score = scores.gather(1, labels[:, None])[:, 0] > -torch.inf
    return (best == labels[:, None]).any(1) & has_score


def nearness(features: Tensor, prototypes: Tensor, has_class: Tensor) -> Tensor:
    """Returns minus the squared distance of features `[n, D]` to prototypes `[C, D]`; -inf for an absent class."""
    distances = torch.cdist(features, prototypes, compute_mode="donot_use_mm_for_euclid_dist").square()
    return torch.where(has_class, -distances, -torch.inf)


def evaluate(fed: Federation, method: Method, state: Any) -> Evaluation:
    """Measures the models in a method's state. One that has not changed since the last time is not run again."""
    last_outputs = fed.output_cache.start_anew()
    result = _measure_models(fed, method, state, last_outputs)
    if method.shared is not None:
        global_alone = replace(method, model=method.shared, personal=None, shared=None)
        result["global_accuracy"] = _measure_models(fed, global_alone, state, last_outputs)["test_accuracy"]
    return result


def _measure_models(fed: Federation, method: Method, state: Any, last_outputs: OutputCache) -> Evaluation:
    """Returns what `evaluate` does of the tested models alone; `last_outputs` are those of the last evaluation."""
    tester = Tester(fed, method, state, last_outputs)
    on_validation = _test_parts("validation_accuracy", fed.validation, method, tester)
    take_test = _test_own_parts if fed.evaluation == "clients" else _test_images
    on_test = take_test(fed, method, tester)
    result: Evaluation = {**NO_RESULTS, **on_validation.entries, **on_test.entries}
    if fed.config.per_class:
        weights = weights_of_domains(fed) if fed.evaluation == "domains" else None
        result["per_class"] = tally_classes(on_test.predictions, fed.num_classes, weights)
    return result


class Tester:
    """Tests the models in a method's state, and caches what they give for the next evaluation."""

    def __init__(self, fed: Federation, method: Method, state: Any, last_outputs: OutputCache):
        """Takes what the models gave when they were last evaluated."""
        self._fed = fed
        self._method = method
        self._state = state
        self._prototypes = method.prototypes(state) if method.prototypes else None
        self._last_outputs = last_outputs

    def test(self, tests: dict[int, Positions]) -> list[ScoredPredictions]:
        """Tests the clients' models, each at its positions in the training set, or on all test images if None."""

        def test_client(client: int) -> TestOutcome:
            return self._test_model(self._model_of(client), tests[client])

        def test_clients(clients: list[int]) -> list[ScoredPredictions]:
            outcomes = self._fed.engine.runner.map_one_a_process("test", test_client, clients)
            # Here, as what a fork caches ends with it.
            for client, outcome in zip(clients, outcomes, strict=True):
                if outcome.outputs is not None and self._stays_in_memory(client):
                    self._fed.output_cache.put(self._model_of(client).tensors, tests[client], outcome.outputs)
            return [outcome.predictions for outcome in outcomes]

        return self._fed.engine.runner.workers.distribute(test_clients, list(tests))

    def _model_of(self, client: int) -> FullModel:
        return model_to_test(self._fed, self._method, self._state, client)

    def _test_model(self, model: FullModel, positions: Positions) -> TestOutcome:
        """Tests what a model gives, or gave when it was last evaluated."""
        with_features = self._prototypes is not None
        outputs = self._last_outputs.get(model.tensors, positions, with_features)
        if outputs is None:
            outputs = self._run_model(model, positions, with_features)
        if self._prototypes is None:
            predictions = ScoredPredictions(outputs.hits, None, outputs.labels, outputs.classes)
            return TestOutcome(predictions, outputs)
        vectors, has_class = self._prototypes
        assert outputs.features is not None  # they were asked for
        near = nearness(outputs.features, vectors.cpu(), has_class.cpu())
        predictions = ScoredPredictions(
            hits=top_k(near, outputs.labels, self._fed.top_k),
            classifier_hits=outputs.hits,
            labels=outputs.labels,
            classes=near.argmax(1) if self._fed.config.per_class else None,
        )
        # All clients' features of all test images are too many to cache.
        return TestOutcome(predictions, None if positions is None else outputs)

    def _run_model(self, model: FullModel, positions: Positions, with_features: bool) -> CachedOutputs:
        """Runs a model on images, and returns what is cached of it."""
        features, logits, labels = self._fed.predict(
            model.params, model.buffers, positions, model.network, quick=True, with_features=with_features
        )
        hits = top_k(logits, labels, self._fed.top_k)
        classes = logits.argmax(1) if self._fed.config.per_class else None
        return CachedOutputs(features, hits, labels, classes)

    def _stays_in_memory(self, client: int) -> bool:
        """Says whether the next evaluation can be given the same tensors: those of a file are new each time."""
        if self._method.personal is None:
            return True
        stored = find_stored_states(self._state).values()
        return all(states.is_in_memory(client) for states in stored if client in states)


def tally_classes(
    predictions: Sequence[ScoredPredictions], num_classes: int, weights: Sequence[np.ndarray] | np.ndarray | None = None
) -> ClassCounts:
    """Counts the test images of each class, by the most probable class, also where more than one counts as right.

    Args:
        predictions: The predictions of each model.
        num_classes: C.
        weights: What each prediction counts, `[n]` of each model; 1 if None.

    Returns:
        Counts, added up over the models. `right` over `actual`, each summed over the classes, is the accuracy of the
        headline unless more than one class counts as right there.
    """
    right = np.zeros(num_classes, int if weights is None else float)
    predicted = np.zeros_like(right)
    actual = np.zeros_like(right)
    for number, scored in enumerate(predictions):
        labels = scored.labels.numpy()
        assert scored.classes is not None  # they were asked for
        classes = scored.classes.numpy()
        weights_of_model = None if weights is None else weights[number]
        is_right = labels == classes
        predicted += np.bincount(classes, weights_of_model, num_classes)
        actual += np.bincount(labels, weights_of_model, num_classes)
        right_weights = None if weights_of_model is None else weights_of_model[is_right]
        right += np.bincount(labels[is_right], right_weights, num_classes)
    return {"right": right.tolist(), "predicted": predicted.tolist(), "actual": actual.tolist()}


def _is_of_domain(fed: Federation, number: int) -> np.ndarray:
    """Says which test images are of the domain of this number, bool `[n]`."""
    assert fed.test_domains is not None  # there are none where no domain has a name
    return (fed.test_domains == number).cpu().numpy()


def weights_of_domains(fed: Federation) -> np.ndarray:
    """Returns `[N, n]`, what each client's prediction of each test image counts in the headline under `domains`.

    That is the mean over the clients' domains of the mean over their clients and the other domains. The weights sum to
    the number of test images.
    """
    images = {name: _is_of_domain(fed, number) for number, name in enumerate(fed.domain_names)}
    weights = np.zeros((fed.num_clients, len(fed.test_labels)))
    for number, name in enumerate(fed.domain_names):
        inside = fed.domain_of == number  # [N]
        others = [chosen for other, chosen in images.items() if other != name and chosen.any()]
        tested = others or [images[name]]
        for chosen in tested:
            weights[np.ix_(inside, chosen)] = 1 / (len(tested) * max(inside.sum(), 1) * chosen.sum())
    return weights * len(fed.test_labels) / weights.sum()


def model_to_test(fed: Federation, method: Method, state: Any, client: int) -> FullModel:
    """Returns a client's tested model: its own, its initial one before it has taken part, or the global one."""
    if method.personal is None:
        params, buffers = method.model(state)
        return FullModel(fed.network, params, buffers)
    network = fed.networks[fed.architecture[client]]
    tensors = own_model(method.personal, state, client) or Model(network.params, network.buffers)
    return FullModel(network, tensors.params, tensors.buffers)


def own_model(personal: Callable[[Any], Mapping[int, tuple[Params, Buffers]]], state: Any, client: int) -> Model | None:
    """Returns a client's own model by `Method.personal`, None before it has taken part; reads only its stored state."""
    its_states = {}
    for name, states in find_stored_states(state).items():
        its_states[name] = {client: states[client]} if client in states else {}
    if its_states:
        state = state._replace(**its_states)
    models = personal(state)
    return Model(*models[client]) if client in models else None


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values))


def _summarise_clients(clients: Iterable[int], accuracies: Sequence[float]) -> Evaluation:
    """Returns `clients` and `client_accuracy`."""
    spread: Spread = {"mean": _mean(accuracies), "std": float(np.std(accuracies)), "worst": min(accuracies)}
    return {"clients": spread, "client_accuracy": dict(zip(map(str, clients), accuracies, strict=True))}


def _find_classifier_hits(predictions: Sequence[ScoredPredictions]) -> list[np.ndarray]:
    """Returns each model's hits by the classifier; empty where the method has no other rule."""
    return [scored.classifier_hits.numpy() for scored in predictions if scored.classifier_hits is not None]


def _test_own_parts(fed: Federation, method: Method, tester: Tester) -> TestResults:
    """Tests on all clients' own test parts, see `_test_parts`; by the classifier too if that is another rule."""
    on_test = _test_parts("test_accuracy", fed.testing, method, tester)
    classifier_hits = _find_classifier_hits(on_test.predictions)
    if classifier_hits:
        on_test.entries["classifier_accuracy"] = _mean(np.concatenate(classifier_hits))
    return on_test


def _test_parts(
    entry: Literal["test_accuracy", "validation_accuracy"], parts: Sequence[np.ndarray], method: Method,
    tester: Tester,
) -> TestResults:  # fmt: skip
    """Tests on all clients' parts together by the method's rule: the accuracy `entry`, and those by client."""
    part_of = {client: part for client, part in enumerate(parts) if len(part)}
    if not part_of:
        return TestResults({}, [])
    tests: dict[int, Positions] = {**part_of}
    if method.personal is None:  # any client has the one model
        tests = {0: np.concatenate(list(part_of.values()))}
    predictions = tester.test(tests)
    hits = np.concatenate([scored.hits.numpy() for scored in predictions])
    entries: Evaluation = {}
    entries[entry] = _mean(hits)
    ends = np.cumsum([len(part) for part in part_of.values()])
    accuracies = [_mean(client_hits) for client_hits in np.split(hits, ends[:-1])]
    entries |= _summarise_clients(part_of, accuracies)
    return TestResults(entries, predictions)


def _test_images(fed: Federation, method: Method, tester: Tester) -> TestResults:
    """Tests on the test images: accuracies of each domain and of all; under `domains`, inside and outside."""
    clients = range(1 if method.personal is None else fed.num_clients)
    predictions = tester.test(dict.fromkeys(clients))
    if method.personal is None and fed.evaluation == "domains":
        predictions = predictions * fed.num_clients  # each client of a domain has the one model
    hits = np.stack([scored.hits.numpy() for scored in predictions])  # [clients, n]
    by_domain = {}  # accuracies `[clients]`
    for number, name in enumerate(fed.domain_names):
        is_inside = _is_of_domain(fed, number)  # [n]
        if is_inside.any():
            by_domain[name] = hits[:, is_inside].mean(1)
    domains = {name: _mean(accuracies) for name, accuracies in by_domain.items()}
    entries: Evaluation = {"domains": domains or None}
    if fed.evaluation == "domains":
        entries |= _measure_domains(fed, by_domain)
        return TestResults(entries, predictions)
    accuracies = hits.mean(1).tolist()
    entries["test_accuracy"] = _mean(accuracies)
    classifier_hits = _find_classifier_hits(predictions)
    if classifier_hits:
        entries["classifier_accuracy"] = _mean(np.stack(classifier_hits).mean(1).tolist())
    if method.personal is not None:
        entries |= _summarise_clients(clients, accuracies)
    return TestResults(entries, predictions)


def _measure_domains(fed: Federation, by_domain: dict[str, np.ndarray]) -> Evaluation:
    """Returns the headline under `domains`, `intra` and `inter`, of the clients' accuracies `[N]` on each domain."""
    intra = {}
    inter = {}
    for number, name in enumerate(fed.domain_names):
        has_domain = fed.domain_of == number  # [N]
        if not has_domain.any():
            continue
        if name in by_domain:
            intra[name] = _mean(by_domain[name][has_domain])
        others = [accuracies[has_domain] for other, accuracies in by_domain.items() if other != name]
        inter[name] = _mean(np.stack(others, 1)) if others else intra[name]
    return {"test_accuracy": _mean(list(inter.values())), "intra": intra, "inter": inter}
