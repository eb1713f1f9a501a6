"""Quantiles of values that are spread over ranks and micro-batches, without gathering the values.

Values are counted in logarithmic bins, 16 for each factor of two, so a quantile is accurate to
2.2%. Counts can be added up over micro-batches and ranks. Counting does not wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

BINS_PER_OCTAVE = 16
LOWEST, HIGHEST = -40, 24
"""The bins cover the powers of two from 2^-40 (9e-13) to 2^24 (1.7e7). Smaller values are counted
in the first bin, which represents 0, and larger values in the last bin."""
NUM_BINS = (HIGHEST - LOWEST) * BINS_PER_OCTAVE + 1


def log_histogram(values: Tensor, mask: Tensor) -> Tensor:
    """Count the non-negative values f32[...] whose mask bool[...] is true, in logarithmic bins.

    Return the number of values in each bin, i64[NUM_BINS]. NaN is counted in the last bin.
    """
    return log_histograms(values.flatten(), mask.flatten())


def log_histograms(values: Tensor, mask: Tensor) -> Tensor:
    """Return a `log_histogram` for each row of the values f32[..., n] and the mask bool[..., n]. The
    mask may also have integers, which say how often each value counts.

    The counts have the shape i64[..., NUM_BINS].
    """
    powers = values.detach().double().nan_to_num(nan=2.0**HIGHEST).log2()
    places = ((powers - LOWEST) * BINS_PER_OCTAVE).floor() + 1
    places = places.clamp(0, NUM_BINS - 1).long()
    shape = (*values.shape[:-1], NUM_BINS)
    counts = torch.zeros(shape, dtype=torch.int64, device=values.device)
    return counts.scatter_add_(-1, places, mask.long())


def quantile(counts: Sequence[int], q: float) -> float:
    """Return the q-quantile (0 to 1) of the counted values; NaN if no value was counted.

    The result is the middle of a bin on the logarithmic scale, or 0 for the first bin.
    """
    so_far = list(accumulate(counts))
    if not so_far[-1]:
        return float("nan")
    place = next(i for i, below in enumerate(so_far) if below and below >= q * so_far[-1])
    return 0.0 if place == 0 else 2.0 ** (LOWEST + (place - 0.5) / BINS_PER_OCTAVE)
