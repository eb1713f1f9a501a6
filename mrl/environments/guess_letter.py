"""A toy game: the policy guesses a letter, and is told which it was.

A policy that reads what it is told gets everything from its second turn on. `mrl/toy_model.py` writes
a model that learns this within minutes: launch/recipes/multi_turn.yaml.
"""

from __future__ import annotations

import random
import string
from typing import Any

from mrl.environments.base import StepResult


class Environment:
    def __init__(
        self, turns: int = 3, letters: str = string.ascii_lowercase, repeats: int = 1
    ) -> None:
        """`turns` guesses are an episode, each worth 1 / turns; one of `letters` is the right one.

        It is told `repeats` times over: a small model learns the sooner to repeat it.
        """
        self._turns = turns
        self._letters = letters
        self._repeats = repeats
        self._letter = ""
        self._guesses = 0

    def reset(self, prompt: Any, seed: int, /, **columns: Any) -> None:
        """The prompt says what the game is; the seed chooses the letter."""
        self._letter = random.Random(seed).choice(self._letters)

    def step(self, action: str) -> StepResult:
        """A guess is worth the share of its characters that are the letter."""
        self._guesses += 1
        share = action.count(self._letter) / len(action) if action else 0.0
        told = self._letter * self._repeats
        return StepResult(told, share / self._turns, done=self._guesses == self._turns)
