"""The demo's reward, which takes a while, so that engines can start while a run has few steps."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from mrl.rewards import first_char

VARIABLE = "MRL_ELASTIC_PACE"
"""Names a file with the seconds that the reward of a group takes, which may change meanwhile."""


def reward(prompts: list[Any], completions: list[str], **columns: Any) -> list[float | None]:
    """Return the rewards of `mrl.rewards.first_char`."""
    if file := os.environ.get(VARIABLE):
        time.sleep(float(Path(file).read_text()))
    return first_char.reward(prompts, completions, **columns)
