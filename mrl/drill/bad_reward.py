"""Reward functions for `mrl drill`, which raise or hang during training.

The first NUM_GOOD calls in a process succeed, because mrl tries a user's function on up to NUM_GOOD
rows before a run starts (`mrl.preflight.reward_trial`), and refuses a function that fails.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

NUM_GOOD = 4
_calls = itertools.count()


def raises(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Raise an exception on every call after the first NUM_GOOD calls."""
    if next(_calls) >= NUM_GOOD:
        raise KeyError("the drill's reward raises")
    return [0.0] * len(completions)


def hangs(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Sleep for a day on every call after the first NUM_GOOD calls."""
    if next(_calls) >= NUM_GOOD:
        time.sleep(86400)
    return [0.0] * len(completions)
