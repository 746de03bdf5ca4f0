"""How alike the logits of all clients' own models are to their mean, on the same images."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcli.core.evaluation import model_to_test
from fedcli.core.federation import Federation
from fedcli.core.network import NetworkOutput
from fedcli.core.trees import tree_map
from fedcli.declarations import Method
from fedcli.errors import UserError
from fedcli.measure.sampling import sample

MAX_IMAGES = 500  # of the public ones, and of each client's own


def public_sample(fed: Federation) -> Tensor:
    """Some public images `[n, channels, H, W]`, normalised and not augmented."""
    if fed.public_images is None or fed.public_transform is None:
        raise UserError("the run has no public images (got no --public-dataset); choose a run of a method with some.")
    chosen = sample(len(fed.public_images), MAX_IMAGES, "correlation")
    positions = torch.as_tensor(chosen, device=fed.device)
    return fed.public_transform(fed.public_images[positions])


@torch.no_grad()
def correlations(fed: Federation, method: Method, state: Any, public: Tensor) -> dict[str, np.ndarray]:
    """The clients' mean cross-correlations `[C, C]` on `public` images and on `private` ones, each client's own.

    The private mean leaves out clients with fewer than two training images.
    """
    networks = [_network_of(client, fed, method, state) for client in range(fed.num_clients)]
    public_logits = _logits(networks, public.to(fed.device, fed.dtype))
    on_public = [cross_correlation(logits, public_logits.mean(0)) for logits in public_logits]
    on_private = []
    for client, training in enumerate(fed.training):
        if len(training) < 2:
            continue
        chosen = sample(len(training), MAX_IMAGES, client, "correlation")
        images, _ = fed.engine.gather(training[chosen])
        private_logits = _logits(networks, images)
        on_private.append(cross_correlation(private_logits[client], private_logits.mean(0)))
    if not on_private:
        raise UserError("no client has two training images (got one or none each); a correlation needs larger clients.")
    return {"public": _mean(on_public), "private": _mean(on_private)}


def _network_of(client: int, fed: Federation, method: Method, state: Any) -> Callable[[Tensor], NetworkOutput]:
    """A client's own model in evaluation mode, as a function of images."""
    model = model_to_test(fed, method, state, client)
    tensors = (model.params, model.buffers)
    params, buffers = tree_map(lambda leaf: leaf.to(fed.device), tensors)  # some may lie on the host
    return partial(model.network, params, buffers, train=False)


def _logits(networks: Sequence[Callable[[Tensor], NetworkOutput]], images: Tensor) -> Tensor:
    """Logits `[N, n, C]` of the clients' models for images, in double precision."""
    return torch.stack([network(images).logits for network in networks]).double()


def _mean(matrices: list[Tensor]) -> np.ndarray:
    return torch.stack(matrices).mean(0).cpu().numpy()


def cross_correlation(logits: Tensor, mean_logits: Tensor) -> Tensor:
    """Pearson's correlation `[C, C]` of a client's logits `[n, C]`, the rows, with the mean of all clients.

    It is 0 where one of the two is constant.
    """
    num_classes = logits.shape[1]
    of_all_pairs = torch.cat((logits, mean_logits), 1).T.corrcoef()  # [2 C, 2 C]
    return of_all_pairs[:num_classes, num_classes:].nan_to_num()
