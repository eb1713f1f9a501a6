"""A toy game: the policy guesses a letter, and then the right letter is revealed.

A policy that copies the revealed letter gets the full reward from its second turn on. A toy model
(`mrl/toy_model.py`) learns this within minutes with the recipe launch/recipes/multi_turn.yaml.
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
        """Set up an episode of `turns` guesses. The reward of each guess is at most `1 / turns`.

        One of `letters` is the right letter. The environment's answer repeats that letter `repeats`
        times, which helps a small model to learn to copy it.
        """
        self._turns = turns
        self._letters = letters
        self._repeats = repeats
        self._letter = ""
        self._guesses = 0

    def reset(self, prompt: Any, seed: int, /, **columns: Any) -> None:
        """Choose the right letter at random from the seed.

        The prompt explains the game, so no observation follows it.
        """
        self._letter = random.Random(seed).choice(self._letters)

    def step(self, action: str) -> StepResult:
        """Reveal the right letter.

        The reward is the share of `action`'s characters that are this letter, divided by the number
        of turns.
        """
        self._guesses += 1
        share = action.count(self._letter) / len(action) if action else 0.0
        answer = self._letter * self._repeats
        return StepResult(answer, share / self._turns, done=self._guesses == self._turns)
