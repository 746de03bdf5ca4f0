"""Chooses how clients train together where `--clients-per-chunk` is `auto` on CUDA."""

import dataclasses
import gc
import math
import platform
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from fedcli.core.aggregate import cross_entropy
from fedcli.core.clients import Aux
from fedcli.core.engine import Chunking, Engine
from fedcli.core.federation import Federation
from fedcli.core.parallel import ItemRunner
from fedcli.core.stacked import BRANCHES, WAYS
from fedcli.core.trees import tree_map
from fedcli.errors import first_line

STEPS_PER_PASS = 16  # in a trial
MAX_PASSES = 8  # passes of a trial at most, until all its steps are replays


def autotune(fed: Federation) -> str | None:
    """Sets a federation's engine to the fastest of `WAYS` for as many clients as memory allows; returns the reason.

    Where a number was given, and on a CPU, where one client trains in each thread, sets nothing and returns None.
    """
    if fed.requested_chunking is not None or fed.device.type != "cuda":
        return None
    # A larger chunk would leave a worker idle.
    size = math.ceil(fed.config.cohort_size / fed.engine.runner.workers.world_size)
    ways = WAYS if fed.takes_vmap else (BRANCHES,)
    tried: dict[str, Trial] = {}
    failed: dict[str, RuntimeError] = {}
    for way in ways:
        try:
            tried[way] = try_out(fed, way, size)
        except RuntimeError as error:  # as of an operation that has no deterministic form on this device
            failed[way] = error
    if not tried:
        raise next(iter(failed.values()))
    fastest = min(tried, key=lambda way: tried[way].seconds)
    fed.engine.use_chunking(Chunking(fastest, tried[fastest].clients_per_chunk))
    torch.cuda.empty_cache()
    reset_peak_memory(fed.device)
    reason = f"fastest of {len(tried)} ways tried, {1e3 * tried[fastest].seconds:.3g} ms for a step of one client"
    for way, failure in failed.items():
        reason += f"; {way} failed: {first_line(failure)}"
    return reason


class Trial(NamedTuple):
    """What a way to train clients together has taken."""

    seconds: float  # for a step of one client
    clients_per_chunk: int  # fewer than were to train together if the memory is too small


def try_out(fed: Federation, way: str, size: int) -> Trial:
    """Trains `size` clients for some steps by cross-entropy, and measures the first pass of replays alone."""
    runner = ItemRunner(fed.device, fed.engine.runner.workers)
    engine = dataclasses.replace(fed.engine, way=way, clients_per_chunk=size, runner=runner, notes=[])
    network = max(fed.networks, key=lambda network: network.num_parameters)
    cohort = fed.cohort_of(0, fed.cohort(0).client_ids[:size])
    plan = tree_map(lambda rows: rows[:STEPS_PER_PASS], fed.plan(cohort, range(1)))
    clients = fed.broadcast(*fed.initial_model(network), cohort)

    def local_loss(params, buffers, batch, context):
        _, logits, buffers = network(params, buffers, batch.x, batch.mask)
        loss = cross_entropy(logits, batch.y, batch.mask)
        return loss, Aux(buffers, {"loss": loss})

    step = fed.optimizer_step(local_loss)
    for _ in until_captured(engine, MAX_PASSES):
        fed.start_round()
        with fed.timed("train"):
            engine.train(step, clients, plan, fed.lr(0), None, None)
    engine.forget_graphs()
    gc.collect()  # graphs that are garbage hold memory, the next trial's too
    return Trial(fed.seconds["train"] / max(int(plan.num_steps.sum()), 1), engine.clients_per_chunk)


def until_captured(engine: Engine, max_passes: int) -> Iterator[None]:
    """Yields before each of some passes: two without graphs, else as many as it takes until all steps are replays.

    On CUDA the first steps of each kind go by their operations, and one kind may have a step a pass.
    """
    graphs = engine.graphs
    for pass_index in range(max_passes):
        plain = 0 if graphs is None else graphs.num_plain
        yield
        if graphs is None or engine.graphs is None:  # there are none, or none any more
            if pass_index > 0:
                return
        elif graphs.num_plain == plain:
            return


def peak_memory(device: torch.device) -> int:
    """Returns the most memory used so far, in bytes, of the CUDA device or else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


def reset_peak_memory(device: torch.device) -> None:
    """Lets `peak_memory` count from here on, where the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # no Linux, or one that does not allow it
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
