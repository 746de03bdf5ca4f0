"""FedFM with one thing changed when matching starts, to tell why its accuracy falls there; and a step after training.

The objective, the anchors and the rounds are those of papers/fedfm.py.

    fedcli run ./results/records/fedfm-start/controls.py --protocol fedfm:niid-1 --dataset digits --backbone resnet18 \
        --local-epochs 4 --batch-size 32 --rounds 7 --start-round 6 --rescale 10 --post reestimate
"""

from dataclasses import dataclass
from typing import Any

from fedcli import Method, Post, option
from fedcli.core import Aux, Batch, Client, Cohort, Federation, LocalLoss, Network, Params, Step, weighted_mean
from fedcli.papers import fedfm
from fedcli.papers.fedfm import ServerState


@dataclass(frozen=True)
class Config(fedfm.Config):
    """What the controls add to FedFM."""

    rescale: float = option(
        1.0, "Factor on the convolutions before batch normalisation when matching starts", low=1, off=1
    )
    divide: float = option(1.0, "Divisor of the objective in rounds with matching", low=1, off=1)
    long_epochs: int = option(0, "Local epochs in rounds with matching, 0 for those of the run", low=0, off=0)


def rescale(params: Params, buffers: Params, factor: float) -> tuple[Params, Params]:
    """The same function by longer weights: convolutions and their running statistics, multiplied.

    All convolutions of the network stand before batch normalisation, which divides by what they are multiplied by.
    """
    longer = {name: factor * value if value.ndim == 4 else value for name, value in params.items()}
    powers = {"running_mean": 1, "running_var": 2}
    scaled = {}
    for name, value in buffers.items():
        power = powers.get(name.rpartition(".")[2])
        scaled[name] = value if power is None else factor**power * value
    return longer, scaled


def make_local_loss(network: Network, config: Config) -> LocalLoss:
    """FedFM's objective, divided where matching is on."""
    plain = fedfm.make_local_loss(network, config)

    def local_loss(params, buffers, batch, context):
        loss, aux = plain(params, buffers, batch, context)
        is_on = (context.weight > 0).to(loss)
        return loss / (1 + is_on * (config.divide - 1)), aux

    return local_loss


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, dict]:
    """A round of FedFM with the controls."""
    if cohort.round == config.start_round:
        params, buffers = rescale(state.params, state.buffers, config.rescale)
        state = state._replace(params=params, buffers=buffers)
    clients = fed.broadcast(state.params, state.buffers, cohort)
    anchors, has_anchor = fedfm.exchange_anchors(clients, state, cohort, fed, config)
    context = fedfm.matching_context(fed.download(anchors, cohort), has_anchor, cohort, config)
    local_step = fed.optimizer_step(make_local_loss(fed.network, config), clip_norm=config.clip_norm)
    is_long = config.long_epochs and cohort.round >= config.start_round
    epochs = range(config.long_epochs) if is_long else None
    clients, terms = fed.train(clients, cohort, local_step, context, epochs=epochs)
    terms |= fedfm.start_terms(state, cohort, config)
    params, buffers = weighted_mean(fed.upload_model(clients), cohort.weights)
    return ServerState(params, buffers, anchors, has_anchor), terms


METHOD = Method(
    name="fedfm-controls",
    title="FedFM with controls",
    config=Config,
    init=fedfm.init,
    run_round=run_round,
    reduces_to=("fedfm", {"rescale": 1.0, "divide": 1.0, "long_epochs": 0}),
    state_types=(ServerState,),
    costs=fedfm.METHOD.costs,
    client_memory=fedfm.METHOD.client_memory,
)


@dataclass(frozen=True)
class ReestimateConfig:
    """Options of the step after the last round."""

    reestimate_epochs: int = option(20, "Passes over the training images", low=1)


def reestimate(
    params: Params, buffers: Params, fed: Federation, config: ReestimateConfig
) -> tuple[Params, Params, int]:
    """The model with running statistics of the averaged weights, from the clients' training images.

    Each client runs its images through the network in training mode, which moves the statistics by a tenth of each
    minibatch; the server takes their mean. The parameters stay.
    """

    def update(client: Client, batch: Batch, context: Any) -> tuple[Client, Aux]:
        _, _, buffers = fed.network(client.params, client.buffers, batch.x, batch.mask)
        return client._replace(buffers=buffers), Aux(buffers, {})

    cohort = fed.cohort_of(fed.num_rounds, range(len(fed.training)))
    clients = fed.broadcast(params, buffers, cohort)
    step = Step(update, lambda params: {})
    clients, _ = fed.train(clients, cohort, step, epochs=range(config.reestimate_epochs))
    floats = sum(value.numel() for value in buffers.values())
    return params, weighted_mean(clients.buffers, cohort.weights), floats


POST = Post(
    name="reestimate",
    title="Running statistics estimated anew",
    config=ReestimateConfig,
    apply=reestimate,
)
