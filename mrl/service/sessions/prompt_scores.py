"""The log-probs that the engine gives to the tokens of prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from mrl.engines.base import PolicyEndpoint
from mrl.engines.top_logprobs import ReturnsTop
from mrl.errors import InputError


class PromptScores(NamedTuple):
    """The log-probs of one prompt of P tokens at temperature 1. The first token has none."""

    logprobs: list[float | None]
    """P log-probs of the prompt's own tokens; None for the first."""
    top: list[list[tuple[int, float]] | None]
    """P lists of (token, log-prob) of the likeliest tokens, the likeliest first; None for the first.
    Empty if they were not asked for."""


def score_prompts(
    endpoint: PolicyEndpoint, prompts: Sequence[Tensor], num_top: int
) -> list[PromptScores]:
    """Return the log-probs of prompts i64[P], with `num_top` of the likeliest tokens at each place.
    The engine must be awake."""
    if not prompts:
        return []
    if num_top and not isinstance(endpoint, ReturnsTop):
        raise InputError(
            "this engine does not return the likeliest tokens of prompts; leave top_prompt_logprobs out"
        )
    if not num_top:
        found = endpoint.sequence_logprobs(prompts)
        return [PromptScores(_without_first(each.tolist()), []) for each in found]
    assert isinstance(endpoint, ReturnsTop)
    return [
        PromptScores(_without_first(logprobs.tolist()), [None, *top])
        for logprobs, top in endpoint.top_logprobs(prompts, num_top)
    ]


def _without_first(logprobs: list[float]) -> list[float | None]:
    return [None, *(None if math.isnan(each) else each for each in logprobs[1:])]
