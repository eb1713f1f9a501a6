"""Reduce statistics and per-sample sums over all ranks, so that every rank gets the same numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.system.histogram import NUM_BINS, quantile
from mrl.types import Max, Mean, MicroBatch, Quantiles, Statistic, Statistics, Sum
from parallel.mesh import Mesh, gather_objects


def merge(parts: list[Statistics]) -> Statistics:
    """Merge the statistics of several micro-batches of one rank. The result has the keys of all
    micro-batches.

    Raises TypeError if a key has statistics of different types, such as a Mean and a Sum.
    """
    merged: Statistics = {}
    for part in parts:
        for key, value in part.items():
            known = merged.get(key)
            merged[key] = value if known is None else _add(key, known, value)
    return merged


def _add(key: str, a: Statistic, b: Statistic) -> Statistic:
    if isinstance(a, Mean) and isinstance(b, Mean):
        return Mean(a.total + b.total, a.count + b.count)
    if isinstance(a, Sum) and isinstance(b, Sum):
        return Sum(a.value + b.value)
    if isinstance(a, Max) and isinstance(b, Max):
        return Max(a.value.maximum(b.value))
    if isinstance(a, Quantiles) and isinstance(b, Quantiles) and a.reported == b.reported:
        return Quantiles(a.counts + b.counts, a.reported)
    raise TypeError(f"statistic {key!r} is of two kinds: {type(a).__name__}, {type(b).__name__}")


def reduce_statistics(stats: Statistics) -> dict[str, float]:
    """Reduce statistics over all ranks, in rank order and in fp64; return one number per key.

    A collective. Ranks may have different keys, and the result has the keys of all ranks. A mean
    with a count of 0 becomes NaN, which says that it was not measured.
    """
    everyone = gather_objects(_plain(stats))
    result: dict[str, float] = {}
    for key in dict.fromkeys(key for part in everyone for key in part):
        parts = [part[key] for part in everyone if key in part]
        kind, values = parts[0][0], [numbers for _, *numbers in parts]
        if kind == "Max":
            found = [value for (value,) in values]
            result[key] = math.nan if any(map(math.isnan, found)) else max(found)
        elif kind == "Quantiles":
            result |= _quantiles(values)
        else:
            total, *count = (math.fsum(column) for column in zip(*values, strict=True))
            divisor = count[0] if count else 1.0
            result[key] = total / divisor if divisor else math.nan
    return result


def _quantiles(parts: list[list[Any]]) -> dict[str, float]:
    """Return a dict from metric key to the value of a quantile over all ranks.

    Each of `parts` comes from one rank, and is a pair of lists: (histogram bin, count) for each bin
    that is not empty, and (metric key, quantile between 0 and 1) for each key of the result.
    """
    total = [0] * NUM_BINS
    for counts, _ in parts:
        for place, count in counts:
            total[place] += count
    return {key: quantile(total, q) for key, q in parts[0][1]}


def _plain(stats: Statistics) -> dict[str, tuple[Any, ...]]:
    """Convert each statistic to a tuple of its type name and its plain numbers. All scalars are read
    together, so the host waits for a GPU only once."""
    scalars = [tensor for value in stats.values() for tensor in _scalars(value)]
    numbers = iter(_read(scalars))
    plain: dict[str, tuple[Any, ...]] = {}
    for key, value in stats.items():
        if isinstance(value, Quantiles):
            counts = value.counts.tolist()
            found = ("Quantiles", [(i, n) for i, n in enumerate(counts) if n], value.reported)
        else:
            found = (type(value).__name__, *(next(numbers) for _ in _scalars(value)))
        plain[key] = found
    return plain


def _scalars(value: Statistic) -> tuple[Tensor, ...]:
    if isinstance(value, Quantiles):
        return ()
    return (value.total, value.count) if isinstance(value, Mean) else (value.value,)


def _read(scalars: list[Tensor]) -> list[float]:
    """Return the scalars as Python floats (fp64), which are exact for fp32 values and for counts
    below 2^53."""
    by_device: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(scalars):
        by_device.setdefault(tensor.device, []).append(place)
    found = [0.0] * len(scalars)
    for places in by_device.values():
        mine = [scalars[place].detach().double().reshape(()) for place in places]
        for place, value in zip(places, torch.stack(mine).tolist(), strict=True):
            found[place] = value
    return found


def sample_sums(
    columns: Sequence[Tensor], batches: Sequence[MicroBatch], num_samples: int, mesh: Mesh
) -> Tensor:
    """Sum each column over the loss tokens of each sample.

    `columns` holds a tensor [N, C] for each micro-batch: C columns for the N packed tokens. Return
    f64[S, C] on the CPU; row i is the sum for the sample with `sample_id` i, of the S samples of
    the step. All tokens of a sample are on one data-parallel rank, so the sum over ranks adds only
    zeros to a row: every rank gets the same bits, however the step was split.

    A collective. `columns` is read only on the ranks that report losses, and may be empty on other
    ranks.
    """
    width = torch.tensor([columns[0].shape[1] if columns else 0], device=mesh.device)
    if mesh.dims.world > 1:
        dist.all_reduce(width, dist.ReduceOp.MAX)
    total = torch.zeros(num_samples, int(width), dtype=torch.float64, device=mesh.device)
    if mesh.reports_loss:
        for batch, values in zip(batches, columns, strict=True):
            assert batch.sample_ids is not None
            device = values.device
            wanted = torch.where(batch.loss_mask.to(device)[:, None], values.double(), 0.0)
            lengths = batch.cu_seqlens.to(device).diff().long()
            sums = torch.segment_reduce(wanted, "sum", lengths=lengths)
            known = batch.sample_ids.to(device) >= 0  # not padding
            total[batch.sample_ids.to(device)[known]] = sums[known]
    if mesh.dims.world > 1:
        dist.all_reduce(total)
    return total.cpu()
