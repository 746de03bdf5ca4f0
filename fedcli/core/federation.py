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

from fedcli.core import backbones
from fedcli.core.aggregate import class_sums
from fedcli.core.augment import NUM_DRAWS
from fedcli.core.batches import Batch, Plan, Transform, draw_cohort, generator, plan_batches
from fedcli.core.clients import Aux, Client, LocalLoss, Network, Output, Params, Step, adam_step, sgd_step
from fedcli.core.engine import Engine, parse_chunk
from fedcli.core.graphs import CudaGraphs
from fedcli.core.trees import Tree, concatenate, count_floats, leaves, select, stack, tree_map
from fedcli.errors import UserError
from fedcli.registry import Sizes

EVALUATION_BATCH = 500  # images; a forward pass without gradients, so memory is small


class Cohort(NamedTuple):
    """The clients of a round, in order of id unless a test permutes them."""

    round: int  # from 0
    client_ids: np.ndarray  # [K]
    num_examples: np.ndarray  # [K], all of a client's examples, its validation part included
    weights: Tensor  # [K], num_examples / their sum over the round's cohort
    network: Network | None = None  # of all these clients; None where they have different ones, see `Federation.groups`


class NonFiniteLoss(Exception):
    """A term of the objective has become infinite or NaN; says the round, the clients and the term."""


class Federation:
    """A population of clients with their data, a network and an engine.

    Attributes:
        num_clients: Size of the population, N.
        num_rounds: Rounds of the run, T.
        num_classes: C.
        networks: The networks as pure functions of parameters and buffers, one of each architecture.
        architecture: `[N]`, which of them a client has.
        training: Training examples of each client, positions in the training set.
        validation: Held-out examples of each client.
        testing: A client's own test part, positions in the training set; empty unless the protocol tests on it.
        public_images: uint8 `[P, channels, H, W]`, unlabelled; None where the method needs none.
        evaluation: How the protocol measures accuracy, see fedcli/core/evaluation.py.
        domain_counts: `[N, domains]`, a client's examples of each domain; of one domain where there are none.
        domain_of: `[N]`, the domain that most of a client's examples come from.
        sent_down: Floats that all clients of the last round together were sent, by "params", "buffers" and "other".
        sent_up: Floats that they sent.
        seconds: Time of the last round by "data", "train", "evaluate"; the method's own server work is the rest.
    """

    def __init__(
        self,
        run: Any,
        dataset: Any,
        parts: Sequence[np.ndarray],
        device: torch.device,
        transform: Transform,
        *,
        public_images: Tensor | None = None,
        public_transform: Transform | None = None,
        evaluation: str = "server",
        top_k: int = 1,
        on_samples: Callable[[int], None] = lambda count: None,
    ):
        """Puts data, networks and engine together.

        Args:
            run: Options of the run, by the names of `fedcli.runs.config.RunConfig`.
            dataset: Images, labels and domains, by the names of `fedcli.data.datasets.Dataset`.
            parts: Positions of each client's examples in the training set.
            device: Where all of it is kept and trained.
            transform: From the set's uint8 images to network input, in the precision of the run.
            public_images: uint8 `[P, channels, H, W]`, for methods that need them.
            public_transform: Likewise for the public images.
            evaluation: "server", "clients" or "domains", see fedcli/core/evaluation.py.
            top_k: A test image counts as right if its class is among the k most likely.
            on_samples: Told how many samples a local step has processed.
        """
        self.config, self.device = run, device
        self.num_clients, self.num_rounds, self.num_classes = run.num_clients, run.rounds, dataset.num_classes
        self.evaluation, self.top_k = evaluation, top_k
        self.parts, self.testing = _cut(parts, run.local_test, run.partition_seed or 0)
        held_out = [int(len(part) * run.validation) for part in self.parts]
        self.training = [part[: len(part) - count] for part, count in zip(self.parts, held_out, strict=True)]
        self.validation = [part[len(part) - count :] for part, count in zip(self.parts, held_out, strict=True)]
        _refuse_small_clients(self.training, run.batch_size, run.drop_last)

        self.dtype = transform.dtype
        names = run.backbone.split(",")  # client i has the (i mod their number)-th
        self.backbones = list(dict.fromkeys(names))
        self.architecture = np.array([self.backbones.index(names[i % len(names)]) for i in range(run.num_clients)])
        self.networks = [self._network(name, dataset) for name in self.backbones]
        self.transform, self.public_transform = transform, public_transform
        self.test_images, self.test_labels = dataset.x_test.to(self.device), dataset.y_test.to(self.device)
        self.test_domains, self.domain_names = dataset.domain_test, dataset.domain_names
        self.domain_counts = _domain_counts(parts, dataset)
        self.domain_of = self.domain_counts.argmax(1)
        images, labels = dataset.x_train.to(self.device), dataset.y_train.to(self.device)
        self.public_images = None if public_images is None else public_images.to(self.device)
        self._state_device: torch.device | None = None
        # On CUDA, `chunks.settle` chooses for `auto` before the first round.
        way, chunk = parse_chunk(run.clients_per_chunk, 1 if self.device.type == "cpu" else run.cohort_size)
        graphs = CudaGraphs(self.device) if self.device.type == "cuda" else None
        chunk = min(chunk, run.cohort_size)
        self.engine = Engine(images, labels, self.transform, chunk, on_samples, way, graphs)
        self.start_round()

    def _network(self, name: str, dataset: Any) -> Network:
        config = self.config
        module = backbones.build(name, dataset.channels, dataset.image_size, dataset.num_classes, config.seed)
        return Network(module.to(self.dtype), config.precision, self.device)

    @property
    def network(self) -> Network:
        """The network that all clients have.

        Raises:
            UserError: If they have different ones.
        """
        if len(self.networks) > 1:
            raise UserError(
                f"this method needs one network for all clients (got --backbone {self.config.backbone}); name one."
            )
        return self.networks[0]

    @property
    def feature_dim(self) -> int:
        """Width of the features, D, of every network.

        Raises:
            UserError: If it is not the same for all.
        """
        widths = [network.feature_dim for network in self.networks]
        if len(set(widths)) > 1:
            found = ", ".join(f"{name} {width}" for name, width in zip(self.backbones, widths, strict=True))
            raise UserError(f"this method needs features of one width (got {found}); choose networks of one width.")
        return widths[0]

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
        """The sizes that costs depend on, of the largest network."""
        largest = max(self.networks, key=count_parameters)
        return Sizes(count_parameters(largest), self.num_classes, largest.feature_dim)

    def initial_model(self, network: Network | None = None) -> tuple[Params, Params]:
        """Parameters and buffers of a network's initial model, drawn from the run's seed; of the only one if None."""
        module = (network or self.network).module
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
        kinds = {int(self.architecture[client]) for client in client_ids}
        network = self.networks[kinds.pop()] if len(kinds) == 1 else None
        return Cohort(round, np.asarray(client_ids), num_examples, weights, network)

    def groups(self, cohort: Cohort) -> list[Cohort]:
        """The clients of a cohort by their networks, each in the cohort's order; weights stay those of the cohort."""
        kinds = self.architecture[cohort.client_ids]
        places = [np.flatnonzero(kinds == kind) for kind in range(len(self.networks))]
        return [
            Cohort(cohort.round, cohort.client_ids[at], cohort.num_examples[at], cohort.weights[at], network)
            for at, network in zip(places, self.networks, strict=True)
            if len(at)
        ]

    def in_order(self, cohort: Cohort, groups: Sequence[Cohort], trees: Sequence[Tree]) -> Tree:
        """One stacked tree `[K, ...]` in the cohort's order from those of its groups."""
        ids = np.concatenate([group.client_ids for group in groups])
        places = {int(client): place for place, client in enumerate(ids)}
        order = [places[int(client)] for client in cohort.client_ids]
        if isinstance(trees[0], dict):  # terms: there are none of a group whose clients took no step
            names = dict.fromkeys(name for tree in trees for name in tree)
            sizes = [torch.zeros(len(group.client_ids), dtype=self.dtype, device=self.device) for group in groups]
            trees = [{n: tree.get(n, none) for n in names} for tree, none in zip(trees, sizes, strict=True)]
        return select(concatenate(trees), torch.tensor(order, device=self.device))

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
        kept = stack([states.get(int(client), first) for client in cohort.client_ids])
        return tree_map(lambda leaf: leaf.to(self.device), kept)

    def remember(self, states: dict[int, Tree], cohort: Cohort, stacked: Tree) -> dict[int, Tree]:
        """The states with those of the cohort's clients replaced by `stacked` `[K, ...]`; the rest stay as they are."""
        new = {int(client): select(stacked, k) for k, client in enumerate(cohort.client_ids)}
        where = self.state_device(new)
        return dict(sorted({**states, **tree_map(lambda leaf: leaf.to(where, copy=True), new)}.items()))

    def state_device(self, states: dict[int, Tree]) -> torch.device:
        """Where the clients' states are kept: on the device if those of the whole population fit into half of it.

        Decided once, by the first states.
        """
        if self._state_device is None:
            self._state_device = self.device
            if self.device.type == "cuda":
                largest = max(sum(leaf.nbytes for leaf in leaves(state)) for state in states.values())
                if largest * self.num_clients > torch.cuda.mem_get_info(self.device)[0] / 2:
                    self._state_device = torch.device("cpu")
        return self._state_device

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
        clip_norm: float = 0.0,
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
            clip_norm: Norm to which longer gradients are shortened, before the weight decay; 0 for none.
        """
        weight_decay = self.config.weight_decay if weight_decay is None else weight_decay
        if (optimizer or self.config.optimizer) == "adam":
            return adam_step(loss, weight_decay, lr, names, key, clip_norm=clip_norm)
        momentum = self.config.momentum if momentum is None else momentum
        return sgd_step(loss, momentum, weight_decay, lr, names, key, clip_norm)

    def plan(self, cohort: Cohort, epochs: range | None = None) -> Plan:
        """The batches of the cohort in this round, for all local epochs or some of them."""
        with self._timed("data"):
            return plan_batches(
                [self.training[client] for client in cohort.client_ids], cohort.client_ids, self.config.seed,
                cohort.round, range(self.config.local_epochs) if epochs is None else epochs, self.config.batch_size,
                self.config.drop_last, NUM_DRAWS[self.transform.augmentation],
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

    def public_batches(self, round: int, epoch: int = 0) -> Iterator[Batch]:
        """The public images in minibatches, in an order and augmented by draws of the round, the same for all clients.

        Args:
            round: The round.
            epoch: Which pass over them in this round; each has its own draws.

        Yields:
            Batches whose labels are all 0 and mean nothing.
        """
        count, size = len(self.public_images), self.config.public_batch_size
        order = generator(self.config.seed, round, "public order", epoch).permutation(count)
        shape = count, NUM_DRAWS[self.public_transform.augmentation]
        uniform = generator(self.config.seed, round, "public augment", epoch).random(shape)
        keys = generator(self.config.seed, round, "public dropout", epoch).integers(2**63, size=-(-count // size))
        rate = torch.tensor(self.lr(round), dtype=self.dtype, device=self.device)
        for start in range(0, count, size):
            index = torch.as_tensor(order[start : start + size], device=self.device)
            draws = torch.as_tensor(uniform[start : start + size].astype(np.float32), device=self.device)
            x = self.public_transform(self.public_images[index], draws)
            end = torch.tensor(start + size >= count, device=self.device)
            batches = torch.tensor(-(-count // size), device=self.device)
            key = torch.tensor(keys[start // size], device=self.device)
            yield Batch(x, torch.zeros_like(index), None, end, batches, rate, key)

    def step(
        self,
        clients: Client,
        cohort: Cohort,
        local: LocalLoss | Step,
        batch: Batch,
        context: Tree = None,
        axes: Tree = None,
    ) -> tuple[Client, Aux]:
        """One local step of each client on one batch that all are given; arguments as in `train`.

        Returns:
            The clients, and what the objective returned beside its value, stacked.

        Raises:
            NonFiniteLoss: If a term is infinite or NaN.
        """
        step = local if hasattr(local, "update") else self.optimizer_step(local)
        with self._timed("train"):
            after, aux = self.engine.once(step, clients, batch, context, axes)
        _refuse_non_finite(aux.terms, cohort)
        return after, aux

    def forward(self, clients: Client, cohort: Cohort, x: Tensor, train: bool = True) -> Output:
        """What each client's model gives for one batch, without gradients.

        Args:
            clients: Stacked, of one network.
            cohort: Who they are.
            x: `[B, channels, H, W]`, the same for all.
            train: By batch statistics, which then update the buffers that are returned; else by the running ones.

        Returns:
            Features `[K, B, D]`, logits `[K, B, C]` and buffers.
        """
        with self._timed("train"):
            return self.engine.forward(cohort.network, clients, x, train)

    def class_means(self, clients: Client, cohort: Cohort) -> tuple[Tensor, Tensor]:
        """Each client's mean feature of each class, over its training part, by its model in evaluation mode.

        Returns:
            Means `[K, C, D]`, zero where a client has no example of a class, and counts `[K, C]`.
        """

        @torch.no_grad()
        def of_client(k: int) -> tuple[Tensor, Tensor]:
            model = select((clients.params, clients.buffers), k)
            width = cohort.network.feature_dim
            sums = torch.zeros(self.num_classes, width, dtype=self.dtype, device=self.device)
            counts = torch.zeros(self.num_classes, dtype=torch.int64, device=self.device)
            for x, y in map(self.engine.gather, _portions(self.training[cohort.client_ids[k]])):
                features = cohort.network(*model, x, train=False).features
                batch_sums, batch_counts = class_sums(features, y, self.num_classes)
                sums, counts = sums + batch_sums, counts + batch_counts
            return sums / counts.clamp(min=1)[:, None], counts

        with self._timed("train"):
            return stack(self.engine.side_by_side(of_client, range(len(cohort.client_ids))))

    def predict(
        self, params: Params, buffers: Params, index: np.ndarray | None, network: Network | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What one model in evaluation mode gives for training examples or the test images.

        Args:
            params: Of the model.
            buffers: Of the model.
            index: Positions in the training set; None for all test images.
            network: Its network; the only one where None.

        Returns:
            Features `[n, D]`, logits `[n, C]` and labels `[n]`, on the CPU.
        """
        network = network or self.network
        if index is None:
            images, labels = self.test_images, self.test_labels
        else:
            images, labels = self.engine.images, self.engine.labels
        index = np.arange(len(labels)) if index is None else index

        @torch.no_grad()
        def of_portion(portion: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
            positions = torch.as_tensor(portion, device=self.device)
            features, logits, _ = network(params, buffers, self.transform(images[positions]), train=False)
            return features.cpu(), logits.cpu(), labels[positions].cpu()

        with self._timed("evaluate"):
            return concatenate(self.engine.side_by_side(of_portion, _portions(index) or [index]))

    def correct(
        self, params: Params, buffers: Params, index: np.ndarray | None, network: Network | None = None
    ) -> Tensor:
        """Whether one model is right, for each of the training examples `index` or each test image (None).

        Returns:
            `[n]`, bool, on the CPU.
        """
        _, logits, labels = self.predict(params, buffers, index, network)
        return logits.argmax(1) == labels


def count_parameters(network: Network) -> int:
    """Number of a network's parameters."""
    return sum(value.numel() for value in network.module.parameters())


def _domain_counts(parts: Sequence[np.ndarray], dataset: Any) -> np.ndarray:
    if dataset.domain_train is None:
        return np.array([[len(part)] for part in parts])
    domains = dataset.domain_train.numpy()
    return np.array([np.bincount(domains[part], minlength=len(dataset.domain_names)) for part in parts])


def _cut(parts: Sequence[np.ndarray], share: float, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Each client's examples, shuffled, in two: what it trains on, and its own test part of that share."""
    if not share:
        return list(parts), [part[:0] for part in parts]
    mixed = [part[generator(seed, client, "test part").permutation(len(part))] for client, part in enumerate(parts)]
    counts = [int(len(part) * share) for part in parts]
    kept = [part[count:] for part, count in zip(mixed, counts, strict=True)]
    return kept, [part[:count] for part, count in zip(mixed, counts, strict=True)]


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
