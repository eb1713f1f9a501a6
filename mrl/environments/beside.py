"""This module plays the episodes of several groups beside each other in the same processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from mrl.environments.base import Observation, StepResult
from mrl.environments.episodes import EpisodeFailed, Start
from mrl.environments.runner import EnvironmentRunner

T = TypeVar("T")


class EpisodesBeside:
    """Plays the episodes of one group, for one thread: an `Episodes` with numbers of its own.

    Do not call `EnvironmentRunner.reset` beside it.
    """

    def __init__(self, runner: EnvironmentRunner) -> None:
        self.config = runner.config
        self._runner = runner
        self._of_runner: dict[int, int] = {}
        """The runner's number of each episode."""
        self.num_failed = 0
        """The number of its episodes that failed."""

    def reset(
        self, starts: Mapping[int, Start], *, step_samples: int
    ) -> dict[int, Observation | EpisodeFailed | None]:
        """Begin these episodes. See `Episodes`."""
        self.end(list(self._of_runner))
        self._of_runner = self._runner.new_numbers(starts)
        chosen = {self._of_runner[number]: start for number, start in starts.items()}
        begun = self._runner.begin(chosen, step_samples=step_samples)
        return {n: self._counted(begun[each]) for n, each in self._of_runner.items()}

    def step(self, actions: Mapping[int, str]) -> dict[int, StepResult | EpisodeFailed]:
        """Give these episodes the policy's text."""
        results = self._runner.step({self._of_runner[n]: text for n, text in actions.items()})
        return {n: self._counted(results[self._of_runner[n]]) for n in actions}

    def end(self, numbers: Collection[int]) -> None:
        """End these episodes. See `Episodes`."""
        self._runner.end([self._of_runner[number] for number in numbers])

    def count_failure(self, reason: str) -> None:
        """Count a failure here and in the runner. See `Episodes`."""
        self.num_failed += 1
        self._runner.count_failure(reason)

    def _counted(self, result: T) -> T:
        self.num_failed += isinstance(result, EpisodeFailed)
        return result
