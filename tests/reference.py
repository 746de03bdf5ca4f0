"""Local training the plain way: one `nn.Module`, `torch.optim`, one client after the other, true batch sizes.

Nothing of `fedcli.clients` is used. `ReferenceFederation` puts it in the engine's place under any method.
"""

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedcli import backbones
from fedcli.batches import Batch
from fedcli.federation import Federation


class Output(NamedTuple):
    features: Tensor
    logits: Tensor
    buffers: dict[str, Tensor]


class Trained(NamedTuple):
    """Takes the place of the engine's stacked clients."""

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimizer: dict
    memory: tuple = ()


def load(module: nn.Module, params: dict[str, Tensor], buffers: dict[str, Tensor]) -> nn.Module:
    """The module with other values in its own parameters and buffers."""
    with torch.no_grad():
        for name, value in module.named_parameters():
            value.copy_(params[name])
        for name, value in module.named_buffers():
            value.copy_(buffers[name])
    return module


class PlainNetwork:
    """Calls a module as it is; given other parameters than its own, a copy of it that holds those."""

    def __init__(self, module: nn.Module):
        self.module, self.feature_dim = module, module.feature_dim

    def __call__(self, params, buffers, x, mask=None, train=True):
        own = dict(self.module.named_parameters())
        live = all(params[name] is own[name] for name in own)
        module = self.module if live else load(copy.deepcopy(self.module), params, buffers)
        module.train(train)
        features, logits = module(x)
        return Output(features, logits, dict(module.named_buffers()))


def optimizer_of(module: nn.Module, config, lr: float) -> torch.optim.Optimizer:
    if config.optimizer == "adam":
        return torch.optim.Adam(module.parameters(), lr=lr, weight_decay=config.weight_decay)
    return torch.optim.SGD(module.parameters(), lr=lr, momentum=config.momentum, weight_decay=config.weight_decay)


def slice_context(context, axes, k):
    """Client k's part of a context."""
    if axes is None or context is None:
        return context
    if isinstance(context, Tensor):
        return context[k]
    if isinstance(context, dict):
        return {name: slice_context(value, axes if axes == 0 else axes[name], k) for name, value in context.items()}
    pairs = zip(context, [0] * len(context) if axes == 0 else axes, strict=True)
    return type(context)(*(slice_context(value, axis, k) for value, axis in pairs))


class ReferenceFederation(Federation):
    """A federation whose clients train by a plain loop."""

    def __init__(self, setup, dataset, parts):
        super().__init__(setup, dataset, parts)
        run = setup.run
        module = backbones.build(run.backbone, dataset.channels, dataset.image_size, dataset.num_classes, run.seed)
        self.network = PlainNetwork(module.to(self.dtype))

    def train(self, clients, cohort, local, context=None, axes=None, epochs=None):
        plan, lr = self.plan(cohort, epochs), self.lr(cohort.round)
        module, trained, terms = self.network.module, [], {}
        for k in range(len(cohort.client_ids)):
            own = {name: value[k] for name, value in clients.params.items()}
            load(module, own, {name: value[k] for name, value in clients.buffers.items()})
            optimizer = optimizer_of(module, self.config, lr)
            for t in range(int(plan.steps[k])):
                size = int(plan.size[t, k])
                draws = None if plan.draws is None else torch.as_tensor(plan.draws[t, k, :size])
                index = torch.as_tensor(plan.index[t, k, :size])
                x, y = self.transform(self.engine.images[index], draws), self.engine.labels[index]
                end, count = torch.tensor(bool(plan.epoch_end[t, k])), torch.tensor(int(plan.num_batches[k]))
                batch = Batch(x, y, None, end, count, torch.tensor(lr, dtype=self.dtype))
                params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
                loss, aux = local(params, buffers, batch, slice_context(context, axes, k))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                for name, value in aux.terms.items():
                    per_client = terms.setdefault(name, torch.zeros(len(cohort.client_ids), dtype=self.dtype))
                    per_client[k] += value.detach() / int(plan.steps[k])
            params = {name: value.detach().clone() for name, value in module.named_parameters()}
            trained.append((params, {name: value.clone() for name, value in module.named_buffers()}))
        stacked = [{name: torch.stack([pair[i][name] for pair in trained]) for name in trained[0][i]} for i in (0, 1)]
        return Trained(*stacked, optimizer={}), terms

    def class_means(self, clients, cohort):
        means = torch.zeros(len(cohort.client_ids), self.num_classes, self.feature_dim, dtype=self.dtype)
        counts = torch.zeros(len(cohort.client_ids), self.num_classes, dtype=torch.int64)
        for k, client in enumerate(cohort.client_ids):
            model = [{name: value[k] for name, value in tree.items()} for tree in (clients.params, clients.buffers)]
            for position in self.training[client]:
                label = int(self.engine.labels[position])
                x = self.transform(self.engine.images[position][None])
                with torch.no_grad():
                    means[k, label] += self.network(*model, x, train=False).features[0]
                counts[k, label] += 1
        return means / counts.clamp(min=1)[..., None], counts
