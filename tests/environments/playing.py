"""Plays episodes of an EnvironmentRunner for tests: each call waits for all of its answers."""

from __future__ import annotations

import queue
from collections.abc import Collection, Mapping
from typing import Any

from mrl.environments.episodes import EpisodeFailed, Start
from mrl.environments.runner import EnvironmentRunner
from tests.waiting import LIMIT_S


class Playing:
    """Episodes under numbers that the test chooses. Failures are counted, as a rollout counts them."""

    def __init__(self, runner: EnvironmentRunner, *, step_samples: int = 1000) -> None:
        self.runner, self._step_samples = runner, step_samples
        self.numbers: dict[int, int] = {}
        self._answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    def begin(self, starts: Mapping[int, Start]) -> dict[int, Any]:
        """End earlier episodes of these numbers, and begin others."""
        self.end([n for n in starts if n in self.numbers])
        for n, start in starts.items():
            self.numbers[n] = self.runner.begin(start, lambda a, n=n: self._answers.put((n, a)))
        return self._all(starts)

    def step(self, actions: Mapping[int, str]) -> dict[int, Any]:
        for n, action in actions.items():
            self.ask(n, action)
        return self._all(actions)

    def ask(self, n: int, action: str) -> None:
        self.runner.step(self.numbers[n], action, lambda a: self._answers.put((n, a)))

    def next(self) -> tuple[int, Any]:
        """The next answer to `ask`, and of which episode it is. Failures are not counted."""
        return self._answers.get(timeout=LIMIT_S)

    def end(self, numbers: Collection[int]) -> None:
        for n in numbers:
            self.runner.end(self.numbers.pop(n), lambda n=n: self._answers.put((n, None)))
        self._all(numbers)

    def _all(self, numbers: Collection[int]) -> dict[int, Any]:
        answers = dict(self._answers.get(timeout=LIMIT_S) for _ in numbers)
        assert answers.keys() == set(numbers)
        for answer in answers.values():
            if isinstance(answer, EpisodeFailed):
                self.runner.count_failure(answer.reason, self._step_samples)
            if isinstance(answer, Exception):
                raise answer
        return answers
