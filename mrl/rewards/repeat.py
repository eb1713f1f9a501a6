"""The reward of the long-tailed toy task "repeat a letter as often as requested"
(`mrl/data/repeat.py`)."""

from __future__ import annotations

from typing import Any


def reward(
    prompts: list[Any],
    completions: list[str],
    *,
    completion_ids: list[list[int]],
    **columns: list[Any],
) -> list[float | None]:
    """Return the share of the completion's tokens that are the letter in the prompt.

    The share is reduced if the length is more than twice or less than half the requested length.
    The further off the length is, the larger the reduction, so neither a very short nor an endless
    response pays off. The length is counted in tokens (without the end token), not in
    characters, because special tokens have no text.
    """
    rewards: list[float | None] = []
    for prompt, completion, ids in zip(prompts, completions, completion_ids, strict=True):
        letter, times = prompt[0], int(prompt[2:].rstrip("="))
        length = max(1, len(ids) - 1)  # without the end token
        closeness = min(length, times) / max(length, times)
        rewards.append(completion.count(letter) / length * min(1.0, 2 * closeness))
    return rewards
