"""The game of mrl/environments/guess_letter.py in an environment that waits before each answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from mrl.environments import StepResult
from mrl.environments.guess_letter import Environment as GuessLetter


class Environment:
    """Waits `wait_s` seconds in each step, times the row's column `slowness`.

    `record` is a file in which the largest number of episodes is kept that have begun and not ended.
    """

    num_open = most_open = 0

    def __init__(self, wait_s: float, record: str = "", **arguments: Any) -> None:
        self._game = GuessLetter(**arguments)
        self._wait_s, self._record = wait_s, record

    def reset(self, prompt: Any, seed: int, slowness: float = 1.0, **columns: Any) -> None:
        self._game.reset(prompt, seed)
        self._wait_s *= slowness
        Environment.num_open += 1
        if Environment.num_open > Environment.most_open:
            Environment.most_open = Environment.num_open
            if self._record:
                Path(self._record).write_text(str(Environment.most_open))

    async def step(self, action: str) -> StepResult:
        await asyncio.sleep(self._wait_s)
        return self._game.step(action)

    def close(self) -> None:
        Environment.num_open -= 1
