"""Clients that train together: in which ways, and with which tensors, whose addresses stay for graphs of their step."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedcli.core.batches import Batch, BatchRows, is_real
from fedcli.core.clients import Aux, Client, Step, Terms, Update, make_keyed_update
from fedcli.core.graphs import Burst, Graphs, StepGraphs, Steps, StepState
from fedcli.core.joint_layers import JointLayers
from fedcli.core.switches import set_to, under_vmap
from fedcli.core.trees import (
    Tree,
    copy_tree,
    flatten,
    num_stacked,
    pack,
    select_axes,
    stack,
    tree_map,
    unpack,
    write_into,
)

# The ways in which several clients train together, as a record names them.
STACKED = "stacked"  # by vmap, every operation on all of them
BRANCHES = "branches"  # client by client, on a GPU at the same time
WAYS = (STACKED, BRANCHES)


def map_over_clients(
    function: Callable[..., Tree], axes: tuple, way: str, graphs: Graphs | None, joint_layers: bool = False
) -> Callable[..., Tree]:
    """Makes a function of one client a function of several stacked clients.

    Args:
        function: Of one client.
        axes: For each argument 0 (client axis first) or None (shared by all), or a tree of these; 0 for the first.
        way: One of `WAYS`. `vmap` turns convolutions into grouped ones, at which a device's library may be slow. A
            single client is always a branch.
        graphs: Do the branches, which are independent of each other, at the same time; in turn where None.
        joint_layers: Whether layers of stacked clients are computed as fedcli/core/joint_layers.py has them.
    """
    mapped = vmap(function, in_dims=axes, randomness="error")

    def for_clients(*arguments: Tree) -> Tree:
        count = num_stacked(arguments[0])
        if way == BRANCHES or count == 1:
            branches = [partial(function, *select_axes(arguments, axes, k)) for k in range(count)]
            if graphs is None:
                return stack([branch() for branch in branches])
            return stack(graphs.branch(branches))
        layers = JointLayers() if joint_layers else nullcontext()
        with set_to(under_vmap, True), layers:
            return mapped(*arguments)

    return for_clients


def ensure_optimizer_state(step: Step, clients: Client) -> Client:
    """Gives stacked clients that have no optimizer state the one before the first step."""
    if clients.optimizer:
        return clients
    init_optimizer = map_over_clients(step.init_optimizer, axes=(0,), way=BRANCHES, graphs=None)
    return clients._replace(optimizer=init_optimizer(clients.params))


class Unchanged(NamedTuple):
    """Stands for a tensor that a step returns as it was given, and may have written over.

    It has no parts, so that vmap, which maps over the tensors in what a function returns, passes over it.
    """


UNCHANGED = Unchanged()


def make_packed_update(
    update: Update, template: Tree, results: Callable[[Aux], Tree]
) -> Callable[..., tuple[Tree, Tree]]:
    """Makes an update that takes and returns a client packed, as `template` says, and beside it some results.

    So the parameters are one tensor for the optimizer, and for all that is done with stacked clients. A tensor that the
    step returns as it was given is `UNCHANGED`.
    """

    def update_packed(client: Tree, batch: Batch, context: Any) -> tuple[Tree, Tree]:
        after, aux = update(unpack(client, template), batch, context)
        new = tree_map(lambda old, new: UNCHANGED if new is old else new, client, pack(after, template))
        return new, results(aux)

    return update_packed


def remove_buffers(aux: Aux) -> Aux:
    """Removes from what a step gives the buffers, which the client has already."""
    return aux._replace(buffers={})


def make_packed_function(function: Callable[..., Tree], template: Tree) -> Callable[..., tuple[Tree, Tree]]:
    """Makes a function of one client that takes its first argument packed, and returns beside the result that it stays.

    That is, as in `make_packed_update`, a tree of `UNCHANGED`.
    """

    def function_of_packed(first: Tree, *others: Tree) -> tuple[Tree, Tree]:
        unchanged = tree_map(lambda leaf: UNCHANGED, first)
        return unchanged, function(unpack(first, template), *others)

    return function_of_packed


class StackUpdates(NamedTuple):
    """A local step of several clients, see `make_packed_update`, by what the batch is like.

    There are two, since masks cost a network with batch normalisation four times as many operations.
    """

    full: Callable[..., tuple[Tree, Terms]]  # without a mask: the batches of all clients that have one are full
    padded: Callable[..., tuple[Tree, Terms]]  # with a mask: some client's batch is not full


def make_stack_updates(
    update: Update, template: Tree, batch_axes: Tree, context_axes: Tree, vectorize: Callable[..., Callable[..., Tree]]
) -> StackUpdates:
    """Makes a local step of one client those of several; `vectorize(function, axes)` does so with a function."""
    packed_update = make_packed_update(make_keyed_update(update), template, attrgetter("terms"))
    full = vectorize(packed_update, (0, batch_axes, context_axes))
    padded = vectorize(packed_update, (0, batch_axes._replace(mask=0), context_axes))
    return StackUpdates(full, padded)


def make_template(stacked: Tree) -> Tree:
    """Returns the first of some stacked clients, without values, as a template by which such clients are packed."""
    return flatten(tree_map(lambda leaf: leaf[0].to("meta"), stacked))


def pad_to_power_of_two(rows: Tensor) -> Tensor:
    """Repeats the last row of `[T, ...]` up to a power of two, so that rounds of other lengths share the graphs."""
    num_rows = 1 << (len(rows) - 1).bit_length()
    last_row = rows[-1:]
    repeated = last_row.expand(num_rows - len(rows), *last_row.shape[1:])
    return torch.cat([rows, repeated])


class StackInputs(NamedTuple):
    """What a stack is given to train, and the number of the next step."""

    clients: Tree  # packed
    context: Tree
    rows: BatchRows
    lr: Tensor
    step_index: Tensor


class Stack:
    """Trains clients together; owns their tensors, at fixed addresses, and the graphs of their steps.

    Attributes:
        eager: Local steps that are taken operation by operation.
        captured: Those that a graph holds: they may write over the clients, and leave alone those that are idle.
        gather: Turns positions and draws into network input and labels.
        template: A client, which says how they are packed.
        graphs: Of its steps.
        clients: Stacked and packed; None before the first call of `train`.
        totals: Sums of the terms so far, `[K]` by name; empty before the first step.
    """

    def __init__(
        self, eager: StackUpdates, captured: StackUpdates, gather: Callable[..., tuple[Tensor, Tensor]],
        template: Client, graphs: StepGraphs,
    ):  # fmt: skip
        self.eager = eager
        self.captured = captured
        self.gather = gather
        self.template = template
        self.graphs = graphs
        self.clients: Tree = None
        self.totals: Terms = {}

    def train(
        self, make_clients: Callable[[], Client], context: Tree, rows: BatchRows, lr: Tensor, padded: Sequence[bool],
        step_done: Callable[[int], None],
    ) -> tuple[Client, Terms]:  # fmt: skip
        """Trains stacked clients through all rows; returns them after it, and the sums of their terms, `[K]` by name.

        Args:
            make_clients: Makes the clients, with optimizer state, which are held here alone.
            context: Of their objective.
            rows: Of the clients' batches; those after the last step are not used.
            lr: Learning rate.
            padded: For each of the T steps, whether some client's batch is not full.
            step_done: Called with the number of each step, when it has been taken or is on its way.
        """
        inputs = StackInputs(
            clients=pack(make_clients(), self.template, num_leading_axes=1),
            context=context,
            rows=rows,
            lr=lr,
            step_index=torch.zeros_like(rows.size[0, :1]),
        )
        if self.clients is None:
            self._hold(copy_tree(inputs))
        else:  # into the same tensors
            write_into(self._inputs, inputs)
            tree_map(Tensor.zero_, self.totals)
        del inputs  # the clients would be there twice
        steps = Steps(eager=self._take_eager_steps, captured=self._take_captured_steps)
        done = 0
        for is_padded, alike in groupby(padded):
            end = done + len(list(alike))
            while done < end:
                state = StepState(self.clients, results=(self.totals, self._step_index))
                taken = self.graphs.advance(steps, state, is_padded, num_alike=end - done)
                for step in range(done, done + taken):
                    step_done(step)
                done += taken
        return copy_tree((unpack(self.clients, self.template), self.totals))

    def _hold(self, inputs: StackInputs) -> None:
        """Takes the tensors that stay."""
        self._inputs = inputs
        self.clients = inputs.clients
        self._context = inputs.context
        self._lr = inputs.lr
        self._step_index = inputs.step_index
        # The same in all steps, so that no step looks it up.
        self._num_batches = inputs.rows.num_batches[0]
        self._rows: Tree = inputs.rows._replace(num_batches=None)  # type: ignore[arg-type]

    def _take_eager_steps(self, burst: Burst) -> None:
        for _ in range(burst.num_steps):
            self.take_step(burst.padded, self.eager)

    def _take_captured_steps(self, burst: Burst) -> None:
        for _ in range(burst.num_steps):
            self.take_step(burst.padded, self.captured)

    def take_step(self, padded: bool, updates: StackUpdates) -> None:
        """Takes one local step of each client; those that have run out of data stand still.

        Args:
            padded: Whether some client's batch is not full.
            updates: `eager` or `captured`.
        """
        row = tree_map(lambda leaf: leaf.index_select(0, self._step_index)[0], self._rows)
        self._step_index += 1
        x, y = self.gather(row.index, row.draws)
        mask = None
        if padded:
            _, width = row.index.shape
            mask = is_real(row.size, width)
        idle = row.size == 0
        batch = Batch(x, y, mask, row.epoch_end, self._num_batches, lr=self._lr, key=row.keys, idle=idle.float())
        update = updates.padded if padded else updates.full
        after, terms = update(self.clients, batch, self._context)

        def move(old: Tensor, new: Tensor | Unchanged) -> None:
            if not isinstance(new, Unchanged):
                idle_rows = idle.reshape(-1, *[1] * (old.dim() - 1))
                torch.where(idle_rows, old, new, out=old)

        tree_map(move, self.clients, after)
        for name, term in terms.items():
            if name not in self.totals:  # not every step needs to have every term
                self.totals[name] = torch.zeros_like(term)
            self.totals[name].add_(term.masked_fill(idle, 0.0))


class Call:
    """Calls a function of stacked clients with tensors at fixed addresses, by a graph once there is one.

    Attributes:
        eager: Takes the first argument, packed, and the others, operation by operation. Returns what becomes of the
            first, see `make_packed_update`, and results.
        captured: The same as a graph holds it: it may write over the first argument.
        template: The first argument of a client, which says how it is packed.
        graphs: Of the call.
    """

    def __init__(
        self, eager: Callable[..., tuple[Tree, Tree]], captured: Callable[..., tuple[Tree, Tree]], template: Tree,
        graphs: StepGraphs,
    ):  # fmt: skip
        self.eager = eager
        self.captured = captured
        self.template = template
        self.graphs = graphs
        self._first: Tree = None  # packed; None before the first call
        self._others: tuple = ()
        self._results: Tree = None

    def __call__(self, first: Tree, *others: Tree) -> Tree:
        """Returns the results for arguments of the shapes of the first call."""
        packed_first = pack(first, self.template, num_leading_axes=1)
        if self._first is None:
            self._first = copy_tree(packed_first)
            self._others = copy_tree(others)
        else:
            write_into(self._first, packed_first)
            write_into(self._others, others)
        if not self.graphs.replays:  # so that a graph is compared by what it writes, not by what stood there
            tree_map(Tensor.zero_, self._results)
        steps = Steps(eager=lambda burst: self._run(self.eager), captured=lambda burst: self._run(self.captured))
        state = StepState(self._first, self._results)
        self.graphs.advance(steps, state, padded=False, num_alike=1)
        return copy_tree(self._results)

    def changed_first(self) -> Tree:
        """Returns what has become of the first argument of the last call."""
        return unpack(copy_tree(self._first), self.template)

    def _run(self, function: Callable[..., tuple[Tree, Tree]]) -> None:
        changed, results = function(self._first, *self._others)
        tree_map(_write_if_changed, self._first, changed)
        if self._results is None:
            self._results = copy_tree(results)
        else:
            write_into(self._results, results)


def _write_if_changed(old: Tensor, new: Tensor | Unchanged) -> None:
    if not isinstance(new, Unchanged):
        old.copy_(new)
