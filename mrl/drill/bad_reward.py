"""Reward functions that misbehave, for `mrl drill`."""

from __future__ import annotations

import time
from typing import Any, NoReturn


def raises(prompts: list[str], completions: list[str], **columns: Any) -> NoReturn:
    """Raise on every call."""
    raise KeyError("the drill's reward raises")


def hangs(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Sleep for a day."""
    time.sleep(86400)
    return [0.0] * len(completions)
