"""Warn about rows that are valid but probably unintended: duplicates and non-finite values."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mrl.preflight.reward_columns import is_not_finite
from mrl.types import Prompt


def check_rows(prompts: Iterable[Prompt], warn: Callable[[str], None]) -> None:
    """Call `warn(text)` once for all duplicate rows, and once per column with non-finite values."""
    first: dict[int, Prompt] = {}
    copies: list[tuple[Prompt, Prompt]] = []
    odd: dict[str, list[Prompt]] = {}
    num_prompts = 0
    for prompt in prompts:
        num_prompts += 1
        key = hash((prompt.source_name, prompt.token_ids.numpy().tobytes(), repr(prompt.columns)))
        if key in first:
            copies.append((prompt, first[key]))
        else:
            first[key] = prompt
        for name, value in prompt.columns.items():
            if is_not_finite(value):
                odd.setdefault(name, []).append(prompt)
    if copies:
        copy, original = copies[0]
        warn(
            f"{copy.source} is the same row as {original.source}, and {len(copies)} of {num_prompts} "
            "rows are such copies: they are trained on more often; remove them unless this is intended"
        )
    for name, rows in odd.items():
        warn(
            f"{rows[0].source}: the column `{name}` is not finite ({len(rows)} of {num_prompts} rows); "
            "a reward that reads it gets NaN or infinity"
        )
