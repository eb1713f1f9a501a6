"""Log-probs of a truncated distribution: a softmax over the kept tokens of a row.

    log p(y) - log sum_{s in S} p(s) = x_y - log sum_{s in S} exp x_s

Here `x = logit / temperature`, y is the label, and S are the tokens that the engine kept when it
sampled (`mrl.sampling_mask`). If g is the gradient with respect to the log-prob, the gradient with
respect to x_s is `g (1[s = y] - p_S(s))` for s in S, where p_S is the softmax over S, and 0 for all
other tokens. The largest logit of S is subtracted from the other logits before
any rounding, so large logits do not reduce the accuracy.

Under tensor parallelism each kept token's logit is on one rank. An all-reduce of c x K numbers, to
which the other ranks contribute zeros, gives every rank the logits of all kept tokens. So log-probs
are bit-identical on any number of ranks.

Dimensions: c rows, K the largest number of kept tokens of a row, V_loc vocabulary columns of this
tensor-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class KeptLogits:
    """This rank's logits of the kept tokens, for a chunk of rows."""

    values: Tensor
    """f32[c, K]: the logits of the kept tokens; 0 if another rank has the token's column, or if the
    slot is padding."""
    columns: Tensor
    """i64[c, K]: the index of each kept token's column among this rank's columns; arbitrary if
    `here` is false."""
    here: Tensor
    """bool[c, K]: whether the kept token's column is on this rank."""
    temperature: float

    @staticmethod
    def of(logits: Tensor, kept: Tensor, first_column: int, temperature: float) -> KeptLogits:
        """Gather the kept tokens' logits from `logits`.

        logits: [c, V_loc], this rank's logits in any float dtype, not divided by the temperature.
        kept: i64[c, K], the kept tokens of each row, padded with -1. first_column: the token id of
        this rank's first column.
        """
        columns = kept - first_column
        here = (kept >= 0) & (columns >= 0) & (columns < logits.shape[1])
        columns = columns.clamp(0, logits.shape[1] - 1)
        values = torch.where(here, logits.gather(1, columns).float(), 0.0)
        return KeptLogits(values, columns, here, temperature)

    def logprobs(
        self, kept: Tensor, labels: Tensor, group: ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        """Return the labels' log-probs f32[c], and the normalisers f32[c, 2] for `add_gradient`.

        All ranks of `group`, the tensor-parallel ranks, must call this together. kept: as given to
        `of`. labels: i64[c]. The log-prob is NaN for a label that is not among the kept tokens of its
        row.

        The first normaliser of a row is its largest kept logit. With `x = logit / temperature`, the
        second is the log-sum-exp of x over the kept tokens, minus the x of the largest kept logit.
        """
        values = self.values
        if group is not None and group.size() > 1:
            values = values.contiguous().clone()
            dist.all_reduce(values, group=group)
        top = F.pad(values.masked_fill(kept < 0, -torch.inf), (0, 1), value=-torch.inf).amax(1)
        log_sum = self._relative(values, top).masked_fill(kept < 0, -torch.inf).logsumexp(1)
        chosen = kept == labels.unsqueeze(1)
        label = torch.where(chosen, values, 0.0).sum(1).double()
        found = (label - top.double()) / self.temperature - log_sum.double()
        return torch.where(chosen.any(1), found, torch.nan).float(), torch.stack((top, log_sum), 1)

    def add_gradient(
        self,
        grad_logits: Tensor,
        kept: Tensor,
        labels: Tensor,
        normalisers: Tensor,
        grad: Tensor,
    ) -> None:
        """Add the gradient with respect to this rank's logits to `grad_logits` [c, V_loc], in place.

        kept, labels: as given to `logprobs`. normalisers: f32[c, 2], as `logprobs` returned them.
        grad: f32[c], the gradient with respect to the log-probs.
        """
        top, log_sum = normalisers.unbind(1)
        chosen = (kept == labels.unsqueeze(1)).float()
        p = (self._relative(self.values, top) - log_sum.unsqueeze(1)).exp()
        change = grad.unsqueeze(1) * (chosen - p) / self.temperature
        change = torch.where(self.here, change, 0.0).to(grad_logits.dtype)
        # Each column on this rank appears once among the kept tokens; all other slots add 0.
        grad_logits.scatter_add_(1, self.columns, change)

    def _relative(self, values: Tensor, top: Tensor) -> Tensor:
        """Return f32[c, K]: `(values - top) / temperature`."""
        return (values - top.unsqueeze(1)) * (1.0 / self.temperature)
