"""What a method is given: a population of clients with their data, and what it can ask of them."""

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedcli.core.aggregate import class_sums, mean_by_class
from fedcli.core.augment import NUM_DRAWS, Transform
from fedcli.core.batches import Batch, BatchPlan, count_batches, plan_batches
from fedcli.core.client_states import Store
from fedcli.core.clients import (
    Aux,
    Buffers,
    Client,
    LocalLoss,
    Model,
    Params,
    Step,
    StepValues,
    Terms,
    separate_objective,
)
from fedcli.core.engine import Chunking, Engine
from fedcli.core.exchanged_models import ExchangedModels
from fedcli.core.graphs import CudaGraphs
from fedcli.core.image_set import ImageSet
from fedcli.core.layers import by_places
from fedcli.core.learning_rates import schedule_factor
from fedcli.core.network import Network, NetworkOutput, find_vmap_fault
from fedcli.core.optimizers import OptimizerUpdate, make_optimizer
from fedcli.core.output_cache import OutputCache
from fedcli.core.parallel import ItemRunner, OneWorker, Workers
from fedcli.core.parts import Parts
from fedcli.core.population import Cohort, Population
from fedcli.core.run_options import RunOptions
from fedcli.core.stacked import BRANCHES, STACKED, ensure_optimizer_state
from fedcli.core.switches import refuse_reading, set_to
from fedcli.core.traffic import Traffic
from fedcli.core.trees import (
    Tree,
    concatenate,
    copies,
    leaves,
    select,
    stack,
    to_device,
    tree_map,
)
from fedcli.errors import NonFiniteLoss, UserError
from fedcli.userfiles import names_user_file

# Images that go through a network together in evaluation mode.
EVALUATION_BATCH = 500  # on a CPU
QUICK_BATCH = 250  # on a CPU for what is only reported: what a portion leaves between the layers is then reused
GPU_BATCH = 2500  # enough for every kernel to fill a GPU
NOTHING_STAYS = (
    "nothing stays with a client, and all test one model: the network has no layer of the kind that this method keeps "
    "there; choose another --backbone"
)

State = TypeVar("State")  # a NamedTuple of tensors that a client keeps, stacked or not


class LabelledImages(NamedTuple):
    """Images on the device, and their classes."""

    images: Tensor  # uint8 [N, channels, H, W]
    labels: Tensor  # [N]


class Predictions(NamedTuple):
    """What a model in evaluation mode gives for some images, on the CPU."""

    features: Tensor | None  # [n, D]; None where they were not asked for
    logits: Tensor  # [n, C]
    labels: Tensor  # [n], the true ones


class Federation(Population):
    """A population of clients and an engine that trains them. What is sent through it is counted.

    Attributes:
        num_rounds: Rounds of the run, T.
        local_epochs: Passes over a client's own data in a round.
        batch_size: Examples in a minibatch of a client.
        optimizer: The run's, "sgd", "adam" or "adamw".
        momentum: Of the run's SGD; Adam has no use for it.
        traffic: Counts of the floats that the clients of the round were sent and sent.
        exchanged: The models of the round of which drift is measured.
        seconds: Time of the last round by "data", "train", "evaluate"; the method's own server work is the rest.
    """

    def __init__(  # noqa: PLR0913  # all that a federation is put together from, most of it by keyword
        self, run: RunOptions, dataset: ImageSet, parts: Parts, device: torch.device,
        transform: Transform, *, public_images: Tensor | None = None, public_transform: Transform | None = None,
        evaluation: str = "server", top_k: int = 1, store: Store | None = None, workers: Workers | None = None,
        chunking: Chunking | None = None,
    ):  # fmt: skip
        """Puts data, networks and engine together.

        Args:
            run: Options of the run.
            dataset: Images, labels and domains, a `fedcli.data.dataset.Dataset`.
            parts: Positions of each client's examples in the training set.
            device: Where all of it lies and is trained.
            transform: From uint8 images to network input.
            public_images: uint8 `[P, channels, H, W]`, unlabelled, for methods that need them.
            public_transform: From the public images to network input.
            evaluation: "server", "clients" or "domains", see fedcli/core/evaluation.py.
            top_k: A test image counts as right if its class is among the k most likely.
            store: Of what clients remember; in memory where None.
            workers: The processes that do the run together; this one alone where None.
            chunking: How clients train together; where None, on a CPU one by one, and on CUDA a whole cohort, unless
                `autotune` chooses another way before the first round.
        """
        super().__init__(run, dataset, parts, device, transform.dtype)
        self.num_rounds = run.rounds
        self.local_epochs = run.local_epochs
        self.batch_size = run.batch_size
        self.optimizer = run.optimizer
        self.momentum = run.momentum
        self.store = store
        self.evaluation = evaluation
        self.top_k = top_k
        self.transform = transform
        self.public_transform = public_transform
        self.public_images = None if public_images is None else public_images.to(device)
        self.test_images = dataset.x_test.to(device)
        self.test_labels = dataset.y_test.to(device)
        self.test_domains = dataset.domain_test
        self.output_cache = OutputCache()
        self.requested_chunking = chunking
        on_cpu = device.type == "cpu"
        if chunking is None:
            chunking = Chunking(STACKED, 1 if on_cpu else run.cohort_size)
        self.engine = Engine(
            images=dataset.x_train.to(device),
            labels=dataset.y_train.to(device),
            transform=transform,
            runner=ItemRunner(device, workers or OneWorker()),
            clients_per_chunk=min(chunking.clients, run.cohort_size),
            way=chunking.way,
            graphs=CudaGraphs(device) if device.type == "cuda" else None,
            by_places=self.dead_taps and on_cpu,
            joint_layers=not on_cpu,
        )
        self.takes_vmap = True  # whether vmap takes all networks
        if self.engine.way == STACKED and self.engine.clients_per_chunk > 1:
            self._train_apart_if_vmap_fails(dataset.channels, dataset.image_size)
        self.start_round()

    def _train_apart_if_vmap_fails(self, channels: int, image_size: int) -> None:
        """Has clients train one by one, and says so, where vmap does not take a user's network."""
        shape = (2, channels, image_size, image_size)
        images = torch.linspace(-1, 1, math.prod(shape), dtype=self.dtype, device=self.device).reshape(shape)
        for name, network in zip(self.backbones, self.networks, strict=True):
            fault = find_vmap_fault(network, images) if names_user_file(name) else ""
            if not fault:
                continue
            clients = 1 if self.device.type == "cpu" else self.engine.clients_per_chunk
            self.engine.use_chunking(Chunking(BRANCHES, clients))
            self.takes_vmap = False
            self.engine.notes.append(f"clients train one by one: vmap does not take the network {name} ({fault})")
            return

    def _public_data(self) -> tuple[Tensor, Transform]:
        """Returns the public images and what makes network input of them; refuses where there are none."""
        if self.public_images is None or self.public_transform is None:
            raise UserError("the method needs public images (got no --public-dataset); name a data set.")
        return self.public_images, self.public_transform

    @property
    def public_batch_sizes(self) -> list[int]:
        """Returns how many images each of the public batches has, in their order."""
        images, _ = self._public_data()
        count = len(images)
        size = self.config.public_batch_size
        return [min(size, count - start) for start in range(0, count, size)]

    def start_round(self, keep_sent_models: bool = False) -> None:
        """Forgets the round before: counts of what is sent, time and models.

        With `keep_sent_models`, the clients whose models are sent in this round are kept in `exchanged`, to be
        measured.
        """
        self.traffic = Traffic()
        self.exchanged = ExchangedModels(self.networks, keep_trained=keep_sent_models)
        self.seconds = {"data": 0.0, "train": 0.0, "evaluate": 0.0}

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the time of what is done inside, on the device too, to that of "data", "train" or "evaluate"."""
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[phase] += time.perf_counter() - start

    def broadcast(self, params: Params, buffers: Buffers, cohort: Cohort) -> Client:
        """Sends one model to every client of the cohort; returns stacked clients `[K, ...]` without optimizer state."""
        size = len(cohort.client_ids)
        self.count_broadcast(params, buffers, size)
        model = copies(Model(params, buffers), size)
        return Client(model.params, model.buffers)

    def count_broadcast(self, params: Params, buffers: Buffers, num_clients: int) -> None:
        """Counts one model that is sent to so many clients, where the method itself makes what they have of it."""
        self.traffic.count_models_down(params, buffers, num_clients)
        if num_clients == self.config.cohort_size:
            self.exchanged.note_received(params, buffers)

    def count_exchange(self, sent: Model, received: Model) -> None:
        """Counts stacked models, or parts of them, that clients give each other, where the method itself swaps them."""
        self.traffic.count_models_up(sent.params, sent.buffers)
        self.traffic.count_models_down(received.params, received.buffers, num_clients=1)

    def download(self, tree: Tree, cohort: Cohort) -> Tree:
        """Sends the same tensors to every client of the cohort; returns them as they are."""
        self.traffic.count_down(tree, len(cohort.client_ids))
        return tree

    def download_each(self, stacked: Tree) -> Tree:
        """Sends each client its own part of a stacked tree `[K, ...]`; returns it as it is."""
        self.traffic.count_down(stacked)
        return stacked

    def upload(self, stacked: Tree, present: Tensor | None = None) -> Tree:
        """Sends each client's part of a stacked tree `[K, ...]` to the server; returns it as it is.

        Integers, such as class counts, and masks are not counted: the costs are in floats. `present` `[K, C]` says
        which rows of leaves `[K, C, ...]` a client sends; all where None.
        """
        fraction_of_rows = 1.0 if present is None else present.double().mean().item()
        self.traffic.count_up(stacked, fraction_of_rows)
        return stacked

    def upload_model(self, clients: Client | Model) -> Model:
        """Sends each client's parameters and buffers to the server; returns both, stacked.

        A method may send a part of its clients' models, as a `Model` of these parameters and buffers alone.
        """
        self.traffic.count_models_up(clients.params, clients.buffers)
        self.exchanged.note_trained(clients.params, clients.buffers)
        return Model(clients.params, clients.buffers)

    def recall(self, states: Mapping[int, State], cohort: Cohort, first: State | None = None) -> State:
        """Returns what each client of the cohort kept from the last round it took part in, stacked, `[K, ...]`.

        `states` holds it by client id; `first` is what a new client has, None where no client is new.
        """
        recalled = [states.get(int(client), first) for client in cohort.client_ids]
        return stack(tree_map(lambda leaf: leaf.to(self.device), recalled))  # some may lie on the host

    def remember(self, states: Mapping[int, State], cohort: Cohort, stacked: State) -> Mapping[int, State]:
        """Returns the states, by id, those of the cohort's clients replaced by their parts of `stacked` `[K, ...]`.

        The user is told where the first states are empty: the network has no layer of the kind that should stay.
        """
        if not states and not leaves(stacked):
            self.engine.notes.append(NOTHING_STAYS)
        new = {int(client): select(stacked, k) for k, client in enumerate(cohort.client_ids)}
        if self.store is None:
            return dict(sorted({**states, **tree_map(torch.clone, new)}.items()))
        return self.store.keep(states, new, cohort.round)

    def optimizer_step(  # noqa: PLR0913  # what a method file writes: one keyword for each trait of an update
        self, loss: LocalLoss, *, optimizer: str | None = None, lr: float | None = None, momentum: float | None = None,
        weight_decay: float | None = None, names: Collection[str] | None = None, key: str = "local",
        clip_norm: float = 0.0,
    ) -> Step:  # fmt: skip
        """Makes a local step: one update of a client by the gradient of its objective.

        Args:
            loss: The objective of one client.
            optimizer: "sgd", "adam" or "adamw"; this and the next three are the run's where None.
            lr: Learning rate; the run's is the round's.
            momentum: Of SGD.
            weight_decay: Coefficient of the L2 penalty's gradient.
            names: Which parameters move; all where None.
            key: Name of its state in `Client.optimizer`; two updates of one step need two names.
            clip_norm: Norm to which longer gradients are shortened, before the weight decay; 0 for none.
        """
        chosen_optimizer = make_optimizer(
            optimizer or self.optimizer,
            momentum=self.momentum if momentum is None else momentum,
            weight_decay=self.config.weight_decay if weight_decay is None else weight_decay,
        )
        update = OptimizerUpdate(
            loss=loss,
            optimizer=chosen_optimizer,
            lr=lr,
            names=names,
            key=key,
            clip_norm=clip_norm,
        )
        return update.as_step()

    def plan(self, cohort: Cohort, epochs: range | None = None) -> BatchPlan:
        """Draws the batches of the cohort in this round by the run's `--seed`, for all local epochs or some of them."""
        with self.timed("data"):
            return plan_batches(
                parts=[self.training[client] for client in cohort.client_ids],
                client_ids=cohort.client_ids,
                seed=self.config.seed,
                round=cohort.round,
                epochs=range(self.local_epochs) if epochs is None else epochs,
                batch_size=self.batch_size,
                drop_last=self.config.drop_last,
                num_draws=NUM_DRAWS[self.transform.augmentation],
            )

    def local_steps(self, cohort: Cohort) -> Tensor:
        """Counts each client's local steps in this round: `[K]`."""
        sizes = [len(self.training[client]) for client in cohort.client_ids]
        batches = count_batches(sizes, self.batch_size, self.config.drop_last)
        return self.local_epochs * torch.tensor(batches, dtype=self.dtype, device=self.device)

    def is_tested(self, round: int) -> bool:
        """Returns whether the models are tested after a round: every `eval_every` rounds and after the last."""
        return round + 1 == self.num_rounds or (round + 1) % self.config.eval_every == 0

    def lr(self, round: int) -> float:
        """Returns the learning rate of a round, counted from 0.

        That is `lr * lr_decay**round`, times the factor of the schedule over T rounds, times that of the warm-up.
        """
        lr = self.config.lr * self.config.lr_decay**round
        lr *= schedule_factor(self.config.lr_schedule, round, self.num_rounds)
        warm_up = self.config.warmup_rounds
        return lr * min((round + 1) / (warm_up + 1), 1.0)

    def train(
        self, clients: Client, cohort: Cohort, local: LocalLoss | Step, context: Tree = None, axes: Tree = None,
        epochs: range | None = None,
    ) -> tuple[Client, Terms]:  # fmt: skip
        """Trains the clients of a cohort on their own data.

        Args:
            clients: Stacked.
            cohort: Whose data and draws.
            local: The objective of one client, minimised by the run's optimizer, or a whole local step.
            context: What the objective is given beside the batch.
            axes: For each part of the context None (shared) or 0 (one for each client, `[K, ...]`).
            epochs: Which local epochs of the round; all where None. Optimizer state is carried on.

        Returns:
            The trained clients, and each term's mean over a client's local steps, `[K]`.

        Raises:
            NonFiniteLoss: If a term, the objective itself or a parameter is infinite or NaN.
        """
        step = local if isinstance(local, Step) else self.optimizer_step(local)
        plan = self.plan(cohort, epochs)
        with self.timed("train"):
            trained, terms_with_objective = self.engine.train(step, clients, plan, self.lr(cohort.round), context, axes)
        step_values = separate_objective(terms_with_objective)
        _refuse_non_finite(step_values, (trained.params, trained.buffers), cohort)
        return trained, step_values.terms

    def public_batches(self, round: int, epoch: int = 0) -> Iterator[Batch]:
        """Yields the public images in minibatches, the same for all clients; their labels are 0 and mean nothing.

        Order and augmentation are drawn for each round and each `epoch` (pass over the images) in it.
        """
        sizes = self.public_batch_sizes
        device = self.device
        images, transform = self._public_data()
        num_draws = NUM_DRAWS[transform.augmentation]
        order = self.generator(round, "public order", epoch).permutation(sum(sizes))
        uniform = self.generator(round, "public augment", epoch).random((sum(sizes), num_draws)).astype(np.float32)
        seeds = self.generator(round, "public dropout", epoch).integers(2**63, size=len(sizes))
        lr = torch.tensor(self.lr(round), dtype=self.dtype, device=device)
        num_batches = torch.tensor(len(sizes), device=device)
        # One entry a batch.
        indices = torch.as_tensor(order, device=device).split(sizes)
        draws = torch.as_tensor(uniform, device=device).split(sizes)
        epoch_ends = torch.arange(1, len(sizes) + 1, device=device) == num_batches
        keys = torch.as_tensor(seeds, device=device)
        for index, draws_of_batch, epoch_end, key in zip(indices, draws, epoch_ends, keys, strict=True):
            x = transform(images[index], draws_of_batch)
            no_labels = torch.zeros_like(index)
            yield Batch(x, no_labels, mask=None, epoch_end=epoch_end, num_batches=num_batches, lr=lr, key=key)

    def step(
        self, clients: Client, cohort: Cohort, local: LocalLoss | Step, batch: Batch, context: Tree = None,
        axes: Tree = None,
    ) -> tuple[Client, Aux]:  # fmt: skip
        """Takes one local step of each client on a batch that is the same for all.

        Args:
            clients: Stacked.
            cohort: Whose clients they are.
            local: The objective of one client, or a whole local step, as in `train`.
            batch: One of `public_batches`, or another one.
            context: What the objective is given beside the batch.
            axes: For each part of the context None (shared) or 0 (one for each client), as in `train`.

        Returns:
            The clients, and what the objective returned beside its value, both stacked.
        """
        step = local if isinstance(local, Step) else self.optimizer_step(local)
        with self.timed("train"), set_to(refuse_reading, True):
            after, aux = self.engine.take_step(step, ensure_optimizer_state(step, clients), batch, context, axes)
        step_values = separate_objective(aux.terms)
        _refuse_non_finite(step_values, (after.params, after.buffers, aux.outputs), cohort)
        return after, aux._replace(terms=step_values.terms)

    def forward(self, clients: Client, cohort: Cohort, x: Tensor, train: bool = True) -> NetworkOutput:
        """Returns what the models of clients of one network give for `x` `[B, channels, H, W]`, without gradients.

        Features are `[K, B, D]`, logits `[K, B, C]`. If `train`, batch statistics are used, and update the buffers that
        are returned; else the running ones.
        """

        network = cohort.network

        def run_client(model: Model, x: Tensor) -> NetworkOutput:
            with torch.no_grad():
                return network(model.params, model.buffers, x, train=train)

        models = Model(clients.params, clients.buffers)
        with self.timed("train"):
            return self.engine.for_each(run_client, arguments=(models, x), axes=(0, None))

    def class_counts(self, cohort: Cohort) -> Tensor:
        """Counts each client's training examples of each class: `[K, C]`, int64; to send it is the method's part."""
        labels = [self.engine.labels[self.training[client]] for client in cohort.client_ids]
        return torch.stack([part.bincount(minlength=self.num_classes) for part in labels])

    def class_means(self, clients: Client, cohort: Cohort) -> tuple[Tensor, Tensor]:
        """Takes the mean features of each class, over a client's training part, by its model in evaluation mode.

        Returns:
            Means `[K, C, D]`, zero where a client has no example of a class, and counts `[K, C]`.
        """

        @torch.no_grad()
        def mean_features(k: int) -> tuple[Tensor, Tensor]:
            params, buffers = select((clients.params, clients.buffers), k)
            sums: Any = 0
            counts: Any = 0
            for positions in self._split_into_portions(self.training[cohort.client_ids[k]]):
                x, y = self.engine.gather(positions)
                features = cohort.network(params, buffers, x, train=False).features
                portion_sums, portion_counts = class_sums(features, y, self.num_classes)
                sums = sums + portion_sums
                counts = counts + portion_counts
            return mean_by_class(sums, counts), counts

        with self.timed("train"):
            return stack(self.engine.runner.map("class means", mean_features, range(len(cohort.client_ids))))

    def predict(
        self, params: Params, buffers: Buffers, index: np.ndarray | None = None, network: Network | None = None, *,
        test: bool = False, quick: bool = False, with_features: bool = True,
    ) -> Predictions:  # fmt: skip
        """Returns what one model in evaluation mode gives for training or test examples.

        Args:
            params: Of the model.
            buffers: Of the model.
            index: Positions in the training set, or in the test set if `test`; None for all test images.
            network: The model's network; the only one if None.
            test: Whether `index` is of test images.
            quick: On a CPU in the fastest way, which rounds otherwise; for what is reported, not trained on.
            with_features: Whether features are returned, which take long to copy from a device; None if not.

        Returns:
            Features `[n, D]`, logits `[n, C]` and labels `[n]`, on the CPU.
        """
        network = network or self.network
        if test or index is None:
            examples = LabelledImages(self.test_images, self.test_labels)
        else:
            examples = LabelledImages(self.engine.images, self.engine.labels)
        if index is None:
            index = np.arange(len(examples.labels))
        params, buffers = tree_map(lambda leaf: leaf.to(self.device), (params, buffers))  # some may lie on the host
        quick = quick and self.device.type == "cpu"

        @torch.no_grad()
        def predict_portion(portion: Tensor) -> Predictions:
            x = self.transform(examples.images[portion])
            if quick:
                x = self.engine.copy(x)
            with set_to(by_places, quick):
                output = network(params, buffers, x, train=False)
            return Predictions(output.features if with_features else None, output.logits, examples.labels[portion])

        with self.timed("evaluate"):
            if quick:
                params = tree_map(self.engine.copy, params)
            portions = self.engine.runner.map("predict", predict_portion, self._split_into_portions(index, quick))
            return to_device(concatenate(portions), "cpu")  # here alone Python waits for the device

    def _split_into_portions(self, positions: np.ndarray, quick: bool = False) -> Sequence[Tensor]:
        """Cuts positions into those that go through a network together, on the device."""
        size = GPU_BATCH
        if self.device.type == "cpu":
            size = QUICK_BATCH if quick else EVALUATION_BATCH
        return torch.as_tensor(positions, device=self.device).split(size)


class FiniteCheck(NamedTuple):
    """A number of each client that must be finite, and what is said where it is not."""

    title: str  # what the number is, in a message
    values: Tensor  # [K]
    remedy: str = "a smaller --lr"


def _refuse_non_finite(step_values: StepValues, stacked: Tree, cohort: Cohort) -> None:
    """Refuses what clients give after a step or a round.

    Raises:
        NonFiniteLoss: A term, the objective, or a value of the stacked tensors `[K, ...]` is infinite or NaN.
    """
    checks = []
    for name, values in step_values.terms.items():
        remedy = "a smaller --lr or a smaller weight of that term"
        checks.append(FiniteCheck(f"the term '{name}'", values, remedy))
    if step_values.objective is not None:
        checks.append(FiniteCheck("the loss", step_values.objective))
    # A tensor is finite where its highest and its lowest value are; to read them costs no copy of a large tensor.
    extremes = []
    for tensor in leaves(stacked):
        if tensor.is_floating_point() and tensor.numel() > 0:
            values = tensor.detach().reshape(len(tensor), -1)  # [K, values]
            extremes += [values.amax(1), values.amin(1)]
    if extremes:
        # Zero times a number is NaN where it is not finite; only one sum for each client comes to the host.
        checks.append(FiniteCheck("what the step gave", (0 * torch.stack(extremes)).sum(0)))
    are_finite = to_device([check.values.detach().isfinite() for check in checks], "cpu")
    for check, is_finite in zip(checks, are_finite, strict=True):
        ids = cohort.client_ids[~is_finite.numpy()]
        if len(ids):
            raise NonFiniteLoss(
                f"{check.title} is not finite in round {cohort.round + 1} for client(s) {', '.join(map(str, ids))}; "
                f"{check.remedy} usually helps."
            )
