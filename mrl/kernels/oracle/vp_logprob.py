"""Reference log-probs and entropies over the full vocabulary, in fp64."""

from __future__ import annotations

import torch
from torch import Tensor


def vp_logprob(
    logits: Tensor, labels: Tensor, mask: Tensor | None = None, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the log-probs of the labels and the entropies of the softmax, f64[T] each, in nats.

    logits: [T, V] in any float dtype. labels: i64[T]. mask: bool[T] or u8[T]; both results are 0 in
    rows where the mask is false. None: all rows are used.
    """
    keep = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask.bool()
    log_p = (logits[keep].double() / temperature).log_softmax(-1)
    chosen = log_p.gather(1, labels[keep].unsqueeze(1)).squeeze(1)
    product = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * log_p)
    zeros = torch.zeros(len(labels), dtype=torch.float64, device=logits.device)
    return zeros.masked_scatter(keep, chosen), zeros.masked_scatter(keep, -product.sum(-1))
