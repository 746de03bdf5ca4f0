"""Optimizers as pure functions of a client's parameters, and the local step that takes one."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcli.core.batches import Batch
from fedcli.core.clients import OBJECTIVE, Aux, Client, LocalLoss, Params, Step, gradient
from fedcli.core.trees import Flat, Tree, pack, tree_map, unpack
from fedcli.errors import UserError

# Of Adam, as PyTorch has them.
BETA_1 = 0.9
BETA_2 = 0.999
EPSILON = 1e-8
NO_STATE = ()  # of SGD without momentum, a tree without tensors


def sgd(
    params: Params, grads: Params, state: Tree, lr: Tensor, momentum: float, weight_decay: float, in_place: bool = False
) -> tuple[Params, Tree]:
    """Updates by stochastic gradient descent, as `torch.optim.SGD` defines it (no dampening, no Nesterov).

    `state` holds momentum buffers, or is `NO_STATE` where momentum is 0. In place, results are written over `params`
    and `state`, which halves memory traffic. Returns the new parameters and the new optimizer state.
    """
    new = {}
    velocity = {}
    for name, value in params.items():
        g = grads[name]
        if weight_decay:
            g = torch.add(g, value, alpha=weight_decay)
        if momentum:
            g = torch.add(g, state[name], alpha=momentum, out=state[name] if in_place else None)
            velocity[name] = g
        new[name] = torch.addcmul(value, g, lr, value=-1, out=value if in_place else None)
    return new, velocity if momentum else NO_STATE


def fused_sgd(
    params: Params, grads: Params, state: Tree, lr: Tensor, momentum: float, weight_decay: float, idle: Tensor
) -> None:
    """Updates as `sgd` in place, by one operation of the device, which reads and writes every value once.

    A client stays as it is where `idle` is 1. All numbers are float32, as the operation reads `lr` and `idle`.
    """
    tensors = [*params.values(), *(grads[name] for name in params)]
    if momentum:
        tensors += [state[name] for name in params]
    _FusedSgd.apply(momentum, weight_decay, lr, idle, *tensors)


class _FusedSgd(torch.autograd.Function):
    """The operation, with a rule for clients that are stacked: it is done for each, whose tensors are dense.

    A Function takes tensors one by one: `lists` are all parameters, all gradients and, with momentum, all momenta.
    """

    @staticmethod
    def forward(momentum: float, weight_decay: float, lr: Tensor, idle: Tensor, *lists: Tensor) -> Tensor:
        count = len(lists) // (3 if momentum else 2)
        params = lists[:count]
        grads = lists[count : 2 * count]
        momenta = lists[2 * count :]
        torch._fused_sgd_(
            list(params), [grad.contiguous() for grad in grads], list(momenta), weight_decay=weight_decay,
            momentum=momentum, lr=lr, dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
            found_inf=idle,
        )  # fmt: skip
        return lr.new_empty(())  # a Function returns a tensor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        """Keeps nothing, as nobody asks for a gradient."""

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple, momentum: float, weight_decay: float, lr: Tensor, idle: Tensor, *lists: Tensor
    ) -> tuple[Tensor, None]:  # fmt: skip
        _, _, lr_axis, idle_axis, *axes = in_dims
        for k in range(info.batch_size):
            own_lr = _of_client(lr, lr_axis, k)
            own_idle = _of_client(idle, idle_axis, k)
            own_lists = [_of_client(tensor, axis, k) for tensor, axis in zip(lists, axes, strict=True)]
            result = _FusedSgd.forward(momentum, weight_decay, own_lr, own_idle, *own_lists)
        return result, None


def _of_client(tensor: Tensor, axis: int | None, k: int) -> Tensor:
    """Returns client k's part of a tensor with this client axis; all of it where None, as all clients share it."""
    return tensor if axis is None else tensor.select(axis, k)


class AdamState(NamedTuple):
    """The state of Adam."""

    steps: Tensor  # scalar, steps taken
    first_moments: Params
    second_moments: Params


def adam(
    params: Params, grads: Params, state: AdamState, lr: Tensor, weight_decay: float = 0.0
) -> tuple[Params, AdamState]:
    """Updates as `sgd`, by Adam as `torch.optim.Adam` defines it, with its defaults."""
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
        if weight_decay:
            g = g + weight_decay * value
        m = BETA_1 * state.first_moments[name] + (1 - BETA_1) * g
        v = BETA_2 * state.second_moments[name] + (1 - BETA_2) * g * g
        new[name] = value - step_size * m / ((v / correction).sqrt() + EPSILON)
        first_moments[name] = m
        second_moments[name] = v
    return new, AdamState(steps, first_moments, second_moments)


def adamw(
    params: Params, grads: Params, state: AdamState, lr: Tensor, weight_decay: float = 0.0
) -> tuple[Params, AdamState]:
    """Updates as `adam`, with the weight decay apart from the gradient, as `torch.optim.AdamW` defines it."""
    if weight_decay:
        params = {name: value * (1 - lr * weight_decay) for name, value in params.items()}
    return adam(params, grads, state, lr)


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
    optimizer: str
    lr: float | None  # the round's where None
    momentum: float
    weight_decay: float
    names: Collection[str] | None
    key: str
    clip_norm: float

    def as_step(self) -> Step:
        """Returns the local step that is this update alone."""
        in_place = self._update_in_place if self.optimizer == "sgd" else None
        return Step(self._update, self._init_states, in_place)

    def _update(self, client: Client, batch: Batch, context: Any, in_place: bool = False) -> tuple[Client, Aux]:
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
        packed, packed_state = self._optimize(packed, grads, packed_state, self._lr_of(batch), in_place)
        states = {**client.optimizer, self.key: unpack(packed_state, state_template)}
        return client._replace(params=all_params(packed), buffers=aux.buffers, optimizer=states), aux

    def _update_in_place(self, client: Client, batch: Batch, context: Any) -> tuple[Client, Aux]:
        """Updates by SGD, over the client's own tensors where nobody is idle or one operation skips those who are."""
        if batch.idle is None:
            return self._update(client, batch, context, in_place=True)
        if all(value.dtype == torch.float32 for value in (batch.lr, *client.params.values())):
            return self._update_fused(client, batch, context, batch.idle)
        return self._update(client, batch, context)

    def _update_fused(self, client: Client, batch: Batch, context: Any, idle: Tensor) -> tuple[Client, Aux]:
        """Updates by `fused_sgd`, tensor by tensor."""

        def all_params(moving: Params) -> Params:
            return self._merge(client.params, moving)

        moving = dict(self._select_moving(client.params))
        grads, aux = self._gradient(client, batch, context, moving, all_params)
        momenta = client.optimizer[self.key]
        fused_sgd(moving, grads, momenta, self._lr_of(batch), self.momentum, self.weight_decay, idle)
        return client._replace(buffers=aux.buffers), aux

    def _gradient(
        self, client: Client, batch: Batch, context: Any, moving: Params, all_params: Callable[[Params], Params]
    ) -> tuple[Params, Aux]:
        """Returns the gradient of the objective by the parameters that move, and what else the objective gives.

        `all_params` makes all of the client's parameters of these. The objective's value is among the terms.
        """

        def objective(moving: Params) -> tuple[Tensor, Aux]:
            value, aux = self.loss(all_params(moving), client.buffers, batch, context)
            return value, aux._replace(terms={**aux.terms, OBJECTIVE: value})

        grads, aux = gradient(objective, moving)
        if self.clip_norm:
            grads = clip(grads, self.clip_norm)
        return grads, aux

    def _optimize(self, params: Params, grads: Params, state: Tree, lr: Tensor, in_place: bool) -> tuple[Params, Tree]:
        """Returns the new parameters and the new state of the optimizer."""
        if self.optimizer == "sgd":
            return sgd(params, grads, state, lr, self.momentum, self.weight_decay, in_place)
        rule = adamw if self.optimizer == "adamw" else adam
        return rule(params, grads, state, lr, self.weight_decay)

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
        if not self._select_moving(params):
            raise UserError(
                f"a step of optimizer_step moves no parameter (got names={sorted(self.names or ())[:5]}); name some of "
                "the network's, or choose another --backbone."
            )
        return {self.key: self._init_state(params)}

    def _init_state(self, params: Params) -> Tree:
        if self.optimizer == "sgd" and not self.momentum:
            return NO_STATE
        zeros = tree_map(torch.zeros_like, self._select_moving(params))
        if self.optimizer == "sgd":
            return zeros
        first_value, *_ = params.values()
        return AdamState(
            steps=first_value.new_zeros(()), first_moments=zeros, second_moments=tree_map(torch.clone, zeros)
        )
