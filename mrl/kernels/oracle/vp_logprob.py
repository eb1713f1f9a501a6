"""Reference log-probs and entropies over the full vocabulary, in fp64."""

from __future__ import annotations

import torch
from torch import Tensor


def vp_logprob(
    logits: Tensor, labels: Tensor, mask: Tensor | None = None, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return (logprobs f64[T], entropy f64[T]) for logits [T, V] of any float dtype.

    Both are 0 at masked rows.
    """
    keep = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask.bool()
    log_p = (logits[keep].double() / temperature).log_softmax(-1)
    chosen = log_p.gather(1, labels[keep].unsqueeze(1)).squeeze(1)
    product = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * log_p)
    zeros = torch.zeros(len(labels), dtype=torch.float64, device=logits.device)
    return zeros.masked_scatter(keep, chosen), zeros.masked_scatter(keep, -product.sum(-1))
