"""Reward functions for `mrl drill`, which raise or hang during training.

mrl tries a user's function on a few rows before a run starts (`mrl.preflight.reward_trial`), and
refuses a function that fails. So the calls of this trial succeed, which are known by the completions
TRIAL.
"""

from __future__ import annotations

import time
from typing import Any

TRIAL = {"I do not know.", ""}
"""Every call of the trial has both completions; a group of a policy hardly ever does."""


def raises(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Raise an exception on every call but those of the trial."""
    if not TRIAL.issubset(completions):
        raise KeyError("the drill's reward raises")
    return [0.0] * len(completions)


def hangs(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Sleep for a day on every call but those of the trial."""
    if not TRIAL.issubset(completions):
        time.sleep(86400)
    return [0.0] * len(completions)
