"""reasoning-gym's tasks in several turns: a wrong answer is told so, and another may follow.

For rows written by `python -m mrl.data.reasoning_gym`; `environment.max_turns` is how many answers
there may be.
"""

from __future__ import annotations

from typing import Any

from mrl.environments.base import StepResult
from mrl.rewards.reasoning_gym import reward as score

FEEDBACK = "That is not right. Try again."


class Environment:
    def __init__(self, feedback: str = FEEDBACK, retry_factor: float = 1.0) -> None:
        """An answer is worth `retry_factor` times what it had been worth a turn before."""
        self._feedback = feedback
        self._retry_factor = retry_factor
        self._factor = 1.0
        self._best = 0.0
        self._row: dict[str, Any] = {}

    def reset(self, prompt: Any, seed: int, /, **columns: Any) -> None:
        """The prompt is the question: nothing follows it."""
        self._row = {"prompts": [prompt], **{name: [value] for name, value in columns.items()}}

    def step(self, action: str) -> StepResult:
        """Score this answer in [0, 1] by the verifier. Rewards add up to the best answer's.

        The episode is done with a full score.
        """
        raw = score(completions=[action], **self._row)[0]
        assert raw is not None
        worth = self._factor * raw
        gain = max(0.0, worth - self._best)
        self._best += gain
        self._factor *= self._retry_factor
        return StepResult(self._feedback, gain, done=raw >= 1.0)
