"""The clients of a run: their data, their networks, and the cohorts that are drawn from them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcli.core import backbones
from fedcli.core.clients import Model
from fedcli.core.draws import generator
from fedcli.core.image_set import ImageSet
from fedcli.core.layers import use_live_taps
from fedcli.core.network import Network
from fedcli.core.partition import count_classes
from fedcli.core.parts import Parts, divide
from fedcli.core.run_options import RunOptions
from fedcli.core.trees import Tree, concatenate, fill_missing_terms, select, tree_map
from fedcli.declarations import Sizes
from fedcli.errors import UserError


class Cohort(NamedTuple):
    """The clients of a round, in order of id unless a test permutes them."""

    round: int  # from 0
    client_ids: np.ndarray  # [K]
    num_examples: np.ndarray  # [K], all of a client's examples, its validation part included
    weights: Tensor  # [K], shares of the cohort's `Population.client_weights`; they sum to 1
    only_network: Network | None = None  # of all these clients; None where they have different ones

    @property
    def network(self) -> Network:
        """The network of all these clients; refuses where they have different ones, see `Population.groups`."""
        if self.only_network is None:
            raise UserError("this step needs clients of one network (got several); divide the cohort by fed.groups.")
        return self.only_network


class Population:
    """The clients of a run with their data and networks.

    Attributes:
        num_clients: Size of the population, N.
        num_classes: C.
        seed: Seed of the run; `fed.generator` draws from it.
        networks: The networks as pure functions of parameters and buffers, one of each architecture.
        architecture: `[N]`, which of the networks a client has.
        sizes: What costs depend on, of the largest network.
        training: Training examples of each client, positions in the training set.
        validation: Held-out examples of each client, positions in the training set.
        testing: Each client's own test part, positions in the training set; empty unless the protocol tests on it.
        client_weights: `[N]`, what a client counts in means: its examples, or 1 where the run has uniform weights.
        idle: Ids of the clients that have too few examples for a local step.
        domain_counts: `[N, domains]`, a client's examples of each domain; of one domain where there are none.
        domain_of: `[N]`, the domain that most of a client's examples come from.
    """

    def __init__(self, run: RunOptions, dataset: ImageSet, parts: Parts, device: torch.device, dtype: torch.dtype):
        """Divides the clients' data and builds their networks; see `Federation` for the arguments."""
        self.config = run
        self.device = device
        self.dtype = dtype  # of parameters and images
        self.num_clients = run.num_clients
        self.num_classes = dataset.num_classes
        self.seed = run.seed
        self._divide(parts)
        self._build_networks(dataset)
        self._count_domains(dataset, parts)

    def _divide(self, parts: Parts) -> None:
        """Divides the clients' examples into what they train on, are validated on and are tested on."""
        run = self.config
        division = divide(parts, run)
        self.examples = division.examples
        self.testing = division.testing
        self.training = division.training
        self.validation = division.validation
        num_examples = np.array([len(part) for part in self.examples])
        self.client_weights = num_examples if run.weighting == "examples" else np.ones_like(num_examples)
        least = run.batch_size if run.drop_last else 1
        self.idle = [client for client, part in enumerate(self.training) if len(part) < least]

    def _build_networks(self, dataset: ImageSet) -> None:
        """Builds the networks with their initial weights, and says which client has which."""
        run = self.config
        names = run.backbone.split(",")  # client i has the (i mod their number)-th
        self.backbones = list(dict.fromkeys(names))
        self.architecture = np.resize([self.backbones.index(name) for name in names], run.num_clients)
        modules = []
        self.dead_taps = False  # whether convolutions of some network leave out taps, which goes into the record
        for name in self.backbones:
            network = backbones.build(name, dataset.channels, dataset.image_size, dataset.num_classes, run.seed)
            modules.append(network.to(self.dtype))
            if use_live_taps(network, dataset.channels, dataset.image_size):
                self.dead_taps = True
        self.networks = [Network(module, run.precision, self.device) for module in modules]
        largest = max(self.networks, key=lambda network: network.num_parameters)
        self.sizes = Sizes(largest.num_parameters, self.num_classes, largest.feature_dim)

    def _count_domains(self, dataset: ImageSet, parts: Parts) -> None:
        """Counts the clients' examples of each domain."""
        self.domain_names = dataset.domain_names
        domains = torch.zeros_like(dataset.y_train) if dataset.domain_train is None else dataset.domain_train
        self.domain_counts = count_classes(parts, domains, max(len(dataset.domain_names), 1))
        self.domain_of = self.domain_counts.argmax(1)

    @property
    def network(self) -> Network:
        """Returns the network that all clients have; refuses if they have different ones."""
        first, *others = self.networks
        if others:
            raise UserError(
                f"this method needs one network for all clients (got --backbone {self.config.backbone}); name one."
            )
        return first

    @property
    def feature_dim(self) -> int:
        """Returns the width of the features, D; refuses if it is not the same for all networks."""
        widths = [network.feature_dim for network in self.networks]
        first, *others = widths
        if any(width != first for width in others):
            listed = ", ".join(f"{name} {width}" for name, width in zip(self.backbones, widths, strict=True))
            raise UserError(f"this method needs features of one width (got {listed}); choose networks of one width.")
        return first

    def generator(self, *purpose: int | str) -> np.random.Generator:
        """Makes the random generator of one purpose, for example `fed.generator(round, client, "order")`."""
        return generator(self.seed, *purpose)

    def initial_model(self, network: Network | None = None) -> Model:
        """Returns a network's initial model, parameters and buffers, drawn from the run's seed."""
        network = network or self.network
        return tree_map(lambda value: value.detach().clone(), Model(network.params, network.buffers))

    def cohort(self, round: int) -> Cohort:
        """Draws the cohort of a round, without replacement; ascending by id."""
        drawn = self.generator(round, "cohort").choice(self.num_clients, self.config.cohort_size, replace=False)
        return self.cohort_of(round, np.sort(drawn))

    def cohort_of(self, round: int, client_ids: Sequence[int] | np.ndarray) -> Cohort:
        """Makes the cohort of these clients."""
        num_examples = np.array([len(self.examples[client]) for client in client_ids])
        counted = self.client_weights[client_ids]
        total = counted.sum()
        shares = counted / total if total else np.full(len(counted), 1 / len(counted))
        weights = torch.tensor(shares, dtype=self.dtype, device=self.device)
        networks = [self.networks[architecture] for architecture in np.unique(self.architecture[client_ids])]
        only_network = networks[0] if len(networks) == 1 else None
        return Cohort(round, np.asarray(client_ids), num_examples, weights, only_network)

    def groups(self, cohort: Cohort) -> list[Cohort]:
        """Divides a cohort by the clients' networks; order and weights stay those of the cohort."""
        groups = []
        for architecture in range(len(self.networks)):
            members = np.flatnonzero(self.architecture[cohort.client_ids] == architecture)
            if len(members):
                group = self.cohort_of(cohort.round, cohort.client_ids[members])
                groups.append(group._replace(weights=cohort.weights[members]))
        return groups

    def of_group(self, tree: Tree, cohort: Cohort, group: Cohort) -> Tree:
        """Returns a group's part of a stacked tree `[K, ...]` in the cohort's order; the inverse of `in_order`."""
        positions = np.flatnonzero(np.isin(cohort.client_ids, group.client_ids))
        return select(tree, torch.as_tensor(positions, device=self.device))

    def in_order(self, cohort: Cohort, groups: Sequence[Cohort], trees: Sequence[Tree]) -> Tree:
        """Joins the groups' stacked trees into one `[K, ...]`, in the cohort's order.

        A term that only some groups have is 0 for the clients of the others.
        """
        ids = np.concatenate([group.client_ids for group in groups]).tolist()
        order = torch.tensor([ids.index(client) for client in cohort.client_ids], device=self.device)
        first, *others = trees
        if isinstance(first, dict) and any(tree.keys() != first.keys() for tree in others):
            zeros = [0 * group.weights for group in groups]
            trees = fill_missing_terms(trees, zeros)
        return select(concatenate(trees), order)
