"""Detect that captured routes are assigned to the wrong token, one or two rows off.

Row t of the captured routes is compared with row t - s of the trainer's own choices, for shifts s
from -2 to 2. The decision depends only on the layer whose agreement gains most from a shift, because
replayed wrong routes also change the inputs of the routers in deeper layers. The router of the
first MoE layer always has the right inputs, because no layer before it replays routes.
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
"""The smallest gain in agreement that is reported, as a share of the K expert choices of a row."""
MIN_Z = 8.0
MAX_ROWS = 16384
"""If at least twice this many rows can be compared, only every k-th row is compared, with k chosen
so that at least this many rows are left."""


@dataclass(frozen=True)
class Fit:
    """How well the engine's routes in one layer agree with the trainer's, with and without a shift."""

    shift: int
    layer: int
    """The index of the layer among the L MoE layers, from 0."""
    here: float
    """The share of the captured expert choices in a row t that are also in the trainer's row t."""
    moved: float
    """The share of the captured expert choices in a row t that are also in the trainer's row
    t - shift."""
    z: float
    """The gain `moved - here` in standard errors."""


def detect(tokens: LossTokens) -> Finding | None:
    """Report a shift if the engine's routes agree much better with the trainer's after the shift.

    The gain in agreement must be at least MIN_GAIN, and at least MIN_Z standard errors.
    """
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
            f"{best.here:.0%} of row t agree with the trainer at t, {best.moved:.0%} at {token}; the "
            f"same holds in {len(also)} of {len(record.layer_numbers)} MoE layers"
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
    """Return one `Fit` per layer, over the rows t for which row t - shift is in the same sample.

    Row t must have a captured route, and row t - shift must have a route of the trainer. The list
    is empty if fewer than MIN_TOKENS rows can be compared.
    """
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
    """Return f64[n, L]: the share of the K experts in `a` [n, L, K] that are also in `b` [n, L, K]."""
    return (a.unsqueeze(-1) == b.unsqueeze(-2)).any(-1).double().mean(-1)
