"""This module computes log-probs of a truncated distribution: a softmax over the kept tokens of a row.

log p(y) - log sum_{s in S} p(s) = x_y - log sum_{s in S} exp x_s, with x = logit / temperature and S
the tokens that the engine kept (`mrl.sampling_mask`). The gradient for x_s is g (1[s = y] - p_S(s))
inside S and 0 elsewhere.

Under tensor parallelism each kept token's x is on one rank; one sum over the ranks of c x K numbers, to
which the other ranks add zeros, gives every rank all of them. Log-probs are therefore the same bits on
any number of ranks.

Dimensions: c rows, K the most kept tokens of a row, V_loc this tensor-parallel rank's columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class KeptLogits:
    """`KeptLogits` holds the x of a chunk's kept tokens, as far as this rank has them."""

    x: Tensor
    """f32[c, K]: 0 where another rank has the column, or where there is no token."""
    columns: Tensor
    """i64[c, K]: of this rank's logits; any column where `here` is false."""
    here: Tensor
    """bool[c, K]: whether the token's column is on this rank."""

    @staticmethod
    def of(logits: Tensor, kept: Tensor, first_column: int, temperature: float) -> KeptLogits:
        """Gather them from logits [c, V_loc] for kept i64[c, K], -1 behind a row's tokens."""
        columns = kept - first_column
        here = (kept >= 0) & (columns >= 0) & (columns < logits.shape[1])
        columns = columns.clamp(0, logits.shape[1] - 1)
        x = logits.gather(1, columns).float() * (1.0 / temperature)
        return KeptLogits(torch.where(here, x, 0.0), columns, here)

    def logprobs(
        self, kept: Tensor, labels: Tensor, group: ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        """Return the labels' log-probs f32[c] and the logarithm of the kept sum f32[c]. A collective.

        A label that is not among the kept tokens of its row gives NaN.
        """
        x = self.x
        if group is not None and group.size() > 1:
            x = x.contiguous().clone()
            dist.all_reduce(x, group=group)
        lse = x.masked_fill(kept < 0, -torch.inf).logsumexp(1)
        chosen = kept == labels.unsqueeze(1)
        of_label = torch.where(chosen, x, 0.0).sum(1)
        return torch.where(chosen.any(1), of_label - lse, torch.nan), lse

    def add_gradient(
        self,
        grad_logits: Tensor,
        kept: Tensor,
        labels: Tensor,
        lse: Tensor,
        grad: Tensor,
        temperature: float,
    ) -> None:
        """Add the gradient of the log-probs, of which f32[c] is `grad`, to grad_logits [c, V_loc]."""
        chosen = (kept == labels.unsqueeze(1)).float()
        change = grad.unsqueeze(1) * (chosen - (self.x - lse.unsqueeze(1)).exp()) / temperature
        change = torch.where(self.here, change, 0.0).to(grad_logits.dtype)
        # A column appears once among those that are here; the others add 0.
        grad_logits.scatter_add_(1, self.columns, change)
