"""Rounds of a run by the engine, timed by their parts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from fedcli.core.federation import Federation
from fedcli.data.dataset import Dataset
from fedcli.runs.autotune import MAX_PASSES, autotune, peak_memory, reset_peak_memory, until_captured
from fedcli.runs.machine import machine_settings
from fedcli.runs.prepare import prepare
from fedcli.runs.resolve import Setup
from fedcli.runs.rounds import one_round


class RoundSeconds(NamedTuple):
    """The seconds of the parts of a round, and of the test after it; 0 where none follows."""

    data: float  # to draw batches
    train: float
    aggregate: float  # all else that the method does
    test: float

    @property
    def around_training(self) -> float:
        """The seconds before and after local training."""
        return self.data + self.aggregate

    @property
    def without_test(self) -> float:
        """The seconds of the round alone."""
        return self.train + self.around_training


class EngineRounds:
    """Rounds of a run by the engine.

    Attributes:
        setup: The run.
        fed: Its federation.
        dataset: Its images.
        state: The method's state after the rounds so far.
        peak_bytes: The most memory until the engine was warmed up, without forked processes.
    """

    def __init__(self, setup: Setup, fed: Federation, dataset: Dataset):
        self.setup = setup
        self.fed = fed
        self.dataset = dataset
        self.state: Any = setup.method.init(fed, setup.method_config)
        self.peak_bytes = 0

    def run_round(self, number: int) -> RoundSeconds:
        """Runs a round, and tests its model if a test follows; returns what its parts took."""
        self.state, entry = one_round(self.setup, self.fed, self.state, self.fed.cohort(number))
        seconds = entry["seconds"]
        return RoundSeconds(
            data=seconds["data"],
            train=seconds["train"],
            aggregate=seconds["aggregate"],
            test=seconds["evaluate"],
        )

    def warm_up(self, number: int) -> None:
        """Runs a round once, or until all its steps are replays of graphs."""
        if self.fed.engine.graphs is None:
            self.run_round(number)
        else:
            for _ in until_captured(self.fed.engine, MAX_PASSES):
                self.run_round(number)
        self.peak_bytes = peak_memory(self.setup.device)


@contextmanager
def warmed_up_rounds(setup: Setup, number: int) -> Iterator[EngineRounds]:
    """Prepares a run and warms up its engine by a round.

    Inside, the process has the settings that it would have in the run.
    """
    reset_peak_memory(setup.device)
    dataset, _, fed = prepare(setup)
    with machine_settings(fed):
        autotune(fed)
        rounds = EngineRounds(setup, fed, dataset)
        rounds.warm_up(number)
        yield rounds
