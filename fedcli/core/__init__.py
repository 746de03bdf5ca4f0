"""What the papers share, and all that a newcomer must read. A method file imports from here and from `fedcli`.

The modules in the order in which to read them:

1. `trees`, `batches`, `clients`, `aggregate`, `objectives`, `learning_rates`, `optimizers`: tensors in trees, the
   batches of a round, a client, its local step, and means over clients.
2. `image_set`, `draws`, `augment`, `partition` with `partition_rules`, `partition_files`, `numbers_in_flags` and
   `parts`: images, random draws, and which images a client has.
3. Networks as pure functions: `network`, `backbones`, `body_and_head`, `user_networks`, `layers`, `keyed_draws`,
   `joint_layers`.
4. `population`, `federation`, with `run_options`, `traffic` and `exchanged_models`: the clients of a run, and what a
   method can ask of them.
5. What methods share: `own_models`, `class_vectors`, `public_images`, `network_pairs`, `model_parts`.
6. `engine`, `stacked`, `graphs`, `parallel`, `forks`, `switches`: how a cohort is trained, by graphs on CUDA and by
   threads or processes on a CPU.
7. `client_states`, `tree_files`, `evaluation`, `output_cache`, `drift`: what clients keep from round to round, and how
   models are tested and measured.
"""

from fedcli.core.aggregate import (
    class_means,
    class_sums,
    cross_entropy,
    divergence,
    masked_mean,
    quotient,
    root,
    weighted_mean,
)
from fedcli.core.batches import Batch
from fedcli.core.class_vectors import distance, no_vectors, unit
from fedcli.core.clients import Aux, Buffers, Client, LocalLoss, Model, Params, Step, axes_of, composed, model_of
from fedcli.core.draws import generator
from fedcli.core.federation import Federation
from fedcli.core.learning_rates import cosine_annealing, step_length
from fedcli.core.model_parts import batchnorm_names, head_names, split, split_model
from fedcli.core.network import Network
from fedcli.core.objectives import gradient, inner_product, plain_loss, squared_distance
from fedcli.core.own_models import ClientState, own_models, personal_models, train_own_models
from fedcli.core.population import Cohort
from fedcli.core.trees import copies, select, stack, to_device, tree_map

__all__ = [
    "Aux", "Batch", "Buffers", "Client", "ClientState", "Cohort", "Federation", "LocalLoss", "Model", "Network",
    "Params", "Step", "axes_of", "batchnorm_names", "class_means", "class_sums", "composed", "copies",
    "cosine_annealing", "cross_entropy", "distance", "divergence", "generator", "gradient", "head_names",
    "inner_product", "masked_mean", "model_of", "no_vectors", "own_models", "personal_models", "plain_loss", "quotient",
    "root", "select", "split", "split_model", "squared_distance", "stack", "step_length", "to_device",
    "train_own_models", "tree_map", "unit", "weighted_mean",
]  # fmt: skip

kept_models = personal_models  # its first name

# The version of the core's arithmetic: raised whenever a golden (tests/goldens.json) changes because of the core. It
# goes into every record, and a record with another number is outdated. Where a method's file changes its own numbers
# alone, its `Method.numerics` is raised.
NUMERICS = 1
# The same of networks with dead taps (`fedcli.core.layers.LiveConv2d`): since 2 their convolutions leave them out, and
# since 3 those of few places are trained place by place on a CPU.
NUMERICS_WITH_DEAD_TAPS = 3
