r"""A reward of 1 if the final answer matches the row's answer exactly, else 0.

The final answer is the first of these that exists: the content of `\boxed{...}`, the content of
`<answer>` tags, the text after `####`, or the last line (`mrl/rewards/answers.py`). Case, surrounding
spaces, `$ ... $`, `\text{}` and a final full stop are ignored. Numbers are compared by value, so
`1,234.50` equals `1234.5`, and `+7` equals `7`. For fractions, units and algebra use `math_verify`.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from mrl.rewards.answers import final_answer, gold_answer

NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?")
WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")


def comparable(answer: str) -> str | Decimal:
    """Convert an answer to the form in which two answers are compared.

    A number is returned as a Decimal. Any other answer is returned as a string in lower case,
    without formatting.
    """
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
    """Return 1.0 if the completion's final answer matches the row's answer, else 0.0; None if the row
    has no answer."""
    rewards: list[float | None] = []
    for completion, gold in zip(completions, answer, strict=True):
        if gold is None or gold == "":
            rewards.append(None)
            continue
        is_right = comparable(final_answer(completion)) == comparable(gold_answer(gold))
        rewards.append(float(is_right))
    return rewards
