"""What the papers share, and all that a newcomer must read. A method file imports from here and from `fedcli`."""

from fedcli.core.aggregate import class_means, class_sums, cross_entropy, masked_mean, weighted_mean
from fedcli.core.batches import Batch, generator
from fedcli.core.clients import Aux, Client, LocalLoss, Network, Params, Step, gradient
from fedcli.core.federation import Cohort, Federation
from fedcli.core.model_parts import batchnorm_names, head_names, split
from fedcli.core.trees import select, stack, tree_map

__all__ = [
    "Aux", "Batch", "Client", "Cohort", "Federation", "LocalLoss", "Network", "Params", "Step", "batchnorm_names",
    "class_means", "class_sums", "cross_entropy", "generator", "gradient", "head_names", "masked_mean", "select",
    "split", "stack", "tree_map", "weighted_mean",
]  # fmt: skip

# Raised whenever a golden (tests/goldens.json) changes because of the core; it goes into every record, and a record
# with another number is outdated. Where a method's file changes its own numbers alone, its `Method.numerics` is raised.
# The first is of networks without dead taps (`fedcli.core.layers.LiveConv2d`), the second of those with some, whose
# convolutions leave them out since it is 2, and train those of few places one by one on a CPU since it is 3.
NUMERICS = (1, 3)
