"""reasoning-gym tasks with several turns: after a wrong answer the policy may try again.

The data must be written by `python -m mrl.data.reasoning_gym`. `environment.max_turns` limits the
number of answers.
"""

from __future__ import annotations

from typing import Any

from mrl.environments.base import StepResult
from mrl.rewards.reasoning_gym import reward as score

FEEDBACK = "That is not right. Try again."


class Environment:
    def __init__(self, feedback: str = FEEDBACK, retry_factor: float = 1.0) -> None:
        """Set up an episode.

        `feedback` is the observation after each answer that is not right. The score of an answer is
        multiplied by `retry_factor` once for each earlier answer of the episode.
        """
        self._feedback = feedback
        self._retry_factor = retry_factor
        self._factor = 1.0
        self._best = 0.0
        self._row: dict[str, Any] = {}

    def reset(self, prompt: Any, seed: int, /, **columns: Any) -> None:
        """Store the row. The prompt is the question, so no observation follows it."""
        self._row = {"prompts": [prompt], **{name: [value] for name, value in columns.items()}}

    def step(self, action: str) -> StepResult:
        """Score the answer in [0, 1] with the verifier. The episode is done after a full score.

        For the reward, the score is first multiplied by `retry_factor` once for each earlier answer.
        The reward is the amount by which the product exceeds the best product so far, or 0. The
        rewards of an episode thus add up to its best product.
        """
        raw = score(completions=[action], **self._row)[0]
        assert raw is not None
        worth = self._factor * raw
        gain = max(0.0, worth - self._best)
        self._best += gain
        self._factor *= self._retry_factor
        return StepResult(self._feedback, gain, done=raw >= 1.0)
