"""FedFM with its anchors of every round, for figures of how they move, as Figs. 10 and 11 of its paper.

An example for docs/add-your-method.md; all but the path is papers/fedfm.py. With `fedfa` in the place of `fedfm`, and
without `has_anchor`, which FedFA does not have, it keeps FedFA's.

Run it
    fedcli run docs/examples/my_anchor_path.py --protocol fedfm:digits --match-weight 5 --start-round 5
"""

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from fedcli.core import Buffers, Params
from fedcli.papers import fedfm


class ServerState(NamedTuple):
    """What FedFM's server keeps between rounds, and the path of its anchors."""

    params: Params
    buffers: Buffers
    anchors: Tensor  # [C, D]
    has_anchor: Tensor  # [C], bool
    path: Tensor  # [rounds, C, D], zeros for rounds to come


def init(fed, config) -> ServerState:
    """FedFM's first state; no round has had anchors."""
    first = fedfm.init(fed, config)
    return ServerState(*first, path=first.anchors.new_zeros(fed.num_rounds, *first.anchors.shape))


def run_round(state: ServerState, cohort, fed, config):
    """A round of FedFM, whose anchors are put into the path."""
    after, terms = fedfm.run_round(state, cohort, fed, config)
    path = state.path.clone()
    path[cohort.round] = after.anchors
    return ServerState(*after, path=path), terms


METHOD = replace(
    fedfm.METHOD,
    name="fedfm-path",
    title="FedFM that keeps the path of its anchors",
    init=init,
    run_round=run_round,
    state_types=(ServerState,),
)
