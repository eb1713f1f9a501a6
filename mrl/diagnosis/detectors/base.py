"""This module defines what detectors read (`LossTokens`) and what they return (`Finding`).

M loss tokens of a record, N all its tokens, L MoE layers, K experts a token, E experts of a layer.
d = old - rollout log-prob: trainer before the update less engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mrl.diagnosis.tokens import TokenRecord

HALF_PRECISION_GAP = 0.01
"""Mean |d| that bfloat16 alone leaves between two engines, about."""
MIN_TOKENS = 30
"""Fewer say nothing about a distribution."""
MAX_LISTED = 10
"""Samples or tokens that a finding lists."""


@dataclass(frozen=True)
class Finding:
    """A finding is one explanation of the mismatch of a step, or one fact about it."""

    name: str
    severity: float
    """A number in [0, 1]: the share of the squared mismatch that this explains, weighted by how
    large the mismatch is (0.5 where it is as large as half precision makes it)."""
    text: str
    """One sentence with the numbers."""
    where: dict[str, Any] = field(default_factory=dict)
    """JSON-able: samples, tokens, layers, experts, or what the fault is about."""
    is_cause: bool = False
    """Whether it names a fault; the others describe."""


@dataclass(frozen=True)
class LossTokens:
    """The loss tokens of a record whose log-probs are finite on both sides."""

    record: TokenRecord

    @cached_property
    def index(self) -> Tensor:
        """i64[M]: the place of each in the record."""
        record = self.record
        finite = record.old_logprobs.isfinite() & record.rollout_logprobs.isfinite()
        chosen = record.loss_mask & finite
        # The first token of a sample has no log-prob, and row t-1 would be another sample's.
        chosen[record.cu_seqlens[:-1]] = False
        return chosen.nonzero().squeeze(1)

    @cached_property
    def old(self) -> Tensor:
        """f64[M]."""
        return self.record.old_logprobs[self.index].double()

    @cached_property
    def d(self) -> Tensor:
        """f64[M]: old - rollout log-prob."""
        return self.old - self.record.rollout_logprobs[self.index].double()

    @cached_property
    def entropy(self) -> Tensor:
        """f64[M]: of the distribution that the token was drawn from."""
        return self.record.entropy[self.index].double()

    @cached_property
    def sample(self) -> Tensor:
        """i64[M]: the sample of each, as a place in the record's `sample_ids`."""
        return self.sample_of(self.index)

    def sample_of(self, places: Tensor) -> Tensor:
        """Return the sample number i64[n] of tokens i64[n] of the record."""
        ends = self.record.cu_seqlens[1:].contiguous()
        return torch.searchsorted(ends, places, right=True)

    @cached_property
    def routes(self) -> Tensor | None:
        """i64[M, L, K]: the experts that made each token's log-prob, the captured ones where there
        are any; None without routes.

        Row t routes token t, and the log-prob of token t comes out of row t - 1.
        """
        record = self.record
        if record.expert_ids is None or record.native_ids is None:
            return None
        captured, native = (ids[self.index - 1].long() for ids in
                            (record.expert_ids, record.native_ids))  # fmt: skip
        return torch.where(captured >= 0, captured, native)

    @cached_property
    def mean_abs(self) -> float:
        """Mean |d|."""
        return float(self.d.abs().mean()) if len(self.d) else 0.0

    @cached_property
    def square_sum(self) -> float:
        """Sum of d^2."""
        return float(self.d.square().sum())

    def severity(self, share: float) -> float:
        """Return the severity of what explains `share` of the mismatch; see `Finding.severity`."""
        return min(1.0, max(0.0, share)) * self.mean_abs / (self.mean_abs + HALF_PRECISION_GAP)


def excess_share(square: Tensor, inside: Tensor) -> float:
    """The share of sum(square) that would be gone if tokens `inside` (bool[M]) were like the others."""
    total = float(square.sum())
    if not inside.any() or inside.all() or total == 0:
        return 0.0
    usual = float(square[~inside].mean())
    return max(0.0, float(square[inside].sum()) - usual * int(inside.sum())) / total
