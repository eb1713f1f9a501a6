"""Reference of `mrl::seeded_sample`: the formula of SGLang's `multinomial_with_seed`, in torch.

The reference computes logarithms with torch, as SGLang does, so it draws exactly SGLang's tokens.
`mrl.kernels.seeded_sample` calls it for the few rows that its own kernel cannot decide, mostly because
they depend on the last bits of a logarithm.

Dimensions: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

UINT32 = 0xFFFFFFFF


def seeded_sample(
    scores: Tensor, seeds: Tensor, positions: Tensor, *, are_probs: bool = False
) -> Tensor:
    """Return i64[B]: for each row, the first token whose log-prob plus Gumbel noise is the largest.

    The arguments are those of `mrl.kernels.seeded_sample`.
    """
    logprobs = torch.log(scores) if are_probs else scores
    columns = torch.arange(scores.shape[1], device=scores.device)
    uniform = murmur_hash32(seeds, positions, columns).to(torch.float64) / UINT32
    # The bounds are SGLang's: a uniform number of exactly 0 or 1 must not give an infinite Gumbel.
    uniform.log_().clamp_(min=torch.finfo(torch.float64).min, max=-(2.0**-32)).neg_()
    gumbel = uniform.log_().neg_()
    return torch.argmax(gumbel.add_(logprobs.to(torch.float64)), dim=1)


def murmur_hash32(seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Return i64[B, V]: the 32-bit MurmurHash3 of each (seed, position, column).

    Entry [b, v] hashes `seeds[b]`, `positions[b]` and `columns[v]`. seeds: i64[B]. positions:
    int[B]. columns: int[V]. The values equal those of SGLang's triton kernel. Products wrap modulo
    2**64, which does not change the low 32 bits.
    """
    seeds = seeds.to(torch.int64)
    state = torch.zeros_like(seeds)
    state = _mix(state, seeds & UINT32)
    state = _mix(state, (seeds >> 32) & UINT32)
    state = _mix(state, positions.to(torch.int64) & UINT32)
    state = _mix(state[:, None], columns.to(torch.int64)[None, :] & UINT32)
    state = state ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & UINT32
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & UINT32
    return state ^ (state >> 16)


def _mix(state: Tensor, block: Tensor) -> Tensor:
    block = _rotate((block * 0xCC9E2D51) & UINT32, 15)
    state = _rotate(state ^ ((block * 0x1B873593) & UINT32), 13)
    return (state * 5 + 0xE6546B64) & UINT32


def _rotate(value: Tensor, bits: int) -> Tensor:
    return ((value << bits) | (value >> (32 - bits))) & UINT32
