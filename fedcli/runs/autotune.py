"""Chooses how many clients train together, and in which way, where `--clients-per-chunk` is left to `auto` on CUDA."""

import dataclasses
import gc
import platform
import resource

import torch

from fedcli.core.aggregate import cross_entropy
from fedcli.core.clients import Aux
from fedcli.core.federation import Federation, count_parameters
from fedcli.core.stacked import WAYS
from fedcli.core.trees import tree_map

STEPS = 16  # of a trial, enough for a capture
SHARE = 0.6  # of the memory that a trial may take: a method's step needs more than the plain one of a trial
Trial = tuple[float, int]  # seconds for one step of one client, and the most bytes that were used


def choose(tried: dict[tuple[str, int], Trial | None], room: int) -> tuple[str, int, str]:
    """Chooses one of `WAYS` and a number of clients, and says why in words.

    Args:
        tried: How it went in each way with each number of clients; None where the memory was too small.
        room: Bytes that the device has for this run.
    """
    fit = {which: trial for which, trial in tried.items() if trial and trial[1] <= SHARE * room}
    if not fit:
        return WAYS[0], 1, f"none of {len(tried)} ways tried leaves enough of {room / 2**30:.1f} GiB"
    way, size = min(fit, key=fit.get)
    cost = f"{1e3 * fit[way, size][0]:.3g} ms for a step of one client"
    return way, size, f"fastest of {len(tried)} ways tried, {cost}"


def autotune(fed: Federation) -> str | None:
    """Sets a federation's engine to what `choose` finds; returns its reason.

    Returns None, and sets nothing, where a number was given, and on a CPU: there one client trains in each thread.
    """
    if fed.config.clients_per_chunk != "auto" or fed.device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    room = torch.cuda.mem_get_info(fed.device)[0] + torch.cuda.memory_allocated(fed.device)
    share = -(-fed.config.cohort_size // fed.engine.workers.count)  # a larger chunk would leave a worker idle
    sizes = dict.fromkeys(max(share >> halvings, 1) for halvings in range(3))  # K, K/2, K/4
    several = [(way, size) for way in WAYS for size in sizes if size > 1]
    tried = {which: _try_out(fed, *which) for which in [*several, (WAYS[0], 1)]}
    fed.engine.way, fed.engine.clients_per_chunk, reason = choose(tried, room)
    torch.cuda.empty_cache()
    fed.start_round()
    return reason


def _try_out(fed: Federation, way: str, size: int) -> Trial | None:
    """Trains `size` clients for some steps by cross-entropy, twice: the second time is measured."""
    engine = dataclasses.replace(fed.engine, way=way, clients_per_chunk=size, on_samples=lambda count: None, notes=[])
    network = max(fed.networks, key=count_parameters)
    cohort = fed.cohort_of(0, fed.cohort(0).client_ids[:size])
    plan = fed.plan(cohort, range(1))
    first = tree_map(lambda rows: rows[:STEPS], plan._replace(num_batches=None))
    plan = first._replace(num_batches=plan.num_batches)
    clients = fed.broadcast(*fed.initial_model(network), cohort)

    def local_loss(params, buffers, batch, context):
        _, logits, buffers = network(params, buffers, batch.x, batch.mask)
        loss = cross_entropy(logits, batch.y, batch.mask)
        return loss, Aux(buffers, {"loss": loss})

    step = fed.optimizer_step(local_loss)
    for _ in range(2):
        fed.start_round()
        if fed.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(fed.device)
        with fed.timed("train"):
            engine.train(step, clients, plan, fed.lr(0), None, None)
    peak = peak_memory(fed.device)
    engine.stacks.clear()
    gc.collect()  # graphs that are garbage hold memory, the next trials' too
    # None where the chunk had to be halved.
    return None if engine.clients_per_chunk < size else (fed.seconds["train"] / max(int(plan.steps.sum()), 1), peak)


def peak_memory(device: torch.device) -> int:
    """Returns the most memory used so far, in bytes: of the CUDA device, else by the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)
