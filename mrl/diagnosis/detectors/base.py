"""Define the input of the detectors (`LossTokens`) and their result (`Finding`).

Dimensions: M loss tokens of a record, N tokens of a record, L MoE layers, K experts per token, E
experts of a layer. `d = old - rollout` is the trainer's log-prob before the update minus the engine's
log-prob.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mrl.diagnosis.tokens import TokenRecord

HALF_PRECISION_GAP = 0.01
"""The approximate mean of `|old - rollout|`, the absolute difference of the log-probs, between two
correct implementations that compute in bfloat16."""
MIN_TOKENS = 30
"""Detectors that judge the distribution of a value over tokens return no finding if there are fewer
tokens than this."""
MAX_LISTED = 10
"""The largest number of tokens or samples that a finding, `worst_tokens` or `worst_samples`
lists."""


@dataclass(frozen=True)
class Finding:
    """An explanation of the mismatch of a step, or a fact that describes it."""

    name: str
    severity: float
    """A number in [0, 1], usually from `LossTokens.severity`. The severity grows with the mismatch,
    and with the share of the mismatch that the finding explains."""
    text: str
    """The finding as an English phrase, with its numbers."""
    where: dict[str, Any] = field(default_factory=dict)
    """The samples, tokens, layers, experts or weight versions that the finding is about, and the
    numbers in its text, as JSON-able values."""
    is_cause: bool = False
    """Whether the finding is a fault that causes the mismatch. If not, the finding only
    describes the mismatch."""


@dataclass(frozen=True)
class LossTokens:
    """The loss tokens of a record for which trainer and engine both have finite log-probs.

    The first token of a sample is never included, because the model does not predict it.
    """

    record: TokenRecord

    @cached_property
    def index(self) -> Tensor:
        """i64[M]: the index of each loss token among the N tokens of the record."""
        record = self.record
        finite = record.old_logprobs.isfinite() & record.rollout_logprobs.isfinite()
        chosen = record.loss_mask & finite
        # The first token of a sample has no log-prob, and row t - 1 belongs to another sample.
        chosen[record.cu_seqlens[:-1]] = False
        return chosen.nonzero().squeeze(1)

    @cached_property
    def old(self) -> Tensor:
        """f64[M]: the trainer's log-probs before the update."""
        return self.record.old_logprobs[self.index].double()

    @cached_property
    def d(self) -> Tensor:
        """f64[M]: the trainer's log-prob minus the engine's log-prob."""
        return self.old - self.record.rollout_logprobs[self.index].double()

    @cached_property
    def entropy(self) -> Tensor:
        """f64[M]: the entropy, in nats, of the trainer's distribution for each token."""
        return self.record.entropy[self.index].double()

    @cached_property
    def sample(self) -> Tensor:
        """i64[M]: the sample of each token, as an index into the record's `sample_ids`."""
        return self.sample_of(self.index)

    def sample_of(self, places: Tensor) -> Tensor:
        """Return the sample of each token in `places`, as an index into the record's `sample_ids`.

        places: i64[n], indices of tokens in the record. The result is i64[n].
        """
        ends = self.record.cu_seqlens[1:].contiguous()
        return torch.searchsorted(ends, places, right=True)

    @cached_property
    def routes(self) -> Tensor | None:
        """i64[M, L, K]: the experts that computed each token's log-prob; None without routes.

        The log-prob of token t is computed in row t - 1, so these are the experts of row t - 1: the
        captured experts if the engine reported some for that row, and otherwise the choice of the
        trainer's routers.
        """
        record = self.record
        if record.expert_ids is None or record.native_ids is None:
            return None
        captured, native = (ids[self.index - 1].long() for ids in
                            (record.expert_ids, record.native_ids))  # fmt: skip
        return torch.where(captured >= 0, captured, native)

    @cached_property
    def mean_abs(self) -> float:
        """The mean of `|d|` over the loss tokens; 0 without loss tokens."""
        return float(self.d.abs().mean()) if len(self.d) else 0.0

    @cached_property
    def square_sum(self) -> float:
        """The sum of `d^2` over the loss tokens. The detectors call this sum the squared mismatch."""
        return float(self.d.square().sum())

    def severity(self, share: float) -> float:
        """Return the severity of a finding that explains `share` of the squared mismatch.

        The severity is `share`, clipped to [0, 1], times `mean_abs / (mean_abs +
        HALF_PRECISION_GAP)`. The second factor is 0.5 for the mismatch that bfloat16 alone causes.
        """
        return min(1.0, max(0.0, share)) * self.mean_abs / (self.mean_abs + HALF_PRECISION_GAP)


def layer_experts(routes: Tensor, num_experts: int) -> Tensor:
    """Return `layer * E + expert` for each expert id: one numbering of the experts of all layers.

    `routes` and the result are i64[M, L, K]; `layer` is the index among the L layers. num_experts: E.
    """
    return routes + torch.arange(routes.shape[1]).view(1, -1, 1) * num_experts


def excess_share(square: Tensor, inside: Tensor) -> float:
    """Return the share of `square.sum()` that the larger values of the tokens in `inside` cause.

    It is the share by which the sum would fall if the mean over the tokens in `inside` were equal
    to the mean over all other tokens. The result is 0 if the mean inside is not larger, or if all
    or no tokens are inside.

    square: f64[M], one value per loss token. inside: bool[M].
    """
    total = float(square.sum())
    if not inside.any() or inside.all() or total == 0:
        return 0.0
    usual = float(square[~inside].mean())
    return max(0.0, float(square[inside].sum()) - usual * int(inside.sum())) / total
