"""Clients that train in branches of a graph, on the fake CUDA device."""

import random
from itertools import product

from fedcli import registry, toy
from tests.fake_cuda_runs import early_captures, on_fake_cuda, run_on_cpu, run_on_fake_cuda
from tests.toy_methods import make_quick

WAYS = ("branches:4", "branches:3")  # of training the four clients of a round


@on_fake_cuda
def train_on_fake_cuda(number: int) -> str | None:
    """Four rounds of a method in graphs of steps end in the bits of the steps on the CPU, and are captured early."""
    draw = random.Random(number)
    name, way = list(product(registry.methods(), WAYS))[number]  # both ways also where the first half alone is tried
    sizes = [draw.randint(1, 9) for _ in range(4)]
    options = {
        "clients_per_chunk": way,
        "parts": toy.toy_parts(sizes),
        "local_epochs": draw.randint(1, 2),
        "momentum": draw.choice((0.0, 0.9)),
        "lr_decay": draw.choice((1.0, 0.5)),
        "backbone": toy.BATCHNORM,
    }
    description = f"{name}, {way}, clients of {sizes}"
    method = make_quick(registry.find_method(name))
    with early_captures():
        run = run_on_fake_cuda(method, rounds=4, **options)
        distance = toy.distance(run.state, run_on_cpu(method, rounds=4, **options))
    if run.fed.engine.notes or distance:
        return f"{description}: {distance}, {run.fed.engine.notes}"
    if way == "branches:4" and run.rounds[-1]["captures"]:
        return f"{description}: a capture in the fourth round"
    if not run.device.replays:
        return f"{description}: no replay"
    return None


def train_in_branches(number: int) -> str | None:
    """A method ends in the same bits on the fake CUDA device, in a process that has it, as on the CPU."""
    return train_on_fake_cuda(number=number)
