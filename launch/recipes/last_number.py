"""The reward of launch/recipes/smollm.yaml: 1 if the last number of an answer is the right one."""

from __future__ import annotations

import re
from typing import Any

NUMBER = re.compile(r"-?\d+")


def reward(
    prompts: list[Any], completions: list[str], *, answer: list[str], **columns: Any
) -> list[float]:
    found = [NUMBER.findall(completion)[-1:] for completion in completions]
    return [float(last == [right]) for last, right in zip(found, answer, strict=True)]
