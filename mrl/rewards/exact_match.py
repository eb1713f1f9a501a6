r"""Compares the final answer exactly: 1 or 0.

Where the answer is looked for, in this order: `\boxed{...}`, `<answer>` tags, after `####`, the last
line (`mrl/rewards/answers.py`). Both sides are compared without case, spaces at the ends, `$ ... $`,
`\text{}` and a final full stop; numbers by value: `1,234.50` is `1234.5`, `+7` is `7`. Fractions, units
and algebra are `math_verify`'s.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from mrl.rewards.answers import final_answer, gold_answer

NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?")
WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")


def normal(answer: str) -> str | Decimal:
    """What is compared: a number where the text is one, otherwise the text without its dress."""
    text = WRAPPED.sub(r"\1", answer).replace("\u2212", "-").replace("\\,", "")
    text = text.strip().strip("$*").strip().removesuffix(".")
    if NUMBER.fullmatch(text) and any(char.isdigit() for char in text):
        return Decimal(text.replace(",", ""))
    return " ".join(text.split()).casefold()


def reward(
    prompts: list[Any],
    completions: list[str],
    *,
    answer: list[Any],
    **columns: list[Any],
) -> list[float | None]:
    """1.0 where the completion's final answer is the row's; None where the row has none."""
    rewards: list[float | None] = []
    for completion, gold in zip(completions, answer, strict=True):
        if gold is None or gold == "":
            rewards.append(None)
            continue
        is_right = normal(final_answer(completion)) == normal(gold_answer(gold))
        rewards.append(float(is_right))
    return rewards
