"""The likeliest tokens in the place of each token of a sequence, which an engine may be able to
return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

TopLogprobs = tuple[Tensor, list[list[tuple[int, float]]]]
"""The log-probs f32[T] of a sequence, and for each of its tokens but the first a list of (token,
log-prob) of the likeliest tokens in its place, the likeliest first."""


@runtime_checkable
class ReturnsTop(Protocol):
    """A `mrl.engines.base.PolicyEndpoint` that can return the likeliest tokens."""

    def top_logprobs(self, sequences: Sequence[Tensor], num_top: int) -> list[TopLogprobs]:
        """Return what `PolicyEndpoint.sequence_logprobs` does, with the `num_top` likeliest tokens in
        the place of each token."""
        ...
