"""The gated delta rule (arXiv 2412.06464, eq. 10) for a batch of sequences, in chunks of tokens.

The state of a head is a matrix S [d, e] that starts as zero. Token t, with key k, value v, query q,
decay exp(g) <= 1 and writing strength beta, changes the state and reads from it:

    S <- exp(g) S;   S <- S + k beta (v - k^T S)^T;   output = S^T q / sqrt(d)

Queries and keys have unit length. Within a chunk, the corrections `v - k^T S` of all tokens solve one
triangular system (section 3.3), so the state is computed once for each chunk.

Dimensions: b sequences, s tokens of the longest, h value heads, d and e sizes of keys and values,
c tokens of a chunk, n chunks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""The largest number of tokens of a chunk, as in the engine's and transformers' kernels."""
NORM_EPS = 1e-6
"""The number that is added to the squared length of queries and keys."""


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor
) -> Tensor:
    """Return the outputs [b, s, h, e] for query and key [b, s, h, d], value [b, s, h, e], log_decay g
    [b, s, h] and beta [b, s, h].

    A token reads only what it and earlier tokens of its own sequence wrote, so that sequences may be
    padded at their ends. Computes in fp32, or in fp64 if the values are fp64. Differentiable.
    """
    dtype, length = value.dtype, value.shape[1]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    chunk = min(CHUNK, length)

    def chunks(x: Tensor) -> Tensor:
        """Cut [b, s, h, ...] into chunks, padded with zeros: [b, h, n, c, ...]."""
        x = x.to(wide).transpose(1, 2)
        x = F.pad(x, [0, 0] * (x.dim() - 3) + [0, -length % chunk])
        return x.unflatten(2, (-1, chunk))

    q, k = (chunks(_unit(x.to(wide))) for x in (query, key))
    v, strength = chunks(value), chunks(beta).unsqueeze(-1)
    total = chunks(log_decay).cumsum(-1)  # [b, h, n, c]: log decay since the chunk's start
    q = q * query.shape[-1] ** -0.5
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=value.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
    grown = total.exp().unsqueeze(-1)
    written = k * strength
    # Only what lies below the diagonal of the system is read; its diagonal is 1.
    system = (written @ k.mT) * between
    both = torch.cat([v * strength, written * grown], -1)
    both = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    corrections, from_state = both.split([value.shape[-1], key.shape[-1]], -1)
    scores = (q @ k.mT) * between
    q, k = q * grown, k * (total[..., -1:] - total).exp().unsqueeze(-1)
    kept = grown[..., -1:, :]
    state, outputs = None, []
    for n in range(total.shape[2]):
        new = corrections[:, :, n]
        out = 0
        if state is not None:  # it is zero before the first chunk
            new = new - from_state[:, :, n] @ state
            out = q[:, :, n] @ state
            state = state * kept[:, :, n]
        outputs.append(out + scores[:, :, n] @ new)
        added = k[:, :, n].mT @ new
        state = added if state is None else state + added
    return torch.cat(outputs, 2)[:, :, :length].transpose(1, 2).to(dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
