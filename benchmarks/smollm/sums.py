"""Write the prompts: sums and differences of two digits in words, from reasoning-gym's chain_sum.

The model sees one solved example, and answers in its own words until it ends its turn.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from mrl.data.reasoning_gym import task_rows

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SIGNS = {"+": "plus", "-": "minus"}
NUM_HELD_OUT = 40
EXAMPLE = (
    {"role": "user", "content": "What is two plus three?"},
    {"role": "assistant", "content": "two plus three = 5"},
)
_PROBLEM = re.compile(r"problem: (.*) =")


def in_words(question: str) -> str:
    """Return `four minus one` for a question of chain_sum about `4 - 1`."""
    found = _PROBLEM.search(question)
    assert found is not None, question
    return " ".join(SIGNS.get(part) or DIGITS[int(part)] for part in found[1].split())


def rows() -> list[dict[str, Any]]:
    """Return each problem once, in an order that is always the same."""
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    answers = {
        in_words(row["prompt"]): row["answer"] for row in task_rows("chain_sum", 1000, 1, params)
    }
    problems = sorted(answers)
    random.Random(0).shuffle(problems)
    return [
        {
            "prompt": [*EXAMPLE, {"role": "user", "content": f"What is {problem}?"}],
            "answer": answers[problem],
        }
        for problem in problems
    ]


def write(folder: Path) -> None:
    """Write train.jsonl and, with problems that are not in it, held_out.jsonl."""
    found = rows()
    parts = {"held_out": found[:NUM_HELD_OUT], "train": found[NUM_HELD_OUT:]}
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text)
