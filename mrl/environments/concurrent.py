"""Episodes of several sample groups that run concurrently in the same worker processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from mrl.environments.base import Observation, StepResult
from mrl.environments.episodes import EpisodeFailed, Start
from mrl.environments.runner import EnvironmentRunner

T = TypeVar("T")


class ConcurrentEpisodes:
    """Runs the episodes of one sample group, in one thread, on a runner that several groups share.

    The class implements `Episodes`. Each group has episode numbers of its own. Do not call
    `EnvironmentRunner.reset` while groups are running.
    """

    def __init__(self, runner: EnvironmentRunner) -> None:
        self.config = runner.config
        self._runner = runner
        self._of_runner: dict[int, int] = {}
        """The runner's episode number for each episode number of this group."""
        self.num_failed = 0
        """The number of this group's episodes that have failed."""

    def reset(
        self, starts: Mapping[int, Start], *, step_samples: int
    ) -> dict[int, Observation | EpisodeFailed | None]:
        """End this group's earlier episodes and begin the episodes `starts`. See `Episodes`."""
        self.end(list(self._of_runner))
        self._of_runner = self._runner.new_numbers(starts)
        chosen = {self._of_runner[number]: start for number, start in starts.items()}
        begun = self._runner.begin(chosen, step_samples=step_samples)
        return {n: self._counted(begun[each]) for n, each in self._of_runner.items()}

    def step(self, actions: Mapping[int, str]) -> dict[int, StepResult | EpisodeFailed]:
        """Pass the policy's text to each episode in `actions`. See `Episodes`."""
        results = self._runner.step({self._of_runner[n]: text for n, text in actions.items()})
        return {n: self._counted(results[self._of_runner[n]]) for n in actions}

    def end(self, numbers: Collection[int]) -> None:
        """End the episodes `numbers`. See `Episodes`."""
        self._runner.end([self._of_runner[number] for number in numbers])

    def count_failure(self, reason: str) -> None:
        """Count one more failed episode, both here and in the runner. See `Episodes`."""
        self.num_failed += 1
        self._runner.count_failure(reason)

    def _counted(self, result: T) -> T:
        self.num_failed += isinstance(result, EpisodeFailed)
        return result
