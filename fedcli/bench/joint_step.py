"""What a joint step of a workload costs on a GPU, counted without one.

A joint step is a local step of each of a round's clients, as a CUDA graph holds it. It is taken on PyTorch's meta
device, whose tensors have shapes and no values, by FedAvg with full batches, of which each client has two.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fedcli.bench.gpu_model import H100
from fedcli.bench.operation_counts import OperationCount, OperationCounter
from fedcli.bench.workloads import Workload, prepare_workload, with_random_images
from fedcli.core.graphs import Work
from fedcli.core.objectives import plain_loss
from fedcli.core.stacked import Stack
from fedcli.core.trees import tree_map
from fedcli.errors import UserError
from fedcli.runs.prepare import prepare


class _NoGraphs:
    """Takes the place of a device's graphs, and does at once what they would hold."""

    num_captured = 0
    num_plain = 0

    def warm_up(self, work: Work) -> None:
        """Does the work, as graphs do before they capture it."""
        work()

    def capture(self, work: Work) -> Work:
        """Returns the work itself in the place of a replay."""
        return work

    def branch(self, works: Sequence[Work]) -> list[Any]:
        """Does works one after the other that graphs would do side by side."""
        return [work() for work in works]


@dataclass(frozen=True, kw_only=True)
class StepCount:
    """The counts of a joint step.

    Attributes:
        workload: The name of the workload.
        mode: How its clients are trained together, in words.
        precision: The precision, as `--precision` has it.
        operations: The counts of its operations.
        modelled_seconds: The time on an H100 by a model; None in a precision whose rates the model does not have.
    """

    workload: str
    mode: str
    precision: str
    operations: Sequence[OperationCount]
    modelled_seconds: float | None

    @property
    def kernels(self) -> int:
        """The number of kernels."""
        return sum(operation.kernels for operation in self.operations)

    @property
    def gigabytes(self) -> float:
        """The gigabytes read and written."""
        return sum(operation.bytes for operation in self.operations) / 1e9

    @property
    def gflop(self) -> float:
        """The floating-point operations, in GFLOP."""
        return sum(operation.flops for operation in self.operations) / 1e9

    def as_dict(self) -> dict[str, Any]:
        """Returns the step as `--json` prints it."""
        written = {
            "workload": self.workload,
            "mode": self.mode,
            "precision": self.precision,
            "kernels": self.kernels,
            "gigabytes": self.gigabytes,
            "gflop": self.gflop,
        }
        if self.modelled_seconds is not None:
            written["modelled_seconds"] = self.modelled_seconds
        return written


def count_step(workload: Workload, way: str, precision: str) -> StepCount:
    """Counts a joint step of a workload.

    Args:
        workload: The workload, all of whose clients of a round train together.
        way: The way in which the engine trains them together, one of `stacked.WAYS`.
        precision: The precision, as `--precision` has it.

    Raises:
        UserError: If the precision is bf16.
    """
    if precision == "bf16":
        raise UserError("a step in bf16 cannot be counted (got --precision bf16); choose float32, float64 or tf32.")
    stack = _train_on_meta(workload, way, precision)
    with OperationCounter() as counter:
        stack.take_step(padded=False, updates=stack.captured)
    modelled_seconds = None
    if precision == H100.precision:
        modelled_seconds = H100.compute_seconds(counter.operations)
    return StepCount(
        workload=workload.name,
        mode=f"{way} x {workload.cohort_size}",
        precision=precision,
        operations=counter.operations,
        modelled_seconds=modelled_seconds,
    )


def _train_on_meta(workload: Workload, way: str, precision: str) -> Stack:
    """Trains a workload's clients of a round for two steps on the meta device; returns their stack."""
    size = workload.cohort_size
    two_batches = replace(workload, num_clients=size, train_examples=2 * size * workload.batch_size, local_epochs=1)
    setup = prepare_workload(two_batches, device="cpu", precision=precision)
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
    (stack,) = engine.stacks.values()
    return stack
