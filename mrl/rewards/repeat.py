"""Scores the long-tailed toy task of `mrl/data/repeat.py`: a letter, as often as the prompt asks
for."""

from __future__ import annotations

from typing import Any


def reward(
    prompts: list[Any],
    completions: list[str],
    *,
    completion_ids: list[list[int]],
    **columns: list[Any],
) -> list[float | None]:
    """Return the share of right letters, in full for a length within a factor of two of what was asked.

    Beyond that it falls as the factor grows: to be short, or to go on for ever, is no way out. Tokens
    are counted, not characters: special ones leave no text.
    """
    rewards: list[float | None] = []
    for prompt, completion, ids in zip(prompts, completions, completion_ids, strict=True):
        letter, times = prompt[0], int(prompt[2:].rstrip("="))
        length = max(1, len(ids) - 1)  # less the end token
        closeness = min(length, times) / max(length, times)
        rewards.append(completion.count(letter) / length * min(1.0, 2 * closeness))
    return rewards
