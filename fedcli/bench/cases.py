"""What `fedcli bench` times by a name: a workload, or a method under its own protocol."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedcli import registry
from fedcli.bench import workloads
from fedcli.bench.workloads import Workload
from fedcli.data import datasets
from fedcli.errors import UserError, unknown
from fedcli.runs.resolve import Setup, default_options, default_protocol, resolve
from fedcli.userfiles import names_user_file

METHOD_DATASET = "cifar10"  # of methods under their own protocols
PLAIN_METHOD = "fedavg"  # the one that the plain loop does


@dataclass(frozen=True, kw_only=True)
class BenchCase:
    """A run whose rounds are timed.

    Attributes:
        setup: The run.
        workload: The workload that it is of; None for a method under its own protocol.
    """

    setup: Setup
    workload: Workload | None = None

    @property
    def name(self) -> str:
        """The name of the workload or of the protocol."""
        return self.setup.protocol.name if self.workload is None else self.workload.name

    @property
    def has_plain_side(self) -> bool:
        """Whether the plain loop can do the same rounds."""
        return self.workload is not None and self.setup.method is registry.methods()[PLAIN_METHOD]

    def check(self, repeats: int) -> None:
        """Refuses what could not be timed after minutes.

        Args:
            repeats: The number of rounds to time.

        Raises:
            UserError: The run has too few rounds, or its public images are not on this machine; random ones take the
                place of clients' images only.
        """
        num_rounds = self.setup.config.rounds
        most = num_rounds - 1
        if most == 0:
            raise UserError(
                f"the run of {self.name} has one round, which warms up, so that none is left to time; name another."
            )
        if repeats > most:
            raise UserError(
                f"--repeats {repeats} is too many for {self.name}: its run has {num_rounds} rounds, one of which warms "
                f"up; give at most {most}."
            )
        public_dataset = self.setup.config.public_dataset
        if public_dataset is not None:
            datasets.refuse_unavailable(public_dataset)


def find_case(name: str, method: str, options: Mapping[str, Any]) -> BenchCase:
    """Finds what to time by a name, and resolves its run.

    Args:
        name: The name of a workload, or the name or file of a method; names in any case.
        method: The name or file of the method that a workload is trained by.
        options: The options of the run that are given, by name.
    """
    workload = workloads.find_workload(name)
    if workload is not None:
        return BenchCase(setup=workloads.prepare_workload(workload, method, **options), workload=workload)
    methods = registry.methods()
    if registry.in_declared_case(name, methods) in methods or names_user_file(name):
        return BenchCase(setup=_resolve_own_run(name, options))
    workload_names = ", ".join(workloads.NAMES)
    raise unknown("workload", name, [*workloads.NAMES, *methods], f"there are {workload_names}, and methods.")


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
