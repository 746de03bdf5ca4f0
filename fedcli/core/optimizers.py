"""Optimizers as pure functions of a client's parameters, and the local step that takes one."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcli.core.batches import Batch
from fedcli.core.clients import Aux, Client, LocalLoss, Params, Step
from fedcli.core.objectives import gradient
from fedcli.core.trees import Flat, Tree, pack, tree_map, unpack
from fedcli.errors import UserError

# Of Adam, as PyTorch has them.
BETA_1 = 0.9
BETA_2 = 0.999
EPSILON = 1e-8
NO_STATE = ()  # of SGD without momentum, a tree without tensors


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent, as `torch.optim.SGD` defines it (no dampening, no Nesterov).

    Its state are momentum buffers, or `NO_STATE` where momentum is 0.
    """

    momentum: float
    weight_decay: float

    def init_state(self, params: Params) -> Tree:
        """Returns the state before the first step."""
        return tree_map(torch.zeros_like, params) if self.momentum else NO_STATE

    def update(self, params: Params, grads: Params, state: Tree, lr: Tensor) -> tuple[Params, Tree]:
        """Returns the parameters and the state after a step."""
        new = {}
        velocity = {}
        for name, value in params.items():
            g = self._with_weight_decay(grads[name], value)
            if self.momentum:
                g = torch.add(g, state[name], alpha=self.momentum)
                velocity[name] = g
            new[name] = torch.addcmul(value, g, lr, value=-1)
        return new, velocity if self.momentum else NO_STATE

    def update_in_place(self, params: Params, grads: Params, state: Tree, lr: Tensor) -> tuple[Params, Tree]:
        """Writes what `update` returns over the parameters and the state, which halves memory traffic."""
        for name, value in params.items():
            g = self._with_weight_decay(grads[name], value)
            if self.momentum:
                g = torch.add(g, state[name], alpha=self.momentum, out=state[name])
            torch.addcmul(value, g, lr, value=-1, out=value)
        return params, state

    def update_fused(self, params: Params, grads: Params, state: Tree, lr: Tensor, idle: Tensor) -> None:
        """Updates in place by one operation of the device, which reads and writes every value once.

        A client stays as it is where `idle` is 1. All numbers are float32, as the operation reads `lr` and `idle`.
        """
        momenta = [state[name] for name in params] if self.momentum else []
        _FusedSgd.apply(self, list(params.values()), [grads[name] for name in params], momenta, lr, idle)

    def _with_weight_decay(self, g: Tensor, value: Tensor) -> Tensor:
        return torch.add(g, value, alpha=self.weight_decay) if self.weight_decay else g


class _FusedSgd(torch.autograd.Function):
    """The operation, with a rule for clients that are stacked: it is done for each, whose tensors are dense."""

    @staticmethod
    def forward(
        sgd: Sgd, params: list[Tensor], grads: list[Tensor], momenta: list[Tensor], lr: Tensor, idle: Tensor
    ) -> Tensor:
        torch._fused_sgd_(
            params, [grad.contiguous() for grad in grads], momenta, weight_decay=sgd.weight_decay,
            momentum=sgd.momentum, lr=lr, dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
            found_inf=idle,
        )  # fmt: skip
        return lr.new_empty(())  # a Function returns a tensor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        """Keeps nothing, as nobody asks for a gradient."""

    @staticmethod
    def vmap(  # noqa: PLR0913  # those of `forward`
        info: Any, in_dims: tuple, sgd: Sgd, params: list[Tensor], grads: list[Tensor], momenta: list[Tensor],
        lr: Tensor, idle: Tensor,
    ) -> tuple[Tensor, None]:  # fmt: skip
        _, *axes = in_dims
        for k in range(info.batch_size):
            tensors_of_client = tree_map(partial(_select_client, k=k), [params, grads, momenta, lr, idle], axes)
            result = _FusedSgd.forward(sgd, *tensors_of_client)
        return result, None


def _select_client(tensor: Tensor, axis: int | None, k: int) -> Tensor:
    """Returns client k's part of a tensor with this client axis; all of it where None, as all clients share it."""
    return tensor if axis is None else tensor.select(axis, k)


class AdamState(NamedTuple):
    """The state of Adam."""

    steps: Tensor  # scalar, steps taken
    first_moments: Params
    second_moments: Params


@dataclass(frozen=True)
class Adam:
    """Adam, as `torch.optim.Adam` defines it, with its defaults."""

    weight_decay: float = 0.0

    def init_state(self, params: Params) -> AdamState:
        """Returns the state before the first step."""
        first_value = next(iter(params.values()))
        steps = first_value.new_zeros(())
        zeros = tree_map(torch.zeros_like, params)
        return AdamState(steps, first_moments=zeros, second_moments=tree_map(torch.clone, zeros))

    def update(self, params: Params, grads: Params, state: AdamState, lr: Tensor) -> tuple[Params, AdamState]:
        """Returns the parameters and the state after a step."""
        if not isinstance(state, AdamState):  # in checkpoints of earlier versions
            state = AdamState(*state)
        steps = state.steps + 1
        step_size = lr / (1 - BETA_1**steps)
        correction = 1 - BETA_2**steps
        new = {}
        first_moments = {}
        second_moments = {}
        for name, value in params.items():
            g = grads[name]
            if self.weight_decay:
                g = g + self.weight_decay * value
            m = BETA_1 * state.first_moments[name] + (1 - BETA_1) * g
            v = BETA_2 * state.second_moments[name] + (1 - BETA_2) * g * g
            new[name] = value - step_size * m / ((v / correction).sqrt() + EPSILON)
            first_moments[name] = m
            second_moments[name] = v
        return new, AdamState(steps, first_moments, second_moments)


@dataclass(frozen=True)
class AdamW:
    """Adam with the weight decay apart from the gradient, as `torch.optim.AdamW` defines it."""

    weight_decay: float = 0.0

    def init_state(self, params: Params) -> AdamState:
        """Returns the state before the first step."""
        return Adam().init_state(params)

    def update(self, params: Params, grads: Params, state: AdamState, lr: Tensor) -> tuple[Params, AdamState]:
        """Returns the parameters and the state after a step."""
        if self.weight_decay:
            params = {name: value * (1 - lr * self.weight_decay) for name, value in params.items()}
        return Adam().update(params, grads, state, lr)


Optimizer = Sgd | Adam | AdamW


def make_optimizer(name: str, momentum: float, weight_decay: float) -> Optimizer:
    """Makes the optimizer of this name; the Adams have no use for the momentum."""
    if name == "sgd":
        return Sgd(momentum, weight_decay)
    if name == "adam":
        return Adam(weight_decay)
    if name == "adamw":
        return AdamW(weight_decay)
    raise UserError(f"unknown optimizer of a local step (got '{name}'); use sgd, adam or adamw.")


def clip(grads: Params, max_norm: float) -> Params:
    """Shortens gradients to the norm `max_norm`, of all together, if longer, as `torch.nn.utils.clip_grad_norm_`."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads.values()]))
    factor = clip_factor(norm, max_norm)
    return tree_map(lambda g: g * factor, grads)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Returns by what a gradient of this norm is multiplied to be clipped; as `torch.nn.utils.clip_grad_norm_`."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


@dataclass(frozen=True)
class OptimizerUpdate:
    """An update of a client by the gradient of its objective; for its fields see `Federation.optimizer_step`."""

    loss: LocalLoss
    optimizer: Optimizer
    lr: float | None  # the round's where None
    names: Collection[str] | None
    key: str
    clip_norm: float

    def as_step(self) -> Step:
        """Returns the local step that is this update alone."""
        if isinstance(self.optimizer, Sgd):
            return Step(self._update, self._init_states, partial(self._update_in_place, self.optimizer))
        return Step(self._update, self._init_states)

    def _update(self, client: Client, batch: Batch, context: Any) -> tuple[Client, Aux]:
        return self._update_by(self.optimizer.update, client, batch, context)

    def _update_by(
        self, optimize: Callable[..., tuple[Params, Tree]], client: Client, batch: Batch, context: Any
    ) -> tuple[Client, Aux]:
        """Updates the parameters that move; as one tensor where they are views of one, and so is their state."""
        moving = self._select_moving(client.params)
        state = client.optimizer[self.key]
        is_flat = isinstance(moving, Flat)
        params_template = moving if is_flat else None
        state_template = state if is_flat else None

        def all_params(packed: Params) -> Params:
            return self._merge(client.params, unpack(packed, params_template))

        packed = pack(moving, params_template)
        packed_state = pack(state, state_template)
        grads, aux = self._gradient(client, batch, context, packed, all_params)
        packed, packed_state = optimize(packed, grads, packed_state, self._lr_of(batch))
        states = {**client.optimizer, self.key: unpack(packed_state, state_template)}
        return client._replace(params=all_params(packed), buffers=aux.buffers, optimizer=states), aux

    def _update_in_place(self, sgd: Sgd, client: Client, batch: Batch, context: Any) -> tuple[Client, Aux]:
        """Updates over the client's own tensors where nobody is idle or one operation skips those who are."""
        if batch.idle is None:
            return self._update_by(sgd.update_in_place, client, batch, context)
        if all(value.dtype == torch.float32 for value in (batch.lr, *client.params.values())):
            return self._update_fused(sgd, client, batch, context, batch.idle)
        return self._update(client, batch, context)

    def _update_fused(self, sgd: Sgd, client: Client, batch: Batch, context: Any, idle: Tensor) -> tuple[Client, Aux]:
        """Updates by `Sgd.update_fused`, tensor by tensor."""

        def all_params(moving: Params) -> Params:
            return self._merge(client.params, moving)

        moving = dict(self._select_moving(client.params))
        grads, aux = self._gradient(client, batch, context, moving, all_params)
        sgd.update_fused(moving, grads, client.optimizer[self.key], self._lr_of(batch), idle)
        return client._replace(buffers=aux.buffers), aux

    def _gradient(
        self, client: Client, batch: Batch, context: Any, moving: Params, all_params: Callable[[Params], Params]
    ) -> tuple[Params, Aux]:
        """Returns the gradient of the objective by the parameters that move, and what else the objective gives.

        `all_params` makes all of the client's parameters of these. The objective's value is among the terms.
        """

        def objective(moving: Params) -> tuple[Tensor, Aux]:
            value, aux = self.loss(all_params(moving), client.buffers, batch, context)
            return value, aux.with_objective(value)

        grads, aux = gradient(objective, moving)
        if self.clip_norm:
            grads = clip(grads, self.clip_norm)
        return grads, aux

    def _lr_of(self, batch: Batch) -> Tensor:
        return batch.lr if self.lr is None else torch.full_like(batch.lr, self.lr)

    def _select_moving(self, params: Params) -> Params:
        """Returns the parameters that move."""
        if self.names is None:
            return params
        return {name: value for name, value in params.items() if name in self.names}

    def _merge(self, params: Params, moving: Params) -> Params:
        """Returns all parameters, those that move as `moving` has them."""
        return moving if self.names is None else {**params, **moving}

    def _init_states(self, params: Params) -> dict[str, Tree]:
        """Returns the optimizer's state before the first step, by its key; refuses a step that moves no parameter."""
        moving = self._select_moving(params)
        if not moving:
            raise UserError(
                f"a step of optimizer_step moves no parameter (got names={sorted(self.names or ())[:5]}); name some of "
                "the network's, or choose another --backbone."
            )
        return {self.key: self.optimizer.init_state(moving)}
