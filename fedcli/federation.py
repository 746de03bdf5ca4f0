"""What a method is given: clients, model, data and the engine's primitives; and the round loop.

A method asks for everything through `Federation`: it broadcasts, trains, takes class means, and says what it sends.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcli import backbones, datasets
from fedcli.aggregate import class_sums
from fedcli.batches import Plan, Transform, draw_cohort, plan_batches
from fedcli.clients import Client, Engine, LocalLoss, Network, Params, Step, adam_step, sgd_step
from fedcli.config import Setup
from fedcli.errors import UserError
from fedcli.registry import Sizes
from fedcli.trees import Tree, count_floats, select, stack, tree_map

EVALUATION_BATCH = 500  # images; a forward pass without gradients, so memory is small


class Cohort(NamedTuple):
    """The clients of a round, in order of id unless a test permutes them."""

    round: int  # from 0
    client_ids: np.ndarray  # [K]
    num_examples: np.ndarray  # [K], all of a client's examples, its validation part included
    weights: Tensor  # [K], num_examples / their sum


class NonFiniteLoss(Exception):
    """A term of the objective has become infinite or NaN; says the round, the clients and the term."""


class Federation:
    """A population of clients with their data, a network and an engine.

    Attributes:
        num_clients: Size of the population, N.
        num_rounds: Rounds of the run, T.
        num_classes: C.
        feature_dim: Width of the features, D.
        network: The network as a pure function of parameters and buffers.
        training: Training examples of each client, positions in the training set.
        validation: Held-out examples of each client.
        sent_down: Floats that all clients of the last round together were sent, by "params", "buffers" and "other".
        sent_up: Floats that they sent.
        seconds: Time of the last round by "data", "train", "evaluate"; the method's own server work is the rest.
    """

    def __init__(
        self,
        setup: Setup,
        dataset: datasets.Dataset,
        parts: Sequence[np.ndarray],
        on_samples: Callable[[int], None] = lambda count: None,
    ):
        run = setup.run
        self.config, self.device, self.parts = run, setup.device, list(parts)
        self.num_clients, self.num_rounds, self.num_classes = run.num_clients, run.rounds, dataset.num_classes
        held_out = [int(len(part) * run.validation) for part in parts]
        self.training = [part[: len(part) - count] for part, count in zip(parts, held_out, strict=True)]
        self.validation = [part[len(part) - count :] for part, count in zip(parts, held_out, strict=True)]
        _refuse_small_clients(self.training, run.batch_size, run.drop_last)

        self.dtype = torch.float64 if run.precision == "float64" else torch.float32
        module = backbones.build(run.backbone, dataset.channels, dataset.image_size, dataset.num_classes, run.seed)
        self.network = Network(module.to(self.dtype), run.precision, self.device)
        self.feature_dim = self.network.feature_dim
        mean, std = (setup.setting.mean, setup.setting.std) if setup.setting else datasets.channel_statistics(dataset)
        augmentation = setup.setting.augmentation if setup.setting else "none"
        self.transform = Transform(tuple(mean), tuple(std), augmentation, self.dtype)
        self.test_images, self.test_labels = dataset.x_test.to(self.device), dataset.y_test.to(self.device)
        self.test_domains, self.domain_names = dataset.domain_test, dataset.domain_names
        images, labels = dataset.x_train.to(self.device), dataset.y_train.to(self.device)
        chunk = run.clients_per_chunk
        if chunk == "auto":
            chunk = 1 if self.device.type == "cpu" else run.cohort_size
        self.clients_per_chunk = min(int(chunk), run.cohort_size)
        self.engine = Engine(images, labels, self.transform, self.clients_per_chunk, on_samples)
        self.start_round()

    def start_round(self) -> None:
        """Sets the counts of what is sent and of the time back to zero."""
        self.sent_down = {"params": 0, "buffers": 0, "other": 0}
        self.sent_up = {"params": 0, "buffers": 0, "other": 0}
        self.seconds = {"data": 0.0, "train": 0.0, "evaluate": 0.0}

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[what] += time.perf_counter() - start

    @property
    def sizes(self) -> Sizes:
        """The sizes that costs depend on."""
        parameters = sum(value.numel() for value in self.network.module.parameters())
        return Sizes(parameters, self.num_classes, self.feature_dim)

    def initial_model(self) -> tuple[Params, Params]:
        """Parameters and buffers of the initial model, drawn from the run's seed."""
        module = self.network.module
        params = {name: value.detach().clone() for name, value in module.named_parameters()}
        return params, {name: value.detach().clone() for name, value in module.named_buffers()}

    def cohort(self, round: int) -> Cohort:
        """The cohort of a round, drawn without replacement."""
        return self.cohort_of(round, draw_cohort(self.config.seed, round, self.num_clients, self.config.cohort_size))

    def cohort_of(self, round: int, client_ids: Sequence[int]) -> Cohort:
        """The cohort of these clients."""
        num_examples = np.array([len(self.parts[client]) for client in client_ids])
        total = num_examples.sum()
        shares = num_examples / total if total else np.full(len(num_examples), 1 / len(num_examples))
        weights = torch.tensor(shares, dtype=self.dtype, device=self.device)
        return Cohort(round, np.asarray(client_ids), num_examples, weights)

    def broadcast(self, params: Params, buffers: Params, cohort: Cohort) -> Client:
        """Sends one model to every client of the cohort.

        Returns:
            Stacked clients `[K, ...]` without optimizer state.
        """
        size = len(cohort.client_ids)
        self.sent_down["params"] += size * count_floats(params)
        self.sent_down["buffers"] += size * count_floats(buffers)
        copies = tree_map(lambda leaf: leaf.expand(size, *leaf.shape), (params, buffers))
        return Client(*copies, optimizer={})

    def download(self, tree: Tree, cohort: Cohort) -> Tree:
        """Sends the same tensors to every client of the cohort; returns them as they are."""
        self.sent_down["other"] += len(cohort.client_ids) * count_floats(tree)
        return tree

    def download_each(self, stacked: Tree) -> Tree:
        """Sends each client its own part of a stacked tree `[K, ...]`; returns it as it is."""
        self.sent_down["other"] += count_floats(stacked)
        return stacked

    def upload(self, stacked: Tree, present: Tensor | None = None) -> Tree:
        """Every client of the cohort sends its part of a stacked tree `[K, ...]`; returns it as it is.

        Integers, such as class counts, and masks are not counted: the costs are in floats.

        Args:
            stacked: What is sent.
            present: `[K, C]`, which rows of leaves `[K, C, ...]` a client sends; all where None.
        """
        rows = 1.0 if present is None else present.double().mean().item()
        self.sent_up["other"] += round(rows * count_floats(stacked))
        return stacked

    def upload_model(self, clients: Client) -> tuple[Params, Params]:
        """Every client of the cohort sends its parameters and buffers; returns both, stacked."""
        self.sent_up["params"] += count_floats(clients.params)
        self.sent_up["buffers"] += count_floats(clients.buffers)
        return clients.params, clients.buffers

    def recall(self, states: dict[int, Tree], cohort: Cohort, first: Tree) -> Tree:
        """What each client of the cohort kept from the last round it took part in.

        Args:
            states: By client id, of the clients that have taken part.
            cohort: The clients.
            first: What a client has that takes part for the first time.

        Returns:
            A stacked tree `[K, ...]`.
        """
        return stack([states.get(int(client), first) for client in cohort.client_ids])

    def remember(self, states: dict[int, Tree], cohort: Cohort, stacked: Tree) -> dict[int, Tree]:
        """The states with those of the cohort's clients replaced by `stacked` `[K, ...]`; the rest stay as they are."""
        new = {int(client): select(stacked, k) for k, client in enumerate(cohort.client_ids)}
        return dict(sorted({**states, **tree_map(torch.clone, new)}.items()))

    def optimizer_step(
        self,
        loss: LocalLoss,
        *,
        optimizer: str | None = None,
        lr: float | None = None,
        momentum: float | None = None,
        weight_decay: float | None = None,
        names: Sequence[str] | None = None,
        key: str = "local",
    ) -> Step:
        """One update of a client by the gradient of a local objective.

        Args:
            loss: The objective of one client.
            optimizer: "sgd" or "adam"; this and the next three are the run's where None.
            lr: Learning rate; the run's is the round's.
            momentum: Of SGD.
            weight_decay: Coefficient of the L2 penalty's gradient.
            names: Which parameters move; all where None.
            key: Name of its state in `Client.optimizer`; two updates of one local step need two names.
        """
        weight_decay = self.config.weight_decay if weight_decay is None else weight_decay
        if (optimizer or self.config.optimizer) == "adam":
            return adam_step(loss, weight_decay, lr, names, key)
        return sgd_step(loss, self.config.momentum if momentum is None else momentum, weight_decay, lr, names, key)

    def plan(self, cohort: Cohort, epochs: range | None = None) -> Plan:
        """The batches of the cohort in this round, for all local epochs or some of them."""
        with self._timed("data"):
            return plan_batches(
                [self.training[client] for client in cohort.client_ids], cohort.client_ids, self.config.seed,
                cohort.round, range(self.config.local_epochs) if epochs is None else epochs, self.config.batch_size,
                self.config.drop_last, self.transform.augmentation != "none",
            )  # fmt: skip

    def lr(self, round: int) -> float:
        """The learning rate of a round."""
        return self.config.lr * self.config.lr_decay**round

    def train(
        self,
        clients: Client,
        cohort: Cohort,
        local: LocalLoss | Step,
        context: Tree = None,
        axes: Tree = None,
        epochs: range | None = None,
    ) -> tuple[Client, dict[str, Tensor]]:
        """Trains the clients of a cohort on their own data.

        Args:
            clients: Stacked.
            cohort: Whose data and draws.
            local: The objective of one client, minimised by the run's optimizer, or a whole local step.
            context: What the objective is given beside the batch.
            axes: For each part of the context None (shared) or 0 (one for each client).
            epochs: Which local epochs of the round; all where None. Optimizer state is carried on.

        Returns:
            The trained clients, and each term's mean over a client's local steps, `[K]`.

        Raises:
            NonFiniteLoss: If a term is infinite or NaN.
        """
        step = local if isinstance(local, Step) else self.optimizer_step(local)
        plan = self.plan(cohort, epochs)
        with self._timed("train"):
            trained, terms = self.engine.train(step, clients, plan, self.lr(cohort.round), context, axes)
        _refuse_non_finite(terms, cohort)
        return trained, terms

    def class_means(self, clients: Client, cohort: Cohort) -> tuple[Tensor, Tensor]:
        """Each client's mean feature of each class, over its training part, by its model in evaluation mode.

        Returns:
            Means `[K, C, D]`, zero where a client has no example of a class, and counts `[K, C]`.
        """

        @torch.no_grad()
        def of_client(k: int) -> tuple[Tensor, Tensor]:
            model = select((clients.params, clients.buffers), k)
            sums = torch.zeros(self.num_classes, self.feature_dim, dtype=self.dtype, device=self.device)
            counts = torch.zeros(self.num_classes, dtype=torch.int64, device=self.device)
            for x, y in map(self.engine.gather, _portions(self.training[cohort.client_ids[k]])):
                features = self.network(*model, x, train=False).features
                batch_sums, batch_counts = class_sums(features, y, self.num_classes)
                sums, counts = sums + batch_sums, counts + batch_counts
            return sums / counts.clamp(min=1)[:, None], counts

        with self._timed("train"):
            return stack(self.engine.side_by_side(of_client, range(len(cohort.client_ids))))

    def correct(self, params: Params, buffers: Params, index: np.ndarray | None) -> Tensor:
        """Whether one model is right, for each of the training examples `index` or each test image (None).

        Returns:
            `[n]`, bool, on the CPU.
        """

        @torch.no_grad()
        def of_portion(portion: np.ndarray) -> Tensor:
            if index is None:
                positions = torch.as_tensor(portion, device=self.device)
                x, y = self.transform(self.test_images[positions]), self.test_labels[positions]
            else:
                x, y = self.engine.gather(portion)
            return (self.network(params, buffers, x, train=False).logits.argmax(1) == y).cpu()

        with self._timed("evaluate"):
            portions = _portions(np.arange(len(self.test_labels)) if index is None else index)
            return torch.cat([torch.zeros(0, dtype=torch.bool), *self.engine.side_by_side(of_portion, portions)])

    def evaluate(self, params: Params, buffers: Params) -> dict[str, Any]:
        """Accuracy of a global model: on the test set, by domain, and on the clients' validation parts.

        Returns:
            `test_accuracy`; `validation_accuracy`, pooled over the clients' held-out examples (None without any);
            `clients`, mean, standard deviation and worst of their own validation accuracies; `domains`, test accuracy
            of each domain (None without domains). All are fractions.
        """
        test = self.correct(params, buffers, None)
        domains = None
        if self.test_domains is not None:
            pairs = enumerate(self.domain_names)
            domains = {name: test[self.test_domains == d].double().mean().item() for d, name in pairs}
        result = {"test_accuracy": test.double().mean().item(), "domains": domains}
        owners = [part for part in self.validation if len(part)]
        if not owners:
            return {**result, "validation_accuracy": None, "clients": None}
        hits = self.correct(params, buffers, np.concatenate(owners)).double()
        own = torch.stack([part.mean() for part in hits.split([len(part) for part in owners])])
        spread = {"mean": own.mean().item(), "std": own.std(correction=0).item(), "worst": own.min().item()}
        return {**result, "validation_accuracy": hits.mean().item(), "clients": spread}


def _portions(index: np.ndarray) -> list[np.ndarray]:
    """Positions in portions of the size that is evaluated at once."""
    return [index[start : start + EVALUATION_BATCH] for start in range(0, len(index), EVALUATION_BATCH)]


def _refuse_small_clients(training: Sequence[np.ndarray], batch_size: int, drop_last: bool) -> None:
    largest = max((len(part) for part in training), default=0)
    if largest == 0:
        raise UserError("no client has a training example (got an empty partition); use fewer clients or more data.")
    if drop_last and largest < batch_size:
        raise UserError(
            f"--batch-size {batch_size} is larger than every client's training part under --drop-last "
            f"(the largest has {largest} examples); use {largest} or less, or --no-drop-last."
        )


def _refuse_non_finite(terms: dict[str, Tensor], cohort: Cohort) -> None:
    for name, values in terms.items():
        bad = ~torch.isfinite(values.detach().cpu())
        if bad.any():
            ids = ", ".join(str(client) for client in cohort.client_ids[bad.numpy()])
            raise NonFiniteLoss(
                f"the term '{name}' is not finite in round {cohort.round} for client(s) {ids}; "
                f"a smaller --lr or a smaller weight of that term usually helps (rounds are counted from 0)."
            )
