"""Rounds of a run by the engine, timed by their parts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from fedcli.core import evaluation
from fedcli.core.federation import Federation
from fedcli.data.dataset import Dataset
from fedcli.runs.autotune import MAX_PASSES, autotune, peak_memory, reset_peak_memory, until_captured
from fedcli.runs.machine import machine_settings
from fedcli.runs.prepare import prepare
from fedcli.runs.resolve import Setup
from fedcli.runs.rounds import one_round


class RoundSeconds(NamedTuple):
    """The seconds of the parts of a round, and of the test after it."""

    data: float  # to draw batches
    train: float
    aggregate: float  # all else that the method does
    test: float | None  # None where no test follows

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
        peak_bytes: The most memory until the engine was warmed up, without forked processes; 0 before.
    """

    def __init__(self, setup: Setup, fed: Federation, dataset: Dataset):
        self.setup = setup
        self.fed = fed
        self.dataset = dataset
        self.state: Any = setup.method.init(fed, setup.method_config)
        self.peak_bytes = 0

    def run_round(self, round_index: int) -> RoundSeconds:
        """Runs a round, and tests its model if a test follows; returns what its parts took."""
        cohort = self.fed.cohort(round_index)
        self.state, entry = one_round(self.setup, self.fed, self.state, cohort)
        seconds = entry["seconds"]
        return RoundSeconds(
            data=seconds["data"],
            train=seconds["train"],
            aggregate=seconds["aggregate"],
            test=seconds["evaluate"] if self.fed.is_tested(round_index) else None,
        )

    def warm_up(self, round_index: int) -> None:
        """Runs a round and a test once, or the round until all its steps are replays of graphs.

        No more than `MAX_PASSES` times, also where the last of them had another step than replays.
        """
        if self.fed.engine.graphs is None:
            self.run_round(round_index)
        else:
            for _ in until_captured(self.fed.engine, MAX_PASSES):
                self.run_round(round_index)
        if not self.fed.is_tested(round_index):
            evaluation.evaluate(self.fed, self.setup.method, self.state)
        self.peak_bytes = peak_memory(self.setup.device)


@contextmanager
def warmed_up_rounds(setup: Setup, round_index: int) -> Iterator[EngineRounds]:
    """Prepares a run and warms up its engine by a round.

    Inside, the process has the settings that it would have in the run.
    """
    reset_peak_memory(setup.device)
    prepared = prepare(setup)
    with machine_settings(prepared.fed):
        autotune(prepared.fed)
        rounds = EngineRounds(setup, prepared.fed, prepared.dataset)
        rounds.warm_up(round_index)
        yield rounds
