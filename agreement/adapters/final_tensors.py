"""What a run of a peer ends with, and how adapters read it from models and clients."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from agreement.rows import Quantity
from agreement.small_networks import copy_parameters, select_body

TensorsByQuantity = dict[Quantity, list[Tensor]]  # what a run ends with, as the peer holds it


def read_personal_models(models: Iterable[Sequence[Tensor]]) -> TensorsByQuantity:
    """The parameters of the clients' models, whole and without their heads."""
    personal: list[Tensor] = []
    bodies: list[Tensor] = []
    for params in models:
        personal += params
        bodies += select_body(params)
    return {Quantity.PERSONAL: personal, Quantity.BODIES: bodies}


def read_kept(clients: Iterable[Any], attributes: Sequence[str]) -> list[Tensor]:
    """What stays with the clients, by its attributes: models, or numbers."""
    kept: list[Tensor] = []
    for client in clients:
        for attribute in attributes:
            kept += copy_kept(attrgetter(attribute)(client))
    return kept


def copy_kept(kept: nn.Module | float) -> list[Tensor]:
    """What a client keeps: a copy of a model's parameters, or a number as a tensor."""
    return copy_parameters(kept) if isinstance(kept, nn.Module) else [torch.tensor(kept)]
