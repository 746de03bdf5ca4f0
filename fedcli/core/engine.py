"""The engine: makes the local step of one client the local training of a cohort.

Clients train one after the other (looped; on the CPU one in each thread), or several together, see
`fedcli.core.stacked`. A method cannot tell the difference.
"""

import gc
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcli.core.augment import Transform
from fedcli.core.batches import Batch, BatchPlan, BatchRows, is_real
from fedcli.core.clients import Aux, Client, Step, Terms, make_keyed_update
from fedcli.core.graphs import (
    MAX_CALLS,
    MAX_STACKS,
    GraphCache,
    GraphRecipe,
    Graphs,
    StepGraphs,
    find_key,
    is_out_of_memory,
)
from fedcli.core.layers import by_places
from fedcli.core.parallel import ItemRunner
from fedcli.core.stacked import (
    STACKED,
    Call,
    Stack,
    ensure_optimizer_state,
    make_packed_function,
    make_packed_update,
    make_stack_updates,
    make_template,
    map_over_clients,
    pad_to_power_of_two,
    remove_buffers,
)
from fedcli.core.switches import refuse_reading, set_to
from fedcli.core.trees import Tree, concatenate, fill_missing_terms, num_stacked, select, select_axes, tree_map

# Of clients that are stacked; an axis stands in the place of each tensor.
BATCH_AXES: Tree = Batch(
    x=0, y=0, mask=None, epoch_end=0, num_batches=0, lr=None, key=0, idle=0  # type: ignore[arg-type]
)  # fmt: skip
# For a client that trains alone, so many bytes of images are prepared at a time.
PREPARED_BYTES = 2**22


class Chunking(NamedTuple):
    """How clients train together."""

    way: str  # one of `stacked.WAYS`
    clients: int  # how many train together at most


class ChunkToTrain(NamedTuple):
    """A chunk of clients before local training, and what that needs."""

    step: Step
    clients: Client  # the chunk's, stacked, without optimizer state
    context: Tree  # the chunk's
    axes: Tree  # of the context
    plan: BatchPlan  # of all clients
    chunk: slice  # which of all clients these are
    lr: Tensor


class TrainedChunk(NamedTuple):
    """A chunk of clients after local training."""

    clients: Client
    sums: Terms  # each term's sum over a client's steps, `[K]`
    zeros: Tensor  # `[K]`, the sum of a term that other chunks have and this one has not


class ChunkResults(NamedTuple):
    """What a chunk of clients has given."""

    results: list[Any]  # one for the chunk, or one for each part that it was halved into
    clients_per_chunk: int  # how many may train together afterwards


@dataclass
class Engine:
    """Runs the local steps of a cohort."""

    images: Tensor  # uint8 [N, channels, H, W], the training set, on the device
    labels: Tensor  # [N]
    transform: Transform  # from uint8 images to network input
    runner: ItemRunner  # trains several chunks of clients at a time
    clients_per_chunk: int  # how many clients train together; halved where memory is too small
    way: str = STACKED  # one of `stacked.WAYS`
    graphs: Graphs | None = None  # None without CUDA, and after a graph could not be made or was wrong
    by_places: bool = False  # for clients that train alone, see fedcli/core/layers.py
    joint_layers: bool = False  # for clients that are stacked, see fedcli/core/joint_layers.py
    notes: list[str] = field(default_factory=list)  # changes of plan that a user has to know
    stacks: GraphCache = field(default_factory=partial(GraphCache, MAX_STACKS), init=False)  # of `Stack`
    calls: GraphCache = field(default_factory=partial(GraphCache, MAX_CALLS), init=False)  # of `Call`

    @property
    def mode(self) -> str:
        """Returns how clients train together, in words."""
        how = self.mode_without_graphs
        return how if self.graphs is None else f"{how}, captured"

    @property
    def mode_without_graphs(self) -> str:
        """Returns how clients train together, whether or not by graphs, in words."""
        how = "looped" if self.clients_per_chunk == 1 else f"{self.way} x {self.clients_per_chunk}"
        if self.runner.processes.count > 1:
            how += f", {self.runner.processes.count} processes"
        return how

    @property
    def chunking(self) -> Chunking:
        """Returns how clients train together."""
        return Chunking(self.way, self.clients_per_chunk)

    def use_chunking(self, chunking: Chunking) -> None:
        """Has clients train together in this way from the next step on."""
        self.way = chunking.way
        self.clients_per_chunk = chunking.clients

    def disable_graphs(self) -> None:
        """Has all steps taken by their operations from here on, also on CUDA."""
        self.graphs = None
        self.forget_graphs()

    def train(
        self, step: Step, clients: Client, plan: BatchPlan, lr: float, context: Tree, axes: Tree
    ) -> tuple[Client, Terms]:
        """Trains K stacked clients through a plan; `context` and `axes` are as in `Federation.train`.

        Returns:
            The clients after their last steps, and each term's mean over a client's steps, `[K]`, 0 without steps.
        """
        lr_tensor = torch.tensor(lr, dtype=self.transform.dtype, device=self.images.device)

        def train_chunk(chunk: slice) -> TrainedChunk:
            size = chunk.stop - chunk.start
            to_train = ChunkToTrain(
                step,
                clients=select(clients, chunk),
                context=select_axes(context, axes, chunk),
                axes=axes,
                plan=plan,
                chunk=chunk,
                lr=lr_tensor,
            )
            is_alone = size == 1 and self.graphs is None
            trained, sums = self._train_alone(to_train) if is_alone else self._train_together(to_train)
            return TrainedChunk(trained, sums, lr_tensor.new_zeros(size))

        chunks: list[TrainedChunk] = self._map_in_chunks("train", train_chunk, plan.num_clients)
        sums = fill_missing_terms([chunk.sums for chunk in chunks], [chunk.zeros for chunk in chunks])
        num_steps = torch.as_tensor(plan.num_steps, device=self.images.device).clamp(min=1)
        means = tree_map(lambda value: value / num_steps, concatenate(sums))
        return concatenate([chunk.clients for chunk in chunks]), means

    def _map_in_chunks(self, task: str, work: Callable[[slice], Any], num_clients: int) -> list[Any]:
        """Calls `work` for chunks of `clients_per_chunk` clients; `task` and results are as in `ItemRunner.map`.

        A chunk that is too large for the device's memory, and all that follow, are halved.
        """

        def work_on_chunk(chunk: range) -> ChunkResults:
            return ChunkResults(self._halve_where_too_large(work, chunk), self.clients_per_chunk)

        chunks: list[ChunkResults] = self.runner.map(task, work_on_chunk, self._split_into_chunks(range(num_clients)))
        self.clients_per_chunk = min(chunk.clients_per_chunk for chunk in chunks)
        results = []
        for chunk in chunks:
            results += chunk.results
        return results

    def _split_into_chunks(self, clients: range) -> list[range]:
        size = self.clients_per_chunk
        return [clients[start : start + size] for start in range(0, len(clients), size)]

    def _halve_where_too_large(self, work: Callable[[slice], Any], chunk: range) -> list[Any]:
        """Calls `work` for a chunk, or for its parts where the device's memory is too small for it."""
        size = len(chunk)
        if size <= self.clients_per_chunk:
            try:
                return [work(slice(chunk.start, chunk.stop))]
            except RuntimeError as error:
                if size == 1 or not is_out_of_memory(error):
                    raise
            # Outside the handler, where the error still holds the tensors of the step.
            self.clients_per_chunk = math.ceil(size / 2)
            self.forget_graphs()
            gc.collect()
            torch.cuda.empty_cache()
            self.notes.append(f"out of memory with {size} clients together; {self.clients_per_chunk} from here on")
        results = []
        for part in self._split_into_chunks(chunk):
            results += self._halve_where_too_large(work, part)
        return results

    def _train_alone(self, to_train: ChunkToTrain) -> tuple[Client, Terms]:
        """Trains the only client of a chunk; returns it, and the sums of its terms, stacked."""
        client = tree_map(self.copy, select(ensure_optimizer_state(to_train.step, to_train.clients), 0))
        context = select_axes(to_train.context, to_train.axes, 0)
        update = make_keyed_update(to_train.step.update_of_own_tensors)
        batches = self._iterate_batches(to_train.plan, to_train.chunk.start, to_train.lr)
        total: Terms = {}
        # One client of a round is enough to see whether the objective reads a number: one that takes a step.
        refuses_reading = to_train.chunk.start == to_train.plan.num_steps.argmax()
        with set_to(by_places, self.by_places):
            for number, batch in enumerate(batches):
                with set_to(refuse_reading, refuses_reading and number == 0):
                    client, aux = update(client, batch, context)
                total |= {name: value + total.get(name, 0.0) for name, value in aux.terms.items()}
                self.runner.count_samples(len(batch.y))
        return tree_map(lambda leaf: leaf.contiguous()[None], (client, total))

    def _iterate_batches(self, plan: BatchPlan, k: int, lr: Tensor) -> Iterator[Batch]:
        """Yields client k's batches without padding; prepares the images of several batches at a time."""
        rows = self._take_rows(plan, k)
        real = is_real(rows.size, plan.width)  # [steps, B]
        bytes_of_batch = plan.width * self.images[0].numel() * self.transform.dtype.itemsize
        at_a_time = max(PREPARED_BYTES // bytes_of_batch, 1)
        for start in range(0, len(real), at_a_time):
            portion = slice(start, start + at_a_time)
            some_rows = select(rows, portion)
            index, draws = select((some_rows.index, some_rows.draws), real[portion])
            images, labels = self.gather(index, draws)
            sizes = some_rows.size.tolist()
            batches = zip(
                self.copy(images).split(sizes),
                labels.split(sizes),
                some_rows.epoch_end,
                some_rows.num_batches,
                some_rows.keys,
                strict=True,
            )
            for x, y, epoch_end, num_batches, key in batches:
                yield Batch(x, y, mask=None, epoch_end=epoch_end, num_batches=num_batches, lr=lr, key=key)

    def _take_rows(self, plan: BatchPlan, clients: int | slice) -> BatchRows:
        """Returns the rows of a client, or of some, up to their last step."""
        num_steps = plan.num_steps[clients].max()
        columns = tree_map(lambda column: torch.as_tensor(column[:num_steps, clients], device=self.images.device), plan)
        return BatchRows(*columns)

    def _train_together(self, to_train: ChunkToTrain) -> tuple[Client, Terms]:
        """Trains the chunk's clients together, batch by batch; returns them, and the sums of their terms."""
        plan = to_train.plan
        chunk = to_train.chunk
        make_clients = partial(ensure_optimizer_state, to_train.step, to_train.clients)
        rows = self._take_rows(plan, chunk)
        sizes = plan.size[: len(rows.size), chunk]  # [steps, clients]
        if len(sizes) == 0:
            return make_clients(), {}
        if self.graphs is not None:
            rows = tree_map(pad_to_power_of_two, rows)
        stack = self._find_stack(to_train, rows)
        is_part_of_batch = (sizes > 0) & (sizes < plan.width)
        padded: Any = is_part_of_batch.any(1).tolist()  # [steps], of bool
        samples = sizes.sum(1).tolist()
        return stack.train(
            make_clients,
            to_train.context,
            rows,
            to_train.lr,
            padded=padded,
            step_done=lambda step: self.runner.count_samples(samples[step]),
        )

    def _find_stack(self, to_train: ChunkToTrain, rows: BatchRows) -> Stack:
        """Returns the cached stack for such clients, with its graphs; a new one where there is none."""
        step = to_train.step
        clients = to_train.clients
        axes = to_train.axes
        key = None
        if self.graphs is not None:
            tensors = (clients._replace(optimizer={}), to_train.context, rows)
            key = find_key(GraphRecipe(step.update, axes, self.way), tensors)
        if key is None:
            return self._make_stack(step, clients, axes, is_reused=False)
        if key not in self.stacks:
            self.stacks.add(key, self._make_stack(step, clients, axes, is_reused=True))
        return self.stacks[key]

    def _make_stack(self, step: Step, clients: Client, axes: Tree, is_reused: bool) -> Stack:
        """Makes a stack for such clients and a local step of them."""
        template = make_template(ensure_optimizer_state(step, select(clients, slice(0, 1))))
        eager = make_stack_updates(step.update, template, BATCH_AXES, axes, self._map_over_clients)
        captured = make_stack_updates(step.update_of_own_tensors, template, BATCH_AXES, axes, self._map_over_clients)
        return Stack(eager, captured, self.gather, template, self._make_step_graphs(is_reused))

    def _make_step_graphs(self, is_reused: bool) -> StepGraphs:
        """Returns what takes steps by graphs; if there can be none, it says so here."""
        return StepGraphs(self.graphs, self._give_up_graphs, is_reused)

    def _give_up_graphs(self, reason: str) -> None:
        self.disable_graphs()
        self.notes.append(reason)

    def forget_graphs(self) -> None:
        """Drops all captured graphs with their stacks and calls.

        That is when the device's memory runs out, when a graph fails or gives other numbers than its step, and after
        each trial of how clients train together (`fedcli.runs.autotune`). A stack that could not be known again is
        not cached beyond its call, and so has no graph to drop.
        """
        self.stacks.clear()
        self.calls.clear()

    def take_step(self, step: Step, clients: Client, batch: Batch, context: Tree, axes: Tree) -> tuple[Client, Aux]:
        """Takes one local step of K stacked clients on a batch that is the same for all.

        `context` and `axes` are as in `Federation.train`.

        Returns:
            The clients after the step, and what their objective returned beside its value, both stacked.
        """
        batch = batch._replace(idle=torch.zeros((), device=batch.y.device))  # nobody stands still
        all_axes = (0, None, axes)

        def step_chunk(chunk: slice) -> tuple[Client, Aux]:
            chunk_clients = select(clients, chunk)
            arguments = (chunk_clients, batch, select_axes(context, axes, chunk))
            key = self._find_key_of_call(step.update, axes, arguments)
            if key is None:
                return self._map_over_clients(make_keyed_update(step.update), all_axes)(*arguments)
            if key not in self.calls:
                self.calls.add(key, self._make_call_of_step(step, chunk_clients, all_axes))
            call = self.calls[key]
            aux = call(*arguments)
            after = call.changed_first()
            return after, aux._replace(buffers=after.buffers)

        return concatenate(self._map_in_chunks("step", step_chunk, num_stacked(clients)))

    def for_each(self, function: Callable[..., Tree], arguments: tuple, axes: tuple) -> Tree:
        """Calls a function of one client for all, a chunk at a time; `axes` as in `map_over_clients`."""

        def call_chunk(chunk: slice) -> Tree:
            chunk_arguments = select_axes(arguments, axes, chunk)
            key = self._find_key_of_call(function, axes, chunk_arguments)
            if key is None:
                return self._map_over_clients(function, axes)(*chunk_arguments)
            if key not in self.calls:
                self.calls.add(key, self._make_call(function, chunk_arguments[0], axes))
            call = self.calls[key]
            return call(*chunk_arguments)

        return concatenate(self._map_in_chunks("for each", call_chunk, num_stacked(arguments[0])))

    def _make_call_of_step(self, step: Step, clients: Client, axes: tuple) -> Call:
        """Makes a call of a local step of such clients, which gives all that it returns but the clients."""
        template = make_template(clients)
        eager = make_packed_update(make_keyed_update(step.update), template, remove_buffers)
        captured = make_packed_update(make_keyed_update(step.update_of_own_tensors), template, remove_buffers)
        graphs = self._make_step_graphs(is_reused=False)
        return Call(self._map_over_clients(eager, axes), self._map_over_clients(captured, axes), template, graphs)

    def _make_call(self, function: Callable[..., Tree], first: Tree, axes: tuple) -> Call:
        """Makes a call of a function of one client, whose first argument is such as `first` and stays as it is."""
        template = make_template(first)
        mapped = self._map_over_clients(make_packed_function(function, template), axes)
        return Call(mapped, mapped, template, self._make_step_graphs(is_reused=False))

    def _map_over_clients(self, function: Callable[..., Tree], axes: tuple) -> Callable[..., Tree]:
        return map_over_clients(function, axes, self.way, self.graphs, self.joint_layers)

    def _find_key_of_call(self, function: Callable[..., Tree], axes: Tree, arguments: tuple) -> Hashable | None:
        """Returns the key of a call among `calls`; None where there can be no graph of it."""
        return None if self.graphs is None else find_key(GraphRecipe(function, axes, self.way), arguments)

    def gather(self, index: Tensor | np.ndarray, draws: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns network input and labels of training examples `index` (any shape), augmented by `draws` if given."""
        return self.transform(self.images[index], draws), self.labels[index]

    def copy(self, tensor: Tensor) -> Tensor:
        """Copies a tensor; on the CPU images with the channels last, faster in convolution and pooling."""
        if tensor.dim() == 4 and tensor.device.type == "cpu":
            # `contiguous` would leave the strides of a single channel as they are, and the first layer slow.
            return tensor.to(memory_format=torch.channels_last, copy=True)
        return tensor.clone()
