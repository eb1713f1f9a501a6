"""The long-tailed toy task of `mrl/data/repeat.py`: a letter, as often as the prompt asks for it."""

from __future__ import annotations

from typing import Any


def reward(
    prompts: list[Any],
    completions: list[str],
    *,
    completion_ids: list[list[int]],
    **columns: list[Any],
) -> list[float | None]:
    """Right letters, as far as they were asked for / the larger of what was asked for and given.

    1 for exactly the answer. Too short, too long and wrong letters all cost their share: to be short,
    or to go on for ever, is no way out. Tokens are counted, not characters: special ones leave no text.
    """
    rewards: list[float | None] = []
    for prompt, completion, ids in zip(prompts, completions, completion_ids, strict=True):
        letter, times = prompt[0], int(prompt[2:].rstrip("="))
        right = min(completion.count(letter), times)
        rewards.append(right / max(times, len(ids) - 1))  # less the end token
    return rewards
