"""How many operations a joint step does: one local step of each client. It decides the speed of a graph of many."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedcli.core.stacked import Stack
from tests import laws

# Operations that neither read nor write a value.
FREE = (torch.ops.aten.empty.memory_format, torch.ops.aten.detach.default)


class Count(TorchDispatchMode):
    """Counts operations that do something, views apart; each is at least one kernel on a GPU."""

    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        views = (value.alias_info is not None and not value.alias_info.is_write for value in function._schema.returns)
        self.operations += function not in FREE and not any(views)
        return function(*args, **(kwargs or {}))


def joint_step(monkeypatch, chunk, num_clients, backbone, images, batch_size, **run) -> int:
    """The operations of a joint step that is neither the first nor the last."""
    counts, step = [], Stack.step

    def counted(self, *arguments):
        with Count() as mode:
            step(self, *arguments)
        counts.append(mode.operations)

    monkeypatch.setattr(Stack, "step", counted)
    own = 3 * batch_size
    data = laws.toy_dataset(num_clients * own, *images, num_classes=10)
    run |= {"backbone": backbone, "batch_size": batch_size, "local_epochs": 1, "precision": "float32"}
    parts = laws.toy_parts([own] * num_clients)
    setup, fed = laws.federation(
        "fedavg", data=data, parts=parts, num_clients=num_clients, clients_per_chunk=chunk.format(num_clients), **run
    )
    laws.simulate(setup, fed, 1)
    assert len(counts) == 3
    return counts[1]


SGD = {"momentum": 0.9, "weight_decay": 0.0}
W1 = (10, "cnn-mcmahan", (1, 28), 4)
W2 = (20, "cnn-mcmahan", (1, 28), 4)
FEDFM = (10, "resnet18", (3, 32), 4)
CASES = {  # way and workload, options, and the most operations of a joint step
    "w1, stacked": ("{}", W1, SGD, 104),
    "w1, branches": ("branches:{}", W1, SGD, 350),
    "w2, branches": ("branches:{}", W2, SGD, 680),
    "FedFM's network, stacked": ("{}", FEDFM, {"momentum": 0.9, "weight_decay": 1e-5}, 552),
    "FedFM's network, branches": ("branches:{}", FEDFM, {"momentum": 0.9, "weight_decay": 1e-5}, 1612),
}


@pytest.mark.parametrize("case", CASES)
def test_a_joint_step_does_few_operations(case, monkeypatch):
    way, workload, run, most = CASES[case]
    assert joint_step(monkeypatch, way, *workload, **run) <= most
