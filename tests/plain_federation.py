"""A federation whose clients train by a plain loop: one client after the other, true batch sizes, `torch.optim`.

`PlainFederation` puts this in the place of the engine, under any method. Of a client and its network in
`fedcli.core` only tuples are used.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedcli.core import backbones
from fedcli.core.batches import Batch
from fedcli.core.clients import Client, Step
from fedcli.core.federation import Federation
from fedcli.core.network import NetworkOutput
from fedcli.core.trees import select, select_axes, stack, tree_map
from tests.plain_loops import copy_tensors


class PlainNetwork:
    """A network that calls its module on the very parameters it is given, to train them, and on copies of buffers."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.feature_dim = module.feature_dim
        self.params = {name: value for name, value in module.named_parameters() if value.requires_grad}
        self.buffers = dict(module.named_buffers())
        self.buffers_after: dict[str, Tensor] | None = None  # of the last call in training mode

    def __call__(self, params, buffers, x, mask=None, train=True):
        new_buffers = {name: buffers[name].detach().clone() for name, _ in self.module.named_buffers()}
        features, logits = functional_call(self.module.train(train), {**params, **new_buffers}, (x,))
        if train:
            self.buffers_after = new_buffers
        return NetworkOutput(features, logits, new_buffers)


def with_key(client: Client, key: int) -> Client:
    """Returns a client with a key in all buffers from which dropout draws its masks."""
    keys = {name: torch.full_like(value, key) for name, value in client.buffers.items() if name.endswith(".key")}
    return client._replace(buffers={**client.buffers, **keys})


OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


class PlainUpdate:
    """One update of one client by torch.optim, in the place of `Federation.optimizer_step`."""

    def __init__(self, networks, loss, *, kind, lr, momentum, weight_decay, names, key, clip_norm):
        self.networks = networks
        self.loss = loss
        self.kind = kind
        self.lr = lr  # the round's if None
        self.names = names  # of the parameters that are trained; all if None
        self.key = key  # under which a client keeps the optimizer's state
        self.clip_norm = clip_norm
        self.options = {"weight_decay": weight_decay}
        if kind == "sgd":
            self.options["momentum"] = momentum

    def update(self, client, batch, context):
        params = {name: value.detach().clone().requires_grad_() for name, value in client.params.items()}
        names = params if self.names is None else self.names
        params_to_train = [params[name] for name in names]
        lr = float(batch.lr) if self.lr is None else self.lr
        optimizer = OPTIMIZERS[self.kind](params_to_train, lr=lr, **self.options)
        if self.key in client.optimizer:
            optimizer.load_state_dict({**optimizer.state_dict(), "state": client.optimizer[self.key]})

        for network in self.networks:
            network.buffers_after = None
        loss, aux = self.loss(params, client.buffers, batch, context)
        for network in self.networks:  # the buffers that the module has changed, whatever the objective says
            if network.buffers_after is not None and network.buffers_after.keys() == client.buffers.keys():
                aux = aux._replace(buffers=network.buffers_after)
        aux = aux._replace(buffers=copy_tensors(aux.buffers))

        loss.backward()
        if self.clip_norm:
            torch.nn.utils.clip_grad_norm_(params_to_train, self.clip_norm)
        optimizer.step()
        optimizer_state = tree_map(torch.clone, optimizer.state_dict()["state"])
        optimizers = {**client.optimizer, self.key: optimizer_state}
        return client._replace(params=copy_tensors(params), buffers=aux.buffers, optimizer=optimizers), aux

    def init_optimizer(self, params):
        return {}


def client_at(clients: Client, k: int) -> Client:
    """Returns client k of stacked ones."""
    params, buffers, memory = select((clients.params, clients.buffers, clients.memory), k)
    return Client(params, buffers, clients.optimizer.get(k, {}), memory)


def stack_clients(clients: list[Client]) -> Client:
    """Returns stacked clients, whose states of `torch.optim` are not stacked but kept by k, for `client_at`."""
    tensors = stack([(client.params, client.buffers, client.memory) for client in clients])
    params, buffers, memory = tree_map(Tensor.detach, tensors)
    optimizers = {k: client.optimizer for k, client in enumerate(clients)}
    return Client(params, buffers, optimizers, memory)


class PlainFederation(Federation):
    """A federation whose clients train by a plain loop."""

    def __init__(self, config, dataset, *others, **options):
        super().__init__(config, dataset, *others, **options)
        self.networks = []
        for name in self.backbones:
            module = backbones.build(name, dataset.channels, dataset.image_size, dataset.num_classes, config.seed)
            self.networks.append(PlainNetwork(module.to(self.dtype)))

    def optimizer_step(self, loss, **options_of_method):
        options = {
            "optimizer": self.config.optimizer,
            "lr": None,
            "momentum": self.config.momentum,
            "weight_decay": self.config.weight_decay,
            "names": None,
            "key": "local",
            "clip_norm": 0.0,
            **options_of_method,
        }
        return PlainUpdate(self.networks, loss, kind=options.pop("optimizer"), **options)

    def update_of(self, local):
        """Returns the update of a client for an objective, or for what a method has made of `optimizer_step`."""
        return local if isinstance(local, Step | PlainUpdate) else self.optimizer_step(local)

    def minibatch_of(self, plan, k, step, lr):
        """Returns the minibatch of client k in a step, without padding."""
        size = int(plan.size[step, k])
        index = torch.as_tensor(plan.index[step, k, :size])
        draws = None if plan.draws is None else torch.as_tensor(plan.draws[step, k, :size])
        return Batch(
            x=self.transform(self.engine.images[index], draws),
            y=self.engine.labels[index],
            mask=None,
            epoch_end=torch.tensor(bool(plan.epoch_end[step, k])),
            num_batches=torch.tensor(int(plan.num_batches[step, k])),
            lr=torch.tensor(lr, dtype=self.dtype),
        )

    def train(self, clients, cohort, local, context=None, axes=None, epochs=None):
        plan = self.plan(cohort, epochs)
        lr = self.lr(cohort.round)
        update = self.update_of(local)
        num_clients = len(cohort.client_ids)
        clients_after = []
        terms = {}
        for k in range(num_clients):
            client = client_at(clients, k)
            client_context = select_axes(context, axes, k)
            num_steps = int(plan.num_steps[k])
            for step in range(num_steps):
                client = with_key(client, int(plan.keys[step, k]))
                batch = self.minibatch_of(plan, k, step, lr)
                client, aux = update.update(client, batch, client_context)
                for name, value in aux.terms.items():
                    per_client = terms.setdefault(name, torch.zeros(num_clients, dtype=self.dtype))
                    per_client[k] += value.detach() / num_steps
            clients_after.append(with_key(client, 0))
        return stack_clients(clients_after), terms

    def step(self, clients, cohort, local, batch, context=None, axes=None):
        update = self.update_of(local)
        clients_after = []
        aux_of_clients = []
        for k in range(len(cohort.client_ids)):
            client = client_at(clients, k)
            if batch.key is not None:
                client = with_key(client, int(batch.key))
            client, aux = update.update(client, batch, select_axes(context, axes, k))
            clients_after.append(with_key(client, 0))
            aux_of_clients.append(tree_map(Tensor.detach, aux))
        return stack_clients(clients_after), stack(aux_of_clients)

    @torch.no_grad()
    def forward(self, clients, cohort, x, train=True):
        models = [select((clients.params, clients.buffers), k) for k in range(len(cohort.client_ids))]
        return stack([cohort.network(*model, x, train=train) for model in models])

    @torch.no_grad()
    def class_means(self, clients, cohort):
        num_clients = len(cohort.client_ids)
        means = torch.zeros(num_clients, self.num_classes, cohort.network.feature_dim, dtype=self.dtype)
        counts = torch.zeros(num_clients, self.num_classes, dtype=torch.int64)
        for k, client in enumerate(cohort.client_ids):
            model = select((clients.params, clients.buffers), k)
            for position in self.training[client]:
                label = int(self.engine.labels[position])
                x = self.transform(self.engine.images[position][None])  # [1, C, H, W]
                (features,) = cohort.network(*model, x, train=False).features
                means[k, label] += features
                counts[k, label] += 1
        return means / counts.clamp(min=1)[..., None], counts
