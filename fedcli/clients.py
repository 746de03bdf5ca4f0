"""The engine: from one local step of one client to all local steps of a cohort.

Local work is a pure function of one client. The engine runs it for one client after the other (looped; on the CPU one
in each thread) or for several under one `vmap` (stacked); a method cannot tell the difference. Nothing else in the
project imports `torch.func`.
"""

import contextlib
import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedcli.batches import Batch, Plan, Transform
from fedcli.trees import Tree, concatenate, leaves, select, select_axes, stack, tree_map, where

Params = dict[str, Tensor]

_stacked: ContextVar[bool] = ContextVar("stacked", default=False)  # whether the step now running is under vmap


class Stopped(Exception):
    """Ends a thread whose result nobody waits for any more."""


class Client(NamedTuple):
    """A client while it trains; stacked, every tensor has the client axis first."""

    params: Params
    buffers: Params
    optimizer: dict[str, Tree]  # what the optimizers remember, by the name of the step; empty before the first step
    memory: Tree = ()  # what a method gathers while training; () where it gathers nothing


class Output(NamedTuple):
    """What a network gives for a batch."""

    features: Tensor  # [B, D]
    logits: Tensor  # [B, C]
    buffers: Params  # the buffers after this batch


class Aux(NamedTuple):
    """What a local objective returns beside its value."""

    buffers: Params
    terms: dict[str, Tensor]  # the terms of the objective, scalars, as they enter the record
    outputs: Tree = ()  # whatever a local step needs from the forward pass, for example the features


LocalLoss = Callable[[Params, Params, Batch, Any], tuple[Tensor, Aux]]


@dataclass(frozen=True)
class Step:
    """One local step of one client."""

    update: Callable[[Client, Batch, Any], tuple[Client, Aux]]
    slots: Callable[[Params], dict[str, Tree]]  # the optimizer state before the first step


class Network:
    """A module as a pure function of its parameters and buffers."""

    def __init__(self, module: nn.Module, precision: str, device: torch.device):
        self.module = module.to(device)
        self.feature_dim: int = module.feature_dim
        self._autocast = precision == "bf16"
        self._device = device
        self._own = threading.local()

    def _module(self) -> nn.Module:
        """This thread's copy of the module: a call puts other tensors into it, so two threads must not share one."""
        if threading.current_thread() is threading.main_thread():
            return self.module
        if not hasattr(self._own, "module"):
            self._own.module = copy.deepcopy(self.module)
        return self._own.module

    def __call__(self, params: Params, buffers: Params, x: Tensor, mask: Tensor | None = None, train: bool = True):
        """Features, logits and new buffers for a batch of one client.

        Args:
            params: Of one client.
            buffers: Of one client; they are not changed.
            x: `[B, channels, H, W]`.
            mask: `[B]`, False for padding, which must not reach batch statistics.
            train: Use and update batch statistics; otherwise the running ones.
        """
        module = self._module()
        if module.training != train:
            module.train(train)
        buffers = {name: value.clone() for name, value in buffers.items()} if train else buffers
        bf16 = torch.autocast(self._device.type, torch.bfloat16) if self._autocast else contextlib.nullcontext()
        with bf16:
            features, logits = functional_call(module, (params, buffers), (x, mask))
        if self._autocast:
            features, logits = features.float(), logits.float()
        return Output(features, logits, buffers)


def _gradient(loss: LocalLoss, params: Params, *arguments: Any) -> tuple[Params, Aux]:
    """Gradient of a local objective by the parameters, and what it returned beside its value."""
    if _stacked.get():
        return grad(loss, has_aux=True)(params, *arguments)
    # Outside vmap, torch.autograd.grad is 8 to 10 % faster than torch.func.grad.
    wanted = {name: value.detach().requires_grad_() for name, value in params.items()}
    with torch.enable_grad():
        value, aux = loss(wanted, *arguments)
        grads = torch.autograd.grad(value, list(wanted.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(wanted, grads, strict=True)), tree_map(Tensor.detach, aux)


def sgd(
    params: Params, grads: Params, slots: Tree, lr: Tensor, momentum: float, weight_decay: float
) -> tuple[Params, Tree]:
    """One update of stochastic gradient descent, as `torch.optim.SGD` defines it (no dampening, no Nesterov).

    Args:
        params: Parameters.
        grads: Their gradients.
        slots: Momentum buffers, or () where momentum is 0.
        lr: Learning rate, a scalar.
        momentum: In [0, 1).
        weight_decay: Coefficient of the L2 penalty's gradient.
    """
    new, velocity = {}, {}
    for name, value in params.items():
        g = grads[name]
        if weight_decay:
            g = torch.add(g, value, alpha=weight_decay)
        if momentum:
            g = torch.add(g, slots[name], alpha=momentum)
            velocity[name] = g
        new[name] = torch.addcmul(value, g, lr, value=-1)
    return new, velocity if momentum else ()


def adam(
    params: Params, grads: Params, slots: Tree, lr: Tensor, betas: tuple[float, float], eps: float, weight_decay: float
) -> tuple[Params, Tree]:
    """One update of Adam, as `torch.optim.Adam` defines it (L2 weight decay, bias correction, no AMSGrad).

    Args:
        params: Parameters.
        grads: Their gradients.
        slots: `(steps taken, first moments, second moments)`.
        lr: Learning rate, a scalar.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Coefficient of the L2 penalty's gradient.
    """
    count, first, second = slots
    count = count + 1
    new, first_new, second_new = {}, {}, {}
    for name, value in params.items():
        g = grads[name] + weight_decay * value if weight_decay else grads[name]
        first_new[name] = betas[0] * first[name] + (1 - betas[0]) * g
        second_new[name] = betas[1] * second[name] + (1 - betas[1]) * g * g
        scale = (second_new[name] / (1 - betas[1] ** count)).sqrt() + eps
        new[name] = value - lr / (1 - betas[0] ** count) * first_new[name] / scale
    return new, (count, first_new, second_new)


def _optimizer_step(loss: LocalLoss, key: str, lr: float | None, names: Sequence[str] | None, init, apply) -> Step:
    """A step that moves the parameters `names` against the gradient of `loss` by the optimizer `apply`."""

    def trained(params: Params) -> Params:
        return params if names is None else {name: params[name] for name in names}

    def update(client: Client, batch: Batch, context: Any) -> tuple[Client, Aux]:
        def partial(some: Params, buffers: Params, batch: Batch, context: Any):
            return loss({**client.params, **some}, buffers, batch, context)

        some = trained(client.params)
        grads, aux = _gradient(loss if names is None else partial, some, client.buffers, batch, context)
        rate = batch.lr if lr is None else torch.full_like(batch.lr, lr)
        new, slots = apply(some, grads, client.optimizer[key], rate)
        params = {**client.params, **new}
        optimizer = {**client.optimizer, key: slots}
        return client._replace(params=params, buffers=aux.buffers, optimizer=optimizer), aux

    return Step(update, lambda params: {key: init(trained(params))})


def sgd_step(
    loss: LocalLoss,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    lr: float | None = None,
    names: Sequence[str] | None = None,
    key: str = "sgd",
) -> Step:
    """A local step of stochastic gradient descent on a local objective.

    Args:
        loss: The objective of one client.
        momentum: In [0, 1).
        weight_decay: Not negative.
        lr: Learning rate; None takes the round's.
        names: Which parameters move; None for all.
        key: Name of its state in `Client.optimizer`; two steps of one client need two names.
    """

    def init(params: Params) -> Tree:
        return tree_map(torch.zeros_like, params) if momentum else ()

    def apply(params: Params, grads: Params, slots: Tree, rate: Tensor) -> tuple[Params, Tree]:
        return sgd(params, grads, slots, rate, momentum, weight_decay)

    return _optimizer_step(loss, key, lr, names, init, apply)


def adam_step(
    loss: LocalLoss,
    weight_decay: float = 0.0,
    lr: float | None = None,
    names: Sequence[str] | None = None,
    key: str = "adam",
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> Step:
    """A local step of Adam on a local objective; arguments as in `sgd_step` and `adam`."""

    def init(params: Params) -> Tree:
        count = next(iter(params.values())).new_zeros(())
        return (count, tree_map(torch.zeros_like, params), tree_map(torch.zeros_like, params))

    def apply(params: Params, grads: Params, slots: Tree, rate: Tensor) -> tuple[Params, Tree]:
        return adam(params, grads, slots, rate, betas, eps, weight_decay)

    return _optimizer_step(loss, key, lr, names, init, apply)


@dataclass(frozen=True)
class Engine:
    """Runs the local steps of a cohort.

    Attributes:
        images: uint8 `[N, channels, H, W]`, the training set, on the device.
        labels: `[N]`.
        transform: From uint8 images to network input.
        clients_per_chunk: How many clients are stacked; 1 is looped.
        on_samples: Told how many samples a step has processed; never by two threads at once.
        stopping: Set while the threads of a run are to end before their work is done.
        lock: Held while `on_samples` is called.
    """

    images: Tensor
    labels: Tensor
    transform: Transform
    clients_per_chunk: int
    on_samples: Callable[[int], None]
    stopping: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def _step_done(self, samples: int) -> None:
        with self.lock:
            self.on_samples(samples)
        if self.stopping.is_set():
            raise Stopped

    def train(
        self, step: Step, clients: Client, plan: Plan, lr: float, context: Tree, axes: Tree
    ) -> tuple[Client, dict[str, Tensor]]:
        """Trains K clients through a plan.

        Args:
            step: The local step of one client.
            clients: Stacked; their optimizer state is carried on, or begun where it is empty.
            plan: Their batches.
            lr: Learning rate of the round.
            context: What the objective is given beside the batch.
            axes: None for what of the context all clients share, 0 for what each has its own.

        Returns:
            The stacked clients after their last steps, and for each term of the objective its mean over a client's
            local steps, `[K]` (0 for a client without steps).
        """
        rate = torch.tensor(lr, dtype=self.transform.dtype, device=self.images.device)
        num_clients = plan.size.shape[1]
        starts = range(0, num_clients, self.clients_per_chunk)
        chunks = [slice(start, min(start + self.clients_per_chunk, num_clients)) for start in starts]

        def run(chunk: slice) -> tuple[Client, dict[str, Tensor]]:
            train = self._looped if chunk.stop - chunk.start == 1 else self._stacked
            own = select_axes(context, axes, chunk)
            return train(step, select(clients, chunk), plan, chunk, rate, own, axes)

        done = self.side_by_side(run, chunks)
        trained = [after for after, _ in done]
        sums = [(terms, rate.new_zeros(c.stop - c.start)) for (_, terms), c in zip(done, chunks, strict=True)]
        names = next((terms for terms, _ in sums if terms), {})  # a chunk whose clients took no step has none
        total = {name: torch.cat([terms.get(name, none) for terms, none in sums]) for name in names}
        steps = torch.as_tensor(plan.steps, device=self.images.device).clamp(min=1)
        return concatenate(trained), tree_map(lambda value: value / steps, total)

    def side_by_side(self, run: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """`run` of each item, in their order; on the CPU one item a thread, each operation on one thread.

        Two threads on two clients do more than two threads on every operation of one, much more where other programs
        want the cores too, and the results do not depend on the number of threads.
        """
        threads = torch.get_num_threads()
        if self.images.device.type != "cpu" or min(threads, len(items)) < 2:
            return [run(item) for item in items]
        pool = ThreadPoolExecutor(min(threads, len(items)), initializer=lambda: torch.set_num_threads(1))
        try:
            return list(pool.map(run, items))
        except BaseException:
            self.stopping.set()  # Ctrl-C, or a failure of one: the others need not go through their data
            raise
        finally:
            pool.shutdown(cancel_futures=True)
            self.stopping.clear()
            torch.set_num_threads(threads)  # the workers' setting was everyone's

    def _looped(
        self, step: Step, clients: Client, plan: Plan, chunk: slice, rate: Tensor, context: Tree, axes: Tree
    ) -> tuple[Client, dict[str, Tensor]]:
        """The chunk's only client through its batches, each with its true size."""
        k = chunk.start
        client, context = select(clients, 0), select_axes(context, axes, 0)
        client = tree_map(self._channels_last, client)
        if not client.optimizer:
            client = client._replace(optimizer=step.slots(client.params))
        total: dict[str, Tensor] = {}
        num_batches = torch.tensor(int(plan.num_batches[k]), device=self.images.device)
        for t in range(int(plan.steps[k])):
            size = int(plan.size[t, k])
            epoch_end = torch.tensor(bool(plan.epoch_end[t, k]), device=self.images.device)
            x, y = self.gather(plan.index[t, k, :size], None if plan.draws is None else plan.draws[t, k, :size])
            batch = Batch(self._channels_last(x), y, None, epoch_end, num_batches, rate)
            client, aux = step.update(client, batch, context)
            total = {name: value + total.get(name, 0.0) for name, value in aux.terms.items()}
            self._step_done(size)
        return stack([tree_map(Tensor.contiguous, client)]), tree_map(lambda value: value[None], total)

    def _stacked(
        self, step: Step, clients: Client, plan: Plan, chunk: slice, rate: Tensor, context: Tree, axes: Tree
    ) -> tuple[Client, dict[str, Tensor]]:
        """The chunk's clients together; those that have run out of data stand still under a mask."""
        device = self.images.device
        sizes = plan.size[:, chunk]
        steps = int(plan.steps[chunk].max())
        clients = tree_map(Tensor.contiguous, clients)
        if not clients.optimizer:
            slots = [step.slots(select(clients.params, k)) for k in range(chunk.stop - chunk.start)]
            clients = clients._replace(optimizer=stack(slots))
        batch_size = plan.index.shape[2]
        padded = bool(((sizes > 0) & (sizes < batch_size)).any())  # without padding no mask has to be carried along
        batch_axes = Batch(0, 0, 0 if padded else None, 0, 0, None)
        update = vmap(step.update, in_dims=(0, batch_axes, axes), randomness="error")
        num_batches = torch.as_tensor(plan.num_batches[chunk], device=device)
        total: dict[str, Tensor] = {}
        for t in range(steps):
            x, y = self.gather(plan.index[t, chunk], None if plan.draws is None else plan.draws[t, chunk])
            size = torch.as_tensor(sizes[t], device=device)
            mask = torch.arange(batch_size, device=device) < size[:, None] if padded else None
            epoch_end = torch.as_tensor(plan.epoch_end[t, chunk], device=device)
            token = _stacked.set(True)
            try:
                after, aux = update(clients, Batch(x, y, mask, epoch_end, num_batches, rate), context)
            finally:
                _stacked.reset(token)
            active = size > 0
            clients = where(active, after, clients)
            terms = where(active, aux.terms, tree_map(torch.zeros_like, aux.terms))
            total = {name: value + total.get(name, 0.0) for name, value in terms.items()}
            self._step_done(int(sizes[t].sum()))
        return clients, total

    def once(self, step: Step, clients: Client, batch: Batch, context: Tree, axes: Tree) -> tuple[Client, Aux]:
        """One local step of each of K clients on one batch that all are given.

        Args:
            step: The local step of one client.
            clients: Stacked; their optimizer state is carried on, or begun where it is empty.
            batch: The same for all.
            context: What the objective is given beside the batch.
            axes: None for what of the context all clients share, 0 for what each has its own.

        Returns:
            The stacked clients, and what the objective returned beside its value, stacked.
        """

        def of_one(own: Client, context: Tree) -> tuple[Client, Aux]:
            return step.update(own, batch, context)

        if not clients.optimizer:
            count = len(next(iter(clients.params.values())))
            clients = clients._replace(optimizer=stack([step.slots(select(clients.params, k)) for k in range(count)]))
        return self._each(of_one, (clients, context), (0, axes))

    def forward(self, network: Network, clients: Client, x: Tensor, train: bool) -> Output:
        """What each of K clients' models gives for one batch `x` `[B, channels, H, W]`, stacked, without gradients."""

        def of_one(params: Params, buffers: Params) -> Output:
            with torch.no_grad():
                return network(params, buffers, x, train=train)

        return self._each(of_one, (clients.params, clients.buffers), (0, 0))

    def _each(self, function: Callable[..., Tree], arguments: tuple, axes: tuple) -> Tree:
        """A function of one client for each of K, a chunk at a time; `axes` as in `train`, the first one 0."""
        num_clients = len(next(leaves(arguments[0])))
        starts = range(0, num_clients, self.clients_per_chunk)

        def of_chunk(start: int) -> Tree:
            chunk = slice(start, min(start + self.clients_per_chunk, num_clients))
            own = select_axes(arguments, axes, chunk)
            if chunk.stop - start == 1:
                return stack([function(*select_axes(own, axes, 0))])
            token = _stacked.set(True)
            try:
                return vmap(function, in_dims=axes, randomness="error")(*own)
            finally:
                _stacked.reset(token)

        return concatenate(self.side_by_side(of_chunk, list(starts)))

    def gather(self, index: np.ndarray, draws: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Network input and labels of the training examples `index` (any shape), augmented by `draws` if given."""
        device = self.images.device
        positions = torch.as_tensor(index, device=device)
        uniform = None if draws is None else torch.as_tensor(draws, device=device)
        return self.transform(self.images[positions], uniform), self.labels[positions]

    def _channels_last(self, tensor: Tensor) -> Tensor:
        """On the CPU, image-shaped tensors with the channels last, in which convolution and pooling are faster."""
        if tensor.dim() == 4 and tensor.device.type == "cpu":
            # Not `contiguous`: that leaves the strides of a single channel as they are, and the first layer slow.
            return tensor.to(memory_format=torch.channels_last)
        return tensor
