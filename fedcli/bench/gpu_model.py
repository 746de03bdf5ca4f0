"""The time that operations take by a model of a GPU, which orders ways of doing the same; it is no measurement."""

from collections.abc import Iterable
from dataclasses import dataclass

from fedcli.bench.operation_counts import OperationCount


@dataclass(frozen=True, kw_only=True)
class GPUModel:
    """A GPU on which an operation takes as long as the longest of three things alone.

    These are to start its kernels in a graph, to move its bytes, and to do its floating-point operations at the
    fraction of the peak rate that large layers achieve.

    Attributes:
        precision: The precision whose peak rate it has, as `--precision` has it.
        start_seconds: The time to start a kernel.
        bytes_per_second: The bytes that it moves in a second.
        flops_per_second: The peak rate of floating-point operations.
        convolution_fraction: The fraction of the peak rate that convolutions achieve.
        product_fraction: The fraction that all else achieves, as products of matrices.
    """

    precision: str
    start_seconds: float
    bytes_per_second: float
    flops_per_second: float
    convolution_fraction: float
    product_fraction: float

    def compute_seconds(self, operations: Iterable[OperationCount]) -> float:
        """Computes the time of operations one after the other."""
        seconds = 0.0
        for operation in operations:
            achieved_fraction = self.product_fraction
            if "convolution" in operation.name:
                achieved_fraction = self.convolution_fraction
            seconds_to_start = operation.kernels * self.start_seconds
            seconds_to_move = operation.bytes / self.bytes_per_second
            seconds_to_compute = operation.flops / (achieved_fraction * self.flops_per_second)
            seconds += max(seconds_to_start, seconds_to_move, seconds_to_compute)
        return seconds


# The rates are those of a large copy and a large matrix product; the other values are assumptions.
H100 = GPUModel(
    precision="float32",
    start_seconds=1.5e-6,
    bytes_per_second=3.0e12,
    flops_per_second=51e12,
    convolution_fraction=0.35,
    product_fraction=0.5,
)
