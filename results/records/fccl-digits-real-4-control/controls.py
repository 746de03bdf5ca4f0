"""FCCL+ without the exchange: in the collaborative phase a client's own outputs are in the place of the mean of all.

What is left of the phase are its steps on public images: FCCM drives the logits of different classes apart, and FISL,
whose target is the similarity itself, moves nothing at first. All else is as in papers/fccl_plus.py.

    fedcli run ./results/records/fccl-digits-real-4-control/controls.py --protocol fccl:digit-domains \
        --dataset digits-real-4 --public-dataset cifar100 --public-examples 5000 --public-batch-size 250 --rounds 40 \
        --local-epochs 5 --lr 0.001 --backbone cnn-small,cnn-mcmahan,cnn-2x32,cnn-2x64 --regularizer none --alone
"""

from dataclasses import dataclass

import torch

from fedcli import Costs, Method, option
from fedcli.core import Batch, Client, Cohort, Federation, kept_models
from fedcli.core.federation import Terms
from fedcli.core.public_images import learn_from_public
from fedcli.papers import fccl_plus
from fedcli.papers.fccl_plus import ClientState, Exchanged, ServerState, Teacher


@dataclass(frozen=True)
class Config(fccl_plus.Config):
    """What the control adds to FCCL+."""

    alone: bool = option(False, "Take each client's own outputs in the place of the mean of all")


def own_outputs(models: list[Client], batch: Batch, cohort: Cohort, fed: Federation, config: Config) -> Exchanged:
    """Each client's logits `[K, B, C]` and similarities `[K, B, B-1]` of a public batch, before any update."""
    groups = fed.groups(cohort)
    outputs = [fed.forward(model, group, batch.x) for model, group in zip(models, groups, strict=True)]
    similarities = []
    for output in outputs:
        of_clients = [fccl_plus.similarity(features, config.similarity_temperature) for features in output.features]
        similarities.append(torch.stack(of_clients))
    logits = fed.in_order(cohort, groups, [output.logits for output in outputs])
    return Exchanged(logits, fed.in_order(cohort, groups, similarities))


def learn_alone(
    states: list[ClientState], cohort: Cohort, fed: Federation, config: Config
) -> tuple[list[Client], Terms]:
    """The collaborative phase of FCCL+ in which nobody sends anything, models included (`--average-parameters`)."""
    models = [Client(state.params, state.buffers) for state in states]
    losses = [fccl_plus.make_collaborative_loss(group.network, config) for group in fed.groups(cohort)]
    steps = [fed.optimizer_step(loss, weight_decay=0.0, key="public") for loss in losses]

    def target(models: list[Client], batch: Batch) -> Exchanged:
        return own_outputs(models, batch, cohort, fed, config)

    models, terms = learn_from_public(
        models, steps, target, cohort, fed, range(config.public_epochs), axes=0,
        keep_optimizer=config.public_optimizer == "phase",
    )  # fmt: skip
    return [Client(model.params, model.buffers) for model in models], terms


def run_round(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> tuple[ServerState, Terms]:
    """A round of FCCL+; with `--alone` without the exchange."""
    if not config.alone:
        return fccl_plus.run_round(state, cohort, fed, config)
    states = state.clients
    groups = fed.groups(cohort)
    recalled = []
    for group in groups:
        first = fed.initial_model(group.network)
        recalled.append(fed.recall(states, group, ClientState(first.params, first.buffers)))
    models, terms = learn_alone(recalled, cohort, fed, config)
    all_terms = []
    for model, previous, group in zip(models, recalled, groups, strict=True):
        teacher = Teacher(previous.params, previous.buffers)
        if config.teacher == "collaborative":
            teacher = Teacher(model.params, model.buffers)
        model, group_terms = fccl_plus.update_locally(model, teacher, group, fed, config)
        states = fed.remember(states, group, ClientState(model.params, model.buffers))
        all_terms.append(group_terms)
    return ServerState(states), {**terms, **fed.in_order(cohort, groups, all_terms)}


def costs(state: ServerState, cohort: Cohort, fed: Federation, config: Config) -> Costs:
    """Those of FCCL+; nothing with `--alone`."""
    return Costs(down=0, up=0) if config.alone else fccl_plus.costs(state, cohort, fed, config)


METHOD = Method(
    name="fccl-plus-controls",
    title="FCCL+ with a control",
    config=Config,
    init=fccl_plus.init,
    run_round=run_round,
    reduces_to=("fccl-plus", {"alone": False}),
    state_types=(ServerState, ClientState),
    costs=costs,
    client_memory=fccl_plus.METHOD.client_memory,
    personal=kept_models,
    mixed_networks=True,
    uses_public_data=True,
)
