"""This detector finds captured routes that belong to a neighbouring token.

Row t of the captured routes is compared with row t - s of the trainer's own choices, for shifts s from
-2 to 2. Where routes are replayed, wrong ones change what deeper routers see; the first MoE layer has
no replayed layer before it, so that its choices are the trainer's in any case. The layer that gains
most is taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.diagnosis.detectors.base import MIN_TOKENS, Finding, LossTokens
from mrl.diagnosis.tokens import TokenRecord

SHIFTS = (-2, -1, 1, 2)
MIN_GAIN = 0.1
"""The gain in agreement, as a share of the K choices."""
MIN_Z = 8.0
MAX_ROWS = 16384
"""The number of evenly spaced tokens taken of a larger record: enough to tell, and much faster."""


@dataclass(frozen=True)
class Fit:
    """A fit says how much better the routes of one layer agree when they are moved."""

    shift: int
    layer: int
    """Place among the L layers."""
    here: float
    """Share of the K choices that agree where they are, and when moved by `shift`."""
    moved: float
    z: float


def detect(tokens: LossTokens) -> Finding | None:
    record = tokens.record
    if record.expert_ids is None or record.native_ids is None:
        return None
    fits = [fit for shift in SHIFTS for fit in _fits(record, shift)]
    best = max(fits, key=lambda fit: fit.moved - fit.here, default=None)
    if best is None or best.moved - best.here < MIN_GAIN or best.z < MIN_Z:
        return None
    also = {fit.layer for fit in fits if fit.shift == best.shift and fit.z > MIN_Z}
    number = record.layer_numbers[best.layer]
    token = f"t{-best.shift:+d}"
    return Finding(
        name="shifted_routes",
        severity=tokens.severity(best.moved - best.here),
        text=(
            f"captured routes are off by {abs(best.shift)} token(s): in layer {number}, "
            f"{best.here:.0%} of row t agree with the trainer at t, {best.moved:.0%} at {token}; "
            f"so in {len(also)} of {len(record.layer_numbers)} MoE layers"
        ),
        where={
            "shift": best.shift,
            "layers": sorted(record.layer_numbers[i] for i in also),
            "agreement": best.here,
            "agreement_shifted": best.moved,
        },
        is_cause=True,
    )


def _fits(record: TokenRecord, shift: int) -> list[Fit]:
    """One a layer, over the rows that have a neighbour at `shift` within their sample."""
    captured, native = record.expert_ids, record.native_ids
    assert captured is not None
    assert native is not None
    number = torch.arange(record.num_tokens)
    sample = torch.searchsorted(record.cu_seqlens[1:].contiguous(), number, right=True)
    other = (number - shift).clamp(0, max(0, record.num_tokens - 1))
    valid = (sample == sample[other]) & (other == number - shift)
    valid &= (captured[:, :, 0] >= 0).any(1) & (native[other, :, 0] >= 0).any(1)
    step = max(1, int(valid.sum()) // MAX_ROWS)
    rows, others = number[valid][::step], other[valid][::step]
    if len(rows) < MIN_TOKENS:
        return []
    here = _agreement(captured[rows], native[rows])
    moved = _agreement(captured[rows], native[others])
    gain = moved - here
    error = gain.std(0) / math.sqrt(len(rows))
    z = gain.mean(0) / error.clamp(min=1e-12)
    return [
        Fit(shift, layer, float(here[:, layer].mean()), float(moved[:, layer].mean()), float(z[layer]))
        for layer in range(here.shape[1])
    ]  # fmt: skip


def _agreement(a: Tensor, b: Tensor) -> Tensor:
    """f64[n, L]: the share of the K choices of `a` [n, L, K] that are among those of `b`."""
    return (a.unsqueeze(-1) == b.unsqueeze(-2)).any(-1).double().mean(-1)
