"""Reward functions that misbehave in training, for `mrl drill`.

The first calls of a process succeed: before a run starts, mrl tries a user's function on up to
NUM_GOOD rows (`mrl.preflight.reward_trial`), and refuses a function that fails there.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

NUM_GOOD = 4
_calls = itertools.count()


def raises(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Raise on every call but the first ones."""
    if next(_calls) >= NUM_GOOD:
        raise KeyError("the drill's reward raises")
    return [0.0] * len(completions)


def hangs(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Sleep for a day on every call but the first ones."""
    if next(_calls) >= NUM_GOOD:
        time.sleep(86400)
    return [0.0] * len(completions)
