"""Estimates quantiles of values that lie on many ranks and micro-batches, without gathering them.

Values are counted in bins that are 1/16 octave wide, so a quantile is right to 2.2%. Counts add up
over micro-batches and ranks, and no count waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

BINS_PER_OCTAVE = 16
LOWEST, HIGHEST = -40, 24
"""Powers of two that the bins reach from and to: 9e-13 and 1.7e7. Below is the first bin, which counts
as 0; what is above is in the last."""
NUM_BINS = (HIGHEST - LOWEST) * BINS_PER_OCTAVE + 1


def log_histogram(values: Tensor, mask: Tensor) -> Tensor:
    """Count non-negative values: f32[...] where bool[...] -> i64[NUM_BINS]. NaN counts as the
    largest."""
    return log_histograms(values.flatten(), mask.flatten())


def log_histograms(values: Tensor, mask: Tensor) -> Tensor:
    """Count each row as `log_histogram` does: f32[..., n] where bool[..., n] -> i64[..., NUM_BINS]."""
    powers = values.detach().double().nan_to_num(nan=2.0**HIGHEST).log2()
    places = ((powers - LOWEST) * BINS_PER_OCTAVE).floor() + 1
    places = places.clamp(0, NUM_BINS - 1).long()
    shape = (*values.shape[:-1], NUM_BINS)
    counts = torch.zeros(shape, dtype=torch.int64, device=values.device)
    return counts.scatter_add_(-1, places, mask.long())


def quantile(counts: Sequence[int], q: float) -> float:
    """Return what a share `q` of all values does not exceed: the middle of its bin; NaN without
    values."""
    so_far = list(accumulate(counts))
    if not so_far[-1]:
        return float("nan")
    place = next(i for i, below in enumerate(so_far) if below and below >= q * so_far[-1])
    return 0.0 if place == 0 else 2.0 ** (LOWEST + (place - 0.5) / BINS_PER_OCTAVE)
