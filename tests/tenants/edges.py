"""Random bodies of `sample`, at the edges of what a session may ask for."""

from __future__ import annotations

import random
from typing import Any


def random_body(draw: random.Random, context_len: int) -> dict[str, Any]:
    """Return a body of `sample` for a model of 128 tokens, much of it at or beyond a limit."""
    whole = context_len
    edge = [0, 1, 2, 57, 58, 59, 62, 63, 64, 65, 127, 128, 129, 1 << 31, 1 << 40, -1, -2]
    size = draw.choice([1, 2, 30, *range(whole - 12, whole + 2)])
    tokens = [
        draw.choice([0, 1, 5, 77, 127, 128]) if draw.random() < 0.02 else 9 for _ in range(size)
    ]
    body: dict[str, Any] = {
        "prompts": [tokens] * draw.choice([1, 1, 2]),
        "n": draw.choice([1, 1, 3]),
        "max_tokens": draw.choice(
            [1, 2, 6, whole - size, max(1, whole - 1 - size), whole + 1 - size, 0]
        ),
    }
    some = {
        "min_tokens": lambda: draw.choice([0, 1, body["max_tokens"], body["max_tokens"] + 1, -1]),
        "temperature": lambda: draw.choice([0, 1e-30, 1e-6, 1.1e-6, 0.7, 1e6, 3e38, -1.0]),
        "top_p": lambda: draw.choice([1e-45, 1e-30, 0.1, 0.999, 1.0, 0.0, 1.1]),
        "top_k": lambda: draw.choice(edge),
        "stop": lambda: draw.choice([["x"], ["a", "b" * 1000], [""], ["é\x00"], ["y"] * 33]),
        "stop_token_ids": lambda: draw.choice(
            [[0], [127], [128], list(range(64)), list(range(65)), [3] * 200, list(range(128))]
        ),
        "prompt_logprobs": lambda: draw.choice([True, False]),
        "top_prompt_logprobs": lambda: draw.choice([0, 1, 20, 21, -1]),
        "seed": lambda: draw.choice([0, (1 << 53) - 1, 1 << 53, -1]),
    }
    return body | {name: make() for name, make in some.items() if draw.random() < 0.3}
