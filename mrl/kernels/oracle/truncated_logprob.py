"""Reference log-probs over each row's kept tokens, in fp64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def truncated_logprob(
    logits: Tensor, labels: Tensor, kept: Sequence[Sequence[int]], *, temperature: float = 1.0
) -> Tensor:
    """Return f64[T]: `log p(label) - log p(kept tokens)` for logits [T, V] of any float dtype."""
    log_p = (logits.double() / temperature).log_softmax(-1)
    found = [
        row[label] - row[torch.tensor(list(tokens))].logsumexp(0)
        for row, label, tokens in zip(log_p, labels.tolist(), kept, strict=True)
    ]
    return torch.stack(found) if found else log_p.sum(-1)
