"""Clients that train together: in which ways, with which tensors, and on CUDA by a graph of their step.

A graph is a step captured once and replayed, which spares Python and the launches of hundreds of kernels. It reads and
writes the addresses that it was captured with and repeats what Python did then. What changes from step to step is
copied into tensors that stay, and a graph serves only steps that do the same: `graph_key`.
"""

import dataclasses
import gc
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import groupby
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedcli.core.batches import Batch, BatchPlan
from fedcli.core.clients import Client, Network, Step, Terms, Update, under_vmap
from fedcli.core.layers import set_to
from fedcli.core.trees import Tree, leaves, pack, select_axes, stack, tree_map, unpack

Work = Callable[[], Any]

WAYS = ("stacked", "branches")  # in which several clients train together
WARM_UP = 3  # steps before one is captured, as PyTorch's notes on CUDA graphs have it
BURST = 8  # steps of the larger graph of a kind
KEPT = 4  # stacks kept for the rounds to come

# How far a replay may be from the plain step, as a share of the way that the step moves the clients. In both the same
# numbers are summed, at most in another order: float64 leaves that far below 1e-8; what is float32 here may be
# multiplied as TF32 or bfloat16, of 8 bits. A graph with a wrong batch, learning rate or context is off by about 1.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-2}


class CudaGraphs:
    """Graphs of a CUDA device, which share their memory: none leaves in it what another one needs."""

    def __init__(self, device: torch.device):
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._branches: list[torch.cuda.Stream] = []
        self.captured = 0  # graphs made

    def warm_up(self, work: Work) -> None:
        """Does the work on a side stream."""
        self._work_on([self._stream], [work])

    def capture(self, work: Work) -> Work:
        """Captures the work as a graph; returns its replay.

        Raises:
            RuntimeError: If a graph cannot hold the work, as where a value is brought to Python.
        """
        ambient, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        collect = gc.enable if gc.isenabled() else gc.disable
        gc.collect()
        gc.disable()  # giving up an older graph would end the capture
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                work()
        finally:
            torch.cuda.set_stream(ambient)  # a capture that fails leaves its own stream as the current one
            collect()
        self.captured += 1
        return graph.replay

    def fork(self, works: list[Work]) -> list[Any]:
        """Does each work on a stream of its own; in a capture they become parallel branches."""
        while len(self._branches) < len(works):
            self._branches.append(torch.cuda.Stream(self._device))
        return self._work_on(self._branches[: len(works)], works)

    def _work_on(self, streams: list[torch.cuda.Stream], works: list[Work]) -> list[Any]:
        """Does each work on its stream, after what was before and before what comes after."""
        ambient, results = torch.cuda.current_stream(self._device), []
        for work, stream in zip(works, streams, strict=True):
            stream.wait_stream(ambient)
            with torch.cuda.stream(stream):
                results.append(work())
        for stream in streams:
            ambient.wait_stream(stream)
        return results


class Unrepeatable(Exception):
    """Says that another step may do something else."""


def graph_key(thing: Any, shapes: bool = False) -> Hashable:
    """Returns what is equal for two things that make a step do the same.

    A function is its code and what it is closed over, as a method makes its objective anew in every round. Numbers and
    text count by value, dataclasses by their fields, networks by identity, and tensors, if `shapes`, by shape and type.

    Raises:
        Unrepeatable: For anything else. A tensor, above all, may be another one the next time.
    """
    plain = bool, int, float, str, bytes, type(None), torch.dtype, torch.device, Network
    if isinstance(thing, plain):
        return (type(thing), thing)
    if shapes and isinstance(thing, Tensor):
        return (tuple(thing.shape), thing.dtype)
    if isinstance(thing, FunctionType):
        closed = (cell.cell_contents for cell in thing.__closure__ or ())
        return (thing.__code__, graph_key((*closed, thing.__defaults__, thing.__kwdefaults__)))
    if isinstance(thing, partial):
        return (partial, graph_key((thing.func, thing.args, thing.keywords)))
    if isinstance(thing, tuple | list):
        return (type(thing), *(graph_key(part, shapes) for part in thing))
    if isinstance(thing, dict):
        return (dict, *((key, graph_key(value, shapes)) for key, value in thing.items()))
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return (type(thing), *(graph_key(getattr(thing, field.name)) for field in dataclasses.fields(thing)))
    raise Unrepeatable


def for_many(function: Callable[..., Tree], axes: tuple, way: str, graphs: CudaGraphs | None) -> Callable[..., Tree]:
    """Makes a function of one client a function of several stacked clients.

    The way is "stacked", by `vmap`, which turns convolutions into grouped ones that a device's library may be slow at,
    or "branches", client by client, as a single client always is. Each of `axes` is 0 (client axis first) or None
    (shared by all), or a tree of these; that of the first argument is 0. `graphs` do the branches, which are
    independent of each other, at the same time; they are done in turn where it is None.
    """
    mapped = vmap(function, in_dims=axes, randomness="error")

    def together(*arguments: Tree) -> Tree:
        count = len(leaves(arguments[0])[0])
        if way == "branches" or count == 1:
            works = [partial(function, *select_axes(arguments, axes, k)) for k in range(count)]
            return stack([work() for work in works] if graphs is None else graphs.fork(works))
        with set_to(under_vmap, True):
            return mapped(*arguments)

    return together


def with_optimizer(step: Step, clients: Client) -> Client:
    """Gives stacked clients that have no optimizer state the one before the first step."""
    if clients.optimizer:
        return clients
    return clients._replace(optimizer=for_many(step.init_optimizer, (0,), "branches", None)(clients.params))


def packed(update: Update, like: Tree) -> Callable[..., tuple[Tree, Terms]]:
    """Makes a local step of one client take and return it packed, as `like` says, and return beside it only the terms.

    So the parameters are one tensor for the optimizer, and for all that is done with stacked clients.
    """

    def run(client: Tree, batch: Batch, context: Any) -> tuple[Tree, Terms]:
        after, aux = update(unpack(client, like), batch, context)
        return pack(after, like), aux.terms

    return run


def with_room(rows: Tensor) -> Tensor:
    """Repeats the last row of `[T, ...]` up to a power of two, so that rounds of other lengths share the graphs."""
    more = (1 << (len(rows) - 1).bit_length()) - len(rows)
    return torch.cat([rows, rows[-1:].expand(more, *rows.shape[1:])])


class Stack:
    """Trains clients together; owns their tensors, at fixed addresses, and the graphs of steps.

    A step is of one of two kinds, since masks cost a network with batch normalisation four times as many operations:
    `padded` where some client's batch is not full, else by the plain formulas.

    Attributes:
        updates: Local steps of stacked clients, see `packed`, by whether the batch has a mask.
        gather: Turns positions and draws into network input and labels.
        like: A client, which says how they are packed.
        graphs: Of the device, if it has any; `give_up` is told why, if the step cannot be a graph.
        kept: Whether it is used again in later rounds, and a graph of several steps is worth its capture.
        clients: Stacked and packed; None before the first call of `train`.
        totals: Sums of the terms so far, `[K]` by name; empty before the first step.
        replays: Graphs by kind and by how many steps they take.
    """

    def __init__(
        self, updates: dict[bool, Callable[..., tuple[Tree, Terms]]],
        gather: Callable[..., tuple[Tensor, Tensor]], like: Client, graphs: CudaGraphs | None,
        give_up: Callable[[str], None], kept: bool = False,
    ):  # fmt: skip
        self.updates, self.gather, self.like, self.kept = updates, gather, like, kept
        self.graphs, self._give_up = graphs, give_up
        self.clients: Tree = None
        self.totals: Terms = {}
        self.replays: dict[tuple[bool, int], Work] = {}
        self._eager_steps = {False: 0, True: 0}

    def train(
        self, clients: Callable[[], Client], context: Tree, rows: BatchPlan, rate: Tensor, padded: Sequence[bool],
        step_done: Callable[[int], None],
    ) -> tuple[Client, Terms]:  # fmt: skip
        """Trains stacked clients through all rows; returns them after it, and the sums of their terms, `[K]` by name.

        Args:
            clients: Makes the clients, with optimizer state, which are held here alone.
            context: Of their objective.
            rows: Of their plan, on the device; those after the last step are not used.
            rate: Learning rate.
            padded: For each of the T steps, of which kind it is.
            step_done: Called with the number of each step, when it has been taken or is on its way.
        """
        number = torch.zeros_like(rows.size[0, :1])  # of the next step
        given = (pack(clients(), self.like, lead=1), context, rows, rate, number)
        if self.clients is None:
            self._given = tree_map(_copy, given)
            self.clients, self._context, rows, self._rate, self._number = self._given
            # The same in all steps, so that no step looks it up.
            self._num_batches, self._rows = rows.num_batches[0], rows._replace(num_batches=None)
        else:  # into the same tensors
            tree_map(_write, self._given, given)
            tree_map(Tensor.zero_, self.totals)
        del given  # the clients would be there twice
        done = 0
        for kind, steps in groupby(padded):
            end = done + len(list(steps))
            while done < end:
                taken = self._advance(kind, end - done)
                for number in range(done, done + taken):
                    step_done(number)
                done += taken
        return tree_map(_copy, (unpack(self.clients, self.like), self.totals))

    def step(self, padded: bool) -> None:
        """Takes one local step of each client; those that have run out of data stand still."""
        now = tree_map(lambda leaf: leaf.index_select(0, self._number)[0], self._rows)
        self._number += 1
        x, y = self.gather(now.index, now.draws)
        mask = torch.arange(now.index.shape[1], device=y.device) < now.size[:, None] if padded else None
        batch = Batch(x, y, mask, now.epoch_end, self._num_batches, self._rate, now.keys)
        after, terms = self.updates[padded](self.clients, batch, self._context)
        active = now.size > 0

        def move(old: Tensor, new: Tensor) -> None:
            torch.where(active.reshape(-1, *[1] * (old.dim() - 1)), new, old, out=old)

        tree_map(move, self.clients, after)
        if not self.totals:
            self.totals = tree_map(torch.zeros_like, terms)
        tree_map(lambda total, term: total.add_(torch.where(active, term, 0.0)), self.totals, terms)

    def steps(self, padded: bool, count: int) -> None:
        """Takes some local steps of each client."""
        for _ in range(count):
            self.step(padded)

    def _advance(self, padded: bool, same: int) -> int:
        """Takes some of the next `same` steps, all of one kind, by a graph once there is one; returns how many."""
        count = BURST if self.kept and same >= BURST and (padded, 1) in self.replays else 1
        if self.graphs is None:
            self.steps(padded, count)
        elif (padded, count) in self.replays:
            self.replays[padded, count]()
        elif self._eager_steps[padded] < WARM_UP:
            self.graphs.warm_up(partial(self.step, padded))
            self._eager_steps[padded] += 1
        else:
            self._capture(padded, count)
        return count

    def _capture(self, padded: bool, count: int) -> None:
        """Takes some steps twice, plainly and by a graph of them, which stays if both lead to the same clients."""
        steps = partial(self.steps, padded, count)
        state = self.clients, self.totals, self._number
        before = tree_map(_copy, state)
        self.graphs.warm_up(steps)  # before the capture, so that its memory is free again for the graph
        plain = tree_map(_copy, state)
        tree_map(_write, state, before)
        try:
            replay = self.graphs.capture(steps)
        except Exception as error:
            cause = error.__context__ or error  # ending a capture that has gone wrong is an error of its own
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            first_line = (str(cause).strip() or repr(cause)).splitlines()[0]
            reason = f"no CUDA graph of the step, its operations go one by one ({first_line})"
        else:
            replay()
            if agree(state, plain, before):
                self.replays[padded, count] = replay
                return
            reason = "a CUDA graph of the step gave other numbers than the step, whose operations now go one by one"
        tree_map(_write, state, plain)
        self.graphs = None
        self._give_up(reason)


def find_stack(kept: dict[Hashable, Stack], parts: Any, tensors: Tree, make: Callable[..., Stack]) -> Stack:
    """Returns the stack for a step made of `parts` that is given `tensors` of these shapes; if new, by `make`.

    It is put into `kept`, the oldest first, so that its graph serves in later rounds too.
    """
    try:
        key = graph_key(parts), graph_key(tensors, shapes=True)
    except Unrepeatable:
        return make()
    if key not in kept and len(kept) == KEPT:
        kept.pop(next(iter(kept)))  # the oldest
    return kept.setdefault(key, make(kept=True))


def agree(replayed: Tree, plain: Tree, before: Tree) -> bool:
    """Says whether two takes of a step lead to what differs by rounding only, see `TOLERANCE`.

    Each argument is clients, totals and step number: after the replay, after the plain step, before both.
    """
    for parts in zip(*((*clients, *more) for clients, *more in (replayed, plain, before)), strict=True):
        error, allowed = 0.0, 0.0  # squared norms of parameters, buffers, optimizer state, memory or totals
        for new, right, old in zip(*map(leaves, parts), strict=True):
            if right.is_floating_point():
                rounding = 4 * torch.finfo(right.dtype).eps * right.nan_to_num(0, 0, 0).double().norm()
                error += _distance(new, right) ** 2
                allowed += (TOLERANCE[right.dtype] * _distance(right, old)) ** 2 + rounding**2
            elif not torch.equal(new, right):
                return False
        if not error <= allowed:
            return False
    return True


def _distance(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.vector_norm(torch.where(a == b, 0.0, a - b), dtype=torch.float64)  # equal infinities: 0


def _copy(leaf: Any) -> Any:
    return leaf.clone(memory_format=torch.contiguous_format) if isinstance(leaf, Tensor) else leaf


def _write(old: Any, new: Any) -> None:
    if isinstance(old, Tensor):
        old.copy_(new)
