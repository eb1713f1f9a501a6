"""Reference, in fp64, of the log-probs under a softmax over each row's kept tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def truncated_logprob(
    logits: Tensor, labels: Tensor, kept: Sequence[Sequence[int]], *, temperature: float = 1.0
) -> Tensor:
    """Return f64[T]: the log-prob of each label under the softmax over the kept tokens of its row.

    logits: [T, V] in any float dtype. labels: i64[T], each one of the row's kept tokens. kept: the ids
    of the kept tokens of each row.
    """
    log_p = (logits.double() / temperature).log_softmax(-1)
    found = [
        row[label] - row[torch.tensor(list(tokens))].logsumexp(0)
        for row, label, tokens in zip(log_p, labels.tolist(), kept, strict=True)
    ]
    return torch.stack(found) if found else log_p.sum(-1)
