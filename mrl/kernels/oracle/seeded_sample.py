"""Reference of `mrl::seeded_sample`: the formula of SGLang's `multinomial_with_seed`, in torch.

Its logarithms are torch's own, so it gives the bits of SGLang's sampler. `mrl.kernels.seeded_sample`
calls it for the few rows that depend on the last bits of a logarithm.

Dimensions: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

UINT32 = 0xFFFFFFFF


def seeded_sample(
    scores: Tensor, seeds: Tensor, positions: Tensor, *, are_probs: bool = False
) -> Tensor:
    """Return the first maximum i64[B] of log-prob + Gumbel noise over each row of scores [B, V].

    The arguments have the shapes that `mrl.kernels.seeded_sample` expects.
    """
    logprobs = torch.log(scores) if are_probs else scores
    columns = torch.arange(scores.shape[1], device=scores.device)
    uniform = murmur_hash32(seeds, positions, columns).to(torch.float64) / UINT32
    # The bounds are SGLang's: a uniform number of exactly 0 or 1 must not give an infinite Gumbel.
    uniform.log_().clamp_(min=torch.finfo(torch.float64).min, max=-(2.0**-32)).neg_()
    gumbel = uniform.log_().neg_()
    return torch.argmax(gumbel.add_(logprobs.to(torch.float64)), dim=1)


def murmur_hash32(seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Compute MurmurHash3 of (seed i64[B], position[B], column[V]): values below 2**32 as i64[B, V].

    The same values as SGLang's triton kernel. Products wrap modulo 2**64, which keeps the low 32
    bits right.
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
