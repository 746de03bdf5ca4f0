"""What `fedcli bench` times by a name: a workload beside the plain loop, or a method under its own protocol."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedcli import registry
from fedcli.bench import speed, workloads
from fedcli.bench.timings import MethodTiming, WorkloadTiming
from fedcli.errors import UserError, unknown
from fedcli.runs.resolve import Setup, default_options, default_protocol, resolve
from fedcli.userfiles import names_user_file

METHOD_DATASET = "cifar10"  # of methods under their own protocols


class WorkloadCase(NamedTuple):
    """A workload that is timed beside the plain loop."""

    name: str
    setup: Setup

    def time(self, repeats: int, progress: Callable[[str], Any]) -> WorkloadTiming:
        """Times its last rounds."""
        return speed.time_workload(self.name, self.setup, repeats, progress)


class MethodCase(NamedTuple):
    """A method that is timed under its own protocol, without the plain loop."""

    name: str  # of the protocol
    setup: Setup

    def time(self, repeats: int, progress: Callable[[str], Any]) -> MethodTiming:
        """Times its last rounds."""
        return speed.time_method(self.name, self.setup, repeats, progress)


BenchCase = WorkloadCase | MethodCase


def find_case(name: str, method: str, options: Mapping[str, Any]) -> BenchCase:
    """Finds what to time by a name, and resolves its run.

    Args:
        name: The name of a workload, or the name or file of a method.
        method: The name or file of the method that a workload is trained by.
        options: The options of the run that are given, by name.
    """
    workload = workloads.find_workload(name)
    if workload is not None:
        return WorkloadCase(workload.name, workloads.prepare_workload(workload, method, **options))
    if name in registry.methods() or names_user_file(name):
        setup = _resolve_own_run(name, options)
        return MethodCase(setup.protocol.name, setup)
    known = ", ".join(workloads.NAMES)
    raise unknown("workload", name, workloads.NAMES, f"there are {known}, and methods.")


def _resolve_own_run(name: str, options: Mapping[str, Any]) -> Setup:
    """Resolves the run of a method under its own protocol for `METHOD_DATASET`."""
    method = registry.find_method(name)
    protocol = default_protocol(method, METHOD_DATASET)
    if not default_options(protocol, METHOD_DATASET, method.name).options["backbone"]:
        raise UserError(
            f"'{name}' cannot be timed by its own protocol, which has no network for {METHOD_DATASET} (got "
            f"{protocol.name}); time it on a workload: 'fedcli bench w1 --method {name}'."
        )
    return resolve(method, {"dataset": METHOD_DATASET, **options}, need_data=False)
