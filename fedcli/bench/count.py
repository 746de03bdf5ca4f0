"""What a joint step of a workload costs on a GPU, counted without one.

A joint step is a local step of each of a round's clients, as a CUDA graph holds it. It is taken on PyTorch's meta
device, whose tensors have shapes and no values, by FedAvg with full batches, of which each client has two.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from fedcli.bench.kernel_counts import KernelCounts
from fedcli.bench.workloads import prepare_workload, with_random_images
from fedcli.core.clients import plain_loss
from fedcli.core.graphs import Work
from fedcli.core.trees import tree_map
from fedcli.runs.prepare import prepare


class _NoGraphs:
    """In the place of a device's graphs: what they would hold is done at once."""

    num_captured = 0
    num_plain = 0

    def warm_up(self, work: Work) -> None:
        work()

    def capture(self, work: Work) -> Work:
        return work

    def fork(self, works: Sequence[Work]) -> list[Any]:
        return [work() for work in works]


class CountedStep(NamedTuple):
    """What was counted of a joint step."""

    result: dict[str, Any]  # as `--json` prints it
    counts: KernelCounts  # by operation


def count_step(name: str, workload: dict[str, Any], way: str, precision: str) -> CountedStep:
    """Counts a joint step of a workload, see `fedcli.bench.workloads.WORKLOADS`, in one of `stacked.WAYS`."""
    size = workload["cohort_size"]
    two_batches = {
        "num_clients": size,
        "train_examples": 2 * size * workload["batch_size"],
        "local_epochs": 1,
    }
    setup = prepare_workload(workload | two_batches, device="cpu", precision=precision)
    fed = prepare(with_random_images(setup)).fed

    def to_meta(tensor: Tensor) -> Tensor:
        return tensor.to("meta")

    engine = replace(
        fed.engine,
        images=to_meta(fed.engine.images),
        labels=to_meta(fed.engine.labels),
        way=way,
        clients_per_chunk=size,
        joint_layers=True,
        graphs=_NoGraphs(),
    )
    cohort = fed.cohort(0)
    clients = tree_map(to_meta, fed.broadcast(*fed.initial_model(), cohort))
    step = fed.optimizer_step(plain_loss(fed.network))
    engine.train(step, clients, fed.plan(cohort), fed.lr(0), context=None, axes=None)
    take_step = engine.captured_step()
    with KernelCounts() as counts:
        take_step()
    result = {
        "workload": name,
        "way": f"{way} x {size}",
        "precision": precision,
        "kernels": counts.kernels.total(),
        "gigabytes": counts.bytes.total() / 1e9,
        "gflop": counts.flops.total() / 1e9,
        "milliseconds": 1e3 * counts.seconds,
    }
    return CountedStep(result, counts)
